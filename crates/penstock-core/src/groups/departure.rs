//! Ranks that leave, or are lost, and operations that wait for them.

use super::channel::{Channel, OPENING_OPS};
use super::group::{Group, Posted};
use super::host::Host;
use super::{Common, Groups};
use crate::name::{OpId, Sequence};
use crate::operation::Awaited;
use penstock_stream::peer::{Counts, Farewell};
use penstock_types::{ChannelId, Failure, FailureKind, GroupId, PeerId};
use std::collections::BTreeMap;

impl<B, K> Groups<B, K> {
    /// This rank leaves a group: it closes its channels, the main one last.
    pub fn leave<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, id: GroupId) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        for channel in group.channels.keys().copied().filter(|id| *id != ChannelId::MAIN).collect::<Vec<_>>() {
            group.close(&mut self.common, host, channel, true);
        }
        if group.is_busy() {
            let message = format!("{} destroyed the group while operations were running.", group.own());
            let failure = Failure::fatal(FailureKind::Closed, message);
            group.fail(&mut self.common, host, ChannelId::MAIN, failure, true);
        }
        let group = self.groups.remove(&id).expect("just seen");
        self.common.unjoined.close(id);
        host.left(id.into());
        self.common.forget_early(host, id.into());
        let farewell = group.main().farewell(true);
        for peer in group.members.peers() {
            let machine = host.machine(peer);
            if self.common.directory.peer(peer).is_reachable() {
                machine.left(id, farewell.clone());
            }
            machine.retire_all(id);
        }
    }
}

impl<K> Common<K> {
    /// A peer has left a group that this process has not joined, or has left, or that has failed on the peer: its messages
    /// there are of no use.
    pub(super) fn has_done_with<H: Host<Kept = K>>(&mut self, host: &mut H, peer: PeerId, id: GroupId) {
        if !self.unjoined.is_closed(id) {
            self.unjoined.overtaken.remember(peer, id);
        }
        host.machine(peer).retire_all(id);
        self.forget_early_of(host, peer, |group| group == id);
    }

    /// Drops a peer's early messages for operations of some groups.
    pub(super) fn forget_early_of<H: Host<Kept = K>>(
        &mut self,
        host: &mut H,
        peer: PeerId,
        is_meant: impl Fn(GroupId) -> bool,
    ) {
        for (peer, total) in self.early.forget_peer(peer, is_meant) {
            host.machine(peer).consumed(total);
        }
    }
}

impl<B> Group<B> {
    /// A peer has closed a channel, or left the group where it is the main one. It requests nothing there any more, and nothing more
    /// comes from it. The operations that it reports are compared with those here.
    pub(super) fn has_left<H: Host<Body = B>>(
        &mut self,
        common: &mut Common<H::Kept>,
        host: &mut H,
        peer: PeerId,
        channel: ChannelId,
        farewell: Farewell,
    ) {
        let Some(rank) = self.members.rank_of(peer).filter(|_| self.failed.is_none()) else { return };
        let Some(known) = self.known(common, host, peer, channel) else { return };
        if known.failed.is_some() || known.farewells.gone.contains_key(&peer) {
            return;
        }
        known.farewells.gone.insert(peer, (farewell.collectives, farewell.leaves_group));
        let mut differs = None;
        for (seq, theirs) in farewell.last {
            let op = OpId::collective(channel, seq.0);
            let ours = self.fingerprint(op, rank).map(|ours| (self.members.rank(), ours));
            // Farewells are not compared with each other after the first.
            let told = self.channels.get_mut(&channel).map(|known| &mut known.farewells.told);
            let (first, told) = *told.expect("just seen").entry(seq).or_insert((peer, theirs));
            let others = [ours, Some((self.rank_of(first), told))];
            if let Some(other) = others.into_iter().flatten().find(|(_, other)| *other != theirs) {
                differs = Some(self.difference(op, other, (rank, theirs)));
                break;
            }
        }
        match differs {
            Some(message) => {
                self.fail(common, host, ChannelId::MAIN, Failure::fatal(FailureKind::Mismatch, message), true);
            }
            None => self.check_waiting(common, host),
        }
    }

