//! The list: what the word of a bucket with two or more elements leads to. It never changes once it is built.
//!
//! ```text
//!                                                              ▼ here points the word
//!   padding │ fingerprints: a byte each │ head: length, a u32  │ elements: a pointer each
//! ```
//! That is 24 bytes for two elements, 32 for three, 40 for four. A fingerprint is a byte of the element's hash: of the
//! elements that a search is not for, it reads about one in 256. Where the elements begin does not depend on their number,
//! so that the processor can fetch one ahead while it waits for the head.

use super::{Linked, fingerprint};
use crate::primitive::Witness;
use crate::primitive::epoch::give_back;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::slice;

/// What stands before the elements.
struct Head {
    witness: Witness,
    len: u32,
}

/// An element, with its fingerprint.
pub(super) struct Entry<T> {
    pub(super) fingerprint: u8,
    pub(super) element: NonNull<T>,
}

impl<T> Clone for Entry<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Entry<T> {}

impl<T: Linked> Entry<T> {
    /// # Safety
    /// The element is alive.
    pub(super) unsafe fn new(element: NonNull<T>) -> Self {
        // SAFETY: by contract.
        Self { fingerprint: fingerprint(unsafe { element.as_ref() }.hash()), element }
    }
}

/// What is in a list.
pub(super) struct Entries<'a, T> {
    fingerprints: &'a [u8],
    elements: &'a [NonNull<T>],
}

impl<'a, T> Entries<'a, T> {
    pub(super) const NONE: Self = Self { fingerprints: &[], elements: &[] };

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.elements.len()
    }

    #[inline]
    pub(super) fn at(&self, index: usize) -> Entry<T> {
        Entry { fingerprint: self.fingerprints[index], element: self.elements[index] }
    }

    #[inline]
    pub(super) fn iter(&self) -> impl Iterator<Item = Entry<T>> + use<'a, T> {
        let pairs = self.fingerprints.iter().zip(self.elements);
        pairs.map(|(&fingerprint, &element)| Entry { fingerprint, element })
    }
}

/// A pointer to a list. Copying it copies the pointer: whoever owns the list frees it once.
pub(super) struct List<T>(NonNull<NonNull<T>>);

impl<T> Clone for List<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for List<T> {}

impl<T> List<T> {
    /// What a pointer to a list is a multiple of.
    pub(super) const ALIGN: usize = 8;

    /// What a list takes, about: most have two elements.
    pub(super) const BYTES: usize = 24;

    /// How far into the allocation the elements begin.
    fn offset(len: usize) -> usize {
        const { assert!(Self::ALIGN >= align_of::<Head>() && Self::ALIGN >= align_of::<NonNull<T>>()) };
        (size_of::<Head>() + len).next_multiple_of(Self::ALIGN)
    }

    fn layout(len: usize) -> Layout {
        let size = Self::offset(len) + len * size_of::<NonNull<T>>();
        Layout::from_size_align(size, Self::ALIGN).expect("a list of this length fits into memory")
    }

    /// A list of `len` entries, made by `entry`, which must not panic.
    pub(super) fn new(len: usize, mut entry: impl FnMut(usize) -> Entry<T>) -> Self {
        let head = Head {
            witness: Witness::new(),
            len: u32::try_from(len).expect("a bucket has less than half a hash of elements"),
        };
        let layout = Self::layout(len);
        // SAFETY: the layout has the size of `Head` at least, which is not zero.
        let Some(raw) = NonNull::new(unsafe { alloc(layout) }) else { handle_alloc_error(layout) };
        // SAFETY: the layout has room for the elements from there on.
        let list = Self(unsafe { raw.add(Self::offset(len)) }.cast());
        // SAFETY: the layout has room for a head there, and for `len` entries about it.
        let at = unsafe { list.head() };
        // SAFETY: as above, and the elements' alignment is a head's too.
        unsafe { at.write(head) };
        // SAFETY: allocated with room for so many.
        let fingerprints = unsafe { list.fingerprints(len) };
        for i in 0..len {
            let Entry { fingerprint, element } = entry(i);
            // SAFETY: `i < len`.
            let at = unsafe { fingerprints.add(i) };
            // SAFETY: as above.
            unsafe { at.write(fingerprint) };
            // SAFETY: `i < len`.
            let at = unsafe { list.0.add(i) };
            // SAFETY: as above.
            unsafe { at.write(element) };
        }
        list
    }

