//! What get-or-load costs when several threads want what is not there yet, and how often each key is then
//! loaded.
//!
//! ```text
//! cargo bench --bench naive                   everything, under two minutes
//! cargo bench --bench naive -- 'together'     one shape
//! ```
//!
//! A load is a fixed amount of arithmetic, sized once at the start to about 5 µs on an idle core. In one
//! round every thread asks once for each of 256 keys of a new, empty cache; the time is that from the first
//! thread's start to the last thread's end. Two shapes:
//!
//! - *together*: all threads ask for the keys in the same order. This is the stampede: the question is how
//!   many of them load the same key.
//! - *apart*: each thread begins at another key. Here a lock that is held across a load makes loads of
//!   different keys wait for each other.
//!
//! The strategies: *cache-aside* looks, loads with no lock held, and stores (many loads of a key); *lock
//! held* looks and loads under the lock (one load of a key, but what the lock covers stands still: the
//! whole map, or a shard of DashMap); quell's `get_with` (one load of a key, and only those who want it
//! wait). quell keeps a time to live of an hour; the others keep none. Making and
//! dropping the caches, starting the threads and ending them is not timed.
//!
//! A table of the medians and of the loads per key, counted by the loader, follows criterion's report. With
//! more threads than cores a load is rarely interrupted half-way, so that cache-aside seems tamer here than
//! with a loader that waits for a network or a disk: the `stampede` example shows that. On a machine with
//! other work to do the times with several threads say little; the loads per key still hold.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a bench drives real threads by a real clock"
)]
#![allow(clippy::print_stdout, reason = "the table is the bench's output")]

use std::cell::RefCell;
use std::collections::HashMap;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use ahash::RandomState;
use criterion::{Criterion, SamplingMode, Throughput};
use dashmap::DashMap;
use parking_lot::{Mutex, RwLock};

const KEYS: u64 = 256;
const LOAD: Duration = Duration::from_micros(5);
const TTL: Duration = Duration::from_secs(3600);
const THREADS: [usize; 3] = [1, 2, 8];

const SAMPLES: usize = 20;
const WARM_UP: Duration = Duration::from_millis(300);
const MEASUREMENT: Duration = Duration::from_millis(1200);

type Value = Arc<u64>;

/// The source of values: a fixed number of rounds of a mixing function, and a count of the loads.
struct Source {
    rounds: u32,
    loads: AtomicU64,
}

impl Source {
    /// Sized so that a load takes about [`LOAD`]: the fastest of several tries, since a disturbed one says
    /// too much.
    fn sized() -> Self {
        const TRIAL: u32 = 100_000;
        let fastest = (0..20)
            .map(|seed| {
                let start = Instant::now();
                black_box(mix(seed, TRIAL));
                start.elapsed()
            })
            .min()
            .expect("there were tries");
        let rounds = LOAD.as_secs_f64() / fastest.as_secs_f64() * f64::from(TRIAL);
        Self { rounds: rounds as u32, loads: AtomicU64::new(0) }
    }

    fn load(&self, key: u64) -> Value {
        self.loads.fetch_add(1, Ordering::Relaxed);
        Arc::new(mix(key, self.rounds))
    }
}

