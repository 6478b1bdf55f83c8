//! Even work for ranks: samples move out of the trees for which the others wait.

use std::cmp::Reverse;

use super::draft::Draft;
use super::random::Random;
use super::work::work;

/// Neighbours that move at once, at most.
const MOST: usize = 64;

/// Up to this many samples a change for the worse may stay for a while, so that better ones are found behind it.
const FEW: usize = 256;
/// How often the change that may stay falls from a sixteenth of the work to nothing.
const CYCLES: u64 = 6;

/// Moves or swaps neighbours until `effort` is spent; what makes the slowest trees of the micro-batches no slower in sum
/// stays. No tree is emptied.
pub fn even(draft: &mut Draft, ranks: usize, effort: u64) {
    let mut members = draft.members();
    let trees = members.len();
    if trees < 2 {
        return;
    }
    let mut random = Random::new();
    let mut loads: Vec<u64> = (0..trees as u32).map(|tree| load(draft, tree)).collect();
    let mut slowest = Slowest::new(&loads, ranks);
    let start = draft.spent;
    let mut best = (slowest.sum, draft.positions, draft.tree_of.clone());
    while draft.spent < effort {
        let left = effort - CYCLES * (draft.spent - start) % effort;
        let slack = if draft.tree_of.len() <= FEW { best.0 / 16 * left / effort } else { 0 };
        draft.spent += 16 + trees as u64;
        let from = match random.below(4) {
            0 => random.below(trees) as u32,
            _ => slowest.trees[random.below(slowest.trees.len())],
        };
        if members[from as usize].is_empty() {
            continue;
        }
        let Some(to) = other_tree(draft, &members, from, &mut random) else { continue };
        let there = range(&members[from as usize], &mut random);
        // What makes way goes back, or on to a third tree.
        let back = if random.below(2) == 0 { range(&members[to as usize], &mut random) } else { Vec::new() };
        let beyond = if random.below(2) == 0 { other_tree(draft, &members, to, &mut random) } else { None };
        let beyond = beyond.unwrap_or(from);
        let empties = members[from as usize].len() == there.len() && (back.is_empty() || beyond != from);
        if empties {
            continue;
        }
        // Equal work in more positions may stay while worse may.
        let positions = if slack > 0 { u64::MAX } else { draft.positions };
        let before = (slowest.sum + slack, positions);
        there.iter().chain(&back).for_each(|&place| draft.take(place));
        let fits = there.iter().all(|&place| draft.try_put(place, to))
            && back.iter().all(|&place| draft.try_put(place, beyond));
        let changed = [from, to, beyond];
        changed.iter().for_each(|&tree| loads[tree as usize] = load(draft, tree));
        let after = Slowest::new(&loads, ranks);
        if fits && (after.sum, draft.positions) <= before {
            slowest = after;
            transfer(&mut members, from, to, &there);
            transfer(&mut members, to, beyond, &back);
            if slack > 0 && (slowest.sum, draft.positions) < (best.0, best.1) {
                best = (slowest.sum, draft.positions, draft.tree_of.clone());
            }
            continue;
        }
        there.iter().chain(&back).for_each(|&place| draft.take(place));
        there.iter().for_each(|&place| draft.put(place, from));
        back.iter().for_each(|&place| draft.put(place, to));
        changed.iter().for_each(|&tree| loads[tree as usize] = load(draft, tree));
    }
    if (best.0, best.1) < (slowest.sum, draft.positions) {
        let places = 0..best.2.len() as u32;
        places.clone().for_each(|place| draft.take(place));
        places.for_each(|place| draft.put(place, best.2[place as usize]));
    }
}

fn load(draft: &Draft, tree: u32) -> u64 {
    let (tokens, pairs) = draft.load(tree);
    work(pairs, tokens)
}

/// The slowest tree of each micro-batch when trees of similar work make one, and the sum of their work.
struct Slowest {
    trees: Vec<u32>,
    sum: u64,
}

impl Slowest {
    fn new(loads: &[u64], ranks: usize) -> Self {
        let mut order: Vec<u32> = (0..loads.len() as u32).collect();
        order.sort_unstable_by_key(|&tree| (Reverse(loads[tree as usize]), tree));
        let trees: Vec<u32> = order.into_iter().step_by(ranks).collect();
        let sum = trees.iter().map(|&tree| loads[tree as usize]).sum();
        Slowest { trees, sum }
    }
}

/// A tree to which samples of `from` may go: one that has a neighbour of a sample of chance, or any.
fn other_tree(draft: &Draft, members: &[Vec<u32>], from: u32, random: &mut Random) -> Option<u32> {
    let own = &members[from as usize];
    let to = match random.below(2) {
        0 => random.below(members.len()) as u32,
        _ => {
            let seed = own[random.below(own.len())] as usize;
            let near = (1..16).flat_map(|step| [seed + step, seed.wrapping_sub(step)]);
            let trees = near.filter_map(|place| draft.tree_of.get(place).copied());
            trees.into_iter().find(|&tree| tree != from)?
        }
    };
    (to != from && !members[to as usize].is_empty()).then_some(to)
}

/// Some neighbours of a tree, at least one.
fn range(members: &[u32], random: &mut Random) -> Vec<u32> {
    let count = members.len();
    let most = [2, 8, MOST][random.below(3)];
    let part = 1 + random.below(count.min(most));
    let from = random.below(count - part + 1);
    members[from..from + part].to_vec()
}

fn transfer(members: &mut [Vec<u32>], from: u32, to: u32, places: &[u32]) {
    members[from as usize].retain(|place| !places.contains(place));
    members[to as usize].extend_from_slice(places);
    members[to as usize].sort_unstable();
}
