//! The client's thread: makes system calls for the core, and turns the core's errors into failures of the group.

mod fallback;

use super::shares::Shares;
use super::{Channels, ClientSpec, ClientStats, NodeSpec, ServerSpec, ServerStats, Shared};
use crate::Ticket;
use crate::recorder::{Entry, Record, Recorder};
use crate::runtime::Call;
use penstock_aggregation::client::{AllReduce, Core, CoreConfig, Lack, PARENT, SERVER, Trouble, Wire};
use penstock_aggregation::{Endpoint, Key, Receipt, Serial, Timing, WorkerConfig};
use penstock_net::arbiter::{Arbiter, CLAIM};
use penstock_net::datagrams::Datagrams;
use penstock_plan::Algorithm;
use penstock_stream::fingerprint::Fingerprint;
use penstock_stream::peer::Urgency;
use penstock_types::{Failure, FailureKind, MILLISECOND, Priority, SECOND, Time};
use std::any::Any;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Commands from other threads.
#[derive(Debug)]
pub(super) enum Command {
    Start(Call, Ticket),
    /// The tensor of an operation that was started with [`Call::hold`] is ready.
    Release(Ticket),
    Reprioritise(Ticket, Priority),
    /// The group has failed.
    Failed(Failure),
    /// The alarm has ended: a server is lost ([`SERVER_LOST`]), or a rank has left.
    Alarm(Failure),
    Stop,
}

/// The failure kind by which the alarm reports that a server is lost. Nothing else ends that channel alone with a time-out.
const SERVER_LOST: FailureKind = FailureKind::Timeout;
/// Batches that are read from one socket before the next one has its turn.
const BATCHES: usize = 4;
/// How many bypasses of each server are logged as warnings.
const BYPASSES_TOLD: u64 = 3;
/// How often a claim is renewed that lasts 1.5 ms.
const CLAIM_EVERY: u64 = MILLISECOND;
/// How often counters are published while packets flow.
const PUBLISH_EVERY: u64 = SECOND / 10;

pub(super) struct Driver {
    shared: Arc<Shared>,
    channels: Channels,
    spec: ClientSpec,
    recorder: Recorder,
    sockets: Vec<Datagrams>,
    core: Core,
    shares: Shares,
    epoch: Instant,
    /// Operations that have not ended, in the group's order, from number `first`.
    running: VecDeque<Running>,
    first: u64,
    troubles: Troubles,
    stopped: bool,
    payload: Vec<u8>,
    published: Time,
    /// By server.
    seen: Vec<Seen>,
    yielding: Yielding,
}

/// The host's card is shared: who waits for whom.
struct Yielding {
    arbiter: Arbiter,
    /// When to look again: until then no block leaves for the first time, or the claim has to be renewed.
    next: Option<Time>,
    /// Until when more is to be expected of what others send urgently.
    expected: Time,
}

/// What keeps operations from ending.
#[derive(Default)]
struct Troubles {
    /// Why the group has failed.
    failed: Option<Failure>,
    /// A rank has left the group: operations that it has not issued never end.
    departed: Option<Failure>,
    /// Another rank reports that a server is lost.
    alarmed: Option<String>,
}

/// What was seen of a server, and told.
#[derive(Clone, Default)]
struct Seen {
    /// Its aggregators are bypassed.
    is_direct: bool,
    is_refusal_told: bool,
    /// Packets from unknown addresses on its socket.
    unauthenticated: u64,
}

struct Running {
    ticket: Ticket,
    all_reduce: AllReduce,
    fingerprint: Fingerprint,
    priority: Priority,
    /// The owner of the tensor.
    keep: Option<Box<dyn Any + Send>>,
    recorded: Entry,
}

