//! One call's own contract, and where its answer came from: `cargo test --test ask`.
//!
//! Every path to each of them is in `tests/provenance.rs`.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::{Builder, Gate, Queue, Sut, Tally, With, eventually, over_shapes, plain, secs, until_waiting};
use quell::{Answer, LoadContext, LoadError, LoadErrorKind, Loaded, ManualClock, Provenance};
use std::error::Error as _;
use std::thread;
use std::time::Duration;

type Error = std::io::Error;
const NANO: Duration = Duration::from_nanos(1);

fn boom() -> Error {
    Error::other("boom")
}

/// Soft 10 s, hard 20 s, grace until 50 s.
fn usual(builder: Builder<u32, u32>) -> (Sut<u32, u32>, ManualClock) {
    let clock = ManualClock::new();
    let builder = builder.soft_ttl(secs(10)).time_to_live(secs(20)).stale_if_error(secs(30));
    (builder.clock(clock.clone()).build(), clock)
}

fn told(result: Result<Answer<u32>, LoadError>) -> (u32, Provenance) {
    let answer = result.unwrap();
    (answer.value, answer.provenance)
}

fn kind<V: std::fmt::Debug>(result: Result<V, LoadError>) -> LoadErrorKind {
    result.unwrap_err().kind()
}

#[test]
fn every_provenance() {
    over_shapes(|builder| {
        let (cache, clock) = usual(builder.fallback(|key| (*key == 9).then_some(900)));
        let slow = cache.ask(&1).load_with(|| {
            clock.advance(secs(3));
            1
        });
        assert_eq!(told(slow), (1, Provenance::Loaded { took: secs(3) }));
        clock.advance(secs(2));
        assert_eq!(told(cache.ask(&1).get()), (1, Provenance::Fresh { age: secs(2) }));
        assert_eq!(told(cache.ask(&1).load_with(|| unreachable!())), (1, Provenance::Fresh { age: secs(2) }));
        clock.advance(secs(9));
        assert_eq!(told(cache.ask(&1).get()), (1, Provenance::Stale { age: secs(11) }));
        let fail = || Err::<u32, _>(boom());
        assert_eq!(told(cache.ask(&1).try_load_with(fail)), (1, Provenance::Stale { age: secs(11) }));
        clock.advance(secs(9));
        assert_eq!(kind(cache.ask(&1).get()), LoadErrorKind::NotCached);
        assert_eq!(told(cache.ask(&1).try_load_with(fail)), (1, Provenance::Grace { age: secs(20) }));
        assert_eq!(told(cache.ask(&9).try_load_with(fail)), (900, Provenance::Fallback));
        let gate = Gate::default();
        thread::scope(|s| {
            let leader = s.spawn(|| {
                told(cache.ask(&5).load_with(|| {
                    gate.pass();
                    5
                }))
            });
            eventually(|| gate.arrived() == 1);
            let joined = s.spawn(|| told(cache.ask(&5).load_with(|| unreachable!())));
            until_waiting(&cache, 1);
            // Its wait began before it was counted.
            clock.advance(secs(4));
            gate.open();
            assert_eq!(leader.join().unwrap(), (5, Provenance::Loaded { took: secs(4) }));
            assert_eq!(joined.join().unwrap(), (5, Provenance::Joined { waited: secs(4) }));
        });
    });
}

#[test]
fn every_error_kind() {
    over_shapes(|builder: Builder<u32, u32>| {
        let clock = ManualClock::new();
        let loader = With(|key: &u32, _: &LoadContext<u32>| match key {
            1 => Err("boom".into()),
            2 => Ok(Loaded::absent()),
            3 => Ok(Loaded::not_modified()),
            _ => Ok(Loaded::new(*key)),
        });
        let cache = builder.clock(clock.clone()).loader(loader).build();
        let failed = cache.ask(&1).load().unwrap_err();
        assert_eq!(
            (failed.kind(), failed.source().unwrap().to_string()),
            (LoadErrorKind::Failed, "boom".into())
        );
        assert_eq!(kind(cache.ask(&2).load()), LoadErrorKind::Absent);
        // Without a previous value that is no answer.
        assert_eq!(kind(cache.ask(&3).load()), LoadErrorKind::Failed);
        assert_eq!(kind(cache.ask(&4).get()), LoadErrorKind::NotCached);
        assert_eq!(kind(cache.ask(&4).only_if_cached().load()), LoadErrorKind::NotCached);
        let again = || cache.ask(&5).try_load_with(|| Err::<u32, _>(boom()));
        let cycle = cache.ask(&5).try_load_with(|| again().map(|a| a.value)).unwrap_err();
        assert_eq!(cycle.downcast_ref::<LoadError>().unwrap().kind(), LoadErrorKind::Cycle);
        let gate = Gate::default();
        thread::scope(|s| {
            let leader = s.spawn(|| {
                cache.get_with(&6, || {
                    gate.pass();
                    6
                })
            });
            eventually(|| gate.arrived() == 1);
            assert_eq!(kind(cache.ask(&6).wait_timeout(Duration::ZERO).load()), LoadErrorKind::TimedOut);
            assert_eq!(kind(cache.ask(&6).get()), LoadErrorKind::NotCached);
            gate.open();
            leader.join().unwrap();
        });
        assert_eq!(cache.len(), 1);
    });
}

