//! What the service answers: a product and where it came from, or a failure and its status.
//!
//! Where it came from is told by the header `cache-status` of RFC 9211, its `detail` being quell's own word, and by `age`.

use crate::database::{Product, QueryError};
use axum::Json;
use axum::http::StatusCode;
use axum::http::header::{AGE, HeaderName, RETRY_AFTER};
use axum::response::{IntoResponse, Response};
use quell::{Answer, LoadError, LoadErrorKind, Provenance};
use serde_json::json;
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub(crate) const CACHE_STATUS: HeaderName = HeaderName::from_static("cache-status");

/// A product; with its provenance, if the strategy knows.
pub(crate) struct Reply {
    product: Arc<Product>,
    provenance: Option<Provenance>,
}

impl From<Arc<Product>> for Reply {
    fn from(product: Arc<Product>) -> Self {
        Reply { product, provenance: None }
    }
}

impl From<Answer<Arc<Product>>> for Reply {
    fn from(answer: Answer<Arc<Product>>) -> Self {
        Reply { product: answer.value, provenance: Some(answer.provenance) }
    }
}

impl IntoResponse for Reply {
    fn into_response(self) -> Response {
        let body = Json(&*self.product);
        let Some(provenance) = self.provenance else { return body.into_response() };
        let (status, age) = cache_status(provenance);
        let headers = [(CACHE_STATUS, status)];
        match age {
            Some(age) => (headers, [(AGE, age.as_secs().to_string())], body).into_response(),
            None => (headers, body).into_response(),
        }
    }
}

fn cache_status(provenance: Provenance) -> (&'static str, Option<Duration>) {
    match provenance {
        Provenance::Fresh { age } => ("quell; hit; detail=fresh", Some(age)),
        Provenance::Stale { age } => ("quell; hit; detail=stale", Some(age)),
        Provenance::Grace { age } => ("quell; fwd=stale; detail=grace", Some(age)),
        Provenance::Loaded { .. } => ("quell; fwd=miss; stored; detail=loaded", None),
        Provenance::Joined { .. } => ("quell; fwd=miss; collapsed; detail=joined", None),
        Provenance::Negative => ("quell; hit; detail=negative", None),
        Provenance::Fallback => ("quell; fwd=miss; detail=fallback", None),
    }
}

/// There is no such product.
#[derive(Debug)]
pub(crate) struct NoSuchProduct;

impl fmt::Display for NoSuchProduct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("there is no such product")
    }
}

impl Error for NoSuchProduct {}

/// No product, and why.
#[derive(Debug)]
pub(crate) enum Failure {
    Missing,
    Malformed(String),
    Query(QueryError),
    Load(LoadError),
}

impl From<QueryError> for Failure {
    fn from(error: QueryError) -> Self {
        Failure::Query(error)
    }
}

impl From<LoadError> for Failure {
    fn from(error: LoadError) -> Self {
        match error.kind() {
            LoadErrorKind::Absent => Failure::Missing,
            _ if error.downcast_ref::<NoSuchProduct>().is_some() => Failure::Missing,
            _ => Failure::Load(error),
        }
    }
}

impl Failure {
    fn status(&self) -> StatusCode {
        match self {
            Failure::Missing => StatusCode::NOT_FOUND,
            Failure::Malformed(_) => StatusCode::BAD_REQUEST,
            Failure::Query(error) => status_of_query(error),
            Failure::Load(error) => match error.kind() {
                LoadErrorKind::TimedOut | LoadErrorKind::Overloaded | LoadErrorKind::BackingOff => {
                    StatusCode::SERVICE_UNAVAILABLE
                }
                LoadErrorKind::Failed => {
                    error.downcast_ref::<QueryError>().map_or(StatusCode::BAD_GATEWAY, status_of_query)
                }
                // A loader that panics, a cycle: the service is wrong, not its database.
                _ => StatusCode::INTERNAL_SERVER_ERROR,
            },
        }
    }

    /// What happened, and because of what.
    fn chain(&self) -> Vec<String> {
        let first: &dyn Error = match self {
            Failure::Missing => &NoSuchProduct,
            Failure::Malformed(what) => return vec![what.clone()],
            Failure::Query(error) => error,
            Failure::Load(error) => error,
        };
        std::iter::successors(Some(first), |&error| error.source()).map(ToString::to_string).collect()
    }
}

fn status_of_query(error: &QueryError) -> StatusCode {
    match error {
        QueryError::NoConnection => StatusCode::SERVICE_UNAVAILABLE,
        QueryError::Sqlite(_) => StatusCode::BAD_GATEWAY,
        QueryError::Lost(_) => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = self.status();
        let body = Json(json!({ "error": self.chain() }));
        match status {
            StatusCode::SERVICE_UNAVAILABLE => (status, [(RETRY_AFTER, "1")], body).into_response(),
            _ => (status, body).into_response(),
        }
    }
}
