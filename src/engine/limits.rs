//! Limits over all keys: how many loads may run at one time, and how many callers may wait.
//!
//! A load's permit belongs to its lease: it is taken before the claim, goes to whoever takes the load over, and is given back
//! when the load ends. Calls that never give up take permits, and are never refused one.

use super::Core;
use super::breaker::Says;
use crate::clock::Moment;
use crate::error::LoadError;
use crate::primitive::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Who asks for a permit to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asks {
    /// A call that never gives up.
    Anyhow,
    /// A call that takes a load over: there is one permit for the two of them.
    TakeOver,
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
            Self::Anyhow | Self::TakeOver => usize::MAX,
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

/// Why a load may not begin.
#[derive(Clone, Copy, Debug)]
pub(super) enum Refusal {
    /// The cache is frozen.
    Frozen,
    /// The breaker is open, for as long as this.
    Failing(Duration),
    /// Too many loads run already.
    Overloaded,
}

impl Refusal {
    /// What is told to a caller who has nothing else to get.
    pub(super) fn error(self) -> LoadError {
        match self {
            Self::Frozen => LoadError::frozen(),
            Self::Failing(left) => LoadError::source_failing(left),
            Self::Overloaded => LoadError::overloaded("max_concurrent_loads"),
        }
    }
}

/// Leave to begin one load. Dropped unused, it is given back.
#[must_use]
pub(super) struct Permit<'c, K, V, S> {
    core: &'c Core<K, V, S>,
    /// As in a [`Claim`](crate::flight::Claim).
    probe: Option<Moment>,
}

impl<K, V, S> Permit<'_, K, V, S> {
    /// For a claim, whose lease gives it back.
    pub(super) fn used(self) -> Option<Moment> {
        let probe = self.probe;
        std::mem::forget(self);
        probe
    }
}

impl<K, V, S> Drop for Permit<'_, K, V, S> {
    fn drop(&mut self) {
        self.core.return_permit(self.probe);
    }
}

impl<K, V, S> Core<K, V, S> {
    /// Takes a permit to load. `is_let_in`: it is a part of a load that has one.
    pub(super) fn admits_load(&self, asks: Asks, is_let_in: bool) -> Result<Permit<'_, K, V, S>, Refusal> {
        let mut probe = None;
        if asks != Asks::Anyhow {
            if self.switches.is_frozen() {
                return Err(Refusal::Frozen);
            }
            match self.ask_breaker() {
                Says::Load => {}
                Says::Probe(until) => probe = Some(until),
                Says::Wait(_) if is_let_in => {}
                Says::Wait(left) => return Err(Refusal::Failing(left)),
            }
        }
        let limit = |max| if is_let_in { usize::MAX } else { asks.limit(max) };
        if self.settings.max_concurrent_loads.is_none_or(|max| count_in(&self.loading.0, limit(max))) {
            return Ok(Permit { core: self, probe });
        }
        self.give_probe_back(probe);
        Err(Refusal::Overloaded)
    }

    /// Gives the permit back of a load that has not begun.
    pub(super) fn return_permit(&self, probe: Option<Moment>) {
        self.load_is_over();
        self.give_probe_back(probe);
    }

    /// One load less is under way.
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
