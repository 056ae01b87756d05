//! Random numbers that are the same on every machine, for ever: a seed that is written down stays the same run.

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The numbers of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// 64 random bits.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// 0 to `bound - 1`; 0 when `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.word()) * u128::from(bound)) >> 64) as u64
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        ((self.word() >> 11) as f64) < probability * (1u64 << 53) as f64
    }

    /// One of these.
    ///
    /// # Panics
    /// If there are none.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

/// Spreads the bits of a number over all 64: the output function of [`Random`].
#[must_use]
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published generator's first numbers: whoever changes them changes every seed that was ever written down.
    #[test]
    fn the_numbers_never_change() {
        let mut random = Random::new(1_234_567);
        let words: Vec<u64> = (0..3).map(|_| random.word()).collect();
        assert_eq!(words, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    /// Bounds and probabilities hold at their ends.
    #[test]
    fn the_ends() {
        let mut random = Random::new(7);
        for _ in 0..1000 {
            assert_eq!((random.below(0), random.below(1)), (0, 0));
            assert!(random.below(3) < 3 && random.chance(1.0) && !random.chance(0.0));
        }
    }
}
