//! How slots and cells come into being, before anybody else can see them; and how a whole table of them ends.

use super::{Cell, Flight, Held, HeldWord, Slot, SlotRef, USUAL_WEIGHT, Weighed, loading_word};
use crate::clock::Moment;
use crate::policy::MarkWord;
use crate::primitive::Arc;
use crate::primitive::atomic::Ordering;
use crate::primitive::epoch::{Guard, contain};
use crate::table::{Linked, Table};
use std::ptr::NonNull;

/// A cell that is to be published: in a box, or in the slot's own room.
pub(crate) struct NewCell<K, V> {
    pub(super) cell: NonNull<Cell<V>>,
    /// The share of the slot in whose room it is.
    pub(super) room: Option<SlotRef<K, V>>,
}

impl<K, V> NewCell<K, V> {
    pub(crate) fn boxed(weighed: Weighed<V>) -> Self {
        Self { cell: NonNull::from(Box::leak(Box::new(weighed))).cast(), room: None }
    }

    /// In the room of the flight's slot if it is the first flight and the weight is the usual one, else in a box.
    pub(crate) fn for_flight(flight: &Flight<K, V>, weighed: Weighed<V>) -> Self {
        if !flight.claim.first || weighed.weight != USUAL_WEIGHT {
            return Self::boxed(weighed);
        }
        let slot = &flight.target;
        // SAFETY: INV-slot-4: only the first flight's lease comes here, and only once, since it is used up by it.
        let cell = unsafe { slot.fill_room(weighed.cell) };
        Self { cell, room: Some(slot.clone()) }
    }

    /// The box, if it is in one.
    fn as_box(&self) -> Option<NonNull<Weighed<V>>> {
        // What is in a box begins with its cell.
        self.room.is_none().then(|| self.cell.cast())
    }

    pub(super) fn weight(&self) -> u32 {
        // SAFETY: boxed by `boxed`, published to nobody.
        self.as_box().map_or(USUAL_WEIGHT, |weighed| unsafe { weighed.as_ref() }.weight)
    }

    pub(super) fn into_weighed(self) -> Weighed<V> {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: moved out once, here; `this` is not dropped.
        let room = unsafe { std::ptr::read(&raw const this.room) };
        match room {
            Some(_slot) => {
                // SAFETY: written by `for_flight`, published to nobody, and moved out once, here.
                let cell = unsafe { this.cell.read() };
                Weighed { cell, weight: USUAL_WEIGHT }
            }
            // SAFETY: boxed by `boxed`, published to nobody.
            None => *unsafe { Box::from_raw(this.cell.cast::<Weighed<V>>().as_ptr()) },
        }
    }

    /// The pointer that the slot word is to hold, which owns the cell from now on.
    pub(super) fn publish(self) -> *mut () {
        let raw = self.cell.as_ptr().cast();
        let mut this = std::mem::ManuallyDrop::new(self);
        drop(this.room.take());
        raw
    }
}

impl<K, V> Drop for NewCell<K, V> {
    fn drop(&mut self) {
        match self.as_box() {
            // SAFETY: boxed by `boxed`, published to nobody.
            Some(weighed) => drop(unsafe { Box::from_raw(weighed.as_ptr()) }),
            // SAFETY: written by `for_flight`, published to nobody.
            None => unsafe { std::ptr::drop_in_place(self.cell.as_ptr()) },
        }
    }
}

/// A slot that is not linked yet, so that nobody but its owner has seen it.
#[must_use]
pub(crate) struct Unborn<K, V>(pub(super) Option<SlotRef<K, V>>);

impl<K, V> Unborn<K, V> {
    /// A slot that is born with a value. `tailed`: its use is to be noted. `mark`: as the policy wants it.
    pub(crate) fn with_value(hash: u64, key: K, weighed: Weighed<V>, tailed: bool, mark: MarkWord) -> Self {
        let slot = Slot::allocate(hash, key, tailed.then(|| weighed.cell.times.born()), mark);
        let cell = if weighed.weight == USUAL_WEIGHT {
            // SAFETY: INV-slot-4: nobody else knows the slot yet.
            unsafe { slot.fill_room(weighed.cell) }.as_ptr().cast()
        } else {
            NewCell::<K, V>::boxed(weighed).publish()
        };
        // Relaxed: linking the slot publishes it.
        slot.word.store(cell, Ordering::Relaxed);
        Self(Some(slot))
    }

    /// A slot that is born with a load of its value; `used` is the first stamp of its use, if that is to be noted.
    pub(crate) fn with_flight(
        hash: u64,
        key: K,
        used: Option<Moment>,
        flight: impl FnOnce(SlotRef<K, V>, HeldWord<V>) -> Flight<K, V>,
    ) -> (Self, Arc<Flight<K, V>>) {
        let slot = Slot::allocate(hash, key, used, MarkWord::new());
        let flight = Arc::new(flight(slot.clone(), Held::nothing().word()));
        // Relaxed: linking the slot publishes it.
        slot.word.store(loading_word(flight.clone()), Ordering::Relaxed);
        (Self(Some(slot)), flight)
    }

    /// Links the slot, unless one of this key is linked already.
    pub(crate) fn link<'g>(
        mut self,
        table: &Table<Slot<K, V>>,
        guard: &'g Guard,
    ) -> Result<&'g Slot<K, V>, Self>
    where
        K: Eq,
    {
        let slot = self.0.as_ref().expect("it has its share until it is linked");
        // `Eq` is user code: until it has spoken, the share is ours to drop.
        if table.link(slot.0, slot.hash(), |other| other.key == slot.key, guard).is_err() {
            return Err(self);
        }
        // The share is the table's now, and given back through retire (INV-slot-3).
        let slot = self.0.take().expect("as above").into_link();
        // SAFETY: INV-slot-3: it was linked under this pin.
        Ok(unsafe { slot.as_ref() })
    }

    /// The key and the value of a slot that was to be born with a value.
    pub(crate) fn into_parts(mut self) -> Option<(K, Weighed<V>)> {
        let slot = self.0.take()?;
        // Relaxed: nobody else has seen the slot.
        let cell = slot.word.load(Ordering::Relaxed).cast::<Cell<V>>();
        let in_room = slot.is_room(cell);
        // SAFETY: an unborn slot has only its owner's share, which ends here.
        let slot = unsafe { Slot::unbox(slot.into_link()) };
        let weighed = if in_room {
            // SAFETY: INV-slot-4: `with_value` put a value there; it is moved out once, here.
            let cell = unsafe { slot.first.into_inner().assume_init() };
            Weighed { cell, weight: USUAL_WEIGHT }
        } else {
            // SAFETY: boxed by `with_value`; it is moved out once, here.
            *unsafe { Box::from_raw(cell.cast::<Weighed<V>>()) }
        };
        Some((slot.key, weighed))
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
