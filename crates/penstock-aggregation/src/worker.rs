//! The worker: pushes blocks within Credit and its congestion window, sends again what is not committed, asks for results that it misses.
//!
//! ```text
//!    received            next          posted        received + 2 W
//!   ─────┴─────────────────┴──────────────┴────────────────┴─────
//!    done │ sent, no result │ waits for    │ no room: `post` says
//!         │ (or out of turn)│ Credit, room │ None
//! ```
//! It holds no bytes: the driver fills in block `seq` when it is told to send it, and takes results from the packet. *What* is
//! sent again is decided by the rules, *when* by time-outs, which the model check lets fire at any moment.

use super::congestion::Congestion;
use super::estimate::{MAX_BACKOFF, MAX_DOUBTFUL, smoothed};
use super::packet::{FLAG_FULL, FLAG_LOST, Format, HEADER_BYTES, Header, Kind, decode};
use super::rules::{Refusal, Rule, Rules};
use super::{Key, Link, Serial};
use penstock_types::{MILLISECOND, SECOND, Time};
use std::collections::VecDeque;

/// What a worker is told.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// The job's number.
    pub job: u32,
    /// Which of its lives.
    pub epoch: u16,
    /// None on a trusted network.
    pub key: Option<Key>,
    /// Its number in the job, below 64.
    pub worker: u8,
    /// SeqNums in flight, a power of two; the same for all nodes of the job.
    pub window: u32,
    /// The first SeqNum of the epoch.
    pub start: Serial,
    /// Where it pushes to: an aggregator, or the server itself.
    pub parent: Link,
    /// The server.
    pub server: Link,
    /// The aggregator keeps results, so it is asked for what is lost before the server is. A switch does not.
    pub ask_parent: bool,
    /// When it loses patience.
    pub timing: Timing,
}

/// When a worker sends again and when it gives up on a path, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Time-out before a round trip was measured.
    pub rto_first: u64,
    /// Lower bound of the time-out. Too low: blocks are sent twice whenever a worker is late.
    pub rto_min: u64,
    /// Upper bound, also of its doubling; where round trips take longer, they are, up to `stall_after`.
    pub rto_max: u64,
    /// How often results are acknowledged while blocks are in flight.
    pub heartbeat_every: u64,
    /// ... and while none are.
    pub idle_every: u64,
    /// An aggregator through which nothing came for so long is passed by. A few times the server's idle interval.
    pub path_dead_after: u64,
    /// So long without progress while blocks are in flight, and the aggregator is passed by although it is heard: what
    /// goes up through it may be lost. Costs bandwidth when a worker was only late; doubles each time, up to a minute.
    pub stall_after: u64,
    /// A server that is silent for so long is lost ([`Worker::server_is_lost`]).
    pub server_dead_after: u64,
}

impl Default for Timing {
    /// What the engine uses. A window of blocks waits in a worker's own queue before it leaves, which is part of the round trip:
    /// 2.3 MB are 18 ms at 1 Gbit/s. Losses are noticed by what overtakes them, so patience costs little.
    fn default() -> Timing {
        Timing {
            rto_first: 100 * MILLISECOND,
            rto_min: 10 * MILLISECOND,
            rto_max: 500 * MILLISECOND,
            heartbeat_every: 2 * MILLISECOND,
            idle_every: 100 * MILLISECOND,
            path_dead_after: 350 * MILLISECOND,
            stall_after: SECOND,
            server_dead_after: 4 * SECOND,
        }
    }
}

/// Which way a block goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// Through the aggregators, if there are any.
    Tree,
    /// Straight to the server, in the tensor's own format: blocks that are not finite.
    Full,
}

/// A packet to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outbound {
    /// To whom.
    pub to: Link,
    /// Its header. A push lacks the block `header.seq`, with its format and exponent: see [`Worker::seal`].
    pub header: Header,
}