impl Driver {
    pub(super) fn new(
        shared: Arc<Shared>,
        channels: Channels,
        sockets: Vec<Datagrams>,
        spec: ClientSpec,
        recorder: Recorder,
    ) -> Driver {
        let worker = |server: &ServerSpec| WorkerConfig {
            job: server.job,
            epoch: server.epoch,
            key: server.key.map(Key),
            name: server.name,
            window: server.window,
            start: Serial(server.start),
            parent: if server.parent.is_some() { PARENT } else { SERVER },
            server: SERVER,
            // Packets of one length are for switches, which keep no results and add no floats.
            ask_parent: spec.wire != Wire::Padded,
            full_to_parent: server.parent.is_some() && spec.wire != Wire::Padded,
            apart: false,
            timing: Timing::default(),
        };
        let config = CoreConfig { world: spec.world, wire: spec.wire, payload_bytes: spec.payload_bytes };
        let core = Core::new(Time(0), config, spec.servers.iter().map(worker).collect());
        let weights: Vec<u32> = spec.servers.iter().map(|server| server.weight).collect();
        let shares = Shares::new(spec.rank, spec.world, &weights);
        shared.stats().servers = spec
            .servers
            .iter()
            .map(|server| ServerStats {
                address: server.address,
                parent: server.parent.map(|parent| parent.address),
                is_direct: false,
                bypasses: 0,
                pushed: 0,
                pushed_again: 0,
                requested: 0,
                results: 0,
                refused: 0,
                unauthenticated: 0,
                sent_bytes: 0,
                received_bytes: 0,
                round_trip_ns: 0,
            })
            .collect();
        Driver {
            seen: vec![Seen::default(); spec.servers.len()],
            yielding: Yielding {
                arbiter: if spec.gives_way { Arbiter::of_this_host() } else { Arbiter::none() },
                next: None,
                expected: Time(0),
            },
            troubles: Troubles::default(),
            payload: vec![0; spec.payload_bytes],
            shared,
            channels,
            spec,
            recorder,
            sockets,
            core,
            shares,
            epoch: Instant::now(),
            running: VecDeque::new(),
            first: 0,
            stopped: false,
            published: Time(0),
        }
    }

    pub(super) fn run(mut self) {
        self.listen();
        let lost = loop {
            if let Some(reason) = self.turn() {
                break reason;
            }
            if self.stopped {
                return;
            }
        };
        if self.fall_back(&lost) {
            self.forward();
        }
    }

    /// Subscribes to the end of the group, to ranks that leave, and to servers that other ranks have lost.
    fn listen(&self) {
        let watch = Ticket::default();
        let (shared, fallback) = (self.shared.clone(), self.channels.fallback.clone());
        watch.on_done(move |result| {
            let failure = result.clone().expect_err("a watch ends with a failure");
            // Waits on the fallback end with it.
            fallback.end(failure.clone());
            shared.post(Command::Failed(failure), None);
        });
        self.channels.group.watch(watch);
        let (alarmed, shared) = (Ticket::default(), self.shared.clone());
        alarmed.on_done(move |result| {
            shared.post(Command::Alarm(result.clone().expect_err("a watch ends with a failure")), None);
        });
        self.channels.alarm.watch(alarmed);
    }

    /// One round of all work. Returns the reason if a server is lost.
    fn turn(&mut self) -> Option<String> {
        self.take_commands();
        if self.has_ended() {
            self.wait(self.troubles.failed.is_some());
            return None;
        }
        self.receive();
        // Operations that have failed have given their tensors back, and the core still has them.
        if self.has_ended() {
            return None;
        }
        let now = self.now();
        self.core.handle_timeout(now);
        self.give_way(now);
        self.transmit(now);
        self.settle();
        if self.has_ended() {
            return None;
        }
        self.judge(now);
        if let Some(lost) = self.lost(now) {
            return Some(lost);
        }
        if now.since(self.published) >= PUBLISH_EVERY {
            self.published = now;
            self.publish();
        }
        self.wait(false);
        None
    }

    fn has_ended(&self) -> bool {
        self.stopped || self.troubles.failed.is_some()
    }

