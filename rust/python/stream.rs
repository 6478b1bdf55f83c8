//! The streaming packer. `add` takes a dict as it is where every column is ready, and says so where not; then
//! `packer.py` makes the columns ready and calls `add_columns`.

use numpy::{PyArrayDescr, PyArrayDescrMethods};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFloat, PyInt, PyString};

use super::borrow::{bytes, cast, is_ready};
use super::columns::{Columns, Keywords};
use super::trees::{skipped_tuple, PackedTrees, SkippedTuple};
use crate::{Added, KeptSets, SampleColumn, Samples, Stream, TokenColumn};

/// A column of the stream: its name, and dtype and row shape.
struct Format {
    name: Py<PyString>,
    text: String,
    dtype: Py<PyArrayDescr>,
    tail: Vec<usize>,
    width: usize,
}

type FormatTuple<'py> = (Bound<'py, PyString>, Bound<'py, PyArrayDescr>, Vec<usize>);

impl Format {
    fn new((name, dtype, tail): FormatTuple<'_>) -> PyResult<Self> {
        let width = dtype.itemsize() * tail.iter().product::<usize>();
        let text = name.to_string();
        Ok(Format { name: name.unbind(), text, dtype: dtype.unbind(), tail, width })
    }

    /// The bytes of a value that is ready.
    ///
    /// SAFETY: the caller keeps the value alive for `'a`.
    unsafe fn borrow<'a>(&self, value: &Bound<'_, PyAny>) -> Option<&'a [u8]> {
        if !is_ready(value, self.dtype.bind(value.py()), &self.tail) {
            return None;
        }
        // SAFETY: passed on to the caller.
        unsafe { bytes(value).ok() }
    }

    /// A Python float as float32 or int as int64, which is what `inputs.py` makes of them.
    fn scalar(&self, value: &Bound<'_, PyAny>) -> Option<Vec<u8>> {
        let kind = (self.dtype.bind(value.py()).kind(), self.width);
        if kind == (b'f', 4) && value.is_exact_instance_of::<PyFloat>() {
            return Some((value.extract::<f64>().ok()? as f32).to_ne_bytes().to_vec());
        }
        if kind == (b'i', 8) && value.is_exact_instance_of::<PyInt>() {
            return Some(value.extract::<i64>().ok()?.to_ne_bytes().to_vec());
        }
        None
    }
}

/// The columns that samples of this stream have.
struct Formats {
    ids: Format,
    mask: Option<Format>,
    kept: Option<(Format, Format)>,
    tokens: Vec<Format>,
    /// With the flag whether the column is gathered per term.
    scalars: Vec<(Format, bool)>,
    identity: Option<usize>,
}

#[pyclass(module = "treepack._core")]
pub struct PackStream {
    stream: Stream,
    formats: Option<Formats>,
}

/// Closed trees, or the sample that was left out, or neither.
type Outcome = (Option<PackedTrees>, Option<SkippedTuple>);

#[pymethods]
impl PackStream {
    #[new]
    fn new(keywords: Keywords) -> PyResult<Self> {
        Ok(PackStream { stream: Stream::new(keywords.options())?, formats: None })
    }

    /// Tells `add` what ready columns look like: (name, dtype, row shape) of ids, mask, kept ids and counts, per-token and
    /// per-sample columns, and which per-token column is the identity.
    #[allow(clippy::type_complexity)]
    fn set_formats(
        &mut self,
        ids: FormatTuple<'_>,
        mask: Option<FormatTuple<'_>>,
        kept: Option<(FormatTuple<'_>, FormatTuple<'_>)>,
        tokens: Vec<FormatTuple<'_>>,
        scalars: Vec<(FormatTuple<'_>, bool)>,
        identity: Option<usize>,
    ) -> PyResult<()> {
        self.formats = Some(Formats {
            ids: Format::new(ids)?,
            mask: mask.map(Format::new).transpose()?,
            kept: kept.map(|(ids, counts)| Ok::<_, PyErr>((Format::new(ids)?, Format::new(counts)?))).transpose()?,
            tokens: tokens.into_iter().map(Format::new).collect::<PyResult<_>>()?,
            scalars: scalars
                .into_iter()
                .map(|(f, per_term)| Ok((Format::new(f)?, per_term)))
                .collect::<PyResult<_>>()?,
            identity,
        });
        Ok(())
    }

    /// Adds a sample whose columns are all ready; None if they are not.
    fn add(&mut self, py: Python<'_>, sample: &Bound<'_, PyAny>) -> PyResult<Option<Outcome>> {
        let (Some(formats), Ok(sample)) = (&self.formats, sample.cast::<PyDict>()) else { return Ok(None) };
        let mut held = Vec::new();
        // SAFETY: `held` and the dict's values outlive the call below.
        let Some(samples) = (unsafe { ready_sample(py, formats, sample, &mut held)? }) else { return Ok(None) };
        let added = self.stream.add(&samples)?;
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

/// The columns of a dict, if all are there, no other is, and all are ready.
///
/// SAFETY: the caller keeps `held` alive for `'a`; it holds what is borrowed.
unsafe fn ready_sample<'a, 'py>(
    py: Python<'py>,
    formats: &Formats,
    sample: &Bound<'py, PyDict>,
    held: &mut Vec<Bound<'py, PyAny>>,
) -> PyResult<Option<Samples<'a>>> {
    let mut found = 0;
    let mut borrow = |format: &Format| -> PyResult<Option<&'a [u8]>> {
        let Some(value) = sample.get_item(format.name.bind(py))? else { return Ok(None) };
        found += 1;
        // SAFETY: `held` keeps the value.
        let bytes = unsafe { format.borrow(&value) };
        held.push(value);
        Ok(bytes)
    };
    macro_rules! ready {
        ($format:expr) => {
            match borrow($format)? {
                Some(bytes) => bytes,
                None => return Ok(None),
            }
        };
    }
    let mut samples = Samples { ids: vec![cast(ready!(&formats.ids))?], ..Samples::default() };
    if let Some(mask) = &formats.mask {
        samples.mask = Some(vec![ready!(mask)]);
    }
    if let Some((ids, counts)) = &formats.kept {
        samples.kept = Some(KeptSets { ids: vec![cast(ready!(ids))?], counts: vec![cast(ready!(counts))?] });
    }
    let column =
        |format: &Format, rows| TokenColumn { name: format.text.clone(), width: format.width, rows: vec![rows] };
    for (i, format) in formats.tokens.iter().enumerate() {
        let rows = ready!(format);
        if formats.identity == Some(i) {
            samples.identity = Some(column(format, rows));
        }
        samples.token_columns.push(column(format, rows));
    }
    for (format, per_term) in &formats.scalars {
        let Some(value) = sample.get_item(format.name.bind(py))? else { return Ok(None) };
        found += 1;
        let Some(rows) = format.scalar(&value) else { return Ok(None) };
        let (name, width, per_term) = (format.text.clone(), format.width, *per_term);
        samples.sample_columns.push(SampleColumn { name, width, rows: rows.into(), per_term });
    }
    Ok((found == sample.len()).then_some(samples))
}
