//! What a hit costs, in nanoseconds of one thread's time: one hot key, uniform keys, zipf keys; one thread
//! and two.
//!
//! ```text
//! cargo bench --bench read                        everything, about three minutes
//! cargo bench --bench read -- 'hot key'           one workload
//! cargo bench --bench read -- '2 threads/quell'   one subject
//! ```
//!
//! After criterion's report come two tables: medians, and the ratios that quell promises with a verdict on
//! each. Their figures are not criterion's. Criterion measures the subjects one after the other, and on
//! most machines the first and the last of them meet different conditions; so after each group all its
//! subjects are measured again in turns, one short stretch each, round after round. The verdicts come from
//! these.
//!
//! # What is equal for every subject
//!
//! Keys are `u64`, values `Arc<[u64; 8]>`, and all caches share the same `Arc`s. Every cache has room for
//! twice the million entries it holds, so that nothing is evicted and every read is a hit; a miss aborts
//! the run. The hasher is ahash. The keys are drawn before the clock starts (seeded, 2^20 draws) and every
//! subject walks the same table of indices by the same code. Every read touches the value's first word,
//! cloned or not.
//!
//! All threads run the same operation. Each warms up, all start together, each times its own share, and one
//! that is done early goes on without being timed until the last is done, so no share is measured in peace.
//! What is reported is the mean of the threads' own times. One thread is measured by the same code.
//!
//! Two threads that share one core show no contention at all, which flatters every lock. So the tables
//! leave out a stretch in which a thread was ready to run but had to wait for a core (known on Linux only),
//! and print `busy` where too few are left: then the machine had something else to do.
//!
//! `quell read, own cache` is a control: each thread has a cache to itself, so what two threads cost there is the
//! processor's doing (its cores may share execution units, or a clock), not the cache's.
//!
//! # What is not equal
//!
//! quell and moka check a time to live of an hour on every hit; quick_cache has none. The locked maps check
//! nothing: a hand-made cache would store a deadline beside the value and read a clock under the lock, and
//! which clock that is decides the result, so they get neither, to quell's disadvantage. They are read in
//! both ways, by a clone of the `Arc` and in place under the lock, and the faster of the two counts where
//! quell's `read` is compared with them.
//!
//! `get_or_load` has a loader that never runs once all is loaded: without an early refresh, with one (each value is looked at
//! long before it is due), and while the hottest keys are noted.
//!
//! quell has no bound on its size here, and neither have the locked maps: they keep no eviction order.
//! quick_cache and moka have one and keep it up to date on a hit, to their disadvantage.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a bench drives real threads by a real clock"
)]
#![allow(clippy::print_stdout, reason = "the tables are the bench's output")]

use std::cell::Cell;
use std::collections::HashMap;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ahash::RandomState;
use criterion::{Criterion, SamplingMode};
use dashmap::DashMap;
use parking_lot::{Mutex, RwLock};
use quell::EarlyRefresh;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

const KEYS: u32 = 1_000_000;
const CAPACITY: u32 = 2 * KEYS;
const DRAWS: usize = 1 << 20;
const ZIPF_EXPONENT: f64 = 0.99;
const TTL: Duration = Duration::from_secs(3600);
const SEED: u64 = 0x5eed_0001;

const SAMPLES: usize = 20;
const WARM_UP: Duration = Duration::from_millis(300);
const MEASUREMENT: Duration = Duration::from_secs(1);

/// The measurement in turns: undisturbed stretches wanted of each subject, those needed for a median, and the
/// time after which a group begins no other round.
const STRETCH: Duration = Duration::from_millis(40);
const WANTED: usize = 15;
const NEEDED: usize = 5;
const TURNS: Duration = Duration::from_secs(15);
/// The share of a stretch that a thread may have waited for a core.
const WAITED: f64 = 0.03;

