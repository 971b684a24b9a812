//! Models of the policy alone: the marks, the queues, the candidate's register and the sums, with toy slots.
//!
//! A toy slot is one word, its state and its weight, beside a real mark; there is no table, so a slot is found by its number
//! until it is unlinked. It is published, claimed, killed and evicted as the engine does it, in the same order. At the end of
//! each run the [audit](Policy::audit) says whether each slot that is there has one element, and whether the sums fit.
//! Models of the whole engine are in `engine::models`: two threads' worth of the policy would be too dear there.
//!
//! The sums, the sketch and the ghost are not words of loom: they change together with the step before them.
//!
//! | model | red when |
//! |---|---|
//! | `an_entrance_meets_a_leave` | a slot enters after it has left; a leave does not say where the slot was |
//! | `two_publishers_of_one_slot` | both enter; whoever comes second does not note the weight |
//! | `two_weigh_one_slot` | a weight is noted Relaxed, or read Relaxed; it is stored |
//! | `two_evictors_of_one_candidate` | the register is set or emptied without a look; an element is not put back |
//! | `a_candidate_meets_its_evictor` | the register does not release, or acquire |
//! | `two_evictors_of_a_short_queue` | what both have taken out is dropped by both |
//! | `an_eviction_from_the_small_queue_meets_a_claim`, `_from_the_main_queue_` | what is in use by now is not put back |
//! | `an_eviction_meets_a_removal` | both leave for one slot |
//! | `an_eviction_meets_a_replacement` | what has been replaced meanwhile is not put back |
//! | `a_hit_meets_a_promotion`, `a_hit_meets_a_keep` | a mark is changed by one try |
//! | `a_weighing_meets_a_promotion` | a promotion takes off what the slot weighed when it was looked at |
//! | `a_memory_meets_its_successor` | it is published or read Relaxed; the old one is freed at once; the loser's stays |

use super::*;
use crate::primitive::atomic::AtomicUsize as Word;
use crate::primitive::epoch::pin;
use crate::primitive::model::{Census, Pins, both, spawn};
use crate::primitive::plain::AtomicBool;
use crate::primitive::step::told::Steps;
use std::sync::Arc;

const ABSENT: usize = 0;
const READY: usize = 1;
const LOADING: usize = 2;
const DEAD: usize = 3;
const STATES: usize = 3;

/// A slot: its state, and above that its weight.
struct Toy {
    word: Word,
    mark: MarkWord,
    /// It cannot be found any more.
    unlinked: AtomicBool,
}

struct Toys {
    policy: Policy,
    slots: Vec<Toy>,
}

/// The slots as a thread sees them that has just put something into one of them, or into none.
struct Seen<'t>(&'t Toys, Option<usize>);

fn weight_of(word: usize) -> u32 {
    if word & STATES == DEAD { 0 } else { (word >> 2) as u32 }
}

impl Slots for Seen<'_> {
    type Slot = usize;

    fn find(&self, item: Item) -> Option<usize> {
        let slot = item.hash() as usize;
        let Toy { mark, unlinked, .. } = &self.0.slots[slot];
        // Relaxed: all threads of a model are one thread of the system.
        (!unlinked.load(Ordering::Relaxed) && item.means(mark.load())).then_some(slot)
    }

    fn mark(&self, slot: usize) -> &MarkWord {
        &self.0.slots[slot].mark
    }

    fn standing(&self, slot: usize) -> Standing {
        match self.0.load(slot) & STATES {
            LOADING => Standing::InUse,
            _ if self.1 == Some(slot) => Standing::InUse,
            _ => Standing::Free,
        }
    }

    fn len(&self) -> usize {
        self.0.slots.len()
    }

    fn prefetch(&self, _: Item, _: bool) {}

    fn evict(&self, slot: usize) -> bool {
        let seen = self.0.load(slot);
        match seen & STATES {
            READY => self.0.swing(slot, seen, DEAD),
            DEAD => {
                self.0.policy.leave(&self.0.slots[slot].mark, slot as u32);
                false
            }
            _ => false,
        }
    }
}

impl Toys {
    /// So many slots, none of which is there yet.
    fn new(capacity: u64, slots: usize) -> Self {
        let toy = || Toy { word: Word::new(ABSENT), mark: MarkWord::new(), unlinked: AtomicBool::new(false) };
        Self { policy: Policy::new(capacity, 1), slots: (0..slots).map(|_| toy()).collect() }
    }

