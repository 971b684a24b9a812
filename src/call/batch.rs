//! A batch: one future that brings the values of several flights. The load of each flight is a member of it, and whoever
//! polls a member polls the batch.

use crate::clock::Moment;
use crate::flight::cycle::{FlightId, Loading, Wait, bound, graph};
use crate::flight::drive::{Drive, Paused, Poller, Put, Threads};
use crate::flight::wait::{Waiter, WaitingTask, rest};
use crate::flight::{Fetch, LoadFuture};
use crate::primitive::Arc;
use crate::primitive::basket::Basket;
use crate::primitive::park::Bell;
use crate::primitive::waker::{Rouse, waker_of};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc as Name;
use std::task::{Context, Poll};

type Panic = Box<dyn Any + Send>;
/// What has come for a member, until it takes it.
type Place<V> = Basket<Result<Fetch<V>, Panic>>;
type BatchFuture<V> = Pin<Box<dyn Future<Output = Vec<Fetch<V>>> + Send>>;

/// One future for several flights.
struct Batch<V> {
    drive: Drive<BatchFuture<V>>,
    bell: Bell,
    /// What has come for each member.
    came: Box<[Place<V>]>,
    /// On whose behalf the future is polled.
    flight: FlightId,
    name: Name<str>,
    /// Each flight waits for the next, and so for the one on whose behalf the future is polled.
    _edges: Vec<Wait<'static>>,
}

/// A flight's part of a batch.
struct Member<'a, V> {
    batch: &'a Arc<Batch<V>>,
    nth: usize,
}

impl<V: Send + Sync + 'static> Batch<V> {
    fn poll(this: &Arc<Self>) {
        let Some(mut polling) = this.drive.begin(Poller::Task) else { return };
        let polled = {
            let _running = Loading::resume(this.flight, &this.name);
            let waker = waker_of(this);
            let poll = |future: &mut BatchFuture<V>| future.as_mut().poll(&mut Context::from_waker(&waker));
            catch_unwind(AssertUnwindSafe(|| polling.with(poll)))
        };
        match polled {
            Ok(Poll::Pending) => {
                if matches!(polling.pause(), Paused::Woken) {
                    this.bell.ring();
                }
                return;
            }
            Ok(Poll::Ready(fetched)) => {
                for (came, fetch) in this.came.iter().zip(fetched) {
                    let _ = came.put(Ok(fetch));
                }
            }
            Err(panic) => {
                // For one of them; nothing is known of the others.
                let all = std::iter::once(Err(panic)).chain(std::iter::repeat_with(|| Ok(Fetch::Abandoned)));
                for (came, it) in this.came.iter().zip(all) {
                    let _ = came.put(it);
                }
            }
        }
        let ended = polling.end();
        this.bell.ring();
        drop(ended);
    }
}

/// Progress of the batch's future.
impl<V: Send + Sync + 'static> Rouse for Batch<V> {
    fn rouse(&self) {
        if self.drive.wake() {
            self.bell.ring();
        }
    }
}

/// A share of a batch.
pub(super) struct SharedBatch<V>(Arc<Batch<V>>);

impl<V: Send + Sync + 'static> SharedBatch<V> {
    /// A batch for these flights, of a cache called `name`. `future` brings what each is to get, in their order.
    pub(super) fn new(flights: &[FlightId], name: &Name<str>, future: BatchFuture<V>) -> Self {
        let edges = flights.windows(2).map(|two| bound(graph(), two[0], two[1], name)).collect();
        let batch = Batch {
            drive: Drive::empty(),
            bell: Bell::new(),
            came: flights.iter().map(|_| Basket::new(1)).collect(),
            flight: *flights.last().expect("a batch has members"),
            name: name.clone(),
            _edges: edges,
        };
        batch.drive.put(future, Put { spawned: false, orphaned: true, threads: Threads::Any });
        Self(Arc::new(batch))
    }

    /// The load of the nth flight.
    pub(super) fn member(&self, nth: usize) -> LoadFuture<V> {
        let batch = self.0.clone();
        Box::pin(async move {
            let came = rest(&batch.bell, Member { batch: &batch, nth }).await;
            came.unwrap_or_else(|panic| resume_unwind(panic))
        })
    }
}

impl<V: Send + Sync + 'static> Waiter for Member<'_, V> {
    type End = Result<Fetch<V>, Panic>;

    fn look(&mut self) -> Result<Self::End, Moment> {
        self.batch.came[self.nth].take().ok_or(Moment::NEVER)
    }

    fn may_drive(&self) -> bool {
        self.batch.drive.may_begin(Poller::Task)
    }

    fn drive(&mut self) {
        Batch::poll(self.batch);
    }

    fn due(&mut self) -> Self::End {
        Ok(Fetch::Abandoned)
    }
}

impl<V: Send + Sync + 'static> WaitingTask for Member<'_, V> {
    fn poll_timer(&mut self, _: Moment, _: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
}
