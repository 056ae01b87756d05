//! Everything between two nodes, over any number of streams.
//!
//! Outgoing: messages wait in one queue, ordered by urgency; a stream with room *pulls* the next frame ([`Peer::poll_frame`]).
//! Nothing is assigned to a stream in advance, so a slow stream carries less. When the queue is empty, an idle stream
//! repeats the frame that a slower one would deliver last.
//!
//! Incoming: a frame is taken once. Streams may bring duplicates (after a loss, or a take-over). A duplicate is discarded; if
//! the first copy is still arriving, the copy that is complete first wins.
//!
//! ```text
//!   send() ─► waiting for a grant ─► ready ─► in flight on a stream ─► acknowledged ─► Event::Sent
//!                 (large only)        ▲              │
//!                                     └── stream lost┘
//! ```
//! A message below the eager limit is copied and leaves at once within the eager credit. A message beyond the credit stays in
//! its tensor, as a longer one does, and leaves after the receiver has granted it: the receiver has then posted the operation
//! and knows where the bytes go. So neither side holds more than the eager credit for the other, and an operation that all
//! ranks have posted never waits for memory.

use crate::fingerprint::Fingerprint;
pub use crate::frame::Farewell;
use crate::frame::{
    Channel, FLAG_PAYLOAD_SUM, FrameError, Header, Kind, MAX_FRAME_BYTES, MAX_REPORT_BYTES, MIN_FRAME_BYTES,
    MessageKey, Reference,
};
use crate::ranges::Ranges;
use crate::stream::{self, FRAME_GRAIN, Stream, StreamStats};
use penstock_types::{FailureKind, Generation, GroupId, MILLISECOND, OpSeq, Priority, SECOND, Time};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

/// Names a stream of a peer.
pub type StreamId = u32;

/// Configuration of a [`Peer`].
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
    /// Descriptors can be passed to the peer: messages above [`Peer::eager_limit`] in memory that we share travel as references.
    pub descriptors: bool,
    /// Cover payloads with a CRC32C.
    pub checksum: bool,
    /// Upper bound on a stream's unacknowledged bytes.
    pub unacked_limit_bytes: u64,
    /// How often a heartbeat is sent on a stream that receives nothing.
    pub heartbeat_every: u64,
    /// A peer from which no packet came on any stream for this long is lost.
    pub dead_after: u64,
}

impl Default for PeerConfig {
    fn default() -> PeerConfig {
        PeerConfig {
            generation: Generation(0),
            eager_bytes: 32 * 1024,
            eager_credit_bytes: 1024 * 1024,
            references: false,
            descriptors: false,
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
    /// Names the message.
    pub key: MessageKey,
    /// How urgent.
    pub priority: Priority,
    /// What this side believes the operation to be.
    pub fingerprint: Fingerprint,
    /// Identifies messages that are useful only together (a coflow); 0 for none.
    pub coflow: u32,
    /// The bytes.
    pub body: Body,
}

/// The bytes of an outgoing message.
#[derive(Clone, Debug)]
pub enum Body {
    /// A copy of our own. For the caller the message counts as sent.
    Owned(Arc<[u8]>),
    /// `len` bytes that must not change until [`Event::Sent`].
    Memory {
        /// Where the bytes are, for a peer that can read this process's memory.
        place: Reference,
        /// How many bytes.
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
    /// Where the payload is.
    pub payload: Payload,
}

/// Where an outbound frame's payload is.
#[derive(Clone, Debug)]
pub enum Payload {
    /// A range of these bytes.
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
    /// Posted here and not finished.
    Active,
    /// Finished here: every further frame of it is a duplicate.
    Retired,
}

/// What to do with the payload of a frame whose header has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Read the payload to its place in the operation.
    Take,
    /// Another stream is bringing the same bytes: read the payload to a separate buffer. The copy that is complete first wins.
    Race,
    /// Read the payload and discard it.
    Discard,
}

/// What the engine does with a complete frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// Use the payload. False for a duplicate.
    pub apply: bool,
    /// The stream that is still reading the same frame, and must discard the rest.
    pub revoke: Option<StreamId>,
}

/// What happened, for the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The receiver has all of a message whose body was [`Body::Memory`]: its bytes may change now.
    Sent(MessageKey),
    /// The peer waits for us in this operation; the fingerprint is the peer's view of it.
    Probe(MessageKey, Fingerprint),
    /// How many operations the peer has issued in the channel of the key.
    Issued(MessageKey, u64),
    /// The peer is ready for messages of this operation; the fingerprint is the peer's view of it.
    Granted(MessageKey, Fingerprint),
    /// The peer sends in an operation that has ended here; the fingerprint is the peer's view of it. Often a duplicate of a
    /// frame that was taken.
    Late(MessageKey, Fingerprint),
    /// The group has failed at the peer, or the peer forwards another rank's report.
    Report(GroupId, Report),
    /// The peer has left the group.
    Left(GroupId, Farewell),
    /// The peer leaves the job in good order.
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
    /// Another rank has told the reporter; the message names that rank.
    pub is_passed_on: bool,
    /// How many of the group's collectives still count: the reporter has ended them, and still delivers its part of them to
    /// the peer.
    pub finished: u64,
}

/// One end of a pair of nodes. See the module's documentation.
#[derive(Debug)]
pub struct Peer {
    config: PeerConfig,
    /// Ordered, so that the same calls give the same frames.
    streams: BTreeMap<StreamId, Stream<FrameId>>,
    /// How many of the streams that are up carry outgoing frames: the first ones.
    most_used: usize,
    /// The last of those streams.
    last_used: StreamId,
    /// Messages not yet acknowledged, by order of issue.
    outgoing: HashMap<u64, Message>,
    by_key: BTreeMap<MessageKey, u64>,
    /// Messages of which a stream could pull a frame.
    ready: BTreeSet<(Priority, u64)>,
    next_issue: u64,
    /// Control frames not yet acknowledged.
    controls: HashMap<u64, Control>,
    /// Control frames of `controls` that no stream has in flight.
    control_queue: VecDeque<u64>,
    next_control: u64,
    /// How many control frames were sent, and which of the peer's have arrived.
    control_serial: u64,
    controls_taken: Ranges,
    /// Groups that this side has left and whose `Left` frame is not sent yet: how many messages and control frames the peer
    /// must acknowledge first, and the farewell.
    leaving: BTreeMap<GroupId, (usize, Farewell)>,
    ops: HashMap<OpKey, Op>,
    /// How many records `ops` holds because the peer asked for them.
    remembered: usize,
    credit: Credit,
    /// Factor on [`TAKE_OVER_RATIO`] and [`TAKE_OVER_MARGIN`]: how long an idle stream waits before it takes a frame over.
    /// Grows with each copy that turned out to be a duplicate.
    patience: f64,
    /// The peer's newest frame said that the streams share a link ([`FLAG_SHARED`]).
    is_shared_there: bool,
    last_heard: Time,
    /// Since when the peer has been heard without a pause longer than a heartbeat interval.
    alive_since: Time,
    /// Since when the peer has been heard without a pause longer than [`ASK_EVERY`].
    awake_since: Time,
    /// [`Event::Silent`] was reported, and nothing has come since.
    silent: bool,
    next_check: Time,
    next_look: Time,
    events: VecDeque<Event>,
    /// [`Peer::end`] was called.
    has_ended: bool,
    /// A stream withholds the acknowledgement of the peer's good-bye ([`Peer::has_frames_out`]).
    withholds_ack: bool,
}

