//! Loom models of the bucket word and of growth: what is linked is found, once; what is freed is read by nobody.
//!
//! How to run them and how to go deeper: [`crate::primitive::model`]. Each model runs under pins that show its kind of
//! mistake: *lasting* ones (no fence, nothing freed) for the orderings, *strict* ones (freed as soon as no older pin is
//! left) for the reclamation, and two under a real epoch. An element is read at each use of its hash, and overwritten
//! when it is freed, so that loom sees every read that is not ordered after its making or not before its end.
//!
//! What turns each model red; `.ci/mutants` applies it:
//!
//! | model | mutation |
//! |---|---|
//! | `insert_insert` | no look before the CAS; Relaxed in `replace` or `load` |
//! | `insert_remove` | a store in place of the CAS of the word |
//! | `insert_remove_strict` | the replaced list is freed at once |
//! | `remove_remove`, `remove_epoch` | the element is freed at once; the loser of an unlink wins too |
//! | `growth_insert` | the new array is published Relaxed; a dropped table does not complete its growth |
//! | `growth_insert_insert` | a frozen word is taken for a live one |
//! | `growth_remove`, with `_strict`, `_epoch` | a frozen word is used without a look at the child |
//! | `slow_mover` | a store in place of the CAS in `thaw` |
//! | `slow_mover_list` | the element is freed at once, which the freezer of its list may be reading |
//! | `begin_begin` | a store in place of the CAS of `next`; `next` is read Relaxed |
//! | `two_growths` | a frozen word is used without a look at the child, two arrays below |
//! | `completion` | the root swings too early, is swung Relaxed, is read Relaxed; `moved` is swung Relaxed |
//! | `completion_overtaken` | `moved` is read Relaxed |
//! | `completion_strict` | the old array is freed at once |
//! | `walk_growth` | the second half of a frozen word is passed over; the high child gets nothing |
//! | `walk_remove_strict` | a frozen word is used without a look at the child |
//!
//! The models with `_list` or `_strict` that are not named run another's body over lists or under strict pins.

use super::*;
use crate::primitive::Witness;
use crate::primitive::epoch::{self, Participant, register};
use crate::primitive::model::{FEW, check};
use crate::primitive::plain;
use crate::primitive::step::told::Steps;
use crossbeam_epoch::Collector;
use loom::thread::{self, JoinHandle};
use std::sync::Arc;

/// An element that is read at each use, and marked when it is freed.
struct Item {
    hash: u64,
    key: u64,
    witness: Witness,
    alive: Arc<plain::AtomicUsize>,
}

impl Item {
    fn read(&self) -> u64 {
        self.witness.used();
        self.key
    }
}

impl Linked for Item {
    fn hash(&self) -> u64 {
        self.read();
        self.hash
    }

    unsafe fn release(this: NonNull<Self>) {
        // SAFETY: the memory is given back at the end of the run only.
        let item = unsafe { this.as_ref() };
        item.witness.ended();
        // Relaxed: a figure.
        item.alive.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: made by `Fixture::item`; the witness allows one release only.
        epoch::give_back(move || drop(unsafe { Box::from_raw(this.as_ptr()) }));
    }
}

/// A hash by its first three bits.
const fn at(bits: u64) -> u64 {
    bits << 61
}

/// A table that grows only when a model says so.
struct Fixture {
    table: Table<Item>,
    alive: Arc<plain::AtomicUsize>,
}

impl Fixture {
    /// Two buckets with these keys, each with its hash.
    fn new(keys: &[(u64, u64)]) -> Arc<Self> {
        let fixture = Self { table: Table::with_capacity(0), alive: Arc::default() };
        // Relaxed: this model is its only thread yet. Far below zero: no link starts a growth.
        fixture.table.linked.0.store(isize::MIN.cast_unsigned(), Ordering::Relaxed);
        for (key, hash) in keys {
            assert!(fixture.insert(*key, *hash, &epoch::lasting()));
        }
        Arc::new(fixture)
    }

