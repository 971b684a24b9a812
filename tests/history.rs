//! Recorded histories against a sequential model of one key: `cargo test --test history`; with `QUELL_LONG=1` for a
//! minute.
//!
//! Threads work on few keys, and yield inside quell's windows: in loaders, in `Eq` of keys, in `Clone` of values and in
//! the clock. Each call is noted with stamps from one counter. Every value, and the load that is to bring it, has a number
//! of its own. Then an order is searched for each key's history (module `checker`) in which every step takes effect at one
//! instant between its stamps, and is what the model (module `model`) says.
//!
//! # The model
//! ```text
//!   Place { value: Option<number>, stale: bool, flight: Option<number> }
//! ```
//! | step | between | allowed if | then |
//! |---|---|---|---|
//! | a read gets `v` or nothing | its call | that is the value | |
//! | a call that may load gets `v`, and does not load | its call | `v` is the value, or the flight is the one that brings `v` | |
//! | it gets the error of load `f` | its call | the flight is `f` | |
//! | a load claims | call, loader's start | no flight, and no fresh value | its flight |
//! | a load ends | loader's end, return | | if the flight is its own: stored, no flight; else nothing |
//! | `insert` | its call | | that value, fresh; no flight |
//! | `remove`, `invalidate`, `invalidate_all`, `retain` | its call | what is returned is the value | nothing; no flight |
//! | `expire` | its call | it says whether there is a value | stale; no flight |
//! | `compute` claims | call, closure's start | no flight; its closure, if it runs, sees the value | its flight |
//! | `compute` ends | closure's end, return | `Superseded` if and only if the flight is not its own | as it says; no flight |
//!
//! A load is thus two steps, as it is two compare-and-swaps, and nothing in the model is left to choice. A load that is
//! refused, and what its callers get, needs no rule of its own: a write takes the flight out of the place, so that the
//! load's end stores nothing, and who gets its value all the same must have begun early enough to find it there.
//!
//! That no value loaded before a write is served to a call that began after it follows; it is also checked by itself,
//! without the model, from the stamps alone. Nothing here evicts, ends by time, or loses a lease, so that nothing may
//! vanish by itself.
//!
//! `the_source` is the promise from the outside: whoever changes the source and invalidates is never shown what was
//! before.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test drives real threads with what is at hand"
)]

#[path = "history/checker.rs"]
mod checker;
mod common;
#[path = "history/model.rs"]
mod model;

use checker::{Timed, linearize};
use common::{Hashing, Random, Sut, ms, scaled, secs};
use model::{Did, Ending, Flight, Gives, History, Id, Over, Place, check};
use quell::{Cache, Clock, DefaultHashBuilder, LoadErrorKind, Op, Outcome};
use std::cell::Cell;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const THREADS: u64 = 5;
const KEYS: u64 = 2;
/// The calls of each thread in one history.
const CALLS: u64 = 60;

thread_local! {
    static SEED: Cell<u64> = const { Cell::new(0) };
}

/// Below `n`, at random.
fn below(n: u64) -> u64 {
    let mut random = Random(SEED.get());
    let drawn = random.below(n);
    SEED.set(random.0);
    drawn
}

/// Lets the others in, now and then.
fn jolt() {
    if below(4) == 0 {
        thread::yield_now();
    }
}

#[derive(Clone, Debug, Eq)]
struct Key(u64);

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        jolt();
        self.0 == other.0
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Value(Id);

impl Clone for Value {
    fn clone(&self) -> Self {
        jolt();
        Self(self.0)
    }
}

/// The error of a load, with its number.
#[derive(Debug)]
struct Refusal(Id);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "load {} failed", self.0)
    }
}

impl std::error::Error for Refusal {}

/// Time stands still, but looking at it takes long.
struct Still;

impl Clock for Still {
    fn now(&self) -> Duration {
        jolt();
        secs(1)
    }
}

/// One table or several, and a good hasher or a constant one. No load loses its lease.
fn caches() -> impl Iterator<Item = impl Fn() -> Sut<Key, Value>> {
    let hashers = [Hashing::Spread(DefaultHashBuilder::new()), Hashing::Constant];
    let shapes = [1, 8].into_iter().flat_map(move |shards| hashers.clone().map(|hasher| (shards, hasher)));
    shapes.map(|(shards, hasher)| {
        move || Cache::builder().shards(shards).hasher(hasher.clone()).clock(Still).lease(secs(3_600)).build()
    })
}

