//! Trees for several ranks: micro-batches of one tree per rank, none empty, balanced by work.

use super::demand::Demand;
use super::draft::Draft;
use super::even::even;
use super::forest::Forest;
use super::place::place;
use super::work::work;
use crate::groups::Groups;
use crate::options::{Limits, Placement};
use crate::trie::{Trie, NONE, ROOT};

/// Smaller budgets that are tried, as multiples of an even share of the positions.
const FILLS: [f64; 4] = [1.02, 1.06, 1.15, 1.3];
/// Nodes and trees that are looked at for even work: one for so many tokens of the samples, and at least so many.
const TOKENS_PER_LOOK: u64 = 8;
const LEAST_LOOKS: u64 = 100_000;

/// What balancing came to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Balance {
    /// Work of the slowest rank over the mean, summed over micro-batches: 1 is even.
    pub imbalance: f64,
    /// Positions beyond those of the placement without ranks.
    pub extra_tokens: u64,
    /// Trees without a sample.
    pub dummies: u64,
}

/// Splits and orders the trees of a placement for `ranks`: tree `m * ranks + r` is that of rank r in micro-batch m.
/// Smaller budgets are tried as well, since evenly filled trees keep ranks from waiting; the plan with the least work of
/// the slowest ranks is taken.
pub fn rank_trees(
    placement: Placement,
    trie: &Trie,
    demand: &Demand,
    limits: &Limits,
    forest: Forest,
    ranks: usize,
) -> (Forest, Balance) {
    let tokens = forest.positions();
    let slots = forest.tokens.len().next_multiple_of(ranks);
    let longest =
        (0..demand.lengths.len()).filter(|&s| !demand.left_out[s]).map(|s| demand.lengths[s]).max().unwrap_or(0);
    let share = tokens as f64 / slots.max(1) as f64;
    let mut best = split_for_ranks(trie, forest, ranks);
    for fill in FILLS {
        let budget = ((share * fill) as u32).max(longest);
        if budget >= limits.tokens {
            break;
        }
        // Kept ids are priced by their sums here, which is never too little.
        let plan = place(placement, trie, demand, &Limits { tokens: budget, ..*limits }, None);
        if plan.tokens.len() <= slots {
            let plan = split_for_ranks(trie, plan, ranks);
            if plan.1.slowest < best.1.slowest {
                best = plan;
            }
        }
    }
    let (forest, ordered) = evened(trie, demand, limits, best, ranks);
    let extra_tokens = forest.positions().saturating_sub(tokens);
    let balance = Balance { imbalance: ordered.imbalance(ranks), extra_tokens, dummies: ordered.dummies };
    (forest, balance)
}

/// The same trees after samples have moved from the slow ones to others.
fn evened(
    trie: &Trie,
    demand: &Demand,
    limits: &Limits,
    (forest, ordered): (Forest, Ordered),
    ranks: usize,
) -> (Forest, Ordered) {
    // First fit prices kept ids exactly; by their sums, which count here, a tree of its may be over the budget.
    let mut kept = vec![0u64; forest.tokens.len()];
    for (&tree, &ids) in forest.tree_of.iter().zip(demand.kept).filter(|(&tree, _)| tree != NONE) {
        kept[tree as usize] += ids;
    }
    if ordered.dummies > 0 || kept.iter().any(|&ids| ids > limits.kept as u64) {
        return (forest, ordered);
    }
    let place = dfs_places(trie, demand.lengths.len());
    let mut order: Vec<u32> = (0..demand.lengths.len() as u32).filter(|&s| !demand.left_out[s as usize]).collect();
    order.sort_by_key(|&sample| (place[sample as usize], sample));
    let tokens: u64 = order.iter().map(|&sample| demand.lengths[sample as usize] as u64).sum();
    let mut draft = Draft::new(trie, demand, limits, &order, &forest);
    even(&mut draft, ranks, (tokens / TOKENS_PER_LOOK).max(LEAST_LOOKS));
    split_for_ranks(trie, draft.forest(), ranks)
}

/// Work over all micro-batches.
pub struct Ordered {
    /// Sum of the slowest rank of each.
    pub slowest: u64,
    pub total: u64,
    pub dummies: u64,
}

impl Ordered {
    pub fn imbalance(&self, ranks: usize) -> f64 {
        match self.total {
            0 => 1.0,
            total => self.slowest as f64 * ranks as f64 / total as f64,
        }
    }
}

