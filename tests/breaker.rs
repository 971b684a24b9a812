//! The breaker: a source that fails is left alone, and tried by one.
//!
//! ```text
//! cargo test --test breaker
//! ```
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "tests use real threads")]

mod common;

use common::tasks::{Door, Kept, Task, over_tasks};
use common::{
    Builder, Gate, Queue, Sut, Tally, With, eventually, ms, over_shapes, plain, quietly, secs, until_waiting,
};
use quell::{
    BoxFuture, Breaker, BuildError, Cache, Clock, EarlyRefresh, LoadError, LoadErrorKind, Loaded,
    ManualClock, Mode, Op, Provenance, Rejected, Spawner, WarmOptions,
};
use std::collections::HashMap;
use std::fmt::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

/// Half of four loads at least within ten seconds, then a pause of five.
const BREAKER: Breaker = Breaker::new(0.5).min_loads(4);

fn kind<T: std::fmt::Debug>(result: Result<T, LoadError>) -> LoadErrorKind {
    result.unwrap_err().kind()
}

/// Whether the breaker has refused a load.
fn is_refused<T: std::fmt::Debug>(result: Result<T, LoadError>) -> bool {
    let error = result.unwrap_err();
    let text = error.to_string();
    error.kind() == LoadErrorKind::BackingOff && text.contains("the source of this cache is failing")
}

/// A clock that stands still, and is not moved by hand: whoever waits parks in real time.
struct Stopped;

impl Clock for Stopped {
    fn now(&self) -> Duration {
        secs(1_000)
    }
}

/// A cache whose source can be broken.
struct Fixture {
    cache: Sut<u32, u32>,
    clock: ManualClock,
    broken: Arc<AtomicBool>,
    loads: Tally,
}

impl Fixture {
    fn new(builder: Builder<u32, u32>) -> Self {
        let (clock, broken, loads) = (ManualClock::new(), Arc::new(AtomicBool::new(true)), Tally::default());
        let load = {
            let (broken, loads) = (broken.clone(), loads.clone());
            move |k: &u32| {
                loads.add();
                if broken.load(Ordering::SeqCst) { Err(Error) } else { Ok(k + 100) }
            }
        };
        let cache = builder.clock(clock.clone()).loader(load).build();
        Self { cache, clock, broken, loads }
    }

    fn plain() -> Self {
        Self::new(plain().breaker(BREAKER))
    }

    fn mend(&self) {
        self.broken.store(false, Ordering::SeqCst);
    }

    fn is_open(&self) -> bool {
        self.cache.stats().breaker_open
    }

    fn openings(&self) -> u64 {
        self.cache.stats().breaker_openings
    }

    /// Has so many loads fail, of keys from 1,000 on.
    fn fail(&self, times: u32) {
        (0..times)
            .for_each(|n| assert_eq!(kind(self.cache.get_or_load(&(1_000 + n))), LoadErrorKind::Failed));
    }

    /// Opens the breaker, and forgets what has been counted.
    fn open(&self) {
        self.fail(4);
        assert!(self.is_open());
    }

    /// How many loads a call begins.
    fn begins<R>(&self, call: impl FnOnce() -> R) -> (usize, R) {
        let before = self.loads.get();
        let got = call();
        (self.loads.get() - before, got)
    }
}

#[test]
fn it_opens_when_the_rate_is_reached_and_closes_on_success() {
    over_shapes(|builder: Builder<u32, u32>| {
        let f = Fixture::new(builder.breaker(BREAKER));
        f.fail(3);
        assert!(!f.is_open(), "fewer than four say nothing");
        f.fail(1);
        assert_eq!((f.is_open(), f.openings()), (true, 1));
        // Now nobody asks the source, whatever the key and the call.
        let (loads, ()) = f.begins(|| {
            let never = || -> Result<u32, Error> { unreachable!("no load begins") };
            assert!(is_refused(f.cache.get_or_load(&1)));
            assert!(is_refused(f.cache.try_get_with(&2, never)));
            assert!(is_refused(f.cache.ask(&3).try_load_with(never)));
            assert!(is_refused(f.cache.ask(&3).load()));
            assert!(is_refused(
                f.cache.load_many([4, 5], |_: &[u32]| Ok::<HashMap<_, _>, Error>(HashMap::new()))
            ));
            assert!(is_refused(smol::block_on(f.cache.get_or_load_async(&1))));
            assert!(is_refused(smol::block_on(f.cache.try_get_with_async(&1, async move { never() }))));
            assert!(!f.cache.refresh(&1));
            assert_eq!(f.cache.warm([1, 2], WarmOptions::new()).failed().count(), 2);
        });
        assert_eq!(loads, 0);
        let error = f.cache.get_or_load(&1).unwrap_err();
        assert!(error.to_string().contains("may go in 5s"), "{error}");
        f.clock.advance(ms(4_999));
        assert!(is_refused(f.cache.get_or_load(&1)));
        f.clock.advance(ms(1));
        f.mend();
        assert_eq!(f.cache.get_or_load(&1).unwrap(), 101);
        assert_eq!((f.is_open(), f.cache.get_or_load(&2).unwrap()), (false, 102));
        // What was counted before it closed is forgotten, and one success is what has been since.
        f.broken.store(true, Ordering::SeqCst);
        f.fail(2);
        assert!(!f.is_open());
        f.fail(1);
        assert_eq!((f.is_open(), f.openings()), (true, 2));
    });
}

