//! The worker: pushes blocks within Credit and its congestion window, sends again what is not committed, and requests results
//! that it misses.
//!
//! ```text
//!    received            next          posted        received + 2 W
//!   ─────┴─────────────────┴──────────────┴────────────────┴─────
//!    done │ sent, no result │ waits for    │ no room: `post` says
//!         │ (or out of turn)│ Credit, room │ None
//! ```
//! Where results come apart from the blocks ([`WorkerConfig::apart`]), *done* means accepted, and results are pulled (`worker/pull.rs`).
//!
//! The machine holds no bytes: the driver fills in block `seq` when it is told to send it, and takes results from the packet.
//! Rules decide *what* is sent again, time-outs decide *when*; the model check lets them fire at any moment.

mod config;
mod giving_way;
mod pull;
mod timing;

pub use config::{Outbound, Received, Route, WorkerConfig};
pub use timing::Timing;

use super::congestion::Congestion;
use super::estimate::{MAX_BACKOFF, MAX_DOUBTFUL, smoothed};
use super::packet::{FLAG_FULL, FLAG_LOST, Format, HEADER_BYTES, Header, Kind, decode};
use super::path::Path as WayUp;
use super::rules::{Refusal, Rule, Rules};
use super::{Endpoint, Serial};
use penstock_types::Time;
use pull::Pull;
use std::collections::VecDeque;

/// One worker's side of one epoch of a job.
#[derive(Clone, Debug)]
pub struct Worker {
    config: WorkerConfig,
    /// The lowest block without a result.
    received: Serial,
    /// The next block that was never sent.
    next: Serial,
    /// The next block that the driver will post.
    posted: Serial,
    /// The server's Ack: it has all blocks below.
    ack: Serial,
    credit: Serial,
    /// Whether the server wants this worker's blocks directly.
    way: WayUp,
    /// Nothing comes from the aggregator above this worker, or the worker does not trust it.
    lost: bool,
    entries: Vec<Entry>,
    /// Blocks to push again or whose result to request, each once.
    due: VecDeque<usize>,
    /// Where results come apart.
    pull: Option<Pull>,
    congestion: Congestion,
    report: Report,
    /// Until then no block is pushed for the first time.
    held: Time,
    clock: Clock,
    rules: Rules,
}