/// Untimed reads of each thread before its stretch, at least; the stretches in turns have more, to warm the
/// core's caches.
const LEAD_IN: u64 = 2_000;
/// Untimed reads at a time of a thread that waits for the others.
const LEAD_OUT: u64 = 500;

type Value = Arc<[u64; 8]>;

/// A cyclic table of key indices; its length is a power of two.
struct Workload {
    name: &'static str,
    table: Vec<u32>,
}

impl Workload {
    fn all() -> Vec<Self> {
        let mut rng = SmallRng::seed_from_u64(SEED);
        let uniform = (0..DRAWS).map(|_| rng.random_range(0..KEYS)).collect();
        let zipf = zipf(&mut rng);
        vec![
            Self { name: HOT, table: vec![KEYS / 2] },
            Self { name: UNIFORM, table: uniform },
            Self { name: ZIPF, table: zipf },
        ]
    }
}

const HOT: &str = "hot key";
const UNIFORM: &str = "uniform";
const ZIPF: &str = "zipf 0.99";

/// Draws ranks by inverting the cumulative weights, and scatters the ranks over the keys: neighbours in
/// popularity are not neighbours in memory.
fn zipf(rng: &mut SmallRng) -> Vec<u32> {
    let mut sum = 0.0;
    let cumulative: Vec<f64> = (1..=KEYS)
        .map(|rank| {
            sum += f64::from(rank).powf(-ZIPF_EXPONENT);
            sum
        })
        .collect();
    let mut scattered: Vec<u32> = (0..KEYS).collect();
    scattered.shuffle(rng);
    (0..DRAWS)
        .map(|_| {
            let point = rng.random::<f64>() * sum;
            scattered[cumulative.partition_point(|&below| below <= point).min(KEYS as usize - 1)]
        })
        .collect()
}

/// A stretch of a workload's table for one thread.
struct Walk<'a> {
    table: &'a [u32],
    from: usize,
    steps: u64,
}

impl Walk<'_> {
    #[inline(always)]
    fn reads(&self, read: impl Fn(u64) -> Option<u64>) {
        let mask = self.table.len() - 1;
        let mut at = self.from;
        let mut sum = 0_u64;
        for _ in 0..self.steps {
            let key = u64::from(self.table[at & mask]);
            match read(black_box(key)) {
                Some(word) => sum = sum.wrapping_add(word),
                None => missed(key),
            }
            at = at.wrapping_add(1);
        }
        black_box(sum);
    }
}

#[cold]
#[inline(never)]
fn missed(key: u64) {
    panic!("key {key} is not in the cache: this run measures no hits");
}

/// One way to read one cache.
struct Subject {
    name: &'static str,
    run: Box<dyn Fn(&Walk<'_>) + Sync>,
}

impl Subject {
    fn new(name: &'static str, run: impl Fn(&Walk<'_>) + Sync + 'static) -> Self {
        Self { name, run: Box::new(run) }
    }
}

const QUELL_GET: &str = "quell get";
const QUELL_READ: &str = "quell read";
const QUELL_PINNED: &str = "quell pin+get";
const QUELL_APART: &str = "quell read, own cache";
const QUELL_LOAD: &str = "quell get_or_load";
const QUELL_EARLY: &str = "quell, early refresh";
const QUELL_NOTED: &str = "quell, keys noted";
const QUICK_CACHE: &str = "quick_cache get";
const MOKA: &str = "moka get";
const LOCKED_GET: [&str; 3] = ["Mutex<HashMap> get", "RwLock<HashMap> get", "DashMap get"];
const LOCKED_READ: [&str; 3] = ["Mutex<HashMap> read", "RwLock<HashMap> read", "DashMap read"];

static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Which of two caches a thread has for its own: threads that start one after the other have different ones.
    static MINE: usize = THREADS.fetch_add(1, Ordering::Relaxed) % 2;
}

