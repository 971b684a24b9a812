//! The simulated world: its time, and the one thread that runs whatever happens in it.
//!
//! A discrete-event simulation whose processes are futures. Time stands still while tasks run; when none of them can go on,
//! it jumps to the next event: a call that arrives, or the end of a sleep. The cache reads a clock of its own that is set from
//! that time, at a resolution that is fine beside what is measured.

use parking_lot::Mutex;
use quell::{BoxFuture, ManualClock, Spawner};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

/// The resolution of the cache's clock. Each move of it wakes all who wait, so a finer one takes longer and shows no more.
pub(crate) const TICK: Duration = Duration::from_millis(20);

/// A handle to the world; clones share it.
#[derive(Clone)]
pub(crate) struct World(Arc<Shared>);

struct Shared {
    clock: ManualClock,
    state: Mutex<State>,
    /// Tasks that can go on, in the order in which they were woken.
    ready: Arc<Mutex<VecDeque<Arc<TaskId>>>>,
}

#[derive(Default)]
struct State {
    now: Duration,
    alarms: BinaryHeap<Reverse<Alarm>>,
    alarms_set: u64,
    /// Tasks that have not been polled yet.
    spawned: VecDeque<BoxFuture>,
}

/// The end of a sleep. Those that come at the same time come in the order in which they were set.
struct Alarm {
    at: Duration,
    nth: u64,
    waker: Waker,
}

impl Alarm {
    fn order(&self) -> (Duration, u64) {
        (self.at, self.nth)
    }
}

impl PartialEq for Alarm {
    fn eq(&self, other: &Self) -> bool {
        self.order() == other.order()
    }
}

impl Eq for Alarm {}

impl PartialOrd for Alarm {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Alarm {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.order().cmp(&other.order())
    }
}

impl World {
    pub(crate) fn new() -> Self {
        let (clock, state, ready) = (ManualClock::new(), Mutex::default(), Arc::default());
        World(Arc::new(Shared { clock, state, ready }))
    }

    /// The time since the world began.
    pub(crate) fn now(&self) -> Duration {
        self.0.state.lock().now
    }

    /// The clock that the cache reads.
    pub(crate) fn clock(&self) -> ManualClock {
        self.0.clock.clone()
    }

    /// Makes a task of `future`.
    pub(crate) fn spawn(&self, future: BoxFuture) {
        self.0.state.lock().spawned.push_back(future);
    }

    /// Runs the cache's refreshes as tasks of this world.
    pub(crate) fn spawner(&self) -> impl Spawner + use<> {
        let world = Arc::downgrade(&self.0);
        move |future| {
            let world = world.upgrade().ok_or(quell::Rejected)?;
            World(world).spawn(future);
            Ok(())
        }
    }

    pub(crate) async fn sleep_until(&self, at: Duration) {
        let mut is_set = false;
        poll_fn(|cx| {
            let mut state = self.0.state.lock();
            if at <= state.now {
                return Poll::Ready(());
            }
            if !std::mem::replace(&mut is_set, true) {
                let (nth, waker) = (state.alarms_set, cx.waker().clone());
                state.alarms_set += 1;
                state.alarms.push(Reverse(Alarm { at, nth, waker }));
            }
            Poll::Pending
        })
        .await;
    }

    /// Lets the time come to `at`.
    fn move_to(&self, at: Duration) {
        let ticks = |time: Duration| (time.as_nanos() / TICK.as_nanos()) as u32;
        let before = std::mem::replace(&mut self.0.state.lock().now, at);
        if ticks(before) < ticks(at) {
            self.0.clock.set(TICK * ticks(at));
        }
    }

