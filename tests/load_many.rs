//! Loads of many keys, by threads and by tasks: `cargo test --test load_many`, and with `--features tokio`.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::tasks::{Door, Kept, Task, Tasks, boo, elsewhere, over_tasks, panics, waiting};
use common::{
    Builder, Counted, Gate, Sut, Tally, eventually, ms, over_shapes, panic_of, plain, scaled, secs,
    until_waiting,
};
use quell::{LoadError, LoadErrorKind, ManualClock, Op};
use smol::block_on;
use smol::future::yield_now;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread;

type Error = std::io::Error;
type Got = Result<HashMap<u32, u32>, LoadError>;

fn boom() -> Error {
    Error::other("boom")
}

/// Whether a cycle is at the bottom of an error.
fn is_cycle(error: &LoadError) -> bool {
    error.kind() == LoadErrorKind::Cycle || error.downcast_ref::<LoadError>().is_some_and(is_cycle)
}

/// What a load comes to that never runs.
fn never_called() -> Result<[(u32, u32); 0], Error> {
    unreachable!("all keys are loaded by others")
}

/// What a load makes of the keys that it is given.
type Source = Arc<dyn Fn(Vec<u32>) -> Result<Vec<(u32, u32)>, Error> + Send + Sync>;

/// Gives the tenfold of each key, and notes what it was asked for.
fn tenfold(asked: &Arc<Mutex<Vec<Vec<u32>>>>) -> Source {
    let asked = asked.clone();
    Arc::new(move |mut keys| {
        keys.sort_unstable();
        asked.lock().unwrap().push(keys.clone());
        Ok(keys.into_iter().map(|key| (key, 10 * key)).collect())
    })
}

/// A body over both fronts, over all shapes, and where loads are tasks of their own.
fn over_fronts(mut body: impl FnMut(Builder<u32, u32>, &dyn Fn(&Sut<u32, u32>, &[u32], &Source) -> Got)) {
    over_shapes(|builder| {
        body(builder, &|cache, keys, source| cache.load_many(keys, |keys| source(keys.to_vec())));
    });
    over_tasks(|builder| {
        body(builder, &|cache, keys, source| {
            let source = source.clone();
            let load = |keys| async move {
                yield_now().await;
                source(keys)
            };
            block_on(cache.load_many_async(keys, load))
        });
    });
}

fn tens<const N: usize>(keys: [u32; N]) -> HashMap<u32, u32> {
    keys.map(|key| (key, 10 * key)).into()
}

#[test]
fn what_is_cached_is_not_loaded_and_each_key_counts_once() {
    over_fronts(|builder, call| {
        let (cache, asked) = (builder.build(), Arc::default());
        cache.insert(2, 22);
        assert_eq!(call(&cache, &[], &tenfold(&asked)).unwrap(), HashMap::new());
        assert_eq!(call(&cache, &[2, 2], &tenfold(&asked)).unwrap(), HashMap::from([(2, 22)]));
        assert_eq!(asked.lock().unwrap().len(), 0, "nothing to load");
        let got = call(&cache, &[3, 1, 2, 3, 1, 1], &tenfold(&asked)).unwrap();
        assert_eq!(got, HashMap::from([(1, 10), (2, 22), (3, 30)]));
        assert_eq!(*asked.lock().unwrap(), [[1, 3]]);
        assert_eq!((cache.get(&1), cache.get(&3), cache.len()), (Some(10), Some(30), 3));
        assert_eq!(call(&cache, &[3, 1, 2], &tenfold(&asked)).unwrap().len(), 3);
        let stats = cache.stats();
        assert_eq!((asked.lock().unwrap().len(), stats.loads, stats.misses, stats.hits), (1, 2, 2, 7));
    });
}

