//! One load per key at a time, whoever asks and by whatever method: `cargo test --test single_flight`.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::{
    Builder, Gate, Tally, With, eventually, over_shapes, plain, quietly, scaled, secs, until_waiting,
};
use quell::{LoadContext, LoadError, LoadErrorKind, Loaded, ManualClock, Op, Outcome};
use std::collections::HashMap;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

type Error = std::io::Error;

fn boom() -> Error {
    Error::other("boom")
}

/// A fallible call gets its error, unless its ladder finds what another has loaded since.
#[track_caller]
fn fails_or(result: Result<u32, LoadError>, kind: LoadErrorKind, newer: u32) {
    match result {
        Ok(value) => assert_eq!(value, newer),
        Err(error) => assert_eq!(error.kind(), kind),
    }
}

#[test]
fn a_burst_is_one_load_with_one_result() {
    over_shapes(|builder: Builder<u32, usize>| {
        let (cache, gate, loads) = (builder.build(), Gate::default(), Tally::default());
        thread::scope(|s| {
            let call = || {
                cache.get_with(&1, || {
                    gate.pass();
                    100 + loads.add()
                })
            };
            let callers = [(); 20].map(|()| s.spawn(call));
            until_waiting(&cache, 19);
            assert_eq!(
                (cache.in_flight().len(), cache.in_flight()[0].key, cache.stats().waiters),
                (1, 1, 19)
            );
            gate.open();
            assert_eq!(callers.map(|c| c.join().unwrap()), [100; 20]);
        });
        let stats = cache.stats();
        assert_eq!(
            (stats.loads, stats.joins, stats.misses, stats.in_flight, stats.waiters),
            (1, 19, 20, 0, 0)
        );
    });
}

#[test]
fn no_two_loads_of_a_key_overlap() {
    // Threads load, fail, compute and refresh a few keys; each load marks its key while it runs.
    let running: [AtomicBool; 4] = Default::default();
    let running: &'static _ = Box::leak(Box::new(running));
    let inside = move |key: u32| {
        let running: &[AtomicBool; 4] = running;
        assert!(!running[key as usize].swap(true, Ordering::SeqCst), "two loads of {key} at once");
        thread::yield_now();
        running[key as usize].store(false, Ordering::SeqCst);
    };
    over_shapes(|builder: Builder<u32, u32>| {
        let clock = ManualClock::new();
        let load = move |key: &u32| {
            inside(*key);
            Ok::<_, Error>(*key)
        };
        let builder = builder.soft_ttl(secs(1)).time_to_live(secs(2)).lease(Duration::MAX);
        let cache = builder.clock(clock.clone()).loader(load).build();
        let rounds = scaled(1_000, 100_000) as u32;
        thread::scope(|s| {
            for t in 0..3_u32 {
                let (cache, clock) = (&cache, &clock);
                s.spawn(move || {
                    for round in 0..rounds {
                        let key = (round * 7 + t) % 4;
                        match (round + t) % 7 {
                            0 => assert_eq!(
                                cache.get_with(&key, || {
                                    inside(key);
                                    key
                                }),
                                key
                            ),
                            1 => _ = cache.get_or_load(&key).map(|v| assert_eq!(v, key)),
                            2 => {
                                _ = cache.try_get_with(&key, || {
                                    inside(key);
                                    Err::<u32, _>(boom())
                                })
                            }
                            3 => {
                                _ = cache.compute(&key, |_| {
                                    inside(key);
                                    Op::Put(key)
                                })
                            }
                            4 => _ = cache.refresh(&key),
                            5 => {
                                _ = cache.optionally_get_with(&key, || {
                                    inside(key);
                                    None
                                })
                            }
                            _ => clock.advance(secs(1)),
                        }
                    }
                });
            }
        });
        eventually(|| cache.in_flight().is_empty());
    });
}

#[test]
fn different_keys_load_at_the_same_time() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (cache, both) = (builder.build(), Barrier::new(3));
        thread::scope(|s| {
            for key in 0..3 {
                let (cache, both) = (&cache, &both);
                s.spawn(move || {
                    assert_eq!(
                        cache.get_with(&key, || {
                            both.wait();
                            key
                        }),
                        key
                    )
                });
            }
        });
    });
}

