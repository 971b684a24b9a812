//! A storm of threads and tasks on a few keys, whose loads fail, find nothing, hang, panic and are given up, under all deadlines
//! and limits at once: what the callers were told adds up to the calls, and agrees with the counters.
//!
//! ```text
//! cargo test --test storm          (QUELL_LONG=1 for a longer one)
//! ```
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::tasks::{boo, panics};
use common::{
    Gate, Queue, Random, Sut, Tally, With, eventually, found, ms, name_of, plain, quietly, scaled, secs,
    until_waiting,
};
use quell::{
    Answer, AsyncLoader, Backoff, BoxError, Clock, EarlyRefresh, LoadContext, LoadError, LoadErrorKind,
    Loaded, ManualClock, Op,
};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

type Error = std::io::Error;

/// Every third key has a fallback, which gives this.
const FELL_BACK: u32 = 900;
const VALUE: u32 = 7;
const KEYS: u64 = 12;
const MAX_LOADS: usize = 6;
const MAX_WAITERS: usize = 9;

/// What a storm's loader has done, and what its callers were told.
#[derive(Default)]
struct Storm {
    dice: AtomicU64,
    begun: AtomicU64,
    failed: AtomicU64,
    panicked: AtomicU64,
    running: Tally,
    most: AtomicU64,
    fell_back: AtomicU64,
    /// Calls that are counted by what they find, and say nothing of where their values come from.
    silent: AtomicU64,
    told: Mutex<BTreeMap<&'static str, u64>>,
    over: AtomicBool,
}

/// One load under way.
struct Run<'a>(&'a Storm);

impl Drop for Run<'_> {
    fn drop(&mut self) {
        self.0.running.sub();
    }
}

/// Dropped, it ends what runs as long as a storm does.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Storm {
    fn add(count: &AtomicU64) {
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// From 0 to below `n`.
    fn dice(&self, n: u64) -> u64 {
        Random(self.dice.fetch_add(1, Ordering::Relaxed) << 20).below(n)
    }

    fn tell(&self, name: &'static str) {
        *self.told.lock().unwrap().entry(name).or_default() += 1;
    }

    /// How long the next load takes, by the clock.
    fn takes(&self) -> Duration {
        if self.dice(4) == 0 { ms(self.dice(8_000)) } else { Duration::ZERO }
    }

    fn begin(&self) -> Run<'_> {
        Self::add(&self.begun);
        let run = Run(self);
        self.most.fetch_max(self.running.add() as u64 + 1, Ordering::Relaxed);
        run
    }

    /// What a load comes to that may do anything.
    fn end(&self) -> Result<Loaded<u32>, BoxError> {
        match self.dice(10) {
            0 | 1 => {
                Self::add(&self.failed);
                Err("boom".into())
            }
            2 => Ok(Loaded::absent()),
            3 => Ok(Loaded::new(VALUE).do_not_store()),
            4 => Ok(Loaded::new(VALUE).ttl(ms(self.dice(5_000)))),
            5 if self.dice(3) == 0 => self.panic(),
            _ => Ok(Loaded::new(VALUE)),
        }
    }

    /// What a closure comes to that may fail.
    fn tried(&self) -> Result<u32, Error> {
        match self.dice(8) {
            0 | 1 => {
                Self::add(&self.failed);
                Err(Error::other("boom"))
            }
            2 if self.dice(3) == 0 => self.panic(),
            _ => Ok(VALUE),
        }
    }

    fn panic<T>(&self) -> T {
        Self::add(&self.failed);
        Self::add(&self.panicked);
        boo("a load that panics")
    }
}

/// A storm's loads, for threads and for tasks.
#[derive(Clone)]
struct Loads(Arc<Storm>, ManualClock);

impl Loads {
    fn now<R>(&self, end: impl FnOnce(&Storm) -> R) -> R {
        let _run = self.0.begin();
        let until = self.1.now() + self.0.takes();
        eventually(|| self.1.now() >= until);
        end(&self.0)
    }

    async fn later<R>(self, end: impl FnOnce(&Storm) -> R) -> R {
        let _run = self.0.begin();
        let until = self.1.now() + self.0.takes();
        while self.1.now() < until {
            smol::future::yield_now().await;
        }
        end(&self.0)
    }
}

impl AsyncLoader<u32, u32> for Loads {
    fn load(
        &self,
        _: &u32,
        _: &LoadContext<u32>,
    ) -> impl Future<Output = Result<Loaded<u32>, BoxError>> + Send {
        self.clone().later(Storm::end)
    }
}

/// What a storm is held in. Jobs wait in the queue.
struct World {
    cache: Sut<u32, u32>,
    clock: ManualClock,
    queue: Queue,
}

