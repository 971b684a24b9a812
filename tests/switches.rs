//! What is changed while the cache is in use: modes, TTLs, early refresh.
//!
//! ```text
//! cargo test --test switches
//! ```
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "tests use real threads")]

mod common;

use common::tasks::{Door, Kept, Task, over_tasks};
use common::{
    Builder, Gate, Queue, Sut, Tally, Told, With, assert_weights_add_up, eventually, ms, over_shapes, plain,
    secs, until_waiting,
};
use quell::{
    Backoff, Cache, EarlyRefresh, Job, LoadError, LoadErrorKind, Loaded, ManualClock, Mode, Op, Outcome,
    Provenance, Rejected, RemovalCause, WarmOptions, WarmOutcome,
};
use std::convert::Infallible;
use std::fmt::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

fn kind<T: std::fmt::Debug>(result: Result<T, LoadError>) -> LoadErrorKind {
    result.unwrap_err().kind()
}

fn is_frozen_out<T: std::fmt::Debug>(result: Result<T, LoadError>) -> bool {
    let error = result.unwrap_err();
    error.kind() == LoadErrorKind::NotCached && error.to_string().contains("frozen")
}

/// A source whose values can be changed, and its cache.
fn sourced(builder: Builder<u32, u32>) -> (Sut<u32, u32>, Arc<AtomicU32>, Tally) {
    let (source, loads) = (Arc::new(AtomicU32::new(1)), Tally::default());
    let cache = {
        let (source, loads) = (source.clone(), loads.clone());
        builder.loader(move |_: &u32| {
            loads.add();
            Ok::<_, Error>(source.load(Ordering::SeqCst))
        })
    };
    (cache.build(), source, loads)
}

#[test]
fn the_mode_is_what_was_set_last() {
    let cache = plain::<u32, u32>().build();
    assert_eq!((cache.mode(), Mode::default()), (Mode::Normal, Mode::Normal));
    for mode in [Mode::Frozen, Mode::Bypass, Mode::Normal, Mode::Bypass, Mode::Frozen] {
        cache.set_mode(mode);
        assert_eq!(cache.clone().mode(), mode);
    }
    let idle = plain::<u32, u32>().time_to_idle(secs(1)).build();
    assert_eq!(idle.mode(), Mode::Normal, "what else the word says is no mode");
    idle.set_mode(Mode::Frozen);
    assert_eq!(idle.mode(), Mode::Frozen);
}

// ---- frozen

/// Past the hard deadline, past the grace, and idle for too long: all of it is served by all calls, as stale.
#[test]
fn a_frozen_cache_serves_whatever_is_there() {
    type Set = fn(Builder<u32, u32>) -> Builder<u32, u32>;
    let shapes: [Set; 3] = [
        |b| b.time_to_live(secs(1)),
        |b| b.soft_ttl(secs(1)).time_to_live(secs(2)).stale_if_error(secs(3)),
        |b| b.time_to_idle(secs(1)).time_to_live(secs(2)),
    ];
    for set in shapes {
        over_shapes(|builder| {
            let clock = ManualClock::new();
            let told = Tally::default();
            let builder = set(builder).clock(clock.clone()).eviction_listener({
                let told = told.clone();
                move |_: &u32, _: &u32, _| _ = told.add()
            });
            let (cache, _, loads) = sourced(builder);
            (0..50).for_each(|k| cache.insert(k, 7));
            cache.set_mode(Mode::Frozen);
            clock.advance(secs(1_000));
            for k in 0..50 {
                let never = || -> u32 { unreachable!("it is served") };
                assert_eq!((cache.get(&k), cache.peek(&k)), (Some(7), Some(7)));
                assert_eq!((cache.contains_key(&k), cache.pin().get(&k)), (true, Some(&7)));
                assert_eq!(cache.get_or_load(&k).unwrap(), 7);
                assert_eq!(cache.get_with(&k, never), 7);
                assert_eq!(cache.optionally_get_with(&k, || Some(never())), Some(7));
                assert_eq!(cache.try_get_with(&k, || Err(Error)).unwrap(), 7);
                assert!(matches!(
                    cache.ask(&k).load().unwrap().provenance,
                    Provenance::Stale { age } if age == secs(1_000)
                ));
                assert!(!cache.refresh(&k));
                let got = smol::block_on(cache.get_or_load_async(&k));
                assert_eq!(got.unwrap(), 7);
            }
            let many =
                cache.load_many(0..50, |_: &[u32]| -> Result<Vec<(u32, u32)>, Error> { unreachable!() });
            assert_eq!(many.unwrap().len(), 50);
            let stats = cache.stats();
            assert_eq!((stats.hits, stats.misses, stats.loads, loads.get()), (0, 0, 0, 0));
            assert_eq!(stats.stale_hits, 50 * 9);
            // Neither a sweep nor what writes sweep on their way takes anything out.
            cache.run_pending_tasks();
            (100..200).for_each(|k| cache.insert(k, 8));
            assert_eq!((cache.len(), cache.iter().count(), told.get()), (150, 150, 0));
            assert_eq!(cache.remove(&1), Some(7), "what is served is what is removed");
            assert_eq!(cache.compute(&2, |v| Op::Put(v.unwrap() + 1)), Outcome::Replaced(8));
            // Thawed, what has expired is gone.
            cache.set_mode(Mode::Normal);
            assert_eq!(cache.get(&2), Some(8));
            clock.advance(secs(1_000));
            assert_eq!((cache.get(&3), cache.peek(&4)), (None, None));
            cache.run_pending_tasks();
            assert_eq!((cache.len(), cache.weighted_size()), (0, 0));
        });
    }
}

