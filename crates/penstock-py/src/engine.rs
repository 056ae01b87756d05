//! `Engine`, `Group` and `Ticket`, as Python sees them.

use crate::{callbacks, check_fork, error, setup_error};
use penstock_engine::fingerprint::{Fingerprint, Layout, Name, Order};
use penstock_engine::plan::{Algorithm, Collective, Splits, UnknownAlgorithm};
use penstock_engine::{ANY_SOURCE, Call, Config, Contact, GroupSpec, Ptracer};
use penstock_types::{DType, Failure, FailureKind, Generation, GroupId, Priority, ReduceOp};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::os::fd::FromRawFd;
use std::time::Duration;

/// A process's engine: its threads, listeners and streams.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Engine(pub(crate) penstock_engine::Engine);

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (
        *, rank, host, generation, addresses, ports, io_threads, streams, streams_within_host, shared_memory, checksum,
        dead_after_s, socket_buffer_bytes, flight_recorder, ptracer="launcher"
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        rank: u32,
        host: String,
        generation: u32,
        addresses: Vec<String>,
        ports: (u16, u16),
        io_threads: usize,
        streams: u16,
        streams_within_host: u16,
        shared_memory: bool,
        checksum: bool,
        dead_after_s: f64,
        socket_buffer_bytes: u32,
        flight_recorder: Option<std::path::PathBuf>,
        ptracer: &str,
    ) -> PyResult<Engine> {
        let addresses = addresses
            .iter()
            .map(|address| address.parse().map_err(|_| PyValueError::new_err(format!("not an address: {address}"))))
            .collect::<PyResult<_>>()?;
        let config = Config {
            rank,
            host,
            generation: Generation(generation),
            addresses,
            ports: ports.0..=ports.1,
            io_threads,
            streams,
            streams_within_host,
            shared_memory,
            checksum,
            dead_after: Duration::from_secs_f64(dead_after_s),
            socket_buffer_bytes,
            flight_recorder,
            ptracer: match ptracer {
                "launcher" => Ptracer::Launcher,
                "any" => Ptracer::Any,
                "0" => Ptracer::Nobody,
                _ => return Err(PyValueError::new_err(format!("unknown ptracer {ptracer:?}"))),
            },
        };
        py.detach(|| penstock_engine::Engine::start(&config)).map(Engine).map_err(|failure| setup_error(py, &failure))
    }

    /// One line of text by which other processes can connect to this one.
    fn contact(&self) -> String {
        self.0.contact().encode()
    }

    /// Starts joining a group. The ticket completes when every member is connected.
    #[pyo3(signature = (*, id, generation, rank, members, secret, algorithm, name))]
    #[allow(clippy::too_many_arguments)]
    fn join(
        &self,
        id: u64,
        generation: u32,
        rank: u32,
        members: Vec<String>,
        secret: Vec<u8>,
        algorithm: Option<&str>,
        name: String,
    ) -> PyResult<(Group, Ticket)> {
        let members =
            members.iter().map(|text| Contact::decode(text).map_err(PyValueError::new_err)).collect::<PyResult<_>>()?;
        let algorithm = algorithm.map(algorithm_named).transpose()?;
        let (group, ticket) = self.0.join(GroupSpec {
            id: GroupId(id),
            generation: Generation(generation),
            rank,
            members,
            secret,
            algorithm,
            name,
        });
        Ok((Group(group), Ticket(ticket)))
    }

    /// Counters, as nested dicts and lists.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.0.stats()).map_err(|failure| error(py, &failure))?;
        let out = PyDict::new(py);
        out.set_item("finished_operations", stats.finished_operations)?;
        out.set_item("memory_bytes", stats.memory_bytes)?;
        out.set_item("memory_read_bytes", stats.memory_read_bytes)?;
        let held = PyDict::new(py);
        held.set_item("groups", stats.held.groups)?;
        held.set_item("channels", stats.held.channels)?;
        held.set_item("operations", stats.held.operations)?;
        held.set_item("claims", stats.held.claims)?;
        held.set_item("closed_ranges", stats.held.closed_ranges)?;
        held.set_item("jobs", stats.held.jobs)?;
        held.set_item("early_messages", stats.held.early_messages)?;
        held.set_item("early_bytes", stats.held.early_bytes)?;
        held.set_item("remembered_operations", stats.held.remembered_operations)?;
        held.set_item("unacknowledged_messages", stats.held.unacknowledged_messages)?;
        held.set_item("credit_bytes", stats.held.credit_bytes)?;
        held.set_item("mappings", stats.held.mappings)?;
        held.set_item("descriptors", stats.held.descriptors)?;
        held.set_item("callback_threads", callbacks::threads())?;
        out.set_item("held", held)?;
        let mut threads = Vec::new();
        for thread in stats.threads {
            let entry = PyDict::new(py);
            entry.set_item("read_bytes", thread.read_bytes)?;
            entry.set_item("written_bytes", thread.written_bytes)?;
            entry.set_item("locked_s", thread.locked_ns as f64 / 1e9)?;
            entry.set_item("waited_s", thread.waited_ns as f64 / 1e9)?;
            threads.push(entry);
        }
        out.set_item("threads", threads)?;
        let mut groups = Vec::new();
        for group in stats.groups {
            let entry = PyDict::new(py);
            entry.set_item("name", group.name)?;
            entry.set_item("rank", group.rank)?;
            entry.set_item("world", group.world)?;
            entry.set_item("issued", group.issued)?;
            entry.set_item("active", group.active)?;
            entry.set_item("algorithm", group.algorithm)?;
            entry.set_item("failed", group.failed)?;
            let mut channels = Vec::new();
            for channel in group.channels {
                let entry = PyDict::new(py);
                entry.set_item("name", channel.name)?;
                entry.set_item("issued", channel.issued)?;
                entry.set_item("active", channel.active)?;
                entry.set_item("algorithm", channel.algorithm)?;
                entry.set_item("failed", channel.failed)?;
                channels.push(entry);
            }
            entry.set_item("channels", channels)?;
            groups.push(entry);
        }
        out.set_item("groups", groups)?;
        let mut peers = Vec::new();
        for peer in stats.peers {
            let entry = PyDict::new(py);
            entry.set_item("rank", peer.rank)?;
            entry.set_item("host", peer.host)?;
            entry.set_item("address", peer.address)?;
            entry.set_item("medium", peer.medium)?;
            entry.set_item("memory_read_bytes", peer.memory_read_bytes)?;
            entry.set_item("lost", peer.lost)?;
            let mut streams = Vec::new();
            for (id, stream) in peer.streams {
                let entry = PyDict::new(py);
                entry.set_item("stream", id)?;
                entry.set_item("sent_bytes", stream.sent_bytes)?;
                entry.set_item("received_bytes", stream.received_bytes)?;
                entry.set_item("sent_frames", stream.sent_frames)?;
                entry.set_item("repeated_frames", stream.repeated_frames)?;
                entry.set_item("duplicate_frames", stream.duplicate_frames)?;
                entry.set_item("rate_bytes_per_s", stream.rate_bytes_per_s)?;
                entry.set_item("round_trip_s", stream.round_trip_ns as f64 / 1e9)?;
                entry.set_item("window_bytes", stream.window_bytes)?;
                streams.push(entry);
            }
            entry.set_item("streams", streams)?;
            peers.push(entry);
        }
        out.set_item("peers", peers)?;
        Ok(out)
    }

    /// Bytes read from the memory of ranks on this host so far. Takes no lock and wakes no thread, unlike `stats`.
    fn memory_read_bytes(&self) -> u64 {
        self.0.memory_read_bytes()
    }

    /// The flight record, as JSON.
    fn record(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| self.0.record()).map_err(|failure| error(py, &failure))
    }

    /// The operations that have ended since the last call: group, number or None, operation (`send` and `recv` of messages), bytes, when
    /// it was issued and had ended, in nanoseconds of the monotonic clock, and of a message the other rank in its group and the tag.
    /// Then how many are missing, and when the earliest of these was issued, or 0. Wakes no thread.
    #[allow(clippy::type_complexity, reason = "Python's names for the parts are in the stub")]
    fn take_ended(&self) -> (Vec<(String, Option<u64>, &'static str, u64, u64, u64, Option<(u32, u32)>)>, u64, u64) {
        let (ended, missing, since_ns) = self.0.take_ended();
        let ended = ended.iter().map(|one| {
            let operation = match one.message {
                None => one.operation,
                Some(message) if message.is_send => "send",
                Some(_) => "recv",
            };
            let message = one.message.map(|message| (message.other, message.tag));
            (one.group.to_string(), one.number, operation, one.bytes, one.issued_ns, one.ended_ns, message)
        });
        (ended.collect(), missing, since_ns)
    }

    /// Writes the flight record to its folder, if there is one, in the background.
    fn write_record(&self) {
        self.0.write_record();
    }

    /// Shares `length` bytes at `address` with the ranks of this host. `file` is a descriptor of the memory file that holds
    /// these bytes after one page. The engine takes the descriptor over and closes it after `unshare`, at its own end, or
    /// after an error here. Returns a number for `unshare`.
    fn share(&self, py: Python<'_>, file: i32, address: u64, length: u64) -> PyResult<u64> {
        // SAFETY: the caller had opened the descriptor and gives it away.
        let file = unsafe { std::os::fd::OwnedFd::from_raw_fd(file) };
        self.0.share(file, address, length).map_err(|failure| setup_error(py, &failure))
    }

    /// Ends what `share` began.
    fn unshare(&self, number: u64) {
        self.0.unshare(number);
    }

    /// Sends good-byes to the peers and ends the thread. With `wait`, blocks until the peers have taken all messages, leave or
    /// are lost, or until the longest time-out of an operation so far, 1.5 times `dead_after_s` at the least; messages that were
    /// not delivered are logged. Ctrl-C ends the wait.
    #[pyo3(signature = (*, wait=true))]
    fn stop(&self, py: Python<'_>, wait: bool) -> PyResult<()> {
        self.0.begin_stop(wait);
        let mut interrupted = Ok(());
        while !self.0.has_stopped() {
            py.detach(|| std::thread::sleep(STOP_CHECK));
            if interrupted.is_ok() {
                interrupted = py.check_signals();
                if interrupted.is_err() {
                    self.0.begin_stop(false);
                }
            }
        }
        py.detach(|| self.0.stop());
        interrupted
    }
}

