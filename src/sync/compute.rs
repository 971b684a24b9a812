//! `compute`: read, decide and write as one step, under a lease.

use super::Cache;
use crate::call::{Brought, Call, Terms, Turn, run, unexpected};
use crate::engine::Published;
use crate::error::LoadError;
use crate::freshness::Ttl;
use crate::primitive::epoch::pin;
use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash};

/// What [`Cache::compute`] is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op<V> {
    /// Store this value.
    Put(V),
    /// Remove what is there.
    Remove,
    /// Leave everything as it is.
    Keep,
}

/// What [`Cache::compute`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome<V> {
    /// This value was put where none was.
    Inserted(V),
    /// This value was put in the place of another.
    Replaced(V),
    /// This value was removed.
    Removed(V),
    /// This value stays.
    Kept(V),
    /// There was none, and there is none.
    Absent,
    /// Nothing: a write to the key, or another load of it, came in between.
    Superseded,
}

impl<K, V, S> Cache<K, V, S>
where
    K: Hash + Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    /// Calls `decide` once with the value of `key` and does what it says, as one step: if an `insert`, a `remove` or
    /// another load of the key came in between, nothing is done and the outcome is [`Superseded`](Outcome::Superseded).
    /// If that happens before `decide` could be shown the value, it is not called.
    ///
    /// It runs under a lease, like a load: other `compute`s and loads of the key wait for it, and it waits for them.
    /// Whoever waits gets the value that was put, or looks again. A value that has expired counts as absent.
    ///
    /// # Panics
    /// If `decide` panics; the entry stays as it was. If `decide` waits, by way of other loads, for itself. In debug builds,
    /// if the thread holds a [`Pinned`](crate::Pinned).
    ///
    /// # Blocking
    /// While another load of the key runs, up to its lease.
    ///
    /// # Examples
    /// ```
    /// use quell::{Cache, Op, Outcome};
    ///
    /// let cache = Cache::<String, u32>::builder().build();
    /// let mut add = || cache.compute("hits", |n| Op::Put(n.map_or(1, |n| n + 1)));
    /// assert_eq!(add(), Outcome::Inserted(1));
    /// assert_eq!(add(), Outcome::Replaced(2));
    /// assert_eq!(cache.compute("hits", |_| Op::Remove), Outcome::Removed(2));
    /// ```
    pub fn compute<Q>(&self, key: &Q, decide: impl FnOnce(Option<&V>) -> Op<V>) -> Outcome<V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let turn = self.obtain(&mut Call::new(&self.core, key, Terms::to_lead()));
        decide_by(turn, decide)
    }
}

/// Decides under the lease that a call has come to, and does it.
pub(crate) fn decide_by<K: 'static, V: Clone + 'static, S>(
    turn: Result<Turn<K, V, S>, LoadError>,
    decide: impl FnOnce(Option<&V>) -> Op<V>,
) -> Outcome<V> {
    let mut lease = match turn {
        Ok(Turn::Lead(lease) | Turn::Served(_, _, Some(lease))) => lease,
        Ok(Turn::Served(_, _, None)) => return Outcome::Superseded,
        Err(error) => unexpected(&error),
    };
    let Ok(current) = lease.current(&pin()) else { return Outcome::Superseded };
    let op = run(&mut lease, |lease| match decide(current.as_ref()) {
        Op::Put(value) => Op::Put(Brought::new(lease, value, Ttl::default())),
        Op::Remove => Op::Remove,
        Op::Keep => Op::Keep,
    });
    let (published, outcome) = match (op, current) {
        (Op::Put(brought), current) => {
            let (published, kept) = brought.put(lease);
            (published, if current.is_some() { Outcome::Replaced(kept) } else { Outcome::Inserted(kept) })
        }
        (Op::Remove, Some(value)) => (lease.remove(), Outcome::Removed(value)),
        (Op::Remove, None) => (lease.remove(), Outcome::Absent),
        (Op::Keep, Some(value)) => (lease.abandon(), Outcome::Kept(value)),
        (Op::Keep, None) => (lease.abandon(), Outcome::Absent),
    };
    match published {
        Published::Done => outcome,
        Published::Fenced => Outcome::Superseded,
    }
}