#[test]
fn what_is_used_in_a_frozen_cache_is_idle_no_more() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>().time_to_idle(secs(1)).clock(clock.clone()).build();
    (1..=3).for_each(|k| cache.insert(k, 7));
    cache.set_mode(Mode::Frozen);
    clock.advance(secs(1_000));
    let is_stale = |k: u32| matches!(cache.ask(&k).get().unwrap().provenance, Provenance::Stale { .. });
    assert_eq!((cache.peek(&3), is_stale(1), is_stale(1)), (Some(7), true, false));
    cache.set_mode(Mode::Normal);
    assert_eq!([1, 2, 3].map(|k| cache.get(&k)), [Some(7), None, None]);
}

#[test]
fn no_load_begins_in_a_frozen_cache_but_for_calls_that_cannot_fail() {
    over_shapes(|builder: Builder<u32, u32>| {
        let clock = ManualClock::new();
        let builder = builder
            .soft_ttl(secs(1))
            .time_to_live(secs(100))
            .fallback(|k| (*k == 5).then_some(55))
            .clock(clock.clone());
        let (cache, _, loads) = sourced(builder);
        cache.insert(1, 7);
        clock.advance(secs(2));
        cache.set_mode(Mode::Frozen);
        let never = || -> Result<u32, Error> { unreachable!("no load begins") };
        assert!(is_frozen_out(cache.get_or_load(&2)));
        assert!(is_frozen_out(cache.try_get_with(&2, never)));
        assert!(is_frozen_out(cache.ask(&2).load_with(|| never().unwrap())));
        assert!(is_frozen_out(cache.ask(&1).max_stale(Duration::ZERO).load()), "a call's own terms hold");
        assert!(is_frozen_out(cache.ask(&1).max_age(secs(1)).load()));
        assert!(is_frozen_out(cache.load_many([1, 2], |_: &[u32]| -> Result<Vec<(u32, u32)>, Error> {
            unreachable!("no load begins")
        })));
        assert!(is_frozen_out(smol::block_on(cache.get_or_load_async(&2))));
        assert!(is_frozen_out(smol::block_on(cache.try_get_with_async(&2, async move { never() }))));
        assert_eq!(cache.ask(&5).load().unwrap().provenance, Provenance::Fallback);
        let error = cache.ask(&2).get().unwrap_err();
        assert!(!error.to_string().contains("frozen"), "that call never loads: {error}");
        assert!(!cache.refresh(&1) && !cache.refresh(&2));
        let report = cache.warm([1, 2], WarmOptions::new());
        assert_eq!((report.loaded(), report.failed().count()), (0, 2));
        assert!(report.failed().all(|(_, error)| error.kind() == LoadErrorKind::NotCached));
        assert_eq!((loads.get(), cache.stats().loads), (0, 0));
        // These have nothing else to return.
        assert_eq!(cache.get_with(&10, || 10), 10);
        assert_eq!(cache.optionally_get_with(&11, || Some(11)), Some(11));
        assert_eq!(cache.compute(&12, |_| Op::Put(12)), Outcome::Inserted(12));
        assert_eq!(smol::block_on(cache.get_with_async(&13, async { 13 })), 13);
        assert_eq!([10, 11, 12, 13].map(|k| cache.get(&k).unwrap()), [10, 11, 12, 13], "and it is stored");
        cache.set_mode(Mode::Normal);
        assert_eq!(cache.get_or_load(&2).unwrap(), 1);
    });
}

