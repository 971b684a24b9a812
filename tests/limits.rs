//! Limits over all keys: loads at one time, callers that wait.
//!
//! ```text
//! cargo test --test limits
//! ```
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "tests use real threads")]

mod common;

use common::{Gate, Queue, Tally, eventually, ms, plain, secs, until_waiting};
use quell::{Cache, Clock, LoadError, LoadErrorKind, ManualClock, Provenance};
use std::fmt::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Wake};
use std::thread;
use std::time::Duration;

fn kind<T: std::fmt::Debug>(result: Result<T, LoadError>) -> LoadErrorKind {
    result.unwrap_err().kind()
}

#[test]
fn one_load_too_many_is_refused_at_once() {
    let cache = plain::<u32, u32>().max_concurrent_loads(2).build();
    let (gate, cache) = (Gate::default(), &cache);
    thread::scope(|s| {
        for k in [1, 2] {
            let gate = gate.clone();
            s.spawn(move || {
                let load = || {
                    gate.pass();
                    Ok::<_, Error>(k)
                };
                assert_eq!(cache.try_get_with(&k, load).unwrap(), k);
            });
        }
        eventually(|| gate.arrived() == 2);
        let refused = || cache.try_get_with(&3, || -> Result<u32, Error> { unreachable!("two run already") });
        assert_eq!(kind(refused()), LoadErrorKind::Overloaded);
        assert!(refused().unwrap_err().to_string().contains("max_concurrent_loads"));
        // One that never gives up loads all the same.
        assert_eq!(cache.get_with(&4, || 4), 4);
        assert_eq!(kind(refused()), LoadErrorKind::Overloaded, "and has given back what was not its own");
        // Hits and joins need no permit.
        assert_eq!(cache.try_get_with(&4, || Err(Error)).unwrap(), 4);
        gate.open();
    });
    assert_eq!(cache.try_get_with(&3, || Ok::<_, Error>(3)).unwrap(), 3);
}

#[test]
fn permits_come_back_however_a_load_ends() {
    let cache = plain::<u32, u32>().max_concurrent_loads(1).build();
    for round in 0..50 {
        assert!(cache.try_get_with(&1, || Err::<u32, _>(Error)).is_err());
        let panics = || cache.try_get_with(&2, || -> Result<u32, Error> { panic!("a loader that panics") });
        assert!(common::quietly(panics).is_err());
        assert_eq!(cache.optionally_get_with(&3, || None), None);
        cache.compute(&4, |_| quell::Op::Keep);
        let detached = || {
            cache.insert(5, 1);
            Ok::<_, Error>(2)
        };
        assert_eq!(cache.try_get_with(&5, detached).unwrap(), 2);
        cache.invalidate(&5);
        let mut dropped =
            Box::pin(cache.try_get_with_async(&6, std::future::pending::<Result<u32, Error>>()));
        smol::block_on(async { assert!(smol::future::poll_once(&mut dropped).await.is_none()) });
        assert_eq!(kind(cache.try_get_with(&7, || Ok::<_, Error>(7))), LoadErrorKind::Overloaded);
        drop(dropped);
        assert_eq!(cache.try_get_with(&8, || Ok::<_, Error>(round)).unwrap(), round);
        cache.invalidate_all();
    }
}

#[test]
fn a_permit_goes_to_who_takes_over() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>().max_concurrent_loads(1).lease(ms(100)).clock(clock.clone()).build();
    let (hung, cache) = (Gate::default(), &cache);
    thread::scope(|s| {
        let first = {
            let hung = hung.clone();
            s.spawn(move || {
                cache.try_get_with(&1, || {
                    hung.pass();
                    Ok::<_, Error>(1)
                })
            })
        };
        eventually(|| hung.arrived() == 1);
        clock.advance(ms(100));
        assert_eq!(cache.try_get_with(&1, || Ok::<_, Error>(2)).unwrap(), 2);
        assert_eq!(
            cache.try_get_with(&3, || Ok::<_, Error>(3)).unwrap(),
            3,
            "who hangs has no permit any more"
        );
        hung.open();
        assert_eq!(first.join().unwrap().unwrap(), 1);
        assert_eq!(cache.try_get_with(&4, || Ok::<_, Error>(4)).unwrap(), 4);
    });
}