    fn item(&self, key: u64, hash: u64) -> NonNull<Item> {
        // Relaxed: a figure.
        self.alive.fetch_add(1, Ordering::Relaxed);
        let item = Item { hash, key, witness: Witness::new(), alive: self.alive.clone() };
        NonNull::from(Box::leak(Box::new(item)))
    }

    fn insert(&self, key: u64, hash: u64, guard: &Guard) -> bool {
        let new = self.item(key, hash);
        match self.table.link(new, hash, |i| i.key == key, guard) {
            Ok(()) => true,
            Err(there) => {
                there.read();
                // SAFETY: the share stayed ours.
                unsafe { Item::release(new) };
                false
            }
        }
    }

    fn contains(&self, key: u64, hash: u64, guard: &Guard) -> bool {
        self.table.find(hash, |i| i.read() == key, guard).is_some()
    }

    fn remove(&self, key: u64, hash: u64, guard: &Guard) -> bool {
        match self.table.find(hash, |i| i.key == key, guard) {
            Some(item) => self.table.unlink(item, guard),
            None => false,
        }
    }

    fn begin_growth(&self, guard: &Guard) {
        self.table.root(guard).begin_growth();
    }

    fn move_down(&self, bucket: usize, guard: &Guard) {
        let root = self.table.root(guard);
        root.move_down(bucket, root.next(guard), guard);
    }

    /// The keys that a walk meets, each step under a pin of its own.
    fn keys(&self, pins: &Participant, look: impl Fn()) -> Vec<u64> {
        let (mut keys, mut next) = (Vec::new(), Some(0));
        while let Some(prefix) = next {
            look();
            next = self.table.visit(prefix, |i| keys.push(i.read()), &pins.pin());
        }
        keys.sort_unstable();
        keys
    }
}

/// One run of a model: how its threads pin, and what they share.
struct Run {
    collector: Option<Collector>,
    pins: Pins,
    fixture: Arc<Fixture>,
    spawned: Vec<JoinHandle<Participant>>,
    steps: Vec<Steps>,
    main: Participant,
}

#[derive(Clone, Copy)]
enum Pins {
    Lasting,
    Strict,
    Epoch,
}

impl Run {
    fn new(pins: Pins, keys: &[(u64, u64)]) -> Self {
        let collector = matches!(pins, Pins::Epoch).then(Collector::new);
        let main = participant(pins, collector.as_ref());
        Self { collector, pins, fixture: Fixture::new(keys), spawned: Vec::new(), steps: Vec::new(), main }
    }

    fn spawn(&mut self, body: impl FnOnce(&Fixture, &Participant) + 'static) {
        let own = participant(self.pins, self.collector.as_ref());
        let fixture = self.fixture.clone();
        let steps = Steps::new();
        self.steps.push(steps.clone());
        self.spawned.push(thread::spawn(move || {
            steps.tell();
            body(&fixture, &own);
            step();
            drop(fixture);
            own
        }));
    }

    /// Lets what main does next happen between any two steps of the others.
    fn look(&self) {
        self.steps.iter().for_each(Steps::look);
    }

    /// Joins all, requires that exactly `keys` are linked, and that nothing is left when the table is dropped.
    fn finish(self, keys: &[u64]) {
        let own: Vec<_> = self.spawned.into_iter().map(|t| t.join().unwrap()).collect();
        assert_eq!(self.fixture.keys(&self.main, || {}), keys);
        let fixture = Arc::into_inner(self.fixture).expect("all threads have ended");
        drop(fixture.table);
        drop((own, self.main, self.collector));
        epoch::clear();
        // Relaxed: a figure.
        assert_eq!(fixture.alive.load(Ordering::Relaxed), 0, "an element was never freed");
    }
}