#[test]
fn a_frozen_cache_starts_no_early_refresh_and_keeps_nothing_warm() {
    let clock = ManualClock::new();
    let fired = Tally::default();
    let cache = plain::<u32, u32>()
        .time_to_live(secs(60))
        .early_refresh(EarlyRefresh::beta(1_000.0))
        .clock(clock.clone())
        .executor({
            let fired = fired.clone();
            move |_: Job| {
                fired.add();
                Err(Rejected)
            }
        })
        .loader({
            let clock = clock.clone();
            move |_: &u32| {
                clock.advance(secs(1));
                Ok::<_, Error>(1)
            }
        })
        .build();
    cache.get_or_load(&1).unwrap();
    clock.advance(secs(55));
    let read = || (0..50).for_each(|_| assert_eq!(cache.get_or_load(&1).unwrap(), 1));
    cache.set_mode(Mode::Frozen);
    read();
    let keeping = cache.keep_warm([1], secs(1));
    for _ in 0..20 {
        clock.advance(secs(1));
    }
    drop(keeping);
    assert_eq!(fired.get(), 0);
    cache.set_mode(Mode::Normal);
    cache.invalidate(&1);
    cache.get_or_load(&1).unwrap();
    clock.advance(secs(55));
    read();
    assert!(fired.get() > 0, "such a read fires else");
}

/// A refresh that waits on a queue when the cache is frozen is not begun, and what it was for stays.
#[test]
fn a_queued_refresh_does_not_begin_in_a_frozen_cache() {
    let (clock, queue, tasks) = (ManualClock::new(), Queue::default(), Kept::default());
    let builder = plain::<u32, u32>().soft_ttl(secs(1)).time_to_live(secs(100)).clock(clock.clone());
    let (cache, _, loads) = sourced(builder.executor(queue.clone()));
    let spawned = plain::<u32, u32>()
        .soft_ttl(secs(1))
        .time_to_live(secs(100))
        .clock(clock.clone())
        .spawner(tasks.clone())
        .async_loader({
            let loads = loads.clone();
            move |_: u32| {
                loads.add();
                async { Ok::<_, Error>(1) }
            }
        })
        .build();
    for cache in [&cache, &spawned] {
        cache.insert(1, 7);
        clock.advance(secs(2));
        assert_eq!(cache.get_or_load(&1).unwrap(), 7);
        assert!(cache.refresh(&2));
        cache.set_mode(Mode::Frozen);
        assert!(is_frozen_out(cache.get_or_load(&2)), "a queued load is not under way");
    }
    assert_eq!((queue.run(), tasks.run(), loads.get()), (2, 2, 0));
    for cache in [&cache, &spawned] {
        assert_eq!((cache.get(&1), cache.len(), cache.in_flight().len()), (Some(7), 1, 0));
        cache.set_mode(Mode::Normal);
        assert_eq!(cache.get_or_load(&1).unwrap(), 7);
    }
    assert_eq!((queue.run(), tasks.run(), loads.get()), (1, 1, 2));
    assert_eq!((cache.get(&1), spawned.get(&1)), (Some(1), Some(1)));
}

#[test]
fn a_load_that_runs_when_the_cache_is_frozen_is_joined_and_publishes() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>().lease(secs(10)).clock(clock.clone()).build();
    let (gate, hung, cache) = (Gate::default(), Gate::default(), &cache);
    let behind = |gate: &Gate, k| {
        let gate = gate.clone();
        move || {
            gate.pass();
            Ok::<u32, Error>(k)
        }
    };
    thread::scope(|s| {
        let leader = s.spawn(|| cache.try_get_with(&1, behind(&gate, 1)));
        let hangs = s.spawn(|| cache.try_get_with(&2, behind(&hung, 2)));
        eventually(|| gate.arrived() + hung.arrived() == 2);
        cache.set_mode(Mode::Frozen);
        let joins = s.spawn(|| cache.ask(&1).try_load_with(|| -> Result<u32, Error> { unreachable!() }));
        let waits = s.spawn(|| cache.try_get_with(&2, || -> Result<u32, Error> { unreachable!() }));
        until_waiting(cache, 2);
        let mut task = Task::waiting(
            cache.try_get_with_async(&1, async { unreachable!("it joins") as Result<u32, Error> }),
        );
        until_waiting(cache, 3);
        gate.open();
        assert_eq!(leader.join().unwrap().unwrap(), 1);
        let answer = joins.join().unwrap().unwrap();
        assert!(matches!((answer.value, answer.provenance), (1, Provenance::Joined { .. })));
        eventually(|| {
            task.run();
            task.has_ended()
        });
        assert_eq!(task.finish().unwrap(), 1);
        assert_eq!(cache.get(&1), Some(1), "it has been stored");
        // Nobody takes over from one that hangs, but one who can't fail.
        clock.advance(secs(10));
        assert!(is_frozen_out(waits.join().unwrap()));
        assert!(is_frozen_out(cache.try_get_with(&2, || -> Result<u32, Error> { unreachable!() })));
        assert_eq!(cache.stats().takeovers, 0);
        assert_eq!(cache.get_with(&2, || 22), 22);
        assert_eq!(cache.stats().takeovers, 1);
        hung.open();
        assert_eq!(hangs.join().unwrap().unwrap(), 2);
    });
    assert_eq!(cache.get(&2), Some(22));
}

