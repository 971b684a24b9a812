//! A lock-free FIFO queue of 64-bit integers, for any number of pushers and poppers.
//!
//! This is the fetch-and-add array queue (Pedro Ramalhete and Andreia Correia, *FAAArrayQueue*, Concurrency Freaks,
//! 2016): a linked list of segments. In each, one fetch-and-add hands a cell to a pusher, and another hands it to a
//! popper.
//! ```text
//!      head                                                  tail
//!       ▼                                                     ▼
//!    [T][T][i][i] ── next ──► [i][i][i][i] ── next ──► [i][ ][i][ ]
//!           ▲ dequeue                                           ▲ enqueue
//! ```
//! A cell changes once or twice:
//! ```text
//!      EMPTY ── its pusher ──► item ── its popper ──► TAKEN
//!        └──────────────── its popper ────────────────►┘
//! ```
//! A popper waits for nobody: if it finds its cell `EMPTY`, it takes it all the same, and goes on with the next; the slow
//! pusher then finds its cell `TAKEN`, and puts its item into another one. Before a popper asks for a cell, it looks
//! whether one has been handed to a pusher, so that polling an empty queue uses no cells up.
//!
//! A pusher who gets no cell links a new segment, its item already in the first cell. The very first segment is linked
//! like that too, to `head`: a queue that has never been used has none. An exhausted segment leaves the queue when a popper
//! needs the next one.
//!
//! # Invariants
//! - `INV-queue-1`: each cell is handed out at most once on either side, and leaves `EMPTY` once: by its pusher's CAS,
//!   or by its popper's swap. So each item that was put into a cell is taken once.
//! - `INV-queue-2`: a segment is linked only to `head` while that is null, or to a segment whose cells have all been
//!   handed to pushers, and a link that is set never changes. So cells are handed out in the order of their positions.
//! - `INV-queue-3`: `tail` moves only along links. `head` leaves a segment only after its cells have all been handed to
//!   poppers, and after `tail` has left it. So whoever pins from then on does not come to that segment: what still leads
//!   to it are segments that were left before, and the handles of threads that are pinned.
//! - `INV-queue-4`: a segment is retired by the winner of the CAS by which `head` leaves it, and freed once.
//!
//! # Progress
//! `push` and `pop` are lock-free, `len` is wait-free. A popper tries again only when a pusher was on its way to the same
//! cell, and that pusher tries again, but at most to the end of the segment: there its item goes in with the new segment,
//! or another's did. A suspended thread holds up one cell, which the others pass. Memory is the exception: a suspended pin
//! holds back what is retired after it.

#[cfg(all(test, loom))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;

use crate::primitive::Padded;
use crate::primitive::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use crate::primitive::epoch::{Guard, exclusive, retire};
use crate::primitive::step::step;
use crate::primitive::thin::Thin;
use std::marker::PhantomData;
use std::ptr::null_mut;

/// Nothing has been put into this cell. The zero word, so that a new segment is zeroed memory.
const EMPTY: u64 = 0;
/// This cell's popper has been here. Nothing is put into it any more.
const TAKEN: u64 = u64::MAX;

/// Cells of one segment: as many as fit into 1 KiB beside its header and what the allocator adds. Tests have few, so
/// that they often meet the end of a segment.
const CELLS: usize =
    if cfg!(any(test, loom)) { 3 } else { (1024 - ADDED - size_of::<Header>()) / size_of::<AtomicU64>() };
/// What `Thin` and an allocator put before a header.
const ADDED: usize = 16;

/// A queue of integers. An item is any but zero and `u64::MAX`, which mark cells.
pub(crate) struct Queue {
    /// The segment to pop from; null until the first push.
    head: Padded<AtomicPtr<()>>,
    /// The segment to push to, or the one before it; null until the first segment is linked.
    tail: Padded<AtomicPtr<()>>,
    tally: Tally,
}

