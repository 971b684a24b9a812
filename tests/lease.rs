//! How long a leader may take, who leads then, and what becomes of a late result: `cargo test --test lease`.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::{
    Builder, Gate, Queue, Sut, Tally, With, eventually, ms, over_shapes, plain, quietly, secs, until_waiting,
};
use quell::{LoadErrorKind, Loaded, ManualClock, Op, Outcome};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

type Error = std::io::Error;

/// A leader hangs in `late`, its lease ends, and `next` leads; then the leader's end comes. Returns what the leader got.
fn overrun<R: Send>(
    builder: Builder<u32, u32>,
    late: impl FnOnce(&Sut<u32, u32>, &Gate) -> R + Send,
    after: impl FnOnce(&Sut<u32, u32>),
) -> R {
    let clock = ManualClock::new();
    let cache = builder.lease(secs(1)).clock(clock.clone()).build();
    let gate = Gate::default();
    let result = thread::scope(|s| {
        let leader = s.spawn(|| late(&cache, &gate));
        eventually(|| gate.arrived() == 1);
        clock.advance(secs(1));
        // A newcomer takes over without waiting.
        assert_eq!(cache.get_with(&1, || 2), 2);
        assert_eq!(cache.stats().joins, 0);
        gate.open();
        leader.join().unwrap()
    });
    after(&cache);
    assert_eq!((cache.stats().takeovers, cache.stats().in_flight), (1, 0));
    result
}

fn two_stays(cache: &Sut<u32, u32>) {
    assert_eq!(cache.get(&1), Some(2));
}

#[test]
fn a_late_value_is_its_own_callers() {
    over_shapes(|builder| {
        let got = overrun(
            builder,
            |c, gate| {
                c.get_with(&1, || {
                    gate.pass();
                    1
                })
            },
            |c| {
                two_stays(c);
                assert_eq!(c.stats().fenced, 1);
            },
        );
        assert_eq!(got, 1);
    });
}

#[test]
fn a_late_error_removes_nothing() {
    over_shapes(|builder| {
        let late = |c: &Sut<u32, u32>, gate: &Gate| {
            c.try_get_with(&1, || {
                gate.pass();
                Err::<u32, _>(Error::other("late"))
            })
        };
        // The ladder finds the newer value, which is better than an error.
        match overrun(builder, late, two_stays) {
            Ok(value) => assert_eq!(value, 2),
            Err(error) => assert_eq!(error.kind(), LoadErrorKind::Failed),
        }
    });
}

#[test]
fn a_late_absence_removes_nothing() {
    over_shapes(|builder| {
        let late = |c: &Sut<u32, u32>, gate: &Gate| {
            c.optionally_get_with(&1, || {
                gate.pass();
                None
            })
        };
        assert_eq!(overrun(builder, late, two_stays), None);
    });
}

#[test]
fn a_late_panic_removes_nothing() {
    over_shapes(|builder| {
        let late = |c: &Sut<u32, u32>, gate: &Gate| {
            quietly(|| {
                c.get_with(&1, || {
                    gate.pass();
                    panic!("late")
                })
            })
            .is_err()
        };
        assert!(overrun(builder, late, two_stays));
    });
}

#[test]
fn a_late_compute_is_superseded() {
    for op in [Op::Put(9), Op::Remove, Op::Keep] {
        over_shapes(|builder| {
            let late = move |c: &Sut<u32, u32>, gate: &Gate| {
                c.compute(&1, |_| {
                    gate.pass();
                    op
                })
            };
            assert_eq!(overrun(builder, late, two_stays), Outcome::Superseded);
        });
    }
}

#[test]
fn a_late_value_does_not_come_back_after_an_invalidation() {
    over_shapes(|builder| {
        let after = |c: &Sut<u32, u32>| {
            c.invalidate(&1);
            assert_eq!(c.get(&1), None);
        };
        overrun(
            builder,
            |c, gate| {
                let got = c.get_with(&1, || {
                    gate.pass();
                    1
                });
                c.invalidate(&1);
                got
            },
            after,
        );
    });
}

#[test]
fn a_newcomer_joins_while_the_lease_lasts() {
    let (clock, gate) = (ManualClock::new(), Gate::default());
    let cache = plain::<u32, u32>().lease(secs(1)).clock(clock.clone()).build();
    thread::scope(|s| {
        let leader = s.spawn(|| {
            cache.get_with(&1, || {
                gate.pass();
                1
            })
        });
        eventually(|| gate.arrived() == 1);
        clock.advance(secs(1) - Duration::from_nanos(1));
        let newcomer = s.spawn(|| cache.get_with(&1, || unreachable!()));
        until_waiting(&cache, 1);
        assert_eq!(cache.in_flight()[0].age, secs(1) - Duration::from_nanos(1));
        gate.open();
        assert_eq!((leader.join().unwrap(), newcomer.join().unwrap()), (1, 1));
    });
    assert_eq!(cache.stats().takeovers, 0);
}

