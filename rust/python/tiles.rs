//! Tile lists of a tree.

use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;

use super::error::refuse;

type Lists<'py> = (Bound<'py, PyArray1<i32>>, Bound<'py, PyArray1<i32>>);

/// (rows, items) for tiles of `tile` tokens: rows are (tiles, 4) flat.
#[pyfunction]
pub fn tile_lists<'py>(
    py: Python<'py>,
    cu_segments: PyReadonlyArray1<'py, i32>,
    subtree_end: PyReadonlyArray1<'py, i32>,
    tile: usize,
) -> PyResult<Lists<'py>> {
    let (cuts, ends) = (cu_segments.as_slice()?, subtree_end.as_slice()?);
    let ascending = cuts.first() == Some(&0) && cuts.windows(2).all(|pair| pair[0] <= pair[1]);
    let inside = cuts.last().is_some_and(|&last| last as usize <= ends.len());
    if tile == 0 || !ascending || !inside {
        return Err(refuse(py, "cu_segments must rise from 0 to at most the number of positions"));
    }
    let lists = py.detach(|| crate::tile_lists(cuts, ends, tile));
    let lists = lists.ok_or_else(|| refuse(py, "the tile lists need more than 2^31 numbers; pack smaller trees"))?;
    Ok((lists.rows.into_pyarray(py), lists.items.into_pyarray(py)))
}
