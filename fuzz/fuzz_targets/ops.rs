//! Drives the public cache with arbitrary operations of one thread and compares every answer with a plain
//! map of values and deadlines. The clock is moved by hand, no capacity is set, so that the model knows
//! every answer.
//!
//! ```text
//! RUSTC_BOOTSTRAP=1 cargo fuzz run ops -- -max_total_time=60
//! ```

#![no_main]

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use quell::{Cache, ManualClock, Op, Outcome};

/// The unit of all times here.
const TICK: Duration = Duration::from_secs(1);
/// The cache's own time to live, in ticks.
const TTL: u8 = 64;

#[derive(Arbitrary, Debug)]
struct Input {
    hashing: Hashing,
    steps: Vec<Step>,
}

/// How keys meet in the table.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Hashing {
    /// Every key in its own place.
    Spread,
    /// Four keys to a hash.
    Quarter,
    /// All keys have one hash.
    Constant,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Step {
    Insert(u8),
    InsertWithTtl(u8, u8),
    Get(u8),
    Peek(u8),
    Read(u8),
    Pinned(u8),
    ContainsKey(u8),
    GetWith(u8),
    Remove(u8),
    Invalidate(u8),
    InvalidateAll,
    Expire(u8),
    Retain(u8),
    Compute(u8, Change),
    Advance(u8),
    RunPendingTasks,
    Iterate,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Change {
    Put,
    Remove,
    Keep,
}

// ---- the model
// -------------------------------------------------------------------------------------------------------

/// A value with the ticks at which it becomes stale and dead.
#[derive(Clone, Copy, Debug)]
struct Entry {
    value: u32,
    soft: u64,
    hard: u64,
}

#[derive(Default)]
struct Model {
    entries: BTreeMap<u8, Entry>,
    now: u64,
    made: u32,
}

impl Model {
    /// A value that was never used before: what an old one comes back as is seen.
    fn new_value(&mut self) -> u32 {
        self.made += 1;
        self.made
    }

    /// The entry unless it is dead.
    fn live(&self, key: u8) -> Option<Entry> {
        self.entries.get(&key).copied().filter(|entry| self.now < entry.hard)
    }

    fn value(&self, key: u8) -> Option<u32> {
        self.live(key).map(|entry| entry.value)
    }

    fn is_fresh(&self, key: u8) -> bool {
        self.live(key).is_some_and(|entry| self.now < entry.soft)
    }

    fn put(&mut self, key: u8, value: u32, ttl: u8) {
        let hard = self.now + u64::from(ttl);
        self.entries.insert(key, Entry { value, soft: hard, hard });
    }

    fn remove(&mut self, key: u8) -> Option<u32> {
        let value = self.value(key);
        self.entries.remove(&key);
        value
    }

    fn expire(&mut self, key: u8) {
        let now = self.now;
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.soft = entry.soft.min(now);
        }
    }

    fn pairs(&self) -> Vec<(u8, u32)> {
        self.entries.keys().filter_map(|key| Some((*key, self.value(*key)?))).collect()
    }
}

// ---- the hasher
// ------------------------------------------------------------------------------------------------------

impl Hashing {
    fn place(self, key: u64) -> u64 {
        match self {
            Self::Spread => key.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            Self::Quarter => (key & 3) << 62,
            Self::Constant => 0,
        }
    }
}

impl BuildHasher for Hashing {
    type Hasher = KeyHasher;

    fn build_hasher(&self) -> KeyHasher {
        KeyHasher { hashing: *self, key: 0 }
    }
}

struct KeyHasher {
    hashing: Hashing,
    key: u64,
}

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.key = self.key << 8 | u64::from(*byte);
        }
    }

    fn finish(&self) -> u64 {
        self.hashing.place(self.key)
    }
}

// ---- the run
// ---------------------------------------------------------------------------------------------------------

struct Run {
    cache: Cache<u8, u32, Hashing>,
    clock: ManualClock,
    model: Model,
}

impl Run {
    fn new(hashing: Hashing) -> Self {
        let clock = ManualClock::new();
        let cache = Cache::builder()
            .shards(1)
            .initial_capacity(1)
            .time_to_live(TICK * u32::from(TTL))
            .jitter(0.0)
            .clock(clock.clone())
            .hasher(hashing)
            .build();
        Self { cache, clock, model: Model::default() }
    }

