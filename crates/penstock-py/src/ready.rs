//! The hook that hands a gradient over, for every gradient of every step: what Python would decide takes it some microseconds, so the
//! usual case is decided here, and everything else there (`GradientReducer._ready`).

use crate::reducer::Reducer;
use crate::tensors::TensorCheck;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// The backward pass that hooks hand gradients over for, while there is one.
#[pyclass(module = "penstock._core")]
pub(crate) struct CurrentPass {
    /// `torch._C._current_graph_task_id`.
    task_now: Py<PyAny>,
    pass: Option<Pass>,
}

/// What `penstock.training.passes.BackwardPass` has under the same names.
struct Pass {
    task: i64,
    handed: Py<PyDict>,
    addresses: Py<PyDict>,
    versions: Py<PyDict>,
    shared: Py<PyList>,
}

#[pymethods]
impl CurrentPass {
    #[new]
    fn new(task_now: Py<PyAny>) -> CurrentPass {
        CurrentPass { task_now, pass: None }
    }

    /// The gradients that autograd's pass of this number makes from now on are handed over, and noted in these.
    fn follow(
        &mut self,
        task: i64,
        handed: Py<PyDict>,
        addresses: Py<PyDict>,
        versions: Py<PyDict>,
        shared: Py<PyList>,
    ) {
        self.pass = Some(Pass { task, handed, addresses, versions, shared });
    }

    /// The pass has ended, or was dropped.
    fn end(&mut self) {
        self.pass = None;
    }
}

/// The hook of one parameter.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct ReadyHook {
    current: Py<CurrentPass>,
    reducer: Py<Reducer>,
    index: u32,
    check: Py<TensorCheck>,
    bytes: u64,
    element_bytes: u64,
    otherwise: Py<PyAny>,
}

#[pymethods]
impl ReadyHook {
    /// Hands gradients over that are as `check` has it, of `bytes` bytes, in the pass that `current` follows. For others, and in other
    /// passes, it calls `otherwise` with the parameter.
    #[new]
    fn new(
        current: Py<CurrentPass>,
        reducer: Py<Reducer>,
        index: u32,
        check: Py<TensorCheck>,
        bytes: u64,
        element_bytes: u64,
        otherwise: Py<PyAny>,
    ) -> ReadyHook {
        ReadyHook { current, reducer, index, check, bytes, element_bytes, otherwise }
    }

    fn __call__(&self, parameter: &Bound<'_, PyAny>) -> PyResult<()> {
        if self.hands_over(parameter)? {
            return Ok(());
        }
        self.otherwise.bind(parameter.py()).call1((parameter,)).map(drop)
    }
}

impl ReadyHook {
    /// Whether the gradient was handed over.
    fn hands_over(&self, parameter: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = parameter.py();
        // Nothing is borrowed below: other threads run while the reducer takes the gradient, and may end the pass.
        let current = self.current.borrow(py);
        let Some(pass) = &current.pass else { return Ok(false) };
        if current.task_now.bind(py).call0()?.extract::<i64>()? != pass.task {
            return Ok(false);
        }
        let [handed, addresses, versions] =
            [&pass.handed, &pass.addresses, &pass.versions].map(|dict| dict.clone_ref(py).into_bound(py));
        let shared = pass.shared.clone_ref(py).into_bound(py);
        drop(current);
        let gradient = parameter.getattr(intern!(py, "grad"))?;
        let Some(address) = self.check.get().address(&gradient) else { return Ok(false) };
        if gradient.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
            return Ok(false);
        }
        let storage = gradient.call_method0(intern!(py, "untyped_storage"))?;
        let size: u64 = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
        let offset: u64 = gradient.call_method0(intern!(py, "storage_offset"))?.extract()?;
        if size < self.bytes + offset * self.element_bytes {
            return Ok(false); // its memory is gone
        }
        self.reducer.get().submit(py, self.index, address, self.bytes, storage.unbind(), false)?;
        handed.set_item(self.index, &gradient)?;
        addresses.set_item(self.index, address)?;
        if size == self.bytes {
            versions.set_item(self.index, gradient.getattr(intern!(py, "_version"))?)?;
        } else {
            versions.set_item(self.index, SHARED)?;
            shared.append(self.index)?;
        }
        Ok(true)
    }
}

/// As in `penstock.training.steps`.
const SHARED: i64 = -1;
