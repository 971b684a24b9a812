//! Futures that are dropped at each of their await points, wakers that change, tasks and runtimes that go away in the middle:
//! `cargo test --test cancel`; with `--features tokio` also what becomes of a load when its runtime is shut down.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads and tasks with what is at hand"
)]

mod common;

use common::task::{Door, Hand, Woken, block_on, poll_once, yield_now};
use common::{
    Builder, Counted, Gate, Queue, Sut, Tally, eventually, over_shapes, plain, scaled, secs, until_waiting,
};
use quell::{BoxFuture, Job, LoadErrorKind, ManualClock, Provenance, Rejected};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread;

type Error = std::io::Error;
type Cache = Sut<u64, u64>;

/// What a load brings.
const VALUE: u64 = 7;
/// What was there before, where something was.
const BEFORE: u64 = 50;
/// What a load brings that begins in the destructor of another.
const NEXT: u64 = 99;
/// The await points of a load.
const STEPS: usize = 3;

/// How a load goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// It wakes itself in each poll.
    Itself,
    /// It is woken from outside, after the poll.
    FromOutside,
}

const PACES: [Pace; 2] = [Pace::Itself, Pace::FromOutside];

type Probe = Box<dyn Fn() + Send + Sync>;

/// Where the loads of a test come from, and what became of them.
#[derive(Clone)]
struct Source(Arc<Books>);

struct Books {
    pace: Pace,
    made: Tally,
    /// Loads that have been polled.
    begun: Tally,
    polls: Tally,
    dropped: Tally,
    /// Called in the destructor of each load that has begun.
    probe: Mutex<Option<Probe>>,
    waker: Mutex<Option<Waker>>,
}

impl Source {
    fn new(pace: Pace) -> Self {
        Self(Arc::new(Books {
            pace,
            made: Tally::default(),
            begun: Tally::default(),
            polls: Tally::default(),
            dropped: Tally::default(),
            probe: Mutex::default(),
            waker: Mutex::default(),
        }))
    }

    fn load<T>(&self, comes_to: fn(u64) -> T) -> Steps<T> {
        self.0.made.add();
        Steps { left: STEPS, begun: false, comes_to, source: self.clone() }
    }

    /// Wakes the load that waits, if one does.
    fn nudge(&self) {
        let waker = self.0.waker.lock().unwrap().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// How many loads have been polled; each load that was made must be gone.
    #[track_caller]
    fn begun(&self) -> usize {
        assert_eq!(self.0.made.get(), self.0.dropped.get(), "loads made, and dropped");
        self.0.begun.get()
    }

    fn alive(&self) -> usize {
        self.0.made.get() - self.0.dropped.get()
    }
}

/// A load with some await points, one in each poll.
struct Steps<T> {
    left: usize,
    begun: bool,
    comes_to: fn(u64) -> T,
    source: Source,
}

impl<T> Future for Steps<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let this = self.get_mut();
        let books = &this.source.0;
        if !std::mem::replace(&mut this.begun, true) {
            books.begun.add();
        }
        books.polls.add();
        if this.left == 0 {
            return Poll::Ready((this.comes_to)(VALUE));
        }
        this.left -= 1;
        match books.pace {
            Pace::Itself => cx.waker().wake_by_ref(),
            Pace::FromOutside => *books.waker.lock().unwrap() = Some(cx.waker().clone()),
        }
        Poll::Pending
    }
}

impl<T> Drop for Steps<T> {
    fn drop(&mut self) {
        self.source.0.dropped.add();
        let probe = self.begun.then(|| self.source.0.probe.lock().unwrap().take()).flatten();
        if let Some(probe) = probe {
            probe();
        }
    }
}

fn ok(value: u64) -> Result<u64, Error> {
    Ok(value)
}

fn all(value: u64) -> Result<Vec<(u64, u64)>, Error> {
    Ok(KEYS.map(|key| (key, value)).to_vec())
}

/// The keys of a call for many; the first is everybody's.
const KEYS: [u64; 3] = [1, 2, 3];

/// A method by which a task loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    GetWith,
    TryGetWith,
    OptionallyGetWith,
    GetOrLoad,
    LoadMany,
    AskLoadWith,
    AskTryLoadWith,
    AskLoad,
}

const METHODS: [Method; 8] = [
    Method::GetWith,
    Method::TryGetWith,
    Method::OptionallyGetWith,
    Method::GetOrLoad,
    Method::LoadMany,
    Method::AskLoadWith,
    Method::AskTryLoadWith,
    Method::AskLoad,
];

impl Method {
    /// Whether the load is that of the attached loader, which refreshes what is stale in the background.
    fn is_attached(self) -> bool {
        matches!(self, Self::GetOrLoad | Self::AskLoad)
    }

