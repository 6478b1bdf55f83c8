//! A few samples are taken out of trees that share something, or of any, and put back where they add least; what costs no
//! more stays.

use super::cost::Cost;
use super::draft::Draft;
use super::random::Random;
use crate::trie::NONE;

/// Samples taken out of one tree, at most.
const SIZES: [usize; 3] = [2, 6, 20];
/// Trees that give samples in one round, at most.
const TREES: usize = 4;
/// Neighbours of a sample that are looked at for such trees.
const NEAR: usize = 128;

/// Rounds until `effort` is spent.
pub fn exchange(draft: &mut Draft, cost: Cost, effort: u64) {
    if draft.trees < 2 {
        return;
    }
    let mut rounds = Rounds { members: draft.members(), random: Random::new() };
    let end = draft.spent + effort;
    while draft.spent < end {
        draft.spent += 16;
        let before = cost.of_draft(draft);
        let places = rounds.choose(draft);
        let old: Vec<u32> = places.iter().map(|&place| draft.tree_of[place as usize]).collect();
        places.iter().for_each(|&place| draft.take(place));
        rounds.put_back(draft, &places, cost);
        if cost.of_draft(draft) > before {
            places.iter().for_each(|&place| draft.take(place));
            places.iter().zip(old).for_each(|(&place, tree)| draft.put(place, tree));
        } else {
            places.iter().zip(old).for_each(|(&place, tree)| rounds.move_member(draft, place, tree));
        }
    }
}

struct Rounds {
    /// Samples of each tree, ascending.
    members: Vec<Vec<u32>>,
    random: Random,
}

impl Rounds {
    /// Neighbours in depth-first order from up to `TREES` trees.
    fn choose(&mut self, draft: &mut Draft) -> Vec<u32> {
        let seed = self.random.below(draft.tree_of.len());
        let (kind, most) = (self.random.below(4), 1 + self.random.below(TREES));
        let mut trees = vec![draft.tree_of[seed]];
        if kind == 1 {
            // Trees that share nothing in particular: their rooms are what is to be joined.
            trees.extend((1..most).map(|_| draft.tree_of[self.random.below(draft.tree_of.len())]));
        } else {
            // Outwards from the seed, one side after the other.
            for step in 2..NEAR {
                let near = if step % 2 == 0 { seed + step / 2 } else { seed.wrapping_sub(step / 2) };
                if trees.len() >= most {
                    break;
                }
                match draft.tree_of.get(near) {
                    Some(tree) if !trees.contains(tree) => trees.push(*tree),
                    _ => (),
                }
                draft.spent += 1;
            }
        }
        trees.sort_unstable();
        trees.dedup();
        let size = SIZES[self.random.below(SIZES.len())];
        let mut out = Vec::new();
        for tree in trees {
            let count = self.members[tree as usize].len();
            let part = 1 + self.random.below(count.min(size));
            let members = &self.members[tree as usize];
            let near = members.partition_point(|&other| (other as usize) < seed).min(count - 1);
            let middle = if kind == 1 { self.random.below(count) } else { near };
            let low = middle.saturating_sub(self.random.below(part)).min(count - part);
            let whole = kind == 2 && tree == draft.tree_of[seed] && count <= 4 * size;
            let range = if whole { 0..count } else { low..low + part };
            out.extend_from_slice(&self.members[tree as usize][range]);
        }
        out.sort_unstable();
        out
    }

    /// Puts samples back in blocks of neighbours, the first of which is one of chance.
    fn put_back(&mut self, draft: &mut Draft, places: &[u32], cost: Cost) {
        let (tail, head) = places.split_at(self.random.below(places.len()));
        for mut rest in [head, tail] {
            while !rest.is_empty() {
                let (block, others) = rest.split_at(1 + self.random.below(rest.len()));
                self.put_block(draft, block, cost);
                rest = others;
            }
        }
    }

    /// Puts a block into one tree where one has room, else in two parts that share little.
    fn put_block(&mut self, draft: &mut Draft, block: &[u32], cost: Cost) {
        let mut stack = vec![block];
        while let Some(part) = stack.pop() {
            let top = draft.top(part);
            if draft.put_together(part, top) {
                continue;
            }
            let may_open = draft.trees < cost.most_trees && draft.fits_empty(part, top) && self.random.below(4) > 0;
            if part.len() > 1 && !may_open {
                let (left, right) = part.split_at(self.cut(draft, part));
                stack.extend([right, left]);
                continue;
            }
            let tree = draft.empty_tree();
            part.iter().for_each(|&place| draft.put(place, tree));
        }
    }

    /// Where to part samples: mostly where they share least, as near the middle as that allows.
    fn cut(&mut self, draft: &mut Draft, part: &[u32]) -> usize {
        if self.random.below(3) == 0 {
            return 1 + self.random.below(part.len() - 1);
        }
        let mut best = (u32::MAX, 0, 1);
        for at in 1..part.len() {
            let top = draft.meet(part[at - 1], part[at]);
            best = best.min((draft.end(top), at.abs_diff(part.len() / 2), at));
        }
        best.2
    }

    /// Lists a sample with its tree of now instead of `tree`.
    fn move_member(&mut self, draft: &Draft, place: u32, tree: u32) {
        let now = draft.tree_of[place as usize];
        if now == tree || now == NONE {
            return;
        }
        self.members.resize(draft.rooms.len(), Vec::new());
        let from = &mut self.members[tree as usize];
        if let Ok(at) = from.binary_search(&place) {
            from.remove(at);
        }
        let to = &mut self.members[now as usize];
        let at = to.partition_point(|&other| other < place);
        to.insert(at, place);
    }
}
