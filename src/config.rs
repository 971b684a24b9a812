//! A cache's settings, and the builder that checks them.

use std::fmt;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Clock;
use crate::error::{BoxError, BuildError};
use crate::executor::{Executor, Spawner};
use crate::freshness::{Backoff, Lifetime, Ttl};
use crate::hash::DefaultHashBuilder;
use crate::loader::{
    AsyncBatchLoader, AsyncLoader, BatchLoader, Expiry, Fallback, InBatches, IntoAsyncLoader, Loader,
    OneByOne, SharedAsyncLoader, SharedExpiry, SharedLoader,
};
use crate::observe::RemovalCause;
use crate::policy::UNBOUNDED;

mod breaker;

pub use breaker::Breaker;

/// How long a leader may take before somebody else may lead, unless the builder says otherwise.
const LEASE: Duration = Duration::from_secs(30);
/// More shards than this serve nobody.
const MAX_SHARDS: usize = 1 << 16;

/// What an entry weighs.
pub(crate) type Weigher<K, V> = Arc<dyn Fn(&K, &V) -> u32 + Send + Sync>;
/// Is told of each value that leaves.
pub(crate) type Listener<K, V> = Arc<dyn Fn(&K, &V, RemovalCause) + Send + Sync>;

/// Whether calls that may load refresh values before they go stale, see [`CacheBuilder::early_refresh`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum EarlyRefresh {
    /// Never.
    #[doc(hidden)]
    Off,
    #[doc(hidden)]
    Beta(f64),
    #[doc(hidden)]
    MissProbability(f64),
}

impl EarlyRefresh {
    /// XFetch with this factor: 1 balances early loads against misses; more is earlier. Above 0.
    #[must_use]
    pub const fn beta(beta: f64) -> Self {
        Self::Beta(beta)
    }

    /// XFetch with a factor that is chosen for each key, by how long its loads take and how often it is read, so that it goes
    /// stale without a refresh with this probability. Between 0 and 1.
    #[must_use]
    pub const fn miss_probability(p: f64) -> Self {
        Self::MissProbability(p)
    }

    /// Never.
    #[must_use]
    pub const fn off() -> Self {
        Self::Off
    }

    pub(crate) fn check(self) -> Result<(), BuildError> {
        let rule = match self {
            Self::Beta(beta) if !(beta > 0.0 && beta.is_finite()) => "a `beta` above 0",
            Self::MissProbability(p) if !(p > 0.0 && p < 1.0) => "a probability between 0 and 1",
            _ => return Ok(()),
        };
        Err(BuildError::new("early_refresh", format!("{self:?}"), rule))
    }
}

/// Whether a cache may have both of these TTLs.
pub(crate) fn soft_and_hard(soft: Option<Duration>, hard: Option<Duration>) -> Result<(), BuildError> {
    match (soft, hard) {
        (Some(soft), Some(hard)) if soft > hard => Err(BuildError::new(
            "soft_ttl",
            format!("{soft:?}, with a time_to_live of {hard:?}"),
            "at most time_to_live",
        )),
        _ => Ok(()),
    }
}

/// What a cache was built with, checked.
pub(crate) struct Settings<K, V> {
    pub(crate) name: Arc<str>,
    pub(crate) lifetime: Lifetime,
    pub(crate) time_to_idle: Option<Duration>,
    /// How long a dead value may be served when a load fails or a wait ends.
    pub(crate) grace: Duration,
    pub(crate) error_backoff: Option<Backoff>,
    pub(crate) early_refresh: EarlyRefresh,
    /// How long an absence is remembered.
    pub(crate) negative_ttl: Option<Duration>,
    pub(crate) lease: Duration,
    pub(crate) max_concurrent_loads: Option<usize>,
    pub(crate) max_waiters: Option<usize>,
    pub(crate) breaker: Option<Breaker>,
    pub(crate) wait_timeout: Option<Duration>,
    pub(crate) max_capacity: u64,
    pub(crate) initial_capacity: usize,
    pub(crate) shards: usize,
    pub(crate) weigher: Option<Weigher<K, V>>,
    pub(crate) listener: Option<Listener<K, V>>,
    pub(crate) expiry: Option<SharedExpiry<K, V>>,
    pub(crate) fallback: Option<Fallback<K, V>>,
    pub(crate) loader: Option<SharedLoader<K, V>>,
    pub(crate) async_loader: Option<SharedAsyncLoader<K, V>>,
    /// How many keys a batch loader is given at once, at most.
    pub(crate) max_batch_size: usize,
    /// How long a single load waits for others, at most, to be one batch with them.
    pub(crate) max_batch_delay: Duration,
    pub(crate) spawner: Option<Arc<dyn Spawner>>,
}

