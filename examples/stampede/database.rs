//! The database: two years of sales in SQLite, and one aggregate over them that takes a while.

use parking_lot::{Condvar, Mutex};
use rusqlite::{Connection, OpenFlags, params};
use std::time::{Duration, Instant};
use tempfile::TempPath;

pub(crate) const ROWS: u32 = 200_000;
const REGIONS: u32 = 4;
const DAYS: u32 = 730;
const CATEGORIES: [&str; 8] = ["books", "coffee", "games", "garden", "kitchen", "music", "outdoor", "toys"];

/// What the query should take alone on this machine, and how far off calibration may end.
const TARGET: Duration = Duration::from_millis(175);
const TOLERANCE: Duration = Duration::from_millis(25);
/// The trailing window fits before the first reported day.
const WINDOW: u32 = 90;
const MOST_DAYS: u32 = DAYS - WINDOW;

const SCHEMA: &str = "
    PRAGMA journal_mode = OFF;
    PRAGMA synchronous = OFF;
    CREATE TABLE category (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
    CREATE TABLE sale (
        id INTEGER PRIMARY KEY,
        region INTEGER NOT NULL,
        category INTEGER NOT NULL REFERENCES category,
        day INTEGER NOT NULL,
        quantity INTEGER NOT NULL,
        price_cents INTEGER NOT NULL
    );";

const INDEX: &str = "CREATE INDEX sale_by_category ON sale (region, category, day, quantity, price_cents);";

/// For each category: the best 90 days of revenue that ended on one of the last `?2` days.
const BEST_QUARTERS: &str = "
    WITH RECURSIVE reported(day) AS (
        SELECT ?3 UNION ALL SELECT day - 1 FROM reported WHERE day > ?3 - ?2 + 1
    ), trailing AS (
        SELECT category.name AS name, (
            SELECT sum(quantity * price_cents) FROM sale
            WHERE region = ?1 AND category = category.id AND day BETWEEN reported.day - 89 AND reported.day
        ) AS revenue
        FROM category CROSS JOIN reported
    )
    SELECT name, max(revenue), avg(revenue) FROM trailing GROUP BY name ORDER BY name";

/// One category's line of the report.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Line {
    category: String,
    best_cents: i64,
    average_cents: f64,
}

/// A temporary SQLite file behind a pool of read-only connections that are opened beforehand.
pub(crate) struct Database {
    idle: Mutex<Vec<Connection>>,
    returned: Condvar,
    reported_days: u32,
    /// Declared last, so that the file goes after the connections.
    _file: Option<TempPath>,
}

impl Database {
    /// Writes the rows and opens `connections` connections.
    pub(crate) fn create(connections: usize) -> Result<Self, crate::Error> {
        let file =
            tempfile::Builder::new().prefix("stampede-").suffix(".sqlite").tempfile()?.into_temp_path();
        fill(&mut Connection::open(&file)?)?;

        let mut idle = Vec::new();
        for _ in 0..connections {
            idle.push(open(&file)?);
        }
        // On Unix an open file outlives its name, so that even an interrupted run leaves nothing behind.
        let file = if cfg!(unix) {
            file.close()?;
            None
        } else {
            Some(file)
        };
        Ok(Database { idle: Mutex::new(idle), returned: Condvar::new(), reported_days: 20, _file: file })
    }

    /// Widens the query until it takes about [`TARGET`] alone on this machine, and returns what it takes.
    pub(crate) fn calibrate(&mut self) -> Result<Duration, rusqlite::Error> {
        self.best_quarters(1)?;
        let mut took = self.time_alone()?;
        for _ in 0..6 {
            if took.abs_diff(TARGET) <= TOLERANCE {
                break;
            }
            let scale = TARGET.as_secs_f64() / took.as_secs_f64();
            self.reported_days = ((self.reported_days as f64 * scale).round() as u32).clamp(1, MOST_DAYS);
            took = self.time_alone()?;
        }
        Ok(took)
    }

    fn time_alone(&self) -> Result<Duration, rusqlite::Error> {
        let mut best = Duration::MAX;
        for _ in 0..3 {
            let began = Instant::now();
            self.best_quarters(1)?;
            best = best.min(began.elapsed());
        }
        Ok(best)
    }

    /// The query that everybody wants to run.
    pub(crate) fn best_quarters(&self, region: u32) -> Result<Vec<Line>, rusqlite::Error> {
        let connection = self.take();
        let lines = connection.prepare_cached(BEST_QUARTERS).and_then(|mut statement| {
            let rows = statement.query_map(params![region, self.reported_days, DAYS], |row| {
                Ok(Line { category: row.get(0)?, best_cents: row.get(1)?, average_cents: row.get(2)? })
            })?;
            rows.collect()
        });
        self.idle.lock().push(connection);
        self.returned.notify_one();
        lines
    }

    fn take(&self) -> Connection {
        let mut idle = self.idle.lock();
        loop {
            match idle.pop() {
                Some(connection) => return connection,
                None => self.returned.wait(&mut idle),
            }
        }
    }
}

fn open(file: &TempPath) -> Result<Connection, rusqlite::Error> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(file, flags)?;
    connection.execute_batch("PRAGMA mmap_size = 67108864; PRAGMA temp_store = MEMORY;")?;
    connection.prepare_cached(BEST_QUARTERS)?;
    Ok(connection)
}

fn fill(connection: &mut Connection) -> Result<(), rusqlite::Error> {
    connection.execute_batch(SCHEMA)?;
    let transaction = connection.transaction()?;
    for (id, name) in (0_u32..).zip(CATEGORIES) {
        transaction.execute("INSERT INTO category VALUES (?1, ?2)", params![id, name])?;
    }
    let mut insert = transaction.prepare("INSERT INTO sale VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?;
    let mut random = Xorshift(0x9E37_79B9_7F4A_7C15);
    for id in 0..ROWS {
        let region = 1 + random.below(REGIONS);
        let category = random.below(CATEGORIES.len() as u32);
        let day = 1 + random.below(DAYS);
        let quantity = 1 + random.below(5);
        let price_cents = 199 + random.below(20_000);
        insert.execute(params![id, region, category, day, quantity, price_cents])?;
    }
    drop(insert);
    transaction.commit()?;
    connection.execute_batch(INDEX)
}

/// Marsaglia's xorshift64: the same rows in every run.
struct Xorshift(u64);

impl Xorshift {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % u64::from(limit)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_has_a_line_per_category_and_is_the_same_every_time() {
        let database = Database::create(2).expect("a database");
        let first = database.best_quarters(1).expect("a report");
        assert_eq!(first.iter().map(|line| line.category.as_str()).collect::<Vec<_>>(), CATEGORIES);
        assert!(first.iter().all(|line| line.best_cents as f64 >= line.average_cents));
        assert_eq!(database.best_quarters(1), Ok(first));
    }
}
