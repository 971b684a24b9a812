//! Warming, as a future.
//!
//! ```text
//! cargo test --test warm_async
//! ```
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "tests use real threads")]

mod common;

use common::task::{Hand, block_on, yield_now};
use common::tasks::Door;
use common::{Builder, Sut, Tally, eventually, plain, quietly, secs, until_waiting};
use quell::{
    AsyncLoader, BoxError, Cache, LoadContext, LoadErrorKind, Loaded, Loader, ManualClock, WarmOptions,
    WarmOutcome,
};
use std::fmt::Error;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Multiples of seven are absent, those of eleven fail, 13 panics.
#[derive(Clone, Default)]
struct Picky {
    loads: Tally,
    now: Tally,
    most: Arc<AtomicUsize>,
    /// Loads that were dropped before their end.
    dropped: Tally,
}

/// A load that is under way.
struct Running<'a>(&'a Picky, bool);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.now.sub();
        if !self.1 && !thread::panicking() {
            self.0.dropped.add();
        }
    }
}

impl Picky {
    fn begin(&self) -> Running<'_> {
        self.loads.add();
        self.most.fetch_max(self.now.add() + 1, Ordering::SeqCst);
        Running(self, false)
    }

    fn end(mut running: Running<'_>, key: u32) -> Result<Loaded<u32>, BoxError> {
        running.1 = true;
        match key {
            13 => panic!("a loader that panics"),
            k if k % 7 == 0 => Ok(Loaded::absent()),
            k if k % 11 == 0 => Err(Box::new(Error)),
            k => Ok(Loaded::new(k + 100)),
        }
    }
}

impl Loader<u32, u32> for Picky {
    fn load(&self, key: &u32, _: &LoadContext<u32>) -> Result<Loaded<u32>, BoxError> {
        let running = self.begin();
        thread::yield_now();
        Self::end(running, *key)
    }
}

impl AsyncLoader<u32, u32> for Picky {
    async fn load(&self, key: &u32, _: &LoadContext<u32>) -> Result<Loaded<u32>, BoxError> {
        let running = self.begin();
        yield_now().await;
        yield_now().await;
        Self::end(running, *key)
    }
}

/// Keys that Picky loads.
fn easy(keys: std::ops::Range<u32>) -> impl Iterator<Item = u32> + Clone {
    keys.filter(|k| k % 7 != 0 && k % 11 != 0 && *k != 13)
}

/// A cache whose loads stop at a door.
fn with_door() -> (Sut<u32, u32>, Door, Tally) {
    let (door, loads) = (Door::default(), Tally::default());
    let cache = {
        let (door, loads) = (door.clone(), loads.clone());
        plain::<u32, u32>().async_loader(move |k: u32| {
            let (door, loads) = (door.clone(), loads.clone());
            async move {
                loads.add();
                door.pass().await;
                Ok::<_, Error>(k)
            }
        })
    };
    (cache.build(), door, loads)
}

/// A cache with a loader of each kind.
fn over_kinds(body: impl Fn(&str, Builder<u32, u32>, &Picky)) {
    let picky = Picky::default();
    body("an async loader", plain().async_loader(picky.clone()), &picky);
    let picky = Picky::default();
    body("a blocking loader", plain().loader(picky.clone()), &picky);
}

#[test]
fn each_key_has_its_outcome() {
    over_kinds(|kind, builder, picky| {
        let cache = builder.build();
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
        let report = quietly(|| block_on(cache.warm_async((0..40).chain([3, 3]), options))).unwrap();
        assert_eq!((report.outcomes.len(), told.get(), picky.loads.get()), (40, 40, 39), "{kind}");
        for (key, outcome) in &report.outcomes {
            match outcome {
                WarmOutcome::Fresh => assert_eq!(*key, 1),
                WarmOutcome::Absent => assert_eq!(key % 7, 0),
                WarmOutcome::Failed(error) if *key == 13 => {
                    assert_eq!(error.kind(), LoadErrorKind::Panicked, "{kind}");
                }
                WarmOutcome::Failed(error) => {
                    assert!(key % 11 == 0 && error.downcast_ref::<Error>().is_some());
                }
                WarmOutcome::Loaded => assert_eq!(cache.get(key), Some(key + 100)),
                other => panic!("{kind}, {key}: {other:?}"),
            }
        }
        assert_eq!((report.failed().count(), report.was_aborted()), (4, false));
        let most = picky.most.load(Ordering::SeqCst);
        assert!(
            (2..=3).contains(&most) || kind == "a blocking loader" && most == 1,
            "{kind}: {most} at once"
        );
        assert!(cache.in_flight().is_empty());
    });
}