#[test]
fn refreshes_leave_room_for_who_has_nothing_to_serve() {
    let clock = ManualClock::new();
    let queue = Queue::default();
    let cache = plain::<u32, u32>()
        .soft_ttl(secs(100))
        .time_to_live(secs(200))
        .max_concurrent_loads(8)
        .clock(clock.clone())
        .executor(queue.clone())
        .loader(|k: &u32| Ok::<_, Error>(*k))
        .build();
    (0..20).for_each(|k| cache.insert(k, 100));
    clock.advance(secs(100));
    (0..20).for_each(|k| assert_eq!(cache.get_or_load(&k).unwrap(), 100));
    assert_eq!(queue.len(), 4, "half of the permits");
    clock.advance(secs(75));
    (0..20).for_each(|k| assert_eq!(cache.get_or_load(&k).unwrap(), 100));
    assert_eq!(queue.len(), 6, "three quarters for what is soon dead");
    assert_eq!(cache.get_or_load(&77).unwrap(), 77, "the rest for who has nothing");
    assert_eq!(queue.run(), 6);
    assert_eq!(cache.stats().misses, 1);
}

#[test]
fn one_waiter_too_many_takes_the_ladder_at_once() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>()
        .time_to_live(secs(1))
        .stale_if_error(secs(100))
        .max_waiters(3)
        .fallback(|k| (*k == 2).then_some(22))
        .clock(clock.clone())
        .build();
    let cache = &cache;
    // Twice: whoever has waited has left.
    for round in 0..2 {
        let (gate, loads) = (Gate::default(), Tally::default());
        cache.invalidate_all();
        cache.insert(1, 11);
        clock.advance(secs(2));
        thread::scope(|s| {
            let load = |k: u32| {
                let (gate, loads) = (gate.clone(), loads.clone());
                move || {
                    loads.add();
                    gate.pass();
                    Ok::<_, Error>(k)
                }
            };
            for k in 1..=3 {
                let (mine, other) = (load(k), load(k));
                s.spawn(move || cache.try_get_with(&k, mine).unwrap());
                eventually(|| cache.in_flight().len() == k as usize);
                s.spawn(move || cache.try_get_with(&k, other).unwrap());
            }
            // Counted as one who waits before the join is.
            eventually(|| cache.stats().joins == 4 * round + 3);
            let answer = cache.ask(&1).try_load_with(load(0)).unwrap();
            assert!(matches!((answer.value, answer.provenance), (11, Provenance::Grace { .. })));
            assert_eq!(cache.ask(&2).try_load_with(load(0)).unwrap().provenance, Provenance::Fallback);
            let error = cache.try_get_with(&3, load(0)).unwrap_err();
            assert_eq!(error.kind(), LoadErrorKind::Overloaded);
            assert!(error.to_string().contains("max_waiters"), "{error}");
            // One that never gives up waits all the same.
            let patient = s.spawn(|| cache.get_with(&3, || unreachable!("somebody loads it")));
            until_waiting(cache, 4);
            gate.open();
            assert_eq!(patient.join().unwrap(), 3);
        });
        assert_eq!(loads.get(), 3);
        assert_eq!(cache.stats().waiters, 0);
    }
}

#[test]
fn no_loads_at_all_is_refused_as_a_setting() {
    let error = Cache::<u32, u32>::builder().max_concurrent_loads(0).try_build().unwrap_err();
    assert!(error.to_string().contains("max_concurrent_loads"), "{error}");
    assert_eq!(Cache::<u32, u32>::builder().max_waiters(0).build().get_with(&1, || 1), 1);
}

