//! One call end to end: check, fold into one trie, place, lay out tree by tree into one slab.

use std::sync::Arc;
use std::time::Instant;

use crate::arrays::{Arrays, Schema, Sizes, TreeView};
use crate::error::{PackError, MAX_INDEX};
use crate::kept::{KeptIndex, KeptPrice};
use crate::layout::{write_padding, write_position_column, write_positions, Disagreement, Order, Shape};
use crate::plan::{place, rank_trees, Balance, Demand, Forest, Limits, Placement};
use crate::runs::Runs;
use crate::samples::{KeptSets, Keyed, Samples};
use crate::simd::with_avx2;
use crate::slab::Slab;
use crate::terms::Terms;
use crate::trie::{Trie, NONE};

/// More than any job has; a bound on the dummies that one sample can cause.
const MAX_RANKS: u64 = 1 << 16;

#[derive(Clone, Debug)]
pub struct Options {
    /// Budgets of a tree: positions (padding included), terms, kept ids.
    pub max_tokens: u64,
    pub max_terms: Option<u64>,
    pub max_kept: Option<u64>,
    /// Ids are below this.
    pub vocab_size: Option<u64>,
    pub label_branching: bool,
    pub order: Order,
    pub placement: Placement,
    /// Trees come in micro-batches of one tree per rank.
    pub ranks: u64,
    /// Leave samples out that fit no tree, instead of refusing the call.
    pub skip_overlong: bool,
    pub pad_to_multiple_of: u64,
}

impl Options {
    pub fn new(max_tokens: u64) -> Self {
        Options {
            max_tokens,
            max_terms: None,
            max_kept: None,
            vocab_size: None,
            label_branching: false,
            order: Order::LargestFirst,
            placement: Placement::Shared,
            ranks: 1,
            skip_overlong: false,
            pad_to_multiple_of: 1,
        }
    }

    fn limits(&self) -> Result<Limits, PackError> {
        let positive = |option, value: u64| match value {
            0 => {
                let (got, allowed) = (value.to_string(), "1 or more".to_string());
                Err(PackError::Option { option, got, allowed })
            }
            value => Ok(value),
        };
        positive("max_tokens", self.max_tokens)?;
        let multiple = positive("pad_to_multiple_of", self.pad_to_multiple_of)?;
        positive("vocab_size", self.vocab_size.unwrap_or(1))?;
        if !(1..=MAX_RANKS).contains(&self.ranks) {
            let (got, allowed) = (self.ranks.to_string(), format!("1 to {MAX_RANKS}"));
            return Err(PackError::Option { option: "ranks", got, allowed });
        }
        if multiple > self.max_tokens {
            return Err(PackError::Option {
                option: "pad_to_multiple_of",
                got: multiple.to_string(),
                allowed: format!(
                    "up to max_tokens={}, since every tree is padded to a multiple of it",
                    self.max_tokens
                ),
            });
        }
        let tokens = self.max_tokens.min(MAX_INDEX);
        Ok(Limits {
            tokens: (tokens - tokens % multiple) as u32,
            terms: self.max_terms.unwrap_or(MAX_INDEX).min(MAX_INDEX) as u32,
            kept: self.max_kept.unwrap_or(MAX_INDEX).min(MAX_INDEX) as u32,
        })
    }

    fn max_id(&self) -> u64 {
        self.vocab_size.map_or(MAX_INDEX, |size| (size - 1).min(MAX_INDEX))
    }
}

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

