//! Interest: how many want a flight's value, and whether one more may join. One word.
//!
//! Relaxed throughout: each change is one read-modify-write of the word, the word is all that it says, and the outcome
//! has an order of its own.

use crate::primitive::atomic::{AtomicUsize, Ordering};

/// Nobody may join any more. Set by the leader once the slot has moved on, or by the one who takes the count to
/// zero; never cleared.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// The count of those who want a flight's value, and `CLOSED`.
#[derive(Debug)]
pub(super) struct Interest(AtomicUsize);

/// What leaving left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Left {
    /// Others want it still, or it was closed before.
    Others,
    /// Nobody wants it: it is closed now, and the one who left must give the slot back.
    Nobody,
}

impl Interest {
    /// The leader's.
    pub(super) fn new() -> Self {
        Self(AtomicUsize::new(1))
    }

    /// Counts one in. `false` if it is closed: the slot has moved on, or is to be moved on.
    #[must_use]
    pub(super) fn join(&self) -> bool {
        let mut seen = self.0.load(Ordering::Relaxed);
        while seen & CLOSED == 0 {
            match self.0.compare_exchange_weak(seen, seen + 1, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }

    /// Counts one out.
    pub(super) fn leave(&self) -> Left {
        let mut seen = self.0.load(Ordering::Relaxed);
        loop {
            let wanted = if seen == 1 { CLOSED } else { seen - 1 };
            match self.0.compare_exchange_weak(seen, wanted, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return if seen == 1 { Left::Nobody } else { Left::Others },
                Err(now) => seen = now,
            }
        }
    }

    /// Closes it, and tells how many want the value, the closer included.
    pub(super) fn close(&self) -> usize {
        self.0.fetch_or(CLOSED, Ordering::Relaxed) & !CLOSED
    }

    /// How many want the value now.
    pub(super) fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed) & !CLOSED
    }
}
