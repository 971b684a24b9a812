//! Models of the slot word. Each runs under lasting pins, for the orderings, and under strict ones, for what is freed.
//!
//! | model | red when |
//! |---|---|
//! | `a_publish_meets_an_insert_and_a_reader` | `swing` does not release; `load` does not acquire; a cell is freed at once |
//! | `a_publish_meets_a_kill_and_a_reader` | a refused value is forgotten; what was published in the room is not counted in it |
//! | `one_of_two_claims_wins` | a claim stores its word instead of comparing it; the old flight's share is not given back |
//! | `a_lease_is_a_lock` | `swing` does not acquire, or does not release |
//! | `a_takeover_meets_a_late_publish` | a flight that takes over has the room too (INV-flight-4); a flight is freed at once |
//! | `a_takeover_meets_a_starting_job` | the end of a queued lease is a store |
//! | `an_abandon_meets_an_insert` | an abandon retires what it leaves in place |
//! | `a_failure_keeps_what_was_there` | a record forgets its cell, or frees it; a record is freed at once |
//! | `the_last_share_frees_the_slot` | the shares do not release, or do not acquire |
//! | `a_removed_value_is_held_without_a_pin`, `a_later_value_that_is_held` | whoever holds a value retires it too, or has no share of its slot; it is freed at once when it is let go |

use super::*;
use crate::flight::{Claim, LoadCause};
use crate::freshness::Times;
use crate::primitive::epoch::pin;
use crate::primitive::model::{Census, Value, both, spawn};
use crate::primitive::{UnsafeCell as Watched, Witness};
use std::error::Error;
use std::fmt;
use std::sync::Arc as Shared;

type S = SlotRef<u8, Value>;
type F = Arc<Flight<u8, Value>>;

const BORN: Times = Times::new(Moment::NEVER, Moment::NEVER, Moment::NEVER);

fn now() -> Moment {
    Moment::from_nanos(10)
}

/// When the lease of a slot's first flight ends: before `now`.
fn lease_end() -> Option<Moment> {
    Some(Moment::from_nanos(5))
}

fn weighed(census: &Census, number: u64) -> Weighed<Value> {
    Weighed { cell: Cell { value: census.value(number), times: BORN }, weight: USUAL_WEIGHT }
}

fn valued(census: &Census, number: u64) -> S {
    Unborn::with_value(7, 7, weighed(census, number), false, MarkWord::new())
        .0
        .take()
        .expect("an unborn slot has its share")
}

fn begins(first: bool, lease_end: Option<Moment>) -> Claim {
    Claim { cause: LoadCause::Miss, at: now(), lease_end, queued: lease_end.is_none(), first, probe: None }
}

fn loading() -> (S, F) {
    let (mut unborn, flight) =
        Unborn::with_flight(7, 7, None, |slot, prev| Flight::new(slot, prev, begins(true, lease_end())));
    (unborn.0.take().expect("an unborn slot has its share"), flight)
}

/// What a writer does that takes whatever is there away.
fn write(slot: &S, mut next: Next<u8, Value>) -> isize {
    let guard = pin();
    loop {
        let state = slot.load(&guard);
        if matches!(state, State::Dead) {
            return 0;
        }
        match slot.swing(state, next, &guard) {
            Swing::Won { values, .. } => return values,
            Swing::Lost(back) => next = back,
        }
    }
}

/// The one CAS by which a load begins, from what was seen.
fn claim(slot: &S, from: State<'_, u8, Value>, guard: &Guard) -> Option<F> {
    let (target, prev) = (SlotRef::of(slot, guard), from.held().word());
    let flight = Arc::new(Flight::new(target, prev, begins(false, Some(Moment::NEVER))));
    match slot.swing(from, Next::Loading(flight.clone()), guard) {
        Swing::Won { values, .. } => {
            assert_eq!(values, 0, "a claim changes no value");
            Some(flight)
        }
        Swing::Lost(_) => None,
    }
}

/// Ends a flight as its leader does; what it did to the number of values, `None` if it was refused.
fn end(flight: &F, next: Next<u8, Value>) -> Option<isize> {
    let guard = pin();
    let state = flight.target.load(&guard);
    let State::Loading(there) = state else { return None };
    if !std::ptr::eq(there, &raw const **flight) {
        return None;
    }
    match flight.target.swing(state, next, &guard) {
        Swing::Won { values, .. } => Some(values),
        Swing::Lost(_) => None,
    }
}

fn publish(flight: &F, census: &Census, number: u64) -> Option<isize> {
    end(flight, Next::Value(NewCell::for_flight(flight, weighed(&census, number))))
}

