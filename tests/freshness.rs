//! When a value is fresh, stale, in grace or gone, and who refreshes it: `cargo test --test freshness`.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::{Builder, Sut, Tally, With, over_shapes, plain, secs};
use quell::{LoadContext, LoadErrorKind, Loaded, ManualClock, Op, Outcome, Provenance};
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

#[test]
fn a_life() {
    over_shapes(|builder| {
        let (cache, clock) = usual(builder);
        cache.insert(1, 1);
        let fails = || cache.ask(&1).try_load_with(|| Err::<u32, _>(boom())).map(|a| a.provenance);
        let stages: [(Duration, Option<u32>, Option<Provenance>); 6] = [
            (secs(0), Some(1), Some(Provenance::Fresh { age: secs(0) })),
            (secs(10) - NANO, Some(1), Some(Provenance::Fresh { age: secs(10) - NANO })),
            (secs(10), Some(1), Some(Provenance::Stale { age: secs(10) })),
            (secs(20) - NANO, Some(1), Some(Provenance::Stale { age: secs(20) - NANO })),
            (secs(20), None, Some(Provenance::Grace { age: secs(20) })),
            (secs(50), None, None),
        ];
        for (at, read, ladder) in stages {
            clock.set(at);
            assert_eq!([cache.get(&1), cache.peek(&1), cache.read(&1, |v| *v)], [read; 3], "{at:?}");
            assert_eq!(
                (cache.pin().get(&1).copied(), cache.contains_key(&1)),
                (read, read.is_some()),
                "{at:?}"
            );
            assert_eq!(cache.iter().count(), usize::from(read.is_some()), "{at:?}");
            assert_eq!(fails().ok(), ladder, "{at:?}");
        }
        assert_eq!(fails().unwrap_err().kind(), LoadErrorKind::Failed);
    });
}

#[test]
fn upkeep_takes_what_is_dead_and_leaves_the_rest() {
    over_shapes(|builder| {
        let (cache, clock) = usual(builder);
        (0..20).for_each(|key| cache.insert(key, key));
        clock.advance(secs(25));
        (20..40).for_each(|key| cache.insert(key, key));
        cache.run_pending_tasks();
        assert_eq!((cache.len(), cache.iter().count()), (40, 20), "those in grace stay");
        clock.advance(secs(25));
        cache.run_pending_tasks();
        assert_eq!((cache.len(), cache.iter().count()), (20, 0));
        clock.advance(secs(25));
        cache.run_pending_tasks();
        assert!(cache.is_empty());
    });
}

#[test]
fn entries_with_a_ttl_of_their_own_are_swept_by_writes() {
    // The cache itself has no TTL: some of its entries do.
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>().shards(1).clock(clock.clone()).build();
    (1..=1_000).for_each(|key| cache.insert_with_ttl(key, key, secs(1)));
    clock.advance(secs(1));
    (0..20_000).for_each(|n| cache.insert(0, n));
    assert_eq!(cache.len(), 1, "expired entries stay for ever");
}

#[test]
fn a_write_renews() {
    over_shapes(|builder| {
        let (cache, clock) = usual(builder);
        cache.insert(1, 1);
        for n in 2..5 {
            clock.advance(secs(15));
            cache.insert(1, n);
            assert_eq!(cache.ask(&1).get().unwrap().provenance, Provenance::Fresh { age: secs(0) });
            clock.advance(secs(15));
            assert_eq!(cache.compute(&1, |v| Op::Put(v.unwrap() * 10)), Outcome::Replaced(n * 10));
            assert_eq!(cache.ask(&1).get().unwrap().provenance, Provenance::Fresh { age: secs(0) });
        }
        // Reading does not, nor does keeping.
        clock.advance(secs(19));
        assert_eq!((cache.get(&1), cache.compute(&1, |_| Op::Keep)), (Some(40), Outcome::Kept(40)));
        clock.advance(secs(1));
        assert_eq!(cache.get(&1), None);
    });
}

