//! The numbers that show what is going on, counted so that a hit writes to no line that another thread uses.
//!
//! Each running thread has a stripe of its own, found by its number; it alone writes there, with a load and a
//! store. Only threads without a number share one, with real atomic additions.
//!
//! Once somebody has asked for the hottest keys, each stripe notes one access of [`GAP`] about: the next one is due when the
//! count of hits has come so far, by gaps that are drawn at random, so that no order of the accesses meets them. Until then that
//! count is out of reach, and there is nothing but the comparison.

mod hottest;
#[cfg(all(test, loom))]
mod models;

pub(crate) use hottest::Hot;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::hash::BuildHasher;
use std::sync::OnceLock;

use crate::freshness::Stage;
use crate::hash::DefaultHashBuilder;
use crate::primitive::Padded;
use crate::primitive::epoch::number;
use crate::primitive::plain::{AtomicU64, Ordering, fence};
use crate::primitive::thread::NUMBERED;
use hottest::Hottest;

/// What is counted.
#[derive(Clone, Copy)]
pub(crate) enum Count {
    Hits,
    StaleHits,
    GraceHits,
    Misses,
    Loads,
    LoadFailures,
    Joins,
    WaitTimeouts,
    Takeovers,
    Fenced,
    Fallbacks,
    NegativeHits,
    EarlyRefreshes,
    RefusedRefreshes,
    BreakerOpenings,
    LoaderPanics,
    ListenerPanics,
    Oversized,
    RemovedExpired,
    RemovedExplicit,
    RemovedReplaced,
    RemovedSize,
}

/// Why a value has left the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RemovalCause {
    /// It was past its hard deadline, or had been idle for too long, whatever took it out.
    Expired,
    /// It was removed by a call: `remove`, `invalidate`, `invalidate_all`, `retain`, `compute`; or its loader said that the
    /// source has no such key.
    Explicit,
    /// Another value took its place, or a load brought one that is not stored.
    Replaced,
    /// The cache was full.
    Size,
}

impl Count {
    #[inline(always)]
    pub(crate) fn of_hit(stage: Stage) -> Self {
        if stage == Stage::Fresh { Self::Hits } else { Self::StaleHits }
    }

    pub(crate) fn of_removal(cause: RemovalCause) -> Self {
        match cause {
            RemovalCause::Expired => Self::RemovedExpired,
            RemovalCause::Explicit => Self::RemovedExplicit,
            RemovalCause::Replaced => Self::RemovedReplaced,
            RemovalCause::Size => Self::RemovedSize,
        }
    }
}

const COUNTS: usize = Count::RemovedSize as usize + 1;

/// One access of so many is noted, where the hottest keys are asked for.
pub(crate) const GAP: u64 = 128;

/// No access is noted.
const NEVER: u64 = u64::MAX;

/// The counts of one thread, or of those that have no number.
#[repr(C)]
struct Stripe {
    /// The count of hits with which the next access is noted.
    due: AtomicU64,
    /// Seeds for the gaps.
    dice: AtomicU64,
    counts: [AtomicU64; COUNTS],
}

const _: () =
    assert!(Count::Hits as usize == 0, "a hit finds its count and when one is noted in one cache line");

impl Default for Stripe {
    fn default() -> Self {
        Self {
            due: AtomicU64::new(NEVER),
            dice: AtomicU64::new(DefaultHashBuilder::new().hash_one(0)),
            counts: Default::default(),
        }
    }
}

impl Stripe {
    fn count(&self, what: Count) -> &AtomicU64 {
        &self.counts[what as usize]
    }

    /// How far it is from one access that is noted to the next: [`GAP`] on average.
    fn gap(&self) -> u64 {
        // Relaxed: each number of the sequence is a seed of its own; threads that share it may draw the same.
        let seed = self.dice.load(Ordering::Relaxed);
        self.dice.store(seed.wrapping_add(1), Ordering::Relaxed);
        SmallRng::seed_from_u64(seed).random_range(1..2 * GAP)
    }
}