impl Peer {
    /// Creates a peer without streams.
    #[must_use]
    pub fn new(config: PeerConfig, now: Time) -> Peer {
        debug_assert!(config.eager_bytes <= u64::from(MAX_FRAME_BYTES), "an eager message is one frame");
        Peer {
            streams: BTreeMap::new(),
            most_used: usize::MAX,
            last_used: StreamId::MAX,
            outgoing: HashMap::new(),
            by_key: BTreeMap::new(),
            ready: BTreeSet::new(),
            next_issue: 0,
            controls: HashMap::new(),
            control_queue: VecDeque::new(),
            next_control: 0,
            control_serial: 0,
            controls_taken: Ranges::default(),
            leaving: BTreeMap::new(),
            ops: HashMap::new(),
            remembered: 0,
            credit: Credit::default(),
            last_heard: now,
            alive_since: now,
            awake_since: now,
            patience: 1.0,
            is_shared_there: false,
            silent: false,
            next_check: now.plus(config.heartbeat_every / 2),
            next_look: now,
            events: VecDeque::new(),
            has_ended: false,
            withholds_ack: false,
            config,
        }
    }

    /// The peer is gone. Forgets all state of the pair, and events that were not polled. Later messages to the peer are
    /// dropped, and no stream may come up any more.
    pub fn end(&mut self) {
        *self = Peer { has_ended: true, ..Peer::new(self.config.clone(), self.last_heard) };
    }

    /// The configuration it runs with.
    #[must_use]
    pub fn config(&self) -> &PeerConfig {
        &self.config
    }

    /// Messages up to this length are to be sent as [`Body::Owned`]. Lower where references are possible: above 8 KiB a
    /// reference costs less than two copies.
    #[must_use]
    pub fn eager_limit(&self) -> u64 {
        if self.config.references { self.config.eager_bytes.min(REFERENCE_ABOVE) } else { self.config.eager_bytes }
    }

    /// Whether the eager credit suffices to send a message of `total` bytes as [`Body::Owned`]. A message that has to wait for
    /// credit stays in its tensor, as [`Body::Memory`]. A peer that is gone gives no credit.
    #[must_use]
    pub fn has_credit(&self, total: u64) -> bool {
        !self.has_ended && self.credit.fits(total, self.config.eager_credit_bytes)
    }

    /// Bytes of messages that were copied and not yet acknowledged.
    #[must_use]
    pub fn copied_bytes(&self) -> usize {
        let copied = |message: &Message| match &message.body {
            Body::Owned(bytes) => bytes.len(),
            Body::Memory { .. } => 0,
        };
        self.outgoing.values().map(copied).sum()
    }

    /// Whether messages of a group still lie in the operations' memory and are not taken: the peer may be reading them there.
    #[must_use]
    pub fn lends(&self, group: GroupId) -> bool {
        self.outgoing.values().any(|message| message.key.group == group && matches!(message.body, Body::Memory { .. }))
    }

    /// How many operations have records here: messages that came or were granted, in either direction.
    #[must_use]
    pub fn remembered(&self) -> usize {
        self.ops.len()
    }

    /// Messages that the peer has not acknowledged.
    #[must_use]
    pub fn unacknowledged(&self) -> usize {
        self.outgoing.len()
    }

    /// Bytes of eager credit that our messages use and the peer has not given back.
    #[must_use]
    pub fn credit_in_use(&self) -> u64 {
        self.credit.reserved - self.credit.returned
    }

    /// Messages that count as sent, since they were copied, and that the peer has not acknowledged. Messages of forgotten
    /// groups are left out.
    pub fn undelivered(&self) -> impl Iterator<Item = (MessageKey, Fingerprint)> {
        let is_sent = |message: &&Message| !message.is_forgotten && matches!(message.body, Body::Owned(_));
        self.outgoing.values().filter(is_sent).map(|message| (message.key, message.fingerprint))
    }

    // ------------------------------------------------------------------ streams

    /// A stream has passed its hand-shake.
    pub fn stream_up(&mut self, stream: StreamId, now: Time) {
        // A new connection may replace one that was not known to be gone.
        self.stream_down(stream);
        let mut up = Stream::new(now);
        // Measures the stream's round trip before anything waits on it.
        up.ask(now);
        self.streams.insert(stream, up);
        self.choose_used();
        self.heard_at(now, 0);
    }

    /// A stream is gone: what it had in flight goes to the others.
    pub fn stream_down(&mut self, stream: StreamId) {
        let Some(lost) = self.streams.remove(&stream) else { return };
        self.choose_used();
        for in_flight in lost.in_flight.into_iter().rev() {
            match in_flight.frame {
                FrameId::Control(id) => {
                    if let Some(control) = self.controls.get_mut(&id)
                        && control.copies.remove(stream)
                    {
                        self.control_queue.push_front(id);
                    }
                }
                FrameId::Data { issue, index } => {
                    if let Some(message) = self.outgoing.get_mut(&issue) {
                        let frame = &mut message.frames[index as usize];
                        if frame.copies.remove(stream) && !frame.acked {
                            message.again.push(index);
                            self.ready.insert((message.priority, issue));
                        }
                    }
                }
            }
        }
        // Frames that were arriving on the stream are incomplete.
        for message in self.ops.values_mut().flat_map(|op| op.incoming.values_mut()) {
            message.lose(stream);
        }
        // The last word on credit may have been lost with it.
        self.credit.owes_update = true;
    }

    /// Sends messages on at most `most` streams: the first of those that are up, at least one. The other streams stay open:
    /// they send heartbeats and receive, since the peer decides for itself which streams it sends on. Frames in flight stay on
    /// their streams, so this may be called at any time.
    pub fn use_streams(&mut self, most: usize) {
        self.most_used = most.max(1);
        self.choose_used();
    }

    fn choose_used(&mut self) {
        self.last_used = self.streams.keys().nth(self.most_used - 1).copied().unwrap_or(StreamId::MAX);
    }

    /// How many streams are up.
    #[must_use]
    pub fn stream_count(&self) -> usize {
        self.streams.len()
    }

    /// The streams' counters, by stream.
    #[must_use]
    pub fn stats(&self) -> Vec<(StreamId, StreamStats)> {
        self.streams
            .iter()
            .map(|(id, s)| (*id, s.snapshot(self.config.unacked_limit_bytes, self.share_a_link())))
            .collect()
    }

    // ------------------------------------------------------------------ outgoing

    /// Queues a message. [`Body::Owned`] is for messages up to `eager_bytes` that have credit ([`Peer::has_credit`]). Others
    /// wait for a grant. Receivers grant messages above [`Peer::eager_limit`] unasked. So a shorter message is announced, and
    /// so is the first one of a send, which a receive from any source cannot grant unasked.
    pub fn send(&mut self, outgoing: Outgoing) {
        if self.has_ended {
            return;
        }
        let issue = self.next_issue;
        self.next_issue += 1;
        let Outgoing { key, priority, fingerprint, coflow, body } = outgoing;
        let total = body.len();
        let mut message = Message {
            key,
            priority,
            fingerprint,
            coflow,
            total,
            body,
            way: Way::Granted,
            frames: Vec::new(),
            cut: 0,
            again: Vec::new(),
            acked_bytes: 0,
            is_forgotten: false,
            holds_left: false,
        };
        let span = u64::from(key.message)..u64::from(key.message) + 1;
        if let Body::Memory { place, .. } = message.body
            && total > self.eager_limit()
            && (self.config.references || (self.config.descriptors && place.region != 0))
        {
            message.way = Way::Reference;
            let mut header = Header::new(Kind::Reference, key);
            header.fingerprint = fingerprint;
            header.total = total;
            header.coflow = coflow;
            header.priority = priority;
            header.length = Reference::BYTES as u32;
            self.control(header, Some(&place.encode()));
        } else if let Some(op) = self.ops.get_mut(&OpKey::of(&key)).filter(|op| op.granted.covers(&span)) {
            self.remembered -= op.remembered();
            op.granted.remove(span);
            self.remembered += op.remembered();
            self.ready.insert((priority, issue));
        } else if matches!(message.body, Body::Owned(_))
            && total <= self.config.eager_bytes
            && self.credit.reserve(total, self.config.eager_credit_bytes)
        {
            message.way = Way::Eager { serial: 0 };
            self.ready.insert((priority, issue));
        } else if matches!(message.body, Body::Owned(_)) || total <= self.eager_limit() || key.begins_a_send() {
            let mut header = Header::new(Kind::Announce, key);
            header.fingerprint = fingerprint;
            header.coflow = coflow;
            header.total = total;
            self.control(header, None);
        }
        let before = self.by_key.insert(key, issue);
        debug_assert!(before.is_none(), "{key:?} is sent twice");
        self.outgoing.insert(issue, message);
    }

