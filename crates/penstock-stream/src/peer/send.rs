//! What leaves: messages and control frames wait until a stream has room, and takes the most urgent one ([`Peer::poll_frame`]).

use super::credit::eager_cost;
use super::ending::first_key;
use super::operation::{OpKey, granted_span};
use super::outgoing::{Body, Control, Copied, Copies, FrameId, Message, Outgoing, Way};
use super::take_over::{PATIENCE_SHARED, TakeOver};
use super::{FLAG_EAGER, FLAG_SHARED, FLAG_URGENT, NO_MESSAGE, Peer, Report, StreamId};
use crate::fingerprint::Fingerprint;
use crate::frame::{FLAG_PAYLOAD_SUM, Header, Kind, MAX_REPORT_BYTES, MessageKey, NumberSpace, Reference};
use crate::stream;
use penstock_types::{GroupId, OpSeq, Priority, Scope, Time};
use std::ops::Range;
use std::sync::Arc;

/// A frame to write.
#[derive(Clone, Debug)]
pub struct Outbound<C = Arc<[u8]>> {
    /// Its header; `payload_sum` is filled in by [`seal`].
    pub header: Header,
    /// Where the payload is.
    pub payload: Payload<C>,
}

/// Where an outbound frame's payload is.
#[derive(Clone, Debug)]
pub enum Payload<C = Arc<[u8]>> {
    /// A control frame's bytes.
    Control(Arc<[u8]>),
    /// A range of the copy that was made of the message.
    Owned(C, Range<usize>),
    /// In the memory of the message's operation, at the header's offset.
    Memory,
}

impl Payload {
    /// The bytes, unless they lie in memory.
    #[must_use]
    pub fn bytes(&self) -> Option<&[u8]> {
        match self {
            Payload::Control(bytes) => Some(bytes),
            Payload::Owned(bytes, range) => Some(&bytes[range.clone()]),
            Payload::Memory => None,
        }
    }
}

/// Encodes an outbound frame's header over its payload.
#[must_use]
pub fn seal(mut header: Header, payload: &[u8]) -> [u8; Header::BYTES] {
    if header.flags & FLAG_PAYLOAD_SUM != 0 {
        header.payload_sum = crc32c::crc32c(payload);
    }
    header.encode()
}

impl<C: Copied> Peer<C> {
    /// Queues a message. [`Body::Owned`] is for messages up to `eager_bytes` that have credit ([`Peer::has_credit`]). Others
    /// wait for a grant. Receivers grant messages above [`Peer::eager_limit`] unasked. So a shorter message is announced, and
    /// so is the first one of a send, which a receive from any source cannot grant unasked. If a grant may have been dropped, all
    /// messages are.
    pub fn send(&mut self, outgoing: Outgoing<C>) {
        if self.has_ended {
            return;
        }
        let issue = self.outbox.issued;
        self.outbox.issued += 1;
        let Outgoing { key, priority, is_changed, fingerprint, coflow, body } = outgoing;
        let total = body.len();
        let mut message = Message {
            key,
            priority,
            is_changed,
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
            holds_left: None,
        };
        let place = self.reference_of(&message);
        let is_granted = self.use_grant(&key);
        if let Some(place) = place.filter(|_| is_granted || self.outbox.unasked < self.config.most_unasked) {
            self.refer(&mut message, place, !is_granted);
        } else if is_granted {
            self.outbox.ready.insert((priority, issue));
        } else if matches!(message.body, Body::Owned(_))
            && total <= self.config.eager_bytes
            && self.credit.reserve(total, self.config.eager_credit_bytes)
        {
            message.way = Way::Eager { serial: 0 };
            self.outbox.ready.insert((priority, issue));
        } else if matches!(message.body, Body::Owned(_))
            || total <= self.eager_limit()
            || key.begins_a_send()
            || place.is_some()
            || self.has_dropped_grants
        {
            let mut header = Header::new(Kind::Announce, key);
            header.fingerprint = fingerprint;
            header.coflow = coflow;
            header.total = total;
            self.control(header, None);
        }
        let before = self.outbox.by_key.insert(key, issue);
        debug_assert!(before.is_none(), "{key:?} is sent twice");
        self.outbox.messages.insert(issue, message);
    }

    /// Changes how urgent the messages of an operation are that were given to [`Peer::send`]. What a stream has pulled goes on.
    pub fn reprioritise(&mut self, group: GroupId, space: NumberSpace, op: OpSeq, priority: Priority) {
        let key = |message| MessageKey { group, space, op, message };
        for issue in self.outbox.by_key.range(key(0)..=key(u32::MAX)).map(|(_, issue)| *issue) {
            let message = self.outbox.messages.get_mut(&issue).expect("named by its key");
            let before = std::mem::replace(&mut message.priority, priority);
            message.is_changed = true;
            if message.has_begun() {
                self.outbox.urgent += usize::from(priority.is_urgent());
                self.outbox.urgent -= usize::from(before.is_urgent());
            }
            if self.outbox.ready.remove(&(before, issue)) {
                self.outbox.ready.insert((priority, issue));
            }
        }
    }

