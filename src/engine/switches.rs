//! Switches: what may be changed while the cache is in use, in one word that a hit reads, and two that a store reads.
//!
//! A call goes by the mode that it finds when it begins, or later: each reads it before it looks at a slot. So nobody serves
//! what had been taken out before the mode was set that allows it.

use super::Core;
use crate::config::{EarlyRefresh, soft_and_hard};
use crate::error::BuildError;
use crate::freshness::{Lifetime, Stage, Ttl, length_of, word_of};
use crate::primitive::plain::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// How a cache serves and loads, see [`Cache::set_mode`](crate::Cache::set_mode).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// As it was built.
    #[default]
    Normal,
    /// Whatever is cached is served, and no load begins.
    Frozen,
    /// Nothing that is cached is served, and nothing is stored.
    Bypass,
}

/// It is noted when a value was last used. Set when the cache is built, never cleared.
const IDLES: u32 = 1;
/// The mode is `Frozen`.
const FROZEN: u32 = 2;
/// The mode is `Bypass`. Never together with `FROZEN`.
const BYPASS: u32 = 4;

pub(super) struct Switches {
    /// The bits above.
    mode: AtomicU32,
    /// The TTLs for what is stored from now on, as [`word_of`] writes them.
    soft: AtomicU64,
    hard: AtomicU64,
}

impl Switches {
    pub(super) fn new(idles: bool, Ttl { soft, hard }: Ttl) -> Self {
        let mode = AtomicU32::new(if idles { IDLES } else { 0 });
        Self { mode, soft: AtomicU64::new(word_of(soft)), hard: AtomicU64::new(word_of(hard)) }
    }

    /// Whether a value that is fresh may be served, and nothing is to be noted of it.
    #[inline(always)]
    pub(super) fn serves_simply(&self) -> bool {
        // Acquire: what was taken out during a bypass that is over; pairs with the Release in `set_mode`.
        self.mode.load(Ordering::Acquire) & (IDLES | BYPASS) == 0
    }

    pub(super) fn is_frozen(&self) -> bool {
        // Relaxed: nothing is published by it.
        self.mode.load(Ordering::Relaxed) & FROZEN != 0
    }

    pub(super) fn is_bypassed(&self) -> bool {
        // Acquire: as in `serves_simply`.
        self.mode.load(Ordering::Acquire) & BYPASS != 0
    }

    /// The TTLs. They may be of two moments: where the soft one is the longer then, [`Times`](crate::freshness::Times) ends it
    /// with the hard one.
    fn ttl(&self) -> Ttl {
        // Relaxed: settings; nothing is published by them.
        let [soft, hard] = [&self.soft, &self.hard].map(|word| length_of(word.load(Ordering::Relaxed)));
        Ttl { soft, hard }
    }
}

impl<K, V, S> Core<K, V, S> {
    pub(crate) fn set_mode(&self, mode: Mode) {
        let bit = match mode {
            Mode::Normal => 0,
            Mode::Frozen => FROZEN,
            Mode::Bypass => BYPASS,
        };
        let idles = if self.idles() { IDLES } else { 0 };
        // Release: what was taken out before; pairs with the Acquire in `serves_simply` and `is_bypassed`.
        self.switches.mode.store(idles | bit, Ordering::Release);
    }

    pub(crate) fn mode(&self) -> Mode {
        // Relaxed: nothing is published by it.
        match self.switches.mode.load(Ordering::Relaxed) & !IDLES {
            FROZEN => Mode::Frozen,
            BYPASS => Mode::Bypass,
            _ => Mode::Normal,
        }
    }

    /// While the cache is frozen, what has expired is served as what is stale.
    #[inline]
    pub(super) fn served_as(&self, stage: Stage) -> Stage {
        if stage > Stage::Stale && self.switches.is_frozen() { Stage::Stale } else { stage }
    }

    /// The times that the cache gives to what is stored now.
    pub(super) fn lifetime(&self) -> Lifetime {
        Lifetime { ttl: self.switches.ttl(), ..self.settings.lifetime }
    }

    pub(crate) fn set_time_to_live(&self, hard: Option<Duration>) -> Result<(), BuildError> {
        soft_and_hard(self.switches.ttl().soft, hard)?;
        // Relaxed: as in `ttl`.
        self.switches.hard.store(word_of(hard), Ordering::Relaxed);
        Ok(())
    }

    pub(crate) fn set_soft_ttl(&self, soft: Option<Duration>) -> Result<(), BuildError> {
        soft_and_hard(soft, self.switches.ttl().hard)?;
        // Relaxed: as in `ttl`.
        self.switches.soft.store(word_of(soft), Ordering::Relaxed);
        Ok(())
    }

    pub(crate) fn set_early_refresh(&self, early: EarlyRefresh) -> Result<(), BuildError> {
        early.check()?;
        self.early.set(early);
        Ok(())
    }
}
