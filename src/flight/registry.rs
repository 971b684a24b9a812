//! A lock-free list of what is under way: seats that are taken and left, in chunks that are never given back.

use crate::primitive::atomic::{AtomicPtr, Ordering};
use crate::primitive::epoch::{Guard, retire};
use crate::primitive::{Arc, exposed, owner};
use std::ptr::{NonNull, null_mut};

/// Seats of one chunk.
const SEATS: usize = if cfg!(loom) { 2 } else { 30 };

struct Chunk<T> {
    seats: [AtomicPtr<T>; SEATS],
    next: AtomicPtr<Chunk<T>>,
}

impl<T> Chunk<T> {
    fn new() -> Self {
        Self { seats: std::array::from_fn(|_| AtomicPtr::new(null_mut())), next: AtomicPtr::new(null_mut()) }
    }
}

/// Who is under way. Its size follows the largest number at one time.
pub(crate) struct Registry<T> {
    first: Chunk<T>,
}

/// A place in a registry; whoever took it leaves it.
#[must_use]
pub(crate) struct Seat<T>(NonNull<AtomicPtr<T>>);

// SAFETY: a seat is the right to empty one atomic word, from any thread.
unsafe impl<T: Send + Sync> Send for Seat<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Seat<T> {}

impl<T> Registry<T> {
    pub(crate) fn new() -> Self {
        Self { first: Chunk::new() }
    }

    /// Takes a free seat. Lock-free: a failed CAS means that another took that seat.
    pub(crate) fn enter(&self, item: Arc<T>) -> Seat<T> {
        let item = exposed(Arc::into_raw(item).cast_mut());
        let hint = crate::primitive::epoch::number();
        let mut chunk = &self.first;
        loop {
            for i in 0..SEATS {
                let seat = &chunk.seats[(hint + i) % SEATS];
                // Relaxed: only a hint for the CAS. Release: publishes the item; pairs with the Acquire in `each`.
                if seat.load(Ordering::Relaxed).is_null()
                    && seat.compare_exchange(null_mut(), item, Ordering::Release, Ordering::Relaxed).is_ok()
                {
                    return Seat(NonNull::from(seat));
                }
            }
            chunk = self.after(chunk);
        }
    }

    /// The next chunk, made if there is none.
    fn after<'a>(&'a self, chunk: &'a Chunk<T>) -> &'a Chunk<T> {
        // Acquire: the chunk's seats; pairs with the Release below.
        let mut next = chunk.next.load(Ordering::Acquire);
        if next.is_null() {
            let new = Box::into_raw(Box::new(Chunk::new()));
            // Release: publishes the new chunk. Acquire failure: somebody else's.
            match chunk.next.compare_exchange(null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => next = new,
                Err(theirs) => {
                    // SAFETY: published to nobody.
                    drop(unsafe { Box::from_raw(new) });
                    next = theirs;
                }
            }
        }
        // SAFETY: chunks live as long as the registry.
        unsafe { &*next }
    }

    /// Leaves a seat that `enter` of this registry gave.
    pub(crate) fn leave(&self, seat: Seat<T>, guard: &Guard) {
        // SAFETY: the seat is of this registry, and chunks live as long as it does.
        let word = unsafe { seat.0.as_ref() };
        // Relaxed: nothing is published; the item is kept alive by the collector for those who pinned before.
        let item = word.swap(null_mut(), Ordering::Relaxed);
        // SAFETY: it came from `into_raw`, and is given back once, here.
        let give_back = move || drop(unsafe { Arc::from_raw(item) });
        // SAFETY: the seat's owner took the item out of the only word that led to it.
        unsafe { retire(guard, size_of::<T>(), give_back) };
    }

    /// Visits all who are seated; those who come or go meanwhile may be missed.
    pub(crate) fn each<'g>(&self, guard: &'g Guard, mut visit: impl FnMut(&'g T))
    where
        T: 'g,
    {
        let _ = guard;
        let mut chunk = Some(&self.first);
        while let Some(c) = chunk {
            for seat in &c.seats {
                // Acquire: the item; pairs with the Release in `enter`.
                let item = seat.load(Ordering::Acquire);
                // SAFETY: seated when it was read under `guard`, and left by way of `retire`.
                if let Some(item) = unsafe { item.as_ref() } {
                    visit(item);
                }
            }
            // Acquire: pairs with the Release in `after`.
            let next = c.next.load(Ordering::Acquire);
            // SAFETY: chunks live as long as the registry.
            chunk = unsafe { next.as_ref() };
        }
    }
}

impl<T> Registry<T> {
    /// A share of each of those who are seated and `wanted`.
    pub(crate) fn shares(&self, guard: &Guard, wanted: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let mut shares = Vec::new();
        self.each(guard, |item| {
            if !wanted(item) {
                return;
            }
            let raw = owner(item).cast_const();
            // SAFETY: the seat's share is given back through retire, so the count is above zero under the pin.
            unsafe { Arc::increment_strong_count(raw) };
            // SAFETY: the share that was just made; the item came from `into_raw`.
            shares.push(unsafe { Arc::from_raw(raw) });
        });
        shares
    }
}

impl<T> Drop for Registry<T> {
    fn drop(&mut self) {
        let free = |seats: &[AtomicPtr<T>]| {
            for seat in seats {
                // Relaxed: `&mut self`, so nobody else is there.
                let item = seat.load(Ordering::Relaxed);
                if !item.is_null() {
                    // SAFETY: it came from `into_raw`, and its owner was leaked.
                    drop(unsafe { Arc::from_raw(item) });
                }
            }
        };
        free(&self.first.seats);
        // Relaxed: as above.
        let mut next = self.first.next.load(Ordering::Relaxed);
        while let Some(chunk) = NonNull::new(next) {
            // SAFETY: made by `Box::into_raw` and freed once, here.
            let chunk = unsafe { Box::from_raw(chunk.as_ptr()) };
            free(&chunk.seats);
            // Relaxed: as above.
            next = chunk.next.load(Ordering::Relaxed);
        }
    }
}
