//! Models of the engine: a key's whole life between two or three threads, as the fronts drive it.
//!
//! Waits have no limit here, so that a lost wake-up is a deadlock, which ends the process.
//!
//! | model | red when |
//! |---|---|
//! | `two_misses_are_one_load` | a flight is settled or closed before its slot CAS; the bell is not rung; `wait` parks without a second look; the outcome is not released |
//! | `an_invalidated_value_does_not_come_back` | either source fence is missing |
//! | `a_retain_meets_a_load`, `an_expire_meets_a_load` | the load is not detached |
//! | `a_write_detaches_a_load` | `mine` is not asked; a write joins the load instead of replacing it |
//! | `a_caller_after_an_invalidate_does_not_join` | a kill leaves the flight in the slot |
//! | `an_abandoned_flight_is_led_by_one_who_waits` | an abandoned flight is not settled, or not rung |
//! | `a_takeover_meets_a_late_publish` | whoever takes over has the slot's room; `mine` is not asked |
//! | `a_late_value_is_given_to_nobody` | a takeover does not settle the old flight |
//! | `a_takeover_wakes_who_waits_for_the_old_flight` | the old flight is not rung |
//! | `a_stale_value_is_refreshed_by_one` | a refresh is claimed without a CAS |
//! | `a_hung_refresh_is_taken_over_by_one` | a stale hit never takes over |
//! | `a_takeover_meets_a_starting_job` | a job does not ask whether it may begin; a takeover does not end the lease |
//! | `a_failure_is_shared` | a failed flight settles nothing |
//! | `an_eviction_meets_an_insert_of_the_same_key` | a weight is not discharged, or twice |
//! | `an_eviction_meets_a_refresh` | a slot that loads is evicted; a load that ends is not counted |
//! | `an_eviction_is_told_once` | what was removed is told by who has lost too |
//! | `a_limit_meets_an_insert`, `a_limit_meets_a_load` | either fence about the capacity is missing |
//! | `a_limit_meets_a_load_that_is_detached` | what is there beside a load does not enter |
//! | `a_limit_of_nothing_meets_an_insert` | whoever stores does not look at the capacity again |
//! | `the_weight_is_never_below_the_truth` | a weight is charged after its CAS, or discharged before |
//! | `one_of_two_callers_probes` | a load begins without leave of the breaker |
//! | `a_charge_that_was_not_used_comes_back` | what was charged for a CAS that fails stays counted |
//!
//! Each cache is [audited](super::audit) when it ends: its weight, its counts, and one element for each slot. The models of
//! the policy alone, which go deeper there, are in `policy::models`; those of the permits to load in [`limits`].

use super::*;
use crate::clock::Clock;
use crate::config::{Breaker, CacheBuilder, Parts};
use crate::error::LoadError;
use crate::flight::models::waited;
use crate::flight::{Outcome, Waited, Waits};
use crate::hash::DefaultHashBuilder;
use crate::primitive::UnsafeCell as Watched;
use crate::primitive::atomic::AtomicU64 as Source;
use crate::primitive::epoch::Participant;
use crate::primitive::epoch::pin;
use crate::primitive::model::{Census, FEW, Pins, Value, both, check, spawn};
use std::sync::Weak;
use std::time::Duration;

mod limits;

const KEY: u8 = 7;

type TestCore = Core<u8, Value, DefaultHashBuilder>;
type TestLease = Lease<u8, Value, DefaultHashBuilder>;
type TestPlace = Place<u8, Value, DefaultHashBuilder>;

/// A clock that a model moves between two steps; not one of loom's words.
#[derive(Clone, Default)]
struct Hand(Arc<AtomicU64>);

impl Hand {
    fn pass(&self, secs: u64) {
        // Relaxed: all threads of a model are one thread of the system.
        self.0.fetch_add(secs, Ordering::Relaxed);
    }
}

impl Clock for Hand {
    fn now(&self) -> Duration {
        // Relaxed: as above.
        Duration::from_secs(self.0.load(Ordering::Relaxed))
    }
}

struct Fixture {
    core: Arc<TestCore>,
    hand: Hand,
    census: Census,
    /// The memory of the source, which only the one who loads may touch.
    source: Arc<Watched<u64>>,
}

