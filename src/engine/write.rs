//! Writes: each is one CAS of the slot word (or of the bucket word, for a new slot), after a fence.
//!
//! The fence is what an `invalidate` of an absent key needs, which writes nothing: a caller changes the source and
//! invalidates, a claimer claims and reads the source. Without a SeqCst fence on both sides each could miss the
//! other (store buffering), and the stale value would stay.

use super::evict::Charge;
use super::{Core, Shard, Stay};
use crate::clock::Moment;
use crate::freshness::{Stage, Ttl};
use crate::hash::half_of;
use crate::observe::RemovalCause;
use crate::policy::MarkWord;
use crate::primitive::atomic::{Ordering, fence};
use crate::primitive::step::step;
use crate::slot::{Cell, NewCell, Next, Slot, State, Unborn, Weighed};
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

    /// A value that is written now, with its weight and times.
    pub(crate) fn weighed(&self, key: &K, value: V, own: Ttl) -> Weighed<V> {
        let weight = self.weigh(key, &value);
        let times = self.times(self.own_ttl(key, &value, own, None), self.time.now(), 0.0);
        Weighed { cell: Cell { value, times }, weight }
    }

    /// Kills a slot, whatever it holds by now.
    fn kill(&self, slot: &Slot<K, V>, cause: RemovalCause, stay: &Stay<'_, K, V, S>) {
        loop {
            let state = slot.load(stay);
            if matches!(state, State::Dead) || self.swing(slot, state, Next::Dead, Some(cause), stay).is_ok()
            {
                return;
            }
        }
    }

    /// One step of `invalidate_all`.
    pub(crate) fn clear_bucket(&self, shard: &Shard<K, V>, at: u64, stay: &Stay<'_, K, V, S>) -> Option<u64> {
        shard.table.visit(at, |slot| self.kill(slot, RemovalCause::Explicit, stay), stay)
    }

    /// One step of `retain`. A load under way is detached: it began before, and nobody can say what it will bring.
    pub(crate) fn retain_bucket(
        &self,
        shard: &Shard<K, V>,
        at: u64,
        keep: &mut impl FnMut(&K, &V) -> bool,
        stay: &Stay<'_, K, V, S>,
    ) -> Option<u64> {
        let visit = |slot: &Slot<K, V>| {
            loop {
                let state = slot.load(stay);
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
                if self.swing(slot, state, next, Some(RemovalCause::Explicit), stay).is_ok() {
                    if stays {
                        // The capacity may have been lowered while a load kept it.
                        self.stored(slot, None, stay);
                    }
                    return;
                }
            }
        };
        shard.table.visit(at, visit, stay)
    }
}

impl<K, V, S> Core<K, V, S>
where
    K: Eq + Hash + 'static,
    V: 'static,
    S: BuildHasher + 'static,
{
    /// Puts a value in the place of whatever is there. One that ends as it is born, or is too heavy, takes what is there away; and
    /// so does each during a bypass.
    pub(crate) fn insert(&self, mut key: K, mut new: Weighed<V>, stay: &Stay<'_, K, V, S>) {
        source_fence();
        let hash = self.hash(&key);
        let shard = self.shard(hash);
        let times = new.cell.times;
        let ends = self.switches.is_bypassed() || !times.born().is_before(times.hard());
        if ends || !self.admits(new.weight) {
            if let Some((slot, _)) = self.seek(hash, &key, stay) {
                self.kill(slot, RemovalCause::Replaced, stay);
            }
            return;
        }
        self.policy.prefetch(half_of(hash), stay);
        self.sweep_a_little(shard, stay);
        let mut admission = None;
        loop {
            step();
            if let Some((slot, state)) = self.seek(hash, &key, stay) {
                let more = new.weight.saturating_sub(slot.weight_of(state.held()));
                admission = admission.or_else(|| self.make_room(Some(slot), hash, new.weight, more, stay));
                self.note_value(slot, None, &times);
                let next = Next::Value(NewCell::boxed(new));
                match self.swing(slot, state, next, Some(RemovalCause::Replaced), stay) {
                    Ok(()) => return self.stored(slot, admission, stay),
                    Err(back) => new = back.into_weighed().expect("what was to be published comes back"),
                }
            } else {
                admission = admission.or_else(|| self.make_room(None, hash, new.weight, new.weight, stay));
                let mark = admission.map(|admission| self.policy.mark(admission, new.weight));
                let charge = Charge::new(&stay.purse, new.weight);
                let word = mark.map_or_else(MarkWord::new, MarkWord::entered);
                match Unborn::with_value(hash, key, new, self.tails(), word).link(&shard.table, stay) {
                    Ok(slot) => {
                        charge.keep();
                        // Relaxed: a figure; see `values`.
                        shard.values.0.fetch_add(1, Ordering::Relaxed);
                        return self.linked(slot, mark, stay);
                    }
                    Err(back) => (key, new) = back.into_parts().expect("born with a value"),
                }
            }
        }
    }

    /// Kills the slot of a key, and gives a clone of the value that was served until then.
    pub(crate) fn remove<Q>(&self, key: &Q, stay: &Stay<'_, K, V, S>) -> Option<V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
        V: Clone,
    {
        source_fence();
        let hash = self.hash(key);
        let serves = !self.switches.is_bypassed();
        loop {
            let (slot, state) = self.seek(hash, key, stay)?;
            let served = |cell: &&_| serves && self.stage(slot, cell, false) <= Stage::Stale;
            let cell = state.held().cell().filter(served);
            if self.swing(slot, state, Next::Dead, Some(RemovalCause::Explicit), stay).is_ok() {
                return cell.map(|cell| cell.value.clone());
            }
        }
    }

    /// Kills the slot of a key.
    pub(crate) fn invalidate<Q>(&self, key: &Q, stay: &Stay<'_, K, V, S>)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        source_fence();
        if let Some((slot, _)) = self.seek(self.hash(key), key, stay) {
            self.kill(slot, RemovalCause::Explicit, stay);
        }
    }

    /// Makes the value of a key stale now, by a new cell. `false` if there is none.
    pub(crate) fn expire<Q>(&self, key: &Q, stay: &Stay<'_, K, V, S>) -> bool
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
        V: Clone,
    {
        source_fence();
        let hash = self.hash(key);
        loop {
            let Some((slot, state)) = self.seek(hash, key, stay) else { return false };
            let now: Moment = self.time.now();
            let live = state.held().cell().filter(|cell| self.stage_at(slot, cell, now) <= Stage::Stale);
            let next = match (live, state) {
                (Some(cell), _) => {
                    let weight = slot.weight_of(state.held());
                    let cell = Cell { value: cell.value.clone(), times: cell.times.expired(now) };
                    Next::Value(NewCell::boxed(Weighed { cell, weight }))
                }
                // Past being stale, or nothing at all: only a load is to be detached.
                (None, State::Loading(_)) => Next::Prev,
                (None, _) => return false,
            };
            if self.swing(slot, state, next, None, stay).is_ok() {
                if live.is_some() {
                    // The capacity may have been lowered while a load kept it.
                    self.stored(slot, None, stay);
                }
                return live.is_some();
            }
        }
    }
}
