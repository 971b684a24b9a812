//! One test per setting of the builder, which has its name, and fails if the setting is ignored: `cargo test --test settings`.
//!
//! What `initial_capacity` does shows only in what is allocated: `tests/memory.rs`. More on `early_refresh` is in
//! `tests/early.rs`, on `error_backoff` and `negative_ttl` in `tests/failure.rs`, on the limits in `tests/limits.rs`, on
//! `breaker` in `tests/breaker.rs`, and on the loaders in `tests/loaders.rs`, `tests/batch.rs` and `tests/coalesce.rs`.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::tasks::{Kept, Task};
use common::{
    Builder, Gate, Queue, Tally, With, eventually, ms, over_shapes, panic_of, plain, secs, until_waiting,
};
use quell::{
    Backoff, Breaker, Cache, Clock, DefaultHashBuilder, DefaultHasher, EarlyRefresh, Job, LoadError,
    LoadErrorKind, Loaded, ManualClock, Provenance, Rejected, RemovalCause, Ttl,
};
use std::collections::HashMap;
use std::future::ready;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

type Error = std::io::Error;
const NANO: Duration = Duration::from_nanos(1);

fn boom() -> Error {
    Error::other("boom")
}

fn stage<S: BuildHasher + Send + Sync + 'static>(cache: &Cache<u32, u32, S>, key: u32) -> &'static str {
    match cache.ask(&key).get().map(|a| a.provenance) {
        Ok(Provenance::Fresh { .. }) => "fresh",
        Ok(Provenance::Stale { .. }) => "stale",
        Ok(other) => panic!("{other:?}"),
        Err(error) => {
            assert_eq!(error.kind(), LoadErrorKind::NotCached);
            "gone"
        }
    }
}

fn kind<V: std::fmt::Debug>(result: Result<V, LoadError>) -> LoadErrorKind {
    result.unwrap_err().kind()
}

/// The settings of the builder, and the docs of each.
fn settings() -> Vec<(&'static str, String)> {
    let source = include_str!("../src/config.rs");
    let begin = source.find("\nimpl<K, V, S> CacheBuilder<K, V, S> {").unwrap();
    let (mut settings, mut docs) = (Vec::new(), String::new());
    for line in source[begin + 1..].lines().take_while(|line| *line != "}").map(str::trim_start) {
        if let Some(doc) = line.strip_prefix("///") {
            docs += doc;
        } else if let Some(named) = line.strip_prefix("pub fn ") {
            let end = named.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap();
            settings.push((&named[..end], std::mem::take(&mut docs)));
        }
    }
    settings
}

#[test]
fn no_setting_is_forgotten() {
    let settings = settings();
    // As many as the builder has fields, the short forms of two, and another form of two.
    let fields = include_str!("../src/config.rs").split("pub struct CacheBuilder<").nth(1).unwrap();
    let fields = fields.split('}').next().unwrap().lines().filter(|line| line.ends_with(',')).count();
    assert_eq!(settings.len(), fields + 4, "{settings:?}");
    let tests = [include_str!("settings.rs"), include_str!("memory.rs")];
    for (setting, docs) in settings {
        let test = format!("#[test]\nfn {setting}() {{");
        assert!(tests.iter().any(|tests| tests.contains(&test)), "no test has the name of `{setting}`");
        let short = setting.ends_with("_fn") && docs.contains("for a closure");
        assert!(short || docs.contains("efault"), "the docs of `{setting}` do not say what its default is");
    }
}

#[test]
fn name() {
    let (names, seen) = mpsc::channel();
    let cache = plain()
        .name("prices")
        .loader_fn(move |_: &u32| {
            names.send(thread::current().name().map(str::to_owned)).unwrap();
            Ok::<_, Error>(1)
        })
        .build();
    assert_eq!(cache.name(), "prices");
    assert!(format!("{cache:?}").contains("prices"));
    assert!(cache.refresh(&1));
    assert!(seen.recv().unwrap().unwrap().contains("prices"), "the keeper's threads have it");
    let text = panic_of(|| cache.get_with(&2, || cache.get_with(&2, || 1)));
    assert!(text.contains("prices -> prices"), "{text}");
    assert_eq!(plain::<u32, u32>().build().name(), "");
}

#[test]
fn time_to_live() {
    over_shapes(|builder: Builder<u32, u32>| {
        let clock = ManualClock::new();
        let cache = builder.time_to_live(secs(10)).clock(clock.clone()).build();
        cache.insert(1, 1);
        cache.get_with(&2, || 2);
        clock.advance(secs(10) - NANO);
        assert_eq!((stage(&cache, 1), stage(&cache, 2)), ("fresh", "fresh"));
        clock.advance(NANO);
        assert_eq!((stage(&cache, 1), stage(&cache, 2)), ("gone", "gone"));
    });
}

#[test]
fn soft_ttl() {
    over_shapes(|builder: Builder<u32, u32>| {
        let clock = ManualClock::new();
        let cache = builder.soft_ttl(secs(3)).time_to_live(secs(10)).clock(clock.clone()).build();
        cache.insert(1, 1);
        clock.advance(secs(3) - NANO);
        assert_eq!(stage(&cache, 1), "fresh");
        clock.advance(NANO);
        assert_eq!((stage(&cache, 1), cache.get(&1)), ("stale", Some(1)));
        // The one that refreshes has the new value.
        assert_eq!(cache.get_with(&1, || 2), 2);
        assert_eq!(stage(&cache, 1), "fresh");
    });
}

