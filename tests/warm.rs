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
