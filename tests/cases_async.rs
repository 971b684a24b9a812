//! Faults that broke other caches, as tasks meet them: `cargo test --test cases_async`, and with `--features tokio`
//! (`QUELL_LONG=1` for the full numbers).
//!
//! The rows and their order are those of `tests/cases.rs`, whose head says what is left out and why.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::tasks::{Door, Kept, Local, Task, Tasks, boo, elsewhere, over_tasks, panics, waiting};
use common::{
    Builder, Counted, Hashing, Queue, Sut, Tally, eventually, is_cycle, ms, over_shapes, plain, scaled, secs,
    until_waiting,
};
use quell::{
    AsyncLoader, Backoff, BoxError, BoxFuture, Cache, Job, LoadContext, LoadError, LoadErrorKind, Loaded,
    ManualClock, Op, Outcome, Provenance, Rejected, Ttl,
};
use smol::block_on;
use smol::future::{yield_now, zip};
use std::cell::Cell;
use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, OnceLock, Weak};
use std::thread;
use std::time::Duration;

type Error = std::io::Error;

fn boom() -> Error {
    Error::other("boom")
}

/// Takes the whole value, so that the future that calls it holds it.
fn number(value: Counted) -> u32 {
    value.0 as u32
}

/// The value of key 1 by each method that takes a future.
fn ways<'a, F>(cache: &'a Sut<u32, u32>, load: impl Fn() -> F) -> [Local<'a, u32>; 7]
where
    F: Future<Output = u32> + Send + 'static,
{
    let [with, tried, again, option, asked, tried_asked, many] = [(); 7].map(|()| load());
    [
        Box::pin(cache.get_with_async(&1, with)),
        Box::pin(async {
            cache.try_get_with_async(&1, async { Ok::<_, Error>(tried.await) }).await.unwrap()
        }),
        Box::pin(async {
            cache.try_get_with_async(&1, async { Ok::<_, std::fmt::Error>(again.await) }).await.unwrap()
        }),
        Box::pin(async { cache.optionally_get_with_async(&1, async { Some(option.await) }).await.unwrap() }),
        Box::pin(async { cache.ask(&1).load_with_async(asked).await.unwrap().value }),
        Box::pin(async {
            cache
                .ask(&1)
                .try_load_with_async(async { Ok::<_, Error>(tried_asked.await) })
                .await
                .unwrap()
                .value
        }),
        Box::pin(async {
            let load = |_| async { Ok::<_, Error>([(1, many.await)]) };
            cache.load_many_async([1], load).await.unwrap()[&1]
        }),
    ]
}

/// The value of a key by a future that stops at a door.
async fn behind<V: Clone + Send + Sync + 'static>(cache: &Sut<u32, V>, key: u32, door: &Door, value: V) -> V {
    let door = door.clone();
    let load = async move {
        door.pass().await;
        value
    };
    cache.get_with_async(&key, load).await
}

/// The value of key 1, which somebody else loads.
async fn joined<V: Clone + Send + Sync + 'static>(cache: &Sut<u32, V>) -> V {
    cache.get_with_async(&1, async { unreachable!("it joins") }).await
}

// A flight that never ends, or ends wrongly.

#[test]
fn clean_up_after_an_await() {
    // What came after an await in the leader cleaned up, and a leader that was dropped never came to it (pingora#931,
    // talon#162).
    for polls in 0..5 {
        for nth in 0..7 {
            over_tasks(|builder: Builder<u32, u32>| {
                let (cache, alive, loads) = (builder.build(), Tally::default(), Tally::default());
                let load = || {
                    let (token, loads) = (Counted::new(0, &alive), loads.clone());
                    async move {
                        loads.add();
                        for _ in 0..3 {
                            yield_now().await;
                        }
                        number(token)
                    }
                };
                let way = ways(&cache, load).into_iter().nth(nth).unwrap();
                let mut leader = Task::new(way);
                (0..polls).for_each(|_| _ = leader.poll());
                drop(leader);
                eventually(|| cache.in_flight().is_empty() && alive.get() == 0);
                assert!(loads.get() <= 1);
                // At some points the load had ended already.
                let value = block_on(cache.get_with_async(&1, async { 9 }));
                assert_eq!((value, cache.get(&1)), (cache.get(&1).unwrap(), Some(value)));
                assert!(value == 9 || loads.get() == 1 && value == 0);
            });
        }
    }
}

#[test]
fn progress_needs_somebody_elses_poll() {
    // A leader that was alive but never polled again held up all others (moka#240, risingwave#3909).
    over_tasks(|builder: Builder<u32, u32>| {
        let (cache, door) = (builder.build(), Door::default());
        let asleep = Task::waiting(behind(&cache, 1, &door, 7));
        // In the same task, in others, and in threads of their own.
        let both = Task::waiting(zip(joined(&cache), joined(&cache)));
        let other = Task::waiting(joined(&cache));
        thread::scope(|s| {
            let elsewhere = s.spawn(|| block_on(joined(&cache)));
            let blocking = s.spawn(|| cache.get_with(&1, || unreachable!("it joins")));
            until_waiting(&cache, 5);
            door.open();
            assert_eq!((elsewhere.join().unwrap(), blocking.join().unwrap()), (7, 7));
        });
        assert_eq!((both.finish(), other.finish(), cache.get(&1)), ((7, 7), 7, Some(7)));
        assert_eq!((asleep.finish(), cache.stats().loads, cache.in_flight().len()), (7, 1, 0));
    });
}

#[test]
fn progress_needs_somebody_elses_poll_in_a_buffer_of_one_or_a_select() {
    // As above: a buffer that polls only its first future, and a `select!` that holds the loser (moka#240).
    over_tasks(|builder: Builder<u32, u32>| {
        let cache = builder.build();
        for key in 0..20 {
            let load = move || async move {
                yield_now().await;
                yield_now().await;
                key
            };
            let taken = block_on(async {
                let mut loser = Box::pin(cache.get_with_async(&key, load()));
                // Whoever is first polls the other one never again.
                let first = smol::future::poll_once(&mut loser).await;
                let other = cache.get_with_async(&key, load()).await;
                (first.unwrap_or(key), other, loser)
            });
            assert_eq!((taken.0, taken.1, cache.get(&key)), (key, key, Some(key)));
            // Who waits may have the value a moment before the one who ended the flight is done with it.
            eventually(|| cache.in_flight().is_empty());
        }
        assert_eq!(cache.stats().loads, 20);
    });
}

#[test]
fn panic_leaves_computing_behind() {
    // A loader's panic left the key marked as being computed, and everybody waited for ever (moka#43, go#33519, groupcache#38).
    over_tasks(|builder: Builder<u32, u32>| {
        let (cache, door, loads) = (builder.build(), Door::default(), Tally::default());
        let stop = door.clone();
        let load = async move {
            stop.pass().await;
            boo("boom")
        };
        let mut leader = Task::new(panics(cache.get_with_async(&1, load)));
        leader.run();
        eventually(|| door.arrived() == 1);
        let waiters = Tasks::new(50, |n| {
            let loads = loads.clone();
            let load = async move {
                loads.add();
                7
            };
            let cache = &cache;
            async move {
                match n % 3 {
                    0 => cache.get_with_async(&1, load).await,
                    1 => cache.try_get_with_async(&1, async { Ok::<_, Error>(load.await) }).await.unwrap(),
                    _ => cache.optionally_get_with_async(&1, async { Some(load.await) }).await.unwrap(),
                }
            }
        });
        assert_eq!(waiting(&cache), 50);
        door.open();
        assert_eq!(waiters.finish(), [7; 50]);
        // It resumes in its own caller, whoever polled the load.
        assert_eq!(leader.finish(), Err("boom".to_owned()));
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((loads.get(), cache.in_flight().len(), cache.stats().loader_panics), (1, 0, 1));
    });
}

#[test]
fn panic_leaves_computing_behind_in_a_background_refresh() {
    // As above, where nobody's own call panics (moka#43).
    for spawns in [false, true] {
        let (clock, calls) = (ManualClock::new(), Tally::default());
        let count = calls.clone();
        let builder = plain().soft_ttl(secs(1)).clock(clock.clone());
        let builder = if spawns { builder.spawner(elsewhere) } else { builder };
        let load = move |_: u32| {
            let n = count.add() as u32;
            async move { if n == 1 { boo("boom") } else { Ok::<_, Error>(n) } }
        };
        let cache = builder.async_loader_fn(load).build();
        let get = || block_on(cache.get_or_load_async(&1)).unwrap();
        assert_eq!(get(), 0);
        clock.advance(secs(1));
        assert_eq!(get(), 0);
        eventually(|| cache.stats().loader_panics == 1 && cache.in_flight().is_empty());
        // The failure is remembered for a while; then the next refresh works.
        assert_eq!((get(), calls.get()), (0, 2));
        clock.advance(secs(1));
        assert_eq!(get(), 0);
        eventually(|| cache.peek(&1) == Some(2));
    }
}

#[test]
fn panic_leaves_computing_behind_in_a_background_refresh_that_others_wait_for() {
    // As above, with 50 who have joined the refresh, since nothing is there yet.
    for spawns in [false, true] {
        let (door, calls) = (Door::default(), Tally::default());
        let (stop, count) = (door.clone(), calls.clone());
        let load = move |_: u32| {
            let (first, stop) = (count.add() == 0, stop.clone());
            async move {
                if !first {
                    return Ok::<_, Error>(7);
                }
                stop.pass().await;
                boo("boom")
            }
        };
        let builder = if spawns { plain().spawner(elsewhere) } else { plain() };
        let cache = builder.async_loader_fn(load).build();
        assert!(cache.refresh(&1));
        eventually(|| door.arrived() == 1);
        let waiters = Tasks::new(50, |nth| {
            let cache = &cache;
            async move {
                match nth % 3 {
                    0 => cache.get_with_async(&1, async { 7 }).await,
                    1 => cache.try_get_with_async(&1, async { Ok::<_, Error>(7) }).await.unwrap(),
                    _ => cache.get_or_load_async(&1).await.unwrap(),
                }
            }
        });
        assert_eq!(waiting(&cache), 50);
        door.open();
        assert_eq!(waiters.finish(), [7; 50]);
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((cache.stats().loads, cache.stats().loader_panics, cache.get(&1)), (2, 1, Some(7)));
    }
}

