//! Panics of every piece of user code, at its n-th call for all n: `cargo test --test panic`.
//!
//! After each: no key is stuck, nothing leaks, no value is wrong, and whoever waited has an answer.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::{
    Gate, Hashing, Queue, Sut, Tally, eventually, ms, panic_of, plain, quietly, secs, until_waiting,
};
use quell::{Cache, ManualClock, Op, Ttl};
use std::cell::Cell;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

type Error = std::io::Error;

/// Where user code runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Site {
    Hash = 1,
    Eq,
    KeyClone,
    KeyDrop,
    Clone,
    Drop,
    Load,
    Expiry,
    Fallback,
    Retain,
    Weigher,
    Listener,
}

const SITES: [Site; 12] = [
    Site::Hash,
    Site::Eq,
    Site::KeyClone,
    Site::KeyDrop,
    Site::Clone,
    Site::Drop,
    Site::Load,
    Site::Expiry,
    Site::Fallback,
    Site::Retain,
    Site::Weigher,
    Site::Listener,
];

/// Blows once, at the n-th call of one site. Counts the keys and values that live.
#[derive(Clone, Default)]
struct Fuse {
    site: Arc<AtomicUsize>,
    left: Arc<AtomicUsize>,
    alive: Tally,
}

impl Fuse {
    fn arm(&self, site: Site, nth: usize) {
        self.left.store(nth, Ordering::SeqCst);
        self.site.store(site as usize, Ordering::SeqCst);
    }

    /// Whether it has blown.
    fn disarm(&self) -> bool {
        self.site.swap(0, Ordering::SeqCst) == 0
    }

    fn pass(&self, site: Site) {
        let here = site as usize;
        if self.site.load(Ordering::SeqCst) == here
            && self.left.fetch_sub(1, Ordering::SeqCst) == 1
            && self.site.compare_exchange(here, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        {
            // Some run on a thread of quell's: nothing is shown.
            quietly(|| panic!("fuse")).unwrap_or_else(|p| std::panic::resume_unwind(p))
        }
    }

    fn key(&self, n: u32) -> Key {
        self.alive.add();
        Key(n, self.clone())
    }

    fn value(&self, n: u32) -> Value {
        self.alive.add();
        Value(n, self.clone())
    }
}

struct Key(u32, Fuse);

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.1.pass(Site::Hash);
        self.0.hash(state);
    }
}
impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.1.pass(Site::Eq);
        self.0 == other.0
    }
}
impl Eq for Key {}
impl Clone for Key {
    fn clone(&self) -> Self {
        self.1.pass(Site::KeyClone);
        self.1.key(self.0)
    }
}
impl Drop for Key {
    fn drop(&mut self) {
        self.1.alive.sub();
        self.1.pass(Site::KeyDrop);
    }
}

/// The value of a key is a number that has the key as its last two digits. Its hundreds say what it weighs.
struct Value(u32, Fuse);

impl Value {
    fn weight(&self) -> u32 {
        self.0 / 100 % 3
    }
}

impl Clone for Value {
    fn clone(&self) -> Self {
        self.1.pass(Site::Clone);
        self.1.value(self.0)
    }
}
impl Drop for Value {
    fn drop(&mut self) {
        self.1.alive.sub();
        self.1.pass(Site::Drop);
    }
}

struct Bench {
    cache: Sut<Key, Value>,
    fuse: Fuse,
    clock: ManualClock,
    queue: Queue,
    wrong: Cell<bool>,
}

impl Bench {
    fn new(hashing: Hashing) -> Self {
        let (fuse, clock, queue) = (Fuse::default(), ManualClock::new(), Queue::default());
        let [in_load, in_expiry, in_fallback, in_weigher, in_listener] = [(); 5].map(|()| fuse.clone());
        let cache = plain()
            .shards(1)
            .hasher(hashing)
            .clock(clock.clone())
            .executor(queue.clone())
            .soft_ttl(secs(1))
            .time_to_live(secs(10))
            // Less than the scenario's entries weigh.
            .max_capacity(6)
            .weigher(move |_: &Key, value: &Value| {
                in_weigher.pass(Site::Weigher);
                value.weight()
            })
            .eviction_listener(move |key: &Key, value: &Value, _| {
                in_listener.pass(Site::Listener);
                assert_eq!(value.0 % 100, key.0);
            })
            .expire_after(move |_: &Key, _: &Value, _: Option<Duration>| {
                in_expiry.pass(Site::Expiry);
                Ttl::default()
            })
            .fallback(move |key: &Key| {
                in_fallback.pass(Site::Fallback);
                Some(in_fallback.value(900 + key.0))
            })
            .loader_fn(move |key: &Key| {
                in_load.pass(Site::Load);
                if key.0 % 3 == 2 { Err(Error::other("boom")) } else { Ok(in_load.value(300 + key.0)) }
            })
            .build();
        Self { cache, fuse, clock, queue, wrong: Cell::new(false) }
    }