fn participant(pins: Pins, collector: Option<&Collector>) -> Participant {
    match (pins, collector) {
        (Pins::Strict, _) => Participant::strict(),
        (Pins::Epoch, Some(collector)) => register(collector),
        _ => Participant::lasting(),
    }
}

/// A flag of the model's own: what was done before it is set is done for whoever sees it.
#[derive(Clone)]
struct Flag(Arc<AtomicUsize>);

impl Flag {
    fn new() -> Self {
        Self(Arc::new(AtomicUsize::new(0)))
    }

    fn set(&self) {
        // Release: all that the setter did; pairs with the Acquire below.
        self.0.store(1, Ordering::Release);
    }

    fn is_set(&self) -> bool {
        // Acquire: pairs with the Release above.
        self.0.load(Ordering::Acquire) == 1
    }
}

/// Two insert one key: one wins, and the other sees the winner's. With `there`, the bucket becomes a list.
fn insert_insert_of(pins: Pins, there: &[(u64, u64)]) {
    let mut run = Run::new(pins, there);
    let wins = Arc::new(plain::AtomicUsize::new(0));
    for _ in 0..2 {
        let wins = wins.clone();
        run.spawn(move |f, own| {
            // Relaxed: a figure.
            wins.fetch_add(usize::from(f.insert(1, at(0), &own.pin())), Ordering::Relaxed);
        });
    }
    let keys: Vec<u64> = [1].into_iter().chain(there.iter().map(|(key, _)| *key)).collect();
    run.finish(&keys);
    assert_eq!(wins.load(Ordering::Relaxed), 1);
}

#[test]
fn insert_insert() {
    check("insert_insert", 3, FEW, || insert_insert_of(Pins::Lasting, &[]));
}

#[test]
fn insert_insert_list() {
    check("insert_insert_list", 3, FEW, || insert_insert_of(Pins::Lasting, &[(2, at(0))]));
}

/// One inserts into a bucket, one removes from it, and main reads what stays: nobody's change is lost.
fn insert_remove_of(pins: Pins) {
    let mut run = Run::new(pins, &[(1, at(0)), (2, at(0))]);
    run.spawn(|f, own| assert!(f.insert(3, at(0), &own.pin())));
    run.spawn(|f, own| {
        assert!(f.remove(1, at(0), &own.pin()));
        assert!(!f.contains(1, at(0), &own.pin()), "a removed element is there");
    });
    run.look();
    assert!(run.fixture.contains(2, at(0), &run.main.pin()), "an element is lost");
    run.finish(&[2, 3]);
}

#[test]
fn insert_remove() {
    check("insert_remove", 2, FEW, || insert_remove_of(Pins::Lasting));
}

#[test]
fn insert_remove_strict() {
    check("insert_remove_strict", 2, FEW, || insert_remove_of(Pins::Strict));
}

/// Two remove one element, while main reads it: one wins, and it is freed once and after the reader.
fn remove_remove_of(pins: Pins) {
    let mut run = Run::new(pins, &[(1, at(0)), (2, at(0))]);
    let wins = Arc::new(plain::AtomicUsize::new(0));
    for _ in 0..2 {
        let wins = wins.clone();
        run.spawn(move |f, own| {
            // Relaxed: a figure.
            wins.fetch_add(usize::from(f.remove(1, at(0), &own.pin())), Ordering::Relaxed);
        });
    }
    let guard = run.main.pin();
    run.look();
    if let Some(item) = run.fixture.table.find(at(0), |i| i.key == 1, &guard) {
        item.read();
    }
    drop(guard);
    run.finish(&[2]);
    assert_eq!(wins.load(Ordering::Relaxed), 1);
}

#[test]
fn remove_remove() {
    check("remove_remove", 2, FEW, || remove_remove_of(Pins::Strict));
}

