//! Which slot goes next.
//!
//! ```text
//!            new keys            kept after a look                  dropped: the trace of a key stays in the ghost
//!   miss ──► [ small queue ] ──────────► [ main queue ] ─┐
//!     └───────────────────────────────►   ▲   │ oldest   │
//!        a key that returns               └───┘ used     ▼
//!                                        since: kept   victim ──► dropped, or the small queue's oldest is
//! ```
//! Two FIFO queues. New keys enter the small one; its oldest slot moves to the main queue if it is worth more than what
//! that would drop for it, and goes otherwise. The main queue's oldest slot goes round again while it has been used since it
//! was looked at last (CLOCK). Worth is the estimate of a [sketch](sketch) of all misses, and of hits only as far as a slot's
//! mark remembers them: a hit writes two bits of the slot's own word, and only if they change. How long the small queue is
//! to be is learned from the keys that return after they were dropped, of which the [ghost](ghost) keeps a trace.
//!
//! The decisions are pure functions, in [`decide`]. The rest is plain atomics: an increment, a trace or a lesson that is
//! lost to a race costs nothing visible. What must not be lost is in [`mark`] and in the queues of integers.
//!
//! The queues are split into parts, so that threads do not meet at their ends; the wished length, the sketch and the ghost are
//! common to all. Each eviction is done by the thread that needs the room, and is bounded: after a number of slots that are
//! used, or in use, the next one goes or the thread gives up. A thread that is suspended holds one slot back at most.
//!
//! Sources: S3-FIFO (Yang, Zhang, Qiu, Yue and Rashmi, SOSP 2023) for the two queues and the ghost, ARC (Megiddo and Modha,
//! FAST 2003) for the learning, TinyLFU and LIRS as named in the modules.

mod decide;
mod ghost;
mod mark;
mod sketch;

pub(crate) use mark::{Mark, MarkWord, Place};

use crate::primitive::Padded;
use crate::primitive::epoch::Guard;
use crate::primitive::plain::{AtomicU64, AtomicUsize, Ordering};
use crate::primitive::replaceable::Replaceable;
use crate::primitive::step::step;
use crate::queue::Queue;
use decide::{Lesson, Return, Scale, Victim};
use ghost::{Ghost, Trace};
use sketch::Sketch;

/// A capacity that is never reached.
pub(crate) const UNBOUNDED: u64 = u64::MAX;

/// Slots that one look at the end of a queue keeps at most, before the next one goes, used or not.
const KEPT: usize = 32;
/// Slots in use that one look passes over, before it gives up; and as many eighths of all slots as may be in use.
const PASSED: usize = 64;
/// Entries to a part, about.
const PART: u64 = 1024;

/// An element of a queue: names a slot by its hash and the ticket of its life. In a candidate's register it has the slot's
/// stamp as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Item(u64);

impl Item {
    const TICKET_AT: u32 = 32;
    const STAMP_AT: u32 = 44;
    /// Set in each item, so that none is zero; the bit above is never set, so that none is all ones.
    const ALWAYS: u64 = 1 << 62;

    fn new(hash: u32, mark: Mark) -> Self {
        Self(Self::ALWAYS | u64::from(hash) | mark.ticket() << Self::TICKET_AT)
    }

    /// The upper half of the key's hash.
    pub(crate) fn hash(self) -> u32 {
        self.0 as u32
    }

    /// Whether a slot with this mark is in the life that is meant, and in a queue.
    pub(crate) fn means(self, mark: Mark) -> bool {
        mark.is_queued() && self.0 >> Self::TICKET_AT & (mark::TICKETS - 1) == mark.ticket()
    }

    fn stamped(self, mark: Mark) -> Self {
        Self(self.0 | u64::from(mark.stamp()) << Self::STAMP_AT)
    }

    fn stamp(self) -> u16 {
        (self.0 >> Self::STAMP_AT) as u16
    }

    fn bare(self) -> Self {
        Self(self.0 & !(u64::from(u16::MAX) << Self::STAMP_AT))
    }
}

