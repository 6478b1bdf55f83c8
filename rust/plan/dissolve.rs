//! Fewer trees: one is taken apart, and its samples fill up what the others have free.
//!
//! ```text
//! before   [ a a a a a · · · ]  [ b b b b b · · · ]  [ c c c c c · · · ]      · free
//! after    [ a a a a a c c c ]  [ b b b b b c c · ]                           what c shares lies in two trees
//! ```

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::cost::Cost;
use super::draft::Draft;
use crate::trie::ROOT;

/// Takes trees apart, the cheapest first, for as long as that pays or until `effort` is spent. What a tree costs to take
/// apart mostly rises as the others fill up: it is tried again when its turn comes, and done if it still comes first.
pub fn dissolve(draft: &mut Draft, cost: Cost, effort: u64) {
    let mut members = draft.members();
    let end = draft.spent + effort;
    let mut queue: BinaryHeap<Reverse<(i64, u32)>> = BinaryHeap::new();
    for tree in (0..members.len() as u32).filter(|&tree| !members[tree as usize].is_empty()) {
        // Not tried yet: before all that were, those with least in them first.
        let filled = draft.room[0] - draft.rooms.get(tree)[0];
        queue.push(Reverse((i64::MIN + filled as i64, tree)));
    }
    while let Some(Reverse((_, tree))) = queue.pop() {
        if draft.spent > end {
            break;
        }
        // Others may have left some here.
        let mut places = std::mem::take(&mut members[tree as usize]);
        places.sort_unstable();
        let before = cost.of_draft(draft) as i64;
        places.iter().for_each(|&place| draft.take(place));
        let all = spread(draft, places.clone());
        let change = cost.of_draft(draft) as i64 - before;
        let next = queue.peek().map_or(0, |entry| entry.0 .0);
        if all && change < 0 && change - cost.price as i64 <= next {
            for place in places {
                members[draft.tree_of[place as usize] as usize].push(place);
            }
            continue;
        }
        places.iter().for_each(|&place| draft.take(place));
        places.iter().for_each(|&place| draft.put(place, tree));
        members[tree as usize] = places;
        if all && change < 0 {
            queue.push(Reverse((change, tree)));
        }
    }
}

/// Puts samples into the open trees: those that share something into the tightest that holds them all, or else part by
/// part into the roomiest. Whether that was possible; if not, some are left out.
fn spread(draft: &mut Draft, places: Vec<u32>) -> bool {
    let mut stack = vec![places];
    while let Some(mut part) = stack.pop() {
        if part.is_empty() {
            continue;
        }
        let top = draft.top(&part);
        if top == ROOT && part.len() > 1 {
            // Apart at no cost.
            let mut end = part.len();
            for at in (1..part.len()).rev() {
                if draft.meet(part[at - 1], part[at]) == ROOT {
                    stack.push(part[at..end].to_vec());
                    end = at;
                }
            }
            part.truncate(end);
            stack.push(part);
            continue;
        }
        if draft.put_together(&part, top) {
            continue;
        }
        if part.len() == 1 || !draft.put_some(&mut part, top) {
            return false;
        }
        stack.push(part);
    }
    true
}
