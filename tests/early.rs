//! Early refresh, against the closed forms of its source (Vattani, Chierichetti and Lowenstein, PVLDB 8(8), 2015).
//!
//! ```text
//! cargo test --test early
//! ```
//! Readers come as a Poisson process of rate `lambda`, loads take `delta`, and `s = beta * delta`. Bounds are five standard
//! errors wide, and the seeds are fixed but for the cache's own dice.
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "tests use real threads")]

mod common;

use common::tasks::{Kept, Task};
use common::{Gate, Random, Sut, Tally, eventually, ms, plain, secs};
use quell::{Cache, EarlyRefresh, Job, LoadCause, LoadContext, Loaded, ManualClock, Provenance, Rejected};
use std::f64::consts::PI;
use std::fmt::Error;
use std::thread;
use std::time::Duration;

const TTL: Duration = secs(60);
/// Euler's constant.
const GAMMA: f64 = 0.577_215_664_9;

/// A cache whose loads take `delta` by its clock. The refreshes that its readers start are counted and never run: so each read
/// fires on its own.
fn uncoordinated(early: EarlyRefresh, delta: Duration) -> (Sut<u32, u32>, ManualClock, Tally) {
    let (clock, fired) = (ManualClock::new(), Tally::default());
    let refuse = {
        let fired = fired.clone();
        move |_: Job| {
            fired.add();
            Err(Rejected)
        }
    };
    let cache =
        plain::<u32, u32>().time_to_live(TTL).early_refresh(early).clock(clock.clone()).executor(refuse);
    let cache = {
        let clock = clock.clone();
        cache.loader(move |_: &u32| {
            clock.advance(delta);
            Ok::<_, Error>(1)
        })
    };
    (cache.build(), clock, fired)
}

/// A new value whose load has taken its usual time.
fn reload(cache: &Sut<u32, u32>) {
    cache.invalidate(&1);
    cache.get_or_load(&1).unwrap();
}

/// From (0, 1].
fn unit(random: &mut Random) -> f64 {
    1.0 - random.below(1 << 30) as f64 / f64::from(1 << 30)
}

#[test]
fn a_read_fires_with_the_probability_of_xfetch() {
    for (beta, left) in [(1.0, 50), (1.0, 100), (1.0, 300), (2.0, 200), (0.5, 100)] {
        let (cache, clock, fired) = uncoordinated(EarlyRefresh::beta(beta), ms(100));
        const TRIALS: u32 = 4_000;
        for _ in 0..TRIALS {
            reload(&cache);
            clock.advance(TTL - ms(left));
            assert_eq!(cache.get_or_load(&1).unwrap(), 1);
        }
        let p = (-(left as f64) / (beta * 100.0)).exp();
        let (expected, error) = (p * f64::from(TRIALS), (f64::from(TRIALS) * p * (1.0 - p)).sqrt());
        let seen = fired.get() as f64;
        assert!(
            (seen - expected).abs() < 5.0 * error,
            "beta {beta}, {left} ms left: {seen} fired, {expected} expected"
        );
    }
}

/// What a life of the value came to.
struct Life {
    /// How long before its soft deadline the first read fired, in seconds.
    lead: Option<f64>,
    /// How many fired within one load of the first.
    fires: usize,
}

/// Reads as a Poisson process, from `from` before the soft deadline on.
fn life(
    cache: &Sut<u32, u32>,
    clock: &ManualClock,
    fired: &Tally,
    lambda: f64,
    from: f64,
    random: &mut Random,
) -> Life {
    reload(cache);
    clock.advance(TTL - Duration::from_secs_f64(from));
    let (before, mut left) = (fired.get(), from);
    let mut life = Life { lead: None, fires: 0 };
    loop {
        let step = -unit(random).ln() / lambda;
        left -= step;
        if left <= 0.0 || life.lead.is_some_and(|lead| left < lead - 0.1) {
            life.fires = fired.get() - before;
            return life;
        }
        clock.advance(Duration::from_secs_f64(step));
        assert_eq!(cache.get_or_load(&1).unwrap(), 1);
        if life.lead.is_none() && fired.get() > before {
            life.lead = Some(left);
        }
    }
}

