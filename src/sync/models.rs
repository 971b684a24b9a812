//! Models of the front: calls as a user makes them, of two or three threads on one key.
//!
//! Waits have no limit here, so that a lost wake-up is a deadlock, which ends the process.
//!
//! | model | red when |
//! |---|---|
//! | `two_calls_are_one_load`, `three_calls_are_one_load` | a joined value is not used; the loser of a claim loads too |
//! | `a_read_meets_a_load_and_an_insert` | a read does not acquire |
//! | `a_removal_meets_a_load`, `a_clearing_..`, `a_retain_..` | the fence between the claim and the loader is missing, or the remover's |
//! | `a_failed_load_is_not_shared_with_who_never_gives_up` | a flight that failed settles nothing; the error is shared |
//! | `a_compute_meets_a_load` | a call that wants to lead takes what it waited for |
//! | `a_refused_put_is_given_to_nobody` | what a `compute` could not put is shared with those who joined it |
//! | `an_insert_meets_a_compute` | the outcome of a refused `compute` is told as if it had taken effect |

use super::*;
use crate::clock::Clock;
use crate::primitive::UnsafeCell as Watched;
use crate::primitive::atomic::{AtomicU64, Ordering};
use crate::primitive::epoch::Participant;
use crate::primitive::model::{Census, FEW, Value, both, check, spawn};

const KEY: u8 = 7;

struct Still;

impl Clock for Still {
    fn now(&self) -> Duration {
        Duration::ZERO
    }
}

#[derive(Clone)]
struct Fixture {
    cache: Cache<u8, Value>,
    census: Census,
    /// The memory of the source, which only the one who loads may touch.
    source: Arc<Watched<u64>>,
}

impl Fixture {
    fn new() -> Self {
        let builder = Cache::builder().shards(1).hasher(DefaultHashBuilder::with_seed(1)).clock(Still);
        Self { cache: builder.build(), census: Census::default(), source: Arc::new(Watched::new(0)) }
    }

    fn load(&self, number: u64) -> Value {
        // SAFETY: loom reports a load that runs at the same time before this writes.
        self.source.with_mut(|loads| unsafe { *loads += 1 });
        self.census.value(number)
    }

    fn get_with(&self, number: u64) -> u64 {
        self.cache.get_with(&KEY, || self.load(number)).number()
    }

    fn get(&self) -> Option<u64> {
        self.cache.get(&KEY).map(|value| value.number())
    }

    fn loads(&self) -> u64 {
        // SAFETY: loom reports a load that runs at the same time before this reads.
        self.source.with(|loads| unsafe { *loads })
    }

    /// Ends the cache, and sees that nothing is left.
    fn end(self) {
        assert_eq!(self.cache.stats().in_flight, 0, "a flight is left");
        assert_eq!(self.cache.len(), usize::from(self.get().is_some()));
        let census = self.census.clone();
        drop(self);
        assert_eq!(census.count(), 0, "values leaked");
    }
}

#[test]
fn two_calls_are_one_load() {
    both("two calls are one load", 3, |pins| {
        pins().adopt();
        let f = Fixture::new();
        let other = spawn(pins, {
            let f = f.clone();
            move || f.get_with(1)
        });
        let mine = f.get_with(2);
        assert_eq!(f.get(), Some(mine), "what was shared is stored");
        assert_eq!((other.join().unwrap(), f.loads()), (mine, 1));
        let stats = f.cache.stats();
        assert_eq!((stats.loads, stats.hits + stats.joins), (1, 2));
        f.end();
    });
}

#[test]
fn a_read_meets_a_load_and_an_insert() {
    both("a read meets a load and an insert", 2, |pins| {
        pins().adopt();
        let f = Fixture::new();
        let loader = spawn(pins, {
            let f = f.clone();
            move || f.get_with(1)
        });
        let writer = spawn(pins, {
            let f = f.clone();
            move || f.cache.insert(KEY, f.census.value(2))
        });
        assert!(matches!(f.get(), None | Some(1 | 2)));
        assert!(matches!(loader.join().unwrap(), 1 | 2));
        writer.join().unwrap();
        assert_eq!(f.get(), Some(2), "the insert stays");
        f.end();
    });
}

#[test]
fn three_calls_are_one_load() {
    // Three that may park are dear; that no wake-up is lost is for the models of two.
    check("three calls are one load", 1, FEW, || {
        let pins = Participant::lasting;
        pins().adopt();
        let f = Fixture::new();
        let others = [1, 2].map(|number| {
            let f = f.clone();
            spawn(pins, move || f.get_with(number))
        });
        let mine = f.get_with(3);
        for other in others {
            assert_eq!(other.join().unwrap(), mine);
        }
        assert_eq!((f.loads(), f.get()), (1, Some(mine)));
        f.end();
    });
}

type TestCache = Cache<u8, Value>;

