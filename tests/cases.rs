//! Faults that broke other caches, one scenario each: `cargo test --test cases` (`QUELL_LONG=1` for the full numbers).
//!
//! `tests/cases_async.rs` has the same for tasks, and what only tasks meet: clean-up after an await, progress needs somebody
//! else's poll, waker replaced during completion, synchronous failure before the first await, busy loop starves the runtime,
//! futures too large, task context leaks into joiners. A thread's loader cannot be aborted: in *waiters tied to the leader's
//! life* a panic stands for it here.
//!
//! Left out, since it takes a benchmark and not a test: hits that scale backwards (`cargo bench --bench read`), and the time
//! that the slowest call takes for upkeep (`--bench upkeep`; here it is counted what one call removes) or the last of a crowd
//! to wake up (`--bench flight`).
//!
//! *Protective option not applied* is `tests/settings.rs`, and bytes are counted in `tests/memory.rs`. `tests/eviction.rs` has
//! more on the bound and the listener, and `tests/loaded.rs` on what a loader may say.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::{
    Builder, Counted, Gate, Hashing, Queue, Sut, Tally, With, eventually, ms, over_shapes, panic_of, plain,
    quietly, scaled, secs, until_waiting,
};
use quell::{
    Backoff, Cache, Job, LoadErrorKind, Loaded, ManualClock, Op, Outcome, Provenance, Rejected, Ttl,
};
use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, OnceLock, Weak};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

type Error = std::io::Error;

fn boom() -> Error {
    Error::other("boom")
}

/// Many threads with small stacks.
fn crowd<'s, R: Send + 's>(
    s: &'s thread::Scope<'s, '_>,
    n: usize,
    each: impl Fn(usize) -> R + Clone + Send + 's,
) -> Vec<ScopedJoinHandle<'s, R>> {
    let spawn = |i| {
        let each = each.clone();
        thread::Builder::new().stack_size(256 << 10).spawn_scoped(s, move || each(i)).unwrap()
    };
    (0..n).map(spawn).collect()
}

fn all<R>(threads: Vec<ScopedJoinHandle<'_, R>>) -> Vec<R> {
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

// A flight that never ends, or ends wrongly.

#[test]
fn panic_leaves_computing_behind() {
    // A loader's panic left the key marked as being computed, and everybody waited for ever (moka#43, go#33519, groupcache#38).
    over_shapes(|builder: Builder<u32, u32>| {
        let cache = builder.build();
        let (gate, loads) = (Gate::default(), Tally::default());
        thread::scope(|s| {
            let leader = s.spawn(|| {
                panic_of(|| {
                    cache.get_with(&1, || -> u32 {
                        gate.pass();
                        panic!("boom")
                    })
                })
            });
            eventually(|| gate.arrived() == 1);
            let waiters = crowd(s, 50, |i| {
                let load = || {
                    loads.add();
                    7
                };
                if i % 2 == 0 {
                    cache.get_with(&1, load)
                } else {
                    cache.try_get_with(&1, || Ok::<_, Error>(load())).unwrap()
                }
            });
            until_waiting(&cache, 50);
            gate.open();
            assert_eq!(leader.join().unwrap(), "boom");
            assert_eq!(all(waiters), [7; 50]);
        });
        assert_eq!((loads.get(), cache.in_flight().len(), cache.stats().loader_panics), (1, 0, 1));
    });
}

#[test]
fn panic_leaves_computing_behind_in_a_background_refresh() {
    // As above, where nobody's own call panics (moka#43).
    let (clock, calls) = (ManualClock::new(), Tally::default());
    let count = calls.clone();
    let cache = plain()
        .soft_ttl(secs(1))
        .time_to_live(secs(1000))
        .clock(clock.clone())
        .loader_fn(move |_: &u32| match count.add() {
            1 => quietly(|| -> Result<u32, Error> { panic!("boom") })
                .unwrap_or_else(|p| std::panic::resume_unwind(p)),
            n => Ok(n as u32),
        })
        .build();
    assert_eq!(cache.get_or_load(&1).unwrap(), 0);
    clock.advance(secs(1));
    assert_eq!(cache.get_or_load(&1).unwrap(), 0);
    eventually(|| cache.stats().loader_panics == 1 && cache.in_flight().is_empty());
    // The failure is remembered for a while; then the next refresh works.
    clock.advance(secs(1));
    assert_eq!(cache.get_or_load(&1).unwrap(), 0);
    eventually(|| cache.peek(&1) == Some(2));
}

#[test]
fn panic_leaves_computing_behind_in_a_background_refresh_that_others_wait_for() {
    // As above, with 50 who have joined the refresh, since nothing is there yet.
    let (gate, calls) = (Gate::default(), Tally::default());
    let (stop, count) = (gate.clone(), calls.clone());
    let cache = plain()
        .loader_fn(move |_: &u32| {
            if count.add() > 0 {
                return Ok::<_, Error>(7);
            }
            stop.pass();
            quietly(|| panic!("boom")).unwrap_or_else(|p| std::panic::resume_unwind(p))
        })
        .build();
    assert!(cache.refresh(&1));
    eventually(|| gate.arrived() == 1);
    thread::scope(|s| {
        let cache = &cache;
        let waiters = crowd(s, 50, move |i| match i % 3 {
            0 => cache.get_with(&1, || 7),
            1 => cache.try_get_with(&1, || Ok::<_, Error>(7)).unwrap(),
            _ => cache.get_or_load(&1).unwrap(),
        });
        until_waiting(cache, 50);
        gate.open();
        assert_eq!(all(waiters), [7; 50]);
    });
    eventually(|| cache.in_flight().is_empty());
    assert_eq!((cache.stats().loads, cache.stats().loader_panics, cache.get(&1)), (2, 1, Some(7)));
}

#[test]
fn waiters_tied_to_the_leaders_life() {
    // The leader went, and all who waited got its error (foyer#1118, hyper-util#299). Here leaders go in a row.
    let cache = plain::<u32, usize>().build();
    let (gates, turn): (Vec<Gate>, _) = ((0..4).map(|_| Gate::default()).collect(), Tally::default());
    let load = || {
        let n = turn.add();
        gates[n].pass();
        assert!(n == 3, "leader {n} goes");
        n
    };
    thread::scope(|s| {
        let (cache, load) = (&cache, &load);
        let threads = crowd(s, 51, move |_| quietly(|| cache.get_with(&1, load)));
        for (n, gate) in gates.iter().enumerate() {
            eventually(|| gate.arrived() == 1);
            until_waiting(cache, 50 - n);
            gate.open();
        }
        let results = all(threads);
        let (got, gone): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
        assert_eq!((got.len(), gone.len()), (48, 3));
        assert!(got.into_iter().all(|r| r.is_ok_and(|v| v == 3)));
    });
    assert_eq!((turn.get(), cache.in_flight().len()), (4, 0));
}

#[test]
fn remove_by_key_without_identity() {
    // The clean-up of a forgotten flight removed the newer flight of the key (async_singleflight#12, go#31420).
    over_shapes(|builder: Builder<u32, u32>| {
        let cache = builder.build();
        let gates = [(); 3].map(|()| Gate::default());
        let lead = |n: usize| {
            cache.get_with(&1, || {
                gates[n].pass();
                n as u32
            })
        };
        thread::scope(|s| {
            let lead = &lead;
            let a = s.spawn(move || lead(0));
            eventually(|| gates[0].arrived() == 1);
            cache.invalidate(&1);
            let b = s.spawn(move || lead(1));
            eventually(|| gates[1].arrived() == 1);
            cache.invalidate(&1);
            let c = s.spawn(move || lead(2));
            eventually(|| gates[2].arrived() == 1);
            // A and B end; C's flight is untouched, and may be joined.
            gates[0].open();
            gates[1].open();
            assert_eq!((a.join().unwrap(), b.join().unwrap()), (0, 1));
            assert_eq!((cache.get(&1), cache.in_flight().len()), (None, 1));
            let d = s.spawn(|| cache.get_with(&1, || unreachable!("it joins")));
            until_waiting(&cache, 1);
            gates[2].open();
            assert_eq!((c.join().unwrap(), d.join().unwrap()), (2, 2));
        });
        assert_eq!(cache.get(&1), Some(2));
    });
}

#[test]
fn join_just_as_the_flight_drains() {
    // Who joined while the last one left got a dead flight (xet-core#449, tailscale#18919). The models try each interleaving.
    over_shapes(|builder: Builder<usize, usize>| {
        let cache = builder.build();
        let rounds = scaled(500, 50_000);
        let (start, panics) = (Barrier::new(3), AtomicUsize::new(0));
        thread::scope(|s| {
            for t in 0..3 {
                let (cache, start, panics) = (&cache, &start, &panics);
                s.spawn(move || {
                    for round in 0..rounds {
                        start.wait();
                        let got = quietly(|| match t {
                            0 => Ok(cache.get_with(&round, || round)),
                            1 => cache.try_get_with(&round, || {
                                if round % 2 == 0 { Err(boom()) } else { Ok(round) }
                            }),
                            _ => Ok(cache
                                .get_with(&round, || if round % 3 == 0 { panic!("boom") } else { round })),
                        });
                        match got {
                            Ok(Ok(value)) => assert_eq!(value, round),
                            Ok(Err(error)) => assert_eq!(error.kind(), LoadErrorKind::Failed),
                            Err(_) => _ = panics.fetch_add(1, Ordering::Relaxed),
                        }
                        start.wait();
                        assert_eq!(cache.get(&round), Some(round));
                    }
                });
            }
        });
        assert!(panics.into_inner() <= rounds && cache.in_flight().is_empty());
    });
}

#[test]
fn lost_first_notification() {
    // The first waiter registered while the leader finished, and was never woken (event-listener#138).
    let cache = plain::<usize, usize>().build();
    let rounds = scaled(20_000, 1_000_000);
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
                    assert_eq!(cache.get_with(&round, || round), round);
                    if t == 0 && round > 1 {
                        cache.invalidate(&(round - 2));
                    }
                }
            });
        }
    });
    assert_eq!(cache.stats().loads, rounds as u64);
}

