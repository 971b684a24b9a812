//! Single loads that wait for others, to be one batch with them: `cargo test --test coalesce`, and with `--features tokio`.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::batches::{Asked, Source, source};
use common::tasks::{Door, Kept, Task, Tasks, boo, elsewhere, panics};
use common::{Builder, Gate, Sut, Tally, eventually, is_cycle, ms, over_shapes, panic_of, plain, secs};
use quell::{Cache, LoadError, LoadErrorKind, ManualClock, WarmOptions};
use smol::block_on;
use smol::future::yield_now;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

const DELAY: Duration = Duration::from_secs(1);
const NANO: Duration = Duration::from_nanos(1);
/// A lease that does not end while a test moves the clock on in small steps, however slow the machine.
const LONG: Duration = Duration::from_secs(1 << 20);

/// Attaches a batch loader of either kind.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Blocking,
    Async,
}

impl Kind {
    fn attach(self, builder: Builder<u32, u32>, source: &Source) -> Builder<u32, u32> {
        let source = source.clone();
        match self {
            Self::Blocking => builder.batch_loader(move |keys: &[u32]| source(keys)),
            Self::Async => builder.async_batch_loader(move |keys: Vec<u32>| {
                let source = source.clone();
                async move {
                    yield_now().await;
                    source(&keys)
                }
            }),
        }
    }
}

/// A body over both kinds of loaders, and where loads are tasks of their own.
fn over_kinds(mut body: impl FnMut(Builder<u32, u32>, Kind)) {
    over_shapes(|builder| body(builder, Kind::Blocking));
    for builder in [plain(), plain().spawner(elsewhere)] {
        body(builder, Kind::Async);
    }
}

type Got = Result<u32, LoadError>;

/// Tasks that wait for the load of a key each.
fn tasks(cache: &Sut<u32, u32>, n: usize) -> Tasks<'_, Got> {
    let each = |nth| async move {
        let key = u32::try_from(nth).unwrap();
        cache.get_or_load_async(&key).await
    };
    Tasks((0..n).map(|nth| Task::waiting(each(nth))).collect())
}

fn tens(n: u32) -> Vec<u32> {
    (0..n).map(|key| 10 * key).collect()
}

fn values(got: Vec<Got>) -> Vec<u32> {
    got.into_iter().map(Result::unwrap).collect()
}

#[test]
fn after_the_delay_all_go_at_once() {
    for kind in [Kind::Blocking, Kind::Async] {
        over_shapes(|builder| {
            let (clock, asked) = (ManualClock::new(), Asked::default());
            let builder = builder.max_batch_delay(DELAY).clock(clock.clone());
            let cache = kind.attach(builder, &asked.tenfold()).build();
            for round in 0..2 {
                let mut waiting = tasks(&cache, 5);
                clock.advance(DELAY - NANO);
                waiting.settle();
                assert_eq!((asked.calls(), waiting.ended(), cache.in_flight().len()), (0, 0, 5), "{round}");
                clock.advance(NANO);
                assert_eq!(values(waiting.finish()), tens(5));
                assert_eq!(asked.take(), [[0, 1, 2, 3, 4]]);
                cache.invalidate_all();
            }
            assert_eq!(cache.stats().loads, 10);
        });
    }
}

#[test]
fn the_first_decides_when() {
    let (clock, asked) = (ManualClock::new(), Asked::default());
    let builder = plain().max_batch_delay(DELAY).clock(clock.clone());
    let cache = Kind::Async.attach(builder, &asked.tenfold()).build();
    let first = Task::waiting(cache.get_or_load_async(&1));
    clock.advance(DELAY / 2);
    let second = Task::waiting(cache.get_or_load_async(&2));
    clock.advance(DELAY / 2);
    assert_eq!((first.finish().unwrap(), second.finish().unwrap()), (10, 20));
    assert_eq!(asked.take(), [[1, 2]]);
    // What comes after it has a delay of its own.
    let mut third = Task::waiting(cache.get_or_load_async(&3));
    clock.advance(DELAY - NANO);
    third.run();
    assert_eq!(asked.calls(), 0);
    clock.advance(NANO);
    assert_eq!((third.finish().unwrap(), asked.take()), (30, vec![vec![3]]));
}

