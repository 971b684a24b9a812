//! Who leads, who waits, where they run, and what becomes of the load: one body, and one table of what each gets.
//! `cargo test --test matrix`; the same with `--features tokio`, where each load is by itself a task of the runtime that
//! its leader is under.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads and tasks with what is at hand"
)]

mod common;

use common::task::{Door, block_on, poll_once};
use common::{Builder, Sut, Tally, eventually, over_shapes, plain, secs, until_waiting};
use quell::{Answer, BoxFuture, LoadError, LoadErrorKind, ManualClock, Provenance};
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::task::Poll;
use std::thread::{self, JoinHandle};
use std::time::Duration;

type Error = std::io::Error;

const LIMIT: Duration = secs(30);
const LEASE: Duration = secs(9);
const PATIENCE: Duration = secs(2);

/// Where tasks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Home {
    /// No runtime: each task has a thread, which polls nothing else.
    Bare,
    Smol,
    TokioCurrent,
    TokioMulti,
}

const HOMES: [Home; 4] = [Home::Bare, Home::Smol, Home::TokioCurrent, Home::TokioMulti];

/// A home, ready to take tasks. Dropped, it waits for its threads.
struct Runner {
    spawn: Arc<dyn Fn(BoxFuture) + Send + Sync>,
    /// Closed by the drop.
    stop: Option<smol::channel::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Home {
    fn open(self) -> Runner {
        let (stop, stopped) = smol::channel::bounded::<()>(1);
        let (spawn, thread): (Arc<dyn Fn(BoxFuture) + Send + Sync>, _) = match self {
            Self::Bare => (
                Arc::new(|task: BoxFuture| drop(thread::spawn(move || block_on(task)))),
                thread::spawn(|| ()),
            ),
            Self::Smol => {
                let executor = Arc::new(smol::Executor::new());
                let runs = executor.clone();
                let run = move || _ = smol::block_on(runs.run(stopped.recv()));
                (Arc::new(move |task: BoxFuture| executor.spawn(task).detach()), thread::spawn(run))
            }
            Self::TokioCurrent | Self::TokioMulti => {
                let mut builder = if self == Self::TokioCurrent {
                    tokio::runtime::Builder::new_current_thread()
                } else {
                    tokio::runtime::Builder::new_multi_thread()
                };
                let runtime = builder.worker_threads(2).enable_time().build().unwrap();
                let handle = runtime.handle().clone();
                let run = move || _ = runtime.block_on(stopped.recv());
                (Arc::new(move |task: BoxFuture| drop(handle.spawn(task))), thread::spawn(run))
            }
        };
        Runner { spawn, stop: Some(stop), thread: Some(thread) }
    }

    /// Whether a load that is led here is a task of its own here, with no spawner.
    fn makes_tasks(self) -> bool {
        cfg!(feature = "tokio") && matches!(self, Self::TokioCurrent | Self::TokioMulti)
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking());
        }
    }
}

/// Who calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum As {
    Thread,
    Task(Home),
}

/// A thread, and a task of each home.
const CALLERS: [As; 5] = [
    As::Thread,
    As::Task(Home::Bare),
    As::Task(Home::Smol),
    As::Task(Home::TokioCurrent),
    As::Task(Home::TokioMulti),
];

/// By which method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    TryGetWith,
    /// `ask(..).try_load_with`, which tells where the value came from.
    Ask,
}

/// What becomes of the leader's load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Value,
    Error,
    Panic,
    /// The leader's call is dropped in the middle.
    Drop,
    /// It takes longer than its lease, and ends with a value after all.
    Hang,
}

/// What a caller got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Got {
    Loaded(u32),
    Joined(u32),
    /// By a method that does not tell where from.
    Value(u32),
    Failed,
    TimedOut,
    Panicked,
    /// Nothing: its call was dropped.
    Dropped,
    /// Something else.
    Unlike,
}

impl Got {
    /// As a caller by this method sees it.
    fn by(self, method: Method) -> Self {
        match (method, self) {
            (Method::TryGetWith, Self::Loaded(value) | Self::Joined(value)) => Self::Value(value),
            _ => self,
        }
    }

    fn answer(got: Result<Answer<u32>, LoadError>) -> Self {
        match got.map(|answer| (answer.value, answer.provenance)).map_err(|error| error.kind()) {
            Ok((value, Provenance::Loaded { .. })) => Self::Loaded(value),
            Ok((value, Provenance::Joined { .. })) => Self::Joined(value),
            Err(LoadErrorKind::Failed) => Self::Failed,
            Err(LoadErrorKind::TimedOut) => Self::TimedOut,
            _ => Self::Unlike,
        }
    }