    /// Fails the group, or channels, where an operation waits for a rank that is gone.
    pub(super) fn check_waiting<H: Host<Body = B>>(&mut self, common: &mut Common<H::Kept>, host: &mut H) {
        let mut ops: Vec<OpId> = self.ops.keys().copied().collect();
        ops.sort_unstable();
        for op in ops {
            self.check_departed(common, host, op);
        }
        for channel in self.channels.keys().copied().collect::<Vec<_>>() {
            self.check_vigil(common, host, channel);
        }
        // The messages of ranks that have left come before their farewells.
        let reason = self.unbound.iter().find_map(|posted| self.senders_are_gone(common, posted));
        if let Some(reason) = reason {
            self.fail(common, host, ChannelId::MAIN, Failure::fatal(FailureKind::PeerLost, format!("{reason}.")), true);
        }
    }

    /// Fails an operation that waits for a rank that is lost, or has left. What the rank sent before still counts.
    pub(super) fn check_departed<H: Host<Body = B>>(&mut self, common: &mut Common<H::Kept>, host: &mut H, op: OpId) {
        if !self.members.peers().any(|peer| self.is_gone(common, peer, op.channel)) {
            return;
        }
        self.count_as_taken(common, host, op);
        let Some(active) = self.ops.get(&op) else { return };
        // The operation fails with the group or channel, for the first failure.
        if self.is_void(op) {
            return;
        }
        let failure = active.operation.awaited_messages().into_iter().find_map(|(rank, what)| {
            let peer = self.members.peer(rank).filter(|peer| self.is_gone(common, *peer, op.channel))?;
            let key = |message| op.key(self.id, self.members.rank(), message);
            let comes = match what {
                // Messages that were only announced, or lie in the rank's memory, are lost with the rank.
                Awaited::Message(message) => common.early.has_bytes(peer, key(message)),
                // The rank has taken the message, if its process is alive. The acknowledgement may come after the farewell, on
                // another stream.
                Awaited::Taken(message) => {
                    common.directory.peer(peer).lost.is_none() && !host.look(peer).needs_the_peer(&key(message))
                }
                Awaited::Unsent => false,
            };
            (!comes).then(|| (self.has_only_closed(peer, op.channel), self.departure(common, rank, peer, op)))
        });
        match (failure, op.sequence) {
            // Earlier collectives may still end.
            (Some((true, failure)), _) => {
                let counts = Counts(BTreeMap::from([(op.channel, op.seq)]));
                self.end_after(common, host, op.channel, counts, failure);
            }
            (Some((false, failure)), Sequence::Collectives) => {
                let counts = self.issued_before(op);
                self.end_after(common, host, ChannelId::MAIN, counts, failure);
            }
            (Some((false, failure)), _) => self.fail(common, host, ChannelId::MAIN, failure, true),
            (None, _) => {}
        }
    }

    /// A rank that has ended a collective has taken all messages of it. Where the rank has left the job since, its word of that may
    /// never come: it was on a stream that stands still. (What still waits for a grant is of another operation than the rank's.)
    fn count_as_taken<H: Host<Body = B>>(&mut self, common: &mut Common<H::Kept>, host: &mut H, op: OpId) {
        let Some(active) = self.ops.get(&op).filter(|_| op.sequence == Sequence::Collectives) else { return };
        let farewells = self.channels.get(&op.channel).map(|known| &known.farewells.gone);
        let mut taken = Vec::new();
        for (rank, what) in active.operation.awaited_messages() {
            let Awaited::Taken(message) = what else { continue };
            let Some(peer) = self.members.peer(rank) else { continue };
            let has_ended_it = farewells.and_then(|gone| gone.get(&peer)).is_some_and(|(count, _)| op.seq < *count);
            let key = op.key(self.id, self.members.rank(), message);
            if has_ended_it && common.directory.peer(peer).lost.is_some() && !host.look(peer).needs_the_peer(&key) {
                taken.push((rank, message));
            }
        }
        if taken.is_empty() {
            return;
        }
        self.drive(common, host, op, |active, _, effects| {
            for (rank, message) in taken {
                active.operation.on_sent(rank, message, effects);
            }
        });
    }