#[test]
fn a_full_batch_goes_at_once() {
    over_kinds(|builder, kind| {
        let (clock, asked) = (ManualClock::new(), Asked::default());
        let builder = builder.max_batch_size(4).max_batch_delay(DELAY).clock(clock);
        let cache = kind.attach(builder, &asked.tenfold()).build();
        // Threads, tasks, and both; the clock stands still.
        for (round, threads) in [4, 0, 2].into_iter().enumerate() {
            let begin = 10 * u32::try_from(round).unwrap();
            thread::scope(|s| {
                let cache = &cache;
                for key in begin..begin + 4 {
                    if key < begin + threads {
                        s.spawn(move || assert_eq!(cache.get_or_load(&key).unwrap(), 10 * key));
                    } else {
                        let call = async move { cache.get_or_load_async(&key).await.unwrap() };
                        s.spawn(move || assert_eq!(block_on(call), 10 * key));
                    }
                }
            });
            assert_eq!(asked.take(), [[begin, begin + 1, begin + 2, begin + 3]]);
        }
    });
}

#[test]
fn a_full_batch_of_tasks_goes_at_once() {
    let asked = Asked::default();
    let builder = plain().max_batch_size(4).max_batch_delay(DELAY).clock(ManualClock::new());
    let cache = Kind::Async.attach(builder, &asked.tenfold()).build();
    let mut waiting = tasks(&cache, 4);
    waiting.settle();
    assert_eq!((values(waiting.finish()), asked.take()), (tens(4), vec![vec![0, 1, 2, 3]]));
}

#[test]
fn a_burst_is_cut_into_full_batches() {
    over_kinds(|builder, kind| {
        let (clock, asked) = (ManualClock::new(), Asked::default());
        let builder = builder.max_batch_size(3).max_batch_delay(DELAY).lease(LONG).clock(clock.clone());
        let cache = kind.attach(builder, &asked.tenfold()).build();
        thread::scope(|s| {
            let cache = &cache;
            let calls: Vec<_> = (0..20).map(|key| s.spawn(move || cache.get_or_load(&key))).collect();
            eventually(|| {
                clock.advance(DELAY / 4);
                calls.iter().all(thread::ScopedJoinHandle::is_finished)
            });
            let got = calls.into_iter().map(|call| call.join().unwrap());
            assert_eq!(values(got.collect()), tens(20));
        });
        let calls = asked.take();
        assert!(calls.iter().all(|keys| keys.len() <= 3), "{calls:?}");
        let mut keys = calls.concat();
        keys.sort_unstable();
        assert_eq!(keys, (0..20).collect::<Vec<_>>());
    });
}

#[test]
fn by_real_time_it_goes_by_itself() {
    over_kinds(|builder, kind| {
        let asked = Asked::default();
        let cache = kind.attach(builder.max_batch_delay(ms(5)), &asked.tenfold()).build();
        for round in 0..3 {
            thread::scope(|s| {
                let cache = &cache;
                s.spawn(move || assert_eq!(cache.get_or_load(&1).unwrap(), 10));
                s.spawn(move || assert_eq!(block_on(cache.get_or_load_async(&2)).unwrap(), 20));
            });
            assert!((1..=2).contains(&asked.take().len()), "{round}");
            cache.invalidate_all();
        }
        assert_eq!(cache.warm([1, 2, 3], WarmOptions::new()).loaded(), 3);
    });
}

#[test]
fn the_keeper_begins_what_is_due() {
    let asked = Asked::default();
    let cache = Kind::Async.attach(plain().max_batch_delay(ms(5)), &asked.tenfold()).build();
    assert_eq!(values(tasks(&cache, 3).finish()), tens(3));
}

#[test]
fn only_single_loads_of_callers_wait() {
    over_kinds(|builder, kind| {
        let (clock, asked) = (ManualClock::new(), Asked::default());
        let builder = builder.max_batch_delay(DELAY).clock(clock.clone());
        let cache = kind.attach(builder, &asked.tenfold()).build();
        assert_eq!(cache.get_many([1, 2]).unwrap(), HashMap::from([(1, 10), (2, 20)]));
        assert_eq!(block_on(cache.get_many_async([3])).unwrap(), HashMap::from([(3, 30)]));
        assert!(cache.refresh(&4));
        eventually(|| cache.get(&4) == Some(40));
        assert_eq!(cache.get_with(&5, || 5), 5);
        assert_eq!(asked.take(), [vec![1, 2], vec![3], vec![4]]);
    });
}