#[test]
fn two_writers_to_one_flight() {
    // The loader and an `insert` both filled a placeholder (quick-cache#40).
    over_shapes(|builder: Builder<u32, Counted>| {
        let (cache, alive) = (builder.build(), Tally::default());
        let rounds = scaled(3_000, 300_000) as u64;
        thread::scope(|s| {
            s.spawn(|| {
                (0..rounds).for_each(|n| {
                    let got = cache.get_with(&1, || Counted::new(2 * n, &alive)).0;
                    assert!(got % 2 == 1 || got <= 2 * n, "round {n} got {got}");
                });
            });
            s.spawn(|| (0..rounds).for_each(|n| cache.insert(1, Counted::new(2 * n + 1, &alive))));
            s.spawn(|| (0..rounds).for_each(|_| drop(cache.remove(&1))));
        });
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
    over_shapes(|builder: Builder<u32, &'static str>| {
        let clock = ManualClock::new();
        let cache = builder.lease(ms(100)).clock(clock.clone()).build();
        let (a_gate, b_gate) = (Gate::default(), Gate::default());
        thread::scope(|s| {
            let a = s.spawn(|| {
                cache.get_with(&1, || {
                    a_gate.pass();
                    "a"
                })
            });
            eventually(|| a_gate.arrived() == 1);
            let b = s.spawn(|| {
                cache.get_with(&1, || {
                    b_gate.pass();
                    "b"
                })
            });
            until_waiting(&cache, 1);
            clock.advance(ms(100));
            eventually(|| b_gate.arrived() == 1);
            let c = s.spawn(|| cache.get_with(&1, || unreachable!("it joins B")));
            eventually(|| cache.in_flight().iter().any(|f| f.waiters == 1));
            a_gate.open();
            assert_eq!(a.join().unwrap(), "a");
            assert_eq!(cache.get(&1), None);
            b_gate.open();
            assert_eq!((b.join().unwrap(), c.join().unwrap()), ("b", "b"));
        });
        assert_eq!(cache.get(&1), Some("b"));
        let stats = cache.stats();
        assert_eq!((stats.loads, stats.takeovers, stats.fenced, stats.in_flight), (2, 1, 1, 0));
        // Nobody spun: each waited once, and the one that took over once more at most.
        assert!(stats.joins <= 3, "{stats:?}");
    });
}

#[test]
fn takeover_not_exclusive() {
    // Every waiter of a hung leader led (pingora c3f22fa).
    let clock = ManualClock::new();
    let cache = plain::<u32, usize>().lease(secs(1)).clock(clock.clone()).build();
    let (hung, last, loads) = (Gate::default(), Gate::default(), Tally::default());
    let load = || {
        let n = loads.add();
        if n < 3 {
            hung.pass()
        } else {
            last.pass()
        }
        n
    };
    thread::scope(|s| {
        let (cache, load) = (&cache, &load);
        let threads = crowd(s, 101, move |_| cache.get_with(&1, load));
        for period in 1..=4 {
            eventually(|| loads.get() == period);
            eventually(|| cache.in_flight().iter().any(|f| f.waiters == 101 - period));
            assert_eq!(loads.get(), period);
            if period < 4 {
                clock.advance(secs(1));
            }
        }
        last.open();
        eventually(|| cache.get(&1) == Some(3));
        hung.open();
        let mut got = all(threads);
        got.sort_unstable();
        // Late owners get their own, all others the last one's.
        assert_eq!(got[..3], [0, 1, 2]);
        assert_eq!(got[3..], [3; 98]);
    });
    let stats = cache.stats();
    assert_eq!((stats.takeovers, stats.fenced, cache.get(&1)), (3, 3, Some(3)));
}

#[test]
fn a_slow_load_under_a_lock() {
    // While one key of a shard loaded, the others of the shard waited (singleflight 0.3, cached#175).
    let cache = plain::<u32, u32>().shards(1).hasher(Hashing::Constant).build();
    cache.insert(2, 2);
    let gate = Gate::default();
    thread::scope(|s| {
        let slow = s.spawn(|| {
            cache.get_with(&1, || {
                gate.pass();
                1
            })
        });
        eventually(|| gate.arrived() == 1);
        // All of these would hang.
        assert_eq!((cache.get(&2), cache.get(&1)), (Some(2), None));
        assert_eq!(cache.get_with(&3, || 3), 3);
        cache.insert(4, 4);
        assert_eq!((cache.remove(&4), cache.iter().count(), cache.len()), (Some(4), 2, 2));
        assert_eq!(cache.compute(&3, |_| Op::Put(33)), Outcome::Replaced(33));
        gate.open();
        assert_eq!(slow.join().unwrap(), 1);
    });
}

/// A key and value whose every trait calls the cache.
#[derive(Debug)]
struct Meddler(u32, Weak<OnceLock<Cache<Meddler, Meddler>>>);

thread_local! {
    static DEPTH: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
    static MEDDLED: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

impl Meddler {
    fn meddle(&self) {
        if DEPTH.get() > 0 {
            return;
        }
        DEPTH.set(1);
        if let Some(home) = self.1.upgrade()
            && let Some(cache) = home.get()
        {
            let nth = MEDDLED.replace(MEDDLED.get() + 1);
            let key = |n| Self(n, self.1.clone());
            let _ = cache.get(&key(1));
            let _ = cache.iter().count();
            // A comparison that writes to its own bucket each time would make the writer start again for ever.
            if nth.is_multiple_of(64) {
                cache.insert(key(2), key(20));
                let _ = cache.get_with(&key(3), || key(30));
                cache.invalidate(&key(2));
            }
        }
        DEPTH.set(0);
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
    for n in 0..8 {
        cache.insert(key(n), key(n));
        assert_eq!(cache.get_with(&key(n + 8), || key(n)).0, n);
        assert_eq!(cache.get(&key(n + 8)).unwrap().0, n);
    }
    cache.compute(&key(5), |old| Op::Put(old.unwrap().clone()));
    cache.retain(|k, v| k.0.is_multiple_of(2) && v == v);
    assert!(cache.remove(&key(4)).is_some());
    cache.invalidate_all();
    cache.run_pending_tasks();
    assert!(cache.peek(&key(6)).is_none());
    assert!(MEDDLED.get() > 100, "{} calls", MEDDLED.get());
}

#[test]
fn re_entrance_hangs() {
    // A load that asks for its own key waited for itself (moka#59, caffeine#352, symfony#41130). `tests/cycle.rs` has more.
    let cache = plain::<char, u32>().build();
    let again = |key| cache.try_get_with(&key, || Ok::<_, Error>(0));
    assert_eq!(
        cache
            .try_get_with(&'a', || again('a'))
            .unwrap_err()
            .downcast_ref::<quell::LoadError>()
            .map(quell::LoadError::kind),
        Some(LoadErrorKind::Cycle)
    );
    let through_b = cache.try_get_with(&'a', || cache.try_get_with(&'b', || again('a')));
    assert!(through_b.is_err());
    // Two threads: A -> B here, B -> A there.
    let both = Barrier::new(2);
    let errors = thread::scope(|s| {
        let threads = [('a', 'b'), ('b', 'a')].map(|(one, two)| {
            let (cache, both) = (&cache, &both);
            s.spawn(move || {
                cache.try_get_with(&one, || {
                    both.wait();
                    cache.try_get_with(&two, || Ok::<_, Error>(9))
                })
            })
        });
        threads.map(|t| t.join().unwrap()).into_iter().filter(Result::is_err).count()
    });
    assert!(errors >= 1, "one of the two was told");
    assert!(cache.in_flight().is_empty());
}

#[test]
fn code_of_the_user_under_a_lock_in_a_full_cache() {
    // As above, with the weigher and the listener, and where each write evicts.
    let home = Arc::new(OnceLock::new());
    let cache = Cache::<Meddler, Meddler>::builder()
        .shards(1)
        .max_capacity(5)
        .weigher(|key, value| {
            key.meddle();
            value.meddle();
            value.0 % 3
        })
        .eviction_listener(|key, value, _| {
            key.meddle();
            value.meddle();
            assert!(DEPTH.get() > 0 || key == key);
        })
        .build();
    home.set(cache.clone()).unwrap();
    let key = |n| Meddler(n, Arc::downgrade(&home));
    for n in 0..40 {
        cache.insert(key(n), key(n));
        assert_eq!(cache.get_with(&key(n + 100), || key(n)).0, n);
        cache.compute(&key(n / 2), |old| Op::Put(old.cloned().unwrap_or(key(n))));
        let _ = cache.remove(&key(n + 99));
        // What is dropped meddles too, on whichever thread frees it: each may be storing one.
        assert!(cache.weighted_size() <= 5 + 20, "{}", cache.weighted_size());
    }
    cache.set_capacity(2);
    cache.retain(|k, v| k.0.is_multiple_of(2) && v == v);
    cache.set_capacity(100);
    cache.invalidate_all();
    cache.run_pending_tasks();
    assert_eq!((cache.stats().listener_panics, cache.in_flight().len()), (0, 0));
    assert!(MEDDLED.get() > 100, "{} calls", MEDDLED.get());
}

/// A value whose next clone panics on demand.
#[derive(Debug)]
struct Fragile(u32, Arc<AtomicBool>);

impl Clone for Fragile {
    fn clone(&self) -> Self {
        assert!(!self.1.swap(false, Ordering::SeqCst), "clone");
        Self(self.0, self.1.clone())
    }
}

#[test]
fn panic_while_publishing() {
    // A callback's panic between the load and its publication left the key stuck (bolt#918, FusionCache#644).
    over_shapes(|builder: Builder<u32, Fragile>| {
        let (cache, armed, gate) = (builder.build(), Arc::new(AtomicBool::new(false)), Gate::default());
        thread::scope(|s| {
            let leader = s.spawn(|| {
                panic_of(|| {
                    cache.get_with(&1, || {
                        gate.pass();
                        armed.store(true, Ordering::SeqCst);
                        Fragile(1, armed.clone())
                    })
                })
            });
            eventually(|| gate.arrived() == 1);
            let waiters = crowd(s, 8, |_| cache.get_with(&1, || Fragile(2, armed.clone())).0);
            until_waiting(&cache, 8);
            gate.open();
            assert_eq!(leader.join().unwrap(), "clone");
            assert_eq!(all(waiters), [2; 8]);
        });
        assert_eq!((cache.get(&1).unwrap().0, cache.in_flight().len()), (2, 0));
    });
}

#[test]
fn panic_while_publishing_in_the_weigher_or_the_listener() {
    // As above, with the two other callbacks that run when a value is stored (bolt#918).
    for in_weigher in [true, false] {
        over_shapes(|builder: Builder<u32, u32>| {
            let armed = Arc::new(AtomicUsize::new(0));
            let trip = {
                let armed = armed.clone();
                move || {
                    if armed.swap(0, Ordering::SeqCst) > 0 {
                        quietly(|| panic!("boom")).unwrap_or_else(|p| std::panic::resume_unwind(p));
                    }
                }
            };
            let (weigher, listener) = (trip.clone(), trip);
            let cache = builder
                .max_capacity(1)
                .weigher(move |_, value| {
                    if in_weigher {
                        weigher();
                    }
                    u32::from(*value > 0)
                })
                .eviction_listener(move |_, _, _| {
                    if !in_weigher {
                        listener()
                    }
                })
                .build();
            // It has to go for what is loaded.
            cache.insert(7, 7);
            let gate = Gate::default();
            thread::scope(|s| {
                let leader = s.spawn(|| {
                    quietly(|| {
                        cache.get_with(&1, || {
                            gate.pass();
                            armed.store(1, Ordering::SeqCst);
                            1
                        })
                    })
                });
                eventually(|| gate.arrived() == 1);
                let waiters = crowd(s, 8, |_| cache.get_with(&1, || 2));
                until_waiting(&cache, 8);
                gate.open();
                assert_eq!(leader.join().unwrap().ok(), (!in_weigher).then_some(1));
                assert_eq!(all(waiters), [if in_weigher { 2 } else { 1 }; 8]);
            });
            let stats = cache.stats();
            assert_eq!(
                (stats.loader_panics, stats.listener_panics),
                if in_weigher { (1, 0) } else { (0, 1) }
            );
            assert_eq!((stats.in_flight, cache.len(), cache.weighted_size()), (0, 1, 1));
            armed.store(1, Ordering::SeqCst);
            let inserts = quietly(|| cache.insert(1, 9));
            assert_eq!((inserts.is_err(), cache.get(&1).is_some()), (in_weigher, true));
            assert_eq!(cache.get_with(&3, || 3), 3);
            assert_eq!((cache.get(&3), cache.len(), cache.weighted_size()), (Some(3), 1, 1));
        });
    }
}

#[test]
fn failure_not_shared() {
    // Each waiter of a failing load loaded in its turn, one after the other (caffeine#521, #425, quick_cache).
    over_shapes(|builder: Builder<u32, u32>| {
        let (cache, gate, loads) = (builder.build(), Gate::default(), Tally::default());
        let load = || {
            loads.add();
            gate.pass();
            Err::<u32, _>(boom())
        };
        thread::scope(|s| {
            let (cache, load) = (&cache, &load);
            let threads = crowd(s, 9, move |_| cache.try_get_with(&1, load));
            until_waiting(cache, 8);
            gate.open();
            for error in all(threads).into_iter().map(Result::unwrap_err) {
                assert_eq!(error.kind(), LoadErrorKind::Failed);
                assert_eq!(error.downcast_ref::<Error>().unwrap().to_string(), "boom");
            }
        });
        assert_eq!((loads.get(), cache.len()), (1, 0));
    });
}

#[test]
fn time_out_becomes_a_load() {
    // Those whose wait ended loaded themselves: the stampede came late (FusionCache LockTimeout, nginx lock_timeout).
    for grace in [false, true] {
        let clock = ManualClock::new();
        let cache = plain::<u32, u32>()
            .wait_timeout(ms(10))
            .time_to_live(secs(1))
            .stale_if_error(secs(100))
            .clock(clock.clone())
            .build();
        if grace {
            cache.insert(1, 5);
            clock.advance(secs(2));
        }
        let (gate, loads) = (Gate::default(), Tally::default());
        let load = || {
            loads.add();
            gate.pass();
            Ok::<_, Error>(6)
        };
        thread::scope(|s| {
            let (cache, load) = (&cache, &load);
            let threads = crowd(s, 1_000, move |_| cache.try_get_with(&1, load));
            until_waiting(cache, 999);
            clock.advance(ms(10));
            until_waiting(cache, 0);
            gate.open();
            let (got, late): (Vec<_>, Vec<_>) = all(threads).into_iter().partition(|r| matches!(r, Ok(6)));
            assert_eq!((got.len(), late.len()), (1, 999));
            for one in late {
                match one {
                    Ok(value) => assert!(grace && value == 5),
                    Err(error) => assert!(!grace && error.kind() == LoadErrorKind::TimedOut, "{error}"),
                }
            }
        });
        let stats = cache.stats();
        assert_eq!((loads.get(), stats.wait_timeouts), (1, 999));
        assert_eq!(stats.grace_hits, if grace { 999 } else { 0 });
    }
}

#[test]
fn hung_loader_pins_the_key() {
    // A loader that never came back held its key for ever (dialogporten#4252).
    over_shapes(|builder: Builder<u32, u32>| {
        let clock = ManualClock::new();
        let cache = builder.lease(ms(100)).clock(clock.clone()).build();
        let hung = Gate::default();
        thread::scope(|s| {
            let first = s.spawn(|| {
                cache.get_with(&1, || {
                    hung.pass();
                    1
                })
            });
            eventually(|| hung.arrived() == 1);
            clock.advance(ms(99));
            let second = s.spawn(|| cache.get_with(&1, || 2));
            until_waiting(&cache, 1);
            clock.advance(ms(1));
            assert_eq!(second.join().unwrap(), 2);
            // Who comes now is not concerned.
            assert_eq!(cache.get_with(&1, || 3), 2);
            hung.open();
            assert_eq!(first.join().unwrap(), 1);
        });
        assert_eq!((cache.get(&1), cache.stats().fenced), (Some(2), 1));
    });
}

// One load became two, or the wrong one was shared.

#[test]
fn no_second_look_after_winning() {
    // Who won the lock did not look whether the value had come meanwhile (moka#195, pingora#110, otter#152).
    let keys = 20_000;
    let cache = plain::<u32, u32>().build();
    let (loads, start) = (AtomicU64::new(0), Barrier::new(4));
    thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                start.wait();
                for key in 0..keys {
                    cache.get_with(&key, || loads.fetch_add(1, Ordering::Relaxed) as u32);
                }
            });
        }
    });
    assert_eq!((loads.into_inner(), cache.stats().loads), (keys.into(), keys.into()));
    assert_eq!(cache.len(), keys as usize);
}