    /// Tells the peer that we are ready for messages `key.message..key.message + count`.
    pub fn grant(&mut self, key: MessageKey, count: u32, fingerprint: Fingerprint) {
        if self.has_ended {
            return;
        }
        let mut header = Header::new(Kind::Grant, key);
        header.offset = u64::from(count);
        header.fingerprint = fingerprint;
        self.ops.entry(OpKey::of(&key)).or_default().given.insert(granted_span(&header));
        self.control(header, None);
    }

    /// Tells the peer that this side has read a message that the peer gave by reference.
    pub fn done(&mut self, key: MessageKey) {
        self.control(Header::new(Kind::Done, key), None);
    }

    /// Asks the peer how far it is in this operation.
    pub fn probe(&mut self, key: MessageKey, fingerprint: Fingerprint) {
        let mut header = Header::new(Kind::Probe, key);
        header.fingerprint = fingerprint;
        self.control(header, None);
    }

    /// Answers a probe: `issued` operations have been issued in the channel.
    pub fn answer_probe(&mut self, key: MessageKey, issued: u64) {
        let mut header = Header::new(Kind::ProbeReply, key);
        header.offset = issued;
        self.control(header, None);
    }

    /// Tells the peer that a group has failed. Goes ahead of everything that is not yet written.
    pub fn report(&mut self, group: GroupId, report: &Report) {
        let key = MessageKey { group, channel: Channel::Collective, op: OpSeq(0), message: report.kind as u32 };
        let mut text = report.message.as_str();
        while text.len() > MAX_REPORT_BYTES as usize {
            let last = text.char_indices().next_back().map_or(0, |(at, _)| at);
            text = &text[..last];
        }
        let mut header = Header::new(Kind::Report, key);
        header.length = text.len() as u32;
        header.offset = u64::from(report.is_passed_on);
        header.total = report.finished;
        self.control(header, Some(text.as_bytes()));
        if let Some(id) = self.control_queue.pop_back() {
            self.control_queue.push_front(id);
        }
    }

    /// Tells the peer that this side has left a group, and what it did there. The frame leaves once the peer has taken all
    /// that it can take; messages that wait for a grant do not hold it back.
    pub fn left(&mut self, group: GroupId, farewell: Farewell) {
        let mut ahead = 0;
        for (_, issue) in self.by_key.range(first_key(group)..).take_while(|(key, _)| key.group == group) {
            let message = self.outgoing.get_mut(issue).expect("named by its key");
            message.holds_left = message.is_under_way(&self.ready, *issue);
            ahead += usize::from(message.holds_left);
        }
        for control in self.controls.values_mut().filter(|control| control.header.key.group == group) {
            control.holds_left = true;
            ahead += 1;
        }
        match ahead {
            0 => self.say_left(group, &farewell),
            _ => drop(self.leaving.insert(group, (ahead, farewell))),
        }
    }

    fn say_left(&mut self, group: GroupId, farewell: &Farewell) {
        let payload = farewell.encode();
        let mut header = Header::new(Kind::Left, first_key(group));
        header.length = payload.len() as u32;
        self.control(header, Some(&payload));
    }

    /// A message or control frame that held back the `Left` frame of its group was taken, or forgotten.
    fn no_longer_holds_left(&mut self, group: GroupId) {
        let Some((ahead, _)) = self.leaving.get_mut(&group) else { return };
        *ahead -= 1;
        if *ahead == 0 {
            let (_, farewell) = self.leaving.remove(&group).expect("just seen");
            self.say_left(group, &farewell);
        }
    }

    /// Offers a memory region of `len` bytes under a number that references may then name. The caller passes the descriptor
    /// together with the frame.
    pub fn share(&mut self, region: u64, len: u64) {
        let mut header = Header::new(Kind::Share, NO_MESSAGE);
        header.offset = region;
        header.total = len;
        self.control(header, None);
    }

    /// No reference will name that memory any more.
    pub fn unshare(&mut self, region: u64) {
        let mut header = Header::new(Kind::Unshare, NO_MESSAGE);
        header.offset = region;
        self.control(header, None);
    }

    /// Queues a good-bye; call it after [`Peer::may_say_bye`].
    pub fn bye(&mut self) {
        self.control(Header::new(Kind::Bye, NO_MESSAGE), None);
    }

    /// Whether a good-bye overtakes nothing that the peer must have: messages that were sent, and the reasons of failed
    /// groups. The peer's own requests and messages of operations that still run do not count.
    #[must_use]
    pub fn may_say_bye(&self) -> bool {
        let is_report = |control: &Control| control.header.kind == Kind::Report;
        self.undelivered().next().is_none() && !self.controls.values().any(is_report)
    }

