//! Where each answer came from, exactly, on every path that a call can take, and that each is counted by what it was told:
//! `cargo test --test provenance` (`QUELL_LONG=1` for a longer walk).
//!
//! `Panicked` is the one kind of error that no `ask` comes to: `tests/load_many.rs`. Many callers at one time: `tests/storm.rs`.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::tasks::{Door, Kept, Task, elsewhere, over_tasks};
use common::{
    Builder, Gate, Hashing, Queue, Random, Sut, Tally, With, eventually, found, ms, name_of, over_shapes,
    plain, quietly, scaled, secs, until_waiting,
};
use quell::{
    Answer, Ask, AsyncLoader, Backoff, BoxError, EarlyRefresh, LoadContext, LoadError, LoadErrorKind, Loaded,
    ManualClock, Provenance,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

type Error = std::io::Error;

/// What each source of a value gives.
const CACHED: u32 = 10;
const OWN: u32 = 7;
const OTHERS: u32 = 70;
const FELL_BACK: u32 = 900;

/// How long a load takes, by the clock.
const TOOK: Duration = secs(2);

/// The methods that end an `ask`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Get,
    GetAsync,
    Load,
    LoadAsync,
    With,
    WithAsync,
    TryWith,
    TryWithAsync,
}

use Way::{Get, GetAsync, Load, LoadAsync, TryWith, TryWithAsync, With as WithValue, WithAsync};

const WAYS: [Way; 8] = [Get, GetAsync, Load, LoadAsync, WithValue, WithAsync, TryWith, TryWithAsync];

impl Way {
    /// It never loads.
    fn only_reads(self) -> bool {
        matches!(self, Get | GetAsync)
    }

    /// It uses the attached loader.
    fn is_attached(self) -> bool {
        matches!(self, Load | LoadAsync)
    }

    /// Its own load can fail.
    fn may_fail(self) -> bool {
        !self.only_reads() && !matches!(self, WithValue | WithAsync)
    }
}

/// What the source does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    Answers,
    Fails,
    HasNoSuchKey,
}

/// A source whose loads take their time by the clock.
#[derive(Clone)]
struct Source {
    clock: ManualClock,
    does: Arc<Mutex<Does>>,
    loads: Tally,
}

impl Source {
    fn set(&self, does: Does) {
        *self.does.lock().unwrap() = does;
    }

    fn ask(&self) -> Result<Option<u32>, Error> {
        self.loads.add();
        self.clock.advance(TOOK);
        match *self.does.lock().unwrap() {
            Does::Answers => Ok(Some(OWN)),
            Does::Fails => Err(Error::other("boom")),
            Does::HasNoSuchKey => Ok(None),
        }
    }

    fn load(&self) -> Result<Loaded<u32>, BoxError> {
        Ok(self.ask()?.map_or_else(Loaded::absent, Loaded::new))
    }

    /// For a call with a closure: such a one knows of no absence.
    fn value(&self) -> Result<u32, Error> {
        self.ask().map(|value| value.unwrap())
    }
}

impl AsyncLoader<u32, u32> for Source {
    async fn load(&self, _: &u32, _: &LoadContext<u32>) -> Result<Loaded<u32>, BoxError> {
        smol::future::yield_now().await;
        Self::load(self)
    }
}

/// A cache whose values are fresh for 10 s, served for 20 s, and in grace until 50 s, and what it is made of. Jobs wait in the
/// queue.
struct World {
    cache: Sut<u32, u32>,
    clock: ManualClock,
    queue: Queue,
    source: Source,
}

type End = Result<Provenance, LoadErrorKind>;

impl World {
    fn new(builder: Builder<u32, u32>) -> Self {
        let (clock, queue) = (ManualClock::new(), Queue::default());
        // Not at the beginning of all time.
        clock.advance(secs(1_000));
        let source = Source {
            clock: clock.clone(),
            does: Arc::new(Mutex::new(Does::Answers)),
            loads: Tally::default(),
        };
        let threads = source.clone();
        let cache = builder
            .soft_ttl(secs(10))
            .time_to_live(secs(20))
            .stale_if_error(secs(30))
            .clock(clock.clone())
            .executor(queue.clone())
            .loader(With(move |_: &u32, _: &LoadContext<u32>| threads.load()))
            .async_loader(source.clone())
            .build();
        Self { cache, clock, queue, source }
    }

    /// A value of this age.
    fn cached(self, age: Duration) -> Self {
        self.cache.insert(1, CACHED);
        self.clock.advance(age);
        self
    }

