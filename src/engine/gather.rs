//! The gathering: single loads that wait a little for others, to be loaded by one call with them.
//!
//! A load is put on the pile, and sets the moment at which it is due: each does, not the first alone, so that one that is
//! suspended in between holds up nobody. The keeper begins what is due, or who moves the clock, or the load with which a batch is
//! full. Whoever takes the loads from the pile begins them, and runs no user code for it but `Eq` of keys with equal hashes; if he
//! is suspended meanwhile, they are as loads whose leader is: their leases end.

use super::Core;
use crate::clock::{Moment, Time};
use crate::flight::{LoadFuture, Waits};
use crate::loader::LoadContext;
use crate::primitive::Arc as Shared;
use crate::primitive::handover::Handover;
use crate::primitive::pile::Pile;
use crate::primitive::plain::{AtomicU64, AtomicUsize, Ordering, fence};
use crate::slot::Flight;
use std::sync::Arc;
use std::time::Duration;

/// A load that waits for others.
pub(crate) struct Gathered<K, V> {
    /// Where its load comes as one of a batch. Nobody else has it any more once the load has been dropped.
    pub(crate) load: Arc<Handover<LoadFuture<V>>>,
    pub(crate) key: K,
    pub(crate) cx: LoadContext<V>,
    /// Of the two loaders of a cache, whose kind it is for.
    pub(crate) by: Waits,
    /// Whose load it is. Goes last: what is handed over names it.
    pub(crate) flight: Shared<Flight<K, V>>,
}

/// Begins loads as batches.
type Begin<K, V, S> = fn(&Arc<Core<K, V, S>>, Vec<Gathered<K, V>>);

/// The loads of a cache that wait for others.
pub(crate) struct Gathering<K, V, S> {
    pile: Pile<Gathered<K, V>>,
    /// How many are on the pile. A change counts a moment after it, so this may wrap below zero.
    count: AtomicUsize,
    /// When those on the pile are due: in real time, or by a clock that is moved by hand.
    due: AtomicU64,
    delay: Duration,
    begin: Begin<K, V, S>,
}

impl<K, V, S> Gathering<K, V, S> {
    pub(crate) fn new(delay: Duration, begin: Begin<K, V, S>) -> Self {
        Self {
            pile: Pile::new(),
            count: AtomicUsize::new(0),
            due: AtomicU64::new(Moment::NEVER.nanos()),
            delay,
            begin,
        }
    }

    /// Begins all that are on the pile.
    fn begin(&self, core: &Arc<Core<K, V, S>>) {
        // AcqRel: the loads of those who have set it are on the pile; pairs with `gather`. One that sets it after this is due for
        // itself.
        self.due.swap(Moment::NEVER.nanos(), Ordering::AcqRel);
        let loads = self.pile.take_all();
        // Relaxed: a figure.
        self.count.fetch_sub(loads.len(), Ordering::Relaxed);
        if !loads.is_empty() {
            (self.begin)(core, loads);
        }
    }
}

impl<K, V, S> Core<K, V, S> {
    /// Has a load wait for others, if the cache gathers. Not under a pin.
    pub(crate) fn gather(self: &Arc<Self>, load: Gathered<K, V>) {
        let Some(gathering) = &self.gathering else { return };
        let by_hand = self.time.is_moved_by_hand();
        // Before the load is on the pile: a given clock is user code.
        let now = if by_hand { self.time.now() } else { Time::Coarse.precise() };
        let due = now.plus(gathering.delay).nanos();
        gathering.pile.put(load);
        // Relaxed: a figure.
        let count = gathering.count.fetch_add(1, Ordering::Relaxed).wrapping_add(1).cast_signed();
        if usize::try_from(count).is_ok_and(|count| count >= self.settings.max_batch_size) {
            return gathering.begin(self);
        }
        // AcqRel: the load is on the pile before; pairs with the swap in `begin`.
        let is_first = gathering.due.fetch_min(due, Ordering::AcqRel) > due;
        if by_hand {
            // It may have been moved meanwhile.
            self.begin_due_by_hand();
        } else if is_first {
            self.keeper.hurry_upkeep();
        }
    }

    /// Begins the loads that have waited for others long enough, and tells when the next will have. Not under a pin.
    pub(super) fn begin_due(self: &Arc<Self>, now: Moment) -> Moment {
        let Some(gathering) = &self.gathering else { return Moment::NEVER };
        // Relaxed: `begin` acquires what it takes.
        if gathering.due.load(Ordering::Relaxed) <= now.nanos() {
            gathering.begin(self);
        }
        Moment::from_nanos(gathering.due.load(Ordering::Relaxed))
    }

    /// As `begin_due`, by a clock that is moved by hand: after it has been moved, and after a load has set when it is due.
    pub(super) fn begin_due_by_hand(self: &Arc<Self>) {
        if self.gathering.is_some() {
            // SeqCst: between the one and the look at the other; pairs with itself: of a move and a load one sees the other.
            fence(Ordering::SeqCst);
            self.begin_due(self.time.now());
        }
    }
}
