//! The policies against cache stampedes, compared on simulated time: `cargo run --release --example policies`.
//!
//! The same traffic (Poisson arrivals, keys by Zipf's law) meets a plain TTL, jitter, single flight, XFetch, a soft TTL, hot
//! keys that are kept warm, and all of it together, in front of a source with few servers, a heavy tail of latencies, and an
//! outage in the middle. Ten minutes of traffic take seconds: the caches are real, and their clock is moved by hand.
//!
//! `world` has the time and the tasks, `traffic` the calls, `source` what they want, and `policy` how they are answered.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the example is a user of the library, and has no model to run under"
)]

#[path = "../stampede/arguments.rs"]
mod arguments;
mod chart;
#[path = "../stampede/console.rs"]
mod console;
#[path = "../stampede/drawing.rs"]
mod drawing;
#[path = "../stampede/latency.rs"]
mod latency;
mod options;
mod policy;
mod report;
mod simulate;
mod source;
#[cfg(test)]
mod tests;
mod traffic;
mod world;

use crate::arguments::check_writable;
use crate::console::{complain, finish, misuse, say};
use crate::options::{Command, HELP, Options};
use crate::policy::Policy;
use crate::report::Findings;
use indicatif::{ProgressBar, ProgressStyle};
use std::process::ExitCode;
use std::thread;

pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

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
    let findings = simulate(options)?;
    let chart = options.chart.display();
    std::fs::write(&options.chart, chart::draw(&findings, options)?)
        .map_err(|error| format!("cannot write the chart to `{chart}`: {error}"))?;
    if options.json {
        say(&findings.json(options)?)?;
        complain(&format!("chart: {chart}"));
        return Ok(());
    }
    say(&format!("{}\n\nchart: {chart}", findings.table(options)))
}

/// One world for each policy, each on a thread of its own.
fn simulate(options: &Options) -> Result<Findings, Error> {
    let bar = ProgressBar::new(options.seconds * Policy::ALL.len() as u64);
    bar.set_style(ProgressStyle::with_template("simulated seconds {wide_bar} {percent:>3} %  {eta} left")?);
    let run = &|policy| simulate::run(policy, options, || bar.inc(1));
    let runs = thread::scope(|scope| {
        let begin = |policy| thread::Builder::new().spawn_scoped(scope, move || run(policy));
        let end = |thread: std::io::Result<thread::ScopedJoinHandle<'_, _>>| {
            thread?.join().map_err(|_| "a simulation panicked")?
        };
        Policy::ALL.map(begin).into_iter().map(end).collect::<Result<_, Error>>()
    });
    bar.finish_and_clear();
    Ok(Findings { runs: runs? })
}
