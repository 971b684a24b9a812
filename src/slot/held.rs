//! What a slot holds beside a load: nothing, a cell with a value, or the record of a failure.

use super::{RECORD, TAGS, untagged};
use crate::clock::Moment;
use crate::error::LoadError;
use crate::freshness::Times;
use std::marker::PhantomData;
use std::ptr::null_mut;

/// A value with its times. Immutable once published.
#[repr(C, align(8))]
pub(crate) struct Cell<V> {
    pub(crate) value: V,
    pub(crate) times: Times,
}

const _: () = assert!(size_of::<Cell<u64>>() == 24, "a word and the times");

/// A value with its times and its weight: what a box holds. The room of a slot holds a cell alone, which weighs
/// [`USUAL_WEIGHT`].
#[repr(C)]
pub(crate) struct Weighed<V> {
    pub(crate) cell: Cell<V>,
    pub(crate) weight: u32,
}

/// What a value weighs without a weigher, and a record without a value always.
pub(crate) const USUAL_WEIGHT: u32 = 1;

/// Until when a failed load of a key holds up the next one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pause {
    /// No refresh of a value that is still served begins before this.
    pub(crate) refresh: Moment,
    /// No load that somebody waits for begins before this. Not after `refresh`.
    pub(crate) load: Moment,
    /// Then the failures are forgotten. Not before `refresh`.
    pub(crate) forget: Moment,
}

/// What is remembered of a key beside its value: that a load failed, or that the source has no such key.
#[repr(align(8))]
pub(crate) struct Record<V> {
    pub(crate) error: LoadError,
    /// Failures in a row; zero: the key is absent until `pause.load`.
    pub(crate) attempts: u32,
    pub(crate) pause: Pause,
    /// The cell that the failed load was to replace; the slot owns it (INV-slot-1).
    pub(super) prev: *mut Cell<V>,
}

impl<V> Record<V> {
    /// Whether it says that the source has no such key.
    pub(crate) fn is_absence(&self) -> bool {
        self.attempts == 0
    }
}

/// What a slot holds beside a load: nothing, a cell, or a record. Only a word; [`Held`] reads it.
pub(crate) struct HeldWord<V>(pub(super) *mut (), PhantomData<*const V>);

impl<V> Clone for HeldWord<V> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<V> Copy for HeldWord<V> {}

// SAFETY: a word; whoever dereferences it vouches for the rest.
unsafe impl<V: Send + Sync> Send for HeldWord<V> {}
// SAFETY: as above.
unsafe impl<V: Send + Sync> Sync for HeldWord<V> {}

/// What a slot holds beside a load, readable for `'g`.
pub(crate) struct Held<'g, V>(HeldWord<V>, PhantomData<&'g V>);

impl<V> Clone for Held<'_, V> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<V> Copy for Held<'_, V> {}

impl<'g, V> Held<'g, V> {
    /// # Safety
    /// The word is null, or was read under a pin that lasts for `'g` from a slot that leads to it (INV-slot-2).
    pub(super) unsafe fn new(word: *mut ()) -> Self {
        Self(HeldWord(word, PhantomData), PhantomData)
    }

    pub(crate) fn nothing() -> Self {
        Self(HeldWord(null_mut(), PhantomData), PhantomData)
    }

    pub(super) fn raw(self) -> *mut () {
        self.0.0
    }

    pub(crate) fn word(self) -> HeldWord<V> {
        self.0
    }

    pub(crate) fn is_nothing(self) -> bool {
        self.raw().is_null()
    }

    pub(crate) fn record(self) -> Option<&'g Record<V>> {
        let raw = self.raw();
        // SAFETY: the tag says what it is, and it is readable for `'g`.
        (raw.addr() & TAGS == RECORD).then(|| unsafe { &*untagged(raw).cast::<Record<V>>() })
    }

    pub(super) fn cell_ptr(self) -> *mut Cell<V> {
        match self.record() {
            Some(record) => record.prev,
            None => self.raw().cast(),
        }
    }

    /// The value that is there, in whatever stage: a record keeps the one that its load was to replace.
    #[inline]
    pub(crate) fn cell(self) -> Option<&'g Cell<V>> {
        // SAFETY: readable for `'g`, and the slot owns a record's cell with the record.
        unsafe { self.cell_ptr().as_ref() }
    }
}
