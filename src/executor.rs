//! Background work: the port, and the keeper that serves it when no executor is given.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};
use std::time::Duration;

use crate::primitive::basket::Basket;
use crate::primitive::caught;
use crate::primitive::plain::{AtomicBool, AtomicUsize, Ordering, fence};

/// One piece of background work: a refresh. Running it calls the loader; dropping it unrun is legal, costs that one
/// refresh, and leaves nothing behind.
#[must_use]
pub struct Job(Box<dyn FnOnce() + Send + 'static>);

impl Job {
    pub(crate) fn new(work: impl FnOnce() + Send + 'static) -> Self {
        Self(Box::new(work))
    }

    /// Does the work. A panic of the loader is caught and counted.
    pub fn run(self) {
        (self.0)();
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Job")
    }
}

/// An executor would not take a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rejected;

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the executor takes no more jobs")
    }
}

impl std::error::Error for Rejected {}

/// Where background refreshes run.
pub trait Executor: Send + Sync + 'static {
    /// Takes a job to run it later, on another thread. It is called on the path of a read, so it must not block.
    ///
    /// # Errors
    /// [`Rejected`] if it takes no more: the cache drops the job, and a later read may offer another one.
    fn execute(&self, job: Job) -> Result<(), Rejected>;
}

impl<F: Fn(Job) -> Result<(), Rejected> + Send + Sync + 'static> Executor for F {
    fn execute(&self, job: Job) -> Result<(), Rejected> {
        self(job)
    }
}

/// What a spawner makes a task of.
pub type BoxFuture = Pin<Box<dyn Future<Output = ()> + Send + 'static>>;

/// What makes a task of a load's future, on a runtime of the user's.
///
/// Without one (and without the feature `tokio`) whoever waits for a load polls it, which needs no runtime.
pub trait Spawner: Send + Sync + 'static {
    /// Makes a task of `future`. It may be dropped unfinished: then those who wait poll the load, and a refresh is given up.
    /// It is called on the path of a read, so it must not block.
    ///
    /// # Errors
    /// [`Rejected`] if it takes no more.
    fn spawn(&self, future: BoxFuture) -> Result<(), Rejected>;
}

impl<F: Fn(BoxFuture) -> Result<(), Rejected> + Send + Sync + 'static> Spawner for F {
    fn spawn(&self, future: BoxFuture) -> Result<(), Rejected> {
        self(future)
    }
}

/// Threads of one cache's keeper, while none of them hangs.
const WORKERS: usize = 4;
/// And at most, with those that have been started in place of ones that hang.
const MOST_WORKERS: usize = 32;
/// Jobs that may wait for them.
const PLACES: usize = 256;

/// How long the upkeep rests after it has panicked.
const REST_AFTER_PANIC: Duration = Duration::from_secs(1);

/// Runs `work` on so many threads at once, the caller's among them, and waits for all of them. Fewer if no more can be had.
pub(crate) fn crew(threads: usize, work: impl Fn() + Sync) {
    thread::scope(|scope| {
        for _ in 1..threads {
            let builder = thread::Builder::new().name("quell-warm".into());
            if builder.spawn_scoped(scope, &work).is_err() {
                break;
            }
        }
        work();
    });
}

/// A thread of its own, with this name. `false` if none can be had.
pub(crate) fn on_a_thread(name: &str, work: impl FnOnce() + Send + 'static) -> bool {
    // A thread's name holds no NUL.
    let builder = thread::Builder::new().name(name.replace('\0', ""));
    #[allow(clippy::disallowed_methods, reason = "this is the room the ban points to")]
    builder.spawn(work).is_ok()
}

/// One slice of what is to be seen to now and then. Returns how long to rest until the next, `None` if there is no next.
pub(crate) type Upkeep = Box<dyn FnMut() -> Option<Duration> + Send>;

/// A small pool of threads, started when there are jobs for them; and one for the upkeep, started when it is wanted.
pub(crate) struct Keeper(Arc<Pool>);

struct Pool {
    name: String,
    jobs: Basket<Job>,
    /// The upkeep, until its thread takes it.
    upkeep: Basket<Upkeep>,
    upkeeper: OnceLock<Thread>,
    /// Workers that are in a job whose lease has ended.
    hung: AtomicUsize,
    workers: [Worker; MOST_WORKERS],
    closed: AtomicBool,
}