#[test]
fn keys_may_be_owned_or_borrowed_and_values_of_any_kind() {
    let cache = plain::<String, usize>().build();
    let keys = ["a".to_owned(), "bb".to_owned()];
    let load =
        |keys: &[String]| Ok::<_, Error>(keys.iter().map(|k| (k.clone(), k.len())).collect::<Vec<_>>());
    assert_eq!(cache.load_many(&keys, load).unwrap().len(), 2);
    assert_eq!(cache.load_many(keys.to_vec(), load).unwrap()["bb"], 2);
    let load = |keys: Vec<String>| async {
        Ok::<_, Error>(keys.into_iter().map(|k| (k, 7)).collect::<HashMap<_, _>>())
    };
    let all = [keys[0].clone(), "ccc".to_owned()];
    assert_eq!(block_on(cache.load_many_async(&all, load)).unwrap()["ccc"], 7);
}

#[test]
fn missing_keys_are_absent_and_extra_ones_ignored() {
    over_fronts(|builder, call| {
        let clock = ManualClock::new();
        let cache = builder.soft_ttl(secs(1)).clock(clock.clone()).build();
        cache.insert(4, 4);
        clock.advance(secs(1));
        let source: Source = Arc::new(|_| Ok(vec![(9, 90), (1, 10), (8, 80), (1, 11)]));
        // 4 is stale: this call refreshes it, and the source does not have it any more.
        let got = call(&cache, &[1, 2, 3, 4], &source).unwrap();
        assert_eq!(got.keys().collect::<Vec<_>>(), [&1]);
        assert!([10, 11].contains(&got[&1]));
        assert_eq!((cache.get(&1), cache.len()), (Some(got[&1]), 1));
        assert!([2, 3, 4, 8, 9].iter().all(|key| cache.get(key).is_none()));
    });
}

#[test]
fn stale_keys_are_among_those_that_are_loaded() {
    over_fronts(|builder, call| {
        let (clock, asked) = (ManualClock::new(), Arc::default());
        let cache = builder.soft_ttl(secs(1)).time_to_live(secs(10)).clock(clock.clone()).build();
        cache.insert(1, 1);
        clock.advance(secs(1));
        cache.insert(2, 2);
        assert_eq!(
            call(&cache, &[1, 2, 3], &tenfold(&asked)).unwrap(),
            HashMap::from([(1, 10), (2, 2), (3, 30)])
        );
        assert_eq!(*asked.lock().unwrap(), [[1, 3]]);
        // One that somebody else refreshes is served as it is.
        clock.advance(secs(1));
        let gate = Gate::default();
        thread::scope(|s| {
            let other = s.spawn(|| {
                cache.get_with(&1, || {
                    gate.pass();
                    100
                })
            });
            eventually(|| gate.arrived() == 1);
            assert_eq!(call(&cache, &[1], &tenfold(&asked)).unwrap(), tens([1]));
            assert_eq!(asked.lock().unwrap().len(), 1);
            gate.open();
            assert_eq!(other.join().unwrap(), 100);
        });
    });
}

#[test]
fn an_error_fails_all_keys_but_leaves_what_was_there() {
    over_fronts(|builder, call| {
        let clock = ManualClock::new();
        let cache = builder
            .soft_ttl(secs(1))
            .time_to_live(secs(10))
            .stale_if_error(secs(90))
            .clock(clock.clone())
            .build();
        let fails: Source = Arc::new(|_| Err(boom()));
        cache.insert(1, 1);
        let error = call(&cache, &[1, 2, 3], &fails).unwrap_err();
        assert_eq!(
            (error.kind(), error.downcast_ref::<Error>().unwrap().to_string()),
            (LoadErrorKind::Failed, "boom".into())
        );
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((cache.in_flight().len(), cache.len(), cache.get(&1)), (0, 1, Some(1)));
        // The ladder: a stale value, and one in grace.
        clock.advance(secs(1));
        assert_eq!(call(&cache, &[1], &fails).unwrap(), HashMap::from([(1, 1)]));
        clock.advance(secs(50));
        assert_eq!(cache.get(&1), None);
        assert_eq!(call(&cache, &[1], &fails).unwrap(), HashMap::from([(1, 1)]));
        assert_eq!(cache.stats().grace_hits, 1);
        // One key without a value is enough for an error.
        assert_eq!(call(&cache, &[1, 2], &fails).unwrap_err().kind(), LoadErrorKind::Failed);
        assert_eq!(call(&cache, &[1, 2], &tenfold(&Arc::default())).unwrap(), tens([1, 2]));
    });
}