/// What a packet brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received<'a> {
    /// Nothing for the driver.
    Control,
    /// The result of a block, for the first and only time.
    Result {
        /// Which.
        seq: Serial,
        /// Its elements.
        format: Format,
        /// Its exponent.
        exponent: i16,
        /// Its bytes.
        payload: &'a [u8],
    },
}

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
    /// What the server has.
    ack: Serial,
    credit: Serial,
    /// The server wants our blocks straight.
    direct: bool,
    /// The aggregator above us is not heard, or not trusted.
    lost: bool,
    entries: Vec<Entry>,
    /// Blocks to send again or to ask for, each once.
    due: VecDeque<usize>,
    heartbeat_due: bool,
    congestion: Congestion,
    /// The Ack that was last told to somebody.
    reported: Serial,
    clock: Clock,
    rules: Rules,
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
    /// Pushed, and neither its result nor an Ack for it is here.
    in_flight: bool,
    sent_at: Time,
    deadline: Time,
    /// It was asked for since it was sent.
    asked: bool,
    /// When it was asked for last while the server was known to have it, and how often.
    missed_at: Time,
    misses: u32,
    /// How often the aggregator above was asked for it since it was sent.
    asked_above: u8,
    /// Position in the order of all transmissions.
    order: u64,
    repeated: bool,
}

/// Everything about time.
#[derive(Clone, Debug)]
struct Clock {
    /// Smoothed round trip and its variation (RFC 6298); None before the first.
    round_trip: Option<(u64, u64)>,
    /// The same from asking for a result that the server has to its arrival: no other worker is in it, and no queue of pushes.
    answer: Option<(u64, u64)>,
    /// Answers to what was asked for more than once, in a row.
    doubtful: u32,
    backoff: u32,
    progress_at: Time,
    orders: u64,
    scan_at: Option<Time>,
    /// While nothing is left to push that would overtake what is lost: when results are asked for that have not come, and how often
    /// they have been since the last one came.
    quiet_at: Option<Time>,
    quiet: u32,
    heartbeat_at: Time,
    /// Heartbeats since the last result came, or Credit said that all have what is here.
    beats: u32,
    parent_heard: Time,
    server_heard: Time,
    distrust_until: Time,
    stalls: u32,
}

