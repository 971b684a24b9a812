//! Loaders that take many keys at once, and `get_many`: `cargo test --test batch`, and with `--features tokio`.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::batches::{Asked, Source, source};
use common::tasks::{Door, Kept, Task, boo, panics, waiting};
use common::{
    Builder, Counted, Gate, Queue, Sut, Tally, With, eventually, is_cycle, ms, over_shapes, panic_of, plain,
    quietly, secs, until_waiting,
};
use quell::{
    AsyncBatchLoader, BatchLoader, BoxError, BoxFuture, Cache, LoadCause, LoadContext, LoadError,
    LoadErrorKind, Loaded, ManualClock, Provenance, Rejected, WarmOptions,
};
use smol::block_on;
use smol::future::yield_now;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;

type Error = std::io::Error;
type Got = Result<HashMap<u32, u32>, LoadError>;

/// A spawner whose tasks each have a thread: loads may stop at a gate.
fn apart(task: BoxFuture) -> Result<(), Rejected> {
    thread::spawn(|| block_on(task));
    Ok(())
}

fn boom() -> Error {
    Error::other("boom")
}

fn tens<const N: usize>(keys: [u32; N]) -> HashMap<u32, u32> {
    keys.map(|key| (key, 10 * key)).into()
}

/// How a cache is given its loader, and how it is asked for many keys.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Front {
    tasks_load: bool,
    tasks_ask: bool,
}

impl Front {
    const ALL: [Self; 4] = [
        Self { tasks_load: false, tasks_ask: false },
        Self { tasks_load: false, tasks_ask: true },
        Self { tasks_load: true, tasks_ask: false },
        Self { tasks_load: true, tasks_ask: true },
    ];

    fn attach(self, builder: Builder<u32, u32>, source: &Source) -> Builder<u32, u32> {
        let source = source.clone();
        if self.tasks_load {
            builder.async_batch_loader(move |keys: Vec<u32>| {
                let source = source.clone();
                async move {
                    yield_now().await;
                    source(&keys)
                }
            })
        } else {
            builder.batch_loader(move |keys: &[u32]| source(keys))
        }
    }

    fn ask(self, cache: &Sut<u32, u32>, keys: &[u32]) -> Got {
        if self.tasks_ask { block_on(cache.get_many_async(keys)) } else { cache.get_many(keys) }
    }

    fn ask_one(self, cache: &Sut<u32, u32>, key: u32) -> Result<u32, LoadError> {
        if self.tasks_ask { block_on(cache.get_or_load_async(&key)) } else { cache.get_or_load(&key) }
    }
}

/// A body over both kinds of loaders and of callers, and where loads are tasks of their own.
fn over_fronts(mut body: impl FnMut(Builder<u32, u32>, Front)) {
    over_shapes(|builder| body(builder, Front::ALL[0]));
    for front in &Front::ALL[1..] {
        body(plain(), *front);
        if front.tasks_load {
            body(plain().spawner(apart), *front);
        }
    }
}

#[test]
fn what_is_missing_is_one_call() {
    over_fronts(|builder, front| {
        let asked = Asked::default();
        let cache = front.attach(builder, &asked.tenfold()).build();
        cache.insert(2, 22);
        assert_eq!(front.ask(&cache, &[]).unwrap(), HashMap::new());
        assert_eq!(front.ask(&cache, &[2, 2]).unwrap(), HashMap::from([(2, 22)]));
        assert_eq!(asked.calls(), 0, "nothing to load");
        let got = front.ask(&cache, &[3, 1, 2, 3, 1, 1]).unwrap();
        assert_eq!(got, HashMap::from([(1, 10), (2, 22), (3, 30)]));
        assert_eq!(asked.take(), [[1, 3]]);
        assert_eq!((cache.get(&1), cache.get(&3), cache.len()), (Some(10), Some(30), 3));
        assert_eq!(front.ask(&cache, &[3, 1, 2]).unwrap().len(), 3);
        let stats = cache.stats();
        assert_eq!((asked.calls(), stats.loads, stats.misses, stats.hits), (0, 2, 2, 7));
    });
}

#[test]
fn one_key_is_a_batch_of_one() {
    over_fronts(|builder, front| {
        let (asked, queue) = (Asked::default(), Queue::default());
        let cache = front.attach(builder.executor(queue.clone()), &asked.tenfold()).build();
        // A blocking loader that a task asks for goes by way of the executor.
        let got = thread::scope(|s| {
            let one = s.spawn(|| front.ask_one(&cache, 1).unwrap());
            eventually(|| {
                queue.run();
                one.is_finished()
            });
            one.join().unwrap()
        });
        assert_eq!(got, 10);
        assert!(cache.refresh(&2));
        eventually(|| {
            queue.run();
            cache.get(&2) == Some(20)
        });
        assert_eq!(cache.ask(&3).load().unwrap().value, 30);
        assert_eq!(cache.warm([3, 4], WarmOptions::new()).loaded(), 1);
        assert_eq!(asked.take(), [[1], [2], [3], [4]]);
    });
}

