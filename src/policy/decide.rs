//! The decisions of the policy: pure functions of numbers, without queues, slots or atomics.

use super::mark::Place;

/// Lengths that go with a capacity. All are in units of weight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    capacity: u64,
}

impl Scale {
    pub(super) fn new(capacity: u64) -> Self {
        Self { capacity }
    }

    /// How long the small queue is to be in the beginning, and at least.
    pub(super) fn least_target(self) -> u64 {
        (self.capacity / 100).max(1)
    }

    fn most_target(self) -> u64 {
        (self.capacity / 10 * 9).max(1)
    }

    /// How far the small queue's wished length moves at once.
    fn step(self) -> u64 {
        (self.capacity / 10_000 * 3).max(1)
    }

    /// A return within so many misses says that a slightly longer queue would have kept the key.
    pub(super) fn window(self) -> u64 {
        (self.capacity / 10).max(4)
    }

    /// Stamps count in units of two to the power of this, so that 16 bits span 256 capacities.
    pub(super) fn stamp_shift(self) -> u32 {
        (self.capacity / 256).checked_ilog2().unwrap_or(0)
    }

    /// The wished length after a lesson.
    pub(super) fn taught(self, target: u64, lesson: Lesson) -> u64 {
        let target = match lesson {
            Lesson::None => target,
            Lesson::Shorter => target.saturating_sub(self.step()),
            Lesson::Longer => target.saturating_add(self.step()),
        };
        target.clamp(self.least_target(), self.most_target())
    }
}

/// What a miss says about the small queue's length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lesson {
    None,
    /// The main queue is too short, so the small one is too long.
    Shorter,
    Longer,
}

/// The slot that the main queue would drop next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Victim {
    pub(super) estimate: u64,
    /// For how many misses it has not been used, as far as that is known.
    pub(super) idle: u64,
}

/// What is known of a key that returns after it was dropped.
#[derive(Clone, Copy, Debug)]
pub(super) struct Return {
    pub(super) estimate: u64,
    /// From the small queue: misses since it entered it. From the main queue: slots dropped from there since.
    pub(super) distance: u64,
}

/// What a miss of a key teaches whose trace was found.
pub(super) fn lesson(from: Place, distance: u64, small: u64, scale: Scale) -> Lesson {
    match from {
        Place::Main if distance <= scale.window() => Lesson::Shorter,
        Place::Small if distance <= small + scale.window() => Lesson::Longer,
        _ => Lesson::None,
    }
}

/// Which queue a key enters that returns. `victim` is what the main queue would drop for it, `None` if it is empty.
pub(super) fn entrance(from: Place, lesson: Lesson, key: Return, victim: Option<Victim>) -> Place {
    let Some(victim) = victim else { return Place::Main };
    let straight = match (from, lesson) {
        // A longer small queue would have kept it: that is where it belongs.
        (Place::Small, Lesson::Longer) => false,
        // On a tie, the one with the shorter distance between two uses (as LIRS, Jiang and Zhang, SIGMETRICS 2002).
        (Place::Small, _) => {
            key.estimate > victim.estimate || key.estimate == victim.estimate && key.distance < victim.idle
        }
        _ => key.estimate > victim.estimate,
    };
    if straight { Place::Main } else { Place::Small }
}

/// Whether the oldest slot of the small queue is worth more than the main queue's victim.
pub(super) fn outlives(estimate: u64, uses: u64, victim: Victim) -> bool {
    estimate > victim.estimate + u64::from(uses == 0)
}
