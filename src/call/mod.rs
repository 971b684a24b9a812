//! A call that may load, on its way to its answer: what both fronts share. They differ in how they wait, and in how they
//! call a loader.

mod attached;
mod batch;
mod bring;
mod bulk;
mod drive;
mod gather;
mod many;
mod map;

pub(crate) use attached::Attached;
pub(crate) use bring::{Brought, fetch_of, fetched, received, run};
pub(crate) use drive::{Leader, can_spawn, own_task, spawn, start};
pub(crate) use gather::gathering;
pub(crate) use many::{get_many, get_many_async, load_many, load_many_async};
pub(crate) use map::mapped;

use crate::clock::Moment;
use crate::engine::{Accept, Core, Demand, Lease, Lookup, Place, Start};
use crate::error::{LoadError, LoadErrorKind};
use crate::flight::cycle::{Cycle, Wait, graph};
use crate::flight::{Outcome, Waited, Waits};
use crate::freshness::Stage;
use crate::observe::Count;
use crate::primitive::epoch::pin;
use crate::primitive::thread::is_pinned_by_user;
use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;
use std::time::Duration;

/// What a call that waited does with the failure of the flight that it waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shares {
    /// Every failure is the caller's too.
    All,
    /// A failed load is, an absent key is not.
    Failures,
    /// An absent key is, a failed load is not.
    Absence,
    /// None is: the caller looks again.
    Nothing,
}

impl Shares {
    fn shares(self, kind: LoadErrorKind) -> bool {
        match self {
            Self::All => true,
            Self::Failures => kind != LoadErrorKind::Absent,
            Self::Absence => kind == LoadErrorKind::Absent,
            Self::Nothing => false,
        }
    }
}

/// One call's contract.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) demand: Demand,
    pub(crate) shares: Shares,
    /// Whether it takes a stale value, one in grace or the fallback's, rather than an error.
    pub(crate) takes_ladder: bool,
    /// It may not lead since no loader is attached.
    pub(crate) lacks_loader: bool,
    /// How long it waits for others; `None`: no limit but the lease.
    pub(crate) patience: Option<Duration>,
}

impl Terms {
    /// Of a call that never gives up.
    pub(crate) fn infallible(shares: Shares) -> Self {
        let demand = Demand {
            accept: Some(Accept::default()),
            may_lead: true,
            backs_off: false,
            is_let_in: false,
            takes_absence: shares.shares(LoadErrorKind::Absent),
            miss: Start::Now,
            stale: Start::Now,
            waits: Waits::AsThread,
        };
        Self { demand, shares, takes_ladder: true, lacks_loader: false, patience: None }
    }

    /// Of a call that may fail, and takes the ladder before it does.
    pub(crate) fn fallible(shares: Shares, patience: Option<Duration>) -> Self {
        let infallible = Self::infallible(shares);
        Self { demand: Demand { backs_off: true, ..infallible.demand }, patience, ..infallible }
    }

    /// Of a call that wants to lead, whatever is there.
    pub(crate) fn to_lead() -> Self {
        let usual = Self::infallible(Shares::Nothing);
        Self { demand: Demand { accept: None, ..usual.demand }, ..usual }
    }

    /// Of a call that waits as a task, and may spawn.
    pub(crate) fn as_task(mut self, spawns: bool) -> Self {
        self.demand.waits = Waits::AsTask;
        if spawns {
            self.demand.stale = Start::Spawned;
        }
        self
    }

    /// Of a call with the attached loader, whose refreshes begin in this way; `None`: there is none.
    pub(crate) fn attach(&mut self, refreshes: Option<Start>) {
        match refreshes {
            Some(start) => self.demand.stale = start,
            None => (self.demand.may_lead, self.lacks_loader) = (false, true),
        }
    }

    /// Whether the call may end with an error of the cache's own.
    fn may_fail(&self) -> bool {
        self.demand.backs_off
    }
}