    fn does(self, does: Does) -> Self {
        self.source.set(does);
        self
    }

    /// Ends an `ask` for key 1.
    fn end(&self, way: Way) -> End {
        self.end_ask(way, self.cache.ask(&1))
    }

    fn end_ask(&self, way: Way, ask: Ask<'_, u32, u32, u32, Hashing>) -> End {
        let source = self.source.clone();
        let got = match way {
            Get => ask.get(),
            GetAsync => Task::new(ask.get_async()).finish(),
            Load => ask.load(),
            LoadAsync => Task::new(ask.load_async()).finish(),
            WithValue => ask.load_with(|| source.value().unwrap()),
            WithAsync => Task::new(ask.load_with_async(async move { source.value().unwrap() })).finish(),
            TryWith => ask.try_load_with(|| source.value()),
            TryWithAsync => Task::new(ask.try_load_with_async(async move { source.value() })).finish(),
        };
        told(got)
    }

    /// Ends one, and checks what that has moved: the call is counted once, by what it found, and what was told is counted too.
    #[track_caller]
    fn expect(&self, name: &str, way: Way, expected: End) {
        self.expect_by(name, way, expected, || self.end(way));
    }

    #[track_caller]
    fn expect_by(&self, name: &str, way: Way, expected: End, call: impl FnOnce() -> End) {
        let before = self.cache.stats();
        assert_eq!(call(), expected, "{name}, {way:?}");
        let after = self.cache.stats();
        assert_eq!(found(&after) - found(&before), 1, "{name}, {way:?}: counted once, {after:?}");
        let graced = u64::from(matches!(expected, Ok(Provenance::Grace { .. })));
        let fell_back = u64::from(expected == Ok(Provenance::Fallback));
        assert_eq!(after.grace_hits - before.grace_hits, graced, "{name}, {way:?}");
        assert_eq!(after.fallbacks - before.fallbacks, fell_back, "{name}, {way:?}");
    }
}

/// What an answer says, whose value must be that of its provenance.
#[track_caller]
fn told(got: Result<Answer<u32>, LoadError>) -> End {
    let Answer { value, provenance, .. } = got.map_err(|error| error.kind())?;
    let of = match provenance {
        Provenance::Fresh { .. } | Provenance::Stale { .. } | Provenance::Grace { .. } => [CACHED, OWN],
        Provenance::Loaded { .. } => [OWN; 2],
        Provenance::Joined { .. } => [OTHERS; 2],
        Provenance::Fallback => [FELL_BACK; 2],
        Provenance::Negative => panic!("an absence is an error"),
    };
    assert!(of.contains(&value), "{value} by {provenance:?}");
    Ok(provenance)
}

const fn fresh(age: Duration) -> End {
    Ok(Provenance::Fresh { age })
}

const fn stale(age: Duration) -> End {
    Ok(Provenance::Stale { age })
}

const fn grace(age: Duration) -> End {
    Ok(Provenance::Grace { age })
}

const LOADED: End = Ok(Provenance::Loaded { took: TOOK });

/// What is not served at once: what a call that only reads gets, or what one that loads gets.
fn or_not_cached(way: Way, expected: End) -> End {
    if way.only_reads() { Err(LoadErrorKind::NotCached) } else { expected }
}

/// Where those who wait poll a load, and where it is a task of its own.
fn over_spawners(mut body: impl FnMut(Builder<u32, u32>)) {
    body(plain());
    body(plain().spawner(elsewhere));
}

/// Runs over all shapes and ways.
fn over_ways(mut body: impl FnMut(Way, Builder<u32, u32>)) {
    for way in WAYS {
        over_shapes(|builder| body(way, builder));
    }
}

#[test]
fn what_is_served_at_once() {
    over_ways(|way, builder| {
        let world = World::new(builder).cached(secs(4));
        world.expect("fresh", way, fresh(secs(4)));
        world.clock.advance(secs(6) - ms(1));
        world.expect("fresh to the last", way, fresh(secs(10) - ms(1)));
        world.clock.advance(ms(1));
        // Somebody refreshes it already.
        assert!(world.cache.refresh(&1));
        world.expect("stale", way, stale(secs(10)));
        world.clock.advance(secs(10) - ms(1));
        world.expect("stale to the last", way, stale(secs(20) - ms(1)));
        assert_eq!(world.source.loads.get(), 0);
    });
}

