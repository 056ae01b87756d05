//! Ranks that leave, or are lost, and who waits for them.

use super::group::{Group, Posted};
use super::issue::source_of;
use super::{JOIN_OPS, Runtime};
use penstock_core::name::{OpId, Sequence};
use penstock_core::operation::Awaited;
use penstock_net::Peers;
use penstock_stream::peer::Farewell;
use penstock_types::{Failure, FailureKind, GroupId, PeerId};

impl Runtime {
    /// This rank leaves a group.
    pub(super) fn leave(&mut self, peers: &mut Peers, id: GroupId) {
        if self.groups.get(&id).is_some_and(Group::is_busy) {
            let rank = self.groups[&id].members.rank();
            let failure = Failure::fatal(
                FailureKind::Closed,
                format!("rank {rank} destroyed the group while operations were running."),
            );
            self.fail_group(peers, id, failure, true);
        }
        let Some(group) = self.groups.remove(&id) else { return };
        self.closed.insert(id.0..id.0.saturating_add(1));
        for watch in group.watches {
            watch.complete(Err(Failure::fatal(FailureKind::Closed, "the group was destroyed.")));
        }
        self.forget_early(peers, id);
        let mut last: Vec<_> = group.ended.collectives().take(Farewell::MOST).collect();
        last.reverse();
        let farewell = Farewell { collectives: group.issued.collectives, last };
        for peer in group.members.peers() {
            let info = &self.peers[peer as usize];
            let machine = peers.machine(peer);
            if info.linked && info.lost.is_none() {
                machine.left(id, farewell.clone());
            }
            machine.retire_group(id);
        }
    }

    /// A peer has left a group. It requests nothing there any more, and nothing more comes from it. The operations that it
    /// reports are compared with those here.
    pub(super) fn has_left(&mut self, peers: &mut Peers, peer: PeerId, id: GroupId, farewell: Farewell) {
        let Some(group) = self.groups.get_mut(&id) else { return self.has_done_with(peers, peer, id) };
        let is_news = group.members.rank_of(peer).is_some() && !group.gone.contains_key(&peer);
        if !is_news || group.failed.is_some() {
            return;
        }
        group.gone.insert(peer, farewell.collectives);
        let rank = group.rank_of(peer);
        let mut differs = None;
        for (seq, theirs) in farewell.last {
            let op = OpId::collective(seq.0);
            let ours = group.fingerprint(op, rank).map(|ours| (group.members.rank(), ours));
            // Farewells are not compared with each other after the first.
            let (first, told) = *group.told.entry(seq).or_insert((peer, theirs));
            let others = [ours, Some((group.rank_of(first), told))];
            if let Some(other) = others.into_iter().flatten().find(|(_, other)| *other != theirs) {
                differs = Some(group.difference(op, other, (rank, theirs)));
                break;
            }
        }
        match differs {
            Some(message) => self.fail_group(peers, id, Failure::fatal(FailureKind::Mismatch, message), true),
            None => self.check_waiting(peers, id),
        }
    }

    /// A peer has left a group that this process has not joined, or has left, or that has failed on the peer: its messages
    /// there are of no use.
    pub(super) fn has_done_with(&mut self, peers: &mut Peers, peer: PeerId, id: GroupId) {
        if !self.is_closed(id) {
            self.overtaken.remember(peer, id);
        }
        peers.machine(peer).retire_group(id);
        self.forget_early_of(peers, peer, |group| group == id);
    }

    /// Fails a group in which an operation waits for a rank that is gone.
    pub(super) fn check_waiting(&mut self, peers: &mut Peers, id: GroupId) {
        let mut ops: Vec<OpId> = self.groups[&id].ops.keys().copied().collect();
        ops.sort_unstable();
        for op in ops {
            self.check_departed(peers, id, op);
        }
        self.check_senders(peers, id);
    }

    /// A peer is gone: forgets its messages in groups that this process has not joined, and all state of the pair. Operations
    /// that read from the peer's memory keep it mapped until they end.
    pub(super) fn forget_peer(&mut self, peers: &mut Peers, peer: PeerId) {
        let mut unknown = self.early.groups();
        unknown.retain(|group| !self.groups.contains_key(group));
        self.forget_early_of(peers, peer, |group| unknown.contains(&group));
        self.overtaken.forget_peer(peer);
        peers.machine(peer).end();
        let info = &mut self.peers[peer as usize];
        info.offered.clear();
        info.mappings.clear();
        info.descriptors.clear();
        let node = info.contact.node;
        self.no_longer_connects(node, None);
    }

