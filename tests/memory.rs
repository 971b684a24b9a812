//! How much is allocated, now and after much has come and gone: `cargo test --test memory` (`QUELL_LONG=1` for a million).
//!
//! In a process of its own, one test after the other: the allocator counts the bytes that live.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "the count is a plain one, and tests take turns"
)]

use quell::{Cache, CacheBuilder, LoadErrorKind, ManualClock, Op};
use std::alloc::{GlobalAlloc, Layout, System};
use std::future::{pending, ready};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator, with counts beside it that allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Relaxed);
        LARGEST.fetch_max(layout.size(), Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

const SECOND: Duration = Duration::from_secs(1);

fn many() -> u64 {
    if std::env::var("QUELL_LONG").is_ok_and(|v| v == "1") { 1_000_000 } else { 40_000 }
}

fn builder() -> CacheBuilder<u64, [u64; 4]> {
    Cache::builder().shards(4)
}

fn live<V: Clone + Send + Sync + 'static>(cache: &Cache<u64, V>) -> usize {
    (0..10).for_each(|_| cache.run_pending_tasks());
    LIVE.load(Relaxed)
}

/// The bytes by which a second, longer run of `step` over new keys has grown what lives after the first.
fn growth(cache: &Cache<u64, [u64; 4]>, mut step: impl FnMut(u64)) -> isize {
    let n = many();
    (0..n / 4).for_each(&mut step);
    let before = live(cache);
    (n / 4..n).for_each(&mut step);
    live(cache).cast_signed() - before.cast_signed()
}

/// What a run may leave: less than a byte for each of its keys.
#[track_caller]
fn assert_flat(name: &str, grown: isize) {
    assert!(grown < (many() / 2).cast_signed() as isize, "{name}: {grown} bytes more");
}

/// One key comes and goes in a cache with a limit, and weighs a page: what its former lives have left in the queues must not
/// be taken for its own.
#[test]
fn lives_of_one_key_under_a_limit() {
    let _alone = alone();
    let cache = builder().max_capacity(1 << 20).weigher(|_, _| 1 << 12).build();
    let grown = growth(&cache, |_| {
        cache.insert(1, [0; 4]);
        cache.invalidate(&1);
    });
    assert_flat("lives of one key", grown);
}

#[test]
fn flights() {
    let _alone = alone();
    let cache = builder().build();
    let load = |key: u64| match key % 8 {
        0 => _ = cache.try_get_with(&key, || Err::<[u64; 4], _>("boom")).is_err(),
        1 => _ = cache.optionally_get_with(&key, || None).is_none(),
        2 => _ = cache.compute(&key, |_| Op::Keep),
        3 if key % 64 == 3 => {
            let panics = || cache.get_with(&key, || std::panic::resume_unwind(Box::new("boom")));
            assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        }
        _ => {
            cache.get_with(&key, || [key; 4]);
            cache.invalidate(&key);
        }
    };
    assert_flat("loads, errors and panics", growth(&cache, load));
    assert_eq!((cache.len(), cache.in_flight().len()), (0, 0));
}

/// A call that is polled by nobody but the test.
type Call<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

fn poll<T>(call: &mut Call<'_, T>) -> Poll<T> {
    call.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// A call that waits, or leads a load that never ends.
fn waits<'a, T>(call: impl Future<Output = T> + 'a) -> Call<'a, T> {
    let mut call: Call<'a, T> = Box::pin(call);
    assert!(poll(&mut call).is_pending());
    call
}

