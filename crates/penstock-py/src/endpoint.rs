//! Endpoints, as Python sees them.

use crate::engine::{Engine, Ticket, wait_for};
use crate::{callbacks, setup_error};
use penstock_engine::endpoint::{Ask, Asked, Client, Kind, Limits, Memory, Reply, Server, Work};
use penstock_engine::{Contact, GroupSpec};
use penstock_types::{Generation, GroupId, Priority};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A server that clients ask for something.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct EndpointServer(Server);

#[pymethods]
impl EndpointServer {
    #[new]
    #[pyo3(signature = (name, *, calls, request_bytes, push_bytes, in_flight_bytes))]
    fn new(
        py: Python<'_>,
        name: &str,
        calls: u32,
        request_bytes: u64,
        push_bytes: u64,
        in_flight_bytes: u64,
    ) -> PyResult<EndpointServer> {
        let limits = Limits { calls, request: request_bytes, push: push_bytes, in_flight: in_flight_bytes };
        Server::start(name, limits).map(EndpointServer).map_err(|failure| setup_error(py, &failure))
    }

    /// From now on it serves this, or no longer.
    fn serve(&self, kind: &str, name: &str, is_served: bool) -> PyResult<()> {
        self.0.serve(kind_named(kind)?, name, is_served);
        Ok(())
    }

    /// Connects with a client: the second of two members, of which this process is the first. Does not block.
    #[pyo3(signature = (engine, *, id, generation, members, secret, name))]
    fn accept(
        &self,
        engine: &Engine,
        id: u64,
        generation: u32,
        members: (String, String),
        secret: Vec<u8>,
        name: String,
    ) -> PyResult<()> {
        self.0.accept(&engine.0, pair(id, generation, 0, &members, secret, name)?);
        Ok(())
    }

    /// Blocks without the GIL until there is a call for a handler. None: the server is closed.
    fn next(&self, py: Python<'_>) -> Option<EndpointCall> {
        py.detach(|| self.0.next()).map(|asked| EndpointCall(Mutex::new(Some(asked))))
    }

    /// Counters; None: the server is closed.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(stats) = py.detach(|| self.0.stats()) else { return Ok(None) };
        let out = PyDict::new(py);
        out.set_item("clients", stats.clients)?;
        out.set_item("calls", stats.calls)?;
        out.set_item("held_bytes", stats.held_bytes)?;
        out.set_item("taken", stats.taken)?;
        Ok(Some(out))
    }

    /// Ends the server; the ticket completes when all clients have left, or were cut off after `grace_s`.
    fn close(&self, grace_s: f64) -> Ticket {
        Ticket(self.0.close(duration(grace_s)))
    }
}

/// What keeps a reply. A server may do nothing more with Python for long, and would hold it as long.
struct Lent(Option<Py<PyAny>>);

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(object) = self.0.take() {
            callbacks::release(object);
        }
    }
}

/// A call for a handler.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct EndpointCall(Mutex<Option<Asked>>);

#[pymethods]
impl EndpointCall {
    /// The number of the client at this server.
    #[getter]
    fn client(&self) -> u32 {
        self.asked(|asked| asked.client())
    }

    /// The client, for messages.
    #[getter]
    fn who(&self) -> String {
        self.asked(|asked| asked.who().to_owned())
    }

    /// "request", "push" or "pull".
    #[getter]
    fn kind(&self) -> &'static str {
        self.asked(|asked| asked.kind().name())
    }

    /// What it is about.
    #[getter]
    fn name(&self) -> String {
        self.asked(|asked| asked.name().to_owned())
    }

    /// As the engine counts: less is more urgent.
    #[getter]
    fn priority(&self) -> i32 {
        self.asked(|asked| asked.priority().0)
    }

    /// Its body; None if that has no bytes.
    fn body(&self) -> Option<EndpointMemory> {
        self.asked(|asked| asked.body().cloned()).map(EndpointMemory)
    }

    /// Answers it with the `length` bytes at `address`, which `keep` keeps valid and unchanged.
    fn answer(&self, address: usize, length: u64, keep: Option<Py<PyAny>>) {
        let reply = match length {
            0 => Reply::Empty,
            _ => Reply::Lent { address: address as *const u8, len: length, keep: Box::new(Lent(keep)) },
        };
        // SAFETY: the caller's contract.
        self.asked(|asked| unsafe { asked.answer(Ok(reply)) });
    }

    /// Answers it with a failure of the handler.
    fn fail(&self, text: String) {
        // SAFETY: nothing is lent.
        self.asked(|asked| unsafe { asked.answer(Err(text)) });
    }
}

impl EndpointCall {
    /// The call itself, for somebody else to answer. `None`: somebody has it.
    pub(crate) fn take(&self) -> Option<Asked> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn asked<R: Default>(&self, act: impl FnOnce(&mut Asked) -> R) -> R {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut().map(act).unwrap_or_default()
    }
}

/// Bytes that have come for an endpoint.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct EndpointMemory(Arc<Memory>);

