//! Refreshes in the background, on the keeper and on a given executor: `cargo test --test refresh`.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::{
    Builder, Counted, Gate, Queue, Tally, With, eventually, over_shapes, plain, quietly, secs, until_waiting,
};
use quell::{Executor, Job, LoadCause, LoadContext, Loaded, ManualClock, Op, Provenance, Rejected};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

type Error = std::io::Error;

fn boom() -> Error {
    Error::other("boom")
}

/// Counts its loads and gives their numbers.
fn numbering(loads: &Tally) -> impl Fn(&u32) -> Result<usize, Error> + Send + Sync + 'static + use<> {
    let loads = loads.clone();
    move |_| Ok(loads.add())
}

#[test]
fn on_the_keeper_once_whatever_the_number_of_reads() {
    over_shapes(|builder: Builder<u32, usize>| {
        let (clock, gate, loads) = (ManualClock::new(), Gate::default(), Tally::default());
        let (stop, count) = (gate.clone(), loads.clone());
        let load = move |_: &u32| {
            let n = count.add();
            if n > 0 {
                assert!(thread::current().name().is_some_and(|name| name.starts_with("quell")));
                stop.pass();
            }
            Ok::<_, Error>(n)
        };
        let cache = builder.soft_ttl(secs(1)).clock(clock.clone()).loader(load).build();
        cache.get_or_load(&1).unwrap();
        clock.advance(secs(1));
        thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| (0..500).for_each(|_| assert_eq!(cache.get_or_load(&1).unwrap(), 0)));
            }
        });
        eventually(|| gate.arrived() == 1);
        assert_eq!((loads.get(), cache.in_flight().len()), (2, 1));
        gate.open();
        eventually(|| cache.get(&1) == Some(1));
        assert_eq!((loads.get(), cache.stats().takeovers), (2, 0));
    });
}

#[test]
fn many_keys_are_all_refreshed() {
    let (clock, loads) = (ManualClock::new(), Tally::default());
    let cache = plain().soft_ttl(secs(1)).clock(clock.clone()).loader(numbering(&loads)).build();
    (0..200).for_each(|key| cache.insert(key, 10_000));
    clock.advance(secs(1));
    (0..200).for_each(|key| assert_eq!(cache.get_or_load(&key).unwrap(), 10_000));
    eventually(|| loads.get() == 200 && cache.in_flight().is_empty());
    assert!((0..200).all(|key| cache.get(&key).unwrap() < 200));
}

#[test]
fn the_keeper_is_bounded() {
    let gate = Gate::default();
    let stop = gate.clone();
    let cache = plain()
        .loader_fn(move |key: &u32| {
            stop.pass();
            Ok::<_, Error>(*key)
        })
        .build();
    let taken = (0..1_000).filter(|key| cache.refresh(key)).count();
    let stats = cache.stats();
    assert!((100..=500).contains(&taken), "{taken} of 1,000 jobs were taken");
    assert_eq!((stats.refused_refreshes, stats.in_flight), (1_000 - taken as u64, taken as u64));
    assert!(stats.refresh_queue_depth as usize <= taken);
    gate.open();
    eventually(|| cache.in_flight().is_empty());
    assert_eq!((cache.len(), cache.stats().refresh_queue_depth), (taken, 0));
}

#[test]
fn on_a_given_executor_one_job_a_key() {
    let (clock, queue, loads) = (ManualClock::new(), Queue::default(), Tally::default());
    let cache = plain()
        .soft_ttl(secs(1))
        .clock(clock.clone())
        .executor(queue.clone())
        .loader(numbering(&loads))
        .build();
    (1..=3).for_each(|key| cache.insert(key, 100));
    clock.advance(secs(1));
    for _ in 0..10 {
        for key in 1..=3 {
            assert_eq!(cache.ask(&key).load().unwrap().provenance, Provenance::Stale { age: secs(1) });
            assert!(cache.refresh(&key));
        }
    }
    assert_eq!((queue.len(), loads.get(), cache.in_flight().len()), (3, 0, 3));
    assert_eq!((queue.run(), loads.get(), cache.in_flight().len()), (3, 3, 0));
    assert!((1..=3).all(|key| cache.get(&key).unwrap() < 3));
}

