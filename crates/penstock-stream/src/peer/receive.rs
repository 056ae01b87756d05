//! What comes from the peer: headers, whole frames, acknowledgements. Duplicates are found here, and frames that the peer may
//! not send.

use super::operation::{Arrival, Arriving, Incoming, OpKey, OpStatus, granted_span, span};
use super::outgoing::{Body, Copied, FrameId, Way};
use super::take_over::{PATIENCE_LOST, PATIENCE_MOST, PATIENCE_WON};
use super::{Event, FLAG_EAGER, FLAG_SHARED, FLAG_URGENT, Peer, Report, StreamId, Urgency};
use crate::frame::{Counts, FLAG_PAYLOAD_SUM, Farewell, FrameError, Header, Kind, MessageKey};
use crate::ranges::Ranges;
use penstock_types::{FailureKind, Scope, Time};

/// What the engine does with a complete frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// Use the payload. False for a duplicate.
    pub apply: bool,
    /// The stream that is still reading the same frame, and must discard the rest.
    pub revoke: Option<StreamId>,
}

/// Whether a received payload is what was sent. [`Peer::handle_frame`] asks that of every payload that is used.
///
/// # Errors
/// It is not.
pub fn verify(header: &Header, payload: &[u8]) -> Result<(), FrameError> {
    if header.flags & FLAG_PAYLOAD_SUM != 0 && crc32c::crc32c(payload) != header.payload_sum {
        return Err(FrameError::PayloadSum);
    }
    Ok(())
}

impl<C: Copied> Peer<C> {
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
        self.sharing.is_found_there = header.flags & FLAG_SHARED != 0;
        if header.flags & FLAG_URGENT != 0 {
            self.urgency.anywhere = self.urgency.anywhere.max(now.plus(Urgency::LASTS));
        }
        self.handle_ack(id, header, now)?;
        self.credit.handle_returned(header.credit)?;
        match header.kind {
            Kind::Data => {
                let arrival = self.handle_data_header(id, header, status)?;
                self.pauses.received(header, arrival != Arrival::Discard, now);
                Ok(arrival)
            }
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
                let patience = self.sharing.patience * if was_news { PATIENCE_WON } else { PATIENCE_LOST };
                self.sharing.patience = patience.clamp(1.0, PATIENCE_MOST);
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
        let op = match eager {
            true => self.ops.entry(key).or_default(),
            false => self
                .ops
                .get_mut(&key)
                .filter(|op| op.given.covers(&(message..message + 1)))
                .ok_or(FrameError::OutOfTurn("data of an operation that was not granted"))?,
        };
        op.incoming.entry(header.key.message).or_insert_with(|| Incoming::new(header.total)).arrive(id, header)
    }

    /// A data frame is whole in a buffer of its reader's, and its bytes are about to be used: the stream claims their range. Returns
    /// the stream that was bringing it first, if another one was, and must discard what it still reads; `None` for a duplicate.
    /// [`Peer::handle_frame`] follows when the bytes have been used. Until then no other copy may be given to that, and nothing of
    /// the frame is acknowledged.
    pub fn claim(&mut self, id: StreamId, header: &Header) -> Option<Option<StreamId>> {
        let first = self.arriving(&header.key, header.offset)?.on.replace(id);
        Some(first.filter(|first| *first != id))
    }

    /// The stream that has a frame's range claimed is about to be lost, and its reader may still touch the range: the claim goes over
    /// to [`LOST_STREAM`], until [`Peer::handle_frame`] takes the frame from that, or another copy, which is not read to its place.
    pub fn hold(&mut self, key: &MessageKey, offset: u64) {
        if let Some(arriving) = self.arriving(key, offset) {
            arriving.on = Some(LOST_STREAM);
        }
    }

    fn arriving(&mut self, key: &MessageKey, offset: u64) -> Option<&mut Arriving> {
        self.ops.get_mut(&OpKey::of(key))?.incoming.get_mut(&key.message)?.arriving.get_mut(&offset)
    }