    fn take_commands(&mut self) {
        let commands = std::mem::take(&mut self.shared.mailbox().commands);
        for command in commands {
            match command {
                Command::Start(call, ticket) => self.start(call, ticket),
                Command::Release(ticket) => {
                    if let Some(at) = self.running.iter().position(|running| running.ticket.is(&ticket)) {
                        self.running[at].all_reduce.ready = true;
                        self.core.release(self.first + at as u64);
                    }
                }
                Command::Reprioritise(ticket, priority) => {
                    if let Some(running) = self.running.iter_mut().find(|running| running.ticket.is(&ticket)) {
                        running.priority = priority;
                    }
                }
                Command::Failed(failure) => self.fail(failure),
                Command::Alarm(failure) if failure.kind == SERVER_LOST => {
                    self.troubles.alarmed.get_or_insert(failure.message);
                }
                Command::Alarm(failure) => {
                    self.troubles.departed.get_or_insert(failure);
                }
                Command::Stop => {
                    self.fail(Failure::fatal(FailureKind::Closed, "the group was destroyed."));
                    self.stopped = true;
                }
            }
        }
    }

    fn start(&mut self, call: Call, ticket: Ticket) {
        if let Some(failure) = &self.troubles.failed {
            return ticket.complete(Err(failure.of_later(&format!("aggregated {}", call.fingerprint.describe()))));
        }
        let all_reduce = AllReduce {
            dtype: call.dtype,
            op: call.op,
            address: call.output,
            bytes: call.bytes as usize,
            fingerprint: call.fingerprint.bits(),
            ready: !call.hold,
            started: self.now(),
            timeout: call.timeout,
        };
        if !self.sockets.is_empty() {
            let pushes = self.shares.of(all_reduce.dtype, all_reduce.bytes, self.core.block_bytes(all_reduce.dtype));
            // SAFETY: `running` keeps the tensor alive until the operation has ended, and its caller leaves it alone until then.
            unsafe { self.core.submit(all_reduce, &pushes) };
        }
        let Call { fingerprint, priority, coflow, keep, .. } = call;
        let recorded = self.recorder.issued(Record {
            group: self.spec.name.as_str().into(),
            seq: Some(self.first + self.running.len() as u64 + 1),
            message: None,
            what: fingerprint,
            bytes: call.bytes,
            algorithm: Algorithm::Aggregated,
            coflow,
            issued: ticket.made(),
            ended: None,
            waits_for: None,
            is_told: false,
        });
        let recorder = self.recorder.clone();
        ticket.on_done(move |result| recorder.ended(recorded, Instant::now(), result.is_ok()));
        self.running.push_back(Running { ticket, all_reduce, fingerprint, priority, keep, recorded });
    }

    fn receive(&mut self) {
        let now = self.now();
        let mut trouble = None;
        for (server, socket) in self.sockets.iter_mut().enumerate() {
            let ServerSpec { address, parent, .. } = self.spec.servers[server];
            for _ in 0..BATCHES {
                let Seen { is_refusal_told: told, unauthenticated, .. } = &mut self.seen[server];
                let core = &mut self.core;
                let mut answers = Vec::new();
                let received = socket.receive(|from, bytes| {
                    let Some(endpoint) = endpoint_of(from, address, parent) else {
                        *unauthenticated += 1;
                        return;
                    };
                    if let Some(receipt) = Receipt::decode(bytes) {
                        answers.extend(receipt.answer().map(|answer| (from, answer.encode())));
                        return;
                    }
                    match core.handle_packet(now, server, endpoint, bytes) {
                        Ok(Ok(())) => {}
                        Ok(Err(refusal)) => {
                            if !std::mem::replace(told, true) {
                                log::debug!(
                                    "penstock: a packet from {from} was refused ({refusal:?}); counted from here on"
                                );
                            }
                        }
                        Err(error) => drop(trouble.get_or_insert(error)),
                    }
                });
                for (to, answer) in answers {
                    socket.queue(to, &answer, &[]);
                }
                match received {
                    Ok(0) => break,
                    Ok(_) => {}
                    // An error of an earlier packet, to a port on which no process listens.
                    Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {}
                    Err(error) => {
                        log::warn!("penstock: cannot receive from server {address}: {error}");
                        break;
                    }
                }
            }
        }
        match trouble {
            None => {}
            Some(Trouble::Mismatch { op, theirs }) => {
                let ours = &self.running[(op - self.first) as usize].fingerprint;
                self.channels.group.fail(Failure::fatal(
                    FailureKind::Mismatch,
                    format!(
                        "aggregated operation #{} of group {} is {}",
                        op + 1,
                        self.spec.name,
                        Fingerprint::difference(
                            *ours,
                            &format!("rank {}", self.spec.rank),
                            Fingerprint::from_bits(theirs),
                            "another",
                        ),
                    ),
                ));
                self.wait_for_failure();
            }
            Some(Trouble::Result(what)) => {
                self.channels
                    .group
                    .fail(Failure::fatal(FailureKind::Bug, format!("{what}. No server of Penstock's sends that.")));
                self.wait_for_failure();
            }
        }
    }

