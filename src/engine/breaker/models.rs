//! Models of the breaker's word and its windows.
//!
//! | model | red when |
//! |---|---|
//! | `one_of_all_who_ask_probes` | a probe is taken without a CAS |
//! | `a_success_meets_failures` | a failure moves the word without a CAS; what was counted is not forgotten, or not before it closes |
//! | `what_was_judged_before_it_closed_opens_nothing` | a word that is closed again is the word that it was before |
//! | `a_probe_is_given_back_once` | it is given back without a look at whose it is |

use super::*;
use crate::primitive::model::{FEW, check};
use loom::sync::Arc;
use loom::thread;

fn at(secs: u64) -> Moment {
    Moment::from_nanos(0).plus(Duration::from_secs(secs))
}

const LEASE: Duration = Duration::from_secs(30);

/// Three loads of which all fail open it, for a second.
fn circuit() -> Arc<Circuit> {
    Arc::new(Circuit::new(Breaker::new(1.0).min_loads(3).pause(Duration::from_secs(1))))
}

/// One that was opened in the ninth second, by three failures of the first window.
fn opened() -> Arc<Circuit> {
    let circuit = circuit();
    let opened = [(); 3].map(|()| circuit.ended(Verdict::Failure, None, at(9)));
    assert_eq!(opened, [false, false, true]);
    circuit
}

fn spawn<R: 'static>(of: &Arc<Circuit>, body: impl FnOnce(&Circuit) -> R + 'static) -> thread::JoinHandle<R> {
    let circuit = of.clone();
    thread::spawn(move || body(&circuit))
}

#[test]
fn one_of_all_who_ask_probes() {
    check("one of all who ask probes", 3, FEW, || {
        let circuit = opened();
        let ask = |circuit: &Circuit| circuit.ask(|| at(10), LEASE);
        let others = [(); 2].map(|()| spawn(&circuit, ask));
        let mine = ask(&circuit);
        let all = others.map(|other| other.join().unwrap());
        let probes = all.iter().chain([&mine]).filter(|says| **says == Says::Probe(at(40))).count();
        let waits = all.iter().chain([&mine]).filter(|says| **says == Says::Wait(LEASE)).count();
        assert_eq!((probes, waits), (1, 2));
    });
}

#[test]
fn a_success_meets_failures() {
    check("a success meets failures", 3, FEW, || {
        let circuit = opened();
        // In the window after, of which the first one counts for nine tenths.
        let fails = |circuit: &Circuit| circuit.ended(Verdict::Failure, None, at(11));
        let others = [(); 2].map(|()| spawn(&circuit, fails));
        assert!(!circuit.ended(Verdict::Success, None, at(11)));
        let opened = others.map(|other| other.join().unwrap());
        assert_eq!((opened, circuit.is_open()), ([false, false], false), "two failures are too few");
    });
}

#[test]
fn what_was_judged_before_it_closed_opens_nothing() {
    check("what was judged before it closed opens nothing", 3, FEW, || {
        let circuit = circuit();
        let fails = |circuit: &Circuit| circuit.ended(Verdict::Failure, None, at(9));
        assert!(!fails(&circuit) && !fails(&circuit));
        let others = [(); 2].map(|()| spawn(&circuit, fails));
        assert!(!circuit.ended(Verdict::Success, None, at(9)));
        let opened = others.map(|other| other.join().unwrap());
        assert_ne!(opened, [true, true], "once it has closed, one failure is too few");
    });
}

#[test]
fn a_probe_is_given_back_once() {
    check("a probe is given back once", 3, FEW, || {
        let circuit = opened();
        let Says::Probe(probe) = circuit.ask(|| at(10), LEASE) else { panic!("the pause has passed") };
        let gives = spawn(&circuit, move |circuit| circuit.give_back(probe, at(20)));
        let fails = spawn(&circuit, |circuit| circuit.ended(Verdict::Failure, None, at(40)));
        let asks = circuit.ask(|| at(40), LEASE);
        gives.join().unwrap();
        assert!(!fails.join().unwrap());
        // Whoever has won it since keeps it.
        let again = circuit.ask(|| at(41), LEASE);
        match asks {
            Says::Probe(_) => assert!(matches!(again, Says::Wait(_)), "{again:?}"),
            _ => assert_eq!(again, Says::Probe(at(71))),
        }
        assert!(circuit.is_open());
    });
}
