//! What the run found, as a table for people and as JSON for programs.

use crate::latency::{grouped, human};
use crate::options::Options;
use crate::policy::Policy;
use crate::simulate::{Figures, Run};
use crate::source::{FASTEST, TIME_OUT};
use serde::Serialize;
use std::fmt::Display;
use std::time::Duration;

const MEANINGS: &str = "\
loads: requests to the source; most: at one time, between the cold start and the outage, and ever; one key: of any one.
hard misses: calls that loaded or waited for a load; p99 before: of the calls between the cold start and the outage.
age: of what was served, since the source gave it. stale, grace: answers past the soft TTL, and past the TTL.
errors: calls without an answer; last: how long after the outage the last of them was.";

pub(crate) struct Findings {
    /// In the order of [`Policy::ALL`].
    pub(crate) runs: Vec<Run>,
}

#[derive(Serialize)]
struct Json<'a> {
    parameters: Parameters<'a>,
    policies: Vec<&'a Figures>,
}

#[derive(Serialize)]
struct Parameters<'a> {
    #[serde(flatten)]
    options: &'a Options,
    outage_from_s: f64,
    outage_to_s: f64,
    source_fastest_ms: f64,
    source_time_out_ms: f64,
}

impl Findings {
    pub(crate) fn table(&self, options: &Options) -> String {
        let outage = options.outage();
        let calls = self.runs.first().map_or(0, |run| run.figures.calls);
        let mut lines = vec![
            format!(
                "{} calls in {} s for {} keys, TTL {} s\na source with {} servers, at best {}, time-out {}, silent from {} s to {} s",
                grouped(calls),
                options.seconds,
                grouped(options.keys.into()),
                options.ttl,
                options.servers,
                brief(FASTEST),
                brief(TIME_OUT),
                outage.start.as_secs_f64(),
                outage.end.as_secs_f64(),
            ),
            String::new(),
            row("", ["", "most", "most", "one", "hard", "p99", "p99", "max", "mean", "p99", "", "", "", ""]),
            row(
                "policy",
                [
                    "loads", "before", "ever", "key", "misses", "before", "wait", "wait", "age", "age",
                    "stale", "grace", "errors", "last",
                ],
            ),
            format!("{0:─<14}┼{0:─<27}┼{0:─<30}┼{0:─<15}┼{0:─<29}", ""),
        ];
        for Run { policy, figures, .. } in &self.runs {
            let count = |number: u32| grouped(number.into());
            let cells = [
                grouped(figures.loads),
                count(figures.most_concurrent_loads_before_outage),
                count(figures.most_concurrent_loads),
                count(figures.most_concurrent_loads_of_one_key),
                grouped(figures.hard_misses),
                millis(figures.p99_wait_before_outage_ms),
                millis(figures.p99_wait_ms),
                millis(figures.max_wait_ms),
                millis(figures.mean_age_ms),
                millis(figures.p99_age_ms),
                grouped(figures.stale_answers),
                grouped(figures.grace_answers),
                grouped(figures.errors),
                millis(figures.last_error_after_outage_s * 1e3),
            ];
            lines.push(row(policy.name(), cells));
        }
        lines.push(String::new());
        for policy in Policy::ALL {
            lines.push(format!("{:<13}  {}", policy.name(), policy.summary()));
        }
        lines.push(String::new());
        lines.push(MEANINGS.to_owned());
        lines.join("\n")
    }

    pub(crate) fn json(&self, options: &Options) -> Result<String, serde_json::Error> {
        let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
        let parameters = Parameters {
            options,
            outage_from_s: options.outage().start.as_secs_f64(),
            outage_to_s: options.outage().end.as_secs_f64(),
            source_fastest_ms: ms(FASTEST),
            source_time_out_ms: ms(TIME_OUT),
        };
        let policies = self.runs.iter().map(|run| &run.figures).collect();
        serde_json::to_string_pretty(&Json { parameters, policies })
    }
}

/// Milliseconds as a person reads them.
pub(crate) fn millis(millis: f64) -> String {
    if millis == 0.0 { "0".to_owned() } else { human(Duration::from_secs_f64(millis / 1e3)) }
}

/// `human` without decimals that say nothing.
pub(crate) fn brief(duration: Duration) -> String {
    human(duration).replace(".00 ", " ").replace(".0 ", " ")
}

/// A line of the table: the policy, four cells of the source, four of the waits, two of the ages, four of the answers.
fn row<T: Display>(name: &str, cells: [T; 14]) -> String {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n] = cells;
    format!(
        "{name:<13} │ {a:>7} {b:>6} {c:>5} {d:>4} │ {e:>7} {f:>6} {g:>6} {h:>6} │ {i:>6} {j:>6} │ {k:>6} {l:>6} {m:>7} {n:>6}"
    )
    .trim_end()
    .to_owned()
}
