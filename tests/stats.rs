//! Each counter moves when it should, and only then: `cargo test --test stats`.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::{Builder, Gate, Queue, Sut, eventually, ms, over_shapes, plain, quietly, secs, until_waiting};
use quell::{Evictions, Job, ManualClock, Op, Rejected, Stats};
use std::thread;

type Error = std::io::Error;

/// What has moved between two looks, by name; `drop_panics` is the process's and left out.
fn moved(before: &Stats, after: &Stats) -> Vec<(&'static str, u64)> {
    let pairs = [
        ("hits", before.hits, after.hits),
        ("stale_hits", before.stale_hits, after.stale_hits),
        ("grace_hits", before.grace_hits, after.grace_hits),
        ("misses", before.misses, after.misses),
        ("loads", before.loads, after.loads),
        ("load_failures", before.load_failures, after.load_failures),
        ("joins", before.joins, after.joins),
        ("wait_timeouts", before.wait_timeouts, after.wait_timeouts),
        ("takeovers", before.takeovers, after.takeovers),
        ("fenced", before.fenced, after.fenced),
        ("fallbacks", before.fallbacks, after.fallbacks),
        ("negative_hits", before.negative_hits, after.negative_hits),
        ("early_refreshes", before.early_refreshes, after.early_refreshes),
        ("refused_refreshes", before.refused_refreshes, after.refused_refreshes),
        ("loader_panics", before.loader_panics, after.loader_panics),
        ("in_flight", before.in_flight, after.in_flight),
        ("waiters", before.waiters, after.waiters),
    ];
    pairs.into_iter().filter(|(_, b, a)| b != a).map(|(name, b, a)| (name, a - b)).collect()
}

/// Does something, and compares what has moved.
#[track_caller]
fn counts<R>(cache: &Sut<u32, u32>, expected: &[(&str, u64)], call: impl FnOnce() -> R) {
    let before = cache.stats();
    call();
    assert_eq!(moved(&before, &cache.stats()), expected);
}

/// Soft 10 s, hard 20 s, grace until 50 s; jobs wait in the queue.
fn usual(builder: Builder<u32, u32>) -> (Sut<u32, u32>, ManualClock, Queue) {
    let (clock, queue) = (ManualClock::new(), Queue::default());
    let cache = builder
        .soft_ttl(secs(10))
        .time_to_live(secs(20))
        .stale_if_error(secs(30))
        .lease(secs(5))
        .clock(clock.clone())
        .executor(queue.clone())
        .loader_fn(|key| if *key < 100 { Ok(*key) } else { Err(Error::other("boom")) })
        .build();
    (cache, clock, queue)
}

fn fail() -> Result<u32, Error> {
    Err(Error::other("boom"))
}

#[test]
fn reads_count_hits_and_misses() {
    over_shapes(|builder| {
        let (cache, clock, _) = usual(builder);
        assert_eq!(moved(&Stats::default(), &cache.stats()), []);
        counts(&cache, &[("misses", 4)], || {
            let _ = (
                cache.get(&1),
                cache.read(&1, |v| *v),
                cache.pin().get(&1).copied(),
                cache.ask(&1).get().is_ok(),
            );
        });
        counts(&cache, &[], || cache.insert(1, 1));
        counts(&cache, &[("hits", 8)], || {
            let _ = (
                cache.get(&1),
                cache.read(&1, |v| *v),
                cache.pin().get(&1).copied(),
                cache.ask(&1).get().is_ok(),
            );
            let _ = (cache.get_with(&1, || 0), cache.get_or_load(&1), cache.try_get_with(&1, fail));
            let _ = cache.optionally_get_with(&1, || None);
        });
        counts(&cache, &[], || (cache.peek(&1), cache.contains_key(&1), cache.iter().count(), cache.len()));
        clock.set(secs(10));
        counts(&cache, &[("stale_hits", 4)], || {
            let _ = (
                cache.get(&1),
                cache.read(&1, |v| *v),
                cache.pin().get(&1).copied(),
                cache.ask(&1).get().is_ok(),
            );
        });
        clock.set(secs(20));
        counts(&cache, &[("misses", 1)], || cache.get(&1));
        counts(&cache, &[], || (cache.peek(&1), cache.run_pending_tasks()));
    });
}

