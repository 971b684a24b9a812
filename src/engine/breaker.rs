//! The breaker: when the loads of a cache fail too often, no load begins for a while, and then one, until one succeeds
//! (Nygard, *Release It!*, 2007, "Circuit Breaker").
//!
//! ```text
//!             the rate of failures is reached              a load succeeds
//!   closed ───────────────────────────────────► open ──────────────────────────► closed
//!                                               │  ▲
//!                     the pause has passed: one │  │ a load fails: the pause begins anew;
//!                     caller probes             └──┘ a probe is abandoned: the next one may go
//! ```
//! All of it is one word, which moves by a CAS from exactly what was seen: so one caller of all keys probes, and what was judged
//! of an earlier time changes nothing. While a probe runs, the word is open until its lease ends: one that hangs is not the
//! last. One that waits to begin has as long for that, and then goes by the end of the lease that begins.
//!
//! The rate is that of a sliding window, approximated by two fixed ones next to each other, of which the earlier counts for the
//! part by which the sliding one still covers it.

use super::Core;
use crate::clock::{Moment, saturating_nanos};
use crate::config::Breaker;
use crate::flight::Claim;
use crate::observe::Count;
use crate::primitive::atomic::{AtomicU64, Ordering};
use crate::primitive::caught;
use crate::slot::Flight;
use std::time::Duration;

#[cfg(all(test, loom))]
mod models;

/// In the state's word: open. Set by the failure that reaches the rate, cleared by a success.
const OPEN: u64 = 1;

/// What the state's word says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Since when; so that it is not taken for closed at another time.
    Closed(Moment),
    /// Nobody loads before this.
    Open(Moment),
}

impl State {
    /// In half of the clock's range, which is 292 years.
    fn word(self) -> u64 {
        let (at, open) = match self {
            Self::Closed(since) => (since, 0),
            Self::Open(until) => (until, OPEN),
        };
        at.nanos().min(u64::MAX >> 1) << 1 | open
    }

    fn of(word: u64) -> Self {
        let at = Moment::from_nanos(word >> 1);
        if word & OPEN == 0 { Self::Closed(at) } else { Self::Open(at) }
    }
}

/// The loads that have ended in one fixed window, in a word: its number, and the two counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counts {
    /// The last bits of it: it comes again after 2^24 windows.
    number: u32,
    loads: u32,
    failures: u32,
}

/// Bits of a count.
const COUNT: u32 = 20;
/// What a count can hold.
const FULL: u32 = (1 << COUNT) - 1;
const NUMBER: u32 = u64::BITS - 2 * COUNT;

impl Counts {
    fn word(self) -> u64 {
        u64::from(self.number) << (2 * COUNT) | u64::from(self.loads) << COUNT | u64::from(self.failures)
    }

    fn of(word: u64) -> Self {
        let count = |word: u64| word as u32 & FULL;
        Self { number: (word >> (2 * COUNT)) as u32, loads: count(word >> COUNT), failures: count(word) }
    }

    /// With one more load. Both counts are halved where they would be full, so that the rate stays.
    fn with(self, verdict: Verdict) -> Self {
        let halved = u32::from(self.loads == FULL);
        let (loads, failures) = (self.loads >> halved, self.failures >> halved);
        Self { loads: loads + 1, failures: failures + u32::from(verdict == Verdict::Failure), ..self }
    }
}

/// How a load has ended, as the breaker sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The source has answered: with a value, or that it has none.
    Success,
    /// An error, a panic, or a lease that ended.
    Failure,
}

/// What a breaker says to one who wants to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Says {
    /// It is closed.
    Load,
    /// It is open, and this one is to try the source. The probe is to end by this moment, which is its name.
    Probe(Moment),
    /// It is open for as long as this.
    Wait(Duration),
}

/// The state of a cache's breaker.
pub(super) struct Circuit {
    breaker: Breaker,
    state: AtomicU64,
    /// The counts of the windows with even numbers, and of those with odd ones.
    windows: [AtomicU64; 2],
}

/// Whether a word is open for this probe.
fn is_named(word: u64, probe: Option<Moment>) -> bool {
    probe.is_some_and(|until| word == State::Open(until).word())
}

impl Circuit {
    pub(super) fn new(breaker: Breaker) -> Self {
        let state = AtomicU64::new(State::Closed(Moment::from_nanos(0)).word());
        Self { breaker, state, windows: [AtomicU64::new(0), AtomicU64::new(0)] }
    }

    fn is_open(&self) -> bool {
        // Relaxed: a figure.
        matches!(State::of(self.state.load(Ordering::Relaxed)), State::Open(_))
    }

    /// Asks for leave to begin a load whose lease is this long.
    fn ask(&self, now: impl FnOnce() -> Moment, lease: Duration) -> Says {
        // Relaxed: it only settles who may try; nothing is published by it.
        let word = self.state.load(Ordering::Relaxed);
        let State::Open(until) = State::of(word) else { return Says::Load };
        let now = now();
        if now < until {
            return Says::Wait(until.since(now));
        }
        let probe = now.plus(lease);
        let open = State::Open(probe).word();
        // Relaxed: as above.
        match self.state.compare_exchange(word, open, Ordering::Relaxed, Ordering::Relaxed).map_err(State::of)
        {
            Ok(_) => Says::Probe(probe),
            Err(State::Closed(_)) => Says::Load,
            Err(State::Open(until)) => Says::Wait(until.since(now)),
        }
    }