    /// Blocks wait while somebody else of this host sends what is urgent, and leave short queues for some time afterwards. Others are
    /// told while an operation here is urgent, and would wait in vain where it waits for another rank's blocks or for a device. Its
    /// blocks come after those of all operations before it, which are as urgent therefore.
    fn give_way(&mut self, now: Time) {
        let Yielding { arbiter, next, expected } = &mut self.yielding;
        let is_urgent = self.running.iter().any(|running| running.priority.is_urgent());
        let is_ready = self.running.front().is_some_and(|first| first.all_reduce.ready);
        let mut held = None;
        if is_urgent && is_ready && !self.core.waits_for_others(now) {
            arbiter.claim(CLAIM);
            *next = Some(now.plus(CLAIM_EVERY));
        } else if is_urgent {
            *next = None;
        } else {
            let claimed = arbiter.claimed(now);
            *expected = claimed.map_or(*expected, |claim| claim.until.plus(Urgency::LASTS));
            let claimed = claimed.filter(|claim| !self.running.is_empty() && (claim.is_own || arbiter.may_hold(now)));
            held = claimed.map(|claim| claim.until);
            *next = held;
        }
        self.core.hold(held.unwrap_or(Time(0)));
        self.core.keep_short(!is_urgent && now < *expected);
    }

    fn transmit(&mut self, now: Time) {
        for (server, socket) in self.sockets.iter_mut().enumerate() {
            let ServerSpec { address, parent, .. } = self.spec.servers[server];
            let flush = |socket: &mut Datagrams| {
                if let Err(error) = socket.flush() {
                    // The packet is sent again; a server that stays unreachable is found by its silence.
                    log::debug!("penstock: cannot send to server {address}: {error}");
                }
            };
            flush(socket);
            while !socket.is_blocked() {
                let Some(packet) = self.core.poll_transmit(now, server, &mut self.payload) else { break };
                let to = match parent.filter(|_| packet.to == PARENT) {
                    Some(NodeSpec { address, shards }) => {
                        let shard = (packet.seq.0 % u32::from(shards)) as u16;
                        SocketAddr::new(address.ip(), address.port() + shard)
                    }
                    None => address,
                };
                socket.queue(to, &packet.header, &self.payload[..packet.payload_bytes]);
            }
            flush(socket);
        }
    }

    /// Completes the tickets of operations that have ended.
    fn settle(&mut self) {
        while let Some(op) = self.core.poll_done() {
            self.end(op);
        }
        if self.troubles.departed.is_none() || self.troubles.failed.is_some() {
            return;
        }
        // A rank leaves in good order when all operations that it has issued have ended, that is, when all ranks have all
        // results. So an operation whose results are here is complete everywhere, and that rank never issued the others.
        while let Some(op) = self.core.poll_delivered() {
            self.end(op);
        }
        if !self.core.is_idle() {
            let failure = self.troubles.departed.clone().expect("seen above");
            self.channels.group.end(Failure { kind: FailureKind::PeerLost, ..failure });
            self.wait_for_failure();
        }
    }

    fn end(&mut self, op: u64) {
        debug_assert_eq!(op, self.first, "operations end in order");
        let running = self.pop();
        {
            let mut stats = self.shared.stats();
            stats.operations += 1;
            stats.bytes += running.all_reduce.bytes as u64;
            // Callers that waited for the operation must find it counted.
            self.count(&mut stats);
        }
        running.ticket.complete(Ok(()));
    }

