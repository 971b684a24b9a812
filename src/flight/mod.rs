//! A flight: one load of one key, shared by everybody who wants it.
//!
//! # States
//! ```text
//!   outcome   open ── settle (once, first wins) ──► value | failure | look again
//!   interest  the leader ── join, leave ──► leader, followers ── close, or last leave ──► CLOSED
//!   lease     queued ── begin ──► running until a moment ──► over
//!   drive     empty, or the load's future: see [`drive`]
//! ```
//! The slot word says who leads a key; a flight only carries the result to those who wait, so its order is fixed:
//! slot CAS first, then close, then the outcome, then the bookkeeping, and last the bell, with no pin held.
//!
//! # Invariants
//! - `INV-flight-1`: interest is closed only after the slot has left the flight, or by the one who takes the count
//!   to zero and then moves the slot on. So whoever finds it closed looks at the slot again, and if the flight is
//!   still there moves the slot on himself.
//! - `INV-flight-2`: no wait for somebody else's load is unbounded: each parks until its own deadline or the lease's end,
//!   then looks at the slot again.
//! - `INV-flight-3`: a flight borrows `prev`: it may be dereferenced only under the pin that read the flight from
//!   its slot.
//! - `INV-flight-4`: the first flight of a slot has the slot's own room for its value, and no other flight has.

pub(crate) mod cycle;
pub(crate) mod drive;
mod interest;
mod lease;
mod load;
#[cfg(all(test, loom))]
pub(crate) mod models;
mod registry;
pub(crate) mod wait;

use crate::clock::Moment;
use crate::error::LoadError;
use crate::primitive::atomic::{AtomicPtr, AtomicU64, Ordering};
use crate::primitive::park::Bell;
use crate::primitive::plain::{AtomicBool, AtomicU32 as PlainU32};
use crate::primitive::step::step;
use crate::primitive::waker::Rouse;
use crate::primitive::{Arc, Witness};
use drive::Drive;
use interest::Interest;
pub(crate) use interest::{Left, Waits, Who};
use lease::LeaseWord;
pub use load::LoadCause;
pub(crate) use load::{Fetch, Load, LoadFuture, Own, Running};
pub(crate) use registry::{Registry, Seat};
use std::ptr::null_mut;

/// How a flight ended, for those who wait.
#[derive(Clone)]
pub(crate) enum Outcome<V> {
    Value(V),
    Failure(LoadError),
    /// Nothing to share: each looks at the slot again, and one of them leads.
    LookAgain,
}

/// What a wait came to.
pub(crate) enum Waited<V> {
    Ended(Outcome<V>),
    /// Somebody else may lead now.
    LeaseOver,
    /// The waiter's own time is up.
    TimedOut,
}

/// How a load begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    pub(crate) cause: LoadCause,
    /// When the slot was claimed.
    pub(crate) at: Moment,
    /// Until when the load may take that begins at once; `None`: it waits for somebody to begin it.
    pub(crate) lease_end: Option<Moment>,
    /// Whether it waits on an executor's queue.
    pub(crate) queued: bool,
    /// Whether the value may go into the slot's own room (INV-flight-4).
    pub(crate) first: bool,
    /// Until when it is the one load that tries a failing source, if it is that.
    pub(crate) probe: Option<Moment>,
}

impl Claim {
    /// Whether the load is nobody's own call.
    pub(crate) fn in_background(&self) -> bool {
        self.lease_end.is_none()
    }

    /// Whether it is a `compute`'s, which decides, and says nothing about a source.
    pub(crate) fn decides(&self) -> bool {
        self.cause == LoadCause::Asked && !self.in_background()
    }

    /// Whether it begins when the task that is made for it is first polled.
    pub(crate) fn is_spawned(&self) -> bool {
        self.in_background() && !self.queued
    }
}

/// How a load has come to an end for those who count loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// By itself.
    Ended = 1,
    /// Somebody loads in its place.
    TakenOver,
    /// As `TakenOver`, and a job of an executor's is still in it.
    HangsInJob,
}

/// One load of one key. `T` is what it is to fill, `P` what was there before.
pub(crate) struct Flight<V, T, P> {
    pub(crate) target: T,
    /// What the slot held at the claim; borrowed (INV-flight-3).
    pub(crate) prev: P,
    pub(crate) claim: Claim,
    /// Whether the CAS has been done that makes this a load under way.
    under_way: AtomicBool,
    /// How widely the deadlines of what it brings are to be spread, beyond the cache's jitter: an `f32`.
    spread: PlainU32,
    /// A [`Finish`], or zero. Set by the first of two: who takes the load over, and the load's end.
    over: PlainU32,
    interest: Interest,
    lease: LeaseWord,
    /// The load, if it is a future.
    pub(crate) drive: Drive<Load<V, T, P>>,
    /// Whether the bell has been rung since there is an outcome.
    told: AtomicBool,
    /// When the keeper is to ring; `NEVER`: when somebody has asked for it.
    alarm: AtomicU64,
    /// Null while open, `LOOK_AGAIN`, or a box.
    outcome: AtomicPtr<Outcome<V>>,
    bell: Bell,
    witness: Witness,
}

