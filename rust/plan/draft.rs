//! A placement that can be changed: samples are taken out and put back, at the cost of the nodes that change hands.

use super::demand::Demand;
use super::forest::Forest;
use super::free_room::FreeRoom;
use super::room::{has_room, Room};
use super::tree_counts::TreeCounts;
use crate::options::Limits;
use crate::trie::{Trie, NONE, ROOT};

/// Trees of a node that are looked at one by one, at most.
const LOOK: usize = 96;

/// Below, a sample is named by its place in `order`, so that neighbours are those that share most.
pub struct Draft<'a> {
    trie: &'a Trie,
    demand: &'a Demand<'a>,
    /// Samples in depth-first order.
    order: &'a [u32],
    /// Room of an empty tree.
    pub room: Room,
    /// The tree of each sample, `NONE` while it is taken out.
    pub tree_of: Vec<u32>,
    /// Trees with a sample are open; what searches find are those.
    pub rooms: FreeRoom,
    filled: Vec<u32>,
    /// (query, key) pairs of each tree.
    pairs: Vec<u64>,
    trees_of: Vec<TreeCounts>,
    pub positions: u64,
    pub trees: usize,
    /// The stamp of the last count that met each node.
    seen: Vec<u32>,
    stamp: u32,
    /// Nodes and trees looked at so far: a measure of time that is the same on every machine.
    pub spent: u64,
}

impl<'a> Draft<'a> {
    /// O(nodes + samples).
    pub fn new(trie: &'a Trie, demand: &'a Demand, limits: &Limits, order: &'a [u32], forest: &Forest) -> Self {
        let mut out = Draft {
            trie,
            demand,
            order,
            room: limits.room(),
            tree_of: vec![NONE; order.len()],
            rooms: FreeRoom::default(),
            filled: Vec::new(),
            pairs: Vec::new(),
            trees_of: vec![TreeCounts::default(); trie.nodes.len()],
            positions: 0,
            trees: 0,
            seen: vec![0; trie.nodes.len()],
            stamp: 0,
            spent: 0,
        };
        for _ in 0..forest.tokens.len() {
            out.push_tree();
        }
        for (place, &sample) in order.iter().enumerate() {
            out.put(place as u32, forest.tree_of[sample as usize]);
        }
        out.spent = 0;
        out
    }

    pub fn forest(&self) -> Forest {
        let mut tree_of = vec![NONE; self.demand.lengths.len()];
        for (place, &tree) in self.tree_of.iter().enumerate() {
            tree_of[self.order[place] as usize] = tree;
        }
        let tokens = (0..self.rooms.len() as u32).map(|tree| self.room[0] - self.rooms.get(tree)[0]).collect();
        Forest { tree_of, tokens }
    }

    /// Samples of each tree, ascending.
    pub fn members(&self) -> Vec<Vec<u32>> {
        let mut out: Vec<Vec<u32>> = self.filled.iter().map(|&filled| Vec::with_capacity(filled as usize)).collect();
        for (place, &tree) in self.tree_of.iter().enumerate() {
            out[tree as usize].push(place as u32);
        }
        out
    }

    fn push_tree(&mut self) -> u32 {
        let tree = self.rooms.push(self.room);
        self.filled.push(0);
        self.pairs.push(0);
        tree
    }

    /// A tree without a sample.
    pub fn empty_tree(&mut self) -> u32 {
        match self.filled.iter().position(|&filled| filled == 0) {
            Some(tree) => tree as u32,
            None => self.push_tree(),
        }
    }

    pub fn put(&mut self, place: u32, tree: u32) {
        let mut node = self.leaf(place);
        let mut added = 0;
        while node != ROOT {
            self.spent += 1;
            if !self.trees_of[node as usize].add(tree) {
                break;
            }
            added += self.trie.nodes[node as usize].len();
            self.pairs[tree as usize] += self.trie.nodes[node as usize].pairs();
            node = self.trie.nodes[node as usize].parent;
        }
        let [_, terms, kept] = self.demand.need(self.order[place as usize]);
        let free = self.rooms.get(tree);
        debug_assert!(has_room(free, [added, terms, kept]), "a sample was put where it does not fit");
        self.rooms.set(tree, [free[0] - added, free[1] - terms, free[2] - kept]);
        self.positions += added as u64;
        if self.filled[tree as usize] == 0 {
            self.trees += 1;
            self.rooms.set_open(tree, true);
        }
        self.filled[tree as usize] += 1;
        self.tree_of[place as usize] = tree;
    }

