//! How soon a crowd has the value of a load that it waits for, how many loads there are, and what a waiter allocates.
//!
//! ```text
//! cargo bench --bench flight                       everything, about two minutes
//! cargo bench --bench flight --features tokio      the same; a load of quell's is a task of its own
//! cargo bench --bench flight -- --quick            fewer rounds, for a first look
//! cargo bench --bench flight -- --crowds 1000      crowds of this size
//! cargo bench --bench flight -- --only tasks       `tasks` or `threads` alone
//! cargo bench --bench flight -- --ways quell,moka  these and the floor
//! cargo bench --bench flight -- --json             a line for each figure in place of the tables
//! ```
//!
//! One caller leads, and its load is held up by a gate. So many others ask for the same key; when all wait, the gate
//! opens, the load returns its value, and everybody is to have it. Waiters are threads, or tasks of a tokio runtime
//! with two workers. Everybody brings a loader, and each loader that runs is counted.
//!
//! # What is measured
//!
//! - *loads*: how many loaders ran; the most of all rounds.
//! - *first* and *last*: from the instant just before the loader returns its value to the instant at which the first
//!   and the last waiter has it in hand. For *last* the quartiles are given too.
//! - *gate to last*: from the opening of the gate. Where waiters poll the load, its progress wakes them too, and
//!   some of what a crowd costs comes before the value is there.
//! - *allocations* and *bytes* per waiter: what is asked of the allocator between the making of the first waiter and
//!   the end of the last, less what the floor asks for, divided by the waiters. The floor's waiters await a bare
//!   signal: the task or the thread itself is thereby left out, but not the room that a larger future takes in its
//!   task. What the end of the load allocates for everybody is in it, and seen with one waiter. Counted in rounds of
//!   their own, so that the counters cost no time in the others.
//!
//! # How it is measured
//!
//! In rounds: in each round every implementation has one crowd, with a cache of its own, so that all of them meet
//! the same conditions; who begins takes turns. The figures are medians.
//!
//! The gate is the same for all. It opens when every waiting task has been polled once and has not got a value, or
//! every thread has said that it is about to ask, and a while after that, in which all come to rest. quell must
//! then report as many waiters as there are.
//!
//! tokio's `Notify` wakes the floor's tasks, parking_lot's condition variable its threads. mini-moka and TinyUFO
//! have no loads that others wait for; foyer has none for threads.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a bench drives real threads by a real clock"
)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the tables and the progress are its output")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::future::poll_fn;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, LazyLock};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

use common::crowd::{
    ForTasks, ForThreads, Foyer, MokaFuture, MokaSync, Quell, QuickCache, TaskCells, TaskFloor, TaskMutexes,
    ThreadCells, ThreadFloor, ThreadMutexes, Value,
};
use common::{Arguments, QUELL, Wanted};

struct Counting;

static IS_COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);

fn count(bytes: usize) {
    if IS_COUNTING.load(Relaxed) {
        ALLOCATIONS.fetch_add(1, Relaxed);
        BYTES.fetch_add(bytes, Relaxed);
    }
}

// SAFETY: the system's allocator, with counts beside it that allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const WORKERS: usize = 2;
const TASKS: [usize; 5] = [1, 10, 100, 1_000, 10_000];
const THREADS: [usize; 3] = [1, 10, 100];
/// The crowd of tasks in which quell is held against the others.
const JUDGED: usize = 1_000;

/// How long a crowd comes to rest before the gate opens.
const TASKS_REST: Duration = Duration::from_millis(1);
const THREADS_REST: Duration = Duration::from_millis(4);
/// How often it is looked whether all have come.
const LOOK: Duration = Duration::from_micros(100);

/// Rounds in which allocations are counted.
const COUNTED: usize = 5;

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(WORKERS).enable_time().build().expect("a runtime")
});

/// What holds a load up, and who has come and gone.
struct Gate {
    start: Instant,
    /// Who opens it.
    keeper: Thread,
    counts: bool,
    loads: AtomicUsize,
    arrived: AtomicUsize,
    done: AtomicUsize,
    /// When each waiter had the value, in nanoseconds since `start`.
    stamps: Vec<AtomicU64>,
    published: AtomicU64,
    for_tasks: Semaphore,
    for_threads: (Mutex<bool>, Condvar),
}

