//! A slot: a key's place in the cache, with the one word that decides who loads and whose result counts.
//!
//! # States
//! ```text
//!                claim                       publish, fail
//!   Ready(held) ───────► Loading(flight, held) ───────────► Ready(new)
//!        ▲                  │   ▲      │
//!        └──── abandon ─────┘   └──────┘ take over            any ── kill ──► Dead (terminal: unlinked, or about to be)
//! ```
//! Everything that begins, ends or replaces a load is one CAS of the slot word from exactly what was seen. There is
//! no token and no generation: the flight's address, kept alive by its lease, is its identity.
//!
//! | tag | word |
//! |---|---|
//! | `CELL` | pointer to a cell: `Ready` with a value; null only as a `Held` |
//! | `RECORD` | pointer to a record: `Ready` with a remembered failure |
//! | `FLIGHT` | pointer to a flight, which says in `prev` what was there: `Loading` |
//! | `DEAD` | `Dead`: null, or the slot's own room if a value has stayed there |
//!
//! # Invariants
//! - `INV-slot-1`: the slot owns its cell and record, also while they are a flight's `prev`. The winner of the CAS
//!   after which neither the slot nor its flight leads to them retires them.
//! - `INV-slot-2`: what is read from the word under a pin lives as long as the pin, since it is retired only after
//!   the word has left it. So is the slot's share of a flight: whoever read `Loading` may count itself in.
//! - `INV-slot-3`: slots are counted. The table's share is given back through retire, so a slot found under a pin
//!   has a count above zero while the pin lasts. A lease has a share of its own, and needs no pin for its CAS.
//! - `INV-slot-4`: the slot's own room (`first`) is written once: by the inserter of a new slot before it is linked,
//!   or by the slot's first flight. A value in the room weighs what values usually weigh; each other one is in a box,
//!   with its weight. When a value that is in the room is replaced, it is retired, with a share of the slot; when its slot
//!   dies and only the table has a share, it stays, and goes with the slot: the word says so.
//! - `INV-slot-5`: a cell's times never change.

use crate::clock::Moment;
use crate::error::LoadError;
use crate::flight::{self, Load, Ticket, Waits};
use crate::hash::{half_of, whole_of};
use crate::policy::MarkWord;
use crate::primitive::atomic::{AtomicPtr, AtomicU32, Ordering};
use crate::primitive::epoch::{Guard, contain, exclusive, retire};
use crate::primitive::plain::{AtomicU32 as PlainU32, AtomicU64};
use crate::primitive::step::step;
use crate::primitive::{Arc, Witness, exposed, owner};
use crate::table::Linked;
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr::{NonNull, null_mut};

mod birth;
mod held;
#[cfg(all(test, loom))]
mod models;
mod removed;

pub(crate) use birth::{NewCell, Unborn, bury_all};
use held::Record;
pub(crate) use held::{Cell, Held, HeldWord, Pause, USUAL_WEIGHT, Weighed};
pub(crate) use removed::{Removed, Taken};

const CELL: usize = 0;
const RECORD: usize = 1;
const FLIGHT: usize = 2;
const DEAD: usize = 3;
const TAGS: usize = 3;

fn tagged(pointer: *mut (), tag: usize) -> *mut () {
    pointer.map_addr(|a| a | tag)
}

fn untagged(word: *mut ()) -> *mut () {
    word.map_addr(|a| a & !TAGS)
}

/// The flights of slots.
pub(crate) type Flight<K, V> = flight::Flight<V, SlotRef<K, V>, HeldWord<V>>;

/// A follower's place in a slot's flight.
pub(crate) type SlotTicket<K, V> = Ticket<V, SlotRef<K, V>, HeldWord<V>>;

/// The load of a slot's flight, if it is a future.
pub(crate) type SlotLoad<K, V> = Load<V, SlotRef<K, V>, HeldWord<V>>;

