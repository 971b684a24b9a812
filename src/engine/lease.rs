//! The lease: the leader's right to end a flight, once, in one of a few ways.

use super::breaker::Verdict;
use super::{Core, Place};
use crate::clock::Moment;
use crate::error::LoadError;
use crate::flight::drive::{Put, Threads};
use crate::flight::{Finish, Load, LoadCause, LoadFuture, Outcome, Running, Seat, Waits, Who};
use crate::freshness::{Stage, Ttl};
use crate::observe::{Count, RemovalCause};
use crate::primitive::epoch::{Guard, pin};
use crate::primitive::runtime::Runtime;
use crate::primitive::step::step;
use crate::primitive::{Arc as Shared, caught};
use crate::slot::{Cell, Flight, Held, NewCell, Next, Pause, State, Weighed};
use crate::table::Linked;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Without an `error_backoff`, a failing refresh is tried ten times a second; a caller who needs a value may always try.
const REFRESH_PAUSE: Duration = Duration::from_millis(100);

/// The leader's right to end a flight. Dropped without having ended it, it abandons the flight: the slot goes back to
/// what it was, and those who wait look again.
pub(crate) struct Lease<K, V, S> {
    core: Arc<Core<K, V, S>>,
    flight: Shared<Flight<K, V>>,
    seat: Option<Seat<Flight<K, V>>>,
    /// The flight that this one has taken over from, until it is ended.
    superseded: Option<Shared<Flight<K, V>>>,
    /// When the loader was called, or the load's future was first polled, exactly.
    begun: Moment,
    /// What the load says of its source.
    verdict: Option<Verdict>,
}

/// A lease whose load waits on an executor's queue. It does not keep the cache alive: if the cache goes first, the load
/// need not run, and what it was for has gone with it. Dropped, it abandons the flight.
pub(crate) struct QueuedLease<K, V, S> {
    core: Weak<Core<K, V, S>>,
    flight: Shared<Flight<K, V>>,
    seat: Option<Seat<Flight<K, V>>>,
}

impl<K, V, S> QueuedLease<K, V, S> {
    fn lease(&mut self) -> Option<Lease<K, V, S>> {
        // The seat is good only while the cache exists.
        let (core, flight) = (self.core.upgrade()?, self.flight.clone());
        Some(Lease {
            core,
            flight,
            seat: self.seat.take(),
            superseded: None,
            begun: Moment::NEVER,
            verdict: None,
        })
    }

    /// Begins the load. `None` if it must not run: somebody has taken the flight over, the cache is gone or frozen, or its
    /// breaker has opened.
    #[must_use]
    pub(crate) fn begin(mut self) -> Option<Lease<K, V, S>> {
        let lease = self.lease()?;
        let (core, claim) = (&lease.core, &lease.flight.claim);
        let end = core.time.now().plus(core.settings.lease);
        if !core.lets_begin(claim, end) {
            return None;
        }
        if !lease.flight.begin(end) {
            core.give_probe_back(claim.probe.map(|_| end));
            return None;
        }
        Some(lease)
    }
}

impl<K, V, S> Drop for QueuedLease<K, V, S> {
    fn drop(&mut self) {
        drop(self.lease());
    }
}

/// Who polls a load's future.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// Its leader, a thread; and tasks that join.
    Thread,
    /// Its leader, a task; and others that join.
    Task,
    /// A task of its own, for a leader who waits.
    Spawned(Waits),
    /// A task that is made for several, for a leader who waits.
    SpawnedWithOthers(Waits),
    /// A task of its own, for nobody.
    OwnTask,
}

impl By {
    fn waits(self) -> Waits {
        match self {
            Self::Thread | Self::OwnTask => Waits::AsThread,
            Self::Task => Waits::AsTask,
            Self::Spawned(waits) | Self::SpawnedWithOthers(waits) => waits,
        }
    }

    fn spawned(self) -> bool {
        matches!(self, Self::Spawned(_) | Self::SpawnedWithOthers(_) | Self::OwnTask)
    }
}

/// What became of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Published {
    /// It took effect.
    Done,
    /// It was refused: the slot had moved on.
    Fenced,
}

impl<K, V, S> Lease<K, V, S> {
    /// A lease whose claim comes next. It is in the registry before anybody can join, so that a clock that is moved by
    /// hand finds all who wait; if the claim is lost, dropping the lease is all.
    pub(super) fn new(core: &Arc<Core<K, V, S>>, flight: Shared<Flight<K, V>>) -> Self {
        let seat = Some(core.flights.enter(flight.clone()));
        Self { core: core.clone(), flight, seat, superseded: None, begun: Moment::NEVER, verdict: None }
    }

