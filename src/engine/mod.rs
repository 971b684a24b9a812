//! The engine: shards of slots, and what a look-up comes to.
//!
//! It never blocks, waits, spawns, or runs user code while it holds anything but a pin, and under a pin only `Hash`,
//! `Eq`, `Clone` of a value, and the closures of `read` and `retain`. It answers a look-up with *hit* (perhaps with
//! a lease to refresh), *lead*, *join* or *back off*; the fronts differ only in how they wait and how they call a loader.
//!
//! Every function here takes the caller's pin: as a `&Guard`, or where something may be taken out, with the [`Stay`].

mod audit;
mod breaker;
mod early;
mod evict;
mod gather;
mod hot;
mod lease;
mod limits;
mod lookup;
#[cfg(all(test, loom))]
mod models;
mod place;
mod stay;
mod switches;
mod upkeep;
mod write;

pub(crate) use gather::{Gathered, Gathering};
pub(crate) use stay::{Stay, Teller, teller};
pub use switches::Mode;
pub(crate) use upkeep::upkeep;
pub(crate) use write::source_fence;

pub(crate) use lease::{By, Fetched, Lease, Published, QueuedLease};
pub(crate) use lookup::{Accept, Demand, Lookup, Start};
pub(crate) use place::Place;

use crate::clock::{Moment, Time};
use crate::config::Settings;
use crate::executor::{Executor, Job, Keeper, Rejected, Upkeep};
use crate::flight::Registry;
use crate::freshness::{Stage, Times, Ttl};
use crate::hash::{DefaultHashBuilder, hash_of, shard_of};
use crate::observe::{Count, Counters, InFlight, RemovalCause, Stats};
use crate::policy::Policy;
use crate::primitive::epoch::{Guard, drop_panics, flush, number, pin, unreclaimed};
use crate::primitive::park::Bell;
use crate::primitive::plain::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::primitive::{Padded, atomic, caught};
use crate::slot::{Cell, Flight, Held, Next, Slot, State, Swing, bury_all};
use crate::table::{Linked, Table};
use breaker::Circuit;
use early::Early;
use evict::Charge;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;
use switches::Switches;

/// How many buckets a write sweeps: half a cache line of them. There are one to two buckets to an entry, so a lap is done
/// within half as many writes as there are entries, and what has expired stays below what is alive.
const SWEPT: usize = 4;

/// One independent table.
pub(crate) struct Shard<K, V> {
    table: Table<Slot<K, V>>,
    /// Values in the table, whatever their stage. A change counts a moment after its CAS, so this may wrap below zero.
    values: Padded<AtomicUsize>,
    /// Where the sweep goes on, by hash prefix.
    sweep: AtomicU64,
}

/// A cache without its handles: what all fronts and jobs share.
pub(crate) struct Core<K, V, S> {
    pub(crate) settings: Settings<K, V>,
    pub(crate) time: Time,
    pub(crate) counters: Counters,
    pub(crate) keeper: Keeper,
    executor: Option<Arc<dyn Executor>>,
    teller: Option<Teller<K, V>>,
    hasher: S,
    shards: Box<[Shard<K, V>]>,
    policy: Policy,
    switches: Switches,
    early: Early,
    circuit: Option<Circuit>,
    /// Loads under way that are to replace something, and keep it from being evicted. A change counts a moment after its
    /// CAS, so this may wrap below zero.
    refreshing: Padded<AtomicUsize>,
    /// Permits to load that are out, where there is a limit.
    loading: Padded<atomic::AtomicUsize>,
    /// Callers who wait, where there is a limit.
    waiting: Padded<atomic::AtomicUsize>,
    flights: Registry<Flight<K, V>>,
    /// Whether something has been stored that can end, so that a sweep has something to find. Never cleared.
    mortal: AtomicBool,
    /// Whether the keeper sweeps.
    sweeps: bool,
    /// Rung when a clock has been moved by hand, and when the last handle goes.
    pub(crate) moved: Bell,
    /// When the keeper is to look at the flights' alarms.
    next_alarm: AtomicU64,
    /// Where single loads wait for others, if they do.
    pub(crate) gathering: Option<Gathering<K, V, S>>,
    /// Seeds for `chance`.
    dice: AtomicU64,
}

/// A key's slot, and its state.
type Found<'g, K, V> = (&'g Slot<K, V>, State<'g, K, V>);

/// A value that may be served at once.
pub(crate) struct Hit<'g, V> {
    pub(crate) cell: &'g Cell<V>,
    pub(crate) stage: Stage,
}

