//! Python values -> borrowed bytes.

use numpy::npyffi::{NPY_ARRAY_ALIGNED, NPY_ARRAY_C_CONTIGUOUS};
use numpy::{Element, PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use pyo3::Borrowed;

use super::error::{refuse, refuse_sample, refuse_type};

/// The items of a list, and of nothing else: a `Vec` takes any sequence, and memory for as many items as that says it
/// has before it looks at one.
pub struct Listed<T>(pub Vec<T>);

impl<'py, T: FromPyObjectOwned<'py>> FromPyObject<'_, 'py> for Listed<T> {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let items = value.cast::<PyList>()?.iter();
        items.map(|item| item.extract().map_err(Into::into)).collect::<PyResult<_>>().map(Listed)
    }
}

/// Turns a list of dicts into one list per column. Every sample must have the columns of the first, but for the
/// `optional` ones, which are None where a sample lacks them and absent where all do.
#[pyfunction]
pub fn columns<'py>(samples: &Bound<'py, PyList>, optional: Listed<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyDict>> {
    let (py, optional) = (samples.py(), optional.0);
    let out = PyDict::new(py);
    if samples.is_empty() {
        return Ok(out);
    }
    let first = sample_dict(samples, 0)?;
    let mut names: Vec<Bound<'py, PyAny>> = first.keys().iter().collect();
    for name in &optional {
        if !first.contains(name)? {
            names.push(name.clone());
        }
    }
    let lists: Vec<Bound<'py, PyList>> = names.iter().map(|_| PyList::empty(py)).collect();
    let mut used = vec![false; names.len()];
    for index in 0..samples.len() {
        let sample = sample_dict(samples, index)?;
        let mut found = 0;
        for ((name, list), used) in names.iter().zip(&lists).zip(&mut used) {
            if let Some(value) = sample.get_item(name)? {
                list.append(value)?;
                *used = true;
                found += 1;
            } else if is_one_of(name, &optional) {
                list.append(py.None())?;
            } else {
                return Err(refuse_sample(py, index, &format!("column {} is missing", name.repr()?), "has it"));
            }
        }
        if sample.len() != found {
            let extra = sample.keys().iter().find(|name| !is_one_of(name, &names));
            let name = extra.map_or_else(|| Ok(String::new()), |name| name.repr().map(|name| name.to_string()))?;
            return Err(refuse_sample(py, index, &format!("it has a column {name}"), "has not"));
        }
    }
    for ((name, list), _) in names.iter().zip(lists).zip(used).filter(|&(_, used)| used) {
        out.set_item(name, list)?;
    }
    Ok(out)
}

fn is_one_of<'py>(name: &Bound<'py, PyAny>, names: &[Bound<'py, PyAny>]) -> bool {
    names.iter().any(|known| known.eq(name).unwrap_or(false))
}

fn sample_dict<'py>(samples: &Bound<'py, PyList>, index: usize) -> PyResult<Bound<'py, PyDict>> {
    samples.get_item(index)?.cast_into::<PyDict>().map_err(|error| {
        let sample = error.into_inner();
        let name = sample.get_type().name().map_or_else(|_| "object".to_string(), |name| name.to_string());
        refuse_type(sample.py(), index, &format!("it is a {name}; a sample is a dict of columns with input_ids"))
    })
}

/// Index of the first value at or after `start` that is not a C-contiguous, aligned array of exactly this dtype with
/// shape (any, *tail); the length if there is none.
#[pyfunction]
pub fn first_unready(
    values: &Bound<'_, PyList>,
    dtype: &Bound<'_, PyArrayDescr>,
    tail: Listed<usize>,
    start: usize,
) -> PyResult<usize> {
    for index in start..values.len() {
        if !is_ready(&values.get_item(index)?, dtype, &tail.0) {
            return Ok(index);
        }
    }
    Ok(values.len())
}

/// Whether a value is a C-contiguous, aligned array of exactly this dtype with shape (any, *tail).
pub fn is_ready(value: &Bound<'_, PyAny>, dtype: &Bound<'_, PyArrayDescr>, tail: &[usize]) -> bool {
    // Subclasses such as masked arrays mean more than their bytes.
    value.cast_exact::<PyUntypedArray>().is_ok_and(|array| {
        let descr = array.dtype();
        (descr.is(dtype) || descr.is_equiv_to(dtype)) && is_plain(array) && array.shape().get(1..) == Some(tail)
    })
}