    /// The lease of a load that was put into its flight, and has been taken out.
    pub(crate) fn resume(
        core: Arc<Core<K, V, S>>,
        flight: Shared<Flight<K, V>>,
        seat: Seat<Flight<K, V>>,
        begun: Moment,
    ) -> Self {
        Self { core, flight, seat: Some(seat), superseded: None, begun, verdict: None }
    }

    /// Puts the load's future into its flight, for those who wait to poll it. The place is the leader's.
    pub(crate) fn put_future(mut self, future: LoadFuture<V>, ttl: Ttl, by: By) -> Place<K, V, S> {
        let (core, flight) = (self.core.clone(), self.flight.clone());
        let runtime = Runtime::current();
        let waits = by.waits();
        let threads = match by {
            // If its task is refused, the thread polls it.
            By::Thread | By::Spawned(Waits::AsThread) | By::SpawnedWithOthers(Waits::AsThread) => {
                Threads::Any
            }
            _ if runtime.is_none() => Threads::IfNoTask,
            _ => Threads::None,
        };
        if waits == Waits::AsTask {
            flight.leader_is_task();
        }
        let how = Put { spawned: by.spawned(), orphaned: matches!(by, By::OwnTask), threads };
        if let Some(seat) = self.seat.take() {
            let running = Running { future, ttl, seat, begun: Moment::NEVER, runtime, task: None };
            flight.drive.put(Load::Running(running), how);
        }
        Place::of_leader(core, flight, Who::Leader(waits))
    }

    /// The claim has been won.
    pub(super) fn under_way(self) -> Self {
        self.flight.set_under_way();
        self
    }

    /// Ends `old` when the load begins.
    pub(super) fn supersedes(&mut self, old: Shared<Flight<K, V>>) {
        self.superseded = Some(old);
    }

    pub(crate) fn core(&self) -> &Arc<Core<K, V, S>> {
        &self.core
    }

    pub(crate) fn flight(&self) -> &Shared<Flight<K, V>> {
        &self.flight
    }

    pub(crate) fn key(&self) -> &K {
        self.flight.target.key()
    }

    pub(crate) fn cause(&self) -> LoadCause {
        self.flight.claim.cause
    }

    /// For an executor's queue, which may keep it for long. Not under a pin.
    pub(crate) fn into_queued(mut self) -> QueuedLease<K, V, S> {
        self.end_superseded();
        QueuedLease { core: Arc::downgrade(&self.core), flight: self.flight.clone(), seat: self.seat.take() }
    }

    /// The load begins now, unless it has begun. Not under a pin.
    pub(crate) fn begin(&mut self) {
        if self.begun != Moment::NEVER {
            return;
        }
        self.end_superseded();
        self.core.counters.add(Count::Loads);
        if self.cause() == LoadCause::Early {
            self.core.counters.add(Count::EarlyRefreshes);
        }
        self.begun = self.core.time.precise();
    }

    /// Sends those away who wait for the flight that this one has taken over from, and drops its future if that has no caller
    /// of its own: nobody would get what it brings. Not under a pin.
    fn end_superseded(&mut self) {
        let Some(old) = self.superseded.take() else { return };
        old.ring();
        if old.claim.is_spawned() {
            self.core.give_up(&old);
        }
    }

    /// The load has panicked.
    pub(crate) fn panics(&mut self) {
        self.verdict = Some(Verdict::Failure);
    }

    /// How long the load has taken so far.
    pub(crate) fn took(&self) -> Duration {
        self.core.time.precise().since(self.begun)
    }

    /// The value that the load is to replace, in whatever stage, if the slot still leads to it. None during a bypass: a loader
    /// that trusts it would have it served.
    pub(crate) fn previous(&self, guard: &Guard) -> Option<V>
    where
        V: Clone,
    {
        if self.core.switches.is_bypassed() {
            return None;
        }
        self.mine(guard)?.held().cell().map(|cell| cell.value.clone())
    }

    /// The value that is there, if it is still served. An error if the slot has moved on already.
    pub(crate) fn current(&self, guard: &Guard) -> Result<Option<V>, Published>
    where
        V: Clone,
    {
        let serves = !self.core.switches.is_bypassed();
        let held = self.mine(guard).ok_or(Published::Fenced)?.held();
        let now = self.core.time.now();
        let stage = |cell: &Cell<V>| self.core.stage_at(&self.flight.target, cell, now);
        let served = held.cell().filter(|cell| serves && stage(cell) <= Stage::Stale);
        Ok(served.map(|cell| cell.value.clone()))
    }