/// What is seen of a key at first.
pub(crate) enum Glance<'g, V> {
    /// A value that is fresh, and nothing else to note.
    Fresh(&'g V),
    /// There is no slot.
    Nothing,
    /// More than a glance is needed.
    Unclear,
}

/// Why a read has found nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nothing {
    /// There is nothing that is served.
    There,
    /// There is nothing but what is beyond rescue.
    ButSpent,
}

impl<K, V, S> Core<K, V, S> {
    pub(crate) fn new(
        settings: Settings<K, V>,
        time: Time,
        hasher: S,
        executor: Option<Arc<dyn Executor>>,
        upkeep: Option<Upkeep>,
        sweeps: bool,
        teller: Option<Teller<K, V>>,
    ) -> Self {
        let each = settings.initial_capacity.div_ceil(settings.shards);
        let shard = |_| Shard {
            table: Table::with_capacity(each),
            values: Padded::default(),
            sweep: AtomicU64::new(0),
        };
        Self {
            time,
            counters: Counters::new(),
            keeper: Keeper::new(&settings.name, upkeep),
            executor,
            teller,
            hasher,
            shards: (0..settings.shards).map(shard).collect(),
            policy: Policy::new(settings.max_capacity, settings.shards),
            switches: Switches::new(settings.time_to_idle.is_some(), settings.lifetime.ttl),
            early: Early::new(settings.early_refresh),
            circuit: settings.breaker.map(Circuit::new),
            refreshing: Padded::default(),
            loading: Padded::default(),
            waiting: Padded::default(),
            flights: Registry::new(),
            mortal: AtomicBool::new(false),
            sweeps,
            moved: Bell::new(),
            next_alarm: AtomicU64::new(Moment::NEVER.nanos()),
            gathering: None,
            dice: AtomicU64::new(DefaultHashBuilder::new().hash_one(0)),
            settings,
        }
    }

    #[inline]
    fn shard(&self, hash: u64) -> &Shard<K, V> {
        &self.shards[shard_of(hash, self.shards.len())]
    }

    /// Whether it is noted when a value was last used.
    fn idles(&self) -> bool {
        self.settings.time_to_idle.is_some()
    }

    /// Whether something is noted about the use of a key whose slot is made now.
    fn tails(&self) -> bool {
        self.idles() || self.early.is_on()
    }

    /// How a value stands at `now`.
    fn stage_at(&self, slot: &Slot<K, V>, cell: &Cell<V>, now: Moment) -> Stage {
        self.served_as(match self.settings.time_to_idle {
            // Idle for too long is as good as never there: no grace.
            Some(idle) if slot.used().max(cell.times.born()).plus(idle) <= now => Stage::Dead,
            _ => cell.times.stage(now, self.settings.grace),
        })
    }

    /// How a value stands; the clock is read only if it matters. `used` notes the use where idle time counts.
    #[inline]
    fn stage(&self, slot: &Slot<K, V>, cell: &Cell<V>, used: bool) -> Stage {
        if self.settings.time_to_idle.is_none() {
            if cell.times.never_end() {
                return Stage::Fresh;
            }
            return self.served_as(cell.times.stage(self.time.now(), self.settings.grace));
        }
        let now = self.time.now();
        let stage = self.stage_at(slot, cell, now);
        if used && stage <= Stage::Stale {
            slot.touch(now);
        }
        stage
    }

    /// The times of a value that is stored now, spread by this much at least.
    pub(crate) fn times(&self, own: Ttl, now: Moment, spread: f64) -> Times {
        let times = self.lifetime().spread(spread).times(own, now, || self.chance());
        if times.hard() != Moment::NEVER || self.idles() {
            self.has_mortals();
        }
        times
    }

    /// What is about to be stored can end: there is something to sweep. Not under a pin.
    fn has_mortals(&self) {
        // Relaxed: whoever misses it sweeps at its next write.
        if !self.mortal.load(Ordering::Relaxed) {
            self.mortal.store(true, Ordering::Relaxed);
            if self.sweeps {
                self.keeper.begin_upkeep();
            }
        }
    }

    /// A number from `[0, 1)`. Needs no state of the thread, which may be in its last destructors.
    fn chance(&self) -> f64 {
        // Relaxed: each number of the sequence is a seed of its own.
        SmallRng::seed_from_u64(self.dice.fetch_add(1, Ordering::Relaxed)).random()
    }

    /// Values in the cache, whatever their stage.
    pub(crate) fn values(&self) -> usize {
        // Relaxed: an estimate while others write. Signed, since a removal may count before the insertion it undoes.
        let sum: isize = self.shards.iter().map(|s| s.values.0.load(Ordering::Relaxed).cast_signed()).sum();
        usize::try_from(sum).unwrap_or(0)
    }