    /// Whether a load may begin that was claimed as this probe, or before it was opened. A probe is to end by `lease_end` then,
    /// which is its name from now on.
    fn lets_begin(&self, probe: Option<Moment>, lease_end: Moment) -> bool {
        // Relaxed: as in `ask`.
        let word = self.state.load(Ordering::Relaxed);
        matches!(State::of(word), State::Closed(_))
            || is_named(word, probe) && {
                let next = State::Open(lease_end).word();
                // Relaxed: as above. A lost race means that another load has ended, or another one probes.
                self.state.compare_exchange(word, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            }
    }

    /// A probe has come to nothing: the next one may go.
    fn give_back(&self, probe: Moment, now: Moment) {
        let (seen, next) = (State::Open(probe).word(), State::Open(now).word());
        // Relaxed: as in `ask`. A lost race means that a load has ended, which says more.
        let _ = self.state.compare_exchange(seen, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// A load has ended, which was this probe if any. `true` if that has opened the breaker.
    #[must_use]
    fn ended(&self, verdict: Verdict, probe: Option<Moment>, now: Moment) -> bool {
        let paused = now.plus(self.breaker.pause);
        // Acquire: windows that were cleared before it was closed; pairs with the Release below.
        let mut word = self.state.load(Ordering::Acquire);
        loop {
            let state = State::of(word);
            let next = match (state, verdict) {
                (State::Closed(_), _) if self.note(verdict, now) => State::Open(paused),
                (State::Closed(_), _) => return false,
                (State::Open(_), Verdict::Success) => {
                    self.clear();
                    State::Closed(now)
                }
                (State::Open(_), Verdict::Failure) if is_named(word, probe) => State::Open(paused),
                // A probe that runs keeps its time.
                (State::Open(until), Verdict::Failure) => State::Open(until.max(paused)),
            };
            // Release: the windows that were cleared; pairs with the Acquire above, and that of a failure.
            let swung = self.state.compare_exchange(word, next.word(), Ordering::Release, Ordering::Acquire);
            match (swung, state) {
                (swung, State::Closed(_)) => return swung.is_ok(),
                (Ok(_), State::Open(_)) => return false,
                (Err(other), State::Open(_)) => word = other,
            }
        }
    }

    /// Forgets what has been counted.
    fn clear(&self) {
        // Relaxed: whoever sees it closed after this acquires it.
        self.windows.iter().for_each(|window| window.store(0, Ordering::Relaxed));
    }

    /// Counts a load that has ended. Whether it is a failure by which the rate is reached.
    fn note(&self, verdict: Verdict, now: Moment) -> bool {
        let length = saturating_nanos(self.breaker.window);
        let nth = now.nanos() / length;
        let number = |nth: u64| nth as u32 & ((1 << NUMBER) - 1);
        let this = (nth % 2) as usize;
        // Relaxed: counts; what was cleared is acquired before.
        let mut word = self.windows[this].load(Ordering::Relaxed);
        let counts = loop {
            let seen = Counts::of(word);
            let begun = Counts { number: number(nth), loads: 0, failures: 0 };
            // One that comes late by two windows begins one anew too: the rate is then taken of fewer loads.
            let counts = if seen.number == begun.number { seen } else { begun }.with(verdict);
            let counted = self.windows[this].compare_exchange(
                word,
                counts.word(),
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            match counted {
                Ok(_) => break counts,
                Err(other) => word = other,
            }
        };
        if verdict == Verdict::Success {
            return false;
        }
        let before = Counts::of(self.windows[1 - this].load(Ordering::Relaxed));
        let part = if before.number == number(nth.wrapping_sub(1)) {
            1.0 - (now.nanos() % length) as f64 / length as f64
        } else {
            0.0
        };
        let sum = |of: fn(Counts) -> u32| f64::from(of(counts)) + f64::from(of(before)) * part;
        let (loads, failures) = (sum(|counts| counts.loads), sum(|counts| counts.failures));
        loads >= f64::from(self.breaker.min_loads) && failures >= self.breaker.failure_rate * loads
    }
}

impl<K, V, S> Core<K, V, S> {
    /// Asks the breaker for leave to load.
    pub(super) fn ask_breaker(&self) -> Says {
        let Some(circuit) = &self.circuit else { return Says::Load };
        circuit.ask(|| self.time.now(), self.settings.lease)
    }

    /// Whether a load of this claim, which has waited to begin, may begin now, with a lease until then.
    pub(super) fn lets_begin(&self, claim: &Claim, lease_end: Moment) -> bool {
        !self.switches.is_frozen()
            && self.circuit.as_ref().is_none_or(|circuit| circuit.lets_begin(claim.probe, lease_end))
    }

    /// A probe has come to nothing.
    pub(super) fn give_probe_back(&self, probe: Option<Moment>) {
        if let (Some(circuit), Some(probe)) = (&self.circuit, probe)
            // The clock is user code.
            && let Some(now) = caught(|| self.time.now())
        {
            circuit.give_back(probe, now);
        }
    }

    /// A flight has ended, or has been taken over. A load that has begun and says nothing has failed if its lease is over.
    pub(super) fn tell_breaker(&self, flight: &Flight<K, V>, verdict: Option<Verdict>, has_begun: bool) {
        let (Some(circuit), claim) = (&self.circuit, &flight.claim) else { return };
        let late = claim.in_background() && flight.has_begun();
        let probe = if late { claim.probe.map(|_| flight.lease_end()) } else { claim.probe };
        let Some(now) = caught(|| self.time.now()) else { return };
        let hangs = || has_begun && flight.lease_end() <= now;
        match verdict.or_else(|| hangs().then_some(Verdict::Failure)) {
            Some(verdict) if !claim.decides() => {
                if circuit.ended(verdict, probe, now) {
                    self.counters.add(Count::BreakerOpenings);
                }
            }
            _ => self.give_probe_back(probe),
        }
    }

    pub(super) fn is_breaker_open(&self) -> bool {
        self.circuit.as_ref().is_some_and(Circuit::is_open)
    }
}
