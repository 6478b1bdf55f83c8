//! What a placement costs.

use super::draft::Draft;
use super::forest::Forest;

/// Positions, a price for each tree, and far more for each tree beyond `most_trees`.
#[derive(Clone, Copy)]
pub struct Cost {
    pub price: u32,
    pub most_trees: usize,
    pub beyond: u32,
}

impl Cost {
    pub fn of_draft(&self, draft: &Draft) -> u64 {
        self.sum(draft.positions, draft.trees)
    }

    pub fn of_forest(&self, forest: &Forest) -> u64 {
        self.sum(forest.positions(), forest.tokens.len())
    }

    fn sum(&self, positions: u64, trees: usize) -> u64 {
        let beyond = trees.saturating_sub(self.most_trees) as u64;
        positions + trees as u64 * self.price as u64 + beyond * self.beyond as u64
    }
}
