//! Wakers that are a share of something, made without an allocation.

use super::Arc;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::task::{RawWaker, RawWakerVTable, Waker};

/// Something that can be woken, from any thread and at any time.
pub(crate) trait Rouse: Send + Sync + 'static {
    fn rouse(&self);
}

/// A waker that has no share of its own.
pub(crate) struct BorrowedWaker<'a, T>(
    ManuallyDrop<Waker>,
    #[allow(dead_code, reason = "its share")] &'a Arc<T>,
);

impl<T> Deref for BorrowedWaker<'_, T> {
    type Target = Waker;

    fn deref(&self) -> &Waker {
        &self.0
    }
}

/// The waker of `this`; its clones have shares.
pub(crate) fn waker_of<T: Rouse>(this: &Arc<T>) -> BorrowedWaker<'_, T> {
    let raw = RawWaker::new(Arc::as_ptr(this).cast(), Shares::<T>::TABLE);
    // SAFETY: the functions of the table are what a waker's must be: from any thread, and each clone has a share. This one
    // is never dropped, and `this` outlives it.
    BorrowedWaker(ManuallyDrop::new(unsafe { Waker::from_raw(raw) }), this)
}

struct Shares<T>(std::marker::PhantomData<T>);

impl<T: Rouse> Shares<T> {
    const TABLE: &'static RawWakerVTable =
        &RawWakerVTable::new(Self::clone, Self::wake, Self::wake_by_ref, Self::drop);

    unsafe fn clone(data: *const ()) -> RawWaker {
        // SAFETY: a waker's data is an `Arc`'s pointer, and the waker that is cloned keeps it alive.
        unsafe { Arc::increment_strong_count(data.cast::<T>()) };
        RawWaker::new(data, Self::TABLE)
    }

    unsafe fn wake(data: *const ()) {
        // SAFETY: as in `clone`; the waker's share goes with it.
        unsafe { Arc::from_raw(data.cast::<T>()) }.rouse();
    }

    unsafe fn wake_by_ref(data: *const ()) {
        // SAFETY: as in `clone`.
        unsafe { &*data.cast::<T>() }.rouse();
    }

    unsafe fn drop(data: *const ()) {
        // SAFETY: as in `wake`.
        drop(unsafe { Arc::from_raw(data.cast::<T>()) });
    }
}
