//! The hottest keys of late, about: which hashes were met most often among the accesses that are sampled.
//!
//! Space-Saving (Metwally, Agrawal and El Abbadi, *Efficient computation of frequent and top-k elements in data streams*, ICDT
//! 2005), in sets of eight: a sample raises the count of its hash, or takes the place of the least of its set, with that
//! one's count and one more. So a count may be too high, by no more than the least of its set, and is too low by no more than
//! what was lost; and what makes up more than an eighth of its set's samples is among the eight. From time to time all counts
//! are halved: what was hot gives way to what is.
//!
//! A hash is the upper part of a word, its count the lower; each change is one CAS of the word, so that a count is never that of
//! another hash.
//! - A sample adds one to the total of its set, or is lost: when others have changed the word that it wants [`TRIES`] times.
//! - A hash may come to stand twice in its set, if a thread looks at the set in the middle of a halving. Its counts are added
//!   up by whoever reads them, and only the first of the two is raised from then on.
//! - A halving that is suspended half-way leaves the other counts twice as high as they should be until it goes on.

use crate::primitive::atomic::{AtomicU64, Ordering};
use crate::primitive::plain;
use crate::primitive::step::step;
use std::array::from_fn;

/// Sets, a power of two. The lowest bits of a hash choose one.
const SETS: usize = 128;
/// Words of a set: one cache line.
pub(super) const WAYS: usize = if cfg!(loom) { 2 } else { 8 };
/// How many hashes there is room for.
const ROOM: usize = SETS * WAYS;

/// The lower part of a word: the count. The upper part is that of the hash.
const COUNT: u64 = (1 << 24) - 1;
/// The part of a hash that a word and its set make up.
const KNOWN: u64 = !COUNT | (SETS as u64 - 1);

/// So often a sample tries.
const TRIES: usize = 4;

/// After so many samples all counts are halved.
pub(super) const HALF_LIFE: u64 = 1 << 14;

const _: () = {
    assert!(SETS.is_power_of_two() && SETS as u64 <= COUNT, "a set is chosen by bits that no word has");
    // Half of the samples stay, so that there are no more than twice as many.
    assert!(2 * HALF_LIFE < COUNT, "a count has room");
    assert!(cfg!(loom) || size_of::<Hottest>() <= 64 * (SETS + 1), "a line for each set");
};

/// One cache line of words. A word of zero is nothing; so is a count of zero.
#[repr(align(64))]
pub(super) struct Set([AtomicU64; WAYS]);

/// The hashes that were met most often of late.
pub(crate) struct Hottest {
    sets: [Set; SETS],
    samples: plain::AtomicU64,
}

/// A hash that was met, as far as it is known, and how often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hot {
    hash: u64,
    pub(crate) count: u64,
}

impl Hot {
    /// The hash: all of its upper half, and a part of the lower.
    pub(crate) fn hash(self) -> u64 {
        self.hash
    }

    /// Whether this whole hash is the one that was met; one in 2^47 others seems to be.
    pub(crate) fn is_of(self, hash: u64) -> bool {
        self.hash == hash & KNOWN
    }
}

impl Set {
    pub(super) fn new() -> Self {
        Self(from_fn(|_| AtomicU64::new(0)))
    }

    /// Notes one sample of this hash.
    pub(super) fn note(&self, hash: u64) {
        let tag = hash & !COUNT;
        for _ in 0..TRIES {
            // Relaxed: a word is a whole entry, and publishes nothing.
            let seen: [u64; WAYS] = from_fn(|way| self.0[way].load(Ordering::Relaxed));
            let its = (0..WAYS).find(|&way| seen[way] != 0 && seen[way] & !COUNT == tag);
            // The first of the least, so that two who bring the same hash want the same place.
            let least = || (0..WAYS).min_by_key(|&way| seen[way] & COUNT).unwrap_or(0);
            let way = its.unwrap_or_else(least);
            let count = (seen[way] & COUNT) + 1;
            if count > COUNT {
                return;
            }
            step();
            // Relaxed: as above.
            let noted =
                self.0[way].compare_exchange(seen[way], tag | count, Ordering::Relaxed, Ordering::Relaxed);
            if noted.is_ok() {
                return;
            }
        }
    }

    /// Halves all counts. What is left with none goes.
    pub(super) fn fade(&self) {
        let faded = |word: u64| {
            let count = (word & COUNT) / 2;
            (word != 0).then_some(if count == 0 { 0 } else { word & !COUNT | count })
        };
        for word in &self.0 {
            // Relaxed: as in `note`. Lock-free: who fails has seen a sample noted.
            let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, faded);
            step();
        }
    }

    /// Adds what is here to the list.
    pub(super) fn list(&self, nth: usize, all: &mut Vec<Hot>) {
        let begin = all.len();
        for word in &self.0 {
            // Relaxed: as in `note`.
            let word = word.load(Ordering::Relaxed);
            if word == 0 {
                continue;
            }
            let hot = Hot { hash: word & !COUNT | nth as u64, count: word & COUNT };
            match all[begin..].iter_mut().find(|there| there.hash == hot.hash) {
                Some(there) => there.count += hot.count,
                None => all.push(hot),
            }
        }
    }
}

