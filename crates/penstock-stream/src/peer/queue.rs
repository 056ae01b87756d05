//! What this side wants the peer to get: messages and control frames, queued until a stream has room for them.

use super::ending::first_key;
use super::operation::{OpKey, granted_span};
use super::outgoing::{Body, Control, Copied, Copies, Message, Outgoing, Way};
use super::{NO_MESSAGE, Peer, Report};
use crate::fingerprint::Fingerprint;
use crate::frame::{NumberSpace, Header, Kind, MAX_REPORT_BYTES, MessageKey, Reference};
use penstock_types::{GroupId, OpSeq, Priority, Scope};
use std::sync::Arc;

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
}