#[test]
fn flights_split_by_error_type() {
    // Loads of one key with different error types did not share (moka: five loaders at once for one key).
    over_shapes(|builder: Builder<u32, u32>| {
        let (gate, loads) = (Gate::default(), Tally::default());
        let load = {
            let (gate, loads) = (gate.clone(), loads.clone());
            move || {
                loads.add();
                gate.pass();
                7
            }
        };
        let attached = load.clone();
        let cache = builder.loader_fn(move |_| Ok::<_, Error>(attached())).build();
        thread::scope(|s| {
            let (cache, load) = (&cache, &load);
            let threads = crowd(s, 30, move |i| match i % 6 {
                0 => cache.get_with(&1, load),
                1 => cache.try_get_with(&1, || Ok::<_, Error>(load())).unwrap(),
                2 => cache.try_get_with(&1, || Ok::<_, std::fmt::Error>(load())).unwrap(),
                3 => cache.optionally_get_with(&1, || Some(load())).unwrap(),
                4 => cache.get_or_load(&1).unwrap(),
                _ => cache.ask(&1).load_with(load).unwrap().value,
            });
            until_waiting(cache, 29);
            let compute = s.spawn(|| cache.compute(&1, |v| Op::Put(v.unwrap() + 1)));
            until_waiting(cache, 30);
            gate.open();
            assert_eq!(all(threads), [7; 30]);
            assert_eq!(compute.join().unwrap(), Outcome::Replaced(8));
        });
        assert_eq!(loads.get(), 1);
    });
}

