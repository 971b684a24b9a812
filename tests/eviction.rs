//! The bound on what is stored, and the listener that is told of what goes: `cargo test --test eviction` (`QUELL_LONG=1` runs
//! longer).
//!
//! Which entry goes next is measured by `benches/hit_ratio.rs`; here is what must hold whatever the policy chooses.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::{
    Builder, Gate, Hashing, Queue, Random, Sut, Told, With, assert_weights_add_up, eventually, ms,
    over_shapes, plain, quietly, scaled, secs, until_waiting,
};
use quell::{
    Cache, DefaultHashBuilder, LoadContext, LoadErrorKind, Loaded, ManualClock, Op, Outcome, Provenance,
    RemovalCause,
};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

type Error = std::io::Error;

const EXPIRED: RemovalCause = RemovalCause::Expired;
const EXPLICIT: RemovalCause = RemovalCause::Explicit;
const REPLACED: RemovalCause = RemovalCause::Replaced;
const SIZE: RemovalCause = RemovalCause::Size;

/// One table and the default number of tables.
fn over_shards(mut body: impl FnMut(Builder<u64, u64>)) {
    body(plain().shards(1));
    body(plain());
}

/// What an entry weighs where the value says so.
fn by_value(_: &u64, value: &u64) -> u32 {
    u32::try_from(*value).unwrap()
}

// The bound.

#[test]
fn fifty_times_the_capacity_by_one_thread() {
    let capacity = 200;
    over_shapes(|builder: Builder<u64, u64>| {
        let cache = builder.max_capacity(capacity).build();
        for key in 0..50 * capacity {
            if key % 2 == 0 {
                cache.insert(key, key)
            } else {
                _ = cache.get_with(&key, || key)
            }
            // What was just stored is there, whatever the order.
            assert_eq!(cache.get(&key), Some(key));
            assert!(cache.len() as u64 <= capacity && cache.weighted_size() <= capacity);
        }
        assert_eq!(cache.len() as u64, capacity, "it is full");
        assert_eq!(cache.stats().evictions.size, 49 * capacity);
        assert_weights_add_up(&cache, |_, _| 1);
    });
}

#[test]
fn fifty_times_the_capacity_by_many_threads() {
    let (threads, capacity) = (4, 500);
    over_shards(|builder| {
        let cache = builder.max_capacity(capacity).build();
        // What several tables hold is summed up while it moves.
        let is_exact = format!("{cache:?}").contains("len") && cache.stats().hits == 0;
        let (left, most) = (AtomicU64::new(threads), capacity + threads);
        thread::scope(|s| {
            for t in 0..threads {
                let (cache, left) = (&cache, &left);
                s.spawn(move || {
                    for n in 0..50 * capacity / threads {
                        let key = n * threads + t;
                        if n % 2 == 0 {
                            cache.insert(key, key)
                        } else {
                            _ = cache.get_with(&key, || key)
                        }
                        assert!(cache.weighted_size() <= most, "{} of {most}", cache.weighted_size());
                    }
                    left.fetch_sub(1, Ordering::SeqCst);
                });
            }
            while left.load(Ordering::SeqCst) > 0 {
                assert!(is_exact && cache.weighted_size() <= most, "{} of {most}", cache.weighted_size());
                thread::yield_now();
            }
        });
        cache.run_pending_tasks();
        assert!(cache.len() as u64 <= capacity && cache.weighted_size() <= capacity);
        assert_weights_add_up(&cache, |_, _| 1);
    });
}

#[test]
fn the_length_of_one_table_is_bounded_too() {
    let (threads, capacity) = (4, 100);
    let cache = plain::<u64, u64>().shards(1).max_capacity(capacity).build();
    thread::scope(|s| {
        for t in 0..threads {
            let cache = &cache;
            s.spawn(move || {
                for n in 0..scaled(5_000, 500_000) as u64 {
                    cache.insert(n * threads + t, n);
                    assert!(cache.len() as u64 <= capacity + threads, "{}", cache.len());
                }
            });
        }
    });
    cache.run_pending_tasks();
    assert!(cache.len() as u64 <= capacity);
}

#[test]
fn as_many_entries_as_the_capacity_fit() {
    for capacity in [1, 2, 3, 10, 100, 1_000, 10_000] {
        over_shards(|builder| {
            let told = Told::default();
            let cache = builder.max_capacity(capacity).eviction_listener(told.listener()).build();
            for key in 0..capacity {
                if key % 2 == 0 { cache.insert(key, key) } else { _ = cache.get_with(&key, || key) }
            }
            assert_eq!((cache.len() as u64, cache.weighted_size()), (capacity, capacity));
            assert!((0..capacity).all(|key| cache.get(&key) == Some(key)));
            assert_eq!(told.take(), []);
            // One more is one too many.
            cache.insert(capacity, capacity);
            assert_eq!((cache.len() as u64, cache.get(&capacity)), (capacity, Some(capacity)));
            assert_eq!(told.causes(), [SIZE]);
        });
    }
}

#[test]
fn an_entry_of_half_the_capacity_fits_beside_small_ones() {
    // One budget over all tables: with a share of it for each, this one would fit into none.
    over_shards(|builder| {
        let cache = builder.max_capacity(1_000).weigher(by_value).build();
        (0..500).for_each(|key| cache.insert(key, 1));
        cache.insert(1_000, 500);
        assert_eq!((cache.len(), cache.weighted_size(), cache.get(&1_000)), (501, 1_000, Some(500)));
        // And in a full cache: small ones go for it.
        let cache = plain().max_capacity(1_000).weigher(by_value).build();
        (0..1_000).for_each(|key| cache.insert(key, 1));
        assert_eq!(cache.get_with(&1_000, || 500), 500);
        assert_eq!((cache.get(&1_000), cache.weighted_size()), (Some(500), 1_000));
        assert_weights_add_up(&cache, by_value);
    });
}

#[test]
fn capacity_zero_stores_nothing_and_shares_loads() {
    for weight in [0, 1] {
        over_shapes(|builder: Builder<u64, u64>| {
            let told = Told::default();
            let cache = builder
                .max_capacity(0)
                .weigher(move |_, _| weight)
                .eviction_listener(told.listener())
                .loader_fn(|key| Ok::<_, Error>(*key))
                .build();
            cache.insert(1, 1);
            assert_eq!((cache.get_with(&2, || 2), cache.get_or_load(&3).unwrap()), (2, 3));
            assert_eq!(cache.compute(&4, |_| Op::Put(4)), Outcome::Inserted(4));
            assert!((1..5).all(|key| cache.get(&key).is_none()));
            let gate = Gate::default();
            let load = || {
                gate.pass();
                7
            };
            thread::scope(|s| {
                let threads = [(); 5].map(|()| s.spawn(|| cache.get_with(&5, load)));
                until_waiting(&cache, 4);
                gate.open();
                assert_eq!(threads.map(|t| t.join().unwrap()), [7; 5]);
            });
            assert_eq!(gate.arrived(), 1, "one load");
            assert_eq!((cache.len(), cache.weighted_size(), cache.iter().count()), (0, 0, 0));
            assert_eq!(told.take(), [], "nothing was in the cache, so nothing has left it");
        });
    }
}

#[test]
fn capacity_one() {
    over_shapes(|builder: Builder<u64, u64>| {
        let cache = builder.max_capacity(1).build();
        for key in 0..1_000 {
            match key % 3 {
                0 => cache.insert(key, key),
                1 => _ = cache.get_with(&key, || key),
                _ => _ = cache.compute(&key, |_| Op::Put(key)),
            }
            assert_eq!((cache.get(&key), cache.len(), cache.weighted_size()), (Some(key), 1, 1));
            cache.insert(key, key + 1);
            assert_eq!((cache.get(&key), cache.len()), (Some(key + 1), 1));
        }
        assert_eq!(cache.remove(&999), Some(1_000));
        assert_eq!((cache.len(), cache.weighted_size()), (0, 0));
    });
}

