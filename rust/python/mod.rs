//! The border to Python, and the only folder that names it: borrowed arrays in, one buffer out.
//!
//! Arrays are borrowed as plain bytes while the GIL is released: the lists and tuples at the border are our own and keep
//! their arrays alive, and whoever writes into an array while it is packed gets what NumPy gives in that case, some
//! mixture of old and new values. Nothing here or in the crate relies on values for memory safety. NumPy moves no memory
//! of an array that something holds; `resize(refcheck=False)` does, and breaks a call here as it breaks NumPy's own.

mod borrow;
mod columns;
mod formats;
mod padded;
mod stream;
mod tiles;
mod trees;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use columns::{Columns, Keywords};
use formats::Formats;
use trees::PackedTrees;

pyo3::create_exception!(
    treepack,
    PackError,
    PyValueError,
    "Input that cannot be packed; says which sample, what it has, what is allowed."
);

impl From<crate::PackError> for PyErr {
    fn from(error: crate::PackError) -> PyErr {
        PackError::new_err(error.to_string())
    }
}

/// Packs columns that `inputs.py` has made ready. Releases the GIL while it works.
#[pyfunction]
fn pack(py: Python<'_>, columns: Columns<'_>, keywords: Keywords) -> PyResult<PackedTrees> {
    let samples = columns.samples()?;
    let options = keywords.options();
    let packed = py.detach(|| crate::pack(&samples, &options))?;
    PackedTrees::new(py, packed)
}

/// Packs a list of dicts whose columns are all ready; None if one is not.
#[pyfunction]
fn pack_ready(
    py: Python<'_>,
    samples: Vec<Bound<'_, PyAny>>,
    formats: &Formats,
    keywords: Keywords,
) -> PyResult<Option<PackedTrees>> {
    let Some(ready) = formats.read(py, &samples)? else { return Ok(None) };
    let (samples, options) = (ready.samples(), keywords.options());
    let packed = py.detach(|| crate::pack(&samples, &options))?;
    PackedTrees::new(py, packed).map(Some)
}

#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use super::borrow::{columns, first_unready};
    #[pymodule_export]
    use super::formats::Formats;
    #[pymodule_export]
    use super::padded::{mask_bytes_of, token_spans_of};
    #[pymodule_export]
    use super::stream::PackStream;
    #[pymodule_export]
    use super::tiles::tile_lists;
    #[pymodule_export]
    use super::trees::PackedTrees;
    #[pymodule_export]
    use super::{pack, pack_ready, PackError};
}