#[test]
fn one_key_at_a_time_does_not_wait() {
    let builder = plain().max_batch_delay(DELAY).clock(ManualClock::new());
    let cache = builder.loader_fn(|key: &u32| Ok::<_, LoadError>(10 * key)).build();
    assert_eq!(cache.get_or_load(&1).unwrap(), 10);
    let builder = plain().max_batch_delay(DELAY).clock(ManualClock::new());
    let cache = builder.async_loader_fn(|key: u32| async move { Ok::<_, LoadError>(10 * key) }).build();
    assert_eq!((cache.get_or_load(&1).unwrap(), block_on(cache.get_or_load_async(&2)).unwrap()), (10, 20));
}

#[test]
fn it_shares_flights_with_all_others() {
    let (clock, asked) = (ManualClock::new(), Asked::default());
    let builder = plain().max_batch_delay(DELAY).clock(clock.clone());
    let cache = Kind::Async.attach(builder, &asked.tenfold()).build();
    let one = Task::waiting(cache.get_or_load_async(&1));
    let same = Task::waiting(cache.get_or_load_async(&1));
    let mut many = Task::waiting(cache.get_many_async([1, 2]));
    let closure = Task::waiting(cache.get_with_async(&1, async { unreachable!("it joins") }));
    many.run();
    assert_eq!((asked.take(), cache.peek(&2)), (vec![vec![2]], Some(20)));
    clock.advance(DELAY);
    assert_eq!((one.finish().unwrap(), same.finish().unwrap(), closure.finish()), (10, 10, 10));
    assert_eq!(many.finish().unwrap(), HashMap::from([(1, 10), (2, 20)]));
    assert_eq!(asked.take(), [[1]]);
}

#[test]
fn a_loader_is_given_each_key_once() {
    for kind in [Kind::Blocking, Kind::Async] {
        over_shapes(|builder| {
            let (clock, asked) = (ManualClock::new(), Asked::default());
            let builder = builder.max_batch_delay(DELAY).clock(clock.clone());
            let cache = kind.attach(builder, &asked.tenfold()).build();
            let mut waiting = tasks(&cache, 2);
            // Those who come after it do not get what began before.
            cache.invalidate(&1);
            waiting.0.extend(tasks(&cache, 2).0);
            clock.advance(DELAY);
            assert_eq!(values(waiting.finish()), [0, 10, 0, 10]);
            let mut calls = asked.take();
            calls.sort();
            assert_eq!(calls, [vec![0, 1], vec![1]]);
        });
    }
}

#[test]
fn what_is_dropped_before_is_left_out() {
    for kind in [Kind::Blocking, Kind::Async] {
        let (clock, asked) = (ManualClock::new(), Asked::default());
        let builder = plain().max_batch_delay(DELAY).clock(clock.clone());
        let cache = kind.attach(builder, &asked.tenfold()).build();
        let mut waiting = tasks(&cache, 4);
        // The first too, which has said when.
        waiting.0.remove(2);
        waiting.0.remove(0);
        assert_eq!(cache.in_flight().len(), 2);
        clock.advance(DELAY);
        assert_eq!(values(waiting.finish()), [10, 30]);
        assert_eq!(asked.take(), [[1, 3]]);
        // All of them.
        cache.invalidate_all();
        drop(tasks(&cache, 4));
        clock.advance(DELAY);
        assert_eq!((asked.calls(), cache.in_flight().len()), (0, 0));
        // They go with the cache, if it goes first.
        drop(tasks(&cache, 4));
    }
}

#[test]
fn what_is_dropped_after_does_not_stop_the_others() {
    let (clock, door, calls) = (ManualClock::new(), Door::default(), Tally::default());
    let (pass, count) = (door.clone(), calls.clone());
    let cache = plain()
        .max_batch_delay(DELAY)
        .clock(clock.clone())
        .async_batch_loader(move |keys: Vec<u32>| {
            let pass = pass.clone();
            count.add();
            async move {
                pass.pass().await;
                Ok::<_, LoadError>(keys.into_iter().map(|key| (key, 10 * key)))
            }
        })
        .build();
    let mut waiting = tasks(&cache, 4);
    clock.advance(DELAY);
    waiting.until(|| door.arrived() == 1);
    // Whoever has polled it is among these.
    waiting.0.truncate(3);
    waiting.0.remove(0);
    door.open();
    assert_eq!(values(waiting.finish()), [10, 20]);
    assert_eq!((calls.get(), cache.in_flight().len()), (1, 0));
}