    /// A call with a load of the source, for these keys by the one method that takes several.
    fn call_for<'a>(self, cache: &'a Cache, source: &Source, keys: &'static [u64]) -> Hand<'a, u64> {
        let of = source.clone();
        match self {
            Self::GetWith => Hand::new(cache.get_with_async(&1, of.load(|v| v))),
            Self::TryGetWith => {
                let load = of.load(ok);
                Hand::new(async move { cache.try_get_with_async(&1, load).await.unwrap() })
            }
            Self::OptionallyGetWith => {
                let load = of.load(Some);
                Hand::new(async move { cache.optionally_get_with_async(&1, load).await.unwrap() })
            }
            Self::GetOrLoad => Hand::new(async { cache.get_or_load_async(&1).await.unwrap() }),
            Self::LoadMany => Hand::new(async move {
                let found = cache.load_many_async(keys, |_| of.load(all)).await.unwrap();
                assert_eq!(found.len(), keys.len());
                found[&1]
            }),
            Self::AskLoadWith => {
                let load = of.load(|v| v);
                Hand::new(async move { cache.ask(&1).load_with_async(load).await.unwrap().value })
            }
            Self::AskTryLoadWith => {
                let load = of.load(ok);
                Hand::new(async move { cache.ask(&1).try_load_with_async(load).await.unwrap().value })
            }
            Self::AskLoad => Hand::new(async { cache.ask(&1).load_async().await.unwrap().value }),
        }
    }

    fn lead<'a>(self, cache: &'a Cache, source: &Source) -> Hand<'a, u64> {
        self.call_for(cache, source, &KEYS)
    }

    fn follow<'a>(self, cache: &'a Cache, source: &Source) -> Hand<'a, u64> {
        self.call_for(cache, source, &KEYS[..1])
    }

    /// How many loads its call leads.
    fn keys(self) -> usize {
        if self == Self::LoadMany { KEYS.len() } else { 1 }
    }
}

/// What was in the cache before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prior {
    Absent,
    Stale,
}

/// A cache whose loader is the source too.
fn cache_of(builder: Builder<u64, u64>, source: &Source, prior: Prior) -> Cache {
    let (clock, of) = (ManualClock::new(), source.clone());
    let builder = builder.soft_ttl(secs(1)).lease(secs(60)).clock(clock.clone());
    let cache = builder.async_loader(move |_: &u64| of.load(ok)).build();
    if prior == Prior::Stale {
        KEYS.into_iter().for_each(|key| cache.insert(key, BEFORE));
        clock.advance(secs(1));
    }
    cache
}

/// Nobody loads, and the entries are what they were.
#[track_caller]
fn assert_as_before(cache: &Cache, prior: Prior, told: &str) {
    assert_eq!((cache.in_flight().len(), cache.stats().waiters), (0, 0), "{told}");
    for key in KEYS {
        match (prior, cache.ask(&key).get()) {
            (Prior::Absent, Err(error)) => assert_eq!(error.kind(), LoadErrorKind::NotCached, "{told}"),
            (Prior::Stale, Ok(answer)) => {
                assert_eq!(answer.value, BEFORE, "{told}");
                assert!(matches!(answer.provenance, Provenance::Stale { .. }), "{told}: {answer:?}");
            }
            (_, got) => panic!("{told}: {got:?}"),
        }
    }
}

/// Each way to lead a load that somebody waits for.
fn over_leaders(mut body: impl FnMut(&dyn Fn() -> (Cache, Source), Method, Prior, &str)) {
    for method in METHODS {
        for prior in [Prior::Absent, Prior::Stale] {
            if prior == Prior::Stale && method.is_attached() {
                continue;
            }
            for pace in PACES {
                let make = || {
                    let source = Source::new(pace);
                    (cache_of(plain(), &source, prior), source)
                };
                body(&make, method, prior, &format!("{method:?}, {prior:?}, {pace:?}"));
            }
        }
    }
}

/// Polls a call some times, and lets its load go on before each. What the load waits for keeps its waker at the end.
fn polled(call: &mut Hand<'_, u64>, times: usize, source: &Source) -> Option<u64> {
    (0..times).find_map(|_| {
        source.nudge();
        call.poll()
    })
}

/// Polls a call to its end.
#[track_caller]
fn ended(call: &mut Hand<'_, u64>, source: &Source) -> u64 {
    polled(call, 4 * STEPS, source).expect("the call ends")
}

#[test]
fn a_leader_is_dropped_at_each_await_point() {
    over_leaders(|make, method, prior, told| {
        for k in 0.. {
            let (cache, source) = make();
            let mut leader = method.lead(&cache, &source);
            if let Some(value) = polled(&mut leader, k, &source) {
                assert_eq!((value, source.0.polls.get(), k), (VALUE, STEPS + 1, STEPS + 1), "{told}");
                drop(leader);
                assert_eq!((source.begun(), cache.get(&1)), (1, Some(VALUE)), "{told}");
                break;
            }
            let leads = if k > 0 { method.keys() } else { 0 };
            assert_eq!((cache.in_flight().len(), source.0.polls.get()), (leads, k), "{told}, {k} polls");
            drop(leader);
            assert_as_before(&cache, prior, &format!("{told}, {k} polls"));
            assert_eq!(source.begun(), k.min(1), "{told}, {k} polls");
            // The next call loads anew.
            assert_eq!(ended(&mut method.lead(&cache, &source), &source), VALUE, "{told}, {k} polls");
            assert_eq!(source.begun(), k.min(1) + 1);
        }
    });
}

#[test]
fn an_entry_is_as_before_in_caches_of_all_shapes() {
    over_shapes(|builder| {
        let source = Source::new(Pace::Itself);
        let cache = cache_of(builder, &source, Prior::Stale);
        for method in [Method::GetWith, Method::LoadMany] {
            for k in 1..=STEPS {
                let mut leader = method.lead(&cache, &source);
                assert_eq!(polled(&mut leader, k, &source), None);
                drop(leader);
                assert_as_before(&cache, Prior::Stale, &format!("{method:?}, {k} polls"));
            }
        }
        assert_eq!((source.begun(), source.alive()), (2 * STEPS, 0));
    });
}

