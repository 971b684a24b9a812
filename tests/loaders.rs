//! The attached loaders, of threads and of tasks, and where they run: `cargo test --test loaders`, and with
//! `--features tokio`.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test coordinates its threads with what is at hand"
)]

mod common;

use common::tasks::{Door, Kept, Task, Tasks, boo, over_tasks, panics, waiting};
use common::{
    Builder, Counted, Gate, Queue, Sut, Tally, eventually, ms, over_shapes, plain, secs, until_waiting,
};
use quell::{
    AsyncLoader, BoxError, BoxFuture, Job, LoadCause, LoadContext, LoadErrorKind, Loaded, ManualClock,
    Provenance, Rejected,
};
use smol::block_on;
use smol::future::yield_now;
use std::future::ready;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

type Error = std::io::Error;

fn boom() -> Error {
    Error::other("boom")
}

/// Says what its closure says, one await later.
struct Says<F>(F);

impl<V, F> AsyncLoader<u32, V> for Says<F>
where
    V: Send + Sync + 'static,
    F: Fn(u32, &LoadContext<V>) -> Result<Loaded<V>, BoxError> + Send + Sync + 'static,
{
    async fn load(&self, key: &u32, cx: &LoadContext<V>) -> Result<Loaded<V>, BoxError> {
        yield_now().await;
        (self.0)(*key, cx)
    }
}

fn load<V>(cache: &Sut<u32, V>, key: u32) -> Result<V, quell::LoadError>
where
    V: Clone + Send + Sync + 'static,
{
    block_on(cache.get_or_load_async(&key))
}

// What a loader may be.

#[test]
fn a_trait_with_an_async_fn() {
    struct Squares(Tally);
    impl AsyncLoader<u64, u64> for Squares {
        async fn load(&self, key: &u64, _: &LoadContext<u64>) -> Result<Loaded<u64>, BoxError> {
            self.0.add();
            yield_now().await;
            // The key is there until the end.
            if *key == 0 { Err("no zero".into()) } else { Ok(Loaded::new(key * key)) }
        }
    }
    over_tasks(|builder: Builder<u64, u64>| {
        let loads = Tally::default();
        let cache = builder.async_loader(Squares(loads.clone())).build();
        assert_eq!(block_on(cache.get_or_load_async(&3)).unwrap(), 9);
        assert_eq!(block_on(cache.get_or_load_async(&3)).unwrap(), 9);
        let error = block_on(cache.get_or_load_async(&0)).unwrap_err();
        assert_eq!((error.kind(), loads.get()), (LoadErrorKind::Failed, 2));
        assert!(format!("{:?}", std::error::Error::source(&error)).contains("no zero"));
    });
}

#[test]
fn closures_of_a_key_or_of_a_reference() {
    over_tasks(|builder: Builder<String, usize>| {
        let of_reference = builder.async_loader(|key: &String| ready(key.parse::<usize>())).build();
        assert_eq!(block_on(of_reference.get_or_load_async("12")).unwrap(), 12);
        let error = block_on(of_reference.get_or_load_async("x")).unwrap_err();
        assert!(error.downcast_ref::<std::num::ParseIntError>().is_some());
    });
    over_tasks(|builder: Builder<String, usize>| {
        let of_key = |key: String| async move {
            yield_now().await;
            key.parse::<usize>()
        };
        let cache = builder.async_loader(of_key).build();
        assert_eq!(block_on(cache.get_or_load_async("34")).unwrap(), 34);
        assert!(block_on(cache.get_or_load_async("x")).is_err());
    });
    over_tasks(|builder: Builder<String, usize>| {
        // Nothing tells the argument's type but the builder.
        let cache =
            builder.async_loader_fn(|key| async move { key.len().to_string().parse::<usize>() }).build();
        assert_eq!(block_on(cache.get_or_load_async("abc")).unwrap(), 3);
    });
}

