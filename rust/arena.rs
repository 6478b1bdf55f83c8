//! The samples of an open micro-batch, copied end to end: the caller's arrays may change after `add`.

use crate::error::Fault;
use crate::memory::room_for;
use crate::samples::{KeptSets, SampleColumn, Samples, Sequences, TokenColumn};

/// Bytes end to end, and what the column is called.
struct Rows {
    name: String,
    width: usize,
    bytes: Vec<u8>,
    per_term: bool,
}

#[derive(Default)]
pub struct Arena {
    label: bool,
    ids: Vec<i64>,
    /// Offsets of the samples in tokens; n + 1 entries.
    offsets: Vec<usize>,
    mask: Option<Vec<u8>>,
    identity: Option<Rows>,
    kept: Option<Kept>,
    token_columns: Vec<Rows>,
    sample_columns: Vec<Rows>,
}

#[derive(Default)]
struct Kept {
    ids: Vec<i32>,
    counts: Vec<i32>,
    offsets: Vec<usize>,
}

impl Arena {
    /// An empty arena for samples with the columns of `like`.
    pub fn new(like: &Samples, label: bool) -> Self {
        let rows = |name: &str, width, per_term| Rows { name: name.to_string(), width, bytes: Vec::new(), per_term };
        let tokens = |column: &TokenColumn| rows(&column.name, column.width, true);
        Arena {
            label,
            ids: Vec::new(),
            offsets: vec![0],
            mask: like.mask.as_ref().map(|_| Vec::new()),
            identity: like.identity.as_ref().map(tokens),
            kept: like.kept.as_ref().map(|_| Kept { offsets: vec![0], ..Kept::default() }),
            token_columns: like.token_columns.iter().map(tokens).collect(),
            sample_columns: like.sample_columns.iter().map(|c| rows(&c.name, c.width, c.per_term)).collect(),
        }
    }

    pub fn raw_tokens(&self) -> usize {
        self.ids.len()
    }

    /// Whether a sample has the arena's columns.
    pub fn has_columns_of(&self, sample: &Samples) -> bool {
        let tokens = |a: &Rows, b: &TokenColumn| a.name == b.name && a.width == b.width;
        let scalars = |a: &Rows, b: &SampleColumn| a.name == b.name && a.width == b.width;
        self.mask.is_some() == sample.mask.is_some()
            && self.kept.is_some() == sample.kept.is_some()
            && self.identity.is_some() == sample.identity.is_some()
            && self.identity.iter().zip(&sample.identity).all(|(a, b)| tokens(a, b))
            && self.token_columns.len() == sample.token_columns.len()
            && self.token_columns.iter().zip(&sample.token_columns).all(|(a, b)| tokens(a, b))
            && self.sample_columns.len() == sample.sample_columns.len()
            && self.sample_columns.iter().zip(&sample.sample_columns).all(|(a, b)| scalars(a, b))
    }

    /// The columns in words.
    pub fn describe(&self) -> String {
        describe_columns(&self.samples(0))
    }

    /// Room for one sample more, which has the arena's columns, or an error.
    pub fn make_room(&mut self, sample: &Samples) -> Result<(), Fault> {
        let tokens = sample.ids[0].len();
        room_for(&mut self.ids, tokens)?;
        if let Some(mask) = &mut self.mask {
            room_for(mask, tokens)?;
        }
        for rows in self.identity.iter_mut().chain(&mut self.token_columns) {
            room_for(&mut rows.bytes, tokens * rows.width)?;
        }
        if let (Some(to), Some(from)) = (&mut self.kept, &sample.kept) {
            room_for(&mut to.ids, from.ids[0].len())?;
            room_for(&mut to.counts, tokens)?;
        }
        Ok(())
    }

    /// Copies the one sample of `sample`, which has the arena's columns.
    pub fn push(&mut self, sample: &Samples) {
        self.ids.extend_from_slice(sample.ids[0]);
        self.offsets.push(self.ids.len());
        if let (Some(to), Some(from)) = (&mut self.mask, &sample.mask) {
            to.extend_from_slice(from[0]);
        }
        let token = |(to, from): (&mut Rows, &TokenColumn)| to.bytes.extend_from_slice(from.rows[0]);
        self.identity.iter_mut().zip(&sample.identity).for_each(token);
        self.token_columns.iter_mut().zip(&sample.token_columns).for_each(token);
        for (to, from) in self.sample_columns.iter_mut().zip(&sample.sample_columns) {
            to.bytes.extend_from_slice(&from.rows);
        }
        if let (Some(to), Some(from)) = (&mut self.kept, &sample.kept) {
            to.ids.extend_from_slice(from.ids[0]);
            to.counts.extend_from_slice(from.counts[0]);
            to.offsets.push(to.ids.len());
        }
    }

