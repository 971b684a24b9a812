//! What was dropped lately: fingerprints of keys, with the queue that they were dropped from and when.
//!
//! Sets of eight, each in one half of a cache line, the latest first; a full set forgets its oldest. Like the sketch it is
//! made of plain atomics, and two threads that meet in a set may lose or double an entry.

use super::mark::Place;
use super::share_of;
use crate::primitive::plain::{AtomicU32, Ordering};
use crate::primitive::prefetch;

const WAYS: usize = 8;
/// A small cache does well to remember more than it holds: so many times as much, up to this.
const MORE: usize = 4;
const MUCH: usize = 1024;
/// An entry: the stamp in the lower half, then whether it was dropped from the main queue, then the fingerprint, which is
/// never zero. Zero: nothing.
const MAIN: u32 = 1 << 16;
const FINGERPRINT_AT: u32 = 17;

/// What is remembered of a dropped key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Trace {
    /// The queue from which it was dropped.
    pub(super) from: Place,
    /// From the small queue: when it had entered it. From the main queue: how many had been dropped from there.
    pub(super) stamp: u16,
}

/// The memory of what was dropped.
pub(super) struct Ghost(Box<[[AtomicU32; WAYS]]>);

impl Ghost {
    /// For about so many entries.
    pub(super) fn new(entries: usize) -> Self {
        let sets = entries.max((MORE * entries).min(MUCH)).div_ceil(WAYS).max(1);
        Self((0..sets).map(|_| [const { AtomicU32::new(0) }; WAYS]).collect())
    }

    /// The set of a key, and its fingerprint.
    fn place(&self, hash: u64) -> (&[AtomicU32; WAYS], u32) {
        let fingerprint = (hash as u32 >> FINGERPRINT_AT).max(1);
        (&self.0[share_of(hash, self.0.len())], fingerprint)
    }

    /// Asks for the set of a key ahead.
    pub(super) fn prefetch(&self, hash: u64) {
        prefetch(self.place(hash).0);
    }

    /// Remembers a key that is dropped.
    pub(super) fn remember(&self, hash: u64, trace: Trace) {
        let (set, fingerprint) = self.place(hash);
        let from = if trace.from == Place::Main { MAIN } else { 0 };
        let mut entry = fingerprint << FINGERPRINT_AT | from | u32::from(trace.stamp);
        for way in set {
            // Relaxed: hints, which publish nothing.
            let older = way.load(Ordering::Relaxed);
            way.store(entry, Ordering::Relaxed);
            if older == 0 {
                break;
            }
            entry = older;
        }
    }

    /// Takes out what is remembered of a key.
    pub(super) fn take(&self, hash: u64) -> Option<Trace> {
        let (set, fingerprint) = self.place(hash);
        // Relaxed: as in `remember`.
        let way = set.iter().find(|way| way.load(Ordering::Relaxed) >> FINGERPRINT_AT == fingerprint)?;
        let entry = way.load(Ordering::Relaxed);
        way.store(0, Ordering::Relaxed);
        let from = if entry & MAIN == 0 { Place::Small } else { Place::Main };
        Some(Trace { from, stamp: entry as u16 })
    }
}