/// In tests, each segment holds a share of its queue's tally, so that one that is not freed is seen; else nothing.
#[derive(Clone, Default)]
struct Tally(#[cfg(test)] std::sync::Arc<()>);

impl Queue {
    /// An empty queue. It allocates at the first push.
    pub(crate) fn new() -> Self {
        let nowhere = || Padded(AtomicPtr::new(null_mut()));
        Self { head: nowhere(), tail: nowhere(), tally: Tally::default() }
    }

    /// Puts an item in, behind every item whose push has returned.
    pub(crate) fn push(&self, item: u64, guard: &Guard) {
        debug_assert!(item != EMPTY && item != TAKEN, "an item must not be a mark");
        loop {
            let tail = self.tail(guard);
            step();
            if tail.is_some_and(|segment| segment.put(item)) {
                return;
            }
            step();
            if self.extend(tail, item, guard) {
                return;
            }
        }
    }

    /// Takes the first item out; `None` if the queue was empty at a moment of this call.
    pub(crate) fn pop(&self, guard: &Guard) -> Option<u64> {
        loop {
            let head = self.head(guard)?;
            step();
            match head.take() {
                Take::Item(item) => return Some(item),
                Take::Empty => return None,
                Take::Exhausted => {}
            }
            step();
            let next = head.next(guard)?;
            step();
            self.leave(head, next, guard);
        }
    }

    /// The item that is so many pops away, if it is in the first segment: a hint, others may pop meanwhile.
    pub(crate) fn peek(&self, ahead: usize, guard: &Guard) -> Option<u64> {
        self.head(guard)?.peek(ahead)
    }

    /// How many items are in: exact while nobody pushes or pops, else about.
    ///
    /// It is the difference of two positions, one read off either end, so that nobody has to count. A cell that a popper
    /// found `EMPTY` has been handed out on both sides, and cancels out.
    pub(crate) fn len(&self, guard: &Guard) -> usize {
        let Some(head) = self.head(guard) else { return 0 };
        let popped = head.popped();
        // After the head, and therefore not behind it. It is null for a moment while the head is not.
        let pushed = self.tail(guard).unwrap_or(head).pushed();
        // Positions may wrap. Below zero when poppers have been handed cells that no pusher has.
        pushed.wrapping_sub(popped).cast_signed().max(0).cast_unsigned()
    }

    fn head<'g>(&self, guard: &'g Guard) -> Option<Segment<'g>> {
        // Acquire: the segment, and that the tail is not behind it; pairs with the Release in `extend` and `leave`.
        let head = self.head.0.load(Ordering::Acquire);
        // SAFETY: INV-queue-3: head and tail leave a segment before it is retired, and the guard was pinned before.
        unsafe { Segment::from_ptr(head, guard) }
    }

    fn tail<'g>(&self, guard: &'g Guard) -> Option<Segment<'g>> {
        // Acquire: the segment; pairs with the Release in `advance`.
        let tail = self.tail.0.load(Ordering::Acquire);
        // SAFETY: INV-queue-3: head and tail leave a segment before it is retired, and the guard was pinned before.
        unsafe { Segment::from_ptr(tail, guard) }
    }

    /// Links a new segment with the item behind `last`, or at the head if there is none, unless another has; then moves
    /// the tail to whichever is there. `true` if the item is in.
    fn extend(&self, last: Option<Segment<'_>>, item: u64, guard: &Guard) -> bool {
        let link = last.map_or(&self.head.0, |last| &last.header().next);
        // Acquire: the segment, which `advance` publishes again; pairs with the Release below.
        let mut next = link.load(Ordering::Acquire);
        let mut linked = false;
        if next.is_null() {
            let new = Segment::with(item, last.map_or(0, Segment::end), self.tally.clone(), guard);
            step();
            // Release: the segment and its item; pairs with the Acquire in `next`, `head` and above. Acquire failure: as
            // the load above.
            match link.compare_exchange(null_mut(), new.as_ptr(), Ordering::Release, Ordering::Acquire) {
                Ok(_) => (next, linked) = (new.as_ptr(), true),
                Err(there) => {
                    next = there;
                    // SAFETY: published to nobody.
                    unsafe { Segment::free(new.as_ptr()) };
                }
            }
        }
        step();
        self.advance(last, next);
        linked
    }

    /// Moves the tail from `last` to what is linked to it, unless it has been moved. While the tail is null, the head is
    /// the first segment: nobody can have filled it.
    fn advance(&self, last: Option<Segment<'_>>, next: *mut ()) {
        let last = last.map_or(null_mut(), Segment::as_ptr);
        // Release: the segment; pairs with the Acquire in `tail`. A failure means that it has left `last`, and it never
        // comes back: segments are linked in one direction, and no address is used again under a pin.
        let _ = self.tail.0.compare_exchange(last, next, Ordering::Release, Ordering::Relaxed);
    }

    /// Moves the head from an exhausted segment to the next, unless it has been moved, and retires the former.
    fn leave(&self, old: Segment<'_>, next: Segment<'_>, guard: &Guard) {
        // First the tail, if whoever linked the next segment has not got to it yet (INV-queue-3).
        self.advance(Some(old), next.as_ptr());
        step();
        let (old, next) = (old.as_ptr(), next.as_ptr());
        // Release: the segment, and that the tail has left the old one; pairs with the Acquire in `head`.
        if self.head.0.compare_exchange(old, next, Ordering::Release, Ordering::Relaxed).is_ok() {
            step();
            // SAFETY: INV-queue-4: freed once, by the winner of the CAS.
            let free = move || unsafe { Segment::free(old) };
            // SAFETY: INV-queue-3: head and tail have left it.
            unsafe { retire(guard, CELLS * size_of::<AtomicU64>(), free) };
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: `&mut self`: nobody else is in the queue, which owns what its head leads to.
        let guard = unsafe { exclusive() };
        let mut first = self.head(guard);
        while let Some(segment) = first {
            first = segment.next(guard);
            // SAFETY: as above; INV-queue-4: what the head has left is not among them.
            unsafe { Segment::free(segment.as_ptr()) };
        }
    }
}

