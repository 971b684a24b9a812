//! Interest: who wants a flight's value, and whether one more may join. One word.
//!
//! Relaxed throughout: each change is one read-modify-write of the word, the word is all that it says, and the outcome
//! has an order of its own.

use crate::primitive::atomic::{AtomicU64, Ordering};

/// Nobody may join any more. Set once the slot has moved on, or by the last one who leaves; never cleared.
const CLOSED: u64 = 1 << 63;
/// The leader wants the value: set from the start, cleared when it leaves.
const LED: u64 = 1 << 62;
/// One who wants it is a task, and may poll the load's future.
const TASK: u64 = 1 << 31;
/// One follower.
const FOLLOWER: u64 = 1;

const TASKS: u64 = LED - TASK;
const FOLLOWERS: u64 = TASK - FOLLOWER;

/// The leader's mark, the count of followers, how many of all are tasks, and `CLOSED`.
#[derive(Debug)]
pub(super) struct Interest(AtomicU64);

/// One who wants a flight's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    Leader(Waits),
    Follower(Waits),
}

/// How one waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waits {
    /// Parked.
    AsThread,
    /// Polled, and ready to poll the load's future.
    AsTask,
}

impl Waits {
    fn word(self) -> u64 {
        if self == Self::AsTask { TASK } else { 0 }
    }
}

impl Who {
    fn word(self) -> u64 {
        match self {
            Self::Leader(waits) => LED + waits.word(),
            Self::Follower(waits) => FOLLOWER + waits.word(),
        }
    }
}

/// What leaving left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Left {
    /// Others want it still, or it was closed before.
    Others,
    /// Only threads want it still: one of them may have to poll the future.
    Threads,
    /// Nobody wants it: it is closed now, and the one who left must give the slot back.
    Nobody,
}

impl Interest {
    /// The leader's, who is a thread until it says otherwise.
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(LED))
    }

    /// The leader waits as a task from now on.
    pub(super) fn leader_is_task(&self) {
        self.0.fetch_add(TASK, Ordering::Relaxed);
    }

    /// Counts a follower in. `false` if it is closed: the slot has moved on, or is to be moved on.
    #[must_use]
    pub(super) fn join(&self, waits: Waits) -> bool {
        let mut seen = self.0.load(Ordering::Relaxed);
        while seen & CLOSED == 0 {
            let wanted = seen + Who::Follower(waits).word();
            match self.0.compare_exchange_weak(seen, wanted, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }

    /// Counts one out.
    pub(super) fn leave(&self, who: Who) -> Left {
        let mut seen = self.0.load(Ordering::Relaxed);
        // Once it is closed, the load has ended, and nobody counts any more: a crowd need not come by here one after the other.
        while seen & CLOSED == 0 {
            let left = seen - who.word();
            let wanted = if left == 0 { CLOSED } else { left };
            match self.0.compare_exchange_weak(seen, wanted, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) if left == 0 => return Left::Nobody,
                Ok(_) if seen & TASKS != 0 && left & TASKS == 0 => return Left::Threads,
                Ok(_) => return Left::Others,
                Err(now) => seen = now,
            }
        }
        Left::Others
    }

    /// Closes it, and tells how many followers there are.
    pub(super) fn close(&self) -> usize {
        followers(self.0.fetch_or(CLOSED, Ordering::Relaxed))
    }

    /// How many follow now.
    pub(super) fn followers(&self) -> usize {
        followers(self.0.load(Ordering::Relaxed))
    }

    /// Whether a task wants it.
    pub(super) fn has_tasks(&self) -> bool {
        self.0.load(Ordering::Relaxed) & TASKS != 0
    }
}

fn followers(word: u64) -> usize {
    (word & FOLLOWERS) as usize
}