    /// What is in the cache weighs, and what is about to come in.
    pub(crate) fn weight(&self) -> u64 {
        self.policy.weight()
    }

    /// Moves a slot's word from exactly what was seen, keeps the count of values, and unlinks a slot that is dead now.
    ///
    /// `cause` says why the value goes that is taken out, if one is, and has not expired; `None`: it lives on elsewhere.
    fn swing(
        &self,
        slot: &Slot<K, V>,
        from: State<'_, K, V>,
        to: Next<K, V>,
        cause: Option<RemovalCause>,
        stay: &Stay<'_, K, V, S>,
    ) -> Result<(), Next<K, V>> {
        let held = from.held();
        let (dies, leads) = (to.is_end(from), matches!(to, Next::Loading(_)));
        let (before, after) = (slot.weight_of(held), to.weight(slot, held));
        let charge = Charge::new(&stay.purse, after.saturating_sub(before));
        match slot.swing(from, to, stay) {
            Swing::Lost(back) => Err(back),
            Swing::Won { values, taken } => {
                charge.keep();
                stay.purse.put(before.saturating_sub(after));
                let shard = self.shard(slot.hash());
                if values != 0 {
                    // Relaxed: a figure; see `values`.
                    shard.values.0.fetch_add(values.cast_unsigned(), Ordering::Relaxed);
                }
                self.count_refreshes(from, leads);
                if dies {
                    self.policy.leave(slot.mark(), slot.half_hash());
                    // Killed first, unlinked then: whoever finds it dead meanwhile helps.
                    shard.table.unlink(slot, stay);
                }
                if let (Some(taken), Some(cause)) = (taken, cause) {
                    let cause = self.cause_of(slot, from, cause);
                    self.counters.add(Count::of_removal(cause));
                    stay.removes(taken, cause);
                }
                Ok(())
            }
        }
    }

    /// Keeps the number of loads that are to replace something.
    fn count_refreshes(&self, from: State<'_, K, V>, leads: bool) {
        let led = matches!(from, State::Loading(_));
        if from.held().is_nothing() || led == leads {
            return;
        }
        // Relaxed: a limit.
        if leads {
            self.refreshing.0.fetch_add(1, Ordering::Relaxed);
        } else {
            self.refreshing.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Kills what is there beyond rescue: dead values, and failures that nobody needs to remember.
    fn reap(&self, slot: &Slot<K, V>, now: Moment, stay: &Stay<'_, K, V, S>) {
        if let state @ State::Ready(held) = slot.load(stay)
            && self.is_spent(slot, held, now)
        {
            // A lost race means that somebody has found a use for the slot.
            let _ = self.swing(slot, state, Next::Dead, Some(RemovalCause::Expired), stay);
        }
    }

    /// As `is_spent`; the clock is read only if it matters.
    fn is_spent_by_now(&self, slot: &Slot<K, V>, held: Held<'_, V>) -> bool {
        // Relaxed: see `times`.
        let may_end = self.mortal.load(Ordering::Relaxed) || held.record().is_some();
        // In the middle of the bookkeeping, which must go on if the clock, which may be user code, panics.
        may_end && caught(|| self.time.now()).is_some_and(|now| self.is_spent(slot, held, now))
    }

    fn is_spent(&self, slot: &Slot<K, V>, held: Held<'_, V>, now: Moment) -> bool {
        let live = held.cell().is_some_and(|cell| self.stage_at(slot, cell, now) != Stage::Dead);
        !live && !self.switches.is_frozen() && held.record().is_none_or(|record| record.pause.forget <= now)
    }

    /// Sweeps a few buckets: what every write to a shard does, so that expired values go without anybody reading them.
    fn sweep_a_little(&self, shard: &Shard<K, V>, stay: &Stay<'_, K, V, S>) {
        // Relaxed: see `times`.
        if !self.mortal.load(Ordering::Relaxed) {
            return;
        }
        // Relaxed: several threads may sweep the same buckets, which does no harm.
        let mut at = shard.sweep.load(Ordering::Relaxed);
        // As in `is_spent_by_now`.
        let Some(now) = caught(|| self.time.now()) else { return };
        for _ in 0..SWEPT {
            at = self.sweep(shard, at, now, stay).unwrap_or(0);
        }
        shard.sweep.store(at, Ordering::Relaxed);
    }

    /// Calls `step` for each bucket of each shard; `step` pins, handles the bucket at the prefix and returns the next.
    pub(crate) fn each_bucket(&self, mut step: impl FnMut(&Shard<K, V>, u64) -> Option<u64>) {
        for shard in &self.shards {
            let mut at = Some(0);
            while let Some(prefix) = at {
                at = step(shard, prefix);
            }
        }
    }

    /// Kills every entry of the bucket that is spent at `now`.
    fn sweep(&self, shard: &Shard<K, V>, at: u64, now: Moment, stay: &Stay<'_, K, V, S>) -> Option<u64> {
        shard.table.visit(at, |slot| self.reap(slot, now, stay), stay)
    }

    /// Sweeps everything that has expired, drops what is too much, and tidies the policy's queues.
    pub(crate) fn run_pending_tasks(&self) {
        self.each_bucket(|shard, at| self.sweep(shard, at, self.time.now(), &self.stay(pin())));
        self.shrink();
        self.tidy();
        flush();
    }

    /// One step of an iteration: the live entries of one bucket of shard `nth`.
    pub(crate) fn entries<'g>(
        &'g self,
        nth: usize,
        at: u64,
        mut each: impl FnMut(&'g K, &'g V),
        guard: &'g Guard,
    ) -> Option<u64> {
        let serves = !self.switches.is_bypassed();
        let visit = |slot: &'g Slot<K, V>| {
            if let Some(cell) = slot.load(guard).held().cell()
                && serves
                && self.stage(slot, cell, false) <= Stage::Stale
            {
                each(slot.key(), &cell.value);
            }
        };
        self.shards[nth].table.visit(at, visit, guard)
    }

