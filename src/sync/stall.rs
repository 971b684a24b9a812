//! Progress: a thread is suspended at each step of each operation in turn, and all others must come to their end.
//!
//! `cargo test --lib stall`. A call that needs a flight whose leader is suspended waits for it by its contract, up to
//! the lease; nothing else may wait at all.

use super::{Cache, Op};
use crate::primitive::step::armed;
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
    cache.compute(&key, |_| Op::Put(7));
    assert_eq!(cache.get(&key), Some(7));
    let _ = cache.stats();
    let _ = cache.in_flight();
}

/// Suspends `victim` at its n-th step for all n; returns how many steps it has.
fn stall(key: u64, victim: impl Fn(&Fixture, u64) + Sync) -> usize {
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
