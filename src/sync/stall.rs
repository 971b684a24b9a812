//! Progress: a thread is suspended at each step of each operation in turn, and all others must come to their end.
//!
//! `cargo test --lib stall`. In a full cache, all others must still find room, and stay within the capacity but for one entry
//! for each suspended thread; the [audit](crate::engine) at the end of each cache sees what a suspension has left behind.
//! A call that needs a flight whose leader is suspended waits for it by its contract, up to
//! the lease; nothing else may wait at all.

use super::{Cache, Op};
use crate::primitive::step::armed;
use smol::future::{block_on, poll_once, yield_now, zip};
use std::future::ready;
use std::time::Duration;

type Fixture = Cache<u64, u64>;

/// The key that the suspended thread works on; 0 to 9 are there, the others are not.
const PRESENT: u64 = 3;
const ABSENT: u64 = 77;

fn fixture() -> Fixture {
    let cache = Cache::builder().shards(1).lease(Duration::from_millis(5)).build();
    for k in 0..10 {
        cache.insert(k, k);
    }
    cache
}

/// Everything that must not wait for anybody, on the same key and on others, with several growths on the way.
fn others(cache: &Fixture, key: u64) {
    cache.get(&key);
    cache.insert(key, 1);
    assert_eq!(cache.get(&key), Some(1));
    assert_eq!(cache.remove(&key), Some(1));
    assert_eq!(cache.get(&key), None);
    cache.invalidate(&key);
    cache.expire(&key);
    for k in 1000..1200 {
        cache.insert(k, k);
        assert_eq!(cache.get(&k), Some(k));
    }
    assert!(cache.iter().count() >= 200);
    cache.retain(|k, _| k % 2 == 0);
    cache.invalidate_all();
    cache.run_pending_tasks();
    assert_eq!(cache.get(&1000), None);
    // A flight of a suspended leader is waited for up to the lease; another caller leads then.
    assert_eq!(cache.get_with(&key, || 5), 5);
    assert!(matches!(cache.try_get_with(&key, || Ok::<_, std::fmt::Error>(6)), Ok(5)));
    assert_eq!(block_on(cache.get_with_async(&(key + 1), three_steps())), 1);
    cache.compute(&key, |_| Op::Put(7));
    assert_eq!(cache.get(&key), Some(7));
    let _ = cache.stats();
    let _ = cache.in_flight();
}

/// Suspends `victim` at its n-th step for all n; returns how many steps it has.
fn stall(key: u64, victim: impl Fn(&Fixture, u64) + Sync) -> usize {
    stall_in(fixture, others, |_| (), key, victim)
}

/// The same with a cache and with others of its own; `finally` looks at the cache when all have ended.
fn stall_in(
    fixture: fn() -> Fixture,
    others: fn(&Fixture, u64),
    finally: fn(&Fixture),
    key: u64,
    victim: impl Fn(&Fixture, u64) + Sync,
) -> usize {
    for nth in 0.. {
        let cache = fixture();
        let (stall, arm) = armed::arm(nth);
        let ended = std::thread::scope(|s| {
            let (cache, victim) = (&cache, &victim);
            let suspended = s.spawn(move || {
                arm();
                victim(cache, key);
                armed::disarm()
            });
            if stall.reached.recv().is_ok() {
                others(cache, key);
                drop(stall.release);
            }
            suspended.join().unwrap()
        });
        assert!(cache.in_flight().is_empty(), "a load is left behind by the stall at step {nth}");
        finally(&cache);
        if ended {
            return nth;
        }
    }
    unreachable!("an operation's steps are finite")
}

macro_rules! stalls {
    ($($name:ident: at least $steps:literal, $key:expr, $victim:expr;)*) => {$(
        #[test]
        fn $name() {
            let steps = stall($key, $victim);
            assert!(steps >= $steps, "only {steps} steps to be suspended at");
        }
    )*};
}

