//! A stampede on a real database, with and without single flight: `cargo run --release --example stampede`.
//!
//! Two acts, each with three caches that people write by hand and with quell. In the *cold burst* many
//! threads ask an empty cache for one report at the same moment. In the *heartbeat* one hot report expires
//! every two seconds under steady load. The source is a SQLite file of some 200,000 sales and an aggregate
//! over them that is calibrated at start; nothing sleeps in the query.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the example is a user of the library: it reads the wall clock and has no model to run under"
)]

mod arguments;
mod burst;
mod chart;
mod console;
mod database;
mod drawing;
mod heartbeat;
mod latency;
mod options;
mod progress;
mod report;
mod source;
mod strategy;

use crate::arguments::check_writable;
use crate::console::{complain, finish, misuse, say};
use crate::database::Database;
use crate::latency::{grouped, human};
use crate::options::{Command, HELP, Options};
use crate::progress::Progress;
use crate::report::Findings;
use crate::strategy::Kind;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// Connections beyond one per asking thread: quell refreshes on threads of its own.
const SPARE_CONNECTIONS: usize = 4;
/// What the bar reckons for the database and the calibration, and for one burst.
const PREPARATION: Duration = Duration::from_secs(3);
const ONE_BURST: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let options = match options::parse(std::env::args_os().skip(1)) {
        Ok(Command::Help) => return finish(say(HELP.trim_end())),
        Ok(Command::Run(options)) => options,
        Err(message) => return misuse(&format!("{message}\nTry --help.")),
    };
    if let Err(message) = check_writable(&options.chart) {
        return misuse(&message);
    }
    finish(run(&options))
}

fn run(options: &Options) -> Result<(), Error> {
    let findings = measure(options)?;
    let chart = options.chart.display();
    std::fs::write(&options.chart, chart::draw(&findings, options)?)
        .map_err(|error| format!("cannot write the chart to `{chart}`: {error}"))?;
    if options.json {
        say(&findings.json())?;
        complain(&format!("chart: {chart}"));
        return Ok(());
    }
    say(&format!(
        "One report in front of SQLite: {} rows, the query takes {} alone, {} cores\n\n{}\n\nchart: {chart}",
        grouped(database::ROWS.into()),
        human(findings.alone),
        std::thread::available_parallelism()?,
        findings.table(options),
    ))
}

fn measure(options: &Options) -> Result<Findings, Error> {
    let length = Duration::from_secs(options.seconds);
    let progress = Progress::new(PREPARATION + (ONE_BURST + length) * Kind::ALL.len() as u32);

    progress.stage(format!("database: {} rows", grouped(database::ROWS.into())));
    let connections = options.burst_threads.max(options.heartbeat_threads) + SPARE_CONNECTIONS;
    let mut database =
        Database::create(connections).map_err(|error| format!("cannot make the database: {error}"))?;
    progress.stage("database: sizing the query".to_owned());
    let alone = database.calibrate()?;
    let database = Arc::new(database);
    progress.advance(PREPARATION);

    let mut bursts = Vec::new();
    for kind in Kind::ALL {
        progress.stage(format!("cold burst: {}", kind.name()));
        bursts.push((kind, burst::run(kind, &database, options.burst_threads)?));
        progress.advance(ONE_BURST);
    }
    let mut heartbeats = Vec::new();
    for kind in Kind::ALL {
        progress.stage(format!("heartbeat: {}", kind.name()));
        heartbeats.push(heartbeat::run(kind, &database, options.heartbeat_threads, length, &progress)?);
    }
    Ok(Findings { alone, bursts, heartbeats })
}
