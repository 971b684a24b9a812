//! Ways to have a key loaded once however many want it, for threads and for tasks: quell, its rivals, and what one
//! would write by hand.
//!
//! Each is made anew for a crowd, has room for a thousand entries and its own defaults otherwise; the hasher is
//! ahash, as everywhere. Of what is written by hand, nothing is ever evicted.
//!
//! - *cell per key*: a map, under a mutex, of cells that are initialized once.
//! - *mutex per key*: a map of values and one of mutexes: look, lock the key's mutex, look again, load.
//! - *floor*: no cache at all. Who comes first loads, the others wait for one signal. It is what a crowd costs that
//!   has nothing to look up and nothing to watch.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use ahash::RandomState;
use parking_lot::{Condvar, Mutex};

pub(crate) type Value = Arc<u64>;

/// The key that everybody wants.
const KEY: u64 = 7;
const CAPACITY: u64 = 1_000;

/// One key, wanted by threads.
pub(crate) trait ForThreads: Default + Send + Sync {
    fn get(&self, load: impl FnOnce() -> Value) -> Value;

    /// How many wait for the load, if the cache can tell.
    fn waiters(&self) -> Option<usize> {
        None
    }
}

/// One key, wanted by tasks.
pub(crate) trait ForTasks: Default + Send + Sync + 'static {
    fn get(&self, load: impl Future<Output = Value> + Send + 'static) -> impl Future<Output = Value> + Send;

    /// How many wait for the load, if the cache can tell.
    fn waiters(&self) -> Option<usize> {
        None
    }
}

fn infallible<T>(got: Result<T, Infallible>) -> T {
    let Ok(value) = got;
    value
}

pub(crate) struct Quell(quell::Cache<u64, Value, RandomState>);

impl Default for Quell {
    fn default() -> Self {
        Self(quell::Cache::builder().max_capacity(CAPACITY).hasher(super::hasher()).build())
    }
}

impl Quell {
    fn in_flight(&self) -> Option<usize> {
        self.0.in_flight().first().map(|load| load.waiters)
    }
}

impl ForThreads for Quell {
    fn get(&self, load: impl FnOnce() -> Value) -> Value {
        self.0.get_with(&KEY, load)
    }

    fn waiters(&self) -> Option<usize> {
        self.in_flight()
    }
}

impl ForTasks for Quell {
    async fn get(&self, load: impl Future<Output = Value> + Send + 'static) -> Value {
        self.0.get_with_async(&KEY, load).await
    }

    fn waiters(&self) -> Option<usize> {
        self.in_flight()
    }
}

pub(crate) struct MokaSync(moka::sync::Cache<u64, Value, RandomState>);

impl Default for MokaSync {
    fn default() -> Self {
        Self(moka::sync::Cache::builder().max_capacity(CAPACITY).build_with_hasher(super::hasher()))
    }
}

impl ForThreads for MokaSync {
    fn get(&self, load: impl FnOnce() -> Value) -> Value {
        self.0.get_with(KEY, load)
    }
}

pub(crate) struct MokaFuture(moka::future::Cache<u64, Value, RandomState>);

impl Default for MokaFuture {
    fn default() -> Self {
        Self(moka::future::Cache::builder().max_capacity(CAPACITY).build_with_hasher(super::hasher()))
    }
}

impl ForTasks for MokaFuture {
    async fn get(&self, load: impl Future<Output = Value> + Send + 'static) -> Value {
        self.0.get_with(KEY, load).await
    }
}

pub(crate) struct QuickCache(quick_cache::sync::Cache<u64, Value, quick_cache::UnitWeighter, RandomState>);

impl Default for QuickCache {
    fn default() -> Self {
        let lifecycle = quick_cache::sync::DefaultLifecycle::default();
        let (entries, weigher) = (CAPACITY as usize, quick_cache::UnitWeighter);
        Self(quick_cache::sync::Cache::with(entries, CAPACITY, weigher, super::hasher(), lifecycle))
    }
}

impl ForThreads for QuickCache {
    fn get(&self, load: impl FnOnce() -> Value) -> Value {
        infallible(self.0.get_or_insert_with(&KEY, || Ok(load())))
    }
}

impl ForTasks for QuickCache {
    async fn get(&self, load: impl Future<Output = Value> + Send + 'static) -> Value {
        infallible(self.0.get_or_insert_async(&KEY, async { Ok(load.await) }).await)
    }
}