#[test]
fn the_new_leader_has_a_lease_of_its_own() {
    let (clock, gate) = (ManualClock::new(), Gate::default());
    let cache = plain::<u32, usize>().lease(secs(1)).clock(clock.clone()).build();
    let loads = Tally::default();
    let load = || {
        let n = loads.add();
        gate.pass();
        n
    };
    thread::scope(|s| {
        let mut leaders = vec![s.spawn(|| cache.get_with(&1, load))];
        eventually(|| loads.get() == 1);
        clock.advance(secs(3));
        leaders.push(s.spawn(|| cache.get_with(&1, load)));
        eventually(|| loads.get() == 2);
        clock.advance(ms(999));
        let follower = s.spawn(|| cache.get_with(&1, load));
        eventually(|| cache.in_flight().iter().any(|f| f.waiters == 1));
        gate.open();
        assert_eq!(follower.join().unwrap(), 1);
        assert_eq!(leaders.into_iter().map(|l| l.join().unwrap()).collect::<Vec<_>>(), [0, 1]);
    });
    assert_eq!((loads.get(), cache.get(&1)), (2, Some(1)));
}

#[test]
fn fallible_waiters_take_over_too() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (clock, gate) = (ManualClock::new(), Gate::default());
        let cache = builder.lease(secs(1)).clock(clock.clone()).loader_fn(|_| Ok::<_, Error>(2)).build();
        thread::scope(|s| {
            let hung = s.spawn(|| {
                cache.get_with(&1, || {
                    gate.pass();
                    1
                })
            });
            eventually(|| gate.arrived() == 1);
            let waiter = s.spawn(|| cache.get_or_load(&1));
            until_waiting(&cache, 1);
            clock.advance(secs(1));
            assert_eq!(waiter.join().unwrap().unwrap(), 2);
            gate.open();
            hung.join().unwrap();
        });
        assert_eq!(cache.get(&1), Some(2));
    });
}

#[test]
fn a_short_wait_ends_before_the_lease_and_loads_nothing() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (clock, gate) = (ManualClock::new(), Gate::default());
        let cache = builder.lease(secs(9)).clock(clock.clone()).build();
        thread::scope(|s| {
            let leader = s.spawn(|| {
                cache.get_with(&1, || {
                    gate.pass();
                    1
                })
            });
            eventually(|| gate.arrived() == 1);
            let waiter =
                s.spawn(|| cache.ask(&1).wait_timeout(secs(2)).load_with(|| unreachable!("never a load")));
            until_waiting(&cache, 1);
            clock.advance(secs(2));
            assert_eq!(waiter.join().unwrap().unwrap_err().kind(), LoadErrorKind::TimedOut);
            gate.open();
            leader.join().unwrap();
        });
        assert_eq!((cache.stats().loads, cache.get(&1)), (1, Some(1)));
    });
}

#[test]
fn a_wait_that_ended_first_loads_nothing_though_the_clock_jumps() {
    // One move of the clock passes the waiter's deadline and then the lease's end.
    over_shapes(|builder: Builder<u32, u32>| {
        let (clock, gate) = (ManualClock::new(), Gate::default());
        let cache = builder.lease(secs(5)).clock(clock.clone()).build();
        thread::scope(|s| {
            let hung = s.spawn(|| {
                cache.get_with(&1, || {
                    gate.pass();
                    1
                })
            });
            eventually(|| gate.arrived() == 1);
            let waiter = s.spawn(|| cache.ask(&1).wait_timeout(secs(2)).load_with(|| 2));
            eventually(|| cache.stats().joins == 1);
            clock.advance(secs(9));
            let waited = waiter.join().unwrap().map(|answer| answer.value).map_err(|error| error.kind());
            gate.open();
            hung.join().unwrap();
            assert_eq!(waited, Err(LoadErrorKind::TimedOut));
        });
    });
}

#[test]
fn the_real_clock_ends_a_lease() {
    let gate = Gate::default();
    let cache = plain::<u32, u32>().lease(ms(40)).build();
    thread::scope(|s| {
        let begun = Instant::now();
        let hung = s.spawn(|| {
            cache.get_with(&1, || {
                gate.pass();
                1
            })
        });
        eventually(|| gate.arrived() == 1);
        assert_eq!(cache.get_with(&1, || 2), 2);
        // The claim reads the coarse clock, which lags behind by up to a tick.
        assert!(begun.elapsed() >= ms(20), "{:?}", begun.elapsed());
        gate.open();
        hung.join().unwrap();
    });
    assert_eq!((cache.get(&1), cache.stats().takeovers), (Some(2), 1));
}

