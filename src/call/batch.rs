//! A batch: one future that brings the values of several flights. The load of each flight is a member of it, and whoever
//! polls a member polls the batch.

use crate::clock::Moment;
use crate::flight::cycle::{FlightId, Loading, Wait, bound, graph};
use crate::flight::drive::{Drive, Paused, Poller, Put, Threads};
use crate::flight::wait::{Waiter, WaitingTask, rest};
use crate::flight::{Fetch, LoadFuture};
use crate::loader::BatchFuture;
use crate::primitive::Arc;
use crate::primitive::atomic::{AtomicUsize, Ordering};
use crate::primitive::basket::Basket;
use crate::primitive::epoch::contain;
use crate::primitive::park::Bell;
use crate::primitive::waker::{Rouse, waker_of};
use pin_project_lite::pin_project;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc as Name;
use std::task::{Context, Poll};

type Panic = Box<dyn Any + Send>;
/// What has come for a member, until it takes it.
type Place<V> = Basket<Result<Fetch<V>, Panic>>;

/// One future for several flights, dropped when all of them have ended.
struct Batch<V> {
    drive: Drive<BatchFuture<V>>,
    /// Shares that have not been dropped.
    members: AtomicUsize,
    bell: Bell,
    /// What has come for each member.
    came: Box<[Place<V>]>,
    name: Name<str>,
}

/// A flight's part of a batch.
struct Member<'a, V> {
    batch: &'a Arc<Batch<V>>,
    nth: usize,
}

/// A member's share of its batch. The last one drops the batch's future: a waker may keep the batch itself for longer, and may
/// even be in that future.
struct Share<V> {
    batch: Arc<Batch<V>>,
    /// Its flight waits for the batch; no longer than there is that flight.
    _edge: Wait<'static>,
}

impl<V> Drop for Share<V> {
    fn drop(&mut self) {
        // AcqRel: what was done with each share comes before the end of the future.
        if self.batch.members.fetch_sub(1, Ordering::AcqRel) == 1 {
            let unwanted = self.batch.drive.cancel();
            contain(|| drop(unwanted));
        }
    }
}

pin_project! {
    /// The future of a member. It has its share until it is dropped, which is after its flight has ended.
    struct Kept<F, V> {
        #[pin]
        future: F,
        _share: Share<V>,
    }
}

impl<F: Future, V> Future for Kept<F, V> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.project().future.poll(cx)
    }
}

impl<V> Batch<V> {
    /// On whose behalf the future is polled: any of the flights may be gone before it ends.
    fn id(&self) -> FlightId {
        FlightId::of(self)
    }
}

impl<V: Send + Sync + 'static> Batch<V> {
    fn poll(this: &Arc<Self>) {
        let Some(mut polling) = this.drive.begin(Poller::Task) else { return };
        let polled = {
            let _running = Loading::resume(this.id(), &this.name);
            let waker = waker_of(this);
            let poll = |future: &mut BatchFuture<V>| future.as_mut().poll(&mut Context::from_waker(&waker));
            catch_unwind(AssertUnwindSafe(|| polling.with(poll)))
        };
        match polled {
            Ok(Poll::Pending) => {
                match polling.pause() {
                    Paused::Idle => {}
                    Paused::Woken => this.bell.ring(),
                    Paused::Cancelled(unwanted) => contain(|| drop(unwanted)),
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
        // It stays until the last share goes: its destructor is user code, and must find no flight of the batch under way.
        let _ = polling.end();
        this.bell.ring();
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
    /// A batch for so many flights of a cache called `name`. `future` brings what each is to get, in their order.
    pub(super) fn new(members: usize, name: &Name<str>, future: BatchFuture<V>) -> Self {
        let batch = Batch {
            drive: Drive::empty(),
            members: AtomicUsize::new(members),
            bell: Bell::new(),
            came: (0..members).map(|_| Basket::new(1)).collect(),
            name: name.clone(),
        };
        batch.drive.put(future, Put { spawned: false, orphaned: false, threads: Threads::Any });
        Self(Arc::new(batch))
    }

    /// The load of the nth flight. Once for each.
    pub(super) fn member(&self, nth: usize, flight: FlightId) -> LoadFuture<V> {
        let batch = self.0.clone();
        let edge = bound(graph(), flight, batch.id(), &batch.name);
        let share = Share { batch: batch.clone(), _edge: edge };
        let future = async move {
            let came = rest(&batch.bell, Member { batch: &batch, nth }).await;
            came.unwrap_or_else(|panic| resume_unwind(panic))
        };
        Box::pin(Kept { future, _share: share })
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

    fn due(&mut self) -> Option<Self::End> {
        None
    }
}

impl<V: Send + Sync + 'static> WaitingTask for Member<'_, V> {
    fn poll_timer(&mut self, _: Moment, _: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
}
