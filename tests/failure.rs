//! What is remembered of loads that gave no value: failures, for the back-off, and absences.
//!
//! ```text
//! cargo test --test failure
//! ```
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "tests use real threads")]

mod common;

use common::{Tally, ms, over_shapes, plain, secs};
use quell::{Backoff, Cache, LoadError, LoadErrorKind, Loaded, ManualClock, Op, Outcome, Provenance};
use std::fmt::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn kind<T: std::fmt::Debug>(result: Result<T, LoadError>) -> LoadErrorKind {
    result.unwrap_err().kind()
}

#[test]
fn failures_are_tried_after_longer_and_longer_pauses() {
    over_shapes(|builder: common::Builder<u32, u32>| {
        let clock = ManualClock::new();
        let backoff = Backoff::exponential(ms(100), ms(700)).jitter(0.0);
        let cache = builder.error_backoff(backoff).clock(clock.clone()).build();
        let loads = Tally::default();
        let call = || {
            cache.try_get_with(&1, || {
                loads.add();
                Err::<u32, _>(Error)
            })
        };
        let mut at = vec![];
        for tick in 0..40_u64 {
            let before = loads.get();
            let got = kind(call());
            if loads.get() > before {
                assert_eq!(got, LoadErrorKind::Failed);
                at.push(tick * 100);
            } else {
                assert_eq!(got, LoadErrorKind::BackingOff);
            }
            clock.advance(ms(100));
        }
        assert_eq!(at, [0, 100, 300, 700, 1_400, 2_100, 2_800, 3_500]);
        let error = call().unwrap_err();
        assert!(error.downcast_ref::<Error>().is_some(), "the cause is told: {error}");
    });
}

#[test]
fn jitter_only_shortens_a_pause() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>()
        .error_backoff(Backoff::exponential(secs(10), secs(10)))
        .clock(clock.clone())
        .build();
    let fails = |k: &u32| cache.try_get_with(k, || Err::<u32, _>(Error));
    for k in 0..200 {
        assert_eq!(kind(fails(&k)), LoadErrorKind::Failed);
    }
    clock.advance(ms(4_999));
    assert!((0..200).all(|k| kind(fails(&k)) == LoadErrorKind::BackingOff), "half of a pause is certain");
    clock.advance(ms(2_501));
    let over =
        (0..200).filter(|k| kind(cache.try_get_with(k, || Err::<u32, _>(Error))) == LoadErrorKind::Failed);
    let over = over.count();
    assert!(
        (50..150).contains(&over),
        "half of the pauses are over at three quarters, and {over} of 200 were"
    );
    clock.advance(secs(10));
    assert!(
        (0..200).all(|k| kind(fails(&k)) == LoadErrorKind::Failed),
        "none is longer than it was asked to be"
    );
}

#[test]
fn any_success_ends_a_back_off() {
    let ends: [fn(&common::Sut<u32, u32>); 4] = [
        |c| c.insert(1, 5),
        |c| assert_eq!(c.get_with(&1, || 5), 5),
        |c| assert_eq!(c.compute(&1, |_| Op::Put(5)), Outcome::Inserted(5)),
        |c| c.invalidate(&1),
    ];
    for end in ends {
        let clock = ManualClock::new();
        let backoff = Backoff::exponential(secs(10), secs(100)).jitter(0.0);
        let cache = plain::<u32, u32>().error_backoff(backoff).clock(clock.clone()).build();
        let fails = || cache.try_get_with(&1, || Err::<u32, _>(Error));
        assert_eq!([kind(fails()), kind(fails())], [LoadErrorKind::Failed, LoadErrorKind::BackingOff]);
        end(&cache);
        cache.invalidate(&1);
        assert_eq!(kind(fails()), LoadErrorKind::Failed, "it may be tried at once");
        clock.advance(secs(10));
        assert_eq!(kind(fails()), LoadErrorKind::Failed, "and the next pause is the first again");
    }
}