fn world(storm: &Arc<Storm>, lease: Duration, early: EarlyRefresh) -> World {
    let (clock, queue) = (ManualClock::new(), Queue::default());
    let loads = Loads(storm.clone(), clock.clone());
    let (threads, falls_back) = (loads.clone(), storm.clone());
    let cache = plain()
        .soft_ttl(secs(4))
        .time_to_live(secs(8))
        .stale_if_error(secs(10))
        .negative_ttl(secs(3))
        .error_backoff(Backoff::exponential(ms(500), secs(4)))
        .lease(lease)
        .early_refresh(early)
        .wait_timeout(secs(3))
        .max_concurrent_loads(MAX_LOADS)
        .max_waiters(MAX_WAITERS)
        .max_capacity(KEYS - 2)
        .fallback(move |key: &u32| {
            let falls = key.is_multiple_of(3);
            if falls {
                Storm::add(&falls_back.fell_back);
            }
            falls.then_some(FELL_BACK)
        })
        .clock(clock.clone())
        .executor(queue.clone())
        .loader(With(move |_: &u32, _: &LoadContext<u32>| threads.now(Storm::end)))
        .async_loader(loads)
        .build();
    World { cache, clock, queue }
}

/// What a call of a storm came to. Its values are of no matter.
fn storms_end(got: Result<Answer<u32>, LoadError>) -> &'static str {
    name_of(got.map(|answer| answer.provenance).map_err(|error| error.kind()))
}

fn call_as_a_thread(world: &World, loads: &Loads, key: u32) {
    let (cache, storm) = (&world.cache, &loads.0);
    let ended = quietly(|| {
        let ask = cache.ask(&key);
        let ask = match storm.dice(6) {
            0 => ask.max_stale(secs(1)),
            1 => ask.wait_timeout(ms(storm.dice(2_000))),
            2 if storm.dice(4) == 0 => ask.max_age(secs(1)),
            _ => ask,
        };
        match storm.dice(4) {
            0 => ask.get(),
            1 => ask.load(),
            2 => ask.load_with(|| loads.now(|_| VALUE)),
            _ => ask.try_load_with(|| loads.now(Storm::tried)),
        }
    });
    storm.tell(ended.map_or("panicked", storms_end));
}

async fn call_as_a_task(world: &World, loads: &Loads, key: u32) {
    let (cache, storm, own) = (&world.cache, &loads.0, loads.clone());
    let call = async {
        let ask = cache.ask(&key);
        match storm.dice(4) {
            0 => ask.get_async().await,
            1 => ask.load_async().await,
            2 => ask.load_with_async(own.later(|_| VALUE)).await,
            _ => ask.try_load_with_async(own.later(Storm::tried)).await,
        }
    };
    let mut call = Box::pin(panics(call));
    if storm.dice(5) > 0 {
        return storm.tell(call.await.map_or("panicked", storms_end));
    }
    // It is given up after a few polls.
    for _ in 0..=storm.dice(3) {
        if let Some(ended) = smol::future::poll_once(&mut call).await {
            return storm.tell(ended.map_or("panicked", storms_end));
        }
        smol::future::yield_now().await;
    }
    storm.tell("given up");
}

fn write(world: &World, loads: &Loads, key: u32) {
    let (cache, storm) = (&world.cache, &loads.0);
    match storm.dice(12) {
        0 | 1 => cache.invalidate(&key),
        2 => cache.insert(key, VALUE),
        3 => _ = cache.remove(&key),
        4 => _ = cache.expire(&key),
        5 if storm.dice(50) == 0 => cache.invalidate_all(),
        6 => _ = cache.refresh(&key),
        7 => cache.run_pending_tasks(),
        8 => {
            Storm::add(&storm.silent);
            // It is a load of the cache's.
            Storm::add(&storm.begun);
            let _ = cache.compute(&key, |_| Op::Put(VALUE));
        }
        9 => {
            Storm::add(&storm.silent);
            cache.get_with(&key, || loads.now(|_| VALUE));
        }
        _ => {
            Storm::add(&storm.silent);
            let _ = cache.get(&key);
        }
    }
}