#[test]
fn stale_and_nobody_refreshes_it() {
    over_ways(|way, builder| {
        let world = World::new(builder).cached(secs(12));
        // Who brings a load is chosen to refresh, and has the new value.
        let expected = if way.only_reads() || way.is_attached() { stale(secs(12)) } else { LOADED };
        world.expect("stale", way, expected);
        assert_eq!(world.queue.len(), usize::from(way.is_attached()));
        assert_eq!((world.cache.stats().stale_hits, world.cache.stats().misses), (1, 0));
    });
    over_ways(|way, builder| {
        if !way.may_fail() {
            return;
        }
        let world = World::new(builder).cached(secs(12)).does(Does::Fails);
        // The failure costs the refresh, and time.
        let age = if way.is_attached() { secs(12) } else { secs(12) + TOOK };
        world.expect("stale, and the refresh fails", way, stale(age));
        world.queue.run();
        world.expect("stale, and a refresh has failed", way, stale(secs(12) + TOOK));
        assert_eq!(world.cache.stats().load_failures, 1);
    });
}

#[test]
fn stale_where_loads_are_tasks() {
    for way in [LoadAsync, WithAsync, TryWithAsync] {
        over_shapes(|builder| {
            let kept = Kept::default();
            let world = World::new(builder.spawner(kept.clone())).cached(secs(12));
            world.expect("stale", way, stale(secs(12)));
            assert_eq!((kept.len(), world.queue.len()), (1, 0));
            world.expect("stale, and a task refreshes it", way, stale(secs(12)));
            assert_eq!((kept.run(), world.source.loads.get()), (1, 1));
            world.expect("refreshed", way, fresh(Duration::ZERO));
        });
    }
}

#[test]
fn an_early_refresh() {
    for way in WAYS {
        for fails in [false, true] {
            // Every read fires in the second half of a life.
            let world = World::new(plain().early_refresh(EarlyRefresh::beta(1e15)));
            world.expect("to know what a load takes", Load, LOADED);
            world.clock.advance(secs(6));
            world.source.set(if fails && way.may_fail() { Does::Fails } else { Does::Answers });
            let expected = match way {
                Get | GetAsync | Load | LoadAsync => fresh(secs(6)),
                _ if fails && way.may_fail() => fresh(secs(6) + TOOK),
                _ => LOADED,
            };
            world.expect("early", way, expected);
            assert_eq!(world.queue.len(), usize::from(way.is_attached()));
            // Counted when it begins.
            world.queue.run();
            let stats = world.cache.stats();
            assert_eq!((stats.hits, stats.early_refreshes), (1, u64::from(!way.only_reads())), "{way:?}");
        }
    }
}

#[test]
fn nothing_is_served_and_the_source_answers() {
    over_ways(|way, builder| {
        let world = World::new(builder);
        world.expect("nothing", way, or_not_cached(way, LOADED));
        world.expect("and then", way, or_not_cached(way, fresh(Duration::ZERO)));
    });
    for age in [20, 25, 49, 50, 1_000] {
        over_ways(|way, builder| {
            let world = World::new(builder).cached(secs(age));
            world.expect("past the hard deadline", way, or_not_cached(way, LOADED));
        });
    }
    over_ways(|way, builder| {
        let world = World::new(builder).cached(secs(4));
        let at_once = |ask: fn(&World) -> Ask<'_, u32, u32, u32, Hashing>| world.end_ask(way, ask(&world));
        let too_old = at_once(|world| world.cache.ask(&1).max_age(secs(4)));
        assert_eq!(too_old, or_not_cached(way, LOADED), "{way:?}");
        let anyhow = at_once(|world| world.cache.ask(&2).only_if_cached());
        assert_eq!(anyhow, Err(LoadErrorKind::NotCached), "{way:?}");
    });
}

#[test]
fn an_absence() {
    over_ways(|way, builder| {
        // `Absent` is an answer of the source: no ladder is taken for it.
        let world = World::new(builder.negative_ttl(secs(10)).fallback(|_| Some(FELL_BACK)));
        let world = world.cached(secs(25)).does(Does::HasNoSuchKey);
        world.expect("absent", Load, Err(LoadErrorKind::Absent));
        let before = world.cache.stats();
        world.clock.advance(secs(10) - ms(1));
        world.expect("remembered", way, Err(LoadErrorKind::Absent));
        let after = world.cache.stats();
        assert_eq!((after.negative_hits - before.negative_hits, after.loads - before.loads), (1, 0));
        world.clock.advance(ms(1));
        world.source.set(Does::Answers);
        world.expect("forgotten", way, or_not_cached(way, LOADED));
    });
    // An attached loader of either kind says so.
    for way in [Load, LoadAsync] {
        over_shapes(|builder| {
            let world = World::new(builder).does(Does::HasNoSuchKey);
            world.expect("absent", way, Err(LoadErrorKind::Absent));
            world.expect("and not remembered", way, Err(LoadErrorKind::Absent));
            assert_eq!((world.source.loads.get(), world.cache.stats().negative_hits), (2, 0));
        });
    }
}

