//! Loom models of the queue: each item comes out once and in order, and what is freed is read by nobody.
//!
//! How to run them and how to go deeper: [`crate::primitive::model`]. Most run under lasting pins, for the orderings, and
//! under strict ones, for what is freed; one under a real epoch. Segments have three cells. Whoever pushes an item writes a
//! note of it before, and whoever pops it reads and crosses it out, so that loom sees an item that is popped without what
//! its pusher did before, or twice. At the end of each run all items are out, `len` has been exact, polling has used up no
//! cell, and all segments are free.
//!
//! What turns each model red; `.ci/mutants` applies it:
//!
//! | model | mutation |
//! |---|---|
//! | `two_link_the_first_segment` | a segment is linked by a store; one that was not linked is leaked; the head is read Relaxed |
//! | `two_link_the_next_segment` | the tail is moved by the linker only; a link is found, or the tail moved or read, Relaxed |
//! | `two_pop` | a cell is handed to two; the end of a segment is passed over; the loser of the head retires too, or nobody does |
//! | `two_pop_and_leave` | a segment is freed at once |
//! | `a_slow_pusher_goes_elsewhere`, `_at_the_end` | a cell is stored; a lost CAS counts as put; an empty cell is left empty |
//! | `a_pusher_and_its_popper` | an item is put or taken, or a link set or followed, Relaxed |
//! | `the_tail_is_behind` | the head leaves a segment before the tail |
//! | `never_empty`, `never_empty_at_the_end` | `dequeue` is read Relaxed; it is moved by Release or Acquire alone |
//! | `a_poll_uses_nothing_up` | no look whether the queue is empty; a length below zero |
//! | `a_poll_at_the_end` | an index beyond the end counts |
//! | `a_length_meets_both_ends` | the segments that were left do not count; the head is moved Relaxed |
//! | `leave_epoch` | a segment is freed at once, under a real epoch |

use super::*;
use crate::primitive::UnsafeCell as Watched;
use crate::primitive::epoch::{self, Participant, pin, register};
use crate::primitive::model::{FEW, Pins, both, check};
use crate::primitive::plain;
use crate::primitive::step::told::Steps;
use crossbeam_epoch::Collector;
use loom::thread::{self, JoinHandle};
use std::sync::Arc;

/// What an item stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Note {
    Blank,
    Pushed,
    Popped,
}

/// A queue of items below `ITEMS`, with a note of each. The tens of an item say who pushes it.
struct Fixture {
    queue: Queue,
    notes: Vec<Watched<Note>>,
    inside: plain::AtomicUsize,
}

const ITEMS: u64 = 30;

// SAFETY: loom watches the notes for races; the rest is atomic.
unsafe impl Sync for Fixture {}

impl Fixture {
    fn note(&self, item: u64, old: Note, new: Note) {
        let write = |note: *mut Note| {
            // SAFETY: loom reports a race before this reads and writes.
            assert_eq!(unsafe { note.replace(new) }, old, "item {item}");
        };
        self.notes[item as usize].with_mut(write);
    }

    fn push(&self, item: u64) {
        // Relaxed: a figure, all threads of a model being one thread of the system.
        self.inside.fetch_add(1, Ordering::Relaxed);
        self.note(item, Note::Blank, Note::Pushed);
        self.queue.push(item, &pin());
    }

    fn pop(&self) -> Option<u64> {
        let item = self.queue.pop(&pin())?;
        self.note(item, Note::Pushed, Note::Popped);
        // Relaxed: as above.
        self.inside.fetch_sub(1, Ordering::Relaxed);
        Some(item)
    }

    /// Tries so many times to pop.
    fn pops(&self, times: usize) -> Vec<u64> {
        (0..times).filter_map(|_| self.pop()).collect()
    }

    fn len(&self) -> usize {
        self.queue.len(&pin())
    }
}

/// One run of a model: how its threads pin, and what they share.
struct Run {
    participant: Box<dyn Fn() -> Participant>,
    fixture: Arc<Fixture>,
    spawned: Vec<JoinHandle<(Vec<u64>, Option<Participant>)>>,
    steps: Vec<Steps>,
}

impl Run {
    /// Items from 1 to `there` are in.
    fn new(participant: impl Fn() -> Participant + 'static, there: u64) -> Self {
        participant().adopt();
        let notes = (0..ITEMS).map(|_| Watched::new(Note::Blank)).collect();
        let fixture = Fixture { queue: Queue::new(), notes, inside: plain::AtomicUsize::new(0) };
        (1..=there).for_each(|item| fixture.push(item));
        Self {
            participant: Box::new(participant),
            fixture: Arc::new(fixture),
            spawned: Vec::new(),
            steps: Vec::new(),
        }
    }

