//! Long lives of caches that are full, for the audit at their end: `cargo test --test audit`.
//!
//! A debug build of the cache looks when it is dropped whether its sums, its marks and its queues agree with what is there,
//! and panics if not. Here are lives that make it hard for them to agree.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::{Hashing, plain, secs};
use quell::{Cache, Op, RemovalCause};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

fn random(state: &mut u64, below: u64) -> u64 {
    *state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
    (*state >> 33) % below
}

/// One hash for eight keys: their slots are told apart by their tickets alone, of which some are alike in so long a life.
#[derive(Default)]
struct Coarse(u64);

impl Hasher for Coarse {
    fn finish(&self) -> u64 {
        self.0 >> 3
    }
    fn write(&mut self, _: &[u8]) {}
    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

#[test]
fn namesakes() {
    let cache: Cache<u64, u64, _> = Cache::builder()
        .hasher(BuildHasherDefault::<Coarse>::default())
        .shards(1)
        .max_capacity(20_000)
        .build();
    let mut state = 1;
    for nth in 0..60_000_u64 {
        cache.insert(nth % 40_000, nth);
        let key = random(&mut state, 40_000);
        (0..2).for_each(|_| _ = cache.get(&key));
    }
    cache.set_capacity(100);
    assert!(cache.iter().count() <= 100, "what has no element cannot be dropped");
}

/// Everything at once, with limits that come and go.
#[test]
fn a_busy_life() {
    for round in 0..8_u64 {
        let told = Arc::new(AtomicU64::new(0));
        let count = told.clone();
        let cache: Cache<u64, u64, Hashing> = plain()
            .shards(if round % 2 == 0 { 1 } else { 4 })
            .max_capacity(if round % 4 == 3 { u64::MAX } else { 40 })
            .weigher(|_, value| (value % 4) as u32)
            .soft_ttl(Duration::from_millis(1))
            .time_to_live(secs(10))
            .eviction_listener(move |_, _, _: RemovalCause| _ = count.fetch_add(1, Ordering::Relaxed))
            .build();
        std::thread::scope(|s| {
            for thread in 0..4_u64 {
                let cache = &cache;
                s.spawn(move || {
                    let mut state = round * 4 + thread;
                    for _ in 0..3000 {
                        let key = random(&mut state, 60);
                        match random(&mut state, 64) {
                            0..20 => _ = cache.get(&key),
                            20..34 => cache.insert(key, random(&mut state, 100)),
                            34..46 => drop(cache.get_with(&key, || key)),
                            46..50 => drop(cache.remove(&key)),
                            50..53 => drop(cache.expire(&key)),
                            53..56 => drop(cache.compute(&key, |old| match old {
                                Some(old) if old % 2 == 0 => Op::Put(old + 1),
                                Some(_) => Op::Remove,
                                None => Op::Keep,
                            })),
                            56..60 => drop(cache.try_get_with(&key, || Err::<u64, _>("no"))),
                            60 => cache.set_capacity(u64::MAX),
                            61 => cache.set_capacity(random(&mut state, 60)),
                            62 => cache.retain(|key, _| key % 7 != 0),
                            _ => cache.set_capacity(40),
                        }
                    }
                });
            }
        });
        cache.set_capacity(20);
        assert!(cache.weighted_size() <= 20, "{} in the cache", cache.weighted_size());
        assert!(told.load(Ordering::Relaxed) > 0);
    }
}
