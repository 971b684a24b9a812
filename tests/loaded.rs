//! What a loader may say of what it found, each by threads, by tasks and in the background: `cargo test --test loaded`.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::tasks::{Door, Kept, Task, Tasks, waiting};
use common::{Builder, Gate, Queue, Sut, With, ms, over_shapes, plain, secs, until_waiting};
use quell::{
    AsyncLoader, BoxError, LoadContext, LoadError, LoadErrorKind, Loaded, ManualClock, Provenance,
    RemovalCause, Ttl,
};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// What the value was that the cache had first, and what a load brings.
const OLD: u32 = 1;
const NEW: u32 = 2;

/// What a loader says, which is shown the previous value.
type Says = fn(Option<u32>) -> Result<Loaded<u32>, BoxError>;

struct AsTask(Says);

impl AsyncLoader<u32, u32> for AsTask {
    async fn load(&self, _: &u32, cx: &LoadContext<u32>) -> Result<Loaded<u32>, BoxError> {
        smol::future::yield_now().await;
        (self.0)(cx.previous().copied())
    }
}

/// Who loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Thread,
    Task,
    /// A thread, for nobody who waits.
    Background,
    /// A task, for nobody who waits.
    BackgroundTask,
}

/// A cache whose values are fresh for 10 s, served for 20 s, and in grace until 50 s, and a loader that says one thing.
struct World {
    by: By,
    cache: Sut<u32, u32>,
    clock: ManualClock,
    queue: Queue,
    kept: Kept,
    removed: Arc<Mutex<Vec<(u32, RemovalCause)>>>,
}

impl World {
    fn new(by: By, builder: Builder<u32, u32>, says: Says) -> Self {
        let (clock, queue, kept) = (ManualClock::new(), Queue::default(), Kept::default());
        let removed = Arc::new(Mutex::new(Vec::new()));
        let told = removed.clone();
        let builder = builder
            .soft_ttl(secs(10))
            .time_to_live(secs(20))
            .stale_if_error(secs(30))
            .clock(clock.clone())
            .executor(queue.clone())
            .eviction_listener(move |_, value, cause| told.lock().unwrap().push((*value, cause)));
        let with = With(move |_: &u32, cx: &LoadContext<u32>| says(cx.previous().copied()));
        let cache = match by {
            By::Thread | By::Background => builder.loader(with).build(),
            By::Task => builder.async_loader(AsTask(says)).build(),
            By::BackgroundTask => builder.async_loader(AsTask(says)).spawner(kept.clone()).build(),
        };
        Self { by, cache, clock, queue, kept, removed }
    }

    /// With a value of this age.
    fn aged(self, age: Duration) -> Self {
        self.cache.insert(1, OLD);
        self.clock.advance(age);
        self
    }

    /// Loads, whatever is there. What came of it, if somebody waited for it.
    #[track_caller]
    fn load(&self) -> Option<Result<u32, LoadErrorKind>> {
        let value = |answer: quell::Answer<u32>| answer.value;
        let kind = |error: LoadError| error.kind();
        let ask = self.cache.ask(&1).max_age(Duration::ZERO);
        match self.by {
            By::Thread => Some(ask.load().map(value).map_err(kind)),
            By::Task => Some(Task::new(ask.load_async()).finish().map(value).map_err(kind)),
            By::Background | By::BackgroundTask => {
                assert!(self.cache.refresh(&1));
                assert_eq!(self.queue.run() + self.kept.run(), 1);
                None
            }
        }
    }

    /// Loads a value that is as it should be.
    #[track_caller]
    fn brings(&self, value: u32) {
        assert!(self.load().is_none_or(|got| got == Ok(value)), "{:?}", self.by);
    }

    fn is(&self) -> Option<Provenance> {
        self.cache.ask(&1).get().ok().map(|answer| answer.provenance)
    }

    #[track_caller]
    fn is_fresh_at(&self, age: Duration) {
        self.clock.advance(age);
        assert_eq!(self.is(), Some(Provenance::Fresh { age }), "{:?}", self.by);
        self.clock.set(self.now() - age);
    }

