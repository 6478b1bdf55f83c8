//! Masks of any integer type: where the tokens of a padded batch lie, and masks as bytes.

use numpy::{IntoPyArray, PyArray1, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::borrow::{bytes, cast, Rows};
use crate::{mask_bytes, token_spans};

type Spans<'py> = (Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i64>>);

/// Calls a function of unsigned integers with those of a mask's width.
macro_rules! by_width {
    ($mask:expr, $function:ident) => {
        match ($mask.dtype().kind(), $mask.dtype().itemsize()) {
            (kind, width) if $mask.dtype().is_native_byteorder() == Some(false) => Err(PyTypeError::new_err(format!(
                "a mask at the border is '{}{width}' in foreign byte order",
                char::from(kind)
            ))),
            (b'b' | b'i' | b'u', 1) => $function!(u8),
            (b'i' | b'u', 2) => $function!(u16),
            (b'i' | b'u', 4) => $function!(u32),
            (b'i' | b'u', 8) => $function!(u64),
            (kind, width) => {
                Err(PyTypeError::new_err(format!("a mask at the border is '{}{width}'", char::from(kind))))
            }
        }
    };
}

/// Where the tokens of each row of an attention mask (B, S) lie in the flattened batch: (starts, ends), int64 (B,)
/// each. None where a row has a hole between tokens, or a value that is neither 0 nor 1, and where rows have no width,
/// of which there may be more than there is memory for.
#[pyfunction]
#[pyo3(name = "token_spans")]
pub fn token_spans_of<'py>(py: Python<'py>, mask: &Bound<'py, PyUntypedArray>) -> PyResult<Option<Spans<'py>>> {
    // SAFETY: the caller of this function holds the array.
    let values = unsafe { bytes(mask)? };
    let rows = mask.shape().first().copied().unwrap_or(0);
    macro_rules! spans {
        ($word:ty) => {{
            let values = cast::<$word>(values)?;
            let no_width = rows > 0 && values.is_empty();
            Ok(if no_width { None } else { py.detach(|| token_spans(values, rows)) })
        }};
    }
    let spans: PyResult<Option<(Vec<i64>, Vec<i64>)>> = by_width!(mask, spans);
    Ok(spans?.map(|(starts, ends)| (starts.into_pyarray(py), ends.into_pyarray(py))))
}

/// A flat mask of any integer type, cut into samples -> uint8 (tokens of the samples,), end to end. None where a value
/// is neither 0 nor 1.
#[pyfunction]
#[pyo3(name = "mask_bytes")]
pub fn mask_bytes_of<'py>(
    py: Python<'py>,
    mask: &Bound<'py, PyUntypedArray>,
    starts: Bound<'py, PyAny>,
    ends: Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, PyArray1<u8>>>> {
    let rows = Rows::Flat(mask.as_any().clone(), starts, ends);
    macro_rules! narrow {
        ($word:ty) => {{
            // SAFETY: `rows` holds the arrays to the end of this function.
            let samples = unsafe { rows.words::<$word>()? };
            Ok(py.detach(|| mask_bytes(&samples)))
        }};
    }
    let found: PyResult<Option<Vec<u8>>> = by_width!(mask, narrow);
    Ok(found?.map(|mask| mask.into_pyarray(py)))
}
