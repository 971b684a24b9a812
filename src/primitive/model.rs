//! Runs a loom model, and refuses one that explores nothing.
//!
//! All models: `RUSTFLAGS="--cfg loom --cfg crossbeam_loom" cargo test --profile loom --lib models::`. The environment
//! variable `QUELL_LOOM_BOUND` overrides every model's bound on preemptions (`none` lifts it); `QUELL_LOOM_RUNS=1` tells
//! how many interleavings each model has.
//!
//! Loom keeps only the last access of each thread to an atomic, so that some models never branch: one that
//! runs fewer than [`FEW`] times proves nothing and fails. A deadlock ends the process.

use super::Witness;
use super::epoch::{self, Participant};
use super::plain::{AtomicUsize, Ordering};
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

/// The least number of runs, where a model gives no reason for fewer.
pub(crate) const FEW: usize = 10;

/// Runs `model` in all interleavings with at most `bound` preemptions, of which there must be `least` at least.
pub(crate) fn check(name: &str, bound: usize, least: usize, model: impl Fn() + Send + Sync + 'static) {
    let bound = match std::env::var("QUELL_LOOM_BOUND") {
        Ok(word) if word == "none" => None,
        Ok(word) => Some(word.parse().expect("QUELL_LOOM_BOUND is a number or `none`")),
        Err(_) => Some(bound),
    };
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = bound;
    builder.max_branches = 100_000;
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    #[allow(clippy::disallowed_methods, reason = "a figure to show, and no clock of a cache")]
    let begun = Instant::now();
    builder.check(move || {
        // Relaxed: a figure; all threads of a model are one thread of the system.
        counted.fetch_add(1, Ordering::Relaxed);
        epoch::forget();
        model();
        epoch::clear();
    });
    // Relaxed: as above.
    let runs = runs.load(Ordering::Relaxed);
    if std::env::var_os("QUELL_LOOM_RUNS").is_some() {
        let took = begun.elapsed();
        // Not `println`, which the test harness would keep to itself.
        let _ = writeln!(std::io::stderr(), "{name}: {runs} runs at bound {bound:?} in {took:?}");
    }
    assert!(runs >= least, "{name} ran {runs} times only: it explores nothing");
}

/// How the threads of a model pin.
pub(crate) type Pins = fn() -> Participant;

/// Runs a model under lasting pins, which hide no ordering, and under strict ones, which free at once what may go.
pub(crate) fn both(name: &str, bound: usize, model: impl Fn(Pins) + Copy + Send + Sync + 'static) {
    check(&format!("{name}, lasting pins"), bound, FEW, move || model(Participant::lasting));
    check(&format!("{name}, strict pins"), bound, FEW, move || model(Participant::strict));
}

/// Spawns a thread that pins in this way.
pub(crate) fn spawn<R: 'static>(
    pins: Pins,
    body: impl FnOnce() -> R + 'static,
) -> loom::thread::JoinHandle<R> {
    loom::thread::spawn(move || {
        pins().adopt();
        body()
    })
}

/// How many [`Value`]s there are.
#[derive(Clone, Default)]
pub(crate) struct Census(Arc<AtomicUsize>);

impl Census {
    /// A new value.
    pub(crate) fn value(&self, number: u64) -> Value {
        // Relaxed: a figure, as in `check`.
        self.0.fetch_add(1, Ordering::Relaxed);
        Value { number, witness: Witness::new(), census: self.clone() }
    }

    /// Frees what has been retired, and says how many values are left.
    pub(crate) fn count(&self) -> usize {
        epoch::clear();
        // Relaxed: as above.
        self.0.load(Ordering::Relaxed)
    }
}

/// A value that tells when it is read unordered with its making or its end, or ends twice.
pub(crate) struct Value {
    number: u64,
    witness: Witness,
    census: Census,
}

// SAFETY: the witness is what loom watches for races; the rest is atomic or never changes.
unsafe impl Sync for Value {}

impl Value {
    pub(crate) fn number(&self) -> u64 {
        self.witness.used();
        self.number
    }
}

impl Clone for Value {
    fn clone(&self) -> Self {
        self.census.value(self.number())
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.witness.ended();
            // Relaxed: a figure, as in `check`.
            self.census.0.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
