//! When a value is fresh, stale, in grace or dead: pure functions of times, now and chance.
//!
//! ```text
//!   born            soft                hard                    hard + grace
//!    ├──── fresh ────┼────── stale ──────┼───────── grace ──────────┼──── dead
//!    │ served        │ served, refreshed │ only when the load fails │ as if it
//!    │               │ by one            │ or the wait ends         │ were not there
//! ```
//! A value's times never change once it is published: a new opinion about them is a new value.
//!
//! # The stored form
//! Every cell has a [`Times`], so it is packed into 16 bytes. A hit looks at `soft` alone.
//!
//! | field | bits | fresh for a while | fresh for ever |
//! |---|---|---|---|
//! | `soft` | 1 | 0 | 1, [`ENDLESS`] |
//! | | 63 | the soft deadline | the birth |
//! | `lived` | 32 | the [`Span`] from the birth to the soft deadline | unused |
//! | `left` | 32 | the [`Span`] from the soft to the hard deadline | for ever |
//!
//! The soft deadline is exact, and so is the birth of what is fresh for ever. Spans are rounded down, if at all: the
//! hard deadline is never later than asked for, and the birth never earlier, so that what was just born is never old.
//!
//! 63 bits of nanoseconds end in the clock's 293rd year. A value with a soft deadline after that is stale from
//! [`LAST`] on: it is fresh for too short a time, never for too long.

use std::time::Duration;

use crate::clock::{Moment, saturating_nanos};

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

/// A TTL of a cache as one word; for ever, which `None` is too, is the last.
pub(crate) fn word_of(ttl: Option<Duration>) -> u64 {
    ttl.map_or(u64::MAX, saturating_nanos)
}

/// The TTL that a word stands for.
pub(crate) fn length_of(word: u64) -> Option<Duration> {
    (word != u64::MAX).then(|| Duration::from_nanos(word))
}

/// The times of a value, in the form of the module's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Times {
    soft: u64,
    lived: Span,
    left: Span,
}

const _: () = assert!(size_of::<Times>() == 16, "every cell has one");

/// The bit of `soft` that says: there is no deadline, and the rest is the birth. Set at birth and never cleared;
/// [`Times::expired`] makes other times without it. No instant that is stored reaches it.
const ENDLESS: u64 = 1 << 63;

/// The last instant that `soft` can hold, 292 years after the clock's start. Later ones are taken for it.
const LAST: u64 = ENDLESS - 1;

/// The smaller one. (`Ord::min` is not `const`.)
const fn earlier(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}

/// A length of time in 32 bits, rounded down.
///
/// | codes | lengths |
/// |---|---|
/// | below 2^26 | that many nanoseconds |
/// | `e * 2^26 + m`, `e` from 1 to 38 | `(2^26 + m) * 2^(e - 1)` ns: 27 bits of it |
/// | from `39 * 2^26` | whole seconds from zero on |
/// | the last | for ever |
///
/// So all below 2^27 ns (134 ms) and all whole seconds up to 53 years are exact, and the rest loses less than one
/// part in 2^26. A longer length never comes out shorter than a shorter one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span(u32);

impl Span {
    const ZERO: Self = Self(0);
    const FOR_EVER: Self = Self(u32::MAX);
    /// Bits of `m`.
    const MANTISSA: u32 = 26;
    /// The code of zero whole seconds; those before it are enough for every `u64` of nanoseconds.
    const SECONDS: u32 = (u64::BITS - Self::MANTISSA + 1) << Self::MANTISSA;
    const MOST_SECONDS: u64 = (Self::FOR_EVER.0 - 1 - Self::SECONDS) as u64;
    const SECOND: u64 = 1_000_000_000;

    /// The longest span that is not longer than `nanos`.
    const fn floor(nanos: u64) -> Self {
        let binary = Self::binary(nanos);
        let seconds = earlier(nanos / Self::SECOND, Self::MOST_SECONDS);
        if seconds * Self::SECOND > binary.nanos() { Self(Self::SECONDS + seconds as u32) } else { binary }
    }