    /// So many slots that weigh one, in the small queue.
    fn short(capacity: u64, slots: usize) -> Self {
        let toys = Self::new(capacity, slots);
        (0..slots).for_each(|slot| assert!(toys.put(slot, 1)));
        toys
    }

    /// The same, in the main queue.
    fn long(slots: usize) -> Self {
        let toys = Self::short(UNBOUNDED - 1, slots);
        let (seen, guard) = (Seen(&toys, None), pin());
        let part = &toys.policy.parts[0];
        for _ in 0..slots {
            let Look::Oldest(oldest) = toys.policy.oldest(&seen, &part.small, &guard) else {
                panic!("there are so many")
            };
            toys.policy.promote(&seen, part, &oldest, true, &guard);
        }
        drop(guard);
        // So that the main queue drops something before the small one does.
        // Relaxed: a setting.
        toys.policy.target.store(1, Ordering::Relaxed);
        toys
    }

    fn load(&self, slot: usize) -> usize {
        self.slots[slot].word.load(atomic::Ordering::Acquire)
    }

    /// As the engine's: charge, CAS, discharge, leave.
    fn swing(&self, slot: usize, seen: usize, next: usize) -> bool {
        let (before, after) = (weight_of(seen), weight_of(next));
        self.policy.charge(after.into());
        step();
        let toy = &self.slots[slot];
        if toy.word.compare_exchange(seen, next, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            self.policy.discharge(after.into());
            return false;
        }
        step();
        self.policy.discharge(before.into());
        if next == DEAD {
            self.policy.leave(&toy.mark, slot as u32);
            // Relaxed: as in `find`.
            toy.unlinked.store(true, Ordering::Relaxed);
        }
        true
    }

    /// Puts something into a slot, unless it is dead.
    fn put(&self, slot: usize, weight: usize) -> bool {
        loop {
            let seen = self.load(slot);
            if seen == DEAD {
                return false;
            }
            if self.swing(slot, seen, READY | weight << 2) {
                self.stored(slot);
                return true;
            }
        }
    }

    /// As the engine's.
    fn stored(&self, slot: usize) {
        let (guard, mark, hash) = (pin(), &self.slots[slot].mark, slot as u32);
        let weight = || weight_of(self.load(slot));
        let seen = Seen(self, Some(slot));
        let is_over = || self.policy.weight() > self.policy.capacity();
        while is_over() && self.policy.drop_one(&seen, hash, &guard) {}
        if mark.load().place() == Place::Out {
            let admission = self.policy.admit(&seen, hash, weight(), &guard);
            self.policy.enter(&seen, mark, self.policy.mark(admission, weight()), hash, &guard);
        }
        self.policy.reweigh(mark, hash, weight);
    }

    /// `true` for the one who has killed it.
    fn kill(&self, slot: usize) -> bool {
        loop {
            let seen = self.load(slot);
            if seen == DEAD {
                return false;
            }
            if self.swing(slot, seen, DEAD) {
                return true;
            }
        }
    }

    fn drop_one(&self) -> bool {
        self.policy.drop_one(&Seen(self, None), 0, &pin())
    }

    fn there(&self) -> Vec<usize> {
        (0..self.slots.len()).filter(|&slot| matches!(self.load(slot) & STATES, READY | LOADING)).collect()
    }

    fn end(mut self) {
        let there = self.there();
        let audited = |slot: usize| {
            let mark = self.slots[slot].mark.load();
            Audited { hash: slot as u32, mark, weight: weight_of(self.load(slot)) }
        };
        let slots: Vec<Audited> = there.into_iter().map(audited).collect();
        let mut wrong = Vec::new();
        self.policy.audit(&slots, &pin(), &mut |fault| wrong.push(fault));
        assert!(wrong.is_empty(), "{wrong:?}");
    }
}

type Part = fn(&Toys) -> bool;