#[test]
fn it_can_be_ended_and_tells_what_was_skipped() {
    over_kinds(|kind, builder, picky| {
        let cache = builder.build();
        let options = WarmOptions::new().concurrency(1).progress(|progress| {
            if progress.done == 5 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        let report = block_on(cache.warm_async(easy(1..1_000), options));
        assert!(report.was_aborted());
        assert_eq!((report.loaded(), picky.loads.get()), (5, 5), "{kind}");
        let panics = WarmOptions::new().concurrency(1).progress(|_| panic!("it ends the call"));
        let report = quietly(|| block_on(cache.warm_async(easy(1_000..2_000), panics))).unwrap();
        assert_eq!((report.loaded(), report.was_aborted(), picky.loads.get()), (1, true, 6), "{kind}");
    });
}

#[test]
fn no_more_loads_run_at_one_time_than_it_was_told() {
    let (cache, door, loads) = with_door();
    let mut warm = Hand::new(cache.warm_async(0..10, WarmOptions::new().concurrency(3)));
    for _ in 0..5 {
        assert!(warm.poll().is_none());
        assert_eq!((loads.get(), cache.in_flight().len()), (3, 3), "all of them, and no more");
    }
    door.open();
    assert_eq!(warm.run().unwrap().loaded(), 10);
    // Zero is one, and a lane for no key is none.
    let mut warm = Hand::new(cache.warm_async(10..20, WarmOptions::new().concurrency(0)));
    assert_eq!(warm.run().unwrap().loaded(), 10);
    let none = std::iter::empty::<u32>();
    assert!(block_on(cache.warm_async(none, WarmOptions::new().concurrency(usize::MAX))).outcomes.is_empty());
}

#[test]
fn what_is_stale_is_loaded_and_its_deadlines_are_spread() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>().soft_ttl(secs(10)).time_to_live(secs(1_000)).clock(clock.clone());
    let cache = cache.async_loader(|_: u32| async { Ok::<_, Error>(2) }).build();
    cache.insert(1_000, 1);
    clock.advance(secs(10));
    cache.insert(1_001, 1);
    let report = block_on(cache.warm_async(0..1_002, WarmOptions::new().spread(0.5)));
    assert_eq!((report.loaded(), cache.get(&1_000), cache.get(&1_001)), (1_001, Some(2), Some(1)));
    let left = || (0..1_000).filter(|k| cache.peek(k).is_some()).count();
    clock.advance(secs(500));
    assert_eq!(left(), 1_000, "half of the TTL is certain");
    clock.advance(secs(250));
    assert!((400..600).contains(&left()), "half of them at three quarters, and {} are left", left());
}

#[test]
fn it_may_be_dropped_at_any_poll() {
    let (keys, lanes) = (6, 2);
    for polls in 1.. {
        let picky = Picky::default();
        let cache = plain::<u32, u32>().async_loader(picky.clone()).build();
        let all = easy(1..100).take(keys);
        let mut warm = Hand::new(cache.warm_async(all.clone(), WarmOptions::new().concurrency(lanes)));
        let mut report = None;
        for _ in 0..polls {
            report = warm.poll();
            assert!(report.is_some() || warm.is_woken(), "it goes on");
            if report.is_some() {
                break;
            }
        }
        drop(warm);
        let (begun, stored) = (picky.loads.get(), cache.len());
        assert!(cache.in_flight().is_empty(), "dropped after {polls} polls");
        assert_eq!((picky.now.get(), picky.dropped.get()), (0, begun - stored), "after {polls} polls");
        assert!(begun <= stored + lanes, "what it had not come to was not begun");
        // Nothing stands in the way of another.
        let again = block_on(cache.warm_async(all, WarmOptions::new()));
        assert_eq!((again.loaded(), cache.len()), (keys - stored, keys));
        if let Some(report) = report {
            assert_eq!((report.loaded(), stored), (keys, keys));
            assert!(polls > 6, "three loads for each lane, of three polls: {polls}");
            return;
        }
    }
}

#[test]
fn a_dropped_call_leaves_its_loads_to_those_who_have_joined() {
    let (cache, door, loads) = with_door();
    let mut warm = Hand::new(cache.warm_async([1, 2], WarmOptions::new().concurrency(2)));
    assert!(warm.poll().is_none());
    let mut joined = Hand::new(cache.get_or_load_async(&1));
    assert!(joined.poll().is_none());
    drop(warm);
    assert_eq!(cache.in_flight().into_iter().map(|load| load.key).collect::<Vec<_>>(), [1]);
    door.open();
    assert_eq!((joined.run().unwrap().unwrap(), loads.get()), (1, 2));
    assert!(cache.in_flight().is_empty() && !cache.contains_key(&2));
}

#[test]
fn others_join_its_loads_and_it_joins_theirs() {
    let (cache, door, loads) = with_door();
    let cache = &cache;
    let mut first = Hand::new(async { cache.get_or_load_async(&1).await.unwrap() });
    assert!(first.poll().is_none());
    let mut warm = Hand::new(cache.warm_async([1, 2], WarmOptions::new().concurrency(2)));
    assert!(warm.poll().is_none());
    let mut last = Hand::new(async { cache.get_or_load_async(&2).await.unwrap() });
    assert!(last.poll().is_none());
    thread::scope(|s| {
        // And a thread, which parks.
        let thread = s.spawn(|| cache.get_with(&2, || unreachable!("it is being warmed")));
        until_waiting(cache, 3);
        door.open();
        eventually(|| {
            warm.poll().is_some_and(|report| {
                assert!(matches!(report.outcomes[&1], WarmOutcome::Joined), "{report:?}");
                assert!(matches!(report.outcomes[&2], WarmOutcome::Loaded), "{report:?}");
                true
            })
        });
        assert_eq!((first.run(), last.run(), thread.join().unwrap()), (Some(1), Some(2), 2));
    });
    assert_eq!(loads.get(), 2);
}

#[test]
fn a_long_list_of_fresh_keys_lets_others_have_their_turn() {
    let picky = Picky::default();
    let cache = plain::<u32, u32>().async_loader(picky.clone()).build();
    (0..1_000).for_each(|key| cache.insert(key, key));
    let mut warm = Hand::new(cache.warm_async(0..1_000, WarmOptions::new()));
    let mut polls = 1;
    while warm.poll().is_none() {
        assert!(warm.is_woken(), "it goes on");
        polls += 1;
    }
    assert!((5..100).contains(&polls), "{polls} polls");
    assert_eq!(picky.loads.get(), 0);
}

#[test]
fn without_a_loader_it_says_so() {
    let cache = Cache::<u32, u32>::builder().build();
    let report = block_on(cache.warm_async([1], WarmOptions::default()));
    let (_, error) = report.failed().next().unwrap();
    assert_eq!(error.kind(), LoadErrorKind::NotCached);
    assert!(error.to_string().contains("loader"), "{error}");
}
