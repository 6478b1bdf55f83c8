//! Errors of the crate -> `treepack.errors.PackError`, which has the same fields and makes the same text of them.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{IntoPyDict, PyDict, PyType};

use crate::{PackError, Words};

const ERRORS: &str = "treepack.errors";

pub fn pack_error(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    CLASS.import(py, ERRORS, "PackError")
}

fn pack_type_error(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    CLASS.import(py, ERRORS, "PackTypeError")
}

impl From<PackError> for PyErr {
    fn from(error: PackError) -> PyErr {
        // Where the Python object cannot be made, what went wrong there is raised instead.
        Python::attach(|py| convert(py, error)).unwrap_or_else(|failed| failed)
    }
}

fn convert(py: Python<'_>, error: PackError) -> PyResult<PyErr> {
    let Words { head, token_as, tail } = error.fault.words();
    let fields = PyDict::new(py);
    fields.set_item("sample", error.sample)?;
    fields.set_item("token", error.token)?;
    fields.set_item("budget", error.fault.budget())?;
    let class = pack_error(py)?;
    let object = if token_as.is_empty() {
        class.call((head,), Some(&fields))?
    } else {
        fields.set_item("token_as", token_as)?;
        class.call(((head, tail),), Some(&fields))?
    };
    Ok(PyErr::from_value(object))
}

/// A PackError of a call.
pub fn refuse(py: Python<'_>, detail: &str) -> PyErr {
    made(pack_error(py), detail, PyDict::new(py))
}

/// A PackError of a sample, and what sample 0 has where it differs.
pub fn refuse_sample(py: Python<'_>, sample: usize, detail: &str, first_has: &str) -> PyErr {
    let fields = [("sample", sample)].into_py_dict(py);
    let fields = fields.and_then(|fields| fields.set_item("against", (0, first_has)).map(|()| fields));
    fields.map_or_else(|failed| failed, |fields| made(pack_error(py), detail, fields))
}

/// A TypeError of a sample.
pub fn refuse_type(py: Python<'_>, sample: usize, detail: &str) -> PyErr {
    let fields = [("sample", sample)].into_py_dict(py);
    fields.map_or_else(|failed| failed, |fields| made(pack_type_error(py), detail, fields))
}

fn made<'py>(class: PyResult<&Bound<'py, PyType>>, detail: &str, fields: Bound<'py, PyDict>) -> PyErr {
    let object = class.and_then(|class| class.call((detail,), Some(&fields)));
    object.map_or_else(|failed| failed, PyErr::from_value)
}
