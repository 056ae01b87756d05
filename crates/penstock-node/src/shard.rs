//! A shard: one thread and one socket. It receives trains, hands them to a machine of the protocol, and sends that one's
//! packets.
//!
//! Back-pressure: while the send buffer is full, the shard receives nothing, so what waits to be sent is at most the result of
//! one batch. Meanwhile the kernel's receive buffer fills. Packets for which it has no room are lost *before* any work is
//! spent on them; the workers send them again, and send nothing beyond Credit.

mod adding;
mod passing;
mod serving;

use crate::admission::{Admitted, Common, Listed};
use crate::report::{NodeReport, Report, Which};
use crate::streams::Streamed;
use crate::work::{self, Ended, Work};
use adding::Adding;
use penstock_aggregation::{Endpoint, HEADER_BYTES, Key, Limits, PacketError, Receipt, Shard, decode};
use penstock_net::datagrams::{Datagrams, Outbox, Train};
use penstock_types::{SECOND, Time};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::OwnedFd;
use serving::Serving;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

/// A command to a shard, which it handles between batches.
pub(crate) enum Command {
    /// Open a job, or its next epoch.
    Open(Box<Admitted>, SyncSender<Result<(), Refused>>),
    /// Close a job, for this reason.
    Close(u32, String, SyncSender<()>),
    /// Report the counters, and those of some jobs.
    Report(Which, SyncSender<Report>),
    /// The work behind a buffer has ended.
    Done(Ended),
    /// A worker behind a stream pushes or pulls the buffer of this name.
    Stream(String, Streamed),
    /// End the thread.
    Stop,
}

impl Command {
    /// The shard has ended: who waits for this one hears that.
    pub(crate) fn refuse(self) {
        if let Command::Stream(_, call) = self {
            call.refuse(ENDED.into());
        }
    }
}

pub(crate) const ENDED: &str = "the server has ended: connect to the next one and open a new epoch";

pub(crate) fn epoch_is_over(job: u32, epoch: u16) -> String {
    format!("epoch {epoch} of job {job} is over")
}

/// Why a job cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The request is invalid.
    Malformed(String),
    /// There is no room, or a newer epoch is open.
    Conflict(String),
}

/// The way to a shard, for other threads.
#[derive(Clone, Debug)]
pub(crate) struct Mailbox {
    sender: Sender<Command>,
    wake: Arc<OwnedFd>,
}

impl Mailbox {
    /// Sends a command. Returns it if the shard has ended.
    pub(crate) fn send(&self, command: Command) -> Option<Command> {
        let sent = self.sender.send(command);
        // A full counter wakes the thread as well.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        sent.err().map(|error| error.0)
    }
}

/// A running shard.
pub(crate) struct Handle {
    mailbox: Mailbox,
    thread: Option<JoinHandle<()>>,
}

impl Handle {
    /// Sends a command. Returns it if the shard has ended.
    pub(crate) fn send(&self, command: Command) -> Option<Command> {
        self.mailbox.send(command)
    }

    pub(crate) fn join(&mut self) {
        self.send(Command::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("penstock: a shard's thread panicked: this is a bug");
        }
    }
}

/// A shard's configuration.
pub(crate) struct Settings {
    pub(crate) shard: Shard,
    pub(crate) limits: Limits,
    pub(crate) drop: Option<(f64, u64)>,
    /// The key of receipts: the shard sends only to addresses that have shown that they receive. `None`: to all addresses.
    pub(crate) receipts: Option<Key>,
}

/// Starts an aggregator's shard on a bound socket.
pub(crate) fn start_adding(socket: Datagrams, settings: &Settings) -> io::Result<Handle> {
    start(socket, settings, |_| Adding::new(settings))
}

/// Starts a server's only shard on a bound socket, and the thread that works on what it accepts.
pub(crate) fn start_serving(socket: Datagrams, settings: &Settings, work: Box<dyn Work>) -> io::Result<Handle> {
    let worker = work::start(work)?;
    start(socket, settings, |mailbox| Serving::new(settings, worker, mailbox))
}

/// Starts a loop that passes on the datagrams of `from`, for measurements.
pub(crate) fn start_passing(
    socket: Datagrams,
    settings: &Settings,
    from: SocketAddr,
    to: SocketAddr,
) -> io::Result<Handle> {
    start(socket, settings, |_| passing::Passing { from, to })
}