#[test]
fn a_stale_value_is_served_while_refreshes_back_off() {
    let clock = ManualClock::new();
    let broken = Arc::new(AtomicBool::new(true));
    let loads = Tally::default();
    let cache = {
        let (broken, loads) = (broken.clone(), loads.clone());
        plain::<u32, u32>()
            .soft_ttl(secs(1))
            .time_to_live(secs(1_000))
            .error_backoff(Backoff::constant(secs(10)))
            .clock(clock.clone())
            .executor(|job: quell::Job| {
                job.run();
                Ok(())
            })
            .loader(move |_: &u32| {
                loads.add();
                if broken.load(Ordering::Relaxed) { Err(Error) } else { Ok(2) }
            })
            .build()
    };
    cache.insert(1, 1);
    for _ in 0..60 {
        clock.advance(secs(1));
        assert_eq!(cache.get_or_load(&1).unwrap(), 1);
    }
    assert_eq!(loads.get(), 6, "one in ten seconds");
    broken.store(false, Ordering::Relaxed);
    clock.advance(secs(10));
    assert_eq!(cache.get_or_load(&1).unwrap(), 1);
    assert_eq!(cache.get_or_load(&1).unwrap(), 2, "a refresh that works is what counts");
}

#[test]
fn grace_and_fallback_come_before_the_back_offs_error() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>()
        .time_to_live(secs(1))
        .stale_if_error(secs(100))
        .error_backoff(Backoff::constant(secs(1_000)))
        .fallback(|k| (*k == 2).then_some(99))
        .clock(clock.clone())
        .build();
    cache.insert(1, 1);
    clock.advance(secs(2));
    for _ in 0..2 {
        let answer = cache.ask(&1).try_load_with(|| Err::<u32, _>(Error)).unwrap();
        assert!(matches!((answer.value, answer.provenance), (1, Provenance::Grace { .. })));
        let answer = cache.ask(&2).try_load_with(|| Err::<u32, _>(Error)).unwrap();
        assert_eq!((answer.value, answer.provenance), (99, Provenance::Fallback));
        assert!(cache.ask(&3).try_load_with(|| Err::<u32, _>(Error)).is_err());
    }
    assert_eq!(cache.stats().loads, 3);
}

#[test]
fn an_absence_is_remembered_for_its_time() {
    over_shapes(|builder: common::Builder<u32, u32>| {
        let clock = ManualClock::new();
        let loads = Tally::default();
        let cache = {
            let loads = loads.clone();
            builder.negative_ttl(secs(10)).clock(clock.clone()).loader(AbsentAlways(loads)).build()
        };
        for _ in 0..5 {
            assert_eq!(kind(cache.get_or_load(&1)), LoadErrorKind::Absent);
            assert_eq!(kind(cache.ask(&1).load()), LoadErrorKind::Absent);
            assert_eq!(kind(cache.ask(&1).get()), LoadErrorKind::Absent);
            assert_eq!(cache.optionally_get_with(&1, || unreachable!("it is known to be absent")), None);
        }
        assert_eq!((loads.get(), cache.stats().negative_hits), (1, 19));
        assert_eq!((cache.len(), cache.contains_key(&1), cache.iter().count()), (0, false, 0));
        clock.advance(secs(10));
        assert_eq!(kind(cache.get_or_load(&1)), LoadErrorKind::Absent);
        assert_eq!(loads.get(), 2);
        // To calls that must have a value it is a miss, and no failure.
        assert_eq!(kind(cache.get_or_load(&2)), LoadErrorKind::Absent);
        assert_eq!(cache.try_get_with(&2, || Ok::<_, Error>(6)).unwrap(), 6);
        assert_eq!(cache.get_with(&1, || 5), 5);
        assert_eq!(cache.get_or_load(&1).unwrap(), 5);
    });
}

struct AbsentAlways(Tally);

impl quell::Loader<u32, u32> for AbsentAlways {
    fn load(&self, _: &u32, _: &quell::LoadContext<u32>) -> Result<Loaded<u32>, quell::BoxError> {
        self.0.add();
        Ok(Loaded::absent())
    }
}

#[test]
fn a_write_ends_an_absence() {
    let cache = plain::<u32, u32>().negative_ttl(secs(1_000)).build();
    assert_eq!(cache.optionally_get_with(&1, || None), None);
    cache.invalidate(&1);
    assert_eq!(cache.optionally_get_with(&1, || Some(1)), Some(1));
    assert_eq!(cache.ask(&1).max_age(secs(0)).load_with(|| 2).unwrap().value, 2);
    cache.remove(&1);
    assert_eq!(cache.optionally_get_with(&1, || None), None);
    cache.insert(1, 3);
    assert_eq!(cache.optionally_get_with(&1, || None), Some(3));
}