/// One thread's notes.
struct Recorder<'a> {
    cache: &'a Sut<Key, Value>,
    /// Stamps, and numbers for values and loads.
    counter: &'a AtomicU64,
    notes: Vec<(u64, Timed<Did>)>,
}

impl Recorder<'_> {
    fn stamp(&self) -> u64 {
        // SeqCst: stamps are in the order in which they are taken.
        self.counter.fetch_add(1, Ordering::SeqCst)
    }

    fn note(&mut self, key: u64, from: u64, to: u64, op: Did) {
        self.notes.push((key, Timed { from, to, op }));
    }

    fn call<R>(&self, call: impl FnOnce(&Sut<Key, Value>) -> R) -> (u64, u64, R) {
        let from = self.stamp();
        let result = call(self.cache);
        (from, self.stamp(), result)
    }

    fn anything(&mut self) {
        let key = Key(below(KEYS));
        match below(20) {
            0..=2 => self.read(&key),
            3 | 4 => {
                let id = self.stamp();
                let (from, to, ()) = self.call(|cache| cache.insert(key.clone(), Value(id)));
                self.note(key.0, from, to, Did::Insert(id));
            }
            5 => {
                let (from, to, got) = self.call(|cache| cache.remove(&key));
                self.note(key.0, from, to, Did::Remove(got.map(|v| v.0)));
            }
            6 => {
                let (from, to, ()) = self.call(|cache| cache.invalidate(&key));
                self.note(key.0, from, to, Did::Clear);
            }
            7 => {
                let (from, to, ()) = match below(2) {
                    0 => self.call(Cache::invalidate_all),
                    _ => self.call(|cache| cache.retain(|_, _| false)),
                };
                (0..KEYS).for_each(|key| self.note(key, from, to, Did::Clear));
            }
            8 | 9 => {
                let (from, to, was) = self.call(|cache| cache.expire(&key));
                self.note(key.0, from, to, Did::Expire(was));
            }
            10..=13 => self.load(&key),
            14 => self.fail(&key),
            15 => self.panic(&key),
            16..=18 => self.compute(&key),
            // The table grows meanwhile.
            _ => (0..8).for_each(|_| self.cache.insert(Key(KEYS + self.stamp()), Value(0))),
        }
    }

    fn read(&mut self, key: &Key) {
        let (from, to, got) = match below(4) {
            0 => self.call(|cache| cache.pin().get(key).map(|v| v.0)),
            1 => self.call(|cache| cache.peek(key).map(|v| v.0)),
            2 => self.call(|cache| cache.read(key, |v| v.0)),
            _ => self.call(|cache| cache.get(key).map(|v| v.0)),
        };
        self.note(key.0, from, to, Did::Read(got));
    }

    fn load(&mut self, key: &Key) {
        let id = self.stamp();
        let mut ran = None;
        let (from, to, got) = self.call(|cache| {
            cache.get_with(key, || {
                ran = Some(self.window());
                Value(id)
            })
        });
        let Some((start, end)) = ran else { return self.note(key.0, from, to, Did::Served(got.0)) };
        assert_eq!(got.0, id, "a loader's value goes to its own caller");
        let flight = Flight { id, gives: Gives::Value };
        self.note(key.0, from, start, Did::Claim(flight, Over::NothingFresh));
        self.note(key.0, end, to, Did::End { id, ending: Ending::Put, effect: None });
    }

    fn fail(&mut self, key: &Key) {
        let id = self.stamp();
        let mut ran = None;
        let (from, to, got) = self.call(|cache| {
            cache.try_get_with(key, || {
                ran = Some(self.window());
                Err(Refusal(id))
            })
        });
        if let Some((start, end)) = ran {
            let flight = Flight { id, gives: Gives::Error };
            self.note(key.0, from, start, Did::Claim(flight, Over::NothingFresh));
            self.note(key.0, end, to, Did::End { id, ending: Ending::Keep, effect: None });
        }
        match got {
            // What was there before its load, or after.
            Ok(value) if ran.is_some() => self.note(key.0, from, to, Did::Read(Some(value.0))),
            Ok(value) => self.note(key.0, from, to, Did::Served(value.0)),
            Err(error) => {
                assert_eq!(error.kind(), LoadErrorKind::Failed);
                let whose = error.downcast_ref::<Refusal>().expect("a loader's error").0;
                match ran {
                    Some(_) => assert_eq!(whose, id, "a loader's error goes to its own caller"),
                    None => self.note(key.0, from, to, Did::Failed(whose)),
                }
            }
        }
    }

    fn panic(&mut self, key: &Key) {
        let id = self.stamp();
        let mut ran = None;
        let (from, to, got) = self.call(|cache| {
            let call = || {
                cache.get_with(key, || {
                    ran = Some(self.window());
                    resume_unwind(Box::new(id))
                })
            };
            catch_unwind(AssertUnwindSafe(call))
        });
        match (ran, got) {
            (None, Ok(value)) => self.note(key.0, from, to, Did::Served(value.0)),
            (Some((start, end)), Err(_)) => {
                let flight = Flight { id, gives: Gives::Nothing };
                self.note(key.0, from, start, Did::Claim(flight, Over::NothingFresh));
                self.note(key.0, end, to, Did::End { id, ending: Ending::Keep, effect: None });
            }
            (ran, got) => panic!("{ran:?} {got:?}"),
        }
    }

    fn compute(&mut self, key: &Key) {
        let id = self.stamp();
        let ending = [Ending::Put, Ending::Put, Ending::Clear, Ending::Keep][below(4) as usize];
        let mut ran = None;
        let (from, to, outcome) = self.call(|cache| {
            cache.compute(key, |value| {
                ran = Some((value.map(|v| v.0), self.window()));
                match ending {
                    Ending::Put => Op::Put(Value(id)),
                    Ending::Clear => Op::Remove,
                    Ending::Keep => Op::Keep,
                }
            })
        });
        let effect = outcome != Outcome::Superseded;
        let (over, (start, end)) =
            ran.map_or((Over::Unseen, (to, from)), |(seen, window)| (Over::Seen(seen), window));
        if effect {
            let (seen, _) = ran.expect("it has decided");
            let expected = match (ending, seen) {
                (Ending::Put, None) => Outcome::Inserted(Value(id)),
                (Ending::Put, Some(_)) => Outcome::Replaced(Value(id)),
                (Ending::Clear, Some(seen)) => Outcome::Removed(Value(seen)),
                (Ending::Keep, Some(seen)) => Outcome::Kept(Value(seen)),
                (Ending::Clear | Ending::Keep, None) => Outcome::Absent,
            };
            assert_eq!(outcome, expected);
        }
        let gives = if effect && matches!(ending, Ending::Put) { Gives::Value } else { Gives::Nothing };
        self.note(key.0, from, start, Did::Claim(Flight { id, gives }, over));
        self.note(key.0, end, to, Did::End { id, ending, effect: Some(effect) });
    }

    /// A loader's time: its first stamp and its last.
    fn window(&self) -> (u64, u64) {
        let start = self.stamp();
        linger();
        (start, self.stamp())
    }
}