/// A leader that has been polled some times, and a task that has joined it then and has been polled some times: for all
/// that the load has await points for.
fn over_pairs(mut body: impl FnMut(&Cache, &Source, Hand<'_, u64>, Hand<'_, u64>, &str)) {
    for (leads, follows) in METHODS.into_iter().flat_map(|l| METHODS.map(|f| (l, f))) {
        for pace in PACES {
            for (j, k) in (1..STEPS).flat_map(|j| (1..=STEPS - j).map(move |k| (j, k))) {
                let told = format!("{leads:?} {j} times, {follows:?} {k} times, {pace:?}");
                let source = Source::new(pace);
                let cache = cache_of(plain(), &source, Prior::Absent);
                let (mut leader, mut follower) =
                    (leads.lead(&cache, &source), follows.follow(&cache, &source));
                assert_eq!(polled(&mut leader, j, &source), None, "{told}");
                // Each poll of the follower takes the load on by one step, too.
                assert_eq!(polled(&mut follower, k, &source), None, "{told}");
                assert_eq!((cache.stats().waiters, source.0.polls.get()), (1, j + k), "{told}");
                body(&cache, &source, leader, follower, &told);
            }
        }
    }
}

#[test]
fn a_follower_is_dropped_at_each_await_point() {
    over_pairs(|cache, source, mut leader, follower, told| {
        drop(follower);
        assert_eq!(cache.stats().waiters, 0, "{told}");
        assert_eq!(ended(&mut leader, source), VALUE, "{told}");
        drop(leader);
        assert_eq!((source.begun(), cache.get(&1), cache.in_flight().len()), (1, Some(VALUE), 0), "{told}");
    });
}

#[test]
fn a_leader_is_dropped_and_a_task_has_joined() {
    over_pairs(|cache, source, leader, mut follower, told| {
        drop(leader);
        // The keys that nobody has joined are free again.
        assert_eq!(cache.in_flight().len(), 1, "{told}");
        assert_eq!(ended(&mut follower, source), VALUE, "{told}");
        drop(follower);
        assert_eq!((source.begun(), cache.get(&1), cache.in_flight().len()), (1, Some(VALUE), 0), "{told}");
    });
}

#[test]
fn both_are_dropped_in_either_order() {
    for leader_first in [false, true] {
        over_pairs(|cache, source, leader, follower, told| {
            if leader_first {
                drop(leader);
                drop(follower);
            } else {
                drop(follower);
                drop(leader);
            }
            assert_as_before(cache, Prior::Absent, told);
            assert_eq!(source.begun(), 1, "{told}");
            assert_eq!(ended(&mut Method::GetWith.lead(cache, source), source), VALUE, "{told}");
        });
    }
}

#[test]
fn a_leader_is_dropped_and_a_thread_has_joined() {
    for method in METHODS {
        for (pace, k) in PACES.into_iter().flat_map(|pace| (1..=STEPS).map(move |k| (pace, k))) {
            let told = format!("{method:?} {k} times, {pace:?}");
            let source = Source::new(pace);
            let cache = cache_of(plain(), &source, Prior::Absent);
            let mut leader = method.lead(&cache, &source);
            assert_eq!(polled(&mut leader, k, &source), None, "{told}");
            thread::scope(|s| {
                let one = s.spawn(|| cache.get_with(&1, || unreachable!("it has joined")));
                let two = s.spawn(|| cache.try_get_with(&1, || -> Result<u64, Error> { unreachable!() }));
                until_waiting(&cache, 2);
                assert_eq!(
                    source.0.polls.get(),
                    k,
                    "{told}: a thread leaves it to the leader while there is one"
                );
                drop(leader);
                eventually(|| {
                    source.nudge();
                    one.is_finished() && two.is_finished()
                });
                assert_eq!((one.join().unwrap(), two.join().unwrap().unwrap()), (VALUE, VALUE), "{told}");
            });
            assert_eq!(
                (source.begun(), cache.get(&1), cache.in_flight().len()),
                (1, Some(VALUE), 0),
                "{told}"
            );
        }
    }
}

/// What the destructor of a load finds.
#[derive(Clone, Default)]
struct Found(Arc<Mutex<Vec<(u64, usize)>>>);

impl Found {
    /// The next load that has begun asks for its own key when it is dropped.
    fn probe(&self, cache: &Cache, source: &Source) {
        let (found, cache) = (self.0.clone(), cache.clone());
        *source.0.probe.lock().unwrap() = Some(Box::new(move || {
            let value = cache.get_with(&1, || NEXT);
            found.lock().unwrap().push((value, cache.in_flight().len()));
        }));
    }

