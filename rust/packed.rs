//! What a call gives: trees in one slab, the samples that were left out, and numbers.

use std::sync::Arc;

use crate::arrays::{Schema, Sizes, TreeView};
use crate::error::PackError;
use crate::layout::Disagreement;
use crate::plan::Balance;
use crate::samples::Samples;
use crate::slab::Slab;

/// A finished tree: where its buffer lies in the slab, and what is in it.
pub struct Tree {
    pub offset: usize,
    pub bytes: usize,
    pub sizes: Sizes,
    /// For each per-token column: whether the samples that share a position agree on it, and who does not.
    pub agrees: Vec<bool>,
    pub disagreements: Vec<Option<Disagreement>>,
}

/// A sample that was left out because it fits no tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    pub sample: usize,
    pub tokens: usize,
    pub reason: PackError,
}

#[derive(Clone, Debug, Default)]
pub struct Stats {
    pub samples: u64,
    pub raw_tokens: u64,
    pub packed_tokens: u64,
    pub padding: u64,
    pub terms: u64,
    pub kept_ids: u64,
    /// (query, key) pairs that attention computes, packed and with each sample alone.
    pub attention_pairs: u64,
    pub attention_pairs_alone: u64,
    pub balance: Balance,
    /// Host milliseconds by phase.
    pub milliseconds: Vec<(&'static str, f64)>,
}

impl Stats {
    /// Counts the samples that are not left out (an empty list leaves none out).
    pub(crate) fn count_samples(&mut self, samples: &Samples, left_out: &[bool]) {
        for (sample, ids) in samples.ids.iter().enumerate() {
            if left_out.get(sample) != Some(&true) {
                let length = ids.len() as u64;
                self.samples += 1;
                self.raw_tokens += length;
                self.attention_pairs_alone += length * (length + 1) / 2;
            }
        }
    }
}

pub struct Packed {
    pub slab: Arc<Slab>,
    pub schema: Schema,
    /// Names of the per-token columns.
    pub token_columns: Vec<String>,
    pub trees: Vec<Tree>,
    pub skipped: Vec<Skipped>,
    pub stats: Stats,
}

impl Packed {
    pub fn tree(&self, index: usize) -> TreeView<'_> {
        let tree = &self.trees[index];
        TreeView {
            sizes: tree.sizes,
            schema: &self.schema,
            agrees: &tree.agrees,
            buffer: &self.slab[tree.offset..tree.offset + tree.bytes],
        }
    }
}
