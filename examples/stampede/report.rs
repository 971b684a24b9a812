//! What the run found, as a table for people and as JSON for programs.

use crate::burst::Burst;
use crate::heartbeat::{Heartbeat, REQUESTS_PER_SECOND};
use crate::latency::{grouped, human};
use crate::options::Options;
use crate::strategy::{Kind, SOFT_TTL, TTL};
use std::fmt::Write;
use std::time::Duration;

const MEANINGS: &str = "\
queries: that reached the database; distinct: different queries whose answers the callers got;
at once: most queries of the key running together; latency counts from when a request was due.";

/// Both acts, strategy by strategy in the order of [`Kind::ALL`].
pub(crate) struct Findings {
    /// What the query takes when nothing else runs.
    pub(crate) alone: Duration,
    pub(crate) bursts: Vec<(Kind, Burst)>,
    pub(crate) heartbeats: Vec<Heartbeat>,
}

impl Findings {
    pub(crate) fn table(&self, options: &Options) -> String {
        let callers = match options.burst_threads {
            1 => "1 caller".to_owned(),
            many => format!("{many} callers"),
        };
        let threads = match options.heartbeat_threads {
            1 => "1 thread".to_owned(),
            many => format!("{many} threads"),
        };
        let burst = format!("cold burst, {callers}");
        let heartbeat = format!(
            "heartbeat, {threads}, {} requests/s, {} s, TTL {} s (quell: soft {} s)",
            grouped(REQUESTS_PER_SECOND.into()),
            options.seconds,
            TTL.as_secs_f64(),
            SOFT_TTL.as_secs_f64(),
        );
        let columns = ["queries", "distinct", "slowest", "queries", "at once", "p50", "p99", "max", "stale"];
        let mut lines = vec![
            format!("{:<8} │ {burst:<29} │ {heartbeat}", ""),
            row("strategy", columns.map(str::to_owned)),
            format!("{0:─<9}┼{0:─<31}┼{0:─<62}", ""),
        ];
        for ((kind, burst), beat) in self.bursts.iter().zip(&self.heartbeats) {
            let cells = [
                burst.queries.to_string(),
                burst.distinct.to_string(),
                human(burst.slowest),
                beat.queries.len().to_string(),
                beat.most_at_once.to_string(),
                human(beat.p50),
                human(beat.p99),
                human(beat.max),
                grouped(beat.stale),
            ];
            lines.push(row(kind.name(), cells));
        }
        lines.push(String::new());
        for kind in Kind::ALL {
            lines.push(format!("{:<8}   {}", kind.name(), kind.summary()));
        }
        lines.push(String::new());
        lines.push(MEANINGS.to_owned());
        lines.join("\n")
    }

    pub(crate) fn json(&self) -> String {
        let bursts = self.bursts.iter().map(|(kind, burst)| {
            format!(
                r#""{}": {{"queries": {}, "distinct": {}, "max_ms": {:.3}}}"#,
                kind.name(),
                burst.queries,
                burst.distinct,
                burst.slowest.as_secs_f64() * 1e3
            )
        });
        let heartbeats = self.heartbeats.iter().map(|beat| {
            let micros = |duration: Duration| duration.as_secs_f64() * 1e6;
            let mut text = format!(r#""{}": {{"queries": {}"#, beat.kind.name(), beat.queries.len());
            let _ = write!(text, r#", "max_concurrent": {}"#, beat.most_at_once);
            for (name, value) in [("p50_us", beat.p50), ("p99_us", beat.p99), ("max_us", beat.max)] {
                let _ = write!(text, r#", "{name}": {:.3}"#, micros(value));
            }
            let _ = write!(text, r#", "stale": {}}}"#, beat.stale);
            text
        });
        format!(
            r#"{{"burst": {{{}}}, "heartbeat": {{{}}}}}"#,
            bursts.collect::<Vec<_>>().join(", "),
            heartbeats.collect::<Vec<_>>().join(", ")
        )
    }
}

/// A line of the table: the strategy, three cells of the burst, six of the heartbeat.
fn row(name: &str, cells: [String; 9]) -> String {
    let [a, b, c, d, e, f, g, h, i] = cells;
    format!("{name:<8} │ {a:>8} {b:>9} {c:>10} │ {d:>8} {e:>9} {f:>10} {g:>10} {h:>10} {i:>8}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn the_json_has_the_documented_shape() {
        let findings = Findings {
            alone: Duration::from_millis(175),
            bursts: vec![(
                Kind::Quell,
                Burst { queries: 1, distinct: 1, slowest: Duration::from_micros(175_250) },
            )],
            heartbeats: vec![Heartbeat {
                kind: Kind::Quell,
                start: Instant::now(),
                samples: Vec::new(),
                queries: Vec::new(),
                most_at_once: 1,
                p50: Duration::from_nanos(640),
                p99: Duration::from_micros(8),
                max: Duration::from_micros(95),
                stale: 2381,
            }],
        };
        assert_eq!(
            findings.json(),
            concat!(
                r#"{"burst": {"quell": {"queries": 1, "distinct": 1, "max_ms": 175.250}}, "#,
                r#""heartbeat": {"quell": {"queries": 0, "max_concurrent": 1, "p50_us": 0.640, "#,
                r#""p99_us": 8.000, "max_us": 95.000, "stale": 2381}}}"#
            )
        );
    }
}
