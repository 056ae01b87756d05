//! Nodes with a toy engine, joined by the virtual network, under one virtual clock and one seed.
//!
//! The engine does what the machine's callers promise: it posts operations in the same order everywhere but at its own
//! times, grants when it posts, holds eager messages until then, tells what it consumed, reads references, retires. It
//! checks what the machine promises back, on every frame that leaves and on every frame that arrives.

use super::network::{Direction, News, StreamSpec, Streams};
use crate::frame::{FLAG_PAYLOAD_SUM, FrameError, Header, Kind, Reference};
use crate::peer::*;
use penstock_sim::agenda::Agenda;
use penstock_types::Priority;
use rand::{Rng, SeedableRng};
use rand_xorshift::XorShiftRng;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// An operation that some nodes issue.
#[derive(Clone, Debug)]
pub(super) struct Op {
    pub(super) group: GroupId,
    pub(super) space: NumberSpace,
    pub(super) seq: OpSeq,
    pub(super) priority: Priority,
    pub(super) messages: Vec<Message>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) number: u32,
    pub(super) len: u64,
    /// Copied when it is issued, otherwise sent from where it lies.
    pub(super) copied: bool,
}

/// What a test can schedule.
#[derive(Clone, Debug)]
pub(super) enum Action {
    Post {
        node: usize,
        op: usize,
    },
    Send {
        op: usize,
        message: usize,
    },
    Grant {
        op: usize,
        message: usize,
    },
    Done {
        op: usize,
        message: usize,
    },
    /// One side sees the stream close; the other sees it `skew` later; it is up again `after` that (0: never).
    Close {
        pair: usize,
        stream: usize,
        side: usize,
        skew: u64,
        after: u64,
    },
    CloseOther {
        pair: usize,
        stream: usize,
        side: usize,
        after: u64,
    },
    Open {
        pair: usize,
        stream: usize,
        side: usize,
    },
    /// Both directions.
    Rate {
        pair: usize,
        stream: usize,
        mbit_per_s: f64,
    },
}

#[derive(Clone, Debug)]
enum Piece {
    Head([u8; Header::BYTES]),
    Body(Source),
}

#[derive(Clone, Debug)]
enum Source {
    Owned(Arc<[u8]>, Range<usize>),
    Memory(MessageKey, u64, u32),
}

struct Reading {
    header: Header,
    arrival: Arrival,
}

/// Two nodes and what is between them.
pub(super) struct Pair {
    pub(super) nodes: [usize; 2],
    pub(super) peers: [Peer; 2],
    pub(super) up: Vec<[bool; 2]>,
    reading: Vec<[Option<Reading>; 2]>,
    /// Grants that have arrived, as the network saw them: (side, operation, first, one past the last).
    granted: HashSet<(usize, OpKey, u32)>,
    touched: [bool; 2],
    deadlines: [Time; 2],
    turn: usize,
}

#[derive(Clone, Debug, Default)]
struct Local {
    posted: bool,
    retired: bool,
    failed: bool,
    to_issue: usize,
    to_be_sent: usize,
    to_receive: usize,
}

/// What the receiver of a message knows of it, and its sender.
#[derive(Clone, Debug, Default)]
struct Got {
    ranges: Vec<(u64, u64)>,
    bytes: u64,
    whole: bool,
    held: Option<Header>,
    announced: bool,
    referenced: bool,
    /// The machine said that it was sent: its bytes may have changed.
    sent: bool,
}

