//! The bucket word: what one bucket holds, in one atomic word.
//!
//! | word | meaning |
//! |---|---|
//! | `HIGH` | nothing, live |
//! | pointer | one element, live |
//! | pointer + `LIST` | an immutable list of two or more elements, live |
//! | `FROZEN` | nothing, and the halves are the children's |
//! | pointer + `FROZEN` (+ `HIGH`) | one element, which goes to the low (high) child |
//! | pointer + `FROZEN` + `LIST` | both halves, in a [`Split`] |
//! | `0` | `UNSET`: a child whose parent has not been frozen; zero, so that a new array costs nothing until it is used |
//!
//! A frozen word never changes. The pointers are those of elements, lists and splits, whose alignment leaves
//! three bits.

use super::list::{Entries, Entry, List};
use super::{Linked, fingerprint};
use crate::hash::half_of;
use crate::primitive::prefetch;
use std::marker::PhantomData;
use std::ptr::{NonNull, null_mut};

/// The pointer is one to a list; in a frozen word, one to a split. Set when it is built, never cleared.
const LIST: usize = 1;
/// The bucket has moved down: no writer may change it any more. Set by the freezer, never cleared.
const FROZEN: usize = 2;
/// With `FROZEN`: the one element goes to the high child. Alone: nothing, live.
const HIGH: usize = 4;
const TAGS: usize = LIST | FROZEN | HIGH;

/// Both halves of a frozen list. Owned by the array in which it is; the lists in it are the children's.
#[repr(align(8))]
pub(super) struct Split<T> {
    halves: [Word<T>; 2],
}

/// A value that a bucket's atomic word can have.
pub(super) struct Word<T>(*mut (), PhantomData<*const T>);

impl<T> Clone for Word<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Word<T> {}

impl<T> Word<T> {
    pub(super) const EMPTY: Self = Self(std::ptr::without_provenance_mut(HIGH), PhantomData);
    pub(super) const UNSET: Self = Self(null_mut(), PhantomData);

    #[inline]
    pub(super) fn from_raw(raw: *mut ()) -> Self {
        const { assert!(align_of::<T>() > TAGS, "an element's alignment must leave room for the tags") };
        const { assert!(List::<T>::ALIGN > TAGS, "and so must a list's") };
        const { assert!(align_of::<Split<T>>() > TAGS, "and so must a split's") };
        Self(raw, PhantomData)
    }

    #[inline]
    pub(super) fn raw(self) -> *mut () {
        self.0
    }

    #[inline]
    fn has(self, tag: usize) -> bool {
        self.0.addr() & tag != 0
    }

    #[inline]
    fn pointer(self) -> *mut () {
        self.0.map_addr(|a| a & !TAGS)
    }

    fn tagged(pointer: *mut (), tags: usize) -> Self {
        Self(pointer.map_addr(|a| a | tags), PhantomData)
    }

    fn one(element: NonNull<T>) -> Self {
        Self(element.as_ptr().cast(), PhantomData)
    }

    fn list(list: List<T>) -> Self {
        Self::tagged(list.as_ptr(), LIST)
    }

    /// Asks for what the word leads to.
    #[inline]
    pub(super) fn prefetch(self) {
        prefetch(self.pointer());
    }

    #[inline]
    pub(super) fn is_unset(self) -> bool {
        self.0.addr() == 0
    }

    #[inline]
    pub(super) fn is_frozen(self) -> bool {
        self.has(FROZEN)
    }

    /// The one element of a live word that has exactly one: the common case.
    #[inline]
    pub(super) fn only(self) -> Option<NonNull<T>> {
        if self.has(TAGS) { None } else { NonNull::new(self.0.cast()) }
    }

    /// What is in the list of a live word; nothing, if it has none.
    ///
    /// # Safety
    /// The word is live (not frozen, not unset), and its list, if any, lives for `'a`.
    #[inline]
    unsafe fn many<'a>(self) -> Entries<'a, T> {
        debug_assert!(!self.is_unset() && !self.is_frozen(), "only a live word has elements");
        // SAFETY: alive by contract.
        self.as_list().map_or(Entries::NONE, |list| unsafe { list.entries() })
    }

    /// The elements of a live word.
    ///
    /// # Safety
    /// As for `many`.
    unsafe fn elements<'a>(self) -> impl Iterator<Item = NonNull<T>> + 'a
    where
        T: 'a,
    {
        // SAFETY: by contract.
        let many = unsafe { self.many() };
        self.only().into_iter().chain(many.iter().map(|entry| entry.element))
    }

    /// The half of a frozen word that goes to the low or the high child: a live word.
    pub(super) fn half(self, high: bool) -> Self {
        debug_assert!(self.is_frozen(), "only a frozen word has halves");
        let pointer = self.pointer();
        if self.has(LIST) {
            // SAFETY: a split lives as long as its array, and the caller came here through the array.
            let split = unsafe { &*pointer.cast::<Split<T>>() };
            return split.halves[usize::from(high)];
        }
        if self.has(HIGH) == high && !pointer.is_null() { Self(pointer, PhantomData) } else { Self::EMPTY }
    }

    /// The list that this live word leads to.
    pub(super) fn as_list(self) -> Option<List<T>> {
        // SAFETY: the tag says what the pointer is.
        (self.has(LIST) && !self.is_frozen()).then(|| unsafe { List::from_ptr(self.pointer()) })
    }

