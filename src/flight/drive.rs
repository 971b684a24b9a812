//! Driving: a future that several may poll, one at a time.
//!
//! # States
//! ```text
//!            put                begin                 end
//!   empty ───────► held, woken ───────► held, polling ─────► held, ended ── take ──► gone
//!                   ▲      ▲               │    │  ▲                                  ▲
//!                   │      └── woken since ┘    │  └ wake: woken                      │
//!              wake │                     pause │                                     │
//!                   └──────── held, idle ◄──────┘ ──────── cancel ────────────────────┘
//! ```
//! Whoever turns `POLLING` on has the future alone until it turns it off. A wake that arrives during a poll causes another
//! one: the poller finds `WOKEN` when it pauses, and tells those who wait. With a task of its own (`SPAWNED`) only that one
//! polls, with its own waker.
//!
//! # Invariants
//! - `INV-drive-1`: what is held is touched by the one who has turned `POLLING` on, or has turned `HELD` off while
//!   `POLLING` was off; by each once.
//! - `INV-drive-2`: what is held and not ended is polled, or idle with a waker in the hands of what it waits for, or
//!   `WOKEN` and somebody told: no wake-up is lost.
//! - `INV-drive-3`: what has ended is taken by its own caller, or dropped by the later of: the poller that ended it, and
//!   its own caller's leaving.

#[cfg(all(test, loom))]
mod models;

use crate::primitive::atomic::{AtomicUsize, Ordering};
use crate::primitive::exclusive::Exclusive;
use crate::primitive::step::step;

/// Something is held. Cleared by whoever takes it out.
const HELD: usize = 1 << 0;
/// Somebody uses it.
const POLLING: usize = 1 << 1;
/// It is to be polled: from the start, and after a wake. Cleared by the poll that follows.
const WOKEN: usize = 1 << 2;
/// It has ended; what it came to is held.
const ENDED: usize = 1 << 3;
/// Its own caller has gone. Never cleared.
const ORPHANED: usize = 1 << 4;
/// Nobody wants it. Never cleared.
const CANCELLED: usize = 1 << 5;
/// A task of its own polls it. Cleared if that task is dropped.
const SPAWNED: usize = 1 << 6;
/// Any thread may poll it. Set from the start, or never.
const ANY_THREAD: usize = 1 << 7;
/// No thread may poll it: it belongs to a runtime. Set from the start, or never.
const NO_THREAD: usize = 1 << 8;

/// A future, or what it came to, in the hands of one at a time.
pub(crate) struct Drive<L> {
    word: AtomicUsize,
    held: Exclusive<Option<L>>,
}

/// Who polls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Poller {
    /// A task that waits.
    Task,
    /// A thread that waits; whether no task does.
    Thread { no_task: bool },
    /// The task that has been made for it.
    OwnTask,
}

impl Poller {
    /// Whether it may poll what has this word.
    fn may(self, word: usize) -> bool {
        let woken = word & (SPAWNED | WOKEN) == WOKEN;
        match self {
            Self::OwnTask => word & SPAWNED != 0,
            Self::Task => woken,
            Self::Thread { no_task } => woken && (word & ANY_THREAD != 0 || no_task && word & NO_THREAD == 0),
        }
    }
}

fn may_begin(word: usize, by: Poller) -> bool {
    word & (HELD | POLLING | ENDED) == HELD && by.may(word)
}

/// Which threads may poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Threads {
    /// Any: it was made by a thread.
    Any,
    /// One that waits while no task does: it was made by a task, but under no runtime that is known.
    IfNoTask,
    /// None: it was made under a runtime.
    None,
}

/// How something is put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Put {
    /// A task of its own polls it.
    pub(crate) spawned: bool,
    /// It has no caller of its own.
    pub(crate) orphaned: bool,
    pub(crate) threads: Threads,
}

/// The right to use what is held.
#[must_use]
pub(crate) struct Polling<'a, L>(&'a Drive<L>);

/// What a pause left behind.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Paused<L> {
    /// It waits.
    Idle,
    /// It is to be polled again, and those who wait are to be told.
    Woken,
    /// Nobody wants it.
    Cancelled(L),
}

impl<L> Drive<L> {
    pub(crate) fn empty() -> Self {
        Self { word: AtomicUsize::new(0), held: Exclusive::new(None) }
    }

    /// Puts something in, to be polled. Once, by the one whose it is, who then polls it or tells those who wait.
    pub(crate) fn put(&self, load: L, how: Put) {
        // SAFETY: INV-drive-1: nothing has been held yet, and there is one who puts.
        unsafe { self.held.with(|held| *held = Some(load)) };
        let threads = match how.threads {
            Threads::Any => ANY_THREAD,
            Threads::IfNoTask => 0,
            Threads::None => NO_THREAD,
        };
        let marks = if how.spawned { SPAWNED } else { 0 } | if how.orphaned { ORPHANED } else { 0 } | threads;
        step();
        // Release: what is held; pairs with the Acquire in `begin`, `cancel` and `take_if`.
        self.word.store(HELD | WOKEN | marks, Ordering::Release);
    }

    /// Whether there is something that is to be polled, and nobody polls.
    pub(crate) fn may_begin(&self, by: Poller) -> bool {
        // Relaxed: whoever sleeps on it listens before, and whoever wakes rings after: the bell orders the two.
        may_begin(self.word.load(Ordering::Relaxed), by)
    }

