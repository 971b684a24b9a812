//! The synchronous front: the `Cache` type, its reads and writes, and loads on the caller's thread.

mod ask;
mod compute;
mod keep_warm;
mod load;
#[cfg(all(test, loom))]
mod models;
mod pinned;
#[cfg(all(test, not(loom)))]
mod stall;
mod switches;
mod warm;

pub use ask::{Answer, Ask, Provenance};
pub(crate) use compute::decide_by;
pub use compute::{Op, Outcome};
pub use keep_warm::KeepWarm;
pub use pinned::Pinned;
pub(crate) use warm::Warming;
pub use warm::{WarmOptions, WarmOutcome, WarmProgress, WarmReport};

use crate::call::gathering;
use crate::clock::{Time, Wake};
use crate::config::{CacheBuilder, Parts};
use crate::engine::{Core, Glance, Nothing, teller, upkeep};
use crate::error::BuildError;
use crate::freshness::Ttl;
use crate::hash::DefaultHashBuilder;
use crate::observe::{Count, HotKey, InFlight, Stats};
use crate::primitive::epoch::{Guard, pin, pin_numbered};
use std::borrow::Borrow;
use std::collections::VecDeque;
use std::fmt;
use std::hash::{BuildHasher, Hash};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// A concurrent cache in which every load of a key happens once. A cheap handle: clones share the same cache.
///
/// See the [crate's documentation](crate) for a guide. When the last handle is dropped, the background queue is
/// closed, jobs that wait are dropped unrun, and every value goes at once; nothing is waited for.
///
/// # Examples
/// ```
/// use quell::Cache;
///
/// let cache: Cache<String, u64> = Cache::builder().build();
/// assert_eq!(cache.get_with("answer", || 42), 42);
/// assert_eq!(cache.get("answer"), Some(42));
/// ```
pub struct Cache<K, V, S = DefaultHashBuilder> {
    /// Dropped before `core`, which it needs to end the background work.
    life: Arc<Life<K, V, S>>,
    pub(crate) core: Arc<Core<K, V, S>>,
}

/// Shared by the handles alone, so that the last of them ends the background work.
struct Life<K, V, S>(Weak<Core<K, V, S>>);

impl<K, V, S> Drop for Life<K, V, S> {
    fn drop(&mut self) {
        if let Some(core) = self.0.upgrade() {
            core.keeper.close();
            core.moved.ring();
        }
    }
}

/// A panic in user code leaves a cache whole, see the table in the crate's documentation.
impl<K, V, S> UnwindSafe for Cache<K, V, S> {}
impl<K, V, S> RefUnwindSafe for Cache<K, V, S> {}

impl<K, V, S> Clone for Cache<K, V, S> {
    fn clone(&self) -> Self {
        Self { core: self.core.clone(), life: self.life.clone() }
    }
}

impl<K, V, S> fmt::Debug for Cache<K, V, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache")
            .field("name", &self.core.settings.name)
            .field("len", &self.core.values())
            .finish_non_exhaustive()
    }
}

impl<K, V> Cache<K, V>
where
    K: Hash + Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    /// A cache for up to `max_capacity` entries, with default settings otherwise.
    #[must_use]
    pub fn new(max_capacity: u64) -> Self {
        Self::builder().max_capacity(max_capacity).build()
    }

    /// Starts to build a cache.
    pub fn builder() -> CacheBuilder<K, V> {
        CacheBuilder::new()
    }
}

impl<K, V, S> CacheBuilder<K, V, S>
where
    K: Hash + Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    /// Builds the cache.
    ///
    /// # Panics
    /// With the text of the [`BuildError`] that [`try_build`](Self::try_build) would return.
    #[must_use]
    pub fn build(self) -> Cache<K, V, S> {
        match self.try_build() {
            Ok(cache) => cache,
            Err(error) => panic!("{error}"),
        }
    }

    /// Builds the cache.
    ///
    /// # Errors
    /// A [`BuildError`] that names the setting, its value, and the rule that it breaks.
    pub fn try_build(self) -> Result<Cache<K, V, S>, BuildError> {
        let (settings, Parts { hasher, clock, executor }) = self.check()?;
        let mut life = None;
        let core = Arc::new_cyclic(|core: &Weak<Core<K, V, S>>| {
            let life = life.insert(Arc::new(Life(core.clone())));
            let time = match clock {
                None => Time::Coarse,
                Some(clock) => {
                    // A clock may outlive many caches: what stays with it is small.
                    let life = Arc::downgrade(life);
                    let wake: Wake = Box::new(move || {
                        if let Some(core) = life.upgrade().and_then(|life| life.0.upgrade()) {
                            core.wake_waiters(pin());
                        }
                    });
                    let by_hand = clock.subscribe(wake);
                    Time::Given { clock, by_hand }
                }
            };
            // A clock that is moved by hand leaves the sweeping to its mover, and an executor of the user's takes all work.
            let sweeps = executor.is_none() && !time.is_moved_by_hand();
            let upkeep = (!time.is_moved_by_hand()).then(|| upkeep(core.clone()));
            let teller = settings.listener.clone().map(|listener| teller(listener, core.clone()));
            let gathering = gathering(&settings);
            let mut core = Core::new(settings, time, hasher, executor, upkeep, sweeps, teller);
            core.gathering = gathering;
            core
        });
        let life = life.expect("made together with the core");
        Ok(Cache { life, core })
    }
}

