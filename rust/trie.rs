//! Sequences -> one compressed trie over all of them, in one pass and linear time.
//!
//! A node is an edge: the elements at depths `start..end` of its owner, the first sample that brought them. Each
//! sample is first compared with its predecessor, since neighbours mostly share the most; only what is left is
//! looked up child by child. A short list of children is scanned, a long one has entries in a hash table, so that
//! 10^5 children of one node stay linear.

use std::ops::Range;

use hashbrown::HashTable;

use crate::groups::Groups;
use crate::samples::Sequences;
use crate::simd::{common_prefix, common_prefix_bytes, prefetch};

pub const NONE: u32 = u32::MAX;
pub const ROOT: u32 = 0;
/// Tries of more nodes are larger than the caches of a core.
const CACHED_NODES: usize = 1 << 15;
/// Nodes of a path that are read ahead, from the leaf up: those further up are met often, and are cached.
pub const STEPS_AHEAD: usize = 12;
/// Samples whose paths are read ahead together.
pub const AHEAD: usize = 16;
/// Lists of up to this many children are scanned; longer ones are hashed.
const SCAN: usize = 8;
/// In place of the first child: there are more than `SCAN`, all of them in the hash table.
const HASHED: u32 = u32::MAX - 1;

/// Two to a cache line: where a trie is larger than the caches, reading nodes is what takes the time.
#[derive(Clone, Copy, Default)]
#[repr(align(32))]
pub struct Node {
    /// Token, and with label branching the next token, of the first element; see `key`.
    key: u64,
    pub owner: u32,
    pub start: u32,
    pub end: u32,
    pub parent: u32,
    /// List of the children while it is short enough to be scanned, then `HASHED`.
    first_child: u32,
    next_sibling: u32,
}

impl Node {
    pub fn len(&self) -> u32 {
        self.end - self.start
    }

    /// Orders siblings by their first tokens.
    pub fn rank(&self) -> u64 {
        self.key.rotate_left(32)
    }

    /// (query, key) pairs of the node's positions: each sees depth + 1 keys.
    pub fn pairs(&self) -> u64 {
        pairs(self.start, self.end)
    }
}

/// (query, key) pairs of the positions at depths `start..end`.
pub fn pairs(start: u32, end: u32) -> u64 {
    let triangle = |n: u32| n as u64 * (n as u64 + 1) / 2;
    triangle(end) - triangle(start)
}

/// Where the walk of a sample stands: below `node`, before a child of it, which may be the one with this key.
struct Step {
    sample: u32,
    node: u32,
    child: u32,
    depth: u32,
    key: u64,
}

pub struct Trie {
    pub nodes: Vec<Node>,
    /// The node at which each sample ends.
    pub leaf: Vec<u32>,
    wide: HashTable<u32>,
    /// Path of the previous sample, root first.
    path: Vec<u32>,
    /// The node that the last insertion cut, if any: its new upper part and what is left of it.
    pub cut: Option<(u32, u32)>,
}

impl Trie {
    pub fn with_capacity(samples: usize) -> Self {
        let root = Node { parent: NONE, first_child: NONE, next_sibling: NONE, ..Node::default() };
        let mut nodes = Vec::with_capacity(2 * samples + 1);
        nodes.push(root);
        Trie { nodes, leaf: Vec::with_capacity(samples), wide: HashTable::new(), path: vec![ROOT], cut: None }
    }

    /// A trie of all samples, its nodes in depth-first order. No more can be inserted.
    pub fn build(sequences: &impl Sequences, samples: usize) -> Self {
        let mut trie = Trie::with_capacity(samples);
        let mut known = [ROOT; AHEAD];
        for sample in 0..samples {
            if sample % AHEAD == 0 && trie.outgrows_caches() {
                trie.descend_ahead(sequences, sample as u32..samples.min(sample + AHEAD) as u32, &mut known);
            }
            trie.insert_below(sequences, known[sample % AHEAD]);
        }
        trie.in_depth_first_order()
    }