#[test]
fn a_rejecting_executor_costs_refreshes_only() {
    let (clock, loads, open) = (ManualClock::new(), Tally::default(), Arc::new(AtomicBool::new(false)));
    let (queue, door) = (Queue::default(), open.clone());
    let behind = queue.clone();
    let executor =
        move |job: Job| if door.load(Ordering::SeqCst) { behind.execute(job) } else { Err(Rejected) };
    let cache =
        plain().soft_ttl(secs(1)).clock(clock.clone()).executor(executor).loader(numbering(&loads)).build();
    cache.insert(1, 100);
    clock.advance(secs(1));
    for n in 1..=5 {
        assert_eq!(cache.get_or_load(&1).unwrap(), 100);
        assert_eq!((cache.in_flight().len(), cache.stats().refused_refreshes), (0, n));
    }
    assert!(!cache.refresh(&1) && !cache.refresh(&2));
    assert_eq!((cache.in_flight().len(), cache.get(&2), cache.len()), (0, None, 1));
    open.store(true, Ordering::SeqCst);
    assert_eq!((cache.get_or_load(&1).unwrap(), queue.run()), (100, 1));
    assert_eq!(cache.get(&1), Some(0));
}

#[test]
fn a_dropping_executor_costs_refreshes_only() {
    let (clock, loads) = (ManualClock::new(), Tally::default());
    let executor = |job: Job| {
        drop(job);
        Ok(())
    };
    let cache = plain()
        .soft_ttl(secs(1))
        .time_to_live(secs(10))
        .clock(clock.clone())
        .executor(executor)
        .loader(numbering(&loads))
        .build();
    cache.insert(1, 100);
    clock.advance(secs(1));
    for _ in 0..5 {
        assert_eq!(cache.get_or_load(&1).unwrap(), 100);
        assert_eq!((cache.in_flight().len(), loads.get()), (0, 0));
    }
    clock.advance(secs(10));
    assert_eq!(cache.get_or_load(&1).unwrap(), 0);
}

#[test]
fn an_executor_that_panics_leaves_no_marker() {
    let clock = ManualClock::new();
    let executor = |_: Job| -> Result<(), Rejected> { panic!("executor") };
    let cache = plain()
        .soft_ttl(secs(1))
        .clock(clock.clone())
        .executor(executor)
        .loader(numbering(&Tally::default()))
        .build();
    cache.insert(1, 100);
    clock.advance(secs(1));
    let _ = quietly(|| cache.get_or_load(&1));
    assert_eq!((cache.get(&1), cache.in_flight().len()), (Some(100), 0));
}

#[test]
fn a_panicking_loader_backs_off() {
    let (clock, queue, calls) = (ManualClock::new(), Queue::default(), Tally::default());
    let count = calls.clone();
    let load = move |_: &u32| -> Result<u32, Error> {
        count.add();
        quietly(|| panic!("boom")).unwrap_or_else(|p| std::panic::resume_unwind(p))
    };
    let cache = plain().soft_ttl(secs(1)).clock(clock.clone()).executor(queue.clone()).loader(load).build();
    cache.insert(1, 1);
    clock.advance(secs(1));
    for _ in 0..20 {
        assert_eq!(cache.get_or_load(&1).unwrap(), 1);
        queue.run();
    }
    assert_eq!((calls.get(), cache.stats().loader_panics, cache.stats().load_failures), (1, 1, 1));
    clock.advance(secs(1));
    assert!(cache.refresh(&1));
    assert_eq!((queue.run(), calls.get(), cache.get(&1)), (1, 2, Some(1)));
}

#[test]
fn a_failing_loader_keeps_the_stale_value_and_backs_off() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (clock, queue) = (ManualClock::new(), Queue::default());
        let cache = builder
            .soft_ttl(secs(1))
            .clock(clock.clone())
            .executor(queue.clone())
            .loader_fn(|_| Err::<u32, _>(boom()))
            .build();
        cache.insert(1, 1);
        clock.advance(secs(1));
        assert_eq!((cache.get_or_load(&1).unwrap(), queue.run()), (1, 1));
        assert_eq!((cache.get_or_load(&1).unwrap(), queue.run()), (1, 0));
        assert_eq!((cache.len(), cache.stats().load_failures, cache.iter().count()), (1, 1, 1));
        // A success of any kind clears the back-off.
        cache.insert(1, 2);
        assert!(cache.refresh(&1));
        queue.run();
    });
}