#[test]
fn waiters_tied_to_the_leaders_life() {
    // The leader was aborted, and all who waited got its error (foyer#1118, hyper-util#299).
    over_tasks(|builder: Builder<u32, usize>| {
        let (cache, door, loads) = (builder.build(), Door::default(), Tally::default());
        let load = || {
            let (door, loads) = (door.clone(), loads.clone());
            async move {
                let nth = loads.add();
                door.pass().await;
                nth
            }
        };
        let mut tasks = Tasks::new(54, |_| cache.get_with_async(&1, load()));
        eventually(|| door.arrived() == 1);
        // The leader, and whoever may poll in its place, one after the other.
        for left in (50..54).rev() {
            drop(tasks.0.remove(0));
            tasks.settle();
            assert_eq!((loads.get(), cache.in_flight().len(), waiting(&cache)), (1, 1, left));
        }
        door.open();
        // The load goes on from where it was.
        assert_eq!(tasks.finish(), [0; 50]);
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((loads.get(), cache.get(&1), cache.in_flight().len()), (1, Some(0), 0));
    });
}

#[test]
fn waiters_tied_to_the_leaders_life_where_all_are_aborted() {
    // As above, in any order, with some that come in between: the last one ends the load, and the next one leads.
    over_tasks(|builder: Builder<u32, usize>| {
        let (cache, alive) = (builder.build(), Tally::default());
        let mut random = common::Random(7);
        for _ in 0..20 {
            let (door, token) = (Door::default(), || Counted::new(0, &alive));
            let mut tasks = Tasks::new(8, |_| {
                let (door, token) = (door.clone(), token());
                cache.get_with_async(&1, async move {
                    door.pass().await;
                    number(token) as usize
                })
            });
            for _ in 0..4 {
                let other = token();
                tasks
                    .0
                    .push(Task::new(cache.get_with_async(&1, async move { number(other) as usize + 100 })));
                drop(tasks.0.swap_remove(random.below(tasks.0.len() as u64) as usize));
                tasks.settle();
            }
            while !tasks.0.is_empty() {
                assert_eq!(cache.in_flight().len(), 1);
                drop(tasks.0.swap_remove(random.below(tasks.0.len() as u64) as usize));
                tasks.settle();
            }
            eventually(|| cache.in_flight().is_empty() && alive.get() == 0);
            assert_eq!((cache.get(&1), cache.len()), (None, 0));
        }
        assert_eq!(block_on(cache.get_with_async(&1, async { 3 })), 3);
    });
}

#[cfg(feature = "tokio")]
#[test]
fn waiters_tied_to_the_leaders_life_under_tokio() {
    // As above, with the runtime's own `abort` (foyer#1118, hyper-util#299).
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    runtime.block_on(async {
        let (cache, door, loads) = (plain::<u32, usize>().build(), Door::default(), Tally::default());
        let call = || {
            let (cache, door, loads) = (cache.clone(), door.clone(), loads.clone());
            tokio::spawn(async move {
                let load = async move {
                    let nth = loads.add();
                    door.pass().await;
                    nth
                };
                cache.get_with_async(&1, load).await
            })
        };
        let leader = call();
        eventually(|| door.arrived() == 1);
        let waiters: Vec<_> = (0..50).map(|_| call()).collect();
        until_waiting(&cache, 50);
        leader.abort();
        assert!(leader.await.unwrap_err().is_cancelled());
        door.open();
        for waiter in waiters {
            assert_eq!(waiter.await.unwrap(), 0);
        }
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((loads.get(), cache.in_flight().len()), (1, 0));
    });
}

#[test]
fn remove_by_key_without_identity() {
    // The clean-up of a forgotten flight removed the newer flight of the key (async_singleflight#12, go#31420).
    over_tasks(|builder: Builder<u32, u32>| {
        let (cache, doors) = (builder.build(), [(); 4].map(|()| Door::default()));
        let lead = |n: usize| {
            let task = Task::waiting(behind(&cache, 1, &doors[n], n as u32));
            eventually(|| doors[n].arrived() == 1);
            task
        };
        let a = lead(0);
        cache.invalidate(&1);
        let b = lead(1);
        cache.invalidate(&1);
        let gone = lead(2);
        cache.invalidate(&1);
        let c = lead(3);
        // The first ones end or are dropped; C's flight is untouched, and may be joined.
        (0..2).for_each(|n| doors[n].open());
        drop(gone);
        assert_eq!((a.finish(), b.finish()), (0, 1));
        assert_eq!((cache.get(&1), cache.in_flight().len()), (None, 1));
        let d = Task::waiting(joined(&cache));
        doors[3].open();
        assert_eq!((c.finish(), d.finish(), cache.get(&1)), (3, 3, Some(3)));
    });
}

#[test]
fn join_just_as_the_flight_drains() {
    // Who joined while the last one left got a dead flight (xet-core#449, tailscale#18919). The models try each interleaving.
    over_tasks(|builder: Builder<usize, usize>| {
        let cache = builder.build();
        let rounds = scaled(200, 20_000);
        let start = Barrier::new(4);
        thread::scope(|s| {
            for t in 0..4 {
                let (cache, start) = (&cache, &start);
                s.spawn(move || {
                    for round in 0..rounds {
                        let load = async move {
                            yield_now().await;
                            round
                        };
                        start.wait();
                        match t {
                            // Goes at some point, whoever leads.
                            0 | 1 => {
                                let mut task = Task::new(cache.get_with_async(&round, load));
                                (0..=(round + t) % 3).for_each(|_| _ = task.poll());
                            }
                            2 => assert_eq!(block_on(cache.get_with_async(&round, load)), round),
                            _ => assert_eq!(cache.get_with(&round, || round), round),
                        }
                        start.wait();
                        assert_eq!(cache.get(&round), Some(round));
                    }
                });
            }
        });
        eventually(|| cache.in_flight().is_empty());
    });
}

#[test]
fn lost_first_notification() {
    // The first waiter registered while the leader finished, and was never woken (event-listener#138).
    over_tasks(|builder: Builder<usize, usize>| {
        let cache = builder.build();
        let rounds = scaled(1_000, 200_000);
        let at = AtomicUsize::new(0);
        thread::scope(|s| {
            for t in 0..2 {
                let (cache, at) = (&cache, &at);
                s.spawn(move || {
                    for round in 0..rounds {
                        // Both start a round at the same time.
                        at.fetch_add(1, Ordering::SeqCst);
                        while at.load(Ordering::SeqCst) < 2 * (round + 1) {
                            thread::yield_now();
                        }
                        let load = async move {
                            if round % 2 == 0 {
                                yield_now().await;
                            }
                            round
                        };
                        assert_eq!(block_on(cache.get_with_async(&round, load)), round);
                        if t == 0 && round > 1 {
                            cache.invalidate(&(round - 2));
                        }
                    }
                });
            }
        });
        assert_eq!(cache.stats().loads, rounds as u64);
    });
}

#[test]
fn waker_replaced_during_completion() {
    // A waiter was polled by waker A and then by waker B while the leader settled, and B was never woken (quick-cache#104).
    over_tasks(|builder: Builder<usize, usize>| {
        let cache = builder.build();
        for round in 0..scaled(300, 50_000) {
            let (start, sent) = (Barrier::new(2), Door::default());
            let opens = sent.clone();
            let load = async move {
                opens.pass().await;
                round
            };
            let leader = Task::waiting(cache.get_with_async(&round, load));
            let mut waiter = Task::waiting(cache.get_with_async(&round, async { unreachable!("it joins") }));
            thread::scope(|s| {
                let (start, sent) = (&start, &sent);
                s.spawn(move || {
                    start.wait();
                    sent.open();
                });
                start.wait();
                for _ in 0..round % 4 {
                    waiter.change_waker();
                    waiter.poll();
                }
                // Woken by the last waker, or it would not end.
                assert_eq!(waiter.finish(), round);
            });
            assert_eq!(leader.finish(), round);
        }
    });
}

#[test]
fn two_writers_to_one_flight() {
    // The loader and an `insert` both filled a placeholder (quick-cache#40).
    over_tasks(|builder: Builder<u32, Counted>| {
        let (cache, alive) = (builder.build(), Tally::default());
        let rounds = scaled(500, 100_000) as u64;
        thread::scope(|s| {
            s.spawn(|| {
                (0..rounds).for_each(|n| {
                    let value = Counted::new(2 * n, &alive);
                    let got = block_on(cache.get_with_async(&1, async move {
                        yield_now().await;
                        value
                    }));
                    assert!(got.0 % 2 == 1 || got.0 <= 2 * n, "round {n} got {}", got.0);
                });
            });
            s.spawn(|| (0..rounds).for_each(|n| cache.insert(1, Counted::new(2 * n + 1, &alive))));
            s.spawn(|| (0..rounds).for_each(|_| drop(cache.remove(&1))));
        });
        eventually(|| cache.in_flight().is_empty());
        assert!(cache.in_flight().is_empty() && cache.len() <= 1);
        cache.invalidate(&1);
        eventually(|| {
            cache.run_pending_tasks();
            alive.get() == 0
        });
    });
}

#[test]
fn late_owner_not_fenced() {
    // The lease was over, another led, and the first one's late result went into the cache (pingora 9f21fa4).
    over_tasks(|builder: Builder<u32, &'static str>| {
        let clock = ManualClock::new();
        let cache = builder.lease(ms(100)).clock(clock.clone()).build();
        let doors = [(); 2].map(|()| Door::default());
        let a = Task::waiting(behind(&cache, 1, &doors[0], "a"));
        let mut b = Task::waiting(behind(&cache, 1, &doors[1], "b"));
        assert_eq!(waiting(&cache), 1);
        clock.advance(ms(100));
        assert!(b.run(), "it was woken, and takes over");
        eventually(|| doors[1].arrived() == 1);
        let c = Task::waiting(joined(&cache));
        doors[0].open();
        assert_eq!((a.finish(), cache.get(&1)), ("a", None));
        doors[1].open();
        assert_eq!((b.finish(), c.finish(), cache.get(&1)), ("b", "b", Some("b")));
        let stats = cache.stats();
        assert_eq!((stats.loads, stats.takeovers, stats.fenced, stats.in_flight), (2, 1, 1, 0));
        assert!(stats.joins <= 3, "{stats:?}");
    });
}

