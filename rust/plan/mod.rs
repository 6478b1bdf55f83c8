//! Placement: which sample goes into which tree. Works on the nodes of the one trie over all samples, so that no
//! token is compared again for any tree.

mod bottom_up;
mod first_fit;
mod fit;
mod holders;
mod outline;
mod ranks;
mod top_down;

use crate::error::{Fault, PackError};
use crate::kept::KeptPrice;
use crate::trie::{Trie, NONE};

pub use fit::{has_room, Room};
pub use holders::Holders;
pub use ranks::{rank_trees, split_for_ranks, work, Balance};

use outline::Outline;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    FirstFit,
    Shared,
}

/// What a tree may hold at most: positions, loss terms, kept ids.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub tokens: u32,
    pub terms: u32,
    pub kept: u32,
}

impl Limits {
    pub fn room(&self) -> Room {
        [self.tokens, self.terms, self.kept]
    }
}

/// What each sample needs, whichever tree it goes to.
pub struct Demand<'a> {
    pub lengths: &'a [u32],
    pub terms: &'a [u32],
    /// Kept ids, by sample; empty when no sample has sets.
    pub kept: &'a [u64],
    /// Samples that take no part.
    pub left_out: &'a [bool],
}

impl Demand<'_> {
    /// Tokens, terms and kept ids of a sample in a tree of its own.
    fn need(&self, sample: u32) -> Room {
        let sample = sample as usize;
        let kept = self.kept.get(sample).copied().unwrap_or(0);
        [self.lengths[sample], self.terms[sample], kept as u32]
    }

    /// Why a sample fits no tree at all, if so.
    pub fn overlong(&self, sample: usize, limits: &Limits) -> Option<PackError> {
        let [tokens, terms, kept] = self.need(sample as u32);
        let over = |has: u32, unit, limit, allowed: u32| {
            let (has, allowed) = (has as u64, allowed as u64);
            (has > allowed).then(|| Fault::Overlong { has, unit, limit, allowed }.in_sample(sample))
        };
        over(tokens, "tokens", "max_tokens", limits.tokens)
            .or_else(|| over(terms, "terms", "max_terms", limits.terms))
            .or_else(|| over(kept, "kept ids", "max_kept", limits.kept))
    }
}

/// The tree of each sample (`NONE` = left out) and the positions of each tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forest {
    pub tree_of: Vec<u32>,
    pub tokens: Vec<u32>,
}

impl Forest {
    pub fn positions(&self) -> u64 {
        self.tokens.iter().map(|&tokens| tokens as u64).sum()
    }

    /// Samples of each tree in arrival order: `members[starts[tree]..starts[tree + 1]]`.
    pub fn members(&self) -> (Vec<u32>, Vec<u32>) {
        let mut starts = vec![0u32; self.tokens.len() + 2];
        let placed = || self.tree_of.iter().enumerate().filter(|(_, &tree)| tree != NONE);
        for (_, &tree) in placed() {
            starts[tree as usize + 2] += 1;
        }
        for i in 2..starts.len() {
            starts[i] += starts[i - 1];
        }
        let mut members = vec![0; starts.last().copied().unwrap_or(0) as usize];
        for (sample, &tree) in placed() {
            let next = &mut starts[tree as usize + 1];
            members[*next as usize] = sample as u32;
            *next += 1;
        }
        (starts, members)
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

/// Places all samples under one rule.
///
/// "Shared" takes the best of three plans: first fit, so that it is never worse; whole subtrees, largest first, each to
/// where it shares most; and a bottom-up packing of what each fork has below it. No rule wins on all data (the table is in
/// `benches/`), and all of them together cost less than one pass over the tokens.
pub fn place(placement: Placement, trie: &Trie, demand: &Demand, limits: &Limits, price: Option<KeptPrice>) -> Forest {
    if placement == Placement::FirstFit {
        return first_fit::first_fit(trie, demand, limits, price);
    }
    let outline = Outline::new(trie, demand);
    if outline.fits_one_tree(limits) {
        return outline.one_tree(demand);
    }
    let first = first_fit::first_fit(trie, demand, limits, price);
    let plans = [
        Some(top_down::top_down(trie, &outline, demand, limits)),
        bottom_up::bottom_up(trie, &outline, demand, limits),
    ];
    let (tokens, trees) = (first.positions(), first.tokens.len());
    let no_worse = |plan: &Forest| plan.positions() <= tokens && plan.tokens.len() <= trees;
    // A tree costs a pass of its own: worth a thirty-second part of a full one.
    let cost = |plan: &Forest| plan.positions() + plan.tokens.len() as u64 * (limits.tokens as u64 / 32);
    let best = plans.into_iter().flatten().filter(no_worse).min_by_key(cost);
    best.unwrap_or(first).by_arrival()
}