#[test]
fn what_was_loaded_or_inserted_is_in_the_cache_afterwards() {
    // No admission filter refuses it, however popular the others are.
    for capacity in [1, 2, 10, 64, 1_000] {
        over_shards(|builder| {
            let cache = builder.max_capacity(capacity).build();
            (0..capacity).for_each(|key| cache.insert(key, key));
            for key in 0..5_000 {
                for hot in 0..capacity.min(8) {
                    let _ = cache.get(&hot);
                }
                let new = 10_000 + key;
                if key % 2 == 0 {
                    cache.insert(new, new)
                } else {
                    _ = cache.get_with(&new, || new)
                }
                assert_eq!(cache.get(&new), Some(new));
            }
        });
    }
}

#[test]
fn replacing_at_full_capacity_evicts_nobody() {
    over_shapes(|builder: Builder<u64, u64>| {
        let told = Told::default();
        let cache = builder.max_capacity(50).eviction_listener(told.listener()).build();
        (0..50).for_each(|key| cache.insert(key, key));
        for round in 1..5 {
            for key in 0..50 {
                match key % 3 {
                    0 => cache.insert(key, 100 * round + key),
                    1 => _ = cache.compute(&key, |_| Op::Put(100 * round + key)),
                    _ => {
                        cache.expire(&key);
                        cache.get_with(&key, || 100 * round + key);
                    }
                }
            }
        }
        assert_eq!((cache.len(), cache.weighted_size()), (50, 50));
        assert!((0..50).all(|key| cache.get(&key) == Some(400 + key)));
        assert_eq!(told.causes(), [REPLACED; 200]);
    });
}

#[test]
fn a_heavier_value_makes_others_go_and_not_itself() {
    over_shapes(|builder: Builder<u64, u64>| {
        let cache = builder.max_capacity(100).weigher(by_value).build();
        for round in 0..60 {
            (0..100).for_each(|key| cache.insert(key, 1));
            let key = round % 100;
            match round % 3 {
                0 => cache.insert(key, 90),
                1 => _ = cache.compute(&key, |_| Op::Put(90)),
                _ => {
                    cache.expire(&key);
                    cache.get_with(&key, || 90);
                }
            }
            assert_eq!(cache.get(&key), Some(90), "round {round}");
            assert!(cache.weighted_size() <= 100, "{}", cache.weighted_size());
            // Up to the whole capacity.
            cache.insert(key, 100);
            assert_eq!((cache.get(&key), cache.len(), cache.weighted_size()), (Some(100), 1, 100));
            // A lighter one makes room.
            cache.insert(key, 2);
            assert_eq!(cache.weighted_size(), 2);
        }
        assert_weights_add_up(&cache, by_value);
    });
}

#[test]
fn entries_of_weight_zero_take_no_room() {
    over_shapes(|builder: Builder<u64, u64>| {
        let told = Told::default();
        let cache = builder.max_capacity(10).weigher(by_value).eviction_listener(told.listener()).build();
        (0..200).for_each(|key| cache.insert(key, 0));
        assert_eq!((cache.len(), cache.weighted_size()), (200, 0));
        assert_eq!(told.take(), []);
        (200..210).for_each(|key| _ = cache.get_with(&key, || 1));
        assert_eq!((cache.len(), cache.weighted_size()), (210, 10));
        assert!((200..210).all(|key| cache.get(&key) == Some(1)));
        // They can be removed, and may be dropped like any other.
        assert_eq!((cache.remove(&5), told.take()), (Some(0), vec![(5, 0, EXPLICIT)]));
        (210..400).for_each(|key| cache.insert(key, 1));
        assert_eq!(cache.weighted_size(), 10);
        assert!(told.causes().iter().all(|cause| *cause == SIZE));
        // One becomes heavier and lighter again.
        cache.insert(5, 0);
        cache.insert(5, 10);
        assert_eq!(cache.weighted_size(), 10);
        cache.insert(5, 0);
        assert_eq!(cache.weighted_size(), 0);
        assert_weights_add_up(&cache, by_value);
    });
}

#[test]
fn an_entry_heavier_than_the_capacity_is_given_and_not_stored() {
    type Store = fn(&Sut<u64, u64>);
    let ways: [(&str, Store); 6] = [
        ("insert", |c| c.insert(1, 101)),
        ("insert_with_ttl", |c| c.insert_with_ttl(1, 101, secs(5))),
        ("get_with", |c| assert_eq!(c.get_with(&1, || 101), 101)),
        ("try_get_with", |c| assert_eq!(c.try_get_with(&1, || Ok::<_, Error>(101)).unwrap(), 101)),
        ("get_or_load", |c| assert!([3, 101].contains(&c.get_or_load(&1).unwrap()))),
        ("compute", |c| {
            let outcome = c.compute(&1, |_| Op::Put(101));
            assert!(matches!(outcome, Outcome::Inserted(101) | Outcome::Replaced(101)));
        }),
    ];
    for (name, store) in ways {
        over_shapes(|builder: Builder<u64, u64>| {
            let (told, queue) = (Told::default(), Queue::default());
            let cache = builder
                .max_capacity(100)
                .weigher(by_value)
                .eviction_listener(told.listener())
                .executor(queue.clone())
                .loader_fn(|_| Ok::<_, Error>(101))
                .build();
            (10..20).for_each(|key| cache.insert(key, 5));
            store(&cache);
            assert_eq!((cache.get(&1), cache.stats().oversized, cache.len()), (None, 1, 10), "{name}");
            assert_eq!(told.take(), [], "{name}: nothing had to go for it");
            // What was there is outdated, and goes.
            cache.insert(1, 3);
            cache.expire(&1);
            store(&cache);
            queue.run();
            assert_eq!((cache.get(&1), cache.stats().oversized), (None, 2), "{name}");
            assert_eq!(told.take(), [(1, 3, REPLACED)], "{name}");
            assert_eq!((cache.len(), cache.weighted_size()), (10, 50));
            // The whole capacity is not too much.
            cache.insert(1, 100);
            assert_eq!((cache.get(&1), cache.weighted_size()), (Some(100), 100));
        });
    }
}

#[test]
fn one_that_is_too_heavy_is_shared_by_those_who_wait() {
    let (cache, gate) = (plain::<u64, u64>().max_capacity(10).weigher(by_value).build(), Gate::default());
    let load = || {
        gate.pass();
        11
    };
    thread::scope(|s| {
        let threads = [(); 6].map(|()| s.spawn(|| cache.get_with(&1, load)));
        until_waiting(&cache, 5);
        gate.open();
        assert_eq!(threads.map(|t| t.join().unwrap()), [11; 6]);
    });
    assert_eq!((gate.arrived(), cache.stats().oversized, cache.len()), (1, 1, 0));
}

// `set_capacity`.

#[test]
fn set_capacity_down_to_zero_and_up_again() {
    over_shapes(|builder: Builder<u64, u64>| {
        let told = Told::default();
        let cache = builder.max_capacity(100).eviction_listener(told.listener()).build();
        (0..100).for_each(|key| cache.insert(key, key));
        for (capacity, gone) in [(100, 0), (99, 1), (50, 49), (1, 49), (0, 1)] {
            cache.set_capacity(capacity);
            assert_eq!((cache.len() as u64, cache.weighted_size()), (capacity, capacity));
            assert_eq!(told.causes(), vec![SIZE; gone]);
        }
        cache.insert(1, 1);
        assert_eq!((cache.get(&1), cache.get_with(&2, || 2), cache.len()), (None, 2, 0));
        cache.set_capacity(10);
        (0..100).for_each(|key| cache.insert(key, key));
        assert_eq!((cache.len(), cache.get(&99)), (10, Some(99)));
        cache.set_capacity(1_000);
        (0..1_000).for_each(|key| cache.insert(key, key));
        assert_eq!(cache.len(), 1_000);
        assert_eq!(told.take().len(), 90 + 10, "ten were there still, and have been written over");
    });
}

