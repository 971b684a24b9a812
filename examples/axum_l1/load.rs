//! The load: bursts of requests for one hot key, each on a kept connection of its own, and what became of them.
//!
//! Each strategy gets two bursts: one when its cache is empty, and one when what it has is past its TTL.

use crate::latency::{grouped, human, percentile};
use crate::service::Service;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// A product that is on the front page, so that `/bounded` has something to fall back on.
const HOT: u32 = 7;
/// After this a request has failed.
const LIMIT: Duration = Duration::from_secs(60);

struct Target {
    strategy: &'static str,
    query: &'static str,
    /// Whether what it answers can expire.
    expires: bool,
}

const TARGETS: [Target; 7] = [
    Target { strategy: "none", query: "", expires: false },
    Target { strategy: "cache_aside", query: "", expires: true },
    Target { strategy: "single_flight", query: "", expires: true },
    Target { strategy: "attached", query: "", expires: true },
    Target { strategy: "stale", query: "", expires: true },
    Target { strategy: "bounded", query: "", expires: true },
    Target { strategy: "bounded", query: "?wait_ms=20", expires: true },
];

/// What became of one burst.
pub(crate) struct Row {
    pub(crate) path: String,
    pub(crate) state: &'static str,
    pub(crate) queries: u64,
    pub(crate) errors: usize,
    /// How many answers came from where, as far as the strategy tells.
    pub(crate) origins: BTreeMap<String, usize>,
    /// In ascending order, all counted from the moment at which the burst began.
    pub(crate) latencies: Vec<Duration>,
}

/// Sends all the bursts, and says what is about to happen. `expire` returns when what is cached has expired.
pub(crate) async fn run(
    address: SocketAddr,
    service: &Service,
    requests: usize,
    expire: impl AsyncFn(),
    mut say: impl FnMut(&str),
) -> Result<Vec<Row>, crate::Error> {
    say(&format!("{} connections", grouped(requests as u64)));
    let mut clients = Vec::with_capacity(requests);
    for _ in 0..requests {
        let mut client = Client::connect(address).await?;
        client.get("/").await?;
        clients.push(client);
    }
    let mut rows = Vec::new();
    for target in &TARGETS {
        let path = format!("/{}/{HOT}{}", target.strategy, target.query);
        clients[0].send("POST", &format!("/invalidate/{HOT}")).await?;
        for state in ["cold", "expired"] {
            if state == "expired" {
                if !target.expires {
                    continue;
                }
                expire().await;
            }
            say(&format!("{path} {state}"));
            let before = settled(service, target.strategy).await?;
            let (answers, latencies);
            (clients, answers, latencies) = burst(clients, &path).await?;
            let queries = settled(service, target.strategy).await? - before;
            rows.push(row(&path, state, queries, &answers, latencies));
        }
    }
    Ok(rows)
}

fn row(path: &str, state: &'static str, queries: u64, answers: &[Answer], latencies: Vec<Duration>) -> Row {
    let mut origins = BTreeMap::new();
    for origin in answers.iter().filter_map(|answer| answer.origin.as_ref()) {
        *origins.entry(origin.clone()).or_default() += 1;
    }
    let errors = answers.iter().filter(|answer| answer.status != 200).count();
    Row { path: path.to_owned(), state, queries, errors, origins, latencies }
}