/// Two threads do a part each, `first` telling its steps to the other one, and both the other way round.
fn meet(name: &'static str, bound: usize, toys: fn() -> Toys, parts: [Part; 2], check: fn(&Toys, [bool; 2])) {
    for (roles, turned) in [("", false), (", turned round", true)] {
        both(&format!("{name}{roles}"), bound, move |pins: Pins| {
            pins().adopt();
            let toys = Arc::new(toys());
            let steps = Steps::new();
            let run = |nth: usize, tells: bool| {
                let (toys, steps) = (toys.clone(), steps.clone());
                spawn(pins, move || {
                    if tells {
                        steps.tell();
                    } else {
                        steps.look();
                    }
                    parts[nth](&toys)
                })
            };
            let (first, second) = (run(0, !turned), run(1, turned));
            let done = [first.join().unwrap(), second.join().unwrap()];
            let toys = Arc::into_inner(toys).expect("the threads have ended");
            check(&toys, done);
            toys.end();
        });
    }
}

#[test]
fn an_entrance_meets_a_leave() {
    meet(
        "an entrance meets a leave",
        3,
        || Toys::new(2, 1),
        [|toys| toys.put(0, 1), |toys| toys.kill(0)],
        |toys, _| {
            assert!(toys.there().is_empty());
            assert!(!toys.drop_one(), "nothing is there to be dropped");
            let guard = pin();
            assert_eq!(toys.policy.parts[0].small.len(&guard), 0, "a dead slot is queued for ever");
        },
    );
}

#[test]
fn two_publishers_of_one_slot() {
    meet(
        "two publishers of one slot",
        3,
        || Toys::new(20, 1),
        [|toys| toys.put(0, 2), |toys| toys.put(0, 3)],
        |toys, _| assert_eq!(toys.there(), [0]),
    );
}

#[test]
fn two_weigh_one_slot() {
    meet(
        "two weigh one slot",
        3,
        || Toys::short(20, 1),
        [|toys| toys.put(0, 2), |toys| toys.put(0, 3)],
        |toys, _| assert_eq!(toys.there(), [0]),
    );
}

#[test]
fn two_evictors_of_one_candidate() {
    meet(
        "two evictors of one candidate",
        3,
        || Toys::long(2),
        [
            |toys| {
                let dropped = toys.drop_one();
                // As one who lets a slot in looks for the next victim.
                toys.policy.candidate(&Seen(toys, None), &toys.policy.parts[0], &pin());
                dropped
            },
            Toys::drop_one,
        ],
        |toys, dropped| {
            assert_eq!(toys.there().len(), 2 - dropped.iter().filter(|done| **done).count());
            // One may have found the other's hands full, and the queue empty.
            assert_ne!(dropped, [false, false]);
            assert_ne!(toys.drop_one(), dropped[0] && dropped[1], "what is left can be dropped");
        },
    );
}

/// A slot comes into the main queue, and from there into the register, while another thread wants to drop it.
#[test]
fn a_candidate_meets_its_evictor() {
    meet(
        "a candidate meets its evictor",
        3,
        || Toys::new(UNBOUNDED - 1, 1),
        [
            |toys| {
                let (seen, guard) = (Seen(toys, None), pin());
                assert!(toys.swing(0, ABSENT, READY | 1 << 2));
                let admission = toys.policy.admit(&seen, 0, 1, &guard);
                toys.policy.enter(&seen, &toys.slots[0].mark, toys.policy.mark(admission, 1), 0, &guard);
                let part = &toys.policy.parts[0];
                if let Look::Oldest(oldest) = toys.policy.oldest(&seen, &part.small, &guard) {
                    toys.policy.promote(&seen, part, &oldest, true, &guard);
                    toys.policy.candidate(&seen, part, &guard);
                }
                true
            },
            Toys::drop_one,
        ],
        |toys, [_, dropped]| {
            assert_eq!(toys.there().is_empty(), dropped);
            assert_ne!(toys.drop_one(), dropped, "what is left can be dropped");
        },
    );
}

#[test]
fn two_evictors_of_a_short_queue() {
    meet(
        "two evictors of a short queue",
        3,
        || Toys::short(2, 2),
        [Toys::drop_one, Toys::drop_one],
        |toys, dropped| {
            assert_eq!(toys.there().len(), 2 - dropped.iter().filter(|done| **done).count());
            assert_eq!(dropped, [true, true], "there was one for each");
        },
    );
}

/// A load: `true` if it has begun. What loads is killed by nobody here.
fn load(toys: &Toys) -> bool {
    let seen = toys.load(0);
    if seen & STATES != READY || !toys.swing(0, seen, seen & !STATES | LOADING) {
        return false;
    }
    assert!(toys.swing(0, seen & !STATES | LOADING, seen), "a loading slot was evicted");
    toys.stored(0);
    true
}

