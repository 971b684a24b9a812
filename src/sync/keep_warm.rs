//! Keeping keys warm: a thread that refreshes them before they go stale.

use super::{Cache, Life};
use crate::call::Attached;
use crate::clock::{Moment, saturating_nanos};
use crate::engine::Core;
use crate::executor::on_a_thread;
use crate::flight::Waits;
use crate::primitive::caught;
use crate::primitive::epoch::pin;
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

/// While this exists, some keys are kept warm, see [`Cache::keep_warm`]. Dropping it ends that; a load that has begun goes on.
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
    /// of what they bring are spread by a fifth.
    ///
    /// Refreshes are those of [`refresh`](Self::refresh): they share flights, heed limits and back-offs, and what cannot be
    /// refreshed is served as it is. Rounds shorter than 10 ms take 10 ms. The thread that does it holds neither the cache nor
    /// its values. If no thread can be had, or no loader is attached, nothing is kept warm.
    pub fn keep_warm<B: Borrow<K>>(&self, keys: impl IntoIterator<Item = B>, every: Duration) -> KeepWarm {
        let keys: HashSet<K> = keys.into_iter().map(|key| key.borrow().clone()).collect();
        let keys: Vec<K> = keys.into_iter().collect();
        let known = Known { core: Arc::downgrade(&self.core), life: Arc::downgrade(&self.life) };
        let ended = Arc::new(AtomicBool::new(false));
        let name = &self.core.settings.name;
        let name = if name.is_empty() { "quell-warm".to_owned() } else { format!("quell-{name}-warm") };
        let (stop, begun) = (ended.clone(), self.core.time.now());
        if !keys.is_empty() && self.core.settings.has_loader() {
            // Without a thread nothing is kept warm.
            let _ = on_a_thread(&name, move || keep(&keys, every.max(SHORTEST), begun, &known, &stop));
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

/// What the thread does.
fn keep<K, V, S>(keys: &[K], every: Duration, begun: Moment, known: &Known<K, V, S>, ended: &AtomicBool)
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    S: BuildHasher + Send + Sync + 'static,
{
    let step = every / u32::try_from(keys.len()).unwrap_or(u32::MAX);
    let mut due = begun;
    for nth in (0..keys.len()).cycle() {
        loop {
            // Check, listen, check again, wait.
            let Some(cache) = known.cache() else { return };
            let ear = cache.core.moved.listen();
            // Relaxed: whoever sets it rings then.
            if ended.load(Ordering::Relaxed) {
                return;
            }
            // The clock and an executor are user code: if one panics, there is a next time.
            let Some(now) = caught(|| cache.core.time.now()) else {
                drop(cache);
                let _ = ear.wait(Some(REST_AFTER_PANIC));
                continue;
            };
            if due <= now {
                let _ = caught(|| cache.keep_one(&keys[nth], now.plus(every.saturating_mul(3) / 2)));
                // Of what a clock has jumped over, one round is made up.
                let earliest = now.nanos().saturating_sub(saturating_nanos(every));
                due = due.plus(step).max(Moment::from_nanos(earliest));
                break;
            }
            let rest = cache.core.time.real_time_until(due);
            drop(cache);
            let _ = ear.wait(rest);
        }
    }
}
