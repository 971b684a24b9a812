//! The source: so many servers behind one queue, latencies with a heavy tail, and an outage.

use crate::options::Options;
use crate::traffic::dice;
use crate::world::World;
use parking_lot::Mutex;
use rand::RngExt;
use rand::rngs::Xoshiro256PlusPlus;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// How long one request takes a server: Pareto's law with this minimum and this exponent, and no longer than the cap. Half of
/// them take more than 1.4 times the minimum, one in a hundred ten times as long.
pub(crate) const FASTEST: Duration = Duration::from_millis(150);
const EXPONENT: f64 = 2.0;
const CAP: Duration = Duration::from_millis(1800);
/// How long the client of the source waits for an answer. A request that has not been begun by then leaves the queue; one that
/// has is worked on in vain.
pub(crate) const TIME_OUT: Duration = Duration::from_millis(2000);

/// What the source answers, and what the caches hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Row {
    /// When it was read.
    pub(crate) read: Duration,
}

#[derive(Debug)]
pub(crate) struct TimedOut;

impl fmt::Display for TimedOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the source has not answered within {TIME_OUT:?}")
    }
}

impl std::error::Error for TimedOut {}

pub(crate) struct Source {
    world: World,
    state: Mutex<State>,
}

struct State {
    servers: Servers,
    log: Log,
}

impl Source {
    pub(crate) fn new(world: &World, options: &Options) -> Arc<Self> {
        let state = State { servers: Servers::new(options), log: Log::new(options) };
        Arc::new(Source { world: world.clone(), state: Mutex::new(state) })
    }

    /// Asks the source; every call of this is one load.
    pub(crate) async fn load(&self, key: u32) -> Result<Row, TimedOut> {
        let answer = {
            let (asked, mut state) = (self.world.now(), self.state.lock());
            state.log.began(asked, key);
            state.servers.answer(asked)
        };
        self.world.sleep_until(answer.at).await;
        self.state.lock().log.ended(answer.at, key);
        if answer.came { Ok(Row { read: answer.at }) } else { Err(TimedOut) }
    }

    /// What has been asked so far; the log begins anew.
    pub(crate) fn take_log(&self) -> Log {
        std::mem::take(&mut self.state.lock().log)
    }
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Answer {
    /// When its client knows.
    at: Duration,
    /// Whether there is an answer.
    came: bool,
}

/// The servers of a queue that is served in the order of arrival. What arrives later changes nothing for those who are
/// before it, so all of a request's fate is known when it arrives.
struct Servers {
    dice: Xoshiro256PlusPlus,
    /// When each server has done what has been given to it so far.
    free: BinaryHeap<Reverse<Duration>>,
    outage: Range<Duration>,
}

impl Servers {
    fn new(options: &Options) -> Self {
        let free = (0..options.servers).map(|_| Reverse(Duration::ZERO)).collect();
        Servers { dice: dice(options.seed, 2), free, outage: options.outage() }
    }

    fn answer(&mut self, asked: Duration) -> Answer {
        let gives_up = asked + TIME_OUT;
        let none = Answer { at: gives_up, came: false };
        let took = self.latency();
        let Some(mut server) = self.free.peek_mut() else { return none };
        let mut begins = asked.max(server.0);
        if self.outage.contains(&begins) {
            begins = self.outage.end;
        }
        if begins >= gives_up {
            return none;
        }
        if begins < self.outage.start && self.outage.start < begins + took {
            // The outage takes the work with it, and says nothing.
            server.0 = self.outage.start;
            return none;
        }
        server.0 = begins + took;
        if server.0 > gives_up { none } else { Answer { at: server.0, came: true } }
    }

    fn latency(&mut self) -> Duration {
        // From (0, 1], so that the power is a number.
        let chance = 1.0 - self.dice.random::<f64>();
        FASTEST.mul_f64(chance.powf(-1.0 / EXPONENT)).min(CAP)
    }
}

/// The requests, as the source's clients see them: from when they ask to when they know.
#[derive(Default)]
pub(crate) struct Log {
    pub(crate) loads: u64,
    /// The most loads at one time, of all keys together, in each share of the time.
    pub(crate) most: Vec<u32>,
    /// The most loads at one time of any one key.
    pub(crate) most_of_one_key: u32,
    running: u32,
    running_of: Vec<u32>,
    /// The share of the time in which something was noted last.
    share: usize,
    share_length: Duration,
}

/// Into how many shares the time is divided.
pub(crate) const SHARES: u32 = 600;

impl Log {
    fn new(options: &Options) -> Self {
        Log {
            most: vec![0; SHARES as usize],
            running_of: vec![0; options.keys as usize],
            share_length: options.length() / SHARES,
            ..Log::default()
        }
    }