#[test]
fn set_capacity_of_an_unbounded_cache() {
    over_shapes(|builder: Builder<u64, u64>| {
        let (cache, n) = (builder.build(), 500);
        let mut keys = 0..;
        let mut fill = |n| {
            for key in keys.by_ref().take(n) {
                if key % 2 == 0 { cache.insert(key, key) } else { _ = cache.get_with(&key, || key) }
            }
        };
        for _ in 0..3 {
            fill(n);
            assert!(cache.len() >= n && cache.weighted_size() >= n as u64);
            cache.set_capacity(10);
            assert_eq!((cache.len(), cache.weighted_size()), (10, 10));
            fill(n);
            assert_eq!((cache.len(), cache.weighted_size()), (10, 10));
            // No limit again.
            cache.set_capacity(u64::MAX);
            fill(n);
            assert_eq!((cache.len(), cache.weighted_size()), (10 + n, 10 + n as u64));
            // As good as no limit.
            cache.set_capacity(u64::MAX - 1);
            fill(n);
            assert_eq!(cache.len(), 10 + 2 * n);
            cache.set_capacity(0);
            assert_eq!((cache.len(), cache.weighted_size()), (0, 0));
            cache.set_capacity(u64::MAX);
        }
    });
}

#[test]
fn set_capacity_in_units_of_weight() {
    over_shards(|builder| {
        let cache = builder.weigher(by_value).build();
        (0..100).for_each(|key| cache.insert(key, key));
        assert_eq!(cache.weighted_size(), 4950);
        cache.set_capacity(1_000);
        assert!(cache.weighted_size() <= 1_000 && cache.len() >= 10);
        assert_weights_add_up(&cache, by_value);
        cache.set_capacity(3);
        assert!(cache.iter().all(|(_, weight)| weight <= 3));
    });
}

#[test]
fn set_capacity_while_refreshes_are_under_way() {
    // What was stored while there was no limit must be found by the evictor, also if it was just being loaded when the limit
    // came, and whatever became of that load.
    type End = fn(&Sut<u64, u64>, &Queue);
    let ends: [(&str, End); 6] = [
        ("the job is dropped", |_, q| drop(q.take())),
        ("the load ends", |_, q| _ = q.run()),
        ("expire", |c, q| {
            (0..100).for_each(|key| _ = c.expire(&key));
            q.run();
        }),
        ("retain", |c, q| {
            c.retain(|_, _| true);
            q.run();
        }),
        ("insert", |c, q| {
            (0..100).for_each(|key| c.insert(key, key));
            q.run();
        }),
        ("compute and keep", |c, q| {
            drop(q.take());
            (0..100).for_each(|key| _ = c.compute(&key, |_| Op::Keep));
        }),
    ];
    for (name, end) in ends {
        over_shards(|builder| {
            let queue = Queue::default();
            let cache = builder.executor(queue.clone()).loader_fn(|key| Ok::<_, Error>(*key)).build();
            (0..100).for_each(|key| cache.insert(key, key));
            (0..100).for_each(|key| assert!(cache.refresh(&key)));
            cache.set_capacity(4);
            assert_eq!(cache.len(), 100, "nothing that is being loaded is evicted");
            end(&cache, &queue);
            cache.run_pending_tasks();
            assert_eq!((cache.len(), cache.weighted_size()), (4, 4), "{name}");
            cache.set_capacity(0);
            assert_eq!(cache.len(), 0, "{name}");
        });
    }
}

#[test]
fn set_capacity_to_zero_while_refreshes_are_under_way() {
    for weight in [0, 1] {
        over_shards(|builder| {
            let queue = Queue::default();
            let cache = builder
                .max_capacity(100)
                .weigher(move |_, _| weight)
                .executor(queue.clone())
                .loader_fn(|key| Ok::<_, Error>(*key))
                .build();
            (0..10).for_each(|key| cache.insert(key, key));
            (0..10).for_each(|key| assert!(cache.refresh(&key)));
            cache.set_capacity(0);
            let jobs = queue.take();
            for (nth, job) in jobs.into_iter().enumerate() {
                if nth % 2 == 0 { job.run() } else { drop(job) }
            }
            cache.run_pending_tasks();
            assert_eq!((cache.len(), cache.weighted_size()), (0, 0), "weight {weight}");
        });
    }
}

#[test]
fn set_capacity_against_inserting_threads() {
    let rounds = scaled(25, 3_000) as u64;
    over_shards(|builder| {
        let (told, done) = (Told::default(), AtomicBool::new(false));
        let cache = builder.max_capacity(1_000).eviction_listener(told.listener()).build();
        let inserted = AtomicU64::new(0);
        thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    while !done.load(Ordering::SeqCst) {
                        let value = inserted.fetch_add(1, Ordering::SeqCst);
                        let key = value % 5_000;
                        if value.is_multiple_of(2) {
                            cache.insert(key, value)
                        } else {
                            _ = cache.get_with(&key, || value)
                        }
                    }
                });
            }
            // Two that change it, each to a limit, to none, to zero: it comes back from each, whoever else inserts.
            for t in 0..2 {
                let cache = &cache;
                let each = s.spawn(move || {
                    let mut random = Random(t);
                    for _ in 0..rounds {
                        let capacity = [0, 1, 10, 300, 3_000, u64::MAX, u64::MAX, u64::MAX - 1];
                        cache.set_capacity(capacity[random.below(8) as usize]);
                        thread::yield_now();
                    }
                });
                if t == 1 {
                    each.join().unwrap();
                }
            }
            cache.set_capacity(20);
            done.store(true, Ordering::SeqCst);
        });
        cache.set_capacity(20);
        cache.run_pending_tasks();
        assert!(cache.len() <= 20 && cache.weighted_size() <= 20, "{}", cache.weighted_size());
        assert_weights_add_up(&cache, |_, _| 1);
        // Each can be found by the evictor.
        cache.set_capacity(1);
        assert!(cache.len() <= 1);
        let told = told.take();
        let unique: HashSet<u64> = told.iter().map(|(_, value, _)| *value).collect();
        assert_eq!(told.len(), unique.len(), "none was told twice");
    });
}

// What is in use, and what has expired.

#[test]
fn what_is_being_loaded_is_not_evicted() {
    // Capacity one, and the loads of two keys interleaved: with and without values that were there before.
    for before in [false, true] {
        over_shapes(|builder: Builder<u64, u64>| {
            let cache = builder.max_capacity(1).build();
            if before {
                cache.insert(1, 10);
            }
            let gates = [(); 2].map(|()| Gate::default());
            let lead = |key: u64, gate: &Gate| {
                cache.ask(&key).max_age(Duration::ZERO).load_with(|| {
                    gate.pass();
                    key
                })
            };
            thread::scope(|s| {
                let leaders = [(1, &gates[0]), (2, &gates[1])].map(|(key, gate)| {
                    let leader = s.spawn(move || lead(key, gate).unwrap().value);
                    eventually(|| gate.arrived() == 1);
                    leader
                });
                let cache = &cache;
                let join = |key: u64| {
                    s.spawn(move || {
                        cache.ask(&key).max_age(Duration::ZERO).load_with(|| unreachable!("{key}"))
                    })
                };
                let joiners = [1, 2, 1, 2].map(join);
                until_waiting(cache, 4);
                // Others come and go meanwhile.
                for key in 10..200 {
                    cache.insert(key, key);
                    assert_eq!(cache.get(&key), Some(key));
                }
                assert_eq!(cache.peek(&1), before.then_some(10), "what is to be replaced stays until then");
                assert_eq!(cache.in_flight().len(), 2);
                gates.iter().for_each(Gate::open);
                assert_eq!(leaders.map(|t| t.join().unwrap()), [1, 2]);
                assert_eq!(joiners.map(|t| t.join().unwrap().unwrap().value), [1, 2, 1, 2]);
            });
            assert_eq!((gates[0].arrived(), gates[1].arrived(), cache.stats().loads), (1, 1, 2));
            cache.run_pending_tasks();
            assert_eq!((cache.len(), cache.weighted_size()), (1, 1));
        });
    }
}

