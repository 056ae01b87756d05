//! The native module `penstock._core`.
//!
//! A binding translates: it checks the signature, detaches the GIL, calls the engine and maps the error. It decides
//! nothing. Built for Python's stable ABI (3.10 and newer) and against no torch, so that one wheel serves every
//! interpreter and every torch that users have.

mod aggregated;
mod callbacks;
mod daemon;
mod endpoint;
mod engine;
mod plan;
mod reducer;
mod simulate;
mod tensors;

use penstock_types::Failure;
use pyo3::prelude::*;

/// The engine of Penstock; use it through `penstock` and `torch.distributed`.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::daemon::{Daemon, check_daemon_option, daemon_options, parse_address};

    #[pymodule_export]
    use super::engine::{Engine, Group, Ticket, is_reduced, memory_layout};

    #[pymodule_export]
    use super::endpoint::{EndpointCall, EndpointClient, EndpointMemory, EndpointServer, EndpointWork};

    #[pymodule_export]
    use super::aggregated::{UdpSockets, aggregate, aggregated_stats};

    #[pymodule_export]
    use super::plan::{merge, traffic};

    #[pymodule_export]
    use super::reducer::{CurrentPass, ReadyHook, Reducer};

    #[pymodule_export]
    use super::simulate::{simulate_aggregation, simulate_collective};

    #[pymodule_export]
    use super::tensors::{TensorCheck, first_changed};

    #[pymodule_export]
    use super::{check_fork, choose_interfaces, crc32c, init_logging, settle_callbacks, simd_level};

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "Python spells it so")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_export]
    const AGGREGATION_VERSION: u8 = penstock_aggregation::VERSION;

    #[pymodule_export]
    const ENDPOINT_MOST_BYTES: u64 = penstock_engine::endpoint::MOST_BYTES;

    #[pymodule_export]
    const STREAMED_MOST_BUFFERS: usize = penstock_node::MOST_BUFFERS;
}

/// Addresses to listen on: those named by the first non-empty (setting, value), otherwise the one that routes to `master`
/// ("host:port"). Returns [(interface, address)] and the reason.
#[pyfunction]
fn choose_interfaces(
    py: Python<'_>,
    named: Vec<(String, String)>,
    master: Option<String>,
) -> PyResult<(Vec<(String, String)>, String)> {
    let named: Vec<(&str, &str)> = named.iter().map(|(setting, value)| (setting.as_str(), value.as_str())).collect();
    let chosen = py.detach(|| penstock_engine::interface::choose(&named, master.as_deref()));
    match chosen {
        Ok((interfaces, reason)) => {
            Ok((interfaces.into_iter().map(|i| (i.name, i.address.to_string())).collect(), reason))
        }
        Err(message) => Err(setup_error(py, &Failure::of_call(penstock_types::FailureKind::Config, message))),
    }
}

/// The CRC32C of the `length` bytes at `address`, which the caller keeps valid. Threads may call it at the same time.
#[pyfunction]
fn crc32c(py: Python<'_>, address: usize, length: usize) -> u32 {
    if length == 0 {
        return 0;
    }
    // SAFETY: the caller's contract.
    py.detach(|| penstock_engine::crc32c(unsafe { std::slice::from_raw_parts(address as *const u8, length) }))
}

/// The SIMD level of this processor's reductions: "avx512fp16", "avx512bf16", "avx512", "avx2" or "portable".
#[pyfunction]
fn simd_level() -> &'static str {
    penstock_engine::simd_level()
}

/// Raises in a process that was forked from one with an engine: it cannot have an engine of its own.
#[pyfunction]
fn check_fork(py: Python<'_>) -> PyResult<()> {
    penstock_engine::check_fork().map_err(|failure| error(py, &failure))
}

/// Waits without the GIL until all callbacks of tickets have returned, for `timeout_s` at the most. Returns whether they have.
#[pyfunction]
fn settle_callbacks(py: Python<'_>, timeout_s: f64) -> bool {
    callbacks::settle(py, std::time::Duration::from_secs_f64(timeout_s))
}

/// Prints the crates' log lines of `level` ("error", "warn", "info", "debug") and above on standard error, from a thread
/// of its own. The first call counts.
#[pyfunction]
fn init_logging(level: &str) {
    let _ = env_logger::Builder::new()
        .parse_filters(level)
        .format_target(false)
        .target(env_logger::Target::Pipe(Box::new(penstock_engine::log_writer::LogWriter)))
        .try_init();
}

/// The only place where failures become exceptions: `penstock.errors.<Kind>(message)` with `group_lives` set.
fn error(py: Python<'_>, failure: &Failure) -> PyErr {
    exception(py, failure, &failure.text())
}

/// An exception for a failure before any group exists: its text does not mention one.
fn setup_error(py: Python<'_>, failure: &Failure) -> PyErr {
    exception(py, failure, &failure.message)
}

fn exception(py: Python<'_>, failure: &Failure, text: &str) -> PyErr {
    let build = || -> PyResult<Bound<'_, PyAny>> {
        let class = py.import("penstock.errors")?.getattr(failure.kind.name())?;
        let exception = class.call1((text,))?;
        exception.setattr("group_lives", failure.group_lives)?;
        Ok(exception)
    };
    match build() {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}