    /// The same, without the whole seconds.
    const fn binary(nanos: u64) -> Self {
        let shift = (nanos | 1).ilog2().saturating_sub(Self::MANTISSA);
        // The highest of the 27 bits carries into `e`, which is `shift + 1` by that, or zero if there is no such bit.
        Self((shift << Self::MANTISSA) + (nanos >> shift) as u32)
    }

    /// `u64::MAX` for ever.
    const fn nanos(self) -> u64 {
        match self.0 {
            u32::MAX => u64::MAX,
            code if code >= Self::SECONDS => (code - Self::SECONDS) as u64 * Self::SECOND,
            code => {
                let shift = (code >> Self::MANTISSA).saturating_sub(1);
                ((code - (shift << Self::MANTISSA)) as u64) << shift
            }
        }
    }
}

const _: () = assert!(Span::binary(u64::MAX).0 + 1 == Span::SECONDS, "no code means two lengths");

/// What may be done with a value now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    Fresh,
    Stale,
    Grace,
    Dead,
}

impl Times {
    /// Of a value that is fresh before `soft` and served before `hard`; `soft` counts only as far as `hard`.
    pub(crate) const fn new(born: Moment, soft: Moment, hard: Moment) -> Self {
        let (born, hard) = (born.nanos(), hard.nanos());
        let soft = earlier(soft.nanos(), hard);
        if soft == Moment::NEVER.nanos() {
            return Self { soft: ENDLESS | earlier(born, LAST), lived: Span::ZERO, left: Span::FOR_EVER };
        }
        let soft = earlier(soft, LAST);
        let left = if hard == Moment::NEVER.nanos() { Span::FOR_EVER } else { Span::floor(hard - soft) };
        Self { soft, lived: Span::floor(soft.saturating_sub(born)), left }
    }

    /// Fresh before this. Never after `hard`.
    #[inline]
    pub(crate) fn soft(&self) -> Moment {
        if self.never_end() { Moment::NEVER } else { Moment::from_nanos(self.soft) }
    }

    /// Served before this. Not later than asked for, and earlier by less than 2^-26 of the time since `soft`.
    pub(crate) fn hard(&self) -> Moment {
        if self.never_end() {
            Moment::NEVER
        } else {
            Moment::from_nanos(self.soft.saturating_add(self.left.nanos()))
        }
    }

    /// Not before the true birth, and later by less than 2^-26 of the time from it to `soft`: it may be yet to come. A
    /// birth after [`LAST`] is taken for that.
    pub(crate) fn born(&self) -> Moment {
        Moment::from_nanos(if self.never_end() {
            self.soft & !ENDLESS
        } else {
            self.soft.saturating_sub(self.lived.nanos())
        })
    }

    /// Whether they are fresh; the clock is read only if it matters.
    #[inline(always)]
    pub(crate) fn are_fresh(&self, now: impl FnOnce() -> Moment) -> bool {
        let soft = self.soft;
        soft & ENDLESS != 0 || now().nanos() < soft
    }

    /// The stage at `now`, where a dead value is kept in grace for `grace`.
    #[inline]
    pub(crate) fn stage(&self, now: Moment, grace: Duration) -> Stage {
        if self.are_fresh(|| now) {
            Stage::Fresh
        } else if now.is_before(self.hard()) {
            Stage::Stale
        } else if now.is_before(self.hard().plus(grace)) {
            Stage::Grace
        } else {
            Stage::Dead
        }
    }

    /// Whether three quarters of the time in which it is stale have passed.
    pub(crate) fn is_soon_dead(&self, now: Moment) -> bool {
        let (soft, hard) = (self.soft(), self.hard());
        hard != Moment::NEVER && now.since(soft) >= hard.since(soft) / 4 * 3
    }

    /// Whether no clock needs to be read to judge them.
    #[inline]
    pub(crate) fn never_end(&self) -> bool {
        self.soft & ENDLESS != 0
    }

