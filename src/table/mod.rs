//! A lock-free hash map of counted elements: each bucket is one atomic word, and one CAS of it is one change.
//!
//! A table is a power-of-two array of words, indexed by the top bits of the hash, so that the children of bucket
//! `i` in a table of twice the size are `2i` and `2i + 1`. A word holds nothing, one element, or an immutable
//! short list of elements (see [`word`] and [`list`]). Insert and unlink build the new content and swing the word:
//! one linearization point, no tombstones, no duplicates. A-B-A on a word is harmless: the word is the whole state,
//! and no address is used again under a pin.
//!
//! A table that has grown has one to two buckets to an element: 8 to 16 bytes of words. Where hashes are well spread, the
//! lists add 5 to 7 bytes an element, and more the fuller the table is: 15 to 21 bytes in all.
//!
//! # Growth
//! ```text
//!   root ──► array ── next ──► array of twice the size        a child is UNSET until its parent is frozen
//!            [w][w][F][w]      [?][?][?][?][c][c][?][?]       F: frozen, both children (c) have their half
//! ```
//! *The freeze decides the split*: whoever freezes a bucket reads the hashes of its elements (which it may, as the word
//! that it read is live: `INV-table-1`) and computes both halves, and one CAS replaces the word by them. Children then copy
//! their half from that word (`UNSET -> half`), so all helpers write the same thing.
//!
//! # Invariants
//! - `INV-table-1`: an element is unlinked only from a live word of the lowest array that has its bucket set;
//!   so an element seen in a live word is linked at that moment.
//! - `INV-table-2`: through a frozen word an element may be dereferenced only by a thread that, after pinning and
//!   after reading that word, read `UNSET` in that half's child. Else it goes to the child.
//! - `INV-table-3`: nothing becomes `UNSET` again, and no word of an array that has been the root is `UNSET`.
//! - `INV-table-4`: what a CAS takes out is retired by the winner of that CAS: an element by the one that unlinks
//!   it, a list by the one that replaces it in a live word (a frozen word hands it on as a split), an array by the
//!   one that swings the root.
//! - `INV-table-5`: one growth at a time: only the root gets a `next`, and the root swings only when every bucket
//!   has been *seen* moved, by whoever looked. Nothing is counted.
//!
//! # Progress
//! `find` is wait-free but for the number of growths that overtake it (each costs it one more word). `link` and `unlink` are lock-free:
//! a failed CAS means that another thread changed the bucket. Nobody waits for growth; each writer moves a bounded
//! number of buckets.

mod array;
mod list;
#[cfg(all(test, loom))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;
mod word;

use crate::hash::half_of;
use crate::primitive::Padded;
use crate::primitive::atomic::{AtomicPtr, AtomicUsize, Ordering};
use crate::primitive::epoch::{Guard, exclusive, retire};
use crate::primitive::step::step;
use array::Array;
use std::ptr::NonNull;
use word::Word;

/// What a table can link: an element with a hash of its own that counts its shares.
pub(crate) trait Linked {
    /// The hash that the element was linked with; it never changes. Only its upper half counts.
    fn hash(&self) -> u64;

    /// Gives one share back.
    ///
    /// # Safety
    /// The caller owns a share and does not use it again.
    unsafe fn release(this: NonNull<Self>);
}

/// A byte of a hash, by which the elements of a bucket are told apart before any is read. It is folded from the lower half
/// of what an element remembers: the highest bits are those of the bucket, and the lowest may be those of the table.
#[inline]
fn fingerprint(hash: u64) -> u8 {
    let top = half_of(hash);
    (top ^ top >> 8) as u8
}

/// How many elements there may be to a bucket, on average, before the table grows.
const LOAD: usize = 1;

/// How many buckets a writer moves while the table grows.
const CHUNK: usize = if cfg!(any(test, loom)) { 1 } else { 16 };

/// A lock-free map of elements `T`. It owns one share of each element that it links.
pub(crate) struct Table<T: Linked> {
    root: AtomicPtr<()>,
    /// How many elements are linked, about. A change counts a moment after its CAS, so this may be below zero.
    linked: Padded<AtomicUsize>,
    marker: std::marker::PhantomData<*const T>,
}

// SAFETY: a table hands `&T` to any thread and releases elements on any thread; its own words are atomics.
unsafe impl<T: Linked + Send + Sync> Send for Table<T> {}
// SAFETY: as above.
unsafe impl<T: Linked + Send + Sync> Sync for Table<T> {}