#[test]
fn a_storm_adds_up() {
    let (off, beta) = (EarlyRefresh::off(), EarlyRefresh::beta(1.0));
    // With a lease that ends while some load, and with one that does not.
    for (lease, early) in [(secs(5), off), (secs(1_000_000_000), off), (secs(5), beta)] {
        let storm = Arc::new(Storm::default());
        let world = world(&storm, lease, early);
        let loads = Loads(storm.clone(), world.clock.clone());
        let calls = scaled(1_000, 30_000);
        thread::scope(|s| {
            let (world, loads, storm) = (&world, &loads, &*storm);
            let key = || storm.dice(KEYS) as u32;
            let threads = (0..4)
                .map(|_| s.spawn(move || (0..calls).for_each(|_| call_as_a_thread(world, loads, key()))));
            let mut workers: Vec<_> = threads.collect();
            workers.extend((0..2).map(|_| {
                s.spawn(move || {
                    let tasks = smol::LocalExecutor::new();
                    let all: Vec<_> = (0..8)
                        .map(|_| {
                            tasks.spawn(async move {
                                for _ in 0..calls / 4 {
                                    call_as_a_task(world, loads, key()).await;
                                }
                            })
                        })
                        .collect();
                    smol::block_on(tasks.run(async {
                        for task in all {
                            task.await;
                        }
                    }));
                })
            }));
            workers.push(s.spawn(move || (0..calls).for_each(|_| write(world, loads, key()))));
            // Time goes on, and jobs are run, until all calls have ended, however they do.
            let over = Over(&storm.over);
            let until_over = |step: fn(&World, &Storm)| {
                s.spawn(move || {
                    while !storm.over.load(Ordering::Relaxed) {
                        step(world, storm);
                        thread::yield_now();
                    }
                })
            };
            until_over(|world, storm| world.clock.advance(ms(storm.dice(300))));
            until_over(|world, _| _ = world.queue.run());
            until_over(|world, _| _ = world.queue.run());
            let ended: Vec<_> = workers.into_iter().map(thread::ScopedJoinHandle::join).collect();
            eventually(|| world.queue.len() == 0 && world.cache.in_flight().is_empty());
            drop(over);
            ended.into_iter().for_each(|worker| worker.unwrap());
        });
        let told = std::mem::take(&mut *storm.told.lock().unwrap());
        let count = |name: &str| told.get(name).copied().unwrap_or(0);
        let at = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let stats = world.cache.stats();
        let seen = format!("{told:?}, {stats:?}");
        // Each call was told one thing, and was counted once by what it found at first.
        let sum = told.values().sum::<u64>();
        assert_eq!(sum, (4 * calls + 2 * 8 * (calls / 4)) as u64, "{seen}");
        assert_eq!(found(&stats), sum + at(&storm.silent), "{seen}");
        // What was told is what was counted.
        assert_eq!(stats.grace_hits, count("grace"), "{seen}");
        assert_eq!(stats.fallbacks, count("fallback"), "{seen}");
        assert_eq!(stats.fallbacks, at(&storm.fell_back), "{seen}");
        // A load that is given up at its lease before its future is polled has begun, and asked nobody.
        let given_up: u64 = ["timed out", "given up", "grace", "fallback", "stale"].map(count).iter().sum();
        assert!((0..=given_up).contains(&stats.loads.wrapping_sub(at(&storm.begun))), "{seen}");
        assert_eq!(stats.load_failures, at(&storm.failed), "{seen}");
        assert_eq!(stats.loader_panics, at(&storm.panicked), "{seen}");
        // What is told may be found by one who has waited or failed first.
        let silent = at(&storm.silent);
        let own = count("loaded") + count("panicked") + count("given up");
        let chosen = if early == off { 0 } else { own };
        assert!(stats.hits <= count("fresh") + chosen + silent, "{seen}");
        assert_eq!(stats.early_refreshes > 0, early != off, "{seen}");
        assert!(stats.stale_hits <= count("stale") + own + silent, "{seen}");
        assert!(stats.negative_hits <= count("absent"), "{seen}");
        assert!(stats.joins >= count("joined"), "{seen}");
        assert!(stats.loads >= count("loaded"), "{seen}");
        assert!(stats.wait_timeouts >= count("timed out"), "{seen}");
        let rungs: u64 = ["timed out", "grace", "fallback", "stale", "fresh"].map(count).iter().sum();
        assert!(stats.wait_timeouts <= rungs, "{seen}");
        assert_eq!((stats.waiters, stats.in_flight), (0, 0), "{seen}");
        if lease > secs(5) {
            assert!(at(&storm.most) <= (MAX_LOADS + 1) as u64, "{} at one time: {seen}", at(&storm.most));
        }
        limits_are_whole(&world);
    }
}

/// All permits are back: so many may load, so many may wait, and no more.
fn limits_are_whole(world: &World) {
    let (cache, gate) = (&world.cache, &Gate::default());
    let call = |key: u32| {
        let load = || {
            gate.pass();
            Ok::<_, Error>(VALUE)
        };
        cache.ask(&key).wait_timeout(Duration::MAX).try_load_with(load).map(|answer| answer.value)
    };
    // One of those that have no fallback.
    let key = |nth: usize| 1_000 + 3 * nth as u32;
    assert!(!key(0).is_multiple_of(3));
    thread::scope(|s| {
        let leaders: Vec<_> = (0..MAX_LOADS).map(|nth| s.spawn(move || call(key(nth)))).collect();
        eventually(|| gate.arrived() == MAX_LOADS);
        assert_eq!(call(key(MAX_LOADS)).unwrap_err().kind(), LoadErrorKind::Overloaded);
        let waiters: Vec<_> = (0..MAX_WAITERS).map(|_| s.spawn(move || call(key(0)))).collect();
        until_waiting(cache, MAX_WAITERS);
        assert_eq!(call(key(1)).unwrap_err().kind(), LoadErrorKind::Overloaded);
        gate.open();
        assert!(leaders.into_iter().chain(waiters).all(|call| call.join().unwrap().is_ok()));
    });
}
