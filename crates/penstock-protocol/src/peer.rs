//! Everything between two nodes, over any number of streams.
//!
//! Outgoing: messages wait in one queue, ordered by urgency; a stream with room *pulls* the next frame ([`Peer::poll_frame`]).
//! Nothing is assigned to a stream in advance, so a slow stream carries less. When the queue is empty, an idle stream
//! repeats the frame that a slower one would deliver last.
//!
//! Incoming: a frame is taken once. Streams may bring it twice (after a loss, or a take-over); the second is discarded
//! or, if the first is still arriving, the race is won by whichever is whole first.
//!
//! ```text
//!   send() ─► waiting for a grant ─► ready ─► in flight on a stream ─► acknowledged ─► Event::Sent
//!                 (large only)        ▲              │
//!                                     └── stream lost┘
//! ```
//! A message below the eager limit is copied and leaves at once within the eager credit; a longer one leaves after the
//! receiver has granted it, that is, after it has posted the operation and knows where the bytes go. So a node never
//! holds more for a peer than the eager credit, and an operation that all ranks have posted never waits for memory.

use crate::frame::{FLAG_PAYLOAD_SUM, FrameError, Header, Kind, MAX_REPORT_BYTES, MessageKey, Reference};
use crate::stream::{Stream, StreamStats};
use penstock_types::{FailureKind, Generation, GroupId, MILLISECOND, OpSeq, Priority, SECOND, Time};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

/// Names a stream of a peer.
pub type StreamId = u32;

/// What a [`Peer`] is told once.
#[derive(Clone, Debug)]
pub struct PeerConfig {
    /// Frames of another generation are refused.
    pub generation: Generation,
    /// Messages up to this long are copied and sent without a grant. At most one frame.
    pub eager_bytes: u64,
    /// Bytes of eager messages that may wait at the receiver for an operation that it has not posted.
    pub eager_credit_bytes: u64,
    /// The peer can read our memory: longer messages travel as references.
    pub references: bool,
    /// Cover payloads with a CRC32C.
    pub checksum: bool,
    /// Upper bound on a stream's unacknowledged bytes.
    pub unacked_limit_bytes: u64,
    /// A silent stream is asked for a sign of life this often.
    pub heartbeat_every: u64,
    /// A peer that is silent this long on all streams is lost.
    pub dead_after: u64,
}

impl Default for PeerConfig {
    fn default() -> PeerConfig {
        PeerConfig {
            generation: Generation(0),
            eager_bytes: 32 * 1024,
            eager_credit_bytes: 1024 * 1024,
            references: false,
            checksum: false,
            unacked_limit_bytes: 8 * 1024 * 1024,
            heartbeat_every: 500 * MILLISECOND,
            dead_after: 4 * SECOND,
        }
    }
}

/// A message to send.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// Its name.
    pub key: MessageKey,
    /// How urgent.
    pub priority: Priority,
    /// What we believe the operation to be.
    pub fingerprint: u64,
    /// The bytes.
    pub body: Body,
}

/// The bytes of an outgoing message.
#[derive(Clone, Debug)]
pub enum Body {
    /// A copy of our own; sent as far as the caller is concerned.
    Owned(Arc<[u8]>),
    /// `len` bytes at `address`, which stay as they are until [`Event::Sent`].
    Memory {
        /// Where they are, for a peer that can read our memory.
        address: u64,
        /// How many.
        len: u64,
    },
}

impl Body {
    fn len(&self) -> u64 {
        match self {
            Body::Owned(bytes) => bytes.len() as u64,
            Body::Memory { len, .. } => *len,
        }
    }
}

/// A frame to write.
#[derive(Clone, Debug)]
pub struct Outbound {
    /// Its header; `payload_sum` is filled in by [`seal`].
    pub header: Header,
    /// What follows.
    pub payload: Payload,
}

/// Where an outbound frame's payload is.
#[derive(Clone, Debug)]
pub enum Payload {
    /// Here.
    Owned(Arc<[u8]>, Range<usize>),
    /// In the memory of the message's operation, at the header's offset.
    Memory,
}