/// What a shard's thread does with datagrams.
trait Machine: Send + 'static {
    /// Handles some datagrams from one address.
    fn train(&mut self, now: Time, train: Train<'_>, outbox: &mut Outbox<'_>);
    /// When [`Machine::send`] is due if nothing comes.
    fn timeout(&self) -> Option<Time>;
    /// Called after every batch, and when the time-out is due: sends through the socket until it is blocked.
    fn send(&mut self, now: Time, socket: &mut Datagrams);
    fn open(&mut self, now: Time, job: Admitted) -> Result<(), Refused>;
    fn close(&mut self, job: u32, why: &str);
    /// The shard is about to end.
    fn end(&mut self) {}
    /// The work behind a buffer has ended.
    fn done(&mut self, _now: Time, _ended: Ended) {}
    /// A worker behind a stream asks this.
    fn stream(&mut self, _now: Time, _name: &str, call: Streamed) {
        call.refuse("this is no server, and has no sums".into());
    }
    /// The counters, except the socket's.
    fn report(&self, now: Time, which: &Which) -> Report;
}

fn start<M: Machine>(socket: Datagrams, settings: &Settings, machine: impl FnOnce(Mailbox) -> M) -> io::Result<Handle> {
    let (sender, receiver) = channel();
    let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let mailbox = Mailbox { sender, wake: Arc::clone(&wake) };
    let machine = machine(mailbox.clone());
    let index = settings.shard.index;
    let thread = std::thread::Builder::new()
        .name(format!("penstock-shard{index}"))
        .spawn(move || run(machine, socket, &receiver, &wake, index))?;
    Ok(Handle { mailbox, thread: Some(thread) })
}