    fn take(&self) -> Vec<(u64, usize)> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

#[test]
fn a_load_is_dropped_after_its_slot_is_free() {
    over_leaders(|make, method, _, told| {
        for k in 1..=STEPS {
            let ((cache, source), found) = (make(), Found::default());
            let mut leader = method.lead(&cache, &source);
            assert_eq!(polled(&mut leader, k, &source), None, "{told}");
            found.probe(&cache, &source);
            drop(leader);
            // It leads, so that nothing is in its way; and there is nothing else left.
            assert_eq!(found.take(), [(NEXT, 0)], "{told}, {k} polls");
            assert_eq!((source.begun(), cache.get(&1)), (1, Some(NEXT)), "{told}, {k} polls");
        }
    });
    for leader_first in [false, true] {
        over_pairs(|cache, source, leader, follower, told| {
            let found = Found::default();
            found.probe(cache, source);
            if leader_first {
                drop(leader);
                assert_eq!(found.take(), [], "{told}");
                drop(follower);
            } else {
                drop(follower);
                assert_eq!(found.take(), [], "{told}");
                drop(leader);
            }
            assert_eq!((found.take(), source.begun()), (vec![(NEXT, 0)], 1), "{told}");
        });
    }
}

#[test]
fn a_load_that_has_ended_is_dropped_after_its_value_is_there() {
    over_leaders(|make, method, _, told| {
        // What an attached loader awaits is dropped by the loader itself, while it runs.
        if method.is_attached() {
            return;
        }
        let ((cache, source), found) = (make(), Found::default());
        let mut leader = method.lead(&cache, &source);
        assert_eq!(polled(&mut leader, STEPS, &source), None, "{told}");
        found.probe(&cache, &source);
        assert_eq!(ended(&mut leader, &source), VALUE, "{told}");
        drop(leader);
        assert_eq!((found.take(), source.begun()), (vec![(VALUE, 0)], 1), "{told}");
    });
}

#[test]
fn a_detached_load_is_dropped_with_the_last_who_wants_it() {
    // What a write has taken the slot from goes on for those who have joined before, and for nobody else.
    type Write = fn(&Cache);
    let writes: [(&str, Write, Option<u64>); 4] = [
        ("insert", |cache| cache.insert(1, NEXT), Some(NEXT)),
        ("invalidate", |cache| cache.invalidate(&1), None),
        ("remove", |cache| assert_eq!(cache.remove(&1), None), None),
        ("invalidate_all", |cache| cache.invalidate_all(), None),
    ];
    for (write, detach, after) in writes {
        for leader_last in [false, true] {
            over_pairs(|cache, source, leader, follower, told| {
                detach(cache);
                let mut last = if leader_last {
                    drop(follower);
                    leader
                } else {
                    drop(leader);
                    follower
                };
                // It gets the value, or goes too.
                if source.0.polls.get() < STEPS {
                    assert_eq!(ended(&mut last, source), VALUE, "{told}, {write}");
                }
                drop(last);
                assert_eq!((cache.get(&1), cache.in_flight().len()), (after, 0), "{told}, {write}");
                assert_eq!(source.begun(), 1, "{told}, {write}");
            });
        }
    }
}

#[test]
fn a_batch_outlives_those_of_its_flights_that_nobody_wants() {
    // What takes their places in memory is no part of it, and does not wait for it.
    for stays in [1, 2] {
        let cache = plain::<u64, u64>().build();
        let (door, others_door) = (Door::default(), Door::default());
        let (inside, passed) = (cache.clone(), door.passed());
        let load = |_| async move {
            passed.await;
            let mut sum = 0;
            for key in 100..200 {
                sum += inside.try_get_with_async(&key, async { ok(NEXT) }).await?;
            }
            Ok::<_, quell::LoadError>([(1, sum), (2, sum)])
        };
        let mut leader = Hand::new(cache.load_many_async([1, 2], load));
        assert!(leader.poll().is_none());
        let mut follower = Hand::new(cache.try_get_with_async(&stays, async { ok(NEXT) }));
        assert!(follower.poll().is_none());
        drop(leader);
        (0..10).for_each(|_| cache.run_pending_tasks());
        let lead = |key| {
            let passed = others_door.passed();
            let mut other = Hand::new({
                let cache = cache.clone();
                async move {
                    let load = async {
                        passed.await;
                        1
                    };
                    cache.get_with_async(&key, load).await
                }
            });
            assert_eq!(other.poll(), None);
            other
        };
        let others: Vec<_> = (100..200).map(lead).collect();
        door.open();
        assert!(follower.run().is_none());
        others_door.open();
        for mut other in others {
            assert_eq!(other.run(), Some(1));
        }
        assert_eq!(follower.run().unwrap().unwrap(), 100);
    }
}

/// A cache with a blocking loader that goes by way of an executor, and what it is made of.
struct Blocking {
    cache: Sut<u64, Counted>,
    queue: Queue,
    gate: Gate,
    loads: Tally,
    alive: Tally,
}

impl Blocking {
    fn new() -> Self {
        let (queue, gate, loads, alive) =
            (Queue::default(), Gate::default(), Tally::default(), Tally::default());
        let (stop, count, live) = (gate.clone(), loads.clone(), alive.clone());
        let load = move |_: &u64| {
            let nth = count.add() as u64;
            stop.pass();
            Ok::<_, Error>(Counted::new(nth, &live))
        };
        let cache = plain().executor(queue.clone()).loader_fn(load).clock(ManualClock::new()).build();
        Self { cache, queue, gate, loads, alive }
    }

    fn call(&self) -> Hand<'_, u64> {
        Hand::new(async { self.cache.get_or_load_async(&1).await.unwrap().0 })
    }
}