#[test]
fn an_infallible_caller_takes_a_failure_for_an_abandoned_load() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (cache, gate, loads) = (builder.build(), Gate::default(), AtomicUsize::new(0));
        let load = || {
            loads.fetch_add(1, Ordering::SeqCst);
            5
        };
        thread::scope(|s| {
            let failing = s.spawn(|| {
                cache.try_get_with(&1, || {
                    gate.pass();
                    Err::<u32, _>(boom())
                })
            });
            eventually(|| gate.arrived() == 1);
            let get = [(); 4].map(|()| s.spawn(|| cache.get_with(&1, &load)));
            let optional = [(); 4].map(|()| s.spawn(|| cache.optionally_get_with(&1, || Some(load()))));
            let shares = s.spawn(|| cache.try_get_with(&1, || -> Result<u32, Error> { unreachable!() }));
            until_waiting(&cache, 9);
            gate.open();
            for fallible in [failing, shares] {
                fails_or(fallible.join().unwrap(), LoadErrorKind::Failed, 5);
            }
            assert_eq!(get.map(|c| c.join().unwrap()), [5; 4]);
            assert_eq!(optional.map(|c| c.join().unwrap()), [Some(5); 4]);
        });
        // One of them led, the rest joined.
        assert_eq!(loads.into_inner(), 1);
    });
}

#[test]
fn an_absence_is_shared_with_those_who_understand_it() {
    over_shapes(|builder: Builder<u32, u32>| {
        let gate = Gate::default();
        let stop = gate.clone();
        let loader = With(move |_: &u32, _: &LoadContext<u32>| {
            stop.pass();
            Ok(Loaded::absent())
        });
        let cache = builder.loader(loader).build();
        thread::scope(|s| {
            let leader = s.spawn(|| cache.get_or_load(&1));
            eventually(|| gate.arrived() == 1);
            let same = s.spawn(|| cache.get_or_load(&1));
            let ask = s.spawn(|| cache.ask(&1).load_with(|| unreachable!()));
            let optional = s.spawn(|| cache.optionally_get_with(&1, || unreachable!()));
            until_waiting(&cache, 3);
            // A miss to these.
            let get = s.spawn(|| cache.get_with(&1, || 7));
            let fallible = s.spawn(|| cache.try_get_with(&1, || Ok::<_, Error>(7)));
            until_waiting(&cache, 5);
            gate.open();
            for absent in [leader, same] {
                fails_or(absent.join().unwrap(), LoadErrorKind::Absent, 7);
            }
            fails_or(ask.join().unwrap().map(|a| a.value), LoadErrorKind::Absent, 7);
            assert_eq!(optional.join().unwrap(), None);
            assert_eq!((get.join().unwrap(), fallible.join().unwrap().unwrap()), (7, 7));
        });
        assert_eq!(cache.get(&1), Some(7));
    });
}

#[test]
fn what_is_not_stored_is_shared_all_the_same() {
    over_shapes(|builder: Builder<u32, usize>| {
        let (gate, loads) = (Gate::default(), Tally::default());
        let (stop, count) = (gate.clone(), loads.clone());
        let loader = With(move |key: &u32, _: &LoadContext<usize>| {
            stop.pass();
            let loaded = Loaded::new(count.add());
            Ok(if *key == 1 { loaded.do_not_store() } else { loaded.ttl(secs(0)) })
        });
        let cache = builder.loader(loader).build();
        for key in [1, 2] {
            thread::scope(|s| {
                let callers = [(); 8].map(|()| s.spawn(|| cache.get_or_load(&key).unwrap()));
                if key == 1 {
                    until_waiting(&cache, 7);
                    gate.open();
                }
                let got = callers.map(|c| c.join().unwrap());
                if key == 1 {
                    assert_eq!(got, [0; 8]);
                }
            });
            assert_eq!((cache.get(&key), cache.len(), cache.iter().count()), (None, 0, 0));
        }
    });
}

#[test]
fn a_hit_runs_nothing() {
    over_shapes(|builder: Builder<String, u32>| {
        let cache = builder.loader_fn(|_| -> Result<u32, Error> { unreachable!() }).build();
        cache.insert("a".into(), 1);
        assert_eq!(cache.get_with("a", || unreachable!()), 1);
        assert_eq!(cache.try_get_with("a", || -> Result<u32, Error> { unreachable!() }).unwrap(), 1);
        assert_eq!(cache.optionally_get_with("a", || unreachable!()), Some(1));
        assert_eq!(cache.get_or_load("a").unwrap(), 1);
        assert_eq!(cache.ask("a").load().unwrap().value, 1);
        assert_eq!(
            (cache.get("a"), cache.peek("a"), cache.read("a", |v| v + 1)),
            (Some(1), Some(1), Some(2))
        );
        assert_eq!((cache.pin().get("a"), cache.contains_key("a"), cache.get("b")), (Some(&1), true, None));
        assert_eq!((cache.stats().loads, cache.stats().misses), (0, 1));
    });
}