#[test]
fn a_cycle() {
    for way in WAYS {
        let world = World::new(plain().fallback(|_| Some(FELL_BACK)));
        // Asked for by the load of the same key.
        let inner = Mutex::new(None);
        let again = || *inner.lock().unwrap() = Some(world.end(way));
        let outer = told(world.cache.ask(&1).load_with(|| {
            again();
            OWN
        }));
        assert_eq!(outer, Ok(Provenance::Loaded { took: Duration::ZERO }), "{way:?}");
        let inner = inner.into_inner().unwrap().unwrap();
        assert_eq!(inner, or_not_cached(way, Err(LoadErrorKind::Cycle)), "{way:?}");
        assert_eq!(found(&world.cache.stats()), 2);
    }
}

#[test]
fn no_loader_is_attached() {
    for way in [Load, LoadAsync] {
        let cache = plain::<u32, u32>().fallback(|_| Some(FELL_BACK)).build();
        let got = match way {
            Load => cache.ask(&1).load(),
            _ => Task::new(cache.ask(&1).load_async()).finish(),
        };
        assert_eq!(told(got), Err(LoadErrorKind::NotCached));
        assert_eq!(found(&cache.stats()), 1);
    }
}

// The ladder: what a call gets that has nothing to serve, and whose load or wait came to nothing.

/// What the ladder has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rung {
    Grace,
    /// Grace comes first.
    GraceAndFallback,
    Fallback,
    /// There was one in grace, but no more when it is wanted.
    TooLate,
    Nothing,
}

const RUNGS: [Rung; 5] = [Rung::Grace, Rung::GraceAndFallback, Rung::Fallback, Rung::TooLate, Rung::Nothing];

impl Rung {
    /// A world that has it for a call that gets to the ladder so much later.
    fn world(self, builder: Builder<u32, u32>, later: Duration) -> World {
        let falls_back = matches!(self, Self::Fallback | Self::GraceAndFallback);
        let builder = if falls_back { builder.fallback(|_| Some(FELL_BACK)) } else { builder };
        let world = World::new(builder);
        match self {
            Self::Grace | Self::GraceAndFallback => world.cached(secs(25)),
            Self::TooLate => world.cached(secs(50) - later),
            Self::Fallback | Self::Nothing => world,
        }
    }

    fn expected(self, later: Duration, kind: LoadErrorKind) -> End {
        match self {
            Self::Grace | Self::GraceAndFallback => grace(secs(25) + later),
            Self::Fallback => Ok(Provenance::Fallback),
            Self::TooLate | Self::Nothing => Err(kind),
        }
    }
}

fn over_rungs(mut body: impl FnMut(Rung, Way)) {
    for rung in RUNGS {
        for way in WAYS {
            body(rung, way);
        }
    }
}

#[test]
fn the_ladder_after_a_load_that_failed() {
    over_rungs(|rung, way| {
        if way.may_fail() {
            over_tasks(|builder| {
                let world = rung.world(builder, TOOK).does(Does::Fails);
                world.expect(&format!("{rung:?}"), way, rung.expected(TOOK, LoadErrorKind::Failed));
            });
        }
    });
}

#[test]
fn the_ladder_during_a_back_off() {
    over_rungs(|rung, way| {
        over_tasks(|builder| {
            let backoff = Backoff::constant(secs(5)).jitter(0.0);
            // The last to see the value is the one that fails, unless it has come too late already.
            let world = rung.world(builder.error_backoff(backoff), TOOK).does(Does::Fails);
            world.expect("fails", TryWith, rung.expected(TOOK, LoadErrorKind::Failed));
            let name = format!("{rung:?} during a back-off");
            for waited in [Duration::ZERO, secs(5) - ms(1)] {
                world.clock.advance(waited);
                let expected = rung.expected(TOOK + waited, LoadErrorKind::BackingOff);
                world.expect(&name, way, or_not_cached(way, expected));
            }
            assert_eq!(world.source.loads.get(), 1, "no load begins before the back-off ends");
            world.clock.advance(ms(1));
            world.source.set(Does::Answers);
            world.expect("over", way, or_not_cached(way, LOADED));
        });
    });
    // A stale value is served all the same, and nobody is chosen to refresh it.
    over_ways(|way, builder| {
        let world = World::new(builder.error_backoff(Backoff::constant(secs(5)).jitter(0.0)));
        let world = world.cached(secs(12)).does(Does::Fails);
        world.expect("fails", TryWith, stale(secs(12) + TOOK));
        world.expect("stale during a back-off", way, stale(secs(12) + TOOK));
        assert_eq!((world.source.loads.get(), world.queue.len()), (1, 0));
    });
}

