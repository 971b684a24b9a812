//! The hottest keys: which accesses count, what the estimate finds, and that they can be kept warm.
//!
//! ```text
//! cargo test --test hot_keys
//! ```
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "tests use real threads")]

mod common;

use common::{Gate, Hashing, Random, Sut, Tally, eventually, over_shapes, plain, secs};
use quell::{Answer, Cache, Clock, DefaultHashBuilder, Job, ManualClock, Provenance};
use std::collections::HashSet;
use std::fmt::Error;
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

/// Accesses of which about 160 are noted.
const MANY: u64 = 20_000;

fn many_times<R>(access: impl Fn() -> R) {
    for _ in 0..MANY {
        let _ = access();
    }
}

fn keys<K, S>(cache: &Cache<K, u64, S>, n: usize) -> Vec<K>
where
    K: std::hash::Hash + Eq + Clone + Send + Sync + 'static,
    S: std::hash::BuildHasher + Send + Sync + 'static,
{
    cache.hot_keys(n).into_iter().map(|hot| hot.key).collect()
}

fn filled(n: u64) -> Sut<u64, u64> {
    let cache = plain().build();
    (0..n).for_each(|key| cache.insert(key, key));
    assert!(cache.hot_keys(1).is_empty(), "nothing has been noted");
    cache
}

#[test]
fn the_hottest_are_found() {
    let cache = filled(1_005);
    let mut random = Random(1);
    // Each of the first five has 50 times the traffic of each other.
    for _ in 0..600_000 {
        let draw = random.below(1_250);
        cache.get(&if draw < 250 { draw % 5 } else { draw - 245 });
    }
    let hot = cache.hot_keys(5);
    let found: HashSet<u64> = hot.iter().map(|hot| hot.key).collect();
    assert_eq!(found, (0..5).collect(), "{hot:?}");
    assert!(hot.iter().all(|hot| (12_000..48_000).contains(&hot.hits)), "24,000 of each: {hot:?}");
    assert!(hot.is_sorted_by_key(|hot| std::cmp::Reverse(hot.hits)), "the hottest first");
    assert!((6..=1_005).contains(&cache.hot_keys(usize::MAX).len()));
}

#[test]
fn accesses_in_a_fixed_order_are_sampled_evenly() {
    let cache = filled(64);
    for n in 0..20_000 * 64 {
        cache.get(&(n % 64));
    }
    let hot = cache.hot_keys(usize::MAX);
    assert_eq!(hot.len(), 64);
    assert!(hot.iter().all(|hot| (10_000..40_000).contains(&hot.hits)), "20,000 of each: {hot:?}");
}

#[test]
fn traffic_that_changes_is_followed() {
    let cache = filled(10);
    for n in 0..100_000 {
        cache.get(&(n % 5));
    }
    assert!(keys(&cache, 5).iter().all(|key| *key < 5));
    for n in 0..400_000 {
        cache.get(&(5 + n % 5));
    }
    assert!(keys(&cache, 5).iter().all(|key| *key >= 5));
}

#[test]
fn what_has_left_the_cache_drops_out_and_comes_back_with_it() {
    let cache = filled(4);
    for n in 0..4 * MANY {
        cache.get(&(n % 4));
    }
    assert_eq!(keys(&cache, 9).len(), 4);
    cache.remove(&1);
    cache.invalidate(&2);
    assert_eq!(keys(&cache, 9).into_iter().collect::<HashSet<_>>(), HashSet::from([0, 3]));
    cache.insert(1, 1);
    assert_eq!(keys(&cache, 9).into_iter().collect::<HashSet<_>>(), HashSet::from([0, 1, 3]));
    cache.invalidate_all();
    assert!(cache.hot_keys(9).is_empty());
}

#[test]
fn what_the_source_does_not_have_is_none() {
    let cache = plain::<u64, u64>().negative_ttl(secs(1_000)).build();
    assert!(cache.hot_keys(1).is_empty());
    cache.insert(1, 1);
    many_times(|| cache.get(&1));
    cache.invalidate(&1);
    assert_eq!(cache.optionally_get_with(&1, || None), None);
    assert_eq!(cache.optionally_get_with(&1, || unreachable!("it is remembered")), None);
    assert!(cache.hot_keys(1).is_empty());
    cache.insert(1, 1);
    assert_eq!(keys(&cache, 1), [1]);
}