/// Under a real epoch: one removes and collects, while two read.
#[test]
fn remove_epoch() {
    check("remove_epoch", 2, FEW, || {
        let mut run = Run::new(Pins::Epoch, &[(1, at(0)), (2, at(0))]);
        run.spawn(|f, own| {
            assert!(f.remove(1, at(0), &own.pin()));
            for _ in 0..3 {
                own.flush();
            }
        });
        run.spawn(|f, own| assert!(f.contains(2, at(0), &own.pin()), "an element is lost"));
        let guard = run.main.pin();
        run.look();
        run.fixture.contains(1, at(0), &guard);
        drop(guard);
        run.finish(&[2]);
    });
}

/// One lets the table grow and moves a bucket, one inserts into it, and main reads: what is there is found.
fn growth_insert_of(pins: Pins, there: &[(u64, u64)], bits: u64) {
    let mut run = Run::new(pins, there);
    run.spawn(|f, own| {
        let guard = own.pin();
        f.begin_growth(&guard);
        f.move_down(0, &guard);
    });
    run.spawn(move |f, own| {
        assert!(f.insert(9, at(bits), &own.pin()));
        assert!(f.contains(9, at(bits), &own.pin()), "an element is lost");
    });
    for (key, hash) in there {
        run.look();
        assert!(run.fixture.contains(*key, *hash, &run.main.pin()), "an element is lost");
    }
    let keys: Vec<u64> = there.iter().map(|(key, _)| *key).chain([9]).collect();
    run.finish(&keys);
}

#[test]
fn growth_insert() {
    check("growth_insert", 2, FEW, || growth_insert_of(Pins::Lasting, &[(1, at(0))], 0b010));
}

#[test]
fn growth_insert_list() {
    check("growth_insert_list", 2, FEW, || {
        growth_insert_of(Pins::Lasting, &[(1, at(0b010)), (2, at(0b011))], 0b010)
    });
}

/// One moves a bucket, one removes from it, and main reads it: what is removed stays away, and is not read when it has
/// been freed; what stays is found.
fn growth_remove_of(pins: Pins) {
    let mut run = Run::new(pins, &[(1, at(0b010)), (2, at(0b010))]);
    run.fixture.begin_growth(&epoch::lasting());
    let removed = Flag::new();
    run.spawn(|f, own| f.move_down(0, &own.pin()));
    let set = removed.clone();
    run.spawn(move |f, own| {
        assert!(f.remove(1, at(0b010), &own.pin()));
        set.set();
    });
    run.look();
    let away = removed.is_set();
    let guard = run.main.pin();
    let found = run.fixture.contains(1, at(0b010), &guard);
    assert!(!(found && away), "a removed element came back");
    assert!(run.fixture.contains(2, at(0b010), &guard), "an element is lost");
    drop(guard);
    run.finish(&[2]);
}

#[test]
fn growth_remove() {
    check("growth_remove", 2, FEW, || growth_remove_of(Pins::Lasting));
}

#[test]
fn growth_remove_strict() {
    check("growth_remove_strict", 2, FEW, || growth_remove_of(Pins::Strict));
}

/// Under a real epoch: one moves a bucket, removes from it and collects, while two read.
#[test]
fn growth_remove_epoch() {
    check("growth_remove_epoch", 1, FEW, || {
        let mut run = Run::new(Pins::Epoch, &[(1, at(0)), (2, at(0b010))]);
        run.fixture.begin_growth(&epoch::lasting());
        run.spawn(|f, own| {
            f.move_down(0, &own.pin());
            assert!(f.remove(1, at(0), &own.pin()));
            for _ in 0..3 {
                own.flush();
            }
        });
        run.spawn(|f, own| assert!(f.contains(2, at(0b010), &own.pin()), "an element is lost"));
        run.look();
        run.fixture.contains(1, at(0), &run.main.pin());
        run.finish(&[2]);
    });
}