impl Clone for Fixture {
    fn clone(&self) -> Self {
        let (core, source) = (self.core.clone(), self.source.clone());
        Self { core, hand: self.hand.clone(), census: self.census.clone(), source }
    }
}

type Builder = CacheBuilder<u8, Value, DefaultHashBuilder>;

impl Fixture {
    fn new() -> Self {
        Self::with(|builder| builder)
    }

    fn with(set: impl FnOnce(Builder) -> Builder) -> Self {
        let builder = set(CacheBuilder::new().shards(1).hasher(DefaultHashBuilder::with_seed(1)));
        let Ok((settings, Parts { hasher, .. })) = builder.check() else { panic!("the settings are good") };
        let hand = Hand::default();
        let time = Time::Given { clock: Arc::new(hand.clone()), by_hand: true };
        let teller = settings.listener.clone().map(|listener| teller(listener, Weak::<TestCore>::new()));
        let core = Arc::new(Core::new(settings, time, hasher, None, None, false, teller));
        Self { core, hand, census: Census::default(), source: Arc::new(Watched::new(0)) }
    }

    fn demand() -> Demand {
        let accept = Some(Accept::default());
        Demand {
            accept,
            may_lead: true,
            backs_off: false,
            is_let_in: false,
            takes_absence: false,
            miss: Start::Now,
            stale: Start::Now,
            waits: Waits::AsThread,
        }
    }

    /// The lease of the first caller.
    fn lead(&self) -> TestLease {
        match self.core.lookup(&KEY, &Self::demand(), &self.core.stay(pin())) {
            Lookup::Lead(lease) => lease,
            _ => panic!("the key has to be led"),
        }
    }

    /// The place of a caller who comes while somebody loads.
    fn join(&self) -> TestPlace {
        match self.core.lookup(&KEY, &Self::demand(), &self.core.stay(pin())) {
            Lookup::Join(place) => place,
            _ => panic!("somebody else loads"),
        }
    }

    fn wait(&self, place: &TestPlace) -> Option<u64> {
        match waited(place.flight(), &self.core.time) {
            Waited::Ended(Outcome::Value(value)) => Some(value.number()),
            _ => None,
        }
    }

    /// Runs the load of a lease and publishes what it says.
    fn load(&self, mut lease: TestLease, number: u64) -> u64 {
        lease.begin();
        source_fence();
        // SAFETY: loom reports a load that runs at the same time before this writes.
        self.source.with_mut(|loads| unsafe { *loads += 1 });
        self.publish(lease, number);
        number
    }

    fn publish(&self, lease: TestLease, number: u64) -> bool {
        let value = self.census.value(number);
        let kept = value.clone();
        lease.publish(Fetched::of(value), &kept) == Published::Done
    }

    /// As the fronts do it: what was found, waited for, or loaded as `number`.
    fn get_with(&self, number: u64) -> u64 {
        loop {
            let ticket = {
                let stay = self.core.stay(pin());
                match self.core.lookup(&KEY, &Self::demand(), &stay) {
                    Lookup::Hit { hit, lease: None } => return hit.cell.value.number(),
                    Lookup::Hit { lease: Some(lease), .. } | Lookup::Lead(lease) => {
                        drop(stay);
                        return self.load(lease, number);
                    }
                    Lookup::Join(ticket) => ticket,
                    Lookup::Absent | Lookup::Refused(_) | Lookup::NotCached => {
                        panic!("this caller never backs off")
                    }
                }
            };
            if let Some(number) = self.wait(&ticket) {
                return number;
            }
        }
    }

    /// What is served to one who may not load.
    fn served(&self) -> Option<(Stage, u64)> {
        let demand = Demand { may_lead: false, ..Self::demand() };
        match self.core.lookup(&KEY, &demand, &self.core.stay(pin())) {
            Lookup::Hit { hit, .. } => Some((hit.stage, hit.cell.value.number())),
            _ => None,
        }
    }

    fn get(&self) -> Option<u64> {
        self.served().map(|(_, number)| number)
    }

    fn insert(&self, number: u64) {
        self.put(KEY, number);
    }

