//! Named places between two shared-memory steps of a protocol, where a test can suspend a thread.
//!
//! In an ordinary build `step` is nothing. In the crate's own tests it counts the steps of a thread that a
//! test has armed, and parks it at the chosen one: the stall tests prove with it that nobody else needs that
//! thread to go on.

/// Marks a place between two steps.
#[cfg(not(test))]
#[inline(always)]
pub(crate) fn step() {}

#[cfg(all(test, not(loom)))]
pub(crate) use armed::step;
#[cfg(all(test, loom))]
pub(crate) use told::step;

/// In a model, a thread that tells its steps can be looked at between any two of them.
///
/// Loom keeps only the last access to an atomic, so a thread's own load hides another's earlier one from its CAS,
/// and the order of the two is never turned round. A step that is told, and a look by the other thread, are accesses
/// of an atomic that hides nothing, and that orders nothing.
#[cfg(all(test, loom))]
pub(crate) mod told {
    use crate::primitive::atomic::{AtomicUsize, Ordering};
    use std::cell::RefCell;
    use std::sync::Arc;

    loom::thread_local! {
        static STEPS: RefCell<Option<Steps>> = RefCell::new(None);
    }

    /// The steps of one thread.
    #[derive(Clone)]
    pub(crate) struct Steps(Arc<AtomicUsize>);

    impl Steps {
        pub(crate) fn new() -> Self {
            Self(Arc::new(AtomicUsize::new(0)))
        }

        /// From now on the calling thread tells its steps here.
        pub(crate) fn tell(self) {
            STEPS.with(|steps| *steps.borrow_mut() = Some(self));
        }

        /// Lets what follows happen between any two of the steps.
        pub(crate) fn look(&self) {
            // Relaxed: orders nothing, as it must.
            self.0.fetch_add(0, Ordering::Relaxed);
        }
    }

    /// Marks a place between two steps.
    pub(crate) fn step() {
        STEPS.with(|steps| {
            if let Some(steps) = &*steps.borrow() {
                // Relaxed: orders nothing, as it must.
                steps.0.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
}

#[cfg(all(test, not(loom)))]
pub(crate) mod armed {
    use std::cell::RefCell;
    use std::sync::mpsc::{Receiver, Sender, channel};

    struct Armed {
        left: usize,
        reached: Sender<()>,
        release: Receiver<()>,
    }

    std::thread_local! {
        static ARMED: RefCell<Option<Armed>> = const { RefCell::new(None) };
    }

    /// The test's side of an armed thread.
    pub(crate) struct Stall {
        pub(crate) reached: Receiver<()>,
        pub(crate) release: Sender<()>,
    }

    /// What the thread that is to be suspended calls first, by way of the closure.
    pub(crate) fn arm(nth: usize) -> (Stall, impl FnOnce() + Send) {
        let (reached_tx, reached) = channel();
        let (release, release_rx) = channel();
        let armed = Armed { left: nth, reached: reached_tx, release: release_rx };
        (Stall { reached, release }, move || ARMED.set(Some(armed)))
    }

    /// Ends the arming of this thread; `true` if the chosen step was never reached.
    pub(crate) fn disarm() -> bool {
        ARMED.take().is_some()
    }

    /// Marks a place between two steps.
    pub(crate) fn step() {
        let due = ARMED.with_borrow_mut(|armed| {
            let a = armed.as_mut()?;
            if a.left > 0 {
                a.left -= 1;
                return None;
            }
            armed.take()
        });
        if let Some(armed) = due {
            // A test that has gone away releases the thread by dropping its ends.
            let _ = armed.reached.send(());
            let _ = armed.release.recv();
        }
    }
}