    /// Drops a peer's early messages for operations of some groups.
    fn forget_early_of(&mut self, peers: &mut Peers, peer: PeerId, is_meant: impl Fn(GroupId) -> bool) {
        for (peer, total) in self.early.forget_peer(peer, is_meant) {
            peers.machine(peer).consumed(total);
        }
    }

    /// Fails an operation that waits for a rank that is lost, or has left. What the rank sent before still counts.
    pub(super) fn check_departed(&mut self, peers: &mut Peers, id: GroupId, op: OpId) {
        let Some(group) = self.groups.get(&id) else { return };
        let Some(active) = group.ops.get(&op) else { return };
        if !group.members.peers().any(|peer| self.is_gone(group, peer)) {
            return;
        }
        // The operation fails with the group, for the first failure.
        if group.is_void(op) {
            return;
        }
        let failure = active.execution.operation.awaited_messages().into_iter().find_map(|(rank, what)| {
            let peer = group.members.peer(rank).filter(|peer| self.is_gone(group, *peer))?;
            let key = |message| op.key(id, group.members.rank(), message);
            let comes = match what {
                // Messages that were only announced, or lie in the rank's memory, are lost with the rank.
                Awaited::Message(message) => self.early.has_bytes(peer, key(message)),
                // The rank has taken the message, if its process is alive. The acknowledgement may come after the farewell, on
                // another stream.
                Awaited::Taken(message) => {
                    self.peers[peer as usize].lost.is_none() && !peers.look(peer).needs_the_peer(&key(message))
                }
                Awaited::Unsent => false,
            };
            (!comes).then(|| self.departure(group, rank, peer, op))
        });
        match (failure, op.sequence) {
            // Earlier collectives may still end.
            (Some(failure), Sequence::Collectives) => self.end_group_after(peers, id, op.seq, failure),
            (Some(failure), _) => self.fail_group(peers, id, failure, true),
            (None, _) => {}
        }
    }

    /// Whether a member has left the group, has left the job, or is lost.
    pub(super) fn is_gone(&self, group: &Group, peer: PeerId) -> bool {
        group.gone.contains_key(&peer) || self.peers[peer as usize].lost.is_some()
    }

    /// Why a rank that is gone does not do its part of an operation.
    fn departure(&self, group: &Group, rank: u32, peer: PeerId, op: OpId) -> Failure {
        let Some(collectives) = group.gone.get(&peer) else {
            let reason = self.peers[peer as usize].lost.as_deref().unwrap_or("a rank is gone");
            return Failure::fatal(FailureKind::PeerLost, format!("{reason}."));
        };
        let left = format!(
            "{} has left the group (its script has ended, or has destroyed the group) after {} collectives",
            group.contacts[rank as usize].describe(),
            collectives.saturating_sub(JOIN_OPS)
        );
        if op.sequence == Sequence::Collectives && op.seq < *collectives {
            // What a rank sends in an operation comes before its farewell.
            let message = format!("{left}, and its #{} was another operation, or PENSTOCK_* settings differ.", op.seq);
            return Failure::fatal(FailureKind::Mismatch, message);
        }
        Failure::fatal(FailureKind::PeerLost, format!("{left}."))
    }

    /// Fails a group in which a receive without a message waits only for ranks that have left. Their messages come before
    /// their farewells.
    fn check_senders(&mut self, peers: &mut Peers, id: GroupId) {
        let Some(group) = self.groups.get(&id) else { return };
        let reason = group.unbound.iter().find_map(|posted| self.senders_are_gone(group, posted));
        if let Some(reason) = reason {
            self.fail_group(peers, id, Failure::fatal(FailureKind::PeerLost, format!("{reason}.")), true);
        }
    }

    /// Why no message will come for a receive without one, if that is so. In a group that is about to fail, the receive waits
    /// for that.
    pub(super) fn senders_are_gone(&self, group: &Group, posted: &Posted) -> Option<String> {
        if group.ends_after.is_some() {
            return None;
        }
        let farewell = |rank: u32| {
            let peer = group.members.peer(rank)?;
            let has_left = || {
                let contact = &group.contacts[rank as usize];
                group.gone.contains_key(&peer).then(|| format!("{} has left the group", contact.describe()))
            };
            self.peers[peer as usize].lost.clone().or_else(has_left)
        };
        let mut others = group.members.others().map(|(rank, _)| rank);
        match source_of(&posted.call) {
            Some(from) => farewell(from),
            None => Some(
                others
                    .try_fold(Vec::new(), |mut all, rank| {
                        all.push(farewell(rank)?);
                        Some(all)
                    })?
                    .join("; "),
            ),
        }
    }
}
