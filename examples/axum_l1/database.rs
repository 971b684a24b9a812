//! The database: a table of products in SQLite behind a small pool, with a client that blocks.

use parking_lot::{Condvar, Mutex};
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::Serialize;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempPath;

pub(crate) const PRODUCTS: u32 = 1_000;
/// As many as a pool has that several servers share a database through.
const CONNECTIONS: usize = 8;
/// For the moment in which another connection changes the schema.
const BUSY: Duration = Duration::from_secs(5);

const SCHEMA: &str = "
    PRAGMA synchronous = OFF;
    CREATE TABLE product (id INTEGER PRIMARY KEY, name TEXT NOT NULL, price_cents INTEGER NOT NULL);";
const ONE: &str = "SELECT id, name, price_cents FROM product WHERE id = ?1";

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Product {
    pub(crate) id: u32,
    pub(crate) name: String,
    pub(crate) price_cents: u32,
}

impl Product {
    fn read(row: &Row<'_>) -> Result<Self, rusqlite::Error> {
        Ok(Product { id: row.get(0)?, name: row.get(1)?, price_cents: row.get(2)? })
    }
}

/// A query that gave no rows, and not because there are none.
#[derive(Debug)]
pub(crate) enum QueryError {
    /// All connections were in use for too long.
    NoConnection,
    /// The database said so.
    Sqlite(rusqlite::Error),
    /// The thread that ran the query is gone.
    Lost(tokio::task::JoinError),
}

impl fmt::Display for QueryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            QueryError::NoConnection => "no connection to the database was free in time",
            QueryError::Sqlite(_) => "the database failed",
            QueryError::Lost(_) => "the query did not come to its end",
        })
    }
}

impl std::error::Error for QueryError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            QueryError::NoConnection => None,
            QueryError::Sqlite(error) => Some(error),
            QueryError::Lost(error) => Some(error),
        }
    }
}

impl From<rusqlite::Error> for QueryError {
    fn from(error: rusqlite::Error) -> Self {
        QueryError::Sqlite(error)
    }
}

/// How slow the database is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// What a query takes, its connection held: a sleep that stands for the network and the disk.
    pub(crate) query: Duration,
    /// How long a query waits for a connection.
    pub(crate) patience: Duration,
}

/// A temporary SQLite file and the connections to it.
pub(crate) struct Database {
    idle: Mutex<Vec<Connection>>,
    returned: Condvar,
    pace: Pace,
    /// Declared last, so that the file goes after the connections.
    _file: TempPath,
}

impl Database {
    pub(crate) fn create(pace: Pace) -> Result<Arc<Self>, crate::Error> {
        let file = tempfile::Builder::new().prefix("axum-l1-").suffix(".sqlite").tempfile()?.into_temp_path();
        let mut connection = Connection::open(&file)?;
        fill(&mut connection)?;
        let mut idle = vec![connection];
        while idle.len() < CONNECTIONS {
            idle.push(Connection::open(&file)?);
        }
        for connection in &idle {
            connection.busy_timeout(BUSY)?;
        }
        Ok(Arc::new(Database { idle: Mutex::new(idle), returned: Condvar::new(), pace, _file: file }))
    }

    /// One product, or `None` if there is no such one. Blocks.
    pub(crate) fn product(&self, id: u32) -> Result<Option<Product>, QueryError> {
        self.query(|connection| {
            connection.prepare_cached(ONE)?.query_row(params![id], Product::read).optional()
        })
    }

    /// Those of many products that there are, by one query. Blocks.
    pub(crate) fn products(&self, ids: &[u32]) -> Result<Vec<Product>, QueryError> {
        let list = ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        self.query(|connection| {
            let mut statement = connection
                .prepare(&format!("SELECT id, name, price_cents FROM product WHERE id IN ({list})"))?;
            statement.query_map([], Product::read)?.collect()
        })
    }

    /// Takes the table away, so that queries fail. Blocks.
    pub(crate) fn fail(&self) -> Result<(), QueryError> {
        self.with_connection(|connection| connection.execute_batch("ALTER TABLE product RENAME TO away"))
    }

    /// Puts it back. Blocks.
    pub(crate) fn recover(&self) -> Result<(), QueryError> {
        self.with_connection(|connection| connection.execute_batch("ALTER TABLE away RENAME TO product"))
    }

    fn query<R>(&self, run: impl FnOnce(&Connection) -> Result<R, rusqlite::Error>) -> Result<R, QueryError> {
        self.with_connection(|connection| {
            std::thread::sleep(self.pace.query);
            run(connection)
        })
    }

    fn with_connection<R>(
        &self,
        run: impl FnOnce(&Connection) -> Result<R, rusqlite::Error>,
    ) -> Result<R, QueryError> {
        let connection = self.take().ok_or(QueryError::NoConnection)?;
        let result = run(&connection);
        self.idle.lock().push(connection);
        self.returned.notify_one();
        Ok(result?)
    }

    fn take(&self) -> Option<Connection> {
        let mut idle = self.idle.lock();
        self.returned.wait_while_for(&mut idle, |idle| idle.is_empty(), self.pace.patience);
        idle.pop()
    }

    /// Runs something while no query can.
    #[cfg(test)]
    pub(crate) async fn while_exhausted<R>(&self, run: impl Future<Output = R>) -> R {
        let held = std::mem::take(&mut *self.idle.lock());
        assert_eq!(held.len(), CONNECTIONS, "a query is running");
        let result = run.await;
        self.idle.lock().extend(held);
        self.returned.notify_all();
        result
    }
}

fn fill(connection: &mut Connection) -> Result<(), rusqlite::Error> {
    connection.execute_batch(SCHEMA)?;
    let transaction = connection.transaction()?;
    let mut insert = transaction.prepare("INSERT INTO product VALUES (?1, ?2, ?3)")?;
    for id in 1..=PRODUCTS {
        insert.execute(params![id, format!("product {id}"), 199 + id * 7919 % 20_000])?;
    }
    drop(insert);
    transaction.commit()
}
