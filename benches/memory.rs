//! How many bytes an entry takes in a full cache, and how many bytes live while entries come and go.
//!
//! ```text
//! cargo bench --bench memory                                 everything, about two minutes
//! cargo bench --bench memory -- --caches quell,quick_cache   these caches
//! ```
//!
//! Each cache is measured in a process of its own, one after the other: what one has not freed yet cannot disturb
//! the next. An allocator counts the bytes that live, by the sizes asked for. Beside it stands what a malloc
//! takes for them that rounds each allocation and a header of 8 bytes up to a multiple of 16, and to 32 at least:
//! many small allocations cost more than they ask for.
//!
//! # Bytes an entry
//!
//! Entries are `u64 -> u64`. Room for as many entries as the first column says; twice as many keys are inserted, then
//! upkeep is done. `len` is what the cache says it holds, `found` how many of the keys it has when asked for all of
//! them afterwards; the bytes are divided by `found`.
//!
//! quell keeps a soft and a hard deadline for each entry, moka and mini-moka a hard one. The others have none. quell
//! is to stay at 96 bytes an entry or below.
//!
//! # Bytes alive while entries come and go
//!
//! A cache with room for 10,000 entries is asked for ten million keys that it does not have, and gets each of
//! them inserted. After every million the live bytes are read as they are, garbage that waits to be freed
//! included. The series is to be flat: largest / smallest close to 1.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "the count is a plain one, and one process waits for another"
)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the tables and the progress are its output")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use common::{Arguments, CACHES, Kind, Plan, splitmix64};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static CHUNKS: AtomicUsize = AtomicUsize::new(0);

/// What a malloc takes for an allocation.
fn chunk(layout: Layout) -> usize {
    (layout.size() + 8).next_multiple_of(16).max(32)
}

// SAFETY: the system's allocator, with counts beside it that allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Relaxed);
        CHUNKS.fetch_add(chunk(layout), Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        CHUNKS.fetch_sub(chunk(layout), Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SIZES: [u64; 2] = [10_000, 1_000_000];
const CHURN_CAPACITY: u64 = 10_000;
const CHURN: u64 = 10_000_000;
const SAMPLE: u64 = 1_000_000;
/// How often upkeep is called before a count: garbage may need several rounds.
const UPKEEP: usize = 16;

fn plan(capacity: u64) -> Plan {
    Plan { deadlines: true, ..Plan::of(capacity) }
}

/// A cache that is as full as its capacity lets it be.
struct Full {
    live: usize,
    chunks: usize,
    len: Option<u64>,
    found: u64,
}

impl Full {
    fn measure(kind: &Kind, capacity: u64) -> Self {
        let before = (LIVE.load(Relaxed), CHUNKS.load(Relaxed));
        let cache = (kind.build)(plan(capacity));
        let keys = || (0..2 * capacity).map(splitmix64);
        keys().for_each(|key| cache.insert(key, !key));
        (0..UPKEEP).for_each(|_| cache.upkeep());
        let (live, chunks) = (LIVE.load(Relaxed) - before.0, CHUNKS.load(Relaxed) - before.1);
        let len = cache.len();
        let found = keys().filter(|&key| cache.get(key).is_some()).count() as u64;
        Self { live, chunks, len, found }
    }
}

/// The live bytes after each million of misses.
fn churn(kind: &Kind) -> Vec<usize> {
    let mut series = Vec::with_capacity((CHURN / SAMPLE) as usize);
    let before = LIVE.load(Relaxed);
    let cache = (kind.build)(plan(CHURN_CAPACITY));
    for sample in 0..CHURN / SAMPLE {
        for key in (sample * SAMPLE..(sample + 1) * SAMPLE).map(splitmix64) {
            if cache.get(key).is_none() {
                cache.insert(key, !key);
            }
        }
        series.push(LIVE.load(Relaxed) - before);
    }
    series
}

/// In the process of one cache: a line of words for each size, and one for the churn.
fn report(kind: &Kind) {
    for capacity in SIZES {
        let Full { live, chunks, len, found } = Full::measure(kind, capacity);
        let len = len.map_or("-".to_owned(), |len| len.to_string());
        println!("{live} {chunks} {len} {found}");
    }
    let series: Vec<String> = churn(kind).iter().map(usize::to_string).collect();
    println!("{}", series.join(" "));
}

/// The lines of words that the process of one cache reports.
fn ask_for_report(kind: &Kind) -> Vec<Vec<String>> {
    eprintln!("measuring {}", kind.name);
    let program = std::env::current_exe().expect("a running program has a path");
    let mut command = Command::new(program);
    let output = command.args([REPORT, kind.name]).stderr(Stdio::inherit()).output().expect("it starts");
    assert!(output.status.success(), "{}: {}", kind.name, output.status);
    let text = String::from_utf8(output.stdout).expect("only numbers");
    text.lines().map(|line| line.split(' ').map(str::to_owned).collect()).collect()
}

const REPORT: &str = "--report";

fn number(word: &str) -> f64 {
    word.parse().unwrap_or_else(|_| panic!("a number, not {word:?}"))
}

fn print_sizes(reports: &[(&str, Vec<Vec<String>>)]) {
    println!("bytes an entry; the bar for quell is 96\n");
    println!(
        "{:>9}  {:<14}{:>10}{:>10}{:>10}{:>16}",
        "entries", "", "len", "found", "bytes", "with malloc's"
    );
    for (at, capacity) in SIZES.iter().enumerate() {
        for (name, lines) in reports {
            let [live, chunks, len, found] = &lines[at][..] else { panic!("{name}: {lines:?}") };
            let each = |bytes: &str| number(bytes) / number(found);
            println!(
                "{capacity:>9}  {name:<14}{len:>10}{found:>10}{:>10.1}{:>16.1}",
                each(live),
                each(chunks)
            );
        }
    }
}

fn print_churn(reports: &[(&str, Vec<Vec<String>>)]) {
    println!("\nthousands of bytes alive after each million of {CHURN} misses, {CHURN_CAPACITY} entries\n");
    for (name, lines) in reports {
        let series: Vec<f64> = lines[SIZES.len()].iter().map(|word| number(word)).collect();
        print!("{name:<14}");
        series.iter().for_each(|bytes| print!("{:>8.0}", bytes / 1e3));
        let (largest, smallest) =
            series.iter().fold((f64::MIN, f64::MAX), |(most, least), &it| (most.max(it), least.min(it)));
        println!("   largest / smallest {:.2}", largest / smallest);
    }
}

fn main() {
    let mut arguments = Arguments::read();
    if let Some(name) = arguments.value::<String>(REPORT) {
        let kind = CACHES.iter().find(|kind| kind.name == name).expect("a name of the list");
        return report(kind);
    }
    let kinds = arguments.caches(&[]).kinds();
    assert!(arguments.rest().is_empty(), "nothing but options is understood");
    let reports: Vec<_> = kinds.iter().map(|kind| (kind.name, ask_for_report(kind))).collect();
    print_sizes(&reports);
    print_churn(&reports);
}
