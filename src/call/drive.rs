//! Loads that are futures: who polls them, and who waits for them.

use super::Joined;
use super::bring::{conclude, counting_panics, said};
use crate::clock::{Moment, Time};
use crate::engine::{By, Core, Lease, Place, QueuedLease, source_fence};
use crate::error::LoadError;
use crate::executor::{BoxFuture, Rejected};
use crate::flight::cycle::{self, Wait, graph};
use crate::flight::drive::{Paused, Poller, Polling};
use crate::flight::wait::{Waiter, WaitingTask, park, rest};
use crate::flight::{Fetch, Load, LoadFuture, Own, Waited, Waits};
use crate::freshness::Ttl;
use crate::primitive::Arc as Shared;
use crate::primitive::epoch::contain;
use crate::primitive::runtime::{Runtime, Timer};
use crate::primitive::waker::waker_of;
use crate::slot::{Flight, SlotLoad};
use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// Whether a load's future can be made a task of its own.
pub(crate) fn can_spawn<K, V, S>(core: &Core<K, V, S>) -> bool {
    core.settings.spawner.is_some() || !Runtime::current().is_none()
}

/// Makes a task of its own.
pub(crate) fn spawn<K, V, S>(core: &Core<K, V, S>, task: BoxFuture) -> Result<(), Rejected> {
    match &core.settings.spawner {
        Some(spawner) => spawner.spawn(task),
        None => Runtime::current().spawn(task).map_err(|_| Rejected),
    }
}

/// Begins a load that is a future, for a leader who waits for it; as a task of its own, if it is to be one.
pub(crate) fn start<K, V, S>(
    lease: Lease<K, V, S>,
    future: LoadFuture<V>,
    ttl: Ttl,
    by: By,
) -> Leader<K, V, S>
where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    let edge = cycle::nested(graph(), lease.flight().id(), &lease.core().settings.name);
    let leader = Leader { _edge: edge, place: put(lease, future, ttl, by) };
    if let By::Spawned(_) = by {
        // One that is refused is dropped, and leaves the load to the leader.
        let _ = spawn(leader.place.core(), Box::pin(OwnTask::of(&leader).run()));
    }
    leader
}

fn put<K: 'static, V: 'static, S>(
    mut lease: Lease<K, V, S>,
    future: LoadFuture<V>,
    ttl: Ttl,
    by: By,
) -> Place<K, V, S> {
    lease.begin();
    // The twin of the writers' fence, between the claim and the loader.
    source_fence();
    lease.put_future(future, ttl, by)
}

/// A load in the background as a task of its own: begins when it is first polled, with the future that `load` makes.
pub(crate) async fn own_task<K, V, S>(
    queued: QueuedLease<K, V, S>,
    ttl: Ttl,
    load: impl FnOnce(&Lease<K, V, S>) -> LoadFuture<V>,
) where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    let task = {
        let Some(lease) = queued.begin() else { return };
        let future = load(&lease);
        own_task_of(lease, future, ttl)
    };
    task.run().await;
}

/// Begins a load that is a task of its own, for nobody.
pub(super) fn own_task_of<K, V, S>(lease: Lease<K, V, S>, future: LoadFuture<V>, ttl: Ttl) -> OwnTask<K, V, S>
where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    let place = put(lease, future, ttl, By::OwnTask);
    OwnTask { core: place.core().clone(), flight: place.flight().clone(), place: Some(place) }
}

/// The task of its own that polls a load. Dropped unfinished, it leaves that to those who wait.
pub(super) struct OwnTask<K, V, S> {
    core: Arc<Core<K, V, S>>,
    flight: Shared<Flight<K, V>>,
    /// The leader's, if nobody waits for the load.
    place: Option<Place<K, V, S>>,
}

impl<K, V, S> OwnTask<K, V, S>
where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    /// For the load of a leader.
    pub(super) fn of(leader: &Leader<K, V, S>) -> Self {
        Self { core: leader.place.core().clone(), flight: leader.place.flight().clone(), place: None }
    }

    async fn run(self) {
        poll_fn(move |cx| self.poll(cx)).await;
    }

    pub(super) fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        if drive(&self.core, &self.flight, Poller::OwnTask, Some(cx.waker())) {
            self.flight.ring();
        }
        if self.flight.drive.is_spawned() { Poll::Pending } else { Poll::Ready(()) }
    }
}

impl<K, V, S> Drop for OwnTask<K, V, S> {
    fn drop(&mut self) {
        if self.flight.drive.unspawn() {
            if self.flight.has_tasks() {
                self.flight.ring();
            } else {
                self.core.leave_to_threads(&self.flight);
            }
        }
        self.place.take();
    }
}