/// One who leads key `key` as a thread or as a task, until the gate opens, and to what end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leads {
    Thread,
    Task,
    ThreadFails,
    TaskFails,
    ThreadPanics,
    FindsNoSuchKey,
}

/// Runs `body` while somebody leads `key`; it opens the gate itself when it wants to.
fn while_led<R>(world: &World, key: u32, leads: Leads, body: impl FnOnce(&dyn Fn()) -> R) -> R {
    let (gate, door) = (Gate::default(), Door::default());
    thread::scope(|s| {
        let cache = &world.cache;
        let (stop, stops) = (&gate, door.clone());
        s.spawn(move || match leads {
            Leads::Thread => {
                cache.get_with(&key, || {
                    stop.pass();
                    OTHERS
                });
            }
            Leads::ThreadFails => {
                let load = || {
                    stop.pass();
                    Err::<u32, _>(Error::other("boom"))
                };
                // Its own answer is the ladder's.
                drop(cache.try_get_with(&key, load));
            }
            Leads::ThreadPanics => {
                let panics = || -> u32 {
                    stop.pass();
                    panic!("boom")
                };
                assert!(quietly(|| cache.get_with(&key, panics)).is_err());
            }
            Leads::FindsNoSuchKey => {
                let none = || {
                    stop.pass();
                    None
                };
                assert_eq!(cache.optionally_get_with(&key, none), None);
            }
            Leads::Task => {
                let load = async move {
                    stops.pass().await;
                    OTHERS
                };
                Task::new(cache.get_with_async(&key, load)).finish();
            }
            Leads::TaskFails => {
                let load = async move {
                    stops.pass().await;
                    Err::<u32, _>(Error::other("boom"))
                };
                drop(Task::new(cache.try_get_with_async(&key, load)).finish());
            }
        });
        eventually(|| gate.arrived() + door.arrived() == 1);
        let open = || {
            gate.open();
            door.open();
        };
        let result = body(&open);
        open();
        result
    })
}

/// Ends an `ask` for key 1 on a thread of its own; `meanwhile` runs when it waits.
fn waits(world: &World, way: Way, wait_timeout: Duration, meanwhile: impl FnOnce()) -> End {
    thread::scope(|s| {
        let call = s.spawn(|| world.end_ask(way, world.cache.ask(&1).wait_timeout(wait_timeout)));
        until_waiting(&world.cache, 1);
        meanwhile();
        call.join().unwrap()
    })
}

/// The ways that wait for others.
fn waiting_ways() -> impl Iterator<Item = Way> {
    WAYS.into_iter().filter(|way| !way.only_reads())
}

#[test]
fn those_who_only_read_wait_for_nobody() {
    for way in [Get, GetAsync] {
        for leads in [Leads::Thread, Leads::Task] {
            let world = World::new(plain().fallback(|_| Some(FELL_BACK)));
            while_led(&world, 1, leads, |_| {
                world.expect("being loaded", way, Err(LoadErrorKind::NotCached));
            });
            let world = World::new(plain()).cached(secs(25));
            while_led(&world, 1, leads, |_| world.expect("in grace", way, Err(LoadErrorKind::NotCached)));
        }
    }
}

#[test]
fn joined() {
    for leads in [Leads::Thread, Leads::Task] {
        for way in waiting_ways() {
            for age in [None, Some(secs(25))] {
                over_spawners(|builder| {
                    let world = World::new(builder.fallback(|_| Some(FELL_BACK)));
                    let world = if let Some(age) = age { world.cached(age) } else { world };
                    let waited = secs(4);
                    while_led(&world, 1, leads, |open| {
                        let call = || {
                            waits(&world, way, secs(100), || {
                                world.clock.advance(waited);
                                open();
                            })
                        };
                        let expected = Ok(Provenance::Joined { waited });
                        world.expect_by(&format!("behind a {leads:?}"), way, expected, call);
                    });
                    assert_eq!((world.source.loads.get(), world.cache.stats().joins), (0, 1));
                });
            }
        }
    }
}

/// A clock that goes on by a millisecond whenever it is read, and knows by whom.
#[derive(Clone, Default)]
struct Restless(Arc<Mutex<Vec<thread::ThreadId>>>);