#[test]
fn errors_absences_and_panics_reach_each() {
    for kind in [Kind::Blocking, Kind::Async] {
        let clock = ManualClock::new();
        let odd = source(|keys| match keys.len() {
            2 => Err("boom".into()),
            3 => Ok(vec![(0, 0)]),
            _ => boo("bang"),
        });
        let builder = plain().max_batch_delay(DELAY).clock(clock.clone());
        let cache = kind.attach(builder, &odd).build();
        let come_to = |n| {
            let waiting = tasks(&cache, n);
            clock.advance(DELAY);
            let got = waiting.finish().into_iter();
            got.map(|got| got.map_err(|error| error.kind())).collect::<Vec<_>>()
        };
        assert_eq!(come_to(2), [Err(LoadErrorKind::Failed); 2]);
        assert_eq!(come_to(3), [Ok(0), Err(LoadErrorKind::Absent), Err(LoadErrorKind::Absent)]);
        cache.invalidate_all();
        let call = |key: u32| {
            let cache = &cache;
            async move { panics(async { cache.get_or_load_async(&key).await.map_err(|e| e.kind()) }).await }
        };
        let waiting = Tasks((0..5).map(|key| Task::waiting(call(key))).collect());
        clock.advance(DELAY);
        let got = waiting.finish();
        let has_it = |got: &&Result<_, String>| got.as_ref().is_err_and(|text| text == "bang");
        assert_eq!(got.iter().filter(has_it).count(), 1, "{got:?}");
        let others = got.iter().filter(|got| **got == Ok(Err(LoadErrorKind::Panicked)));
        assert_eq!((others.count(), cache.stats().loader_panics, cache.in_flight().len()), (4, 1, 0));
    }
}

#[test]
fn a_thread_is_told_of_a_panic_too() {
    for kind in [Kind::Blocking, Kind::Async] {
        let builder = plain().max_batch_size(2).max_batch_delay(DELAY).clock(ManualClock::new());
        let cache = kind.attach(builder, &source(|_| boo("bang"))).build();
        let kinds = Mutex::new(Vec::new());
        let texts = Mutex::new(Vec::new());
        thread::scope(|s| {
            for key in [1, 2] {
                let (cache, kinds, texts) = (&cache, &kinds, &texts);
                s.spawn(move || match common::quietly(|| cache.get_or_load(&key)) {
                    Ok(got) => kinds.lock().unwrap().push(got.unwrap_err().kind()),
                    Err(_) => texts.lock().unwrap().push(key),
                });
            }
        });
        assert_eq!(kinds.into_inner().unwrap(), [LoadErrorKind::Panicked]);
        assert_eq!(texts.into_inner().unwrap().len(), 1);
    }
}

#[test]
fn what_a_load_needs_does_not_wait_and_a_cycle_is_told() {
    for (kind, tasks_ask) in
        [(Kind::Blocking, false), (Kind::Blocking, true), (Kind::Async, false), (Kind::Async, true)]
    {
        let clock = ManualClock::new();
        let (asked, home) = (Asked::default(), Arc::new(OnceLock::<Sut<u32, u32>>::new()));
        let (noted, inner) = (asked.clone(), home.clone());
        let ask = move |cache: &Sut<u32, u32>, key| {
            if tasks_ask { block_on(cache.get_or_load_async(&key)) } else { cache.get_or_load(&key) }
        };
        let nested = source(move |keys| {
            noted.note(keys);
            let cache = inner.get().unwrap();
            match keys {
                [9] => Ok(vec![(9, 90)]),
                _ if keys.contains(&7) => Ok(vec![(7, ask(cache, 8)?)]),
                _ => Ok(keys.iter().map(|key| (*key, ask(cache, 9).unwrap() + key)).collect()),
            }
        });
        let builder = plain().max_batch_size(2).max_batch_delay(DELAY).clock(clock);
        let cache = home.get_or_init(|| kind.attach(builder, &nested).build());
        let both = |a, b| {
            thread::scope(|s| {
                let calls = [a, b].map(|key| s.spawn(move || ask(cache, key)));
                calls.map(|call| call.join().unwrap())
            })
        };
        assert_eq!(both(1, 2).map(Result::unwrap), [91, 92]);
        assert_eq!(asked.take(), [vec![1, 2], vec![9]]);
        let got = both(7, 8).map(Result::unwrap_err);
        assert!(got.iter().all(is_cycle), "{kind:?} {got:?}");
    }
}

