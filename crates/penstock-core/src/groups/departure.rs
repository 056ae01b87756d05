//! Ranks that leave, or are lost, and operations that wait for them.

use super::group::{Group, JOIN_OPS, Posted};
use super::host::Host;
use super::{Common, Groups};
use crate::name::{OpId, Sequence};
use crate::operation::Awaited;
use penstock_stream::peer::Farewell;
use penstock_types::{Failure, FailureKind, GroupId, PeerId};

impl<B, K> Groups<B, K> {
    /// This rank leaves a group.
    pub fn leave<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, id: GroupId) {
        if let Some(group) = self.groups.get_mut(&id).filter(|group| group.is_busy()) {
            let rank = group.members.rank();
            let message = format!("rank {rank} destroyed the group while operations were running.");
            group.fail(&mut self.common, host, Failure::fatal(FailureKind::Closed, message), true);
        }
        let Some(group) = self.groups.remove(&id) else { return };
        self.common.unjoined.close(id);
        host.left(id);
        self.common.forget_early(host, id);
        let mut last: Vec<_> = group.ended.collectives().take(Farewell::MOST).collect();
        last.reverse();
        let farewell = Farewell { collectives: group.issued.collectives, last };
        for peer in group.members.peers() {
            let machine = host.machine(peer);
            if self.common.directory.peer(peer).is_reachable() {
                machine.left(id, farewell.clone());
            }
            machine.retire_group(id);
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
        host.machine(peer).retire_group(id);
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
    /// A peer has left the group. It requests nothing there any more, and nothing more comes from it. The operations that it
    /// reports are compared with those here.
    pub(super) fn has_left<H: Host<Body = B>>(
        &mut self,
        common: &mut Common<H::Kept>,
        host: &mut H,
        peer: PeerId,
        farewell: Farewell,
    ) {
        let is_news = self.members.rank_of(peer).is_some() && !self.farewells.gone.contains_key(&peer);
        if !is_news || self.failed.is_some() {
            return;
        }
        self.farewells.gone.insert(peer, farewell.collectives);
        let rank = self.rank_of(peer);
        let mut differs = None;
        for (seq, theirs) in farewell.last {
            let op = OpId::collective(seq.0);
            let ours = self.fingerprint(op, rank).map(|ours| (self.members.rank(), ours));
            // Farewells are not compared with each other after the first.
            let (first, told) = *self.farewells.told.entry(seq).or_insert((peer, theirs));
            let others = [ours, Some((self.rank_of(first), told))];
            if let Some(other) = others.into_iter().flatten().find(|(_, other)| *other != theirs) {
                differs = Some(self.difference(op, other, (rank, theirs)));
                break;
            }
        }
        match differs {
            Some(message) => self.fail(common, host, Failure::fatal(FailureKind::Mismatch, message), true),
            None => self.check_waiting(common, host),
        }
    }

    /// Fails the group if an operation waits for a rank that is gone.
    pub(super) fn check_waiting<H: Host<Body = B>>(&mut self, common: &mut Common<H::Kept>, host: &mut H) {
        let mut ops: Vec<OpId> = self.ops.keys().copied().collect();
        ops.sort_unstable();
        for op in ops {
            self.check_departed(common, host, op);
        }
        // The messages of ranks that have left come before their farewells.
        let reason = self.unbound.iter().find_map(|posted| self.senders_are_gone(common, posted));
        if let Some(reason) = reason {
            self.fail(common, host, Failure::fatal(FailureKind::PeerLost, format!("{reason}.")), true);
        }
    }

    /// Fails an operation that waits for a rank that is lost, or has left. What the rank sent before still counts.
    pub(super) fn check_departed<H: Host<Body = B>>(&mut self, common: &mut Common<H::Kept>, host: &mut H, op: OpId) {
        let Some(active) = self.ops.get(&op) else { return };
        if !self.members.peers().any(|peer| self.is_gone(common, peer)) {
            return;
        }
        // The operation fails with the group, for the first failure.
        if self.is_void(op) {
            return;
        }
        let failure = active.operation.awaited_messages().into_iter().find_map(|(rank, what)| {
            let peer = self.members.peer(rank).filter(|peer| self.is_gone(common, *peer))?;
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
            (!comes).then(|| self.departure(common, rank, peer, op))
        });
        match (failure, op.sequence) {
            // Earlier collectives may still end.
            (Some(failure), Sequence::Collectives) => self.end_after(common, host, op.seq, failure),
            (Some(failure), _) => self.fail(common, host, failure, true),
            (None, _) => {}
        }
    }

    /// Whether a member has left the group, has left the job, or is lost.
    fn is_gone<K>(&self, common: &Common<K>, peer: PeerId) -> bool {
        self.farewells.gone.contains_key(&peer) || common.directory.peer(peer).lost.is_some()
    }

    /// Why a rank that is gone does not do its part of an operation.
    fn departure<K>(&self, common: &Common<K>, rank: u32, peer: PeerId, op: OpId) -> Failure {
        let Some(collectives) = self.farewells.gone.get(&peer) else {
            let reason = common.directory.peer(peer).lost.as_deref().unwrap_or("a rank is gone");
            return Failure::fatal(FailureKind::PeerLost, format!("{reason}."));
        };
        let left = format!(
            "{} has left the group (its script has ended, or has destroyed the group) after {} collectives",
            self.who[rank as usize],
            collectives.saturating_sub(JOIN_OPS)
        );
        if op.sequence == Sequence::Collectives && op.seq < *collectives {
            // What a rank sends in an operation comes before its farewell.
            let message = format!("{left}, and its #{} was another operation, or PENSTOCK_* settings differ.", op.seq);
            return Failure::fatal(FailureKind::Mismatch, message);
        }
        Failure::fatal(FailureKind::PeerLost, format!("{left}."))
    }

    /// Why no message will come for a receive without one, if that is so. In a group that is about to fail, the receive waits
    /// for that.
    pub(super) fn senders_are_gone<K>(&self, common: &Common<K>, posted: &Posted<B>) -> Option<String> {
        if self.ends_after.is_some() {
            return None;
        }
        let farewell = |rank: u32| {
            let peer = self.members.peer(rank)?;
            let has_left = || {
                let has_left = self.farewells.gone.contains_key(&peer);
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