#[test]
fn each_setting_counts() {
    let after = |breaker: Breaker, failures: u32, successes: u32| {
        let f = Fixture::new(plain().breaker(breaker));
        f.mend();
        (0..successes).for_each(|k| assert!(f.cache.get_or_load(&k).is_ok()));
        f.broken.store(true, Ordering::SeqCst);
        f.fail(failures);
        f
    };
    // The rate.
    assert!(after(Breaker::new(0.5).min_loads(1), 10, 10).is_open());
    assert!(!after(Breaker::new(0.6).min_loads(1), 10, 10).is_open());
    assert!(after(Breaker::new(0.6).min_loads(1), 15, 10).is_open());
    assert!(after(Breaker::new(1.0).min_loads(5), 5, 0).is_open());
    assert!(!after(Breaker::new(1.0).min_loads(1), 50, 1).is_open());
    // How many.
    assert!(!after(Breaker::new(0.1), 19, 0).is_open());
    assert!(after(Breaker::new(0.1), 20, 0).is_open());
    // The pause.
    let f = after(BREAKER.pause(secs(60)), 4, 0);
    f.clock.advance(secs(59));
    assert!(is_refused(f.cache.get_or_load(&1)));
    f.clock.advance(secs(1));
    assert_eq!(kind(f.cache.get_or_load(&1)), LoadErrorKind::Failed);
}

#[test]
fn the_rate_is_that_of_a_window_that_slides() {
    let f = Fixture::new(plain().breaker(Breaker::new(0.5).min_loads(4).window(secs(100))));
    f.clock.advance(secs(1_000));
    f.fail(3);
    // A quarter of the earlier window is still covered, and so of its three failures.
    f.clock.advance(secs(175));
    f.fail(3);
    assert!(!f.is_open(), "three and three quarters");
    f.fail(1);
    assert!(f.is_open());
    // Half of it, where successes weigh as well.
    let f = Fixture::new(plain().breaker(Breaker::new(0.5).min_loads(4).window(secs(100))));
    f.mend();
    (0..10).for_each(|k| assert!(f.cache.get_or_load(&k).is_ok()));
    f.clock.advance(secs(150));
    f.broken.store(true, Ordering::SeqCst);
    f.fail(4);
    assert!(!f.is_open(), "four of nine");
    f.fail(1);
    assert!(f.is_open(), "five of ten");
    // What is older than two windows counts for nothing, however often they come again.
    let f = Fixture::new(plain().breaker(Breaker::new(0.5).min_loads(4).window(secs(100))));
    for _ in 0..10 {
        f.fail(3);
        f.clock.advance(secs(200));
    }
    assert!(!f.is_open());
}

#[test]
fn panics_and_errors_count_and_absences_do_not() {
    let cache = plain::<u32, u32>().breaker(BREAKER).clock(ManualClock::new()).build();
    for k in 0..50 {
        assert_eq!(cache.optionally_get_with(&k, || None), None);
        assert_eq!(cache.try_get_with(&k, || Ok::<_, Error>(1)).unwrap(), 1);
    }
    assert!(!cache.stats().breaker_open);
    let panics = plain::<u32, u32>().breaker(BREAKER).clock(ManualClock::new()).build();
    let boo = || -> u32 { panic!("a loader that panics") };
    for k in 0..2 {
        assert!(quietly(|| panics.get_with(&k, boo)).is_err());
        assert!(!panics.stats().breaker_open);
        let many = |_: &[u32]| -> Result<HashMap<u32, u32>, Error> { panic!("a loader that panics") };
        assert!(quietly(|| panics.load_many([k], many)).is_err());
    }
    assert_eq!((panics.stats().breaker_open, panics.stats().loads), (true, 4));
    assert_eq!(panics.stats().breaker_openings, 1);
    // In tasks, and in the background.
    over_tasks(|builder: Builder<u32, u32>| {
        let cache = builder.breaker(BREAKER).clock(ManualClock::new()).build();
        for k in 0..4 {
            assert!(!cache.stats().breaker_open);
            let boo = async { common::tasks::boo::<u32>("a load that panics") };
            let task = Task::new(common::tasks::panics(cache.get_with_async(&k, boo)));
            assert!(task.finish().is_err());
        }
        assert!(cache.stats().breaker_open);
    });
    let queue = Queue::default();
    let cache = plain::<u32, u32>()
        .breaker(BREAKER)
        .clock(ManualClock::new())
        .executor(queue.clone())
        .loader(|_: &u32| -> Result<u32, Error> { panic!("a loader that panics") })
        .build();
    (0..4).for_each(|k| assert!(cache.refresh(&k)));
    assert_eq!(quietly(|| queue.run()).unwrap(), 4);
    assert_eq!((cache.stats().breaker_open, cache.stats().loader_panics), (true, 4));
}

