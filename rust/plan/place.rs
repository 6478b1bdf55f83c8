//! Samples -> trees under one rule.

use super::bottom_up::bottom_up;
use super::cost::Cost;
use super::cuts::{cut, Row};
use super::demand::Demand;
use super::dissolve::dissolve;
use super::draft::Draft;
use super::exchange::exchange;
use super::first_fit::{first_fit, first_fit_decreasing, first_fit_within};
use super::forest::Forest;
use super::outline::Outline;
use super::top_down::top_down;
use crate::kept_sets::KeptPrice;
use crate::options::{Limits, Placement};
use crate::trie::Trie;

/// A tree costs a pass of its own: worth a thirty-second part of a full one.
const PRICE: u32 = 32;
/// Nodes and trees that may be looked at, one for so many tokens of the samples, so that placement stays a part of what
/// reading them costs: while there are more trees than other rules need, and after that.
const TOKENS_PER_LOOK: (u64, u64) = (8, 48);

/// Places all samples under one rule.
///
/// "Shared" is never worse than first fit, and hardly ever than other textbook rules: it takes the best of them and of a
/// plan of its own, which may have no more trees than any of them.
pub fn place(placement: Placement, trie: &Trie, demand: &Demand, limits: &Limits, price: Option<KeptPrice>) -> Forest {
    if placement == Placement::FirstFit {
        return first_fit(trie, demand, limits, price);
    }
    let outline = Outline::new(trie, demand);
    if outline.fits_one_tree(limits) {
        return outline.one_tree(demand);
    }
    let up = bottom_up(trie, &outline, demand, limits);
    if let Some(up) = up.as_ref().filter(|up| outline.is_best(up, limits)) {
        return up.clone().by_arrival();
    }
    let row = Row::sorted(trie, &outline);
    // The floor: a rule that is worse than one before it in positions and in trees is not followed to its end.
    let mut textbook = vec![cut(&row, demand, limits)];
    let best = |plans: &[Forest]| {
        let positions = plans.iter().map(Forest::positions).min().unwrap_or(0);
        (positions, plans.iter().map(|plan| plan.tokens.len()).min().unwrap_or(0))
    };
    textbook.extend(first_fit_within(trie, demand, limits, price, best(&textbook)));
    // First fit or, where that was worse, what it was worse than.
    let first = textbook.last().map_or((0, 0), |plan| (plan.positions(), plan.tokens.len()));
    textbook.extend(first_fit_decreasing(trie, demand, limits, best(&textbook)));
    let (fewest, most_trees) = best(&textbook);
    let cost = Cost { price: limits.tokens / PRICE, most_trees, beyond: limits.tokens };
    let own = improved(trie, &outline, demand, limits, &row.samples, up, cost);
    if own.positions() <= fewest && own.tokens.len() <= most_trees {
        return own;
    }
    let no_worse = |plan: &Forest| plan.positions() <= first.0 && plan.tokens.len() <= first.1;
    let plans = textbook.into_iter().chain([own]).filter(no_worse);
    plans.min_by_key(|plan| cost.of_forest(plan)).unwrap_or_default().by_arrival()
}

/// Whole subtrees packed bottom up, which repeats least; then the trees beyond what others need are taken apart, and
/// samples change places.
fn improved(
    trie: &Trie,
    outline: &Outline,
    demand: &Demand,
    limits: &Limits,
    order: &[u32],
    up: Option<Forest>,
    cost: Cost,
) -> Forest {
    let tokens: u64 = order.iter().map(|&sample| demand.lengths[sample as usize] as u64).sum();
    let effort = |trees: usize| {
        let (urgent, usual) = TOKENS_PER_LOOK;
        tokens / if trees > cost.most_trees { urgent } else { usual }
    };
    let start = |forest: Forest| {
        let mut draft = Draft::new(trie, demand, limits, order, &forest);
        dissolve(&mut draft, cost, effort(forest.tokens.len()));
        draft
    };
    let up = up.map(start);
    // Where little is shared but a prefix of all, filling trees one by one starts nearer to few of them.
    let down = top_down(trie, outline, demand, limits);
    let mut draft = match up {
        Some(up) if up.trees <= cost.most_trees && cost.of_draft(&up) <= cost.of_forest(&down) => up,
        Some(up) => {
            let down = start(down);
            if cost.of_draft(&down) < cost.of_draft(&up) {
                down
            } else {
                up
            }
        }
        None => start(down),
    };
    let effort = effort(draft.trees);
    exchange(&mut draft, cost, effort);
    draft.forest().by_arrival()
}
