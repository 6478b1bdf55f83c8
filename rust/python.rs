//! The border to Python, and the only file that names it: borrowed arrays in, one buffer out.
//!
//! Arrays are borrowed as plain bytes while the GIL is released: every list below is our own and keeps its arrays
//! alive, and whoever writes into an array while it is packed gets what NumPy gives in that case, some mixture of old
//! and new values. Nothing here or in the crate relies on values for memory safety.

// `create_exception!` and the attribute macros expand to what the lint reports.
#![allow(clippy::useless_conversion)]

use std::sync::Arc;

use numpy::npyffi::{NPY_ARRAY_ALIGNED, NPY_ARRAY_C_CONTIGUOUS};
use numpy::{PyArray1, PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple};

use crate::slab::Slab;
use crate::{KeptSets, Options, Order, Packed, Placement, SampleColumn, Samples, TokenColumn};

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

/// Turns a list of dicts into one list per column. Every sample must have the columns of the first, but for the
/// `optional` ones, which are None where a sample lacks them and absent where all do.
#[pyfunction]
fn columns<'py>(samples: &Bound<'py, PyList>, optional: Vec<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyDict>> {
    let py = samples.py();
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
                let text = format!("sample {index}: column {} is missing; sample 0 has it", name.repr()?);
                return Err(PackError::new_err(text));
            }
        }
        if sample.len() != found {
            let extra = sample.keys().iter().find(|name| !is_one_of(name, &names));
            let name = extra.map_or_else(|| Ok(String::new()), |name| name.repr().map(|name| name.to_string()))?;
            return Err(PackError::new_err(format!("sample {index}: it has a column {name}; sample 0 has not")));
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
        PyTypeError::new_err(format!("sample {index}: it is a {name}; a sample is a dict of columns with input_ids"))
    })
}

/// Index of the first value at or after `start` that is not a C-contiguous, aligned array of exactly this dtype with
/// shape (any, *tail); the length if there is none.
#[pyfunction]
fn first_unready(
    values: &Bound<'_, PyList>,
    dtype: &Bound<'_, PyArrayDescr>,
    tail: Vec<usize>,
    start: usize,
) -> PyResult<usize> {
    for index in start..values.len() {
        let value = values.get_item(index)?;
        let ready = value.cast::<PyUntypedArray>().is_ok_and(|array| {
            let descr = array.dtype();
            (descr.is(dtype) || descr.is_equiv_to(dtype)) && is_plain(array) && array.shape().get(1..) == Some(&tail)
        });
        if !ready {
            return Ok(index);
        }
    }
    Ok(values.len())
}

fn is_plain(array: &Bound<'_, PyUntypedArray>) -> bool {
    let wanted = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED;
    // SAFETY: the pointer belongs to a live array.
    unsafe { (*array.as_array_ptr()).fields.flags & wanted == wanted }
}

/// The bytes of a plain array. The caller keeps the array alive for `'a`.
unsafe fn bytes<'a>(value: &Bound<'_, PyAny>) -> PyResult<&'a [u8]> {
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

fn cast<T: bytemuck::Pod>(bytes: &[u8]) -> PyResult<&[T]> {
    // An empty slice need not be aligned.
    if bytes.is_empty() {
        return Ok(&[]);
    }
    bytemuck::try_cast_slice(bytes).map_err(|error| PyTypeError::new_err(format!("an array at the border: {error}")))
}

/// A column: a list with one array per sample, or one flat array that is cut at the offsets.
struct Source<'a, 'py> {
    value: &'a Bound<'py, PyAny>,
    /// Offsets of the samples in a flat array, in rows.
    offsets: Option<&'a [i64]>,
}