fn linger() {
    (0..below(4)).for_each(|_| thread::yield_now());
}

/// One history for each key.
fn record(cache: &Sut<Key, Value>, seed: u64) -> Vec<History> {
    let (counter, start) = (AtomicU64::new(1), Barrier::new(THREADS as usize));
    let mut histories = vec![History::new(); KEYS as usize];
    thread::scope(|s| {
        let threads: Vec<_> = (0..THREADS)
            .map(|t| {
                let (counter, start) = (&counter, &start);
                s.spawn(move || {
                    SEED.set(seed * THREADS + t);
                    let mut recorder = Recorder { cache, counter, notes: Vec::new() };
                    start.wait();
                    for _ in 0..CALLS {
                        recorder.anything();
                        jolt();
                    }
                    recorder.notes
                })
            })
            .collect();
        for (key, event) in threads.into_iter().flat_map(|t| t.join().unwrap()) {
            histories[key as usize].push(event);
        }
    });
    histories
}

/// Repeats `round` for a while, and on until `enough`.
fn for_a_while(limit: Duration, mut round: impl FnMut(u64), enough: impl Fn() -> bool) {
    let start = Instant::now();
    for n in 0.. {
        round(n);
        if start.elapsed() >= limit && enough() {
            return;
        }
        assert!(start.elapsed() < limit + secs(60), "the threads do not get into each other's way");
    }
}