    /// Puts a sample into a tree if that has room.
    pub fn try_put(&mut self, place: u32, tree: u32) -> bool {
        let leaf = self.leaf(place);
        let mut node = leaf;
        while node != ROOT && !self.trees_of[node as usize].holds(tree) {
            self.spent += 1;
            node = self.trie.nodes[node as usize].parent;
        }
        let [_, terms, kept] = self.demand.need(self.order[place as usize]);
        let fits = has_room(self.rooms.get(tree), [self.end(leaf) - self.end(node), terms, kept]);
        if fits {
            self.put(place, tree);
        }
        fits
    }

    /// Positions and (query, key) pairs of a tree.
    pub fn load(&self, tree: u32) -> (u64, u64) {
        ((self.room[0] - self.rooms.get(tree)[0]) as u64, self.pairs[tree as usize])
    }

    /// Takes a sample out, if it is in a tree.
    pub fn take(&mut self, place: u32) {
        let tree = std::mem::replace(&mut self.tree_of[place as usize], NONE);
        if tree == NONE {
            return;
        }
        let mut node = self.leaf(place);
        let mut gone = 0;
        while node != ROOT {
            self.spent += 1;
            if !self.trees_of[node as usize].remove(tree) {
                break;
            }
            gone += self.trie.nodes[node as usize].len();
            self.pairs[tree as usize] -= self.trie.nodes[node as usize].pairs();
            node = self.trie.nodes[node as usize].parent;
        }
        let [_, terms, kept] = self.demand.need(self.order[place as usize]);
        let free = self.rooms.get(tree);
        self.rooms.set(tree, [free[0] + gone, free[1] + terms, free[2] + kept]);
        self.positions -= gone as u64;
        self.filled[tree as usize] -= 1;
        if self.filled[tree as usize] == 0 {
            self.trees -= 1;
            self.rooms.set_open(tree, false);
        }
    }

    /// Puts samples, in order, into one open tree: the one to which they add least, ties the fullest. False where none has
    /// room for all.
    pub fn put_together(&mut self, places: &[u32], top: u32) -> bool {
        let below = self.need_below(places, top);
        let whole = [below[0] + self.end(top), below[1], below[2]];
        let Some(tree) = self.best_tree(top, whole) else { return false };
        for &place in places {
            self.put(place, tree);
        }
        true
    }

    /// Whether an empty tree has room for samples that all pass `top`.
    pub fn fits_empty(&mut self, places: &[u32], top: u32) -> bool {
        let below = self.need_below(places, top);
        has_room(self.room, [below[0] + self.end(top), below[1], below[2]])
    }

    /// What samples need below `top`, which all of them pass.
    fn need_below(&mut self, places: &[u32], top: u32) -> Room {
        self.stamp += 1;
        let mut sum = [0; 3];
        for &place in places {
            let [_, terms, kept] = self.demand.need(self.order[place as usize]);
            sum = [sum[0] + self.mark(place, top), sum[1] + terms, sum[2] + kept];
        }
        sum
    }

    /// Marks the nodes of a sample below `top` and counts the positions of those that were not marked.
    fn mark(&mut self, place: u32, top: u32) -> u32 {
        let mut node = self.leaf(place);
        let mut tokens = 0;
        while node != top && self.seen[node as usize] != self.stamp {
            self.spent += 1;
            self.seen[node as usize] = self.stamp;
            tokens += self.trie.nodes[node as usize].len();
            node = self.trie.nodes[node as usize].parent;
        }
        tokens
    }

