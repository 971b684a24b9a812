//! What is loaded: why, by which future, and what it comes to.

use super::{Flight, Seat};
use crate::clock::Moment;
use crate::error::LoadError;
use crate::freshness::Ttl;
use crate::primitive::runtime::Runtime;
use std::any::Any;
use std::pin::Pin;
use std::task::Waker;
use std::time::Duration;

/// Why a load runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LoadCause {
    /// A caller needs a value, and none is there that it accepts.
    Miss,
    /// The value is stale: it is served while this load replaces it.
    Stale,
    /// The value is fresh, and is refreshed before it goes stale.
    Early,
    /// Somebody asked for it, by `refresh` or `compute`.
    Asked,
}

/// What the source said.
#[derive(Clone)]
pub(crate) enum Fetch<V> {
    Value {
        value: V,
        /// The times that the loader asked for.
        ttl: Ttl,
        store: bool,
        /// It is the value that was there: nothing is removed by it.
        renews: bool,
    },
    /// It has no such key.
    Absent,
    Failed(LoadError),
    /// Nothing, for a reason that is told elsewhere: those who wait look again.
    Abandoned,
}

impl<V> Fetch<V> {
    /// A value like any other.
    pub(crate) fn value(value: V) -> Self {
        Self::Value { value, ttl: Ttl::default(), store: true, renews: false }
    }
}

/// The future of a load.
pub(crate) type LoadFuture<V> = Pin<Box<dyn Future<Output = Fetch<V>> + Send>>;

/// A load that is a future.
pub(crate) enum Load<V, T, P> {
    Running(Running<V, T, P>),
    /// What it came to, for its own caller.
    Ended(Own<V>),
}

/// A future, and what is needed to end its flight.
pub(crate) struct Running<V, T, P> {
    pub(crate) future: LoadFuture<V>,
    /// The times that the call asked for.
    pub(crate) ttl: Ttl,
    pub(crate) seat: Seat<Flight<V, T, P>>,
    /// When it was first polled, exactly; `NEVER`: not yet.
    pub(crate) begun: Moment,
    /// What it was made under.
    pub(crate) runtime: Runtime,
    /// The task of its own, if it has one.
    pub(crate) task: Option<Waker>,
}

/// What a load came to, for the caller whose it is.
pub(crate) enum Own<V> {
    Value {
        value: V,
        took: Duration,
    },
    Error(LoadError),
    /// It resumes in its caller.
    Panic(Box<dyn Any + Send>),
    /// Its thread has waited for it until the lease was over, and gives it up.
    GivenUp,
    /// It is told elsewhere.
    Abandoned,
}