impl quell::Clock for Restless {
    fn now(&self) -> Duration {
        let mut readings = self.0.lock().unwrap();
        readings.push(thread::current().id());
        ms(readings.len() as u64)
    }

    fn subscribe(&self, _: quell::Wake) -> bool {
        true
    }
}

#[test]
fn a_wait_is_as_long_as_the_call() {
    for way in [Load, WithValue, TryWith] {
        let (clock, gate) = (Restless::default(), Gate::default());
        let cache = plain::<u32, u32>().loader_fn(|_| Ok::<_, Error>(OWN)).clock(clock.clone()).build();
        thread::scope(|s| {
            s.spawn(|| {
                cache.get_with(&1, || {
                    gate.pass();
                    OTHERS
                })
            });
            eventually(|| gate.arrived() == 1);
            let call = s.spawn(|| {
                let ask = cache.ask(&1);
                let got = match way {
                    Load => ask.load(),
                    WithValue => ask.load_with(|| OWN),
                    _ => ask.try_load_with(|| Ok::<_, Error>(OWN)),
                };
                (told(got), thread::current().id())
            });
            // Counted, and not by a look at the clock.
            eventually(|| cache.stats().joins == 1);
            gate.open();
            let (end, id) = call.join().unwrap();
            let readings = clock.0.lock().unwrap();
            let first = readings.iter().position(|by| *by == id).unwrap();
            let last = readings.iter().rposition(|by| *by == id).unwrap();
            assert_eq!(end, Ok(Provenance::Joined { waited: ms((last - first) as u64) }), "{way:?}");
        });
    }
}

#[test]
fn the_ladder_after_a_load_of_others_that_failed() {
    for leads in [Leads::ThreadFails, Leads::TaskFails] {
        over_rungs(|rung, way| {
            if way.only_reads() {
                return;
            }
            over_spawners(|builder| {
                let waited = secs(3);
                let world = rung.world(builder, waited);
                while_led(&world, 1, leads, |open| {
                    let got = waits(&world, way, secs(100), || {
                        world.clock.advance(waited);
                        open();
                    });
                    assert_eq!(
                        got,
                        rung.expected(waited, LoadErrorKind::Failed),
                        "{rung:?}, {way:?}, {leads:?}"
                    );
                });
                let stats = world.cache.stats();
                assert_eq!((stats.loads, stats.load_failures, stats.misses), (1, 1, 2));
                // The leader takes the ladder too.
                let each = |rung_is: bool| if rung_is { 2 } else { 0 };
                let graced = matches!(rung, Rung::Grace | Rung::GraceAndFallback);
                assert_eq!((stats.grace_hits, stats.fallbacks), (each(graced), each(rung == Rung::Fallback)));
            });
        });
    }
}

#[test]
fn the_ladder_after_a_wait_that_ended() {
    for leads in [Leads::Thread, Leads::Task] {
        over_rungs(|rung, way| {
            if way.only_reads() {
                return;
            }
            over_spawners(|builder| {
                let patience = secs(3);
                let world = rung.world(builder, patience);
                while_led(&world, 1, leads, |_| {
                    let call = || waits(&world, way, patience, || world.clock.advance(patience));
                    let name = format!("{rung:?} after a wait for a {leads:?}");
                    world.expect_by(&name, way, rung.expected(patience, LoadErrorKind::TimedOut), call);
                });
                assert_eq!((world.cache.stats().wait_timeouts, world.source.loads.get()), (1, 0));
            });
        });
    }
}

#[test]
fn the_ladder_after_a_lease_that_ended() {
    // Of an async load that a thread polls: what it waits for may need this very thread.
    for rung in RUNGS {
        let lease = secs(3);
        let clock = ManualClock::new();
        let builder = plain::<u32, u32>()
            .time_to_live(secs(20))
            .stale_if_error(secs(30))
            .lease(lease)
            .clock(clock.clone())
            .async_loader(|_: &u32| std::future::pending::<Result<u32, Error>>());
        let falls_back = matches!(rung, Rung::Fallback | Rung::GraceAndFallback);
        let builder = if falls_back { builder.fallback(|_| Some(FELL_BACK)) } else { builder };
        let cache = builder.build();
        match rung {
            Rung::Grace | Rung::GraceAndFallback => {
                cache.insert(1, CACHED);
                clock.advance(secs(25));
            }
            Rung::TooLate => {
                cache.insert(1, CACHED);
                clock.advance(secs(50) - lease);
            }
            Rung::Fallback | Rung::Nothing => {}
        }
        thread::scope(|s| {
            let call = s.spawn(|| told(cache.ask(&1).load()));
            eventually(|| cache.stats().loads == 1);
            clock.advance(lease);
            assert_eq!(call.join().unwrap(), rung.expected(lease, LoadErrorKind::TimedOut), "{rung:?}");
        });
        assert_eq!((cache.stats().misses, cache.in_flight().len()), (1, 0));
    }
}

