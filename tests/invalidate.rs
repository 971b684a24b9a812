//! What a write does to values, to loads under way, and to those who come after it: `cargo test --test invalidate`.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::{Builder, Gate, Sut, eventually, over_shapes, scaled, until_waiting};
use quell::{LoadErrorKind, Op, Outcome};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

type Error = std::io::Error;

#[test]
fn a_removed_value_is_gone_by_every_way() {
    type Remove = fn(&Sut<u32, u32>);
    let ways: [(&str, Remove); 5] = [
        ("remove", |c| assert_eq!(c.remove(&1), Some(10))),
        ("invalidate", |c| c.invalidate(&1)),
        ("invalidate_all", |c| c.invalidate_all()),
        ("retain", |c| c.retain(|k, _| *k != 1)),
        ("compute", |c| assert_eq!(c.compute(&1, |_| Op::Remove), Outcome::Removed(10))),
    ];
    for (name, remove) in ways {
        over_shapes(|builder| {
            let cache = builder.build();
            for again in 0..3 {
                (0..20).for_each(|key| cache.insert(key, key * 10));
                remove(&cache);
                assert_eq!(
                    (cache.get(&1), cache.peek(&1), cache.contains_key(&1)),
                    (None, None, false),
                    "{name}"
                );
                assert!(cache.iter().all(|(key, _)| key != 1), "{name}");
                let left = if name == "invalidate_all" { 0 } else { 19 };
                assert_eq!((cache.len(), cache.iter().count()), (left, left), "{name} {again}");
                assert_eq!((cache.remove(&1), cache.get_with(&1, || 7)), (None, 7), "{name}");
            }
        });
    }
}

#[test]
fn writes_to_absent_keys_do_nothing() {
    over_shapes(|builder: Builder<u32, u32>| {
        let cache = builder.build();
        cache.invalidate(&1);
        cache.invalidate_all();
        cache.retain(|_, _| false);
        assert_eq!((cache.remove(&1), cache.expire(&1), cache.len()), (None, false, 0));
    });
}

#[test]
fn retain_asks_about_each_entry_once() {
    over_shapes(|builder: Builder<u32, u32>| {
        let cache = builder.build();
        (0..500).for_each(|key| cache.insert(key, key * 2));
        let mut asked = Vec::new();
        cache.retain(|key, value| {
            assert_eq!(*value, key * 2);
            asked.push(*key);
            key % 3 == 0
        });
        asked.sort_unstable();
        assert_eq!(asked, (0..500).collect::<Vec<_>>());
        assert_eq!((cache.len(), cache.iter().filter(|(k, _)| k % 3 == 0).count()), (167, 167));
    });
}

#[test]
fn who_comes_after_an_invalidation_does_not_join() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (cache, old, new) = (builder.build(), Gate::default(), Gate::default());
        thread::scope(|s| {
            let first = s.spawn(|| {
                cache.get_with(&1, || {
                    old.pass();
                    1
                })
            });
            eventually(|| old.arrived() == 1);
            cache.invalidate(&1);
            let second = s.spawn(|| {
                cache.get_with(&1, || {
                    new.pass();
                    2
                })
            });
            eventually(|| new.arrived() == 1);
            // Two loads, both to be seen.
            assert_eq!(cache.in_flight().len(), 2);
            let third = s.spawn(|| cache.get_with(&1, || unreachable!("it joins the second")));
            until_waiting(&cache, 1);
            new.open();
            assert_eq!((second.join().unwrap(), third.join().unwrap(), cache.get(&1)), (2, 2, Some(2)));
            old.open();
            assert_eq!((first.join().unwrap(), cache.get(&1)), (1, Some(2)));
        });
    });
}

#[test]
fn a_storm_of_invalidations_starves_nobody() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (cache, gate) = (builder.build(), Gate::default());
        thread::scope(|s| {
            let leader = s.spawn(|| {
                cache.get_with(&1, || {
                    gate.pass();
                    1
                })
            });
            eventually(|| gate.arrived() == 1);
            let joined = s.spawn(|| cache.get_with(&1, || unreachable!()));
            until_waiting(&cache, 1);
            (0..1_000).for_each(|_| cache.invalidate(&1));
            gate.open();
            assert_eq!((leader.join().unwrap(), joined.join().unwrap()), (1, 1));
        });
    });
}

#[test]
fn a_failure_after_a_write_is_only_for_those_who_began_before() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (cache, gate) = (builder.build(), Gate::default());
        thread::scope(|s| {
            let failing = || {
                cache.try_get_with(&1, || {
                    gate.pass();
                    Err::<u32, _>(Error::other("boom"))
                })
            };
            let leader = s.spawn(failing);
            eventually(|| gate.arrived() == 1);
            cache.invalidate(&1);
            assert_eq!(cache.get_with(&1, || 2), 2);
            gate.open();
            // The ladder may find the newer value.
            match leader.join().unwrap() {
                Ok(value) => assert_eq!(value, 2),
                Err(error) => assert_eq!(error.kind(), LoadErrorKind::Failed),
            }
        });
        assert_eq!((cache.get(&1), cache.len()), (Some(2), 1));
    });
}

#[test]
fn a_source_that_changes_before_each_invalidation() {
    // The writer changes the source, then invalidates; whoever calls after that never sees the older version.
    over_shapes(|builder: Builder<u32, u64>| {
        let (cache, source, told) = (builder.build(), AtomicU64::new(0), AtomicU64::new(0));
        let rounds = scaled(3_000, 300_000) as u64;
        thread::scope(|s| {
            s.spawn(|| {
                for version in 1..=rounds {
                    source.store(version, Ordering::SeqCst);
                    match version % 4 {
                        0 => _ = cache.remove(&1),
                        1 => cache.invalidate(&1),
                        2 => cache.invalidate_all(),
                        _ => cache.retain(|_, _| false),
                    }
                    told.store(version, Ordering::SeqCst);
                }
            });
            for _ in 0..2 {
                s.spawn(|| {
                    while told.load(Ordering::SeqCst) < rounds {
                        let least = told.load(Ordering::SeqCst);
                        let got = cache.get_with(&1, || source.load(Ordering::SeqCst));
                        assert!(got >= least, "{got} after the invalidation of what was before {least}");
                    }
                });
            }
        });
        let last = cache.get(&1).unwrap_or(rounds);
        assert_eq!(last, rounds, "a stale value stays");
    });
}

#[test]
fn an_insert_is_never_undone_by_a_load() {
    // Inserts grow; no reader ever sees the value go back.
    over_shapes(|builder: Builder<u32, u64>| {
        let (cache, done) = (builder.build(), AtomicU64::new(0));
        let rounds = scaled(3_000, 300_000) as u64;
        cache.insert(1, 0);
        thread::scope(|s| {
            s.spawn(|| {
                for n in 1..=rounds {
                    cache.insert(1, n);
                    done.store(n, Ordering::SeqCst);
                    assert!(cache.expire(&1));
                }
            });
            s.spawn(|| {
                let mut last = 0;
                while done.load(Ordering::SeqCst) < rounds {
                    let least = done.load(Ordering::SeqCst).max(last);
                    // A refresh of the stale value brings what the source has.
                    let got = cache.get_with(&1, || done.load(Ordering::SeqCst));
                    assert!(got + 1 >= least, "{got} after {least}");
                    last = cache.get(&1).unwrap_or(last).max(last);
                }
            });
        });
    });
}