/// Packs samples into trees within the budgets. Linear in the input; nothing is half-packed on an error.
pub fn pack(samples: &Samples, options: &Options) -> Result<Packed, PackError> {
    let mut clock = Clock::start();
    let limits = options.limits()?;
    samples.check()?;
    let runs = Runs::new(samples)?;
    let kept_index = match &samples.kept {
        Some(kept) => Some(KeptIndex::new(samples, kept, &runs, options.max_id())?),
        None => None,
    };
    let lengths: Vec<u32> = samples.ids.iter().map(|ids| ids.len() as u32).collect();
    let kept_totals = kept_index.as_ref().map_or(&[][..], |index| &index.total);
    let mut demand = Demand { lengths: &lengths, terms: &runs.terms, kept: kept_totals, left_out: &[] };
    let (left_out, skipped) = find_overlong(&demand, &limits, options.skip_overlong)?;
    demand.left_out = &left_out;
    clock.lap("check");

    let keyed = Keyed { samples, label: options.label_branching };
    let trie = Trie::build(&keyed, samples.len());
    clock.lap("trie");

    let kept = samples.kept.as_ref().zip(kept_index.as_ref());
    let price = kept.filter(|_| options.max_kept.is_some());
    let price = price.map(|(sets, index)| KeptPrice::new(sets, index, &runs, &trie));
    let mut forest = place(options.placement, &trie, &demand, &limits, price);
    let mut balance = Balance { imbalance: 1.0, ..Balance::default() };
    if options.ranks > 1 {
        (forest, balance) = rank_trees(options.placement, &trie, &demand, &limits, forest, options.ranks as usize);
    }
    clock.lap("placement");

    let mut packed = Writer { samples, options, runs: &runs, trie: &trie, kept }.write(&forest, kept_totals)?;
    clock.lap("layout");

    packed.stats.balance = balance;
    packed.stats.samples = (samples.len() - skipped.len()) as u64;
    for (sample, &length) in lengths.iter().enumerate().filter(|&(sample, _)| !left_out[sample]) {
        debug_assert_ne!(forest.tree_of[sample], NONE);
        packed.stats.raw_tokens += length as u64;
        packed.stats.attention_pairs_alone += length as u64 * (length as u64 + 1) / 2;
    }
    packed.stats.milliseconds = clock.laps;
    packed.skipped = skipped;
    Ok(packed)
}

fn find_overlong(demand: &Demand, limits: &Limits, skip: bool) -> Result<(Vec<bool>, Vec<Skipped>), PackError> {
    let mut left_out = vec![false; demand.lengths.len()];
    let mut skipped = Vec::new();
    for (sample, left_out) in left_out.iter_mut().enumerate() {
        let Some(reason) = demand.overlong(sample, limits) else { continue };
        if !skip {
            return Err(reason);
        }
        *left_out = true;
        let tokens = demand.lengths[sample] as usize;
        skipped.push(Skipped { sample, tokens, reason });
    }
    Ok((left_out, skipped))
}

struct Writer<'w, 'a> {
    samples: &'w Samples<'a>,
    options: &'w Options,
    runs: &'w Runs,
    trie: &'w Trie,
    kept: Option<(&'w KeptSets<'a>, &'w KeptIndex)>,
}

impl Writer<'_, '_> {
    fn write(&self, forest: &Forest, kept_totals: &[u64]) -> Result<Packed, PackError> {
        let schema = Schema::new(self.samples, self.options.label_branching);
        let (starts, members) = forest.members();
        let bound = self.bound(&schema, forest, &starts, &members, kept_totals);
        let mut slab =
            Slab::new(bound).map_err(|error| PackError::Memory { bytes: bound as u64, error: error.to_string() })?;
        let offsets = self.samples.offsets();
        let mut shape = Shape::new(self.trie);
        let mut terms = Terms::default();
        let mut trees = Vec::with_capacity(forest.tokens.len());
        let mut stats = Stats::default();
        let (mut at, mut bad) = (0, 0);
        for tree in 0..forest.tokens.len() {
            let members = &members[starts[tree] as usize..starts[tree + 1] as usize];
            shape.build(self.trie, self.samples, members, self.options.order);
            terms.plan(&shape, self.trie, self.runs, members, self.kept);
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
            bad |= write_tree(self, &shape, &terms, &offsets, members, &mut out);
            write_columns(self, &shape, &terms, members, out.columns);
            count(&mut stats, self.trie, &shape, &sizes);
            let disagreements = shape.disagreements.clone();
            trees.push(Tree { offset: at, bytes, sizes, agrees, disagreements });
            at += bytes;
        }
        // One cheap test for all ids; the search for the culprit runs only when it fails.
        let max = self.options.max_id();
        if bad != 0 || (max < MAX_INDEX && self.any_above(max)) {
            if let Some(error) = self.samples.find_bad_id(max) {
                return Err(error);
            }
        }
        let token_columns = self.samples.token_columns.iter().map(|column| column.name.clone()).collect();
        Ok(Packed { slab: Arc::new(slab), schema, token_columns, trees, skipped: Vec::new(), stats })
    }