pub(super) struct World {
    pub(super) now: Time,
    pub(super) rng: XorShiftRng,
    pub(super) pairs: Vec<Pair>,
    network: Streams<Piece>,
    pub(super) ops: Vec<Op>,
    /// By key and, since two point-to-point operations in opposite directions may share one, by sender.
    index: HashMap<(OpKey, usize), usize>,
    locals: Vec<Vec<Local>>,
    /// By operation and message.
    got: Vec<Vec<Got>>,
    scheduled: Agenda<Action>,
    /// Eager bytes held, by node and sender.
    held: HashMap<(usize, usize), u64>,
    pub(super) most_held: u64,
    /// Follow payloads byte by byte; without it frames travel as numbers.
    pub(super) bytes: bool,
    /// Grant one by one, at random times, instead of at once.
    pub(super) slow_grants: u64,
    pub(super) slow_issue: u64,
    pub(super) log: Vec<(Time, usize, Event)>,
    pub(super) finished: Vec<(Time, usize, usize)>,
    pub(super) arrivals: Vec<(Time, MessageKey)>,
    /// Replace streams that are reported as stalled.
    pub(super) reopen: bool,
    pub(super) frames: u64,
    pub(super) data_frames: u64,
    pub(super) applied_bytes: u64,
    /// Write down every data frame that leaves: key, offset, stream, whether it left before.
    pub(super) follow: bool,
    pub(super) pulled: Vec<(MessageKey, u64, usize, bool)>,
    pub(super) polls: u64,
    pub(super) steps: u64,
    /// How often what happened, to see that a test reaches it.
    pub(super) seen: BTreeMap<&'static str, u64>,
    /// Streams that went down, and what they had counted.
    pub(super) losses: u64,
    lost_frames: u64,
    lost_repeats: u64,
    /// What a machine refused, instead of a panic.
    pub(super) tolerate: bool,
    pub(super) refused: Vec<FrameError>,
}

impl World {
    pub(super) fn new(
        seed: u64,
        nodes: usize,
        config: &PeerConfig,
        streams: &[StreamSpec],
        capacity_mbit: f64,
    ) -> World {
        let mut pairs = Vec::new();
        for a in 0..nodes {
            for b in a + 1..nodes {
                let mut pair = Pair {
                    nodes: [a, b],
                    peers: [0, 1].map(|_| Peer::new(config.clone(), Time(0))),
                    up: vec![[true; 2]; streams.len()],
                    reading: streams.iter().map(|_| [None, None]).collect(),
                    granted: HashSet::new(),
                    touched: [true; 2],
                    deadlines: [Time(0); 2],
                    turn: 0,
                };
                for stream in 0..streams.len() {
                    pair.peers.iter_mut().for_each(|peer| peer.stream_up(stream as StreamId, Time(0)));
                }
                pairs.push(pair);
            }
        }
        World {
            now: Time(0),
            // The seeds of the tests are small numbers; a few rounds spread them.
            rng: XorShiftRng::seed_from_u64(seed),
            network: Streams::new(pairs.len(), streams, capacity_mbit),
            pairs,
            ops: Vec::new(),
            index: HashMap::new(),
            locals: vec![Vec::new(); nodes],
            got: Vec::new(),
            scheduled: Agenda::default(),
            held: HashMap::new(),
            most_held: 0,
            bytes: true,
            slow_grants: 0,
            slow_issue: 0,
            log: Vec::new(),
            finished: Vec::new(),
            arrivals: Vec::new(),
            reopen: true,
            frames: 0,
            data_frames: 0,
            applied_bytes: 0,
            follow: false,
            pulled: Vec::new(),
            polls: 0,
            steps: 0,
            seen: BTreeMap::new(),
            losses: 0,
            lost_frames: 0,
            lost_repeats: 0,
            tolerate: false,
            refused: Vec::new(),
        }
    }

    /// Makes an operation known; nobody has posted it yet.
    pub(super) fn add(&mut self, op: Op) -> usize {
        let id = self.ops.len();
        let key = OpKey { group: op.group, space: op.space, op: op.seq };
        let senders: Vec<usize> = match op.space {
            NumberSpace::Collective(_) => (0..self.locals.len()).collect(),
            NumberSpace::PointToPoint { .. } => vec![op.messages[0].from],
        };
        for from in senders {
            assert!(self.index.insert((key, from), id).is_none());
        }
        for (node, locals) in self.locals.iter_mut().enumerate() {
            let outgoing = op.messages.iter().filter(|m| m.from == node);
            locals.push(Local {
                to_issue: outgoing.clone().count(),
                to_be_sent: outgoing.filter(|m| !m.copied).count(),
                to_receive: op.messages.iter().filter(|m| m.to == node).count(),
                ..Local::default()
            });
        }
        self.got.push(vec![Got::default(); op.messages.len()]);
        self.ops.push(op);
        id
    }

    pub(super) fn schedule(&mut self, at: Time, action: Action) {
        self.scheduled.add(at, action);
    }