/// A mover is slow, while another thread moves the same bucket, removes what was in it and inserts a new element of
/// the key: the mover's late step changes nothing.
fn slow_mover_of(pins: Pins, there: &[(u64, u64)]) {
    let mut run = Run::new(pins, there);
    run.fixture.begin_growth(&epoch::lasting());
    run.spawn(|f, own| f.move_down(0, &own.pin()));
    run.spawn(|f, own| {
        f.move_down(0, &own.pin());
        assert!(f.remove(1, at(0), &own.pin()));
        assert!(!f.contains(1, at(0), &own.pin()), "a removed element came back");
        assert!(f.insert(5, at(0), &own.pin()));
        assert!(f.contains(5, at(0), &own.pin()), "an element is lost");
    });
    let keys: Vec<u64> = there.iter().map(|(key, _)| *key).filter(|key| *key != 1).chain([5]).collect();
    run.finish(&keys);
}

#[test]
fn slow_mover() {
    check("slow_mover", 3, FEW, || slow_mover_of(Pins::Lasting, &[(1, at(0))]));
}

#[test]
fn slow_mover_list() {
    check("slow_mover_list", 3, FEW, || slow_mover_of(Pins::Strict, &[(1, at(0)), (2, at(0))]));
}

/// Two insert one key into a bucket that a third moves: one wins.
fn growth_insert_insert_of(pins: Pins) {
    let mut run = Run::new(pins, &[]);
    run.fixture.begin_growth(&epoch::lasting());
    let wins = Arc::new(plain::AtomicUsize::new(0));
    for _ in 0..2 {
        let wins = wins.clone();
        run.spawn(move |f, own| {
            // Relaxed: a figure.
            wins.fetch_add(usize::from(f.insert(1, at(0), &own.pin())), Ordering::Relaxed);
        });
    }
    run.fixture.move_down(0, &run.main.pin());
    run.finish(&[1]);
    assert_eq!(wins.load(Ordering::Relaxed), 1);
}

#[test]
fn growth_insert_insert() {
    check("growth_insert_insert", 2, FEW, || growth_insert_insert_of(Pins::Lasting));
}

/// Two begin a growth at once, move and insert: it begins once, so that both insert into the same array.
#[test]
fn begin_begin() {
    check("begin_begin", 2, FEW, || {
        let mut run = Run::new(Pins::Lasting, &[(1, at(0)), (2, at(0b010))]);
        for key in [3, 4] {
            run.spawn(move |f, own| {
                f.begin_growth(&own.pin());
                f.table.help(&own.pin());
                assert!(f.insert(key, at(0), &own.pin()));
                assert!(f.contains(1, at(0), &own.pin()), "an element is lost");
            });
        }
        run.finish(&[1, 2, 3, 4]);
    });
}

/// One ends a growth, begins the next and moves a bucket again, one removes from it, and main reads by way of whatever
/// array it has met first.
fn two_growths_of(pins: Pins) {
    let mut run = Run::new(pins, &[(1, at(0b001)), (2, at(0b001))]);
    run.fixture.begin_growth(&epoch::lasting());
    for _ in 0..3 {
        run.fixture.table.help(&epoch::lasting());
    }
    let removed = Flag::new();
    run.spawn(|f, own| {
        f.table.help(&own.pin());
        f.begin_growth(&own.pin());
        f.move_down(0, &own.pin());
    });
    let set = removed.clone();
    run.spawn(move |f, own| {
        assert!(f.remove(1, at(0b001), &own.pin()));
        set.set();
    });
    run.steps[0].look();
    let away = removed.is_set();
    let guard = run.main.pin();
    let found = run.fixture.contains(1, at(0b001), &guard);
    assert!(!(found && away), "a removed element came back");
    assert!(run.fixture.contains(2, at(0b001), &guard), "an element is lost");
    drop(guard);
    run.finish(&[2]);
}

#[test]
fn two_growths() {
    check("two_growths", 2, FEW, || two_growths_of(Pins::Lasting));
}

#[test]
fn two_growths_strict() {
    check("two_growths_strict", 2, FEW, || two_growths_of(Pins::Strict));
}