    fn put(&self, key: u8, number: u64) {
        let value = self.census.value(number);
        let new = self.core.weighed(&key, value, Ttl::default());
        self.core.insert(key, new, &self.core.stay(pin()));
    }

    /// Whether a key has a value.
    fn has(&self, key: u8) -> bool {
        self.core.read(&key, self.core.hash(&key), false, &pin()).is_ok()
    }

    fn loads(&self) -> u64 {
        // SAFETY: loom reports a load that runs at the same time before this reads.
        self.source.with(|loads| unsafe { *loads })
    }

    /// Ends the cache, and sees that nothing is left.
    fn end(self) {
        assert_eq!(self.core.stats(&pin()).in_flight, 0, "a flight is left");
        let census = self.census.clone();
        let core = Arc::into_inner(self.core).expect("nobody else has the cache");
        drop(core);
        assert_eq!(census.count(), 0, "values leaked");
    }
}

#[test]
fn two_misses_are_one_load() {
    both("two misses are one load", 3, |pins| {
        pins().adopt();
        let cache = Fixture::new();
        let other = spawn(pins, {
            let cache = cache.clone();
            move || {
                let number = cache.get_with(1);
                assert_eq!(cache.get(), Some(number), "what was shared is stored");
                number
            }
        });
        let mine = cache.get_with(2);
        assert_eq!(cache.get(), Some(mine), "what was shared is stored");
        assert_eq!((cache.loads(), other.join().unwrap()), (1, mine));
        cache.end();
    });
}

/// A caller changes the source and then removes the key; another one loads it meanwhile. Nothing but the two fences
/// orders them where the key is absent.
fn no_stale_value(name: &'static str, remove: fn(&TestCore)) {
    check(name, 3, FEW, move || {
        Participant::lasting().adopt();
        let cache = Fixture::new();
        let source = Arc::new(Source::new(1));
        let loader = spawn(Participant::lasting, {
            let (cache, source) = (cache.clone(), source.clone());
            move || {
                let mut lease = cache.lead();
                lease.begin();
                source_fence();
                // Relaxed: what the engine promises must come from its own fences.
                let number = source.load(Ordering::Relaxed);
                cache.publish(lease, number)
            }
        });
        // Relaxed: as above.
        source.store(2, Ordering::Relaxed);
        remove(&cache.core);
        let published = loader.join().unwrap();
        let last = cache.served();
        assert_ne!(last, Some((Stage::Fresh, 1)), "loaded before the removal, and there after it");
        assert!(published || last.is_none());
        cache.end();
    });
}

#[test]
fn an_invalidated_value_does_not_come_back() {
    no_stale_value("an invalidated value does not come back", |core| {
        core.invalidate(&KEY, &core.stay(pin()))
    });
}

#[test]
fn a_removed_value_does_not_come_back() {
    no_stale_value("a removed value does not come back", |core| drop(core.remove(&KEY, &core.stay(pin()))));
}

#[test]
fn an_expired_value_does_not_come_back() {
    no_stale_value("an expired value does not come back", |core| _ = core.expire(&KEY, &core.stay(pin())));
}

#[test]
fn a_cleared_value_does_not_come_back() {
    no_stale_value("a cleared value does not come back", |core| {
        source_fence();
        core.each_bucket(|shard, at| core.clear_bucket(shard, at, &core.stay(pin())));
    });
}

#[test]
fn a_value_before_one_of_no_time_does_not_come_back() {
    no_stale_value("a value before one of no time does not come back", |core| {
        let value = Census::default().value(3);
        let new = core.weighed(&KEY, value, Ttl { soft: None, hard: Some(Duration::ZERO) });
        core.insert(KEY, new, &core.stay(pin()));
    });
}

#[test]
fn a_value_before_one_in_a_bypass_does_not_come_back() {
    no_stale_value("a value before one in a bypass does not come back", |core| {
        core.set_mode(Mode::Bypass);
        let new = core.weighed(&KEY, Census::default().value(3), Ttl::default());
        core.insert(KEY, new, &core.stay(pin()));
        core.set_mode(Mode::Normal);
    });
}

