//! Packing an endless queue: samples one by one into an open micro-batch of one tree per rank.
//!
//! A sample goes into the tree, of those in which it fits, with which it shares the most tokens (ties: least work, then
//! lowest rank). Where it fits none, the micro-batch closes; since an empty tree takes every sample, that never happens
//! while a rank is empty.

use crate::arena::{describe_columns, Arena};
use crate::error::{Fault, PackError, MAX_INDEX};
use crate::kept_sets::KeptIndex;
use crate::options::{Limits, Options};
use crate::packed::{Packed, Skipped};
use crate::plan::{has_room, split_for_ranks, work, Balance, Demand, Forest, Room, TreesOfNode};
use crate::runs::Runs;
use crate::samples::Samples;
use crate::trie::{Trie, ROOT};
use crate::writer::Writer;

/// What became of a sample.
pub enum Added {
    /// It lies in the open micro-batch.
    Open,
    /// It opened a new micro-batch; this one is full.
    Closed(Box<Packed>),
    Skipped(Skipped),
}

/// One open tree.
#[derive(Clone, Copy)]
struct Open {
    free: Room,
    tokens: u32,
    work: u64,
}

pub struct Stream {
    options: Options,
    limits: Limits,
    /// Samples that `add` took or left out so far.
    count: usize,
    /// Columns are those of the first sample.
    batch: Option<Batch>,
}

/// The open micro-batch.
struct Batch {
    arena: Arena,
    runs: Runs,
    kept: KeptIndex,
    trie: Trie,
    trees_of_node: TreesOfNode,
    tree_of: Vec<u32>,
    trees: Vec<Open>,
}

impl Stream {
    pub fn new(options: Options) -> Result<Self, PackError> {
        let limits = options.limits()?;
        Ok(Stream { options, limits, count: 0, batch: None })
    }

    /// Takes the one sample of `sample`. An error leaves the stream as it was.
    pub fn add(&mut self, sample: &Samples) -> Result<Added, PackError> {
        let checked = self.check(sample).map_err(|error| self.numbered(error))?;
        let Checked { runs, kept, overlong } = checked;
        if let Some(reason) = overlong {
            let skipped = Skipped { sample: self.count, tokens: sample.ids[0].len(), reason };
            self.count += 1;
            return Ok(Added::Skipped(skipped));
        }
        let need = [
            sample.ids[0].len() as u32,
            runs.terms[0],
            kept.as_ref().and_then(|kept| kept.total.first()).map_or(0, |&total| total as u32),
        ];
        let (limits, ranks, label) = (self.limits, self.options.ranks as usize, self.options.label_branching);
        let batch = self.batch.get_or_insert_with(|| Batch::new(sample, label, &limits, ranks));
        batch.arena.make_room(sample)?;
        let mut closed = None;
        let tree = match batch.insert(sample).then(|| batch.best_tree(need)).flatten() {
            Some(tree) => tree,
            None => {
                closed = Some(batch.close(&self.options)?);
                batch.clear(&limits, ranks);
                batch.insert(sample);
                0
            }
        };
        batch.commit(need, tree);
        batch.runs.append(&runs);
        if let Some(kept) = &kept {
            batch.kept.append(kept);
        }
        self.count += 1;
        Ok(closed.map_or(Added::Open, |packed| Added::Closed(Box::new(packed))))
    }

    /// Closes the open micro-batch, if there is one. Trees are split so that no rank is empty as long as one has two
    /// samples.
    pub fn flush(&mut self) -> Result<Option<Packed>, PackError> {
        let Some(batch) = self.batch.as_mut().filter(|batch| !batch.tree_of.is_empty()) else {
            return Ok(None);
        };
        let packed = batch.write(&self.options, true)?;
        batch.clear(&self.limits, self.options.ranks as usize);
        Ok(Some(packed))
    }

    fn check(&self, sample: &Samples) -> Result<Checked, PackError> {
        if sample.len() != 1 {
            let (got, allowed) = (format!("{} samples", sample.len()), "one at a time".to_string());
            return Err(Fault::Option { option: "Stream::add", got, allowed }.into());
        }
        sample.check()?;
        if let Some(batch) = self.batch.as_ref().filter(|batch| !batch.arena.has_columns_of(sample)) {
            let (has, needed) = (describe_columns(sample), batch.arena.describe());
            return Err(Fault::Columns { has, needed }.in_sample(0));
        }
        let max = self.options.max_id();
        sample.check_ids(max)?;
        let runs = Runs::new(sample)?;
        let kept = match &sample.kept {
            Some(sets) => Some(KeptIndex::new(sample, sets, &runs, max)?),
            None => None,
        };
        let demand = Demand {
            lengths: &[sample.ids[0].len() as u32],
            terms: &runs.terms,
            kept: kept.as_ref().map_or(&[], |kept| &kept.total),
            left_out: &[false],
        };
        let overlong = demand.overlong(0, &self.limits);
        if let Some(reason) = overlong.clone().filter(|_| !self.options.skip_overlong) {
            return Err(reason);
        }
        let overlong = overlong.map(|reason| self.numbered(reason));
        Ok(Checked { runs, kept, overlong })
    }

