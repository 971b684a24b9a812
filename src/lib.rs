//! quell
mod clock;
mod config;
mod engine;
mod error;
mod executor;
mod flight;
mod freshness;
mod hash;
mod loader;
mod observe;
mod primitive;
mod slot;
mod sync;
mod table;

pub use clock::{Clock, ManualClock, Wake};
pub use config::CacheBuilder;
pub use error::{BoxError, BuildError, LoadError, LoadErrorKind};
pub use executor::{Executor, Job, Rejected};
pub use freshness::Ttl;
pub use hash::{DefaultHashBuilder, DefaultHasher};
pub use loader::{Expiry, LoadCause, LoadContext, Loaded, Loader};
pub use observe::{InFlight, Stats};
pub use sync::{Answer, Ask, Cache, Iter, Op, Outcome, Pinned, Provenance};
