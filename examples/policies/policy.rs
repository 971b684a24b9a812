//! The policies: ways to keep what is asked for at hand.

use crate::options::Options;
use crate::source::{Row, Source, TimedOut};
use crate::traffic::dice;
use crate::world::World;
use parking_lot::Mutex;
use quell::{
    AsyncLoader, Backoff, BoxError, BoxFuture, Cache, CacheBuilder, DefaultHashBuilder, EarlyRefresh,
    LoadCause, LoadContext, LoadError, Loaded, Provenance,
};
use rand::RngExt;
use rand::rngs::Xoshiro256PlusPlus;
use std::sync::Arc;
use std::time::Duration;

/// How widely deadlines are spread where they are.
const JITTER: f64 = 0.2;
/// Where there is a soft TTL, this share of the TTL.
const SOFT: f64 = 2.0 / 3.0;
/// Where hot keys are kept warm: one in so many keys, but no more than this, in rounds of one in so many TTLs.
const KEPT_WARM: u32 = 10;
const MOST_KEPT_WARM: u32 = 1000;
const ROUNDS: u32 = 6;
/// In *all together*: how many TTLs a value is served beyond its own while loads fail, the pauses after failures, and how many
/// loads for each server may run.
const GRACE: u32 = 4;
const BACKOFF: Backoff = Backoff::exponential(Duration::from_millis(500), Duration::from_secs(5));
const LOADS_PER_SERVER: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Policy {
    PlainTtl,
    Jitter,
    SingleFlight,
    XFetch,
    SoftTtl,
    KeepWarm,
    AllTogether,
}

impl Policy {
    pub(crate) const ALL: [Policy; 7] = [
        Policy::PlainTtl,
        Policy::Jitter,
        Policy::SingleFlight,
        Policy::XFetch,
        Policy::SoftTtl,
        Policy::KeepWarm,
        Policy::AllTogether,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Policy::PlainTtl => "plain TTL",
            Policy::Jitter => "jitter",
            Policy::SingleFlight => "single flight",
            Policy::XFetch => "XFetch",
            Policy::SoftTtl => "soft TTL",
            Policy::KeepWarm => "keep warm",
            Policy::AllTogether => "all together",
        }
    }

    pub(crate) fn summary(self) -> &'static str {
        match self {
            Policy::PlainTtl => "look up, load on a miss, store: every caller that misses loads",
            Policy::Jitter => "the same, but each TTL is shortened at random by up to a fifth",
            Policy::SingleFlight => "one load per key; whoever wants the key waits for it",
            Policy::XFetch => {
                "single flight; a call may refresh a value before its end, the more probably the nearer that is"
            }
            Policy::SoftTtl => {
                "single flight; from two thirds of the TTL on served stale, and refreshed by one"
            }
            Policy::KeepWarm => {
                "single flight; the hottest keys are refreshed in even steps, before their end"
            }
            Policy::AllTogether => "all of it, with grace when loads fail, back-off, and a limit on loads",
        }
    }

    /// Whether all is decided by the seed. The cache draws its own numbers, for XFetch and jitter, from random keys.
    pub(crate) fn is_reproducible(self) -> bool {
        !matches!(self, Policy::XFetch | Policy::AllTogether)
    }

    pub(crate) fn build(self, world: &World, source: &Arc<Source>, options: &Options) -> Front {
        let ttl = options.ttl();
        let builder = Cache::<u32, Row>::builder()
            .name(self.name())
            .time_to_live(ttl)
            .early_refresh(EarlyRefresh::off())
            .clock(world.clock());
        let keeps_warm = matches!(self, Policy::KeepWarm | Policy::AllTogether);
        let loader = |spread| Attached {
            source: source.clone(),
            ttl,
            spread,
            dice: Mutex::new(dice(options.seed, 3)),
        };
        let builder = match self {
            Policy::PlainTtl | Policy::Jitter => {
                let spread = if self == Policy::Jitter { JITTER } else { 0.0 };
                return Front::CacheAside(CacheAside { cache: builder.build(), loader: loader(spread) });
            }
            Policy::SingleFlight | Policy::KeepWarm => builder,
            Policy::XFetch => builder.early_refresh(EarlyRefresh::beta(1.0)),
            Policy::SoftTtl => builder.soft_ttl(ttl.mul_f64(SOFT)),
            Policy::AllTogether => together(builder, options),
        };
        // `All together` leaves the spreading to the cache's own jitter.
        let spread = if self == Policy::KeepWarm { JITTER } else { 0.0 };
        let cache = builder.async_loader(loader(spread)).spawner(world.spawner()).build();
        if keeps_warm {
            let fresh = if self == Policy::AllTogether { ttl.mul_f64(SOFT) } else { ttl };
            world.spawn(keep_warm(world, &cache, options, fresh.mul_f64(1.0 - JITTER)));
        }
        Front::Quell(cache)
    }
}