/// What a slot word says, readable for `'g`. It remembers the word: a CAS starts from exactly what was seen.
pub(crate) enum State<'g, K, V> {
    Ready(Held<'g, V>),
    Loading(&'g Flight<K, V>),
    Dead,
}

impl<K, V> Clone for State<'_, K, V> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<K, V> Copy for State<'_, K, V> {}

impl<'g, K, V> State<'g, K, V> {
    fn raw(self) -> *mut () {
        match self {
            Self::Ready(held) => held.raw(),
            Self::Loading(flight) => loading(flight),
            // Never swung from: it is terminal.
            Self::Dead => tagged(null_mut(), DEAD),
        }
    }

    /// What is there beside a load.
    pub(crate) fn held(self) -> Held<'g, V> {
        match self {
            Self::Ready(held) => held,
            // SAFETY: INV-flight-3: the flight was read from its slot under a pin that lasts for `'g`.
            Self::Loading(flight) => unsafe { Held::new(flight.prev.0) },
            Self::Dead => Held::nothing(),
        }
    }
}

fn loading<K, V>(flight: &Flight<K, V>) -> *mut () {
    tagged(std::ptr::from_ref(flight).cast_mut().cast(), FLIGHT)
}

/// The word that gives a share of a flight to a slot.
fn loading_word<K, V>(flight: Arc<Flight<K, V>>) -> *mut () {
    tagged(exposed(Arc::into_raw(flight).cast_mut()).cast(), FLIGHT)
}

/// What a slot word is to become.
pub(crate) enum Next<K, V> {
    /// A load begins, or another one takes over.
    Loading(Arc<Flight<K, V>>),
    /// A value.
    Value(NewCell<K, V>),
    /// A failure, which keeps the value that is there.
    Failure { error: LoadError, attempts: u32, pause: Pause },
    /// That the source has no such key; the value that is there goes.
    Absence { until: Moment },
    /// What was there before the load.
    Prev,
    /// Nothing, for ever.
    Dead,
}

impl<K, V> Next<K, V> {
    /// What a slot will weigh with it, which holds `held` now.
    pub(crate) fn weight(&self, slot: &Slot<K, V>, held: Held<'_, V>) -> u32 {
        match self {
            Self::Value(cell) => cell.weight(),
            Self::Failure { .. } => held.cell().map_or(USUAL_WEIGHT, |_| slot.weight_of(held)),
            Self::Absence { .. } => USUAL_WEIGHT,
            Self::Loading(_) | Self::Prev => slot.weight_of(held),
            Self::Dead => 0,
        }
    }

    /// Whether a slot that moves on from `from` has come to its end.
    pub(crate) fn is_end(&self, from: State<'_, K, V>) -> bool {
        match self {
            Self::Dead => true,
            // Nothing was there before a slot's first load: the slot goes with it.
            Self::Prev => from.held().is_nothing(),
            Self::Loading(_) | Self::Value(_) | Self::Failure { .. } | Self::Absence { .. } => false,
        }
    }

    /// The value that was to be published.
    pub(crate) fn into_weighed(self) -> Option<Weighed<V>> {
        match self {
            Self::Value(cell) => Some(cell.into_weighed()),
            _ => None,
        }
    }
}

/// What a CAS of the slot word did.
#[must_use]
pub(crate) enum Swing<'g, K, V> {
    /// The slot has moved on meanwhile; what was to be published comes back.
    Lost(Next<K, V>),
    /// It is done. `values` says by how much the number of values in the cache has changed, `taken` is the value that has been
    /// taken out.
    Won { values: isize, taken: Option<Taken<'g, K, V>> },
}

/// A key's place in the cache. What a hit reads comes first, so that it shares a cache line where sizes allow.
#[repr(C)]
pub(crate) struct Slot<K, V> {
    word: AtomicPtr<()>,
    mark: MarkWord,
    /// The upper half of the key's hash.
    hash: u32,
    shares: AtomicU32,
    key: K,
    /// Room for the first value (INV-slot-4).
    first: UnsafeCell<MaybeUninit<Cell<V>>>,
    witness: Witness,
}

/// In `shares`: the slot is a [`Tailed`] one. Set when it is made, never cleared.
const TAILED: u32 = 1 << 31;

/// A slot of a cache that notes something about the use of its keys.
#[repr(C)]
struct Tailed<K, V> {
    slot: Slot<K, V>,
    tail: Tail,
}

