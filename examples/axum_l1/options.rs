//! The command line: what it accepts, what it means, and the message for what it does not accept.

use std::time::Duration;

pub(crate) const HELP: &str = "\
An HTTP service in front of a slow SQLite database, with quell between them.

Usage: cargo run --release --features tokio --example axum_l1 -- [OPTIONS]

Options:
  --port N       where on 127.0.0.1 it listens; 0: any free port [default: 3000; with --load 0]
  --query-ms N   what a query takes [0 to 10000, default: 50]
  --load         send every strategy a burst of requests for one key, print a table, and end
  --requests N   how many requests a burst has, each on a connection of its own [1 to 10000, default: 1000]
  --help         print this text
";

#[derive(Debug, PartialEq)]
pub(crate) enum Command {
    Help,
    Run(Options),
}

#[derive(Debug, PartialEq)]
pub(crate) struct Options {
    pub(crate) port: u16,
    pub(crate) query: Duration,
    /// The size of a burst, if there is to be one.
    pub(crate) load: Option<usize>,
}

/// Reads the arguments that follow the program's name; the error is a message for the user.
pub(crate) fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Command, String> {
    let (mut port, mut query_ms, mut load, mut requests) = (None, 50, false, 1_000);
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let (name, attached) = match argument.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (argument.as_str(), None),
        };
        match name {
            "--help" | "-h" | "--load" if attached.is_some() => return Err(format!("{name} takes no value")),
            "--help" | "-h" => return Ok(Command::Help),
            "--load" => load = true,
            "--port" => port = Some(number(name, attached.or_else(|| arguments.next()), 0, u16::MAX)?),
            "--query-ms" => query_ms = number(name, attached.or_else(|| arguments.next()), 0, 10_000)?,
            "--requests" => requests = number(name, attached.or_else(|| arguments.next()), 1, 10_000)?,
            _ => return Err(format!("unknown option `{argument}`")),
        }
    }
    Ok(Command::Run(Options {
        port: port.unwrap_or(if load { 0 } else { 3000 }),
        query: Duration::from_millis(query_ms.into()),
        load: load.then_some(requests.into()),
    }))
}

fn number(name: &str, value: Option<String>, least: u16, most: u16) -> Result<u16, String> {
    let Some(text) = value else { return Err(format!("{name} needs a number")) };
    match text.parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(format!("{name} wants a whole number from {least} to {most}, not `{text}`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command, String> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn every_option_is_read_in_both_spellings() {
        let options =
            |port, ms, load| Ok(Command::Run(Options { port, query: Duration::from_millis(ms), load }));
        assert_eq!(parsed(""), options(3000, 50, None));
        assert_eq!(parsed("--load"), options(0, 50, Some(1_000)));
        assert_eq!(parsed("--load --requests 5 --port 81 --query-ms 9"), options(81, 9, Some(5)));
        assert_eq!(parsed("--port=0 --query-ms=0"), options(0, 0, None));
        assert_eq!(parsed("--load --help"), Ok(Command::Help));
    }

    #[test]
    fn a_bad_option_is_named_in_the_message() {
        for (line, message) in [
            ("--ports 3", "unknown option `--ports`"),
            ("--port", "--port needs a number"),
            ("--port 65536", "--port wants a whole number from 0 to 65535, not `65536`"),
            ("--requests=0", "--requests wants a whole number from 1 to 10000, not `0`"),
            ("--load=9", "--load takes no value"),
        ] {
            assert_eq!(parsed(line), Err(message.to_owned()), "{line}");
        }
    }
}
