//! What a caller asks for: budgets of a tree, branching, order, placement, ranks.

use crate::error::{Fault, PackError, MAX_INDEX};

/// Order of siblings and of roots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    LargestFirst,
    FirstSeen,
}

/// Rule by which samples are placed into trees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    FirstFit,
    Shared,
}

/// What a tree may hold at most: positions, loss terms, kept ids.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub tokens: u32,
    pub terms: u32,
    pub kept: u32,
    /// Positions come in multiples of it.
    pub multiple: u64,
}

/// More than any job has; a bound on the dummies that one sample can cause.
const MAX_RANKS: u64 = 1 << 16;

#[derive(Clone, Debug)]
pub struct Options {
    /// Budgets of a tree: positions (padding included), terms, kept ids.
    pub max_tokens: u64,
    pub max_terms: Option<u64>,
    pub max_kept: Option<u64>,
    /// Ids are below this.
    pub vocab_size: Option<u64>,
    pub label_branching: bool,
    pub order: Order,
    pub placement: Placement,
    /// Trees come in micro-batches of one tree per rank.
    pub ranks: u64,
    /// Leave samples out that fit no tree, instead of refusing the call.
    pub skip_overlong: bool,
    pub pad_to_multiple_of: u64,
}

impl Options {
    pub fn new(max_tokens: u64) -> Self {
        Options {
            max_tokens,
            max_terms: None,
            max_kept: None,
            vocab_size: None,
            label_branching: false,
            order: Order::LargestFirst,
            placement: Placement::Shared,
            ranks: 1,
            skip_overlong: false,
            pad_to_multiple_of: 1,
        }
    }

    /// The budgets of a tree, checked.
    pub fn limits(&self) -> Result<Limits, PackError> {
        let refuse = |option, got: u64, allowed| Err(Fault::Option { option, got: got.to_string(), allowed });
        let positive = |option, value: u64| match value {
            0 => refuse(option, value, "1 or more".to_string()),
            value => Ok(value),
        };
        positive("max_tokens", self.max_tokens)?;
        let multiple = positive("pad_to_multiple_of", self.pad_to_multiple_of)?;
        positive("vocab_size", self.vocab_size.unwrap_or(1))?;
        if !(1..=MAX_RANKS).contains(&self.ranks) {
            refuse("ranks", self.ranks, format!("1 to {MAX_RANKS}"))?;
        }
        if multiple > self.max_tokens {
            let most = self.max_tokens;
            let allowed = format!("up to max_tokens={most}, since every tree is padded to a multiple of it");
            refuse("pad_to_multiple_of", multiple, allowed)?;
        }
        let tokens = self.max_tokens.min(MAX_INDEX);
        Ok(Limits {
            tokens: (tokens - tokens % multiple) as u32,
            terms: self.max_terms.unwrap_or(MAX_INDEX).min(MAX_INDEX) as u32,
            kept: self.max_kept.unwrap_or(MAX_INDEX).min(MAX_INDEX) as u32,
            multiple,
        })
    }

    /// Largest id that is allowed.
    pub fn max_id(&self) -> u64 {
        self.vocab_size.map_or(MAX_INDEX, |size| (size - 1).min(MAX_INDEX))
    }
}