fn subjects() -> Vec<Subject> {
    let mut entries: Vec<(u64, Value)> = (0..u64::from(KEYS)).map(|key| (key, Arc::new([key; 8]))).collect();
    entries.shuffle(&mut SmallRng::seed_from_u64(SEED));
    let capacity = CAPACITY as usize;

    let quell = quell::Cache::builder().initial_capacity(capacity).time_to_live(TTL).build();
    let mut map = HashMap::with_capacity_and_hasher(capacity, RandomState::default());
    let sharded = DashMap::with_capacity_and_hasher(capacity, RandomState::default());
    let quick = quick_cache::sync::Cache::<u64, Value, _, _, _>::with(
        capacity,
        u64::from(CAPACITY),
        quick_cache::UnitWeighter,
        RandomState::default(),
        quick_cache::sync::DefaultLifecycle::default(),
    );
    let moka = moka::sync::Cache::builder()
        .max_capacity(u64::from(CAPACITY))
        .initial_capacity(capacity)
        .time_to_live(TTL)
        .build_with_hasher(RandomState::default());
    for (key, value) in entries {
        quell.insert(key, value.clone());
        map.insert(key, value.clone());
        sharded.insert(key, value.clone());
        quick.insert(key, value.clone());
        moka.insert(key, value);
    }
    let twin = quell::Cache::builder().initial_capacity(capacity).time_to_live(TTL).build();
    quell.iter().for_each(|(key, value)| twin.insert(key, value));
    let apart = [quell.clone(), twin];
    let values: Arc<HashMap<u64, Value>> = Arc::new(quell.iter().collect());
    let [plain, early, noted] =
        [EarlyRefresh::off(), EarlyRefresh::beta(1.0), EarlyRefresh::off()].map(|early| {
            let values = values.clone();
            let cache =
                quell::Cache::builder().initial_capacity(capacity).time_to_live(TTL).early_refresh(early);
            let cache =
                cache.loader_fn(move |key: &u64| Ok::<_, std::fmt::Error>(values[key].clone())).build();
            quell.iter().for_each(|(key, _)| drop(cache.get_or_load(&key)));
            cache
        });
    // From now on accesses are noted.
    noted.hot_keys(1);
    quell.run_pending_tasks();
    moka.run_pending_tasks();

    let rw = Arc::new(RwLock::new(map.clone()));
    let mutex = Arc::new(Mutex::new(map));
    let sharded = Arc::new(sharded);
    let (rw_read, mutex_read, sharded_read) = (rw.clone(), mutex.clone(), sharded.clone());
    let (quell_read, quell_pinned) = (quell.clone(), quell.clone());
    let [mutex_get_name, rw_get_name, sharded_get_name] = LOCKED_GET;
    let [mutex_read_name, rw_read_name, sharded_read_name] = LOCKED_READ;
    vec![
        Subject::new(QUELL_GET, move |walk| walk.reads(|key| quell.get(&key).map(|value| value[0]))),
        Subject::new(QUELL_READ, move |walk| walk.reads(|key| quell_read.read(&key, |value| value[0]))),
        Subject::new(QUELL_PINNED, move |walk| {
            walk.reads(|key| quell_pinned.pin().get(&key).map(|value| value[0]));
        }),
        Subject::new(QUELL_APART, move |walk| {
            let own = &apart[MINE.with(|mine| *mine)];
            walk.reads(|key| own.read(&key, |value| value[0]));
        }),
        Subject::new(QUELL_LOAD, move |walk| {
            walk.reads(|key| plain.get_or_load(&key).ok().map(|value| value[0]))
        }),
        Subject::new(QUELL_EARLY, move |walk| {
            walk.reads(|key| early.get_or_load(&key).ok().map(|value| value[0]))
        }),
        Subject::new(QUELL_NOTED, move |walk| {
            walk.reads(|key| noted.get_or_load(&key).ok().map(|value| value[0]))
        }),
        Subject::new(QUICK_CACHE, move |walk| walk.reads(|key| quick.get(&key).map(|value| value[0]))),
        Subject::new(MOKA, move |walk| walk.reads(|key| moka.get(&key).map(|value| value[0]))),
        Subject::new(mutex_get_name, move |walk| {
            walk.reads(|key| {
                let value = mutex.lock().get(&key).cloned();
                value.map(|value| value[0])
            });
        }),
        Subject::new(mutex_read_name, move |walk| {
            walk.reads(|key| mutex_read.lock().get(&key).map(|value| value[0]));
        }),
        Subject::new(rw_get_name, move |walk| {
            walk.reads(|key| {
                let value = rw.read().get(&key).cloned();
                value.map(|value| value[0])
            });
        }),
        Subject::new(rw_read_name, move |walk| {
            walk.reads(|key| rw_read.read().get(&key).map(|value| value[0]));
        }),
        Subject::new(sharded_get_name, move |walk| {
            walk.reads(|key| {
                let value = sharded.get(&key).map(|entry| entry.value().clone());
                value.map(|value| value[0])
            });
        }),
        Subject::new(sharded_read_name, move |walk| {
            walk.reads(|key| sharded_read.get(&key).map(|entry| entry.value()[0]));
        }),
    ]
}