#[test]
fn the_first_fire_and_the_crowd_after_it_are_those_of_the_closed_forms() {
    let mut random = Random(7);
    for (beta, lambda) in [(1.0, 1_000.0), (2.0, 300.0), (0.7, 1_000.0)] {
        let (cache, clock, fired) = uncoordinated(EarlyRefresh::beta(beta), ms(100));
        let s = beta * 0.1;
        const LIVES: usize = 250;
        let from = s * (f64::ln(lambda * s) + 12.0);
        let lives: Vec<Life> =
            (0..LIVES).map(|_| life(&cache, &clock, &fired, lambda, from, &mut random)).collect();
        let mean = |of: &dyn Fn(&Life) -> f64| lives.iter().map(of).sum::<f64>() / LIVES as f64;
        let lead = mean(&|life| life.lead.expect("somebody fires at such a rate"));
        let expected = s * (f64::ln(lambda * s) + GAMMA);
        // The lead follows a Gumbel distribution.
        let error = s * PI / 6_f64.sqrt() / (LIVES as f64).sqrt();
        assert!((lead - expected).abs() < 5.0 * error, "beta {beta}: lead {lead}, {expected} expected");
        let fires = mean(&|life| life.fires as f64);
        let expected = (1.0 / beta).exp();
        // One, and a Poisson number whose mean is exponential with mean `e^(1/beta) - 1`.
        let more = expected - 1.0;
        let error = (more + more * more).sqrt() / (LIVES as f64).sqrt();
        assert!((fires - expected).abs() < 5.0 * error, "beta {beta}: {fires} fires, {expected} expected");
    }
}

#[test]
fn nobody_fires_with_the_probability_of_the_closed_form() {
    let mut random = Random(11);
    for (beta, lambda) in [(1.0, 10.0), (1.0, 20.0), (0.5, 10.0)] {
        let (cache, clock, fired) = uncoordinated(EarlyRefresh::beta(beta), ms(100));
        const LIVES: usize = 2_000;
        let quiet = (0..LIVES)
            .filter(|_| life(&cache, &clock, &fired, lambda, beta * 4.0, &mut random).lead.is_none());
        let quiet = quiet.count() as f64;
        let p = (-lambda * beta * 0.1).exp();
        let (expected, error) = (p * LIVES as f64, (LIVES as f64 * p * (1.0 - p)).sqrt());
        assert!(
            (quiet - expected).abs() < 5.0 * error,
            "beta {beta}, lambda {lambda}: {quiet}, {expected} expected"
        );
    }
}

#[test]
fn beta_follows_the_rate_of_reads_for_a_miss_probability() {
    let mut random = Random(13);
    for (p, lambda, delta) in [(0.05, 50.0, 100), (0.05, 5.0, 100), (0.2, 50.0, 1)] {
        let (cache, clock, fired) = uncoordinated(EarlyRefresh::miss_probability(p), ms(delta));
        const LIVES: usize = 600;
        let lives = (0..LIVES).map(|_| life(&cache, &clock, &fired, lambda, 30.0, &mut random));
        let leads: Vec<Option<f64>> = lives.map(|life| life.lead).collect();
        let quiet = leads.iter().filter(|lead| lead.is_none()).count() as f64 / LIVES as f64;
        // The rate is measured from few reads, some of which are noted.
        assert!((p / 4.0..3.0 * p).contains(&quiet), "p {p}, lambda {lambda}: {quiet} went stale unseen");
        let lead = leads.iter().flatten().sum::<f64>() / leads.iter().flatten().count() as f64;
        let scale = -p.ln() / lambda;
        assert!(lead < 8.0 * scale, "no earlier than it must be: {lead} with a scale of {scale}");
    }
}

#[test]
fn nothing_fires_in_the_first_half_of_a_life() {
    // The load takes so long that nearly every read would fire.
    let (cache, clock, fired) = uncoordinated(EarlyRefresh::beta(1_000.0), secs(50));
    reload(&cache);
    for _ in 0..29 {
        clock.advance(secs(1));
        assert_eq!(cache.get_or_load(&1).unwrap(), 1);
    }
    assert_eq!(fired.get(), 0);
    clock.advance(secs(2));
    for _ in 0..50 {
        assert_eq!(cache.get_or_load(&1).unwrap(), 1);
    }
    assert!(fired.get() > 40);
}