/// Two callers of two keys, at a breaker that is open and whose pause has passed.
#[test]
fn one_of_two_callers_probes() {
    check("one of two callers probes", 2, FEW, || {
        Participant::lasting().adopt();
        let breaker = Breaker::new(1.0).min_loads(1).pause(Duration::from_secs(1));
        let cache = Fixture::with(|builder| builder.breaker(breaker));
        assert_eq!(cache.lead().fail(LoadError::panicked()), Published::Done);
        cache.hand.pass(1);
        let leads = |cache: &Fixture, key: u8| {
            let demand = Demand { backs_off: true, ..Fixture::demand() };
            match cache.core.lookup(&key, &demand, &cache.core.stay(pin())) {
                Lookup::Lead(lease) => Some(lease),
                Lookup::Refused(_) => None,
                _ => panic!("it leads or is refused"),
            }
        };
        let other = spawn(Participant::lasting, {
            let cache = cache.clone();
            move || leads(&cache, 1)
        });
        let leases = [leads(&cache, 2), other.join().unwrap()];
        assert_eq!(leases.iter().flatten().count(), 1);
        drop(leases);
        cache.end();
    });
}

/// A load of a key that has a value of 1, as a `refresh` begins it.
fn asked(cache: &Fixture) -> TestLease {
    cache.insert(1);
    let demand = Demand { accept: None, ..Fixture::demand() };
    match cache.core.lookup(&KEY, &demand, &cache.core.stay(pin())) {
        Lookup::Lead(lease) => lease,
        _ => panic!("who asks leads"),
    }
}

/// A load of a key that has a value meets a write, while a third caller reads. Gives what was published, what the write
/// said, and what is served at the end.
fn load_meets<R: 'static>(pins: Pins, write: fn(&TestCore) -> R) -> (bool, R, Option<(Stage, u64)>) {
    pins().adopt();
    let cache = Fixture::new();
    let lease = asked(&cache);
    let leader = spawn(pins, {
        let cache = cache.clone();
        move || cache.publish(lease, 2)
    });
    let writer = spawn(pins, {
        let cache = cache.clone();
        move || write(&cache.core)
    });
    assert!(matches!(cache.get(), Some(1 | 2)), "there is a value all the time");
    let (published, said) = (leader.join().unwrap(), writer.join().unwrap());
    let last = cache.served();
    cache.end();
    (published, said, last)
}

#[test]
fn a_retain_meets_a_load() {
    both("a retain meets a load", 3, |pins| {
        let (published, judged, last) = load_meets(pins, |core| {
            let mut judged = Vec::new();
            let mut keep = |_: &u8, value: &Value| {
                judged.push(value.number());
                true
            };
            core.each_bucket(|shard, at| core.retain_bucket(shard, at, &mut keep, &core.stay(pin())));
            judged
        });
        let number = if published { 2 } else { 1 };
        assert_eq!(last, Some((Stage::Fresh, number)));
        assert!(judged.contains(&number), "kept without having been judged");
    });
}

#[test]
fn an_expire_meets_a_load() {
    both("an expire meets a load", 3, |pins| {
        let (published, there, last) = load_meets(pins, |core| core.expire(&KEY, &core.stay(pin())));
        assert!(there);
        assert_eq!(last, Some((Stage::Stale, if published { 2 } else { 1 })));
    });
}

#[test]
fn a_write_detaches_a_load() {
    both("a write detaches a load", 3, |pins| {
        pins().adopt();
        let cache = Fixture::new();
        let lease = cache.lead();
        let ticket = cache.join();
        let leader = spawn(pins, {
            let cache = cache.clone();
            move || cache.publish(lease, 1)
        });
        cache.insert(2);
        assert_eq!(cache.get(), Some(2), "a call made after the write gets the write");
        assert_eq!(cache.wait(&ticket), Some(1), "who joined before gets the flight's value");
        leader.join().unwrap();
        assert_eq!(cache.get(), Some(2), "nothing of the flight is stored");
        assert_eq!(cache.core.values(), 1);
        drop(ticket);
        cache.end();
    });
}