#[test]
fn not_attached() {
    let cache = plain::<u32, u32>().build();
    assert_eq!(load(&cache, 1).unwrap_err().kind(), LoadErrorKind::NotCached);
    assert_eq!(block_on(cache.ask(&1).load_async()).unwrap_err().kind(), LoadErrorKind::NotCached);
    cache.insert(1, 1);
    assert_eq!(load(&cache, 1).unwrap(), 1);
    // What another call loads is not its to wait for.
    let door = Door::default();
    let stop = door.clone();
    let own = Task::waiting(cache.get_with_async(&2, async move {
        stop.pass().await;
        2
    }));
    assert_eq!(load(&cache, 2).unwrap_err().kind(), LoadErrorKind::NotCached);
    door.open();
    assert_eq!((own.finish(), load(&cache, 2).unwrap()), (2, 2));
}

// What it is told, and what it says.

#[test]
fn the_context() {
    type Seen = Arc<Mutex<Vec<(Option<u32>, LoadCause, Duration)>>>;
    for spawns in [false, true] {
        let (clock, queue, kept, seen) =
            (ManualClock::new(), Queue::default(), Kept::default(), Seen::default());
        let notes = seen.clone();
        let loader = Says(move |_, cx: &LoadContext<u32>| {
            let mut notes = notes.lock().unwrap();
            notes.push((cx.previous().copied(), cx.cause(), cx.lease_left()));
            Ok(Loaded::new(notes.len() as u32))
        });
        let builder = plain()
            .soft_ttl(secs(1))
            .time_to_live(secs(10))
            .stale_if_error(secs(100))
            .lease(secs(7))
            .clock(clock.clone())
            .executor(queue.clone());
        let builder = if spawns { builder.spawner(kept.clone()) } else { builder };
        let cache = builder.async_loader(loader).build();
        let run = || queue.run() + kept.run();
        let miss = |previous| (previous, LoadCause::Miss, secs(7));
        let mut call = Tasks::new(1, |_| cache.get_or_load_async(&1));
        call.until(|| run() > 0 || cache.get(&1).is_some());
        assert_eq!(call.finish().pop().unwrap().unwrap(), 1);
        // Stale: served, and refreshed in the background.
        clock.advance(secs(1));
        assert_eq!((load(&cache, 1).unwrap(), run(), cache.get(&1)), (1, 1, Some(2)));
        // Asked for.
        assert!(cache.refresh(&1));
        assert_eq!((run(), cache.get(&1)), (1, Some(3)));
        // In grace: a miss that shows what there was.
        clock.advance(secs(50));
        let mut call = Tasks::new(1, |_| cache.get_or_load_async(&1));
        call.until(|| run() > 0 || cache.get(&1).is_some());
        assert_eq!(call.finish().pop().unwrap().unwrap(), 4);
        let stale = (Some(1), LoadCause::Stale, secs(7));
        let asked = (Some(2), LoadCause::Asked, secs(7));
        assert_eq!(*seen.lock().unwrap(), [miss(None), stale, asked, miss(Some(3))]);
    }
}

#[test]
fn times_of_its_own() {
    over_tasks(|builder: Builder<u32, u32>| {
        let clock = ManualClock::new();
        let loader = Says(|key, _: &LoadContext<u32>| {
            let loaded = Loaded::new(key);
            Ok(match key {
                1 => loaded.ttl(secs(5)),
                2 => loaded.soft_ttl(secs(5)),
                3 => loaded.ttl(Duration::ZERO),
                _ => loaded,
            })
        });
        let cache = builder
            .time_to_live(secs(10))
            .clock(clock.clone())
            .executor(|_: Job| Err(Rejected))
            .async_loader(loader)
            .build();
        for key in 1..=4 {
            assert_eq!(load(&cache, key).unwrap(), key);
        }
        assert_eq!(cache.get(&3), None);
        // The call's own comes before the loader's.
        assert_eq!(block_on(cache.ask(&1).ttl(secs(5)).load_async()).unwrap().value, 1);
        clock.advance(secs(5));
        assert_eq!((cache.get(&1), cache.get(&2), cache.get(&4)), (None, Some(2), Some(4)));
        assert_eq!(cache.ask(&2).get().unwrap().provenance, Provenance::Stale { age: secs(5) });
        assert_eq!(block_on(cache.ask(&1).ttl(secs(1)).load_async()).unwrap().value, 1);
        clock.advance(secs(1));
        assert_eq!(cache.get(&1), None);
    });
}