    fn now(&self) -> Duration {
        quell::Clock::now(&self.clock)
    }

    /// Fresh, then stale, then gone, at these ages.
    #[track_caller]
    fn lives(&self, soft: Duration, hard: Duration) {
        let (by, born) = (self.by, self.now());
        let at = |age: Duration| {
            self.clock.set(born + age);
            self.is()
        };
        assert_eq!(at(soft - ms(1)), Some(Provenance::Fresh { age: soft - ms(1) }), "{by:?}");
        if soft < hard {
            assert_eq!(at(soft), Some(Provenance::Stale { age: soft }), "{by:?}");
            assert_eq!(at(hard - ms(1)), Some(Provenance::Stale { age: hard - ms(1) }), "{by:?}");
        }
        assert_eq!(at(hard), None, "{by:?}");
    }

    fn removed(&self) -> Vec<(u32, RemovalCause)> {
        std::mem::take(&mut *self.removed.lock().unwrap())
    }
}

/// Runs over who loads, and over what is there before: nothing, or a value that is fresh, stale, or in grace.
fn over_all(says: Says, body: impl Fn(&World, Option<Duration>)) {
    for by in [By::Thread, By::Task, By::Background, By::BackgroundTask] {
        for age in [None, Some(secs(4)), Some(secs(12)), Some(secs(30))] {
            over_shapes(|builder| {
                let world = World::new(by, builder, says);
                let world = if let Some(age) = age { world.aged(age) } else { world };
                body(&world, age);
            });
        }
    }
}

/// Why a value of this age goes when another takes its place.
fn cause(age: Duration) -> RemovalCause {
    if age < secs(20) { RemovalCause::Replaced } else { RemovalCause::Expired }
}

/// What the listener was told if a value was there.
#[track_caller]
fn assert_replaced(world: &World, age: Option<Duration>) {
    let expected: Vec<_> = age.map(|age| (OLD, cause(age))).into_iter().collect();
    assert_eq!(world.removed(), expected, "{:?}, {age:?}", world.by);
}

#[test]
fn a_value() {
    over_all(
        |_| Ok(Loaded::new(NEW)),
        |world, age| {
            world.brings(NEW);
            assert_replaced(world, age);
            world.lives(secs(10), secs(20));
        },
    );
}

#[test]
fn ttl() {
    over_all(
        |_| Ok(Loaded::new(NEW).ttl(secs(15))),
        |world, age| {
            world.brings(NEW);
            assert_replaced(world, age);
            world.lives(secs(10), secs(15));
        },
    );
    // Longer than the cache's.
    over_all(
        |_| Ok(Loaded::new(NEW).ttl(secs(1_000))),
        |world, _| {
            world.brings(NEW);
            world.lives(secs(10), secs(1_000));
        },
    );
    // Shorter than it would be fresh.
    over_all(
        |_| Ok(Loaded::new(NEW).ttl(secs(3))),
        |world, _| {
            world.brings(NEW);
            world.lives(secs(3), secs(3));
        },
    );
    over_all(
        |_| Ok(Loaded::new(NEW).ttl(Duration::MAX)),
        |world, _| {
            world.brings(NEW);
            world.clock.advance(secs(1_000_000_000));
            assert_eq!(world.cache.get(&1), Some(NEW));
        },
    );
}

#[test]
fn soft_ttl() {
    over_all(
        |_| Ok(Loaded::new(NEW).soft_ttl(secs(3))),
        |world, _| {
            world.brings(NEW);
            world.lives(secs(3), secs(20));
        },
    );
    over_all(
        |_| Ok(Loaded::new(NEW).soft_ttl(Duration::ZERO)),
        |world, _| {
            world.brings(NEW);
            assert_eq!(world.is(), Some(Provenance::Stale { age: Duration::ZERO }));
        },
    );
    over_all(
        |_| Ok(Loaded::new(NEW).soft_ttl(secs(3)).ttl(secs(100))),
        |world, _| {
            world.brings(NEW);
            world.lives(secs(3), secs(100));
        },
    );
}