#[test]
fn a_ttl_of_its_own() {
    over_shapes(|builder| {
        let (cache, clock) = usual(builder);
        cache.insert_with_ttl(1, 1, secs(5));
        cache.insert_with_ttl(2, 2, secs(100));
        clock.set(secs(5));
        assert_eq!((cache.get(&1), cache.get(&2)), (None, Some(2)));
        clock.set(secs(10));
        assert!(matches!(cache.ask(&2).get().unwrap().provenance, Provenance::Stale { .. }));
        clock.set(secs(100) - NANO);
        assert_eq!(cache.get(&2), Some(2));
        clock.set(secs(100));
        assert_eq!(cache.get(&2), None);
    });
}

#[test]
fn a_ttl_of_zero_takes_away_what_is_there() {
    over_shapes(|builder| {
        let (cache, _) = usual(builder);
        cache.insert(1, 1);
        cache.insert_with_ttl(1, 2, Duration::ZERO);
        cache.insert_with_ttl(2, 2, Duration::ZERO);
        assert_eq!((cache.get(&1), cache.get(&2), cache.len()), (None, None, 0));
        // Not in grace either.
        assert!(cache.try_get_with(&1, || Err::<u32, _>(boom())).is_err());
    });
}

#[test]
fn a_loader_gives_times() {
    let clock = ManualClock::new();
    let loader = With(|key: &u32, _: &LoadContext<u32>| {
        Ok(match key {
            1 => Loaded::new(1).ttl(secs(5)),
            2 => Loaded::new(2).soft_ttl(secs(3)),
            3 => Loaded::new(3).ttl(Duration::MAX).soft_ttl(Duration::MAX),
            _ => Loaded::new(4),
        })
    });
    let cache = plain().soft_ttl(secs(10)).time_to_live(secs(20)).clock(clock.clone()).loader(loader).build();
    for key in 1..=4 {
        assert!(matches!(cache.ask(&key).load().unwrap().provenance, Provenance::Loaded { .. }));
    }
    let stale = |key| matches!(cache.ask(&key).get().unwrap().provenance, Provenance::Stale { .. });
    clock.set(secs(3));
    assert_eq!([1, 2, 3, 4].map(stale), [false, true, false, false]);
    clock.set(secs(5));
    assert_eq!(cache.get(&1), None);
    clock.set(secs(10));
    assert_eq!([2, 3, 4].map(stale), [true, false, true]);
    clock.set(secs(1 << 32));
    assert_eq!([1, 2, 3, 4].map(|key| cache.get(&key)), [None, None, Some(3), None]);
}

#[test]
fn expire_makes_it_stale_now() {
    over_shapes(|builder| {
        let (cache, clock) = usual(builder);
        assert!(!cache.expire(&1));
        cache.insert(1, 1);
        clock.set(secs(2));
        assert!(cache.expire(&1));
        let answer = cache.ask(&1).get().unwrap();
        assert_eq!((answer.value, answer.provenance), (1, Provenance::Stale { age: secs(2) }));
        assert_eq!((cache.get_with(&1, || 2), cache.get_with(&1, || 3)), (2, 2));
        // The hard deadline stays: an expired value is not renewed.
        assert!(cache.expire(&1) && cache.expire(&1));
        clock.set(secs(22) - NANO);
        assert_eq!(cache.get(&1), Some(2));
        clock.set(secs(22));
        assert_eq!(cache.get(&1), None);
        // Nor is it called back from grace.
        assert!(!cache.expire(&1));
        assert_eq!(cache.get(&1), None);
    });
}

#[test]
fn expire_works_without_any_ttl() {
    let (cache, loads) = (plain::<u32, usize>().build(), Tally::default());
    assert_eq!(cache.get_with(&1, || loads.add()), 0);
    assert!(cache.expire(&1));
    assert_eq!(
        (cache.get(&1), cache.get_with(&1, || loads.add()), cache.get_with(&1, || loads.add())),
        (Some(0), 1, 1)
    );
}