    /// Whether the other end has taken everything that was given to this peer.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.outgoing.is_empty() && self.controls.is_empty() && self.leaving.is_empty()
    }

    /// Whether a message waits for its grant, or to be read by reference. False for a message that has left or leaves next,
    /// and for one that is not there (any more): [`Event::Sent`] may not have been polled yet.
    #[must_use]
    pub fn needs_the_peer(&self, key: &MessageKey) -> bool {
        self.by_key.get(key).is_some_and(|issue| !self.outgoing[issue].is_under_way(&self.ready, *issue))
    }

    /// Whether frames were taken here whose acknowledgement has not been sent.
    #[must_use]
    pub fn owes_acks(&self) -> bool {
        self.streams.values().any(|stream| stream.owes_ack)
    }

    /// Forgets everything about an operation that is finished here. A copied message that waits for its grant or its
    /// acknowledgement goes on.
    pub fn retire(&mut self, group: GroupId, channel: Channel, op: OpSeq) {
        if let Some(op) = self.ops.remove(&OpKey { group, channel, op }) {
            self.remembered -= op.remembered();
        }
    }

    /// [`Peer::retire`] for all operations of a group that was left. Messages on their way to the peer go on.
    pub fn retire_group(&mut self, group: GroupId) {
        for (_, op) in self.ops.extract_if(|key, _| key.group == group) {
            self.remembered -= op.remembered();
        }
    }

    /// Forgets a group that has failed. Messages that were not taken are dropped, except eager ones that have left: their
    /// credit returns only when they arrive. Messages of the first `finished` collectives go on: those have ended here, and
    /// the peer may still be in them.
    pub fn forget_group(&mut self, group: GroupId, finished: u64) {
        self.retire_group(group);
        let counts = |key: &MessageKey| key.channel == Channel::Collective && key.op.0 < finished;
        let issues: Vec<u64> = self
            .by_key
            .range(first_key(group)..)
            .take_while(|(key, _)| key.group == group)
            .filter(|(key, _)| !counts(key))
            .map(|(_, issue)| *issue)
            .collect();
        for issue in issues {
            let message = self.outgoing.get_mut(&issue).expect("just found");
            match message.way {
                Way::Eager { .. } if !message.frames.is_empty() => {
                    message.is_forgotten = true;
                    continue;
                }
                Way::Eager { .. } => self.credit.reserved -= eager_cost(message.total),
                Way::Granted | Way::Reference => {}
            }
            self.forget_message(issue);
        }
        // A control frame that has left has its serial number. The peer waits for no gap in these, but counts them.
        let dropped = self.controls.extract_if(|_, control| {
            let Header { kind, key, .. } = control.header;
            let is_dropped = key.group == group && !control.has_left && !counts(&key);
            is_dropped && !matches!(kind, Kind::Report | Kind::Left | Kind::Bye)
        });
        let held_left = dropped.filter(|(_, control)| control.holds_left).count();
        (0..held_left).for_each(|_| self.no_longer_holds_left(group));
        self.control_queue.retain(|id| self.controls.contains_key(id));
    }

    /// The next frame for a stream that can take bytes, most urgent first; `None` when there is nothing for it.
    pub fn poll_frame(&mut self, stream: StreamId, now: Time) -> Option<Outbound> {
        let outbound = self.next_frame(stream, now)?;
        Some(self.stamp(stream, outbound, now))
    }

    fn next_frame(&mut self, id: StreamId, now: Time) -> Option<Outbound> {
        let streams = self.streams.len().min(self.most_used) as u64;
        let is_used = id <= self.last_used;
        let is_shared = self.share_a_link();
        let stream = self.streams.get_mut(&id)?;
        // Failure reports and heartbeats do not wait for room in the window.
        if self.control_queue.front().is_some_and(|first| self.controls[first].header.kind == Kind::Report) {
            return self.control_queue.pop_front().map(|control| self.control_frame(id, control, now));
        }
        if let Some(asked) = stream.owes_reply.take() {
            return Some(bare(Kind::HeartbeatReply, asked));
        }
        if is_used && stream.unacked_bytes < stream.window(self.config.unacked_limit_bytes, is_shared) {
            if let Some(control) = self.control_queue.pop_front() {
                return Some(self.control_frame(id, control, now));
            }
            if let Some(&(priority, issue)) = self.ready.first() {
                let message = self.outgoing.get_mut(&issue).expect("ready messages are outgoing");
                let (index, repeated) = message.next_frame(stream.frame_bytes(), streams);
                if !message.has_frames() {
                    self.ready.remove(&(priority, issue));
                }
                stream.stats.repeated_frames += u64::from(repeated);
                return Some(self.data_frame(id, issue, index, now));
            }
            match self.take_over(id, now) {
                TakeOver::Frame(frame) => {
                    let outbound = match frame {
                        FrameId::Control(control) => self.control_frame(id, control, now),
                        FrameId::Data { issue, index } => self.data_frame(id, issue, index, now),
                    };
                    let stream = self.streams.get_mut(&id).expect("looked up above");
                    stream.stats.repeated_frames += 1;
                    stream.in_flight.back_mut().expect("it has left").is_copy = true;
                    return Some(outbound);
                }
                TakeOver::Ask => self.streams.get_mut(&id).expect("looked up above").ask(now),
                TakeOver::Nothing => {}
            }
        }
        let stream = self.streams.get_mut(&id).expect("looked up above");
        if std::mem::take(&mut stream.wants_heartbeat) {
            return Some(bare(Kind::Heartbeat, now.0));
        }
        if stream.owes_ack || self.credit.owes_update {
            return Some(bare(Kind::Ack, 0));
        }
        None
    }

    /// Queues a control frame.
    fn control(&mut self, header: Header, payload: Option<&[u8]>) {
        if self.has_ended {
            return;
        }
        let id = self.next_control;
        self.next_control += 1;
        self.controls.insert(
            id,
            Control {
                header,
                payload: payload.map(Arc::from),
                has_left: false,
                holds_left: false,
                copies: Copies::default(),
            },
        );
        self.control_queue.push_back(id);
    }

    /// Puts a control frame on a stream.
    fn control_frame(&mut self, id: StreamId, control: u64, now: Time) -> Outbound {
        let stream = self.streams.get_mut(&id).expect("the caller has looked it up");
        stream.sent(FrameId::Control(control), self.controls[&control].header.length, now);
        let control = self.controls.get_mut(&control).expect("looked at above");
        control.copies.add(id);
        if !std::mem::replace(&mut control.has_left, true) {
            control.header.serial = self.control_serial;
            self.control_serial += 1;
        }
        let payload = match &control.payload {
            Some(bytes) => Payload::Owned(bytes.clone(), 0..bytes.len()),
            None => no_payload(),
        };
        Outbound { header: control.header, payload }
    }

    /// Puts frame `index` of a message on a stream.
    fn data_frame(&mut self, id: StreamId, issue: u64, index: u32, now: Time) -> Outbound {
        let stream = self.streams.get_mut(&id).expect("the caller has looked it up");
        let message = self.outgoing.get_mut(&issue).expect("the caller has looked it up");
        let frame = &mut message.frames[index as usize];
        frame.copies.add(id);
        stream.sent(FrameId::Data { issue, index }, frame.len, now);
        let mut header = Header::new(Kind::Data, message.key);
        header.priority = message.priority;
        header.fingerprint = message.fingerprint;
        header.coflow = message.coflow;
        header.offset = frame.offset;
        header.total = message.total;
        header.length = frame.len;
        if self.config.checksum {
            header.flags |= FLAG_PAYLOAD_SUM;
        }
        if let Way::Eager { serial } = &mut message.way {
            if *serial == 0 {
                self.credit.used += eager_cost(message.total);
                *serial = self.credit.used;
            }
            header.flags |= FLAG_EAGER;
            header.serial = *serial;
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

    /// The frame that a slower stream will deliver last, if this idle stream would deliver it much sooner.
    ///
    /// A stream without acknowledgements need not be slow: the whole peer may be busy, and copies would only add to its work.
    /// Such a stream's silence therefore counts only while the peer was awake and was heard on other streams; if it was not
    /// heard, this stream sends a heartbeat.
    ///
    /// The streams may share a link that none of them fills. A copy then comes after what is on the way already, and delays
    /// all of it. This side cannot see that directly, but the outcome of copies shows it: after a duplicate, all idle streams
    /// wait longer; after a copy that arrived first, a little less. Without this, half of 11 MB over a link of 200 Mbit/s and
    /// 32 streams left twice.
    ///
    /// A stream delivers last what it sent last, so its frames are searched from the end. A frame that was taken over is
    /// skipped from then on: its new stream may lose it to a third one, but no stream takes it twice. Costs one comparison a
    /// stream while no stream is slow.
    fn take_over(&mut self, idle: StreamId, now: Time) -> TakeOver {
        let Peer { streams, controls, outgoing, .. } = self;
        let own = &streams[&idle];
        let (own_bytes, own_round_trip, own_rate) = (own.unacked_bytes, own.round_trip(), own.rate());
        let may_ask = now.since(own.last_heartbeat) > ASK_EVERY.max(2 * own_round_trip);
        let limit = |bytes: u32| {
            let ours = match own_rate {
                0.0 if own_round_trip == 0 => FIRST_DELIVERY,
                0.0 => own_round_trip + FIRST_FRAME,
                rate => ((own_bytes + u64::from(bytes)) as f64 / rate * 1e9) as u64 + own_round_trip,
            };
            ((TAKE_OVER_RATIO * ours + TAKE_OVER_MARGIN) as f64 * self.patience) as u64
        };
        // The streams that carry a frame; none if the frame is acknowledged or forgotten.
        let copies = |frame| match frame {
            FrameId::Control(id) => controls.get(&id).map(|control| control.copies),
            FrameId::Data { issue, index } => {
                let frame = &outgoing.get(&issue)?.frames[index as usize];
                (!frame.acked).then_some(frame.copies)
            }
        };
        let mut worst: Option<(u64, StreamId, usize)> = None;
        let mut ask = false;
        for (id, stream) in streams.iter_mut().filter(|(id, _)| **id != idle) {
            let known = stream.silence(self.last_heard).min(self.last_heard.since(self.awake_since));
            let possible = stream.silence(now);
            let mut bytes = stream.unacked_bytes;
            for at in (0..stream.in_flight.len()).rev() {
                let estimate = stream.time_to_ack(bytes).unwrap_or(0);
                let theirs = estimate.max(known);
                let in_flight = &mut stream.in_flight[at];
                let limit = limit(in_flight.bytes);
                if estimate.max(possible) <= limit || worst.is_some_and(|(time, ..)| theirs <= time) {
                    break;
                }
                bytes -= u64::from(in_flight.bytes);
                if in_flight.passed {
                    continue;
                }
                match copies(in_flight.frame) {
                    None => in_flight.passed = true,
                    Some(copies) if copies.count == MAX_COPIES || copies.are_on(idle) => {}
                    Some(_) if theirs <= limit => {
                        ask = may_ask;
                        break;
                    }
                    Some(_) => {
                        worst = Some((theirs, *id, at));
                        break;
                    }
                }
            }
        }
        if let Some((_, id, at)) = worst {
            let in_flight = &mut streams.get_mut(&id).expect("found above").in_flight[at];
            in_flight.passed = true;
            return TakeOver::Frame(in_flight.frame);
        }
        if ask { TakeOver::Ask } else { TakeOver::Nothing }
    }

    /// Whether copies turn out to be duplicates again and again, on either side: some link carries less than the sum of the
    /// streams.
    ///
    /// Both nodes do the same. With the windows of a shared link on one side and long ones on the other, 16 flows of 200 Mbit/s over
    /// 1 Gbit/s carried 93 % of the link instead of 98 (virtual), though windows cover what acks wait for; when they did not, a third.
    fn share_a_link(&self) -> bool {
        self.patience >= PATIENCE_SHARED || self.is_shared_there
    }

    /// Adds what every frame carries for the other direction.
    fn stamp(&mut self, id: StreamId, mut outbound: Outbound, now: Time) -> Outbound {
        let stream = self.streams.get_mut(&id).expect("frames are polled for streams that are up");
        stream.owes_ack = false;
        self.credit.owes_update = false;
        self.credit.told = self.credit.consumed;
        outbound.header.ack = stream.before_bye.unwrap_or(stream.taken_frames);
        if self.patience >= PATIENCE_SHARED {
            outbound.header.flags |= FLAG_SHARED;
        }
        outbound.header.sent_at = stream::clock(now);
        outbound.header.credit = self.credit.consumed;
        outbound.header.generation = self.config.generation;
        outbound
    }

    // ------------------------------------------------------------------ incoming

    /// Bytes have arrived on a stream, perhaps only a part of a frame: the peer is alive. Without this, a frame that takes
    /// longer than `dead_after` would look like silence.
    pub fn heard(&mut self, stream: StreamId, now: Time) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.last_heard = now;
            stream.stalled = false;
            let round_trip = stream.round_trip();
            self.heard_at(now, round_trip);
        }
    }

    /// This process did not run for `time` (it was stopped, or starved). That time does not count as a peer's silence: peers
    /// that were stopped with it have not sent anything yet either.
    fn was_away(&mut self, time: u64, now: Time) {
        self.last_heard = self.last_heard.plus(time).min(now);
        (self.alive_since, self.awake_since) = (now, now);
    }

    fn heard_at(&mut self, now: Time, round_trip: u64) {
        if now.since(self.last_heard) > 2 * self.config.heartbeat_every {
            self.alive_since = now;
        }
        if now.since(self.last_heard) > 2 * ASK_EVERY + 4 * round_trip {
            self.awake_since = now;
        }
        self.last_heard = now;
        self.silent = false;
    }

    /// A header has arrived. `status` tells about the operation that its key names.
    ///
    /// # Errors
    /// A frame that the peer may not send; close the stream.
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
        self.heard(id, now);
        self.is_shared_there = header.flags & FLAG_SHARED != 0;
        self.handle_ack(id, header, now)?;
        self.credit.handle_returned(header.credit)?;
        match header.kind {
            Kind::Data => self.handle_data_header(id, header, status),
            Kind::Reference if !self.config.references && !self.config.descriptors => {
                Err(FrameError::OutOfTurn("a reference to memory that we cannot read"))
            }
            Kind::Share | Kind::Unshare if !self.config.descriptors => {
                Err(FrameError::OutOfTurn("memory shared over a network"))
            }
            _ => Ok(Arrival::Take),
        }
    }

    fn handle_ack(&mut self, id: StreamId, header: &Header, now: Time) -> Result<(), FrameError> {
        let stream = self.streams.get_mut(&id).ok_or(FrameError::OutOfTurn("its stream is not up"))?;
        stream.measure_arrival(header.sent_at, now);
        let count = stream
            .count_acknowledged(header.ack)
            .ok_or(FrameError::OutOfTurn("it acknowledges frames that were not sent"))?;
        for left in (0..count).rev() {
            let stream = self.streams.get_mut(&id).expect("looked up above");
            let in_flight = stream.pop_acknowledged();
            if left == 0 {
                stream.measure(&in_flight, now);
            }
            let was_news = self.frame_taken(id, in_flight.frame);
            if in_flight.is_copy {
                self.patience = if was_news { self.patience * PATIENCE_WON } else { self.patience * PATIENCE_LOST };
                self.patience = self.patience.clamp(1.0, PATIENCE_MOST);
            }
        }
        Ok(())
    }

    fn handle_data_header(&mut self, id: StreamId, header: &Header, status: OpStatus) -> Result<Arrival, FrameError> {
        let eager = header.flags & FLAG_EAGER != 0;
        if eager {
            if header.total > self.config.eager_bytes || u64::from(header.length) != header.total {
                return Err(FrameError::OutOfTurn("an eager message above the eager limit"));
            }
            self.credit.check_used(header, self.config.eager_credit_bytes)?;
        }
        if status == OpStatus::Retired {
            return Ok(Arrival::Discard);
        }
        let key = OpKey::of(&header.key);
        let message = u64::from(header.key.message);
        if eager && self.credit.is_counted(header) {
            return Ok(Arrival::Discard);
        }
        if !eager && !self.ops.get(&key).is_some_and(|op| op.given.covers(&(message..message + 1))) {
            return Err(FrameError::OutOfTurn("data of an operation that was not granted"));
        }
        let op = self.ops.entry(key).or_default();
        op.incoming.entry(header.key.message).or_insert_with(|| Incoming::new(header.total)).arrive(id, header)
    }

    /// The frame is whole and its payload verified. For data: records it; the caller applies the payload before it
    /// polls the next frame, so that no ack can leave before.
    ///
    /// # Errors
    /// A frame that the peer may not send; close the stream.
    pub fn handle_frame(
        &mut self,
        id: StreamId,
        header: &Header,
        payload: &[u8],
        status: OpStatus,
    ) -> Result<Finish, FrameError> {
        let mut finish = Finish { apply: true, revoke: None };
        match header.kind {
            Kind::Data => finish = self.handle_data(id, header, status)?,
            kind if kind.is_counted() && !self.is_new_control(header)? => finish.apply = false,
            Kind::Reference => finish.apply = self.handle_reference(header, status)?,
            Kind::Done => self.handle_done(header)?,
            Kind::Grant => self.handle_grant(header, status)?,
            // The engine grants the message when it posts the operation, and keeps the announcement until then.
            Kind::Announce => finish.apply = !self.is_late(header, status),
            Kind::Probe => self.events.push_back(Event::Probe(header.key, header.fingerprint)),
            Kind::ProbeReply => self.events.push_back(Event::Issued(header.key, header.offset)),
            Kind::Report => self.events.push_back(Event::Report(header.key.group, Report::decode(header, payload))),
            Kind::Left => self.events.push_back(Event::Left(header.key.group, Farewell::decode(payload)?)),
            Kind::Bye => self.events.push_back(Event::Bye),
            Kind::Heartbeat | Kind::Ack | Kind::HeartbeatReply | Kind::Share | Kind::Unshare => {}
        }
        let has_frames_out = header.kind == Kind::Bye && self.has_frames_out();
        if let Some(stream) = self.streams.get_mut(&id) {
            match header.kind {
                Kind::Heartbeat => stream.owes_reply = Some(header.offset),
                Kind::HeartbeatReply if header.offset <= self.last_heard.0 => {
                    stream.answered(Time(header.offset), self.last_heard);
                }
                _ => {}
            }
            if header.kind == Kind::Bye && stream.before_bye.is_none() && has_frames_out {
                stream.before_bye = Some(stream.taken_frames);
                self.withholds_ack = true;
            }
            if header.kind.is_counted() {
                stream.taken_frames = stream.taken_frames.wrapping_add(1);
                stream.owes_ack = true;
                stream.stats.received_bytes += u64::from(header.length);
                stream.stats.duplicate_frames += u64::from(!finish.apply);
            }
        }
        Ok(finish)
    }

    /// Whether a data frame is a duplicate of bytes that are here. Ask before [`verify`]: after [`Event::Sent`] the sender may
    /// change the bytes of a copy that is still under way. They are discarded, so their checksum does not matter.
    #[must_use]
    pub fn is_duplicate(&self, header: &Header, status: OpStatus) -> bool {
        header.kind == Kind::Data
            && (status == OpStatus::Retired
                || self
                    .ops
                    .get(&OpKey::of(&header.key))
                    .and_then(|op| op.incoming.get(&header.key.message))
                    .is_some_and(|message| message.done.covers(&span(header))))
    }

    /// An eager message was used (or its operation failed): returns its credit to the peer.
    pub fn consumed(&mut self, total: u64) {
        self.credit.consume(total, self.config.eager_credit_bytes);
    }

    /// What has happened since the last call.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn handle_data(&mut self, id: StreamId, header: &Header, status: OpStatus) -> Result<Finish, FrameError> {
        let mut finish = Finish { apply: false, revoke: None };
        if status != OpStatus::Retired
            && let Some(op) = self.ops.get_mut(&OpKey::of(&header.key))
            && let Some(message) = op.incoming.get_mut(&header.key.message)
            && let Some(arriving) = message.arriving.remove(&header.offset)
        {
            message.done.insert(span(header));
            finish = Finish { apply: true, revoke: arriving.on.filter(|first| *first != id) };
        }
        if header.flags & FLAG_EAGER != 0 && self.credit.count(header)? && !finish.apply {
            // The operation failed here before this message came: nothing will consume it.
            self.consumed(header.total);
        }
        self.is_late(header, status);
        Ok(finish)
    }

    /// Whether a frame belongs to an operation that has ended here. If the peer takes it for another operation, what it sends
    /// would be lost: the engine compares the fingerprints.
    fn is_late(&mut self, header: &Header, status: OpStatus) -> bool {
        let late = status == OpStatus::Retired;
        if late {
            self.events.push_back(Event::Late(header.key, header.fingerprint));
        }
        late
    }

    /// Control frames are repeated like data, and each is used once.
    fn is_new_control(&mut self, header: &Header) -> Result<bool, FrameError> {
        let one = header.serial..header.serial.saturating_add(1);
        let new = !self.controls_taken.covers(&one);
        self.controls_taken.insert(one);
        if self.controls_taken.count() > MAX_REMEMBERED {
            return Err(FrameError::OutOfTurn("control frames with too many gaps between them"));
        }
        Ok(new)
    }

    fn handle_reference(&mut self, header: &Header, status: OpStatus) -> Result<bool, FrameError> {
        if self.is_late(header, status) {
            return Ok(false);
        }
        let op = self.ops.entry(OpKey::of(&header.key)).or_default();
        if op.incoming.contains_key(&header.key.message) {
            return Err(FrameError::OutOfTurn("a reference to a message that is here"));
        }
        op.incoming.insert(header.key.message, Incoming { by_reference: true, ..Incoming::new(header.total) });
        op.references += 1;
        self.remember(1)?;
        Ok(true)
    }

    fn handle_done(&mut self, header: &Header) -> Result<(), FrameError> {
        let Some(issue) = self.by_key.get(&header.key).copied() else { return Ok(()) };
        if !matches!(self.outgoing[&issue].way, Way::Reference) {
            return Err(FrameError::OutOfTurn("it has read a message that was not given by reference"));
        }
        self.forget_message(issue);
        self.events.push_back(Event::Sent(header.key));
        Ok(())
    }

    fn handle_grant(&mut self, header: &Header, status: OpStatus) -> Result<(), FrameError> {
        let span = granted_span(header);
        // Nothing more will be sent in an operation that has ended.
        let mut open = Ranges::default();
        if status != OpStatus::Retired {
            open.insert(span.clone());
        }
        if !span.is_empty() {
            let last = MessageKey { message: (span.end - 1) as u32, ..header.key };
            for (key, issue) in self.by_key.range(header.key..=last) {
                let message = &self.outgoing[issue];
                if !matches!(message.way, Way::Reference) && message.has_frames() {
                    self.ready.insert((message.priority, *issue));
                }
                open.remove(u64::from(key.message)..u64::from(key.message) + 1);
            }
        }
        if !open.is_empty() {
            let op = self.ops.entry(OpKey::of(&header.key)).or_default();
            self.remembered -= op.remembered();
            op.granted.extend(open);
            let after = op.remembered();
            self.remember(after)?;
        }
        self.events.push_back(Event::Granted(header.key, header.fingerprint));
        Ok(())
    }

    fn remember(&mut self, records: usize) -> Result<(), FrameError> {
        self.remembered += records;
        if self.remembered > MAX_REMEMBERED {
            return Err(FrameError::OutOfTurn("more grants and references than we can remember"));
        }
        Ok(())
    }

    /// Records a data frame as taken. Returns false if another stream had brought it.
    fn frame_taken(&mut self, stream: StreamId, frame: FrameId) -> bool {
        let (issue, index) = match frame {
            FrameId::Data { issue, index } => (issue, index),
            FrameId::Control(id) => {
                let Some(control) = self.controls.remove(&id) else { return false };
                if control.holds_left {
                    self.no_longer_holds_left(control.header.key.group);
                }
                return true;
            }
        };
        let Some(message) = self.outgoing.get_mut(&issue) else { return false };
        let frame = &mut message.frames[index as usize];
        frame.copies.remove(stream);
        if frame.acked {
            return false;
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
        true
    }

    fn forget_message(&mut self, issue: u64) {
        if let Some(message) = self.outgoing.remove(&issue) {
            self.by_key.remove(&message.key);
            self.ready.remove(&(message.priority, issue));
            if message.holds_left {
                self.no_longer_holds_left(message.key.group);
            }
        }
        if self.withholds_ack && !self.has_frames_out() {
            self.withholds_ack = false;
            for stream in self.streams.values_mut() {
                stream.owes_ack |= stream.before_bye.take().is_some();
            }
        }
    }

    /// Whether this side has unacknowledged messages. Their acknowledgements may have been lost with a stream. The peer's
    /// good-bye is not acknowledged before, so that the peer stays, takes the repeated frames and acknowledges them again.
    fn has_frames_out(&self) -> bool {
        self.outgoing.values().any(|message| !message.frames.is_empty())
    }

    // ------------------------------------------------------------------ time

    /// When [`Peer::handle_timeout`] is due. Ask again after every other call. The answer does not depend on `now`; it lies in
    /// the past when the call is due.
    #[must_use]
    pub fn poll_timeout(&self, _now: Time) -> Time {
        let mut next = self.next_check;
        if !self.silent {
            next = next.min(self.last_heard.plus(self.config.dead_after + 1));
        }
        let busy = self.streams.values().filter(|stream| !stream.in_flight.is_empty()).count();
        if busy > 0 && self.streams.len() > 1 {
            next = next.min(self.next_look);
        }
        next
    }

    /// Checks for silence; [`Peer::poll_frame`] afterwards checks for frames to take over. Feed all received bytes first:
    /// bytes that wait in a socket are not silence.
    pub fn handle_timeout(&mut self, now: Time) {
        let late = now.since(self.next_check);
        if late > self.config.heartbeat_every {
            self.was_away(late, now);
        }
        self.next_look = now.plus(TAKE_OVER_CHECK);
        let silent = now.since(self.last_heard);
        if silent > self.config.dead_after && !self.silent {
            self.silent = true;
            self.events.push_back(Event::Silent);
        }
        if now < self.next_check {
            return;
        }
        let every = self.config.heartbeat_every;
        self.next_check = now.plus(every / 2);
        for (id, stream) in &mut self.streams {
            let stream_silent = now.since(stream.last_heard);
            if stream_silent > every && now.since(stream.last_heartbeat) > every {
                stream.ask(now);
            }
            // The peer is alive, since other streams bring its frames, but this stream is silent. After a pause of the whole
            // peer, the first stream that is heard again does not make the others stalled.
            let stalled = now.since(stream.last_heard.max(self.alive_since)) > self.config.dead_after / 2;
            if stalled && silent < every && !stream.stalled {
                stream.stalled = true;
                self.events.push_back(Event::Stalled(*id));
            }
        }
    }
}