/// The outcome that needs no box. No allocation has this address.
const LOOK_AGAIN: usize = 1;

impl<V, T, P> Flight<V, T, P> {
    pub(crate) fn new(target: T, prev: P, claim: Claim) -> Self {
        Self {
            target,
            prev,
            claim,
            under_way: AtomicBool::new(false),
            spread: PlainU32::new(0),
            over: PlainU32::new(0),
            interest: Interest::new(),
            lease: claim.lease_end.map_or_else(LeaseWord::queued, LeaseWord::running),
            drive: Drive::empty(),
            told: AtomicBool::new(false),
            alarm: AtomicU64::new(Moment::NEVER.nanos()),
            outcome: AtomicPtr::new(null_mut()),
            bell: Bell::new(),
            witness: Witness::new(),
        }
    }

    /// Who this is; unique among flights that exist at the same time.
    pub(crate) fn id(&self) -> cycle::FlightId {
        cycle::FlightId::of(self)
    }

    /// Spreads the deadlines of what it brings: by a factor from `(1 - spread, 1]`.
    pub(crate) fn set_spread(&self, spread: f64) {
        // Relaxed: by the leader, before the load.
        self.spread.store((spread as f32).to_bits(), Ordering::Relaxed);
    }

    pub(crate) fn spread(&self) -> f64 {
        // Relaxed: whoever ends the load comes after its leader.
        f64::from(f32::from_bits(self.spread.load(Ordering::Relaxed)))
    }

