//! How operations, groups and the pair itself end: what is forgotten at once, and what still has to reach the peer.

use super::credit::eager_cost;
use super::operation::OpKey;
use super::outgoing::{Control, Way};
use super::{NO_MESSAGE, Peer};
use crate::frame::{Channel, Farewell, Header, Kind, MessageKey};
use penstock_types::{GroupId, OpSeq};

impl Peer {
    /// Tells the peer that this side has left a group, and what it did there. The frame leaves once the peer has taken all
    /// that it can take; messages that wait for a grant do not hold it back.
    pub fn left(&mut self, group: GroupId, farewell: Farewell) {
        let mut ahead = 0;
        for (_, issue) in self.outbox.by_key.range(first_key(group)..).take_while(|(key, _)| key.group == group) {
            let message = self.outbox.messages.get_mut(issue).expect("named by its key");
            message.holds_left = message.is_under_way(&self.outbox.ready, *issue);
            ahead += usize::from(message.holds_left);
        }
        for control in self.controls.frames.values_mut().filter(|control| control.header.key.group == group) {
            control.holds_left = true;
            ahead += 1;
        }
        match ahead {
            0 => self.say_left(group, &farewell),
            _ => drop(self.controls.leaving.insert(group, (ahead, farewell))),
        }
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
        self.undelivered().next().is_none() && !self.controls.frames.values().any(is_report)
    }

    /// Whether the other end has taken everything that was given to this peer.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.outbox.messages.is_empty() && self.controls.frames.is_empty() && self.controls.leaving.is_empty()
    }

    /// Whether a message waits for its grant, or to be read by reference. False for a message that has left or leaves next,
    /// and for one that is not there (any more): [`Event::Sent`] may not have been polled yet.
    #[must_use]
    pub fn needs_the_peer(&self, key: &MessageKey) -> bool {
        self.outbox
            .by_key
            .get(key)
            .is_some_and(|issue| !self.outbox.messages[issue].is_under_way(&self.outbox.ready, *issue))
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
            .outbox
            .by_key
            .range(first_key(group)..)
            .take_while(|(key, _)| key.group == group)
            .filter(|(key, _)| !counts(key))
            .map(|(_, issue)| *issue)
            .collect();
        for issue in issues {
            let message = self.outbox.messages.get_mut(&issue).expect("just found");
            match message.way {
                Way::Eager { .. } if !message.frames.is_empty() => {
                    message.is_forgotten = true;
                    continue;
                }
                Way::Eager { .. } => self.credit.reserved -= eager_cost(message.total),
                Way::Granted | Way::Reference { .. } => {}
            }
            self.forget_message(issue);
        }
        // A control frame that has left has its serial number. The peer waits for no gap in these, but counts them.
        let dropped = self.controls.frames.extract_if(|_, control| {
            let Header { kind, key, .. } = control.header;
            let is_dropped = key.group == group && !control.has_left && !counts(&key);
            is_dropped && !matches!(kind, Kind::Report | Kind::Left | Kind::Bye)
        });
        let held_left = dropped.filter(|(_, control)| control.holds_left).count();
        (0..held_left).for_each(|_| self.no_longer_holds_left(group));
        self.controls.queue.retain(|id| self.controls.frames.contains_key(id));
    }

    pub(super) fn forget_message(&mut self, issue: u64) {
        if let Some(message) = self.outbox.messages.remove(&issue) {
            self.outbox.by_key.remove(&message.key);
            self.outbox.unasked -= usize::from(matches!(message.way, Way::Reference { is_unasked: true }));
            self.outbox.ready.remove(&(message.priority, issue));
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

    /// A message or control frame that held back the `Left` frame of its group was taken, or forgotten.
    pub(super) fn no_longer_holds_left(&mut self, group: GroupId) {
        let Some((ahead, _)) = self.controls.leaving.get_mut(&group) else { return };
        *ahead -= 1;
        if *ahead == 0 {
            let (_, farewell) = self.controls.leaving.remove(&group).expect("just seen");
            self.say_left(group, &farewell);
        }
    }

    /// Whether this side has unacknowledged messages. Their acknowledgements may have been lost with a stream. The peer's
    /// good-bye is not acknowledged before, so that the peer stays, takes the repeated frames and acknowledges them again.
    pub(super) fn has_frames_out(&self) -> bool {
        self.outbox.messages.values().any(|message| !message.frames.is_empty())
    }

    fn say_left(&mut self, group: GroupId, farewell: &Farewell) {
        let payload = farewell.encode();
        let mut header = Header::new(Kind::Left, first_key(group));
        header.length = payload.len() as u32;
        self.control(header, Some(&payload));
    }
}

/// The smallest key of a group.
fn first_key(group: GroupId) -> MessageKey {
    MessageKey { group, ..NO_MESSAGE }
}