/// Encodes an outbound frame's header over its payload.
#[must_use]
pub fn seal(mut header: Header, payload: &[u8]) -> [u8; Header::BYTES] {
    if header.flags & FLAG_PAYLOAD_SUM != 0 {
        header.payload_sum = crc32c::crc32c(payload);
    }
    header.encode()
}

/// Whether a received payload is what was sent.
pub fn verify(header: &Header, payload: &[u8]) -> Result<(), FrameError> {
    if header.flags & FLAG_PAYLOAD_SUM != 0 && crc32c::crc32c(payload) != header.payload_sum {
        return Err(FrameError::PayloadSum);
    }
    Ok(())
}

/// What the receiver knows of the operation that a frame belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpStatus {
    /// Not posted here yet.
    Early,
    /// Posted, not finished.
    Active,
    /// Finished: whatever comes is a duplicate.
    Retired,
}

/// What to do with the payload of a frame whose header has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Read it where it belongs.
    Take,
    /// Another stream is bringing the same bytes: read them to a place of their own, the first to be whole wins.
    Race,
    /// Read it and forget it.
    Discard,
}

/// What a whole frame means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// Use the payload. False for a duplicate.
    pub apply: bool,
    /// This stream is still reading the same frame: it must discard the rest.
    pub revoke: Option<StreamId>,
}

/// What happened, for the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The receiver has all of a message whose body was [`Body::Memory`]: its bytes may change now.
    Sent(MessageKey),
    /// The peer waits for us in this operation, which it believes to be this.
    Probe(MessageKey, u64),
    /// How many operations the peer has issued in the channel of the key.
    Issued(MessageKey, u64),
    /// The peer is ready for messages of this operation, which it believes to be this.
    Granted(MessageKey, u64),
    /// The group has failed at the peer, or the peer forwards that it has.
    Report(GroupId, Report),
    /// The peer leaves in good order.
    Bye,
    /// This stream is silent although the peer is not: close it.
    Stalled(StreamId),
    /// Nothing has been heard from the peer for `dead_after`.
    Silent,
}

/// Why a group failed, as told to its other members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The failure's kind.
    pub kind: FailureKind,
    /// Its message.
    pub message: String,
}

/// One end of a pair of nodes. See the module's documentation.
#[derive(Debug)]
pub struct Peer {
    config: PeerConfig,
    streams: HashMap<StreamId, Stream<FrameId>>,
    outgoing: HashMap<u64, Message>,
    by_key: HashMap<MessageKey, u64>,
    ready: BTreeSet<(Priority, u64)>,
    next_issue: u64,
    control: VecDeque<Control>,
    grants: HashMap<OpKey, Vec<Range<u32>>>,
    incoming: HashMap<OpKey, HashMap<u32, Incoming>>,
    credit: Credit,
    last_heard: Time,
    events: VecDeque<Event>,
}

impl Peer {
    /// A peer without streams yet.
    #[must_use]
    pub fn new(config: PeerConfig, now: Time) -> Peer {
        Peer {
            config,
            streams: HashMap::new(),
            outgoing: HashMap::new(),
            by_key: HashMap::new(),
            ready: BTreeSet::new(),
            next_issue: 0,
            control: VecDeque::new(),
            grants: HashMap::new(),
            incoming: HashMap::new(),
            credit: Credit::default(),
            last_heard: now,
            events: VecDeque::new(),
        }
    }

    /// The configuration it runs with.
    #[must_use]
    pub fn config(&self) -> &PeerConfig {
        &self.config
    }

    /// Messages up to this long are to be sent as [`Body::Owned`]. A reference costs less than two copies early.
    #[must_use]
    pub fn eager_limit(&self) -> u64 {
        if self.config.references { self.config.eager_bytes.min(REFERENCE_ABOVE) } else { self.config.eager_bytes }
    }

    // ------------------------------------------------------------------ streams

    /// A stream has passed its hand-shake.
    pub fn stream_up(&mut self, stream: StreamId, now: Time) {
        self.streams.insert(stream, Stream::new(now));
        self.last_heard = now;
    }

