//! The trees of each node of the trie: those that hold it.

use std::ops::Range;

use super::room::{has_room, Room};
use super::tournament::Tournament;
use crate::simd::prefetch;

/// Up to this many trees of a list are scanned.
const SCAN: usize = 32;
/// Trees at the end of a list that are looked at before the others: a cache line.
const NEAR: usize = 16;
/// Of lists up to this long, the fullest tree is looked for.
const FULLEST: usize = 48;

/// The trees of a node, ascending. Most nodes lie in one or two trees, which need no list.
#[derive(Clone, Copy)]
enum Trees {
    None,
    One([u32; 1]),
    Two([u32; 2]),
    /// Index into `TreesOfNode::lists`, and the last tree of the list: mostly that is full, and the list is not read.
    Many {
        list: u32,
        last: u32,
    },
}

pub struct TreesOfNode {
    nodes: Vec<Trees>,
    lists: Vec<List>,
}

impl TreesOfNode {
    pub fn new(nodes: usize) -> Self {
        TreesOfNode { nodes: vec![Trees::None; nodes], lists: Vec::new() }
    }

    pub fn holds(&self, node: u32, tree: u32) -> bool {
        match self.nodes[node as usize] {
            Trees::Many { list, last } => last == tree || self.lists[list as usize].contains(tree),
            _ => self.trees(node).contains(&tree),
        }
    }

    /// Adds a tree that does not hold the node yet.
    pub fn add(&mut self, node: u32, tree: u32) {
        let trees = &mut self.nodes[node as usize];
        match trees {
            Trees::None => *trees = Trees::One([tree]),
            &mut Trees::One([other]) => *trees = Trees::Two([tree.min(other), tree.max(other)]),
            &mut Trees::Two([a, b]) => {
                let mut all = Vec::with_capacity(8);
                all.extend([a, b, tree]);
                all.sort_unstable();
                *trees = Trees::Many { list: self.lists.len() as u32, last: all[2] };
                self.lists.push(List { trees: all, fit: None });
            }
            Trees::Many { list, last } => {
                self.lists[*list as usize].add(tree);
                *last = tree.max(*last);
            }
        }
    }

    /// Asks for what is kept of a node to be brought into the caches.
    pub fn ask_for(&self, node: u32) {
        prefetch(&self.nodes, node);
    }

    /// Asks for the head of its list of trees.
    pub fn ask_for_list(&self, node: u32) {
        if let Trees::Many { list, .. } = self.nodes[node as usize] {
            prefetch(&self.lists, list);
        }
    }

    /// Asks for the end of its list of trees.
    pub fn ask_for_trees(&self, node: u32) {
        if let Trees::Many { list, .. } = self.nodes[node as usize] {
            let trees = &self.lists[list as usize].trees;
            prefetch(trees, trees.len() as u32 - 1);
        }
    }

    /// One past the last tree that holds the node; 0 where none does.
    pub fn stop(&self, node: u32) -> u32 {
        match self.nodes[node as usize] {
            Trees::None => 0,
            Trees::One([last]) | Trees::Two([_, last]) | Trees::Many { last, .. } => last + 1,
        }
    }

    /// The first tree that holds the node, has room and is affordable, of those from `range.start` on and before
    /// `range.end`.
    #[inline]
    pub fn first(
        &mut self,
        node: u32,
        need: Room,
        range: Range<u32>,
        free: &[Room],
        affordable: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        match self.nodes[node as usize] {
            Trees::Many { last, .. } if last < range.start => None,
            Trees::Many { list, .. } => self.lists[list as usize].first(need, range, free, affordable),
            _ => {
                let fits =
                    |tree: &u32| range.contains(tree) && has_room(free[*tree as usize], need) && affordable(*tree);
                self.trees(node).iter().copied().find(fits)
            }
        }
    }

    /// Of the trees that hold the node and have room, from `from` on, the fullest; of a long list, the first.
    pub fn fullest(&mut self, node: u32, need: Room, from: u32, free: &[Room]) -> Option<u32> {
        let trees = match self.nodes[node as usize] {
            Trees::Many { last, .. } if last < from => return None,
            Trees::Many { list, .. } if self.lists[list as usize].trees.len() > FULLEST => {
                return self.lists[list as usize].first(need, from..u32::MAX, free, |_| true);
            }
            _ => self.trees(node),
        };
        let fits = |&tree: &u32| tree >= from && has_room(free[tree as usize], need);
        trees.iter().copied().filter(fits).min_by_key(|&tree| free[tree as usize][0])
    }

