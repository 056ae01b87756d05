//! The next frame for a stream that can take bytes: the most urgent one that may leave.

use super::credit::eager_cost;
use super::outgoing::{Body, Copied, FrameId, Way};
use super::take_over::{PATIENCE_SHARED, TakeOver};
use super::{FLAG_EAGER, FLAG_SHARED, FLAG_URGENT, NO_MESSAGE, Peer, StreamId};
use crate::frame::{FLAG_PAYLOAD_SUM, Header, Kind};
use crate::stream;
use penstock_types::Time;
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
                let (index, repeated) = message.next_frame(stream.frame_bytes(), streams.div_ceil(alike as u64));
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
