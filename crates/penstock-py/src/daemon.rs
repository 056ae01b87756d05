//! Aggregators and servers, for `penstock aggregator` and `penstock server`.

use crate::endpoint::EndpointCall;
use crate::setup_error;
use penstock_engine::endpoint::{Kind, Memory, Reply};
use penstock_node::{Config, NodeOption, Role, Streamed};
use penstock_types::{Failure, FailureKind};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// A running aggregator or server; it ends when it is dropped.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Daemon(penstock_node::Daemon);

#[pymethods]
impl Daemon {
    /// Starts it: when this returns, packets and requests are taken. `role` is "aggregator" or "server"; `options` has the text
    /// of each option that is given, by its name in `daemon_options` (any text for one without a value); `secret` is for where
    /// they name none. Raises penstock.errors.Config.
    #[new]
    #[pyo3(signature = (role, options, *, secret))]
    fn new(py: Python<'_>, role: &str, options: HashMap<String, String>, secret: Option<Vec<u8>>) -> PyResult<Daemon> {
        let config_error = |message: String| setup_error(py, &Failure::of_call(FailureKind::Config, message));
        let role = role_named(role).map_err(config_error)?;
        let started = py.detach(|| {
            let texts: Vec<_> = options.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
            let mut config = Config::from_options(role, &texts)?;
            config.secret = config.secret.or(secret);
            penstock_node::Daemon::start(config).map_err(|reason| reason.to_string())
        });
        started.map(Daemon).map_err(config_error)
    }

    /// "ip:port" of TCP and of shard 0.
    #[getter]
    fn address(&self) -> String {
        self.0.local_addr().to_string()
    }

    /// Bytes of sums of all jobs together.
    #[getter]
    fn memory_bytes(&self) -> usize {
        self.0.memory_bytes()
    }

    /// A page of its jobs and their counters, from the job `start` on, as JSON. None: it does not answer.
    #[pyo3(signature = (start=0))]
    fn jobs(&self, py: Python<'_>, start: u32) -> Option<String> {
        py.detach(|| self.0.jobs(start))
    }

    /// The status and the JSON with which the daemon answers such a request over HTTP of somebody who has proved to know its secret.
    fn answer(&self, py: Python<'_>, method: &str, path: &str, body: &[u8]) -> (u16, String) {
        py.detach(|| self.0.answer(method, path, body))
    }

    /// Takes a push or pull of "sums/NAME" (`penstock_node::Streamed`) from an endpoint's handlers, and answers it when it is time.
    fn stream(&self, py: Python<'_>, call: &EndpointCall) {
        let Some(mut asked) = call.take() else { return };
        py.detach(|| {
            let name = asked.name().split_once('/').map_or("", |(_, name)| name).to_owned();
            let call = match (asked.kind(), asked.body().cloned()) {
                (Kind::Pull, _) => Streamed::Pull(Box::new(move |outcome| {
                    let reply = |bytes: Arc<Vec<u8>>| Reply::Lent {
                        address: bytes.as_ptr(),
                        len: bytes.len() as u64,
                        keep: Box::new(bytes),
                    };
                    // SAFETY: nobody writes to the results, which `keep` keeps.
                    unsafe { asked.answer(outcome.map(reply)) };
                })),
                (_, body) => Streamed::Push(
                    Box::new(Body(body)),
                    // SAFETY: nothing is lent.
                    Box::new(move |outcome| unsafe { asked.answer(outcome.map(|()| Reply::Empty)) }),
                ),
            };
            self.0.stream(&name, call);
        });
    }

    /// Asks the daemon to end; returns at once.
    fn drain(&self, py: Python<'_>) {
        py.detach(|| self.0.drain());
    }

    /// Waits until the daemon has drained, at most `timeout_s`. Returns whether it has.
    fn wait(&self, py: Python<'_>, timeout_s: f64) -> bool {
        let timeout = Duration::try_from_secs_f64(timeout_s).unwrap_or_default();
        py.detach(|| self.0.wait(timeout))
    }
}

/// What has come with a push.
struct Body(Option<Arc<Memory>>);

impl AsRef<[u8]> for Body {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref().map_or(&[], |memory| memory.bytes())
    }
}

/// The options of a role as (name, value, default, help). `value` is what the help calls it, or None for an option that is given
/// or not. Raises ValueError.
#[pyfunction]
pub(crate) fn daemon_options(role: &str) -> PyResult<Vec<OptionRow>> {
    let role = role_named(role).map_err(PyValueError::new_err)?;
    Ok(NodeOption::of(role).map(|option| (option.name, option.value, option.default, option.help)).collect())
}

type OptionRow = (&'static str, Option<&'static str>, Option<&'static str>, &'static str);

/// Raises ValueError, without the option's name, where `text` is no value of an option.
#[pyfunction]
pub(crate) fn check_daemon_option(py: Python<'_>, name: &str, text: &str) -> PyResult<()> {
    let option = NodeOption::named(name).ok_or_else(|| PyValueError::new_err(format!("there is no option {name}")))?;
    py.detach(|| option.check(text)).map_err(PyValueError::new_err)
}

/// "ip:port" from an address or a name, with a port or without. Raises ValueError.
#[pyfunction]
pub(crate) fn parse_address(py: Python<'_>, text: &str) -> PyResult<String> {
    let address = py.detach(|| penstock_node::parse_address(text));
    address.map(|address| address.to_string()).map_err(PyValueError::new_err)
}

fn role_named(name: &str) -> Result<Role, String> {
    let role = [Role::Aggregator, Role::Server].into_iter().find(|role| role.name() == name);
    role.ok_or_else(|| format!("role is {name:?}; aggregator and server are possible"))
}