/// A channel of a set of ranks that run collectives together.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Group(pub(crate) penstock_engine::Group);

#[pymethods]
impl Group {
    /// Starts an operation on `bytes` bytes (as the plan counts them) of `elements` elements. `input` and `output` are
    /// addresses. `keep` is the object that keeps them valid, and is held until the operation has ended. `layout` is the memory
    /// layout of the tensor, as `memory_layout` returns it; ranks compare it.
    #[pyo3(signature = (
        collective, *, dtype, elements, bytes, input, output, op=None, factor=1.0, rank=0, tag=0, input_splits=None,
        output_splits=None, layout=0, priority=0, coflow=0, hold=false, timeout_s, keep=None
    ))]
    #[allow(clippy::too_many_arguments)]
    fn start(
        &self,
        collective: &str,
        dtype: &str,
        elements: u64,
        bytes: u64,
        input: usize,
        output: usize,
        op: Option<&str>,
        factor: f64,
        rank: u32,
        tag: u32,
        input_splits: Option<Vec<u64>>,
        output_splits: Option<Vec<u64>>,
        layout: u64,
        priority: i32,
        coflow: u32,
        hold: bool,
        timeout_s: f64,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Ticket> {
        let (collective, name) = collective_named(collective, rank)?;
        let dtype = dtype_named(dtype)?;
        let op = op.map(|op| reduce_op(op, factor)).transpose()?;
        let root = match collective {
            Collective::Send { .. } | Collective::Recv { .. } => None,
            other => other.named_rank(),
        };
        let splits = match (input_splits, output_splits) {
            (Some(input), Some(output)) => Some(Splits { input, output }),
            _ => None,
        };
        let call = Call {
            collective,
            fingerprint: Fingerprint::new(name, op, dtype, root, elements).with_layout(Layout::from_number(layout)),
            dtype,
            op: op.unwrap_or(ReduceOp::Sum),
            bytes,
            splits,
            input: input as *const u8,
            output: output as *mut u8,
            tag,
            coflow,
            priority: Priority(priority),
            hold,
            timeout: (timeout_s * 1e9) as u64,
            keep: keep.map(|keep| Box::new(keep) as Box<dyn std::any::Any + Send>),
        };
        // SAFETY: the caller's contract; `keep` holds the tensors, and torch's own contract forbids their use meanwhile.
        Ok(Ticket(unsafe { self.0.start(call) }))
    }

    /// The tensors of an operation that was started with `hold` are ready.
    fn release(&self, ticket: &Ticket) {
        self.0.release(&ticket.0);
    }

    /// Changes how urgent a running operation is: what it has not sent yet leaves by that.
    fn reprioritise(&self, ticket: &Ticket, priority: i32) {
        self.0.reprioritise(&ticket.0, Priority(priority));
    }

    /// The host of each rank, numbered in the order of their lowest ranks.
    fn hosts(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        py.detach(|| self.0.hosts()).map_err(|failure| error(py, &failure))
    }

    /// Raises the failure if one of these ranks is lost; with `farewells`, also if one has left the job; with `whole`, also if
    /// the group has failed.
    #[pyo3(signature = (ranks, *, whole, farewells=true))]
    fn check(&self, py: Python<'_>, ranks: Vec<u32>, whole: bool, farewells: bool) -> PyResult<()> {
        py.detach(|| self.0.check(whole, farewells, ranks)).map_err(|failure| error(py, &failure))
    }

    /// Opens another channel of the same ranks: its collectives have an order of their own. All ranks open the channels of a group in
    /// the same order, under the same names. The ticket completes when all have opened it; a rank that has not within `timeout_s`
    /// fails the group.
    #[pyo3(signature = (name, *, timeout_s))]
    fn channel(&self, name: &str, timeout_s: f64) -> (Group, Ticket) {
        let (channel, ticket) = self.0.channel(name, Duration::try_from_secs_f64(timeout_s).unwrap_or(Duration::MAX));
        (Group(channel), Ticket(ticket))
    }

    /// Leaves the group, which closes its channels, or closes this channel; operations that still run there fail.
    /// `leaves_group`: the channel's group is left next.
    #[pyo3(signature = (*, leaves_group=false))]
    fn leave(&self, leaves_group: bool) {
        self.0.close(leaves_group);
    }

    /// Fails the group on all ranks, as after a time-out of `waited_s` seconds of a join or an operation.
    fn expire(&self, waited_s: f64) {
        // Who gives up at once may say so with a negative time.
        self.0.expire(Duration::try_from_secs_f64(waited_s).unwrap_or_default());
    }

    /// Fails all operations of the group, or of this channel if it is not the group's own, on all ranks, with the exception of this
    /// name in `penstock.errors`; `Closed` where there is none.
    #[pyo3(signature = (reason, kind=None))]
    fn abort(&self, reason: &str, kind: Option<&str>) {
        let named = FailureKind::ALL.into_iter().find(|one| Some(one.name()) == kind);
        self.0.abort_as(named.unwrap_or(FailureKind::Closed), reason);
    }
}

