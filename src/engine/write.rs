//! Writes: each is one CAS of the slot word (or of the bucket word, for a new slot), after a fence.
//!
//! The fence is what an `invalidate` of an absent key needs, which writes nothing: a caller changes the source and
//! invalidates, a claimer claims and reads the source. Without a SeqCst fence on both sides each could miss the
//! other (store buffering), and the stale value would stay.

use super::{Core, Shard};
use crate::clock::Moment;
use crate::freshness::{Stage, Times, Ttl};
use crate::primitive::atomic::{Ordering, fence};
use crate::primitive::epoch::Guard;
use crate::primitive::step::step;
use crate::slot::{NewCell, Next, Slot, State, Unborn};
use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash};
use std::time::Duration;

/// Orders what the caller did before (to the source of the values) against what it now reads of the cache, or the other
/// way round: see this module's head, and the twin in the fronts between a claim and the loader.
pub(crate) fn source_fence() {
    // SeqCst: the source and the slot (or bucket) word. Either the invalidator sees the claim, and kills it, or the
    // claimer's loader sees the source as the invalidator left it.
    fence(Ordering::SeqCst);
}

impl<K: 'static, V: 'static, S> Core<K, V, S> {
    /// What a value is to live: `own`, and where that says nothing, what the cache's `Expiry` says.
    pub(crate) fn own_ttl(&self, key: &K, value: &V, own: Ttl, load_time: Option<Duration>) -> Ttl {
        match &self.settings.expiry {
            Some(expiry) => own.or(expiry.ttl(key, value, load_time)),
            None => own,
        }
    }

    /// The times of a value that is written now.
    pub(crate) fn times_of_write(&self, key: &K, value: &V, own: Ttl) -> Times {
        self.times(self.own_ttl(key, value, own, None), self.time.now())
    }

    /// Kills a slot, whatever it holds by now.
    fn kill(&self, slot: &Slot<K, V>, guard: &Guard) {
        loop {
            let state = slot.load(guard);
            if matches!(state, State::Dead) || self.swing(slot, state, Next::Dead, guard).is_ok() {
                return;
            }
        }
    }

    /// One step of `invalidate_all`.
    pub(crate) fn clear_bucket(&self, shard: &Shard<K, V>, at: u64, guard: &Guard) -> Option<u64> {
        shard.table.visit(at, |slot| self.kill(slot, guard), guard)
    }

    /// One step of `retain`. A load under way is detached: it began before, and nobody can say what it will bring.
    pub(crate) fn retain_bucket(
        &self,
        shard: &Shard<K, V>,
        at: u64,
        keep: &mut impl FnMut(&K, &V) -> bool,
        guard: &Guard,
    ) -> Option<u64> {
        let visit = |slot: &Slot<K, V>| {
            loop {
                let state = slot.load(guard);
                // A value in grace may be served yet, so it is asked about too.
                let live = state.held().cell().filter(|cell| self.stage(slot, cell, false) <= Stage::Grace);
                let stays = live.is_some_and(|cell| keep(slot.key(), &cell.value));
                let next = match state {
                    State::Dead => return,
                    State::Ready(_) if stays => return,
                    // A remembered failure of a key without a value: nothing to judge.
                    State::Ready(held) if live.is_none() && held.record().is_some() => return,
                    State::Loading(_) if stays => Next::Prev,
                    State::Ready(_) | State::Loading(_) => Next::Dead,
                };
                if self.swing(slot, state, next, guard).is_ok() {
                    return;
                }
            }
        };
        shard.table.visit(at, visit, guard)
    }
}

impl<K, V, S> Core<K, V, S>
where
    K: Eq + Hash + 'static,
    V: 'static,
    S: BuildHasher + 'static,
{
    /// Puts a value in the place of whatever is there. One that ends as it is born takes what is there away.
    pub(crate) fn insert(&self, mut key: K, mut value: V, times: Times, guard: &Guard) {
        source_fence();
        let hash = self.hash(&key);
        let shard = self.shard(hash);
        if !times.born.is_before(times.hard) {
            if let Some((slot, _)) = self.seek(hash, &key, guard) {
                self.kill(slot, guard);
            }
            return;
        }
        loop {
            step();
            if let Some((slot, state)) = self.seek(hash, &key, guard) {
                match self.swing(slot, state, Next::Value(NewCell::boxed(times, value)), guard) {
                    Ok(()) => break,
                    Err(back) => value = back.into_value().expect("what was to be published comes back"),
                }
            } else {
                match Unborn::with_value(hash, key, times, value).link(&shard.table, guard) {
                    Ok(()) => {
                        // Relaxed: a figure; see `values`.
                        shard.values.0.fetch_add(1, Ordering::Relaxed);
                        break;
                    }
                    Err(back) => (key, value) = back.into_parts().expect("born with a value"),
                }
            }
        }
        self.sweep_a_little(shard, guard);
    }

    /// Kills the slot of a key, and gives a clone of the value that was served until then.
    pub(crate) fn remove<Q>(&self, key: &Q, guard: &Guard) -> Option<V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
        V: Clone,
    {
        source_fence();
        let hash = self.hash(key);
        loop {
            let (slot, state) = self.seek(hash, key, guard)?;
            let cell = state.held().cell().filter(|cell| self.stage(slot, cell, false) <= Stage::Stale);
            if self.swing(slot, state, Next::Dead, guard).is_ok() {
                return cell.map(|cell| cell.value.clone());
            }
        }
    }

    /// Kills the slot of a key.
    pub(crate) fn invalidate<Q>(&self, key: &Q, guard: &Guard)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        source_fence();
        if let Some((slot, _)) = self.seek(self.hash(key), key, guard) {
            self.kill(slot, guard);
        }
    }

    /// Makes the value of a key stale now, by a new cell. `false` if there is none.
    pub(crate) fn expire<Q>(&self, key: &Q, guard: &Guard) -> bool
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
        V: Clone,
    {
        source_fence();
        let hash = self.hash(key);
        loop {
            let Some((slot, state)) = self.seek(hash, key, guard) else { return false };
            let now: Moment = self.time.now();
            let live = state.held().cell().filter(|cell| self.stage_at(slot, cell, now) <= Stage::Stale);
            let next = match (live, state) {
                (Some(cell), _) => Next::Value(NewCell::boxed(cell.times.expired(now), cell.value.clone())),
                // Past being stale, or nothing at all: only a load is to be detached.
                (None, State::Loading(_)) => Next::Prev,
                (None, _) => return false,
            };
            if self.swing(slot, state, next, guard).is_ok() {
                return live.is_some();
            }
        }
    }
}
