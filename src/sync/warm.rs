//! Warming: keys are loaded before anybody asks for them.

use super::Cache;
use crate::call::{Attached, Call, How, Shares, Terms, Turn, refuse_under_pin};
use crate::engine::{Accept, Lease};
use crate::error::{LoadError, LoadErrorKind};
use crate::executor::crew;
use crate::flight::Waits;
use crate::flight::cycle::Behalf;
use crate::freshness::{Stage, Ttl};
use crate::primitive::basket::Basket;
use crate::primitive::caught;
use crate::primitive::plain::{AtomicBool, AtomicUsize, Ordering};
use std::borrow::Borrow;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::hash::{BuildHasher, Hash};
use std::ops::ControlFlow;
use std::time::Duration;

type Progress = Box<dyn Fn(WarmProgress) -> ControlFlow<()> + Send + Sync>;

/// How [`Cache::warm`] and [`Cache::warm_async`] go about it.
///
/// # Examples
/// ```
/// use quell::{Cache, WarmOptions};
/// use std::ops::ControlFlow;
///
/// let cache = Cache::builder().loader(|k: &u32| Ok::<_, std::io::Error>(k + 1)).build();
/// let options = WarmOptions::new().concurrency(2).progress(|_| ControlFlow::Continue(()));
/// assert_eq!(cache.warm(0..100, options).loaded(), 100);
/// ```
#[must_use]
pub struct WarmOptions {
    concurrency: usize,
    spread: f64,
    progress: Option<Progress>,
}

/// How far a [`Cache::warm`] or [`Cache::warm_async`] has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WarmProgress {
    /// Keys that are done with, however they ended.
    pub done: usize,
    /// Keys in all.
    pub total: usize,
}

impl WarmOptions {
    /// Four loads at one time, deadlines spread by a fifth.
    pub fn new() -> Self {
        Self { concurrency: 4, spread: 0.2, progress: None }
    }

    /// How many loads run at one time. At least one. [`warm`](Cache::warm) has so many threads: the caller's, and others that last
    /// as long as the call; [`warm_async`](Cache::warm_async) has none.
    pub fn concurrency(mut self, loads: usize) -> Self {
        self.concurrency = loads;
        self
    }

    /// Spreads the deadlines of what is loaded, so that it does not end together: each entry's soft and hard TTL are scaled by
    /// one random factor from `(1 - spread, 1]`, or as the cache's `jitter` does it if that is larger. What is not between 0 and 1
    /// is taken for the nearer of the two.
    pub fn spread(mut self, spread: f64) -> Self {
        self.spread = if spread.is_nan() { 0.0 } else { spread.clamp(0.0, 1.0) };
        self
    }

    /// Is called after each key, on the thread that has dealt with it; it must not block where that is a task's. With
    /// [`ControlFlow::Break`], or if it panics, no further load begins.
    pub fn progress(
        mut self,
        progress: impl Fn(WarmProgress) -> ControlFlow<()> + Send + Sync + 'static,
    ) -> Self {
        self.progress = Some(Box::new(progress));
        self
    }
}

impl Default for WarmOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for WarmOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WarmOptions")
            .field("concurrency", &self.concurrency)
            .field("spread", &self.spread)
            .finish_non_exhaustive()
    }
}

/// What [`Cache::warm`] or [`Cache::warm_async`] has done about one key.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum WarmOutcome {
    /// It was fresh already.
    Fresh,
    /// It has been loaded.
    Loaded,
    /// Another call was loading it.
    Joined,
    /// The source has no such key.
    Absent,
    /// The load failed, or panicked, or the call had to give up.
    Failed(LoadError),
    /// The call was ended before.
    Skipped,
}

/// What [`Cache::warm`] or [`Cache::warm_async`] has done.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WarmReport<K> {
    /// For each key.
    pub outcomes: HashMap<K, WarmOutcome>,
}