impl Hottest {
    pub(crate) fn new() -> Self {
        Self { sets: from_fn(|_| Set::new()), samples: plain::AtomicU64::new(0) }
    }

    /// Notes one sample of this hash.
    pub(crate) fn note(&self, hash: u64) {
        self.sets[hash as usize & (SETS - 1)].note(hash);
        // Relaxed: a figure.
        let nth = self.samples.fetch_add(1, plain::Ordering::Relaxed).wrapping_add(1);
        if nth.is_multiple_of(HALF_LIFE) {
            self.sets.iter().for_each(Set::fade);
        }
    }

    /// All hashes that are known, the hottest first.
    pub(crate) fn list(&self) -> Vec<Hot> {
        let mut all = Vec::with_capacity(ROOM);
        for (nth, set) in self.sets.iter().enumerate() {
            set.list(nth, &mut all);
        }
        all.sort_unstable_by_key(|hot| (std::cmp::Reverse(hot.count), hot.hash));
        all
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::hash::{DefaultHashBuilder, hash_of};

    fn hashes(n: u64) -> Vec<u64> {
        let hasher = DefaultHashBuilder::with_seed(1);
        (0..n).map(|key| hash_of(&hasher, &key)).collect()
    }

    /// The first `n` of the list are these, in any order.
    #[track_caller]
    fn assert_hottest(hottest: &Hottest, hot: &[u64]) {
        let list = hottest.list();
        for hash in hot {
            let at = list.iter().position(|known| known.is_of(*hash));
            assert!(at.is_some_and(|at| at < hot.len()), "one is at {at:?} of {}", list.len());
        }
    }

    #[test]
    fn what_is_met_more_often_comes_first() {
        let (hottest, all) = (Hottest::new(), hashes(5_000));
        // Ten of them in a half of the samples, and each time others between.
        for nth in 0..10_000 {
            hottest.note(all[nth % 10]);
            hottest.note(all[10 + nth % 4_990]);
        }
        assert_hottest(&hottest, &all[..10]);
        let list = hottest.list();
        assert_eq!(list.len(), ROOM, "it is full");
        // 1,000 of each, of which a halving took a half of those before it.
        assert!(list[..10].iter().all(|hot| (500..1_010).contains(&hot.count)), "{:?}", &list[..10]);
    }

    #[test]
    fn a_count_is_never_too_low_and_the_total_is_that_of_the_samples() {
        let (hottest, all) = (Hottest::new(), hashes(3_000));
        let mut met = vec![0; all.len()];
        for nth in 0..HALF_LIFE as usize - 1 {
            let key = (nth * nth + nth / 7) % all.len();
            met[key] += 1;
            hottest.note(all[key]);
        }
        let list = hottest.list();
        for hot in &list {
            let key = all.iter().position(|hash| hot.is_of(*hash)).unwrap();
            assert!(hot.count >= met[key], "{hot:?}, met {} times", met[key]);
        }
        assert_eq!(list.iter().map(|hot| hot.count).sum::<u64>(), HALF_LIFE - 1);
    }

    #[test]
    fn what_was_hot_gives_way() {
        let (hottest, all) = (Hottest::new(), hashes(200));
        for nth in 0..20 * HALF_LIFE as usize {
            hottest.note(all[nth % 5]);
        }
        assert_hottest(&hottest, &all[..5]);
        // Two halvings later others are ahead that make up a half of the samples.
        for nth in 0..2 * HALF_LIFE as usize {
            hottest.note(if nth % 2 == 0 { all[5 + nth / 2 % 5] } else { all[10 + nth / 2 % 190] });
        }
        assert_hottest(&hottest, &all[5..10]);
        for nth in 0..16 * HALF_LIFE as usize {
            hottest.note(all[5 + nth % 5]);
        }
        let list = hottest.list();
        assert!(!all[..5].iter().any(|old| list.iter().any(|hot| hot.is_of(*old))), "they are forgotten");
    }

    #[test]
    fn threads_that_meet_lose_few_samples() {
        let (hottest, all) = (Hottest::new(), hashes(8));
        let each = HALF_LIFE as usize / 4;
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| (0..each).for_each(|nth| hottest.note(all[nth % all.len()])));
            }
        });
        let (list, samples) = (hottest.list(), 3 * each as u64);
        let total = list.iter().map(|hot| hot.count).sum::<u64>();
        let words = hottest.sets.iter().flat_map(|set| &set.0);
        let taken = words.filter(|word| word.load(Ordering::Relaxed) != 0).count();
        assert_eq!((list.len(), taken), (all.len(), all.len()), "none is missing, none stands twice");
        assert!((samples / 2..=samples).contains(&total), "{total} of {samples}");
    }
}
