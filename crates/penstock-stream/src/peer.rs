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
//!
//! Two kinds of records need no credit: references to messages of operations that the receiver has not posted, and grants for messages
//! that the sender has not issued. A rank may run ahead by any number of operations, so both are bounded
//! ([`PeerConfig::most_unasked`]). Beyond the bound a sender announces a message and sends its reference after the grant, and it drops
//! grants and announces those messages when they are issued. The receiver grants what is announced, whether it has granted that before or not.

mod credit;
mod ending;
mod operation;
mod outgoing;
mod pauses;
mod receive;
mod send;
mod take_over;
mod time;
mod urgency;

pub use self::operation::{Arrival, Landing, OpStatus};
pub use self::outgoing::{Body, Copied, Outgoing};
pub use self::receive::{Finish, LOST_STREAM, verify};
pub use self::send::{Outbound, Payload, seal};
pub use self::urgency::Urgency;
pub use crate::frame::{Counts, Farewell};

use self::credit::Credit;
use self::operation::{Op, OpKey, Remembered};
use self::outgoing::{Controls, FrameId, Message, Outbox};
pub use self::pauses::PAUSE_MOST;
use self::pauses::Pauses;
use self::take_over::Sharing;
use self::time::Hearing;
use crate::fingerprint::Fingerprint;
use crate::frame::{MAX_FRAME_BYTES, MessageKey, NumberSpace};
use crate::stream::{Stream, StreamStats};
use penstock_types::{ChannelId, FailureKind, Generation, GroupId, MILLISECOND, OpSeq, SECOND, Scope, Time};
use std::collections::{BTreeMap, HashMap, VecDeque};
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
    /// How many references may lie at the peer that it has not asked for, and how many ranges of messages that the peer has granted are
    /// remembered. Both ends of a pair need not agree. A record is some 400 bytes; beyond the bound a message costs two more control
    /// frames and a round trip.
    pub most_unasked: usize,
    /// With at least this many streams one is left free while something is urgent ([`Peer::express`]).
    pub express_from: usize,
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
            most_unasked: 16_384,
            express_from: 4,
            checksum: false,
            unacked_limit_bytes: 8 * 1024 * 1024,
            heartbeat_every: 500 * MILLISECOND,
            dead_after: 4 * SECOND,
        }
    }
}

/// What happened, for the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The receiver has all of a message whose body was [`Body::Memory`]: its bytes may change now.
    Sent(MessageKey),
    /// The peer waits for us in this operation; the fingerprint is the peer's view of it.
    Probe(MessageKey, Fingerprint),
    /// How many operations the peer has issued in the number space of the key.
    Issued(MessageKey, u64),
    /// The peer is ready for messages of this operation; the fingerprint is the peer's view of it.
    Granted(MessageKey, Fingerprint),
    /// The peer sends in an operation that has ended here; the fingerprint is the peer's view of it. Often a duplicate of a
    /// frame that was taken.
    Late(MessageKey, Fingerprint),
    /// The group, or a channel of it, has failed at the peer, or the peer forwards another rank's report.
    Report(Scope, Report),
    /// The peer has left the group, or closed a channel of it.
    Left(Scope, Farewell),
    /// The peer leaves the job in good order.
    Bye,
    /// This stream is silent although the peer is not: close it.
    Stalled(StreamId),
    /// Nothing has been heard from the peer for `dead_after`.
    Silent,
}

/// Why a group or a channel failed, as told to the group's other members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The failure's kind.
    pub kind: FailureKind,
    /// Its message.
    pub message: String,
    /// Another rank has told the reporter; the message names that rank.
    pub is_passed_on: bool,
    /// The collectives that still count.
    pub finished: Counts,
}

/// One end of a pair of nodes. See the module's documentation. `C` is what the caller makes of a message that is sent from a copy:
/// bytes, or a phantom of them.
#[derive(Debug)]
pub struct Peer<C = Arc<[u8]>> {
    config: PeerConfig,
    /// Ordered, so that the same calls give the same frames.
    streams: BTreeMap<StreamId, Stream<FrameId>>,
    used: Used,
    outbox: Outbox<C>,
    controls: Controls,
    ops: HashMap<OpKey, Op>,
    /// How many records `ops` holds that the peer caused without credit.
    remembered: Remembered,
    /// A grant was dropped: a message that finds no grant from now on is announced.
    has_dropped_grants: bool,
    credit: Credit,
    sharing: Sharing,
    urgency: Urgency,
    pauses: Pauses,
    hearing: Hearing,
    events: VecDeque<Event>,
    /// [`Peer::end`] was called.
    has_ended: bool,
    /// A stream withholds the acknowledgement of the peer's good-bye ([`Peer::has_frames_out`]).
    withholds_ack: bool,
}

/// Which of the streams that are up carry outgoing frames, beside the express stream: the first ones.
#[derive(Debug)]
struct Used {
    most: usize,
    /// The last of them.
    last: StreamId,
}

