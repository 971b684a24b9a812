//! Keeping keys warm: a thread that refreshes them before they go stale.

use super::{Cache, Life};
use crate::call::Attached;
use crate::clock::{Moment, saturating_nanos};
use crate::engine::Core;
use crate::executor::on_a_thread;
use crate::flight::Waits;
use crate::primitive::caught;
use crate::primitive::epoch::{contain, pin};
use crate::primitive::plain::{AtomicBool, Ordering};
use std::borrow::Borrow;
use std::collections::HashSet;
use std::fmt;
use std::hash::{BuildHasher, Hash};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// The shortest round.
const SHORTEST: Duration = Duration::from_millis(10);
/// How widely the deadlines of what is loaded are spread.
const SPREAD: f64 = 0.2;

/// How long the thread rests after a clock has panicked.
const REST_AFTER_PANIC: Duration = Duration::from_secs(1);

/// While this exists, some keys are kept warm, see [`Cache::keep_warm`] and [`Cache::keep_hottest_warm`]. Dropping it ends
/// that; a load that has begun goes on.
#[must_use = "dropping it ends the keeping"]
pub struct KeepWarm {
    ended: Arc<AtomicBool>,
    wake: Box<dyn Fn() + Send + Sync>,
}

impl Drop for KeepWarm {
    fn drop(&mut self) {
        // Relaxed: the thread listens before it looks.
        self.ended.store(true, Ordering::Relaxed);
        (self.wake)();
    }
}

impl fmt::Debug for KeepWarm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeepWarm")
    }
}

/// A cache, as a thread of its own knows it.
struct Known<K, V, S> {
    core: Weak<Core<K, V, S>>,
    life: Weak<Life<K, V, S>>,
}

impl<K, V, S> Known<K, V, S> {
    /// The cache, unless its last handle has been dropped.
    fn cache(&self) -> Option<Cache<K, V, S>> {
        Some(Cache { life: self.life.upgrade()?, core: self.core.upgrade()? })
    }
}

impl<K, V, S> Cache<K, V, S>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    /// Keeps these keys from going stale, until what is returned is dropped, or the last handle of the cache: in each round,
    /// of this length by the cache's clock, each of them is looked at once, one after the other in even steps, and is refreshed
    /// in the background if it is not there or would go stale within a round and a half. So loads are paced, and the deadlines
    /// of what they bring are spread by a fifth. What lives for less than a round and a half is loaded in each.
    ///
    /// Refreshes are those of [`refresh`](Self::refresh): they share flights, heed limits and back-offs, and what cannot be
    /// refreshed is served as it is. Rounds shorter than 10 ms take 10 ms. The thread that does it holds neither the cache nor
    /// its values. If no thread can be had, or no loader is attached, nothing is kept warm.
    pub fn keep_warm<B: Borrow<K>>(&self, keys: impl IntoIterator<Item = B>, every: Duration) -> KeepWarm {
        let keys: HashSet<K> = keys.into_iter().map(|key| key.borrow().clone()).collect();
        let keys: Arc<[K]> = keys.into_iter().collect();
        let any = !keys.is_empty();
        self.keep(any, every, move |_| keys.clone())
    }

    /// Keeps the `k` hottest keys from going stale, without naming them, until what is returned is dropped, or the last handle
    /// of the cache: at the beginning of each round they are taken from [`hot_keys`](Self::hot_keys), and are seen to in its
    /// course as [`keep_warm`](Self::keep_warm) does it. So keys that cool down are left to go stale, and those that have left
    /// the cache are not loaded again before a caller does it.
    ///
    /// What is hot is noted from this call on; the first round, and any other that finds no key, does nothing. What `hot_keys`
    /// says of the estimate goes for this too: there are at most 1,024 keys. Rounds shorter than 10 ms take 10 ms.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    ///
    /// let prices = quell::Cache::builder()
    ///     .time_to_live(Duration::from_secs(60))
    ///     .loader(|id: &u64| Ok::<_, std::io::Error>(100 * id))
    ///     .build();
    /// let kept = prices.keep_hottest_warm(100, Duration::from_secs(10));
    /// assert_eq!(prices.get_or_load(&7).unwrap(), 700);
    /// drop(kept); // ends it
    /// ```
    pub fn keep_hottest_warm(&self, k: usize, every: Duration) -> KeepWarm {
        let any = k > 0 && self.core.settings.has_loader();
        if any {
            self.core.counters.note_hottest();
        }
        self.keep(any, every, move |cache| {
            cache.core.hot_keys(k, &pin()).into_iter().map(|hot| hot.key).collect()
        })
    }

    /// Keeps the keys of each round from going stale, if there are `any`.
    fn keep(
        &self,
        any: bool,
        every: Duration,
        round: impl Fn(&Self) -> Arc<[K]> + Send + 'static,
    ) -> KeepWarm {
        let known = Known { core: Arc::downgrade(&self.core), life: Arc::downgrade(&self.life) };
        let ended = Arc::new(AtomicBool::new(false));
        let name = &self.core.settings.name;
        let name = if name.is_empty() { "quell-warm".to_owned() } else { format!("quell-{name}-warm") };
        let pace =
            Pace { known, ended: ended.clone(), every: every.max(SHORTEST), due: self.core.time.now() };
        if any && self.core.settings.has_loader() {
            // Without a thread nothing is kept warm.
            let _ = on_a_thread(&name, move || keep(pace, round));
        }
        let core = Arc::downgrade(&self.core);
        let wake = move || {
            if let Some(core) = core.upgrade() {
                core.moved.ring();
            }
        };
        KeepWarm { ended, wake: Box::new(wake) }
    }

    /// Refreshes one key in the background, if it is not there or would go stale before `until`.
    fn keep_one(&self, key: &K, until: Moment) {
        if self.core.is_fresh_until(key, until, &pin()) {
            return;
        }
        if let Some(loader) = Attached::of(&self.core, Waits::AsThread) {
            let _ = self.refresh_by(loader, key, SPREAD);
        }
    }
}