fn is_plain(array: &Bound<'_, PyUntypedArray>) -> bool {
    let wanted = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED;
    // SAFETY: the pointer belongs to a live array.
    unsafe { (*array.as_array_ptr()).fields.flags & wanted == wanted }
}

/// The bytes of a plain array. The caller keeps the array alive for `'a`.
pub unsafe fn bytes<'a>(value: &Bound<'_, PyAny>) -> PyResult<&'a [u8]> {
    let array = value.cast::<PyUntypedArray>()?;
    if !is_plain(array) {
        return Err(PyTypeError::new_err("an array at the border is not C-contiguous and aligned"));
    }
    let length = array.len() * array.dtype().itemsize();
    if length == 0 {
        return Ok(&[]);
    }
    // SAFETY: a C-contiguous array has `length` bytes from its data pointer on.
    Ok(unsafe { std::slice::from_raw_parts((*array.as_array_ptr()).fields.data as *const u8, length) })
}

/// The numbers of a plain array of this type in native byte order. The caller keeps the array alive for `'a`.
pub unsafe fn numbers<'a, T: bytemuck::Pod + Element>(value: &Bound<'_, PyAny>) -> PyResult<&'a [T]> {
    let (has, wanted) = (value.cast::<PyUntypedArray>()?.dtype(), T::get_dtype(value.py()));
    if !has.is(&wanted) && !has.is_equiv_to(&wanted) {
        return Err(PyTypeError::new_err(format!("an array at the border has dtype {has}, not {wanted}")));
    }
    // SAFETY: passed on to the caller.
    cast(unsafe { bytes(value)? })
}

pub fn cast<T: bytemuck::Pod>(bytes: &[u8]) -> PyResult<&[T]> {
    // An empty slice need not be aligned.
    if bytes.is_empty() {
        return Ok(&[]);
    }
    bytemuck::try_cast_slice(bytes).map_err(|error| PyTypeError::new_err(format!("an array at the border: {error}")))
}

/// The rows of a per-token column: a list with one array per sample, or `columns.Flat`, one array with the rows at which
/// the samples start and end.
#[derive(FromPyObject)]
pub enum Rows<'py> {
    List(Bound<'py, PyList>),
    Flat(Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>),
}

impl Rows<'_> {
    /// SAFETY: the column must live, unchanged as a list, for `'b`.
    pub unsafe fn rows<'b>(&self, width: usize) -> PyResult<Vec<&'b [u8]>> {
        let (values, starts, ends) = match self {
            // SAFETY: passed on to the caller.
            Rows::List(list) => return list.iter().map(|value| unsafe { bytes(&value) }).collect(),
            Rows::Flat(values, starts, ends) => (values, starts, ends),
        };
        // SAFETY: passed on to the caller.
        let (flat, starts, ends): (&'b [u8], &[i64], &[i64]) =
            unsafe { (bytes(values)?, numbers(starts)?, numbers(ends)?) };
        let cut = |(&start, &end): (&i64, &i64)| {
            let row = |at: i64| usize::try_from(at).ok()?.checked_mul(width);
            flat.get(row(start)?..row(end)?)
        };
        let rows: Option<Vec<&[u8]>> = starts.iter().zip(ends).map(cut).collect();
        let rows = rows.filter(|_| starts.len() == ends.len());
        rows.ok_or_else(|| refuse(values.py(), "the samples do not lie within the rows of a flat column"))
    }

    /// Numbers of exactly this type. SAFETY: as for `rows`.
    pub unsafe fn numbers<'b, T: bytemuck::Pod + Element>(&self) -> PyResult<Vec<&'b [T]>> {
        match self {
            // SAFETY: passed on to the caller.
            Rows::List(list) => list.iter().map(|value| unsafe { numbers(&value) }).collect(),
            Rows::Flat(values, ..) => {
                // SAFETY: passed on to the caller.
                let _: &[T] = unsafe { numbers(values)? };
                unsafe { self.words() }
            }
        }
    }

    /// Numbers of this width, whatever their type. SAFETY: as for `rows`.
    pub unsafe fn words<'b, T: bytemuck::Pod>(&self) -> PyResult<Vec<&'b [T]>> {
        // SAFETY: passed on to the caller.
        let rows = unsafe { self.rows(size_of::<T>())? };
        rows.into_iter().map(cast).collect()
    }
}
