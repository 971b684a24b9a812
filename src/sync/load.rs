//! Loads on the caller's thread: one flight per key, whatever the method.

use super::Cache;
use crate::clock::Moment;
use crate::engine::{
    Accept, Demand, Fetched, Glance, Lease, Lookup, Published, QueuedLease, Start, source_fence,
};
use crate::error::{BoxError, LoadError, LoadErrorKind};
use crate::executor::Job;
use crate::flight::cycle::{self, Cycle, graph};
use crate::flight::{Outcome, Waited};
use crate::freshness::{Stage, Ttl};
use crate::loader::{Found, LoadContext, Loaded, Loader};
use crate::observe::{Count, Counters};
use crate::primitive::caught;
use crate::primitive::epoch::{pin, pin_numbered};
use crate::primitive::thread::is_pinned_by_user;
use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash};
use std::time::Duration;

/// What a call that waited does with the failure of the flight that it waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shares {
    /// Every failure is the caller's too.
    All,
    /// A failed load is, an absent key is not.
    Failures,
    /// An absent key is, a failed load is not.
    Absence,
    /// None is: the caller looks again.
    Nothing,
}

impl Shares {
    fn shares(self, kind: LoadErrorKind) -> bool {
        match self {
            Self::All => true,
            Self::Failures => kind != LoadErrorKind::Absent,
            Self::Absence => kind == LoadErrorKind::Absent,
            Self::Nothing => false,
        }
    }
}

/// One call's contract.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) demand: Demand,
    pub(super) shares: Shares,
    /// How long it waits for others; `None`: no limit but the lease.
    pub(super) patience: Option<Duration>,
}

impl Terms {
    /// Of a call that never gives up.
    pub(super) fn infallible(shares: Shares) -> Self {
        let demand = Demand {
            accept: Some(Accept::default()),
            may_lead: true,
            backs_off: false,
            miss: Start::Now,
            stale: Start::Now,
        };
        Self { demand, shares, patience: None }
    }

    /// Of a call that may fail, and takes the ladder before it does.
    pub(super) fn fallible(shares: Shares, patience: Option<Duration>) -> Self {
        let infallible = Self::infallible(shares);
        Self { demand: Demand { backs_off: true, ..infallible.demand }, patience, ..infallible }
    }

    /// Whether the call may end with an error of the cache's own.
    fn may_fail(&self) -> bool {
        self.demand.backs_off
    }
}

/// Where a value came from.
#[derive(Clone, Copy, Debug)]
pub(super) enum How {
    /// It was in the cache.
    Cached { stage: Stage, born: Moment },
    /// Another caller loaded it.
    Joined { waited: Duration },
    /// The caller loaded it.
    Loaded { took: Duration },
    /// The cache's fallback gave it.
    Fallback,
}

/// What a call has come to before its own closure runs.
pub(super) enum Turn<K, V, S> {
    /// It has its answer; with a lease, it has been chosen to refresh.
    Served(V, How, Option<Lease<K, V, S>>),
    /// It leads.
    Lead(Lease<K, V, S>),
}

impl<K, V, S> Turn<K, V, S> {
    /// The answer is there, and nothing is left to do.
    fn served((value, how): (V, How)) -> Self {
        Self::Served(value, how, None)
    }
}

/// Counts a loader's panic while it unwinds.
struct Panicking<'a>(&'a Counters);

impl Drop for Panicking<'_> {
    fn drop(&mut self) {
        self.0.add(Count::LoaderPanics);
        self.0.add(Count::LoadFailures);
    }
}

/// Runs a load under its lease, so that nested calls know on whose behalf they wait. If it panics, the lease that
/// unwinds with it abandons the flight.
pub(super) fn run<K: 'static, V: 'static, S, R>(
    lease: &mut Lease<K, V, S>,
    load: impl FnOnce(&Lease<K, V, S>) -> R,
) -> R {
    let _loading = cycle::Loading::enter(graph(), lease.flight().id(), &lease.core().settings.name);
    lease.begin();
    // The twin of the writers' fence, between the claim and the loader.
    source_fence();
    let panicking = Panicking(&lease.core().counters);
    let result = load(lease);
    std::mem::forget(panicking);
    result
}

/// What a load has brought, made within `run`: no user code is left to run before it is published.
pub(super) struct Brought<V> {
    fetched: Fetched<V>,
    /// The caller's own clone.
    kept: V,
    took: Duration,
}

