//! The trees that contain a node, with counts, so that samples can be taken out again.

/// Lists of more trees than this have their places in an array.
const FEW: usize = 24;

/// A tree that holds a node, and by how many of its children and samples.
type Entry = (u32, u32);

/// The trees that hold a node. Most nodes lie in one tree, which takes no memory of its own.
#[derive(Clone, Default)]
pub struct TreeCounts {
    /// A count of 0: none.
    only: Entry,
    many: Option<Box<Many>>,
}

#[derive(Clone, Default)]
struct Many {
    trees: Vec<Entry>,
    /// Place of each tree in `trees`, plus one, where there are more than a few.
    places: Vec<u32>,
}

impl TreeCounts {
    pub fn holds(&self, tree: u32) -> bool {
        match &self.many {
            None => self.only.1 > 0 && self.only.0 == tree,
            Some(many) => many.place(tree).is_some(),
        }
    }

    pub fn len(&self) -> usize {
        self.entries().len()
    }

    pub fn trees(&self) -> impl Iterator<Item = u32> + '_ {
        self.entries().iter().map(|entry| entry.0)
    }

    fn entries(&self) -> &[Entry] {
        match &self.many {
            None => &std::slice::from_ref(&self.only)[..(self.only.1 > 0) as usize],
            Some(many) => &many.trees,
        }
    }

    /// Counts one more; whether the tree did not hold the node before.
    pub fn add(&mut self, tree: u32) -> bool {
        match &mut self.many {
            Some(many) => many.add(tree),
            None if self.only.1 == 0 => {
                self.only = (tree, 1);
                true
            }
            None if self.only.0 == tree => {
                self.only.1 += 1;
                false
            }
            None => {
                self.many = Some(Box::new(Many { trees: vec![self.only, (tree, 1)], places: Vec::new() }));
                true
            }
        }
    }

    /// Counts one less; whether the tree does not hold the node any more.
    pub fn remove(&mut self, tree: u32) -> bool {
        match &mut self.many {
            Some(many) => many.remove(tree),
            None => {
                self.only.1 -= 1;
                self.only.1 == 0
            }
        }
    }
}

impl Many {
    fn place(&self, tree: u32) -> Option<usize> {
        if self.places.is_empty() {
            return self.trees.iter().position(|entry| entry.0 == tree);
        }
        (*self.places.get(tree as usize)? as usize).checked_sub(1)
    }

    fn add(&mut self, tree: u32) -> bool {
        if let Some(at) = self.place(tree) {
            self.trees[at].1 += 1;
            return false;
        }
        self.trees.push((tree, 1));
        if !self.places.is_empty() {
            self.note(self.trees.len() - 1);
        } else if self.trees.len() > FEW {
            (0..self.trees.len()).for_each(|at| self.note(at));
        }
        true
    }

    fn remove(&mut self, tree: u32) -> bool {
        let Some(at) = self.place(tree) else { return false };
        self.trees[at].1 -= 1;
        if self.trees[at].1 > 0 {
            return false;
        }
        self.trees.swap_remove(at);
        if !self.places.is_empty() {
            self.places[tree as usize] = 0;
            if at < self.trees.len() {
                self.note(at);
            }
        }
        true
    }

    fn note(&mut self, at: usize) {
        let tree = self.trees[at].0 as usize;
        if tree >= self.places.len() {
            self.places.resize(tree + 1, 0);
        }
        self.places[tree] = at as u32 + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_one_few_and_many_trees() {
        for trees in [1, 3, 100] {
            let mut trees_of = TreeCounts::default();
            for tree in 0..trees {
                assert!(!trees_of.holds(tree * 7));
                assert!(trees_of.add(tree * 7));
                assert!(!trees_of.add(tree * 7));
            }
            assert_eq!(trees_of.len(), trees as usize);
            for tree in 0..trees {
                assert!(!trees_of.remove(tree * 7));
                assert!(tree % 2 == 1 || trees_of.remove(tree * 7));
            }
            let mut left: Vec<u32> = trees_of.trees().collect();
            left.sort_unstable();
            assert_eq!(left, (0..trees).filter(|tree| tree % 2 == 1).map(|tree| tree * 7).collect::<Vec<u32>>());
            assert!(left.iter().all(|&tree| trees_of.holds(tree)) && !trees_of.holds(0));
        }
    }
}
