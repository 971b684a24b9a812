//! Loads that wait for themselves are told so, and those that do not are left alone: `cargo test --test cycle`.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::{Builder, Gate, Sut, eventually, over_shapes, panic_of, plain, quietly, until_waiting};
use quell::{LoadError, LoadErrorKind, Op};
use std::sync::{Arc, Barrier, OnceLock};
use std::thread;

/// Whether a cycle is at the bottom of an error.
fn is_cycle(error: &LoadError) -> bool {
    error.kind() == LoadErrorKind::Cycle || error.downcast_ref::<LoadError>().is_some_and(is_cycle)
}

/// Loads the first key by way of the rest.
fn chain(cache: &Sut<char, u32>, keys: &[char]) -> Result<u32, LoadError> {
    match keys {
        [] => Ok(0),
        [key, rest @ ..] => cache.try_get_with(key, || chain(cache, rest).map(|n| n + 1)),
    }
}

#[test]
fn a_loads_itself() {
    over_shapes(|builder: Builder<char, u32>| {
        let cache = builder.build();
        for keys in [&['a', 'a'][..], &['a', 'b', 'a'], &['a', 'b', 'b'], &['a', 'b', 'c', 'd', 'e', 'a']] {
            let error = chain(&cache, keys).unwrap_err();
            assert!(is_cycle(&error), "{keys:?}: {error:?}");
            assert_eq!((cache.in_flight().len(), cache.len()), (0, 0));
        }
        // Nothing stays behind: the same chain without the end works.
        assert_eq!(chain(&cache, &['a', 'b', 'c']).unwrap(), 3);
    });
}

#[test]
fn every_method_tells_a_cycle() {
    over_shapes(|builder: Builder<char, u32>| {
        let cell: Arc<OnceLock<Sut<char, u32>>> = Arc::default();
        let home = Arc::downgrade(&cell);
        let load = move |key: &char| home.upgrade().unwrap().get().unwrap().get_or_load(key);
        let cache = builder.name("loop").loader(load).build();
        cell.set(cache.clone()).unwrap();
        let inside = |call: &dyn Fn() -> Result<u32, LoadError>| cache.try_get_with(&'a', call).unwrap_err();
        assert!(is_cycle(&cache.get_or_load(&'a').unwrap_err()));
        assert!(is_cycle(&inside(&|| cache.get_or_load(&'a'))));
        assert!(is_cycle(&inside(&|| cache.ask(&'a').load().map(|a| a.value))));
        assert!(is_cycle(&inside(&|| cache.ask(&'a').load_with(|| 1).map(|a| a.value))));
        let never: [&dyn Fn(); 4] = [
            &|| _ = cache.get_with(&'a', || cache.get_with(&'a', || 1)),
            &|| _ = cache.optionally_get_with(&'a', || cache.optionally_get_with(&'a', || None)),
            &|| _ = cache.compute(&'a', |_| Op::Put(cache.get_with(&'a', || 1))),
            &|| {
                _ = cache.get_with(&'a', || {
                    cache.compute(&'a', |_| Op::Keep);
                    1
                })
            },
        ];
        for call in never {
            let text = panic_of(call);
            assert!(text.contains("waits for itself") && text.contains("loop -> loop"), "{text}");
        }
        assert_eq!((cache.in_flight().len(), cache.len()), (0, 0));
    });
}

#[test]
fn what_does_not_wait_is_no_cycle() {
    over_shapes(|builder: Builder<char, u32>| {
        let cache = builder.loader_fn(|_| Ok::<_, LoadError>(5)).build();
        let value = cache.get_with(&'a', || {
            assert_eq!((cache.get(&'a'), cache.peek(&'a'), cache.contains_key(&'a')), (None, None, false));
            assert_eq!(cache.ask(&'a').get().unwrap_err().kind(), LoadErrorKind::NotCached);
            assert_eq!(cache.ask(&'a').only_if_cached().load().unwrap_err().kind(), LoadErrorKind::NotCached);
            assert!(cache.refresh(&'a'), "it is under way");
            1
        });
        assert_eq!(value, 1);
        // A load may write its own key: it is fenced then, and may load anew.
        let value = cache.get_with(&'b', || {
            cache.insert('b', 10);
            cache.get_with(&'b', || unreachable!()) + 1
        });
        assert_eq!((value, cache.get(&'b')), (11, Some(10)));
        let value = cache.get_with(&'c', || {
            cache.invalidate(&'c');
            cache.get_with(&'c', || 20) + 1
        });
        assert_eq!((value, cache.get(&'c')), (21, Some(20)));
        // A stale or fresh value of its own key is a plain hit.
        cache.insert('d', 1);
        cache.expire(&'d');
        assert_eq!(cache.get_with(&'d', || cache.get_with(&'d', || unreachable!()) + 1), 2);
    });
}