impl<V: Clone + 'static> Brought<V> {
    /// `own` are the times that the call or the loader asked for; else the cache's `Expiry` is asked.
    pub(super) fn new<K: 'static, S>(lease: &Lease<K, V, S>, value: V, own: Ttl) -> Self {
        let took = lease.took();
        let (ttl, weight) = (lease.own_ttl(&value, own, took), lease.weigh(&value));
        let kept = value.clone();
        Self { fetched: Fetched { ttl, weight, ..Fetched::of(value) }, kept, took }
    }

    /// Ends the flight with it. A refused result goes to its own caller all the same.
    fn publish<K: 'static, S>(self, lease: Lease<K, V, S>) -> (V, How) {
        let _ = lease.publish(self.fetched, &self.kept);
        (self.kept, How::Loaded { took: self.took })
    }

    /// Ends the flight with a value that was decided on.
    pub(super) fn put<K: 'static, S>(self, lease: Lease<K, V, S>) -> (Published, V) {
        (lease.put(self.fetched, &self.kept), self.kept)
    }
}

/// Runs a closure that can't fail, and publishes its value.
pub(super) fn lead<K: 'static, V: Clone + 'static, S>(
    mut lease: Lease<K, V, S>,
    ttl: Ttl,
    load: impl FnOnce() -> V,
) -> (V, How) {
    run(&mut lease, |lease| Brought::new(lease, load(), ttl)).publish(lease)
}

/// Runs a closure that may fail, and publishes its value or its error.
pub(super) fn try_lead<K: 'static, V: Clone + 'static, S, E: Into<BoxError>>(
    mut lease: Lease<K, V, S>,
    ttl: Ttl,
    load: impl FnOnce() -> Result<V, E>,
) -> Result<(V, How), LoadError> {
    match run(&mut lease, |lease| load().map(|value| Brought::new(lease, value, ttl))) {
        Ok(brought) => Ok(brought.publish(lease)),
        Err(error) => Err(fail(lease, error.into())),
    }
}

/// What the attached loader said.
enum Said<V> {
    Brought(Brought<V>),
    Absent,
    Failed(BoxError),
}

/// Calls the attached loader. `own` are the times that the call asked for.
fn call_attached<K: 'static, V: Clone + 'static, S>(
    lease: &mut Lease<K, V, S>,
    loader: &dyn Loader<K, V>,
    own: Ttl,
) -> Said<V> {
    let previous = lease.previous(&pin());
    let cx = LoadContext { previous, cause: lease.cause(), lease_left: lease.core().settings.lease };
    run(lease, |lease| {
        let Loaded { found, ttl, store } = match loader.load(lease.key(), &cx) {
            Ok(loaded) => loaded,
            Err(error) => return Said::Failed(error),
        };
        let (value, renews) = match (found, cx.previous) {
            (Found::Value(value), _) => (value, false),
            (Found::NotModified, Some(value)) => (value, true),
            (Found::NotModified, None) => {
                return Said::Failed("the loader said `not modified`, but there is no previous value".into());
            }
            (Found::Absent, _) => return Said::Absent,
        };
        let mut brought = Brought::new(lease, value, own.or(ttl));
        (brought.fetched.store, brought.fetched.renews) = (store, renews);
        Said::Brought(brought)
    })
}

/// Ends a flight with what the attached loader said.
fn conclude<K: 'static, V: Clone + 'static, S>(
    lease: Lease<K, V, S>,
    said: Said<V>,
) -> Result<(V, How), LoadError> {
    match said {
        Said::Brought(brought) => Ok(brought.publish(lease)),
        Said::Failed(error) => Err(fail(lease, error)),
        Said::Absent => {
            let _ = lease.absent();
            Err(LoadError::absent())
        }
    }
}

/// Ends a flight with its loader's error.
fn fail<K: 'static, V: Clone + 'static, S>(lease: Lease<K, V, S>, error: BoxError) -> LoadError {
    let error = LoadError::failed(error);
    let _ = lease.fail(error.clone());
    error
}

/// The background job of a queued lease. Dropped unrun, it abandons the flight.
fn refresh_job<K, V, S>(queued: QueuedLease<K, V, S>) -> Job
where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    Job::new(move || {
        let Some(mut lease) = queued.begin() else { return };
        let Some(loader) = lease.core().settings.loader.clone() else { return };
        match caught(|| call_attached(&mut lease, &*loader, Ttl::default())) {
            Some(said) => drop(conclude(lease, said)),
            // Nobody's own call: remembered as a failure, so that a hot key does not panic on each read.
            None => {
                let _ = lease.fail_alone(LoadError::panicked());
            }
        }
    })
}

