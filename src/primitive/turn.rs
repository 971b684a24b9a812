//! Calls that wait until the one that a thread is in has returned, instead of running inside of it.

use super::thread_local;
use std::cell::RefCell;
use std::collections::VecDeque;

type Call = Box<dyn FnOnce()>;

thread_local! {
    /// What waits for the call that this thread is in; `None` if it is in none.
    static WAITING: RefCell<Option<VecDeque<Call>>> = const { RefCell::new(None) };
}

/// Makes a call, which must not panic, and then those that it has led to, in their order. Within such a call: once that has
/// returned.
pub(crate) fn in_turn(call: impl FnOnce() + 'static) {
    let mut call = Some(call);
    // Where thread-locals have gone already, nobody is in a call that matters.
    let waits = WAITING.try_with(|waiting| match &mut *waiting.borrow_mut() {
        Some(waiting) => {
            waiting.extend(call.take().map(|call| Box::new(call) as Call));
            true
        }
        none => {
            *none = Some(VecDeque::new());
            false
        }
    });
    let Some(call) = call else { return };
    call();
    while waits.is_ok()
        && let Some(next) = next()
    {
        next();
    }
}

/// The call whose turn it is; after the last, the thread is in none.
fn next() -> Option<Call> {
    let take = |waiting: &RefCell<Option<VecDeque<Call>>>| {
        let mut waiting = waiting.borrow_mut();
        let next = waiting.as_mut()?.pop_front();
        if next.is_none() {
            *waiting = None;
        }
        next
    };
    WAITING.try_with(take).ok().flatten()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::rc::Rc;

    #[test]
    fn calls_within_a_call_come_after_it() {
        let said = Rc::new(RefCell::new(String::new()));
        let say = |what: char| {
            let said = said.clone();
            move || said.borrow_mut().push(what)
        };
        for _ in 0..2 {
            let (a, b, c, d) = (say('a'), say('b'), say('c'), say('d'));
            in_turn(move || {
                in_turn(move || {
                    in_turn(d);
                    b();
                });
                in_turn(c);
                a();
            });
        }
        assert_eq!(*said.borrow(), "abcdabcd");
    }

    /// As deep as it goes, the stack does not grow.
    #[test]
    fn a_long_chain() {
        fn count(down: u32) {
            if down > 0 {
                in_turn(move || count(down - 1));
            }
        }
        in_turn(|| count(1_000_000));
    }
}
