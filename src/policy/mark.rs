//! The mark: the one word of a slot that the policy reads and writes.
//!
//! | bits | content | who writes it |
//! |---|---|---|
//! | 2 | place: `Out`, `Small`, `Main`, `Gone` | see below |
//! | 2 | uses, 0 to 2: hits since it was last looked at | a hit raises it, the policy lowers it |
//! | 12 | ticket: which life of the slot an element of a queue means, see [`ticket_of`] | once, by `enter` or at birth |
//! | 16 | stamp: when it entered, or was last kept | the policy |
//! | 32 | weight, as the lengths of the queues know it | `enter`, `reweigh` |
//!
//! ```text
//!   Out ── enter ──► Small ── promote ──► Main          any ── leave ──► Gone (terminal)
//!    └───────────── enter ────────────────►┘
//! ```
//! - `INV-mark-1`: while its place is `Small` or `Main` a slot has one element, in a queue, in a candidate's register, or in
//!   the hands of one thread: only the winner of `enter`, or the one who links a slot that was born with its place, makes
//!   one, and whoever takes it out either puts it back, or finds that the slot has left.
//! - `INV-mark-2`: the length of the small queue changes only with a change of place or weight, by whoever makes it.

use crate::primitive::atomic::{AtomicU64, Ordering};

/// The most uses that are remembered.
pub(crate) const MOST_USES: u64 = 2;

const PLACE: u64 = 0b11;
const USES_AT: u32 = 2;
const USES: u64 = 0b11 << USES_AT;
const TICKET_AT: u32 = 4;
pub(super) const TICKETS: u64 = 1 << 12;
const TICKET: u64 = (TICKETS - 1) << TICKET_AT;
const STAMP_AT: u32 = 16;
const STAMP: u64 = 0xffff << STAMP_AT;
const WEIGHT_AT: u32 = 32;

/// The ticket of a slot that enters at this count of misses. All bits of the count matter, the upper ones too: where all
/// weights are multiples of a power of two, the lower ones never change, and a new life of a key would be taken for the one
/// before.
fn ticket_of(clock: u64) -> u64 {
    clock.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - TICKETS.trailing_zeros())
}

/// Where a slot stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Not in a queue yet.
    Out,
    /// In the small queue, where new keys prove themselves.
    Small,
    /// In the main queue.
    Main,
    /// Out of the cache, for ever.
    Gone,
}

impl Place {
    const ALL: [Self; 4] = [Self::Out, Self::Small, Self::Main, Self::Gone];
}

/// A value that a slot's mark can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark(u64);

impl Mark {
    pub(super) fn new(place: Place, clock: u64, stamp: u16, weight: u32) -> Self {
        Self(
            place as u64
                | ticket_of(clock) << TICKET_AT
                | u64::from(stamp) << STAMP_AT
                | u64::from(weight) << WEIGHT_AT,
        )
    }

    pub(crate) fn place(self) -> Place {
        Place::ALL[(self.0 & PLACE) as usize]
    }

    pub(super) fn is_queued(self) -> bool {
        matches!(self.place(), Place::Small | Place::Main)
    }

    /// Whether a hit has something to note.
    #[inline(always)]
    pub(crate) fn is_marked_by_hit(self) -> bool {
        self.uses() < MOST_USES && self.is_queued()
    }

    pub(crate) fn uses(self) -> u64 {
        (self.0 & USES) >> USES_AT
    }

    pub(super) fn ticket(self) -> u64 {
        (self.0 & TICKET) >> TICKET_AT
    }

    pub(super) fn stamp(self) -> u16 {
        (self.0 >> STAMP_AT) as u16
    }

    pub(crate) fn weight(self) -> u32 {
        (self.0 >> WEIGHT_AT) as u32
    }

    pub(super) fn with_place(self, place: Place) -> Self {
        Self(self.0 & !PLACE | place as u64)
    }

    pub(super) fn with_uses(self, uses: u64) -> Self {
        Self(self.0 & !USES | uses << USES_AT)
    }

    pub(super) fn with_stamp(self, stamp: u16) -> Self {
        Self(self.0 & !STAMP | u64::from(stamp) << STAMP_AT)
    }

    pub(super) fn with_weight(self, weight: u32) -> Self {
        Self(self.0 & u64::from(u32::MAX) | u64::from(weight) << WEIGHT_AT)
    }
}