/// The counters of one cache.
pub(crate) struct Counters {
    own: Box<[OnceLock<Box<Padded<Stripe>>>; NUMBERED]>,
    shared: Padded<Stripe>,
    /// Once somebody has asked for them.
    hottest: OnceLock<Box<Hottest>>,
}

impl Counters {
    pub(crate) fn new() -> Self {
        Self {
            own: Box::new([const { OnceLock::new() }; NUMBERED]),
            shared: Padded::default(),
            hottest: OnceLock::new(),
        }
    }

    /// Counts one.
    pub(crate) fn add(&self, what: Count) {
        self.add_on(number(), what);
    }

    /// Counts one on the thread with this number, which must be the caller's.
    #[inline(always)]
    pub(crate) fn add_on(&self, number: usize, what: Count) {
        self.counted(number, what);
    }

    /// Counts one, and gives the count and where it is.
    #[inline(always)]
    fn counted(&self, number: usize, what: Count) -> (&Stripe, u64) {
        let Some(own) = self.own.get(number) else {
            // Relaxed: a statistic; nothing is published by it.
            let before = self.shared.0.count(what).fetch_add(1, Ordering::Relaxed);
            return (&self.shared.0, before.wrapping_add(1));
        };
        let stripe = match own.get() {
            Some(stripe) => &stripe.0,
            None => self.begin(own),
        };
        let count = stripe.count(what);
        // Relaxed: this thread is the only writer while it has the number.
        let now = count.load(Ordering::Relaxed).wrapping_add(1);
        count.store(now, Ordering::Relaxed);
        (stripe, now)
    }

    /// The first count of a number.
    #[cold]
    fn begin<'a>(&'a self, own: &'a OnceLock<Box<Padded<Stripe>>>) -> &'a Stripe {
        // The number has one owner, so nobody else initializes this stripe at the same time.
        let stripe = &own.get_or_init(Box::default).0;
        // SeqCst: the stripe is there before the look at `hottest`; pairs with the fence in `note_hottest`: either that
        // finds the stripe, or this finds that accesses are noted.
        fence(Ordering::SeqCst);
        if self.hottest.get().is_some() {
            // Relaxed: when an access is noted; nothing is published by it.
            stripe.due.store(0, Ordering::Relaxed);
        }
        stripe
    }

    /// Counts an access of a key: a hit, or a miss of a call that may load. Notes its hash, if that is due.
    #[inline(always)]
    pub(crate) fn access_on(&self, number: usize, what: Count, hash: impl FnOnce() -> u64) {
        let (stripe, count) = self.counted(number, what);
        // Relaxed: this thread is the only writer while it has the number, but for whoever asks for the hottest keys first.
        // Threads that share a stripe may note one access more or less.
        let due = stripe.due.load(Ordering::Relaxed);
        if matches!(what, Count::Hits) {
            if due <= count {
                self.note(stripe, count, hash());
            }
        } else if due != NEVER {
            // As far on as by a hit.
            let due = due.saturating_sub(1);
            stripe.due.store(due, Ordering::Relaxed);
            let hits = stripe.count(Count::Hits).load(Ordering::Relaxed);
            if due <= hits {
                self.note(stripe, hits, hash());
            }
        }
    }

    /// Notes a hash, and draws when the next is due.
    #[cold]
    #[inline(never)]
    fn note(&self, stripe: &Stripe, hits: u64, hash: u64) {
        // Relaxed: as in `access_on`.
        stripe.due.store(hits.saturating_add(stripe.gap()), Ordering::Relaxed);
        if let Some(hottest) = self.hottest.get() {
            hottest.note(hash);
        }
    }

    /// The hashes that were met most often of late, the hottest first. They are noted from the first call on.
    pub(crate) fn hottest(&self) -> Vec<Hot> {
        self.note_hottest().list()
    }

