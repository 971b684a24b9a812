//! What the futures of the async front are: fit for any thread, small, and made without an allocation where nothing is to be
//! loaded: `cargo test --test future_cost`; also with `--features tokio`, which makes them larger.
//!
//! In a process of its own: the allocator counts the calls of its thread.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads and tasks with what is at hand"
)]

mod common;

use common::task::{Door, Hand};
use quell::{Cache, CacheBuilder, ManualClock, WarmOptions};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

type Error = std::io::Error;

struct Counting;

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system's allocator, with a count beside it that allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATED.try_with(|calls| calls.set(calls.get() + 1));
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of this thread while `call` runs.
fn allocations<R>(call: impl FnOnce() -> R) -> usize {
    let before = ALLOCATED.get();
    black_box(call());
    ALLOCATED.get() - before
}

/// Polls once, with a waker that does nothing.
fn now<F: Future>(future: F) -> Poll<F::Output> {
    pin!(future).poll(&mut Context::from_waker(Waker::noop()))
}

#[track_caller]
fn ready<F: Future>(future: F) -> F::Output {
    match now(future) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("it waits"),
    }
}

fn builder() -> CacheBuilder<String, Arc<u64>> {
    Cache::builder().async_loader(|_: &String| async { Ok::<_, Error>(Arc::new(1)) })
}

async fn never() -> Arc<u64> {
    unreachable!("it is a hit")
}

async fn try_never() -> Result<Arc<u64>, Error> {
    unreachable!("it is a hit")
}

/// All futures of a cache, by name, handed to something that takes any of them.
macro_rules! each_future {
    ($cache:expr, $key:expr, $many:expr, $with:expr) => {{
        let (cache, key, many) = ($cache, $key, $many);
        [
            ("get_with_async", $with(cache.get_with_async(key, never()))),
            ("try_get_with_async", $with(cache.try_get_with_async(key, try_never()))),
            (
                "optionally_get_with_async",
                $with(cache.optionally_get_with_async(key, async { Some(never().await) })),
            ),
            ("get_or_load_async", $with(cache.get_or_load_async(key))),
            ("ask.get_async", $with(cache.ask(key).get_async())),
            ("ask.load_async", $with(cache.ask(key).load_async())),
            ("ask.load_with_async", $with(cache.ask(key).load_with_async(never()))),
            ("ask.try_load_with_async", $with(cache.ask(key).try_load_with_async(try_never()))),
            ("warm_async", $with(cache.warm_async(many.clone(), WarmOptions::new()))),
            (
                "load_many_async",
                $with(cache.load_many_async(many, |_| async {
                    Ok::<_, Error>([(String::new(), try_never().await.unwrap())])
                })),
            ),
        ]
    }};
}

#[test]
fn futures_cross_threads() {
    fn send<F: Future + Send>(future: F) {
        drop(future);
    }
    let cache = builder().build();
    // For `String` keys by `&str`, and for what borrows from the caller's stack.
    let (key, many) = ("hot".to_owned(), ["hot".to_owned()]);
    each_future!(&cache, key.as_str(), many.iter(), send);
    let numbers = Cache::<u64, u64>::builder().build();
    send(numbers.get_with_async(&1, async { 1 }));
    send(numbers.load_many_async([1], |_| async { Ok::<_, Error>([(1, 1)]) }));
    // While they wait, too: as tasks that a runtime may move.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    let task = runtime.spawn(async move {
        let loaded = cache.get_with_async("cold", async { Arc::new(2) }).await;
        (loaded, cache.get_or_load_async("cool").await.unwrap())
    });
    assert_eq!(runtime.block_on(task).unwrap(), (Arc::new(2), Arc::new(1)));
}

#[test]
fn futures_are_small() {
    let cache = Cache::<u64, u64>::builder().async_loader(|_: &u64| async { Ok::<_, Error>(1) }).build();
    let load = || std::future::ready(1_u64);
    let tried = || std::future::ready(Ok::<u64, Error>(1));
    let sizes = [
        ("get_with_async", 512, size_of_val(&cache.get_with_async(&1, load()))),
        ("try_get_with_async", 512, size_of_val(&cache.try_get_with_async(&1, tried()))),
        (
            "optionally_get_with_async",
            512,
            size_of_val(&cache.optionally_get_with_async(&1, std::future::ready(Some(1)))),
        ),
        ("get_or_load_async", 512, size_of_val(&cache.get_or_load_async(&1))),
        ("ask.get_async", 256, size_of_val(&cache.ask(&1).get_async())),
        ("ask.load_async", 768, size_of_val(&cache.ask(&1).load_async())),
        ("ask.load_with_async", 768, size_of_val(&cache.ask(&1).load_with_async(load()))),
        ("ask.try_load_with_async", 768, size_of_val(&cache.ask(&1).try_load_with_async(tried()))),
        (
            "load_many_async",
            1_024,
            size_of_val(&cache.load_many_async([1], |_| std::future::ready(Ok::<_, Error>([(1, 1)])))),
        ),
    ];
    for (method, most, size) in sizes {
        assert!(size <= most, "{method}: {size} bytes");
    }
    // What the load's own future adds: once for each stage that hands it on.
    let large = async {
        let room = black_box([1_u8; 1 << 12]);
        std::future::ready(()).await;
        u64::from(room[0])
    };
    let (alone, more) = (size_of_val(&large), 512);
    let size = size_of_val(&cache.get_with_async(&1, large));
    assert!(size <= 3 * alone + more, "{size} bytes with a load of {alone}");
}