    /// Runs the world until nothing happens any more. `arrive` gives the time of the next call and the call, in the order of
    /// time. Returns how many tasks are left that nothing will wake.
    pub(crate) fn run(&self, mut arrive: impl FnMut() -> Option<(Duration, BoxFuture)>) -> usize {
        let mut tasks = Tasks::default();
        let mut arrival = arrive();
        loop {
            self.settle(&mut tasks);
            let alarm = self.0.state.lock().alarms.peek().map(|Reverse(alarm)| alarm.at);
            match (arrival.take(), alarm) {
                (None, None) => return tasks.running,
                (Some((at, call)), alarm) if alarm.is_none_or(|alarm| at < alarm) => {
                    self.move_to(at);
                    self.spawn(call);
                    arrival = arrive();
                }
                (waiting, alarm) => {
                    arrival = waiting;
                    self.move_to(alarm.unwrap_or_default());
                    let alarm = self.0.state.lock().alarms.pop();
                    if let Some(Reverse(alarm)) = alarm {
                        alarm.waker.wake();
                    }
                }
            }
        }
    }

    /// Polls tasks until none of them can go on.
    fn settle(&self, tasks: &mut Tasks) {
        loop {
            let woken = self.0.ready.lock().pop_front();
            if let Some(id) = woken {
                // Relaxed: all happens on one thread.
                id.is_queued.store(false, Ordering::Relaxed);
                tasks.poll(id.nth);
                continue;
            }
            let spawned = self.0.state.lock().spawned.pop_front();
            match spawned {
                Some(future) => tasks.begin(future, &self.0.ready),
                None => return,
            }
        }
    }
}

/// The tasks that have been polled and have not ended.
#[derive(Default)]
struct Tasks {
    places: Vec<Option<Task>>,
    free: Vec<usize>,
    running: usize,
}

struct Task {
    future: BoxFuture,
    waker: Waker,
}

impl Tasks {
    fn begin(&mut self, future: BoxFuture, ready: &Arc<Mutex<VecDeque<Arc<TaskId>>>>) {
        let nth = self.free.pop().unwrap_or(self.places.len());
        if nth == self.places.len() {
            self.places.push(None);
        }
        let id = TaskId { nth, is_queued: AtomicBool::new(false), ready: ready.clone() };
        self.places[nth] = Some(Task { future, waker: Arc::new(id).into() });
        self.running += 1;
        self.poll(nth);
    }

    /// Polls a task, unless it has ended: a waker may outlive its task, and then wakes whoever has its place.
    fn poll(&mut self, nth: usize) {
        let Some(task) = &mut self.places[nth] else { return };
        if task.future.as_mut().poll(&mut Context::from_waker(&task.waker)).is_ready() {
            self.places[nth] = None;
            self.free.push(nth);
            self.running -= 1;
        }
    }
}

/// What a waker wakes.
struct TaskId {
    nth: usize,
    is_queued: AtomicBool,
    ready: Arc<Mutex<VecDeque<Arc<TaskId>>>>,
}

impl Wake for TaskId {
    fn wake(self: Arc<Self>) {
        // Relaxed: all happens on one thread.
        if !self.is_queued.swap(true, Ordering::Relaxed) {
            let ready = self.ready.clone();
            ready.lock().push_back(self);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quell::Clock;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn events_come_in_the_order_of_their_times() {
        let world = World::new();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let task = |name: &'static str, sleeps: &'static [u64]| -> BoxFuture {
            let (world, seen) = (world.clone(), seen.clone());
            Box::pin(async move {
                for until in sleeps {
                    world.sleep_until(ms(*until)).await;
                    seen.lock().push((name, world.now(), world.clock().now()));
                }
            })
        };
        let mut calls = [(ms(1), task("a", &[0, 49, 130])), (ms(25), task("b", &[25, 49, 60]))].into_iter();
        assert_eq!(world.run(|| calls.next()), 0);
        let expected =
            [("a", 1, 0), ("b", 25, 20), ("a", 49, 40), ("b", 49, 40), ("b", 60, 60), ("a", 130, 120)];
        assert_eq!(*seen.lock(), expected.map(|(name, now, clock)| (name, ms(now), ms(clock))));
    }

    #[test]
    fn a_task_that_nothing_wakes_is_told_of() {
        let world = World::new();
        let forever: BoxFuture = Box::pin(std::future::pending());
        let mut calls = [(ms(1), forever)].into_iter();
        assert_eq!(world.run(|| calls.next()), 1);
    }
}