/// One or more threads reading at the same time.
struct Stretch {
    /// The mean of the times the threads took.
    took: Duration,
    /// The largest share of its time that a thread was ready to run and had no core, where the system tells.
    waited: f64,
}

/// Runs `steps` reads in each of `threads` threads at the same time, after `lead_in` reads that are not
/// timed.
fn side_by_side(
    subject: &Subject,
    table: &[u32],
    from: usize,
    (lead_in, steps): (u64, u64),
    threads: usize,
) -> Stretch {
    let ready = AtomicUsize::new(0);
    let done = AtomicUsize::new(0);
    let one = |thread: usize| {
        let from = from.wrapping_add(thread * table.len() / threads);
        (subject.run)(&Walk { table, from: from.wrapping_sub(lead_in as usize), steps: lead_in });
        ready.fetch_add(1, Ordering::SeqCst);
        while ready.load(Ordering::SeqCst) < threads {
            std::hint::spin_loop();
        }
        let waited_before = time_without_a_core();
        let start = Instant::now();
        (subject.run)(&Walk { table, from, steps });
        let took = start.elapsed();
        let waited = time_without_a_core().saturating_sub(waited_before);
        done.fetch_add(1, Ordering::SeqCst);
        while done.load(Ordering::SeqCst) < threads {
            (subject.run)(&Walk { table, from, steps: LEAD_OUT });
        }
        (took, waited.as_secs_f64() / took.as_secs_f64())
    };
    let shares: Vec<(Duration, f64)> = thread::scope(|scope| {
        let one = &one;
        let handles: Vec<_> = (0..threads).map(|thread| scope.spawn(move || one(thread))).collect();
        handles.into_iter().map(|handle| handle.join().expect("a reader panicked")).collect()
    });
    let total: Duration = shares.iter().map(|(took, _)| took).sum();
    Stretch {
        took: total / u32::try_from(threads).expect("a small number of threads"),
        waited: shares.iter().map(|(_, waited)| *waited).fold(0.0, f64::max),
    }
}

/// For how long the calling thread has been ready to run but had no core; zero where the system does not
/// tell. The time a thread is parked by a lock does not count.
fn time_without_a_core() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = text.split_whitespace().nth(1).and_then(|word| word.parse().ok());
    Duration::from_nanos(nanos.unwrap_or(0))
}

/// What came of a measurement; of two, their ratio.
#[derive(Clone, Copy)]
enum Reading {
    NotMeasured,
    Busy,
    Number(f64),
}

impl Reading {
    fn median(mut numbers: Vec<f64>) -> Self {
        numbers.sort_by(f64::total_cmp);
        if numbers.len() < NEEDED { Self::Busy } else { Self::Number(numbers[numbers.len() / 2]) }
    }