#[test]
fn a_blocking_loader_whose_call_is_dropped() {
    // Before its job runs.
    let it = Blocking::new();
    it.gate.open();
    let mut call = it.call();
    assert_eq!((call.poll(), it.cache.in_flight().len(), it.queue.len()), (None, 1, 1));
    drop(call);
    assert_eq!((it.cache.in_flight().len(), it.cache.contains_key(&1)), (0, false));
    assert_eq!((it.queue.run(), it.loads.get(), it.alive.get()), (1, 0, 0), "it runs for nobody");
    // After its job has run, and before the call is polled again.
    let mut call = it.call();
    assert_eq!((call.poll(), it.queue.run(), call.is_woken(), it.alive.get()), (None, 1, true, 1));
    drop(call);
    assert_eq!((it.cache.in_flight().len(), it.cache.contains_key(&1), it.alive.get()), (0, false, 0));
    // A task has joined.
    let (mut call, mut joined) = (it.call(), it.call());
    assert_eq!((call.poll(), joined.poll()), (None, None));
    drop(call);
    assert_eq!((it.queue.run(), joined.run(), it.loads.get()), (1, Some(1), 2));
}

#[test]
fn a_blocking_loader_whose_call_is_dropped_while_it_runs() {
    let it = Blocking::new();
    thread::scope(|s| {
        let mut call = it.call();
        assert_eq!(call.poll(), None);
        let job = it.queue.take().pop().unwrap();
        let running = s.spawn(|| job.run());
        eventually(|| it.gate.arrived() == 1);
        drop(call);
        // The entry is free at once; the loader runs on, for nobody.
        assert_eq!((it.cache.in_flight().len(), it.cache.contains_key(&1)), (0, false));
        let mut next = it.call();
        assert_eq!(next.poll(), None);
        it.gate.open();
        running.join().unwrap();
        assert_eq!((it.alive.get(), next.poll()), (0, None), "the late value is nobody's");
        assert_eq!((it.queue.run(), next.run()), (1, Some(1)));
    });
}

#[test]
fn a_blocking_loader_whose_job_is_dropped_runs_in_the_call() {
    let it = Blocking::new();
    it.gate.open();
    let mut call = it.call();
    assert_eq!(call.poll(), None);
    drop(it.queue.take());
    assert_eq!((call.is_woken(), call.poll(), it.loads.get()), (true, Some(0), 1));
    // And where the executor is full.
    let refuses = |_: Job| Err(Rejected);
    let cache = plain::<u64, u64>().executor(refuses).loader_fn(|_| ok(VALUE)).build();
    assert_eq!(Hand::new(async { cache.get_or_load_async(&1).await.unwrap() }).poll(), Some(VALUE));
}

#[test]
fn the_last_waker_is_the_one_that_is_woken() {
    // While a thread lets the load on, a waiter is polled with one waker and then with another.
    for waiter_leads in [false, true] {
        for _ in 0..scaled(500, 50_000) {
            let (cache, door) = (plain::<u64, u64>().build(), Door::default());
            let load = |door: &Door| {
                let passed = door.passed();
                async move {
                    passed.await;
                    VALUE
                }
            };
            let mut leader = Hand::new(cache.get_with_async(&1, load(&door)));
            assert_eq!(leader.run(), None);
            let mut waiter = if waiter_leads {
                std::mem::replace(&mut leader, Hand::new(cache.get_with_async(&1, load(&door))))
            } else {
                Hand::new(cache.get_with_async(&1, load(&door)))
            };
            let (start, [one, two]) = (Barrier::new(2), [Arc::<Woken>::default(), Arc::<Woken>::default()]);
            thread::scope(|s| {
                let other = s.spawn(|| {
                    start.wait();
                    door.open();
                    while leader.poll().is_none() {
                        thread::yield_now();
                    }
                });
                start.wait();
                let wakers = [&one, &two].map(|woken| Waker::from(woken.clone()));
                if wakers.iter().all(|waker| waiter.poll_with(waker).is_none()) {
                    // It may be woken to poll the load, which the other one has done then.
                    eventually(|| two.take() && waiter.poll_with(&wakers[1]).is_some());
                }
                other.join().unwrap();
            });
            assert_eq!((cache.get(&1), cache.stats().loads), (Some(VALUE), 1));
        }
    }
}

/// A load that leaves its turn to others many times.
async fn yielding(times: usize) -> u64 {
    for _ in 0..times {
        yield_now().await;
    }
    VALUE
}

#[test]
fn a_leader_that_is_kept_and_never_polled_again() {
    const TIMES: usize = 100;
    let cache = plain::<u64, u64>().clock(ManualClock::new()).build();
    let never = async || -> u64 { unreachable!("it has joined") };
    // In the same task, whatever the method: nothing but the caller's own polls can take the load on.
    for (key, many) in [(1, false), (2, true)] {
        let got = block_on(async {
            let mut kept: Pin<Box<dyn Future<Output = u64> + Send>> = if many {
                Box::pin(async {
                    let load = |_| async { Ok::<_, Error>([(2, yielding(TIMES).await)]) };
                    cache.load_many_async([2], load).await.unwrap()[&2]
                })
            } else {
                Box::pin(cache.get_with_async(&1, yielding(TIMES)))
            };
            assert!(poll_once(&mut kept).await.is_pending());
            let joined = cache.get_with_async(&key, never()).await;
            let optional = cache.optionally_get_with_async(&key, async { None }).await;
            (joined, optional, kept.await)
        });
        assert_eq!(got, (VALUE, Some(VALUE), VALUE));
    }
    // In others: tasks of several runtimes, all of which have to end while the leader is kept.
    let mut kept = Hand::new(cache.get_with_async(&3, yielding(TIMES)));
    assert_eq!(kept.poll(), None);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    thread::scope(|s| {
        let cache = &cache;
        let call = move || async move { cache.get_with_async(&3, async { unreachable!() }).await };
        let bare = s.spawn(move || block_on(call()));
        let smol = s.spawn(move || smol::block_on(call()));
        let shared = cache.clone();
        let tokio = runtime.spawn(async move { shared.get_with_async(&3, async { unreachable!() }).await });
        assert_eq!((bare.join().unwrap(), smol.join().unwrap()), (VALUE, VALUE));
        assert_eq!(runtime.block_on(tokio).unwrap(), VALUE);
    });
    assert!(kept.is_woken());
    assert_eq!((kept.poll(), cache.stats().loads), (Some(VALUE), 3));
}

