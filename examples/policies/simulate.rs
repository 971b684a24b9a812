//! One policy under the traffic, and what became of it.

use crate::latency::percentile;
use crate::options::Options;
use crate::policy::{Answer, Origin, Policy};
use crate::source::{Log, SHARES, Source};
use crate::traffic::Traffic;
use crate::world::World;
use parking_lot::Mutex;
use quell::{BoxError, BoxFuture};
use serde::Serialize;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// What became of the calls, and of the source.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Figures {
    pub(crate) policy: &'static str,
    /// Whether the same seed gives the same figures.
    pub(crate) reproducible: bool,
    pub(crate) calls: u64,
    pub(crate) answers: u64,
    pub(crate) errors: u64,
    /// Counted from the end of the outage; zero if there is none after it.
    pub(crate) last_error_after_outage_s: f64,
    /// Answers after the soft TTL, and after the TTL.
    pub(crate) stale_answers: u64,
    pub(crate) grace_answers: u64,
    /// Calls that loaded, or waited for a load.
    pub(crate) hard_misses: u64,
    /// Of the calls between the cold start and the outage.
    pub(crate) p99_wait_before_outage_ms: f64,
    pub(crate) p99_wait_ms: f64,
    pub(crate) max_wait_ms: f64,
    pub(crate) mean_age_ms: f64,
    pub(crate) p99_age_ms: f64,
    pub(crate) loads: u64,
    pub(crate) most_concurrent_loads: u32,
    /// Between the cold start and the outage.
    pub(crate) most_concurrent_loads_before_outage: u32,
    pub(crate) most_concurrent_loads_of_one_key: u32,
}

/// A policy's figures, and the most loads at one time in each share of the time.
#[derive(Debug, PartialEq)]
pub(crate) struct Run {
    pub(crate) policy: Policy,
    pub(crate) figures: Figures,
    pub(crate) most_loads: Vec<u32>,
}

/// `second` is called after each second of the simulated time in which something was asked.
pub(crate) fn run(policy: Policy, options: &Options, second: impl Fn()) -> Result<Run, crate::Error> {
    let world = World::new();
    let source = Source::new(&world, options);
    let front = Arc::new(policy.build(&world, &source, options));
    let tally = Arc::new(Mutex::new(Tally { peace: options.peace(), ..Tally::default() }));

    let (mut traffic, mut seconds) = (Traffic::new(options), 0);
    let left = world.run(|| {
        let (at, key) = traffic.next()?;
        if at.as_secs() > seconds {
            seconds = at.as_secs();
            second();
        }
        let (world, front, tally) = (world.clone(), front.clone(), tally.clone());
        let call: BoxFuture = Box::pin(async move {
            let answer = front.ask(&world, key).await;
            tally.lock().note(world.now(), at, &answer);
        });
        Some((at, call))
    });
    if left > 0 {
        return Err(format!("{}: {left} tasks wait for nothing", policy.name()).into());
    }
    let (tally, log) = (std::mem::take(&mut *tally.lock()), source.take_log());
    Ok(Run { policy, figures: tally.figures(policy, options, &log), most_loads: log.most })
}

/// What is noted of the calls while they are answered.
#[derive(Default)]
struct Tally {
    peace: Range<Duration>,
    waits: Waits,
    waits_in_peace: Waits,
    ages: Vec<Duration>,
    errors: u64,
    last_error: Duration,
    stale: u64,
    grace: u64,
}

/// How long calls have waited.
#[derive(Default)]
struct Waits {
    at_once: usize,
    /// Of those that were not answered at once.
    waited: Vec<Duration>,
}

impl Waits {
    fn note(&mut self, waited: Duration) {
        match waited {
            Duration::ZERO => self.at_once += 1,
            waited => self.waited.push(waited),
        }
    }

    /// All of them, the shortest first.
    fn ascending(mut self) -> Vec<Duration> {
        self.waited.resize(self.waited.len() + self.at_once, Duration::ZERO);
        self.waited.sort_unstable();
        self.waited
    }
}

impl Tally {
    fn note(&mut self, now: Duration, asked: Duration, answer: &Result<Answer, BoxError>) {
        self.waits.note(now - asked);
        if self.peace.contains(&asked) {
            self.waits_in_peace.note(now - asked);
        }
        match answer {
            Ok(answer) => {
                self.ages.push(answer.age);
                self.stale += u64::from(answer.origin == Origin::Stale);
                self.grace += u64::from(answer.origin == Origin::Grace);
            }
            Err(_) => {
                self.errors += 1;
                self.last_error = now;
            }
        }
    }

    fn figures(mut self, policy: Policy, options: &Options, log: &Log) -> Figures {
        let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
        let (hard_misses, answers) = (self.waits.waited.len() as u64, self.ages.len() as u64);
        let all_ages = self.ages.iter().sum::<Duration>();
        self.ages.sort_unstable();
        let (waits, waits_in_peace) = (self.waits.ascending(), self.waits_in_peace.ascending());
        let most = |time: Range<Duration>| {
            let share = |at: Duration| (at.div_duration_f64(options.length()) * f64::from(SHARES)) as usize;
            let shares = log.most.get(share(time.start)..share(time.end));
            shares.unwrap_or_default().iter().copied().max().unwrap_or(0)
        };
        Figures {
            policy: policy.name(),
            reproducible: policy.is_reproducible(),
            calls: waits.len() as u64,
            answers,
            errors: self.errors,
            last_error_after_outage_s: self.last_error.saturating_sub(options.outage().end).as_secs_f64(),
            stale_answers: self.stale,
            grace_answers: self.grace,
            hard_misses,
            p99_wait_before_outage_ms: ms(percentile(&waits_in_peace, 99.0)),
            p99_wait_ms: ms(percentile(&waits, 99.0)),
            max_wait_ms: ms(percentile(&waits, 100.0)),
            mean_age_ms: ms(all_ages) / (answers.max(1) as f64),
            p99_age_ms: ms(percentile(&self.ages, 99.0)),
            loads: log.loads,
            most_concurrent_loads: most(Duration::ZERO..options.length()),
            most_concurrent_loads_before_outage: most(options.peace()),
            most_concurrent_loads_of_one_key: log.most_of_one_key,
        }
    }
}
