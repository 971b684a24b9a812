//! Early refresh: a read of a fresh value refreshes it at random, the more probably the nearer its soft deadline is and the
//! longer its load takes, so that a popular key is loaded before it goes stale, by one caller.
//!
//! XFetch (Vattani, Chierichetti and Lowenstein, *Optimal Probabilistic Cache Stampede Prevention*, PVLDB 8(8), 2015): with `t`
//! left and loads that take `delta`, a read fires with probability `exp(-t / (beta * delta))`. A read that fires tries to lead,
//! and never waits.
//!
//! A hit looks at none of this before a window of the cache's own, which is as long as the values need that are there. Time is
//! cut into periods, each as long as the longest life of what came in the one before: so a value has ended by the end of the
//! period after its own, and the window is what the values of two periods need.

use super::Core;
use crate::clock::{Moment, saturating_nanos};
use crate::config::EarlyRefresh;
use crate::freshness::Times;
use crate::primitive::plain::{AtomicU64, Ordering};
use crate::slot::{Slot, Tail};
use std::time::Duration;

/// Beyond so many scales a read fires less than once in 2^64 times: no number is drawn.
const NEVER_FIRES: f64 = 44.4;
/// Where the rate of reads matters, so many are noted of each life of a value,
const NOTED: u32 = 64;
/// and then one of so many.
const SAMPLED: u32 = 16;
/// The window where the reads are to be noted, from the middle of each life on.
const NOTES_READS: u64 = u64::MAX / 2;

/// When reads refresh early. May be changed while the cache is in use.
pub(super) struct Early {
    /// The factor of the scale, or the probability that no read fires: an `f64`, negative for the latter; zero: never.
    setting: AtomicU64,
    /// How long before a soft deadline a hit has to look: nanoseconds.
    window: AtomicU64,
    /// The window that the values of this period need.
    needed: AtomicU64,
    /// Their longest life: nanoseconds.
    longest: AtomicU64,
    /// When the period is over; `NEVER` while somebody begins the next.
    period_end: AtomicU64,
}

impl Early {
    pub(super) fn new(setting: EarlyRefresh) -> Self {
        let early = Self {
            setting: AtomicU64::new(0),
            window: AtomicU64::new(0),
            needed: AtomicU64::new(0),
            longest: AtomicU64::new(0),
            period_end: AtomicU64::new(0),
        };
        early.set(setting);
        early
    }

    pub(super) fn set(&self, setting: EarlyRefresh) {
        let before = self.setting();
        // The scales that have been seen are longer now, or shorter.
        let rescaled = |nanos: &AtomicU64, beta: f64| {
            if before > 0.0 { (nanos.load(Ordering::Relaxed) as f64 / before * beta) as u64 } else { 0 }
        };
        let (number, window, needed) = match setting {
            EarlyRefresh::Off => (0.0, 0, 0),
            EarlyRefresh::Beta(beta) => (beta, rescaled(&self.window, beta), rescaled(&self.needed, beta)),
            EarlyRefresh::MissProbability(p) => (-p, NOTES_READS, 0),
        };
        // Relaxed: a setting, and figures that follow from it.
        self.setting.store(f64::to_bits(number), Ordering::Relaxed);
        self.window.store(window, Ordering::Relaxed);
        self.needed.store(needed, Ordering::Relaxed);
    }

    fn setting(&self) -> f64 {
        // Relaxed: as above.
        f64::from_bits(self.setting.load(Ordering::Relaxed))
    }

    /// Whether any read may fire.
    pub(super) fn is_on(&self) -> bool {
        self.setting() != 0.0
    }

    /// How long before a soft deadline a hit has to look.
    #[inline(always)]
    fn window(&self) -> u64 {
        // Relaxed: as above.
        self.window.load(Ordering::Relaxed)
    }

    /// A value comes whose loads take `cost` nanoseconds: sees to it that hits look at it in time.
    ///
    /// Relaxed throughout: where two come at one time, one may be seen to for a part of its life only.
    fn widen(&self, cost: f64, times: &Times) {
        let (born, soft) = (times.born(), times.soft());
        let beta = self.setting();
        if beta <= 0.0 {
            // Puts right what one that widened it while the setting changed has left.
            let window = if beta < 0.0 { NOTES_READS } else { 0 };
            if self.window() != window {
                self.window.store(window, Ordering::Relaxed);
            }
            return;
        }
        if cost <= 0.0 || soft == Moment::NEVER {
            return;
        }
        let life = saturating_nanos(soft.since(born));
        let end = self.period_end.load(Ordering::Relaxed);
        let next = Moment::NEVER.nanos();
        if end <= born.nanos()
            && self.period_end.compare_exchange(end, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            self.window.store(self.needed.swap(0, Ordering::Relaxed), Ordering::Relaxed);
            let end = born.nanos().saturating_add(self.longest.swap(0, Ordering::Relaxed)).min(next - 1);
            self.period_end.store(end, Ordering::Relaxed);
        }
        let needed = ((NEVER_FIRES * beta * cost) as u64).min(life / 2);
        self.longest.fetch_max(life, Ordering::Relaxed);
        self.needed.fetch_max(needed, Ordering::Relaxed);
        self.window.fetch_max(needed, Ordering::Relaxed);
    }
}

impl<K, V, S> Core<K, V, S> {
    /// Until when a value with this soft deadline is no matter for an early refresh.
    #[inline(always)]
    pub(super) fn with_window(&self, now: Moment) -> Moment {
        Moment::from_nanos(now.nanos().saturating_add(self.early.window()))
    }

    /// Notes that a value with these times comes into the slot, and how long its load has taken, if it was loaded.
    pub(super) fn note_value(&self, slot: &Slot<K, V>, took: Option<Duration>, times: &Times) {
        let Some(tail) = slot.tail() else { return };
        if let Some(took) = took {
            tail.loaded_in(saturating_nanos(took) as f64);
        }
        tail.begin_reads();
        self.early.widen(tail.cost(), times);
    }

    /// Notes a read, and tells how many there have been, about.
    fn note_read(&self, tail: &Tail) -> u32 {
        let reads = tail.reads();
        if reads < NOTED {
            tail.read(1)
        } else if self.chance() * f64::from(SAMPLED) < 1.0 {
            tail.read(SAMPLED)
        } else {
            reads
        }
    }

    /// Whether this read of a fresh value is to refresh it.
    pub(super) fn fires(&self, slot: &Slot<K, V>, times: &Times, now: Moment) -> bool {
        let setting = self.early.setting();
        let (soft, born) = (times.soft(), times.born());
        if setting == 0.0 || soft == Moment::NEVER || soft <= now {
            return false;
        }
        let Some(tail) = slot.tail() else { return false };
        let left = soft.since(now).as_nanos() as f64;
        let half = soft.since(born).as_nanos() as f64 / 2.0;
        if left > half {
            return false;
        }
        let scale = if setting > 0.0 {
            setting * tail.cost()
        } else {
            // The scale by which no read fires with this probability at the rate that is seen: `ln(1/p) / lambda`.
            let rate = f64::from(self.note_read(tail)) / (half - left).max(1.0);
            if tail.cost() > 0.0 { -(-setting).ln() / rate } else { 0.0 }
        };
        if left > NEVER_FIRES * scale {
            return false;
        }
        // From (0, 1], so that the logarithm is a number.
        let chance = 1.0 - self.chance();
        -scale * chance.ln() >= left
    }
}
