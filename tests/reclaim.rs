//! Every value is dropped, exactly once, on every way out of the cache: `cargo test --test reclaim`.
//!
//! The collector is one for the process: a test holds a lock, so that no other test's pin holds up its garbage.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::{
    Builder, Counted, Gate, Queue, Tally, With, eventually, over_shapes, plain, quietly, scaled, secs,
    until_waiting,
};
use quell::{Cache, LoadContext, Loaded, ManualClock, Op};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

type Error = std::io::Error;
type Sut = common::Sut<u64, Counted>;

fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until `left` values live.
#[track_caller]
fn until_left(cache: &Sut, alive: &Tally, left: usize) {
    eventually(|| {
        cache.run_pending_tasks();
        alive.get() == left
    });
}

#[test]
fn every_way_out() {
    type Step = fn(&Sut, &Tally);
    let steps: [(&str, usize, Step); 14] = [
        ("insert", 1, |c, a| c.insert(1, Counted::new(1, a))),
        ("replace", 1, |c, a| (0..50).for_each(|n| c.insert(1, Counted::new(n, a)))),
        ("load", 1, |c, a| _ = c.get_with(&1, || Counted::new(1, a))),
        ("remove", 0, |c, a| {
            c.insert(1, Counted::new(1, a));
            drop(c.remove(&1))
        }),
        ("invalidate", 0, |c, a| {
            c.get_with(&1, || Counted::new(1, a));
            c.invalidate(&1)
        }),
        ("invalidate_all", 0, |c, a| {
            (0..50).for_each(|n| c.insert(n, Counted::new(n, a)));
            c.invalidate_all()
        }),
        ("retain", 25, |c, a| {
            (0..50).for_each(|n| c.insert(n, Counted::new(n, a)));
            c.retain(|_, v| v.0 < 25)
        }),
        ("compute", 1, |c, a| (0..50).for_each(|n| _ = c.compute(&1, |_| Op::Put(Counted::new(n, a))))),
        ("compute and remove", 0, |c, a| {
            c.insert(1, Counted::new(1, a));
            c.compute(&1, |_| Op::Remove);
        }),
        ("expire", 1, |c, a| {
            c.insert(1, Counted::new(1, a));
            (0..50).for_each(|_| assert!(c.expire(&1)))
        }),
        ("expire and load", 1, |c, a| {
            c.insert(1, Counted::new(1, a));
            (0..50).for_each(|n| {
                c.expire(&1);
                c.get_with(&1, || Counted::new(n, a));
            });
        }),
        ("fail", 1, |c, a| {
            c.insert(1, Counted::new(1, a));
            (0..50).for_each(|_| {
                c.expire(&1);
                let _ = c.try_get_with(&1, || Err::<Counted, _>(Error::other("boom")));
            });
        }),
        ("panic", 1, |c, a| {
            c.insert(1, Counted::new(1, a));
            c.expire(&1);
            let panics = || {
                let _held = Counted::new(2, a);
                panic!("boom")
            };
            (0..5).for_each(|_| assert!(quietly(|| c.get_with(&1, panics)).is_err()));
        }),
        ("absence", 0, |c, a| {
            c.insert(1, Counted::new(1, a));
            c.expire(&1);
            assert!(c.optionally_get_with(&1, || None).is_none());
        }),
    ];
    let _alone = alone();
    for (name, left, step) in steps {
        over_shapes(|builder: Builder<u64, Counted>| {
            let (cache, alive) = (builder.build(), Tally::default());
            step(&cache, &alive);
            until_left(&cache, &alive, left);
            assert_eq!(cache.len(), left, "{name}");
            drop(cache);
            assert_eq!(alive.get(), 0, "{name}: a value outlives the cache");
        });
    }
}

