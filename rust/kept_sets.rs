//! Kept sets: checks them, finds the set of each loss term, tells whether two sets are equal, and prices samples
//! against a budget of kept ids.

use std::collections::HashSet;

use hashbrown::HashTable;

use crate::error::{Fault, PackError, MAX_INDEX};
use crate::runs::Runs;
use crate::samples::{KeptSets, Samples};
use crate::trie::{Trie, ROOT};

/// Sets of up to this many ids are searched directly, larger ones sorted first.
const SMALL: usize = 16;

/// Where the set of each loss term lies: terms sample by sample, in token order.
pub struct KeptIndex {
    /// First term of each sample; n + 1 entries.
    pub first_term: Vec<u32>,
    /// Range of each term's set in its sample's ids.
    ranges: Vec<(u32, u32)>,
    /// Kept ids over the terms of each sample.
    pub total: Vec<u64>,
}

impl KeptIndex {
    pub fn empty() -> Self {
        KeptIndex { first_term: vec![0], ranges: Vec::new(), total: Vec::new() }
    }

    /// Checks every set that a loss term needs; sets on other tokens are ignored.
    pub fn new(samples: &Samples, kept: &KeptSets, runs: &Runs, max_id: u64) -> Result<Self, PackError> {
        let raw: u64 = kept.ids.iter().map(|ids| ids.len() as u64).sum();
        if raw > MAX_INDEX {
            let what = "kept ids";
            return Err(Fault::TooMany { what, has: raw }.into());
        }
        let mut out = KeptIndex::empty();
        let mut sorted = Vec::new();
        for sample in 0..samples.len() {
            out.add(samples, kept, runs, sample)?;
            out.check_sets(samples, kept, runs, sample, max_id, &mut sorted)?;
        }
        Ok(out)
    }

    /// Adds the samples of `other` after these.
    pub fn append(&mut self, other: &KeptIndex) {
        let first = self.ranges.len() as u32;
        self.first_term.extend(other.first_term[1..].iter().map(|&term| first + term));
        self.ranges.extend_from_slice(&other.ranges);
        self.total.extend_from_slice(&other.total);
    }

    #[inline]
    pub fn set<'a>(&self, kept: &KeptSets<'a>, sample: u32, term: u32) -> &'a [i32] {
        let (start, count) = self.ranges[term as usize];
        &kept.ids[sample as usize][start as usize..(start + count) as usize]
    }

    fn add(&mut self, samples: &Samples, kept: &KeptSets, runs: &Runs, sample: usize) -> Result<(), PackError> {
        let (counts, ids) = (kept.counts[sample], kept.ids[sample]);
        let mut runs = runs.ranges(sample as u32).iter().copied().peekable();
        let (mut sum, mut total) = (0u64, 0u64);
        for (token, &count) in counts.iter().enumerate() {
            if count < 0 {
                return Err(Fault::KeptCount { count }.at_token(sample, token));
            }
            while runs.next_if(|&(_, end)| end as usize <= token).is_some() {}
            if runs.peek().is_some_and(|&(start, _)| start as usize <= token) {
                self.ranges.push((sum.min(MAX_INDEX) as u32, count as u32));
                total += count as u64;
            }
            sum += count as u64;
        }
        if sum != ids.len() as u64 {
            let ids = ids.len();
            return Err(Fault::KeptSum { ids, sum }.in_sample(sample));
        }
        debug_assert_eq!(counts.len(), samples.ids[sample].len());
        self.first_term.push(self.ranges.len() as u32);
        self.total.push(total);
        Ok(())
    }

    fn check_sets(
        &self,
        samples: &Samples,
        kept: &KeptSets,
        runs: &Runs,
        sample: usize,
        max_id: u64,
        sorted: &mut Vec<i32>,
    ) -> Result<(), PackError> {
        let tokens = runs.ranges(sample as u32).iter().flat_map(|&(start, end)| start..end);
        let terms = self.first_term[sample]..self.first_term[sample + 1];
        let (mut with, mut without) = (None, None);
        for (token, term) in tokens.zip(terms) {
            let set = self.set(kept, sample as u32, term);
            let token = token as usize;
            if set.is_empty() {
                without.get_or_insert(token);
            } else {
                with.get_or_insert(token);
                check_set(sample, token, samples.ids[sample][token], set, max_id, sorted)?;
            }
        }
        match (with, without) {
            (Some(other), Some(token)) => Err(Fault::KeptMissing { other }.at_token(sample, token)),
            _ => Ok(()),
        }
    }
}

fn check_set(
    sample: usize,
    token: usize,
    target: i64,
    set: &[i32],
    max_id: u64,
    sorted: &mut Vec<i32>,
) -> Result<(), PackError> {
    if let Some(&id) = set.iter().find(|&&id| id as i64 as u64 > max_id) {
        return Err(Fault::KeptId { id, max: max_id }.at_token(sample, token));
    }
    if !set.iter().any(|&id| id as i64 == target) {
        return Err(Fault::KeptTarget { id: target }.at_token(sample, token));
    }
    let twice = if set.len() <= SMALL {
        (1..set.len()).find(|&i| set[..i].contains(&set[i])).map(|i| set[i])
    } else {
        sorted.clear();
        sorted.extend_from_slice(set);
        sorted.sort_unstable();
        sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
    };
    match twice {
        Some(id) => Err(Fault::KeptDuplicate { id }.at_token(sample, token)),
        None => Ok(()),
    }
}