impl Report {
    fn decode(header: &Header, payload: &[u8]) -> Report {
        use FailureKind::*;
        let kind = [Mismatch, PeerLost, Timeout, Refused, Config, Closed, Bug, NotFinite]
            .into_iter()
            .find(|kind| *kind as u32 == header.key.message)
            .unwrap_or(Bug);
        let message = String::from_utf8_lossy(payload).into_owned();
        Report { kind, message, is_passed_on: header.offset != 0, finished: header.total }
    }
}

/// One operation's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct OpKey {
    group: GroupId,
    channel: Channel,
    op: OpSeq,
}

impl OpKey {
    fn of(key: &MessageKey) -> OpKey {
        OpKey { group: key.group, channel: key.channel, op: key.op }
    }
}

/// What is remembered of an operation until it is retired.
#[derive(Debug, Default)]
struct Op {
    /// Messages that the peer has granted and that were not issued here yet.
    granted: Ranges,
    /// Messages that this side has granted.
    given: Ranges,
    incoming: HashMap<u32, Incoming>,
    /// How many of `incoming` came by reference.
    references: usize,
}

impl Op {
    /// How many records this operation holds that the peer can cause without credit.
    fn remembered(&self) -> usize {
        self.granted.count() + self.references
    }
}

/// What a stream has in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FrameId {
    Control(u64),
    Data { issue: u64, index: u32 },
}

