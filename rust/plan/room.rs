//! Room of a tree: what a sample needs, or what a tree has free.

use crate::options::Limits;

/// Tokens, terms and kept ids: needed by a sample, or free in a tree. Values stay below `u32::MAX`.
pub type Room = [u32; 3];

#[inline]
pub fn has_room(free: Room, need: Room) -> bool {
    free[0] >= need[0] && free[1] >= need[1] && free[2] >= need[2]
}

impl Limits {
    /// The room of an empty tree.
    pub fn room(&self) -> Room {
        [self.tokens, self.terms, self.kept]
    }
}
