//! A place in a flight: of a follower, or of a leader whose load is a future. Dropped, it is left; with the last of them the
//! load goes.

use super::{Core, Lease};
use crate::flight::{Left, Load, Who};
use crate::primitive::Arc as Shared;
use crate::primitive::epoch::{contain, pin};
use crate::slot::{Flight, Next, SlotLoad, SlotTicket, State};
use std::sync::Arc;

/// One who wants a flight's value.
pub(crate) struct Place<K, V, S> {
    core: Arc<Core<K, V, S>>,
    flight: Shared<Flight<K, V>>,
    who: Who,
}

impl<K, V, S> Place<K, V, S> {
    /// A follower's.
    pub(super) fn of(core: &Arc<Core<K, V, S>>, ticket: SlotTicket<K, V>) -> Self {
        let (flight, who) = ticket.open();
        Self { core: core.clone(), flight, who }
    }

    /// A leader's, who has put a future in.
    pub(super) fn of_leader(core: Arc<Core<K, V, S>>, flight: Shared<Flight<K, V>>, who: Who) -> Self {
        Self { core, flight, who }
    }

    pub(crate) fn core(&self) -> &Arc<Core<K, V, S>> {
        &self.core
    }

    pub(crate) fn flight(&self) -> &Shared<Flight<K, V>> {
        &self.flight
    }
}

impl<K, V, S> Drop for Place<K, V, S> {
    fn drop(&mut self) {
        let Self { core, flight, who } = self;
        if matches!(who, Who::Leader(_))
            && let Some(load) = flight.drive.orphan()
        {
            core.drop_load(flight, load);
        }
        match flight.leave(*who) {
            Left::Others => {}
            Left::Threads => core.leave_to_threads(flight),
            Left::Nobody => core.give_up(flight),
        }
    }
}

impl<K, V, S> Core<K, V, S> {
    /// Only threads want a flight: one of them may have to poll its future now. If none may, each looks for himself.
    pub(crate) fn leave_to_threads(self: &Arc<Self>, flight: &Shared<Flight<K, V>>) {
        match flight.drive.strand() {
            Some(load) => self.drop_load(flight, load),
            None => flight.ring(),
        }
    }

    /// Gives the slot of a flight back that nobody wants any more, then drops its future.
    pub(super) fn give_up(self: &Arc<Self>, flight: &Shared<Flight<K, V>>) {
        match flight.drive.cancel() {
            Some(load) => self.drop_load(flight, load),
            // Its own task polls it just now, and drops it then. Nobody need wait for that.
            None => self.give_back(flight),
        }
    }

    /// Moves a slot on that a flight has left which nobody wants any more.
    fn give_back(&self, flight: &Flight<K, V>) {
        let stay = self.stay(pin());
        let slot = &*flight.target;
        if let state @ State::Loading(there) = slot.load(&stay)
            && std::ptr::eq(there, flight)
        {
            // A lost race means that the slot has moved on.
            if self.swing(slot, state, Next::Prev, None, &stay).is_ok() {
                // The capacity may have been lowered while a load kept what was there.
                self.stored(slot, None, &stay);
            }
        }
    }

    /// Drops a load that was taken out of its flight: the slot goes back first, then the future goes, which is user code.
    pub(crate) fn drop_load(self: &Arc<Self>, flight: &Shared<Flight<K, V>>, load: SlotLoad<K, V>) {
        match load {
            Load::Running(running) => {
                drop(Lease::resume(self.clone(), flight.clone(), running.seat, running.begun));
                let (runtime, future) = (running.runtime, running.future);
                contain(|| runtime.enter(|| drop(future)));
                // The task of its own has nothing left to do.
                if let Some(task) = running.task {
                    contain(|| task.wake());
                }
            }
            Load::Ended(own) => contain(|| drop(own)),
        }
    }
}