    /// Where a message lies that the peer can read there, and that is long enough for it.
    pub(super) fn reference_of(&self, message: &Message<C>) -> Option<Reference> {
        let Body::Memory { place, .. } = message.body else { return None };
        let can_read = self.config.references || (self.config.descriptors && place.region != 0);
        (can_read && message.total > self.eager_limit()).then_some(place)
    }

    /// Tells the peer where a message lies.
    pub(super) fn refer(&mut self, message: &mut Message<C>, place: Reference, is_unasked: bool) {
        message.way = Way::Reference { is_unasked };
        self.outbox.unasked += usize::from(is_unasked);
        let mut header = Header::new(Kind::Reference, message.key);
        header.fingerprint = message.fingerprint;
        header.total = message.total;
        header.coflow = message.coflow;
        header.priority = message.priority;
        header.flags |= message.changed_flag();
        header.length = Reference::BYTES as u32;
        self.control(header, Some(&place.encode()));
    }

    /// Whether a message was granted before it was issued. Forgets that.
    fn use_grant(&mut self, key: &MessageKey) -> bool {
        let one = u64::from(key.message)..u64::from(key.message) + 1;
        let Some(op) = self.ops.get_mut(&OpKey::of(key)).filter(|op| op.granted.covers(&one)) else { return false };
        self.remembered -= op.remembered();
        op.granted.remove(one);
        self.remembered += op.remembered();
        true
    }

