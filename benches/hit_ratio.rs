//! How many requests a full cache answers: the hit ratio in per cent, over recorded traces or generated
//! workloads, each at four capacities.
//!
//! ```text
//! cargo bench --bench hit_ratio                                    generated workloads, under a minute
//! cargo bench --bench hit_ratio -- DIRECTORY                       every trace of a directory, some minutes
//! cargo bench --bench hit_ratio -- --fast                          without workloads of two million requests or more
//! cargo bench --bench hit_ratio -- --only OLTP,loop                these workloads
//! cargo bench --bench hit_ratio -- --caches quell,quick_cache,OPT  these caches
//! cargo bench --bench hit_ratio -- --csv                           the cells as CSV
//! cargo bench --bench hit_ratio -- --threads 1                     so many cells at a time; else one a processor
//! ```
//!
//! The directory may also stand in the environment variable `QUELL_TRACES`. A trace is a file `NAME.u64.zst`: the
//! ids of the keys asked for, one little-endian `u64` a request, compressed by zstd with a window up to 2^27.
//!
//! # What is measured
//!
//! One thread asks for each key in turn and inserts it on a miss. Capacities are in entries: 0.1, 1, 5 and 20 % of the
//! distinct keys where there are at least 30,000 of them, else 1, 5, 20 and 50 %, and never under 8. OPT is the
//! limit: it knows the future and keeps what is wanted next (Belady); LRU is a plain list. The rest are the real
//! caches with their defaults, nothing simulated; foyer has one shard instead of eight, to its advantage. Keys are
//! the ids scattered by splitmix64.
//!
//! moka and mini-moka put the policy's work off, and evict only when they come to it: by their own rule after 64
//! reads or writes, or after a while. In a cache of a few hundred entries that is a large part of its content: so
//! both get their upkeep done whenever it may have fallen behind by 5 % of the capacity, on top of their own rule.
//! Nobody who uses them does that; it is to their advantage. No other cache gets upkeep, quell included.
//!
//! # How to read it
//!
//! Progress goes to the standard error. After the cells come five lines for quell:
//!
//! - `mean48`: the mean over all cells (48 of them with twelve traces).
//! - `small9`: the mean over the cells of workloads of less than two million requests (nine of those twelve).
//! - `worst_vs_best`: the smallest difference between quell and the best of the rivals in the same cell.
//! - `worst_regret`: the largest difference between OPT and quell.
//! - `hits_that_write`: the share, 0 to 1, of the hits that write to the entry, as the mean over the cells of 300
//!   entries and more.
//!
//! A line whose caches were not asked for is left out. Over generated workloads the lines mean the same, and
//! compare with nothing but themselves.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a bench drives real threads by a real clock"
)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the table and the progress are its output")]

mod common;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use ahash::RandomState;
use common::{Arguments, Bounded, CACHES, LRU, Plan, QUELL, Quell, Wanted, Zipf, splitmix64};

const OPT: &str = "OPT";
/// From so many requests on a workload is not small.
const LARGE: usize = 2_000_000;
/// From so many entries on a cell counts for `hits_that_write`.
const ENTRIES_FOR_WRITES: u64 = 300;

/// Whether a hit of `key`, made now, would write to its entry. It is asked before each request, so that the hit itself
/// counts nothing.
fn writes_on_hit(cache: &Quell, key: u64) -> bool {
    cache.hit_would_write(&key)
}

/// quell, with the hits counted that write.
struct Witnessed {
    cache: Quell,
    writes: AtomicU64,
    silent: AtomicU64,
}

impl Witnessed {
    fn new(plan: Plan) -> Self {
        Self { cache: common::quell(plan), writes: AtomicU64::new(0), silent: AtomicU64::new(0) }
    }

    fn share_that_writes(&self) -> Option<f64> {
        let writes = self.writes.load(Ordering::Relaxed) as f64;
        let told = writes + self.silent.load(Ordering::Relaxed) as f64;
        (told > 0.0).then(|| writes / told)
    }
}

impl Bounded for Witnessed {
    fn get(&self, key: u64) -> Option<u64> {
        let writes = writes_on_hit(&self.cache, key);
        let value = self.cache.get(&key)?;
        let count = if writes { &self.writes } else { &self.silent };
        count.fetch_add(1, Ordering::Relaxed);
        Some(value)
    }

    fn insert(&self, key: u64, value: u64) {
        self.cache.insert(key, value);
    }

    fn len(&self) -> Option<u64> {
        Bounded::len(&self.cache)
    }
}