    /// A call that may panic. What it returns must belong to key `n`.
    fn call(&self, n: u32, call: impl FnOnce(&Key) -> Option<Value>) {
        // The key of the test's own is dropped without a panic.
        let key = self.fuse.key(n);
        let _ = quietly(|| {
            if let Some(value) = call(&key)
                && value.0 % 100 != n
            {
                self.wrong.set(true);
            }
        });
        let _ = quietly(|| drop(key));
    }

    fn scenario(&self) {
        let (cache, fuse) = (&self.cache, &self.fuse);
        for n in 0..10 {
            self.call(n, |key| match n % 5 {
                0 => {
                    cache.insert(key.clone(), fuse.value(n));
                    None
                }
                1 => Some(cache.get_with(key, || {
                    fuse.pass(Site::Load);
                    fuse.value(100 + n)
                })),
                2 => cache
                    .try_get_with(key, || {
                        fuse.pass(Site::Load);
                        Err::<Value, _>(Error::other("boom"))
                    })
                    .ok(),
                3 => cache.get_or_load(key).ok(),
                _ => cache.optionally_get_with(key, || {
                    fuse.pass(Site::Load);
                    (n > 4).then(|| fuse.value(n))
                }),
            });
            self.call(n, |key| cache.get(key));
        }
        self.clock.advance(secs(2));
        for n in 0..10 {
            self.call(n, |key| cache.get_or_load(key).ok());
            self.call(n, |key| {
                cache.compute(key, |v| v.map_or(Op::Keep, |v| Op::Put(v.clone())));
                None
            });
        }
        for job in self.queue.take() {
            let _ = quietly(|| job.run());
        }
        self.call(1, |key| {
            cache.expire(key);
            None
        });
        self.call(1, |key| {
            Some(cache.get_with(key, || {
                fuse.pass(Site::Load);
                fuse.value(201)
            }))
        });
        self.call(0, |key| {
            cache.insert(key.clone(), fuse.value(500));
            cache.remove(key)
        });
        self.call(6, |key| {
            cache.invalidate(key);
            cache.peek(key)
        });
        self.call(0, |_| {
            cache.retain(|key, _| {
                fuse.pass(Site::Retain);
                key.0 % 2 == 1
            });
            None
        });
        self.call(0, |_| {
            if cache.iter().any(|(key, value)| value.0 % 100 != key.0) {
                self.wrong.set(true);
            }
            None
        });
        self.clock.advance(secs(20));
        let _ = quietly(|| cache.run_pending_tasks());
    }

    /// Everything works, and nothing is left.
    ///
    /// A value that a function is about to return is lost if the drop of one of the function's temporaries panics
    /// (rust-lang/rust#47949): that one is the compiler's.
    fn check(self, site: Site, blown: bool) -> Result<(), &'static str> {
        let lost = usize::from(matches!(site, Site::Drop | Site::KeyDrop));
        let Self { cache, fuse, wrong, queue, .. } = self;
        if wrong.get() {
            return Err("a wrong value");
        }
        drop(queue.take());
        if !cache.in_flight().is_empty() {
            return Err("a load is under way for ever");
        }
        cache.run_pending_tasks();
        let weigh = || cache.iter().map(|(_, value)| u64::from(value.weight())).sum::<u64>();
        if cache.weighted_size() != weigh() || cache.weighted_size() > 6 {
            return Err("a wrong weight");
        }
        if cache.stats().listener_panics != u64::from(blown && site == Site::Listener) {
            return Err("a listener's panic that is not counted, or a wrong value that was told");
        }
        cache.set_capacity(100);
        for n in 0..10 {
            let key = fuse.key(n);
            let _ = cache.get_with(&key, || fuse.value(700 + n));
            cache.insert(fuse.key(n), fuse.value(800 + n));
            if cache.get(&key).is_none_or(|v| v.0 != 800 + n) || cache.get_or_load(&key).is_err() {
                return Err("a key is stuck");
            }
        }
        if cache.len() != 10 || cache.iter().count() != 10 || cache.weighted_size() != weigh() {
            return Err("a miscounted value");
        }
        drop(cache);
        let other = Cache::<u32, u32>::builder().shards(1).build();
        for _ in 0..300 {
            other.run_pending_tasks();
            if fuse.alive.get() <= lost {
                return Ok(());
            }
            thread::sleep(ms(1));
        }
        Err("a leak")
    }
}

