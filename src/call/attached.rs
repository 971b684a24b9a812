//! The attached loaders: which of them a call uses, and where it runs.

use super::How;
use super::bring::{Said, conclude, fetched, received, run, said};
use super::bulk::{begun, keys_of, one_task, resume_panic, run_all, run_part, say_all, start_all};
use super::drive::{Leader, can_spawn, own_task, spawn, start};
use super::gather::gathered;
use crate::engine::{By, Core, Gathered, Lease, QueuedLease, Start, source_fence};
use crate::error::LoadError;
use crate::executor::Job;
use crate::flight::cycle::{Behalf, is_within_a_load};
use crate::flight::{LoadFuture, Own, Waits};
use crate::freshness::Ttl;
use crate::loader::{BatchFuture, LoadContext, SharedAsyncLoader, SharedLoader};
use crate::primitive::caught;
use crate::primitive::epoch::pin;
use crate::primitive::handover::Handover;
use crate::primitive::runtime::Runtime;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

/// The loader that a call uses.
pub(crate) enum Attached<K, V> {
    Sync(SharedLoader<K, V>),
    Async(SharedAsyncLoader<K, V>),
}

impl<K, V> Clone for Attached<K, V> {
    fn clone(&self) -> Self {
        match self {
            Self::Sync(loader) => Self::Sync(loader.clone()),
            Self::Async(loader) => Self::Async(loader.clone()),
        }
    }
}

/// What an attached loader is told. A part of the load: a value's `Clone` is user code.
fn context<K: 'static, V: Clone + 'static, S>(lease: &Lease<K, V, S>) -> LoadContext<V> {
    let previous = lease.previous(&pin());
    LoadContext { previous, cause: lease.cause(), lease_left: lease.core().settings.lease }
}

