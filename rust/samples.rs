//! What goes in: borrowed token sequences and the columns that travel with them.

use std::borrow::Cow;

use crate::error::{Fault, PackError, MAX_INDEX};
use crate::simd::{id_overflow, prefetch};

/// Token sequences that a trie can be built over. A node is keyed on the token, on its identity row, and with
/// label branching also on the token that follows (nothing after the last).
pub trait Sequences {
    fn ids(&self, sample: u32) -> &[i64];
    /// The identity rows of a sample as bytes, `width()` per token; empty when the call brings none.
    fn identity(&self, sample: u32) -> &[u8];
    fn width(&self) -> usize;
    fn label(&self) -> bool;
}

/// A per-token column: `width` bytes for every token of every sample.
pub struct TokenColumn<'a> {
    pub name: String,
    pub width: usize,
    pub rows: Vec<&'a [u8]>,
}

/// A per-sample column: `width` bytes for every sample, end to end. Gathered per sample, and `per_term` also per term.
pub struct SampleColumn<'a> {
    pub name: String,
    pub width: usize,
    pub rows: Cow<'a, [u8]>,
    pub per_term: bool,
}

/// Kept sets: for every token the number of ids that the sampler kept, and the ids end to end.
pub struct KeptSets<'a> {
    pub ids: Vec<&'a [i32]>,
    pub counts: Vec<&'a [i32]>,
}

/// All samples of a call, borrowed. Each list has one entry per sample.
#[derive(Default)]
pub struct Samples<'a> {
    pub ids: Vec<&'a [i64]>,
    /// 1 = trained, 0 = context; `None` = every token is trained.
    pub mask: Option<Vec<&'a [u8]>>,
    pub identity: Option<TokenColumn<'a>>,
    pub kept: Option<KeptSets<'a>>,
    pub token_columns: Vec<TokenColumn<'a>>,
    pub sample_columns: Vec<SampleColumn<'a>>,
}

impl<'a> Samples<'a> {
    pub fn new(ids: Vec<&'a [i64]>) -> Self {
        Samples { ids, ..Samples::default() }
    }

    pub fn len(&self) -> usize {
        self.ids.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Asks for where the rows of samples lie, and then for the first of them, to be brought into the caches. What comes
    /// after them the processor reads ahead by itself.
    pub fn ask_for(&self, samples: &[u32]) {
        const LINE: u32 = 64;
        for &sample in samples {
            prefetch(&self.ids, sample);
            self.token_columns.iter().for_each(|column| prefetch(&column.rows, sample));
            self.sample_columns
                .iter()
                .for_each(|column| prefetch(&column.rows, sample.wrapping_mul(column.width as u32)));
        }
        for &sample in samples {
            (0..3).for_each(|line| prefetch(self.ids[sample as usize], line * LINE / 8));
            for column in &self.token_columns {
                (0..2).for_each(|line| prefetch(column.rows[sample as usize], line * LINE));
            }
        }
    }

    /// Lengths agree and indices fit; O(samples). Token values are checked where they are first read.
    pub fn check(&self) -> Result<(), PackError> {
        let mut raw = 0u64;
        for (sample, ids) in self.ids.iter().enumerate() {
            if ids.is_empty() {
                return Err(Fault::Empty.in_sample(sample));
            }
            raw += ids.len() as u64;
        }
        if raw > MAX_INDEX {
            let what = "tokens";
            return Err(Fault::TooMany { what, has: raw }.into());
        }
        if let Some(mask) = &self.mask {
            self.check_rows("completion_mask", 1, mask)?;
        }
        for column in self.identity.iter().chain(&self.token_columns) {
            self.check_rows(&column.name, column.width, &column.rows)?;
        }
        for column in &self.sample_columns {
            self.check_count(&column.name, column.rows.len() / column.width.max(1))?;
        }
        if let Some(kept) = &self.kept {
            self.check_rows("sampling_mask_counts", 1, &kept.counts)?;
            self.check_count("sampling_mask", kept.ids.len())?;
        }
        Ok(())
    }

    fn check_count(&self, column: &str, has: usize) -> Result<(), PackError> {
        if has == self.len() {
            return Ok(());
        }
        let (column, samples) = (column.to_string(), self.len());
        Err(Fault::ColumnCount { column, has, samples }.into())
    }

    fn check_rows<T>(&self, name: &str, width: usize, rows: &[&[T]]) -> Result<(), PackError> {
        self.check_count(name, rows.len())?;
        for (sample, (ids, row)) in self.ids.iter().zip(rows).enumerate() {
            if Some(row.len()) != ids.len().checked_mul(width) {
                return Err(length_error(sample, name, row.len() / width.max(1), ids.len()));
            }
        }
        Ok(())
    }

    /// Offset of each sample in the flat input (all samples end to end).
    pub fn offsets(&self) -> Vec<u32> {
        let mut sum = 0u32;
        let start = |ids: &&[i64]| {
            let at = sum;
            sum += ids.len() as u32;
            at
        };
        self.ids.iter().map(start).collect()
    }

    /// Refuses ids outside `0..=max`: a cheap test over all of them, and a search for the culprit only if it fails.
    pub fn check_ids(&self, max: u64) -> Result<(), PackError> {
        let above = |ids: &&[i64]| id_overflow(ids) != 0 || (max < MAX_INDEX && ids.iter().any(|&id| id as u64 > max));
        match self.ids.iter().any(above) {
            true => self.find_bad_id(max).map_or(Ok(()), Err),
            false => Ok(()),
        }
    }

    /// The first id outside `0..=max`, as an error.
    pub fn find_bad_id(&self, max: u64) -> Option<PackError> {
        for (sample, ids) in self.ids.iter().enumerate() {
            if let Some((token, &id)) = ids.iter().enumerate().find(|(_, &id)| id as u64 > max) {
                return Some(Fault::TokenId { id, max }.at_token(sample, token));
            }
        }
        None
    }
}

fn length_error(sample: usize, name: &str, has: usize, tokens: usize) -> PackError {
    Fault::ColumnLength { column: name.to_string(), has, tokens }.in_sample(sample)
}

/// `Samples` seen as sequences under one branching rule.
pub struct Keyed<'s, 'a> {
    pub samples: &'s Samples<'a>,
    pub label: bool,
}

impl Sequences for Keyed<'_, '_> {
    #[inline(always)]
    fn ids(&self, sample: u32) -> &[i64] {
        self.samples.ids[sample as usize]
    }
    #[inline(always)]
    fn identity(&self, sample: u32) -> &[u8] {
        match &self.samples.identity {
            Some(column) => column.rows[sample as usize],
            None => &[],
        }
    }
    #[inline(always)]
    fn width(&self) -> usize {
        self.samples.identity.as_ref().map_or(0, |column| column.width)
    }
    #[inline(always)]
    fn label(&self) -> bool {
        self.label
    }
}
