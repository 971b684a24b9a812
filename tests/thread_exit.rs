//! A cache that is used by the destructors of thread-locals, when quell's own are gone: `cargo test --test thread_exit`.

#![allow(clippy::disallowed_methods, reason = "the test needs a thread that ends")]

use quell::{Cache, Op};
use std::cell::RefCell;
use std::time::Duration;

struct Last(Cache<u32, u32>);

impl Drop for Last {
    fn drop(&mut self) {
        let cache = &self.0;
        cache.insert(1, 1);
        assert_eq!(cache.get(&1), Some(1));
        assert_eq!(cache.get_with(&2, || cache.get_with(&3, || 3) - 1), 2);
        assert!(cache.try_get_with(&4, || Err::<u32, _>("no")).is_err());
        cache.compute(&5, |_| Op::Put(5));
        cache.remove(&1);
        cache.run_pending_tasks();
        assert!(cache.len() >= 3);
    }
}

thread_local! {
    static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
}

#[test]
fn everything_works_in_a_threads_last_destructors() {
    let cache = Cache::builder().jitter(0.5).time_to_live(Duration::from_secs(60)).build();
    let theirs = cache.clone();
    // Registered first, so that it is destroyed last: quell's own thread-locals come into being after it.
    std::thread::spawn(move || LAST.set(Some(Last(theirs.clone())))).join().unwrap();
    let theirs = cache.clone();
    std::thread::spawn(move || {
        LAST.set(Some(Last(theirs.clone())));
        theirs.get_with(&9, || 9);
    })
    .join()
    .unwrap();
    assert_eq!((cache.get(&2), cache.get(&9)), (Some(2), Some(9)));
}