impl<K, V, S> Cache<K, V, S>
where
    K: Hash + Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    /// The value of `key`, fresh or stale. Never loads, never waits. Lock-free.
    #[inline]
    pub fn get<Q>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.read(key, V::clone)
    }

    /// Calls `read` with the value of `key`, fresh or stale, and without cloning it. Never loads, never waits.
    /// Lock-free.
    ///
    /// `read` runs under an epoch pin, so that memory freed meanwhile by anybody waits for it: keep it short.
    #[inline]
    pub fn read<Q, R>(&self, key: &Q, read: impl FnOnce(&V) -> R) -> Option<R>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let hash = self.core.hash(key);
        let (guard, number) = pin_numbered();
        match self.core.glance(key, hash, &guard) {
            Glance::Fresh(value) => {
                self.core.counters.access_on(number, Count::Hits, || hash);
                Some(read(value))
            }
            Glance::Nothing => {
                self.core.counters.add_on(number, Count::Misses);
                None
            }
            Glance::Unclear => self.read_closely(key, hash, read, guard, number),
        }
    }

    /// `read` of what needs more than a glance.
    #[inline(never)]
    fn read_closely<Q, R>(
        &self,
        key: &Q,
        hash: u64,
        read: impl FnOnce(&V) -> R,
        guard: Guard,
        number: usize,
    ) -> Option<R>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let found = self.core.read(key, hash, true, &guard);
        self.core.count_read(&found, hash, number);
        let nothing = match found {
            Ok(hit) => return Some(read(&hit.cell.value)),
            Err(nothing) => nothing,
        };
        drop(guard);
        self.reap_if(nothing, key, hash);
        None
    }

    /// The value of `key`, fresh or stale; neither counted, nor noted as a use. Lock-free.
    pub fn peek<Q>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.look(key, V::clone)
    }

    /// Whether `key` has a value, fresh or stale; neither counted, nor noted as a use. Lock-free.
    pub fn contains_key<Q>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.look(key, |_| ()).is_some()
    }

    /// `read` that leaves no trace.
    fn look<Q, R>(&self, key: &Q, read: impl FnOnce(&V) -> R) -> Option<R>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let hash = self.core.hash(key);
        let found = self.core.read(key, hash, false, &pin()).map(|hit| read(&hit.cell.value));
        found.map_err(|nothing| self.reap_if(nothing, key, hash)).ok()
    }

    /// What has expired and been met goes.
    #[inline]
    fn reap_if<Q>(&self, nothing: Nothing, key: &Q, hash: u64)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        if nothing == Nothing::ButSpent {
            self.core.reap_key(key, hash);
        }
    }

    /// Clones of all entries, fresh or stale. Weakly consistent: an entry that is there throughout is met once; what
    /// comes or goes meanwhile may be met or not. Holds nothing between two steps.
    pub fn iter(&self) -> Iter<'_, K, V, S>
    where
        K: Clone,
    {
        Iter { cache: self, shard: 0, at: Some(0), ready: VecDeque::new() }
    }

    /// How many values the cache holds. Those that have expired count until they are swept away, see
    /// [`run_pending_tasks`](Self::run_pending_tasks); keys of which only a failure is remembered do not.
    pub fn len(&self) -> usize {
        self.core.values()
    }

    /// Whether the cache holds no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sweeps everything that has expired, and hands what was removed on this thread to the allocator, as far as no
    /// reader holds it. Nothing waits for this to be called: writes sweep a little each.
    pub fn run_pending_tasks(&self) {
        self.core.run_pending_tasks();
    }

    /// What all entries weigh, as [`len`](Self::len) without a [`weigher`](CacheBuilder::weigher). It includes what is about to
    /// be stored, and keys of which only a failure is remembered, which weigh one.
    pub fn weighted_size(&self) -> u64 {
        self.core.weight()
    }

    /// Sets the capacity, in the units of [`max_capacity`](CacheBuilder::max_capacity), and drops what is too much before it
    /// returns. `u64::MAX` lifts the limit. A cache that had no limit walks over all its entries.
    pub fn set_capacity(&self, entries_or_weight: u64) {
        self.core.set_capacity(entries_or_weight);
    }

    /// Puts a value in the place of whatever is there. A load of the key that is under way gives its value to those
    /// who wait for it already, and stores nothing. Lock-free.
    pub fn insert(&self, key: K, value: V) {
        self.insert_for(key, value, Ttl::default());
    }

    /// As [`insert`](Self::insert), with a hard TTL of its own. With a TTL of zero nobody is served the value, and
    /// what was there goes.
    pub fn insert_with_ttl(&self, key: K, value: V, ttl: Duration) {
        self.insert_for(key, value, Ttl { soft: None, hard: Some(ttl) });
    }

    fn insert_for(&self, key: K, value: V, own: Ttl) {
        let new = self.core.weighed(&key, value, own);
        self.core.insert(key, new, &self.core.stay(pin()));
    }

    /// Removes the value of `key` and returns it, if it was still served. A load of the key that is under way stores
    /// nothing. Lock-free.
    pub fn remove<Q>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.core.remove(key, &self.core.stay(pin()))
    }

    /// Removes the value of `key`. No call that begins after this returns gets a value that was loaded before, even
    /// by a load that is still under way. Lock-free.
    pub fn invalidate<Q>(&self, key: &Q)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.core.invalidate(key, &self.core.stay(pin()));
    }

    /// [`invalidate`](Self::invalidate) for every key. Walks the whole table; lock-free.
    pub fn invalidate_all(&self) {
        crate::engine::source_fence();
        self.core.each_bucket(|shard, at| self.core.clear_bucket(shard, at, &self.core.stay(pin())));
    }

    /// Removes every entry for which `keep` is false, values in grace included. Loads under way are detached: they store nothing, since nobody can
    /// say what they will bring. `keep` runs under an epoch pin, and may be asked twice about an entry that changes
    /// meanwhile.
    pub fn retain(&self, mut keep: impl FnMut(&K, &V) -> bool) {
        crate::engine::source_fence();
        self.core
            .each_bucket(|shard, at| self.core.retain_bucket(shard, at, &mut keep, &self.core.stay(pin())));
    }

    /// Makes the value of `key` stale now, so that the next load refreshes it; it is still served until its hard
    /// deadline. A load that is under way stores nothing. Returns whether there was a value to be served.
    pub fn expire<Q>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.core.expire(key, &self.core.stay(pin()))
    }

    /// Whether a hit of `key` would write to its entry now; for measurements of the policy.
    #[doc(hidden)]
    pub fn hit_would_write<Q>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.core.hit_would_write(key, self.core.hash(key), &pin())
    }

    /// What the cache has done, and what it is doing now.
    pub fn stats(&self) -> Stats {
        self.core.stats(&pin())
    }

    /// The loads under way. Those that have been detached by a write are among them until they end.
    pub fn in_flight(&self) -> Vec<InFlight<K>>
    where
        K: Clone,
    {
        self.core.in_flight(&pin())
    }

    /// The `n` keys that are accessed most, the hottest first, of those that have a value or are being loaded. An access is a hit,
    /// or a call that may load and finds nothing; a [`peek`](Self::peek) is none, nor is a read that finds nothing.
    ///
    /// An estimate, in 8 KiB whatever the traffic, and without keys: from the first call on, which knows of none yet, about one
    /// access in 128 is noted, by its hash. Counts are halved after each two million accesses or so, and follow the traffic. There
    /// is room for 1,024 hashes, in sets of eight: no more keys than that are told of, and beyond some 200 of them one that
    /// belongs there may be missing.
    ///
    /// # Examples
    /// ```
    /// let cache = quell::Cache::<&str, u32>::builder().build();
    /// cache.insert("hot", 1);
    /// assert!(cache.hot_keys(1).is_empty(), "nothing has been noted yet");
    /// for _ in 0..10_000 {
    ///     cache.get("hot");
    /// }
    /// let hottest = &cache.hot_keys(1)[0];
    /// assert_eq!(hottest.key, "hot");
    /// assert!((5_000..20_000).contains(&hottest.hits));
    /// ```
    pub fn hot_keys(&self, n: usize) -> Vec<HotKey<K>>
    where
        K: Clone,
    {
        self.core.hot_keys(n, &pin())
    }

    /// The name that the builder gave it.
    pub fn name(&self) -> &str {
        &self.core.settings.name
    }
}

/// Clones of a cache's entries, see [`Cache::iter`].
pub struct Iter<'a, K, V, S = DefaultHashBuilder> {
    cache: &'a Cache<K, V, S>,
    shard: usize,
    at: Option<u64>,
    ready: VecDeque<(K, V)>,
}

impl<K: Clone, V: Clone, S> Iterator for Iter<'_, K, V, S> {
    type Item = (K, V);

    fn next(&mut self) -> Option<(K, V)> {
        loop {
            if let Some(entry) = self.ready.pop_front() {
                return Some(entry);
            }
            let core = &self.cache.core;
            if self.shard == core.shard_count() {
                return None;
            }
            let Some(at) = self.at else {
                (self.shard, self.at) = (self.shard + 1, Some(0));
                continue;
            };
            let ready = &mut self.ready;
            self.at = core.entries(self.shard, at, |k, v| ready.push_back((k.clone(), v.clone())), &pin());
        }
    }
}

impl<K, V, S> fmt::Debug for Iter<'_, K, V, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iter").finish_non_exhaustive()
    }
}
