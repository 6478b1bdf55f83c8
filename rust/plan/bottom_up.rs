//! From the leaves up: at every node whose subtree is larger than a tree, what lies below it is packed into as few
//! pieces as possible, largest first into the fullest; every piece then carries the node once.

use std::collections::BTreeSet;

use super::demand::Demand;
use super::forest::Forest;
use super::outline::Outline;
use super::room::{has_room, Room};
use crate::options::Limits;
use crate::trie::{Trie, NONE, ROOT};

/// Pieces handled per node and sample, at most: a bound on the time of a trie that is deep and wide at once.
const EFFORT: usize = 64;

/// Part of a tree: what it needs below the node at hand, and what it consists of.
#[derive(Clone, Copy)]
struct Piece {
    need: Room,
    content: u32,
}

enum Content {
    Subtree(u32),
    Sample(u32),
    Join(Vec<u32>),
}

/// O(n log n) on tries that are not deep and wide at once; `None` where that would take too long.
pub fn bottom_up(trie: &Trie, outline: &Outline, demand: &Demand, limits: &Limits) -> Option<Forest> {
    let mut contents = Vec::new();
    let mut pieces: Vec<Vec<Piece>> = vec![Vec::new(); trie.nodes.len()];
    let mut effort = EFFORT * (trie.nodes.len() + demand.lengths.len());
    for &node in outline.order.iter().rev() {
        if node != ROOT && outline.fits(trie, node, limits) {
            continue;
        }
        let mut items = Vec::new();
        let mut add = |need: Room, content: Content| {
            items.push(Piece { need, content: contents.len() as u32 });
            contents.push(content);
        };
        for &sample in outline.samples(node) {
            let [_, terms, kept] = demand.need(sample);
            add([0, terms, kept], Content::Sample(sample));
        }
        for &child in outline.children(node) {
            if pieces[child as usize].is_empty() {
                add(outline.need[child as usize], Content::Subtree(child));
            }
        }
        for &child in outline.children(node) {
            items.append(&mut pieces[child as usize]);
        }
        effort = effort.checked_sub(items.len())?;
        let edge = &trie.nodes[node as usize];
        let [tokens, terms, kept] = limits.room();
        let mut bins = best_fit(items, [tokens - edge.end, terms, kept], &mut contents);
        for bin in &mut bins {
            bin.need[0] += edge.len();
        }
        pieces[node as usize] = bins;
    }
    let trees = std::mem::take(&mut pieces[ROOT as usize]);
    let mut tree_of = vec![NONE; demand.lengths.len()];
    for (tree, piece) in trees.iter().enumerate() {
        let mut stack = vec![piece.content];
        while let Some(content) = stack.pop() {
            match &contents[content as usize] {
                Content::Subtree(node) => outline.assign(*node, tree as u32, &mut tree_of),
                Content::Sample(sample) => tree_of[*sample as usize] = tree as u32,
                Content::Join(parts) => stack.extend(parts),
            }
        }
    }
    Some(Forest { tree_of, tokens: trees.iter().map(|piece| piece.need[0]).collect() })
}

/// Best fit decreasing.
fn best_fit(mut items: Vec<Piece>, room: Room, contents: &mut Vec<Content>) -> Vec<Piece> {
    items.sort_by_key(|item| std::cmp::Reverse(item.need[0]));
    let mut free: Vec<Room> = Vec::new();
    let mut parts: Vec<Vec<u32>> = Vec::new();
    let mut by_room: BTreeSet<(u32, usize)> = BTreeSet::new();
    for item in items {
        let fits = |&&(_, bin): &&(u32, usize)| has_room(free[bin], item.need);
        let bin = match by_room.range((item.need[0], 0)..).find(fits).copied() {
            Some(entry) => {
                by_room.remove(&entry);
                entry.1
            }
            None => {
                free.push(room);
                parts.push(Vec::new());
                free.len() - 1
            }
        };
        let left = &mut free[bin];
        for (left, need) in left.iter_mut().zip(item.need) {
            *left -= need;
        }
        by_room.insert((left[0], bin));
        parts[bin].push(item.content);
    }
    let used = |left: Room| [room[0] - left[0], room[1] - left[1], room[2] - left[2]];
    let mut join = |mut parts: Vec<u32>| match parts.len() {
        1 => parts.remove(0),
        _ => {
            contents.push(Content::Join(parts));
            contents.len() as u32 - 1
        }
    };
    free.into_iter().zip(parts).map(|(left, parts)| Piece { need: used(left), content: join(parts) }).collect()
}
