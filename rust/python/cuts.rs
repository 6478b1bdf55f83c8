//! The ranges of a tree.

use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;

use super::error::refuse;

/// Boundaries of ranges, or the row from which on no range is small enough.
type Cuts<'py> = Result<Bound<'py, PyArray1<i32>>, u32>;

/// The same as Python has it: one of the two.
type Found<'py> = (Option<Bound<'py, PyArray1<i32>>>, Option<u32>);

/// Cuts a tree into ranges of at most `max_rows` rows that have at most `max_ancestors` ancestors: (boundaries, None),
/// or (None, row) where the rows that follow this one cannot be cut so.
#[pyfunction]
pub fn cut_rows<'py>(
    py: Python<'py>,
    cu_segments: PyReadonlyArray1<'py, i32>,
    segment_parent: PyReadonlyArray1<'py, i32>,
    max_rows: u32,
    max_ancestors: u32,
) -> PyResult<Found<'py>> {
    let (ends, parents) = (cu_segments.as_slice()?, segment_parent.as_slice()?);
    let ascending = ends.first() == Some(&0) && ends.windows(2).all(|pair| pair[0] < pair[1]);
    let above = parents.iter().enumerate().all(|(segment, &parent)| parent >= -1 && (parent as i64) < segment as i64);
    if max_rows == 0 || !ascending || ends.len() != parents.len() + 1 || !above {
        return Err(refuse(py, "cu_segments must rise from 0, and a parent come before its segment"));
    }
    let found: Cuts = py.detach(|| crate::cut(ends, parents, max_rows, max_ancestors)).map(|x| x.into_pyarray(py));
    Ok(match found {
        Ok(boundaries) => (Some(boundaries), None),
        Err(row) => (None, Some(row)),
    })
}