    /// Takes the right to poll, if there is something that is to be polled, and nobody polls.
    pub(crate) fn begin(&self, by: Poller) -> Option<Polling<'_, L>> {
        // Relaxed: a guess for the CAS.
        let mut seen = self.word.load(Ordering::Relaxed);
        loop {
            if !may_begin(seen, by) {
                return None;
            }
            let wanted = seen & !WOKEN | POLLING;
            step();
            // Acquire: what the last poller left, and what the one who woke did; pairs with `pause`, `put` and `wake`.
            match self.word.compare_exchange_weak(seen, wanted, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(Polling(self)),
                Err(now) => seen = now,
            }
        }
    }

    /// It is to be polled. `true` if those who wait are to be told.
    #[must_use]
    pub(crate) fn wake(&self) -> bool {
        // Release: what the one who wakes did comes before the poll; pairs with the Acquire in `begin`.
        let was = self.word.fetch_or(WOKEN, Ordering::Release);
        was & (HELD | WOKEN | POLLING | ENDED | SPAWNED) == HELD
    }

    /// Takes it back from a task of its own that has not polled it yet: those who wait poll. `true` if they are to be told.
    #[must_use]
    pub(crate) fn take_back(&self) -> bool {
        let untouched =
            |seen: usize| seen & (HELD | POLLING | ENDED | SPAWNED | WOKEN) == HELD | SPAWNED | WOKEN;
        untouched(self.change(|seen| if untouched(seen) { seen & !SPAWNED } else { seen }))
    }

    /// Whether a task of its own is to poll it.
    pub(crate) fn is_spawned(&self) -> bool {
        // Relaxed: a hint; whoever takes it from its own task wakes that.
        self.word.load(Ordering::Relaxed) & (HELD | ENDED | SPAWNED) == HELD | SPAWNED
    }

    /// The task of its own is gone: those who wait poll. `true` if they are to be told.
    #[must_use]
    pub(crate) fn unspawn(&self) -> bool {
        self.change(|seen| seen & !SPAWNED | WOKEN) & (HELD | ENDED) == HELD
    }

    /// Nobody wants it: takes it out, or leaves that to the one who polls just now.
    #[must_use]
    pub(crate) fn cancel(&self) -> Option<L> {
        self.take_if(CANCELLED, |_| true)
    }

    /// No task wants it: takes it out if nobody may poll it any more, since it belongs to a runtime and has no task of its own.
    #[must_use]
    pub(crate) fn strand(&self) -> Option<L> {
        self.take_if(0, |seen| seen & (ENDED | SPAWNED | NO_THREAD) == NO_THREAD)
    }

    /// Its own caller goes: takes out what it has come to, if it has ended.
    #[must_use]
    pub(crate) fn orphan(&self) -> Option<L> {
        self.take_if(ORPHANED, |seen| seen & ENDED != 0)
    }

    /// Takes out what it has come to, if it has ended. For its own caller.
    #[must_use]
    pub(crate) fn take_ended(&self) -> Option<L> {
        self.take_if(0, |seen| seen & ENDED != 0)
    }

    /// Whether something is held that has not ended.
    pub(crate) fn is_under_way(&self) -> bool {
        // Relaxed: a hint.
        self.word.load(Ordering::Relaxed) & (HELD | ENDED) == HELD
    }

    fn take_if(&self, mark: usize, may: impl Fn(usize) -> bool) -> Option<L> {
        let takes = |seen: usize| seen & (HELD | POLLING) == HELD && may(seen);
        let seen = self.change(|seen| if takes(seen) { seen & !HELD } else { seen } | mark);
        // SAFETY: INV-drive-1: `HELD` has been turned off, and nobody polled.
        takes(seen).then(|| unsafe { self.held.with(Option::take) }).flatten()
    }

    /// Changes the word, and tells what it was.
    fn change(&self, next: impl Fn(usize) -> usize) -> usize {
        // Relaxed: a guess for the CAS.
        let mut seen = self.word.load(Ordering::Relaxed);
        loop {
            step();
            // Acquire: what the last one who had it left. Release: what this one leaves. Each pairs with the other in `begin`,
            // `put` and here.
            match self.word.compare_exchange_weak(seen, next(seen), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return seen,
                Err(now) => seen = now,
            }
        }
    }
}

impl<L> Polling<'_, L> {
    /// Uses what is held.
    pub(crate) fn with<R>(&mut self, user: impl FnOnce(&mut L) -> R) -> R {
        // SAFETY: INV-drive-1.
        unsafe { self.0.held.with(|held| user(held.as_mut().expect("held while it is polled"))) }
    }

    /// It waits for something.
    pub(crate) fn pause(self) -> Paused<L> {
        let drive = self.0;
        std::mem::forget(self);
        drive.pause()
    }

    /// It has ended, and what is held now is what it came to. Comes back if its own caller is gone.
    #[must_use]
    pub(crate) fn end(self) -> Option<L> {
        let drive = self.0;
        std::mem::forget(self);
        let unwanted = |seen| seen & ORPHANED != 0;
        let seen = drive
            .change(|seen| if unwanted(seen) { seen & !(POLLING | HELD) } else { seen & !POLLING } | ENDED);
        // SAFETY: INV-drive-1: this one had it alone, and `HELD` has been turned off.
        unwanted(seen).then(|| unsafe { drive.held.with(Option::take) }).flatten()
    }
}

impl<L> Drive<L> {
    fn pause(&self) -> Paused<L> {
        let unwanted = |seen| seen & CANCELLED != 0;
        let seen =
            self.change(|seen| if unwanted(seen) { seen & !(POLLING | HELD) } else { seen & !POLLING });
        if unwanted(seen) {
            // SAFETY: INV-drive-1: this one had it alone, and `HELD` has been turned off.
            let load = unsafe { self.held.with(Option::take) };
            return load.map_or(Paused::Idle, Paused::Cancelled);
        }
        if seen & WOKEN != 0 { Paused::Woken } else { Paused::Idle }
    }
}

impl<L> Drop for Polling<'_, L> {
    fn drop(&mut self) {
        // Only if whoever polls unwinds.
        drop(self.0.pause());
    }
}