#[test]
fn one_that_is_loaded_anew_is_there_meanwhile() {
    let cache = Arc::new(plain::<u64, u64>().build());
    assert!(cache.hot_keys(1).is_empty());
    // Each of these loads; what they bring is gone at once.
    for _ in 0..MANY {
        cache.get_with(&1, || 1);
        cache.invalidate(&1);
    }
    assert!(cache.hot_keys(1).is_empty(), "it is not in the cache");
    let within = cache.clone();
    let hot = cache.get_with(&1, move || within.hot_keys(1).first().map_or(0, |hot| hot.hits));
    assert!((MANY / 2..2 * MANY).contains(&hot), "about {hot} misses that led to a load");
}

#[test]
fn each_way_to_access_a_key_counts() {
    type Access = fn(&Sut<u64, u64>);
    let ways: [(&str, Access, bool); 13] = [
        ("get", |cache| _ = cache.get(&1), true),
        ("read", |cache| _ = cache.read(&1, |v| *v), true),
        ("Pinned::get", |cache| _ = cache.pin().get(&1), true),
        ("get_with", |cache| _ = cache.get_with(&1, || 1), true),
        ("try_get_with", |cache| _ = cache.try_get_with(&1, || Ok::<_, Error>(1)), true),
        ("optionally_get_with", |cache| _ = cache.optionally_get_with(&1, || Some(1)), true),
        ("get_or_load", |cache| _ = cache.get_or_load(&1), true),
        ("ask.get", |cache| _ = cache.ask(&1).get(), true),
        ("ask.load", |cache| _ = cache.ask(&1).load(), true),
        ("peek", |cache| _ = cache.peek(&1), false),
        ("contains_key", |cache| _ = cache.contains_key(&1), false),
        ("a get that finds nothing", |cache| _ = cache.get(&2), false),
        ("an insert", |cache| cache.insert(1, 1), false),
    ];
    // Fresh, and stale.
    for age in [0, 5] {
        for (way, access, counts) in ways {
            let clock = ManualClock::new();
            // No refresh comes to anything.
            let cache = plain().soft_ttl(secs(1)).time_to_live(secs(9)).clock(clock.clone());
            let cache = cache.executor(|_: Job| Err(quell::Rejected));
            let cache = cache.loader(|_: &u64| Err::<u64, _>(Error)).build();
            cache.insert(1, 1);
            assert!(cache.hot_keys(1).is_empty());
            clock.advance(secs(age));
            many_times(|| access(&cache));
            cache.insert(2, 2);
            let hits = cache.hot_keys(2).first().map_or(0, |hot| hot.hits);
            let wanted = if counts { MANY / 2..2 * MANY } else { 0..1 };
            assert!(wanted.contains(&hits), "{way}, at an age of {age} s: {hits}");
        }
    }
}

#[test]
fn threads_that_began_before_are_sampled_and_those_that_begin_after() {
    let (cache, barrier) = (&filled_but_unasked(2), &Barrier::new(2));
    thread::scope(|s| {
        s.spawn(move || {
            many_times(|| cache.get(&0));
            barrier.wait();
            barrier.wait();
            many_times(|| cache.get(&0));
        });
        barrier.wait();
        assert!(cache.hot_keys(9).is_empty(), "what was before is not known");
        barrier.wait();
        s.spawn(move || many_times(|| cache.get(&1)));
    });
    let hot = cache.hot_keys(9);
    assert_eq!(hot.len(), 2);
    assert!(hot.iter().all(|hot| (MANY / 2..2 * MANY).contains(&hot.hits)), "{hot:?}");
}

fn filled_but_unasked(n: u64) -> Sut<u64, u64> {
    let cache = plain().build();
    (0..n).for_each(|key| cache.insert(key, key));
    cache
}

#[test]
fn whatever_the_shape() {
    over_shapes(|builder| {
        let cache = builder.build();
        (0..3_u64).for_each(|key| cache.insert(key, key));
        assert!(cache.hot_keys(1).is_empty());
        many_times(|| cache.get(&2));
        // With one hash for all, one of the keys stands for it.
        assert_eq!(cache.hot_keys(9).len(), 1);
    });
    let cache = Cache::<String, u64>::builder().hasher(Hashing::Spread(DefaultHashBuilder::new())).build();
    cache.insert("a".into(), 1);
    assert!(cache.hot_keys(1).is_empty());
    many_times(|| cache.get("a"));
    assert_eq!(keys(&cache, 1), ["a"]);
    assert!(keys(&cache, 0).is_empty());
}

