//! Batch loaders that say what they were asked for.

use quell::BoxError;
use std::sync::{Arc, Mutex};

/// What a loader makes of the keys that it is given.
pub(crate) type Source = Arc<dyn Fn(&[u32]) -> Result<Vec<(u32, u32)>, BoxError> + Send + Sync>;

pub(crate) fn source(
    load: impl Fn(&[u32]) -> Result<Vec<(u32, u32)>, BoxError> + Send + Sync + 'static,
) -> Source {
    Arc::new(load)
}

/// What a loader was asked for, call by call, the keys of each in order.
#[derive(Clone, Default)]
pub(crate) struct Asked(Arc<Mutex<Vec<Vec<u32>>>>);

impl Asked {
    pub(crate) fn note(&self, keys: &[u32]) {
        let mut keys = keys.to_vec();
        keys.sort_unstable();
        self.0.lock().unwrap().push(keys);
    }

    pub(crate) fn take(&self) -> Vec<Vec<u32>> {
        std::mem::take(&mut self.0.lock().unwrap())
    }

    pub(crate) fn calls(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Gives the tenfold of each key.
    pub(crate) fn tenfold(&self) -> Source {
        let asked = self.clone();
        source(move |keys| {
            asked.note(keys);
            Ok(keys.iter().map(|key| (*key, 10 * key)).collect())
        })
    }
}