#[pymethods]
impl EndpointMemory {
    /// Where they begin; valid while this object lives.
    #[getter]
    fn address(&self) -> usize {
        self.0.address() as usize
    }

    /// How many.
    #[getter]
    fn length(&self) -> usize {
        self.0.len()
    }
}

/// A connection to a server.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct EndpointClient(Client);

#[pymethods]
impl EndpointClient {
    /// Connects: this process is the second of two members. The ticket completes when the server has said what it takes.
    #[staticmethod]
    #[pyo3(signature = (engine, *, id, generation, members, secret, name, server, timeout_s))]
    #[allow(clippy::too_many_arguments)]
    fn connect(
        py: Python<'_>,
        engine: &Engine,
        id: u64,
        generation: u32,
        members: (String, String),
        secret: Vec<u8>,
        name: String,
        server: &str,
        timeout_s: f64,
    ) -> PyResult<(EndpointClient, EndpointWork)> {
        let spec = pair(id, generation, 1, &members, secret, name)?;
        let made = Client::connect(&engine.0, spec, server, duration(timeout_s));
        let (client, ticket) = made.map_err(|failure| setup_error(py, &failure))?;
        Ok((EndpointClient(client), EndpointWork { ticket, work: None }))
    }

    /// Makes a call with the `length` bytes at `body`. `into` is the address and length of the place for the reply; without it, up to
    /// `room` bytes go to memory of the engine's. `keep` keeps both valid until the call has ended.
    #[pyo3(signature = (kind, name, *, body=0, length=0, into=None, room=0, priority=0, timeout_s, keep=None))]
    #[allow(clippy::too_many_arguments)]
    fn ask(
        &self,
        kind: &str,
        name: String,
        body: usize,
        length: u64,
        into: Option<(usize, u64)>,
        room: u64,
        priority: i32,
        timeout_s: f64,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<EndpointWork> {
        let ask = Ask {
            kind: kind_named(kind)?,
            name,
            body: body as *const u8,
            len: length,
            into: into.map(|(address, length)| (address as *mut u8, length)),
            room,
            priority: Priority(priority),
            timeout: duration(timeout_s),
            keep: keep.map(|keep| Box::new(keep) as Box<dyn Any + Send>),
        };
        // SAFETY: the caller's contract; `keep` holds the buffers.
        let work = unsafe { self.0.ask(ask) };
        Ok(EndpointWork { ticket: work.ticket().clone(), work: Some(work) })
    }

    /// Gives a call another priority, as far as it has not left; nothing happens if it has ended.
    fn reprioritise(&self, work: &EndpointWork, priority: i32) {
        if let Some(work) = &work.work {
            self.0.reprioritise(work, Priority(priority));
        }
    }

    /// Ends the connection when the calls have ended, after `grace_s` at the latest; the ticket completes then.
    fn close(&self, grace_s: f64) -> Ticket {
        Ticket(self.0.close(duration(grace_s)))
    }
}

/// A call that was made, or a connection that begins.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct EndpointWork {
    ticket: penstock_engine::Ticket,
    work: Option<Work>,
}

#[pymethods]
impl EndpointWork {
    /// Blocks without the GIL until it has ended; raises its failure. With a time-out, returns whether it has ended.
    #[pyo3(signature = (timeout_s=None))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        match wait_for(py, &self.ticket, timeout_s)? {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(failure)) => Err(setup_error(py, &failure)),
        }
    }

    /// Whether it has ended, successfully or not.
    fn done(&self) -> bool {
        self.ticket.result().is_some()
    }

    /// Calls `callback()` on another thread once it has ended.
    fn on_done(&self, callback: Py<PyAny>) {
        self.ticket.on_done(|_| callbacks::later(callback));
    }

    /// The same call, for a holder that must not keep its reply alive.
    fn without_reply(&self) -> EndpointWork {
        EndpointWork { ticket: self.ticket.clone(), work: self.work.as_ref().map(Work::without_reply) }
    }

    /// The reply of a call without `into` that has ended well; None if it has no bytes.
    fn reply(&self) -> Option<EndpointMemory> {
        self.work.as_ref().and_then(Work::reply).map(EndpointMemory)
    }
}

fn kind_named(name: &str) -> PyResult<Kind> {
    let kind = Kind::ALL.into_iter().find(|kind| kind.name() == name);
    kind.ok_or_else(|| PyValueError::new_err(format!("unknown kind of call {name:?}")))
}

/// The group of a connection.
fn pair(
    id: u64,
    generation: u32,
    rank: u32,
    members: &(String, String),
    secret: Vec<u8>,
    name: String,
) -> PyResult<GroupSpec> {
    let decode = |text: &String| Contact::decode(text).map_err(PyValueError::new_err);
    let members = vec![decode(&members.0)?, decode(&members.1)?];
    let (id, generation) = (GroupId(id), Generation(generation));
    Ok(GroupSpec { id, generation, rank, members, secret, algorithm: None, name })
}

/// Seconds, none where it is negative; what no duration can hold is a long one.
fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(LONGEST).min(LONGEST)
}

/// A year: nothing waits longer, and it can be added to any time.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
