//! What is leaked by `mem::forget` is sound: `cargo test --test forget`.
//!
//! In a process of its own: a leaked `Pinned` stops reclamation, of all caches and for good.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::{Counted, Queue, Tally, plain, quietly};
use quell::Job;
use std::mem::forget;
use std::thread;

type Error = std::io::Error;

#[test]
fn a_leaked_pinned_stops_reclamation_and_nothing_else() {
    let (cache, alive) = (plain::<u64, Counted>().build(), Tally::default());
    cache.insert(1, Counted::new(1, &alive));
    thread::scope(|s| {
        s.spawn(|| {
            let pinned = cache.pin();
            assert_eq!(pinned.get(&1).unwrap().0, 1);
            forget(pinned);
            // Reads and writes go on, on this thread and on others.
            cache.insert(2, Counted::new(2, &alive));
            assert_eq!(cache.get(&2).unwrap().0, 2);
            if cfg!(debug_assertions) {
                // This thread has a pin for ever, so it may neither load nor wait.
                assert!(quietly(|| cache.get_with(&3, || Counted::new(3, &alive))).is_err());
            }
        });
    });
    for n in 0..1_000 {
        cache.insert(n % 10, Counted::new(n, &alive));
        cache.invalidate(&(n % 10));
        assert_eq!(cache.get_with(&100, || Counted::new(n, &alive)).0, 0);
    }
    cache.run_pending_tasks();
    assert!(alive.get() >= 1_000, "{} live", alive.get());
    // What is reachable still goes at once.
    let before = alive.get();
    let own = plain::<u64, Counted>().build();
    (0..10).for_each(|n| own.insert(n, Counted::new(n, &alive)));
    drop(own);
    assert_eq!(alive.get(), before);
}

#[test]
fn a_leaked_handle_iterator_and_builder() {
    let cache = plain::<u64, u64>().build();
    (0..10).for_each(|n| cache.insert(n, n));
    let mut iter = cache.iter();
    iter.next();
    forget(iter);
    forget(cache.clone());
    forget(plain::<u64, u64>());
    assert_eq!((cache.iter().count(), cache.get(&1)), (10, Some(1)));
}

#[test]
fn a_leaked_job_holds_up_no_caller() {
    let queue = Queue::default();
    let cache = plain().executor(queue.clone()).loader_fn(|key: &u64| Ok::<_, Error>(*key)).build();
    assert!(cache.refresh(&1));
    queue.take().into_iter().for_each(forget::<Job>);
    // It has not begun, so whoever needs the value takes it over.
    assert_eq!((cache.get_or_load(&1).unwrap(), cache.get(&1)), (1, Some(1)));
    assert!(cache.refresh(&1));
    assert_eq!((queue.run(), cache.stats().loads), (1, 2));
}