#[test]
fn a_loader_is_told_its_lease() {
    let told = Arc::new(Mutex::new(None));
    let seen = told.clone();
    let loader = With(move |_: &u32, cx: &quell::LoadContext<u32>| {
        *seen.lock().unwrap() = Some(cx.lease_left());
        Ok(Loaded::new(1))
    });
    let cache = plain().lease(secs(7)).clock(ManualClock::new()).loader(loader).build();
    cache.get_or_load(&1).unwrap();
    assert_eq!(*told.lock().unwrap(), Some(secs(7)));
}

#[test]
fn a_queued_refresh_starts_its_lease_when_it_runs() {
    let (clock, queue, gate) = (ManualClock::new(), Queue::default(), Gate::default());
    let stop = gate.clone();
    let cache = plain()
        .lease(secs(1))
        .time_to_live(secs(60))
        .clock(clock.clone())
        .executor(queue.clone())
        .loader_fn(move |_: &u32| {
            stop.pass();
            Ok::<_, Error>(1)
        })
        .build();
    assert!(cache.refresh(&1));
    clock.advance(secs(10));
    thread::scope(|s| {
        let job = queue.take().pop().unwrap();
        s.spawn(|| job.run());
        eventually(|| gate.arrived() == 1);
        clock.advance(ms(999));
        let joiner = s.spawn(|| cache.get_with(&1, || unreachable!("the lease lasts")));
        until_waiting(&cache, 1);
        gate.open();
        assert_eq!(joiner.join().unwrap(), 1);
    });
    assert_eq!(cache.stats().takeovers, 0);
}

#[test]
fn a_hung_refresh_gives_way_while_stale_is_served() {
    // Whatever hangs, holds its key no longer than its lease: also where stale hits go on, and there is no hard deadline.
    let (clock, queue, gate, loads) =
        (ManualClock::new(), Queue::default(), Gate::default(), Tally::default());
    let (stop, count) = (gate.clone(), loads.clone());
    let load = move |_: &u32| {
        let n = count.add();
        if n == 1 {
            stop.pass();
        }
        Ok::<_, Error>(n)
    };
    let cache = plain()
        .soft_ttl(secs(1))
        .lease(secs(5))
        .clock(clock.clone())
        .executor(queue.clone())
        .loader_fn(load)
        .build();
    assert_eq!(cache.get_or_load(&1).unwrap(), 0);
    clock.advance(secs(1));
    assert_eq!(cache.get_or_load(&1).unwrap(), 0);
    thread::scope(|s| {
        let job = queue.take().pop().unwrap();
        s.spawn(|| job.run());
        eventually(|| gate.arrived() == 1);
        assert_eq!((cache.get_or_load(&1).unwrap(), queue.len()), (0, 0));
        clock.advance(secs(5));
        assert_eq!(cache.get_or_load(&1).unwrap(), 0);
        let taken_over = queue.run();
        gate.open();
        assert_eq!(taken_over, 1, "a stale hit after the lease's end starts the next refresh");
    });
    eventually(|| cache.in_flight().is_empty());
    assert_eq!((cache.get(&1), cache.stats().takeovers), (Some(2), 1));
}

#[test]
fn a_hung_closure_gives_way_while_stale_is_served() {
    // As above, where the refresh is a caller's own closure.
    let (clock, gate) = (ManualClock::new(), Gate::default());
    let cache = plain::<u32, u32>().soft_ttl(secs(1)).lease(secs(5)).clock(clock.clone()).build();
    cache.insert(1, 0);
    clock.advance(secs(1));
    let second = thread::scope(|s| {
        let hung = s.spawn(|| {
            cache.get_with(&1, || {
                gate.pass();
                1
            })
        });
        eventually(|| gate.arrived() == 1);
        assert_eq!(cache.get_with(&1, || unreachable!("the lease lasts")), 0);
        clock.advance(secs(5));
        let second = cache.get_with(&1, || 2);
        gate.open();
        hung.join().unwrap();
        second
    });
    assert_eq!((second, cache.get(&1)), (2, Some(2)));
}

#[test]
fn refresh_takes_a_hung_refresh_over() {
    let (clock, queue, gate, loads) =
        (ManualClock::new(), Queue::default(), Gate::default(), Tally::default());
    let (stop, count) = (gate.clone(), loads.clone());
    let load = move |_: &u32| {
        let n = count.add();
        if n == 0 {
            stop.pass();
        }
        Ok::<_, Error>(n)
    };
    let cache = plain().lease(secs(5)).clock(clock.clone()).executor(queue.clone()).loader_fn(load).build();
    assert!(cache.refresh(&1));
    thread::scope(|s| {
        let job = queue.take().pop().unwrap();
        s.spawn(|| job.run());
        eventually(|| gate.arrived() == 1);
        assert!(cache.refresh(&1) && queue.len() == 0);
        clock.advance(secs(5));
        assert!(cache.refresh(&1));
        assert_eq!((queue.run(), cache.get(&1)), (1, Some(1)));
        gate.open();
    });
    eventually(|| cache.in_flight().is_empty());
    assert_eq!((cache.get(&1), cache.stats().fenced), (Some(1), 1));
}