    /// The pair of two nodes and the first one's side of it.
    pub(super) fn pair_of(&self, node: usize, other: usize) -> (usize, usize) {
        let at = self.pairs.iter().position(|pair| pair.nodes.contains(&node) && pair.nodes.contains(&other));
        let pair = at.expect("every two nodes are a pair");
        (pair, usize::from(self.pairs[pair].nodes[1] == node))
    }

    pub(super) fn peer(&mut self, node: usize, other: usize) -> &mut Peer {
        let (pair, side) = self.pair_of(node, other);
        self.pairs[pair].touched[side] = true;
        &mut self.pairs[pair].peers[side]
    }

    pub(super) fn key(&self, op: usize, message: usize) -> MessageKey {
        let op = &self.ops[op];
        MessageKey { group: op.group, space: op.space, op: op.seq, message: op.messages[message].number }
    }

    pub(super) fn all_finished(&self) -> bool {
        self.locals.iter().all(|locals| locals.iter().all(|local| local.retired || !local.posted && local.is_done()))
    }

    /// Nothing is scheduled and all operations are over; copies may still be under way.
    pub(super) fn idle(&self) -> bool {
        self.scheduled.next_at().is_none() && self.all_finished()
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.pairs.iter().all(|pair| pair.peers.iter().all(Peer::is_quiet))
    }

    /// Runs until `done`, or panics when that takes longer than `limit`.
    pub(super) fn run(&mut self, limit: u64, mut done: impl FnMut(&World) -> bool) {
        let end = self.now.plus(limit);
        self.pump();
        while !done(self) {
            assert!(self.now <= end, "not done after {} ms: {}", limit / MILLISECOND, self.describe());
            self.step();
        }
    }

    /// Runs until all operations have finished everywhere and nothing is on its way.
    pub(super) fn finish(&mut self, limit: u64) {
        self.run(limit, |world| world.idle() && world.is_quiet());
    }

    /// Runs for a while, whatever happens.
    pub(super) fn run_for(&mut self, time: u64) {
        let end = self.now.plus(time);
        self.pump();
        while self.next() <= end {
            self.step();
        }
        self.now = end;
    }

    fn next(&mut self) -> Time {
        let scheduled = self.scheduled.next_at().unwrap_or(Time(u64::MAX));
        let deadlines = self.pairs.iter().flat_map(|pair| pair.deadlines);
        deadlines.fold(scheduled.min(self.network.next()), Time::min).max(self.now)
    }

    fn step(&mut self) {
        let now = self.next();
        self.now = now;
        self.steps += 1;
        while let Some(action) = self.scheduled.pop(now) {
            self.act(action);
        }
        self.network.advance(now);
        while let Some(news) = self.network.news() {
            match news {
                News::Arrived(Direction { pair, side, stream }, piece) => self.arrive(pair, 1 - side, stream, piece),
                News::Room(Direction { pair, side, .. }) => self.pairs[pair].touched[side] = true,
            }
        }
        // As an event loop does: read first, then look at the clock.
        for pair in 0..self.pairs.len() {
            for side in 0..2 {
                let Pair { peers, deadlines, touched, .. } = &mut self.pairs[pair];
                if deadlines[side] <= now {
                    peers[side].handle_timeout(now);
                    assert!(peers[side].poll_timeout(now) > now, "the deadline stays in the past");
                    touched[side] = true;
                }
            }
        }
        self.pump();
    }

    /// Drains events and lets streams pull frames, where something has happened.
    pub(super) fn pump(&mut self) {
        for pair in 0..self.pairs.len() {
            for side in 0..2 {
                while std::mem::take(&mut self.pairs[pair].touched[side]) {
                    while let Some(event) = self.pairs[pair].peers[side].poll_event() {
                        self.event(pair, side, event);
                    }
                    self.pull(pair, side);
                    let Pair { peers, deadlines, .. } = &mut self.pairs[pair];
                    deadlines[side] = peers[side].poll_timeout(self.now);
                }
            }
        }
    }