/// Where a value came from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum How {
    /// It was in the cache.
    Cached { stage: Stage, born: Moment },
    /// Another caller loaded it; since when the call has waited.
    Joined { since: Moment },
    /// The caller loaded it.
    Loaded { took: Duration },
    /// The cache's fallback gave it.
    Fallback,
}

/// What a call has come to before its own closure runs.
pub(crate) enum Turn<K, V, S> {
    /// It has its answer; with a lease, it has been chosen to refresh.
    Served(V, How, Option<Lease<K, V, S>>),
    /// It leads.
    Lead(Lease<K, V, S>),
}

impl<K, V, S> Turn<K, V, S> {
    /// The answer is there, and nothing is left to do.
    fn served((value, how): (V, How)) -> Self {
        Self::Served(value, how, None)
    }
}

/// What a look came to.
pub(crate) enum Step<K, V, S> {
    Turn(Turn<K, V, S>),
    /// Somebody else loads.
    Join(Joined<K, V, S>),
}

/// A place in somebody else's flight, and for how long. Kept until the call has its answer.
pub(crate) struct Joined<K, V, S> {
    /// On whose behalf this call waits; goes first: once the place is left, another flight may have the name.
    _edge: Wait<'static>,
    place: Place<K, V, S>,
    deadline: Moment,
}

impl<K, V, S> Drop for Joined<K, V, S> {
    fn drop(&mut self) {
        self.place.core().waiter_left();
    }
}

/// A call on its way.
pub(crate) struct Call<'a, K, V, S, Q: ?Sized> {
    core: &'a Arc<Core<K, V, S>>,
    key: &'a Q,
    terms: Terms,
    /// Of a clock that may be moved as soon as this caller is seen to wait: before it is.
    arrived: Option<Moment>,
    /// Since when it waits, and until when.
    waiting: Option<(Moment, Moment)>,
}

