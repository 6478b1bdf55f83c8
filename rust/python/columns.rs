//! What `inputs.py` makes ready -> the samples and options of the crate.

use pyo3::prelude::*;

use super::borrow::{bytes, Listed, Rows};
use crate::{KeptSets, Options, Order, Placement, SampleColumn, Samples, TokenColumn};

/// A per-token column: name, bytes per token, rows.
type Column<'py> = (String, usize, Rows<'py>);
/// A per-sample column: name, bytes per sample, the array, whether it is gathered per term as well.
type GatheredColumn<'py> = (String, usize, Bound<'py, PyAny>, bool);

/// `inputs.Inputs`, by its attributes.
#[derive(FromPyObject)]
pub struct Columns<'py> {
    ids: Rows<'py>,
    mask: Option<Rows<'py>>,
    identity: Option<Column<'py>>,
    kept: Option<(Rows<'py>, Rows<'py>)>,
    token_columns: Listed<Column<'py>>,
    sample_columns: Listed<GatheredColumn<'py>>,
}

impl Columns<'_> {
    /// The samples, borrowed from the arrays that `self` holds.
    pub fn samples(&self) -> PyResult<Samples<'_>> {
        // SAFETY (all borrows here): `self` holds the lists and arrays, and the samples live no longer than it.
        let token_column = |(name, width, rows): &Column<'_>| -> PyResult<TokenColumn<'_>> {
            let rows = unsafe { rows.rows(*width)? };
            Ok(TokenColumn { name: name.clone(), width: *width, rows })
        };
        let sample_column = |(name, width, value, per_term): &GatheredColumn<'_>| -> PyResult<SampleColumn<'_>> {
            let rows = unsafe { bytes(value)? };
            Ok(SampleColumn { name: name.clone(), width: *width, rows: rows.into(), per_term: *per_term })
        };
        Ok(Samples {
            ids: unsafe { self.ids.numbers()? },
            mask: self.mask.as_ref().map(|mask| unsafe { mask.rows(1) }).transpose()?,
            identity: self.identity.as_ref().map(token_column).transpose()?,
            kept: match &self.kept {
                Some((ids, counts)) => {
                    Some(KeptSets { ids: unsafe { ids.numbers()? }, counts: unsafe { counts.numbers()? } })
                }
                None => None,
            },
            token_columns: self.token_columns.0.iter().map(token_column).collect::<PyResult<_>>()?,
            sample_columns: self.sample_columns.0.iter().map(sample_column).collect::<PyResult<_>>()?,
        })
    }
}

/// Keyword arguments of `pack` and `Packer`, checked for their types by `options.py`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Keywords {
    max_tokens: u64,
    max_terms: Option<u64>,
    max_kept: Option<u64>,
    vocab_size: Option<u64>,
    label_branching: bool,
    first_seen: bool,
    first_fit: bool,
    skip_overlong: bool,
    pad_to_multiple_of: u64,
    ranks: u64,
}

impl Keywords {
    pub fn options(&self) -> Options {
        Options {
            max_tokens: self.max_tokens,
            max_terms: self.max_terms,
            max_kept: self.max_kept,
            vocab_size: self.vocab_size,
            label_branching: self.label_branching,
            order: if self.first_seen { Order::FirstSeen } else { Order::LargestFirst },
            placement: if self.first_fit { Placement::FirstFit } else { Placement::Shared },
            skip_overlong: self.skip_overlong,
            pad_to_multiple_of: self.pad_to_multiple_of,
            ranks: self.ranks,
        }
    }
}