    fn pull(&mut self, pair: usize, side: usize) {
        let bytes = self.bytes;
        let now = self.now;
        let Pair { peers, up, granted, turn, nodes, .. } = &mut self.pairs[pair];
        let peer = &mut peers[side];
        *turn += 1;
        let count = up.len();
        let mut left: Vec<usize> = (0..count).map(|at| (at + *turn) % count).filter(|s| up[*s][side]).collect();
        // As the event loop does.
        peer.hurry(peer.urgency(now));
        if let Some(express) = peer.express(now) {
            left.sort_by_key(|stream| *stream != express as usize);
        }
        while !left.is_empty() {
            left.retain(|&stream| {
                let direction = Direction { pair, side, stream };
                if !self.network.has_room(direction, now) {
                    return false;
                }
                self.polls += 1;
                let Some(frame) = peer.poll_frame(stream as StreamId, now) else { return false };
                let header = frame.header;
                self.frames += 1;
                let sender = &peer.streams[&(stream as StreamId)];
                let in_flight = &sender.in_flight;
                if header.kind.is_counted() && in_flight.len() < 32 {
                    let newest = in_flight.back().expect("just sent").frame;
                    assert_eq!(in_flight.iter().filter(|f| f.frame == newest).count(), 1, "twice on one stream");
                }
                if header.kind == Kind::Data {
                    self.data_frames += 1;
                    if self.follow {
                        let repeated = self.pulled.iter().any(|(k, o, ..)| (*k, *o) == (header.key, header.offset));
                        self.pulled.push((header.key, header.offset, stream, repeated));
                    }
                    let window = sender.window(peer.config.unacked_limit_bytes, peer.room(peer.hearing.last));
                    let before = sender.unacked_bytes - Header::BYTES as u64 - u64::from(header.length);
                    assert!(before < window && window <= peer.config.unacked_limit_bytes, "beyond the window");
                    let is_granted = granted.contains(&(side, OpKey::of(&header.key), header.key.message));
                    let eager = header.flags & FLAG_EAGER != 0;
                    assert!(eager || is_granted, "{:?} left before its grant", header.key);
                    assert!(!eager || header.total <= peer.config.eager_bytes, "a long message went eagerly");
                }
                let source = match frame.payload {
                    Payload::Control(bytes) => Source::Owned(bytes.clone(), 0..bytes.len()),
                    Payload::Owned(bytes, range) => Source::Owned(bytes, range),
                    Payload::Memory => Source::Memory(header.key, header.offset, header.length),
                };
                let payload = if bytes && header.flags & FLAG_PAYLOAD_SUM != 0 {
                    let ends = (nodes[side], nodes[1 - side]);
                    resolve(&source, &self.ops, &self.index, &self.locals, &self.got, ends)
                } else {
                    Vec::new()
                };
                let head = seal(header, &payload);
                self.network.push(direction, Header::BYTES as u64, Piece::Head(head), now);
                if header.length > 0 {
                    self.network.push(direction, u64::from(header.length), Piece::Body(source), now);
                }
                true
            });
        }
    }

    fn arrive(&mut self, pair: usize, side: usize, stream: usize, piece: Piece) {
        if !self.pairs[pair].up[stream][side] {
            return;
        }
        if let Err(error) = self.read(pair, side, stream, piece) {
            assert!(self.tolerate, "refused: {error}");
            self.refused.push(error);
            self.act(Action::Close { pair, stream, side, skew: 0, after: 0 });
        }
    }

