//! The async front on tokio's runtimes, as they come and go.
//!
//! ```text
//! cargo test --features tokio --test runtimes
//! ```
#![cfg(feature = "tokio")]
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::{Tally, eventually, ms, secs};
use quell::{BoxFuture, Cache, LoadErrorKind, ManualClock, Rejected};
use std::future::pending;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::thread;
use tokio::runtime::{Builder, Runtime};

type Error = std::io::Error;

fn poll<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn workers() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

#[test]
fn a_wait_outlives_the_runtime_that_it_began_under() {
    let cache = Cache::<u32, u32>::builder().wait_timeout(ms(50)).build();
    let mut leader = Box::pin(cache.get_with_async(&1, pending()));
    assert!(poll(leader.as_mut()).is_pending());
    let mut follower = Box::pin(cache.try_get_with_async(&1, async { Ok::<_, Error>(1) }));
    let first = current_thread();
    first.block_on(async { assert!(poll(follower.as_mut()).is_pending()) });
    drop(first);
    let got = current_thread().block_on(follower);
    assert_eq!(got.unwrap_err().kind(), LoadErrorKind::TimedOut);
}

#[test]
fn a_thread_polls_what_its_spawner_has_refused() {
    let runtime = workers();
    let _under = runtime.enter();
    let cache = Cache::<u32, u32>::builder()
        .lease(ms(500))
        .spawner(|_: BoxFuture| Err(Rejected))
        .async_loader(|key: &u32| {
            let key = *key;
            async move { Ok::<_, Error>(key) }
        })
        .build();
    assert_eq!(cache.get_or_load(&1).map_err(|e| e.kind()), Ok(1));
}

#[test]
fn a_thread_does_not_wait_for_a_load_whose_runtime_has_gone() {
    let runtime = workers();
    let cache = Cache::<u32, u32>::builder().clock(ManualClock::new()).build();
    let theirs = cache.clone();
    let leader = runtime.spawn(async move { theirs.get_with_async(&1, pending()).await });
    eventually(|| !cache.in_flight().is_empty());
    thread::scope(|s| {
        let follower = s.spawn(|| cache.get_with(&1, || 7));
        eventually(|| cache.in_flight().iter().any(|f| f.waiters == 1));
        runtime.shutdown_background();
        eventually(|| leader.is_finished() && follower.is_finished());
        assert_eq!((follower.join().unwrap(), cache.stats().takeovers), (7, 0));
    });
}

#[test]
fn a_runtime_without_timers() {
    let cache = Cache::<u32, u32>::builder().wait_timeout(ms(20)).build();
    let mut leader = Box::pin(cache.get_with_async(&1, pending()));
    assert!(poll(leader.as_mut()).is_pending());
    let got = Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(cache.try_get_with_async(&1, async { Ok::<_, Error>(1) }));
    assert_eq!(got.unwrap_err().kind(), LoadErrorKind::TimedOut);
}

#[test]
fn aborted_leaders_leave_nothing() {
    let runtime = workers();
    let cache = Cache::<u32, u32>::new(10);
    let dropped = Tally::default();
    struct Count(Tally);
    impl Drop for Count {
        fn drop(&mut self) {
            self.0.add();
        }
    }
    for round in 0..100 {
        let (theirs, witness) = (cache.clone(), Count(dropped.clone()));
        let leader = runtime.spawn(async move {
            let load = async move {
                let _witness = witness;
                pending::<u32>().await
            };
            theirs.get_with_async(&1, load).await
        });
        if round % 2 == 0 {
            eventually(|| !cache.in_flight().is_empty());
        }
        leader.abort();
        eventually(|| dropped.get() == round + 1 && cache.in_flight().is_empty());
    }
    eventually(|| runtime.metrics().num_alive_tasks() == 0);
    drop(cache);
}

#[test]
fn a_cycle_across_tasks_is_told() {
    let runtime = workers();
    let cache = Cache::<u32, u32>::new(10);
    fn load(
        cache: Cache<u32, u32>,
        key: u32,
        other: u32,
    ) -> Pin<Box<dyn Future<Output = Result<u32, quell::LoadError>> + Send>> {
        Box::pin(async move {
            let inner = cache.clone();
            cache
                .try_get_with_async(&key, async move {
                    tokio::time::sleep(ms(30)).await;
                    load(inner, other, key).await
                })
                .await
        })
    }
    let (a, b) = (runtime.spawn(load(cache.clone(), 1, 2)), runtime.spawn(load(cache.clone(), 2, 1)));
    let got = runtime.block_on(async {
        tokio::time::timeout(secs(8), async { (a.await.unwrap(), b.await.unwrap()) }).await
    });
    let (a, b) = got.expect("it hangs");
    assert!(a.is_err() && b.is_err(), "{a:?} {b:?}");
}