#[test]
fn time_to_idle() {
    over_shapes(|builder: Builder<u32, u32>| {
        let clock = ManualClock::new();
        let cache = builder.time_to_idle(secs(10)).clock(clock.clone()).build();
        (1..=6).for_each(|key| cache.insert(key, key));
        for _ in 0..3 {
            clock.advance(secs(6));
            assert_eq!(cache.get(&1), Some(1));
            assert_eq!(cache.read(&2, |v| *v), Some(2));
            assert_eq!(cache.pin().get(&3), Some(&3));
            assert_eq!(cache.get_with(&4, || unreachable!()), 4);
            let _ = (cache.peek(&5), cache.contains_key(&6), cache.iter().count());
        }
        // Those that were only peeked at were idle.
        assert_eq!((cache.peek(&5), cache.contains_key(&6)), (None, false));
        clock.advance(secs(10) - NANO);
        assert_eq!(
            (cache.peek(&1), cache.peek(&2), cache.peek(&3), cache.peek(&4)),
            (Some(1), Some(2), Some(3), Some(4))
        );
        clock.advance(NANO);
        cache.run_pending_tasks();
        assert_eq!(cache.len(), 0);
    });
}

#[test]
fn jitter() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>()
        .soft_ttl(secs(60))
        .time_to_live(secs(120))
        .jitter(0.5)
        .clock(clock.clone())
        .build();
    let n = 400;
    (0..n).for_each(|key| cache.insert(key, key));
    let count = |what| (0..n).filter(|key| stage(&cache, *key) == what).count();
    clock.set(secs(30));
    assert_eq!(count("fresh"), 400, "no TTL is cut by more than a half");
    clock.set(secs(45));
    let soft = count("stale");
    assert!((40..360).contains(&soft), "{soft} of 400 after half of the spread");
    clock.set(secs(60));
    assert_eq!((count("fresh"), count("gone")), (0, 0), "the TTL is an upper bound");
    clock.set(secs(90));
    // One factor for both: those that were stale at 45 are gone at 90.
    assert_eq!(count("gone"), soft);
    clock.set(secs(120));
    assert_eq!(count("gone"), 400);
    for legal in [0.0, -0.0, 1.0] {
        let cache = plain::<u32, u32>().time_to_live(secs(1)).jitter(legal).clock(clock.clone()).build();
        cache.insert(1, 1);
        assert_eq!(cache.get(&1), Some(1));
    }
}

#[test]
fn expire_after() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (clock, seen) = (ManualClock::new(), Arc::new(Mutex::new(Vec::new())));
        let told = seen.clone();
        let cache = builder
            .time_to_live(secs(100))
            .clock(clock.clone())
            .expire_after(move |key: &u32, value: &u32, took: Option<Duration>| {
                told.lock().unwrap().push((*key, *value, took));
                match key {
                    1 => Ttl { soft: Some(secs(1)), hard: Some(secs(2)) },
                    2 => Ttl { soft: None, hard: Some(secs(3)) },
                    3 => Ttl { soft: Some(secs(500)), hard: None },
                    _ => Ttl::default(),
                }
            })
            .build();
        (1..=4).for_each(|key| cache.insert(key, 10 * key));
        cache.get_with(&5, || {
            clock.advance(secs(7));
            50
        });
        assert_eq!(
            *seen.lock().unwrap(),
            [(1, 10, None), (2, 20, None), (3, 30, None), (4, 40, None), (5, 50, Some(secs(7)))]
        );
        clock.set(secs(7));
        assert_eq!(
            [1, 2, 3, 4, 5].map(|key| stage(&cache, key)),
            ["gone", "gone", "fresh", "fresh", "fresh"]
        );
        cache.insert(1, 11);
        cache.insert(2, 21);
        // What the write says goes before it.
        cache.insert_with_ttl(2, 22, secs(50));
        clock.set(secs(8));
        assert_eq!(stage(&cache, 1), "stale");
        clock.set(secs(10));
        assert_eq!([1, 2].map(|key| stage(&cache, key)), ["gone", "fresh"]);
        // A soft TTL beyond the hard one is cut.
        clock.set(secs(100));
        assert_eq!([3, 4, 5].map(|key| stage(&cache, key)), ["gone", "gone", "fresh"]);
        clock.set(secs(107));
        assert_eq!(stage(&cache, 5), "gone");
    });
}

#[test]
fn stale_if_error() {
    over_shapes(|builder: Builder<u32, u32>| {
        let clock = ManualClock::new();
        let cache = builder.time_to_live(secs(10)).stale_if_error(secs(5)).clock(clock.clone()).build();
        let fail = || cache.ask(&1).try_load_with(|| Err::<u32, _>(boom()));
        cache.insert(1, 1);
        clock.set(secs(10));
        assert_eq!((cache.get(&1), stage(&cache, 1)), (None, "gone"), "grace is for failures only");
        assert_eq!(fail().unwrap().provenance, Provenance::Grace { age: secs(10) });
        clock.set(secs(15) - NANO);
        assert_eq!(fail().unwrap().value, 1);
        assert_eq!(cache.stats().grace_hits, 2);
        clock.set(secs(15));
        assert_eq!(fail().unwrap_err().kind(), LoadErrorKind::Failed);
        // A load that works is preferred to grace.
        cache.insert(1, 1);
        clock.set(secs(26));
        assert_eq!(cache.try_get_with(&1, || Ok::<_, Error>(2)).unwrap(), 2);
    });
}

