//! Aggregators and servers, for `penstock aggregator` and `penstock server`.

use crate::setup_error;
use penstock_node::{Config, Role};
use penstock_types::{Failure, FailureKind};
use pyo3::prelude::*;
use std::net::SocketAddr;
use std::time::Duration;

/// A running aggregator or server; it ends when it is dropped.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Daemon(penstock_node::Daemon);

#[pymethods]
impl Daemon {
    /// Starts it: when this returns, packets and requests are taken at `listen` ("ip:port"). `role` is "aggregator" or
    /// "server"; `drop` is (rate, seed). Raises penstock.errors.Config.
    #[new]
    #[pyo3(signature = (
        role, listen, *, shards, slots, memory_bytes, jobs, secret, offloads, buffer_bytes, forget_after_s, drain_timeout_s, drop,
    ))]
    #[allow(clippy::too_many_arguments, reason = "they are keyword-only in Python")]
    fn new(
        py: Python<'_>,
        role: &str,
        listen: &str,
        shards: u32,
        slots: usize,
        memory_bytes: usize,
        jobs: usize,
        secret: Option<Vec<u8>>,
        offloads: bool,
        buffer_bytes: usize,
        forget_after_s: f64,
        drain_timeout_s: f64,
        drop: Option<(f64, u64)>,
    ) -> PyResult<Daemon> {
        let config_error = |message: String| setup_error(py, &Failure::of_call(FailureKind::Config, message));
        let role = match role {
            "aggregator" => Role::Aggregator,
            "server" => Role::Server,
            other => return Err(config_error(format!("role is {other:?}; aggregator and server are possible"))),
        };
        let seconds = |name: &str, value: f64| {
            Duration::try_from_secs_f64(value)
                .map_err(|_| config_error(format!("{name} {value} is not a time to wait")))
        };
        let listen: SocketAddr =
            listen.parse().map_err(|_| config_error(format!("{listen:?} is not an address and a port")))?;
        let mut config = Config::new(role, listen);
        (config.limits.slots, config.limits.memory_bytes, config.limits.jobs) = (slots, memory_bytes, jobs);
        (config.shards, config.secret, config.offloads) = (shards, secret, offloads);
        (config.buffer_bytes, config.drop) = (buffer_bytes, drop);
        config.forget_after = seconds("--forget-after", forget_after_s)?;
        config.drain_timeout = seconds("--drain-timeout", drain_timeout_s)?;
        let started = py.detach(|| penstock_node::Daemon::start(config));
        started.map(Daemon).map_err(|reason| config_error(reason.to_string()))
    }

    /// "ip:port" of TCP and of shard 0.
    #[getter]
    fn address(&self) -> String {
        self.0.local_addr().to_string()
    }

    /// Asks it to end; returns at once.
    fn drain(&self, py: Python<'_>) {
        py.detach(|| self.0.drain());
    }

    /// Waits until it has drained, `timeout_s` at most; says whether it has.
    fn wait(&self, py: Python<'_>, timeout_s: f64) -> bool {
        let timeout = Duration::try_from_secs_f64(timeout_s).unwrap_or_default();
        py.detach(|| self.0.wait(timeout))
    }
}

/// Bytes as people write them: "4096", "64K", "512M", "4G". Raises ValueError.
#[pyfunction]
pub(crate) fn parse_bytes(text: &str) -> PyResult<usize> {
    penstock_node::parse_bytes(text).map_err(pyo3::exceptions::PyValueError::new_err)
}
