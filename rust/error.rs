//! Every way in which input can be refused: which sample, what it has, what is allowed.
//!
//! An error is an object and its text is made last: who knows a sample by another number changes the number.

use std::fmt::{Display, Formatter, Result};

/// Largest id and largest count of tokens, terms or kept ids in one call: every index is an `i32`.
pub const MAX_INDEX: u64 = i32::MAX as u64;

/// What is wrong, and where, as far as that is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackError {
    pub sample: Option<usize>,
    /// Index of a token within the sample.
    pub token: Option<usize>,
    pub fault: Fault,
}

/// What is wrong: with a sample, with one of its tokens, or with a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    Empty,
    ColumnLength {
        column: String,
        has: usize,
        tokens: usize,
    },
    /// `needs` is the smallest budget that takes the sample: what it has, with its padding.
    Overlong {
        has: u64,
        unit: &'static str,
        limit: &'static str,
        allowed: u64,
        needs: u64,
    },
    KeptSum {
        ids: usize,
        sum: u64,
    },
    Columns {
        has: String,
        needed: String,
    },

    TokenId {
        id: i64,
        max: u64,
    },
    MaskValue {
        value: u8,
    },
    KeptCount {
        count: i32,
    },
    KeptMissing {
        other: usize,
    },
    KeptTarget {
        id: i64,
    },
    KeptDuplicate {
        id: i32,
    },
    KeptId {
        id: i32,
        max: u64,
    },

    ColumnCount {
        column: String,
        has: usize,
        samples: usize,
    },
    TooMany {
        what: &'static str,
        has: u64,
    },
    Memory {
        bytes: u64,
        error: String,
    },
    Option {
        option: &'static str,
        got: String,
        allowed: String,
    },
}

impl Fault {
    pub fn memory(bytes: u64, error: impl Display) -> Self {
        Fault::Memory { bytes, error: error.to_string() }
    }

    pub fn in_sample(self, sample: usize) -> PackError {
        PackError { sample: Some(sample), token: None, fault: self }
    }

    pub fn at_token(self, sample: usize, token: usize) -> PackError {
        PackError { sample: Some(sample), token: Some(token), fault: self }
    }

    /// The budget that the sample breaks, by the name of its option.
    pub fn budget(&self) -> Option<&'static str> {
        match self {
            Fault::Overlong { limit, .. } => Some(limit),
            _ => None,
        }
    }

    /// The smallest value of that option that takes the sample.
    pub fn needs(&self) -> Option<u64> {
        match self {
            Fault::Overlong { needs, .. } => Some(*needs),
            _ => None,
        }
    }

    pub fn words(&self) -> Words {
        match self {
            Fault::Empty => Words::plain("input_ids is empty; a sample needs at least one token".to_string()),
            Fault::ColumnLength { column, has, tokens } => {
                Words::plain(format!("{column} has {has} rows; input_ids has {tokens} tokens, so {tokens} are needed"))
            }
            Fault::Overlong { has, unit, limit, allowed, .. } => {
                Words::plain(format!("it has {has} {unit}; {limit}={allowed} is the most a tree may hold"))
            }
            Fault::KeptSum { ids, sum } => {
                Words::plain(format!("sampling_mask has {ids} ids; sampling_mask_counts adds up to {sum}"))
            }
            Fault::Columns { has, needed } => Words::plain(format!(
                "it has other columns than the first sample of the stream: {has}; needed are {needed}"
            )),

            Fault::TokenId { id, max } => {
                Words::index("input_ids", format!(" is {id}; allowed are ids from 0 to {max}"))
            }
            Fault::MaskValue { value } => {
                Words::index("completion_mask", format!(" is {value}; allowed are 0 (context) and 1 (trained)"))
            }
            Fault::KeptCount { count } => {
                Words::index("sampling_mask_counts", format!(" is {count}; a count is 0 or more"))
            }
            Fault::KeptMissing { other } => Words {
                head: "trained token".to_string(),
                token_as: " {}",
                tail: format!(
                    " has no kept set, trained token {other} has one; \
                     within a sample all trained tokens carry a set or none does"
                ),
            },
            Fault::KeptTarget { id } => Words::kept_set(format!(
                " lacks the token itself (id {id}); the set recorded for a token must contain it"
            )),
            Fault::KeptDuplicate { id } => Words::kept_set(format!(" holds id {id} twice; a set holds an id once")),
            Fault::KeptId { id, max } => Words::kept_set(format!(" holds id {id}; allowed are ids from 0 to {max}")),

            Fault::ColumnCount { column, has, samples } => {
                Words::plain(format!("{column} has values for {has} samples; the call has {samples} samples"))
            }
            Fault::TooMany { what, has } => Words::plain(format!(
                "the call has {has} {what}; at most {MAX_INDEX} are possible, since every index is int32"
            )),
            Fault::Memory { bytes, error } => {
                Words::plain(format!("no memory for {bytes} bytes, which the packing may need: {error}"))
            }
            Fault::Option { option, got, allowed } => Words::plain(format!("{option} is {got}; allowed is {allowed}")),
        }
    }
}