#[test]
fn a_job_that_runs_after_a_takeover_loads_nothing() {
    over_shapes(|builder: Builder<u32, usize>| {
        let (clock, queue, loads) = (ManualClock::new(), Queue::default(), Tally::default());
        let cache = builder
            .soft_ttl(secs(1))
            .time_to_live(secs(2))
            .clock(clock.clone())
            .executor(queue.clone())
            .loader(numbering(&loads))
            .build();
        cache.insert(1, 100);
        clock.advance(secs(1));
        assert_eq!((cache.get_or_load(&1).unwrap(), queue.len()), (100, 1));
        clock.advance(secs(1));
        // Who needs the value does not wait for the queue.
        assert_eq!(cache.get_or_load(&1).unwrap(), 0);
        assert_eq!((queue.run(), loads.get(), cache.get(&1)), (1, 1, Some(0)));
        let stats = cache.stats();
        assert_eq!((stats.loads, stats.takeovers, stats.in_flight), (1, 1, 0));
        // The same with no value at all, for every kind of caller.
        for (key, call) in [(2, 0), (3, 1), (4, 2), (5, 3)] {
            assert!(cache.refresh(&key));
            match call {
                0 => assert_eq!(cache.get_with(&key, || 7), 7),
                1 => assert_eq!(cache.try_get_with(&key, || Ok::<_, Error>(7)).unwrap(), 7),
                2 => assert_eq!(cache.optionally_get_with(&key, || Some(7)), Some(7)),
                _ => _ = cache.compute(&key, |_| Op::Put(7)),
            }
            assert_eq!((queue.run(), loads.get(), cache.get(&key)), (1, 1, Some(7)));
        }
    });
}

#[test]
fn a_job_that_runs_after_a_write_stores_nothing() {
    let (queue, loads) = (Queue::default(), Tally::default());
    let cache = plain().executor(queue.clone()).loader(numbering(&loads)).build();
    (1..=3).for_each(|key| assert!(cache.refresh(&key)));
    cache.insert(1, 100);
    cache.invalidate(&2);
    cache.retain(|_, _| true);
    queue.run();
    assert_eq!([1, 2, 3].map(|key| cache.get(&key)), [Some(100), None, None]);
    assert_eq!((cache.in_flight().len(), cache.len()), (0, 1));
}

#[test]
fn refresh_in_every_state() {
    over_shapes(|builder: Builder<u32, usize>| {
        let (clock, queue, loads) = (ManualClock::new(), Queue::default(), Tally::default());
        let count = loads.clone();
        let cache = builder
            .soft_ttl(secs(10))
            .time_to_live(secs(20))
            .stale_if_error(secs(20))
            .clock(clock.clone())
            .executor(queue.clone())
            .loader_fn(move |_| Ok::<_, Error>(count.add()))
            .build();
        // Absent.
        assert!(cache.refresh(&1));
        assert_eq!((cache.get(&1), queue.run(), cache.get(&1)), (None, 1, Some(0)));
        // Fresh: it is served meanwhile, to all.
        clock.advance(secs(5));
        assert!(cache.refresh(&1));
        assert_eq!(cache.ask(&1).load().unwrap().provenance, Provenance::Fresh { age: secs(5) });
        assert_eq!((cache.get_with(&1, || unreachable!()), queue.run(), cache.get(&1)), (0, 1, Some(1)));
        // Stale.
        clock.advance(secs(10));
        assert!(cache.refresh(&1));
        assert_eq!((cache.get_with(&1, || unreachable!()), queue.run(), cache.get(&1)), (1, 1, Some(2)));
        // In grace, and dead.
        for age in [30, 100] {
            clock.advance(secs(age));
            assert_eq!(cache.get(&1), None);
            assert!(cache.refresh(&1));
            assert_eq!((queue.run(), cache.get(&1).is_some()), (1, true));
        }
    });
}

#[test]
fn refresh_while_backing_off_starts_nothing() {
    let (clock, queue) = (ManualClock::new(), Queue::default());
    let cache = plain()
        .clock(clock.clone())
        .executor(queue.clone())
        .loader_fn(|_: &u32| Err::<u32, _>(boom()))
        .build();
    cache.insert(1, 1);
    assert!(cache.refresh(&1));
    queue.run();
    assert!(!cache.refresh(&1), "the last load failed a moment ago");
    assert_eq!((queue.len(), cache.get(&1), cache.in_flight().len()), (0, Some(1), 0));
    clock.advance(secs(1));
    assert!(cache.refresh(&1));
    queue.run();
}

#[test]
fn refresh_joins_a_load_under_way() {
    let (gate, queue, loads) = (Gate::default(), Queue::default(), Tally::default());
    let cache = plain().executor(queue.clone()).loader(numbering(&loads)).build();
    thread::scope(|s| {
        let load = s.spawn(|| {
            cache.get_with(&1, || {
                gate.pass();
                5
            })
        });
        eventually(|| gate.arrived() == 1);
        assert!(cache.refresh(&1) && cache.refresh(&1));
        assert_eq!((queue.len(), cache.in_flight()[0].waiters), (0, 0));
        gate.open();
        assert_eq!(load.join().unwrap(), 5);
    });
    assert_eq!((cache.get(&1), loads.get()), (Some(5), 0));
}