/// A refresh that hangs is not taken over by those who are served the stale value.
#[test]
fn a_hung_refresh_is_left_alone_in_a_frozen_cache() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>().soft_ttl(secs(1)).lease(secs(10)).clock(clock.clone()).build();
    let (hung, cache) = (Gate::default(), &cache);
    cache.insert(1, 7);
    clock.advance(secs(2));
    thread::scope(|s| {
        let refreshes = s.spawn(|| {
            cache.get_with(&1, || {
                hung.pass();
                8
            })
        });
        eventually(|| hung.arrived() == 1);
        clock.advance(secs(10));
        cache.set_mode(Mode::Frozen);
        for _ in 0..10 {
            assert_eq!(cache.get_with(&1, || unreachable!("no takeover")), 7);
        }
        cache.set_mode(Mode::Normal);
        assert_eq!(cache.get_with(&1, || 9), 9);
        hung.open();
        assert_eq!(refreshes.join().unwrap(), 8);
    });
    assert_eq!((cache.get(&1), cache.stats().takeovers), (Some(9), 1));
}

#[test]
fn eviction_and_writes_go_on_in_a_frozen_cache() {
    let (clock, told) = (ManualClock::new(), Told::default());
    let cache = plain::<u64, u64>()
        .time_to_live(secs(1))
        .max_capacity(10)
        .clock(clock.clone())
        .eviction_listener(told.listener())
        .build();
    cache.set_mode(Mode::Frozen);
    (0..10).for_each(|k| cache.insert(k, k));
    clock.advance(secs(5));
    (10..20).for_each(|k| cache.insert(k, k));
    assert_eq!((cache.len(), cache.weighted_size()), (10, 10));
    assert_eq!(told.causes(), [RemovalCause::Size; 10], "nothing goes as expired");
    cache.insert(19, 1);
    cache.invalidate(&19);
    cache.insert_with_ttl(18, 1, Duration::ZERO);
    assert_eq!(told.causes(), [RemovalCause::Replaced, RemovalCause::Explicit, RemovalCause::Replaced]);
    cache.retain(|_, _| false);
    assert_eq!((cache.len(), cache.weighted_size()), (0, 0));
}

#[test]
fn what_is_remembered_of_loads_in_a_frozen_cache() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>()
        .negative_ttl(secs(10))
        .error_backoff(Backoff::constant(secs(10)).jitter(0.0))
        .clock(clock.clone())
        .loader(With(|k: &u32, _: &_| if *k == 1 { Ok(Loaded::absent()) } else { Err(Error.into()) }))
        .build();
    assert_eq!(kind(cache.get_or_load(&1)), LoadErrorKind::Absent);
    assert_eq!(kind(cache.get_or_load(&2)), LoadErrorKind::Failed);
    cache.set_mode(Mode::Frozen);
    assert!(is_frozen_out(cache.get_or_load(&2)), "not the back-off's, which ends");
    clock.advance(secs(1_000));
    (100..200).for_each(|k| cache.insert(k, 1));
    cache.run_pending_tasks();
    assert_eq!(kind(cache.get_or_load(&1)), LoadErrorKind::Absent, "an absence is answered however old");
    assert_eq!(cache.optionally_get_with(&1, || unreachable!("it is known to be absent")), None);
    assert!(is_frozen_out(cache.get_or_load(&2)));
    cache.set_mode(Mode::Normal);
    assert_eq!(cache.optionally_get_with(&1, || Some(3)), Some(3));
    assert_eq!(kind(cache.get_or_load(&2)), LoadErrorKind::Failed);
    clock.advance(secs(1_000));
    assert_weights_add_up(&cache, |_, _| 1);
}

// ---- bypass