/// The pending result of an operation.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Ticket(pub(crate) penstock_engine::Ticket);

#[pymethods]
impl Ticket {
    /// Blocks without the GIL until the operation has ended; raises its failure. With a time-out, returns whether it has
    /// ended. Ctrl-C interrupts the wait, not the operation. In a forked child, what its parent has started and had not ended
    /// fails: the thread that would end it is the parent's.
    #[pyo3(signature = (timeout_s=None))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        match wait_for(py, &self.0, timeout_s)? {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(failure)) => Err(error(py, &failure)),
        }
    }

    /// Whether the operation has ended, successfully or not.
    fn done(&self) -> bool {
        self.0.result().is_some()
    }

    /// The rank whose message a receive from any source takes, once it is known.
    fn source(&self) -> Option<u32> {
        self.0.source()
    }

    /// Calls `callback()` on another thread once the operation has ended.
    fn on_done(&self, callback: Py<PyAny>) {
        self.0.on_done(|_| callbacks::later(callback));
    }
}

/// Blocks without the GIL until an operation has ended, or for `timeout_s`; `None`: it has not ended.
///
/// # Errors
/// A signal's handler has raised, or this process is a fork of the one that has started the operation.
pub(crate) fn wait_for(
    py: Python<'_>,
    ticket: &penstock_engine::Ticket,
    timeout_s: Option<f64>,
) -> PyResult<Option<Result<(), Failure>>> {
    // A time that is over is none, and what no duration can hold never ends.
    let mut left = timeout_s.and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok());
    let mut result = ticket.result();
    while result.is_none() {
        check_fork(py)?;
        let slice = left.unwrap_or(SIGNAL_CHECK).min(SIGNAL_CHECK);
        result = py.detach(|| ticket.wait(Some(slice)));
        py.check_signals()?;
        if let Some(left) = &mut left {
            *left = left.saturating_sub(slice);
            if left.is_zero() {
                break;
            }
        }
    }
    Ok(result)
}