impl Gate {
    fn new(waiters: usize, counts: bool) -> Arc<Self> {
        Arc::new(Self {
            start: Instant::now(),
            keeper: thread::current(),
            counts,
            loads: AtomicUsize::new(0),
            arrived: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            stamps: (0..waiters).map(|_| AtomicU64::new(0)).collect(),
            published: AtomicU64::new(0),
            for_tasks: Semaphore::new(0),
            for_threads: (Mutex::new(false), Condvar::new()),
        })
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).expect("a short while")
    }

    fn load_as_thread(&self) -> Value {
        self.loads.fetch_add(1, SeqCst);
        let (is_open, opened) = &self.for_threads;
        let mut is_open = is_open.lock();
        while !*is_open {
            opened.wait(&mut is_open);
        }
        drop(is_open);
        self.publish()
    }

    async fn load_as_task(self: Arc<Self>) -> Value {
        self.loads.fetch_add(1, SeqCst);
        self.for_tasks.acquire().await.expect("never closed").forget();
        self.publish()
    }

    fn publish(&self) -> Value {
        let value = Arc::new(42);
        self.published.store(self.now(), SeqCst);
        value
    }

    /// The waiter of this number has the value.
    fn leave(&self, waiter: usize) {
        self.stamps[waiter].store(self.now(), Relaxed);
        if self.done.fetch_add(1, SeqCst) + 1 == self.stamps.len() {
            self.keeper.unpark();
        }
    }

    fn await_load(&self) {
        self.await_that(|| self.loads.load(SeqCst) > 0);
    }

    fn await_that(&self, has_come: impl Fn() -> bool) {
        while !has_come() {
            thread::park_timeout(LOOK);
        }
    }

    fn count(&self, counting: bool) {
        IS_COUNTING.store(counting && self.counts, SeqCst);
    }

    /// All waiters have been made: holds the gate until they wait, opens it, and sees them off.
    fn hold_and_open(&self, rest: Duration, waiters: impl Fn() -> Option<usize>) -> Sample {
        let crowd = self.stamps.len();
        self.await_that(|| self.arrived.load(SeqCst) == crowd);
        thread::sleep(rest);
        self.count(false);
        self.await_that(|| waiters().is_none_or(|waiters| waiters == crowd));
        self.count(true);
        let opened = self.now();
        *self.for_threads.0.lock() = true;
        self.for_threads.1.notify_all();
        self.for_tasks.add_permits(crowd + 1);
        while self.done.load(SeqCst) < crowd {
            thread::park();
        }
        self.count(false);
        self.sample(opened)
    }

    fn sample(&self, opened: u64) -> Sample {
        let stamps = self.stamps.iter().map(|stamp| stamp.load(Relaxed));
        let (first, last) = stamps.fold((u64::MAX, 0), |(first, last), it| (first.min(it), last.max(it)));
        let published = self.published.load(SeqCst);
        Sample {
            loads: self.loads.load(SeqCst),
            first: first.saturating_sub(published),
            last: last.saturating_sub(published),
            from_gate: last.saturating_sub(opened),
            allocations: ALLOCATIONS.swap(0, SeqCst),
            bytes: BYTES.swap(0, SeqCst),
        }
    }
}

/// What one crowd has seen. Times are in nanoseconds.
struct Sample {
    loads: usize,
    first: u64,
    last: u64,
    from_gate: u64,
    allocations: usize,
    bytes: usize,
}

/// A crowd of threads.
fn threads<C: ForThreads>(waiters: usize, counts: bool) -> Sample {
    let (cache, gate) = (C::default(), Gate::new(waiters, counts));
    let (cache, gate) = (&cache, &*gate);
    thread::scope(|scope| {
        scope.spawn(|| cache.get(|| gate.load_as_thread()));
        gate.await_load();
        gate.count(true);
        for waiter in 0..waiters {
            scope.spawn(move || {
                gate.arrived.fetch_add(1, SeqCst);
                let value = cache.get(|| gate.load_as_thread());
                gate.leave(waiter);
                value
            });
        }
        gate.hold_and_open(THREADS_REST, || cache.waiters())
    })
}

/// A crowd of tasks.
fn tasks<C: ForTasks>(waiters: usize, counts: bool) -> Sample {
    let (cache, gate) = (Arc::new(C::default()), Gate::new(waiters, counts));
    let mut handles = Vec::with_capacity(waiters + 1);
    let (of_leader, load) = (cache.clone(), gate.clone().load_as_task());
    handles.push(RUNTIME.spawn(async move { of_leader.get(load).await }));
    gate.await_load();
    gate.count(true);
    for waiter in 0..waiters {
        let (cache, gate) = (cache.clone(), gate.clone());
        handles.push(RUNTIME.spawn(async move {
            let value = counted_in(cache.get(gate.clone().load_as_task()), &gate.arrived).await;
            gate.leave(waiter);
            value
        }));
    }
    let sample = gate.hold_and_open(TASKS_REST, || cache.waiters());
    RUNTIME.block_on(async {
        for handle in handles {
            handle.await.expect("a task panicked");
        }
    });
    sample
}