#[test]
fn the_fallback_is_the_last_rung() {
    over_fronts(|builder, call| {
        let cache = builder.fallback(|key| (*key < 3).then_some(100 + key)).build();
        let fails: Source = Arc::new(|_| Err(boom()));
        assert_eq!(call(&cache, &[1, 2], &fails).unwrap(), HashMap::from([(1, 101), (2, 102)]));
        assert_eq!((cache.stats().fallbacks, cache.len()), (2, 0));
        assert_eq!(call(&cache, &[2, 3], &fails).unwrap_err().kind(), LoadErrorKind::Failed);
        // What is absent is no failure.
        let none: Source = Arc::new(|_| Ok(Vec::new()));
        assert_eq!(call(&cache, &[1], &none).unwrap(), HashMap::new());
    });
}

#[test]
fn an_error_is_shared_with_those_who_have_joined() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (cache, gate) = (builder.build(), Gate::default());
        thread::scope(|s| {
            let many = s.spawn(|| {
                cache.load_many([1, 2], |_| {
                    gate.pass();
                    Err::<[(u32, u32); 0], _>(boom())
                })
            });
            eventually(|| gate.arrived() == 1);
            let single = s.spawn(|| cache.try_get_with(&2, || Ok::<_, Error>(2)));
            let other = s.spawn(|| cache.load_many([1, 2], |_| never_called()));
            let never = s.spawn(|| cache.get_with(&1, || 7));
            until_waiting(&cache, 4);
            gate.open();
            let errors = [
                many.join().unwrap().unwrap_err(),
                single.join().unwrap().unwrap_err(),
                other.join().unwrap().unwrap_err(),
            ];
            assert!(
                errors.iter().all(|e| e.downcast_ref::<Error>().is_some_and(|e| e.to_string() == "boom"))
            );
            assert_eq!(never.join().unwrap(), 7);
        });
    });
    over_tasks(|builder: Builder<u32, u32>| {
        let (cache, door) = (builder.build(), Door::default());
        let stop = door.clone();
        let many = Task::waiting(cache.load_many_async([1, 2], |_| async move {
            stop.pass().await;
            Err::<[(u32, u32); 0], _>(boom())
        }));
        let single = Task::waiting(cache.try_get_with_async(&2, async { Ok::<_, Error>(2) }));
        let load = |_| async { never_called() };
        let other = Task::waiting(cache.load_many_async([1, 2], load));
        assert_eq!(waiting(&cache), 3);
        door.open();
        assert!(many.finish().unwrap_err().downcast_ref::<Error>().is_some());
        assert!(single.finish().unwrap_err().downcast_ref::<Error>().is_some());
        assert!(other.finish().unwrap_err().downcast_ref::<Error>().is_some());
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((cache.in_flight().len(), cache.len()), (0, 0));
    });
}