    /// A stream is gone: what it had in flight goes to the others.
    pub fn stream_down(&mut self, stream: StreamId) {
        let Some(lost) = self.streams.remove(&stream) else { return };
        for frame in lost.in_flight.into_iter().rev() {
            match frame.frame {
                FrameId::Control(control) => self.control.push_front(control),
                FrameId::Data { issue, index } => {
                    if let Some(message) = self.outgoing.get_mut(&issue) {
                        let frame = &mut message.frames[index as usize];
                        frame.copies -= 1;
                        if !frame.acked && frame.copies == 0 {
                            message.again.push(index);
                            self.ready.insert((message.priority, issue));
                        }
                    }
                }
            }
        }
        // What was arriving on it never became whole.
        for messages in self.incoming.values_mut() {
            for message in messages.values_mut() {
                message.arriving.retain(|_, on| *on != stream);
            }
        }
    }

    /// How many streams are up.
    #[must_use]
    pub fn stream_count(&self) -> usize {
        self.streams.len()
    }

    /// The streams' counters, by stream.
    #[must_use]
    pub fn stats(&self) -> Vec<(StreamId, StreamStats)> {
        let mut all: Vec<_> =
            self.streams.iter().map(|(id, s)| (*id, s.snapshot(self.config.unacked_limit_bytes))).collect();
        all.sort_by_key(|(id, _)| *id);
        all
    }

    // ------------------------------------------------------------------ outgoing

    /// Queues a message. [`Body::Owned`] is for messages up to `eager_bytes`.
    pub fn send(&mut self, outgoing: Outgoing) {
        let issue = self.next_issue;
        self.next_issue += 1;
        let total = outgoing.body.len();
        let key = outgoing.key;
        let cost = eager_cost(total);
        let granted = self
            .grants
            .get(&OpKey::of(&key))
            .is_some_and(|ranges| ranges.iter().any(|range| range.contains(&key.message)));
        let mut message = Message {
            key,
            priority: outgoing.priority,
            fingerprint: outgoing.fingerprint,
            total,
            body: outgoing.body,
            eager: false,
            frames: Vec::new(),
            cut: 0,
            again: Vec::new(),
            acked_bytes: 0,
        };
        if self.config.references && matches!(message.body, Body::Memory { .. }) {
            let Body::Memory { address, .. } = message.body else { unreachable!("matched above") };
            let mut header = Header::new(Kind::Reference, key);
            header.fingerprint = message.fingerprint;
            header.total = total;
            header.priority = message.priority;
            header.length = Reference::BYTES as u32;
            self.control.push_back(Control { header, payload: Some(Reference { address }.encode().as_slice().into()) });
        } else if granted {
            self.ready.insert((message.priority, issue));
        } else if matches!(message.body, Body::Owned(_)) {
            if self.credit.take(cost, self.config.eager_credit_bytes) {
                message.eager = true;
                self.ready.insert((message.priority, issue));
            } else {
                let mut header = Header::new(Kind::Announce, key);
                header.fingerprint = message.fingerprint;
                header.total = total;
                self.control.push_back(Control { header, payload: None });
            }
        }
        self.by_key.insert(key, issue);
        self.outgoing.insert(issue, message);
    }

    /// Tells the peer that we are ready for messages `key.message..key.message + count`.
    pub fn grant(&mut self, key: MessageKey, count: u32, fingerprint: u64) {
        let mut header = Header::new(Kind::Grant, key);
        header.offset = u64::from(count);
        header.fingerprint = fingerprint;
        self.control.push_back(Control { header, payload: None });
    }

    /// Tells the peer that the message it gave by reference was read.
    pub fn done(&mut self, key: MessageKey) {
        self.control.push_back(Control { header: Header::new(Kind::Done, key), payload: None });
    }

    /// Asks the peer where it is in this operation.
    pub fn probe(&mut self, key: MessageKey, fingerprint: u64) {
        let mut header = Header::new(Kind::Probe, key);
        header.fingerprint = fingerprint;
        self.control.push_back(Control { header, payload: None });
    }

    /// Answers a probe: `issued` operations have been issued in the channel.
    pub fn answer_probe(&mut self, key: MessageKey, issued: u64) {
        let mut header = Header::new(Kind::ProbeReply, key);
        header.offset = issued;
        self.control.push_back(Control { header, payload: None });
    }