#[test]
fn dropping_the_cache_takes_what_this_thread_retired_too() {
    let _alone = alone();
    over_shapes(|builder: Builder<u64, Counted>| {
        let (cache, alive) = (builder.build(), Tally::default());
        (0..10).for_each(|n| cache.insert(n % 3, Counted::new(n, &alive)));
        let _ = cache.get_with(&9, || Counted::new(9, &alive));
        cache.invalidate(&9);
        drop(cache);
        assert_eq!(alive.get(), 0, "at once, the replaced and removed ones as well");
    });
}

#[test]
fn refused_results_are_dropped() {
    let _alone = alone();
    over_shapes(|builder: Builder<u64, Counted>| {
        let (cache, alive, gate) = (builder.build(), Tally::default(), Gate::default());
        thread::scope(|s| {
            let load = s.spawn(|| {
                cache
                    .get_with(&1, || {
                        gate.pass();
                        Counted::new(1, &alive)
                    })
                    .0
            });
            eventually(|| gate.arrived() == 1);
            let joined = [(); 5].map(|()| s.spawn(|| cache.get_with(&1, || unreachable!()).0));
            until_waiting(&cache, 5);
            cache.insert(1, Counted::new(99, &alive));
            gate.open();
            assert_eq!((load.join().unwrap(), joined.map(|j| j.join().unwrap())), (1, [1; 5]));
        });
        until_left(&cache, &alive, 1);
        drop(cache);
        assert_eq!(alive.get(), 0);
    });
}

#[test]
fn background_refreshes_and_what_they_find() {
    let _alone = alone();
    let (clock, queue, alive) = (ManualClock::new(), Queue::default(), Tally::default());
    let live = alive.clone();
    let loader = With(move |key: &u64, _: &LoadContext<Counted>| {
        Ok(match key {
            0 => Loaded::not_modified(),
            1 => Loaded::absent(),
            2 => Loaded::new(Counted::new(2, &live)).do_not_store(),
            3 => return Err("boom".into()),
            _ => Loaded::new(Counted::new(*key, &live)),
        })
    });
    let cache = plain().soft_ttl(secs(1)).clock(clock.clone()).executor(queue.clone()).loader(loader).build();
    (0..6).for_each(|n| cache.insert(n, Counted::new(n, &alive)));
    for round in 0..10 {
        clock.advance(secs(1));
        (0..6).for_each(|n| drop(cache.get_or_load(&n)));
        if round % 3 == 0 { drop(queue.take()) } else { _ = queue.run() }
    }
    drop(queue.take());
    until_left(&cache, &alive, cache.len());
    assert!((4..=6).contains(&cache.len()), "{}", cache.len());
    drop(cache);
    assert_eq!(alive.get(), 0);
}

#[test]
fn expired_values_are_given_back_by_reads_writes_and_upkeep() {
    let _alone = alone();
    over_shapes(|builder: Builder<u64, Counted>| {
        let (clock, alive) = (ManualClock::new(), Tally::default());
        let cache = builder.time_to_live(secs(1)).clock(clock.clone()).build();
        // By a read.
        cache.insert(1, Counted::new(1, &alive));
        clock.advance(secs(1));
        assert!(cache.get(&1).is_none());
        assert_eq!(cache.len(), 0);
        // By the writes of others.
        (0..20).for_each(|n| cache.insert(n, Counted::new(n, &alive)));
        clock.advance(secs(1));
        (0..2_000).for_each(|n| cache.insert(100 + n % 256, Counted::new(n, &alive)));
        assert_eq!(cache.len(), 256, "each shard was written to, more often than it has buckets");
        // By upkeep.
        clock.advance(secs(1));
        until_left(&cache, &alive, 0);
        assert!(cache.is_empty());
    });
}

#[test]
fn a_pin_keeps_what_it_read() {
    let _alone = alone();
    over_shapes(|builder: Builder<u64, Counted>| {
        let (cache, alive) = (builder.build(), Tally::default());
        cache.insert(1, Counted::new(7, &alive));
        let pinned = cache.pin();
        let seen = pinned.get(&1).unwrap();
        cache.insert(1, Counted::new(8, &alive));
        cache.invalidate(&1);
        (0..100).for_each(|_| cache.run_pending_tasks());
        assert_eq!((seen.0, pinned.get(&1).is_none()), (7, true));
        drop(pinned);
        until_left(&cache, &alive, 0);
    });
}

