//! Eviction: the slots as the policy sees them, and when it is asked to make room.
//!
//! Weight is charged before the CAS that lets a value in, and discharged by the winner of the CAS that takes it out, so the
//! sum is never below the truth. Whoever stores something makes the room for it first, and lets it into a queue after: nobody
//! evicts what it has just stored, and the cache is over its capacity by one entry for each thread that is storing one, at most.

use super::{Core, Stay};
use crate::freshness::Stage;
use crate::hash::{half_of, whole_of};
use crate::observe::{Count, RemovalCause};
use crate::policy::{Admission, Item, Mark, MarkWord, Place, Policy, Slots, Standing, Tidying, UNBOUNDED};
use crate::primitive::atomic::{Ordering, fence};
use crate::primitive::caught;
use crate::primitive::epoch::pin;
use crate::slot::{Next, Slot, State, USUAL_WEIGHT};
use std::cell::Cell;

/// Slots that are dropped under one pin, where many have to go.
const BATCH: u32 = 64;
/// So many refreshes may be under way whatever the number of entries.
const FEW_REFRESHES: usize = 8;

/// Weight that has been taken out during a stay, and is still counted: what comes in next takes its place. So a full cache
/// counts nothing for an entry that replaces another.
pub(super) struct Purse<'c> {
    policy: &'c Policy,
    weight: Cell<u64>,
}

impl<'c> Purse<'c> {
    pub(super) fn new(policy: &'c Policy) -> Self {
        Self { policy, weight: Cell::new(0) }
    }

    /// Something has been taken out.
    pub(super) fn put(&self, weight: u32) {
        self.weight.set(self.weight.get() + u64::from(weight));
    }

    /// Counts what is beyond `most` no longer: others who are over the capacity would take as much out again.
    fn keep_at_most(&self, most: u32) {
        let beyond = self.weight.get().saturating_sub(u64::from(most));
        if beyond > 0 {
            self.weight.set(u64::from(most));
            self.policy.discharge(beyond);
        }
    }

    /// Something is about to come in.
    fn take(&self, weight: u32) {
        let (there, weight) = (self.weight.get(), u64::from(weight));
        self.weight.set(there.saturating_sub(weight));
        if weight > there {
            self.policy.charge(weight - there);
        }
    }

    /// Whether the cache is over its capacity when `more` comes in.
    fn is_over(&self, more: u32) -> bool {
        let weight = self.policy.weight() + u64::from(more);
        weight.saturating_sub(self.weight.get()) > self.policy.capacity()
    }
}

impl Drop for Purse<'_> {
    fn drop(&mut self) {
        self.keep_at_most(0);
    }
}

/// Weight that is about to come in. Taken off again unless it is kept.
pub(super) struct Charge<'p, 'c>(&'p Purse<'c>, u32);

impl<'p, 'c> Charge<'p, 'c> {
    pub(super) fn new(purse: &'p Purse<'c>, weight: u32) -> Self {
        purse.take(weight);
        Self(purse, weight)
    }

    /// It has come in.
    pub(super) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Charge<'_, '_> {
    fn drop(&mut self) {
        self.0.put(self.1);
    }
}

/// The slots of a cache, seen under one pin.
pub(super) struct Seen<'g, 'c, K, V, S> {
    core: &'g Core<K, V, S>,
    stay: &'g Stay<'c, K, V, S>,
    /// Must stay: the caller is about to put something into it.
    spared: Option<&'g Slot<K, V>>,
}

impl<K, V, S> Seen<'_, '_, K, V, S> {
    fn is_in_use(&self, slot: &Slot<K, V>) -> bool {
        let spared = self.spared.is_some_and(|spared| std::ptr::eq(spared, slot));
        spared || matches!(slot.load(self.stay), State::Loading(_))
    }
}

impl<'g, K, V, S> Slots for Seen<'g, '_, K, V, S> {
    type Slot = &'g Slot<K, V>;