#[derive(Default)]
struct Worker {
    /// Set by whoever starts the worker.
    started: AtomicBool,
    /// Set by the worker before it looks at the jobs for the last time; whoever clears it wakes the worker.
    idle: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Keeper {
    pub(crate) fn new(cache: &str, upkeep: Option<Upkeep>) -> Self {
        let chores = Basket::new(1);
        if let Some(upkeep) = upkeep {
            let _ = chores.put(upkeep);
        }
        // A thread's name holds no NUL.
        let cache = cache.replace('\0', "");
        Self(Arc::new(Pool {
            name: if cache.is_empty() { "quell-keeper".into() } else { format!("quell-{cache}") },
            jobs: Basket::new(PLACES),
            upkeep: chores,
            upkeeper: OnceLock::new(),
            hung: AtomicUsize::new(0),
            workers: Default::default(),
            closed: AtomicBool::new(false),
        }))
    }

    pub(crate) fn depth(&self) -> usize {
        self.0.jobs.len()
    }

    /// Starts the upkeep, if there is one and nobody has. If no thread can be had, it is left undone.
    pub(crate) fn begin_upkeep(&self) {
        let Some(mut upkeep) = self.0.upkeep.take() else { return };
        let pool = self.0.clone();
        let work = move || {
            let _ = pool.upkeeper.set(thread::current());
            // Relaxed: `close` unparks after it has set the flag.
            while !pool.closed.load(Ordering::Relaxed) {
                // The clock is user code: if it panics, there is a next time.
                let Some(rest) = caught(&mut upkeep).unwrap_or(Some(REST_AFTER_PANIC)) else { return };
                #[allow(clippy::disallowed_methods, reason = "this is the room the ban points to")]
                thread::park_timeout(rest);
            }
        };
        #[allow(clippy::disallowed_methods, reason = "this is the room the ban points to")]
        drop(thread::Builder::new().name(self.0.name.clone()).spawn(work));
    }

    /// Sees to it that the upkeep is done soon; begins it, if nobody has. Whoever calls has left something for it to find.
    pub(crate) fn hurry_upkeep(&self) {
        self.begin_upkeep();
        // SeqCst: what was left comes before the look at the thread; pairs with a fence of the upkeep's, before it looks at what
        // was left and after the thread has said who it is: one of the two sees the other.
        fence(Ordering::SeqCst);
        if let Some(thread) = self.0.upkeeper.get() {
            thread.unpark();
        }
    }

    /// A job has outlived its lease: another thread may be started in place of its worker.
    pub(crate) fn one_hangs(&self) {
        // Relaxed: a limit; the next job looks at it.
        self.0.hung.fetch_add(1, Ordering::Relaxed);
    }

    /// That job has come to its end.
    pub(crate) fn one_is_back(&self) {
        // Relaxed: as above.
        self.0.hung.fetch_sub(1, Ordering::Relaxed);
    }

    /// Takes no more jobs, and drops those that wait. Waits for nobody.
    pub(crate) fn close(&self) {
        // SeqCst: comes before the look at the jobs below; pairs with the fence in `execute`: a job that is put after
        // that look is dropped by the one who put it.
        self.0.closed.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        while self.0.jobs.take().is_some() {}
        let workers = self.0.workers.iter().filter_map(|w| w.thread.get());
        for thread in workers.chain(self.0.upkeeper.get()) {
            thread.unpark();
        }
    }
}

impl Executor for Keeper {
    fn execute(&self, job: Job) -> Result<(), Rejected> {
        let pool = &self.0;
        // Relaxed: only spares work; the look after the fence decides.
        if pool.closed.load(Ordering::Relaxed) || pool.jobs.put(job).is_err() {
            return Err(Rejected);
        }
        // SeqCst: orders the put before the looks below, against `close` (the flag before its last look at the jobs) and
        // against a worker (idle before its last look): one of the two sees the other.
        fence(Ordering::SeqCst);
        // Relaxed: the fence orders it.
        if pool.closed.load(Ordering::Relaxed) || !pool.see_to_it() {
            drop(pool.jobs.take());
            return Err(Rejected);
        }
        Ok(())
    }
}

impl Pool {
    /// Sees to it that somebody looks at the jobs. `false` if there is no thread, and none can be started.
    fn see_to_it(self: &Arc<Self>) -> bool {
        // Where all are at work, they look for more when they are done.
        // Relaxed: whether one has been started; nothing is published by it.
        self.wake_one() || self.start_one() || self.workers.iter().any(|w| w.started.load(Ordering::Relaxed))
    }