/// The number of a memory layout, for `Group.start`: the sizes of a dense tensor's dimensions, and the dimensions as they lie
/// in memory, outermost first; `(0, 2, 3, 1)` is torch's channels-last. Row-major layouts are 0, whatever their dimensions.
/// Dimensions of size 1, and those that follow each other in memory as in the shape, must have been joined.
///
/// Raises ValueError for what is not a permutation, or not row-major and of more than 8 dimensions.
#[pyfunction]
pub(crate) fn memory_layout(sizes: Vec<u64>, dimensions: Vec<usize>) -> PyResult<u64> {
    Layout::of(&sizes, &dimensions).map(Layout::number).ok_or_else(|| {
        PyValueError::new_err(format!(
            "{dimensions:?} is not a permutation of the dimensions of {sizes:?}, of which there are at most {}",
            Order::MAX_DIMENSIONS
        ))
    })
}

/// Whether a reduction, by its name, is defined on elements of a dtype, by its name.
///
/// Raises ValueError for an unknown name.
#[pyfunction]
pub(crate) fn is_reduced(op: &str, dtype: &str) -> PyResult<bool> {
    Ok(reduce_op(op, 1.0)?.takes(dtype_named(dtype)?))
}

/// A collective by its name, with the name that ranks compare; `rank` is the root or the other rank, where it has one.
pub(crate) fn collective_named(text: &str, rank: u32) -> PyResult<(Collective, Name)> {
    Ok(match text {
        "all_reduce" => (Collective::AllReduce, Name::AllReduce),
        "reduce_scatter" => (Collective::ReduceScatter, Name::ReduceScatter),
        "all_gather" => (Collective::AllGather, Name::AllGather),
        "broadcast" => (Collective::Broadcast { root: rank }, Name::Broadcast),
        "reduce" => (Collective::Reduce { root: rank }, Name::Reduce),
        "gather" => (Collective::Gather { root: rank }, Name::Gather),
        "scatter" => (Collective::Scatter { root: rank }, Name::Scatter),
        "all_to_all" => (Collective::AllToAll, Name::AllToAll),
        "barrier" => (Collective::Barrier, Name::Barrier),
        "send" => (Collective::Send { to: rank }, Name::PointToPoint),
        "recv" => (Collective::Recv { from: rank }, Name::PointToPoint),
        "recv_anysource" => (Collective::Recv { from: ANY_SOURCE }, Name::PointToPoint),
        _ => return Err(PyValueError::new_err(format!("unknown collective {text:?}"))),
    })
}

