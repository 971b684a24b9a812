//! The command line: what it accepts, what it means, and the message for what it does not accept.

use crate::arguments::{number, split};
use serde::Serialize;
use std::ffi::OsString;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

pub(crate) const HELP: &str = "\
The same traffic on simulated time under seven policies, from a plain TTL to all that quell has.

Usage: cargo run --release --example policies -- [OPTIONS]

Options:
  --seconds N   how much traffic, in simulated seconds [10 to 86400, default: 600]
  --rate N      calls per second, at random moments [1 to 100000, default: 1000]
  --keys N      how many keys there are [1 to 1000000, default: 1000]
  --zipf X      how uneven their popularity is: the exponent of Zipf's law [0 to 3, default: 1.2]
  --ttl N       for how many seconds a value is served [1 to 3600, default: 30]
  --servers N   how many requests the source works on at one time [1 to 10000, default: 64]
  --seed N      which random traffic [default: 1]
  --chart PATH  where the SVG chart goes [default: policies.svg]
  --json        print the parameters and figures as one JSON object and nothing else on stdout
  --help        print this text

In the middle of the time the source answers nobody for one and a half TTLs, but at most for a quarter of the time.
`keep warm` and `all together` keep the hottest tenth of the keys warm, but 1000 at most.

The same seed gives the same figures, but for `XFetch` and `all together`: there the cache draws random numbers
of its own, and the figures differ a little from run to run.
";

/// More calls than this in all take too long, and too much memory.
const MOST_CALLS: u64 = 10_000_000;

/// What the command line asks for.
#[derive(Debug, PartialEq)]
pub(crate) enum Command {
    Help,
    Run(Options),
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Options {
    pub(crate) seconds: u64,
    pub(crate) rate: u32,
    pub(crate) keys: u32,
    pub(crate) zipf: f64,
    pub(crate) ttl: u64,
    pub(crate) servers: u32,
    pub(crate) seed: u64,
    #[serde(skip)]
    pub(crate) chart: PathBuf,
    #[serde(skip)]
    pub(crate) json: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            seconds: 600,
            rate: 1000,
            keys: 1000,
            zipf: 1.2,
            ttl: 30,
            servers: 64,
            seed: 1,
            chart: PathBuf::from("policies.svg"),
            json: false,
        }
    }
}

impl Options {
    pub(crate) fn length(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }

    pub(crate) fn ttl(&self) -> Duration {
        Duration::from_secs(self.ttl)
    }

    /// Between the cold start and the outage.
    pub(crate) fn peace(&self) -> Range<Duration> {
        self.ttl() / 2..self.outage().start
    }

    /// When the source answers nobody.
    pub(crate) fn outage(&self) -> Range<Duration> {
        let start = self.length() / 2;
        start..start + (self.ttl() * 3 / 2).min(self.length() / 4)
    }
}

/// Reads the arguments that follow the program's name; the error is a message for the user.
pub(crate) fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Command, String> {
    let mut options = Options::default();
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let (name, attached) = split(&argument);
        let mut value = || attached.clone().or_else(|| arguments.next());
        match name.as_str() {
            "--help" | "-h" | "--json" if attached.is_some() => return Err(format!("{name} takes no value")),
            "--help" | "-h" => return Ok(Command::Help),
            "--json" => options.json = true,
            "--seconds" => options.seconds = number(&name, value(), 10, 86_400)?,
            "--rate" => options.rate = number(&name, value(), 1, 100_000)?,
            "--keys" => options.keys = number(&name, value(), 1, 1_000_000)?,
            "--zipf" => options.zipf = exponent(&name, value())?,
            "--ttl" => options.ttl = number(&name, value(), 1, 3600)?,
            "--servers" => options.servers = number(&name, value(), 1, 10_000)?,
            "--seed" => options.seed = number(&name, value(), 0, u64::MAX)?,
            "--chart" => match value() {
                Some(path) if !path.is_empty() => options.chart = PathBuf::from(path),
                _ => return Err("--chart needs a path".to_owned()),
            },
            _ => return Err(format!("unknown option `{}`", argument.to_string_lossy())),
        }
    }
    if options.seconds * u64::from(options.rate) > MOST_CALLS {
        return Err(format!("--seconds times --rate may be {MOST_CALLS} calls at most"));
    }
    Ok(Command::Run(options))
}