impl<T: Linked> Table<T> {
    /// An empty table with room for `capacity` elements before it first grows.
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        let buckets = capacity.div_ceil(LOAD).clamp(2, 1 << 31).next_power_of_two();
        Self {
            root: AtomicPtr::new(Array::<T>::empty(buckets.trailing_zeros()).as_ptr()),
            linked: Padded(AtomicUsize::new(0)),
            marker: std::marker::PhantomData,
        }
    }

    #[inline]
    fn root<'g>(&self, _guard: &'g Guard) -> Array<'g, T> {
        // Acquire: the array's words; pairs with the Release in `swing`.
        let root = self.root.load(Ordering::Acquire);
        // SAFETY: INV-table-4: an array is retired after the root has left it, and the guard was pinned before.
        unsafe { Array::from_ptr(root) }
    }

    /// The element of this hash for which `eq` holds.
    #[inline(always)]
    pub(crate) fn find<'g>(
        &self,
        hash: u64,
        mut eq: impl FnMut(&T) -> bool,
        guard: &'g Guard,
    ) -> Option<&'g T> {
        let array = self.root(guard);
        let word = array.load(hash);
        if !word.is_frozen() {
            // SAFETY: read from a live word under `guard` (INV-table-1).
            return unsafe { word.find(hash, &mut eq) };
        }
        self.find_below(array, word, hash, eq, guard)
    }

    /// Asks for the bucket of a hash ahead, or, if `deep`, for what it leads to: the bucket itself is read then.
    #[inline]
    pub(crate) fn prefetch(&self, hash: u64, deep: bool, guard: &Guard) {
        let array = self.root(guard);
        if deep { array.load(hash).prefetch() } else { array.prefetch(hash) }
    }

    /// Goes on where a frozen word was met: in the arrays below.
    #[cold]
    fn find_below<'g>(
        &self,
        mut array: Array<'g, T>,
        mut word: Word<T>,
        hash: u64,
        mut eq: impl FnMut(&T) -> bool,
        guard: &'g Guard,
    ) -> Option<&'g T> {
        loop {
            if !word.is_frozen() {
                // SAFETY: read from a live word under `guard` (INV-table-1).
                return unsafe { word.find(hash, &mut eq) };
            }
            let child = array.next(guard);
            if child.load(hash).is_unset() {
                // SAFETY: INV-table-2: the child was read after the frozen word, and was unset.
                return unsafe { word.half(array.goes_high(hash)).find(hash, &mut eq) };
            }
            array = child;
            word = child.load(hash);
        }
    }

    /// The array whose word of this hash may be changed, and that word. Hands halves down on the way.
    fn writable<'g>(&self, hash: u64, guard: &'g Guard) -> (Array<'g, T>, Word<T>) {
        let mut array = self.root(guard);
        loop {
            let word = array.load(hash);
            if !word.is_frozen() {
                return (array, word);
            }
            let child = array.next(guard);
            child.thaw(hash, word.half(array.goes_high(hash)));
            array = child;
        }
    }

    /// Links `new`, unless an element with this hash for which `eq` holds is linked already: that one is returned,
    /// and the caller keeps its share of `new`.
    pub(crate) fn link<'g>(
        &self,
        new: NonNull<T>,
        hash: u64,
        mut eq: impl FnMut(&T) -> bool,
        guard: &'g Guard,
    ) -> Result<(), &'g T> {
        loop {
            let (array, seen) = self.writable(hash, guard);
            // SAFETY: read from a live word under `guard` (INV-table-1).
            if let Some(there) = unsafe { seen.find(hash, &mut eq) } {
                return Err(there);
            }
            // SAFETY: as above, and lists live as long as elements (INV-table-4).
            let wanted = unsafe { seen.with(new) };
            step();
            if array.replace(hash, seen, wanted, guard) {
                step();
                // Relaxed: an estimate that starts growth; nothing is published by it.
                let before = self.linked.0.fetch_add(1, Ordering::Relaxed);
                self.grow(before.wrapping_add(1).cast_signed(), guard);
                return Ok(());
            }
        }
    }

    /// Unlinks exactly `old`; the winner's share goes to the collector. `false` if it was not linked any more.
    pub(crate) fn unlink(&self, old: &T, guard: &Guard) -> bool {
        let hash = old.hash();
        loop {
            let (array, seen) = self.writable(hash, guard);
            // SAFETY: read from a live word under `guard`; lists live as long as elements (INV-table-4).
            let Some((wanted, old)) = (unsafe { seen.without(old) }) else { return false };
            step();
            if array.replace(hash, seen, wanted, guard) {
                step();
                // Relaxed: an estimate that starts growth; nothing is published by it.
                self.linked.0.fetch_sub(1, Ordering::Relaxed);
                // SAFETY: INV-table-4: the link's share, given back once, by the winner of the CAS.
                let release = move || unsafe { T::release(old) };
                // SAFETY: INV-table-4: the CAS took it out of the only word that led to it.
                unsafe { retire(guard, size_of::<T>(), release) };
                self.help(guard);
                return true;
            }
        }
    }

    /// Starts to grow when there are more than [`LOAD`] elements to a bucket, and takes part in what is under way.
    fn grow(&self, linked: isize, guard: &Guard) {
        let root = self.root(guard);
        if linked > (root.len() * LOAD).cast_signed() && root.may_grow() {
            root.begin_growth();
        }
        self.help(guard);
    }

    /// Moves a few buckets of a table that grows, and swings the root once all have been seen moved.
    fn help(&self, guard: &Guard) {
        let root = self.root(guard);
        let Some(next) = root.try_next(guard) else { return };
        if let Some(chunk) = root.claim(CHUNK) {
            for bucket in chunk {
                step();
                root.move_down(bucket, next, guard);
            }
            return;
        }
        // Every bucket has a claimer, but a claimer may have been suspended: look, and move what has not moved.
        if root.see_moved(CHUNK, next, guard) {
            step();
            self.swing(root, next, guard);
        }
    }

    fn swing(&self, root: Array<'_, T>, next: Array<'_, T>, guard: &Guard) {
        let (old, new, bytes) = (root.as_ptr(), next.as_ptr(), root.len() * size_of::<AtomicPtr<()>>());
        // Release: all words of `next` are set (INV-table-5); pairs with the Acquire in `root`.
        if self.root.compare_exchange(old, new, Ordering::Release, Ordering::Relaxed).is_ok() {
            // SAFETY: INV-table-4: freed once, by the winner of the CAS.
            let free = move || unsafe { Array::<T>::free(old) };
            // SAFETY: INV-table-4: the root has left it, and nothing else leads to it.
            unsafe { retire(guard, bytes, free) };
        }
    }

    /// One step of a walk by hash prefix: visits the elements of the first bucket at or after `prefix`, and returns
    /// where to go on, `None` at the end.
    ///
    /// The walk only moves up and survives growth: an element that is linked throughout is met, and one bucket is
    /// handled per call, so that a caller can unpin in between.
    pub(crate) fn visit<'g>(&self, prefix: u64, mut each: impl FnMut(&'g T), guard: &'g Guard) -> Option<u64>
    where
        T: 'g,
    {
        let mut array = self.root(guard);
        loop {
            let word = array.load(prefix);
            if !word.is_frozen() {
                // SAFETY: read from a live word under `guard` (INV-table-1).
                unsafe { word.each(&mut each) };
                return array.after(prefix);
            }
            let child = array.next(guard);
            if child.load(prefix).is_unset() {
                // SAFETY: INV-table-2: the child was read after the frozen word, and was unset.
                unsafe { word.half(array.goes_high(prefix)).each(&mut each) };
                return child.after(prefix);
            }
            array = child;
        }
    }

    /// Hands the share of every linked element over, and leaves the table empty.
    pub(crate) fn drain(&mut self, mut each: impl FnMut(NonNull<T>)) {
        // SAFETY: `&mut self`: nobody else is in the table.
        let guard = unsafe { exclusive() };
        loop {
            let root = self.root(guard);
            let Some(next) = root.try_next(guard) else { break };
            for bucket in 0..root.len() {
                root.move_down(bucket, next, guard);
            }
            self.swing(root, next, guard);
        }
        let root = self.root(guard);
        for bucket in 0..root.len() {
            // SAFETY: nobody else is in the table, so what the word led to is ours.
            unsafe { root.take(bucket).consume(&mut each) };
        }
        // Relaxed: nobody else is there.
        self.linked.0.store(0, Ordering::Relaxed);
    }
}

impl<T: Linked> Drop for Table<T> {
    fn drop(&mut self) {
        // SAFETY: `drain` hands each share over once.
        self.drain(|element| unsafe { T::release(element) });
        // Relaxed: nobody else is there.
        let root = self.root.load(Ordering::Relaxed);
        // SAFETY: nobody else is in the table.
        unsafe { Array::<T>::free(root) };
    }
}