fn read(slot: &S) -> Option<u64> {
    let guard = pin();
    slot.load(&guard).held().cell().map(|cell| cell.value.number())
}

/// Ends the slot, and sees that nothing is left.
fn bury(slot: S, census: &Census) {
    // SAFETY: the model's threads have been joined.
    unsafe { slot.bury() };
    drop(slot);
    assert_eq!(census.count(), 0, "values leaked");
}

#[test]
fn a_publish_meets_an_insert_and_a_reader() {
    both("a publish meets an insert and a reader", 3, |pins| {
        pins().adopt();
        let census = Census::default();
        let (slot, flight) = loading();
        let leader = spawn(pins, {
            let census = census.clone();
            move || publish(&flight, &census, 1)
        });
        let writer = spawn(pins, {
            let (slot, census) = (slot.clone(), census.clone());
            move || write(&slot, Next::Value(NewCell::boxed(weighed(&census, 2))))
        });
        assert!(matches!(read(&slot), None | Some(1 | 2)));
        let (published, inserted) = (leader.join().unwrap(), writer.join().unwrap());
        assert_eq!(read(&slot), Some(2), "the insert stays");
        assert_eq!(published.unwrap_or(0) + inserted, 1);
        bury(slot, &census);
    });
}

#[test]
fn a_publish_meets_a_kill_and_a_reader() {
    both("a publish meets a kill and a reader", 3, |pins| {
        pins().adopt();
        let census = Census::default();
        let (slot, flight) = loading();
        let leader = spawn(pins, {
            let census = census.clone();
            move || publish(&flight, &census, 1)
        });
        let writer = spawn(pins, {
            let slot = slot.clone();
            move || write(&slot, Next::Dead)
        });
        assert!(matches!(read(&slot), None | Some(1)));
        let (published, killed) = (leader.join().unwrap(), writer.join().unwrap());
        assert_eq!(read(&slot), None, "invalidated never comes back");
        assert_eq!(published.unwrap_or(0) + killed, 0);
        bury(slot, &census);
    });
}

#[test]
fn one_of_two_claims_wins() {
    both("one of two claims wins", 3, |pins| {
        pins().adopt();
        let census = Census::default();
        let slot = valued(&census, 1);
        let lead = |slot: S, census: Census, number| {
            let guard = pin();
            let state = slot.load(&guard);
            let State::Ready(held) = state else {
                assert_eq!(
                    state.held().cell().map(|c| c.value.number()),
                    Some(1),
                    "prev is there while it loads"
                );
                return None;
            };
            let seen = held.cell().map(|c| c.value.number());
            let flight = claim(&slot, state, &guard)?;
            drop(guard);
            assert_eq!(publish(&flight, &census, number), Some(0), "nobody else has the lease");
            seen
        };
        let other = spawn(pins, {
            let (slot, census) = (slot.clone(), census.clone());
            move || lead(slot, census, 2)
        });
        let mine = lead(slot.clone(), census.clone(), 3);
        let theirs = other.join().unwrap();
        let last = match (mine, theirs) {
            (Some(1), None) | (Some(2), Some(1)) => 3,
            (None, Some(1)) | (Some(1), Some(3)) => 2,
            both => panic!("both have replaced the same: {both:?}"),
        };
        assert_eq!(read(&slot), Some(last));
        bury(slot, &census);
    });
}

#[test]
fn a_lease_is_a_lock() {
    both("a lease is a lock", 3, |pins| {
        pins().adopt();
        let census = Census::default();
        let slot = valued(&census, 1);
        let source = Shared::new(Watched::new(0));
        // The source's memory is the leader's alone, also when the slot goes back to what it was.
        let load = |slot: S, source: Shared<Watched<u32>>| {
            let guard = pin();
            let state @ State::Ready(_) = slot.load(&guard) else { return 0 };
            let Some(flight) = claim(&slot, state, &guard) else { return 0 };
            drop(guard);
            // SAFETY: loom reports a race before this writes.
            source.with_mut(|loads| unsafe { *loads += 1 });
            assert_eq!(end(&flight, Next::Prev), Some(0));
            1
        };
        let other = spawn(pins, {
            let (slot, source) = (slot.clone(), source.clone());
            move || load(slot, source)
        });
        let mine = load(slot.clone(), source.clone());
        let theirs = other.join().unwrap();
        // SAFETY: loom reports a race before this reads.
        source.with(|loads| assert_eq!(unsafe { *loads }, mine + theirs));
        assert_eq!(read(&slot), Some(1));
        bury(slot, &census);
    });
}