    fn value(got: Result<u32, LoadError>) -> Self {
        let kind = |error: LoadError| {
            if error.kind() == LoadErrorKind::Failed { Self::Failed } else { Self::Unlike }
        };
        got.map_or_else(kind, Self::Value)
    }
}

/// The load of a caller; the value says whose.
#[derive(Clone)]
struct Load {
    value: u32,
    fate: Fate,
    door: Door,
    begun: Tally,
}

impl Load {
    fn end(&self) -> Result<u32, Error> {
        match self.fate {
            Fate::Error => Err(Error::other("boom")),
            Fate::Panic => resume_unwind(Box::new("boom")),
            Fate::Value | Fate::Drop | Fate::Hang => Ok(self.value),
        }
    }

    fn on_thread(&self) -> Result<u32, Error> {
        self.begun.add();
        self.door.pass();
        self.end()
    }

    async fn on_task(self) -> Result<u32, Error> {
        self.begun.add();
        self.door.passed().await;
        self.end()
    }
}

fn call(cache: &Sut<u32, u32>, method: Method, load: &Load) -> Got {
    match method {
        Method::TryGetWith => Got::value(cache.try_get_with(&1, || load.on_thread())),
        Method::Ask => Got::answer(cache.ask(&1).try_load_with(|| load.on_thread())),
    }
}

async fn call_async(cache: Sut<u32, u32>, method: Method, load: Load) -> Got {
    match method {
        Method::TryGetWith => Got::value(cache.try_get_with_async(&1, load.on_task()).await),
        Method::Ask => Got::answer(cache.ask(&1).try_load_with_async(load.on_task()).await),
    }
}

/// A call under way.
struct Caller {
    got: Receiver<Got>,
    abort: Door,
}

impl Caller {
    #[track_caller]
    fn got(&self) -> Got {
        self.got.recv_timeout(LIMIT).expect("the call ends")
    }
}

/// The call, until it is aborted: then it is dropped where it runs.
async fn until_aborted(call: impl Future<Output = Got> + Send, abort: Door, tell: Sender<Got>) {
    let got = {
        let (mut call, mut aborted) = (pin!(call), abort.passed());
        poll_fn(|cx| {
            if pin!(&mut aborted).poll(cx).is_ready() {
                return Poll::Ready(Got::Dropped);
            }
            let polled = catch_unwind(AssertUnwindSafe(|| call.as_mut().poll(cx)));
            polled.unwrap_or(Poll::Ready(Got::Panicked))
        })
        .await
    };
    let _ = tell.send(got);
}

/// All homes.
struct Homes([Runner; 4]);

impl Homes {
    fn open() -> Self {
        Self(HOMES.map(Home::open))
    }

    fn spawn(&self, home: Home) -> Arc<dyn Fn(BoxFuture) + Send + Sync> {
        self.0[home as usize].spawn.clone()
    }

    /// Calls, and does not wait for it.
    fn start(&self, who: As, cache: &Sut<u32, u32>, method: Method, load: &Load) -> Caller {
        let ((tell, got), abort) = (channel(), Door::default());
        let (cache, load) = (cache.clone(), load.clone());
        match who {
            As::Thread => drop(thread::spawn(move || {
                let called = catch_unwind(AssertUnwindSafe(|| call(&cache, method, &load)));
                let _ = tell.send(called.unwrap_or(Got::Panicked));
            })),
            As::Task(home) => {
                self.spawn(home)(Box::pin(until_aborted(
                    call_async(cache, method, load),
                    abort.clone(),
                    tell,
                )));
            }
        }
        Caller { got, abort }
    }
}

/// What comes of it, for everybody.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    leader: Got,
    waiter: Got,
    loads: u64,
    takeovers: u64,
    cached: Option<u32>,
}

