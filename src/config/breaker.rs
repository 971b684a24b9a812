//! When a failing source is left alone.

use crate::error::BuildError;
use std::time::Duration;

/// The most loads that `min_loads` can ask for.
const MOST_LOADS: u32 = 500_000;

/// When the loads of a cache fail so often that its source is left alone for a while, see
/// [`CacheBuilder::breaker`](crate::CacheBuilder::breaker).
///
/// # Examples
/// ```
/// use quell::{Breaker, Cache};
/// use std::time::Duration;
///
/// let breaker = Breaker::new(0.5).min_loads(100).pause(Duration::from_secs(2));
/// let cache = Cache::<u64, u64>::builder().breaker(breaker).build();
/// assert!(!cache.stats().breaker_open);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Breaker {
    pub(crate) failure_rate: f64,
    pub(crate) window: Duration,
    pub(crate) min_loads: u32,
    pub(crate) pause: Duration,
}

impl Breaker {
    /// Opens when at least this part of the loads fails. Above 0, up to 1.
    #[must_use]
    pub const fn new(failure_rate: f64) -> Self {
        let (window, pause) = (Duration::from_secs(10), Duration::from_secs(5));
        Self { failure_rate, window, min_loads: 20, pause }
    }

    /// Over how long the rate is taken. More than zero. Default: 10 s.
    #[must_use]
    pub const fn window(mut self, window: Duration) -> Self {
        self.window = window;
        self
    }

    /// Of how many loads within the window a rate is taken, at least. From 1 to 500,000. Default: 20.
    #[must_use]
    pub const fn min_loads(mut self, loads: u32) -> Self {
        self.min_loads = loads;
        self
    }

    /// How long after a failure the source is left alone. More than zero. Default: 5 s.
    #[must_use]
    pub const fn pause(mut self, pause: Duration) -> Self {
        self.pause = pause;
        self
    }

    pub(crate) fn check(&self) -> Result<(), BuildError> {
        let rule = if !(self.failure_rate > 0.0 && self.failure_rate <= 1.0) {
            "a `failure_rate` above 0, up to 1"
        } else if self.window.is_zero() || self.pause.is_zero() {
            "a `window` and a `pause` of more than zero"
        } else if !(1..=MOST_LOADS).contains(&self.min_loads) {
            "`min_loads` from 1 to 500000"
        } else {
            return Ok(());
        };
        Err(BuildError::new("breaker", format!("{self:?}"), rule))
    }
}