/// What an idle stream can do about a slower one.
enum TakeOver {
    Frame(FrameId),
    Ask,
    Nothing,
}

#[derive(Debug)]
struct Control {
    header: Header,
    payload: Option<Arc<[u8]>>,
    /// The frame has its serial number.
    has_left: bool,
    /// The frame is counted in [`Peer::leaving`].
    holds_left: bool,
    copies: Copies,
}

/// An outgoing message and its frames.
#[derive(Debug)]
struct Message {
    key: MessageKey,
    priority: Priority,
    fingerprint: Fingerprint,
    coflow: u32,
    total: u64,
    body: Body,
    way: Way,
    /// Cut so far, in order of offset.
    frames: Vec<OutFrame>,
    /// Bytes cut so far.
    cut: u64,
    /// Frames whose stream was lost, to be sent again.
    again: Vec<u32>,
    acked_bytes: u64,
    /// The message's group was forgotten: no event is reported for it.
    is_forgotten: bool,
    /// The message is counted in [`Peer::leaving`].
    holds_left: bool,
}

/// How a message is sent.
#[derive(Debug)]
enum Way {
    /// On eager credit; `serial` is set when the message leaves.
    Eager { serial: u64 },
    /// After its grant.
    Granted,
    /// By reference: the receiver reads it from this process's memory.
    Reference,
}

