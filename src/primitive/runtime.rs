//! The async runtime that a call is made under, as far as quell knows of it: tokio's, with the feature of that name.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

type BoxFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A runtime, or none.
pub(crate) struct Runtime(imp::Handle);

impl Runtime {
    /// The one that the caller is under.
    pub(crate) fn current() -> Self {
        Self(imp::current())
    }

    pub(crate) fn is_none(&self) -> bool {
        imp::is_none(&self.0)
    }

    /// Does something under this runtime.
    pub(crate) fn enter<R>(&self, run: impl FnOnce() -> R) -> R {
        imp::enter(&self.0, run)
    }

    /// Makes a task of a future. Gives it back if there is no runtime.
    pub(crate) fn spawn(&self, future: BoxFuture) -> Result<(), BoxFuture> {
        imp::spawn(&self.0, future)
    }

    /// Does something on one of the runtime's threads for what blocks. Gives it back if there is no runtime.
    pub(crate) fn spawn_blocking<W: Send + 'static>(&self, work: W, run: fn(W)) -> Result<(), W> {
        imp::spawn_blocking(&self.0, work, run)
    }
}

/// A timer of the runtime under which it is first asked; it must not be moved to a task of another one.
#[derive(Default)]
pub(crate) struct Timer(imp::Timer);

impl Timer {
    /// Ready when `after` has passed since it was first asked. `None` if there is no runtime that has timers.
    pub(crate) fn poll(&mut self, after: Duration, cx: &mut Context<'_>) -> Option<Poll<()>> {
        self.0.poll(after, cx)
    }
}

#[cfg(not(feature = "tokio"))]
mod imp {
    use super::BoxFuture;
    use std::task::{Context, Poll};
    use std::time::Duration;

    pub(super) struct Handle;

    pub(super) fn current() -> Handle {
        Handle
    }

    pub(super) fn is_none(_: &Handle) -> bool {
        true
    }

    pub(super) fn enter<R>(_: &Handle, run: impl FnOnce() -> R) -> R {
        run()
    }

    pub(super) fn spawn(_: &Handle, future: BoxFuture) -> Result<(), BoxFuture> {
        Err(future)
    }

    pub(super) fn spawn_blocking<W>(_: &Handle, work: W, _: fn(W)) -> Result<(), W> {
        Err(work)
    }

    #[derive(Default)]
    pub(super) struct Timer;

    impl Timer {
        pub(super) fn poll(&mut self, _: Duration, _: &mut Context<'_>) -> Option<Poll<()>> {
            None
        }
    }
}

#[cfg(feature = "tokio")]
mod imp {
    use super::BoxFuture;
    use crate::primitive::caught;
    use std::pin::Pin;
    use std::task::{Context, Poll};
    use std::time::Duration;
    use tokio::time::{Sleep, sleep};

    pub(super) type Handle = Option<tokio::runtime::Handle>;

    pub(super) fn current() -> Handle {
        tokio::runtime::Handle::try_current().ok()
    }

    pub(super) fn is_none(handle: &Handle) -> bool {
        handle.is_none()
    }

    pub(super) fn enter<R>(handle: &Handle, run: impl FnOnce() -> R) -> R {
        let _entered = handle.as_ref().map(tokio::runtime::Handle::enter);
        run()
    }

    pub(super) fn spawn(handle: &Handle, future: BoxFuture) -> Result<(), BoxFuture> {
        let Some(handle) = handle else { return Err(future) };
        drop(handle.spawn(future));
        Ok(())
    }

    pub(super) fn spawn_blocking<W: Send + 'static>(handle: &Handle, work: W, run: fn(W)) -> Result<(), W> {
        let Some(handle) = handle else { return Err(work) };
        drop(handle.spawn_blocking(move || run(work)));
        Ok(())
    }

    #[derive(Default)]
    pub(super) enum Timer {
        #[default]
        Unset,
        /// The runtime has none, or there is no runtime.
        None,
        Set(Pin<Box<Sleep>>),
    }

    impl Timer {
        pub(super) fn poll(&mut self, after: Duration, cx: &mut Context<'_>) -> Option<Poll<()>> {
            if let Self::Unset = self {
                let under_one = tokio::runtime::Handle::try_current().is_ok();
                // A runtime that was built without timers panics.
                let sleep = under_one.then(|| caught(|| Box::pin(sleep(after)))).flatten();
                *self = sleep.map_or(Self::None, Self::Set);
            }
            let Self::Set(sleep) = self else { return None };
            // If its runtime has gone, while the task has not, it panics.
            let polled = caught(|| sleep.as_mut().poll(cx));
            if polled.is_none() {
                *self = Self::None;
            }
            polled
        }
    }
}