/// The claimers are suspended. Two others see that each bucket moves, and main reads: the root swings when all has moved,
/// for everybody who sees it swung, and the old array is freed after its readers.
fn completion_of(pins: Pins) {
    let mut run = Run::new(pins, &[(1, at(0)), (2, at(0b100))]);
    run.fixture.begin_growth(&epoch::lasting());
    run.fixture.table.root(&epoch::lasting()).claim(2).expect("nobody has claimed yet");
    for _ in 0..2 {
        run.spawn(|f, own| f.table.help(&own.pin()));
    }
    for (key, hash) in [(1, at(0)), (2, at(0b100))] {
        let guard = run.main.pin();
        run.look();
        assert!(run.fixture.contains(key, hash, &guard), "an element is lost");
    }
    run.finish(&[1, 2]);
}

#[test]
fn completion() {
    check("completion", 2, FEW, || completion_of(Pins::Lasting));
}

#[test]
fn completion_strict() {
    check("completion_strict", 2, FEW, || completion_of(Pins::Strict));
}

/// As before, with three who look: whoever is overtaken while he looks swings the root all the same.
#[test]
fn completion_overtaken() {
    check("completion_overtaken", 2, FEW, || {
        let mut run = Run::new(Pins::Lasting, &[(1, at(0)), (2, at(0b100))]);
        run.fixture.begin_growth(&epoch::lasting());
        run.fixture.table.root(&epoch::lasting()).claim(2).expect("nobody has claimed yet");
        for _ in 0..2 {
            // Suspended for ever before it could swing the root.
            run.spawn(|f, own| {
                let guard = own.pin();
                let root = f.table.root(&guard);
                if let Some(next) = root.try_next(&guard) {
                    root.see_moved(1, next, &guard);
                }
            });
        }
        run.spawn(|f, own| f.table.help(&own.pin()));
        run.steps[2].look();
        assert!(run.fixture.contains(1, at(0), &run.main.pin()), "an element is lost");
        run.finish(&[1, 2]);
    });
}

/// One walks, one moves all and swings the root, one inserts: the walk meets each element that was there throughout once.
fn walk_growth_of(pins: Pins) {
    let mut run = Run::new(pins, &[(1, at(0)), (2, at(0b010)), (3, at(0b100))]);
    run.fixture.begin_growth(&epoch::lasting());
    run.fixture.table.root(&epoch::lasting()).claim(2).expect("nobody has claimed yet");
    run.spawn(|f, own| {
        for _ in 0..2 {
            f.table.help(&own.pin());
        }
    });
    run.spawn(|f, own| assert!(f.insert(4, at(0b010), &own.pin())));
    let mut keys = run.fixture.keys(&run.main, || run.steps[0].look());
    keys.retain(|key| *key != 4);
    assert_eq!(keys, [1, 2, 3], "a walk missed an element, or met one twice");
    run.finish(&[1, 2, 3, 4]);
}

#[test]
fn walk_growth() {
    check("walk_growth", 2, FEW, || walk_growth_of(Pins::Lasting));
}

/// One walks, one moves a bucket, one removes from it: the walk reads nothing that has been freed.
fn walk_remove_of(pins: Pins) {
    let mut run = Run::new(pins, &[(1, at(0)), (2, at(0))]);
    run.fixture.begin_growth(&epoch::lasting());
    run.spawn(|f, own| f.move_down(0, &own.pin()));
    run.spawn(|f, own| assert!(f.remove(1, at(0), &own.pin())));
    let keys = run.fixture.keys(&run.main, || run.look());
    assert_eq!(keys.iter().filter(|key| **key == 2).count(), 1, "a walk missed an element, or met one twice");
    run.finish(&[2]);
}

#[test]
fn walk_remove_strict() {
    check("walk_remove_strict", 2, FEW, || walk_remove_of(Pins::Strict));
}
