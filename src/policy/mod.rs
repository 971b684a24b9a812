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

mod audit;
mod decide;
mod ghost;
mod mark;
#[cfg(all(test, loom))]
mod models;
mod sketch;
#[cfg(all(test, not(loom)))]
mod tests;

pub(crate) use audit::Audited;
pub(crate) use mark::{Mark, MarkWord, Place};

use crate::primitive::Padded;
use crate::primitive::atomic;
use crate::primitive::epoch::Guard;
use crate::primitive::plain::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use crate::primitive::replaceable::Replaceable;
use crate::primitive::step::step;
use crate::queue::Queue;
use decide::{Lesson, Return, Scale, Victim};
use ghost::{Ghost, Trace};
use sketch::Sketch;

/// A capacity that is never reached.
pub(crate) const UNBOUNDED: u64 = u64::MAX;

/// Slots that one look at the end of a queue keeps at most, before the next one goes, used or not.
const KEPT: usize = if cfg!(loom) { 2 } else { 32 };
/// Slots in use that one look passes over, before it gives up; and as many eighths of all slots as may be in use.
const PASSED: usize = if cfg!(loom) { 2 } else { 64 };
/// Misses in a part between two looks at the number of slots.
const LOOK: u64 = 64;
/// Elements that a queue may have whatever the number of slots.
const LEAST_CROWD: usize = 64;
/// Elements that are looked at under one pin, where all are.
const BATCH: usize = 64;
/// How many pops ahead a slot is asked for, and a bucket.
const NEAR: usize = 2;
const FAR: usize = 6;
/// Entries to a part, about.
const PART: u64 = 1024;

/// An element of a queue: names a slot by its hash and the ticket of its life. In a candidate's register it has the slot's
/// stamp as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

    /// How many there are, about.
    fn len(&self) -> usize;

    /// Asks for the bucket of an item ahead, or, if `deep`, for its slot: the bucket is read then.
    fn prefetch(&self, item: Item, deep: bool);

    /// Takes the slot out of the cache, and reports that to [`Policy::leave`]. `false` if it is in use by now, or has gone
    /// already; that it has gone is reported then too, since whoever took it out may not have come to it yet.
    fn evict(&self, slot: Self::Slot) -> bool;
}

/// One pair of queues, and the numbers that change with each miss.
struct Part {
    small: Queue,
    main: Queue,
    tally: Padded<Tally>,
}

/// On one line, since they change together.
#[derive(Default)]
struct Tally {
    /// Weight in the small queue.
    small: AtomicU64,
    /// Weight of all misses.
    clock: AtomicU64,
    /// Weight of what has been dropped from the main queue.
    dropped: AtomicU64,
    /// Increments of the sketch.
    counted: AtomicU64,
    /// The victim of the main queue, once it has been found: an item, or zero. Whoever wants to drop it takes it out first.
    candidate: atomic::AtomicU64,
}

/// What is remembered of keys. Made anew for twice as many when there are more slots than it was made for.
struct Memory {
    entries: usize,
    sketch: Sketch,
    ghost: Ghost,
}

impl Memory {
    fn prefetch(&self, hash: u32) {
        let wide = spread(hash);
        self.sketch.prefetch(wide);
        self.ghost.prefetch(wide);
    }

    fn new(entries: usize) -> Self {
        Self { entries, sketch: Sketch::new(entries), ghost: Ghost::new(entries) }
    }

    /// What one for so many slots takes: half a byte for each counter, of which there are eight to a slot, and a trace.
    fn bytes(entries: usize) -> usize {
        entries * (4 + size_of::<AtomicU32>())
    }
}

/// The smallest memory.
const LEAST_ENTRIES: usize = 1024;

