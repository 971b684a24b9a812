//! The service, asked in the process and by its own load.

use crate::database::{Database, Pace, Product};
use crate::load;
use crate::reply::CACHE_STATUS;
use crate::serve;
use crate::service::{Service, TTL};
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::header::{AGE, RETRY_AFTER};
use axum::http::{HeaderMap, Method, Request, StatusCode};
use quell::ManualClock;
use serde_json::{Value, json};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tower::ServiceExt;

const CACHED: [&str; 5] = ["cache_aside", "single_flight", "attached", "stale", "bounded"];
const LIMIT: Duration = Duration::from_secs(30);

struct Fixture {
    database: Arc<Database>,
    service: Arc<Service>,
    clock: ManualClock,
}

impl Fixture {
    fn new() -> Self {
        Self::with(Pace { query: Duration::from_millis(1), patience: LIMIT })
    }

    fn with(pace: Pace) -> Self {
        let clock = ManualClock::new();
        let database = Database::create(pace).expect("a database");
        let service = Service::new(&database, &Handle::current(), Some(&clock)).expect("a service");
        Fixture { database, service, clock }
    }

    fn router(&self) -> Router {
        self.service.clone().router()
    }

    async fn send(&self, method: Method, path: &str) -> Got {
        send(self.router(), method, path.to_owned()).await
    }

    async fn get(&self, path: &str) -> Got {
        self.send(Method::GET, path).await
    }

    fn queries(&self, strategy: &str) -> u64 {
        self.service.work(strategy).expect("a strategy").0
    }

    /// Waits for a signal: a counter of `/stats`.
    async fn until(&self, strategy: &str, counter: &str, count: u64) {
        let reached = async {
            while self.get("/stats").await.body[strategy]["cache"][counter] != json!(count) {
                tokio::task::yield_now().await;
            }
        };
        let reached = tokio::time::timeout(LIMIT, reached).await;
        assert!(reached.is_ok(), "/{strategy} has not come to {count} {counter}");
    }
}

struct Got {
    status: StatusCode,
    headers: HeaderMap,
    body: Value,
}

impl Got {
    /// What follows `detail=` in the header.
    fn origin(&self) -> &str {
        let header = self.headers.get(CACHE_STATUS).and_then(|value| value.to_str().ok()).unwrap_or_default();
        header.split_once("detail=").map_or("", |(_, detail)| detail)
    }
}

async fn send(router: Router, method: Method, path: String) -> Got {
    let request = Request::builder().method(method).uri(path).body(Body::empty()).expect("a request");
    let response = router.oneshot(request).await.expect("an infallible service");
    let (parts, body) = response.into_parts();
    let bytes = to_bytes(body, usize::MAX).await.expect("a body");
    let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
    Got { status: parts.status, headers: parts.headers, body }
}

fn product(id: u32) -> Value {
    let price_cents = 199 + id * 7919 % 20_000;
    json!(Product { id, name: format!("product {id}"), price_cents })
}

