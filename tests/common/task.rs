//! Tasks that a test polls by hand, a runtime of one loop, and doors at which loads of both kinds stop.

use super::LIMIT;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Instant;

/// Whether a task has been woken.
#[derive(Default)]
pub(crate) struct Woken(AtomicBool);

impl Woken {
    /// Whether it has been woken since this was asked last.
    pub(crate) fn take(&self) -> bool {
        self.0.swap(false, Ordering::SeqCst)
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A task that is polled by hand. Dropped, its future is.
pub(crate) struct Hand<'a, T> {
    future: Pin<Box<dyn Future<Output = T> + Send + 'a>>,
    woken: Arc<Woken>,
}

impl<'a, T> Hand<'a, T> {
    pub(crate) fn new(future: impl Future<Output = T> + Send + 'a) -> Self {
        Self { future: Box::pin(future), woken: Arc::default() }
    }

    /// Polls it once, with the waker that it has had before.
    pub(crate) fn poll(&mut self) -> Option<T> {
        self.woken.take();
        let waker = Waker::from(self.woken.clone());
        self.poll_with(&waker)
    }

    pub(crate) fn poll_with(&mut self, waker: &Waker) -> Option<T> {
        match self.future.as_mut().poll(&mut Context::from_waker(waker)) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }

    /// For a runtime to poll from now on.
    pub(crate) fn future_mut(&mut self) -> impl Future<Output = T> {
        self.future.as_mut()
    }

    /// Whether it has been woken since it was polled last.
    pub(crate) fn is_woken(&self) -> bool {
        self.woken.0.load(Ordering::SeqCst)
    }

    /// Polls it as a runtime would: first, and whenever it has been woken. `None` if it waits.
    pub(crate) fn run(&mut self) -> Option<T> {
        loop {
            if let Some(output) = self.poll() {
                return Some(output);
            }
            if !self.is_woken() {
                return None;
            }
        }
    }
}

/// Polls a future of the caller's once, as a part of the caller's own task.
pub(crate) async fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    poll_fn(|cx| Poll::Ready(Pin::new(&mut *future).poll(cx))).await
}

/// Leaves the turn to others once.
pub(crate) async fn yield_now() {
    let mut left = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut left, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// No runtime at all: polls a future on this thread until it has ended.
#[track_caller]
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let begun = Instant::now();
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        assert!(begun.elapsed() < LIMIT, "the future has not ended in {LIMIT:?}");
        thread::park_timeout(LIMIT);
    }
}

#[derive(Default)]
struct Doorway {
    open: bool,
    stopped: Vec<Waker>,
}

/// Where tasks and threads stop until the test lets them on.
#[derive(Clone, Default)]
pub(crate) struct Door(Arc<Mutex<Doorway>>);

impl Door {
    pub(crate) fn open(&self) {
        let stopped = {
            let mut doorway = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            doorway.open = true;
            std::mem::take(&mut doorway.stopped)
        };
        stopped.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn is_open(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).open
    }

    /// Passes as a task.
    pub(crate) fn passed(&self) -> impl Future<Output = ()> + Send + Unpin + use<> {
        let door = self.clone();
        poll_fn(move |cx| {
            let mut doorway = door.0.lock().unwrap_or_else(PoisonError::into_inner);
            if doorway.open {
                return Poll::Ready(());
            }
            doorway.stopped.push(cx.waker().clone());
            Poll::Pending
        })
    }

    /// Passes as a thread.
    #[track_caller]
    pub(crate) fn pass(&self) {
        block_on(self.passed());
    }
}