#[test]
fn at_every_call_of_every_site() {
    let mut bad = Vec::new();
    for site in SITES {
        for hashing in [Hashing::Spread(quell::DefaultHashBuilder::with_seed(1)), Hashing::Constant] {
            let constant = matches!(hashing, Hashing::Constant);
            for nth in 1.. {
                let bench = Bench::new(hashing.clone());
                bench.fuse.arm(site, nth);
                bench.scenario();
                let blown = bench.fuse.disarm();
                if let Err(what) = bench.check(site, blown) {
                    bad.push(format!("{what} after {site:?} number {nth}, constant hash {constant}"));
                }
                if !blown {
                    assert!(nth > 2 || site == Site::Eq, "{site:?} is called");
                    break;
                }
            }
        }
    }
    let few = bad.iter().take(20).cloned().collect::<Vec<_>>().join("\n");
    assert!(bad.is_empty(), "{} of them:\n{few}", bad.len());
}

#[test]
fn while_the_cache_is_dropped() {
    for site in [Site::Drop, Site::KeyDrop] {
        for nth in 1..=10 {
            let bench = Bench::new(Hashing::Constant);
            for n in 0..5 {
                bench.cache.insert(bench.fuse.key(n), bench.fuse.value(n));
                let _ = bench.cache.get_with(&bench.fuse.key(n + 5), || bench.fuse.value(n + 5));
            }
            let (fuse, before) = (bench.fuse.clone(), bench.cache.stats().drop_panics);
            fuse.arm(site, nth);
            drop(bench);
            // A key goes with the last of its flights, which waits for the collector.
            let other = Cache::<u32, u32>::builder().build();
            eventually(|| {
                other.run_pending_tasks();
                fuse.alive.get() == 0
            });
            assert!(fuse.disarm(), "{site:?} number {nth}");
            assert!(other.stats().drop_panics > before, "it is counted");
        }
    }
}

#[test]
fn with_waiters_at_every_call() {
    // A leader, and three who wait: each gets a value, or the panic of its own call, and no call hangs.
    for site in [Site::Clone, Site::Load, Site::Expiry, Site::Weigher, Site::Listener, Site::Eq, Site::Drop] {
        for nth in 1.. {
            let bench = Bench::new(Hashing::Constant);
            let (cache, fuse, gate) = (&bench.cache, &bench.fuse, Gate::default());
            cache.insert(fuse.key(2), fuse.value(2));
            let load = || {
                gate.pass();
                fuse.pass(Site::Load);
                fuse.value(101)
            };
            thread::scope(|s| {
                let call = || quietly(|| cache.get_with(&fuse.key(1), load).0);
                let leader = s.spawn(call);
                eventually(|| gate.arrived() == 1);
                let waiters = [(); 3].map(|()| s.spawn(call));
                until_waiting(cache, 3);
                fuse.arm(site, nth);
                gate.open();
                let ends: Vec<_> = [leader].into_iter().chain(waiters).map(|t| t.join().unwrap()).collect();
                let panicked = ends.iter().filter(|end| end.is_err()).count();
                assert!(panicked <= 1, "one panic, {panicked} calls");
                assert!(ends.iter().flatten().all(|v| *v == 101), "{site:?} {nth}");
            });
            let blown = bench.fuse.disarm();
            bench.check(site, blown).unwrap_or_else(|what| panic!("{what} after {site:?} number {nth}"));
            if !blown {
                break;
            }
        }
    }
}

