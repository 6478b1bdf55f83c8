//! Errors -> objects of `treepack.errors`, which have the same fields and make the same text of them.

use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

use crate::{Fault, PackError, Words};

static PACK_ERROR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static PACK_TYPE_ERROR: PyOnceLock<Py<PyType>> = PyOnceLock::new();

pub fn pack_error(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    PACK_ERROR.import(py, "treepack.errors", "PackError")
}

fn pack_type_error(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    PACK_TYPE_ERROR.import(py, "treepack.errors", "PackTypeError")
}

impl From<PackError> for PyErr {
    fn from(error: PackError) -> PyErr {
        Python::attach(|py| raised(object(py, &error)))
    }
}

fn object<'py>(py: Python<'py>, error: &PackError) -> PyResult<Bound<'py, PyAny>> {
    let Words { head, token_as, tail } = error.fault.words();
    if let Fault::Memory { .. } = error.fault {
        return py.get_type::<PyMemoryError>().call1((head,));
    }
    let fields = PyDict::new(py);
    fields.set_item("sample", error.sample)?;
    fields.set_item("token", error.token)?;
    fields.set_item("budget", error.fault.budget())?;
    fields.set_item("needs", error.fault.needs())?;
    if token_as.is_empty() {
        return pack_error(py)?.call((head,), Some(&fields));
    }
    fields.set_item("token_as", token_as)?;
    pack_error(py)?.call(((head, tail),), Some(&fields))
}

/// The object as what is raised; where it could not be made, what went wrong there.
fn raised(object: PyResult<Bound<'_, PyAny>>) -> PyErr {
    object.map_or_else(|failed| failed, PyErr::from_value)
}

/// A PackError of a call.
pub fn refuse(py: Python<'_>, detail: &str) -> PyErr {
    raised(pack_error(py).and_then(|class| class.call1((detail,))))
}

/// A PackError of a sample; `first_has` is what sample 0 has instead.
pub fn refuse_sample(py: Python<'_>, sample: usize, detail: &str, first_has: &str) -> PyErr {
    let fields = PyDict::new(py);
    let set = fields.set_item("sample", sample).and_then(|()| fields.set_item("against", (0, first_has)));
    raised(set.and_then(|()| pack_error(py)?.call((detail,), Some(&fields))))
}

/// A TypeError of a sample.
pub fn refuse_type(py: Python<'_>, sample: usize, detail: &str) -> PyErr {
    let fields = PyDict::new(py);
    let set = fields.set_item("sample", sample);
    raised(set.and_then(|()| pack_type_error(py)?.call((detail,), Some(&fields))))
}