#[test]
fn not_modified_is_a_success_and_so_is_what_is_not_stored() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>()
        .breaker(BREAKER)
        .clock(clock.clone())
        .loader(With(|k: &u32, cx: &quell::LoadContext<u32>| match cx.previous() {
            Some(_) => Ok(Loaded::not_modified()),
            None if *k < 10 => Ok(Loaded::new(1).do_not_store()),
            None => Err(Error.into()),
        }))
        .build();
    let opens = || {
        (10..14).for_each(|k| _ = cache.get_or_load(&k));
        assert!(cache.stats().breaker_open);
        clock.advance(secs(5));
    };
    opens();
    assert_eq!(cache.get_or_load(&1).unwrap(), 1);
    assert!(!cache.stats().breaker_open);
    opens();
    cache.insert(2, 2);
    assert_eq!(cache.ask(&2).max_age(Duration::ZERO).load().unwrap().value, 2);
    assert!(!cache.stats().breaker_open);
}

#[test]
fn a_source_that_hangs_opens_it() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>().breaker(BREAKER).lease(secs(1)).clock(clock.clone()).build();
    let (gate, cache) = (Gate::default(), &cache);
    thread::scope(|s| {
        for n in 1..=5 {
            s.spawn(|| {
                cache.try_get_with(&1, || {
                    gate.pass();
                    Ok::<_, Error>(1)
                })
            });
            eventually(|| gate.arrived() == n);
            assert_eq!(cache.stats().takeovers, n as u64 - 1);
            assert_eq!(cache.stats().breaker_open, n == 5, "the fourth takeover opens it");
            clock.advance(if n < 5 { secs(1) } else { ms(1) });
        }
        assert!(is_refused(cache.try_get_with(&2, || Ok::<_, Error>(2))));
        gate.open();
    });
    // Four of the late ends counted when they were taken over; the last one is a success.
    assert_eq!((cache.stats().breaker_open, cache.stats().breaker_openings), (false, 1));
}

#[test]
fn a_load_that_is_given_up_counts_only_if_its_lease_is_over() {
    let (clock, asked) = (ManualClock::new(), Tally::default());
    let asks = asked.clone();
    let cache = plain::<u32, u32>()
        .breaker(BREAKER)
        .lease(secs(1))
        .clock(clock.clone())
        .async_loader(move |_: u32| {
            asks.add();
            std::future::pending::<Result<u32, Error>>()
        })
        .build();
    for k in 0..20 {
        drop(Task::waiting(cache.get_or_load_async(&k)));
    }
    assert_eq!((cache.stats().loads, cache.stats().breaker_open), (20, false));
    // A thread gives a future up that has not ended within its lease.
    thread::scope(|s| {
        let calls = [1, 2, 3, 4].map(|k| {
            s.spawn({
                let cache = &cache;
                move || cache.get_or_load(&k)
            })
        });
        // One that has not been polled says nothing of the source.
        eventually(|| asked.get() == 24);
        clock.advance(secs(1));
        for call in calls {
            assert_eq!(kind(call.join().unwrap()), LoadErrorKind::TimedOut);
        }
    });
    assert!(cache.stats().breaker_open);
}

/// A thread that has parked for as long as the lease has seen a load hang, whatever the cache's clock says: a coarse one lags.
#[test]
fn what_a_thread_has_waited_for_in_vain_counts_whatever_the_clock_says() {
    let cache = plain::<u32, u32>()
        .breaker(Breaker::new(1.0).min_loads(2))
        .lease(ms(5))
        .clock(Stopped)
        .async_loader(|_: u32| std::future::pending::<Result<u32, Error>>())
        .build();
    for k in 1..=2 {
        assert!(!cache.stats().breaker_open);
        assert_eq!(kind(cache.get_or_load(&k)), LoadErrorKind::TimedOut);
    }
    assert!(cache.stats().breaker_open);
}

