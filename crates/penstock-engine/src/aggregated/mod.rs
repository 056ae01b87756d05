//! All-reduces through aggregators and servers (`docs/design/aggregated.md`).
//!
//! A [`Client`] takes the large sums and averages of floats of one group; everything else goes the group's ordinary way. It is
//! one thread: `driver.rs` has the sockets, `penstock_aggregation::client` decides, and `shares.rs` asks the plan what goes to which
//! server.
//!
//! Why a thread of its own, and not the engine's? Quantising takes as long as receiving, and the client wakes for every train
//! of datagrams: neither should delay the other's work.

mod driver;
mod shares;

use crate::channel::Channel;
use crate::recorder::Recorder;
use crate::runtime::Call;
use crate::{Ticket, check_fork};
use driver::{Command, Driver};
pub use penstock_aggregation::client::Wire;
use penstock_net::datagrams::{Datagrams, SHORT_SEND_BUFFER};
use penstock_net::waker::Waker;
use penstock_plan::{Algorithm, Collective};
use penstock_types::{DType, Failure, FailureKind, Priority, ReduceOp};
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// The sockets of a client, one a server. They are bound before the servers are told where to send results.
#[derive(Debug)]
pub struct Sockets(Vec<Datagrams>);

impl Sockets {
    /// Binds a socket for each server. With `offloads` the kernel cuts and joins datagrams; without, each is a packet of its
    /// own. `buffer_bytes` is requested in each direction.
    ///
    /// # Errors
    /// The kernel's, with the address.
    pub fn bind(addresses: &[SocketAddr], offloads: bool, buffer_bytes: usize) -> Result<Sockets, Failure> {
        check_fork()?;
        let bind = |address: &SocketAddr| {
            // A full window of blocks in the kernel's buffer would delay every resend.
            let bound = Datagrams::bind(*address, offloads, buffer_bytes)
                .and_then(|socket| socket.set_send_buffer(SHORT_SEND_BUFFER).map(|()| socket));
            bound.map_err(|error| {
                Failure::of_call(FailureKind::Config, format!("cannot bind a UDP socket at {address}: {error}."))
            })
        };
        addresses.iter().map(bind).collect::<Result<_, _>>().map(Sockets)
    }

    /// The local addresses.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.0.iter().map(Datagrams::local_addr).collect()
    }
}

/// The parameters on which all ranks of a group have agreed, and which the daemons know.
#[derive(Debug)]
pub struct ClientSpec {
    /// This process's rank in the group: the worker's number in every job.
    pub rank: u32,
    /// Ranks in the group, 2 to 4096.
    pub world: u32,
    /// A name for logs and errors.
    pub name: String,
    /// The format in which blocks travel.
    pub wire: Wire,
    /// The most that a packet carries; a multiple of 64.
    pub payload_bytes: usize,
    /// Smaller all-reduces go among the ranks.
    pub min_bytes: u64,
    /// What is not urgent waits while somebody else of this host sends what is, in the ways of processes that share memory.
    pub gives_way: bool,
    /// The servers, in the order of the sockets.
    pub servers: Vec<ServerSpec>,
}

/// The channels of a client's group.
#[derive(Debug)]
pub(crate) struct Channels {
    /// The one whose all-reduces the client takes, without the client.
    pub(crate) group: Channel,
    /// A vigil: a rank that finds a server dead ends it with that reason, so that all ranks know at once, and it ends when a rank
    /// leaves.
    pub(crate) alarm: Channel,
    /// Carries operations after a server has died.
    pub(crate) fallback: Channel,
}

/// A node to which packets are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeSpec {
    /// The address of its first shard.
    pub address: SocketAddr,
    /// How many shards it has, on consecutive ports: SeqNum s goes to shard s mod this. A power of two.
    pub shards: u16,
}