#[test]
fn missing_keys_are_absent_and_other_ones_ignored() {
    over_fronts(|builder, front| {
        let (clock, asked) = (ManualClock::new(), Asked::default());
        let noted = asked.clone();
        let odd = source(move |keys| {
            noted.note(keys);
            Ok(vec![(9, 90), (1, 10), (8, 80), (1, 11)])
        });
        let builder = builder.negative_ttl(secs(10)).clock(clock.clone());
        let cache = front.attach(builder, &odd).build();
        // Of a key that is there more than once the last counts.
        assert_eq!(front.ask(&cache, &[1, 2, 3]).unwrap(), HashMap::from([(1, 11)]));
        assert_eq!((cache.get(&1), cache.len()), (Some(11), 1));
        assert!([2, 3, 8, 9].iter().all(|key| cache.get(key).is_none()));
        assert_eq!(front.ask_one(&cache, 4).unwrap_err().kind(), LoadErrorKind::Absent);
        assert_eq!(asked.take(), [vec![1, 2, 3], vec![4]]);
        // What is known to be absent is left out, and not asked for.
        assert_eq!(front.ask(&cache, &[1, 2, 3, 4]).unwrap(), HashMap::from([(1, 11)]));
        let none = |_: &[u32]| -> Result<[(u32, u32); 0], Error> { unreachable!("nothing to load") };
        assert_eq!(cache.load_many([1, 2], none).unwrap(), HashMap::from([(1, 11)]));
        assert_eq!((asked.calls(), cache.stats().negative_hits), (0, 4));
        clock.advance(secs(10));
        assert_eq!(front.ask(&cache, &[1, 2]).unwrap().len(), 1);
        assert_eq!(asked.take(), [[2]]);
    });
}

#[test]
fn an_error_fails_all_keys_but_leaves_what_was_there() {
    over_fronts(|builder, front| {
        let clock = ManualClock::new();
        let builder = builder
            .time_to_live(secs(10))
            .stale_if_error(secs(90))
            .fallback(|key| (*key >= 7).then_some(100 + key))
            .clock(clock.clone());
        let cache = front.attach(builder, &source(|_| Err(boom().into()))).build();
        cache.insert(1, 1);
        let error = front.ask(&cache, &[1, 2, 3]).unwrap_err();
        assert_eq!(error.kind(), LoadErrorKind::Failed);
        assert_eq!(error.downcast_ref::<Error>().unwrap().to_string(), "boom");
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((cache.len(), cache.get(&1)), (1, Some(1)));
        // The ladder: in grace, then the fallback.
        clock.advance(secs(50));
        assert_eq!(cache.get(&1), None);
        assert_eq!(front.ask(&cache, &[1, 7]).unwrap(), HashMap::from([(1, 1), (7, 107)]));
        assert_eq!((cache.stats().grace_hits, cache.stats().fallbacks), (1, 1));
        // One key without a value is enough for an error.
        assert_eq!(front.ask(&cache, &[1, 2]).unwrap_err().kind(), LoadErrorKind::Failed);
    });
}

#[test]
fn a_panic_resumes_and_those_who_have_joined_look_again() {
    over_fronts(|builder, front| {
        let gate = Gate::default();
        let stop = gate.clone();
        let panicking = source(move |_| {
            stop.pass();
            boo("boom")
        });
        let cache = front.attach(builder, &panicking).build();
        thread::scope(|s| {
            let many = s.spawn(|| panic_of(|| front.ask(&cache, &[1, 2])));
            eventually(|| gate.arrived() == 1);
            let others = [1, 2].map(|key| {
                let cache = &cache;
                s.spawn(move || cache.get_with(&key, || 10 * key))
            });
            until_waiting(&cache, 2);
            gate.open();
            assert_eq!(many.join().unwrap(), "boom");
            assert_eq!(others.map(|other| other.join().unwrap()), [10, 20]);
        });
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((cache.get(&1), cache.get(&2), cache.stats().loader_panics), (Some(10), Some(20), 1));
    });
}