    /// Sees to it that accesses are noted.
    pub(crate) fn note_hottest(&self) -> &Hottest {
        if let Some(hottest) = self.hottest.get() {
            return hottest;
        }
        let hottest = self.hottest.get_or_init(|| Box::new(Hottest::new()));
        // SeqCst: it is there before the look at the stripes; pairs with the fence in `begin`.
        fence(Ordering::SeqCst);
        for stripe in self.stripes() {
            // Relaxed: as in `begin`.
            stripe.due.store(0, Ordering::Relaxed);
        }
        hottest
    }

    fn stripes(&self) -> impl Iterator<Item = &Stripe> {
        self.own.iter().filter_map(OnceLock::get).map(|stripe| &stripe.0).chain([&self.shared.0])
    }

    fn sum(&self, what: Count) -> u64 {
        // Relaxed: a statistic.
        self.stripes().map(|stripe| stripe.count(what).load(Ordering::Relaxed)).sum()
    }

    /// All counts; what is not a count is left at zero.
    pub(crate) fn stats(&self) -> Stats {
        Stats {
            hits: self.sum(Count::Hits),
            stale_hits: self.sum(Count::StaleHits),
            grace_hits: self.sum(Count::GraceHits),
            misses: self.sum(Count::Misses),
            loads: self.sum(Count::Loads),
            load_failures: self.sum(Count::LoadFailures),
            joins: self.sum(Count::Joins),
            wait_timeouts: self.sum(Count::WaitTimeouts),
            takeovers: self.sum(Count::Takeovers),
            fenced: self.sum(Count::Fenced),
            fallbacks: self.sum(Count::Fallbacks),
            negative_hits: self.sum(Count::NegativeHits),
            early_refreshes: self.sum(Count::EarlyRefreshes),
            refused_refreshes: self.sum(Count::RefusedRefreshes),
            breaker_openings: self.sum(Count::BreakerOpenings),
            loader_panics: self.sum(Count::LoaderPanics),
            listener_panics: self.sum(Count::ListenerPanics),
            oversized: self.sum(Count::Oversized),
            evictions: Evictions {
                expired: self.sum(Count::RemovedExpired),
                explicit: self.sum(Count::RemovedExplicit),
                replaced: self.sum(Count::RemovedReplaced),
                size: self.sum(Count::RemovedSize),
            },
            ..Stats::default()
        }
    }
}

/// What a cache has done since it was built, and what it is doing now.
///
/// Each counter is exact once the threads that count have stopped; while they run, a snapshot may mix moments.
///
/// A call counts once, by what it finds when it first looks: `hits`, `stale_hits`, `misses` and `negative_hits` add up to the
/// calls (`load_many`, `get_many` and `warm` make one for each key that they come to). The other counters tell what came of it.
/// `peek`, `contains_key`, `iter`, `refresh` and the writes but `compute` are no such calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Calls that found a fresh value: they were answered with it at once, but for one that is chosen to refresh it early by a
    /// load of its own.
    pub hits: u64,
    /// Calls that found a stale value: they were answered with it at once, but for one that is chosen to refresh it by a load
    /// of its own.
    pub stale_hits: u64,
    /// Calls that were answered with a value in grace, after a failed load or a wait that ended.
    pub grace_hits: u64,
    /// Calls that found nothing they could be answered with at once: they returned nothing, loaded, or waited. A `compute`
    /// always leads, and counts here.
    pub misses: u64,
    /// Loads begun, refreshes and `compute` included.
    pub loads: u64,
    /// Loads that ended with an error or a panic.
    pub load_failures: u64,
    /// Calls that waited for somebody else's load. A call that waits twice counts twice.
    pub joins: u64,
    /// Waits that ended at the caller's own deadline.
    pub wait_timeouts: u64,
    /// Loads begun in place of one whose lease had ended, or that still waited on an executor's queue.
    pub takeovers: u64,
    /// Results that were refused because the entry had been written, removed or taken over meanwhile.
    pub fenced: u64,
    /// Calls that were answered by the `fallback`.
    pub fallbacks: u64,
    /// Calls that found an absence which was remembered, and were told of it at once.
    pub negative_hits: u64,
    /// Loads of fresh values that were begun before they went stale.
    pub early_refreshes: u64,
    /// Background refreshes that no executor took.
    pub refused_refreshes: u64,
    /// How often the [breaker](crate::CacheBuilder::breaker) has opened, having been closed.
    pub breaker_openings: u64,
    /// Loads that ended with a panic: of the loader, or of what it led to (the `Expiry`, the weigher, a value's `Clone`).
    pub loader_panics: u64,
    /// Panics of the eviction listener, caught.
    pub listener_panics: u64,
    /// Values that were not stored because they weigh more than the whole capacity.
    pub oversized: u64,
    /// Values that have left the cache.
    pub evictions: Evictions,
    /// Panics of user values' destructors, caught while memory was reclaimed: of all caches of the process.
    pub drop_panics: u64,
    /// Bytes of the cache's own allocations that have been removed and wait until nobody can be reading them: entries with
    /// their keys and values, without what those own on the heap. Of all caches of the process, as reclamation is common.
    pub unreclaimed: u64,
    /// Whether the breaker is open now: no load has succeeded since it opened.
    pub breaker_open: bool,
    /// Loads under way now.
    pub in_flight: u64,
    /// Callers that wait for a load now.
    pub waiters: u64,
    /// Background refreshes that wait on the cache's own queue now.
    pub refresh_queue_depth: u64,
}

