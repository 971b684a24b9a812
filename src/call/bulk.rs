//! Loads of several keys by one call of the loader: one result, several flights that end with it.

use super::batch::SharedBatch;
use super::bring::{Said, conclude, counting_panics, received, said};
use super::drive::{Leader, OwnTask, can_spawn, own_task_of, spawn, start};
use crate::engine::{By, Lease, QueuedLease, source_fence};
use crate::flight::cycle::{Loading, graph};
use crate::flight::{Fetch, Own, Waits};
use crate::freshness::Ttl;
use crate::loader::BatchFuture;
use std::future::poll_fn;
use std::task::{Context, Poll};

/// The claimed keys, for the loader.
pub(super) fn keys_of<K: Clone, V, S>(leases: &[Lease<K, V, S>]) -> Vec<K> {
    leases.iter().map(|lease| lease.key().clone()).collect()
}

/// Runs what is a part of the load of all these leases, with which it begins.
pub(super) fn run_part<K, V, S, R>(
    leases: &mut [Lease<K, V, S>],
    part: impl FnOnce(&[Lease<K, V, S>]) -> R,
) -> R {
    let core = leases[0].core().clone();
    let _loading: Vec<_> =
        leases.iter().map(|l| Loading::enter(graph(), l.flight().id(), &core.settings.name)).collect();
    leases.iter_mut().for_each(Lease::begin);
    // The twin of the writers' fence, between the claims and the loader.
    source_fence();
    counting_panics(leases, part)
}

/// Runs one load for all leases.
pub(super) fn say_all<K, V, S>(
    leases: &mut [Lease<K, V, S>],
    load: impl FnOnce(&[Lease<K, V, S>], &[K]) -> Vec<Fetch<V>>,
) -> Vec<Said<V>>
where
    K: Clone + 'static,
    V: Clone + 'static,
{
    let keys = keys_of(leases);
    run_part(leases, |leases| {
        let fetched = load(leases, &keys);
        leases.iter().zip(fetched).map(|(lease, fetch)| said(lease, fetch, Ttl::default())).collect()
    })
}

/// Runs one load for all leases, and ends their flights.
pub(super) fn run_all<K, V, S>(
    mut leases: Vec<Lease<K, V, S>>,
    load: impl FnOnce(&[Lease<K, V, S>], &[K]) -> Vec<Fetch<V>>,
) -> Vec<Own<V>>
where
    K: Clone + 'static,
    V: Clone + 'static,
{
    let all = say_all(&mut leases, load);
    leases.into_iter().zip(all).map(|(lease, said)| conclude(lease, said)).collect()
}

/// Makes a future the load of each of these leases.
fn shared<K: 'static, V, S>(leases: &[Lease<K, V, S>], all: BatchFuture<V>) -> SharedBatch<V>
where
    V: Send + Sync + 'static,
{
    SharedBatch::new(leases.len(), &leases[0].core().settings.name, all)
}

/// Begins one load for all leases, for leaders who wait in this way.
pub(super) fn start_all<K, V, S>(
    leases: Vec<Lease<K, V, S>>,
    all: BatchFuture<V>,
    waits: Waits,
) -> Vec<Leader<K, V, S>>
where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    let core = leases[0].core().clone();
    let (spawns, by) = match waits {
        Waits::AsTask => (can_spawn(&core), By::Task),
        Waits::AsThread => (core.settings.spawner.is_some(), By::Thread),
    };
    let by = if spawns { By::SpawnedWithOthers(waits) } else { by };
    let batch = shared(&leases, all);
    let leaders: Vec<_> = leases
        .into_iter()
        .enumerate()
        .map(|(nth, lease)| {
            let member = batch.member(nth, lease.flight().id());
            start(lease, member, Ttl::default(), by)
        })
        .collect();
    if spawns {
        let tasks = leaders.iter().map(OwnTask::of).collect();
        // One that is refused is dropped, and leaves the loads to the leader.
        let _ = spawn(&core, Box::pin(all_of(tasks)));
    } else {
        // Whoever has joined meanwhile may sleep, and this call polls the first of them only.
        leaders.iter().for_each(Leader::ring);
    }
    leaders
}

/// Loads in the background that are one task of their own: they begin when it is first polled, with the future that `load` makes.
pub(super) async fn one_task<K, V, S>(
    queued: Vec<QueuedLease<K, V, S>>,
    load: impl FnOnce(&mut [Lease<K, V, S>]) -> BatchFuture<V>,
) where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    let tasks: Vec<_> = {
        let mut leases = begun(queued);
        if leases.is_empty() {
            return;
        }
        let all = load(&mut leases);
        let batch = shared(&leases, all);
        let task = |(nth, lease): (usize, Lease<_, _, _>)| {
            let member = batch.member(nth, lease.flight().id());
            own_task_of(lease, member, Ttl::default())
        };
        leases.into_iter().enumerate().map(task).collect()
    };
    all_of(tasks).await;
}

/// Of these loads those that have begun now: the others have been taken over, or their cache is gone.
pub(super) fn begun<K, V, S>(queued: Vec<QueuedLease<K, V, S>>) -> Vec<Lease<K, V, S>> {
    queued.into_iter().filter_map(QueuedLease::begin).collect()
}

/// One task for several.
async fn all_of<K, V, S>(mut tasks: Vec<OwnTask<K, V, S>>)
where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    poll_fn(move |cx: &mut Context<'_>| {
        tasks.retain(|task| task.poll(cx).is_pending());
        if tasks.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Resumes the panic of a batch. Which of the loads has it is chance.
pub(super) fn resume_panic<V>(all: &mut Vec<Own<V>>) {
    if let Some(panicked) = all.iter().position(|own| matches!(own, Own::Panic(_))) {
        let _ = received(all.swap_remove(panicked));
    }
}