#[test]
fn a_loaders_panic_resumes_in_its_own_caller() {
    let cache = plain().loader_fn(|_: &u32| -> Result<u32, Error> { panic!("attached") }).build();
    assert_eq!(panic_of(|| cache.get_with(&1, || panic!("a"))), "a");
    assert_eq!(panic_of(|| cache.try_get_with(&1, || -> Result<u32, Error> { panic!("b") })), "b");
    assert_eq!(panic_of(|| cache.optionally_get_with(&1, || panic!("c"))), "c");
    assert_eq!(panic_of(|| cache.compute(&1, |_| panic!("d"))), "d");
    assert_eq!(panic_of(|| cache.ask(&1).load_with(|| panic!("e"))), "e");
    assert_eq!(panic_of(|| cache.get_or_load(&1)), "attached");
    let stats = cache.stats();
    assert_eq!((stats.loader_panics, stats.load_failures, stats.in_flight), (6, 6, 0));
    assert_eq!(cache.get_with(&1, || 1), 1);
    // A panic of a compute leaves what was there.
    assert_eq!(panic_of(|| cache.compute(&1, |_| panic!("d"))), "d");
    assert_eq!(cache.get(&1), Some(1));
}

#[test]
fn a_panic_while_a_stale_value_is_refreshed_keeps_it() {
    let clock = ManualClock::new();
    let cache = plain::<u32, u32>().soft_ttl(secs(1)).clock(clock.clone()).build();
    cache.insert(1, 1);
    clock.advance(secs(1));
    assert_eq!(panic_of(|| cache.get_with(&1, || panic!("mine"))), "mine");
    assert_eq!((cache.get(&1), cache.in_flight().len()), (Some(1), 0));
    assert_eq!(cache.get_with(&1, || 2), 2);
}

#[test]
fn a_background_panic_is_caught_and_counted() {
    let (clock, queue) = (ManualClock::new(), Queue::default());
    let cache = plain()
        .soft_ttl(secs(1))
        .clock(clock.clone())
        .executor(queue.clone())
        .loader_fn(|_: &u32| -> Result<u32, Error> { panic!("boom") })
        .build();
    cache.insert(1, 1);
    clock.advance(secs(1));
    assert_eq!(cache.get_or_load(&1).unwrap(), 1);
    assert_eq!(quietly(|| queue.run()).ok(), Some(1), "it does not reach the executor");
    let stats = cache.stats();
    assert_eq!((stats.loader_panics, stats.load_failures, stats.in_flight), (1, 1, 0));
    assert_eq!(cache.get(&1), Some(1));
}

#[test]
fn a_previous_value_that_panics_when_it_is_cloned_does_not_reach_the_executor() {
    let fuse = Fuse::default();
    for asynchronous in [false, true] {
        let (clock, queue) = (ManualClock::new(), Queue::default());
        let builder = plain().soft_ttl(secs(1)).clock(clock.clone()).executor(queue.clone());
        let cache = if asynchronous {
            let fuse = fuse.clone();
            builder.async_loader_fn(move |n: u32| std::future::ready(Ok::<_, Error>(fuse.value(n)))).build()
        } else {
            let fuse = fuse.clone();
            builder.loader_fn(move |n: &u32| Ok::<_, Error>(fuse.value(*n))).build()
        };
        cache.insert(1, fuse.value(7));
        clock.advance(secs(1));
        assert_eq!(cache.get_or_load(&1).unwrap().0, 7);
        fuse.arm(Site::Clone, 1);
        assert_eq!(quietly(|| queue.run()).ok(), Some(1));
        assert!(fuse.disarm(), "it was cloned");
        assert_eq!(cache.read(&1, |value| value.0), Some(7));
        clock.advance(secs(1));
        assert_eq!(cache.get_or_load(&1).unwrap().0, 7);
        assert_eq!(queue.run(), 1);
        assert_eq!(cache.get_or_load(&1).unwrap().0, 1, "the next refresh works");
    }
}

