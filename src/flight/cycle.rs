//! Loads that wait for themselves: who waits for which flight, on behalf of which flight.
//!
//! A thread that runs a loader, or polls a load's future, has the flight on its stack of running loads. When it leads or joins another flight
//! from there, an edge says so; before it parks, it walks the edges from the flight it wants to wait for. If they
//! lead back to a flight on its own stack, waiting would never end.
//!
//! An edge holds identities and no references, belongs to the ticket (or to the nested load), and goes when that
//! is dropped. Two threads that close a cycle at the same time both register first and walk then, with a SeqCst
//! fence in between: at least one of them sees the other's edge. A cycle counts only if a second walk finds the
//! very same edges: then all of them existed at one instant, and so did the flights they name.
//!
//! Chains that leave quell's calls (a loader that waits for another thread of its own) cannot be seen; the lease
//! ends them.

use super::registry::{Registry, Seat};
use crate::primitive::atomic::{Ordering, fence};
use crate::primitive::epoch::{Guard, pin};
use crate::primitive::{Arc, global, thread_local};
use std::cell::RefCell;
use std::sync::Arc as Name;

/// The identity of a flight, or of a batch for several: its address, unique among those that exist at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlightId(usize);

impl FlightId {
    pub(super) fn new(address: usize) -> Self {
        Self(address)
    }

    pub(crate) fn of<T>(flight: &T) -> Self {
        Self::new(std::ptr::from_ref(flight).addr())
    }
}

/// `from`'s load waits for `to`, a flight of the cache called `name`.
struct Edge {
    from: FlightId,
    to: FlightId,
    name: Name<str>,
}

/// All waits on behalf of a flight, of all caches: a cycle may lead through several.
pub(crate) struct Graph(Registry<Edge>);

/// A wait that others can see. Goes when it is dropped.
#[must_use]
pub(crate) struct Wait<'a> {
    graph: &'a Graph,
    seat: Option<Seat<Edge>>,
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        if let Some(seat) = self.seat.take() {
            self.graph.0.leave(seat, &pin());
        }
    }
}

/// A way in which a load waits for itself, as names of caches.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Cycle(pub(crate) String);

struct Running {
    id: FlightId,
    name: Name<str>,
}

thread_local! {
    /// The flights whose loaders this thread is in the middle of, the innermost last.
    static RUNNING: RefCell<Vec<Running>> = const { RefCell::new(Vec::new()) };
}

/// Looks at this thread's running loads. In its last destructors it has none, and whoever is called from there waits
/// on nobody's behalf.
fn running<R>(look: impl FnOnce(&mut Vec<Running>) -> R) -> Option<R> {
    RUNNING.try_with(|running| look(&mut running.borrow_mut())).ok()
}

impl Graph {
    pub(crate) fn new() -> Self {
        Self(Registry::new())
    }

