//! The async front where wakers, spawners, clocks and futures misbehave.
//!
//! ```text
//! cargo test --test misbehaviour
//! ```
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::{Tally, ms, plain, quietly, secs};
use quell::{BoxFuture, Cache, Clock, LoadErrorKind, ManualClock, Rejected, Spawner};
use std::future::{pending, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

fn poll<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Runs on a thread of its own; fails if it does not end.
#[track_caller]
fn in_time<R: Send + 'static>(run: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, ended) = mpsc::channel();
    let thread = thread::spawn(move || {
        let r = run();
        let _ = done.send(());
        r
    });
    match ended.recv_timeout(secs(8)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
        _ => thread.join().unwrap(),
    }
}

/// A future that is ready once it is told, and keeps the last waker.
#[derive(Clone, Default)]
struct Signal(Arc<Mutex<(bool, Option<Waker>)>>);

impl Signal {
    fn give(&self) {
        let waker = {
            let mut it = self.0.lock().unwrap();
            it.0 = true;
            it.1.take()
        };
        if let Some(w) = waker {
            w.wake();
        }
    }

    fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut it = self.0.lock().unwrap();
        if it.0 {
            return Poll::Ready(());
        }
        it.1 = Some(cx.waker().clone());
        Poll::Pending
    }

    async fn wait(self) {
        poll_fn(move |cx| self.poll(cx)).await;
    }
}

struct OnDrop<F: FnMut()>(F);
impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// What a task is whose executor is gone: to wake it drops it.
struct DropsTask(Mutex<Option<Boxed<u32>>>);
impl Wake for DropsTask {
    fn wake(self: Arc<Self>) {
        let task = self.0.lock().unwrap().take();
        drop(task);
    }
}

#[test]
fn a_waker_may_drop_its_task() {
    in_time(|| {
        let cache = Cache::<u32, u32>::new(10);
        let signal = Signal::default();
        let go = signal.clone();
        let mut leader = Box::pin(cache.get_with_async(&1, async move {
            go.wait().await;
            7
        }));
        assert!(poll(leader.as_mut()).is_pending());
        let other = cache.clone();
        let follower: Boxed<u32> = Box::pin(async move { other.get_with_async(&1, async { 8 }).await });
        let task = Arc::new(DropsTask(Mutex::new(Some(follower))));
        let waker = Waker::from(task.clone());
        let mut it = task.0.lock().unwrap().take().unwrap();
        assert!(it.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        *task.0.lock().unwrap() = Some(it);
        signal.give();
        assert_eq!(poll(leader.as_mut()), Poll::Ready(7));
        assert!(task.0.lock().unwrap().is_none());
        assert!(cache.in_flight().is_empty());
    });
}

struct Panics;
impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("a waker");
    }
}

#[derive(Default)]
struct Told(AtomicBool);
impl Wake for Told {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn a_waker_that_panics_costs_nobody_else() {
    let cache = Cache::<u32, u32>::new(10);
    let signal = Signal::default();
    let go = signal.clone();
    let mut leader = Box::pin(cache.get_with_async(&1, async move {
        go.wait().await;
        7
    }));
    assert!(poll(leader.as_mut()).is_pending());
    let mut bad = Box::pin(cache.get_with_async(&1, pending()));
    assert!(bad.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::new(Panics)))).is_pending());
    let told = Arc::new(Told::default());
    let mut good = Box::pin(cache.get_with_async(&1, pending()));
    assert!(good.as_mut().poll(&mut Context::from_waker(&Waker::from(told.clone()))).is_pending());
    assert!(quietly(|| signal.give()).is_ok(), "who wakes");
    assert!(told.0.load(Ordering::SeqCst));
    assert_eq!(poll(good.as_mut()), Poll::Ready(7));
    drop(bad);
    assert_eq!(poll(leader.as_mut()), Poll::Ready(7));
}

#[test]
fn a_batch_that_nobody_wants_is_dropped() {
    let cache = Cache::<u32, u32>::new(10);
    let (signal, dropped) = (Signal::default(), Tally::default());
    let (go, count) = (signal.clone(), dropped.clone());
    let load = move |keys: Vec<u32>| async move {
        let _witness = OnDrop(|| _ = count.add());
        go.wait().await;
        Ok::<_, std::io::Error>(keys.into_iter().map(|k| (k, k)))
    };
    let mut call = Box::pin(cache.load_many_async([1, 2], load));
    assert!(poll(call.as_mut()).is_pending());
    drop(call);
    assert!(cache.in_flight().is_empty());
    assert_eq!(dropped.get(), 1, "the batch's future");
    drop(signal);
}

#[test]
fn the_closure_of_a_batch_is_a_part_of_the_load() {
    in_time(|| {
        let cache = Cache::<u32, u32>::builder().clock(ManualClock::new()).build();
        let inner = cache.clone();
        let load = move |_: Vec<u32>| {
            let got = inner.try_get_with(&1, || Ok::<_, std::io::Error>(5)).map_err(|e| e.kind());
            async move {
                assert_eq!(got, Err(LoadErrorKind::Cycle));
                Ok::<_, std::io::Error>([(1, 1)])
            }
        };
        let mut call = Box::pin(cache.load_many_async([1], load));
        assert_eq!(poll(call.as_mut()).map(|r| r.unwrap()[&1]), Poll::Ready(1));
        drop(call);
        // And so is its panic.
        let load = |_: Vec<u32>| -> std::future::Ready<Result<Vec<(u32, u32)>, std::io::Error>> {
            panic!("closure")
        };
        let mut call = Box::pin(cache.load_many_async([2], load));
        quietly(|| poll(call.as_mut())).unwrap_err();
        drop(call);
        let stats = cache.stats();
        assert_eq!((stats.loads, stats.load_failures), (2, 1));
        assert!(cache.in_flight().is_empty());
    });
}

