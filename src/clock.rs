//! Time: the port, the coarse monotonic default, and a clock that tests move by hand.
//!
//! Inside quell an instant is a [`Moment`]; a `Duration` is always a length of time.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::primitive::plain::{AtomicU64, Ordering};

/// What a clock calls after it has moved, see [`Clock::subscribe`].
pub type Wake = Box<dyn Fn() + Send + Sync + 'static>;

/// A source of monotonic time.
pub trait Clock: Send + Sync + 'static {
    /// The time since any fixed start. It must never go back; a cache reads it on nearly every call.
    ///
    /// A cache counts 292 years from that start: a soft deadline after that is taken to be at their end.
    fn now(&self) -> Duration;

    /// Asks to be woken whenever the time has moved.
    ///
    /// Return `true` if this clock moves by calls alone: it must then call `wake` after each move, and those
    /// who wait for a deadline park until it does. With `false`, the default, they park for the difference in
    /// real time. `wake` returns `()` and may be called from any thread.
    fn subscribe(&self, wake: Wake) -> bool {
        let _ = wake;
        false
    }
}

/// An instant of a cache's clock, in nanoseconds from its start. Arithmetic saturates: [`Moment::NEVER`] stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Moment(u64);

impl Moment {
    pub(crate) const NEVER: Self = Self(u64::MAX);

    #[inline]
    pub(crate) const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    #[inline]
    pub(crate) const fn nanos(self) -> u64 {
        self.0
    }

    /// Whether `deadline` has not come. `NEVER` does not even come at the clock's end.
    #[inline]
    pub(crate) fn is_before(self, deadline: Self) -> bool {
        self < deadline || deadline == Self::NEVER
    }

    #[inline]
    pub(crate) fn plus(self, length: Duration) -> Self {
        Self(self.0.saturating_add(saturating_nanos(length)))
    }

    /// The time from `earlier` to `self`, zero if there is none.
    #[inline]
    pub(crate) fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// A length in nanoseconds; more than 584 years count as for ever.
pub(crate) fn saturating_nanos(length: Duration) -> u64 {
    u64::try_from(length.as_nanos()).unwrap_or(u64::MAX)
}

/// The clock of one cache: the default is asked without a virtual call.
#[derive(Clone)]
pub(crate) enum Time {
    Coarse,
    Given { clock: Arc<dyn Clock>, by_hand: bool },
}

impl Time {
    /// Now, at the clock's own resolution (4 ms for the default).
    #[inline]
    pub(crate) fn now(&self) -> Moment {
        match self {
            Self::Coarse => coarse::now(),
            Self::Given { clock, .. } => Moment(saturating_nanos(clock.now())),
        }
    }

    /// Now, if the clock is a given one.
    pub(crate) fn given_now(&self) -> Option<Moment> {
        matches!(self, Self::Given { .. }).then(|| self.now())
    }

    /// Now, as exactly as can be had: for measuring how long a load took.
    pub(crate) fn precise(&self) -> Moment {
        match self {
            Self::Coarse => coarse::precise(),
            Self::Given { .. } => self.now(),
        }
    }

    /// Whether it moves by calls alone.
    pub(crate) fn is_moved_by_hand(&self) -> bool {
        matches!(self, Self::Given { by_hand: true, .. })
    }

    /// How long to park in real time for `deadline`; `None` if only the clock's own wake-up can bring it, or nothing.
    pub(crate) fn real_time_until(&self, deadline: Moment) -> Option<Duration> {
        match self {
            Self::Given { by_hand: true, .. } => None,
            _ if deadline == Moment::NEVER => None,
            _ => Some(deadline.since(self.precise())),
        }
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Coarse => "Coarse",
            Self::Given { by_hand: true, .. } => "ByHand",
            Self::Given { .. } => "Given",
        })
    }
}

/// The default: the kernel's coarse monotonic clock. It is updated once per scheduler tick and read without a
/// system call and without a store, which `Instant::now` is too dear for.
#[cfg(target_os = "linux")]
mod coarse {
    use super::Moment;
    use rustix::time::{ClockId, Timespec, clock_gettime};

    fn moment(t: Timespec) -> Moment {
        // The kernel's monotonic time is not negative and fits for the next 584 years.
        Moment((t.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(t.tv_nsec as u64))
    }

    #[inline]
    pub(super) fn now() -> Moment {
        moment(clock_gettime(ClockId::MonotonicCoarse))
    }

    pub(super) fn precise() -> Moment {
        moment(clock_gettime(ClockId::Monotonic))
    }
}

#[cfg(not(target_os = "linux"))]
mod coarse {
    use super::{Moment, saturating_nanos};
    use std::sync::OnceLock;
    use std::time::Instant;