/// How many values have left a cache, by [`RemovalCause`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Evictions {
    /// They had expired.
    pub expired: u64,
    /// A call removed them.
    pub explicit: u64,
    /// Another value took their place.
    pub replaced: u64,
    /// The cache was full.
    pub size: u64,
}

/// A load under way, see [`Cache::in_flight`](crate::Cache::in_flight).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InFlight<K> {
    /// What is being loaded.
    pub key: K,
    /// How long ago the load was claimed.
    pub age: std::time::Duration,
    /// How many callers wait for it, without the one who leads.
    pub waiters: usize,
}

/// A key that is accessed much, see [`Cache::hot_keys`](crate::Cache::hot_keys).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HotKey<K> {
    /// The key.
    pub key: K,
    /// How often it was accessed of late, about: hits, and calls that may load and found nothing.
    pub hits: u64,
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn counts_of_all_threads_add_up() {
        let counters = Counters::new();
        std::thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| (0..10_000).for_each(|_| counters.add(Count::Hits)));
            }
        });
        counters.add(Count::Misses);
        let stats = counters.stats();
        assert_eq!((stats.hits, stats.misses, stats.loads), (80_000, 1, 0));
    }

    #[test]
    fn nothing_is_kept_before_somebody_asks() {
        let counters = Counters::new();
        (0..10_000).for_each(|_| counters.access_on(number(), Count::Hits, || unreachable!("not asked for")));
        assert!(counters.hottest.get().is_none());
        assert_eq!(counters.hottest(), []);
        (0..10_000).for_each(|_| counters.access_on(number(), Count::Hits, || 7));
        assert_eq!(counters.hottest().len(), 1);
        assert_eq!(counters.stats().hits, 20_000);
    }

    #[test]
    fn threads_without_a_number_are_sampled_too() {
        let (counters, each) = (Counters::new(), 100 * GAP);
        assert_eq!(counters.hottest(), []);
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    for _ in 0..each {
                        counters.access_on(NUMBERED, Count::Hits, || 7);
                        counters.access_on(NUMBERED, Count::StaleHits, || 7);
                    }
                });
            }
        });
        let (stats, noted) = (counters.stats(), counters.hottest()[0].count);
        assert_eq!((stats.hits, stats.stale_hits), (3 * each, 3 * each));
        // What is not a hit may be lost, where threads meet.
        assert!((100..2_400).contains(&noted), "{noted} of 600 about");
    }
}