#[test]
fn takeover_not_exclusive() {
    // Every waiter of a hung leader led (pingora c3f22fa).
    over_tasks(|builder: Builder<u32, usize>| {
        let clock = ManualClock::new();
        let cache = builder.lease(secs(1)).clock(clock.clone()).build();
        let (hung, last, loads) = (Door::default(), Door::default(), Tally::default());
        let mut tasks = Tasks::new(101, |_| {
            let (hung, last, loads) = (hung.clone(), last.clone(), loads.clone());
            cache.get_with_async(&1, async move {
                let n = loads.add();
                let door = if n < 3 { hung } else { last };
                door.pass().await;
                n
            })
        });
        for period in 1..=4 {
            tasks.until(|| loads.get() == period && waiting(&cache) == 101 - period);
            assert_eq!(loads.get(), period);
            if period < 4 {
                clock.advance(secs(1));
            }
        }
        last.open();
        tasks.until(|| cache.get(&1) == Some(3));
        hung.open();
        let mut got = tasks.finish();
        got.sort_unstable();
        // Late owners get their own, all others the last one's.
        assert_eq!((&got[..3], &got[3..]), (&[0, 1, 2][..], &[3; 98][..]));
        let stats = cache.stats();
        assert_eq!((stats.takeovers, stats.fenced, cache.get(&1)), (3, 3, Some(3)));
    });
}

#[test]
fn a_slow_load_under_a_lock() {
    // While one key of a shard loaded, the others of the shard waited (singleflight 0.3, cached#175).
    over_tasks(|builder: Builder<u32, u32>| {
        let (cache, door) = (builder.shards(1).hasher(Hashing::Constant).build(), Door::default());
        cache.insert(2, 2);
        let slow = Task::waiting(behind(&cache, 1, &door, 1));
        // All of these would hang.
        assert_eq!((cache.get(&2), cache.get(&1)), (Some(2), None));
        assert_eq!(Task::new(cache.get_with_async(&3, async { 3 })).finish(), 3);
        assert_eq!(cache.get_with(&4, || 4), 4);
        assert_eq!((cache.remove(&4), cache.iter().count(), cache.len()), (Some(4), 2, 2));
        assert_eq!(cache.compute(&3, |_| Op::Put(33)), Outcome::Replaced(33));
        door.open();
        assert_eq!((slow.finish(), cache.len()), (1, 3));
    });
}

/// A key and value whose every trait calls the cache, as a task would.
#[derive(Debug)]
struct Meddler(u32, Weak<OnceLock<Cache<Meddler, Meddler>>>);

thread_local! {
    static MEDDLES: Cell<bool> = const { Cell::new(false) };
    static MEDDLED: Cell<u32> = const { Cell::new(0) };
}

impl Meddler {
    fn meddle(&self) {
        let Some(home) = self.1.upgrade() else { return };
        let Some(cache) = home.get() else { return };
        if MEDDLES.replace(true) {
            return;
        }
        let nth = MEDDLED.replace(MEDDLED.get() + 1);
        let key = |n| Self(n, self.1.clone());
        let _ = cache.get(&key(1));
        // A comparison that writes to its own bucket each time would make the writer start again for ever.
        if nth.is_multiple_of(64) {
            let _ = Task::new(cache.get_with_async(&key(2), std::future::pending())).poll();
            let loaded = key(30);
            let _ = Task::new(cache.get_with_async(&key(3), async { loaded })).poll();
            cache.invalidate(&key(3));
        }
        MEDDLES.set(false);
    }
}

impl Clone for Meddler {
    fn clone(&self) -> Self {
        self.meddle();
        Self(self.0, self.1.clone())
    }
}
impl PartialEq for Meddler {
    fn eq(&self, other: &Self) -> bool {
        self.meddle();
        self.0 == other.0
    }
}
impl Eq for Meddler {}
impl Hash for Meddler {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.meddle();
        // All in one bucket, so that `Eq` is called.
        0_u32.hash(state);
    }
}
impl Drop for Meddler {
    fn drop(&mut self) {
        self.meddle();
    }
}

#[test]
fn code_of_the_user_under_a_lock() {
    // `Eq`, `Hash`, `Drop` or `Clone` called the cache and met a lock that its caller held (cached#175, cachebox#67).
    let home = Arc::new(OnceLock::new());
    let cache = Cache::<Meddler, Meddler>::builder().shards(1).build();
    home.set(cache.clone()).unwrap();
    let key = |n| Meddler(n, Arc::downgrade(&home));
    for n in 10..18 {
        let (loaded, dropped) = (key(n), key(n));
        let slow = async {
            yield_now().await;
            loaded
        };
        // Two who wait, one of whom goes.
        let (wanted, two) = (key(n), key(n));
        let mut leader = Task::new(cache.get_with_async(&wanted, slow));
        leader.poll();
        let waiter = Task::new(cache.get_with_async(&two, async { dropped }));
        drop(leader);
        assert_eq!((waiter.finish().0, cache.get(&key(n)).unwrap().0), (n, n));
    }
    cache.invalidate_all();
    cache.run_pending_tasks();
    assert!(MEDDLED.get() > 100, "{} calls", MEDDLED.get());
}

#[test]
fn re_entrance_hangs() {
    // A load that asks for its own key waited for itself (moka#59, caffeine#352, symfony#41130).
    over_tasks(|builder: Builder<char, u32>| {
        let cache = builder.build();
        fn chain(cache: Sut<char, u32>, keys: &'static str) -> BoxResult {
            Box::pin(async move {
                let Some(key) = keys.chars().next() else { return Ok(0) };
                let rest = chain(cache.clone(), &keys[1..]);
                cache.try_get_with_async(&key, async { rest.await.map(|n| n + 1) }).await
            })
        }
        for keys in ["aa", "aba", "abb", "abcdea"] {
            let error = block_on(chain(cache.clone(), keys)).unwrap_err();
            assert!(is_cycle(&error), "{keys}: {error:?}");
            eventually(|| cache.in_flight().is_empty());
            assert_eq!(cache.len(), 0);
        }
        assert_eq!(block_on(chain(cache.clone(), "abcde")).unwrap(), 5);
        // Where a call can't fail, its panic tells.
        let again = cache.clone();
        let load = async move { again.get_with_async(&'z', async { 1 }).await };
        let text = block_on(panics(cache.get_with_async(&'z', load))).unwrap_err();
        assert!(text.contains("waits for itself"), "{text}");
        // By way of a blocking call.
        let again = cache.clone();
        let load = async move { again.try_get_with(&'y', || Ok::<_, Error>(1)) };
        assert!(is_cycle(&block_on(cache.try_get_with_async(&'y', load)).unwrap_err()));
        let again = cache.clone();
        let around = cache.try_get_with(&'x', || {
            block_on(again.try_get_with_async(&'w', {
                let again = again.clone();
                async move { again.try_get_with_async(&'x', async { Ok::<_, Error>(1) }).await }
            }))
        });
        assert!(is_cycle(&around.unwrap_err()));
        eventually(|| cache.in_flight().is_empty());
    });
}

type BoxResult = std::pin::Pin<Box<dyn Future<Output = Result<u32, LoadError>> + Send>>;

/// The value of `one`, whose load waits until that of `two` has begun too, and then for its value.
async fn by_way_of(
    cache: &Sut<char, u32>,
    (one, two): (char, char),
    (mine, other): (Door, Door),
) -> Result<u32, LoadError> {
    let again = cache.clone();
    let load = async move {
        mine.open();
        other.pass().await;
        again.try_get_with_async(&two, async { Ok::<_, LoadError>(9) }).await
    };
    cache.try_get_with_async(&one, load).await
}

