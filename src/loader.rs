//! The ports by which a cache gets values: the loader, what it is told, and what it returns.

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

/// An [`AsyncLoader`] of any type.
pub(crate) trait StartLoad<K, V>: Send + Sync {
    fn start(self: Arc<Self>, key: K, cx: LoadContext<V>) -> LoadFuture<V>;
}

impl<K, V, L> StartLoad<K, V> for L
where
    K: Send + Sync + 'static,
    V: Send + Sync + 'static,
    L: AsyncLoader<K, V>,
{
    fn start(self: Arc<Self>, key: K, cx: LoadContext<V>) -> LoadFuture<V> {
        Box::pin(async move {
            let loaded = self.load(&key, &cx).await;
            Loaded::fetch(loaded, cx.previous)
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
pub(crate) type SharedLoader<K, V> = Arc<dyn Loader<K, V>>;
pub(crate) type SharedExpiry<K, V> = Arc<dyn Expiry<K, V>>;
pub(crate) type Fallback<K, V> = Arc<dyn Fn(&K) -> Option<V> + Send + Sync>;
