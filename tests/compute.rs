//! `compute`: read, decide and write as one step: `cargo test --test compute`.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::{
    Builder, Gate, Sut, Tally, eventually, over_shapes, panic_of, plain, scaled, secs, until_waiting,
};
use quell::{ManualClock, Op, Outcome};
use std::collections::HashMap;
use std::thread;

type Error = std::io::Error;

#[test]
fn outcomes_match_the_table() {
    over_shapes(|builder: Builder<u32, u32>| {
        let cache = builder.build();
        let seen = |op, there: Option<u32>| {
            cache.compute(&1, |v| {
                assert_eq!(v.copied(), there);
                op
            })
        };
        assert_eq!(seen(Op::Keep, None), Outcome::Absent);
        assert_eq!(seen(Op::Remove, None), Outcome::Absent);
        assert_eq!((cache.len(), cache.get(&1)), (0, None));
        assert_eq!(seen(Op::Put(1), None), Outcome::Inserted(1));
        assert_eq!(seen(Op::Put(2), Some(1)), Outcome::Replaced(2));
        assert_eq!(seen(Op::Keep, Some(2)), Outcome::Kept(2));
        assert_eq!((cache.len(), cache.get(&1)), (1, Some(2)));
        assert_eq!(seen(Op::Remove, Some(2)), Outcome::Removed(2));
        assert_eq!((cache.len(), cache.get(&1), cache.in_flight().len()), (0, None, 0));
    });
}

#[test]
fn the_closure_runs_once() {
    over_shapes(|builder: Builder<u32, u64>| {
        let (cache, calls) = (builder.build(), Tally::default());
        let (threads, each) = (4, scaled(500, 50_000));
        thread::scope(|s| {
            for _ in 0..threads {
                s.spawn(|| {
                    for key in 0..each as u32 {
                        cache.compute(&(key % 3), |n| {
                            calls.add();
                            Op::Put(n.map_or(1, |n| n + 1))
                        });
                    }
                });
            }
        });
        assert_eq!(
            (calls.get(), cache.iter().map(|(_, n)| n).sum::<u64>() as usize),
            (threads * each, threads * each)
        );
    });
}

/// What comes in between while a compute decides.
fn interfered(
    builder: Builder<u32, u32>,
    op: Op<u32>,
    write: fn(&Sut<u32, u32>),
) -> (Outcome<u32>, Option<u32>) {
    let (cache, gate) = (builder.build(), Gate::default());
    cache.insert(1, 1);
    let outcome = thread::scope(|s| {
        let compute = s.spawn(|| {
            cache.compute(&1, |v| {
                assert_eq!(v, Some(&1));
                gate.pass();
                op
            })
        });
        eventually(|| gate.arrived() == 1);
        write(&cache);
        gate.open();
        compute.join().unwrap()
    });
    assert!(cache.in_flight().is_empty());
    (outcome, cache.get(&1))
}

#[test]
fn a_write_in_between_supersedes_it() {
    type Write = fn(&Sut<u32, u32>);
    let writes: [(&str, Option<u32>, Write); 6] = [
        ("insert", Some(50), |c| c.insert(1, 50)),
        ("remove", None, |c| assert_eq!(c.remove(&1), Some(1))),
        ("invalidate", None, |c| c.invalidate(&1)),
        ("invalidate_all", None, |c| c.invalidate_all()),
        ("retain", Some(1), |c| c.retain(|_, _| true)),
        ("expire", Some(1), |c| assert!(c.expire(&1))),
    ];
    for (name, left, write) in writes {
        for op in [Op::Put(9), Op::Remove, Op::Keep] {
            over_shapes(|builder| {
                assert_eq!(
                    interfered(builder, op, write),
                    (Outcome::Superseded, left),
                    "{name} during {op:?}"
                );
            });
        }
    }
}

#[test]
fn readers_are_served_meanwhile() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (cache, gate) = (builder.build(), Gate::default());
        cache.insert(1, 1);
        thread::scope(|s| {
            let compute = s.spawn(|| {
                cache.compute(&1, |_| {
                    gate.pass();
                    Op::Put(2)
                })
            });
            eventually(|| gate.arrived() == 1);
            assert_eq!((cache.get(&1), cache.peek(&1), cache.len()), (Some(1), Some(1), 1));
            assert_eq!(cache.get_with(&1, || unreachable!("a plain hit")), 1);
            gate.open();
            assert_eq!(compute.join().unwrap(), Outcome::Replaced(2));
        });
        assert_eq!(cache.stats().hits, 2);
    });
}