#[test]
fn lease() {
    for (given, length) in [(None, secs(30)), (Some(secs(5)), secs(5))] {
        let clock = ManualClock::new();
        let mut builder = plain::<u32, u32>().clock(clock.clone());
        if let Some(given) = given {
            builder = builder.lease(given);
        }
        let (cache, gate) = (builder.build(), Gate::default());
        thread::scope(|s| {
            let hung = s.spawn(|| {
                cache.get_with(&1, || {
                    gate.pass();
                    1
                })
            });
            eventually(|| gate.arrived() == 1);
            clock.advance(length - NANO);
            let next = s.spawn(|| cache.get_with(&1, || 2));
            until_waiting(&cache, 1);
            clock.advance(NANO);
            assert_eq!(next.join().unwrap(), 2);
            gate.open();
            hung.join().unwrap();
        });
        assert_eq!(cache.stats().takeovers, 1);
    }
}

#[test]
fn wait_timeout() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (clock, gate) = (ManualClock::new(), Gate::default());
        let cache = builder.wait_timeout(secs(2)).clock(clock.clone()).build();
        thread::scope(|s| {
            let leader = s.spawn(|| {
                cache.try_get_with(&1, || {
                    gate.pass();
                    Ok::<_, Error>(1)
                })
            });
            eventually(|| gate.arrived() == 1);
            let waiter = s.spawn(|| cache.try_get_with(&1, || Ok::<_, Error>(2)));
            // A call that can't fail waits on.
            let patient = s.spawn(|| cache.get_with(&1, || 3));
            until_waiting(&cache, 2);
            clock.advance(secs(2) - NANO);
            assert_eq!(cache.stats().wait_timeouts, 0);
            clock.advance(NANO);
            assert_eq!(waiter.join().unwrap().unwrap_err().kind(), LoadErrorKind::TimedOut);
            until_waiting(&cache, 1);
            gate.open();
            // The leader itself is not concerned.
            assert_eq!((leader.join().unwrap().unwrap(), patient.join().unwrap()), (1, 1));
        });
        assert_eq!((cache.stats().wait_timeouts, cache.stats().loads), (1, 1));
    });
}

#[test]
fn error_backoff() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (clock, queue) = (ManualClock::new(), Queue::default());
        let fail = || ready(Err::<u32, _>(boom()));
        let cache = builder
            .error_backoff(Backoff::constant(secs(10)))
            .clock(clock.clone())
            .executor(queue.clone())
            .loader_fn(|_| Err::<u32, _>(boom()))
            .async_loader_fn(move |_| fail())
            .build();
        type Call = fn(&Cache<u32, u32, common::Hashing>, u32) -> Result<u32, LoadError>;
        let calls: [Call; 4] = [
            |c, key| c.try_get_with(&key, || Err::<u32, _>(boom())),
            |c, key| c.get_or_load(&key),
            |c, key| smol::block_on(c.try_get_with_async(&key, ready(Err::<u32, _>(boom())))),
            |c, key| smol::block_on(c.get_or_load_async(&key)),
        ];
        for (key, first) in (0..).zip(calls) {
            assert_eq!(kind(first(&cache, key)), LoadErrorKind::Failed);
            clock.advance(secs(10) - NANO);
            for call in calls {
                assert_eq!(kind(call(&cache, key)), LoadErrorKind::BackingOff);
            }
            assert!(!cache.refresh(&key));
            clock.advance(NANO);
            assert_eq!(kind(first(&cache, key)), LoadErrorKind::Failed);
            // A call that can't fail does not let it pass, and ends it.
            assert_eq!((cache.get_with(&key, || 1), cache.get_or_load(&key).unwrap()), (1, 1));
        }
        assert_eq!((cache.stats().loads, queue.len()), (3 * 4, 0));
    });
    // Without one, a caller may always try.
    let cache = plain::<u32, u32>().loader_fn(|_| Err::<u32, _>(boom())).build();
    for _ in 0..3 {
        assert_eq!(kind(cache.get_or_load(&1)), LoadErrorKind::Failed);
    }
}

#[test]
fn early_refresh() {
    // How many refreshes begin by a hundred reads in the second half of a life, by threads and by tasks.
    let refreshes = |early: Option<EarlyRefresh>, soft: bool| {
        [false, true].map(|as_task| {
            let (clock, queue) = (ManualClock::new(), Queue::default());
            let took = clock.clone();
            let mut builder = plain::<u32, u32>()
                .time_to_live(secs(100))
                .clock(clock.clone())
                .executor(queue.clone())
                .loader_fn(move |key| {
                    took.advance(secs(10));
                    Ok::<_, Error>(*key)
                })
                .async_loader_fn(|key| ready(Ok::<_, Error>(key)));
            if let Some(early) = early {
                builder = builder.early_refresh(early);
            }
            if soft {
                builder = builder.soft_ttl(secs(100));
            }
            let cache = builder.build();
            assert_eq!(cache.get_or_load(&1).unwrap(), 1);
            clock.advance(secs(51));
            for _ in 0..100 {
                let got =
                    if as_task { smol::block_on(cache.get_or_load_async(&1)) } else { cache.get_or_load(&1) };
                assert_eq!(got.unwrap(), 1);
                assert_eq!(cache.get(&1), Some(1), "one that never loads takes no part");
            }
            let queued = queue.len();
            queue.run();
            assert_eq!(cache.stats().early_refreshes, queued as u64);
            queued
        })
    };
    // With such a factor the first read of the half fires for certain, and then somebody loads.
    assert_eq!(refreshes(Some(EarlyRefresh::beta(1e12)), false), [1, 1]);
    assert_eq!(refreshes(Some(EarlyRefresh::beta(1e12)), true), [1, 1]);
    assert_eq!(refreshes(Some(EarlyRefresh::off()), false), [0, 0]);
    // The default with a soft TTL; the one without is in `tests/early.rs`.
    assert_eq!(refreshes(None, true), [0, 0]);
}