#[test]
fn what_waits_for_a_pin_is_counted() {
    let _alone = alone();
    // The sum is the process's: another test's last threads may still be on their way.
    let bytes = |cache: &Sut| {
        (0..4).for_each(|_| cache.run_pending_tasks());
        cache.stats().unreclaimed
    };
    over_shapes(|builder: Builder<u64, Counted>| {
        let (cache, alive) = (builder.max_capacity(100).build(), Tally::default());
        let n = 1_000;
        eventually(|| bytes(&cache) < 2_000);
        let pinned = cache.pin();
        for key in 0..n {
            cache.insert(key, Counted::new(key, &alive));
        }
        // 900 have been evicted. Each is a slot with its key, its value and their times.
        let held = bytes(&cache);
        let each = size_of::<(u64, Counted)>() as u64;
        assert!(held >= (n - 100) * each, "{held} bytes of {} entries wait", n - 100);
        assert_eq!((cache.len(), alive.get()), (100, n as usize));
        drop(pinned);
        eventually(|| bytes(&cache) < 2_000);
        assert_eq!((cache.len(), alive.get()), (100, 100));
        drop(cache);
        assert_eq!(alive.get(), 0);
    });
}

#[test]
fn the_listener_is_called_under_no_pin() {
    // By each kind of call: what is removed in the listener, from a cache without one, can be freed in it.
    let _alone = alone();
    let (clock, freed) = (ManualClock::new(), Tally::default());
    let (count, other) = (freed.clone(), plain::<u64, Counted>().build());
    let cache = plain::<u64, Counted>()
        .max_capacity(8)
        .time_to_live(secs(1))
        .clock(clock.clone())
        .eviction_listener(move |key, _, _| {
            let alive = Tally::default();
            other.insert(1, Counted::new(1, &alive));
            drop(other.remove(&1));
            (0..100).for_each(|_| other.run_pending_tasks());
            if *key == 1 && alive.get() == 0 {
                count.add();
            }
        })
        .build();
    let alive = Tally::default();
    let new = || Counted::new(1, &alive);
    let calls: [(&str, bool, &dyn Fn()); 13] = [
        ("get", true, &|| drop(cache.get(&1))),
        ("read", true, &|| _ = cache.read(&1, |v| v.0)),
        ("peek", true, &|| drop(cache.peek(&1))),
        ("contains_key", true, &|| _ = cache.contains_key(&1)),
        ("run_pending_tasks", true, &|| cache.run_pending_tasks()),
        ("get_with", true, &|| drop(cache.get_with(&1, new))),
        ("remove", false, &|| drop(cache.remove(&1))),
        ("insert", false, &|| cache.insert(1, new())),
        ("invalidate", false, &|| cache.invalidate(&1)),
        ("invalidate_all", false, &|| cache.invalidate_all()),
        ("retain", false, &|| cache.retain(|_, _| false)),
        ("compute", false, &|| drop(cache.compute(&1, |_| Op::Remove))),
        ("set_capacity", false, &|| cache.set_capacity(0)),
    ];
    for (name, only_expired, call) in calls {
        for expired in [true, false] {
            if only_expired && !expired {
                continue;
            }
            cache.set_capacity(8);
            cache.invalidate_all();
            cache.insert(1, new());
            if expired {
                clock.advance(secs(1));
            }
            let before = freed.get();
            call();
            assert_eq!(freed.get(), before + 1, "{name}, expired {expired}");
        }
    }
    // By a write that evicts it.
    cache.set_capacity(1);
    for key in 0..10 {
        let before = freed.get();
        if key % 2 == 0 {
            cache.insert(1, new())
        } else {
            drop(cache.get_with(&1, new))
        }
        cache.insert(2, new());
        assert!(freed.get() > before);
    }
    assert_eq!(cache.stats().listener_panics, 0);
}