#[test]
fn interleaved_loads_of_one_thread_in_a_cache_for_one() {
    over_shapes(|builder: Builder<u64, u64>| {
        let cache = builder.max_capacity(1).build();
        for round in 0..100 {
            let (a, b) = (2 * round, 2 * round + 1);
            let outer = cache.get_with(&a, || cache.get_with(&b, || 5) + cache.get(&b).unwrap());
            assert_eq!((outer, cache.get(&a), cache.len()), (10, Some(10), 1));
        }
        assert_eq!((cache.stats().loads, cache.stats().fenced), (200, 0));
    });
}

#[test]
fn a_ttl_shorter_than_the_load_in_a_full_cache() {
    over_shapes(|builder: Builder<u64, u64>| {
        let (clock, gate) = (ManualClock::new(), Gate::default());
        let cache = builder.max_capacity(2).time_to_live(secs(1)).clock(clock.clone()).build();
        (10..20).for_each(|key| cache.insert(key, key));
        let load = || {
            gate.pass();
            clock.advance(secs(5));
            7
        };
        thread::scope(|s| {
            let threads = [(); 6].map(|()| s.spawn(|| cache.get_with(&1, load)));
            until_waiting(&cache, 5);
            (20..30).for_each(|key| cache.insert(key, key));
            gate.open();
            assert_eq!(threads.map(|t| t.join().unwrap()), [7; 6]);
        });
        assert_eq!((gate.arrived(), cache.get(&1)), (1, Some(7)));
        clock.advance(secs(1));
        cache.run_pending_tasks();
        assert_eq!((cache.len(), cache.weighted_size()), (0, 0));
    });
}

#[test]
fn refreshes_at_once_are_limited_where_there_is_a_bound() {
    // What is being refreshed can't be evicted, so only an eighth of it may be, or eight.
    for (entries, limit) in [(8, 8), (50, 8), (64, 8), (80, 10), (400, 50)] {
        over_shards(|builder| {
            let (clock, queue) = (ManualClock::new(), Queue::default());
            let cache = builder
                .max_capacity(entries)
                .soft_ttl(secs(1))
                .clock(clock.clone())
                .executor(queue.clone())
                .loader_fn(|key| Ok::<_, Error>(*key + 1))
                .build();
            (0..entries).for_each(|key| cache.insert(key, key));
            for round in 0..3 {
                clock.advance(secs(1));
                let stale = |key: u64| cache.ask(&key).load().unwrap().provenance;
                for _ in 0..2 {
                    for key in 0..entries {
                        assert!(matches!(stale(key), Provenance::Stale { .. }), "round {round}");
                    }
                }
                assert_eq!(queue.len() as u64, limit, "of {entries} entries");
                // A closure of the caller's own is held back as well: it gets the stale value.
                let busy = cache.in_flight().iter().map(|f| f.key).collect::<HashSet<_>>();
                if let Some(idle) = (0..entries).find(|key| !busy.contains(key)) {
                    assert_eq!(cache.get_with(&idle, || unreachable!()), cache.peek(&idle).unwrap());
                }
                // When they have come to an end, however, the next ones begin.
                let jobs = queue.take();
                for (nth, job) in jobs.into_iter().enumerate() {
                    if nth % 3 == 0 { drop(job) } else { job.run() }
                }
                (0..entries).for_each(|key| _ = stale_or_fresh(&cache, key));
                assert!(queue.run() >= 1);
            }
        });
    }
    // Without a bound there is no limit.
    let (clock, queue) = (ManualClock::new(), Queue::default());
    let cache = plain::<u64, u64>()
        .soft_ttl(secs(1))
        .clock(clock.clone())
        .executor(queue.clone())
        .loader_fn(|key| Ok::<_, Error>(*key))
        .build();
    (0..100).for_each(|key| cache.insert(key, key));
    clock.advance(secs(1));
    (0..100).for_each(|key| _ = cache.get_or_load(&key));
    assert_eq!(queue.len(), 100);
}

fn stale_or_fresh(cache: &Sut<u64, u64>, key: u64) -> Provenance {
    cache.ask(&key).load().unwrap().provenance
}

#[test]
fn the_number_of_refreshes_is_kept_on_every_way() {
    // If one way out were not counted, after some time no refresh would begin any more, or too many.
    let (clock, queue) = (ManualClock::new(), Queue::default());
    let cache = plain::<u64, u64>()
        .max_capacity(16)
        .soft_ttl(secs(1))
        .time_to_live(secs(100))
        .lease(secs(5))
        .clock(clock.clone())
        .executor(queue.clone())
        .loader(With(|key: &u64, _: &LoadContext<u64>| {
            Ok(match key {
                0 => Loaded::not_modified(),
                1 => Loaded::absent(),
                2 => Loaded::new(2).do_not_store(),
                3 => return Err("no".into()),
                4 => quietly(|| panic!("boom")).unwrap_or_else(|p| std::panic::resume_unwind(p)),
                key => Loaded::new(*key),
            })
        }))
        .build();
    for round in 0..50_u64 {
        (0..16).for_each(|key| cache.insert(key, key));
        clock.advance(secs(1));
        (0..16).for_each(|key| _ = cache.get_or_load(&((key + round) % 16)));
        assert_eq!((queue.len(), cache.in_flight().len()), (8, 8), "round {round}");
        match round % 8 {
            0 => cache.invalidate_all(),
            1 => (0..16).for_each(|key| cache.insert(key, key)),
            2 => (0..16).for_each(|key| _ = cache.expire(&key)),
            3 => cache.retain(|key, _| key % 2 == 0),
            4 => (0..16).for_each(|key| _ = cache.remove(&key)),
            // Taken over, since they still wait on the queue.
            5 => (0..16).for_each(|key| _ = cache.ask(&key).max_age(Duration::ZERO).load_with(|| key)),
            6 => drop(queue.take()),
            _ => {}
        }
        queue.run();
        assert_eq!(cache.in_flight(), []);
        // The failures' pause.
        clock.advance(secs(1));
    }
}

#[test]
fn a_remembered_failure_takes_no_room_of_its_own_and_can_be_evicted() {
    over_shapes(|builder: Builder<u64, u64>| {
        let clock = ManualClock::new();
        let cache = builder.max_capacity(10).time_to_live(secs(9)).clock(clock.clone()).build();
        let fail = |key: u64| cache.try_get_with(&key, || Err::<u64, _>(Error::other("no")));
        // Without a value there is nothing to remember.
        (0..100).for_each(|key| assert_eq!(fail(key).unwrap_err().kind(), LoadErrorKind::Failed));
        assert_eq!((cache.len(), cache.weighted_size()), (0, 0));
        // With one, both are one entry.
        for key in 0..10 {
            cache.insert(key, key);
            cache.expire(&key);
            assert_eq!(fail(key).unwrap(), key);
        }
        assert_eq!((cache.len(), cache.weighted_size()), (10, 10));
        cache.set_capacity(3);
        assert_eq!((cache.len(), cache.weighted_size(), cache.stats().evictions.size), (3, 3, 7));
        clock.advance(secs(9));
        cache.run_pending_tasks();
        assert_eq!((cache.len(), cache.weighted_size()), (0, 0));
    });
}