/// A caller changes the source and removes the key; another one loads it meanwhile. Nothing but the two fences orders
/// them where the key is absent.
fn removal_meets_load(name: &str, remove: fn(&TestCache), load: fn(&TestCache, &dyn Fn() -> Value)) {
    check(name, 3, FEW, move || {
        let pins = Participant::lasting;
        pins().adopt();
        let f = Fixture::new();
        let source = Arc::new(AtomicU64::new(1));
        let loader = spawn(pins, {
            let (f, source) = (f.clone(), source.clone());
            // Relaxed: what the cache promises must come from its own fences.
            move || load(&f.cache, &|| f.census.value(source.load(Ordering::Relaxed)))
        });
        // Relaxed: as above.
        source.store(2, Ordering::Relaxed);
        remove(&f.cache);
        loader.join().unwrap();
        assert_ne!(f.get(), Some(1), "loaded before the removal, and there after it");
        f.end();
    });
}

macro_rules! removals_meet_loads {
    ($($name:ident: $remove:expr, $load:expr;)*) => {$(
        #[test]
        fn $name() {
            removal_meets_load(stringify!($name), $remove, $load);
        }
    )*};
}

removals_meet_loads! {
    a_removal_meets_a_load: |c| drop(c.remove(&KEY)), |c, load| drop(c.get_with(&KEY, load));
    a_clearing_meets_a_load: |c| c.invalidate_all(), |c, load| drop(c.get_with(&KEY, load));
    a_retain_meets_a_load: |c| c.retain(|_, _| false), |c, load| drop(c.get_with(&KEY, load));
    a_removal_meets_a_load_that_may_fail: |c| drop(c.remove(&KEY)),
        |c, load| drop(c.try_get_with(&KEY, || Ok::<_, fmt::Error>(load())));
    a_removal_meets_a_compute: |c| drop(c.remove(&KEY)),
        |c, load| drop(c.compute(&KEY, |_| Op::Put(load())));
}

#[test]
fn a_failed_load_is_not_shared_with_who_never_gives_up() {
    both("a failed load is not shared with who never gives up", 2, |pins| {
        pins().adopt();
        let f = Fixture::new();
        let fails = spawn(pins, {
            let f = f.clone();
            move || {
                f.cache.try_get_with(&KEY, || Err::<Value, _>(fmt::Error)).map(|value| value.number()).ok()
            }
        });
        assert_eq!(f.get_with(2), 2);
        assert!(matches!(fails.join().unwrap(), None | Some(2)));
        assert_eq!((f.loads(), f.get()), (1, Some(2)));
        f.end();
    });
}

#[test]
fn a_compute_meets_a_load() {
    both("a compute meets a load", 2, |pins| {
        pins().adopt();
        let f = Fixture::new();
        let other = spawn(pins, {
            let f = f.clone();
            move || f.get_with(1)
        });
        let mine = f.cache.compute(&KEY, |there| {
            let there = there.map_or(0, Value::number);
            Op::Put(f.load(10 + there))
        });
        let theirs = other.join().unwrap();
        // Either the load came first and was counted on, or it joined or found what was put.
        match mine {
            Outcome::Replaced(put) => assert_eq!((theirs, put.number()), (1, 11)),
            Outcome::Inserted(put) => assert_eq!((theirs, put.number()), (10, 10)),
            _ => panic!("nobody has written in between"),
        }
        assert!(matches!(f.get(), Some(10 | 11)));
        f.end();
    });
}

#[test]
fn an_insert_meets_a_compute() {
    both("an insert meets a compute", 3, |pins| {
        pins().adopt();
        let f = Fixture::new();
        f.cache.insert(KEY, f.census.value(1));
        let writer = spawn(pins, {
            let f = f.clone();
            move || f.cache.insert(KEY, f.census.value(5))
        });
        let put = f.cache.compute(&KEY, |there| Op::Put(f.census.value(10 + there.map_or(0, Value::number))));
        writer.join().unwrap();
        match put {
            Outcome::Replaced(put) => {
                assert!(matches!((put.number(), f.get()), (11, Some(5)) | (15, Some(15))));
                assert_eq!(f.cache.stats().fenced, 0, "what was refused is not told as done");
            }
            Outcome::Superseded => assert_eq!(f.get(), Some(5)),
            _ => panic!("there was a value"),
        }
        f.end();
    });
}

#[test]
fn a_refused_put_is_given_to_nobody() {
    both("a refused put is given to nobody", 2, |pins| {
        pins().adopt();
        let f = Fixture::new();
        let computes = spawn(pins, {
            let f = f.clone();
            move || match f.cache.compute(&KEY, |_| Op::Put(f.census.value(10))) {
                Outcome::Inserted(_) | Outcome::Replaced(_) => true,
                Outcome::Superseded => false,
                _ => panic!("it puts"),
            }
        });
        let writer = spawn(pins, {
            let f = f.clone();
            move || f.cache.insert(KEY, f.census.value(5))
        });
        let mine = f.get_with(1);
        writer.join().unwrap();
        assert!(computes.join().unwrap() || mine != 10, "a value that never took effect was given out");
        f.end();
    });
}
