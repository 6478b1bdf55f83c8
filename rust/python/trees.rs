//! Finished trees -> one buffer each, without a copy.

use std::sync::Arc;

use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::slab::Slab;
use crate::{Packed, Skipped};

/// Keeps the memory of a packing alive; the base object of its arrays.
#[pyclass(frozen)]
pub struct Memory(Arc<Slab>);

/// The trees of one call.
#[pyclass(frozen, module = "treepack._core")]
pub struct PackedTrees {
    packed: Packed,
    memory: Py<Memory>,
    /// Names of the arrays, made once for all trees.
    names: Vec<Py<PyString>>,
}

/// A sample that was left out: its number, its tokens, why.
pub type SkippedTuple = (usize, usize, String);

pub fn skipped_tuple(skipped: &Skipped) -> SkippedTuple {
    (skipped.sample, skipped.tokens, skipped.reason.to_string())
}

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

    /// Offset in bytes and rows of each array of a tree, by name.
    fn fields<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyDict>> {
        let tree = self.tree(index)?;
        let out = PyDict::new(py);
        for field in self.packed.schema.fields(&tree.sizes, &tree.agrees) {
            out.set_item(self.names[field.index].bind(py), (field.offset, field.rows))?;
        }
        Ok(out)
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
    fn skipped(&self) -> Vec<SkippedTuple> {
        self.packed.skipped.iter().map(skipped_tuple).collect()
    }
}

impl PackedTrees {
    pub fn new(py: Python<'_>, packed: Packed) -> PyResult<Self> {
        let memory = Memory(packed.slab.clone());
        let names = packed.schema.names().map(|name| PyString::new(py, name).unbind()).collect();
        Ok(PackedTrees { memory: Py::new(py, memory)?, names, packed })
    }

    fn tree(&self, index: usize) -> PyResult<&crate::Tree> {
        let count = self.packed.trees.len();
        self.packed
            .trees
            .get(index)
            .ok_or_else(|| pyo3::exceptions::PyIndexError::new_err(format!("tree {index} of {count}")))
    }
}
