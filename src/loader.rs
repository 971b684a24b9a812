//! The ports by which a cache gets values: the loader, what it is told, and what it returns.

use std::collections::HashMap;
use std::hash::Hash;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{BoxError, LoadError};
use crate::flight::{Fetch, LoadCause, LoadFuture};
use crate::freshness::Ttl;

/// Loads values for a cache that has it attached.
///
/// Closures `Fn(&K) -> Result<V, E>` are loaders. A loader runs on the thread of the caller that leads the load, or,
/// for a refresh, on an executor's; it holds nothing of the cache's, and may use the cache. If it comes back to a
/// load that waits for it, that call reports a [`Cycle`](crate::LoadErrorKind::Cycle).
pub trait Loader<K, V>: Send + Sync + 'static {
    /// Loads the value of `key`.
    ///
    /// # Errors
    /// Any error; all who wait for the load get it, shared.
    fn load(&self, key: &K, cx: &LoadContext<V>) -> Result<Loaded<V>, BoxError>;
}

impl<K, V, E, F> Loader<K, V> for F
where
    F: Fn(&K) -> Result<V, E> + Send + Sync + 'static,
    E: Into<BoxError>,
{
    fn load(&self, key: &K, _: &LoadContext<V>) -> Result<Loaded<V>, BoxError> {
        self(key).map(Loaded::new).map_err(Into::into)
    }
}

/// Loads values for a cache that has it attached, as a future.
///
/// Closures `Fn(&K) -> F` whose `F` is a `Future<Output = Result<V, E>>` are async loaders; the builder takes closures
/// `Fn(K) -> F` too. What `load` returns belongs to the load, not to a caller: it is polled by whichever tasks wait for the
/// value, or is a task of its own where there is a [`Spawner`](crate::Spawner), and is dropped when nobody wants the value
/// any more.
///
/// # Examples
/// ```
/// use quell::{AsyncLoader, BoxError, Cache, LoadContext, Loaded};
///
/// struct Squares;
///
/// impl AsyncLoader<u64, u64> for Squares {
///     async fn load(&self, key: &u64, _: &LoadContext<u64>) -> Result<Loaded<u64>, BoxError> {
///         Ok(Loaded::new(key * key))
///     }
/// }
///
/// let cache = Cache::builder().async_loader(Squares).build();
/// assert_eq!(cache.get_or_load(&3).unwrap(), 9); // a thread polls the load itself
/// ```
pub trait AsyncLoader<K, V>: Send + Sync + 'static {
    /// Loads the value of `key`. Called when the load's future is first polled.
    ///
    /// # Errors
    /// Any error; all who wait for the load get it, shared.
    fn load(&self, key: &K, cx: &LoadContext<V>) -> impl Future<Output = Result<Loaded<V>, BoxError>> + Send;
}

impl<K, V, E, F, R> AsyncLoader<K, V> for F
where
    F: Fn(&K) -> R + Send + Sync + 'static,
    R: Future<Output = Result<V, E>> + Send,
    E: Into<BoxError>,
{
    fn load(&self, key: &K, _: &LoadContext<V>) -> impl Future<Output = Result<Loaded<V>, BoxError>> + Send {
        let load = self(key);
        async move { load.await.map(Loaded::new).map_err(Into::into) }
    }
}

/// What [`CacheBuilder::async_loader`](crate::CacheBuilder::async_loader) takes: an [`AsyncLoader`], a closure of `&K`, or a
/// closure of `K`. `M` only tells them apart.
pub trait IntoAsyncLoader<K, V, M> {
    #[doc(hidden)]
    fn into_async_loader(self) -> impl AsyncLoader<K, V>;
}

impl<K, V, L: AsyncLoader<K, V>> IntoAsyncLoader<K, V, ()> for L {
    fn into_async_loader(self) -> impl AsyncLoader<K, V> {
        self
    }
}

impl<K, V, E, F, R> IntoAsyncLoader<K, V, fn(K) -> R> for F
where
    K: Clone + 'static,
    F: Fn(K) -> R + Send + Sync + 'static,
    R: Future<Output = Result<V, E>> + Send + 'static,
    E: Into<BoxError> + 'static,
    V: 'static,
{
    fn into_async_loader(self) -> impl AsyncLoader<K, V> {
        move |key: &K| self(key.clone())
    }
}

