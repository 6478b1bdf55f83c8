//! The samples of one tree -> its depth-first positions and segments.
//!
//! The tree is cut out of the trie over all samples: `Shape` collects its nodes, `write_positions` lays them out.
//! The descendants of a node are then one contiguous range.

use std::hint::black_box;

use crate::arrays::Arrays;
use crate::groups::Groups;
use crate::options::Order;
use crate::samples::{Samples, TokenColumn};
use crate::simd::{iota_i32, Stores};
use crate::trie::{Node, Trie, NONE, ROOT, STEPS_AHEAD};

/// A node of one tree.
#[derive(Clone, Copy)]
pub struct Place {
    /// Node of the trie.
    pub node: u32,
    /// Parent in this tree, `NONE` at a root.
    pub parent: u32,
    /// First sample of this tree that passes.
    pub owner: u32,
    /// Depths of the node.
    pub start: u32,
    pub end: u32,
    /// Positions of the subtree.
    pub size: u32,
    /// Samples of this tree that pass.
    pub samples: u32,
    children: u32,
    ends: bool,
    /// Begins a segment, that is an unbranched run: the parent ends a sample or has other children.
    begins: bool,
    /// Packed index of the first position.
    pub at: u32,
    pub segment: u32,
    /// The place that begins the contiguous piece of the path in which this one lies.
    pub top: u32,
}

impl Place {
    pub fn len(&self) -> u32 {
        self.end - self.start
    }

    /// One past the packed index of the last position.
    pub fn stop(&self) -> u32 {
        self.at + self.len()
    }
}

/// Samples `a` and `b` share the position of `token` and differ in a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disagreement {
    pub a: u32,
    pub b: u32,
    pub token: u32,
}

/// A node of the trie: its parent, its end, and its place, `NONE` outside this tree.
struct Step {
    parent: u32,
    end: u32,
    place: u32,
}

/// The places of one tree, parents before children, and their depth-first order. Reused from tree to tree.
pub struct Shape {
    pub places: Vec<Place>,
    /// Depth-first order of the places.
    pub order: Vec<u32>,
    /// The place at which each sample of this tree ends.
    pub leaves: Vec<u32>,
    /// Of each node of the trie, together in memory: what the walks up read.
    steps: Vec<Step>,
    pub positions: usize,
    pub segments: usize,
    /// For each per-token column: the first two samples that disagree on it.
    pub disagreements: Vec<Option<Disagreement>>,
    fresh: Vec<u32>,
    /// The roots, then the children of each place.
    children: Groups,
    stack: Vec<u32>,
}

impl Shape {
    pub fn new(trie: &Trie) -> Self {
        Shape {
            places: Vec::new(),
            order: Vec::new(),
            leaves: Vec::new(),
            steps: trie.nodes.iter().map(|&Node { parent, end, .. }| Step { parent, end, place: NONE }).collect(),
            positions: 0,
            segments: 0,
            disagreements: Vec::new(),
            fresh: Vec::new(),
            children: Groups::default(),
            stack: Vec::new(),
        }
    }

    /// Collects and orders the nodes of a tree. O(nodes of the tree), and for columns that all samples agree on one
    /// comparison of what they share.
    pub fn build(&mut self, trie: &Trie, samples: &Samples, members: &[u32], order: Order) {
        for place in &self.places {
            self.steps[place.node as usize].place = NONE;
        }
        self.places.clear();
        self.leaves.clear();
        self.disagreements.clear();
        self.disagreements.resize(samples.token_columns.len(), None);
        if trie.outgrows_caches() {
            self.fresh.clear();
            self.fresh.extend(members.iter().map(|&sample| trie.leaf[sample as usize]));
            for _ in 0..STEPS_AHEAD {
                for node in self.fresh.iter_mut().filter(|node| **node != ROOT) {
                    *node = self.steps[*node as usize].parent; // a step of all, so that their cache misses overlap
                }
            }
            black_box(&self.fresh); // read for nothing else
        }
        for &sample in members {
            let shared = self.add_path(trie, sample);
            if self.disagreements.iter().any(Option::is_none) {
                self.compare_columns(&samples.token_columns, shared, sample);
            }
        }
        for i in (0..self.places.len()).rev() {
            let Place { parent, size, samples, .. } = self.places[i];
            if parent != NONE {
                let above = &mut self.places[parent as usize];
                above.size += size;
                above.samples += samples;
                above.children += 1;
            }
        }
        self.sort(order);
        self.number();
    }

    /// Adds the nodes of a sample's path that are new; returns the lowest place that was there before.
    fn add_path(&mut self, trie: &Trie, sample: u32) -> u32 {
        self.fresh.clear();
        let mut node = trie.leaf[sample as usize];
        while node != ROOT && self.steps[node as usize].place == NONE {
            self.fresh.push(node);
            node = self.steps[node as usize].parent;
        }
        let shared = if node == ROOT { NONE } else { self.steps[node as usize].place };
        let mut parent = shared;
        let mut start = self.steps[node as usize].end;
        for &node in self.fresh.iter().rev() {
            let place = self.places.len() as u32;
            let step = &mut self.steps[node as usize];
            step.place = place;
            self.places.push(Place {
                node,
                parent,
                owner: sample,
                start,
                end: step.end,
                size: step.end - start,
                samples: 0,
                children: 0,
                ends: false,
                begins: true,
                at: 0,
                segment: 0,
                top: 0,
            });
            parent = place;
            start = step.end;
        }
        self.leaves.push(parent);
        let last = &mut self.places[parent as usize];
        last.ends = true;
        last.samples += 1;
        shared
    }