#[test]
fn a_load_that_yields_leaves_room_for_others() {
    const TIMES: usize = 1_000;
    // One step in a turn, for the leader and for those who have joined.
    let cache = plain::<u64, u64>().build();
    let mut leader = Hand::new(cache.get_with_async(&1, yielding(TIMES)));
    let mut follower = Hand::new(cache.get_with_async(&1, yielding(0)));
    for _ in 0..TIMES / 2 {
        assert_eq!((leader.poll(), leader.is_woken()), (None, true));
        assert_eq!((follower.poll(), follower.is_woken()), (None, true));
    }
    assert_eq!((leader.poll(), follower.poll()), (Some(VALUE), Some(VALUE)));
    // On one thread: a load that goes on until another task has had its turn, as a leader, a follower and a batch see it.
    let seen = Arc::new(AtomicBool::new(false));
    let until = |seen: &Arc<AtomicBool>| {
        let seen = seen.clone();
        async move {
            while !seen.load(Ordering::SeqCst) {
                yield_now().await;
            }
            VALUE
        }
    };
    let executor = smol::LocalExecutor::new();
    smol::block_on(executor.run(async {
        let many = async {
            let load = until(&seen);
            let load = |_: Vec<u64>| async { Ok::<_, Error>([(3, load.await)]) };
            cache.load_many_async([3], load).await.unwrap()[&3]
        };
        let tasks = [
            executor.spawn(cache.get_with_async(&2, until(&seen))),
            executor.spawn(cache.get_with_async(&2, until(&seen))),
        ];
        let many = executor.spawn(many);
        let other = executor.spawn(async { seen.store(true, Ordering::SeqCst) });
        other.await;
        for task in tasks {
            assert_eq!(task.await, VALUE);
        }
        assert_eq!(many.await, VALUE);
    }));
}

#[test]
fn the_last_one_leaves_as_a_newcomer_comes() {
    over_shapes(|builder: Builder<u64, u64>| {
        let source = Source::new(Pace::Itself);
        let cache = builder.clock(ManualClock::new()).build();
        let (rounds, start) = (scaled(1_000, 100_000), Barrier::new(3));
        thread::scope(|s| {
            let leaves = s.spawn(|| {
                for _ in 0..rounds {
                    let mut call = Hand::new(cache.get_with_async(&1, source.load(|v| v)));
                    let got = polled(&mut call, 1, &source);
                    start.wait();
                    drop(call);
                    start.wait();
                    assert_eq!(got, None);
                    cache.invalidate(&1);
                    start.wait();
                }
            });
            let task = s.spawn(|| {
                for _ in 0..rounds {
                    start.wait();
                    let load = source.load(Ok::<_, Error>);
                    assert_eq!(block_on(cache.try_get_with_async(&1, load)).unwrap(), VALUE);
                    start.wait();
                    start.wait();
                }
            });
            let thread = s.spawn(|| {
                for _ in 0..rounds {
                    start.wait();
                    assert_eq!(cache.get_with(&1, || VALUE), VALUE);
                    start.wait();
                    start.wait();
                }
            });
            for caller in [leaves, task, thread] {
                caller.join().unwrap();
            }
        });
        let begun = source.begun();
        assert!((rounds..=2 * rounds).contains(&begun), "{begun} loads have begun");
        assert_eq!((cache.in_flight().len(), cache.stats().waiters, source.alive()), (0, 0, 0));
    });
}

#[test]
fn leaders_are_aborted_in_a_row() {
    // Each has joined before the one before it goes: the load goes from hand to hand.
    let source = Source::new(Pace::FromOutside);
    let cache = cache_of(plain(), &source, Prior::Absent);
    let mut last = Method::TryGetWith.lead(&cache, &source);
    assert_eq!(last.poll(), None);
    for n in 0..100 {
        let mut next = METHODS[n % METHODS.len()].follow(&cache, &source);
        assert_eq!(next.poll(), None);
        last = next;
    }
    assert_eq!((ended(&mut last, &source), source.0.polls.get()), (VALUE, STEPS + 1));
    drop(last);
    assert_eq!((source.begun(), cache.stats().loads), (1, 1));
    // Nobody has: each leads anew.
    cache.invalidate(&1);
    for n in 0..100 {
        assert_eq!(METHODS[n % METHODS.len()].lead(&cache, &source).poll(), None);
    }
    assert_as_before(&cache, Prior::Absent, "all are aborted");
    assert_eq!(source.begun(), 101);
    // As tasks of a runtime, while one stays.
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build().unwrap();
    for _ in 0..scaled(30, 3_000) {
        cache.invalidate(&2);
        let (door, loads) = (Door::default(), Tally::default());
        let call = || {
            let (cache, door, loads) = (cache.clone(), door.clone(), loads.clone());
            async move {
                let load = async move {
                    loads.add();
                    door.passed().await;
                    VALUE
                };
                cache.get_with_async(&2, load).await
            }
        };
        let tasks: Vec<_> = (0..8).map(|_| runtime.spawn(call())).collect();
        eventually(|| cache.stats().waiters == 7 && loads.get() == 1);
        for task in &tasks[..7] {
            task.abort();
        }
        eventually(|| tasks[..7].iter().all(|task| task.is_finished()));
        door.open();
        assert_eq!(runtime.block_on(tasks.into_iter().last().unwrap()).unwrap(), VALUE);
        assert_eq!((loads.get(), cache.in_flight().len()), (1, 0));
    }
}

