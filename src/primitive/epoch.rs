//! Epoch-based reclamation: one collector for all of quell, so that no other crate's pin holds our garbage.
//!
//! What a thread retires goes into a bag of its own, which is handed over when it holds 64 pieces, and pins free what has
//! been handed over now and then. So that little waits for long, a thread hands its bag over and tries to free what it can
//! ([`settle`]) once it has retired more than [`DEBT`] bytes since it last did, and at its first chance in each new tick.

use super::plain::{AtomicU64, Ordering};
use super::thread::NUMBERED;
use super::{Padded, caught};

/// How many bytes a thread may retire before it settles.
#[cfg_attr(loom, allow(dead_code, reason = "a model settles where it wants to"))]
pub(crate) const DEBT: usize = 16 << 10;

/// Bytes that have been retired less those that have been reclaimed, by the number of the thread that did it. Each thread
/// with a number writes to its own alone; one of them may be below zero, their sum is not.
static UNRECLAIMED: [Padded<AtomicU64>; NUMBERED + 1] = [const { Padded(AtomicU64::new(0)) }; NUMBERED + 1];

fn count_unreclaimed(bytes: u64, number: usize) {
    let own = &UNRECLAIMED[number].0;
    if number < NUMBERED {
        // Relaxed: a statistic, of which this thread is the only writer while it has the number.
        own.store(own.load(Ordering::Relaxed).wrapping_add(bytes), Ordering::Relaxed);
    } else {
        // Relaxed: as above, but shared.
        own.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Bytes of quell's own allocations that have been retired, and not reclaimed yet.
pub(crate) fn unreclaimed() -> u64 {
    // Relaxed: a statistic.
    let sum = UNRECLAIMED.iter().fold(0_u64, |sum, own| sum.wrapping_add(own.0.load(Ordering::Relaxed)));
    // While others count, a piece may be seen reclaimed before it is seen retired.
    if sum.cast_signed() < 0 { 0 } else { sum }
}

/// The reclamation of a piece: `drop` frees it.
fn reclaim(bytes: usize, drop: impl FnOnce()) {
    count_unreclaimed((bytes as u64).wrapping_neg(), number());
    contain(drop);
}

/// How many drops of user values have panicked while they were reclaimed.
static DROP_PANICS: AtomicU64 = AtomicU64::new(0);

pub(crate) fn drop_panics() -> u64 {
    // Relaxed: a statistic; nothing is published by it.
    DROP_PANICS.load(Ordering::Relaxed)
}

/// Runs `drop` (user code at its end), and turns a panic into a count: a collector's thread is not its owner's.
pub(crate) fn contain(drop: impl FnOnce()) {
    if cfg!(loom) {
        // What panics in a model is the model: it must be seen.
        return drop();
    }
    if caught(drop).is_none() {
        // Relaxed: a statistic; nothing is published by it.
        DROP_PANICS.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(not(loom))]
mod imp {
    use super::{DEBT, count_unreclaimed};
    use crate::primitive::thread::{Number, SHARED};
    pub(crate) use crossbeam_epoch::Guard;
    use crossbeam_epoch::{Collector, LocalHandle};
    use std::cell::Cell;
    use std::sync::OnceLock;

    static COLLECTOR: OnceLock<Collector> = OnceLock::new();

    fn collector() -> &'static Collector {
        COLLECTOR.get_or_init(Collector::new)
    }

    /// What a thread has of its own: one look-up for both on a hit.
    struct Local {
        handle: LocalHandle,
        number: Number,
        /// Bytes retired since the thread last settled.
        owed: Cell<usize>,
        /// When that was.
        settled: Cell<u64>,
    }

    thread_local! {
        static LOCAL: Local = Local {
            handle: collector().register(),
            number: Number::take(),
            owed: Cell::new(0),
            settled: Cell::new(0),
        };
    }

    /// Pins this thread. In the destructors of other thread-locals, where the handle may be gone, registers afresh.
    #[inline(always)]
    pub(crate) fn pin() -> Guard {
        pin_numbered().0
    }

    /// Pins this thread, and gives its number, below `NUMBERED`, held by no other running thread; or `SHARED`.
    #[inline(always)]
    pub(crate) fn pin_numbered() -> (Guard, usize) {
        LOCAL
            .try_with(|local| (local.handle.pin(), local.number.get()))
            .unwrap_or_else(|_| (collector().register().pin(), SHARED))
    }

    /// This thread's number alone.
    pub(crate) fn number() -> usize {
        LOCAL.try_with(|local| local.number.get()).unwrap_or(SHARED)
    }

    /// Hands this thread's garbage over and tries to reclaim what no pin holds any more.
    pub(crate) fn flush() {
        // An epoch must advance three times before what was retired in it may go.
        for _ in 0..4 {
            pin().flush();
        }
    }

    /// Hands this thread's garbage over and frees what may go, if it owes that: see this module's head. `tick` tells the
    /// present tick of some clock. Not under a pin, and not in the middle of an operation: destructors are user code.
    pub(crate) fn settle(tick: impl FnOnce() -> u64) {
        let _ = LOCAL.try_with(|local| {
            let owed = local.owed.get();
            if owed == 0 {
                return;
            }
            let tick = tick();
            if owed > DEBT || tick != local.settled.get() {
                local.settled.set(tick);
                local.owed.set(0);
                local.handle.pin().flush();
            }
        });
    }

    /// Runs `drop` after every pin that exists now has ended. `bytes` is what it frees, about.
    ///
    /// # Safety
    /// `drop` may run on any thread, and nothing that it frees may be reachable for a thread that pins from now on.
    pub(crate) unsafe fn retire(guard: &Guard, bytes: usize, drop: impl FnOnce()) {
        let number = LOCAL.try_with(|local| {
            // What frees no memory of quell's own may free much of the user's.
            local.owed.set(local.owed.get() + bytes.max(1));
            local.number.get()
        });
        count_unreclaimed(bytes as u64, number.unwrap_or(SHARED));
        // SAFETY: the caller's contract is that of `defer_unchecked`.
        unsafe { guard.defer_unchecked(move || super::reclaim(bytes, drop)) }
    }

    /// Gives memory back to the allocator. In models: at the end of the run, so that no address is used twice.
    pub(crate) fn give_back(give_back: impl FnOnce()) {
        give_back();
    }

    /// A guard that reclaims at once, for structures that nobody else can reach any more.
    ///
    /// # Safety
    /// The caller must own exclusively everything that it retires or reads with it.
    pub(crate) unsafe fn exclusive<'g>() -> &'g Guard {
        // SAFETY: the caller's contract is that of `unprotected`.
        unsafe { crossbeam_epoch::unprotected() }
    }
}

/// The same for models, which choose how a thread pins:
///
/// - [`Participant`]s of a real collector;
/// - [`lasting`]: no epoch, no fence, and nothing is freed before [`clear`]: shows missing orderings, which the epoch's
///   fences would hide;
/// - [`strict`]: what is retired is freed as soon as the contract of `retire` allows it, that is when no pin is left
///   that began before: shows what is read without a right to it.
#[cfg(loom)]
mod imp {
    use crate::primitive::atomic::{AtomicUsize, Ordering};
    use crate::primitive::thread::SHARED;
    use crossbeam_epoch::{Collector, LocalHandle};
    use std::cell::{Cell, RefCell};
    use std::mem::take;

    type Reclaim = Box<dyn FnOnce()>;

    /// A pin, of whichever kind.
    pub(crate) enum Guard {
        Epoch(crossbeam_epoch::Guard),
        Lasting,
        /// With the instant at which it began.
        Strict(usize),
        Exclusive,
    }

    struct Alone(Guard);
    // SAFETY: `Exclusive` holds nothing.
    unsafe impl Sync for Alone {}

    loom::thread_local! {
        static PARTICIPANT: RefCell<Option<Kind>> = RefCell::new(None);
        static NUMBER: Cell<usize> = Cell::new(SHARED);
    }

    enum Kind {
        Epoch(LocalHandle),
        Lasting,
        Strict,
    }

    #[derive(Default)]
    struct Yard {
        /// The instants at which the strict pins that exist began.
        pins: Vec<usize>,
        /// What has been retired, with the instant.
        retired: Vec<(usize, Reclaim)>,
        /// What is to be given back to the allocator at the end, so that no address is used twice in one run.
        memory: Vec<Reclaim>,
    }

    // Loom runs all threads of a model on one thread of the system, and switches only at its own operations.
    std::thread_local! {
        static YARD: RefCell<Yard> = RefCell::default();
    }

    /// The instant of a strict pin, retire or unpin. All of them are ordered by it, as an epoch orders them.
    fn instant(order: Ordering) -> usize {
        loom::lazy_static! { static ref CLOCK: AtomicUsize = AtomicUsize::new(0); }
        CLOCK.fetch_add(1, order)
    }

    fn reclaim_what_may_go() {
        let due = YARD.with_borrow_mut(|yard| {
            let oldest = yard.pins.iter().copied().min().unwrap_or(usize::MAX);
            let (due, kept) = take(&mut yard.retired).into_iter().partition(|(at, _)| *at < oldest);
            yard.retired = kept;
            due
        });
        let due: Vec<(usize, Reclaim)> = due;
        due.into_iter().for_each(|(_, reclaim)| reclaim());
    }

    /// A pin under which nothing is ever freed.
    pub(crate) fn lasting() -> Guard {
        Guard::Lasting
    }

    /// A pin that keeps alive exactly what is retired after it.
    pub(crate) fn strict() -> Guard {
        // Acquire: what was retired before this pin is out of reach for it; pairs with the Release in `retire`.
        let at = instant(Ordering::Acquire);
        YARD.with_borrow_mut(|yard| yard.pins.push(at));
        Guard::Strict(at)
    }

    impl Drop for Guard {
        fn drop(&mut self) {
            let Self::Strict(at) = *self else { return };
            if std::thread::panicking() {
                return;
            }
            // AcqRel: this pin's reads come before what is freed after it, here or elsewhere.
            instant(Ordering::AcqRel);
            YARD.with_borrow_mut(|yard| yard.pins.retain(|pin| *pin != at));
            reclaim_what_may_go();
        }
    }

    /// Forgets what a run that went red has left behind. At the beginning of a run.
    pub(crate) fn forget() {
        std::mem::forget(YARD.take());
    }

    /// Frees all that has been retired, when no pin is left. At the end of a run, after the joins.
    pub(crate) fn clear() {
        assert!(YARD.with_borrow(|yard| yard.pins.is_empty()), "a pin is left");
        while YARD.with_borrow(|yard| !yard.retired.is_empty()) {
            reclaim_what_may_go();
        }
        YARD.with_borrow_mut(|yard| take(&mut yard.memory)).into_iter().for_each(|give_back| give_back());
    }

    /// Gives memory back at the end of the run.
    pub(crate) fn give_back(give_back: impl FnOnce() + 'static) {
        YARD.with_borrow_mut(|yard| yard.memory.push(Box::new(give_back)));
    }

    /// Runs `drop` after every pin that exists now has ended. `bytes` is what it frees, about.
    ///
    /// # Safety
    /// `drop` may run on any thread, and nothing that it frees may be reachable for a thread that pins from now on.
    pub(crate) unsafe fn retire(guard: &Guard, bytes: usize, drop: impl FnOnce()) {
        super::count_unreclaimed(bytes as u64, SHARED);
        let reclaim = move || super::reclaim(bytes, drop);
        let retired = |at: usize, reclaim: Box<dyn FnOnce() + '_>| {
            // SAFETY: the caller's contract: what it frees lives until then. Only the lifetime changes.
            let reclaim = unsafe { std::mem::transmute::<Box<dyn FnOnce() + '_>, Reclaim>(reclaim) };
            YARD.with_borrow_mut(|yard| yard.retired.push((at, reclaim)));
        };
        match guard {
            // SAFETY: the caller's contract is that of `defer_unchecked`.
            Guard::Epoch(guard) => unsafe { guard.defer_unchecked(reclaim) },
            Guard::Lasting => retired(0, Box::new(reclaim)),
            // AcqRel: as in `strict` and `drop`.
            Guard::Strict(_) => retired(instant(Ordering::AcqRel), Box::new(reclaim)),
            Guard::Exclusive => reclaim(),
        }
    }

    /// A guard that reclaims at once, for structures that nobody else can reach any more.
    ///
    /// # Safety
    /// The caller must own exclusively everything that it retires or reads with it.
    pub(crate) unsafe fn exclusive<'g>() -> &'g Guard {
        static ALONE: Alone = Alone(Guard::Exclusive);
        &ALONE.0
    }

    /// A participant that the model registered on its main thread, on the way to the thread that will use it.
    pub(crate) struct Participant(Kind);

    // SAFETY: only models move a handle, before its first use by the other thread, and never share it.
    unsafe impl Send for Participant {}

    /// Registers a participant and burns its first pin, which always collects: both would blow a model up.
    pub(crate) fn register(collector: &Collector) -> Participant {
        let handle = collector.register();
        drop(handle.pin());
        Participant(Kind::Epoch(handle))
    }

    impl Participant {
        /// One that pins by [`lasting`].
        pub(crate) fn lasting() -> Self {
            Self(Kind::Lasting)
        }

        /// One that pins by [`strict`].
        pub(crate) fn strict() -> Self {
            Self(Kind::Strict)
        }

        /// Makes this the participant that `pin` uses on the calling thread.
        pub(crate) fn adopt(self) {
            PARTICIPANT.with(|p| *p.borrow_mut() = Some(self.0));
        }

        pub(crate) fn pin(&self) -> Guard {
            self.0.pin()
        }

        /// Hands this participant's garbage over and tries to reclaim.
        pub(crate) fn flush(&self) {
            let pin = self.pin();
            if let Guard::Epoch(guard) = &pin {
                guard.flush();
            }
        }

        /// Takes the calling thread's participant back, so that the model drops it after the join.
        pub(crate) fn take_back() -> Option<Self> {
            PARTICIPANT.with(|p| p.borrow_mut().take()).map(Participant)
        }
    }

    impl Kind {
        fn pin(&self) -> Guard {
            match self {
                Self::Epoch(handle) => Guard::Epoch(handle.pin()),
                Self::Lasting => lasting(),
                Self::Strict => strict(),
            }
        }
    }

    pub(crate) fn pin_numbered() -> (Guard, usize) {
        (pin(), number())
    }

    /// All threads of a model are one thread of the system: they share a number, unless the model gives them others.
    pub(crate) fn number() -> usize {
        NUMBER.with(Cell::get)
    }

    pub(crate) fn set_number(number: usize) {
        NUMBER.with(|n| n.set(number));
    }

    pub(crate) fn pin() -> Guard {
        PARTICIPANT
            .with(|p| p.borrow().as_ref().expect("the model adopts a participant on each thread").pin())
    }

    pub(crate) fn flush() {
        let pin = pin();
        if let Guard::Epoch(guard) = &pin {
            guard.flush();
        }
    }

    /// A model flushes where it wants to.
    pub(crate) fn settle(_: impl FnOnce() -> u64) {}
}

pub(crate) use imp::*;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::primitive::plain::AtomicBool;
    use std::sync::Arc;

    /// What frees nothing of quell's own may be all that holds much of a user's.
    #[test]
    fn a_piece_of_no_bytes_is_settled_too() {
        let freed = Arc::new(AtomicBool::new(false));
        let free = {
            let freed = freed.clone();
            move || freed.store(true, Ordering::Relaxed)
        };
        // SAFETY: it frees nothing, and what it writes to it shares.
        unsafe { retire(&pin(), 0, free) };
        // Other tests' pins may hold it for a while.
        let ran = (1..1_000_000).any(|tick| {
            settle(|| tick);
            drop(pin());
            freed.load(Ordering::Relaxed)
        });
        assert!(ran, "it waits for other pieces to come");
    }
}
