//! Warming, and keeping warm.
//!
//! ```text
//! cargo test --test warm
//! ```
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "tests use real threads")]

mod common;

use common::{Gate, Sut, Tally, eventually, ms, plain, secs, until_waiting};
use quell::{
    Answer, BoxError, Cache, LoadContext, LoadErrorKind, Loaded, Loader, ManualClock, Provenance,
    WarmOptions, WarmOutcome,
};
use std::fmt::Error;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Multiples of seven are absent, those of eleven fail, 13 panics.
struct Picky {
    loads: Tally,
    now: AtomicUsize,
    most: Arc<AtomicUsize>,
}

impl Loader<u32, u32> for Picky {
    fn load(&self, key: &u32, _: &LoadContext<u32>) -> Result<Loaded<u32>, BoxError> {
        self.loads.add();
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        thread::yield_now();
        self.now.fetch_sub(1, Ordering::SeqCst);
        match key {
            13 => panic!("a loader that panics"),
            k if k % 7 == 0 => Ok(Loaded::absent()),
            k if k % 11 == 0 => Err(Box::new(Error)),
            k => Ok(Loaded::new(k + 100)),
        }
    }
}

fn picky() -> (Sut<u32, u32>, Tally, Arc<AtomicUsize>) {
    let (loads, most) = (Tally::default(), Arc::new(AtomicUsize::new(0)));
    let loader = Picky { loads: loads.clone(), now: AtomicUsize::new(0), most: most.clone() };
    (plain().loader(loader).build(), loads, most)
}

#[test]
fn each_key_has_its_outcome() {
    let (cache, loads, most) = picky();
    cache.insert(1, 5);
    let told = Tally::default();
    let options = {
        let told = told.clone();
        WarmOptions::new().concurrency(3).progress(move |progress| {
            told.add();
            assert!(progress.total == 40 && (1..=40).contains(&progress.done));
            ControlFlow::Continue(())
        })
    };
    let report = common::quietly(|| cache.warm((0..40).chain([3, 3]), options)).unwrap();
    assert_eq!((report.outcomes.len(), told.get(), loads.get()), (40, 40, 39));
    for (key, outcome) in &report.outcomes {
        match outcome {
            WarmOutcome::Fresh => assert_eq!(*key, 1),
            WarmOutcome::Absent => assert_eq!(key % 7, 0),
            WarmOutcome::Failed(error) if *key == 13 => assert_eq!(error.kind(), LoadErrorKind::Panicked),
            WarmOutcome::Failed(error) => assert!(key % 11 == 0 && error.downcast_ref::<Error>().is_some()),
            WarmOutcome::Loaded => assert_eq!(cache.get(key), Some(key + 100)),
            other => panic!("{key}: {other:?}"),
        }
    }
    assert_eq!((report.failed().count(), report.was_aborted()), (4, false));
    assert!(most.load(Ordering::SeqCst) <= 3, "at most three at once");
    assert!(cache.in_flight().is_empty());
}