#[test]
fn a_caller_after_an_invalidate_does_not_join() {
    both("a caller after an invalidate does not join", 2, |pins| {
        pins().adopt();
        let cache = Fixture::new();
        let lease = cache.lead();
        let ticket = cache.join();
        let leader = spawn(pins, {
            let cache = cache.clone();
            move || cache.publish(lease, 1)
        });
        cache.core.invalidate(&KEY, &cache.core.stay(pin()));
        assert_eq!(cache.get_with(2), 2, "the flight that began before is not joined");
        assert_eq!(cache.wait(&ticket), Some(1), "who joined before gets the flight's value");
        leader.join().unwrap();
        assert_eq!(cache.get(), Some(2), "nothing of the old flight is stored");
        assert_eq!((cache.core.values(), cache.loads()), (1, 1));
        drop(ticket);
        cache.end();
    });
}

#[test]
fn an_abandoned_flight_is_led_by_one_who_waits() {
    both("an abandoned flight is led by one who waits", 3, |pins| {
        pins().adopt();
        let cache = Fixture::new();
        let lease = cache.lead();
        let leader = spawn(pins, move || drop(lease));
        assert_eq!(cache.get_with(2), 2);
        leader.join().unwrap();
        assert_eq!((cache.loads(), cache.get()), (1, Some(2)));
        cache.end();
    });
}

#[test]
fn a_takeover_meets_a_late_publish() {
    both("a takeover meets a late publish", 2, |pins| {
        pins().adopt();
        let cache = Fixture::with(|builder| builder.lease(Duration::from_secs(1)));
        let lease = cache.lead();
        cache.hand.pass(1);
        let late = spawn(pins, {
            let cache = cache.clone();
            move || cache.publish(lease, 1)
        });
        let other = spawn(pins, {
            let cache = cache.clone();
            move || cache.get_with(2)
        });
        let mine = cache.get_with(3);
        let (theirs, published) = (other.join().unwrap(), late.join().unwrap());
        let taken = u64::from(!published);
        assert_eq!((mine, cache.get()), (theirs, Some(theirs)));
        assert_eq!((cache.loads(), cache.core.stats(&pin()).takeovers), (taken, taken), "one of them loads");
        assert_eq!(published, mine == 1, "the late result goes to its own caller only");
        cache.end();
    });
}

#[test]
fn a_late_value_is_given_to_nobody() {
    both("a late value is given to nobody", 3, |pins| {
        pins().adopt();
        let cache = Fixture::with(|builder| builder.lease(Duration::from_secs(1)));
        let lease = cache.lead();
        let ticket = cache.join();
        cache.hand.pass(1);
        let late = spawn(pins, {
            let cache = cache.clone();
            move || cache.publish(lease, 1)
        });
        let mine = cache.get_with(2);
        let published = late.join().unwrap();
        assert!(published || cache.wait(&ticket).is_none(), "not even to those who waited for it");
        assert_eq!((mine, cache.get()), if published { (1, Some(1)) } else { (2, Some(2)) });
        drop(ticket);
        cache.end();
    });
}

/// Who waits for a flight that is taken over looks again, whether its leader ever comes back or not.
#[test]
fn a_takeover_wakes_who_waits_for_the_old_flight() {
    both("a takeover wakes who waits for the old flight", 2, |pins| {
        pins().adopt();
        let cache = Fixture::with(|builder| builder.lease(Duration::from_secs(1)));
        let hung = cache.lead();
        let ticket = cache.join();
        let waiter = spawn(pins, {
            let cache = cache.clone();
            move || match waited(ticket.flight(), &cache.core.time) {
                Waited::Ended(Outcome::Value(_) | Outcome::Failure(_)) => panic!("nobody has a result"),
                Waited::Ended(Outcome::LookAgain) | Waited::LeaseOver | Waited::TimedOut => cache.get_with(2),
            }
        });
        // The waiter may park before the time passes.
        assert_eq!(cache.get(), None);
        cache.hand.pass(1);
        assert_eq!(cache.get_with(3), waiter.join().unwrap());
        assert_eq!(cache.loads(), 1);
        assert!(!cache.publish(hung, 1), "the late result is refused");
        assert_ne!(cache.get(), Some(1));
        cache.end();
    });
}