#[test]
fn re_entrance_hangs_across_two_tasks() {
    // As above: A loads B, and in another task B loads A.
    over_tasks(|builder: Builder<char, u32>| {
        let cache = builder.build();
        for on_threads in [false, true] {
            let (a, b) = (Door::default(), Door::default());
            let one = by_way_of(&cache, ('a', 'b'), (a.clone(), b.clone()));
            let two = by_way_of(&cache, ('b', 'a'), (b, a));
            let results = if on_threads {
                thread::scope(|s| {
                    let two = s.spawn(|| block_on(two));
                    [block_on(one), two.join().unwrap()]
                })
            } else {
                let (one, two) = block_on(zip(one, two));
                [one, two]
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
fn re_entrance_hangs_across_a_thread_and_a_task() {
    // As above: A loads B on a thread, and B loads A in a task.
    over_tasks(|builder: Builder<char, u32>| {
        let cache = builder.build();
        let (a, b) = (Door::default(), Door::default());
        let results = thread::scope(|s| {
            let (a_too, b_too) = (a.clone(), b.clone());
            let cache = &cache;
            let thread = s.spawn(move || {
                cache.try_get_with(&'a', || {
                    a_too.open();
                    block_on(b_too.pass());
                    cache.try_get_with(&'b', || Ok::<_, LoadError>(9))
                })
            });
            let task = block_on(by_way_of(cache, ('b', 'a'), (b, a)));
            [task, thread.join().unwrap()]
        });
        let mut errors = results.iter().filter_map(|r| r.as_ref().err()).peekable();
        assert!(errors.peek().is_some(), "one of the two is told: {results:?}");
        assert!(errors.all(is_cycle), "{results:?}");
        eventually(|| cache.in_flight().is_empty());
    });
}

#[test]
fn re_entrance_hangs_where_the_executor_is_faster() {
    // As above: a blocking loader that runs for a task asks for what the task loads, before the task goes on.
    let (home, told): (Arc<OnceLock<Sut<char, u32>>>, _) = (Arc::default(), Tally::default());
    let (inner, seen, count, done) = (home.clone(), home.clone(), told.clone(), told.clone());
    let executor = move |job: Job| {
        thread::spawn(|| job.run());
        // It is a slow one.
        eventually(|| waiting(seen.get().unwrap()) == 1 || done.get() == 1);
        Ok::<_, Rejected>(())
    };
    let load = move |_: &char| {
        let result = inner.get().unwrap().try_get_with(&'a', || Ok::<_, Error>(1));
        count.add();
        result
    };
    let cache = plain().executor(executor).loader_fn(load).build();
    assert!(home.set(cache.clone()).is_ok());
    let again = cache.clone();
    let load = async move { again.get_or_load_async(&'b').await };
    let error = block_on(cache.try_get_with_async(&'a', load)).unwrap_err();
    assert!(is_cycle(&error), "{error:?}");
}

#[test]
fn synchronous_failure_before_the_first_await() {
    // The loader failed before it returned its future, and the key stayed marked (FusionCache#647).
    over_tasks(|builder: Builder<u32, u32>| {
        let calls = Tally::default();
        let count = calls.clone();
        let load = move |key: u32| {
            let nth = count.add();
            if nth == 0 {
                boo::<()>("boom");
            }
            std::future::ready(if nth == 1 { Err(boom()) } else { Ok(key) })
        };
        let cache = builder.async_loader_fn(load).build();
        assert_eq!(block_on(panics(cache.get_or_load_async(&1))).map(drop), Err("boom".to_owned()));
        eventually(|| cache.in_flight().is_empty());
        assert_eq!(block_on(cache.get_or_load_async(&1)).unwrap_err().kind(), LoadErrorKind::Failed);
        assert_eq!((block_on(cache.get_or_load_async(&1)).unwrap(), cache.stats().loader_panics), (1, 1));
        // The same where there are several keys, and while others wait.
        let mut leader = Task::new(panics(cache.load_many_async([7, 8], |keys| {
            assert_eq!(keys.len(), 2);
            assert_eq!(cache.in_flight().len(), 2);
            boo::<std::future::Ready<Result<Vec<(u32, u32)>, Error>>>("many")
        })));
        assert!(leader.poll());
        assert_eq!(leader.finish().map(drop), Err("many".to_owned()));
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((cache.in_flight().len(), cache.stats().loader_panics), (0, 2));
        assert_eq!(block_on(cache.get_or_load_async(&7)).unwrap(), 7);
    });
}

#[test]
fn synchronous_failure_before_the_first_await_where_it_asks_for_its_own_key() {
    // As above: a loader that asked for its key before it returned its future waited for itself.
    over_tasks(|builder: Builder<u32, u32>| {
        let cache = builder.build();
        let load = |keys: Vec<u32>| {
            let own = cache.try_get_with(&keys[0], || Ok::<_, Error>(1));
            std::future::ready(own.map(|n| [(keys[0], n)]))
        };
        let error = block_on(cache.load_many_async([1, 2], load)).unwrap_err();
        assert!(is_cycle(&error), "{error:?}");
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((cache.in_flight().len(), cache.len()), (0, 0));
    });
}

#[test]
fn panic_while_publishing() {
    // A callback's panic between the load and its publication left the key stuck (bolt#918, FusionCache#644).
    for what in ["clone", "weigher", "expiry"] {
        over_tasks(|builder: Builder<u32, Fragile>| {
            let (armed, door) = (Arc::new(AtomicBool::new(false)), Door::default());
            let trip = {
                let armed = armed.clone();
                move |name| {
                    if what == name && armed.swap(false, Ordering::SeqCst) {
                        boo(what)
                    }
                }
            };
            let (in_weigher, in_expiry) = (trip.clone(), trip);
            let cache = builder
                .max_capacity(10)
                .weigher(move |_, _| {
                    in_weigher("weigher");
                    1
                })
                .expire_after(move |_: &u32, _: &Fragile, _: Option<Duration>| {
                    in_expiry("expiry");
                    Ttl::default()
                })
                .build();
            let (stop, arms) = (door.clone(), armed.clone());
            let load = async move {
                stop.pass().await;
                arms.store(true, Ordering::SeqCst);
                Fragile(1, (what == "clone").then_some(arms))
            };
            let mut leader = Task::new(panics(cache.get_with_async(&1, load)));
            leader.run();
            let waiters = Tasks::new(8, |_| cache.get_with_async(&1, async { Fragile(2, None) }));
            assert_eq!(waiting(&cache), 8);
            door.open();
            assert!(waiters.finish().iter().all(|value| value.0 == 2));
            assert_eq!(leader.finish().map(|value| value.0), Err(what.to_owned()));
            eventually(|| cache.in_flight().is_empty());
            assert_eq!((cache.get(&1).unwrap().0, cache.in_flight().len()), (2, 0));
            assert_eq!((cache.weighted_size(), cache.stats().loader_panics), (1, 1));
        });
    }
}

/// A value whose next clone panics on demand.
#[derive(Debug)]
struct Fragile(u32, Option<Arc<AtomicBool>>);

impl Clone for Fragile {
    fn clone(&self) -> Self {
        if self.1.as_ref().is_some_and(|armed| armed.swap(false, Ordering::SeqCst)) {
            boo("clone")
        }
        Self(self.0, self.1.clone())
    }
}

#[test]
fn failure_not_shared() {
    // Each waiter of a failing load loaded in its turn, one after the other (caffeine#521, #425, quick_cache).
    over_tasks(|builder: Builder<u32, u32>| {
        let (cache, door, loads) = (builder.build(), Door::default(), Tally::default());
        let tasks = Tasks::new(9, |_| {
            let (door, loads) = (door.clone(), loads.clone());
            cache.try_get_with_async(&1, async move {
                loads.add();
                door.pass().await;
                Err::<u32, _>(boom())
            })
        });
        thread::scope(|s| {
            let thread = s.spawn(|| cache.try_get_with(&1, || Ok::<_, Error>(0)));
            until_waiting(&cache, 9);
            door.open();
            for error in tasks.finish().into_iter().chain([thread.join().unwrap()]).map(Result::unwrap_err) {
                assert_eq!(error.kind(), LoadErrorKind::Failed);
                assert_eq!(error.downcast_ref::<Error>().unwrap().to_string(), "boom");
            }
        });
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((loads.get(), cache.len(), cache.in_flight().len()), (1, 0, 0));
    });
}

#[test]
fn time_out_becomes_a_load() {
    // Those whose wait ended loaded themselves: the stampede came late (FusionCache LockTimeout, nginx lock_timeout).
    for grace in [false, true] {
        over_tasks(|builder: Builder<u32, u32>| {
            let clock = ManualClock::new();
            let cache = builder
                .wait_timeout(ms(10))
                .time_to_live(secs(1))
                .stale_if_error(secs(100))
                .clock(clock.clone())
                .build();
            if grace {
                cache.insert(1, 5);
                clock.advance(secs(2));
            }
            let (door, loads) = (Door::default(), Tally::default());
            let mut tasks = Tasks::new(1_000, |_| {
                let (door, loads) = (door.clone(), loads.clone());
                cache.try_get_with_async(&1, async move {
                    loads.add();
                    door.pass().await;
                    Ok::<_, Error>(6)
                })
            });
            assert_eq!((tasks.ended(), waiting(&cache)), (0, 999));
            clock.advance(ms(10));
            tasks.settle();
            assert_eq!((tasks.ended(), waiting(&cache)), (999, 0));
            door.open();
            let (got, late): (Vec<_>, Vec<_>) = tasks.finish().into_iter().partition(|r| matches!(r, Ok(6)));
            assert_eq!((got.len(), late.len()), (1, 999));
            for one in late {
                match one {
                    Ok(value) => assert!(grace && value == 5),
                    Err(error) => assert!(!grace && error.kind() == LoadErrorKind::TimedOut, "{error}"),
                }
            }
            let stats = cache.stats();
            assert_eq!((loads.get(), stats.wait_timeouts), (1, 999));
            assert_eq!(stats.grace_hits, if grace { 999 } else { 0 });
        });
    }
}

#[test]
fn hung_loader_pins_the_key() {
    // A loader that never came back held its key for ever (dialogporten#4252).
    over_tasks(|builder: Builder<u32, u32>| {
        let clock = ManualClock::new();
        let cache = builder.lease(ms(100)).clock(clock.clone()).build();
        let (hung, alive) = (Door::default(), Tally::default());
        let (stop, token) = (hung.clone(), Counted::new(0, &alive));
        let first = Task::waiting(cache.get_with_async(&1, async move {
            stop.pass().await;
            number(token) + 1
        }));
        clock.advance(ms(99));
        let second = Task::waiting(cache.get_with_async(&1, async { 2 }));
        clock.advance(ms(1));
        assert_eq!(second.finish(), 2);
        // Who comes now is not concerned.
        assert_eq!(block_on(cache.get_with_async(&1, async { 3 })), 2);
        hung.open();
        assert_eq!((first.finish(), cache.get(&1), cache.stats().fenced), (1, Some(2), 1));
        // One that hangs for good goes with its caller.
        cache.invalidate(&1);
        let token = Counted::new(0, &alive);
        let first = Task::waiting(cache.get_with_async(&1, async move {
            std::future::pending::<()>().await;
            number(token)
        }));
        clock.advance(ms(100));
        assert_eq!(cache.get_with(&1, || 4), 4);
        drop(first);
        eventually(|| alive.get() == 0 && cache.in_flight().is_empty());
        assert_eq!(cache.get(&1), Some(4));
    });
}

// One load became two, or the wrong one was shared.

#[test]
fn no_second_look_after_winning() {
    // Who won the lock did not look whether the value had come meanwhile (moka#195, pingora#110, otter#152).
    for spawns in [false, true] {
        let keys = scaled(4_000, 20_000) as u32;
        let builder = plain::<u32, u32>();
        let cache = if spawns { builder.spawner(elsewhere) } else { builder }.build();
        let (loads, start) = (Tally::default(), Barrier::new(4));
        thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    start.wait();
                    for key in 0..keys {
                        let loads = loads.clone();
                        block_on(cache.get_with_async(&key, async move { loads.add() as u32 }));
                    }
                });
            }
        });
        assert_eq!((loads.get() as u32, cache.stats().loads), (keys, keys.into()));
        assert_eq!(cache.len(), keys as usize);
    }
}

