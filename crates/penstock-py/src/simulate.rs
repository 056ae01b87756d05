//! The simulator of in-network aggregation, for `penstock simulate aggregation`.

use crate::error;
use penstock_protocol::aggregation::simulate::{Fixed, Scenario, Shape};
use penstock_types::{Failure, FailureKind};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Runs one seed in virtual time. Returns what it came to; `failure` is None where every result was right.
#[pyfunction]
#[pyo3(signature = (
    seed, *, jobs=None, workers=None, shape=None, blocks=None, window=None, floats=None, loss=None, duplicate=None,
    faults=true, trace=false,
))]
#[allow(clippy::too_many_arguments, reason = "they are keyword-only in Python")]
pub(crate) fn simulate_aggregation<'py>(
    py: Python<'py>,
    seed: u64,
    jobs: Option<usize>,
    workers: Option<usize>,
    shape: Option<&str>,
    blocks: Option<u32>,
    window: Option<u32>,
    floats: Option<bool>,
    loss: Option<f64>,
    duplicate: Option<f64>,
    faults: bool,
    trace: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let config = |message: String| error(py, &Failure::of_call(FailureKind::Config, message));
    let shape = match shape {
        None => None,
        Some("direct") => Some(Shape::Direct),
        Some("star") => Some(Shape::Star),
        Some("racks") => Some(Shape::Racks),
        Some("core") => Some(Shape::Core),
        Some(other) => return Err(config(format!("shape is {other:?}; direct, star, racks and core are possible"))),
    };
    let fixed = Fixed { jobs, workers, shape, blocks, window, floats, loss, duplicate, no_faults: !faults };
    fixed.check().map_err(config)?;
    let scenario = Scenario { trace, ..Scenario::draw_with(seed, &fixed) };
    let outcome = py.detach(|| scenario.run());
    let told = PyDict::new(py);
    told.set_item("scenario", format!("{scenario:?}"))?;
    told.set_item("failure", outcome.failure)?;
    told.set_item("packets", outcome.packets)?;
    told.set_item("lost", outcome.lost)?;
    told.set_item("arrived", outcome.arrived)?;
    told.set_item("results", outcome.results)?;
    told.set_item("time_ns", outcome.time)?;
    told.set_item("trace", outcome.trace)?;
    Ok(told)
}