#[test]
fn negative_ttl() {
    for remembers in [true, false] {
        over_shapes(|builder: Builder<u32, u32>| {
            let (clock, loads) = (ManualClock::new(), Tally::default());
            let (count, counts) = (loads.clone(), loads.clone());
            let builder = if remembers { builder.negative_ttl(secs(10)) } else { builder };
            let cache = builder
                .clock(clock.clone())
                .loader(With(move |_: &u32, _: &quell::LoadContext<u32>| {
                    count.add();
                    Ok(Loaded::absent())
                }))
                .build();
            let none = || {
                let count = counts.clone();
                async move {
                    count.add();
                    None
                }
            };
            let so_many = || {
                let before = loads.get();
                assert_eq!(kind(cache.get_or_load(&1)), LoadErrorKind::Absent);
                assert_eq!(cache.optionally_get_with(&1, || smol::block_on(none())), None);
                assert_eq!(smol::block_on(cache.optionally_get_with_async(&1, none())), None);
                loads.get() - before
            };
            if !remembers {
                assert_eq!((so_many(), so_many()), (3, 3));
                return;
            }
            assert_eq!(so_many(), 1);
            clock.advance(secs(10) - NANO);
            assert_eq!(so_many(), 0);
            clock.advance(NANO);
            assert_eq!(so_many(), 1);
        });
    }
}

/// Runs `body` while so many loads are under way, of keys from 100 on.
fn while_loading<R>(cache: &Cache<u32, u32, common::Hashing>, loads: u32, body: impl FnOnce() -> R) -> R {
    let gate = Gate::default();
    (100..100 + loads).for_each(|key| cache.invalidate(&key));
    thread::scope(|s| {
        for key in 100..100 + loads {
            let gate = gate.clone();
            s.spawn(move || {
                cache.try_get_with(&key, || {
                    gate.pass();
                    Ok::<_, Error>(key)
                })
            });
        }
        eventually(|| gate.arrived() == loads as usize);
        let result = body();
        gate.open();
        result
    })
}

#[test]
fn max_concurrent_loads() {
    over_shapes(|builder: Builder<u32, u32>| {
        let cache = builder
            .max_concurrent_loads(2)
            .loader_fn(|key| Ok::<_, Error>(*key))
            .async_loader_fn(|key| ready(Ok::<_, Error>(key)))
            .build();
        while_loading(&cache, 1, || assert_eq!(cache.try_get_with(&1, || Ok::<_, Error>(1)).unwrap(), 1));
        while_loading(&cache, 2, || {
            assert_eq!(kind(cache.try_get_with(&2, || Ok::<_, Error>(2))), LoadErrorKind::Overloaded);
            assert_eq!(kind(cache.get_or_load(&2)), LoadErrorKind::Overloaded);
            let own = cache.try_get_with_async(&2, ready(Ok::<_, Error>(2)));
            assert_eq!(kind(smol::block_on(own)), LoadErrorKind::Overloaded);
            assert_eq!(kind(smol::block_on(cache.get_or_load_async(&2))), LoadErrorKind::Overloaded);
            let many = cache.load_many([2, 3], |_| Ok::<_, Error>([(2, 2)]));
            assert_eq!(kind(many), LoadErrorKind::Overloaded);
            assert!(!cache.refresh(&2));
            assert_eq!((cache.get_or_load(&1).unwrap(), cache.get_with(&4, || 4)), (1, 4));
        });
        assert_eq!(cache.get_or_load(&2).unwrap(), 2);
    });
    // Without one there is no limit.
    let cache = plain::<u32, u32>().build();
    while_loading(&cache, 40, || assert_eq!(cache.try_get_with(&2, || Ok::<_, Error>(2)).unwrap(), 2));
}

#[test]
fn max_waiters() {
    over_shapes(|builder: Builder<u32, u32>| {
        let cache = builder.max_waiters(2).build();
        let join = |key: &'static u32| cache.try_get_with_async(key, ready(Ok::<_, Error>(1)));
        while_loading(&cache, 2, || {
            // Over all keys.
            let (one, two) = (Task::waiting(join(&100)), Task::waiting(join(&101)));
            assert_eq!(kind(cache.try_get_with(&100, || Ok::<_, Error>(1))), LoadErrorKind::Overloaded);
            assert_eq!(kind(smol::block_on(join(&101))), LoadErrorKind::Overloaded);
            // One that never gives up waits all the same.
            let patient = Task::waiting(cache.get_with_async(&100, ready(1)));
            assert_eq!(cache.try_get_with(&1, || Ok::<_, Error>(1)).unwrap(), 1, "who leads does not wait");
            drop((one, patient));
            let three = Task::waiting(join(&101));
            assert_eq!(kind(smol::block_on(join(&101))), LoadErrorKind::Overloaded);
            drop((two, three));
        });
        assert_eq!((cache.stats().joins, cache.stats().waiters), (4, 0));
    });
    // Without one there is no limit.
    let cache = plain::<u32, u32>().build();
    while_loading(&cache, 1, || {
        let waits = |_| Task::waiting(cache.try_get_with_async(&100, ready(Ok::<_, Error>(1))));
        let all: Vec<_> = (0..1_000).map(waits).collect();
        assert_eq!(cache.stats().waiters as usize, all.len());
    });
}

