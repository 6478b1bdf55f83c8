//! Dicts whose columns are all ready -> borrowed columns, without a Python object per column.
//!
//! What ready columns look like comes from the first samples that `inputs.py` read (`formats.py`). A dict that differs
//! in anything is not ready; `inputs.py` then converts it or says what is wrong.

use numpy::{PyArrayDescr, PyArrayDescrMethods};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFloat, PyInt, PyString};

use super::borrow::{bytes, cast, is_ready, Listed};
use crate::{KeptSets, SampleColumn, Samples, TokenColumn};

/// A column: its name, dtype and row shape.
struct Format {
    name: Py<PyString>,
    text: String,
    dtype: Py<PyArrayDescr>,
    tail: Vec<usize>,
    width: usize,
    /// What a Python scalar of this column becomes, if it may be one.
    scalar: Option<Scalar>,
}

#[derive(Clone, Copy)]
enum Scalar {
    Float32,
    Int64,
}

type FormatTuple<'py> = (Bound<'py, PyString>, Bound<'py, PyArrayDescr>, Listed<usize>);

impl Format {
    fn new((name, dtype, Listed(tail)): FormatTuple<'_>) -> PyResult<Self> {
        let text = name.to_string();
        if dtype.has_object() || dtype.is_native_byteorder() == Some(false) {
            return Err(PyTypeError::new_err(format!(
                "{text} has dtype {dtype} at the border; plain numbers are needed"
            )));
        }
        let width = tail.iter().try_fold(dtype.itemsize(), |width, &size| width.checked_mul(size));
        let width = width.ok_or_else(|| PyTypeError::new_err(format!("{text}: a row of it has no size")))?;
        let scalar = match (dtype.kind(), width) {
            (b'f', 4) => Some(Scalar::Float32),
            (b'i', 8) => Some(Scalar::Int64),
            _ => None,
        };
        Ok(Format { name: name.unbind(), text, dtype: dtype.unbind(), tail, width, scalar })
    }

    /// A column that the crate reads as numbers of so many bytes.
    fn of_numbers(column: FormatTuple<'_>, kinds: &[u8], bytes: usize) -> PyResult<Self> {
        let kind = column.1.kind();
        let format = Format::new(column)?;
        if format.width != bytes || !kinds.contains(&kind) {
            let (name, has, kind) = (&format.text, format.width, char::from(kind));
            let needed = char::from(kinds[0]);
            return Err(PyTypeError::new_err(format!(
                "{name} is '{kind}{has}' per token at the border, not '{needed}{bytes}'"
            )));
        }
        Ok(format)
    }

    /// The bytes of an array that is ready.
    ///
    /// SAFETY: the caller keeps the value alive for `'a`.
    unsafe fn borrow<'a>(&self, value: &Bound<'_, PyAny>) -> Option<&'a [u8]> {
        if !is_ready(value, self.dtype.bind(value.py()), &self.tail) {
            return None;
        }
        // SAFETY: passed on to the caller.
        unsafe { bytes(value).ok() }
    }

    /// Appends a Python float as float32 or an int as int64, which is what `inputs.py` makes of them.
    fn push_scalar(&self, value: &Bound<'_, PyAny>, to: &mut Vec<u8>) -> Option<()> {
        match self.scalar? {
            Scalar::Float32 if value.is_exact_instance_of::<PyFloat>() => {
                to.extend_from_slice(&(value.extract::<f64>().ok()? as f32).to_ne_bytes());
            }
            Scalar::Int64 if value.is_exact_instance_of::<PyInt>() => {
                to.extend_from_slice(&value.extract::<i64>().ok()?.to_ne_bytes());
            }
            _ => return None,
        }
        Some(())
    }
}

/// What the columns of ready samples look like.
#[pyclass(frozen, module = "treepack._core")]
pub struct Formats {
    ids: Format,
    mask: Option<Format>,
    kept: Option<(Format, Format)>,
    tokens: Vec<Format>,
    /// With the flag whether the column is gathered per term.
    scalars: Vec<(Format, bool)>,
    /// Which of `tokens` is the identity.
    identity: Option<usize>,
}

