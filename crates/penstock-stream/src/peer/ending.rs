//! How operations, groups and the pair itself end: what is forgotten at once, and what still has to reach the peer.

use super::credit::eager_cost;
use super::operation::OpKey;
use super::outgoing::{Control, Copied, Way};
use super::{NO_MESSAGE, Peer};
use crate::frame::{Counts, Farewell, Header, Kind, MessageKey, NumberSpace};
use penstock_types::{GroupId, OpSeq, Scope};
use std::collections::BTreeMap;

impl<C: Copied> Peer<C> {
    /// Tells the peer that this side has left a group, or closed a channel of it, and what it did there. The frame leaves once the
    /// peer has taken all that it can take; messages that wait for a grant do not hold it back. A group's farewell comes after
    /// those of its channels.
    pub fn left(&mut self, scope: impl Into<Scope>, farewell: Farewell) {
        let scope = scope.into();
        // Each farewell of a channel that has not left holds that of the group back, and then its frame does.
        let channels = self.controls.leaving.keys().filter(|one| one.group == scope.group && !one.is_group());
        let mut ahead = if scope.is_group() { channels.count() } else { 0 };
        let is_free = |held: Option<Scope>| held.is_none_or(|by| by == scope);
        for (_, issue) in keys_of(&self.outbox.by_key, scope) {
            let message = self.outbox.messages.get_mut(issue).expect("named by its key");
            if !is_free(message.holds_left) {
                continue;
            }
            message.holds_left = message.is_under_way(&self.outbox.ready, *issue).then_some(scope);
            ahead += usize::from(message.holds_left.is_some());
        }
        let controls = self.controls.frames.values_mut().filter(|control| control.header.key.is_in(scope));
        for control in controls.filter(|control| is_free(control.holds_left)) {
            control.holds_left = Some(scope);
            ahead += 1;
        }
        match ahead {
            0 => drop(self.say_left(scope, &farewell)),
            _ => {
                let is_new = self.controls.leaving.insert(scope, (ahead, farewell)).is_none();
                if is_new
                    && !scope.is_group()
                    && let Some((ahead, _)) = self.controls.leaving.get_mut(&Scope::from(scope.group))
                {
                    *ahead += 1;
                }
            }
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
    pub fn retire(&mut self, group: GroupId, space: NumberSpace, op: OpSeq) {
        if let Some(op) = self.ops.remove(&OpKey { group, space, op }) {
            self.remembered -= op.remembered();
        }
    }

    /// [`Peer::retire`] for all operations of a group that was left, or of a channel that was closed. Messages on their way to the
    /// peer go on.
    pub fn retire_all(&mut self, scope: impl Into<Scope>) {
        let scope = scope.into();
        for (_, op) in self.ops.extract_if(|key, _| scope.covers(key.group, key.space.channel())) {
            self.remembered -= op.remembered();
        }
    }

    /// Forgets a group, or a channel of one, that has failed. Messages that were not taken are dropped, except eager ones that have
    /// left: their credit returns only when they arrive. Messages of collectives that are `finished` go on: those have ended here,
    /// and the peer may still be in them.
    pub fn forget(&mut self, scope: impl Into<Scope>, finished: &Counts) {
        let scope = scope.into();
        self.retire_all(scope);
        let dropped = keys_of(&self.outbox.by_key, scope).filter(|(key, _)| !finished.include(key));
        let issues: Vec<u64> = dropped.map(|(_, issue)| *issue).collect();
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
            let is_dropped = key.is_in(scope) && !control.has_left && !finished.include(&key);
            is_dropped && !matches!(kind, Kind::Report | Kind::Left | Kind::Bye)
        });
        let held_left: Vec<Scope> = dropped.filter_map(|(_, control)| control.holds_left).collect();
        held_left.into_iter().for_each(|scope| self.no_longer_holds_left(scope));
        self.controls.queue.retain(|id| self.controls.frames.contains_key(id));
    }

    pub(super) fn forget_message(&mut self, issue: u64) {
        if let Some(message) = self.outbox.messages.remove(&issue) {
            self.outbox.by_key.remove(&message.key);
            self.outbox.unasked -= usize::from(matches!(message.way, Way::Reference { is_unasked: true }));
            self.outbox.ready.remove(&(message.priority, issue));
            self.outbox.urgent -= usize::from(message.has_begun() && message.priority.is_urgent());
            if let Some(scope) = message.holds_left {
                self.no_longer_holds_left(scope);
            }
        }
        if self.withholds_ack && !self.has_frames_out() {
            self.withholds_ack = false;
            for stream in self.streams.values_mut() {
                stream.owes_ack |= stream.before_bye.take().is_some();
            }
        }
    }

    /// A message or control frame that held back a `Left` frame was taken, or forgotten.
    pub(super) fn no_longer_holds_left(&mut self, scope: Scope) {
        let Some((ahead, _)) = self.controls.leaving.get_mut(&scope) else { return };
        *ahead -= 1;
        if *ahead == 0 {
            let (_, farewell) = self.controls.leaving.remove(&scope).expect("just seen");
            let control = self.say_left(scope, &farewell);
            // The farewell of the channel held back that of its group; now its frame does.
            let group = Scope::from(scope.group);
            if !scope.is_group() && self.controls.leaving.contains_key(&group) {
                self.controls.frames.get_mut(&control).expect("just queued").holds_left = Some(group);
            }
        }
    }

    /// Whether this side has unacknowledged messages. Their acknowledgements may have been lost with a stream. The peer's
    /// good-bye is not acknowledged before, so that the peer stays, takes the repeated frames and acknowledges them again.
    #[must_use]
    pub fn has_frames_out(&self) -> bool {
        self.outbox.messages.values().any(|message| !message.frames.is_empty())
    }

    /// Queues a farewell. Returns its control frame's number.
    fn say_left(&mut self, scope: Scope, farewell: &Farewell) -> u64 {
        let payload = farewell.encode();
        let mut header = Header::new(Kind::Left, first_key(scope));
        header.length = payload.len() as u32;
        header.offset = u64::from(farewell.leaves_group);
        let id = self.controls.next;
        self.control(header, Some(&payload));
        id
    }
}

/// The outgoing messages of a group, or of a channel.
fn keys_of(by_key: &BTreeMap<MessageKey, u64>, scope: Scope) -> impl Iterator<Item = (&MessageKey, &u64)> {
    let of_group = by_key.range(first_key(scope)..).take_while(move |(key, _)| key.group == scope.group);
    of_group.filter(move |(key, _)| key.is_in(scope))
}

/// The smallest key of a group, or of a channel.
pub(super) fn first_key(scope: Scope) -> MessageKey {
    MessageKey { group: scope.group, space: NumberSpace::Collective(scope.channel), ..NO_MESSAGE }
}
