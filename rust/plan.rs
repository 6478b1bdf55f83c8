//! Placement: which sample goes into which tree. Works on the nodes of the one trie over all samples, so that no
//! token is compared again for any tree.

use crate::error::PackError;
use crate::fit::{FirstFit, Room};
use crate::kept::KeptPrice;
use crate::trie::{Trie, NONE, ROOT};

/// What a tree may hold at most: positions, loss terms, kept ids.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub tokens: u32,
    pub terms: u32,
    pub kept: u64,
}

/// What each sample needs, whichever tree it goes to.
pub struct Demand<'a> {
    pub lengths: &'a [u32],
    pub terms: &'a [u32],
    /// Kept ids, by sample; empty when no sample has sets.
    pub kept: &'a [u64],
}

impl Demand<'_> {
    /// Why a sample fits no tree at all, if so.
    pub fn overlong(&self, sample: usize, limits: &Limits) -> Option<PackError> {
        let over = |has: u64, unit, limit, allowed: u64| {
            (has > allowed).then_some(PackError::Overlong { sample, has, unit, limit, allowed })
        };
        let (tokens, terms) = (self.lengths[sample], self.terms[sample]);
        let kept = self.kept.get(sample).copied().unwrap_or(0);
        over(tokens as u64, "tokens", "max_tokens", limits.tokens as u64)
            .or_else(|| over(terms as u64, "terms", "max_terms", limits.terms as u64))
            .or_else(|| over(kept, "kept ids", "max_kept", limits.kept))
    }
}

/// The tree of each sample (`NONE` = left out) and the positions of each tree.
pub struct Forest {
    pub tree_of: Vec<u32>,
    pub tokens: Vec<u32>,
}

/// Samples in arrival order, each into the first tree in which its additional positions, terms and kept ids fit;
/// else into a new tree. A tree that holds a node of the sample's path needs only what lies below that node, so the
/// walk goes from the leaf up, and ends where no earlier tree could be found any more.
pub fn first_fit(
    trie: &Trie,
    demand: &Demand,
    limits: &Limits,
    mut price: Option<KeptPrice>,
    left_out: &[bool],
) -> Forest {
    let mut state = State {
        trie,
        holders: vec![Holder::Nobody; trie.nodes.len()],
        many: Vec::new(),
        free: Vec::new(),
        all: FirstFit::default(),
        kept: Vec::new(),
    };
    let mut tree_of = Vec::with_capacity(trie.leaf.len());
    for sample in 0..trie.leaf.len() as u32 {
        if left_out[sample as usize] {
            tree_of.push(NONE);
            continue;
        }
        let need = Need { sample, length: demand.lengths[sample as usize], terms: demand.terms[sample as usize] };
        let tree = match state.first_tree(&need, price.as_ref()) {
            NONE => state.new_tree(limits),
            tree => tree,
        };
        state.commit(&need, tree, price.as_mut());
        tree_of.push(tree);
    }
    let tokens = state.free.iter().map(|room| limits.tokens - room[0]).collect();
    Forest { tree_of, tokens }
}

struct Need {
    sample: u32,
    length: u32,
    terms: u32,
}

/// The trees that hold a node. Most nodes lie in one tree, which needs no list.
#[derive(Clone, Copy)]
enum Holder {
    Nobody,
    One(u32),
    /// Index into `State::many`.
    Many(u32),
}

struct State<'a> {
    trie: &'a Trie,
    holders: Vec<Holder>,
    many: Vec<Holders>,
    free: Vec<Room>,
    all: FirstFit,
    /// Free kept ids of each tree.
    kept: Vec<u64>,
}

