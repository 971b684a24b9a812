//! What the benches of a full cache share: the caches behind one trait, keys to ask them for, and the words of
//! the command line.
//!
//! The caches are quell, its rivals and a plain LRU list, all `u64 -> u64`, each with room for the same number of
//! entries and with its own defaults otherwise: shards, policy, sizes of queues. The hasher is ahash everywhere;
//! TinyUFO brings its own.

#![allow(dead_code, reason = "each bench uses a part")]

pub(crate) mod crowd;

use std::collections::HashMap;
use std::str::FromStr;
use std::time::Duration;

use ahash::RandomState;
use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

/// A cache with room for so many entries.
pub(crate) trait Bounded: Send + Sync {
    fn get(&self, key: u64) -> Option<u64>;
    fn insert(&self, key: u64, value: u64);

    /// How many entries the cache says it has, if it says.
    fn len(&self) -> Option<u64>;

    /// Does what the cache has put off.
    fn upkeep(&self) {}

    /// Whether what was read and written comes to the policy's knowledge by upkeep only.
    fn lags(&self) -> bool {
        false
    }

    /// Asks for each key and inserts it on a miss; the number of hits. A provided method, so that the loop is
    /// compiled for each cache and calls nothing by a pointer.
    fn replay(&self, keys: &[u64]) -> u64 {
        let mut hits = 0;
        for &key in keys {
            match self.get(key) {
                Some(_) => hits += 1,
                None => self.insert(key, !key),
            }
        }
        hits
    }
}

/// A cache that is not built yet.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) build: fn(Plan) -> Box<dyn Bounded>,
}

/// What all caches of a run are built for.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) capacity: u64,
    /// How many threads will use the cache at the same time.
    pub(crate) threads: usize,
    /// Every deadline that the cache knows, an hour or two away.
    pub(crate) deadlines: bool,
}

impl Plan {
    /// For one thread, without deadlines.
    pub(crate) fn of(capacity: u64) -> Self {
        Self { capacity, threads: 1, deadlines: false }
    }

    fn entries(self) -> usize {
        usize::try_from(self.capacity).expect("a cache that fits into memory")
    }
}

pub(crate) const QUELL: &str = "quell";
pub(crate) const LRU: &str = "LRU";

pub(crate) const CACHES: [Kind; 8] = [
    Kind { name: QUELL, build: |plan| Box::new(quell(plan)) },
    Kind { name: "quick_cache", build: |plan| Box::new(quick_cache(plan)) },
    Kind { name: "moka", build: |plan| Box::new(moka(plan)) },
    Kind { name: "foyer-s3fifo", build: |plan| Box::new(foyer(plan, foyer_memory::S3FifoConfig::default())) },
    Kind { name: "foyer-lfu", build: |plan| Box::new(foyer(plan, foyer_memory::LfuConfig::default())) },
    Kind { name: "tinyufo", build: |plan| Box::new(tinyufo(plan)) },
    Kind { name: "mini-moka", build: |plan| Box::new(mini_moka(plan)) },
    Kind { name: LRU, build: |plan| Box::new(Mutex::new(Lru::new(plan.entries()))) },
];

impl Kind {
    /// Whether this is a crate that quell is measured against.
    pub(crate) fn is_rival(&self) -> bool {
        ![QUELL, LRU].contains(&self.name)
    }
}

const SOFT: Duration = Duration::from_secs(3600);
const HARD: Duration = Duration::from_secs(7200);

/// The same keys in every run: the results of a single thread repeat.
fn hasher() -> RandomState {
    RandomState::with_seeds(0x5eed, 0x1dea, 0xcafe, 0xf00d)
}

pub(crate) type Quell = quell::Cache<u64, u64, RandomState>;

pub(crate) fn quell(plan: Plan) -> Quell {
    let builder = quell::Cache::builder().max_capacity(plan.capacity).hasher(hasher());
    if plan.deadlines { builder.soft_ttl(SOFT).time_to_live(HARD).build() } else { builder.build() }
}

impl Bounded for Quell {
    fn get(&self, key: u64) -> Option<u64> {
        self.get(&key)
    }

    fn insert(&self, key: u64, value: u64) {
        self.insert(key, value);
    }

    fn len(&self) -> Option<u64> {
        Some(self.len() as u64)
    }

    fn upkeep(&self) {
        self.run_pending_tasks();
    }
}

type QuickCache = quick_cache::sync::Cache<u64, u64, quick_cache::UnitWeighter, RandomState>;

fn quick_cache(plan: Plan) -> QuickCache {
    let lifecycle = quick_cache::sync::DefaultLifecycle::default();
    QuickCache::with(plan.entries(), plan.capacity, quick_cache::UnitWeighter, hasher(), lifecycle)
}