    fn pop(&mut self) -> Running {
        self.first += 1;
        self.running.pop_front().expect("the core has it too")
    }

    /// Checks for bypassed aggregators, and for operations that are late.
    fn judge(&mut self, now: Time) {
        for server in 0..self.seen.len() {
            let direct = self.core.is_direct(server);
            if std::mem::replace(&mut self.seen[server].is_direct, direct) == direct {
                continue;
            }
            let ServerSpec { address, parent, .. } = self.spec.servers[server];
            let parent = parent.map_or_else(String::new, |parent| parent.address.to_string());
            let (rank, name) = (self.spec.rank, &self.spec.name);
            let bypasses = {
                let entry = &mut self.shared.stats().servers[server];
                entry.bypasses += u64::from(direct);
                entry.bypasses
            };
            // On an overloaded machine a bypass may begin and end often; the counters have all of them.
            let level = if bypasses <= BYPASSES_TOLD { log::Level::Warn } else { log::Level::Debug };
            if direct {
                log::log!(
                    level,
                    "penstock: group {name}: rank {rank} sends straight to server {address}: aggregator {parent}, or one \
                     between, is not heard, or nothing has come through for a second (behind a switch also where a rank is \
                     late). The sums stay the same."
                );
            } else {
                log::log!(level, "penstock: group {name}: rank {rank} sends through aggregator {parent} again");
            }
            self.publish();
        }
        if let Some(op) = self.core.late(now) {
            let running = &self.running[(op - self.first) as usize];
            let seconds = running.all_reduce.timeout as f64 / SECOND as f64;
            let message = if running.all_reduce.ready {
                format!(
                    "Timed out after {seconds:.1} s; what lacks: {}. `penstock aggregator top` at the server shows which worker's \
                     blocks are missing. Raise the time-out (timeout= of init_process_group) if that is expected.",
                    self.lacks()
                )
            } else {
                not_ready(seconds)
            };
            self.publish();
            self.channels.group.fail(Failure::fatal(FailureKind::Timeout, message));
            self.wait_for_failure();
        }
    }

    /// The reason for a fallback, if there is one.
    fn lost(&mut self, now: Time) -> Option<String> {
        // A rank that has left does not go on among the ranks. It may have closed the job at the server, which then falls silent.
        if self.troubles.failed.is_some() || self.troubles.departed.is_some() {
            return None;
        }
        if let Some(reason) = self.troubles.alarmed.take() {
            return Some(reason);
        }
        let server = self.core.lost_server(now)?;
        let reason = format!(
            "rank {} has not heard server {} for {:.1} s",
            self.spec.rank,
            self.spec.servers[server].address,
            Timing::default().server_dead_after as f64 / SECOND as f64
        );
        self.channels.alarm.end(Failure::fatal(SERVER_LOST, reason.clone()));
        Some(reason)
    }

    /// What the first operation waits for, as a text.
    fn lacks(&self) -> String {
        if self.running.front().is_some_and(|running| !running.all_reduce.ready) {
            return "its tensor, which the device has not filled".to_owned();
        }
        let of = |(server, lack): (&ServerSpec, Lack)| match lack {
            Lack::Nothing => None,
            Lack::Agreement => Some(format!(
                "server {}: the first packets of some rank, which has not begun this operation, or they are lost",
                server.address
            )),
            Lack::Pieces { left, all } => Some(format!("server {}: {left} of {all} pieces", server.address)),
        };
        let lacks: Vec<String> = self.spec.servers.iter().zip(self.core.lacks()).filter_map(of).collect();
        if lacks.is_empty() { "the other ranks, which lack results".to_owned() } else { lacks.join("; ") }
    }

    fn publish(&mut self) {
        if let Some(running) = self.running.front() {
            self.recorder.waits_for(running.recorded, self.lacks());
        }
        self.count(&mut self.shared.stats());
    }

