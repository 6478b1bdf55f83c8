//! The trie from above: children, and what each subtree needs.

use super::demand::Demand;
use super::forest::Forest;
use super::room::{has_room, Room};
use crate::groups::Groups;
use crate::options::Limits;
use crate::trie::{Trie, NONE, ROOT};

pub struct Outline {
    /// Nodes that some sample passes, parents first.
    pub order: Vec<u32>,
    /// Positions (the node's own included), terms and kept ids of the subtree.
    pub need: Vec<Room>,
    children: Groups,
    /// Samples by the node at which they end.
    samples: Groups,
}

impl Outline {
    /// O(nodes + samples). Samples that are left out, and nodes that only they pass, are not in it.
    pub fn new(trie: &Trie, demand: &Demand) -> Self {
        let nodes = trie.nodes.len();
        let samples = || (0..demand.lengths.len() as u32).filter(|&sample| !demand.left_out[sample as usize]);
        let leaf = |sample: u32| trie.leaf[sample as usize] as usize;
        let mut used = vec![false; nodes];
        used[ROOT as usize] = true;
        for sample in samples() {
            let mut node = leaf(sample);
            while !used[node] {
                used[node] = true;
                node = trie.nodes[node].parent as usize;
            }
        }
        let below_root = || (1..nodes as u32).filter(|&node| used[node as usize]);
        let mut out = Outline {
            order: Vec::with_capacity(nodes),
            need: vec![[0; 3]; nodes],
            children: Groups::new(nodes, below_root().map(|node| (trie.nodes[node as usize].parent, node))),
            samples: Groups::new(nodes, samples().map(|sample| (leaf(sample) as u32, sample))),
        };
        let mut stack = vec![ROOT];
        while let Some(node) = stack.pop() {
            out.order.push(node);
            stack.extend(out.children(node).iter().rev());
        }
        for i in (0..out.order.len()).rev() {
            let node = out.order[i];
            let mut need = out.need[node as usize];
            need[0] += trie.nodes[node as usize].len();
            for &sample in out.samples(node) {
                let [_, terms, kept] = demand.need(sample);
                need[1] += terms;
                need[2] += kept;
            }
            out.need[node as usize] = need;
            if node != ROOT {
                let above = &mut out.need[trie.nodes[node as usize].parent as usize];
                (above[0], above[1], above[2]) = (above[0] + need[0], above[1] + need[1], above[2] + need[2]);
            }
        }
        out
    }

    pub fn children(&self, node: u32) -> &[u32] {
        self.children.values(node)
    }

    /// Samples that end at the node.
    pub fn samples(&self, node: u32) -> &[u32] {
        self.samples.values(node)
    }

    /// Whether a tree can hold the whole subtree, with the path down to it.
    pub fn fits(&self, trie: &Trie, node: u32, limits: &Limits) -> bool {
        let [tokens, terms, kept] = self.need[node as usize];
        has_room(limits.room(), [trie.nodes[node as usize].start + tokens, terms, kept])
    }

    pub fn fits_one_tree(&self, limits: &Limits) -> bool {
        has_room(limits.room(), self.need[ROOT as usize])
    }

    /// Whether no placement has fewer positions or fewer trees: each position once, in as few trees as can hold them.
    pub fn is_best(&self, forest: &Forest, limits: &Limits) -> bool {
        let [tokens, _, _] = self.need[ROOT as usize];
        forest.positions() == tokens as u64 && forest.tokens.len() as u32 <= tokens.div_ceil(limits.tokens)
    }

    pub fn one_tree(&self, demand: &Demand) -> Forest {
        let tree_of = demand.left_out.iter().map(|&out| if out { NONE } else { 0 }).collect();
        let tokens = self.need[ROOT as usize][0];
        Forest { tree_of, tokens: if tokens == 0 { vec![] } else { vec![tokens] } }
    }

    /// Sets the tree of all samples of a subtree.
    pub fn assign(&self, node: u32, tree: u32, tree_of: &mut [u32]) {
        let mut stack = vec![node];
        while let Some(node) = stack.pop() {
            for &sample in self.samples(node) {
                tree_of[sample as usize] = tree;
            }
            stack.extend(self.children(node));
        }
    }
}
