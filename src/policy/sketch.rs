//! How often keys have been asked for lately, about: a count-min sketch of 4-bit counters.
//!
//! A key has four counters, all in one cache line, and its estimate is the smallest (Cormode and Muthukrishnan, *An
//! improved data stream summary*, 2005); only the smallest are incremented. The past fades: a hand goes round and halves the
//! counters that it comes by, a word at a time, so that no caller pays for a whole lap, and the keys do not lose their past
//! all at once (TinyLFU, Einziger, Friedman and Manes, 2017, halves all at once).
//!
//! The counters are plain atomics that are read and written, never compared and swapped: two threads that meet lose an
//! increment, which no decision hangs on.

use super::share_of;
use crate::primitive::plain::{AtomicU64, Ordering};
use crate::primitive::prefetch;

/// Counters of a key.
const ROWS: u32 = 4;
/// Words of one cache line.
const LINE: usize = 8;
/// The largest value of a counter.
const MOST: u64 = 15;
/// Entries to a word of 16 counters.
const ENTRIES: usize = 2;
/// The fewest lines: with less, keys collide too much.
const LEAST_LINES: usize = 128;
/// Increments to a lap of the hand, for each entry.
const LAP: u64 = 64;
/// And at least: in a small cache a key needs time to prove itself.
const LEAST_LAP: u64 = 1 << 14;
/// What is left of a word of counters when each is halved.
const HALVED: u64 = 0x7777_7777_7777_7777;

/// One cache line of counters.
#[repr(align(64))]
struct Line([AtomicU64; LINE]);

/// The sketch.
pub(super) struct Sketch {
    lines: Box<[Line]>,
    /// Increments to a step of the hand, as a power of two.
    pub(super) stride_shift: u32,
}

impl Sketch {
    /// For about so many entries.
    pub(super) fn new(entries: usize) -> Self {
        let lines = (entries / ENTRIES / LINE).max(LEAST_LINES);
        let lap = (entries as u64).saturating_mul(LAP).max(LEAST_LAP);
        Self {
            lines: (0..lines).map(|_| Line([const { AtomicU64::new(0) }; LINE])).collect(),
            stride_shift: (lap / (lines * LINE) as u64).next_power_of_two().ilog2(),
        }
    }

    /// The counters of a key: their words, and how far they are shifted in them.
    fn counters(&self, hash: u64) -> impl Iterator<Item = (&AtomicU64, u32)> {
        let line = &self.lines[share_of(hash, self.lines.len())];
        (0..ROWS).map(move |row| {
            // Three bits choose the word, four a counter in it.
            let bits = (hash >> (row * 8) & 0x7f) as u32;
            (&line.0[(bits >> 4) as usize], (bits & 15) * 4)
        })
    }

    /// Counts one request of the key.
    pub(super) fn count(&self, hash: u64) {
        let least = self.estimate(hash);
        if least < MOST {
            for (word, shift) in self.counters(hash) {
                // Relaxed: counts, which publish nothing.
                let seen = word.load(Ordering::Relaxed);
                if seen >> shift & MOST == least {
                    word.store(seen + (1 << shift), Ordering::Relaxed);
                }
            }
        }
    }

    /// Halves the counters of the word that the hand comes by at its nth step.
    pub(super) fn fade(&self, nth: usize) {
        let word = &self.lines[nth / LINE % self.lines.len()].0[nth % LINE];
        // Relaxed: as in `count`.
        word.store(word.load(Ordering::Relaxed) >> 1 & HALVED, Ordering::Relaxed);
    }

    /// Asks for the counters of a key ahead.
    pub(super) fn prefetch(&self, hash: u64) {
        prefetch(&raw const self.lines[share_of(hash, self.lines.len())]);
    }

    /// How often the key has been counted, 0 to 15.
    pub(super) fn estimate(&self, hash: u64) -> u64 {
        // Relaxed: as in `count`.
        let counts = self.counters(hash).map(|(word, shift)| word.load(Ordering::Relaxed) >> shift & MOST);
        counts.min().unwrap_or(0)
    }
}
