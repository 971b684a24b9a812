//! What a load brings, and how its flight ends with it.

use super::How;
use crate::engine::{Fetched, Lease, Published, source_fence};
use crate::error::{BoxError, LoadError};
use crate::flight::cycle::{self, graph};
use crate::flight::{Fetch, Own};
use crate::freshness::Ttl;
use crate::observe::Count;
use std::panic::resume_unwind;
use std::time::Duration;

/// Counts the panic of a load for several leases, or for one, while it unwinds.
struct Panicking<'a, K, V, S>(&'a mut [Lease<K, V, S>]);

impl<K, V, S> Drop for Panicking<'_, K, V, S> {
    fn drop(&mut self) {
        let counters = &self.0[0].core().counters;
        counters.add(Count::LoaderPanics);
        counters.add(Count::LoadFailures);
        self.0.iter_mut().for_each(Lease::panics);
    }
}

/// Runs a load under its lease, so that nested calls know on whose behalf they wait. If it panics, the lease that
/// unwinds with it abandons the flight.
pub(crate) fn run<K: 'static, V: 'static, S, R>(
    lease: &mut Lease<K, V, S>,
    load: impl FnOnce(&Lease<K, V, S>) -> R,
) -> R {
    let _loading = cycle::Loading::enter(graph(), lease.flight().id(), &lease.core().settings.name);
    lease.begin();
    // The twin of the writers' fence, between the claim and the loader.
    source_fence();
    counting_panics(std::slice::from_mut(lease), |leases| load(&leases[0]))
}

/// Runs what is a part of a load for these leases, of which there is one at least.
pub(super) fn counting_panics<K, V, S, R>(
    leases: &mut [Lease<K, V, S>],
    part: impl FnOnce(&[Lease<K, V, S>]) -> R,
) -> R {
    let panicking = Panicking(leases);
    let result = part(panicking.0);
    std::mem::forget(panicking);
    result
}

/// A value that a load has brought. Made as a part of the load: no user code is left to run before it is published.
pub(crate) struct Brought<V> {
    fetched: Fetched<V>,
    /// The caller's own clone.
    kept: V,
    took: Duration,
}

impl<V: Clone + 'static> Brought<V> {
    /// `own` are the times that the call or the loader asked for; else the cache's `Expiry` is asked.
    pub(crate) fn new<K: 'static, S>(lease: &Lease<K, V, S>, value: V, own: Ttl) -> Self {
        let took = lease.took();
        let (ttl, weight) = (lease.own_ttl(&value, own, took), lease.weigh(&value));
        let kept = value.clone();
        Self { fetched: Fetched { ttl, weight, ..Fetched::of(value) }, kept, took }
    }

    /// Ends the flight with a value that was decided on.
    pub(crate) fn put<K: 'static, S>(self, lease: Lease<K, V, S>) -> (Published, V) {
        (lease.put(self.fetched, &self.kept), self.kept)
    }
}

/// What a load comes to.
pub(crate) enum Said<V> {
    Brought(Brought<V>),
    Absent,
    Failed(LoadError),
    Abandoned,
}

/// What the source's answer comes to. A part of the load. `own` are the times that the call asked for.
pub(crate) fn said<K: 'static, V: Clone + 'static, S>(
    lease: &Lease<K, V, S>,
    fetch: Fetch<V>,
    own: Ttl,
) -> Said<V> {
    match fetch {
        Fetch::Value { value, ttl, store, renews } => {
            let mut brought = Brought::new(lease, value, own.or(ttl));
            (brought.fetched.store, brought.fetched.renews) = (store, renews);
            brought.fetched.took = Some(brought.took);
            Said::Brought(brought)
        }
        Fetch::Absent => Said::Absent,
        Fetch::Failed(error) => Said::Failed(error),
        Fetch::Abandoned => Said::Abandoned,
    }
}

/// Ends a flight. A refused result goes to its own caller all the same.
pub(crate) fn conclude<K: 'static, V: Clone + 'static, S>(
    mut lease: Lease<K, V, S>,
    said: Said<V>,
) -> Own<V> {
    match said {
        Said::Brought(Brought { fetched, kept, took }) => {
            let _ = lease.publish(fetched, &kept);
            Own::Value { value: kept, took }
        }
        Said::Failed(error) => {
            let _ = lease.fail(error.clone());
            Own::Error(error)
        }
        Said::Absent => {
            let _ = lease.absent();
            Own::Error(LoadError::absent())
        }
        Said::Abandoned => {
            // Its batch has panicked.
            lease.panics();
            let _ = if lease.flight().claim.in_background() {
                // As the panic of a load that is nobody's own call: a hot key does not panic on each read.
                lease.fail_alone(LoadError::panicked())
            } else {
                lease.abandon()
            };
            Own::Abandoned
        }
    }
}

/// What the result of a closure that may fail comes to.
pub(crate) fn fetch_of<V, E: Into<BoxError>>(result: Result<V, E>) -> Fetch<V> {
    result.map_or_else(|error| Fetch::Failed(LoadError::failed(error)), Fetch::value)
}

/// What the caller gets whose load has come to `own`. A panic resumes.
pub(crate) fn received<V>(own: Own<V>) -> Result<(V, How), LoadError> {
    match own {
        Own::Value { value, took } => Ok((value, How::Loaded { took })),
        Own::Error(error) => Err(error),
        Own::Panic(panic) => resume_unwind(panic),
        // Who gives up tells how long it has waited.
        Own::GivenUp | Own::Abandoned => Err(LoadError::panicked()),
    }
}

/// Runs a load, and ends its flight with what it fetches.
pub(crate) fn fetched<K: 'static, V: Clone + 'static, S>(
    mut lease: Lease<K, V, S>,
    own: Ttl,
    load: impl FnOnce(&Lease<K, V, S>) -> Fetch<V>,
) -> Own<V> {
    let said = run(&mut lease, |lease| said(lease, load(lease), own));
    conclude(lease, said)
}