#[test]
fn a_hit_allocates_nothing() {
    let minute = Duration::from_secs(60);
    let caches = [
        ("without a TTL", builder().build()),
        ("with a TTL", builder().time_to_live(minute).build()),
        ("with an idle time", builder().time_to_idle(minute).build()),
        ("with a manual clock", builder().soft_ttl(minute).clock(ManualClock::new()).build()),
        ("with a spawner", builder().spawner(|_| Ok(())).build()),
    ];
    for (name, cache) in &caches {
        cache.insert("hot".into(), Arc::new(7));
        let found = [
            ("get_with_async", hits(|| cache.get_with_async("hot", never()))),
            (
                "try_get_with_async",
                hits(|| async { cache.try_get_with_async("hot", try_never()).await.unwrap() }),
            ),
            (
                "optionally_get_with_async",
                hits(|| async {
                    let load = async { Some(never().await) };
                    cache.optionally_get_with_async("hot", load).await.unwrap()
                }),
            ),
            ("get_or_load_async", hits(|| async { cache.get_or_load_async("hot").await.unwrap() })),
            ("ask.get_async", hits(|| async { cache.ask("hot").get_async().await.unwrap().value })),
            ("ask.load_async", hits(|| async { cache.ask("hot").load_async().await.unwrap().value })),
            (
                "ask.load_with_async",
                hits(|| async { cache.ask("hot").load_with_async(never()).await.unwrap().value }),
            ),
            (
                "ask.try_load_with_async",
                hits(|| async { cache.ask("hot").try_load_with_async(try_never()).await.unwrap().value }),
            ),
        ];
        for (method, allocated) in found {
            assert_eq!(allocated, 0, "{method} of a cache {name}");
        }
    }
}

/// Allocations of many hits. The least of a few runs: now and then a pin helps to free what other tests have retired, and that
/// may take a node of the collector's queue.
fn hits<F: Future<Output = Arc<u64>>>(call: impl Fn() -> F) -> usize {
    let run = |n| (0..n).for_each(|_| assert_eq!(*ready(call()), 7));
    run(300);
    let runs = std::iter::repeat_with(|| allocations(|| run(1_000)));
    runs.take(5).min().unwrap()
}

/// The fewest allocations of one of several calls; now and then one more is made for what others have left.
fn fewest(mut call: impl FnMut(u64) -> usize) -> usize {
    (0..300).map(&mut call).min().unwrap()
}

#[test]
fn what_a_load_allocates() {
    let cache = Cache::<u64, u64>::builder().initial_capacity(4_096).build();
    // The entry, the flight, and the box of the load's future.
    let at_once = fewest(|key| allocations(|| ready(cache.get_with_async(&key, async { 1 }))));
    assert_eq!(at_once, 3, "a load that is ready at once");
    let tried = fewest(|key| {
        let load = async { Ok::<_, Error>(1) };
        allocations(|| ready(cache.try_get_with_async(&(1_000 + key), load)).unwrap())
    });
    assert_eq!(tried, 3, "a fallible one");
    let waits = fewest(|key| {
        let (key, door) = (2_000 + key, Door::default());
        let passed = door.passed();
        let load = async move {
            passed.await;
            1
        };
        let mut call = pin!(cache.get_with_async(&key, load));
        let mut cx = Context::from_waker(Waker::noop());
        let begun = allocations(|| assert!(call.as_mut().poll(&mut cx).is_pending()));
        // The door's own list of wakers.
        let begun = begun - 1;
        door.open();
        begun + allocations(|| assert!(call.as_mut().poll(&mut cx).is_ready()))
    });
    assert_eq!(
        waits, 6,
        "a load that waits: the list of those who listen, the leader's place in it, and its waker"
    );
    // Of one who joins, and gets the value.
    let joins = fewest(|key| {
        let (key, door) = (3_000 + key, Door::default());
        let passed = door.passed();
        let mut leader = Hand::new(cache.get_with_async(&key, async move {
            passed.await;
            1
        }));
        assert_eq!(leader.poll(), None);
        let mut call = pin!(cache.get_with_async(&key, async { unreachable!() }));
        let mut cx = Context::from_waker(Waker::noop());
        let begun = allocations(|| assert!(call.as_mut().poll(&mut cx).is_pending()));
        door.open();
        assert_eq!(leader.run(), Some(1));
        begun + allocations(|| assert!(call.as_mut().poll(&mut cx).is_ready()))
    });
    assert_eq!(joins, 2, "one who joins: its place in the list, and its waker");
}
