//! The border to Python, and the only folder that names it: borrowed arrays in, one buffer out.
//!
//! Arrays are borrowed as plain bytes while the GIL is released: the lists and tuples at the border are our own and keep
//! their arrays alive, and whoever writes into an array while it is packed gets what NumPy gives in that case, some
//! mixture of old and new values. Nothing here or in the crate relies on values for memory safety. NumPy moves no memory
//! of an array that something holds; `resize(refcheck=False)` does, and breaks a call here as it breaks NumPy's own.

mod borrow;
mod columns;
mod cuts;
mod error;
mod formats;
mod pack;
mod padded;
mod stream;
mod tiles;
mod trees;

#[pyo3::pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use super::borrow::{columns, first_unready};
    #[pymodule_export]
    use super::cuts::cut_rows;
    #[pymodule_export]
    use super::formats::Formats;
    #[pymodule_export]
    use super::pack::{pack, pack_ready, work};
    #[pymodule_export]
    use super::padded::{mask_bytes_of, token_spans_of};
    #[pymodule_export]
    use super::stream::PackStream;
    #[pymodule_export]
    use super::tiles::tile_lists;
    #[pymodule_export]
    use super::trees::PackedTrees;

    use crate::{ALIGN, ARRAYS, TILE_SIZES};
    use pyo3::prelude::*;
    use pyo3::types::PyTuple;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let py = module.py();
        module.add("PackError", super::error::pack_error(py)?)?;
        module.add("ALIGN", ALIGN)?;
        let arrays = ARRAYS.iter().map(|x| (x.name, x.dtype, x.axis.letters(), x.present.name()));
        module.add("ARRAYS", PyTuple::new(py, arrays)?)?;
        module.add("TILE_SIZES", PyTuple::new(py, TILE_SIZES)?)
    }
}