#[test]
fn not_to_be_stored() {
    over_tasks(|builder: Builder<u32, usize>| {
        let (loads, door) = (Tally::default(), Door::default());
        let (count, stop) = (loads.clone(), door.clone());
        struct Once(Tally, Door);
        impl AsyncLoader<u32, usize> for Once {
            async fn load(&self, _: &u32, _: &LoadContext<usize>) -> Result<Loaded<usize>, BoxError> {
                let nth = self.0.add();
                self.1.pass().await;
                Ok(Loaded::new(nth).do_not_store())
            }
        }
        let cache = builder.async_loader(Once(count, stop)).build();
        let tasks = Tasks::new(5, |_| cache.get_or_load_async(&1));
        assert_eq!(waiting(&cache), 4);
        door.open();
        assert!(tasks.finish().into_iter().all(|value| value.unwrap() == 0));
        assert_eq!((cache.get(&1), cache.len(), load(&cache, 1).unwrap()), (None, 0, 1));
    });
}

#[test]
fn absent_and_not_modified() {
    over_tasks(|builder: Builder<u32, u32>| {
        let loader = Says(|key, cx: &LoadContext<u32>| {
            Ok(match (key, cx.previous()) {
                (1, _) => Loaded::absent(),
                (2, Some(2)) => Loaded::not_modified(),
                (2, None) => Loaded::new(2),
                _ => Loaded::not_modified(),
            })
        });
        let clock = ManualClock::new();
        let cache = builder.time_to_live(secs(1)).clock(clock.clone()).async_loader(loader).build();
        assert_eq!(load(&cache, 1).unwrap_err().kind(), LoadErrorKind::Absent);
        assert_eq!(block_on(cache.ask(&1).load_async()).unwrap_err().kind(), LoadErrorKind::Absent);
        // The entry goes that is absent now.
        cache.insert(1, 1);
        assert!(cache.refresh(&1));
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((cache.get(&1), load(&cache, 2).unwrap()), (None, 2));
        clock.advance(ms(900));
        assert!(cache.refresh(&2));
        eventually(|| cache.in_flight().is_empty());
        clock.advance(ms(900));
        assert_eq!(cache.ask(&2).get().unwrap().provenance, Provenance::Fresh { age: ms(900) });
        // Without a value that was there it is a failure.
        let error = load(&cache, 3).unwrap_err();
        assert_eq!(error.kind(), LoadErrorKind::Failed);
        assert!(std::error::Error::source(&error).unwrap().to_string().contains("not modified"));
    });
}

// Which loader, and where.

#[test]
fn with_both_threads_use_one_and_tasks_the_other() {
    over_tasks(|builder: Builder<u32, &'static str>| {
        let clock = ManualClock::new();
        let cache = builder
            .soft_ttl(secs(1))
            .clock(clock.clone())
            .loader_fn(|_| Ok::<_, Error>("thread"))
            .async_loader_fn(|_| ready(Ok::<_, Error>("task")))
            .build();
        assert_eq!((cache.get_or_load(&1).unwrap(), load(&cache, 2).unwrap()), ("thread", "task"));
        assert_eq!(cache.ask(&3).load().unwrap().value, "thread");
        assert_eq!(block_on(cache.ask(&4).load_async()).unwrap().value, "task");
        // A refresh is made by the one whose call has started it.
        clock.advance(secs(1));
        assert_eq!((load(&cache, 1).unwrap(), cache.get_or_load(&2).unwrap()), ("thread", "task"));
        eventually(|| (cache.peek(&1), cache.peek(&2)) == (Some("task"), Some("thread")));
        assert!(cache.refresh(&1));
        eventually(|| cache.peek(&1) == Some("thread"));
    });
}