#[test]
fn flights_of_tasks() {
    // They end, fail, or are given up: the leader, one who has joined, or both.
    let _alone = alone();
    let cache = builder().build();
    let never = |key: u64| {
        let cache = &cache;
        waits(async move { cache.get_with_async(&key, pending()).await })
    };
    let load = |key: u64| match key % 4 {
        0 => drop(never(key)),
        1 => {
            let (leader, _other) = (never(key), never(key));
            drop(leader);
        }
        2 => {
            let mut call: Call<'_, _> =
                Box::pin(cache.try_get_with_async(&key, ready(Err::<[u64; 4], _>("boom"))));
            assert!(matches!(poll(&mut call), Poll::Ready(Err(_))));
        }
        _ => {
            let mut call: Call<'_, _> = Box::pin(cache.get_with_async(&key, ready([key; 4])));
            assert!(poll(&mut call).is_ready());
            drop(call);
            cache.invalidate(&key);
        }
    };
    assert_flat("loads of tasks", growth(&cache, load));
    assert_eq!((cache.len(), cache.in_flight().len()), (0, 0));
}

#[test]
fn a_million_callers_of_a_key_that_hangs() {
    let _alone = alone();
    let clock = ManualClock::new();
    let cache = builder().max_waiters(100).lease(Duration::MAX).clock(clock).build();
    let hung = waits(cache.get_with_async(&1, pending()));
    let one_load = |waiters: usize| {
        let loads: Vec<_> = cache.in_flight().iter().map(|load| (load.key, load.waiters)).collect();
        assert_eq!((loads, cache.stats().waiters), (vec![(1, waiters)], waiters as u64));
    };
    let join = || cache.try_get_with_async(&1, ready(Ok::<[u64; 4], &str>([0; 4])));
    let refused = |key: u64| {
        let got = if key.is_multiple_of(2) {
            cache.try_get_with(&1, || Err::<[u64; 4], _>("nobody else loads"))
        } else {
            match poll(&mut (Box::pin(join()) as Call<'_, _>)) {
                Poll::Ready(got) => got,
                Poll::Pending => panic!("it waits"),
            }
        };
        assert_eq!(got.unwrap_err().kind(), LoadErrorKind::Overloaded);
    };
    let waiters: Vec<_> = (0..100).map(|_| waits(join())).collect();
    one_load(100);
    assert_flat("callers that are refused", growth(&cache, refused));
    one_load(100);
    // Those who wait give their memory back when they leave, in whatever order, and their places with it.
    drop(waiters);
    one_load(0);
    let grown = growth(&cache, |key| {
        let mut waiters: Vec<_> = (0..key % 6).map(|_| waits(join())).collect();
        while !waiters.is_empty() {
            drop(waiters.swap_remove(key as usize % waiters.len()));
        }
    });
    assert_flat("callers that leave", grown);
    let grown = growth(&cache, |_| {
        let got = cache.ask(&1).wait_timeout(Duration::ZERO).load_with(|| [0; 4]);
        assert_eq!(got.unwrap_err().kind(), LoadErrorKind::TimedOut);
    });
    assert_flat("callers whose wait ends at once", grown);
    one_load(0);
    drop(hung);
    assert_eq!((cache.in_flight().len(), cache.len(), cache.stats().loads), (0, 0, 1));
}

#[test]
fn all_callers_of_a_key_that_hangs_at_one_time() {
    let _alone = alone();
    let cache = builder().lease(Duration::MAX).clock(ManualClock::new()).build();
    let hung = waits(cache.get_with_async(&1, pending()));
    let n = many() as usize / 2;
    let crowd = || {
        let mut crowd = Vec::with_capacity(n);
        crowd.extend((0..n).map(|_| waits(cache.get_with_async(&1, ready([0; 4])))));
        crowd
    };
    // What is made once, and stays.
    drop(crowd());
    let before = live(&cache);
    for _ in 0..3 {
        let crowd = crowd();
        assert_eq!((cache.in_flight().len(), cache.stats().waiters), (1, n as u64));
        let each = (live(&cache) - before) / n;
        assert!(each < 1_024, "{each} bytes for each who waits");
        drop(crowd);
        let left = live(&cache).saturating_sub(before);
        assert!(left < n / 2, "{left} bytes of {n} who have left");
        assert_eq!((cache.in_flight().len(), cache.stats().waiters), (1, 0));
    }
    drop(hung);
}

#[test]
fn keys_whose_loads_are_refused() {
    let _alone = alone();
    let cache = builder().max_concurrent_loads(1).build();
    let hung = waits(cache.get_with_async(&u64::MAX, pending()));
    let grown = growth(&cache, |key| {
        let got = cache.try_get_with(&key, || Err::<[u64; 4], _>("one runs already"));
        assert_eq!(got.unwrap_err().kind(), LoadErrorKind::Overloaded);
    });
    assert_flat("keys whose loads are refused", grown);
    assert_eq!((cache.in_flight().len(), cache.len()), (1, 0));
    drop(hung);
}

#[test]
fn unknown_keys() {
    let _alone = alone();
    let cache = builder().build();
    let grown = growth(&cache, |key| {
        cache.invalidate(&key);
        cache.remove(&key);
        cache.expire(&key);
        cache.get(&key);
    });
    assert_flat("invalidations of unknown keys", grown);
    let cache = builder().time_to_live(SECOND).build();
    assert_flat("the same with a TTL", growth(&cache, |key| cache.invalidate(&key)));
}

#[test]
fn replaced_values() {
    let _alone = alone();
    let cache = builder().build();
    let grown = growth(&cache, |key| {
        cache.insert(key % 100, [key; 4]);
        cache.expire(&(key % 100));
        cache.get_with(&(key % 100), || [key; 4]);
    });
    assert_flat("replaced values", grown);
    assert_eq!(cache.len(), 100);
}

#[test]
fn unique_keys_in_a_full_cache() {
    let _alone = alone();
    for listens in [false, true] {
        let builder = builder().max_capacity(1_000).weigher(|key, _| (key % 3) as u32);
        let cache = if listens {
            builder.eviction_listener(|_, value, _| assert_eq!(value[0], value[3]))
        } else {
            builder
        }
        .build();
        let grown = growth(&cache, |key| match key % 4 {
            0 => _ = cache.get_with(&key, || [key; 4]),
            1 => drop(cache.compute(&key, |_| Op::Put([key; 4]))),
            _ => cache.insert(key, [key; 4]),
        });
        assert_flat("unique keys with a bound", grown);
        assert_eq!(cache.stats().listener_panics, 0);
    }
}

#[test]
fn keys_that_come_and_go_below_the_capacity() {
    // Each leaves an element in a queue, which nobody needs to take out to make room.
    let _alone = alone();
    let clock = ManualClock::new();
    let cache = builder().max_capacity(1_000_000).time_to_live(SECOND).clock(clock.clone()).build();
    (0..100).for_each(|key| cache.insert(u64::MAX - key, [key; 4]));
    let grown = growth(&cache, |key| {
        cache.insert(key, [key; 4]);
        cache.insert(key, [key; 4]);
        if key % 2 == 0 {
            cache.invalidate(&key);
        } else {
            clock.advance(SECOND / 1_000);
        }
    });
    assert_flat("keys that come and go", grown);
}

#[test]
fn a_capacity_that_is_set_again_and_again() {
    let _alone = alone();
    let cache = builder().build();
    let grown = growth(&cache, |key| {
        cache.insert(key, [key; 4]);
        if key % 500 == 0 {
            cache.set_capacity([10, 2_000, u64::MAX, 0, u64::MAX][(key / 500 % 5) as usize]);
        }
        if key % 10_000 == 0 {
            cache.set_capacity(100);
        }
    });
    cache.set_capacity(100);
    // What it grew by is what it holds at the end, and tables for it.
    assert!(grown < (many() / 2).cast_signed() as isize + 200_000, "{grown} bytes more");
    assert!(live(&cache) > 0 && cache.len() <= 100);
}

#[test]
fn expired_entries_of_a_full_cache() {
    let _alone = alone();
    let clock = ManualClock::new();
    let n = many() / 4;
    let cache = builder()
        .max_capacity(n)
        .time_to_live(SECOND)
        .clock(clock.clone())
        .initial_capacity(n as usize)
        .eviction_listener(|_, _, _| ())
        .build();
    // What the policy remembers of the keys is made once, and stays.
    (0..2 * n).for_each(|key| cache.insert(key, [key; 4]));
    clock.advance(SECOND);
    let before = live(&cache);
    assert_eq!((cache.len(), cache.weighted_size()), (0, 0));
    for round in 3..6 {
        (round * n..(round + 1) * n).for_each(|key| cache.insert(key, [key; 4]));
        let full = live(&cache);
        assert!(full > before + 32 * n as usize);
        clock.advance(SECOND);
        let left = live(&cache);
        // A sweep leaves the integers in the two queues, up to twice as many as there were entries.
        let most = before + 2 * 2 * 8 * n as usize;
        assert!(left < most, "{before} bytes, {full} when full, {left} after the sweep");
    }
}

#[test]
fn expired_entries() {
    let _alone = alone();
    let clock = ManualClock::new();
    let cache = builder().time_to_live(SECOND).clock(clock.clone()).initial_capacity(many() as usize).build();
    cache.insert(0, [0; 4]);
    let before = live(&cache);
    (0..many()).for_each(|key| cache.insert(key, [key; 4]));
    let full = live(&cache);
    assert!(full > before + 32 * many() as usize);
    clock.advance(SECOND);
    let left = live(&cache);
    // A sweep gives back all but the table itself, which had its size from the start.
    assert!(left < before + (full - before) / 20, "{before} bytes, {full} when full, {left} after the sweep");
}

#[test]
fn a_dropped_cache() {
    let _alone = alone();
    let other = builder().build();
    let before = live(&other);
    for _ in 0..5 {
        let cache = builder().loader_fn(|key| Ok::<_, std::fmt::Error>([*key; 4])).build();
        (0..many() / 10).for_each(|key| _ = cache.get_or_load(&key).unwrap());
        drop(cache);
    }
    let left = live(&other).saturating_sub(before);
    assert!(left < 100_000, "{left} bytes of five dropped caches");
}

#[test]
fn a_clock_of_many_caches() {
    let _alone = alone();
    let (clock, other) = (ManualClock::new(), builder().build());
    let build = |_| drop(builder().clock(clock.clone()).build());
    (0..10).for_each(build);
    let before = live(&other);
    (0..100).for_each(build);
    let each = live(&other).saturating_sub(before) / 100;
    assert!(each < 200, "{each} bytes of each dropped cache stay with its clock");
}

#[test]
fn the_share_of_the_table() {
    let _alone = alone();
    // What else an entry takes.
    const SLOT: usize = 56;
    // A table that has just grown, one that is about to, and some between.
    for entries in [10_000, 12_000, 16_000, 20_000, 100_000] {
        let cache = Cache::builder().shards(1).build();
        let before = live(&cache);
        (0..entries).for_each(|key| cache.insert(key, key));
        let each = (live(&cache) - before) as f64 / entries as f64;
        let share = each - SLOT as f64;
        assert!((8.0..=22.0).contains(&share), "{share:.1} bytes for each of {entries} entries");
    }
}

#[test]
fn initial_capacity() {
    let _alone = alone();
    let largest = |capacity: usize| {
        let cache = builder().shards(1).initial_capacity(capacity).build();
        LARGEST.store(0, Relaxed);
        (0..10_000).for_each(|key| cache.insert(key, [key; 4]));
        LARGEST.load(Relaxed)
    };
    // An array of buckets is by far the largest that an insert allocates.
    assert!(largest(0) > 8 * 10_000, "without it the table grows: {}", largest(0));
    assert!(largest(10_000) < 8 * 1_000, "with it there is room: {}", largest(10_000));
}