fn stale(cache: &Fixture) {
    cache.insert(1);
    cache.hand.pass(1);
}

#[test]
fn a_stale_value_is_refreshed_by_one() {
    both("a stale value is refreshed by one", 3, |pins| {
        pins().adopt();
        let cache = Fixture::with(|builder| builder.soft_ttl(Duration::from_secs(1)));
        stale(&cache);
        let other = spawn(pins, {
            let cache = cache.clone();
            move || cache.get_with(2)
        });
        let both = [cache.get_with(2), other.join().unwrap()];
        assert!(both.contains(&2) && both.iter().all(|n| [1, 2].contains(n)));
        assert_eq!((cache.loads(), cache.get()), (1, Some(2)));
        cache.end();
    });
}

#[test]
fn a_hung_refresh_is_taken_over_by_one() {
    both("a hung refresh is taken over by one", 3, |pins| {
        pins().adopt();
        let lease = Duration::from_secs(1);
        let cache = Fixture::with(|builder| builder.soft_ttl(Duration::from_secs(1)).lease(lease));
        stale(&cache);
        let hung = match cache.core.lookup(&KEY, &Fixture::demand(), &cache.core.stay(pin())) {
            Lookup::Hit { lease: Some(lease), .. } => lease,
            _ => panic!("the refresh has to be led"),
        };
        assert_eq!(cache.get_with(2), 1, "the value is served while the lease lasts");
        cache.hand.pass(1);
        let other = spawn(pins, {
            let cache = cache.clone();
            move || cache.get_with(2)
        });
        let both = [cache.get_with(2), other.join().unwrap()];
        assert!(both.contains(&2), "nobody refreshes any more");
        assert_eq!(cache.loads(), 1);
        assert!(!cache.publish(hung, 3), "the late result is refused");
        assert_eq!(cache.get(), Some(2));
        cache.end();
    });
}

#[test]
fn a_takeover_meets_a_starting_job() {
    both("a takeover meets a starting job", 3, |pins| {
        pins().adopt();
        let cache = Fixture::new();
        let demand = Demand { accept: None, miss: Start::Queued, ..Fixture::demand() };
        let Lookup::Lead(lease) = cache.core.lookup(&KEY, &demand, &cache.core.stay(pin())) else {
            panic!("the refresh has to be led")
        };
        let job = spawn(pins, {
            let cache = cache.clone();
            move || lease.into_queued().begin().map(|lease| cache.load(lease, 1))
        });
        let mine = cache.get_with(2);
        let ran = job.join().unwrap();
        assert_eq!((cache.loads(), cache.get()), (1, Some(mine)));
        assert_eq!(mine, ran.unwrap_or(2));
        cache.end();
    });
}

#[test]
fn a_failure_is_shared() {
    both("a failure is shared", 3, |pins| {
        pins().adopt();
        let cache = Fixture::new();
        let lease = cache.lead();
        let ticket = cache.join();
        let leader = spawn(pins, move || lease.fail(LoadError::failed("no")) == Published::Done);
        let ended = waited(ticket.flight(), &cache.core.time);
        assert!(matches!(ended, Waited::Ended(Outcome::Failure(_))), "one load, as many errors as callers");
        assert_eq!(cache.get(), None);
        assert!(leader.join().unwrap());
        drop(ticket);
        cache.end();
    });
}

/// The orderings of a whole life on a real collector, whose pins fence.
#[test]
fn two_misses_on_real_epochs() {
    let pins: fn(&crossbeam_epoch::Collector) -> Participant = crate::primitive::epoch::register;
    check("two misses on real epochs", 2, FEW, move || {
        let collector = crossbeam_epoch::Collector::new();
        pins(&collector).adopt();
        let theirs = pins(&collector);
        let cache = Fixture::new();
        let other = loom::thread::spawn({
            let cache = cache.clone();
            move || {
                theirs.adopt();
                let number = cache.get_with(1);
                cache.core.invalidate(&KEY, &cache.core.stay(pin()));
                (number, Participant::take_back())
            }
        });
        cache.get_with(2);
        let (_, theirs) = other.join().unwrap();
        drop(theirs);
        drop(Arc::into_inner(cache.core));
        drop(Participant::take_back());
        drop(collector);
        assert_eq!(cache.census.count(), 0, "values leaked");
    });
}