impl Bounded for QuickCache {
    fn get(&self, key: u64) -> Option<u64> {
        self.get(&key)
    }

    fn insert(&self, key: u64, value: u64) {
        self.insert(key, value);
    }

    fn len(&self) -> Option<u64> {
        Some(self.len() as u64)
    }
}

type Moka = moka::sync::Cache<u64, u64, RandomState>;

fn moka(plan: Plan) -> Moka {
    let builder = moka::sync::Cache::builder().max_capacity(plan.capacity);
    let builder = if plan.deadlines { builder.time_to_live(HARD) } else { builder };
    builder.build_with_hasher(hasher())
}

impl Bounded for Moka {
    fn get(&self, key: u64) -> Option<u64> {
        self.get(&key)
    }

    fn insert(&self, key: u64, value: u64) {
        self.insert(key, value);
    }

    fn len(&self) -> Option<u64> {
        Some(self.entry_count())
    }

    fn upkeep(&self) {
        self.run_pending_tasks();
    }

    fn lags(&self) -> bool {
        true
    }
}

type Foyer = foyer_memory::Cache<u64, u64, RandomState>;

/// foyer has eight shards, however small the cache, each with an eighth of the capacity; one thread is better served
/// by one.
fn foyer(plan: Plan, policy: impl Into<foyer_memory::EvictionConfig>) -> Foyer {
    let shards = if plan.threads == 1 { 1 } else { 8 };
    let builder = foyer_memory::CacheBuilder::new(plan.entries()).with_shards(shards);
    builder.with_eviction_config(policy).with_hash_builder(hasher()).build()
}

impl Bounded for Foyer {
    fn get(&self, key: u64) -> Option<u64> {
        self.get(&key).map(|entry| *entry.value())
    }

    fn insert(&self, key: u64, value: u64) {
        self.insert(key, value);
    }

    fn len(&self) -> Option<u64> {
        Some(self.entries() as u64)
    }
}

type TinyUfo = tinyufo::TinyUfo<u64, u64>;

fn tinyufo(plan: Plan) -> TinyUfo {
    TinyUfo::new(plan.entries(), plan.entries())
}

impl Bounded for TinyUfo {
    fn get(&self, key: u64) -> Option<u64> {
        self.get(&key)
    }

    fn insert(&self, key: u64, value: u64) {
        self.put(key, value, 1);
    }

    fn len(&self) -> Option<u64> {
        None
    }
}

type MiniMoka = mini_moka::sync::Cache<u64, u64, RandomState>;

fn mini_moka(plan: Plan) -> MiniMoka {
    let builder = mini_moka::sync::Cache::builder().max_capacity(plan.capacity);
    let builder = if plan.deadlines { builder.time_to_live(HARD) } else { builder };
    builder.build_with_hasher(hasher())
}

impl Bounded for MiniMoka {
    fn get(&self, key: u64) -> Option<u64> {
        self.get(&key)
    }

    fn insert(&self, key: u64, value: u64) {
        self.insert(key, value);
    }

    fn len(&self) -> Option<u64> {
        Some(self.entry_count())
    }

    fn upkeep(&self) {
        mini_moka::sync::ConcurrentCacheExt::sync(self);
    }

    fn lags(&self) -> bool {
        true
    }
}

impl Bounded for Mutex<Lru> {
    fn get(&self, key: u64) -> Option<u64> {
        self.lock().get(key)
    }

    fn insert(&self, key: u64, value: u64) {
        self.lock().insert(key, value);
    }

    fn len(&self) -> Option<u64> {
        Some(self.lock().places.len() as u64)
    }
}

/// A hash map into a ring of nodes in order of last use; node 0 closes the ring between newest and oldest.
pub(crate) struct Lru {
    capacity: usize,
    places: HashMap<u64, u32, RandomState>,
    nodes: Vec<Node>,
}

#[derive(Clone, Copy)]
struct Node {
    key: u64,
    value: u64,
    newer: u32,
    older: u32,
}

impl Lru {
    pub(crate) fn new(capacity: usize) -> Self {
        let ends = Node { key: 0, value: 0, newer: 0, older: 0 };
        Self { capacity, places: HashMap::with_hasher(hasher()), nodes: vec![ends] }
    }

    pub(crate) fn get(&mut self, key: u64) -> Option<u64> {
        let at = *self.places.get(&key)?;
        self.unlink(at);
        self.link_as_newest(at);
        Some(self.nodes[at as usize].value)
    }