#[test]
fn fallback() {
    over_shapes(|builder: Builder<u32, u32>| {
        let cache = builder
            .fallback(|key| (*key < 10).then_some(1_000 + *key))
            .loader_fn(|_| Err::<u32, _>(boom()))
            .build();
        assert_eq!(cache.get_or_load(&1).unwrap(), 1_001);
        assert_eq!(cache.ask(&2).load().unwrap().provenance, Provenance::Fallback);
        assert_eq!(cache.try_get_with(&3, || Err::<u32, _>(boom())).unwrap(), 1_003);
        assert_eq!(cache.get_or_load(&10).unwrap_err().kind(), LoadErrorKind::Failed);
        assert_eq!((cache.stats().fallbacks, cache.len()), (3, 0), "it is not stored");
        // A stale value goes before it.
        cache.insert(4, 4);
        cache.expire(&4);
        assert_eq!(cache.try_get_with(&4, || Err::<u32, _>(boom())).unwrap(), 4);
    });
}

#[test]
fn max_capacity() {
    over_shapes(|builder: Builder<u32, u32>| {
        let cache = builder.max_capacity(10).build();
        (0..10).for_each(|key| cache.insert(key, key));
        assert_eq!((cache.len(), cache.weighted_size()), (10, 10));
        (10..50).for_each(|key| cache.insert(key, key));
        assert_eq!((cache.len(), cache.weighted_size(), cache.get(&49)), (10, 10, Some(49)));
    });
    let fill = |cache: &Cache<u32, u32, _>| (0..1_000).for_each(|key| cache.insert(key, key));
    // Absent, and with the largest number, there is no limit.
    for cache in [plain().build(), plain().max_capacity(u64::MAX).build()] {
        fill(&cache);
        assert_eq!(cache.len(), 1_000);
    }
    let zero = plain().max_capacity(0).build();
    fill(&zero);
    assert_eq!((zero.len(), zero.get_with(&1, || 5), zero.get(&1)), (0, 5, None));
    let short = Cache::new(7);
    (0..1_000).for_each(|key: u32| short.insert(key, key));
    assert_eq!(short.len(), 7);
}

#[test]
fn weigher() {
    over_shapes(|builder: Builder<u32, u32>| {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let noted = asked.clone();
        let cache = builder
            .max_capacity(100)
            .weigher(move |key, value| {
                noted.lock().unwrap().push((*key, *value));
                key + value
            })
            .build();
        cache.insert(1, 9);
        cache.get_with(&2, || 18);
        assert_eq!((cache.weighted_size(), cache.len()), (30, 2));
        cache.compute(&3, |_| quell::Op::Put(27));
        assert_eq!((cache.weighted_size(), cache.len()), (60, 3));
        assert!(cache.expire(&3) && cache.get(&1).is_some());
        assert_eq!(*asked.lock().unwrap(), [(1, 9), (2, 18), (3, 27)], "once for each value");
        // It is full by its weight, and one that is heavier than the capacity is not stored.
        cache.insert(4, 37);
        assert_eq!((cache.get(&4), cache.len()), (Some(37), 3));
        assert!(cache.weighted_size() <= 100);
        cache.insert(5, 96);
        assert_eq!((cache.get(&5), cache.stats().oversized), (None, 1));
    });
    // Without one, each counts for one; without a bound, the sum is kept as well.
    let cache = plain::<u32, u32>().weigher(|_, value| *value).build();
    (1..=10).for_each(|key| cache.insert(key, key));
    assert_eq!(cache.weighted_size(), 55);
    assert_eq!(cache.remove(&10), Some(10));
    assert_eq!(cache.weighted_size(), 45);
}

#[test]
fn eviction_listener() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (told, seen) = mpsc::channel();
        let clock = ManualClock::new();
        let cache = builder
            .max_capacity(2)
            .time_to_live(secs(10))
            .clock(clock.clone())
            .eviction_listener(move |key, value, cause| told.send((*key, *value, cause)).unwrap())
            .build();
        let next = || seen.try_recv().ok();
        cache.insert(1, 10);
        assert_eq!(next(), None);
        cache.insert(1, 11);
        assert_eq!(next(), Some((1, 10, RemovalCause::Replaced)));
        cache.invalidate(&1);
        assert_eq!(next(), Some((1, 11, RemovalCause::Explicit)));
        (1..4).for_each(|key| cache.insert(key, key));
        assert_eq!(next().map(|(.., cause)| cause), Some(RemovalCause::Size));
        clock.advance(secs(10));
        cache.run_pending_tasks();
        let two = [next(), next()].map(|t| t.map(|(.., cause)| cause));
        assert_eq!((two, next()), ([Some(RemovalCause::Expired); 2], None));
    });
}