/// A server, and the job on it.
#[derive(Clone, Debug)]
pub struct ServerSpec {
    /// The address on which it listens.
    pub address: SocketAddr,
    /// Its part of each tensor, as a weight.
    pub weight: u32,
    /// The aggregator to which this rank pushes; `None`: the server itself.
    pub parent: Option<NodeSpec>,
    /// This rank's name there: a bit for its place among the children; with [`Wire::Padded`] a bit for its rank.
    pub name: u64,
    /// The job's number.
    pub job: u32,
    /// Counts the lives of the job.
    pub epoch: u16,
    /// The job's key; `None` on a trusted network.
    pub key: Option<[u8; 16]>,
    /// Blocks in flight, a power of two.
    pub window: u32,
    /// The first SeqNum of the epoch.
    pub start: u32,
}

/// Counters of a client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientStats {
    /// Operations that have ended through the servers.
    pub operations: u64,
    /// Bytes of these operations' tensors.
    pub bytes: u64,
    /// Operations that went among the ranks, or ended there, since the fallback.
    pub fallback_operations: u64,
    /// Why all operations go among the ranks now; `None`: they do not.
    pub fallback: Option<String>,
    /// The servers.
    pub servers: Vec<ServerStats>,
}

/// Counters of one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerStats {
    /// The address on which it listens.
    pub address: SocketAddr,
    /// The aggregator to which this rank pushes, if any.
    pub parent: Option<SocketAddr>,
    /// Whether that aggregator is bypassed at present.
    pub is_direct: bool,
    /// How often it was bypassed.
    pub bypasses: u64,
    /// Blocks that were sent for the first time.
    pub pushed: u64,
    /// Blocks that were sent again.
    pub pushed_again: u64,
    /// Results that were requested.
    pub requested: u64,
    /// Results that came.
    pub results: u64,
    /// Packets that had no effect.
    pub refused: u64,
    /// Packets that came to this rank's socket from another address than its server's and its aggregator's.
    pub unauthenticated: u64,
    /// Bytes of datagrams that were sent, without headers of UDP and below.
    pub sent_bytes: u64,
    /// Bytes of datagrams that came, without these headers.
    pub received_bytes: u64,
    /// The smoothed round trip, in nanoseconds.
    pub round_trip_ns: u64,
}

/// A group's client: its large all-reduces go through aggregators and servers.
#[derive(Debug)]
pub(crate) struct Client {
    shared: Arc<Shared>,
    rank: u32,
    min_bytes: u64,
    /// The tuner has chosen another algorithm.
    bypassed: AtomicBool,
}

/// State that callers share with the client's thread.
#[derive(Debug)]
struct Shared {
    mailbox: Mutex<Mailbox>,
    waker: Waker,
    pending: Pending,
    stats: Mutex<ClientStats>,
}

/// Operations that have not ended, and some that have.
///
/// Why not a counter that a callback of the ticket decreases? A caller that waits for a ticket wakes before the ticket's
/// callbacks have run. A rank that left then would tell the others that it had left while operations were running.
#[derive(Debug, Default)]
struct Pending(Mutex<Vec<Ticket>>);

impl Pending {
    fn add(&self, ticket: &Ticket) {
        let mut tickets = self.tickets();
        tickets.retain(|each| each.result().is_none());
        tickets.push(ticket.clone());
    }

    fn is_any(&self) -> bool {
        self.tickets().iter().any(|each| each.result().is_none())
    }

    fn tickets(&self) -> MutexGuard<'_, Vec<Ticket>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[derive(Debug, Default)]
struct Mailbox {
    commands: Vec<Command>,
    /// Set when the thread reads no more commands.
    closed: Option<Failure>,
}

impl Client {
    /// Starts the thread.
    pub(crate) fn start_thread(
        channels: Channels,
        sockets: Sockets,
        spec: ClientSpec,
        recorder: Recorder,
    ) -> Result<Client, Failure> {
        let config = |error: io::Error| {
            Failure::of_call(FailureKind::Config, format!("cannot start the thread for aggregation: {error}."))
        };
        let shared = Arc::new(Shared {
            mailbox: Mutex::default(),
            waker: Waker::new().map_err(config)?,
            pending: Pending::default(),
            stats: Mutex::default(),
        });
        let client = Client {
            shared: shared.clone(),
            rank: spec.rank,
            min_bytes: spec.min_bytes,
            bypassed: AtomicBool::new(false),
        };
        let driver = Driver::new(shared, channels, sockets.0, spec, recorder);
        std::thread::Builder::new().name("penstock-udp".into()).spawn(move || driver.run()).map_err(config)?;
        Ok(client)
    }

