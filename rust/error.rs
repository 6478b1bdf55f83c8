//! Every way in which input can be refused, in words: which sample, what it has, what is allowed.

use thiserror::Error;

/// Largest id and largest count of tokens, terms or kept ids in one call: every index is an `i32`.
pub const MAX_INDEX: u64 = i32::MAX as u64;

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PackError {
    #[error("sample {sample}: {fault}")]
    Sample { sample: usize, fault: Fault },
    #[error("{column} has values for {has} samples; the call has {samples} samples")]
    ColumnCount { column: String, has: usize, samples: usize },
    #[error("the call has {has} {what}; at most {MAX_INDEX} are possible, since every index is int32")]
    TooMany { what: &'static str, has: u64 },
    #[error("no memory for {bytes} bytes of packed trees: {error}")]
    Memory { bytes: u64, error: String },
    #[error("{option} is {got}; allowed is {allowed}")]
    Option { option: &'static str, got: String, allowed: String },
}

impl PackError {
    /// The same error for a call whose first sample has number `first`.
    pub fn counted_from(self, first: usize) -> Self {
        match self {
            PackError::Sample { sample, fault } => PackError::Sample { sample: first + sample, fault },
            other => other,
        }
    }
}

/// What is wrong with one sample.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Fault {
    #[error("input_ids is empty; a sample needs at least one token")]
    Empty,
    #[error("input_ids[{token}] is {id}; allowed are ids from 0 to {max}")]
    TokenId { token: usize, id: i64, max: u64 },
    #[error("{column} has {has} rows; input_ids has {tokens} tokens, so {tokens} are needed")]
    ColumnLength { column: String, has: usize, tokens: usize },
    #[error("completion_mask[{token}] is {value}; allowed are 0 (context) and 1 (trained)")]
    MaskValue { token: usize, value: u8 },
    #[error("it has {has} {unit}; {limit}={allowed} is the most a tree may hold")]
    Overlong { has: u64, unit: &'static str, limit: &'static str, allowed: u64 },
    #[error("sampling_mask_counts[{token}] is {count}; a count is 0 or more")]
    KeptCount { token: usize, count: i32 },
    #[error("sampling_mask has {ids} ids; sampling_mask_counts adds up to {sum}")]
    KeptSum { ids: usize, sum: u64 },
    #[error(
        "trained token {token} has no kept set, trained token {other} has one; \
         within a sample all trained tokens carry a set or none does"
    )]
    KeptMissing { token: usize, other: usize },
    #[error(
        "the kept set of token {token} lacks the token itself (id {id}); \
         the set recorded for a token must contain it"
    )]
    KeptTarget { token: usize, id: i64 },
    #[error("the kept set of token {token} holds id {id} twice; a set holds an id once")]
    KeptDuplicate { token: usize, id: i32 },
    #[error("the kept set of token {token} holds id {id}; allowed are ids from 0 to {max}")]
    KeptId { token: usize, id: i32, max: u64 },
    #[error("it has other columns than the first sample of the stream: {has}; needed are {needed}")]
    Columns { has: String, needed: String },
}

impl Fault {
    pub fn in_sample(self, sample: usize) -> PackError {
        PackError::Sample { sample, fault: self }
    }
}