#[test]
fn only_an_async_one_serves_threads() {
    over_tasks(|builder: Builder<u32, u32>| {
        let (clock, door) = (ManualClock::new(), Door::default());
        let stop = door.clone();
        let loader = move |key: u32| {
            let stop = stop.clone();
            async move {
                match key {
                    0 => Err(boom()),
                    1 => boo("boom"),
                    2 => {
                        stop.pass().await;
                        Ok(2)
                    }
                    _ => Ok(key),
                }
            }
        };
        let cache = builder.soft_ttl(secs(1)).clock(clock.clone()).async_loader_fn(loader).build();
        assert_eq!((cache.get_or_load(&5).unwrap(), cache.ask(&6).load().unwrap().value), (5, 6));
        assert_eq!(cache.get_or_load(&0).unwrap_err().kind(), LoadErrorKind::Failed);
        assert_eq!(
            common::quietly(|| cache.get_or_load(&1)).unwrap_err().downcast_ref(),
            Some(&"boom".to_owned())
        );
        assert_eq!(cache.stats().loader_panics, 1);
        // Threads and tasks join each other.
        thread::scope(|s| {
            let threads = [(); 3].map(|()| s.spawn(|| cache.get_or_load(&2).unwrap()));
            until_waiting(&cache, 2);
            let task = Task::waiting(cache.get_or_load_async(&2));
            eventually(|| door.arrived() == 1);
            door.open();
            assert_eq!((threads.map(|t| t.join().unwrap()), task.finish().unwrap()), ([2; 3], 2));
        });
        assert!(cache.refresh(&7));
        eventually(|| cache.peek(&7) == Some(7));
        cache.insert(7, 70);
        clock.advance(secs(1));
        assert_eq!(cache.get_or_load(&7).unwrap(), 70);
        eventually(|| cache.peek(&7) == Some(7) && cache.in_flight().is_empty());
    });
}

#[test]
fn a_thread_waits_for_an_async_one_no_longer_than_its_lease() {
    // What the load needs may need this very thread.
    over_tasks(|builder: Builder<u32, u32>| {
        let (clock, alive) = (ManualClock::new(), Tally::default());
        let token = Counted::new(0, &alive);
        let loader = move |_| {
            let token = token.clone();
            async move {
                std::future::pending::<()>().await;
                Ok::<_, Error>(token.0 as u32)
            }
        };
        let cache = builder.lease(secs(1)).clock(clock.clone()).async_loader_fn(loader).build();
        thread::scope(|s| {
            let thread = s.spawn(|| cache.get_or_load(&1));
            eventually(|| cache.in_flight().len() == 1);
            assert!(!thread.is_finished());
            // It parks at some point after it has led.
            eventually(|| {
                clock.advance(secs(1));
                thread.is_finished()
            });
            assert_eq!(thread.join().unwrap().unwrap_err().kind(), LoadErrorKind::TimedOut);
        });
        eventually(|| cache.in_flight().is_empty());
        assert_eq!(cache.get_with(&1, || 5), 5);
    });
}

#[test]
fn a_blocking_one_runs_off_the_task() {
    let (clock, names) = (ManualClock::new(), Arc::new(Mutex::new(Vec::new())));
    let (gate, notes) = (Gate::default(), names.clone());
    let (stop, loader) = (gate.clone(), move |key: &u32| {
        notes.lock().unwrap().push(thread::current().name().map(str::to_owned));
        Ok::<_, Error>(*key)
    });
    let stopping = move |key: &u32| {
        stop.pass();
        loader(key)
    };
    let cache = plain().name("prices").soft_ttl(secs(1)).clock(clock.clone()).loader(stopping).build();
    // The task is not held up.
    let mut tasks = Tasks::new(3, |n| cache.get_or_load_async(&[1, 1, 2][n]));
    eventually(|| gate.arrived() == 2);
    tasks.settle();
    assert_eq!((tasks.ended(), waiting(&cache)), (0, 1));
    gate.open();
    assert_eq!(tasks.finish().into_iter().map(Result::unwrap).collect::<Vec<_>>(), [1, 1, 2]);
    clock.advance(secs(1));
    assert_eq!(load(&cache, 1).unwrap(), 1);
    eventually(|| names.lock().unwrap().len() == 3);
    assert!(names.lock().unwrap().iter().all(|name| name.as_deref() == Some("quell-prices")), "{names:?}");
    eventually(|| cache.in_flight().is_empty());
    assert_eq!(cache.stats().loads, 3);
}

