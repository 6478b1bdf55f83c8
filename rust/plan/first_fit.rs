//! First fit: samples in an order, each into the first tree in which its additional positions, terms and kept ids fit;
//! else into a new tree.

use super::demand::Demand;
use super::forest::Forest;
use super::room::Room;
use super::tournament::Tournament;
use super::trees_of_node::TreesOfNode;
use crate::kept_sets::KeptPrice;
use crate::options::Limits;
use crate::trie::{Trie, AHEAD, NONE, ROOT, STEPS_AHEAD};

/// O(samples x path nodes visited x log trees). A tree that holds a node of the sample's path needs only what lies below
/// that node, so the walk goes from the leaf up, and ends where no earlier tree could be found any more.
pub fn first_fit(trie: &Trie, demand: &Demand, limits: &Limits, price: Option<KeptPrice>) -> Forest {
    first_fit_within(trie, demand, limits, price, (u64::MAX, usize::MAX)).unwrap_or_default()
}

/// The same; `None` once it has more positions and more trees than `worst`.
pub fn first_fit_within(
    trie: &Trie,
    demand: &Demand,
    limits: &Limits,
    price: Option<KeptPrice>,
    worst: (u64, usize),
) -> Option<Forest> {
    fit_in_order(trie, demand, limits, price, 0..demand.lengths.len() as u32, worst)
}

/// First fit in order of falling length, where that is another, within `worst` as well. Kept ids are priced by their sums.
pub fn first_fit_decreasing(trie: &Trie, demand: &Demand, limits: &Limits, worst: (u64, usize)) -> Option<Forest> {
    let mut order: Vec<u32> = (0..demand.lengths.len() as u32).collect();
    if demand.lengths.windows(2).all(|pair| pair[0] == pair[1]) {
        return None; // this is first fit
    }
    order.sort_by_key(|&sample| std::cmp::Reverse(demand.lengths[sample as usize]));
    fit_in_order(trie, demand, limits, None, order.into_iter(), worst)
}

fn fit_in_order(
    trie: &Trie,
    demand: &Demand,
    limits: &Limits,
    price: Option<KeptPrice>,
    order: impl Iterator<Item = u32>,
    worst: (u64, usize),
) -> Option<Forest> {
    let trees_of_node = TreesOfNode::new(trie.nodes.len());
    let steps = trie.nodes.iter().map(|node| (node.parent, node.end)).collect();
    let mut state =
        State { trie, steps, trees_of_node, free: Vec::new(), all: Tournament::default(), price, positions: 0 };
    let mut tree_of = vec![NONE; demand.lengths.len()];
    let order: Vec<u32> = order.collect();
    for (at, &sample) in order.iter().enumerate() {
        if at % AHEAD == 0 && trie.outgrows_caches() {
            state.read_ahead(&order[at..order.len().min(at + AHEAD)]);
        }
        if demand.left_out[sample as usize] {
            continue;
        }
        let mut need = demand.need(sample);
        if let Some(price) = &state.price {
            // What the sample adds to any tree; the exact price is asked for each tree.
            need[2] = price.unshared[sample as usize] as u32;
        }
        let (mut tree, held) = state.first_tree(sample, need);
        if tree == NONE {
            tree = state.free.len() as u32;
            state.free.push(limits.room());
        }
        state.commit(sample, need, (tree, held));
        tree_of[sample as usize] = tree;
        if state.positions > worst.0 && state.free.len() > worst.1 {
            return None;
        }
    }
    let tokens = state.free.iter().map(|room| limits.tokens - room[0]).collect();
    Some(Forest { tree_of, tokens })
}

struct State<'a> {
    trie: &'a Trie,
    /// (parent, end) of each node: what the walks read, in a fifth of the memory.
    steps: Vec<(u32, u32)>,
    trees_of_node: TreesOfNode,
    free: Vec<Room>,
    all: Tournament,
    price: Option<KeptPrice>,
    positions: u64,
}

impl State<'_> {
    /// Asks for what the walks of the next samples will read, a step at a time for all, so that their cache misses overlap:
    /// the nodes, what is kept of their trees, the lists of these.
    fn read_ahead(&self, samples: &[u32]) {
        let mut nodes = [ROOT; AHEAD];
        for (node, &sample) in nodes.iter_mut().zip(samples) {
            *node = self.trie.leaf[sample as usize];
        }
        let mut met = [ROOT; AHEAD * STEPS_AHEAD];
        let mut count = 0;
        for _ in 0..STEPS_AHEAD {
            for node in nodes.iter_mut().filter(|node| **node != ROOT) {
                self.trees_of_node.ask_for(*node);
                met[count] = *node;
                count += 1;
                *node = self.steps[*node as usize].0;
            }
        }
        met[..count].iter().for_each(|&node| self.trees_of_node.ask_for_list(node));
        met[..count].iter().for_each(|&node| self.trees_of_node.ask_for_trees(node));
    }

    /// The first tree with room, and the lowest node of the sample's path that it holds; `NONE` where a new one is needed.
    fn first_tree(&mut self, sample: u32, need: Room) -> (u32, u32) {
        let (price, free) = (&self.price, &self.free);
        let affordable = |tree: u32| match price {
            Some(price) => price.price(sample, tree) <= free[tree as usize][2] as u64,
            None => true,
        };
        let mut best = (NONE, ROOT);
        let mut from = 0;
        let mut node = self.trie.leaf[sample as usize];
        while node != ROOT {
            let (parent, end) = self.steps[node as usize];
            if self.trees_of_node.stop(node) > from as u32 {
                let room = [need[0] - end, need[1], need[2]];
                // Nodes further up leave more to add: no tree before the first that has this much room will do.
                from = match self.all.first(from, room) {
                    Some(tree) if (tree as u32) < best.0 => tree,
                    _ => return best,
                };
                if let Some(tree) = self.trees_of_node.first(node, room, from as u32..best.0, free, affordable) {
                    best = (tree, node);
                }
            }
            node = parent;
        }
        let mut next = self.all.first(from, need);
        while let Some(tree) = next.filter(|&tree| (tree as u32) < best.0) {
            if affordable(tree as u32) {
                return (tree as u32, ROOT);
            }
            next = self.all.first(tree + 1, need);
        }
        best
    }

    /// Puts a sample into a tree that holds its path down to `held`.
    fn commit(&mut self, sample: u32, need: Room, (tree, held): (u32, u32)) {
        let mut node = self.trie.leaf[sample as usize];
        while node != held {
            self.trees_of_node.add(node, tree);
            node = self.steps[node as usize].0;
        }
        let room = &mut self.free[tree as usize];
        let added = need[0] - self.steps[held as usize].1;
        self.positions += added as u64;
        room[0] -= added;
        room[1] -= need[1];
        room[2] -= match &mut self.price {
            Some(price) => price.commit(sample, tree) as u32,
            None => need[2],
        };
        self.all.set(tree as usize, *room);
    }
}