#[test]
fn nothing_that_is_cached_is_served_in_a_bypass() {
    over_shapes(|builder: Builder<u32, u32>| {
        let clock = ManualClock::new();
        let builder = builder.time_to_live(secs(10)).stale_if_error(secs(100)).clock(clock.clone());
        let (cache, source, loads) = sourced(builder.fallback(|k| (*k == 1).then_some(99)));
        (0..20).for_each(|k| cache.insert(k, 7));
        cache.set_mode(Mode::Bypass);
        for k in 0..20 {
            assert_eq!((cache.get(&k), cache.peek(&k), cache.read(&k, |v| *v)), (None, None, None));
            assert_eq!((cache.contains_key(&k), cache.pin().get(&k)), (false, None));
            assert_eq!(kind(cache.ask(&k).get()), LoadErrorKind::NotCached);
        }
        assert_eq!((cache.iter().count(), cache.stats().hits), (0, 0));
        // Not by the ladder either, which has the fallback's left.
        assert_eq!(kind(cache.try_get_with(&0, || Err::<u32, _>(Error))), LoadErrorKind::Failed);
        let answer = cache.ask(&1).try_load_with(|| Err::<u32, _>(Error)).unwrap();
        assert_eq!((answer.value, answer.provenance), (99, Provenance::Fallback));
        // Every call loads, and nothing of it stays.
        for n in 1..4 {
            source.store(n, Ordering::SeqCst);
            assert_eq!(cache.get_or_load(&2).unwrap(), n);
            assert!(matches!(cache.ask(&2).load().unwrap().provenance, Provenance::Loaded { .. }));
            assert_eq!(smol::block_on(cache.get_or_load_async(&2)).unwrap(), n);
            assert_eq!(cache.get_with(&3, || n), n);
            assert_eq!(cache.optionally_get_with(&4, || Some(n)), Some(n));
            assert_eq!(cache.try_get_with(&5, || Ok::<_, Error>(n)).unwrap(), n);
            assert_eq!(smol::block_on(cache.get_with_async(&5, async move { n })), n);
            let many = cache.load_many([6, 7], |keys: &[u32]| {
                Ok::<_, Error>(keys.iter().map(|k| (*k, n)).collect::<Vec<_>>())
            });
            assert_eq!(many.unwrap().into_values().collect::<Vec<_>>(), [n, n]);
        }
        assert_eq!((loads.get(), cache.stats().fenced), (9, 0));
        cache.set_mode(Mode::Normal);
        for k in [2, 3, 4, 5, 6, 7] {
            assert_eq!(cache.get(&k), None, "the older value has gone: {k}");
        }
        for k in [0, 1, 8, 19] {
            assert_eq!(cache.get(&k), Some(7), "nobody has loaded or written this one: {k}");
        }
        assert_eq!(cache.len(), 14);
        assert_weights_add_up(&cache, |_, _| 1);
    });
}

#[test]
fn a_write_in_a_bypass_removes_what_was_there() {
    over_shapes(|builder: Builder<u64, u64>| {
        let told = Told::default();
        let cache = builder
            .weigher(|_, v| u32::try_from(*v).unwrap())
            .max_capacity(1_000)
            .eviction_listener(told.listener())
            .build();
        (0..10).for_each(|k| cache.insert(k, 7));
        cache.set_mode(Mode::Bypass);
        cache.insert(0, 8);
        cache.insert(77, 8);
        cache.insert_with_ttl(1, 8, secs(5));
        assert_eq!(cache.remove(&2), None, "it is not served");
        cache.invalidate(&3);
        let is_none = |v: Option<&u64>| assert_eq!(v, None, "it is shown nothing");
        let puts = |v: Option<&u64>| {
            is_none(v);
            Op::Put(8)
        };
        assert_eq!(cache.compute(&4, puts), Outcome::Inserted(8));
        assert_eq!(smol::block_on(cache.compute_async(&5, puts)), Outcome::Inserted(8));
        assert_eq!(cache.compute(&6, |_| Op::Remove), Outcome::Absent);
        assert_eq!(cache.compute(&7, |_| Op::Keep), Outcome::Absent);
        assert_eq!(cache.optionally_get_with(&8, || None), None);
        assert_eq!((cache.len(), cache.weighted_size()), (2, 14));
        assert_eq!(told.sorted().len(), 8);
        cache.set_mode(Mode::Normal);
        let left: Vec<_> = (0..80).filter(|k| cache.get(k).is_some()).collect();
        assert_eq!(left, [7, 9]);
        assert_weights_add_up(&cache, |_, v| u32::try_from(*v).unwrap());
    });
}

#[test]
fn loads_are_one_per_key_in_a_bypass() {
    over_tasks(|builder: Builder<u32, u32>| {
        let cache = builder.build();
        cache.insert(1, 7);
        cache.set_mode(Mode::Bypass);
        let door = Door::default();
        let load = || {
            let door = door.clone();
            async move {
                door.pass().await;
                8
            }
        };
        let leader = Task::waiting(cache.get_with_async(&1, load()));
        let other = Task::waiting(cache.try_get_with_async(&1, async { Ok::<u32, Error>(9) }));
        eventually(|| door.arrived() == 1);
        thread::scope(|s| {
            let thread = s.spawn(|| cache.get_with(&1, || unreachable!("it joins")));
            until_waiting(&cache, 2);
            door.open();
            assert_eq!((leader.finish(), other.finish().unwrap()), (8, 8));
            assert_eq!(thread.join().unwrap(), 8);
        });
        assert_eq!((cache.stats().loads, cache.len()), (1, 0));
        cache.set_mode(Mode::Normal);
        assert_eq!(cache.get(&1), None);
    });
}