#[test]
fn loads_of_unlike_kinds_and_writes_agree_with_a_map() {
    // One thread against a model: whatever is called, the value is the model's.
    over_shapes(|builder: Builder<u32, u32>| {
        let cache = builder.loader_fn(|key| if key % 5 == 0 { Err(boom()) } else { Ok(key * 1_000) }).build();
        let mut model = HashMap::new();
        let mut state = 12_345_u32;
        for step in 0..scaled(4_000, 400_000) as u32 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let key = (state >> 16) % 40;
            match (state >> 8) % 12 {
                0 => {
                    cache.insert(key, step);
                    model.insert(key, step);
                }
                1 => assert_eq!(cache.remove(&key), model.remove(&key)),
                2 => {
                    cache.invalidate(&key);
                    model.remove(&key);
                }
                3 => assert_eq!(cache.get_with(&key, || step), *model.entry(key).or_insert(step)),
                4 => match cache.get_or_load(&key) {
                    Ok(value) => assert_eq!(value, *model.entry(key).or_insert(key * 1_000)),
                    Err(_) => assert!(key.is_multiple_of(5) && !model.contains_key(&key)),
                },
                5 => {
                    let done = cache.compute(&key, |v| v.map_or(Op::Put(step), |v| Op::Put(v + 1)));
                    let new = *model.entry(key).and_modify(|v| *v += 1).or_insert(step);
                    assert!([Outcome::Inserted(new), Outcome::Replaced(new)].contains(&done));
                }
                6 => {
                    let removed = cache.compute(&key, |_| Op::Remove);
                    assert_eq!(removed, model.remove(&key).map_or(Outcome::Absent, Outcome::Removed));
                }
                7 => assert_eq!(cache.optionally_get_with(&key, || None), model.get(&key).copied()),
                8 => assert_eq!(
                    cache.try_get_with(&key, || Err::<u32, _>(boom())).ok(),
                    model.get(&key).copied()
                ),
                9 if step % 64 == 0 => {
                    cache.retain(|k, v| (k + v) % 3 > 0);
                    model.retain(|k, v| (*k + *v) % 3 > 0);
                }
                10 if step % 512 == 0 => {
                    cache.invalidate_all();
                    model.clear();
                }
                _ => assert_eq!(
                    (cache.get(&key), cache.contains_key(&key)),
                    (model.get(&key).copied(), model.contains_key(&key))
                ),
            }
            assert_eq!(cache.len(), model.len());
        }
        assert_eq!(cache.iter().collect::<HashMap<_, _>>(), model);
    });
}

#[test]
fn a_load_under_a_pinned_is_refused_in_debug_builds() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>().soft_ttl(secs(1)).clock(clock.clone()).build();
    (1..=3).for_each(|key| cache.insert(key, key));
    let pinned = cache.pin();
    let loads = |key: u32| quietly(|| cache.get_with(&key, || 100)).is_ok();
    assert!(loads(1), "a hit needs no load");
    assert_eq!(loads(9), !cfg!(debug_assertions), "a miss does");
    let computes = quietly(|| cache.compute(&2, |_| Op::Keep)).is_ok();
    assert_eq!(computes, !cfg!(debug_assertions));
    clock.advance(secs(1));
    assert_eq!(loads(3), !cfg!(debug_assertions), "so does the refresh of a stale value by a closure");
    drop(pinned);
    assert_eq!(
        (cache.in_flight().len(), cache.get_with(&9, || 100), cache.get_with(&3, || 100)),
        (0, 100, 100)
    );
}

#[test]
fn keys_of_borrowed_kinds() {
    let text = plain::<String, usize>().build();
    assert_eq!(
        (text.get_with("abc", || 3), text.get("abc"), text.get(&"abc".to_owned())),
        (3, Some(3), Some(3))
    );
    let bytes = plain::<Vec<u8>, usize>().build();
    assert_eq!((bytes.get_with([1_u8, 2].as_slice(), || 2), bytes.get([1_u8, 2].as_slice())), (2, Some(2)));
    let unit = plain::<(), ()>().build();
    unit.get_with(&(), || ());
    assert_eq!((unit.get(&()), unit.len()), (Some(()), 1));
}