/// Two calls for many keys by `many`, loads of one and refreshes meet, while all loads stop at the gate.
fn bulk_meets_single(
    cache: &Sut<u32, u32>,
    gate: &Gate,
    many: impl Fn(Range<u32>) -> HashMap<u32, u32> + Sync,
) {
    let many = &many;
    thread::scope(|s| {
        let single = s.spawn(|| cache.get_or_load(&3).unwrap());
        eventually(|| gate.arrived() == 1);
        let one = s.spawn(move || many(0..6));
        eventually(|| gate.arrived() == 2);
        let two = s.spawn(move || many(4..10));
        eventually(|| gate.arrived() == 3);
        let other = s.spawn(|| cache.get_or_load(&8).unwrap());
        assert!(cache.refresh(&0) && cache.refresh(&9));
        // `one` has joined 3, `two` 4 and 5.
        until_waiting(cache, 4);
        gate.open();
        assert_eq!((single.join().unwrap(), other.join().unwrap()), (3, 8));
        assert_eq!(one.join().unwrap(), (0..6).map(|n| (n, n)).collect());
        assert_eq!(two.join().unwrap(), (4..10).map(|n| (n, n)).collect());
    });
}

#[test]
fn bulk_and_single_do_not_share() {
    // A load of many keys and loads of one did not join each other (caffeine#1409, #322).
    over_shapes(|builder: Builder<u32, u32>| {
        let (gate, loads) = (Gate::default(), Tally::default());
        let (stop, count) = (gate.clone(), loads.clone());
        let load = move |key: &u32| {
            count.add();
            stop.pass();
            Ok::<_, Error>(*key)
        };
        let cache = builder.loader(load).build();
        let many = |keys: Range<u32>| {
            let load = |keys: &[u32]| {
                keys.iter().for_each(|_| _ = loads.add());
                gate.pass();
                Ok::<_, Error>(keys.iter().map(|key| (*key, *key)).collect::<Vec<_>>())
            };
            cache.load_many(keys, load).unwrap()
        };
        bulk_meets_single(&cache, &gate, many);
        assert_eq!((loads.get(), cache.len(), cache.stats().loads), (10, 10, 10));
    });
    // By the attached loader.
    over_shapes(|builder: Builder<u32, u32>| {
        let (gate, loads) = (Gate::default(), Tally::default());
        let (stop, count) = (gate.clone(), loads.clone());
        let load = move |keys: &[u32]| {
            keys.iter().for_each(|_| _ = count.add());
            stop.pass();
            Ok::<_, Error>(keys.iter().map(|key| (*key, *key)).collect::<Vec<_>>())
        };
        let cache = builder.batch_loader(load).build();
        bulk_meets_single(&cache, &gate, |keys| cache.get_many(keys).unwrap());
        assert_eq!((loads.get(), gate.arrived(), cache.len(), cache.stats().loads), (10, 3, 10, 10));
    });
}

#[test]
fn bulk_returns_other_keys() {
    // What a loader of many keys returned beside them was stored, or mixed up with them (caffeine#655).
    over_shapes(|builder: Builder<u32, &'static str>| {
        let cache = builder.build();
        cache.insert(7, "old");
        let load = |keys: &[u32]| {
            assert_eq!(keys.len(), 3);
            // Somebody invalidates a key that is about to be returned unasked.
            cache.invalidate(&7);
            Ok::<_, Error>([(9, "nine"), (3, "three"), (7, "seven"), (1, "one")])
        };
        let got = cache.load_many([1, 2, 3], load).unwrap();
        assert_eq!(got, HashMap::from([(1, "one"), (3, "three")]));
        assert_eq!((cache.get(&1), cache.get(&3), cache.len()), (Some("one"), Some("three"), 2));
        assert_eq!((cache.get(&2), cache.get(&7), cache.get(&9)), (None, None, None));
    });
    over_shapes(|builder: Builder<u32, &'static str>| {
        let load = |_: &[u32]| Ok::<_, Error>([(9, "nine"), (3, "three"), (7, "seven"), (1, "one")]);
        let cache = builder.batch_loader(load).build();
        assert_eq!(cache.get_many([1, 2, 3]).unwrap(), HashMap::from([(1, "one"), (3, "three")]));
        assert_eq!((cache.get(&1), cache.get(&3), cache.len()), (Some("one"), Some("three"), 2));
        assert_eq!(cache.get_or_load(&2).unwrap_err().kind(), LoadErrorKind::Absent);
        assert_eq!((cache.get(&2), cache.get(&7), cache.get(&9)), (None, None, None));
    });
}

#[test]
fn stale_refresh_runs_many_times() {
    // Each read of a stale key started a refresh (async-cache-dedupe#164, cache goburrow#15).
    let (clock, queue, loads) = (ManualClock::new(), Queue::default(), Tally::default());
    let count = loads.clone();
    let cache = plain()
        .soft_ttl(secs(1))
        .clock(clock.clone())
        .executor(queue.clone())
        .loader_fn(move |_: &u32| Ok::<_, Error>(count.add()))
        .build();
    cache.get_or_load(&1).unwrap();
    clock.advance(secs(2));
    thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| (0..25_000).for_each(|_| assert_eq!(cache.get_or_load(&1).unwrap(), 0)));
        }
    });
    assert_eq!((queue.len(), loads.get(), cache.stats().stale_hits), (1, 1, 100_000));
    queue.run();
    assert_eq!((cache.get(&1), loads.get(), cache.get_or_load(&1).unwrap(), queue.len()), (Some(1), 2, 1, 0));
}