#[test]
fn every_history_is_linearizable() {
    for cache in caches() {
        // Joins, and loads that were refused.
        let met = Cell::new((0, 0));
        let round = |seed| {
            let cache = cache();
            for (key, history) in record(&cache, seed).iter().enumerate() {
                if let Err(why) = check(history) {
                    panic!("round {seed}, key {key}: {why}");
                }
            }
            let stats = cache.stats();
            met.set((met.get().0 + stats.joins, met.get().1 + stats.fenced));
        };
        for_a_while(ms(scaled(500, 15_000) as u64), round, || met.get().0 > 0 && met.get().1 > 0);
    }
}

#[test]
fn the_source() {
    // Each thread changes one key at the source, tells the cache, and then announces the version.
    for cache in caches() {
        let joins = Cell::new(0);
        let round = |seed| {
            let cache = cache();
            let source: Vec<AtomicU64> = (0..THREADS).map(|_| AtomicU64::new(0)).collect();
            let announced: Vec<AtomicU64> = (0..THREADS).map(|_| AtomicU64::new(0)).collect();
            let start = Barrier::new(THREADS as usize);
            let look = |key: u64| {
                let least = announced[key as usize].load(Ordering::SeqCst);
                let got = match below(3) {
                    0 => cache.get(&Key(key)),
                    _ => Some(cache.get_with(&Key(key), || {
                        // Relaxed: quell's fences alone order this against the writer's invalidation.
                        let version = source[key as usize].load(Ordering::Relaxed);
                        linger();
                        Value(version)
                    })),
                };
                if let Some(Value(got)) = got {
                    assert!(
                        got >= least,
                        "round {seed}, key {key}: {got} to a call that began after {least}"
                    );
                }
            };
            thread::scope(|s| {
                for t in 0..THREADS {
                    let (cache, source, announced, start, look) =
                        (&cache, &source, &announced, &start, &look);
                    s.spawn(move || {
                        SEED.set(seed * THREADS + t);
                        start.wait();
                        for version in 1..=CALLS / 2 {
                            // A pin would fence, but not within another one.
                            let pinned = (below(2) == 0).then(|| cache.pin());
                            // Relaxed: as in the loader.
                            source[t as usize].store(version, Ordering::Relaxed);
                            match below(8) {
                                0 => cache.invalidate_all(),
                                1 => cache.retain(|key, _| key.0 != t),
                                2 | 3 => drop(cache.remove(&Key(t))),
                                4 => cache.insert(Key(t), Value(version)),
                                _ => cache.invalidate(&Key(t)),
                            }
                            announced[t as usize].store(version, Ordering::SeqCst);
                            drop(pinned);
                            look(t);
                            look(below(THREADS));
                            jolt();
                        }
                    });
                }
            });
            (0..THREADS).for_each(look);
            joins.set(joins.get() + cache.stats().joins);
        };
        for_a_while(ms(scaled(200, 5_000) as u64), round, || joins.get() > 0);
    }
}

// ---- the checker, checked

fn at(from: u64, to: u64, op: Did) -> Timed<Did> {
    Timed { from, to, op }
}

/// A load or a `compute` that claims by `start` and ends after `end`.
fn claim(id: Id, gives: Gives, from: u64, start: u64) -> Timed<Did> {
    at(from, start, Did::Claim(Flight { id, gives }, Over::NothingFresh))
}

fn put(id: Id, end: u64, to: u64) -> Timed<Did> {
    at(end, to, Did::End { id, ending: Ending::Put, effect: None })
}

fn decided(id: Id, ending: Ending, effect: bool, end: u64, to: u64) -> Timed<Did> {
    at(end, to, Did::End { id, ending, effect: Some(effect) })
}

