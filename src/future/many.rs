//! Many keys at once, as futures.

use crate::call::{Shares, get_many_async, load_many_async};
use crate::error::{BoxError, LoadError};
use crate::sync::Cache;
use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};

impl<K, V, S> Cache<K, V, S>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    /// The values of many keys; what is not cached is loaded by one call of `load`: the async form of
    /// [`load_many`](Self::load_many), and with the same outcomes.
    ///
    /// `load` is called once with the keys that this call leads, and not at all if there are none. Its future belongs to the
    /// loads of all these keys, as [`get_with_async`](Self::get_with_async)'s belongs to one.
    ///
    /// # Errors
    /// As [`load_many`](Self::load_many).
    ///
    /// # Panics
    /// If `load` or its future panics. In debug builds, if the thread holds a [`Pinned`](crate::Pinned) and would have to load
    /// or wait.
    ///
    /// # Cancel safety
    /// As [`get_with_async`](Self::get_with_async): the load goes on for the keys that others have joined, and all other
    /// entries are again what they were before.
    ///
    /// # Examples
    /// ```
    /// # smol::block_on(async {
    /// let cache = quell::Cache::<u32, u32>::builder().build();
    /// cache.insert(2, 4);
    /// let load = |missing: Vec<u32>| async move { Ok::<_, std::io::Error>(missing.into_iter().map(|n| (n, n * n))) };
    /// let squares = cache.load_many_async([1, 2, 3], load).await.unwrap();
    /// assert_eq!((squares[&1], squares[&2], squares[&3]), (1, 4, 9));
    /// # });
    /// ```
    pub async fn load_many_async<B, F, I, E>(
        &self,
        keys: impl IntoIterator<Item = B>,
        load: impl FnOnce(Vec<K>) -> F,
    ) -> Result<HashMap<K, V>, LoadError>
    where
        B: Borrow<K>,
        F: Future<Output = Result<I, E>> + Send + 'static,
        I: IntoIterator<Item = (K, V)> + 'static,
        E: Into<BoxError> + 'static,
    {
        let keys = keys.into_iter().map(|key| key.borrow().clone()).collect();
        let terms = self.patient(Shares::All).as_task(false);
        load_many_async(&self.core, &keys, terms, load).await
    }

    /// The values of many keys; what is not cached is loaded by the attached loader: the async form of
    /// [`get_many`](Self::get_many), and with the same outcomes.
    ///
    /// The future of an [`async_batch_loader`](crate::CacheBuilder::async_batch_loader) belongs to the loads of all its keys, as
    /// [`get_with_async`](Self::get_with_async)'s belongs to one. A blocking loader runs where
    /// [`get_or_load_async`](Self::get_or_load_async) has it run.
    ///
    /// # Errors
    /// As [`get_many`](Self::get_many).
    ///
    /// # Panics
    /// As [`get_or_load_async`](Self::get_or_load_async).
    ///
    /// # Cancel safety
    /// As [`load_many_async`](Self::load_many_async).
    ///
    /// # Examples
    /// ```
    /// # smol::block_on(async {
    /// let load = |keys: Vec<u32>| async move { Ok::<_, std::io::Error>(keys.into_iter().map(|n| (n, n * n))) };
    /// let cache = quell::Cache::builder().async_batch_loader(load).build();
    /// cache.insert(2, 5);
    /// assert_eq!(cache.get_many_async([1, 2, 3]).await.unwrap(), [(1, 1), (2, 5), (3, 9)].into());
    /// # });
    /// ```
    pub async fn get_many_async<B>(
        &self,
        keys: impl IntoIterator<Item = B>,
    ) -> Result<HashMap<K, V>, LoadError>
    where
        B: Borrow<K>,
    {
        let keys = keys.into_iter().map(|key| key.borrow().clone()).collect();
        let terms = self.patient(Shares::All).as_task(false);
        get_many_async(&self.core, &keys, terms).await
    }
}
