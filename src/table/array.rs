//! One array of buckets, and the moves by which its content goes down to an array of twice the size.

use super::Linked;
use super::list::List;
use super::word::{Split, Word};
use crate::primitive::atomic::{AtomicPtr, AtomicUsize, Ordering};
use crate::primitive::epoch::{Guard, retire};
use crate::primitive::prefetch;
use crate::primitive::step::step;
use crate::primitive::thin::Thin;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::null_mut;

/// What an array has beside its buckets. Its alignment leaves room for `SHIFT` in a pointer to it.
#[repr(align(64))]
struct Head {
    /// The array of twice the size that takes this one's content; null until the growth begins.
    next: AtomicPtr<()>,
    /// Buckets below this have a claimer, who moves them unless it is suspended. May run past the end.
    claimed: AtomicUsize,
    /// Buckets below this have been seen moved.
    moved: AtomicUsize,
}

/// The low bits of a pointer to an array say how to index it, which saves a read of its head: the bucket of a hash is
/// `hash >> shift`.
const SHIFT: usize = 63;
const _: () = assert!(align_of::<Head>() > SHIFT, "an array's alignment must leave room for the shift");

/// A handle to an array: its pointer with the shift in it, good while the array is pinned.
pub(super) struct Array<'g, T>(*mut (), PhantomData<(&'g (), *const T)>);

impl<T> Clone for Array<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Array<'_, T> {}

impl<'g, T: Linked> Array<'g, T> {
    /// An array of `1 << bits` buckets that hold nothing.
    pub(super) fn empty(bits: u32) -> Self {
        Self::allocate(bits, |head, len| Thin::new(head, len, |_| AtomicPtr::new(Word::<T>::EMPTY.raw())))
    }

    /// An array of `1 << bits` buckets that are unset.
    fn unset(bits: u32) -> Self {
        // `UNSET` is the zero word.
        Self::allocate(bits, Thin::of_null)
    }

    fn allocate(bits: u32, make: impl FnOnce(Head, usize) -> Thin<Head, AtomicPtr<()>>) -> Self {
        debug_assert!((1..64).contains(&bits), "a shift must be less than the width of a hash");
        let head = Head {
            next: AtomicPtr::new(null_mut()),
            claimed: AtomicUsize::new(0),
            moved: AtomicUsize::new(0),
        };
        let buckets = make(head, 1 << bits);
        Self(buckets.as_ptr().map_addr(|a| a | (64 - bits) as usize), PhantomData)
    }

    pub(super) fn as_ptr(self) -> *mut () {
        self.0
    }

    fn thin(self) -> Thin<Head, AtomicPtr<()>> {
        // SAFETY: without its shift this is what `Thin::as_ptr` gave, and the handle is good for `'g`.
        unsafe { Thin::from_ptr(self.0.map_addr(|a| a & !SHIFT)) }
    }

    #[inline]
    fn shift(self) -> u32 {
        (self.0.addr() & SHIFT) as u32
    }

    /// # Safety
    /// `raw` came from `as_ptr`, and the array is not freed during `'g` (INV-table-4).
    #[inline]
    pub(super) unsafe fn from_ptr(raw: *mut ()) -> Self {
        Self(raw, PhantomData)
    }

    /// Frees the array and its splits; elements and lists are the children's by now, or have been taken out.
    ///
    /// # Safety
    /// The caller owns the array, and nobody uses it any more.
    pub(super) unsafe fn free(raw: *mut ()) {
        // SAFETY: by contract.
        let array = unsafe { Self::from_ptr(raw) };
        for bucket in array.buckets() {
            // Relaxed: the caller is alone, and was synchronized with by what made it so.
            if let Some(split) = Word::<T>::from_raw(bucket.load(Ordering::Relaxed)).as_split() {
                // SAFETY: the array owns its splits.
                drop(unsafe { Box::<Split<T>>::from_raw(split.as_ptr()) });
            }
        }
        // SAFETY: by contract.
        unsafe { array.thin().free() };
    }