impl<K, V> Settings<K, V> {
    /// Whether a loader is attached.
    pub(crate) fn has_loader(&self) -> bool {
        self.loader.is_some() || self.async_loader.is_some()
    }
}

/// Builds a [`Cache`](crate::Cache); made by [`Cache::builder`](crate::Cache::builder).
///
/// Every setting has a default. Durations may be anything from zero to [`Duration::MAX`], which stands for "for
/// ever"; times are exact up to one tick of the clock (4 ms for the default one), and one part in 2^26 of those that
/// are not whole seconds.
#[must_use]
pub struct CacheBuilder<K, V, S = DefaultHashBuilder> {
    name: String,
    time_to_live: Option<Duration>,
    soft_ttl: Option<Duration>,
    time_to_idle: Option<Duration>,
    jitter: f64,
    stale_if_error: Duration,
    error_backoff: Option<Backoff>,
    early_refresh: Option<EarlyRefresh>,
    negative_ttl: Option<Duration>,
    lease: Duration,
    max_concurrent_loads: Option<usize>,
    max_waiters: Option<usize>,
    breaker: Option<Breaker>,
    wait_timeout: Option<Duration>,
    max_capacity: u64,
    initial_capacity: usize,
    shards: Option<usize>,
    weigher: Option<Weigher<K, V>>,
    listener: Option<Listener<K, V>>,
    expiry: Option<SharedExpiry<K, V>>,
    fallback: Option<Fallback<K, V>>,
    loader: Option<SharedLoader<K, V>>,
    async_loader: Option<SharedAsyncLoader<K, V>>,
    max_batch_size: usize,
    max_batch_delay: Duration,
    clock: Option<Arc<dyn Clock>>,
    executor: Option<Arc<dyn Executor>>,
    spawner: Option<Arc<dyn Spawner>>,
    hasher: S,
}

/// What the cache is made of beside its settings.
pub(crate) struct Parts<S> {
    pub(crate) hasher: S,
    pub(crate) clock: Option<Arc<dyn Clock>>,
    pub(crate) executor: Option<Arc<dyn Executor>>,
}

impl<K, V> CacheBuilder<K, V> {
    pub(crate) fn new() -> Self {
        Self {
            name: String::new(),
            time_to_live: None,
            soft_ttl: None,
            time_to_idle: None,
            jitter: 0.0,
            stale_if_error: Duration::ZERO,
            error_backoff: None,
            early_refresh: None,
            negative_ttl: None,
            lease: LEASE,
            max_concurrent_loads: None,
            max_waiters: None,
            breaker: None,
            wait_timeout: None,
            max_capacity: UNBOUNDED,
            initial_capacity: 0,
            shards: None,
            weigher: None,
            listener: None,
            expiry: None,
            fallback: None,
            loader: None,
            async_loader: None,
            max_batch_size: usize::MAX,
            max_batch_delay: Duration::ZERO,
            clock: None,
            executor: None,
            spawner: None,
            hasher: DefaultHashBuilder::default(),
        }
    }
}