/// The policy of one cache.
pub(crate) struct Policy {
    capacity: AtomicU64,
    /// How long the small queues are to be, all together.
    target: AtomicU64,
    /// The most elements that a queue may have before it is tidied.
    crowd: AtomicUsize,
    memory: Replaceable<Memory>,
    parts: Box<[Part]>,
    /// The number of parts is two to the power of this.
    parts_shift: u32,
    /// Weight in the cache, and of what is about to come in: never below the truth.
    weight: Padded<AtomicU64>,
}

/// A key has been missed: where its slot is to enter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Admission {
    place: Place,
    clock: u64,
}

/// How far [`Policy::tidy`] has come.
#[derive(Default)]
pub(crate) struct Tidying {
    queue: usize,
    /// Elements of that queue that are to be looked at.
    left: usize,
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
        let parts_shift = (capacity / PART).checked_ilog2().unwrap_or(0).min(most_parts.ilog2());
        let part = |_| Part { small: Queue::new(), main: Queue::new(), tally: Padded::default() };
        Self {
            capacity: AtomicU64::new(capacity),
            target: AtomicU64::new(Scale::new(capacity).least_target()),
            crowd: AtomicUsize::new(LEAST_CROWD),
            memory: Replaceable::empty(),
            parts: (0..1 << parts_shift).map(part).collect(),
            parts_shift,
            weight: Padded::default(),
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

    /// Sets the limit, and returns what it was. The caller makes the room.
    pub(crate) fn set_capacity(&self, capacity: u64) -> u64 {
        // Relaxed: a setting.
        let old = self.capacity.swap(capacity, Ordering::Relaxed);
        let target = self.target.load(Ordering::Relaxed);
        let part = if old == UNBOUNDED { 0.0 } else { target as f64 / old.max(1) as f64 };
        let target = Scale::new(capacity).taught((part * capacity as f64) as u64, Lesson::None);
        self.target.store(target, Ordering::Relaxed);
        old
    }

    /// Weight in the cache, and of what is about to come in.
    pub(crate) fn weight(&self) -> u64 {
        // Relaxed: an estimate while others write.
        self.weight.0.load(Ordering::Relaxed)
    }

    /// Counts weight that is about to come in.
    pub(crate) fn charge(&self, weight: u64) {
        // Relaxed: a sum. It is counted before the CAS that lets it in, so the sum is never below the truth.
        self.weight.0.fetch_add(weight, Ordering::Relaxed);
    }

    /// Takes weight off that has gone, or has not come in.
    pub(crate) fn discharge(&self, weight: u64) {
        // Relaxed: as above.
        self.weight.0.fetch_sub(weight, Ordering::Relaxed);
    }

    /// Of the whole cache.
    fn scale(&self) -> Scale {
        Scale::new(self.capacity())
    }

    /// Of one part.
    fn part_scale(&self) -> Scale {
        Scale::new(self.capacity() >> self.parts_shift)
    }

    /// How long the small queue of a part is to be.
    fn target(&self) -> u64 {
        // Relaxed: a wish.
        self.target.load(Ordering::Relaxed) >> self.parts_shift
    }

    /// A count of misses or drops as a stamp.
    fn stamp(&self, count: u64) -> u16 {
        (count >> self.part_scale().stamp_shift()) as u16
    }

    /// How much a count has grown since it was stamped.
    fn since(&self, stamp: u16, count: u64) -> u64 {
        u64::from(self.stamp(count).wrapping_sub(stamp)) << self.part_scale().stamp_shift()
    }

    /// The part of a hash.
    fn part(&self, hash: u32) -> &Part {
        &self.parts[self.part_number(hash)]
    }

    fn part_number(&self, hash: u32) -> usize {
        hash as usize & (self.parts.len() - 1)
    }

    /// The memory, made when it is first asked for.
    fn memory<'g>(&self, guard: &'g Guard) -> &'g Memory {
        loop {
            match self.memory.get(guard) {
                Some(memory) => return memory,
                None => self.memory.replace(None, Memory::new(self.entries(0)), 0, guard),
            }
        }
    }

    /// For how many entries the memory is to be, when there are so many.
    fn entries(&self, live: usize) -> usize {
        let most = usize::try_from(self.capacity()).unwrap_or(usize::MAX).max(1);
        live.next_power_of_two().max(LEAST_ENTRIES).min(most)
    }

    /// What is to be seen to now and then: that the memory and the queues' limit go with the number of slots.
    fn look_around<S: Slots>(&self, slots: &S, guard: &Guard) {
        let live = slots.len();
        let (memory, entries) = (self.memory(guard), self.entries(live));
        if live > memory.entries && entries > memory.entries {
            let bytes = Memory::bytes(memory.entries);
            self.memory.replace(Some(memory), Memory::new(entries), bytes, guard);
        }
        let crowd = 2 * live / self.parts.len() + LEAST_CROWD;
        // Relaxed: a limit. It is written only if it changes much, since all read it.
        if crowd.abs_diff(self.crowd.load(Ordering::Relaxed)) > crowd / 8 {
            self.crowd.store(crowd, Ordering::Relaxed);
        }
    }

    /// Counts a request of a key in the sketch.
    fn count(&self, memory: &Memory, hash: u32) {
        memory.sketch.count(spread(hash));
        let number = self.part_number(hash);
        let counted = &self.parts[number].tally.0.counted;
        // Relaxed: a count; a step of the hand that is lost to a race comes later.
        let nth = counted.load(Ordering::Relaxed);
        counted.store(nth.wrapping_add(1), Ordering::Relaxed);
        let stride = memory.sketch.stride_shift;
        if nth & ((1 << stride) - 1) == 0 {
            memory.sketch.fade(((nth >> stride) as usize) << self.parts_shift | number);
        }
    }

    /// Asks for what the policy will read of a key that is about to come in.
    pub(crate) fn prefetch(&self, hash: u32, guard: &Guard) {
        if let Some(memory) = self.memory.get(guard) {
            memory.prefetch(hash);
        }
    }

    /// A key has been missed, and its slot is about to come in: learns from that, and decides where it enters.
    pub(crate) fn admit<S: Slots>(&self, slots: &S, hash: u32, weight: u32, guard: &Guard) -> Admission {
        let part = self.part(hash);
        // Relaxed: a count, and a source of tickets; a miss that is lost to a race does no harm.
        let clock = part.clock();
        part.tally.0.clock.store(clock.wrapping_add(u64::from(weight.max(1))), Ordering::Relaxed);
        if clock.is_multiple_of(LOOK) {
            self.look_around(slots, guard);
        }
        let place = self.entrance(slots, hash, clock, guard);
        self.shorten(slots, part, guard);
        Admission { place, clock }
    }

    /// The mark of a slot that enters.
    pub(crate) fn mark(&self, admission: Admission, weight: u32) -> Mark {
        Mark::new(admission.place, admission.clock, self.stamp(admission.clock), weight)
    }

    /// A slot has come in: lets it into its queue, unless it is in one, or has left.
    pub(crate) fn enter<S: Slots>(&self, slots: &S, word: &MarkWord, mark: Mark, hash: u32, guard: &Guard) {
        step();
        if word.change(|seen| (seen.place() == Place::Out).then_some(mark)).is_some() {
            step();
            self.entered(slots, mark, hash, guard);
        }
    }

    /// A slot has come in that has had its mark from the beginning.
    pub(crate) fn entered<S: Slots>(&self, slots: &S, mark: Mark, hash: u32, guard: &Guard) {
        let part = self.part(hash);
        let queue = if mark.place() == Place::Small {
            part.small_grows(mark.weight());
            &part.small
        } else {
            &part.main
        };
        step();
        self.push(slots, queue, Item::new(hash, mark), guard);
    }

    /// A slot in a queue holds something else now.
    pub(crate) fn reweigh(&self, mark: &MarkWord, hash: u32, weight: impl Fn() -> u32) {
        loop {
            let seen = mark.weighed();
            let weight = weight();
            if !seen.is_queued() || seen.weight() == weight {
                return;
            }
            step();
            if mark.replace(seen, seen.with_weight(weight)) && seen.place() == Place::Small {
                self.part(hash).small_grows(weight);
                self.part(hash).small_shrinks(seen.weight());
            }
            // Another writer may have come between: look again.
        }
    }

    /// A slot has been taken out of the cache, whyever. Its element is dropped when somebody comes by it.
    pub(crate) fn leave(&self, mark: &MarkWord, hash: u32) {
        let was = mark.leave();
        step();
        if was.place() == Place::Small {
            self.part(hash).small_shrinks(was.weight());
        }
    }

    /// Takes elements whose slots have gone out of the queues that have many of them, a batch at a time. `false` at the end.
    /// What is there comes out and goes in again, and so keeps its order.
    pub(crate) fn tidy<S: Slots>(&self, slots: &S, tidying: &mut Tidying, guard: &Guard) -> bool {
        let Tidying { queue: nth, left } = tidying;
        let Some(part) = self.parts.get(*nth / 2) else { return false };
        let queue = if nth.is_multiple_of(2) { &part.small } else { &part.main };
        if *left == 0 {
            let (crowd, enough) = (queue.len(guard), slots.len() / self.parts.len() + LEAST_CROWD);
            if crowd <= enough + enough / 4 {
                *nth += 1;
                return true;
            }
            *left = crowd;
        }
        for _ in 0..(*left).min(BATCH) {
            *left -= 1;
            let Some(old) = queue.pop(guard) else { break };
            step();
            if slots.find(Item(old)).is_some() {
                queue.push(old, guard);
            }
        }
        if *left == 0 {
            *nth += 1;
        }
        true
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
        let (part, wide) = (self.part(hash), spread(hash));
        self.count(memory, hash);
        let Some(Trace { from, stamp }) = memory.ghost.take(wide) else { return Place::Small };
        // Relaxed: a count.
        let dropped = part.tally.0.dropped.load(Ordering::Relaxed);
        let distance = self.since(stamp, if from == Place::Main { dropped } else { clock });
        let lesson = decide::lesson(from, distance, part.small(), self.part_scale());
        if lesson != Lesson::None {
            // Relaxed: a wish; a lesson that is lost to a race comes again.
            let target = self.target.load(Ordering::Relaxed);
            self.target.store(self.scale().taught(target, lesson), Ordering::Relaxed);
        }
        let victim = match self.candidate(slots, part, guard) {
            Candidate::Victim(item) => Some(self.victim(memory, part, item)),
            Candidate::Expired | Candidate::Nothing => None,
        };
        let key = Return { estimate: memory.sketch.estimate(wide), distance };
        decide::entrance(from, lesson, key, victim)
    }

    fn victim(&self, memory: &Memory, part: &Part, item: Item) -> Victim {
        Victim {
            estimate: memory.sketch.estimate(spread(item.hash())),
            idle: self.since(item.stamp(), part.clock()),
        }
    }

    /// Moves what the small queue has too much of to the main queue.
    fn shorten<S: Slots>(&self, slots: &S, part: &Part, guard: &Guard) {
        for _ in 0..2 {
            if part.small() <= self.target().saturating_add(1) {
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
            // Of two slots with the same item, it may be the one that is in the main queue by its place.
            oldest.item.means(seen).then_some(if afresh { mark.with_uses(0) } else { mark })
        });
        if let Some(was) = moved {
            if was.place() == Place::Small {
                part.small_shrinks(was.weight());
            }
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
            && part.small() < self.target()
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
            self.count(memory, oldest.item.hash());
        }
        if let Some(item) = candidate
            && decide::outlives(estimate, uses, self.victim(memory, part, item))
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
        step();
        // Acquire: the slot and its mark, as whoever took the element out of the queue found them, else the slot seems gone
        // to one who has not seen it enter; pairs with the Release in `candidate`.
        if part.tally.0.candidate.compare_exchange(item.0, 0, Ordering::Acquire, Ordering::Relaxed).is_err() {
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
        // Relaxed: a count; one that is lost to a race does no harm.
        let count = &part.tally.0.dropped;
        let dropped = count.load(Ordering::Relaxed).wrapping_add(mark.weight().max(1).into());
        count.store(dropped, Ordering::Relaxed);
        let trace = Trace { from: Place::Main, stamp: self.stamp(dropped) };
        self.drop_slot(slots, &part.main, &oldest, trace, self.memory(guard), guard)
    }

    /// Lets a used slot of the main queue go round once more.
    fn keep<S: Slots>(&self, slots: &S, part: &Part, oldest: &Oldest<S::Slot>, guard: &Guard) {
        let stamp = self.stamp(part.clock());
        let kept = slots.mark(oldest.slot).change(|seen| {
            let uses = seen.uses().saturating_sub(1);
            oldest.item.means(seen).then_some(seen.with_uses(uses).with_stamp(stamp))
        });
        if kept.is_some() {
            self.count(self.memory(guard), oldest.item.hash());
            step();
            self.push(slots, &part.main, oldest.item, guard);
        }
    }

    /// The main queue's victim, which stays in the register until somebody drops it.
    fn candidate<S: Slots>(&self, slots: &S, part: &Part, guard: &Guard) -> Candidate {
        let register = &part.tally.0.candidate;
        let mut kept = 0;
        loop {
            // Relaxed: an integer, of which only the estimate is asked; whoever drops it takes it out first.
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
            step();
            // Release: the slot and its mark; pairs with the Acquire in `drop_candidate`. Relaxed failure: as above.
            if register.compare_exchange(0, item.0, Ordering::Release, Ordering::Relaxed).is_ok() {
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
            self.look_ahead(slots, queue, guard);
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
            if passed >= PASSED && passed >= slots.len() / 8 {
                break;
            }
        }
        Look::Nothing
    }

    /// Asks for what the next pops of a queue will read: of the element that is next but one its slot and what is remembered
    /// of its key, of one that is farther away its bucket, by which the slot is found.
    fn look_ahead<S: Slots>(&self, slots: &S, queue: &Queue, guard: &Guard) {
        if let Some(far) = queue.peek(FAR, guard) {
            slots.prefetch(Item(far), false);
        }
        if let Some(near) = queue.peek(NEAR, guard) {
            slots.prefetch(Item(near), true);
            self.prefetch(Item(near).hash(), guard);
        }
    }

    /// Puts an element into a queue. If that is full of elements whose slots have gone, takes two out first.
    fn push<S: Slots>(&self, slots: &S, queue: &Queue, item: Item, guard: &Guard) {
        // Relaxed: a limit.
        if queue.len(guard) > self.crowd.load(Ordering::Relaxed) {
            self.look_around(slots, guard);
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

impl Part {
    fn small(&self) -> u64 {
        // Relaxed: a sum. It is changed after the mark, so it may be off for a moment, and below zero.
        let small = self.tally.0.small.load(Ordering::Relaxed);
        if small.cast_signed() < 0 { 0 } else { small }
    }

    fn small_grows(&self, weight: u32) {
        // Relaxed: a sum, see INV-mark-2.
        self.tally.0.small.fetch_add(weight.into(), Ordering::Relaxed);
    }

    fn small_shrinks(&self, weight: u32) {
        // Relaxed: a sum, see INV-mark-2.
        self.tally.0.small.fetch_sub(weight.into(), Ordering::Relaxed);
    }

    fn clock(&self) -> u64 {
        // Relaxed: a count.
        self.tally.0.clock.load(Ordering::Relaxed)
    }
}