    /// Takes the last sample back.
    pub fn pop(&mut self) {
        self.offsets.pop();
        let tokens = self.offsets.last().copied().unwrap_or(0);
        self.ids.truncate(tokens);
        self.mask.iter_mut().for_each(|mask| mask.truncate(tokens));
        for rows in self.identity.iter_mut().chain(&mut self.token_columns) {
            rows.bytes.truncate(tokens * rows.width);
        }
        for rows in &mut self.sample_columns {
            rows.bytes.truncate((self.offsets.len() - 1) * rows.width);
        }
        if let Some(kept) = &mut self.kept {
            kept.offsets.pop();
            kept.ids.truncate(kept.offsets.last().copied().unwrap_or(0));
            kept.counts.truncate(tokens);
        }
    }

    /// Removes all samples and keeps the memory.
    pub fn clear(&mut self) {
        self.ids.clear();
        self.offsets.truncate(1);
        self.mask.iter_mut().for_each(Vec::clear);
        for rows in self.identity.iter_mut().chain(&mut self.token_columns).chain(&mut self.sample_columns) {
            rows.bytes.clear();
        }
        if let Some(kept) = &mut self.kept {
            kept.ids.clear();
            kept.counts.clear();
            kept.offsets.truncate(1);
        }
    }

    /// The first `count` samples, borrowed.
    pub fn samples(&self, count: usize) -> Samples<'_> {
        let cuts = || self.offsets.windows(2).take(count).map(|pair| (pair[0], pair[1]));
        let column = |rows: &Rows| cuts().map(|(a, b)| (a * rows.width, b * rows.width)).collect::<Vec<_>>();
        fn slices(bytes: &[u8], cuts: Vec<(usize, usize)>) -> Vec<&[u8]> {
            cuts.into_iter().map(|(a, b)| &bytes[a..b]).collect()
        }
        fn token(rows: &Rows, cuts: Vec<(usize, usize)>) -> TokenColumn<'_> {
            TokenColumn { name: rows.name.clone(), width: rows.width, rows: slices(&rows.bytes, cuts) }
        }
        Samples {
            ids: cuts().map(|(a, b)| &self.ids[a..b]).collect(),
            mask: self.mask.as_ref().map(|mask| slices(mask, cuts().collect())),
            identity: self.identity.as_ref().map(|rows| token(rows, column(rows))),
            kept: self.kept.as_ref().map(|kept| KeptSets {
                ids: kept.offsets.windows(2).take(count).map(|pair| &kept.ids[pair[0]..pair[1]]).collect(),
                counts: cuts().map(|(a, b)| &kept.counts[a..b]).collect(),
            }),
            token_columns: self.token_columns.iter().map(|rows| token(rows, column(rows))).collect(),
            sample_columns: self
                .sample_columns
                .iter()
                .map(|rows| SampleColumn {
                    name: rows.name.clone(),
                    width: rows.width,
                    rows: (&rows.bytes[..count * rows.width]).into(),
                    per_term: rows.per_term,
                })
                .collect(),
        }
    }
}

/// The columns of samples in words, for a message.
pub fn describe_columns(samples: &Samples) -> String {
    let known = [(samples.mask.is_some(), "completion_mask"), (samples.kept.is_some(), "kept sets")];
    let known = known.into_iter().filter(|&(present, _)| present).map(|(_, name)| name.to_string());
    let per = |name: &str, width: usize, what: &str| format!("{name} ({width} bytes per {what})");
    let tokens = samples.token_columns.iter().map(|column| per(&column.name, column.width, "token"));
    let scalars = samples.sample_columns.iter().map(|column| per(&column.name, column.width, "sample"));
    let all: Vec<String> = std::iter::once("input_ids".to_string()).chain(known).chain(tokens).chain(scalars).collect();
    all.join(", ")
}

impl Sequences for Arena {
    #[inline(always)]
    fn ids(&self, sample: u32) -> &[i64] {
        &self.ids[self.offsets[sample as usize]..self.offsets[sample as usize + 1]]
    }
    #[inline(always)]
    fn identity(&self, sample: u32) -> &[u8] {
        let (from, to) = (self.offsets[sample as usize], self.offsets[sample as usize + 1]);
        self.identity.as_ref().map_or(&[], |rows| &rows.bytes[from * rows.width..to * rows.width])
    }
    #[inline(always)]
    fn width(&self) -> usize {
        self.identity.as_ref().map_or(0, |rows| rows.width)
    }
    #[inline(always)]
    fn label(&self) -> bool {
        self.label
    }
}
