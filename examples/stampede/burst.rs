//! Cold burst: many threads ask an empty cache for one key at the same moment.

use crate::database::Database;
use crate::source::Source;
use crate::strategy::Kind;
use std::collections::HashSet;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const REGION: u32 = 1;
/// From the first thread's start to the moment at which all of them ask.
const LEAD_IN: Duration = Duration::from_millis(50);

pub(crate) struct Burst {
    /// Queries that reached the database.
    pub(crate) queries: usize,
    /// Different query executions whose answers the callers hold.
    pub(crate) distinct: usize,
    /// The wait of the slowest caller.
    pub(crate) slowest: Duration,
}

pub(crate) fn run(kind: Kind, database: &Arc<Database>, callers: usize) -> Result<Burst, crate::Error> {
    let source = Source::new(database);
    let strategy = kind.build(&source);
    let start = Instant::now() + LEAD_IN;
    let ask = || {
        thread::sleep(start.saturating_duration_since(Instant::now()));
        let asked = Instant::now();
        strategy.get(REGION).map(|report| (report, asked.elapsed()))
    };

    let answers = thread::scope(|scope| {
        let mut threads = Vec::with_capacity(callers);
        for _ in 0..callers {
            threads.push(thread::Builder::new().spawn_scoped(scope, ask)?);
        }
        let answers = threads.into_iter().map(|thread| thread.join().map_err(|_| "a caller panicked")?);
        answers.collect::<Result<Vec<_>, crate::Error>>()
    })?;

    if answers.windows(2).any(|pair| pair[0].0.lines != pair[1].0.lines) {
        return Err("two queries for the same report gave different figures".into());
    }
    drop(strategy);
    Ok(Burst {
        queries: source.settled_log()?.len(),
        distinct: answers.iter().map(|(report, _)| report.query).collect::<HashSet<_>>().len(),
        slowest: answers.iter().map(|(_, waited)| *waited).max().unwrap_or_default(),
    })
}