impl<'py> Source<'_, 'py> {
    /// SAFETY: the column must live, unchanged as a list, for `'b`.
    unsafe fn rows<'b>(&self, width: usize) -> PyResult<Vec<&'b [u8]>> {
        let Some(offsets) = self.offsets else {
            let list = self.value.cast::<PyList>()?;
            // SAFETY: passed on to the caller.
            return list.iter().map(|value| unsafe { bytes(&value) }).collect();
        };
        // SAFETY: passed on to the caller.
        let flat = unsafe { bytes(self.value)? };
        let cut = |pair: &[i64]| {
            let row = |at: i64| usize::try_from(at).ok()?.checked_mul(width);
            flat.get(row(pair[0])?..row(pair[1])?)
        };
        let rows: Option<Vec<&[u8]>> = offsets.windows(2).map(cut).collect();
        rows.ok_or_else(|| PackError::new_err("cu_seqlens does not fit the rows of a flat column"))
    }

    /// SAFETY: as for `rows`.
    unsafe fn numbers<'b, T: bytemuck::Pod>(&self) -> PyResult<Vec<&'b [T]>> {
        // SAFETY: passed on to the caller.
        let rows = unsafe { self.rows(size_of::<T>())? };
        rows.into_iter().map(cast).collect()
    }
}

type Column<'py> = (String, usize, Bound<'py, PyAny>);
type GatheredColumn<'py> = (String, usize, Bound<'py, PyAny>, bool);

/// Packs columns that `inputs.py` has made ready; see there. Releases the GIL while it works.
#[pyfunction]
#[pyo3(signature = (*, ids, mask, identity, kept, token_columns, sample_columns, offsets, kept_offsets, max_tokens,
                    max_terms, max_kept, vocab_size, label_branching, first_seen, first_fit, skip_overlong, pad_to_multiple_of, ranks))]
#[allow(clippy::too_many_arguments)]
fn pack<'py>(
    py: Python<'py>,
    ids: Bound<'py, PyAny>,
    mask: Option<Bound<'py, PyAny>>,
    identity: Option<Column<'py>>,
    kept: Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
    token_columns: Vec<Column<'py>>,
    sample_columns: Vec<GatheredColumn<'py>>,
    offsets: Option<Bound<'py, PyAny>>,
    kept_offsets: Option<Bound<'py, PyAny>>,
    max_tokens: u64,
    max_terms: Option<u64>,
    max_kept: Option<u64>,
    vocab_size: Option<u64>,
    label_branching: bool,
    first_seen: bool,
    first_fit: bool,
    skip_overlong: bool,
    pad_to_multiple_of: u64,
    ranks: u64,
) -> PyResult<PackedTrees> {
    let options = Options {
        max_tokens,
        max_terms,
        max_kept,
        vocab_size,
        label_branching,
        order: if first_seen { Order::FirstSeen } else { Order::LargestFirst },
        placement: if first_fit { Placement::FirstFit } else { Placement::Shared },
        ranks,
        skip_overlong,
        pad_to_multiple_of,
    };
    // SAFETY (all borrows below): the lists and arrays are arguments of this call, which holds them until it returns.
    let cuts = |offsets: &Option<Bound<'py, PyAny>>| -> PyResult<Option<&[i64]>> {
        offsets.as_ref().map(|offsets| cast(unsafe { bytes(offsets)? })).transpose()
    };
    let (offsets, kept_offsets) = (cuts(&offsets)?, cuts(&kept_offsets)?);
    let token_column = |(name, width, value): &Column<'py>| -> PyResult<TokenColumn<'_>> {
        let rows = unsafe { Source { value, offsets }.rows(*width)? };
        Ok(TokenColumn { name: name.clone(), width: *width, rows })
    };
    let samples = Samples {
        ids: unsafe { Source { value: &ids, offsets }.numbers()? },
        mask: mask.as_ref().map(|value| unsafe { Source { value, offsets }.rows(1) }).transpose()?,
        identity: identity.as_ref().map(token_column).transpose()?,
        kept: match &kept {
            Some((ids, counts)) => Some(KeptSets {
                ids: unsafe { Source { value: ids, offsets: kept_offsets }.numbers()? },
                counts: unsafe { Source { value: counts, offsets }.numbers()? },
            }),
            None => None,
        },
        token_columns: token_columns.iter().map(token_column).collect::<PyResult<_>>()?,
        sample_columns: sample_columns
            .iter()
            .map(|(name, width, value, per_term)| {
                let rows = unsafe { bytes(value)? };
                Ok(SampleColumn { name: name.clone(), width: *width, rows, per_term: *per_term })
            })
            .collect::<PyResult<_>>()?,
    };
    let packed = py.detach(|| crate::pack(&samples, &options))?;
    let memory = Memory(packed.slab.clone());
    Ok(PackedTrees { memory: Py::new(py, memory)?, packed })
}