impl State<'_> {
    fn first_tree(&mut self, need: &Need, price: Option<&KeptPrice>) -> u32 {
        let Some(&leaf) = self.trie.leaf.get(need.sample as usize) else {
            return NONE;
        };
        let kept = &self.kept;
        let affordable = |tree: u32| match price {
            Some(price) => price.price(need.sample, tree) <= kept[tree as usize],
            None => true,
        };
        let mut best = NONE;
        let mut node = leaf;
        while node != ROOT && best != 0 {
            let room = [need.length - self.trie.nodes[node as usize].end, need.terms];
            match self.holders[node as usize] {
                Holder::Nobody => {}
                Holder::One(tree) => {
                    if tree < best && has_room(self.free[tree as usize], room) && affordable(tree) {
                        best = tree;
                    }
                }
                Holder::Many(list) => {
                    let list = &mut self.many[list as usize];
                    best = list.first(room, best, &self.free, affordable);
                }
            }
            // Nodes further up leave more to add: if no earlier tree has this much room, none will do.
            if best != NONE && self.all.first(0, room).is_none_or(|tree| tree as u32 >= best) {
                return best;
            }
            node = self.trie.nodes[node as usize].parent;
        }
        let room = [need.length, need.terms];
        let mut next = self.all.first(0, room);
        while let Some(tree) = next.filter(|&tree| (tree as u32) < best) {
            if affordable(tree as u32) {
                return tree as u32;
            }
            next = self.all.first(tree + 1, room);
        }
        best
    }

    fn new_tree(&mut self, limits: &Limits) -> u32 {
        self.free.push([limits.tokens, limits.terms]);
        self.kept.push(limits.kept);
        self.free.len() as u32 - 1
    }

    fn commit(&mut self, need: &Need, tree: u32, price: Option<&mut KeptPrice>) {
        let mut node = self.trie.leaf[need.sample as usize];
        while node != ROOT && !self.holds(node, tree) {
            self.hold(node, tree);
            node = self.trie.nodes[node as usize].parent;
        }
        let room = &mut self.free[tree as usize];
        room[0] -= need.length - self.trie.nodes[node as usize].end;
        room[1] -= need.terms;
        self.all.set(tree as usize, *room);
        if let Some(price) = price {
            self.kept[tree as usize] -= price.price(need.sample, tree);
            price.commit(need.sample, tree);
        }
    }

    fn holds(&self, node: u32, tree: u32) -> bool {
        match self.holders[node as usize] {
            Holder::Nobody => false,
            Holder::One(other) => other == tree,
            Holder::Many(list) => self.many[list as usize].contains(tree),
        }
    }

    fn hold(&mut self, node: u32, tree: u32) {
        let holder = &mut self.holders[node as usize];
        match *holder {
            Holder::Nobody => *holder = Holder::One(tree),
            Holder::One(other) => {
                *holder = Holder::Many(self.many.len() as u32);
                self.many.push(Holders::two(other, tree));
            }
            Holder::Many(list) => self.many[list as usize].add(tree),
        }
    }
}

#[inline]
fn has_room(free: Room, need: Room) -> bool {
    free[0] >= need[0] && free[1] >= need[1]
}

/// Trees in ascending order; a long list has a tournament tree over their room. The room only falls, so the stale
/// entries of the tournament are upper bounds that are set right when they are hit.
struct Holders {
    trees: Vec<u32>,
    fit: Option<Box<FirstFit>>,
}

impl Holders {
    /// Lists of up to this many trees are scanned.
    const SCAN: usize = 12;

    fn two(a: u32, b: u32) -> Self {
        let trees = vec![a.min(b), a.max(b)];
        Holders { trees, fit: None }
    }

    fn contains(&self, tree: u32) -> bool {
        self.trees.last() == Some(&tree) || self.trees.binary_search(&tree).is_ok()
    }

    fn add(&mut self, tree: u32) {
        let at = self.trees.partition_point(|&other| other < tree);
        self.trees.insert(at, tree);
        match &mut self.fit {
            // The room is not known here; the bound is set right by the first query that meets it.
            Some(fit) if at + 1 == self.trees.len() => fit.set(at, [u32::MAX - 1; 2]),
            fit => *fit = None,
        }
    }

    /// The first tree before `best` with room that is also affordable, else `best`.
    fn first(&mut self, need: Room, best: u32, free: &[Room], affordable: impl Fn(u32) -> bool) -> u32 {
        if self.trees.len() <= Self::SCAN {
            let fits = |&&tree: &&u32| has_room(free[tree as usize], need) && affordable(tree);
            let earlier = self.trees.iter().take_while(|&&tree| tree < best);
            return earlier.copied().find(|tree| fits(&tree)).unwrap_or(best);
        }
        let room_of = |&tree: &u32| free[tree as usize];
        let trees = &self.trees;
        let fit = self.fit.get_or_insert_with(|| Box::new(FirstFit::of(trees.iter().map(room_of))));
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