#[test]
fn flights_split_by_error_type() {
    // Loads of one key with different error types did not share (moka: five loaders at once for one key). Each way leads once.
    for first in 0..9 {
        over_tasks(|builder: Builder<u32, u32>| {
            let (door, loads) = (Door::default(), Tally::default());
            let (stop, count) = (door.clone(), loads.clone());
            let load = move || {
                let (door, loads) = (stop.clone(), count.clone());
                async move {
                    loads.add();
                    door.pass().await;
                    7
                }
            };
            let attached = load.clone();
            let loader = move |_: u32| {
                let load = attached();
                async { Ok::<_, Error>(load.await) }
            };
            let cache = builder.async_loader_fn(loader).build();
            let mut all: Vec<Local<'_, u32>> = ways(&cache, &load).into();
            all.push(Box::pin(async { cache.get_or_load_async(&1).await.unwrap() }));
            all.push(Box::pin(async { cache.ask(&1).load_async().await.unwrap().value }));
            all.rotate_left(first);
            let mut tasks = Tasks(all.into_iter().map(Task::new).collect());
            tasks.settle();
            thread::scope(|s| {
                let threads = [
                    s.spawn(|| cache.get_with(&1, || unreachable!("it joins"))),
                    s.spawn(|| cache.get_or_load(&1).unwrap()),
                ];
                until_waiting(&cache, 10);
                let compute = s.spawn(|| cache.compute(&1, |v| Op::Put(v.unwrap() + 1)));
                until_waiting(&cache, 11);
                assert!(cache.refresh(&1));
                door.open();
                assert_eq!(tasks.finish(), [7; 9]);
                assert_eq!(threads.map(|t| t.join().unwrap()), [7; 2]);
                assert_eq!(compute.join().unwrap(), Outcome::Replaced(8));
            });
            assert_eq!((loads.get(), cache.stats().loads), (1, 2), "with that of `compute`");
        });
    }
}

#[test]
fn bulk_and_single_do_not_share() {
    // A load of many keys and loads of one did not join each other (caffeine#1409, #322).
    over_tasks(|builder: Builder<u32, u32>| {
        let (door, loads) = (Door::default(), Tally::default());
        let (stop, count) = (door.clone(), loads.clone());
        let loader = move |key: u32| {
            count.add();
            let stop = stop.clone();
            async move {
                stop.pass().await;
                Ok::<_, Error>(key)
            }
        };
        let cache = builder.async_loader_fn(loader).build();
        let many = |keys: std::ops::Range<u32>| {
            let (door, loads) = (door.clone(), loads.clone());
            cache.load_many_async(keys, move |keys| async move {
                keys.iter().for_each(|_| _ = loads.add());
                door.pass().await;
                Ok::<_, Error>(keys.into_iter().map(|key| (key, key)))
            })
        };
        let single = Task::waiting(cache.get_or_load_async(&3));
        let (one, two) = (Task::waiting(many(0..6)), Task::waiting(many(4..10)));
        let other = Task::waiting(cache.get_or_load_async(&8));
        assert!(cache.refresh(&0) && cache.refresh(&9));
        // Each waits for its own load first; then `one` for 3, and `two` for 4 and 5.
        door.open();
        assert_eq!((single.finish().unwrap(), other.finish().unwrap()), (3, 8));
        assert_eq!(one.finish().unwrap(), (0..6).map(|n| (n, n)).collect());
        assert_eq!(two.finish().unwrap(), (4..10).map(|n| (n, n)).collect());
        assert_eq!((loads.get(), cache.len(), cache.stats().loads), (10, 10, 10));
    });
    // By the attached loader.
    over_tasks(|builder: Builder<u32, u32>| {
        let (door, loads) = (Door::default(), Tally::default());
        let (stop, count) = (door.clone(), loads.clone());
        let load = move |keys: Vec<u32>| {
            keys.iter().for_each(|_| _ = count.add());
            let stop = stop.clone();
            async move {
                stop.pass().await;
                Ok::<_, Error>(keys.into_iter().map(|key| (key, key)))
            }
        };
        let cache = builder.async_batch_loader(load).build();
        let single = Task::waiting(cache.get_or_load_async(&3));
        let (one, two) =
            (Task::waiting(cache.get_many_async(0..6)), Task::waiting(cache.get_many_async(4..10)));
        let other = Task::waiting(cache.get_or_load_async(&8));
        assert!(cache.refresh(&0) && cache.refresh(&9));
        door.open();
        assert_eq!((single.finish().unwrap(), other.finish().unwrap()), (3, 8));
        assert_eq!(one.finish().unwrap(), (0..6).map(|n| (n, n)).collect());
        assert_eq!(two.finish().unwrap(), (4..10).map(|n| (n, n)).collect());
        assert_eq!((loads.get(), door.arrived(), cache.len(), cache.stats().loads), (10, 3, 10, 10));
    });
}

#[test]
fn bulk_returns_other_keys() {
    // What a loader of many keys returned beside them was stored, or mixed up with them (caffeine#655).
    over_tasks(|builder: Builder<u32, &'static str>| {
        let cache = builder.build();
        cache.insert(7, "old");
        let load = |keys: Vec<u32>| {
            assert_eq!(keys.len(), 3);
            // Somebody invalidates a key that is about to be returned unasked.
            cache.invalidate(&7);
            async { Ok::<_, Error>([(9, "nine"), (3, "three"), (7, "seven"), (1, "one")]) }
        };
        let got = block_on(cache.load_many_async([1, 2, 3], load)).unwrap();
        assert_eq!(got, HashMap::from([(1, "one"), (3, "three")]));
        assert_eq!((cache.get(&1), cache.get(&3), cache.len()), (Some("one"), Some("three"), 2));
        assert_eq!((cache.get(&2), cache.get(&7), cache.get(&9)), (None, None, None));
    });
    over_tasks(|builder: Builder<u32, &'static str>| {
        let load =
            |_: Vec<u32>| async { Ok::<_, Error>([(9, "nine"), (3, "three"), (7, "seven"), (1, "one")]) };
        let cache = builder.async_batch_loader(load).build();
        let got = block_on(cache.get_many_async([1, 2, 3])).unwrap();
        assert_eq!(got, HashMap::from([(1, "one"), (3, "three")]));
        assert_eq!((cache.get(&1), cache.get(&3), cache.len()), (Some("one"), Some("three"), 2));
        assert_eq!(block_on(cache.get_or_load_async(&2)).unwrap_err().kind(), LoadErrorKind::Absent);
        assert_eq!((cache.get(&2), cache.get(&7), cache.get(&9)), (None, None, None));
    });
}

#[test]
fn stale_refresh_runs_many_times() {
    // Each read of a stale key started a refresh (async-cache-dedupe#164, cache goburrow#15).
    for spawns in [false, true] {
        let (clock, queue, kept) = (ManualClock::new(), Queue::default(), Kept::default());
        let loads = Tally::default();
        let count = loads.clone();
        let builder = plain().soft_ttl(secs(1)).clock(clock.clone()).executor(queue.clone());
        let builder = if spawns { builder.spawner(kept.clone()) } else { builder };
        let cache =
            builder.async_loader_fn(move |_: u32| std::future::ready(Ok::<_, Error>(count.add()))).build();
        cache.insert(1, 0);
        loads.add();
        clock.advance(secs(2));
        thread::scope(|s| {
            for _ in 0..4 {
                let get = || assert_eq!(block_on(cache.get_or_load_async(&1)).unwrap(), 0);
                s.spawn(move || (0..25_000).for_each(|_| get()));
            }
        });
        assert_eq!((queue.len() + kept.len(), loads.get(), cache.stats().stale_hits), (1, 1, 100_000));
        assert_eq!(queue.run() + kept.run(), 1);
        assert_eq!((cache.get(&1), loads.get()), (Some(1), 2));
        assert_eq!((block_on(cache.get_or_load_async(&1)).unwrap(), queue.len() + kept.len()), (1, 0));
    }
}

#[test]
fn compute_loses_an_update() {
    // Two computations read the same old value (moka#574, #593). Here they meet loads that are futures.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).build().unwrap();
    over_shapes(|builder: Builder<u32, u32>| {
        let cache = builder.build();
        let mut seen = runtime.block_on(async {
            let each = |_| {
                let cache = cache.clone();
                tokio::spawn(async move {
                    let _ = cache.get_with_async(&2, async { 0 }).await;
                    match cache.compute(&1, |n| Op::Put(n.map_or(1, |n| n + 1))) {
                        Outcome::Inserted(n) | Outcome::Replaced(n) => n,
                        other => panic!("{other:?}"),
                    }
                })
            };
            let tasks: Vec<_> = (0..100).map(each).collect();
            let mut seen = Vec::new();
            for task in tasks {
                seen.push(task.await.unwrap());
            }
            seen
        });
        seen.sort_unstable();
        assert_eq!(seen, (1..=100).collect::<Vec<_>>());
        assert_eq!(cache.get(&1), Some(100));
    });
}

// Stale comes back, or fresh is lost.

#[test]
fn stale_load_stored_after_invalidate() {
    // A load that read the source before an invalidation stored its value after it (moka, foyer, fibre_cache, FusionCache#625,
    // caffeine#193).
    type Write = fn(&Sut<u32, u32>);
    let writes: [(&str, Write); 5] = [
        ("invalidate", |c| c.invalidate(&1)),
        ("remove", |c| assert_eq!(c.remove(&1), None)),
        ("invalidate_all", |c| c.invalidate_all()),
        ("retain", |c| c.retain(|_, _| true)),
        ("expire", |c| assert!(!c.expire(&1))),
    ];
    for (name, write) in writes {
        over_tasks(|builder: Builder<u32, u32>| {
            let (cache, door) = (builder.build(), Door::default());
            let old = Task::waiting(behind(&cache, 1, &door, 1));
            let before = Task::waiting(joined(&cache));
            write(&cache);
            // Who comes after it neither joins nor waits.
            assert_eq!(
                Task::new(cache.ask(&1).ttl(Duration::ZERO).load_with_async(async { 2 }))
                    .finish()
                    .unwrap()
                    .value,
                2
            );
            door.open();
            // Who began before gets what was loaded.
            assert_eq!((old.finish(), before.finish()), (1, 1), "{name}");
            assert_eq!((cache.get(&1), cache.len()), (None, 0), "{name}");
            assert_eq!(block_on(cache.get_with_async(&1, async { 3 })), 3, "{name}");
        });
    }
}

