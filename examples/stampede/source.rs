//! The source of truth as one strategy sees it: the database, and a log of every query that reached it.

use crate::database::{Database, Line};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a query answers, with the number of the execution that produced it.
pub(crate) struct Report {
    pub(crate) query: usize,
    pub(crate) lines: Vec<Line>,
}

/// When one query ran.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Query {
    pub(crate) began: Instant,
    pub(crate) ended: Option<Instant>,
}

/// A database with a log of its own, so that no strategy is charged for another's queries.
pub(crate) struct Source {
    database: Arc<Database>,
    log: Mutex<Vec<Query>>,
}

impl Source {
    pub(crate) fn new(database: &Arc<Database>) -> Arc<Self> {
        Arc::new(Source { database: Arc::clone(database), log: Mutex::new(Vec::new()) })
    }

    /// Runs the query; every call of this method is one query that reached the database.
    pub(crate) fn load(&self, region: u32) -> Result<Arc<Report>, rusqlite::Error> {
        let query = {
            let mut log = self.log.lock();
            log.push(Query { began: Instant::now(), ended: None });
            log.len() - 1
        };
        let lines = self.database.best_quarters(region);
        self.log.lock()[query].ended = Some(Instant::now());
        Ok(Arc::new(Report { query, lines: lines? }))
    }

    /// The queries so far, once none is running any more.
    pub(crate) fn settled_log(&self) -> Result<Vec<Query>, crate::Error> {
        let asked = Instant::now();
        loop {
            let log = self.log.lock().clone();
            if log.iter().all(|query| query.ended.is_some()) {
                return Ok(log);
            }
            if asked.elapsed() > Duration::from_secs(60) {
                return Err("a query has been running for a minute after everybody left".into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Gives each query, in the order they began, the lowest lane that is free when it begins.
///
/// The number of lanes is the largest number of queries that ran at once.
pub(crate) fn lanes(queries: &[Query]) -> Vec<usize> {
    let mut busy: Vec<Option<Instant>> = Vec::new();
    let mut taken = Vec::with_capacity(queries.len());
    for query in queries {
        let free = busy.iter().position(|until| until.is_some_and(|until| until <= query.began));
        let lane = free.unwrap_or_else(|| {
            busy.push(None);
            busy.len() - 1
        });
        busy[lane] = query.ended;
        taken.push(lane);
    }
    taken
}

/// The largest number of `queries` that ran at once.
pub(crate) fn most_at_once(queries: &[Query]) -> usize {
    lanes(queries).into_iter().max().map_or(0, |lane| lane + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_takes_the_lowest_free_lane() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let queries = [(0, 10), (1, 4), (2, 6), (4, 9), (11, 12)]
            .map(|(began, ended)| Query { began: at(began), ended: Some(at(ended)) });
        assert_eq!(lanes(&queries), [0, 1, 2, 1, 0]);
        assert_eq!(most_at_once(&queries), 3);
        assert_eq!(most_at_once(&[]), 0);
    }
}
