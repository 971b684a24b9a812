//! The attached loaders: which of them a call uses, and where it runs.

use super::How;
use super::bring::{Said, conclude, fetched, received, run, said};
use super::drive::{can_spawn, own_task, spawn, start};
use crate::engine::{By, Core, Lease, QueuedLease, Start, source_fence};
use crate::error::LoadError;
use crate::executor::Job;
use crate::flight::cycle::{self, FlightId};
use crate::flight::{Fetch, LoadFuture, Own, Waits};
use crate::freshness::Ttl;
use crate::loader::{LoadContext, Loaded, Loader, SharedAsyncLoader, SharedLoader};
use crate::primitive::basket::Basket;
use crate::primitive::caught;
use crate::primitive::epoch::pin;
use crate::primitive::park::{Bell, Listening};
use crate::primitive::runtime::Runtime;
use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::task::Poll;

/// The loader that a call uses.
pub(crate) enum Attached<K, V> {
    Sync(SharedLoader<K, V>),
    Async(SharedAsyncLoader<K, V>),
}

/// What an attached loader is told. A part of the load: a value's `Clone` is user code.
fn context<K: 'static, V: Clone + 'static, S>(lease: &Lease<K, V, S>) -> LoadContext<V> {
    let previous = lease.previous(&pin());
    LoadContext { previous, cause: lease.cause(), lease_left: lease.core().settings.lease }
}

/// Calls a loader on this thread. A part of the load.
fn call<K: 'static, V: 'static>(loader: &dyn Loader<K, V>, key: &K, cx: LoadContext<V>) -> Fetch<V> {
    let loaded = loader.load(key, &cx);
    Loaded::fetch(loaded, cx.previous)
}

impl<K, V> Attached<K, V>
where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    /// The loader for a call that waits in this way: of the two, the one of its own kind.
    pub(crate) fn of<S>(core: &Core<K, V, S>, waits: Waits) -> Option<Self> {
        let threads = core.settings.loader.clone().map(Self::Sync);
        let tasks = core.settings.async_loader.clone().map(Self::Async);
        match waits {
            Waits::AsThread => threads.or(tasks),
            Waits::AsTask => tasks.or(threads),
        }
    }

    /// How a refresh begins in the background.
    pub(crate) fn background<S>(&self, core: &Core<K, V, S>) -> Start {
        match self {
            Self::Async(_) if can_spawn(core) => Start::Spawned,
            _ => Start::Queued,
        }
    }

    /// Refreshes in the background, by a lease whose start was [`background`](Self::background). `false` if that is refused.
    pub(crate) fn refresh<S>(self, lease: Lease<K, V, S>, key: K) -> bool
    where
        S: Send + Sync + 'static,
    {
        let (core, spawned) = (lease.core().clone(), lease.flight().claim.is_spawned());
        let queued = lease.into_queued();
        let taken = match self {
            Self::Sync(loader) => core.execute(job(queued, move |lease| {
                let load = |lease: &Lease<_, _, _>| {
                    let fetched = call(&*loader, lease.key(), context(lease));
                    said(lease, fetched, Ttl::default())
                };
                caught(|| run(lease, load))
            })),
            Self::Async(loader) if spawned => {
                let load = move |lease: &Lease<_, _, _>| loader.start(key, context(lease));
                spawn(&core, Box::pin(own_task(queued, Ttl::default(), load)))
            }
            Self::Async(loader) => core.execute(Job::new(move || {
                let Some(lease) = queued.begin() else { return };
                let Some(cx) = caught(|| context(&lease)) else {
                    let _ = lease.fail_alone(LoadError::panicked());
                    return;
                };
                let future = loader.start(key, cx);
                // Nobody's own: when the lease is over, whoever wants the value takes over.
                drop(start(lease, future, Ttl::default(), By::Thread).park());
            })),
        };
        core.count_refused(&taken);
        taken.is_ok()
    }

    /// Loads on this thread. A future that has not ended within the lease is given up.
    pub(crate) fn load_here<S>(
        self,
        lease: Lease<K, V, S>,
        ttl: Ttl,
        key: impl FnOnce() -> K,
    ) -> Result<(V, How), LoadError>
    where
        S: Send + Sync + 'static,
    {
        let loader = match self {
            Self::Sync(loader) => {
                let load = |lease: &Lease<_, _, _>| call(&*loader, lease.key(), context(lease));
                return received(fetched(lease, ttl, load));
            }
            Self::Async(loader) => loader,
        };
        let core = lease.core().clone();
        let (begun, future) = (core.time.precise(), loader.start(key(), context(&lease)));
        let by = if core.settings.spawner.is_some() { By::Spawned(Waits::AsThread) } else { By::Thread };
        match start(lease, future, ttl, by).park() {
            Own::Abandoned => Err(LoadError::timed_out(core.time.precise().since(begun))),
            own => received(own),
        }
    }

    /// The future of a load for a task.
    pub(crate) fn future<S>(self, lease: &Lease<K, V, S>, key: K) -> LoadFuture<V>
    where
        S: Send + Sync + 'static,
    {
        match self {
            Self::Async(loader) => loader.start(key, context(lease)),
            Self::Sync(loader) => {
                let (core, flight) = (lease.core().clone(), lease.flight().id());
                let work = Work { loader, key, cx: context(lease), flight, name: core.settings.name.clone() };
                // Handed over when it is first polled: by then it can be seen on whose behalf its caller waits.
                Box::pin(async move {
                    let handover = offload(&core, work);
                    drop(core);
                    handover.fetch().await
                })
            }
        }
    }
}

