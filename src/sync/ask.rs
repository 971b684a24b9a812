//! `ask`: one call with a contract of its own, and an answer that says where it came from.

use super::Cache;
use super::load::lead;
use crate::call::{Call, How, Shares, Terms, Turn};
use crate::clock::Time;
use crate::engine::Accept;
use crate::error::{BoxError, LoadError};
use crate::freshness::{Stage, Ttl};
use crate::hash::DefaultHashBuilder;
use std::borrow::Borrow;
use std::fmt;
use std::hash::{BuildHasher, Hash};
use std::time::Duration;

/// A value, and where it came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer<V> {
    /// The value.
    pub value: V,
    /// Where it came from.
    pub provenance: Provenance,
}

/// Where a value came from. Ages count from the moment at which the value was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provenance {
    /// From the cache, before its soft deadline.
    Fresh {
        /// How old it is.
        age: Duration,
    },
    /// From the cache, between its soft and its hard deadline.
    Stale {
        /// How old it is.
        age: Duration,
    },
    /// From the cache, after its hard deadline, since the load failed or the wait ended.
    Grace {
        /// How old it is.
        age: Duration,
    },
    /// This call loaded it.
    Loaded {
        /// How long the load took.
        took: Duration,
    },
    /// Another call loaded it.
    Joined {
        /// How long this call waited.
        waited: Duration,
    },
    /// A remembered absence. No answer has it: what is known to be absent is the error
    /// [`Absent`](crate::LoadErrorKind::Absent), remembered or not, and [`Stats::negative_hits`](crate::Stats::negative_hits)
    /// counts what was remembered.
    Negative,
    /// From the cache's `fallback`.
    Fallback,
}

impl Provenance {
    fn new(how: How, time: &Time) -> Self {
        match how {
            How::Cached { stage, born } => {
                let age = time.now().since(born);
                match stage {
                    Stage::Fresh => Self::Fresh { age },
                    Stage::Stale => Self::Stale { age },
                    Stage::Grace | Stage::Dead => Self::Grace { age },
                }
            }
            How::Joined { since } => Self::Joined { waited: time.precise().since(since) },
            How::Loaded { took } => Self::Loaded { took },
            How::Fallback => Self::Fallback,
        }
    }
}

/// One call's contract; made by [`Cache::ask`], ended by one of the methods that return an [`Answer`].
///
/// # Examples
/// ```
/// use quell::{Cache, LoadErrorKind, Provenance};
/// use std::time::Duration;
///
/// let cache = Cache::<u32, u32>::builder().build();
/// assert_eq!(cache.ask(&1).get().unwrap_err().kind(), LoadErrorKind::NotCached);
/// cache.insert(1, 10);
/// let answer = cache.ask(&1).max_age(Duration::from_secs(60)).load_with(|| 11).unwrap();
/// assert_eq!(answer.value, 10);
/// assert!(matches!(answer.provenance, Provenance::Fresh { .. }));
/// ```
#[must_use = "nothing is looked up until one of the methods that return an `Answer` is called"]
pub struct Ask<'a, K, V, Q: ?Sized, S = DefaultHashBuilder> {
    pub(crate) cache: &'a Cache<K, V, S>,
    pub(crate) key: &'a Q,
    pub(crate) terms: Terms,
    pub(crate) ttl: Ttl,
}

impl<K, V, S> Cache<K, V, S>
where
    K: Hash + Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    /// Starts a call with a contract of its own.
    pub fn ask<'a, Q: ?Sized>(&'a self, key: &'a Q) -> Ask<'a, K, V, Q, S>
    where
        K: Borrow<Q>,
    {
        let terms = Terms::fallible(Shares::All, self.core.settings.wait_timeout);
        Ask { cache: self, key, terms, ttl: Ttl::default() }
    }
}