    /// The split that this frozen word leads to.
    pub(super) fn as_split(self) -> Option<NonNull<Split<T>>> {
        (self.has(LIST) && self.is_frozen()).then(|| NonNull::new(self.pointer().cast())).flatten()
    }

    /// Builds the live word for `len` entries; a list is allocated where there are two or more.
    fn of(len: usize, entry: impl Fn(usize) -> Entry<T>) -> Self {
        match len {
            0 => Self::EMPTY,
            1 => Self::one(entry(0).element),
            _ => Self::list(List::new(len, entry)),
        }
    }
}

impl<T: Linked> Word<T> {
    /// # Safety
    /// The word is live, was read (or may be dereferenced, INV-table-2) under a pin that lasts for `'g`.
    #[inline]
    pub(super) unsafe fn find<'g>(self, hash: u64, eq: &mut impl FnMut(&T) -> bool) -> Option<&'g T> {
        let mut is_wanted = |element: &T| half_of(element.hash()) == half_of(hash) && eq(element);
        if let Some(only) = self.only() {
            // SAFETY: by contract: linked when the word was read, so not freed under the pin.
            let only = unsafe { only.as_ref() };
            return is_wanted(only).then_some(only);
        }
        // SAFETY: by contract.
        for entry in unsafe { self.many() }.iter() {
            if entry.fingerprint == fingerprint(hash) {
                // SAFETY: as above.
                let element = unsafe { entry.element.as_ref() };
                if is_wanted(element) {
                    return Some(element);
                }
            }
        }
        None
    }

    /// # Safety
    /// As for `find`.
    pub(super) unsafe fn each<'g>(self, each: &mut impl FnMut(&'g T))
    where
        T: 'g,
    {
        // SAFETY: by contract.
        for element in unsafe { self.elements() } {
            // SAFETY: by contract: linked when the word was read, so not freed under the pin.
            each(unsafe { element.as_ref() });
        }
    }

    /// The word with one element more. Nothing is freed.
    ///
    /// # Safety
    /// As for `find`; `new` is alive.
    pub(super) unsafe fn with(self, new: NonNull<T>) -> Self {
        // SAFETY: by contract.
        let new = unsafe { Entry::new(new) };
        if let Some(only) = self.only() {
            // SAFETY: by contract: linked when the word was read, so not freed under the pin.
            let both = [unsafe { Entry::new(only) }, new];
            return Self::of(2, |i| both[i]);
        }
        // SAFETY: by contract.
        let many = unsafe { self.many() };
        Self::of(many.len() + 1, |i| if i < many.len() { many.at(i) } else { new })
    }

    /// The word without `old`, and the pointer to it that was linked; `None` if it does not lead to it. Nothing is freed.
    ///
    /// # Safety
    /// As for `find`; `old` itself is only compared.
    pub(super) unsafe fn without(self, old: *const T) -> Option<(Self, NonNull<T>)> {
        let is_old = |element: NonNull<T>| std::ptr::eq(element.as_ptr(), old);
        if let Some(only) = self.only() {
            return is_old(only).then_some((Self::EMPTY, only));
        }
        // SAFETY: by contract.
        let many = unsafe { self.many() };
        let gap = many.iter().position(|entry| is_old(entry.element))?;
        let word = Self::of(many.len() - 1, |i| many.at(i + usize::from(i >= gap)));
        Some((word, many.at(gap).element))
    }

    /// The frozen word that this live word becomes; `goes_high` decides by the hash.
    ///
    /// # Safety
    /// As for `find`.
    pub(super) unsafe fn frozen(self, goes_high: impl Fn(u64) -> bool) -> Self {
        if let Some(only) = self.only() {
            // SAFETY: by contract: linked when the word was read, so not freed under the pin.
            let high = goes_high(unsafe { only.as_ref() }.hash());
            return Self::tagged(only.as_ptr().cast(), if high { FROZEN | HIGH } else { FROZEN });
        }
        // SAFETY: by contract.
        let many = unsafe { self.many() };
        if many.len() == 0 {
            return Self::tagged(null_mut(), FROZEN);
        }
        // SAFETY: as for `only`: whatever a live word leads to, list or not, was linked when the word was read.
        let is_high = |entry: &Entry<T>| goes_high(unsafe { entry.element.as_ref() }.hash());
        let (high, low): (Vec<_>, Vec<_>) = many.iter().partition(is_high);
        let halves = [Self::of(low.len(), |i| low[i]), Self::of(high.len(), |i| high[i])];
        Self::tagged(Box::into_raw(Box::new(Split { halves })).cast(), FROZEN | LIST)
    }

    /// Takes back a word that `with`, `without` or `frozen` built and that was not published.
    ///
    /// # Safety
    /// The word was never published; `seen` is the word that it was built from.
    pub(super) unsafe fn discard(self) {
        if let Some(list) = self.as_list() {
            // SAFETY: built by us, published to nobody.
            unsafe { list.free() };
        } else if let Some(split) = self.as_split() {
            // SAFETY: as above.
            let split = unsafe { Box::from_raw(split.as_ptr()) };
            for half in split.halves {
                // SAFETY: as above.
                unsafe { half.discard() };
            }
        }
    }

    /// Hands every element of a live word over and frees its list.
    ///
    /// # Safety
    /// The caller owns what the word leads to.
    pub(super) unsafe fn consume(self, each: &mut impl FnMut(NonNull<T>)) {
        // SAFETY: by contract.
        for element in unsafe { self.elements() } {
            each(element);
        }
        if let Some(list) = self.as_list() {
            // SAFETY: by contract.
            unsafe { list.free() };
        }
    }
}