/// Whether the only permit of a cache is there to be had.
fn admits<K, V>(cache: &common::Sut<K, V>, key: &K, value: V) -> bool
where
    K: std::hash::Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + std::fmt::Debug + Send + Sync + 'static,
{
    cache.invalidate(key);
    match cache.try_get_with(key, || Ok::<_, Error>(value)) {
        Ok(_) => true,
        Err(error) if error.kind() == LoadErrorKind::Overloaded => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_key_that_panics_when_it_is_cloned_keeps_no_permit() {
    #[derive(Debug, PartialEq, Eq, Hash)]
    struct Key(u32);
    impl Clone for Key {
        fn clone(&self) -> Self {
            assert_ne!(self.0, 13, "a key that panics");
            Self(self.0)
        }
    }
    let cache = plain::<Key, u32>().max_concurrent_loads(1).build();
    assert!(common::quietly(|| cache.try_get_with(&Key(13), || Ok::<_, Error>(1))).is_err());
    assert!(admits(&cache, &Key(1), 1));
}

#[test]
fn a_clock_that_panics_keeps_no_permit() {
    /// Panics when it is read for the nth time.
    #[derive(Clone)]
    struct Broken(Arc<AtomicUsize>);
    impl Clock for Broken {
        fn now(&self) -> Duration {
            assert_ne!(self.0.fetch_sub(1, Ordering::SeqCst), 0, "a clock that panics");
            ms(1)
        }
    }
    let broken = Broken(Arc::new(AtomicUsize::new(1_000_000)));
    let cache = plain::<u32, u32>().max_concurrent_loads(1).clock(broken.clone()).build();
    let mut panics = 0;
    for nth in 0..20 {
        broken.0.store(nth, Ordering::SeqCst);
        panics += usize::from(common::quietly(|| cache.try_get_with(&1, || Ok::<_, Error>(1))).is_err());
        broken.0.store(1_000_000, Ordering::SeqCst);
        assert!(admits(&cache, &2, 2), "after a panic at reading {nth}");
        cache.invalidate_all();
    }
    assert!(panics > 2, "it panicked {panics} times");
}

#[test]
fn a_waker_that_panics_keeps_no_permit() {
    struct Bomb;
    impl Wake for Bomb {
        fn wake(self: Arc<Self>) {
            panic!("a waker that panics");
        }
    }
    let cache = plain::<u32, u32>().max_concurrent_loads(1).build();
    let (gate, cache) = (Gate::default(), &cache);
    thread::scope(|s| {
        let leader = {
            let gate = gate.clone();
            let load = move || {
                gate.pass();
                1
            };
            s.spawn(move || common::quietly(|| cache.get_with(&1, load)))
        };
        eventually(|| gate.arrived() == 1);
        let mut waiter = Box::pin(cache.get_with_async(&1, async { unreachable!("somebody loads it") }));
        let bomb = Arc::new(Bomb).into();
        assert!(waiter.as_mut().poll(&mut Context::from_waker(&bomb)).is_pending());
        gate.open();
        drop(leader.join().unwrap());
        assert_eq!(cache.get(&1), Some(1));
    });
    assert!(admits(cache, &2, 2));
}

#[test]
fn a_permit_goes_to_who_takes_over_what_is_queued() {
    let queue = Queue::default();
    let cache = plain::<u32, u32>()
        .max_concurrent_loads(1)
        .executor(queue.clone())
        .loader(|k: &u32| Ok::<_, Error>(*k))
        .build();
    for _ in 0..3 {
        cache.invalidate_all();
        assert!(cache.refresh(&1));
        assert_eq!(kind(cache.try_get_with(&2, || Ok::<_, Error>(2))), LoadErrorKind::Overloaded);
        // It has nothing to serve, and loads in place of the job.
        assert_eq!(cache.get_or_load(&1).unwrap(), 1);
        assert!(admits(&cache, &2, 2), "the job has nothing left to do");
    }
    // And is not given back twice.
    assert_eq!((queue.len(), queue.run()), (3, 3));
    let (gate, cache) = (Gate::default(), &cache);
    thread::scope(|s| {
        let load = {
            let gate = gate.clone();
            move || {
                gate.pass();
                3
            }
        };
        s.spawn(move || cache.get_with(&3, load));
        eventually(|| gate.arrived() == 1);
        assert!(!admits(cache, &4, 4));
        gate.open();
    });
    assert!(admits(cache, &4, 4));
}

#[test]
fn a_batch_is_one_load_to_the_limit() {
    let cache = plain::<u32, u32>().max_concurrent_loads(2).build();
    let squares = |keys: &[u32]| Ok::<_, Error>(keys.iter().map(|k| (*k, k * k)).collect::<Vec<_>>());
    assert_eq!(cache.load_many(0..10, squares).unwrap().len(), 10);
    assert_eq!(
        smol::block_on(cache.load_many_async(10..20, |keys| async move { squares(&keys) })).unwrap().len(),
        10
    );
    let (gate, cache) = (Gate::default(), &cache);
    thread::scope(|s| {
        for k in [101, 102] {
            let gate = gate.clone();
            s.spawn(move || {
                cache.get_with(&k, || {
                    gate.pass();
                    k
                })
            });
        }
        eventually(|| gate.arrived() == 2);
        assert_eq!(kind(cache.load_many(20..30, squares)), LoadErrorKind::Overloaded);
        gate.open();
    });
    assert_eq!(cache.load_many(20..30, squares).unwrap().len(), 10);
}