#[test]
fn after_a_sweep_what_has_expired_is_gone_and_the_rest_is_there() {
    over_shapes(|builder: Builder<u64, u64>| {
        let (clock, told) = (ManualClock::new(), Told::default());
        let cache = builder.max_capacity(100).clock(clock.clone()).eviction_listener(told.listener()).build();
        (0..100).for_each(|key| cache.insert_with_ttl(key, key, secs(if key % 2 == 0 { 1 } else { 100 })));
        clock.advance(secs(1));
        cache.run_pending_tasks();
        assert_eq!((cache.len(), cache.weighted_size()), (50, 50));
        assert!((0..100).all(|key| cache.get(&key).is_some() == (key % 2 == 1)));
        assert_eq!(told.sorted(), (0..100).step_by(2).map(|n| (n, n, EXPIRED)).collect::<Vec<_>>());
        // There is room for as many again.
        (200..250).for_each(|key| cache.insert(key, key));
        assert_eq!((cache.len(), told.take()), (100, vec![]));
    });
}

#[test]
fn what_has_expired_goes_before_what_lives() {
    // One table, which a write sweeps before it makes room; and so many that a write sweeps nothing but what is in its own.
    for shards in [1, 65_536] {
        let (clock, told) = (ManualClock::new(), Told::default());
        let cache = plain::<u64, u64>()
            .shards(shards)
            .max_capacity(200)
            .clock(clock.clone())
            .eviction_listener(told.listener())
            .build();
        // The oldest half expires, which is met first at the old end of the queue. That it was used does not save it.
        (0..100).for_each(|key| cache.insert_with_ttl(key, key, secs(1)));
        (0..3).for_each(|_| (0..100).for_each(|key| assert_eq!(cache.get(&key), Some(key))));
        (100..200).for_each(|key| cache.insert(key, key));
        clock.advance(secs(1));
        (200..300).for_each(|key| cache.insert(key, key));
        let told = told.take();
        assert!(told.iter().all(|(key, _, cause)| (*cause == EXPIRED) == (*key < 100)), "the cause is right");
        let lost = (100..300).filter(|key| !cache.contains_key(key)).count();
        assert_eq!(lost, 0, "some that live have gone while others had expired, {shards} tables");
    }
}

#[test]
fn a_scan_does_not_wash_out_a_hot_set() {
    // A tenth of the capacity is asked for by two requests in three, as by Zipf's law; the rest is asked for once.
    let zipf: Vec<u64> = (0..1_000).flat_map(|rank| vec![rank; 1_000 / (rank as usize + 1)]).collect();
    let cache = plain::<u64, u64>()
        .shards(1)
        .hasher(Hashing::Spread(DefaultHashBuilder::with_seed(7)))
        .max_capacity(1_000)
        .build();
    let (mut random, mut scan) = (Random(7), 1_000_000..);
    let (mut hits, mut asked) = (0, 0);
    for n in 0..60_000_u64 {
        if n % 3 == 2 {
            cache.get_with(&scan.next().unwrap(), || 0);
            continue;
        }
        let hot = zipf[random.below(zipf.len() as u64) as usize];
        let hit = cache.get(&hot).is_some();
        cache.get_with(&hot, || 0);
        if n > 20_000 {
            (hits, asked) = (hits + u64::from(hit), asked + 1);
        }
    }
    // An order by last use alone gives some 90 %, without a scan it is 100 %.
    assert!(100 * hits > 93 * asked, "{hits} hits of {asked}");
}

// The listener.

/// A cache with times, jobs that wait, and a listener that notes what it is told.
struct Bench {
    cache: Sut<u64, u64>,
    told: Told,
    clock: ManualClock,
    queue: Queue,
}

impl Bench {
    /// Soft 10 s, hard 20 s, grace until 50 s. The loader gives 100 times the key, with exceptions.
    fn new(builder: Builder<u64, u64>) -> Self {
        let (told, clock, queue) = (Told::default(), ManualClock::new(), Queue::default());
        let cache = builder
            .soft_ttl(secs(10))
            .time_to_live(secs(20))
            .stale_if_error(secs(30))
            .lease(secs(5))
            .clock(clock.clone())
            .executor(queue.clone())
            .eviction_listener(told.listener())
            .loader(With(|key: &u64, _: &LoadContext<u64>| {
                Ok(match key {
                    2 => Loaded::absent(),
                    3 => Loaded::new(300).do_not_store(),
                    4 => Loaded::new(400).ttl(Duration::ZERO),
                    5 => Loaded::not_modified(),
                    6 => return Err("no".into()),
                    7 => Loaded::not_modified().do_not_store(),
                    8 => Loaded::not_modified().ttl(Duration::ZERO),
                    key => Loaded::new(100 * key),
                })
            }))
            .build();
        Self { cache, told, clock, queue }
    }
}

#[test]
fn told_once_with_the_cause_on_every_way_out() {
    type Step = fn(&Bench);
    let steps: [(&str, RemovalCause, u64, Step); 20] = [
        ("insert", REPLACED, 1, |b| b.cache.insert(1, 2)),
        ("insert with a TTL", REPLACED, 1, |b| b.cache.insert_with_ttl(1, 2, secs(1))),
        ("insert with a TTL of zero", REPLACED, 1, |b| b.cache.insert_with_ttl(1, 2, Duration::ZERO)),
        ("remove", EXPLICIT, 1, |b| assert_eq!(b.cache.remove(&1), Some(1))),
        ("invalidate", EXPLICIT, 1, |b| b.cache.invalidate(&1)),
        ("invalidate_all", EXPLICIT, 1, |b| b.cache.invalidate_all()),
        ("retain", EXPLICIT, 1, |b| b.cache.retain(|key, _| *key != 1)),
        ("compute and put", REPLACED, 1, |b| _ = b.cache.compute(&1, |_| Op::Put(2))),
        ("compute and remove", EXPLICIT, 1, |b| _ = b.cache.compute(&1, |_| Op::Remove)),
        ("a load that replaces", REPLACED, 1, |b| {
            b.cache.ask(&1).max_age(Duration::ZERO).load_with(|| 2).unwrap();
        }),
        ("a stale value's load", REPLACED, 1, |b| {
            b.cache.expire(&1);
            assert_eq!(b.cache.get_with(&1, || 2), 2);
        }),
        ("a refresh in the background", REPLACED, 1, |b| {
            assert!(b.cache.refresh(&1));
            assert_eq!((b.told.take(), b.queue.run()), (vec![], 1));
        }),
        ("absent by a closure", EXPLICIT, 1, |b| {
            b.cache.expire(&1);
            assert_eq!(b.cache.optionally_get_with(&1, || None), None);
        }),
        ("absent by the loader", EXPLICIT, 2, |b| {
            assert!(b.cache.refresh(&2));
            b.queue.run();
        }),
        ("do_not_store", REPLACED, 3, |b| {
            assert!(b.cache.refresh(&3));
            b.queue.run();
        }),
        ("a load with a TTL of zero", REPLACED, 4, |b| {
            assert!(b.cache.refresh(&4));
            b.queue.run();
        }),
        ("not modified, and not stored", REPLACED, 7, |b| {
            assert!(b.cache.refresh(&7));
            b.queue.run();
        }),
        ("not modified, with a TTL of zero", REPLACED, 8, |b| {
            assert!(b.cache.refresh(&8));
            b.queue.run();
        }),
        ("after a failure", EXPLICIT, 6, |b| {
            b.cache.expire(&6);
            assert_eq!(b.cache.get_or_load(&6).unwrap(), 6);
            assert_eq!((b.queue.run(), b.told.take()), (1, vec![]));
            b.cache.invalidate(&6);
        }),
        ("during a load", EXPLICIT, 1, |b| {
            assert!(b.cache.refresh(&1));
            b.cache.invalidate(&1);
            assert_eq!(b.told.take(), [(1, 1, EXPLICIT)]);
            // What it brings is refused, and nobody is told of that.
            b.queue.run();
            assert_eq!((b.told.take(), b.cache.stats().fenced), (vec![], 1));
            b.cache.insert(1, 1);
            b.cache.invalidate(&1);
        }),
    ];
    for (name, cause, key, step) in steps {
        over_shapes(|builder: Builder<u64, u64>| {
            let bench = Bench::new(builder);
            (1..=9).for_each(|key| bench.cache.insert(key, key));
            assert_eq!(bench.told.take(), [], "{name}");
            step(&bench);
            let told = bench.told.take();
            if name == "invalidate_all" {
                assert_eq!(told.len(), 9);
            }
            let own: Vec<_> = told.into_iter().filter(|(k, ..)| *k == key).collect();
            assert_eq!(own, [(key, key, cause)], "{name}");
            let evictions = bench.cache.stats().evictions;
            assert_eq!(evictions.size + evictions.expired, 0, "{name}");
        });
    }
}