/// What this worker tells of the results that are here.
#[derive(Clone, Copy, Debug)]
struct Report {
    /// A heartbeat is to be sent.
    is_due: bool,
    /// The Ack that was sent last.
    ack: Serial,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum State {
    Free,
    Posted,
    Sent,
    Done,
}

#[derive(Clone, Debug)]
struct Entry {
    state: State,
    route: Route,
    due_push: bool,
    due_request: bool,
    queued: bool,
    /// The block was pushed, and neither its result nor an Ack for it has come.
    in_flight: bool,
    sent_at: Time,
    deadline: Time,
    /// The result was requested since the block was sent.
    asked: bool,
    /// When the result was requested last while the server was known to have it, and how often.
    missed_at: Time,
    misses: u32,
    /// How often the result was requested at the aggregator above since the block was sent.
    asked_above: u8,
    /// The number of the block's last transmission, in the order of all.
    order: u64,
    repeated: bool,
    /// When the block was pushed first on the way that it takes now, and how often again.
    first_at: Time,
    repeats: u8,
}

/// Timers and round trips.
#[derive(Clone, Debug)]
struct Clock {
    /// Smoothed round trip and its variation (RFC 6298); None before the first.
    round_trip: Option<(u64, u64)>,
    /// The same for the time from requesting a result that the server has to its arrival: it includes no other worker and no
    /// queue of pushes.
    answer: Option<(u64, u64)>,
    /// Results in a row that came after more than one request.
    doubtful: u32,
    backoff: u32,
    progress_at: Time,
    /// When the last result came, or the first block left after all results were here.
    moved_at: Time,
    orders: u64,
    scan_at: Option<Time>,
    /// While nothing is left to push that would overtake lost packets: when missing results are requested, and how often they
    /// were since the last result came.
    quiet_at: Option<Time>,
    quiet: u32,
    heartbeat_at: Time,
    /// Heartbeats since the last result, or since Credit showed that all workers have the results that are here.
    beats: u32,
    parent_heard: Time,
    server_heard: Time,
    path: Path,
    /// The last heartbeat went past the aggregator ([`Worker::waits_for_acks`]).
    went_past: bool,
}

/// Whether the aggregator above is trusted.
#[derive(Clone, Debug)]
struct Path {
    distrust_until: Time,
    /// How often it was blamed.
    stalls: u32,
    /// A block was pushed through it again and again ([`MOST_REPEATS`]).
    is_in_vain: bool,
}

impl Worker {
    /// A worker whose driver has posted nothing yet.
    #[must_use]
    pub fn new(now: Time, config: WorkerConfig) -> Worker {
        assert!(config.window.is_power_of_two(), "a window of {}", config.window);
        assert!(config.name.is_power_of_two(), "a worker has a name of one bit, not {:#x}", config.name);
        let entry = Entry {
            state: State::Free,
            route: Route::Tree,
            due_push: false,
            due_request: false,
            queued: false,
            in_flight: false,
            sent_at: now,
            deadline: now,
            asked: false,
            missed_at: now,
            misses: 0,
            asked_above: 0,
            order: 0,
            repeated: false,
            first_at: now,
            repeats: 0,
        };
        Worker {
            received: config.start,
            next: config.start,
            posted: config.start,
            ack: config.start,
            credit: config.start.plus(config.window - 1),
            way: WayUp::default(),
            lost: false,
            entries: vec![entry; 2 * config.window as usize],
            due: VecDeque::new(),
            pull: config.apart.then(|| Pull::new(config.start, config.window)),
            congestion: Congestion::new(),
            report: Report { is_due: false, ack: config.start },
            held: Time(0),
            clock: Clock {
                round_trip: None,
                answer: None,
                doubtful: 0,
                backoff: 0,
                progress_at: now,
                moved_at: now,
                orders: 0,
                scan_at: None,
                quiet_at: None,
                quiet: 0,
                heartbeat_at: now.plus(config.timing.idle_every),
                beats: 0,
                parent_heard: now,
                server_heard: now,
                path: Path { distrust_until: Time(0), stalls: 0, is_in_vain: false },
                went_past: false,
            },
            rules: Rules::default(),
            config,
        }
    }

    /// The driver has the next block. Returns `None` while two windows of blocks wait for results: enough that there is always
    /// one to push when Credit comes. The block's bytes must not change until its result has come.
    pub fn post(&mut self, route: Route) -> Option<Serial> {
        if self.posted.ahead_of(self.received) >= self.entries.len() as i32 {
            return None;
        }
        let seq = self.posted;
        let index = self.index(seq);
        self.entries[index].state = State::Posted;
        self.entries[index].route = route;
        self.posted = seq.plus(1);
        Some(seq)
    }

    /// The lowest block without a result: all blocks before it are done.
    #[must_use]
    pub fn received(&self) -> Serial {
        self.received
    }

    /// How often the worker blamed the path above it, because nothing moved for [`Timing::stall_after`], or a block never arrived.
    #[must_use]
    pub fn stalls(&self) -> u32 {
        self.clock.path.stalls
    }

    /// The lowest number of a result that some worker may still lack, as far as packets have shown: all workers have all results
    /// before it.
    #[must_use]
    pub fn everywhere(&self) -> Serial {
        let together = self.credit.plus((self.config.window - 1).wrapping_neg());
        self.pull.as_ref().map_or(together, |pull| pull.everywhere)
    }

    /// The smoothed round trip to the node that answers first, in nanoseconds; 0 before the first measurement.
    #[must_use]
    pub fn measured_round_trip(&self) -> u64 {
        self.clock.round_trip.map_or(0, |(mean, _)| mean)
    }

    /// Whether the server has not been heard for [`Timing::server_dead_after`]: the epoch is over.
    #[must_use]
    pub fn server_is_lost(&self, now: Time) -> bool {
        now.since(self.clock.server_heard) > self.config.timing.server_dead_after
    }

    /// Whether blocks go directly to the server because an aggregator is bypassed.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.way.is_direct
    }