/// The leader's load gives 1, that of the waiter, should it come to lead, 2. The same for threads and tasks, in all homes, by
/// all methods, and whoever polls the load; but a thread's call cannot be dropped.
#[rustfmt::skip]
const TABLE: [(Fate, Outcome); 5] = [
    (Fate::Value, Outcome { leader: Got::Loaded(1), waiter: Got::Joined(1), loads: 1, takeovers: 0, cached: Some(1) }),
    (Fate::Error, Outcome { leader: Got::Failed,    waiter: Got::Failed,    loads: 1, takeovers: 0, cached: None }),
    (Fate::Panic, Outcome { leader: Got::Panicked,  waiter: Got::Loaded(2), loads: 2, takeovers: 0, cached: Some(2) }),
    (Fate::Drop,  Outcome { leader: Got::Dropped,   waiter: Got::Joined(1), loads: 1, takeovers: 0, cached: Some(1) }),
    (Fate::Hang,  Outcome { leader: Got::Loaded(1), waiter: Got::Loaded(2), loads: 2, takeovers: 1, cached: Some(2) }),
];

/// One leader, one waiter, and what becomes of the load.
fn outcome(
    builder: Builder<u32, u32>,
    homes: &Homes,
    (leads, waits): (As, As),
    method: Method,
    fate: Fate,
) -> Outcome {
    let clock = ManualClock::new();
    let cache = builder.lease(LEASE).clock(clock.clone()).build();
    let (door, open, begun) = (Door::default(), Door::default(), Tally::default());
    open.open();
    let load = Load { value: 1, fate, door: door.clone(), begun: begun.clone() };
    let leader = homes.start(leads, &cache, method, &load);
    eventually(|| begun.get() == 1);
    let load = Load { value: 2, fate: Fate::Value, door: open, begun: begun.clone() };
    let waiter = homes.start(waits, &cache, method, &load);
    until_waiting(&cache, 1);
    let (leader, waiter) = match fate {
        Fate::Drop => {
            leader.abort.open();
            let dropped = leader.got();
            door.open();
            (dropped, waiter.got())
        }
        Fate::Hang => {
            clock.advance(LEASE);
            let waiter = waiter.got();
            // The load that hangs is under way still, and is nobody else's.
            assert_eq!((cache.get(&1), cache.in_flight().len()), (Some(2), 1));
            door.open();
            (leader.got(), waiter)
        }
        Fate::Value | Fate::Error | Fate::Panic => {
            door.open();
            (leader.got(), waiter.got())
        }
    };
    eventually(|| cache.in_flight().is_empty());
    let stats = cache.stats();
    assert_eq!((begun.get() as u64, stats.waiters), (stats.loads, 0));
    Outcome { leader, waiter, loads: stats.loads, takeovers: stats.takeovers, cached: cache.get(&1) }
}

fn check(builder: impl Fn() -> Builder<u32, u32>, homes: &Homes, callers: (As, As), told: &str) {
    for method in [Method::TryGetWith, Method::Ask] {
        for (fate, expected) in TABLE {
            if callers.0 == As::Thread && fate == Fate::Drop {
                continue;
            }
            let expected = Outcome {
                leader: expected.leader.by(method),
                waiter: expected.waiter.by(method),
                ..expected
            };
            let seen = outcome(builder(), homes, callers, method, fate);
            assert_eq!(seen, expected, "{callers:?} by {method:?}, {fate:?}, {told}");
        }
    }
}

fn pairs() -> impl Iterator<Item = (As, As)> {
    CALLERS.into_iter().flat_map(|leads| CALLERS.map(|waits| (leads, waits)))
}

#[test]
fn whoever_polls_the_load() {
    let homes = Homes::open();
    for callers in pairs() {
        check(plain, &homes, callers, "no spawner");
    }
}

#[test]
fn the_load_is_a_task_of_its_own() {
    let homes = Homes::open();
    for home in HOMES {
        for callers in pairs() {
            let spawn = homes.spawn(home);
            let builder = || {
                let spawn = spawn.clone();
                plain().spawner(move |task| {
                    spawn(task);
                    Ok(())
                })
            };
            check(builder, &homes, callers, &format!("spawned on {home:?}"));
        }
    }
}

#[test]
fn in_caches_of_all_shapes() {
    let homes = Homes::open();
    let callers = [As::Thread, As::Task(Home::Smol), As::Task(Home::TokioMulti)];
    for (leads, waits) in callers.into_iter().flat_map(|leads| callers.map(|waits| (leads, waits))) {
        for (fate, expected) in TABLE {
            if leads == As::Thread && fate == Fate::Drop {
                continue;
            }
            over_shapes(|builder: Builder<u32, u32>| {
                let seen = outcome(builder, &homes, (leads, waits), Method::Ask, fate);
                assert_eq!(seen, expected, "{leads:?}, {waits:?}, {fate:?}");
            });
        }
    }
}

