//! Loom models of the word of what several may poll: one at a time has it, no wake-up is lost, and it goes once.
//!
//! Waits have no limit here, so that a lost wake-up is a deadlock, which ends the process. What is held is watched, so that
//! two who have it unordered are reported. What it waits for is read Relaxed: only the word brings it.
//!
//! What turns each model red; `.ci/mutants` applies it:
//!
//! | model | mutation |
//! |---|---|
//! | `a_wake_meets_a_task`, `a_wake_meets_a_thread` | a wake is not released, or a poll does not acquire; a pause forgets a wake; nobody is told of a wake |
//! | `two_poll` | two have it at one time; a store in place of the CAS of `begin`; what a poller leaves is not released |
//! | `a_wake_during_a_poll_is_told` | a pause does not tell of a wake |
//! | `a_cancel_meets_two_polls` | it is taken from the hands of a poller, or left there; a store in place of the CAS of `change`; what is taken is not acquired |
//! | `an_end_meets_an_orphaning` | an end does not see that its caller has gone; it is taken before it has ended |
//! | `an_end_meets_its_caller` | it is taken before it has ended; an end leaves no mark; what is taken is not acquired |
//! | `an_end_meets_a_late_wake` | what has ended is polled |
//! | `a_task_of_its_own_is_dropped` | it is not to be polled then; nobody is told; others poll as long as it is there |
//! | `a_taking_back_meets_the_task` | it is taken back from a task that has polled it |
//! | `the_last_task_meets_the_end_of_its_own_task` | a change is Relaxed; what has a task of its own is taken out |
//! | `a_put_meets_a_task`, `a_put_meets_a_thread` | what is put in is not released, or not acquired; it is not to be polled; a task has no second look after listening |

use super::*;
use crate::clock::Moment;
use crate::flight::models::{Figure, time};
use crate::flight::wait::{Waiter, WaitingTask, park, rest};
use crate::primitive::Arc;
use crate::primitive::atomic::fence;
use crate::primitive::epoch::Participant;
use crate::primitive::model::{Census, FEW, Value, check, spawn};
use crate::primitive::park::Bell;
use loom::future::block_on;
use std::task::{Context, Poll};

/// What is held: a load that has ended when what it waits for has come.
struct Load {
    value: Value,
    ended: bool,
}

/// Whose waker the load has given away.
const OWN: usize = 1;
const SHARED: usize = 2;

struct Shared {
    drive: Drive<Load>,
    bell: Bell,
    /// What the load waits for.
    came: AtomicUsize,
    /// Whether it is brought to whoever's waker was given away. Else the word brings it.
    by_waker: bool,
    waker: AtomicUsize,
    /// For those who have joined.
    outcome: AtomicUsize,
    /// How often the load has been taken out.
    gone: Figure,
    /// Whether the task of its own is there.
    own_task: Figure,
    census: Census,
}

const TASK: Put = Put { spawned: false, orphaned: true, threads: Threads::IfNoTask };

impl Shared {
    fn empty(came: usize, by_waker: bool) -> Arc<Self> {
        Arc::new(Self {
            by_waker,
            drive: Drive::empty(),
            bell: Bell::new(),
            came: AtomicUsize::new(came),
            waker: AtomicUsize::new(0),
            outcome: AtomicUsize::new(0),
            gone: Figure::default(),
            own_task: Figure::default(),
            census: Census::default(),
        })
    }

    fn put(&self, how: Put) {
        self.drive.put(Load { value: self.census.value(7), ended: false }, how);
    }

    fn holding(came: usize, how: Put) -> Arc<Self> {
        let shared = Self::empty(came, how.spawned);
        shared.put(how);
        shared
    }

    /// As the fronts poll.
    fn poll(&self, by: Poller) {
        let Some(mut polling) = self.drive.begin(by) else { return };
        assert!(by == Poller::OwnTask || self.own_task.get() == 0, "it has a task of its own");
        let ended = polling.with(|load| {
            assert_eq!((load.value.number(), load.ended), (7, false));
            if self.by_waker {
                // Relaxed: the fence orders it before the look, and its counterpart in `bring` the other way round.
                self.waker.store(if by == Poller::OwnTask { OWN } else { SHARED }, Ordering::Relaxed);
                // SeqCst: whoever brings it sees the waker, or this sees that it has come.
                fence(Ordering::SeqCst);
            }
            // Relaxed: what is promised must come from the word.
            load.ended = self.came.load(Ordering::Relaxed) != 0;
            load.ended
        });
        if !ended {
            return self.pause(polling);
        }
        if let Some(load) = polling.end() {
            self.take(load);
        }
        // Relaxed: the bell orders it for those who sleep.
        self.outcome.store(1, Ordering::Relaxed);
        self.bell.ring();
    }

    fn pause(&self, polling: Polling<'_, Load>) {
        match polling.pause() {
            Paused::Idle => {}
            Paused::Woken => self.bell.ring(),
            Paused::Cancelled(load) => self.take(load),
        }
    }

    fn take(&self, load: Load) {
        assert_eq!(load.value.number(), 7);
        self.gone.add(1);
    }

