//! Single loads that have waited for others, as batches.

use super::Attached;
use super::batch::SharedBatch;
use crate::config::Settings;
use crate::engine::{Core, Gathered, Gathering};
use crate::flight::{Fetch, Waits};
use crate::primitive::Arc as Shared;
use crate::primitive::caught;
use crate::primitive::epoch::contain;
use crate::slot::Flight;
use crate::table::Linked;
use std::collections::HashSet;
use std::sync::Arc;

/// Where the single loads of a cache with these settings wait for others, if they do.
pub(crate) fn gathering<K, V, S>(settings: &Settings<K, V>) -> Option<Gathering<K, V, S>>
where
    K: Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    let delay = settings.max_batch_delay;
    (!delay.is_zero()).then(|| Gathering::new(delay, begin))
}

/// A load that waits for others, and is then one of a batch.
pub(super) async fn gathered<K, V, S>(core: Arc<Core<K, V, S>>, load: Gathered<K, V>) -> Fetch<V>
where
    K: Send + Sync + 'static,
    V: Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    let batched = load.load.clone();
    core.gather(load);
    drop(core);
    batched.taken().await.await
}

/// Begins these loads as batches, each by one call of the loader.
fn begin<K, V, S>(core: &Arc<Core<K, V, S>>, loads: Vec<Gathered<K, V>>)
where
    K: Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    // Those that have been dropped meanwhile are left out.
    let is_wanted = |load: &Gathered<_, _>| Arc::strong_count(&load.load) > 1;
    let (mut loads, unwanted): (Vec<_>, Vec<_>) = loads.into_iter().partition(is_wanted);
    unwanted.into_iter().for_each(|load| contain(|| drop(load)));
    for by in [Waits::AsThread, Waits::AsTask] {
        let (mut part, others): (Vec<_>, Vec<_>) = loads.into_iter().partition(|load| load.by == by);
        loads = others;
        while !part.is_empty() {
            let (mut batch, mut later, mut hashes) = (Vec::new(), Vec::new(), HashSet::new());
            for load in part {
                // Of one key there are two if the first was detached meanwhile: a loader is given each key once.
                let mut has_twin = |batch: &[_]| {
                    !hashes.insert(hash(&load)) && batch.iter().any(|other| is_twin(other, &load))
                };
                if batch.len() == core.settings.max_batch_size || has_twin(&batch) {
                    later.push(load);
                } else {
                    batch.push(load);
                }
            }
            begin_one(core, by, batch);
            part = later;
        }
    }
}

fn hash<K, V>(load: &Gathered<K, V>) -> u64 {
    load.flight.target.hash()
}

/// Whether two loads are of one key. If `Eq` panics, they are kept apart as if they were.
fn is_twin<K: Eq, V>(one: &Gathered<K, V>, other: &Gathered<K, V>) -> bool {
    hash(one) == hash(other) && caught(|| one.key == other.key).unwrap_or(true)
}

/// Begins these loads as one batch.
fn begin_one<K, V, S>(core: &Arc<Core<K, V, S>>, by: Waits, loads: Vec<Gathered<K, V>>)
where
    K: Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    // There is one: the loads are for it.
    let Some(loader) = Attached::of(core, by) else { return };
    let (mut keys, mut contexts, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
    for Gathered { load, key, cx, flight, .. } in loads {
        keys.push(key);
        contexts.push(cx);
        waiting.push((load, flight));
    }
    let batch = SharedBatch::new(waiting.len(), &core.settings.name, loader.batch(core, keys, contexts));
    // All before the first is handed over, and may be polled: a load of the batch that asks for another one finds that waiting.
    let member = |(nth, (_, flight)): (usize, &(_, Shared<Flight<_, _>>))| batch.member(nth, flight.id());
    let members: Vec<_> = waiting.iter().enumerate().map(member).collect();
    for ((load, flight), member) in waiting.into_iter().zip(members) {
        load.put(member);
        // In this order: the member names the flight, and is dropped here if its load has been.
        contain(|| drop(load));
        contain(|| drop(flight));
    }
}
