//! Models of the front of tasks: calls as a user makes them, of two threads or three on one key.
//!
//! Waits have no limit here, so that a lost wake-up is a deadlock, which ends the process.
//!
//! | model | red when |
//! |---|---|
//! | `a_task_joins_a_load` | a task has no second look after listening |
//! | `two_tasks_are_one_load` | none of its own: two who claim |
//! | `a_leader_goes_and_a_task_goes_on` | the last one who goes gives nothing up; a closed flight is left in its slot |
//! | `a_leader_goes_and_a_thread_goes_on` | a thread that is left is not told, or does not poll |
//! | `a_leader_polls_and_goes` | who waits is not told of a wake during a poll; a task that has had its turn is not woken |
//! | `all_who_wait_go` | none of its own: two who go |
//! | `an_insert_meets_a_poll`, `an_invalidation_meets_a_poll`, `a_takeover_meets_a_poll` | `mine` is not asked |
//! | `a_task_of_its_own_ends_a_load` | its own caller is not told that a load has ended |
//! | `a_task_of_its_own_is_dropped` | nobody is told of it |
//! | `a_caller_goes_while_its_own_task_polls` | what nobody wants is forgotten after a poll |
//! | `a_removal_meets_a_load` | the fence between the claim and the load's future is missing, or the remover's |
//!
//! A call that leads is polled once before its threads begin: what comes before is for the models of the engine, and would
//! be dear here.

use super::*;
use crate::clock::ManualClock;
use crate::config::CacheBuilder;
use crate::executor::BoxFuture;
use crate::hash::DefaultHashBuilder;
use crate::primitive::UnsafeCell as Watched;
use crate::primitive::atomic::{AtomicU64, Ordering};
use crate::primitive::epoch::Participant;
use crate::primitive::model::{Census, FEW, Pins, Value, check, spawn};
use loom::future::block_on;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

const KEY: u8 = 7;
const LEASE: Duration = Duration::from_secs(1);

/// The memory of the source, which only the one who polls may touch.
struct Source(Watched<u64>);

// SAFETY: a model watches it: loom reports a race where it would be one.
unsafe impl Send for Source {}
// SAFETY: as above.
unsafe impl Sync for Source {}

type Builder = CacheBuilder<u8, Value>;
type Begun = Pin<Box<dyn Future<Output = u64>>>;

#[derive(Clone)]
struct Fixture {
    cache: Cache<u8, Value>,
    clock: ManualClock,
    census: Census,
    source: Arc<Source>,
}

impl Fixture {
    fn new() -> Self {
        Self::with(|builder| builder)
    }

    fn with(set: impl FnOnce(Builder) -> Builder) -> Self {
        let clock = ManualClock::new();
        let builder = Cache::builder().shards(1).hasher(DefaultHashBuilder::with_seed(1));
        Self {
            cache: set(builder.clock(clock.clone()).lease(LEASE)).build(),
            clock,
            census: Census::default(),
            source: Arc::new(Source(Watched::new(0))),
        }
    }

    /// A load that waits `turns` times before it is ready, and has its task woken at once.
    fn load(&self, number: u64, mut turns: usize) -> impl Future<Output = Value> + Send + use<> {
        let (census, source) = (self.census.clone(), self.source.clone());
        poll_fn(move |cx| {
            // SAFETY: loom reports a poll that runs at the same time before this writes.
            source.0.with_mut(|loads| unsafe { *loads += u64::from(turns == 0) });
            if turns == 0 {
                return Poll::Ready(census.value(number));
            }
            turns -= 1;
            cx.waker().wake_by_ref();
            Poll::Pending
        })
    }

    fn get_with(&self, number: u64, turns: usize) -> u64 {
        block_on(self.cache.get_with_async(&KEY, self.load(number, turns))).number()
    }

    /// A call that has been polled once.
    fn begun(&self, number: u64, turns: usize) -> Begun {
        let f = self.clone();
        let mut call: Begun =
            Box::pin(async move { f.cache.get_with_async(&KEY, f.load(number, turns)).await.number() });
        assert_eq!(once(call.as_mut()), None);
        call
    }

    fn get(&self) -> Option<u64> {
        self.cache.get(&KEY).map(|value| value.number())
    }

    fn loads(&self) -> u64 {
        // SAFETY: loom reports a poll that runs at the same time before this reads.
        self.source.0.with(|loads| unsafe { *loads })
    }