struct Workload {
    name: String,
    keys: Vec<u64>,
    /// For each request the next one of the same key; [`Opt::NEVER`] after the last.
    next: Vec<u32>,
    distinct: usize,
}

impl Workload {
    fn new(name: &str, ids: impl Iterator<Item = u64>) -> Self {
        let keys: Vec<u64> = ids.map(splitmix64).collect();
        let mut latest: HashMap<u64, u32, RandomState> = HashMap::default();
        let mut next = vec![Opt::NEVER; keys.len()];
        for (at, &key) in keys.iter().enumerate() {
            let now = u32::try_from(at).expect("fewer than 2^32 requests");
            if let Some(before) = latest.insert(key, now) {
                next[before as usize] = now;
            }
        }
        Self { name: name.to_owned(), distinct: latest.len(), keys, next }
    }

    fn is_small(&self) -> bool {
        self.keys.len() < LARGE
    }

    fn shares(&self) -> [f64; 4] {
        if self.distinct >= 30_000 { [0.001, 0.01, 0.05, 0.2] } else { [0.01, 0.05, 0.2, 0.5] }
    }

    fn entries(&self, share: f64) -> u64 {
        ((self.distinct as f64 * share).round() as u64).max(8)
    }
}

/// The traces of a directory, in the order of their names.
fn traces(directory: &Path, only: &Wanted, fast: bool) -> Vec<Workload> {
    let entries = fs::read_dir(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a readable directory").path()).collect();
    paths.sort();
    let mut traces = Vec::new();
    for path in paths {
        let file_name = path.file_name().unwrap_or_default().to_string_lossy();
        if let Some(name) = file_name.strip_suffix(".u64.zst")
            && only.has(name)
        {
            let bytes = decoded(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            if fast && bytes.len() / 8 >= LARGE {
                continue;
            }
            let (words, rest) = bytes.as_chunks();
            assert!(rest.is_empty(), "{}: not a whole number of requests", path.display());
            traces.push(Workload::new(name, words.iter().map(|&word| u64::from_le_bytes(word))));
        }
    }
    traces
}

fn decoded(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut decoder = zstd::Decoder::new(File::open(path)?)?;
    decoder.window_log_max(27)?;
    let mut bytes = Vec::new();
    decoder.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Workloads that need no file, for want of traces.
fn generated(only: &Wanted) -> Vec<Workload> {
    const REQUESTS: u64 = 1_000_000;
    const KEYS: u32 = 100_000;
    let zipf = |exponent: f64| {
        let (zipf, mut rng) = (Zipf::new(KEYS, exponent), common::rng());
        move || zipf.draw(&mut rng)
    };
    // Ids from here on are no ranks.
    let apart = u64::from(KEYS);
    let mut workloads = Vec::new();
    let mut workload = |name: &str, id: &mut dyn FnMut(u64) -> u64| {
        if only.has(name) {
            workloads.push(Workload::new(name, (0..REQUESTS).map(id)));
        }
    };
    for exponent in [0.7, 0.9, 1.1] {
        let mut rank = zipf(exponent);
        workload(&format!("zipf-{exponent}"), &mut |_| rank());
    }
    // Every 20,000 requests one of 5,000 keys that are never wanted again.
    let mut rank = zipf(0.9);
    workload("zipf-and-scans", &mut |at| if at % 20_000 < 5_000 { apart + at } else { rank() });
    workload("loop", &mut |at| at % 10_000);
    let mut rank = zipf(0.9);
    workload("zipf-and-loop", &mut |at| if at % 2 == 0 { apart + at / 2 % 10_000 } else { rank() });
    // A new set of favourites with every tenth of the run, one in five of them kept.
    let mut rank = zipf(0.9);
    workload("zipf-that-shifts", &mut |at| {
        let (rank, tenth) = (rank(), at / (REQUESTS / 10));
        if rank % 5 == 0 { rank } else { (rank + tenth * 7_919) % u64::from(KEYS) }
    });
    workloads
}

/// The requests to come whose keys are in the cache, as a set of bits; each level has a bit for every word of the
/// level below that is not empty.
struct Opt {
    levels: Vec<Vec<u64>>,
}

impl Opt {
    const NEVER: u32 = u32::MAX;

    fn new(requests: usize) -> Self {
        let mut levels = Vec::new();
        let mut words = requests;
        while levels.is_empty() || words > 1 {
            words = words.div_ceil(64);
            levels.push(vec![0_u64; words]);
        }
        Self { levels }
    }

    /// The hits of a cache that drops what is wanted last, the newcomer included.
    fn hits(next: &[u32], capacity: u64) -> u64 {
        let mut wanted = Self::new(next.len());
        let (mut hits, mut kept) = (0, 0);
        for (now, &next) in next.iter().enumerate() {
            if wanted.remove(now) {
                hits += 1;
                kept -= 1;
            }
            if next != Self::NEVER {
                wanted.insert(next as usize);
                kept += 1;
                if kept > capacity {
                    wanted.remove(wanted.last());
                    kept -= 1;
                }
            }
        }
        hits
    }

    fn insert(&mut self, mut at: usize) {
        for level in &mut self.levels {
            level[at / 64] |= 1 << (at % 64);
            at /= 64;
        }
    }

    fn remove(&mut self, mut at: usize) -> bool {
        if self.levels[0][at / 64] & 1 << (at % 64) == 0 {
            return false;
        }
        for level in &mut self.levels {
            level[at / 64] &= !(1 << (at % 64));
            if level[at / 64] != 0 {
                break;
            }
            at /= 64;
        }
        true
    }

    /// The last of the set, which must not be empty.
    fn last(&self) -> usize {
        self.levels.iter().rev().fold(0, |at, level| at * 64 + level[at].ilog2() as usize)
    }
}

/// One workload at one capacity.
struct Cell<'a> {
    workload: &'a Workload,
    share: f64,
    entries: u64,
}

#[derive(Clone, Copy)]
struct Outcome {
    /// In per cent.
    hit_ratio: f64,
    hits_that_write: Option<f64>,
}

impl Cell<'_> {
    fn run(&self, cache: &str) -> Outcome {
        let Workload { keys, next, .. } = self.workload;
        let plan = Plan::of(self.entries);
        let (hits, hits_that_write) = if cache == OPT {
            (Opt::hits(next, self.entries), None)
        } else if cache == QUELL {
            let cache = Witnessed::new(plan);
            (cache.replay(keys), cache.share_that_writes())
        } else {
            let kind = CACHES.iter().find(|kind| kind.name == cache).expect("a name of the list");
            (self.replay(&*(kind.build)(plan)), None)
        };
        Outcome { hit_ratio: 100.0 * hits as f64 / keys.len() as f64, hits_that_write }
    }

    fn replay(&self, cache: &dyn Bounded) -> u64 {
        let keys = &self.workload.keys;
        if !cache.lags() {
            return cache.replay(keys);
        }
        let behind = (self.entries / 20).max(1);
        let stretches = keys.chunks(usize::try_from(behind).expect("a part of what fits into memory"));
        let hits = stretches.map(|keys| {
            let hits = cache.replay(keys);
            cache.upkeep();
            hits
        });
        hits.sum()
    }
}

/// Runs every cache over every cell, several at a time, the long ones first.
fn run(cells: &[Cell<'_>], caches: &[&'static str], threads: usize) -> Vec<HashMap<&'static str, Outcome>> {
    let pairs = |cell| caches.iter().map(move |&cache| (cell, cache));
    let mut jobs: Vec<(usize, &'static str)> = (0..cells.len()).flat_map(pairs).collect();
    jobs.sort_by_key(|&(cell, _)| std::cmp::Reverse(cells[cell].workload.keys.len()));
    let taken = AtomicUsize::new(0);
    let outcomes = Mutex::new(vec![HashMap::new(); cells.len()]);
    let work = || {
        while let Some(&(at, cache)) = jobs.get(taken.fetch_add(1, Ordering::Relaxed)) {
            let start = Instant::now();
            let outcome = cells[at].run(cache);
            let (name, entries) = (&cells[at].workload.name, cells[at].entries);
            let took = start.elapsed().as_secs_f64();
            let mut outcomes = outcomes.lock().unwrap_or_else(PoisonError::into_inner);
            outcomes[at].insert(cache, outcome);
            let done: usize = outcomes.iter().map(HashMap::len).sum();
            eprintln!(
                "{done:>4} of {} {name:<18}{entries:>8}  {cache:<13}{:>6.2} %{took:>7.1} s",
                jobs.len(),
                outcome.hit_ratio
            );
        }
    };
    thread::scope(|scope| (0..threads).for_each(|_| _ = scope.spawn(work)));
    outcomes.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn print_csv(cells: &[Cell<'_>], outcomes: &[HashMap<&'static str, Outcome>], caches: &[&'static str]) {
    println!("trace,share_of_distinct,entries,requests,{}", caches.join(","));
    for (cell, outcome) in cells.iter().zip(outcomes) {
        print!("{},{},{},{}", cell.workload.name, cell.share, cell.entries, cell.workload.keys.len());
        caches.iter().for_each(|cache| print!(",{:.2}", outcome[cache].hit_ratio));
        println!();
    }
}

fn print_table(cells: &[Cell<'_>], outcomes: &[HashMap<&'static str, Outcome>], caches: &[&'static str]) {
    print!("hit ratio, per cent\n\n{:<18}{:>8}", "", "entries");
    caches.iter().for_each(|cache| print!("{cache:>13}"));
    println!();
    for (cell, outcome) in cells.iter().zip(outcomes) {
        print!("{:<18}{:>8}", cell.workload.name, cell.entries);
        caches.iter().for_each(|cache| print!("{:>13.2}", outcome[cache].hit_ratio));
        println!();
    }
    print!("{:<18}{:>8}", "mean", "");
    for cache in caches {
        print!("{:>13.2}", mean(outcomes.iter().map(|outcome| outcome[cache].hit_ratio)).unwrap_or(f64::NAN));
    }
    println!();
}

fn mean(numbers: impl Iterator<Item = f64>) -> Option<f64> {
    let numbers: Vec<f64> = numbers.collect();
    (!numbers.is_empty()).then(|| numbers.iter().sum::<f64>() / numbers.len() as f64)
}

fn print_lines(cells: &[Cell<'_>], outcomes: &[HashMap<&'static str, Outcome>]) {
    let line = |name: &str, number: Option<f64>| {
        if let Some(number) = number {
            println!("{name} {number:.2}");
        }
    };
    let all = || cells.iter().zip(outcomes);
    let ratio = |outcome: &HashMap<_, Outcome>, cache| outcome.get(cache).map(|outcome| outcome.hit_ratio);
    let best_rival = |outcome| {
        let rivals = CACHES.iter().filter(|kind| kind.is_rival());
        rivals.filter_map(|kind| ratio(outcome, kind.name)).reduce(f64::max)
    };
    let quell = |outcome| ratio(outcome, QUELL);
    let small = all().filter(|(cell, _)| cell.workload.is_small());
    let wide = all().filter(|(cell, _)| cell.entries >= ENTRIES_FOR_WRITES);
    let gains = all().filter_map(|(_, outcome)| Some(quell(outcome)? - best_rival(outcome)?));
    let regrets = all().filter_map(|(_, outcome)| Some(ratio(outcome, OPT)? - quell(outcome)?));
    line("mean48", mean(all().filter_map(|(_, outcome)| quell(outcome))));
    line("small9", mean(small.filter_map(|(_, outcome)| quell(outcome))));
    line("worst_vs_best", gains.reduce(f64::min));
    line("worst_regret", regrets.reduce(f64::max));
    line(
        "hits_that_write",
        mean(wide.filter_map(|(_, outcome)| outcome.get(QUELL).and_then(|quell| quell.hits_that_write))),
    );
}

fn main() {
    let mut arguments = Arguments::read();
    let caches = arguments.caches(&[OPT]);
    let only = arguments.names("--only");
    let (fast, csv) = (arguments.flag("--fast"), arguments.flag("--csv"));
    let processors = || thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = arguments.value("--threads").unwrap_or_else(processors);
    let named = arguments.rest().into_iter().next().map(PathBuf::from);
    let directory = named.or_else(|| std::env::var_os("QUELL_TRACES").map(PathBuf::from));

    let workloads = match &directory {
        Some(directory) => traces(directory, &only, fast),
        None => generated(&only),
    };
    assert!(!workloads.is_empty(), "no workload is left to run");
    if directory.is_none() {
        println!("No traces were given: all that follows is of generated workloads.\n");
    }
    let cells: Vec<Cell<'_>> = workloads
        .iter()
        .flat_map(|workload| {
            let cell = |share| Cell { workload, share, entries: workload.entries(share) };
            workload.shares().into_iter().map(cell)
        })
        .collect();
    let rivals = CACHES.iter().filter(|kind| kind.is_rival()).map(|kind| kind.name);
    let columns = [OPT, QUELL].into_iter().chain(rivals).chain([LRU]);
    let caches: Vec<&'static str> = columns.filter(|name| caches.has(name)).collect();

    let outcomes = run(&cells, &caches, threads);
    let print = if csv { print_csv } else { print_table };
    print(&cells, &outcomes, &caches);
    println!();
    print_lines(&cells, &outcomes);
}
