//! A message to send and a control frame, and which of their frames are on which stream.

use super::{FLAG_CHANGED, StreamId};
use crate::fingerprint::Fingerprint;
use crate::frame::{Farewell, Header, MAX_FRAME_BYTES, MIN_FRAME_BYTES, MessageKey, Reference};
use crate::ranges::Ranges;
use crate::stream::FRAME_GRAIN;
use penstock_types::{Priority, Scope};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

/// A message to send.
#[derive(Clone, Debug)]
pub struct Outgoing<C = Arc<[u8]>> {
    /// Names the message.
    pub key: MessageKey,
    /// How urgent.
    pub priority: Priority,
    /// The operation was issued with another priority.
    pub is_changed: bool,
    /// What this side believes the operation to be.
    pub fingerprint: Fingerprint,
    /// Identifies messages that are useful only together (a coflow); 0 for none.
    pub coflow: u32,
    /// The bytes.
    pub body: Body<C>,
}

/// The bytes of an outgoing message.
#[derive(Clone, Debug)]
pub enum Body<C = Arc<[u8]>> {
    /// A copy of our own. For the caller the message counts as sent.
    Owned(C),
    /// `len` bytes that must not change until [`Event::Sent`](super::Event::Sent).
    Memory {
        /// Where the bytes are, for a peer that can read this process's memory.
        place: Reference,
        /// How many bytes.
        len: u64,
    },
}

/// A copy of a message. A [`Peer`](super::Peer) keeps it until the message is acknowledged, and asks nothing of it but its length.
pub trait Copied: Clone {
    /// How many bytes it has, or stands for.
    fn byte_count(&self) -> u64;
}

impl Copied for Arc<[u8]> {
    fn byte_count(&self) -> u64 {
        self.len() as u64
    }
}

/// A phantom: the length of a message whose bytes are not there. Simulated ranks send these.
impl Copied for u64 {
    fn byte_count(&self) -> u64 {
        *self
    }
}

impl<C: Copied> Body<C> {
    pub(super) fn len(&self) -> u64 {
        match self {
            Body::Owned(copy) => copy.byte_count(),
            Body::Memory { len, .. } => *len,
        }
    }
}

/// What a stream has in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameId {
    Control(u64),
    Data { issue: u64, index: u32 },
}

/// Messages that the peer has not acknowledged.
#[derive(Debug)]
pub(super) struct Outbox<C> {
    /// By order of issue.
    pub(super) messages: HashMap<u64, Message<C>>,
    pub(super) by_key: BTreeMap<MessageKey, u64>,
    /// Those of which a stream could pull a frame, most urgent first.
    pub(super) ready: BTreeSet<(Priority, u64)>,
    /// How many were issued.
    pub(super) issued: u64,
    /// References that were sent unasked and that the peer has not read.
    pub(super) unasked: usize,
    /// How many of `messages` are more urgent than usual and have begun to leave.
    pub(super) urgent: usize,
}

// `derive` would ask for a default of `C`.
impl<C> Default for Outbox<C> {
    fn default() -> Outbox<C> {
        Outbox {
            messages: HashMap::new(),
            by_key: BTreeMap::new(),
            ready: BTreeSet::new(),
            issued: 0,
            unasked: 0,
            urgent: 0,
        }
    }
}

/// Control frames, in both directions.
#[derive(Debug, Default)]
pub(super) struct Controls {
    /// Those that the peer has not acknowledged.
    pub(super) frames: HashMap<u64, Control>,
    /// Of these, those that no stream has in flight.
    pub(super) queue: VecDeque<u64>,
    /// The number of the next one in `frames`.
    pub(super) next: u64,
    /// How many were sent: a frame gets its serial number when it first leaves.
    pub(super) sent: u64,
    /// Which of the peer's have arrived.
    pub(super) taken: Ranges,
    /// Groups that this side has left, and channels that it has closed, whose `Left` frame is not sent yet: how many messages and
    /// control frames the peer must acknowledge first, and the farewell.
    pub(super) leaving: BTreeMap<Scope, (usize, Farewell)>,
}

/// A control frame.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) header: Header,
    pub(super) payload: Option<Arc<[u8]>>,
    /// The frame has its serial number.
    pub(super) has_left: bool,
    /// The farewell in [`Controls::leaving`] that counts the frame.
    pub(super) holds_left: Option<Scope>,
    pub(super) copies: Copies,
}

/// An outgoing message and its frames.
#[derive(Debug)]
pub(super) struct Message<C> {
    pub(super) key: MessageKey,
    pub(super) priority: Priority,
    pub(super) is_changed: bool,
    pub(super) fingerprint: Fingerprint,
    pub(super) coflow: u32,
    pub(super) total: u64,
    pub(super) body: Body<C>,
    pub(super) way: Way,
    /// Cut so far, in order of offset.
    pub(super) frames: Vec<OutFrame>,
    /// Bytes cut so far.
    pub(super) cut: u64,
    /// Frames whose stream was lost, to be sent again.
    pub(super) again: Vec<u32>,
    pub(super) acked_bytes: u64,
    /// The message's group was forgotten: no event is reported for it.
    pub(super) is_forgotten: bool,
    /// The farewell in [`Controls::leaving`] that counts the message.
    pub(super) holds_left: Option<Scope>,
}

/// How a message is sent.
#[derive(Debug)]
pub(super) enum Way {
    /// On eager credit; `serial` is set when the message leaves.
    Eager { serial: u64 },
    /// After its grant. Then a message that can go by reference becomes [`Way::Reference`].
    Granted,
    /// By reference: the receiver reads it from this process's memory.
    Reference {
        /// The reference left without a grant.
        is_unasked: bool,
    },
}

#[derive(Debug)]
pub(super) struct OutFrame {
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) acked: bool,
    pub(super) copies: Copies,
}

/// The streams that have a frame in flight, and how many.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Copies {
    pub(super) count: u16,
    /// A bit a stream, modulo 64: keeps a frame from being put on one stream twice.
    pub(super) on: u64,
}

impl<C> Message<C> {
    /// Whether the message has left, or leaves without waiting for a frame of the peer.
    pub(super) fn is_under_way(&self, ready: &BTreeSet<(Priority, u64)>, issue: u64) -> bool {
        !self.frames.is_empty() || ready.contains(&(self.priority, issue))
    }

    /// What its headers say of a priority that was changed.
    pub(super) fn changed_flag(&self) -> u16 {
        if self.is_changed { FLAG_CHANGED } else { 0 }
    }

    /// Whether a frame of it has left.
    pub(super) fn has_begun(&self) -> bool {
        !self.frames.is_empty()
    }

    /// Whether a stream could pull another frame.
    pub(super) fn has_frames(&self) -> bool {
        !self.again.is_empty() || self.cut < self.total || self.frames.is_empty()
    }

    /// The next frame to send, and whether it was sent before. A new frame has `bytes` bytes, or the remainder divided by
    /// `streams`, those for which there is nothing else: all streams shall have something to carry, and finish together.
    pub(super) fn cut_frame(&mut self, bytes: u32, streams: u64) -> (u32, bool) {
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

impl Copies {
    pub(super) fn add(&mut self, stream: StreamId) {
        self.count += 1;
        self.on |= 1 << (stream % 64);
    }

    /// Removes a stream. Returns whether it was the last one.
    pub(super) fn remove(&mut self, stream: StreamId) -> bool {
        self.count -= 1;
        self.on &= !(1 << (stream % 64));
        self.count == 0
    }

    pub(super) fn are_on(&self, stream: StreamId) -> bool {
        self.on & 1 << (stream % 64) != 0
    }
}