    /// # Safety
    /// The list is allocated.
    #[inline]
    unsafe fn head(self) -> NonNull<Head> {
        // SAFETY: the head stands before the elements.
        unsafe { self.0.cast::<Head>().sub(1) }
    }

    /// # Safety
    /// The list is allocated with room for `len` entries.
    #[inline]
    unsafe fn fingerprints(self, len: usize) -> NonNull<u8> {
        // SAFETY: by contract.
        let head = unsafe { self.head() };
        // SAFETY: the fingerprints stand before the head.
        unsafe { head.cast::<u8>().sub(len) }
    }

    /// What is in it.
    ///
    /// # Safety
    /// The list lives for `'a`.
    #[inline]
    pub(super) unsafe fn entries<'a>(self) -> Entries<'a, T> {
        // SAFETY: by contract.
        let head = unsafe { self.head() };
        // SAFETY: `new` wrote it.
        let head = unsafe { head.as_ref() };
        head.witness.used();
        let len = head.len as usize;
        // SAFETY: `new` made room for so many.
        let fingerprints = unsafe { self.fingerprints(len) };
        // SAFETY: `new` wrote them, and nobody writes to them again.
        let fingerprints = unsafe { slice::from_raw_parts(fingerprints.as_ptr(), len) };
        // SAFETY: as above.
        let elements = unsafe { slice::from_raw_parts(self.0.as_ptr(), len) };
        Entries { fingerprints, elements }
    }

    pub(super) fn as_ptr(self) -> *mut () {
        self.0.as_ptr().cast()
    }

    /// The pointer that `as_ptr` gave.
    ///
    /// # Safety
    /// `raw` came from `as_ptr` of the same type.
    #[inline]
    pub(super) unsafe fn from_ptr(raw: *mut ()) -> Self {
        // SAFETY: `as_ptr` never gives null.
        Self(unsafe { NonNull::new_unchecked(raw.cast()) })
    }

    /// Frees the list, not its elements.
    ///
    /// # Safety
    /// The caller owns the list, and nobody uses it any more.
    pub(super) unsafe fn free(self) {
        // SAFETY: owned by the caller.
        let head = unsafe { self.head() };
        // SAFETY: `new` wrote it.
        let Head { witness, len } = unsafe { head.as_ref() };
        witness.ended();
        let len = *len as usize;
        // SAFETY: not used after this.
        unsafe { head.drop_in_place() };
        // SAFETY: the allocation began so much before the elements.
        let raw = unsafe { self.0.cast::<u8>().sub(Self::offset(len)) };
        let (raw, layout) = (raw.as_ptr(), Self::layout(len));
        // SAFETY: allocated by `new` with this layout.
        give_back(move || unsafe { dealloc(raw, layout) });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn keeps_what_it_was_built_of_in_little_room() {
        let numbers: Vec<u64> = (0..300).collect();
        let entry = |i: usize| Entry { fingerprint: i as u8, element: NonNull::from(&numbers[i]) };
        for (len, bytes) in [(2, 24), (3, 32), (4, 40), (5, 56), (300, 304 + 300 * 8)] {
            assert_eq!(List::<u64>::layout(len).size(), bytes, "{len} elements on 64 bits");
            let list = List::new(len, entry);
            // SAFETY: freed below.
            let entries = unsafe { list.entries() };
            assert_eq!(entries.len(), len);
            for (i, found) in entries.iter().enumerate() {
                assert_eq!((found.fingerprint, found.element), (i as u8, entry(i).element));
                assert_eq!((entries.at(i).fingerprint, entries.at(i).element), (i as u8, entry(i).element));
            }
            // SAFETY: not used after this.
            unsafe { list.free() };
        }
    }
}