/// A cache for one entry.
fn of_one() -> Fixture {
    Fixture::with(|builder| builder.max_capacity(1))
}

const OTHER: u8 = 8;

/// Drops an entry as whoever needs room does. `false` if nothing may go.
fn evict(cache: &Fixture) -> bool {
    let stay = cache.core.stay(pin());
    cache.core.policy.drop_one(&cache.core.seen(&stay), 0, &stay)
}

#[test]
fn an_eviction_meets_an_insert_of_the_same_key() {
    both("an eviction meets an insert of the same key", 3, |pins| {
        pins().adopt();
        let cache = of_one();
        cache.insert(1);
        let writer = spawn(pins, {
            let cache = cache.clone();
            move || cache.insert(2)
        });
        let evictor = spawn(pins, {
            let cache = cache.clone();
            move || evict(&cache)
        });
        writer.join().unwrap();
        assert!(evictor.join().unwrap(), "there is a value all the time");
        let there = cache.get();
        assert!(matches!(there, None | Some(2)));
        assert_eq!(cache.core.weight(), u64::from(there.is_some()));
        assert_eq!(evict(&cache), there.is_some(), "what is there can be dropped");
        cache.end();
    });
}

#[test]
fn an_eviction_meets_a_refresh() {
    both("an eviction meets a refresh", 3, |pins| {
        pins().adopt();
        let cache = Fixture::with(|builder| builder.max_capacity(1).soft_ttl(Duration::from_secs(1)));
        stale(&cache);
        let refresher = spawn(pins, {
            let cache = cache.clone();
            move || {
                let stay = cache.core.stay(pin());
                let Lookup::Hit { lease: Some(lease), .. } =
                    cache.core.lookup(&KEY, &Fixture::demand(), &stay)
                else {
                    return false;
                };
                drop(stay);
                assert!(cache.publish(lease, 2), "a slot that loads was evicted");
                true
            }
        });
        let evictor = spawn(pins, {
            let cache = cache.clone();
            move || evict(&cache)
        });
        let (refreshed, evicted) = (refresher.join().unwrap(), evictor.join().unwrap());
        assert!(refreshed || evicted);
        assert_eq!(cache.has(KEY), !evicted);
        assert_eq!(evict(&cache), !evicted, "what is there can be dropped");
        cache.end();
    });
}

#[test]
fn an_eviction_is_told_once() {
    both("an eviction is told once", 3, |pins| {
        pins().adopt();
        let told = Arc::new(AtomicU64::new(0));
        let listener = {
            let told = told.clone();
            // Relaxed: a figure; all threads of a model are one thread of the system.
            move |_: &u8, value: &Value, _| _ = told.fetch_add(1 << (8 * value.number()), Ordering::Relaxed)
        };
        let cache = Fixture::with(|builder| builder.max_capacity(1).eviction_listener(listener));
        cache.insert(1);
        let remover = spawn(pins, {
            let cache = cache.clone();
            move || cache.core.remove(&KEY, &cache.core.stay(pin())).map(|value| value.number())
        });
        let evictor = spawn(pins, {
            let cache = cache.clone();
            move || cache.put(OTHER, 2)
        });
        assert!(matches!(remover.join().unwrap(), None | Some(1)));
        evictor.join().unwrap();
        // Relaxed: as above.
        assert_eq!(told.load(Ordering::Relaxed), 1 << 8, "the first value is told, once");
        assert!(cache.has(OTHER) && !cache.has(KEY));
        cache.end();
    });
}

/// A cache gets a limit while another thread stores something. Afterwards it can be dropped.
fn a_limit_meets(name: &'static str, store: fn(&Fixture)) {
    check(name, 3, FEW, move || {
        Participant::lasting().adopt();
        let cache = Fixture::new();
        let writer = spawn(Participant::lasting, {
            let cache = cache.clone();
            move || store(&cache)
        });
        let limiter = spawn(Participant::lasting, {
            let cache = cache.clone();
            move || cache.core.set_capacity(1)
        });
        writer.join().unwrap();
        limiter.join().unwrap();
        assert!(cache.has(KEY));
        cache.end();
    });
}

