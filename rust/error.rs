//! Every way in which input can be refused, in words: which sample, what it has, what is allowed.

use thiserror::Error;

/// Largest id and largest count of tokens, terms or kept ids in one call: every index is an `i32`.
pub const MAX_INDEX: u64 = i32::MAX as u64;

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PackError {
    #[error("sample {sample}: input_ids is empty; a sample needs at least one token")]
    EmptySample { sample: usize },
    #[error("sample {sample}: input_ids[{token}] is {id}; allowed are ids from 0 to {max}")]
    TokenId { sample: usize, token: usize, id: i64, max: u64 },
    #[error("sample {sample}: {column} has {has} {unit}; input_ids has {tokens} tokens, so {want} are needed")]
    ColumnLength { sample: usize, column: String, has: usize, want: usize, unit: &'static str, tokens: usize },
    #[error("{column} has values for {has} samples; the call has {samples} samples")]
    ColumnCount { column: String, has: usize, samples: usize },
    #[error("sample {sample}: completion_mask[{token}] is {value}; allowed are 0 (context) and 1 (trained)")]
    MaskValue { sample: usize, token: usize, value: u8 },
    #[error("sample {sample}: it has {has} {unit}; {limit}={allowed} is the most a tree may hold")]
    Overlong { sample: usize, has: u64, unit: &'static str, limit: &'static str, allowed: u64 },
    #[error("sample {sample}: sampling_mask_counts[{token}] is {count}; a count is 0 or more")]
    KeptCount { sample: usize, token: usize, count: i32 },
    #[error("sample {sample}: sampling_mask has {ids} ids; sampling_mask_counts adds up to {sum}")]
    KeptSum { sample: usize, ids: usize, sum: u64 },
    #[error(
        "sample {sample}: trained token {token} has no kept set, trained token {other} has one; \
         within a sample all trained tokens carry a set or none does"
    )]
    KeptMissing { sample: usize, token: usize, other: usize },
    #[error(
        "sample {sample}: the kept set of token {token} lacks the token itself (id {id}); \
         the set recorded for a token must contain it"
    )]
    KeptTarget { sample: usize, token: usize, id: i64 },
    #[error("sample {sample}: the kept set of token {token} holds id {id} twice; a set holds an id once")]
    KeptDuplicate { sample: usize, token: usize, id: i32 },
    #[error("sample {sample}: the kept set of token {token} holds id {id}; allowed are ids from 0 to {max}")]
    KeptId { sample: usize, token: usize, id: i32, max: u64 },
    #[error("the call has {has} {what}; at most {MAX_INDEX} are possible, since every index is int32")]
    TooMany { what: &'static str, has: u64 },
    #[error("no memory for {bytes} bytes of packed trees: {error}")]
    Memory { bytes: u64, error: String },
    #[error("{option} is {got}; allowed is {allowed}")]
    Option { option: &'static str, got: String, allowed: String },
}