/// The background job of a queued lease. Dropped unrun, it abandons the flight.
fn job<K, V, S>(
    queued: QueuedLease<K, V, S>,
    load: impl FnOnce(&mut Lease<K, V, S>) -> Option<Said<V>> + Send + 'static,
) -> Job
where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    Job::new(move || {
        let Some(mut lease) = queued.begin() else { return };
        match load(&mut lease) {
            Some(said) => drop(conclude(lease, said)),
            // Nobody's own call: remembered as a failure, so that a hot key does not panic on each read.
            None => {
                let _ = lease.fail_alone(LoadError::panicked());
            }
        }
    })
}

/// A blocking load that is to run where blocking is allowed.
struct Work<K, V> {
    loader: SharedLoader<K, V>,
    key: K,
    cx: LoadContext<V>,
    /// On whose behalf it runs.
    flight: FlightId,
    name: Arc<str>,
}

impl<K: 'static, V: 'static> Work<K, V> {
    fn run(self) -> Fetch<V> {
        let _loading = cycle::Loading::resume(self.flight, &self.name);
        // The twin of the writers' fence, between the claim and the loader.
        source_fence();
        call(&*self.loader, &self.key, self.cx)
    }
}

/// What became of work that was handed over.
enum Came<K, V> {
    Fetched(Result<Fetch<V>, Box<dyn Any + Send>>),
    /// Nobody has run it.
    Unrun(Work<K, V>),
}

struct Handover<K, V> {
    came: Basket<Came<K, V>>,
    bell: Bell,
}

/// Work on its way, which comes back if it is dropped.
struct Handed<K, V> {
    work: Option<Work<K, V>>,
    to: Arc<Handover<K, V>>,
}

impl<K, V> Handed<K, V> {
    fn came(&self, came: Came<K, V>) {
        // One place, for the one thing that comes.
        let _ = self.to.came.put(came);
        self.to.bell.ring();
    }
}

impl<K, V> Drop for Handed<K, V> {
    fn drop(&mut self) {
        if let Some(work) = self.work.take() {
            self.came(Came::Unrun(work));
        }
    }
}

/// Has a blocking loader run on a thread for it: the runtime's, if there is one that is known, or the executor's. If nobody
/// takes it, it runs where the future is polled.
fn offload<K, V, S>(core: &Core<K, V, S>, work: Work<K, V>) -> Arc<Handover<K, V>>
where
    K: Send + Sync + 'static,
    V: Send + Sync + 'static,
{
    let handover = Arc::new(Handover { came: Basket::new(1), bell: Bell::new() });
    let mut handed = Handed { work: Some(work), to: handover.clone() };
    let job = Job::new(move || {
        // If nobody waits for it any more, the load is over.
        if Arc::strong_count(&handed.to) == 1 {
            return;
        }
        if let Some(work) = handed.work.take() {
            let fetched = catch_unwind(AssertUnwindSafe(|| work.run()));
            handed.came(Came::Fetched(fetched));
        }
    });
    if let Err(job) = Runtime::current().spawn_blocking(job, Job::run) {
        // One that is refused comes back by way of its destructor.
        let _ = core.execute(job);
    }
    handover
}

impl<K: 'static, V: 'static> Handover<K, V> {
    async fn fetch(self: Arc<Self>) -> Fetch<V> {
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
        match came.await {
            Came::Fetched(Ok(fetch)) => fetch,
            Came::Fetched(Err(panic)) => resume_unwind(panic),
            Came::Unrun(work) => work.run(),
        }
    }
}
