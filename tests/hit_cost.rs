//! A hit allocates nothing, nor does a `get` that misses: `cargo test --test hit_cost`.
//!
//! In a process of its own, with one test: the allocator counts the calls of its thread.

use quell::{Cache, ManualClock};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

struct Counting;

thread_local! {
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
}

// SAFETY: the system's allocator, with a count beside it that allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Calls of the allocator, while `call` runs many times after a warm-up.
fn calls<R>(mut call: impl FnMut() -> R) -> usize {
    for _ in 0..300 {
        black_box(call());
    }
    let before = CALLS.get();
    for _ in 0..10_000 {
        black_box(call());
    }
    CALLS.get() - before
}

fn check(name: &str, cache: &Cache<String, Arc<u64>>) {
    let never = || -> Arc<u64> { unreachable!("it is a hit") };
    let pinned = cache.pin();
    let found = [
        ("get", calls(|| cache.get("hot").unwrap())),
        ("peek", calls(|| cache.peek("hot").unwrap())),
        ("read", calls(|| cache.read("hot", |v| **v).unwrap())),
        ("contains_key", calls(|| cache.contains_key("hot"))),
        ("pin", calls(|| cache.pin().get("hot").map(|v| **v).unwrap())),
        ("one pin", calls(|| pinned.get("hot").map(|v| **v).unwrap())),
        ("get_with", calls(|| cache.get_with("hot", never))),
        ("try_get_with", calls(|| cache.try_get_with("hot", || Ok::<_, std::fmt::Error>(never())).unwrap())),
        ("optionally_get_with", calls(|| cache.optionally_get_with("hot", || Some(never())).unwrap())),
        ("get_or_load", calls(|| cache.get_or_load("hot").unwrap())),
        ("ask.get", calls(|| cache.ask("hot").max_age(Duration::MAX).get().unwrap().value)),
        ("ask.load", calls(|| cache.ask("hot").load().unwrap().value)),
        ("a miss of get", calls(|| cache.get("cold").is_none())),
        ("a miss of read", calls(|| cache.read("cold", |v| **v).is_none())),
        ("a miss of peek", calls(|| cache.peek("cold").is_none())),
    ];
    for (call, allocated) in found {
        assert_eq!(allocated, 0, "{call} of a cache {name}");
    }
}

#[test]
fn a_hit_allocates_nothing() {
    let before = CALLS.get();
    drop(black_box(Box::new(1)));
    assert_eq!(CALLS.get() - before, 2, "the allocator counts");

    let minute = Duration::from_secs(60);
    let new =
        || Cache::<String, Arc<u64>>::builder().loader_fn(|_: &String| Ok::<_, std::fmt::Error>(Arc::new(1)));
    let caches = [
        ("without a TTL", new().build()),
        ("with a TTL", new().time_to_live(minute).build()),
        ("with an idle time", new().time_to_idle(minute).build()),
        (
            "with all of it",
            new().soft_ttl(minute).time_to_live(minute).jitter(0.1).stale_if_error(minute).build(),
        ),
        ("with a manual clock", new().time_to_live(minute).clock(ManualClock::new()).build()),
        ("with one shard", new().shards(1).build()),
    ];
    for (name, cache) in &caches {
        cache.insert("hot".into(), Arc::new(7));
        (0..100).for_each(|n| cache.insert(n.to_string(), Arc::new(n)));
        check(name, cache);
    }
}
