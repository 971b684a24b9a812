//! The async front: loads and waits as futures, for any runtime and for none, over the same engine and the same flights.
//!
//! The future of a load belongs to its flight, see [`crate::flight::drive`]; a call here waits for the flight as a task.

mod many;
#[cfg(all(test, loom))]
mod models;
mod warm;

use crate::call::{
    Attached, Call, How, Leader, Shares, Step, Terms, Turn, can_spawn, fetch_of, mapped, own_task, received,
    spawn, start, unexpected,
};
use crate::engine::{By, Lease};
use crate::error::{BoxError, LoadError, LoadErrorKind};
use crate::flight::{Fetch, LoadFuture, Waits};
use crate::freshness::Ttl;
use crate::sync::{Answer, Ask, Cache, Op, Outcome, decide_by};
use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash};

/// The load that a call has been given, once it leads. Until then it stays where it is: an async function has room for a second
/// copy of each argument that it holds across an await, and so has each function that it is handed on to.
fn taken<F>(load: &mut Option<F>) -> F {
    load.take().expect("a call leads once")
}

/// Looks up and waits until the call has its answer, or leads.
async fn obtain<K, V, S, Q>(call: &mut Call<'_, K, V, S, Q>) -> Result<Turn<K, V, S>, LoadError>
where
    K: Borrow<Q> + Hash + Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    S: BuildHasher + Send + Sync + 'static,
{
    loop {
        let joined = match call.look()? {
            Step::Turn(turn) => return Ok(turn),
            Step::Join(joined) => joined,
        };
        let waited = joined.rest().await;
        if let Some(turn) = call.after(waited) {
            return turn;
        }
    }
}

/// Begins a load.
fn lead<K, V, S>(lease: Lease<K, V, S>, ttl: Ttl, load: LoadFuture<V>) -> Leader<K, V, S>
where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    let by = if can_spawn(lease.core()) { By::Spawned(Waits::AsTask) } else { By::Task };
    start(lease, load, ttl, by)
}

