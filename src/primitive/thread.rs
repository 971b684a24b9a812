//! Small dense numbers for running threads, so that per-thread state can be an array.

use super::plain::{AtomicU64, Ordering};

/// Threads beyond this many at one time share the number `SHARED`.
pub(crate) const NUMBERED: usize = 256;

/// The number of a thread that got none (too many threads, or one that is in its last destructors).
pub(crate) const SHARED: usize = NUMBERED;

const WORDS: usize = NUMBERED / 64;

static TAKEN: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

/// A number that is taken until it is dropped.
pub(crate) struct Number(usize);

impl Number {
    /// Below `NUMBERED`, held by no other running thread; or `SHARED`.
    #[inline(always)]
    pub(crate) fn get(&self) -> usize {
        self.0
    }

    /// Takes the lowest free number. Lock-free: each failed CAS means that another thread got or gave one back.
    pub(crate) fn take() -> Self {
        for (w, word) in TAKEN.iter().enumerate() {
            // Relaxed: only a hint for the CAS below.
            let mut seen = word.load(Ordering::Relaxed);
            while seen != u64::MAX {
                let bit = seen.trailing_ones() as usize;
                // Acquire: what the number's last owner wrote is ours to go on with; pairs with the Release in `drop`.
                match word.compare_exchange(seen, seen | 1 << bit, Ordering::Acquire, Ordering::Relaxed) {
                    Ok(_) => return Self(w * 64 + bit),
                    Err(now) => seen = now,
                }
            }
        }
        Self(SHARED)
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        if self.0 != SHARED {
            // Release: hands the number's per-thread state to its next owner; pairs with the Acquire in `take`.
            TAKEN[self.0 / 64].fetch_and(!(1 << (self.0 % 64)), Ordering::Release);
        }
    }
}

thread_local! {
    static PINNED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// A pin begins that the user holds.
pub(crate) fn pinned_begins() {
    let _ = PINNED.try_with(|n| n.set(n.get() + 1));
}

/// It ends.
pub(crate) fn pinned_ends() {
    let _ = PINNED.try_with(|n| n.set(n.get().saturating_sub(1)));
}

/// Whether the user holds a pin on this thread.
pub(crate) fn is_pinned_by_user() -> bool {
    PINNED.try_with(|n| n.get() > 0).unwrap_or(false)
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "tests use real threads")]
mod tests {
    use super::*;
    use crate::primitive::epoch::number;

    #[test]
    fn running_threads_have_different_numbers() {
        let barrier = std::sync::Barrier::new(16);
        let mut all = std::thread::scope(|s| {
            let spawned: Vec<_> = (0..16)
                .map(|_| {
                    s.spawn(|| {
                        let mine = number();
                        barrier.wait();
                        mine
                    })
                })
                .collect();
            spawned.into_iter().map(|t| t.join().unwrap()).collect::<Vec<_>>()
        });
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 16);
    }

    #[test]
    fn a_number_comes_back() {
        for _ in 0..2 * NUMBERED {
            assert_ne!(std::thread::spawn(number).join().unwrap(), SHARED);
        }
    }
}