#[test]
fn it_shares_loads_with_all_others() {
    over_fronts(|builder, front| {
        let (gate, asked) = (Gate::default(), Asked::default());
        let (stop, tenfold) = (gate.clone(), asked.tenfold());
        let slow = source(move |keys| {
            let got = tenfold(keys);
            stop.pass();
            got
        });
        let cache = front.attach(builder, &slow).build();
        thread::scope(|s| {
            let cache = &cache;
            let arrived = |n| eventually(|| gate.arrived() == n);
            // It joins a single load, a refresh, and a call for many with a closure of its own ..
            let single = s.spawn(|| cache.get_or_load(&1).unwrap());
            arrived(1);
            assert!(cache.refresh(&2));
            arrived(2);
            let closure = s.spawn(|| {
                cache.load_many([3], |_| {
                    gate.pass();
                    Ok::<_, Error>([(3, 33)])
                })
            });
            arrived(3);
            let many = s.spawn(move || front.ask(cache, &[1, 2, 3, 4, 5, 6]).unwrap());
            arrived(4);
            // .. and they join it.
            let joined = s.spawn(|| cache.get_or_load(&4).unwrap());
            assert!(cache.refresh(&5));
            let others = s.spawn(|| {
                cache.load_many([5, 6], |_| -> Result<[(u32, u32); 0], Error> { unreachable!("it joins") })
            });
            let again = s.spawn(move || front.ask(cache, &[4, 6]).unwrap());
            // `many` has joined three, `joined` one, `others` and `again` two each.
            until_waiting(cache, 8);
            gate.open();
            assert_eq!((single.join().unwrap(), joined.join().unwrap()), (10, 40));
            assert_eq!(closure.join().unwrap().unwrap(), HashMap::from([(3, 33)]));
            let mut all = tens([1, 2, 3, 4, 5, 6]);
            all.insert(3, 33);
            assert_eq!(many.join().unwrap(), all);
            assert_eq!(
                (others.join().unwrap().unwrap(), again.join().unwrap()),
                (tens([5, 6]), tens([4, 6]))
            );
        });
        assert_eq!((asked.take(), cache.stats().loads), (vec![vec![1], vec![2], vec![4, 5, 6]], 6));
    });
}

#[test]
fn what_it_has_claimed_is_settled_before_it_waits() {
    // Calls whose keys overlap, in parts: none of them waits for what another has to do first.
    over_fronts(|builder, front| {
        let asked = Asked::default();
        let cache = front.attach(builder.max_batch_size(2), &asked.tenfold()).build();
        let both = std::sync::Barrier::new(2);
        for round in 0..20 {
            let keys = [1, 2, 3, 4, 5].map(|n| 8 * round + n);
            thread::scope(|s| {
                let (cache, both) = (&cache, &both);
                let calls = [0, 1].map(|_| {
                    s.spawn(move || {
                        both.wait();
                        front.ask(cache, &keys).unwrap()
                    })
                });
                for call in calls {
                    assert_eq!(call.join().unwrap(), tens(keys));
                }
            });
            let asked = asked.take();
            assert!(asked.iter().all(|keys| keys.len() <= 2), "{asked:?}");
            let mut loaded = asked.concat();
            loaded.sort_unstable();
            assert_eq!(loaded, keys);
        }
    });
}

#[test]
fn what_is_too_much_for_one_batch_goes_in_several() {
    over_fronts(|builder, front| {
        let (clock, asked) = (ManualClock::new(), Asked::default());
        let builder = builder.max_batch_size(3).soft_ttl(secs(1)).clock(clock.clone());
        let cache = front.attach(builder, &asked.tenfold()).build();
        let keys: Vec<u32> = (0..10).collect();
        let sizes = |asked: Vec<Vec<u32>>| {
            let mut all = asked.concat();
            all.sort_unstable();
            assert_eq!(all, keys);
            let mut sizes: Vec<usize> = asked.iter().map(Vec::len).collect();
            sizes.sort_unstable();
            sizes
        };
        assert_eq!(front.ask(&cache, &keys).unwrap().len(), 10);
        assert_eq!(sizes(asked.take()), [1, 3, 3, 3]);
        // Refreshes too.
        clock.advance(secs(1));
        assert_eq!(front.ask(&cache, &keys).unwrap().len(), 10);
        eventually(|| cache.in_flight().is_empty());
        assert_eq!(sizes(asked.take()), [1, 3, 3, 3]);
    });
    let error = Cache::<u32, u32>::builder().max_batch_size(0).try_build().unwrap_err();
    assert_eq!((error.setting(), error.value()), ("max_batch_size", "0"));
    assert!(Cache::<u32, u32>::builder().max_batch_size(1).try_build().is_ok());
}

#[test]
fn a_batch_that_fails_is_the_last() {
    over_fronts(|builder, front| {
        let asked = Asked::default();
        let noted = asked.clone();
        let fails = source(move |keys| {
            noted.note(keys);
            Err(boom().into())
        });
        let cache = front.attach(builder.max_batch_size(2), &fails).build();
        assert_eq!(front.ask(&cache, &[1, 2, 3, 4, 5]).unwrap_err().kind(), LoadErrorKind::Failed);
        assert_eq!((asked.calls(), cache.len()), (1, 0));
        eventually(|| cache.in_flight().is_empty());
    });
}

#[test]
fn a_loader_of_one_key_is_called_for_one_after_the_other() {
    let asked = Asked::default();
    let (one, two) = (asked.clone(), asked.clone());
    let threads = plain()
        .max_concurrent_loads(1)
        .loader_fn(move |key: &u32| {
            one.note(&[*key]);
            if *key == 9 { Err(boom()) } else { Ok(10 * key) }
        })
        .build();
    let tasks = plain()
        .max_concurrent_loads(1)
        .async_loader_fn(move |key: u32| {
            two.note(&[key]);
            async move {
                yield_now().await;
                if key == 9 { Err(boom()) } else { Ok(10 * key) }
            }
        })
        .build();
    for cache in [&threads, &tasks] {
        for (tasks_ask, keys) in [(false, [1, 2, 3]), (true, [3, 4, 5])] {
            let front = Front { tasks_load: false, tasks_ask };
            assert_eq!(front.ask(cache, &keys).unwrap(), tens(keys));
            assert_eq!(front.ask(cache, &[9]).unwrap_err().kind(), LoadErrorKind::Failed);
        }
        let mut asked = asked.take();
        asked.sort_unstable();
        assert_eq!(asked, [[1], [2], [3], [4], [5], [9], [9]]);
    }
}

