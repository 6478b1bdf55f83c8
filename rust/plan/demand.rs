//! What each sample needs, whichever tree it goes to.

use super::room::Room;
use crate::error::{Fault, PackError};
use crate::options::Limits;

pub struct Demand<'a> {
    pub lengths: &'a [u32],
    pub terms: &'a [u32],
    /// Kept ids, by sample; empty when no sample has sets.
    pub kept: &'a [u64],
    /// Samples that take no part.
    pub left_out: &'a [bool],
}

impl Demand<'_> {
    /// Tokens, terms and kept ids of a sample in a tree of its own.
    pub fn need(&self, sample: u32) -> Room {
        let sample = sample as usize;
        let kept = self.kept.get(sample).copied().unwrap_or(0);
        [self.lengths[sample], self.terms[sample], kept as u32]
    }

    /// Why a sample fits no tree at all, if so.
    pub fn overlong(&self, sample: usize, limits: &Limits) -> Option<PackError> {
        let [tokens, terms, kept] = self.need(sample as u32);
        let over = |has: u32, unit, limit, allowed: u32, multiple| {
            let (has, allowed) = (has as u64, allowed as u64);
            let fault = || Fault::Overlong { has, unit, limit, allowed, needs: has.next_multiple_of(multiple) };
            (has > allowed).then(|| fault().in_sample(sample))
        };
        over(tokens, "tokens", "max_tokens", limits.tokens, limits.multiple)
            .or_else(|| over(terms, "terms", "max_terms", limits.terms, 1))
            .or_else(|| over(kept, "kept ids", "max_kept", limits.kept, 1))
    }
}