    fn began(&mut self, at: Duration, key: u32) {
        self.loads += 1;
        self.running += 1;
        let of_key = &mut self.running_of[key as usize];
        *of_key += 1;
        self.most_of_one_key = self.most_of_one_key.max(*of_key);
        self.carry_on_to(at, self.running - 1);
    }

    fn ended(&mut self, at: Duration, key: u32) {
        self.running -= 1;
        self.running_of[key as usize] -= 1;
        self.carry_on_to(at, self.running + 1);
    }

    /// So many have been running up to now.
    fn carry_on_to(&mut self, at: Duration, until_now: u32) {
        let share = (at.as_nanos() / self.share_length.as_nanos().max(1)) as usize;
        let last = self.most.len().saturating_sub(1);
        for passed in self.share..=share.min(last) {
            self.most[passed] = self.most[passed].max(until_now);
        }
        if let Some(most) = self.most.get_mut(share) {
            *most = (*most).max(self.running);
        }
        self.share = share;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secs(secs: f64) -> Duration {
        Duration::from_secs_f64(secs)
    }

    fn options() -> Options {
        Options { seconds: 400, servers: 1, ttl: 10, ..Options::default() }
    }

    #[test]
    fn one_server_serves_in_the_order_of_arrival() {
        let mut servers = Servers::new(&options());
        let answers: Vec<_> = (0..20).map(|_| servers.answer(Duration::ZERO)).collect();
        let came: Vec<_> = answers.iter().take_while(|answer| answer.came).map(|answer| answer.at).collect();
        assert!(came.is_sorted() && came.len() > 1, "{answers:?}");
        for answer in &answers[came.len()..] {
            assert_eq!(*answer, Answer { at: TIME_OUT, came: false });
        }
    }

    #[test]
    fn an_outage_answers_nobody_and_takes_what_runs_with_it() {
        let outage = options().outage();
        assert_eq!(outage, secs(200.0)..secs(215.0));
        let answer = |asked: f64| Servers::new(&options()).answer(secs(asked));
        assert!(answer(190.0).came);
        assert_eq!(answer(199.999_999), Answer { at: secs(199.999_999) + TIME_OUT, came: false });
        assert_eq!(answer(205.0), Answer { at: secs(207.0), came: false });
        // Whoever asks just before the end waits for it, and is served then.
        let late = answer(214.9);
        assert!(late.came && late.at > outage.end, "{late:?}");
        assert!(answer(220.0).came);
    }

    #[test]
    fn latencies_have_a_minimum_and_a_tail() {
        let mut servers = Servers::new(&options());
        let mut latencies: Vec<_> = (0..10_001).map(|_| servers.latency()).collect();
        latencies.sort_unstable();
        assert!(FASTEST <= latencies[0] && *latencies.last().expect("some") <= CAP);
        for (rank, times) in [(5_000, 2_f64.sqrt()), (9_900, 10.0)] {
            let ratio = latencies[rank].div_duration_f64(FASTEST) / times;
            assert!((0.8..1.25).contains(&ratio), "{rank}: {:?}", latencies[rank]);
        }
    }

    #[test]
    fn the_log_carries_what_runs_into_every_share() {
        let mut log = Log::new(&Options { seconds: u64::from(SHARES), ..options() });
        log.began(secs(0.5), 3);
        log.began(secs(0.6), 3);
        log.ended(secs(0.7), 3);
        log.began(secs(3.1), 4);
        log.ended(secs(3.2), 3);
        log.ended(secs(1e6), 4);
        assert_eq!(log.most[..5], [2, 1, 1, 2, 1]);
        assert_eq!((log.loads, log.most_of_one_key), (3, 2));
        assert_eq!(log.most.last(), Some(&1));
    }
}