/// Loads the values of many keys by one call, for a cache that has it attached, see
/// [`CacheBuilder::batch_loader`](crate::CacheBuilder::batch_loader).
///
/// Closures `Fn(&[K]) -> Result<I, E>` whose `I` iterates over pairs `(K, V)` are batch loaders. What is said of a [`Loader`]
/// holds for it.
///
/// # Examples
/// ```
/// use quell::{BatchLoader, BoxError, Cache, LoadContext, Loaded};
/// use std::time::Duration;
///
/// struct Squares;
///
/// impl BatchLoader<u64, u64> for Squares {
///     fn load_many(&self, keys: &[u64], _: &[LoadContext<u64>]) -> Result<Vec<(u64, Loaded<u64>)>, BoxError> {
///         let brief = |key: &u64| (*key, Loaded::new(key * key).ttl(Duration::from_secs(60)));
///         Ok(keys.iter().filter(|key| **key < 10).map(brief).collect())
///     }
/// }
///
/// let cache = Cache::builder().batch_loader(Squares).build();
/// assert_eq!(cache.get_many([2, 3, 10]).unwrap(), [(2, 4), (3, 9)].into());
/// assert_eq!(cache.get_or_load(&4).unwrap(), 16); // a batch of one
/// ```
pub trait BatchLoader<K, V>: Send + Sync + 'static {
    /// Loads the values of `keys`, of which there is at least one, and each once; `contexts` has what a [`Loader`] is told, for
    /// each of them.
    ///
    /// A key that the result lacks is [absent](Loaded::absent). What it has for other keys is ignored; of a key that it has
    /// more than once, the last counts.
    ///
    /// # Errors
    /// Any error; all keys have failed then, and all who wait for one of them get it, shared.
    fn load_many(&self, keys: &[K], contexts: &[LoadContext<V>]) -> Result<Vec<(K, Loaded<V>)>, BoxError>;
}

impl<K, V, I, E, F> BatchLoader<K, V> for F
where
    F: Fn(&[K]) -> Result<I, E> + Send + Sync + 'static,
    I: IntoIterator<Item = (K, V)>,
    E: Into<BoxError>,
{
    fn load_many(&self, keys: &[K], _: &[LoadContext<V>]) -> Result<Vec<(K, Loaded<V>)>, BoxError> {
        self(keys).map(all_new).map_err(Into::into)
    }
}

/// Loads the values of many keys by one future, for a cache that has it attached, see
/// [`CacheBuilder::async_batch_loader`](crate::CacheBuilder::async_batch_loader).
///
/// Closures `Fn(Vec<K>) -> F` whose `F` is a `Future<Output = Result<I, E>>`, and `I` iterates over pairs `(K, V)`, are async
/// batch loaders. The future belongs to the loads of all its keys, as an [`AsyncLoader`]'s belongs to one: whoever waits for
/// one of them polls it, and it is dropped when nobody wants any of them any more.
///
/// # Examples
/// ```
/// use quell::{AsyncBatchLoader, BoxError, Cache, LoadContext, Loaded};
///
/// struct Squares;
///
/// impl AsyncBatchLoader<u64, u64> for Squares {
///     async fn load_many(
///         &self,
///         keys: &[u64],
///         _: &[LoadContext<u64>],
///     ) -> Result<Vec<(u64, Loaded<u64>)>, BoxError> {
///         Ok(keys.iter().map(|key| (*key, Loaded::new(key * key))).collect())
///     }
/// }
///
/// let cache = Cache::builder().async_batch_loader(Squares).build();
/// assert_eq!(cache.get_many([2, 3]).unwrap(), [(2, 4), (3, 9)].into()); // a thread polls the load itself
/// ```
pub trait AsyncBatchLoader<K, V>: Send + Sync + 'static {
    /// Loads the values of `keys`, as [`BatchLoader::load_many`] does. Called when the loads' future is first polled.
    ///
    /// # Errors
    /// As [`BatchLoader::load_many`].
    fn load_many(
        &self,
        keys: &[K],
        contexts: &[LoadContext<V>],
    ) -> impl Future<Output = Result<Vec<(K, Loaded<V>)>, BoxError>> + Send;
}

impl<K, V, I, E, F, R> AsyncBatchLoader<K, V> for F
where
    K: Clone,
    F: Fn(Vec<K>) -> R + Send + Sync + 'static,
    R: Future<Output = Result<I, E>> + Send,
    I: IntoIterator<Item = (K, V)>,
    E: Into<BoxError>,
{
    fn load_many(
        &self,
        keys: &[K],
        _: &[LoadContext<V>],
    ) -> impl Future<Output = Result<Vec<(K, Loaded<V>)>, BoxError>> + Send {
        let load = self(keys.to_vec());
        async move { load.await.map(all_new).map_err(Into::into) }
    }
}

/// Values like any others.
fn all_new<K, V>(entries: impl IntoIterator<Item = (K, V)>) -> Vec<(K, Loaded<V>)> {
    entries.into_iter().map(|(key, value)| (key, Loaded::new(value))).collect()
}

