//! What a call that may load comes to: a hit, a lease, a place in somebody else's flight, or a reason to back off.

use super::breaker::Verdict;
use super::limits::{Asks, Permit};
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
    fn asks(&self, takes_over: bool) -> Asks {
        match self.miss {
            Start::Now if !self.backs_off => Asks::Anyhow,
            _ if takes_over => Asks::TakeOver,
            Start::Now => Asks::Foreground,
            Start::Queued | Start::Spawned => Asks::Background { urgent: false },
        }
    }

    fn cause(&self) -> LoadCause {
        if self.accept.is_none() { LoadCause::Asked } else { LoadCause::Miss }
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
    /// Nothing to serve, and no load may begin now.
    Refused(LoadError),
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
            let bypassed = self.switches.is_bypassed();
            let Some((slot, state)) = self.seek(hash, key, stay) else {
                if !demand.may_lead {
                    return Lookup::NotCached;
                }
                let permit = match self.admits_load(demand.asks(false), demand.is_let_in) {
                    Ok(permit) => permit,
                    Err(refusal) => return Lookup::Refused(refusal.error()),
                };
                match self.found(hash, key, demand, permit, stay) {
                    Some(lease) => return Lookup::Lead(lease),
                    None => continue,
                }
            };
            let held = state.held();
            // A fresh value that will do is the common case: the clock is read once for it, or not at all.
            if let (Some(cell), Some(accept), false) = (held.cell(), demand.accept, bypassed) {
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
                            over.then(|| self.admits_load(Asks::TakeOver, false).ok()).flatten().and_then(
                                |permit| {
                                    let claim = self.begins(demand.stale, LoadCause::Stale, now, permit);
                                    self.take_over(slot, flight, claim, stay)
                                },
                            )
                        }
                        _ => None,
                    };
                    return Lookup::Hit { hit: Hit { cell, stage }, lease };
                }
            }
            let now = self.time.now();
            let (record, frozen) = (held.record(), self.switches.is_frozen());
            if record.is_some_and(|record| record.is_absence() && (now < record.pause.load || frozen))
                && demand.takes_absence()
                && !bypassed
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
                        && !frozen
                        && !record.is_absence()
                        && let until = demand.held_up_until(record.pause)
                        && now < until
                    {
                        let left = until.since(now);
                        return Lookup::Refused(LoadError::backing_off(&record.error, left));
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
            let takes_over = matches!(action, Move::TakeOver(_));
            let permit = match self.admits_load(demand.asks(takes_over), demand.is_let_in) {
                Ok(permit) => permit,
                Err(refusal) => return Lookup::Refused(refusal.error()),
            };
            let claim = self.begins(demand.miss, demand.cause(), now, permit);
            // One CAS from exactly what was judged.
            let lease = match action {
                Move::Claim(held) => self.claim(slot, State::Ready(held), claim, stay),
                Move::TakeOver(flight) => self.take_over(slot, flight, claim, stay),
            };
            if let Some(lease) = lease {
                return Lookup::Lead(lease);
            }
        }
    }

    /// A new slot with a load under way, with a permit. `None` if somebody else has linked one meanwhile.
    fn found<Q>(
        self: &Arc<Self>,
        hash: u64,
        key: &Q,
        demand: &Demand,
        permit: Permit<'_, K, V, S>,
        stay: &Stay<'_, K, V, S>,
    ) -> Option<Lease<K, V, S>>
    where
        K: Borrow<Q>,
        Q: Eq + ToOwned<Owned = K> + ?Sized,
    {
        let now = self.time.now();
        let (slot, flight) =
            Unborn::with_flight(hash, key.to_owned(), self.tails().then_some(now), |target, prev| {
                let claim = self.begins(demand.miss, demand.cause(), now, permit);
                Flight::new(target, prev, Claim { first: true, ..claim })
            });
        let lease = Lease::new(self, flight);
        step();
        slot.link(&self.shard(hash).table, stay).is_ok().then(|| lease.under_way())
    }

    /// Takes a flight over that may be taken over, with a permit of its own.
    fn take_over(
        self: &Arc<Self>,
        slot: &Slot<K, V>,
        old: &Flight<K, V>,
        claim: Claim,
        stay: &Stay<'_, K, V, S>,
    ) -> Option<Lease<K, V, S>> {
        let running = old.has_begun();
        // Settles the old flight before the CAS: those who wait for it look again.
        if !old.supersede(claim.at) {
            self.return_permit(claim.probe);
            return None;
        }
        let mut lease = self.claim(slot, State::Loading(old), claim, stay)?;
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
            self.tell_breaker(old, running.then_some(Verdict::Failure), running);
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
        let permit = self.admits_load(Asks::Background { urgent }, false).ok()?;
        let claim = self.begins(start, LoadCause::Stale, now, permit);
        self.claim(slot, State::Ready(held), claim, stay)
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
        if !fires || held.record().is_some_and(|record| now < record.pause.refresh) || !self.may_refresh() {
            return None;
        }
        let permit = self.admits_load(Asks::Background { urgent: false }, false).ok()?;
        let claim = self.begins(start, LoadCause::Early, now, permit);
        self.claim(slot, State::Ready(held), claim, stay)
    }

    /// The one CAS by which a load of an existing slot begins, with a permit.
    fn claim(
        self: &Arc<Self>,
        slot: &Slot<K, V>,
        from: State<'_, K, V>,
        claim: Claim,
        stay: &Stay<'_, K, V, S>,
    ) -> Option<Lease<K, V, S>> {
        let (target, prev) = (SlotRef::of(slot, stay), from.held().word());
        let flight = Shared::new(Flight::new(target, prev, claim));
        let lease = Lease::new(self, flight.clone());
        self.swing(slot, from, Next::Loading(flight), None, stay).is_ok().then(|| lease.under_way())
    }

    /// Takes on what the permit is for: the lease of the claim gives it back.
    fn begins(&self, start: Start, cause: LoadCause, now: Moment, permit: Permit<'_, K, V, S>) -> Claim {
        let lease_end = (start == Start::Now).then(|| now.plus(self.settings.lease));
        let queued = start == Start::Queued;
        Claim { cause, at: now, lease_end, queued, first: false, probe: permit.used() }
    }

    /// What the ladder has for a call whose load failed or whose wait ended: a stale value, or one in grace.
    pub(crate) fn salvage<'g, Q>(&'g self, key: &Q, accept: Accept, guard: &'g Guard) -> Option<Hit<'g, V>>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        if self.switches.is_bypassed() {
            return None;
        }
        let (slot, state) = self.seek(self.hash(key), key, guard)?;
        let cell = state.held().cell()?;
        let now = self.time.now();
        let stage = self.stage_at(slot, cell, now);
        (stage != Stage::Dead && accept.takes(cell, now)).then_some(Hit { cell, stage })
    }
}