    pub(crate) fn shard_count(&self) -> usize {
        self.shards.len()
    }

    /// Counts a read, which never loads, on the caller's number.
    pub(crate) fn count_read(&self, read: &Result<Hit<'_, V>, Nothing>, hash: u64, number: usize) {
        match read {
            Ok(hit) => self.counters.access_on(number, Count::of_hit(hit.stage), || hash),
            Err(_) => self.counters.add_on(number, Count::Misses),
        }
    }

    /// Wakes all who wait for a flight, so that they look at the clock again, which has been moved.
    pub(crate) fn wake_waiters(self: &Arc<Self>, guard: Guard) {
        self.ring(guard, |_| true);
        self.moved.ring();
        self.begin_due_by_hand();
    }

    /// Rings for those who wait for these flights. Not under the pin.
    fn ring(&self, guard: Guard, which: impl Fn(&Flight<K, V>) -> bool) {
        let flights = self.flights.shares(&guard, which);
        drop(guard);
        for flight in flights {
            flight.ring();
        }
    }

    /// Hands a job to the executor. One that is refused is dropped.
    pub(crate) fn execute(&self, job: Job) -> Result<(), Rejected> {
        match &self.executor {
            Some(given) => given.execute(job),
            None => self.keeper.execute(job),
        }
    }

    /// Counts a refresh that was refused.
    pub(crate) fn count_refused(&self, taken: &Result<(), Rejected>) {
        if taken.is_err() {
            self.counters.add(Count::RefusedRefreshes);
        }
    }

    /// The loads under way, without claims that are not won yet.
    fn each_flight<'g>(&'g self, guard: &'g Guard, mut each: impl FnMut(&'g Flight<K, V>)) {
        self.flights.each(guard, |flight| {
            if flight.is_under_way() {
                each(flight);
            }
        });
    }

    pub(crate) fn in_flight(&self, guard: &Guard) -> Vec<InFlight<K>>
    where
        K: Clone,
    {
        let now = self.time.now();
        let mut loads = Vec::new();
        self.each_flight(guard, |flight| {
            let key = flight.target.key().clone();
            loads.push(InFlight { key, age: now.since(flight.claim.at), waiters: flight.waiters() });
        });
        loads
    }

    pub(crate) fn stats(&self, guard: &Guard) -> Stats {
        let mut stats = self.counters.stats();
        self.each_flight(guard, |flight| {
            stats.in_flight += 1;
            stats.waiters += flight.waiters() as u64;
        });
        stats.breaker_open = self.is_breaker_open();
        stats.drop_panics = drop_panics();
        stats.unreclaimed = unreclaimed();
        stats.refresh_queue_depth = self.keeper.depth() as u64;
        stats
    }
}

