//! The table alone, against a `HashMap`, a constant hash, and threads that are suspended half-way.

#![allow(clippy::disallowed_methods, reason = "tests wait for real threads")]

use super::*;
use crate::primitive::epoch::pin;
use crate::primitive::plain::AtomicUsize as Count;
use crate::primitive::step::armed;
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;

/// An element that counts its shares and the living of its kind.
struct Item {
    shares: Count,
    hash: u64,
    key: u64,
    alive: Arc<Count>,
}

impl Item {
    fn new(hash: u64, key: u64, alive: &Arc<Count>) -> NonNull<Self> {
        alive.fetch_add(1, Ordering::Relaxed);
        let item = Self { shares: Count::new(1), hash, key, alive: alive.clone() };
        NonNull::from(Box::leak(Box::new(item)))
    }
}

impl Drop for Item {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Linked for Item {
    fn hash(&self) -> u64 {
        self.hash
    }

    unsafe fn release(this: NonNull<Self>) {
        // SAFETY: the caller owns a share.
        let left = unsafe { this.as_ref() }.shares.fetch_sub(1, Ordering::AcqRel) - 1;
        if left == 0 {
            // SAFETY: that was the last share.
            drop(unsafe { Box::from_raw(this.as_ptr()) });
        }
    }
}

struct Fixture {
    table: Table<Item>,
    alive: Arc<Count>,
    hash: fn(u64) -> u64,
}

fn spread(key: u64) -> u64 {
    key.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Seven hashes of one bucket and one fingerprint.
fn alike(key: u64) -> u64 {
    (key % 7 * 0x101) << 32
}

impl Fixture {
    fn new(hash: fn(u64) -> u64) -> Self {
        Self { table: Table::with_capacity(0), alive: Arc::default(), hash }
    }

    fn insert(&self, key: u64) -> bool {
        let guard = pin();
        let new = Item::new((self.hash)(key), key, &self.alive);
        let linked = self.table.link(new, (self.hash)(key), |i| i.key == key, &guard).is_ok();
        if !linked {
            // SAFETY: the share stayed ours.
            unsafe { Item::release(new) };
        }
        linked
    }

    fn contains(&self, key: u64) -> bool {
        self.table.find((self.hash)(key), |i| i.key == key, &pin()).is_some()
    }

    fn remove(&self, key: u64) -> bool {
        let guard = pin();
        match self.table.find((self.hash)(key), |i| i.key == key, &guard) {
            Some(item) => self.table.unlink(item, &guard),
            None => false,
        }
    }

    fn keys(&self) -> Vec<u64> {
        let (mut keys, mut at) = (Vec::new(), Some(0));
        while let Some(prefix) = at {
            at = self.table.visit(prefix, |i| keys.push(i.key), &pin());
        }
        keys.sort_unstable();
        keys
    }

    /// Drops the table and waits until the collector has freed everything.
    fn finish(self) {
        let Self { table, alive, .. } = self;
        drop(table);
        // Another test's suspended thread may hold a pin for a while.
        for _ in 0..60_000 {
            if alive.load(Ordering::Relaxed) == 0 {
                return;
            }
            crate::primitive::epoch::flush();
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        panic!("{} elements were never freed", alive.load(Ordering::Relaxed));
    }
}

#[derive(Clone, Debug)]
enum Op {
    Insert(u64),
    Remove(u64),
    Find(u64),
    Walk,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let key = || 0..60_u64;
    prop::collection::vec(
        prop_oneof![
            4 => key().prop_map(Op::Insert),
            2 => key().prop_map(Op::Remove),
            2 => key().prop_map(Op::Find),
            1 => Just(Op::Walk),
        ],
        0..300,
    )
}

fn check(ops: Vec<Op>, hash: fn(u64) -> u64) {
    let fixture = Fixture::new(hash);
    let mut model = HashMap::new();
    for op in ops {
        match op {
            Op::Insert(k) => assert_eq!(fixture.insert(k), model.insert(k, ()).is_none()),
            Op::Remove(k) => assert_eq!(fixture.remove(k), model.remove(&k).is_some()),
            Op::Find(k) => assert_eq!(fixture.contains(k), model.contains_key(&k)),
            Op::Walk => {
                let mut keys: Vec<_> = model.keys().copied().collect();
                keys.sort_unstable();
                assert_eq!(fixture.keys(), keys);
            }
        }
        assert_eq!(fixture.table.linked.0.load(Ordering::Relaxed), model.len());
    }
    fixture.finish();
}

proptest! {
    #[test]
    fn behaves_like_a_hash_map(ops in ops()) {
        check(ops, spread);
    }

    #[test]
    fn behaves_like_a_hash_map_when_all_hashes_collide(ops in ops()) {
        check(ops, |_| u64::MAX);
    }

    #[test]
    fn behaves_like_a_hash_map_when_hashes_share_their_top_bits(ops in ops()) {
        check(ops, |key| key % 3);
    }

    #[test]
    fn behaves_like_a_hash_map_when_only_fingerprints_tell(ops in ops()) {
        check(ops, |key| (key % 7) << 32);
    }

    #[test]
    fn behaves_like_a_hash_map_when_fingerprints_collide(ops in ops()) {
        check(ops, alike);
    }
}

#[test]
fn grows_and_keeps_everything() {
    let fixture = Fixture::new(spread);
    for k in 0..10_000 {
        assert!(fixture.insert(k));
    }
    assert_eq!(fixture.keys(), (0..10_000).collect::<Vec<_>>());
    for k in 0..10_000 {
        assert!(fixture.contains(k) && !fixture.contains(k + 10_000));
    }
    fixture.finish();
}

#[test]
fn an_element_is_compared_only_if_the_whole_hash_is_the_same() {
    let fixture = Fixture::new(alike);
    for k in 0..70 {
        assert!(fixture.insert(k));
    }
    for k in 0..70 {
        assert_eq!(fingerprint(alike(k)), fingerprint(0));
        let mut compared = Vec::new();
        assert!(fixture.table.find(alike(k), |i| (compared.push(i.key), false).1, &pin()).is_none());
        assert_eq!(compared.len(), 10);
        assert!(compared.iter().all(|there| there % 7 == k % 7));
    }
    fixture.finish();
}

#[test]
fn room_is_for_one_element_to_a_bucket() {
    for (capacity, buckets) in [(0, 2), (2, 2), (3, 4), (1000, 1024), (1024, 1024), (1025, 2048)] {
        let fixture = Fixture { table: Table::with_capacity(capacity), ..Fixture::new(spread) };
        let root = || fixture.table.root(&pin()).len();
        assert_eq!(root(), buckets);
        (0..buckets as u64).for_each(|k| assert!(fixture.insert(k)));
        assert!(fixture.table.root(&pin()).try_next(&pin()).is_none(), "it grew though there was room");
        assert!(fixture.insert(buckets as u64));
        assert!(fixture.table.root(&pin()).try_next(&pin()).is_some(), "it did not grow when it was full");
        fixture.finish();
    }
}

#[test]
fn steady_churn_never_rebuilds() {
    let fixture = Fixture::new(spread);
    for k in 0..1000 {
        fixture.insert(k);
    }
    // Let the growth that is under way come to its end.
    for k in 1000..20_000 {
        fixture.insert(k);
        fixture.remove(k);
    }
    let root = fixture.table.root(&pin()).as_ptr();
    for k in 20_000..60_000 {
        fixture.insert(k);
        fixture.remove(k);
    }
    assert_eq!(fixture.table.root(&pin()).as_ptr(), root);
    assert!(fixture.table.root(&pin()).try_next(&pin()).is_none());
    fixture.finish();
}

#[test]
fn concurrent_growth_with_removal() {
    let fixture = Fixture::new(spread);
    const THREADS: u64 = 4;
    const EACH: u64 = 5_000;
    std::thread::scope(|s| {
        for t in 0..THREADS {
            let fixture = &fixture;
            s.spawn(move || {
                for i in 0..EACH {
                    let k = t * EACH + i;
                    assert!(fixture.insert(k));
                    assert!(fixture.contains(k));
                    if i % 3 == 0 {
                        assert!(fixture.remove(k));
                        assert!(!fixture.contains(k), "a removed element came back");
                    }
                }
            });
        }
    });
    let expected: Vec<u64> = (0..THREADS * EACH).filter(|k| !(k % EACH).is_multiple_of(3)).collect();
    assert_eq!(fixture.keys(), expected);
    fixture.finish();
}

#[test]
fn one_of_many_inserters_of_a_key_wins() {
    for round in 0..200 {
        let fixture = Fixture::new(spread);
        let winners = Count::new(0);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for k in 0..8 {
                        winners.fetch_add(usize::from(fixture.insert(k)), Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(winners.into_inner(), 8, "round {round}");
        fixture.finish();
    }
}

#[test]
fn a_walk_meets_what_was_there_throughout() {
    let fixture = Fixture::new(spread);
    for k in 0..200 {
        fixture.insert(k);
    }
    std::thread::scope(|s| {
        let writer = s.spawn(|| {
            for k in 1000..6000 {
                fixture.insert(k);
                if k % 2 == 0 {
                    fixture.remove(k);
                }
            }
        });
        while !writer.is_finished() {
            let keys = fixture.keys();
            let kept = keys.iter().filter(|k| **k < 200).count();
            assert_eq!(kept, 200);
            let mut unique = keys.clone();
            unique.dedup();
            assert_eq!(unique, keys, "an element was met twice");
        }
    });
    fixture.finish();
}

/// Suspends a thread at its n-th step in `victim`, for all n, and requires that `others` come to their end.
fn stall(victim: impl Fn(&Fixture) + Sync, others: impl Fn(&Fixture)) -> usize {
    for nth in 0.. {
        let fixture = Fixture::new(spread);
        for k in 0..6 {
            fixture.insert(k);
        }
        let (stall, arm) = armed::arm(nth);
        let ended = std::thread::scope(|s| {
            let (fixture, victim) = (&fixture, &victim);
            let suspended = s.spawn(move || {
                arm();
                victim(fixture);
                armed::disarm()
            });
            if stall.reached.recv().is_ok() {
                others(fixture);
                drop(stall.release);
            }
            suspended.join().unwrap()
        });
        fixture.finish();
        if ended {
            return nth;
        }
    }
    unreachable!("the victim's steps are finite")
}

#[test]
fn a_suspended_writer_stops_nobody() {
    let others = |f: &Fixture| {
        for k in 100..400 {
            assert!(f.insert(k));
            assert!(f.contains(k));
        }
        for k in 100..400 {
            assert!(f.remove(k));
        }
        // All of that needs several growths, with the suspended thread's claim among the buckets.
        assert!(f.table.root(&pin()).len() >= 256);
    };
    let steps = stall(
        |f| {
            for k in 50..60 {
                f.insert(k);
            }
        },
        others,
    );
    assert!(steps > 20, "insert and growth have steps to be suspended at, {steps} were seen");
    let steps = stall(
        |f| {
            for k in 0..6 {
                f.remove(k);
            }
        },
        others,
    );
    assert!(steps >= 12, "remove has steps to be suspended at, {steps} were seen");
}
