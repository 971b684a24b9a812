//! A header and an array in one allocation, behind a pointer of one word.

use super::Witness;
use super::atomic::AtomicPtr;
use super::epoch::give_back;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;

#[repr(C, align(8))]
struct Head<H> {
    len: u32,
    /// How far into the allocation the header begins.
    pad: u32,
    witness: Witness,
    head: H,
}

/// A pointer to a header `H` followed by an array of `T`. Copying it copies the pointer: whoever owns the
/// allocation frees it once.
pub(crate) struct Thin<H, T>(NonNull<Head<H>>, std::marker::PhantomData<T>);

impl<H, T> Clone for Thin<H, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<H, T> Copy for Thin<H, T> {}

impl<H, T> Thin<H, T> {
    /// Where the array begins.
    const OFFSET: usize = size_of::<Head<H>>().next_multiple_of(align_of::<T>());

    const ALIGN: usize =
        if align_of::<T>() > align_of::<Head<H>>() { align_of::<T>() } else { align_of::<Head<H>>() };

    /// What is asked of the allocator: no more than the usual alignment, since memory that is to be zeroed costs more
    /// with a larger one. The rest is made up for by room to move the header.
    fn layout(len: usize) -> Layout {
        const USUAL: usize = 16;
        let tail = Layout::array::<T>(len).expect("an array of this length fits into memory");
        let (whole, _) = Layout::new::<Head<H>>().extend(tail).expect("and so does its header");
        let slack = Self::ALIGN.saturating_sub(USUAL);
        let size = whole.pad_to_align().size() + slack;
        Layout::from_size_align(size, Self::ALIGN.min(USUAL)).expect("and so does its alignment")
    }

    /// Allocates by `allocate`, and writes the header.
    fn begin(head: H, len: usize, allocate: unsafe fn(Layout) -> *mut u8) -> Self {
        let layout = Self::layout(len);
        // SAFETY: the layout has the size of `Head<H>` at least, which is not zero.
        let raw = unsafe { allocate(layout) };
        let Some(raw) = NonNull::new(raw) else { handle_alloc_error(layout) };
        let pad = raw.addr().get().next_multiple_of(Self::ALIGN) - raw.addr().get();
        // SAFETY: the layout has slack for this.
        let start = unsafe { raw.add(pad) }.cast::<Head<H>>();
        let len = u32::try_from(len).expect("an array is indexed by less than half a hash");
        // SAFETY: freshly allocated for this header, and aligned for it now.
        unsafe { start.write(Head { len, pad: pad as u32, witness: Witness::new(), head }) };
        Self(start, std::marker::PhantomData)
    }

    /// Allocates and fills; `fill` must not panic.
    pub(crate) fn new(head: H, len: usize, mut fill: impl FnMut(usize) -> T) -> Self {
        let thin = Self::begin(head, len, alloc);
        let tail = thin.tail_ptr().cast::<T>();
        for i in 0..len {
            // SAFETY: `i < len`, and the layout has room for `len` elements.
            let at = unsafe { tail.add(i) };
            // SAFETY: as above, and nothing lives there yet.
            unsafe { at.write(fill(i)) };
        }
        thin
    }

    pub(crate) fn as_ptr(self) -> *mut () {
        self.0.as_ptr().cast()
    }

    /// The pointer that `as_ptr` gave.
    ///
    /// # Safety
    /// `raw` came from `as_ptr` of the same types, and the allocation has not been freed.
    pub(crate) unsafe fn from_ptr(raw: *mut ()) -> Self {
        // SAFETY: `as_ptr` never gives null.
        Self(unsafe { NonNull::new_unchecked(raw.cast()) }, std::marker::PhantomData)
    }

    /// The header.
    ///
    /// # Safety
    /// The allocation lives for `'a`.
    #[inline]
    pub(crate) unsafe fn head<'a>(self) -> &'a H {
        // SAFETY: written by `new`, alive by contract.
        let head = unsafe { self.0.as_ref() };
        head.witness.used();
        &head.head
    }

