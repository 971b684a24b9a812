//! What must hold of the figures, at small scale.

use crate::chart;
use crate::options::Options;
use crate::policy::{Origin, Policy};
use crate::report::Findings;
use crate::simulate::{Figures, Run, run};
use crate::source::{Source, TIME_OUT};
use crate::traffic::Traffic;
use crate::world::{TICK, World};
use parking_lot::Mutex;
use quell::BoxFuture;
use serde_json::Value;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

fn options() -> Options {
    Options { seconds: 30, rate: 200, keys: 200, ttl: 4, servers: 32, ..Options::default() }
}

fn simulated(policy: Policy, options: &Options) -> Run {
    run(policy, options, || ()).expect("no task waits for nothing")
}

/// Every policy under the same options, simulated once for all tests.
fn findings() -> &'static Findings {
    static FINDINGS: LazyLock<Findings> = LazyLock::new(|| {
        let runs = Policy::ALL.map(|policy| simulated(policy, &options())).into();
        Findings { runs }
    });
    &FINDINGS
}

fn figures(policy: Policy) -> &'static Figures {
    let run = findings().runs.iter().find(|run| run.policy == policy);
    &run.expect("every policy has its run").figures
}

#[test]
fn every_call_is_answered_or_has_an_error() {
    for policy in Policy::ALL {
        let got = figures(policy);
        assert!(got.calls > 5_500, "{got:?}");
        assert_eq!(got.calls, got.answers + got.errors, "{got:?}");
        assert!(
            got.hard_misses < got.calls && got.stale_answers + got.grace_answers < got.answers,
            "{got:?}"
        );
        // Whoever waits has waited for one load at most, his own or another's.
        assert!(got.max_wait_ms <= TIME_OUT.as_secs_f64() * 1e3 + 1e-6, "{got:?}");
    }
}

#[test]
fn a_call_that_is_refused_at_once_is_an_error_too() {
    let overloaded = Options { servers: 1, seconds: 10, ..options() };
    let got = simulated(Policy::AllTogether, &overloaded).figures;
    assert!(got.errors > 0 && got.calls == got.answers + got.errors, "{got:?}");
}

#[test]
fn all_policies_meet_the_same_calls() {
    let calls = Policy::ALL.map(|policy| figures(policy).calls);
    assert!(calls.iter().all(|n| *n == calls[0]), "{calls:?}");
}

#[test]
fn single_flight_is_one_load_of_a_key_at_a_time() {
    let (plain, single) = (figures(Policy::PlainTtl), figures(Policy::SingleFlight));
    assert!(plain.most_concurrent_loads_of_one_key > 10, "{plain:?}");
    for policy in &Policy::ALL[2..] {
        assert_eq!(figures(*policy).most_concurrent_loads_of_one_key, 1, "{policy:?}");
    }
    assert!(plain.loads > single.loads, "{} and {}", plain.loads, single.loads);
    assert!(plain.most_concurrent_loads > single.most_concurrent_loads, "{plain:?} {single:?}");
    // Every hard miss of a plain cache is a load of its own.
    assert_eq!(plain.hard_misses, plain.loads);
    assert!(single.hard_misses > single.loads, "{single:?}");
}

#[test]
fn what_the_seed_decides_is_the_same_again() {
    for policy in Policy::ALL.into_iter().filter(|policy| policy.is_reproducible()) {
        let first = findings().runs.iter().find(|run| run.policy == policy);
        let first = first.expect("every policy has its run");
        assert_eq!(*first, simulated(policy, &options()));
        let other = simulated(policy, &Options { seed: 2, ..options() });
        assert_ne!(first.figures, other.figures);
    }
}

#[test]
fn each_policy_serves_what_it_may() {
    let ttl_ms = options().ttl().as_secs_f64() * 1e3;
    for policy in Policy::ALL {
        let got = figures(policy);
        let (soft, grace) = (got.stale_answers > 0, got.grace_answers > 0);
        assert_eq!(soft, matches!(policy, Policy::SoftTtl | Policy::AllTogether), "{got:?}");
        assert_eq!(grace, policy == Policy::AllTogether, "{got:?}");
        assert!(grace || got.p99_age_ms <= ttl_ms, "{got:?}");
    }
}

#[test]
fn ages_are_the_time_since_the_row_was_read() {
    for policy in Policy::ALL {
        let (options, world) = (options(), World::new());
        let source = Source::new(&world, &options);
        let front = Arc::new(policy.build(&world, &source, &options));
        let off = Arc::new(Mutex::new(Vec::new()));
        let mut traffic = Traffic::new(&options);
        let left = world.run(|| {
            let (at, key) = traffic.next()?;
            let (world, front, off) = (world.clone(), front.clone(), off.clone());
            let call: BoxFuture = Box::pin(async move {
                if let Ok(answer) = front.ask(&world, key).await {
                    let age = world.now() - answer.row.read;
                    off.lock().push((answer.age.abs_diff(age), answer));
                }
            });
            Some((at, call))
        });
        assert_eq!(left, 0);
        for (off, answer) in off.lock().iter() {
            // The cache's clock and its times are rounded.
            let slack = if answer.origin == Origin::Loaded { Duration::ZERO } else { TICK * 11 / 10 };
            assert!(*off <= slack, "{policy:?} {off:?} {answer:?}");
        }
    }
}

#[test]
fn hot_keys_that_are_kept_warm_are_no_hard_misses() {
    let (single, warm) = (figures(Policy::SingleFlight), figures(Policy::KeepWarm));
    assert!(warm.hard_misses * 10 < single.hard_misses * 9, "{warm:?} {single:?}");
}

#[test]
fn table_json_and_chart_say_what_was_found() {
    let options = options();
    let findings = findings();

    let table = findings.table(&options);
    for line in table.lines() {
        assert!(line.chars().count() <= 120, "{line}");
    }
    let json: Value = serde_json::from_str(&findings.json(&options).expect("JSON")).expect("valid JSON");
    assert_eq!(json["parameters"]["servers"], 32);
    assert_eq!(json["parameters"]["outage_from_s"], 15.0);
    let svg = chart::draw(findings, &options).expect("a chart");
    for (policy, nth) in Policy::ALL.into_iter().zip(0..) {
        assert!(table.lines().any(|line| line.starts_with(policy.name()) && line.contains('│')), "{table}");
        assert_eq!(json["policies"][nth]["policy"], policy.name());
        assert_eq!(json["policies"][nth]["loads"], findings.runs[nth].figures.loads);
        assert!(svg.contains(policy.name()));
    }
}
