//! "The first tree with room": a tournament tree over what trees have free.

use super::room::Room;

/// Free room of a list of trees in heap order: every inner entry is the maximum of its two children, per component.
/// Entries are stored plus one, so that 0 means "no tree".
#[derive(Default)]
pub struct Tournament {
    leaves: usize,
    room: Vec<Room>,
}

fn most(a: Room, b: Room) -> Room {
    [a[0].max(b[0]), a[1].max(b[1]), a[2].max(b[2])]
}

impl Tournament {
    pub fn new(rooms: impl ExactSizeIterator<Item = Room>) -> Self {
        let mut out = Tournament::default();
        out.grow(rooms.len());
        for (i, room) in rooms.enumerate() {
            out.room[out.leaves + i] = room.map(|x| x + 1);
        }
        out.rebuild();
        out
    }

    pub fn set(&mut self, index: usize, room: Room) {
        self.widen(index + 1);
        let mut at = self.leaves + index;
        self.room[at] = room.map(|x| x + 1);
        while at > 1 {
            at /= 2;
            let room = most(self.room[2 * at], self.room[2 * at + 1]);
            if self.room[at] == room {
                break;
            }
            self.room[at] = room;
        }
    }

    /// Makes place for one more at `index` of `count`; those from there on move by one. O(count - index + log).
    pub fn insert(&mut self, index: usize, count: usize, room: Room) {
        self.widen(count + 1);
        let (mut low, mut high) = (self.leaves + index, self.leaves + count);
        self.room.copy_within(low..high, low + 1);
        self.room[low] = room.map(|x| x + 1);
        while low > 1 {
            (low, high) = (low / 2, high / 2);
            for at in low..=high {
                self.room[at] = most(self.room[2 * at], self.room[2 * at + 1]);
            }
        }
    }

    /// The first index at or after `from` with at least `need` free. O(log) where tokens decide; parts of the tree
    /// whose maxima lie in different leaves are visited as well.
    #[inline]
    pub fn first(&self, from: usize, need: Room) -> Option<usize> {
        if from >= self.leaves {
            return None;
        }
        let mut at = if from == 0 { 1 } else { self.leaves + from };
        loop {
            let room = self.room[at];
            if room[0] > need[0] && room[1] > need[1] && room[2] > need[2] {
                if at >= self.leaves {
                    return Some(at - self.leaves);
                }
                at *= 2;
                continue;
            }
            at >>= at.trailing_ones();
            if at == 0 {
                return None;
            }
            at += 1;
        }
    }

    fn widen(&mut self, trees: usize) {
        if trees > self.leaves {
            let mut wider = Tournament::default();
            wider.grow(trees);
            wider.room[wider.leaves..][..self.leaves].copy_from_slice(&self.room[self.leaves..]);
            wider.rebuild();
            *self = wider;
        }
    }

    fn grow(&mut self, trees: usize) {
        self.leaves = trees.next_power_of_two().max(64);
        self.room = vec![[0; 3]; 2 * self.leaves];
    }

    fn rebuild(&mut self) {
        for at in (1..self.leaves).rev() {
            self.room[at] = most(self.room[2 * at], self.room[2 * at + 1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::room::has_room;
    use super::*;

    #[test]
    fn what_is_inserted_moves_the_others_on() {
        let mut rooms: Vec<Room> = vec![[5, 5, 5]];
        let mut fit = Tournament::new(rooms.iter().copied());
        for i in 0..150u32 {
            let at = (i as usize * 37) % (rooms.len() + 1);
            let room = [i * 29 % 97, i * 53 % 89, i % 7];
            fit.insert(at, rooms.len(), room);
            rooms.insert(at, room);
            for need in [[0, 0, 0], [90, 0, 0], [40, 40, 5], [0, 88, 6]] {
                let scan = (at / 2..rooms.len()).find(|&i| has_room(rooms[i], need));
                assert_eq!(fit.first(at / 2, need), scan, "{need:?} after {i} at {at}");
            }
        }
    }

    #[test]
    fn finds_what_a_scan_finds() {
        let rooms: Vec<Room> = (0..200u32).map(|i| [i * 37 % 101, i * 53 % 89, i % 7]).collect();
        let mut fit = Tournament::new(rooms[..100].iter().copied());
        for (i, &room) in rooms.iter().enumerate().skip(100) {
            fit.set(i, room);
        }
        for need in [[0, 0, 0], [50, 50, 0], [50, 50, 6], [100, 0, 0], [0, 88, 0], [99, 80, 0], [101, 0, 0]] {
            for from in [0, 1, 77, 199, 200, 1000] {
                let scan = (from..rooms.len()).find(|&i| has_room(rooms[i], need));
                assert_eq!(fit.first(from, need), scan, "{need:?} from {from}");
            }
        }
    }
}
