//! A call for many keys: what is cached, what it claims and loads as one batch, and what others are loading. It settles
//! what it has claimed before it waits for anybody, so that two such calls cannot wait for each other.

use super::attached::Attached;
use super::bring::received;
use super::bulk::{keys_of, resume_panic, run_all, run_part, start_all};
use super::drive::Leader;
use super::map::mapped;
use super::{Call, How, Joined, Step, Terms, Turn};
use crate::engine::{Core, Lease};
use crate::error::{BoxError, LoadError, LoadErrorKind};
use crate::flight::{Fetch, Own, Waited, Waits};
use crate::loader::{Loaded, sorted};
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;

/// A call for many keys on its way.
struct Many<'a, K, V, S> {
    /// For what there is no answer yet.
    pending: Vec<Call<'a, K, V, S, K>>,
    /// For what others are loading.
    joined: Vec<Joins<'a, K, V, S>>,
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

/// What a look has come to, beside what was found and what others load.
struct Looked<'a, K, V, S> {
    claims: Vec<Claim<'a, K, V, S>>,
    leases: Vec<Lease<K, V, S>>,
    /// To be refreshed in the background.
    stale: Vec<Lease<K, V, S>>,
}

impl<'a, K, V, S> Many<'a, K, V, S>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    fn new(core: &'a Arc<Core<K, V, S>>, keys: &'a HashSet<K>, terms: Terms) -> Self {
        let pending = keys.iter().map(|key| Call::new(core, key, terms)).collect();
        Self { pending, joined: Vec::new(), found: HashMap::with_capacity(keys.len()) }
    }

    /// Looks up what is pending, until it has claimed so many keys.
    fn look(&mut self, most: usize) -> Result<Looked<'a, K, V, S>, LoadError> {
        let mut looked = Looked { claims: Vec::new(), leases: Vec::new(), stale: Vec::new() };
        while looked.leases.len() < most
            && let Some(mut call) = self.pending.pop()
        {
            // All that it leads is one load.
            call.terms.demand.is_let_in = !looked.leases.is_empty();
            let step = match call.look() {
                // Known to be absent: nothing is found, and nothing is to be loaded.
                Err(error) if error.kind() == LoadErrorKind::Absent => continue,
                step => step?,
            };
            let (lease, stale) = match step {
                Step::Join(joined) => {
                    self.joined.push((call, joined));
                    continue;
                }
                Step::Turn(Turn::Served(value, _, lease)) => {
                    self.found.insert(call.key().clone(), value);
                    match lease {
                        None => continue,
                        Some(lease) if lease.flight().claim.in_background() => {
                            looked.stale.push(lease);
                            continue;
                        }
                        Some(lease) => (lease, true),
                    }
                }
                Step::Turn(Turn::Lead(lease)) => (lease, false),
            };
            looked.leases.push(lease);
            looked.claims.push(Claim { call, stale });
        }
        Ok(looked)
    }

    /// What the loads of all claimed keys have come to.
    fn settle_all(&mut self, claims: &[Claim<'a, K, V, S>], all: Vec<Own<V>>) -> Result<(), LoadError> {
        let mut outcome = Ok(());
        for (claim, own) in claims.iter().zip(all) {
            outcome = outcome.and(self.settle(claim, received(own)));
        }
        outcome
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

/// What the closure of one call brings for each key.
fn fetched<K, V, E>(result: Result<impl IntoIterator<Item = (K, V)>, E>, keys: &[K]) -> Vec<Fetch<V>>
where
    K: Hash + Eq,
    E: Into<BoxError>,
{
    let entries = result.map(|entries| entries.into_iter().map(|(key, value)| (key, Loaded::new(value))));
    sorted(entries.map_err(Into::into), keys, std::iter::repeat_with(|| None))
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
    let mut load = Some(load);
    let bring = |leases| {
        let load = load.take().ok_or_else(LoadError::panicked)?;
        Ok(run_all(leases, |_, keys| fetched(load(keys), keys)))
    };
    answers(Many::new(core, keys, terms), usize::MAX, bring, drop)
}

/// Loads by the attached loader what is not cached, as a thread.
pub(crate) fn get_many<K, V, S>(
    core: &Arc<Core<K, V, S>>,
    keys: &HashSet<K>,
    mut terms: Terms,
) -> Result<HashMap<K, V>, LoadError>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    let attached = Attached::of(core, Waits::AsThread);
    terms.attach(attached.as_ref().map(|loader| loader.background(core)));
    let many = Many::new(core, keys, terms);
    match attached {
        Some(loader) => {
            let bring = |leases| Ok(loader.load_many_here(leases));
            answers(many, loader.most(core), bring, |stale| loader.refresh_many(stale))
        }
        None => answers(many, usize::MAX, |_| Err(LoadError::no_loader()), drop),
    }
}

/// Comes to an answer for each key, as a thread. What is claimed goes to `bring`, so many keys at a time at most, and what is
/// stale to `refresh`.
fn answers<K, V, S>(
    mut many: Many<'_, K, V, S>,
    most: usize,
    mut bring: impl FnMut(Vec<Lease<K, V, S>>) -> Result<Vec<Own<V>>, LoadError>,
    refresh: impl Fn(Vec<Lease<K, V, S>>),
) -> Result<HashMap<K, V>, LoadError>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    loop {
        let Looked { claims, leases, stale } = many.look(most)?;
        refresh(stale);
        if !claims.is_empty() {
            many.settle_all(&claims, bring(leases)?)?;
        }
        if !many.pending.is_empty() {
            continue;
        }
        if many.joined.is_empty() {
            return Ok(many.found);
        }
        for (call, joined) in std::mem::take(&mut many.joined) {
            let waited = joined.park();
            many.after(call, waited)?;
        }
    }
}

