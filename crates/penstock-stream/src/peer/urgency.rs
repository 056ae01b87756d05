//! What is urgent waits behind little: while a node sends such messages, one stream to each peer is left free for them, and on all
//! others less is under way, also from those nodes to which it says so.

use super::outgoing::Copied;
use super::{Peer, StreamId};
use crate::stream::Room;
use penstock_types::{MILLISECOND, Priority, SECOND, Time};

/// Until when the queues on the way are kept short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Urgency {
    /// This node has sent what is urgent, to whichever peer.
    pub here: Time,
    /// This node or one that it has heard.
    pub anywhere: Time,
    /// Another process of this host sends something urgent now: until then nothing else leaves.
    pub held: Time,
    /// This node has waited for others for long enough: what peers ask for with pauses does not count for now.
    pub ignores_pauses: bool,
}

impl Urgency {
    /// For how long after an urgent message queues are kept short: longer than a training step, so that the first urgent message of
    /// a step finds them short.
    pub const LASTS: u64 = 10 * SECOND;
}

impl<C: Copied> Peer<C> {
    /// How urgent the next message is that a stream with room would send; `None`: there is none.
    #[must_use]
    pub fn most_urgent(&self) -> Option<Priority> {
        self.outbox.ready.first().map(|(priority, _)| *priority)
    }

    /// What this peer's messages make of the node's urgency.
    #[must_use]
    pub fn urgency(&self, now: Time) -> Urgency {
        let here = if self.has_urgent(now) { now.plus(Urgency::LASTS) } else { self.urgency.here };
        Urgency { here, anywhere: self.urgency.anywhere.max(here), ..self.urgency }
    }

    /// Whether urgent messages can leave, or are on their way. Those that wait for a grant, for a stream, for the end of a pause, or to be
    /// read, do not count.
    #[must_use]
    pub fn has_urgent(&self, now: Time) -> bool {
        self.outbox.urgent > 0 || self.can_send_urgent(now)
    }

    /// Whether something urgent waits for room on its streams, which take what is before it.
    #[must_use]
    pub fn awaits_room(&self, now: Time) -> bool {
        self.can_send_urgent(now) && self.is_well(now)
    }

    fn can_send_urgent(&self, now: Time) -> bool {
        // As on a stream that carries only what is urgent, and as a pause allows.
        let may_leave = |priority| self.least_urgent(true, now).is_none_or(|least| priority <= least);
        !self.streams.is_empty() && self.most_urgent().is_some_and(may_leave)
    }

    /// Takes over what is urgent for the whole node: the latest times of all its peers.
    pub fn hurry(&mut self, urgency: Urgency) {
        self.urgency = urgency;
    }

    /// The stream that carries nothing but control frames and urgent messages at present, if there is one. It is to be asked for
    /// frames before the others.
    #[must_use]
    pub fn express(&self, now: Time) -> Option<StreamId> {
        let (id, stream) = self.streams.last_key_value()?;
        let is_well = stream.silence(now) < SILENT;
        (now < self.urgency.here && self.can_have_express() && is_well).then_some(*id)
    }

    /// Whether a stream brings acknowledgements, or none has something to bring.
    pub(super) fn is_well(&self, now: Time) -> bool {
        let mut waiting = self.streams.values().filter(|stream| stream.awaits_acks()).peekable();
        waiting.peek().is_none() || waiting.any(|stream| stream.silence(now) < SILENT)
    }

    /// What may leave on a stream now is as urgent as this at least; `None`: everything may.
    pub(super) fn least_urgent(&self, is_express: bool, now: Time) -> Option<Priority> {
        let is_held = now < self.urgency.held && !self.config.descriptors;
        let urgent = (is_express || is_held).then_some(Priority::LEAST_URGENT);
        let pause = self.pauses.least_urgent(now).filter(|_| !self.urgency.ignores_pauses);
        urgent.into_iter().chain(pause).min()
    }

    fn can_have_express(&self) -> bool {
        self.streams.len() >= self.config.express_from.max(2)
    }

    /// How long the queues of the streams may be.
    pub(super) fn room(&self, now: Time) -> Room {
        match self.share_a_link() {
            _ if now < self.urgency.anywhere && self.can_have_express() => Room::Urgent,
            true => Room::Shared,
            false => Room::Own,
        }
    }
}

/// A stream without acknowledgements for so long is not kept for what is urgent: its path may carry nothing any more.
const SILENT: u64 = 50 * MILLISECOND;