/// What is noted about the use of a key, where that is wanted.
pub(crate) struct Tail {
    /// When the value was last used; written at most once per tick.
    used: AtomicU64,
    /// How long loads of the key take, smoothed: an `f32` of nanoseconds; zero: not known.
    cost: PlainU32,
    /// Reads of the value that were noted since it came.
    reads: PlainU32,
}

impl Tail {
    /// How long loads of the key take; zero: not known.
    pub(crate) fn cost(&self) -> f64 {
        // Relaxed: an estimate that guards no data.
        f64::from(f32::from_bits(self.cost.load(Ordering::Relaxed)))
    }

    /// Notes how long a load has taken, in nanoseconds. Of two at one time, one is lost.
    pub(crate) fn loaded_in(&self, nanos: f64) {
        let before = self.cost();
        let smoothed = if before > 0.0 { before + (nanos - before) / 4.0 } else { nanos };
        // Relaxed: as in `cost`.
        self.cost.store((smoothed as f32).max(1.0).to_bits(), Ordering::Relaxed);
    }

    /// Another value comes: no read of it has been noted.
    pub(crate) fn begin_reads(&self) {
        // Relaxed: as in `cost`.
        self.reads.store(0, Ordering::Relaxed);
    }

    /// How many reads have been noted since the value came.
    pub(crate) fn reads(&self) -> u32 {
        // Relaxed: as in `cost`.
        self.reads.load(Ordering::Relaxed)
    }

    /// Notes `n` reads, and tells how many there have been.
    pub(crate) fn read(&self, n: u32) -> u32 {
        // Relaxed: as in `cost`.
        self.reads.fetch_add(n, Ordering::Relaxed).saturating_add(n)
    }
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Slot<u64, u64>>() == 56, "a small entry fits into a cache line");

// SAFETY: `&K` and `&V` are handed to any thread, and dropped on any thread; all else is atomic or INV-slot-4.
unsafe impl<K: Send + Sync, V: Send + Sync> Send for Slot<K, V> {}
// SAFETY: as above.
unsafe impl<K: Send + Sync, V: Send + Sync> Sync for Slot<K, V> {}

/// A share of a slot.
pub(crate) struct SlotRef<K, V>(NonNull<Slot<K, V>>);

// SAFETY: a share of a `Slot`, which is `Send` and `Sync` under the same bounds.
unsafe impl<K: Send + Sync, V: Send + Sync> Send for SlotRef<K, V> {}
// SAFETY: as above.
unsafe impl<K: Send + Sync, V: Send + Sync> Sync for SlotRef<K, V> {}

impl<K, V> Deref for SlotRef<K, V> {
    type Target = Slot<K, V>;

    fn deref(&self) -> &Slot<K, V> {
        // SAFETY: alive while this share is (INV-slot-3).
        unsafe { self.0.as_ref() }
    }
}

impl<K, V> Clone for SlotRef<K, V> {
    fn clone(&self) -> Self {
        // Relaxed: a share is made from a share, or under a pin (INV-slot-3).
        self.shares.fetch_add(1, Ordering::Relaxed);
        Self(self.0)
    }
}

impl<K, V> Drop for SlotRef<K, V> {
    fn drop(&mut self) {
        // SAFETY: this share is given back once, here.
        unsafe { Slot::release(self.0) };
    }
}

impl<K, V> SlotRef<K, V> {
    /// A share of a slot that was found under a pin that still lasts.
    pub(crate) fn of(slot: &Slot<K, V>, _guard: &Guard) -> Self {
        // Relaxed: made under a pin (INV-slot-3).
        slot.shares.fetch_add(1, Ordering::Relaxed);
        Self::counted(slot)
    }

    /// A share of a slot of which the caller knows another share.
    fn shared(slot: &Slot<K, V>) -> Self {
        // Relaxed: made from a share.
        slot.shares.fetch_add(1, Ordering::Relaxed);
        Self::counted(slot)
    }

    /// A share that has been counted already.
    fn counted(slot: &Slot<K, V>) -> Self {
        // SAFETY: the address of a reference is not null.
        Self(unsafe { NonNull::new_unchecked(owner(slot)) })
    }

    /// Gives the share away, as a pointer.
    fn into_link(self) -> NonNull<Slot<K, V>> {
        let slot = self.0;
        std::mem::forget(self);
        slot
    }
}