#[test]
fn the_checker_knows_good_histories() {
    use Did::{Clear, Expire, Failed, Insert, Read, Remove, Served};
    let good: [(&str, &[Timed<Did>]); 11] = [
        ("nothing", &[]),
        ("a read meets an insert", &[at(1, 4, Insert(7)), at(2, 3, Read(None)), at(5, 6, Read(Some(7)))]),
        (
            "the other order of two inserts",
            &[at(1, 10, Insert(7)), at(2, 9, Insert(8)), at(3, 4, Read(Some(8))), at(5, 6, Read(Some(7)))],
        ),
        (
            "who joined before the invalidation",
            &[
                claim(7, Gives::Value, 1, 2),
                at(3, 8, Served(7)),
                at(4, 5, Clear),
                put(7, 6, 9),
                at(10, 11, Read(None)),
            ],
        ),
        ("a load is stored", &[claim(7, Gives::Value, 1, 2), put(7, 3, 4), at(5, 6, Remove(Some(7)))]),
        (
            "a load after a refused one",
            &[
                claim(7, Gives::Value, 1, 2),
                at(3, 4, Clear),
                claim(8, Gives::Value, 5, 6),
                put(8, 7, 8),
                put(7, 9, 10),
                at(11, 12, Served(8)),
            ],
        ),
        (
            "a refresh",
            &[
                at(1, 2, Insert(7)),
                at(3, 4, Expire(true)),
                claim(8, Gives::Value, 5, 6),
                at(7, 8, Read(Some(7))),
                put(8, 9, 10),
                at(11, 12, Read(Some(8))),
            ],
        ),
        (
            "a failure is shared, and what was there stays",
            &[
                at(1, 2, Insert(7)),
                at(3, 4, Expire(true)),
                claim(8, Gives::Error, 5, 6),
                at(7, 11, Failed(8)),
                at(8, 10, Did::End { id: 8, ending: Ending::Keep, effect: None }),
                at(12, 13, Read(Some(7))),
            ],
        ),
        (
            "a decision",
            &[
                at(1, 2, Insert(7)),
                at(3, 4, Did::Claim(Flight { id: 8, gives: Gives::Value }, Over::Seen(Some(7)))),
                at(5, 9, Served(8)),
                decided(8, Ending::Put, true, 6, 8),
            ],
        ),
        (
            "a decision that came too late",
            &[
                at(1, 2, Insert(7)),
                at(3, 6, Did::Claim(Flight { id: 8, gives: Gives::Nothing }, Over::Unseen)),
                at(4, 5, Remove(Some(7))),
                decided(8, Ending::Put, false, 7, 8),
                at(9, 10, Read(None)),
            ],
        ),
        (
            "expired while absent",
            &[claim(7, Gives::Value, 1, 2), at(3, 4, Expire(false)), put(7, 5, 6), at(7, 8, Read(None))],
        ),
    ];
    for (name, history) in good {
        assert_eq!(check(history), Ok(()), "{name}");
    }
}

