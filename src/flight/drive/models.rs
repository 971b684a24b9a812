//! Loom models of the word by which several poll one future: no wake-up is lost, and what is held is used by one at a time and
//! taken once.
//!
//! How to run them and how to go deeper: [`crate::primitive::model`]. Waits have no limit here, so that a lost wake-up is a
//! deadlock, which ends the process. What is held lies in loom's own cell, which tells two users at one time.

use super::*;
use crate::clock::{Clock, Moment, Time};
use crate::flight::wait::{Waiter, park};
use crate::primitive::epoch::Participant;
use crate::primitive::model::{FEW, check, spawn};
use crate::primitive::park::Bell;
use std::sync::Arc;
use std::time::Duration;

/// A clock that stands still.
struct Still;

impl Clock for Still {
    fn now(&self) -> Duration {
        Duration::ZERO
    }
}

/// What several poll: it ends once it has been told to.
struct Polled {
    drive: Drive<u32>,
    bell: Bell,
    told: AtomicUsize,
    ended: AtomicUsize,
}

impl Polled {
    fn new(how: Put) -> Arc<Self> {
        let this = Self {
            drive: Drive::empty(),
            bell: Bell::new(),
            told: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
        };
        this.drive.put(0, how);
        Arc::new(this)
    }

    fn tell(&self) {
        // Relaxed: the wake is to order it.
        self.told.store(1, Ordering::Relaxed);
        if self.drive.wake() {
            self.bell.ring();
        }
    }

    /// Polls once. What comes back has been cancelled.
    fn poll(&self, by: Poller) -> Option<u32> {
        let mut polling = self.drive.begin(by)?;
        let ready = polling.with(|polls| {
            *polls += 1;
            // Relaxed: as above.
            self.told.load(Ordering::Relaxed) == 1
        });
        if ready {
            let unwanted = polling.end();
            // Release: pairs with the Acquire in `look`.
            self.ended.store(1, Ordering::Release);
            self.bell.ring();
            return unwanted;
        }
        match polling.pause() {
            Paused::Idle => None,
            Paused::Woken => {
                self.bell.ring();
                None
            }
            Paused::Cancelled(it) => Some(it),
        }
    }

    /// Waits until it has ended, and polls it meanwhile.
    fn wait(&self) {
        park(&self.bell, &Time::Given { clock: Arc::new(Still), by_hand: true }, Waits(self));
    }
}

struct Waits<'a>(&'a Polled);

impl Waiter for Waits<'_> {
    type End = ();

    fn look(&mut self) -> Result<(), Moment> {
        // Acquire: pairs with the Release in `poll`.
        if self.0.ended.load(Ordering::Acquire) == 1 { Ok(()) } else { Err(Moment::NEVER) }
    }

    fn may_drive(&self) -> bool {
        self.0.drive.may_begin(Poller::Task)
    }

    fn drive(&mut self) {
        assert!(self.0.poll(Poller::Task).is_none());
    }

    fn due(&mut self) {}
}

fn put(spawned: bool) -> Put {
    Put { spawned, orphaned: false, threads: Threads::Any }
}

/// Two poll it, and a third tells it to end: a wake that comes during a poll causes another.
#[test]
fn a_wake_meets_two_pollers() {
    check("a_wake_meets_two_pollers", 1, FEW, || {
        let it = Polled::new(put(false));
        let (waits, tells) = (it.clone(), it.clone());
        let threads = [
            spawn(Participant::lasting, move || waits.wait()),
            spawn(Participant::lasting, move || tells.tell()),
        ];
        it.wait();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert!(it.drive.take_ended().is_some());
    });
}

/// Its own task polls it once and goes, another wakes it: one who waits goes on with it.
#[test]
fn a_task_of_its_own_goes() {
    check("a_task_of_its_own_goes", 2, FEW, || {
        let it = Polled::new(put(true));
        let (task, tells) = (it.clone(), it.clone());
        let threads = [
            spawn(Participant::lasting, move || {
                assert!(task.poll(Poller::OwnTask).is_none());
                if task.drive.unspawn() {
                    task.bell.ring();
                }
            }),
            spawn(Participant::lasting, move || tells.tell()),
        ];
        it.wait();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert!(it.drive.take_ended().is_some());
    });
}

/// Nobody wants it any more, while its own task polls it, which may end it: it is taken out once.
#[test]
fn a_cancel_meets_a_poll() {
    check("a_cancel_meets_a_poll", 3, FEW, || {
        let it = Polled::new(put(true));
        let (task, tells) = (it.clone(), it.clone());
        let threads = [
            spawn(Participant::lasting, move || usize::from(task.poll(Poller::OwnTask).is_some())),
            spawn(Participant::lasting, move || {
                tells.tell();
                0
            }),
        ];
        let taken = usize::from(it.drive.orphan().is_some()) + usize::from(it.drive.cancel().is_some());
        let taken = threads.into_iter().fold(taken, |n, t| n + t.join().unwrap());
        assert_eq!(taken, 1);
    });
}

/// The last task goes, and so does the task of its own: one of the two finds that nobody may poll it.
#[test]
fn the_last_task_meets_the_task_of_its_own() {
    check("the_last_task_meets_the_task_of_its_own", 3, FEW, || {
        let it = Polled::new(Put { threads: Threads::None, ..put(true) });
        let tasks = Arc::new(AtomicUsize::new(1));
        let (own, left) = (it.clone(), tasks.clone());
        let task = spawn(Participant::lasting, move || {
            let _ = own.drive.unspawn();
            // Relaxed: as `Interest`'s.
            left.load(Ordering::Relaxed) == 0 && own.drive.strand().is_some()
        });
        // Relaxed: as above.
        tasks.fetch_sub(1, Ordering::Relaxed);
        let here = it.drive.strand().is_some();
        assert_eq!(usize::from(here) + usize::from(task.join().unwrap()), 1);
    });
}
