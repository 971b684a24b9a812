//! A cell for one user at a time, whose right to it is kept elsewhere.

#[cfg(loom)]
use super::UnsafeCell;
#[cfg(not(loom))]
use std::cell::UnsafeCell;

/// A place that its users take turns at.
pub(crate) struct Exclusive<T>(UnsafeCell<T>);

// SAFETY: a user has the place alone, and what is in it may go from one thread to another.
unsafe impl<T: Send> Sync for Exclusive<T> {}

impl<T> Exclusive<T> {
    pub(crate) fn new(thing: T) -> Self {
        Self(UnsafeCell::new(thing))
    }

    /// Uses the place.
    ///
    /// # Safety
    /// The caller has it alone until this returns, and comes after everybody who had it before.
    pub(crate) unsafe fn with<R>(&self, user: impl FnOnce(&mut T) -> R) -> R {
        #[cfg(loom)]
        // SAFETY: by contract; loom reports whoever breaks it.
        return self.0.with_mut(|thing| user(unsafe { &mut *thing }));
        #[cfg(not(loom))]
        // SAFETY: by contract.
        user(unsafe { &mut *self.0.get() })
    }
}