    #[allow(clippy::disallowed_methods, reason = "this is the room the ban points to")]
    pub(super) fn now() -> Moment {
        static START: OnceLock<Instant> = OnceLock::new();
        Moment(saturating_nanos(START.get_or_init(Instant::now).elapsed()))
    }

    pub(super) fn precise() -> Moment {
        now()
    }
}

/// A clock that stands still until it is moved: for tests, and for replaying time. Clones share the time.
///
/// Whatever waits for a deadline of a cache with this clock (a lease, a `wait_timeout`) is woken by the move
/// that reaches the deadline.
///
/// ```
/// use quell::{Cache, ManualClock};
/// use std::time::Duration;
///
/// let clock = ManualClock::new();
/// let cache = Cache::builder().time_to_live(Duration::from_secs(60)).clock(clock.clone()).build();
/// cache.insert("a", 1);
/// clock.advance(Duration::from_secs(59));
/// assert_eq!(cache.get("a"), Some(1));
/// clock.advance(Duration::from_secs(1));
/// assert_eq!(cache.get("a"), None);
/// ```
#[derive(Clone, Default)]
pub struct ManualClock(Arc<Hands>);

#[derive(Default)]
struct Hands {
    now: AtomicU64,
    wakes: subscribers::Subscribers,
}

impl ManualClock {
    /// A clock that stands at zero.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Moves the time on by `length`; it stops at 584 years.
    pub fn advance(&self, length: Duration) {
        let nanos = saturating_nanos(length);
        // SeqCst: the move comes before the wake-up's look at who waits; a waiter registers before it reads the time
        // again. One of the two sees the other.
        let _ = self
            .0
            .now
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| Some(now.saturating_add(nanos)));
        self.0.wakes.wake();
    }

    /// Moves the time to `now` after the clock's start. A time that has passed already changes nothing: a
    /// monotonic clock does not go back.
    pub fn set(&self, now: Duration) {
        // SeqCst: as in `advance`.
        self.0.now.fetch_max(saturating_nanos(now), Ordering::SeqCst);
        self.0.wakes.wake();
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        // SeqCst: the waiter's second look, see `advance`.
        Duration::from_nanos(self.0.now.load(Ordering::SeqCst))
    }

    fn subscribe(&self, wake: Wake) -> bool {
        self.0.wakes.add(wake);
        true
    }
}

impl fmt::Debug for ManualClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ManualClock").field(&self.now()).finish()
    }
}

/// Whom a manual clock wakes. A move of the time is no path of a cache, so an ordinary lock will do.
#[allow(
    clippy::disallowed_types,
    reason = "no path of a cache takes it: only a test's call that moves the time"
)]
mod subscribers {
    use super::Wake;
    use std::sync::{Arc, Mutex, PoisonError};

    #[derive(Default)]
    pub(super) struct Subscribers(Mutex<Vec<Arc<Wake>>>);

    impl Subscribers {
        pub(super) fn add(&self, wake: Wake) {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::new(wake));
        }

        pub(super) fn wake(&self) {
            let wakes = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
            for wake in wakes {
                wake();
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn moments_saturate() {
        let m = Moment::from_nanos(5);
        assert_eq!(m.plus(Duration::MAX), Moment::NEVER);
        assert_eq!(m.plus(Duration::ZERO), m);
        assert_eq!(m.since(Moment::NEVER), Duration::ZERO);
    }

    #[test]
    fn a_manual_clock_never_goes_back_and_wakes() {
        let woken = Arc::new(AtomicU64::new(0));
        let clock = ManualClock::new();
        let seen = woken.clone();
        assert!(clock.subscribe(Box::new(move || {
            seen.fetch_add(1, Ordering::Relaxed);
        })));
        clock.advance(Duration::from_secs(2));
        clock.set(Duration::from_secs(1));
        assert_eq!(clock.now(), Duration::from_secs(2));
        clock.advance(Duration::MAX);
        clock.advance(Duration::MAX);
        assert_eq!(clock.now(), Duration::from_nanos(u64::MAX));
        assert_eq!(woken.load(Ordering::Relaxed), 4);
    }

    #[test]
    fn the_coarse_clock_is_not_ahead_of_the_precise_one() {
        let time = Time::Coarse;
        let coarse = time.now();
        assert!(coarse <= time.precise());
        assert!(time.precise().since(coarse) < Duration::from_secs(1));
    }
}