impl<K> WarmReport<K> {
    /// How many keys were loaded by this call.
    #[must_use]
    pub fn loaded(&self) -> usize {
        self.outcomes.values().filter(|outcome| matches!(outcome, WarmOutcome::Loaded)).count()
    }

    /// The keys whose loads failed, and why.
    pub fn failed(&self) -> impl Iterator<Item = (&K, &LoadError)> {
        self.outcomes.iter().filter_map(|(key, outcome)| match outcome {
            WarmOutcome::Failed(error) => Some((key, error)),
            _ => None,
        })
    }

    /// Whether it was ended before all keys were dealt with.
    #[must_use]
    pub fn was_aborted(&self) -> bool {
        self.outcomes.values().any(|outcome| matches!(outcome, WarmOutcome::Skipped))
    }
}

impl WarmOutcome {
    /// What a look-up or a load has come to.
    pub(crate) fn of<V>(got: Result<(V, How), LoadError>) -> Self {
        match got {
            Ok((_, How::Loaded { .. })) => Self::Loaded,
            Ok((_, How::Joined { .. })) => Self::Joined,
            Ok((_, How::Cached { stage: Stage::Fresh, .. })) => Self::Fresh,
            Ok((_, How::Cached { .. } | How::Fallback)) => Self::Failed(LoadError::not_cached()),
            Err(error) if error.kind() == LoadErrorKind::Absent => Self::Absent,
            Err(error) => Self::Failed(error),
        }
    }
}

/// One key's call, and the loader that it uses.
type CallFor<'a, K, V, S> = (Call<'a, K, V, S, K>, Option<Attached<K, V>>);

/// A load that is one key's call's to lead.
type ToLoad<K, V, S> = (Lease<K, V, S>, Attached<K, V>);

/// A call that warms, on its way: what its threads or lanes share.
pub(crate) struct Warming<K> {
    keys: Vec<K>,
    options: WarmOptions,
    next: AtomicUsize,
    done: AtomicUsize,
    ended: AtomicBool,
    outcomes: Basket<(usize, WarmOutcome)>,
}

impl<K: Hash + Eq + Clone> Warming<K> {
    pub(crate) fn new<B: Borrow<K>>(keys: impl IntoIterator<Item = B>, options: WarmOptions) -> Self {
        let keys: HashSet<K> = keys.into_iter().map(|key| key.borrow().clone()).collect();
        let keys: Vec<K> = keys.into_iter().collect();
        let outcomes = Basket::new(keys.len());
        let (next, done, ended) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
        Self { keys, options, next, done, ended, outcomes }
    }

    /// How many keys are loaded at one time.
    pub(crate) fn concurrency(&self) -> usize {
        self.options.concurrency.clamp(1, self.keys.len().max(1))
    }

    /// The next key to deal with. `None`: there is none, or the call has been ended.
    pub(crate) fn next(&self) -> Option<(usize, &K)> {
        // Relaxed: a wish, and a cursor; the end of all threads orders the rest.
        if self.ended.load(Ordering::Relaxed) {
            return None;
        }
        let nth = self.next.fetch_add(1, Ordering::Relaxed);
        self.keys.get(nth).map(|key| (nth, key))
    }

    /// A key has been dealt with. `None`: what dealt with it has panicked.
    pub(crate) fn settle(&self, nth: usize, outcome: Option<WarmOutcome>) {
        let outcome = outcome.unwrap_or_else(|| WarmOutcome::Failed(LoadError::panicked()));
        // There is a place for each.
        let _ = self.outcomes.put((nth, outcome));
        // Relaxed: a figure, and a wish.
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        let progress = WarmProgress { done, total: self.keys.len() };
        let told = self.options.progress.as_ref().map(|tell| caught(|| tell(progress)));
        if told.is_some_and(|told| told.unwrap_or(ControlFlow::Break(())).is_break()) {
            self.ended.store(true, Ordering::Relaxed);
        }
    }