#[test]
fn what_has_no_loader_has_what_is_cached() {
    let cache = plain::<u32, u32>().build();
    cache.insert(1, 10);
    for front in Front::ALL {
        assert_eq!(front.ask(&cache, &[1]).unwrap(), tens([1]));
        let error = front.ask(&cache, &[1, 2]).unwrap_err();
        assert_eq!(error.kind(), LoadErrorKind::NotCached);
        assert!(error.to_string().contains("no attached loader"), "{error}");
    }
}

#[test]
fn the_loader_that_is_set_last_counts() {
    let asked = Asked::default();
    let tenfold = asked.tenfold();
    for front in Front::ALL {
        let (one, later) = (|_: &u32| Ok::<u32, Error>(1), |_: u32| async { Ok::<u32, Error>(1) });
        let cache = front.attach(plain().loader(one).async_loader_fn(later), &tenfold).build();
        if front.tasks_load == front.tasks_ask {
            assert_eq!(front.ask(&cache, &[1, 2]).unwrap(), tens([1, 2]));
            assert_eq!(asked.take(), [[1, 2]]);
        } else {
            assert_eq!(front.ask(&cache, &[1, 2]).unwrap(), HashMap::from([(1, 1), (2, 1)]), "its own kind");
        }
        let cache = front.attach(plain(), &tenfold).loader(one).async_loader_fn(later).build();
        assert_eq!(front.ask(&cache, &[1, 2]).unwrap(), HashMap::from([(1, 1), (2, 1)]));
        assert_eq!(asked.calls(), 0);
    }
}

#[test]
fn limits_and_back_offs_apply() {
    over_fronts(|builder, front| {
        // A task's blocking loads wait on an executor: they have their permits too.
        let asked = Asked::default();
        let builder = builder.max_concurrent_loads(2);
        let cache = front.attach(builder, &asked.tenfold()).build();
        let others = [100, 101].map(|key| {
            let own = cache.clone();
            Task::waiting(async move { own.get_with_async(&key, std::future::pending()).await })
        });
        let error = front.ask(&cache, &[1, 2, 3]).unwrap_err();
        assert_eq!((error.kind(), asked.calls()), (LoadErrorKind::Overloaded, 0));
        drop(others);
        eventually(|| cache.in_flight().is_empty());
        // Refused as a whole or not at all.
        assert_eq!(front.ask(&cache, &[1, 2, 3]).unwrap(), tens([1, 2, 3]));
        assert_eq!(front.ask(&cache, &[3, 4]).unwrap(), tens([3, 4]), "all permits have come back");
    });
}

// Stale values.

#[test]
fn stale_values_are_served_and_refreshed_by_one_call() {
    for (tasks_load, spawns) in [(false, false), (true, false), (true, true)] {
        for tasks_ask in [false, true] {
            let front = Front { tasks_load, tasks_ask };
            let (clock, asked) = (ManualClock::new(), Asked::default());
            let (queue, kept) = (Queue::default(), Kept::default());
            let builder = plain().soft_ttl(secs(1)).clock(clock.clone()).executor(queue.clone());
            let builder = if spawns { builder.spawner(kept.clone()) } else { builder };
            let cache = front.attach(builder, &asked.tenfold()).build();
            (1..=3).for_each(|key| cache.insert(key, key));
            clock.advance(secs(1));
            cache.insert(4, 4);
            let old = HashMap::from([(1, 1), (2, 2), (3, 3), (4, 4)]);
            for _ in 0..3 {
                assert_eq!(front.ask(&cache, &[1, 2, 3, 4]).unwrap(), old);
            }
            assert_eq!((queue.len() + kept.len(), asked.calls(), cache.in_flight().len()), (1, 0, 3));
            assert_eq!(queue.run() + kept.run(), 1);
            assert_eq!((asked.take(), cache.in_flight().len()), (vec![vec![1, 2, 3]], 0));
            assert_eq!([1, 2, 3, 4].map(|key| cache.get(&key)), [Some(10), Some(20), Some(30), Some(4)]);
            assert!(cache.ask(&1).get().unwrap().provenance == Provenance::Fresh { age: secs(0) });
            // Whoever cannot wait takes over a refresh that has not begun; it does the rest.
            clock.advance(secs(1));
            assert_eq!(front.ask(&cache, &[1, 2]).unwrap(), tens([1, 2]));
            assert_eq!(cache.ask(&1).max_age(secs(1)).load_with(|| 111).unwrap().value, 111);
            assert_eq!(queue.run() + kept.run(), 1);
            assert_eq!((asked.take(), cache.get(&1), cache.get(&2)), (vec![vec![2]], Some(111), Some(20)));
            // Dropped, it leaves nothing behind.
            clock.advance(secs(1));
            assert_eq!(front.ask(&cache, &[1, 3]).unwrap(), HashMap::from([(1, 111), (3, 30)]));
            assert_eq!(cache.in_flight().len(), 2);
            drop((queue.take(), kept.take()));
            assert_eq!((cache.in_flight().len(), cache.get(&1), asked.calls()), (0, Some(111), 0));
        }
    }
}