stalls! {
    insert_of_a_new_key: at least 3, ABSENT, |c, k| c.insert(k, 1);
    insert_over_a_value: at least 3, PRESENT, |c, k| c.insert(k, 1);
    growth_by_inserts: at least 40, ABSENT, |c, k| (k..k + 30).for_each(|k| c.insert(k, 1));
    remove: at least 4, PRESENT, |c, k| _ = c.remove(&k);
    invalidate: at least 4, PRESENT, |c, k| c.invalidate(&k);
    invalidate_all: at least 20, PRESENT, |c, _| c.invalidate_all();
    expire: at least 2, PRESENT, |c, k| _ = c.expire(&k);
    a_load_of_a_new_key: at least 6, ABSENT, |c, k| _ = c.get_with(&k, || 1);
    a_load_that_fails: at least 6, ABSENT, |c, k| drop(c.try_get_with(&k, || Err::<u64, _>("no")));
    a_load_that_replaces: at least 6, PRESENT, |c, k| _ = c.ask(&k).max_age(Duration::ZERO).load_with(|| 1);
    compute: at least 6, PRESENT, |c, k| _ = c.compute(&k, |_| Op::Put(1));
    a_load_that_is_abandoned: at least 6, PRESENT, |c, k| _ = c.compute(&k, |_| Op::Keep);
    a_load_that_finds_nothing: at least 6, PRESENT, |c, k| _ = c.compute(&k, |_| Op::Remove);
    a_future_that_is_ready: at least 8, ABSENT, |c, k| _ = block_on(c.get_with_async(&k, ready(1)));
    a_future_of_several_steps: at least 12, ABSENT, |c, k| _ = block_on(c.get_with_async(&k, three_steps()));
    a_future_that_fails: at least 8, ABSENT,
        |c, k| drop(block_on(c.try_get_with_async(&k, ready(Err::<u64, _>("no")))));
    a_future_that_is_dropped: at least 6, ABSENT, |c, k| {
        let mut call = std::pin::pin!(c.get_with_async(&k, three_steps()));
        let _ = block_on(poll_once(&mut call));
    };
    a_future_with_a_follower: at least 12, ABSENT, |c, k| {
        let calls = zip(c.get_with_async(&k, three_steps()), c.get_with_async(&k, ready(2)));
        _ = block_on(calls);
    };
    a_future_for_many: at least 20, ABSENT, |c, k| {
        let load = |keys: Vec<u64>| ready(Ok::<_, std::fmt::Error>(keys.into_iter().map(|k| (k, 1))));
        drop(block_on(c.load_many_async([k, k + 1], load)));
    };
    many_at_once: at least 12, ABSENT, |c, k| {
        let load = |keys: &[u64]| Ok::<_, std::fmt::Error>(keys.iter().map(|k| (*k, 1)).collect::<Vec<_>>());
        drop(c.load_many([k, k + 1], load));
    };
}

/// A future that has to be polled three times, and sees to that itself.
async fn three_steps() -> u64 {
    yield_now().await;
    yield_now().await;
    1
}

/// Entries of a full cache.
const FULL: u64 = 4;

/// A cache that is full of the keys up to [`PRESENT`], some of which have been used.
fn full_of_new() -> Fixture {
    let lease = Duration::from_millis(5);
    let cache =
        Cache::builder().shards(1).lease(lease).max_capacity(FULL).eviction_listener(|_, _, _| ()).build();
    for k in 0..=PRESENT {
        cache.insert(k, k);
        cache.get(&(k & 1));
    }
    assert_eq!(cache.len() as u64, FULL);
    cache
}

/// A cache whose capacity is one entry: whoever is suspended holds all that there is.
fn full_of_one() -> Fixture {
    let cache = Cache::builder().shards(1).lease(Duration::from_millis(5)).max_capacity(1).build();
    cache.insert(PRESENT, PRESENT);
    cache
}

/// The same with most slots in the main queue, since they come back after they were dropped.
fn full_of_old() -> Fixture {
    let cache = full_of_new();
    for k in (0..6).chain(0..6).chain(0..=PRESENT) {
        cache.insert(k, k);
        cache.get(&k);
        cache.get(&k);
    }
    assert_eq!(cache.len() as u64, FULL);
    cache
}

/// What must not wait for anybody in a full cache, where each insert needs room.
fn others_in_a_full_cache<const CAPACITY: u64>(cache: &Fixture, key: u64) {
    cache.set_capacity(CAPACITY);
    let within = |capacity: u64| {
        // A suspended thread holds two at most: what it has just stored, and what it is about to drop.
        let (there, most) = (cache.iter().count() as u64, (capacity + 1).max(3));
        assert!(there <= most, "{there} entries, and the capacity is {capacity}");
    };
    // Another key first: whoever comes by a dead slot of his own key takes it out of the way.
    for k in [key + 1, key, key + 1] {
        cache.get(&k);
        cache.insert(k, 1);
        assert_eq!(cache.get(&k), Some(1));
        within(CAPACITY);
        assert_eq!(cache.remove(&k), Some(1));
        assert_eq!(cache.get(&k), None);
    }
    for k in 1000..1012 {
        cache.insert(k, k);
        assert_eq!(cache.get(&k), Some(k), "nobody evicts what it has just stored");
        within(CAPACITY);
        cache.get(&(k - 1));
        cache.insert(k, k + 1);
        within(CAPACITY);
    }
    assert_eq!(cache.get_with(&key, || 5), 5);
    assert_eq!(cache.get_with(&2000, || 6), 6);
    within(CAPACITY);
    cache.set_capacity(2 * CAPACITY);
    (1000..1010).for_each(|k| cache.insert(k, k));
    within(2 * CAPACITY);
    cache.set_capacity(CAPACITY);
    within(CAPACITY);
    cache.invalidate_all();
    cache.run_pending_tasks();
    cache.insert(key, 7);
    assert_eq!(cache.get(&key), Some(7));
}

