//! A value that has been taken out of its slot, in the hands of the one who did it (INV-slot-1).

use super::{Cell, Slot, SlotRef};
use crate::primitive::epoch::{Guard, pin};
use std::ptr::NonNull;

/// A value that no slot leads to any more. Others may still read it under their pins; it is freed after those, once this is
/// dropped.
pub(crate) struct Taken<'g, K, V> {
    slot: &'g Slot<K, V>,
    cell: NonNull<Cell<V>>,
    /// It has stayed in the room of its dead slot, and goes with that (INV-slot-4).
    stays: bool,
    guard: &'g Guard,
}

impl<'g, K, V> Taken<'g, K, V> {
    pub(super) fn of(
        slot: &'g Slot<K, V>,
        cell: *mut Cell<V>,
        stays: bool,
        guard: &'g Guard,
    ) -> Option<Self> {
        Some(Self { slot, cell: NonNull::new(cell)?, stays, guard })
    }

    /// Holds on to the value and its key beyond the pin.
    pub(crate) fn hold(self) -> Removed<K, V> {
        let slot = SlotRef::of(self.slot, self.guard);
        let removed = Removed { slot, cell: self.cell, stays: self.stays };
        std::mem::forget(self);
        removed
    }
}

impl<K, V> Drop for Taken<'_, K, V> {
    fn drop(&mut self) {
        if !self.stays {
            // SAFETY: INV-slot-1: whoever made this has taken the cell out; it is retired once, here.
            unsafe { self.slot.retire_cell(self.cell.as_ptr(), self.guard) };
        }
    }
}

/// A value that no slot leads to any more, and its key, held without a pin: for an eviction listener.
pub(crate) struct Removed<K, V> {
    slot: SlotRef<K, V>,
    cell: NonNull<Cell<V>>,
    stays: bool,
}

// SAFETY: owns a value and a share of a slot, which may be read and dropped on any thread under these bounds.
unsafe impl<K: Send + Sync, V: Send + Sync> Send for Removed<K, V> {}

impl<K, V> Removed<K, V> {
    pub(crate) fn key(&self) -> &K {
        self.slot.key()
    }

    pub(crate) fn value(&self) -> &V {
        // SAFETY: INV-slot-1, INV-slot-4: it has been taken out, and is freed by nobody but this, or with the slot.
        &unsafe { self.cell.as_ref() }.value
    }
}

impl<K, V> Drop for Removed<K, V> {
    fn drop(&mut self) {
        if !self.stays {
            // SAFETY: as in `Taken`; others may still read it under pins that began before.
            unsafe { self.slot.retire_cell(self.cell.as_ptr(), &pin()) };
        }
    }
}