    /// Tells the peer that a group has failed.
    pub fn report(&mut self, group: GroupId, report: &Report) {
        let key = MessageKey { group, channel: 0, op: OpSeq(0), message: report.kind as u32 };
        let mut text = report.message.clone();
        while text.len() > MAX_REPORT_BYTES as usize {
            text.pop();
        }
        let mut header = Header::new(Kind::Report, key);
        header.length = text.len() as u32;
        // Failures overtake everything else.
        self.control.push_front(Control { header, payload: Some(text.as_bytes().into()) });
    }

    /// Says good-bye; meant to follow [`Peer::is_quiet`].
    pub fn bye(&mut self) {
        let key = MessageKey { group: GroupId(0), channel: 0, op: OpSeq(0), message: 0 };
        self.control.push_back(Control { header: Header::new(Kind::Bye, key), payload: None });
    }

    /// Everything that was given to this peer has been taken by the other end.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.outgoing.is_empty()
            && self.control.is_empty()
            && self.streams.values().all(|stream| stream.in_flight.is_empty())
    }

    /// Forgets everything about an operation: it is finished here.
    pub fn retire(&mut self, group: GroupId, channel: u32, op: OpSeq) {
        let key = OpKey { group, channel, op };
        self.grants.remove(&key);
        self.incoming.remove(&key);
    }

    /// Forgets a whole group: it has failed or was closed. Messages not yet taken are dropped.
    pub fn forget_group(&mut self, group: GroupId) {
        self.grants.retain(|key, _| key.group != group);
        self.incoming.retain(|key, _| key.group != group);
        self.by_key.retain(|key, _| key.group != group);
        self.outgoing.retain(|issue, message| {
            let keep = message.key.group != group;
            if !keep {
                self.ready.remove(&(message.priority, *issue));
            }
            keep
        });
        self.control.retain(|control| control.header.key.group != group || control.header.kind == Kind::Report);
    }

    /// The next frame for a stream that can take bytes, most urgent first; `None` when there is nothing for it.
    pub fn poll_frame(&mut self, stream: StreamId, now: Time) -> Option<Outbound> {
        let outbound = self.next_frame(stream, now)?;
        Some(self.stamp(stream, outbound))
    }

    fn next_frame(&mut self, id: StreamId, now: Time) -> Option<Outbound> {
        let limit = self.config.unacked_limit_bytes;
        let stream = self.streams.get_mut(&id)?;
        if let Some(control) = self.control.pop_front() {
            let payload = control.payload.clone().unwrap_or_else(|| Arc::from([]));
            let bytes = payload.len();
            stream.sent(FrameId::Control(control.clone()), bytes as u32, now);
            return Some(Outbound { header: control.header, payload: Payload::Owned(payload, 0..bytes) });
        }
        if stream.owes_reply {
            stream.owes_reply = false;
            return Some(bare(Kind::HeartbeatReply));
        }
        if stream.unacked_bytes < stream.window(limit) {
            if let Some(&(priority, issue)) = self.ready.first() {
                let message = self.outgoing.get_mut(&issue).expect("ready messages are outgoing");
                let (index, repeated) = message.next_frame(stream.frame_bytes());
                if !message.has_frames() {
                    self.ready.remove(&(priority, issue));
                }
                stream.stats.repeated_frames += u64::from(repeated);
                return Some(self.data_frame(id, issue, index, now));
            }
            if let Some((issue, index)) = self.slowest_frame(id, now) {
                self.streams.get_mut(&id).expect("looked up above").stats.repeated_frames += 1;
                return Some(self.data_frame(id, issue, index, now));
            }
        }
        let stream = self.streams.get_mut(&id).expect("looked up above");
        if stream.wants_heartbeat {
            stream.wants_heartbeat = false;
            return Some(bare(Kind::Heartbeat));
        }
        if stream.owes_ack || self.credit.owes_update {
            return Some(bare(Kind::Ack));
        }
        None
    }

    /// Puts frame `index` of a message on a stream.
    fn data_frame(&mut self, id: StreamId, issue: u64, index: u32, now: Time) -> Outbound {
        let stream = self.streams.get_mut(&id).expect("the caller has looked it up");
        let message = self.outgoing.get_mut(&issue).expect("the caller has looked it up");
        let frame = &mut message.frames[index as usize];
        frame.copies += 1;
        stream.sent(FrameId::Data { issue, index }, frame.len, now);
        let mut header = Header::new(Kind::Data, message.key);
        header.priority = message.priority;
        header.fingerprint = message.fingerprint;
        header.offset = frame.offset;
        header.total = message.total;
        header.length = frame.len;
        if self.config.checksum {
            header.flags |= FLAG_PAYLOAD_SUM;
        }
        if message.eager {
            header.flags |= FLAG_EAGER;
        }
        let payload = match &message.body {
            Body::Owned(bytes) => {
                let start = frame.offset as usize;
                Payload::Owned(bytes.clone(), start..start + frame.len as usize)
            }
            Body::Memory { .. } => Payload::Memory,
        };
        Outbound { header, payload }
    }

    /// The frame that some slower stream will deliver last, if this idle stream would deliver it much sooner.
    ///
    /// Only the tail of a stream is looked at: what it sent last is what it will deliver last.
    fn slowest_frame(&self, idle: StreamId, now: Time) -> Option<(u64, u32)> {
        if self.streams.len() < 2 {
            return None;
        }
        let own = self.streams.get(&idle)?;
        let mut worst: Option<(u64, u64, u32)> = None;
        for (id, stream) in &self.streams {
            if *id == idle || stream.in_flight.is_empty() {
                continue;
            }
            let Some((issue, index, bytes)) = stream.in_flight.iter().rev().find_map(|in_flight| {
                let FrameId::Data { issue, index } = in_flight.frame else { return None };
                let frame = self.outgoing.get(&issue)?.frames.get(index as usize)?;
                (!frame.acked && frame.copies == 1).then_some((issue, index, frame.len))
            }) else {
                continue;
            };
            let theirs = stream.time_to_deliver(0, now);
            let ours = own.time_to_deliver(u64::from(bytes), now) + own.round_trip() / 2;
            if theirs > TAKE_OVER_RATIO * ours + TAKE_OVER_MARGIN && worst.is_none_or(|(time, ..)| theirs > time) {
                worst = Some((theirs, issue, index));
            }
        }
        worst.map(|(_, issue, index)| (issue, index))
    }

    /// Adds what every frame carries for the other direction.
    fn stamp(&mut self, id: StreamId, mut outbound: Outbound) -> Outbound {
        let stream = self.streams.get_mut(&id).expect("frames are polled for streams that are up");
        stream.owes_ack = false;
        self.credit.owes_update = false;
        self.credit.told = self.credit.consumed;
        outbound.header.ack = stream.taken_frames;
        outbound.header.credit = self.credit.consumed;
        outbound.header.generation = self.config.generation;
        outbound
    }

    // ------------------------------------------------------------------ incoming

    /// A header has arrived. `status` tells about the operation of a data frame or reference.
    pub fn handle_header(
        &mut self,
        id: StreamId,
        header: &Header,
        status: OpStatus,
        now: Time,
    ) -> Result<Arrival, FrameError> {
        if header.generation != self.config.generation {
            return Err(FrameError::OutOfTurn("it belongs to another generation of the job"));
        }
        self.last_heard = now;
        let stream = self.streams.get_mut(&id).ok_or(FrameError::OutOfTurn("its stream is not up"))?;
        stream.last_heard = now;
        let taken =
            stream.acknowledged(header.ack, now).ok_or(FrameError::OutOfTurn("it acknowledges unsent frames"))?;
        for frame in taken {
            self.frame_taken(frame);
        }
        self.handle_credit(header.credit)?;
        if header.kind != Kind::Data {
            return Ok(Arrival::Take);
        }
        let eager = header.flags & FLAG_EAGER != 0;
        if eager && (header.total > self.config.eager_bytes || u64::from(header.length) != header.total) {
            return Err(FrameError::OutOfTurn("an eager message above the eager limit"));
        }
        if status == OpStatus::Early && !eager {
            return Err(FrameError::OutOfTurn("data of an operation that was not granted"));
        }
        if status == OpStatus::Retired {
            return Ok(Arrival::Discard);
        }
        let op = self.incoming.entry(OpKey::of(&header.key)).or_default();
        if status == OpStatus::Early && !op.contains_key(&header.key.message) {
            let held = self.credit.held + eager_cost(header.total);
            if held > self.config.eager_credit_bytes {
                return Err(FrameError::OutOfTurn("eager messages beyond the credit"));
            }
        }
        let message = op.entry(header.key.message).or_insert_with(|| Incoming::new(header.total));
        message.check_range(header)?;
        if message.done.contains_key(&header.offset) {
            return Ok(Arrival::Discard);
        }
        if message.arriving.contains_key(&header.offset) {
            return Ok(Arrival::Race);
        }
        message.arriving.insert(header.offset, id);
        Ok(Arrival::Take)
    }

    /// The frame is whole and its payload verified. For data: records it; the caller applies the payload before it
    /// polls the next frame, so that no ack can leave before.
    pub fn handle_frame(
        &mut self,
        id: StreamId,
        header: &Header,
        payload: &[u8],
        status: OpStatus,
    ) -> Result<Finish, FrameError> {
        let mut finish = Finish { apply: true, revoke: None };
        if let Some(stream) = self.streams.get_mut(&id)
            && header.kind.is_counted()
        {
            stream.taken_frames = stream.taken_frames.wrapping_add(1);
            stream.owes_ack = true;
            stream.stats.received_bytes += u64::from(header.length);
        }
        match header.kind {
            Kind::Data => {
                let message = match status {
                    OpStatus::Retired => None,
                    _ => self
                        .incoming
                        .get_mut(&OpKey::of(&header.key))
                        .and_then(|messages| messages.get_mut(&header.key.message)),
                };
                finish.apply = match message {
                    Some(message) if !message.done.contains_key(&header.offset) => {
                        finish.revoke = message.arriving.remove(&header.offset).filter(|first| *first != id);
                        message.done.insert(header.offset, header.length);
                        if header.flags & FLAG_EAGER != 0 {
                            self.credit.held += eager_cost(header.total);
                        }
                        true
                    }
                    _ => false,
                };
                if !finish.apply
                    && let Some(stream) = self.streams.get_mut(&id)
                {
                    stream.stats.duplicate_frames += 1;
                }
            }
            Kind::Reference => {
                // Recorded like data, so that a repeat after a lost stream is not read twice.
                if status == OpStatus::Retired {
                    finish.apply = false;
                } else {
                    let op = self.incoming.entry(OpKey::of(&header.key)).or_default();
                    let message = op.entry(header.key.message).or_insert_with(|| Incoming::new(header.total));
                    finish.apply = message.done.insert(0, 0).is_none();
                }
            }
            Kind::Done => {
                if let Some(issue) = self.by_key.get(&header.key).copied() {
                    self.forget_message(issue);
                    self.events.push_back(Event::Sent(header.key));
                }
            }
            Kind::Grant => self.handle_grant(header),
            Kind::Announce => {
                // The engine grants it when the operation is posted; remembering is its affair.
                finish.apply = status != OpStatus::Retired;
            }
            Kind::Probe => self.events.push_back(Event::Probe(header.key, header.fingerprint)),
            Kind::ProbeReply => self.events.push_back(Event::Issued(header.key, header.offset)),
            Kind::Report => self.events.push_back(Event::Report(header.key.group, Report::decode(header, payload))),
            Kind::Bye => self.events.push_back(Event::Bye),
            Kind::Heartbeat => {
                if let Some(stream) = self.streams.get_mut(&id) {
                    stream.owes_reply = true;
                }
            }
            Kind::Ack | Kind::HeartbeatReply => {}
        }
        Ok(finish)
    }

    /// An eager message was put to use (or its operation failed): the peer may send as much again.
    pub fn consumed(&mut self, total: u64) {
        let cost = eager_cost(total);
        self.credit.held = self.credit.held.saturating_sub(cost);
        self.credit.consumed += cost;
        if self.credit.consumed - self.credit.told >= self.config.eager_credit_bytes / 4 {
            self.credit.owes_update = true;
        }
    }

    /// What has happened since the last call.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn frame_taken(&mut self, frame: FrameId) {
        let FrameId::Data { issue, index } = frame else { return };
        let Some(message) = self.outgoing.get_mut(&issue) else { return };
        let frame = &mut message.frames[index as usize];
        frame.copies -= 1;
        if frame.acked {
            return;
        }
        frame.acked = true;
        message.acked_bytes += u64::from(frame.len);
        if message.acked_bytes == message.total && message.cut == message.total {
            let (key, owned) = (message.key, matches!(message.body, Body::Owned(_)));
            self.forget_message(issue);
            if !owned {
                self.events.push_back(Event::Sent(key));
            }
        }
    }

    fn forget_message(&mut self, issue: u64) {
        if let Some(message) = self.outgoing.remove(&issue) {
            self.by_key.remove(&message.key);
            self.ready.remove(&(message.priority, issue));
        }
    }

    fn handle_grant(&mut self, header: &Header) {
        let first = header.key.message;
        let range = first..first.saturating_add(header.offset.min(u64::from(u32::MAX)) as u32);
        let waiting: Vec<u64> = self
            .by_key
            .iter()
            .filter(|(key, _)| OpKey::of(key) == OpKey::of(&header.key) && range.contains(&key.message))
            .map(|(_, issue)| *issue)
            .collect();
        for issue in waiting {
            let message = &self.outgoing[&issue];
            if message.has_frames() {
                self.ready.insert((message.priority, issue));
            }
        }
        self.grants.entry(OpKey::of(&header.key)).or_default().push(range);
        self.events.push_back(Event::Granted(header.key, header.fingerprint));
    }

    fn handle_credit(&mut self, credit: u64) -> Result<(), FrameError> {
        if credit > self.credit.sent {
            return Err(FrameError::OutOfTurn("it returns credit that was never used"));
        }
        self.credit.returned = self.credit.returned.max(credit);
        Ok(())
    }

    // ------------------------------------------------------------------ time

    /// When [`Peer::handle_timeout`] wants to be called.
    #[must_use]
    pub fn poll_timeout(&self, now: Time) -> Time {
        let in_flight = self.streams.values().any(|stream| !stream.in_flight.is_empty());
        let idle = self.streams.values().any(|stream| stream.in_flight.is_empty());
        if in_flight && idle { now.plus(TAKE_OVER_CHECK) } else { now.plus(self.config.heartbeat_every / 2) }
    }

    /// Looks for silence.
    pub fn handle_timeout(&mut self, now: Time) {
        if now.since(self.last_heard) > self.config.dead_after {
            self.events.push_back(Event::Silent);
            return;
        }
        let every = self.config.heartbeat_every;
        for (id, stream) in &mut self.streams {
            let silent = now.since(stream.last_heard);
            if silent > every && now.since(stream.last_heartbeat) > every {
                stream.wants_heartbeat = true;
                stream.last_heartbeat = now;
            }
            // The peer lives (others bring its frames), this stream does not.
            if silent > self.config.dead_after / 2 && now.since(self.last_heard) < every {
                self.events.push_back(Event::Stalled(*id));
            }
        }
    }
}