    pub(crate) fn insert(&mut self, key: u64, value: u64) {
        let at = if let Some(&at) = self.places.get(&key) {
            self.unlink(at);
            at
        } else if self.places.len() < self.capacity {
            self.nodes.push(self.nodes[0]);
            u32::try_from(self.nodes.len() - 1).expect("fewer than 2^32 entries")
        } else {
            let oldest = self.nodes[0].newer;
            self.places.remove(&self.nodes[oldest as usize].key);
            self.unlink(oldest);
            oldest
        };
        self.places.insert(key, at);
        let node = &mut self.nodes[at as usize];
        (node.key, node.value) = (key, value);
        self.link_as_newest(at);
    }

    fn unlink(&mut self, at: u32) {
        let Node { newer, older, .. } = self.nodes[at as usize];
        self.nodes[newer as usize].older = older;
        self.nodes[older as usize].newer = newer;
    }

    fn link_as_newest(&mut self, at: u32) {
        let older = self.nodes[0].older;
        let node = &mut self.nodes[at as usize];
        (node.newer, node.older) = (0, older);
        self.nodes[older as usize].newer = at;
        self.nodes[0].older = at;
    }
}

/// A bijection that scatters: neighbours are not neighbours after it.
pub(crate) fn splitmix64(id: u64) -> u64 {
    let mut x = id.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Ranks from 0, the most popular, drawn with weights `1 / (rank + 1)^exponent` by inverting the cumulative ones.
pub(crate) struct Zipf {
    cumulative: Vec<f64>,
}

impl Zipf {
    pub(crate) fn new(ranks: u32, exponent: f64) -> Self {
        let weights = (1..=ranks).map(|rank| f64::from(rank).powf(-exponent));
        let sums = weights.scan(0.0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        });
        Self { cumulative: sums.collect() }
    }

    pub(crate) fn draw(&self, rng: &mut SmallRng) -> u64 {
        let last = self.cumulative.len() - 1;
        let point = rng.random::<f64>() * self.cumulative[last];
        self.cumulative.partition_point(|&below| below <= point).min(last) as u64
    }
}

/// The same draws in every run.
pub(crate) fn rng() -> SmallRng {
    SmallRng::seed_from_u64(0x5eed_0001)
}

/// The numbers below `count` in an order of chance.
pub(crate) fn shuffled(count: u32, rng: &mut SmallRng) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..count).collect();
    numbers.shuffle(rng);
    numbers
}

/// The words after `--` on the command line.
pub(crate) struct Arguments(Vec<String>);

impl Arguments {
    pub(crate) fn read() -> Self {
        // Cargo adds its own `--bench`.
        Self(std::env::args().skip(1).filter(|word| word != "--bench").collect())
    }

    pub(crate) fn flag(&mut self, name: &str) -> bool {
        let before = self.0.len();
        self.0.retain(|word| word != name);
        self.0.len() < before
    }

    /// The word after `name`.
    pub(crate) fn value<T: FromStr>(&mut self, name: &str) -> Option<T> {
        let at = self.0.iter().position(|word| word == name)?;
        let word = self.0.get(at + 1).unwrap_or_else(|| panic!("{name} wants a value"));
        let value = word.parse().unwrap_or_else(|_| panic!("{name} cannot be {word:?}"));
        self.0.drain(at..at + 2);
        Some(value)
    }

    /// The words after `name`, between commas.
    pub(crate) fn names(&mut self, name: &str) -> Wanted {
        let words = self.value::<String>(name).unwrap_or_default();
        Wanted(words.split(',').filter(|word| !word.is_empty()).map(str::to_owned).collect())
    }

    /// The caches named after `--caches`; beside those in [`CACHES`] there may be `others`.
    pub(crate) fn caches(&mut self, others: &[&str]) -> Wanted {
        let known: Vec<&str> = CACHES.iter().map(|kind| kind.name).chain(others.iter().copied()).collect();
        let wanted = self.names("--caches");
        for name in &wanted.0 {
            assert!(known.contains(&name.as_str()), "no cache is called {name:?}; there are {known:?}");
        }
        wanted
    }

    /// What is left; options must have been taken out.
    pub(crate) fn rest(self) -> Vec<String> {
        if let Some(unknown) = self.0.iter().find(|word| word.starts_with("--")) {
            panic!("no option is called {unknown}: see the head of the bench's source");
        }
        self.0
    }
}

/// Names to choose by; none given chooses everything.
pub(crate) struct Wanted(Vec<String>);

impl Wanted {
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|wanted| wanted == name)
    }

    /// The caches of [`CACHES`] among them.
    pub(crate) fn kinds(&self) -> Vec<&'static Kind> {
        CACHES.iter().filter(|kind| self.has(kind.name)).collect()
    }
}