#[test]
fn what_is_past_its_deadline_has_expired_whatever_takes_it_out() {
    type Step = fn(&Bench);
    // Each in grace, and beyond it.
    let steps: [(&str, bool, Step); 16] = [
        ("insert", true, |b| b.cache.insert(1, 2)),
        ("insert with a TTL of zero", true, |b| b.cache.insert_with_ttl(1, 2, Duration::ZERO)),
        ("remove", true, |b| assert_eq!(b.cache.remove(&1), None)),
        ("invalidate", true, |b| b.cache.invalidate(&1)),
        ("invalidate_all", true, |b| b.cache.invalidate_all()),
        ("retain", true, |b| b.cache.retain(|_, _| false)),
        ("compute and put", true, |b| assert_eq!(b.cache.compute(&1, |_| Op::Put(2)), Outcome::Inserted(2))),
        ("compute and remove", true, |b| assert_eq!(b.cache.compute(&1, |_| Op::Remove), Outcome::Absent)),
        ("a load", true, |b| assert_eq!(b.cache.get_with(&1, || 2), 2)),
        ("no such key", true, |b| assert_eq!(b.cache.optionally_get_with(&1, || None), None)),
        ("set_capacity", true, |b| b.cache.set_capacity(0)),
        ("a load that fails", false, |b| {
            let _ = b.cache.try_get_with(&1, || Err::<u64, _>(Error::other("no")));
        }),
        ("get", false, |b| assert_eq!(b.cache.get(&1), None)),
        ("peek", false, |b| assert_eq!(b.cache.peek(&1), None)),
        ("contains_key", false, |b| assert!(!b.cache.contains_key(&1))),
        ("run_pending_tasks", false, |b| b.cache.run_pending_tasks()),
    ];
    for (name, in_grace, step) in steps {
        for now in [20, 49, 50, 1_000] {
            over_shapes(|builder: Builder<u64, u64>| {
                let bench = Bench::new(builder);
                bench.cache.insert(1, 1);
                bench.clock.set(secs(now));
                step(&bench);
                if in_grace || now >= 50 {
                    assert_eq!(bench.told.take(), [(1, 1, EXPIRED)], "{name} at {now}");
                    assert_eq!(bench.cache.stats().evictions.expired, 1);
                } else {
                    assert_eq!((bench.told.take(), bench.cache.len()), (vec![], 1), "{name} at {now}");
                }
            });
        }
    }
}

#[test]
fn what_was_idle_for_too_long_has_expired() {
    over_shapes(|builder: Builder<u64, u64>| {
        let (told, clock) = (Told::default(), ManualClock::new());
        let cache =
            builder.time_to_idle(secs(10)).clock(clock.clone()).eviction_listener(told.listener()).build();
        for key in 1..=4 {
            cache.insert(key, key);
        }
        clock.advance(secs(6));
        assert_eq!(cache.get(&4), Some(4));
        clock.advance(secs(4));
        assert_eq!((cache.get(&1), told.take()), (None, vec![(1, 1, EXPIRED)]));
        cache.insert(2, 20);
        assert!(told.take().contains(&(2, 2, EXPIRED)));
        cache.run_pending_tasks();
        assert_eq!((cache.get(&4), cache.len()), (Some(4), 2));
        told.take();
        clock.advance(secs(10));
        cache.run_pending_tasks();
        assert_eq!(told.sorted(), [(2, 20, EXPIRED), (4, 4, EXPIRED)]);
    });
}

#[test]
fn expired_entries_that_a_write_sweeps_are_told() {
    over_shards(|builder| {
        let (told, clock) = (Told::default(), ManualClock::new());
        let cache =
            builder.time_to_live(secs(10)).clock(clock.clone()).eviction_listener(told.listener()).build();
        (0..100).for_each(|key| cache.insert(key, key));
        clock.advance(secs(10));
        (0..2_000).for_each(|n| _ = cache.get_with(&(1_000 + n % 256), || n));
        let told = told.sorted();
        assert_eq!(told, (0..100).map(|n| (n, n, EXPIRED)).collect::<Vec<_>>());
    });
}

#[test]
fn eviction_by_size_is_told() {
    over_shapes(|builder: Builder<u64, u64>| {
        let (told, clock) = (Told::default(), ManualClock::new());
        let cache = builder
            .max_capacity(10)
            .time_to_live(secs(1))
            .stale_if_error(secs(100))
            .clock(clock.clone())
            .eviction_listener(told.listener())
            .build();
        (0..10).for_each(|key| cache.insert(key, key));
        cache.insert(10, 10);
        let gone = told.take();
        assert!(matches!(gone[..], [(key, value, SIZE)] if key == value && key < 10), "{gone:?}");
        assert_eq!(cache.get(&gone[0].0), None);
        // In grace it may be rescued yet, and goes like any other. It has expired all the same.
        clock.advance(secs(1));
        (20..30).for_each(|key| cache.insert(key, key));
        cache.set_capacity(3);
        cache.set_capacity(0);
        let gone = told.take();
        assert_eq!(gone.len(), 20);
        assert!(gone.iter().all(|(key, _, cause)| *cause == if *key < 20 { EXPIRED } else { SIZE }));
        assert_eq!(cache.stats().evictions.size, 11);
    });
}

#[test]
fn nobody_is_told_of_a_value_that_lives_on_or_never_was() {
    over_shapes(|builder: Builder<u64, u64>| {
        let bench = Bench::new(builder);
        let (cache, gate) = (&bench.cache, Gate::default());
        (1..=9).for_each(|key| cache.insert(key, key));
        // `expire`: the value lives on.
        (1..=9).for_each(|key| assert!(cache.expire(&key)));
        // Not modified: it lives on.
        assert_eq!((cache.get_or_load(&5).unwrap(), bench.queue.run()), (5, 1));
        assert!(matches!(cache.ask(&5).get().unwrap().provenance, Provenance::Fresh { .. }));
        // A failure, and a job that is dropped.
        assert_eq!((cache.get_or_load(&6).unwrap(), bench.queue.run()), (6, 1));
        assert_eq!(cache.get_or_load(&1).unwrap(), 1);
        drop(bench.queue.take());
        assert_eq!(cache.compute(&1, |_| Op::Keep), Outcome::Kept(1));
        assert!(quietly(|| cache.compute(&1, |_| panic!("boom"))).is_err());
        // A load that found nothing to replace, and was not stored.
        assert_eq!(cache.get_or_load(&44).unwrap(), 4_400);
        assert_eq!(cache.optionally_get_with(&45, || None), None);
        cache.insert_with_ttl(46, 1, Duration::ZERO);
        // A refused result.
        thread::scope(|s| {
            let load = s.spawn(|| {
                cache.get_with(&50, || {
                    gate.pass();
                    1
                })
            });
            eventually(|| gate.arrived() == 1);
            cache.insert(50, 99);
            gate.open();
            assert_eq!(load.join().unwrap(), 1);
        });
        assert_eq!((cache.stats().fenced, cache.get(&50)), (1, Some(99)));
        assert_eq!(bench.told.take(), []);
        let Bench { cache, told, .. } = bench;
        drop(cache);
        assert_eq!(told.take(), [], "nor of those that go with the cache");
    });
}