#[test]
fn the_ladder_where_too_many_load() {
    over_rungs(|rung, way| {
        let world = rung.world(plain().max_concurrent_loads(1), Duration::ZERO);
        while_led(&world, 2, Leads::Thread, |_| {
            let expected = rung.expected(Duration::ZERO, LoadErrorKind::Overloaded);
            world.expect(&format!("{rung:?}, overloaded"), way, or_not_cached(way, expected));
        });
        assert_eq!(world.source.loads.get(), 0);
        world.expect("there is room", way, or_not_cached(way, LOADED));
    });
    // A stale value is served, and nobody is chosen.
    for way in WAYS {
        let world = World::new(plain().max_concurrent_loads(1)).cached(secs(12));
        while_led(&world, 2, Leads::Thread, |_| world.expect("stale, overloaded", way, stale(secs(12))));
        assert_eq!((world.source.loads.get(), world.queue.len()), (0, 0));
    }
}

#[test]
fn the_ladder_where_too_many_wait() {
    for leads in [Leads::Thread, Leads::Task] {
        over_rungs(|rung, way| {
            let world = rung.world(plain().max_waiters(0), Duration::ZERO);
            while_led(&world, 1, leads, |_| {
                let expected = rung.expected(Duration::ZERO, LoadErrorKind::Overloaded);
                world.expect(&format!("{rung:?}, too many wait"), way, or_not_cached(way, expected));
            });
            let stats = world.cache.stats();
            assert_eq!((stats.joins, stats.wait_timeouts, world.source.loads.get()), (0, 0, 0));
        });
    }
}

#[test]
fn joined_and_then_something_else() {
    for way in waiting_ways() {
        // The source has no such key: an answer, which takes no ladder.
        let world = World::new(plain().fallback(|_| Some(FELL_BACK))).cached(secs(25));
        while_led(&world, 1, Leads::FindsNoSuchKey, |open| {
            let call = || waits(&world, way, secs(100), open);
            world.expect_by("absent", way, Err(LoadErrorKind::Absent), call);
        });
        // The leader panics: this call leads.
        let world = World::new(plain());
        while_led(&world, 1, Leads::ThreadPanics, |open| {
            let call = || waits(&world, way, secs(100), open);
            world.expect_by("a leader that panics", way, LOADED, call);
        });
        // The leader's lease ends: this call takes over.
        let world = World::new(plain().lease(secs(3)));
        while_led(&world, 1, Leads::Thread, |_| {
            let call = || waits(&world, way, secs(100), || world.clock.advance(secs(3)));
            world.expect_by("a leader that hangs", way, LOADED, call);
        });
        assert_eq!((world.cache.stats().takeovers, world.cache.stats().fenced), (1, 1));
        // Somebody writes: who joined before still gets what he joined.
        let world = World::new(plain());
        while_led(&world, 1, Leads::Thread, |open| {
            let call = || {
                waits(&world, way, secs(100), || {
                    world.cache.insert(1, CACHED);
                    world.clock.advance(secs(1));
                    open();
                })
            };
            world.expect_by("a write", way, Ok(Provenance::Joined { waited: secs(1) }), call);
        });
    }
}