    /// The frame is whole. For data: records it; the caller applies the payload before it polls the next frame, so that no ack can
    /// leave before. The payload is checked against its checksum if the header has one. That of a duplicate is not looked at, and
    /// may be left out: after [`Event::Sent`] the sender may change the bytes of a copy that is still under way.
    ///
    /// # Errors
    /// A payload that was damaged, or a frame that the peer may not send; close the stream.
    pub fn handle_frame(
        &mut self,
        id: StreamId,
        header: &Header,
        payload: &[u8],
        status: OpStatus,
    ) -> Result<Finish, FrameError> {
        let mut finish = Finish { apply: true, revoke: None };
        if header.kind != Kind::Data {
            verify(header, payload)?;
        }
        match header.kind {
            Kind::Data => finish = self.handle_data(id, header, payload, status)?,
            kind if kind.is_counted() && !self.is_new_control(header)? => finish.apply = false,
            Kind::Reference => finish.apply = self.handle_reference(header, status)?,
            Kind::Done => self.handle_done(header)?,
            Kind::Grant => self.handle_grant(header, status)?,
            // The engine grants the message when it posts the operation, and keeps the announcement until then.
            Kind::Announce => finish.apply = !self.is_late(header, status),
            Kind::Probe => self.events.push_back(Event::Probe(header.key, header.fingerprint)),
            Kind::ProbeReply => self.events.push_back(Event::Issued(header.key, header.offset)),
            Kind::Report => self.events.push_back(Event::Report(scope_of(header), Report::decode(header, payload)?)),
            Kind::Left => self.events.push_back(Event::Left(scope_of(header), Farewell::decode(header, payload)?)),
            Kind::Bye => self.events.push_back(Event::Bye),
            Kind::Pause => self.pauses.obey(header, self.hearing.last),
            Kind::Heartbeat | Kind::Ack | Kind::HeartbeatReply | Kind::Share | Kind::Unshare => {}
        }
        let has_frames_out = header.kind == Kind::Bye && self.has_frames_out();
        if let Some(stream) = self.streams.get_mut(&id) {
            match header.kind {
                Kind::Heartbeat => stream.owes_reply = Some(header.offset),
                Kind::HeartbeatReply if header.offset <= self.hearing.last.0 => {
                    stream.answered(Time(header.offset), self.hearing.last);
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

    /// An eager message was used (or its operation failed): returns its credit to the peer.
    pub fn consumed(&mut self, total: u64) {
        self.credit.consume(total, self.config.eager_credit_bytes);
    }

    /// What has happened since the last call.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn handle_data(
        &mut self,
        id: StreamId,
        header: &Header,
        payload: &[u8],
        status: OpStatus,
    ) -> Result<Finish, FrameError> {
        let mut finish = Finish { apply: false, revoke: None };
        if status != OpStatus::Retired {
            let op = self.ops.get_mut(&OpKey::of(&header.key));
            let mut message = op.and_then(|op| op.incoming.get_mut(&header.key.message));
            if !message.as_ref().is_some_and(|message| message.done.covers(&span(header))) {
                verify(header, payload)?;
            }
            if let Some(message) = &mut message
                && let Some(arriving) = message.arriving.remove(&header.offset)
            {
                message.done.insert(span(header));
                if message.done.covers(&(0..header.total)) {
                    self.pauses.completed(&header.key, self.hearing.last);
                }
                finish = Finish { apply: true, revoke: arriving.on.filter(|first| *first != id) };
            }
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
        let new = !self.controls.taken.covers(&one);
        self.controls.taken.insert(one);
        if self.controls.taken.count() > MAX_REMEMBERED {
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
        let message = u64::from(header.key.message);
        let is_unasked = !op.given.covers(&(message..message + 1));
        let incoming = Incoming { by_reference: true, is_unasked, ..Incoming::new(header.total) };
        op.incoming.insert(header.key.message, incoming);
        op.unasked += usize::from(is_unasked);
        self.remembered.unasked += usize::from(is_unasked);
        if self.remembered.unasked > MAX_REMEMBERED {
            return Err(FrameError::OutOfTurn("more references than we can remember"));
        }
        Ok(true)
    }

    fn handle_done(&mut self, header: &Header) -> Result<(), FrameError> {
        let Some(issue) = self.outbox.by_key.get(&header.key).copied() else { return Ok(()) };
        if !matches!(self.outbox.messages[&issue].way, Way::Reference { .. }) {
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
        let mut by_reference = Vec::new();
        if !span.is_empty() {
            let last = MessageKey { message: (span.end - 1) as u32, ..header.key };
            for (key, issue) in self.outbox.by_key.range(header.key..=last) {
                let message = &self.outbox.messages[issue];
                match (&message.way, self.reference_of(message)) {
                    (Way::Reference { .. }, _) => {}
                    (Way::Granted, Some(place)) => by_reference.push((*issue, place)),
                    _ if message.has_frames() => drop(self.outbox.ready.insert((message.priority, *issue))),
                    _ => {}
                }
                open.remove(u64::from(key.message)..u64::from(key.message) + 1);
            }
        }
        for (issue, place) in by_reference {
            let mut message = self.outbox.messages.remove(&issue).expect("just found");
            self.refer(&mut message, place, false);
            self.outbox.messages.insert(issue, message);
        }
        if open.is_empty() || self.remember_grant(&header.key, open) || status == OpStatus::Active {
            self.events.push_back(Event::Granted(header.key, header.fingerprint));
        }
        Ok(())
    }

    /// Remembers messages that were granted before they are issued, or drops that. The peer is asked for what was dropped, and learns
    /// this side's fingerprint then.
    fn remember_grant(&mut self, key: &MessageKey, open: Ranges) -> bool {
        if self.remembered.grants >= self.config.most_unasked {
            self.has_dropped_grants = true;
            return false;
        }
        let op = self.ops.entry(OpKey::of(key)).or_default();
        self.remembered -= op.remembered();
        op.granted.extend(open);
        self.remembered += op.remembered();
        true
    }

    /// Records a data frame as taken. Returns false if another stream had brought it.
    fn frame_taken(&mut self, stream: StreamId, frame: FrameId) -> bool {
        let (issue, index) = match frame {
            FrameId::Data { issue, index } => (issue, index),
            FrameId::Control(id) => {
                let Some(control) = self.controls.frames.remove(&id) else { return false };
                if let Some(scope) = control.holds_left {
                    self.no_longer_holds_left(scope);
                }
                return true;
            }
        };
        let Some(message) = self.outbox.messages.get_mut(&issue) else { return false };
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
}

impl Report {
    fn decode(header: &Header, payload: &[u8]) -> Result<Report, FrameError> {
        let records = usize::try_from(header.total).ok().and_then(|count| count.checked_mul(Counts::RECORD_BYTES));
        let split = records.filter(|_| header.total <= Counts::MOST_CHANNELS as u64);
        let Some((records, text)) = split.and_then(|at| payload.split_at_checked(at)) else {
            return Err(FrameError::Length { kind: Kind::Report, length: payload.len() as u32 });
        };
        let kind = FailureKind::ALL.into_iter().find(|kind| *kind as u32 == header.key.message);
        let kind = kind.unwrap_or(FailureKind::Bug);
        let message = String::from_utf8_lossy(text).into_owned();
        Ok(Report { kind, message, is_passed_on: header.offset != 0, finished: Counts::decode(records) })
    }
}

/// In place of a stream that is gone while its reader still has a claim.
pub const LOST_STREAM: StreamId = StreamId::MAX;

/// What a `Report` or `Left` frame is about.
fn scope_of(header: &Header) -> Scope {
    Scope { group: header.key.group, channel: header.key.space.channel() }
}

/// Bound on what a defective peer makes us hold: references that were not asked for, and gaps between its control frames. Four times
/// [`PeerConfig::most_unasked`](super::PeerConfig::most_unasked), since a sender forgets the references of a group that fails before
/// we do. Fewer in tests.
pub(super) const MAX_REMEMBERED: usize = if cfg!(test) { 4_096 } else { 65_536 };
