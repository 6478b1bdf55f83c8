//! First fit: samples in arrival order, each into the first tree in which its additional positions, terms and kept ids
//! fit; else into a new tree.

use super::demand::Demand;
use super::forest::Forest;
use super::room::Room;
use super::tournament::Tournament;
use super::trees_of_node::TreesOfNode;
use crate::kept_sets::KeptPrice;
use crate::options::Limits;
use crate::trie::{Trie, NONE, ROOT};

/// O(samples x path nodes visited x log trees). A tree that holds a node of the sample's path needs only what lies below
/// that node, so the walk goes from the leaf up, and ends where no earlier tree could be found any more.
pub fn first_fit(trie: &Trie, demand: &Demand, limits: &Limits, price: Option<KeptPrice>) -> Forest {
    let trees_of_node = TreesOfNode::new(trie.nodes.len());
    let mut state = State { trie, trees_of_node, free: Vec::new(), all: Tournament::default(), price };
    let mut tree_of = Vec::with_capacity(trie.leaf.len());
    for sample in 0..demand.lengths.len() as u32 {
        if demand.left_out[sample as usize] {
            tree_of.push(NONE);
            continue;
        }
        let mut need = demand.need(sample);
        if let Some(price) = &state.price {
            // What the sample adds to any tree; the exact price is asked for each tree.
            need[2] = price.unshared[sample as usize] as u32;
        }
        let tree = match state.first_tree(sample, need) {
            NONE => {
                state.free.push(limits.room());
                state.free.len() as u32 - 1
            }
            tree => tree,
        };
        state.commit(sample, need, tree);
        tree_of.push(tree);
    }
    let tokens = state.free.iter().map(|room| limits.tokens - room[0]).collect();
    Forest { tree_of, tokens }
}

struct State<'a> {
    trie: &'a Trie,
    trees_of_node: TreesOfNode,
    free: Vec<Room>,
    all: Tournament,
    price: Option<KeptPrice>,
}

impl State<'_> {
    fn first_tree(&mut self, sample: u32, need: Room) -> u32 {
        let (price, free) = (&self.price, &self.free);
        let affordable = |tree: u32| match price {
            Some(price) => price.price(sample, tree) <= free[tree as usize][2] as u64,
            None => true,
        };
        let mut best = NONE;
        let mut node = self.trie.leaf[sample as usize];
        while node != ROOT && best != 0 {
            let room = [need[0] - self.trie.nodes[node as usize].end, need[1], need[2]];
            best = self.trees_of_node.first(node, room, best, free, affordable);
            // Nodes further up leave more to add: if no earlier tree has this much room, none will do.
            if best != NONE && self.all.first(0, room).is_none_or(|tree| tree as u32 >= best) {
                return best;
            }
            node = self.trie.nodes[node as usize].parent;
        }
        let mut next = self.all.first(0, need);
        while let Some(tree) = next.filter(|&tree| (tree as u32) < best) {
            if affordable(tree as u32) {
                return tree as u32;
            }
            next = self.all.first(tree + 1, need);
        }
        best
    }

    fn commit(&mut self, sample: u32, need: Room, tree: u32) {
        let mut node = self.trie.leaf[sample as usize];
        while node != ROOT && !self.trees_of_node.holds(node, tree) {
            self.trees_of_node.add(node, tree);
            node = self.trie.nodes[node as usize].parent;
        }
        let room = &mut self.free[tree as usize];
        room[0] -= need[0] - self.trie.nodes[node as usize].end;
        room[1] -= need[1];
        room[2] -= match &mut self.price {
            Some(price) => price.commit(sample, tree) as u32,
            None => need[2],
        };
        self.all.set(tree as usize, *room);
    }
}