#[test]
fn stale_load_stored_after_invalidate_by_a_background_refresh() {
    // As above, where the load is a refresh (caffeine#193).
    type Write = fn(&Sut<u32, usize>);
    let writes: [(&str, Option<usize>, Write); 6] = [
        ("invalidate", None, |c| c.invalidate(&1)),
        ("remove", None, |c| assert_eq!(c.remove(&1), Some(0))),
        ("invalidate_all", None, |c| c.invalidate_all()),
        ("retain none", None, |c| c.retain(|_, _| false)),
        ("retain all", Some(0), |c| c.retain(|_, _| true)),
        ("expire", Some(0), |c| assert!(c.expire(&1))),
    ];
    for spawns in [false, true] {
        for (name, left, write) in writes {
            let (door, loads) = (Door::default(), Tally::default());
            let (stop, count) = (door.clone(), loads.clone());
            let load = move |_: u32| {
                let (n, stop) = (count.add(), stop.clone());
                async move {
                    if n == 1 {
                        stop.pass().await;
                    }
                    Ok::<_, Error>(n)
                }
            };
            let builder = if spawns { plain().spawner(elsewhere) } else { plain() };
            let cache = builder.async_loader_fn(load).build();
            assert_eq!(block_on(cache.get_or_load_async(&1)).unwrap(), 0);
            assert!(cache.refresh(&1));
            eventually(|| door.arrived() == 1);
            write(&cache);
            door.open();
            eventually(|| cache.in_flight().is_empty());
            assert_eq!(cache.get(&1), left, "{name}");
            // It is counted on the other thread, after the load has left the list.
            eventually(|| cache.stats().fenced == 1);
        }
    }
}

#[test]
fn older_load_overwrites_newer_insert() {
    // A load that began before an insert replaced what was inserted (moka, foyer, FusionCache#651, cached#307).
    over_tasks(|builder: Builder<u32, u32>| {
        let (cache, door) = (builder.build(), Door::default());
        let load = Task::waiting(behind(&cache, 1, &door, 7));
        let before = Task::waiting(joined(&cache));
        cache.insert(1, 99);
        assert_eq!(Task::new(joined(&cache)).finish(), 99);
        door.open();
        assert_eq!((load.finish(), before.finish()), (7, 7));
        assert_eq!((cache.get(&1), cache.len()), (Some(99), 1));
    });
}

#[test]
fn older_load_overwrites_newer_insert_by_a_background_refresh() {
    // As above, where the load is a refresh, of a key that is there or not (caffeine#193).
    for spawns in [false, true] {
        for there in [false, true] {
            let door = Door::default();
            let stop = door.clone();
            let load = move |_: u32| {
                let stop = stop.clone();
                async move {
                    stop.pass().await;
                    Ok::<_, Error>(7)
                }
            };
            let builder = if spawns { plain().spawner(elsewhere) } else { plain() };
            let cache = builder.async_loader_fn(load).build();
            if there {
                cache.insert(1, 1);
            }
            assert!(cache.refresh(&1));
            eventually(|| door.arrived() == 1);
            cache.insert(1, 99);
            door.open();
            eventually(|| cache.stats().fenced == 1 && cache.in_flight().is_empty());
            assert_eq!((cache.get(&1), cache.len()), (Some(99), 1));
        }
    }
}

#[test]
fn waiter_gets_a_default() {
    // Waiters of a load that was invalidated or failed got a zero value (otter#137, rueidis#1014).
    for fails in [false, true] {
        over_tasks(|builder: Builder<u32, u32>| {
            let (cache, door) = (builder.build(), Door::default());
            let tasks = Tasks::new(9, |_| {
                let door = door.clone();
                cache.try_get_with_async(&1, async move {
                    door.pass().await;
                    if fails { Err(boom()) } else { Ok(7) }
                })
            });
            cache.invalidate(&1);
            door.open();
            for result in tasks.finish() {
                match result {
                    Ok(value) => assert!(!fails && value == 7),
                    Err(error) => assert!(fails && error.kind() == LoadErrorKind::Failed),
                }
            }
            assert_eq!(cache.get(&1), None);
        });
    }
}

#[test]
fn clock_read_before_a_wait() {
    // An entry's times were those of the look-up, not of the publication (moka#322, #363).
    over_tasks(|builder: Builder<u32, u32>| {
        let (clock, door) = (ManualClock::new(), Door::default());
        let cache = builder.soft_ttl(secs(5)).time_to_live(secs(10)).clock(clock.clone()).build();
        let (load, other) = (Task::waiting(behind(&cache, 1, &door, 1)), Task::waiting(joined(&cache)));
        clock.advance(secs(9));
        door.open();
        assert_eq!((load.finish(), other.finish()), (1, 1));
        clock.advance(secs(4));
        let ask = || block_on(cache.ask(&1).get_async()).unwrap().provenance;
        assert_eq!(ask(), Provenance::Fresh { age: secs(4) });
        clock.advance(secs(1));
        assert_eq!(ask(), Provenance::Stale { age: secs(5) });
        clock.advance(secs(5));
        assert_eq!(cache.get(&1), None);
    });
}

#[test]
fn refresh_ends_for_good_after_one_failure() {
    // After a failed refresh the key was never refreshed again (caffeine#498, #865, symfony#24248).
    for spawns in [false, true] {
        let (clock, queue, kept) = (ManualClock::new(), Queue::default(), Kept::default());
        let calls = Tally::default();
        let count = calls.clone();
        let builder = plain().soft_ttl(secs(1)).clock(clock.clone()).executor(queue.clone());
        let builder = if spawns { builder.spawner(kept.clone()) } else { builder };
        let load = move |_: u32| {
            std::future::ready(match count.add() {
                n @ 6.. => Ok(n),
                _ => Err(boom()),
            })
        };
        let cache = builder.async_loader_fn(load).build();
        cache.insert(1, 0);
        for attempt in 1..=7 {
            clock.advance(secs(1));
            assert_eq!(block_on(cache.get_or_load_async(&1)).unwrap(), 0, "stale goes on");
            assert_eq!((queue.run() + kept.run(), calls.get()), (1, attempt));
        }
        assert_eq!((cache.get(&1), cache.stats().load_failures), (Some(6), 6));
    }
}

#[test]
fn an_executor_or_a_spawner_refuses_everything() {
    // As above: a refused job left the marker "being refreshed" (caffeine#865).
    for spawns in [false, true] {
        let (clock, loads) = (ManualClock::new(), Tally::default());
        let count = loads.clone();
        let builder = plain()
            .soft_ttl(secs(1))
            .time_to_live(secs(10))
            .clock(clock.clone())
            .executor(|_: Job| Err(Rejected))
            .async_loader_fn(move |_: u32| std::future::ready(Ok::<_, Error>(count.add())));
        let cache = if spawns { builder.spawner(|_: BoxFuture| Err(Rejected)) } else { builder }.build();
        let get = || block_on(cache.get_or_load_async(&1)).unwrap();
        assert_eq!(get(), 0);
        clock.advance(secs(2));
        (0..100).for_each(|_| assert_eq!(get(), 0));
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((cache.in_flight().len(), cache.stats().refused_refreshes), (0, 100));
        // It costs refreshes only: past the hard deadline the caller loads.
        clock.advance(secs(10));
        assert_eq!(get(), 1);
        // And where nothing is attached, the one that is chosen loads.
        clock.advance(secs(1));
        let own = block_on(cache.get_with_async(&1, async { 50 }));
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((own, cache.in_flight().len()), (if spawns { 1 } else { 50 }, 0));
    }
}

#[test]
fn back_off_ignored() {
    // A failing source was asked on every request (nginx#1000). Attempts stay under ten a second.
    for spawns in [false, true] {
        let (clock, queue, kept) = (ManualClock::new(), Queue::default(), Kept::default());
        let calls = Tally::default();
        let count = calls.clone();
        let builder = plain::<u32, u32>().soft_ttl(secs(1)).clock(clock.clone()).executor(queue.clone());
        let builder = if spawns { builder.spawner(kept.clone()) } else { builder };
        let load = move |_| {
            count.add();
            std::future::ready(Err::<u32, _>(boom()))
        };
        let cache = builder.async_loader_fn(load).build();
        cache.insert(1, 1);
        clock.advance(secs(1));
        for _ in 0..1_000 {
            assert_eq!(block_on(cache.get_or_load_async(&1)).unwrap(), 1);
            let calls = calls.clone();
            let own = async move {
                calls.add();
                Err::<u32, _>(boom())
            };
            let got = Task::new(cache.try_get_with_async(&1, own)).finish();
            assert_eq!(got.unwrap(), 1);
            queue.run();
            kept.run();
            clock.advance(ms(1));
        }
        assert!((5..=10).contains(&calls.get()), "{} attempts in a second", calls.get());
    }
}

#[test]
fn back_off_ignored_by_a_crowd() {
    // As above, with a back-off of one's own, and callers of every kind at one time: no more attempts than its pauses allow,
    // whether there is something to serve or not.
    for (spawns, age) in [(false, None), (true, None), (false, Some(2)), (true, Some(2)), (false, Some(20))] {
        let (clock, queue, kept) = (ManualClock::new(), Queue::default(), Kept::default());
        let calls = Tally::default();
        let fails = {
            let calls = calls.clone();
            move || {
                let calls = calls.clone();
                async move {
                    calls.add();
                    yield_now().await;
                    Err::<u32, _>(boom())
                }
            }
        };
        let attached = fails.clone();
        let builder = plain::<u32, u32>()
            .soft_ttl(secs(1))
            .time_to_live(secs(15))
            .stale_if_error(secs(1_000))
            .error_backoff(Backoff::exponential(ms(100), secs(1)).jitter(0.0))
            .clock(clock.clone())
            .executor(queue.clone())
            .async_loader_fn(move |_| attached());
        let cache = if spawns { builder.spawner(kept.clone()) } else { builder }.build();
        if let Some(age) = age {
            cache.insert(1, 1);
            clock.advance(secs(age));
        }
        for _ in 0..500 {
            let mut tasks = Tasks::new(8, |nth| {
                let (cache, own) = (&cache, fails());
                async move {
                    match nth % 4 {
                        0 => cache.get_or_load_async(&1).await,
                        1 => cache.ask(&1).load_async().await.map(|answer| answer.value),
                        2 => {
                            let load = |_| async { own.await.map(|value| [(1, value)]) };
                            cache.load_many_async([1], load).await.map(|many| many[&1])
                        }
                        _ => cache.try_get_with_async(&1, own).await,
                    }
                }
            });
            cache.refresh(&1);
            tasks.until(|| {
                queue.run();
                kept.run();
                true
            });
            for got in tasks.finish() {
                assert_eq!(got.ok(), age.map(|_| 1));
            }
            clock.advance(ms(10));
        }
        // At 0, 0.1, 0.3, 0.7, 1.5 s, and then once a second, in five seconds. One that is queued begins when it is run.
        let pauses = 8;
        assert!((pauses - 1..=pauses).contains(&calls.get()), "{} attempts in 5 s, {age:?}", calls.get());
    }
}