    /// Numbers the nodes anew: parents before children, siblings in their order of before. Nodes of a path then lie
    /// together in memory, and so do paths that share much: where a trie is larger than the caches, walks wait less.
    fn in_depth_first_order(self) -> Self {
        let count = self.nodes.len();
        let below_root = self.nodes.iter().enumerate().skip(1);
        let children = Groups::new(count, below_root.map(|(node, edge)| (edge.parent, node as u32)));
        let mut number = vec![ROOT; count];
        let mut nodes = Vec::with_capacity(count);
        let mut stack = vec![ROOT];
        while let Some(node) = stack.pop() {
            number[node as usize] = nodes.len() as u32;
            let edge = self.nodes[node as usize];
            let parent = if node == ROOT { NONE } else { number[edge.parent as usize] };
            nodes.push(Node { parent, first_child: NONE, next_sibling: NONE, ..edge });
            stack.extend(children.values(node).iter().rev());
        }
        let leaf = self.leaf.iter().map(|&node| number[node as usize]).collect();
        Trie { nodes, leaf, wide: HashTable::new(), path: vec![ROOT], cut: None }
    }

    /// Whether a walk mostly waits for memory.
    pub fn outgrows_caches(&self) -> bool {
        self.nodes.len() > CACHED_NODES
    }

    /// Reads the nodes that the next samples will pass, one of each sample in turn, each asked for a turn before, so that
    /// their cache misses overlap. `known`: a node of each sample's path, as deep as its elements are known to be the
    /// sample's without a look at others.
    fn descend_ahead(&self, sequences: &impl Sequences, samples: Range<u32>, known: &mut [u32; AHEAD]) {
        *known = [ROOT; AHEAD];
        let first = samples.start;
        let start = |sample| Step { sample, node: ROOT, child: self.nodes[0].first_child, key: 0, depth: 0 };
        let mut walks: Vec<Step> = samples.map(start).collect();
        walks.retain_mut(|walk| self.enter(sequences, walk, ROOT));
        while !walks.is_empty() {
            walks.retain_mut(|walk| {
                let child = &self.nodes[walk.child as usize];
                if child.key != walk.key || child.parent != walk.node {
                    walk.child = child.next_sibling;
                    prefetch(&self.nodes, walk.child);
                    return walk.child != NONE;
                }
                let known = &mut known[(walk.sample - first) as usize];
                let whole = child.end - walk.depth == 1 && exact(sequences, walk.sample, walk.depth);
                *known = if *known == walk.node && whole { walk.child } else { *known };
                self.enter(sequences, walk, walk.child)
            });
        }
    }

    /// Sets a walk before the children of `node`; false where its sample ends, or no child can be the next.
    fn enter(&self, sequences: &impl Sequences, walk: &mut Step, node: u32) -> bool {
        let above = &self.nodes[node as usize];
        let depth = above.end;
        if depth as usize >= sequences.ids(walk.sample).len() {
            return false;
        }
        let key = key(sequences, walk.sample, depth);
        let mut child = above.first_child;
        if child == HASHED {
            let same =
                |&child: &u32| self.nodes[child as usize].key == key && self.nodes[child as usize].parent == node;
            child = self.wide.find(hash(node, key), same).map_or(NONE, |&child| child);
        }
        prefetch(&self.nodes, child);
        *walk = Step { node, child, key, depth, ..*walk };
        child != NONE
    }