fn exponent(name: &str, value: Option<OsString>) -> Result<f64, String> {
    let Some(value) = value else { return Err(format!("{name} needs a number")) };
    let text = value.to_string_lossy();
    match text.parse() {
        Ok(number) if (0.0..=3.0).contains(&number) => Ok(number),
        _ => Err(format!("{name} wants a number from 0 to 3, not `{text}`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::check_writable;

    fn parsed(line: &str) -> Result<Command, String> {
        parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn defaults_hold_without_arguments() {
        assert_eq!(parsed(""), Ok(Command::Run(Options::default())));
    }

    #[test]
    fn every_option_is_read_in_both_spellings() {
        let expected = Command::Run(Options {
            seconds: 60,
            rate: 50,
            keys: 7,
            zipf: 0.9,
            ttl: 5,
            servers: 2,
            seed: 99,
            chart: PathBuf::from("a.svg"),
            json: true,
        });
        let line =
            "--seconds 60 --rate 50 --keys 7 --zipf 0.9 --ttl 5 --servers 2 --seed 99 --chart a.svg --json";
        assert_eq!(parsed(line).as_ref(), Ok(&expected));
        let words: Vec<_> = line.split_whitespace().collect();
        let pairs = words[..16].chunks(2).map(|pair| OsString::from(pair.join("=")));
        assert_eq!(parse(pairs.chain([OsString::from("--json")])), Ok(expected));
        assert_eq!(parsed("--json --help"), Ok(Command::Help));
    }

    #[test]
    fn a_bad_option_is_named_in_the_message() {
        for (line, message) in [
            ("--second 3", "unknown option `--second`"),
            ("all", "unknown option `all`"),
            ("--seconds", "--seconds needs a number"),
            ("--seconds 9", "--seconds wants a whole number from 10 to 86400, not `9`"),
            ("--rate=0", "--rate wants a whole number from 1 to 100000, not `0`"),
            ("--keys many", "not `many`"),
            ("--zipf -1", "--zipf wants a number from 0 to 3, not `-1`"),
            ("--zipf NaN", "--zipf wants a number from 0 to 3, not `NaN`"),
            ("--zipf", "--zipf needs a number"),
            ("--ttl 0", "--ttl wants a whole number from 1 to 3600, not `0`"),
            ("--servers 99999999999", "not `99999999999`"),
            ("--seed 1.5", "not `1.5`"),
            ("--chart", "--chart needs a path"),
            ("--chart=", "--chart needs a path"),
            ("--json=yes", "--json takes no value"),
            ("--seconds 86400", "--seconds times --rate may be 10000000 calls at most"),
        ] {
            let error = parsed(line).expect_err(line);
            assert!(error.contains(message), "{line}: {error}");
        }
    }

    #[test]
    fn the_outage_is_in_the_middle_and_never_longer_than_a_quarter() {
        let outage = |seconds, ttl| {
            let Range { start, end } = Options { seconds, ttl, ..Options::default() }.outage();
            (start.as_secs_f64(), end.as_secs_f64())
        };
        assert_eq!(outage(600, 30), (300.0, 345.0));
        assert_eq!(outage(60, 3600), (30.0, 45.0));
    }

    #[test]
    fn the_check_for_the_chart_leaves_no_file() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("chart.svg");
        assert_eq!(check_writable(&path), Ok(()));
        assert!(!path.exists());
        let missing = directory.path().join("no/chart.svg");
        let error = check_writable(&missing).expect_err("no such directory");
        assert!(error.contains("no/chart.svg"), "{error}");
    }
}