#[test]
fn shards() {
    // A write sweeps a bucket of its own shard: with one shard, writes of one key sweep everything.
    let left = |shards| {
        let clock = ManualClock::new();
        let cache = plain::<u32, u32>().shards(shards).time_to_live(secs(1)).clock(clock.clone()).build();
        (0..1_000).for_each(|key| cache.insert(key, key));
        clock.advance(secs(1));
        (0..5_000).for_each(|n| cache.insert(0, n));
        cache.len()
    };
    assert_eq!(left(1), 1);
    assert!(left(64) > 900, "{}", left(64));
    // Rounded up to a power of two: three shards are four.
    assert!((600..900).contains(&left(3)), "{}", left(3));
    let cache = plain::<u32, u32>().shards(65_536).build();
    cache.insert(1, 1);
    assert_eq!(cache.get(&1), Some(1));
}

#[test]
fn hasher() {
    struct Counting(DefaultHashBuilder, Tally);
    impl BuildHasher for Counting {
        type Hasher = DefaultHasher;
        fn build_hasher(&self) -> DefaultHasher {
            self.1.add();
            self.0.build_hasher()
        }
    }
    let calls = Tally::default();
    // `hasher` keeps the settings that were made before.
    let cache = Cache::<u32, u32>::builder()
        .name("kept")
        .loader_fn(|key| Ok::<_, Error>(key + 1))
        .hasher(Counting(DefaultHashBuilder::new(), calls.clone()))
        .build();
    assert_eq!((cache.name(), cache.get_or_load(&1).unwrap()), ("kept", 2));
    let once = calls.get();
    assert!(once >= 1);
    assert_eq!((cache.get(&1), calls.get()), (Some(2), once + 1), "a hit hashes once");
}

#[test]
fn clock() {
    /// A clock that does not say when it moves.
    struct Silent(ManualClock);
    impl Clock for Silent {
        fn now(&self) -> Duration {
            self.0.now()
        }
    }
    let hands = ManualClock::new();
    hands.advance(secs(1_000_000));
    let silent = plain::<u32, u32>().time_to_live(secs(10)).clock(Silent(hands.clone())).build();
    let loud = plain::<u32, u32>().time_to_live(secs(10)).clock(hands.clone()).build();
    for cache in [&silent, &loud] {
        cache.insert(1, 1);
        assert_eq!(cache.get(&1), Some(1));
    }
    hands.advance(secs(10));
    assert_eq!((silent.get(&1), loud.get(&1)), (None, None));
    // Under a silent clock waits park in real time.
    let waits = plain::<u32, u32>().wait_timeout(ms(20)).clock(Silent(hands)).build();
    let gate = Gate::default();
    thread::scope(|s| {
        let leader = s.spawn(|| {
            waits.get_with(&1, || {
                gate.pass();
                1
            })
        });
        eventually(|| gate.arrived() == 1);
        let error = waits.try_get_with(&1, || Ok::<_, Error>(2)).unwrap_err();
        assert_eq!(error.kind(), LoadErrorKind::TimedOut);
        gate.open();
        leader.join().unwrap();
    });
}

#[test]
fn loader() {
    let bare = plain::<u32, u32>().build();
    assert_eq!(bare.get_or_load(&1).unwrap_err().kind(), LoadErrorKind::NotCached);
    assert!(!bare.refresh(&1));
    let closure = plain::<u32, u32>().loader(|key: &u32| Ok::<_, Error>(key * 2)).build();
    assert_eq!(closure.get_or_load(&4).unwrap(), 8);
    let with_context = With(|key: &u32, _: &quell::LoadContext<u32>| Ok(Loaded::new(key * 3)));
    assert_eq!(plain().loader(with_context).build().get_or_load(&4).unwrap(), 12);
}

#[test]
fn loader_fn() {
    let cache =
        plain::<u32, u32>().loader_fn(|key| if *key == 0 { Err("zero") } else { Ok(key * 2) }).build();
    assert_eq!((cache.get_or_load(&4).unwrap(), cache.get(&4)), (8, Some(8)));
    assert_eq!(cache.get_or_load(&0).unwrap_err().kind(), LoadErrorKind::Failed);
}

#[test]
fn async_loader() {
    over_shapes(|builder: Builder<u32, u32>| {
        // A trait, a closure of a reference, and one of a key, are in `tests/loaders.rs`.
        let cache = builder.async_loader(|key: &u32| std::future::ready(Ok::<_, Error>(10 * key))).build();
        assert_eq!(smol::block_on(cache.get_or_load_async(&1)).unwrap(), 10);
        assert_eq!(cache.get_or_load(&2).unwrap(), 20);
        assert!(cache.refresh(&3));
        eventually(|| cache.peek(&3) == Some(30));
    });
}

#[test]
fn async_loader_fn() {
    let cache = plain().async_loader_fn(|key: String| async move { key.parse::<u32>() }).build();
    assert_eq!(smol::block_on(cache.get_or_load_async("12")).unwrap(), 12);
    assert!(smol::block_on(cache.get_or_load_async("x")).is_err());
}