#[test]
fn across_two_threads() {
    over_shapes(|builder: Builder<char, u32>| {
        let (cache, both) = (builder.build(), Barrier::new(2));
        for _ in 0..20 {
            let results = thread::scope(|s| {
                let threads = [('a', 'b'), ('b', 'a')].map(|(one, two)| {
                    let (cache, both) = (&cache, &both);
                    s.spawn(move || {
                        cache.try_get_with(&one, || {
                            both.wait();
                            cache.try_get_with(&two, || Ok::<_, LoadError>(9))
                        })
                    })
                });
                threads.map(|t| t.join().unwrap())
            });
            assert!(results.iter().flatten().all(|v| *v == 9));
            let mut errors = results.iter().filter_map(|r| r.as_ref().err()).peekable();
            assert!(errors.peek().is_some(), "one of the two is told");
            assert!(errors.all(is_cycle));
            assert!(cache.in_flight().is_empty());
            cache.invalidate_all();
        }
    });
}

#[test]
fn across_three_threads() {
    let (cache, all) = (plain::<u32, u32>().build(), Barrier::new(3));
    for _ in 0..20 {
        let results = thread::scope(|s| {
            let threads = [0, 1, 2].map(|n| {
                let (cache, all) = (&cache, &all);
                s.spawn(move || {
                    cache.try_get_with(&n, || {
                        all.wait();
                        cache.try_get_with(&((n + 1) % 3), || Ok::<_, LoadError>(9))
                    })
                })
            });
            threads.map(|t| t.join().unwrap())
        });
        let errors: Vec<_> = results.iter().filter_map(|r| r.as_ref().err()).collect();
        assert!(!errors.is_empty() && errors.into_iter().all(is_cycle));
        cache.invalidate_all();
    }
}

#[test]
fn infallible_callers_across_two_threads_panic() {
    let (cache, both) = (plain::<char, u32>().name("stock").build(), Barrier::new(2));
    let results = thread::scope(|s| {
        let threads = [('a', 'b'), ('b', 'a')].map(|(one, two)| {
            let (cache, both) = (&cache, &both);
            s.spawn(move || {
                quietly(|| {
                    cache.get_with(&one, || {
                        both.wait();
                        cache.get_with(&two, || 9)
                    })
                })
                .map_err(|payload| payload.downcast_ref::<String>().cloned())
            })
        });
        threads.map(|t| t.join().unwrap())
    });
    let texts: Vec<_> = results.into_iter().filter_map(Result::err).flatten().collect();
    assert!(!texts.is_empty());
    assert!(texts.iter().all(|text| text.contains("stock -> stock")), "{texts:?}");
    assert!(cache.in_flight().is_empty());
}

#[test]
fn across_two_caches() {
    let users = plain::<u32, u32>().name("users").build();
    let teams = plain::<u32, u32>().name("teams").build();
    let around = users
        .try_get_with(&1, || teams.try_get_with(&1, || users.try_get_with(&1, || Ok::<_, LoadError>(1))));
    let error = around.unwrap_err();
    assert!(is_cycle(&error));
    let text = panic_of(|| users.get_with(&1, || teams.get_with(&1, || users.get_with(&1, || 1))));
    assert!(text.contains("users -> teams -> users"), "{text}");
    // Across threads as well.
    let both = Barrier::new(2);
    let results = thread::scope(|s| {
        let threads = [(&users, &teams), (&teams, &users)].map(|(one, two)| {
            let both = &both;
            s.spawn(move || {
                one.try_get_with(&1, || {
                    both.wait();
                    two.try_get_with(&1, || Ok::<_, LoadError>(9))
                })
            })
        });
        threads.map(|t| t.join().unwrap())
    });
    assert!(
        results.iter().any(Result::is_err) && results.iter().filter_map(|r| r.as_ref().err()).all(is_cycle)
    );
}