#[test]
fn stale_and_missing_keys_of_one_call() {
    over_fronts(|builder, front| {
        let (clock, asked, gate) = (ManualClock::new(), Asked::default(), Gate::default());
        let (stop, tenfold) = (gate.clone(), asked.tenfold());
        let slow = source(move |keys| {
            if keys.contains(&1) {
                stop.pass();
            }
            tenfold(keys)
        });
        let builder = builder.soft_ttl(secs(1)).clock(clock.clone());
        let cache = front.attach(builder, &slow).build();
        cache.insert(1, 1);
        clock.advance(secs(1));
        // What is missing is waited for, what is stale is not.
        let got = front.ask(&cache, &[1, 2, 3]).unwrap();
        assert_eq!(got, HashMap::from([(1, 1), (2, 20), (3, 30)]));
        assert_eq!(asked.take(), [[2, 3]]);
        gate.open();
        eventually(|| cache.get(&1) == Some(10));
        assert_eq!(asked.take(), [[1]]);
    });
}

#[test]
fn a_refresh_that_fails_leaves_what_was_there() {
    for panicking in [false, true] {
        for (tasks_load, spawns) in [(false, false), (true, false), (true, true)] {
            let front = Front { tasks_load, tasks_ask: false };
            let (clock, queue, kept, calls) =
                (ManualClock::new(), Queue::default(), Kept::default(), Tally::default());
            let builder = plain().soft_ttl(secs(1)).clock(clock.clone()).executor(queue.clone());
            let builder = if spawns { builder.spawner(kept.clone()) } else { builder };
            let count = calls.clone();
            let fails = source(move |_| {
                count.add();
                if panicking { boo("boom") } else { Err(boom().into()) }
            });
            let cache = front.attach(builder, &fails).build();
            (1..=3).for_each(|key| cache.insert(key, 10 * key));
            clock.advance(secs(1));
            for _ in 0..5 {
                assert_eq!(front.ask(&cache, &[1, 2, 3]).unwrap(), tens([1, 2, 3]));
                let _ = quietly(|| queue.run() + kept.run());
                assert_eq!(cache.in_flight().len(), 0);
            }
            let stats = cache.stats();
            assert_eq!(stats.loader_panics, u64::from(panicking));
            assert_eq!(calls.get(), 1, "a refresh that fails is not tried again at once");
            clock.advance(ms(100));
            assert_eq!(front.ask(&cache, &[1, 2, 3]).unwrap(), tens([1, 2, 3]));
            assert_eq!(queue.len() + kept.len(), 1, "but after a while");
        }
    }
}

#[test]
fn a_refused_refresh_is_counted_for_each_key() {
    let clock = ManualClock::new();
    let refuses = |_| Err(Rejected);
    let builder = plain().soft_ttl(secs(1)).clock(clock.clone()).executor(refuses);
    let cache = Front::ALL[0].attach(builder, &Asked::default().tenfold()).build();
    (1..=3).for_each(|key| cache.insert(key, 10 * key));
    clock.advance(secs(1));
    assert_eq!(cache.get_many([1, 2, 3]).unwrap(), tens([1, 2, 3]));
    assert_eq!((cache.stats().refused_refreshes, cache.in_flight().len()), (3, 0));
}

#[test]
fn a_spawner_that_takes_nothing_leaves_the_load_to_the_caller() {
    let refuses = |_| Err(Rejected);
    let drops = |task| {
        drop(task);
        Ok(())
    };
    #[cfg(feature = "tokio")]
    let runtime = tokio::runtime::Runtime::new().unwrap();
    // Of a runtime's futures a waiting thread polls its own.
    #[cfg(feature = "tokio")]
    let _under_it = runtime.enter();
    for front in &Front::ALL[2..] {
        for builder in [plain().spawner(refuses), plain().spawner(drops)] {
            let asked = Asked::default();
            let cache = front.attach(builder, &asked.tenfold()).build();
            assert_eq!(front.ask(&cache, &[1, 2]).unwrap(), tens([1, 2]));
            assert_eq!(asked.take(), [[1, 2]]);
        }
    }
}