    /// Takes a datagram that came from `from`.
    pub fn handle_packet<'a>(&mut self, now: Time, from: Endpoint, bytes: &'a [u8]) -> Result<Received<'a>, Refusal> {
        let packet = decode(bytes)?;
        let header = packet.header;
        if header.job != self.config.job {
            return Err(Refusal::Job);
        }
        packet.verify(self.config.key.as_ref())?;
        if self.rules.hold(Rule::Epoch) && header.epoch != self.config.epoch {
            return Err(Refusal::Epoch);
        }
        if header.kind.is_upward() {
            return Err(Refusal::Kind);
        }
        if from != self.config.parent && from != self.config.server {
            return Err(Refusal::Sender);
        }
        // An aggregator answers requests by itself: only the server's heartbeats prove that the whole path works.
        if from == self.config.parent && header.kind == Kind::HeartbeatDown {
            self.clock.parent_heard = now;
        }
        if from == self.config.server || header.kind == Kind::HeartbeatDown {
            self.clock.server_heard = now;
        }
        if header.kind == Kind::Missing {
            // The packet's Ack and Credit may be another worker's.
            self.named(now, &header);
            return Ok(Received::Control);
        }
        // The server cannot have what this worker did not send, nor grant more than the worker can take.
        if self.is_newer(header.ack, self.next) {
            return Err(Refusal::Ack);
        }
        let bounded = self.rules.hold(Rule::Window) && self.rules.hold(Rule::Commit);
        let most = if self.pull.is_some() { header.ack.plus(self.config.window - 1) } else { self.most() };
        if bounded && self.is_newer(header.credit, most) {
            return Err(Refusal::Credit);
        }
        self.hear(now, from, &header);
        let Header { kind, seq: number, format, exponent, .. } = header;
        let seq = match kind {
            Kind::Pulled => {
                self.take_pulled(now, &header)?;
                header.aside()
            }
            Kind::Result if self.pull.is_none() => {
                self.take(now, number)?;
                number
            }
            Kind::Accepted if self.pull.is_some() => {
                self.hear_pull(now, &header);
                // The packet's own Ack may have said so.
                let is_known = self.is_newer(self.ack, number);
                return if is_known {
                    Ok(Received::Control)
                } else {
                    self.take(now, number).map(|()| Received::Control)
                };
            }
            Kind::Result | Kind::Accepted => return Err(Refusal::Kind),
            _ => {
                self.hear_pull(now, &header);
                return Ok(Received::Control);
            }
        };
        Ok(Received::Result { seq, number, format, exponent, payload: packet.payload })
    }

    /// When [`Worker::handle_timeout`] is due.
    #[must_use]
    pub fn poll_timeout(&self) -> Time {
        let Clock { scan_at, quiet_at, heartbeat_at, .. } = self.clock;
        let pull_at = self.pull.as_ref().and_then(|pull| pull.at);
        [scan_at, quiet_at, pull_at].into_iter().flatten().fold(heartbeat_at, Time::min)
    }

    /// Sends again what is late, and reports which results are here.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.clock.scan_at.is_some_and(|at| at <= now) {
            self.scan(now);
        }
        if self.clock.quiet_at.is_some_and(|at| at <= now) {
            self.break_silence(now);
        }
        if self.pull.as_ref().and_then(|pull| pull.at).is_some_and(|at| at <= now) {
            self.pull_missing(now);
        }
        if self.clock.heartbeat_at <= now {
            self.judge_path(now);
            self.report.is_due = true;
            let busy = self.posted != self.received || self.lost != self.way.is_direct;
            let Timing { heartbeat_every, idle_every, .. } = self.config.timing;
            self.clock.heartbeat_at = now.plus(match self.clock.beats {
                _ if busy => heartbeat_every,
                // Others may be late, or a packet was lost that told what this worker has, or what all have.
                beats if self.everywhere() != self.taken() => {
                    self.clock.beats = (beats + 1).min(MAX_BACKOFF);
                    (heartbeat_every << beats).min(idle_every)
                }
                _ => idle_every,
            });
        }
    }

    /// The next packet to send.
    pub fn poll_transmit(&mut self, now: Time) -> Option<Outbound> {
        while let Some(index) = self.due.front().copied() {
            let seq = self.received.plus((index as u32).wrapping_sub(self.received.0) % self.entries.len() as u32);
            let entry = &mut self.entries[index];
            if std::mem::take(&mut entry.due_push) {
                return Some(self.send(now, seq));
            }
            if std::mem::take(&mut entry.due_request) {
                // The aggregator above most likely has the result. After some requests without an answer the worker asks the
                // server, which has it for certain.
                let above =
                    self.config.ask_parent && entry.asked_above < ASK_ABOVE && !self.way.is_direct && !self.lost;
                entry.asked_above += u8::from(above);
                let to = if above { self.config.parent } else { self.config.server };
                return Some(Outbound { to, header: self.upward(Kind::Request, seq) });
            }
            entry.queued = false;
            self.due.pop_front();
        }
        if let Some(request) = self.poll_pull() {
            return Some(request);
        }
        let granted = !self.is_newer(self.next, self.credit) || !self.rules.hold(Rule::Credit);
        let granted = granted && now >= self.held;
        if self.congestion.has_room(self.next != self.posted && granted) {
            if self.next == self.received {
                (self.clock.progress_at, self.clock.moved_at) = (now, now);
                self.clock.heartbeat_at = self.clock.heartbeat_at.min(now.plus(self.config.timing.heartbeat_every));
            }
            let seq = self.next;
            self.next = seq.plus(1);
            self.congestion.on_push();
            let index = self.index(seq);
            self.entries[index].in_flight = true;
            let push = self.send(now, seq);
            self.listen(now);
            return Some(push);
        }
        if std::mem::take(&mut self.report.is_due) {
            self.clock.went_past = !self.clock.went_past && self.waits_for_acks(now);
            let past = self.way.is_direct || self.lost || self.clock.went_past;
            let to = if past { self.config.server } else { self.config.parent };
            self.report.ack = self.taken();
            return Some(Outbound { to, header: self.upward(Kind::HeartbeatUp, Serial(0)) });
        }
        None
    }

    /// The bytes of an outbound packet's header: over the block for a push, otherwise over nothing (format None).
    #[must_use]
    pub fn seal(&self, header: &Header, format: Format, exponent: i16, payload: &[u8]) -> [u8; HEADER_BYTES] {
        Header { format, exponent, ..*header }.encode(payload, self.config.key.as_ref())
    }

    /// Takes Ack, Credit and the state of the path from a packet that came down.
    fn hear(&mut self, now: Time, from: Endpoint, header: &Header) {
        if self.is_newer(header.credit, self.credit) {
            self.credit = header.credit;
        }
        if self.is_newer(header.ack, self.ack) {
            let before = std::mem::replace(&mut self.ack, header.ack);
            self.made_progress(now);
            let mut seq = before.newest(self.received);
            while header.ack.is_newer_than(seq) {
                self.answered(seq);
                if self.pull.is_some() {
                    // It is accepted, and may be known to be.
                    let _ = self.take(now, seq);
                }
                seq = seq.plus(1);
            }
            // A result that is committed and has not come after the time in which packets overtake each other was lost.
            self.hurry(before, header.ack, now.plus(self.round_trip() / 4), |_| true);
        }
        if self.config.parent != self.config.server {
            let before = self.way.is_direct;
            self.way.follow(header.workers, from == self.config.server, header.kind);
            if self.way.is_direct && !before {
                // Blocks that went up through the aggregator may be lost with it.
                self.entries.iter_mut().for_each(|entry| entry.asked = true);
                self.hurry(self.received, self.next, now, |_| true);
            }
            if self.way.is_direct != before {
                self.congestion.on_new_path();
                self.trust_anew(now);
            }
        }
    }

    /// The highest result that this worker can take.
    fn most(&self) -> Serial {
        self.taken().plus(self.config.window - 1)
    }

    /// The server has the block.
    fn answered(&mut self, seq: Serial) {
        let index = self.index(seq);
        if std::mem::take(&mut self.entries[index].in_flight) {
            self.congestion.on_answer();
        }
    }

    /// The server lacks a block. If the block is not this worker's, the worker waits.
    fn named(&mut self, now: Time, header: &Header) {
        let index = self.index(header.seq);
        let outstanding = !self.is_newer(self.received, header.seq) && self.is_newer(self.next, header.seq);
        if !outstanding || self.entries[index].state != State::Sent {
            return;
        }
        if header.workers & self.config.name != 0 {
            let Entry { repeated, due_push, order, sent_at, repeats, .. } = self.entries[index];
            if now.since(sent_at) < self.spacing(repeats) {
                return;
            }
            // A loss counts once, however many nodes ask for the block; and the last blocks that were pushed may still be in
            // flight.
            if !repeated && !due_push && self.next.ahead_of(header.seq) > REORDERED as i32 {
                self.congestion.on_lost_push(order, self.clock.orders);
            }
            self.again(index, self.rules.hold(Rule::Resend), false);
        } else {
            self.entries[index].deadline = now.plus(self.timeout());
            // The worker waits for other workers, not for a broken path.
            self.made_progress(now);
        }
    }

    /// Marks a result as received, or, where results come apart, a block as accepted.
    fn take(&mut self, now: Time, seq: Serial) -> Result<(), Refusal> {
        let index = self.index(seq);
        if self.rules.hold(Rule::Deliver) {
            if self.is_newer(self.received, seq) {
                return Err(Refusal::Stale);
            }
            if !self.is_newer(self.next, seq) {
                return Err(Refusal::Credit);
            }
            if self.entries[index].state == State::Done {
                return Err(Refusal::Duplicate);
            }
        }
        let Entry { repeated, sent_at, order, misses, missed_at, .. } = self.entries[index];
        let entry = &mut self.entries[index];
        (entry.state, entry.due_push, entry.due_request) = (State::Done, false, false);
        self.made_progress(now);
        self.clock.moved_at = now;
        self.answered(seq);
        self.congestion.on_result();
        if !repeated {
            self.measure(now.since(sent_at));
            self.congestion.on_round_trip(now, now.since(sent_at));
        }
        if misses > 0 {
            self.clock.doubtful = if misses > 1 { self.clock.doubtful + 1 } else { 0 };
            if misses == 1 {
                self.clock.answer = Some(smoothed(self.clock.answer, now.since(missed_at)));
            } else if self.clock.doubtful >= MAX_DOUBTFUL {
                // Results may take longer than before; only the answer to a single request gives a valid sample.
                (self.clock.answer, self.clock.doubtful) = (None, 0);
            }
        }
        if seq != self.received {
            // A block that was sent well after this one has its result: QUIC's packet threshold (RFC 9002, section 6.1.1). The
            // result was lost, or else the block; then the server notices as this worker does, and gets it within a round
            // trip.
            let (soon, later) = (now, now.plus(self.round_trip() * 5 / 4));
            let overtaken = |entry: &Entry| entry.order + REORDERED <= order;
            let ack = self.ack;
            self.hurry(self.received, ack.oldest(seq), soon, overtaken);
            self.hurry(ack, seq, later, overtaken);
        }
        while self.received != self.next && self.entries[self.index(self.received)].state == State::Done {
            let index = self.index(self.received);
            self.entries[index].state = State::Free;
            self.received = self.received.plus(1);
        }
        self.clock.beats = 0;
        self.listen(now);
        self.report_if_due();
        Ok(())
    }

    fn report_if_due(&mut self) {
        self.report.is_due |= self.taken().ahead_of(self.report.ack) >= (self.config.window / 4).max(1) as i32;
    }

    /// The time-out of a block.
    pub(super) fn expire(&mut self, seq: Serial) {
        let (committed, index) = (self.is_newer(self.ack, seq), self.index(seq));
        if self.entries[index].state == State::Sent {
            // Until Ack has passed the block, the worker cannot tell whether the block or its result was lost, so it also
            // requests the result.
            self.again(index, !committed && self.rules.hold(Rule::Resend), self.rules.hold(Rule::Request));
        }
    }

    fn again(&mut self, index: usize, push: bool, request: bool) {
        let entry = &mut self.entries[index];
        entry.due_push |= push;
        entry.due_request |= request;
        if !std::mem::replace(&mut entry.queued, true) {
            self.due.push_back(index);
        }
    }

    /// Whether all results are here, and for long the server has not heard that of all workers. What goes up through the aggregator
    /// may be lost, this worker's Ack with it, though packets come down: nothing is in flight that would show that. Then every second
    /// heartbeat goes to the server itself. (Not all of them: from an aggregator that works, one Ack comes instead of many.)
    fn waits_for_acks(&self, now: Time) -> bool {
        let is_missed = self.everywhere() != self.taken();
        self.next == self.received && is_missed && now.since(self.clock.progress_at) > self.config.timing.stall_after
    }

    fn send(&mut self, now: Time, seq: Serial) -> Outbound {
        let header = self.upward(Kind::Push, seq);
        self.report.ack = self.taken();
        let deadline = now.plus(self.timeout());
        let (order, index) = (self.clock.orders, self.index(seq));
        self.clock.orders += 1;
        self.clock.scan_at = Some(self.clock.scan_at.map_or(deadline, |at| at.min(deadline)));
        let entry = &mut self.entries[index];
        entry.repeated = entry.state != State::Posted;
        if !entry.repeated {
            (entry.first_at, entry.repeats) = (now, 0);
        }
        (entry.asked, entry.asked_above, entry.misses) = (false, 0, 0);
        (entry.state, entry.sent_at, entry.deadline, entry.order) = (State::Sent, now, deadline, order);
        let straight = self.way.is_direct || (entry.route == Route::Full && !self.config.full_to_parent);
        if entry.repeated {
            entry.repeats = entry.repeats.saturating_add(1);
            let is_long = now.since(entry.first_at) > self.config.timing.stall_after;
            self.clock.path.is_in_vain |= !straight && entry.repeats >= MOST_REPEATS && is_long;
        }
        let to = if straight { self.config.server } else { self.config.parent };
        Outbound { to, header }
    }

    fn upward(&self, kind: Kind, seq: Serial) -> Header {
        let full = kind == Kind::Push && self.entries[self.index(seq)].route == Route::Full;
        let mut flags = if full { FLAG_FULL } else { 0 };
        if self.lost {
            flags |= FLAG_LOST;
        }
        Header {
            kind,
            job: self.config.job,
            epoch: self.config.epoch,
            format: Format::None,
            flags,
            seq,
            ack: self.taken(),
            credit: self.most(),
            exponent: 0,
            workers: self.config.name,
        }
    }

    fn index(&self, seq: Serial) -> usize {
        seq.0 as usize & (self.entries.len() - 1)
    }

    fn is_newer(&self, a: Serial, b: Serial) -> bool {
        if self.rules.hold(Rule::Serial) { a.is_newer_than(b) } else { a.0 > b.0 }
    }
}

