//! The simulator of in-network aggregation, for `penstock simulate aggregation`.

use penstock_aggregation::{Endpoint, Node, Tree};
use penstock_sim::aggregation::{Fixed, GIGABIT, Scenario, Shape, Timing};
use penstock_types::MILLISECOND;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Runs one seed in virtual time. Returns the outcome; `failure` is None if every result was right. Raises ValueError for a
/// number out of bounds.
///
/// `tree` has what is below the server, instead of `workers` and `shape`: a number is a worker, a list an aggregator with what is
/// below it. `queued` is how many operations a worker has submitted at a time; `payload` how many bytes of elements a full block has, a
/// multiple of 64. `rate_mbit` and `queue` (bytes) are 0 for no limit. With `finite` no element is infinite or NaN. With `edge_loss` only
/// workers' links lose packets. `patient` uses the time-outs of real jobs, instead of shorter ones that let many runs fit into a second.
#[pyfunction]
#[pyo3(signature = (
    seed, *, jobs=None, workers=None, shape=None, tree=None, blocks=None, shards=None, operation=None, queued=None, window=None,
    payload=None, floats=None, finite=false, keyed=None, loss=None, edge_loss=false, duplicate=None, delay_ms=None, jitter_ms=None, rate_mbit=None, queue=None, patient=false, faults=true,
    trace=false,
))]
#[allow(clippy::too_many_arguments, reason = "they are keyword-only in Python")]
pub(crate) fn simulate_aggregation<'py>(
    py: Python<'py>,
    seed: u64,
    jobs: Option<usize>,
    workers: Option<usize>,
    shape: Option<&str>,
    tree: Option<&Bound<'py, PyAny>>,
    blocks: Option<u32>,
    shards: Option<u32>,
    operation: Option<u32>,
    queued: Option<u32>,
    window: Option<u32>,
    payload: Option<usize>,
    floats: Option<bool>,
    finite: bool,
    keyed: Option<bool>,
    loss: Option<f64>,
    edge_loss: bool,
    duplicate: Option<f64>,
    delay_ms: Option<f64>,
    jitter_ms: Option<f64>,
    rate_mbit: Option<f64>,
    queue: Option<u64>,
    patient: bool,
    faults: bool,
    trace: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let config = PyValueError::new_err::<String>;
    let shape = match shape {
        None => None,
        Some("direct") => Some(Shape::Direct),
        Some("star") => Some(Shape::Star),
        Some("racks") => Some(Shape::Racks),
        Some("core") => Some(Shape::Core),
        Some(other) => return Err(config(format!("shape is {other:?}; direct, star, racks and core are possible"))),
    };
    let scaled = |number: Option<f64>, unit: u64| number.map(|number| (number * unit as f64).round() as u64);
    for (name, number) in [("delay_ms", delay_ms), ("jitter_ms", jitter_ms), ("rate_mbit", rate_mbit)] {
        if let Some(number) = number.filter(|number| number.is_nan() || *number < 0.0) {
            return Err(config(format!("{name} is {number}; 0 and more are possible")));
        }
    }
    let fixed = Fixed {
        jobs,
        workers,
        shape,
        tree: tree.map(|tree| Ok::<_, PyErr>(Tree { children: nodes(tree, 0, &mut 0)? })).transpose()?,
        blocks,
        shards,
        operation,
        queued,
        payload_bytes: payload,
        window,
        floats,
        finite,
        keyed,
        loss,
        edge_loss,
        duplicate,
        delay: scaled(delay_ms, MILLISECOND),
        jitter: scaled(jitter_ms, MILLISECOND),
        rate: scaled(rate_mbit, GIGABIT / 1000),
        queue,
        timing: patient.then(Timing::default),
        no_faults: !faults,
    };
    fixed.check().map_err(config)?;
    let scenario = Scenario { trace, ..Scenario::draw_with(seed, &fixed) };
    scenario.check().map_err(config)?;
    let outcome = py.detach(|| scenario.run());
    let report = PyDict::new(py);
    report.set_item("scenario", format!("{scenario:?}"))?;
    report.set_item("failure", outcome.failure)?;
    report.set_item("packets", outcome.packets)?;
    report.set_item("lost", outcome.lost)?;
    report.set_item("dropped", outcome.dropped)?;
    report.set_item("arrived", outcome.arrived)?;
    report.set_item("results", outcome.results)?;
    report.set_item("fallen", outcome.fallen)?;
    report.set_item("time_ns", outcome.time)?;
    report.set_item("trace", outcome.trace)?;
    Ok(report)
}

/// What a list says is below a node. Aggregators get numbers from `count` on, those below one before it.
fn nodes(list: &Bound<'_, PyAny>, depth: u32, count: &mut u32) -> PyResult<Vec<Node>> {
    if depth > MOST_DEPTH {
        return Err(PyValueError::new_err(format!("the tree is deeper than {MOST_DEPTH} aggregators")));
    }
    let mut found = Vec::new();
    for one in list.try_iter()? {
        let one = one?;
        found.push(match one.extract::<u8>() {
            Ok(worker) => Node::Worker(worker),
            Err(_) => {
                let children = nodes(&one, depth + 1, count)?;
                *count += 1;
                Node::Aggregator { endpoint: Endpoint(*count - 1), children }
            }
        });
    }
    Ok(found)
}

/// As many aggregators stand above each other in a tree of 64 workers in which each aggregator has two children.
const MOST_DEPTH: u32 = 63;