/// A refresh that waits on a queue says nothing of the source when it is taken over, however many come for it at once.
#[test]
fn a_load_that_never_began_is_no_failure_when_it_is_taken_over() {
    const CALLERS: usize = 4;
    let (queue, clock) = (Queue::default(), ManualClock::new());
    let cache = plain::<u32, u32>()
        .breaker(Breaker::new(f64::MIN_POSITIVE).min_loads(1))
        .soft_ttl(secs(1))
        .time_to_live(secs(2))
        .clock(clock.clone())
        .executor(queue.clone())
        .loader(|k: &u32| Ok::<_, Error>(*k))
        .build();
    for k in 0..500 {
        cache.insert(k, k);
        clock.advance(secs(1));
        assert_eq!(cache.get_or_load(&k).unwrap(), k);
        assert_eq!(queue.len(), 1);
        clock.advance(secs(1));
        let start = Barrier::new(CALLERS);
        thread::scope(|s| {
            for _ in 0..CALLERS {
                s.spawn(|| {
                    start.wait();
                    assert_eq!(cache.get_or_load(&k).unwrap(), k);
                });
            }
        });
        drop(queue.take());
        assert_eq!((cache.stats().takeovers, cache.stats().breaker_openings), (u64::from(k) + 1, 0));
    }
}

#[test]
fn a_batch_that_panics_counts_for_each_key() {
    let boom = |_: Vec<u32>| async {
        let all: Result<Vec<(u32, u32)>, Error> = std::hint::black_box(None).expect("boom");
        all
    };
    let cache = plain::<u32, u32>()
        .breaker(Breaker::new(1.0).min_loads(3))
        .clock(ManualClock::new())
        .async_batch_loader(boom)
        .build();
    assert!(quietly(|| cache.get_many([1, 2])).is_err());
    assert!(!cache.stats().breaker_open);
    assert!(quietly(|| smol::block_on(cache.get_many_async([3, 4]))).is_err());
    assert!(cache.stats().breaker_open);
}

#[test]
fn what_is_there_is_served_while_it_is_open() {
    let f = Fixture::new(
        plain()
            .breaker(BREAKER)
            .soft_ttl(secs(1))
            .time_to_live(secs(2))
            .stale_if_error(secs(100))
            .fallback(|k| (*k == 3).then_some(33)),
    );
    f.cache.insert(1, 1);
    f.clock.advance(secs(1));
    f.cache.insert(2, 2);
    f.clock.advance(secs(1));
    f.open();
    let (loads, ()) = f.begins(|| {
        for _ in 0..10 {
            let grace = f.cache.ask(&1).load().unwrap();
            assert!(matches!((grace.value, grace.provenance), (1, Provenance::Grace { .. })));
            let stale = f.cache.ask(&2).load().unwrap();
            assert!(matches!((stale.value, stale.provenance), (2, Provenance::Stale { .. })));
            assert_eq!(f.cache.get_with(&2, || unreachable!("no refresh begins")), 2);
            assert_eq!(f.cache.ask(&3).load().unwrap().provenance, Provenance::Fallback);
        }
        let many =
            f.cache.load_many([1, 2, 3], |_: &[u32]| -> Result<HashMap<_, _>, Error> { unreachable!() });
        assert_eq!(many.unwrap(), HashMap::from([(1, 1), (2, 2), (3, 33)]));
    });
    assert_eq!((loads, f.cache.stats().grace_hits), (0, 11));
}

#[test]
fn one_of_all_callers_probes() {
    const THREADS: u32 = 8;
    const KEYS: u32 = 20;
    for _ in 0..common::scaled(20, 500) {
        let f = Fixture::plain();
        f.open();
        f.clock.advance(secs(5));
        let (gate, refused) = (Gate::default(), Tally::default());
        let (f, gate, refused) = (&f, &gate, &refused);
        thread::scope(|s| {
            for t in 0..THREADS {
                s.spawn(move || {
                    for key in t * KEYS..(t + 1) * KEYS {
                        let load = || {
                            gate.pass();
                            Ok::<_, Error>(key)
                        };
                        match f.cache.try_get_with(&key, load) {
                            Ok(value) => assert_eq!(value, key),
                            Err(error) => {
                                assert_eq!(error.kind(), LoadErrorKind::BackingOff);
                                refused.add();
                            }
                        }
                    }
                });
            }
            // All but the one who probes come to their ends.
            eventually(|| refused.get() >= ((THREADS - 1) * KEYS) as usize && gate.arrived() > 0);
            assert_eq!((gate.arrived(), f.cache.in_flight().len()), (1, 1));
            gate.open();
        });
        assert!(!f.is_open());
    }
}