#[test]
fn a_blocking_one_runs_on_a_given_executor_or_in_place() {
    over_tasks(|builder: Builder<u32, u32>| {
        // It may keep the job, refuse it, or drop it unrun.
        let (queue, mode) = (Queue::default(), Tally::default());
        let (jobs, way) = (queue.clone(), mode.clone());
        let executor = move |job: Job| match way.get() {
            0 => quell::Executor::execute(&jobs, job),
            1 => Err(Rejected),
            _ => {
                drop(job);
                Ok(())
            }
        };
        let loads = Tally::default();
        let count = loads.clone();
        let loader = move |key: &u32| {
            count.add();
            if *key == 9 { boo("boom") } else { Ok::<_, Error>(*key) }
        };
        let cache = builder.executor(executor).loader(loader).build();
        let task = Task::waiting(cache.get_or_load_async(&1));
        eventually(|| queue.len() == 1);
        assert_eq!((loads.get(), queue.run(), task.finish().unwrap(), loads.get()), (0, 1, 1, 1));
        // Dropped while it waits: then it runs in place.
        let task = Task::waiting(cache.get_or_load_async(&2));
        eventually(|| queue.len() == 1);
        drop(queue.take());
        assert_eq!(task.finish().unwrap(), 2);
        // A panic there resumes here.
        let task = Task::waiting(panics(cache.get_or_load_async(&9)));
        eventually(|| queue.run() == 1);
        assert_eq!(task.finish().map(drop), Err("boom".to_owned()));
        for key in [3, 4] {
            mode.add();
            assert_eq!(load(&cache, key).unwrap(), key);
            assert_eq!(block_on(panics(cache.get_or_load_async(&9))).map(drop), Err("boom".to_owned()));
        }
        assert_eq!((cache.stats().loader_panics, cache.stats().loads, loads.get()), (3, 7, 7));
        eventually(|| cache.in_flight().is_empty());
        // Nobody wants what the job would load.
        mode.sub();
        mode.sub();
        drop(Task::waiting(cache.get_or_load_async(&5)));
        eventually(|| cache.in_flight().is_empty());
        queue.run();
        assert_eq!(cache.get(&5), None);
    });
}

// Where futures run.

#[test]
fn loads_are_tasks_of_a_given_spawner() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (kept, clock) = (Kept::default(), ManualClock::new());
        let cache = builder
            .soft_ttl(secs(1))
            .clock(clock.clone())
            .spawner(kept.clone())
            .async_loader_fn(|key| ready(Ok::<_, Error>(key)))
            .build();
        // The callers wait; the task loads.
        let mut tasks = Tasks::new(3, |_| cache.get_or_load_async(&1));
        tasks.settle();
        assert_eq!((tasks.ended(), kept.len(), cache.stats().loads), (0, 1, 1));
        assert_eq!((kept.run(), cache.get(&1)), (1, Some(1)));
        assert!(tasks.finish().into_iter().all(|value| value.unwrap() == 1));
        // With a future of its own too, and with many keys as one task.
        let own = Task::waiting(cache.get_with_async(&2, ready(2)));
        let many = |keys: Vec<u32>| ready(Ok::<_, Error>(keys.into_iter().zip(3..)));
        let many = Task::waiting(cache.load_many_async([3], many));
        assert_eq!((kept.len(), kept.run()), (2, 2));
        assert_eq!((own.finish(), many.finish().unwrap()[&3]), (2, 3));
        // Stale: served to all at once, and one task refreshes.
        clock.advance(secs(1));
        for _ in 0..10 {
            assert_eq!(block_on(cache.get_with_async(&2, ready(20))), 2);
            assert_eq!(load(&cache, 1).unwrap(), 1);
        }
        assert_eq!((kept.len(), cache.get(&2), kept.run(), cache.get(&2)), (2, Some(2), 2, Some(20)));
        // A thread's load by an async loader too.
        thread::scope(|s| {
            let thread = s.spawn(|| cache.get_or_load(&4).unwrap());
            eventually(|| kept.run() == 1);
            assert_eq!(thread.join().unwrap(), 4);
        });
    });
}

