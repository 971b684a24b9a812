//! Heartbeat: steady load on one hot key while its answer expires again and again.

use crate::database::Database;
use crate::latency::percentile;
use crate::progress::Progress;
use crate::source::{Query, Source, most_at_once};
use crate::strategy::{Kind, Strategy};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const REGION: u32 = 1;
/// All threads together, however many there are.
pub(crate) const REQUESTS_PER_SECOND: u32 = 2000;

/// The threads start this long before the first request, so that their start is not part of it.
const LEAD_IN: Duration = Duration::from_millis(20);

/// One request: when it was due, counted from the start, and how long after that it was answered.
pub(crate) struct Sample {
    pub(crate) due: Duration,
    pub(crate) latency: Duration,
}

pub(crate) struct Heartbeat {
    pub(crate) kind: Kind,
    pub(crate) start: Instant,
    pub(crate) samples: Vec<Sample>,
    /// Every query of the key, in the order they began; the one that warmed the cache is not among them.
    pub(crate) queries: Vec<Query>,
    pub(crate) most_at_once: usize,
    pub(crate) p50: Duration,
    pub(crate) p99: Duration,
    pub(crate) max: Duration,
    pub(crate) stale: u64,
}

pub(crate) fn run(
    kind: Kind,
    database: &Arc<Database>,
    threads: usize,
    length: Duration,
    progress: &Progress,
) -> Result<Heartbeat, crate::Error> {
    let source = Source::new(database);
    let strategy = kind.build(&source);
    strategy.get(REGION)?;
    let warming = source.settled_log()?.len();

    let pace = Duration::from_secs(1) * threads as u32 / REQUESTS_PER_SECOND;
    let start = Instant::now() + LEAD_IN;
    let samples = thread::scope(|scope| {
        let mut readers = Vec::with_capacity(threads);
        for index in 0..threads {
            let first = start + pace * index as u32 / threads as u32;
            let strategy = &*strategy;
            let reader = move || read(strategy, start, first, start + length, pace);
            readers.push(thread::Builder::new().spawn_scoped(scope, reader)?);
        }
        progress.wait_until(start + length);
        let mut samples = Vec::new();
        for reader in readers {
            samples.extend(reader.join().map_err(|_| "a reader panicked")??);
        }
        Ok::<_, crate::Error>(samples)
    })?;

    let stale = strategy.stale();
    drop(strategy);
    let queries = source.settled_log()?.split_off(warming);
    let mut latencies: Vec<_> = samples.iter().map(|sample| sample.latency).collect();
    latencies.sort_unstable();
    Ok(Heartbeat {
        kind,
        start,
        most_at_once: most_at_once(&queries),
        p50: percentile(&latencies, 50.0),
        p99: percentile(&latencies, 99.0),
        max: percentile(&latencies, 100.0),
        samples,
        queries,
        stale,
    })
}

/// Asks on a schedule that does not wait for the answers: a request that falls due while its thread is still
/// blocked counts from the moment it was due, as it would for a user. A thread that slept too long moves its
/// schedule instead, for that lateness is the operating system's and not the cache's.
fn read(
    strategy: &dyn Strategy,
    start: Instant,
    first: Instant,
    end: Instant,
    pace: Duration,
) -> Result<Vec<Sample>, crate::Error> {
    let mut samples = Vec::new();
    let mut due = first;
    while due < end {
        let early = due.saturating_duration_since(Instant::now());
        if !early.is_zero() {
            thread::sleep(early);
            due = Instant::now();
        }
        strategy.get(REGION)?;
        samples.push(Sample { due: due - start, latency: due.elapsed() });
        due += pace;
    }
    Ok(samples)
}
