//! Everything at once, from several threads: what the sanitizers run.
//!
//! `cargo test --test concurrent`; under AddressSanitizer and ThreadSanitizer by `.ci/sanitize address` and
//! `.ci/sanitize thread`. `QUELL_LONG=1` runs a hundred times as long.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test may use the standard library's own"
)]

mod common;

use common::Random;
use quell::{Cache, LoadErrorKind, ManualClock, Op};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

const THREADS: u64 = 4;

fn rounds(short: u64) -> u64 {
    if std::env::var_os("QUELL_LONG").is_some() { short * 100 } else { short }
}

/// A value that knows its key and counts the living.
struct Value {
    key: u64,
    text: String,
    alive: Arc<AtomicUsize>,
}

impl Value {
    fn new(key: u64, alive: &Arc<AtomicUsize>) -> Arc<Self> {
        alive.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { key, text: format!("value of {key}"), alive: alive.clone() })
    }

    fn check(&self, key: u64) {
        assert_eq!((self.key, &*self.text), (key, &*format!("value of {key}")));
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

fn in_threads(body: impl Fn(u64) + Sync) {
    std::thread::scope(|s| {
        for t in 0..THREADS {
            let body = &body;
            s.spawn(move || body(t));
        }
    });
}

#[test]
fn every_operation_against_every_other() {
    for shards in [1, 8] {
        let alive = Arc::new(AtomicUsize::new(0));
        let clock = ManualClock::new();
        let of_loader = alive.clone();
        let cache: Cache<u64, Arc<Value>> = Cache::builder()
            .shards(shards)
            .soft_ttl(Duration::from_millis(5))
            .time_to_live(Duration::from_millis(20))
            .stale_if_error(Duration::from_millis(20))
            .jitter(0.5)
            .clock(clock.clone())
            .loader(move |key: &u64| match key % 7 {
                0 => Err("no such luck"),
                _ => Ok(Value::new(*key, &of_loader)),
            })
            .build();
        in_threads(|t| {
            let mut random = Random(t);
            for _ in 0..rounds(4_000) {
                let key = random.below(64);
                match random.below(20) {
                    0..=3 => drop(cache.get(&key).inspect(|v| v.check(key))),
                    4 => drop(cache.read(&key, |v| v.check(key))),
                    5 => drop(cache.pin().get(&key).inspect(|v| v.check(key))),
                    6 | 7 => cache.get_with(&key, || Value::new(key, &alive)).check(key),
                    8 | 9 => match cache.get_or_load(&key) {
                        Ok(value) => value.check(key),
                        // Its own loader's, or that of a call that it joined.
                        Err(error) => {
                            assert!(matches!(error.kind(), LoadErrorKind::Failed | LoadErrorKind::Absent));
                        }
                    },
                    10 => match cache.try_get_with(&key, || Err::<Arc<Value>, _>("never")) {
                        Ok(value) => value.check(key),
                        Err(error) => assert_eq!(error.kind(), LoadErrorKind::Failed),
                    },
                    11 => drop(cache.optionally_get_with(&key, || None).inspect(|v| v.check(key))),
                    12 | 13 => cache.insert(key, Value::new(key, &alive)),
                    14 => drop(cache.remove(&key).inspect(|v| v.check(key))),
                    15 => cache.invalidate(&key),
                    16 => drop(cache.compute(&key, |old| match old {
                        Some(value) => {
                            value.check(key);
                            Op::Remove
                        }
                        None => Op::Put(Value::new(key, &alive)),
                    })),
                    17 => {
                        cache.expire(&key);
                        cache.refresh(&key);
                    }
                    18 => clock.advance(Duration::from_millis(1)),
                    _ => match random.below(16) {
                        0 => cache.invalidate_all(),
                        1 => cache.retain(|k, v| {
                            v.check(*k);
                            k % 2 == 0
                        }),
                        2 => cache.run_pending_tasks(),
                        3 => cache.iter().for_each(|(k, v)| v.check(k)),
                        _ => {
                            let key = 1_000 + random.below(10_000);
                            cache.insert(key, Value::new(key, &alive));
                        }
                    },
                }
            }
        });
        drop(cache);
        // A refresh may still be running on the keeper, and another test's pin may hold garbage up.
        let probe = Cache::<u64, u64>::builder().build();
        for _ in 0..30_000 {
            if alive.load(Ordering::Relaxed) == 0 {
                break;
            }
            probe.run_pending_tasks();
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(alive.load(Ordering::Relaxed), 0, "values that were never dropped");
    }
}

#[test]
fn a_key_is_never_loaded_twice_at_a_time() {
    let cache: Cache<u64, u64> = Cache::builder().build();
    let running: Vec<AtomicU64> = (0..8).map(|_| AtomicU64::new(0)).collect();
    let loads = AtomicU64::new(0);
    in_threads(|t| {
        let mut random = Random(t);
        for _ in 0..rounds(10_000) {
            let key = random.below(8);
            let load = || {
                let before = running[key as usize].fetch_add(1, Ordering::SeqCst);
                loads.fetch_add(1, Ordering::Relaxed);
                std::thread::yield_now();
                running[key as usize].fetch_sub(1, Ordering::SeqCst);
                assert_eq!(before, 0, "two loads of one key at a time");
                key
            };
            // Nothing is written, so nothing is detached: whoever takes no cached value joins the load under way.
            let value = match random.below(4) {
                0 => cache.ask(&key).max_age(Duration::ZERO).load_with(load).unwrap().value,
                _ => cache.get_with(&key, load),
            };
            assert_eq!(value, key);
        }
    });
    assert!(loads.into_inner() > 8);
    assert!(cache.stats().joins > 0);
}

#[test]
fn a_value_from_before_an_invalidate_is_never_served_after_it() {
    let cache: Cache<u64, u64> = Cache::builder().build();
    let source: Vec<AtomicU64> = (0..4).map(|_| AtomicU64::new(0)).collect();
    in_threads(|t| {
        let mut random = Random(t);
        for _ in 0..rounds(10_000) {
            let key = random.below(4);
            let at_least = source[key as usize].load(Ordering::SeqCst);
            if random.below(3) == 0 {
                let changed = source[key as usize].fetch_add(1, Ordering::SeqCst) + 1;
                match random.below(3) {
                    0 => cache.invalidate(&key),
                    1 => drop(cache.remove(&key)),
                    _ => cache.invalidate_all(),
                }
                let served = cache.get_with(&key, || source[key as usize].load(Ordering::SeqCst));
                assert!(served >= changed, "{served} was served after {changed} had been announced");
            } else {
                let served = cache.get_with(&key, || source[key as usize].load(Ordering::SeqCst));
                // Another thread may have changed the source and not yet invalidated: no more than one change each.
                assert!(served + THREADS >= at_least);
            }
        }
    });
}

#[test]
fn leases_change_hands_under_load() {
    let cache: Cache<u64, u64> = Cache::builder().lease(Duration::from_millis(1)).build();
    in_threads(|t| {
        let mut random = Random(t);
        for i in 0..rounds(300) {
            let key = random.below(2);
            let value = cache.get_with(&key, || {
                if random.below(8) == 0 {
                    std::thread::sleep(Duration::from_millis(3));
                }
                key
            });
            assert_eq!(value, key);
            if i % 3 == 0 {
                cache.invalidate(&key);
            }
        }
    });
    assert!(cache.in_flight().is_empty());
}

/// One of its kind: a key, and a number that says what it weighs.
type Numbered = Arc<(u64, u64)>;

fn weigh(_: &u64, value: &Numbered) -> u32 {
    (value.1 % 4) as u32
}

#[test]
fn a_small_bounded_cache_with_everything() {
    for shards in [1, 8] {
        let numbers = Arc::new(AtomicU64::new(0));
        let told = Arc::new(Mutex::new(Vec::new()));
        let home = Arc::new(OnceLock::<Cache<u64, Numbered>>::new());
        let (note, of_loader, house) = (told.clone(), numbers.clone(), home.clone());
        let cache: Cache<u64, Numbered> = Cache::builder()
            .shards(shards)
            .max_capacity(40)
            .soft_ttl(Duration::from_millis(8))
            .time_to_live(Duration::from_millis(20))
            .stale_if_error(Duration::from_millis(20))
            .weigher(weigh)
            .eviction_listener(move |key, value, _| {
                assert_eq!(*key, value.0);
                note.lock().unwrap().push(value.1);
                // It reads what it likes. What it would write, it would be told of in turn.
                if let Some(other) = house.get().and_then(|cache| cache.get(key)) {
                    assert_ne!(other.1, value.1, "a value that has gone is served");
                }
            })
            .loader(move |key: &u64| match key % 7 {
                0 => Err("no such luck"),
                _ => Ok(Arc::new((*key, of_loader.fetch_add(1, Ordering::Relaxed)))),
            })
            .build();
        assert!(home.set(cache.clone()).is_ok());
        let new = |key: u64| Arc::new((key, numbers.fetch_add(1, Ordering::Relaxed)));
        // Numbers of values that have certainly been in the cache.
        let inserted = Mutex::new(Vec::new());
        in_threads(|t| {
            let mut random = Random(100 + t);
            let mut mine = Vec::new();
            for _ in 0..rounds(4_000) {
                let key = random.below(120);
                match random.below(18) {
                    0..=3 => drop(cache.get(&key).inspect(|v| assert_eq!(v.0, key))),
                    4..=6 => {
                        let value = new(key);
                        mine.push(value.1);
                        cache.insert(key, value);
                    }
                    7..=9 => assert_eq!(cache.get_with(&key, || new(key)).0, key),
                    10 | 11 => drop(cache.get_or_load(&key).inspect(|v| assert_eq!(v.0, key))),
                    12 => drop(cache.remove(&key)),
                    13 => drop(cache.compute(&key, |old| match old {
                        Some(old) if old.1 % 3 == 0 => Op::Remove,
                        Some(old) if old.1 % 3 == 1 => Op::Keep,
                        _ => Op::Put(new(key)),
                    })),
                    14 => drop(cache.try_get_with(&key, || Err::<Numbered, _>("never"))),
                    15 => drop(cache.expire(&key)),
                    16 => cache.invalidate(&key),
                    _ => match random.below(24) {
                        0 => cache.set_capacity(10 + random.below(60)),
                        1 => cache.set_capacity(u64::MAX),
                        2 => cache.retain(|key, value| {
                            assert_eq!(*key, value.0);
                            key % 3 > 0
                        }),
                        3 => cache.run_pending_tasks(),
                        4 => assert!(cache.iter().all(|(key, value)| key == value.0)),
                        5 => cache.invalidate_all(),
                        _ => cache.set_capacity(40),
                    },
                }
            }
            inserted.lock().unwrap().extend(mine);
        });
        // The keeper may still have refreshes to run.
        for _ in 0..30_000 {
            if cache.in_flight().is_empty() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(cache.in_flight(), []);
        cache.set_capacity(30);
        cache.run_pending_tasks();
        assert!(cache.weighted_size() <= 30, "{}", cache.weighted_size());
        // Those in grace are counted and not seen: they go when that is over.
        let adds_up = || {
            cache.run_pending_tasks();
            let sum: u64 = cache.iter().map(|(key, value)| u64::from(weigh(&key, &value))).sum();
            (cache.weighted_size(), cache.len()) == (sum, cache.iter().count())
        };
        for _ in 0..30_000 {
            if adds_up() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(adds_up(), "{} entries weigh {}", cache.len(), cache.weighted_size());
        cache.invalidate_all();
        assert_eq!((cache.weighted_size(), cache.len()), (0, 0));

        let mut times: HashMap<u64, u32> = HashMap::new();
        told.lock().unwrap().iter().for_each(|number| *times.entry(*number).or_default() += 1);
        assert!(times.values().all(|n| *n == 1), "a value was told twice");
        let lost = inserted.lock().unwrap().iter().filter(|number| !times.contains_key(number)).count();
        assert_eq!(lost, 0, "values that have gone untold");
        // What else has never been told was never in the cache: the result of a load that was refused.
        let stats = cache.stats();
        let never = numbers.load(Ordering::Relaxed) - times.len() as u64;
        assert!(
            never <= stats.fenced,
            "{never} values were told to nobody, {} results were refused",
            stats.fenced
        );
        assert_eq!(stats.listener_panics, 0);
        let evictions = stats.evictions;
        let all = evictions.expired + evictions.explicit + evictions.replaced + evictions.size;
        assert_eq!(all, times.len() as u64);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn the_keepers_threads_end_with_the_cache() {
    let threads = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|t| std::fs::read_to_string(t.path().join("comm")).ok());
        names.filter(|name| name.starts_with("quell-mortal")).count()
    };
    let cache: Cache<u64, u64> =
        Cache::builder().name("mortal").loader(|k: &u64| Ok::<_, String>(*k)).build();
    for k in 0..100 {
        assert!(cache.refresh(&k));
    }
    let until = |there: bool| {
        for _ in 0..30_000 {
            if (threads() > 0) == there {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("{} threads of the keeper", threads());
    };
    // A thread names itself after it has begun.
    until(true);
    drop(cache);
    until(false);
}

#[test]
fn threads_come_and_go() {
    let cache: Cache<u64, String> = Cache::builder().build();
    for round in 0..rounds(50) {
        in_threads(|t| {
            for i in 0..20 {
                let key = t * 100 + i;
                cache.insert(key, format!("{round} {t}"));
                assert!(cache.get(&key).is_some());
                cache.remove(&(key + 1));
            }
        });
    }
    assert_eq!(cache.stats().hits, rounds(50) * THREADS * 20);
}

/// What a failed load has left over a value goes with the cache, once.
#[test]
fn a_cache_ends_with_failures_over_values() {
    for replaced in [false, true] {
        let clock = ManualClock::new();
        let builder = Cache::builder().soft_ttl(Duration::from_secs(1)).clock(clock.clone());
        let cache: Cache<u64, Arc<u64>> = builder.build();
        let value = Arc::new(7);
        cache.insert(1, value.clone());
        if replaced {
            cache.insert(1, value.clone());
        }
        clock.advance(Duration::from_secs(2));
        assert_eq!(cache.try_get_with(&1, || Err::<Arc<u64>, _>("no")).ok(), Some(value.clone()));
        drop(cache);
        cache_is_gone(&value);
    }
}

/// No cache holds the value any more, but what this thread has retired may wait for pins of other tests.
fn cache_is_gone(value: &Arc<u64>) {
    let other: Cache<u8, u8> = Cache::new(1);
    while Arc::strong_count(value) > 1 {
        other.run_pending_tasks();
        std::thread::yield_now();
    }
}

/// Slots that die with their values in them, against readers, leases, failures, a listener, growth and the end of the cache.
#[test]
fn slots_that_die_with_their_values() {
    const KEYS: u64 = 64;
    let value = |key: u64, nth: u64| Arc::new(Box::new(key * 1_000_000 + nth % 1_000));
    let fits = |key: u64, value: &Arc<Box<u64>>| assert_eq!(***value / 1_000_000, key);
    for round in 0..12_u64 {
        let mut builder = Cache::builder()
            .soft_ttl(Duration::from_micros(50))
            .time_to_live(Duration::from_millis(if round % 5 == 0 { 1 } else { 1_000 }))
            .stale_if_error(Duration::from_millis(5))
            .shards(1 << (round % 2));
        if round % 3 != 0 {
            builder =
                builder.max_capacity(8 + round * 3).weigher(|key: &u64, _: &Arc<Box<u64>>| (*key % 3) as u32);
        }
        if round % 2 == 0 {
            builder = builder.time_to_idle(Duration::from_millis(3));
        }
        if round % 4 < 2 {
            builder = builder.eviction_listener(move |key, value, _| fits(*key, value));
        }
        let cache = builder.build();
        std::thread::scope(|s| {
            for thread in 0..4_u64 {
                let cache = &cache;
                s.spawn(move || {
                    let mut x = thread * 77 + round + 1;
                    for nth in 0..500_u64 {
                        x ^= x << 13;
                        x ^= x >> 7;
                        x ^= x << 17;
                        let key = x >> 8 & (KEYS - 1);
                        match x >> 40 & 15 {
                            0 | 1 => cache.insert(key, value(key, nth)),
                            2 => cache.invalidate(&key),
                            3 => drop(cache.remove(&key)),
                            4 => drop(cache.try_get_with(&key, || Err::<Arc<Box<u64>>, _>("no"))),
                            5 | 6 => fits(key, &cache.get_with(&key, || value(key, nth))),
                            7 => {
                                let _ = cache.compute(&key, |there| match (there, nth % 3) {
                                    (Some(_), 0) => Op::Remove,
                                    (_, 1) => Op::Keep,
                                    _ => Op::Put(value(key, nth)),
                                });
                            }
                            8 => {
                                let pinned = cache.pin();
                                let seen = [0, 1, 2, 3].map(|i| (key ^ i, pinned.get(&(key ^ i))));
                                std::thread::yield_now();
                                seen.iter()
                                    .for_each(|(key, seen)| seen.iter().for_each(|seen| fits(*key, seen)));
                            }
                            9 => _ = cache.read(&key, |seen| fits(key, seen)),
                            10 => _ = cache.expire(&key),
                            11 if nth % 16 == 0 => cache.retain(|key, _| key % 2 == nth % 2),
                            12 if nth % 64 == 0 => cache.run_pending_tasks(),
                            13 if nth % 128 == 0 => {
                                cache.set_capacity([0, 5, 20, u64::MAX][(nth / 128 % 4) as usize])
                            }
                            14 => fits(
                                key,
                                &cache.get_with(&key, || {
                                    cache.invalidate(&key);
                                    value(key, nth)
                                }),
                            ),
                            _ => drop(cache.get(&key)),
                        }
                    }
                });
            }
        });
    }
}