/// What a segment has beside its cells. The indices share a line: lines of their own, in each segment, would cost a
/// small cache more than they give a large one.
struct Header {
    /// The segment behind this one.
    next: AtomicPtr<()>,
    /// The position of the first cell: how many cells the segments before this one had. May wrap.
    start: usize,
    /// The first cell that has not been handed to a pusher. May run past the end.
    enqueue: AtomicUsize,
    /// The first cell that has not been handed to a popper. May run past the end.
    dequeue: AtomicUsize,
    _tally: Tally,
}

/// What a popper gets of a segment.
enum Take {
    Item(u64),
    /// Every cell that has been handed to a pusher has been handed to a popper too.
    Empty,
    /// All cells have been handed to poppers.
    Exhausted,
}

/// A handle to a segment, good while it is pinned.
#[derive(Clone, Copy)]
struct Segment<'g>(Thin<Header, AtomicU64>, PhantomData<&'g Guard>);

impl<'g> Segment<'g> {
    /// A segment with an item in its first cell.
    fn with(item: u64, start: usize, tally: Tally, _guard: &'g Guard) -> Self {
        let header = Header {
            next: AtomicPtr::new(null_mut()),
            start,
            enqueue: AtomicUsize::new(1),
            dequeue: AtomicUsize::new(0),
            _tally: tally,
        };
        let cell = |index| AtomicU64::new(if index == 0 { item } else { EMPTY });
        Self(Thin::new(header, CELLS, cell), PhantomData)
    }

    fn as_ptr(self) -> *mut () {
        self.0.as_ptr()
    }

    fn peek(self, ahead: usize) -> Option<u64> {
        // Relaxed: a hint; nothing is read by way of it.
        let index = self.header().dequeue.load(Ordering::Relaxed).saturating_add(ahead);
        let item = (index < CELLS).then(|| self.cell(index).load(Ordering::Relaxed))?;
        (item != EMPTY && item != TAKEN).then_some(item)
    }

