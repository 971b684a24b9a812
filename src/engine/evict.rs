//! Eviction: the slots as the policy sees them, and when it is asked to make room.
//!
//! Weight is charged before the CAS that lets a value in, and discharged by the winner of the CAS that takes it out, so the
//! sum is never below the truth. Whoever has let something in makes the room for it before it enters a queue: nobody evicts what
//! it has just stored, and the cache is over its capacity by one entry for each thread that is storing one, at most.

use super::{Core, Stay};
use crate::freshness::Stage;
use crate::observe::{Count, RemovalCause};
use crate::policy::{Item, MarkWord, Place, Policy, Slots, Standing};
use crate::primitive::atomic::{Ordering, fence};
use crate::primitive::epoch::pin;
use crate::slot::{Next, Slot, State, USUAL_WEIGHT};

/// Slots that are dropped under one pin, where many have to go.
const BATCH: usize = 64;
/// So many refreshes may be under way whatever the number of entries.
const FEW_REFRESHES: usize = 8;

/// Weight that is about to come in. Taken off again unless it is kept.
pub(super) struct Charge<'c>(&'c Policy, u32);

impl<'c> Charge<'c> {
    pub(super) fn new(policy: &'c Policy, weight: u32) -> Self {
        policy.charge(weight);
        Self(policy, weight)
    }

    /// It has come in.
    pub(super) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        self.0.discharge(self.1);
    }
}

/// The slots of a cache, seen under one pin.
struct Seen<'g, 'c, K, V, S> {
    core: &'g Core<K, V, S>,
    stay: &'g Stay<'c, K, V, S>,
    /// Must stay: the caller has just put something into it.
    spared: Option<&'g Slot<K, V>>,
}

impl<'g, K, V, S> Slots for Seen<'g, '_, K, V, S> {
    type Slot = &'g Slot<K, V>;

    fn find(&self, item: Item) -> Option<&'g Slot<K, V>> {
        let hash = u64::from(item.hash()) << 32;
        self.core.shard(hash).table.find(hash, |slot| item.means(slot.mark().load()), self.stay)
    }

    fn mark(&self, slot: &'g Slot<K, V>) -> &MarkWord {
        slot.mark()
    }

    fn standing(&self, slot: &'g Slot<K, V>) -> Standing {
        match slot.load(self.stay) {
            _ if self.spared.is_some_and(|spared| std::ptr::eq(spared, slot)) => Standing::InUse,
            State::Loading(_) => Standing::InUse,
            State::Ready(held) if self.core.is_spent_by_now(slot, held) => Standing::Spent,
            State::Ready(_) | State::Dead => Standing::Free,
        }
    }

    fn evict(&self, slot: &'g Slot<K, V>) -> bool {
        match slot.load(self.stay) {
            state @ State::Ready(_) => {
                self.core.swing(slot, state, Next::Dead, Some(RemovalCause::Size), self.stay).is_ok()
            }
            State::Loading(_) | State::Dead => false,
        }
    }
}

impl<K, V, S> Core<K, V, S> {
    fn seen<'g, 'c>(&'g self, stay: &'g Stay<'c, K, V, S>) -> Seen<'g, 'c, K, V, S> {
        Seen { core: self, stay, spared: None }
    }

    /// Whether an entry of this weight can be in the cache at all. Counts one that can't.
    pub(crate) fn admits(&self, weight: u32) -> bool {
        let capacity = self.policy.capacity();
        let fits = capacity > 0 && u64::from(weight) <= capacity;
        if !fits {
            self.counters.add(Count::Oversized);
        }
        fits
    }

    /// What an entry weighs. The weigher is user code.
    pub(crate) fn weigh(&self, key: &K, value: &V) -> u32 {
        self.settings.weigher.as_ref().map_or(USUAL_WEIGHT, |weigher| weigher(key, value))
    }

    /// Whether one more refresh may begin. What is loading can't be evicted, so only an eighth may be.
    pub(super) fn may_refresh(&self) -> bool {
        // Relaxed: a limit.
        let refreshing = self.refreshing.0.load(Ordering::Relaxed);
        !self.policy.is_bounded() || refreshing < (self.policy.population() / 8).max(FEW_REFRESHES)
    }

    /// Something has been put into a slot: makes room for it, and sees to it that the policy knows the slot.
    pub(super) fn stored<'g>(&'g self, slot: &'g Slot<K, V>, stay: &'g Stay<'_, K, V, S>) {
        if !self.policy.is_bounded() {
            // SeqCst: the link of the slot before the look at the capacity; pairs with the fence in `set_capacity`, which
            // sets the capacity before it looks for slots that are in no queue. One of the two sees the other.
            fence(Ordering::SeqCst);
            if !self.policy.is_bounded() {
                return;
            }
        }
        let weight = || slot.weight_of(slot.load(stay).held());
        if slot.mark().load().place() == Place::Out {
            self.policy.enter(&self.seen(stay), slot.mark(), slot.half_hash(), weight(), stay);
        } else {
            self.policy.reweigh(slot.mark(), weight);
            if self.policy.is_over() {
                let seen = Seen { spared: Some(slot), ..self.seen(stay) };
                self.policy.make_room(&seen, slot.half_hash(), stay);
            }
        }
    }

    /// Drops what is too much, a batch under each pin.
    pub(crate) fn shrink(&self) {
        let mut goes_on = true;
        while goes_on && self.policy.is_over() {
            let stay = self.stay(pin());
            let seen = self.seen(&stay);
            goes_on = (0..BATCH)
                .all(|nth| !self.policy.is_over() || self.policy.drop_one(&seen, nth as u32, &stay));
        }
    }

    /// Sets the capacity, and drops what is too much.
    pub(crate) fn set_capacity(&self, capacity: u64) {
        let was_bounded = self.policy.is_bounded();
        self.policy.set_capacity(capacity);
        // SeqCst: pairs with the fence in `stored`.
        fence(Ordering::SeqCst);
        if !was_bounded && self.policy.is_bounded() {
            self.each_bucket(|shard, at| {
                let stay = self.stay(pin());
                let enter = |slot| {
                    if matches!(Slot::load(slot, &stay), State::Ready(_)) {
                        self.stored(slot, &stay);
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
        match state.held().cell() {
            Some(cell) if self.stage(slot, cell, false) > Stage::Stale => RemovalCause::Expired,
            _ => cause,
        }
    }
}
