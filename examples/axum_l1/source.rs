//! The source of truth as one strategy sees it: the database, a count of the queries that it ran, and quell's two loaders.

use crate::database::{Database, Product, QueryError};
use quell::{AsyncLoader, BoxError, LoadContext, Loaded, Loader};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A handle; its clones count together.
#[derive(Clone)]
pub(crate) struct Source(Arc<Inner>);

struct Inner {
    database: Arc<Database>,
    queries: AtomicU64,
}

impl Source {
    pub(crate) fn new(database: &Arc<Database>) -> Self {
        Source(Arc::new(Inner { database: Arc::clone(database), queries: AtomicU64::new(0) }))
    }

    /// How many queries this strategy has begun.
    pub(crate) fn queries(&self) -> u64 {
        // Relaxed: a statistic.
        self.0.queries.load(Ordering::Relaxed)
    }

    fn query<R>(&self, run: impl FnOnce(&Database) -> R) -> R {
        // Relaxed: as above.
        self.0.queries.fetch_add(1, Ordering::Relaxed);
        run(&self.0.database)
    }

    /// One product. Blocks.
    fn product(&self, id: u32) -> Result<Option<Arc<Product>>, QueryError> {
        let found = self.query(|database| database.product(id))?;
        Ok(found.map(Arc::new))
    }

    /// One product, on a thread for what blocks.
    pub(crate) async fn product_async(self, id: u32) -> Result<Option<Arc<Product>>, QueryError> {
        tokio::task::spawn_blocking(move || self.product(id)).await.map_err(QueryError::Lost)?
    }

    /// Those of many products that there are, on a thread for what blocks.
    pub(crate) async fn products_async(
        self,
        ids: Vec<u32>,
    ) -> Result<impl Iterator<Item = (u32, Arc<Product>)>, QueryError> {
        let run = move || self.query(|database| database.products(&ids));
        let found = tokio::task::spawn_blocking(run).await.map_err(QueryError::Lost)??;
        Ok(found.into_iter().map(|product| (product.id, Arc::new(product))))
    }
}

/// A loader that blocks. An async call runs it on a thread for it.
pub(crate) struct Blocking(pub(crate) Source);

impl Loader<u32, Arc<Product>> for Blocking {
    fn load(&self, id: &u32, _: &LoadContext<Arc<Product>>) -> Result<Loaded<Arc<Product>>, BoxError> {
        Ok(self.0.product(*id)?.map_or_else(Loaded::absent, Loaded::new))
    }
}

/// A loader that is a future.
pub(crate) struct Task(pub(crate) Source);

impl AsyncLoader<u32, Arc<Product>> for Task {
    async fn load(&self, id: &u32, _: &LoadContext<Arc<Product>>) -> Result<Loaded<Arc<Product>>, BoxError> {
        let found = self.0.clone().product_async(*id).await?;
        Ok(found.map_or_else(Loaded::absent, Loaded::new))
    }
}