/// Spreads the half of a hash that slots remember over a whole word again.
fn spread(hash: u32) -> u64 {
    let wide = u64::from(hash).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (wide ^ wide >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ wide >> 32
}

/// Which of `shares` equal shares a spread hash falls into, by its upper half: any number of them will do.
fn share_of(hash: u64, shares: usize) -> usize {
    (((hash >> 32) * shares as u64) >> 32) as usize
}

/// How a slot stands with regard to eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It may go.
    Free,
    /// A load of it is under way, or it must stay for another reason.
    InUse,
    /// It has expired: it goes before any other.
    Spent,
}

/// The slots, as the policy sees them.
pub(crate) trait Slots {
    /// A handle to a slot.
    type Slot: Copy;

    /// The slot that an item [means](Item::means), if it is still there.
    fn find(&self, item: Item) -> Option<Self::Slot>;

    /// The slot's mark.
    fn mark(&self, slot: Self::Slot) -> &MarkWord;

    /// How the slot stands.
    fn standing(&self, slot: Self::Slot) -> Standing;

    /// Takes the slot out of the cache, and reports that to [`Policy::leave`]. `false` if it is in use by now, or has gone
    /// already.
    fn evict(&self, slot: Self::Slot) -> bool;
}

/// One pair of queues.
struct Part {
    small: Queue,
    main: Queue,
    /// The victim of the main queue, once it has been found: an item, or zero. Whoever wants to drop it takes it out first.
    candidate: Padded<AtomicU64>,
}

/// Numbers that change with each miss, on one line, since they change together.
#[derive(Default)]
struct Tally {
    /// Weight in the cache, and of what is about to come in: never below the truth.
    weight: AtomicU64,
    /// Weight in the small queues.
    small: AtomicU64,
    /// Slots in the queues.
    population: AtomicUsize,
    /// Weight of all misses.
    clock: AtomicU64,
    /// Weight of what has been dropped from the main queues.
    dropped: AtomicU64,
}

/// What is remembered of keys. Made anew for twice as many when there are more slots than it was made for.
struct Memory {
    entries: usize,
    sketch: Sketch,
    ghost: Ghost,
}

impl Memory {
    fn new(entries: usize) -> Self {
        Self { entries, sketch: Sketch::new(entries), ghost: Ghost::new(entries) }
    }
}

/// The smallest memory.
const LEAST_ENTRIES: usize = 1024;

/// The policy of one cache.
pub(crate) struct Policy {
    capacity: AtomicU64,
    /// How long the small queues are to be, all together.
    target: AtomicU64,
    memory: Replaceable<Memory>,
    parts: Box<[Part]>,
    tally: Padded<Tally>,
}

/// What an attempt to make room came to.
enum Attempt {
    /// Something has gone.
    Done,
    /// Not this time, but something has changed.
    Again,
    /// There is nothing to drop.
    Nothing,
}

/// The oldest slot of a queue, in the caller's hands (INV-mark-1).
struct Oldest<S> {
    item: Item,
    slot: S,
    mark: Mark,
}

/// What a look at the old end of a queue came to.
enum Look<S> {
    Oldest(Oldest<S>),
    /// It had expired, and is gone.
    Expired,
    Nothing,
}

/// What the main queue would drop.
enum Candidate {
    /// The item is in the register.
    Victim(Item),
    /// It had expired, and is gone.
    Expired,
    Nothing,
}

impl Policy {
    /// With up to `most_parts` pairs of queues, a power of two. A small cache has one.
    pub(crate) fn new(capacity: u64, most_parts: usize) -> Self {
        let parts = (capacity / PART).checked_ilog2().map_or(1, |bits| 1 << bits.min(16)).min(most_parts);
        let part = |_| Part { small: Queue::new(), main: Queue::new(), candidate: Padded::default() };
        Self {
            capacity: AtomicU64::new(capacity),
            target: AtomicU64::new(Scale::new(capacity).least_target()),
            memory: Replaceable::empty(),
            parts: (0..parts).map(part).collect(),
            tally: Padded::default(),
        }
    }