fn run<M: Machine>(mut machine: M, mut socket: Datagrams, mailbox: &Receiver<Command>, wake: &OwnedFd, index: u32) {
    let start = Instant::now();
    let clock = || Time(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    let (mut complaints, mut other_releases) = (Complaints::default(), Complaints::default());
    loop {
        while let Ok(command) = mailbox.try_recv() {
            let now = clock();
            // The thread that asked may have ended.
            match command {
                Command::Open(job, answer) => drop(answer.send(machine.open(now, *job))),
                Command::Close(job, why, answer) => {
                    machine.close(job, &why);
                    let _ = answer.send(());
                }
                Command::Report(which, answer) => {
                    let mut report = machine.report(now, &which);
                    report.socket = *socket.counters();
                    report.kernel_dropped = socket.kernel_dropped().unwrap_or(0);
                    let _ = answer.send(report);
                }
                Command::Done(ended) => machine.done(now, ended),
                Command::Stream(name, call) => machine.stream(now, &name, call),
                Command::Stop => {
                    machine.end();
                    for command in mailbox.try_iter() {
                        command.refuse();
                    }
                    return;
                }
            }
        }
        let now = clock();
        let came = if socket.is_blocked() {
            0
        } else {
            let received = socket.exchange(|train, outbox| {
                // The sender gets no answer, so the reason is written to the daemon's log.
                if let Some(Err(error @ PacketError::Version(_))) = train.datagrams().next().map(decode) {
                    other_releases.tell(now, || format!("shard {index} refused {error}. It came from {}", train.from));
                }
                machine.train(now, train, outbox);
            });
            received.unwrap_or_else(|error| {
                complaints.tell(now, || format!("shard {index} cannot receive: {error}"));
                0
            })
        };
        machine.send(now, &mut socket);
        if let Err(error) = socket.flush() {
            complaints.tell(now, || {
                let hint = if error.raw_os_error() == Some(rustix::io::Errno::MSGSIZE.raw_os_error()) {
                    ": blocks are longer than the MTU allows; open the job with a smaller block_bytes"
                } else {
                    ""
                };
                format!("shard {index} could not send a packet: {error}{hint}")
            });
        }
        if came == 0 || socket.is_blocked() {
            wait(&socket, wake, machine.timeout().map(|at| at.since(clock())));
        }
    }
}

/// Waits until a datagram can be received (or, if sending is blocked, sent), another thread wakes this one, or the time is
/// over.
fn wait(socket: &Datagrams, wake: &OwnedFd, timeout: Option<u64>) {
    let interest = if socket.is_blocked() { PollFlags::OUT } else { PollFlags::IN };
    let mut fds = [PollFd::new(socket, interest), PollFd::new(wake, PollFlags::IN)];
    let limit = timeout.map(|ns| rustix::time::Timespec {
        tv_sec: i64::try_from(ns / SECOND).unwrap_or(i64::MAX),
        tv_nsec: (ns % SECOND) as _,
    });
    // An interrupted wait is a short one.
    let _ = poll(&mut fds, limit.as_ref());
    if fds[1].revents().contains(PollFlags::IN) {
        let _ = rustix::io::read(wake, &mut [0; 8]);
    }
}

/// Limits warnings that could come with every packet to one line a minute.
#[derive(Default)]
struct Complaints {
    next: Option<Time>,
    untold: u64,
}

impl Complaints {
    fn tell(&mut self, now: Time, message: impl FnOnce() -> String) {
        if self.next.is_some_and(|next| now < next) {
            self.untold += 1;
            return;
        }
        let before = std::mem::take(&mut self.untold);
        let more = if before > 0 { format!(" ({before} more since the last such line)") } else { String::new() };
        log::warn!("penstock: {}{more}", message());
        self.next = Some(now.plus(60 * SECOND));
    }
}

/// Discards received datagrams, for tests: the same ones for the same seed and order of arrival.
struct Loss {
    /// A draw below this is a loss; a share of 2^64.
    threshold: u64,
    state: u64,
    lost: u64,
}

impl Loss {
    fn new(drop: Option<(f64, u64)>, shard: Shard) -> Loss {
        let (rate, seed) = drop.unwrap_or((0.0, 0));
        Loss { threshold: (rate * 2f64.powi(64)) as u64, state: seed ^ u64::from(shard.index) << 56, lost: 0 }
    }

    fn strikes(&mut self) -> bool {
        if self.threshold == 0 {
            return false;
        }
        // SplitMix64 (Steele, Lea and Flood, 2014).
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        let strikes = z ^ z >> 31 < self.threshold;
        self.lost += u64::from(strikes);
        strikes
    }
}

/// A node of a job, with its counters.
#[derive(Clone, Debug)]
struct Known {
    listed: Listed,
    packets: u64,
    bytes: u64,
    counters: penstock_aggregation::JobCounters,
    heard: Option<Time>,
    /// Whether the node has shown that it receives packets, or need not.
    receives: bool,
    /// A packet was not sent to it, since it is not known to receive any, and it was not asked since.
    is_owed: bool,
}

impl Known {
    /// The nodes of a job; `receive`: they need not show that they receive packets.
    fn all(job: &Admitted, receive: bool) -> Vec<Known> {
        job.nodes
            .iter()
            .map(|listed| Known {
                listed: listed.clone(),
                packets: 0,
                bytes: 0,
                counters: Default::default(),
                heard: None,
                receives: receive,
                is_owed: false,
            })
            .collect()
    }

    /// The number of the next node, after `last`, that is not known to receive packets and of which `is_meant` holds. One is asked for
    /// each packet that has come: to nodes that have not answered, no more packets leave than come.
    fn next_to_ask(nodes: &[Known], last: usize, is_meant: impl Fn(usize) -> bool) -> Option<usize> {
        let mut others = (1..=nodes.len()).map(|step| (last + step) % nodes.len());
        others.find(|number| !nodes[*number].receives && is_meant(*number))
    }

    /// The address at which the node takes SeqNum `seq`.
    fn at(&self, seq: u32) -> SocketAddr {
        self.listed.address.of(seq)
    }

    fn report(&self, now: Time) -> NodeReport {
        NodeReport {
            address: self.listed.address.first,
            kind: self.listed.kind.name(),
            workers: self.listed.workers.clone(),
            packets: self.packets,
            bytes: self.bytes,
            counters: self.counters,
            silent_ns: self.heard.map(|heard| now.since(heard)),
            receives: self.receives,
        }
    }
}

/// Sends receipts, by which addresses show that they receive packets (see [`Receipt`]), if the daemon lets everybody open
/// jobs.
struct Door(Option<Key>);

impl Door {
    /// Whether no address has to show that it receives packets.
    fn is_open(&self) -> bool {
        self.0.is_none()
    }

    /// The receipt for an address; `None`: it need not show that it receives packets.
    fn ask(&self, job: &Common, to: SocketAddr) -> Option<[u8; HEADER_BYTES]> {
        let key = self.0.as_ref()?;
        let asked = Receipt::number(key, job.job, job.epoch, &to);
        Some(Receipt { job: job.job, epoch: job.epoch, returned: 0, asked }.encode())
    }

    /// Handles a receipt from a node of the job; returns the answer.
    fn take(&self, job: &Common, from: SocketAddr, node: &mut Known, datagram: &[u8]) -> Option<[u8; HEADER_BYTES]> {
        let receipt = Receipt::decode(datagram).filter(|receipt| receipt.epoch == job.epoch)?;
        let number = self.0.as_ref().map(|key| Receipt::number(key, job.job, job.epoch, &from));
        node.receives |= number.is_some_and(|number| number == receipt.returned);
        // One packet for one: a node that is not known to receive packets is asked in the answer to its own receipt.
        let asked = number.filter(|_| !node.receives).unwrap_or(0);
        receipt.answer().map(|answer| Receipt { asked, ..answer }.encode())
    }
}

/// The endpoint of packets from addresses that are in no job.
const UNAUTHENTICATED: Endpoint = Endpoint(u32::MAX);

/// The job that a datagram claims to belong to: bytes 4 to 7 of a packet.
fn job_of(datagram: &[u8]) -> Option<u32> {
    datagram.get(4..8).map(|bytes| u32::from_be_bytes(bytes.try_into().expect("4 bytes")))
}

#[cfg(test)]
#[path = "shard_tests.rs"]
mod tests;