#[cfg(feature = "tokio")]
#[test]
fn under_a_runtime() {
    let clock = ManualClock::new();
    let asked = Asked::default();
    let (tenfold, runtime) = (asked.tenfold(), tokio::runtime::Runtime::new().unwrap());
    let blocking = plain().soft_ttl(secs(1)).clock(clock.clone()).batch_loader({
        let tenfold = tenfold.clone();
        move |keys: &[u32]| {
            assert!(tokio::runtime::Handle::try_current().is_ok(), "on a thread of the runtime");
            tenfold(keys)
        }
    });
    let of_tasks =
        plain().soft_ttl(secs(1)).clock(clock.clone()).async_batch_loader(move |keys: Vec<u32>| {
            let tenfold = tenfold.clone();
            async move {
                tokio::time::sleep(ms(1)).await;
                tenfold(&keys)
            }
        });
    let (blocking, of_tasks) = (blocking.build(), of_tasks.build());
    runtime.block_on(async {
        assert_eq!(blocking.get_many_async([1, 2]).await.unwrap(), tens([1, 2]));
        assert_eq!(of_tasks.get_many_async([1, 2]).await.unwrap(), tens([1, 2]));
        assert_eq!(asked.take(), [[1, 2], [1, 2]]);
        clock.advance(secs(1));
        // The refresh is a task of the runtime, whose timer it needs.
        assert_eq!(of_tasks.get_many_async([1, 2]).await.unwrap(), tens([1, 2]));
        while asked.calls() == 0 {
            tokio::time::sleep(ms(1)).await;
        }
    });
    assert_eq!(asked.take(), [[1, 2]]);
}

// What each key of a batch may say.

/// What a loader was told of a key.
type Told = (u32, Option<u32>, LoadCause);

/// Says something else of each key.
#[derive(Default)]
struct Varied(Mutex<Vec<Told>>);

impl Varied {
    fn say(&self, keys: &[u32], contexts: &[LoadContext<u32>]) -> Result<Vec<(u32, Loaded<u32>)>, BoxError> {
        assert_eq!(keys.len(), contexts.len());
        let say = |(key, cx): (&u32, &LoadContext<u32>)| {
            assert_eq!(cx.lease_left(), secs(7));
            self.0.lock().unwrap().push((*key, cx.previous().copied(), cx.cause()));
            let loaded = match key {
                1 => Loaded::new(10).ttl(secs(1)),
                2 => Loaded::new(20).do_not_store(),
                3 => Loaded::absent(),
                4 => Loaded::not_modified(),
                _ => Loaded::new(10 * key),
            };
            (*key, loaded)
        };
        Ok(keys.iter().zip(contexts).map(say).collect())
    }

    fn seen(&self) -> Vec<Told> {
        let mut seen = std::mem::take(&mut *self.0.lock().unwrap());
        seen.sort_unstable_by_key(|(key, ..)| *key);
        seen
    }
}

struct OnThreads(Arc<Varied>);

impl BatchLoader<u32, u32> for OnThreads {
    fn load_many(
        &self,
        keys: &[u32],
        contexts: &[LoadContext<u32>],
    ) -> Result<Vec<(u32, Loaded<u32>)>, BoxError> {
        self.0.say(keys, contexts)
    }
}

struct OnTasks(Arc<Varied>);

impl AsyncBatchLoader<u32, u32> for OnTasks {
    async fn load_many(
        &self,
        keys: &[u32],
        contexts: &[LoadContext<u32>],
    ) -> Result<Vec<(u32, Loaded<u32>)>, BoxError> {
        yield_now().await;
        self.0.say(keys, contexts)
    }
}

#[test]
fn each_key_has_its_own_times_and_context() {
    for front in Front::ALL {
        let (clock, varied) = (ManualClock::new(), Arc::new(Varied::default()));
        let builder = plain().lease(secs(7)).time_to_live(secs(10)).clock(clock.clone());
        let cache = if front.tasks_load {
            builder.async_batch_loader(OnTasks(varied.clone())).build()
        } else {
            builder.batch_loader(OnThreads(varied.clone())).build()
        };
        cache.insert_with_ttl(4, 44, secs(2));
        clock.advance(secs(1));
        assert!(cache.refresh(&4));
        eventually(|| cache.in_flight().is_empty());
        assert_eq!(varied.seen(), [(4, Some(44), LoadCause::Asked)]);
        clock.advance(secs(8));
        assert_eq!(cache.get(&4), Some(44), "its times have begun anew");
        let got = front.ask(&cache, &[1, 2, 3, 4, 5]).unwrap();
        assert_eq!(got, HashMap::from([(1, 10), (2, 20), (4, 44), (5, 50)]));
        assert_eq!(varied.seen(), [1, 2, 3, 5].map(|key| (key, None, LoadCause::Miss)));
        assert_eq!([1, 2, 3, 5].map(|key| cache.get(&key)), [Some(10), None, None, Some(50)]);
        clock.advance(secs(1));
        assert_eq!((cache.get(&1), cache.get(&5)), (None, Some(50)));
        // Where nothing was there, `not_modified` is a failure of that key alone.
        cache.invalidate(&4);
        assert_eq!(front.ask(&cache, &[4, 6]).unwrap_err().kind(), LoadErrorKind::Failed);
        assert_eq!((cache.get(&4), cache.get(&6)), (None, Some(60)));
    }
}

