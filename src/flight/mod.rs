//! A flight: one load of one key, shared by everybody who wants it.
//!
//! # States
//! ```text
//!   outcome   open ── settle (once, first wins) ──► value | failure | look again
//!   interest  1 (the leader) ── join, leave ──► n ── close, or last leave ──► CLOSED
//!   lease     queued ── begin ──► running until a moment ──► over
//! ```
//! The slot word says who leads a key; a flight only carries the result to those who wait, so its order is fixed:
//! slot CAS first, then close, then the outcome, then the bookkeeping, and last the bell, with no pin held.
//!
//! # Invariants
//! - `INV-flight-1`: interest is closed only after the slot has left the flight, or by the one who takes the count
//!   to zero and then moves the slot on. So whoever finds it closed looks at the slot again, and if the flight is
//!   still there moves the slot on himself.
//! - `INV-flight-2`: no wait is unbounded: each parks until its own deadline or the lease's end, then looks at the
//!   slot again.
//! - `INV-flight-3`: a flight borrows `prev`: it may be dereferenced only under the pin that read the flight from
//!   its slot.
//! - `INV-flight-4`: the first flight of a slot has the slot's own room for its value, and no other flight has.

pub(crate) mod cycle;
mod interest;
mod lease;
#[cfg(all(test, loom))]
mod models;
mod registry;

use crate::clock::{Moment, Time};
use crate::error::LoadError;
use crate::primitive::atomic::{AtomicPtr, Ordering};
use crate::primitive::park::{Bell, Woken};
use crate::primitive::plain::AtomicBool;
use crate::primitive::step::step;
use crate::primitive::{Arc, Witness};
use interest::Interest;
pub(crate) use interest::Left;
use lease::LeaseWord;
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

/// One load of one key. `T` is what it is to fill, `P` what was there before.
pub(crate) struct Flight<V, T, P> {
    pub(crate) target: T,
    /// What the slot held at the claim; borrowed (INV-flight-3).
    pub(crate) prev: P,
    /// Whether the value may go into the slot's own room (INV-flight-4).
    pub(crate) first: bool,
    pub(crate) claimed: Moment,
    /// Whether the load was queued on an executor at first.
    pub(crate) background: bool,
    /// Whether the CAS has been done that makes this a load under way.
    under_way: AtomicBool,
    /// Set by the first of two: who takes a load over that runs, and that load's end.
    outlived: AtomicBool,
    interest: Interest,
    lease: LeaseWord,
    /// Null while open, `LOOK_AGAIN`, or a box.
    outcome: AtomicPtr<Outcome<V>>,
    bell: Bell,
    witness: Witness,
}

/// The outcome that needs no box. No allocation has this address.
const LOOK_AGAIN: usize = 1;

impl<V, T, P> Flight<V, T, P> {
    /// A flight whose load begins at once and may take until `lease_end`; `None`: its load is queued.
    pub(crate) fn new(target: T, prev: P, first: bool, claimed: Moment, lease_end: Option<Moment>) -> Self {
        Self {
            target,
            prev,
            first,
            claimed,
            background: lease_end.is_none(),
            under_way: AtomicBool::new(false),
            outlived: AtomicBool::new(false),
            interest: Interest::new(),
            lease: lease_end.map_or_else(LeaseWord::queued, LeaseWord::running),
            outcome: AtomicPtr::new(null_mut()),
            bell: Bell::new(),
            witness: Witness::new(),
        }
    }

    /// Who this is; unique among flights that exist at the same time.
    pub(crate) fn id(&self) -> cycle::FlightId {
        cycle::FlightId::new(std::ptr::from_ref(self).addr())
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

    /// Marks that the load has been taken over while it ran, or that it has ended; `true` if the other one came first.
    #[must_use]
    pub(crate) fn mark_outlived(&self) -> bool {
        // Relaxed: settles which of two came first; nothing is published by it.
        self.outlived.swap(true, Ordering::Relaxed)
    }

    pub(crate) fn is_queued(&self) -> bool {
        self.lease.is_queued()
    }

    /// How many wait for the leader.
    pub(crate) fn waiters(&self) -> usize {
        self.interest.count().saturating_sub(1)
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
        self.interest.close().saturating_sub(1)
    }

    /// One of those who want the value goes.
    pub(crate) fn leave(&self) -> Left {
        self.interest.leave()
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

/// A follower's place in a flight.
pub(crate) struct Ticket<V, T, P> {
    flight: Arc<Flight<V, T, P>>,
}

impl<V, T, P> Ticket<V, T, P> {
    /// Joins. `None` if the flight is closed (INV-flight-1). `share` gives the caller's own share of the flight.
    pub(crate) fn join(
        flight: &Flight<V, T, P>,
        share: impl FnOnce() -> Arc<Flight<V, T, P>>,
    ) -> Option<Self> {
        flight.witness.used();
        flight.interest.join().then(|| Self { flight: share() })
    }

    pub(crate) fn flight(&self) -> &Arc<Flight<V, T, P>> {
        &self.flight
    }

    /// Parks until the flight ends, its lease ends, or `deadline`, whichever comes first (INV-flight-2).
    pub(crate) fn wait(&self, time: &Time, deadline: Moment) -> Waited<V>
    where
        V: Clone,
    {
        let flight = &*self.flight;
        let mut listening = None;
        loop {
            if let Some(outcome) = flight.outcome() {
                // The one who settled may have been suspended before the bell: whoever sees it rings.
                flight.ring();
                return Waited::Ended(outcome);
            }
            let now = time.now();
            let lease_end = flight.lease.end();
            // Where both have passed, the one that came first counts: a wait that has ended must not become a load.
            if deadline <= now && deadline <= lease_end {
                return Waited::TimedOut;
            }
            if flight.lease.is_over(now) {
                return Waited::LeaseOver;
            }
            // Check, listen, check again, wait.
            let Some(ear) = listening.take() else {
                listening = Some(flight.bell.listen());
                continue;
            };
            match ear.wait(time.real_time_until(deadline.min(lease_end))) {
                Woken::Rung => {}
                // A park that ended counts as due: the clock may be coarse, and would make us spin.
                Woken::TimedOut if deadline <= lease_end => return Waited::TimedOut,
                Woken::TimedOut => {
                    flight.lease.end_by_park();
                    return Waited::LeaseOver;
                }
            }
        }
    }
}

impl<V, T, P> Drop for Ticket<V, T, P> {
    fn drop(&mut self) {
        // The leader's own interest lasts until it has moved the slot on, so a follower is never the last to leave
        // a flight that is open.
        let _ = self.flight.leave();
    }
}