/// What a batch comes to for each of `keys`, if these are the values that it was shown.
pub(crate) fn sorted<K, V>(
    result: Result<impl IntoIterator<Item = (K, Loaded<V>)>, BoxError>,
    keys: &[K],
    previous: impl IntoIterator<Item = Option<V>>,
) -> Vec<Fetch<V>>
where
    K: Hash + Eq,
{
    match result {
        Ok(entries) => {
            let mut entries: HashMap<K, Loaded<V>> = entries.into_iter().collect();
            let mut fetch = |(key, previous)| {
                let loaded = entries.remove(key).unwrap_or_else(Loaded::absent);
                Loaded::fetch(Ok(loaded), previous)
            };
            keys.iter().zip(previous).map(&mut fetch).collect()
        }
        Err(error) => {
            let error = LoadError::failed(error);
            keys.iter().map(|_| Fetch::Failed(error.clone())).collect()
        }
    }
}

/// A loader that takes one key at a time.
pub(crate) struct OneByOne<L>(pub(crate) L);

/// A loader that takes many keys at once.
pub(crate) struct InBatches<L>(pub(crate) L);

/// A [`Loader`] or a [`BatchLoader`] of any type.
pub(crate) trait RunLoad<K, V>: Send + Sync {
    /// Whether it takes many keys at once.
    fn takes_many(&self) -> bool;

    fn load(&self, key: &K, cx: LoadContext<V>) -> Fetch<V>;

    /// Loads all of these, for each of which there is a context.
    fn load_many(&self, keys: &[K], contexts: Vec<LoadContext<V>>) -> Vec<Fetch<V>>;
}

impl<K, V, L: Loader<K, V>> RunLoad<K, V> for OneByOne<L> {
    fn takes_many(&self) -> bool {
        false
    }

    fn load(&self, key: &K, cx: LoadContext<V>) -> Fetch<V> {
        let loaded = self.0.load(key, &cx);
        Loaded::fetch(loaded, cx.previous)
    }

    fn load_many(&self, keys: &[K], contexts: Vec<LoadContext<V>>) -> Vec<Fetch<V>> {
        keys.iter().zip(contexts).map(|(key, cx)| self.load(key, cx)).collect()
    }
}

impl<K: Hash + Eq, V, L: BatchLoader<K, V>> RunLoad<K, V> for InBatches<L> {
    fn takes_many(&self) -> bool {
        true
    }

    fn load(&self, key: &K, cx: LoadContext<V>) -> Fetch<V> {
        let fetched = RunLoad::load_many(self, std::slice::from_ref(key), vec![cx]);
        fetched.into_iter().next().unwrap_or(Fetch::Absent)
    }

    fn load_many(&self, keys: &[K], contexts: Vec<LoadContext<V>>) -> Vec<Fetch<V>> {
        let loaded = self.0.load_many(keys, &contexts);
        sorted(loaded, keys, contexts.into_iter().map(|cx| cx.previous))
    }
}

/// The future of a load of many keys: what each of them comes to, in their order.
pub(crate) type BatchFuture<V> = Pin<Box<dyn Future<Output = Vec<Fetch<V>>> + Send>>;

/// An [`AsyncLoader`] or an [`AsyncBatchLoader`] of any type.
pub(crate) trait StartLoad<K, V>: Send + Sync {
    /// Whether it takes many keys at once.
    fn takes_many(&self) -> bool;

    fn start(self: Arc<Self>, key: K, cx: LoadContext<V>) -> LoadFuture<V>;

    /// Loads all of these, for each of which there is a context.
    fn start_many(self: Arc<Self>, keys: Vec<K>, contexts: Vec<LoadContext<V>>) -> BatchFuture<V>;
}

impl<K, V, L> StartLoad<K, V> for OneByOne<L>
where
    K: Send + Sync + 'static,
    V: Send + Sync + 'static,
    L: AsyncLoader<K, V>,
{
    fn takes_many(&self) -> bool {
        false
    }

    fn start(self: Arc<Self>, key: K, cx: LoadContext<V>) -> LoadFuture<V> {
        Box::pin(async move {
            let loaded = self.0.load(&key, &cx).await;
            Loaded::fetch(loaded, cx.previous)
        })
    }

    fn start_many(self: Arc<Self>, keys: Vec<K>, contexts: Vec<LoadContext<V>>) -> BatchFuture<V> {
        Box::pin(async move {
            let mut fetched = Vec::with_capacity(keys.len());
            for (key, cx) in keys.into_iter().zip(contexts) {
                fetched.push(self.clone().start(key, cx).await);
            }
            fetched
        })
    }
}

