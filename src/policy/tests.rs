//! The policy over a cache without values: what it keeps of generated workloads, beside LRU; and that its numbers add up.

use super::*;
use crate::primitive::epoch::pin;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, HashMap};

/// One life of a key in a toy cache.
struct Toy {
    hash: u32,
    mark: MarkWord,
    weight: u32,
    standing: Cell<Standing>,
}

/// A cache of keys, for one thread.
struct ToyCache {
    policy: Policy,
    toys: Box<[OnceCell<Toy>]>,
    lives: Cell<usize>,
    /// The toys that are in the cache, by hash. A key is its own hash.
    there: RefCell<HashMap<u32, usize>>,
}

impl Slots for ToyCache {
    type Slot = usize;

    fn find(&self, item: Item) -> Option<usize> {
        let slot = *self.there.borrow().get(&item.hash())?;
        item.means(self.toy(slot).mark.load()).then_some(slot)
    }

    fn mark(&self, slot: usize) -> &MarkWord {
        &self.toy(slot).mark
    }

    fn standing(&self, slot: usize) -> Standing {
        self.toy(slot).standing.get()
    }

    fn len(&self) -> usize {
        self.there.borrow().len()
    }

    fn prefetch(&self, _: Item, _: bool) {}

    fn evict(&self, slot: usize) -> bool {
        self.standing(slot) != Standing::InUse && self.remove(self.toy(slot).hash)
    }
}

impl ToyCache {
    fn new(capacity: u64, parts: usize, lives: usize) -> Self {
        let toys = (0..lives).map(|_| OnceCell::new()).collect();
        Self { policy: Policy::new(capacity, parts), toys, lives: Cell::new(0), there: RefCell::default() }
    }

    fn toy(&self, slot: usize) -> &Toy {
        self.toys[slot].get().expect("a slot that has been given out")
    }

    fn get(&self, key: u32) -> bool {
        let there = self.there.borrow().get(&key).copied();
        there.inspect(|slot| self.toy(*slot).mark.hit()).is_some()
    }

    fn remove(&self, key: u32) -> bool {
        let Some(slot) = self.there.borrow_mut().remove(&key) else { return false };
        self.policy.leave(&self.toy(slot).mark, key);
        self.policy.discharge(self.toy(slot).weight.into());
        true
    }

    fn make_room(&self, more: u32, key: u32) {
        while self.policy.weight() + u64::from(more) > self.policy.capacity()
            && self.policy.drop_one(self, key, &pin())
        {}
    }

    fn insert(&self, key: u32, weight: u32) -> usize {
        let guard = pin();
        let admission = self.policy.admit(self, key, weight, &guard);
        self.make_room(weight, key);
        self.policy.charge(weight.into());
        let slot = self.lives.replace(self.lives.get() + 1);
        let toy = Toy { hash: key, mark: MarkWord::new(), weight, standing: Cell::new(Standing::Free) };
        assert!(self.toys[slot].set(toy).is_ok());
        self.there.borrow_mut().insert(key, slot);
        self.policy.enter(self, &self.toy(slot).mark, self.policy.mark(admission, weight), key, &guard);
        slot
    }

    /// The share of requests that find their key, in per cent.
    fn hit_ratio(capacity: u64, parts: usize, requests: &[u32]) -> f64 {
        let cache = Self::new(capacity, parts, requests.len());
        let hits = requests.iter().filter(|&&key| {
            let hit = cache.get(key);
            if !hit {
                cache.insert(key, 1);
            }
            assert!(cache.len() as u64 <= capacity);
            hit
        });
        let hits = hits.count();
        cache.audit();
        100.0 * hits as f64 / requests.len() as f64
    }

