//! Loads on the caller's thread: one flight per key, whatever the method.

use super::Cache;
use crate::call::{
    Attached, Call, How, Shares, Step, Terms, Turn, fetch_of, fetched, get_many, load_many, received,
    unexpected,
};
use crate::engine::{Demand, Glance, Lease, Lookup, Mode};
use crate::error::{BoxError, LoadError, LoadErrorKind};
use crate::flight::{Fetch, Waits};
use crate::freshness::Ttl;
use crate::observe::Count;
use crate::primitive::epoch::{pin, pin_numbered};
use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};

/// Runs a closure that can't fail, and publishes its value.
pub(super) fn lead<K: 'static, V: Clone + 'static, S>(
    lease: Lease<K, V, S>,
    ttl: Ttl,
    load: impl FnOnce() -> V,
) -> (V, How) {
    received(fetched(lease, ttl, |_| Fetch::value(load()))).unwrap_or_else(|error| unexpected(&error))
}

/// Runs a closure that may fail, and publishes its value or its error.
fn try_lead<K: 'static, V: Clone + 'static, S, E: Into<BoxError>>(
    lease: Lease<K, V, S>,
    ttl: Ttl,
    load: impl FnOnce() -> Result<V, E>,
) -> Result<(V, How), LoadError> {
    received(fetched(lease, ttl, |_| fetch_of(load())))
}

