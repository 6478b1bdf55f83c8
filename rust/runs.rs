//! Completion masks -> runs of trained tokens that have a predecessor. Everything about loss terms works on runs,
//! since a mask has few of them and many tokens.

use crate::error::{Fault, PackError};
use crate::memory::room_for;
use crate::samples::Samples;
use crate::simd::{prefetch, run_end};

#[derive(Clone)]
pub struct Runs {
    offsets: Vec<u32>,
    runs: Vec<(u32, u32)>,
    /// Loss terms of each sample.
    pub terms: Vec<u32>,
}

impl Runs {
    pub fn empty() -> Self {
        Runs { offsets: vec![0], runs: Vec::new(), terms: Vec::new() }
    }

    /// O(raw tokens) bytes read, 32 at a time. The first token of a sample is never a target, whatever its mask.
    pub fn new(samples: &Samples) -> Result<Self, PackError> {
        let mut out = Runs {
            offsets: Vec::with_capacity(samples.len() + 1),
            runs: Vec::with_capacity(2 * samples.len()),
            terms: Vec::with_capacity(samples.len()),
        };
        out.offsets.push(0);
        for sample in 0..samples.len() {
            match &samples.mask {
                Some(mask) => out.push_mask(sample, mask[sample])?,
                None => out.push_all(samples.ids[sample].len() as u32),
            }
        }
        Ok(out)
    }

    /// The runs of a sample as token ranges `start..end`, `start >= 1`.
    #[inline]
    pub fn ranges(&self, sample: u32) -> &[(u32, u32)] {
        let (a, b) = (self.offsets[sample as usize], self.offsets[sample as usize + 1]);
        &self.runs[a as usize..b as usize]
    }

    /// Asks for the runs of a sample to be brought into the caches: where they begin, and about where they lie.
    pub fn ask_for(&self, sample: u32) {
        prefetch(&self.offsets, sample);
        if self.runs.len() == self.terms.len() {
            prefetch(&self.runs, sample); // one run a sample, as a rule
        }
    }

    /// Runs of all samples.
    pub fn count(&self) -> usize {
        self.runs.len()
    }

    /// Adds the samples of `other` after these.
    pub fn append(&mut self, other: &Runs) {
        let first = self.runs.len() as u32;
        self.offsets.extend(other.offsets[1..].iter().map(|&at| first + at));
        self.runs.extend_from_slice(&other.runs);
        self.terms.extend_from_slice(&other.terms);
    }

    /// Removes all samples and keeps the memory.
    pub fn clear(&mut self) {
        self.offsets.truncate(1);
        self.runs.clear();
        self.terms.clear();
    }

    fn push_all(&mut self, length: u32) {
        if length > 1 {
            self.runs.push((1, length));
        }
        self.close(length - 1);
    }

    fn push_mask(&mut self, sample: usize, mask: &[u8]) -> Result<(), PackError> {
        let mut terms = 0;
        let mut at = 0;
        while at < mask.len() {
            at = run_end(mask, at, 0);
            let end = run_end(mask, at, 1);
            if end < mask.len() && mask[end] != 0 {
                return Err(Fault::MaskValue { value: mask[end] }.at_token(sample, end));
            }
            let start = at.max(1);
            if start < end {
                if self.runs.len() == self.runs.capacity() {
                    room_for(&mut self.runs, 1)?;
                }
                self.runs.push((start as u32, end as u32));
                terms += (end - start) as u32;
            }
            at = end;
        }
        self.close(terms);
        Ok(())
    }

    fn close(&mut self, terms: u32) {
        self.offsets.push(self.runs.len() as u32);
        self.terms.push(terms);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(mask: &[u8]) -> Result<(Vec<(u32, u32)>, u32), PackError> {
        let ids = vec![0i64; mask.len()];
        let mut samples = Samples::new(vec![&ids]);
        samples.mask = Some(vec![mask]);
        Runs::new(&samples).map(|r| (r.ranges(0).to_vec(), r.terms[0]))
    }

    #[test]
    fn the_first_token_is_never_a_target() {
        assert_eq!(runs(&[1]).unwrap(), (vec![], 0));
        assert_eq!(runs(&[1, 0, 1]).unwrap(), (vec![(2, 3)], 1));
        assert_eq!(runs(&[1, 1, 0, 0, 1, 1]).unwrap(), (vec![(1, 2), (4, 6)], 3));
        assert_eq!(runs(&[0, 0]).unwrap(), (vec![], 0));
    }

    #[test]
    fn other_values_are_refused_where_they_stand() {
        for (mask, token) in [(vec![2u8], 0), (vec![0, 1, 3, 1], 2), (vec![0, 7], 1)] {
            let value = mask[token];
            assert_eq!(runs(&mask), Err(Fault::MaskValue { value }.at_token(0, token)));
        }
    }

    #[test]
    fn without_a_mask_every_token_but_the_first_is_a_term() {
        let (a, b) = ([5i64, 6, 7], [1i64]);
        let r = Runs::new(&Samples::new(vec![&a, &b])).unwrap();
        assert_eq!((r.ranges(0), r.ranges(1)), (&[(1, 3)][..], &[][..]));
        assert_eq!(r.terms, [2, 0]);
    }
}