/// Loads what is not cached, as a task. Not an `async fn`, which would have room for each argument once more.
pub(crate) fn load_many_async<'a, K, V, S, I, E, F>(
    core: &'a Arc<Core<K, V, S>>,
    keys: &'a HashSet<K>,
    terms: Terms,
    load: impl FnOnce(Vec<K>) -> F,
) -> impl Future<Output = Result<HashMap<K, V>, LoadError>>
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
    async move {
        let begin = |mut leases: Vec<_>| {
            let load = load.take().ok_or_else(LoadError::panicked)?;
            let keys = keys_of(&leases);
            // It may read the source before there is a future.
            let future = run_part(&mut leases, |_| load(keys.clone()));
            let all = mapped(future, move |result| fetched(result, &keys));
            Ok(start_all(leases, all, Waits::AsTask))
        };
        answers_async(&mut many, usize::MAX, begin, drop).await?;
        Ok(many.found)
    }
}

/// Loads by the attached loader what is not cached, as a task.
pub(crate) fn get_many_async<'a, K, V, S>(
    core: &'a Arc<Core<K, V, S>>,
    keys: &'a HashSet<K>,
    mut terms: Terms,
) -> impl Future<Output = Result<HashMap<K, V>, LoadError>>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    let attached = Attached::of(core, Waits::AsTask);
    terms.attach(attached.as_ref().map(|loader| loader.background(core)));
    let most = attached.as_ref().map_or(usize::MAX, |loader| loader.most(core));
    let mut many = Many::new(core, keys, terms);
    async move {
        let attached = attached.as_ref();
        let begin =
            |leases| attached.map(|loader| loader.start_many(leases)).ok_or_else(LoadError::no_loader);
        let refresh = |stale| {
            if let Some(loader) = attached {
                loader.refresh_many(stale);
            }
        };
        answers_async(&mut many, most, begin, refresh).await?;
        Ok(many.found)
    }
}

/// As [`answers`], as a task. What it has found is in `many` then.
#[allow(clippy::manual_async_fn, reason = "an `async fn` has room for each argument twice")]
fn answers_async<K, V, S>(
    many: &mut Many<'_, K, V, S>,
    most: usize,
    mut begin: impl FnMut(Vec<Lease<K, V, S>>) -> Result<Vec<Leader<K, V, S>>, LoadError>,
    refresh: impl Fn(Vec<Lease<K, V, S>>),
) -> impl Future<Output = Result<(), LoadError>>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    async move {
        loop {
            let Looked { claims, leases, stale } = many.look(most)?;
            refresh(stale);
            if !claims.is_empty() {
                let mut all = Vec::with_capacity(claims.len());
                for leader in begin(leases)? {
                    all.push(leader.rest().await);
                }
                resume_panic(&mut all);
                many.settle_all(&claims, all)?;
            }
            if !many.pending.is_empty() {
                continue;
            }
            if many.joined.is_empty() {
                return Ok(());
            }
            for (call, joined) in std::mem::take(&mut many.joined) {
                let waited = joined.rest().await;
                many.after(call, waited)?;
            }
        }
    }
}