/// How many queries a strategy has run, once it loads nothing any more.
async fn settled(service: &Service, strategy: &str) -> Result<u64, crate::Error> {
    let began = Instant::now();
    loop {
        let (queries, in_flight) = service.work(strategy).ok_or("no such strategy")?;
        if in_flight == 0 {
            return Ok(queries);
        }
        if began.elapsed() > LIMIT {
            return Err(format!("a load of /{strategy} has been running for {LIMIT:?}").into());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// All clients send at one moment. Gives them back, with the answers and the latencies in order.
async fn burst(
    clients: Vec<Client>,
    path: &str,
) -> Result<(Vec<Client>, Vec<Answer>, Vec<Duration>), crate::Error> {
    let (start, started) = watch::channel(None);
    let mut tasks = JoinSet::new();
    let requests = clients.len();
    for mut client in clients {
        let (mut started, path) = (started.clone(), path.to_owned());
        tasks.spawn(async move {
            let began: Instant = started.wait_for(Option::is_some).await?.ok_or("not begun")?;
            let answer = tokio::time::timeout(LIMIT, client.get(&path)).await??;
            Ok::<_, crate::Error>((client, answer, began.elapsed()))
        });
    }
    start.send_replace(Some(Instant::now()));
    let (mut clients, mut answers, mut latencies) =
        (Vec::with_capacity(requests), Vec::with_capacity(requests), Vec::with_capacity(requests));
    while let Some(ended) = tasks.join_next().await {
        let (client, answer, latency) = ended??;
        clients.push(client);
        answers.push(answer);
        latencies.push(latency);
    }
    latencies.sort_unstable();
    Ok((clients, answers, latencies))
}

struct Answer {
    status: u16,
    /// The `detail` of the header `cache-status`.
    origin: Option<String>,
}

/// As much of an HTTP/1.1 client as the service needs: one connection, one request at a time.
struct Client {
    stream: BufReader<TcpStream>,
    host: SocketAddr,
}

impl Client {
    async fn connect(host: SocketAddr) -> Result<Self, crate::Error> {
        let stream = TcpStream::connect(host).await.map_err(|error| {
            format!("cannot open another connection (is the limit of open files too low?): {error}")
        })?;
        stream.set_nodelay(true)?;
        Ok(Client { stream: BufReader::new(stream), host })
    }

    async fn get(&mut self, path: &str) -> Result<Answer, crate::Error> {
        self.send("GET", path).await
    }

    async fn send(&mut self, method: &str, path: &str) -> Result<Answer, crate::Error> {
        let request = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\n\r\n", self.host);
        self.stream.write_all(request.as_bytes()).await?;
        let status = self.line().await?;
        let status = status.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or("no status")?;
        let (mut length, mut origin) = (0, None);
        loop {
            let line = self.line().await?;
            let Some((name, value)) = line.split_once(": ") else { break };
            match name {
                "content-length" => length = value.parse()?,
                "cache-status" => origin = value.split_once("detail=").map(|(_, detail)| detail.to_owned()),
                _ => {}
            }
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).await?;
        Ok(Answer { status, origin })
    }

    async fn line(&mut self) -> Result<String, crate::Error> {
        let mut line = String::new();
        if self.stream.read_line(&mut line).await? == 0 {
            return Err("the server has closed a connection".into());
        }
        line.truncate(line.trim_end().len());
        Ok(line)
    }
}

pub(crate) fn table(rows: &[Row]) -> String {
    let line = |cells: [String; 9]| {
        let [path, state, requests, queries, errors, p50, p99, max, origins] = cells;
        format!(
            "{path:<22} {state:<7} │ {requests:>8} {queries:>8} {errors:>7} │ {p50:>8} {p99:>8} {max:>8} │ {origins}"
        )
    };
    let head = ["request", "cache", "requests", "queries", "errors", "p50", "p99", "max", "answers"];
    let mut lines = vec![line(head.map(str::to_owned)), format!("{0:─<31}┼{0:─<27}┼{0:─<28}┼{0:─<26}", "")];
    for row in rows {
        let origins: Vec<_> = row.origins.iter().map(|(origin, n)| format!("{n} {origin}")).collect();
        lines.push(line([
            row.path.clone(),
            row.state.to_owned(),
            grouped(row.latencies.len() as u64),
            grouped(row.queries),
            grouped(row.errors as u64),
            human(percentile(&row.latencies, 50.0)),
            human(percentile(&row.latencies, 99.0)),
            human(percentile(&row.latencies, 100.0)),
            if origins.is_empty() { "-".to_owned() } else { origins.join(", ") },
        ]));
    }
    lines.join("\n")
}