#[test]
fn a_write_in_between_wins() {
    over_fronts(|builder, front| {
        let home: Arc<OnceLock<Sut<u32, u32>>> = Arc::default();
        let there = home.clone();
        let writes = source(move |keys| {
            let cache = there.get().unwrap();
            cache.insert(1, 111);
            cache.invalidate(&2);
            Ok(keys.iter().map(|key| (*key, 10 * key)).collect())
        });
        let cache = home.get_or_init(|| front.attach(builder, &writes).build());
        // The call gets what it has loaded, and of what is outdated nothing is stored.
        assert_eq!(front.ask(cache, &[1, 2, 3]).unwrap(), tens([1, 2, 3]));
        assert_eq!((cache.get(&1), cache.get(&2), cache.get(&3)), (Some(111), None, Some(30)));
        assert_eq!(cache.stats().fenced, 2);
    });
}

// Loads that hang, wait for themselves, or are given up.

#[test]
fn the_wait_for_somebody_elses_load_has_a_deadline() {
    over_fronts(|builder, front| {
        let (clock, gate, asked) = (ManualClock::new(), Gate::default(), Asked::default());
        let builder = builder.wait_timeout(secs(2)).max_batch_size(1).clock(clock.clone());
        let cache = front.attach(builder, &asked.tenfold()).build();
        thread::scope(|s| {
            let stuck = s.spawn(|| {
                cache.get_with(&1, || {
                    gate.pass();
                    7
                })
            });
            eventually(|| gate.arrived() == 1);
            let late = s.spawn(|| front.ask(&cache, &[1, 2, 3, 4, 5, 6, 7, 8, 9]));
            // All that it has to load is there before it waits.
            eventually(|| (2..10).all(|key| cache.get(&key) == Some(10 * key)));
            until_waiting(&cache, 1);
            clock.advance(secs(2));
            assert_eq!(late.join().unwrap().unwrap_err().kind(), LoadErrorKind::TimedOut);
            gate.open();
            assert_eq!(stuck.join().unwrap(), 7);
        });
        assert_eq!((asked.calls(), cache.stats().takeovers), (8, 0));
    });
}

#[test]
fn a_batch_that_hangs_is_taken_over() {
    over_fronts(|builder, front| {
        let (clock, gate, asked) = (ManualClock::new(), Gate::default(), Asked::default());
        let (stop, tenfold) = (gate.clone(), asked.tenfold());
        let hangs_once = source(move |keys| {
            let got = tenfold(keys);
            if keys.len() > 1 {
                stop.pass();
            }
            got
        });
        let builder = builder.lease(ms(100)).clock(clock.clone());
        let cache = front.attach(builder, &hangs_once).build();
        thread::scope(|s| {
            let hung = s.spawn(|| front.ask(&cache, &[1, 2]));
            eventually(|| gate.arrived() == 1);
            let other = s.spawn(|| cache.get_or_load(&1).unwrap());
            until_waiting(&cache, 1);
            clock.advance(ms(100));
            // A batch of its own.
            assert_eq!(other.join().unwrap(), 10);
            assert_eq!(asked.take(), [vec![1, 2], vec![1]]);
            gate.open();
            match hung.join().unwrap() {
                Ok(got) => assert_eq!(got, tens([1, 2])),
                // A thread leaves a future when its lease is over.
                Err(error) => assert_eq!((error.kind(), front.tasks_load), (LoadErrorKind::TimedOut, true)),
            }
        });
        assert_eq!(cache.get(&1), Some(10));
        // A thread that leaves a future may leave nothing to take over.
        let left = front.tasks_load && !front.tasks_ask;
        assert!(cache.stats().takeovers == 1 || left && cache.stats().takeovers == 0, "{front:?}");
        eventually(|| cache.in_flight().is_empty());
    });
}

/// An async batch loader that gives the tenfold of each key when the door is open. Its futures are counted.
fn stops_at(door: &Door, alive: &Tally) -> impl AsyncBatchLoader<u32, u32> {
    let (stop, alive) = (door.clone(), alive.clone());
    move |keys: Vec<u32>| {
        let (stop, token) = (stop.clone(), Counted::new(0, &alive));
        async move {
            stop.pass().await;
            drop(token);
            Ok::<_, Error>(keys.into_iter().map(|key| (key, 10 * key)))
        }
    }
}

#[test]
fn a_thread_leaves_futures_whose_lease_is_over() {
    for spawns in [false, true] {
        let (clock, door, alive) = (ManualClock::new(), Door::default(), Tally::default());
        let load = stops_at(&door, &alive);
        let builder = plain().lease(ms(100)).clock(clock.clone()).async_batch_loader(load);
        let cache = if spawns { builder.spawner(apart).build() } else { builder.build() };
        thread::scope(|s| {
            let many = s.spawn(|| cache.get_many([1, 2]).unwrap_err().kind());
            eventually(|| door.arrived() == 1);
            clock.advance(ms(100));
            assert_eq!(many.join().unwrap(), LoadErrorKind::TimedOut);
        });
        // Nobody wants it any more.
        eventually(|| alive.get() == 0 && cache.in_flight().is_empty());
        door.open();
        assert_eq!(cache.get_many([1, 2]).unwrap(), tens([1, 2]));
    }
}