/// What a thread in a home of one thread waits for, which blocks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    /// The load's value.
    Value,
    /// The end of its own patience.
    Patience,
    /// The end of the lease.
    Lease,
}

/// What an impossible wait comes to: the thread blocks the only one that could poll the load. If the leader stays, it is that
/// task; if it is gone, it is the load's own task, if it has one, or else the thread polls the load itself.
#[rustfmt::skip]
const BLOCKED: [(bool, bool, Until, Outcome); 5] = [
    // The leader stays, the load has a task of its own or not.
    (true, true, Until::Patience, Outcome { leader: Got::Loaded(1), waiter: Got::TimedOut, loads: 1, takeovers: 0, cached: Some(1) }),
    (true, true, Until::Lease, Outcome { leader: Got::Loaded(1), waiter: Got::Loaded(2), loads: 2, takeovers: 1, cached: Some(2) }),
    // The leader is gone, the load has a task of its own.
    (false, true, Until::Patience, Outcome { leader: Got::Dropped, waiter: Got::TimedOut, loads: 1, takeovers: 0, cached: None }),
    // The last who waits is gone when it looks again, so there is nothing left to take over.
    (false, true, Until::Lease, Outcome { leader: Got::Dropped, waiter: Got::Loaded(2), loads: 2, takeovers: 0, cached: Some(2) }),
    // The leader is gone, the load has no task.
    (false, false, Until::Value, Outcome { leader: Got::Dropped, waiter: Got::Joined(1), loads: 1, takeovers: 0, cached: Some(1) }),
];

fn blocked(homes: &Homes, home: Home, spawns: bool, stays: bool, until: Until) -> Outcome {
    let (clock, spawn) = (ManualClock::new(), homes.spawn(home));
    let builder = plain::<u32, u32>().lease(LEASE).clock(clock.clone());
    let builder = if spawns {
        builder.spawner(move |task| {
            spawn(task);
            Ok(())
        })
    } else {
        builder
    };
    let cache = builder.build();
    let (door, open) = (Door::default(), Door::default());
    open.open();
    let load =
        |value, door: &Door| Load { value, fate: Fate::Value, door: door.clone(), begun: Tally::default() };
    let (lead, follow) = (load(1, &door), load(2, &open));
    let ((tell, told), (hand, handed), shared) = (channel(), channel(), cache.clone());
    homes.spawn(home)(Box::pin(async move {
        let mut leader = Some(Box::pin(call_async(shared.clone(), Method::Ask, lead)));
        assert!(poll_once(leader.as_mut().unwrap()).await.is_pending());
        if !stays {
            // To be dropped elsewhere, once the thread waits.
            let _ = hand.send(leader.take());
        }
        let ask = shared.ask(&1);
        let ask = if until == Until::Patience { ask.wait_timeout(PATIENCE) } else { ask };
        let _ = tell.send(Got::answer(ask.try_load_with(|| follow.on_thread())));
        let _ = tell.send(match leader {
            Some(leader) => leader.await,
            None => Got::Dropped,
        });
    }));
    until_waiting(&cache, 1);
    if !stays {
        drop(handed.recv_timeout(LIMIT).expect("the leader comes"));
    }
    match until {
        Until::Value => door.open(),
        Until::Patience => clock.advance(PATIENCE),
        Until::Lease => clock.advance(LEASE),
    }
    let waiter = told.recv_timeout(LIMIT).expect("the wait ends");
    door.open();
    let leader = told.recv_timeout(LIMIT).expect("the leader ends");
    eventually(|| cache.in_flight().is_empty());
    let stats = cache.stats();
    Outcome { leader, waiter, loads: stats.loads, takeovers: stats.takeovers, cached: cache.get(&1) }
}

#[test]
fn a_thread_that_blocks_who_would_poll_the_load() {
    let homes = Homes::open();
    for home in [Home::Bare, Home::Smol, Home::TokioCurrent] {
        for spawns in [false, true] {
            // A task of a bare home has a thread of its own, which nobody blocks.
            if spawns && home == Home::Bare {
                continue;
            }
            let has_task = spawns || home.makes_tasks();
            for (stays, tasks, until, expected) in BLOCKED {
                if stays || tasks == has_task {
                    let seen = blocked(&homes, home, spawns, stays, until);
                    assert_eq!(seen, expected, "{home:?}, spawns: {spawns}, stays: {stays}, until {until:?}");
                }
            }
        }
    }
}