    /// # Safety
    /// `raw` is null or came from `as_ptr`, and the segment is not freed during `'g`.
    unsafe fn from_ptr(raw: *mut (), _guard: &'g Guard) -> Option<Self> {
        // SAFETY: by contract.
        (!raw.is_null()).then(|| Self(unsafe { Thin::from_ptr(raw) }, PhantomData))
    }

    /// # Safety
    /// `raw` came from `as_ptr`, the caller owns the segment, and nobody uses it any more.
    unsafe fn free(raw: *mut ()) {
        // SAFETY: by contract.
        let segment = unsafe { Thin::<Header, AtomicU64>::from_ptr(raw) };
        // SAFETY: by contract.
        unsafe { segment.free() };
    }

    fn header(self) -> &'g Header {
        // SAFETY: the handle is good for `'g`.
        unsafe { self.0.head() }
    }

    fn cell(self, index: usize) -> &'g AtomicU64 {
        assert!(index < CELLS, "there is a cell for each index that is handed out");
        // SAFETY: the segment has so many cells, and the handle is good for `'g`.
        unsafe { self.0.element(index) }
    }

    /// The segment behind this one.
    fn next(self, guard: &'g Guard) -> Option<Self> {
        // Acquire: the segment; pairs with the Release in `extend`.
        let next = self.header().next.load(Ordering::Acquire);
        // SAFETY: INV-queue-3: whoever has a handle to this segment pinned before the head left it, and so before the
        // head leaves the next one, which is retired after that.
        unsafe { Self::from_ptr(next, guard) }
    }

    /// Puts an item into the next cell, or if its popper was there first, into the one after it, and so on; `false` if
    /// there is none left.
    fn put(self, item: u64) -> bool {
        loop {
            // Relaxed: hands a cell out; what is put into it is published by the cell itself.
            let index = self.header().enqueue.fetch_add(1, Ordering::Relaxed);
            if index >= CELLS {
                return false;
            }
            step();
            // Release: what the item stands for; pairs with the Acquire in `take`. Relaxed failure: it is `TAKEN`.
            let put = self.cell(index).compare_exchange(EMPTY, item, Ordering::Release, Ordering::Relaxed);
            if put.is_ok() {
                return true;
            }
            step();
        }
    }

    /// Takes the item out of the next cell, or if its pusher has not been there yet, out of the one after it, and so on.
    fn take(self) -> Take {
        let Header { enqueue, dequeue, .. } = self.header();
        loop {
            // Acquire: `enqueue`, and the link to the next segment, as they were seen by those who were handed the cells
            // before; pairs with the AcqRel below. Else a queue that was never empty could seem so to a popper who sees
            // another's pop, and not the push that came before it.
            let next = dequeue.load(Ordering::Acquire);
            if next >= CELLS {
                return Take::Exhausted;
            }
            step();
            // Relaxed: no cell is read before one has been handed out below.
            if next >= enqueue.load(Ordering::Relaxed) {
                return Take::Empty;
            }
            step();
            // AcqRel: as above, and pairs with itself too: behind the last cell it is the link that is read next.
            let index = dequeue.fetch_add(1, Ordering::AcqRel);
            if index >= CELLS {
                return Take::Exhausted;
            }
            step();
            // Acquire: what the item stands for; pairs with the Release in `put`. `TAKEN` publishes nothing.
            let item = self.cell(index).swap(TAKEN, Ordering::Acquire);
            if item != EMPTY {
                return Take::Item(item);
            }
        }
    }

    /// The position up to which cells have been handed to pushers, about.
    fn pushed(self) -> usize {
        // Relaxed: a figure.
        self.at(self.header().enqueue.load(Ordering::Relaxed))
    }

    /// The position up to which cells have been handed to poppers, about.
    fn popped(self) -> usize {
        // Relaxed: a figure.
        self.at(self.header().dequeue.load(Ordering::Relaxed))
    }

    /// The position behind the last cell.
    fn end(self) -> usize {
        self.at(CELLS)
    }

    fn at(self, index: usize) -> usize {
        self.header().start.wrapping_add(index.min(CELLS))
    }
}