#[test]
fn a_probe_that_fails_begins_the_pause_anew() {
    let f = Fixture::plain();
    f.open();
    for _ in 0..3 {
        f.clock.advance(secs(5));
        assert_eq!(f.begins(|| kind(f.cache.get_or_load(&1))), (1, LoadErrorKind::Failed));
        assert_eq!(f.begins(|| is_refused(f.cache.get_or_load(&2))), (0, true));
        f.clock.advance(ms(4_999));
        assert_eq!(f.begins(|| is_refused(f.cache.get_or_load(&2))), (0, true));
        f.clock.advance(ms(1));
    }
    assert_eq!(f.openings(), 1, "it has been open all along");
    f.mend();
    f.clock.advance(secs(1_000_000));
    assert!(f.is_open(), "nobody has tried");
    assert_eq!(f.cache.get_or_load(&3).unwrap(), 103);
    assert!(!f.is_open());
}

#[test]
fn a_probe_that_is_abandoned_is_not_the_last() {
    let f = Fixture::plain();
    f.open();
    f.clock.advance(secs(5));
    let door = Door::default();
    for _ in 0..3 {
        let probe = Task::waiting(f.cache.try_get_with_async(&1, {
            let door = door.clone();
            async move {
                door.pass().await;
                Ok::<_, Error>(1)
            }
        }));
        assert!(is_refused(f.cache.get_or_load(&2)), "one tries");
        drop(probe);
    }
    // One that is not begun, neither.
    let queue = Queue::default();
    let queued = Fixture::new(plain().breaker(BREAKER).executor(queue.clone()));
    for f in [&f, &queued] {
        if std::ptr::eq(f, &raw const queued) {
            f.open();
            f.clock.advance(secs(5));
            assert!(f.cache.refresh(&1));
            assert!(is_refused(f.cache.get_or_load(&2)));
            drop(queue.take());
        }
        f.mend();
        assert_eq!(f.cache.get_or_load(&2).unwrap(), 102);
        assert!(!f.is_open());
    }
}

#[test]
fn a_probe_that_hangs_is_not_the_last() {
    let f = Fixture::new(plain().breaker(BREAKER).lease(secs(60)));
    f.open();
    f.clock.advance(secs(5));
    let gate = Gate::default();
    thread::scope(|s| {
        let hangs = s.spawn(|| {
            f.cache.try_get_with(&1, || {
                gate.pass();
                Ok::<_, Error>(1)
            })
        });
        eventually(|| gate.arrived() == 1);
        f.clock.advance(secs(59));
        assert!(is_refused(f.cache.get_or_load(&2)));
        f.clock.advance(secs(1));
        assert_eq!(kind(f.cache.get_or_load(&2)), LoadErrorKind::Failed, "its lease is over");
        assert!(is_refused(f.cache.get_or_load(&3)), "and this one's failure begins a pause");
        f.mend();
        // Who takes the hung one over probes, and keeps its time although what it has taken over has failed.
        f.clock.advance(secs(5));
        let second = Gate::default();
        let takes_over = s.spawn({
            let (f, second) = (&f, second.clone());
            move || {
                f.cache.try_get_with(&1, || {
                    second.pass();
                    Ok::<_, Error>(2)
                })
            }
        });
        eventually(|| second.arrived() == 1);
        f.clock.advance(secs(59));
        assert!(is_refused(f.cache.get_or_load(&3)));
        second.open();
        assert_eq!(takes_over.join().unwrap().unwrap(), 2);
        assert!(!f.is_open());
        gate.open();
        assert_eq!(hangs.join().unwrap().unwrap(), 1);
    });
}