#[test]
fn a_limit_meets_an_insert() {
    a_limit_meets("a limit meets an insert", |cache| cache.insert(1));
}

#[test]
fn a_limit_meets_a_load() {
    a_limit_meets("a limit meets a load", |cache| _ = cache.get_with(1));
}

#[test]
fn a_limit_meets_a_load_that_is_detached() {
    check("a limit meets a load that is detached", 3, FEW, || {
        Participant::lasting().adopt();
        let cache = Fixture::new();
        let lease = asked(&cache);
        let expirer = spawn(Participant::lasting, {
            let cache = cache.clone();
            move || cache.core.expire(&KEY, &cache.core.stay(pin()))
        });
        let limiter = spawn(Participant::lasting, {
            let cache = cache.clone();
            move || cache.core.set_capacity(1)
        });
        limiter.join().unwrap();
        assert!(expirer.join().unwrap());
        assert!(!cache.publish(lease, 2));
        cache.end();
    });
}

#[test]
fn a_limit_of_nothing_meets_an_insert() {
    check("a limit of nothing meets an insert", 3, FEW, || {
        Participant::lasting().adopt();
        let cache = of_one();
        let writer = spawn(Participant::lasting, {
            let cache = cache.clone();
            move || cache.insert(1)
        });
        let limiter = spawn(Participant::lasting, {
            let cache = cache.clone();
            move || cache.core.set_capacity(0)
        });
        writer.join().unwrap();
        limiter.join().unwrap();
        assert_eq!((cache.core.weight(), cache.has(KEY)), (0, false), "nothing may stay");
        cache.end();
    });
}

/// A value that weighs three is replaced by one of two, and one of four comes, while somebody looks at the sum.
#[test]
fn the_weight_is_never_below_the_truth() {
    check("the weight is never below the truth", 2, FEW, || {
        Participant::lasting().adopt();
        let weigher = |_: &u8, value: &Value| value.number() as u32;
        let cache = Fixture::with(|builder| builder.max_capacity(20).weigher(weigher));
        cache.put(OTHER, 3);
        let writer = spawn(Participant::lasting, {
            let cache = cache.clone();
            move || {
                cache.put(OTHER, 2);
                cache.put(KEY, 4);
            }
        });
        let looker = spawn(Participant::lasting, {
            let cache = cache.clone();
            move || {
                let (core, stay) = (&cache.core, cache.core.stay(pin()));
                let (slot, state) = core.seek(core.hash(&OTHER), &OTHER, &stay).expect("nobody removes it");
                let (counted, truth) = (core.weight(), slot.weight_of(state.held()));
                // What can be taken out was there when the sum was looked at.
                if core.swing(slot, state, Next::Dead, None, &stay).is_ok() {
                    assert!(counted >= truth.into(), "{counted} is counted, and {truth} there");
                }
                // What has not been charged yet would be discharged below zero.
                drop(core.remove(&KEY, &stay));
                // What has been taken out is taken off when the stay ends.
                drop(stay);
                assert!(core.weight() <= 9, "{} is counted", core.weight());
            }
        });
        writer.join().unwrap();
        looker.join().unwrap();
        let there = [KEY, OTHER].map(|key| u64::from(cache.has(key)));
        assert_eq!(cache.core.weight(), 4 * there[0] + 2 * there[1]);
        cache.end();
    });
}

/// Two put a heavier value in the place of the same one: whoever is slower has charged for nothing, and tries again.
#[test]
fn a_charge_that_was_not_used_comes_back() {
    check("a charge that was not used comes back", 2, FEW, || {
        Participant::lasting().adopt();
        let weigher = |_: &u8, value: &Value| value.number() as u32;
        let cache = Fixture::with(|builder| builder.max_capacity(20).weigher(weigher));
        cache.put(OTHER, 1);
        let writers = [3, 6].map(|number| {
            let cache = cache.clone();
            spawn(Participant::lasting, move || cache.put(OTHER, number))
        });
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        assert!(matches!(cache.core.weight(), 3 | 6), "{} is counted", cache.core.weight());
        cache.end();
    });
}