    /// Whether a member has closed a channel, has left the group or the job, or is lost.
    pub(super) fn is_gone<K>(&self, common: &Common<K>, peer: PeerId, channel: ChannelId) -> bool {
        has_left(&self.channels, peer, channel) || common.directory.peer(peer).lost.is_some()
    }

    /// Whether a member has closed a channel for itself, and not in order to leave the group. Whether it has left since does not
    /// matter: what needs it in the channel ends in the same way, whenever it is issued.
    fn has_only_closed(&self, peer: PeerId, channel: ChannelId) -> bool {
        let farewell = self.channels.get(&channel).and_then(|known| known.farewells.gone.get(&peer));
        channel != ChannelId::MAIN && farewell.is_some_and(|(_, leaves_group)| !leaves_group)
    }

    /// Why a rank that is gone does not do its part of an operation.
    pub(super) fn departure<K>(&self, common: &Common<K>, rank: u32, peer: PeerId, op: OpId) -> Failure {
        let farewell = |channel| self.channels.get(&channel)?.farewells.gone.get(&peer).copied();
        let of_channel = farewell(op.channel);
        if of_channel.or_else(|| farewell(ChannelId::MAIN)).is_none() {
            let reason = common.directory.peer(peer).lost.as_deref().unwrap_or("a rank is gone");
            return Failure::fatal(FailureKind::PeerLost, format!("{reason}."));
        }
        let who = &self.who[rank as usize];
        let (what, how) = match self.has_only_closed(peer, op.channel) {
            true => (format!("closed {}", self.label(op.channel)), "closed it"),
            false => ("left the group".to_owned(), "destroyed the group"),
        };
        let left = format!("{who} has {what} (its script has ended, or has {how})");
        let Some((collectives, _)) = of_channel else {
            // A rank that leaves closes what it has opened first.
            let message = format!("{left} and had not opened {}.", self.label(op.channel));
            return Failure::fatal(FailureKind::PeerLost, message);
        };
        let left = format!("{left} after {} collectives", collectives.saturating_sub(OPENING_OPS));
        if op.sequence == Sequence::Collectives && op.seq < collectives {
            // What a rank sends in an operation comes before its farewell.
            let message = format!("{left}, and its #{} was another operation, or PENSTOCK_* settings differ.", op.seq);
            return Failure::fatal(FailureKind::Mismatch, message);
        }
        Failure::fatal(FailureKind::PeerLost, format!("{left}."))
    }

    /// Why no message will come for a receive without one, if that is so. In a group that is about to fail, the receive waits
    /// for that.
    pub(super) fn senders_are_gone<K>(&self, common: &Common<K>, posted: &Posted<B>) -> Option<String> {
        if self.endings.iter().any(|ending| ending.channel == ChannelId::MAIN) {
            return None;
        }
        let farewell = |rank: u32| {
            let peer = self.members.peer(rank)?;
            let has_left = || {
                let has_left = self.main().farewells.gone.contains_key(&peer);
                has_left.then(|| format!("{} has left the group", self.who[rank as usize]))
            };
            common.directory.peer(peer).lost.clone().or_else(has_left)
        };
        match posted.call.source() {
            Some(from) => farewell(from),
            None => {
                let reasons: Option<Vec<String>> = self.members.others().map(|(rank, _)| farewell(rank)).collect();
                Some(reasons?.join("; "))
            }
        }
    }
}

/// Whether a member has closed a channel, or has left the group.
pub(super) fn has_left(channels: &BTreeMap<ChannelId, Channel>, peer: PeerId, channel: ChannelId) -> bool {
    let farewells = [ChannelId::MAIN, channel].map(|id| channels.get(&id).map(|known| &known.farewells.gone));
    farewells.into_iter().flatten().any(|gone| gone.contains_key(&peer))
}