    /// The slot's state if it is still this flight's.
    fn mine<'g>(&'g self, guard: &'g Guard) -> Option<State<'g, K, V>> {
        let state = self.flight.target.load(guard);
        matches!(state, State::Loading(flight) if std::ptr::eq(flight, &raw const *self.flight))
            .then_some(state)
    }

    /// Records a failure, which all who wait share.
    pub(crate) fn fail(mut self, error: LoadError) -> Published
    where
        V: Clone,
    {
        self.verdict = Some(Verdict::Failure);
        self.core.counters.add(Count::LoadFailures);
        let shared = error.clone();
        self.remember(error, Outcome::Failure(shared))
    }

    /// Records a failure that those who wait do not share: each of them may lead.
    pub(crate) fn fail_alone(self, error: LoadError) -> Published
    where
        V: Clone,
    {
        self.remember(error, Outcome::LookAgain)
    }

    fn remember(self, error: LoadError, outcome: Outcome<V>) -> Published
    where
        V: Clone,
    {
        let core = self.core.clone();
        let now = core.time.now();
        let flight = self.flight.clone();
        if core.settings.error_backoff.is_some() {
            core.has_mortals();
        }
        let next = |held: Held<'_, V>| {
            let rescues = held.cell().is_some_and(|c| core.stage_at(&flight.target, c, now) != Stage::Dead);
            let earlier = held.record().filter(|record| now < record.pause.forget);
            let attempts = earlier.map_or(0, |record| record.attempts).saturating_add(1);
            match core.settings.error_backoff {
                Some(backoff) => {
                    let end = now.plus(backoff.pause(attempts, core.chance()));
                    let forget = end.plus(backoff.cap);
                    Next::Failure { error, attempts, pause: Pause { refresh: end, load: end, forget } }
                }
                None if rescues => {
                    let refresh = now.plus(REFRESH_PAUSE);
                    Next::Failure { error, attempts, pause: Pause { refresh, load: now, forget: refresh } }
                }
                // Nothing is there to refresh, and nobody is held up: nothing to remember.
                None => Next::Dead,
            }
        };
        // What there is no need to remember has expired, or was never there.
        self.end(next, Some(RemovalCause::Expired), |_| outcome)
    }

    /// The source has no such key: the value goes, and that is remembered if the cache is to.
    pub(crate) fn absent(mut self) -> Published
    where
        V: Clone,
    {
        self.verdict = Some(Verdict::Success);
        let outcome = |_| Outcome::Failure(LoadError::absent());
        let now = self.core.time.now();
        let next = match self.core.settings.negative_ttl {
            Some(ttl) if !self.core.switches.is_bypassed() => {
                self.core.has_mortals();
                Next::Absence { until: now.plus(ttl) }
            }
            _ => Next::Dead,
        };
        self.end(|_| next, Some(RemovalCause::Explicit), outcome)
    }

    /// The entry goes; those who wait look again.
    pub(crate) fn remove(self) -> Published {
        self.end(|_| Next::Dead, Some(RemovalCause::Explicit), |_| Outcome::LookAgain)
    }

    /// The slot goes back to what it was; those who wait look again.
    pub(crate) fn abandon(self) -> Published {
        self.end(|_| Next::Prev, None, |_| Outcome::LookAgain)
    }

    fn end(
        mut self,
        next: impl FnOnce(Held<'_, V>) -> Next<K, V>,
        cause: Option<RemovalCause>,
        outcome: impl FnOnce(Published) -> Outcome<V>,
    ) -> Published {
        let published = self.end_in_place(next, cause, outcome);
        if published == Published::Fenced {
            self.core.counters.add(Count::Fenced);
        }
        published
    }

    /// The one order in which a flight ends: room for what it brings, slot CAS, close, outcome, bookkeeping, unpin, bell. The
    /// listener is told last.
    fn end_in_place(
        &mut self,
        next: impl FnOnce(Held<'_, V>) -> Next<K, V>,
        cause: Option<RemovalCause>,
        outcome: impl FnOnce(Published) -> Outcome<V>,
    ) -> Published {
        let Some(seat) = self.seat.take() else { return Published::Fenced };
        let (core, flight) = (&*self.core, &*self.flight);
        let stay = core.stay(pin());
        let slot = &*flight.target;
        let mut admission = None;
        // What is refused or not used is dropped last: its destructor is user code.
        let (swung, _unused) = match self.mine(&stay) {
            Some(state) => {
                let next = next(state.held());
                let (before, after) = (slot.weight_of(state.held()), next.weight(slot, state.held()));
                if after > 0 {
                    let more = after.saturating_sub(before);
                    admission = core.make_room(Some(slot), slot.hash(), after, more, &stay);
                }
                (Some(core.swing(slot, state, next, cause, &stay)), None)
            }
            None => (None, Some(next)),
        };
        let published = if matches!(swung, Some(Ok(()))) { Published::Done } else { Published::Fenced };
        step();
        let waiters = flight.close();
        let _refused = (waiters > 0).then(|| {
            // A value's `Clone` is user code: if it panics, those who wait look for themselves.
            flight.settle(caught(|| outcome(published)).unwrap_or(Outcome::LookAgain))
        });
        step();
        core.flights.leave(seat, &stay);
        if published == Published::Done {
            core.stored(slot, admission, &stay);
        }
        let outbox = stay.leave();
        if waiters > 0 {
            flight.tell();
        }
        match flight.mark_over(Finish::Ended) {
            None => {
                core.load_is_over();
                core.tell_breaker(flight, self.verdict, self.begun != Moment::NEVER);
            }
            Some(Finish::HangsInJob) => core.keeper.one_is_back(),
            Some(Finish::TakenOver | Finish::Ended) => {}
        }
        core.sweep_a_little(core.shard(slot.hash()), &core.stay(pin()));
        drop(outbox);
        published
    }
}

/// What a load has brought.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fetched<V> {
    pub(crate) value: V,
    /// The times that the call or the loader asked for.
    pub(crate) ttl: Ttl,
    pub(crate) weight: u32,
    pub(crate) store: bool,
    /// It is the value that was there: nothing is removed by it.
    pub(crate) renews: bool,
    /// How long the load has taken; `None`: it was no load.
    pub(crate) took: Option<Duration>,
}