/// Polls the future of a flight, if it is to be polled by this one and nobody else does. Ends the flight if the future has
/// ended: then it is `true`, and its own caller is still to be told. `own` is the waker of a task of its own.
#[must_use]
fn drive<K, V, S>(
    core: &Arc<Core<K, V, S>>,
    flight: &Shared<Flight<K, V>>,
    by: Poller,
    own: Option<&Waker>,
) -> bool
where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    let Some(mut polling) = flight.drive.begin(by) else { return false };
    let polled = {
        let _running = cycle::Loading::resume(flight.id(), &core.settings.name);
        polling.with(|load| {
            let Load::Running(running) = load else { return Ok(Poll::Ready(Fetch::Abandoned)) };
            if let Some(own) = own
                && !running.task.as_ref().is_some_and(|task| task.will_wake(own))
            {
                running.task = Some(own.clone());
            }
            let shared = waker_of(flight);
            let mut cx = Context::from_waker(own.unwrap_or(&shared));
            let (runtime, future, begun) = (&running.runtime, &mut running.future, &mut running.begun);
            catch_unwind(AssertUnwindSafe(|| {
                if *begun == Moment::NEVER {
                    *begun = core.time.precise();
                }
                runtime.enter(|| future.as_mut().poll(&mut cx))
            }))
        })
    };
    match polled {
        Ok(Poll::Pending) => {
            match polling.pause() {
                Paused::Idle => {}
                Paused::Woken => flight.ring(),
                Paused::Cancelled(load) => core.drop_load(flight, load),
            }
            return false;
        }
        Ok(Poll::Ready(fetch)) => end(core, flight, polling, Ok(fetch)),
        Err(panic) => end(core, flight, polling, Err(panic)),
    }
    true
}

type Panic = Box<dyn Any + Send>;

/// Ends the flight of a future that has ended.
fn end<K, V, S>(
    core: &Arc<Core<K, V, S>>,
    flight: &Shared<Flight<K, V>>,
    mut polling: Polling<'_, SlotLoad<K, V>>,
    fetched: Result<Fetch<V>, Panic>,
) where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    let load = polling.with(|load| std::mem::replace(load, Load::Ended(Own::Abandoned)));
    let Load::Running(running) = load else { return };
    let mut lease = Lease::resume(core.clone(), flight.clone(), running.seat, running.begun);
    let said = catch_unwind(AssertUnwindSafe(|| {
        counting_panics(std::slice::from_mut(&mut lease), |leases| match fetched {
            Ok(fetch) => said(&leases[0], fetch, running.ttl),
            Err(panic) => resume_unwind(panic),
        })
    }));
    let own = catch_unwind(AssertUnwindSafe(|| match said {
        Ok(said) => conclude(lease, said),
        Err(panic) => {
            if flight.claim.in_background() {
                // Nobody's own call: remembered as a failure, so that a hot key does not panic on each read.
                let _ = lease.fail_alone(LoadError::panicked());
            }
            Own::Panic(panic)
        }
    }));
    let own = own.unwrap_or_else(Own::Panic);
    polling.with(|load| *load = Load::Ended(own));
    if let Some(unwanted) = polling.end() {
        core.drop_load(flight, unwanted);
    }
    contain(|| running.runtime.enter(|| drop(running.future)));
}

/// A leader whose load is a future. Dropped, it leaves the load to those who have joined, or ends it.
pub(crate) struct Leader<K, V, S> {
    /// On whose behalf it waits; goes first, as that of [`Joined`].
    _edge: Option<Wait<'static>>,
    place: Place<K, V, S>,
}

impl<K, V, S> Leader<K, V, S>
where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    /// Tells those who have joined before the load was put in that there is something to poll.
    pub(crate) fn ring(&self) {
        self.place.flight().ring();
    }

    /// Waits as a task.
    pub(crate) fn rest(&self) -> impl Future<Output = Own<V>> + Send + use<'_, K, V, S> {
        let flight = self.place.flight();
        // Its task may never be run.
        let until = if flight.drive.is_spawned() { flight.lease_end() } else { Moment::NEVER };
        rest(flight.bell(), Watch::new(&self.place, Waits::AsTask, OwnResult { until }))
    }

    /// Waits as a thread, for no longer than the lease: what the load needs may need this very thread.
    pub(crate) fn park(&self) -> Own<V> {
        let (flight, time) = (self.place.flight(), &self.place.core().time);
        let wants = OwnResult { until: flight.lease_end() };
        park(flight.bell(), time, Watch::new(&self.place, Waits::AsThread, wants))
    }
}

impl<K, V, S> Joined<K, V, S>
where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    /// Waits as a task.
    pub(crate) fn rest(&self) -> impl Future<Output = Waited<V>> + Send + use<'_, K, V, S> {
        let wants = Outcome { deadline: self.deadline };
        rest(self.place.flight().bell(), Watch::new(&self.place, Waits::AsTask, wants))
    }

    /// Waits as a thread.
    pub(crate) fn park(&self) -> Waited<V> {
        let (flight, time) = (self.place.flight(), &self.place.core().time);
        let wants = Outcome { deadline: self.deadline };
        park(flight.bell(), time, Watch::new(&self.place, Waits::AsThread, wants))
    }
}

/// What one who waits looks for.
trait Wants<K, V> {
    type End;

