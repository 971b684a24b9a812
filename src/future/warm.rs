//! Warming, as a future: lanes within one task, each of which takes the next key.

use super::{lead, obtain};
use crate::call::{received, refuse_under_pin};
use crate::flight::Waits;
use crate::freshness::Ttl;
use crate::primitive::caught;
use crate::sync::{Cache, WarmOptions, WarmOutcome, WarmReport, Warming};
use std::borrow::Borrow;
use std::future::poll_fn;
use std::hash::{BuildHasher, Hash};
use std::pin::pin;
use std::task::Poll;

/// So many keys a lane deals with before it lets others of its thread have their turn.
const TURN: usize = 32;

impl<K, V, S> Cache<K, V, S>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    /// Loads by the attached loader what of these keys is not fresh, several at a time, and ends when all are dealt with: the
    /// async form of [`warm`](Self::warm), with the same outcomes.
    ///
    /// All is done in this one future, without a thread or a runtime: it is woken by each step of a load that it waits for, and
    /// then looks at all that are under way, of which there are no more than the [`concurrency`](WarmOptions::concurrency). Where
    /// an [`async_loader`](crate::CacheBuilder::async_loader) is polled, and a blocking one runs, is told at
    /// [`get_or_load_async`](Self::get_or_load_async). It leaves the turn to others of its thread after each 32 keys or so.
    ///
    /// # Panics
    /// In debug builds, if the thread holds a [`Pinned`](crate::Pinned) when it is first polled.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing, and leaves nothing behind: keys that it has not come to are not loaded, what has been
    /// loaded stays, and loads that it leads go on for those who have joined them; if nobody has, the entry is again what it was
    /// before. A blocking loader that runs already runs to its end.
    ///
    /// # Examples
    /// ```
    /// # smol::block_on(async {
    /// use quell::{Cache, WarmOptions};
    ///
    /// let cache = Cache::builder().async_loader(|k: u32| async move { Ok::<_, std::io::Error>(k + 1) }).build();
    /// let report = cache.warm_async(0..100, WarmOptions::new().concurrency(8)).await;
    /// assert_eq!((report.loaded(), cache.get(&99)), (100, Some(100)));
    /// # });
    /// ```
    pub async fn warm_async<B: Borrow<K>>(
        &self,
        keys: impl IntoIterator<Item = B>,
        options: WarmOptions,
    ) -> WarmReport<K> {
        refuse_under_pin();
        let warming = Warming::new(keys, options);
        {
            let mut lanes: Vec<_> =
                (0..warming.concurrency()).map(|_| Box::pin(self.warm_lane(&warming))).collect();
            let all = poll_fn(|cx| {
                lanes.retain_mut(|lane| lane.as_mut().poll(cx).is_pending());
                if lanes.is_empty() { Poll::Ready(()) } else { Poll::Pending }
            });
            all.await;
        }
        warming.report()
    }

    /// Deals with one key after the other.
    async fn warm_lane(&self, warming: &Warming<K>) {
        let mut left = TURN;
        while let Some((nth, key)) = warming.next() {
            let outcome = contained(self.warm_one_async(key, warming)).await;
            warming.settle(nth, outcome);
            left -= 1;
            if left == 0 {
                left = TURN;
                yield_once().await;
            }
        }
    }

    /// Loads one key that is not fresh.
    async fn warm_one_async(&self, key: &K, warming: &Warming<K>) -> WarmOutcome {
        let (mut call, attached) = warming.call(self, key, Waits::AsTask);
        let turn = obtain(&mut call).await;
        let leader = match warming.turn(turn, attached) {
            Ok((lease, loader)) => {
                let load = loader.future(&lease, key.clone());
                lead(lease, Ttl::default(), load)
            }
            Err(outcome) => return outcome,
        };
        WarmOutcome::of(received(leader.rest().await))
    }
}

/// Polls a future to its end. `None` if it panics.
async fn contained<F: Future>(future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    poll_fn(|cx| match caught(|| future.as_mut().poll(cx)) {
        Some(Poll::Pending) => Poll::Pending,
        Some(Poll::Ready(output)) => Poll::Ready(Some(output)),
        None => Poll::Ready(None),
    })
    .await
}

/// Lets the other tasks of the thread have their turn.
async fn yield_once() {
    let mut had = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut had, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