    /// A child that is not hashed, and its siblings after it.
    fn listed(&self, first: u32) -> impl Iterator<Item = u32> + '_ {
        let some = |child: u32| Some(child).filter(|&child| child != NONE);
        std::iter::successors(some(first), move |&child| some(self.nodes[child as usize].next_sibling))
    }

    /// Inserts the next sample (number `leaf.len()`) and returns the node at which it ends.
    pub fn insert(&mut self, sequences: &impl Sequences) -> u32 {
        self.insert_below(sequences, ROOT)
    }

    /// `insert`, of a sample whose path is known to pass through a node.
    fn insert_below(&mut self, sequences: &impl Sequences, known: u32) -> u32 {
        let sample = self.leaf.len() as u32;
        let length = sequences.ids(sample).len() as u32;
        self.cut = None;
        let mut depth = self.resume(sequences, sample);
        if self.nodes[known as usize].end > depth {
            depth = self.nodes[known as usize].end;
            self.path.clear();
            let parent = |&node: &u32| Some(self.nodes[node as usize].parent).filter(|&parent| parent != NONE);
            self.path.extend(std::iter::successors(Some(known), parent));
            self.path.reverse();
        }
        let mut node = *self.path.last().unwrap_or(&ROOT);
        while depth < length {
            let key = key(sequences, sample, depth);
            let Some((child, shared)) = self.find_child(sequences, node, key, sample, depth) else {
                node = self.add_child(node, key, sample, depth, length);
                self.path.push(node);
                break;
            };
            depth += shared;
            node = if depth == self.nodes[child as usize].end { child } else { self.split(sequences, child, depth) };
            self.path.push(node);
        }
        self.leaf.push(node);
        node
    }

    /// Cuts `path` to what the sample shares with its predecessor and returns the depth of its end.
    fn resume(&mut self, sequences: &impl Sequences, sample: u32) -> u32 {
        let shared = match sample {
            0 => 0,
            _ => common(sequences, sample - 1, sample, 0, u32::MAX),
        };
        let keep = self.path.partition_point(|&v| self.nodes[v as usize].end <= shared);
        let cut = self.path.get(keep).copied();
        self.path.truncate(keep);
        if let Some(node) = cut.filter(|&v| self.nodes[v as usize].start < shared) {
            let upper = self.split(sequences, node, shared);
            self.path.push(upper);
        }
        self.path.last().map_or(0, |&node| self.nodes[node as usize].end)
    }

    /// Takes the last sample back. Nodes that it brought stay; no sample ends there.
    pub fn forget_last(&mut self) {
        self.leaf.pop();
        self.path.truncate(1);
    }

    /// The child that starts like the sample at `depth`, and how many elements they share (at least 1).
    #[inline]
    fn find_child(
        &self,
        sequences: &impl Sequences,
        parent: u32,
        key: u64,
        sample: u32,
        depth: u32,
    ) -> Option<(u32, u32)> {
        let shared = |child: u32| {
            let node = &self.nodes[child as usize];
            if node.key != key || node.parent != parent {
                return 0;
            }
            // Where forks are dense, no ids of other samples are fetched.
            if node.end - depth == 1 && exact(sequences, sample, depth) {
                return 1;
            }
            common(sequences, node.owner, sample, depth, node.end)
        };
        let first = self.nodes[parent as usize].first_child;
        if first == HASHED {
            let mut found = 0;
            let same = |&child: &u32| {
                found = shared(child);
                found > 0
            };
            let child = *self.wide.find(hash(parent, key), same)?;
            return Some((child, found));
        }
        self.listed(first).map(|child| (child, shared(child))).find(|&(_, found)| found > 0)
    }

    fn add_child(&mut self, parent: u32, key: u64, owner: u32, start: u32, end: u32) -> u32 {
        let id = self.nodes.len() as u32;
        let first = self.nodes[parent as usize].first_child;
        let next_sibling = if first == HASHED { NONE } else { first };
        self.nodes.push(Node { key, owner, start, end, parent, first_child: NONE, next_sibling });
        if first == HASHED {
            self.hash_in(id);
        } else if self.listed(first).count() < SCAN {
            self.nodes[parent as usize].first_child = id;
        } else {
            let mut child = id;
            while child != NONE {
                self.hash_in(child);
                child = self.nodes[child as usize].next_sibling;
            }
            self.nodes[parent as usize].first_child = HASHED;
        }
        id
    }

    fn hash_in(&mut self, child: u32) {
        let nodes = &self.nodes;
        let code = |&v: &u32| hash(nodes[v as usize].parent, nodes[v as usize].key);
        self.wide.insert_unique(code(&child), child, code);
    }

    /// Cuts a node at `depth`: a new upper node takes its place, it keeps its number, children and samples.
    fn split(&mut self, sequences: &impl Sequences, node: u32, depth: u32) -> u32 {
        let id = self.nodes.len() as u32;
        let old = self.nodes[node as usize];
        self.nodes.push(Node { end: depth, first_child: node, ..old });
        let parent = old.parent as usize;
        if self.nodes[parent].first_child == HASHED {
            if let Some(entry) = self.wide.find_mut(hash(old.parent, old.key), |&v| v == node) {
                *entry = id;
            }
        } else if self.nodes[parent].first_child == node {
            self.nodes[parent].first_child = id;
        } else {
            self.relink(parent, node, id);
        }
        let lower = &mut self.nodes[node as usize];
        lower.parent = id;
        lower.next_sibling = NONE;
        lower.start = depth;
        lower.key = key(sequences, old.owner, depth);
        self.cut = Some((id, node));
        id
    }

    fn relink(&mut self, parent: usize, from: u32, to: u32) {
        let mut child = self.nodes[parent].first_child;
        while self.nodes[child as usize].next_sibling != from {
            child = self.nodes[child as usize].next_sibling;
        }
        self.nodes[child as usize].next_sibling = to;
    }
}