impl Report {
    fn decode(header: &Header, payload: &[u8]) -> Report {
        use FailureKind::*;
        let kind = [Mismatch, PeerLost, Timeout, Refused, Config, Closed, Bug]
            .into_iter()
            .find(|kind| *kind as u32 == header.key.message)
            .unwrap_or(Bug);
        Report { kind, message: String::from_utf8_lossy(payload).into_owned() }
    }
}

/// One operation's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct OpKey {
    group: GroupId,
    channel: u32,
    op: OpSeq,
}

impl OpKey {
    fn of(key: &MessageKey) -> OpKey {
        OpKey { group: key.group, channel: key.channel, op: key.op }
    }
}

/// What a stream has in flight.
#[derive(Clone, Debug)]
enum FrameId {
    Control(Control),
    Data { issue: u64, index: u32 },
}

#[derive(Clone, Debug)]
struct Control {
    header: Header,
    payload: Option<Arc<[u8]>>,
}

/// An outgoing message and its frames.
#[derive(Debug)]
struct Message {
    key: MessageKey,
    priority: Priority,
    fingerprint: u64,
    total: u64,
    body: Body,
    /// It travels on eager credit.
    eager: bool,
    /// Cut so far, in order of offset.
    frames: Vec<OutFrame>,
    /// Bytes cut so far.
    cut: u64,
    /// Frames whose stream was lost.
    again: Vec<u32>,
    acked_bytes: u64,
}