    /// Whether the load is another caller's, who is to be told of its end.
    const IS_ANOTHERS: bool;

    /// As [`Waiter::look`].
    fn look(&mut self, flight: &Flight<K, V>, time: &Time, waits: Waits) -> Result<Self::End, Moment>;

    /// As [`Waiter::due`].
    fn due(&mut self, flight: &Flight<K, V>, waits: Waits) -> Option<Self::End>;
}

/// What the waiter's own load comes to, and how long it may leave it to others.
struct OwnResult {
    until: Moment,
}

impl<K, V> Wants<K, V> for OwnResult {
    type End = Own<V>;

    const IS_ANOTHERS: bool = false;

    fn look(&mut self, flight: &Flight<K, V>, time: &Time, waits: Waits) -> Result<Own<V>, Moment> {
        if let Some(Load::Ended(own)) = flight.drive.take_ended() {
            return Ok(own);
        }
        if self.until != Moment::NEVER
            && self.until <= time.now()
            && let Some(end) = self.due(flight, waits)
        {
            return Ok(end);
        }
        Err(self.until)
    }

    fn due(&mut self, flight: &Flight<K, V>, waits: Waits) -> Option<Own<V>> {
        if waits == Waits::AsThread {
            flight.end_lease_by_park();
            return Some(Own::GivenUp);
        }
        // A task polls its own load if nobody has begun to.
        self.until = Moment::NEVER;
        if flight.drive.take_back() {
            flight.ring();
        }
        None
    }
}

/// What somebody else's flight comes to.
struct Outcome {
    deadline: Moment,
}

impl<K, V: Clone> Wants<K, V> for Outcome {
    type End = Waited<V>;

    const IS_ANOTHERS: bool = true;

    fn look(&mut self, flight: &Flight<K, V>, time: &Time, _: Waits) -> Result<Waited<V>, Moment> {
        flight.look(time, self.deadline)
    }

    fn due(&mut self, flight: &Flight<K, V>, _: Waits) -> Option<Waited<V>> {
        Some(flight.due(self.deadline))
    }
}

/// One who waits at a place.
struct Watch<'a, K, V, S, W> {
    place: &'a Place<K, V, S>,
    waits: Waits,
    wants: W,
    timer: Timer,
    /// When the wait's own deadline and the lease's end come by real time, once that is known.
    due: [Moment; 2],
}

impl<'a, K, V, S, W> Watch<'a, K, V, S, W> {
    fn new(place: &'a Place<K, V, S>, waits: Waits, wants: W) -> Self {
        Self { place, waits, wants, timer: Timer::default(), due: [Moment::NEVER; 2] }
    }

    fn poller(&self) -> Poller {
        match self.waits {
            Waits::AsTask => Poller::Task,
            Waits::AsThread => Poller::Thread { no_task: !self.place.flight().has_tasks() },
        }
    }
}

impl<K, V, S, W> Waiter for Watch<'_, K, V, S, W>
where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
    W: Wants<K, V>,
{
    type End = W::End;

    fn look(&mut self) -> Result<W::End, Moment> {
        self.wants.look(self.place.flight(), &self.place.core().time, self.waits)
    }

    fn may_drive(&self) -> bool {
        let drive = &self.place.flight().drive;
        drive.is_under_way() && drive.may_begin(self.poller())
    }

    fn drive(&mut self) {
        if drive(self.place.core(), self.place.flight(), self.poller(), None) && W::IS_ANOTHERS {
            self.place.flight().ring();
        }
    }

    fn due(&mut self) -> Option<W::End> {
        self.wants.due(self.place.flight(), self.waits)
    }
}

impl<K, V, S, W> WaitingTask for Watch<'_, K, V, S, W>
where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
    W: Wants<K, V>,
{
    /// The lease's end is the keeper's to tell, once for all who wait: the runtime may have nobody who drives it. The wait's own
    /// deadline is the runtime's, where it has a timer.
    fn poll_timer(&mut self, until: Moment, cx: &mut Context<'_>) -> Poll<()> {
        let (core, flight) = (&**self.place.core(), self.place.flight());
        let lease_end = flight.lease_end();
        if until == Moment::NEVER || core.time.is_moved_by_hand() {
            return Poll::Pending;
        }
        // By real time, whatever clock the cache has: as for a thread that parks.
        for (due, at) in self.due.iter_mut().zip([until, lease_end]) {
            if *due == Moment::NEVER
                && let Some(after) = core.time.real_time_until(at)
            {
                *due = Time::Coarse.precise().plus(after);
            }
        }
        let ([own, lease], now) = (self.due, Time::Coarse.now());
        if own.min(lease) <= now {
            return Poll::Ready(());
        }
        if until < lease_end {
            match self.timer.poll(own.since(now), cx) {
                Some(Poll::Ready(())) => return Poll::Ready(()),
                Some(Poll::Pending) => {}
                None => core.ring_at(flight, own),
            }
        }
        core.ring_at(flight, lease);
        Poll::Pending
    }
}