#[test]
fn it_can_be_ended_and_tells_what_was_skipped() {
    let (cache, loads, _) = picky();
    let options = WarmOptions::new().concurrency(1).progress(|progress| {
        if progress.done == 5 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let report = cache.warm((1..1_000).filter(|k| k % 7 != 0 && k % 11 != 0 && *k != 13), options);
    assert!(report.was_aborted());
    assert_eq!((report.loaded(), loads.get()), (5, 5));
}

#[test]
fn what_is_stale_is_loaded_and_what_is_fresh_is_not() {
    let clock = ManualClock::new();
    let loads = Tally::default();
    let cache = {
        let loads = loads.clone();
        plain::<u32, u32>().soft_ttl(secs(10)).time_to_live(secs(100)).clock(clock.clone()).loader(
            move |_: &u32| {
                loads.add();
                Ok::<_, Error>(2)
            },
        )
    };
    let cache = cache.build();
    cache.insert(1, 1);
    clock.advance(secs(10));
    cache.insert(2, 1);
    assert_eq!(cache.warm([1, 2], WarmOptions::new()).loaded(), 1);
    assert_eq!((cache.get(&1), cache.get(&2), loads.get()), (Some(2), Some(1), 1));
}

#[test]
fn warmed_keys_do_not_expire_together() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>().time_to_live(secs(1_000)).clock(clock.clone());
    let cache = cache.loader(|k: &u32| Ok::<_, Error>(*k)).build();
    cache.warm(0..1_000, WarmOptions::new().spread(0.5));
    let left = |cache: &Sut<u32, u32>| (0..1_000).filter(|k| cache.peek(k).is_some()).count();
    clock.advance(secs(500));
    assert_eq!(left(&cache), 1_000, "half of the TTL is certain");
    clock.advance(secs(250));
    let half = left(&cache);
    assert!((400..600).contains(&half), "half of them at three quarters, and {half} are left");
    clock.advance(secs(250));
    assert_eq!(left(&cache), 0, "the TTL stays an upper bound");
}

#[test]
fn others_join_its_loads_and_it_joins_theirs() {
    let (gate, loads) = (Gate::default(), Tally::default());
    let cache = {
        let (gate, loads) = (gate.clone(), loads.clone());
        plain::<u32, u32>().loader(move |k: &u32| {
            loads.add();
            gate.pass();
            Ok::<_, Error>(*k)
        })
    };
    let cache = &cache.build();
    thread::scope(|s| {
        let first = s.spawn(|| cache.get_or_load(&1).unwrap());
        eventually(|| gate.arrived() == 1);
        let warm = s.spawn(|| cache.warm([1, 2], WarmOptions::new().concurrency(2)));
        eventually(|| gate.arrived() == 2);
        let last = s.spawn(|| cache.get_with(&2, || unreachable!("it is being warmed")));
        until_waiting(cache, 2);
        gate.open();
        assert_eq!((first.join().unwrap(), last.join().unwrap()), (1, 2));
        let report = warm.join().unwrap();
        assert!(matches!(report.outcomes[&1], WarmOutcome::Joined));
        assert!(matches!(report.outcomes[&2], WarmOutcome::Loaded));
    });
    assert_eq!(loads.get(), 2);
}

#[test]
fn without_a_loader_it_says_so() {
    let cache = Cache::<u32, u32>::builder().build();
    let report = cache.warm([1], WarmOptions::default());
    let (_, error) = report.failed().next().unwrap();
    assert_eq!(error.kind(), LoadErrorKind::NotCached);
    assert!(error.to_string().contains("loader"), "{error}");
    assert!(cache.warm(std::iter::empty::<u32>(), WarmOptions::new()).outcomes.is_empty());
}

/// A cache whose refreshes run at once, and tell their keys.
fn kept() -> (Arc<Sut<u32, u64>>, ManualClock, Tally) {
    let (clock, loads) = (ManualClock::new(), Tally::default());
    let cache = plain::<u32, u64>().soft_ttl(secs(10)).time_to_live(secs(20)).clock(clock.clone()).executor(
        |job: quell::Job| {
            job.run();
            Ok(())
        },
    );
    let cache = {
        let loads = loads.clone();
        cache.loader(move |_: &u32| Ok::<_, Error>(loads.add() as u64)).build()
    };
    (Arc::new(cache), clock, loads)
}

#[test]
fn kept_keys_never_go_stale_and_their_loads_are_paced() {
    let (cache, clock, loads) = kept();
    let kept = cache.keep_warm(0..10, secs(2));
    // In the first round each key is loaded, one every 200 ms.
    for nth in 1..=10 {
        eventually(|| loads.get() >= nth);
        assert_eq!(loads.get(), nth);
        clock.advance(ms(200));
    }
    // Fresh for eight to ten seconds, and refreshed within three of that.
    let refreshed = |key| match cache.ask(&key).max_stale(secs(0)).get() {
        Ok(Answer { provenance: Provenance::Fresh { age }, .. }) => age < secs(7),
        _ => false,
    };
    for _ in 0..30 {
        let before = loads.get();
        clock.advance(secs(2));
        eventually(|| (0..10).all(refreshed));
        assert!(loads.get() <= before + 10, "each key once");
    }
    assert!(loads.get() >= 60, "ten keys for a minute, each for at most nine seconds: {}", loads.get());
    drop(kept);
    clock.advance(secs(1));
    let ended = loads.get();
    clock.advance(secs(30));
    clock.advance(secs(30));
    assert!(loads.get() <= ended + 1, "nothing but what was under way");
}

#[test]
fn the_keeping_ends_with_the_cache_and_needs_a_loader() {
    let (cache, clock, loads) = kept();
    let kept = cache.keep_warm([1], secs(1));
    eventually(|| loads.get() == 1);
    drop(cache);
    clock.advance(secs(100));
    drop(kept);
    assert!(loads.get() <= 2);
    let cache = plain::<u32, u32>().build();
    drop(cache.keep_warm([1, 2], secs(1)));
    drop(cache.keep_warm(std::iter::empty::<u32>(), secs(0)));
    assert_eq!(cache.len(), 0);
}

#[test]
fn what_has_been_idle_for_too_long_is_not_warm() {
    let (clock, loads) = (ManualClock::new(), Tally::default());
    let cache = {
        let loads = loads.clone();
        plain::<u32, u32>()
            .time_to_idle(secs(60))
            .clock(clock.clone())
            .executor(|job: quell::Job| {
                job.run();
                Ok(())
            })
            .loader(move |_: &u32| {
                loads.add();
                Ok::<_, Error>(1)
            })
            .build()
    };
    let kept = cache.keep_warm([1], secs(10));
    eventually(|| loads.get() == 1);
    for _ in 0..20 {
        clock.advance(secs(10));
        let seen = || cache.peek(&1).is_some();
        eventually(seen);
    }
    assert!(loads.get() >= 4, "nobody uses it, so it is loaded once a minute: {}", loads.get());
    drop(kept);
}

#[test]
fn a_clock_that_panics_now_and_then_does_not_end_the_keeping() {
    /// Real time, and a panic each time it is told to.
    struct Fitful(Arc<AtomicUsize>, std::time::Instant);
    impl quell::Clock for Fitful {
        fn now(&self) -> std::time::Duration {
            let of_the_keeper = thread::current().name() == Some("quell-warm");
            // Every other reading of the thread that keeps warm.
            assert!(
                !of_the_keeper || self.0.fetch_add(1, Ordering::SeqCst).is_multiple_of(2),
                "a clock that panics"
            );
            self.1.elapsed()
        }
    }
    let loads = Tally::default();
    let readings = Arc::new(AtomicUsize::new(0));
    let cache = {
        let loads = loads.clone();
        plain::<u32, u32>()
            .soft_ttl(ms(1))
            .clock(Fitful(readings.clone(), std::time::Instant::now()))
            .executor(|job: quell::Job| {
                drop(job);
                Ok(())
            })
            .loader(move |_: &u32| {
                loads.add();
                Ok::<_, Error>(1)
            })
            .build()
    };
    let kept = cache.keep_warm([1], ms(200));
    eventually(|| readings.load(Ordering::SeqCst) >= 5);
    drop(kept);
}

#[test]
fn a_loader_that_warms_its_own_key_is_told_of_the_cycle() {
    /// Loads by warming what it loads, and others.
    struct Warms(Arc<std::sync::OnceLock<Sut<u32, u32>>>, Tally);
    impl Loader<u32, u32> for Warms {
        fn load(&self, key: &u32, _: &LoadContext<u32>) -> Result<Loaded<u32>, BoxError> {
            if *key == 0 {
                let report = self.0.get().unwrap().warm(0..8, WarmOptions::new().concurrency(8));
                assert_eq!(report.loaded(), 7);
                let (key, error) = report.failed().next().unwrap();
                assert_eq!((*key, error.kind()), (0, LoadErrorKind::Cycle));
                self.1.add();
            }
            Ok(Loaded::new(*key))
        }
    }
    let (itself, told) = (Arc::new(std::sync::OnceLock::new()), Tally::default());
    let cache = plain().loader(Warms(itself.clone(), told.clone())).build();
    assert!(itself.set(cache.clone()).is_ok());
    for round in 1..=20 {
        cache.invalidate_all();
        assert_eq!(cache.get_or_load(&0).unwrap(), 0);
        assert_eq!(told.get(), round);
    }
}

#[cfg(debug_assertions)]
#[test]
fn warming_under_a_pin_is_refused() {
    let (cache, loads, _) = picky();
    let pinned = cache.pin();
    let text = common::panic_of(|| cache.warm([1, 2], WarmOptions::new()).loaded());
    assert!(text.contains("Pinned"), "{text}");
    drop(pinned);
    assert_eq!(loads.get(), 0);
}