#[derive(Debug)]
struct OutFrame {
    offset: u64,
    len: u32,
    acked: bool,
    /// How many streams have it in flight.
    copies: u8,
}

impl Message {
    /// Whether a stream could pull another frame.
    fn has_frames(&self) -> bool {
        !self.again.is_empty() || self.cut < self.total || self.frames.is_empty()
    }

    /// The next frame to send, cut to `bytes` if it is new, and whether it was sent before.
    fn next_frame(&mut self, bytes: u32) -> (u32, bool) {
        if let Some(index) = self.again.pop() {
            return (index, true);
        }
        let left = self.total - self.cut;
        // A remainder below half a frame is not worth a frame of its own.
        let len = if left < u64::from(bytes) + u64::from(bytes) / 2 && left <= u64::from(crate::frame::MAX_FRAME_BYTES)
        {
            left
        } else {
            left.min(u64::from(bytes))
        };
        self.frames.push(OutFrame { offset: self.cut, len: len as u32, acked: false, copies: 0 });
        self.cut += len;
        (self.frames.len() as u32 - 1, false)
    }
}

/// An incoming message: which of its bytes are here, and which are arriving.
#[derive(Debug)]
struct Incoming {
    total: u64,
    /// Offset to length of what was taken.
    done: std::collections::BTreeMap<u64, u32>,
    /// Offset to the stream that brings it.
    arriving: HashMap<u64, StreamId>,
}