    /// An error of the one sample of a call, with the number that the sample has in the stream.
    fn numbered(&self, error: PackError) -> PackError {
        PackError { sample: error.sample.map(|_| self.count), ..error }
    }
}

struct Checked {
    runs: Runs,
    kept: Option<KeptIndex>,
    overlong: Option<PackError>,
}

impl Batch {
    fn new(like: &Samples, label: bool, limits: &Limits, ranks: usize) -> Self {
        let arena = Arena::new(like, label);
        let mut batch = Batch {
            arena,
            runs: Runs::empty(),
            kept: KeptIndex::empty(),
            trie: Trie::with_capacity(0),
            trees_of_node: TreesOfNode::new(1),
            tree_of: Vec::new(),
            trees: Vec::new(),
        };
        batch.clear(limits, ranks);
        batch
    }

    fn clear(&mut self, limits: &Limits, ranks: usize) {
        self.arena.clear();
        self.runs.clear();
        self.kept = KeptIndex::empty();
        self.trie = Trie::with_capacity(0);
        self.trees_of_node = TreesOfNode::new(1);
        self.tree_of.clear();
        self.trees = vec![Open { free: limits.room(), tokens: 0, work: 0 }; ranks];
    }

    /// Copies a sample and folds it in; false if the micro-batch would have more tokens than an index can count.
    fn insert(&mut self, sample: &Samples) -> bool {
        if (self.arena.raw_tokens() + sample.ids[0].len()) as u64 > MAX_INDEX {
            return false;
        }
        self.arena.push(sample);
        self.trie.insert(&self.arena);
        self.trees_of_node.grow(self.trie.nodes.len());
        if let Some((upper, lower)) = self.trie.cut {
            self.trees_of_node.copy(lower, upper);
        }
        true
    }

    /// The trees without the sample that was inserted last and has no place. On an error that sample is gone again.
    fn close(&mut self, options: &Options) -> Result<Packed, PackError> {
        if self.trie.leaf.len() > self.tree_of.len() {
            self.arena.pop();
            self.trie.forget_last();
        }
        self.write(options, false)
    }

    /// The best tree for the sample that was inserted last.
    fn best_tree(&self, need: Room) -> Option<u32> {
        let least_work = |trees: &mut dyn Iterator<Item = u32>, room: Room| {
            let fits = |&tree: &u32| has_room(self.trees[tree as usize].free, room);
            trees.filter(fits).min_by_key(|&tree| (self.trees[tree as usize].work, tree))
        };
        let most_free = self.trees.iter().map(|tree| tree.free[0]).max().unwrap_or(0);
        let mut node = *self.trie.leaf.last()?;
        while node != ROOT {
            let room = [need[0] - self.trie.nodes[node as usize].end, need[1], need[2]];
            // Further up more is to be added.
            if room[0] > most_free {
                return None;
            }
            let found = least_work(&mut self.trees_of_node.trees(node).iter().copied(), room);
            if found.is_some() {
                return found;
            }
            node = self.trie.nodes[node as usize].parent;
        }
        least_work(&mut (0..self.trees.len() as u32), need)
    }

    fn commit(&mut self, need: Room, tree: u32) {
        let open = &mut self.trees[tree as usize];
        let mut node = self.trie.leaf.last().copied().unwrap_or(ROOT);
        let mut pairs = 0;
        while node != ROOT && !self.trees_of_node.holds(node, tree) {
            self.trees_of_node.add(node, tree);
            pairs += self.trie.nodes[node as usize].pairs();
            node = self.trie.nodes[node as usize].parent;
        }
        let tokens = need[0] - self.trie.nodes[node as usize].end;
        open.free = [open.free[0] - tokens, open.free[1] - need[1], open.free[2] - need[2]];
        open.work += work(pairs, tokens as u64);
        open.tokens += tokens;
        self.tree_of.push(tree);
    }

    fn write(&self, options: &Options, fill_ranks: bool) -> Result<Packed, PackError> {
        let samples = self.arena.samples(self.tree_of.len());
        let ranks = self.trees.len();
        let tokens = self.trees.iter().map(|tree| tree.tokens).collect();
        let forest = Forest { tree_of: self.tree_of.clone(), tokens };
        let total: u64 = self.trees.iter().map(|tree| tree.work).sum();
        let slowest = self.trees.iter().map(|tree| tree.work).max().unwrap_or(0);
        let mut balance = Balance { imbalance: 1.0, ..Balance::default() };
        if total > 0 {
            balance.imbalance = slowest as f64 * ranks as f64 / total as f64;
        }
        let mut forest = forest;
        if fill_ranks && self.trees.iter().any(|tree| tree.tokens == 0) {
            let before = forest.positions();
            let ordered;
            (forest, ordered) = split_for_ranks(&self.trie, forest.by_arrival(), ranks);
            let extra_tokens = forest.positions().saturating_sub(before);
            balance = Balance { imbalance: ordered.imbalance(ranks), extra_tokens, dummies: ordered.dummies };
        }
        let kept = samples.kept.as_ref().map(|sets| (sets, &self.kept));
        let writer = Writer { samples: &samples, options, runs: &self.runs, trie: &self.trie, kept };
        let mut packed = writer.write(&forest, &self.kept.total)?;
        packed.stats.balance = balance;
        packed.stats.count_samples(&samples, &[]);
        Ok(packed)
    }
}
