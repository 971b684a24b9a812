//! What the tests of the async front share: tasks that the test polls, doors at which loads stop, and spawners.

use super::{Builder, Sut, Tally, eventually, over_shapes, quietly, text};
use quell::{BoxFuture, Rejected, Spawner};
use smol::channel::{Receiver, Sender, bounded};
use std::hash::Hash;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

/// So many polls of one task without an end are a busy loop.
const POLLS: usize = 1_000_000;

/// A future that stays where it is.
pub(crate) type Local<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Where loads of tasks stop until the test lets them on.
#[derive(Clone)]
pub(crate) struct Door(Sender<()>, Receiver<()>, Tally);

impl Default for Door {
    fn default() -> Self {
        let (open, opened) = bounded(1);
        Self(open, opened, Tally::default())
    }
}

impl Door {
    pub(crate) fn open(&self) {
        self.0.close();
    }

    pub(crate) async fn pass(&self) {
        self.2.add();
        // Nothing is ever sent.
        let _ = self.1.recv().await;
    }

    /// How many have come to the door.
    pub(crate) fn arrived(&self) -> usize {
        self.2.get()
    }
}

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A task that is polled by the test.
pub(crate) struct Task<'a, T> {
    future: Option<Local<'a, T>>,
    came: Option<T>,
    wakes: Arc<Wakes>,
    seen: usize,
}

impl<'a, T> Task<'a, T> {
    pub(crate) fn new(future: impl Future<Output = T> + 'a) -> Self {
        // To be polled.
        let wakes = Arc::new(Wakes(AtomicUsize::new(1)));
        Self { future: Some(Box::pin(future)), came: None, wakes, seen: 0 }
    }

    /// One that has been polled once, and waits.
    #[track_caller]
    pub(crate) fn waiting(future: impl Future<Output = T> + 'a) -> Self {
        let mut task = Self::new(future);
        assert!(!task.poll(), "it has ended already");
        task
    }

    /// Polls it once. Whether it has ended.
    pub(crate) fn poll(&mut self) -> bool {
        let Some(future) = &mut self.future else { return true };
        self.seen = self.wakes.0.load(Ordering::SeqCst);
        let waker = Waker::from(self.wakes.clone());
        if let Poll::Ready(came) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            (self.future, self.came) = (None, Some(came));
        }
        self.future.is_none()
    }

    /// Gives it another waker, by which it has not been polled yet.
    pub(crate) fn change_waker(&mut self) {
        (self.wakes, self.seen) = (Arc::default(), 0);
    }

    pub(crate) fn is_woken(&self) -> bool {
        self.future.is_some() && self.wakes.0.load(Ordering::SeqCst) > self.seen
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.future.is_none()
    }

    /// Polls it as long as it is woken. Whether it was.
    #[track_caller]
    pub(crate) fn run(&mut self) -> bool {
        let was = self.is_woken();
        for polls in 0.. {
            assert!(polls < POLLS, "it is woken again and again");
            if !self.is_woken() {
                break;
            }
            self.poll();
        }
        was
    }

    /// Polls it when it is woken, until it has ended.
    #[track_caller]
    pub(crate) fn finish(mut self) -> T {
        eventually(|| {
            self.run();
            self.has_ended()
        });
        self.came.take().unwrap()
    }
}

/// Tasks that take turns on this thread.
pub(crate) struct Tasks<'a, T>(pub(crate) Vec<Task<'a, T>>);

impl<'a, T> Tasks<'a, T> {
    /// `n` tasks, of which each has run until it waits.
    #[track_caller]
    pub(crate) fn new<F: Future<Output = T> + 'a>(n: usize, each: impl Fn(usize) -> F) -> Self {
        let mut tasks = Self((0..n).map(|nth| Task::new(each(nth))).collect());
        tasks.settle();
        tasks
    }

    /// Runs until nobody is woken.
    #[track_caller]
    pub(crate) fn settle(&mut self) {
        for laps in 0.. {
            assert!(laps < POLLS, "they wake each other again and again");
            if self.0.iter_mut().filter(|task| task.is_woken()).fold(0, |n, task| n + usize::from(task.run()))
                == 0
            {
                break;
            }
        }
    }

    /// Runs until something has come true.
    #[track_caller]
    pub(crate) fn until(&mut self, mut done: impl FnMut() -> bool) {
        eventually(|| {
            self.settle();
            done()
        });
    }

    /// How many have ended.
    pub(crate) fn ended(&self) -> usize {
        self.0.iter().filter(|task| task.has_ended()).count()
    }

    /// Runs until all have ended, and returns what they came to.
    #[track_caller]
    pub(crate) fn finish(mut self) -> Vec<T> {
        eventually(|| {
            self.settle();
            self.ended() == self.0.len()
        });
        self.0.into_iter().map(|mut task| task.came.take().unwrap()).collect()
    }
}

/// A future that comes to the text of the panic that another one ends with. Its message is not shown.
pub(crate) async fn panics<T>(future: impl Future<Output = T>) -> Result<T, String> {
    let mut future = Box::pin(future);
    std::future::poll_fn(move |cx| match quietly(|| future.as_mut().poll(cx)) {
        Ok(polled) => polled.map(Ok),
        Err(payload) => Poll::Ready(Err(text(&*payload))),
    })
    .await
}

/// Panics without a message.
pub(crate) fn boo<T>(text: &'static str) -> T {
    quietly(|| panic!("{text}")).unwrap_or_else(|payload| std::panic::resume_unwind(payload))
}

/// A spawner whose tasks run on other threads.
pub(crate) fn elsewhere(task: BoxFuture) -> Result<(), Rejected> {
    smol::spawn(task).detach();
    Ok(())
}

/// A spawner that keeps tasks until the test runs them.
#[derive(Clone, Default)]
pub(crate) struct Kept(Arc<Mutex<Vec<BoxFuture>>>);

impl Spawner for Kept {
    fn spawn(&self, task: BoxFuture) -> Result<(), Rejected> {
        self.0.lock().unwrap().push(task);
        Ok(())
    }
}

impl Kept {
    pub(crate) fn take(&self) -> Vec<BoxFuture> {
        std::mem::take(&mut self.0.lock().unwrap())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Runs what waits, and returns how many tasks that were.
    pub(crate) fn run(&self) -> usize {
        self.take().into_iter().map(|task| Task::new(task).finish()).count()
    }
}

/// Runs a body over all shapes, where those who wait poll the load, and where it is a task of its own.
pub(crate) fn over_tasks<K, V>(mut body: impl FnMut(Builder<K, V>))
where
    K: Hash + Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    over_shapes(&mut body);
    over_shapes(|builder| body(builder.spawner(elsewhere)));
}

/// How many wait for loads of a cache.
pub(crate) fn waiting<K, V>(cache: &Sut<K, V>) -> usize
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    cache.in_flight().iter().map(|flight| flight.waiters).sum()
}
