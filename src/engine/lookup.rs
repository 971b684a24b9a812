//! What a call that may load comes to: a hit, a lease, a place in somebody else's flight, or a reason to back off.

use super::limits::Asks;
use super::{Core, Hit, Lease, Place, Stay};
use crate::clock::Moment;
use crate::error::LoadError;
use crate::flight::{Claim, Finish, LoadCause, Waits};
use crate::freshness::Stage;
use crate::observe::Count;
use crate::primitive::Arc as Shared;
use crate::primitive::epoch::Guard;
use crate::primitive::step::step;
use crate::slot::{Cell, Flight, Held, Next, Pause, Slot, SlotRef, State, Unborn, share_of};
use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;
use std::time::Duration;

/// Which values a call takes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Accept {
    /// Younger than this.
    pub(crate) max_age: Option<Duration>,
    /// Fresh, or stale for less than this.
    pub(crate) max_stale: Option<Duration>,
}

impl Accept {
    fn takes<V>(self, cell: &Cell<V>, now: Moment) -> bool {
        self.max_age.is_none_or(|limit| now.since(cell.times.born()) < limit)
            && self
                .max_stale
                .is_none_or(|limit| now < cell.times.soft() || now.since(cell.times.soft()) < limit)
    }
}

/// When the load of a lease begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// At once, in the caller's hands.
    Now,
    /// When an executor comes to it.
    Queued,
    /// When the task that is made for it is first polled.
    Spawned,
}

/// What a call wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand {
    /// The values that will do; `None`: the call wants to lead, whatever is there.
    pub(crate) accept: Option<Accept>,
    /// Whether it may lead a load.
    pub(crate) may_lead: bool,
    /// Whether it must let a back-off pass.
    pub(crate) backs_off: bool,
    /// Whether the same call has been let in with another key, and loads both at once.
    pub(crate) is_let_in: bool,
    /// Whether a remembered absence is an answer.
    pub(crate) takes_absence: bool,
    /// How a load begins that somebody waits for.
    pub(crate) miss: Start,
    /// How a load begins while a stale value is served.
    pub(crate) stale: Start,
    /// How it waits for others.
    pub(crate) waits: Waits,
}

impl Demand {
    /// How it asks for a permit to load what it waits for.
    fn asks(&self) -> Asks {
        match self.miss {
            Start::Now if self.backs_off && !self.is_let_in => Asks::Foreground,
            Start::Now => Asks::Anyhow,
            Start::Queued | Start::Spawned => Asks::Background { urgent: false },
        }
    }

    /// Whether a remembered absence is an answer; who sets an age wants to know it anew.
    fn takes_absence(&self) -> bool {
        self.takes_absence && self.accept.is_some_and(|accept| accept.max_age.is_none())
    }

    /// A load that somebody waits for is held up for less long than one in the background.
    fn held_up_until(&self, pause: Pause) -> Moment {
        match self.miss {
            Start::Now => pause.load,
            Start::Queued | Start::Spawned => pause.refresh,
        }
    }
}

/// What a look-up came to.
pub(crate) enum Lookup<'g, K, V, S> {
    /// A value to serve at once; with a lease, the caller has been chosen to refresh it.
    Hit { hit: Hit<'g, V>, lease: Option<Lease<K, V, S>> },
    /// Nothing to serve: the caller loads.
    Lead(Lease<K, V, S>),
    /// Nothing to serve: somebody else loads.
    Join(Place<K, V, S>),
    /// The source has no such key.
    Absent,
    /// Nothing to serve, and the last load failed a short while ago.
    BackingOff(LoadError),
    /// Nothing to serve, and too many loads run already.
    Overloaded,
    /// Nothing to serve, and the call may not load.
    NotCached,
}