#[test]
fn the_mode_that_counts_is_that_of_a_loads_end() {
    let cache = plain::<u32, u32>().build();
    let behind = |change: Mode, value: u32| {
        let cache = &cache;
        move || {
            cache.set_mode(change);
            value
        }
    };
    // Claimed in the normal mode, published in a bypass.
    cache.insert(1, 7);
    cache.expire(&1);
    assert_eq!(cache.get_with(&1, behind(Mode::Bypass, 8)), 8);
    assert_eq!(cache.get_with(&2, || 5), 5);
    assert_eq!(cache.len(), 0);
    // Claimed in a bypass, published in the normal mode: as fresh as any.
    assert_eq!(cache.get_with(&1, behind(Mode::Normal, 9)), 9);
    assert_eq!((cache.get(&1), cache.get(&2)), (Some(9), None));
    // A write in between detaches the load in each mode.
    cache.set_mode(Mode::Bypass);
    let detached = || {
        cache.insert(1, 10);
        cache.set_mode(Mode::Normal);
        11
    };
    assert_eq!(cache.get_with(&1, detached), 11);
    assert_eq!((cache.get(&1), cache.stats().fenced), (None, 1));
    // And so for computes.
    cache.insert(1, 1);
    let puts = cache.compute(&1, |v| {
        cache.set_mode(Mode::Bypass);
        Op::Put(v.unwrap() + 1)
    });
    assert_eq!((puts, cache.len()), (Outcome::Replaced(2), 0));
    let puts = cache.compute(&1, |v| {
        cache.set_mode(Mode::Normal);
        assert_eq!(v, None);
        Op::Put(3)
    });
    assert_eq!((puts, cache.get(&1)), (Outcome::Inserted(3), Some(3)));
}

#[test]
fn a_loader_is_not_shown_what_is_bypassed() {
    let cache = plain::<u32, u32>()
        .loader(With(|_: &u32, cx: &quell::LoadContext<u32>| {
            Ok(cx.previous().map_or_else(|| Loaded::new(1), |_| Loaded::not_modified()))
        }))
        .build();
    cache.insert(1, 7);
    assert_eq!(cache.ask(&1).max_age(Duration::ZERO).load().unwrap().value, 7);
    cache.set_mode(Mode::Bypass);
    assert_eq!(cache.get_or_load(&1).unwrap(), 1);
    assert!(!cache.refresh(&1), "nobody would get it");
}

#[test]
fn what_is_remembered_of_loads_in_a_bypass() {
    let clock = ManualClock::new();
    let loads = Tally::default();
    let cache = plain::<u32, u32>()
        .negative_ttl(secs(1_000))
        .error_backoff(Backoff::constant(secs(10)).jitter(0.0))
        .clock(clock.clone())
        .loader(With({
            let loads = loads.clone();
            move |k: &u32, _: &_| {
                loads.add();
                if *k == 1 { Ok(Loaded::absent()) } else { Err(Error.into()) }
            }
        }))
        .build();
    assert_eq!(kind(cache.get_or_load(&1)), LoadErrorKind::Absent);
    cache.set_mode(Mode::Bypass);
    for _ in 0..3 {
        assert_eq!(kind(cache.get_or_load(&1)), LoadErrorKind::Absent);
    }
    assert_eq!((loads.get(), cache.weighted_size()), (4, 0), "an absence is neither told nor remembered");
    // The source is spared all the same.
    cache.insert(2, 7);
    assert_eq!(kind(cache.get_or_load(&2)), LoadErrorKind::Failed);
    assert_eq!(kind(cache.get_or_load(&2)), LoadErrorKind::BackingOff);
    assert_eq!((loads.get(), cache.stats().negative_hits), (5, 0));
    clock.advance(secs(10));
    assert_eq!(cache.get_with(&2, || 5), 5);
    cache.set_mode(Mode::Normal);
    assert_eq!(cache.get(&2), None);
    clock.advance(secs(1_000));
    assert_weights_add_up(&cache, |_, _| 1);
}

/// Counts when it is dropped, also by a panic.
struct AtEnd(Tally);

impl Drop for AtEnd {
    fn drop(&mut self) {
        self.0.add();
    }
}

/// Whatever is read was stored before the last bypass in which its key was written, or after.
#[test]
fn no_older_value_comes_back_after_a_bypass() {
    for round in 0..common::scaled(30, 1_000) {
        let cache = plain::<u32, u64>().shards(1).max_capacity(8).build();
        let cache = &cache;
        let stop = Tally::default();
        thread::scope(|s| {
            for t in 0..2_u64 {
                let stop = stop.clone();
                s.spawn(move || {
                    let mut seen = 0;
                    while stop.get() == 0 {
                        // One writer: so what is seen never goes back.
                        let got =
                            if t == 0 { cache.get(&1) } else { cache.ask(&1).get().ok().map(|a| a.value) };
                        if let Some(got) = got {
                            assert!(got >= seen, "{got} after {seen}");
                            seen = got;
                        }
                        cache.get_with(&2, || 1);
                    }
                });
            }
            let _stop = AtEnd(stop);
            for n in 0..200_u64 {
                cache.insert(1, 2 * n);
                cache.set_mode(Mode::Bypass);
                if (n + round as u64).is_multiple_of(2) {
                    cache.insert(1, 2 * n + 1);
                } else {
                    assert_eq!(cache.get_with(&1, || 2 * n + 1), 2 * n + 1);
                }
                cache.set_mode(Mode::Normal);
                assert_eq!(cache.get(&1), None);
            }
        });
    }
}

