//! The trees of each node of the trie: those that hold it.

use super::room::{has_room, Room};
use super::tournament::Tournament;

/// Lists of up to this many trees are scanned.
const SCAN: usize = 12;

/// The trees of a node. Most nodes lie in one tree, which needs no list.
#[derive(Clone, Copy)]
enum Trees {
    None,
    One(u32),
    /// Index into `TreesOfNode::lists`.
    Many(u32),
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
            Trees::None => false,
            Trees::One(other) => other == tree,
            Trees::Many(list) => self.lists[list as usize].contains(tree),
        }
    }

    /// Adds a tree that does not hold the node yet.
    pub fn add(&mut self, node: u32, tree: u32) {
        let trees = &mut self.nodes[node as usize];
        match *trees {
            Trees::None => *trees = Trees::One(tree),
            Trees::One(other) => {
                *trees = Trees::Many(self.lists.len() as u32);
                self.lists.push(List::two(other, tree));
            }
            Trees::Many(list) => self.lists[list as usize].add(tree),
        }
    }

    /// The first tree before `best` that holds the node, has room and is affordable; else `best`.
    #[inline]
    pub fn first(&mut self, node: u32, need: Room, best: u32, free: &[Room], affordable: impl Fn(u32) -> bool) -> u32 {
        match self.nodes[node as usize] {
            Trees::None => best,
            Trees::One(tree) if tree < best && has_room(free[tree as usize], need) && affordable(tree) => tree,
            Trees::One(_) => best,
            Trees::Many(list) => self.lists[list as usize].first(need, best, free, affordable),
        }
    }

    /// Of the trees that hold the node and have room the fullest; of a long list, the first.
    pub fn fullest(&mut self, node: u32, need: Room, free: &[Room]) -> Option<u32> {
        let fits = |&tree: &u32| has_room(free[tree as usize], need);
        match self.nodes[node as usize] {
            Trees::None => None,
            Trees::One(tree) => Some(tree).filter(fits),
            Trees::Many(list) => {
                let list = &mut self.lists[list as usize];
                if list.trees.len() <= 4 * SCAN {
                    return list.trees.iter().copied().filter(fits).min_by_key(|&tree| free[tree as usize][0]);
                }
                let none = u32::MAX;
                Some(list.first(need, none, free, |_| true)).filter(|&tree| tree != none)
            }
        }
    }

    /// The trees that hold the node, ascending.
    pub fn trees(&self, node: u32) -> &[u32] {
        match &self.nodes[node as usize] {
            Trees::None => &[],
            Trees::One(tree) => std::slice::from_ref(tree),
            Trees::Many(list) => &self.lists[*list as usize].trees,
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
    fn two(a: u32, b: u32) -> Self {
        List { trees: vec![a.min(b), a.max(b)], fit: None }
    }

    fn contains(&self, tree: u32) -> bool {
        self.trees.last() == Some(&tree) || self.trees.binary_search(&tree).is_ok()
    }

    fn add(&mut self, tree: u32) {
        let at = self.trees.partition_point(|&other| other < tree);
        self.trees.insert(at, tree);
        match &mut self.fit {
            // The room is not known here; the bound is set right by the first query that meets it.
            Some(fit) if at + 1 == self.trees.len() => fit.set(at, [u32::MAX - 1; 3]),
            fit => *fit = None,
        }
    }

    fn first(&mut self, need: Room, best: u32, free: &[Room], affordable: impl Fn(u32) -> bool) -> u32 {
        if self.trees.len() <= SCAN {
            let fits = |&tree: &u32| has_room(free[tree as usize], need) && affordable(tree);
            let earlier = self.trees.iter().copied().take_while(|&tree| tree < best);
            return earlier.into_iter().find(fits).unwrap_or(best);
        }
        let trees = &self.trees;
        let rooms = || trees.iter().map(|&tree| free[tree as usize]);
        let fit = self.fit.get_or_insert_with(|| Box::new(Tournament::new(rooms())));
        let mut from = 0;
        while let Some(at) = fit.first(from, need) {
            let tree = trees[at];
            if tree >= best {
                return best;
            }
            let room = free[tree as usize];
            if !has_room(room, need) {
                fit.set(at, room);
            } else if affordable(tree) {
                return tree;
            } else {
                from = at + 1;
            }
        }
        best
    }
}