    /// Every slot has one element, and the sums are those of the slots.
    fn audit(&self) {
        let guard = pin();
        let there = self.there.borrow().clone();
        let mut elements: HashMap<u32, (Place, usize)> = HashMap::new();
        let mut small = 0;
        for (number, part) in self.policy.parts.iter().enumerate() {
            let in_small = std::iter::from_fn(|| part.small.pop(&guard)).map(|item| (item, Place::Small));
            let in_main = std::iter::from_fn(|| part.main.pop(&guard)).map(|item| (item, Place::Main));
            // Relaxed: one thread.
            let candidate = part.tally.0.candidate.load(Ordering::Relaxed);
            let candidate = (candidate != 0).then_some((Item(candidate).bare().0, Place::Main));
            for (item, place) in in_small.chain(in_main).chain(candidate) {
                let Some(&slot) = there.get(&Item(item).hash()) else { continue };
                if Item(item).means(self.toy(slot).mark.load()) {
                    assert_eq!(self.policy.part_number(Item(item).hash()), number);
                    elements.entry(Item(item).hash()).or_insert((place, 0)).1 += 1;
                }
            }
            small += part.small();
        }
        for (key, &slot) in &there {
            assert_eq!(elements.get(key), Some(&(self.toy(slot).mark.load().place(), 1)), "of key {key}");
        }
        let weights = |place: Option<Place>| {
            let weight = |&slot: &usize| {
                let mark = self.toy(slot).mark.load();
                if place == Some(mark.place()) || place.is_none() { u64::from(mark.weight()) } else { 0 }
            };
            there.values().map(weight).sum::<u64>()
        };
        assert_eq!((small, self.policy.weight()), (weights(Some(Place::Small)), weights(None)));
    }
}

/// The share of requests that LRU answers, in per cent.
fn lru(capacity: usize, requests: &[u32]) -> f64 {
    let (mut by_time, mut by_key) = (BTreeMap::new(), HashMap::new());
    let hits = requests.iter().enumerate().filter(|&(now, &key)| {
        let last = by_key.insert(key, now);
        last.inspect(|last| _ = by_time.remove(last));
        by_time.insert(now, key);
        if by_time.len() > capacity {
            let (_, oldest) = by_time.pop_first().expect("it is not empty");
            by_key.remove(&oldest);
        }
        last.is_some()
    });
    100.0 * hits.count() as f64 / requests.len() as f64
}

/// Keys with popularity in proportion to one over the rank.
fn zipf(keys: u32, requests: usize, seed: u64) -> Vec<u32> {
    let mut random = SmallRng::seed_from_u64(seed);
    let whole = f64::from(keys).ln();
    (0..requests).map(|_| (random.random::<f64>() * whole).exp() as u32).collect()
}

#[test]
fn popular_keys_stay() {
    let requests = zipf(10_000, 60_000, 1);
    for (capacity, parts) in [(50, 1), (500, 1), (500, 4), (3_000, 4)] {
        let (own, lru) = (ToyCache::hit_ratio(capacity, parts, &requests), lru(capacity as usize, &requests));
        assert!(own > lru + 1.0, "{own:.1} of {capacity} in {parts} parts, LRU {lru:.1}");
    }
}

#[test]
fn a_loop_that_does_not_fit_is_kept_in_part() {
    let requests: Vec<u32> = (0..150).flat_map(|_| 0..1_000).collect();
    assert!(lru(500, &requests) < 0.1);
    let own = ToyCache::hit_ratio(500, 1, &requests);
    assert!(own > 40.0, "{own:.1} of at most 50");
}

#[test]
fn a_scan_does_not_wash_out_what_is_used() {
    let hot = zipf(1_000, 50_000, 2);
    let mut once = 1_000..;
    let requests: Vec<u32> = hot.iter().flat_map(|&key| [key, once.next().expect("endless")]).collect();
    let (own, lru) = (ToyCache::hit_ratio(400, 1, &requests), lru(400, &requests));
    assert!(own > lru + 2.0 && own > 40.0, "{own:.1} of at most 50, LRU {lru:.1}");
}

/// A workload that only recency serves: each key comes twice, at a distance that fits. The small queue grows to serve it.
#[test]
fn the_small_queue_learns_to_be_long() {
    let requests: Vec<u32> = (0..30_000).flat_map(|i| [i + 40, i]).collect();
    let own = ToyCache::hit_ratio(800, 1, &requests);
    assert!(own > 45.0, "{own:.1} of at most 50");
}

#[test]
fn weights_add_up() {
    let mut random = SmallRng::seed_from_u64(3);
    let cache = ToyCache::new(10_000, 4, 100_000);
    for _ in 0..50_000 {
        let key = random.random_range(0..3_000);
        match random.random_range(0..10) {
            0 => _ = cache.remove(key),
            1 => {
                if let Some(&slot) = cache.there.borrow().get(&key) {
                    cache.policy.reweigh(&cache.toy(slot).mark, key, || cache.toy(slot).weight);
                }
            }
            _ if cache.get(key) => {}
            _ => _ = cache.insert(key, random.random_range(0..100)),
        }
        assert!(cache.policy.weight() <= 10_000);
    }
    cache.audit();
}