    fn ratio_to(self, other: Self) -> Self {
        self.with(other, |ours, theirs| ours / theirs)
    }

    fn smaller(self, other: Self) -> Self {
        self.with(other, f64::min)
    }

    fn with(self, other: Self, combine: fn(f64, f64) -> f64) -> Self {
        match (self, other) {
            (Self::Number(one), Self::Number(two)) => Self::Number(combine(one, two)),
            (Self::NotMeasured, _) | (_, Self::NotMeasured) => Self::NotMeasured,
            _ => Self::Busy,
        }
    }

    fn show(self, decimals: usize) -> String {
        match self {
            Self::NotMeasured => "-".to_owned(),
            Self::Busy => "busy".to_owned(),
            Self::Number(number) => format!("{number:.decimals$}"),
        }
    }
}

/// Measures the subjects in turns, each by stretches of its own number of steps, and gives nanoseconds a
/// read.
fn in_turns(subjects: &[(&Subject, u64)], table: &[u32], threads: usize) -> Vec<Reading> {
    let mut times = vec![Vec::new(); subjects.len()];
    let mut from = 0_usize;
    let start = Instant::now();
    while times.iter().any(|times| times.len() < WANTED) && start.elapsed() < TURNS {
        for ((subject, steps), times) in subjects.iter().zip(&mut times) {
            if times.len() < WANTED {
                let lead_in = LEAD_IN.max(steps / 4);
                let stretch = side_by_side(subject, table, from, (lead_in, *steps), threads);
                if stretch.waited <= WAITED {
                    times.push(stretch.took.as_secs_f64() * 1e9 / *steps as f64);
                }
            }
        }
        from = from.wrapping_add(table.len() / 7);
    }
    times.into_iter().map(Reading::median).collect()
}

/// The readings by workload, threads and subject.
#[derive(Default)]
struct Readings(HashMap<(&'static str, usize, &'static str), Reading>);

impl Readings {
    fn of(&self, workload: &'static str, threads: usize, subject: &'static str) -> Reading {
        self.0.get(&(workload, threads, subject)).copied().unwrap_or(Reading::NotMeasured)
    }
}

fn measure(criterion: &mut Criterion, workloads: &[Workload], subjects: &[Subject]) -> Readings {
    let mut readings = Readings::default();
    for workload in workloads {
        for threads in [1, 2] {
            let title = format!("{}/{}", workload.name, thread_count(threads));
            let mut group = criterion.benchmark_group(&title);
            group.sampling_mode(SamplingMode::Flat);
            let mut measured = Vec::new();
            for subject in subjects {
                let from = Cell::new(LEAD_IN as usize);
                let last = Cell::new((0, Duration::ZERO));
                group.bench_function(subject.name, |bencher| {
                    bencher.iter_custom(|steps| {
                        let took =
                            side_by_side(subject, &workload.table, from.get(), (LEAD_IN, steps), threads)
                                .took;
                        from.set(from.get().wrapping_add(steps as usize));
                        last.set((steps, took));
                        took
                    });
                });
                let (steps, took) = last.get();
                if steps > 1 {
                    let a_stretch = STRETCH.as_secs_f64() / took.as_secs_f64() * steps as f64;
                    measured.push((subject, a_stretch as u64));
                }
            }
            group.finish();
            if !measured.is_empty() {
                println!("{title}: all in turns");
            }
            let turns = in_turns(&measured, &workload.table, threads);
            for ((subject, _), reading) in measured.iter().zip(turns) {
                readings.0.insert((workload.name, threads, subject.name), reading);
            }
        }
    }
    readings
}

fn thread_count(threads: usize) -> String {
    format!("{threads} thread{}", if threads == 1 { "" } else { "s" })
}

