//! What the tests share: shapes of a cache, signals to wait for, loaders that stop at a gate, and values that are counted.
#![allow(dead_code, reason = "each test binary uses some of it")]

pub(crate) mod batches;

pub(crate) mod tasks;

pub(crate) mod task;

use quell::{
    BoxError, Cache, CacheBuilder, DefaultHashBuilder, Executor, Job, LoadContext, LoadError, LoadErrorKind,
    Loaded, Loader, Provenance, Rejected, RemovalCause, Stats,
};
use std::any::Any;
use std::cell::Cell;
use std::fmt::Debug;
use std::hash::{BuildHasher, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// After this a test has hung.
const LIMIT: Duration = Duration::from_secs(30);

pub(crate) const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

pub(crate) const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// `full` with `QUELL_LONG=1`, else `short`.
pub(crate) fn scaled(short: usize, full: usize) -> usize {
    if std::env::var("QUELL_LONG").is_ok_and(|v| v == "1") { full } else { short }
}

/// Waits for a signal.
#[track_caller]
pub(crate) fn eventually(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    for round in 0_u32.. {
        if done() {
            return;
        }
        assert!(start.elapsed() < LIMIT, "it did not come true in {LIMIT:?}");
        if round < 16 { std::thread::yield_now() } else { std::thread::sleep(ms(1)) }
    }
}

/// Waits until `n` callers wait for loads of the cache.
#[track_caller]
pub(crate) fn until_waiting<K, V>(cache: &Sut<K, V>, n: usize)
where
    K: std::hash::Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    eventually(|| cache.in_flight().iter().map(|f| f.waiters).sum::<usize>() == n);
}

/// The cache under test: its hasher may be a bad one.
pub(crate) type Sut<K, V> = Cache<K, V, Hashing>;
pub(crate) type Builder<K, V> = CacheBuilder<K, V, Hashing>;

/// A good hasher, or one that gives every key the same hash.
#[derive(Clone)]
pub(crate) enum Hashing {
    Spread(DefaultHashBuilder),
    Constant,
}

pub(crate) struct AnyHasher(Option<quell::DefaultHasher>);

impl BuildHasher for Hashing {
    type Hasher = AnyHasher;

    fn build_hasher(&self) -> AnyHasher {
        AnyHasher(match self {
            Self::Spread(s) => Some(s.build_hasher()),
            Self::Constant => None,
        })
    }
}

impl Hasher for AnyHasher {
    fn finish(&self) -> u64 {
        self.0.as_ref().map_or(0, Hasher::finish)
    }

    fn write(&mut self, bytes: &[u8]) {
        if let Some(hasher) = &mut self.0 {
            hasher.write(bytes);
        }
    }
}

/// One table and a good hasher.
pub(crate) fn plain<K, V>() -> Builder<K, V>
where
    K: std::hash::Hash + Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    Cache::builder().hasher(Hashing::Spread(DefaultHashBuilder::new()))
}

/// Runs a body over one table and several, and over a good hasher and a constant one.
pub(crate) fn over_shapes<K, V>(mut body: impl FnMut(Builder<K, V>))
where
    K: std::hash::Hash + Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    for shards in [1, 8] {
        for hashing in [Hashing::Spread(DefaultHashBuilder::new()), Hashing::Constant] {
            body(Cache::builder().shards(shards).hasher(hashing));
        }
    }
}

/// Where loaders stop until the test lets them on.
#[derive(Clone, Default)]
pub(crate) struct Gate(Arc<(Mutex<bool>, Condvar, AtomicUsize)>);

impl Gate {
    pub(crate) fn open(&self) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.1.notify_all();
    }

    pub(crate) fn pass(&self) {
        self.0.2.fetch_add(1, Ordering::SeqCst);
        let closed = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (open, _) = self.0.1.wait_timeout_while(closed, LIMIT, |open| !*open).unwrap();
        assert!(*open, "nobody opened the gate in {LIMIT:?}");
    }

    /// How many have come to the gate.
    pub(crate) fn arrived(&self) -> usize {
        self.0.2.load(Ordering::SeqCst)
    }
}

/// Counts, shared by its clones.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally(Arc<AtomicUsize>);

