//! Whether a history is linearizable: Wing and Gong's search (*Testing and verifying concurrent objects*, 1993) with
//! Lowe's memory of what has been tried (*Testing for linearizability*, 2017).
//!
//! ```text
//!   begins(a)  begins(b)  ends(a)  begins(c)  ends(b)  ends(c)      a list in the order of the stamps
//! ```
//! The search takes an operation that begins before the first end, if the specification allows it in the state reached,
//! and lifts its two entries out of the list. At the first end nothing has fitted: it puts the last one back, and tries
//! what begins after that. The same set of operations with the same state is not tried twice.

use std::collections::HashSet;
use std::hash::Hash;

/// An operation, with the stamps between which it took effect.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timed<O> {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) op: O,
}

/// The longest order that was found where there is none for all, and the state that it leads to.
#[derive(Debug)]
pub(crate) struct Stuck<S> {
    pub(crate) order: Vec<usize>,
    pub(crate) state: S,
}

/// Looks for an order of the operations in which each takes effect between its stamps, and `step` allows each.
pub(crate) fn linearize<S, O>(
    start: S,
    history: &[Timed<O>],
    step: impl Fn(S, &O) -> Option<S>,
) -> Result<Vec<usize>, Stuck<S>>
where
    S: Copy + Eq + Hash,
{
    let mut list = List::of(history);
    let mut tried = HashSet::new();
    let mut taken = Bits(vec![0; history.len().div_ceil(64)]);
    let mut order: Vec<(usize, S)> = Vec::new();
    let mut state = start;
    let mut longest = Stuck { order: Vec::new(), state };
    let mut at = list.first();
    while let Some(entry) = at {
        let op = entry / 2;
        if entry == begins(op) {
            let next = step(state, &history[op].op);
            taken.flip(op);
            match next.filter(|next| tried.insert((taken.clone(), *next))) {
                Some(next) => {
                    order.push((op, state));
                    state = next;
                    list.lift(op);
                    at = list.first();
                }
                None => {
                    taken.flip(op);
                    at = list.after(entry);
                }
            }
        } else {
            if order.len() > longest.order.len() {
                longest = Stuck { order: order.iter().map(|(op, _)| *op).collect(), state };
            }
            let Some((last, before)) = order.pop() else { return Err(longest) };
            taken.flip(last);
            state = before;
            list.put_back(last);
            at = list.after(begins(last));
        }
    }
    Ok(order.into_iter().map(|(op, _)| op).collect())
}

/// A set of operations.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Bits(Vec<u64>);

impl Bits {
    fn flip(&mut self, op: usize) {
        self.0[op / 64] ^= 1 << (op % 64);
    }
}

fn begins(op: usize) -> usize {
    2 * op
}

fn ends(op: usize) -> usize {
    2 * op + 1
}

/// The beginnings and ends in the order of their stamps: a ring of numbers, with a head that is neither.
struct List {
    next: Vec<usize>,
    prev: Vec<usize>,
    head: usize,
}

impl List {
    fn of<O>(history: &[Timed<O>]) -> Self {
        let head = 2 * history.len();
        let mut entries: Vec<usize> = (0..head).collect();
        entries.sort_by_key(|entry| {
            let timed = &history[entry / 2];
            let end = *entry == ends(entry / 2);
            (if end { timed.to } else { timed.from }, end)
        });
        let mut list = Self { next: vec![head; head + 1], prev: vec![head; head + 1], head };
        let mut last = head;
        for entry in entries {
            list.tie(last, entry);
            last = entry;
        }
        list.tie(last, head);
        list
    }

    fn tie(&mut self, left: usize, right: usize) {
        (self.next[left], self.prev[right]) = (right, left);
    }

    fn first(&self) -> Option<usize> {
        self.after(self.head)
    }

    fn after(&self, entry: usize) -> Option<usize> {
        Some(self.next[entry]).filter(|next| *next != self.head)
    }

    fn lift(&mut self, op: usize) {
        for entry in [begins(op), ends(op)] {
            self.tie(self.prev[entry], self.next[entry]);
        }
    }

    /// Undoes the last `lift` that is not undone.
    fn put_back(&mut self, op: usize) {
        for entry in [ends(op), begins(op)] {
            let (left, right) = (self.prev[entry], self.next[entry]);
            self.tie(left, entry);
            self.tie(entry, right);
        }
    }
}