#[test]
fn a_caller_joins_a_refresh_that_runs() {
    let (gate, queue) = (Gate::default(), Queue::default());
    let stop = gate.clone();
    let cache = plain()
        .executor(queue.clone())
        .loader_fn(move |_: &u32| {
            stop.pass();
            Ok::<_, Error>(1)
        })
        .build();
    assert!(cache.refresh(&1));
    thread::scope(|s| {
        let job = queue.take().pop().unwrap();
        s.spawn(|| job.run());
        eventually(|| gate.arrived() == 1);
        let callers =
            [s.spawn(|| cache.get_or_load(&1).unwrap()), s.spawn(|| cache.get_with(&1, || unreachable!()))];
        until_waiting(&cache, 2);
        gate.open();
        assert_eq!(callers.map(|c| c.join().unwrap()), [1, 1]);
    });
    assert_eq!(cache.stats().loads, 1);
}

#[test]
fn what_a_refresh_finds_takes_effect() {
    let (clock, queue) = (ManualClock::new(), Queue::default());
    let loader = With(|key: &u32, _: &LoadContext<u32>| {
        Ok(match key {
            1 => Loaded::absent(),
            2 => Loaded::new(20).do_not_store(),
            3 => Loaded::new(30).ttl(secs(5)).soft_ttl(secs(4)),
            4 => Loaded::not_modified(),
            _ => Loaded::new(50).ttl(secs(0)),
        })
    });
    let cache = plain()
        .soft_ttl(secs(10))
        .time_to_live(secs(100))
        .clock(clock.clone())
        .executor(queue.clone())
        .loader(loader)
        .build();
    (1..=5).for_each(|key| cache.insert(key, key));
    clock.advance(secs(10));
    (1..=5).for_each(|key| assert_eq!(cache.get_or_load(&key).unwrap(), key));
    assert_eq!(queue.run(), 5);
    assert_eq!([1, 2, 3, 4, 5].map(|key| cache.get(&key)), [None, None, Some(30), Some(4), None]);
    assert_eq!(cache.len(), 2);
    clock.advance(secs(4));
    assert!(matches!(cache.ask(&3).get().unwrap().provenance, Provenance::Stale { .. }));
    assert!(matches!(cache.ask(&4).get().unwrap().provenance, Provenance::Fresh { .. }));
    clock.advance(secs(1));
    assert_eq!((cache.get(&3), cache.get(&4)), (None, Some(4)));
}

#[test]
fn a_loader_is_told_cause_and_previous_value() {
    let (clock, queue, told) = (ManualClock::new(), Queue::default(), Arc::new(Mutex::new(Vec::new())));
    let seen = told.clone();
    let loader = With(move |_: &u32, cx: &LoadContext<u32>| {
        seen.lock().unwrap().push((cx.cause(), cx.previous().copied()));
        Ok(Loaded::new(cx.previous().map_or(1, |v| v + 1)))
    });
    let cache = plain()
        .soft_ttl(secs(1))
        .time_to_live(secs(2))
        .stale_if_error(secs(60))
        .clock(clock.clone())
        .executor(queue.clone())
        .loader(loader)
        .build();
    cache.get_or_load(&1).unwrap();
    clock.advance(secs(1));
    cache.get_or_load(&1).unwrap();
    queue.run();
    assert!(cache.refresh(&1));
    queue.run();
    clock.advance(secs(2));
    cache.get_or_load(&1).unwrap();
    let expected = [
        (LoadCause::Miss, None),
        (LoadCause::Stale, Some(1)),
        (LoadCause::Asked, Some(2)),
        // It is in grace: not served, but good for a conditional request.
        (LoadCause::Miss, Some(3)),
    ];
    assert_eq!(*told.lock().unwrap(), expected);
}

#[test]
fn a_closure_refreshes_in_one_caller_only() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (clock, gate) = (ManualClock::new(), Gate::default());
        let cache = builder.soft_ttl(secs(1)).clock(clock.clone()).build();
        cache.insert(1, 1);
        clock.advance(secs(1));
        thread::scope(|s| {
            let chosen = s.spawn(|| {
                cache.get_with(&1, || {
                    gate.pass();
                    2
                })
            });
            eventually(|| gate.arrived() == 1);
            for _ in 0..100 {
                assert_eq!(cache.get_with(&1, || unreachable!()), 1);
                assert_eq!(cache.try_get_with(&1, || -> Result<u32, Error> { unreachable!() }).unwrap(), 1);
                assert_eq!(cache.optionally_get_with(&1, || unreachable!()), Some(1));
            }
            gate.open();
            assert_eq!(chosen.join().unwrap(), 2);
        });
        assert_eq!((cache.get(&1), cache.stats().loads), (Some(2), 1));
    });
}

