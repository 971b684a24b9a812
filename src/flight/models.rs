//! Loom models of a flight's words: nobody sleeps for ever, one outcome, one owner, no cycle unseen.
//!
//! How to run them and how to go deeper: [`crate::primitive::model`]. Waits have no limit here, so that a lost wake-up
//! is a deadlock, which ends the process.
//!
//! What turns each model red; `.ci/mutants` applies it:
//!
//! | model | mutation |
//! |---|---|
//! | `outcome_join` | no second look after listening; the outcome is published Relaxed or read Relaxed |
//! | `outcome_two_join` | the bell is not rung |
//! | `outcome_without_bell` | whoever sees the outcome does not wake the rest |
//! | `abandon_two_wait` | no second look after listening |
//! | `settle_settle` | an outcome is set twice |
//! | `last_interest_newcomer` | the last leaves the word open; one joins a closed word; a store in place of the CAS of `leave` |
//! | `the_last_task_leaves_a_thread` | nobody is told that only threads are left, or each is |
//! | `a_task_leaves_while_one_joins` | a store in place of either CAS |
//! | `close_join` | one joins a closed word; a store in place of the CAS of `join` or the read-modify-write of `close` |
//! | `begin_supersede` | a store in place of either CAS |
//! | `registry_each` | items or chunks are published or read Relaxed; a seat is taken without a CAS; who leaves is freed at once |
//! | `registry_chunk` | a chunk that another has made is read Relaxed on entering |
//! | `registry_shares` | who leaves is freed at once |
//! | `cycle_of_two` | no fence between the edge and the walk; the walk is before the edge |
//! | `cycle_of_three` | the walk is before the edge |
//! | `cycle_by_nested_load` | a nested load has no edge |
//! | `no_cycle_of_edges_that_never_met` | one walk is believed |

use super::cycle::{Graph, Loading};
use super::wait::{Waiter, park};
use super::*;
use crate::clock::{Clock, Time};
use crate::primitive::atomic::AtomicUsize;
use crate::primitive::epoch::{Participant, pin, set_number};
use crate::primitive::model::{Census, FEW, Pins, Value, both, check, spawn};
use crate::primitive::plain;
use std::sync::Arc as Plain;
use std::time::Duration;

type TestFlight = Flight<Value, (), ()>;
type TestTicket = Ticket<Value, (), ()>;

/// A clock that stands still.
struct Still;

impl Clock for Still {
    fn now(&self) -> Duration {
        Duration::from_nanos(now().nanos())
    }
}

fn now() -> Moment {
    Moment::from_nanos(10)
}

fn lease_end() -> Moment {
    Moment::from_nanos(100)
}

pub(super) fn time() -> Time {
    Time::Given { clock: Plain::new(Still), by_hand: true }
}

fn flight() -> Arc<TestFlight> {
    flight_of(Some(lease_end()))
}

fn flight_of(lease_end: Option<Moment>) -> Arc<TestFlight> {
    let claim = Claim {
        cause: LoadCause::Miss,
        at: now(),
        lease_end,
        queued: lease_end.is_none(),
        first: false,
        probe: None,
    };
    Arc::new(Flight::new((), (), claim))
}

fn join(flight: &Arc<TestFlight>) -> Option<TestTicket> {
    Ticket::join(flight, Waits::AsThread, || flight.clone())
}

/// A thread that waits for a flight whose load is no future, for ever.
struct Parked<'a, V, T, P>(&'a Flight<V, T, P>, &'a Time);

impl<V: Clone, T, P> Waiter for Parked<'_, V, T, P> {
    type End = Waited<V>;

    fn look(&mut self) -> Result<Waited<V>, Moment> {
        self.0.look(self.1, Moment::NEVER)
    }

    fn may_drive(&self) -> bool {
        false
    }

    fn drive(&mut self) {}

    fn due(&mut self) -> Option<Waited<V>> {
        Some(self.0.due(Moment::NEVER))
    }
}

/// Waits as a thread, for ever.
pub(crate) fn waited<V: Clone, T, P>(flight: &Flight<V, T, P>, time: &Time) -> Waited<V> {
    park(flight.bell(), time, Parked(flight, time))
}