#[test]
fn what_is_in_use_is_passed_over_and_what_has_expired_goes_first() {
    let cache = ToyCache::new(300, 1, 2_000);
    let slots: Vec<usize> = (0..300).map(|key| cache.insert(key, 1)).collect();
    for &slot in &slots[..30] {
        cache.toy(slot).standing.set(Standing::InUse);
    }
    for &slot in &slots[30..40] {
        cache.toy(slot).standing.set(Standing::Spent);
    }
    // Those that have expired are met before any other is dropped: all before them are in use.
    (1_000..1_010).for_each(|key| _ = cache.insert(key, 1));
    assert!((40..300).chain(1_000..1_010).all(|key| cache.there.borrow().contains_key(&key)));
    (1_010..1_500).for_each(|key| _ = cache.insert(key, 1));
    assert!((0..30).all(|key| cache.there.borrow().contains_key(&key)), "nothing in use has gone");
    assert_eq!((cache.len(), cache.policy.weight()), (300, 300));
    // When nothing may go, nothing does, and nobody waits.
    cache.there.borrow().values().for_each(|&slot| cache.toy(slot).standing.set(Standing::InUse));
    cache.insert(2_000, 1);
    assert_eq!(cache.len(), 301);
    cache.there.borrow().values().for_each(|&slot| cache.toy(slot).standing.set(Standing::Free));
    cache.make_room(0, 0);
    assert_eq!(cache.len(), 300);
    cache.audit();
}

#[test]
fn elements_of_what_has_gone_do_not_pile_up() {
    let cache = ToyCache::new(1_000, 1, 50_000);
    for key in 0..50_000 {
        cache.insert(key, 1);
        cache.remove(key);
    }
    let part = &cache.policy.parts[0];
    let elements = part.small.len(&pin()) + part.main.len(&pin());
    assert!(elements <= 2 * (2 + LEAST_CROWD), "{elements} elements of an empty cache");
}

#[test]
fn tidying_takes_what_has_gone_and_keeps_the_order() {
    let cache = ToyCache::new(2_000, 1, 2_000);
    (0..2_000).for_each(|key| _ = cache.insert(key, 1));
    (0..2_000).filter(|key| key % 10 != 0).for_each(|key| assert!(cache.remove(key)));
    let mut tidying = Tidying::default();
    while cache.policy.tidy(&cache, &mut tidying, &pin()) {}
    let part = &cache.policy.parts[0];
    let main: Vec<u32> = std::iter::from_fn(|| part.main.pop(&pin())).map(|item| Item(item).hash()).collect();
    let elements = main.len() + part.small.len(&pin());
    assert!(elements <= 200 + 5 * LEAST_CROWD / 4, "{elements} elements of 200 slots");
    assert!(main.is_sorted(), "in the order in which they came");
}

#[test]
fn a_new_capacity_keeps_the_proportion() {
    let policy = Policy::new(1_000, 1);
    policy.target.store(300, Ordering::Relaxed);
    policy.set_capacity(10_000);
    assert_eq!((policy.capacity(), policy.target()), (10_000, 3_000));
    policy.set_capacity(0);
    assert!(policy.is_bounded() && policy.target() == 1);
    policy.set_capacity(UNBOUNDED);
    assert!(!policy.is_bounded());
    policy.set_capacity(500);
    assert!((1..=450).contains(&policy.target()));
}

#[test]
fn the_sketch_counts_and_fades() {
    let sketch = Sketch::new(1_000);
    let often = spread(1);
    (0..20).for_each(|_| sketch.count(often));
    assert_eq!(sketch.estimate(often), 15, "a counter ends at its largest value");
    let rare: u64 = (2..102).map(|key| sketch.estimate(spread(key))).sum();
    assert!(rare <= 15, "{rare} for a hundred keys that were never counted");
    (0..2_000).for_each(|nth| sketch.fade(nth));
    assert!((3..=7).contains(&sketch.estimate(often)), "{}", sketch.estimate(often));
}

#[test]
fn the_ghost_remembers_the_latest() {
    let ghost = Ghost::new(1_024);
    let trace = |key: u32| Trace {
        from: if key.is_multiple_of(2) { Place::Small } else { Place::Main },
        stamp: key as u16,
    };
    (1..=3_000).for_each(|key| ghost.remember(spread(key), trace(key)));
    let found = |keys: std::ops::RangeInclusive<u32>| {
        keys.filter(|&key| ghost.take(spread(key)) == Some(trace(key))).count()
    };
    assert!(found(2_500..=3_000) > 480);
    assert!(found(1..=1_000) < 50);
    assert_eq!(found(2_500..=3_000), 0, "a trace is taken once");
}