/// Splits the trees with most work until their number is a multiple of `ranks` (trees of one sample cannot be split;
/// empty trees fill up), and orders them into micro-batches of similar work.
pub fn split_for_ranks(trie: &Trie, forest: Forest, ranks: usize) -> (Forest, Ordered) {
    let samples = forest.tree_of.len();
    let mut splitter =
        Splitter { trie, seen: vec![NONE; trie.nodes.len()], stamp: 0, place: dfs_places(trie, samples) };
    let members = forest.members();
    let mut trees: Vec<Part> =
        (0..forest.tokens.len()).map(|tree| splitter.part(members.values(tree as u32).to_vec())).collect();
    let slots = trees.len().next_multiple_of(ranks).max(if trees.is_empty() { 0 } else { ranks });
    while trees.len() < slots {
        let splittable = trees.iter().enumerate().filter(|(_, part)| part.members.len() > 1);
        let Some((at, _)) = splittable.max_by_key(|&(at, part)| (part.work, std::cmp::Reverse(at))) else { break };
        let part = std::mem::take(&mut trees[at].members);
        let (left, right) = splitter.split(part);
        trees[at] = left;
        trees.push(right);
    }
    let dummies = (slots - trees.len()) as u64;
    trees.resize_with(slots, Part::default);
    order(trees, samples, ranks, dummies)
}

/// Micro-batches of similar work; within one, the rank that has done least so far gets the most.
fn order(mut trees: Vec<Part>, samples: usize, ranks: usize, dummies: u64) -> (Forest, Ordered) {
    let first = |part: &Part| part.members.iter().min().copied().unwrap_or(NONE);
    trees.sort_by_key(|part| (std::cmp::Reverse(part.work), first(part)));
    let mut ordered = Ordered { slowest: 0, total: 0, dummies };
    let mut done = vec![0u64; ranks];
    let mut tokens = vec![0; trees.len()];
    let mut tree_of = vec![NONE; samples];
    for (batch, trees) in trees.chunks(ranks).enumerate() {
        let mut by_load: Vec<usize> = (0..ranks).collect();
        by_load.sort_by_key(|&rank| done[rank]);
        for (part, &rank) in trees.iter().zip(&by_load) {
            let tree = batch * ranks + rank;
            tokens[tree] = part.tokens;
            done[rank] += part.work;
            ordered.total += part.work;
            for &sample in &part.members {
                tree_of[sample as usize] = tree as u32;
            }
        }
        ordered.slowest += trees.first().map_or(0, |part| part.work);
    }
    (Forest { tree_of, tokens }, ordered)
}

/// Samples of a tree with its positions and work.
#[derive(Default)]
struct Part {
    members: Vec<u32>,
    tokens: u32,
    work: u64,
}

struct Splitter<'a> {
    trie: &'a Trie,
    /// The stamp of the last pass that met each node.
    seen: Vec<u32>,
    stamp: u32,
    /// Place of each sample in depth-first order.
    place: Vec<u32>,
}

impl Splitter<'_> {
    fn part(&mut self, members: Vec<u32>) -> Part {
        let (tokens, work) = self.grow(members.iter().copied()).last().copied().unwrap_or_default();
        Part { members, tokens, work }
    }

    /// Cuts a tree between two samples in depth-first order, so that the larger part is as small as possible.
    fn split(&mut self, mut members: Vec<u32>) -> (Part, Part) {
        members.sort_by_key(|&sample| (self.place[sample as usize], sample));
        let left = self.grow(members.iter().copied());
        let mut right = self.grow(members.iter().rev().copied());
        right.reverse();
        let larger = |&cut: &usize| left[cut - 1].1.max(right[cut].1);
        let cut = (1..members.len()).min_by_key(larger).unwrap_or(0);
        let rest = members.split_off(cut);
        let part = |members: Vec<u32>, (tokens, work): (u32, u64)| Part { members, tokens, work };
        (part(members, left[cut - 1]), part(rest, right[cut]))
    }

    /// Positions and work of a tree after each further sample. O(nodes of the tree).
    fn grow(&mut self, samples: impl Iterator<Item = u32>) -> Vec<(u32, u64)> {
        self.stamp += 1;
        let (mut tokens, mut pairs) = (0, 0);
        let mut out = Vec::new();
        for sample in samples {
            let mut node = self.trie.leaf[sample as usize];
            while node != ROOT && self.seen[node as usize] != self.stamp {
                self.seen[node as usize] = self.stamp;
                let edge = &self.trie.nodes[node as usize];
                tokens += edge.len();
                pairs += edge.pairs();
                node = edge.parent;
            }
            out.push((tokens, work(pairs, tokens as u64)));
        }
        out
    }
}

/// Place of each of the first `samples` samples in a depth-first walk over the trie.
fn dfs_places(trie: &Trie, samples: usize) -> Vec<u32> {
    let below_root = trie.nodes.iter().enumerate().skip(1);
    let children = Groups::new(trie.nodes.len(), below_root.map(|(node, edge)| (edge.parent, node as u32)));
    let mut place = vec![0; trie.nodes.len()];
    let mut stack = vec![ROOT];
    let mut next = 0;
    while let Some(node) = stack.pop() {
        place[node as usize] = next;
        next += 1;
        stack.extend(children.values(node).iter().rev());
    }
    trie.leaf[..samples].iter().map(|&leaf| place[leaf as usize]).collect()
}
