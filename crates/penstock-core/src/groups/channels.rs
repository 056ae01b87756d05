//! The channels of a group: how one is opened and closed, and what is known of all.

use super::channel::{Channel, Open};
use super::group::{Call, Group};
use super::host::Host;
use super::{Common, Groups};
use crate::name::{OpId, Sequence};
use penstock_plan::Collective;
use penstock_stream::crc32c;
use penstock_stream::fingerprint::{Fingerprint, Name};
use penstock_stream::peer::Counts;
use penstock_types::{ChannelId, DType, Failure, FailureKind, GroupId, PeerId, Priority, ReduceOp, Scope};

impl<B, K> Groups<B, K> {
    /// Opens a channel. The operation of `body` ends when all ranks have opened it.
    pub fn open<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, id: GroupId, open: Open, body: B) {
        match self.groups.get_mut(&id) {
            Some(group) => group.open(&mut self.common, host, open, body),
            None => host.refused(body, Failure::fatal(FailureKind::Closed, "the group was destroyed.")),
        }
    }

    /// Closes a channel; its operations that still run fail, on all ranks. Leaves the group, if it is the main one. `leaves_group`:
    /// that follows at once.
    pub fn close<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, scope: Scope, leaves_group: bool) {
        if scope.is_group() {
            return self.leave(host, scope.group);
        }
        if let Some(group) = self.groups.get_mut(&scope.group) {
            group.close(&mut self.common, host, scope.channel, leaves_group);
        }
    }
}

impl<B> Group<B> {
    fn open<H: Host<Body = B>>(&mut self, common: &mut Common<H::Kept>, host: &mut H, open: Open, body: B) {
        let Open { channel, name, is_vigil, timeout } = open;
        if let Some(failure) = &self.failed {
            return host.refused(body, failure.clone());
        }
        if self.channels.len() >= Counts::MOST_CHANNELS && !self.channels.contains_key(&channel) {
            let message = format!(
                "channel {name} cannot be opened: group {} has {} open channels. Close some.",
                self.name,
                self.channels.len()
            );
            return host.refused(body, Failure::of_call(FailureKind::Config, message));
        }
        let known = self.channels.entry(channel).or_insert_with(|| Channel::new(name.clone(), self.algorithm));
        (known.is_open, known.is_vigil, known.name) = (true, is_vigil, name);
        let sum = crc32c(known.name.as_bytes());
        let call = Call {
            collective: Collective::Barrier,
            fingerprint: Fingerprint::new(Name::Open, None, DType::U8, None, u64::from(sum)),
            dtype: DType::U8,
            op: ReduceOp::Sum,
            bytes: 0,
            splits: None,
            tag: 0,
            coflow: 0,
            priority: Priority(0),
            hold: false,
            timeout,
        };
        self.start(common, host, channel, call, body);
        self.check_vigil(common, host, channel);
    }

    /// Closes a channel that is not the main one.
    pub(super) fn close<H: Host<Body = B>>(
        &mut self,
        common: &mut Common<H::Kept>,
        host: &mut H,
        channel: ChannelId,
        leaves_group: bool,
    ) {
        if !self.channels.get(&channel).is_some_and(|known| known.is_open) {
            return;
        }
        let scope = Scope { group: self.id, channel };
        if self.operations_in(channel) > 0 {
            let message = format!("{} closed {} while operations were running.", self.own(), self.label(channel));
            self.fail(common, host, channel, Failure::fatal(FailureKind::Closed, message), true);
        }
        let known = self.channels.remove(&channel).expect("just seen");
        self.closed.insert(u64::from(channel.0)..u64::from(channel.0) + 1);
        host.left(scope);
        common.forget_early(host, scope);
        for peer in self.members.peers() {
            let machine = host.machine(peer);
            // A group's failure ends all channels on the peer.
            if self.failed.is_none() && common.directory.peer(peer).is_reachable() {
                machine.left(scope, known.farewell(leaves_group));
            }
            machine.retire_all(scope);
        }
    }

    /// The channel of this number, also if only others have opened it. `None`: it was closed here, or there are too many.
    pub(super) fn known<H: Host<Body = B>>(
        &mut self,
        common: &mut Common<H::Kept>,
        host: &mut H,
        peer: PeerId,
        channel: ChannelId,
    ) -> Option<&mut Channel> {
        if self.is_closed(channel) {
            return None;
        }
        if self.channels.len() >= Counts::MOST_CHANNELS && !self.channels.contains_key(&channel) {
            let message = format!(
                "{} has closed so many channels of group {} that this rank has not opened that it keeps no more. Ranks must open \
                 the same channels.",
                common.directory.peer(peer).who,
                self.name
            );
            self.fail(common, host, ChannelId::MAIN, Failure::fatal(FailureKind::Mismatch, message), true);
            return None;
        }
        Some(self.channels.entry(channel).or_insert_with(|| Channel {
            is_open: false,
            ..Channel::new(format!("{}/{}", self.name, channel.0).into(), self.algorithm)
        }))
    }