#[test]
fn a_value_whose_key_is_absent_now_goes_and_the_listener_is_told() {
    let told = Tally::default();
    let clock = ManualClock::new();
    let cache = {
        let told = told.clone();
        Cache::builder()
            .negative_ttl(secs(1_000))
            .soft_ttl(secs(1))
            .time_to_live(secs(100))
            .eviction_listener(move |_: &u32, _: &u32, _| _ = told.add())
            .clock(clock.clone())
            .build()
    };
    cache.insert(1, 1);
    clock.advance(secs(2));
    assert_eq!(cache.optionally_get_with(&1, || None), None);
    assert_eq!((cache.get(&1), cache.len(), told.get()), (None, 0, 1));
}

#[test]
fn what_is_remembered_is_bounded_by_the_capacity() {
    let cache = plain::<u32, u32>()
        .max_capacity(100)
        .negative_ttl(secs(1_000))
        .error_backoff(Backoff::constant(secs(1_000)))
        .build();
    for k in 0..10_000 {
        assert_eq!(cache.optionally_get_with(&k, || None), None);
        drop(cache.try_get_with(&(k + 20_000), || Err::<u32, _>(Error)));
    }
    assert!(cache.weighted_size() <= 100, "{} are remembered", cache.weighted_size());
}

#[test]
fn a_back_off_that_makes_no_sense_is_refused() {
    let build = |backoff| Cache::<u32, u32>::builder().error_backoff(backoff).try_build();
    for backoff in [
        Backoff::exponential(secs(2), secs(1)),
        Backoff::constant(secs(1)).jitter(1.5),
        Backoff::constant(secs(1)).jitter(f64::NAN),
    ] {
        let text = build(backoff).unwrap_err().to_string();
        assert!(text.contains("error_backoff"), "{text}");
    }
}

#[test]
fn a_remembered_absence_is_no_failure_of_a_call_for_many() {
    let cache = plain::<u32, u32>().negative_ttl(secs(1_000)).build();
    let known = |keys: &[u32]| {
        let known = keys.iter().filter(|k| **k != 2).map(|k| (*k, 1));
        Ok::<_, Error>(known.collect::<Vec<_>>())
    };
    assert_eq!(cache.load_many([1, 2], known).unwrap().len(), 1);
    let found = cache.load_many([1, 2, 3], |keys| {
        assert_eq!(keys, [3], "it is known to be absent");
        known(keys)
    });
    let mut found: Vec<u32> = found.unwrap().into_keys().collect();
    found.sort_unstable();
    assert_eq!((found, cache.stats().negative_hits), (vec![1, 3], 1));
    let none = smol::block_on(cache.load_many_async([2], |_| async { Ok::<[(u32, u32); 0], Error>([]) }));
    assert!(none.unwrap().is_empty());
}

#[test]
fn what_is_remembered_goes_when_its_time_is_over() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>()
        .negative_ttl(secs(10))
        .error_backoff(Backoff::constant(secs(10)))
        .clock(clock.clone())
        .build();
    for k in 0..1_000 {
        assert_eq!(cache.optionally_get_with(&k, || None), None);
        drop(cache.try_get_with(&(k + 2_000), || Err::<u32, _>(Error)));
    }
    assert_eq!((cache.len(), cache.weighted_size()), (0, 2_000));
    clock.advance(secs(20));
    // Nothing in this cache ends but what is remembered, and nobody asks for that again.
    (5_000..8_000).for_each(|k| cache.insert(k, 1));
    assert!(cache.weighted_size() < 3_100, "{} is left", cache.weighted_size() - 3_000);
}

#[test]
fn old_failures_are_forgotten() {
    let clock = ManualClock::new();
    let backoff = Backoff::exponential(secs(1), secs(8)).jitter(0.0);
    let cache = plain::<u32, u32>().soft_ttl(secs(1)).error_backoff(backoff).clock(clock.clone()).build();
    cache.insert(1, 1);
    clock.advance(secs(2));
    let loads = Tally::default();
    let call = || {
        let fails = || {
            loads.add();
            Err::<u32, _>(Error)
        };
        assert_eq!(cache.try_get_with(&1, fails).unwrap(), 1);
        loads.get()
    };
    assert_eq!(call(), 1);
    clock.advance(secs(1));
    assert_eq!(call(), 2);
    clock.advance(secs(2));
    assert_eq!(call(), 3, "twice as long");
    // The pause of four seconds, and as long as the longest one without a load.
    clock.advance(secs(4 + 8));
    assert_eq!(call(), 4);
    clock.advance(secs(1));
    assert_eq!(call(), 5, "the first failure again");
}
