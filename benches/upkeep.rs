//! What the slowest call takes after a million entries have expired at once, and nobody has done any upkeep.
//!
//! ```text
//! cargo bench --bench upkeep               everything, under a minute
//! cargo bench --bench upkeep -- --quick    a hundred thousand entries
//! ```
//!
//! A cache is filled, its clock is moved past the deadline of all, and one thread makes calls of one kind, each of which is
//! timed by itself. Every call does a part of the upkeep: a read frees what it finds expired, a write sweeps a few buckets,
//! makes room where there is a bound, and frees some of what was taken out before. The question is how large a part.
//!
//! A round is that from the start, in a new cache. *p50* to *p99.9* are of the calls of all rounds, and of the slowest calls of
//! the rounds *least* and *median* are given: a round in which something else had the core for a moment has a slow call of its
//! own. The last line is what all the upkeep takes when it is done in one go, by `run_pending_tasks`.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a bench drives real threads by a real clock"
)]
#![allow(clippy::print_stdout, reason = "the table is its output")]

use quell::{Cache, ManualClock};
use std::time::{Duration, Instant};

const TTL: Duration = Duration::from_secs(60);
const ROUNDS: usize = 9;

type Subject = Cache<u64, u64>;

/// A full cache whose entries have all expired, but for a thousand.
fn expired(entries: u64, bounded: bool) -> Subject {
    let clock = ManualClock::new();
    let builder = Cache::builder().time_to_live(TTL).clock(clock.clone());
    let cache = if bounded { builder.max_capacity(entries) } else { builder }.build();
    (0..entries).for_each(|key| cache.insert(key, key));
    (0..1_000).for_each(|key| cache.insert_with_ttl(key, key, 2 * TTL));
    clock.advance(TTL);
    cache
}

/// The `nth` call of a kind, of a cache that had so many entries.
type Call = fn(&Subject, u64, u64);

const CALLS: [(&str, Call); 4] = [
    ("get, expired", |cache, entries, nth| {
        std::hint::black_box(cache.get(&(1_000 + nth * 7_919 % (entries - 1_000))));
    }),
    ("get, fresh", |cache, _, nth| {
        std::hint::black_box(cache.get(&(nth % 1_000)));
    }),
    ("get_with, a miss", |cache, entries, nth| {
        std::hint::black_box(cache.get_with(&(entries + nth), || nth));
    }),
    ("insert", |cache, entries, nth| cache.insert(entries + nth, nth)),
];

fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1_000.0
}

fn measure(name: &str, entries: u64, bounded: bool, call: Call) {
    let calls = entries / 50;
    let mut all = Vec::with_capacity(ROUNDS * calls as usize);
    let mut slowest = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let cache = expired(entries, bounded);
        let mut most = 0;
        for nth in 0..calls {
            let start = Instant::now();
            call(&cache, entries, nth);
            let took = start.elapsed().as_nanos() as u64;
            most = most.max(took);
            all.push(took);
        }
        slowest.push(most);
    }
    all.sort_unstable();
    slowest.sort_unstable();
    let at = |part: f64| micros(all[((all.len() - 1) as f64 * part) as usize]);
    println!(
        "{name:<18} {:<9} {:>8.2} {:>8.2} {:>8.2} {:>9.1} {:>9.1}",
        if bounded { "bounded" } else { "unbounded" },
        at(0.5),
        at(0.99),
        at(0.999),
        micros(slowest[0]),
        micros(slowest[ROUNDS / 2]),
    );
}

fn main() {
    let entries = if std::env::args().any(|arg| arg == "--quick") { 100_000 } else { 1_000_000 };
    println!("microseconds a call, {entries} entries have expired\n");
    println!("{:<28} {:>8} {:>8} {:>8} {:>19}", "", "p50", "p99", "p99.9", "slowest, of rounds");
    println!("{:<28} {:>8} {:>8} {:>8} {:>9} {:>9}", "", "", "", "", "least", "median");
    for bounded in [false, true] {
        for (name, call) in CALLS {
            measure(name, entries, bounded, call);
        }
        let cache = expired(entries, bounded);
        let start = Instant::now();
        cache.run_pending_tasks();
        let took = start.elapsed().as_nanos() as u64;
        println!(
            "{:<18} {:<9} {:>46.0}",
            "all in one go",
            if bounded { "bounded" } else { "unbounded" },
            micros(took)
        );
    }
}