type Builder = CacheBuilder<u32, Row, DefaultHashBuilder>;

fn together(builder: Builder, options: &Options) -> Builder {
    let ttl = options.ttl();
    builder
        .soft_ttl(ttl.mul_f64(SOFT))
        .jitter(JITTER)
        .early_refresh(EarlyRefresh::beta(1.0))
        .stale_if_error(ttl * GRACE)
        .error_backoff(BACKOFF)
        .max_concurrent_loads(options.servers as usize * LOADS_PER_SERVER)
}

/// Keeps the hottest keys from going stale, as [`Cache::keep_warm`] does on a thread of its own: in each round each of them is
/// looked at once, one after the other in even steps, and refreshed if it is not there or would go stale within a round and a
/// half. Here it is a task, for a thread would keep time with the world only by luck. It knows only for how long a value is
/// fresh at least, where the real one sees each value's own deadline.
fn keep_warm(
    world: &World,
    cache: &Cache<u32, Row>,
    options: &Options,
    fresh_at_least: Duration,
) -> BoxFuture {
    let keys = options.keys.div_ceil(KEPT_WARM).min(MOST_KEPT_WARM);
    let round = options.ttl() / ROUNDS;
    let (world, cache, end) = (world.clone(), cache.clone(), options.length());
    Box::pin(async move {
        let mut due = Duration::ZERO;
        for key in (0..keys).cycle() {
            if due >= end {
                break;
            }
            world.sleep_until(due).await;
            let stays = |row: Row| row.read + fresh_at_least > world.now() + round * 3 / 2;
            if !cache.peek(&key).is_some_and(stays) {
                cache.refresh(&key);
            }
            due += round / keys;
        }
    })
}

/// Where an answer came from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Origin {
    Fresh,
    Stale,
    Grace,
    /// It was loaded for this call, by it or by another.
    Loaded,
}

/// How a call was answered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Answer {
    pub(crate) row: Row,
    pub(crate) origin: Origin,
    /// How old the row is, as the policy tells it.
    pub(crate) age: Duration,
}

/// A policy at work.
pub(crate) enum Front {
    CacheAside(CacheAside),
    Quell(Cache<u32, Row>),
}

impl Front {
    /// The answer to one call, unless there is none.
    pub(crate) async fn ask(&self, world: &World, key: u32) -> Result<Answer, BoxError> {
        match self {
            Front::CacheAside(aside) => Ok(aside.ask(world, key).await?),
            Front::Quell(cache) => Ok(ask(cache, key).await?),
        }
    }
}

async fn ask(cache: &Cache<u32, Row>, key: u32) -> Result<Answer, LoadError> {
    let answer = cache.ask(&key).load_async().await?;
    let (origin, age) = match answer.provenance {
        Provenance::Fresh { age } => (Origin::Fresh, age),
        Provenance::Stale { age } => (Origin::Stale, age),
        Provenance::Grace { age } => (Origin::Grace, age),
        // No cache here has a fallback or remembers absences.
        Provenance::Loaded { .. }
        | Provenance::Joined { .. }
        | Provenance::Negative
        | Provenance::Fallback => (Origin::Loaded, Duration::ZERO),
    };
    Ok(Answer { row: answer.value, origin, age })
}

/// The cache that people write by hand: quell's, used as a map that forgets.
pub(crate) struct CacheAside {
    cache: Cache<u32, Row>,
    loader: Attached,
}

impl CacheAside {
    async fn ask(&self, world: &World, key: u32) -> Result<Answer, TimedOut> {
        if let Some(row) = self.cache.get(&key) {
            return Ok(Answer { row, origin: Origin::Fresh, age: world.now() - row.read });
        }
        let row = self.loader.source.load(key).await?;
        self.cache.insert_with_ttl(key, row, self.loader.spread_ttl());
        Ok(Answer { row, origin: Origin::Loaded, age: Duration::ZERO })
    }
}

/// The source as a loader, which may spread the deadlines of what is loaded in the background.
struct Attached {
    source: Arc<Source>,
    ttl: Duration,
    spread: f64,
    dice: Mutex<Xoshiro256PlusPlus>,
}

impl Attached {
    fn spread_ttl(&self) -> Duration {
        self.ttl.mul_f64(1.0 - self.spread * self.dice.lock().random::<f64>())
    }
}

impl AsyncLoader<u32, Row> for Attached {
    async fn load(&self, key: &u32, cx: &LoadContext<Row>) -> Result<Loaded<Row>, BoxError> {
        let loaded = Loaded::new(self.source.load(*key).await?);
        let spreads = self.spread > 0.0 && cx.cause() == LoadCause::Asked;
        Ok(if spreads { loaded.ttl(self.spread_ttl()) } else { loaded })
    }
}
