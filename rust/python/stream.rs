//! The streaming packer. `add` takes a dict as it is where every column is ready, and says so where not; then
//! `packer.py` makes the columns ready and calls `add_columns`.

use pyo3::prelude::*;

use super::columns::{Columns, Keywords};
use super::formats::Formats;
use super::trees::{skipped_tuple, PackedTrees, SkippedTuple};
use crate::{Added, Stream};

#[pyclass(module = "treepack._core")]
pub struct PackStream {
    stream: Stream,
}

/// Closed trees, or the sample that was left out, or neither.
type Outcome = (Option<PackedTrees>, Option<SkippedTuple>);

#[pymethods]
impl PackStream {
    #[new]
    fn new(keywords: Keywords) -> PyResult<Self> {
        Ok(PackStream { stream: Stream::new(keywords.options())? })
    }

    /// Adds a sample whose columns are all ready; None if they are not.
    fn add(&mut self, py: Python<'_>, sample: Bound<'_, PyAny>, formats: &Formats) -> PyResult<Option<Outcome>> {
        let samples = [sample];
        let Some(ready) = formats.read(py, &samples)? else { return Ok(None) };
        let added = self.stream.add(&ready.samples())?;
        outcome(py, added).map(Some)
    }

    /// Adds the one sample of ready columns.
    fn add_columns(&mut self, py: Python<'_>, columns: Columns<'_>) -> PyResult<Outcome> {
        let added = self.stream.add(&columns.samples()?)?;
        outcome(py, added)
    }

    /// Closes the open micro-batch; None if there is none.
    fn flush(&mut self, py: Python<'_>) -> PyResult<Option<PackedTrees>> {
        let packed = self.stream.flush()?;
        packed.map(|packed| PackedTrees::new(py, packed)).transpose()
    }
}

fn outcome(py: Python<'_>, added: Added) -> PyResult<Outcome> {
    Ok(match added {
        Added::Open => (None, None),
        Added::Closed(packed) => (Some(PackedTrees::new(py, *packed)?), None),
        Added::Skipped(skipped) => (None, Some(skipped_tuple(&skipped))),
    })
}
