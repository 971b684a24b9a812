//! The progress bar: on stderr, and only where somebody watches.

use indicatif::{ProgressBar, ProgressStyle};
use std::time::{Duration, Instant};

/// How often the bar moves while the heartbeat beats.
const STEP: Duration = Duration::from_millis(100);

pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// A bar for work of about `planned` in all.
    pub(crate) fn new(planned: Duration) -> Self {
        let bar = ProgressBar::new(planned.as_millis() as u64);
        if let Ok(style) = ProgressStyle::with_template("{msg:32} {wide_bar} {percent:>3} %  {eta} left") {
            bar.set_style(style);
        }
        Progress(bar)
    }

    /// Says what is being done now.
    pub(crate) fn stage(&self, text: String) {
        self.0.set_message(text);
        self.0.tick();
    }

    pub(crate) fn advance(&self, by: Duration) {
        self.0.inc(by.as_millis() as u64);
    }

    /// Waits until `end`, moving the bar.
    pub(crate) fn wait_until(&self, end: Instant) {
        loop {
            let rest = end.saturating_duration_since(Instant::now()).min(STEP);
            if rest.is_zero() {
                break;
            }
            std::thread::sleep(rest);
            self.advance(rest);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