    fn add(&self, from: FlightId, to: FlightId, name: &Name<str>) -> Wait<'_> {
        let edge = Edge { from, to, name: name.clone() };
        let seat = Some(self.0.enter(Arc::new(edge)));
        Wait { graph: self, seat }
    }

    /// The chain of edges from `start` to one of `goals`, as addresses of edges and names.
    fn path(&self, start: FlightId, goals: &[FlightId], guard: &Guard) -> Option<Vec<(usize, Name<str>)>> {
        let mut edges = Vec::new();
        self.0.each(guard, |edge| edges.push(edge));
        // Depth first; few loads wait for each other at one time.
        let mut open = vec![(start, Vec::new())];
        let mut met = vec![start];
        while let Some((at, path)) = open.pop() {
            for edge in edges.iter().filter(|e| e.from == at) {
                let mut longer: Vec<_> = path.clone();
                longer.push((std::ptr::from_ref::<Edge>(edge).addr(), edge.name.clone()));
                if goals.contains(&edge.to) {
                    return Some(longer);
                }
                if !met.contains(&edge.to) {
                    met.push(edge.to);
                    open.push((edge.to, longer));
                }
            }
        }
        None
    }

    /// Registers that this thread is about to wait for flight `to`, and looks whether that could ever end.
    pub(crate) fn wait_for(&self, to: FlightId, name: &Name<str>) -> Result<Wait<'_>, Cycle> {
        let own: Vec<(FlightId, Name<str>)> =
            running(|r| r.iter().map(|r| (r.id, r.name.clone())).collect()).unwrap_or_default();
        let Some((from, _)) = own.last() else {
            // Not inside any loader: nobody can wait for this thread.
            return Ok(Wait { graph: self, seat: None });
        };
        let told = |stack: &[(FlightId, Name<str>)], beyond: &[(usize, Name<str>)]| {
            let names = stack.iter().map(|(_, n)| n).chain([name]).chain(beyond.iter().map(|(_, n)| n));
            Cycle(names.map(|n| &**n).collect::<Vec<_>>().join(" -> "))
        };
        if let Some(at) = own.iter().position(|(id, _)| *id == to) {
            return Err(told(&own[at..], &[]));
        }
        let wait = self.add(*from, to, name);
        // SeqCst: orders this thread's edge before its walk against another thread's edge before its walk. If neither
        // walk saw the other's edge, each fence would have to come before the other.
        fence(Ordering::SeqCst);
        let goals: Vec<FlightId> = own.iter().map(|(id, _)| *id).collect();
        let guard = pin();
        let found = self.path(to, &goals, &guard);
        // Under one pin no edge's address is used again: equal addresses are the same edges.
        match found {
            Some(path) if self.path(to, &goals, &guard).as_ref() == Some(&path) => Err(told(&own, &path)),
            _ => Ok(wait),
        }
    }
}

/// While this exists, the calling thread runs the loader of a flight.
#[must_use]
pub(crate) struct Loading<'a> {
    id: FlightId,
    nested: Option<Wait<'a>>,
}

/// Registers that the load of flight `from` waits for `to`, a flight or a batch of the cache called `name`.
pub(crate) fn bound<'a>(graph: &'a Graph, from: FlightId, to: FlightId, name: &Name<str>) -> Wait<'a> {
    graph.add(from, to, name)
}

/// Registers that the load that this thread is in, if any, waits for a load of its own making.
pub(crate) fn nested<'a>(graph: &'a Graph, id: FlightId, name: &Name<str>) -> Option<Wait<'a>> {
    let outer = running(|r| r.last().map(|r| r.id)).flatten();
    outer.map(|outer| graph.add(outer, id, name))
}

/// Whether this thread is in the middle of a load.
pub(crate) fn is_within_a_load() -> bool {
    running(|r| !r.is_empty()).unwrap_or(false)
}

/// The load that a thread is in, for others that work for it.
pub(crate) struct Behalf(Option<Running>);

impl Behalf {
    /// Of the calling thread.
    pub(crate) fn here() -> Self {
        let innermost = running(|r| r.last().map(|r| Running { id: r.id, name: r.name.clone() }));
        Self(innermost.flatten())
    }

    /// While what is returned exists, the calling thread is in that load too, if there is one. The load must last as long.
    pub(crate) fn enter(&self) -> Option<Loading<'static>> {
        self.0.as_ref().map(|Running { id, name }| Loading::resume(*id, name))
    }
}

impl<'a> Loading<'a> {
    /// Enters the loader of flight `id`, of the cache called `name`.
    pub(crate) fn enter(graph: &'a Graph, id: FlightId, name: &Name<str>) -> Self {
        let nested = nested(graph, id, name);
        let mut loading = Self::resume(id, name);
        loading.nested = nested;
        loading
    }

    /// Goes on with the loader of flight `id`, of the cache called `name`: whoever waits for it has an edge already.
    pub(crate) fn resume(id: FlightId, name: &Name<str>) -> Self {
        running(|r| r.push(Running { id, name: name.clone() }));
        Self { id, nested: None }
    }
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        running(|r| {
            if let Some(at) = r.iter().rposition(|r| r.id == self.id) {
                r.remove(at);
            }
        });
        self.nested.take();
    }
}

global! {
    /// The edges of all caches of the process.
    pub(crate) fn graph() -> Graph = Graph::new();
}