impl<K, V> Linked for Slot<K, V> {
    #[inline]
    fn hash(&self) -> u64 {
        whole_of(self.hash)
    }

    unsafe fn release(this: NonNull<Self>) {
        // SAFETY: the caller owns a share.
        let slot = unsafe { this.as_ref() };
        // Relaxed: a share that is the only one stays that: shares are made from shares, or under a pin for which the table's
        // is left.
        let only = slot.shares.load(Ordering::Relaxed) & !TAILED == 1;
        // Release: this share's uses; pairs with the Acquire below.
        if only || slot.shares.fetch_sub(1, Ordering::Release) & !TAILED == 1 {
            // Acquire: the uses of all other shares come before the free; pairs with the Release above.
            slot.shares.load(Ordering::Acquire);
            slot.witness.ended();
            // Destructors are user code, and the last share may go anywhere.
            // SAFETY: that was the last share.
            contain(|| unsafe { Self::free(this) });
        }
    }
}

impl<K, V> Slot<K, V> {
    /// A slot with one share; with a tail, if `used` gives its first stamp.
    fn allocate(hash: u64, key: K, used: Option<Moment>, mark: MarkWord) -> SlotRef<K, V> {
        let slot = Self {
            word: AtomicPtr::new(null_mut()),
            mark,
            hash: half_of(hash),
            shares: AtomicU32::new(if used.is_some() { 1 | TAILED } else { 1 }),
            key,
            first: UnsafeCell::new(MaybeUninit::uninit()),
            witness: Witness::new(),
        };
        let slot = match used {
            None => exposed(Box::into_raw(Box::new(slot))),
            Some(used) => {
                let used = AtomicU64::new(used.nanos());
                let tail = Tail { used, cost: PlainU32::new(0), reads: PlainU32::new(0) };
                // The slot comes first in it.
                exposed(Box::into_raw(Box::new(Tailed { slot, tail }))).cast()
            }
        };
        // SAFETY: a box is not null.
        SlotRef(unsafe { NonNull::new_unchecked(slot) })
    }

    /// Frees a slot, with the value that has stayed in its room.
    ///
    /// # Safety
    /// The caller has the last share.
    unsafe fn free(this: NonNull<Self>) {
        /// Drops the value in the room, where one is.
        struct Room<K, V>(NonNull<Slot<K, V>>);
        impl<K, V> Drop for Room<K, V> {
            fn drop(&mut self) {
                // SAFETY: the caller's, who frees it after.
                let slot = unsafe { self.0.as_ref() };
                // Relaxed: the last share has acquired all that was done to the slot.
                let word = slot.word.load(Ordering::Relaxed);
                if untagged(word).addr() == slot.room().addr() {
                    // SAFETY: INV-slot-4: a value is in it, and nobody is left who could read it.
                    unsafe { std::ptr::drop_in_place(slot.room()) };
                }
            }
        }
        // SAFETY: by contract it is alive.
        let tailed = unsafe { this.as_ref() }.tail().is_some();
        // The memory goes, even if a destructor panics: last made, first dropped.
        if tailed {
            // SAFETY: by contract; the mark says how it was made.
            let _slot = unsafe { Box::from_raw(this.cast::<Tailed<K, V>>().as_ptr()) };
            drop(Room(this));
        } else {
            // SAFETY: as above.
            let _slot = unsafe { Box::from_raw(this.as_ptr()) };
            drop(Room(this));
        }
    }

    /// Moves a slot out of its allocation.
    ///
    /// # Safety
    /// The caller has all of its shares.
    unsafe fn unbox(this: NonNull<Self>) -> Self {
        // SAFETY: by contract it is alive.
        let tailed = unsafe { this.as_ref() }.tail().is_some();
        if tailed {
            // SAFETY: by contract; the mark says how it was made.
            unsafe { Box::from_raw(this.cast::<Tailed<K, V>>().as_ptr()) }.slot
        } else {
            // SAFETY: as above.
            *unsafe { Box::from_raw(this.as_ptr()) }
        }
    }