impl Tally {
    /// Counts one, and returns the number before.
    pub(crate) fn add(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst)
    }

    pub(crate) fn sub(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }

    pub(crate) fn get(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// A value that is counted while it lives, in all its clones.
#[derive(Debug)]
pub(crate) struct Counted(pub(crate) u64, Tally);

impl Counted {
    pub(crate) fn new(n: u64, alive: &Tally) -> Self {
        alive.add();
        Self(n, alive.clone())
    }
}

impl Clone for Counted {
    fn clone(&self) -> Self {
        Self::new(self.0, &self.1)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.sub();
        assert!(self.1.get() < usize::MAX / 2, "a value was dropped twice");
    }
}

/// What an eviction listener was told, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told(Arc<Mutex<Vec<(u64, u64, RemovalCause)>>>);

impl Told {
    pub(crate) fn listener(&self) -> impl Fn(&u64, &u64, RemovalCause) + Send + Sync + 'static {
        let told = self.0.clone();
        move |key, value, cause| {
            told.lock().unwrap_or_else(PoisonError::into_inner).push((*key, *value, cause));
        }
    }

    pub(crate) fn take(&self) -> Vec<(u64, u64, RemovalCause)> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The same, in the order of the keys.
    pub(crate) fn sorted(&self) -> Vec<(u64, u64, RemovalCause)> {
        let mut told = self.take();
        told.sort_unstable_by_key(|(key, value, _)| (*key, *value));
        told
    }

    /// Why the values went that have gone.
    pub(crate) fn causes(&self) -> Vec<RemovalCause> {
        self.take().into_iter().map(|(.., cause)| cause).collect()
    }
}

/// Checks what a cache weighs against its entries, while nobody else uses it and none is in grace.
#[track_caller]
pub(crate) fn assert_weights_add_up<K, V>(cache: &Sut<K, V>, weigh: impl Fn(&K, &V) -> u32)
where
    K: std::hash::Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    cache.run_pending_tasks();
    let (mut entries, mut sum) = (0, 0);
    for (key, value) in cache.iter() {
        (entries, sum) = (entries + 1, sum + u64::from(weigh(&key, &value)));
    }
    assert_eq!((cache.len(), cache.weighted_size()), (entries, sum), "length and weight by the entries");
}

/// How many calls have been counted by what they found at first.
pub(crate) fn found(stats: &Stats) -> u64 {
    stats.hits + stats.stale_hits + stats.misses + stats.negative_hits
}

/// The name of what a call came to.
pub(crate) fn name_of(end: Result<Provenance, LoadErrorKind>) -> &'static str {
    match end {
        Ok(Provenance::Fresh { .. }) => "fresh",
        Ok(Provenance::Stale { .. }) => "stale",
        Ok(Provenance::Grace { .. }) => "grace",
        Ok(Provenance::Loaded { .. }) => "loaded",
        Ok(Provenance::Joined { .. }) => "joined",
        Ok(Provenance::Fallback) => "fallback",
        Ok(Provenance::Negative) => unreachable!("an absence is an error"),
        Err(LoadErrorKind::Failed) => "failed",
        Err(LoadErrorKind::TimedOut) => "timed out",
        Err(LoadErrorKind::Overloaded) => "overloaded",
        Err(LoadErrorKind::NotCached) => "not cached",
        Err(LoadErrorKind::Absent) => "absent",
        Err(LoadErrorKind::BackingOff) => "backing off",
        Err(other) => panic!("{other:?}"),
    }
}

/// A loader that sees the context.
pub(crate) struct With<F>(pub(crate) F);

impl<K, V, F> Loader<K, V> for With<F>
where
    F: Fn(&K, &LoadContext<V>) -> Result<Loaded<V>, BoxError> + Send + Sync + 'static,
{
    fn load(&self, key: &K, cx: &LoadContext<V>) -> Result<Loaded<V>, BoxError> {
        (self.0)(key, cx)
    }
}

/// An executor that keeps jobs until the test runs them.
#[derive(Clone, Default)]
pub(crate) struct Queue(Arc<Mutex<Vec<Job>>>);

impl Executor for Queue {
    fn execute(&self, job: Job) -> Result<(), Rejected> {
        self.0.lock().unwrap().push(job);
        Ok(())
    }
}

impl Queue {
    pub(crate) fn take(&self) -> Vec<Job> {
        std::mem::take(&mut self.0.lock().unwrap())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Runs what waits, and returns how many jobs that were.
    pub(crate) fn run(&self) -> usize {
        self.take().into_iter().map(Job::run).count()
    }
}

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// The text of the panic that `f` ends with. Its message is not shown.
#[track_caller]
pub(crate) fn panic_of<R: Debug>(f: impl FnOnce() -> R) -> String {
    match quietly(f) {
        Ok(result) => panic!("it returned {result:?}"),
        Err(payload) => text(&*payload),
    }
}

/// Runs what may panic, and shows no message.
pub(crate) fn quietly<R>(f: impl FnOnce() -> R) -> Result<R, Box<dyn Any + Send>> {
    static HOOK: std::sync::Once = std::sync::Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                usual(info);
            }
        }));
    });
    let before = QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(f));
    QUIET.set(before);
    result
}

fn text(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default()
}

/// Numbers that look random: splitmix64 (Steele, Lea, Flood, 2014).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// Whether a cycle is at the bottom of an error.
pub(crate) fn is_cycle(error: &LoadError) -> bool {
    error.kind() == LoadErrorKind::Cycle || error.downcast_ref::<LoadError>().is_some_and(is_cycle)
}