#[test]
fn each_value_that_has_come_is_told_or_still_there() {
    for seed in 0..scaled(6, 500) as u64 {
        over_shapes(|builder: Builder<u64, u64>| {
            let (told, clock, queue) = (Told::default(), ManualClock::new(), Queue::default());
            let mut random = Random(seed);
            // Each value is one of its kind, and its last digit is its weight.
            let values = Arc::new(AtomicU64::new(0));
            let counter = values.clone();
            let cache = builder
                .max_capacity(40)
                .weigher(|_, value| (*value % 4) as u32)
                .soft_ttl(secs(2))
                .time_to_live(secs(5))
                .clock(clock.clone())
                .executor(queue.clone())
                .eviction_listener(told.listener())
                .loader_fn(move |_| Ok::<_, Error>(counter.fetch_add(1, Ordering::SeqCst)))
                .build();
            let new = || values.fetch_add(1, Ordering::SeqCst);
            let mut gone = HashMap::new();
            for _ in 0..1_500 {
                let key = random.below(60);
                match random.below(16) {
                    0..=3 => cache.insert(key, new()),
                    4 | 5 => _ = cache.get_with(&key, new),
                    6 => _ = cache.get_or_load(&key).unwrap(),
                    7 => _ = cache.compute(&key, |_| Op::Put(new())),
                    8 => _ = cache.remove(&key),
                    9 => cache.invalidate(&key),
                    10 => _ = cache.expire(&key),
                    11 => clock.advance(ms(random.below(500))),
                    12 => _ = queue.run(),
                    13 => cache.set_capacity([20, 40, 80, u64::MAX][random.below(4) as usize]),
                    14 if random.below(20) == 0 => cache.retain(|key, _| key % 3 > 0),
                    _ => _ = cache.get(&key),
                }
                for (key, value, cause) in told.take() {
                    assert_eq!(gone.insert(value, (key, cause)), None, "{value} was told twice");
                    assert!(cache.peek(&key) != Some(value), "{value} was told, and is there");
                }
            }
            queue.run();
            let loads_refused = cache.stats().fenced;
            cache.invalidate_all();
            for (_, value, cause) in told.take() {
                assert_eq!(gone.insert(value, (0, cause)), None, "{value} was told twice");
            }
            let came = values.load(Ordering::SeqCst);
            // Those that were never stored are the results of loads that were refused.
            assert_eq!(gone.len() as u64 + loads_refused, came, "seed {seed}");
            assert_eq!((cache.len(), cache.weighted_size()), (0, 0));
            let evictions = cache.stats().evictions;
            let by = |cause| gone.values().filter(|(_, c)| *c == cause).count() as u64;
            assert_eq!(
                [evictions.expired, evictions.explicit, evictions.replaced, evictions.size],
                [by(EXPIRED), by(EXPLICIT), by(REPLACED), by(SIZE)]
            );
        });
    }
}

#[test]
fn the_listener_may_use_the_cache() {
    // Of the same key and of others, in a full cache and in one that is not. It puts back what goes, at first.
    for capacity in [1, 4, 1_000] {
        over_shapes(|builder: Builder<u64, u64>| {
            let home = Arc::new(OnceLock::<Sut<u64, u64>>::new());
            let calls = Arc::new(AtomicU64::new(0));
            let (house, count) = (home.clone(), calls.clone());
            // No value comes twice.
            let values = AtomicU64::new(1_000);
            let cache = builder
                .max_capacity(capacity)
                .eviction_listener(move |key, value, cause| {
                    let (cache, new) = (house.get().unwrap(), || values.fetch_add(1, Ordering::SeqCst));
                    // It is called while nothing is held: a load may run, and wait for others.
                    assert_ne!(cache.get(key), Some(*value), "it has gone");
                    // What it takes out itself it is told of as well, when it has returned: less than sixteen values, so it ends.
                    if count.fetch_add(1, Ordering::SeqCst) % 16 != 0 {
                        return;
                    }
                    let (other, inserted) = (key + 1_000_000, new());
                    cache.insert(other, inserted);
                    // What is told by that may drop it again.
                    assert!([None, Some(inserted)].contains(&cache.get(&other)));
                    assert!(cache.get_with(&(other + 1), new) >= 1_000);
                    assert!([None, Some(inserted)].contains(&cache.remove(&other)));
                    match cause {
                        EXPLICIT => assert!(cache.get_with(key, new) >= 1_000),
                        SIZE => cache.insert(*key, new()),
                        _ => _ = cache.compute(key, |_| Op::Put(new())),
                    }
                    cache.run_pending_tasks();
                })
                .build();
            assert!(home.set(cache.clone()).is_ok());
            for key in 0..300 {
                cache.insert(key % 50, key);
                cache.get_with(&(key % 7), || key);
                cache.invalidate(&(key % 11));
                cache.remove(&(key % 13));
                assert!(cache.weighted_size() <= capacity, "{}", cache.weighted_size());
            }
            cache.retain(|key, _| key % 2 == 0);
            cache.invalidate_all();
            assert_eq!((cache.stats().listener_panics, cache.in_flight().len()), (0, 0));
            assert!(calls.load(Ordering::SeqCst) > 100);
            assert_weights_add_up(&cache, |_, _| 1);
        });
    }
}

#[test]
fn the_listener_is_called_without_a_pin() {
    // By each kind of call: a load in it is not refused, which it would be under a `Pinned`.
    let home = Arc::new(OnceLock::<Sut<u64, u64>>::new());
    let (house, clock) = (home.clone(), ManualClock::new());
    let loads = Arc::new(AtomicU64::new(0));
    let count = loads.clone();
    let cache = plain::<u64, u64>()
        .max_capacity(8)
        .time_to_live(secs(1))
        .clock(clock.clone())
        .eviction_listener(move |key, _, _| {
            let cache = house.get().unwrap();
            let other = Cache::<u64, u64>::builder().build();
            assert_eq!(other.get_with(&1, || 1), 1);
            if *key < 1_000 {
                count.fetch_add(1, Ordering::SeqCst);
                assert_eq!(
                    cache.ask(&(key + 1_000)).max_age(Duration::ZERO).load_with(|| 1).unwrap().value,
                    1
                );
            }
        })
        .build();
    assert!(home.set(cache.clone()).is_ok());
    let calls: [&dyn Fn(); 12] = [
        &|| _ = cache.get(&1),
        &|| _ = cache.read(&1, |v| *v),
        &|| _ = cache.peek(&1),
        &|| _ = cache.contains_key(&1),
        &|| _ = cache.remove(&1),
        &|| _ = cache.get_with(&1, || 5),
        &|| cache.insert(1, 1),
        &|| cache.invalidate(&1),
        &|| cache.invalidate_all(),
        &|| cache.retain(|_, _| false),
        &|| _ = cache.compute(&1, |_| Op::Remove),
        &|| cache.run_pending_tasks(),
    ];
    for (nth, call) in calls.iter().enumerate() {
        for expired in [true, false] {
            cache.insert(1, 1);
            if expired {
                clock.advance(secs(1));
            }
            let before = loads.load(Ordering::SeqCst);
            call();
            let told = loads.load(Ordering::SeqCst) > before;
            assert!(told || !expired && (nth < 4 || nth == 5 || nth == 11), "call {nth}, expired {expired}");
        }
    }
    (100..200).for_each(|key| cache.insert(key, 1));
    cache.set_capacity(0);
    assert_eq!(cache.stats().listener_panics, 0);
    assert_eq!((cache.len(), cache.weighted_size()), (0, 0));
}