impl<V> Fetched<V> {
    /// A new value that is to be stored like any other.
    pub(crate) fn of(value: V) -> Self {
        Self { value, ttl: Ttl::default(), weight: 1, store: true, renews: false, took: None }
    }
}

impl<K: 'static, V: Clone + 'static, S> Lease<K, V, S> {
    /// Publishes a value. `spare` is the caller's own clone of it, for those who have joined.
    ///
    /// Where the value is not to be stored, has a TTL of zero or is too heavy, and during a bypass, the entry goes: what was there
    /// is outdated.
    pub(crate) fn publish(mut self, fetched: Fetched<V>, spare: &V) -> Published {
        self.verdict = Some(Verdict::Success);
        self.publish_to(|_| true, fetched, spare)
    }

    /// Publishes a value that was decided on, not loaded: if it is refused, it never was, and those who wait look again.
    pub(crate) fn put(self, fetched: Fetched<V>, spare: &V) -> Published {
        self.publish_to(|published| published == Published::Done, fetched, spare)
    }

    /// `shares` says whether those who have joined get the value.
    fn publish_to(self, shares: impl FnOnce(Published) -> bool, fetched: Fetched<V>, spare: &V) -> Published {
        let Fetched { value, ttl, weight, store, renews, took } = fetched;
        let now = self.core.time.now();
        let times = self.core.times(ttl, now, self.flight.spread());
        self.core.note_value(&self.flight.target, took, &times);
        let new = Weighed { cell: Cell { value, times }, weight };
        // Not used until the flight has ended: its destructor is user code.
        let mut unsold = None;
        let store = store && !self.core.switches.is_bypassed();
        let next = if store && now.is_before(times.hard()) && self.core.admits(weight) {
            Next::Value(NewCell::for_flight(&self.flight, new))
        } else {
            unsold = Some(new);
            Next::Dead
        };
        let cause = (!renews || unsold.is_some()).then_some(RemovalCause::Replaced);
        let published = self.end(
            |_| next,
            cause,
            |published| if shares(published) { Outcome::Value(spare.clone()) } else { Outcome::LookAgain },
        );
        drop(unsold);
        published
    }

    /// What the load's value is to live, as [`Core::own_ttl`]. User code, so a part of the load.
    pub(crate) fn own_ttl(&self, value: &V, own: Ttl, took: Duration) -> Ttl {
        self.core.own_ttl(self.key(), value, own, Some(took))
    }

    /// What the load's value weighs. User code, so a part of the load.
    pub(crate) fn weigh(&self, value: &V) -> u32 {
        self.core.weigh(self.key(), value)
    }
}

impl<K, V, S> Drop for Lease<K, V, S> {
    fn drop(&mut self) {
        let _ = self.end_in_place(|_| Next::Prev, None, |_| Outcome::LookAgain);
    }
}
