//! When a value is fresh, stale, in grace or dead: pure functions of times, now and chance.
//!
//! ```text
//!   born            soft                hard                    hard + grace
//!    ├──── fresh ────┼────── stale ──────┼───────── grace ──────────┼──── dead
//!    │ served        │ served, refreshed │ only when the load fails │ as if it
//!    │               │ by one            │ or the wait ends         │ were not there
//! ```
//! A value's times never change once it is published: a new opinion about them is a new value.

use std::time::Duration;

use crate::clock::Moment;

/// How long one entry lives; what is `None` is the cache's own setting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ttl {
    /// How long it is fresh. Later it is still served, and refreshed.
    pub soft: Option<Duration>,
    /// How long it is served at all.
    pub hard: Option<Duration>,
}

impl Ttl {
    /// These times; where they say nothing, `other`'s.
    pub(crate) fn or(self, other: Self) -> Self {
        Self { soft: self.soft.or(other.soft), hard: self.hard.or(other.hard) }
    }
}

/// The times of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Times {
    /// Fresh before this. Never after `hard`.
    pub(crate) soft: Moment,
    /// Served before this.
    pub(crate) hard: Moment,
    pub(crate) born: Moment,
}

/// What may be done with a value now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    Fresh,
    Stale,
    Grace,
    Dead,
}

impl Times {
    /// The stage at `now`, where a dead value is kept in grace for `grace`.
    #[inline]
    pub(crate) fn stage(&self, now: Moment, grace: Duration) -> Stage {
        if now.is_before(self.soft) {
            Stage::Fresh
        } else if now.is_before(self.hard) {
            Stage::Stale
        } else if now.is_before(self.hard.plus(grace)) {
            Stage::Grace
        } else {
            Stage::Dead
        }
    }

    /// Whether no clock needs to be read to judge them.
    #[inline]
    pub(crate) fn never_end(&self) -> bool {
        self.soft == Moment::NEVER
    }

    /// The same value, stale from `now` on.
    pub(crate) fn expired(self, now: Moment) -> Self {
        Self { soft: self.soft.min(now), ..self }
    }
}

/// The times that a cache gives to its values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lifetime {
    pub(crate) ttl: Ttl,
    /// An entry's soft and hard TTL are scaled by one factor from `(1 - jitter, 1]`.
    pub(crate) jitter: f64,
}

impl Lifetime {
    /// The times of a value born now. `own` goes before the cache's settings; `chance` is from `[0, 1)`.
    pub(crate) fn times(&self, own: Ttl, now: Moment, chance: impl FnOnce() -> f64) -> Times {
        let hard = own.hard.or(self.ttl.hard);
        let soft = own.soft.or(self.ttl.soft).or(hard);
        let factor = if self.jitter > 0.0 && soft.is_some() { 1.0 - self.jitter * chance() } else { 1.0 };
        let end = |ttl: Option<Duration>| ttl.map_or(Moment::NEVER, |ttl| now.plus(scaled(ttl, factor)));
        let hard = end(hard);
        Times { born: now, soft: end(soft).min(hard), hard }
    }
}

/// `length * factor` for a factor up to one, without a detour over floating point where nothing is scaled.
fn scaled(length: Duration, factor: f64) -> Duration {
    if factor >= 1.0 {
        length
    } else {
        Duration::try_from_secs_f64(length.as_secs_f64() * factor).unwrap_or(length)
    }
}

/// How long after a failed load the next one may start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    /// A refresh of a value that is still served, or may be in grace.
    pub(crate) refresh: Duration,
    /// A load that somebody waits for. Zero: nobody is held up.
    pub(crate) load: Duration,
}

impl Backoff {
    /// A failing refresh is tried ten times a second; a caller who needs a value may always try.
    pub(crate) const FIXED: Self = Self { refresh: Duration::from_millis(100), load: Duration::ZERO };
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn at(secs: u64) -> Moment {
        Moment::from_nanos(0).plus(Duration::from_secs(secs))
    }

    fn ttl(soft: Option<u64>, hard: Option<u64>) -> Ttl {
        Ttl { soft: soft.map(Duration::from_secs), hard: hard.map(Duration::from_secs) }
    }

    #[test]
    fn stages_follow_each_other() {
        let times = Times { born: at(0), soft: at(10), hard: at(20) };
        let stage = |s| times.stage(at(s), Duration::from_secs(5));
        assert_eq!(
            [stage(0), stage(9), stage(10), stage(19), stage(20), stage(24), stage(25)],
            [Stage::Fresh, Stage::Fresh, Stage::Stale, Stage::Stale, Stage::Grace, Stage::Grace, Stage::Dead]
        );
        assert_eq!(times.expired(at(3)).stage(at(3), Duration::ZERO), Stage::Stale);
        assert_eq!(times.expired(at(15)), times);
        assert_eq!(times.stage(at(20), Duration::MAX), Stage::Grace);
    }

    #[test]
    fn own_times_go_before_the_caches() {
        let cache = Lifetime { ttl: ttl(Some(10), Some(20)), jitter: 0.0 };
        let times = |own| cache.times(own, at(100), || unreachable!("no jitter, no chance"));
        assert_eq!(times(Ttl::default()), Times { born: at(100), soft: at(110), hard: at(120) });
        assert_eq!(times(ttl(None, Some(5))), Times { born: at(100), soft: at(105), hard: at(105) });
        assert_eq!(times(ttl(Some(1), Some(50))), Times { born: at(100), soft: at(101), hard: at(150) });
        let forever = Lifetime { ttl: Ttl::default(), jitter: 0.0 }.times(Ttl::default(), at(1), || 0.0);
        assert!(forever.never_end() && forever.stage(Moment::NEVER, Duration::ZERO) == Stage::Fresh);
        let soft_only =
            Lifetime { ttl: ttl(Some(10), None), jitter: 0.0 }.times(Ttl::default(), at(0), || 0.0);
        assert_eq!((soft_only.soft, soft_only.hard), (at(10), Moment::NEVER));
    }

    #[test]
    fn edge_lengths_are_legal() {
        let cache = Lifetime { ttl: Ttl { soft: None, hard: Some(Duration::MAX) }, jitter: 0.5 };
        for chance in [0.0, 0.5, 0.999] {
            assert_eq!(cache.times(Ttl::default(), at(5), || chance).hard, Moment::NEVER);
        }
        let zero = cache.times(Ttl { soft: None, hard: Some(Duration::ZERO) }, at(5), || 0.3);
        assert_eq!(zero.stage(at(5), Duration::ZERO), Stage::Dead);
        let tiny = cache.times(Ttl { soft: None, hard: Some(Duration::from_nanos(1)) }, at(5), || 0.0);
        assert_eq!(tiny.stage(at(5), Duration::ZERO), Stage::Fresh);
    }

    #[test]
    fn jitter_scales_both_ttls_by_one_factor_and_never_up() {
        let cache = Lifetime { ttl: ttl(Some(100), Some(200)), jitter: 0.2 };
        for chance in [0.0, 0.25, 0.5, 0.999] {
            let t = cache.times(Ttl::default(), at(0), || chance);
            let (soft, hard) = (t.soft.nanos() as f64, t.hard.nanos() as f64);
            assert!((hard / soft - 2.0).abs() < 1e-6);
            assert!(hard <= 200e9 && hard > 160e9, "{hard}");
        }
    }
}