    /// Ends the cache, and sees that nothing is left.
    fn end(self) {
        assert_eq!(self.cache.stats().in_flight, 0, "a flight is left");
        assert_eq!(self.cache.len(), usize::from(self.get().is_some()));
        let census = self.census.clone();
        drop(self);
        assert_eq!(census.count(), 0, "values leaked");
    }
}

/// Polls once.
fn once<F: Future + ?Sized>(mut future: Pin<&mut F>) -> Option<F::Output> {
    block_on(poll_fn(|cx| {
        Poll::Ready(match future.as_mut().poll(cx) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        })
    }))
}

/// A task leads and has polled its load once, while another one comes.
#[test]
fn a_task_joins_a_load() {
    check("a task joins a load", 2, FEW, || {
        let pins: Pins = Participant::lasting;
        pins().adopt();
        let f = Fixture::new();
        let leader = f.begun(1, 1);
        let leader = spawn(pins, move || block_on(leader));
        let other = spawn(pins, {
            let f = f.clone();
            move || f.get_with(2, 0)
        });
        assert_eq!((leader.join().unwrap(), other.join().unwrap()), (1, 1));
        assert_eq!((f.loads(), f.get()), (1, Some(1)), "what was shared is stored");
        f.end();
    });
}

/// Two who come at the same time.
#[test]
fn two_tasks_are_one_load() {
    check("two tasks are one load", 1, FEW, || {
        let pins: Pins = Participant::lasting;
        pins().adopt();
        let f = Fixture::new();
        let callers = [1, 2].map(|number| {
            let f = f.clone();
            spawn(pins, move || f.get_with(number, 0))
        });
        let [one, two] = callers.map(|caller| caller.join().unwrap());
        assert_eq!((one, f.loads(), f.get()), (two, 1, Some(one)));
        f.end();
    });
}

/// A leader goes after its first poll, while another one comes: it joins and goes on with the same load, or begins its own.
/// Nothing is left of either.
fn a_leader_goes(name: &str, pins: Pins, other: fn(&Fixture) -> u64) {
    check(name, 2, FEW, move || {
        pins().adopt();
        let f = Fixture::new();
        let leader = f.begun(1, 1);
        let leader = spawn(pins, move || drop(leader));
        let other = spawn(pins, {
            let f = f.clone();
            move || other(&f)
        });
        leader.join().unwrap();
        let got = other.join().unwrap();
        assert!(matches!(got, 1 | 2));
        assert_eq!((f.loads(), f.get()), (1, Some(got)));
        f.end();
    });
}

#[test]
fn a_leader_goes_and_a_task_goes_on() {
    a_leader_goes("a leader goes and a task goes on", Participant::strict, |f| f.get_with(2, 0));
}

#[test]
fn a_leader_goes_and_a_thread_goes_on() {
    a_leader_goes("a leader goes and a thread goes on", Participant::lasting, |f| {
        let value = f.cache.get_with(&KEY, || {
            // SAFETY: loom reports a poll that runs at the same time before this writes.
            f.source.0.with_mut(|loads| unsafe { *loads += 1 });
            f.census.value(2)
        });
        value.number()
    });
}

/// A leader polls once more and goes, while one who has joined sleeps or polls.
#[test]
fn a_leader_polls_and_goes() {
    check("a leader polls and goes", 1, FEW, || {
        let pins: Pins = Participant::lasting;
        pins().adopt();
        let f = Fixture::new();
        let (mut leader, other) = (f.begun(1, 3), f.begun(2, 0));
        let leader = spawn(pins, move || _ = once(leader.as_mut()));
        let other = spawn(pins, move || block_on(other));
        leader.join().unwrap();
        assert_eq!((other.join().unwrap(), f.loads()), (1, 1));
        f.end();
    });
}

/// Both who share a load go.
#[test]
fn all_who_wait_go() {
    check("all who wait go", 2, FEW, || {
        let pins: Pins = Participant::strict;
        pins().adopt();
        let f = Fixture::new();
        [f.begun(1, 3), f.begun(2, 0)]
            .map(|call| spawn(pins, move || drop(call)))
            .into_iter()
            .for_each(|caller| caller.join().unwrap());
        assert_eq!((f.loads(), f.get()), (0, None));
        f.end();
    });
}

/// A write meets a load that a task polls: nothing of the load is stored, and its own caller gets its value.
fn a_write_meets_a_poll(name: &str, write: fn(&Fixture), last: Option<u64>) {
    check(name, 2, FEW, move || {
        let pins: Pins = Participant::strict;
        pins().adopt();
        let f = Fixture::new();
        let loader = f.begun(1, 1);
        let loader = spawn(pins, move || block_on(loader));
        let writer = spawn(pins, {
            let f = f.clone();
            move || {
                write(&f);
                assert_ne!(f.get(), Some(1), "loaded before the write");
            }
        });
        writer.join().unwrap();
        assert_eq!((loader.join().unwrap(), f.get()), (1, last));
        f.end();
    });
}