#[test]
fn cycles_are_told() {
    for inner in [1, 2] {
        for how in 0..4 {
            over_fronts(|builder, front| {
                let home: Arc<OnceLock<Sut<u32, u32>>> = Arc::default();
                let there = home.clone();
                let asks = source(move |keys| {
                    let cache = there.get().unwrap();
                    if !keys.contains(&inner) {
                        return Ok(keys.iter().map(|key| (*key, 10 * key)).collect());
                    }
                    // Others are no cycle.
                    assert_eq!(cache.get_many([7, 8])?.len(), 2);
                    let got = match how {
                        0 => cache.get_or_load(&inner)?,
                        1 => cache.get_many([inner, 5])?[&inner],
                        2 => cache.load_many([inner], |_| Ok::<_, Error>([(inner, 0)]))?[&inner],
                        _ => block_on(cache.get_many_async([5, inner]))?[&inner],
                    };
                    Ok(vec![(inner, got)])
                });
                let cache = home.get_or_init(|| front.attach(builder, &asks).build());
                let error = front.ask(cache, &[1, 2]).unwrap_err();
                assert!(is_cycle(&error), "{front:?}, {inner} by way {how}: {error}");
                assert!(is_cycle(&front.ask_one(cache, inner).unwrap_err()));
                eventually(|| cache.in_flight().is_empty());
                assert_eq!((cache.get(&7), cache.get(&8), cache.get(&inner)), (Some(70), Some(80), None));
            });
        }
    }
}

#[test]
fn a_dropped_call_leaves_its_load_to_those_who_have_joined() {
    for spawns in [false, true] {
        let (door, alive) = (Door::default(), Tally::default());
        let load = stops_at(&door, &alive);
        let builder = plain().async_batch_loader(load);
        let cache = if spawns { builder.spawner(apart).build() } else { builder.build() };
        let mut many = Task::waiting(cache.get_many_async([1, 2, 3]));
        eventually(|| {
            many.run();
            door.arrived() == 1
        });
        let single = Task::waiting(cache.get_or_load_async(&2));
        drop(many);
        // All other entries are again what they were before.
        eventually(|| cache.in_flight().len() == 1);
        assert_eq!((cache.in_flight()[0].key, waiting(&cache), alive.get()), (2, 1, 1));
        door.open();
        assert_eq!((single.finish().unwrap(), cache.get(&1), cache.get(&2)), (20, None, Some(20)));
        eventually(|| alive.get() == 0 && cache.in_flight().is_empty());
    }
}

#[test]
fn a_dropped_call_leaves_nothing_behind() {
    for front in [Front::ALL[1], Front::ALL[3]] {
        let (gate, asked) = (Gate::default(), Asked::default());
        let (stop, tenfold) = (gate.clone(), asked.tenfold());
        let slow = source(move |keys| {
            stop.pass();
            tenfold(keys)
        });
        let cache = front.attach(plain(), &slow).build();
        let many = Task::waiting(panics(cache.get_many_async([1, 2])));
        drop(many);
        assert_eq!((cache.in_flight().len(), cache.len()), (0, 0));
        gate.open();
        assert_eq!(front.ask(&cache, &[1, 2]).unwrap(), tens([1, 2]));
    }
}

#[test]
fn a_loader_sees_a_context_of_its_own_for_one_key() {
    // The usual loader of one key, for comparison: both are told the same.
    let (one, many) = (Arc::new(Varied::default()), Arc::new(Varied::default()));
    let seen = one.clone();
    let note = With(move |key: &u32, cx: &LoadContext<u32>| {
        seen.0.lock().unwrap().push((*key, cx.previous().copied(), cx.cause()));
        Ok(Loaded::new(50))
    });
    let caches = [
        plain().lease(secs(7)).loader(note).build(),
        plain().lease(secs(7)).batch_loader(OnThreads(many.clone())).build(),
    ];
    for cache in &caches {
        cache.insert(5, 5);
        assert_eq!(cache.ask(&5).max_age(secs(0)).load().unwrap().value, 50);
    }
    assert_eq!(one.seen(), [(5, Some(5), LoadCause::Miss)]);
    assert_eq!(many.seen(), [(5, Some(5), LoadCause::Miss)]);
}

#[test]
fn a_call_may_go_to_another_thread() {
    let asked = Asked::default();
    for front in Front::ALL {
        let cache = front.attach(plain(), &asked.tenfold()).build();
        let call = async move { cache.get_many_async([1, 2]).await };
        assert_eq!(thread::spawn(|| block_on(call)).join().unwrap().unwrap(), tens([1, 2]));
    }
}