/// Says that a value that is there is still right.
struct Unchanged;

impl AsyncLoader<u32, u32> for Unchanged {
    async fn load(&self, _: &u32, cx: &LoadContext<u32>) -> Result<Loaded<u32>, BoxError> {
        yield_now().await;
        Ok(if cx.previous().is_some() { Loaded::not_modified() } else { Loaded::new(7) })
    }
}

#[test]
fn explicit_stale_flag_on_old_result() {
    // "Not modified" kept the old times, so the value stayed stale (FusionCache#332).
    for spawns in [false, true] {
        let (clock, queue, kept) = (ManualClock::new(), Queue::default(), Kept::default());
        let builder =
            plain().soft_ttl(secs(1)).time_to_live(secs(10)).clock(clock.clone()).executor(queue.clone());
        let builder = if spawns { builder.spawner(kept.clone()) } else { builder };
        let cache = builder.async_loader(Unchanged).build();
        cache.insert(1, 7);
        for _ in 0..5 {
            clock.advance(secs(9));
            let stale = block_on(cache.ask(&1).load_async()).unwrap();
            assert_eq!(stale.provenance, Provenance::Stale { age: secs(9) });
            assert_eq!(queue.run() + kept.run(), 1);
            let answer = cache.ask(&1).get().unwrap();
            assert_eq!((answer.value, answer.provenance), (7, Provenance::Fresh { age: Duration::ZERO }));
        }
    }
}

// Memory that is never given back.

#[test]
fn flight_kept_by_a_map_or_a_cycle() {
    // Ended flights stayed in a map, or in a cycle of references (moka#329, singleflight-async#5).
    for spawns in [false, true] {
        let builder = plain::<usize, Counted>();
        let cache = if spawns { builder.spawner(elsewhere) } else { builder }.build();
        let alive = Tally::default();
        for key in 0..scaled(10_000, 1_000_000) {
            let value = Counted::new(1, &alive);
            let load = async move {
                yield_now().await;
                value
            };
            match key % 5 {
                0 => _ = block_on(cache.get_with_async(&key, load)),
                1 => {
                    let load = async {
                        load.await;
                        Err::<Counted, _>(boom())
                    };
                    assert!(block_on(cache.try_get_with_async(&key, load)).is_err());
                }
                2 => {
                    let load = async {
                        load.await;
                        None
                    };
                    assert!(block_on(cache.optionally_get_with_async(&key, load)).is_none());
                }
                3 => _ = Task::new(cache.get_with_async(&key, load)).poll(),
                _ if key % 64 == 4 => {
                    let load = async {
                        load.await;
                        boo("boom")
                    };
                    assert!(block_on(panics(cache.get_with_async(&key, load))).is_err());
                }
                // Two leave, the leader first.
                _ => {
                    let mut leader = Task::new(cache.get_with_async(&key, load));
                    leader.poll();
                    let _other = Task::new(cache.get_with_async(&key, std::future::pending())).poll();
                    drop(leader);
                }
            }
            cache.invalidate(&key);
        }
        assert_eq!((cache.len(), cache.iter().count()), (0, 0));
        eventually(|| {
            cache.run_pending_tasks();
            alive.get() == 0 && cache.in_flight().is_empty()
        });
    }
}

#[test]
fn values_outlive_the_cache() {
    // Values lived on after the last handle was dropped (moka#176, #384). Here calls hold it, and a load that nobody runs.
    for spawns in [false, true] {
        let (kept, alive, clock) = (Kept::default(), Tally::default(), ManualClock::new());
        let (queue, token) = (Queue::default(), Arc::new(Counted::new(0, &alive)));
        let builder = plain::<u32, Counted>().soft_ttl(secs(1)).clock(clock.clone()).executor(queue.clone());
        let builder = if spawns { builder.spawner(kept.clone()) } else { builder };
        let load = move |_| std::future::ready(Ok::<_, Error>((*token).clone()));
        let cache = builder.async_loader_fn(load).build();
        for key in 0..100 {
            cache.insert(key, Counted::new(0, &alive));
        }
        clock.advance(secs(1));
        assert_eq!(block_on(cache.get_or_load_async(&1)).unwrap().0, 0);
        assert_eq!(queue.len() + kept.len(), 1);
        let own = cache.clone();
        let call = Task::waiting(async move { own.get_with_async(&200, std::future::pending()).await.0 });
        drop(cache);
        assert_eq!(alive.get(), 101);
        drop(call);
        // A task of its own that is not polled again keeps its load, and that the cache.
        assert_eq!(kept.len(), if spawns { 2 } else { 0 });
        drop(kept.take().pop());
        drop(queue.take());
        eventually(|| alive.get() == 0);
    }
}

#[test]
fn cancelled_half_way() {
    // A load that was given up left its place behind, and the entry could not be evicted (moka#309, quick-cache#120).
    over_tasks(|builder: Builder<u32, u32>| {
        let cache = builder.max_capacity(8).build();
        for round in 0..10 {
            (0..8).for_each(|key| cache.insert(key, round));
            for key in 0..8 {
                use std::future::pending;
                cache.expire(&key);
                match key % 4 {
                    0 => _ = Task::new(cache.get_with_async(&key, pending())).poll(),
                    1 => _ = Task::new(cache.try_get_with_async::<_, _, Error>(&key, pending())).poll(),
                    2 => {
                        _ = Task::new(cache.ask(&key).max_age(Duration::ZERO).load_with_async(pending()))
                            .poll()
                    }
                    _ => {
                        let load = |_| pending::<Result<[(u32, u32); 0], Error>>();
                        _ = Task::new(cache.load_many_async([key, key + 100], load)).poll();
                    }
                }
            }
            // The refreshes that are tasks of their own are nobody's to give up.
            eventually(|| cache.in_flight().len() <= 6 * (round as usize + 1));
            cache.invalidate_all();
            (0..8).for_each(|key| cache.insert(key, round));
            cache.set_capacity(1);
            // What a task of its own has in its hands just then is counted until it lets go, and it may drop one too many.
            eventually(|| cache.len() <= 1 && cache.weighted_size() == cache.len() as u64);
            cache.set_capacity(8);
        }
    });
}

#[test]
fn in_flight_entry_evicted() {
    // An entry was evicted while it was being loaded: its waiters got nothing, or loaded again (node-lru-cache#274,
    // caffeine#1623).
    over_tasks(|builder: Builder<u32, u32>| {
        let (cache, doors) = (builder.max_capacity(1).build(), [(); 2].map(|()| Door::default()));
        let mut tasks = Tasks::new(10, |nth| behind(&cache, nth as u32 % 2, &doors[nth % 2], nth as u32 % 2));
        eventually(|| doors.iter().all(|door| door.arrived() == 1));
        (100..200).for_each(|key| cache.insert(key, key));
        doors.iter().for_each(Door::open);
        tasks.until(|| cache.in_flight().is_empty());
        assert_eq!(tasks.finish(), [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]);
        assert_eq!(cache.stats().loads, 2);
        cache.run_pending_tasks();
        assert_eq!((cache.len(), cache.weighted_size()), (1, 1));
        assert!(cache.get(&0) == Some(0) || cache.get(&1) == Some(1));
    });
}

#[test]
fn ttl_shorter_than_the_load() {
    // A value that was past its deadline when it came was loaded again by each waiter (caffeine#1623).
    for ttl in [Duration::ZERO, Duration::from_nanos(1), secs(1)] {
        over_tasks(|builder: Builder<u32, u32>| {
            let (clock, door) = (ManualClock::new(), Door::default());
            let cache = builder.time_to_live(ttl).clock(clock.clone()).build();
            let tasks = Tasks::new(20, |_| behind(&cache, 1, &door, 7));
            clock.advance(secs(5));
            door.open();
            assert_eq!(tasks.finish(), [7; 20]);
            assert_eq!((cache.stats().loads, cache.get(&1).is_none()), (1, ttl.is_zero()), "{ttl:?}");
        });
    }
}

// Liveness, latency, arithmetic.

#[test]
fn busy_loop_starves_the_runtime() {
    // Tasks that waited went round and round, and nothing else ran (moka#412).
    over_tasks(|builder: Builder<u32, u32>| {
        let (cache, door) = (builder.build(), Door::default());
        let mut tasks = Tasks::new(48, |_| behind(&cache, 1, &door, 7));
        eventually(|| door.arrived() == 1);
        // Nobody is woken while nothing happens.
        tasks.settle();
        assert!(tasks.0.iter().all(|task| !task.is_woken()));
        door.open();
        assert_eq!(tasks.finish(), [7; 48]);
    });
    // A load that is always ready for more is polled once in a turn of each task that waits.
    let (cache, turns) = (plain::<u32, u32>().build(), Tally::default());
    let count = turns.clone();
    let mut leader = Task::new(cache.get_with_async(&1, async move {
        for _ in 0..1_000 {
            count.add();
            yield_now().await;
        }
        7
    }));
    for turn in 1..=1_000 {
        assert!(!leader.poll() && leader.is_woken());
        assert_eq!(turns.get(), turn);
    }
    assert_eq!(leader.finish(), 7);
}