// ---- lengths of life

#[test]
fn ttls_apply_to_what_is_stored_from_then_on() {
    over_shapes(|builder: Builder<u32, u32>| {
        let clock = ManualClock::new();
        let (cache, _, _) = sourced(builder.time_to_live(secs(10)).clock(clock.clone()));
        cache.insert(1, 7);
        cache.set_time_to_live(Some(secs(100))).unwrap();
        cache.insert(2, 7);
        cache.get_with(&3, || 7);
        cache.get_or_load(&4).unwrap();
        cache.set_time_to_live(None).unwrap();
        cache.insert(5, 7);
        cache.insert_with_ttl(6, 7, secs(10));
        let there = || (1..=6).filter(|k| cache.contains_key(k)).collect::<Vec<_>>();
        clock.advance(secs(10));
        assert_eq!(there(), [2, 3, 4, 5]);
        clock.advance(secs(90));
        assert_eq!(there(), [5]);
        clock.advance(secs(1_000_000));
        assert_eq!(there(), [5]);
        cache.set_time_to_live(Some(Duration::ZERO)).unwrap();
        assert_eq!((cache.get_with(&7, || 1), cache.get(&7)), (1, None));
    });
}

#[test]
fn a_soft_ttl_can_be_set_and_taken_back() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>().time_to_live(secs(100)).clock(clock.clone()).build();
    let is_stale = |k: u32| matches!(cache.ask(&k).get().unwrap().provenance, Provenance::Stale { .. });
    cache.insert(1, 7);
    cache.set_soft_ttl(Some(secs(5))).unwrap();
    cache.insert(2, 7);
    cache.set_soft_ttl(None).unwrap();
    cache.insert(3, 7);
    clock.advance(secs(5));
    assert_eq!([1, 2, 3].map(is_stale), [false, true, false]);
    assert_eq!(cache.get_with(&2, || 8), 8, "and is refreshed");
    clock.advance(secs(99));
    assert_eq!([1, 2, 3].map(|k| cache.get(&k)), [None, Some(8), None]);
    assert!(!is_stale(2));
}

#[test]
fn a_soft_ttl_beyond_the_hard_one_is_refused_as_when_it_is_built() {
    let built = Cache::<u32, u32>::builder().soft_ttl(secs(9)).time_to_live(secs(5)).try_build().unwrap_err();
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>().soft_ttl(secs(9)).time_to_live(secs(20)).clock(clock.clone()).build();
    assert_eq!(cache.set_time_to_live(Some(secs(5))).unwrap_err(), built);
    cache.set_soft_ttl(Some(secs(5))).unwrap();
    cache.set_time_to_live(Some(secs(5))).unwrap();
    assert_eq!(cache.set_soft_ttl(Some(secs(9))).unwrap_err(), built);
    // Neither has changed anything.
    cache.insert(1, 1);
    clock.advance(secs(4));
    assert!(matches!(cache.ask(&1).get().unwrap().provenance, Provenance::Fresh { .. }));
    clock.advance(secs(1));
    assert_eq!(cache.get(&1), None);
    cache.set_time_to_live(Some(Duration::MAX)).unwrap();
    cache.set_soft_ttl(Some(Duration::MAX)).unwrap();
    cache.insert(1, 1);
    clock.advance(secs(1_000_000_000));
    assert!(matches!(cache.ask(&1).get().unwrap().provenance, Provenance::Fresh { .. }));
}

#[test]
fn jitter_leaves_what_is_for_ever() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>().time_to_live(Duration::MAX).jitter(1.0).clock(clock.clone()).build();
    for k in 0..500 {
        cache.set_time_to_live((k % 2 == 0).then_some(Duration::MAX)).unwrap();
        cache.insert(k, 1);
    }
    clock.advance(Duration::from_secs(1 << 33));
    assert!(
        (0..500).all(|k| cache.ask(&k).get().is_ok_and(|a| matches!(a.provenance, Provenance::Fresh { .. })))
    );
}

// ---- early refresh

/// A cache whose loads take a second by its clock, and whose refreshes are counted and never run.
fn takes_a_second(early: EarlyRefresh) -> (Sut<u32, u32>, ManualClock, Tally) {
    let (clock, fired) = (ManualClock::new(), Tally::default());
    let executor = {
        let fired = fired.clone();
        move |_: Job| {
            fired.add();
            Err(Rejected)
        }
    };
    let loader = {
        let clock = clock.clone();
        move |_: &u32| {
            clock.advance(secs(1));
            Ok::<_, Infallible>(1)
        }
    };
    let builder = plain().time_to_live(secs(100)).early_refresh(early).clock(clock.clone());
    (builder.executor(executor).loader(loader).build(), clock, fired)
}

