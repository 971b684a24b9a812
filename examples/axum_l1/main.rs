//! An HTTP service in front of a slow database, with quell between them and one path per strategy:
//! `cargo run --release --features tokio --example axum_l1`, then `curl -i localhost:3000/stale/7`. The path `/` lists the
//! others.
//!
//! With `-- --load` it sends itself bursts of a thousand requests for one key, and prints what each strategy made of them.
//!
//! The database is a temporary SQLite file with a client that blocks; each query takes 50 ms. `source` has the ways to run
//! it under tokio, `service` the strategies, `reply` the mapping from quell's errors to HTTP's.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the example is a user of the library: it reads the wall clock and has no model to run under"
)]

#[path = "../stampede/console.rs"]
mod console;
mod database;
#[path = "../stampede/latency.rs"]
mod latency;
mod load;
mod options;
mod reply;
mod service;
mod source;
#[cfg(test)]
mod tests;

use crate::console::{complain, finish, misuse, say};
use crate::database::{Database, Pace};
use crate::options::{Command, HELP, Options};
use crate::service::{Service, TTL};
use axum::Router;
use axum::serve::ListenerExt;
use std::future::pending;
use std::net::Ipv4Addr;
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// How long a query waits for a connection: longer than a thousand queries take on eight.
const PATIENCE: Duration = Duration::from_secs(30);
/// What the load waits for beyond a TTL, which may be over by a tick.
const AFTER_TTL: Duration = Duration::from_millis(100);
/// How long requests may go on after the signal to stop, and then queries.
const LAST_REQUESTS: Duration = Duration::from_secs(10);
const LAST_QUERIES: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let options = match options::parse(std::env::args().skip(1)) {
        Ok(Command::Help) => return finish(say(HELP.trim_end())),
        Ok(Command::Run(options)) => options,
        Err(message) => return misuse(&format!("{message}\nTry --help.")),
    };
    finish(run(&options))
}

fn run(options: &Options) -> Result<(), Error> {
    raise_file_limit();
    let database = Database::create(Pace { query: options.query, patience: PATIENCE })
        .map_err(|error| format!("cannot make the database: {error}"))?;
    let runtime = Runtime::new()?;
    let service = Service::new(&database, runtime.handle(), None)?;
    let ended = runtime.block_on(async {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, options.port))
            .await
            .map_err(|error| format!("cannot listen on port {}: {error}", options.port))?;
        let address = listener.local_addr()?;
        say(&format!("listening on http://{address}"))?;
        let router = service.clone().router();
        let Some(requests) = options.load else {
            return serve(listener, router, signal()).await;
        };
        let expire = async || tokio::time::sleep(TTL + AFTER_TTL).await;
        let load = load::run(address, &service, requests, expire, |what| complain(&format!("load: {what}")));
        tokio::select! {
            rows = load => say(&format!("\n{}", load::table(&rows?))),
            served = serve(listener, router, signal()) => served.and(Err("stopped before the load was over".into())),
        }
    });
    runtime.shutdown_timeout(LAST_QUERIES);
    ended
}

/// Serves until `stop` is ready, and the requests that are under way then to their ends.
async fn serve(listener: TcpListener, router: Router, stop: impl Future<Output = ()>) -> Result<(), Error> {
    let listener = listener.tap_io(|stream| {
        // Without it the answers are late; they are right all the same.
        let _ = stream.set_nodelay(true);
    });
    let (serving, stopping) = oneshot::channel::<()>();
    let server = axum::serve(listener, router).with_graceful_shutdown(async {
        // Ends when the other half is dropped.
        let _ = stopping.await;
    });
    let mut server = pin!(server.into_future());
    tokio::select! {
        served = &mut server => return Ok(served?),
        () = stop => drop(serving),
    }
    match tokio::time::timeout(LAST_REQUESTS, server).await {
        Ok(served) => Ok(served?),
        Err(_) => Err(format!("some requests have not ended in {LAST_REQUESTS:?}").into()),
    }
}

/// Ready when the process is told to end. Where that can't be listened for, it ends at once, by the system's own hand.
async fn signal() {
    let interrupt = async {
        if let Err(error) = tokio::signal::ctrl_c().await {
            complain(&format!("axum_l1: cannot listen for Ctrl-C: {error}"));
            pending::<()>().await;
        }
    };
    tokio::select! { () = interrupt => {}, () = terminate() => {} }
}

#[cfg(unix)]
async fn terminate() {
    use tokio::signal::unix::{SignalKind, signal};
    match signal(SignalKind::terminate()) {
        Ok(mut signal) => {
            signal.recv().await;
        }
        Err(error) => {
            complain(&format!("axum_l1: cannot listen for SIGTERM: {error}"));
            pending().await
        }
    }
}

#[cfg(not(unix))]
async fn terminate() {
    pending().await
}

/// A thousand connections have two thousand ends here, and the usual limit is 1,024. If it stays, some connection fails.
#[cfg(unix)]
fn raise_file_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}

#[cfg(not(unix))]
fn raise_file_limit() {}