    /// Tells the peer that we are ready for messages `key.message..key.message + count`. Call it for every message that is announced,
    /// also if it was granted before: the peer may have dropped that.
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
        if let Some(op) = self.ops.get_mut(&OpKey::of(&key))
            && let Some(message) = op.incoming.get_mut(&key.message)
            && std::mem::take(&mut message.is_unasked)
        {
            op.unasked -= 1;
            self.remembered.unasked -= 1;
        }
        self.control(Header::new(Kind::Done, key), None);
    }

    /// Asks the peer how far it is in this operation.
    pub fn probe(&mut self, key: MessageKey, fingerprint: Fingerprint) {
        let mut header = Header::new(Kind::Probe, key);
        header.fingerprint = fingerprint;
        self.control(header, None);
    }

    /// Answers a probe: `issued` operations have been issued in the number space.
    pub fn answer_probe(&mut self, key: MessageKey, issued: u64) {
        let mut header = Header::new(Kind::ProbeReply, key);
        header.offset = issued;
        self.control(header, None);
    }

    /// Tells the peer that a group, or a channel of one, has failed. Goes ahead of everything that is not yet written.
    pub fn report(&mut self, scope: impl Into<Scope>, report: &Report) {
        let key = MessageKey { message: report.kind as u32, ..first_key(scope.into()) };
        let mut text = report.message.as_str();
        while text.len() > MAX_REPORT_BYTES as usize {
            let last = text.char_indices().next_back().map_or(0, |(at, _)| at);
            text = &text[..last];
        }
        let mut payload = report.finished.encode();
        payload.extend(text.as_bytes());
        let mut header = Header::new(Kind::Report, key);
        header.length = payload.len() as u32;
        header.offset = u64::from(report.is_passed_on);
        header.total = report.finished.0.len() as u64;
        self.control(header, Some(&payload));
        if let Some(id) = self.controls.queue.pop_back() {
            self.controls.queue.push_front(id);
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

    /// Queues a control frame.
    pub(super) fn control(&mut self, header: Header, payload: Option<&[u8]>) {
        if self.has_ended {
            return;
        }
        let id = self.controls.next;
        self.controls.next += 1;
        self.controls.frames.insert(
            id,
            Control {
                header,
                payload: payload.map(Arc::from),
                has_left: false,
                holds_left: None,
                copies: Copies::default(),
            },
        );
        self.controls.queue.push_back(id);
    }

    /// The next frame for a stream that can take bytes, most urgent first; `None` when there is nothing for it.
    pub fn poll_frame(&mut self, stream: StreamId, now: Time) -> Option<Outbound<C>> {
        let outbound = self.next_frame(stream, now)?;
        Some(self.stamp(stream, outbound, now))
    }

    /// Whether a message waits for a stream with room: other threads may help to write.
    #[must_use]
    pub fn has_more(&self) -> bool {
        !self.outbox.ready.is_empty()
    }

    fn next_frame(&mut self, id: StreamId, now: Time) -> Option<Outbound<C>> {
        let express = self.express(now);
        let is_express = express == Some(id);
        let streams = (self.streams.len() - usize::from(express.is_some())).min(self.used.most) as u64;
        let is_used = is_express || id <= self.used.last;
        let room = self.room(now);
        let least_urgent = self.least_urgent(is_express, now);
        let stream = self.streams.get_mut(&id)?;
        // Failure reports and heartbeats do not wait for room in the window.
        if self.controls.queue.front().is_some_and(|first| self.controls.frames[first].header.kind == Kind::Report) {
            return self.controls.queue.pop_front().map(|control| self.control_frame(id, control, now));
        }
        if let Some(asked) = stream.owes_reply.take() {
            return Some(bare(Kind::HeartbeatReply, asked));
        }
        if let Some(pause) = self.pauses.owed.take() {
            return Some(Outbound { header: pause, payload: no_payload() });
        }
        if is_used && stream.unacked_bytes < stream.window(self.config.unacked_limit_bytes, room) {
            if let Some(control) = self.controls.queue.pop_front() {
                return Some(self.control_frame(id, control, now));
            }
            let first = self.outbox.ready.first();
            if let Some(&(priority, issue)) =
                first.filter(|(priority, _)| least_urgent.is_none_or(|least| *priority <= least))
            {
                // Other messages like it give streams something to carry, too.
                let alike =
                    self.outbox.ready.range((priority, 0)..=(priority, u64::MAX)).take(streams as usize).count();
                let message = self.outbox.messages.get_mut(&issue).expect("ready messages are outgoing");
                self.outbox.urgent += usize::from(!message.has_begun() && priority.is_urgent());
                let (index, repeated) = message.cut_frame(stream.frame_bytes(), streams.div_ceil(alike as u64));
                if !message.has_frames() {
                    self.outbox.ready.remove(&(priority, issue));
                }
                stream.stats.repeated_frames += u64::from(repeated);
                return Some(self.data_frame(id, issue, index, now));
            }
            match if least_urgent.is_some() { TakeOver::Nothing } else { self.take_over(id, now) } {
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

    /// Puts a control frame on a stream.
    fn control_frame(&mut self, id: StreamId, control: u64, now: Time) -> Outbound<C> {
        let stream = self.streams.get_mut(&id).expect("the caller has looked it up");
        stream.sent(FrameId::Control(control), self.controls.frames[&control].header.length, now);
        let control = self.controls.frames.get_mut(&control).expect("looked at above");
        control.copies.add(id);
        if !std::mem::replace(&mut control.has_left, true) {
            control.header.serial = self.controls.sent;
            self.controls.sent += 1;
        }
        let payload = match &control.payload {
            Some(bytes) => Payload::Control(bytes.clone()),
            None => no_payload(),
        };
        Outbound { header: control.header, payload }
    }

    /// Puts frame `index` of a message on a stream.
    fn data_frame(&mut self, id: StreamId, issue: u64, index: u32, now: Time) -> Outbound<C> {
        let stream = self.streams.get_mut(&id).expect("the caller has looked it up");
        let message = self.outbox.messages.get_mut(&issue).expect("the caller has looked it up");
        let changed = message.changed_flag();
        let frame = &mut message.frames[index as usize];
        frame.copies.add(id);
        stream.sent(FrameId::Data { issue, index }, frame.len, now);
        let mut header = Header::new(Kind::Data, message.key);
        header.priority = message.priority;
        header.flags |= changed;
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

    /// Adds what every frame carries for the other direction.
    fn stamp(&mut self, id: StreamId, mut outbound: Outbound<C>, now: Time) -> Outbound<C> {
        let stream = self.streams.get_mut(&id).expect("frames are polled for streams that are up");
        stream.owes_ack = false;
        self.credit.owes_update = false;
        self.credit.told = self.credit.consumed;
        outbound.header.ack = stream.before_bye.unwrap_or(stream.taken_frames);
        if self.sharing.patience >= PATIENCE_SHARED {
            outbound.header.flags |= FLAG_SHARED;
        }
        if now < self.urgency.here {
            outbound.header.flags |= FLAG_URGENT;
        }
        outbound.header.sent_at = stream::clock(now);
        outbound.header.credit = self.credit.consumed;
        outbound.header.generation = self.config.generation;
        outbound
    }
}

fn bare<C>(kind: Kind, offset: u64) -> Outbound<C> {
    Outbound { header: Header { offset, ..Header::new(kind, NO_MESSAGE) }, payload: no_payload() }
}

fn no_payload<C>() -> Payload<C> {
    Payload::Control(Arc::default())
}