/// It makes a task of each load, as quell does with the feature `tokio`; it has nothing for threads.
pub(crate) struct Foyer(foyer_memory::Cache<u64, Value, RandomState>);

impl Default for Foyer {
    fn default() -> Self {
        let builder = foyer_memory::CacheBuilder::new(CAPACITY as usize);
        Self(builder.with_hash_builder(super::hasher()).build())
    }
}

impl ForTasks for Foyer {
    async fn get(&self, load: impl Future<Output = Value> + Send + 'static) -> Value {
        let fetch = || async { Ok::<_, Infallible>(load.await) };
        let entry = self.0.get_or_fetch(&KEY, fetch).await.expect("the load succeeds");
        entry.value().clone()
    }
}

/// A map under a mutex, for what is written by hand.
struct Map<T>(Mutex<HashMap<u64, T, RandomState>>);

impl<T> Default for Map<T> {
    fn default() -> Self {
        Self(Mutex::new(HashMap::with_hasher(super::hasher())))
    }
}

impl<T: Clone> Map<T> {
    fn get(&self) -> Option<T> {
        self.0.lock().get(&KEY).cloned()
    }

    fn put(&self, item: T) {
        self.0.lock().insert(KEY, item);
    }

    fn get_or_default(&self) -> T
    where
        T: Default,
    {
        self.0.lock().entry(KEY).or_default().clone()
    }
}

#[derive(Default)]
pub(crate) struct CellPerKey<C>(Map<Arc<C>>);

pub(crate) type ThreadCells = CellPerKey<OnceLock<Value>>;
pub(crate) type TaskCells = CellPerKey<tokio::sync::OnceCell<Value>>;

impl ForThreads for ThreadCells {
    fn get(&self, load: impl FnOnce() -> Value) -> Value {
        self.0.get_or_default().get_or_init(load).clone()
    }
}

impl ForTasks for TaskCells {
    async fn get(&self, load: impl Future<Output = Value> + Send + 'static) -> Value {
        self.0.get_or_default().get_or_init(|| load).await.clone()
    }
}

#[derive(Default)]
pub(crate) struct MutexPerKey<M> {
    values: Map<Value>,
    mutexes: Map<Arc<M>>,
}

pub(crate) type ThreadMutexes = MutexPerKey<Mutex<()>>;
pub(crate) type TaskMutexes = MutexPerKey<tokio::sync::Mutex<()>>;

impl ForThreads for ThreadMutexes {
    fn get(&self, load: impl FnOnce() -> Value) -> Value {
        if let Some(value) = self.values.get() {
            return value;
        }
        let mutex = self.mutexes.get_or_default();
        let _held = mutex.lock();
        if let Some(value) = self.values.get() {
            return value;
        }
        let value = load();
        self.values.put(value.clone());
        value
    }
}

impl ForTasks for TaskMutexes {
    async fn get(&self, load: impl Future<Output = Value> + Send + 'static) -> Value {
        if let Some(value) = self.values.get() {
            return value;
        }
        let mutex = self.mutexes.get_or_default();
        let _held = mutex.lock().await;
        if let Some(value) = self.values.get() {
            return value;
        }
        let value = load.await;
        self.values.put(value.clone());
        value
    }
}

#[derive(Default)]
pub(crate) struct ThreadFloor {
    claimed: AtomicBool,
    value: Mutex<Option<Value>>,
    filled: Condvar,
}

impl ForThreads for ThreadFloor {
    fn get(&self, load: impl FnOnce() -> Value) -> Value {
        if !self.claimed.swap(true, Ordering::Relaxed) {
            let value = load();
            *self.value.lock() = Some(value.clone());
            self.filled.notify_all();
            return value;
        }
        let mut value = self.value.lock();
        loop {
            if let Some(value) = &*value {
                return value.clone();
            }
            self.filled.wait(&mut value);
        }
    }
}

#[derive(Default)]
pub(crate) struct TaskFloor {
    claimed: AtomicBool,
    value: OnceLock<Value>,
    filled: tokio::sync::Notify,
}

impl ForTasks for TaskFloor {
    async fn get(&self, load: impl Future<Output = Value> + Send + 'static) -> Value {
        // Whoever has one of these when the signal comes is woken by it.
        let filled = self.filled.notified();
        if !self.claimed.swap(true, Ordering::Relaxed) {
            let loaded = load.await;
            let value = self.value.get_or_init(|| loaded).clone();
            self.filled.notify_waiters();
            return value;
        }
        filled.await;
        self.value.get().expect("filled before the signal").clone()
    }
}