/// A probe that has waited to begin is alone for as long as its lease, which begins then; and so is the next one, if it is
/// given up.
#[test]
fn a_probe_that_begins_late_is_alone_too() {
    let (queue, tasks, clock, gate) =
        (Queue::default(), Kept::default(), ManualClock::new(), Gate::default());
    let (pass, builder) = (gate.clone(), || plain::<u32, u32>().breaker(BREAKER).lease(secs(60)));
    let fails = |cache: &Sut<u32, u32>, from: u32| {
        cache.insert(1, 1);
        (from..from + 4).for_each(|k| assert_eq!(kind(cache.get_or_load(&k)), LoadErrorKind::Failed));
        clock.advance(secs(5));
        assert_eq!((cache.get_or_load(&1).unwrap(), cache.stats().stale_hits), (1, 1));
        assert!(is_refused(cache.get_or_load(&2)), "the refresh is the probe");
        clock.advance(secs(59));
        assert!(is_refused(cache.get_or_load(&2)));
    };
    let load = move |k: &u32| {
        if *k == 1 {
            pass.pass();
        }
        if *k < 10 { Ok(k + 100) } else { Err(Error) }
    };
    let cache = builder().soft_ttl(secs(1)).clock(clock.clone()).executor(queue.clone()).loader(load).build();
    fails(&cache, 10);
    thread::scope(|s| {
        s.spawn(|| queue.run());
        eventually(|| gate.arrived() == 1);
        clock.advance(secs(59));
        assert!(is_refused(cache.get_or_load(&2)), "it has not come to the end of its lease");
        gate.open();
    });
    assert_eq!((cache.stats().breaker_open, cache.get(&1)), (false, Some(101)));

    // One that is given up has begun late, too.
    let begun = Tally::default();
    let count = begun.clone();
    let load = move |k: u32| {
        let count = count.clone();
        async move {
            if k == 1 {
                count.add();
                std::future::pending::<()>().await;
            }
            if k < 10 { Ok(k + 100) } else { Err(Error) }
        }
    };
    let first = tasks.clone();
    let spawner = move |task: BoxFuture| if first.len() == 0 { first.spawn(task) } else { Err(Rejected) };
    let cache = builder().soft_ttl(secs(1)).clock(clock.clone()).spawner(spawner).async_loader(load).build();
    // Takes the one place, so that the caller polls the loads that fail.
    tasks.spawn(Box::pin(async {})).unwrap();
    cache.insert(1, 1);
    (10..14).for_each(|k| assert_eq!(kind(cache.get_or_load(&k)), LoadErrorKind::Failed));
    clock.advance(secs(5));
    assert_eq!(tasks.run(), 1);
    assert_eq!((cache.get_or_load(&1).unwrap(), tasks.len()), (1, 1));
    clock.advance(secs(59));
    let task = Task::waiting(tasks.take().pop().unwrap());
    assert_eq!(begun.get(), 1);
    clock.advance(secs(59));
    tasks.spawn(Box::pin(async {})).unwrap();
    assert!(is_refused(cache.get_or_load(&2)));
    drop(task);
    assert_eq!((cache.get_or_load(&2).unwrap(), cache.stats().breaker_open), (102, false));
}

/// A probe that finds no room for its load leaves the probing to others.
#[test]
fn a_probe_without_a_permit_is_given_back() {
    let f = Fixture::new(plain().breaker(BREAKER).max_concurrent_loads(1));
    f.open();
    f.clock.advance(secs(5));
    let gate = Gate::default();
    thread::scope(|s| {
        let runs = s.spawn(|| {
            f.cache.compute(&1, |_| {
                gate.pass();
                Op::Put(1)
            })
        });
        eventually(|| gate.arrived() == 1);
        for _ in 0..3 {
            assert_eq!(kind(f.cache.get_or_load(&2)), LoadErrorKind::Overloaded);
        }
        gate.open();
        runs.join().unwrap();
    });
    f.mend();
    assert_eq!(f.cache.get_or_load(&2).unwrap(), 102, "nobody has the probe");
    // Nor does one that is refused by the breaker take a permit.
    f.broken.store(true, Ordering::SeqCst);
    f.open();
    (0..10).for_each(|k| assert!(is_refused(f.cache.get_or_load(&(k + 50)))));
    f.clock.advance(secs(5));
    f.mend();
    assert_eq!(f.cache.get_or_load(&3).unwrap(), 103);
}

#[test]
fn a_key_that_backs_off_does_not_take_the_probe() {
    let f = Fixture::new(plain().breaker(BREAKER).error_backoff(quell::Backoff::constant(secs(60))));
    f.open();
    f.clock.advance(secs(5));
    f.mend();
    let error = f.cache.get_or_load(&1_000).unwrap_err();
    assert!(error.downcast_ref::<Error>().is_some(), "the key's own: {error}");
    assert_eq!(f.cache.get_or_load(&1).unwrap(), 101);
}

#[test]
fn calls_that_cannot_fail_load_always_and_their_results_count() {
    let f = Fixture::plain();
    f.open();
    f.clock.advance(secs(3));
    assert!(quietly(|| f.cache.get_with(&1, || panic!("a loader that panics"))).is_err());
    f.clock.advance(secs(4));
    assert!(is_refused(f.cache.get_or_load(&1)), "that was a failure four seconds ago");
    assert_eq!(f.cache.get_with(&1, || 1), 1);
    assert!(!f.is_open());
    f.open();
    assert_eq!(f.cache.optionally_get_with(&2, || None), None);
    assert!(!f.is_open(), "an absence is an answer");
    f.open();
    assert_eq!(smol::block_on(f.cache.get_with_async(&3, async { 3 })), 3);
    assert!(!f.is_open());
}