fn an_eviction_meets_a_claim(name: &'static str, toys: fn() -> Toys) {
    meet(name, 3, toys, [Toys::drop_one, load], |toys, [dropped, loaded]| {
        assert!(dropped || loaded);
        assert_eq!(toys.there().is_empty(), dropped);
        assert_eq!(toys.drop_one(), !dropped, "it can be dropped afterwards");
    });
}

#[test]
fn an_eviction_from_the_small_queue_meets_a_claim() {
    an_eviction_meets_a_claim("an eviction from the small queue meets a claim", || Toys::short(2, 1));
}

#[test]
fn an_eviction_from_the_main_queue_meets_a_claim() {
    an_eviction_meets_a_claim("an eviction from the main queue meets a claim", || Toys::long(1));
}

#[test]
fn an_eviction_meets_a_removal() {
    meet(
        "an eviction meets a removal",
        3,
        || Toys::short(2, 1),
        [Toys::drop_one, |toys| toys.kill(0)],
        |toys, [dropped, killed]| {
            assert_ne!(dropped, killed, "one of them has taken it out");
            assert!(toys.there().is_empty());
        },
    );
}

#[test]
fn an_eviction_meets_a_replacement() {
    meet(
        "an eviction meets a replacement",
        3,
        || Toys::short(2, 1),
        [Toys::drop_one, |toys| toys.put(0, 2)],
        |toys, [dropped, _]| {
            assert!(dropped, "it is there all the time");
            assert!(toys.there().is_empty(), "what is dead does not come back");
        },
    );
}

#[test]
fn a_hit_meets_a_promotion() {
    meet(
        "a hit meets a promotion",
        3,
        || Toys::short(20, 3),
        [
            |toys| {
                let (seen, guard) = (Seen(toys, None), pin());
                toys.policy.shorten(&seen, &toys.policy.parts[0], &guard);
                true
            },
            |toys| {
                (0..2).for_each(|_| toys.slots[0].mark.hit());
                true
            },
        ],
        |toys, _| assert_eq!(toys.slots[0].mark.load().place(), Place::Main),
    );
}

#[test]
fn a_hit_meets_a_keep() {
    meet(
        "a hit meets a keep",
        3,
        || {
            let toys = Toys::long(2);
            toys.slots[0].mark.hit();
            toys
        },
        [Toys::drop_one, |toys| {
            toys.slots[0].mark.hit();
            true
        }],
        |toys, [dropped, _]| {
            assert!(dropped);
            assert_eq!(toys.there(), [0], "the one that is used stays");
        },
    );
}

#[test]
fn a_weighing_meets_a_promotion() {
    meet(
        "a weighing meets a promotion",
        3,
        || Toys::short(20, 3),
        [
            |toys| toys.put(0, 3),
            |toys| {
                let (seen, guard) = (Seen(toys, None), pin());
                toys.policy.shorten(&seen, &toys.policy.parts[0], &guard);
                true
            },
        ],
        |toys, _| assert_eq!(toys.there(), [0, 1, 2]),
    );
}

#[test]
fn a_memory_meets_its_successor() {
    both("a memory meets its successor", 3, |pins| {
        pins().adopt();
        let census = Census::default();
        let place = Arc::new(Replaceable::empty());
        place.replace(None, census.value(1), 0, &pin());
        let succeed = |number: u64| {
            let (place, value) = (place.clone(), census.value(number));
            spawn(pins, move || {
                let guard = pin();
                let seen = place.get(&guard);
                place.replace(seen, value, 0, &guard);
                let there = place.get(&guard).expect("there is one all the time");
                (seen.expect("there is one all the time").number(), there.number())
            })
        };
        let (two, three) = (succeed(2), succeed(3));
        let there = place.get(&pin()).map(crate::primitive::model::Value::number);
        assert!(matches!(there, Some(1..=3)));
        let (two, three) = (two.join().unwrap(), three.join().unwrap());
        let last = place.get(&pin()).map(crate::primitive::model::Value::number);
        assert!([two.1, three.1].contains(&last.expect("there is one all the time")));
        drop(place);
        assert_eq!(census.count(), 0, "values leaked");
    });
}