#[test]
fn batch_loader() {
    let calls = Tally::default();
    let count = calls.clone();
    let load = move |keys: &[u32]| {
        count.add();
        Ok::<_, Error>(keys.iter().map(|key| (*key, key + 1)).collect::<Vec<_>>())
    };
    let cache = plain().batch_loader(load).build();
    assert_eq!(cache.get_many([1, 2]).unwrap(), HashMap::from([(1, 2), (2, 3)]));
    assert_eq!((cache.get_or_load(&3).unwrap(), calls.get()), (4, 2));
}

#[test]
fn async_batch_loader() {
    let calls = Tally::default();
    let count = calls.clone();
    let load = move |keys: Vec<u32>| {
        count.add();
        ready(Ok::<_, Error>(keys.into_iter().map(|key| (key, key + 1))))
    };
    let cache = plain().async_batch_loader(load).build();
    let got = smol::block_on(cache.get_many_async([1, 2])).unwrap();
    assert_eq!((got, calls.get()), (HashMap::from([(1, 2), (2, 3)]), 1));
}

#[test]
fn max_batch_size() {
    for (most, calls) in [(None, 1), (Some(3), 4)] {
        let (called, largest) = (Tally::default(), Arc::new(AtomicUsize::new(0)));
        let (count, large) = (called.clone(), largest.clone());
        let builder = plain().batch_loader(move |keys: &[u32]| {
            count.add();
            large.fetch_max(keys.len(), Ordering::SeqCst);
            Ok::<_, Error>(keys.iter().map(|key| (*key, *key)).collect::<Vec<_>>())
        });
        let builder = if let Some(most) = most { builder.max_batch_size(most) } else { builder };
        assert_eq!(builder.build().get_many(0..10).unwrap().len(), 10);
        assert_eq!((called.get(), largest.load(Ordering::SeqCst)), (calls, most.unwrap_or(10)));
    }
}

#[test]
fn max_batch_delay() {
    for delay in [None, Some(secs(1))] {
        let (clock, called) = (ManualClock::new(), Tally::default());
        let count = called.clone();
        let builder = plain().clock(clock.clone()).async_batch_loader(move |keys: Vec<u32>| {
            count.add();
            ready(Ok::<_, Error>(keys.into_iter().map(|key| (key, key))))
        });
        let builder = if let Some(delay) = delay { builder.max_batch_delay(delay) } else { builder };
        let cache = builder.build();
        let mut calls = [1, 2].map(|key| {
            Task::new({
                let cache = &cache;
                async move { cache.get_or_load_async(&key).await.unwrap() }
            })
        });
        calls.iter_mut().for_each(|call| assert_eq!(call.poll(), delay.is_none()));
        clock.advance(secs(1));
        assert_eq!(calls.map(Task::finish), [1, 2]);
        assert_eq!(called.get(), if delay.is_some() { 1 } else { 2 });
    }
}

#[test]
fn breaker() {
    for breaks in [true, false] {
        let (clock, loads) = (ManualClock::new(), Tally::default());
        let builder = plain::<u32, u32>().clock(clock.clone());
        let builder =
            if breaks { builder.breaker(Breaker::new(0.5).min_loads(2).pause(secs(5))) } else { builder };
        let count = loads.clone();
        let load = move |_: &u32| {
            count.add();
            Err::<u32, _>(boom())
        };
        let cache = builder.loader(load).build();
        let failed = |key| kind(cache.get_or_load(&key));
        assert_eq!([failed(1), failed(2)], [LoadErrorKind::Failed; 2]);
        let after = if breaks { LoadErrorKind::BackingOff } else { LoadErrorKind::Failed };
        assert_eq!((failed(3), loads.get()), (after, if breaks { 2 } else { 3 }));
        clock.advance(secs(5));
        assert_eq!(failed(4), LoadErrorKind::Failed, "one tries the source");
    }
}

#[test]
fn spawner() {
    let (kept, clock) = (Kept::default(), ManualClock::new());
    let cache = plain()
        .soft_ttl(secs(1))
        .clock(clock.clone())
        .spawner(kept.clone())
        .async_loader_fn(|key: u32| std::future::ready(Ok::<_, Error>(10 * key)))
        .build();
    // A load is a task of its own.
    let call = Task::waiting(cache.get_or_load_async(&1));
    assert_eq!((kept.len(), kept.run(), call.finish().unwrap()), (1, 1, 10));
    // So is a refresh.
    cache.insert(1, 1);
    clock.advance(secs(1));
    assert_eq!(smol::block_on(cache.get_or_load_async(&1)).unwrap(), 1);
    assert_eq!((kept.len(), cache.peek(&1)), (1, Some(1)));
    assert_eq!((kept.run(), cache.peek(&1)), (1, Some(10)));
}

#[test]
fn executor() {
    let (queue, ran_on) = (Queue::default(), Arc::new(Mutex::new(None)));
    let told = ran_on.clone();
    let load = move |key: &u32| {
        *told.lock().unwrap() = Some(thread::current().id());
        Ok::<_, Error>(*key)
    };
    let cache = plain().executor(queue.clone()).loader_fn(load).build();
    assert!(cache.refresh(&1));
    assert_eq!((queue.len(), cache.get(&1), cache.in_flight().len()), (1, None, 1));
    queue.run();
    assert_eq!((cache.get(&1), *ran_on.lock().unwrap()), (Some(1), Some(thread::current().id())));
    let refusing = plain().executor(|_: Job| Err(Rejected)).loader_fn(|_: &u32| Ok::<_, Error>(1)).build();
    assert!(!refusing.refresh(&1));
    assert_eq!(refusing.in_flight(), []);
}