#[test]
fn the_hottest_are_kept_warm_and_the_others_are_not() {
    let (clock, loads) = (ManualClock::new(), Arc::new([(); 105].map(|()| Tally::default())));
    let cache = plain::<u64, u64>().soft_ttl(secs(10)).time_to_live(secs(20)).clock(clock.clone());
    let cache = cache.executor(|job: Job| {
        job.run();
        Ok(())
    });
    let cache = {
        let loads = loads.clone();
        cache.loader(move |key: &u64| Ok::<_, Error>(loads[*key as usize].add() as u64)).build()
    };
    assert!(cache.hot_keys(1).is_empty());
    for n in 0..300_000 {
        let key = if n % 2 == 0 { n / 2 % 5 } else { 5 + n / 2 % 100 };
        cache.get_or_load(&key).unwrap();
    }
    assert!(loads.iter().all(|loads| loads.get() == 1));
    let kept = cache.keep_hottest_warm(5, secs(2));
    // Fresh for eight to ten seconds, and refreshed within three of that.
    let refreshed = |key| match cache.ask(&key).max_stale(secs(0)).get() {
        Ok(Answer { provenance: Provenance::Fresh { age }, .. }) => age < secs(7),
        _ => false,
    };
    for _ in 0..30 {
        clock.advance(secs(2));
        eventually(|| (0..5).all(refreshed));
    }
    assert!((0..5).all(|key| loads[key].get() >= 6), "each for a minute, and each for nine seconds at most");
    assert!(loads[5..].iter().all(|loads| loads.get() == 1), "the others were left alone");
    assert_eq!((0..105).filter(|key| cache.contains_key(key)).count(), 5, "and have expired");
    drop(kept);
}

/// Stands still, and stops the cache's own threads at a gate.
struct Stopping(Gate);

impl Clock for Stopping {
    fn now(&self) -> Duration {
        if thread::current().name().is_some_and(|name| name.starts_with("quell")) {
            self.0.pass();
        }
        Duration::ZERO
    }
}

#[test]
fn what_is_hot_is_noted_as_soon_as_it_is_to_be_kept_warm() {
    let gate = Gate::default();
    let cache = plain::<u64, u64>().soft_ttl(secs(10)).clock(Stopping(gate.clone()));
    let cache = cache.loader(|_: &u64| Ok::<_, Error>(1)).build();
    cache.insert(1, 1);
    let kept = cache.keep_hottest_warm(1, secs(1));
    // Its thread has not come to anything yet.
    many_times(|| cache.get(&1));
    assert_eq!(keys(&cache, 1), [1]);
    gate.open();
    drop(kept);
}

#[test]
fn the_keeping_of_the_hottest_ends_with_the_cache_and_needs_a_loader() {
    let (clock, witness, (told, loads)) = (ManualClock::new(), Arc::new(()), channel());
    let cache = {
        let witness = witness.clone();
        plain::<u64, u64>().soft_ttl(secs(10)).clock(clock.clone()).loader(move |_: &u64| {
            let _ = (told.send(()), &witness);
            Ok::<_, Error>(1)
        })
    };
    let cache = cache.build();
    let kept = cache.keep_hottest_warm(1, secs(1));
    // It has been noting since then.
    many_times(|| cache.get_or_load(&1));
    assert_eq!(keys(&cache, 1), [1]);
    let loaded = || loads.recv_timeout(secs(30));
    loaded().unwrap();
    clock.advance(secs(9));
    loaded().expect("it is refreshed, in a round of its own");
    drop(cache);
    eventually(|| Arc::strong_count(&witness) == 1);
    drop(kept);

    let cache = filled_but_unasked(2);
    let kept = cache.keep_hottest_warm(1, secs(1));
    many_times(|| cache.get(&1));
    assert!(cache.hot_keys(1).is_empty(), "nothing is noted where nothing can be refreshed");
    drop(kept);
}