    fn rouse(&self) {
        if self.drive.wake() {
            self.bell.ring();
        }
    }

    /// Brings what the load waits for, and wakes by the waker that it has given away.
    fn bring(&self) {
        // Relaxed: as in `poll`.
        self.came.store(1, Ordering::Relaxed);
        // SeqCst: as in `poll`.
        fence(Ordering::SeqCst);
        // Relaxed: as in `poll`.
        if self.waker.load(Ordering::Relaxed) == SHARED {
            self.rouse();
        }
    }

    /// Brings what the load waits for, with nothing but the word to order it.
    fn bring_by_word(&self) {
        // Relaxed: the word brings it.
        self.came.store(1, Ordering::Relaxed);
        self.rouse();
    }

    /// Waits for the load's end, and polls it meanwhile.
    fn sleep(&self, by: Poller) {
        let sleeper = Sleeper { shared: self, by };
        match by {
            Poller::Thread { .. } => park(&self.bell, &time(), sleeper),
            _ => block_on(rest(&self.bell, sleeper)),
        }
    }
}

/// One who waits for the load's end.
struct Sleeper<'a> {
    shared: &'a Shared,
    by: Poller,
}

impl Waiter for Sleeper<'_> {
    type End = ();

    fn look(&mut self) -> Result<(), Moment> {
        // Relaxed: the bell orders it for those who sleep.
        if self.shared.outcome.load(Ordering::Relaxed) == 1 { Ok(()) } else { Err(Moment::NEVER) }
    }

    fn may_drive(&self) -> bool {
        self.shared.drive.is_under_way() && self.shared.drive.may_begin(self.by)
    }

    fn drive(&mut self) {
        self.shared.poll(self.by);
    }

    fn due(&mut self) -> Option<()> {
        panic!("there is no limit");
    }
}

impl WaitingTask for Sleeper<'_> {
    fn poll_timer(&mut self, _: Moment, _: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
}

/// Its own caller, who takes what it has come to.
struct Caller<'a>(Sleeper<'a>);

impl Waiter for Caller<'_> {
    type End = Load;

    fn look(&mut self) -> Result<Load, Moment> {
        self.0.shared.drive.take_ended().ok_or(Moment::NEVER)
    }

    fn may_drive(&self) -> bool {
        self.0.may_drive()
    }

    fn drive(&mut self) {
        self.0.drive();
    }

    fn due(&mut self) -> Option<Load> {
        panic!("there is no limit");
    }
}

impl WaitingTask for Caller<'_> {
    fn poll_timer(&mut self, _: Moment, _: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
}

/// What threads of a model do, each on its own.
fn threads<const N: usize>(shared: &Arc<Shared>, bodies: [fn(&Shared); N]) {
    let spawned = bodies.map(|body| {
        let shared = shared.clone();
        spawn(Participant::lasting, move || body(&shared))
    });
    spawned.into_iter().for_each(|thread| thread.join().unwrap());
}

/// What is left when all have ended.
fn ended(shared: Arc<Shared>) {
    assert_eq!(shared.gone.get(), 1, "it goes once");
    let census = shared.census.clone();
    assert_eq!(census.count(), 0, "it went when it had to");
    drop(shared);
}

/// What is brought to a load that somebody polls is found by the poll that follows.
#[test]
fn a_wake_meets_a_task() {
    check("a wake meets a task", 3, FEW, || {
        let shared = Shared::holding(0, TASK);
        threads(&shared, [|s| s.bring_by_word(), |s| s.sleep(Poller::Task)]);
        ended(shared);
    });
}

#[test]
fn a_wake_meets_a_thread() {
    check("a wake meets a thread", 3, FEW, || {
        let shared = Shared::holding(0, TASK);
        threads(&shared, [|s| s.bring_by_word(), |s| s.sleep(Poller::Thread { no_task: true })]);
        ended(shared);
    });
}

/// Two poll a load, one of them while it waits.
#[test]
fn two_poll() {
    check("two poll", 2, FEW, || {
        let shared = Shared::holding(0, TASK);
        let bring_and_poll = |s: &Shared| {
            s.bring_by_word();
            s.poll(Poller::Task);
        };
        threads(&shared, [bring_and_poll, |s| s.sleep(Poller::Task)]);
        ended(shared);
    });
}

/// One polls once and never comes back, and what the load waits for comes during that poll: the other one is told.
#[test]
fn a_wake_during_a_poll_is_told() {
    check("a wake during a poll is told", 2, FEW, || {
        let shared = Shared::holding(0, TASK);
        let poll_once = |s: &Shared| {
            // If the other one has been faster, it waits for what is brought here.
            let polling = s.drive.begin(Poller::Task);
            s.bring_by_word();
            if let Some(polling) = polling {
                s.pause(polling);
            }
        };
        threads(&shared, [poll_once, |s| s.sleep(Poller::Task)]);
        ended(shared);
    });
}