#[test]
fn those_who_wait_get_what_was_put_or_look_again() {
    for (op, loads) in [(Op::Put(7), 0), (Op::Keep, 1), (Op::Remove, 1)] {
        over_shapes(|builder: Builder<u32, u32>| {
            let (cache, gate, count) = (builder.build(), Gate::default(), Tally::default());
            thread::scope(|s| {
                let compute = s.spawn(|| {
                    cache.compute(&1, |_| {
                        gate.pass();
                        op
                    })
                });
                eventually(|| gate.arrived() == 1);
                let callers = [(); 4].map(|()| {
                    s.spawn(|| {
                        cache.get_with(&1, || {
                            count.add();
                            7
                        })
                    })
                });
                until_waiting(&cache, 4);
                gate.open();
                compute.join().unwrap();
                assert_eq!(callers.map(|c| c.join().unwrap()), [7; 4]);
            });
            assert_eq!(count.get(), loads, "{op:?}");
        });
    }
}

#[test]
fn it_waits_for_a_load_and_sees_its_value() {
    for fails in [false, true] {
        over_shapes(|builder: Builder<u32, u32>| {
            let key = u32::from(fails);
            let (cache, gate) = (builder.build(), Gate::default());
            thread::scope(|s| {
                let load = s.spawn(|| {
                    cache.try_get_with(&key, || {
                        gate.pass();
                        if fails { Err(Error::other("boom")) } else { Ok(5) }
                    })
                });
                eventually(|| gate.arrived() == 1);
                let compute = s.spawn(|| cache.compute(&key, |v| Op::Put(v.map_or(100, |v| v + 1))));
                until_waiting(&cache, 1);
                gate.open();
                match load.join().unwrap() {
                    // Instead of its error the failed load may find what `compute` has put since.
                    Ok(value) => assert_eq!(value, if fails { 100 } else { 5 }),
                    Err(_) => assert!(fails),
                }
                let expected = if fails { Outcome::Inserted(100) } else { Outcome::Replaced(6) };
                assert_eq!(compute.join().unwrap(), expected);
            });
        });
    }
}

#[test]
fn nested_in_itself_it_panics_and_leaves_the_entry() {
    let cache = plain::<u32, u32>().name("sums").build();
    cache.insert(1, 1);
    let text = panic_of(|| {
        cache.compute(&1, |_| {
            cache.compute(&1, |_| Op::Keep);
            Op::Put(2)
        })
    });
    assert!(text.contains("sums -> sums"), "{text}");
    assert_eq!((cache.get(&1), cache.in_flight().len()), (Some(1), 0));
    // Of another key it is no cycle, and reads of the own key are plain hits.
    let outcome = cache.compute(&1, |v| {
        cache.compute(&2, |_| Op::Put(5));
        Op::Put(v.unwrap() + cache.get(&1).unwrap() + cache.get_with(&2, || unreachable!()))
    });
    assert_eq!(outcome, Outcome::Replaced(7));
}

#[test]
fn a_put_with_no_time_to_live_is_done_and_serves_nobody() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>().time_to_live(secs(0)).clock(clock).build();
    assert_eq!(cache.compute(&1, |_| Op::Put(1)), Outcome::Inserted(1));
    assert_eq!((cache.get(&1), cache.len()), (None, 0));
}

#[test]
fn sums_survive_loads_and_reads() {
    over_shapes(|builder: Builder<u32, u64>| {
        let cache = builder.build();
        let each = scaled(1_000, 100_000) as u64;
        thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    (0..each).for_each(|n| {
                        let outcome =
                            cache.compute(&((n % 2) as u32), |v| Op::Put(v.copied().unwrap_or(0) + 1));
                        assert!(
                            matches!(outcome, Outcome::Inserted(_) | Outcome::Replaced(_)),
                            "{outcome:?}"
                        );
                    });
                });
            }
            s.spawn(|| (0..each).for_each(|_| _ = cache.get_with(&0, || 0)));
            s.spawn(|| {
                (0..each).for_each(|_| _ = cache.try_get_with(&1, || Err::<u64, _>(Error::other("boom"))))
            });
        });
        assert_eq!(cache.iter().collect::<HashMap<_, _>>(), HashMap::from([(0, each), (1, each)]));
    });
}

#[test]
fn a_key_that_was_never_absent_is_never_told_to_be() {
    let cache = plain::<u32, u32>().build();
    cache.insert(1, 0);
    let rounds = scaled(20_000, 1_000_000);
    thread::scope(|s| {
        s.spawn(|| (0..rounds).for_each(|i| cache.insert(1, i as u32)));
        for _ in 0..rounds {
            cache.compute(&1, |value| {
                assert!(value.is_some(), "there was always a value");
                Op::Keep
            });
        }
    });
}