#[test]
fn compute_loses_an_update() {
    // Two computations read the same old value (moka#574, #593).
    over_shapes(|builder: Builder<u32, u32>| {
        let cache = builder.build();
        let mut seen = thread::scope(|s| {
            all(crowd(s, 100, |_| match cache.compute(&1, |n| Op::Put(n.map_or(1, |n| n + 1))) {
                Outcome::Inserted(n) => {
                    assert_eq!(n, 1);
                    n
                }
                Outcome::Replaced(n) => n,
                other => panic!("{other:?}"),
            }))
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
        over_shapes(|builder: Builder<u32, u32>| {
            let (cache, gate) = (builder.build(), Gate::default());
            thread::scope(|s| {
                let old = s.spawn(|| {
                    cache.get_with(&1, || {
                        gate.pass();
                        1
                    })
                });
                eventually(|| gate.arrived() == 1);
                let joined = s.spawn(|| cache.get_with(&1, || unreachable!("it began before")));
                until_waiting(&cache, 1);
                write(&cache);
                gate.open();
                // Who began before gets what was loaded.
                assert_eq!((old.join().unwrap(), joined.join().unwrap()), (1, 1), "{name}");
            });
            assert_eq!((cache.get(&1), cache.len()), (None, 0), "{name}");
            assert_eq!(cache.get_with(&1, || 2), 2, "{name}");
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
    for (name, left, write) in writes {
        let (gate, loads) = (Gate::default(), Tally::default());
        let (stop, count) = (gate.clone(), loads.clone());
        let load = move |_: &u32| {
            let n = count.add();
            if n == 1 {
                stop.pass();
            }
            Ok::<_, Error>(n)
        };
        let cache = plain().loader_fn(load).build();
        assert_eq!(cache.get_or_load(&1).unwrap(), 0);
        assert!(cache.refresh(&1));
        eventually(|| gate.arrived() == 1);
        write(&cache);
        gate.open();
        eventually(|| cache.in_flight().is_empty());
        assert_eq!(cache.get(&1), left, "{name}");
        // It is counted on the keeper's thread, after the load has left the list.
        eventually(|| cache.stats().fenced == 1);
    }
}

#[test]
fn older_load_overwrites_newer_insert() {
    // A load that began before an insert replaced what was inserted (moka, foyer, FusionCache#651, cached#307).
    over_shapes(|builder: Builder<u32, u32>| {
        let (cache, gate) = (builder.build(), Gate::default());
        thread::scope(|s| {
            let load = s.spawn(|| {
                cache.get_with(&1, || {
                    gate.pass();
                    7
                })
            });
            eventually(|| gate.arrived() == 1);
            let before = s.spawn(|| cache.get_with(&1, || unreachable!()));
            until_waiting(&cache, 1);
            cache.insert(1, 99);
            assert_eq!(cache.get_with(&1, || unreachable!()), 99);
            gate.open();
            assert_eq!(load.join().unwrap(), 7);
            assert!([7, 99].contains(&before.join().unwrap()));
        });
        assert_eq!((cache.get(&1), cache.len()), (Some(99), 1));
    });
}

#[test]
fn older_load_overwrites_newer_insert_by_a_background_refresh() {
    // As above, where the load is a refresh, of a key that is there or not (caffeine#193).
    for there in [false, true] {
        let gate = Gate::default();
        let stop = gate.clone();
        let load = move |_: &u32| {
            stop.pass();
            Ok::<_, Error>(7)
        };
        let cache = plain().loader_fn(load).build();
        if there {
            cache.insert(1, 1);
        }
        assert!(cache.refresh(&1));
        eventually(|| gate.arrived() == 1);
        let before = cache.stats().evictions.replaced;
        cache.insert(1, 99);
        gate.open();
        eventually(|| cache.stats().fenced == 1 && cache.in_flight().is_empty());
        assert_eq!((cache.get(&1), cache.len()), (Some(99), 1));
        assert_eq!(cache.stats().evictions.replaced - before, u64::from(there));
    }
}

#[test]
fn waiter_gets_a_default() {
    // Waiters of a load that was invalidated or failed got a zero value (otter#137, rueidis#1014).
    for fails in [false, true] {
        over_shapes(|builder: Builder<u32, u32>| {
            let (cache, gate) = (builder.build(), Gate::default());
            let load = || {
                gate.pass();
                if fails { Err(boom()) } else { Ok(7) }
            };
            thread::scope(|s| {
                let (cache, load) = (&cache, &load);
                let threads = crowd(s, 9, move |_| cache.try_get_with(&1, load));
                until_waiting(cache, 8);
                cache.invalidate(&1);
                gate.open();
                for result in all(threads) {
                    match result {
                        Ok(value) => assert!(!fails && value == 7),
                        Err(error) => assert!(fails && error.kind() == LoadErrorKind::Failed),
                    }
                }
            });
            assert_eq!(cache.get(&1), None);
        });
    }
}

#[test]
fn clock_read_before_a_wait() {
    // An entry's times were those of the look-up, not of the publication (moka#322, #363).
    over_shapes(|builder: Builder<u32, u32>| {
        let clock = ManualClock::new();
        let cache = builder.soft_ttl(secs(5)).time_to_live(secs(10)).clock(clock.clone()).build();
        assert_eq!(
            cache.get_with(&1, || {
                clock.advance(secs(9));
                1
            }),
            1
        );
        clock.advance(secs(4));
        assert_eq!(cache.ask(&1).get().unwrap().provenance, Provenance::Fresh { age: secs(4) });
        clock.advance(secs(1));
        assert_eq!(cache.ask(&1).get().unwrap().provenance, Provenance::Stale { age: secs(5) });
        clock.advance(secs(5));
        assert_eq!(cache.get(&1), None);
    });
}

#[test]
fn refresh_ends_for_good_after_one_failure() {
    // After a failed refresh the key was never refreshed again (caffeine#498, #865, symfony#24248).
    let (clock, queue, calls) = (ManualClock::new(), Queue::default(), Tally::default());
    let count = calls.clone();
    let cache = plain()
        .soft_ttl(secs(1))
        .clock(clock.clone())
        .executor(queue.clone())
        .loader_fn(move |_: &u32| match count.add() {
            n @ (0 | 6..) => Ok(n),
            _ => Err(boom()),
        })
        .build();
    assert_eq!(cache.get_or_load(&1).unwrap(), 0);
    for attempt in 1..=6 {
        clock.advance(secs(1));
        assert_eq!(cache.get_or_load(&1).unwrap(), 0, "stale goes on");
        assert_eq!((queue.run(), calls.get()), (1, attempt + 1));
    }
    assert_eq!((cache.get(&1), cache.stats().load_failures), (Some(6), 5));
}

#[test]
fn an_executor_refuses_every_job() {
    // As above: a refused job left the marker "being refreshed" (caffeine#865).
    let (clock, loads) = (ManualClock::new(), Tally::default());
    let count = loads.clone();
    let cache = plain()
        .soft_ttl(secs(1))
        .time_to_live(secs(10))
        .clock(clock.clone())
        .executor(|_: Job| Err(Rejected))
        .loader_fn(move |_: &u32| Ok::<_, Error>(count.add()))
        .build();
    assert_eq!(cache.get_or_load(&1).unwrap(), 0);
    clock.advance(secs(2));
    for _ in 0..100 {
        assert_eq!(cache.get_or_load(&1).unwrap(), 0);
    }
    assert_eq!((cache.in_flight().len(), cache.stats().refused_refreshes), (0, 100));
    // It costs refreshes only: past the hard deadline the caller loads.
    clock.advance(secs(10));
    assert_eq!(cache.get_or_load(&1).unwrap(), 1);
}

#[test]
fn back_off_ignored() {
    // A failing source was asked on every request (nginx#1000). Attempts stay under ten a second.
    let (clock, queue, calls) = (ManualClock::new(), Queue::default(), Tally::default());
    let count = calls.clone();
    let cache = plain::<u32, u32>()
        .soft_ttl(secs(1))
        .clock(clock.clone())
        .executor(queue.clone())
        .loader_fn(move |_| {
            count.add();
            Err::<u32, _>(boom())
        })
        .build();
    cache.insert(1, 1);
    clock.advance(secs(1));
    for _ in 0..1_000 {
        assert_eq!(cache.get_or_load(&1).unwrap(), 1);
        assert_eq!(
            cache
                .try_get_with(&1, || {
                    calls.add();
                    Err::<u32, _>(boom())
                })
                .unwrap(),
            1
        );
        queue.run();
        clock.advance(ms(1));
    }
    assert!((5..=10).contains(&calls.get()), "{} attempts in a second", calls.get());
}

#[test]
fn back_off_ignored_by_a_crowd() {
    // As above, with a back-off of one's own, and callers of every kind at one time: no more attempts than its pauses allow,
    // whether there is something to serve or not.
    for age in [None, Some(2), Some(20)] {
        let (clock, queue, calls) = (ManualClock::new(), Queue::default(), Tally::default());
        let attached = calls.clone();
        let cache = plain::<u32, u32>()
            .soft_ttl(secs(1))
            .time_to_live(secs(15))
            .stale_if_error(secs(1_000))
            .error_backoff(Backoff::exponential(ms(100), secs(1)).jitter(0.0))
            .clock(clock.clone())
            .executor(queue.clone())
            .loader_fn(move |_| {
                attached.add();
                Err::<u32, _>(boom())
            })
            .build();
        if let Some(age) = age {
            cache.insert(1, 1);
            clock.advance(secs(age));
        }
        let (rounds, start) = (500, Barrier::new(4));
        thread::scope(|s| {
            for nth in 0..4_u32 {
                let (cache, clock, queue, calls, start) = (&cache, &clock, &queue, &calls, &start);
                s.spawn(move || {
                    for round in 0..rounds {
                        start.wait();
                        let got = match (nth + round) % 4 {
                            0 => cache.get_or_load(&1),
                            1 => cache.ask(&1).wait_timeout(Duration::ZERO).load().map(|answer| answer.value),
                            2 => cache
                                .load_many([1], |_| {
                                    calls.add();
                                    Err::<[(u32, u32); 0], _>(boom())
                                })
                                .map(|many| many[&1]),
                            _ => cache.try_get_with(&1, || {
                                calls.add();
                                Err::<u32, _>(boom())
                            }),
                        };
                        assert_eq!(got.ok(), age.map(|_| 1));
                        cache.refresh(&1);
                        queue.run();
                        if start.wait().is_leader() {
                            clock.advance(ms(10));
                        }
                    }
                });
            }
        });
        // At 0, 0.1, 0.3, 0.7, 1.5 s, and then once a second, in five seconds. One that is queued begins when it is run.
        let pauses = 8;
        assert!((pauses - 1..=pauses).contains(&calls.get()), "{} attempts in 5 s, {age:?}", calls.get());
    }
}

#[test]
fn explicit_stale_flag_on_old_result() {
    // "Not modified" kept the old times, so the value stayed stale (FusionCache#332).
    let (clock, queue) = (ManualClock::new(), Queue::default());
    let loader = With(|_: &u32, cx: &quell::LoadContext<u32>| {
        Ok(if cx.previous().is_some() { Loaded::not_modified() } else { Loaded::new(7) })
    });
    let cache = plain()
        .soft_ttl(secs(1))
        .time_to_live(secs(10))
        .clock(clock.clone())
        .executor(queue.clone())
        .loader(loader)
        .build();
    assert_eq!(cache.get_or_load(&1).unwrap(), 7);
    for _ in 0..5 {
        clock.advance(secs(9));
        assert_eq!(cache.ask(&1).load().unwrap().provenance, Provenance::Stale { age: secs(9) });
        assert_eq!(queue.run(), 1);
        let answer = cache.ask(&1).get().unwrap();
        assert_eq!((answer.value, answer.provenance), (7, Provenance::Fresh { age: Duration::ZERO }));
    }
}

// Memory that is never given back.

#[test]
fn a_queued_update_revives_a_dead_entry() {
    // What the policy had still to be told of brought an entry back that was gone, and it was never evicted (moka#590).
    let capacity = 10;
    let (start, rounds) = (Instant::now(), scaled(30_000, usize::MAX));
    let told = common::Told::default();
    let cache =
        plain::<u64, u64>().shards(1).max_capacity(capacity).eviction_listener(told.listener()).build();
    thread::scope(|s| {
        for t in 0..4_u64 {
            let cache = &cache;
            s.spawn(move || {
                for n in 0..rounds as u64 {
                    match t {
                        // All on one key.
                        0 => cache.insert(0, n),
                        1 => _ = cache.remove(&0),
                        2 => _ = cache.get_with(&0, || n),
                        // And the pressure.
                        _ => cache.insert(1 + n % 1_000, n),
                    }
                    assert!(cache.weighted_size() <= capacity + 2 * 4, "{}", cache.weighted_size());
                    if rounds == usize::MAX && n % 1_000 == 0 && start.elapsed() > secs(30) {
                        break;
                    }
                }
            });
        }
    });
    cache.run_pending_tasks();
    assert!(cache.len() as u64 <= capacity, "{} entries", cache.len());
    common::assert_weights_add_up(&cache, |_, _| 1);
    // None has been lost to the evictor.
    cache.set_capacity(1);
    assert!(cache.len() <= 1, "{} entries", cache.len());
    cache.invalidate_all();
    assert_eq!((cache.len(), cache.weighted_size()), (0, 0));
}

#[test]
fn flight_kept_by_a_map_or_a_cycle() {
    // Ended flights stayed in a map, or in a cycle of references (moka#329, singleflight-async#5).
    let (cache, alive) = (plain::<usize, Counted>().build(), Tally::default());
    for key in 0..scaled(50_000, 1_000_000) {
        match key % 4 {
            0 => _ = cache.get_with(&key, || Counted::new(1, &alive)),
            1 => _ = cache.try_get_with(&key, || Err::<Counted, _>(boom())).unwrap_err(),
            2 => _ = cache.optionally_get_with(&key, || None).is_none(),
            _ if key % 64 == 3 => _ = quietly(|| cache.get_with(&key, || panic!("boom"))).unwrap_err(),
            _ => _ = cache.compute(&key, |_| Op::Keep),
        }
        cache.invalidate(&key);
    }
    assert_eq!((cache.len(), cache.iter().count(), cache.in_flight().len()), (0, 0, 0));
    eventually(|| {
        cache.run_pending_tasks();
        alive.get() == 0
    });
}

#[test]
fn side_tables_grow() {
    // Invalidations of unknown keys were remembered (moka#295, rs-singleflight). `tests/memory.rs` counts the bytes.
    let cache = plain::<usize, usize>().build();
    for key in 0..scaled(100_000, 1_000_000) {
        cache.invalidate(&key);
        assert!(cache.remove(&key).is_none() && !cache.expire(&key));
    }
    assert_eq!((cache.len(), cache.in_flight().len()), (0, 0));
}

#[test]
fn side_tables_grow_with_a_listener() {
    // What the listener was told, or was yet to be told, was kept (moka#295).
    let alive = Tally::default();
    let told = Tally::default();
    let count = told.clone();
    let cache =
        plain::<usize, Counted>().max_capacity(100).eviction_listener(move |_, _, _| _ = count.add()).build();
    let n = scaled(50_000, 1_000_000);
    for key in 0..n {
        if key % 2 == 0 {
            cache.insert(key, Counted::new(0, &alive));
        } else {
            cache.get_with(&key, || Counted::new(0, &alive));
        }
        // A bag of what this thread has retired at most, and what is shared out to be freed.
        assert!(alive.get() < 20_000, "{} values after {key} keys, 100 of them in the cache", alive.get());
    }
    assert_eq!((cache.len(), told.get()), (100, n - 100));
    eventually(|| {
        cache.run_pending_tasks();
        alive.get() == 100
    });
}

#[test]
fn values_outlive_the_cache() {
    // Values lived on after the last handle was dropped (moka#176, #384). `tests/reclaim.rs` has more.
    over_shapes(|builder: Builder<u64, Counted>| {
        let (cache, alive) = (builder.build(), Tally::default());
        for key in 0..100 {
            cache.insert(key, Counted::new(key, &alive));
            cache.get_with(&(key + 1_000), || Counted::new(key, &alive));
        }
        assert_eq!(alive.get(), 200);
        let other = cache.clone();
        drop(cache);
        assert_eq!(alive.get(), 200);
        drop(other);
        assert_eq!(alive.get(), 0, "at once");
    });
    // The same where most have been evicted on the way.
    over_shapes(|builder: Builder<u64, Counted>| {
        let alive = Tally::default();
        let cache = builder.max_capacity(20).eviction_listener(|_, value, _| assert!(value.0 < 500)).build();
        for key in 0..500 {
            cache.insert(key, Counted::new(key, &alive));
            cache.get_with(&(key + 1_000), || Counted::new(key, &alive));
        }
        assert!(alive.get() >= 20);
        assert_eq!((cache.len(), cache.stats().listener_panics), (20, 0));
        drop(cache);
        // Another test's pin may hold what has been evicted.
        let other = plain::<u32, u32>().build();
        eventually(|| {
            other.run_pending_tasks();
            alive.get() == 0
        });
    });
}

#[test]
fn removal_path_misses_a_structure() {
    // Expired entries left something behind (moka#64, stretto#55).
    let n = scaled(30_000, 1_000_000) as u64;
    for bounded in [false, true] {
        let (clock, alive, told) = (ManualClock::new(), Tally::default(), Tally::default());
        let count = told.clone();
        let mut builder = plain::<u64, Counted>().time_to_live(secs(1)).clock(clock.clone());
        if bounded {
            builder = builder.max_capacity(n).eviction_listener(move |_, _, _| _ = count.add());
        }
        let cache = builder.build();
        (0..n).for_each(|key| cache.insert(key, Counted::new(key, &alive)));
        assert_eq!((cache.len() as u64, alive.get() as u64, cache.weighted_size()), (n, n, n));
        clock.advance(secs(1));
        cache.run_pending_tasks();
        assert_eq!((cache.len(), cache.iter().count(), cache.weighted_size()), (0, 0, 0));
        eventually(|| {
            cache.run_pending_tasks();
            alive.get() == 0
        });
        assert_eq!(told.get() as u64, if bounded { n } else { 0 });
        // As many fit again.
        (n..2 * n).for_each(|key| cache.insert(key, Counted::new(key, &alive)));
        assert_eq!((cache.len() as u64, cache.stats().evictions.size), (n, 0));
    }
}

#[test]
fn expired_entries_pile_up_under_steady_inserts() {
    // As above: upkeep was slower than the inserts, so that a cache of short-lived entries grew for ever. No call but
    // `insert` is made, each key comes once, and a thousand are alive at a time.
    let clock = ManualClock::new();
    let cache = plain::<u64, u64>().shards(1).time_to_live(secs(1)).clock(clock.clone()).build();
    for key in 0..scaled(50_000, 1_000_000) as u64 {
        cache.insert(key, key);
        clock.advance(ms(1));
        assert!(cache.len() < 8_000, "{} entries after {key} inserts, 1,000 of them alive", cache.len());
    }
}

#[test]
fn cancelled_half_way() {
    // A load that was given up left its place behind (moka#309, quick-cache#120). Here: a panic, and a job dropped unrun.
    over_shapes(|builder: Builder<u32, u32>| {
        let queue = Queue::default();
        let cache = builder.executor(queue.clone()).loader_fn(|_| Ok::<_, Error>(1)).build();
        assert!(quietly(|| cache.get_with(&1, || panic!("boom"))).is_err());
        assert!(cache.refresh(&2));
        assert_eq!(cache.in_flight().len(), 1);
        drop(queue.take());
        assert_eq!((cache.in_flight().len(), cache.len(), cache.get(&1), cache.get(&2)), (0, 0, None, None));
        assert_eq!((cache.get_with(&1, || 3), cache.get_or_load(&2).unwrap()), (3, 1));
    });
}

#[test]
fn cancelled_half_way_and_then_evicted() {
    // As above: the entry whose load was given up stayed pinned, and could not be evicted (quick-cache#120).
    over_shapes(|builder: Builder<u32, u32>| {
        let queue = Queue::default();
        let cache = builder.max_capacity(8).executor(queue.clone()).loader_fn(|_| Ok::<_, Error>(1)).build();
        for round in 0..20 {
            (0..8).for_each(|key| cache.insert(key, round));
            for key in 0..8 {
                match key % 4 {
                    0 => assert!(quietly(|| cache.compute(&key, |_| panic!("boom"))).is_err()),
                    1 => assert!(cache.refresh(&key)),
                    2 => assert_eq!(cache.compute(&key, |_| Op::Keep), Outcome::Kept(round)),
                    _ => {
                        cache.expire(&key);
                        assert!(quietly(|| cache.get_with(&key, || panic!("boom"))).is_err());
                    }
                }
            }
            drop(queue.take());
            assert_eq!((cache.len(), cache.weighted_size(), cache.in_flight().len()), (8, 8, 0));
            cache.set_capacity(1);
            assert_eq!((cache.len(), cache.weighted_size()), (1, 1));
            cache.set_capacity(8);
        }
    });
}

#[test]
fn limit_not_enforced() {
    // The bound was exceeded many times over, or kept out what would have fitted (spiceai#12688, scc#130, lance#7953).
    over_shapes(|builder: Builder<u32, u32>| {
        let n = 100;
        let cache = builder.max_capacity(n.into()).weigher(|_, value| *value).build();
        for key in 0..50 * n {
            if key % 2 == 0 {
                cache.insert(key, 1)
            } else {
                _ = cache.get_with(&key, || 1)
            }
            assert!(cache.len() <= n as usize && cache.weighted_size() <= n.into());
        }
        // N entries of weight one fit into a capacity of N.
        cache.invalidate_all();
        (0..n).for_each(|key| cache.insert(key, 1));
        assert_eq!((cache.len(), (0..n).filter(|key| cache.contains_key(key)).count()), (100, 100));
        // And so does one of half the capacity, whatever the number of tables.
        cache.insert(n, n / 2);
        assert_eq!((cache.get(&n), cache.len(), cache.weighted_size()), (Some(50), 51, 100));
    });
}

#[test]
fn in_flight_entry_evicted() {
    // An entry was evicted while it was being loaded: its waiters got nothing, or loaded again (node-lru-cache#274,
    // caffeine#1623).
    over_shapes(|builder: Builder<u32, u32>| {
        let cache = builder.max_capacity(1).build();
        let gates = [(); 2].map(|()| Gate::default());
        let load = |key: u32| {
            let gate = &gates[key as usize];
            cache.get_with(&key, || {
                gate.pass();
                10 + key
            })
        };
        thread::scope(|s| {
            let load = &load;
            let threads = crowd(s, 10, move |nth| load(nth as u32 % 2));
            until_waiting(&cache, 8);
            (100..200).for_each(|key| cache.insert(key, key));
            for (nth, gate) in gates.iter().enumerate() {
                gate.open();
                eventually(|| cache.in_flight().len() == 1 - nth);
            }
            let mut got = all(threads);
            got.sort_unstable();
            assert_eq!(got, [10, 10, 10, 10, 10, 11, 11, 11, 11, 11]);
        });
        assert_eq!((gates[0].arrived(), gates[1].arrived(), cache.stats().loads), (1, 1, 2));
        // Two that store at the same time leave one of the two, or both until the next one makes room.
        cache.run_pending_tasks();
        assert_eq!((cache.len(), cache.weighted_size()), (1, 1));
        assert!(cache.get(&0) == Some(10) || cache.get(&1) == Some(11));
    });
}

#[test]
fn ttl_shorter_than_the_load() {
    // A value that was past its deadline when it came was loaded again by each waiter (caffeine#1623).
    for ttl in [Duration::ZERO, Duration::from_nanos(1), secs(1)] {
        let (clock, gate, loads) = (ManualClock::new(), Gate::default(), Tally::default());
        let cache = plain::<u32, u32>().time_to_live(ttl).clock(clock.clone()).build();
        let load = || {
            loads.add();
            gate.pass();
            clock.advance(secs(5));
            7
        };
        thread::scope(|s| {
            let (cache, load) = (&cache, &load);
            let threads = crowd(s, 20, move |_| cache.get_with(&1, load));
            until_waiting(cache, 19);
            gate.open();
            assert_eq!(all(threads), [7; 20]);
        });
        assert_eq!(loads.get(), 1, "{ttl:?}");
        assert_eq!(cache.get(&1).is_none(), ttl.is_zero());
    }
}

// Liveness, latency, arithmetic.

#[test]
fn unbounded_upkeep_in_the_caller() {
    // One unlucky call cleared away all that had expired (moka#498, ristretto#426). Here each does a bucket or so.
    let clock = ManualClock::new();
    let cache = plain::<u64, u64>().shards(1).time_to_live(secs(1)).clock(clock.clone()).build();
    let n = scaled(50_000, 1_000_000) as u64;
    (0..n).for_each(|key| cache.insert(key, key));
    clock.advance(secs(1));
    for key in 0..1_000 {
        let before = cache.len();
        assert_eq!(cache.get(&key), None);
        cache.get_with(&(n + key), || key);
        cache.insert(2 * n + key, key);
        assert!(before.saturating_sub(cache.len()) < 64, "one call removed {}", before - cache.len());
    }
    // And it gets somewhere: what was read went, and the writes swept some.
    assert!(cache.len() < n as usize + 1_000, "{}", cache.len());
}

#[test]
fn unbounded_upkeep_in_the_caller_of_a_full_cache() {
    // As above, where one who makes room meets nothing but what has expired, or what is in use.
    let clock = ManualClock::new();
    let n = scaled(30_000, 1_000_000) as u64;
    let cache = plain::<u64, u64>().shards(1).max_capacity(n).clock(clock.clone()).build();
    (0..n).for_each(|key| cache.insert_with_ttl(key, key, secs(1)));
    clock.advance(secs(1));
    for key in 0..1_000 {
        let before = cache.len();
        if key % 2 == 0 {
            cache.insert(n + key, key)
        } else {
            _ = cache.get_with(&(n + key), || key)
        }
        let removed = (before + 1).saturating_sub(cache.len());
        assert!(removed < 64, "one call removed {removed}");
        assert!(cache.weighted_size() <= n);
    }
    assert_eq!(cache.stats().evictions.size, 0, "nothing that lives had to go");
    // All have been used: one has to go all the same, and the next call finds the next one.
    let cache = plain::<u64, u64>().max_capacity(1_000).build();
    (0..1_000).for_each(|key| cache.insert(key, key));
    for key in 1_000..1_100 {
        (0..2).for_each(|_| (0..1_000).for_each(|key| _ = cache.get(&key)));
        cache.insert(key, key);
        assert_eq!((cache.len(), cache.stats().evictions.size), (1_000, key - 999));
    }
}

#[test]
fn stuck_flight_blocks_expiry() {
    // One load that never ended kept everything else from expiring (caffeine#373).
    over_shapes(|builder: Builder<u64, u64>| {
        let (clock, gate) = (ManualClock::new(), Gate::default());
        let cache = builder.time_to_live(secs(1)).clock(clock.clone()).build();
        // With the constant hasher all are in one list.
        let n = 10_000.min(scaled(1_000, 10_000)) as u64;
        thread::scope(|s| {
            let stuck = s.spawn(|| {
                cache.get_with(&n, || {
                    gate.pass();
                    0
                })
            });
            eventually(|| gate.arrived() == 1);
            (0..n).for_each(|key| cache.insert(key, key));
            clock.advance(secs(1));
            cache.run_pending_tasks();
            assert_eq!((cache.len(), cache.in_flight().len()), (0, 1));
            gate.open();
            stuck.join().unwrap();
        });
        assert_eq!(cache.len(), 1);
    });
    // Nor from being evicted, also if it is to replace something.
    over_shapes(|builder: Builder<u64, u64>| {
        let (cache, gate) = (builder.max_capacity(100).build(), Gate::default());
        cache.insert(1, 1);
        thread::scope(|s| {
            let stuck = [1, 2].map(|key| {
                let (cache, gate) = (&cache, &gate);
                s.spawn(move || {
                    cache.compute(&key, |_| {
                        gate.pass();
                        Op::Put(0)
                    })
                })
            });
            eventually(|| gate.arrived() == 2);
            for key in 10..scaled(2_000, 10_000) as u64 {
                cache.insert(key, key);
                assert!(cache.len() <= 100 && cache.get(&key) == Some(key));
            }
            assert_eq!(cache.get(&1), Some(1));
            gate.open();
            let outcomes = stuck.map(|s| s.join().unwrap());
            assert_eq!(outcomes, [Outcome::Replaced(0), Outcome::Inserted(0)]);
        });
        // Both may have made room for the same one, and one of them for itself with the other's.
        assert!([99, 100].contains(&cache.len()), "{}", cache.len());
        common::assert_weights_add_up(&cache, |_, _| 1);
    });
}

#[test]
fn wake_up_of_a_crowd() {
    // Waking many waiters took long or forgot some (varnish#2978).
    let (cache, gate) = (plain::<u32, u32>().build(), Gate::default());
    let n = scaled(1_000, 10_000);
    thread::scope(|s| {
        let leader = s.spawn(|| {
            cache.get_with(&1, || {
                gate.pass();
                7
            })
        });
        eventually(|| gate.arrived() == 1);
        let waiters = crowd(s, n, |_| {
            let value = cache.get_with(&1, || unreachable!());
            (value, Instant::now())
        });
        until_waiting(&cache, n);
        let published = Instant::now();
        gate.open();
        assert_eq!(leader.join().unwrap(), 7);
        let last =
            all(waiters).into_iter().inspect(|(v, _)| assert_eq!(*v, 7)).map(|(_, at)| at).max().unwrap();
        // Two cores that do other work as well need some 50 ms.
        assert!(last - published < secs(10), "{:?}", last - published);
    });
}

#[test]
fn wrong_entry_on_a_hash_collision() {
    // Keys with the same hash were taken for the same key (foyer#1004). Every other test with shapes has such a hasher too.
    let cache = plain::<String, usize>().hasher(Hashing::Constant).build();
    let mut model = HashMap::new();
    for n in 0..2_000_usize {
        let key = format!("{}", n * 7919 % 101);
        match n % 5 {
            0 | 1 => assert_eq!(cache.get_with(key.as_str(), || n), *model.entry(key).or_insert(n)),
            2 => {
                cache.insert(key.clone(), n);
                model.insert(key, n);
            }
            3 => assert_eq!(cache.remove(key.as_str()), model.remove(&key)),
            _ => assert_eq!(cache.get(key.as_str()), model.get(&key).copied()),
        }
    }
    assert_eq!(cache.len(), model.len());
    assert_eq!(cache.iter().collect::<HashMap<_, _>>(), model);
}

#[test]
fn edge_sizes_and_times() {
    // Zero and for ever broke the arithmetic (quick-cache#105, moka#472). `tests/settings.rs` has each setting.
    let clock = ManualClock::new();
    let with = |ttl| plain::<u32, u32>().time_to_live(ttl).clock(clock.clone()).build();
    let (zero, tiny, ever) = (with(Duration::ZERO), with(Duration::from_nanos(1)), with(Duration::MAX));
    for cache in [&zero, &tiny, &ever] {
        cache.insert(1, 1);
        assert_eq!(cache.get_with(&2, || 2), 2);
    }
    assert_eq!((zero.get(&1), zero.get(&2), zero.len()), (None, None, 0));
    assert_eq!((tiny.get(&1), tiny.get(&2)), (Some(1), Some(2)));
    clock.advance(Duration::from_nanos(1));
    assert_eq!((tiny.get(&1), tiny.get(&2)), (None, None));
    clock.advance(secs(500 * 365 * 86_400));
    ever.run_pending_tasks();
    assert_eq!((ever.get(&1), ever.get(&2)), (Some(1), Some(2)));
    assert!(plain::<u32, u32>().soft_ttl(secs(2)).time_to_live(secs(1)).try_build().is_err());
}

#[test]
fn edge_capacities_and_weights() {
    // Zero, one and the largest number broke the arithmetic, or hung (quick-cache#105).
    for capacity in [0, 1, 2, u64::from(u32::MAX) - 1, u32::MAX.into(), u64::MAX - 1, u64::MAX] {
        over_shapes(|builder: Builder<u64, u32>| {
            let cache = builder.max_capacity(capacity).weigher(|_, value| *value).build();
            for round in 0..3 {
                for (key, weight) in [0, 1, 2, u32::MAX - 1, u32::MAX, 1, 0].into_iter().enumerate() {
                    let key = 10 * round + key as u64;
                    let fits = capacity > 0 && u64::from(weight) <= capacity;
                    cache.insert(key, weight);
                    assert_eq!(cache.get(&key), fits.then_some(weight), "{weight} of {capacity}");
                    assert_eq!(cache.get_with(&(key + 100), || weight), weight);
                    assert_eq!(cache.peek(&(key + 100)), fits.then_some(weight));
                    assert!(cache.weighted_size() <= capacity);
                }
                common::assert_weights_add_up(&cache, |_, value| *value);
            }
            for next in [u64::MAX, 1, 0, u64::MAX, capacity] {
                cache.set_capacity(next);
                cache.insert(1, 1);
                assert_eq!((cache.get(&1).is_some(), cache.weighted_size() <= next), (next > 0, true));
            }
        });
    }
}

#[test]
fn a_callbacks_panic_kills_a_service_part() {
    // A callback's panic ended the thread that did the upkeep (stretto#10). Each callback panics once, and all goes on.
    let (clock, armed) = (ManualClock::new(), Arc::new(Mutex::new("")));
    let trip = {
        let armed = armed.clone();
        move |name: &str| {
            let mut armed = armed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if *armed == name {
                *armed = "";
                drop(armed);
                quietly(|| panic!("boom")).unwrap_or_else(|p| std::panic::resume_unwind(p))
            }
        }
    };
    let [in_loader, in_expiry, in_fallback, in_weigher, in_listener] = [(); 5].map(|()| trip.clone());
    let cache = plain::<u32, u32>()
        .clock(clock.clone())
        .soft_ttl(secs(1))
        .max_capacity(10)
        .weigher(move |_, _| {
            in_weigher("weigher");
            1
        })
        .eviction_listener(move |_, _, _| in_listener("listener"))
        .expire_after(move |_: &u32, _: &u32, _: Option<Duration>| {
            in_expiry("expiry");
            Ttl::default()
        })
        .fallback(move |_| {
            in_fallback("fallback");
            Some(0)
        })
        .loader_fn(move |key| {
            in_loader("loader");
            if *key < 100 { Ok(*key) } else { Err(boom()) }
        })
        .build();
    let arm = |name| *armed.lock().unwrap() = name;
    let calls: [(&'static str, &dyn Fn()); 6] = [
        ("loader", &|| _ = cache.get_or_load(&1)),
        ("expiry", &|| _ = cache.get_or_load(&1)),
        ("expiry", &|| cache.insert(1, 1)),
        ("weigher", &|| _ = cache.get_or_load(&1)),
        ("weigher", &|| cache.insert(1, 1)),
        ("fallback", &|| _ = cache.get_or_load(&100)),
    ];
    for (name, call) in calls {
        arm(name);
        assert_eq!(panic_of(call), "boom", "{name}");
        assert_eq!((cache.in_flight().len(), cache.get_or_load(&1).unwrap()), (0, 1), "{name}");
        assert_eq!(cache.get_or_load(&100).unwrap(), 0, "{name}");
        cache.invalidate_all();
    }
    // The loader, and the `Expiry` and the weigher that a load asked.
    assert_eq!(cache.stats().loader_panics, 3);
    // The listener's reaches nobody.
    let ways_out: [fn(&Sut<u32, u32>); 3] = [|c| c.insert(1, 2), |c| c.invalidate(&1), |c| c.set_capacity(9)];
    for taking_out in ways_out {
        (0..20).for_each(|key| cache.insert(key, key));
        cache.insert(1, 1);
        arm("listener");
        taking_out(&cache);
        cache.set_capacity(5);
        cache.set_capacity(10);
        assert_eq!(*armed.lock().unwrap(), "");
    }
    assert_eq!((cache.stats().listener_panics, cache.get_with(&77, || 7)), (3, 7));
    cache.invalidate_all();
    // In the background every panic is counted, and the keeper goes on.
    for name in ["loader", "expiry", "weigher"] {
        cache.insert(1, 5);
        clock.advance(secs(1));
        arm(name);
        assert_eq!(cache.get_or_load(&1).unwrap(), 5);
        eventually(|| armed.lock().unwrap().is_empty() && cache.in_flight().is_empty());
        clock.advance(secs(1));
        assert_eq!(cache.get_or_load(&1).unwrap(), 5);
        eventually(|| cache.peek(&1) == Some(1));
    }
    assert_eq!(cache.stats().loader_panics, 6);
    // Of those who warm keys.
    let told = Tally::default();
    let options = quell::WarmOptions::new().concurrency(1).progress({
        let told = told.clone();
        move |_| {
            told.add();
            quietly(|| panic!("boom")).unwrap_or_else(|p| std::panic::resume_unwind(p))
        }
    });
    let report = cache.warm(1..9, options);
    assert_eq!((told.get(), report.was_aborted(), cache.in_flight().len()), (1, true, 0));
    // The closures of `read`, `retain` and `compute`.
    assert_eq!(panic_of(|| cache.read(&1, |_| -> u32 { panic!("read") })), "read");
    assert_eq!(panic_of(|| cache.retain(|_, _| panic!("retain"))), "retain");
    assert_eq!(panic_of(|| cache.compute(&1, |_| panic!("compute"))), "compute");
    assert_eq!((cache.peek(&1), cache.in_flight().len()), (Some(1), 0));
}