/// Nobody wants a load any more that two poll: it goes when the last poll has ended.
#[test]
fn a_cancel_meets_two_polls() {
    check("a cancel meets two polls", 2, FEW, || {
        let shared = Shared::holding(0, TASK);
        threads(
            &shared,
            [
                |s| s.poll(Poller::Task),
                |s| {
                    s.rouse();
                    s.poll(Poller::Task);
                },
                |s| {
                    if let Some(load) = s.drive.cancel() {
                        s.take(load);
                    }
                },
            ],
        );
        ended(shared);
    });
}

/// A load ends while its own caller goes: one of the two drops what it came to.
#[test]
fn an_end_meets_an_orphaning() {
    check("an end meets an orphaning", 3, FEW, || {
        let shared = Shared::holding(1, Put { orphaned: false, ..TASK });
        threads(
            &shared,
            [
                |s| s.sleep(Poller::Task),
                |s| {
                    if let Some(load) = s.drive.orphan() {
                        assert!(load.ended, "it is taken from those who wait");
                        s.take(load);
                    }
                },
            ],
        );
        ended(shared);
    });
}

/// Another one ends a load, while its own caller waits.
fn end_meets_its_caller(name: &str, before: fn(&Shared)) {
    check(name, 2, FEW, move || {
        let shared = Shared::holding(1, Put { orphaned: false, ..TASK });
        let s = shared.clone();
        let caller = spawn(Participant::lasting, move || {
            before(&s);
            // One that may not poll as long as there are tasks.
            let caller = Caller(Sleeper { shared: &s, by: Poller::Thread { no_task: false } });
            let load = park(&s.bell, &time(), caller);
            assert!(load.ended);
            s.take(load);
        });
        threads(&shared, [|s| s.sleep(Poller::Task)]);
        caller.join().unwrap();
        ended(shared);
    });
}

#[test]
fn an_end_meets_its_caller() {
    end_meets_its_caller("an end meets its caller", |_| {});
}

/// What has ended is not polled again, whoever wakes it.
#[test]
fn an_end_meets_a_late_wake() {
    end_meets_its_caller("an end meets a late wake", |s| {
        s.rouse();
        s.poll(Poller::Task);
    });
}

/// The task of its own polls once, and is dropped after its waker: one who waits goes on.
#[test]
fn a_task_of_its_own_is_dropped() {
    check("a task of its own is dropped", 2, FEW, || {
        let shared = Shared::holding(0, Put { spawned: true, ..TASK });
        shared.own_task.add(1);
        let own_task = |s: &Shared| {
            s.poll(Poller::OwnTask);
            s.bring();
            s.own_task.sub(1);
            if s.drive.unspawn() {
                s.bell.ring();
            }
        };
        threads(&shared, [own_task, |s| s.sleep(Poller::Task)]);
        ended(shared);
    });
}

/// A task that has been made for it may never be run: its caller takes it back, unless it has been polled just then.
#[test]
fn a_taking_back_meets_the_task() {
    check("a taking back meets the task", 2, FEW, || {
        let shared = Shared::holding(0, Put { spawned: true, ..TASK });
        let own_task = |s: &Shared| {
            s.poll(Poller::OwnTask);
            s.bring();
            // Woken by its own waker, if it was that.
            s.poll(Poller::OwnTask);
        };
        let take_back = |s: &Shared| {
            if s.drive.take_back() {
                s.bell.ring();
            }
            s.sleep(Poller::Task);
        };
        threads(&shared, [own_task, take_back]);
        ended(shared);
    });
}

/// It belongs to a runtime. The last task that wants it goes, and so does the task of its own: one of the two finds that nobody
/// may poll it any more, and takes it out.
#[test]
fn the_last_task_meets_the_end_of_its_own_task() {
    check("the last task meets the end of its own task", 3, 3, || {
        let shared = Shared::holding(0, Put { spawned: true, threads: Threads::None, ..TASK });
        // For the count of tasks.
        shared.outcome.fetch_add(1, Ordering::Relaxed);
        shared.own_task.add(1);
        let own_task = |s: &Shared| {
            s.own_task.sub(1);
            let _ = s.drive.unspawn();
            // Relaxed: as the count of tasks is read.
            if s.outcome.load(Ordering::Relaxed) == 0
                && let Some(load) = s.drive.strand()
            {
                s.take(load);
            }
        };
        let last_task = |s: &Shared| {
            // Relaxed: as it is changed.
            s.outcome.fetch_sub(1, Ordering::Relaxed);
            if let Some(load) = s.drive.strand() {
                assert_eq!(s.own_task.get(), 0, "it has a task of its own");
                s.take(load);
            }
        };
        threads(&shared, [own_task, last_task]);
        ended(shared);
    });
}

/// One has joined before anything is there to poll, and whoever puts it in never polls.
fn put_meets(name: &str, sleep: fn(&Shared)) {
    check(name, 3, FEW, move || {
        let shared = Shared::empty(1, false);
        let put = |s: &Shared| {
            s.put(TASK);
            s.bell.ring();
        };
        threads(&shared, [put, sleep]);
        ended(shared);
    });
}

#[test]
fn a_put_meets_a_task() {
    put_meets("a put meets a task", |s| s.sleep(Poller::Task));
}

#[test]
fn a_put_meets_a_thread() {
    put_meets("a put meets a thread", |s| s.sleep(Poller::Thread { no_task: true }));
}