/// The part of a thousand keys that one read each refreshes, with two seconds left of a life, and a load that takes one.
fn part(set: impl FnOnce(common::Builder<u32, u32>) -> common::Builder<u32, u32>, loader: bool) -> f64 {
    let (clock, fired) = (ManualClock::new(), Tally::default());
    let mut builder = plain::<u32, u32>().time_to_live(secs(100)).clock(clock.clone()).executor({
        let fired = fired.clone();
        move |_: Job| {
            fired.add();
            Err(Rejected)
        }
    });
    if loader {
        builder = builder.loader(|_: &u32| Ok::<_, Error>(1));
    }
    let cache = set(builder).build();
    const KEYS: u32 = 1_000;
    for k in 0..KEYS {
        cache.get_with(&k, || {
            clock.advance(secs(1));
            1
        });
        clock.advance(secs(97));
        assert_eq!(cache.get_or_load(&k).unwrap(), 1);
    }
    fired.get() as f64 / f64::from(KEYS)
}

#[test]
fn the_default_is_beta_one_with_a_loader_and_without_a_soft_ttl() {
    let p = (-3_f64).exp();
    let default = part(|builder| builder, true);
    assert!((p / 2.0..2.0 * p).contains(&default), "{default}");
    assert_eq!(part(|builder| builder.early_refresh(EarlyRefresh::off()), true), 0.0);
    assert_eq!(part(|builder| builder.soft_ttl(secs(100)), true), 0.0);
    let given = part(|builder| builder.soft_ttl(secs(100)).early_refresh(EarlyRefresh::beta(1.0)), true);
    assert!((p / 2.0..2.0 * p).contains(&given), "{given}");
}

#[test]
fn who_fires_leads_and_everybody_else_is_served() {
    let (clock, gate) = (ManualClock::new(), Gate::default());
    let cache = plain::<u32, u32>()
        .time_to_live(secs(100))
        .early_refresh(EarlyRefresh::beta(1e9))
        .clock(clock.clone())
        .build();
    let took = || {
        clock.advance(secs(1));
        1
    };
    assert_eq!(cache.get_with(&1, took), 1);
    clock.advance(secs(60));
    let cache = &cache;
    thread::scope(|s| {
        let gate_of_leader = gate.clone();
        let leader = s.spawn(move || {
            let load = || {
                gate_of_leader.pass();
                2
            };
            cache.ask(&1).load_with(load).unwrap()
        });
        eventually(|| gate.arrived() == 1);
        for _ in 0..100 {
            let answer = cache.ask(&1).load_with(|| unreachable!("somebody loads it")).unwrap();
            assert!(matches!((answer.value, answer.provenance), (1, Provenance::Fresh { .. })));
        }
        gate.open();
        let answer = leader.join().unwrap();
        assert!(matches!((answer.value, answer.provenance), (2, Provenance::Loaded { .. })));
    });
    let stats = cache.stats();
    assert_eq!((stats.early_refreshes, stats.loads, stats.misses), (1, 2, 1));
}

#[test]
fn a_load_is_told_that_it_is_early_and_a_failure_keeps_the_fresh_value() {
    struct Tells;
    impl quell::Loader<u32, LoadCause> for Tells {
        fn load(&self, _: &u32, cx: &LoadContext<LoadCause>) -> Result<Loaded<LoadCause>, quell::BoxError> {
            if cx.previous() == Some(&LoadCause::Early) {
                Err("once is enough".into())
            } else {
                Ok(Loaded::new(cx.cause()))
            }
        }
    }
    let clock = ManualClock::new();
    let cache = Cache::builder()
        .time_to_live(secs(100))
        .early_refresh(EarlyRefresh::beta(1e12))
        .clock(clock.clone())
        .executor(|job: Job| {
            job.run();
            Ok(())
        })
        .loader(Tells)
        .build();
    assert_eq!(cache.get_or_load(&1).unwrap(), LoadCause::Miss);
    clock.advance(secs(60));
    assert_eq!(cache.get_or_load(&1).unwrap(), LoadCause::Miss);
    assert_eq!(cache.get_or_load(&1).unwrap(), LoadCause::Early);
    clock.advance(secs(60));
    for _ in 0..10 {
        assert_eq!(cache.get_or_load(&1).unwrap(), LoadCause::Early);
    }
    assert_eq!((cache.stats().loads, cache.stats().load_failures), (3, 1), "a refresh that failed pauses");
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    for early in [
        EarlyRefresh::beta(0.0),
        EarlyRefresh::beta(-1.0),
        EarlyRefresh::beta(f64::NAN),
        EarlyRefresh::beta(f64::INFINITY),
        EarlyRefresh::miss_probability(0.0),
        EarlyRefresh::miss_probability(1.0),
    ] {
        let error = Cache::<u32, u32>::builder().early_refresh(early).try_build().unwrap_err();
        assert!(error.to_string().contains("early_refresh"), "{error}");
    }
}