#[test]
fn the_checker_knows_bad_histories() {
    use Did::{Clear, Expire, Failed, Insert, Read, Remove, Served};
    let bad: [(&str, &[Timed<Did>]); 17] = [
        ("an insert is lost", &[at(1, 2, Insert(7)), at(3, 4, Read(None))]),
        ("out of thin air", &[at(1, 2, Read(Some(7)))]),
        ("time goes backwards", &[at(1, 10, Insert(7)), at(2, 3, Read(Some(7))), at(4, 5, Read(None))]),
        (
            "two removed one value",
            &[at(1, 2, Insert(7)), at(3, 6, Remove(Some(7))), at(4, 5, Remove(Some(7)))],
        ),
        (
            "two readers saw two inserts in two orders",
            &[at(1, 2, Insert(7)), at(1, 2, Insert(8)), at(3, 4, Read(Some(7))), at(5, 6, Read(Some(8)))],
        ),
        (
            "who joined after the invalidation",
            &[claim(7, Gives::Value, 1, 2), at(3, 4, Clear), at(5, 8, Served(7)), put(7, 6, 7)],
        ),
        (
            "an older load is stored over an insert",
            &[claim(7, Gives::Value, 1, 2), at(3, 4, Insert(8)), put(7, 5, 6), at(7, 8, Read(Some(7)))],
        ),
        (
            "a load comes back after an invalidation",
            &[claim(7, Gives::Value, 1, 2), at(3, 4, Clear), put(7, 5, 6), at(7, 8, Read(Some(7)))],
        ),
        (
            "and while another one runs",
            &[
                claim(7, Gives::Value, 1, 2),
                at(3, 4, Clear),
                claim(8, Gives::Value, 5, 6),
                put(7, 7, 8),
                at(9, 10, Read(Some(7))),
                put(8, 11, 12),
            ],
        ),
        ("a load is lost", &[claim(7, Gives::Value, 1, 2), put(7, 3, 4), at(5, 6, Read(None))]),
        (
            "two loads at a time",
            &[claim(7, Gives::Value, 1, 2), claim(8, Gives::Value, 3, 4), put(7, 5, 6), put(8, 7, 8)],
        ),
        ("a load over a fresh value", &[at(1, 2, Insert(7)), claim(8, Gives::Value, 3, 4), put(8, 5, 6)]),
        (
            "a load that an expiry had detached",
            &[
                at(1, 2, Insert(7)),
                at(3, 4, Expire(true)),
                claim(8, Gives::Value, 5, 6),
                at(7, 8, Expire(true)),
                put(8, 9, 10),
                at(11, 12, Read(Some(8))),
            ],
        ),
        (
            "a failure is shared too late",
            &[
                claim(8, Gives::Error, 1, 2),
                at(3, 4, Did::End { id: 8, ending: Ending::Keep, effect: None }),
                at(5, 6, Failed(8)),
            ],
        ),
        (
            "what a refused decision was to put",
            &[
                at(1, 2, Did::Claim(Flight { id: 8, gives: Gives::Nothing }, Over::Seen(None))),
                at(3, 9, Served(8)),
                at(4, 5, Clear),
                decided(8, Ending::Put, false, 6, 7),
            ],
        ),
        (
            "a decision on what was not there, though it was refused",
            &[
                at(1, 2, Insert(7)),
                at(3, 4, Did::Claim(Flight { id: 8, gives: Gives::Nothing }, Over::Seen(None))),
                at(5, 6, Clear),
                decided(8, Ending::Put, false, 7, 8),
            ],
        ),
        (
            "a decision over a write",
            &[
                at(1, 2, Did::Claim(Flight { id: 8, gives: Gives::Value }, Over::Seen(None))),
                at(3, 4, Insert(9)),
                decided(8, Ending::Put, true, 5, 6),
            ],
        ),
    ];
    for (name, history) in bad {
        assert!(check(history).is_err(), "{name}");
    }
}

#[test]
fn the_rule_about_older_values_stands_alone() {
    let served = at(5, 8, Did::Served(7));
    let after = [claim(7, Gives::Value, 1, 2), at(3, 4, Did::Clear), served, put(7, 6, 7)];
    assert!(check(&after).unwrap_err().contains("after Timed"));
    let elsewhere = [at(1, 2, Did::Clear), claim(7, Gives::Value, 3, 4), served, put(7, 6, 7)];
    assert_eq!(check(&elsewhere), Ok(()));
}

#[test]
fn the_checker_agrees_with_trying_every_order() {
    fn any_order(place: Place, left: &[Timed<Did>]) -> bool {
        let first_end = left.iter().map(|event| event.to).min();
        left.is_empty()
            || (0..left.len()).filter(|n| Some(left[*n].from) <= first_end).any(|n| {
                let mut rest = left.to_vec();
                let event = rest.remove(n);
                place.step(&event.op).is_some_and(|next| any_order(next, &rest))
            })
    }
    let mut verdicts = [0; 2];
    for seed in 0..20_000 {
        SEED.set(seed);
        let history: History = (0..2 + below(5))
            .map(|_| {
                let (from, id) = (below(12), 1 + below(2));
                let op = match below(9) {
                    0 => Did::Read(None),
                    1 => Did::Read(Some(id)),
                    2 => Did::Served(id),
                    3 => Did::Insert(id),
                    4 => Did::Clear,
                    5 => Did::Remove(Some(id)),
                    6 => Did::Expire(below(2) == 0),
                    7 => Did::Claim(Flight { id, gives: Gives::Value }, Over::NothingFresh),
                    _ => Did::End { id, ending: Ending::Put, effect: None },
                };
                at(from, from + 1 + below(6), op)
            })
            .collect();
        let found = linearize(Place::default(), &history, Place::step);
        assert_eq!(found.is_ok(), any_order(Place::default(), &history), "{history:?}");
        if let Ok(order) = &found {
            let end = order.iter().try_fold(Place::default(), |place, n| place.step(&history[*n].op));
            assert!(end.is_some() && order.len() == history.len(), "{history:?} {order:?}");
        }
        verdicts[usize::from(found.is_ok())] += 1;
    }
    assert!(verdicts.iter().all(|n| *n > 1_000), "{verdicts:?}");
}