#[test]
fn writes_count_nothing() {
    over_shapes(|builder| {
        let (cache, ..) = usual(builder);
        counts(&cache, &[], || {
            cache.insert(1, 1);
            cache.insert_with_ttl(2, 2, secs(1));
            cache.expire(&1);
            cache.remove(&1);
            cache.invalidate(&2);
            cache.retain(|_, _| true);
            cache.invalidate_all();
        });
    });
}

#[test]
fn loads_by_every_method() {
    over_shapes(|builder| {
        let (cache, ..) = usual(builder);
        let one = [("misses", 1), ("loads", 1)];
        counts(&cache, &one, || cache.get_with(&1, || 1));
        counts(&cache, &one, || cache.try_get_with(&2, || Ok::<_, Error>(1)));
        counts(&cache, &one, || cache.optionally_get_with(&3, || Some(1)));
        counts(&cache, &one, || cache.optionally_get_with(&4, || None));
        counts(&cache, &one, || cache.get_or_load(&5));
        counts(&cache, &one, || cache.ask(&6).load_with(|| 1));
        counts(&cache, &one, || cache.ask(&7).load());
        let failed = [("misses", 1), ("loads", 1), ("load_failures", 1)];
        counts(&cache, &failed, || cache.try_get_with(&8, fail));
        counts(&cache, &failed, || cache.get_or_load(&100));
        let panicked = [("misses", 1), ("loads", 1), ("load_failures", 1), ("loader_panics", 1)];
        counts(&cache, &panicked, || quietly(|| cache.get_with(&9, || panic!("boom"))).is_err());
    });
}

#[test]
fn compute_counts_its_load() {
    over_shapes(|builder| {
        let (cache, ..) = usual(builder);
        let before = cache.stats();
        cache.compute(&1, |_| Op::Put(1));
        cache.compute(&1, |_| Op::Keep);
        cache.compute(&1, |_| Op::Remove);
        let stats = cache.stats();
        assert_eq!((stats.loads - before.loads, stats.load_failures, stats.hits, stats.fenced), (3, 0, 0, 0));
    });
}

#[test]
fn a_stale_hit_and_its_refresh() {
    over_shapes(|builder| {
        let (cache, clock, queue) = usual(builder);
        cache.insert(1, 1);
        clock.set(secs(10));
        counts(&cache, &[("stale_hits", 1), ("in_flight", 1)], || cache.get_or_load(&1));
        counts(&cache, &[("stale_hits", 1)], || cache.get_or_load(&1));
        let before = cache.stats();
        assert_eq!((queue.run(), cache.stats().loads - before.loads, cache.stats().in_flight), (1, 1, 0));
        // By a closure of its own: an answer at once to none, so the load is what counts.
        clock.set(secs(20));
        let before = cache.stats();
        assert_eq!(cache.get_with(&1, || 2), 2);
        assert_eq!(cache.stats().loads - before.loads, 1);
        assert_eq!(cache.stats().misses, before.misses);
    });
}

#[test]
fn refresh_counts_no_call() {
    over_shapes(|builder| {
        let (cache, _, queue) = usual(builder);
        counts(&cache, &[("in_flight", 1)], || (cache.refresh(&1), cache.refresh(&1)));
        queue.run();
        assert_eq!((cache.stats().loads, cache.stats().misses, cache.stats().in_flight), (1, 0, 0));
    });
}