impl PackError {
    /// What is wrong, without sample and token.
    pub fn detail(&self) -> String {
        let Words { head, tail, .. } = self.fault.words();
        head + &tail
    }
}

impl From<Fault> for PackError {
    fn from(fault: Fault) -> Self {
        PackError { sample: None, token: None, fault }
    }
}

/// What is wrong, in words in front of which a sample may be named, and in two parts between which a token may be.
pub struct Words {
    pub head: String,
    /// How a token is named, with its index for `{}`; empty where none is.
    pub token_as: &'static str,
    pub tail: String,
}

impl Words {
    fn plain(text: String) -> Self {
        Words { head: text, token_as: "", tail: String::new() }
    }

    fn index(column: &str, tail: String) -> Self {
        Words { head: column.to_string(), token_as: "[{}]", tail }
    }

    fn kept_set(tail: String) -> Self {
        Words { head: "the kept set".to_string(), token_as: " of token {}", tail }
    }
}

impl Display for PackError {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        if let Some(sample) = self.sample {
            write!(out, "sample {sample}: ")?;
        }
        let Words { head, token_as, tail } = self.fault.words();
        let token = self.token.map_or(String::new(), |token| token_as.replace("{}", &token.to_string()));
        write!(out, "{head}{token}{tail}")
    }
}

impl std::error::Error for PackError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_and_a_token_are_named_last() {
        let mut error = Fault::TokenId { id: -5, max: 9 }.at_token(7, 3);
        assert_eq!(error.to_string(), "sample 7: input_ids[3] is -5; allowed are ids from 0 to 9");
        (error.sample, error.token) = (Some(70), Some(30));
        assert_eq!(error.to_string(), "sample 70: input_ids[30] is -5; allowed are ids from 0 to 9");
        assert_eq!(error.detail(), "input_ids is -5; allowed are ids from 0 to 9");
        (error.sample, error.token) = (None, None);
        assert_eq!(error.to_string(), error.detail());
        let error = Fault::KeptDuplicate { id: 4 }.at_token(0, 2);
        assert_eq!(error.to_string(), "sample 0: the kept set of token 2 holds id 4 twice; a set holds an id once");
        let error = Fault::KeptMissing { other: 1 }.at_token(0, 2);
        assert!(error.to_string().starts_with("sample 0: trained token 2 has no kept set, trained token 1 has one; "));
    }

    #[test]
    fn what_a_user_named_is_never_taken_for_a_place() {
        let column = "sample 7 of {} [{}]".to_string();
        let mut error = Fault::ColumnLength { column, has: 1, tokens: 2 }.in_sample(0);
        error.sample = Some(12);
        let text = "sample 12: sample 7 of {} [{}] has 1 rows; input_ids has 2 tokens, so 2 are needed";
        assert_eq!(error.to_string(), text);
    }
}
