//! The facade between quell and the machine: atomics, shared pointers, cells, events and epochs, of std or of loom.
//!
//! Everything that a model must be able to interleave comes from here, so that the protocols above run
//! unchanged under loom. It is the only place that names `std::sync::atomic`, and the only one with a
//! `cfg(loom)` outside the models.

pub(crate) mod basket;
pub(crate) mod epoch;
pub(crate) mod exclusive;
pub(crate) mod handover;
#[cfg(all(test, loom))]
pub(crate) mod model;
pub(crate) mod park;
pub(crate) mod pile;
pub(crate) mod replaceable;
pub(crate) mod runtime;
pub(crate) mod step;
pub(crate) mod thin;
#[cfg_attr(loom, allow(dead_code, reason = "a model numbers its threads itself"))]
pub(crate) mod thread;
pub(crate) mod turn;
pub(crate) mod waker;

#[cfg(not(loom))]
#[allow(clippy::disallowed_types, reason = "this is the room the ban points to")]
mod imp {
    pub(crate) mod atomic {
        pub(crate) use std::sync::atomic::{Ordering, fence};
        pub(crate) type AtomicPtr<T> = std::sync::atomic::AtomicPtr<T>;
        pub(crate) type AtomicU32 = std::sync::atomic::AtomicU32;
        pub(crate) type AtomicU64 = std::sync::atomic::AtomicU64;
        pub(crate) type AtomicUsize = std::sync::atomic::AtomicUsize;
    }
    pub(crate) use std::sync::Arc;
    pub(crate) use std::thread_local;

    /// A value made at its first use that lives as long as the process.
    macro_rules! global {
        ($(#[$doc:meta])* pub(crate) fn $name:ident() -> $type:ty = $init:expr;) => {
            $(#[$doc])*
            pub(crate) fn $name() -> &'static $type {
                static CELL: std::sync::OnceLock<$type> = std::sync::OnceLock::new();
                CELL.get_or_init(|| $init)
            }
        };
    }
    pub(crate) use global;

    /// Under loom, tells a use that races with the end of what it is in; here, nothing.
    pub(crate) struct Witness;

    impl Witness {
        #[inline(always)]
        pub(crate) fn new() -> Self {
            Self
        }

        #[inline(always)]
        pub(crate) fn used(&self) {}

        #[inline(always)]
        pub(crate) fn ended(&self) {}
    }
}

#[cfg(loom)]
mod imp {
    pub(crate) mod atomic {
        pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
    }
    pub(crate) use loom::cell::UnsafeCell;
    pub(crate) use loom::sync::Arc;

    /// Loom's form knows no `const`.
    macro_rules! local {
        ($(#[$doc:meta])* static $name:ident: $type:ty = const $init:block;) => {
            loom::thread_local! { $(#[$doc])* static $name: $type = $init; }
        };
    }
    pub(crate) use local as thread_local;

    /// A value made at its first use that lives as long as one run of a model.
    macro_rules! global {
        ($(#[$doc:meta])* pub(crate) fn $name:ident() -> $type:ty = $init:expr;) => {
            $(#[$doc])*
            pub(crate) fn $name() -> &'static $type {
                loom::lazy_static! { static ref CELL: $type = $init; }
                &*CELL
            }
        };
    }
    pub(crate) use global;

    /// Tells a use that races with the end of what it is in, or comes after it, or is not ordered after its making.
    pub(crate) struct Witness(UnsafeCell<bool>);

    // SAFETY: a model watches it: loom reports a race where it would be one.
    unsafe impl Sync for Witness {}

    impl Witness {
        pub(crate) fn new() -> Self {
            Self(UnsafeCell::new(true))
        }

        pub(crate) fn used(&self) {
            // SAFETY: loom reports a concurrent writer before this reads.
            self.0.with(|alive| assert!(unsafe { *alive }, "used after its end"));
        }

        pub(crate) fn ended(&self) {
            self.used();
            // SAFETY: loom reports a concurrent user before this writes.
            self.0.with_mut(|alive| unsafe { *alive = false });
        }
    }
}

#[cfg(loom)]
pub(crate) use imp::UnsafeCell;
pub(crate) use imp::{Arc, Witness, atomic, global, thread_local};

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Atomics that no protocol depends on (counters, ids, flags of the background pool): always std's, so that a
/// model does not spend its branches on them.
#[allow(clippy::disallowed_types, reason = "this is the room the ban points to")]
pub(crate) mod plain {
    pub(crate) use std::sync::atomic::{Ordering, fence};
    pub(crate) type AtomicBool = std::sync::atomic::AtomicBool;
    pub(crate) type AtomicPtr<T> = std::sync::atomic::AtomicPtr<T>;
    pub(crate) type AtomicU32 = std::sync::atomic::AtomicU32;
    pub(crate) type AtomicU64 = std::sync::atomic::AtomicU64;
    pub(crate) type AtomicUsize = std::sync::atomic::AtomicUsize;
}

/// One cache line, or two where processors fetch lines in pairs: keeps neighbours out of each other's way.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Padded<T>(pub(crate) T);

/// Runs user code whose panic must go no further; `None` if it panics.
pub(crate) fn caught<R>(run: impl FnOnce() -> R) -> Option<R> {
    let drop_payload = |payload| {
        // Its destructor is user code too. If that panics as well, what it throws is left alone.
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(payload)));
        dropped.unwrap_or_else(std::mem::forget);
    };
    catch_unwind(AssertUnwindSafe(run)).map_err(drop_payload).ok()
}

/// Asks the processor to fetch what is there, which may be anything, for a read that comes soon.
#[inline(always)]
pub(crate) fn prefetch<T>(at: *const T) {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint: it reads nothing, and an address that is not one does no harm.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    let _ = at;
}

/// Notes that the owner of this allocation will come back to it by way of a reference, see [`owner`].
pub(crate) fn exposed<T>(raw: *mut T) -> *mut T {
    let _ = raw.expose_provenance();
    raw
}

/// The pointer by which an allocation is owned, from a reference into it: a reference alone gives no right to free.
/// The pointer must have been [`exposed`] when the allocation was made.
pub(crate) fn owner<T>(of: &T) -> *mut T {
    std::ptr::with_exposed_provenance_mut(std::ptr::from_ref(of).addr())
}