    fn find(&self, item: Item) -> Option<&'g Slot<K, V>> {
        let hash = whole_of(item.hash());
        let table = &self.core.shard(hash).table;
        let meant = |slot: &Slot<K, V>| item.means(slot.mark().load());
        let slot = table.find(hash, meant, self.stay)?;
        if !self.is_in_use(slot) {
            return Some(slot);
        }
        // Slots of the same hash and ticket stand for each other: one that is in use must not hide another one.
        table.find(hash, |slot| meant(slot) && !self.is_in_use(slot), self.stay).or(Some(slot))
    }

    fn mark(&self, slot: &'g Slot<K, V>) -> &MarkWord {
        slot.mark()
    }

    fn len(&self) -> usize {
        self.core.values()
    }

    fn prefetch(&self, item: Item, deep: bool) {
        let hash = whole_of(item.hash());
        self.core.shard(hash).table.prefetch(hash, deep, self.stay);
    }

    fn standing(&self, slot: &'g Slot<K, V>) -> Standing {
        match slot.load(self.stay) {
            _ if self.is_in_use(slot) => Standing::InUse,
            State::Ready(held) if self.core.is_spent_by_now(slot, held) => Standing::Spent,
            _ => Standing::Free,
        }
    }

    fn evict(&self, slot: &'g Slot<K, V>) -> bool {
        match slot.load(self.stay) {
            state @ State::Ready(_) => {
                self.core.swing(slot, state, Next::Dead, Some(RemovalCause::Size), self.stay).is_ok()
            }
            State::Loading(_) => false,
            State::Dead => {
                // Whoever killed it may be suspended, and until it has left it comes back to be dropped again and again.
                self.core.policy.leave(slot.mark(), slot.half_hash());
                false
            }
        }
    }
}

impl<K, V, S> Core<K, V, S> {
    pub(super) fn seen<'g, 'c>(&'g self, stay: &'g Stay<'c, K, V, S>) -> Seen<'g, 'c, K, V, S> {
        Seen { core: self, stay, spared: None }
    }

    /// Whether an entry of this weight can be in the cache at all. Counts one that can't.
    pub(crate) fn admits(&self, weight: u32) -> bool {
        let capacity = self.policy.capacity();
        let fits = Self::fits(capacity, weight);
        if !fits {
            self.counters.add(Count::Oversized);
        }
        fits
    }

    fn fits(capacity: u64, weight: u32) -> bool {
        capacity > 0 && u64::from(weight) <= capacity
    }

    /// What an entry weighs. The weigher is user code.
    pub(crate) fn weigh(&self, key: &K, value: &V) -> u32 {
        self.settings.weigher.as_ref().map_or(USUAL_WEIGHT, |weigher| weigher(key, value))
    }

    /// Whether one more refresh may begin. What is loading can't be evicted, so only an eighth may be.
    pub(super) fn may_refresh(&self) -> bool {
        // Relaxed: a limit.
        let refreshing = self.refreshing.0.load(Ordering::Relaxed).cast_signed();
        !self.policy.is_bounded() || refreshing < (self.values() / 8).max(FEW_REFRESHES).cast_signed()
    }