#[test]
fn grace_and_fallback() {
    over_shapes(|builder| {
        let (cache, clock, _) = usual(builder.fallback(|key| (*key == 200).then_some(1)));
        cache.insert(1, 1);
        clock.set(secs(20));
        let graced = [("grace_hits", 1), ("misses", 1), ("loads", 1), ("load_failures", 1)];
        counts(&cache, &graced, || cache.try_get_with(&1, fail));
        let fell_back = [("misses", 1), ("loads", 1), ("load_failures", 1), ("fallbacks", 1)];
        counts(&cache, &fell_back, || cache.get_or_load(&200));
        let failed = [("misses", 1), ("loads", 1), ("load_failures", 1)];
        counts(&cache, &failed, || cache.get_or_load(&201));
    });
}

#[test]
fn joins_waiters_and_time_outs() {
    over_shapes(|builder| {
        let (cache, clock, _) = usual(builder);
        let gate = Gate::default();
        thread::scope(|s| {
            let leader = s.spawn(|| {
                cache.get_with(&1, || {
                    gate.pass();
                    1
                })
            });
            eventually(|| gate.arrived() == 1);
            let waits = s.spawn(|| cache.get_with(&1, || unreachable!()));
            let gives_up = s.spawn(|| cache.ask(&1).wait_timeout(ms(10)).load());
            until_waiting(&cache, 2);
            eventually(|| cache.stats().joins == 2);
            let stats = cache.stats();
            assert_eq!((stats.in_flight, stats.waiters, stats.misses, stats.wait_timeouts), (1, 2, 3, 0));
            clock.advance(ms(10));
            assert!(gives_up.join().unwrap().is_err());
            gate.open();
            assert_eq!((leader.join().unwrap(), waits.join().unwrap()), (1, 1));
        });
        let expected = [("misses", 3), ("loads", 1), ("joins", 2), ("wait_timeouts", 1)];
        assert_eq!(moved(&Stats::default(), &cache.stats()), expected);
    });
}

#[test]
fn takeovers_and_fenced() {
    over_shapes(|builder| {
        let (cache, clock, queue) = usual(builder);
        let gate = Gate::default();
        thread::scope(|s| {
            let hung = s.spawn(|| {
                cache.get_with(&1, || {
                    gate.pass();
                    1
                })
            });
            eventually(|| gate.arrived() == 1);
            clock.advance(secs(5));
            counts(&cache, &[("misses", 1), ("loads", 1), ("takeovers", 1)], || cache.get_with(&1, || 2));
            gate.open();
            hung.join().unwrap();
        });
        assert_eq!((cache.stats().fenced, cache.stats().in_flight), (1, 0));
        // A queued refresh that a caller takes over.
        cache.refresh(&2);
        let before = cache.stats();
        assert_eq!(cache.get_with(&2, || 5), 5);
        queue.run();
        let after = cache.stats();
        assert_eq!((after.takeovers - before.takeovers, after.loads - before.loads), (1, 1));
        // A write in between.
        counts(&cache, &[("misses", 1), ("loads", 1), ("fenced", 1)], || {
            cache.get_with(&3, || {
                cache.insert(3, 30);
                3
            })
        });
    });
}

#[test]
fn refused_refreshes() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>()
        .soft_ttl(secs(1))
        .clock(clock.clone())
        .executor(|_: Job| Err(Rejected))
        .loader_fn(|key| Ok::<_, Error>(*key))
        .build();
    cache.insert(1, 1);
    clock.advance(secs(1));
    counts(&cache, &[("stale_hits", 1), ("refused_refreshes", 1)], || cache.get_or_load(&1));
    counts(&cache, &[("refused_refreshes", 1)], || cache.refresh(&2));
}

/// How many have left, by `expired`, `explicit`, `replaced` and `size`.
fn gone(cache: &Sut<u32, u32>) -> [u64; 4] {
    let Evictions { expired, explicit, replaced, size, .. } = cache.stats().evictions;
    [expired, explicit, replaced, size]
}