#[test]
fn dropping_the_cache_drops_the_keepers_jobs_unrun() {
    let (gate, loads, alive) = (Gate::default(), Tally::default(), Tally::default());
    let (stop, count, live) = (gate.clone(), loads.clone(), alive.clone());
    let load = move |key: &u64| {
        count.add();
        stop.pass();
        Ok::<_, Error>(Counted::new(*key, &live))
    };
    let cache = plain().loader(load).build();
    (0..100).for_each(|key| cache.insert(key, Counted::new(key, &alive)));
    assert!((0..100).all(|key| cache.refresh(&key)));
    eventually(|| gate.arrived() >= 1);
    drop(cache);
    let begun = loads.get();
    gate.open();
    // Those that ran already end, and take the rest with them.
    eventually(|| alive.get() == 0);
    assert!(loads.get() <= begun + 4, "{begun} had begun, {} ran", loads.get());
}

#[test]
fn jobs_of_a_dropped_cache_may_be_run_or_dropped() {
    for run in [false, true] {
        let (queue, alive, loads) = (Queue::default(), Tally::default(), Tally::default());
        let (live, count) = (alive.clone(), loads.clone());
        let load = move |key: &u64| {
            count.add();
            Ok::<_, Error>(Counted::new(*key, &live))
        };
        let cache = plain().executor(queue.clone()).loader(load).build();
        (0..10).for_each(|key| cache.insert(key, Counted::new(key, &alive)));
        assert!((0..10).all(|key| cache.refresh(&key)));
        drop(cache);
        if run {
            assert_eq!(queue.run(), 10);
        } else {
            drop(queue.take());
            assert_eq!(loads.get(), 0);
        }
        let other = plain::<u32, u32>().build();
        eventually(|| {
            other.run_pending_tasks();
            alive.get() == 0
        });
    }
}

#[test]
fn jobs_on_an_executor_that_only_the_cache_has_do_not_keep_it() {
    // The cache owns the executor, the executor its queue, and a job must not own the cache.
    struct Pool(Mutex<Vec<Job>>);
    impl Executor for Pool {
        fn execute(&self, job: Job) -> Result<(), Rejected> {
            self.0.lock().unwrap().push(job);
            Ok(())
        }
    }
    let (alive, live) = (Tally::default(), Tally::default());
    let load = move |key: &u64| Ok::<_, Error>(Counted::new(*key, &live));
    let cache = plain().executor(Pool(Mutex::default())).loader(load).build();
    cache.insert(1, Counted::new(1, &alive));
    assert!(cache.refresh(&1));
    drop(cache);
    assert_eq!(alive.get(), 0, "a value outlives the cache for ever");
}

#[test]
fn a_key_whose_refreshes_hang_does_not_stop_those_of_others() {
    // Each lease that ends puts another thread of the keeper into the loader that hangs: they are replaced.
    let (clock, gate) = (ManualClock::new(), Gate::default());
    let stop = gate.clone();
    let (entered, loads) = (Tally::default(), Tally::default());
    let (inside, count) = (entered.clone(), loads.clone());
    let load = move |key: &u32| {
        if *key == 0 && inside.add() > 0 {
            stop.pass();
        }
        Ok::<_, Error>(count.add())
    };
    let cache =
        plain::<u32, usize>().clock(clock.clone()).soft_ttl(secs(1)).lease(secs(1)).loader(load).build();
    for key in 0..2 {
        cache.get_or_load(&key).unwrap();
    }
    for round in 1..=12 {
        clock.advance(secs(2));
        cache.get_or_load(&0).unwrap();
        eventually(|| entered.get() == round + 1);
        let before = cache.peek(&1);
        cache.get_or_load(&1).unwrap();
        eventually(|| cache.peek(&1) != before);
    }
    gate.open();
    eventually(|| cache.in_flight().is_empty());
}

#[test]
fn a_name_that_no_thread_can_have() {
    let clock = ManualClock::new();
    let loads = Tally::default();
    let builder = plain::<u32, usize>().name("a\0b").clock(clock.clone()).soft_ttl(secs(1));
    let cache = builder.loader(numbering(&loads)).build();
    cache.get_or_load(&1).unwrap();
    clock.advance(secs(1));
    cache.get_or_load(&1).unwrap();
    eventually(|| cache.peek(&1) == Some(1));
}
