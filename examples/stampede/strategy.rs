//! The four ways to keep the report of a region at hand: three that people write, and quell.

use crate::source::{Report, Source};
use ahash::RandomState;
use dashmap::DashMap;
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an answer is good for, and from when on quell refreshes it behind the scenes.
pub(crate) const TTL: Duration = Duration::from_millis(2000);
pub(crate) const SOFT_TTL: Duration = Duration::from_millis(1500);

/// One way to answer: from memory while the answer is fresh, from the source otherwise.
pub(crate) trait Strategy: Sync {
    fn get(&self, region: u32) -> Result<Arc<Report>, crate::Error>;

    /// Answers served past their soft TTL.
    fn stale(&self) -> u64 {
        0
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Naive,
    Mutex,
    Dashmap,
    Quell,
}

impl Kind {
    pub(crate) const ALL: [Kind; 4] = [Kind::Naive, Kind::Mutex, Kind::Dashmap, Kind::Quell];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Naive => "naive",
            Kind::Mutex => "mutex",
            Kind::Dashmap => "dashmap",
            Kind::Quell => "quell",
        }
    }

    pub(crate) fn summary(self) -> &'static str {
        match self {
            Kind::Naive => "RwLock<HashMap>, cache-aside: look up, query on a miss, store; no coordination",
            Kind::Mutex => {
                "one Mutex<HashMap>, held while the query runs: one query, everybody waits, for any key"
            }
            Kind::Dashmap => "DashMap, cache-aside: faster look-ups, the same stampede",
            Kind::Quell => {
                "one flight per key; past the soft TTL the old answer is served while one query refreshes it"
            }
        }
    }

    /// An empty cache in front of `source`.
    pub(crate) fn build(self, source: &Arc<Source>) -> Box<dyn Strategy> {
        let source = Arc::clone(source);
        match self {
            Kind::Naive => Box::new(Naive { source, reports: RwLock::default() }),
            Kind::Mutex => Box::new(Global { source, reports: Mutex::default() }),
            Kind::Dashmap => Box::new(Sharded { source, reports: DashMap::default() }),
            Kind::Quell => Box::new(Quell::new(source)),
        }
    }
}

struct Entry {
    report: Arc<Report>,
    loaded: Instant,
}

impl Entry {
    fn new(report: &Arc<Report>) -> Self {
        Entry { report: Arc::clone(report), loaded: Instant::now() }
    }

    fn fresh(&self) -> Option<Arc<Report>> {
        (self.loaded.elapsed() < TTL).then(|| Arc::clone(&self.report))
    }
}

/// Cache-aside: the lock is held for the look-up and for the store, and between them everybody queries.
struct Naive {
    source: Arc<Source>,
    reports: RwLock<HashMap<u32, Entry, RandomState>>,
}

impl Strategy for Naive {
    fn get(&self, region: u32) -> Result<Arc<Report>, crate::Error> {
        let cached = self.reports.read().get(&region).and_then(Entry::fresh);
        if let Some(report) = cached {
            return Ok(report);
        }
        let report = self.source.load(region)?;
        self.reports.write().insert(region, Entry::new(&report));
        Ok(report)
    }
}

/// The usual first fix: the lock is held across the query, so that the look-ups of every key wait for it.
struct Global {
    source: Arc<Source>,
    reports: Mutex<HashMap<u32, Entry, RandomState>>,
}

impl Strategy for Global {
    fn get(&self, region: u32) -> Result<Arc<Report>, crate::Error> {
        let mut reports = self.reports.lock();
        if let Some(report) = reports.get(&region).and_then(Entry::fresh) {
            return Ok(report);
        }
        let report = self.source.load(region)?;
        reports.insert(region, Entry::new(&report));
        Ok(report)
    }
}

/// Cache-aside over a concurrent map: no shard is locked while the query runs.
struct Sharded {
    source: Arc<Source>,
    reports: DashMap<u32, Entry, RandomState>,
}

impl Strategy for Sharded {
    fn get(&self, region: u32) -> Result<Arc<Report>, crate::Error> {
        let cached = self.reports.get(&region).and_then(|entry| entry.fresh());
        if let Some(report) = cached {
            return Ok(report);
        }
        let report = self.source.load(region)?;
        self.reports.insert(region, Entry::new(&report));
        Ok(report)
    }
}

struct Quell {
    cache: quell::Cache<u32, Arc<Report>>,
}

impl Quell {
    fn new(source: Arc<Source>) -> Self {
        let cache = quell::Cache::builder()
            .name("best quarters")
            .soft_ttl(SOFT_TTL)
            .time_to_live(TTL)
            .loader(move |region: &u32| -> Result<Arc<Report>, rusqlite::Error> { source.load(*region) })
            .build();
        Quell { cache }
    }
}

impl Strategy for Quell {
    fn get(&self, region: u32) -> Result<Arc<Report>, crate::Error> {
        Ok(self.cache.get_or_load(&region)?)
    }

    fn stale(&self) -> u64 {
        self.cache.stats().stale_hits
    }
}
