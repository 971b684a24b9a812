//! The hottest keys: those of the hashes that are met most often, as far as they are in the cache.

use super::Core;
use crate::hash::half_of;
use crate::observe::{GAP, Hot, HotKey};
use crate::primitive::epoch::Guard;
use crate::slot::{Slot, State};
use std::hash::{BuildHasher, Hash};

impl<K, V, S> Core<K, V, S>
where
    K: Eq + Hash,
    S: BuildHasher + 'static,
{
    /// Up to so many of the hottest keys, the hottest first. They are noted from the first call on.
    pub(crate) fn hot_keys(&self, most: usize, guard: &Guard) -> Vec<HotKey<K>>
    where
        K: Clone,
    {
        let there = |hot: Hot| {
            let slot = self.slot_of(hot, guard)?;
            Some(HotKey { key: slot.key().clone(), hits: hot.count * GAP })
        };
        self.counters.hottest().into_iter().filter_map(there).take(most).collect()
    }

    /// The slot whose key has this hash, if it has a value or is being loaded.
    fn slot_of<'g>(&'g self, hot: Hot, guard: &'g Guard) -> Option<&'g Slot<K, V>> {
        let half = half_of(hot.hash());
        let has_it = |slot: &Slot<K, V>| slot.half_hash() == half && hot.is_of(self.hash(slot.key()));
        let slot = self.shard(hot.hash()).table.find(hot.hash(), has_it, guard)?;
        let state = slot.load(guard);
        (matches!(state, State::Loading(_)) || state.held().cell().is_some()).then_some(slot)
    }
}
