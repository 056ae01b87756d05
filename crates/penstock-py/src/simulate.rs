//! The simulators, for `penstock simulate`.

use penstock_aggregation::{Endpoint, Node, Tree};
use penstock_engine::plan::PlanError;
use penstock_sim::aggregation::{Fixed, GIGABIT, Scenario, Shape, Timing};
use penstock_sim::collective::{Error, Field, Simulation};
use penstock_sim::network::{Link, LinkId, Topology};
use penstock_types::MILLISECOND;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::engine::{algorithm_named, collective_named};

/// Runs one seed in virtual time. Returns the outcome; `failure` is None if every result was right. Raises ValueError for a
/// number out of bounds.
///
/// `tree` has what is below the server, instead of `workers` and `shape`: a number is a worker, a list an aggregator with what is
/// below it. `queued` is how many operations a worker has submitted at a time; `payload` how many bytes of elements a full block has, a
/// multiple of 64. `rate_mbit` and `queue` (bytes) are 0 for no limit. With `finite` no element is infinite or NaN. With `edge_loss` only
/// workers' links lose packets. `patient` uses the time-outs of real jobs, instead of shorter ones that let many runs fit into a second. With
/// `fat` a link between switches carries what all workers below it send. With `switches` a third of the aggregators of integers behave as
/// switches.
#[pyfunction]
#[pyo3(signature = (
    seed, *, jobs=None, workers=None, shape=None, tree=None, blocks=None, shards=None, operation=None, queued=None, window=None,
    payload=None, floats=None, finite=false, keyed=None, loss=None, edge_loss=false, duplicate=None, delay_ms=None, jitter_ms=None, rate_mbit=None, queue=None, patient=false, fat=false,
    switches=true, faults=true,
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
    fat: bool,
    switches: bool,
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
        Some("rows") => Some(Shape::Rows),
        Some(other) => {
            return Err(config(format!("shape is {other:?}; direct, star, racks, core and rows are possible")));
        }
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
        is_fat: fat,
        no_switches: !switches,
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

/// Runs a collective of ranks on a network, in virtual time, `repetitions` times one after the other. A root is rank 0.
///
/// `switches` and `hosts` are how many of each there are; nodes have numbers, switches first. `ranks` has the node of each rank's host.
/// `links` has (node, node, bytes a second, nanoseconds, bytes of the queue at the first node, bytes of the queue at the second one) of
/// each cable, alike in both directions; a rate or a queue of 0 is no limit. `bytes` is as in `Group.start`.
///
/// Returns the algorithm, `promised_ns`, and of each repetition `time_ns`, and of the busiest link `link`, the number of the cable,
/// `is_back`, whether towards the cable's first node, `bytes`, `frames` and `share`, None if it has no rate.
///
/// Calls `progress` with the repetitions that have ended, the nanoseconds of the current one, and `promised_ns`, several times a second; what
/// it raises ends the simulation. Raises ValueError(what, path) for what cannot be simulated, with a path such as "links[3].rate", which
/// is "" for anything but an argument.
#[pyfunction]
#[pyo3(signature = (
    *, switches, hosts, ranks, links, collective, bytes, algorithm, repetitions, progress,
))]
#[allow(clippy::too_many_arguments, reason = "they are keyword-only in Python")]
pub(crate) fn simulate_collective<'py>(
    py: Python<'py>,
    switches: u32,
    hosts: u32,
    ranks: Vec<u32>,
    links: Vec<(u32, u32, u64, u64, u64, u64)>,
    collective: &str,
    bytes: u64,
    algorithm: Option<&str>,
    repetitions: u32,
    progress: Py<PyAny>,
) -> PyResult<Bound<'py, PyDict>> {
    let mut topology = Topology::default();
    let mut nodes = (0..switches).map(|_| topology.add_switch()).collect::<Vec<_>>();
    nodes.extend((0..hosts).map(|_| topology.add_host()));
    let node = |number: u32| {
        let found = nodes.get(number as usize).copied();
        found.ok_or_else(|| PyValueError::new_err(format!("there is no node {number}; there are {}", nodes.len())))
    };
    for (a, b, rate, delay, queue_at_a, queue_at_b) in links {
        let link = Link { rate, delay, ..Link::default() };
        topology.add_link(node(a)?, node(b)?, Link { queue_bytes: queue_at_a, ..link });
        topology.add_link(node(b)?, node(a)?, Link { queue_bytes: queue_at_b, ..link });
    }
    let simulation = Simulation {
        topology,
        hosts: ranks.into_iter().map(node).collect::<PyResult<_>>()?,
        collective: collective_named(collective, 0)?.0,
        bytes,
        algorithm: algorithm.map(algorithm_named).transpose()?,
        repetitions,
    };
    let mut raised = None;
    let outcome = py.detach(|| {
        simulation.run(|now| {
            let called = Python::attach(|py| {
                py.check_signals()?;
                progress.call1(py, (now.repetitions, now.time, now.promised))
            });
            called.map_err(|error| raised = Some(error)).is_ok()
        })
    });
    if let Some(error) = raised {
        return Err(error);
    }
    let outcome = outcome.map_err(|error| PyValueError::new_err((error.to_string(), path_of(&error))))?;
    let report = PyDict::new(py);
    report.set_item("algorithm", outcome.algorithm.name())?;
    report.set_item("promised_ns", outcome.promised)?;
    let mut found = Vec::new();
    for one in outcome.repetitions {
        let each = PyDict::new(py);
        let (link, is_back) = cable(one.busiest);
        each.set_item("time_ns", one.time)?;
        each.set_item("link", link)?;
        each.set_item("is_back", is_back)?;
        each.set_item("bytes", one.bytes)?;
        each.set_item("frames", one.frames)?;
        each.set_item("share", one.share)?;
        found.push(each);
    }
    report.set_item("repetitions", found)?;
    Ok(report)
}