    fn read(&mut self, pair: usize, side: usize, stream: usize, piece: Piece) -> Result<(), FrameError> {
        let node = self.pairs[pair].nodes[side];
        let other = self.pairs[pair].nodes[1 - side];
        self.pairs[pair].touched[side] = true;
        let payload = match piece {
            Piece::Head(head) => {
                let header = Header::decode(&head)?;
                let status = self.status(node, other, &header.key);
                let arrival =
                    self.pairs[pair].peers[side].handle_header(stream as StreamId, &header, status, self.now)?;
                self.see(match (header.kind, arrival) {
                    (Kind::Data, Arrival::Race) => "races",
                    (Kind::Data, Arrival::Discard) => "duplicates",
                    (Kind::Data, Arrival::Take) if header.flags & FLAG_EAGER == 0 => "granted frames",
                    (Kind::Data, Arrival::Take) if status == OpStatus::Early => "early frames",
                    (Kind::Data, Arrival::Take) => "eager frames",
                    (Kind::Announce, _) => "announcements",
                    (Kind::Reference, _) => "references",
                    (Kind::Heartbeat, _) => "heartbeats",
                    _ => "other frames",
                });
                let slot = &mut self.pairs[pair].reading[stream][side];
                assert!(slot.is_none(), "a frame inside a frame");
                *slot = Some(Reading { header, arrival });
                if header.length > 0 {
                    return Ok(());
                }
                Vec::new()
            }
            Piece::Body(source) => {
                if self.bytes || !matches!(source, Source::Memory(..)) {
                    resolve(&source, &self.ops, &self.index, &self.locals, &self.got, (other, node))
                } else {
                    Vec::new()
                }
            }
        };
        let Reading { header, arrival } =
            self.pairs[pair].reading[stream][side].take().expect("a payload follows a header");
        let status = self.status(node, other, &header.key);
        let finish = self.pairs[pair].peers[side].handle_frame(stream as StreamId, &header, &payload, status)?;
        if header.kind == Kind::Grant {
            let range = header.key.message..header.key.message + header.offset as u32;
            self.pairs[pair].granted.extend(range.map(|message| (side, OpKey::of(&header.key), message)));
        }
        if !finish.apply && header.kind != Kind::Data && status != OpStatus::Retired {
            self.see("repeated control frames");
        }
        if let Some(loser) = finish.revoke {
            self.see("revocations");
            let reading = self.pairs[pair].reading[loser as usize][side].as_mut().expect("the loser is reading");
            assert_eq!((reading.header.key, reading.header.offset), (header.key, header.offset));
            assert_eq!(reading.arrival, Arrival::Take, "only who reads in place has to be stopped");
            reading.arrival = Arrival::Discard;
        }
        if finish.apply {
            assert!(arrival != Arrival::Discard, "a discarded frame is applied");
            self.apply(node, other, &header, &payload);
        }
        Ok(())
    }

    /// Of an operation between `node` and `other`, as the engine does it.
    fn status(&self, node: usize, other: usize, key: &MessageKey) -> OpStatus {
        let op = |from| self.index.get(&(OpKey::of(key), from));
        match op(other).or(op(node)).map(|op| &self.locals[node][*op]) {
            Some(local) if local.retired || local.failed => OpStatus::Retired,
            Some(local) if local.posted => OpStatus::Active,
            _ => OpStatus::Early,
        }
    }

    fn find(&self, from: usize, to: usize, key: &MessageKey) -> (usize, usize) {
        let op = self.index[&(OpKey::of(key), from)];
        let message = self.ops[op].messages.iter().position(|m| (m.from, m.to, m.number) == (from, to, key.message));
        (op, message.expect("no such message"))
    }

    // ------------------------------------------------------------------ the toy engine

    fn apply(&mut self, node: usize, other: usize, header: &Header, payload: &[u8]) {
        match header.kind {
            Kind::Data => {
                let (op, message) = self.find(other, node, &header.key);
                let posted = self.locals[node][op].posted;
                let eager = header.flags & FLAG_EAGER != 0;
                assert_eq!(header.total, self.ops[op].messages[message].len);
                if self.bytes {
                    let mut expected = vec![0; payload.len()];
                    pattern(other, &header.key, header.offset, &mut expected);
                    assert!(expected == payload, "wrong bytes in {:?} at {}", header.key, header.offset);
                }
                if eager && !posted {
                    let held = self.held.entry((node, other)).or_default();
                    *held += header.total;
                    self.most_held = self.most_held.max(*held);
                    let got = &mut self.got[op][message];
                    assert!(got.held.replace(*header).is_none(), "held twice");
                    return;
                }
                self.use_frame(node, other, op, message, header);
            }
            Kind::Reference => {
                let (op, message) = self.find(other, node, &header.key);
                let got = &mut self.got[op][message];
                assert!(!std::mem::replace(&mut got.referenced, true), "read twice");
                if self.locals[node][op].posted {
                    self.read_reference(op, message);
                }
            }
            Kind::Announce => {
                let (op, message) = self.find(other, node, &header.key);
                self.got[op][message].announced = true;
                if self.locals[node][op].posted {
                    self.grant(op, message);
                }
            }
            _ => {}
        }
    }

