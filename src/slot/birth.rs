//! How slots and cells come into being, before anybody else can see them; and how a whole table of them ends.

use super::{Flight, Held, HeldWord, Slot, SlotRef, loading_word};
use crate::clock::Moment;
use crate::freshness::Times;
use crate::primitive::Arc;
use crate::primitive::atomic::Ordering;
use crate::primitive::epoch::{Guard, contain};
use crate::slot::Cell;
use crate::table::{Linked, Table};
use std::ptr::NonNull;

/// A cell that is to be published: in a box, or in the slot's own room.
pub(crate) struct NewCell<K, V> {
    pub(super) cell: NonNull<Cell<V>>,
    /// The share of the slot in whose room it is.
    pub(super) room: Option<SlotRef<K, V>>,
}

impl<K, V> NewCell<K, V> {
    pub(crate) fn boxed(times: Times, value: V) -> Self {
        Self { cell: NonNull::from(Box::leak(Box::new(Cell { times, value }))), room: None }
    }

    /// In the room of the flight's slot if it is the first flight, else in a box.
    pub(crate) fn for_flight(flight: &Flight<K, V>, times: Times, value: V) -> Self {
        if !flight.first {
            return Self::boxed(times, value);
        }
        let slot = &flight.target;
        // SAFETY: INV-slot-4: only the first flight's lease comes here, and only once, since it is used up by it.
        let cell = unsafe { slot.fill_room(Cell { times, value }) };
        Self { cell, room: Some(slot.clone()) }
    }

    pub(super) fn into_value(self) -> V {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: moved out once, here; `this` is not dropped.
        let room = unsafe { std::ptr::read(&raw const this.room) };
        match room {
            // SAFETY: written by `for_flight`, published to nobody, and moved out once, here.
            Some(_slot) => unsafe { this.cell.read() }.value,
            // SAFETY: boxed by `boxed`, published to nobody.
            None => unsafe { Box::from_raw(this.cell.as_ptr()) }.value,
        }
    }

    /// The pointer that the slot word is to hold. The share of the room stays with the value.
    pub(super) fn publish(self) -> *mut () {
        let raw = self.cell.as_ptr().cast();
        std::mem::forget(self);
        raw
    }
}

impl<K, V> Drop for NewCell<K, V> {
    fn drop(&mut self) {
        match &self.room {
            // SAFETY: written by `for_flight`, published to nobody.
            Some(_) => unsafe { std::ptr::drop_in_place(self.cell.as_ptr()) },
            // SAFETY: boxed by `boxed`, published to nobody.
            None => drop(unsafe { Box::from_raw(self.cell.as_ptr()) }),
        }
    }
}

/// A slot that is not linked yet, so that nobody but its owner has seen it.
#[must_use]
pub(crate) struct Unborn<K, V>(pub(super) Option<SlotRef<K, V>>);

impl<K, V> Unborn<K, V> {
    /// A slot that is born with a value.
    pub(crate) fn with_value(hash: u64, key: K, times: Times, value: V) -> Self {
        // One share for the link, and one for the value in the slot's room.
        let slot = Slot::allocate(hash, key, times.born, 2);
        // SAFETY: INV-slot-4: nobody else knows the slot yet.
        let cell = unsafe { slot.fill_room(Cell { times, value }) };
        // Relaxed: linking the slot publishes it.
        slot.word.store(cell.as_ptr().cast(), Ordering::Relaxed);
        Self(Some(slot))
    }

    /// A slot that is born with a load of its value.
    pub(crate) fn with_flight(
        hash: u64,
        key: K,
        now: Moment,
        flight: impl FnOnce(SlotRef<K, V>, HeldWord<V>) -> Flight<K, V>,
    ) -> (Self, Arc<Flight<K, V>>) {
        let slot = Slot::allocate(hash, key, now, 1);
        let flight = Arc::new(flight(slot.clone(), Held::nothing().word()));
        // Relaxed: linking the slot publishes it.
        slot.word.store(loading_word(flight.clone()), Ordering::Relaxed);
        (Self(Some(slot)), flight)
    }

    /// Links the slot, unless one of this key is linked already.
    pub(crate) fn link(mut self, table: &Table<Slot<K, V>>, guard: &Guard) -> Result<(), Self>
    where
        K: Eq,
    {
        let Some(slot) = &self.0 else { return Ok(()) };
        // `Eq` is user code: until it has spoken, the share is ours to drop.
        if table.link(slot.0, slot.hash(), |other| other.key == slot.key, guard).is_err() {
            return Err(self);
        }
        // The share is the table's now.
        self.0.take().map(SlotRef::into_link);
        Ok(())
    }

    /// The key and the value of a slot that was to be born with a value.
    pub(crate) fn into_parts(mut self) -> Option<(K, V)> {
        let raw = self.0.take()?.into_link();
        // SAFETY: an unborn slot has only its owner's share and the value's, and both end here.
        let slot = *unsafe { Box::from_raw(raw.as_ptr()) };
        // SAFETY: INV-slot-4: `with_value` put a value there; it is moved out once, here.
        let cell = unsafe { slot.first.into_inner().assume_init() };
        Some((slot.key, cell.value))
    }
}

impl<K, V> Drop for Unborn<K, V> {
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            // SAFETY: nobody else has seen the slot.
            unsafe { slot.bury() };
        }
    }
}

/// Drops all that a table of slots holds, at once.
pub(crate) fn bury_all<K, V>(table: &mut Table<Slot<K, V>>) {
    table.drain(|link| {
        let slot = SlotRef(link);
        // SAFETY: `&mut`: nobody else is in the table. A lease would have kept the cache alive, and one in a queue looks at
        // the slot only after it has made sure of that.
        contain(|| unsafe { slot.bury() });
        contain(|| drop(slot));
    });
}
