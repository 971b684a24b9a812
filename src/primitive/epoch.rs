//! Epoch-based reclamation: one collector for all of quell, so that no other crate's pin holds our garbage.

pub(crate) use crossbeam_epoch::Guard;

use super::plain::{AtomicU64, Ordering};

/// How many drops of user values have panicked while they were reclaimed.
static DROP_PANICS: AtomicU64 = AtomicU64::new(0);

pub(crate) fn drop_panics() -> u64 {
    // Relaxed: a statistic; nothing is published by it.
    DROP_PANICS.load(Ordering::Relaxed)
}

/// Runs `drop` (user code at its end), and turns a panic into a count: a collector's thread is not its owner's.
pub(crate) fn contain(drop: impl FnOnce()) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(drop)).is_err() {
        // Relaxed: a statistic; nothing is published by it.
        DROP_PANICS.fetch_add(1, Ordering::Relaxed);
    }
}

/// Runs `reclaim` after every pin that exists now has ended.
///
/// # Safety
/// `reclaim` may run on any thread, and nothing that it frees may be reachable for a thread that pins from now on.
pub(crate) unsafe fn retire(guard: &Guard, reclaim: impl FnOnce()) {
    // SAFETY: the caller's contract is that of `defer_unchecked`.
    unsafe { guard.defer_unchecked(move || contain(reclaim)) }
}

/// A guard that reclaims at once, for structures that nobody else can reach any more.
///
/// # Safety
/// The caller must own exclusively everything that it retires or reads with it.
pub(crate) unsafe fn exclusive<'g>() -> &'g Guard {
    // SAFETY: the caller's contract is that of `unprotected`.
    unsafe { crossbeam_epoch::unprotected() }
}

#[cfg(not(loom))]
mod imp {
    use crossbeam_epoch::{Collector, Guard, LocalHandle};
    use std::sync::OnceLock;

    static COLLECTOR: OnceLock<Collector> = OnceLock::new();

    fn collector() -> &'static Collector {
        COLLECTOR.get_or_init(Collector::new)
    }

    thread_local! {
        static HANDLE: LocalHandle = collector().register();
    }

    /// Pins this thread. In the destructors of other thread-locals, where the handle may be gone, registers afresh.
    #[inline]
    pub(crate) fn pin() -> Guard {
        HANDLE.try_with(LocalHandle::pin).unwrap_or_else(|_| collector().register().pin())
    }

    /// Hands this thread's garbage over and tries to reclaim what no pin holds any more.
    pub(crate) fn flush() {
        // An epoch must advance three times before what was retired in it may go.
        for _ in 0..4 {
            pin().flush();
        }
    }
}

#[cfg(loom)]
mod imp {
    use crossbeam_epoch::{Collector, Guard, LocalHandle};
    use std::cell::RefCell;

    loom::thread_local! {
        static HANDLE: RefCell<Option<LocalHandle>> = RefCell::new(None);
    }

    /// A participant that the model registered on its main thread, on the way to the thread that will use it.
    pub(crate) struct Participant(LocalHandle);

    // SAFETY: only models move a handle, before its first use by the other thread, and never share it.
    unsafe impl Send for Participant {}

    /// Registers a participant and burns its first pin, which always collects: both would blow a model up.
    pub(crate) fn register(collector: &Collector) -> Participant {
        let handle = collector.register();
        drop(handle.pin());
        Participant(handle)
    }

    impl Participant {
        /// Makes this the participant that `pin` uses on the calling thread.
        pub(crate) fn adopt(self) {
            HANDLE.with(|h| *h.borrow_mut() = Some(self.0));
        }

        pub(crate) fn pin(&self) -> Guard {
            self.0.pin()
        }

        /// Takes the calling thread's participant back, so that the model drops it after the join.
        pub(crate) fn take_back() -> Option<Self> {
            HANDLE.with(|h| h.borrow_mut().take()).map(Participant)
        }
    }

    pub(crate) fn pin() -> Guard {
        HANDLE.with(|h| h.borrow().as_ref().expect("the model adopts a participant on each thread").pin())
    }

    pub(crate) fn flush() {
        pin().flush();
    }
}

pub(crate) use imp::*;
