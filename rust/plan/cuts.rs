//! Samples in a row, cut into trees: of all ways to cut, the one with fewest trees and then fewest positions.
//!
//! ```text
//! row         a1  a2  a3 | a4  b1  b2      meet = positions that a sample shares with the one before it
//! meet         0   5   5 |  5   0   2      a cut costs what the samples beside it share
//! ```

use std::cmp::Reverse;
use std::collections::VecDeque;

use super::demand::Demand;
use super::forest::Forest;
use super::outline::Outline;
use crate::options::Limits;
use crate::trie::{Trie, NONE, ROOT};

/// Price of a tree: more than any number of positions.
const TREE: u64 = 1 << 32;

/// Samples in an order in which those that share much lie side by side.
#[derive(Default)]
pub struct Row {
    pub samples: Vec<u32>,
    /// Positions that each shares with the one before it.
    pub meets: Vec<u32>,
}

impl Row {
    /// The samples in lexicographic order.
    pub fn sorted(trie: &Trie, outline: &Outline) -> Self {
        let mut out = Row::default();
        let mut stack = vec![ROOT];
        let mut meet = 0;
        while let Some(node) = stack.pop() {
            if node != ROOT {
                let above = trie.nodes[node as usize].parent;
                meet = meet.min(trie.nodes[above as usize].end);
            }
            for &sample in outline.samples(node) {
                out.samples.push(sample);
                out.meets.push(meet);
                meet = trie.nodes[node as usize].end;
            }
            let from = stack.len();
            stack.extend(outline.children(node));
            stack[from..].sort_unstable_by_key(|&child| Reverse(trie.nodes[child as usize].rank()));
        }
        out
    }
}

/// As few trees as this order allows, then as few positions as so many trees allow; next fit has no fewer of either.
/// O(samples): the starts that a tree may have move on with its end, and the best of them lies at the front of a queue.
pub fn cut(row: &Row, demand: &Demand, limits: &Limits) -> Forest {
    let count = row.samples.len();
    // Sums of what each sample adds to a tree with the one before it.
    let mut sums: Vec<[u64; 3]> = Vec::with_capacity(count + 1);
    sums.push([0; 3]);
    // Cost of the best cuts before each sample, and where the last tree of it starts.
    let mut costs: Vec<u64> = Vec::with_capacity(count + 1);
    costs.push(0);
    let mut starts: Vec<u32> = Vec::with_capacity(count + 1);
    starts.push(0);
    let mut queue: VecDeque<(u64, u32)> = VecDeque::new();
    let room = limits.room();
    for (at, (&sample, &meet)) in row.samples.iter().zip(&row.meets).enumerate() {
        let [tokens, terms, kept] = demand.need(sample);
        let before = sums[at];
        let here = [before[0] + (tokens - meet) as u64, before[1] + terms as u64, before[2] + kept as u64];
        sums.push(here);
        let cost = costs[at] + meet as u64 + TREE;
        while queue.back().is_some_and(|&(other, _)| other >= cost) {
            queue.pop_back();
        }
        queue.push_back((cost, at as u32));
        let fits = |start: u32| {
            let start = start as usize;
            let (from, shared) = (sums[start], row.meets[start] as u64);
            here[0] - from[0] + shared <= room[0] as u64
                && here[1] - from[1] <= room[1] as u64
                && here[2] - from[2] <= room[2] as u64
        };
        while queue.front().is_some_and(|&(_, start)| !fits(start)) {
            queue.pop_front();
        }
        let (cost, start) = queue.front().copied().unwrap_or((cost, at as u32));
        costs.push(cost);
        starts.push(start);
    }
    let mut bounds = Vec::new();
    let mut end = count;
    while end > 0 {
        let start = starts[end] as usize;
        bounds.push((start, end));
        end = start;
    }
    let mut tree_of = vec![NONE; demand.lengths.len()];
    let mut tokens = Vec::with_capacity(bounds.len());
    for (tree, &(start, end)) in bounds.iter().rev().enumerate() {
        for &sample in &row.samples[start..end] {
            tree_of[sample as usize] = tree as u32;
        }
        tokens.push((sums[end][0] - sums[start][0]) as u32 + row.meets[start]);
    }
    Forest { tree_of, tokens }
}