/// The number of the value that a waiter gets; `None`: it is to look again.
fn wait(ticket: &TestTicket) -> Option<u64> {
    match waited(&ticket.flight, &time()) {
        Waited::Ended(Outcome::Value(value)) => Some(value.number()),
        Waited::Ended(Outcome::LookAgain) => None,
        _ => panic!("nothing else can end this wait"),
    }
}

/// A word in place of a slot's.
#[derive(Clone)]
struct Place(Arc<AtomicUsize>);

const NOTHING: usize = 0;
const LOADING: usize = 1;
const READY: usize = 2;

impl Place {
    fn new() -> Self {
        Self(Arc::new(AtomicUsize::new(LOADING)))
    }

    fn swing(&self, from: usize, to: usize) -> bool {
        // AcqRel: as a slot's word.
        self.0.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

/// A figure of the model's own.
#[derive(Clone, Default)]
pub(super) struct Figure(Plain<plain::AtomicUsize>);

impl Figure {
    pub(super) fn add(&self, n: usize) {
        // Relaxed: all threads of a model are one thread of the system.
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(super) fn sub(&self, n: usize) {
        // Relaxed: as above.
        self.0.fetch_sub(n, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> usize {
        // Relaxed: as above.
        self.0.load(Ordering::Relaxed)
    }
}

/// A leader publishes while others join: who gets in gets the value, who does not finds that the slot has moved on.
fn outcome_join_of(joiners: usize) {
    let (flight, place, census) = (flight(), Place::new(), Census::default());
    let spawned: Vec<_> = (0..joiners)
        .map(|_| {
            let (flight, place) = (flight.clone(), place.clone());
            spawn(Participant::lasting, move || match join(&flight) {
                Some(ticket) => assert_eq!(wait(&ticket), Some(7)),
                None => assert!(!place.swing(LOADING, NOTHING), "closed before the slot has moved on"),
            })
        })
        .collect();
    let lead = {
        let (flight, census) = (flight.clone(), census.clone());
        move || {
            assert!(place.swing(LOADING, READY));
            if flight.close() > 0 {
                let _ = flight.settle(Outcome::Value(census.value(7)));
                flight.ring();
            }
        }
    };
    if joiners == 1 {
        spawn(Participant::lasting, lead).join().unwrap();
    } else {
        // A third thread would be too many.
        lead();
        drop(lead);
    }
    spawned.into_iter().for_each(|t| t.join().unwrap());
    drop(flight);
    assert_eq!(census.count(), 0);
}

#[test]
fn outcome_join() {
    check("outcome_join", 3, FEW, || outcome_join_of(1));
}

#[test]
fn outcome_two_join() {
    check("outcome_two_join", 2, FEW, || outcome_join_of(2));
}

/// A leader gives the slot back, while two wait: both look again, and one of them leads.
#[test]
fn abandon_two_wait() {
    check("abandon_two_wait", 2, FEW, || {
        let (flight, place, leads) = (flight(), Place::new(), Figure::default());
        let spawned: Vec<_> = (0..2)
            .map(|_| {
                let (ticket, place, leads) = (join(&flight).expect("open"), place.clone(), leads.clone());
                spawn(Participant::lasting, move || {
                    assert_eq!(wait(&ticket), None);
                    leads.add(usize::from(place.swing(NOTHING, LOADING)));
                })
            })
            .collect();
        assert!(place.swing(LOADING, NOTHING));
        assert_eq!(flight.close(), 2);
        let _ = flight.settle(Outcome::LookAgain);
        flight.ring();
        spawned.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(leads.get(), 1);
    });
}

/// Whoever has settled is suspended before the bell: one who sees the outcome wakes the other.
#[test]
fn outcome_without_bell() {
    check("outcome_without_bell", 3, FEW, || {
        let flight = flight();
        let sleeper = join(&flight).expect("open");
        let sleeper = spawn(Participant::lasting, move || assert_eq!(wait(&sleeper), None));
        let looker = {
            let ticket = join(&flight).expect("open");
            spawn(Participant::lasting, move || {
                let _ = ticket.flight.settle(Outcome::LookAgain);
                assert_eq!(wait(&ticket), None);
            })
        };
        looker.join().unwrap();
        sleeper.join().unwrap();
    });
}

/// A late leader and one who takes over both settle: the first wins, and the outcome never changes.
#[test]
fn settle_settle() {
    check("settle_settle", 2, FEW, || {
        let (flight, census) = (flight(), Census::default());
        let late = {
            let (flight, census) = (flight.clone(), census.clone());
            spawn(Participant::lasting, move || drop(flight.settle(Outcome::Value(census.value(7)))))
        };
        let taker = {
            let flight = flight.clone();
            spawn(Participant::lasting, move || assert!(flight.supersede(lease_end())))
        };
        let seen = || flight.outcome().map(|o| matches!(o, Outcome::Value(_)));
        let first = seen();
        late.join().unwrap();
        taker.join().unwrap();
        assert!(first.is_none() || first == seen(), "an outcome has changed");
        drop(flight);
        assert_eq!(census.count(), 0);
    });
}

/// The last of two leaves while a newcomer joins: it gets in before the end, or finds it closed.
#[test]
fn last_interest_newcomer() {
    check("last_interest_newcomer", 2, FEW, || {
        let flight = flight();
        let follower = join(&flight).expect("open");
        let ends = Figure::default();
        let leaver = {
            let (ends, flight) = (ends.clone(), flight.clone());
            spawn(Participant::lasting, move || {
                ends.add(usize::from(flight.leave(Who::Leader(Waits::AsThread)) == Left::Nobody))
            })
        };
        let newcomer = {
            let (ends, flight) = (ends.clone(), flight.clone());
            spawn(Participant::lasting, move || {
                let joined = flight.interest.join(Waits::AsThread);
                assert!(!joined || ends.get() == 0, "joined after the last had left");
                joined
            })
        };
        let own = follower.flight.leave(Who::Follower(Waits::AsThread));
        ends.add(usize::from(own == Left::Nobody));
        leaver.join().unwrap();
        let joined = newcomer.join().unwrap();
        assert_eq!(ends.get(), usize::from(!joined), "joined, and the last has left");
    });
}

/// One who waits as a thread until no task wants the flight any more, and then has to poll.
struct Heir<'a>(&'a TestFlight);

impl Waiter for Heir<'_> {
    type End = ();

    fn look(&mut self) -> Result<(), Moment> {
        if self.0.has_tasks() { Err(Moment::NEVER) } else { Ok(()) }
    }

    fn may_drive(&self) -> bool {
        false
    }

    fn drive(&mut self) {}

    fn due(&mut self) -> Option<()> {
        panic!("there is no limit");
    }
}

/// As whoever has a place goes: whether it was told that only threads are left.
fn leave(flight: &TestFlight, who: Who) -> bool {
    let left = flight.leave(who);
    assert_ne!(left, Left::Nobody, "others want it");
    if left == Left::Threads {
        flight.ring();
    }
    left == Left::Threads
}

/// Two tasks leave, one of them the leader, while a thread waits: one of them is told that only threads are left, and wakes.
#[test]
fn the_last_task_leaves_a_thread() {
    check("the_last_task_leaves_a_thread", 2, FEW, || {
        let flight = flight();
        flight.leader_is_task();
        assert!(flight.interest.join(Waits::AsTask) && flight.interest.join(Waits::AsThread));
        let tasks = [Who::Leader(Waits::AsTask), Who::Follower(Waits::AsTask)].map(|who| {
            let flight = flight.clone();
            spawn(Participant::lasting, move || leave(&flight, who))
        });
        park(flight.bell(), &time(), Heir(&flight));
        let told = tasks.map(|task| task.join().unwrap());
        assert_ne!(told[0], told[1], "one is told");
        assert_eq!(flight.leave(Who::Follower(Waits::AsThread)), Left::Nobody);
    });
}

/// A task leaves while another one comes and goes, and a thread is there all the time: all are counted, and the last task is told.
#[test]
fn a_task_leaves_while_one_joins() {
    check("a_task_leaves_while_one_joins", 2, FEW, || {
        let flight = flight();
        flight.leader_is_task();
        assert!(flight.interest.join(Waits::AsThread));
        let leaver = {
            let flight = flight.clone();
            spawn(Participant::lasting, move || leave(&flight, Who::Leader(Waits::AsTask)))
        };
        let joiner = {
            let flight = flight.clone();
            spawn(Participant::lasting, move || {
                assert!(flight.interest.join(Waits::AsTask), "a thread is there");
                leave(&flight, Who::Follower(Waits::AsTask))
            })
        };
        let told = [leaver, joiner].map(|task| usize::from(task.join().unwrap())).into_iter().sum::<usize>();
        assert!((1..=2).contains(&told), "nobody was told");
        assert!(!flight.has_tasks());
        assert_eq!(flight.leave(Who::Follower(Waits::AsThread)), Left::Nobody);
        assert!(!flight.interest.join(Waits::AsTask), "joined after the last had left");
    });
}

/// A leader closes while two join: it counts exactly those who got in, so that it settles for them.
#[test]
fn close_join() {
    check("close_join", 3, FEW, || {
        let flight = flight();
        let spawned: Vec<_> = (0..2)
            .map(|_| {
                let flight = flight.clone();
                spawn(Participant::lasting, move || flight.interest.join(Waits::AsThread))
            })
            .collect();
        let counted = flight.close();
        let joined = spawned.into_iter().map(|t| usize::from(t.join().unwrap())).sum::<usize>();
        assert_eq!(counted, joined);
    });
}

/// A queued load begins while two want to take it over: it runs, or it is taken.
#[test]
fn begin_supersede() {
    check("begin_supersede", 3, FEW, || {
        let flight = flight_of(None);
        let takers: Vec<_> = (0..2)
            .map(|_| {
                let flight = flight.clone();
                spawn(Participant::lasting, move || flight.supersede(now()))
            })
            .collect();
        let begun = flight.begin(lease_end());
        let taken: Vec<bool> = takers.into_iter().map(|t| t.join().unwrap()).collect();
        // A taker who meets the other's CAS looks again, as if the load had begun.
        assert_ne!(begun, taken.contains(&true), "begun and taken over, or neither");
    });
}

/// Two come and go, over the end of a chunk, while main looks at who is there: it reads nobody who has been freed, and
/// meets the one who stays.
fn registry_of(pins: Pins) {
    let (registry, census) = (Plain::new(Registry::new()), Census::default());
    let stays = registry.enter(Arc::new(census.value(1)));
    let spawned: Vec<_> = [2, 3]
        .into_iter()
        .map(|number| {
            let (registry, census) = (registry.clone(), census.clone());
            spawn(pins, move || {
                let seat = registry.enter(Arc::new(census.value(number)));
                if number == 2 {
                    registry.leave(seat, &pin());
                }
            })
        })
        .collect();
    pins().adopt();
    let guard = pin();
    let mut met = Vec::new();
    registry.each(&guard, |value: &Value| met.push(value.number()));
    drop(guard);
    assert_eq!(met.iter().filter(|number| **number == 1).count(), 1);
    spawned.into_iter().for_each(|t| t.join().unwrap());
    registry.leave(stays, &pin());
    drop(Plain::into_inner(registry).expect("all threads have ended"));
    assert_eq!(census.count(), 0);
}

#[test]
fn registry_each() {
    both("registry_each", 2, registry_of);
}

/// Two need the same new chunk, while main looks.
fn registry_chunk_of(pins: Pins) {
    let (registry, census) = (Plain::new(Registry::new()), Census::default());
    let stay = [1, 2].map(|number| registry.enter(Arc::new(census.value(number))));
    let spawned: Vec<_> = [3, 4]
        .into_iter()
        .map(|number| {
            let (registry, census) = (registry.clone(), census.clone());
            spawn(pins, move || registry.enter(Arc::new(census.value(number))))
        })
        .collect();
    pins().adopt();
    let mut met = Vec::new();
    registry.each(&pin(), |value: &Value| met.push(value.number()));
    assert_eq!(met[..2], [1, 2]);
    let seats: Vec<_> = spawned.into_iter().map(|t| t.join().unwrap()).collect();
    seats.into_iter().chain(stay).for_each(|seat| registry.leave(seat, &pin()));
    registry.each(&pin(), |_: &Value| panic!("all have left"));
    drop(Plain::into_inner(registry).expect("all threads have ended"));
    assert_eq!(census.count(), 0);
}

#[test]
fn registry_chunk() {
    both("registry_chunk", 2, registry_chunk_of);
}

/// One takes shares of all who are there, while another leaves: a share outlives the pin under which it was taken.
fn registry_shares_of(pins: Pins) {
    let (registry, census) = (Plain::new(Registry::new()), Census::default());
    let seats = [1, 2].map(|number| registry.enter(Arc::new(census.value(number))));
    let spawned: Vec<_> = seats
        .into_iter()
        .map(|seat| {
            let registry = registry.clone();
            spawn(pins, move || registry.leave(seat, &pin()))
        })
        .collect();
    pins().adopt();
    let shares = registry.shares(&pin(), |_| true);
    shares.iter().for_each(|share| assert!(share.number() > 0));
    drop(shares);
    spawned.into_iter().for_each(|t| t.join().unwrap());
    drop(Plain::into_inner(registry).expect("all threads have ended"));
    assert_eq!(census.count(), 0);
}

#[test]
fn registry_shares() {
    both("registry_shares", 2, registry_shares_of);
}

fn id(n: usize) -> cycle::FlightId {
    cycle::FlightId::new(n)
}

/// Threads close a cycle at the same time: at least one of them sees it.
fn cycle_of(pins: Pins, length: usize) {
    let (graph, name) = (Plain::new(Graph::new()), Plain::<str>::from("c"));
    let spawned: Vec<_> = (0..length)
        .map(|n| {
            let (graph, name) = (graph.clone(), name.clone());
            spawn(pins, move || {
                // Different first seats: else they would meet there, and be ordered by it.
                set_number(n);
                let loading = Loading::enter(&graph, id(n), &name);
                let wait = graph.wait_for(id((n + 1) % length), &name);
                let seen = wait.is_err();
                // One who has seen no cycle waits for ever, so that his edge stays.
                std::mem::forget(wait);
                drop(loading);
                seen
            })
        })
        .collect();
    let seen = spawned.into_iter().map(|t| t.join().unwrap()).filter(|seen| *seen).count();
    assert!(seen > 0, "nobody has seen the cycle");
}

#[test]
fn cycle_of_two() {
    check("cycle_of_two", 3, FEW, || cycle_of(Participant::lasting, 2));
}

#[test]
fn cycle_of_three() {
    check("cycle_of_three", 2, FEW, || cycle_of(Participant::lasting, 3));
}

/// One thread waits for another that leads a load from within its own: the edge of the nested load counts.
#[test]
fn cycle_by_nested_load() {
    check("cycle_by_nested_load", 3, FEW, || {
        let (graph, name) = (Plain::new(Graph::new()), Plain::<str>::from("c"));
        let outer = {
            let (graph, name) = (graph.clone(), name.clone());
            spawn(Participant::lasting, move || {
                set_number(0);
                let one = Loading::enter(&graph, id(1), &name);
                let two = Loading::enter(&graph, id(2), &name);
                let wait = graph.wait_for(id(3), &name);
                let seen = wait.is_err();
                std::mem::forget((one, two, wait));
                seen
            })
        };
        let other = {
            let (graph, name) = (graph.clone(), name.clone());
            spawn(Participant::lasting, move || {
                set_number(1);
                let three = Loading::enter(&graph, id(3), &name);
                let wait = graph.wait_for(id(1), &name);
                let seen = wait.is_err();
                std::mem::forget((three, wait));
                seen
            })
        };
        let seen = [outer, other].map(|t| t.join().unwrap());
        assert!(seen.contains(&true), "nobody has seen the cycle");
    });
}

/// Edges that would make a cycle, but never exist at one time: nobody reports one.
#[test]
fn no_cycle_of_edges_that_never_met() {
    both("no_cycle_of_edges_that_never_met", 3, |pins| {
        let (graph, name) = (Plain::new(Graph::new()), Plain::<str>::from("c"));
        let mover = {
            let (graph, name) = (graph.clone(), name.clone());
            spawn(pins, move || {
                set_number(1);
                let two = Loading::enter(&graph, id(2), &name);
                drop(graph.wait_for(id(3), &name).expect("3 leads nowhere"));
                drop(two);
                // The edge of the nested load takes the seat that has become free, so that the next one has a later seat.
                let _nine = Loading::enter(&graph, id(9), &name);
                let _three = Loading::enter(&graph, id(3), &name);
                drop(graph.wait_for(id(1), &name).expect("2 leads nowhere any more"));
            })
        };
        let walker = {
            let (graph, name) = (graph.clone(), name.clone());
            spawn(pins, move || {
                set_number(0);
                let _one = Loading::enter(&graph, id(1), &name);
                drop(graph.wait_for(id(2), &name).expect("2 never leads to 1"));
            })
        };
        mover.join().unwrap();
        walker.join().unwrap();
    });
}