#[test]
fn a_spawner_that_refuses_or_drops_leaves_loads_to_those_who_wait() {
    for drops in [false, true] {
        over_shapes(|builder: Builder<u32, u32>| {
            let asked = Tally::default();
            let count = asked.clone();
            let spawner = move |task: BoxFuture| {
                count.add();
                drop(task);
                if drops { Ok(()) } else { Err(Rejected) }
            };
            let (clock, door) = (ManualClock::new(), Door::default());
            let stop = door.clone();
            let loader = move |key| {
                let stop = stop.clone();
                async move {
                    stop.pass().await;
                    Ok::<_, Error>(key)
                }
            };
            let cache = builder
                .soft_ttl(secs(1))
                .clock(clock.clone())
                .spawner(spawner)
                .async_loader_fn(loader)
                .build();
            let tasks = Tasks::new(5, |_| cache.get_or_load_async(&1));
            thread::scope(|s| {
                let thread = s.spawn(|| cache.get_or_load(&2).unwrap());
                eventually(|| door.arrived() == 2);
                door.open();
                assert_eq!(thread.join().unwrap(), 2);
            });
            assert!(tasks.finish().into_iter().all(|value| value.unwrap() == 1));
            assert_eq!((asked.get(), cache.stats().loads), (2, 2));
            let many = |keys: Vec<u32>| ready(Ok::<_, Error>(keys.into_iter().map(|key| (key, key))));
            assert_eq!(block_on(cache.load_many_async([7, 8], many)).unwrap().len(), 2);
            // A refresh is given up.
            clock.advance(secs(1));
            assert_eq!((load(&cache, 1).unwrap(), asked.get()), (1, 4));
            eventually(|| cache.in_flight().is_empty());
            assert_eq!((cache.in_flight().len(), cache.stats().refused_refreshes), (0, u64::from(!drops)));
        });
    }
}

#[test]
fn a_task_that_is_dropped_half_way_leaves_the_load_to_those_who_wait() {
    over_shapes(|builder: Builder<u32, u32>| {
        let (kept, door) = (Kept::default(), Door::default());
        let cache = builder.spawner(kept.clone()).build();
        let stop = door.clone();
        let mut callers = Tasks::new(2, |_| {
            let stop = stop.clone();
            cache.get_with_async(&1, async move {
                stop.pass().await;
                1
            })
        });
        let task = Task::waiting(kept.take().pop().unwrap());
        assert_eq!(door.arrived(), 1);
        drop(task);
        callers.settle();
        door.open();
        assert_eq!((callers.finish(), door.arrived(), cache.stats().loads), (vec![1, 1], 1, 1));
    });
}

#[test]
fn stale_hits_refresh_on_the_keeper_or_on_a_spawner() {
    over_tasks(|builder: Builder<u32, usize>| {
        let (clock, door, loads) = (ManualClock::new(), Door::default(), Tally::default());
        let (stop, count) = (door.clone(), loads.clone());
        let loader = move |_: u32| {
            let (nth, stop) = (count.add(), stop.clone());
            async move {
                if nth > 0 {
                    stop.pass().await;
                }
                Ok::<_, Error>(nth)
            }
        };
        let cache = builder.soft_ttl(secs(1)).clock(clock.clone()).async_loader_fn(loader).build();
        assert_eq!(load(&cache, 1).unwrap(), 0);
        clock.advance(secs(1));
        for _ in 0..100 {
            assert_eq!((load(&cache, 1).unwrap(), cache.get_or_load(&1).unwrap()), (0, 0));
        }
        eventually(|| door.arrived() == 1);
        assert_eq!((loads.get(), cache.in_flight().len()), (2, 1));
        door.open();
        eventually(|| cache.get(&1) == Some(1));
        // The last look at the flights is the other thread's.
        eventually(|| cache.in_flight().is_empty());
        assert_eq!((load(&cache, 1).unwrap(), loads.get(), cache.stats().takeovers), (1, 2, 0));
    });
}

