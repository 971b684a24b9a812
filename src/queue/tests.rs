//! The queue alone, against a `VecDeque`, with many threads, and with one that is suspended half-way.

#![allow(clippy::disallowed_methods, reason = "tests wait for real threads")]

use super::*;
use crate::primitive::epoch::{flush, pin};
use crate::primitive::plain::AtomicU64 as Count;
use crate::primitive::step::armed;
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::scope;

/// How many segments are not free.
fn living(queue: &Queue) -> usize {
    Arc::strong_count(&queue.tally.0) - 1
}

fn drain(queue: &Queue) -> Vec<u64> {
    std::iter::from_fn(|| queue.pop(&pin())).collect()
}

/// Drops the queue, and waits until the collector has freed what was retired before.
fn finish(queue: Queue) {
    let tally = queue.tally.clone();
    drop(queue);
    // Another test's suspended thread may hold a pin for a while.
    for _ in 0..60_000 {
        if Arc::strong_count(&tally.0) == 1 {
            return;
        }
        flush();
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    panic!("{} segments were never freed", Arc::strong_count(&tally.0) - 1);
}

#[test]
fn the_first_in_is_the_first_out() {
    let queue = Queue::new();
    assert_eq!((queue.pop(&pin()), queue.len(&pin())), (None, 0));
    for round in 0..3 {
        for item in 1..=1000 {
            queue.push(item, &pin());
            assert_eq!(queue.len(&pin()), item as usize);
        }
        for item in 1..=1000 {
            assert_eq!(queue.pop(&pin()), Some(item), "round {round}");
            assert_eq!(queue.len(&pin()), 1000 - item as usize);
        }
        assert_eq!((queue.pop(&pin()), queue.len(&pin())), (None, 0));
    }
    finish(queue);
}

#[test]
fn all_but_the_marks_are_items() {
    let queue = Queue::new();
    let items = [1, u64::MAX - 1, 1 << 63, 1];
    items.iter().for_each(|item| queue.push(*item, &pin()));
    assert_eq!(drain(&queue), items);
}

#[test]
#[cfg(debug_assertions)]
fn a_mark_is_refused() {
    for mark in [EMPTY, TAKEN] {
        let queue = Queue::new();
        let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| queue.push(mark, &pin())));
        assert!(refused.is_err(), "{mark}");
    }
}

#[derive(Clone, Debug)]
enum Op {
    Push(u64),
    Pop,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(prop_oneof![(1..u64::MAX).prop_map(Op::Push), Just(Op::Pop)], 0..300)
}

proptest! {
    #[test]
    fn behaves_like_a_deque(ops in ops()) {
        let (queue, mut model) = (Queue::new(), VecDeque::new());
        for op in ops {
            match op {
                Op::Push(item) => {
                    queue.push(item, &pin());
                    model.push_back(item);
                }
                Op::Pop => assert_eq!(queue.pop(&pin()), model.pop_front()),
            }
            assert_eq!(queue.len(&pin()), model.len());
        }
        assert_eq!(drain(&queue), Vec::from(model));
        finish(queue);
    }
}

#[test]
fn a_queue_that_is_dropped_frees_what_is_in_it() {
    for items in [0, 1, CELLS, CELLS + 1, 1000] {
        let queue = Queue::new();
        (0..items).for_each(|item| queue.push(item as u64 + 1, &pin()));
        assert_eq!(living(&queue), items.div_ceil(CELLS));
        let tally = queue.tally.clone();
        drop(queue);
        assert_eq!(Arc::strong_count(&tally.0), 1, "a segment is not free");
    }
}

#[test]
fn a_steady_queue_does_not_grow() {
    let queue = Queue::new();
    // SAFETY: this thread alone knows the queue; what is retired is freed at once.
    let guard = unsafe { exclusive() };
    let mut next = 1..;
    let mut push = || queue.push(next.next().expect("numbers are endless"), guard);
    (0..10).for_each(|_| push());
    for _ in 0..100_000 {
        push();
        assert!(queue.pop(guard).is_some());
        assert!(living(&queue) <= 10 / CELLS + 2, "{} segments for ten items", living(&queue));
    }
}