/// Keeps the memory of a packing alive; the base object of its arrays.
#[pyclass(frozen)]
struct Memory(Arc<Slab>);

/// The trees of one call.
#[pyclass(frozen, module = "treepack._core")]
struct PackedTrees {
    packed: Packed,
    memory: Py<Memory>,
}

type FieldTuple = (String, usize, usize);
type DisagreementTuple = (String, u32, u32, u32);

#[pymethods]
impl PackedTrees {
    fn __len__(&self) -> usize {
        self.packed.trees.len()
    }

    /// Buffer of a tree, uint8 (nbytes,), without a copy.
    fn buffer<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyArray1<u8>>> {
        let tree = self.tree(index)?;
        let memory = self.memory.bind(py);
        let slab = &memory.get().0;
        let start = slab.address().wrapping_add(tree.offset);
        // SAFETY: the range lies in the slab (it was carved from it), which `memory` keeps alive as the base object.
        unsafe {
            let view = numpy::ndarray::ArrayView1::from_shape_ptr(tree.bytes, start as *const u8);
            Ok(PyArray1::borrow_from_array(&view, memory.clone().into_any()))
        }
    }

    /// (name, offset in bytes, rows) of each array of a tree.
    fn fields(&self, index: usize) -> PyResult<Vec<FieldTuple>> {
        let tree = self.tree(index)?;
        let fields = self.packed.schema.fields(&tree.sizes, &tree.agrees);
        Ok(fields.map(|field| (field.name.to_string(), field.offset, field.rows)).collect())
    }

    /// (column, sample, sample, token) of each per-token column on which samples that share a position disagree.
    fn disagreements(&self, index: usize) -> PyResult<Vec<DisagreementTuple>> {
        let tree = self.tree(index)?;
        let names = self.packed.token_columns.iter();
        let found = names.zip(&tree.disagreements);
        Ok(found.filter_map(|(name, found)| found.map(|d| (name.clone(), d.a, d.b, d.token))).collect())
    }

    /// Numbers over all trees, and milliseconds by phase.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = &self.packed.stats;
        let out = PyDict::new(py);
        let numbers = [
            ("samples", stats.samples),
            ("raw_tokens", stats.raw_tokens),
            ("packed_tokens", stats.packed_tokens),
            ("padding", stats.padding),
            ("terms", stats.terms),
            ("kept_ids", stats.kept_ids),
            ("attention_pairs", stats.attention_pairs),
            ("attention_pairs_alone", stats.attention_pairs_alone),
        ];
        for (name, number) in numbers {
            out.set_item(name, number)?;
        }
        out.set_item("imbalance", stats.balance.imbalance)?;
        out.set_item("balance_tokens", stats.balance.extra_tokens)?;
        out.set_item("dummies", stats.balance.dummies)?;
        let milliseconds = PyDict::new(py);
        for (phase, time) in &stats.milliseconds {
            milliseconds.set_item(PyString::new(py, phase), time)?;
        }
        out.set_item("milliseconds", milliseconds)?;
        Ok(out)
    }

    /// (sample, tokens, reason) of each sample that was left out.
    fn skipped<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let tuples: PyResult<Vec<Bound<'py, PyTuple>>> =
            self.packed.skipped.iter().map(|s| (s.sample, s.tokens, s.reason.to_string()).into_pyobject(py)).collect();
        PyList::new(py, tuples?)
    }
}

impl PackedTrees {
    fn tree(&self, index: usize) -> PyResult<&crate::Tree> {
        let count = self.packed.trees.len();
        self.packed
            .trees
            .get(index)
            .ok_or_else(|| pyo3::exceptions::PyIndexError::new_err(format!("tree {index} of {count}")))
    }
}

#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use super::{columns, first_unready, pack, PackError, PackedTrees};
}