/// Counts a future in after its first poll.
async fn counted_in<F: Future>(future: F, arrived: &AtomicUsize) -> F::Output {
    let mut future = pin!(future);
    let mut is_first = true;
    poll_fn(|cx| {
        let polled = future.as_mut().poll(cx);
        if std::mem::take(&mut is_first) {
            arrived.fetch_add(1, SeqCst);
        }
        polled
    })
    .await
}

/// A way to have a key loaded once.
struct Way {
    name: &'static str,
    crowd: fn(usize, bool) -> Sample,
}

const FLOOR: &str = "floor";

impl Way {
    fn is_rival(&self) -> bool {
        ![QUELL, FLOOR].contains(&self.name)
    }
}

const FOR_THREADS: [Way; 6] = [
    Way { name: QUELL, crowd: threads::<Quell> },
    Way { name: "moka", crowd: threads::<MokaSync> },
    Way { name: "quick_cache", crowd: threads::<QuickCache> },
    Way { name: "cell per key", crowd: threads::<ThreadCells> },
    Way { name: "mutex per key", crowd: threads::<ThreadMutexes> },
    Way { name: FLOOR, crowd: threads::<ThreadFloor> },
];

const FOR_TASKS: [Way; 7] = [
    Way { name: QUELL, crowd: tasks::<Quell> },
    Way { name: "moka", crowd: tasks::<MokaFuture> },
    Way { name: "quick_cache", crowd: tasks::<QuickCache> },
    Way { name: "foyer", crowd: tasks::<Foyer> },
    Way { name: "cell per key", crowd: tasks::<TaskCells> },
    Way { name: "mutex per key", crowd: tasks::<TaskMutexes> },
    Way { name: FLOOR, crowd: tasks::<TaskFloor> },
];

/// Who waits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waiters {
    Threads,
    Tasks,
}

impl Waiters {
    const ALL: [Self; 2] = [Self::Threads, Self::Tasks];

    fn name(self) -> &'static str {
        match self {
            Self::Threads => "threads",
            Self::Tasks => "tasks",
        }
    }

    fn ways(self) -> &'static [Way] {
        match self {
            Self::Threads => &FOR_THREADS,
            Self::Tasks => &FOR_TASKS,
        }
    }

    fn crowds(self) -> &'static [usize] {
        match self {
            Self::Threads => &THREADS,
            Self::Tasks => &TASKS,
        }
    }
}

/// How often a crowd of this size is measured.
fn rounds(crowd: usize, quick: bool) -> usize {
    let rounds = match crowd {
        0..100 => 400,
        100..1_000 => 300,
        1_000..10_000 => 200,
        _ => 60,
    };
    if quick { rounds / 10 } else { rounds }
}

/// The quartiles of the times of all rounds, in microseconds.
struct Quartiles([f64; 3]);

impl Quartiles {
    fn of(times: impl Iterator<Item = u64>) -> Self {
        let mut times: Vec<u64> = times.collect();
        times.sort_unstable();
        Self([1, 2, 3].map(|quarter| times[times.len() * quarter / 4] as f64 / 1e3))
    }

    fn median(&self) -> f64 {
        self.0[1]
    }
}

/// What one way came to with crowds of one size.
struct Figure {
    way: &'static Way,
    loads: usize,
    first: Quartiles,
    last: Quartiles,
    from_gate: Quartiles,
    /// Per waiter, beyond what the floor asks for.
    allocations: f64,
    bytes: f64,
}

fn median(mut counts: Vec<usize>) -> f64 {
    counts.sort_unstable();
    counts[counts.len() / 2] as f64
}

fn measure(waiters: Waiters, crowd: usize, wanted: &Wanted, rounds: usize) -> Vec<Figure> {
    let ways = waiters.ways().iter();
    let ways: Vec<&'static Way> = ways.filter(|way| wanted.has(way.name) || way.name == FLOOR).collect();
    let mut samples: Vec<Vec<Sample>> = ways.iter().map(|_| Vec::new()).collect();
    // The first round only warms up.
    for round in 0..=rounds + COUNTED {
        for turn in 0..ways.len() {
            let at = (round + turn) % ways.len();
            let sample = (ways[at].crowd)(crowd, round > rounds);
            if round > 0 {
                samples[at].push(sample);
            }
        }
    }
    let figure = |(&way, samples): (&&'static Way, &Vec<Sample>)| {
        let (timed, counted) = samples.split_at(rounds);
        let each = |count: fn(&Sample) -> usize| median(counted.iter().map(count).collect()) / crowd as f64;
        Figure {
            way,
            loads: samples.iter().map(|sample| sample.loads).max().unwrap_or(0),
            first: Quartiles::of(timed.iter().map(|sample| sample.first)),
            last: Quartiles::of(timed.iter().map(|sample| sample.last)),
            from_gate: Quartiles::of(timed.iter().map(|sample| sample.from_gate)),
            allocations: each(|sample| sample.allocations),
            bytes: each(|sample| sample.bytes),
        }
    };
    let mut figures: Vec<Figure> = ways.iter().zip(&samples).map(figure).collect();
    let floor = figures.iter().find(|figure| figure.way.name == FLOOR).expect("it is one of the ways");
    let (allocations, bytes) = (floor.allocations, floor.bytes);
    for figure in &mut figures {
        figure.allocations -= allocations;
        figure.bytes -= bytes;
    }
    figures
}