#[test]
fn an_insert_meets_a_poll() {
    a_write_meets_a_poll("an insert meets a poll", |f| f.cache.insert(KEY, f.census.value(2)), Some(2));
}

#[test]
fn an_invalidation_meets_a_poll() {
    a_write_meets_a_poll("an invalidation meets a poll", |f| f.cache.invalidate(&KEY), None);
}

/// The lease of a load that a task leads is over: another one takes over while the first comes to its end.
#[test]
fn a_takeover_meets_a_poll() {
    check("a takeover meets a poll", 2, FEW, || {
        let pins: Pins = Participant::strict;
        pins().adopt();
        let f = Fixture::new();
        let late = f.begun(1, 1);
        f.clock.advance(LEASE);
        let late = spawn(pins, move || block_on(late));
        let taker = spawn(pins, {
            let f = f.clone();
            // Both loads may run at one time, so that this one has nothing to do with the source.
            let load = f.census.value(2);
            move || block_on(f.cache.get_with_async(&KEY, async move { load })).number()
        });
        let (late, got) = (late.join().unwrap(), taker.join().unwrap());
        assert_eq!((late, f.get()), (1, Some(got)), "its own caller gets it, and nothing older is there");
        f.end();
    });
}

/// A call that has been polled once, and the task of its load's own.
fn begun_with_task(turns: usize) -> (Fixture, Begun, BoxFuture) {
    let tasks = Arc::new(Mutex::new(Vec::new()));
    let f = Fixture::with(|builder| {
        let tasks = tasks.clone();
        builder.spawner(move |task: BoxFuture| {
            tasks.lock().unwrap().push(task);
            Ok(())
        })
    });
    let caller = f.begun(1, turns);
    let task = tasks.lock().unwrap().pop().expect("it was spawned");
    (f, caller, task)
}

/// Its own task polls a load once and is dropped, as a runtime does that ends: who waits goes on, or gets what it came to.
fn its_own_task_polls(name: &str, turns: usize) {
    check(name, 2, FEW, move || {
        let pins: Pins = Participant::lasting;
        pins().adopt();
        let (f, caller, mut task) = begun_with_task(turns);
        let task = spawn(pins, move || _ = once(task.as_mut()));
        let caller = spawn(pins, move || block_on(caller));
        task.join().unwrap();
        assert_eq!(caller.join().unwrap(), 1);
        assert_eq!((f.loads(), f.get()), (1, Some(1)));
        f.end();
    });
}

#[test]
fn a_task_of_its_own_ends_a_load() {
    its_own_task_polls("a task of its own ends a load", 0);
}

#[test]
fn a_task_of_its_own_is_dropped() {
    its_own_task_polls("a task of its own is dropped", 1);
}

/// The only caller goes while a task of its own polls: the load goes with the one who is later.
#[test]
fn a_caller_goes_while_its_own_task_polls() {
    check("a caller goes while its own task polls", 2, FEW, || {
        let pins: Pins = Participant::strict;
        pins().adopt();
        let (f, caller, mut task) = begun_with_task(3);
        let task = spawn(pins, move || _ = once(task.as_mut()));
        let caller = spawn(pins, move || drop(caller));
        task.join().unwrap();
        caller.join().unwrap();
        assert_eq!((f.loads(), f.get()), (0, None));
        f.end();
    });
}

/// A caller changes the source and removes the key; a task loads it meanwhile. Nothing but the two fences orders them
/// where the key is absent.
#[test]
fn a_removal_meets_a_load() {
    check("a removal meets a load", 3, FEW, || {
        let pins = Participant::lasting;
        pins().adopt();
        let f = Fixture::new();
        let source = Arc::new(AtomicU64::new(1));
        let loader = spawn(pins, {
            let (f, source) = (f.clone(), source.clone());
            let census = f.census.clone();
            // Relaxed: what the cache promises must come from its own fences.
            let load = async move { census.value(source.load(Ordering::Relaxed)) };
            move || drop(block_on(f.cache.get_with_async(&KEY, load)))
        });
        // Relaxed: as above.
        source.store(2, Ordering::Relaxed);
        f.cache.invalidate(&KEY);
        loader.join().unwrap();
        assert_ne!(f.get(), Some(1), "loaded before the removal, and there after it");
        f.end();
    });
}