#[test]
fn a_panic_resumes_and_those_who_have_joined_look_again() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (cache, gate) = (builder.build(), Gate::default());
        thread::scope(|s| {
            let many = s.spawn(|| {
                panic_of(|| {
                    cache.load_many([1, 2], |_| -> Result<[(u32, u32); 0], Error> {
                        gate.pass();
                        panic!("boom")
                    })
                })
            });
            eventually(|| gate.arrived() == 1);
            let others = [1, 2].map(|key| {
                let cache = &cache;
                s.spawn(move || cache.get_with(&key, || 10 * key))
            });
            until_waiting(&cache, 2);
            gate.open();
            assert_eq!(
                (many.join().unwrap(), others.map(|o| o.join().unwrap())),
                ("boom".to_owned(), [10, 20])
            );
        });
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((cache.in_flight().len(), cache.stats().loader_panics), (0, 1));
    });
    over_tasks(|builder: Builder<u32, u32>| {
        let (cache, door) = (builder.build(), Door::default());
        let stop = door.clone();
        let load = |_| async move {
            stop.pass().await;
            boo::<Result<[(u32, u32); 0], Error>>("boom")
        };
        let many = Task::waiting(panics(cache.load_many_async([1, 2], load)));
        let others = Tasks::new(4, |n| cache.get_with_async(&[1, 2, 1, 2][n], async move { 10 + n as u32 }));
        assert_eq!(waiting(&cache), 4);
        door.open();
        let got = others.finish();
        assert!(got[0] == got[2] && got[1] == got[3], "{got:?}");
        assert_eq!(many.finish().map(drop), Err("boom".to_owned()));
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((cache.in_flight().len(), cache.stats().loader_panics, cache.stats().loads), (0, 1, 4));
    });
}

#[test]
fn it_joins_single_loads_and_they_join_it() {
    over_fronts(|builder, call| {
        let (cache, gate, asked) = (builder.build(), Gate::default(), Arc::default());
        let (stop, inner) = (gate.clone(), tenfold(&asked));
        let slow: Source = Arc::new(move |keys| {
            stop.pass();
            inner(keys)
        });
        let cache = &cache;
        thread::scope(|s| {
            let single = s.spawn(|| {
                cache.get_with(&1, || {
                    gate.pass();
                    100
                })
            });
            eventually(|| gate.arrived() == 1);
            let join = s.spawn(|| {
                eventually(|| gate.arrived() == 2);
                let got = cache.get_with(&2, || unreachable!("it joins"));
                assert_eq!(cache.get_with(&1, || unreachable!("it has come")), 100);
                got
            });
            let watch = s.spawn(|| {
                // The single one has the call of many, and that one `join`.
                until_waiting(cache, 2);
                gate.open();
            });
            let got = call(cache, &[1, 2, 3], &slow).unwrap();
            assert_eq!(got, HashMap::from([(1, 100), (2, 20), (3, 30)]));
            watch.join().unwrap();
            assert_eq!((single.join().unwrap(), join.join().unwrap()), (100, 20));
        });
        assert_eq!((asked.lock().unwrap().clone(), cache.stats().loads), (vec![vec![2, 3]], 3));
    });
}

#[test]
fn what_it_has_claimed_is_settled_before_it_waits() {
    // Two calls with the other one's key, and the first of each under way: neither waits for what the other has to do.
    over_fronts(|builder, call| {
        let (cache, both) = (builder.build(), std::sync::Barrier::new(2));
        for round in 0..20 {
            let keys = [4 * round, 4 * round + 1, 4 * round + 2];
            let asked = Arc::default();
            thread::scope(|s| {
                let (cache, both, asked) = (&cache, &both, &asked);
                let tasks = [keys, [keys[2], keys[1], keys[0]]].map(|keys| {
                    s.spawn(move || {
                        both.wait();
                        let load = |keys: &[u32]| tenfold(asked)(keys.to_vec());
                        cache.load_many(keys, load).unwrap()
                    })
                });
                for task in tasks {
                    assert_eq!(task.join().unwrap(), tens(keys));
                }
            });
            let mut loaded = asked.lock().unwrap().concat();
            loaded.sort_unstable();
            assert_eq!(loaded, keys);
            assert_eq!(call(&cache, &keys, &tenfold(&asked)).unwrap(), tens(keys));
        }
    });
}