type Spawns = Box<dyn Fn(BoxFuture) -> Result<(), Rejected> + Send + Sync>;

/// What a spawner has been given.
#[derive(Clone, Default)]
struct Tasks(Arc<Mutex<Vec<BoxFuture>>>);

impl Tasks {
    fn take(&self) -> Vec<Hand<'static, ()>> {
        std::mem::take(&mut *self.0.lock().unwrap()).into_iter().map(Hand::new).collect()
    }

    /// A spawner that keeps what it is given, for the test to poll.
    fn spawner() -> (Spawns, Self) {
        let tasks = Self::default();
        let kept = tasks.0.clone();
        let spawner = move |task| {
            kept.lock().unwrap().push(task);
            Ok(())
        };
        (Box::new(spawner), tasks)
    }
}

/// All methods, under a spawner.
fn over_spawned(
    prior: Prior,
    spawner: impl Fn() -> (Spawns, Tasks),
    mut body: impl FnMut(&Cache, &Source, &Tasks, Method, &str),
) {
    for method in METHODS {
        for pace in PACES {
            let ((spawner, tasks), source) = (spawner(), Source::new(pace));
            let cache = cache_of(plain().spawner(spawner), &source, prior);
            body(&cache, &source, &tasks, method, &format!("{method:?}, {pace:?}"));
            assert_eq!((cache.in_flight().len(), source.alive()), (0, 0), "{method:?}, {pace:?}");
        }
    }
}

#[test]
fn a_spawner_that_refuses_or_drops_leaves_the_load_to_those_who_wait() {
    let drops = |_: BoxFuture| Ok(());
    let refuses = |_: BoxFuture| Err(Rejected);
    for refused in [false, true] {
        let spawner = || -> (Spawns, _) {
            (if refused { Box::new(refuses) } else { Box::new(drops) }, Tasks::default())
        };
        over_spawned(Prior::Absent, spawner, |cache, source, _, method, told| {
            let mut leader = method.lead(cache, source);
            assert_eq!(polled(&mut leader, 1, source), None, "{told}");
            let mut follower = method.follow(cache, source);
            assert_eq!(polled(&mut follower, 1, source), None, "{told}");
            drop(leader);
            assert_eq!(ended(&mut follower, source), VALUE, "{told}");
            drop(follower);
            assert_eq!((source.begun(), cache.get(&1)), (1, Some(VALUE)), "{told}");
        });
        // A refresh is given up, and the stale value is served.
        over_spawned(Prior::Stale, spawner, |cache, source, _, method, told| {
            if method == Method::LoadMany {
                return;
            }
            assert_eq!(method.lead(cache, source).run(), Some(BEFORE), "{told}");
            assert_as_before(cache, Prior::Stale, told);
            assert_eq!(source.begun(), 0, "{told}");
        });
    }
}

/// For one key where the load wakes itself: in one turn of a task that is for several, each may take the batch on by a step.
fn led<'a>(method: Method, cache: &'a Cache, source: &Source) -> Hand<'a, u64> {
    match source.0.pace {
        Pace::Itself => method.follow(cache, source),
        Pace::FromOutside => method.lead(cache, source),
    }
}

#[test]
fn a_spawned_load_whose_task_is_dropped_at_each_await_point() {
    for k in 0..=STEPS {
        over_spawned(Prior::Absent, Tasks::spawner, |cache, source, tasks, method, told| {
            let mut leader = led(method, cache, source);
            assert_eq!(leader.run(), None, "{told}");
            let mut task = tasks.take().pop().unwrap();
            for _ in 0..k {
                source.nudge();
                assert_eq!(task.poll(), None, "{told}");
            }
            assert_eq!(source.0.polls.get(), k, "{told}: only its task polls it");
            drop(task);
            assert!(leader.is_woken(), "{told}");
            assert_eq!(ended(&mut leader, source), VALUE, "{told}");
            drop(leader);
            assert_eq!((source.begun(), cache.get(&1)), (1, Some(VALUE)), "{told}");
        });
        // With the leader dropped at that point, too: the load goes, and its task has nothing left to do.
        over_spawned(Prior::Absent, Tasks::spawner, |cache, source, tasks, method, told| {
            let mut leader = led(method, cache, source);
            assert_eq!(leader.run(), None, "{told}");
            let mut task = tasks.take().pop().unwrap();
            for _ in 0..k {
                source.nudge();
                assert_eq!(task.poll(), None, "{told}");
            }
            let found = Found::default();
            found.probe(cache, source);
            drop(leader);
            let probed = if k > 0 { vec![(NEXT, 0)] } else { vec![] };
            assert_eq!((found.take(), source.begun()), (probed, k.min(1)), "{told}");
            assert!(k == 0 || task.is_woken(), "{told}");
            assert_eq!(task.poll(), Some(()), "{told}");
            *source.0.probe.lock().unwrap() = None;
        });
        // A refresh in the background, of which nobody waits for the end.
        over_spawned(Prior::Stale, Tasks::spawner, |cache, source, tasks, method, told| {
            if method == Method::LoadMany {
                return;
            }
            assert_eq!(method.lead(cache, source).run(), Some(BEFORE), "{told}");
            let mut task = tasks.take().pop().unwrap();
            for _ in 0..k {
                source.nudge();
                assert_eq!(task.poll(), None, "{told}");
            }
            drop(task);
            assert_as_before(cache, Prior::Stale, told);
            assert_eq!(source.begun(), k.min(1), "{told}");
        });
    }
}