impl Worker {
    /// A worker whose driver has posted nothing yet.
    #[must_use]
    pub fn new(now: Time, config: WorkerConfig) -> Worker {
        assert!(config.window.is_power_of_two(), "a window of {}", config.window);
        assert!(config.worker < 64, "worker {} does not fit a bitmap of 64", config.worker);
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
        };
        Worker {
            received: config.start,
            next: config.start,
            posted: config.start,
            ack: config.start,
            credit: config.start.plus(config.window - 1),
            direct: false,
            lost: false,
            entries: vec![entry; 2 * config.window as usize],
            due: VecDeque::new(),
            heartbeat_due: false,
            congestion: Congestion::new(),
            reported: config.start,
            clock: Clock {
                round_trip: None,
                answer: None,
                doubtful: 0,
                backoff: 0,
                progress_at: now,
                orders: 0,
                scan_at: None,
                quiet_at: None,
                quiet: 0,
                heartbeat_at: now.plus(config.timing.idle_every),
                beats: 0,
                parent_heard: now,
                server_heard: now,
                distrust_until: Time(0),
                stalls: 0,
            },
            rules: Rules::default(),
            config,
        }
    }

    /// The driver has the next block. None when two windows of blocks wait for results already: enough that none is
    /// missing when Credit comes. The bytes must stay as they are until the result is there.
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

    /// The lowest block without a result: everything before it is done.
    #[must_use]
    pub fn received(&self) -> Serial {
        self.received
    }

    /// The lowest block whose result some worker may still lack, as far as Credit has told: all workers have everything
    /// before it.
    #[must_use]
    pub fn everywhere(&self) -> Serial {
        Serial(self.credit.0.wrapping_sub(self.config.window - 1))
    }

    /// The smoothed round trip to whoever answers first, in nanoseconds; 0 before the first was measured.
    #[must_use]
    pub fn measured_round_trip(&self) -> u64 {
        self.clock.round_trip.map_or(0, |(mean, _)| mean)
    }

    /// How many blocks may be on the way without an answer, if Credit allows.
    #[must_use]
    pub fn congestion_window(&self) -> usize {
        self.congestion.window()
    }

    /// Whether the server has not been heard for [`Timing::server_dead_after`]: the epoch is over.
    #[must_use]
    pub fn server_is_lost(&self, now: Time) -> bool {
        now.since(self.clock.server_heard) > self.config.timing.server_dead_after
    }

    /// Whether blocks go straight to the server, because an aggregator is passed by.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Takes a datagram that came from `from`.
    pub fn handle_packet<'a>(&mut self, now: Time, from: Link, bytes: &'a [u8]) -> Result<Received<'a>, Refusal> {
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
        // An aggregator answers questions by itself: only the server's heartbeats tell that the way to it is whole.
        if from == self.config.parent && header.kind == Kind::HeartbeatDown {
            self.clock.parent_heard = now;
        }
        if from == self.config.server || header.kind == Kind::HeartbeatDown {
            self.clock.server_heard = now;
        }
        if header.kind == Kind::Missing {
            // Its Ack and Credit may be another worker's.
            self.named(now, &header);
            return Ok(Received::Control);
        }
        // The server has nothing that we did not send, and grants no more than we can take.
        if self.is_newer(header.ack, self.next) {
            return Err(Refusal::Ack);
        }
        let bounded = self.rules.hold(Rule::Window) && self.rules.hold(Rule::Commit);
        if bounded && self.is_newer(header.credit, self.most()) {
            return Err(Refusal::Credit);
        }
        self.hear(now, from, &header);
        if header.kind != Kind::Result {
            return Ok(Received::Control);
        }
        self.take(now, header.seq)?;
        let Header { seq, format, exponent, .. } = header;
        Ok(Received::Result { seq, format, exponent, payload: packet.payload })
    }

    /// When [`Worker::handle_timeout`] is due.
    #[must_use]
    pub fn poll_timeout(&self) -> Time {
        let Clock { scan_at, quiet_at, heartbeat_at, .. } = self.clock;
        [scan_at, quiet_at].into_iter().flatten().fold(heartbeat_at, Time::min)
    }

    /// Sends again what is late, and tells which results are here.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.clock.scan_at.is_some_and(|at| at <= now) {
            self.scan(now);
        }
        if self.clock.quiet_at.is_some_and(|at| at <= now) {
            self.break_silence(now);
        }
        if self.clock.heartbeat_at <= now {
            self.judge_path(now);
            self.heartbeat_due = true;
            let busy = self.posted != self.received || self.lost != self.direct;
            let Timing { heartbeat_every, idle_every, .. } = self.config.timing;
            self.clock.heartbeat_at = now.plus(match self.clock.beats {
                _ if busy => heartbeat_every,
                // Others may be late, or the way up or down has lost what this worker has or what all have.
                beats if self.everywhere() != self.received => {
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
                // The aggregator above has it most likely; whom it does not answer asks where it is for certain.
                let above = self.config.ask_parent && entry.asked_above < ASK_ABOVE && !self.direct && !self.lost;
                entry.asked_above += u8::from(above);
                let to = if above { self.config.parent } else { self.config.server };
                return Some(Outbound { to, header: self.upward(Kind::Request, seq) });
            }
            entry.queued = false;
            self.due.pop_front();
        }
        let granted = !self.is_newer(self.next, self.credit) || !self.rules.hold(Rule::Credit);
        if self.congestion.has_room(self.next != self.posted && granted) {
            if self.next == self.received {
                self.clock.progress_at = now;
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
        if std::mem::take(&mut self.heartbeat_due) {
            let to = if self.direct || self.lost { self.config.server } else { self.config.parent };
            self.reported = self.received;
            return Some(Outbound { to, header: self.upward(Kind::HeartbeatUp, Serial(0)) });
        }
        None
    }

    /// The bytes of an outbound header: over the block for a push, else over nothing (format None).
    #[must_use]
    pub fn seal(&self, header: &Header, format: Format, exponent: i16, payload: &[u8]) -> [u8; HEADER_BYTES] {
        Header { format, exponent, ..*header }.encode(payload, self.config.key.as_ref())
    }

    /// Ack, Credit and who is to pass aggregators by, from any packet that comes down.
    fn hear(&mut self, now: Time, from: Link, header: &Header) {
        let is_old = self.is_newer(self.ack, header.ack) || self.is_newer(self.credit, header.credit);
        if self.is_newer(header.credit, self.credit) {
            self.credit = header.credit;
        }
        if self.is_newer(header.ack, self.ack) {
            let before = std::mem::replace(&mut self.ack, header.ack);
            self.made_progress(now);
            let mut seq = before.newest(self.received);
            while header.ack.is_newer_than(seq) {
                self.answered(seq);
                seq = seq.plus(1);
            }
            // What is committed and not here after the time that packets overtake each other was lost.
            self.hurry(before, header.ack, now.plus(self.round_trip() / 4), |_| true);
        }
        // A result that an aggregator has kept says what was so when it came.
        if !is_old && (from == self.config.server || header.kind == Kind::HeartbeatDown) {
            let direct = self.config.parent != self.config.server && header.workers >> self.config.worker & 1 == 1;
            if direct && !self.direct {
                // What went up through the aggregator may be lost with it.
                self.entries.iter_mut().for_each(|entry| entry.asked = true);
                self.hurry(self.received, self.next, now, |_| true);
            }
            if direct != self.direct {
                self.congestion.on_new_path();
            }
            self.direct = direct;
        }
    }

    /// The highest result that it can take.
    fn most(&self) -> Serial {
        self.received.plus(self.config.window - 1)
    }

    /// The server has the block.
    fn answered(&mut self, seq: Serial) {
        let index = self.index(seq);
        if std::mem::take(&mut self.entries[index].in_flight) {
            self.congestion.on_answer();
        }
    }

    /// The server lacks a block. Whose it is not can wait: it was not theirs that was lost.
    fn named(&mut self, now: Time, header: &Header) {
        let index = self.index(header.seq);
        let outstanding = !self.is_newer(self.received, header.seq) && self.is_newer(self.next, header.seq);
        if !outstanding || self.entries[index].state != State::Sent {
            return;
        }
        if header.workers >> self.config.worker & 1 == 1 {
            let Entry { repeated, due_push, order, .. } = self.entries[index];
            // A loss counts once, however many ask for the block; and the last that were pushed may be on their way.
            if !repeated && !due_push && self.next.ahead_of(header.seq) > REORDERED as i32 {
                self.congestion.on_loss(order, self.clock.orders);
            }
            self.again(index, self.rules.hold(Rule::Resend), false);
        } else {
            self.entries[index].deadline = now.plus(self.timeout());
            // It waits for others, not for a path that has broken.
            self.made_progress(now);
        }
    }

    /// Marks a result as received.
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
        self.answered(seq);
        if !repeated {
            self.measure(now.since(sent_at));
        }
        if misses > 0 {
            self.clock.doubtful = if misses > 1 { self.clock.doubtful + 1 } else { 0 };
            if misses == 1 {
                self.clock.answer = Some(smoothed(self.clock.answer, now.since(missed_at)));
            } else if self.clock.doubtful >= MAX_DOUBTFUL {
                // It may take longer than it did; only the answer to a single question says how long.
                (self.clock.answer, self.clock.doubtful) = (None, 0);
            }
        }
        if seq != self.received {
            // Something sent well before it is not back: QUIC's packet threshold (RFC 9002, section 6.1.1). The result is
            // lost, or else the block, and then the server notices as we do and gets it in a round trip.
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
        if self.received.ahead_of(self.reported) >= (self.config.window / 4).max(1) as i32 {
            self.heartbeat_due = true;
        }
        Ok(())
    }

    /// What a time-out of a block leads to.
    pub(super) fn expire(&mut self, seq: Serial) {
        let (committed, index) = (self.is_newer(self.ack, seq), self.index(seq));
        if self.entries[index].state == State::Sent {
            // Whether it is the block or its result that was lost cannot be told unless Ack has passed it, so ask as well.
            self.again(index, !committed && self.rules.hold(Rule::Resend), self.rules.hold(Rule::Request));
        }
    }

    /// A result has come, or the last block has left: from now on it is quiet.
    fn listen(&mut self, now: Time) {
        self.clock.quiet = 0;
        let waits = self.next == self.posted && self.next != self.received;
        self.clock.quiet_at = waits.then(|| now.plus(self.patience(1)));
    }

    /// Asks for the first results that have not come. Where others are late, this costs small packets, and tells so.
    fn break_silence(&mut self, now: Time) {
        self.clock.quiet_at = None;
        if self.next != self.posted {
            return;
        }
        let mut left = ASK_FIRST;
        let mut seq = self.received;
        while seq != self.next && left > 0 {
            let index = self.index(seq);
            if self.entries[index].state == State::Sent {
                left -= 1;
                self.missed(now, seq);
                self.again(index, false, self.rules.hold(Rule::Request));
            }
            seq = seq.plus(1);
        }
        self.clock.quiet += 1;
        // Often enough to hear that others are late before the path is blamed.
        let patience = self.patience(self.clock.quiet + 1).min(self.config.timing.stall_after / 4);
        self.clock.quiet_at = Some(now.plus(patience));
    }

    /// A block is asked for: notes when, if the server has it.
    fn missed(&mut self, now: Time, seq: Serial) {
        if self.is_newer(self.ack, seq) {
            let index = self.index(seq);
            let entry = &mut self.entries[index];
            (entry.missed_at, entry.misses) = (now, entry.misses + 1);
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

    fn scan(&mut self, now: Time) {
        let mut soonest: Option<Time> = None;
        let mut expired = false;
        let mut seq = self.received;
        while seq != self.next {
            let index = self.index(seq);
            if self.entries[index].state == State::Sent {
                if self.entries[index].deadline <= now {
                    self.missed(now, seq);
                    let later = match self.entries[index].misses {
                        0 => now.plus(self.timeout()),
                        misses => now.plus(self.patience(misses)),
                    };
                    // To ask costs little, and leads to what is missing; our own block very likely is not.
                    if std::mem::replace(&mut self.entries[index].asked, true) {
                        self.expire(seq);
                        expired = true;
                    } else {
                        self.again(index, false, self.rules.hold(Rule::Request));
                    }
                    (self.entries[index].deadline, self.entries[index].order) = (later, self.clock.orders);
                    self.clock.orders += 1;
                }
                let deadline = self.entries[index].deadline;
                soonest = Some(soonest.map_or(deadline, |soonest| soonest.min(deadline)));
            }
            seq = seq.plus(1);
        }
        if expired {
            self.clock.backoff = (self.clock.backoff + 1).min(MAX_BACKOFF);
        }
        self.clock.scan_at = soonest;
    }

    /// Decides whether the aggregator above can be relied upon.
    fn judge_path(&mut self, now: Time) {
        if self.config.parent == self.config.server {
            return;
        }
        let Timing { path_dead_after, stall_after, .. } = self.config.timing;
        let stalled = self.next != self.received && now.since(self.clock.progress_at) > stall_after;
        if stalled && !self.direct && now >= self.clock.distrust_until {
            self.clock.distrust_until = now.plus((stall_after << self.clock.stalls).min(MAX_DISTRUST));
            self.clock.stalls = (self.clock.stalls + 1).min(MAX_BACKOFF);
        }
        self.lost = now.since(self.clock.parent_heard) > path_dead_after || now < self.clock.distrust_until;
    }

    fn send(&mut self, now: Time, seq: Serial) -> Outbound {
        let header = self.upward(Kind::Push, seq);
        self.reported = self.received;
        let deadline = now.plus(self.timeout());
        let (order, index) = (self.clock.orders, self.index(seq));
        self.clock.orders += 1;
        self.clock.scan_at = Some(self.clock.scan_at.map_or(deadline, |at| at.min(deadline)));
        let entry = &mut self.entries[index];
        entry.repeated = entry.state != State::Posted;
        (entry.asked, entry.asked_above, entry.misses) = (false, 0, 0);
        (entry.state, entry.sent_at, entry.deadline, entry.order) = (State::Sent, now, deadline, order);
        let straight = self.direct || entry.route == Route::Full;
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
            ack: self.received,
            credit: self.most(),
            exponent: 0,
            workers: 1 << self.config.worker,
        }
    }

    /// Brings deadlines of sent blocks in `from..to` forward.
    fn hurry(&mut self, from: Serial, to: Serial, deadline: Time, which: impl Fn(&Entry) -> bool) {
        let mut seq = self.received.newest(from);
        while to.is_newer_than(seq) {
            let index = self.index(seq);
            let entry = &mut self.entries[index];
            if entry.state == State::Sent && which(entry) && entry.deadline > deadline {
                entry.deadline = deadline;
                self.clock.scan_at = Some(self.clock.scan_at.map_or(deadline, |at| at.min(deadline)));
            }
            seq = seq.plus(1);
        }
    }

    fn made_progress(&mut self, now: Time) {
        self.clock.progress_at = now;
    }

    /// RFC 6298, section 2. Only a block that was sent once says how long a round trip takes, so the doubled time-out
    /// holds until one has come back (Karn and Partridge, 1987): otherwise a time-out below the round trip has every block
    /// sent twice, and never learns better.
    fn measure(&mut self, sample: u64) {
        self.clock.backoff = 0;
        // What took longer was a stall, and counts as the longest round trip that is believed.
        let sample = sample.min(self.config.timing.stall_after);
        self.clock.round_trip = Some(smoothed(self.clock.round_trip, sample));
    }

    /// How long the answer may take when a result was missed so often.
    fn patience(&self, misses: u32) -> u64 {
        let once = self.clock.answer.map_or(self.config.timing.rto_min, |(mean, variation)| mean + 4 * variation);
        (once.max(MILLISECOND) << (misses - 1).min(MAX_BACKOFF)).min(self.longest())
    }

    /// Above the usual bound where round trips are longer than that: else everything would be sent twice, for ever. But a path that
    /// stalls is given up before.
    fn longest(&self) -> u64 {
        let Timing { rto_max, stall_after, .. } = self.config.timing;
        let round_trip = self.clock.round_trip.map_or(0, |(mean, variation)| 2 * mean + 4 * variation);
        round_trip.min(stall_after).max(rto_max)
    }

    fn timeout(&self) -> u64 {
        let Timing { rto_first, rto_min, .. } = self.config.timing;
        // Twice the mean: a full window's queue makes the round trip long and even, and one resend too many makes it longer.
        let rto = self.clock.round_trip.map_or(rto_first, |(mean, variation)| 2 * mean + 4 * variation);
        (rto.max(rto_min) << self.clock.backoff).min(self.longest())
    }

    fn round_trip(&self) -> u64 {
        self.clock.round_trip.map_or(self.config.timing.rto_min, |(mean, _)| mean)
    }

    fn index(&self, seq: Serial) -> usize {
        seq.0 as usize & (self.entries.len() - 1)
    }

    fn is_newer(&self, a: Serial, b: Serial) -> bool {
        if self.rules.hold(Rule::Serial) { a.is_newer_than(b) } else { a.0 > b.0 }
    }
}

/// So many results are asked for at once when none comes: as many as nothing overtakes.
const ASK_FIRST: usize = REORDERED as usize + 1;
/// As in QUIC: packets that overtake by three were not reordered, those before are lost.
const REORDERED: u64 = 3;
/// Questions to the aggregator above before the server is asked: one may be lost, or its answer (docs/design/aggregation.md has
/// what other numbers leave).
const ASK_ABOVE: u8 = 3;
/// An aggregator that stalled is tried again after a minute at the latest.
const MAX_DISTRUST: u64 = 60 * SECOND;

#[cfg(test)]
impl Worker {
    pub(crate) fn with_rules(now: Time, config: WorkerConfig, rules: Rules) -> Worker {
        Worker { rules, ..Worker::new(now, config) }
    }

    pub(crate) fn outstanding(&self) -> Vec<Serial> {
        let sent = |seq: &Serial| self.entries[self.index(*seq)].state == State::Sent;
        (0..2 * self.config.window).map(|i| self.received.plus(i)).filter(sent).collect()
    }

    /// How often the path above was blamed.
    pub(crate) fn stalls(&self) -> u32 {
        self.clock.stalls
    }

    pub(crate) fn heartbeat_now(&mut self) {
        self.heartbeat_due = true;
    }

    pub(crate) fn set_lost(&mut self, lost: bool) {
        self.lost = lost;
    }

    /// All that decides what it will do, but for time.
    pub(crate) fn digest(&self, state: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        (self.config.epoch, self.received, self.next, self.posted, self.ack, self.credit).hash(state);
        (self.direct, self.lost).hash(state);
        self.entries.iter().for_each(|entry| (entry.state, entry.route, entry.asked_above).hash(state));
    }
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