/// How many missing results are requested at once when none comes: the last ones, which no later packet overtakes.
const ASK_FIRST: usize = REORDERED as usize + 1;
/// As in QUIC: if three later packets have arrived, an earlier one was lost, not reordered.
const REORDERED: u64 = 3;
/// Requests to the aggregator above before the server is asked: a request or its answer may be lost
/// (docs/design/aggregation.md has the effect of other numbers).
const ASK_ABOVE: u8 = 3;
/// A block that was pushed again this often, for [`Timing::stall_after`] at least, is not lost by chance: where a fifth of all packets
/// is lost, one block in 400,000 is.
const MOST_REPEATS: u8 = 8;

#[cfg(test)]
impl Worker {
    pub(crate) fn with_rules(now: Time, config: WorkerConfig, rules: Rules) -> Worker {
        Worker { rules, ..Worker::new(now, config) }
    }

    /// How many unanswered blocks may be in flight, as far as Credit allows.
    pub(crate) fn congestion_window(&self) -> usize {
        self.congestion.window()
    }

    pub(crate) fn outstanding(&self) -> Vec<Serial> {
        let sent = |seq: &Serial| self.entries[self.index(*seq)].state == State::Sent;
        (0..2 * self.config.window).map(|i| self.received.plus(i)).filter(sent).collect()
    }

    pub(crate) fn heartbeat_now(&mut self) {
        self.report.is_due = true;
    }

    pub(crate) fn set_lost(&mut self, lost: bool) {
        self.lost = lost;
    }

    /// Hashes all state that decides what the worker does, except time.
    pub(crate) fn digest(&self, state: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        (self.config.epoch, self.received, self.next, self.posted, self.ack, self.credit).hash(state);
        (self.way, self.lost).hash(state);
        self.entries.iter().for_each(|entry| (entry.state, entry.route, entry.asked_above).hash(state));
        self.pull.iter().for_each(|pull| pull.digest(state));
    }
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