#[test]
fn overlapping_calls_of_threads_and_tasks_load_each_key_once() {
    over_tasks(|builder: Builder<u32, u32>| {
        let cache = builder.build();
        let loads: Arc<Vec<Tally>> = Arc::new((0..64).map(|_| Tally::default()).collect());
        let rounds = scaled(20, 500);
        for round in 0..rounds {
            thread::scope(|s| {
                for t in 0..4 {
                    let (cache, loads) = (&cache, &loads);
                    s.spawn(move || {
                        let mut random = common::Random((8 * round + t) as u64);
                        for _ in 0..4 {
                            let keys: Vec<u32> = (0..12).map(|_| random.below(64) as u32).collect();
                            let source = {
                                let loads = loads.clone();
                                move |keys: &[u32]| {
                                    keys.iter().for_each(|key| _ = loads[*key as usize].add());
                                    Ok::<_, Error>(
                                        keys.iter().map(|key| (*key, 10 * key)).collect::<Vec<_>>(),
                                    )
                                }
                            };
                            let got = match t {
                                0 | 1 => cache.load_many(&keys, source).unwrap(),
                                2 => {
                                    let load = |keys: Vec<u32>| async move {
                                        yield_now().await;
                                        source(&keys)
                                    };
                                    block_on(cache.load_many_async(&keys, load)).unwrap()
                                }
                                _ => {
                                    let loads = loads.clone();
                                    let single = |key: &u32| {
                                        let (key, loads) = (*key, loads.clone());
                                        let load = async move {
                                            loads[key as usize].add();
                                            10 * key
                                        };
                                        (key, block_on(cache.get_with_async(&key, load)))
                                    };
                                    keys.iter().map(single).collect()
                                }
                            };
                            assert!(keys.iter().all(|key| got[key] == 10 * key));
                        }
                    });
                }
            });
            assert!(loads.iter().all(|n| n.get() <= round + 1), "a key was loaded twice");
            eventually(|| cache.in_flight().is_empty());
            assert!(cache.in_flight().is_empty());
            cache.invalidate_all();
        }
    });
}

#[test]
fn the_wait_for_somebody_elses_load_has_a_deadline() {
    over_tasks(|builder: Builder<u32, u32>| {
        let (clock, door) = (ManualClock::new(), Door::default());
        let cache = builder.wait_timeout(secs(2)).stale_if_error(secs(50)).clock(clock.clone()).build();
        cache.insert_with_ttl(2, 2, secs(1));
        clock.advance(secs(1));
        let stuck = Tasks::new(2, |n| {
            let stop = door.clone();
            cache.get_with_async(&[1, 2][n], async move {
                stop.pass().await;
                7
            })
        });
        let load =
            |keys: Vec<u32>| async move { Ok::<_, Error>(keys.into_iter().map(|key| (key, 10 * key))) };
        let grace = Task::waiting(cache.load_many_async([2, 3], load));
        let late = Task::waiting(cache.load_many_async([1, 4], load));
        thread::scope(|s| {
            let thread = s.spawn(|| {
                cache.load_many([1, 5], |keys| {
                    Ok::<_, Error>(keys.iter().map(|key| (*key, 50)).collect::<Vec<_>>())
                })
            });
            until_waiting(&cache, 3);
            clock.advance(secs(2));
            assert_eq!(grace.finish().unwrap(), HashMap::from([(2, 2), (3, 30)]));
            for error in [late.finish().unwrap_err(), thread.join().unwrap().unwrap_err()] {
                assert_eq!(error.kind(), LoadErrorKind::TimedOut);
            }
        });
        // No load came of it, and what was loaded stays.
        let stats = cache.stats();
        assert_eq!((stats.wait_timeouts, stats.loads, stats.takeovers, stats.grace_hits), (3, 5, 0, 1));
        assert_eq!((cache.get(&3), cache.get(&4), cache.get(&5)), (Some(30), Some(40), Some(50)));
        door.open();
        assert_eq!(stuck.finish(), [7, 7]);
    });
}

