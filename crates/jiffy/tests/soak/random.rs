//! Reproducible random numbers.

/// SplitMix64 (Steele, Lea, Flood 2014).
pub struct TestRandom(u64);

impl TestRandom {
    /// Creates a generator. Generators of one seed with different streams return different numbers.
    pub fn new(seed: u64, stream: u64) -> Self {
        Self(seed ^ stream.wrapping_mul(0xa076_1d64_78bd_642f))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `sides`.
    pub fn below(&mut self, sides: usize) -> usize {
        usize::try_from(self.next() % sides as u64).unwrap()
    }

    /// Returns one of `choices` according to the weights.
    pub fn pick<T: Copy>(&mut self, choices: &[(usize, T)]) -> T {
        let all: usize = choices.iter().map(|(weight, _)| weight).sum();
        let mut left = self.below(all);
        for (weight, choice) in choices {
            match left.checked_sub(*weight) {
                Some(rest) => left = rest,
                None => return *choice,
            }
        }
        choices[0].1
    }
}
