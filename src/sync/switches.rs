//! Switches: what an operator changes while the cache is in use.

use super::Cache;
use crate::config::EarlyRefresh;
use crate::engine::Mode;
use crate::error::BuildError;
use std::time::Duration;

impl<K, V, S> Cache<K, V, S> {
    /// Sets how the cache serves and loads from now on. A call that is under way may go by the mode before. Default:
    /// [`Mode::Normal`]. Lock-free.
    ///
    /// [`Frozen`](Mode::Frozen), for when the source is down: whatever value is still there is served, however old, and what is
    /// past its hard deadline, its grace or its idle time counts, and answers, as stale; so does a remembered absence. Nothing is
    /// taken out as expired. No load begins: no refresh, no warming, no takeover, and no refresh that waits on a queue. A call
    /// that can fail and finds nothing that it takes gets the [`fallback`](crate::CacheBuilder::fallback)'s value, or fails as
    /// [`NotCached`](crate::LoadErrorKind::NotCached). A load that runs already may be joined, and publishes. Calls that can't
    /// fail (`get_with`, `optionally_get_with`, `compute`) have nothing else to return, so they load what is missing. Writes and
    /// eviction for want of room work as ever.
    ///
    /// [`Bypass`](Mode::Bypass), for when the cache is not to be trusted: nothing that is cached is served, not even by the ladder
    /// of a call that fails or as a loader's [previous value](crate::LoadContext::previous), and nothing is stored but that loads
    /// have failed. Loads are still one per key: what one brings goes to those who wait for it, and the value that was there goes.
    /// So it does with an `insert`, and with a `compute`, which is shown no value. Keys that are neither written nor loaded
    /// meanwhile keep what they have, which is served again in another mode; call [`invalidate_all`](Cache::invalidate_all) first
    /// if it is not to be. [`refresh`](Cache::refresh) and `keep_warm` do nothing: nobody would get what they load; a
    /// `warm` loads, and nothing of it stays.
    ///
    /// # Examples
    /// ```
    /// use quell::{Cache, LoadErrorKind, Mode};
    ///
    /// let cache = Cache::builder().loader(|k: &u32| Ok::<_, std::io::Error>(k + 1)).build();
    /// assert_eq!(cache.get_or_load(&1).unwrap(), 2);
    /// cache.set_mode(Mode::Frozen);
    /// assert_eq!(cache.get_or_load(&1).unwrap(), 2);
    /// assert_eq!(cache.get_or_load(&7).unwrap_err().kind(), LoadErrorKind::NotCached);
    /// cache.set_mode(Mode::Bypass);
    /// assert_eq!((cache.get(&1), cache.get_or_load(&7).unwrap()), (None, 8));
    /// cache.set_mode(Mode::Normal);
    /// assert_eq!((cache.get(&1), cache.get(&7)), (Some(2), None));
    /// ```
    pub fn set_mode(&self, mode: Mode) {
        self.core.set_mode(mode);
    }

    /// How the cache serves and loads now, see [`set_mode`](Self::set_mode).
    pub fn mode(&self) -> Mode {
        self.core.mode()
    }

    /// Sets the [hard TTL](crate::CacheBuilder::time_to_live) of what is stored from now on; with `None` and with
    /// [`Duration::MAX`] it is served for ever. What is cached keeps its deadlines. Lock-free.
    ///
    /// # Errors
    /// If the soft TTL is longer: set that first. Nothing is changed then.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    ///
    /// let cache = quell::Cache::<u32, u32>::builder().soft_ttl(Duration::from_secs(10)).build();
    /// cache.set_time_to_live(Some(Duration::from_secs(60))).unwrap();
    /// let error = cache.set_time_to_live(Some(Duration::from_secs(5))).unwrap_err();
    /// assert_eq!(error.rule(), "at most time_to_live");
    /// ```
    pub fn set_time_to_live(&self, ttl: Option<Duration>) -> Result<(), BuildError> {
        self.core.set_time_to_live(ttl)
    }

    /// Sets the [soft TTL](crate::CacheBuilder::soft_ttl) of what is stored from now on; with `None` a value is fresh for as long
    /// as it is served. What is cached keeps its deadlines. Whether early refresh is on by default has been decided when the
    /// cache was built. Lock-free.
    ///
    /// # Errors
    /// If it is longer than the hard TTL. Nothing is changed then.
    pub fn set_soft_ttl(&self, soft_ttl: Option<Duration>) -> Result<(), BuildError> {
        self.core.set_soft_ttl(soft_ttl)
    }

    /// Sets when values are refreshed [before they go stale](crate::CacheBuilder::early_refresh). Keys that have come into the
    /// cache while it was [off](EarlyRefresh::off) take part once they have left it and come again, the others from their next
    /// load on, at the latest. Lock-free.
    ///
    /// # Errors
    /// As [`try_build`](crate::CacheBuilder::try_build), for a factor or a probability that makes no sense.
    pub fn set_early_refresh(&self, early: EarlyRefresh) -> Result<(), BuildError> {
        self.core.set_early_refresh(early)
    }
}