/// What tells two children apart: the token and, with label branching, the one after it (0 at the end). Identity
/// rows are not part of it; `common` compares them.
#[inline(always)]
fn key(sequences: &impl Sequences, sample: u32, depth: u32) -> u64 {
    let ids = sequences.ids(sample);
    let token = ids[depth as usize] as u32 as u64;
    if !sequences.label() {
        return token;
    }
    let next = ids.get(depth as usize + 1).map_or(0, |&id| (id as u64).wrapping_add(1));
    token | next << 32
}

/// Whether the key has all of the element: no identity row, no upper half of an id that is out of range.
#[inline(always)]
fn exact(sequences: &impl Sequences, sample: u32, depth: u32) -> bool {
    let id = sequences.ids(sample)[depth as usize];
    sequences.width() == 0 && i64::from(id as u32) == id
}

#[inline(always)]
fn hash(parent: u32, key: u64) -> u64 {
    // Two rounds of multiply and fold: the table takes its bits from the top and the bottom.
    let mix = |x: u64| {
        let wide = (x as u128).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835);
        (wide >> 64) as u64 ^ wide as u64
    };
    mix(mix(key) ^ parent as u64)
}

/// How many elements `a` and `b` have in common from `depth` on, up to depth `end`.
#[inline]
fn common(sequences: &impl Sequences, a: u32, b: u32, depth: u32, end: u32) -> u32 {
    let (x, y) = (sequences.ids(a), sequences.ids(b));
    let from = depth as usize;
    let end = (end as usize).min(x.len());
    let (left, right) = (&x[from..end], &y[from..]);
    let mut shared = if std::ptr::eq(left.as_ptr(), right.as_ptr()) {
        left.len().min(right.len())
    } else {
        common_prefix(left, right)
    };
    let width = sequences.width();
    if width > 0 && shared > 0 {
        let rows = from * width..(from + shared) * width;
        let same = common_prefix_bytes(&sequences.identity(a)[rows.clone()], &sequences.identity(b)[rows]);
        shared = shared.min(same / width);
    }
    // With labels the last shared element must also agree on what follows it.
    if sequences.label() && shared > 0 && x.get(from + shared) != y.get(from + shared) {
        shared -= 1;
    }
    shared as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{Keyed, Samples};

    #[test]
    fn nodes_are_in_depth_first_order() {
        let samples: [&[i64]; 6] = [&[7, 1, 2, 3], &[5], &[7, 1, 9], &[7, 1, 2, 4, 4], &[5, 6], &[7, 1]];
        let samples = Samples::new(samples.to_vec());
        let trie = Trie::build(&Keyed { samples: &samples, label: false }, samples.len());
        let first = |node: &Node| samples.ids[node.owner as usize].get(node.start as usize).copied();
        let nodes: Vec<_> =
            trie.nodes.iter().skip(1).map(|node| (first(node).unwrap(), node.end, node.parent)).collect();
        // A node that was cut gets a new upper part, so that 7 comes after 5, and 2 after 9.
        assert_eq!(nodes, [(5, 1, ROOT), (6, 2, 1), (7, 2, ROOT), (9, 3, 3), (2, 3, 3), (3, 4, 5), (4, 5, 5)]);
        assert_eq!(trie.leaf, [6, 1, 4, 7, 2, 3]);
    }

    #[test]
    fn a_trie_that_outgrows_the_caches_has_every_path() {
        // A wide root, forks of two below it, samples that are there twice and prefixes of others.
        let ids = |at: i64| {
            let mixed = (at / 2).wrapping_mul(0x1E37_79B9_7F4A_7C15) >> 24 & 0xFFFF_FFFF;
            (0..at % 5 + 17).map(|bit| if bit == 0 { mixed % 300 } else { mixed >> bit & 1 }).collect()
        };
        let samples: Vec<Vec<i64>> = (0..60_000).map(ids).collect();
        let samples = Samples::new(samples.iter().map(|ids| &ids[..]).collect());
        for label in [false, true] {
            let trie = Trie::build(&Keyed { samples: &samples, label }, samples.len());
            assert!(trie.outgrows_caches());
            for (ids, &leaf) in samples.ids.iter().zip(&trie.leaf) {
                let mut node = leaf;
                assert_eq!(trie.nodes[node as usize].end as usize, ids.len());
                while node != ROOT {
                    let Node { owner, start, end, parent, .. } = trie.nodes[node as usize];
                    let run = start as usize..end as usize;
                    assert_eq!(samples.ids[owner as usize][run.clone()], ids[run]);
                    assert!(parent < node && trie.nodes[parent as usize].end == start);
                    node = parent;
                }
            }
        }
    }
}