#[test]
fn a_hung_batch_is_taken_over_by_another() {
    let (clock, door, asked) = (ManualClock::new(), Door::default(), Asked::default());
    let (pass, noted) = (door.clone(), asked.clone());
    let cache = plain()
        .max_batch_delay(DELAY)
        .lease(secs(10))
        .clock(clock.clone())
        .async_batch_loader(move |keys: Vec<u32>| {
            let pass = (noted.calls() == 0).then(|| pass.clone());
            noted.note(&keys);
            async move {
                if let Some(pass) = pass {
                    pass.pass().await;
                }
                Ok::<_, LoadError>(keys.into_iter().map(|key| (key, 10 * key)))
            }
        })
        .build();
    let mut hung = tasks(&cache, 2);
    let mut later = tasks(&cache, 2);
    clock.advance(DELAY);
    hung.until(|| door.arrived() == 1);
    later.settle();
    clock.advance(secs(9));
    later.settle();
    assert_eq!((asked.calls(), later.ended()), (1, 0), "they wait for another delay");
    clock.advance(DELAY);
    assert_eq!(values(later.finish()), tens(2));
    assert_eq!(asked.take(), [[0, 1], [0, 1]]);
    door.open();
    assert_eq!(values(hung.finish()), tens(2));
}

#[test]
fn a_thread_gives_up_with_its_lease() {
    let (clock, gate) = (ManualClock::new(), Gate::default());
    let pass = gate.clone();
    let slow = source(move |keys| {
        pass.pass();
        Ok(keys.iter().map(|key| (*key, 10 * key)).collect())
    });
    let builder = plain().max_batch_delay(DELAY).lease(LONG).clock(clock.clone());
    let cache = Kind::Blocking.attach(builder, &slow).build();
    thread::scope(|s| {
        let call = s.spawn(|| cache.get_or_load(&1));
        eventually(|| cache.in_flight().len() == 1);
        eventually(|| {
            // In small steps: nobody knows whether the thread waits yet.
            clock.advance(DELAY / 4);
            gate.arrived() == 1
        });
        clock.advance(LONG);
        assert_eq!(call.join().unwrap().unwrap_err().kind(), LoadErrorKind::TimedOut);
        gate.open();
    });
}

#[test]
fn loads_that_are_tasks_of_their_own() {
    let (clock, asked, kept) = (ManualClock::new(), Asked::default(), Kept::default());
    let builder = plain().max_batch_delay(DELAY).clock(clock.clone()).spawner(kept.clone());
    let cache = Kind::Async.attach(builder, &asked.tenfold()).build();
    let waiting = tasks(&cache, 3);
    let mut own = Tasks(kept.take().into_iter().map(Task::new).collect());
    assert_eq!(own.0.len(), 3);
    own.settle();
    clock.advance(DELAY - NANO);
    own.settle();
    assert_eq!((own.ended(), asked.calls()), (0, 0));
    clock.advance(NANO);
    own.finish();
    assert_eq!((values(waiting.finish()), asked.take()), (tens(3), vec![vec![0, 1, 2]]));
}

#[test]
fn both_kinds_of_loaders() {
    let (clock, threads, others) = (ManualClock::new(), Asked::default(), Asked::default());
    let builder = plain().max_batch_size(4).max_batch_delay(DELAY).clock(clock);
    let builder = Kind::Blocking.attach(builder, &threads.tenfold());
    let cache = Kind::Async.attach(builder, &others.tenfold()).build();
    thread::scope(|s| {
        let cache = &cache;
        for key in [1, 2] {
            s.spawn(move || assert_eq!(cache.get_or_load(&key).unwrap(), 10 * key));
            let key = key + 2;
            s.spawn(move || assert_eq!(block_on(cache.get_or_load_async(&key)).unwrap(), 10 * key));
        }
    });
    assert_eq!((threads.take(), others.take()), (vec![vec![1, 2]], vec![vec![3, 4]]));
}

#[test]
fn a_delay_that_outlasts_the_lease_is_refused() {
    let builder = || Cache::<u32, u32>::builder().lease(secs(2));
    let error = builder().max_batch_delay(secs(2)).try_build().unwrap_err();
    assert_eq!((error.setting(), error.value()), ("max_batch_delay", "2s"));
    assert!(builder().max_batch_delay(secs(2) - NANO).try_build().is_ok());
    assert!(panic_of(|| builder().max_batch_delay(Duration::MAX).build()).contains("max_batch_delay"));
}
