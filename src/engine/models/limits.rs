//! Models of the permits to load: who takes one gives it back once, whatever becomes of the load.
//!
//! | model | red when |
//! |---|---|
//! | `one_who_is_refused_takes_nobodys_place` | one who is refused is counted for a moment |
//! | `two_ask_for_the_last_permit` | the look at the count and the counting are two steps |
//! | `a_load_ends_against_its_takeover` | the permit of the two of them is given back by both, or by none |
//! | `a_job_begins_against_its_takeover` | as above, where the load may have waited on a queue |
//! | `a_claim_is_lost_with_its_permit` | a lease whose claim is lost keeps its permit |

use super::*;
use crate::engine::limits::{Asks, Permit};

/// A cache with so many permits.
fn with_permits(permits: usize) -> Fixture {
    Fixture::with(|builder| builder.max_concurrent_loads(permits).lease(Duration::from_secs(1)))
}

impl Fixture {
    /// Permits that are out.
    fn permits(&self) -> usize {
        // Relaxed: a count.
        self.core.loading.0.load(crate::primitive::atomic::Ordering::Relaxed)
    }

    /// Asks for a permit, and gives it back at once. Whether there was one.
    fn is_admitted(&self, asks: Asks) -> bool {
        self.core.admits_load(asks, false).is_ok()
    }

    /// Asks for a permit, and keeps it. Whether there was one.
    fn takes_permit(&self, asks: Asks) -> bool {
        self.core.admits_load(asks, false).map(Permit::used).is_ok()
    }

    /// One caller who waits may be refused.
    fn foreground() -> Demand {
        Demand { backs_off: true, ..Fixture::demand() }
    }
}

#[test]
fn one_who_is_refused_takes_nobodys_place() {
    check("one who is refused takes nobody's place", 3, FEW, || {
        Participant::lasting().adopt();
        let cache = with_permits(2);
        assert!(cache.takes_permit(Asks::Foreground));
        let background = spawn(Participant::lasting, {
            let cache = cache.clone();
            move || {
                let asks = Asks::Background { urgent: false };
                [0, 1].map(|_| cache.is_admitted(asks))
            }
        });
        assert!(cache.is_admitted(Asks::Foreground), "one of two is out");
        assert_eq!(background.join().unwrap(), [false; 2], "half of them are out");
        cache.core.load_is_over();
        assert_eq!(cache.permits(), 0);
        cache.end();
    });
}

#[test]
fn two_ask_for_the_last_permit() {
    check("two ask for the last permit", 3, 3, || {
        Participant::lasting().adopt();
        let cache = with_permits(1);
        let other = spawn(Participant::lasting, {
            let cache = cache.clone();
            move || cache.takes_permit(Asks::Foreground)
        });
        let mine = cache.takes_permit(Asks::Foreground);
        assert!(mine != other.join().unwrap(), "one of them has it");
        assert_eq!(cache.permits(), 1);
        assert!(cache.takes_permit(Asks::Anyhow), "and one who is never refused another one");
        cache.core.load_is_over();
        cache.core.load_is_over();
        cache.end();
    });
}

#[test]
fn a_load_ends_against_its_takeover() {
    both("a load ends against its takeover", 2, |pins| {
        pins().adopt();
        let cache = with_permits(1);
        let lease = cache.lead();
        cache.hand.pass(1);
        let late = spawn(pins, {
            let cache = cache.clone();
            move || cache.publish(lease, 1)
        });
        let lease = {
            let stay = cache.core.stay(pin());
            match cache.core.lookup(&KEY, &Fixture::foreground(), &stay) {
                Lookup::Lead(lease) => Some(lease),
                Lookup::Join(_) => None,
                Lookup::Hit { hit, .. } => {
                    assert_eq!(hit.cell.value.number(), 1);
                    None
                }
                Lookup::Absent | Lookup::Refused(_) | Lookup::NotCached => {
                    panic!("who takes over is never refused")
                }
            }
        };
        if let Some(lease) = lease {
            // Two while the permit changes hands.
            assert!((1..=2).contains(&cache.permits()), "{} are out", cache.permits());
            cache.load(lease, 2);
        }
        late.join().unwrap();
        assert_eq!(cache.permits(), 0);
        assert!(cache.is_admitted(Asks::Foreground));
        cache.end();
    });
}

#[test]
fn a_job_begins_against_its_takeover() {
    both("a job begins against its takeover", 3, |pins| {
        pins().adopt();
        let cache = with_permits(1);
        let demand = Demand { accept: None, miss: Start::Queued, ..Fixture::foreground() };
        let Lookup::Lead(lease) = cache.core.lookup(&KEY, &demand, &cache.core.stay(pin())) else {
            panic!("the refresh has to be led")
        };
        let job = spawn(pins, {
            let cache = cache.clone();
            move || {
                let queued = lease.into_queued();
                queued.begin().map(|lease| cache.load(lease, 1))
            }
        });
        let mine = cache.get_with(2);
        let ran = job.join().unwrap();
        assert_eq!((mine, cache.permits()), (ran.unwrap_or(2), 0));
        cache.end();
    });
}

#[test]
fn a_claim_is_lost_with_its_permit() {
    both("a claim is lost with its permit", 2, |pins| {
        pins().adopt();
        let cache = with_permits(2);
        let other = spawn(pins, {
            let cache = cache.clone();
            move || cache.get_with(1)
        });
        let mine = cache.get_with(2);
        assert_eq!((cache.loads(), other.join().unwrap(), cache.permits()), (1, mine, 0));
        cache.end();
    });
}
