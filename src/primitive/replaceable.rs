//! A value that readers borrow under a pin while somebody puts another in its place.

use super::atomic::{AtomicPtr, Ordering};
use super::epoch::{Guard, retire};
use std::ptr::{from_ref, null_mut};

/// A place for one value, or none.
///
/// `INV-replaceable-1`: the place owns what it points to; the winner of the CAS that takes it out retires it, so what is
/// read under a pin lives as long as the pin.
pub(crate) struct Replaceable<T>(AtomicPtr<T>);

impl<T: Send + Sync> Replaceable<T> {
    pub(crate) fn empty() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    pub(crate) fn get<'g>(&self, _guard: &'g Guard) -> Option<&'g T> {
        // Acquire: the value; pairs with the Release in `replace`.
        let there = self.0.load(Ordering::Acquire);
        // SAFETY: INV-replaceable-1.
        unsafe { there.as_ref() }
    }

    /// Puts a value in the place of exactly what was seen, which takes `bytes`; drops it if somebody else was faster.
    pub(crate) fn replace(&self, seen: Option<&T>, new: T, bytes: usize, guard: &Guard) {
        let seen = seen.map_or(null_mut(), |seen| from_ref(seen).cast_mut());
        let new = Box::into_raw(Box::new(new));
        // Release: publishes the value; pairs with the Acquire in `get`. Relaxed failure: nothing is read.
        match self.0.compare_exchange(seen, new, Ordering::Release, Ordering::Relaxed) {
            Ok(old) if old.is_null() => {}
            Ok(old) => {
                // SAFETY: INV-replaceable-1: boxed by `replace`, freed once.
                let free = move || drop(unsafe { Box::from_raw(old) });
                // SAFETY: INV-replaceable-1: taken out by the CAS.
                unsafe { retire(guard, bytes, free) };
            }
            // SAFETY: boxed above, published to nobody.
            Err(_) => drop(unsafe { Box::from_raw(new) }),
        }
    }
}

impl<T> Drop for Replaceable<T> {
    fn drop(&mut self) {
        // Relaxed: `&mut`: nobody else is there.
        let there = self.0.load(Ordering::Relaxed);
        if !there.is_null() {
            // SAFETY: INV-replaceable-1.
            drop(unsafe { Box::from_raw(there) });
        }
    }
}