/// A clock of the user's that stands still, and is not moved by hand.
struct Frozen;
impl Clock for Frozen {
    fn now(&self) -> Duration {
        secs(5)
    }
}

#[test]
fn a_task_waits_as_long_as_a_thread_does() {
    in_time(|| {
        let cache = Cache::<u32, u32>::builder().wait_timeout(ms(20)).clock(Frozen).build();
        let mut leader = Box::pin(cache.get_with_async(&1, pending()));
        assert!(poll(leader.as_mut()).is_pending());
        let got = cache.try_get_with(&1, || Ok::<_, std::io::Error>(1));
        assert_eq!(got.unwrap_err().kind(), LoadErrorKind::TimedOut, "a thread");
        let got = smol::block_on(cache.try_get_with_async(&1, async { Ok::<_, std::io::Error>(1) }));
        assert_eq!(got.unwrap_err().kind(), LoadErrorKind::TimedOut, "a task");
    });
}

#[derive(Clone, Default)]
struct Tasks(Arc<Mutex<Vec<BoxFuture>>>);
impl Spawner for Tasks {
    fn spawn(&self, future: BoxFuture) -> Result<(), Rejected> {
        self.0.lock().unwrap().push(future);
        Ok(())
    }
}
impl Tasks {
    fn poll_all(&self) {
        let tasks = std::mem::take(&mut *self.0.lock().unwrap());
        for mut task in tasks {
            if poll(task.as_mut()).is_pending() {
                self.0.lock().unwrap().push(task);
            }
        }
    }
}

#[test]
fn a_task_that_is_never_run_holds_nobody_up_for_longer_than_the_lease() {
    let (clock, tasks) = (ManualClock::new(), Tasks::default());
    let cache =
        Cache::<u32, u32>::builder().lease(secs(10)).clock(clock.clone()).spawner(tasks.clone()).build();
    let mut leader = Box::pin(cache.get_with_async(&1, async { 7 }));
    assert!(poll(leader.as_mut()).is_pending());
    clock.advance(secs(11));
    assert_eq!(poll(leader.as_mut()), Poll::Ready(7));
    drop(leader);
    tasks.poll_all();
    assert!(tasks.0.lock().unwrap().is_empty(), "nothing is left of the task");
}

/// What is given back while its own task polls it is looked after like any other.
#[test]
fn a_leader_that_its_own_load_drops() {
    let tasks = Tasks::default();
    let cache = plain::<u32, u32>().spawner(tasks.clone()).build();
    cache.insert(1, 1);
    let leader: Arc<Mutex<Option<Boxed<u32>>>> = Arc::default();
    let (own, other) = (leader.clone(), cache.clone());
    let load = async move {
        other.set_capacity(0);
        own.lock().unwrap().take();
        pending::<()>().await;
        2
    };
    let inner = cache.clone();
    *leader.lock().unwrap() = Some(Box::pin(async move {
        inner.ask(&1).max_age(Duration::ZERO).load_with_async(load).await.unwrap().value
    }));
    {
        let mut it = leader.lock().unwrap();
        assert!(poll(it.as_mut().unwrap().as_mut()).is_pending());
    }
    tasks.poll_all();
    assert!(tasks.0.lock().unwrap().is_empty());
    assert_eq!((cache.get(&1), cache.in_flight().len()), (None, 0));
    drop(cache);
}

#[test]
fn a_blocking_load_that_nobody_wants_does_not_run() {
    let queue = common::Queue::default();
    let loads = Tally::default();
    let count = loads.clone();
    let cache = plain::<u32, usize>()
        .executor(queue.clone())
        .loader_fn(move |_: &u32| Ok::<_, std::io::Error>(count.add()))
        .build();
    let mut call = Box::pin(cache.get_or_load_async(&1));
    assert!(poll(call.as_mut()).is_pending());
    drop(call);
    assert!(cache.in_flight().is_empty());
    queue.run();
    assert_eq!(loads.get(), 0);
}

#[test]
fn a_batch_whose_future_panics_when_it_is_dropped() {
    struct Bad;
    impl Drop for Bad {
        fn drop(&mut self) {
            panic!("a destructor");
        }
    }
    struct Fut(#[allow(dead_code)] Bad);
    impl Future for Fut {
        type Output = Result<Vec<(u32, u32)>, std::io::Error>;
        fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
            Poll::Ready(Ok(vec![(1, 1), (2, 2)]))
        }
    }
    let cache = Cache::<u32, u32>::new(10);
    let mut call = Box::pin(cache.load_many_async([1, 2], |_| Fut(Bad)));
    let got = quietly(|| poll(call.as_mut()));
    let Ok(Poll::Ready(Ok(got))) = got else { panic!("{got:?}") };
    assert_eq!(got.len(), 2);
}

#[test]
fn a_forgotten_leader_costs_nothing_but_itself() {
    let cache = Cache::<u32, u32>::new(10);
    let signal = Signal::default();
    let go = signal.clone();
    let mut leader = Box::pin(cache.get_with_async(&1, async move {
        go.wait().await;
        7
    }));
    assert!(poll(leader.as_mut()).is_pending());
    std::mem::forget(leader);
    let mut next = pin!(cache.get_with_async(&1, async { 8 }));
    assert!(poll(next.as_mut()).is_pending());
    signal.give();
    assert_eq!(poll(next.as_mut()), Poll::Ready(7));
}