    /// The call for one key, of one who waits in this way.
    pub(crate) fn call<'a, V, S>(
        &self,
        cache: &'a Cache<K, V, S>,
        key: &'a K,
        waits: Waits,
    ) -> CallFor<'a, K, V, S>
    where
        K: Send + Sync + 'static,
        V: Clone + Send + Sync + 'static,
        S: BuildHasher + Send + Sync + 'static,
    {
        let attached = Attached::of(&cache.core, waits);
        let mut terms = Terms { takes_ladder: false, ..cache.patient(Shares::All) };
        terms.demand.waits = waits;
        terms.attach(attached.as_ref().map(|loader| loader.background(&cache.core)));
        terms.demand.accept = Some(Accept { max_stale: Some(Duration::ZERO), ..Accept::default() });
        (Call::new(&cache.core, key, terms), attached)
    }

    /// What is left to do for a key after its look-up: a load, or nothing.
    pub(crate) fn turn<V, S>(
        &self,
        turn: Result<Turn<K, V, S>, LoadError>,
        attached: Option<Attached<K, V>>,
    ) -> Result<ToLoad<K, V, S>, WarmOutcome> {
        Err(WarmOutcome::of(match (turn, attached) {
            (Ok(Turn::Served(value, how, lease)), _) => {
                // Whoever warms has come to load, not to be chosen by a die.
                drop(lease);
                Ok((value, how))
            }
            (Ok(Turn::Lead(lease)), Some(loader)) => {
                lease.flight().set_spread(self.options.spread);
                return Ok((lease, loader));
            }
            (Ok(Turn::Lead(_)), None) => Err(LoadError::no_loader()),
            (Err(error), _) => Err(error),
        }))
    }

    pub(crate) fn report(self) -> WarmReport<K> {
        let mut all: Vec<WarmOutcome> = self.keys.iter().map(|_| WarmOutcome::Skipped).collect();
        while let Some((nth, outcome)) = self.outcomes.take() {
            all[nth] = outcome;
        }
        WarmReport { outcomes: self.keys.into_iter().zip(all).collect() }
    }
}

impl<K, V, S> Cache<K, V, S>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    /// Loads by the attached loader what of these keys is not fresh, several at a time, and returns when all are dealt with.
    /// Others that want one of them meanwhile join its load, as ever.
    ///
    /// Its loads count towards [`max_concurrent_loads`](crate::CacheBuilder::max_concurrent_loads) and heed a back-off. Without
    /// a loader every key that is not fresh fails as [`NotCached`](LoadErrorKind::NotCached). A loader's panic is caught and
    /// counted, and the key has [failed](WarmOutcome::Failed).
    ///
    /// # Panics
    /// In debug builds, if the thread holds a [`Pinned`](crate::Pinned).
    ///
    /// # Blocking
    /// Until all loads have ended, up to their leases and the `wait_timeout` for those of others.
    pub fn warm<B: Borrow<K>>(
        &self,
        keys: impl IntoIterator<Item = B>,
        options: WarmOptions,
    ) -> WarmReport<K> {
        refuse_under_pin();
        let (warming, behalf) = (Warming::new(keys, options), Behalf::here());
        crew(warming.concurrency(), || {
            // Whoever wants the load that this call is in waits for what its threads do, too.
            let _loading = behalf.enter();
            while let Some((nth, key)) = warming.next() {
                warming.settle(nth, caught(|| self.warm_one(key, &warming)));
            }
        });
        warming.report()
    }

    /// Loads one key that is not fresh.
    fn warm_one(&self, key: &K, warming: &Warming<K>) -> WarmOutcome {
        let (mut call, attached) = warming.call(self, key, Waits::AsThread);
        match warming.turn(self.obtain(&mut call), attached) {
            Ok((lease, loader)) => WarmOutcome::of(loader.load_here(lease, Ttl::default(), || key.clone())),
            Err(outcome) => outcome,
        }
    }
}
