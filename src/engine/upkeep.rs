//! Upkeep: what the keeper does now and then, so that what has expired goes even if nobody touches the cache.
//!
//! It walks over all buckets, a slice at a time with a rest between, so that it takes little of a processor whatever the
//! size: a million entries are walked over in about ten seconds.

use super::Core;
use crate::executor::Upkeep;
use crate::primitive::epoch::pin;
use std::sync::Weak;
use std::time::Duration;

/// Buckets of a slice.
const SLICE: usize = 1 << 14;
/// Buckets that are handled while the cache is held on to: its last handle may be dropped meanwhile.
const HELD: usize = 1 << 8;
/// The rest between two slices, and between two walks.
const REST: Duration = Duration::from_millis(100);
const LONG_REST: Duration = Duration::from_secs(1);

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
    Box::new(move || {
        for _ in 0..SLICE / HELD {
            let core = core.upgrade()?;
            if !walk.go_on(&core) {
                core.shrink();
                core.tidy();
                return Some(LONG_REST);
            }
        }
        Some(REST)
    })
}

impl Walk {
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
