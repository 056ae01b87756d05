//! The engine's aggregation, as Python sees it.

use crate::engine::{Group, Ticket};
use crate::error;
use penstock_engine::{ClientSpec, NodeSpec, ServerSpec, Sockets, Wire};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::Duration;

/// UDP sockets, one a server. They are bound first, so that servers can be told where to send results.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct UdpSockets {
    addresses: Vec<SocketAddr>,
    sockets: Mutex<Option<Sockets>>,
}

#[pymethods]
impl UdpSockets {
    /// Binds a socket at each "IP:PORT"; port 0 lets the kernel choose.
    #[new]
    #[pyo3(signature = (addresses, *, offloads, buffer_bytes))]
    fn new(py: Python<'_>, addresses: Vec<String>, offloads: bool, buffer_bytes: usize) -> PyResult<UdpSockets> {
        let addresses = addresses.iter().map(|text| address(text)).collect::<PyResult<Vec<_>>>()?;
        let sockets = Sockets::bind(&addresses, offloads, buffer_bytes).map_err(|failure| error(py, &failure))?;
        Ok(UdpSockets { addresses: sockets.addresses(), sockets: Mutex::new(Some(sockets)) })
    }

    /// The local addresses, as "IP:PORT".
    fn addresses(&self) -> Vec<String> {
        self.addresses.iter().map(ToString::to_string).collect()
    }
}

/// (address, weight, (parent, shards) or None, name, job, epoch, key or None, window, start)
type Server = (String, u32, Option<(String, u16)>, u64, u32, u16, Option<[u8; 16]>, u32, u32);

/// From now on, sums and averages in `group` of at least `min_bytes` bytes of floats go through `servers`, each (address,
/// weight, (aggregator, its shards) or None, this rank's name there, job, epoch, key or None, window, first SeqNum). `format`: "int32", "padded" (the
/// same for switches: packets of one length), "int16" or "float32". `sockets` are in the order of the servers and belong to
/// this group from now on. The ticket completes when all ranks have called this.
#[pyfunction]
#[pyo3(signature = (group, sockets, *, rank, world, name, format, payload_bytes, min_bytes, gives_way, servers, timeout_s))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn aggregate(
    py: Python<'_>,
    group: &Group,
    sockets: &UdpSockets,
    rank: u32,
    world: u32,
    name: String,
    format: &str,
    payload_bytes: usize,
    min_bytes: u64,
    gives_way: bool,
    servers: Vec<Server>,
    timeout_s: f64,
) -> PyResult<Ticket> {
    let wire = match format {
        "int32" => Wire::Int32,
        "padded" => Wire::Padded,
        "int16" => Wire::Int16,
        "float32" => Wire::Float,
        _ => return Err(PyValueError::new_err(format!("unknown format {format:?}"))),
    };
    let servers = servers
        .into_iter()
        .map(|(at, weight, parent, name, job, epoch, key, window, start)| {
            let parent = parent.map(|(at, shards)| address(&at).map(|address| NodeSpec { address, shards }));
            Ok(ServerSpec {
                address: address(&at)?,
                weight,
                parent: parent.transpose()?,
                name,
                job,
                epoch,
                key,
                window,
                start,
            })
        })
        .collect::<PyResult<Vec<_>>>()?;
    let taken = sockets.sockets.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
    let taken = taken.ok_or_else(|| PyValueError::new_err("these sockets are another group's already"))?;
    let spec = ClientSpec { rank, world, name, wire, payload_bytes, min_bytes, gives_way, servers };
    let timeout = Duration::try_from_secs_f64(timeout_s).unwrap_or(Duration::MAX);
    py.detach(|| group.0.aggregate(taken, spec, timeout)).map(Ticket).map_err(|failure| error(py, &failure))
}

/// Counters of a group's aggregation, as nested dicts and lists; None without a call of `aggregate`.
#[pyfunction]
pub(crate) fn aggregated_stats<'py>(py: Python<'py>, group: &Group) -> PyResult<Option<Bound<'py, PyDict>>> {
    let Some(stats) = group.0.aggregated_stats() else { return Ok(None) };
    let out = PyDict::new(py);
    out.set_item("operations", stats.operations)?;
    out.set_item("bytes", stats.bytes)?;
    out.set_item("fallback_operations", stats.fallback_operations)?;
    out.set_item("fallback", stats.fallback)?;
    let mut servers = Vec::new();
    for server in stats.servers {
        let entry = PyDict::new(py);
        entry.set_item("address", server.address.to_string())?;
        entry.set_item("parent", server.parent.map(|parent| parent.to_string()))?;
        entry.set_item("is_direct", server.is_direct)?;
        entry.set_item("bypasses", server.bypasses)?;
        entry.set_item("pushed", server.pushed)?;
        entry.set_item("pushed_again", server.pushed_again)?;
        entry.set_item("requested", server.requested)?;
        entry.set_item("results", server.results)?;
        entry.set_item("refused", server.refused)?;
        entry.set_item("unauthenticated", server.unauthenticated)?;
        entry.set_item("sent_bytes", server.sent_bytes)?;
        entry.set_item("received_bytes", server.received_bytes)?;
        entry.set_item("round_trip_s", server.round_trip_ns as f64 / 1e9)?;
        servers.push(entry);
    }
    out.set_item("servers", servers)?;
    Ok(Some(out))
}

fn address(text: &str) -> PyResult<SocketAddr> {
    text.parse().map_err(|_| PyValueError::new_err(format!("not an address: {text}")))
}