#[test]
fn a_load_that_it_has_joined_is_given_up() {
    over_tasks(|builder: Builder<u32, u32>| {
        let (cache, door, stopped) = (builder.build(), Door::default(), Door::default());
        let panicking = |key: u32| {
            let (stop, cache) = (door.clone(), &cache);
            let load = async move {
                stop.pass().await;
                boo("boom")
            };
            Task::waiting(panics(async move { cache.get_with_async(&key, load).await }))
        };
        let load =
            |keys: Vec<u32>| async move { Ok::<_, Error>(keys.into_iter().map(|key| (key, 10 * key))) };
        // Its own load is still to be had.
        let (one, two) = (panicking(1), panicking(2));
        let free = Task::waiting(cache.load_many_async([1, 2], load));
        // Its own has been called already.
        let spent = Task::waiting(cache.load_many_async([1, 3], load));
        let waits = Task::waiting(cache.get_with_async(&4, {
            let stop = stopped.clone();
            async move {
                stop.pass().await;
                4
            }
        }));
        door.open();
        assert!(one.finish().is_err() && two.finish().is_err());
        let (free, spent) = (free.finish(), spent.finish());
        assert_eq!(free.unwrap(), tens([1, 2]));
        // Who is first leads; the other one joins it, or has nothing left to load with.
        assert!(
            spent.as_ref().map_or_else(|e| e.kind() == LoadErrorKind::Panicked, |got| *got == tens([1, 3]))
        );
        assert_eq!(cache.get(&3), Some(30));
        stopped.open();
        assert_eq!(waits.finish(), 4);
        eventually(|| cache.in_flight().is_empty());
    });
}

#[test]
fn cycles_through_many_keys_are_told() {
    over_shapes(|builder: Builder<u32, u32>| {
        let cache = builder.build();
        let one = |key: u32| move |_: &[u32]| Ok::<_, LoadError>([(key, 0)]);
        // Each key of the call, by each method.
        for inner in [1, 2, 3] {
            let around = cache.load_many([1, 2, 3], |_| {
                cache.try_get_with(&inner, || Ok::<_, Error>(1)).map(|n| [(inner, n)])
            });
            assert!(is_cycle(&around.unwrap_err()));
            let around = cache.load_many([1, 2, 3], |_| cache.load_many([inner], one(inner)));
            assert!(is_cycle(&around.unwrap_err()));
            let around =
                cache.try_get_with(&inner, || cache.load_many([1, 2, 3], one(1)).map(|got| got[&inner]));
            assert!(is_cycle(&around.unwrap_err()));
        }
        let text = panic_of(|| {
            let put = |_: &[u32]| {
                cache.compute(&2, |_| Op::Put(1));
                Ok::<_, Error>([(1, 1)])
            };
            cache.load_many([1, 2], put)
        });
        assert!(text.contains("waits for itself"), "{text}");
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((cache.in_flight().len(), cache.len()), (0, 0));
        // Other keys are no cycle.
        let through = cache.load_many([1, 2], |keys| {
            cache.load_many([3, 4], |keys| {
                Ok::<_, LoadError>(keys.iter().map(|k| (*k, *k)).collect::<Vec<_>>())
            })?;
            Ok::<_, LoadError>(keys.iter().map(|key| (*key, 0)).collect::<Vec<_>>())
        });
        assert_eq!((through.unwrap().len(), cache.len()), (2, 4));
    });
}

#[test]
fn cycles_through_many_keys_are_told_to_tasks() {
    over_tasks(|builder: Builder<u32, u32>| {
        let cache = builder.build();
        for inner in [1, 2, 3] {
            let again = cache.clone();
            let load = |_| async move {
                again.try_get_with_async(&inner, async { Ok::<_, Error>(1) }).await.map(|n| [(inner, n)])
            };
            assert!(is_cycle(&block_on(cache.load_many_async([1, 2, 3], load)).unwrap_err()));
            let again = cache.clone();
            let load = |_| async move {
                let load = |_| async { Ok::<[(u32, u32); 0], Error>([]) };
                again.load_many_async([inner], load).await
            };
            assert!(is_cycle(&block_on(cache.load_many_async([1, 2, 3], load)).unwrap_err()));
            let again = cache.clone();
            let load = async move {
                let load = |keys: Vec<u32>| async { Ok::<_, Error>(keys.into_iter().map(|key| (key, key))) };
                again.load_many_async([1, 2, 3], load).await.map(|got| got[&inner])
            };
            assert!(is_cycle(&block_on(cache.try_get_with_async(&inner, load)).unwrap_err()));
            eventually(|| cache.in_flight().is_empty());
            // What it loaded before it met the cycle is right.
            cache.invalidate_all();
        }
    });
}