impl<K, V, S> Cache<K, V, S>
where
    K: Hash + Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    /// A call that waits as a task.
    fn call<'a, Q>(&'a self, key: &'a Q, terms: Terms) -> Call<'a, K, V, S, Q>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        Call::new(&self.core, key, terms.as_task(can_spawn(&self.core)))
    }

    /// A call with a future of its own. `load` is made into the load's future only if this call leads.
    async fn load_by<Q>(
        &self,
        call: &mut Call<'_, K, V, S, Q>,
        ttl: Ttl,
        load: impl FnOnce() -> LoadFuture<V>,
    ) -> Result<(V, How), LoadError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let (lease, stale) = match obtain(call).await? {
            Turn::Served(value, how, None) => return Ok((value, how)),
            Turn::Served(value, how, Some(lease)) if lease.flight().claim.is_spawned() => {
                let load = load();
                let task = own_task(lease.into_queued(), ttl, move |_| load);
                self.core.count_refused(&spawn(&self.core, Box::pin(task)));
                return Ok((value, how));
            }
            Turn::Served(value, how, Some(lease)) => (lease, Some((value, how))),
            Turn::Lead(lease) => (lease, None),
        };
        let leader = lead(lease, ttl, load());
        match (received(leader.rest().await), stale) {
            (Err(error), None) => call.ladder(error),
            // The stale value is in hand: the caller's own failure costs the refresh, not the answer.
            (Err(error), Some(stale)) if error.kind() != LoadErrorKind::Absent => Ok(stale),
            (got, _) => got,
        }
    }

    /// A call with the attached loader.
    async fn load_attached<Q>(&self, key: &Q, terms: Terms, ttl: Ttl) -> Result<(V, How), LoadError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let attached = Attached::of(&self.core, Waits::AsTask);
        let mut call = {
            let mut terms = terms.as_task(false);
            terms.attach(attached.as_ref().map(|loader| loader.background(&self.core)));
            Call::new(&self.core, key, terms)
        };
        let Some(loader) = attached else {
            return match obtain(&mut call).await? {
                Turn::Served(value, how, _) => Ok((value, how)),
                Turn::Lead(_) => Err(LoadError::no_loader()),
            };
        };
        let leader = match obtain(&mut call).await? {
            Turn::Served(value, how, lease) => {
                if let Some(lease) = lease {
                    let _ = loader.refresh(lease, key.to_owned());
                }
                return Ok((value, how));
            }
            Turn::Lead(lease) => {
                let load = loader.future(&lease, key.to_owned());
                lead(lease, ttl, load)
            }
        };
        received(leader.rest().await).or_else(|error| call.ladder(error))
    }

    /// The value of `key`; if there is none, `load`'s. One load per key, whoever asks: the async form of
    /// [`get_with`](Self::get_with).
    ///
    /// `load` is polled only if this call leads, and then belongs to the load, not to this call: whichever task waits for the
    /// value polls it, or a task of its own does, where there is a [`spawner`](crate::CacheBuilder::spawner) or a runtime that
    /// the feature `tokio` knows. With such a task a stale value is served at once to all; without one the caller that is
    /// chosen to refresh it waits.
    ///
    /// # Panics
    /// If `load` panics. If `load` waits, by way of other loads, for itself; the text names the caches on the way. In
    /// debug builds, if the thread holds a [`Pinned`](crate::Pinned) and would have to load or wait.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing. A load that it leads goes on for those who have joined it, from where it was; if
    /// nobody has, the entry is again what it was before, and then `load` is dropped.
    ///
    /// # Examples
    /// ```
    /// # smol::block_on(async {
    /// let cache = quell::Cache::<u32, String>::builder().build();
    /// assert_eq!(cache.get_with_async(&1, async { "one".to_owned() }).await, "one");
    /// assert_eq!(cache.get_with_async(&1, async { unreachable!("it is cached") }).await, "one");
    /// # });
    /// ```
    pub fn get_with_async<Q, F>(&self, key: &Q, load: F) -> impl Future<Output = V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
        F: Future<Output = V> + Send + 'static,
    {
        let mut load = Some(load);
        async move {
            if let Some(value) = self.fresh(key) {
                return value;
            }
            let mut call = self.call(key, Terms::infallible(Shares::Nothing));
            let load = self.load_by(&mut call, Ttl::default(), || mapped(taken(&mut load), Fetch::value));
            load.await.unwrap_or_else(|error| unexpected(&error)).0
        }
    }

    /// The value of `key`; if there is none, `load`'s, unless it fails: the async form of [`try_get_with`](Self::try_get_with).
    /// Who polls `load` is told at [`get_with_async`](Self::get_with_async).
    ///
    /// # Errors
    /// As [`try_get_with`](Self::try_get_with).
    ///
    /// # Panics
    /// If `load` panics. In debug builds, if the thread holds a [`Pinned`](crate::Pinned) and would have to load or wait.
    ///
    /// # Cancel safety
    /// As [`get_with_async`](Self::get_with_async).
    ///
    /// # Examples
    /// ```
    /// # smol::block_on(async {
    /// let cache = quell::Cache::<String, u16>::builder().build();
    /// let error = cache.try_get_with_async("port", async { "http".parse::<u16>() }).await.unwrap_err();
    /// assert!(error.downcast_ref::<std::num::ParseIntError>().is_some());
    /// assert_eq!(cache.try_get_with_async("port", async { "80".parse::<u16>() }).await.unwrap(), 80);
    /// # });
    /// ```
    pub fn try_get_with_async<Q, F, E>(&self, key: &Q, load: F) -> impl Future<Output = Result<V, LoadError>>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
        F: Future<Output = Result<V, E>> + Send + 'static,
        E: Into<BoxError> + 'static,
    {
        let mut load = Some(load);
        async move {
            if let Some(value) = self.fresh(key) {
                return Ok(value);
            }
            let mut call = self.call(key, self.patient(Shares::Failures));
            let load = self.load_by(&mut call, Ttl::default(), || mapped(taken(&mut load), fetch_of));
            load.await.map(|(value, _)| value)
        }
    }

    /// The value of `key`; if there is none, `load`'s, if it has one: the async form of
    /// [`optionally_get_with`](Self::optionally_get_with). Who polls `load` is told at
    /// [`get_with_async`](Self::get_with_async).
    ///
    /// # Panics
    /// As [`get_with_async`](Self::get_with_async).
    ///
    /// # Cancel safety
    /// As [`get_with_async`](Self::get_with_async).
    pub fn optionally_get_with_async<Q, F>(&self, key: &Q, load: F) -> impl Future<Output = Option<V>>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
        F: Future<Output = Option<V>> + Send + 'static,
    {
        let mut load = Some(load);
        async move {
            if let Some(value) = self.fresh(key) {
                return Some(value);
            }
            let mut call = self.call(key, Terms::infallible(Shares::Absence));
            let fetch = |there: Option<V>| there.map_or(Fetch::Absent, Fetch::value);
            match self.load_by(&mut call, Ttl::default(), || mapped(taken(&mut load), fetch)).await {
                Ok((value, _)) => Some(value),
                Err(error) if error.kind() == LoadErrorKind::Absent => None,
                Err(error) => unexpected(&error),
            }
        }
    }

    /// The value of `key`; if there is none, the attached loader's: the async form of [`get_or_load`](Self::get_or_load). A
    /// stale value is served at once, and one refresh runs in the background.
    ///
    /// An [`async_loader`](crate::CacheBuilder::async_loader) is polled as told at
    /// [`get_with_async`](Self::get_with_async). If there is only a blocking [`loader`](crate::CacheBuilder::loader), it runs
    /// on a thread for it: of the tokio runtime, with that feature, or of the cache's executor; and if that is full, here.
    ///
    /// # Errors
    /// As [`get_or_load`](Self::get_or_load).
    ///
    /// # Panics
    /// If the loader panics in a load that this call leads. In debug builds, if the thread holds a [`Pinned`](crate::Pinned)
    /// and would have to load or wait.
    ///
    /// # Cancel safety
    /// As [`get_with_async`](Self::get_with_async). A blocking loader that runs already runs to its end, and its value is
    /// dropped if nobody has joined.
    pub async fn get_or_load_async<Q>(&self, key: &Q) -> Result<V, LoadError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        if let Some(value) = self.fresh(key) {
            return Ok(value);
        }
        self.load_attached(key, self.patient(Shares::All), Ttl::default()).await.map(|(value, _)| value)
    }

    /// Reads, decides and writes as one step: the async form of [`compute`](Self::compute), which waits for other loads of the
    /// key without blocking. `decide` itself runs when the future is polled, and must not block.
    ///
    /// # Panics
    /// As [`compute`](Self::compute).
    ///
    /// # Cancel safety
    /// Dropped before it is ready, it has done nothing.
    ///
    /// # Examples
    /// ```
    /// # smol::block_on(async {
    /// use quell::{Cache, Op, Outcome};
    ///
    /// let cache = Cache::<String, u32>::builder().build();
    /// let add = |n: Option<&u32>| Op::Put(n.map_or(1, |n| n + 1));
    /// assert_eq!(cache.compute_async("hits", add).await, Outcome::Inserted(1));
    /// assert_eq!(cache.compute_async("hits", add).await, Outcome::Replaced(2));
    /// # });
    /// ```
    pub async fn compute_async<Q>(&self, key: &Q, decide: impl FnOnce(Option<&V>) -> Op<V>) -> Outcome<V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let mut call = Call::new(&self.core, key, Terms::to_lead().as_task(false));
        let turn = obtain(&mut call).await;
        decide_by(turn, decide)
    }
}

