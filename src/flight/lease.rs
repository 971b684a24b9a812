//! The lease word: until when a flight's leader may take, and whether the load has begun at all.
//!
//! Relaxed throughout: it only settles who may try, one of `begin` and `end_early` by a CAS; who leads is decided by the
//! CAS of the slot.

use crate::clock::Moment;
use crate::primitive::atomic::{AtomicU64, Ordering};

/// The load waits on an executor's queue: whoever needs the value may take the flight over.
const QUEUED: u64 = 0;
/// The lease has ended, whatever the clock says. Set by a waiter whose park ended at the deadline; never cleared.
const OVER: u64 = 1;
/// As `OVER`, and the load has never begun. Set by who takes a queued flight over; never cleared.
const UNBEGUN: u64 = 2;
/// The earliest deadline that is told from the marks.
const FIRST: u64 = 3;

/// The leader's deadline, in one word: queued, running until a moment, or over.
#[derive(Debug)]
pub(super) struct LeaseWord(AtomicU64);

fn deadline(end: Moment) -> u64 {
    end.nanos().max(FIRST)
}

impl LeaseWord {
    pub(super) fn running(end: Moment) -> Self {
        Self(AtomicU64::new(deadline(end)))
    }

    pub(super) fn queued() -> Self {
        Self(AtomicU64::new(QUEUED))
    }

    /// Begins a queued load. `false` if somebody has taken the flight over: the load must not run.
    #[must_use]
    pub(super) fn begin(&self, end: Moment) -> bool {
        self.0.compare_exchange(QUEUED, deadline(end), Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Whether somebody else may lead, as of `now`.
    pub(super) fn is_over(&self, now: Moment) -> bool {
        let word = self.0.load(Ordering::Relaxed);
        word < FIRST || word <= now.nanos()
    }

    pub(super) fn is_queued(&self) -> bool {
        self.0.load(Ordering::Relaxed) == QUEUED
    }

    /// Whether the load has begun.
    pub(super) fn has_begun(&self) -> bool {
        !matches!(self.0.load(Ordering::Relaxed), QUEUED | UNBEGUN)
    }

    /// When the lease ends by itself; a queued one never does.
    pub(super) fn end(&self) -> Moment {
        match self.0.load(Ordering::Relaxed) {
            QUEUED => Moment::NEVER,
            word => Moment::from_nanos(word),
        }
    }

    /// Ends a lease that is over by the clock, or whose load is queued. `false` if the load has begun meanwhile, or
    /// somebody else has just ended it.
    #[must_use]
    pub(super) fn end_early(&self, now: Moment) -> bool {
        let word = self.0.load(Ordering::Relaxed);
        match word {
            OVER | UNBEGUN => true,
            QUEUED => self.0.compare_exchange(QUEUED, UNBEGUN, Ordering::Relaxed, Ordering::Relaxed).is_ok(),
            _ => word <= now.nanos(),
        }
    }

    /// Ends a running lease at the wish of one whose park ended at its deadline: a coarse clock may lag behind.
    pub(super) fn end_by_park(&self) {
        if self.has_begun() {
            self.0.store(OVER, Ordering::Relaxed);
        }
    }
}
