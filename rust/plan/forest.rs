//! What a placement gives: the tree of each sample.

use crate::groups::Groups;
use crate::trie::NONE;

/// The tree of each sample (`NONE` = left out) and the positions of each tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forest {
    pub tree_of: Vec<u32>,
    pub tokens: Vec<u32>,
}

impl Forest {
    pub fn positions(&self) -> u64 {
        self.tokens.iter().map(|&tokens| tokens as u64).sum()
    }

    /// Samples of each tree in arrival order.
    pub fn members(&self) -> Groups {
        let placed = self.tree_of.iter().enumerate().filter(|(_, &tree)| tree != NONE);
        Groups::new(self.tokens.len(), placed.map(|(sample, &tree)| (tree, sample as u32)))
    }

    /// The same forest with its trees numbered by their first samples, without empty ones.
    pub fn by_arrival(self) -> Self {
        let mut number = vec![NONE; self.tokens.len()];
        let mut tokens = Vec::with_capacity(self.tokens.len());
        let mut tree_of = self.tree_of;
        for tree in tree_of.iter_mut().filter(|tree| **tree != NONE) {
            let number = &mut number[*tree as usize];
            if *number == NONE {
                *number = tokens.len() as u32;
                tokens.push(self.tokens[*tree as usize]);
            }
            *tree = *number;
        }
        Forest { tree_of, tokens }
    }
}