impl Incoming {
    fn new(total: u64) -> Incoming {
        Incoming { total, done: Default::default(), arriving: HashMap::new() }
    }

    /// A frame must agree with the message's length and either equal a frame that is here or touch none.
    fn check_range(&self, header: &Header) -> Result<(), FrameError> {
        let wrong = FrameError::Range { offset: header.offset, length: header.length, total: header.total };
        if header.total != self.total {
            return Err(wrong);
        }
        let end = header.offset + u64::from(header.length);
        if let Some((offset, len)) = self.done.range(..end.max(header.offset + 1)).next_back() {
            let same = *offset == header.offset && *len == header.length;
            if !same && offset + u64::from(*len) > header.offset {
                return Err(wrong);
            }
        }
        Ok(())
    }
}

/// Eager bytes in both directions, as running totals: lost or repeated updates do no harm.
#[derive(Debug, Default)]
struct Credit {
    /// Sent on credit so far.
    sent: u64,
    /// Of these, consumed by the peer.
    returned: u64,
    /// Received on credit and consumed here.
    consumed: u64,
    /// What the peer knows of `consumed`.
    told: u64,
    /// Received on credit and not yet consumed.
    held: u64,
    owes_update: bool,
}

impl Credit {
    fn take(&mut self, cost: u64, limit: u64) -> bool {
        let fits = self.sent - self.returned + cost <= limit;
        if fits {
            self.sent += cost;
        }
        fits
    }
}

/// What an eager message counts: its bytes and what the receiver needs to remember it.
fn eager_cost(total: u64) -> u64 {
    total + 128
}

fn bare(kind: Kind) -> Outbound {
    let key = MessageKey { group: GroupId(0), channel: 0, op: OpSeq(0), message: 0 };
    Outbound { header: Header::new(kind, key), payload: Payload::Owned(Arc::from([]), 0..0) }
}

/// The message travels on eager credit.
pub const FLAG_EAGER: u16 = 2;
/// Above this, one copy by `process_vm_readv` (some microseconds to start) beats two through a socket.
const REFERENCE_ABOVE: u64 = 8 * 1024;
/// An idle stream takes a frame over when it expects to be this many times faster, ...
const TAKE_OVER_RATIO: u64 = 2;
/// ... and by this much: below, the copy costs more than it saves.
const TAKE_OVER_MARGIN: u64 = 3 * MILLISECOND;
/// How often idle streams look for frames to take over.
const TAKE_OVER_CHECK: u64 = 4 * MILLISECOND;

#[cfg(test)]
mod tests;