    /// Spawns a thread that gives the items it has popped, in order.
    fn spawn(&mut self, body: impl FnOnce(&Fixture) -> Vec<u64> + 'static) {
        let own = (self.participant)();
        let fixture = self.fixture.clone();
        let steps = Steps::new();
        self.steps.push(steps.clone());
        self.spawned.push(thread::spawn(move || {
            own.adopt();
            steps.tell();
            let popped = body(&fixture);
            step();
            drop(fixture);
            (popped, Participant::take_back())
        }));
    }

    fn push(&mut self, items: &'static [u64]) {
        self.spawn(|f| {
            items.iter().for_each(|item| f.push(*item));
            Vec::new()
        });
    }

    fn pops(&mut self, times: usize) {
        self.spawn(move |f| f.pops(times));
    }

    /// Lets what main does next happen between any two steps of the others.
    fn look(&self) {
        self.steps.iter().for_each(Steps::look);
    }

    /// Joins all, and sees that nothing is lost, out of order or left. Gives what each thread popped, and then `main`.
    fn finish(self, main: Vec<u64>) -> Vec<Vec<u64>> {
        let (mut popped, own): (Vec<_>, Vec<_>) =
            self.spawned.into_iter().map(|thread| thread.join().unwrap()).unzip();
        popped.push(main);

        let f = Arc::into_inner(self.fixture).expect("all threads have ended");
        // Relaxed, here and below: a figure.
        assert_eq!(f.len(), f.inside.load(Ordering::Relaxed), "the length of a quiet queue");
        let rest = f.pops(f.len());
        assert_eq!(f.inside.load(Ordering::Relaxed), 0, "an item is lost");
        assert_eq!(f.len(), 0, "the length of an empty queue");
        for items in &popped {
            assert_in_order(&[&items[..], &rest[..]].concat());
        }

        let handed_out = |f: &Fixture| f.queue.head(&pin()).map(Segment::popped);
        let before = handed_out(&f);
        assert_eq!(f.pop(), None);
        assert_eq!(handed_out(&f), before, "polling uses cells up");

        let tally = f.queue.tally.clone();
        drop(f);
        drop((own, Participant::take_back(), self.participant));
        epoch::clear();
        assert_eq!(Arc::strong_count(&tally.0), 1, "a segment is not free");
        popped
    }
}

/// Items of one pusher come out in the order in which they were pushed.
fn assert_in_order(items: &[u64]) {
    for pusher in 0..ITEMS / 10 {
        let own = items.iter().filter(|item| **item / 10 == pusher);
        assert!(own.is_sorted(), "out of order: {items:?}");
    }
}

/// Two push into a queue that has no segment yet, and main pops.
#[test]
fn two_link_the_first_segment() {
    both("two link the first segment", 3, |pins: Pins| {
        let mut run = Run::new(pins, 0);
        run.push(&[10]);
        run.push(&[20]);
        run.look();
        let main = run.fixture.pops(1);
        run.finish(main);
    });
}

/// Two push where the last segment is full, so that both bring a new one, and main pops.
#[test]
fn two_link_the_next_segment() {
    both("two link the next segment", 2, |pins: Pins| {
        let mut run = Run::new(pins, 3);
        let mut main = run.fixture.pops(1);
        run.push(&[10]);
        run.push(&[20, 21]);
        run.look();
        main.extend(run.fixture.pops(3));
        assert_eq!(main[..3], [1, 2, 3], "the first in are the first out");
        run.finish(main);
    });
}

/// Two pop, main too: each item comes out once, and who pops later gets a later one.
#[test]
fn two_pop() {
    both("two pop", 2, |pins: Pins| {
        let mut run = Run::new(pins, 5);
        run.pops(2);
        run.pops(2);
        let main = run.fixture.pops(1);
        let popped = run.finish(main);
        let mut all = popped.concat();
        all.sort_unstable();
        assert_eq!(all, [1, 2, 3, 4, 5], "nothing was ever in the way of a popper");
    });
}

/// Two pop past the end of a segment while main is in it.
#[test]
fn two_pop_and_leave() {
    both("two pop and leave", 2, |pins: Pins| {
        let mut run = Run::new(pins, 4);
        let mut main = run.fixture.pops(1);
        run.pops(2);
        run.pops(1);
        run.look();
        main.extend(run.fixture.pops(1));
        run.finish(main);
    });
}