/// The same for two sets with the same ids in any order.
pub fn set_hash(set: &[i32]) -> u64 {
    let mix = |id: i32| {
        let x = (id as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (x ^ x >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9)
    };
    set.iter().fold(set.len() as u64, |sum, &id| sum.wrapping_add(mix(id)))
}

/// Two sets are equal when they hold the same ids, in any order.
pub fn same_set(a: &[i32], b: &[i32]) -> bool {
    if a == b {
        return true;
    }
    if a.len() != b.len() {
        return false;
    }
    let sorted = |set: &[i32]| {
        let mut set = set.to_vec();
        set.sort_unstable();
        set
    };
    sorted(a) == sorted(b)
}

/// Exact number of kept ids that a sample adds to a tree. Only rows that two samples could share are looked up;
/// the rest of a sample's ids is one number.
pub struct KeptPrice {
    /// Kept ids of a sample on rows that no other sample has: the least that it adds to any tree.
    pub unshared: Vec<u64>,
    shared_offsets: Vec<usize>,
    /// (row, its kept ids) of the rows of each sample that other samples have as well.
    shared: Vec<(u32, u32)>,
    in_tree: HashSet<(u32, u32)>,
}

struct Row {
    position: u32,
    sample: u32,
    term: u32,
    samples: u32,
}

impl KeptPrice {
    /// One row for each distinct (position of the trie, kept set) over all samples. O(terms + path nodes).
    pub fn new(kept: &KeptSets, index: &KeptIndex, runs: &Runs, trie: &Trie) -> Self {
        let (rows, row_of) = global_rows(kept, index, runs, trie);
        let samples = index.total.len();
        let mut out = KeptPrice {
            unshared: vec![0; samples],
            shared_offsets: vec![0],
            shared: Vec::new(),
            in_tree: HashSet::new(),
        };
        for sample in 0..samples {
            for term in index.first_term[sample]..index.first_term[sample + 1] {
                let row = row_of[term as usize];
                let count = index.ranges[term as usize].1;
                if rows[row as usize].samples > 1 {
                    out.shared.push((row, count));
                } else {
                    out.unshared[sample] += count as u64;
                }
            }
            out.shared_offsets.push(out.shared.len());
        }
        out
    }

    pub fn price(&self, sample: u32, tree: u32) -> u64 {
        let new = |&&(row, _): &&(u32, u32)| !self.in_tree.contains(&(tree, row));
        let shared: u64 = self.shared_of(sample).iter().filter(new).map(|&(_, count)| count as u64).sum();
        self.unshared[sample as usize] + shared
    }

    /// Puts a sample into a tree; returns what it added.
    pub fn commit(&mut self, sample: u32, tree: u32) -> u64 {
        let added = self.price(sample, tree);
        let rows = self.shared_offsets[sample as usize]..self.shared_offsets[sample as usize + 1];
        self.in_tree.extend(self.shared[rows].iter().map(|&(row, _)| (tree, row)));
        added
    }

    fn shared_of(&self, sample: u32) -> &[(u32, u32)] {
        &self.shared[self.shared_offsets[sample as usize]..self.shared_offsets[sample as usize + 1]]
    }
}

fn global_rows(kept: &KeptSets, index: &KeptIndex, runs: &Runs, trie: &Trie) -> (Vec<Row>, Vec<u32>) {
    let mut base = Vec::with_capacity(trie.nodes.len());
    let mut next = 0;
    for node in &trie.nodes {
        base.push(next);
        next += node.len();
    }
    let mut rows: Vec<Row> = Vec::new();
    let mut row_of = Vec::with_capacity(index.ranges.len());
    let mut table: HashTable<u32> = HashTable::new();
    let code = |position: u32, set: &[i32]| set_hash(set) ^ (position as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut path = Vec::new();
    for sample in 0..index.total.len() as u32 {
        path.clear();
        let mut node = trie.leaf[sample as usize];
        while node != ROOT {
            path.push(node);
            node = trie.nodes[node as usize].parent;
        }
        let depths = runs.ranges(sample).iter().flat_map(|&(start, end)| start - 1..end - 1);
        for (depth, term) in depths.zip(index.first_term[sample as usize]..) {
            while path.last().is_some_and(|&v| trie.nodes[v as usize].end <= depth) {
                path.pop();
            }
            let Some(&node) = path.last() else { break };
            let position = base[node as usize] + depth - trie.nodes[node as usize].start;
            let set = index.set(kept, sample, term);
            let kept_set = |row: &Row| index.set(kept, row.sample, row.term);
            let same = |&row: &u32| {
                let row = &rows[row as usize];
                row.position == position && same_set(kept_set(row), set)
            };
            let row = match table.find(code(position, set), same) {
                Some(&row) => row,
                None => {
                    let row = rows.len() as u32;
                    rows.push(Row { position, sample, term, samples: 0 });
                    let rehash = |&row: &u32| {
                        let row = &rows[row as usize];
                        code(row.position, kept_set(row))
                    };
                    table.insert_unique(code(position, set), row, rehash);
                    row
                }
            };
            rows[row as usize].samples += 1;
            row_of.push(row);
        }
    }
    (rows, row_of)
}