#[test]
fn a_panic_in_a_nested_load_passes_through() {
    let cache = plain::<u32, u32>().build();
    let text = panic_of(|| cache.get_with(&1, || cache.get_with(&2, || panic!("inner"))));
    assert_eq!((text.as_str(), cache.in_flight().len()), ("inner", 0));
    // The thread's own book-keeping of what it loads is right again: no cycle is seen.
    assert_eq!(cache.get_with(&2, || cache.get_with(&1, || 3)), 3);
}

#[test]
fn a_panic_whose_payload_panics_too() {
    struct Payload;
    impl Drop for Payload {
        fn drop(&mut self) {
            panic!("the payload");
        }
    }
    #[derive(Clone)]
    struct Value(#[allow(dead_code, reason = "only its end matters")] Arc<Bomb>);
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            std::panic::panic_any(Payload);
        }
    }
    let cache = plain::<u32, Value>().build();
    let before = cache.stats().drop_panics;
    cache.insert(1, Value(Arc::new(Bomb)));
    cache.invalidate(&1);
    quietly(|| {
        eventually(|| {
            cache.run_pending_tasks();
            cache.stats().drop_panics > before
        });
    })
    .unwrap();
}

/// What is evicted is asked whether it has expired, and so is what the sweep comes by: both after something was stored, and
/// with an entry in hand. Nothing may be lost to eviction for ever, which the audit at the end sees too.
#[test]
fn a_clock_in_a_full_cache() {
    #[derive(Clone, Default)]
    struct Clock(Arc<AtomicUsize>);
    impl quell::Clock for Clock {
        fn now(&self) -> Duration {
            assert_ne!(self.0.fetch_sub(1, Ordering::Relaxed), 1, "the clock");
            secs(1)
        }
    }
    const NEVER: usize = usize::MAX;
    for nth in 1.. {
        let clock = Clock(Arc::new(AtomicUsize::new(NEVER)));
        let cache = plain::<u32, u32>().max_capacity(4).time_to_live(secs(10)).clock(clock.clone()).build();
        (0..4).for_each(|k| cache.insert(k, k));
        clock.0.store(nth, Ordering::Relaxed);
        let call = |k: u32| {
            cache.insert(k, k);
            cache.get_with(&(k + 100), || k);
            cache.remove(&k);
        };
        (4..8).for_each(|k| drop(quietly(|| call(k))));
        let over = clock.0.swap(NEVER, Ordering::Relaxed) <= nth;
        (8..16).for_each(call);
        assert!(cache.weighted_size() <= 4, "{} in the cache", cache.weighted_size());
        (16..20).for_each(|k| cache.insert(k, k));
        assert_eq!(cache.iter().count(), 4, "what has been lost cannot be dropped: reading {nth}");
        if over {
            assert!(nth > 20, "only {nth} readings");
            break;
        }
    }
}

/// The last share of a slot may go with a job that nobody has run, after its cache: a key whose destructor panics then does
/// so in the middle of the executor.
#[test]
fn a_destructor_with_the_last_share() {
    #[derive(Clone)]
    struct Key(Arc<AtomicUsize>);
    impl Hash for Key {
        fn hash<H: Hasher>(&self, state: &mut H) {
            1.hash(state);
        }
    }
    impl PartialEq for Key {
        fn eq(&self, _: &Self) -> bool {
            true
        }
    }
    impl Eq for Key {}
    impl Drop for Key {
        fn drop(&mut self) {
            assert_ne!(self.0.load(Ordering::Relaxed), 1, "a destructor");
        }
    }
    let armed = Arc::new(AtomicUsize::new(0));
    let jobs = Arc::new(std::sync::Mutex::new(Vec::new()));
    let queue = jobs.clone();
    let cache = plain::<Key, u32>()
        .executor(move |job| {
            queue.lock().unwrap().push(job);
            Ok(())
        })
        .loader(|_: &Key| Ok::<_, Error>(1))
        .build();
    let other = plain::<u32, u32>().build();
    assert!(cache.refresh(&Key(armed.clone())));
    drop(cache);
    let before = other.stats().drop_panics;
    armed.store(1, Ordering::Relaxed);
    let dropped = quietly(|| jobs.lock().unwrap().clear());
    armed.store(0, Ordering::Relaxed);
    dropped.expect("it is contained");
    assert!(other.stats().drop_panics > before, "it is counted");
}