    /// The claim has been won.
    pub(crate) fn set_under_way(&self) {
        // Relaxed: for those who look at what is under way; nothing is published by it.
        self.under_way.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_under_way(&self) -> bool {
        // Relaxed: as above.
        self.under_way.load(Ordering::Relaxed)
    }

    /// Marks that the load has been taken over, or that it has ended, and tells if the other one came first.
    #[must_use]
    pub(crate) fn mark_over(&self, over: Finish) -> Option<Finish> {
        // Relaxed: settles which of two came first; nothing is published by it.
        let first = self.over.swap(over as u32, Ordering::Relaxed);
        [Finish::Ended, Finish::TakenOver, Finish::HangsInJob].into_iter().find(|over| *over as u32 == first)
    }

    /// Whether the load has been taken over, or has ended.
    pub(crate) fn is_over(&self) -> bool {
        // Relaxed: as above.
        self.over.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn is_queued(&self) -> bool {
        self.lease.is_queued()
    }

    /// Whether the load has begun; one that was taken over before never does.
    pub(crate) fn has_begun(&self) -> bool {
        self.lease.has_begun()
    }

    /// When the lease ends, if it has begun.
    pub(crate) fn lease_end(&self) -> Moment {
        self.lease.end()
    }

    /// The lease has ended by real time for one who has parked until then, whatever the clock says.
    pub(crate) fn end_lease_by_park(&self) {
        self.lease.end_by_park();
    }

    /// How many wait for the leader.
    pub(crate) fn waiters(&self) -> usize {
        self.interest.followers()
    }

    /// Whether a task waits for it, the leader included.
    pub(crate) fn has_tasks(&self) -> bool {
        self.interest.has_tasks()
    }

    /// The leader waits as a task from now on.
    pub(crate) fn leader_is_task(&self) {
        self.interest.leader_is_task();
    }

    /// Whether somebody else may lead: the lease is over, or it was settled while the slot still held it (by one who was
    /// about to take over). A load that has not begun yields only to a caller who would begin at once.
    pub(crate) fn may_be_taken_over(&self, now: Moment, at_once: bool) -> bool {
        self.witness.used();
        self.is_settled() || if self.lease.is_queued() { at_once } else { self.lease.is_over(now) }
    }

    /// Begins a queued load. `false` if somebody has taken the flight over.
    #[must_use]
    pub(crate) fn begin(&self, lease_end: Moment) -> bool {
        self.lease.begin(lease_end)
    }

    /// What a takeover does before its own CAS: ends the lease, and sends those who wait back to the slot.
    /// `false` if the slot is to be looked at again first.
    #[must_use]
    pub(crate) fn supersede(&self, now: Moment) -> bool {
        if !self.is_settled() && !self.lease.end_early(now) {
            return false;
        }
        // If another outcome came first, that is the one to look at.
        let _ = self.settle(Outcome::LookAgain);
        true
    }

    /// Closes the flight to newcomers, and tells how many wait for the leader. Only once the slot has moved on.
    pub(crate) fn close(&self) -> usize {
        self.interest.close()
    }

    /// One of those who want the value goes.
    pub(crate) fn leave(&self, who: Who) -> Left {
        self.interest.leave(who)
    }

    /// Wakes those who wait for the outcome, unless somebody has.
    pub(crate) fn tell(&self) {
        // Acquire: the ring was before; pairs with the Release below. Whoever listens since then looks at the outcome after.
        if !self.told.load(Ordering::Acquire) {
            self.ring();
            // Release: see above.
            self.told.store(true, Ordering::Release);
        }
    }

    /// Asks the keeper to ring at `when`, or soon after. Once the caller listens. Whether it was to do so later, or never.
    #[must_use]
    pub(crate) fn set_alarm(&self, when: Moment) -> bool {
        // AcqRel: the caller listens before; pairs with the swap in `is_due`.
        self.alarm.fetch_min(when.nanos(), Ordering::AcqRel) > when.nanos()
    }

    /// When the keeper is to ring.
    pub(crate) fn alarm(&self) -> Moment {
        // Relaxed: whoever sets an earlier one tells the keeper.
        Moment::from_nanos(self.alarm.load(Ordering::Relaxed))
    }

    /// Whether somebody has asked for a ring by `now`; it is then for the caller to ring.
    #[must_use]
    pub(crate) fn is_due(&self, now: Moment) -> bool {
        // Relaxed: whether there is anything to do. AcqRel: whoever has set what is taken out listens; pairs with `set_alarm`.
        self.alarm.load(Ordering::Relaxed) <= now.nanos()
            && self.alarm.swap(Moment::NEVER.nanos(), Ordering::AcqRel) <= now.nanos()
    }

    fn is_settled(&self) -> bool {
        // Relaxed: whether there is one; who reads it loads it again.
        !self.outcome.load(Ordering::Relaxed).is_null()
    }

    /// Sets the outcome; the first one wins. One that is refused comes back: its destructor is user code.
    pub(crate) fn settle(&self, outcome: Outcome<V>) -> Result<(), Box<Outcome<V>>> {
        let boxed = match outcome {
            Outcome::LookAgain => std::ptr::without_provenance_mut(LOOK_AGAIN),
            other => Box::into_raw(Box::new(other)),
        };
        step();
        // Release: publishes the value to those who wait; pairs with the Acquire in `outcome`.
        let set = self.outcome.compare_exchange(null_mut(), boxed, Ordering::Release, Ordering::Relaxed);
        if set.is_err() && boxed.addr() != LOOK_AGAIN {
            // SAFETY: boxed above, published to nobody.
            return Err(unsafe { Box::from_raw(boxed) });
        }
        Ok(())
    }

    /// Wakes those who wait. Not under a pin: the bell has a mutex of its own.
    pub(crate) fn ring(&self) {
        self.bell.ring();
    }

    fn outcome(&self) -> Option<Outcome<V>>
    where
        V: Clone,
    {
        // Acquire: the value; pairs with the Release in `settle`.
        let outcome = self.outcome.load(Ordering::Acquire);
        if outcome.addr() == LOOK_AGAIN {
            return Some(Outcome::LookAgain);
        }
        // SAFETY: null, or a box that `settle` published and that lives as long as the flight.
        unsafe { outcome.as_ref() }.cloned()
    }
}

impl<V, T, P> Drop for Flight<V, T, P> {
    fn drop(&mut self) {
        self.witness.ended();
        // Relaxed: `&mut self`; the last share was given back with Release and taken with Acquire.
        let outcome = self.outcome.load(Ordering::Relaxed);
        if !outcome.is_null() && outcome.addr() != LOOK_AGAIN {
            // SAFETY: boxed by `settle`, freed once, here.
            drop(unsafe { Box::from_raw(outcome) });
        }
    }
}

/// Progress of the load's future.
impl<V, T, P> Rouse for Flight<V, T, P>
where
    V: Send + Sync + 'static,
    T: Send + Sync + 'static,
    P: Send + Sync + 'static,
{
    fn rouse(&self) {
        if self.drive.wake() {
            self.ring();
        }
    }
}

/// A follower's place in a flight. Whoever has it leaves the flight.
#[must_use]
pub(crate) struct Ticket<V, T, P> {
    flight: Arc<Flight<V, T, P>>,
    waits: Waits,
}

impl<V, T, P> Ticket<V, T, P> {
    /// Joins. `None` if the flight is closed (INV-flight-1). `share` gives the caller's own share of the flight.
    pub(crate) fn join(
        flight: &Flight<V, T, P>,
        waits: Waits,
        share: impl FnOnce() -> Arc<Flight<V, T, P>>,
    ) -> Option<Self> {
        flight.witness.used();
        flight.interest.join(waits).then(|| Self { flight: share(), waits })
    }

    /// The flight, and who is to leave it.
    pub(crate) fn open(self) -> (Arc<Flight<V, T, P>>, Who) {
        (self.flight, Who::Follower(self.waits))
    }
}
