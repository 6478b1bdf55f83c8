//! A placement -> trees in one slab: the layout, the terms and the gathered columns of each tree.

use std::sync::Arc;

use crate::arrays::{Arrays, Schema, Sizes};
use crate::error::{Fault, PackError, MAX_INDEX};
use crate::groups::Groups;
use crate::kept_sets::KeptIndex;
use crate::layout::{write_padding, write_position_column, write_positions, Shape};
use crate::options::Options;
use crate::packed::{Packed, Stats, Tree};
use crate::plan::Forest;
use crate::runs::Runs;
use crate::samples::{KeptSets, Samples};
use crate::simd::{prefetch, with_avx2, Stores};
use crate::slab::Slab;
use crate::terms::Terms;
use crate::trie::{pairs, Trie};

/// Everything that the trees of a call are written from.
pub struct Writer<'w, 'a> {
    pub samples: &'w Samples<'a>,
    pub options: &'w Options,
    pub runs: &'w Runs,
    pub trie: &'w Trie,
    pub kept: Option<(&'w KeptSets<'a>, &'w KeptIndex)>,
}

impl Writer<'_, '_> {
    /// Lays out tree by tree into one slab. Ids are checked on the way.
    pub fn write(&self, forest: &Forest, kept_totals: &[u64]) -> Result<Packed, PackError> {
        let schema = Schema::new(self.samples, self.options.label_branching);
        let members = forest.members();
        let bound = self.bound(&schema, forest, &members, kept_totals);
        let mut slab = Slab::new(bound).map_err(|error| Fault::memory(bound as u64, error))?;
        let stores = Stores::of(bound);
        let offsets = self.samples.offsets();
        let mut shape = Shape::new(self.trie);
        let mut terms = Terms::default();
        let mut trees = Vec::with_capacity(forest.tokens.len());
        let mut stats = Stats::default();
        let (mut at, mut bad) = (0, 0);
        for tree in 0..forest.tokens.len() {
            let members = members.values(tree as u32);
            if self.trie.outgrows_caches() {
                for &sample in members {
                    prefetch(&self.trie.leaf, sample);
                    prefetch(&offsets, sample);
                    self.runs.ask_for(sample);
                }
                self.samples.ask_for(members);
            }
            shape.build(self.trie, self.samples, members, self.options.order);
            terms.plan(&shape, self.runs, members, self.kept);
            let padded = self.padded(shape.positions);
            let sizes = Sizes {
                positions: shape.positions,
                padded,
                segments: shape.segments,
                samples: members.len(),
                rows: terms.rows,
                terms: terms.count,
                kept_ids: terms.kept_ids,
            };
            let agrees: Vec<bool> = shape.disagreements.iter().map(Option::is_none).collect();
            let bytes = schema.bytes(&sizes, &agrees);
            let mut out = schema.carve(&mut slab[at..at + bytes], &sizes, &agrees);
            bad |= write_tree(self, &shape, &terms, &offsets, members, stores, &mut out);
            write_columns(self, &shape, &terms, members, stores, out.columns);
            count(&mut stats, &shape, &sizes);
            let disagreements = shape.disagreements.clone();
            trees.push(Tree { offset: at, bytes, sizes, agrees, disagreements });
            at += bytes;
        }
        stores.finish();
        // One cheap test for all ids; the search for the culprit runs only when it fails.
        let max = self.options.max_id();
        if bad != 0 || max < MAX_INDEX {
            self.samples.check_ids(max)?;
        }
        let token_columns = self.samples.token_columns.iter().map(|column| column.name.clone()).collect();
        Ok(Packed { slab: Arc::new(slab), schema, token_columns, trees, skipped: Vec::new(), stats })
    }

    /// N with padding. A tree without samples is one position of padding, so that a model can run it.
    fn padded(&self, positions: usize) -> usize {
        positions.max(1).next_multiple_of(self.options.pad_to_multiple_of as usize)
    }

    /// Bytes that the trees need at most. Exact but for segments, rows, kept ids and columns on which samples disagree.
    fn bound(&self, schema: &Schema, forest: &Forest, members: &Groups, kept: &[u64]) -> usize {
        let agrees = vec![true; schema.token_columns()];
        let bytes = |tree: usize| {
            let members = members.values(tree as u32);
            let positions = forest.tokens[tree] as usize;
            let terms = members.iter().map(|&sample| self.runs.terms[sample as usize] as usize).sum();
            let sizes = Sizes {
                positions,
                padded: self.padded(positions),
                segments: positions.min(2 * members.len()),
                samples: members.len(),
                rows: if self.kept.is_some() { terms } else { positions.min(terms) },
                terms,
                kept_ids: members.iter().filter_map(|&s| kept.get(s as usize)).sum::<u64>() as usize,
            };
            schema.bytes(&sizes, &agrees)
        };
        (0..forest.tokens.len()).map(bytes).sum()
    }
}

#[inline(always)]
fn write_tree_body(
    writer: &Writer,
    shape: &Shape,
    terms: &Terms,
    offsets: &[u32],
    members: &[u32],
    stores: Stores,
    out: &mut Arrays,
) -> u64 {
    let bad = write_positions(shape, writer.samples, offsets, stores, out);
    write_padding(shape.positions, out);
    for (to, &sample) in out.sample_index.iter_mut().zip(members) {
        *to = sample as i32;
    }
    for (to, &place) in out.sample_last_segment.iter_mut().zip(&shape.leaves) {
        *to = shape.places[place as usize].segment as i32;
    }
    out.shift_labels.fill(-100);
    terms.write(writer.samples, offsets, members, writer.kept, stores, out);
    bad
}

with_avx2! {
    fn write_tree(
        writer: &Writer,
        shape: &Shape,
        terms: &Terms,
        offsets: &[u32],
        members: &[u32],
        stores: Stores,
        out: &mut Arrays,
    ) -> u64 = write_tree_body
}

fn write_columns(
    writer: &Writer,
    shape: &Shape,
    terms: &Terms,
    members: &[u32],
    stores: Stores,
    arrays: Vec<&mut [u8]>,
) {
    let samples = writer.samples;
    let mut arrays = arrays.into_iter();
    let mut next = || arrays.next().unwrap_or_default();
    for column in &samples.token_columns {
        terms.write_token_column(column, members, stores, next());
    }
    for column in &samples.sample_columns {
        if column.per_term {
            terms.write_sample_column(column, members, stores, next());
        }
        let width = column.width;
        for (to, &sample) in next().chunks_exact_mut(width.max(1)).zip(members) {
            to.copy_from_slice(&column.rows[sample as usize * width..][..width]);
        }
    }
    for column in &samples.token_columns {
        let to = next();
        if !to.is_empty() {
            write_position_column(shape, column, stores, to);
        }
    }
}

fn count(stats: &mut Stats, shape: &Shape, sizes: &Sizes) {
    stats.packed_tokens += sizes.positions as u64;
    stats.padding += (sizes.padded - sizes.positions) as u64;
    stats.terms += sizes.terms as u64;
    stats.kept_ids += sizes.kept_ids as u64;
    stats.attention_pairs += shape.places.iter().map(|place| pairs(place.start, place.end)).sum::<u64>();
}
