//! Waiting for a flight: as a thread that parks, or as a task that is polled. One loop each; in both the order is
//! *check, listen, check again, wait*.

use super::{Flight, Waited};
use crate::clock::{Moment, Time};
use crate::primitive::park::{Bell, Listening, Woken};
use std::pin::Pin;
use std::task::{Context, Poll};

/// One who waits.
pub(crate) trait Waiter {
    /// What the wait comes to.
    type End;

    /// Whether it has come to that; else, until when to wait before the next look.
    fn look(&mut self) -> Result<Self::End, Moment>;

    /// Whether the load's future is to be polled, and by this one.
    fn may_drive(&self) -> bool;

    /// Polls the load's future, unless somebody else has begun to.
    fn drive(&mut self);

    /// What it has come to, now that the moment has come by real time, whatever the clock says. `None`: it goes on.
    fn due(&mut self) -> Option<Self::End>;
}

/// One who waits as a task.
pub(crate) trait WaitingTask: Waiter {
    /// Sees to it that the task is polled at that moment. Ready when it has come.
    fn poll_timer(&mut self, until: Moment, cx: &mut Context<'_>) -> Poll<()>;
}

/// Waits as a thread.
pub(crate) fn park<W: Waiter>(bell: &Bell, time: &Time, mut waiter: W) -> W::End {
    let mut listening = None;
    loop {
        let until = match waiter.look() {
            Ok(end) => return end,
            Err(until) => until,
        };
        if waiter.may_drive() {
            waiter.drive();
            continue;
        }
        let Some(ear) = listening.take() else {
            listening = Some(bell.listen());
            continue;
        };
        match ear.wait(time.real_time_until(until)) {
            Woken::Rung => {}
            // A park that ended counts as due: the clock may be coarse, and would make us spin.
            Woken::TimedOut => {
                if let Some(end) = waiter.due() {
                    return end;
                }
            }
        }
    }
}

/// Waits as a task.
pub(crate) fn rest<W: WaitingTask + Unpin>(bell: &Bell, waiter: W) -> Rest<'_, W> {
    Rest { bell, waiter, listening: None }
}

/// A wait of a task.
#[must_use]
pub(crate) struct Rest<'a, W> {
    bell: &'a Bell,
    waiter: W,
    listening: Option<Listening>,
}

impl<W: WaitingTask + Unpin> Future for Rest<'_, W> {
    type Output = W::End;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<W::End> {
        let Self { bell, waiter, listening } = self.get_mut();
        let mut driven = false;
        loop {
            let until = match waiter.look() {
                Ok(end) => return Poll::Ready(end),
                Err(until) => until,
            };
            if waiter.may_drive() {
                // Once in a turn, so that a future which is always ready for more leaves room for others.
                if std::mem::replace(&mut driven, true) {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                waiter.drive();
                continue;
            }
            let Some(ear) = listening else {
                *listening = Some(bell.listen());
                continue;
            };
            if ear.poll_rung(cx).is_ready() {
                ear.listen_again(bell);
                continue;
            }
            if waiter.poll_timer(until, cx).is_pending() {
                return Poll::Pending;
            }
            if let Some(end) = waiter.due() {
                return Poll::Ready(end);
            }
        }
    }
}

impl<V: Clone, T, P> Flight<V, T, P> {
    /// Where people wait for it.
    pub(crate) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// What a follower's wait has come to at this time; else, until when to wait (INV-flight-2).
    pub(crate) fn look(&self, time: &Time, deadline: Moment) -> Result<Waited<V>, Moment> {
        if let Some(outcome) = self.outcome() {
            // The one who settled may have been suspended before the bell: whoever sees that rings.
            self.tell();
            return Ok(Waited::Ended(outcome));
        }
        let now = time.now();
        let lease_end = self.lease.end();
        // Where both have passed, the one that came first counts: a wait that has ended must not become a load.
        if deadline <= now && deadline <= lease_end {
            return Ok(Waited::TimedOut);
        }
        if self.lease.is_over(now) {
            return Ok(Waited::LeaseOver);
        }
        Err(deadline.min(lease_end))
    }

    /// What it has come to when the earlier of the two has come by real time.
    pub(crate) fn due(&self, deadline: Moment) -> Waited<V> {
        if deadline <= self.lease.end() {
            return Waited::TimedOut;
        }
        self.end_lease_by_park();
        Waited::LeaseOver
    }
}
