//! Upkeep: what the keeper does now and then, so that what has expired goes even if nobody touches the cache, and so that
//! tasks which wait for a moment are woken where no runtime has a timer.
//!
//! It walks over all buckets, a slice at a time with a rest between, so that it takes little of a processor whatever the
//! size: a million entries are walked over in about ten seconds. While tasks wait for a moment, it looks at all flights
//! once per tick.

use super::Core;
use crate::clock::{Moment, Time};
use crate::executor::Upkeep;
use crate::primitive::epoch::pin;
use crate::primitive::plain::{Ordering, fence};
use std::sync::Weak;
use std::time::Duration;

/// Buckets of a slice.
const SLICE: usize = 1 << 14;
/// Buckets that are handled while the cache is held on to: its last handle may be dropped meanwhile.
const HELD: usize = 1 << 8;
/// The rest between two slices, and between two walks.
const REST: Duration = Duration::from_millis(100);
const LONG_REST: Duration = Duration::from_secs(1);
/// The rest between two looks at the alarms.
const TICK: Duration = Duration::from_millis(4);

/// Where a walk has come to.
#[derive(Default)]
struct Walk {
    shard: usize,
    at: u64,
}

/// The upkeep of a cache, for its keeper.
pub(crate) fn upkeep<K, V, S>(core: Weak<Core<K, V, S>>) -> Upkeep
where
    K: Send + Sync + 'static,
    V: Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    let mut walk = Walk::default();
    let mut next_slice = Moment::from_nanos(0);
    Box::new(move || {
        let timed = core.upgrade()?.ring_alarms();
        // Real time, whatever clock the cache has: it is for the keeper's rest.
        let now = Time::Coarse.now();
        if next_slice <= now {
            next_slice = now.plus(walk.slice(&core)?);
        }
        let rest = next_slice.since(now).max(TICK);
        Some(if timed { TICK } else { rest })
    })
}

impl Walk {
    /// Handles one slice, and says how long to rest. `None` if the cache is gone.
    fn slice<K, V, S>(&mut self, core: &Weak<Core<K, V, S>>) -> Option<Duration> {
        for _ in 0..SLICE / HELD {
            let core = core.upgrade()?;
            if !core.sweeps {
                return Some(Duration::MAX);
            }
            if !self.go_on(&core) {
                core.shrink();
                core.tidy();
                return Some(LONG_REST);
            }
        }
        Some(REST)
    }

    /// Sweeps some buckets. `false` at the end, from which it begins anew.
    fn go_on<K, V, S>(&mut self, core: &Core<K, V, S>) -> bool {
        let now = core.time.now();
        for _ in 0..HELD {
            let Some(shard) = core.shards.get(self.shard) else {
                *self = Self::default();
                return false;
            };
            match core.sweep(shard, self.at, now, &core.stay(pin())) {
                Some(at) => self.at = at,
                None => *self = Self { shard: self.shard + 1, at: 0 },
            }
        }
        true
    }
}

/// While this exists, the keeper looks at the alarms of flights.
pub(crate) struct Timed<'a, K, V, S>(&'a Core<K, V, S>);

impl<K, V, S> Core<K, V, S> {
    /// Has the keeper look at the alarms of flights. `None` if the clock is moved by hand: then its moves wake who waits.
    pub(crate) fn timed(&self) -> Option<Timed<'_, K, V, S>> {
        if self.time.is_moved_by_hand() {
            return None;
        }
        // Relaxed: `hurry_upkeep` orders it before its look at the thread.
        if self.timed.fetch_add(1, Ordering::Relaxed) == 0 {
            self.keeper.hurry_upkeep();
        }
        Some(Timed(self))
    }

    /// Rings where an alarm is due. Whether there are tasks that wait for one.
    fn ring_alarms(&self) -> bool {
        // SeqCst: pairs with the fence of `hurry_upkeep`: whoever counts himself in after this look finds a thread to wake.
        fence(Ordering::SeqCst);
        if self.timed.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let now = self.time.now();
        self.ring(pin(), |flight| flight.is_due(now));
        true
    }
}

impl<K, V, S> Drop for Timed<'_, K, V, S> {
    fn drop(&mut self) {
        // Relaxed: whoever misses it looks once more.
        self.0.timed.fetch_sub(1, Ordering::Relaxed);
    }
}