#[test]
fn bad_input_is_refused_with_setting_value_and_rule() {
    let new = plain::<u32, u32>;
    let bad: [(Builder<u32, u32>, &str, &str, &str); 10] = [
        (new().soft_ttl(secs(3)).time_to_live(secs(2)), "soft_ttl", "3s", "time_to_live"),
        (new().time_to_live(Duration::ZERO).soft_ttl(NANO), "soft_ttl", "1ns", "time_to_live"),
        (new().lease(Duration::ZERO), "lease", "0ns", "more than zero"),
        (new().jitter(-0.1), "jitter", "-0.1", "from 0 to 1"),
        (new().jitter(1.000_1), "jitter", "1.0001", "from 0 to 1"),
        (new().jitter(f64::NAN), "jitter", "NaN", "from 0 to 1"),
        (new().jitter(f64::INFINITY), "jitter", "inf", "from 0 to 1"),
        (new().shards(0), "shards", "0", "from 1"),
        (new().shards(usize::MAX), "shards", "18446744073709551615", "to 65536"),
        (new().initial_capacity(usize::MAX), "initial_capacity", "18446744073709551615", "at most"),
    ];
    for (builder, setting, value, rule) in bad {
        let error = builder.try_build().unwrap_err();
        assert_eq!(error.setting(), setting);
        assert!(error.value().contains(value), "{error}");
        assert!(error.rule().contains(rule), "{error}");
        let text = error.to_string();
        assert!([setting, value, rule].iter().all(|part| text.contains(part)), "{text}");
    }
    let text = new().lease(Duration::ZERO).try_build().unwrap_err().to_string();
    assert_eq!(panic_of(|| new().lease(Duration::ZERO).build()), text);
    let text = new().jitter(2.0).try_build().unwrap_err().to_string();
    assert_eq!(panic_of(|| new().jitter(2.0).build()), text);
    // On the edge is legal.
    assert!(new().soft_ttl(secs(2)).time_to_live(secs(2)).lease(NANO).shards(1).try_build().is_ok());
}

#[test]
fn edge_durations_are_legal_in_every_setting() {
    type Setting = fn(Builder<u32, u32>, Duration) -> Builder<u32, u32>;
    let settings: [(&str, Setting); 11] = [
        ("time_to_live", |b, d| b.time_to_live(d)),
        ("soft_ttl", |b, d| b.soft_ttl(d)),
        ("both", |b, d| b.soft_ttl(d).time_to_live(d).jitter(0.5)),
        ("time_to_idle", |b, d| b.time_to_idle(d)),
        ("stale_if_error", |b, d| b.stale_if_error(d).time_to_live(secs(1))),
        ("lease", |b, d| b.lease(d.max(NANO))),
        ("wait_timeout", |b, d| b.wait_timeout(d)),
        ("negative_ttl", |b, d| b.negative_ttl(d)),
        ("error_backoff", |b, d| b.error_backoff(Backoff::exponential(d, d))),
        ("early_refresh", |b, d| b.early_refresh(EarlyRefresh::beta(f64::MAX)).time_to_live(d)),
        ("expire_after", |b, d| {
            b.expire_after(move |_: &u32, _: &u32, _| Ttl { soft: Some(d), hard: Some(d) })
        }),
    ];
    for (name, set) in settings {
        for edge in [Duration::ZERO, NANO, Duration::MAX] {
            for start in [Duration::ZERO, secs(1), secs(1 << 32)] {
                let (clock, queue) = (ManualClock::new(), Queue::default());
                clock.set(start);
                let cache = set(plain().clock(clock.clone()), edge)
                    .executor(queue.clone())
                    .loader_fn(|key| if *key == 9 { Err(boom()) } else { Ok(*key) })
                    .build();
                for _ in 0..3 {
                    cache.insert(1, 1);
                    cache.insert_with_ttl(2, 2, edge);
                    assert!([None, Some(1)].contains(&cache.get(&1)), "{name} {edge:?}");
                    assert_eq!(cache.get_with(&3, || 3), 3);
                    assert_eq!(cache.get_or_load(&4).unwrap(), 4, "{name} {edge:?}");
                    assert!(cache.get_or_load(&9).is_err());
                    assert_eq!(cache.optionally_get_with(&10, || None), None);
                    let ask = cache
                        .ask(&5)
                        .max_age(edge)
                        .max_stale(edge)
                        .wait_timeout(edge)
                        .ttl(edge)
                        .soft_ttl(edge);
                    assert_eq!(ask.load_with(|| 5).unwrap().value, 5);
                    queue.run();
                    clock.advance(edge.min(secs(1 << 31)));
                    cache.run_pending_tasks();
                }
                if edge == Duration::MAX {
                    // The TTL of one second in `stale_if_error` has passed.
                    assert_eq!(cache.get(&1).is_some(), name != "stale_if_error", "{name}");
                    assert!(cache.get(&2).is_some());
                } else {
                    assert_eq!(cache.get(&2), None);
                }
            }
        }
    }
}

#[test]
fn at_the_end_of_the_clock() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>().clock(clock.clone()).build();
    clock.advance(Duration::MAX);
    cache.insert(1, 1);
    assert_eq!((cache.get_with(&2, || 2), cache.get(&1), cache.get(&2)), (2, Some(1), Some(2)));
}