/// Who polls a load of quell's that tasks wait for.
fn mode() -> &'static str {
    if cfg!(feature = "tokio") { "a task of its own" } else { "those who wait" }
}

fn print_table(waiters: Waiters, crowd: usize, figures: &[Figure]) {
    println!("\n{crowd} {}, microseconds from the value on, and what each allocates\n", waiters.name());
    println!(
        "{:<15}{:>6}{:>10}{:>10}{:>19}{:>14}{:>13}{:>8}",
        "", "loads", "first", "last", "quartiles", "gate to last", "allocations", "bytes"
    );
    for Figure { way, loads, first, last, from_gate, allocations, bytes } in figures {
        let quartiles = format!("{:.1} - {:.1}", last.0[0], last.0[2]);
        println!(
            "{:<15}{loads:>6}{:>10.1}{:>10.1}{quartiles:>19}{:>14.1}{allocations:>13.2}{bytes:>8.0}",
            way.name,
            first.median(),
            last.median(),
            from_gate.median()
        );
    }
}

fn print_json(waiters: Waiters, crowd: usize, figures: &[Figure]) {
    for Figure { way, loads, first, last, from_gate, allocations, bytes } in figures {
        println!(
            "{{\"waiters\":\"{}\",\"crowd\":{crowd},\"way\":\"{}\",\"polled_by\":\"{}\",\"loads\":{loads},\
             \"first_us\":{:?},\"last_us\":{:?},\"gate_to_last_us\":{:?},\
             \"allocations\":{allocations:.3},\"bytes\":{bytes:.1}}}",
            waiters.name(),
            way.name,
            mode(),
            first.0,
            last.0,
            from_gate.0
        );
    }
}

/// Holds quell against the best of the others.
fn print_verdict(figures: &[Figure]) {
    let last_of = |figure: &Figure| figure.last.median();
    let Some(quell) = figures.iter().find(|figure| figure.way.name == QUELL) else { return };
    let rivals = figures.iter().filter(|figure| figure.way.is_rival());
    let Some(best) = rivals.min_by(|a, b| last_of(a).total_cmp(&last_of(b))) else { return };
    let (ours, theirs) = (last_of(quell), last_of(best));
    let verdict = if ours <= theirs { "met" } else { "missed" };
    println!(
        "\nlast of {JUDGED} tasks, quell / best rival ({}): {ours:.1} / {theirs:.1} µs = {:.2}; the bar is 1: {verdict}",
        best.way.name,
        ours / theirs
    );
}

fn main() -> ExitCode {
    let mut arguments = Arguments::read();
    let (quick, json) = (arguments.flag("--quick"), arguments.flag("--json"));
    let (sizes, only) = (arguments.names("--crowds"), arguments.names("--only"));
    let ways = arguments.names("--ways");
    assert!(arguments.rest().is_empty(), "nothing but options is understood");
    if !json {
        println!(
            "tokio with {WORKERS} workers; a load of quell's that tasks wait for is polled by {}",
            mode()
        );
    }
    let mut loads = 0;
    for waiters in Waiters::ALL.into_iter().filter(|waiters| only.has(waiters.name())) {
        for &crowd in waiters.crowds().iter().filter(|crowd| sizes.has(&crowd.to_string())) {
            eprintln!("measuring {crowd} {}", waiters.name());
            let figures = measure(waiters, crowd, &ways, rounds(crowd, quick));
            if json {
                print_json(waiters, crowd, &figures);
            } else {
                print_table(waiters, crowd, &figures);
                if waiters == Waiters::Tasks && crowd == JUDGED {
                    print_verdict(&figures);
                }
            }
            let ours = figures.iter().filter(|figure| figure.way.name == QUELL);
            loads = ours.map(|figure| figure.loads).fold(loads, usize::max);
        }
    }
    if loads > 1 {
        eprintln!("quell loaded a key {loads} times; the bar is 1: missed");
        return ExitCode::FAILURE;
    }
    if !json {
        println!("\nloads of quell in any round: {loads}; the bar is 1: met");
    }
    ExitCode::SUCCESS
}