#[test]
fn panics_in_the_background_are_counted_and_remembered_for_a_short_time() {
    over_tasks(|builder: Builder<u32, u32>| {
        let (clock, calls) = (ManualClock::new(), Tally::default());
        let count = calls.clone();
        let loader = move |_: u32| {
            let nth = count.add();
            // Before its future, and in it.
            if nth == 0 {
                boo::<()>("boom");
            }
            async move { if nth < 3 { boo("boom") } else { Ok::<_, Error>(nth as u32) } }
        };
        let cache = builder.soft_ttl(secs(1)).clock(clock.clone()).async_loader_fn(loader).build();
        cache.insert(1, 100);
        clock.advance(secs(1));
        for panics in 1..=3 {
            assert_eq!(load(&cache, 1).unwrap(), 100);
            eventually(|| cache.stats().loader_panics == panics && cache.in_flight().is_empty());
            // A hot key does not panic on each read.
            (0..10).for_each(|_| assert_eq!(load(&cache, 1).unwrap(), 100));
            assert!(!cache.refresh(&1));
            assert_eq!(calls.get() as u64, panics);
            clock.advance(ms(100));
        }
        assert_eq!(load(&cache, 1).unwrap(), 100);
        eventually(|| cache.peek(&1) == Some(3));
        assert_eq!(cache.stats().load_failures, 3);
    });
}

#[test]
fn the_cache_is_dropped_with_a_load_in_the_background() {
    over_tasks(|builder: Builder<u32, Counted>| {
        let (clock, door, alive) = (ManualClock::new(), Door::default(), Tally::default());
        let (stop, values) = (door.clone(), alive.clone());
        let (ended, end) = mpsc::channel();
        let loader = move |_: u32| {
            let (stop, values, ended) = (stop.clone(), values.clone(), ended.clone());
            async move {
                stop.pass().await;
                let _ = ended.send(());
                Ok::<_, Error>(Counted::new(1, &values))
            }
        };
        let cache = builder.soft_ttl(secs(1)).clock(clock.clone()).async_loader_fn(loader).build();
        (0..10).for_each(|key| cache.insert(key, Counted::new(0, &alive)));
        clock.advance(secs(1));
        assert_eq!(block_on(cache.get_or_load_async(&1)).unwrap().0, 0);
        eventually(|| door.arrived() == 1);
        drop(cache);
        // The load is not awaited; when it ends, everything goes.
        door.open();
        end.recv().unwrap();
        let other = plain::<u32, u32>().build();
        eventually(|| {
            other.run_pending_tasks();
            alive.get() == 0
        });
    });
}

#[test]
fn the_cache_is_dropped_with_a_load_that_has_not_begun() {
    for spawns in [false, true] {
        let (queue, kept, alive) = (Queue::default(), Kept::default(), Tally::default());
        let loads = Tally::default();
        let (count, values) = (loads.clone(), alive.clone());
        let loader = move |_: u32| {
            count.add();
            ready(Ok::<_, Error>(Counted::new(1, &values)))
        };
        let builder = plain::<u32, Counted>().executor(queue.clone());
        let builder = if spawns { builder.spawner(kept.clone()) } else { builder };
        let cache = builder.async_loader_fn(loader).build();
        (0..10).for_each(|key| cache.insert(key, Counted::new(0, &alive)));
        assert!(cache.refresh(&1) && cache.refresh(&100));
        assert_eq!(queue.len() + kept.len(), 2);
        drop(cache);
        let other = plain::<u32, u32>().build();
        eventually(|| {
            other.run_pending_tasks();
            alive.get() == 0
        });
        // What is left need not run.
        assert_eq!((queue.run() + kept.run(), loads.get()), (2, 0));
    }
}