/// Takes a flight over that may be taken over, as the engine does.
fn take_over(slot: &S, census: &Census, number: u64) -> bool {
    let guard = pin();
    let state @ State::Loading(old) = slot.load(&guard) else { return false };
    if !old.may_be_taken_over(now(), true) || !old.supersede(now()) {
        return false;
    }
    let Some(flight) = claim(slot, state, &guard) else { return false };
    drop(guard);
    assert_eq!(publish(&flight, census, number), Some(1), "nobody else has the lease");
    true
}

#[test]
fn a_takeover_meets_a_late_publish() {
    both("a takeover meets a late publish", 3, |pins| {
        pins().adopt();
        let census = Census::default();
        let (slot, flight) = loading();
        let late = spawn(pins, {
            let census = census.clone();
            move || publish(&flight, &census, 1)
        });
        let taken = take_over(&slot, &census, 2);
        let published = late.join().unwrap();
        assert_ne!(taken, published.is_some(), "exactly one of them wins");
        assert_eq!(read(&slot), Some(if taken { 2 } else { 1 }));
        bury(slot, &census);
    });
}

#[test]
fn one_of_two_takeovers_wins() {
    both("one of two takeovers wins", 3, |pins| {
        pins().adopt();
        let census = Census::default();
        let (slot, flight) = loading();
        let late = spawn(pins, {
            let census = census.clone();
            move || publish(&flight, &census, 1)
        });
        let other = spawn(pins, {
            let (slot, census) = (slot.clone(), census.clone());
            move || take_over(&slot, &census, 2)
        });
        let mine = take_over(&slot, &census, 3);
        let (theirs, published) = (other.join().unwrap(), late.join().unwrap());
        let winners: Vec<u64> =
            [published.map(|_| 1), theirs.then_some(2), mine.then_some(3)].into_iter().flatten().collect();
        assert_eq!(winners, read(&slot).into_iter().collect::<Vec<_>>(), "exactly one of them wins");
        bury(slot, &census);
    });
}

#[test]
fn a_takeover_meets_a_starting_job() {
    both("a takeover meets a starting job", 3, |pins| {
        pins().adopt();
        let census = Census::default();
        let (mut unborn, flight) =
            Unborn::with_flight(7, 7, None, |slot, prev| Flight::new(slot, prev, begins(true, None)));
        let slot: S = unborn.0.take().expect("an unborn slot has its share");
        let job = spawn(pins, {
            let census = census.clone();
            move || {
                if flight.begin(Moment::NEVER) {
                    assert!(publish(&flight, &census, 1).is_some(), "a load that has begun was taken over");
                    return true;
                }
                let _ = end(&flight, Next::Prev);
                false
            }
        });
        let taken = take_over(&slot, &census, 2);
        let ran = job.join().unwrap();
        assert!(!(taken && ran), "both have loaded");
        assert_eq!(read(&slot), if ran { Some(1) } else { taken.then_some(2) });
        bury(slot, &census);
    });
}

/// A value that is in a box, as all but a slot's first are.
fn boxed(census: &Census, number: u64) -> S {
    let slot = valued(census, 0);
    assert_eq!(write(&slot, Next::Value(NewCell::boxed(weighed(&census, number)))), 0);
    slot
}

fn an_abandon_meets_an_insert(name: &str, valued: fn(&Census, u64) -> S) {
    both(name, 3, move |pins| {
        pins().adopt();
        let census = Census::default();
        let slot = valued(&census, 1);
        let flight = {
            let guard = pin();
            claim(&slot, slot.load(&guard), &guard).expect("nobody else is there")
        };
        let leader = spawn(pins, move || end(&flight, Next::Prev));
        let writer = spawn(pins, {
            let (slot, census) = (slot.clone(), census.clone());
            move || write(&slot, Next::Value(NewCell::boxed(weighed(&census, 2))))
        });
        assert!(matches!(read(&slot), Some(1 | 2)), "what was there is there all the time");
        assert_eq!(leader.join().unwrap().unwrap_or(0) + writer.join().unwrap(), 0);
        assert_eq!(read(&slot), Some(2), "the insert stays");
        bury(slot, &census);
    });
}

#[test]
fn an_abandon_meets_an_insert_over_a_first_value() {
    an_abandon_meets_an_insert("an abandon meets an insert over a first value", valued);
}

#[test]
fn an_abandon_meets_an_insert_over_a_later_value() {
    an_abandon_meets_an_insert("an abandon meets an insert over a later value", boxed);
}

