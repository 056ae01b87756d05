//! How a group fails: once, for one reason, which all of its ranks are told.

use super::group::{Call, Group};
use super::host::{Failed, Host};
use super::{Common, Groups};
use crate::name::OpId;
use crate::operation::Misfit;
use penstock_stream::fingerprint::Fingerprint;
use penstock_stream::peer::Report;
use penstock_types::{Failure, FailureKind, GroupId, PeerId, SECOND};

impl<B> Group<B> {
    /// A message does not fit the plan although the fingerprints agree.
    pub(super) fn misfit<H: Host<Body = B>>(
        &mut self,
        common: &mut Common<H::Kept>,
        host: &mut H,
        from: u32,
        misfit: Misfit,
    ) {
        let who = &self.who[from as usize];
        let message = match misfit {
            Misfit::Length { expected, got } => {
                format!("{who} sent {got} bytes where {expected} are expected: sizes or splits differ between ranks.")
            }
            Misfit::Unknown => format!("{who} follows another plan: PENSTOCK_* settings differ between ranks."),
            Misfit::Frame { offset, len } => format!(
                "{who} sent bytes {offset}+{len} of a message, which are not whole elements inside it. Its process is \
                 defective, or is not Penstock."
            ),
            Misfit::Unreadable(error) => {
                // A rank whose memory is gone has died, or has failed and left; its socket will soon tell which, and why.
                let message = format!("the memory of {who} cannot be read any more ({error}).");
                let by = host.now().plus(UNREADABLE_WITHIN);
                common.pending_failures.push((by, self.id, Failure::fatal(FailureKind::PeerLost, message)));
                return;
            }
        };
        self.fail(common, host, Failure::fatal(FailureKind::Mismatch, message), true);
    }

    /// A peer believes an operation to be another than it is here.
    pub(super) fn mismatch<H: Host<Body = B>>(
        &mut self,
        common: &mut Common<H::Kept>,
        host: &mut H,
        op: OpId,
        peer: PeerId,
        theirs: Fingerprint,
    ) {
        let rank = self.rank_of(peer);
        let ours = self.fingerprint(op, rank).expect("it was compared");
        let message = self.difference(op, (self.members.rank(), ours), (rank, theirs));
        self.fail(common, host, Failure::fatal(FailureKind::Mismatch, message), true);
    }

    /// Ends the group when its first `ends` collectives have ended here: later ones can never end.
    pub(super) fn end_after<H: Host<Body = B>>(
        &mut self,
        common: &mut Common<H::Kept>,
        host: &mut H,
        ends: u64,
        failure: Failure,
    ) {
        if self.first_running().is_none_or(|first| first >= ends) {
            return self.fail(common, host, failure, true);
        }
        if self.ends_after.as_ref().is_none_or(|(before, _)| ends < *before) {
            self.ends_after = Some((ends, failure));
        }
    }

    /// Ends the group: all its operations fail, nothing touches their buffers any more, and the other ranks are told.
    pub(super) fn fail<H: Host<Body = B>>(
        &mut self,
        common: &mut Common<H::Kept>,
        host: &mut H,
        failure: Failure,
        tell: bool,
    ) {
        if self.failed.is_some() {
            return;
        }
        let failure = Failure { group_lives: false, ..failure };
        self.failed = Some(failure.clone());
        // A rank that closes a group must not fail collectives that have ended here and in which other ranks still are.
        let finished = if failure.kind == FailureKind::Closed { self.finished() } else { 0 };
        common.forget_early(host, self.id);
        self.joining = None;
        let named = |call: &Call, op: &OpId| format!("{} #{}", call.fingerprint.describe(), op.seq);
        let held = self.held.drain().map(|(op, waiting)| (named(&waiting.call, &op), waiting.body));
        let unbound = self.unbound.drain().map(|posted| (unnamed(&posted.call), posted.body));
        // The buffers are let go of before anybody hears of the failure: frames that are being read are discarded, half written
        // ones copied. Peers that read this process's memory at the moment will find that they cannot trust the bytes.
        host.failed(Failed {
            group: self.id,
            name: self.name.clone(),
            failure: failure.clone(),
            finished,
            own: self.who[self.members.rank() as usize].clone(),
            members: self.members.clone(),
            waiting: held.chain(unbound).collect(),
            running: std::mem::take(&mut self.ops),
        });
        if tell {
            let report = report_of(&failure, finished);
            for peer in self.members.peers().filter(|peer| common.directory.peer(*peer).is_reachable()) {
                host.machine(peer).report(self.id, &report);
            }
        }
    }
}

impl<B, K> Groups<B, K> {
    /// There is no room for another message that was not requested. The peer with the most such messages loses its group with
    /// the most of them, on both sides.
    pub(super) fn make_room<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H) {
        let Some((id, peer, count)) = self.common.early.fullest() else { return };
        let who = &self.common.directory.peer(peer).who;
        let message = format!(
            "{count} messages of {who} wait here for operations that this rank has not issued, and it keeps no more. Receive what \
             others send (irecv), or wait for some of the sends."
        );
        let failure = Failure::fatal(FailureKind::Mismatch, message);
        if let Some(group) = self.groups.get_mut(&id) {
            return group.fail(&mut self.common, host, failure, true);
        }
        host.machine(peer).report(id, &report_of(&failure, 0));
        self.common.unjoined.reported.remember(id, failure);
        self.common.forget_early(host, id);
    }
}

impl<K> Common<K> {
    /// Drops early messages of a group whose operations will never be posted. Their senders get the credit back.
    pub(super) fn forget_early<H: Host<Kept = K>>(&mut self, host: &mut H, id: GroupId) {
        for (peer, total) in self.early.forget_group(id) {
            host.machine(peer).consumed(total);
        }
    }
}

/// What peers are told of a failure.
pub(super) fn report_of(failure: &Failure, finished: u64) -> Report {
    Report { kind: failure.kind, message: failure.message.clone(), is_passed_on: failure.is_reported, finished }
}

/// The name of a receive without a message in errors.
fn unnamed(call: &Call) -> String {
    match call.source() {
        None => format!("{} from any source", call.fingerprint.describe()),
        Some(from) => format!("{} from rank {from}", call.fingerprint.describe()),
    }
}

/// How long to wait for the reason after a peer's shared memory disappears.
const UNREADABLE_WITHIN: u64 = SECOND;
