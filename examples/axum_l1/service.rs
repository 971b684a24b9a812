//! The service: one handler per strategy, each with a cache and a count of queries of its own.

use crate::database::{Database, Product, QueryError};
use crate::reply::{Failure, NoSuchProduct, Reply};
use crate::source::{Blocking, Source, Task};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use quell::{BoxError, BoxFuture, Cache, CacheBuilder, ManualClock, Stats};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;

/// How long an answer is good for; to `/stale` its soft TTL.
pub(crate) const TTL: Duration = Duration::from_secs(1);
/// How long `/stale` serves an answer while it is being refreshed.
const STALE_TTL: Duration = Duration::from_secs(60);
/// How long `/bounded` falls back on an answer when the load fails or the wait ends.
const GRACE: Duration = Duration::from_secs(600);
/// How long `/bounded` waits for another request's load.
const WAIT: Duration = Duration::from_millis(200);
/// More than there ever are: the bound is for those who ask for what is not there.
const CAPACITY: u64 = 10_000;
/// The products of which `/bounded` always has something to show.
const FRONT_PAGE: std::ops::RangeInclusive<u32> = 1..=10;
const MOST_AT_ONCE: usize = 100;

type Products = Cache<u32, Arc<Product>>;

pub(crate) struct Service {
    database: Arc<Database>,
    none: Source,
    cache_aside: Cached,
    single_flight: Cached,
    attached: Cached,
    stale: Cached,
    bounded: Cached,
}

struct Cached {
    source: Source,
    cache: Products,
}

impl Cached {
    fn new(
        database: &Arc<Database>,
        clock: Option<&ManualClock>,
        set: impl FnOnce(CacheBuilder<u32, Arc<Product>>, Source) -> CacheBuilder<u32, Arc<Product>>,
    ) -> Self {
        let source = Source::new(database);
        let mut builder = Cache::builder().max_capacity(CAPACITY).time_to_live(TTL);
        if let Some(clock) = clock {
            builder = builder.clock(clock.clone());
        }
        let cache = set(builder, source.clone()).build();
        Cached { source, cache }
    }

    fn named(&self, name: &'static str) -> (&'static str, &Source, Option<&Products>) {
        (name, &self.source, Some(&self.cache))
    }
}

impl Service {
    /// Reads the front page from the database: blocks. `clock` is for tests.
    pub(crate) fn new(
        database: &Arc<Database>,
        runtime: &Handle,
        clock: Option<&ManualClock>,
    ) -> Result<Arc<Self>, QueryError> {
        let front_page = database.products(&FRONT_PAGE.collect::<Vec<_>>())?;
        let front_page: HashMap<_, _> =
            front_page.into_iter().map(|product| (product.id, Arc::new(product))).collect();
        let runtime = runtime.clone();
        Ok(Arc::new(Service {
            database: Arc::clone(database),
            none: Source::new(database),
            cache_aside: Cached::new(database, clock, |builder, _| builder),
            single_flight: Cached::new(database, clock, |builder, _| builder),
            attached: Cached::new(database, clock, |builder, source| builder.loader(Blocking(source))),
            stale: Cached::new(database, clock, |builder, source| {
                let spawner = move |refresh: BoxFuture| {
                    drop(runtime.spawn(refresh));
                    Ok(())
                };
                builder.soft_ttl(TTL).time_to_live(STALE_TTL).async_loader(Task(source)).spawner(spawner)
            }),
            bounded: Cached::new(database, clock, |builder, source| {
                builder
                    .stale_if_error(GRACE)
                    .wait_timeout(WAIT)
                    .fallback(move |id| front_page.get(id).cloned())
                    .loader(Blocking(source))
            }),
        }))
    }

    /// Every strategy by its name: its count of queries, and its cache if it has one.
    fn strategies(&self) -> [(&'static str, &Source, Option<&Products>); 6] {
        [
            ("none", &self.none, None),
            self.cache_aside.named("cache_aside"),
            self.single_flight.named("single_flight"),
            self.attached.named("attached"),
            self.stale.named("stale"),
            self.bounded.named("bounded"),
        ]
    }

    /// How many queries a strategy has begun, and how many loads it has under way.
    pub(crate) fn work(&self, strategy: &str) -> Option<(u64, u64)> {
        let mut strategies = self.strategies().into_iter();
        let (_, source, cache) = strategies.find(|(name, ..)| *name == strategy)?;
        Some((source.queries(), cache.map_or(0, |cache| cache.stats().in_flight)))
    }

    pub(crate) fn router(self: Arc<Self>) -> Router {
        Router::new()
            .route("/", get(index))
            .route("/none/{id}", get(none))
            .route("/cache_aside/{id}", get(cache_aside))
            .route("/single_flight/{id}", get(single_flight))
            .route("/attached/{id}", get(attached))
            .route("/stale/{id}", get(stale))
            .route("/bounded/{id}", get(bounded))
            .route("/many", get(many))
            .route("/invalidate/{id}", post(invalidate))
            .route("/database/fail", post(fail))
            .route("/database/recover", post(recover))
            .route("/stats", get(stats))
            .with_state(self)
    }
}

const INDEX: &str = "\
GET  /none/{id}              every request is a query
GET  /cache_aside/{id}       look up, query on a miss, insert
GET  /single_flight/{id}     quell: one query per key, by the first request's own future
GET  /attached/{id}          quell: the same, by a blocking loader that the cache owns
GET  /stale/{id}             quell: past its soft TTL an answer is served while one task refreshes it
GET  /bounded/{id}?wait_ms=  quell: a wait with an end, then an older answer, the front page's, or 503
GET  /many?ids=1,2,3         quell: one query for all that are missing, shared with /single_flight
POST /invalidate/{id}        nothing older is served from here on
POST /database/fail          the queries fail ..
POST /database/recover       .. and work again
GET  /stats                  queries and the caches' counters
";

async fn index() -> &'static str {
    INDEX
}

