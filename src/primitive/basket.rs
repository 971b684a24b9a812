//! A bounded, lock-free, unordered place to hand things over.

use super::plain::{AtomicPtr, AtomicUsize, Ordering};
use std::ptr::{NonNull, null_mut};

/// Up to a fixed number of boxes. Putting and taking never wait; the order is about that of the putting.
pub(crate) struct Basket<T> {
    places: Box<[AtomicPtr<T>]>,
    put: AtomicUsize,
    taken: AtomicUsize,
}

// SAFETY: a basket owns its boxes and moves them between threads.
unsafe impl<T: Send> Send for Basket<T> {}
// SAFETY: as above; no reference to a box is handed out.
unsafe impl<T: Send> Sync for Basket<T> {}

impl<T> Basket<T> {
    pub(crate) fn new(places: usize) -> Self {
        Self {
            places: (0..places).map(|_| AtomicPtr::new(null_mut())).collect(),
            put: AtomicUsize::new(0),
            taken: AtomicUsize::new(0),
        }
    }

    fn from(&self, cursor: &AtomicUsize) -> impl Iterator<Item = &AtomicPtr<T>> {
        // Relaxed: only where to begin to look.
        let start = cursor.fetch_add(1, Ordering::Relaxed);
        (0..self.places.len()).map(move |i| &self.places[start.wrapping_add(i) % self.places.len()])
    }

    /// Puts a thing in, or gives it back if the basket is full.
    pub(crate) fn put(&self, thing: T) -> Result<(), T> {
        let raw = Box::into_raw(Box::new(thing));
        for place in self.from(&self.put) {
            // Release: publishes the thing; pairs with the Acquire in `take`. Relaxed failure: the place is taken.
            if place.compare_exchange(null_mut(), raw, Ordering::Release, Ordering::Relaxed).is_ok() {
                return Ok(());
            }
        }
        // SAFETY: published to nobody.
        Err(*unsafe { Box::from_raw(raw) })
    }

    /// Takes a thing out.
    pub(crate) fn take(&self) -> Option<T> {
        for place in self.from(&self.taken) {
            // Relaxed: a hint. Acquire: the thing; pairs with the Release in `put`.
            if place.load(Ordering::Relaxed).is_null() {
                continue;
            }
            if let Some(raw) = NonNull::new(place.swap(null_mut(), Ordering::Acquire)) {
                // SAFETY: `put` boxed it, and the swap made it ours alone.
                return Some(*unsafe { Box::from_raw(raw.as_ptr()) });
            }
        }
        None
    }

    /// How many are in, about.
    pub(crate) fn len(&self) -> usize {
        // Relaxed: a figure to show.
        self.places.iter().filter(|p| !p.load(Ordering::Relaxed).is_null()).count()
    }
}

impl<T> Drop for Basket<T> {
    fn drop(&mut self) {
        while self.take().is_some() {}
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn gives_back_what_it_got_and_refuses_more_than_fits() {
        let basket = Basket::new(3);
        for i in 0..3 {
            assert_eq!(basket.put(i), Ok(()));
        }
        assert_eq!((basket.put(9), basket.len()), (Err(9), 3));
        let mut out: Vec<_> = std::iter::from_fn(|| basket.take()).collect();
        out.sort_unstable();
        assert_eq!(out, [0, 1, 2]);
        assert_eq!(basket.put(4), Ok(()));
    }

    #[test]
    fn every_thing_comes_out_once() {
        let basket = Basket::new(8);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for t in 0..2 {
                let (basket, sum) = (&basket, &sum);
                s.spawn(move || {
                    for i in 0..10_000 {
                        let mut thing = t * 10_000 + i;
                        while let Err(back) = basket.put(thing) {
                            thing = back;
                            sum.fetch_add(basket.take().unwrap_or(0), Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        let rest: usize = std::iter::from_fn(|| basket.take()).sum();
        assert_eq!(sum.into_inner() + rest, (0..20_000).sum());
    }
}
