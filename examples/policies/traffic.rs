//! The traffic: who asks for what, and when. The same for every policy.

use crate::options::Options;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};
use std::time::Duration;

/// A sequence of random numbers of its own for each use, so that no use disturbs another's.
pub(crate) fn dice(seed: u64, usage: u64) -> Xoshiro256PlusPlus {
    Xoshiro256PlusPlus::seed_from_u64(seed ^ usage.rotate_left(32))
}

/// Calls in the order of time: the gaps are exponential (arrivals of a Poisson process), the keys follow Zipf's law, and the
/// key is the rank, so that key 0 is the most popular.
pub(crate) struct Traffic {
    dice: Xoshiro256PlusPlus,
    /// For each key, how probable it is that a call asks for it or for one that is more popular.
    cumulative: Vec<f64>,
    rate: f64,
    at: Duration,
    end: Duration,
}

impl Traffic {
    pub(crate) fn new(options: &Options) -> Self {
        let mut sum = 0.0;
        let weights = (1..=options.keys).map(|rank| f64::from(rank).powf(-options.zipf));
        let mut cumulative: Vec<f64> = weights
            .map(|weight| {
                sum += weight;
                sum
            })
            .collect();
        cumulative.iter_mut().for_each(|upto| *upto /= sum);
        Traffic {
            dice: dice(options.seed, 1),
            cumulative,
            rate: f64::from(options.rate),
            at: Duration::ZERO,
            end: options.length(),
        }
    }
}

impl Iterator for Traffic {
    /// When, and which key.
    type Item = (Duration, u32);

    fn next(&mut self) -> Option<(Duration, u32)> {
        // From (0, 1], so that the logarithm is a number.
        let chance = 1.0 - self.dice.random::<f64>();
        self.at += Duration::from_secs_f64(-chance.ln() / self.rate);
        let chance: f64 = self.dice.random();
        let key = self.cumulative.partition_point(|upto| *upto <= chance);
        let key = key.min(self.cumulative.len() - 1) as u32;
        (self.at < self.end).then_some((self.at, key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_and_popularity_are_those_asked_for() {
        let options = Options { seconds: 200, rate: 1000, keys: 100, zipf: 1.0, ..Options::default() };
        let mut counts = vec![0_u32; 100];
        let (mut last, mut calls) = (Duration::ZERO, 0);
        for (at, key) in Traffic::new(&options) {
            assert!(last <= at && at < Duration::from_secs(200));
            (last, calls) = (at, calls + 1);
            counts[key as usize] += 1;
        }
        // Six standard deviations of a Poisson count.
        assert!((197_300..=202_700).contains(&calls), "{calls}");
        for (first, second) in [(0, 1), (1, 3), (4, 9)] {
            let ratio = f64::from(counts[first]) / f64::from(counts[second]);
            assert!((1.85..2.15).contains(&ratio), "{first} to {second}: {ratio}");
        }
    }

    #[test]
    fn a_seed_is_one_sequence() {
        let of = |seed| Traffic::new(&Options { seed, ..Options::default() }).take(1000).collect::<Vec<_>>();
        assert_eq!(of(7), of(7));
        assert_ne!(of(7), of(8));
    }
}