    /// What is noted about the use of the key, if anything is.
    pub(crate) fn tail(&self) -> Option<&Tail> {
        // Relaxed: the mark is set when the slot is made.
        let tailed = self.shares.load(Ordering::Relaxed) & TAILED != 0;
        let whole = owner(self).cast::<Tailed<K, V>>();
        // SAFETY: the mark says that the slot is the first part of it.
        tailed.then(|| &unsafe { &*whole }.tail)
    }

    fn room(&self) -> *mut Cell<V> {
        self.first.get().cast()
    }

    fn is_room(&self, cell: *mut Cell<V>) -> bool {
        cell.addr() == self.room().addr()
    }

    /// What `held`, which is this slot's, counts for in the cache's weight: its value, or else a record.
    pub(crate) fn weight_of(&self, held: Held<'_, V>) -> u32 {
        let Some(cell) = held.cell() else { return if held.is_nothing() { 0 } else { USUAL_WEIGHT } };
        let cell = owner(cell);
        if self.is_room(cell) {
            return USUAL_WEIGHT;
        }
        // SAFETY: INV-slot-4: a cell that is not in the room is in a box with its weight, and readable as `held` is.
        unsafe { &*cell.cast::<Weighed<V>>() }.weight
    }

    /// Puts a value into the slot's own room.
    ///
    /// # Safety
    /// INV-slot-4: nobody else does so, and nobody did before.
    unsafe fn fill_room(&self, cell: Cell<V>) -> NonNull<Cell<V>> {
        let room = self.room();
        // SAFETY: by contract nobody else uses the room.
        unsafe { room.write(cell) };
        // SAFETY: the room is a part of the slot.
        unsafe { NonNull::new_unchecked(room) }
    }

    pub(crate) fn key(&self) -> &K {
        &self.key
    }

    /// What the policy knows of the slot.
    #[inline]
    pub(crate) fn mark(&self) -> &MarkWord {
        &self.mark
    }

    /// The part of the hash that the slot remembers.
    #[inline]
    pub(crate) fn half_hash(&self) -> u32 {
        self.hash
    }

    /// When the value was last used, where that is noted; else long ago.
    #[inline]
    pub(crate) fn used(&self) -> Moment {
        // Relaxed: an instant that guards no data.
        Moment::from_nanos(self.tail().map_or(0, |tail| tail.used.load(Ordering::Relaxed)))
    }

    /// Notes a use, if that is noted, and the clock has moved since the last one.
    #[inline]
    pub(crate) fn touch(&self, now: Moment) {
        if let Some(tail) = self.tail()
            && tail.used.load(Ordering::Relaxed) != now.nanos()
        {
            // Relaxed: as in `used`.
            tail.used.store(now.nanos(), Ordering::Relaxed);
        }
    }

    /// Reads the word.
    #[inline]
    pub(crate) fn load<'g>(&'g self, _guard: &'g Guard) -> State<'g, K, V> {
        self.witness.used();
        // Acquire: the cell, record or flight; pairs with the AcqRel in `swing` and with the table's link.
        let word = self.word.load(Ordering::Acquire);
        match word.addr() & TAGS {
            FLIGHT => {
                // SAFETY: INV-slot-2.
                State::Loading(unsafe { &*untagged(word).cast::<Flight<K, V>>() })
            }
            DEAD => State::Dead,
            // SAFETY: INV-slot-2.
            _ => State::Ready(unsafe { Held::new(word) }),
        }
    }

    /// The value, if the slot is `Ready` with one: the common case of `load`.
    #[inline(always)]
    pub(crate) fn ready_cell<'g>(&'g self, _guard: &'g Guard) -> Option<&'g Cell<V>> {
        self.witness.used();
        // Acquire: as in `load`.
        let word = self.word.load(Ordering::Acquire);
        let room = self.room();
        if word.addr() == room.addr() {
            // By this address and not by the word's, so that the processor need not wait for the word to fetch the cell.
            // SAFETY: INV-slot-2, INV-slot-4: the word leads to the value in the room.
            return Some(unsafe { &*room });
        }
        // SAFETY: INV-slot-2: a word with the tag of a cell, and never null in a slot.
        (word.addr() & TAGS == CELL).then(|| unsafe { &*word.cast::<Cell<V>>() })
    }