impl<K, V, S> CacheBuilder<K, V, S> {
    /// A name for error texts and thread names. Default: none.
    pub fn name(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    /// The hard TTL: how long a value is served after it was loaded or inserted. Default: for ever.
    pub fn time_to_live(mut self, ttl: Duration) -> Self {
        self.time_to_live = Some(ttl);
        self
    }

    /// How long a value is fresh. After that it is stale: served at once, while one caller or one background job
    /// refreshes it (as `stale-while-revalidate`, RFC 5861 section 3). At most `time_to_live`. Default: as long as it is
    /// served.
    pub fn soft_ttl(mut self, soft_ttl: Duration) -> Self {
        self.soft_ttl = Some(soft_ttl);
        self
    }

    /// How long a value is served after it was last read by a counting read, loaded or inserted. Default: for ever.
    ///
    /// With this setting a hit notes its time, once per tick of the clock.
    pub fn time_to_idle(mut self, idle: Duration) -> Self {
        self.time_to_idle = Some(idle);
        self
    }

    /// Spreads deadlines: each entry's soft and hard TTL are scaled by one random factor from `(1 - jitter, 1]`, so
    /// that the TTL stays an upper bound and entries loaded together do not end together. From 0, the default, to 1.
    pub fn jitter(mut self, jitter: f64) -> Self {
        self.jitter = jitter;
        self
    }

    /// Gives each entry times of its own, from its key, its value and what its load took. Default: all have the cache's.
    pub fn expire_after(mut self, expiry: impl Expiry<K, V>) -> Self {
        self.expiry = Some(Arc::new(expiry));
        self
    }

    /// Grace: how long after its hard deadline a value may still be served when the load that should replace it fails
    /// or a wait for it ends (as `stale-if-error`, RFC 5861 section 4). Default: zero.
    pub fn stale_if_error(mut self, grace: Duration) -> Self {
        self.stale_if_error = grace;
        self
    }

    /// How long after a failed load of a key the next one may start. Until then a value that is still served or in grace is
    /// served, and other calls that can fail get a [`BackingOff`](crate::LoadErrorKind::BackingOff) error at once; any success
    /// (a load or a write) ends it. Calls that can't fail load all the same. How long, and after which source: [`Backoff`].
    /// Default: none, but a refresh in the background waits for 100 ms.
    pub fn error_backoff(mut self, backoff: Backoff) -> Self {
        self.error_backoff = Some(backoff);
        self
    }

    /// Whether a call that may load refreshes a fresh value at random before its soft deadline, the more probably the nearer that
    /// is and the longer its loads take: XFetch (Vattani, Chierichetti and Lowenstein, PVLDB 8(8), 2015). So a popular key is
    /// loaded before it goes stale, by one caller, while all are served what is fresh. Not before half of the time has passed for
    /// which a value is fresh. Reads that never load ([`get`](crate::Cache::get)) do not take part.
    ///
    /// Default: [`EarlyRefresh::beta(1.0)`](EarlyRefresh::beta) with an attached loader and without a `soft_ttl`; else
    /// [`off`](EarlyRefresh::off). An entry takes 16 bytes more with it.
    pub fn early_refresh(mut self, early: EarlyRefresh) -> Self {
        self.early_refresh = Some(early);
        self
    }

    /// How long it is remembered that the source has no such key (negative caching, as RFC 2308 for names): until then
    /// [`get_or_load`](crate::Cache::get_or_load) and [`ask`](crate::Cache::ask) say
    /// [`Absent`](crate::LoadErrorKind::Absent) and
    /// [`optionally_get_with`](crate::Cache::optionally_get_with) `None` without a load. Any write ends it. Default: not at all.
    pub fn negative_ttl(mut self, ttl: Duration) -> Self {
        self.negative_ttl = Some(ttl);
        self
    }

    /// How long a leader may take before somebody else may lead: a load that hangs holds its key no longer than this (as the
    /// leases of Nishtala and others, *Scaling Memcache at Facebook*, NSDI 2013).
    /// More than zero; with [`Duration::MAX`] a load that never ends is waited for for ever. Default: 30 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// How many loads may run at one time, over all keys. A fallible call that would be one too many gets a stale value, one in
    /// grace, the fallback's, or an [`Overloaded`](crate::LoadErrorKind::Overloaded) error, at once. Refreshes
    /// begin only while less than half of it is in use, or less than three quarters if the value is stale and will soon be
    /// served no more; they count from when they are put on an executor's queue. Calls that can't fail count, and are never
    /// refused; nor is one that takes over from a load whose lease is over. A [`load_many`](crate::Cache::load_many) counts once
    /// for each key that it loads, and is refused only if there is no room for the first. At least 1. Default: no limit.
    pub fn max_concurrent_loads(mut self, loads: usize) -> Self {
        self.max_concurrent_loads = Some(loads);
        self
    }

    /// How many callers may wait for others' loads at one time, over all keys. A fallible call that would be one too many gets
    /// what it would get at the end of its wait, or an [`Overloaded`](crate::LoadErrorKind::Overloaded) error, at once. Calls
    /// that can't fail count, and are never refused. Default: no limit.
    pub fn max_waiters(mut self, waiters: usize) -> Self {
        self.max_waiters = Some(waiters);
        self
    }

    /// Leaves a failing source alone: when the loads of this cache, over all keys, fail too often, no load begins for a while but
    /// those of calls that can't fail; a stale value is served without a refresh, and a fallible call that has nothing to serve
    /// gets one in grace, the fallback's, or a [`BackingOff`](crate::LoadErrorKind::BackingOff) error, at once (Nygard, *Release
    /// It!*, 2007, "Circuit Breaker"). After the [pause](Breaker::pause) one call, of whatever key, loads and so tries the source;
    /// the others go on as before. The first load that succeeds, whosever it is, ends it; after one that fails the pause begins
    /// anew.
    ///
    /// An error, a panic, and a load whose lease ended before it did are failures; a value, "not modified" and an absence are none.
    /// A load that was given up before its lease ended counts for nothing, nor does a `compute`. Of
    /// [`load_many`](crate::Cache::load_many) and `get_many` each key counts. The rate is that of a sliding window, as two fixed
    /// windows tell it, of which the earlier counts for the part that is still covered. Loads that run already may be joined.
    /// Default: none.
    pub fn breaker(mut self, breaker: Breaker) -> Self {
        self.breaker = Some(breaker);
        self
    }

    /// How long a fallible call waits for somebody else's load. When it ends, the call gets a stale value, one in
    /// grace, the fallback's, or a [`TimedOut`](crate::LoadErrorKind::TimedOut) error: never a load of its own.
    /// Default: no limit but the lease.
    pub fn wait_timeout(mut self, timeout: Duration) -> Self {
        self.wait_timeout = Some(timeout);
        self
    }

    /// The last resort of a fallible call whose load failed or whose wait ended. What it returns is not stored. Default: none.
    pub fn fallback(mut self, fallback: impl Fn(&K) -> Option<V> + Send + Sync + 'static) -> Self {
        self.fallback = Some(Arc::new(fallback));
        self
    }

    /// How many entries the cache holds at most; with a [`weigher`](Self::weigher), how much weight. When there is more, the
    /// [policy](crate#eviction) drops what is worth least. Zero: nothing is stored, and loads are shared all the same.
    /// Default, and with `u64::MAX`: no limit.
    ///
    /// While threads store, the cache may be over it by one entry for each of them.
    pub fn max_capacity(mut self, entries_or_weight: u64) -> Self {
        self.max_capacity = entries_or_weight;
        self
    }

    /// What an entry weighs, in the units of `max_capacity`: its bytes, say. Asked once per value, before it is stored. Zero
    /// is legal: such an entry takes no room, and may be dropped like any other. One that weighs more than the whole
    /// capacity is given to its callers and not stored. Default: one.
    pub fn weigher(mut self, weigher: impl Fn(&K, &V) -> u32 + Send + Sync + 'static) -> Self {
        self.weigher = Some(Arc::new(weigher));
        self
    }

    /// Is told of each value that has left the cache, once, and why: on the thread that took it out, when that holds
    /// nothing any more. It may use the cache; of what leaves by that it is told when it has returned, so one that puts back
    /// whatever was dropped for want of room never comes to an end. If it panics, that is counted. It is not told of the
    /// values that go with the whole cache. Default: nobody is told.
    pub fn eviction_listener(
        mut self,
        listener: impl Fn(&K, &V, RemovalCause) + Send + Sync + 'static,
    ) -> Self {
        self.listener = Some(Arc::new(listener));
        self
    }

    /// Room for this many entries before the table first grows. At most 2^32. Default: 0, for which the table has a few buckets.
    pub fn initial_capacity(mut self, entries: usize) -> Self {
        self.initial_capacity = entries;
        self
    }

    /// How many independent tables the cache has, rounded up to a power of two. From 1 to 65,536. Default: four times
    /// the number of processors.
    pub fn shards(mut self, shards: usize) -> Self {
        self.shards = Some(shards);
        self
    }

    /// The hasher. Weak ones are folded, so that they need not fill all bits. Default: ahash with random keys.
    pub fn hasher<S2>(self, hasher: S2) -> CacheBuilder<K, V, S2> {
        let Self {
            name,
            time_to_live,
            soft_ttl,
            time_to_idle,
            jitter,
            stale_if_error,
            error_backoff,
            early_refresh,
            negative_ttl,
            lease,
            max_concurrent_loads,
            max_waiters,
            breaker,
            wait_timeout,
            max_capacity,
            initial_capacity,
            shards,
            weigher,
            listener,
            expiry,
            fallback,
            loader,
            async_loader,
            max_batch_size,
            max_batch_delay,
            clock,
            executor,
            spawner,
            hasher: _,
        } = self;
        CacheBuilder {
            name,
            time_to_live,
            soft_ttl,
            time_to_idle,
            jitter,
            stale_if_error,
            error_backoff,
            early_refresh,
            negative_ttl,
            lease,
            max_concurrent_loads,
            max_waiters,
            breaker,
            wait_timeout,
            max_capacity,
            initial_capacity,
            shards,
            weigher,
            listener,
            expiry,
            fallback,
            loader,
            async_loader,
            max_batch_size,
            max_batch_delay,
            clock,
            executor,
            spawner,
            hasher,
        }
    }

    /// The clock. Default: the system's monotonic clock, read coarsely (4 ms).
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    /// Where background refreshes run. Default: a keeper of the cache's own, up to four threads that are started when the first
    /// refresh is due, and one that sweeps, started when the first value with a deadline, failure or absence is stored. With an
    /// executor there is no keeper, and nobody sweeps a cache that is not written to.
    pub fn executor(mut self, executor: impl Executor) -> Self {
        self.executor = Some(Arc::new(executor));
        self
    }

    /// Attaches a loader, for [`get_or_load`](crate::Cache::get_or_load) and refreshes in the background. Closures
    /// `|key: &K| ..` that return a `Result` are loaders. Default: none, so that each call brings its own load.
    pub fn loader(mut self, loader: impl Loader<K, V>) -> Self {
        self.loader = Some(Arc::new(OneByOne(loader)));
        self
    }

    /// [`loader`](Self::loader) for a closure, where the type of its argument is to be inferred.
    pub fn loader_fn<E>(self, load: impl Fn(&K) -> Result<V, E> + Send + Sync + 'static) -> Self
    where
        E: Into<BoxError> + 'static,
        K: 'static,
        V: 'static,
    {
        self.loader(load)
    }

    /// Attaches an async loader, for [`get_or_load_async`](crate::Cache::get_or_load_async) and refreshes in the background:
    /// an [`AsyncLoader`], or a closure `|key: &K| ..` or `|key: K| ..` that returns a future of a `Result`.
    ///
    /// With a [`loader`](Self::loader) too, calls of threads use that one, and those of tasks this one. Default: none.
    ///
    /// A load that a thread asks for, and a refresh in the background without a [`spawner`](Self::spawner) (or the feature
    /// `tokio`, under a runtime), is polled by a thread that is in no runtime: a future that needs one needs a spawner.
    pub fn async_loader<M>(self, loader: impl IntoAsyncLoader<K, V, M>) -> Self
    where
        K: Send + Sync + 'static,
        V: Send + Sync + 'static,
    {
        self.attach(loader.into_async_loader())
    }

    /// [`async_loader`](Self::async_loader) for a closure that takes its own key, where the type of its argument is to be
    /// inferred.
    pub fn async_loader_fn<E, R>(self, load: impl Fn(K) -> R + Send + Sync + 'static) -> Self
    where
        R: Future<Output = Result<V, E>> + Send + 'static,
        E: Into<BoxError> + 'static,
        K: Clone + Send + Sync + 'static,
        V: Send + Sync + 'static,
    {
        self.async_loader::<fn(K) -> R>(load)
    }

    fn attach(mut self, loader: impl AsyncLoader<K, V>) -> Self
    where
        K: Send + Sync + 'static,
        V: Send + Sync + 'static,
    {
        self.async_loader = Some(Arc::new(OneByOne(loader)));
        self
    }

    /// Attaches a loader that takes many keys at once, in place of a [`loader`](Self::loader): of the two, the one that is set
    /// last counts. Closures `|keys: &[K]| ..` that return a `Result` of pairs `(K, V)` are batch loaders.
    ///
    /// [`get_many`](crate::Cache::get_many) gives it all keys that it has to load, up to
    /// [`max_batch_size`](Self::max_batch_size) at once; to all else that loads it is a loader of one key, unless there is a
    /// [`max_batch_delay`](Self::max_batch_delay). A batch has the time of one [`lease`](Self::lease). Default: none.
    ///
    /// # Examples
    /// ```
    /// let load = |keys: &[u32]| Ok::<_, std::io::Error>(keys.iter().map(|n| (*n, n * n)).collect::<Vec<_>>());
    /// let cache = quell::Cache::builder().batch_loader(load).build();
    /// assert_eq!(cache.get_many([1, 2, 3]).unwrap().len(), 3);
    /// assert_eq!((cache.stats().loads, cache.get(&3)), (3, Some(9)));
    /// ```
    pub fn batch_loader(mut self, loader: impl BatchLoader<K, V>) -> Self
    where
        K: Hash + Eq,
    {
        self.loader = Some(Arc::new(InBatches(loader)));
        self
    }

    /// Attaches an async loader that takes many keys at once, in place of an [`async_loader`](Self::async_loader): of the two,
    /// the one that is set last counts. Closures `|keys: Vec<K>| ..` that return a future of a `Result` of pairs `(K, V)` are
    /// async batch loaders. Else as [`batch_loader`](Self::batch_loader). Default: none.
    ///
    /// # Examples
    /// ```
    /// # smol::block_on(async {
    /// let load = |keys: Vec<u32>| async move { Ok::<_, std::io::Error>(keys.into_iter().map(|n| (n, n * n))) };
    /// let cache = quell::Cache::builder().async_batch_loader(load).build();
    /// assert_eq!(cache.get_many_async([1, 2, 3]).await.unwrap()[&3], 9);
    /// # });
    /// ```
    pub fn async_batch_loader(mut self, loader: impl AsyncBatchLoader<K, V>) -> Self
    where
        K: Hash + Eq + Send + Sync + 'static,
        V: Send + Sync + 'static,
    {
        self.async_loader = Some(Arc::new(InBatches(loader)));
        self
    }

    /// How many keys a batch loader is given at once, at most; what is more goes in several batches. At least 1. Default: no
    /// limit.
    pub fn max_batch_size(mut self, keys: usize) -> Self {
        self.max_batch_size = keys;
        self
    }

    /// How long the load of a single key waits for others, at most, so that a batch loader is given them by one call; less than
    /// the [`lease`](Self::lease). [`max_batch_size`](Self::max_batch_size) keys go at once. Default: zero, each load by itself.
    /// With a loader that takes one key at a time it does nothing.
    ///
    /// It is for the calls that wait for a load of one key: `get_or_load`, `ask(..).load()` and `warm`, and their async forms.
    /// Refreshes in the background, [`get_many`](crate::Cache::get_many), and what is loaded from within another load do not
    /// wait. The delay is a part of the load: it counts towards its lease and its measured time. It is kept in steps of about
    /// 4 ms; with a clock that is moved by hand, by that. A [`batch_loader`](Self::batch_loader) then runs where the background
    /// refreshes do, whoever waits, and a thread that waits longer than the lease gives up with
    /// [`TimedOut`](crate::LoadErrorKind::TimedOut). If the loader panics, one of the callers has the panic and the others
    /// [`Panicked`](crate::LoadErrorKind::Panicked).
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    ///
    /// let load = |keys: &[u32]| Ok::<_, std::io::Error>(keys.iter().map(|n| (*n, keys.len())).collect::<Vec<_>>());
    /// let builder = quell::Cache::builder().batch_loader(load).max_batch_size(2);
    /// let cache = builder.max_batch_delay(Duration::from_secs(20)).build();
    /// std::thread::scope(|s| {
    ///     s.spawn(|| assert_eq!(cache.get_or_load(&1).unwrap(), 2)); // of two keys that were loaded at once
    ///     s.spawn(|| assert_eq!(cache.get_or_load(&2).unwrap(), 2));
    /// });
    /// ```
    pub fn max_batch_delay(mut self, delay: Duration) -> Self {
        self.max_batch_delay = delay;
        self
    }

    /// Where the futures of loads run as tasks of their own. Default: with the feature `tokio` the runtime that the call is
    /// made under; else nowhere: those who wait poll them.
    pub fn spawner(mut self, spawner: impl Spawner) -> Self {
        self.spawner = Some(Arc::new(spawner));
        self
    }

    /// Checks all settings against their rules and each other.
    pub(crate) fn check(self) -> Result<(Settings<K, V>, Parts<S>), BuildError> {
        soft_and_hard(self.soft_ttl, self.time_to_live)?;
        if !(0.0..=1.0).contains(&self.jitter) {
            return Err(BuildError::new("jitter", format!("{:?}", self.jitter), "from 0 to 1"));
        }
        if self.lease.is_zero() {
            return Err(BuildError::new("lease", format!("{:?}", self.lease), "more than zero"));
        }
        let loads = self.loader.is_some() || self.async_loader.is_some();
        let early_refresh = match self.early_refresh {
            Some(given) => given,
            None if loads && self.soft_ttl.is_none() => EarlyRefresh::beta(1.0),
            None => EarlyRefresh::off(),
        };
        early_refresh.check()?;
        if self.max_concurrent_loads == Some(0) {
            return Err(BuildError::new("max_concurrent_loads", "0".into(), "at least 1"));
        }
        if self.max_batch_size == 0 {
            return Err(BuildError::new("max_batch_size", "0".into(), "at least 1"));
        }
        if self.max_batch_delay >= self.lease {
            let value = format!("{:?}", self.max_batch_delay);
            return Err(BuildError::new("max_batch_delay", value, "less than the `lease`"));
        }
        if let Some(breaker) = self.breaker {
            breaker.check()?;
        }
        if let Some(backoff) = self.error_backoff {
            if backoff.first > backoff.cap {
                return Err(BuildError::new(
                    "error_backoff",
                    format!("{backoff:?}"),
                    "`first` at most `cap`",
                ));
            }
            if !(0.0..=1.0).contains(&backoff.jitter) {
                return Err(BuildError::new(
                    "error_backoff",
                    format!("{backoff:?}"),
                    "a `jitter` from 0 to 1",
                ));
            }
        }
        let shards = self.shards.unwrap_or_else(default_shards);
        if shards == 0 || shards > MAX_SHARDS {
            return Err(BuildError::new("shards", shards.to_string(), "from 1 to 65536"));
        }
        if self.initial_capacity as u64 > 1 << 32 {
            return Err(BuildError::new(
                "initial_capacity",
                self.initial_capacity.to_string(),
                "at most 2^32",
            ));
        }
        let settings = Settings {
            name: self.name.into(),
            lifetime: Lifetime {
                ttl: Ttl { soft: self.soft_ttl, hard: self.time_to_live },
                jitter: self.jitter,
            },
            time_to_idle: self.time_to_idle,
            grace: self.stale_if_error,
            error_backoff: self.error_backoff,
            early_refresh,
            negative_ttl: self.negative_ttl,
            lease: self.lease,
            max_concurrent_loads: self.max_concurrent_loads,
            max_waiters: self.max_waiters,
            breaker: self.breaker,
            wait_timeout: self.wait_timeout,
            max_capacity: self.max_capacity,
            initial_capacity: self.initial_capacity,
            weigher: self.weigher,
            listener: self.listener,
            shards: shards.next_power_of_two(),
            expiry: self.expiry,
            fallback: self.fallback,
            loader: self.loader,
            async_loader: self.async_loader,
            max_batch_size: self.max_batch_size,
            max_batch_delay: self.max_batch_delay,
            spawner: self.spawner,
        };
        Ok((settings, Parts { hasher: self.hasher, clock: self.clock, executor: self.executor }))
    }
}

fn default_shards() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    (4 * processors).min(MAX_SHARDS)
}

impl<K, V, S> fmt::Debug for CacheBuilder<K, V, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CacheBuilder")
            .field("name", &self.name)
            .field("time_to_live", &self.time_to_live)
            .field("soft_ttl", &self.soft_ttl)
            .field("time_to_idle", &self.time_to_idle)
            .field("jitter", &self.jitter)
            .field("stale_if_error", &self.stale_if_error)
            .field("error_backoff", &self.error_backoff)
            .field("early_refresh", &self.early_refresh)
            .field("negative_ttl", &self.negative_ttl)
            .field("lease", &self.lease)
            .field("max_concurrent_loads", &self.max_concurrent_loads)
            .field("max_waiters", &self.max_waiters)
            .field("max_batch_size", &self.max_batch_size)
            .field("max_batch_delay", &self.max_batch_delay)
            .field("breaker", &self.breaker)
            .field("wait_timeout", &self.wait_timeout)
            .field("max_capacity", &self.max_capacity)
            .field("initial_capacity", &self.initial_capacity)
            .field("shards", &self.shards)
            .finish_non_exhaustive()
    }
}