#[test]
fn busy_loop_starves_the_runtime_under_writers() {
    // As above: 48 writers on four workers go on until a heart has beaten often enough (moka#412).
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).build().unwrap();
    let cache = plain::<u32, u32>().max_capacity(100).build();
    runtime.block_on(async {
        let beats = Tally::default();
        let writers: Vec<_> = (0..48_u32)
            .map(|n| {
                let (cache, beats) = (cache.clone(), beats.clone());
                tokio::spawn(async move {
                    for key in n.. {
                        if beats.get() >= 200 {
                            break;
                        }
                        let load = async move {
                            tokio::task::yield_now().await;
                            key
                        };
                        cache.get_with_async(&(key % 300), load).await;
                        cache.insert(key % 200, key);
                        cache.invalidate(&(key % 50));
                        tokio::task::yield_now().await;
                    }
                })
            })
            .collect();
        while beats.add() < 200 {
            tokio::task::yield_now().await;
        }
        for writer in writers {
            writer.await.unwrap();
        }
    });
    eventually(|| cache.in_flight().is_empty());
    assert!(cache.in_flight().is_empty() && cache.len() <= 100);
}

#[test]
fn stuck_flight_blocks_expiry() {
    // One load that never ended kept everything else from expiring, or from being evicted (caffeine#373).
    over_tasks(|builder: Builder<u64, u64>| {
        let clock = ManualClock::new();
        let cache = builder.time_to_live(secs(1)).max_capacity(2_000).clock(clock.clone()).build();
        // With the constant hasher all are in one list.
        let n = scaled(1_000, 10_000) as u64;
        let stuck = Task::waiting(cache.get_with_async(&n, std::future::pending()));
        (0..n).for_each(|key| cache.insert(key, key));
        clock.advance(secs(1));
        cache.run_pending_tasks();
        assert_eq!((cache.len(), cache.in_flight().len()), (0, 1));
        cache.set_capacity(100);
        for key in 0..n {
            cache.insert(key, key);
            assert!(cache.len() <= 100 && cache.get(&key) == Some(key));
        }
        drop(stuck);
        eventually(|| cache.in_flight().is_empty());
        assert_eq!(cache.len(), 100);
    });
}

#[test]
fn futures_too_large() {
    // Each level of calls held the load's future once more (moka#212, scc#194).
    fn size<F: Future>(future: F) -> usize {
        size_of_val(&future)
    }
    let cache =
        Cache::<u64, u64>::builder().async_loader_fn(|n: u64| async move { Ok::<_, Error>(n) }).build();
    /// The future of a load that holds a thousand bytes.
    async fn large<T>(made: impl FnOnce(u64) -> T) -> T {
        let held = [1_u8; 1_000];
        yield_now().await;
        made(held.iter().map(|n| u64::from(*n)).sum())
    }
    let load = size(large(|n| n));
    assert!(load > 1_000);
    let with_own = [
        size(cache.get_with_async(&1, large(|n| n))),
        size(cache.try_get_with_async(&1, large(Ok::<_, Error>))),
        size(cache.optionally_get_with_async(&1, large(Some))),
        size(cache.ask(&1).load_with_async(large(|n| n))),
        size(cache.ask(&1).try_load_with_async(large(Ok::<_, Error>))),
    ];
    let attached = [
        size(cache.get_or_load_async(&1)),
        size(cache.ask(&1).load_async()),
        size(cache.ask(&1).get_async()),
        size(
            cache.load_many_async([1], |keys: Vec<u64>| async { Ok::<_, Error>(keys.into_iter().zip(2..)) }),
        ),
        size(cache.get_many_async([1])),
    ];
    // Twice: Rust keeps an argument of an `async fn` apart from what the body makes of it.
    assert!(with_own.iter().all(|size| *size <= 2 * load + 800), "{with_own:?}, and the load has {load}");
    assert!(attached.iter().all(|size| *size <= 800), "{attached:?}");
}

#[test]
fn wake_up_of_a_crowd() {
    // Waking many waiters took long or forgot some (varnish#2978).
    for spawns in [false, true] {
        let (door, loads) = (Door::default(), Tally::default());
        let builder = plain::<u32, u32>();
        let cache = if spawns { builder.spawner(elsewhere) } else { builder }.build();
        let tasks = Tasks::new(10_000, |_| {
            let (door, loads) = (door.clone(), loads.clone());
            cache.get_with_async(&1, async move {
                loads.add();
                door.pass().await;
                7
            })
        });
        assert_eq!((waiting(&cache), cache.in_flight().len()), (9_999, 1));
        door.open();
        assert!(tasks.finish().into_iter().all(|value| value == 7));
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((loads.get(), cache.stats().joins, cache.in_flight().len()), (1, 9_999, 0));
    }
}

#[test]
fn a_callbacks_panic_kills_a_service_part() {
    // A callback's panic ended the thread that did the upkeep (stretto#10). `panic_while_publishing` has those of a load.
    for what in ["fallback", "spawner", "executor"] {
        let (clock, armed) = (ManualClock::new(), Arc::new(AtomicBool::new(false)));
        let trip = {
            let armed = armed.clone();
            move |name| {
                if what == name && armed.swap(false, Ordering::SeqCst) {
                    boo(what)
                }
            }
        };
        let [in_fallback, in_spawner, in_executor] = [(); 3].map(|()| trip.clone());
        let mut builder = plain::<u32, u32>()
            .soft_ttl(secs(1))
            .clock(clock.clone())
            .fallback(move |_| {
                in_fallback("fallback");
                Some(0)
            })
            .executor(move |job: Job| {
                in_executor("executor");
                thread::spawn(|| job.run());
                Ok::<_, Rejected>(())
            });
        if what == "spawner" {
            builder = builder.spawner(move |task| {
                in_spawner("spawner");
                elsewhere(task)
            });
        }
        let load = |key: u32| std::future::ready(if key < 100 { Ok(key) } else { Err(boom()) });
        let cache = builder.async_loader_fn(load).build();
        cache.insert(1, 5);
        clock.advance(secs(1));
        // A load of its own, one that fails, and a refresh in the background.
        for key in [2, 100, 1] {
            armed.store(true, Ordering::SeqCst);
            let got = block_on(panics(cache.get_or_load_async(&key)));
            let hit = match what {
                "fallback" => key == 100,
                "spawner" => true,
                _ => key == 1,
            };
            assert_eq!(got.is_err(), hit, "{what} {key}");
            armed.store(false, Ordering::SeqCst);
            eventually(|| cache.in_flight().is_empty());
            assert!(block_on(cache.get_or_load_async(&key)).is_ok(), "{what} {key}");
        }
        eventually(|| cache.peek(&1) == Some(1));
    }
}

thread_local! {
    static SPAN: Cell<&'static str> = const { Cell::new("none") };
}

/// A future that is in a span while it is polled.
fn in_span<F: Future>(span: &'static str, future: F) -> impl Future<Output = F::Output> {
    let mut future = Box::pin(future);
    std::future::poll_fn(move |cx| {
        let outer = SPAN.replace(span);
        let polled = future.as_mut().poll(cx);
        SPAN.set(outer);
        polled
    })
}

#[test]
fn task_context_leaks_into_joiners() {
    // What was current while the leader ran was current in those who had joined it (dotnet/extensions#5568).
    over_tasks(|builder: Builder<u32, &'static str>| {
        let (cache, doors) = (builder.build(), [(); 3].map(|()| Door::default()));
        let stops = doors.clone();
        // The load's own span is current at each poll of it, whoever polls.
        let load = in_span("load", async move {
            for door in stops {
                assert_eq!(SPAN.get(), "load");
                door.pass().await;
            }
            SPAN.get()
        });
        let call = async {
            let value = cache.get_with_async(&1, load).await;
            (value, SPAN.get())
        };
        let mut leader = Task::new(in_span("leader", call));
        leader.run();
        let mut tasks = Tasks::new(4, |n| {
            let call = async {
                let value = joined(&cache).await;
                (value, SPAN.get())
            };
            in_span(["a", "b", "c", "d"][n], call)
        });
        assert_eq!(waiting(&cache), 4);
        doors[0].open();
        // A joiner polls the load, where it has no task of its own.
        tasks.until(|| doors[1].arrived() == 1);
        doors[1].open();
        tasks.until(|| doors[2].arrived() == 1);
        drop(tasks.0.remove(0));
        doors[2].open();
        assert_eq!(tasks.finish(), [("load", "b"), ("load", "c"), ("load", "d")]);
        assert_eq!((leader.finish(), SPAN.get()), (("load", "leader"), "none"));
    });
}

#[test]
fn task_context_leaks_into_joiners_under_tokio() {
    // As above, with what tokio calls a task's local.
    tokio::task_local! { static NAME: u32; }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let (cache, door) = (plain::<u32, Option<u32>>().build(), Door::default());
    let call = |n: u32| {
        let (cache, door) = (cache.clone(), door.clone());
        runtime.spawn(NAME.scope(n, async move {
            let load = NAME.scope(100, async move {
                door.pass().await;
                NAME.try_with(|n| *n).ok()
            });
            let value = cache.get_with_async(&1, load).await;
            (value, NAME.get())
        }))
    };
    let tasks: Vec<_> = (0..10).map(call).collect();
    until_waiting(&cache, 9);
    door.open();
    for (n, task) in tasks.into_iter().enumerate() {
        assert_eq!(block_on(task).unwrap(), (Some(100), n as u32));
    }
}

#[test]
fn wrong_entry_on_a_hash_collision() {
    // Keys with the same hash were taken for the same key (foyer#1004). Every other test with shapes has such a hasher too.
    let cache = plain::<String, usize>().hasher(Hashing::Constant).build();
    let mut model = HashMap::new();
    for n in 0..1_000_usize {
        let key = format!("{}", n * 7919 % 101);
        match n % 4 {
            0 | 1 => {
                let value = block_on(cache.get_with_async(key.as_str(), async move { n }));
                assert_eq!(value, *model.entry(key).or_insert(n));
            }
            2 => assert_eq!(cache.remove(key.as_str()), model.remove(&key)),
            _ => assert_eq!(cache.get(key.as_str()), model.get(&key).copied()),
        }
    }
    assert_eq!(cache.iter().collect::<HashMap<_, _>>(), model);
}