#[test]
fn an_expired_value_is_absent_to_writes() {
    over_shapes(|builder| {
        let (cache, clock) = usual(builder);
        (1..=3).for_each(|key| cache.insert(key, key));
        clock.set(secs(20));
        assert_eq!(cache.remove(&1), None);
        assert_eq!(
            cache.compute(&2, |v| {
                assert_eq!(v, None);
                Op::Keep
            }),
            Outcome::Absent
        );
        assert_eq!(
            cache.compute(&3, |v| {
                assert_eq!(v, None);
                Op::Put(33)
            }),
            Outcome::Inserted(33)
        );
        assert_eq!((cache.get(&2), cache.get(&3)), (None, Some(33)));
        // What `compute` kept is still good for the ladder.
        assert_eq!(cache.try_get_with(&2, || Err::<u32, _>(boom())).unwrap(), 2);
    });
}

#[test]
fn a_stale_values_failed_refresh_is_not_the_callers() {
    over_shapes(|builder| {
        let (cache, clock) = usual(builder);
        cache.insert(1, 1);
        clock.set(secs(12));
        let answer = cache.ask(&1).try_load_with(|| Err::<u32, _>(boom())).unwrap();
        assert_eq!((answer.value, answer.provenance), (1, Provenance::Stale { age: secs(12) }));
        let stats = cache.stats();
        assert_eq!((stats.load_failures, stats.loads), (1, 1));
        // Its times have not changed by it.
        clock.set(secs(20));
        assert_eq!(cache.get(&1), None);
    });
}

#[test]
fn a_found_absence_takes_the_stale_value() {
    over_shapes(|builder| {
        let (cache, clock) = usual(builder);
        cache.insert(1, 1);
        clock.set(secs(12));
        assert_eq!(cache.optionally_get_with(&1, || None), None);
        assert_eq!((cache.get(&1), cache.len()), (None, 0));
    });
}

#[test]
fn expire_leaves_a_value_in_grace_to_the_ladder() {
    over_shapes(|builder| {
        let (cache, clock) = usual(builder);
        cache.insert(1, 1);
        clock.set(secs(20));
        assert!(!cache.expire(&1), "it is not served");
        assert_eq!(cache.try_get_with(&1, || Err::<u32, _>(boom())).ok(), Some(1));
    });
}

#[test]
fn retain_leaves_a_value_in_grace_to_the_ladder() {
    over_shapes(|builder| {
        let (cache, clock) = usual(builder);
        cache.insert(1, 1);
        clock.set(secs(20));
        cache.retain(|_, _| true);
        assert_eq!(cache.try_get_with(&1, || Err::<u32, _>(boom())).ok(), Some(1), "nobody refused it");
    });
}

#[test]
fn an_idle_value_has_no_grace() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>()
        .time_to_idle(secs(5))
        .time_to_live(secs(20))
        .stale_if_error(secs(100))
        .clock(clock.clone())
        .build();
    (1..=2).for_each(|key| cache.insert(key, key));
    for at in [4, 8, 12, 16, 19] {
        clock.set(secs(at));
        assert_eq!(cache.get(&1), Some(1));
    }
    assert_eq!(cache.try_get_with(&2, || Err::<u32, _>(boom())).unwrap_err().kind(), LoadErrorKind::Failed);
    // Being read does not lift the TTL.
    clock.set(secs(20));
    assert_eq!(cache.get(&1), None);
}

#[test]
fn for_ever_outlasts_the_clock() {
    // A manual clock stops after 584 years: what has no deadline is served even then, and survives a sweep.
    let clock = ManualClock::new();
    let without = plain::<u32, u32>().clock(clock.clone()).build();
    let with = plain::<u32, u32>().time_to_live(Duration::MAX).clock(clock.clone()).build();
    let soft = plain::<u32, u32>().soft_ttl(secs(1)).clock(clock.clone()).build();
    for cache in [&without, &with, &soft] {
        cache.insert(1, 1);
    }
    clock.advance(Duration::MAX);
    for cache in [&without, &with, &soft] {
        assert_eq!(cache.get(&1), Some(1));
        cache.run_pending_tasks();
        assert_eq!((cache.get(&1), cache.remove(&1)), (Some(1), Some(1)));
    }
}
