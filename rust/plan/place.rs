//! Samples -> trees under one rule.

use super::bottom_up::bottom_up;
use super::demand::Demand;
use super::first_fit::first_fit;
use super::forest::Forest;
use super::outline::Outline;
use super::top_down::top_down;
use crate::kept_sets::KeptPrice;
use crate::options::{Limits, Placement};
use crate::trie::Trie;

/// Places all samples under one rule.
///
/// "Shared" takes the best of three plans: first fit, so that it is never worse; whole subtrees, largest first, each to
/// where it shares most; and a bottom-up packing of what each fork has below it. No rule wins on all data (the table is in
/// `benches/`), and all of them together cost less than one pass over the tokens.
pub fn place(placement: Placement, trie: &Trie, demand: &Demand, limits: &Limits, price: Option<KeptPrice>) -> Forest {
    if placement == Placement::FirstFit {
        return first_fit(trie, demand, limits, price);
    }
    let outline = Outline::new(trie, demand);
    if outline.fits_one_tree(limits) {
        return outline.one_tree(demand);
    }
    let first = first_fit(trie, demand, limits, price);
    let plans = [Some(top_down(trie, &outline, demand, limits)), bottom_up(trie, &outline, demand, limits)];
    let (tokens, trees) = (first.positions(), first.tokens.len());
    let no_worse = |plan: &Forest| plan.positions() <= tokens && plan.tokens.len() <= trees;
    // A tree costs a pass of its own: worth a thirty-second part of a full one.
    let cost = |plan: &Forest| plan.positions() + plan.tokens.len() as u64 * (limits.tokens as u64 / 32);
    let best = plans.into_iter().flatten().filter(no_worse).min_by_key(cost);
    best.unwrap_or(first).by_arrival()
}
