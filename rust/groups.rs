//! Values grouped by key, in their order: one counting sort, O(keys + values).

/// Values by key. Made again by `fill`, which keeps the memory.
#[derive(Default)]
pub struct Groups {
    /// Where the values of each key start; keys + 1 entries, and one that `fill` needs.
    starts: Vec<u32>,
    values: Vec<u32>,
}

impl Groups {
    pub fn new(keys: usize, pairs: impl Iterator<Item = (u32, u32)> + Clone) -> Self {
        let mut out = Groups::default();
        out.fill(keys, pairs);
        out
    }

    /// Groups the values of (key, value) pairs, whose keys are below `keys`. Goes over them twice.
    pub fn fill(&mut self, keys: usize, pairs: impl Iterator<Item = (u32, u32)> + Clone) {
        self.starts.clear();
        self.starts.resize(keys + 2, 0);
        // Counted two places on: summed up, the start of a key is one place on, and moves into place as it is filled.
        for (key, _) in pairs.clone() {
            self.starts[key as usize + 2] += 1;
        }
        for i in 2..self.starts.len() {
            self.starts[i] += self.starts[i - 1];
        }
        self.values.clear();
        self.values.resize(self.starts[keys + 1] as usize, 0);
        for (key, value) in pairs {
            let next = &mut self.starts[key as usize + 1];
            self.values[*next as usize] = value;
            *next += 1;
        }
    }

    #[inline]
    pub fn values(&self, key: u32) -> &[u32] {
        &self.values[self.starts[key as usize] as usize..self.starts[key as usize + 1] as usize]
    }

    /// The values of one key, to be put into another order.
    pub fn values_mut(&mut self, key: u32) -> &mut [u32] {
        &mut self.values[self.starts[key as usize] as usize..self.starts[key as usize + 1] as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_keep_their_order_within_a_key() {
        let mut groups = Groups::new(4, [(2, 10), (0, 11), (2, 12), (2, 9)].into_iter());
        assert_eq!([0, 1, 2, 3].map(|key| groups.values(key)), [&[11][..], &[], &[10, 12, 9], &[]]);
        groups.values_mut(2).sort_unstable();
        assert_eq!(groups.values(2), [9, 10, 12]);
        groups.fill(1, std::iter::empty());
        assert_eq!(groups.values(0), &[0u32; 0]);
        groups.fill(3, (0..6).map(|value| (value % 3, value)));
        assert_eq!([0, 1, 2].map(|key| groups.values(key)), [&[0, 3], &[1, 4], &[2, 5]]);
    }
}
