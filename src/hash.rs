//! The default hasher, and how one hash serves shard, bucket and fingerprint.

use std::any::TypeId;
use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher};

/// The default hasher of a [`Cache`](crate::Cache): fast, and keyed afresh for each cache, so that nobody
/// outside can choose keys that collide.
#[derive(Clone, Default)]
pub struct DefaultHashBuilder(ahash::RandomState);

/// The hasher that [`DefaultHashBuilder`] builds.
#[derive(Clone)]
pub struct DefaultHasher(ahash::AHasher);

impl DefaultHashBuilder {
    /// A builder with random keys.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A builder whose hashes are the same in each run, for tests and measurements.
    #[must_use]
    pub fn with_seed(seed: u64) -> Self {
        Self(ahash::RandomState::with_seeds(seed, !seed, seed.rotate_left(17), 0x9e37_79b9_7f4a_7c15))
    }
}

impl fmt::Debug for DefaultHashBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DefaultHashBuilder")
    }
}

impl fmt::Debug for DefaultHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DefaultHasher")
    }
}

impl BuildHasher for DefaultHashBuilder {
    type Hasher = DefaultHasher;

    #[inline]
    fn build_hasher(&self) -> DefaultHasher {
        DefaultHasher(self.0.build_hasher())
    }

    #[inline]
    fn hash_one<T: Hash>(&self, value: T) -> u64 {
        self.0.hash_one(value)
    }
}

impl Hasher for DefaultHasher {
    #[inline]
    fn finish(&self) -> u64 {
        self.0.finish()
    }
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }
    #[inline]
    fn write_u8(&mut self, i: u8) {
        self.0.write_u8(i);
    }
    #[inline]
    fn write_u16(&mut self, i: u16) {
        self.0.write_u16(i);
    }
    #[inline]
    fn write_u32(&mut self, i: u32) {
        self.0.write_u32(i);
    }
    #[inline]
    fn write_u64(&mut self, i: u64) {
        self.0.write_u64(i);
    }
    #[inline]
    fn write_u128(&mut self, i: u128) {
        self.0.write_u128(i);
    }
    #[inline]
    fn write_usize(&mut self, i: usize) {
        self.0.write_usize(i);
    }
}

/// Hashes a key once for all uses: the top bits choose the bucket, the lowest bits of the upper half the shard. Slots
/// remember the upper half, and lists of a bucket's slots a byte of it.
///
/// A hash of the user's own hasher is folded through one wide multiplication, so that a weak one (an identity, say)
/// still fills all the bits that are used. The default hasher needs no such help.
#[inline]
pub(crate) fn hash_of<S: BuildHasher + 'static, Q: Hash + ?Sized>(hasher: &S, key: &Q) -> u64 {
    let hash = hasher.hash_one(key);
    if TypeId::of::<S>() == TypeId::of::<DefaultHashBuilder>() {
        return hash;
    }
    let wide = u128::from(hash ^ 0x2545_f491_4f6c_dd1d) * 0x9e37_79b9_7f4a_7c15;
    (wide as u64) ^ ((wide >> 64) as u64)
}

/// The upper half of a hash: all that slots, lists and the policy's queues remember of it.
#[inline]
pub(crate) fn half_of(hash: u64) -> u32 {
    (hash >> 32) as u32
}

/// A hash with this upper half: as good as the one that was halved.
#[inline]
pub(crate) fn whole_of(half: u32) -> u64 {
    u64::from(half) << 32
}

/// The shard of a hash, by the lowest bits of its upper half. `shards` is a power of two.
#[inline]
pub(crate) fn shard_of(hash: u64, shards: usize) -> usize {
    half_of(hash) as usize & (shards - 1)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[derive(Default)]
    struct Identity(u64);
    impl Hasher for Identity {
        fn finish(&self) -> u64 {
            self.0
        }
        fn write(&mut self, _: &[u8]) {}
        fn write_u64(&mut self, i: u64) {
            self.0 = i;
        }
    }

    #[test]
    fn a_weak_hasher_still_spreads() {
        let hasher = std::hash::BuildHasherDefault::<Identity>::default();
        for step in [1_u64, 1 << 20, 1 << 40] {
            let hashes: Vec<u64> = (0..4096_u64).map(|i| hash_of(&hasher, &(i * step))).collect();
            let buckets: HashSet<u64> = hashes.iter().map(|h| h >> 52).collect();
            let shards: HashSet<u64> = hashes.iter().map(|h| h >> 32 & 15).collect();
            assert!(buckets.len() > 2000, "step {step}: {} of 4096 buckets", buckets.len());
            assert_eq!(shards.len(), 16, "step {step}");
        }
    }

    #[test]
    fn a_seed_makes_hashes_repeatable() {
        let (a, b) = (DefaultHashBuilder::with_seed(7), DefaultHashBuilder::with_seed(7));
        assert_eq!(hash_of(&a, "key"), hash_of(&b, "key"));
        assert_ne!(hash_of(&a, "key"), hash_of(&DefaultHashBuilder::with_seed(8), "key"));
    }
}
