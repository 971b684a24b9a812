//! A pin that lasts over several reads and hands out references.

use super::Cache;
use crate::engine::Glance;
use crate::hash::DefaultHashBuilder;
use crate::observe::Count;
use crate::primitive::epoch::{Guard, number, pin};
use crate::primitive::thread::{pinned_begins, pinned_ends};
use std::borrow::Borrow;
use std::fmt;
use std::hash::{BuildHasher, Hash};

/// Reads without cloning and with one pin for all of them; made by [`Cache::pin`].
///
/// While it exists, nothing that the cache (or another quell cache) removes is freed: keep it short. It stays on its
/// thread. Leaking it is sound, and stops reclamation.
pub struct Pinned<'a, K, V, S = DefaultHashBuilder> {
    cache: &'a Cache<K, V, S>,
    guard: Guard,
}

impl<K, V, S> Cache<K, V, S> {
    /// Pins this thread for several reads.
    pub fn pin(&self) -> Pinned<'_, K, V, S> {
        pinned_begins();
        Pinned { cache: self, guard: pin() }
    }
}

impl<K, V, S> Pinned<'_, K, V, S>
where
    K: Hash + Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    /// The value of `key`, fresh or stale. Never loads, never waits. Lock-free.
    #[inline]
    pub fn get<Q>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let core = &self.cache.core;
        let hash = core.hash(key);
        if let Glance::Fresh(value) = core.glance(key, hash, &self.guard) {
            core.counters.access_on(number(), Count::Hits, || hash);
            return Some(value);
        }
        let hit = core.read(key, hash, true, &self.guard);
        core.count_read(&hit, hash, number());
        // What has expired stays for others to take out: nobody is told of it under a pin.
        hit.ok().map(|hit| &hit.cell.value)
    }
}

impl<K, V, S> Drop for Pinned<'_, K, V, S> {
    fn drop(&mut self) {
        pinned_ends();
    }
}

impl<K, V, S> fmt::Debug for Pinned<'_, K, V, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("cache", &self.cache).finish_non_exhaustive()
    }
}