#[test]
fn cycles_through_many_keys_are_told_across_tasks() {
    over_tasks(|builder: Builder<u32, u32>| {
        let cache = builder.build();
        for on_threads in [false, true] {
            // 1 and 2 here need 4, and 3 and 4 there need 1.
            let (a, b) = (Door::default(), Door::default());
            let call = |keys: [u32; 2], needs: u32, mine: Door, other: Door| {
                let (cache, again) = (&cache, cache.clone());
                async move {
                    let load = |keys: Vec<u32>| async move {
                        mine.open();
                        other.pass().await;
                        let n = again.try_get_with_async(&needs, async { Ok::<_, Error>(9) }).await?;
                        Ok::<_, LoadError>(keys.into_iter().map(move |key| (key, n)))
                    };
                    cache.load_many_async(keys, load).await
                }
            };
            let one = call([1, 2], 4, a.clone(), b.clone());
            let two = call([3, 4], 1, b, a);
            let results = if on_threads {
                thread::scope(|s| {
                    let two = s.spawn(|| block_on(two));
                    [block_on(one), two.join().unwrap()]
                })
            } else {
                let both = block_on(smol::future::zip(one, two));
                [both.0, both.1]
            };
            let mut errors = results.iter().filter_map(|r| r.as_ref().err()).peekable();
            assert!(errors.peek().is_some(), "one of the two is told: {results:?}");
            assert!(errors.all(is_cycle), "{results:?}");
            eventually(|| cache.in_flight().is_empty());
            cache.invalidate_all();
        }
    });
}

#[test]
fn a_dropped_call_leaves_its_load_to_those_who_have_joined() {
    over_tasks(|builder: Builder<u32, u32>| {
        let (cache, door, alive) = (builder.build(), Door::default(), Tally::default());
        let (stop, token) = (door.clone(), Counted::new(0, &alive));
        let load = |keys: Vec<u32>| async move {
            stop.pass().await;
            drop(token);
            Ok::<_, Error>(keys.into_iter().map(|key| (key, 10 * key)))
        };
        let mut many = Task::waiting(cache.load_many_async([1, 2, 3], load));
        eventually(|| door.arrived() == 1);
        let single = Task::waiting(cache.get_with_async(&2, async { unreachable!("it joins") }));
        many.run();
        drop(many);
        // All other entries are again what they were before.
        eventually(|| cache.in_flight().len() == 1);
        assert_eq!((cache.in_flight()[0].key, waiting(&cache), alive.get()), (2, 1, 1));
        assert_eq!(block_on(cache.get_with_async(&1, async { 11 })), 11);
        door.open();
        assert_eq!(
            (single.finish(), cache.get(&1), cache.get(&2), cache.get(&3)),
            (20, Some(11), Some(20), None)
        );
        eventually(|| alive.get() == 0 && cache.in_flight().is_empty());
    });
}