    fn count(&self, stats: &mut ClientStats) {
        for (server, entry) in stats.servers.iter_mut().enumerate() {
            let counters = self.core.counters(server);
            entry.is_direct = self.core.is_direct(server);
            entry.pushed = counters.pushed;
            entry.pushed_again = counters.pushed_again;
            entry.requested = counters.requested;
            entry.results = counters.results;
            entry.refused = counters.refused;
            entry.unauthenticated = self.seen[server].unauthenticated;
            entry.round_trip_ns = self.core.round_trip(server);
            if let Some(socket) = self.sockets.get(server) {
                entry.sent_bytes = socket.counters().sent_bytes;
                entry.received_bytes = socket.counters().received_bytes;
            }
        }
    }

    /// Sleeps until something happens; with `idle`, until a command comes.
    fn wait(&mut self, idle: bool) {
        let next = self.yielding.next.into_iter().fold(self.core.poll_timeout(), Time::min);
        let timeout = (!idle).then(|| next.since(self.now()).min(SECOND));
        self.sleep(idle, timeout.map(Duration::from_nanos));
    }

    fn sleep(&mut self, idle: bool, timeout: Option<Duration>) {
        if self.stopped {
            return;
        }
        let sockets = if idle { &[][..] } else { &self.sockets[..] };
        let sockets: Vec<_> = sockets.iter().map(|socket| (socket.as_fd(), socket.is_blocked())).collect();
        if let Err(error) = self.shared.waker.wait(&sockets, timeout) {
            self.channels.group.fail(Failure::fatal(FailureKind::Bug, format!("cannot wait for packets: {error}.")));
            self.stopped = true;
        }
    }

    /// This thread has failed the group: no packet may touch a tensor until the failure has come back.
    fn wait_for_failure(&mut self) {
        while self.troubles.failed.is_none() && !self.stopped {
            self.wait(true);
            self.take_commands();
        }
    }

    /// Fails all operations.
    fn fail(&mut self, failure: Failure) {
        self.troubles.failed.get_or_insert(failure.clone());
        let (rank, name) = (self.spec.rank, self.spec.name.clone());
        for (i, running) in std::mem::take(&mut self.running).into_iter().enumerate() {
            let number = self.first + i as u64 + 1;
            let what = running.fingerprint.describe();
            let message =
                format!("aggregated {what} #{number} of group {name} on rank {rank} failed: {}", failure.message);
            running.ticket.complete(Err(Failure { message, ..failure.clone() }));
        }
    }

    fn now(&self) -> Time {
        Time(self.epoch.elapsed().as_nanos() as u64)
    }
}

/// Why an operation has ended for whose tensor a device was waited for.
fn not_ready(seconds: f64) -> String {
    format!(
        "Timed out after {seconds:.1} s: its tensor was not ready. What the device was to do before this operation has not ended. \
         Raise the time-out (timeout= of init_process_group) if that is expected."
    )
}

impl Drop for Driver {
    /// However the thread ends, no caller waits for it any longer.
    fn drop(&mut self) {
        let failure = if std::thread::panicking() {
            let failure = Failure::fatal(FailureKind::Bug, "the thread for aggregation has panicked.");
            self.channels.group.fail(failure.clone());
            failure
        } else {
            Failure::fatal(FailureKind::Closed, "the group was destroyed.")
        };
        let commands = {
            let mut mailbox = self.shared.mailbox();
            mailbox.closed = Some(failure.clone());
            std::mem::take(&mut mailbox.commands)
        };
        for command in commands {
            if let Command::Start(_, ticket) = command {
                ticket.complete(Err(failure.clone()));
            }
        }
        self.fail(failure);
        self.channels.alarm.close(false);
        self.channels.fallback.close(false);
    }
}

/// The node that sent a packet; `None`: an unknown address.
fn endpoint_of(from: SocketAddr, server: SocketAddr, parent: Option<NodeSpec>) -> Option<Endpoint> {
    if from == server {
        return Some(SERVER);
    }
    let NodeSpec { address, shards } = parent?;
    let ports = address.port()..address.port() + shards;
    (from.ip() == address.ip() && ports.contains(&from.port())).then_some(PARENT)
}
