//! What can go wrong, as types a caller can match on.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Any error of a loader, boxed.
pub type BoxError = Box<dyn Error + Send + Sync + 'static>;

/// Why a load gave no value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LoadErrorKind {
    /// The loader returned an error; [`LoadError::source`](Error::source) gives it.
    Failed,
    /// The loader panicked, and there was nobody left to load.
    Panicked,
    /// The caller's own wait for somebody else's load came to its end; or the lease of an async load that was begun and polled by
    /// a thread.
    TimedOut,
    /// A limit of the cache was reached, so that the call neither loaded nor waited.
    Overloaded,
    /// The load waits, by way of others, for itself.
    Cycle,
    /// The call may not load, and nothing that it accepts is cached.
    NotCached,
    /// The source has no such key.
    Absent,
    /// A load of the key failed a short while ago; the next one starts when the back-off ends. Or the
    /// [breaker](crate::CacheBuilder::breaker) is open, since loads of many keys failed.
    BackingOff,
}

/// A load that gave no value: one error, shared by everybody who waited for that load.
///
/// Cloning it clones a pointer. The loader's own error is the [`source`](Error::source), and
/// [`downcast_ref`](Self::downcast_ref) gives it back as its type.
#[derive(Clone)]
pub struct LoadError(Arc<Inner>);

struct Inner {
    kind: LoadErrorKind,
    detail: Option<String>,
    source: Option<BoxError>,
}

impl LoadError {
    fn build(kind: LoadErrorKind, detail: Option<String>, source: Option<BoxError>) -> Self {
        Self(Arc::new(Inner { kind, detail, source }))
    }

    pub(crate) fn failed(error: impl Into<BoxError>) -> Self {
        Self::build(LoadErrorKind::Failed, None, Some(error.into()))
    }

    pub(crate) fn panicked() -> Self {
        Self::build(LoadErrorKind::Panicked, None, None)
    }

    pub(crate) fn timed_out(waited: Duration) -> Self {
        Self::build(LoadErrorKind::TimedOut, Some(format!("waited {waited:?} for it")), None)
    }

    pub(crate) fn cycle(path: String) -> Self {
        Self::build(LoadErrorKind::Cycle, Some(path), None)
    }

    pub(crate) fn not_cached() -> Self {
        Self::build(LoadErrorKind::NotCached, None, None)
    }

    pub(crate) fn no_loader() -> Self {
        let detail =
            "the cache has no attached loader: attach one with `CacheBuilder::loader`, or pass a closure";
        Self::build(LoadErrorKind::NotCached, Some(detail.into()), None)
    }

    pub(crate) fn frozen() -> Self {
        let detail = "the cache is frozen, and no load begins";
        Self::build(LoadErrorKind::NotCached, Some(detail.into()), None)
    }

    pub(crate) fn absent() -> Self {
        Self::build(LoadErrorKind::Absent, None, None)
    }

    /// `limit` is the setting that was reached.
    pub(crate) fn overloaded(limit: &str) -> Self {
        Self::build(LoadErrorKind::Overloaded, Some(format!("the limit `{limit}` is reached")), None)
    }

    /// The same failure, told to a caller who came while its back-off lasts.
    pub(crate) fn backing_off(cause: &Self, left: Duration) -> Self {
        let detail = format!("the last load failed, the next may start in {left:?}");
        Self::build(LoadErrorKind::BackingOff, Some(detail), Some(Box::new(cause.clone())))
    }

    /// The breaker is open, and the next load may go when this has passed.
    pub(crate) fn source_failing(left: Duration) -> Self {
        let detail = format!("the source of this cache is failing, the next probe may go in {left:?}");
        Self::build(LoadErrorKind::BackingOff, Some(detail), None)
    }

    /// What went wrong, to match on.
    #[must_use]
    pub fn kind(&self) -> LoadErrorKind {
        self.0.kind
    }

    /// The loader's own error, if there is one and it is an `E`. During a back-off this looks through to the
    /// error that caused it.
    #[must_use]
    pub fn downcast_ref<E: Error + 'static>(&self) -> Option<&E> {
        let source = self.0.source.as_deref()?;
        match source.downcast_ref::<E>() {
            Some(found) => Some(found),
            None => source.downcast_ref::<Self>().and_then(Self::downcast_ref),
        }
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0.kind {
            LoadErrorKind::Failed => "the load failed",
            LoadErrorKind::Panicked => "the loader panicked",
            LoadErrorKind::TimedOut => "the wait for the load timed out",
            LoadErrorKind::Overloaded => "too many loads or waiters",
            LoadErrorKind::Cycle => "the load waits for itself",
            LoadErrorKind::NotCached => "not cached",
            LoadErrorKind::Absent => "the source has no such key",
            LoadErrorKind::BackingOff => "backing off after failed loads",
        })?;
        match &self.0.detail {
            Some(detail) => write!(f, ": {detail}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadError")
            .field("kind", &self.0.kind)
            .field("detail", &self.0.detail)
            .field("source", &self.0.source)
            .finish()
    }
}

impl Error for LoadError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source.as_deref().map(|e| e as &(dyn Error + 'static))
    }
}

/// A setting that no cache can have: which one, what it was, and what it must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildError {
    setting: &'static str,
    value: String,
    rule: &'static str,
}

impl BuildError {
    pub(crate) fn new(setting: &'static str, value: String, rule: &'static str) -> Self {
        Self { setting, value, rule }
    }

    /// The builder's method that was given the value.
    #[must_use]
    pub fn setting(&self) -> &str {
        self.setting
    }

    /// The value, as `Debug` shows it.
    #[must_use]
    pub fn value(&self) -> &str {
        &self.value
    }

    /// What the value must be.
    #[must_use]
    pub fn rule(&self) -> &str {
        self.rule
    }
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is {}, but it must be {}", self.setting, self.value, self.rule)
    }
}

impl Error for BuildError {}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_loaders_error_is_found_again() {
        let failed = LoadError::failed(std::io::Error::other("boom"));
        assert_eq!(failed.kind(), LoadErrorKind::Failed);
        assert_eq!(failed.downcast_ref::<std::io::Error>().unwrap().to_string(), "boom");
        assert!(failed.downcast_ref::<fmt::Error>().is_none());
        let backing = LoadError::backing_off(&failed, Duration::from_secs(1));
        assert_eq!(backing.kind(), LoadErrorKind::BackingOff);
        assert!(backing.downcast_ref::<std::io::Error>().is_some());
        assert!(LoadError::not_cached().source().is_none());
    }

    #[test]
    fn a_build_error_names_setting_value_and_rule() {
        let e = BuildError::new("jitter", "2.0".into(), "from 0 to 1");
        assert_eq!(e.to_string(), "`jitter` is 2.0, but it must be from 0 to 1");
    }
}