#[derive(Debug)]
struct OutFrame {
    offset: u64,
    len: u32,
    acked: bool,
    copies: Copies,
}

/// The streams that have a frame in flight, and how many.
#[derive(Clone, Copy, Debug, Default)]
struct Copies {
    count: u16,
    /// A bit a stream, modulo 64: keeps a frame from being put on one stream twice.
    on: u64,
}

impl Copies {
    fn add(&mut self, stream: StreamId) {
        self.count += 1;
        self.on |= 1 << (stream % 64);
    }

    /// Removes a stream. Returns whether it was the last one.
    fn remove(&mut self, stream: StreamId) -> bool {
        self.count -= 1;
        self.on &= !(1 << (stream % 64));
        self.count == 0
    }

    fn are_on(&self, stream: StreamId) -> bool {
        self.on & 1 << (stream % 64) != 0
    }
}

impl Message {
    /// Whether the message has left, or leaves without waiting for a frame of the peer.
    fn is_under_way(&self, ready: &BTreeSet<(Priority, u64)>, issue: u64) -> bool {
        !self.frames.is_empty() || ready.contains(&(self.priority, issue))
    }

    /// Whether a stream could pull another frame.
    fn has_frames(&self) -> bool {
        !self.again.is_empty() || self.cut < self.total || self.frames.is_empty()
    }

    /// The next frame to send, and whether it was sent before. A new frame has `bytes` bytes, or the remainder divided by
    /// `streams`: all streams shall have something to carry, and finish together.
    fn next_frame(&mut self, bytes: u32, streams: u64) -> (u32, bool) {
        if let Some(index) = self.again.pop() {
            return (index, true);
        }
        let left = self.total - self.cut;
        let fair = left.div_ceil(streams).next_multiple_of(u64::from(FRAME_GRAIN));
        let bytes = u64::from(bytes).min(fair).max(u64::from(MIN_FRAME_BYTES));
        // A remainder below half a frame is not worth a frame of its own, and an eager message is always one.
        let whole = left < bytes + bytes / 2 || matches!(self.way, Way::Eager { .. });
        let len = if whole && left <= u64::from(MAX_FRAME_BYTES) { left } else { left.min(bytes) };
        self.frames.push(OutFrame { offset: self.cut, len: len as u32, acked: false, copies: Copies::default() });
        self.cut += len;
        (self.frames.len() as u32 - 1, false)
    }
}

/// An incoming message: which of its bytes are here, and which are arriving.
#[derive(Debug)]
struct Incoming {
    total: u64,
    /// The message came by reference: no data may follow.
    by_reference: bool,
    done: Ranges,
    /// Frames seen but not whole, by offset.
    arriving: BTreeMap<u64, Arriving>,
}

#[derive(Debug)]
struct Arriving {
    len: u32,
    /// The stream that reads the frame to its place; `None` when that stream was lost.
    on: Option<StreamId>,
}

impl Incoming {
    fn new(total: u64) -> Incoming {
        Incoming { total, by_reference: false, done: Ranges::default(), arriving: BTreeMap::new() }
    }