    fn step(&mut self, step: Step) {
        let Self { cache, clock, model } = self;
        match step {
            Step::Insert(key) => {
                let (key, value) = (narrow(key), model.new_value());
                model.put(key, value, TTL);
                cache.insert(key, value);
            }
            Step::InsertWithTtl(key, ttl) => {
                let (key, ttl, value) = (narrow(key), ttl % (TTL + 1), model.new_value());
                model.put(key, value, ttl);
                cache.insert_with_ttl(key, value, TICK * u32::from(ttl));
            }
            Step::Get(key) => assert_eq!(cache.get(&narrow(key)), model.value(narrow(key))),
            Step::Peek(key) => assert_eq!(cache.peek(&narrow(key)), model.value(narrow(key))),
            Step::Read(key) => assert_eq!(cache.read(&narrow(key), |value| *value), model.value(narrow(key))),
            Step::Pinned(key) => assert_eq!(cache.pin().get(&narrow(key)).copied(), model.value(narrow(key))),
            Step::ContainsKey(key) => {
                assert_eq!(cache.contains_key(&narrow(key)), model.live(narrow(key)).is_some());
            }
            Step::GetWith(key) => {
                let (key, value) = (narrow(key), model.new_value());
                let mut loads = 0;
                let got = cache.get_with(&key, || {
                    loads += 1;
                    value
                });
                if model.is_fresh(key) {
                    assert_eq!(
                        (Some(got), loads),
                        (model.value(key), 0),
                        "a fresh value was not a plain hit"
                    );
                } else {
                    assert_eq!((got, loads), (value, 1), "a stale or absent value was not loaded once");
                    model.put(key, value, TTL);
                }
            }
            Step::Remove(key) => assert_eq!(cache.remove(&narrow(key)), model.remove(narrow(key))),
            Step::Invalidate(key) => {
                cache.invalidate(&narrow(key));
                model.remove(narrow(key));
            }
            Step::InvalidateAll => {
                cache.invalidate_all();
                model.entries.clear();
            }
            Step::Expire(key) => {
                cache.expire(&narrow(key));
                model.expire(narrow(key));
            }
            Step::Retain(bits) => {
                let keep = |key: &u8, value: &u32| (u32::from(*key) ^ *value ^ u32::from(bits)) & 3 != 0;
                cache.retain(keep);
                model.entries.retain(|key, entry| keep(key, &entry.value));
            }
            Step::Compute(key, change) => {
                let (key, value) = (narrow(key), model.new_value());
                let mut seen = None;
                let outcome = cache.compute(&key, |old| {
                    seen = Some(old.copied());
                    match change {
                        Change::Put => Op::Put(value),
                        Change::Remove => Op::Remove,
                        Change::Keep => Op::Keep,
                    }
                });
                assert_eq!(seen, Some(model.value(key)), "the closure ran never, or saw another value");
                assert!(!matches!(outcome, Outcome::Superseded), "there was nobody to supersede it");
                match change {
                    Change::Put => model.put(key, value, TTL),
                    Change::Remove => drop(model.remove(key)),
                    Change::Keep => {}
                }
            }
            Step::Advance(ticks) => {
                clock.advance(TICK * u32::from(ticks));
                model.now += u64::from(ticks);
            }
            Step::RunPendingTasks => {
                cache.run_pending_tasks();
                assert_eq!(usize::try_from(cache.len()), Ok(model.pairs().len()));
            }
            Step::Iterate => self.compare_all(),
        }
    }

    fn compare_all(&self) {
        let mut pairs: Vec<(u8, u32)> = self.cache.iter().collect();
        pairs.sort_unstable();
        assert_eq!(pairs, self.model.pairs());
        for key in 0..16 {
            assert_eq!(self.cache.peek(&key), self.model.value(key), "key {key}");
        }
    }
}

/// Sixteen keys, so that operations meet.
fn narrow(key: u8) -> u8 {
    key & 15
}

fuzz_target!(|input: Input| {
    let mut run = Run::new(input.hashing);
    for step in input.steps {
        run.step(step);
    }
    run.compare_all();
});