    #[inline]
    fn head(self) -> &'g Head {
        // SAFETY: the handle is good for `'g`.
        unsafe { self.thin().head() }
    }

    #[inline]
    fn buckets(self) -> &'g [AtomicPtr<()>] {
        // SAFETY: the handle is good for `'g`.
        unsafe { self.thin().tail() }
    }

    pub(super) fn len(self) -> usize {
        self.buckets().len()
    }

    #[inline]
    fn bucket(self, hash: u64) -> &'g AtomicPtr<()> {
        let index = (hash >> self.shift()) as usize;
        debug_assert!(index < self.len(), "an array has a bucket for every hash");
        // SAFETY: the array has `1 << (64 - shift)` buckets, and the handle is good for `'g`.
        unsafe { self.thin().element(index) }
    }

    /// Asks for the bucket of a hash ahead.
    #[inline]
    pub(super) fn prefetch(self, hash: u64) {
        prefetch(self.bucket(hash));
    }

    /// The word of a hash's bucket.
    #[inline]
    pub(super) fn load(self, hash: u64) -> Word<T> {
        // Acquire: elements, lists and splits; pairs with the Release in `replace`.
        Word::from_raw(self.bucket(hash).load(Ordering::Acquire))
    }

    /// Whether a hash of this bucket goes to the high child.
    #[inline]
    pub(super) fn goes_high(self, hash: u64) -> bool {
        hash >> (self.shift() - 1) & 1 == 1
    }

    /// The first hash after those of this hash's bucket.
    pub(super) fn after(self, hash: u64) -> Option<u64> {
        let shift = self.shift();
        ((hash >> shift) + 1).checked_shl(shift).filter(|next| *next != 0)
    }

    /// The array that takes this one's content, if growth has begun.
    pub(super) fn try_next(self, _guard: &'g Guard) -> Option<Self> {
        // Acquire: the words of `next`; pairs with the Release in `begin_growth`.
        let next = self.head().next.load(Ordering::Acquire);
        // SAFETY: INV-table-4: `next` is retired after `self`, and `self` is good for `'g`.
        (!next.is_null()).then(|| unsafe { Self::from_ptr(next) })
    }

    /// The array below a frozen word.
    pub(super) fn next(self, guard: &'g Guard) -> Self {
        self.try_next(guard).expect("a bucket is frozen only after the growth has begun")
    }

    /// Whether an array of twice the size can be indexed and no growth is under way.
    pub(super) fn may_grow(self) -> bool {
        // Relaxed: a hint; the CAS in `begin_growth` decides.
        self.head().next.load(Ordering::Relaxed).is_null() && self.shift() > 33
    }

    /// Puts an unset array of twice the size below this one, which must be the root.
    pub(super) fn begin_growth(self) {
        let next = Self::unset(64 - self.shift() + 1);
        step();
        // Release: the words of `next`; pairs with the Acquire in `try_next`.
        let begun = self.head().next.compare_exchange(
            null_mut(),
            next.as_ptr(),
            Ordering::Release,
            Ordering::Relaxed,
        );
        if begun.is_err() {
            // SAFETY: published to nobody.
            unsafe { Self::free(next.as_ptr()) };
        }
    }

    /// Swings a live word from `seen` to `wanted`, which was built from it. Retires the list that is replaced, or
    /// takes `wanted` back.
    pub(super) fn replace(self, hash: u64, seen: Word<T>, wanted: Word<T>, guard: &Guard) -> bool {
        let bucket = self.bucket(hash);
        // Release: the new element and list; pairs with the Acquire in `load`. Relaxed failure: the caller looks again.
        let won =
            bucket.compare_exchange(seen.raw(), wanted.raw(), Ordering::Release, Ordering::Relaxed).is_ok();
        if !won {
            // SAFETY: published to nobody.
            unsafe { wanted.discard() };
        } else if let Some(list) = seen.as_list() {
            // SAFETY: INV-table-4: freed once, by the winner of the CAS.
            let free = move || unsafe { list.free() };
            // SAFETY: INV-table-4: the CAS took it out of the only word that led to it.
            unsafe { retire(guard, List::<T>::BYTES, free) };
        }
        won
    }

    /// Gives a child its half, unless it has it.
    pub(super) fn thaw(self, hash: u64, half: Word<T>) {
        // Relaxed: whoever comes to this child has come through the frozen word, or through a root that was swung when
        // all had moved, and has the half's list and elements by that. A failure means that it is set, by somebody who
        // wrote the same.
        let _ = self.bucket(hash).compare_exchange(
            Word::<T>::UNSET.raw(),
            half.raw(),
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
    }

    /// Claims up to `chunk` buckets for moving; `None` when all have a claimer.
    pub(super) fn claim(self, chunk: usize) -> Option<Range<usize>> {
        let claimed = &self.head().claimed;
        // Relaxed: divides work; whether a bucket has moved is read off its words.
        if claimed.load(Ordering::Relaxed) >= self.len() {
            return None;
        }
        // Relaxed: as above.
        let start = claimed.fetch_add(chunk, Ordering::Relaxed);
        (start < self.len()).then(|| start..self.len().min(start + chunk))
    }

    /// Makes sure that the next few buckets not yet seen moved have moved; `true` when all have been seen.
    pub(super) fn see_moved(self, chunk: usize, next: Self, guard: &Guard) -> bool {
        let moved = &self.head().moved;
        // Acquire: what others have seen moved; pairs with the Release below, so that the swing publishes it too.
        let seen = moved.load(Ordering::Acquire);
        let end = self.len().min(seen + chunk);
        for bucket in seen..end {
            self.move_down(bucket, next, guard);
        }
        // AcqRel: as above. A failure means that somebody else saw the same buckets moved.
        let _ = moved.compare_exchange(seen, end, Ordering::AcqRel, Ordering::Relaxed);
        end == self.len()
    }

    /// Freezes a bucket, unless it is frozen, and gives both children their halves.
    pub(super) fn move_down(self, bucket: usize, next: Self, guard: &Guard) {
        let first = (bucket as u64) << self.shift();
        let frozen = loop {
            let seen = self.load(first);
            if seen.is_frozen() {
                break seen;
            }
            // SAFETY: read from a live word under `guard` (INV-table-1).
            let wanted = unsafe { seen.frozen(|hash| self.goes_high(hash)) };
            step();
            // `replace` retires the list: the children have lists of their own.
            if self.replace(first, seen, wanted, guard) {
                break wanted;
            }
        };
        step();
        let high = first | 1 << (self.shift() - 1);
        next.thaw(first, frozen.half(false));
        step();
        next.thaw(high, frozen.half(true));
    }

    /// Takes a bucket's content out.
    pub(super) fn take(self, bucket: usize) -> Word<T> {
        // Relaxed: the caller is alone.
        Word::from_raw(self.buckets()[bucket].swap(Word::<T>::EMPTY.raw(), Ordering::Relaxed))
    }
}
