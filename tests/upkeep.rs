//! What happens by itself: the keeper's sweep of a cache that nobody touches.
//!
//!     cargo test --test upkeep

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "tests use real threads and real time"
)]

use quell::{Cache, Clock, Rejected, RemovalCause};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Long enough for any machine; no test waits for it unless it fails.
const PATIENCE: Duration = Duration::from_secs(60);

type Told = (u32, RemovalCause, Option<String>);

fn told() -> (Receiver<Told>, impl Fn(&u32, &u32, RemovalCause) + Send + Sync + 'static) {
    let (tell, told) = channel();
    let listener = move |key: &u32, _: &u32, cause| {
        let _ = tell.send((*key, cause, thread::current().name().map(str::to_owned)));
    };
    (told, listener)
}

#[test]
fn what_has_expired_goes_by_itself() {
    let (told, listener) = told();
    let cache = Cache::builder()
        .name("rows")
        .time_to_live(Duration::from_millis(20))
        .eviction_listener(listener)
        .build();
    cache.insert(1, 1);
    let (key, cause, thread) = told.recv_timeout(PATIENCE).expect("the keeper sweeps");
    assert_eq!((key, cause, thread.as_deref()), (1, RemovalCause::Expired, Some("quell-rows")));
    assert_eq!((cache.len(), cache.stats().evictions.expired), (0, 1));
}

#[test]
fn what_has_been_idle_goes_by_itself() {
    let (told, listener) = told();
    let cache = Cache::builder().time_to_idle(Duration::from_millis(20)).eviction_listener(listener).build();
    cache.get_with(&7, || 7);
    assert_eq!(
        told.recv_timeout(PATIENCE).map(|(key, cause, _)| (key, cause)),
        Ok((7, RemovalCause::Expired))
    );
}

#[test]
fn a_ttl_of_one_entry_is_enough() {
    let (told, listener) = told();
    let cache = Cache::builder().eviction_listener(listener).build();
    cache.insert(1, 1);
    cache.insert_with_ttl(2, 2, Duration::from_millis(20));
    assert_eq!(
        told.recv_timeout(PATIENCE).map(|(key, cause, _)| (key, cause)),
        Ok((2, RemovalCause::Expired))
    );
    assert_eq!(cache.get(&1), Some(1));
}

/// A walk takes many slices, and the table grows under it.
#[test]
fn many_entries_go() {
    let cache = Cache::builder().time_to_live(Duration::from_millis(50)).shards(4).build();
    let (told, listener) = told();
    let witness =
        Cache::builder().time_to_live(Duration::from_millis(50)).eviction_listener(listener).build();
    (0..50_000_u32).for_each(|key| cache.insert(key, key));
    let goes_on = || {
        witness.insert(0, 0);
        told.recv_timeout(PATIENCE).is_ok()
    };
    let rounds = (0..600).take_while(|_| !cache.is_empty() && goes_on()).count();
    assert!(cache.is_empty(), "{} entries are left after {rounds} sweeps of another cache", cache.len());
}

#[test]
fn an_executor_of_the_users_keeps_it_off() {
    let named = |cache: &Cache<u32, u32>| {
        cache.insert(1, 1);
        cache.name().to_owned()
    };
    let refuse = |job| {
        drop(job);
        Err(Rejected)
    };
    let cache = Cache::builder().name("own").time_to_live(Duration::from_millis(1)).executor(refuse).build();
    assert_eq!(named(&cache), "own");
    assert!(!thread_names().iter().any(|name| name == "quell-own"), "{:?}", thread_names());
    let kept = Cache::builder().name("kept").time_to_live(Duration::from_secs(600)).build();
    assert_eq!(named(&kept), "kept");
    if cfg!(target_os = "linux") {
        let is_there = || thread_names().iter().any(|name| name == "quell-kept");
        // A thread takes its name when it first runs.
        assert!(
            (0..10_000).any(|_| is_there() || {
                thread::yield_now();
                false
            }),
            "{:?}",
            thread_names()
        );
        drop(kept);
        assert!(
            (0..100_000).any(|_| !is_there() || {
                thread::yield_now();
                false
            }),
            "it ends with its cache"
        );
    }
}

/// The names of this process's threads, where the system tells them.
fn thread_names() -> Vec<String> {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return Vec::new() };
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    tasks.flatten().filter_map(name).map(|name| name.trim().to_owned()).collect()
}

/// A clock that panics once, on the keeper's own thread.
struct Faulty(Instant, AtomicUsize);

impl Clock for Faulty {
    fn now(&self) -> Duration {
        let by_keeper = thread::current().name() == Some("quell-faulty");
        assert!(!by_keeper || self.1.fetch_add(1, Ordering::Relaxed) != 1, "the clock has a fault");
        self.0.elapsed()
    }
}

#[test]
fn a_panic_of_the_clock_costs_one_sweep() {
    let (told, listener) = told();
    let clock = Faulty(Instant::now(), AtomicUsize::new(0));
    let builder = Cache::builder().name("faulty").clock(clock).time_to_live(Duration::from_millis(20));
    let cache = builder.eviction_listener(listener).build();
    for key in 0..2 {
        cache.insert(key, key);
        assert_eq!(told.recv_timeout(PATIENCE).map(|(key, ..)| key), Ok(key));
    }
}