#[tokio::test]
async fn every_strategy_finds_what_is_there_and_says_what_is_not() {
    let fixture = Fixture::new();
    for strategy in CACHED.into_iter().chain(["none"]) {
        for _ in 0..2 {
            let got = fixture.get(&format!("/{strategy}/7")).await;
            assert_eq!((got.status, got.body), (StatusCode::OK, product(7)), "{strategy}");
        }
        assert_eq!(fixture.queries(strategy), if strategy == "none" { 2 } else { 1 }, "{strategy}");
        let got = fixture.get(&format!("/{strategy}/5000")).await;
        assert_eq!(got.status, StatusCode::NOT_FOUND, "{strategy}");
        assert_eq!(got.body, json!({ "error": ["there is no such product"] }), "{strategy}");
        let got = fixture.get(&format!("/{strategy}/seven")).await;
        assert_eq!(got.status, StatusCode::BAD_REQUEST, "{strategy}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cold_burst_is_one_query_with_single_flight_and_many_without() {
    let fixture = Fixture::new();
    for (strategy, queries) in [
        ("single_flight", 1),
        ("attached", 1),
        ("stale", 1),
        ("bounded", 1),
        ("cache_aside", 100),
        ("none", 100),
    ] {
        let burst = async {
            let mut burst = JoinSet::new();
            for _ in 0..100 {
                burst.spawn(send(fixture.router(), Method::GET, format!("/{strategy}/7")));
            }
            // Nobody gets an answer before everybody has asked.
            let asked = || fixture.queries(strategy) == queries;
            if queries == 1 {
                fixture.until(strategy, "joins", 99).await;
            } else {
                let all = async {
                    while !asked() {
                        tokio::task::yield_now().await;
                    }
                };
                assert!(tokio::time::timeout(LIMIT, all).await.is_ok(), "{strategy}");
            }
            burst
        };
        let burst = fixture.database.while_exhausted(burst).await;
        for got in burst.join_all().await {
            assert_eq!((got.status, got.body), (StatusCode::OK, product(7)), "{strategy}");
        }
        assert_eq!(fixture.queries(strategy), queries, "{strategy}");
    }
}

#[tokio::test]
async fn a_stale_answer_is_served_at_once_and_refreshed() {
    let fixture = Fixture::new();
    assert_eq!(fixture.get("/stale/7").await.origin(), "loaded");
    assert_eq!(fixture.get("/stale/7").await.origin(), "fresh");
    fixture.clock.advance(TTL * 3);
    let serve_stale = async {
        for _ in 0..3 {
            let got = fixture.get("/stale/7").await;
            assert_eq!((got.origin(), &got.headers[AGE]), ("stale", &"3".parse().expect("a header")));
        }
    };
    // No query can run: the refresh is under way all the time.
    fixture.database.while_exhausted(serve_stale).await;
    fixture.until("stale", "in_flight", 0).await;
    assert_eq!(fixture.get("/stale/7").await.origin(), "fresh");
    assert_eq!(fixture.queries("stale"), 2);
}

#[tokio::test]
async fn a_bounded_wait_ends_with_an_older_answer_or_the_front_page_or_503() {
    let fixture = Fixture::new();
    fixture.get("/bounded/8").await;
    fixture.clock.advance(TTL * 2);
    let impatient = async {
        let mut leaders = JoinSet::new();
        for (nth, id) in (1..).zip([7, 8, 500]) {
            leaders.spawn(send(fixture.router(), Method::GET, format!("/bounded/{id}")));
            fixture.until("bounded", "in_flight", nth).await;
        }
        for (id, status, origin) in [
            (7, StatusCode::OK, "fallback"),
            (8, StatusCode::OK, "grace"),
            (500, StatusCode::SERVICE_UNAVAILABLE, ""),
        ] {
            let path = format!("/bounded/{id}?wait_ms=20");
            let waiter = tokio::spawn(send(fixture.router(), Method::GET, path));
            fixture.until("bounded", "waiters", 1).await;
            fixture.clock.advance(Duration::from_millis(30));
            let got = waiter.await.expect("an answer");
            assert_eq!((got.status, got.origin()), (status, origin), "{id}");
            assert_eq!(got.headers.contains_key(RETRY_AFTER), status != StatusCode::OK);
        }
        leaders
    };
    let leaders = fixture.database.while_exhausted(impatient).await;
    for got in leaders.join_all().await {
        assert_eq!((got.status, got.origin()), (StatusCode::OK, "loaded"));
    }
}

#[tokio::test]
async fn a_database_that_fails_is_502_unless_there_is_something_to_serve() {
    let fixture = Fixture::new();
    for id in [7, 8, 500] {
        fixture.get(&format!("/bounded/{id}")).await;
    }
    fixture.get("/stale/500").await;
    fixture.clock.advance(TTL * 2);
    assert_eq!(fixture.send(Method::POST, "/database/fail").await.status, StatusCode::NO_CONTENT);
    for strategy in CACHED.into_iter().chain(["none"]) {
        let got = fixture.get(&format!("/{strategy}/600")).await;
        assert_eq!(got.status, StatusCode::BAD_GATEWAY, "{strategy}");
        let error = got.body["error"].to_string();
        assert!(error.contains("the database failed") && error.contains("no such table"), "{error}");
    }
    assert_eq!(fixture.get("/bounded/500").await.origin(), "grace");
    assert_eq!(fixture.get("/bounded/3").await.origin(), "fallback");
    assert_eq!(fixture.get("/stale/500").await.origin(), "stale");
    assert_eq!(fixture.get("/many?ids=600").await.status, StatusCode::BAD_GATEWAY);

    assert_eq!(fixture.send(Method::POST, "/database/recover").await.status, StatusCode::NO_CONTENT);
    assert_eq!(fixture.get("/bounded/500").await.origin(), "loaded");
    assert_eq!(fixture.get("/single_flight/600").await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_pool_without_a_free_connection_is_503() {
    let fixture = Fixture::with(Pace { query: Duration::ZERO, patience: Duration::ZERO });
    let ask = async {
        for strategy in CACHED.into_iter().chain(["none"]) {
            let got = fixture.get(&format!("/{strategy}/600")).await;
            assert_eq!(got.status, StatusCode::SERVICE_UNAVAILABLE, "{strategy}");
            assert!(got.headers.contains_key(RETRY_AFTER), "{strategy}");
        }
    };
    fixture.database.while_exhausted(ask).await;
}

#[tokio::test]
async fn many_products_are_one_query_for_those_that_are_missing() {
    let fixture = Fixture::new();
    fixture.get("/single_flight/2").await;
    let got = fixture.get("/many?ids=3,2,5000,1").await;
    let expected = json!({ "products": [product(3), product(2), product(1)], "absent": [5000] });
    assert_eq!((got.status, got.body), (StatusCode::OK, expected));
    assert_eq!(fixture.queries("single_flight"), 2);
    assert_eq!(fixture.get("/single_flight/3").await.body, product(3));
    assert_eq!(fixture.queries("single_flight"), 2);
    for malformed in ["/many", "/many?ids=", "/many?ids=1,x", &format!("/many?ids=1{}", ",1".repeat(100))] {
        assert_eq!(fixture.get(malformed).await.status, StatusCode::BAD_REQUEST, "{malformed}");
    }
}

#[tokio::test]
async fn what_is_invalidated_is_asked_for_again() {
    let fixture = Fixture::new();
    for strategy in CACHED {
        fixture.get(&format!("/{strategy}/7")).await;
    }
    assert_eq!(fixture.send(Method::POST, "/invalidate/7").await.status, StatusCode::NO_CONTENT);
    for strategy in CACHED {
        fixture.get(&format!("/{strategy}/7")).await;
        assert_eq!(fixture.queries(strategy), 2, "{strategy}");
    }
}

#[tokio::test]
async fn the_statistics_count_queries_and_hits() {
    let fixture = Fixture::new();
    for _ in 0..3 {
        fixture.get("/attached/7").await;
    }
    fixture.get("/none/7").await;
    let stats = fixture.get("/stats").await.body;
    assert_eq!(stats["attached"]["queries"], 1);
    let of = |counter: &str| &stats["attached"]["cache"][counter];
    assert_eq!((of("hits"), of("misses"), of("loads")), (&json!(2), &json!(1), &json!(1)));
    assert_eq!(stats["none"], json!({ "queries": 1, "cache": null }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_load_reports_every_strategy_and_the_server_stops_when_told() {
    let fixture = Fixture::new();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let (stop, stopped) = oneshot::channel::<()>();
    let server = tokio::spawn(serve(listener, fixture.router(), async {
        let _ = stopped.await;
    }));
    let expire = async || fixture.clock.advance(TTL * 2);
    let rows = load::run(address, &fixture.service, 20, expire, |_| ()).await.expect("a load");
    assert_eq!(rows.len(), 13);
    for row in &rows {
        assert_eq!((row.errors, row.latencies.len()), (0, 20), "{}", row.path);
        match row.path.as_str() {
            "/none/7" => assert_eq!(row.queries, 20),
            "/cache_aside/7" => assert!(row.queries <= 20),
            path => assert_eq!(row.queries, 1, "{path} {}", row.state),
        }
    }
    assert_eq!(load::table(&rows).lines().count(), 15);
    drop(stop);
    assert!(server.await.expect("no panic").is_ok());
}