impl Peer {
    /// Creates a peer without streams, which sends bytes.
    #[must_use]
    pub fn new(config: PeerConfig, now: Time) -> Peer {
        Peer::with_copies(config, now)
    }
}

impl<C: Copied> Peer<C> {
    /// Creates a peer without streams, which sends copies of some kind.
    #[must_use]
    pub fn with_copies(config: PeerConfig, now: Time) -> Peer<C> {
        debug_assert!(config.eager_bytes <= u64::from(MAX_FRAME_BYTES), "an eager message is one frame");
        Peer {
            streams: BTreeMap::new(),
            used: Used { most: usize::MAX, last: StreamId::MAX },
            outbox: Outbox::default(),
            controls: Controls::default(),
            ops: HashMap::new(),
            remembered: Remembered::default(),
            has_dropped_grants: false,
            credit: Credit::default(),
            sharing: Sharing::default(),
            urgency: Urgency::default(),
            pauses: Pauses::default(),
            hearing: Hearing::new(&config, now),
            events: VecDeque::new(),
            has_ended: false,
            withholds_ack: false,
            config,
        }
    }

    /// The peer is gone. Forgets all state of the pair, and events that were not polled. Later messages to the peer are
    /// dropped, and no stream may come up any more.
    pub fn end(&mut self) {
        *self = Peer { has_ended: true, ..Peer::with_copies(self.config.clone(), self.hearing.last) };
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
        let copied = |message: &Message<C>| match &message.body {
            Body::Owned(copy) => copy.byte_count() as usize,
            Body::Memory { .. } => 0,
        };
        self.outbox.messages.values().map(copied).sum()
    }

    /// Whether messages of a group still lie in the operations' memory and are not taken: the peer may be reading them there.
    #[must_use]
    pub fn lends(&self, group: GroupId) -> bool {
        self.outbox
            .messages
            .values()
            .any(|message| message.key.group == group && matches!(message.body, Body::Memory { .. }))
    }

    /// How many operations have records here: messages that came or were granted, in either direction.
    #[must_use]
    pub fn remembered(&self) -> usize {
        self.ops.len()
    }

    /// Messages that the peer has not acknowledged.
    #[must_use]
    pub fn unacknowledged(&self) -> usize {
        self.outbox.messages.len()
    }

    /// Bytes of eager credit that our messages use and the peer has not given back.
    #[must_use]
    pub fn credit_in_use(&self) -> u64 {
        self.credit.reserved - self.credit.returned
    }

    /// Messages that count as sent, since they were copied, and that the peer has not acknowledged. Messages of forgotten
    /// groups are left out.
    pub fn undelivered(&self) -> impl Iterator<Item = (MessageKey, Fingerprint)> {
        let is_sent = |message: &&Message<C>| !message.is_forgotten && matches!(message.body, Body::Owned(_));
        self.outbox.messages.values().filter(is_sent).map(|message| (message.key, message.fingerprint))
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
                    if let Some(control) = self.controls.frames.get_mut(&id)
                        && control.copies.remove(stream)
                    {
                        self.controls.queue.push_front(id);
                    }
                }
                FrameId::Data { issue, index } => {
                    if let Some(message) = self.outbox.messages.get_mut(&issue) {
                        let frame = &mut message.frames[index as usize];
                        if frame.copies.remove(stream) && !frame.acked {
                            message.again.push(index);
                            self.outbox.ready.insert((message.priority, issue));
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

    /// Sends messages on at most `most` streams, beside the express stream: the first of those that are up, at least one. The other streams stay open:
    /// they send heartbeats and receive, since the peer decides for itself which streams it sends on. Frames in flight stay on
    /// their streams, so this may be called at any time.
    pub fn use_streams(&mut self, most: usize) {
        self.used.most = most.max(1);
        self.choose_used();
    }

    fn choose_used(&mut self) {
        self.used.last = self.streams.keys().nth(self.used.most - 1).copied().unwrap_or(StreamId::MAX);
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
            .map(|(id, s)| (*id, s.snapshot(self.config.unacked_limit_bytes, self.room(self.hearing.last))))
            .collect()
    }
}

const NO_MESSAGE: MessageKey =
    MessageKey { group: GroupId(0), space: NumberSpace::Collective(ChannelId::MAIN), op: OpSeq(0), message: 0 };
/// The message travels on eager credit.
pub const FLAG_EAGER: u16 = 2;
/// The sender of the frame has found that the streams share a link.
pub const FLAG_SHARED: u16 = 4;
/// The sender of the frame has urgent messages, for this node or for others.
pub const FLAG_URGENT: u16 = 8;
/// The sender has changed the priority of the operation since it issued it, so that it need not be the other ranks'.
pub const FLAG_CHANGED: u16 = 16;
/// Above this, one copy by `process_vm_readv` (some microseconds to start) beats two through a socket.
const REFERENCE_ABOVE: u64 = 8 * 1024;

#[cfg(test)]
mod tests;
