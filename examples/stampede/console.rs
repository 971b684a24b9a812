//! What a program says, and how it ends.

use crate::Error;
use std::io::Write;
use std::process::ExitCode;

const NAME: &str = env!("CARGO_CRATE_NAME");

pub(crate) fn say(text: &str) -> Result<(), Error> {
    writeln!(std::io::stdout(), "{text}").map_err(|error| format!("cannot print to stdout: {error}").into())
}

/// Writes to stderr; nobody is left to tell when that fails.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

pub(crate) fn misuse(message: &str) -> ExitCode {
    complain(&format!("{NAME}: {message}"));
    ExitCode::from(2)
}

pub(crate) fn finish(outcome: Result<(), Error>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("{NAME}: {error}"));
            let mut cause = error.source();
            while let Some(error) = cause {
                complain(&format!("  because: {error}"));
                cause = error.source();
            }
            ExitCode::FAILURE
        }
    }
}
