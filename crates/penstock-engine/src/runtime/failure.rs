//! How a group fails: once, for one reason, which all of its ranks are told.

use super::Runtime;
use super::issue::unnamed;
use penstock_core::name::OpId;
use penstock_core::operation::Misfit;
use penstock_net::Peers;
use penstock_stream::fingerprint::Fingerprint;
use penstock_stream::peer::Report;
use penstock_types::{Failure, FailureKind, GroupId, PeerId, SECOND};
use std::time::Instant;

impl Runtime {
    /// A message does not fit the plan although the fingerprints agree.
    pub(super) fn misfit(&mut self, peers: &mut Peers, id: GroupId, from: u32, misfit: Misfit) {
        let who = self.groups[&id].contacts[from as usize].describe();
        let failure = match misfit {
            Misfit::Length { expected, got } => Failure::fatal(
                FailureKind::Mismatch,
                format!("{who} sent {got} bytes where {expected} are expected: sizes or splits differ between ranks."),
            ),
            Misfit::Unknown => Failure::fatal(
                FailureKind::Mismatch,
                format!("{who} follows another plan: PENSTOCK_* settings differ between ranks."),
            ),
            Misfit::Frame { offset, len } => Failure::fatal(
                FailureKind::Mismatch,
                format!(
                    "{who} sent bytes {offset}+{len} of a message, which are not whole elements inside it. Its process is \
                     defective, or is not Penstock."
                ),
            ),
            Misfit::Unreadable(error) => {
                // A rank whose memory is gone has died, or has failed and left; its socket will soon tell which, and why.
                let message = format!("the memory of {who} cannot be read any more ({error}).");
                let by = peers.now().plus(UNREADABLE_WITHIN);
                self.pending_failures.push((by, id, Failure::fatal(FailureKind::PeerLost, message)));
                return;
            }
        };
        self.fail_group(peers, id, failure, true);
    }

    /// There is no room for another message that was not requested. The peer with the most such messages loses its group with
    /// the most of them, on both sides.
    pub(super) fn make_room(&mut self, peers: &mut Peers) {
        let Some((id, peer, count)) = self.early.fullest() else { return };
        let who = self.peers[peer as usize].contact.describe();
        let message = format!(
            "{count} messages of {who} wait here for operations that this rank has not issued, and it keeps no more. Receive what \
             others send (irecv), or wait for some of the sends."
        );
        let failure = Failure::fatal(FailureKind::Mismatch, message);
        if self.groups.contains_key(&id) {
            return self.fail_group(peers, id, failure, true);
        }
        let report = report_of(&failure, 0);
        peers.machine(peer).report(id, &report);
        self.reported.remember(id, failure);
        self.forget_early(peers, id);
    }

    pub(super) fn mismatch(&mut self, peers: &mut Peers, id: GroupId, op: OpId, peer: PeerId, theirs: Fingerprint) {
        let group = &self.groups[&id];
        let rank = group.rank_of(peer);
        let ours = group.fingerprint(op, rank).expect("it was compared");
        let message = group.difference(op, (group.members.rank(), ours), (rank, theirs));
        self.fail_group(peers, id, Failure::fatal(FailureKind::Mismatch, message), true);
    }

    /// Ends a group when its first `ends` collectives have ended here: later ones can never end.
    pub(super) fn end_group_after(&mut self, peers: &mut Peers, id: GroupId, ends: u64, failure: Failure) {
        let group = self.groups.get_mut(&id).expect("the caller has looked it up");
        if group.first_running().is_none_or(|first| first >= ends) {
            return self.fail_group(peers, id, failure, true);
        }
        if group.ends_after.as_ref().is_none_or(|(before, _)| ends < *before) {
            group.ends_after = Some((ends, failure));
        }
    }

    /// Ends a group: all its operations fail, nothing touches their buffers any more, and the other ranks are told.
    pub(super) fn fail_group(&mut self, peers: &mut Peers, id: GroupId, failure: Failure, tell: bool) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        if group.failed.is_some() {
            return;
        }
        let failure = Failure { group_lives: false, ..failure };
        group.failed = Some(failure.clone());
        // A rank that closes a group must not fail collectives that have ended here and in which other ranks still are.
        let finished = if failure.kind == FailureKind::Closed { group.finished() } else { 0 };
        self.forget_early(peers, id);
        let group = self.groups.get_mut(&id).expect("looked up above");
        let ops = std::mem::take(&mut group.ops);
        self.recorder.failed(&group.name, Instant::now());
        let named = |op: OpId, what: Fingerprint| format!("{} #{}", what.describe(), op.seq);
        let tickets: Vec<_> = (ops.iter().map(|(op, active)| (named(*op, active.fingerprint), active.ticket.clone())))
            .chain(group.held.drain().map(|(op, waiting)| (named(op, waiting.call.fingerprint), waiting.ticket)))
            .chain(group.unbound.drain().map(|posted| (unnamed(&posted.call), posted.ticket)))
            .collect();
        // The loop releases the buffers before it does anything else: frames that are being read are discarded, half written
        // ones copied. The operations keep the buffers alive until then. Peers that read this process's memory at the moment
        // will find that they cannot trust the bytes.
        let members = group.members.clone();
        peers.drop_group(
            id,
            finished,
            Box::new(move |peer, key, offset, len| {
                let (to, op) = members.operation(peer, key)?;
                ops.get(&op)?.execution.source(to, key.message, offset, len)
            }),
        );
        self.turn();
        if failure.kind != FailureKind::Closed {
            self.recorder.write(&self.stats(peers));
        }
        let group = self.groups.get_mut(&id).expect("looked up above");
        let joining = group.joining.take();
        for watch in group.watches.drain(..) {
            let failure = failure.clone();
            peers.after_drop(Box::new(move || watch.complete(Err(failure))));
        }
        if tell {
            let report = report_of(&failure, finished);
            for peer in group.members.peers() {
                let info = &self.peers[peer as usize];
                if info.linked && info.lost.is_none() {
                    peers.machine(peer).report(id, &report);
                }
            }
        }
        let (rank, name) = (group.members.rank(), group.name.clone());
        let own = group.contacts[rank as usize].describe();
        for (what, ticket) in tickets {
            let message = format!("{what} of group {name} on {own} failed: {}", failure.message);
            let failure = Failure { message, ..failure.clone() };
            peers.after_drop(Box::new(move || ticket.complete(Err(failure))));
        }
        if let Some(joining) = joining {
            peers.after_drop(Box::new(move || {
                joining.ticket.complete(Err(failure));
                drop(joining);
            }));
        }
    }

    /// Drops early messages of a group whose operations will never be posted. Their senders get the credit back.
    pub(super) fn forget_early(&mut self, peers: &mut Peers, id: GroupId) {
        for (peer, total) in self.early.forget_group(id) {
            peers.machine(peer).consumed(total);
        }
    }
}

/// What peers are told of a failure.
pub(super) fn report_of(failure: &Failure, finished: u64) -> Report {
    Report { kind: failure.kind, message: failure.message.clone(), is_passed_on: failure.is_reported, finished }
}

/// How long to wait for the reason after a peer's shared memory disappears.
const UNREADABLE_WITHIN: u64 = SECOND;