#[test]
fn evictions_by_cause() {
    for listens in [false, true] {
        over_shapes(|builder| {
            let builder = if listens { builder.eviction_listener(|_, _, _| ()) } else { builder };
            let (cache, clock, queue) = usual(builder.max_capacity(10));
            (0..10).for_each(|key| cache.insert(key, key));
            assert_eq!(gone(&cache), [0, 0, 0, 0]);
            (0..3).for_each(|key| cache.insert(key, 5));
            assert_eq!(gone(&cache), [0, 0, 3, 0]);
            let _ = (cache.remove(&0), cache.invalidate(&1), cache.invalidate(&1), cache.remove(&77));
            assert_eq!(gone(&cache), [0, 2, 3, 0]);
            (20..27).for_each(|key| cache.insert(key, key));
            assert_eq!(gone(&cache), [0, 2, 3, 5]);
            // What lives on has not left, and what was refused has never come.
            let key = cache.iter().next().unwrap().0;
            assert!(cache.expire(&key));
            drop(cache.get_or_load(&key));
            drop(queue.take());
            cache.compute(&key, |_| Op::Keep);
            assert_eq!(gone(&cache), [0, 2, 3, 5]);
            clock.set(secs(20));
            // In grace: it has expired, whatever takes it out.
            let key = 26;
            assert_eq!((cache.peek(&key), cache.len()), (None, 10));
            cache.insert(key, 1);
            assert_eq!(gone(&cache), [1, 2, 3, 5]);
            clock.set(secs(1_000));
            cache.run_pending_tasks();
            assert_eq!((gone(&cache), cache.len()), ([11, 2, 3, 5], 0));
            (0..10).for_each(|key| cache.insert(key, key));
            cache.set_capacity(4);
            cache.invalidate_all();
            assert_eq!(gone(&cache), [11, 6, 3, 11]);
        });
    }
}

#[test]
fn oversized() {
    over_shapes(|builder| {
        let (cache, ..) = usual(builder.max_capacity(10).weigher(|_, value| *value));
        let count = || cache.stats().oversized;
        cache.insert(1, 10);
        cache.get_with(&2, || 10);
        assert_eq!(count(), 0);
        cache.insert(1, 11);
        cache.get_with(&3, || 11);
        assert_eq!((cache.get_or_load(&50).unwrap(), count()), (50, 3));
        cache.compute(&1, |_| Op::Put(u32::MAX));
        assert_eq!(count(), 4);
        // One that is not to be stored at all is none.
        cache.insert_with_ttl(1, 11, ms(0));
        assert_eq!(count(), 4);
    });
}

#[test]
fn listener_panics() {
    let listener = |_: &u32, value: &u32, _| {
        if *value == 13 {
            quietly(|| panic!("boom")).unwrap_or_else(|p| std::panic::resume_unwind(p));
        }
    };
    over_shapes(|builder| {
        let (cache, ..) = usual(builder.eviction_listener(listener));
        (0..20).for_each(|value| cache.insert(1, value));
        assert_eq!((cache.stats().listener_panics, gone(&cache)), (1, [0, 0, 19, 0]));
        cache.insert(1, 13);
        assert_eq!((cache.remove(&1), cache.stats().listener_panics), (Some(13), 2));
        assert_eq!((cache.stats().loader_panics, cache.stats().drop_panics), (0, 0));
    });
}

#[test]
fn counts_of_many_threads_add_up() {
    let cache = plain::<u32, u32>().build();
    cache.insert(1, 1);
    // More threads than have a counter of their own, some at the same time and some after each other.
    for _ in 0..4 {
        thread::scope(|s| {
            for _ in 0..80 {
                thread::Builder::new()
                    .stack_size(256 << 10)
                    .spawn_scoped(s, || (0..100).for_each(|n| _ = cache.get(&(n % 2))))
                    .unwrap();
            }
        });
    }
    let stats = cache.stats();
    assert_eq!((stats.hits, stats.misses), (16_000, 16_000));
}
