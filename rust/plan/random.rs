//! Numbers of chance from one seed: the same samples give the same placement (xorshift).

pub struct Random(u64);

impl Random {
    pub fn new() -> Self {
        Random(0x9E37_79B9_7F4A_7C15)
    }

    /// Below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (((self.0 >> 32) * end as u64) >> 32) as usize
    }
}