#[test]
fn a_soft_ttl_beyond_the_hard_one_is_cut() {
    // The builder refuses that; a loader's word of it is no failure of the load.
    over_all(
        |_| Ok(Loaded::new(NEW).soft_ttl(secs(100)).ttl(secs(5))),
        |world, _| {
            world.brings(NEW);
            world.lives(secs(5), secs(5));
        },
    );
    over_all(
        |_| Ok(Loaded::new(NEW).soft_ttl(Duration::MAX)),
        |world, _| {
            world.brings(NEW);
            world.lives(secs(20), secs(20));
        },
    );
}

#[test]
fn what_is_for_nobody_after_takes_the_older_value_with_it() {
    let says: [Says; 3] = [
        |_| Ok(Loaded::new(NEW).ttl(Duration::ZERO)),
        |_| Ok(Loaded::new(NEW).do_not_store()),
        |_| Ok(Loaded::new(NEW).do_not_store().ttl(secs(5)).soft_ttl(secs(5))),
    ];
    for says in says {
        over_all(says, |world, age| {
            world.brings(NEW);
            assert_eq!((world.cache.get(&1), world.cache.len()), (None, 0), "{:?}, {age:?}", world.by);
            assert_replaced(world, age);
            // Not even if the source fails.
            let fails = world.cache.try_get_with(&1, || Err::<u32, _>(std::fmt::Error));
            assert_eq!(fails.unwrap_err().kind(), LoadErrorKind::Failed);
        });
    }
}

#[test]
fn what_is_for_nobody_after_is_shared_by_those_who_wait() {
    for zero in [false, true] {
        let loaded = move || {
            let loaded = Loaded::new(NEW);
            if zero { loaded.ttl(Duration::ZERO) } else { loaded.do_not_store() }
        };
        let gate = Gate::default();
        let stop = gate.clone();
        let cache = plain::<u32, u32>()
            .loader(With(move |_: &u32, _: &LoadContext<u32>| {
                stop.pass();
                Ok(loaded())
            }))
            .build();
        thread::scope(|s| {
            let calls: Vec<_> = (0..6).map(|_| s.spawn(|| cache.get_or_load(&1).unwrap())).collect();
            until_waiting(&cache, 5);
            let task = Task::waiting(cache.ask(&1).load_async());
            gate.open();
            assert!(calls.into_iter().all(|call| call.join().unwrap() == NEW));
            assert!(matches!(task.finish().unwrap().provenance, Provenance::Joined { .. }));
        });
        assert_eq!((gate.arrived(), cache.len()), (1, 0));

        struct Stops<F>(Door, F);
        impl<F: Fn() -> Loaded<u32> + Send + Sync + 'static> AsyncLoader<u32, u32> for Stops<F> {
            async fn load(&self, _: &u32, _: &LoadContext<u32>) -> Result<Loaded<u32>, BoxError> {
                self.0.pass().await;
                Ok((self.1)())
            }
        }
        let door = Door::default();
        let cache = plain().async_loader(Stops(door.clone(), loaded)).build();
        let tasks = Tasks::new(6, |_| cache.get_or_load_async(&1));
        assert_eq!(waiting(&cache), 5);
        door.open();
        assert!(tasks.finish().into_iter().all(|value| value.unwrap() == NEW));
        assert_eq!((door.arrived(), cache.len()), (1, 0));
    }
}

#[test]
fn not_modified_renews_all_times() {
    over_all(
        |_| Ok(Loaded::not_modified()),
        |world, age| {
            if age.is_none() {
                return;
            }
            world.brings(OLD);
            assert_eq!(world.removed(), [], "nothing has left");
            world.is_fresh_at(Duration::ZERO);
            world.lives(secs(10), secs(20));
        },
    );
    // By times of its own.
    over_all(
        |_| Ok(Loaded::not_modified().soft_ttl(secs(30)).ttl(secs(60))),
        |world, age| {
            if age.is_some() {
                world.brings(OLD);
                world.lives(secs(30), secs(60));
            }
        },
    );
    // That is a value like any other: it may be the last.
    let says: [Says; 2] =
        [|_| Ok(Loaded::not_modified().do_not_store()), |_| Ok(Loaded::not_modified().ttl(Duration::ZERO))];
    for says in says {
        over_all(says, |world, age| {
            if age.is_some() {
                world.brings(OLD);
                assert_eq!((world.cache.get(&1), world.cache.len()), (None, 0));
                assert_replaced(world, age);
            }
        });
    }
}

