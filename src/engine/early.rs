//! Early refresh: a read of a fresh value refreshes it at random, the more probably the nearer its soft deadline is and the
//! longer its load takes, so that a popular key is loaded before it goes stale, by one caller.
//!
//! XFetch (Vattani, Chierichetti and Lowenstein, *Optimal Probabilistic Cache Stampede Prevention*, PVLDB 8(8), 2015): with `t`
//! left and loads that take `delta`, a read fires with probability `exp(-t / (beta * delta))`. A read that fires tries to lead,
//! and never waits.
//!
//! A hit looks at none of this before a window of the cache's own, which follows the longest scale that was seen.

use super::Core;
use crate::clock::Moment;
use crate::config::EarlyRefresh;
use crate::freshness::Times;
use crate::primitive::plain::{AtomicU64, Ordering};
use crate::slot::{Slot, Tail};

/// Beyond so many scales a read fires less than once in 2^64 times: no number is drawn.
const NEVER_FIRES: f64 = 44.4;
/// Where the rate of reads matters, so many are noted of each life of a value,
const NOTED: u32 = 64;
/// and then one of so many.
const SAMPLED: u32 = 16;

/// When reads refresh early. May be changed while the cache is in use.
pub(super) struct Early {
    /// The factor of the scale, or the probability that no read fires: an `f64`, negative for the latter; zero: never.
    setting: AtomicU64,
    /// How long before a soft deadline a hit has to look: nanoseconds.
    window: AtomicU64,
}

impl Early {
    pub(super) fn new(setting: EarlyRefresh) -> Self {
        let early = Self { setting: AtomicU64::new(0), window: AtomicU64::new(0) };
        early.set(setting);
        early
    }

    pub(super) fn set(&self, setting: EarlyRefresh) {
        let (number, window) = match setting {
            EarlyRefresh::Off => (0.0, 0),
            EarlyRefresh::Beta(beta) => (beta, 0),
            // The reads are to be noted from the middle of each life on.
            EarlyRefresh::MissProbability(p) => (-p, u64::MAX / 2),
        };
        // Relaxed: a setting, and a figure that follows from it.
        self.setting.store(f64::to_bits(number), Ordering::Relaxed);
        self.window.store(window, Ordering::Relaxed);
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

    /// Follows the longest load, and forgets it slowly.
    fn widen(&self, cost: f64) {
        let beta = self.setting();
        if beta <= 0.0 {
            return;
        }
        let wanted = (NEVER_FIRES * beta * cost) as u64;
        let window = self.window();
        let next = if wanted > window { wanted } else { window - (window - wanted) / 1024 };
        if next != window {
            // Relaxed: as above.
            self.window.store(next, Ordering::Relaxed);
        }
    }
}

impl<K, V, S> Core<K, V, S> {
    /// Until when a value with this soft deadline is no matter for an early refresh.
    #[inline(always)]
    pub(super) fn with_window(&self, now: Moment) -> Moment {
        Moment::from_nanos(now.nanos().saturating_add(self.early.window()))
    }

    /// Notes how long a load of this slot's value has taken.
    pub(super) fn note_cost(&self, slot: &Slot<K, V>, nanos: u64) {
        if let Some(tail) = slot.tail() {
            tail.loaded_in(nanos as f64);
            self.early.widen(tail.cost());
        }
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
