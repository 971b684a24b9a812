//! The audit: what must add up when a cache ends. Debug builds look, before the tables are buried.
//!
//! - All that the slots hold weighs what the policy has counted, and the values are as many as the shards have counted.
//! - Each slot that is in a queue by its mark has one element there; the small queues' lengths fit the marks;
//!   and in a bounded cache there is no slot but those.
//! - No slot is dead and still linked.
//! - No load is under way, since a lease keeps its cache alive; one that waits on an executor's queue does not.
//! - The loads that are to replace something are as many as have been counted.
//! - No permit is out but those of loads that wait on an executor's queue, and nobody waits.

use super::Core;
use crate::policy::Audited;
use crate::primitive::epoch::pin;
use crate::primitive::plain::Ordering;
use crate::slot::{Slot, State};

/// So many faults are told.
const TOLD: usize = 8;

impl<K, V, S> Core<K, V, S> {
    /// # Panics
    /// With all that is wrong, if anything is.
    pub(super) fn audit(&mut self) {
        let wrong = self.faults();
        let told = wrong[..wrong.len().min(TOLD)].join("; ");
        let (name, faults) = (&self.settings.name, wrong.len());
        assert!(wrong.is_empty(), "the cache `{name}` does not add up, {faults} faults: {told}");
    }

    fn faults(&mut self) -> Vec<String> {
        let guard = pin();
        let (mut wrong, mut slots, mut refreshing) = (Vec::new(), Vec::new(), 0);
        for (nth, shard) in self.shards.iter().enumerate() {
            let mut values = 0;
            let mut look = |slot: &Slot<K, V>| {
                let (hash, state) = (slot.half_hash(), slot.load(&guard));
                let held = state.held();
                match state {
                    State::Dead => return wrong.push(format!("slot {hash:08x}: is dead, and linked")),
                    State::Loading(flight) if !flight.is_queued() => {
                        wrong.push(format!("slot {hash:08x}: a load without a lease"));
                    }
                    State::Loading(_) if held.is_nothing() => return,
                    State::Loading(_) | State::Ready(_) => {}
                }
                refreshing += usize::from(matches!(state, State::Loading(_)) && !held.is_nothing());
                values += usize::from(held.cell().is_some());
                if !held.is_nothing() {
                    slots.push(Audited { hash, mark: slot.mark().load(), weight: slot.weight_of(held) });
                }
            };
            let mut at = Some(0);
            while let Some(prefix) = at {
                at = shard.table.visit(prefix, &mut look, &guard);
            }
            // Relaxed: `&mut`: nobody else is there.
            let counted = shard.values.0.load(Ordering::Relaxed).cast_signed();
            if counted != values as isize {
                wrong.push(format!("values of shard {nth}: {counted} by the count, {values} by the slots"));
            }
        }
        // Relaxed: as above.
        let counted = self.refreshing.0.load(Ordering::Relaxed).cast_signed();
        if counted != refreshing as isize {
            wrong.push(format!("refreshes: {counted} by the count, {refreshing} by the slots"));
        }
        // Relaxed: as above.
        let (permits, waiting) =
            (self.loading.0.load(Ordering::Relaxed), self.waiting.0.load(Ordering::Relaxed));
        let mut queued = 0;
        self.flights.each(&guard, |flight| queued += usize::from(!flight.is_over()));
        if self.settings.max_concurrent_loads.is_some() && permits != queued {
            wrong.push(format!("permits: {permits} are out, {queued} loads are queued"));
        }
        if waiting != 0 {
            wrong.push(format!("waiters: {waiting} by the count"));
        }
        self.policy.audit(&slots, &guard, &mut |fault| wrong.push(fault));
        wrong
    }
}
