//! `Reducer`, as Python sees it, and the hook that hands it a gradient: for every gradient of every step. What Python would decide takes
//! it some microseconds, so the usual case is decided here, and everything else there (`GradientReducer._ready`).

use crate::engine::{Group, Ticket, algorithm_named, dtype_named, reduce_op};
use crate::error;
use crate::tensors::TensorCheck;
use penstock_engine::{Gradient, ReducerSpec, Setting};
use penstock_types::Priority;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::any::Any;

/// All-reduces a model's gradients as soon as all ranks have them.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Reducer(penstock_engine::Reducer);

#[pymethods]
impl Reducer {
    /// `rounds` and `buckets` are channels of the same `world` ranks that nothing else uses; `gradients` are (name, elements,
    /// dtype, number of their layout), by index, the same on all ranks. `op`: "sum" or "avg". `wire`: None, "float16" or
    /// "bfloat16"; `error_feedback` needs one of the last two. `priority`: of rounds and buckets, as for [`Group`]s' operations;
    /// with `last_first` buckets are less urgent, those of gradients with lower indices most so.
    #[new]
    #[pyo3(signature = (
        *, rounds, buckets, rank, world, gradients, op, bucket_bytes, wire, error_feedback=false, check_finite, priority=0,
        last_first=false, timeout_s
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        rounds: &Group,
        buckets: &Group,
        rank: u32,
        world: u32,
        gradients: Vec<(String, u64, String, u64)>,
        op: &str,
        bucket_bytes: u64,
        wire: Option<&str>,
        error_feedback: bool,
        check_finite: bool,
        priority: i32,
        last_first: bool,
        timeout_s: f64,
    ) -> PyResult<Reducer> {
        let gradients = gradients
            .into_iter()
            .map(|(name, elements, dtype, order)| Ok(Gradient { name, elements, dtype: dtype_named(&dtype)?, order }))
            .collect::<PyResult<_>>()?;
        let spec = ReducerSpec {
            rounds: rounds.0.clone(),
            buckets: buckets.0.clone(),
            rank,
            world,
            gradients,
            op: reduce_op(op, 1.0)?,
            bucket_bytes,
            wire: wire.map(dtype_named).transpose()?,
            error_feedback,
            check_finite,
            priority: Priority(priority),
            last_first,
            timeout: (timeout_s * 1e9) as u64,
        };
        penstock_engine::Reducer::new(spec).map(Reducer).map_err(|failure| error(py, &failure))
    }

    /// The gradient at `address`, of `bytes` bytes, is ready; with `absent` it consists of zeros. `keep` is the object that
    /// keeps the address valid.
    #[pyo3(signature = (index, address, bytes, keep, *, absent=false))]
    fn submit(
        &self,
        py: Python<'_>,
        index: u32,
        address: usize,
        bytes: u64,
        keep: Py<PyAny>,
        absent: bool,
    ) -> PyResult<()> {
        let keep: Box<dyn Any + Send> = Box::new(keep);
        // SAFETY: the caller's contract; `keep` holds the tensor.
        py.detach(|| unsafe { self.0.submit(index, address as *mut u8, bytes, absent, Some(keep)) })
            .map_err(|failure| error(py, &failure))
    }

    /// The backward pass has ended. The ticket completes when every submitted gradient is reduced.
    fn flush(&self, py: Python<'_>) -> Ticket {
        Ticket(py.detach(|| self.0.flush()))
    }

    /// After the flush: completes when no rank drops the step any more, though gradients may still be on their way.
    fn agreed(&self, py: Python<'_>) -> Ticket {
        Ticket(py.detach(|| self.0.agreed()))
    }

    /// Completes when a submitted gradient is reduced; None if it is.
    fn arrival(&self, index: u32) -> Option<Ticket> {
        self.0.arrival(index).map(Ticket)
    }

    /// The backward pass has raised. The ticket completes when the next pass can begin.
    fn withdraw(&self, py: Python<'_>) -> Ticket {
        Ticket(py.detach(|| self.0.withdraw()))
    }

    /// Whether no rank had the gradient in the last round that was about it.
    fn was_absent(&self, index: u32) -> bool {
        self.0.was_absent(index)
    }

    /// Changes how gradients travel: only between steps, on all ranks between the same two. `algorithm` None: chosen
    /// by size and hosts.
    #[pyo3(signature = (*, bucket_bytes, wire, algorithm, streams))]
    fn apply(
        &self,
        py: Python<'_>,
        bucket_bytes: u64,
        wire: Option<&str>,
        algorithm: Option<&str>,
        streams: usize,
    ) -> PyResult<()> {
        let setting = Setting {
            bucket_bytes,
            wire: wire.map(dtype_named).transpose()?,
            algorithm: algorithm.map(algorithm_named).transpose()?,
            streams,
        };
        self.0.apply(&setting).map_err(|failure| error(py, &failure))
    }

    /// Counters, as a dict.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.0.stats();
        let out = PyDict::new(py);
        out.set_item("steps", stats.steps)?;
        out.set_item("rounds", stats.rounds)?;
        out.set_item("round_s", stats.round_ns as f64 / 1e9)?;
        out.set_item("buckets", stats.buckets)?;
        out.set_item("in_place_bytes", stats.in_place_bytes)?;
        out.set_item("copied_bytes", stats.copied_bytes)?;
        Ok(out)
    }
}

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