impl<K, V, L> StartLoad<K, V> for InBatches<L>
where
    K: Hash + Eq + Send + Sync + 'static,
    V: Send + Sync + 'static,
    L: AsyncBatchLoader<K, V>,
{
    fn takes_many(&self) -> bool {
        true
    }

    fn start(self: Arc<Self>, key: K, cx: LoadContext<V>) -> LoadFuture<V> {
        let all = self.start_many(vec![key], vec![cx]);
        Box::pin(async move { all.await.into_iter().next().unwrap_or(Fetch::Absent) })
    }

    fn start_many(self: Arc<Self>, keys: Vec<K>, contexts: Vec<LoadContext<V>>) -> BatchFuture<V> {
        Box::pin(async move {
            let loaded = self.0.load_many(&keys, &contexts).await;
            sorted(loaded, &keys, contexts.into_iter().map(|cx| cx.previous))
        })
    }
}

/// What a loader is told beside the key.
#[derive(Debug)]
pub struct LoadContext<V> {
    pub(crate) previous: Option<V>,
    pub(crate) cause: LoadCause,
    pub(crate) lease_left: Duration,
}

impl<V> LoadContext<V> {
    /// The value that the load is to replace, in whatever stage it is: for a conditional request.
    #[must_use]
    pub fn previous(&self) -> Option<&V> {
        self.previous.as_ref()
    }

    /// Why it loads.
    #[must_use]
    pub fn cause(&self) -> LoadCause {
        self.cause
    }

    /// How long the load may take before somebody else may lead, counted from its start.
    #[must_use]
    pub fn lease_left(&self) -> Duration {
        self.lease_left
    }
}

/// What a loader found.
#[derive(Clone, Debug)]
#[must_use]
pub struct Loaded<V> {
    pub(crate) found: Found<V>,
    pub(crate) ttl: Ttl,
    pub(crate) store: bool,
}

#[derive(Clone, Debug)]
pub(crate) enum Found<V> {
    Value(V),
    NotModified,
    Absent,
}

impl<V> Loaded<V> {
    fn found(found: Found<V>) -> Self {
        Self { found, ttl: Ttl::default(), store: true }
    }

    /// A value.
    pub fn new(value: V) -> Self {
        Self::found(Found::Value(value))
    }

    /// The previous value is still right, in whatever stage it is: it stays, and its times begin anew.
    ///
    /// Without a [`previous`](LoadContext::previous) value this is a failed load.
    pub fn not_modified() -> Self {
        Self::found(Found::NotModified)
    }

    /// The source has no such key: a value that was there goes, and that there is none is remembered for the cache's
    /// [`negative_ttl`](crate::CacheBuilder::negative_ttl).
    pub fn absent() -> Self {
        Self::found(Found::Absent)
    }

    /// How long this value is served at all, in place of the cache's `time_to_live`. With zero it goes to those who
    /// wait for this load and to nobody after, and a value that was there goes.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl.hard = Some(ttl);
        self
    }

    /// How long this value is fresh, in place of the cache's `soft_ttl`; no longer than it is served.
    pub fn soft_ttl(mut self, soft_ttl: Duration) -> Self {
        self.ttl.soft = Some(soft_ttl);
        self
    }

    /// The value goes to those who wait for this load and to nobody after, and a value that was there goes.
    pub fn do_not_store(mut self) -> Self {
        self.store = false;
        self
    }
}

/// Decides how long each entry lives, from its key, its value and what its load cost.
pub trait Expiry<K, V>: Send + Sync + 'static {
    /// The entry's own times. `load_time` is how long the load took, `None` for a value that was inserted.
    fn ttl(&self, key: &K, value: &V, load_time: Option<Duration>) -> Ttl;
}

impl<K, V, F> Expiry<K, V> for F
where
    F: Fn(&K, &V, Option<Duration>) -> Ttl + Send + Sync + 'static,
{
    fn ttl(&self, key: &K, value: &V, load_time: Option<Duration>) -> Ttl {
        self(key, value, load_time)
    }
}

impl<V> Loaded<V> {
    /// What a loader's result comes to, if `previous` is the value that it was shown.
    pub(crate) fn fetch(loaded: Result<Self, BoxError>, previous: Option<V>) -> Fetch<V> {
        let Self { found, ttl, store } = match loaded {
            Ok(loaded) => loaded,
            Err(error) => return Fetch::Failed(LoadError::failed(error)),
        };
        match (found, previous) {
            (Found::Value(value), _) => Fetch::Value { value, ttl, store, renews: false },
            (Found::NotModified, Some(value)) => Fetch::Value { value, ttl, store, renews: true },
            (Found::NotModified, None) => Fetch::Failed(LoadError::failed(
                "the loader said `not modified`, but there is no previous value",
            )),
            (Found::Absent, _) => Fetch::Absent,
        }
    }
}

pub(crate) type SharedAsyncLoader<K, V> = Arc<dyn StartLoad<K, V>>;
pub(crate) type SharedLoader<K, V> = Arc<dyn RunLoad<K, V>>;
pub(crate) type SharedExpiry<K, V> = Arc<dyn Expiry<K, V>>;
pub(crate) type Fallback<K, V> = Arc<dyn Fn(&K) -> Option<V> + Send + Sync>;
