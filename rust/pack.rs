//! One call end to end: check, fold into one trie, place, lay out tree by tree into one slab.

use std::sync::Arc;
use std::time::Instant;

use crate::arrays::{Schema, Sizes, TreeView};
use crate::error::{PackError, MAX_INDEX};
use crate::kept::{KeptIndex, KeptPrice};
use crate::layout::{Disagreement, Order};
use crate::plan::{place, rank_trees, Balance, Demand, Limits, Placement};
use crate::runs::Runs;
use crate::samples::{Keyed, Samples};
use crate::slab::Slab;
use crate::trie::Trie;
use crate::writer::Writer;

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

    /// The budgets of a tree, checked.
    pub fn limits(&self) -> Result<Limits, PackError> {
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

    /// Largest id that is allowed.
    pub fn max_id(&self) -> u64 {
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
    packed.stats.count_samples(samples, &left_out);
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
