//! Waiting on an event: a thread with a limit in real time where there is one, or a task.

use event_listener::{Event, EventListener, Listener};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

/// Something that happens once or more often, and those who wait for it.
///
/// The list of waiters sits behind a small mutex of the event's own: `listen` and `ring` of one event can wait
/// for each other, and for nothing else.
#[derive(Debug)]
pub(crate) struct Bell(Event);

/// A place in the list of a [`Bell`]'s waiters.
#[derive(Debug)]
pub(crate) struct Listening(EventListener);

/// Why a wait came to an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Woken {
    Rung,
    TimedOut,
}

impl Bell {
    pub(crate) fn new() -> Self {
        Self(Event::new())
    }

    /// Registers the caller; every `ring` from now on wakes it.
    pub(crate) fn listen(&self) -> Listening {
        Listening(self.0.listen())
    }

    /// Wakes all who listen now.
    pub(crate) fn ring(&self) {
        self.0.notify(usize::MAX);
    }
}

impl Listening {
    /// Ready once the bell has rung; until then the task is woken by it.
    pub(crate) fn poll_rung(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.0).poll(cx)
    }

    /// Parks the thread until the bell rings, or for `limit` at most. loom has no time, so a model waits for the bell.
    pub(crate) fn wait(self, limit: Option<Duration>) -> Woken {
        if cfg!(loom) || limit.is_none() {
            self.0.wait();
            return Woken::Rung;
        }
        match self.0.wait_timeout(limit.unwrap_or(Duration::MAX)) {
            Some(()) => Woken::Rung,
            None => Woken::TimedOut,
        }
    }
}
