//! The command line: what it accepts, what it means, and the message for what it does not accept.

use crate::arguments::{number, split};
use std::ffi::OsString;
use std::path::PathBuf;

pub(crate) const HELP: &str = "\
One hot key in front of a real database, with and without single flight.

Usage: cargo run --release --example stampede -- [OPTIONS]

Options:
  --seconds N    how long the heartbeat watches each of the four strategies [1 to 3600, default: 12]
                 (an answer is good for 2 s: fewer than 3 show no expiry)
  --threads N    threads that ask [1 to 256, default: 20 in the cold burst, 4 in the heartbeat]
  --chart PATH   where the SVG chart goes [default: stampede.svg]
  --json         print the figures as one JSON object and nothing else on stdout
  --help         print this text
";

/// What the command line asks for.
#[derive(Debug, PartialEq)]
pub(crate) enum Command {
    Help,
    Run(Options),
}

#[derive(Debug, PartialEq)]
pub(crate) struct Options {
    pub(crate) seconds: u64,
    pub(crate) burst_threads: usize,
    pub(crate) heartbeat_threads: usize,
    pub(crate) chart: PathBuf,
    pub(crate) json: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            seconds: 12,
            burst_threads: 20,
            heartbeat_threads: 4,
            chart: PathBuf::from("stampede.svg"),
            json: false,
        }
    }
}

/// Reads the arguments that follow the program's name; the error is a message for the user.
pub(crate) fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Command, String> {
    let mut options = Options::default();
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let (name, attached) = split(&argument);
        match name.as_str() {
            "--help" | "-h" | "--json" if attached.is_some() => return Err(format!("{name} takes no value")),
            "--help" | "-h" => return Ok(Command::Help),
            "--json" => options.json = true,
            "--seconds" => options.seconds = number(&name, attached.or_else(|| arguments.next()), 1, 3600)?,
            "--threads" => {
                let threads = number(&name, attached.or_else(|| arguments.next()), 1, 256)?;
                options.burst_threads = threads as usize;
                options.heartbeat_threads = threads as usize;
            }
            "--chart" => match attached.or_else(|| arguments.next()) {
                Some(path) if !path.is_empty() => options.chart = PathBuf::from(path),
                _ => return Err("--chart needs a path".to_owned()),
            },
            _ => return Err(format!("unknown option `{}`", argument.to_string_lossy())),
        }
    }
    Ok(Command::Run(options))
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
            seconds: 3,
            burst_threads: 8,
            heartbeat_threads: 8,
            chart: PathBuf::from("a.svg"),
            json: true,
        });
        assert_eq!(parsed("--seconds 3 --threads 8 --chart a.svg --json").as_ref(), Ok(&expected));
        assert_eq!(parsed("--json --chart=a.svg --threads=8 --seconds=3").as_ref(), Ok(&expected));
        assert_eq!(parsed("--json --help"), Ok(Command::Help));
    }

    #[test]
    fn a_bad_option_is_named_in_the_message() {
        for (line, message) in [
            ("--second 3", "unknown option `--second`"),
            ("burst", "unknown option `burst`"),
            ("--seconds", "--seconds needs a number"),
            ("--seconds 0", "--seconds wants a whole number from 1 to 3600, not `0`"),
            ("--threads -1", "--threads wants a whole number from 1 to 256, not `-1`"),
            ("--threads 99999999999999999999", "not `99999999999999999999`"),
            ("--threads=many", "not `many`"),
            ("--chart", "--chart needs a path"),
            ("--chart=", "--chart needs a path"),
            ("--json=yes", "--json takes no value"),
        ] {
            let error = parsed(line).expect_err(line);
            assert!(error.contains(message), "{line}: {error}");
        }
    }

    #[test]
    fn the_check_for_the_chart_leaves_no_file() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let chart = folder.path().join("chart.svg");
        assert_eq!(check_writable(&chart), Ok(()));
        assert!(!chart.exists());
        assert!(check_writable(folder.path()).is_err());
        assert!(check_writable(&folder.path().join("missing/chart.svg")).is_err());
    }
}