#[test]
fn not_modified_asks_the_expiry_anew() {
    for by in [By::Thread, By::Task, By::Background, By::BackgroundTask] {
        let asked = Arc::new(Mutex::new(0));
        let count = asked.clone();
        let builder = plain().expire_after(move |_: &u32, _: &u32, _: Option<Duration>| {
            *count.lock().unwrap() += 1;
            Ttl { soft: Some(secs(3)), hard: Some(secs(6)) }
        });
        let world = World::new(by, builder, |_| Ok(Loaded::not_modified())).aged(secs(4));
        world.brings(OLD);
        assert_eq!(*asked.lock().unwrap(), 2, "{by:?}");
        world.lives(secs(3), secs(6));
    }
}

#[test]
fn not_modified_where_nothing_was_is_a_failure() {
    for by in [By::Thread, By::Task, By::Background, By::BackgroundTask] {
        over_shapes(|builder| {
            let world = World::new(by, builder, |previous| {
                assert_eq!(previous, None);
                Ok(Loaded::not_modified())
            });
            assert!(world.load().is_none_or(|got| got == Err(LoadErrorKind::Failed)), "{by:?}");
            assert_eq!((world.cache.stats().load_failures, world.cache.len()), (1, 0));
        });
    }
}

#[test]
fn absent() {
    over_all(
        |_| Ok(Loaded::absent()),
        |world, age| {
            assert!(world.load().is_none_or(|got| got == Err(LoadErrorKind::Absent)), "{:?}", world.by);
            assert_eq!((world.cache.get(&1), world.cache.len()), (None, 0), "{:?}, {age:?}", world.by);
            // It goes by the loader's word, or had gone before.
            let expected: Vec<_> = age
                .map(|age| (OLD, if age < secs(20) { RemovalCause::Explicit } else { RemovalCause::Expired }))
                .into_iter()
                .collect();
            assert_eq!(world.removed(), expected);
            // It is no failure, and nothing that the ladder has is better.
            assert_eq!((world.cache.stats().load_failures, world.cache.stats().grace_hits), (0, 0));
            assert_eq!(world.cache.get_with(&1, || NEW), NEW);
        },
    );
    for by in [By::Thread, By::Task, By::Background, By::BackgroundTask] {
        let world = World::new(by, plain().negative_ttl(secs(7)), |_| Ok(Loaded::absent())).aged(secs(12));
        let _ = world.load();
        let kind = |world: &World| world.cache.ask(&1).get().unwrap_err().kind();
        world.clock.advance(secs(7) - ms(1));
        assert_eq!(kind(&world), LoadErrorKind::Absent, "{by:?}");
        world.clock.advance(ms(1));
        assert_eq!(kind(&world), LoadErrorKind::NotCached, "{by:?}");
    }
}

#[test]
fn an_error_leaves_what_is_there() {
    over_all(
        |_| Err("boom".into()),
        |world, age| {
            let got = world.load();
            // A call that takes no older value gets the error.
            assert!(got.is_none_or(|got| got == Err(LoadErrorKind::Failed)), "{:?}", world.by);
            let is = match age {
                Some(age) if age < secs(10) => Some(Provenance::Fresh { age }),
                Some(age) if age < secs(20) => Some(Provenance::Stale { age }),
                _ => None,
            };
            assert_eq!((world.is(), world.removed()), (is, vec![]), "{:?}", world.by);
            let rescued = world.cache.try_get_with(&1, || Err::<u32, _>(std::fmt::Error));
            assert_eq!(rescued.ok(), age.map(|_| OLD));
        },
    );
}

#[test]
fn the_previous_value_is_shown_in_whatever_stage() {
    over_all(
        |previous| Ok(Loaded::new(NEW + 10 * previous.unwrap_or(0))),
        |world, age| world.brings(NEW + if age.is_some() { 10 * OLD } else { 0 }),
    );
}
