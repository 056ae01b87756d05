//! How a group or a channel fails: once, for one reason, which all ranks of the group are told.

use super::group::{Call, Ending, Group};
use super::host::{Failed, Host};
use super::{About, Common, Groups, Pending};
use crate::name::OpId;
use crate::operation::Misfit;
use penstock_stream::fingerprint::Fingerprint;
use penstock_stream::peer::{Counts, Report};
use penstock_types::{ChannelId, Failure, FailureKind, PeerId, SECOND, Scope};
use std::collections::BTreeMap;

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
                let failure = Failure::fatal(FailureKind::PeerLost, message);
                common.pending_failures.push(Pending { by, group: self.id, failure, about: About::Memory });
                return;
            }
        };
        self.fail(common, host, ChannelId::MAIN, Failure::fatal(FailureKind::Mismatch, message), true);
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
        self.fail(common, host, ChannelId::MAIN, Failure::fatal(FailureKind::Mismatch, message), true);
    }

    /// Ends a channel, or the group where it is the main one, when the collectives that still count have ended here: later ones can
    /// never end.
    pub(super) fn end_after<H: Host<Body = B>>(
        &mut self,
        common: &mut Common<H::Kept>,
        host: &mut H,
        channel: ChannelId,
        counts: Counts,
        failure: Failure,
    ) {
        if self.have_ended(&counts) {
            return self.fail(common, host, channel, failure, true);
        }
        let Some(ending) = self.endings.iter_mut().find(|ending| ending.channel == channel) else {
            return self.endings.push(Ending { channel, counts, failure });
        };
        let lower = |(id, count): (&ChannelId, &u64)| (*id, (*count).min(counts.of(*id)));
        let lowest: BTreeMap<ChannelId, u64> = ending.counts.0.iter().map(lower).collect();
        if lowest != ending.counts.0 {
            (ending.counts, ending.failure) = (Counts(lowest), failure);
            self.end_what_is_over(common, host);
        }
    }

    /// Fails the group, or channels, where all collectives that still count have ended.
    pub(super) fn end_what_is_over<H: Host<Body = B>>(&mut self, common: &mut Common<H::Kept>, host: &mut H) {
        while let Some(at) = self.endings.iter().position(|ending| self.have_ended(&ending.counts)) {
            let Ending { channel, failure, .. } = self.endings.swap_remove(at);
            self.fail(common, host, channel, failure, true);
        }
    }

    /// Whether no collective runs here that still counts.
    fn have_ended(&self, counts: &Counts) -> bool {
        counts.0.iter().all(|(channel, count)| self.first_running(*channel).is_none_or(|first| first >= *count))
    }

    /// Ends a channel, or the group where it is the main one: all operations there fail, nothing touches their buffers any more,
    /// and the other ranks are told.
    pub(super) fn fail<H: Host<Body = B>>(
        &mut self,
        common: &mut Common<H::Kept>,
        host: &mut H,
        channel: ChannelId,
        failure: Failure,
        tell: bool,
    ) {
        let scope = Scope { group: self.id, channel };
        let failure = Failure { group_lives: !scope.is_group(), ..failure };
        if self.failed.is_some() {
            return;
        }
        if scope.is_group() {
            self.failed = Some(failure.clone());
        } else {
            let Some(known) = self.channels.get_mut(&channel).filter(|known| known.failed.is_none()) else { return };
            known.failed = Some(failure.clone());
        }
        // A rank that closes a group must not fail collectives that have ended here and in which other ranks still are.
        let finished = if failure.kind == FailureKind::Closed { self.finished(scope) } else { Counts::default() };
        common.forget_early(host, scope);
        self.endings.retain(|ending| !scope.covers(self.id, ending.channel));
        let is_in = |op: &OpId| scope.covers(self.id, op.channel);
        let named = |call: &Call, op: &OpId| format!("{} #{}", call.fingerprint.describe(), op.seq);
        let label = |channel: ChannelId| self.label(channel);
        let labels: BTreeMap<ChannelId, String> = self.channels.keys().map(|id| (*id, label(*id))).collect();
        let names = self.channels.iter().filter(|(id, _)| scope.covers(self.id, **id));
        let names = names.map(|(_, known)| known.name().clone()).collect();
        let held: Vec<_> = self.held.extract_if(|op, _| is_in(op)).collect();
        let held = held.into_iter().map(|(op, waiting)| (named(&waiting.call, &op), op.channel, waiting.body));
        let mut waiting: Vec<_> = held.collect();
        if scope.is_group() {
            self.joining = None;
            let unbound = self.unbound.drain();
            waiting.extend(unbound.map(|posted| (unnamed(&posted.call), ChannelId::MAIN, posted.body)));
        }
        let running = self.ops.extract_if(|op, _| is_in(op)).collect();
        // The buffers are let go of before anybody hears of the failure: frames that are being read are discarded, half written
        // ones copied. Peers that read this process's memory at the moment will find that they cannot trust the bytes.
        host.failed(Failed {
            scope,
            names,
            labels,
            failure: failure.clone(),
            finished: finished.clone(),
            own: self.own().clone(),
            members: self.members.clone(),
            waiting,
            running,
        });
        if tell {
            let report = report_of(&failure, finished);
            for peer in self.members.peers().filter(|peer| common.directory.peer(*peer).is_reachable()) {
                host.machine(peer).report(scope, &report);
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
            return group.fail(&mut self.common, host, ChannelId::MAIN, failure, true);
        }
        host.machine(peer).report(id, &report_of(&failure, Counts::default()));
        self.common.unjoined.reported.remember(id, failure);
        self.common.forget_early(host, id.into());
    }
}

impl<K> Common<K> {
    /// Drops early messages of a group or channel whose operations will never be posted. Their senders get the credit back.
    pub(super) fn forget_early<H: Host<Kept = K>>(&mut self, host: &mut H, scope: Scope) {
        for (peer, total) in self.early.forget_all(scope) {
            host.machine(peer).consumed(total);
        }
    }
}

/// What peers are told of a failure.
pub(super) fn report_of(failure: &Failure, finished: Counts) -> Report {
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