#[test]
fn chains_and_diamonds_are_no_cycles() {
    over_shapes(|builder: Builder<char, u32>| {
        let cache = builder.build();
        assert_eq!(chain(&cache, &['a', 'b', 'c', 'd', 'e', 'f']).unwrap(), 6);
        cache.invalidate_all();
        // A needs B and C, both need D.
        let d = || cache.get_with(&'d', || 1);
        let a =
            cache.get_with(&'a', || cache.get_with(&'b', || d() + 10) + cache.get_with(&'c', || d() + 100));
        assert_eq!((a, cache.len(), cache.stats().loads), (112, 4, 6 + 4));
    });
}

#[test]
fn the_same_key_in_nested_caches_is_no_cycle() {
    let levels: Vec<Sut<u32, u32>> = (0..5).map(|_| plain().build()).collect();
    fn down(levels: &[Sut<u32, u32>]) -> u32 {
        levels.split_first().map_or(0, |(first, rest)| first.get_with(&1, || down(rest) + 1))
    }
    assert_eq!(down(&levels), 5);
    assert!(levels.iter().all(|level| level.len() == 1));
}

#[test]
fn a_diamond_over_threads_is_no_cycle() {
    for _ in 0..5 {
        over_shapes(|builder: Builder<char, u32>| {
            let (cache, gate) = (builder.build(), Gate::default());
            let get_d = || cache.get_with(&'d', || unreachable!());
            thread::scope(|s| {
                // D is slow. B and C wait for it, A for B, and another for C and then A.
                let d = s.spawn(|| {
                    cache.get_with(&'d', || {
                        gate.pass();
                        1
                    })
                });
                eventually(|| gate.arrived() == 1);
                let b = s.spawn(|| cache.get_with(&'b', || get_d() + 10));
                let c = s.spawn(|| cache.get_with(&'c', || get_d() + 100));
                until_waiting(&cache, 2);
                let a = s.spawn(|| cache.get_with(&'a', || cache.get_with(&'b', || unreachable!()) + 1_000));
                until_waiting(&cache, 3);
                let x = s.spawn(|| {
                    cache.get_with(&'x', || {
                        cache.get_with(&'c', || unreachable!()) + cache.get_with(&'a', || unreachable!())
                    })
                });
                until_waiting(&cache, 4);
                gate.open();
                assert_eq!((d.join().unwrap(), b.join().unwrap(), c.join().unwrap()), (1, 11, 101));
                assert_eq!((a.join().unwrap(), x.join().unwrap()), (1_011, 1_112));
            });
        });
    }
}

#[test]
fn many_threads_over_an_ordered_graph_see_no_cycle() {
    // Each load needs smaller keys only, so no cycle is possible; joins and nested loads meet in every way.
    over_shapes(|builder: Builder<u32, u64>| {
        let cache = builder.build();
        fn sum(cache: &Sut<u32, u64>, n: u32) -> Result<u64, LoadError> {
            cache.try_get_with(&n, || match n {
                0 | 1 => Ok::<u64, LoadError>(n.into()),
                _ => Ok(sum(cache, n - 1)? + sum(cache, n - 2)?),
            })
        }
        for round in 0..30 {
            thread::scope(|s| {
                for t in 0..4 {
                    let cache = &cache;
                    s.spawn(move || assert!(sum(cache, 20 - (t + round) % 3).is_ok()));
                }
            });
            cache.invalidate_all();
        }
    });
}

#[test]
fn an_expiry_that_asks_for_the_key_it_is_about() {
    let itself: Arc<OnceLock<Sut<char, u32>>> = Arc::default();
    let nested = itself.clone();
    let expiry = move |key: &char, _: &u32, _: Option<std::time::Duration>| {
        if let Some(cache) = nested.get() {
            let error = cache.try_get_with(key, || Ok::<_, std::fmt::Error>(0)).unwrap_err();
            assert!(is_cycle(&error));
        }
        quell::Ttl::default()
    };
    let cache = plain::<char, u32>().expire_after(expiry).build();
    assert!(itself.set(cache.clone()).is_ok());
    assert_eq!(cache.get_with(&'a', || 1), 1);
    assert_eq!((cache.get(&'a'), cache.stats().takeovers), (Some(1), 0));
}
