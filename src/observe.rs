//! The numbers that show what is going on, counted so that a hit writes to no line that another thread uses.
//!
//! Each running thread has a stripe of its own, found by its number; it alone writes there, with a load and a
//! store. Only threads without a number share one, with real atomic additions.

use std::sync::OnceLock;

use crate::freshness::Stage;
use crate::primitive::Padded;
use crate::primitive::epoch::number;
use crate::primitive::plain::{AtomicU64, Ordering};
use crate::primitive::thread::NUMBERED;

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

type Stripe = Padded<[AtomicU64; COUNTS]>;

/// The counters of one cache.
pub(crate) struct Counters {
    own: Box<[OnceLock<Box<Stripe>>; NUMBERED]>,
    shared: Stripe,
}

impl Counters {
    pub(crate) fn new() -> Self {
        Self { own: Box::new([const { OnceLock::new() }; NUMBERED]), shared: Stripe::default() }
    }

    /// Counts one.
    pub(crate) fn add(&self, what: Count) {
        self.add_on(number(), what);
    }

    /// Counts one on the thread with this number, which must be the caller's.
    #[inline(always)]
    pub(crate) fn add_on(&self, number: usize, what: Count) {
        let Some(own) = self.own.get(number) else {
            // Relaxed: a statistic; nothing is published by it.
            self.shared.0[what as usize].fetch_add(1, Ordering::Relaxed);
            return;
        };
        // The number has one owner, so nobody else initializes this stripe at the same time.
        let stripe = own.get_or_init(Box::default);
        let count = &stripe.0[what as usize];
        // Relaxed: this thread is the only writer while it has the number.
        count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    fn sum(&self, what: Count) -> u64 {
        let stripes = self.own.iter().filter_map(OnceLock::get).map(Box::as_ref);
        // Relaxed: a statistic.
        stripes.chain([&self.shared]).map(|s| s.0[what as usize].load(Ordering::Relaxed)).sum()
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
/// calls (`load_many` and `warm` make one for each key that they come to). The other counters tell what came of it. `peek`, `contains_key`,
/// `iter`, `refresh` and the writes but `compute` are no such calls.
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
}