    /// Joins a flight that was read from this slot. `None` if it is closed.
    pub(crate) fn join<'g>(
        &self,
        flight: &'g Flight<K, V>,
        waits: Waits,
        _guard: &'g Guard,
    ) -> Option<SlotTicket<K, V>> {
        Ticket::join(flight, waits, || share_of(flight))
    }

    /// Moves the word from exactly what was seen, and retires what is not led to any more (INV-slot-1).
    pub(crate) fn swing<'g>(
        &'g self,
        from: State<'_, K, V>,
        to: Next<K, V>,
        guard: &'g Guard,
    ) -> Swing<'g, K, V> {
        self.witness.used();
        let held = from.held();
        let to = match to {
            Next::Loading(flight) => (loading_word(flight), Keep::All),
            Next::Value(cell) => {
                let room = cell.room.is_some();
                (cell.publish(), Keep::Nothing { room })
            }
            Next::Failure { error, attempts, pause } => {
                let record = Box::new(Record { error, attempts, pause, prev: held.cell_ptr() });
                (tagged(exposed(Box::into_raw(record)).cast(), RECORD), Keep::Cell)
            }
            Next::Absence { until } => {
                let pause = Pause { refresh: until, load: until, forget: until };
                let record = Record::<V> { error: LoadError::absent(), attempts: 0, pause, prev: null_mut() };
                let record = Box::new(record);
                (tagged(exposed(Box::into_raw(record)).cast(), RECORD), Keep::Nothing { room: false })
            }
            Next::Prev if held.is_nothing() => (tagged(null_mut(), DEAD), Keep::All),
            Next::Prev => (held.raw(), Keep::All),
            Next::Dead => {
                // Where a load has a share, which may hang, the value must not wait for it.
                // Relaxed: the share of a load is counted before its claim, by a CAS that the one which led to `from` has acquired.
                let alone = self.shares.load(Ordering::Relaxed) & !TAILED == 1;
                let stays = alone && self.is_room(held.cell_ptr());
                let room = if stays { self.room().cast() } else { null_mut() };
                (tagged(room, DEAD), Keep::Nothing { room: false })
            }
        };
        let (word, keep) = to;
        let had = isize::from(held.cell().is_some());
        step();
        // AcqRel: Release publishes the new content, and orders what its owner did before (the load's claim, the user's
        // write) for who reads it; Acquire gives a claimer what the last owner published. Pairs with `load`.
        // Relaxed failure: the caller looks again.
        if self.word.compare_exchange(from.raw(), word, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            // SAFETY: `word` was built above and published to nobody.
            return Swing::Lost(unsafe { self.unbuild(word, keep) });
        }
        step();
        if let State::Loading(flight) = from {
            let flight = owner(flight).cast_const();
            // SAFETY: the slot's share, given back once, here.
            let give_back = move || drop(unsafe { Arc::from_raw(flight) });
            // SAFETY: INV-slot-2: taken out by the CAS.
            unsafe { retire(guard, size_of::<Flight<K, V>>(), give_back) };
        }
        let has = match keep {
            Keep::All | Keep::Cell => had,
            Keep::Nothing { .. } => isize::from(word.addr() & TAGS == CELL),
        };
        let taken = match keep {
            Keep::All => None,
            Keep::Cell => {
                Self::retire_record(held, guard);
                None
            }
            Keep::Nothing { .. } => {
                // Before the record goes, which tells: where nobody else is there, it goes at once.
                let cell = held.cell_ptr();
                Self::retire_record(held, guard);
                let stays = word.addr() & TAGS == DEAD && !untagged(word).is_null();
                Taken::of(self, cell, stays, guard)
            }
        };
        Swing::Won { values: has - had, taken }
    }

    /// # Safety
    /// `word` was built by `swing` with `keep` and published to nobody.
    unsafe fn unbuild(&self, word: *mut (), keep: Keep) -> Next<K, V> {
        match (word.addr() & TAGS, keep) {
            // SAFETY: by contract, from `Arc::into_raw`.
            (FLIGHT, _) => Next::Loading(unsafe { Arc::from_raw(untagged(word).cast::<Flight<K, V>>()) }),
            (DEAD, Keep::All) => Next::Prev,
            (DEAD, _) => Next::Dead,
            (RECORD, Keep::Cell) => {
                // SAFETY: by contract, from `Box::into_raw`. The cell in it is the slot's.
                let record = *unsafe { Box::from_raw(untagged(word).cast::<Record<V>>()) };
                Next::Failure { error: record.error, attempts: record.attempts, pause: record.pause }
            }
            (RECORD, Keep::Nothing { .. }) => {
                // SAFETY: as above; no cell is in it.
                let record = *unsafe { Box::from_raw(untagged(word).cast::<Record<V>>()) };
                Next::Absence { until: record.pause.load }
            }
            (_, Keep::Nothing { room }) => {
                let cell = NonNull::new(word.cast::<Cell<V>>()).expect("a new cell is not null");
                // The flight whose room it is has a share, and outlives this call.
                Next::Value(NewCell { cell, room: room.then(|| SlotRef::shared(self)) })
            }
            (_, Keep::All | Keep::Cell) => Next::Prev,
        }
    }

    fn retire_record(held: Held<'_, V>, guard: &Guard) {
        if let Some(record) = held.record() {
            let record = owner(record);
            // SAFETY: INV-slot-1: boxed by `swing`, freed once. Its cell is not freed with it.
            let free = move || drop(unsafe { Box::from_raw(record) });
            // SAFETY: INV-slot-1: taken out by the caller's CAS.
            unsafe { retire(guard, size_of::<Record<V>>(), free) };
        }
    }

    /// # Safety
    /// INV-slot-1: the caller's CAS has taken the cell out, and nobody else retires it.
    unsafe fn retire_cell(&self, cell: *mut Cell<V>, guard: &Guard) {
        if self.is_room(cell) {
            // A share keeps the room until the value has gone.
            let slot = SlotRef::of(self, guard);
            let value_and_share = move || {
                let slot = slot;
                // SAFETY: INV-slot-1, INV-slot-4: a value is in it, taken out by the caller, and no pin that saw it is left.
                unsafe { std::ptr::drop_in_place(slot.room()) };
            };
            // SAFETY: INV-slot-1: as above; the share keeps the slot alive until then.
            unsafe { retire(guard, 0, value_and_share) };
        } else {
            // SAFETY: INV-slot-1: a cell that is not in the room is in a box, and freed once.
            let free = move || drop(unsafe { Box::from_raw(cell.cast::<Weighed<V>>()) });
            // SAFETY: INV-slot-1: taken out by the caller.
            unsafe { retire(guard, size_of::<Weighed<V>>(), free) };
        }
    }

    /// Kills a slot that nobody else can reach, and drops what it holds at once.
    ///
    /// # Safety
    /// Nobody else is in the cache.
    unsafe fn bury(&self) {
        // SAFETY: by contract.
        let guard = unsafe { exclusive() };
        let state = self.load(guard);
        if !matches!(state, State::Dead) {
            let _ = self.swing(state, Next::Dead, guard);
        }
        // Others may have shares of the slot yet, but the value goes now.
        // Relaxed: nobody else is there.
        let word = self.word.load(Ordering::Relaxed);
        if untagged(word).addr() == self.room().addr() {
            self.word.store(tagged(null_mut(), DEAD), Ordering::Relaxed);
            // SAFETY: INV-slot-4: a value is in it, and nobody else is in the cache.
            unsafe { std::ptr::drop_in_place(self.room()) };
        }
    }
}

/// What a CAS leaves in place of what the slot held.
#[derive(Clone, Copy)]
enum Keep {
    All,
    Cell,
    /// `room`: the new cell is in the slot's own room.
    Nothing {
        room: bool,
    },
}

/// A share of a flight that was read from its slot under a pin that still lasts.
pub(crate) fn share_of<K, V>(flight: &Flight<K, V>) -> Arc<Flight<K, V>> {
    let raw = owner(flight).cast_const();
    // SAFETY: INV-slot-2: the slot's share is given back through retire, so the count is above zero under the pin.
    unsafe { Arc::increment_strong_count(raw) };
    // SAFETY: the share that was just made.
    unsafe { Arc::from_raw(raw) }
}