#[test]
fn polling_an_empty_queue_uses_nothing_up() {
    let queue = Queue::new();
    queue.push(1, &pin());
    assert_eq!(drain(&queue), [1]);
    for _ in 0..1000 {
        assert_eq!(queue.pop(&pin()), None);
    }
    queue.push(2, &pin());
    assert_eq!(living(&queue), 1, "the second cell of the first segment was there for it");
    assert_eq!(drain(&queue), [2]);
}

/// Two push, two pop, until all is out; then all four do both. Items of one pusher follow each other in each list.
#[test]
fn every_item_comes_out_once_and_in_the_order_of_its_pusher() {
    const EACH: u64 = 20_000;
    let queue = Queue::new();
    let push = |pusher: u64, n: u64| queue.push(pusher * EACH + n + 1, &pin());

    let left = Count::new(2 * EACH);
    let first: Vec<Vec<u64>> = scope(|s| {
        for pusher in 0..2 {
            let push = &push;
            s.spawn(move || (0..EACH).for_each(|n| push(pusher, n)));
        }
        let pop = || {
            let mut items = Vec::new();
            while left.load(Ordering::Relaxed) > 0 {
                match queue.pop(&pin()) {
                    Some(item) => {
                        left.fetch_sub(1, Ordering::Relaxed);
                        items.push(item);
                    }
                    None => std::thread::yield_now(),
                }
            }
            items
        };
        let poppers = [s.spawn(pop), s.spawn(pop)];
        poppers.map(|popper| popper.join().unwrap()).into()
    });

    let second: Vec<Vec<u64>> = scope(|s| {
        let both = |pusher| {
            let (push, queue) = (&push, &queue);
            move || {
                let after_a_push = |n| {
                    push(pusher, n);
                    queue.pop(&pin()).expect("each has pushed one more than it has popped")
                };
                (0..EACH).map(after_a_push).collect()
            }
        };
        let threads = [2, 3, 4, 5].map(|pusher| s.spawn(both(pusher)));
        threads.map(|thread| thread.join().unwrap()).into()
    });

    assert_eq!((queue.len(&pin()), queue.pop(&pin())), (0, None));
    for items in first.iter().chain(&second) {
        for pusher in 0..6 {
            assert!(items.iter().filter(|item| (**item - 1) / EACH == pusher).is_sorted());
        }
    }
    let mut all = [first, second].concat().concat();
    all.sort_unstable();
    assert_eq!(all, (1..=6 * EACH).collect::<Vec<_>>());
    finish(queue);
}

/// Suspends a thread at its n-th step in `victim`, for all n, while another pushes and pops. Gives the number of steps.
fn stall(victim: impl Fn(&Queue) + Sync) -> usize {
    for nth in 0.. {
        let queue = Queue::new();
        (1..=3).for_each(|item| queue.push(item, &pin()));
        let (stall, arm) = armed::arm(nth);
        let ended = scope(|s| {
            let (queue, victim) = (&queue, &victim);
            let suspended = s.spawn(move || {
                arm();
                victim(queue);
                armed::disarm()
            });
            if stall.reached.recv().is_ok() {
                let there = queue.len(&pin());
                for item in 100..200 {
                    queue.push(item, &pin());
                }
                let popped = drain(queue);
                assert!(popped.len() >= 100 && popped.is_sorted(), "from {there} items: {popped:?}");
                assert_eq!(queue.len(&pin()), 0);
                drop(stall.release);
            }
            suspended.join().unwrap()
        });
        drain(&queue);
        finish(queue);
        if ended {
            return nth;
        }
    }
    unreachable!("the victim's steps are finite")
}

#[test]
fn a_suspended_thread_stops_nobody() {
    let steps = stall(|queue| (4..10).for_each(|item| queue.push(item, &pin())));
    assert!(steps >= 15, "a push has steps to be suspended at, {steps} were seen");
    let steps = stall(|queue| (0..3).for_each(|_| _ = queue.pop(&pin())));
    assert!(steps >= 12, "a pop has steps to be suspended at, {steps} were seen");
}
