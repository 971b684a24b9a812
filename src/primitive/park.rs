//! Waiting on an event: a thread with a limit in real time where there is one, or a task.

use super::{caught, thread_local};
use event_listener::{Event, EventListener, Listener};
use std::cell::RefCell;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

/// Something that happens once or more often, and those who wait for it.
///
/// The list of waiters sits behind a small mutex of the event's own: `listen` and `ring` of one event can wait
/// for each other, and for nothing else. A waker is user code, which may come back to the same event or panic, so under that
/// mutex it is neither called nor cloned nor dropped: who is to be woken is noted there, and woken after.
#[derive(Debug)]
pub(crate) struct Bell(Event);

/// A place in the list of a [`Bell`]'s waiters.
#[derive(Debug)]
pub(crate) struct Listening {
    /// Until the place is given up.
    place: Option<EventListener>,
    /// The task that is to be woken. Kept here, so that under the mutex no last share of it goes.
    ear: Option<Arc<Ear>>,
}

/// A task that listens.
#[derive(Debug)]
struct Ear(Waker);

thread_local! {
    /// Whom this thread is to wake when it has left an event's mutex.
    static HEARD: RefCell<Option<Vec<Arc<Ear>>>> = const { RefCell::new(None) };
}

impl Wake for Ear {
    fn wake(self: Arc<Self>) {
        let mut ear = Some(self);
        let _ = HEARD.try_with(|heard| {
            if let Some(heard) = &mut *heard.borrow_mut() {
                heard.extend(ear.take());
            }
        });
        // A thread in its last destructors can note nothing.
        if let Some(ear) = ear {
            ear.0.wake_by_ref();
        }
    }
}

/// Does something to an event's list, and then wakes the tasks that it was to wake. One that panics keeps no other from it.
fn wakes_after<R>(act: impl FnOnce() -> R) -> R {
    let outer = HEARD.try_with(|heard| heard.replace(Some(Vec::new())));
    let result = act();
    if let Ok(outer) = outer {
        let heard = HEARD.try_with(|heard| heard.replace(outer)).ok().flatten();
        for ear in heard.into_iter().flatten() {
            let _ = caught(move || ear.0.wake_by_ref());
        }
    }
    result
}

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
        Listening { place: Some(self.0.listen()), ear: None }
    }

    /// Wakes all who listen now.
    pub(crate) fn ring(&self) {
        wakes_after(|| self.0.notify(usize::MAX));
    }
}

impl Listening {
    /// Registers the caller once more, after a ring.
    pub(crate) fn listen_again(&mut self, bell: &Bell) {
        self.place = Some(bell.0.listen());
    }

    /// Ready once the bell has rung; until then the task is woken by it.
    pub(crate) fn poll_rung(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(place) = &mut self.place else { return Poll::Ready(()) };
        let waker = cx.waker();
        let fits = self.ear.as_ref().is_some_and(|ear| ear.0.will_wake(waker));
        // Dropped after the mutex has been left.
        let _before = if fits { None } else { self.ear.replace(Arc::new(Ear(waker.clone()))) };
        let ear = self.ear.clone().map_or_else(|| waker.clone(), Waker::from);
        Pin::new(place).poll(&mut Context::from_waker(&ear))
    }

    /// Parks the thread until the bell rings, or for `limit` at most. loom has no time, so a model waits for the bell.
    pub(crate) fn wait(mut self, limit: Option<Duration>) -> Woken {
        let Some(place) = self.place.take() else { return Woken::Rung };
        if cfg!(loom) || limit.is_none() {
            place.wait();
            return Woken::Rung;
        }
        match place.wait_timeout(limit.unwrap_or(Duration::MAX)) {
            Some(()) => Woken::Rung,
            None => Woken::TimedOut,
        }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        // A ring that was meant for this one is passed on.
        wakes_after(|| drop(self.place.take()));
    }
}