/// A call that can't fail has met an error: only a cycle is one.
#[track_caller]
pub(super) fn unexpected(error: &LoadError) -> ! {
    panic!("{error}")
}

impl<K, V, S> Cache<K, V, S>
where
    K: Hash + Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    /// The value, if it is simply fresh: what a hit costs is what `get` costs.
    #[inline(always)]
    fn fresh<Q>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let hash = self.core.hash(key);
        let (guard, number) = pin_numbered();
        let Glance::Fresh(value) = self.core.glance(key, hash, &guard) else { return None };
        self.core.counters.add_on(number, Count::Hits);
        Some(value.clone())
    }

    /// Looks up and waits until the call has its answer, or leads.
    pub(super) fn obtain<Q>(&self, key: &Q, terms: &Terms) -> Result<Turn<K, V, S>, LoadError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let core = &self.core;
        let mut waiting: Option<(Moment, Moment)> = None;
        // Of a clock that may be moved as soon as this caller is seen to wait: before it is.
        let arrived = core.time.given_now();
        loop {
            let ticket = {
                let stay = core.stay(pin());
                match core.lookup(key, &terms.demand, &stay) {
                    Lookup::Hit { hit, lease } => {
                        let how = How::Cached { stage: hit.stage, born: hit.cell.times.born() };
                        if waiting.is_none() {
                            core.count_hit(hit.stage);
                        }
                        if lease.is_some() && terms.demand.stale == Start::Now {
                            refuse_under_pin();
                        }
                        return Ok(Turn::Served(hit.cell.value.clone(), how, lease));
                    }
                    Lookup::Lead(lease) => {
                        drop(stay);
                        refuse_under_pin();
                        if waiting.is_none() {
                            core.counters.add(Count::Misses);
                        }
                        return Ok(Turn::Lead(lease));
                    }
                    Lookup::NotCached => {
                        core.counters.add(Count::Misses);
                        return Err(LoadError::not_cached());
                    }
                    Lookup::BackingOff(error) => {
                        drop(stay);
                        if waiting.is_none() {
                            core.counters.add(Count::Misses);
                        }
                        return self.ladder(key, terms, error).map(Turn::served);
                    }
                    Lookup::Join(ticket) => ticket,
                }
            };
            refuse_under_pin();
            let (since, deadline) = *waiting.get_or_insert_with(|| {
                core.counters.add(Count::Misses);
                // Exactly: a coarse clock lags, and would end a short wait at once.
                let now = arrived.unwrap_or_else(|| core.time.precise());
                (now, terms.patience.map_or(Moment::NEVER, |patience| now.plus(patience)))
            });
            let waits = graph().wait_for(ticket.flight().id(), &core.settings.name);
            let _wait = waits.map_err(|Cycle(path)| LoadError::cycle(path))?;
            core.counters.add(Count::Joins);
            match ticket.wait(&core.time, deadline) {
                // Who wants to lead has waited for the way to be free.
                Waited::Ended(_) if terms.demand.accept.is_none() => {}
                Waited::Ended(Outcome::Value(value)) => {
                    let waited = core.time.precise().since(since);
                    return Ok(Turn::Served(value, How::Joined { waited }, None));
                }
                Waited::Ended(Outcome::Failure(error)) if terms.shares.shares(error.kind()) => {
                    return self.ladder(key, terms, error).map(Turn::served);
                }
                Waited::Ended(Outcome::Failure(_) | Outcome::LookAgain) | Waited::LeaseOver => {}
                Waited::TimedOut => {
                    core.counters.add(Count::WaitTimeouts);
                    let waited = core.time.precise().since(since);
                    return self.ladder(key, terms, LoadError::timed_out(waited)).map(Turn::served);
                }
            }
        }
    }

    /// What a call gets whose load failed or whose wait ended: a stale value, one in grace, the fallback's, or `error`.
    pub(super) fn ladder<Q>(&self, key: &Q, terms: &Terms, error: LoadError) -> Result<(V, How), LoadError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        // An absence is an answer, not a failure.
        if !terms.may_fail() || error.kind() == LoadErrorKind::Absent {
            return Err(error);
        }
        {
            let guard = pin();
            let accept = terms.demand.accept.unwrap_or_default();
            if let Some(hit) = self.core.salvage(key, accept, &guard) {
                if hit.stage == Stage::Grace {
                    self.core.counters.add(Count::GraceHits);
                }
                let how = How::Cached { stage: hit.stage, born: hit.cell.times.born() };
                return Ok((hit.cell.value.clone(), how));
            }
        }
        let Some(fallback) = &self.core.settings.fallback else { return Err(error) };
        // Dropped before the value is on its way: its destructor is user code.
        let owned = key.to_owned();
        let value = fallback(&owned);
        drop(owned);
        match value {
            Some(value) => {
                self.core.counters.add(Count::Fallbacks);
                Ok((value, How::Fallback))
            }
            None => Err(error),
        }
    }

    /// A fallible call with a closure of its own.
    pub(super) fn try_load_on<Q, E>(
        &self,
        key: &Q,
        terms: &Terms,
        ttl: Ttl,
        load: impl FnOnce() -> Result<V, E>,
    ) -> Result<(V, How), LoadError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
        E: Into<BoxError>,
    {
        match self.obtain(key, terms)? {
            Turn::Served(value, how, None) => Ok((value, how)),
            // The stale value is in hand: the caller's own failure costs the refresh, not the answer.
            Turn::Served(value, how, Some(lease)) => Ok(try_lead(lease, ttl, load).unwrap_or((value, how))),
            Turn::Lead(lease) => try_lead(lease, ttl, load).or_else(|error| self.ladder(key, terms, error)),
        }
    }

    /// A call with the attached loader.
    pub(super) fn load_on<Q>(&self, key: &Q, terms: &Terms, ttl: Ttl) -> Result<(V, How), LoadError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let loader = self.core.settings.loader.as_ref();
        let mut terms = *terms;
        terms.demand.stale = Start::Queued;
        terms.demand.may_lead &= loader.is_some();
        match (self.obtain(key, &terms), loader) {
            (Ok(Turn::Served(value, how, lease)), _) => {
                if let Some(lease) = lease {
                    let _ = self.core.offer(refresh_job(lease.into_queued()));
                }
                Ok((value, how))
            }
            (Ok(Turn::Lead(mut lease)), Some(loader)) => {
                let said = call_attached(&mut lease, &**loader, ttl);
                conclude(lease, said).or_else(|error| self.ladder(key, &terms, error))
            }
            (Err(error), None) if error.kind() == LoadErrorKind::NotCached => Err(LoadError::no_loader()),
            (Ok(Turn::Lead(_)), None) => Err(LoadError::no_loader()),
            (Err(error), _) => Err(error),
        }
    }

    fn patient(&self, shares: Shares) -> Terms {
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
        match self.obtain(key, &Terms::infallible(Shares::Nothing)) {
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
        let terms = self.patient(Shares::Failures);
        self.try_load_on(key, &terms, Ttl::default(), load).map(|(value, _)| value)
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
        let mut lease = match self.obtain(key, &Terms::infallible(Shares::Absence)) {
            Ok(Turn::Served(value, _, None)) => return Some(value),
            Ok(Turn::Served(_, _, Some(lease)) | Turn::Lead(lease)) => lease,
            Err(error) if error.kind() == LoadErrorKind::Absent => return None,
            Err(error) => unexpected(&error),
        };
        match run(&mut lease, |lease| load().map(|value| Brought::new(lease, value, Ttl::default()))) {
            Some(brought) => Some(brought.publish(lease).0),
            None => {
                let _ = lease.absent();
                None
            }
        }
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
        self.load_on(key, &self.patient(Shares::All), Ttl::default()).map(|(value, _)| value)
    }

    /// Starts a load by the attached loader in the background, or leaves it to the one that is under way. Whatever is
    /// cached is served until then.
    ///
    /// Returns whether a load is under way now: not if no loader is attached, if the executor is full, or while a back-off
    /// lasts. Never waits.
    pub fn refresh<Q>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        if self.core.settings.loader.is_none() {
            return false;
        }
        let terms = self.patient(Shares::All);
        let demand = Demand { accept: None, miss: Start::Queued, ..terms.demand };
        let stay = self.core.stay(pin());
        let lease = match self.core.lookup(key, &demand, &stay) {
            Lookup::Lead(lease) => lease,
            Lookup::Join(_) => return true,
            Lookup::Hit { .. } | Lookup::BackingOff(_) | Lookup::NotCached => return false,
        };
        drop(stay);
        self.core.offer(refresh_job(lease.into_queued()))
    }
}

/// Waiting or loading under the user's own pin would hold up the reclamation of all quell caches.
#[track_caller]
fn refuse_under_pin() {
    if cfg!(debug_assertions) {
        assert!(
            !is_pinned_by_user(),
            "a load under a live `Pinned` of the same thread: drop the `Pinned` first"
        );
    }
}
