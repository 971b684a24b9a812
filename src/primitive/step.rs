//! Named places between two shared-memory steps of a protocol, where a test can suspend a thread.
//!
//! In an ordinary build `step` is nothing. In the crate's own tests it counts the steps of a thread that a
//! test has armed, and parks it at the chosen one: the stall tests prove with it that nobody else needs that
//! thread to go on.

/// Marks a place between two steps.
#[cfg(not(all(test, not(loom))))]
#[inline(always)]
pub(crate) fn step() {}

#[cfg(all(test, not(loom)))]
pub(crate) use armed::step;

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