fn mix(key: u64, rounds: u32) -> u64 {
    let mut word = black_box(key);
    for _ in 0..rounds {
        word = (word ^ (word >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9).wrapping_add(1);
    }
    word
}

/// A cache of one round, and how to get a key from it.
trait Strategy: Sync {
    fn get(&self, key: u64, source: &Source) -> Value;
}

type Map = HashMap<u64, Value, RandomState>;

fn map() -> Map {
    HashMap::with_capacity_and_hasher(KEYS as usize, RandomState::default())
}

struct MutexAside(Mutex<Map>);

impl Strategy for MutexAside {
    fn get(&self, key: u64, source: &Source) -> Value {
        let found = self.0.lock().get(&key).cloned();
        found.unwrap_or_else(|| {
            let value = source.load(key);
            self.0.lock().insert(key, value.clone());
            value
        })
    }
}

struct MutexHeld(Mutex<Map>);

impl Strategy for MutexHeld {
    fn get(&self, key: u64, source: &Source) -> Value {
        self.0.lock().entry(key).or_insert_with(|| source.load(key)).clone()
    }
}

struct RwLockAside(RwLock<Map>);

impl Strategy for RwLockAside {
    fn get(&self, key: u64, source: &Source) -> Value {
        let found = self.0.read().get(&key).cloned();
        found.unwrap_or_else(|| {
            let value = source.load(key);
            self.0.write().insert(key, value.clone());
            value
        })
    }
}

struct DashMapAside(DashMap<u64, Value, RandomState>);

impl Strategy for DashMapAside {
    fn get(&self, key: u64, source: &Source) -> Value {
        let found = self.0.get(&key).map(|entry| entry.value().clone());
        found.unwrap_or_else(|| {
            let value = source.load(key);
            self.0.insert(key, value.clone());
            value
        })
    }
}

struct DashMapHeld(DashMap<u64, Value, RandomState>);

impl Strategy for DashMapHeld {
    fn get(&self, key: u64, source: &Source) -> Value {
        let found = self.0.get(&key).map(|entry| entry.value().clone());
        found.unwrap_or_else(|| self.0.entry(key).or_insert_with(|| source.load(key)).value().clone())
    }
}

struct Quell(quell::Cache<u64, Value>);

impl Strategy for Quell {
    fn get(&self, key: u64, source: &Source) -> Value {
        self.0.get_with(&key, || source.load(key))
    }
}

type Make = fn() -> Box<dyn Strategy>;

const STRATEGIES: [(&str, Make); 6] = [
    ("Mutex<HashMap>, cache-aside", || Box::new(MutexAside(Mutex::new(map())))),
    ("Mutex<HashMap>, lock held", || Box::new(MutexHeld(Mutex::new(map())))),
    ("RwLock<HashMap>, cache-aside", || Box::new(RwLockAside(RwLock::new(map())))),
    ("DashMap, cache-aside", || Box::new(DashMapAside(dash_map()))),
    ("DashMap, lock held", || Box::new(DashMapHeld(dash_map()))),
    ("quell get_with", || {
        let builder = quell::Cache::builder().initial_capacity(KEYS as usize).time_to_live(TTL);
        Box::new(Quell(builder.build()))
    }),
];

fn dash_map() -> DashMap<u64, Value, RandomState> {
    DashMap::with_capacity_and_hasher(KEYS as usize, RandomState::default())
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Shape {
    Together,
    Apart,
}

impl Shape {
    const ALL: [Self; 2] = [Self::Together, Self::Apart];

    fn name(self) -> &'static str {
        match self {
            Self::Together => "together",
            Self::Apart => "apart",
        }
    }

    fn first_key(self, thread: usize, threads: usize) -> u64 {
        match self {
            Self::Together => 0,
            Self::Apart => KEYS * thread as u64 / threads as u64,
        }
    }
}

/// One round: all keys of an empty cache, asked for by all threads.
fn round(make: Make, source: &Source, shape: Shape, threads: usize) -> Duration {
    let strategy = make();
    let strategy = &*strategy;
    let barrier = &Barrier::new(threads);
    let spans: Vec<(Instant, Instant)> = thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|thread| {
                scope.spawn(move || {
                    let first = shape.first_key(thread, threads);
                    barrier.wait();
                    let start = Instant::now();
                    for step in 0..KEYS {
                        black_box(strategy.get((first + step) % KEYS, source));
                    }
                    (start, Instant::now())
                })
            })
            .collect();
        handles.into_iter().map(|handle| handle.join().expect("a thread of the round panicked")).collect()
    });
    let start = spans.iter().map(|span| span.0).min().expect("at least one thread");
    let end = spans.iter().map(|span| span.1).max().expect("at least one thread");
    end - start
}

struct Figure {
    micros_per_key: f64,
    loads_per_key: f64,
}

type Figures = HashMap<(Shape, usize, &'static str), Figure>;

fn measure(criterion: &mut Criterion, source: &Source) -> Figures {
    let mut figures = Figures::new();
    for shape in Shape::ALL {
        for threads in THREADS {
            let mut group = criterion.benchmark_group(format!("{}/{}", shape.name(), thread_count(threads)));
            group.sampling_mode(SamplingMode::Flat).throughput(Throughput::Elements(KEYS));
            for (name, make) in STRATEGIES {
                let rounds = RefCell::new(Vec::new());
                source.loads.store(0, Ordering::Relaxed);
                group.bench_function(name, |bencher| {
                    bencher.iter_custom(|count| {
                        (0..count)
                            .map(|_| {
                                let took = round(make, source, shape, threads);
                                rounds.borrow_mut().push(took);
                                took
                            })
                            .sum()
                    });
                });
                let mut rounds = rounds.into_inner();
                rounds.sort();
                if let Some(median) = rounds.get(rounds.len() / 2) {
                    let loads = source.loads.load(Ordering::Relaxed) as f64;
                    let figure = Figure {
                        micros_per_key: median.as_secs_f64() * 1e6 / KEYS as f64,
                        loads_per_key: loads / (rounds.len() as f64 * KEYS as f64),
                    };
                    figures.insert((shape, threads, name), figure);
                }
            }
            group.finish();
        }
    }
    figures
}

fn thread_count(threads: usize) -> String {
    format!("{threads} thread{}", if threads == 1 { "" } else { "s" })
}

fn print_figures(figures: &Figures) {
    println!("\nmedian microseconds a key until all threads have it (loads per key)");
    for shape in Shape::ALL {
        print!("\n{:<30}", shape.name());
        for threads in THREADS {
            print!("{:>18}", thread_count(threads));
        }
        println!();
        for (name, _) in STRATEGIES {
            print!("{name:<30}");
            for threads in THREADS {
                let cell = match figures.get(&(shape, threads, name)) {
                    Some(figure) => format!("{:.2} ({:.2})", figure.micros_per_key, figure.loads_per_key),
                    None => "-".to_owned(),
                };
                print!("{cell:>18}");
            }
            println!();
        }
    }
}

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(SAMPLES)
        .warm_up_time(WARM_UP)
        .measurement_time(MEASUREMENT)
        .nresamples(10_000)
        .without_plots()
        .configure_from_args();
    let source = Source::sized();
    let figures = measure(&mut criterion, &source);
    criterion.final_summary();
    if !figures.is_empty() {
        print_figures(&figures);
    }
}
