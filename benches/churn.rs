//! What get-or-insert costs in a full cache that must evict, in nanoseconds of one thread's time; one thread and
//! two.
//!
//! ```text
//! cargo bench --bench churn                                 everything, about two minutes
//! cargo bench --bench churn -- --quick                      fewer and shorter stretches, for a first look
//! cargo bench --bench churn -- --caches quell,quick_cache   these caches
//! ```
//!
//! An operation asks for a key, and on a miss inserts it. Every cache has room for 100,000 entries, and is filled
//! by a million operations before anything is timed. Keys and values are `u64`, the hasher is ahash (TinyUFO's own is
//! one too), nobody keeps deadlines. Two workloads:
//!
//! - *zipf 0.99*: a million keys, drawn before the clock starts. The share of hits depends on the cache's policy and
//!   is printed beside the times: who hits more has less to do.
//! - *all misses*: a key that never was, each time. Every operation inserts and evicts.
//!
//! # How it is measured
//!
//! In rounds: in each round every cache has one short stretch, so that all of them meet the same conditions, and the
//! same keys. A stretch begins with operations that are not timed, to warm the core's caches. With two threads both
//! do the same with keys of their own; they start together, and one that is done early goes on untimed until the
//! other is done. A stretch in which a thread was ready to run but had to wait for a core (known on Linux only) is
//! left out. What is reported is the median over the rounds of the mean time of the threads. Where too few stretches
//! are left, because the machine had something else to do, it is a guess, marked `~`: the median of all, each less
//! the time without a core.
//!
//! The last table has the ratios quell / other, below 1 where quell is faster. Upkeep is whatever a cache does on its
//! own in its calls; `LRU` is a plain list and a map under one mutex (parking_lot), as one would write by hand.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a bench drives real threads by a real clock"
)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the tables and the progress are its output")]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{Arguments, Bounded, Kind, Plan, QUELL, Zipf, splitmix64};

const CAPACITY: u64 = 100_000;
const KEYS: u32 = 1_000_000;
const DRAWS: usize = 1 << 22;
const FILL: usize = 1_000_000;
const THREADS: [usize; 2] = [1, 2];

/// The share of a stretch that a thread may have waited for a core.
const WAITED: f64 = 0.03;
/// Undisturbed stretches needed for a median.
const NEEDED: usize = 3;

/// How far apart the rounds and the threads begin: more than any stretch has operations, and no divisor of [`DRAWS`].
const ROUND_APART: u64 = 16_000_057;
const THREAD_APART: u64 = (1 << 40) + DRAWS as u64 / 2;
/// Operations at a time of a thread that waits for the others.
const LEAD_OUT: usize = 500;

/// An endless sequence of keys, that may be entered anywhere.
enum Workload {
    Zipf { table: Vec<u64> },
    Misses,
}

impl Workload {
    fn all() -> [Self; 2] {
        let mut rng = common::rng();
        let zipf = Zipf::new(KEYS, 0.99);
        let table = (0..DRAWS).map(|_| splitmix64(zipf.draw(&mut rng))).collect();
        [Self::Zipf { table }, Self::Misses]
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Zipf { .. } => "zipf 0.99",
            Self::Misses => "all misses",
        }
    }

    fn keys(&self, from: u64, count: usize) -> Vec<u64> {
        let key = |at: u64| match self {
            Self::Zipf { table } => table[at as usize % DRAWS],
            Self::Misses => splitmix64(at),
        };
        (from..from + count as u64).map(key).collect()
    }
}

/// How long and how often is measured.
struct Effort {
    lead_in: usize,
    steps: usize,
    wanted: usize,
    rounds: u64,
}

impl Effort {
    const FULL: Self = Self { lead_in: 50_000, steps: 200_000, wanted: 15, rounds: 30 };
    const QUICK: Self = Self { lead_in: 20_000, steps: 80_000, wanted: 5, rounds: 8 };
}

/// One or more threads at the same cache at the same time.
struct Stretch {
    /// The mean of the times the threads took.
    took: Duration,
    hits: u64,
    /// The mean of the times the threads were ready to run and had no core, where the system tells.
    waited: Duration,
}

impl Stretch {
    fn is_undisturbed(&self) -> bool {
        self.waited <= self.took.mul_f64(WAITED)
    }
}

fn stretch(cache: &dyn Bounded, workload: &Workload, from: u64, effort: &Effort, threads: usize) -> Stretch {
    let ready = AtomicUsize::new(0);
    let done = AtomicUsize::new(0);
    let one = |thread: u64| {
        let from = from + thread * THREAD_APART;
        let keys = workload.keys(from, effort.lead_in + effort.steps);
        let (lead_in, timed) = keys.split_at(effort.lead_in);
        cache.replay(lead_in);
        ready.fetch_add(1, Ordering::SeqCst);
        while ready.load(Ordering::SeqCst) < threads {
            std::hint::spin_loop();
        }
        let waited_before = time_without_a_core();
        let start = Instant::now();
        let hits = cache.replay(timed);
        let took = start.elapsed();
        let waited = time_without_a_core().saturating_sub(waited_before);
        done.fetch_add(1, Ordering::SeqCst);
        let mut after = from + keys.len() as u64;
        while done.load(Ordering::SeqCst) < threads {
            cache.replay(&workload.keys(after, LEAD_OUT));
            after += LEAD_OUT as u64;
        }
        Stretch { took, hits, waited }
    };
    let shares: Vec<Stretch> = thread::scope(|scope| {
        let one = &one;
        let handles: Vec<_> = (0..threads as u64).map(|thread| scope.spawn(move || one(thread))).collect();
        handles.into_iter().map(|handle| handle.join().expect("a thread panicked")).collect()
    });
    let mean = |time: fn(&Stretch) -> Duration| {
        shares.iter().map(time).sum::<Duration>() / u32::try_from(threads).expect("a small number of threads")
    };
    Stretch {
        took: mean(|share| share.took),
        hits: shares.iter().map(|share| share.hits).sum(),
        waited: mean(|share| share.waited),
    }
}