    fn compare_columns(&mut self, columns: &[TokenColumn], mut place: u32, sample: u32) {
        while place != NONE {
            let Place { owner, start, end, parent, .. } = self.places[place as usize];
            for (column, found) in columns.iter().zip(&mut self.disagreements) {
                let (from, to) = (start as usize * column.width, end as usize * column.width);
                let (a, b) = (&column.rows[owner as usize][from..to], &column.rows[sample as usize][from..to]);
                if found.is_none() && a != b {
                    let same = a.iter().zip(b).take_while(|(x, y)| x == y).count();
                    let token = start + (same / column.width) as u32;
                    *found = Some(Disagreement { a: owner, b: sample, token });
                }
            }
            place = parent;
        }
    }

    /// Depth-first order. Places are in order of first arrival, and so are the children of each before they are sorted.
    fn sort(&mut self, order: Order) {
        // Group 0 are the roots, whose parent is `NONE`, group p + 1 the children of place p.
        let group = |parent: u32| parent.wrapping_add(1);
        let places = self.places.iter().enumerate();
        self.children.fill(self.places.len() + 1, places.map(|(at, place)| (group(place.parent), at as u32)));
        if order == Order::LargestFirst {
            for at in 0..self.places.len() as u32 + 1 {
                let siblings = self.children.values_mut(at);
                if siblings.len() > 1 {
                    siblings.sort_by_key(|&child| std::cmp::Reverse(self.places[child as usize].size));
                }
            }
        }
        self.order.clear();
        self.stack.clear();
        self.stack.extend(self.children.values(group(NONE)).iter().rev());
        while let Some(place) = self.stack.pop() {
            self.order.push(place);
            self.stack.extend(self.children.values(group(place)).iter().rev());
        }
    }

    /// Packed index and segment of each place, in depth-first order.
    fn number(&mut self) {
        let (mut at, mut segments) = (0, 0);
        for &id in &self.order {
            let Place { parent, .. } = self.places[id as usize];
            let above = self.places.get(parent as usize).copied();
            let place = &mut self.places[id as usize];
            place.at = at;
            at += place.len();
            place.top = id;
            place.begins = true;
            if let Some(above) = above {
                place.begins = above.ends || above.children > 1;
                if above.stop() == place.at {
                    place.top = above.top;
                }
                place.segment = above.segment;
            }
            if place.begins {
                place.segment = segments;
                segments += 1;
            }
        }
        self.positions = at as usize;
        self.segments = segments as usize;
    }
}

/// Writes the per-position and per-segment arrays. Returns 0 if all ids are within `0..=i32::MAX`.
#[inline(always)]
pub fn write_positions(shape: &Shape, samples: &Samples, offsets: &[u32], stores: Stores, out: &mut Arrays) -> u64 {
    let mut bad = 0;
    for &id in &shape.order {
        let place = &shape.places[id as usize];
        let at = place.at as usize;
        let range = at..at + place.len() as usize;
        let ids = &samples.ids[place.owner as usize][place.start as usize..place.end as usize];
        bad |= stores.copy_ids(&mut out.input_ids[range.clone()], ids);
        stores.iota_i64(&mut out.position_ids[range.clone()], place.start as i64);
        stores.iota_i32(&mut out.parent[range.clone()], at as i32 - 1);
        stores.fill(&mut out.subtree_end[range.clone()], (place.at + place.size) as i32);
        let source = offsets[place.owner as usize] + place.start;
        stores.iota_i32(&mut out.position_source[range.clone()], source as i32);
        stores.fill(&mut out.position_samples[range], place.samples as i32);
        if place.begins {
            let above = shape.places.get(place.parent as usize);
            out.cu_segments[place.segment as usize] = at as i32;
            out.segment_parent[place.segment as usize] = above.map_or(-1, |above| above.segment as i32);
            out.parent[at] = above.map_or(-1, |above| above.stop() as i32 - 1);
        }
    }
    if let Some(end) = out.cu_segments.last_mut() {
        *end = shape.positions as i32;
    }
    bad
}

/// Padding sees nothing and is seen by nothing.
pub fn write_padding(from: usize, out: &mut Arrays) {
    let padding = from..out.input_ids.len();
    out.input_ids[padding.clone()].fill(0);
    out.position_ids[padding.clone()].fill(0);
    out.parent[padding.clone()].fill(-1);
    iota_i32(&mut out.subtree_end[padding.clone()], from as i32);
    out.position_source[padding.clone()].fill(-1);
    out.position_samples[padding].fill(0);
}

/// Gathers a per-token column by position; the samples agree on it.
pub fn write_position_column(shape: &Shape, column: &TokenColumn, stores: Stores, out: &mut [u8]) {
    let width = column.width;
    let mut at = 0;
    for &place in &shape.order {
        let place = &shape.places[place as usize];
        let rows = &column.rows[place.owner as usize][place.start as usize * width..place.end as usize * width];
        stores.copy_bytes(&mut out[at..at + rows.len()], rows);
        at += rows.len();
    }
    out[at..].fill(0);
}