    /// The same value, stale from `now` on. Its spans are rounded once more if they change at all.
    pub(crate) fn expired(self, now: Moment) -> Self {
        if now < self.soft() { Self::new(self.born(), now, self.hard()) } else { self }
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
    /// The same with this jitter at least.
    pub(crate) fn spread(self, jitter: f64) -> Self {
        Self { jitter: self.jitter.max(jitter), ..self }
    }

    /// The times of a value born now. `own` goes before the cache's settings; `chance` is from `[0, 1)`.
    pub(crate) fn times(&self, own: Ttl, now: Moment, chance: impl FnOnce() -> f64) -> Times {
        let hard = own.hard.or(self.ttl.hard);
        let soft = own.soft.or(self.ttl.soft).or(hard);
        let factor = if self.jitter > 0.0 && soft.is_some() { 1.0 - self.jitter * chance() } else { 1.0 };
        let end = |ttl: Option<Duration>| ttl.map_or(Moment::NEVER, |ttl| now.plus(scaled(ttl, factor)));
        Times::new(now, end(soft), end(hard))
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

/// How long after a failed load of a key the next one may start: twice as long after each failure, up to a cap, and each time
/// shortened at random, so that keys which failed together are not tried again together (Brooker, *Exponential Backoff And
/// Jitter*, 2015).
///
/// ```
/// use quell::{Backoff, Cache};
/// use std::time::Duration;
///
/// let backoff = Backoff::exponential(Duration::from_millis(50), Duration::from_secs(30));
/// let cache = Cache::<u64, u64>::builder().error_backoff(backoff).build();
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backoff {
    pub(crate) first: Duration,
    pub(crate) cap: Duration,
    pub(crate) jitter: f64,
}

impl Backoff {
    /// `first` after one failure, then twice as long after each, `cap` at most. With a jitter of 0.5.
    #[must_use]
    pub const fn exponential(first: Duration, cap: Duration) -> Self {
        Self { first, cap, jitter: 0.5 }
    }

    /// The same length after each failure, without jitter.
    #[must_use]
    pub const fn constant(length: Duration) -> Self {
        Self { first: length, cap: length, jitter: 0.0 }
    }

    /// Each pause is scaled by a random factor from `(1 - jitter, 1]`. From 0 to 1.
    #[must_use]
    pub const fn jitter(mut self, jitter: f64) -> Self {
        self.jitter = jitter;
        self
    }

    /// The pause after that many failures in a row, the first being 1; `chance` is from `[0, 1)`.
    pub(crate) fn pause(&self, failures: u32, chance: f64) -> Duration {
        // No length can be doubled more often and be more than zero and less than the longest.
        let doublings = failures.saturating_sub(1).min(u32::BITS * 3);
        let whole = (0..doublings).fold(self.first, |pause, _| pause.saturating_mul(2)).min(self.cap);
        scaled(whole, 1.0 - self.jitter * chance)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NEVER: Moment = Moment::NEVER;

    fn at(secs: u64) -> Moment {
        Moment::from_nanos(0).plus(Duration::from_secs(secs))
    }

    fn ttl(soft: Option<u64>, hard: Option<u64>) -> Ttl {
        Ttl { soft: soft.map(Duration::from_secs), hard: hard.map(Duration::from_secs) }
    }

    fn nano(nanos: u64) -> Moment {
        Moment::from_nanos(nanos)
    }

    fn parts(times: Times) -> (Moment, Moment, Moment) {
        (times.born(), times.soft(), times.hard())
    }

    /// What a span makes of a length.
    fn floored(nanos: u64) -> u64 {
        Span::floor(nanos).nanos()
    }

    /// Whether `got` is `asked`, or less by less than 2^-26 of it.
    fn just_below(got: u64, asked: u64) -> bool {
        got == asked || (got < asked && u128::from(asked - got) << 26 < u128::from(asked))
    }

    /// Whether the hard deadline is the one `asked` for, or just before it.
    fn is_served_until(times: &Times, asked: Moment) -> bool {
        let after_soft = |end: Moment| end.nanos() - times.soft().nanos();
        if asked == NEVER {
            times.hard() == NEVER
        } else {
            just_below(after_soft(times.hard()), after_soft(asked))
        }
    }

    /// Numbers of all magnitudes, and those next to a power of two or a number of seconds.
    fn nanos() -> impl Strategy<Value = u64> {
        let near = (0..64_u32, -2..=2_i64).prop_map(|(bit, off)| (1_u64 << bit).saturating_add_signed(off));
        let seconds = (any::<u64>(), 30..64_u32, -1..=1_i64)
            .prop_map(|(n, shift, off)| ((n >> shift) * Span::SECOND).saturating_add_signed(off));
        prop_oneof![
            4 => (any::<u64>(), 0..64_u32).prop_map(|(n, shift)| n >> shift),
            2 => near,
            2 => seconds,
            1 => Just(u64::MAX),
        ]
    }

    #[test]
    fn stages_follow_each_other() {
        let times = Times::new(at(0), at(10), at(20));
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
        assert_eq!(parts(times(Ttl::default())), (at(100), at(110), at(120)));
        assert_eq!(parts(times(ttl(None, Some(5)))), (at(100), at(105), at(105)));
        assert_eq!(parts(times(ttl(Some(1), Some(50)))), (at(100), at(101), at(150)));
        let forever = Lifetime { ttl: Ttl::default(), jitter: 0.0 }.times(Ttl::default(), at(1), || 0.0);
        assert!(forever.never_end() && forever.stage(Moment::NEVER, Duration::ZERO) == Stage::Fresh);
        let soft_only =
            Lifetime { ttl: ttl(Some(10), None), jitter: 0.0 }.times(Ttl::default(), at(0), || 0.0);
        assert_eq!((soft_only.soft(), soft_only.hard()), (at(10), Moment::NEVER));
    }

    #[test]
    fn edge_lengths_are_legal() {
        let cache = Lifetime { ttl: Ttl { soft: None, hard: Some(Duration::MAX) }, jitter: 0.5 };
        for chance in [0.0, 0.5, 0.999] {
            assert_eq!(cache.times(Ttl::default(), at(5), || chance).hard(), Moment::NEVER);
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
            let (soft, hard) = (t.soft().nanos() as f64, t.hard().nanos() as f64);
            assert!((hard / soft - 2.0).abs() < 1e-6);
            assert!(hard <= 200e9 && hard > 160e9, "{hard}");
        }
    }

    #[test]
    fn common_lengths_are_exact() {
        const MINUTE: u64 = 60 * Span::SECOND;
        const DAY: u64 = 24 * 60 * MINUTE;
        let ms = |n: u64| n * 1_000_000;
        // All below 2^27 ns, all whole milliseconds below 8.5 s, all whole seconds below 53 years.
        let exact = [0, 1, 2, 999, ms(1), ms(100), (1 << 27) - 1, ms(200), ms(999), ms(8_500)];
        let seconds = [1, 30, 60, 90, 5 * 60, 10 * 60, 3_599, 3_600].map(|n| n * Span::SECOND);
        let days = [1, 7, 30, 365, 53 * 365].map(|n| n * DAY);
        let halves = [1_500, 10_500, 33_500].map(ms);
        for nanos in exact.into_iter().chain(seconds).chain(days).chain(halves) {
            assert_eq!(floored(nanos), nanos);
        }
        for nanos in (0..1 << 27).step_by(997) {
            assert_eq!(floored(nanos), nanos);
        }
        for second in (0..=Span::MOST_SECONDS).step_by(4_999).chain([Span::MOST_SECONDS]) {
            assert_eq!(floored(second * Span::SECOND), second * Span::SECOND);
        }
        // 2^27 is the first of the lengths of which only every second one is exact, up to 2^28.
        let from = 1 << 27;
        assert_eq!([0, 1, 2, 3].map(|n| floored(from + n)), [from, from, from + 2, from + 2]);
        // Far from a whole second the binary form is the closer one.
        assert_eq!(floored(DAY + ms(500)), (DAY + ms(500)) >> 20 << 20);
        assert_eq!(floored(DAY + 1), DAY);
    }

    #[test]
    fn spans_reach_as_far_as_the_clock() {
        assert_eq!(floored(u64::MAX), u64::MAX >> 37 << 37);
        assert_eq!(Span::FOR_EVER.nanos(), u64::MAX);
        assert_ne!(Span::floor(u64::MAX), Span::FOR_EVER);
        let years = |n: u64| n * 365 * 86_400 * Span::SECOND;
        for n in [50, 53, 54, 100, 292, 500, 584] {
            assert!(just_below(floored(years(n)), years(n)), "{n}");
            assert!(just_below(floored(years(n) - 1), years(n) - 1), "{n}");
        }
        let last = Span::MOST_SECONDS * Span::SECOND;
        assert_eq!(Span::floor(last), Span(u32::MAX - 1));
        assert!(just_below(floored(last + Span::SECOND), last + Span::SECOND));
    }

    #[test]
    fn what_never_ends_keeps_its_birth() {
        let all = [0, 1, 12_345, LAST].map(nano);
        for born in all {
            let times = Times::new(born, NEVER, NEVER);
            assert_eq!(parts(times), (born, NEVER, NEVER));
            assert!(times.never_end() && times.are_fresh(|| unreachable!("no clock is read")));
            for now in all.into_iter().chain([NEVER]) {
                assert_eq!(times.stage(now, Duration::ZERO), Stage::Fresh);
            }
        }
        // A soft deadline of never is that of the hard one.
        assert_eq!(parts(Times::new(at(1), NEVER, at(9))), (at(1), at(9), at(9)));
        assert_eq!(parts(Times::new(at(1), at(12), at(9))), (at(1), at(9), at(9)));
        let stale = Times::new(at(1), at(2), NEVER);
        assert_eq!(parts(stale), (at(1), at(2), NEVER));
        assert!(!stale.never_end() && stale.stage(NEVER, Duration::ZERO) == Stage::Stale);
    }

    #[test]
    fn expired_is_stale_from_now_on() {
        let times = Times::new(at(10), at(20), at(30));
        assert_eq!(parts(times.expired(at(13))), (at(10), at(13), at(30)));
        assert_eq!(parts(times.expired(at(13)).expired(at(15))), (at(10), at(13), at(30)));
        assert_eq!(parts(times.expired(at(10))), (at(10), at(10), at(30)));
        // A clock that stood still at zero, and one that has gone back.
        assert_eq!(parts(Times::new(at(0), at(5), at(9)).expired(at(0))), (at(0), at(0), at(9)));
        assert_eq!(parts(times.expired(at(3))), (at(3), at(3), at(30)));
        assert_eq!(times.expired(at(20)), times);
        let endless = Times::new(at(10), NEVER, NEVER);
        assert_eq!(parts(endless.expired(at(15))), (at(10), at(15), NEVER));
        assert_eq!(endless.expired(at(15)).stage(at(15), Duration::ZERO), Stage::Stale);
        assert_eq!(endless.expired(NEVER), endless);
    }

    #[test]
    fn tiny_ttls_are_not_rounded_away() {
        for born in [0, 1, Span::SECOND, LAST - 3].map(nano) {
            let [one, two, three] = [1, 2, 3].map(|n| born.plus(Duration::from_nanos(n)));
            for (soft, hard) in [(born, one), (one, one), (one, two), (two, three), (one, three)] {
                assert_eq!(parts(Times::new(born, soft, hard)), (born, soft, hard));
            }
        }
    }

    #[test]
    fn late_clocks_end_what_would_outlive_them() {
        let edges = [0, 1, LAST - 1, LAST, LAST + 1, LAST + 2, u64::MAX - 1, u64::MAX];
        for n in 0..512 {
            let [born, soft, hard] = [n / 64, n / 8 % 8, n % 8].map(|n| edges[n]);
            let times = Times::new(nano(born), nano(soft), nano(hard));
            let (b, s, h) = parts(times);
            assert!(b <= s && b >= nano(born.min(LAST)).min(s), "{born} {soft} {hard}");
            assert!(s <= h && h <= nano(hard), "{born} {soft} {hard}");
            let asked = soft.min(hard);
            assert_eq!(s, if asked == u64::MAX { NEVER } else { nano(asked.min(LAST)) });
            let mut last = Stage::Fresh;
            for now in edges.map(nano) {
                let stage = times.stage(now, Duration::ZERO);
                assert!(stage >= last, "{born} {soft} {hard} {now:?}");
                last = stage;
                let expired = times.expired(now);
                let (b, s, h) = parts(expired);
                assert!(b <= s && s <= h && s <= times.soft() && h <= times.hard());
                assert!(now == NEVER || expired.stage(now, Duration::ZERO) != Stage::Fresh);
            }
        }
        // A TTL beyond the end of `soft`: the hard deadline stays.
        let (soft, hard) = (nano(LAST).plus(Duration::from_secs(5)), nano(LAST).plus(Duration::from_secs(9)));
        assert_eq!(parts(Times::new(at(0), soft, hard)), (nano(floored(LAST) ^ LAST), nano(LAST), hard));
    }

    #[test]
    fn pauses_double_until_the_cap() {
        let secs = Duration::from_secs;
        let pauses = |backoff: Backoff, n: std::ops::RangeInclusive<u32>| -> Vec<Duration> {
            n.map(|failures| backoff.jitter(0.0).pause(failures, 0.5)).collect()
        };
        let usual = Backoff::exponential(secs(1), secs(5));
        assert_eq!(pauses(usual, 0..=5), [1, 1, 2, 4, 5, 5].map(secs));
        assert_eq!(pauses(usual, u32::MAX - 1..=u32::MAX), [5, 5].map(secs));
        assert_eq!(usual.pause(2, 0.5), Duration::from_millis(1_500));
        let nano = Backoff::exponential(Duration::from_nanos(1), Duration::MAX);
        assert_eq!(pauses(nano, 32..=34), [31, 32, 33].map(|bit| Duration::from_nanos(1 << bit)));
        assert_eq!(pauses(nano, 1_000..=1_000), [Duration::MAX]);
        assert_eq!(pauses(Backoff::exponential(Duration::ZERO, secs(5)), 1..=100), [Duration::ZERO; 100]);
        assert_eq!(pauses(Backoff::constant(Duration::MAX), 1..=3), [Duration::MAX; 3]);
    }

    proptest! {
        #[test]
        fn spans_round_down_and_just_so(nanos in nanos()) {
            prop_assert!(just_below(floored(nanos), nanos));
            prop_assert_eq!(floored(floored(nanos)), floored(nanos));
        }

        #[test]
        fn spans_keep_the_order(a in nanos(), b in nanos(), near in 0..1_u64 << 40) {
            prop_assert!(floored(a.min(b)) <= floored(a.max(b)));
            prop_assert!(floored(a) <= floored(a.saturating_add(near)));
        }

        #[test]
        fn every_code_is_the_span_of_its_length(code in 0..u32::MAX) {
            prop_assert_eq!(floored(Span(code).nanos()), Span(code).nanos());
        }

        #[test]
        fn stored_times_are_those_asked_for(born in nanos(), soft in nanos(), hard in nanos(), now in nanos()) {
            let born = nano(born >> 2);
            let (soft, hard) = (Duration::from_nanos(soft), Duration::from_nanos(hard));
            let (soft, hard) = (born.plus(soft.min(hard)), born.plus(hard));
            let times = Times::new(born, soft, hard);
            let exact = if soft == NEVER { NEVER } else { soft.min(nano(LAST)) };
            prop_assert_eq!(times.soft(), exact);
            prop_assert!(is_served_until(&times, hard));
            if soft == NEVER {
                prop_assert_eq!(times.born(), born);
            } else {
                let lived = exact.nanos() - born.nanos();
                prop_assert!(just_below(exact.nanos() - times.born().nanos(), lived));
                prop_assert_eq!(times.born() == exact, lived == 0);
                prop_assert_eq!(times.hard() == exact, hard == exact);
            }

            let now = nano(now);
            let expired = times.expired(now);
            if now >= times.soft() {
                prop_assert_eq!(expired, times);
            } else {
                let now = now.min(nano(LAST));
                prop_assert_eq!(expired.soft(), now);
                prop_assert!(is_served_until(&expired, times.hard()));
                let lived = now.since(times.born()).as_nanos() as u64;
                prop_assert!(just_below(now.since(expired.born()).as_nanos() as u64, lived));
            }
        }
    }
}
