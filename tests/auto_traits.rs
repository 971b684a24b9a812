//! Which types may cross threads, and which survive a caught panic: `cargo test --test auto_traits`.

use quell::{
    Answer, Ask, BatchLoader, BoxError, BuildError, Cache, CacheBuilder, Clock, DefaultHashBuilder,
    DefaultHasher, Executor, Expiry, HotKey, InFlight, Iter, Job, LoadCause, LoadContext, LoadError,
    LoadErrorKind, Loaded, Loader, ManualClock, Op, Outcome, Pinned, Provenance, Rejected, Stats, Ttl, Wake,
};
use std::cell::Cell;
use std::fmt::{Debug, Display};
use std::panic::{RefUnwindSafe, UnwindSafe};

fn send<T: Send>() {}
fn sync<T: Sync>() {}
fn both<T: Send + Sync + Unpin>() {}
fn debug<T: Debug>() {}

/// `NAME::<T>()` tells whether `T` has the trait: an inherent constant goes before the blanket one.
macro_rules! has {
    ($t:ty: $bound:path) => {{
        #[allow(dead_code, reason = "used where the bound does not hold")]
        trait Otherwise {
            const HAS: bool = false;
        }
        impl<T: ?Sized> Otherwise for T {}
        struct Test<T: ?Sized>(std::marker::PhantomData<T>);
        #[allow(dead_code, reason = "used where the bound holds")]
        impl<T: ?Sized + $bound> Test<T> {
            const HAS: bool = true;
        }
        Test::<$t>::HAS
    }};
}

#[test]
fn caches_cross_threads() {
    both::<Cache<String, Vec<u8>>>();
    both::<CacheBuilder<String, Vec<u8>>>();
    both::<Iter<'_, String, Vec<u8>>>();
    both::<Ask<'_, String, Vec<u8>, str>>();
    fn clone<T: Clone>() {}
    clone::<Cache<String, Vec<u8>>>();
    // A handle clones whatever it holds.
    struct Plain;
    clone::<Cache<Plain, Plain>>();
}

#[test]
fn a_pinned_stays_on_its_thread() {
    assert!(!has!(Pinned<'static, String, u32>: Send));
    assert!(!has!(Pinned<'static, String, u32>: Sync));
    assert!(has!(Cache<String, u32>: Send));
}

#[test]
fn a_cache_of_what_may_not_cross_does_not_cross() {
    assert!(!has!(Cache<u32, Cell<u32>>: Sync));
    assert!(!has!(Cache<u32, std::rc::Rc<u32>>: Send));
    assert!(!has!(Cache<std::rc::Rc<u32>, u32>: Send));
}

#[test]
fn values_and_errors_cross_threads() {
    both::<LoadError>();
    both::<LoadErrorKind>();
    both::<BuildError>();
    both::<Rejected>();
    both::<Stats>();
    both::<InFlight<String>>();
    both::<HotKey<String>>();
    both::<Answer<String>>();
    both::<Provenance>();
    both::<Op<String>>();
    both::<Outcome<String>>();
    both::<Ttl>();
    both::<Loaded<String>>();
    both::<LoadContext<String>>();
    both::<LoadCause>();
    both::<ManualClock>();
    both::<DefaultHashBuilder>();
    both::<DefaultHasher>();
    send::<Job>();
    send::<BoxError>();
    sync::<BoxError>();
    send::<Wake>();
    sync::<Wake>();
}

#[test]
fn errors_are_errors() {
    fn error<T: std::error::Error + Clone + Display + Send + Sync + 'static>() {}
    error::<LoadError>();
    error::<BuildError>();
    error::<Rejected>();
    let boxed: BoxError = plain_error().into();
    assert_eq!(boxed.downcast_ref::<LoadError>().map(LoadError::kind), Some(LoadErrorKind::NotCached));
}

fn plain_error() -> LoadError {
    Cache::<u32, u32>::builder().build().get_or_load(&1).unwrap_err()
}

#[test]
fn ports_are_objects() {
    both::<Box<dyn Clock + Unpin>>();
    both::<Box<dyn Executor + Unpin>>();
    both::<Box<dyn Loader<u32, u32> + Unpin>>();
    both::<Box<dyn BatchLoader<u32, u32> + Unpin>>();
    both::<Box<dyn Expiry<u32, u32> + Unpin>>();
}

#[test]
fn what_survives_a_caught_panic() {
    fn survives<T: UnwindSafe + RefUnwindSafe>() {}
    survives::<BuildError>();
    survives::<LoadErrorKind>();
    survives::<Stats>();
    survives::<Provenance>();
    survives::<Outcome<String>>();
    survives::<Rejected>();
}

#[test]
fn a_cache_is_of_use_after_a_caught_panic() {
    // Whatever unwinds through a call leaves the cache whole (`tests/panic.rs`), so its type says so.
    assert!(has!(Cache<String, u32>: UnwindSafe), "`catch_unwind` takes no closure with a cache in it");
    assert!(has!(&'static Cache<String, u32>: UnwindSafe));
}

#[test]
fn everything_can_be_shown() {
    debug::<Cache<u32, u32>>();
    debug::<CacheBuilder<u32, u32>>();
    debug::<Pinned<'_, u32, u32>>();
    debug::<Iter<'_, u32, u32>>();
    debug::<Ask<'_, u32, u32, u32>>();
    debug::<(LoadError, BuildError, Job, Rejected, Stats, InFlight<u32>)>();
    debug::<(Answer<u32>, Provenance, Op<u32>, Outcome<u32>, Ttl, ManualClock)>();
    debug::<(Loaded<u32>, LoadContext<u32>, LoadCause, DefaultHashBuilder, DefaultHasher)>();
}
