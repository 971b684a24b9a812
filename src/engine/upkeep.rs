//! Upkeep: what the keeper does now and then, so that what has expired goes even if nobody touches the cache, and so that
//! tasks which wait for a moment are woken where no runtime has a timer.
//!
//! It walks over all buckets, a slice at a time with a rest between, so that it takes little of a processor whatever the
//! size: a million entries are walked over in about ten seconds. It looks at the flights when the first of the moments has
//! come that tasks wait for.

use super::Core;
use crate::clock::{Moment, Time};
use crate::executor::Upkeep;
use crate::primitive::epoch::pin;
use crate::primitive::plain::{Ordering, fence};
use crate::slot::Flight;
use std::cell::Cell;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Buckets of a slice.
const SLICE: usize = 1 << 14;
/// Buckets that are handled while the cache is held on to: its last handle may be dropped meanwhile.
const HELD: usize = 1 << 8;
/// The rest between two slices, and between two walks.
const REST: Duration = Duration::from_millis(100);
const LONG_REST: Duration = Duration::from_secs(1);
/// The shortest rest.
const TICK: Duration = Duration::from_millis(1);

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
        let next_alarm = core.upgrade()?.ring_alarms();
        // Real time, whatever clock the cache has.
        let now = Time::Coarse.now();
        if next_slice <= now {
            next_slice = now.plus(walk.slice(&core)?);
        }
        Some(next_slice.min(next_alarm).since(now).max(TICK))
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

impl<K, V, S> Core<K, V, S> {
    /// Has the keeper ring for those who wait for a flight, at a moment of real time. Once the caller listens.
    pub(crate) fn ring_at(&self, flight: &Flight<K, V>, when: Moment) {
        // AcqRel: the flight's alarm is set before; pairs with the swap in `ring_alarms`.
        if flight.set_alarm(when) && self.next_alarm.fetch_min(when.nanos(), Ordering::AcqRel) > when.nanos()
        {
            self.keeper.hurry_upkeep();
        }
    }

    /// Rings where an alarm is due, begins the loads that have waited for others, and tells when the next one will be.
    fn ring_alarms(self: &Arc<Self>) -> Moment {
        // SeqCst: pairs with the fence of `hurry_upkeep`: whoever sets an alarm, or has a load wait for others, after this look
        // finds a thread to wake.
        fence(Ordering::SeqCst);
        // Relaxed: see above.
        let now = Time::Coarse.now();
        if self.next_alarm.load(Ordering::Relaxed) <= now.nanos() {
            // AcqRel: the alarms that led to it; pairs with `ring_at`.
            self.next_alarm.swap(Moment::NEVER.nanos(), Ordering::AcqRel);
            let guard = pin();
            let next = Cell::new(Moment::NEVER);
            let due = |flight: &Flight<K, V>| {
                let due = flight.is_due(now);
                next.set(next.get().min(flight.alarm()));
                due
            };
            self.ring(guard, due);
            self.next_alarm.fetch_min(next.get().nanos(), Ordering::AcqRel);
        }
        // Loads wait for others by real time: otherwise there is no upkeep.
        self.begin_due(now).min(Moment::from_nanos(self.next_alarm.load(Ordering::Relaxed)))
    }
}