/// For how long the calling thread has been ready to run but had no core; zero where the system does not tell. The
/// time a thread is parked by a lock does not count.
fn time_without_a_core() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = text.split_whitespace().nth(1).and_then(|word| word.parse().ok());
    Duration::from_nanos(nanos.unwrap_or(0))
}

/// Nanoseconds an operation; of two, their ratio.
#[derive(Clone, Copy)]
struct Time {
    number: f64,
    is_guess: bool,
}

impl Time {
    fn median(stretches: &[Stretch], steps: usize) -> Self {
        let undisturbed: Vec<Duration> =
            stretches.iter().filter(|it| it.is_undisturbed()).map(|it| it.took).collect();
        let is_guess = undisturbed.len() < NEEDED;
        let guesses = || stretches.iter().map(|it| it.took.saturating_sub(it.waited)).collect();
        let mut times = if is_guess { guesses() } else { undisturbed };
        times.sort();
        Self { number: times[times.len() / 2].as_secs_f64() * 1e9 / steps as f64, is_guess }
    }

    fn ratio_to(self, other: Self) -> Self {
        Self { number: self.number / other.number, is_guess: self.is_guess || other.is_guess }
    }

    fn show(self, decimals: usize) -> String {
        let mark = if self.is_guess { "~" } else { "" };
        format!("{mark}{:.decimals$}", self.number)
    }
}

/// What one cache did with one workload.
struct Reading {
    cache: &'static str,
    /// By [`THREADS`].
    times: [Time; THREADS.len()],
    /// In per cent, of all stretches.
    hit_ratio: f64,
}

fn measure(workload: &Workload, kinds: &[&'static Kind], effort: &Effort) -> Vec<Reading> {
    let plan = Plan { capacity: CAPACITY, threads: 2, deadlines: false };
    let caches: Vec<Box<dyn Bounded>> = kinds.iter().map(|kind| (kind.build)(plan)).collect();
    for (kind, cache) in kinds.iter().zip(&caches) {
        eprintln!("{}: filling {}", workload.name(), kind.name);
        cache.replay(&workload.keys(0, FILL));
        cache.upkeep();
    }

    let mut round = 0;
    let stretches = THREADS.map(|threads| {
        let mut stretches: Vec<Vec<Stretch>> = caches.iter().map(|_| Vec::new()).collect();
        for turn in 1..=effort.rounds {
            round += 1;
            eprintln!("{}: {threads} at a time, round {turn}", workload.name());
            for (cache, stretches) in caches.iter().zip(&mut stretches) {
                stretches.push(stretch(&**cache, workload, round * ROUND_APART, effort, threads));
            }
            let undisturbed = |of: &Vec<Stretch>| of.iter().filter(|it| it.is_undisturbed()).count();
            if stretches.iter().all(|of| undisturbed(of) >= effort.wanted) {
                break;
            }
        }
        stretches
    });
    let reading = |at: usize| {
        let operations = |threads: usize| stretches[threads][at].len() * THREADS[threads] * effort.steps;
        let hits: u64 = stretches.iter().flat_map(|of| &of[at]).map(|it| it.hits).sum();
        Reading {
            cache: kinds[at].name,
            times: [0, 1].map(|threads: usize| Time::median(&stretches[threads][at], effort.steps)),
            hit_ratio: 100.0 * hits as f64 / (operations(0) + operations(1)) as f64,
        }
    };
    (0..caches.len()).map(reading).collect()
}

fn print_row(name: &str, cells: impl IntoIterator<Item = String>) {
    print!("{name:<16}");
    cells.into_iter().for_each(|cell| print!("{cell:>12}"));
    println!();
}

fn print_tables(workload: &Workload, readings: &[Reading]) {
    let thread_counts = ["1 thread", "2 threads"].map(str::to_owned);
    println!("\n{}: median nanoseconds an operation, per thread\n", workload.name());
    print_row("", thread_counts.clone().into_iter().chain(["hits, %".to_owned()]));
    for reading in readings {
        let times = reading.times.map(|time| time.show(1));
        print_row(reading.cache, times.into_iter().chain([format!("{:.1}", reading.hit_ratio)]));
    }
    let Some(quell) = readings.iter().find(|reading| reading.cache == QUELL) else { return };
    println!("\n{}: the time of quell / that of the other\n", workload.name());
    print_row("", thread_counts);
    for reading in readings.iter().filter(|reading| reading.cache != QUELL) {
        let ratio = |at: usize| quell.times[at].ratio_to(reading.times[at]).show(2);
        print_row(reading.cache, [0, 1].map(ratio));
    }
}

fn main() {
    let mut arguments = Arguments::read();
    let kinds = arguments.caches(&[]).kinds();
    let effort = if arguments.flag("--quick") { Effort::QUICK } else { Effort::FULL };
    assert!(arguments.rest().is_empty(), "nothing but options is understood");
    for workload in Workload::all() {
        let readings = measure(&workload, &kinds, &effort);
        print_tables(&workload, &readings);
    }
}
