//! `Reducer`, as Python sees it.

use crate::engine::{Group, Ticket, algorithm_named, dtype_named, reduce_op};
use crate::error;
use penstock_engine::{Gradient, ReducerSpec, Way};
use penstock_types::Priority;
use pyo3::prelude::*;
use pyo3::types::PyDict;
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
    pub(crate) fn submit(
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

    /// Changes how gradients travel: only between steps, on all ranks between the same two. `algorithm` None: the planner
    /// chooses.
    #[pyo3(signature = (*, bucket_bytes, wire, algorithm, streams))]
    fn set_way(
        &self,
        py: Python<'_>,
        bucket_bytes: u64,
        wire: Option<&str>,
        algorithm: Option<&str>,
        streams: usize,
    ) -> PyResult<()> {
        let way = Way {
            bucket_bytes,
            wire: wire.map(dtype_named).transpose()?,
            algorithm: algorithm.map(algorithm_named).transpose()?,
            streams,
        };
        self.0.set_way(&way).map_err(|failure| error(py, &failure))
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