#[test]
fn a_compute_says_nothing_of_the_source() {
    let f = Fixture::plain();
    let boo = |_: Option<&u32>| -> Op<u32> { panic!("a closure that panics") };
    for k in 0..20 {
        assert!(quietly(|| f.cache.compute(&k, boo)).is_err());
        f.cache.insert(k, 1);
        assert!(quietly(|| f.cache.compute(&k, boo)).is_err());
    }
    assert!(!f.is_open());
    f.open();
    f.cache.compute(&1, |_| Op::Put(2));
    f.cache.compute(&77, |_| Op::Put(2));
    assert!(f.is_open());
}

#[test]
fn a_load_that_runs_is_joined_while_it_is_open() {
    let f = Fixture::plain();
    let gate = Gate::default();
    thread::scope(|s| {
        let leader = s.spawn(|| {
            f.cache.try_get_with(&1, || {
                gate.pass();
                Ok::<_, Error>(1)
            })
        });
        eventually(|| gate.arrived() == 1);
        f.open();
        let joins = s.spawn(|| f.cache.get_or_load(&1));
        until_waiting(&f.cache, 1);
        gate.open();
        assert_eq!((leader.join().unwrap().unwrap(), joins.join().unwrap().unwrap()), (1, 1));
    });
    assert!(!f.is_open(), "any load that succeeds closes it");
}

/// All keys of a call that tries the source are one probe.
#[test]
fn load_many_probes_with_all_its_keys() {
    for is_task in [false, true] {
        let f = Fixture::plain();
        f.open();
        f.clock.advance(secs(5));
        let calls = Tally::default();
        let many = |works: bool| {
            let got = move |keys: &[u32]| {
                let all: HashMap<u32, u32> = keys.iter().map(|k| (*k, k + 1)).collect();
                if works { Ok(all) } else { Err(Error) }
            };
            calls.add();
            if is_task {
                let load = |keys: Vec<u32>| async move { got(&keys) };
                smol::block_on(f.cache.load_many_async(0..50, load))
            } else {
                f.cache.load_many(0..50, got)
            }
        };
        assert_eq!(kind(many(false)), LoadErrorKind::Failed);
        assert!(is_refused(many(true)));
        f.clock.advance(secs(5));
        assert_eq!(many(true).unwrap().len(), 50);
        assert!(!f.is_open());
    }
    // Of a call that fails each key counts.
    let f = Fixture::plain();
    assert_eq!(
        kind(f.cache.load_many(0..4, |_: &[u32]| Err::<HashMap<_, _>, _>(Error))),
        LoadErrorKind::Failed
    );
    assert!(f.is_open());
}

#[test]
fn refreshes_ask_before_they_are_claimed_and_before_they_begin() {
    let (queue, tasks) = (Queue::default(), Kept::default());
    let f = Fixture::new(
        plain().breaker(BREAKER).soft_ttl(secs(1)).time_to_live(secs(1_000)).executor(queue.clone()),
    );
    (1..=3).for_each(|k| f.cache.insert(k, k));
    f.clock.advance(secs(1));
    assert_eq!(f.cache.get_or_load(&1).unwrap(), 1);
    assert_eq!(queue.len(), 1);
    f.open();
    assert_eq!(f.begins(|| queue.run()), (0, 1), "it was claimed before, and does not begin");
    assert_eq!(f.cache.get_or_load(&2).unwrap(), 2);
    assert_eq!(queue.len(), 0);
    f.clock.advance(secs(5));
    f.mend();
    assert_eq!([2, 3, 1].map(|k| f.cache.get_or_load(&k).unwrap()), [2, 3, 1]);
    assert_eq!(f.begins(|| queue.run()), (1, 1), "one of them probes");
    assert_eq!((f.cache.get(&2), f.is_open()), (Some(102), false));
    assert_eq!([3, 1].map(|k| f.cache.get_or_load(&k).unwrap()), [3, 1]);
    assert_eq!(queue.run(), 2);
    // So does one that is a task of its own.
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>()
        .breaker(BREAKER)
        .clock(clock.clone())
        .spawner(tasks.clone())
        .async_loader(|_: u32| async { Err::<u32, _>(Error) })
        .build();
    (0..8).for_each(|k| assert!(cache.refresh(&k)));
    assert_eq!((tasks.run(), cache.stats().loads), (8, 4), "the rest have waited for too long");
}