fn print_readings(readings: &Readings, workloads: &[Workload], subjects: &[Subject]) {
    println!("\nmedian nanoseconds a read, per thread\n");
    print!("{:<22}", "");
    for workload in workloads {
        print!("{:>23}", workload.name);
    }
    print!("\n{:<22}", "threads");
    for _ in workloads {
        print!("{:>15}{:>8}", 1, 2);
    }
    println!();
    for subject in subjects {
        print!("{:<22}", subject.name);
        for workload in workloads {
            let reading = |threads| readings.of(workload.name, threads, subject.name).show(1);
            print!("{:>15}{:>8}", reading(1), reading(2));
        }
        println!();
    }
}

/// A promise: the time of ours is at most `limit` times that of theirs.
struct Promise {
    what: String,
    ratio: Reading,
    limit: f64,
}

fn promises(readings: &Readings) -> Vec<Promise> {
    let mut promises = Vec::new();
    let mut promise = |what: String, ours: Reading, theirs: Reading, limit: f64| {
        promises.push(Promise { what, ratio: ours.ratio_to(theirs), limit });
    };

    let [get, read] = [QUELL_GET, QUELL_READ].map(|subject| readings.of(HOT, 1, subject));
    let [quick, moka] = [QUICK_CACHE, MOKA].map(|subject| readings.of(HOT, 1, subject));
    promise("hot key, 1 thread: read / quick_cache".into(), read, quick, 0.8);
    promise("hot key, 1 thread: get / quick_cache".into(), get, quick, 1.0);
    promise("hot key, 1 thread: read / moka".into(), read, moka, 0.2);
    promise("hot key, 1 thread: get / moka".into(), get, moka, 0.2);
    let read_alone = read;

    let [get, read, quick] = [QUELL_GET, QUELL_READ, QUICK_CACHE].map(|subject| readings.of(HOT, 2, subject));
    promise("hot key, 2 threads: read / quick_cache".into(), read, quick, 0.2);
    promise("hot key: read with 2 threads / with 1".into(), read, read_alone, 1.15);
    let apart = readings.of(HOT, 2, QUELL_APART);
    promise("hot key, 2 threads: read of one cache / of a cache each".into(), read, apart, 1.15);
    for (locked_get, locked_read) in LOCKED_GET.into_iter().zip(LOCKED_READ) {
        let [cloned, in_place] = [locked_get, locked_read].map(|subject| readings.of(HOT, 2, subject));
        let faster = cloned.smaller(in_place);
        promise(format!("hot key, 2 threads: read / faster of {locked_get}, read"), read, faster, 1.0);
        promise(format!("hot key, 2 threads: get / {locked_get}"), get, cloned, 1.0);
    }

    for threads in [1, 2] {
        let quick = readings.of(UNIFORM, threads, QUICK_CACHE);
        for (name, subject) in [("read", QUELL_READ), ("get", QUELL_GET)] {
            let what = format!("uniform, {}: {name} / quick_cache", thread_count(threads));
            promise(what, readings.of(UNIFORM, threads, subject), quick, 1.0);
        }
    }
    promises
}

fn print_promises(promises: &[Promise]) {
    println!("\n{:<62}{:>8}{:>10}", "ratio", "is", "at most");
    for Promise { what, ratio, limit } in promises {
        let verdict = match ratio {
            Reading::Number(ratio) if ratio <= limit => "holds",
            Reading::Number(_) => "MISSED",
            Reading::Busy => "the machine was busy",
            Reading::NotMeasured => "not measured",
        };
        println!("{what:<62}{:>8}{limit:>10.2}   {verdict}", ratio.show(3));
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
    let workloads = Workload::all();
    let subjects = subjects();
    let readings = measure(&mut criterion, &workloads, &subjects);
    criterion.final_summary();
    if !readings.0.is_empty() {
        print_readings(&readings, &workloads, &subjects);
        print_promises(&promises(&readings));
    }
}