    pub(crate) fn capacity(&self) -> u64 {
        // Relaxed: a setting.
        self.capacity.load(Ordering::Relaxed)
    }

    /// Whether there is a limit at all: without one nothing enters a queue.
    pub(crate) fn is_bounded(&self) -> bool {
        self.capacity() != UNBOUNDED
    }

    /// Sets the limit. The caller makes the room.
    pub(crate) fn set_capacity(&self, capacity: u64) {
        // Relaxed: a setting.
        let old = self.capacity.swap(capacity, Ordering::Relaxed);
        let target = self.target.load(Ordering::Relaxed);
        let part = if old == UNBOUNDED { 0.0 } else { target as f64 / old.max(1) as f64 };
        let target = Scale::new(capacity).taught((part * capacity as f64) as u64, Lesson::None);
        self.target.store(target, Ordering::Relaxed);
    }

    /// Weight in the cache, and of what is about to come in.
    pub(crate) fn weight(&self) -> u64 {
        // Relaxed: an estimate while others write.
        self.tally.0.weight.load(Ordering::Relaxed)
    }

    /// Slots in the queues.
    pub(crate) fn population(&self) -> usize {
        // Relaxed: as above.
        self.tally.0.population.load(Ordering::Relaxed)
    }

    /// Whether the cache holds more than it may.
    pub(crate) fn is_over(&self) -> bool {
        self.weight() > self.capacity()
    }

    /// Counts weight that is about to come in.
    pub(crate) fn charge(&self, weight: u32) {
        // Relaxed: a sum. It is counted before the CAS that lets it in, so the sum is never below the truth.
        self.tally.0.weight.fetch_add(weight.into(), Ordering::Relaxed);
    }

    /// Takes weight off that has gone, or has not come in.
    pub(crate) fn discharge(&self, weight: u32) {
        // Relaxed: as above.
        self.tally.0.weight.fetch_sub(weight.into(), Ordering::Relaxed);
    }

    fn scale(&self) -> Scale {
        Scale::new(self.capacity())
    }

    fn small(&self) -> u64 {
        // Relaxed: a sum. It is changed after the mark, so it may be below the truth for a moment, and below zero.
        let small = self.tally.0.small.load(Ordering::Relaxed);
        if small.cast_signed() < 0 { 0 } else { small }
    }

    fn target(&self) -> u64 {
        // Relaxed: a wish.
        self.target.load(Ordering::Relaxed)
    }

    /// A count of misses or drops as a stamp.
    fn stamp(&self, count: u64) -> u16 {
        (count >> self.scale().stamp_shift()) as u16
    }

    /// How much a count has grown since it was stamped.
    fn since(&self, stamp: u16, count: u64) -> u64 {
        u64::from(self.stamp(count).wrapping_sub(stamp)) << self.scale().stamp_shift()
    }

    fn clock(&self) -> u64 {
        // Relaxed: a count.
        self.tally.0.clock.load(Ordering::Relaxed)
    }

    /// The part of a hash.
    fn part(&self, hash: u32) -> &Part {
        &self.parts[hash as usize & (self.parts.len() - 1)]
    }