    /// Fails a vigil that a member has closed, or whose member is gone.
    pub(super) fn check_vigil<H: Host<Body = B>>(
        &mut self,
        common: &mut Common<H::Kept>,
        host: &mut H,
        channel: ChannelId,
    ) {
        if !self.channels.get(&channel).is_some_and(|known| known.is_vigil && known.failed.is_none()) {
            return;
        }
        let gone = self.members.others().find(|(_, peer)| self.is_gone(common, *peer, channel));
        if let Some((rank, peer)) = gone {
            // It may have left in good order, with all operations that it has issued.
            let failure = self.departure(common, rank, peer, OpId::collective(channel, u64::MAX));
            self.fail(common, host, channel, failure, true);
        }
    }

    /// A channel, or the group where it is the main one, in messages.
    pub(super) fn label(&self, channel: ChannelId) -> String {
        match self.channels.get(&channel) {
            Some(known) if channel != ChannelId::MAIN => format!("channel {}", known.name),
            _ => format!("group {}", self.name),
        }
    }

    /// Whether a channel was opened here and closed again.
    pub(super) fn is_closed(&self, channel: ChannelId) -> bool {
        self.closed.covers(&(u64::from(channel.0)..u64::from(channel.0) + 1))
    }

    /// Its main channel.
    ///
    /// # Panics
    /// Never: each group has one.
    #[must_use]
    pub fn main(&self) -> &Channel {
        &self.channels[&ChannelId::MAIN]
    }

    /// How many operations of an operation's sequence were issued here.
    pub(super) fn issued(&self, op: OpId) -> u64 {
        self.channels.get(&op.channel).map_or(0, |known| known.issued.count(op.sequence))
    }

    /// Why nothing runs in a channel any more, if that is so.
    #[must_use]
    pub fn end_of(&self, channel: ChannelId) -> Option<Failure> {
        let known = self.channels.get(&channel).filter(|known| known.is_open);
        let closed = || Failure::of_call(FailureKind::Closed, format!("channel {} was closed.", channel.0));
        let of_channel = || known.map_or_else(|| Some(closed()), |known| known.failed.clone());
        self.failed.clone().or_else(of_channel)
    }

    /// How many operations of a channel have not ended.
    #[must_use]
    pub fn operations_in(&self, channel: ChannelId) -> usize {
        let counted = self.ops.keys().chain(self.held.keys()).filter(|op| op.channel == channel).count();
        if channel == ChannelId::MAIN { counted + self.unbound() } else { counted }
    }

    /// The channels that this rank has opened, with the main one, in order.
    pub fn channels(&self) -> impl Iterator<Item = (ChannelId, &Channel)> {
        self.channels.iter().filter(|(_, known)| known.is_open).map(|(id, known)| (*id, known))
    }

    /// How many channels it keeps: the main one, those that are open here, and those that others have closed and this rank has not
    /// opened.
    #[must_use]
    pub fn known_channels(&self) -> usize {
        self.channels.len()
    }

    /// The number of the first collective of a channel that was issued and has not ended.
    pub(super) fn first_running(&self, channel: ChannelId) -> Option<u64> {
        let running = self.ops.keys().chain(self.held.keys());
        running.filter(|op| op.channel == channel && op.sequence == Sequence::Collectives).map(|op| op.seq).min()
    }

    /// How many collectives of each channel have ended here before the first one that has not.
    pub(super) fn finished(&self, scope: Scope) -> Counts {
        let channels = self.channels.iter().filter(|(id, _)| scope.covers(self.id, **id));
        let ended = |id: &ChannelId, known: &Channel| self.first_running(*id).unwrap_or(known.issued.collectives);
        Counts(channels.map(|(id, known)| (*id, ended(id, known))).filter(|(_, count)| *count > 0).collect())
    }

    /// All collectives that were issued here, of a channel only those before one.
    pub(super) fn issued_before(&self, op: OpId) -> Counts {
        let issued = self.channels.iter().map(|(id, known)| (*id, known.issued.collectives));
        let before = |(id, count)| if id == op.channel { (id, op.seq) } else { (id, count) };
        Counts(issued.map(before).filter(|(_, count)| *count > 0).collect())
    }
}