    fn wake_one(&self) -> bool {
        // Relaxed: the fences order it. The swap makes one waker of several.
        let idle = self
            .workers
            .iter()
            .find(|w| w.idle.load(Ordering::Relaxed) && w.idle.swap(false, Ordering::AcqRel));
        let thread = idle.and_then(|w| w.thread.get());
        thread.map(Thread::unpark).is_some()
    }

    fn start_one(self: &Arc<Self>) -> bool {
        // Relaxed: a limit. The swap makes one starter of several.
        let limit = (WORKERS + self.hung.load(Ordering::Relaxed)).min(MOST_WORKERS);
        let free =
            |w: &Worker| !w.started.load(Ordering::Relaxed) && !w.started.swap(true, Ordering::Relaxed);
        let Some(nth) = self.workers[..limit].iter().position(free) else { return false };
        let pool = self.clone();
        #[allow(clippy::disallowed_methods, reason = "this is the room the ban points to")]
        let spawned = thread::Builder::new().name(self.name.clone()).spawn(move || pool.work(nth));
        if spawned.is_err() {
            // Relaxed: as above.
            self.workers[nth].started.store(false, Ordering::Relaxed);
        }
        spawned.is_ok()
    }

    fn work(self: &Arc<Self>, nth: usize) {
        let me = &self.workers[nth];
        let _ = me.thread.set(thread::current());
        let mut marked_idle = false;
        // Relaxed: `close` unparks after it has set the flag.
        while !self.closed.load(Ordering::Relaxed) {
            if let Some(job) = self.jobs.take() {
                // AcqRel: one of this worker and a waker clears the mark.
                if std::mem::take(&mut marked_idle) && !me.idle.swap(false, Ordering::AcqRel) {
                    // Somebody has chosen this worker for another job: hand that on.
                    let _ = self.see_to_it();
                }
                // A job catches its loader's panic; this is for what comes after it (a destructor, say).
                let _ = caught(|| job.run());
                continue;
            }
            // Relaxed: the fence below orders it.
            if !marked_idle || !me.idle.load(Ordering::Relaxed) {
                marked_idle = true;
                me.idle.store(true, Ordering::Relaxed);
                // SeqCst: idle before the last look at the jobs; pairs with the fence in `execute`.
                fence(Ordering::SeqCst);
                continue;
            }
            #[allow(clippy::disallowed_methods, reason = "this is the room the ban points to")]
            thread::park();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_burst_runs_and_panics_are_survived() {
        let keeper = Keeper::new("test", None);
        let (done, ran) = channel();
        for i in 0..100 {
            let done = done.clone();
            let job = Job::new(move || {
                done.send(thread::current().name().map(str::to_owned)).unwrap();
                assert!(i % 10 != 0, "a loader that panics");
            });
            assert_eq!(keeper.execute(job), Ok(()));
        }
        for _ in 0..100 {
            assert_eq!(ran.recv().unwrap().as_deref(), Some("quell-test"));
        }
        keeper.close();
        assert_eq!(keeper.execute(Job::new(|| ())), Err(Rejected));
    }

    #[test]
    fn a_full_queue_rejects_and_closing_drops_what_waits() {
        let keeper = Keeper::new("", None);
        let (release, gate) = channel::<()>();
        let gate = Arc::new(parking_lot::Mutex::new(gate));
        let (dropped, drops) = channel();
        struct Witness(std::sync::mpsc::Sender<()>);
        impl Drop for Witness {
            fn drop(&mut self) {
                let _ = self.0.send(());
            }
        }
        let mut accepted = 0;
        loop {
            let (gate, witness) = (gate.clone(), Witness(dropped.clone()));
            let job = Job::new(move || {
                let _witness = witness;
                let _ = gate.lock().recv();
            });
            if keeper.execute(job).is_err() {
                break;
            }
            accepted += 1;
        }
        assert!((PLACES..=PLACES + WORKERS).contains(&accepted), "{accepted} jobs");
        keeper.close();
        drop(release);
        // The one that was refused too.
        for _ in 0..=accepted {
            drops.recv().unwrap();
        }
    }
}
