//! Models of the counts by which the hottest keys are known: two threads in one set of two words.
//!
//! | model | red when |
//! |---|---|
//! | `two_samples_meet` | a sample is stored instead of swung |
//! | `two_samples_of_one_hash_meet` | it does not look for its hash, or tries once |
//! | `a_sample_meets_a_halving` | a halving is stored instead of swung |

use super::hottest::{Hot, Set, WAYS};
use crate::primitive::model::{FEW, check};
use loom::sync::Arc;
use loom::thread::spawn;

const _: () = assert!(WAYS == 2, "the models count on it");

/// Hashes that differ in the part that a word has.
const A: u64 = 1 << 32;
const B: u64 = 2 << 32;
const C: u64 = 3 << 32;

/// A set that has seen these, while two threads do something to it; and what it knows then.
fn after(
    seen: &[u64],
    one: impl FnOnce(&Set) + 'static,
    other: impl FnOnce(&Set) + 'static,
) -> (Vec<Hot>, u64) {
    let set = Arc::new(Set::new());
    seen.iter().for_each(|hash| set.note(*hash));
    let threads = [
        spawn({
            let set = set.clone();
            move || one(&set)
        }),
        spawn({
            let set = set.clone();
            move || other(&set)
        }),
    ];
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let mut known = Vec::new();
    set.list(0, &mut known);
    let total = known.iter().map(|hot| hot.count).sum();
    (known, total)
}

fn count_of(known: &[Hot], hash: u64) -> u64 {
    known.iter().filter(|hot| hot.is_of(hash)).map(|hot| hot.count).sum()
}

#[test]
fn two_samples_meet() {
    check("two samples meet", 3, FEW, || {
        let (known, total) = after(&[], |set| set.note(A), |set| set.note(B));
        assert_eq!((count_of(&known, A), count_of(&known, B), total), (1, 1, 2));
    });
    check("two samples meet in a full set", 3, FEW, || {
        let (known, total) = after(&[A, A, B], |set| set.note(A), |set| set.note(C));
        assert_eq!((count_of(&known, A), count_of(&known, C), total), (3, 2, 5));
    });
}

#[test]
fn two_samples_of_one_hash_meet() {
    check("two samples of one hash meet", 3, FEW, || {
        let (known, total) = after(&[A, B], |set| set.note(C), |set| set.note(C));
        // One takes the place of the least, with its count and one more, and the other raises it.
        assert_eq!((known.len(), count_of(&known, C), count_of(&known, B), total), (2, 3, 1, 4));
    });
}

#[test]
fn a_sample_meets_a_halving() {
    check("a sample meets a halving", 3, FEW, || {
        let (known, total) = after(&[A, A, A, B], |set| set.note(A), Set::fade);
        // Halved before or after it is raised, and what has none goes.
        assert_eq!((count_of(&known, A), count_of(&known, B), total), (2, 0, 2));
    });
    check("a new hash meets a halving", 3, FEW, || {
        let (known, total) = after(&[A, A, A, A, A, B, B, B], |set| set.note(C), Set::fade);
        // It takes the place of B, whose count is three, or one by then; or of A, if that is halved and B is not.
        let its = count_of(&known, C);
        assert!((2..=3).contains(&its) && known.len() == 2 && total == 4, "{known:?}");
    });
}