#[test]
fn max_age_loads_what_is_older() {
    over_shapes(|builder| {
        let (cache, clock) = usual(builder);
        cache.insert(1, 1);
        clock.set(secs(5));
        assert_eq!(told(cache.ask(&1).max_age(secs(5) + NANO).get()).0, 1);
        assert_eq!(kind(cache.ask(&1).max_age(secs(5)).get()), LoadErrorKind::NotCached);
        assert_eq!(told(cache.ask(&1).max_age(secs(6)).load_with(|| unreachable!())).0, 1);
        // A failed load does not bring back what is too old.
        assert_eq!(
            kind(cache.ask(&1).max_age(secs(4)).try_load_with(|| Err::<u32, _>(boom()))),
            LoadErrorKind::Failed
        );
        assert_eq!(cache.get(&1), Some(1), "others take it still");
        assert_eq!(
            told(cache.ask(&1).max_age(secs(4)).load_with(|| 2)),
            (2, Provenance::Loaded { took: secs(0) })
        );
        assert_eq!(told(cache.ask(&1).get()), (2, Provenance::Fresh { age: secs(0) }));
        assert_eq!(told(cache.ask(&1).max_age(Duration::MAX).get()).0, 2);
        assert_eq!(kind(cache.ask(&1).max_age(Duration::ZERO).get()), LoadErrorKind::NotCached);
        assert_eq!(told(cache.ask(&1).max_age(Duration::ZERO).load_with(|| 3)).0, 3);
    });
}

#[test]
fn max_stale_loads_what_has_been_stale_for_longer() {
    over_shapes(|builder| {
        let (cache, clock) = usual(builder);
        cache.insert(1, 1);
        clock.set(secs(13));
        assert_eq!(
            told(cache.ask(&1).max_stale(secs(3) + NANO).get()).1,
            Provenance::Stale { age: secs(13) }
        );
        assert_eq!(kind(cache.ask(&1).max_stale(secs(3)).get()), LoadErrorKind::NotCached);
        let fail = |stale| cache.ask(&1).max_stale(stale).try_load_with(|| Err::<u32, _>(boom()));
        assert_eq!(kind(fail(secs(2))), LoadErrorKind::Failed);
        // It bounds grace too.
        clock.set(secs(25));
        assert_eq!(told(fail(secs(15) + NANO)).1, Provenance::Grace { age: secs(25) });
        assert_eq!(kind(fail(secs(15))), LoadErrorKind::Failed);
        assert_eq!(told(cache.ask(&1).max_stale(Duration::ZERO).load_with(|| 2)).0, 2);
        assert_eq!(told(cache.ask(&1).max_stale(Duration::ZERO).get()).1, Provenance::Fresh { age: secs(0) });
    });
}

#[test]
fn a_value_that_one_call_refuses_is_served_to_others_meanwhile() {
    over_shapes(|builder| {
        let (cache, clock) = usual(builder);
        let gate = Gate::default();
        cache.insert(1, 1);
        clock.set(secs(5));
        thread::scope(|s| {
            let picky = s.spawn(|| {
                told(cache.ask(&1).max_age(secs(1)).load_with(|| {
                    gate.pass();
                    2
                }))
            });
            eventually(|| gate.arrived() == 1);
            assert_eq!(cache.get_with(&1, || unreachable!()), 1);
            // Another picky one joins.
            let second = s.spawn(|| told(cache.ask(&1).max_age(secs(1)).load_with(|| unreachable!())));
            until_waiting(&cache, 1);
            gate.open();
            assert_eq!((picky.join().unwrap().0, second.join().unwrap().0), (2, 2));
        });
    });
}

#[test]
fn only_if_cached_neither_loads_nor_waits() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (clock, queue, loads) = (ManualClock::new(), Queue::default(), Tally::default());
        let count = loads.clone();
        let cache = builder
            .soft_ttl(secs(1))
            .clock(clock.clone())
            .executor(queue.clone())
            .loader_fn(move |_| Ok::<_, Error>(count.add() as u32))
            .build();
        let gate = Gate::default();
        for call in 0..3 {
            let result = match call {
                0 => cache.ask(&1).only_if_cached().load(),
                1 => cache.ask(&1).only_if_cached().load_with(|| unreachable!()),
                _ => {
                    cache.ask(&1).only_if_cached().try_load_with(|| -> Result<u32, Error> { unreachable!() })
                }
            };
            assert_eq!(kind(result), LoadErrorKind::NotCached);
        }
        thread::scope(|s| {
            let leader = s.spawn(|| {
                cache.get_with(&1, || {
                    gate.pass();
                    1
                })
            });
            eventually(|| gate.arrived() == 1);
            assert_eq!(kind(cache.ask(&1).only_if_cached().load()), LoadErrorKind::NotCached);
            gate.open();
            leader.join().unwrap();
        });
        // A stale value is served, and not refreshed.
        clock.advance(secs(1));
        assert_eq!(told(cache.ask(&1).only_if_cached().load()), (1, Provenance::Stale { age: secs(1) }));
        assert_eq!(told(cache.ask(&1).get()), (1, Provenance::Stale { age: secs(1) }));
        assert_eq!((queue.len(), loads.get(), cache.in_flight().len()), (0, 0, 0));
    });
}