#[test]
fn what_is_found_after_a_wait_is_no_hit() {
    for (name, expected) in [
        ("a value", fresh(secs(1))),
        ("a stale value", stale(secs(11))),
        ("an absence", Err(LoadErrorKind::Absent)),
    ] {
        for way in [LoadAsync, WithAsync, TryWithAsync] {
            let world = World::new(plain().negative_ttl(secs(1_000)));
            let cache = &world.cache;
            let (gate, source) = (Gate::default(), world.source.clone());
            thread::scope(|s| {
                let leader = s.spawn(|| {
                    quietly(|| {
                        cache.get_with(&1, || -> u32 {
                            gate.pass();
                            panic!("boom")
                        })
                    })
                });
                eventually(|| gate.arrived() == 1);
                let mut call: Task<'_, End> = Task::waiting(async {
                    let ask = cache.ask(&1);
                    told(match way {
                        LoadAsync => ask.load_async().await,
                        WithAsync => ask.load_with_async(async move { source.value().unwrap() }).await,
                        _ => ask.try_load_with_async(async move { source.value() }).await,
                    })
                });
                // The leader goes, and something comes, before the call looks again.
                gate.open();
                assert!(leader.join().unwrap().is_err());
                assert!(call.is_woken() && !call.has_ended());
                match expected {
                    Err(_) => assert_eq!(cache.optionally_get_with(&1, || None), None),
                    Ok(Provenance::Stale { .. }) => {
                        cache.insert(1, CACHED);
                        world.clock.advance(secs(11));
                        // Somebody refreshes it already.
                        assert!(cache.refresh(&1));
                    }
                    Ok(_) => {
                        cache.insert(1, CACHED);
                        world.clock.advance(secs(1));
                    }
                }
                call.run();
                assert_eq!(call.finish(), expected, "{name}, {way:?}");
            });
            let stats = cache.stats();
            // The leader, the call, and who was told of the absence first: each was a miss, once.
            let misses = 2 + u64::from(expected.is_err());
            assert_eq!((stats.misses, found(&stats)), (misses, misses), "{name}, {way:?}: {stats:?}");
        }
    }
}

#[test]
fn a_walk_of_one_caller_adds_up() {
    let mut random = Random(17);
    let world = World::new(
        plain()
            .negative_ttl(secs(15))
            .error_backoff(Backoff::constant(secs(20)))
            .fallback(|key| (*key % 3 == 0).then_some(FELL_BACK)),
    );
    let (cache, mut seen) = (&world.cache, BTreeMap::<_, u64>::new());
    for step in 0..scaled(20_000, 200_000) {
        let key = random.below(6) as u32;
        world.clock.advance(ms(random.below(6_000)));
        match random.below(20) {
            0 => cache.invalidate(&key),
            1 => cache.insert(key, CACHED),
            2 => _ = cache.expire(&key),
            3 => _ = world.queue.run(),
            _ => {}
        }
        let way = WAYS[random.below(8) as usize];
        world.source.set(match random.below(4) {
            0 if way.may_fail() => Does::Fails,
            1 if way.is_attached() => Does::HasNoSuchKey,
            _ => Does::Answers,
        });
        let found_at_first = told(cache.ask(&key).get());
        let before = cache.stats();
        let end = world.end_ask(way, cache.ask(&key));
        let after = cache.stats();
        let moved = [
            after.hits - before.hits,
            after.stale_hits - before.stale_hits,
            after.misses - before.misses,
            after.negative_hits - before.negative_hits,
        ];
        let expected = match found_at_first {
            Ok(Provenance::Fresh { .. }) => [1, 0, 0, 0],
            Ok(Provenance::Stale { .. }) => [0, 1, 0, 0],
            Err(LoadErrorKind::NotCached) => [0, 0, 1, 0],
            Err(LoadErrorKind::Absent) => [0, 0, 0, 1],
            other => panic!("{other:?} by one who only reads"),
        };
        assert_eq!(moved, expected, "step {step}: {way:?} found {found_at_first:?}, and came to {end:?}");
        let counts = [
            after.grace_hits - before.grace_hits,
            after.fallbacks - before.fallbacks,
            after.joins - before.joins,
            after.wait_timeouts - before.wait_timeouts,
        ];
        let name = name_of(end);
        assert_eq!(counts, [u64::from(name == "grace"), u64::from(name == "fallback"), 0, 0], "step {step}");
        // Who loads has the value, the error or the absence of its own load, or the ladder's for it.
        let loads = after.loads - before.loads;
        match name {
            "loaded" | "failed" => assert_eq!(loads, 1, "step {step}"),
            "backing off" | "not cached" | "fresh" => assert_eq!(loads, 0, "step {step}"),
            "absent" => assert_eq!(loads, moved[2], "step {step}"),
            _ => assert!(loads <= 1, "step {step}"),
        }
        *seen.entry(name).or_default() += 1;
        *seen.entry(name_of(found_at_first)).or_default() += 1;
    }
    let (stats, sum) = (cache.stats(), seen.values().sum::<u64>());
    assert_eq!(found(&stats), sum, "{seen:?}, {stats:?}");
    assert_eq!((seen["grace"], seen["fallback"]), (stats.grace_hits, stats.fallbacks), "{seen:?}");
    for name in ["fresh", "stale", "loaded", "failed", "absent", "not cached", "backing off"] {
        assert!(seen[name] > 100, "{name} is to happen: {seen:?}");
    }
}