    /// Something is about to be stored: makes room for `more` weight. `slot` is where, if it is there already; it is spared.
    ///
    /// Nothing to admit where there is no limit, or where the policy knows the slot.
    pub(super) fn make_room<'g>(
        &'g self,
        slot: Option<&'g Slot<K, V>>,
        hash: u64,
        weight: u32,
        more: u32,
        stay: &'g Stay<'_, K, V, S>,
    ) -> Option<Admission> {
        if !self.policy.is_bounded() {
            return None;
        }
        let seen = Seen { core: self, stay, spared: slot };
        let half = half_of(hash);
        let is_new = slot.is_none_or(|slot| slot.mark().load().place() == Place::Out);
        let admission = is_new.then(|| self.policy.admit(&seen, half, weight, stay));
        // From its own part first, then from each in turn, so that a heavy entry costs all alike.
        let mut part = half;
        while stay.purse.is_over(more) && self.policy.drop_one(&seen, part, stay) {
            stay.purse.keep_at_most(more);
            part = part.wrapping_add(1);
        }
        admission
    }

    /// A slot that was born with a value has been linked, with the mark that it had been given, if any.
    pub(super) fn linked<'g>(
        &'g self,
        slot: &'g Slot<K, V>,
        mark: Option<Mark>,
        stay: &'g Stay<'_, K, V, S>,
    ) {
        if let Some(mark) = mark {
            self.policy.entered(&self.seen(stay), mark, slot.half_hash(), stay);
        }
        self.stored(slot, None, stay);
    }

    /// Something has been put into a slot: sees to it that the policy knows it.
    pub(super) fn stored<'g>(
        &'g self,
        slot: &'g Slot<K, V>,
        admission: Option<Admission>,
        stay: &'g Stay<'_, K, V, S>,
    ) {
        // SeqCst: what has been stored before the looks at the capacity; pairs with the fence in `set_capacity`, which sets
        // the capacity before it looks for slots that are in no queue, or are too heavy now. One of the two sees the other.
        fence(Ordering::SeqCst);
        let hash = slot.half_hash();
        let weight = || slot.weight_of(slot.load(stay).held());
        // Also where there is no limit any more: there may be one again.
        self.policy.reweigh(slot.mark(), hash, weight);
        if !self.policy.is_bounded() {
            return;
        }
        if slot.mark().load().place() == Place::Out {
            let seen = self.seen(stay);
            let admission = admission.unwrap_or_else(|| self.policy.admit(&seen, hash, weight(), stay));
            self.policy.enter(&seen, slot.mark(), self.policy.mark(admission, weight()), hash, stay);
            self.policy.reweigh(slot.mark(), hash, weight);
        }
        // The capacity may have been lowered since this was admitted, and nobody else comes by to drop it.
        if !Self::fits(self.policy.capacity(), weight()) {
            self.seen(stay).evict(slot);
        }
    }

    /// Drops what is too much, a batch under each pin.
    pub(crate) fn shrink(&self) {
        let mut goes_on = true;
        while goes_on && self.policy.weight() > self.policy.capacity() {
            let stay = self.stay(pin());
            let seen = self.seen(&stay);
            goes_on = (0..BATCH).all(|nth| {
                let goes_on = !stay.purse.is_over(0) || self.policy.drop_one(&seen, nth, &stay);
                stay.purse.keep_at_most(0);
                goes_on
            });
        }
    }

    /// Takes what is left of slots that have gone out of the policy's queues, where much is.
    pub(crate) fn tidy(&self) {
        let mut tidying = Tidying::default();
        let step = |tidying: &mut Tidying| {
            let stay = self.stay(pin());
            self.policy.tidy(&self.seen(&stay), tidying, &stay)
        };
        while step(&mut tidying) {}
    }

    /// Sets the capacity, and drops what is too much.
    pub(crate) fn set_capacity(&self, capacity: u64) {
        let was_bounded = self.policy.set_capacity(capacity) != UNBOUNDED;
        // SeqCst: pairs with the fence in `stored`.
        fence(Ordering::SeqCst);
        if !was_bounded && capacity != UNBOUNDED {
            self.each_bucket(|shard, at| {
                let stay = self.stay(pin());
                // What is there beside a load enters too: the load may end without storing anything.
                let enter = |slot| {
                    if !Slot::load(slot, &stay).held().is_nothing() {
                        self.stored(slot, None, &stay);
                    }
                };
                shard.table.visit(at, enter, &stay)
            });
        }
        if capacity == 0 {
            // Nothing may stay, not even what weighs nothing.
            self.each_bucket(|shard, at| {
                let stay = self.stay(pin());
                let seen = self.seen(&stay);
                shard.table.visit(at, |slot| _ = seen.evict(slot), &stay)
            });
        }
        self.shrink();
    }

    /// Why a value goes that is taken out by `cause`: if it had expired, it is that.
    pub(super) fn cause_of(
        &self,
        slot: &Slot<K, V>,
        state: State<'_, K, V>,
        cause: RemovalCause,
    ) -> RemovalCause {
        let expired = |cell| caught(|| self.stage(slot, cell, false) > Stage::Stale).unwrap_or(false);
        if state.held().cell().is_some_and(expired) { RemovalCause::Expired } else { cause }
    }
}