#[test]
fn wait_timeout_goes_before_the_caches() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (clock, gate) = (ManualClock::new(), Gate::default());
        let cache = builder.wait_timeout(secs(5)).clock(clock.clone()).build();
        thread::scope(|s| {
            let leader = s.spawn(|| {
                cache.get_with(&1, || {
                    gate.pass();
                    1
                })
            });
            eventually(|| gate.arrived() == 1);
            let wait = |timeout| cache.ask(&1).wait_timeout(timeout).load_with(|| unreachable!());
            let (short, long) = (s.spawn(move || wait(secs(2))), s.spawn(move || wait(Duration::MAX)));
            let usual = s.spawn(|| cache.ask(&1).load_with(|| unreachable!()));
            until_waiting(&cache, 3);
            clock.advance(secs(2));
            assert_eq!(kind(short.join().unwrap()), LoadErrorKind::TimedOut);
            until_waiting(&cache, 2);
            clock.advance(secs(3));
            assert_eq!(kind(usual.join().unwrap()), LoadErrorKind::TimedOut);
            until_waiting(&cache, 1);
            gate.open();
            leader.join().unwrap();
            assert_eq!(told(long.join().unwrap()).0, 1);
        });
        assert_eq!(cache.stats().wait_timeouts, 2);
    });
}

#[test]
fn a_wait_that_ends_takes_the_ladder() {
    for with_fallback in [false, true] {
        let clock = ManualClock::new();
        let mut builder =
            plain::<u32, u32>().time_to_live(secs(10)).stale_if_error(secs(30)).clock(clock.clone());
        if with_fallback {
            builder = builder.fallback(|_| Some(900));
        }
        let (cache, gate) = (builder.build(), Gate::default());
        cache.insert(1, 1);
        clock.set(secs(12));
        thread::scope(|s| {
            let leaders = [1, 2].map(|key| {
                let (cache, gate) = (&cache, &gate);
                s.spawn(move || {
                    cache.get_with(&key, || {
                        gate.pass();
                        7
                    })
                })
            });
            eventually(|| gate.arrived() == 2);
            let grace = cache.ask(&1).wait_timeout(Duration::ZERO).load_with(|| unreachable!());
            assert_eq!(told(grace), (1, Provenance::Grace { age: secs(12) }));
            let nothing = cache.ask(&2).wait_timeout(Duration::ZERO).load_with(|| unreachable!());
            if with_fallback {
                assert_eq!(told(nothing), (900, Provenance::Fallback));
            } else {
                assert_eq!(kind(nothing), LoadErrorKind::TimedOut);
            }
            gate.open();
            assert_eq!(leaders.map(|l| l.join().unwrap()), [7; 2]);
        });
    }
}

#[test]
fn ttl_and_soft_ttl_are_those_of_what_it_loads() {
    over_shapes(|builder: Builder<u32, u32>| {
        let clock = ManualClock::new();
        let cache = builder
            .soft_ttl(secs(10))
            .time_to_live(secs(20))
            .clock(clock.clone())
            .loader_fn(|key| Ok::<_, Error>(*key))
            .build();
        cache.ask(&1).ttl(secs(3)).load_with(|| 1).unwrap();
        cache.ask(&2).soft_ttl(secs(3)).load().unwrap();
        cache.ask(&3).soft_ttl(secs(30)).ttl(secs(60)).try_load_with(|| Ok::<_, Error>(3)).unwrap();
        cache.ask(&4).ttl(Duration::ZERO).load().unwrap();
        assert_eq!(cache.get(&4), None);
        // What is cached keeps its own.
        cache.ask(&3).ttl(secs(1)).load().unwrap();
        clock.set(secs(3));
        assert_eq!(cache.get(&1), None);
        assert!(matches!(told(cache.ask(&2).get()).1, Provenance::Stale { .. }));
        clock.set(secs(30) - NANO);
        assert!(matches!(told(cache.ask(&3).get()).1, Provenance::Fresh { .. }));
        clock.set(secs(30));
        assert!(matches!(told(cache.ask(&3).get()).1, Provenance::Stale { .. }));
        clock.set(secs(60));
        assert_eq!(cache.get(&3), None);
    });
}

#[test]
fn texts_of_errors_say_what_to_do() {
    let cache = plain::<u32, u32>().build();
    let error = cache.ask(&1).load().unwrap_err();
    assert!(error.to_string().contains("loader"), "{error}");
    let error = cache.try_get_with(&1, || Err::<u32, _>("the disk is gone")).unwrap_err();
    assert_eq!(error.source().unwrap().to_string(), "the disk is gone");
    assert!(format!("{error:?}").contains("the disk is gone"));
}
