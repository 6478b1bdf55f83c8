//! One call end to end: check, fold into one trie, place, lay out tree by tree into one slab.

use std::time::Instant;

use crate::error::PackError;
use crate::kept_sets::{KeptIndex, KeptPrice};
use crate::memory::{ask, working_bytes};
use crate::options::{Limits, Options};
use crate::packed::{Packed, Skipped};
use crate::plan::{place, rank_trees, Balance, Demand};
use crate::runs::Runs;
use crate::samples::{Keyed, Samples};
use crate::trie::Trie;
use crate::writer::Writer;

/// Packs samples into trees within the budgets. Linear in the input; nothing is half-packed on an error.
pub fn pack(samples: &Samples, options: &Options) -> Result<Packed, PackError> {
    let mut clock = Clock::start();
    let limits = options.limits()?;
    samples.check()?;
    ask(working_bytes(samples.len(), 0, 0))?;
    let runs = Runs::new(samples)?;
    let kept_terms = samples.kept.as_ref().map_or(0, |_| runs.terms.iter().map(|&terms| terms as usize).sum());
    ask(working_bytes(samples.len(), runs.count(), kept_terms))?;
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