    fn use_frame(&mut self, node: usize, other: usize, op: usize, message: usize, header: &Header) {
        self.applied_bytes += u64::from(header.length);
        if header.flags & FLAG_EAGER != 0 {
            self.peer(node, other).consumed(header.total);
        }
        let got = &mut self.got[op][message];
        assert!(!got.whole, "a frame after the last");
        got.ranges.push((header.offset, header.offset + u64::from(header.length)));
        got.bytes += u64::from(header.length);
        if got.bytes == header.total {
            got.ranges.sort_unstable();
            assert!(got.ranges.windows(2).all(|two| two[0].1 == two[1].0), "gaps or overlaps: {:?}", got.ranges);
            self.received(op, message);
        }
    }

    fn received(&mut self, op: usize, message: usize) {
        self.got[op][message].whole = true;
        let key = self.key(op, message);
        self.arrivals.push((self.now, key));
        let node = self.ops[op].messages[message].to;
        self.locals[node][op].to_receive -= 1;
        self.retire_if_done(node, op);
    }

    /// The reader copies from the sender's memory: it must still be what it was.
    fn read_reference(&mut self, op: usize, message: usize) {
        let spec = self.ops[op].messages[message];
        assert!(!self.got[op][message].sent && self.locals[spec.from][op].posted);
        self.received(op, message);
        let later = if self.slow_grants > 0 { self.rng.random_range(0..self.slow_grants) } else { 0 };
        self.schedule(self.now.plus(later), Action::Done { op, message });
    }

    fn grant(&mut self, op: usize, message: usize) {
        let spec = self.ops[op].messages[message];
        let key = self.key(op, message);
        self.peer(spec.to, spec.from).grant(key, 1, Fingerprint::default());
    }

    /// Others are announced.
    fn is_granted_unasked(&self, op: usize, message: usize) -> bool {
        let spec = self.ops[op].messages[message];
        let peer = &self.pairs[self.pair_of(spec.from, spec.to).0].peers[0];
        !spec.copied && !peer.config.references && spec.len > peer.eager_limit()
    }

    fn post(&mut self, node: usize, op: usize) {
        assert!(!std::mem::replace(&mut self.locals[node][op].posted, true));
        let messages = self.ops[op].messages.clone();
        for (message, spec) in messages.iter().enumerate() {
            if spec.to == node {
                if self.is_granted_unasked(op, message) {
                    let later = if self.slow_grants > 0 { self.rng.random_range(0..self.slow_grants) } else { 0 };
                    self.schedule(self.now.plus(later), Action::Grant { op, message });
                }
                let got = self.got[op][message].clone();
                if got.announced {
                    self.grant(op, message);
                }
                if got.referenced {
                    self.read_reference(op, message);
                }
                if let Some(header) = got.held {
                    *self.held.get_mut(&(node, spec.from)).expect("held") -= header.total;
                    self.use_frame(node, spec.from, op, message, &header);
                }
            }
            if spec.from == node {
                let later = if self.slow_issue > 0 { self.rng.random_range(0..self.slow_issue) } else { 0 };
                self.schedule(self.now.plus(later), Action::Send { op, message });
            }
        }
        self.retire_if_done(node, op);
    }

    fn issue(&mut self, op: usize, message: usize) {
        let spec = self.ops[op].messages[message];
        let key = self.key(op, message);
        let priority = self.ops[op].priority;
        let body = if spec.copied {
            let mut bytes = vec![0; spec.len as usize];
            pattern(spec.from, &key, 0, &mut bytes);
            Body::Owned(bytes.into())
        } else {
            Body::Memory { place: Reference { address: 0, epoch: 0, region: 0 }, len: spec.len }
        };
        if self.locals[spec.from][op].failed {
            return;
        }
        self.peer(spec.from, spec.to).send(Outgoing {
            key,
            priority,
            is_changed: false,
            fingerprint: Fingerprint::default(),
            coflow: 0,
            body,
        });
        self.locals[spec.from][op].to_issue -= 1;
        self.retire_if_done(spec.from, op);
    }

    fn retire_if_done(&mut self, node: usize, op: usize) {
        let local = &mut self.locals[node][op];
        if !local.posted || local.retired || !local.is_done() {
            return;
        }
        local.retired = true;
        self.finished.push((self.now, node, op));
        let Op { group, space, seq, .. } = self.ops[op];
        for pair in &mut self.pairs {
            if let Some(side) = pair.nodes.iter().position(|n| *n == node) {
                pair.peers[side].retire(group, space, seq);
            }
        }
    }