    /// The memory; made, or made anew, if there is none for so many slots.
    fn memory<'g>(&self, guard: &'g Guard) -> &'g Memory {
        loop {
            let memory = self.memory.get(guard);
            let population = self.population();
            match memory {
                Some(memory) if population <= memory.entries => return memory,
                _ => {
                    let most = usize::try_from(self.capacity()).unwrap_or(usize::MAX).max(1);
                    let entries = population.next_power_of_two().max(LEAST_ENTRIES).min(most);
                    if let Some(memory) = memory
                        && entries <= memory.entries
                    {
                        return memory;
                    }
                    self.memory.replace(memory, Memory::new(entries), guard);
                }
            }
        }
    }

    /// A slot has come into the cache, and holds `weight`: decides where it enters, makes room for it, and lets it in.
    pub(crate) fn enter<S: Slots>(&self, slots: &S, mark: &MarkWord, hash: u32, weight: u32, guard: &Guard) {
        // Relaxed: a count, and a source of tickets.
        let clock = self.tally.0.clock.fetch_add(u64::from(weight.max(1)), Ordering::Relaxed);
        let place = self.entrance(slots, hash, clock, guard);
        let part = self.part(hash);
        self.shorten(slots, part, guard);
        self.make_room(slots, hash, guard);
        let entered = Mark::new(place, clock, self.stamp(clock), weight);
        step();
        if mark.change(|seen| (seen.place() == Place::Out).then_some(entered)).is_none() {
            return;
        }
        // Relaxed: sums, see INV-mark-2.
        self.tally.0.population.fetch_add(1, Ordering::Relaxed);
        let queue = if place == Place::Small {
            self.tally.0.small.fetch_add(weight.into(), Ordering::Relaxed);
            &part.small
        } else {
            &part.main
        };
        step();
        self.push(slots, queue, Item::new(hash, entered), guard);
    }

    /// A slot in a queue holds something else now.
    pub(crate) fn reweigh(&self, mark: &MarkWord, weight: impl Fn() -> u32) {
        loop {
            let seen = mark.load();
            let weight = weight();
            if !seen.is_queued() || seen.weight() == weight {
                return;
            }
            if mark.replace(seen, seen.with_weight(weight)) && seen.place() == Place::Small {
                let more = u64::from(weight).wrapping_sub(seen.weight().into());
                // Relaxed: a sum, see INV-mark-2.
                self.tally.0.small.fetch_add(more, Ordering::Relaxed);
            }
            // Another writer may have come between: look again.
        }
    }

    /// A slot has been taken out of the cache, whyever. Its element is dropped when somebody comes by it.
    pub(crate) fn leave(&self, mark: &MarkWord) {
        let was = mark.leave();
        if was.is_queued() {
            // Relaxed: sums, see INV-mark-2.
            self.tally.0.population.fetch_sub(1, Ordering::Relaxed);
            if was.place() == Place::Small {
                self.tally.0.small.fetch_sub(was.weight().into(), Ordering::Relaxed);
            }
        }
    }

    /// Drops slots until the cache holds no more than it may, or nothing is left that may go. `hash` chooses where to begin.
    pub(crate) fn make_room<S: Slots>(&self, slots: &S, hash: u32, guard: &Guard) {
        while self.is_over() && self.drop_one(slots, hash, guard) {}
    }

    /// Drops one slot, from the part of this hash, or else from any other. `false` if nothing may go.
    pub(crate) fn drop_one<S: Slots>(&self, slots: &S, hash: u32, guard: &Guard) -> bool {
        let own = std::iter::once(self.part(hash));
        own.chain(&self.parts).any(|part| {
            loop {
                match self.drop_from(slots, part, guard) {
                    Attempt::Done => return true,
                    Attempt::Again => {}
                    Attempt::Nothing => return false,
                }
            }
        })
    }

    /// Counts a miss, learns from it, and decides which queue the key enters.
    fn entrance<S: Slots>(&self, slots: &S, hash: u32, clock: u64, guard: &Guard) -> Place {
        let memory = self.memory(guard);
        let wide = spread(hash);
        memory.sketch.count(wide);
        let Some(Trace { from, stamp }) = memory.ghost.take(wide) else { return Place::Small };
        // Relaxed: a count.
        let dropped = self.tally.0.dropped.load(Ordering::Relaxed);
        let distance = self.since(stamp, if from == Place::Main { dropped } else { clock });
        let lesson = decide::lesson(from, distance, self.small(), self.scale());
        if lesson != Lesson::None {
            // Relaxed: a wish; a lesson that is lost to a race comes again.
            self.target.store(self.scale().taught(self.target(), lesson), Ordering::Relaxed);
        }
        let victim = match self.candidate(slots, self.part(hash), guard) {
            Candidate::Victim(item) => Some(self.victim(memory, item)),
            Candidate::Expired | Candidate::Nothing => None,
        };
        let key = Return { estimate: memory.sketch.estimate(wide), distance };
        decide::entrance(from, lesson, key, victim)
    }

    fn victim(&self, memory: &Memory, item: Item) -> Victim {
        Victim {
            estimate: memory.sketch.estimate(spread(item.hash())),
            idle: self.since(item.stamp(), self.clock()),
        }
    }

    /// Moves what the small queue has too much of to the main queue.
    fn shorten<S: Slots>(&self, slots: &S, part: &Part, guard: &Guard) {
        for _ in 0..2 {
            if self.small() <= self.target().saturating_add(1) {
                return;
            }
            let Look::Oldest(oldest) = self.oldest(slots, &part.small, guard) else { return };
            self.promote(slots, part, &oldest, false, guard);
        }
    }

    /// Moves a slot from the small queue to the main one.
    fn promote<S: Slots>(
        &self,
        slots: &S,
        part: &Part,
        oldest: &Oldest<S::Slot>,
        afresh: bool,
        guard: &Guard,
    ) {
        let moved = slots.mark(oldest.slot).change(|seen| {
            let mark = seen.with_place(Place::Main);
            (seen.place() == Place::Small).then_some(if afresh { mark.with_uses(0) } else { mark })
        });
        if let Some(was) = moved {
            // Relaxed: a sum, see INV-mark-2.
            self.tally.0.small.fetch_sub(was.weight().into(), Ordering::Relaxed);
            step();
            self.push(slots, &part.main, oldest.item, guard);
        }
    }

    /// Drops one slot of a part, as the lengths of the queues demand.
    fn drop_from<S: Slots>(&self, slots: &S, part: &Part, guard: &Guard) -> Attempt {
        let candidate = match self.candidate(slots, part, guard) {
            Candidate::Victim(item) => Some(item),
            Candidate::Expired => return Attempt::Done,
            Candidate::Nothing => None,
        };
        if let Some(item) = candidate
            && self.small() < self.target()
        {
            return self.drop_candidate(slots, part, item, guard);
        }
        let oldest = match self.oldest(slots, &part.small, guard) {
            Look::Oldest(oldest) => oldest,
            Look::Expired => return Attempt::Done,
            Look::Nothing => {
                return candidate
                    .map_or(Attempt::Nothing, |item| self.drop_candidate(slots, part, item, guard));
            }
        };
        let memory = self.memory(guard);
        let (wide, uses) = (spread(oldest.item.hash()), oldest.mark.uses());
        let estimate = memory.sketch.estimate(wide) + uses;
        for _ in 0..uses {
            memory.sketch.count(wide);
        }
        if let Some(item) = candidate
            && decide::outlives(estimate, uses, self.victim(memory, item))
        {
            self.promote(slots, part, &oldest, true, guard);
            return self.drop_candidate(slots, part, item, guard);
        }
        let trace = Trace { from: Place::Small, stamp: oldest.mark.stamp() };
        self.drop_slot(slots, &part.small, &oldest, trace, memory, guard)
    }

    /// Takes a slot out of the cache, and remembers its key; or puts it back if it is in use by now.
    fn drop_slot<S: Slots>(
        &self,
        slots: &S,
        queue: &Queue,
        oldest: &Oldest<S::Slot>,
        trace: Trace,
        memory: &Memory,
        guard: &Guard,
    ) -> Attempt {
        step();
        if slots.evict(oldest.slot) {
            memory.ghost.remember(spread(oldest.item.hash()), trace);
            return Attempt::Done;
        }
        if oldest.item.means(slots.mark(oldest.slot).load()) {
            self.push(slots, queue, oldest.item, guard);
        }
        Attempt::Again
    }

    /// Drops the main queue's victim, which was found in the register.
    fn drop_candidate<S: Slots>(&self, slots: &S, part: &Part, item: Item, guard: &Guard) -> Attempt {
        // Relaxed: an integer; the slot that it names is found in the table.
        if part.candidate.0.compare_exchange(item.0, 0, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return Attempt::Again;
        }
        step();
        let item = item.bare();
        let Some(slot) = slots.find(item) else { return Attempt::Again };
        let mark = slots.mark(slot).load();
        let oldest = Oldest { item, slot, mark };
        match slots.standing(slot) {
            Standing::InUse => {
                self.push(slots, &part.main, item, guard);
                return Attempt::Again;
            }
            Standing::Free if mark.uses() > 0 => {
                self.keep(slots, part, &oldest, guard);
                return Attempt::Again;
            }
            Standing::Spent if slots.evict(slot) => return Attempt::Done,
            Standing::Free | Standing::Spent => {}
        }
        // Relaxed: a count.
        let weight = u64::from(mark.weight().max(1));
        let dropped = self.tally.0.dropped.fetch_add(weight, Ordering::Relaxed) + weight;
        let trace = Trace { from: Place::Main, stamp: self.stamp(dropped) };
        self.drop_slot(slots, &part.main, &oldest, trace, self.memory(guard), guard)
    }

    /// Lets a used slot of the main queue go round once more.
    fn keep<S: Slots>(&self, slots: &S, part: &Part, oldest: &Oldest<S::Slot>, guard: &Guard) {
        let stamp = self.stamp(self.clock());
        let kept = slots.mark(oldest.slot).change(|seen| {
            let uses = seen.uses().saturating_sub(1);
            oldest.item.means(seen).then_some(seen.with_uses(uses).with_stamp(stamp))
        });
        if kept.is_some() {
            self.memory(guard).sketch.count(spread(oldest.item.hash()));
            step();
            self.push(slots, &part.main, oldest.item, guard);
        }
    }

    /// The main queue's victim, which stays in the register until somebody drops it.
    fn candidate<S: Slots>(&self, slots: &S, part: &Part, guard: &Guard) -> Candidate {
        let register = &part.candidate.0;
        let mut kept = 0;
        loop {
            // Relaxed: as in `drop_candidate`.
            let there = register.load(Ordering::Relaxed);
            if there != 0 {
                return Candidate::Victim(Item(there));
            }
            let oldest = match self.oldest(slots, &part.main, guard) {
                Look::Oldest(oldest) => oldest,
                Look::Expired => return Candidate::Expired,
                Look::Nothing => return Candidate::Nothing,
            };
            if oldest.mark.uses() > 0 && kept < KEPT {
                kept += 1;
                self.keep(slots, part, &oldest, guard);
                continue;
            }
            let item = oldest.item.stamped(oldest.mark);
            // Relaxed: as above.
            if register.compare_exchange(0, item.0, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return Candidate::Victim(item);
            }
            self.push(slots, &part.main, oldest.item, guard);
        }
    }

    /// Takes the oldest slot out of a queue, passing over what is in use.
    fn oldest<S: Slots>(&self, slots: &S, queue: &Queue, guard: &Guard) -> Look<S::Slot> {
        let mut passed = 0;
        while let Some(item) = queue.pop(guard) {
            let item = Item(item);
            step();
            let Some(slot) = slots.find(item) else { continue };
            let mark = slots.mark(slot).load();
            match slots.standing(slot) {
                Standing::Free => return Look::Oldest(Oldest { item, slot, mark }),
                Standing::Spent if slots.evict(slot) => return Look::Expired,
                Standing::Spent | Standing::InUse => {}
            }
            if item.means(slots.mark(slot).load()) {
                queue.push(item.0, guard);
            }
            passed += 1;
            if passed == PASSED + self.population() / 8 {
                break;
            }
        }
        Look::Nothing
    }

    /// Puts an element into a queue. If that is full of elements whose slots have gone, takes two out first.
    fn push<S: Slots>(&self, slots: &S, queue: &Queue, item: Item, guard: &Guard) {
        if queue.len(guard) > 2 * self.population() + 64 {
            for _ in 0..2 {
                if let Some(old) = queue.pop(guard)
                    && slots.find(Item(old)).is_some()
                {
                    queue.push(old, guard);
                }
            }
        }
        queue.push(item.0, guard);
    }
}