    /// A frame starts to arrive. Its sender cuts a message once, so the frame equals one that was seen, or overlaps none. Only
    /// the last frame may be short, which bounds the records.
    fn arrive(&mut self, id: StreamId, header: &Header) -> Result<Arrival, FrameError> {
        let wrong = FrameError::Range { offset: header.offset, length: header.length, total: header.total };
        if self.by_reference {
            return Err(FrameError::OutOfTurn("data of a message that came by reference"));
        }
        let span = span(header);
        let is_short = header.length < MIN_FRAME_BYTES && header.offset + u64::from(header.length) < header.total;
        if header.total != self.total || is_short || (header.length == 0 && header.total > 0) {
            return Err(wrong);
        }
        if self.done.covers(&span) {
            return Ok(Arrival::Discard);
        }
        if let Some((offset, arriving)) = self.arriving.range_mut(..span.end).next_back()
            && offset + u64::from(arriving.len.max(1)) > span.start
        {
            if (*offset, arriving.len) != (header.offset, header.length) {
                return Err(wrong);
            }
            if arriving.on.is_some() {
                return Ok(Arrival::Race);
            }
            arriving.on = Some(id);
            return Ok(Arrival::Take);
        }
        if self.done.overlaps(&span) {
            return Err(wrong);
        }
        self.arriving.insert(header.offset, Arriving { len: header.length, on: Some(id) });
        Ok(Arrival::Take)
    }

    /// A stream is gone, and with it what it was reading.
    fn lose(&mut self, stream: StreamId) {
        for arriving in self.arriving.values_mut().filter(|arriving| arriving.on == Some(stream)) {
            arriving.on = None;
        }
    }
}

/// The byte range of a message that a data frame brings; for an empty message, one byte that does not exist.
fn span(header: &Header) -> Range<u64> {
    header.offset..header.offset + u64::from(header.length.max(1))
}

/// The messages that a grant is for.
fn granted_span(header: &Header) -> Range<u64> {
    let first = u64::from(header.key.message);
    first..first + header.offset.min(u64::from(u32::MAX) + 1 - first)
}

/// Eager bytes in both directions, as running totals: lost or repeated updates do no harm.
#[derive(Debug, Default)]
struct Credit {
    /// Credit given to our messages so far.
    reserved: u64,
    /// Credit of messages that have left.
    used: u64,
    /// Credit that the peer has returned.
    returned: u64,
    /// Which part of the peer's account has arrived.
    counted: Ranges,
    /// Credit that was consumed here.
    consumed: u64,
    /// The value of `consumed` that was sent to the peer last.
    told: u64,
    owes_update: bool,
}

impl Credit {
    fn fits(&self, total: u64, limit: u64) -> bool {
        self.reserved - self.returned + eager_cost(total) <= limit
    }

    /// Reserves credit for a message. Returns false if there is not enough.
    fn reserve(&mut self, total: u64, limit: u64) -> bool {
        let fits = self.fits(total, limit);
        if fits {
            self.reserved += eager_cost(total);
        }
        fits
    }

    fn handle_returned(&mut self, credit: u64) -> Result<(), FrameError> {
        if credit > self.used {
            return Err(FrameError::OutOfTurn("it returns credit that was never used"));
        }
        self.returned = self.returned.max(credit);
        Ok(())
    }

    /// The range of the sender's account that an eager message occupies.
    fn place(header: &Header) -> Range<u64> {
        header.serial.saturating_sub(eager_cost(header.total))..header.serial
    }

    /// Refuses a message beyond the limit, so that this side never holds more.
    fn check_used(&self, header: &Header, limit: u64) -> Result<(), FrameError> {
        let place = Credit::place(header);
        if place.end - place.start < eager_cost(header.total) || place.end > self.consumed.saturating_add(limit) {
            return Err(FrameError::OutOfTurn("eager messages beyond the credit"));
        }
        if self.counted.overlaps(&place) && !self.counted.covers(&place) {
            return Err(FrameError::OutOfTurn("an eager message on the credit of another"));
        }
        Ok(())
    }

    fn is_counted(&self, header: &Header) -> bool {
        self.counted.covers(&Credit::place(header))
    }

    /// Records a complete eager message. Returns false for a duplicate.
    fn count(&mut self, header: &Header) -> Result<bool, FrameError> {
        let place = Credit::place(header);
        let new = !self.counted.covers(&place);
        if new && self.counted.overlaps(&place) {
            return Err(FrameError::OutOfTurn("an eager message on the credit of another"));
        }
        self.counted.insert(place);
        Ok(new)
    }

    fn consume(&mut self, total: u64, limit: u64) {
        self.consumed += eager_cost(total);
        if self.consumed - self.told >= limit / 4 {
            self.owes_update = true;
        }
    }
}

/// Credit that an eager message costs: its bytes, and what the receiver needs to remember it.
fn eager_cost(total: u64) -> u64 {
    total + 128
}

fn bare(kind: Kind, offset: u64) -> Outbound {
    Outbound { header: Header { offset, ..Header::new(kind, NO_MESSAGE) }, payload: no_payload() }
}

fn no_payload() -> Payload {
    Payload::Owned(Arc::default(), 0..0)
}

/// The smallest key of a group.
fn first_key(group: GroupId) -> MessageKey {
    MessageKey { group, ..NO_MESSAGE }
}

const NO_MESSAGE: MessageKey = MessageKey { group: GroupId(0), channel: Channel::Collective, op: OpSeq(0), message: 0 };
/// The message travels on eager credit.
pub const FLAG_EAGER: u16 = 2;
/// The sender of the frame has found that the streams share a link.
pub const FLAG_SHARED: u16 = 4;
/// Above this, one copy by `process_vm_readv` (some microseconds to start) beats two through a socket.
const REFERENCE_ABOVE: u64 = 8 * 1024;
/// An idle stream takes a frame over if it expects to be this many times faster, and by [`TAKE_OVER_MARGIN`].
const TAKE_OVER_RATIO: u64 = 2;
/// ... and earlier by this much: the copies cross the same link, and the other streams get faster when this one rests. With 6
/// ms, a sixth of all bytes of 11 MB over 16 x 200 Mbit/s left twice, with 20 ms a tenth, in as much time; with 40 ms, streams
/// of 60 and 300 Mbit/s wait longer for the slow ones.
const TAKE_OVER_MARGIN: u64 = 20 * MILLISECOND;
/// Factors on the patience of idle streams after a copy that arrived first, and after a duplicate. Patience is 1 to 64.
const PATIENCE_WON: f64 = 0.75;
const PATIENCE_LOST: f64 = 2.0;
const PATIENCE_MOST: f64 = 64.0;
/// From this on the streams are taken to share a link, whose queue then holds less of each. Steps of char-gpt over 200 Mbit/s and
/// 32 streams, which held some megabytes in it, took 630 to 675 ms; so 578 to 583, with frames of 16 KiB, by turns. Streams
/// that share nothing need more: with 4 ms and two such frames, equal ones got 88 % of their sum both ways (virtual). Other
/// thresholds were not tried.
const PATIENCE_SHARED: f64 = 4.0;
/// A frame is in flight on at most this many streams at a time: when the whole peer pauses, copies only delay it.
const MAX_COPIES: u16 = 3;
/// An idle stream sends a heartbeat this often, or every two round trips, while another stream is silent for too long.
const ASK_EVERY: u64 = 20 * MILLISECOND;
/// How often idle streams look for frames to take over.
const TAKE_OVER_CHECK: u64 = 4 * MILLISECOND;
/// How long a frame is expected to take on a stream that has carried nothing yet: a round trip between continents.
const FIRST_DELIVERY: u64 = 100 * MILLISECOND;
/// How long a frame is expected to take beyond the round trip on a stream whose rate is unknown: a frame at 50 Mbit/s.
const FIRST_FRAME: u64 = 10 * MILLISECOND;
/// Records that a peer can cause here without credit: it runs ahead by this many operations, each with one grant or reference.
/// About 400 bytes each. Nothing is lost silently beyond that: a grant is kept before its stream is closed, and counts when
/// the stream is back; a reference comes over a local socket, whose end fails the groups with the reason.
const MAX_REMEMBERED: usize = 65_536;

#[cfg(test)]
mod tests;