/// What to do about a slot in which nothing can be served.
enum Move<'g, K, V> {
    Claim(Held<'g, V>),
    TakeOver(&'g Flight<K, V>),
}

impl<K, V, S> Core<K, V, S>
where
    K: Eq + Hash + 'static,
    V: 'static,
    S: BuildHasher + 'static,
{
    /// Looks a key up for a call that may load. Never waits.
    pub(crate) fn lookup<'g, Q>(
        self: &'g Arc<Self>,
        key: &Q,
        demand: &Demand,
        stay: &'g Stay<'_, K, V, S>,
    ) -> Lookup<'g, K, V, S>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let hash = self.hash(key);
        loop {
            let Some((slot, state)) = self.seek(hash, key, stay) else {
                if !demand.may_lead {
                    return Lookup::NotCached;
                }
                // User code, which may panic: before there is a permit.
                let (key, now) = (key.to_owned(), self.time.now());
                if !self.admits_load(demand.asks()) {
                    return Lookup::Overloaded;
                }
                match self.found(hash, key, demand.miss, now, stay) {
                    Some(lease) => return Lookup::Lead(lease),
                    None => continue,
                }
            };
            let held = state.held();
            // A fresh value that will do is the common case: the clock is read once for it, or not at all.
            if let (Some(cell), Some(accept)) = (held.cell(), demand.accept) {
                let stage = self.stage(slot, cell, true);
                let limited = accept.max_age.is_some() || accept.max_stale.is_some();
                if stage <= Stage::Stale && (!limited || accept.takes(cell, self.time.now())) {
                    slot.mark().hit();
                    let lease = match (stage, state) {
                        (Stage::Stale, State::Ready(held)) if demand.may_lead => {
                            self.refresh_lease(slot, held, demand.stale, stay)
                        }
                        // Who loads already is looked at before any die.
                        (Stage::Fresh, State::Ready(_)) if demand.may_lead && self.early.is_on() => {
                            self.early_lease(slot, held, demand.stale, stay)
                        }
                        // A refresh that hangs holds its key no longer than its lease. One that is queued may stay so.
                        (Stage::Stale, State::Loading(flight)) if demand.may_lead => {
                            let now = self.time.now();
                            let over = flight.may_be_taken_over(now, false);
                            (over && self.admits_load(Asks::Anyhow))
                                .then(|| {
                                    self.take_over(slot, flight, demand.stale, LoadCause::Stale, now, stay)
                                })
                                .flatten()
                        }
                        _ => None,
                    };
                    return Lookup::Hit { hit: Hit { cell, stage }, lease };
                }
            }
            let now = self.time.now();
            let record = held.record();
            if record.is_some_and(|record| record.is_absence() && now < record.pause.load)
                && demand.takes_absence()
            {
                slot.mark().hit();
                return Lookup::Absent;
            }
            if !demand.may_lead {
                return Lookup::NotCached;
            }
            let action = match state {
                State::Ready(held) => {
                    if let Some(record) = record
                        && demand.backs_off
                        && !record.is_absence()
                        && let until = demand.held_up_until(record.pause)
                        && now < until
                    {
                        let left = until.since(now);
                        return Lookup::BackingOff(LoadError::backing_off(&record.error, left));
                    }
                    Move::Claim(held)
                }
                State::Loading(flight) if flight.may_be_taken_over(now, demand.miss == Start::Now) => {
                    Move::TakeOver(flight)
                }
                State::Loading(flight) => match slot.join(flight, demand.waits, stay) {
                    Some(ticket) => return Lookup::Join(Place::of(self, ticket)),
                    None => {
                        // INV-flight-1: the slot has moved on, or its last owner is about to move it on: do it for him.
                        if self.swing(slot, state, Next::Prev, None, stay).is_ok() {
                            self.stored(slot, None, stay);
                        }
                        continue;
                    }
                },
                State::Dead => continue,
            };
            let asks = if matches!(action, Move::TakeOver(_)) { Asks::Anyhow } else { demand.asks() };
            if !self.admits_load(asks) {
                return Lookup::Overloaded;
            }
            if let Some(lease) = self.lead(slot, &action, demand, now, stay) {
                return Lookup::Lead(lease);
            }
        }
    }

    /// A new slot with a load under way, with a permit. `None` if somebody else has linked one meanwhile.
    fn found(
        self: &Arc<Self>,
        hash: u64,
        key: K,
        start: Start,
        now: Moment,
        stay: &Stay<'_, K, V, S>,
    ) -> Option<Lease<K, V, S>> {
        let (slot, flight) = Unborn::with_flight(hash, key, self.tails().then_some(now), |target, prev| {
            Flight::new(target, prev, self.begins(start, LoadCause::Miss, now, true))
        });
        let lease = Lease::new(self, flight);
        step();
        slot.link(&self.shard(hash).table, stay).is_ok().then(|| lease.under_way())
    }

    /// Claims or takes over by one CAS from exactly what was judged.
    fn lead(
        self: &Arc<Self>,
        slot: &Slot<K, V>,
        action: &Move<'_, K, V>,
        demand: &Demand,
        now: Moment,
        stay: &Stay<'_, K, V, S>,
    ) -> Option<Lease<K, V, S>> {
        let cause = if demand.accept.is_none() { LoadCause::Asked } else { LoadCause::Miss };
        match *action {
            Move::Claim(held) => self.claim(slot, State::Ready(held), demand.miss, cause, now, stay),
            Move::TakeOver(flight) => self.take_over(slot, flight, demand.miss, cause, now, stay),
        }
    }

    /// Takes a flight over that may be taken over, with a permit of its own.
    fn take_over(
        self: &Arc<Self>,
        slot: &Slot<K, V>,
        old: &Flight<K, V>,
        start: Start,
        cause: LoadCause,
        now: Moment,
        stay: &Stay<'_, K, V, S>,
    ) -> Option<Lease<K, V, S>> {
        let running = !old.is_queued();
        // Settles the old flight before the CAS: those who wait for it look again.
        if !old.supersede(now) {
            self.load_is_over();
            return None;
        }
        let mut lease = self.claim(slot, State::Loading(old), start, cause, now, stay)?;
        self.counters.add(Count::Takeovers);
        // Counted first, and taken back if the load has ended just now.
        let hangs = running && old.claim.queued;
        if hangs {
            self.keeper.one_hangs();
        }
        let over = if hangs { Finish::HangsInJob } else { Finish::TakenOver };
        if old.mark_over(over).is_none() {
            // There is one permit for the two of them.
            self.load_is_over();
        } else if hangs {
            self.keeper.one_is_back();
        }
        lease.supersedes(share_of(old));
        Some(lease)
    }

    /// The lease to refresh a stale value, for the one caller that gets it.
    fn refresh_lease(
        self: &Arc<Self>,
        slot: &Slot<K, V>,
        held: Held<'_, V>,
        start: Start,
        stay: &Stay<'_, K, V, S>,
    ) -> Option<Lease<K, V, S>> {
        let now = self.time.now();
        if held.record().is_some_and(|record| now < record.pause.refresh) || !self.may_refresh() {
            return None;
        }
        let urgent = held.cell().is_some_and(|cell| cell.times.is_soon_dead(now));
        if !self.admits_load(Asks::Background { urgent }) {
            return None;
        }
        self.claim(slot, State::Ready(held), start, LoadCause::Stale, now, stay)
    }

    /// The lease to refresh a fresh value, if this read is to, and gets it.
    fn early_lease(
        self: &Arc<Self>,
        slot: &Slot<K, V>,
        held: Held<'_, V>,
        start: Start,
        stay: &Stay<'_, K, V, S>,
    ) -> Option<Lease<K, V, S>> {
        let now = self.time.now();
        let fires = held.cell().is_some_and(|cell| self.fires(slot, &cell.times, now));
        if !fires
            || held.record().is_some_and(|record| now < record.pause.refresh)
            || !self.may_refresh()
            || !self.admits_load(Asks::Background { urgent: false })
        {
            return None;
        }
        self.claim(slot, State::Ready(held), start, LoadCause::Early, now, stay)
    }

    /// The one CAS by which a load of an existing slot begins, with a permit.
    fn claim(
        self: &Arc<Self>,
        slot: &Slot<K, V>,
        from: State<'_, K, V>,
        start: Start,
        cause: LoadCause,
        now: Moment,
        stay: &Stay<'_, K, V, S>,
    ) -> Option<Lease<K, V, S>> {
        let (target, prev) = (SlotRef::of(slot, stay), from.held().word());
        let flight = Shared::new(Flight::new(target, prev, self.begins(start, cause, now, false)));
        let lease = Lease::new(self, flight.clone());
        self.swing(slot, from, Next::Loading(flight), None, stay).is_ok().then(|| lease.under_way())
    }

    fn begins(&self, start: Start, cause: LoadCause, now: Moment, first: bool) -> Claim {
        let lease_end = (start == Start::Now).then(|| now.plus(self.settings.lease));
        Claim { cause, at: now, lease_end, queued: start == Start::Queued, first }
    }

    /// What the ladder has for a call whose load failed or whose wait ended: a stale value, or one in grace.
    pub(crate) fn salvage<'g, Q>(&'g self, key: &Q, accept: Accept, guard: &'g Guard) -> Option<Hit<'g, V>>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let (slot, state) = self.seek(self.hash(key), key, guard)?;
        let cell = state.held().cell()?;
        let now = self.time.now();
        let stage = self.stage_at(slot, cell, now);
        (stage != Stage::Dead && accept.takes(cell, now)).then_some(Hit { cell, stage })
    }
}
