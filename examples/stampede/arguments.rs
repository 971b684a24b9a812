//! What the command lines have in common: names, values, and a file to write to.

use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::path::Path;
use std::str::FromStr;

/// Splits `--name=value`; a value that is not UTF-8 can only follow as an argument of its own.
pub(crate) fn split(argument: &OsStr) -> (String, Option<OsString>) {
    let text = argument.to_string_lossy();
    match text.split_once('=') {
        Some((name, value)) if argument.to_str().is_some() => (name.to_owned(), Some(value.into())),
        _ => (text.into_owned(), None),
    }
}

pub(crate) fn number<T>(name: &str, value: Option<OsString>, least: T, most: T) -> Result<T, String>
where
    T: FromStr + PartialOrd + Display,
{
    let Some(value) = value else { return Err(format!("{name} needs a number")) };
    let text = value.to_string_lossy();
    match text.parse() {
        Ok(number) if (&least..=&most).contains(&&number) => Ok(number),
        _ => Err(format!("{name} wants a whole number from {least} to {most}, not `{text}`")),
    }
}

/// Finds out before the run whether the chart can be written after it, and leaves no file behind.
pub(crate) fn check_writable(path: &Path) -> Result<(), String> {
    let created = OpenOptions::new().write(true).create_new(true).open(path);
    let outcome = match created {
        Ok(_) => std::fs::remove_file(path),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            OpenOptions::new().write(true).open(path).map(drop)
        }
        Err(error) => Err(error),
    };
    outcome.map_err(|error| format!("cannot write the chart to `{}`: {error}", path.display()))
}
