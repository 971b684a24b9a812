//! A call for many keys: what is cached, what it claims and loads as one batch, and what others are loading. It settles
//! what it has claimed before it waits for anybody, so that two such calls cannot wait for each other.

use super::batch::SharedBatch;
use super::bring::{Said, conclude, counting_panics, received, said};
use super::drive::{Leader, OwnTask, can_spawn, spawn, start};
use super::map::mapped;
use super::{Call, How, Joined, Step, Terms, Turn};
use crate::engine::{By, Core, Lease, source_fence};
use crate::error::{BoxError, LoadError, LoadErrorKind};
use crate::flight::cycle::{Loading, graph};
use crate::flight::{Fetch, Own, Waited};
use crate::freshness::Ttl;
use std::collections::{HashMap, HashSet};
use std::future::poll_fn;
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;
use std::task::Poll;

/// A call for many keys on its way.
struct Many<'a, K, V, S> {
    /// For what there is no answer yet.
    pending: Vec<Call<'a, K, V, S, K>>,
    found: HashMap<K, V>,
}

/// A key that is this call's to load.
struct Claim<'a, K, V, S> {
    call: Call<'a, K, V, S, K>,
    /// A stale value is in hand.
    stale: bool,
}

/// A key that somebody else loads.
type Joins<'a, K, V, S> = (Call<'a, K, V, S, K>, Joined<K, V, S>);

/// What a look has come to, beside what was found.
struct Looked<'a, K, V, S> {
    claims: Vec<Claim<'a, K, V, S>>,
    leases: Vec<Lease<K, V, S>>,
    joined: Vec<Joins<'a, K, V, S>>,
}

impl<'a, K, V, S> Many<'a, K, V, S>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    fn new(core: &'a Arc<Core<K, V, S>>, keys: &'a HashSet<K>, terms: Terms) -> Self {
        let pending = keys.iter().map(|key| Call::new(core, key, terms)).collect();
        Self { pending, found: HashMap::with_capacity(keys.len()) }
    }

    fn look(&mut self) -> Result<Looked<'a, K, V, S>, LoadError> {
        let mut looked = Looked { claims: Vec::new(), leases: Vec::new(), joined: Vec::new() };
        for mut call in std::mem::take(&mut self.pending) {
            // All that it leads is one load.
            call.terms.demand.is_let_in = !looked.leases.is_empty();
            let (lease, stale) = match call.look() {
                // Known to be absent: nothing is found, and nothing is to be loaded.
                Err(error) if error.kind() == LoadErrorKind::Absent => continue,
                Err(error) => return Err(error),
                Ok(Step::Join(joined)) => {
                    looked.joined.push((call, joined));
                    continue;
                }
                Ok(Step::Turn(Turn::Served(value, _, lease))) => {
                    self.found.insert(call.key().clone(), value);
                    let Some(lease) = lease else { continue };
                    (lease, true)
                }
                Ok(Step::Turn(Turn::Lead(lease))) => (lease, false),
            };
            looked.leases.push(lease);
            looked.claims.push(Claim { call, stale });
        }
        Ok(looked)
    }

    /// What the load of a claimed key has come to.
    fn settle(
        &mut self,
        claim: &Claim<'a, K, V, S>,
        got: Result<(V, How), LoadError>,
    ) -> Result<(), LoadError> {
        let key = claim.call.key();
        match got {
            Err(error) if error.kind() == LoadErrorKind::Absent => {
                self.found.remove(key);
            }
            Err(_) if claim.stale => {}
            got => {
                let (value, _) = got.or_else(|error| claim.call.ladder(error))?;
                self.found.insert(key.clone(), value);
            }
        }
        Ok(())
    }

    /// What waiting for somebody else's load has come to.
    fn after(&mut self, call: Call<'a, K, V, S, K>, waited: Waited<V>) -> Result<(), LoadError> {
        match call.after(waited) {
            Some(Ok(Turn::Served(value, ..))) => {
                self.found.insert(call.key().clone(), value);
            }
            Some(Err(error)) if error.kind() == LoadErrorKind::Absent => {}
            Some(Err(error)) => return Err(error),
            Some(Ok(Turn::Lead(_))) | None => self.pending.push(call),
        }
        Ok(())
    }
}

/// The claimed keys, for the loader.
fn keys_of<K: Clone, V, S>(leases: &[Lease<K, V, S>]) -> Vec<K> {
    leases.iter().map(|lease| lease.key().clone()).collect()
}

/// What a batch has brought for each key that was asked for; what was not asked for is left out.
pub(super) fn sorted<K, V, E>(
    result: Result<impl IntoIterator<Item = (K, V)>, E>,
    keys: &[K],
) -> Vec<Fetch<V>>
where
    K: Hash + Eq,
    E: Into<BoxError>,
{
    match result {
        Ok(entries) => {
            let mut entries: HashMap<K, V> = entries.into_iter().collect();
            keys.iter().map(|key| entries.remove(key).map_or(Fetch::Absent, Fetch::value)).collect()
        }
        Err(error) => {
            let error = LoadError::failed(error);
            keys.iter().map(|_| Fetch::Failed(error.clone())).collect()
        }
    }
}

