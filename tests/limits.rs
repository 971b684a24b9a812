//! Limits over all keys: loads at one time, callers that wait.
//!
//! ```text
//! cargo test --test limits
//! ```
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "tests use real threads")]

mod common;

use common::{Gate, Queue, Tally, eventually, ms, plain, secs, until_waiting};
use quell::{Cache, LoadError, LoadErrorKind, ManualClock, Provenance};
use std::fmt::Error;
use std::thread;

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
    cache.insert(1, 11);
    clock.advance(secs(2));
    let (gate, cache, loads) = (Gate::default(), &cache, Tally::default());
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
        until_waiting(cache, 3);
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

#[test]
fn no_loads_at_all_is_refused_as_a_setting() {
    let error = Cache::<u32, u32>::builder().max_concurrent_loads(0).try_build().unwrap_err();
    assert!(error.to_string().contains("max_concurrent_loads"), "{error}");
    assert_eq!(Cache::<u32, u32>::builder().max_waiters(0).build().get_with(&1, || 1), 1);
}