impl<'a, K, V, S, Q> Call<'a, K, V, S, Q>
where
    K: Borrow<Q> + Hash + Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    S: BuildHasher + Send + Sync + 'static,
{
    pub(crate) fn new(core: &'a Arc<Core<K, V, S>>, key: &'a Q, terms: Terms) -> Self {
        Self { core, key, terms, arrived: core.time.given_now(), waiting: None }
    }

    pub(crate) fn key(&self) -> &'a Q {
        self.key
    }

    /// Looks up. Never waits.
    pub(crate) fn look(&mut self) -> Result<Step<K, V, S>, LoadError> {
        let core = self.core;
        let place = {
            let stay = core.stay(pin());
            match core.lookup(self.key, &self.terms.demand, &stay) {
                Lookup::Hit { hit, lease } => {
                    let how = How::Cached { stage: hit.stage, born: hit.cell.times.born() };
                    if self.waiting.is_none() {
                        core.count_access(self.key, Count::of_hit(hit.stage));
                    }
                    if lease.is_some() && self.terms.demand.stale == Start::Now {
                        refuse_under_pin();
                    }
                    return Ok(Step::Turn(Turn::Served(hit.cell.value.clone(), how, lease)));
                }
                Lookup::Lead(lease) => {
                    drop(stay);
                    refuse_under_pin();
                    self.count_miss();
                    return Ok(Step::Turn(Turn::Lead(lease)));
                }
                Lookup::NotCached => {
                    core.counters.add(Count::Misses);
                    let lacks_loader = self.terms.lacks_loader;
                    return Err(if lacks_loader { LoadError::no_loader() } else { LoadError::not_cached() });
                }
                Lookup::Absent => {
                    if self.waiting.is_none() {
                        core.counters.add(Count::NegativeHits);
                    }
                    return Err(LoadError::absent());
                }
                Lookup::Refused(error) => {
                    drop(stay);
                    self.count_miss();
                    return self.ladder(error).map(|got| Step::Turn(Turn::served(got)));
                }
                Lookup::Join(place) => place,
            }
        };
        refuse_under_pin();
        self.count_miss();
        let (_, deadline) = *self.waiting.get_or_insert_with(|| {
            // Exactly: a coarse clock lags, and would end a short wait at once.
            let now = self.arrived.unwrap_or_else(|| core.time.precise());
            (now, self.terms.patience.map_or(Moment::NEVER, |patience| now.plus(patience)))
        });
        let waits = graph().wait_for(place.flight().id(), &core.settings.name);
        let edge = waits.map_err(|Cycle(path)| LoadError::cycle(path))?;
        if !core.admits_waiter(self.terms.may_fail()) {
            drop((edge, place));
            let error = LoadError::overloaded("max_waiters");
            return self.ladder(error).map(|got| Step::Turn(Turn::served(got)));
        }
        core.counters.add(Count::Joins);
        Ok(Step::Join(Joined { place, deadline, _edge: edge }))
    }

    fn count_miss(&self) {
        if self.waiting.is_none() {
            self.core.count_access(self.key, Count::Misses);
        }
    }

    /// Since when it waits.
    fn since(&self) -> Moment {
        self.waiting.map_or(Moment::NEVER, |(since, _)| since)
    }

    /// What a wait has come to for this call. `None`: it looks again.
    pub(crate) fn after(&self, waited: Waited<V>) -> Option<Result<Turn<K, V, S>, LoadError>> {
        let core = self.core;
        match waited {
            // Who wants to lead has waited for the way to be free.
            Waited::Ended(_) if self.terms.demand.accept.is_none() => None,
            Waited::Ended(Outcome::Value(value)) => {
                Some(Ok(Turn::Served(value, How::Joined { since: self.since() }, None)))
            }
            Waited::Ended(Outcome::Failure(error)) if self.terms.shares.shares(error.kind()) => {
                Some(self.ladder(error).map(Turn::served))
            }
            Waited::Ended(Outcome::Failure(_) | Outcome::LookAgain) | Waited::LeaseOver => None,
            Waited::TimedOut => {
                core.counters.add(Count::WaitTimeouts);
                let waited = core.time.precise().since(self.since());
                Some(self.ladder(LoadError::timed_out(waited)).map(Turn::served))
            }
        }
    }

    /// What a call gets whose load failed or whose wait ended: a stale value, one in grace, the fallback's, or `error`.
    pub(crate) fn ladder(&self, error: LoadError) -> Result<(V, How), LoadError> {
        // An absence is an answer, not a failure.
        if !self.terms.may_fail() || !self.terms.takes_ladder || error.kind() == LoadErrorKind::Absent {
            return Err(error);
        }
        {
            let guard = pin();
            let accept = self.terms.demand.accept.unwrap_or_default();
            if let Some(hit) = self.core.salvage(self.key, accept, &guard) {
                if hit.stage == Stage::Grace {
                    self.core.counters.add(Count::GraceHits);
                }
                let how = How::Cached { stage: hit.stage, born: hit.cell.times.born() };
                return Ok((hit.cell.value.clone(), how));
            }
        }
        let Some(fallback) = &self.core.settings.fallback else { return Err(error) };
        // Dropped before the value is on its way: its destructor is user code.
        let owned = self.key.to_owned();
        let value = fallback(&owned);
        drop(owned);
        match value {
            Some(value) => {
                self.core.counters.add(Count::Fallbacks);
                Ok((value, How::Fallback))
            }
            None => Err(error),
        }
    }
}

/// A call that can't fail has met an error: only a cycle is one.
#[track_caller]
pub(crate) fn unexpected(error: &LoadError) -> ! {
    panic!("{error}")
}

/// Waiting or loading under the user's own pin would hold up the reclamation of all quell caches.
#[track_caller]
pub(crate) fn refuse_under_pin() {
    if cfg!(debug_assertions) {
        assert!(
            !is_pinned_by_user(),
            "a load under a live `Pinned` of the same thread: drop the `Pinned` first"
        );
    }
}
