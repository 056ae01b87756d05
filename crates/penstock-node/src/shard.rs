//! One thread, one socket: receives trains, asks a machine of the protocol, sends what it says.
//!
//! Back-pressure: while the send buffer is full nothing is received, so what waits to be sent is at most what one batch led to. Meanwhile
//! the kernel's receive buffer fills, and what it has no room for is lost *before* anybody has worked on it, and sent again by
//! the workers, who send nothing beyond Credit.

mod adding;
mod passing;
mod serving;

use crate::admission::{Admitted, Common};
use crate::report::{NodeReport, Report};
use adding::Adding;
use penstock_aggregation::{HEADER_BYTES, Key, Limits, Link, PacketError, Receipt, Shard, decode};
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

/// What reaches a shard from outside, between batches.
pub(crate) enum Command {
    /// Open a job, or its next epoch.
    Open(Box<Admitted>, SyncSender<Result<(), Refused>>),
    /// Forget a job.
    Close(u32, SyncSender<()>),
    /// Tell what was counted.
    Report(SyncSender<Report>),
    /// End.
    Stop,
}

/// Why a job cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The request makes no sense.
    Malformed(String),
    /// There is no room, or something newer.
    Conflict(String),
}

/// A running shard, seen from outside.
pub(crate) struct Handle {
    mailbox: Sender<Command>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Handle {
    /// False when the shard is gone.
    pub(crate) fn send(&self, command: Command) -> bool {
        let sent = self.mailbox.send(command).is_ok();
        // A full counter wakes as well.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        sent
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

/// What a shard is told when it starts.
pub(crate) struct Settings {
    pub(crate) shard: Shard,
    pub(crate) limits: Limits,
    pub(crate) drop: Option<(f64, u64)>,
    /// Send to addresses only that have shown that they receive, by numbers made with this key.
    pub(crate) receipts: Option<Key>,
}

/// Starts an aggregator's shard on a bound socket.
pub(crate) fn start_adding(socket: Datagrams, settings: &Settings) -> io::Result<Handle> {
    start(socket, settings, Adding::new(settings))
}

/// Starts a server's only shard on a bound socket.
pub(crate) fn start_serving(socket: Datagrams, settings: &Settings) -> io::Result<Handle> {
    start(socket, settings, Serving::new(settings))
}

/// Starts a loop that passes on what comes from `from`, for measurements.
pub(crate) fn start_passing(
    socket: Datagrams,
    settings: &Settings,
    from: SocketAddr,
    to: SocketAddr,
) -> io::Result<Handle> {
    start(socket, settings, passing::Passing { from, to })
}

/// What a thread does with what it receives.
trait Machine: Send + 'static {
    /// Some datagrams from one address.
    fn train(&mut self, now: Time, train: Train<'_>, outbox: &mut Outbox<'_>);
    /// When [`Machine::send`] is due although nothing comes.
    fn timeout(&self) -> Option<Time>;
    /// After every batch, and when the time-out is due: puts what there is to send into the socket until it is blocked.
    fn send(&mut self, now: Time, socket: &mut Datagrams);
    fn open(&mut self, now: Time, job: Admitted) -> Result<(), Refused>;
    fn close(&mut self, job: u32);
    /// Without what the socket has counted.
    fn report(&self, now: Time) -> Report;
}

fn start<M: Machine>(socket: Datagrams, settings: &Settings, machine: M) -> io::Result<Handle> {
    let (mailbox, receiver) = channel();
    let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let wake_there = Arc::clone(&wake);
    let index = settings.shard.index;
    let thread = std::thread::Builder::new()
        .name(format!("penstock-shard{index}"))
        .spawn(move || run(machine, socket, &receiver, &wake_there, index))?;
    Ok(Handle { mailbox, wake, thread: Some(thread) })
}

fn run<M: Machine>(mut machine: M, mut socket: Datagrams, mailbox: &Receiver<Command>, wake: &OwnedFd, index: u32) {
    let start = Instant::now();
    let clock = || Time(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    let (mut complaints, mut other_releases) = (Complaints::default(), Complaints::default());
    loop {
        while let Ok(command) = mailbox.try_recv() {
            let now = clock();
            // Who asked may have gone.
            match command {
                Command::Open(job, answer) => drop(answer.send(machine.open(now, *job))),
                Command::Close(job, answer) => {
                    machine.close(job);
                    let _ = answer.send(());
                }
                Command::Report(answer) => {
                    let mut report = machine.report(now);
                    report.socket = *socket.counters();
                    report.kernel_dropped = socket.kernel_dropped().unwrap_or(0);
                    let _ = answer.send(report);
                }
                Command::Stop => return,
            }
        }
        let now = clock();
        let came = if socket.is_blocked() {
            0
        } else {
            let received = socket.exchange(|train, outbox| {
                // Its sender gets no answer, so the daemon's log is where the reason can be seen.
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

/// Until something can be received (or, where sending is blocked, sent), somebody wakes us, or so many nanoseconds have passed.
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

/// One line a minute about what may happen with every packet.
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

/// Throws received datagrams away, for tests: the same ones for the same seed and the same order of arrival.
struct Loss {
    /// Below it a draw is a loss, as a share of 2^64.
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

/// A node of a job, and what came from it.
#[derive(Clone, Debug)]
struct Known {
    place: crate::admission::Place,
    workers: u64,
    packets: u64,
    bytes: u64,
    counters: penstock_aggregation::JobCounters,
    heard: Option<Time>,
    /// It has shown that it receives, or need not.
    receives: bool,
}

impl Known {
    /// `receive`: what is sent to them need not be asked for.
    fn all(job: &Admitted, receive: bool) -> Vec<Known> {
        let nodes = job.places.iter().zip(&job.workers);
        nodes
            .map(|(place, workers)| Known {
                place: *place,
                workers: *workers,
                packets: 0,
                bytes: 0,
                counters: Default::default(),
                heard: None,
                receives: receive,
            })
            .collect()
    }

    fn report(&self, now: Time) -> NodeReport {
        NodeReport {
            address: self.place.address,
            workers: self.workers,
            packets: self.packets,
            bytes: self.bytes,
            counters: self.counters,
            silent_ns: self.heard.map(|heard| now.since(heard)),
            receives: self.receives,
        }
    }
}

/// Asks addresses to show that they receive (see [`Receipt`]), where a daemon lets everybody open jobs.
struct Door(Option<Key>);

impl Door {
    /// Whether everybody is taken to receive.
    fn is_open(&self) -> bool {
        self.0.is_none()
    }

    /// What asks an address; `None`: nobody is asked.
    fn ask(&self, job: &Common, to: SocketAddr) -> Option<[u8; HEADER_BYTES]> {
        let key = self.0.as_ref()?;
        let asked = Receipt::number(key, job.job, job.epoch, &to);
        Some(Receipt { job: job.job, epoch: job.epoch, returned: 0, asked }.encode())
    }

    /// Takes a receipt that came from a node of the job; returns what to answer it.
    fn take(&self, job: &Common, from: SocketAddr, node: &mut Known, datagram: &[u8]) -> Option<[u8; HEADER_BYTES]> {
        let receipt = Receipt::decode(datagram).filter(|receipt| receipt.epoch == job.epoch)?;
        let number = self.0.as_ref().map(|key| Receipt::number(key, job.job, job.epoch, &from));
        node.receives |= number.is_some_and(|number| number == receipt.returned);
        // One packet for one: who asks and is not known to receive is asked in the answer.
        let asked = number.filter(|_| !node.receives).unwrap_or(0);
        receipt.answer().map(|answer| Receipt { asked, ..answer }.encode())
    }
}

/// The number of whoever is at no address of a job.
const STRANGER: Link = Link(u32::MAX);

/// Which job a datagram claims to be of: bytes 4 to 7 of a packet.
fn job_of(datagram: &[u8]) -> Option<u32> {
    datagram.get(4..8).map(|bytes| u32::from_be_bytes(bytes.try_into().expect("4 bytes")))
}

#[cfg(test)]
#[path = "shard_tests.rs"]
mod tests;