#[pymethods]
impl Formats {
    #[new]
    #[allow(clippy::type_complexity)]
    fn new(
        ids: FormatTuple<'_>,
        mask: Option<FormatTuple<'_>>,
        kept: Option<(FormatTuple<'_>, FormatTuple<'_>)>,
        tokens: Listed<FormatTuple<'_>>,
        scalars: Listed<(FormatTuple<'_>, bool)>,
        identity: Option<usize>,
    ) -> PyResult<Self> {
        let (tokens, scalars) = (tokens.0, scalars.0);
        if identity.is_some_and(|at| at >= tokens.len()) {
            return Err(PyTypeError::new_err(format!(
                "the identity is none of the {} per-token columns",
                tokens.len()
            )));
        }
        let kept_sets =
            |(ids, counts)| Ok::<_, PyErr>((Format::of_numbers(ids, b"i", 4)?, Format::of_numbers(counts, b"i", 4)?));
        Ok(Formats {
            ids: Format::of_numbers(ids, b"i", 8)?,
            mask: mask.map(|mask| Format::of_numbers(mask, b"ub", 1)).transpose()?,
            kept: kept.map(kept_sets).transpose()?,
            tokens: tokens.into_iter().map(Format::new).collect::<PyResult<_>>()?,
            scalars: scalars
                .into_iter()
                .map(|(f, per_term)| Ok((Format::new(f)?, per_term)))
                .collect::<PyResult<_>>()?,
            identity,
        })
    }
}

impl Formats {
    /// The columns of dicts, if every dict has all of them and no other, and all are ready.
    pub fn read<'f, 'py>(&'f self, py: Python<'py>, samples: &[Bound<'py, PyAny>]) -> PyResult<Option<Ready<'f, 'py>>> {
        let count = samples.len();
        let mut ready = Ready {
            formats: self,
            owners: Vec::with_capacity(count * (self.tokens.len() + 4)),
            ids: Vec::with_capacity(count),
            mask: Vec::with_capacity(count),
            kept: Vec::new(),
            counts: Vec::new(),
            tokens: self.tokens.iter().map(|_| Vec::with_capacity(count)).collect(),
            scalars: self.scalars.iter().map(|(format, _)| Vec::with_capacity(count * format.width)).collect(),
        };
        for sample in samples {
            let Ok(sample) = sample.cast::<PyDict>() else { return Ok(None) };
            if ready.push(py, sample)?.is_none() {
                return Ok(None);
            }
        }
        Ok(Some(ready))
    }

    fn columns(&self) -> usize {
        let kept = if self.kept.is_some() { 2 } else { 0 };
        1 + self.mask.iter().len() + kept + self.tokens.len() + self.scalars.len()
    }
}

/// Borrowed columns, and the arrays that they are borrowed from.
pub struct Ready<'f, 'py> {
    formats: &'f Formats,
    owners: Vec<Bound<'py, PyAny>>,
    ids: Vec<&'static [u8]>,
    mask: Vec<&'static [u8]>,
    kept: Vec<&'static [u8]>,
    counts: Vec<&'static [u8]>,
    tokens: Vec<Vec<&'static [u8]>>,
    scalars: Vec<Vec<u8>>,
}

impl<'py> Ready<'_, 'py> {
    fn push(&mut self, py: Python<'py>, sample: &Bound<'py, PyDict>) -> PyResult<Option<()>> {
        let formats = self.formats;
        if sample.len() != formats.columns() {
            return Ok(None);
        }
        let owners = &mut self.owners;
        let mut borrow = |format: &Format, to: &mut Vec<&'static [u8]>| -> PyResult<Option<()>> {
            let Some(value) = sample.get_item(format.name.bind(py))? else { return Ok(None) };
            // SAFETY: `owners` keeps the value while `self` lives, and `samples` gives the bytes out no longer than that.
            let Some(bytes) = (unsafe { format.borrow(&value) }) else { return Ok(None) };
            owners.push(value);
            to.push(bytes);
            Ok(Some(()))
        };
        let mut complete = borrow(&formats.ids, &mut self.ids)?.is_some();
        if let Some(mask) = &formats.mask {
            complete &= borrow(mask, &mut self.mask)?.is_some();
        }
        if let Some((ids, counts)) = &formats.kept {
            complete &= borrow(ids, &mut self.kept)?.is_some() && borrow(counts, &mut self.counts)?.is_some();
        }
        for (format, to) in formats.tokens.iter().zip(&mut self.tokens) {
            complete &= borrow(format, to)?.is_some();
        }
        for ((format, _), to) in formats.scalars.iter().zip(&mut self.scalars) {
            let Some(value) = sample.get_item(format.name.bind(py))? else { return Ok(None) };
            complete &= format.push_scalar(&value, to).is_some();
        }
        Ok(complete.then_some(()))
    }

    pub fn samples(&self) -> Samples<'_> {
        let formats = self.formats;
        fn numbers<'a, T: bytemuck::Pod>(rows: &'a [&'static [u8]]) -> Vec<&'a [T]> {
            // The width was checked (`of_numbers`), and the arrays are aligned: the cast cannot fail.
            rows.iter().map(|bytes| cast(bytes).unwrap_or_default()).collect()
        }
        let column = |format: &Format, rows: &[&'static [u8]]| TokenColumn {
            name: format.text.clone(),
            width: format.width,
            rows: rows.to_vec(),
        };
        Samples {
            ids: numbers(&self.ids),
            mask: formats.mask.as_ref().map(|_| self.mask.clone()),
            identity: formats.identity.map(|i| column(&formats.tokens[i], &self.tokens[i])),
            kept: formats.kept.as_ref().map(|_| KeptSets { ids: numbers(&self.kept), counts: numbers(&self.counts) }),
            token_columns: formats.tokens.iter().zip(&self.tokens).map(|(format, rows)| column(format, rows)).collect(),
            sample_columns: formats
                .scalars
                .iter()
                .zip(&self.scalars)
                .map(|((format, per_term), rows)| SampleColumn {
                    name: format.text.clone(),
                    width: format.width,
                    rows: rows.as_slice().into(),
                    per_term: *per_term,
                })
                .collect(),
        }
    }
}