/// A loader's error that tells when it is read after its end.
struct Watch(Witness);

// SAFETY: the witness is what loom watches for races.
unsafe impl Sync for Watch {}

impl fmt::Debug for Watch {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.used();
        Ok(())
    }
}
impl fmt::Display for Watch {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ok(())
    }
}
impl Error for Watch {}
impl Drop for Watch {
    fn drop(&mut self) {
        self.0.ended();
    }
}

#[test]
fn a_failure_keeps_what_was_there() {
    both("a failure keeps what was there", 3, |pins| {
        pins().adopt();
        let census = Census::default();
        let slot = valued(&census, 1);
        let flight = {
            let guard = pin();
            claim(&slot, slot.load(&guard), &guard).expect("nobody else is there")
        };
        let fails = spawn(pins, move || {
            let error = LoadError::failed(Watch(Witness::new()));
            end(
                &flight,
                Next::Failure {
                    error,
                    attempts: 1,
                    pause: Pause { refresh: now(), load: now(), forget: now() },
                },
            )
        });
        let next = spawn(pins, {
            let (slot, census) = (slot.clone(), census.clone());
            move || {
                let guard = pin();
                let state @ State::Ready(held) = slot.load(&guard) else { return false };
                assert_eq!(held.record().map(|r| r.attempts), Some(1));
                let flight = claim(&slot, state, &guard).expect("nobody else leads");
                drop(guard);
                assert_eq!(publish(&flight, &census, 2), Some(0));
                true
            }
        });
        {
            let guard = pin();
            let held = slot.load(&guard).held();
            if let Some(record) = held.record() {
                let _ = format!("{:?}", record.error);
            }
            assert!(matches!(held.cell().map(|c| c.value.number()), Some(1 | 2)));
        }
        let (failed, loaded) = (fails.join().unwrap(), next.join().unwrap());
        assert_eq!((failed, read(&slot)), (Some(0), Some(if loaded { 2 } else { 1 })));
        bury(slot, &census);
    });
}

/// A key that tells a race with its end.
struct Key(Witness);

// SAFETY: the witness is what loom watches for races.
unsafe impl Sync for Key {}

impl Drop for Key {
    fn drop(&mut self) {
        self.0.ended();
    }
}

#[test]
fn the_last_share_frees_the_slot() {
    crate::primitive::model::check("the last share frees the slot", 3, 2, || {
        let slot = Slot::<Key, u8>::allocate(7, Key(Witness::new()), None, MarkWord::new());
        let theirs = slot.clone();
        let other = loom::thread::spawn(move || theirs.key().0.used());
        slot.key().0.used();
        drop(slot);
        other.join().unwrap();
    });
}

/// What each thread takes out of the slot, it holds without a pin, reads, and lets go, while others read it under theirs.
fn a_value_is_held(name: &str, valued: fn(&Census, u64) -> S) {
    both(name, 3, move |pins| {
        pins().adopt();
        let census = Census::default();
        let slot = valued(&census, 1);
        let take = |slot: S, next: fn(&Census) -> Next<u8, Value>, census: Census| {
            let held = {
                let guard = pin();
                let mut next = next(&census);
                loop {
                    let state = slot.load(&guard);
                    if matches!(state, State::Dead) {
                        break None;
                    }
                    match slot.swing(state, next, &guard) {
                        Swing::Won { taken, .. } => break taken.map(Taken::hold),
                        Swing::Lost(back) => next = back,
                    }
                }
            };
            // The slot goes with the last of its shares.
            drop(slot);
            let removed = held?;
            assert_eq!(*removed.key(), 7);
            Some(removed.value().number())
        };
        let killer = spawn(pins, {
            let (slot, census) = (slot.clone(), census.clone());
            move || take(slot, |_| Next::Dead, census)
        });
        let writer = spawn(pins, {
            let (slot, census) = (slot.clone(), census.clone());
            move || take(slot, |census| Next::Value(NewCell::boxed(weighed(census, 2))), census)
        });
        assert!(matches!(read(&slot), None | Some(1 | 2)));
        drop(slot);
        match (killer.join().unwrap(), writer.join().unwrap()) {
            (Some(1), None) | (Some(2), Some(1)) => {}
            both => panic!("each value is taken out once, and not {both:?}"),
        }
        assert_eq!(census.count(), 0, "values leaked");
    });
}

#[test]
fn a_removed_value_is_held_without_a_pin() {
    a_value_is_held("a removed value is held without a pin", valued);
}

#[test]
fn a_later_value_that_is_held() {
    a_value_is_held("a later value that is held", boxed);
}