/// How many of 200 reads fire that come two seconds before the end of a value that was just loaded.
fn fire(cache: &Sut<u32, u32>, clock: &ManualClock, fired: &Tally, key: u32) -> usize {
    let before = fired.get();
    cache.ask(&key).max_age(Duration::ZERO).load().unwrap();
    clock.advance(secs(98));
    (0..200).for_each(|_| assert_eq!(cache.get_or_load(&key).unwrap(), 1));
    fired.get() - before
}

#[test]
fn early_refresh_is_set_while_the_cache_is_in_use() {
    let (cache, clock, fired) = takes_a_second(EarlyRefresh::off());
    assert_eq!(fire(&cache, &clock, &fired, 1), 0);
    cache.set_early_refresh(EarlyRefresh::beta(1_000.0)).unwrap();
    // The slot of the first key notes nothing, and takes part when it has been made anew.
    assert_eq!(fire(&cache, &clock, &fired, 1), 0);
    assert!(fire(&cache, &clock, &fired, 2) > 150);
    cache.invalidate(&1);
    assert!(fire(&cache, &clock, &fired, 1) > 150);
    // Now all of them could, and there is nothing to fire.
    cache.set_early_refresh(EarlyRefresh::off()).unwrap();
    assert_eq!(fire(&cache, &clock, &fired, 1), 0);
    assert_eq!(fire(&cache, &clock, &fired, 3), 0);
    cache.set_early_refresh(EarlyRefresh::miss_probability(0.5)).unwrap();
    assert_eq!(fire(&cache, &clock, &fired, 3), 0);
    assert!(fire(&cache, &clock, &fired, 1) > 0, "it has noted all along what it takes");
    cache.run_pending_tasks();
}

#[test]
fn a_larger_factor_counts_at_once() {
    let (cache, clock, fired) = takes_a_second(EarlyRefresh::beta(0.000_1));
    assert_eq!(fire(&cache, &clock, &fired, 1), 0);
    cache.set_early_refresh(EarlyRefresh::beta(1_000.0)).unwrap();
    (0..200).for_each(|_| assert_eq!(cache.get_or_load(&1).unwrap(), 1));
    assert!(fired.get() > 150, "{} have fired", fired.get());
    clock.advance(ms(1));
}

#[test]
fn an_early_refresh_that_makes_no_sense_is_refused_as_when_it_is_built() {
    let cache = plain::<u32, u32>().build();
    for early in [EarlyRefresh::beta(0.0), EarlyRefresh::beta(f64::NAN), EarlyRefresh::miss_probability(1.0)]
    {
        let built = plain::<u32, u32>().early_refresh(early).try_build().unwrap_err();
        assert_eq!(format!("{:?}", cache.set_early_refresh(early).unwrap_err()), format!("{built:?}"));
    }
}

#[test]
fn warming_fails_key_by_key_in_a_frozen_cache() {
    let (cache, _, _) = sourced(plain::<u32, u32>());
    cache.insert(1, 1);
    cache.set_mode(Mode::Frozen);
    let report = cache.warm([1, 2], WarmOptions::new());
    assert!(matches!(report.outcomes[&1], WarmOutcome::Fresh));
    assert!(
        matches!(&report.outcomes[&2], WarmOutcome::Failed(error) if error.to_string().contains("frozen"))
    );
}

/// Whoever waits for a load that hangs is told so at the end of its lease, as a thread and as a task, and nobody takes it over.
#[test]
fn nobody_waits_for_a_hung_load_for_ever_in_a_frozen_cache() {
    let (clock, gate) = (ManualClock::new(), Gate::default());
    let cache = plain::<u32, u32>().lease(secs(1)).clock(clock.clone()).build();
    let cache = &cache;
    let never = || -> Result<u32, Error> { unreachable!("no load begins") };
    thread::scope(|s| {
        let hangs = s.spawn(|| {
            cache.try_get_with(&1, || {
                gate.pass();
                Ok::<_, Error>(1)
            })
        });
        eventually(|| gate.arrived() == 1);
        let joins = s.spawn(|| cache.try_get_with(&1, never));
        until_waiting(cache, 1);
        let waits = s.spawn(|| smol::block_on(cache.try_get_with_async(&1, async move { never() })));
        until_waiting(cache, 2);
        cache.set_mode(Mode::Frozen);
        clock.advance(secs(1));
        assert!(is_frozen_out(joins.join().unwrap()));
        assert!(is_frozen_out(waits.join().unwrap()));
        assert_eq!(
            cache.compute(&1, |_| Op::Put(5)),
            Outcome::Inserted(5),
            "one that can't fail takes it over"
        );
        gate.open();
        assert_eq!(hangs.join().unwrap().unwrap(), 1);
    });
    assert_eq!((cache.get(&1), cache.stats().takeovers), (Some(5), 1));
}