impl<K, V, S> Core<K, V, S>
where
    K: Eq + Hash,
    S: BuildHasher + 'static,
{
    #[inline]
    pub(crate) fn hash<Q>(&self, key: &Q) -> u64
    where
        K: Borrow<Q>,
        Q: Hash + ?Sized,
    {
        hash_of(&self.hasher, key)
    }

    /// Counts a call for a key that was answered at once, or that loads or waits.
    #[inline]
    pub(crate) fn count_access<Q>(&self, key: &Q, what: Count)
    where
        K: Borrow<Q>,
        Q: Hash + ?Sized,
    {
        self.counters.access_on(number(), what, || self.hash(key));
    }

    /// The slot of a key and its state, which is never `Dead`.
    #[inline]
    fn seek<'g, Q>(&'g self, hash: u64, key: &Q, guard: &'g Guard) -> Option<Found<'g, K, V>>
    where
        K: Borrow<Q>,
        Q: Eq + ?Sized,
    {
        let table = &self.shard(hash).table;
        loop {
            let slot = table.find(hash, |slot| slot.key().borrow() == key, guard)?;
            match slot.load(guard) {
                State::Dead => drop(table.unlink(slot, guard)),
                state => return Some((slot, state)),
            }
        }
    }

    /// What is seen of a key at first: all that most reads need. Notes a hit.
    #[inline(always)]
    pub(crate) fn glance<'g, Q>(&'g self, key: &Q, hash: u64, guard: &'g Guard) -> Glance<'g, V>
    where
        K: Borrow<Q>,
        Q: Eq + ?Sized,
    {
        match self.shard(hash).table.find(hash, |slot| slot.key().borrow() == key, guard) {
            Some(slot) => match self.simply_fresh(slot, guard) {
                Some(cell) => {
                    slot.mark().hit();
                    Glance::Fresh(&cell.value)
                }
                None => Glance::Unclear,
            },
            None => Glance::Nothing,
        }
    }

    /// A slot's value, if it is fresh and nothing needs to be noted.
    #[inline(always)]
    fn simply_fresh<'g>(&self, slot: &'g Slot<K, V>, guard: &'g Guard) -> Option<&'g Cell<V>> {
        let simply = self.switches.serves_simply();
        let cell = slot.ready_cell(guard)?;
        let fresh = cell.times.are_fresh(|| self.with_window(self.time.now()));
        (fresh && simply).then_some(cell)
    }

    /// The value of a key, if it may be served. `used` notes that it is used.
    #[inline(never)]
    pub(crate) fn read<'g, Q>(
        &'g self,
        key: &Q,
        hash: u64,
        used: bool,
        guard: &'g Guard,
    ) -> Result<Hit<'g, V>, Nothing>
    where
        K: Borrow<Q>,
        Q: Eq + ?Sized,
    {
        if self.switches.is_bypassed() {
            return Err(Nothing::There);
        }
        let Some((slot, state)) = self.seek(hash, key, guard) else { return Err(Nothing::There) };
        let Some(cell) = state.held().cell() else { return Err(Nothing::There) };
        match self.stage(slot, cell, used) {
            stage @ (Stage::Fresh | Stage::Stale) => {
                if used {
                    slot.mark().hit();
                }
                Ok(Hit { cell, stage })
            }
            Stage::Grace => Err(Nothing::There),
            Stage::Dead => Err(Nothing::ButSpent),
        }
    }

    /// Whether a key has a value that is fresh until then, if nobody uses it.
    pub(crate) fn is_fresh_until<Q>(&self, key: &Q, until: Moment, guard: &Guard) -> bool
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let Some((slot, state)) = self.seek(self.hash(key), key, guard) else { return false };
        state.held().cell().is_some_and(|cell| self.stage_at(slot, cell, until) == Stage::Fresh)
    }

    /// Whether a hit of a key would note something in its slot.
    pub(crate) fn hit_would_write<Q>(&self, key: &Q, hash: u64, guard: &Guard) -> bool
    where
        K: Borrow<Q>,
        Q: Eq + ?Sized,
    {
        self.seek(hash, key, guard).is_some_and(|(slot, _)| slot.mark().load().is_marked_by_hit())
    }

    /// Takes the slot of a key out that a read has found spent. Not under the read's pin, since the listener is told.
    #[cold]
    pub(crate) fn reap_key<Q>(&self, key: &Q, hash: u64)
    where
        K: Borrow<Q>,
        Q: Eq + ?Sized,
    {
        let stay = self.stay(pin());
        if let Some((slot, _)) = self.seek(hash, key, &stay) {
            self.reap(slot, self.time.now(), &stay);
        }
    }
}

impl<K, V, S> Drop for Core<K, V, S> {
    fn drop(&mut self) {
        if cfg!(debug_assertions) && !std::thread::panicking() {
            self.audit();
        }
        for shard in &mut self.shards {
            bury_all(&mut shard.table);
        }
        // What this thread has retired goes with it, unless a pin holds it.
        flush();
    }
}