    fn tail_ptr(self) -> *mut [T] {
        // SAFETY: every caller vouches that the allocation lives; `new` wrote the header.
        let head = unsafe { self.0.as_ref() };
        head.witness.used();
        let len = head.len as usize;
        // SAFETY: the array begins at this offset of the allocation (`Layout::extend`).
        let start = unsafe { self.0.as_ptr().cast::<u8>().add(Self::OFFSET) }.cast::<T>();
        std::ptr::slice_from_raw_parts_mut(start, len)
    }

    /// The array.
    ///
    /// # Safety
    /// The allocation lives for `'a`.
    #[inline]
    pub(crate) unsafe fn tail<'a>(self) -> &'a [T] {
        // SAFETY: `new` wrote the elements, and nobody has a mutable reference to them before `free`.
        unsafe { &*self.tail_ptr() }
    }

    /// An element of the array.
    ///
    /// # Safety
    /// The allocation lives for `'a`, and the array is longer than `index`.
    #[inline]
    pub(crate) unsafe fn element<'a>(self, index: usize) -> &'a T {
        // SAFETY: alive by contract.
        unsafe { self.0.as_ref() }.witness.used();
        // SAFETY: the array begins at this offset of the allocation (`Layout::extend`).
        let start = unsafe { self.0.as_ptr().cast::<u8>().add(Self::OFFSET) }.cast::<T>();
        // SAFETY: by contract.
        let element = unsafe { start.add(index) };
        // SAFETY: `new` wrote the elements, and nobody has a mutable reference to them before `free`.
        unsafe { &*element }
    }

    /// Drops header and elements, and frees the allocation.
    ///
    /// # Safety
    /// The caller owns the allocation, and nobody uses it any more.
    pub(crate) unsafe fn free(self) {
        let tail = self.tail_ptr();
        // SAFETY: owned by the caller, alive until the end of this function.
        unsafe { self.0.as_ref() }.witness.ended();
        let layout = Self::layout(tail.len());
        // SAFETY: as above.
        let pad = unsafe { self.0.as_ref() }.pad as usize;
        // SAFETY: the elements were written by `new` and are dropped once, here.
        unsafe { std::ptr::drop_in_place(tail) };
        // SAFETY: the header likewise.
        unsafe { std::ptr::drop_in_place(self.0.as_ptr()) };
        // SAFETY: the allocation began so much before the header.
        let raw = unsafe { self.0.as_ptr().cast::<u8>().sub(pad) };
        // SAFETY: allocated by `new` with this layout.
        give_back(move || unsafe { dealloc(raw, layout) });
    }
}

impl<H> Thin<H, AtomicPtr<()>> {
    /// Null pointers, of memory that the system hands out zeroed: a large array costs nothing until it is used.
    #[cfg(not(loom))]
    pub(crate) fn of_null(head: H, len: usize) -> Self {
        // All bits zero is a null pointer.
        Self::begin(head, len, std::alloc::alloc_zeroed)
    }

    /// Null pointers.
    #[cfg(loom)]
    pub(crate) fn of_null(head: H, len: usize) -> Self {
        Self::new(head, len, |_| AtomicPtr::new(std::ptr::null_mut()))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn header_and_elements_are_dropped_once() {
        let witness = std::sync::Arc::new(());
        let thin = Thin::new(witness.clone(), 3, |_| witness.clone());
        assert_eq!(std::sync::Arc::strong_count(&witness), 5);
        // SAFETY: owned here, freed below.
        assert_eq!(unsafe { thin.tail() }.len(), 3);
        // SAFETY: not used after this.
        unsafe { thin.free() };
        assert_eq!(std::sync::Arc::strong_count(&witness), 1);
    }

    #[test]
    fn offsets_hold_for_wider_elements() {
        let thin = Thin::<u8, u128>::new(7, 2, |i| i as u128);
        // SAFETY: owned here, freed below.
        assert_eq!((*unsafe { thin.head() }, unsafe { thin.tail() }), (7, &[0u128, 1][..]));
        // SAFETY: not used after this.
        unsafe { thin.free() };
    }
}