impl<K, V, S> Cache<K, V, S>
where
    K: Hash + Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    /// The value, if it is simply fresh: what a hit costs is what `get` costs.
    #[inline(always)]
    pub(crate) fn fresh<Q>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let hash = self.core.hash(key);
        let (guard, number) = pin_numbered();
        let Glance::Fresh(value) = self.core.glance(key, hash, &guard) else { return None };
        self.core.counters.access_on(number, Count::Hits, || hash);
        Some(value.clone())
    }

    /// Looks up and waits until the call has its answer, or leads.
    pub(super) fn obtain<Q>(&self, call: &mut Call<'_, K, V, S, Q>) -> Result<Turn<K, V, S>, LoadError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        loop {
            match call.look()? {
                Step::Turn(turn) => return Ok(turn),
                Step::Join(joined) => {
                    let waited = joined.park();
                    if let Some(turn) = call.after(waited) {
                        return turn;
                    }
                }
            }
        }
    }

    /// A fallible call with a closure of its own.
    pub(super) fn try_load_on<Q, E>(
        &self,
        key: &Q,
        terms: Terms,
        ttl: Ttl,
        load: impl FnOnce() -> Result<V, E>,
    ) -> Result<(V, How), LoadError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
        E: Into<BoxError>,
    {
        let mut call = Call::new(&self.core, key, terms);
        match self.obtain(&mut call)? {
            Turn::Served(value, how, None) => Ok((value, how)),
            // The stale value is in hand: the caller's own failure costs the refresh, not the answer.
            Turn::Served(value, how, Some(lease)) => Ok(try_lead(lease, ttl, load).unwrap_or((value, how))),
            Turn::Lead(lease) => try_lead(lease, ttl, load).or_else(|error| call.ladder(error)),
        }
    }

    /// A call with the attached loader.
    pub(super) fn load_on<Q>(&self, key: &Q, mut terms: Terms, ttl: Ttl) -> Result<(V, How), LoadError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let attached = Attached::of(&self.core, Waits::AsThread);
        terms.attach(attached.as_ref().map(|loader| loader.background(&self.core)));
        let mut call = Call::new(&self.core, key, terms);
        match (self.obtain(&mut call), attached) {
            (Ok(Turn::Served(value, how, lease)), attached) => {
                if let (Some(lease), Some(loader)) = (lease, attached) {
                    let _ = loader.refresh(lease, key.to_owned());
                }
                Ok((value, how))
            }
            (Ok(Turn::Lead(lease)), Some(loader)) => {
                let got = loader.load_here(lease, ttl, || key.to_owned());
                got.or_else(|error| call.ladder(error))
            }
            (Ok(Turn::Lead(_)), None) => Err(LoadError::no_loader()),
            (Err(error), _) => Err(error),
        }
    }

    pub(crate) fn patient(&self, shares: Shares) -> Terms {
        Terms::fallible(shares, self.core.settings.wait_timeout)
    }

    /// The value of `key`; if there is none, `load`'s. One load per key, whoever asks.
    ///
    /// A stale value is served at once to all but the one caller that is chosen to refresh it, who runs `load` first.
    /// This call never gives up: limits, waits and back-off do not apply to it, and if the load that it waits for
    /// fails, panics or overruns its lease, one of those who wait runs its own `load`, and the others wait for that.
    ///
    /// # Panics
    /// If `load` panics. If `load` waits, by way of other loads, for itself; the text names the caches on the way. In
    /// debug builds, if the thread holds a [`Pinned`](crate::Pinned) and would have to load or wait.
    ///
    /// # Blocking
    /// While `load` runs, here or in another caller, up to that one's lease.
    ///
    /// # Examples
    /// ```
    /// let cache = quell::Cache::<u32, String>::builder().build();
    /// assert_eq!(cache.get_with(&1, || "one".to_owned()), "one");
    /// assert_eq!(cache.get_with(&1, || unreachable!("it is cached")), "one");
    /// ```
    pub fn get_with<Q>(&self, key: &Q, load: impl FnOnce() -> V) -> V
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        if let Some(value) = self.fresh(key) {
            return value;
        }
        match self.obtain(&mut Call::new(&self.core, key, Terms::infallible(Shares::Nothing))) {
            Ok(Turn::Served(value, _, None)) => value,
            Ok(Turn::Served(_, _, Some(lease)) | Turn::Lead(lease)) => lead(lease, Ttl::default(), load).0,
            Err(error) => unexpected(&error),
        }
    }

    /// The value of `key`; if there is none, `load`'s, unless it fails. Those who wait for a load that fails share its
    /// error, whatever its type.
    ///
    /// Before an error is returned, a value in grace is ([`stale_if_error`](crate::CacheBuilder::stale_if_error)), then
    /// the cache's [`fallback`](crate::CacheBuilder::fallback).
    ///
    /// # Errors
    /// [`Failed`](LoadErrorKind::Failed) with `load`'s error or that of the load that was joined;
    /// [`TimedOut`](LoadErrorKind::TimedOut) after the cache's `wait_timeout`; [`Cycle`](LoadErrorKind::Cycle) if the
    /// load would wait for itself, which takes no ladder.
    ///
    /// # Panics
    /// If `load` panics. In debug builds, if the thread holds a [`Pinned`](crate::Pinned) and would have to load or wait.
    ///
    /// # Blocking
    /// While `load` runs, here or in another caller, up to that one's lease or the `wait_timeout`.
    ///
    /// # Examples
    /// ```
    /// let cache = quell::Cache::<String, u16>::builder().build();
    /// let error = cache.try_get_with("port", || "http".parse()).unwrap_err();
    /// assert!(error.downcast_ref::<std::num::ParseIntError>().is_some());
    /// assert_eq!(cache.try_get_with("port", || "80".parse::<u16>()).unwrap(), 80);
    /// ```
    pub fn try_get_with<Q, E>(&self, key: &Q, load: impl FnOnce() -> Result<V, E>) -> Result<V, LoadError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
        E: Into<BoxError>,
    {
        if let Some(value) = self.fresh(key) {
            return Ok(value);
        }
        self.try_load_on(key, self.patient(Shares::Failures), Ttl::default(), load).map(|(value, _)| value)
    }

    /// The value of `key`; if there is none, `load`'s, if it has one. `None` is shared by those who wait for the load and
    /// is not stored; a stale value that was there goes.
    ///
    /// Like [`get_with`](Self::get_with), this call never gives up.
    ///
    /// # Panics
    /// As [`get_with`](Self::get_with).
    ///
    /// # Blocking
    /// As [`get_with`](Self::get_with).
    pub fn optionally_get_with<Q>(&self, key: &Q, load: impl FnOnce() -> Option<V>) -> Option<V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        if let Some(value) = self.fresh(key) {
            return Some(value);
        }
        let lease = match self.obtain(&mut Call::new(&self.core, key, Terms::infallible(Shares::Absence))) {
            Ok(Turn::Served(value, _, None)) => return Some(value),
            Ok(Turn::Served(_, _, Some(lease)) | Turn::Lead(lease)) => lease,
            Err(error) if error.kind() == LoadErrorKind::Absent => return None,
            Err(error) => unexpected(&error),
        };
        let own = fetched(lease, Ttl::default(), |_| load().map_or(Fetch::Absent, Fetch::value));
        received(own).ok().map(|(value, _)| value)
    }

    /// The value of `key`; if there is none, the attached loader's. A stale value is served at once, and one refresh runs
    /// in the background.
    ///
    /// # Errors
    /// As [`try_get_with`](Self::try_get_with), and [`Absent`](LoadErrorKind::Absent) if the loader says so;
    /// [`NotCached`](LoadErrorKind::NotCached) if nothing is cached and no loader is attached.
    ///
    /// # Panics
    /// If the loader panics on this thread. In debug builds, if the thread holds a [`Pinned`](crate::Pinned) and would
    /// have to load or wait.
    ///
    /// # Blocking
    /// On a miss, while the loader runs, here or in another caller, up to that one's lease or the `wait_timeout`. The
    /// first refresh of the cache starts a thread, unless an executor is given.
    pub fn get_or_load<Q>(&self, key: &Q) -> Result<V, LoadError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        if let Some(value) = self.fresh(key) {
            return Ok(value);
        }
        self.load_on(key, self.patient(Shares::All), Ttl::default()).map(|(value, _)| value)
    }

    /// The values of many keys; what is not cached is loaded by one call of `load`. Keys that the source does not have are not
    /// in the result. One load per key, whoever asks, and however many at once.
    ///
    /// `load` is called once with the keys that this call leads, and not at all if there are none. All of them are settled
    /// before this call waits for keys that others are loading. What `load` returns for other keys is ignored. A value that
    /// this call is chosen to refresh, stale or early, is one of its keys.
    ///
    /// # Errors
    /// [`Failed`](LoadErrorKind::Failed) with `load`'s error, for all keys of this call and for those who have joined them, if
    /// one of its keys has no value that can be served in place of it; the error of a load that was joined, or the end of the
    /// `wait_timeout`, which counts from the call, as with [`try_get_with`](Self::try_get_with); [`Panicked`](LoadErrorKind::Panicked) if a load that was
    /// joined is given up when `load` has been called already. What has been loaded stays in the cache.
    ///
    /// # Panics
    /// As [`try_get_with`](Self::try_get_with).
    ///
    /// # Blocking
    /// While `load` runs, then while others load keys of this call, up to their leases or the `wait_timeout`.
    ///
    /// # Examples
    /// ```
    /// let cache = quell::Cache::<u32, u32>::builder().build();
    /// cache.insert(2, 4);
    /// let load = |missing: &[u32]| {
    ///     assert_eq!(missing.len(), 2);
    ///     Ok::<_, std::io::Error>(missing.iter().map(|n| (*n, n * n)).collect::<Vec<_>>())
    /// };
    /// let squares = cache.load_many([1, 2, 3], load).unwrap();
    /// assert_eq!((squares[&1], squares[&2], squares[&3]), (1, 4, 9));
    /// ```
    pub fn load_many<B, I, E>(
        &self,
        keys: impl IntoIterator<Item = B>,
        load: impl FnOnce(&[K]) -> Result<I, E>,
    ) -> Result<HashMap<K, V>, LoadError>
    where
        K: Clone,
        B: Borrow<K>,
        I: IntoIterator<Item = (K, V)>,
        E: Into<BoxError>,
    {
        let keys = keys.into_iter().map(|key| key.borrow().clone()).collect();
        load_many(&self.core, &keys, self.patient(Shares::All), load)
    }

    /// The values of many keys; what is not cached is loaded by the attached loader. Keys that the source does not have, or is
    /// known not to have, are not in the result. One load per key, whoever asks, and however many at once.
    ///
    /// A [`batch_loader`](crate::CacheBuilder::batch_loader) is called once with all keys that this call leads, or for each
    /// [`max_batch_size`](crate::CacheBuilder::max_batch_size) of them; any other loader, for one key after the other. All of
    /// them are settled before this call waits for keys that others are loading. Stale values are served at once; those that this
    /// call is chosen to refresh are refreshed in the background, as many by one call of the loader.
    ///
    /// # Errors
    /// [`Failed`](LoadErrorKind::Failed) with the loader's error, for all keys of its call and for those who have joined them, if
    /// one of the keys has no value that can be served in place of it; else as [`get_or_load`](Self::get_or_load), but for keys
    /// that are absent. After an error no more is loaded; what has been loaded stays in the cache.
    ///
    /// # Panics
    /// As [`get_or_load`](Self::get_or_load).
    ///
    /// # Blocking
    /// While the loader runs, then while others load keys of this call, up to their leases or the `wait_timeout`.
    ///
    /// # Examples
    /// ```
    /// use std::sync::atomic::{AtomicUsize, Ordering};
    ///
    /// static QUERIES: AtomicUsize = AtomicUsize::new(0);
    /// let squares = |keys: &[u32]| {
    ///     QUERIES.fetch_add(1, Ordering::Relaxed);
    ///     Ok::<_, std::io::Error>(keys.iter().map(|n| (*n, n * n)).collect::<Vec<_>>())
    /// };
    /// let cache = quell::Cache::builder().batch_loader(squares).build();
    /// assert_eq!(cache.get_many([1, 2, 3]).unwrap(), [(1, 1), (2, 4), (3, 9)].into());
    /// assert_eq!(cache.get_many([3, 4]).unwrap()[&4], 16);
    /// assert_eq!(QUERIES.load(Ordering::Relaxed), 2);
    /// ```
    pub fn get_many<B>(&self, keys: impl IntoIterator<Item = B>) -> Result<HashMap<K, V>, LoadError>
    where
        K: Clone,
        B: Borrow<K>,
    {
        let keys = keys.into_iter().map(|key| key.borrow().clone()).collect();
        get_many(&self.core, &keys, self.patient(Shares::All))
    }

    /// Starts a load by the attached loader in the background, or leaves it to the one that is under way. Whatever is
    /// cached is served until then.
    ///
    /// Returns whether a load is under way now: not if no loader is attached, if the executor is full, while a back-off lasts,
    /// too many loads run or the breaker is open, or in a [mode](crate::Mode) other than `Normal`. Never waits.
    pub fn refresh<Q>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        Attached::of(&self.core, Waits::AsThread).is_some_and(|loader| self.refresh_by(loader, key, 0.0))
    }

    /// As `refresh`, by this loader; the deadlines of what it brings are spread by this much at least.
    pub(super) fn refresh_by<Q>(&self, loader: Attached<K, V>, key: &Q, spread: f64) -> bool
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        if self.mode() != Mode::Normal {
            return false;
        }
        let terms = self.patient(Shares::All);
        let demand = Demand { accept: None, miss: loader.background(&self.core), ..terms.demand };
        // Left without the pin: with its last place a load's future goes, which is user code.
        let _joined;
        let stay = self.core.stay(pin());
        let lease = match self.core.lookup(key, &demand, &stay) {
            Lookup::Lead(lease) => lease,
            Lookup::Join(place) => {
                _joined = place;
                return true;
            }
            Lookup::Hit { .. } | Lookup::Absent | Lookup::Refused(_) | Lookup::NotCached => return false,
        };
        drop(stay);
        lease.flight().set_spread(spread);
        loader.refresh(lease, key.to_owned())
    }
}