#[test]
fn a_refresh_that_hangs_yields_to_whoever_comes_after_its_lease() {
    over_tasks(|builder: Builder<u32, usize>| {
        let (clock, loads) = (ManualClock::new(), Tally::default());
        let count = loads.clone();
        let loader = move |_: u32| {
            let nth = count.add();
            async move {
                if nth == 0 {
                    std::future::pending::<()>().await;
                }
                Ok::<_, Error>(nth)
            }
        };
        let cache =
            builder.soft_ttl(secs(1)).lease(secs(5)).clock(clock.clone()).async_loader_fn(loader).build();
        cache.insert(1, 100);
        clock.advance(secs(1));
        assert_eq!(load(&cache, 1).unwrap(), 100);
        eventually(|| loads.get() == 1);
        clock.advance(secs(4));
        assert_eq!((load(&cache, 1).unwrap(), loads.get()), (100, 1));
        // It is taken over, or its thread has just given it up.
        clock.advance(secs(1));
        eventually(|| load(&cache, 1).is_ok() && loads.get() == 2);
        eventually(|| cache.peek(&1) == Some(1));
        assert!(cache.stats().takeovers <= 1);
    });
}

#[cfg(feature = "tokio")]
mod under_tokio {
    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
    }

    fn name() -> Option<String> {
        thread::current().name().map(str::to_owned)
    }

    #[test]
    fn loads_and_refreshes_are_tasks_of_the_runtime() {
        let (clock, loads) = (ManualClock::new(), Tally::default());
        let count = loads.clone();
        let loader = move |_: u32| {
            let nth = count.add();
            async move {
                // Needs the runtime's own timers.
                tokio::time::sleep(ms(1)).await;
                Ok::<_, Error>((nth, tokio::task::try_id().is_some()))
            }
        };
        let cache = plain().soft_ttl(secs(1)).clock(clock.clone()).async_loader_fn(loader).build();
        let runtime = runtime();
        // `block_on` is no task, but the load is.
        runtime.block_on(async {
            assert_eq!(cache.get_or_load_async(&1).await.unwrap(), (0, true));
            clock.advance(secs(1));
            assert_eq!(cache.get_or_load_async(&1).await.unwrap(), (0, true));
            while cache.peek(&1) == Some((0, true)) {
                tokio::task::yield_now().await;
            }
            assert_eq!(cache.get_or_load_async(&1).await.unwrap(), (1, true));
            let in_task = async { tokio::task::try_id().is_some() };
            let own = cache.get_with_async(&2, async { (7, in_task.await) }).await;
            assert_eq!(own, (7, true));
        });
        assert_eq!(loads.get(), 2);
    }

    #[test]
    fn a_blocking_loader_runs_on_the_pool_for_what_blocks() {
        let runtime =
            tokio::runtime::Builder::new_current_thread().thread_name("pool").enable_all().build().unwrap();
        let cache = plain()
            .loader_fn(|key: &u32| if *key == 9 { boo("boom") } else { Ok::<_, Error>(name()) })
            .build();
        runtime.block_on(async {
            assert_eq!(cache.get_or_load_async(&1).await.unwrap().as_deref(), Some("pool"));
            let text = panics(cache.get_or_load_async(&9)).await.map(drop);
            assert_eq!(text, Err("boom".to_owned()));
        });
        // Outside of it, on the keeper.
        assert_eq!(load(&cache, 2).unwrap().as_deref(), Some("quell-keeper"));
    }

    #[test]
    fn a_runtime_that_goes_leaves_the_load_to_those_who_wait_elsewhere() {
        let (first, second) = (runtime(), runtime());
        let (cache, door) = (plain::<u32, u32>().build(), Door::default());
        let (own, stop) = (cache.clone(), door.clone());
        let leader = first.spawn(async move {
            let load = async move {
                stop.pass().await;
                7
            };
            own.get_with_async(&1, load).await
        });
        eventually(|| door.arrived() == 1);
        let own = cache.clone();
        let waiter = second.spawn(async move { own.get_with_async(&1, async { 8 }).await });
        until_waiting(&cache, 1);
        first.shutdown_background();
        assert!(second.block_on(leader).unwrap_err().is_cancelled());
        door.open();
        // By the first load, which they poll, or by another one.
        assert!([7, 8].contains(&second.block_on(waiter).unwrap()));
        eventually(|| cache.in_flight().is_empty());
        assert!(cache.in_flight().is_empty());
    }
}
