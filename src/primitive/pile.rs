//! An unbounded, lock-free place to put things, from which all are taken at once.

use super::atomic::{AtomicPtr, Ordering};
use std::ptr::{NonNull, null_mut};

struct Node<T> {
    thing: T,
    below: *mut Node<T>,
}

/// Boxes on top of each other: R. K. Treiber's stack, without a `pop` of one. Nobody looks into a box before it is his alone, so
/// that no box is freed under a reader, and one that comes to the same address again does no harm.
pub(crate) struct Pile<T> {
    top: AtomicPtr<Node<T>>,
}

// SAFETY: a pile owns its boxes and moves them between threads.
unsafe impl<T: Send> Send for Pile<T> {}
// SAFETY: as above; no reference to a box is handed out.
unsafe impl<T: Send> Sync for Pile<T> {}

impl<T> Pile<T> {
    pub(crate) fn new() -> Self {
        Self { top: AtomicPtr::new(null_mut()) }
    }

    pub(crate) fn put(&self, thing: T) {
        // Relaxed: what is below is not looked into.
        let mut below = self.top.load(Ordering::Relaxed);
        let node = Box::into_raw(Box::new(Node { thing, below }));
        // Release: publishes the box, and goes on publishing those below; pairs with the Acquire in `take_all`. Relaxed failure:
        // as above.
        while let Err(top) = self.top.compare_exchange_weak(below, node, Ordering::Release, Ordering::Relaxed)
        {
            below = top;
            // SAFETY: published to nobody.
            unsafe { (*node).below = top };
        }
    }

    /// Takes out all that is in, in the order in which it was put.
    pub(crate) fn take_all(&self) -> Vec<T> {
        let mut things = Vec::new();
        // Acquire: the boxes; pairs with the Release in `put`.
        let mut at = self.top.swap(null_mut(), Ordering::Acquire);
        while let Some(node) = NonNull::new(at) {
            // SAFETY: `put` boxed it, and the swap made it ours alone.
            let node = *unsafe { Box::from_raw(node.as_ptr()) };
            things.push(node.thing);
            at = node.below;
        }
        things.reverse();
        things
    }
}

impl<T> Drop for Pile<T> {
    fn drop(&mut self) {
        self.take_all();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn all_come_out_in_order_and_none_is_leaked() {
        let pile = Pile::new();
        let thing = Arc::new(());
        assert!(pile.take_all().is_empty());
        for round in 0..2 {
            (0..3).for_each(|n| pile.put((n, thing.clone())));
            let out: Vec<_> = pile.take_all().into_iter().map(|(n, _)| n).collect();
            assert_eq!(out, [0, 1, 2], "{round}");
        }
        pile.put((9, thing.clone()));
        drop(pile);
        assert_eq!(Arc::strong_count(&thing), 1);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::primitive::Arc;
    use crate::primitive::epoch::Participant;
    use crate::primitive::model::{Census, FEW, Value, check, spawn};

    /// Two put while a third takes: nothing is lost, nothing comes twice, and each thing is whole when it comes.
    #[test]
    fn two_put_while_one_takes() {
        check("two_put_while_one_takes", 3, FEW, || {
            Participant::lasting().adopt();
            let (pile, census) = (Arc::new(Pile::new()), Census::default());
            let putters = [[1, 2].as_slice(), &[3]].map(|numbers| {
                let (pile, census) = (pile.clone(), census.clone());
                spawn(Participant::lasting, move || {
                    numbers.iter().for_each(|number| pile.put(census.value(*number)));
                })
            });
            let numbers = |values: Vec<Value>| values.iter().map(Value::number).collect::<Vec<_>>();
            let mut came = numbers(pile.take_all());
            came.extend(numbers(pile.take_all()));
            putters.into_iter().for_each(|putter| putter.join().unwrap());
            came.extend(numbers(pile.take_all()));
            let place = |number| came.iter().position(|n| *n == number);
            assert!(place(1) < place(2), "out of order: {came:?}");
            came.sort_unstable();
            assert_eq!(came, [1, 2, 3]);
            assert_eq!(census.count(), 0);
        });
    }
}