/// When nobody is suspended any more, the next insert finds the room for all that is too much.
fn fits<const CAPACITY: u64>(cache: &Fixture) {
    cache.set_capacity(CAPACITY);
    cache.insert(3000, 1);
    assert_eq!(cache.get(&3000), Some(1));
    assert!(cache.weighted_size() <= CAPACITY, "{} in the cache", cache.weighted_size());
    assert_eq!(cache.weighted_size(), cache.iter().count() as u64);
}

/// Suspends `victim` in each kind of full cache. Returns the least number of steps.
fn stall_when_full(key: u64, victim: impl Fn(&Fixture, u64) + Sync) -> usize {
    let full = |cache| stall_in(cache, others_in_a_full_cache::<FULL>, fits::<FULL>, key, &victim);
    let steps = [
        full(full_of_new),
        full(full_of_old),
        stall_in(full_of_one, others_in_a_full_cache::<1>, fits::<1>, key, &victim),
    ];
    steps.into_iter().min().expect("there are three")
}

macro_rules! stalls_when_full {
    ($($name:ident: at least $steps:literal, $key:expr, $victim:expr;)*) => {$(
        #[test]
        fn $name() {
            let steps = stall_when_full($key, $victim);
            assert!(steps >= $steps, "only {steps} steps to be suspended at");
        }
    )*};
}

stalls_when_full! {
    insert_into_a_full_cache: at least 15, ABSENT, |c, k| c.insert(k, 1);
    inserts_into_a_full_cache: at least 60, ABSENT, |c, k| (k..k + 8).for_each(|k| c.insert(k, 1));
    insert_over_a_value_of_a_full_cache: at least 3, PRESENT, |c, k| c.insert(k, 1);
    remove_from_a_full_cache: at least 4, PRESENT, |c, k| _ = c.remove(&k);
    invalidate_all_of_a_full_cache: at least 4, PRESENT, |c, _| c.invalidate_all();
    a_load_into_a_full_cache: at least 20, ABSENT, |c, k| _ = c.get_with(&k, || 1);
    a_load_that_replaces_in_a_full_cache: at least 6, PRESENT,
        |c, k| _ = c.ask(&k).max_age(Duration::ZERO).load_with(|| 1);
    a_load_that_fails_in_a_full_cache: at least 6, ABSENT,
        |c, k| drop(c.try_get_with(&k, || Err::<u64, _>("no")));
    a_smaller_capacity: at least 10, ABSENT, |c, k| {
        c.set_capacity(8);
        (k..k + 3).for_each(|k| c.insert(k, 1));
        c.set_capacity(1);
    };
    no_capacity_for_a_while: at least 4, PRESENT, |c, _| {
        c.set_capacity(0);
        c.set_capacity(FULL);
    };
    no_limit_for_a_while: at least 4, PRESENT, |c, k| {
        c.set_capacity(u64::MAX);
        (k..k + 3).for_each(|k| c.insert(k, 1));
        c.set_capacity(FULL);
    };
    // Used slots of either queue: they are promoted, and go round.
    promote_and_keep: at least 60, ABSENT, |c, k| {
        for k in k..k + 6 {
            c.insert(k, 1);
            (k..k + 2).for_each(|k| _ = c.get(&k));
            (0..6).for_each(|k| _ = c.get(&k));
        }
        (0..6).for_each(|k| c.insert(k, 1));
    };
}

#[test]
fn a_suspended_settler_delays_its_waiters_up_to_the_lease() {
    let mut suspensions = 0;
    for nth in 0..12 {
        let cache = fixture();
        let (stall, arm) = armed::arm(nth);
        std::thread::scope(|s| {
            let cache = &cache;
            let leader = s.spawn(move || {
                arm();
                let value = cache.get_with(&ABSENT, || 1);
                armed::disarm();
                value
            });
            suspensions += usize::from(stall.reached.recv().is_ok());
            let waiters: Vec<_> = (0..4).map(|_| s.spawn(|| cache.get_with(&ABSENT, || 2))).collect();
            for waiter in waiters {
                assert!([1, 2].contains(&waiter.join().unwrap()));
            }
            drop(stall.release);
            assert!([1, 2].contains(&leader.join().unwrap()));
        });
    }
    assert!(suspensions >= 6, "a load has steps to be suspended at, {suspensions} were seen");
}
