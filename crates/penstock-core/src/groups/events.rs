//! What happens at peers: they are connected, lost, refused; they take messages, ask, answer, report and leave.

use super::failure::report_of;
use super::group::Group;
use super::host::Host;
use super::{Common, Groups, PROBE};
use crate::name::OpId;
use penstock_stream::MessageKey;
use penstock_stream::fingerprint::Fingerprint;
use penstock_stream::peer::{Counts, Event, OpStatus, Report};
use penstock_types::{Failure, FailureKind, GroupId, PeerId, Scope};

impl<B, K> Groups<B, K> {
    /// A stream of a peer is up. `local`: the peer is on this host. `job`: the job with which it has connected.
    pub fn connected<H: Host<Body = B, Kept = K>>(
        &mut self,
        host: &mut H,
        peer: PeerId,
        local: bool,
        job: Option<GroupId>,
    ) {
        if !self.common.directory.peer(peer).connected {
            self.common.directory.no_longer_connects(peer, job);
        }
        let standing = self.common.directory.peer_mut(peer);
        (standing.connected, standing.local) = (true, local);
        for group in self.groups.values_mut().filter(|group| group.members.rank_of(peer).is_some()) {
            group.check_connected(&mut self.common, host);
        }
    }

    /// All connections to a peer are about to be closed, for a reason that the peer does not know.
    pub fn cut_off<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, peer: PeerId, reason: &str) {
        let message = format!("{} was cut off: {reason}.", self.common.directory.peer(peer).who);
        let report = report_of(&Failure::fatal(FailureKind::PeerLost, message), Counts::default());
        for id in self.groups_of(peer) {
            if self.groups[&id].failed.is_none() {
                host.machine(peer).report(id, &report);
            }
        }
    }

    /// A peer cannot be reached any more. `has_died`: its process is gone for certain, so that later joins with it fail at once.
    /// Otherwise they may connect to it anew. [`Groups::forget_peer`] follows.
    pub fn lost<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, peer: PeerId, reason: &str, has_died: bool) {
        self.common.directory.is_lost(peer, reason, has_died);
        for id in self.groups_of(peer) {
            // A process that ends fails only its running operations.
            if !self.stopping || self.groups[&id].is_busy() {
                self.fail(host, id.into(), Failure::fatal(FailureKind::PeerLost, format!("{reason}.")), true);
            }
        }
    }

    /// A peer has left in good order. It stays known by its node key: it does not come back, and later joins with it fail at
    /// once. [`Groups::forget_peer`] follows.
    pub fn left<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, peer: PeerId, reason: &str) {
        let standing = self.common.directory.peer_mut(peer);
        (standing.lost, standing.has_left) = (Some(reason.to_owned()), true);
        for group in self.groups.values_mut().filter(|group| group.members.rank_of(peer).is_some()) {
            group.check_waiting(&mut self.common, host);
        }
    }

    /// A peer has refused this process, or this process has refused the peer. [`Groups::forget_peer`] follows.
    pub fn refused<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, peer: PeerId, reason: &str) {
        self.common.directory.peer_mut(peer).lost = Some(reason.to_owned());
        for id in self.groups_of(peer) {
            self.fail(host, id.into(), Failure::fatal(FailureKind::Refused, format!("{reason}.")), false);
        }
    }

    /// A peer is gone: forgets its messages in groups that this process has not joined, and all state of the pair.
    pub fn forget_peer<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, peer: PeerId) {
        let mut unknown = self.common.early.groups();
        unknown.retain(|group| !self.groups.contains_key(group));
        self.common.forget_early_of(host, peer, |group| unknown.contains(&group));
        self.common.unjoined.overtaken.forget_peer(peer);
        host.machine(peer).end();
        self.common.directory.no_longer_connects(peer, None);
        if self.common.directory.is_past(peer) {
            let groups = &self.groups;
            self.common.directory.forget(|peer| groups.values().any(|group| group.members.rank_of(peer).is_some()));
        }
    }

    /// Something happened at a peer.
    pub fn happened<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, peer: PeerId, event: Event) {
        match event {
            Event::Sent(key) => {
                if let Some((group, to, op)) = self.operation_of(peer, &key) {
                    group.0.drive(group.1, host, op, |active, _, effects| {
                        active.operation.on_sent(to, key.message, effects);
                    });
                }
            }
            Event::Probe(key, theirs) => self.is_believed(host, peer, &key, theirs, true),
            Event::Granted(key, theirs) | Event::Late(key, theirs) => self.is_believed(host, peer, &key, theirs, false),
            Event::Issued(key, count) => {
                if let Some((group, from, op)) = self.operation_of(peer, &key) {
                    group.0.answered(group.1, host, (from, op), &key, count);
                }
            }
            Event::Report(scope, report) => self.reported(host, peer, scope, report),
            Event::Left(scope, farewell) => match self.groups.get_mut(&scope.group) {
                Some(group) => group.has_left(&mut self.common, host, peer, scope.channel, farewell),
                None if scope.is_group() => self.common.has_done_with(host, peer, scope.group),
                // No rank has channels before all have joined, so this one has left the group.
                None => {}
            },
            Event::Bye | Event::Stalled(_) | Event::Silent => {}
        }
    }

    /// A peer believes an operation to be `theirs`; if it `asks`, it wants to know how many operations were issued here.
    fn is_believed<H: Host<Body = B, Kept = K>>(
        &mut self,
        host: &mut H,
        peer: PeerId,
        key: &MessageKey,
        theirs: Fingerprint,
        asks: bool,
    ) {
        let is_early = !self.groups.contains_key(&key.group) && self.status(peer, key) == OpStatus::Early;
        if is_early {
            return self.common.early.claim(peer, key, theirs);
        }
        let Some(((group, common), other, op)) = self.operation_of(peer, key) else { return };
        let known = group.channels.get(&op.channel);
        if group.is_closed(op.channel) {
            return;
        }
        if group.failed.is_none() && known.is_none_or(|known| known.failed.is_none()) {
            match group.fingerprint(op, other) {
                Some(ours) if ours != theirs => return group.mismatch(common, host, op, peer, theirs),
                Some(_) => {}
                None if group.is_over(op) => {}
                None => common.early.claim(peer, key, theirs),
            }
        }
        // Also answers a probe that doubts a reference: the peer knows from a report, which was sent before, if that confirms
        // nothing.
        if asks {
            host.machine(peer).answer_probe(*key, group.issued(op));
        }
    }

    /// A peer tells why a group, or a channel, has failed there.
    fn reported<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, peer: PeerId, scope: Scope, report: Report) {
        let Scope { group: id, channel } = scope;
        let who = &self.common.directory.peer(peer).who;
        // The first reporter is named, and not those that pass it on.
        let message = if report.is_passed_on { report.message } else { format!("{who} reports: {}", report.message) };
        let failure = Failure { is_reported: true, ..Failure::fatal(report.kind, message) };
        if let Some(group) = self.groups.get_mut(&id) {
            let is_told = scope.is_group() || group.known(&mut self.common, host, peer, channel).is_some();
            if is_told && group.members.rank_of(peer).is_some() {
                group.end_after(&mut self.common, host, channel, report.finished, failure);
            }
            return;
        }
        if !scope.is_group() {
            return;
        }
        self.common.has_done_with(host, peer, id);
        if !self.common.unjoined.is_closed(id) {
            // The peer has joined the group and failed before this process joined it.
            self.common.unjoined.reported.remember(id, failure);
        }
    }

    /// The group of a message between a peer and this rank, the peer's rank in it, and the operation's name here.
    #[allow(clippy::type_complexity)]
    fn operation_of(&mut self, peer: PeerId, key: &MessageKey) -> Option<((&mut Group<B>, &mut Common<K>), u32, OpId)> {
        let group = self.groups.get_mut(&key.group)?;
        let (other, op) = group.members.operation(peer, key)?;
        Some(((group, &mut self.common), other, op))
    }
}

impl<B> Group<B> {
    /// A rank answers a probe: how many operations it has issued.
    fn answered<H: Host<Body = B>>(
        &mut self,
        common: &mut Common<H::Kept>,
        host: &mut H,
        (from, op): (u32, OpId),
        key: &MessageKey,
        count: u64,
    ) {
        let Some(active) = self.ops.get_mut(&op) else { return };
        active.issued.insert(from, count);
        // An answer to a probe that doubts a reference confirms what was read only if the operation still counts on the peer: if
        // the group has failed there, its report has come before.
        if key.message != PROBE && !self.is_void(op) {
            self.drive(common, host, op, |active, _, effects| {
                active.operation.on_confirmed(from, key.message, effects);
            });
        }
    }
}
