//! One thing on its way to the task that waits for it.

use super::basket::Basket;
use super::park::{Bell, Listening};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

/// A place for one thing, which comes once.
pub(crate) struct Handover<T> {
    came: Basket<T>,
    bell: Bell,
}

impl<T> Handover<T> {
    pub(crate) fn new() -> Self {
        Self { came: Basket::new(1), bell: Bell::new() }
    }

    pub(crate) fn put(&self, thing: T) {
        // One place, for the one thing that comes.
        let _ = self.came.put(thing);
        self.bell.ring();
    }

    /// Waits for it.
    pub(crate) async fn taken(self: Arc<Self>) -> T {
        let mut listening: Option<Listening> = None;
        let came = poll_fn(|cx| {
            loop {
                if let Some(came) = self.came.take() {
                    return Poll::Ready(came);
                }
                // Check, listen, check again, wait.
                let Some(ear) = &mut listening else {
                    listening = Some(self.bell.listen());
                    continue;
                };
                if ear.poll_rung(cx).is_pending() {
                    return Poll::Pending;
                }
                listening = None;
            }
        });
        came.await
    }
}