impl<K, V, Q, S> Ask<'_, K, V, Q, S>
where
    K: Borrow<Q> + Hash + Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    S: BuildHasher + Send + Sync + 'static,
{
    fn accept(&mut self) -> &mut Accept {
        self.terms.demand.accept.get_or_insert_default()
    }

    /// Takes only a cached value that is younger than this; with zero, none.
    pub fn max_age(mut self, age: Duration) -> Self {
        self.accept().max_age = Some(age);
        self
    }

    /// Takes a stale value only if it has been stale for less than this, even when the load fails; with zero, none.
    pub fn max_stale(mut self, stale: Duration) -> Self {
        self.accept().max_stale = Some(stale);
        self
    }

    /// Neither loads nor waits.
    pub fn only_if_cached(mut self) -> Self {
        self.terms.demand.may_lead = false;
        self
    }

    /// How long this call waits for somebody else's load, in place of the cache's `wait_timeout`.
    pub fn wait_timeout(mut self, timeout: Duration) -> Self {
        self.terms.patience = Some(timeout);
        self
    }

    /// The hard TTL of the value, if this call loads it.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl.hard = Some(ttl);
        self
    }

    /// The soft TTL of the value, if this call loads it.
    pub fn soft_ttl(mut self, soft_ttl: Duration) -> Self {
        self.ttl.soft = Some(soft_ttl);
        self
    }

    pub(crate) fn answer(&self, (value, how): (V, How)) -> Answer<V> {
        Answer { value, provenance: Provenance::new(how, &self.cache.core.time) }
    }

    /// What is cached. Never loads, never waits.
    ///
    /// # Errors
    /// [`NotCached`](crate::LoadErrorKind::NotCached) if nothing is cached that this call takes.
    pub fn get(self) -> Result<Answer<V>, LoadError> {
        let this = self.only_if_cached();
        match this.cache.obtain(&mut Call::new(&this.cache.core, this.key, this.terms))? {
            Turn::Served(value, how, _) => Ok(this.answer((value, how))),
            Turn::Lead(_) => Err(LoadError::not_cached()),
        }
    }

    /// What is cached, or what the attached loader loads, as [`Cache::get_or_load`].
    ///
    /// # Errors
    /// As [`Cache::get_or_load`], and [`NotCached`](crate::LoadErrorKind::NotCached) after
    /// [`only_if_cached`](Self::only_if_cached).
    ///
    /// # Panics
    /// As [`Cache::get_or_load`].
    ///
    /// # Blocking
    /// As [`Cache::get_or_load`].
    pub fn load(self) -> Result<Answer<V>, LoadError> {
        self.cache.load_on(self.key, self.terms, self.ttl).map(|got| self.answer(got))
    }

    /// What is cached, or what `load` loads. Unlike [`Cache::get_with`], this call may give up: its wait can end, and it
    /// shares the failure of a load that it joins.
    ///
    /// # Errors
    /// As [`Cache::try_get_with`], and [`NotCached`](crate::LoadErrorKind::NotCached) after
    /// [`only_if_cached`](Self::only_if_cached).
    ///
    /// # Panics
    /// As [`Cache::try_get_with`].
    ///
    /// # Blocking
    /// As [`Cache::try_get_with`].
    pub fn load_with(self, load: impl FnOnce() -> V) -> Result<Answer<V>, LoadError> {
        let got = match self.cache.obtain(&mut Call::new(&self.cache.core, self.key, self.terms))? {
            Turn::Served(value, how, None) => (value, how),
            Turn::Served(_, _, Some(lease)) | Turn::Lead(lease) => lead(lease, self.ttl, load),
        };
        Ok(self.answer(got))
    }

    /// What is cached, or what `load` loads, as [`Cache::try_get_with`].
    ///
    /// # Errors
    /// As [`Cache::try_get_with`], and [`NotCached`](crate::LoadErrorKind::NotCached) after
    /// [`only_if_cached`](Self::only_if_cached).
    ///
    /// # Panics
    /// As [`Cache::try_get_with`].
    ///
    /// # Blocking
    /// As [`Cache::try_get_with`].
    pub fn try_load_with<E: Into<BoxError>>(
        self,
        load: impl FnOnce() -> Result<V, E>,
    ) -> Result<Answer<V>, LoadError> {
        self.cache.try_load_on(self.key, self.terms, self.ttl, load).map(|got| self.answer(got))
    }
}

impl<K, V, Q: ?Sized, S> fmt::Debug for Ask<'_, K, V, Q, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ask").field("terms", &self.terms).field("ttl", &self.ttl).finish_non_exhaustive()
    }
}