    /// `need` is that of an empty tree. A tree that holds a node needs only what lies below it, so the walk goes up.
    fn best_tree(&mut self, top: u32, need: Room) -> Option<u32> {
        let mut node = top;
        loop {
            let room = [need[0] - self.end(node), need[1], need[2]];
            if node == ROOT {
                self.spent += self.rooms.len().min(LOOK / 2) as u64;
                return self.rooms.tightest(room, |_| true);
            }
            let trees_of = &self.trees_of[node as usize];
            self.spent += 1 + trees_of.len().min(LOOK / 2) as u64;
            let found = if trees_of.len() > LOOK {
                self.rooms.tightest(room, |tree| trees_of.holds(tree))
            } else {
                let fits = |&tree: &u32| has_room(self.rooms.get(tree), room);
                trees_of.trees().filter(fits).min_by_key(|&tree| (self.rooms.get(tree)[0], tree))
            };
            if found.is_some() {
                return found;
            }
            node = self.trie.nodes[node as usize].parent;
        }
    }

    /// Puts what fits of samples below `top` into the tree that has most room for them, and leaves the others in `places`.
    /// Whether there was any.
    pub fn put_some(&mut self, places: &mut Vec<u32>, top: u32) -> bool {
        let Some((tree, tokens)) = self.most_room(top) else { return false };
        let [_, terms, kept] = self.rooms.get(tree);
        let mut left = [tokens, terms, kept];
        let before = places.len();
        self.stamp += 1;
        let mut at = 0;
        places.retain(|&place| {
            at += 1;
            let [_, terms, kept] = self.demand.need(self.order[place as usize]);
            let tokens = self.unmarked(place, top);
            if !has_room(left, [tokens, terms, kept]) {
                return true;
            }
            left = [left[0] - tokens, left[1] - terms, left[2] - kept];
            self.mark(place, top);
            self.put(place, tree);
            false
        });
        places.len() < before
    }

    fn unmarked(&mut self, place: u32, top: u32) -> u32 {
        let mut node = self.leaf(place);
        while node != top && self.seen[node as usize] != self.stamp {
            self.spent += 1;
            node = self.trie.nodes[node as usize].parent;
        }
        let leaf = self.leaf(place);
        self.end(leaf) - self.end(node)
    }

    /// The open tree that has most room below `top`, and how much.
    fn most_room(&mut self, top: u32) -> Option<(u32, u32)> {
        let mut best = self
            .rooms
            .roomiest()
            .map_or((0, NONE), |tree| (self.rooms.get(tree)[0].saturating_sub(self.end(top)), tree));
        let mut node = top;
        while node != ROOT {
            let path = self.end(top) - self.end(node);
            let trees_of = &self.trees_of[node as usize];
            self.spent += trees_of.len().min(LOOK) as u64;
            for tree in trees_of.trees().take(LOOK) {
                let room = self.rooms.get(tree)[0].saturating_sub(path);
                if room > best.0 {
                    best = (room, tree);
                }
            }
            node = self.trie.nodes[node as usize].parent;
        }
        let tree = best.1;
        if tree == NONE {
            return None;
        }
        // One that was found further up may hold more of the path.
        let mut node = top;
        while node != ROOT && !self.trees_of[node as usize].holds(tree) {
            node = self.trie.nodes[node as usize].parent;
        }
        let room = self.rooms.get(tree)[0].checked_sub(self.end(top) - self.end(node))?;
        Some((tree, room))
    }

    /// The last node that samples in order have in common.
    pub fn top(&mut self, places: &[u32]) -> u32 {
        match (places.first(), places.last()) {
            (Some(&first), Some(&last)) => self.meet(first, last),
            _ => ROOT,
        }
    }

    pub fn meet(&mut self, a: u32, b: u32) -> u32 {
        let (mut a, mut b) = (self.leaf(a), self.leaf(b));
        while a != b {
            self.spent += 1;
            if self.end(a) >= self.end(b) {
                a = self.trie.nodes[a as usize].parent;
            } else {
                b = self.trie.nodes[b as usize].parent;
            }
        }
        a
    }

    /// Depth at which a node ends.
    pub fn end(&self, node: u32) -> u32 {
        self.trie.nodes[node as usize].end
    }

    fn leaf(&self, place: u32) -> u32 {
        self.trie.leaf[self.order[place as usize] as usize]
    }
}