impl<K, V, Q, S> Ask<'_, K, V, Q, S>
where
    K: Borrow<Q> + Hash + Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    S: BuildHasher + Send + Sync + 'static,
{
    /// [`get`](Self::get), for symmetry: it never waits.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    ///
    /// # Cancel safety
    /// It is ready when it is first polled.
    pub async fn get_async(self) -> Result<Answer<V>, LoadError> {
        self.get()
    }

    /// What is cached, or what the attached loader loads, as [`Cache::get_or_load_async`].
    ///
    /// # Errors
    /// As [`load`](Self::load).
    ///
    /// # Panics
    /// As [`Cache::get_or_load_async`].
    ///
    /// # Cancel safety
    /// As [`Cache::get_or_load_async`].
    pub async fn load_async(self) -> Result<Answer<V>, LoadError> {
        let got = self.cache.load_attached(self.key, self.terms, self.ttl).await?;
        Ok(self.answer(got))
    }

    /// What is cached, or what `load` loads, as [`load_with`](Self::load_with). Who polls `load` is told at
    /// [`Cache::get_with_async`].
    ///
    /// # Errors
    /// As [`load_with`](Self::load_with).
    ///
    /// # Panics
    /// As [`Cache::try_get_with_async`].
    ///
    /// # Cancel safety
    /// As [`Cache::get_with_async`].
    pub fn load_with_async<F>(self, load: F) -> impl Future<Output = Result<Answer<V>, LoadError>>
    where
        F: Future<Output = V> + Send + 'static,
    {
        let mut load = Some(load);
        async move {
            let mut call = self.cache.call(self.key, self.terms);
            let got =
                self.cache.load_by(&mut call, self.ttl, || mapped(taken(&mut load), Fetch::value)).await?;
            Ok(self.answer(got))
        }
    }

    /// What is cached, or what `load` loads, as [`try_load_with`](Self::try_load_with). Who polls `load` is told at
    /// [`Cache::get_with_async`].
    ///
    /// # Errors
    /// As [`try_load_with`](Self::try_load_with).
    ///
    /// # Panics
    /// As [`Cache::try_get_with_async`].
    ///
    /// # Cancel safety
    /// As [`Cache::get_with_async`].
    pub fn try_load_with_async<F, E>(self, load: F) -> impl Future<Output = Result<Answer<V>, LoadError>>
    where
        F: Future<Output = Result<V, E>> + Send + 'static,
        E: Into<BoxError> + 'static,
    {
        let mut load = Some(load);
        async move {
            let mut call = self.cache.call(self.key, self.terms);
            let got = self.cache.load_by(&mut call, self.ttl, || mapped(taken(&mut load), fetch_of)).await?;
            Ok(self.answer(got))
        }
    }
}