    fn event(&mut self, pair: usize, side: usize, event: Event) {
        let [node, other] = [self.pairs[pair].nodes[side], self.pairs[pair].nodes[1 - side]];
        match &event {
            Event::Sent(key) => {
                let (op, message) = self.find(node, other, key);
                let got = &mut self.got[op][message];
                assert!(got.whole, "{key:?} is not there yet");
                assert!(!self.ops[op].messages[message].copied, "nobody waits for a copied message");
                assert!(!std::mem::replace(&mut got.sent, true), "sent twice");
                self.locals[node][op].to_be_sent -= 1;
                self.retire_if_done(node, op);
                return;
            }
            Event::Granted(..) => return,
            Event::Stalled(stream) => {
                self.see("stalls");
                let stream = *stream as usize;
                if self.reopen && self.pairs[pair].up[stream][side] {
                    let skew = self.rng.random_range(0..10 * MILLISECOND);
                    self.schedule(self.now, Action::Rate { pair, stream, mbit_per_s: 100.0 });
                    self.schedule(self.now, Action::Close { pair, stream, side, skew, after: 20 * MILLISECOND });
                }
            }
            _ => {}
        }
        self.log.push((self.now, node, event));
    }

    // ------------------------------------------------------------------ what a test schedules

    fn act(&mut self, action: Action) {
        let now = self.now;
        match action {
            Action::Post { node, op } => self.post(node, op),
            Action::Send { op, message } => self.issue(op, message),
            Action::Grant { op, message } => {
                // An announced message may be here by now.
                if !self.locals[self.ops[op].messages[message].to][op].retired {
                    self.grant(op, message);
                }
            }
            Action::Done { op, message } => {
                let spec = self.ops[op].messages[message];
                let key = self.key(op, message);
                self.peer(spec.to, spec.from).done(key);
            }
            Action::Close { pair, stream, side, skew, after } => {
                if self.pairs[pair].up[stream] != [true; 2] {
                    return;
                }
                self.down(pair, stream, side);
                // What this side had written may still arrive, or not.
                if self.rng.random() {
                    self.network.clear(Direction { pair, side, stream });
                }
                self.schedule(now.plus(skew), Action::CloseOther { pair, stream, side: 1 - side, after });
            }
            Action::CloseOther { pair, stream, side, after } => {
                self.down(pair, stream, side);
                (0..2).for_each(|side| self.network.clear(Direction { pair, side, stream }));
                if after > 0 {
                    let at = now.plus(after);
                    // The acceptor's first frames follow its WELCOME through the same pipe.
                    self.schedule(at, Action::Open { pair, stream, side });
                    self.schedule(at.plus(self.network.delay(stream)), Action::Open { pair, stream, side: 1 - side });
                }
            }
            Action::Open { pair, stream, side } => {
                let Pair { peers, up, touched, .. } = &mut self.pairs[pair];
                peers[side].stream_up(stream as StreamId, now);
                up[stream][side] = true;
                touched[side] = true;
            }
            Action::Rate { pair, stream, mbit_per_s } => {
                for side in 0..2 {
                    self.network.set_rate(Direction { pair, side, stream }, mbit_per_s, now);
                }
            }
        }
    }

    fn down(&mut self, pair: usize, stream: usize, side: usize) {
        let Pair { peers, up, touched, reading, .. } = &mut self.pairs[pair];
        let stats = peers[side].streams[&(stream as StreamId)].stats;
        self.losses += 1;
        self.lost_frames += stats.sent_frames;
        self.lost_repeats += stats.repeated_frames;
        peers[side].stream_down(stream as StreamId);
        up[stream][side] = false;
        touched[side] = true;
        reading[stream][side] = None;
        self.network.clear(Direction { pair, side: 1 - side, stream });
    }