/// One pushes, two pop: who finds the pusher's cell empty takes it, and the pusher goes elsewhere.
fn a_slow_pusher_of(there: u64, popped: usize) -> impl Fn(Pins) + Copy + Send + Sync {
    move |pins| {
        let mut run = Run::new(pins, there);
        let mut main = run.fixture.pops(popped);
        run.push(&[10]);
        run.pops(1);
        main.extend(run.fixture.pops(1));
        run.finish(main);
    }
}

#[test]
fn a_slow_pusher_goes_elsewhere() {
    both("a slow pusher goes elsewhere", 3, a_slow_pusher_of(1, 0));
}

/// The same at the end of a segment: elsewhere is a new one.
#[test]
fn a_slow_pusher_at_the_end() {
    both("a slow pusher at the end", 3, a_slow_pusher_of(2, 1));
}

/// One pushes into cells and a new segment, one pops, main too: an item brings along what its pusher did before.
#[test]
fn a_pusher_and_its_popper() {
    both("a pusher and its popper", 2, |pins: Pins| {
        let mut run = Run::new(pins, 1);
        run.push(&[10, 11, 12]);
        run.pops(3);
        let main = run.fixture.pops(1);
        run.finish(main);
    });
}

/// One links a segment and is slow to move the tail there, one pops past it, main pushes: the tail is not left behind in a
/// segment that the head has left.
#[test]
fn the_tail_is_behind() {
    both("the tail is behind", 2, |pins: Pins| {
        let mut run = Run::new(pins, 3);
        let main = run.fixture.pops(1);
        run.push(&[10]);
        run.pops(3);
        run.look();
        run.fixture.push(20);
        run.finish(main);
    });
}

/// One pushes before it pops, so that the queue is never empty: another's pop finds an item.
fn never_empty_of(there: u64, popped: usize) -> impl Fn(Pins) + Copy + Send + Sync {
    move |pins| {
        let mut run = Run::new(pins, there);
        let before = run.fixture.pops(popped);
        run.spawn(|f| {
            f.push(10);
            let popped = f.pops(1);
            assert_eq!(popped.len(), 1, "it has pushed one itself");
            popped
        });
        run.spawn(|f| {
            let popped = f.pops(1);
            assert_eq!(popped.len(), 1, "the queue was never empty");
            popped
        });
        run.finish(before);
    }
}

#[test]
fn never_empty() {
    both("never empty", 3, never_empty_of(1, 0));
}

/// The same at the end of a segment.
#[test]
fn never_empty_at_the_end() {
    both("never empty at the end", 3, never_empty_of(3, 2));
}

/// Two pop where there is one item at most, and main pushes one: polling uses no cells up, and `len` is right though both
/// may have been handed a cell for the same item.
fn a_poll_of(there: u64, popped: usize) -> impl Fn(Pins) + Copy + Send + Sync {
    move |pins| {
        let mut run = Run::new(pins, there);
        let main = run.fixture.pops(popped);
        run.pops(1);
        run.pops(1);
        run.fixture.push(20);
        run.finish(main);
    }
}

#[test]
fn a_poll_uses_nothing_up() {
    both("a poll uses nothing up", 2, a_poll_of(1, 1));
}

/// The same where the one item is in the last cell of a segment, and both may ask for it.
#[test]
fn a_poll_at_the_end() {
    both("a poll at the end", 2, a_poll_of(3, 2));
}

/// One pushes, one pops, and main asks for the length, which is never beyond what was ever pushed.
#[test]
fn a_length_meets_both_ends() {
    both("a length meets both ends", 2, |pins: Pins| {
        let mut run = Run::new(pins, 3);
        let main = run.fixture.pops(1);
        run.push(&[10, 11]);
        run.pops(3);
        run.look();
        let len = run.fixture.len();
        assert!(len <= 4, "{len} items, where there were never more than four");
        run.finish(main);
    });
}

/// Under a real epoch: one pops past the end of a segment and collects, one pops, main pushes.
#[test]
fn leave_epoch() {
    check("leave_epoch", 1, FEW, || {
        let collector = Collector::new();
        let mut run = Run::new(move || register(&collector), 4);
        let main = run.fixture.pops(1);
        run.spawn(|f| {
            let popped = f.pops(3);
            for _ in 0..3 {
                epoch::flush();
            }
            popped
        });
        run.pops(1);
        run.look();
        run.fixture.push(20);
        run.finish(main);
    });
}
