//! What trees have free: the tightest with enough, and the roomiest.

use std::collections::BTreeSet;

use super::room::{has_room, Room};

/// Up to this many trees are scanned; more are in an ordered set as well.
const SCAN: usize = 64;
/// Trees with enough tokens, but too few terms or kept ids, that are passed over before a search ends.
const PASS: usize = 64;

/// Free room by tree. Trees that are closed are found by no search.
#[derive(Default)]
pub struct FreeRoom {
    free: Vec<Room>,
    open: Vec<bool>,
    /// Open trees by free tokens, where there are many; `entry` is what it has of each tree.
    by_tokens: BTreeSet<(u32, u32)>,
    entry: Vec<Option<u32>>,
    /// Trees whose room has changed since.
    changed: Vec<u32>,
    noted: Vec<bool>,
}

impl FreeRoom {
    /// Adds a tree, closed.
    pub fn push(&mut self, room: Room) -> u32 {
        let tree = self.free.len() as u32;
        self.free.push(room);
        self.open.push(false);
        self.entry.push(None);
        self.noted.push(false);
        tree
    }

    pub fn len(&self) -> usize {
        self.free.len()
    }

    pub fn get(&self, tree: u32) -> Room {
        self.free[tree as usize]
    }

    pub fn set(&mut self, tree: u32, room: Room) {
        self.free[tree as usize] = room;
        self.note(tree);
    }

    /// Whether searches may find the tree.
    pub fn set_open(&mut self, tree: u32, open: bool) {
        self.open[tree as usize] = open;
        self.note(tree);
    }

    fn note(&mut self, tree: u32) {
        if !self.noted[tree as usize] {
            self.noted[tree as usize] = true;
            self.changed.push(tree);
        }
    }

    fn settle(&mut self) {
        while let Some(tree) = self.changed.pop() {
            let at = tree as usize;
            self.noted[at] = false;
            let now = self.open[at].then_some(self.free[at][0]);
            if now != self.entry[at] {
                if let Some(tokens) = self.entry[at] {
                    self.by_tokens.remove(&(tokens, tree));
                }
                if let Some(tokens) = now {
                    self.by_tokens.insert((tokens, tree));
                }
                self.entry[at] = now;
            }
        }
    }

    /// The open tree with the least free tokens that has room and of which `allowed` is true. Many trees are not all
    /// looked at.
    pub fn tightest(&mut self, need: Room, allowed: impl Fn(u32) -> bool) -> Option<u32> {
        if self.free.len() <= SCAN {
            let fits = |&tree: &u32| self.open[tree as usize] && has_room(self.get(tree), need) && allowed(tree);
            return (0..self.free.len() as u32).filter(fits).min_by_key(|&tree| self.get(tree)[0]);
        }
        self.settle();
        let enough = self.by_tokens.range((need[0], 0)..).take(PASS);
        enough.map(|entry| entry.1).find(|&tree| has_room(self.get(tree), need) && allowed(tree))
    }

    /// The open tree with the most free tokens.
    pub fn roomiest(&mut self) -> Option<u32> {
        if self.free.len() <= SCAN {
            let open = (0..self.free.len() as u32).filter(|&tree| self.open[tree as usize]);
            return open.max_by_key(|&tree| (self.get(tree)[0], tree));
        }
        self.settle();
        self.by_tokens.last().map(|entry| entry.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_a_scan_finds() {
        for trees in [5u32, 300] {
            let mut rooms = FreeRoom::default();
            for tree in 0..trees {
                assert_eq!(rooms.push([tree * 37 % 301, 10, 10]), tree);
                rooms.set_open(tree, true);
            }
            rooms.set(3, [250, 10, 10]);
            rooms.set_open(4, false);
            for need in [0, 17, 249, 250, 299] {
                let room = [need, 10, 0];
                let fits = |&tree: &u32| tree != 4 && has_room(rooms.get(tree), room) && tree % 3 == 0;
                let scan = (0..trees).filter(fits).min_by_key(|&tree| rooms.get(tree)[0]).map(|tree| rooms.get(tree));
                let found = rooms.tightest(room, |tree| tree % 3 == 0);
                assert_eq!(found.map(|tree| rooms.get(tree)), scan, "{trees} trees, {need} needed");
            }
            let most = (0..trees).filter(|&tree| tree != 4).map(|tree| rooms.get(tree)[0]).max();
            assert_eq!(rooms.roomiest().map(|tree| rooms.get(tree)[0]), most);
        }
    }
}