#[test]
fn a_dropped_call_leaves_nothing_behind() {
    over_tasks(|builder: Builder<u32, u32>| {
        let (cache, alive) = (builder.build(), Tally::default());
        cache.insert(1, 1);
        cache.expire(&1);
        for polls in 0..4 {
            let token = Counted::new(0, &alive);
            let load = |keys: Vec<u32>| async move {
                yield_now().await;
                std::future::pending::<()>().await;
                drop(token);
                Ok::<_, Error>(keys.into_iter().map(|key| (key, 10 * key)))
            };
            let mut many = Task::new(cache.load_many_async([1, 2, 3], load));
            (0..polls).for_each(|_| _ = many.poll());
            drop(many);
            eventually(|| alive.get() == 0 && cache.in_flight().is_empty());
            assert_eq!((cache.len(), cache.get(&1), cache.stats().load_failures), (1, Some(1), 0));
        }
    });
}

#[test]
fn one_call_is_one_task_of_a_spawner() {
    let kept = Kept::default();
    let cache = plain::<u32, u32>().spawner(kept.clone()).build();
    let load = |keys: Vec<u32>| async move {
        yield_now().await;
        Ok::<_, Error>(keys.into_iter().map(|key| (key, 10 * key)))
    };
    let mut many = Task::waiting(cache.load_many_async([1, 2, 3], load));
    many.run();
    assert_eq!((many.has_ended(), kept.len(), kept.run()), (false, 1, 1));
    assert_eq!((cache.len(), many.finish().unwrap()), (3, tens([1, 2, 3])));
    // Dropped half-way, it leaves the load to the call.
    let mut many = Task::waiting(cache.load_many_async([4, 5], load));
    let mut task = Task::new(kept.take().pop().unwrap());
    task.poll();
    drop(task);
    many.run();
    assert_eq!(many.finish().unwrap(), tens([4, 5]));
    let elsewhere = plain::<u32, u32>().spawner(elsewhere).build();
    assert_eq!(block_on(elsewhere.load_many_async([4, 5], load)).unwrap(), tens([4, 5]));
}

#[test]
fn a_write_in_between_wins() {
    over_fronts(|builder, call| {
        let cache = builder.build();
        let home = cache.clone();
        let source: Source = Arc::new(move |keys| {
            home.insert(1, 111);
            home.invalidate(&2);
            Ok(keys.into_iter().map(|key| (key, 10 * key)).collect())
        });
        // The call gets what it has loaded, and of what is outdated nothing is stored.
        assert_eq!(call(&cache, &[1, 2, 3], &source).unwrap(), tens([1, 2, 3]));
        assert_eq!((cache.get(&1), cache.get(&2), cache.get(&3)), (Some(111), None, Some(30)));
        assert_eq!(cache.stats().fenced, 2);
    });
}

#[test]
fn many_keys_in_a_small_cache() {
    over_fronts(|builder, call| {
        let cache = builder.max_capacity(3).build();
        let keys: Vec<u32> = (0..50).collect();
        let got = call(&cache, &keys, &tenfold(&Arc::default())).unwrap();
        assert!(got.len() == 50 && got.iter().all(|(key, value)| *value == 10 * key));
        cache.run_pending_tasks();
        eventually(|| cache.in_flight().is_empty());
        assert!(cache.len() <= 3 && cache.in_flight().is_empty());
    });
}

#[test]
fn the_lease_of_many_keys_ends_like_that_of_one() {
    over_tasks(|builder: Builder<u32, u32>| {
        let (clock, door) = (ManualClock::new(), Door::default());
        let cache = builder.lease(ms(100)).clock(clock.clone()).build();
        let stop = door.clone();
        let many = Task::waiting(cache.load_many_async([1, 2], |keys| async move {
            stop.pass().await;
            Ok::<_, Error>(keys.into_iter().map(|key| (key, 10 * key)))
        }));
        let other = Task::waiting(cache.get_with_async(&1, async { 11 }));
        clock.advance(ms(100));
        assert_eq!(other.finish(), 11);
        door.open();
        assert_eq!(many.finish().unwrap(), tens([1, 2]));
        assert_eq!((cache.get(&1), cache.get(&2)), (Some(11), Some(20)));
        let stats = cache.stats();
        assert_eq!((stats.takeovers, stats.fenced), (1, 1));
    });
}