#[test]
fn an_early_refresh_asks() {
    let refused = Tally::default();
    let f = Fixture::new(
        plain().breaker(BREAKER).time_to_live(secs(100)).early_refresh(EarlyRefresh::beta(1_000.0)).executor(
            {
                let refused = refused.clone();
                move |_: quell::Job| {
                    refused.add();
                    Err(quell::Rejected)
                }
            },
        ),
    );
    f.mend();
    let takes_a_second = || {
        f.clock.advance(secs(1));
        1
    };
    assert_eq!(f.cache.get_with(&1, takes_a_second), 1);
    f.broken.store(true, Ordering::SeqCst);
    f.clock.advance(secs(90));
    let read = || (0..50).for_each(|_| assert_eq!(f.cache.get_or_load(&1).unwrap(), 1));
    f.open();
    read();
    assert_eq!(refused.get(), 0);
    f.clock.advance(secs(5));
    read();
    assert!(refused.get() > 0, "a probe that nobody runs is given back, and tried again");
}

#[test]
fn a_hung_refresh_is_not_taken_over_while_it_is_open() {
    let f = Fixture::new(plain().breaker(BREAKER).soft_ttl(secs(1)).lease(secs(10)));
    f.cache.insert(1, 7);
    f.clock.advance(secs(2));
    let hung = Gate::default();
    thread::scope(|s| {
        let refreshes = s.spawn(|| {
            f.cache.get_with(&1, || {
                hung.pass();
                8
            })
        });
        eventually(|| hung.arrived() == 1);
        f.clock.advance(secs(10));
        f.open();
        assert_eq!(f.cache.get_with(&1, || unreachable!("no takeover")), 7);
        f.clock.advance(secs(5));
        assert_eq!(f.cache.get_with(&1, || 9), 9, "it probes");
        assert!(!f.is_open());
        hung.open();
        assert_eq!(refreshes.join().unwrap(), 8);
    });
    assert_eq!((f.cache.get(&1), f.cache.stats().takeovers), (Some(9), 1));
}

/// A load that was begun before the probe, and fails while that runs, leaves its time alone.
#[test]
fn a_late_failure_does_not_let_a_second_probe_go() {
    let f = Fixture::new(plain().breaker(BREAKER.pause(secs(1))).lease(secs(60)));
    let (late, probe) = (Gate::default(), Gate::default());
    thread::scope(|s| {
        let behind = |gate: &Gate, key: u32| {
            let (f, gate) = (&f, gate.clone());
            s.spawn(move || {
                f.cache.try_get_with(&key, || {
                    gate.pass();
                    if key == 1 { Err(Error) } else { Ok(2) }
                })
            })
        };
        let old = behind(&late, 1);
        eventually(|| late.arrived() == 1);
        f.open();
        f.clock.advance(secs(1));
        let probes = behind(&probe, 2);
        eventually(|| probe.arrived() == 1);
        late.open();
        assert_eq!(kind(old.join().unwrap()), LoadErrorKind::Failed);
        f.clock.advance(secs(2));
        assert!(is_refused(f.cache.get_or_load(&3)));
        probe.open();
        assert_eq!(probes.join().unwrap().unwrap(), 2);
    });
    assert!(!f.is_open());
}

#[test]
fn it_counts_in_a_bypass_and_is_closed_without_one() {
    let f = Fixture::plain();
    f.cache.set_mode(Mode::Bypass);
    f.open();
    assert!(is_refused(f.cache.get_or_load(&1)));
    let none = Fixture::new(plain());
    none.fail(100);
    assert_eq!((none.is_open(), none.openings()), (false, 0));
}

#[test]
fn a_breaker_that_makes_no_sense_is_refused() {
    let build = |breaker| Cache::<u32, u32>::builder().breaker(breaker).try_build();
    let bad = [
        (Breaker::new(0.0), "failure_rate"),
        (Breaker::new(1.1), "failure_rate"),
        (Breaker::new(f64::NAN), "failure_rate"),
        (Breaker::new(0.5).window(Duration::ZERO), "window"),
        (Breaker::new(0.5).pause(Duration::ZERO), "pause"),
        (Breaker::new(0.5).min_loads(0), "min_loads"),
        (Breaker::new(0.5).min_loads(500_001), "min_loads"),
    ];
    for (breaker, rule) in bad {
        let error: BuildError = build(breaker).unwrap_err();
        assert!(error.setting() == "breaker" && error.rule().contains(rule), "{error}");
    }
    let edges = Breaker::new(1.0).window(Duration::MAX).pause(Duration::MAX).min_loads(500_000);
    assert_eq!(build(edges).unwrap().get_with(&1, || 1), 1);
    let least = Duration::from_nanos(1);
    assert!(build(Breaker::new(f64::MIN_POSITIVE).window(least).pause(least).min_loads(1)).is_ok());
}