/// The mark of a slot.
#[derive(Debug)]
pub(crate) struct MarkWord(AtomicU64);

impl MarkWord {
    /// Of a slot that is in no queue.
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(Place::Out as u64))
    }

    /// Of a slot that enters a queue as soon as it is linked.
    pub(crate) fn entered(mark: Mark) -> Self {
        Self(AtomicU64::new(mark.0))
    }

    #[inline]
    pub(crate) fn load(&self) -> Mark {
        // Relaxed: who acts on it does so by a CAS; what it says about the slot is published by the queue, or by
        // the candidate's register.
        Mark(self.0.load(Ordering::Relaxed))
    }

    /// Notes a hit: a write only where there is something new to note, so at most two between two looks of the policy.
    #[inline(always)]
    pub(crate) fn hit(&self) {
        let mark = self.load();
        if mark.is_marked_by_hit() {
            self.note(mark);
        }
    }

    #[inline(never)]
    fn note(&self, seen: Mark) {
        let noted = seen.with_uses(seen.uses() + 1);
        // Relaxed: a hint. One try: a hit that is lost to a race is not worth a second one.
        let _ = self.0.compare_exchange(seen.0, noted.0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Moves the mark from exactly what was seen.
    pub(super) fn replace(&self, seen: Mark, new: Mark) -> bool {
        // Release: what the slot weighed when its weight was noted; pairs with the Acquire in `weighed`. All else as in
        // `load`.
        self.0.compare_exchange(seen.0, new.0, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// The mark, for one who is to note what the slot weighs now.
    pub(super) fn weighed(&self) -> Mark {
        // Acquire: whoever sees a weight sees the value that it was noted for, or a later one, and does not put an older
        // weight in its place; pairs with the Release in `replace`.
        Mark(self.0.load(Ordering::Acquire))
    }

    /// Changes the mark as long as `change` wants to. Returns what was there, and `None` if it did not want to.
    pub(super) fn change(&self, change: impl Fn(Mark) -> Option<Mark>) -> Option<Mark> {
        loop {
            let seen = self.load();
            if self.replace(seen, change(seen)?) {
                return Some(seen);
            }
        }
    }

    /// The slot is out of the cache. Returns what the mark was.
    pub(super) fn leave(&self) -> Mark {
        // Relaxed: as in `load`. All bits of the place: `Gone`.
        Mark(self.0.fetch_or(PLACE, Ordering::Relaxed))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_part_has_bits_of_its_own() {
        let mark = Mark::new(Place::Small, 5, 0xabcd, u32::MAX);
        assert_eq!((mark.place(), mark.uses(), mark.ticket()), (Place::Small, 0, ticket_of(5)));
        assert_eq!((mark.stamp(), mark.weight()), (0xabcd, u32::MAX));
        let changed = mark.with_place(Place::Main).with_uses(2).with_stamp(1).with_weight(7);
        assert_eq!((changed.place(), changed.uses(), changed.ticket()), (Place::Main, 2, ticket_of(5)));
        assert_eq!((changed.stamp(), changed.weight()), (1, 7));
        assert_eq!(
            changed.with_place(Place::Small).with_uses(0).with_stamp(0xabcd).with_weight(u32::MAX),
            mark
        );
    }

    #[test]
    fn tickets_differ_whatever_the_weights_are() {
        for weight in [1, 64, 1 << 12, 1 << 20, 1 << 31] {
            let tickets: std::collections::HashSet<u64> =
                (0..64).map(|nth| ticket_of(nth * weight)).collect();
            assert!(tickets.len() > 60, "{} tickets of 64 at a weight of {weight}", tickets.len());
        }
    }

    #[test]
    fn a_hit_is_noted_twice_and_only_in_a_queue() {
        let word = MarkWord::new();
        word.hit();
        assert_eq!(word.load().uses(), 0, "it is in no queue, so nobody will look");
        for place in [Place::Small, Place::Main] {
            let word = MarkWord::new();
            assert!(word.replace(word.load(), Mark::new(place, 1, 2, 3)));
            (0..5).for_each(|_| word.hit());
            assert_eq!(word.load(), Mark::new(place, 1, 2, 3).with_uses(2));
            let was = word.leave();
            assert_eq!((was.place(), word.load().place()), (place, Place::Gone));
            word.hit();
            assert_eq!(word.leave(), was.with_place(Place::Gone));
        }
    }
}
