//! A stay in the cache: a pin, and what has been removed under it until the eviction listener can be told.

use super::Core;
use super::evict::Purse;
use crate::clock::Time;
use crate::config::Listener;
use crate::observe::{Count, RemovalCause};
use crate::primitive::caught;
use crate::primitive::epoch::{Guard, contain, settle};
use crate::primitive::turn::in_turn;
use crate::slot::{Removed, Taken};
use std::cell::RefCell;
use std::ops::Deref;
use std::sync::Weak;

/// A tick of the default clock, about: nanoseconds as a power of two.
const TICK: u32 = 22;

/// One operation's pin. When it ends, the pin goes first, then the purse; then the listener is told, which holds nothing; then
/// what has been retired is settled.
pub(crate) struct Stay<'c, K, V, S> {
    guard: Guard,
    pub(super) purse: Purse<'c>,
    outbox: Outbox<'c, K, V, S>,
}

/// What has been removed, and is to be told.
#[must_use]
pub(crate) struct Outbox<'c, K, V, S> {
    core: &'c Core<K, V, S>,
    removed: RefCell<Vec<(Removed<K, V>, RemovalCause)>>,
}

impl<K, V, S> Core<K, V, S> {
    /// Begins a stay with this pin.
    pub(crate) fn stay(&self, guard: Guard) -> Stay<'_, K, V, S> {
        let outbox = Outbox { core: self, removed: RefCell::new(Vec::new()) };
        Stay { guard, purse: Purse::new(&self.policy), outbox }
    }
}

impl<K, V, S> Deref for Stay<'_, K, V, S> {
    type Target = Guard;

    fn deref(&self) -> &Guard {
        &self.guard
    }
}

impl<'c, K, V, S> Stay<'c, K, V, S> {
    /// A value has been taken out. The listener is told after the pin.
    pub(super) fn removes(&self, taken: Taken<'_, K, V>, cause: RemovalCause) {
        if self.outbox.core.teller.is_some() {
            self.outbox.removed.borrow_mut().push((taken.hold(), cause));
        }
    }

    /// Unpins, without telling anybody yet.
    pub(crate) fn leave(self) -> Outbox<'c, K, V, S> {
        self.outbox
    }
}

impl<K, V, S> Drop for Outbox<'_, K, V, S> {
    fn drop(&mut self) {
        if let Some(tell) = &self.core.teller {
            self.removed.take().into_iter().for_each(|(removed, cause)| tell(removed, cause));
        }
        settle(|| Time::Coarse.now().nanos() >> TICK);
    }
}

/// Tells the eviction listener.
pub(crate) type Teller<K, V> = Box<dyn Fn(Removed<K, V>, RemovalCause) + Send + Sync>;

/// Tells a cache's listener of one value after the other: of one that leaves because of what the listener does, when it has
/// returned.
pub(crate) fn teller<K, V, S>(listener: Listener<K, V>, core: Weak<Core<K, V, S>>) -> Teller<K, V>
where
    K: Send + Sync + 'static,
    V: Send + Sync + 'static,
    S: Send + Sync + 'static,
{
    Box::new(move |removed, cause| {
        let (listener, core) = (listener.clone(), core.clone());
        in_turn(move || {
            let told = caught(|| listener(removed.key(), removed.value(), cause));
            if told.is_none()
                && let Some(core) = core.upgrade()
            {
                core.counters.add(Count::ListenerPanics);
            }
            contain(|| drop((removed, listener)));
        });
    })
}
