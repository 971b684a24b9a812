//! Limits over all keys: how many loads may run at one time, and how many callers may wait.
//!
//! A load's permit belongs to its lease: it is taken before the claim, goes to whoever takes the load over, and is given back
//! when the load ends. Calls that never give up take permits, and are never refused one.

use super::Core;
use crate::primitive::atomic::{AtomicUsize, Ordering};

/// Who asks for a permit to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asks {
    /// A call that never gives up, or takes a load over, or one that has been let in with another key.
    Anyhow,
    /// A call that has nothing to serve.
    Foreground,
    /// A refresh of a stale value.
    Background {
        /// The value will soon be served no more.
        urgent: bool,
    },
}

impl Asks {
    /// How many permits may be out before this one, of `max`: the last quarter is for callers who have nothing to serve, and
    /// a quarter before it for values that are soon dead.
    fn limit(self, max: usize) -> usize {
        match self {
            Self::Anyhow => usize::MAX,
            Self::Foreground => max,
            Self::Background { urgent: true } => max - max / 4,
            Self::Background { urgent: false } => max - max / 2,
        }
    }
}

/// Counts one more, if there are fewer than `limit`. One that is refused is never counted: it must not take somebody else's
/// place, not even for a moment.
fn count_in(count: &AtomicUsize, limit: usize) -> bool {
    // Relaxed: a count; nothing is published by it.
    count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < limit).then_some(n + 1)).is_ok()
}

impl<K, V, S> Core<K, V, S> {
    /// Takes a permit to load. `false` if there is none for this one.
    #[must_use]
    pub(super) fn admits_load(&self, asks: Asks) -> bool {
        self.settings.max_concurrent_loads.is_none_or(|max| count_in(&self.loading.0, asks.limit(max)))
    }

    /// Gives a load's permit back.
    pub(super) fn load_is_over(&self) {
        if self.settings.max_concurrent_loads.is_some() {
            // Relaxed: as in `count_in`.
            self.loading.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Counts one in who waits. `false` if there is no room for one who may be refused.
    #[must_use]
    pub(crate) fn admits_waiter(&self, may_be_refused: bool) -> bool {
        let limit = |max| if may_be_refused { max } else { usize::MAX };
        self.settings.max_waiters.is_none_or(|max| count_in(&self.waiting.0, limit(max)))
    }

    /// Counts one out.
    pub(crate) fn waiter_left(&self) {
        if self.settings.max_waiters.is_some() {
            // Relaxed: as in `count_in`.
            self.waiting.0.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