    /// All that was sent has arrived and all operations are over: a machine holds nothing but running totals, and the
    /// two ends agree on them.
    pub(super) fn assert_nothing_is_left(&self) {
        for pair in &self.pairs {
            for (peer, other) in [(&pair.peers[0], &pair.peers[1]), (&pair.peers[1], &pair.peers[0])] {
                assert!(
                    peer.outbox.messages.is_empty() && peer.outbox.by_key.is_empty() && peer.outbox.ready.is_empty()
                );
                assert!(peer.controls.frames.is_empty() && peer.controls.queue.is_empty() && peer.events.is_empty());
                assert!(peer.ops.is_empty() && peer.remembered == Remembered::default(), "{:?}", peer.ops);
                let ours = &peer.credit;
                let theirs = &other.credit;
                assert!(ours.reserved == ours.used && ours.used == theirs.consumed && ours.returned <= ours.used);
                assert!(theirs.counted.count() <= 1 && theirs.counted.total() == ours.used);
                assert!(other.controls.taken.count() <= 1 && other.controls.taken.total() == peer.controls.sent);
            }
        }
    }

    fn see(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    pub(super) fn describe(&self) -> String {
        let open: Vec<_> = self
            .locals
            .iter()
            .enumerate()
            .flat_map(|(node, locals)| locals.iter().enumerate().map(move |(op, local)| (node, op, local)))
            .filter(|(_, _, local)| !local.retired)
            .collect();
        let streams: Vec<_> =
            self.pairs.iter().map(|pair| (&pair.up, pair.peers.each_ref().map(Peer::stats))).collect();
        format!("open operations {open:?}; streams {streams:?}; scheduled {:?}", self.scheduled)
    }

    /// Frames that left once more, by the machines' own count, and frames that had to leave.
    pub(super) fn repeated(&self) -> (u64, u64) {
        let peers = || self.pairs.iter().flat_map(|pair| &pair.peers);
        let sum = |of: fn(&StreamStats) -> u64| peers().flat_map(Peer::stats).map(|(_, s)| of(&s)).sum::<u64>();
        let repeated = sum(|stats| stats.repeated_frames) + self.lost_repeats;
        (repeated, sum(|stats| stats.sent_frames) + self.lost_frames - repeated)
    }
}

impl Local {
    fn is_done(&self) -> bool {
        self.to_issue == 0 && self.to_be_sent == 0 && self.to_receive == 0
    }
}

/// The bytes of a frame, at the moment when they are looked at: once a message was sent its memory is scribbled on,
/// once its operation is over it is gone.
fn resolve(
    source: &Source,
    ops: &[Op],
    index: &HashMap<(OpKey, usize), usize>,
    locals: &[Vec<Local>],
    got: &[Vec<Got>],
    (from, to): (usize, usize),
) -> Vec<u8> {
    match source {
        Source::Owned(bytes, range) => bytes[range.clone()].to_vec(),
        Source::Memory(key, offset, length) => {
            let op = index[&(OpKey::of(key), from)];
            let message = ops[op].messages.iter().position(|m| (m.from, m.to, m.number) == (from, to, key.message));
            let mut bytes = vec![0xee; *length as usize];
            if !got[op][message.expect("known")].sent && !locals[from][op].retired {
                pattern(from, key, *offset, &mut bytes);
            }
            bytes
        }
    }
}

/// Fills `out` with bytes `offset..` of a message: they differ between messages, senders and places.
pub(super) fn pattern(from: usize, key: &MessageKey, offset: u64, out: &mut [u8]) {
    thread_local! {
        static TABLE: Vec<u8> = {
            let mut rng = XorShiftRng::seed_from_u64(7);
            (0..TABLE_BYTES).map(|_| rng.random()).collect()
        };
    }
    // A prime that is no multiple of any frame's length.
    const TABLE_BYTES: usize = 65_521;
    let space = match key.space {
        NumberSpace::Collective(number) => u64::from(number.0) << 34,
        NumberSpace::PointToPoint { direction, tag } => 1 + 2 * u64::from(tag) + direction as u64,
    };
    let name = [key.group.0, space, key.op.0, u64::from(key.message), from as u64];
    let start = name.iter().fold(17u64, |hash, word| (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29));
    TABLE.with(|table| {
        let mut at = ((start % TABLE_BYTES as u64 + offset) % TABLE_BYTES as u64) as usize;
        let mut out = out;
        while !out.is_empty() {
            let take = out.len().min(table.len() - at);
            let (now, rest) = out.split_at_mut(take);
            now.copy_from_slice(&table[at..at + take]);
            out = rest;
            at = 0;
        }
    });
}

/// Prints the seed when a test panics while it exists.
pub(super) struct Seed(pub(super) u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {}", self.0);
        }
    }
}
