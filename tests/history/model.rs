//! What one key of the cache is, one step at a time.

use crate::checker::{Stuck, Timed, linearize};
use std::collections::HashMap;

/// A value, or the load that brings it: each has a number of its own.
pub(crate) type Id = u64;

pub(crate) type History = Vec<Timed<Did>>;

/// What those get who join a flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Gives {
    Value,
    Error,
    /// They look again.
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Flight {
    pub(crate) id: Id,
    pub(crate) gives: Gives,
}

/// What a claim goes by.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Over {
    /// A load replaces a stale value, or none.
    NothingFresh,
    /// A `compute` decides on what is there.
    Seen(Option<Id>),
    /// A `compute` was superseded before it could decide.
    Unseen,
}

/// How a flight ends that is still the key's.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ending {
    /// With the value of its own number.
    Put,
    Clear,
    Keep,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Did {
    /// What a call got that looks at the cache and does not load.
    Read(Option<Id>),
    /// What a call got that may load and did not.
    Served(Id),
    /// The load whose error a call got that did not load.
    Failed(Id),
    Insert(Id),
    Clear,
    Remove(Option<Id>),
    /// Whether there was a value.
    Expire(bool),
    Claim(Flight, Over),
    /// `effect`: whether it took effect, where the caller is told.
    End {
        id: Id,
        ending: Ending,
        effect: Option<bool>,
    },
}

/// A key's place in the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    value: Option<Id>,
    stale: bool,
    /// The load whose result is to be stored.
    flight: Option<Flight>,
}

impl Place {
    fn of(value: Option<Id>) -> Self {
        Self { value, ..Self::default() }
    }

    fn has_flight(self, id: Id, gives: Gives) -> bool {
        self.flight == Some(Flight { id, gives })
    }

    /// The place after `did`; `None` if that can't be.
    pub(crate) fn step(self, did: &Did) -> Option<Self> {
        let (legal, next) = match *did {
            Did::Read(got) => (got == self.value, self),
            Did::Served(id) => (self.value == Some(id) || self.has_flight(id, Gives::Value), self),
            Did::Failed(id) => (self.has_flight(id, Gives::Error), self),
            Did::Insert(id) => (true, Self::of(Some(id))),
            Did::Clear => (true, Self::of(None)),
            Did::Remove(got) => (got == self.value, Self::of(None)),
            Did::Expire(was) => {
                (was == self.value.is_some(), Self { value: self.value, stale: was, flight: None })
            }
            Did::Claim(flight, over) => {
                let fits = match over {
                    Over::NothingFresh => self.value.is_none() || self.stale,
                    Over::Seen(value) => value == self.value,
                    Over::Unseen => true,
                };
                (fits && self.flight.is_none(), Self { flight: Some(flight), ..self })
            }
            Did::End { id, ending, effect } => {
                let mine = self.flight.is_some_and(|flight| flight.id == id);
                let next = match ending {
                    _ if !mine => self,
                    Ending::Put => Self::of(Some(id)),
                    Ending::Clear => Self::of(None),
                    Ending::Keep => Self { flight: None, ..self },
                };
                (effect.is_none_or(|effect| effect == mine), next)
            }
        };
        legal.then_some(next)
    }
}

/// Checks one key's history by both rules. `Err` says what is wrong with it.
pub(crate) fn check(history: &[Timed<Did>]) -> Result<(), String> {
    never_older(history)?;
    linearize(Place::default(), history, Place::step).map(drop).map_err(|stuck| tell(history, &stuck))
}

/// The promise by itself, without a model of loads: no value that was written before a write, or whose load had begun
/// before it, is given to a call that began after it.
fn never_older(history: &[Timed<Did>]) -> Result<(), String> {
    let mut begun = HashMap::new();
    let mut writes = Vec::new();
    for (n, event) in history.iter().enumerate() {
        match event.op {
            Did::Insert(id) => drop(begun.insert(id, event.to)),
            Did::Claim(flight, _) => drop(begun.insert(flight.id, event.to)),
            _ => {}
        }
        if matches!(event.op, Did::Insert(_) | Did::Clear | Did::Remove(_)) {
            writes.push(n);
        }
    }
    writes.sort_by_key(|n| history[*n].to);
    // Of the writes up to each, the one that began last.
    let mut latest: Vec<usize> = Vec::new();
    for n in writes.iter().copied() {
        let before = latest.last().copied().unwrap_or(n);
        latest.push(if history[n].from > history[before].from { n } else { before });
    }
    for event in history {
        let (Did::Read(Some(id)) | Did::Served(id) | Did::Remove(Some(id))) = event.op else { continue };
        let Some(began) = begun.get(&id) else { return Err(format!("{event:?}: nobody made that value")) };
        let before = writes.partition_point(|n| history[*n].to < event.from);
        if let Some(write) = before.checked_sub(1).map(|n| &history[latest[n]])
            && *began < write.from
        {
            return Err(format!("{event:?} got what had begun by {began}, after {write:?}"));
        }
    }
    Ok(())
}

/// How far an order goes, and what does not fit there.
fn tell(history: &[Timed<Did>], stuck: &Stuck<Place>) -> String {
    let mut left: Vec<&Timed<Did>> =
        (0..history.len()).filter(|n| !stuck.order.contains(n)).map(|n| &history[n]).collect();
    let end = left.iter().map(|event| event.to).min().unwrap_or_default();
    left.retain(|event| event.from < end);
    let line = |event: &Timed<Did>| format!("  {:>6} to {:<6} {:?}\n", event.from, event.to, event.op);
    let skipped = stuck.order.len().saturating_sub(16);
    let fit: String = stuck.order[skipped..].iter().map(|n| line(&history[*n])).collect();
    let rest: String = left.into_iter().map(line).collect();
    format!(
        "not linearizable: {} of {} steps fit, the last of them\n{fit}come to {:?}, where one of these should fit\n{rest}",
        stuck.order.len(),
        history.len(),
        stuck.state,
    )
}