/// What an attached loader of many keys is told.
fn contexts<K: 'static, V: Clone + 'static, S>(leases: &[Lease<K, V, S>]) -> Vec<LoadContext<V>> {
    leases.iter().map(context).collect()
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

    /// How many keys it takes at once, at most.
    pub(crate) fn most<S>(&self, core: &Core<K, V, S>) -> usize {
        let takes_many = match self {
            Self::Sync(loader) => loader.takes_many(),
            Self::Async(loader) => loader.takes_many(),
        };
        if takes_many { core.settings.max_batch_size } else { 1 }
    }

    /// Refreshes in the background, by a lease whose start was [`background`](Self::background). `false` if that is refused.
    pub(crate) fn refresh<S>(self, lease: Lease<K, V, S>, key: K) -> bool
    where
        S: Send + Sync + 'static,
    {
        let (core, spawned) = (lease.core().clone(), lease.flight().claim.is_spawned());
        let queued = lease.into_queued();
        let taken = match self {
            Self::Sync(loader) => core.execute(job(vec![queued], move |leases| {
                let load = |lease: &Lease<_, _, _>| {
                    let fetched = loader.load(lease.key(), context(lease));
                    said(lease, fetched, Ttl::default())
                };
                vec![run(&mut leases[0], load)]
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
        let gathers = self.gathers(lease.core());
        let spawns = match &self {
            Self::Sync(loader) if !gathers => {
                let load = |lease: &Lease<_, _, _>| loader.load(lease.key(), context(lease));
                return received(fetched(lease, ttl, load));
            }
            Self::Sync(_) => false,
            Self::Async(_) => lease.core().settings.spawner.is_some(),
        };
        let core = lease.core().clone();
        let (begun, future) = (core.time.precise(), self.future(&lease, key()));
        let by = if spawns { By::Spawned(Waits::AsThread) } else { By::Thread };
        match start(lease, future, ttl, by).park() {
            Own::GivenUp => Err(LoadError::timed_out(core.time.precise().since(begun))),
            own => received(own),
        }
    }

    /// Whether a load that this thread begins waits for others. One that another load needs does not: those that it would be
    /// loaded with might need that other one, and a blocking load keeps a thread of the executor meanwhile.
    fn gathers<S>(&self, core: &Core<K, V, S>) -> bool {
        core.gathering.is_some() && self.most(core) > 1 && !is_within_a_load()
    }

    /// Many keys as one load, which begins when it is first polled. For each key there is a context.
    pub(super) fn batch<S>(
        &self,
        core: &Arc<Core<K, V, S>>,
        keys: Vec<K>,
        contexts: Vec<LoadContext<V>>,
    ) -> BatchFuture<V>
    where
        S: Send + Sync + 'static,
    {
        match self.clone() {
            Self::Async(loader) => Box::pin(async move {
                // The twin of the writers' fence, between the claims and the loader.
                source_fence();
                loader.start_many(keys, contexts).await
            }),
            Self::Sync(loader) => {
                Box::pin(offloaded(core.clone(), move || loader.load_many(&keys, contexts)))
            }
        }
    }

    /// The future of a load that a caller waits for.
    pub(crate) fn future<S>(self, lease: &Lease<K, V, S>, key: K) -> LoadFuture<V>
    where
        S: Send + Sync + 'static,
    {
        let (core, cx) = (lease.core().clone(), context(lease));
        if self.gathers(&core) {
            let by = match self {
                Self::Sync(_) => Waits::AsThread,
                Self::Async(_) => Waits::AsTask,
            };
            let (load, flight) = (Arc::new(Handover::new()), lease.flight().clone());
            return Box::pin(gathered(core, Gathered { load, key, cx, by, flight }));
        }
        match self {
            Self::Async(loader) => loader.start(key, cx),
            Self::Sync(loader) => Box::pin(offloaded(core, move || loader.load(&key, cx))),
        }
    }
}

impl<K, V> Attached<K, V>
where
    K: Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    /// Refreshes many keys in the background, by leases whose start was [`background`](Self::background): as many by one call
    /// of the loader as that takes.
    pub(crate) fn refresh_many<S>(&self, mut leases: Vec<Lease<K, V, S>>)
    where
        S: Send + Sync + 'static,
    {
        while let Some(first) = leases.first() {
            let (core, spawned) = (first.core().clone(), first.flight().claim.is_spawned());
            let later = leases.split_off(leases.len().min(self.most(&core)));
            let queued: Vec<_> =
                std::mem::replace(&mut leases, later).into_iter().map(Lease::into_queued).collect();
            let refreshes = queued.len();
            let taken = match self.clone() {
                Self::Sync(loader) => core.execute(job(queued, move |leases| {
                    say_all(leases, |leases, keys| loader.load_many(keys, contexts(leases)))
                })),
                Self::Async(loader) if spawned => {
                    spawn(&core, Box::pin(one_task(queued, move |leases| start_many(loader, leases))))
                }
                Self::Async(loader) => {
                    core.execute(Job::new(move || {
                        let mut leases = begun(queued);
                        if leases.is_empty() {
                            return;
                        }
                        let Some(all) = caught(|| start_many(loader, &mut leases)) else {
                            return fail_all(leases);
                        };
                        // Nobody's own: when the lease is over, whoever wants a value takes over.
                        for leader in start_all(leases, all, Waits::AsThread) {
                            drop(leader.park());
                        }
                    }))
                }
            };
            (0..refreshes).for_each(|_| core.count_refused(&taken));
        }
    }

    /// Loads many keys on this thread, by one call of the loader. A future that has not ended within the lease is given up.
    pub(crate) fn load_many_here<S>(&self, mut leases: Vec<Lease<K, V, S>>) -> Vec<Own<V>>
    where
        S: Send + Sync + 'static,
    {
        let loader = match self {
            Self::Sync(loader) => {
                return run_all(leases, |leases, keys| loader.load_many(keys, contexts(leases)));
            }
            Self::Async(loader) => loader.clone(),
        };
        let core = leases[0].core().clone();
        let begun = core.time.precise();
        let all = start_many(loader, &mut leases);
        let leaders = start_all(leases, all, Waits::AsThread);
        let mut all = leaders.iter().map(Leader::park).collect();
        resume_panic(&mut all);
        let late = |own| match own {
            Own::GivenUp => Own::Error(LoadError::timed_out(core.time.precise().since(begun))),
            own => own,
        };
        all.into_iter().map(late).collect()
    }

    /// Begins one load of many keys, for a task.
    pub(crate) fn start_many<S>(&self, mut leases: Vec<Lease<K, V, S>>) -> Vec<Leader<K, V, S>>
    where
        S: Send + Sync + 'static,
    {
        let all = match self {
            Self::Async(loader) => start_many(loader.clone(), &mut leases),
            Self::Sync(_) => self.batch(leases[0].core(), keys_of(&leases), contexts(&leases)),
        };
        start_all(leases, all, Waits::AsTask)
    }
}

/// Begins one load for all these leases.
fn start_many<K, V, S>(loader: SharedAsyncLoader<K, V>, leases: &mut [Lease<K, V, S>]) -> BatchFuture<V>
where
    K: Clone + 'static,
    V: Clone + 'static,
{
    let keys = keys_of(leases);
    run_part(leases, |leases| loader.start_many(keys, contexts(leases)))
}

/// The background job of queued leases. Dropped unrun, it abandons their flights.
fn job<K, V, S>(
    queued: Vec<QueuedLease<K, V, S>>,
    load: impl FnOnce(&mut [Lease<K, V, S>]) -> Vec<Said<V>> + Send + 'static,
) -> Job
where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    Job::new(move || {
        let mut leases = begun(queued);
        if leases.is_empty() {
            return;
        }
        let Some(all) = caught(|| load(&mut leases)) else { return fail_all(leases) };
        for (lease, said) in leases.into_iter().zip(all) {
            drop(conclude(lease, said));
        }
    })
}

/// Ends loads that have panicked and are nobody's own call: remembered as failures, so that a hot key does not panic on each
/// read.
fn fail_all<K, V: Clone, S>(leases: Vec<Lease<K, V, S>>) {
    for lease in leases {
        let _ = lease.fail_alone(LoadError::panicked());
    }
}

/// Blocking work that is to be done where blocking is allowed.
type Work<T> = Box<dyn FnOnce() -> T + Send>;

/// What became of work that was handed over.
enum Came<T> {
    Done(Result<T, Box<dyn Any + Send>>),
    /// Nobody has done it.
    Undone(Work<T>),
}

/// Work on its way, which comes back if it is dropped.
struct Handed<T> {
    work: Option<Work<T>>,
    to: Arc<Handover<Came<T>>>,
}

impl<T> Drop for Handed<T> {
    fn drop(&mut self) {
        if let Some(work) = self.work.take() {
            self.to.put(Came::Undone(work));
        }
    }
}

/// Has a blocking load done on a thread for it: the runtime's, if there is one that is known, or the executor's. If nobody
/// takes it, it is done where the future is polled.
async fn offloaded<K, V, S, T>(core: Arc<Core<K, V, S>>, load: impl FnOnce() -> T + Send + 'static) -> T
where
    K: Send + Sync + 'static,
    V: Send + Sync + 'static,
    T: Send + 'static,
{
    let handover = {
        // Handed over when it is first polled: by then it can be seen on whose behalf.
        let behalf = Behalf::here();
        let work: Work<T> = Box::new(move || {
            let _loading = behalf.enter();
            // The twin of the writers' fence, between the claim and the loader.
            source_fence();
            load()
        });
        hand_over(&core, work)
    };
    drop(core);
    match handover.taken().await {
        Came::Done(Ok(done)) => done,
        Came::Done(Err(panic)) => resume_unwind(panic),
        Came::Undone(work) => work(),
    }
}

fn hand_over<K, V, S, T: Send + 'static>(core: &Core<K, V, S>, work: Work<T>) -> Arc<Handover<Came<T>>> {
    let handover = Arc::new(Handover::new());
    let mut handed = Handed { work: Some(work), to: handover.clone() };
    let job = Job::new(move || {
        // If nobody waits for it any more, the load is over.
        if Arc::strong_count(&handed.to) == 1 {
            return;
        }
        if let Some(work) = handed.work.take() {
            let done = catch_unwind(AssertUnwindSafe(work));
            handed.to.put(Came::Done(done));
        }
    });
    if let Err(job) = Runtime::current().spawn_blocking(job, Job::run) {
        // One that is refused comes back by way of its destructor.
        let _ = core.execute(job);
    }
    handover
}
