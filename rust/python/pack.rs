//! A whole call: columns, or dicts as they are, -> trees.

use pyo3::prelude::*;

use super::borrow::Listed;
use super::columns::{Columns, Keywords};
use super::formats::Formats;
use super::trees::PackedTrees;

/// Packs columns that `inputs.py` has made ready. Releases the GIL while it works.
#[pyfunction]
pub fn pack(py: Python<'_>, columns: Columns<'_>, keywords: Keywords) -> PyResult<PackedTrees> {
    let samples = columns.samples()?;
    let options = keywords.options();
    let packed = py.detach(|| crate::pack(&samples, &options))?;
    PackedTrees::new(py, packed)
}

/// Packs a list of dicts whose columns are all ready; None if one is not.
#[pyfunction]
pub fn pack_ready(
    py: Python<'_>,
    samples: Listed<Bound<'_, PyAny>>,
    formats: &Formats,
    keywords: Keywords,
) -> PyResult<Option<PackedTrees>> {
    let Some(ready) = formats.read(py, &samples.0)? else { return Ok(None) };
    let (samples, options) = (ready.samples(), keywords.options());
    let packed = py.detach(|| crate::pack(&samples, &options))?;
    PackedTrees::new(py, packed).map(Some)
}

/// Work of trees with so many (query, key) pairs and positions, by which ranks are balanced.
#[pyfunction]
pub fn work(pairs: u64, tokens: u64) -> u64 {
    crate::work(pairs, tokens)
}