    /// Whether an operation goes through the servers; the same on all ranks.
    pub(crate) fn takes(&self, call: &Call) -> bool {
        call.collective == Collective::AllReduce
            && call.bytes >= self.min_bytes
            && matches!(call.dtype, DType::F32 | DType::F16 | DType::BF16)
            && matches!(call.op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_))
            && !self.bypassed.load(Ordering::Relaxed)
    }

    pub(crate) fn start(&self, call: Call, ticket: Ticket) {
        self.shared.pending.add(&ticket);
        self.shared.post(Command::Start(call, ticket.clone()), Some(&ticket));
    }

    pub(crate) fn release(&self, ticket: &Ticket) {
        self.shared.post(Command::Release(ticket.clone()), None);
    }

    pub(crate) fn reprioritise(&self, ticket: &Ticket, priority: Priority) {
        self.shared.post(Command::Reprioritise(ticket.clone(), priority), None);
    }

    pub(crate) fn retune(&self, algorithm: Option<Algorithm>) {
        let other = algorithm.is_some_and(|algorithm| algorithm != Algorithm::Aggregated);
        self.bypassed.store(other, Ordering::Relaxed);
    }

    /// The group is being left. Returns why it fails, if operations are running.
    pub(crate) fn left(&self) -> Option<Failure> {
        let message = format!("rank {} destroyed the group while operations were running.", self.rank);
        self.shared.pending.is_any().then(|| Failure::fatal(FailureKind::Closed, message))
    }

    /// A caller waits no longer. Returns why the group fails, if operations are running.
    pub(crate) fn expired(&self, waited: Duration) -> Option<Failure> {
        let message =
            format!("Timed out after {:.1} s: rank {} has given up waiting.", waited.as_secs_f64(), self.rank);
        self.shared.pending.is_any().then(|| Failure::fatal(FailureKind::Timeout, message))
    }

    /// Ends the thread, without waiting for it.
    pub(crate) fn stop(&self) {
        self.shared.post(Command::Stop, None);
    }

    pub(crate) fn stats(&self) -> ClientStats {
        self.shared.stats().clone()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn post(&self, command: Command, ticket: Option<&Ticket>) {
        let refused = match check_fork() {
            Err(failure) => Some(failure),
            Ok(()) => {
                let mut mailbox = self.mailbox();
                if mailbox.closed.is_none() {
                    mailbox.commands.push(command);
                }
                mailbox.closed.clone()
            }
        };
        match (refused, ticket) {
            (Some(failure), Some(ticket)) => ticket.complete(Err(failure)),
            (Some(_), None) => {}
            (None, _) => self.waker.wake(),
        }
    }

    fn mailbox(&self) -> MutexGuard<'_, Mailbox> {
        self.mailbox.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn stats(&self) -> MutexGuard<'_, ClientStats> {
        self.stats.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// A caller that has waited for an operation and leaves at once leaves nothing running, however late the ticket's
    /// callbacks are.
    #[test]
    fn what_was_waited_for_is_not_pending() {
        let (pending, ticket) = (Pending::default(), Ticket::default());
        let (release, released) = mpsc::channel();
        ticket.on_done(move |_| released.recv().expect("the test sends, or has failed"));
        pending.add(&ticket);
        assert!(pending.is_any());
        std::thread::scope(|scope| {
            scope.spawn(|| ticket.complete(Ok(())));
            assert_eq!(ticket.wait(None), Some(Ok(())));
            let is_any = pending.is_any();
            release.send(()).expect("the callback waits");
            assert!(!is_any);
        });
        pending.add(&Ticket::default());
        assert!(pending.is_any());
        assert_eq!(pending.tickets().len(), 1, "what has ended is forgotten");
    }
}