#[test]
fn evicted_values_are_given_back() {
    let _alone = alone();
    for listens in [false, true] {
        over_shapes(|builder: Builder<u64, Counted>| {
            let alive = Tally::default();
            let builder = builder.max_capacity(30).weigher(|_, value| (value.0 % 3) as u32);
            let cache = if listens { builder.eviction_listener(|_, _, _| ()) } else { builder }.build();
            for n in 0..500 {
                cache.insert(n % 70, Counted::new(n, &alive));
                drop(cache.get_with(&(100 + n % 77), || Counted::new(n, &alive)));
            }
            // Too heavy: given to the caller, and not kept.
            cache.set_capacity(1);
            assert_eq!(cache.get_with(&1_000, || Counted::new(2, &alive)).0, 2);
            cache.insert(1_001, Counted::new(2, &alive));
            cache.set_capacity(20);
            until_left(&cache, &alive, cache.len());
            (0..200).for_each(|n| cache.insert(n, Counted::new(n, &alive)));
            drop(cache);
            assert_eq!(alive.get(), 0, "what this thread has evicted goes with the cache");
        });
    }
}

#[test]
fn threads_that_end_hand_over_their_garbage() {
    let _alone = alone();
    let (cache, alive) = (plain().build(), Tally::default());
    for n in 0..50 {
        let (cache, alive) = (&cache, &alive);
        thread::scope(|s| _ = s.spawn(move || cache.insert(1, Counted::new(n, alive))));
    }
    until_left(&cache, &alive, 1);
}

#[test]
fn under_contention_nothing_is_lost_or_dropped_twice() {
    let _alone = alone();
    over_shapes(|builder: Builder<u64, Counted>| {
        let clock = ManualClock::new();
        let (cache, alive) = (builder.time_to_live(secs(60)).clock(clock.clone()).build(), Tally::default());
        thread::scope(|s| {
            for t in 0..4 {
                let (cache, alive, clock) = (&cache, &alive, &clock);
                s.spawn(move || {
                    for n in 0..scaled(2_000, 200_000) as u64 {
                        let key = (n * 31 + t) % 24;
                        match (n + t) % 9 {
                            0 | 1 => cache.insert(key, Counted::new(key, alive)),
                            2 => drop(cache.remove(&key)),
                            3 => cache.invalidate(&key),
                            4 => _ = cache.expire(&key),
                            5 => drop(cache.compute(&key, |_| Op::Put(Counted::new(key, alive)))),
                            6 => drop(cache.try_get_with(&key, || Err::<Counted, _>(Error::other("boom")))),
                            7 if n % 64 == 0 => clock.advance(secs(60)),
                            _ => assert_eq!(cache.get_with(&key, || Counted::new(key, alive)).0, key),
                        }
                    }
                });
            }
        });
        until_left(&cache, &alive, cache.iter().count());
        drop(cache);
        assert_eq!(alive.get(), 0);
    });
}

/// A load that hangs holds up the slot, and not the value that was removed from it.
#[test]
fn a_hung_load_keeps_no_removed_value() {
    let _alone = alone();
    for replaced in [false, true] {
        let clock = ManualClock::new();
        let builder = Cache::builder().soft_ttl(secs(1)).clock(clock.clone());
        let cache: Cache<u64, Arc<u64>> = builder.build();
        let value = Arc::new(1);
        (0..=usize::from(replaced)).for_each(|_| cache.insert(1, value.clone()));
        clock.advance(secs(2));
        cache.get_with(&1, || {
            cache.invalidate(&1);
            // One is this test's, and one is what the call would serve if its load failed.
            while Arc::strong_count(&value) > 2 {
                cache.run_pending_tasks();
                thread::yield_now();
            }
            Arc::new(2)
        });
    }
}