pub(crate) fn dtype_named(name: &str) -> PyResult<DType> {
    DType::from_name(name).ok_or_else(|| PyValueError::new_err(format!("unknown dtype {name:?}")))
}

pub(crate) fn algorithm_named(name: &str) -> PyResult<Algorithm> {
    name.parse().map_err(|error: UnknownAlgorithm| PyValueError::new_err(error.to_string()))
}

pub(crate) fn reduce_op(name: &str, factor: f64) -> PyResult<ReduceOp> {
    Ok(match name {
        "sum" => ReduceOp::Sum,
        "avg" => ReduceOp::Avg,
        "premul_sum" => ReduceOp::PremulSum(factor),
        "product" => ReduceOp::Product,
        "min" => ReduceOp::Min,
        "max" => ReduceOp::Max,
        "band" => ReduceOp::BitAnd,
        "bor" => ReduceOp::BitOr,
        "bxor" => ReduceOp::BitXor,
        _ => return Err(PyValueError::new_err(format!("unknown reduction {name:?}"))),
    })
}

/// How often a thread that waits for the engine's end checks for it, and for signals.
const STOP_CHECK: Duration = Duration::from_millis(2);
/// How often a waiting thread checks for signals.
const SIGNAL_CHECK: Duration = Duration::from_millis(100);
