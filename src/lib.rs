//! A lock-free, in-process, concurrent cache in which every load of a key happens once.
//!
//! When a popular entry expires, everybody misses at once, and the same query runs hundreds of times. quell ends that
//! inside one process: threads and async tasks that want a key join the one load that is under way (its *flight*), a stale value is
//! served while one caller or one background job refreshes it, a loader that hangs loses its *lease*, and a waiter has
//! a deadline and a declared outcome.
//!
//! - [Quick start](#quick-start)
//! - [What a look-up does](#what-a-look-up-does)
//! - [Async](#async)
//! - [Failure](#failure)
//! - [Freshness](#freshness)
//! - [Eviction](#eviction)
//! - [Consistency](#consistency)
//! - [Progress](#progress)
//! - [Memory](#memory)
//! - [User code](#user-code)
//! - [Limits, and when to use something else](#limits-and-when-to-use-something-else)
//!
//! # Quick start
//! ```
//! use quell::Cache;
//! use std::time::Duration;
//!
//! # fn price_from_the_database(id: &u64) -> Result<u64, std::io::Error> { Ok(100 * id) }
//! # fn main() -> Result<(), quell::LoadError> {
//! let prices = Cache::builder()
//!     .soft_ttl(Duration::from_secs(30))      // fresh for this long, then refreshed in the background
//!     .time_to_live(Duration::from_secs(60))  // served for this long at most
//!     .stale_if_error(Duration::from_secs(600)) // and longer if the database fails
//!     .loader(|id: &u64| price_from_the_database(id))
//!     .build();
//!
//! assert_eq!(prices.get_or_load(&7)?, 700);     // loads
//! assert_eq!(prices.get(&7), Some(700));        // hits: no lock, no shared write
//! prices.invalidate(&7);                        // after a change: nothing older is served from here on
//! # Ok(())
//! # }
//! ```
//! Without an attached loader, pass a closure: [`get_with`](Cache::get_with), [`try_get_with`](Cache::try_get_with),
//! [`optionally_get_with`](Cache::optionally_get_with). Whatever the method, the closure and its error type: one key,
//! one flight.
//!
//! Many keys at once: [`get_many`](Cache::get_many) loads what is missing by the attached loader, and with a
//! [`batch_loader`](CacheBuilder::batch_loader) by one call of it; [`load_many`](Cache::load_many), by one call of a closure.
//! A [`max_batch_delay`](CacheBuilder::max_batch_delay) makes one call of single loads, too, that begin within that time.
//! They share flights with all other calls, key by key.
//!
//! # What a look-up does
//! ```text
//!   get_or_load(key)
//!        │ hash once, pin, bucket word, slot word, deadlines
//!        ├─ fresh ─────────────────────────────► serve
//!        ├─ stale ─────────────────────────────► serve; whoever wins the lease refreshes
//!        ├─ nothing, nobody loads ── one CAS ──► lead: load, publish by one CAS, wake the others
//!        ├─ nothing, somebody loads ───────────► join: park until the value, an error, the lease's end or the deadline
//!        └─ nothing, lease over ───── one CAS ─► take over: lead in place of the one who hangs
//! ```
//! The lease is [30 s unless set](CacheBuilder::lease). Exactly one caller takes over per lease period; the late result of the
//! one who lost the lease goes to its own caller and is not stored.
//!
//! # Async
//! ```
//! # smol::block_on(async {
//! # async fn price_from_the_service(id: u64) -> Result<u64, std::io::Error> { Ok(100 * id) }
//! let prices = quell::Cache::builder()
//!     .async_loader(|id: u64| price_from_the_service(id))
//!     .build();
//! assert_eq!(prices.get_or_load_async(&7).await.unwrap(), 700);
//!
//! let prices = quell::Cache::<u64, u64>::builder().build();
//! assert_eq!(prices.try_get_with_async(&7, price_from_the_service(7)).await.unwrap(), 700);
//! # });
//! ```
//! The methods with the suffix `_async` are the same calls on the same cache: they share flights with each other and with those
//! of threads, and have the same deadlines, leases, errors, cycles and [`Provenance`]. They need no runtime, and work under any.
//!
//! The future of a load belongs to its flight, not to the call that brought it.
//! - Without a spawner, every task that waits for the flight is woken when the future can go on, and one of them polls it. So a
//!   caller that is dropped, or that nobody polls any more, delays nobody, and the load is not begun anew. Each step of the load
//!   wakes all who wait: where crowds wait for loads of many steps, give the cache a [`spawner`](CacheBuilder::spawner).
//! - With a [`spawner`](CacheBuilder::spawner), or with the feature `tokio` under a runtime of tokio's, the load is a task of its
//!   own, and those who wait are woken once, at its end. If that task is refused or dropped, those who wait poll the load.
//! - When the last one who wants the value is gone, the entry is what it was before the load, and then the future is
//!   dropped. Background refreshes are wanted by themselves.
//! - A thread that waits parks. It polls a load's future only if it is its own (an async loader, asked by
//!   [`get_or_load`](Cache::get_or_load)), or if no task waits any more and the future was not made under a runtime
//!   that quell knows of.
//! - A blocking [`loader`](CacheBuilder::loader) that a task asks for runs on a thread for it: of the tokio runtime, with
//!   that feature, else of the [executor](CacheBuilder::executor), which may refuse it; then the task runs it in place.
//!
//! What cannot work: a thread that blocks, in a call without the suffix, the only thread of the runtime which the load needs.
//! That wait ends with its deadline or the lease: [`get_or_load`](Cache::get_or_load) with an async loader reports
//! [`TimedOut`](LoadErrorKind::TimedOut), other calls take over.
//!
//! Deadlines of waiting tasks are kept by the keeper, which looks at the flights every 4 ms while a task waits for one; with
//! the feature `tokio` by the runtime's timer, which it must have enabled. A clock that is moved by hand wakes them itself.
//!
//! Who waits for whom is told by the thread: a call that is polled while a load is polled is taken to wait on that load's behalf.
//! So a load that runs tasks of others itself, in an executor of its own, may have one of them told of a cycle which is none.
//!
//! A hit allocates nothing. A load allocates the flight, its future in a box, and the entry; a task that waits, a place in
//! the flight's list. A call that has been leaked by `mem::forget` still wants its value: its load is not dropped before the
//! cache.
//!
//! # Failure
//! - A failing load with any number of fallible waiters is one load, and one [`LoadError`] for all of them.
//! - Before a fallible call returns an error, it takes the ladder: a value in [grace](CacheBuilder::stale_if_error), the
//!   [`fallback`](CacheBuilder::fallback), the error. `Absent`, `Cycle`, and `NotCached` but in a frozen cache, are told at
//!   once.
//! - A waiter's deadline never causes a load.
//! - A loader's panic resumes in its own caller; the others look again, and one of them leads.
//! - A load that waits for itself, directly or by way of other loads, threads and caches, is reported as a
//!   [`Cycle`](LoadErrorKind::Cycle). What a loader waits for outside quell cannot be seen; the lease ends that.
//! - A refresh in the background that fails, or whose job is refused, dropped or panics, costs that one refresh. After a
//!   failure the next refresh of the key begins 100 ms later at the earliest; a caller who has nothing to serve may
//!   always try. With an [`error_backoff`](CacheBuilder::error_backoff) no load of the key begins before its pause is
//!   over, which grows with each failure, and any success ends.
//! - An absence can be remembered: [`negative_ttl`](CacheBuilder::negative_ttl).
//! - The source can be spared: [`max_concurrent_loads`](CacheBuilder::max_concurrent_loads) and
//!   [`max_waiters`](CacheBuilder::max_waiters) bound what runs and what waits, over all keys; whoever is one too many takes
//!   the ladder at once, and gets [`Overloaded`](LoadErrorKind::Overloaded) at its end.
//! - A source that fails for many keys can be left alone: with a [`breaker`](CacheBuilder::breaker), while it is open, one call
//!   of all keys tries it now and then; the others take the ladder at once, down to [`BackingOff`](LoadErrorKind::BackingOff).
//! - In an outage the cache can be [frozen](Mode::Frozen): whatever is there is served, however old, and no load begins. Where the
//!   cache itself is in doubt it can be [bypassed](Mode::Bypass). See [`set_mode`](Cache::set_mode).
//!
//! What applies to which call:
//!
//! | | `get_with`, `optionally_get_with`, `compute` | `try_get_with`, `load_many`, `get_many`, `get_or_load`, `ask` | refreshes |
//! |---|---|---|---|
//! | `wait_timeout`, `max_waiters`, ladder | no | yes | |
//! | `error_backoff`, `max_concurrent_loads`, `breaker`, `Mode::Frozen` | no | yes | yes |
//! | a remembered absence | `optionally_get_with`: `None` | `get_or_load`, `ask`: `Absent`; `load_many`, `get_many`: left out | |
//!
//! # Freshness
//! | stage | from | to | what happens |
//! |---|---|---|---|
//! | fresh | born | [`soft_ttl`](CacheBuilder::soft_ttl) | served |
//! | stale | soft | [`time_to_live`](CacheBuilder::time_to_live) | served at once; one refresh |
//! | grace | hard | + [`stale_if_error`](CacheBuilder::stale_if_error) | served only when the load fails or the wait ends |
//! | dead | | | as if it were not there |
//!
//! A value is born when it is published, not when its load began. TTLs are upper bounds, up to one tick of the clock: 4 ms for
//! the default one, which reads the kernel's coarse monotonic time. [`jitter`](CacheBuilder::jitter) shortens them at
//! random; [`expire_after`](CacheBuilder::expire_after), [`Loaded`], [`Cache::insert_with_ttl`] and [`Ask`] set them per
//! entry. Serving stale values while one refresh runs is `stale-while-revalidate`, and grace is `stale-if-error`, both of
//! RFC 5861.
//!
//! A popular value need not go stale at all: calls that may load refresh it at random before its soft deadline, the more
//! probably the nearer that is and the longer its loads take, one at a time: XFetch, see
//! [`early_refresh`](CacheBuilder::early_refresh). It is on by default with an attached loader and without a `soft_ttl`.
//!
//! What nobody has asked for yet can be loaded beforehand, several keys at a time and with deadlines that do not end together:
//! [`warm`](Cache::warm), or within one future [`warm_async`](Cache::warm_async); and be kept from going stale by a thread that
//! refreshes it in even steps: [`keep_warm`](Cache::keep_warm), or without naming the keys
//! [`keep_hottest_warm`](Cache::keep_hottest_warm), for as many of the [hottest](Cache::hot_keys) as are to be.
//!
//! # Eviction
//! A [`max_capacity`](CacheBuilder::max_capacity) bounds the number of entries, or with a [`weigher`](CacheBuilder::weigher)
//! their weight, over all shards together: an entry of half the capacity fits, and so do as many entries of weight one as the
//! capacity says. [`set_capacity`](Cache::set_capacity) changes it while the cache is in use.
//!
//! New keys enter a small queue. The oldest slot there moves to the main queue if it is asked for more often than what the
//! main queue would drop, and goes otherwise; a slot of the main queue that has been used since it was looked at goes round
//! again. A sketch counts misses, a ghost remembers the keys that were dropped, and from those that come back the cache learns
//! how long the small queue is to be. A hit notes no more than two bits in its own slot, and only until they are set. Sources:
//! S3-FIFO (Yang and others, SOSP 2023), ARC (Megiddo and Modha, FAST 2003), LIRS (Jiang and Zhang, SIGMETRICS 2002), TinyLFU
//! (Einziger, Friedman and Manes, 2017).
//!
//! - Whoever stores an entry drops what has to go for it, before. So the cache is over its capacity by one entry for each thread
//!   that is storing one just then, at most.
//! - What was loaded or inserted is in the cache afterwards: nothing refuses a new entry for an old one. The exception is an
//!   entry that weighs more than the whole capacity: its callers get it, and it is not stored
//!   ([`Stats::oversized`]).
//! - What has expired goes before anything else where the two are met, and costs no other entry its place.
//! - An entry whose value is being loaded is not dropped. So that something always can be, stale values are refreshed only
//!   while fewer than an eighth of the entries (but at least eight) are; beyond that they are served stale.
//! - A remembered failure of a key that has no value weighs one.
//!
//! An [`eviction_listener`](CacheBuilder::eviction_listener) is told of each value that leaves, once, and of the
//! [cause](RemovalCause): not of a value that is renewed (`expire`, [`Loaded::not_modified`]), of one that was refused, or of
//! those that go with the whole cache. Of what leaves because of something that it does itself it is told when it has
//! returned.
//!
//! # Consistency
//! Writes are linearizable per key with each other and with loads: each is one compare-and-swap of the key's slot. A load
//! that began before an `insert`, `remove`, `invalidate`, `invalidate_all`, `retain`, `expire` or `compute` of the key
//! never overwrites or revives anything, and no call that begins after the write returns gets the older value, nor joins
//! the older load. Those who had joined that load before still get its value: they began before.
//!
//! Not linearizable: `len`, `iter`, `stats` and `in_flight`, which look at one part after the other; and operations over
//! all keys, which handle one bucket after the other.
//!
//! # Progress
//! | method | guarantee |
//! |---|---|
//! | `get`, `read`, `peek`, `contains_key`, `Pinned::get` | lock-free; no retry unless another thread removed or moved the entry just then |
//! | `insert`, `remove`, `invalidate`, `expire`, eviction, growth | lock-free; see below for growth |
//! | `invalidate_all`, `retain`, `iter`, `run_pending_tasks`, `set_capacity` | lock-free, over all buckets, or all entries that have to go |
//! | `get_with` and its kin, on a hit | as `get` |
//! | `get_with` and its kin, on a miss | the leader runs its loader; others wait for it up to the lease and their deadline |
//! | `load_many`, `get_many` | runs its closure, or the loader, for the keys that it leads, then waits for those of others |
//! | `warm` | runs the loader, on a few threads, and waits for loads of others |
//! | `keep_warm`, `keep_hottest_warm` | starts a thread; what that does is what `refresh` does |
//! | `hot_keys` | lock-free, but that two first calls may wait for each other; looks up a thousand entries at most |
//! | `compute` | waits for loads of its key, up to their leases |
//! | the same with `_async` | as above, but that they wait without blocking; a poll may poll the load's future, or run a part of its end |
//! | `refresh`, and stale hits with an attached loader | lock-free, but for starting a thread of the keeper now and then |
//!
//! While a shard's table grows, each write to it moves a few buckets. One write allocates the array of twice the size, and one
//! pin frees the old one: both take time in proportion to the shard, about a millisecond for 100,000 entries. An
//! [`initial_capacity`](CacheBuilder::initial_capacity), or more shards, avoid that.
//!
//! A thread that is suspended anywhere in quell's own code stops none of these in other threads; the crate's tests suspend
//! one at every step. Outside that promise: the allocator, user code, an executor's own locks, the first use of the
//! process-wide collector, and the waking of one flight's waiters, who share a small mutex with whoever is just about to
//! wait for the same flight.
//!
//! The first value, failure or absence that is stored with a deadline starts a thread, the keeper's, unless an executor is
//! given or the clock is moved by hand. The first task that waits for a deadline or a lease without tokio's timer starts it
//! too, executor or not.
//!
//! In the steady state a hit stores nothing that another core reads. It writes the thread's own epoch record (when pinning
//! and unpinning), its own line of counters, and nothing else: the table, the slot and the value are only read. Four
//! exceptions: [`get`](Cache::get) clones the value, and cloning an `Arc` increments its shared count
//! ([`read`](Cache::read) and [`Pinned::get`] do not clone); in a cache with a capacity the first two hits of an entry
//! since the eviction policy looked at it note that; with a [`time_to_idle`](CacheBuilder::time_to_idle) the first hit of
//! a clock tick notes the time; with a [`miss_probability`](EarlyRefresh::miss_probability) some of the calls that may load
//! are noted in the second half of a value's life; and once somebody has asked for the [hottest keys](Cache::hot_keys), about
//! one hit in 128 notes its hash. A hit allocates nothing.
//!
//! # Memory
//! What is removed or replaced is freed once no thread can be reading it: epoch-based reclamation (Fraser, *Practical
//! lock-freedom*, 2004), in a collector of quell's own, so that other crates' pins do not hold it. Each thread collects
//! what it retires in bags of 64. It hands its bag over and frees what may go when it has retired more than 16 KiB of entries
//! since it last did, and with the first operation that retires something in each tick of 4 ms. What is retired may go three
//! such steps later, of whichever threads. So behind a thread that goes on, no more waits than it has retired in a few ticks, or
//! some ten KiB (without what keys and values own on the heap); [`Stats::unreclaimed`] shows how much. Values retired
//! by a thread that has then gone idle, at most one bag, wait until it uses quell again, or ends;
//! [`run_pending_tasks`](Cache::run_pending_tasks) and dropping the last handle hand the calling thread's bag over and free what
//! no pin holds. A [`Pinned`] that lives long holds everything up; one that is leaked is sound, stops reclamation, and in debug
//! builds makes the thread's later loads panic.
//!
//! Values that have expired go when they are met: by a read of them, by a sweep of four buckets per write (a whole lap within
//! about half as many writes as there are entries), at the old end of an eviction queue, by `run_pending_tasks`, and by the
//! keeper, which walks over all entries once a second or, where they are many, in about ten seconds for a million: no dead entry
//! lingers for longer than two such walks. (There is no keeper where an executor is given, or where the clock is moved by hand.)
//! Dropping the last handle drops all values at once, unless a load is still running, then when it ends, or the keeper is just
//! looking at a few buckets, then after those.
//!
//! An entry of `u64` to `u64` takes 56 bytes, and 15 to 21 for its share of the table (32 while it grows); with a capacity
//! 8 for its place in a queue, and 8 for each entry of the capacity for the sketch and the ghost. With a `time_to_idle` or an
//! [`early_refresh`](CacheBuilder::early_refresh) 16 are added, and a value that has replaced another in its entry has a box of
//! its own. An `initial_capacity` that is not used takes 8 to 16 for each entry that is not there.
//!
//! # User code
//! | code | thread | holds | may use the cache | a panic |
//! |---|---|---|---|---|
//! | loader, closures of `get_with` and its kin, `compute` | the leader's, or an executor's | nothing | yes | resumes in its caller; abandons the flight; in the background it is counted |
//! | async loader, futures of loads | any that polls a call that waits, or its own task's | nothing | yes | as a loader's; in `Drop` it is counted ([`Stats::drop_panics`]) |
//! | wakers of those who wait | any that ends or drives the flight | nothing | yes | caught; the others are woken |
//! | [`Expiry`], `weigher`, `fallback` | the caller's; for a load, the leader's | nothing | yes | as a loader's |
//! | `eviction_listener` | the one that took the value out, the keeper's included | nothing | yes | caught and counted ([`Stats::listener_panics`]) |
//! | `progress` of `warm` | the one that has dealt with the key | nothing | yes | caught; no further load begins |
//! | closures of `read`, `retain` | the caller's | an epoch pin | yes, but not load | resumes in its caller |
//! | `Hash`, `Eq` of keys | the caller's | an epoch pin | yes, but not load, and `Eq` must not write each time | resumes in its caller; nothing has changed |
//! | `ToOwned` of keys, `Clone` of values | the caller's or the leader's | at most an epoch pin | yes, but not load | resumes in its caller; those who wait look again |
//! | `Drop` of keys and values | any | at most an epoch pin | yes, but not load | in reclamation: caught and counted ([`Stats::drop_panics`]) |
//! | [`Executor`], [`Spawner`], [`Clock`] | the caller's | at most an epoch pin (`Clock`), nothing (the others) | no | resumes in its caller; a clock's goes no further where entries are swept or evicted |
//!
//! # Limits, and when to use something else
//! - One process. Ten processes load a key ten times.
//! - Where all loads are futures on one runtime, and no thread ever asks, a cache made for that runtime may do with less.
//! - A miss costs more than in a cache that moves its entries about in a slab of its own: each entry is an allocation, and
//!   reclaimed by epochs. What misses mostly, and is cheap to load, is better served by such a one.
//! - If entries never expire and never miss at the same time, a plain concurrent map is smaller and as fast.
//! - If a value must never be stale, do not cache it.

mod call;
mod clock;
mod config;
mod engine;
mod error;
mod executor;
mod flight;
mod freshness;
mod future;
mod hash;
mod loader;
mod observe;
mod policy;
mod primitive;
mod queue;
mod slot;
mod sync;
mod table;

pub use clock::{Clock, ManualClock, Wake};
pub use config::{Breaker, CacheBuilder, EarlyRefresh};
pub use engine::Mode;
pub use error::{BoxError, BuildError, LoadError, LoadErrorKind};
pub use executor::{BoxFuture, Executor, Job, Rejected, Spawner};
pub use flight::LoadCause;
pub use freshness::{Backoff, Ttl};
pub use hash::{DefaultHashBuilder, DefaultHasher};
pub use loader::{
    AsyncBatchLoader, AsyncLoader, BatchLoader, Expiry, IntoAsyncLoader, LoadContext, Loaded, Loader,
};
pub use observe::{Evictions, HotKey, InFlight, RemovalCause, Stats};
pub use sync::{
    Answer, Ask, Cache, Iter, KeepWarm, Op, Outcome, Pinned, Provenance, WarmOptions, WarmOutcome,
    WarmProgress, WarmReport,
};

/// The README's programs run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