/// The steps of a round, as the thread waits for them.
struct Pace<K, V, S> {
    known: Known<K, V, S>,
    ended: Arc<AtomicBool>,
    every: Duration,
    /// When the next step is to be.
    due: Moment,
}

impl<K, V, S> Pace<K, V, S> {
    /// Waits until a step is due, and says when that is. `None`: it has ended, or the cache has.
    fn step(&self) -> Option<(Cache<K, V, S>, Moment)> {
        loop {
            // Check, listen, check again, wait.
            let cache = self.known.cache()?;
            let ear = cache.core.moved.listen();
            // Relaxed: whoever sets it rings then.
            if self.ended.load(Ordering::Relaxed) {
                return None;
            }
            // The clock is user code: if it panics, there is a next time.
            let time = &cache.core.time;
            let rest = match caught(|| (time.now(), time.real_time_until(self.due))) {
                Some((now, _)) if self.due <= now => return Some((cache, now)),
                Some((_, rest)) => rest,
                None => Some(REST_AFTER_PANIC),
            };
            drop(cache);
            let _ = ear.wait(rest);
        }
    }

    /// The next step is so much later.
    fn rest(&mut self, now: Moment, length: Duration) {
        // Of what a clock has jumped over, one round is made up.
        let earliest = now.nanos().saturating_sub(saturating_nanos(self.every));
        self.due = self.due.plus(length).max(Moment::from_nanos(earliest));
    }
}

/// What the thread does: in each round it sees to these keys.
fn keep<K, V, S>(mut pace: Pace<K, V, S>, round: impl Fn(&Cache<K, V, S>) -> Arc<[K]>)
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    let every = pace.every;
    while let Some((cache, now)) = pace.step() {
        // Keys and an executor are user code, as is a clock: if one panics, there is a next time.
        let keys = caught(|| round(&cache)).unwrap_or_default();
        drop(cache);
        if keys.is_empty() {
            pace.rest(now, every);
        }
        let each = every / u32::try_from(keys.len()).unwrap_or(u32::MAX).max(1);
        for key in &*keys {
            let Some((cache, now)) = pace.step() else { return };
            let _ = caught(|| cache.keep_one(key, now.plus(every.saturating_mul(3) / 2)));
            pace.rest(now, each);
        }
        contain(|| drop(keys));
    }
}