/// Loads what is not cached, as a thread.
pub(crate) fn load_many<K, V, S, I, E>(
    core: &Arc<Core<K, V, S>>,
    keys: &HashSet<K>,
    terms: Terms,
    load: impl FnOnce(&[K]) -> Result<I, E>,
) -> Result<HashMap<K, V>, LoadError>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
    I: IntoIterator<Item = (K, V)>,
    E: Into<BoxError>,
{
    let mut many = Many::new(core, keys, terms);
    let mut load = Some(load);
    while !many.pending.is_empty() {
        let Looked { claims, leases, joined } = many.look()?;
        if !claims.is_empty() {
            let load = load.take().ok_or_else(LoadError::panicked)?;
            let mut outcome = Ok(());
            for (claim, own) in claims.iter().zip(run_all(leases, load)) {
                outcome = outcome.and(many.settle(claim, received(own)));
            }
            outcome?;
        }
        for (call, joined) in joined {
            let waited = joined.park();
            many.after(call, waited)?;
        }
    }
    Ok(many.found)
}

/// Runs one load for all leases, and ends their flights.
fn run_all<K, V, S, I, E>(
    mut leases: Vec<Lease<K, V, S>>,
    load: impl FnOnce(&[K]) -> Result<I, E>,
) -> Vec<Own<V>>
where
    K: Hash + Eq + Clone + 'static,
    V: Clone + 'static,
    I: IntoIterator<Item = (K, V)>,
    E: Into<BoxError>,
{
    let keys = keys_of(&leases);
    let all: Vec<Said<V>> = run_part(&mut leases, |leases| {
        let fetched = sorted(load(&keys), &keys);
        leases.iter().zip(fetched).map(|(lease, fetch)| said(lease, fetch, Ttl::default())).collect()
    });
    leases.into_iter().zip(all).map(|(lease, said)| conclude(lease, said)).collect()
}

/// Runs what is a part of the load of all these leases, with which it begins.
fn run_part<K, V, S, R>(leases: &mut [Lease<K, V, S>], part: impl FnOnce(&[Lease<K, V, S>]) -> R) -> R {
    let core = leases[0].core().clone();
    let _loading: Vec<_> =
        leases.iter().map(|l| Loading::enter(graph(), l.flight().id(), &core.settings.name)).collect();
    leases.iter_mut().for_each(Lease::begin);
    // The twin of the writers' fence, between the claims and the loader.
    source_fence();
    counting_panics(&core.counters, || part(leases))
}

/// Loads what is not cached, as a task.
pub(crate) async fn load_many_async<K, V, S, I, E, F>(
    core: &Arc<Core<K, V, S>>,
    keys: &HashSet<K>,
    terms: Terms,
    load: impl FnOnce(Vec<K>) -> F,
) -> Result<HashMap<K, V>, LoadError>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
    F: Future<Output = Result<I, E>> + Send + 'static,
    I: IntoIterator<Item = (K, V)> + 'static,
    E: Into<BoxError> + 'static,
{
    let mut many = Many::new(core, keys, terms);
    let mut load = Some(load);
    while !many.pending.is_empty() {
        let Looked { claims, mut leases, joined } = many.look()?;
        if !claims.is_empty() {
            let load = load.take().ok_or_else(LoadError::panicked)?;
            let keys = keys_of(&leases);
            // It may read the source before there is a future.
            let future = run_part(&mut leases, |_| load(keys.clone()));
            let mut outcome = Ok(());
            let mut own = Vec::with_capacity(claims.len());
            for leader in start_all(leases, keys, future) {
                own.push(leader.rest().await);
            }
            // Which of the loads has the batch's panic is chance.
            if let Some(panicked) = own.iter().position(|own| matches!(own, Own::Panic(_))) {
                let _ = received(own.swap_remove(panicked));
            }
            for (claim, own) in claims.iter().zip(own) {
                outcome = outcome.and(many.settle(claim, received(own)));
            }
            outcome?;
        }
        for (call, joined) in joined {
            let waited = joined.rest().await;
            many.after(call, waited)?;
        }
    }
    Ok(many.found)
}

/// Begins one load for all leases.
fn start_all<K, V, S, I, E, F>(leases: Vec<Lease<K, V, S>>, keys: Vec<K>, future: F) -> Vec<Leader<K, V, S>>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: Send + Sync + 'static,
    F: Future<Output = Result<I, E>> + Send + 'static,
    I: IntoIterator<Item = (K, V)> + 'static,
    E: Into<BoxError> + 'static,
{
    let core = leases[0].core().clone();
    let spawns = can_spawn(&core);
    let all = mapped(future, move |result| sorted(result, &keys));
    let batch = SharedBatch::new(leases.len(), &core.settings.name, all);
    let by = if spawns { By::SpawnedWithOthers } else { By::Task };
    let leaders: Vec<_> = leases
        .into_iter()
        .enumerate()
        .map(|(nth, lease)| {
            let member = batch.member(nth, lease.flight().id());
            start(lease, member, Ttl::default(), by)
        })
        .collect();
    if spawns {
        let mut tasks: Vec<_> = leaders.iter().map(OwnTask::of).collect();
        let all = poll_fn(move |cx| {
            tasks.retain(|task| task.poll(cx).is_pending());
            if tasks.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        });
        // One that is refused is dropped, and leaves the loads to the leader.
        let _ = spawn(&core, Box::pin(all));
    } else {
        // Whoever has joined meanwhile may sleep, and this call polls the first of them only.
        leaders.iter().for_each(Leader::ring);
    }
    leaders
}
