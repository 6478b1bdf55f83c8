//! Whole subtrees, those that reach furthest first, each into the fullest of the trees with which it shares most.
//!
//! A subtree that fits nowhere is broken up into its children as long as the room left in the open trees could hold all
//! that is still to come; only then is a new tree opened.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::demand::Demand;
use super::forest::Forest;
use super::outline::Outline;
use super::room::Room;
use super::tournament::Tournament;
use super::trees_of_node::TreesOfNode;
use crate::options::Limits;
use crate::trie::{Trie, NONE, ROOT};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Unit {
    /// All samples at and below a node; fits an empty tree.
    Subtree(u32),
    /// A sample that ends at a node whose subtree was broken up.
    Sample(u32),
}

struct State<'a> {
    trie: &'a Trie,
    outline: &'a Outline,
    demand: &'a Demand<'a>,
    limits: &'a Limits,
    trees_of_node: TreesOfNode,
    free: Vec<Room>,
    all: Tournament,
    /// Free tokens over all trees.
    left: u64,
    /// Largest reach first, then in the order in which they came up.
    queue: BinaryHeap<(u32, Reverse<u32>, Unit)>,
    queued: u32,
    /// Positions still to be placed, the shared ones above them apart.
    remaining: u64,
}

/// O(units x path nodes visited x log trees).
pub fn top_down(trie: &Trie, outline: &Outline, demand: &Demand, limits: &Limits) -> Forest {
    let mut state = State {
        trie,
        outline,
        demand,
        limits,
        trees_of_node: TreesOfNode::new(trie.nodes.len()),
        free: Vec::new(),
        all: Tournament::default(),
        left: 0,
        queue: BinaryHeap::new(),
        queued: 0,
        remaining: 0,
    };
    let mut tree_of = vec![NONE; demand.lengths.len()];
    state.queue_parts(ROOT);
    while let Some((reach, _, unit)) = state.queue.pop() {
        let (top, below, need) = state.measure(unit, reach);
        let tree = match state.find_tree(top, need) {
            Some(tree) => tree,
            None if state.may_break(unit) => {
                if let Unit::Subtree(node) = unit {
                    state.remaining -= below as u64;
                    state.queue_parts(node);
                }
                continue;
            }
            None => state.new_tree(),
        };
        state.remaining -= below as u64;
        state.commit(top, need, tree);
        match unit {
            Unit::Subtree(node) => outline.assign(node, tree, &mut tree_of),
            Unit::Sample(sample) => tree_of[sample as usize] = tree,
        }
    }
    let tokens = state.free.iter().map(|room| limits.tokens - room[0]).collect();
    Forest { tree_of, tokens }
}

impl State<'_> {
    /// Queues the parts of a subtree: its children, broken up as far as none fits an empty tree, and the samples that end
    /// at its nodes.
    fn queue_parts(&mut self, node: u32) {
        let mut stack = vec![node];
        while let Some(node) = stack.pop() {
            for i in 0..self.outline.samples(node).len() {
                let sample = self.outline.samples(node)[i];
                self.queue_unit(self.demand.lengths[sample as usize], Unit::Sample(sample));
            }
            for i in (0..self.outline.children(node).len()).rev() {
                let child = self.outline.children(node)[i];
                if self.outline.fits(self.trie, child, self.limits) {
                    let tokens = self.outline.need[child as usize][0];
                    self.remaining += tokens as u64;
                    self.queue_unit(self.trie.nodes[child as usize].start + tokens, Unit::Subtree(child));
                } else {
                    stack.push(child);
                }
            }
        }
    }

    fn queue_unit(&mut self, reach: u32, unit: Unit) {
        self.queue.push((reach, Reverse(self.queued), unit));
        self.queued += 1;
    }

    /// The lowest node that a tree can hold already, the positions below it, and the need of an empty tree.
    fn measure(&self, unit: Unit, reach: u32) -> (u32, u32, Room) {
        match unit {
            Unit::Subtree(node) => {
                let [below, terms, kept] = self.outline.need[node as usize];
                (self.trie.nodes[node as usize].parent, below, [reach, terms, kept])
            }
            Unit::Sample(sample) => (self.trie.leaf[sample as usize], 0, self.demand.need(sample)),
        }
    }

    fn find_tree(&mut self, top: u32, need: Room) -> Option<u32> {
        let mut node = top;
        let mut from = 0;
        while node != ROOT {
            let room = [need[0] - self.trie.nodes[node as usize].end, need[1], need[2]];
            // Nodes further up leave more to add: without a tree that has this much room none will do.
            from = self.all.first(from, room)?;
            if let Some(tree) = self.trees_of_node.fullest(node, room, from as u32, &self.free) {
                return Some(tree);
            }
            node = self.trie.nodes[node as usize].parent;
        }
        self.all.first(from, need).map(|tree| tree as u32)
    }

    fn may_break(&self, unit: Unit) -> bool {
        let Unit::Subtree(node) = unit else { return false };
        let parts = self.outline.children(node).len() + self.outline.samples(node).len();
        parts > 1 && self.left >= self.remaining
    }

    fn new_tree(&mut self) -> u32 {
        self.free.push(self.limits.room());
        self.left += self.limits.tokens as u64;
        self.free.len() as u32 - 1
    }

    fn commit(&mut self, top: u32, need: Room, tree: u32) {
        let mut node = top;
        while node != ROOT && !self.trees_of_node.holds(node, tree) {
            self.trees_of_node.add(node, tree);
            node = self.trie.nodes[node as usize].parent;
        }
        let tokens = need[0] - self.trie.nodes[node as usize].end;
        let room = &mut self.free[tree as usize];
        (room[0], room[1], room[2]) = (room[0] - tokens, room[1] - need[1], room[2] - need[2]);
        self.left -= tokens as u64;
        self.all.set(tree as usize, *room);
    }
}