#[test]
fn cheap_loads_of_other_keys_do_not_keep_a_dear_one_from_firing() {
    let (clock, fired) = (ManualClock::new(), Tally::default());
    let cache = {
        let fired = fired.clone();
        plain::<u32, u32>()
            .time_to_live(TTL)
            .early_refresh(EarlyRefresh::beta(1.0))
            .clock(clock.clone())
            .executor(move |_: Job| {
                fired.add();
                Err(Rejected)
            })
    };
    let cache = cache.loader(|_: &u32| Ok::<_, Error>(1)).build();
    for _ in 0..2 {
        cache.invalidate(&1);
        cache.get_with(&1, || {
            clock.advance(secs(1));
            1
        });
        // Each of the others lives for as long, and is loaded in no time.
        for _ in 0..8_000 {
            clock.advance(ms(5));
            cache.invalidate(&2);
            assert_eq!(cache.get_or_load(&2).unwrap(), 1);
        }
        clock.advance(TTL - secs(2) - ms(5) * 8_000);
        let before = fired.get();
        for _ in 0..100 {
            assert_eq!(cache.get_or_load(&1).unwrap(), 1);
        }
        let fires = fired.get() - before;
        assert!(fires > 1, "13 of 100 reads are expected to fire with twice its cost left, and {fires} did");
        clock.advance(secs(2));
    }
}

#[test]
fn the_rate_of_reads_is_that_of_the_value_that_is_there() {
    let (p, lambda) = (0.05, 50.0);
    let (cache, clock, fired) = uncoordinated(EarlyRefresh::miss_probability(p), ms(100));
    let mut random = Random(17);
    reload(&cache);
    const LIVES: usize = 100;
    let mut quiet = 0;
    for _ in 0..LIVES {
        // Written by hand in time, all its life.
        cache.insert(1, 1);
        clock.advance(TTL / 2);
        let (before, mut left) = (fired.get(), TTL.as_secs_f64() / 2.0);
        loop {
            let step = -unit(&mut random).ln() / lambda;
            left -= step;
            if left <= 0.0 || fired.get() > before {
                break;
            }
            clock.advance(Duration::from_secs_f64(step));
            assert_eq!(cache.get_or_load(&1).unwrap(), 1);
        }
        quiet += usize::from(fired.get() == before);
    }
    let quiet = quiet as f64 / LIVES as f64;
    assert!(quiet < 6.0 * p, "{quiet} went stale unseen");
}

#[test]
fn warming_throws_no_dice() {
    let (clock, fired) = (ManualClock::new(), Tally::default());
    let cache =
        plain::<u32, u32>().time_to_live(TTL).early_refresh(EarlyRefresh::beta(1e12)).clock(clock.clone());
    let cache = {
        let (clock, fired) = (clock.clone(), fired.clone());
        cache.loader(move |_: &u32| {
            fired.add();
            clock.advance(ms(1));
            Ok::<_, Error>(1)
        })
    };
    let cache = cache.build();
    assert_eq!(cache.get_or_load(&1).unwrap(), 1);
    clock.advance(TTL * 3 / 4);
    let report = cache.warm([1], quell::WarmOptions::new());
    assert!(matches!(report.outcomes[&1], quell::WarmOutcome::Fresh));
    assert_eq!((fired.get(), cache.stats().early_refreshes), (1, 0));
}

#[test]
fn a_load_takes_from_its_first_poll_on() {
    let (clock, spawned) = (ManualClock::new(), Kept::default());
    let cache = plain::<u32, u32>().clock(clock.clone()).spawner(spawned.clone()).build();
    let load = {
        let clock = clock.clone();
        async move {
            clock.advance(ms(100));
            1
        }
    };
    let mut caller = Task::new(cache.ask(&1).load_with_async(load));
    assert!(!caller.poll());
    clock.advance(secs(5));
    assert_eq!(spawned.run(), 1);
    let answer = caller.finish().unwrap();
    assert_eq!(answer.provenance, Provenance::Loaded { took: ms(100) }, "its task had to wait for its turn");
}