/// The argument of `simulate_collective` that an error is about.
fn path_of(error: &Error) -> String {
    let of_link = |link: LinkId, field: &str| format!("links[{}].{field}", cable(link).0);
    match error {
        Error::OutOfBounds { field, .. } => match *field {
            Field::Ranks => "ranks".into(),
            Field::Host(rank) => format!("ranks[{rank}]"),
            Field::Bytes => "bytes".into(),
            Field::Repetitions => "repetitions".into(),
            Field::Collective => "collective".into(),
            Field::Algorithm => "algorithm".into(),
            Field::Rate(link) => of_link(link, "rate"),
            Field::Delay(link) => of_link(link, "delay"),
            Field::Queue(link) => of_link(link, "queue"),
            Field::Faults(link) => of_link(link, "loss"),
        },
        Error::Full { link, .. } => of_link(*link, "queue"),
        Error::Replaced { .. } | Error::NoPlan(PlanError::NotFor { .. }) => "algorithm".into(),
        Error::NoPlan(PlanError::Uneven { .. }) => "bytes".into(),
        _ => String::new(),
    }
}

/// The cable of a link, and whether it is the link back.
fn cable(link: LinkId) -> (u32, bool) {
    (link.0 / 2, link.0 % 2 == 1)
}

/// What a list says is below a node. Aggregators get numbers from `count` on, those below one before it.
fn nodes(list: &Bound<'_, PyAny>, depth: u32, count: &mut u32) -> PyResult<Vec<Node>> {
    if depth > MOST_DEPTH {
        return Err(PyValueError::new_err(format!("the tree is deeper than {MOST_DEPTH} aggregators")));
    }
    let mut found = Vec::new();
    for one in list.try_iter()? {
        let one = one?;
        found.push(match one.extract::<u16>() {
            Ok(worker) => Node::Worker(worker),
            Err(_) => {
                let children = nodes(&one, depth + 1, count)?;
                *count += 1;
                Node::Aggregator { endpoint: Endpoint(*count - 1), is_full: true, children }
            }
        });
    }
    Ok(found)
}

/// As many aggregators stand above each other in a tree of 64 workers in which each aggregator has two children.
const MOST_DEPTH: u32 = 63;