#[test]
fn a_listener_that_blocks_stops_nobody() {
    for capacity in [1, 16] {
        let (release, blocked) = mpsc::channel::<()>();
        let (entered, seen) = mpsc::channel();
        let blocked = Mutex::new(Some(blocked));
        let cache = plain::<u64, u64>()
            .shards(1)
            .max_capacity(capacity)
            .eviction_listener(move |_, _, _| {
                // The first call takes the channel along.
                let taken = blocked.lock().unwrap().take();
                if let Some(channel) = taken {
                    entered.send(()).unwrap();
                    let _ = channel.recv();
                }
            })
            .build();
        thread::scope(|s| {
            let stuck = s.spawn(|| (0..=capacity).for_each(|key| cache.insert(key, key)));
            seen.recv().unwrap();
            // All others go on, and what the stuck one has stored is there for them.
            assert_eq!(cache.get(&capacity), Some(capacity));
            for key in 100..1_000 {
                cache.insert(key, key);
                assert_eq!((cache.get(&key), cache.get_with(&(key + 1_000), || 1)), (Some(key), 1));
                assert!(cache.weighted_size() <= capacity);
            }
            cache.retain(|key, _| key % 2 == 0);
            cache.set_capacity(1);
            cache.set_capacity(capacity);
            cache.invalidate_all();
            cache.run_pending_tasks();
            assert_eq!((cache.len(), cache.weighted_size(), cache.in_flight().len()), (0, 0, 0));
            drop(release);
            stuck.join().unwrap();
        });
    }
}

#[test]
fn a_slow_listener_of_a_leader_does_not_delay_those_who_wait() {
    let (release, blocked) = mpsc::channel::<()>();
    let blocked = Mutex::new(blocked);
    let cache = plain::<u64, u64>()
        .max_capacity(1)
        .eviction_listener(move |_, _, _| _ = blocked.lock().unwrap().recv())
        .build();
    cache.insert(1, 1);
    let gate = Gate::default();
    thread::scope(|s| {
        let leader = s.spawn(|| {
            cache.get_with(&2, || {
                gate.pass();
                2
            })
        });
        eventually(|| gate.arrived() == 1);
        let waiters = [(); 3].map(|()| s.spawn(|| cache.get_with(&2, || unreachable!())));
        until_waiting(&cache, 3);
        gate.open();
        assert_eq!(waiters.map(|w| w.join().unwrap()), [2; 3]);
        assert!(!leader.is_finished());
        drop(release);
        assert_eq!(leader.join().unwrap(), 2);
    });
}

#[test]
fn a_listener_that_panics_is_counted_and_all_goes_on() {
    over_shapes(|builder: Builder<u64, u64>| {
        let (clock, calls) = (ManualClock::new(), Arc::new(AtomicU64::new(0)));
        let count = calls.clone();
        let cache = builder
            .max_capacity(10)
            .time_to_live(secs(1))
            .clock(clock.clone())
            .eviction_listener(move |_, _, _| {
                count.fetch_add(1, Ordering::SeqCst);
                quietly(|| panic!("listener")).unwrap_or_else(|p| std::panic::resume_unwind(p))
            })
            .build();
        for key in 0..100 {
            cache.insert(key, key);
            cache.insert(key, key + 1);
            assert_eq!(cache.get_with(&(key + 100), || key), key);
            // The load may have cost it its place.
            assert!(cache.remove(&key).is_none_or(|value| value == key + 1));
            assert!(cache.len() <= 10);
        }
        clock.advance(secs(1));
        assert_eq!(cache.get(&199), None);
        cache.run_pending_tasks();
        // Also while another panic unwinds.
        (0..10).for_each(|key| cache.insert(key, key));
        let asked = AtomicU64::new(0);
        let retain = || cache.retain(|_, _| asked.fetch_add(1, Ordering::SeqCst) > 3 && panic!("retain"));
        assert!(quietly(retain).is_err());
        cache.invalidate_all();
        let stats = cache.stats();
        let evictions = stats.evictions;
        let all = evictions.expired + evictions.explicit + evictions.replaced + evictions.size;
        assert_eq!((stats.listener_panics, all), (calls.load(Ordering::SeqCst), all));
        assert_eq!(stats.listener_panics, all, "each was told once");
        assert_eq!((cache.len(), cache.weighted_size(), cache.in_flight().len()), (0, 0, 0));
    });
}

#[test]
fn the_listener_runs_on_the_thread_that_took_the_value_out() {
    let (told, seen) = mpsc::channel();
    let cache = plain::<u64, u64>()
        .max_capacity(1)
        .eviction_listener(move |_, value, _| told.send((*value, thread::current().id())).unwrap())
        .build();
    thread::scope(|s| {
        let other = s.spawn(|| {
            cache.insert(1, 1);
            cache.insert(2, 2);
            thread::current().id()
        });
        assert_eq!(seen.recv().unwrap(), (1, other.join().unwrap()));
    });
    cache.invalidate(&2);
    assert_eq!(seen.recv().unwrap(), (2, thread::current().id()));
}

/// Each value that is dropped for want of room is put back, as often as it is told: one call leads to the next, and none
/// runs inside another.
#[test]
fn a_listener_that_puts_back_does_not_nest() {
    const TIMES: usize = 20_000;
    let home: Arc<OnceLock<Cache<u64, u64>>> = Arc::default();
    let calls = Arc::new(AtomicUsize::new(0));
    let inside = Arc::new(AtomicUsize::new(0));
    let cache = {
        let (home, calls, inside) = (Arc::downgrade(&home), calls.clone(), inside.clone());
        Cache::builder()
            .max_capacity(10)
            .eviction_listener(move |key: &u64, value: &u64, cause| {
                if cause == RemovalCause::Size && calls.fetch_add(1, Ordering::Relaxed) < TIMES {
                    assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0, "one call after the other");
                    if let Some(cache) = home.upgrade() {
                        cache.get().expect("it is there before the first insert").insert(*key, *value);
                    }
                    inside.fetch_sub(1, Ordering::Relaxed);
                }
            })
            .build()
    };
    assert!(home.set(cache.clone()).is_ok());
    (0..11).for_each(|key| cache.insert(key, key));
    assert_eq!((calls.load(Ordering::Relaxed), cache.len()), (TIMES + 1, 10));
    assert_eq!(cache.stats().listener_panics, 0);
}

/// What one thread takes out, the others who are over the capacity as well do not take out again.
#[test]
fn many_who_are_over_take_no_more_than_one() {
    const CAPACITY: u64 = 20_000;
    let cache: Cache<u64, u64> = Cache::new(CAPACITY);
    (0..CAPACITY).for_each(|key| cache.insert(key, key));
    let (ends, lowest) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
    std::thread::scope(|s| {
        for thread in 1..5_u64 {
            let (cache, ends) = (&cache, &ends);
            s.spawn(move || {
                let mut key = thread << 32;
                while ends.load(Ordering::Relaxed) == 0 {
                    cache.insert(key, key);
                    key += 1;
                }
            });
        }
        cache.set_capacity(CAPACITY / 2);
        for _ in 0..500 {
            lowest.fetch_min(cache.len(), Ordering::Relaxed);
            std::thread::yield_now();
        }
        ends.store(1, Ordering::Relaxed);
    });
    let lowest = lowest.into_inner() as u64;
    assert!(lowest > CAPACITY / 2 * 9 / 10, "{lowest} entries of {}", CAPACITY / 2);
}

#[test]
fn a_detached_refresh_gives_nothing_back_beyond_the_capacity() {
    for by_retain in [false, true] {
        let clock = ManualClock::new();
        let builder = Cache::builder().max_capacity(10).soft_ttl(Duration::from_secs(1)).clock(clock.clone());
        let cache: Cache<u64, u64> = builder.time_to_live(Duration::from_secs(100)).build();
        cache.insert(1, 1);
        clock.advance(Duration::from_secs(2));
        cache.get_with(&1, || {
            cache.set_capacity(0);
            if by_retain {
                cache.retain(|_, _| true)
            } else {
                assert!(cache.expire(&1))
            }
            2
        });
        assert_eq!((cache.len(), cache.get(&1)), (0, None));
    }
}