    /// N with padding. A tree without samples is one position of padding, so that a model can run it.
    fn padded(&self, positions: usize) -> usize {
        positions.max(1).next_multiple_of(self.options.pad_to_multiple_of as usize)
    }

    fn any_above(&self, max: u64) -> bool {
        self.samples.ids.iter().any(|ids| ids.iter().any(|&id| id as u64 > max))
    }

    /// Bytes that the trees need at most. Exact but for segments, rows, kept ids and columns on which samples disagree.
    fn bound(&self, schema: &Schema, forest: &Forest, starts: &[u32], members: &[u32], kept: &[u64]) -> usize {
        let agrees = vec![true; schema.token_columns()];
        let bytes = |tree: usize| {
            let members = &members[starts[tree] as usize..starts[tree + 1] as usize];
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
    out: &mut Arrays,
) -> u64 {
    let bad = write_positions(shape, writer.samples, offsets, out);
    write_padding(shape.positions, out);
    for (to, &sample) in out.sample_index.iter_mut().zip(members) {
        *to = sample as i32;
    }
    for (to, &sample) in out.sample_last_segment.iter_mut().zip(members) {
        let place = shape.place_of_leaf(writer.trie, sample);
        *to = shape.places[place as usize].segment as i32;
    }
    out.shift_labels.fill(-100);
    terms.write(writer.samples, offsets, members, writer.kept, out);
    bad
}

with_avx2! {
    fn write_tree(
        writer: &Writer,
        shape: &Shape,
        terms: &Terms,
        offsets: &[u32],
        members: &[u32],
        out: &mut Arrays,
    ) -> u64 = write_tree_body
}

fn write_columns(writer: &Writer, shape: &Shape, terms: &Terms, members: &[u32], arrays: Vec<&mut [u8]>) {
    let samples = writer.samples;
    let mut arrays = arrays.into_iter();
    let mut next = || arrays.next().unwrap_or_default();
    for column in &samples.token_columns {
        terms.write_token_column(column, members, next());
    }
    for column in &samples.sample_columns {
        if column.per_term {
            terms.write_sample_column(column, members, next());
        }
        let width = column.width;
        for (to, &sample) in next().chunks_exact_mut(width.max(1)).zip(members) {
            to.copy_from_slice(&column.rows[sample as usize * width..][..width]);
        }
    }
    for column in &samples.token_columns {
        let to = next();
        if !to.is_empty() {
            write_position_column(shape, column, to);
        }
    }
}

fn count(stats: &mut Stats, trie: &Trie, shape: &Shape, sizes: &Sizes) {
    stats.packed_tokens += sizes.positions as u64;
    stats.padding += (sizes.padded - sizes.positions) as u64;
    stats.terms += sizes.terms as u64;
    stats.kept_ids += sizes.kept_ids as u64;
    stats.attention_pairs += shape.places.iter().map(|place| trie.nodes[place.node as usize].pairs()).sum::<u64>();
}

struct Clock {
    last: Instant,
    laps: Vec<(&'static str, f64)>,
}

impl Clock {
    fn start() -> Self {
        Clock { last: Instant::now(), laps: Vec::with_capacity(4) }
    }

    fn lap(&mut self, phase: &'static str) {
        let now = Instant::now();
        self.laps.push((phase, (now - self.last).as_secs_f64() * 1e3));
        self.last = now;
    }
}