#[test]
fn a_spawner_that_polls_late_and_more_often_than_it_is_asked_to() {
    over_spawned(Prior::Absent, Tasks::spawner, |cache, source, tasks, method, told| {
        let (mut leader, mut follower) = (method.lead(cache, source), method.follow(cache, source));
        for _ in 0..10 {
            assert_eq!((leader.poll(), follower.poll(), source.0.polls.get()), (None, None, 0), "{told}");
        }
        drop(leader);
        let mut task = tasks.take().pop().unwrap();
        for _ in 0..=STEPS {
            source.nudge();
            assert_eq!(follower.poll(), None, "{told}");
            let _ = task.poll();
        }
        assert!(follower.is_woken(), "{told}");
        assert_eq!(follower.poll(), Some(VALUE), "{told}");
        drop((task, follower));
        assert_eq!((source.begun(), cache.get(&1)), (1, Some(VALUE)), "{told}");
    });
}

/// What becomes of a load whose runtime is shut down while it runs.
#[cfg(feature = "tokio")]
mod shutdown {
    use super::*;
    use std::time::Duration;
    use tokio::runtime::{Builder as Tokio, Runtime};

    const LEASE: Duration = secs(9);

    fn runtimes() -> [Runtime; 2] {
        [Tokio::new_current_thread(), Tokio::new_multi_thread()]
            .map(|mut builder| builder.worker_threads(2).enable_time().build().unwrap())
    }

    /// A load that is led on a runtime and has begun.
    fn led_on(runtime: &Runtime, cache: &Cache, door: &Door, loads: &Tally) {
        let (cache, door, begun) = (cache.clone(), door.clone(), loads.clone());
        runtime.spawn(async move {
            let load = async move {
                begun.add();
                door.passed().await;
                VALUE
            };
            cache.get_with_async(&1, load).await
        });
        runtime.block_on(async {
            while loads.get() == 0 {
                yield_now().await;
            }
        });
    }

    #[test]
    fn a_task_elsewhere_goes_on_with_it() {
        for runtime in runtimes() {
            let (cache, door, loads) =
                (plain().clock(ManualClock::new()).build(), Door::default(), Tally::default());
            led_on(&runtime, &cache, &door, &loads);
            let mut waiter = Hand::new(cache.get_with_async(&1, async { unreachable!() }));
            assert_eq!(waiter.run(), None);
            drop(runtime);
            assert_eq!((waiter.is_woken(), waiter.run()), (true, None));
            door.open();
            assert_eq!((waiter.run(), loads.get(), cache.stats().loads), (Some(VALUE), 1, 1));
        }
    }

    #[test]
    fn a_thread_waits_for_the_lease_and_leads() {
        // What the load awaits may be the runtime's, so that a thread does not poll it.
        for runtime in runtimes() {
            let (clock, door, loads) = (ManualClock::new(), Door::default(), Tally::default());
            let cache = plain().lease(LEASE).clock(clock.clone()).build();
            led_on(&runtime, &cache, &door, &loads);
            thread::scope(|s| {
                let waiter = s.spawn(|| cache.get_with(&1, || NEXT));
                until_waiting(&cache, 1);
                drop(runtime);
                door.open();
                clock.advance(LEASE);
                assert_eq!(waiter.join().unwrap(), NEXT);
            });
            assert_eq!((loads.get(), cache.in_flight().len()), (1, 0));
        }
    }

    #[test]
    fn nobody_waits() {
        for runtime in runtimes() {
            let (cache, door, loads) = (plain().build(), Door::default(), Tally::default());
            led_on(&runtime, &cache, &door, &loads);
            drop(runtime);
            assert_eq!((cache.in_flight().len(), cache.get_with(&1, || NEXT)), (0, NEXT));
        }
    }

    #[test]
    fn a_wait_under_a_runtime_that_is_gone_has_its_deadline_all_the_same() {
        // By real time: a short one, which ends.
        let (cache, door) = (plain::<u64, u64>().build(), Door::default());
        let passed = door.passed();
        let mut leader = Hand::new(cache.get_with_async(&1, async move {
            passed.await;
            VALUE
        }));
        assert_eq!(leader.run(), None);
        for runtime in runtimes() {
            let ask = cache.ask(&1).wait_timeout(Duration::from_millis(30));
            let mut waiter = Hand::new(ask.try_load_with_async(async { ok(NEXT) }));
            let handle = runtime.handle().clone();
            {
                let _under = handle.enter();
                assert!(waiter.poll().is_none());
            }
            drop(runtime);
            let _under = handle.enter();
            let got = block_on(waiter.future_mut());
            assert_eq!(got.unwrap_err().kind(), LoadErrorKind::TimedOut);
        }
        door.open();
        assert_eq!(leader.run(), Some(VALUE));
    }
}