    /// The trees that hold the node, ascending.
    pub fn trees(&self, node: u32) -> &[u32] {
        match &self.nodes[node as usize] {
            Trees::None => &[],
            Trees::One(trees) => trees,
            Trees::Two(trees) => trees,
            Trees::Many { list, .. } => &self.lists[*list as usize].trees,
        }
    }

    /// Makes room for nodes that the trie has got since; no tree holds them.
    pub fn grow(&mut self, nodes: usize) {
        self.nodes.resize(nodes, Trees::None);
    }

    /// Lets the trees of `from` hold `to`, which no tree holds yet.
    pub fn copy(&mut self, from: u32, to: u32) {
        for tree in self.trees(from).to_vec() {
            self.add(to, tree);
        }
    }
}

/// Trees in ascending order; a long list has a tournament tree over their room. The room only falls, so the stale
/// entries of the tournament are upper bounds that are set right when they are hit.
struct List {
    trees: Vec<u32>,
    fit: Option<Box<Tournament>>,
}

impl List {
    fn contains(&self, tree: u32) -> bool {
        self.trees.binary_search(&tree).is_ok()
    }

    /// Where a tree is, or would be. Near the end as a rule, since earlier trees are full: the end is looked at first.
    fn place(&self, tree: u32) -> usize {
        let near = self.trees.len().saturating_sub(NEAR);
        match self.trees[near..].iter().rposition(|&other| other < tree) {
            Some(before) => near + before + 1,
            None => self.trees[..near].partition_point(|&other| other < tree),
        }
    }

    fn add(&mut self, tree: u32) {
        let at = self.place(tree);
        if let Some(fit) = &mut self.fit {
            // The room is not known here; the bound is set right by the first query that meets it.
            fit.insert(at, self.trees.len(), [u32::MAX - 1; 3]);
        }
        self.trees.insert(at, tree);
    }

    fn first(&mut self, need: Room, range: Range<u32>, free: &[Room], affordable: impl Fn(u32) -> bool) -> Option<u32> {
        let trees = &self.trees[..];
        let mut from = self.place(range.start);
        if trees.len() - from <= SCAN {
            let fits = |&tree: &u32| has_room(free[tree as usize], need) && affordable(tree);
            return trees[from..].iter().copied().take_while(|&tree| tree < range.end).find(fits);
        }
        let rooms = || trees.iter().map(|&tree| free[tree as usize]);
        let fit = self.fit.get_or_insert_with(|| Box::new(Tournament::new(rooms())));
        while let Some(at) = fit.first(from, need) {
            let tree = trees[at];
            if tree >= range.end {
                return None;
            }
            let room = free[tree as usize];
            if !has_room(room, need) {
                fit.set(at, room);
            } else if affordable(tree) {
                return Some(tree);
            } else {
                from = at + 1;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_a_scan_finds_in_one_two_and_many_trees() {
        let free: Vec<Room> = (0..400u32).map(|tree| [tree * 37 % 101, tree * 53 % 89, tree % 7]).collect();
        for count in [0, 1, 2, 3, 30, 48, 49, 300] {
            // In an order in which most come at the end and some before.
            let mut order: Vec<u32> = (0..count).map(|i| i + i % 3 * 20).collect();
            order.dedup();
            let mut trees_of_node = TreesOfNode::new(1);
            let mut trees: Vec<u32> = Vec::new();
            for tree in order {
                if trees.contains(&tree) {
                    continue;
                }
                assert!(!trees_of_node.holds(0, tree));
                trees_of_node.add(0, tree);
                assert!(trees_of_node.holds(0, tree));
                trees.push(tree);
                trees.sort_unstable();
                let (from, need) = (tree.saturating_sub(25), [tree % 100, tree % 80, tree % 5]);
                for range in [0..u32::MAX, from..tree + 2, 0..tree / 2] {
                    let fits =
                        |&tree: &u32| range.contains(&tree) && has_room(free[tree as usize], need) && tree % 5 > 0;
                    let scan = trees.iter().copied().find(fits);
                    assert_eq!(trees_of_node.first(0, need, range.clone(), &free, |tree| tree % 5 > 0), scan);
                }
                let fits = |&tree: &u32| tree >= from && has_room(free[tree as usize], need);
                let scan = trees.iter().copied().filter(fits);
                let scan = if trees.len() <= FULLEST { scan.min_by_key(|&t| free[t as usize][0]) } else { scan.min() };
                assert_eq!(trees_of_node.fullest(0, need, from, &free), scan);
            }
            assert_eq!(trees_of_node.trees(0), trees);
            assert_eq!(trees_of_node.stop(0) > 0, count > 0);
        }
    }
}