type Shared = State<Arc<Service>>;

async fn none(State(service): Shared, Path(id): Path<u32>) -> Result<Reply, Failure> {
    let found = service.none.clone().product_async(id).await?;
    Ok(found.ok_or(Failure::Missing)?.into())
}

/// Between the look-up and the insert everybody else misses too.
async fn cache_aside(State(service): Shared, Path(id): Path<u32>) -> Result<Reply, Failure> {
    let Cached { source, cache } = &service.cache_aside;
    if let Some(product) = cache.get(&id) {
        return Ok(product.into());
    }
    let product = source.clone().product_async(id).await?.ok_or(Failure::Missing)?;
    cache.insert(id, Arc::clone(&product));
    Ok(product.into())
}

async fn single_flight(State(service): Shared, Path(id): Path<u32>) -> Result<Reply, Failure> {
    let Cached { source, cache } = &service.single_flight;
    let source = source.clone();
    let load = async move {
        match source.product_async(id).await {
            Ok(Some(product)) => Ok(product),
            Ok(None) => Err(BoxError::from(NoSuchProduct)),
            Err(error) => Err(error.into()),
        }
    };
    Ok(cache.try_get_with_async(&id, load).await?.into())
}

async fn attached(State(service): Shared, Path(id): Path<u32>) -> Result<Reply, Failure> {
    Ok(service.attached.cache.get_or_load_async(&id).await?.into())
}

async fn stale(State(service): Shared, Path(id): Path<u32>) -> Result<Reply, Failure> {
    Ok(service.stale.cache.ask(&id).load_async().await?.into())
}

#[derive(Deserialize)]
struct Patience {
    wait_ms: Option<u64>,
}

async fn bounded(
    State(service): Shared,
    Path(id): Path<u32>,
    Query(patience): Query<Patience>,
) -> Result<Reply, Failure> {
    let mut ask = service.bounded.cache.ask(&id);
    if let Some(ms) = patience.wait_ms {
        ask = ask.wait_timeout(Duration::from_millis(ms));
    }
    Ok(ask.load_async().await?.into())
}

#[derive(Deserialize)]
struct Wanted {
    ids: String,
}

impl Wanted {
    fn ids(&self) -> Result<Vec<u32>, Failure> {
        let id = |text: &str| {
            text.trim().parse().map_err(|error| Failure::Malformed(format!("the id `{text}`: {error}")))
        };
        let ids = self.ids.split(',').map(id).collect::<Result<Vec<_>, _>>()?;
        if ids.len() > MOST_AT_ONCE {
            return Err(Failure::Malformed(format!("more than {MOST_AT_ONCE} ids")));
        }
        Ok(ids)
    }
}

async fn many(State(service): Shared, Query(wanted): Query<Wanted>) -> Result<Json<Value>, Failure> {
    let Cached { source, cache } = &service.single_flight;
    let ids = wanted.ids()?;
    let load = |missing| source.clone().products_async(missing);
    let found = cache.load_many_async(&ids, load).await?;
    let (there, absent): (Vec<_>, Vec<_>) = ids.iter().partition(|id| found.contains_key(id));
    let products: Vec<&Product> =
        there.iter().filter_map(|id| found.get(id)).map(|product| &**product).collect();
    Ok(Json(json!({ "products": products, "absent": absent })))
}

async fn invalidate(State(service): Shared, Path(id): Path<u32>) -> StatusCode {
    for (_, _, cache) in service.strategies() {
        if let Some(cache) = cache {
            cache.invalidate(&id);
        }
    }
    StatusCode::NO_CONTENT
}

async fn fail(State(service): Shared) -> Result<StatusCode, Failure> {
    on_database(&service, Database::fail).await
}

async fn recover(State(service): Shared) -> Result<StatusCode, Failure> {
    on_database(&service, Database::recover).await
}

async fn on_database(
    service: &Service,
    change: fn(&Database) -> Result<(), QueryError>,
) -> Result<StatusCode, Failure> {
    let database = Arc::clone(&service.database);
    tokio::task::spawn_blocking(move || change(&database)).await.map_err(QueryError::Lost)??;
    Ok(StatusCode::NO_CONTENT)
}

async fn stats(State(service): Shared) -> Json<Value> {
    let of = |(name, source, cache): (&str, &Source, Option<&Products>)| {
        let cache = cache.map(|cache| counters(&cache.stats()));
        (name.to_owned(), json!({ "queries": source.queries(), "cache": cache }))
    };
    Json(Value::Object(service.strategies().map(of).into_iter().collect::<Map<_, _>>()))
}

fn counters(stats: &Stats) -> Value {
    json!({
        "hits": stats.hits,
        "stale_hits": stats.stale_hits,
        "grace_hits": stats.grace_hits,
        "misses": stats.misses,
        "loads": stats.loads,
        "load_failures": stats.load_failures,
        "joins": stats.joins,
        "wait_timeouts": stats.wait_timeouts,
        "fallbacks": stats.fallbacks,
        "in_flight": stats.in_flight,
        "waiters": stats.waiters,
    })
}
