//! How operations go on: with what comes, and with what is sent.

use super::Runtime;
use super::sharing::{MAX_MAPPINGS, find};
use crate::execution::{Execution, Kept, Message};
use penstock_core::early::Content;
use penstock_core::name::{OpId, Sequence};
use penstock_core::operation::{Effect, Misfit, Place};
use penstock_net::{Handler, Peers};
use penstock_stream::frame::{Channel, Kind, Reference};
use penstock_stream::peer::{Body, Event, FLAG_EAGER, OpStatus, Outgoing};
use penstock_stream::{FrameError, Header, MessageKey};
use penstock_types::{Failure, GroupId, OpSeq, PeerId, Time};
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Instant;

impl Runtime {
    /// A whole, checked, new frame, see [`penstock_net::Handler::frame`].
    pub(super) fn arrive(
        &mut self,
        peers: &mut Peers,
        peer: PeerId,
        header: &Header,
        payload: &[u8],
        placed: bool,
    ) -> Result<(), FrameError> {
        #[cfg(test)]
        assert!(!std::mem::take(&mut self.panics), "a test wants it");
        let key = header.key;
        let id = key.group;
        match header.kind {
            Kind::Share => return self.map(peer, header.offset, header.total),
            Kind::Unshare => drop(self.peers[peer as usize].mappings.remove(&header.offset)),
            _ => {}
        }
        if !matches!(header.kind, Kind::Data | Kind::Reference | Kind::Announce) {
            return Ok(());
        }
        let eager = header.kind == Kind::Data && header.flags & FLAG_EAGER != 0;
        let known = self.operation_of(peer, &key);
        if known.is_some_and(|(_, op)| matches!(op.sequence, Sequence::Sends { .. })) {
            return Err(FrameError::OutOfTurn("a message in the direction in which this rank sends"));
        }
        let active = known.and_then(|(from, op)| Some((from, op, self.active(id, op)?)));
        if let Some((from, op, active)) = active
            && active.fingerprint(self.groups[&id].members.rank(), from) != header.fingerprint
        {
            if eager {
                peers.machine(peer).consumed(header.total);
            }
            self.mismatch(peers, id, op, peer, header.fingerprint);
            return Ok(());
        }
        let open = active
            .and_then(|(from, op, active)| Some((from, op, active.execution.operation.is_open(from, key.message)?)));
        match (open, active.is_some()) {
            (None, true) => {
                let (from, ..) = active.expect("just seen");
                if eager {
                    peers.machine(peer).consumed(header.total);
                }
                self.misfit(peers, id, from, Misfit::Unknown);
                return Ok(());
            }
            (Some((from, op, true)), _) => {
                let incoming = match header.kind {
                    Kind::Announce => {
                        // Also if it was granted when the operation opened: a sender drops grants when it has many.
                        peers.machine(peer).grant(key, 1, header.fingerprint);
                        return Ok(());
                    }
                    Kind::Reference => Message::Remote(self.remote(peer, header, payload)?),
                    _ if placed => Message::Placed { len: payload.len() },
                    _ => Message::Bytes { offset: header.offset, payload },
                };
                if eager {
                    peers.machine(peer).consumed(header.total);
                }
                let mut result = Ok(());
                let now = peers.now();
                self.drive(
                    peers,
                    id,
                    op,
                    |execution, effects| {
                        result = execution.on_message(from, key.message, header.total, incoming, effects);
                    },
                    now,
                );
                if let Err(misfit) = result {
                    self.misfit(peers, id, from, misfit);
                }
            }
            // The operation is not posted, or not ready: keeps the message.
            (Some((_, _, false)), _) | (None, false) => {
                let total = header.total;
                let content = match header.kind {
                    Kind::Announce => Content::Announced,
                    Kind::Reference => {
                        let payload = Kept::Remote(self.remote(peer, header, payload)?);
                        Content::Here { total, uses_credit: false, payload }
                    }
                    _ if eager => Content::Here { total, uses_credit: true, payload: Kept::Bytes(payload.to_vec()) },
                    _ => return Err(FrameError::OutOfTurn("data of a message that was not granted")),
                };
                if self.early.len() >= MAX_EARLY {
                    self.make_room(peers);
                    if self.status(peer, &key) == OpStatus::Retired {
                        if eager {
                            peers.machine(peer).consumed(header.total);
                        }
                        return Ok(());
                    }
                }
                self.early.keep(peer, key, header.fingerprint, content);
                if let Channel::PointToPoint { tag, .. } = key.channel {
                    self.bind(peers, id, tag);
                }
            }
        }
        Ok(())
    }

    /// Compares the fingerprints that peers have sent for an operation with its own. Returns false if the group has failed
    /// over it.
    pub(super) fn check_claims(&mut self, peers: &mut Peers, id: GroupId, op: OpId) -> bool {
        let group = &self.groups[&id];
        let active = &group.ops[&op];
        // Other pairs of ranks may use the same tag in the same direction.
        let with = op.other().and_then(|rank| group.members.peer(rank));
        let concerns = |peer: PeerId| with.is_none_or(|only| only == peer);
        let beliefs = self.early.beliefs(&op.key(id, group.members.rank(), 0), concerns);
        let told = group.told.get(&OpSeq(op.seq)).filter(|_| op.sequence == Sequence::Collectives).copied();
        let odd = beliefs.into_iter().chain(told).find(|(peer, theirs)| {
            let other = group.members.rank_of(*peer);
            other.is_some_and(|other| active.fingerprint(group.members.rank(), other) != *theirs)
        });
        match odd {
            Some((peer, theirs)) => {
                self.mismatch(peers, id, op, peer, theirs);
                false
            }
            None => true,
        }
    }

    /// Lets an operation act, and carries out its effects. The operation fails if it then waits for a rank that has left.
    pub(super) fn drive(
        &mut self,
        peers: &mut Peers,
        id: GroupId,
        op: OpId,
        act: impl FnOnce(&mut Execution, &mut Vec<Effect>),
        now: Time,
    ) {
        let mut effects = std::mem::take(&mut self.effects);
        let Some(active) = self.groups.get_mut(&id).and_then(|group| group.ops.get_mut(&op)) else {
            self.effects = effects;
            return;
        };
        active.progressed = now;
        act(&mut active.execution, &mut effects);
        let mut at = 0;
        let mut needs_the_gone = false;
        // Opening a message may find it here already, which may make more steps ready: the list grows while it is walked.
        while at < effects.len() {
            let effect = effects[at];
            at += 1;
            needs_the_gone |= effect.awaits().is_some_and(|rank| {
                let group = &self.groups[&id];
                group.members.peer(rank).is_some_and(|peer| self.is_gone(group, peer))
            });
            match effect {
                Effect::Compute(instance) => self.execution(id, op).compute(instance),
                Effect::Send { to, message, from, len } => {
                    self.send(peers, id, op, to, message, from, len, &mut effects);
                }
                Effect::Read { from, message } => {
                    let group = &self.groups[&id];
                    let peer = group.members.peer(from).expect("plans receive from other ranks");
                    peers.machine(peer).done(op.key(id, group.members.rank(), message));
                }
                Effect::Doubt { from, message } => {
                    // A group of the sender's has failed. If it is this one, its report comes before the answer; the answer
                    // then counts only for what the sender has ended ([`Group::is_void`]).
                    let group = &self.groups[&id];
                    let peer = group.members.peer(from).expect("plans receive from other ranks");
                    let fingerprint = group.ops[&op].fingerprint(group.members.rank(), from);
                    peers.machine(peer).probe(op.key(id, group.members.rank(), message), fingerprint);
                }
                Effect::Open { from, message, count } => {
                    if let Err(misfit) = self.opened(peers, id, op, from, message, count, &mut effects) {
                        effects.clear();
                        self.effects = effects;
                        self.misfit(peers, id, from, misfit);
                        return;
                    }
                }
            }
        }
        effects.clear();
        self.effects = effects;
        let group = self.groups.get_mut(&id).expect("looked up above");
        if let Some(active) = group.ops.get(&op).filter(|active| active.execution.operation.has_work()) {
            self.work.insert((active.priority, active.started, id, op));
        }
        if group.ops.get(&op).is_some_and(|active| active.execution.operation.is_done()) {
            let active = group.ops.remove(&op).expect("looked up above");
            // One that heard from every rank before it ended, as an all-to-all with splits does, was compared with all of them.
            if active.splits.is_none() {
                group.ended.remember(op, active.fingerprint);
            }
            let MessageKey { channel, op: seq, .. } = op.key(id, group.members.rank(), 0);
            let with = op.other();
            for (_, peer) in group.members.others().filter(|(rank, _)| with.is_none_or(|only| only == *rank)) {
                peers.machine(peer).retire(id, channel, seq);
            }
            self.finished += 1;
            self.recorder.ended(active.recorded, Instant::now(), true);
            active.ticket.complete(Ok(()));
            if self.groups[&id].joining.is_some() {
                self.joined(id);
            }
            let group = &self.groups[&id];
            let is_over = |(ends, _): &(u64, Failure)| group.first_running().is_none_or(|first| first >= *ends);
            if let Some((_, failure)) = group.ends_after.clone().filter(is_over) {
                self.fail_group(peers, id, failure, true);
            }
        } else if needs_the_gone {
            self.check_departed(peers, id, op);
        }
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn send(
        &mut self,
        peers: &mut Peers,
        id: GroupId,
        op: OpId,
        to: u32,
        message: u32,
        from: Place,
        len: u64,
        effects: &mut Vec<Effect>,
    ) {
        let group = self.groups.get_mut(&id).expect("its operation is running");
        let peer = group.members.peer(to).expect("plans send to other ranks");
        let rank = group.members.rank();
        let key = op.key(id, rank, message);
        let active = group.ops.get_mut(&op).expect("it is running");
        let address = active.execution.address(from);
        let machine = peers.machine(peer);
        let is_short = len <= machine.eager_limit();
        // A short message without credit stays in its tensor until it is granted, and its operation stays open. The same holds
        // for an empty message: the receiver has to remember it, too.
        let owned = is_short && machine.has_credit(len);
        let info = &mut self.peers[peer as usize];
        let (mut region, mut place) = (0, address as u64);
        if info.local
            && info.lost.is_none()
            && !is_short
            && let Some((number, shared, offset)) = find(&self.regions, address as u64, len)
        {
            let has_room = info.offered.len() < MAX_MAPPINGS;
            if let Entry::Vacant(entry) = info.offered.entry(number)
                && has_room
            {
                match shared.descriptor() {
                    Ok(descriptor) => {
                        entry.insert(Some(descriptor));
                        machine.share(number, shared.len());
                    }
                    Err(error) => {
                        let who = info.contact.describe();
                        log::warn!("penstock: cannot share memory with {who} ({error}): it is read as any other");
                    }
                }
            }
            if info.offered.contains_key(&number) {
                (region, place) = (number, offset);
            }
        }
        let body = if owned && len == 0 {
            Body::Owned(Arc::from([]))
        } else if owned {
            // SAFETY: the plan's slices lie in the operation's buffers.
            Body::Owned(unsafe { std::slice::from_raw_parts(address, len as usize) }.into())
        } else {
            let place = Reference { address: place, epoch: self.memory_epoch.epoch(), region };
            Body::Memory { place, len }
        };
        machine.send(Outgoing {
            key,
            priority: active.priority,
            fingerprint: active.fingerprint(rank, to),
            coflow: active.coflow,
            body,
        });
        if owned {
            active.execution.operation.on_sent(to, message, effects);
        }
    }

    /// Messages of an operation may come now: takes those that are here, and grants the others.
    #[allow(clippy::too_many_arguments)]
    fn opened(
        &mut self,
        peers: &mut Peers,
        id: GroupId,
        op: OpId,
        from: u32,
        message: u32,
        count: u32,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Misfit> {
        let group = &self.groups[&id];
        let peer = group.members.peer(from).expect("plans receive from other ranks");
        let rank = group.members.rank();
        let fingerprint = group.ops[&op].fingerprint(rank, from);
        let key = |message| op.key(id, rank, message);
        let mut wanted = false;
        if !self.early.is_empty() {
            for message in message..message + count {
                match self.early.take(peer, key(message)) {
                    Some(Content::Announced) => peers.machine(peer).grant(key(message), 1, fingerprint),
                    Some(Content::Here { total, uses_credit, payload }) => {
                        if uses_credit {
                            peers.machine(peer).consumed(total);
                        }
                        let content = match &payload {
                            Kept::Bytes(payload) => Message::Bytes { offset: 0, payload },
                            Kept::Remote(remote) => Message::Remote(remote.clone()),
                        };
                        self.execution(id, op).on_message(from, message, total, content, effects)?;
                    }
                    None => wanted = true,
                }
            }
        } else {
            wanted = true;
        }
        // A grant for a message that needs none (a short one, or a reference) does no harm, but costs a frame.
        let machine = peers.machine(peer);
        if wanted && !machine.config().references {
            let operation = &self.groups[&id].ops[&op].execution.operation;
            if operation.largest_message(from, message, count) > machine.eager_limit() {
                machine.grant(key(message), count, fingerprint);
            }
        }
        Ok(())
    }

    fn execution(&mut self, id: GroupId, op: OpId) -> &mut Execution {
        &mut self.groups.get_mut(&id).expect("running").ops.get_mut(&op).expect("running").execution
    }

    /// Something happened at a peer.
    pub(super) fn happened(&mut self, peers: &mut Peers, peer: PeerId, event: Event) {
        match event {
            Event::Sent(key) => {
                if let Some((to, op)) = self.operation_of(peer, &key) {
                    let now = peers.now();
                    self.drive(
                        peers,
                        key.group,
                        op,
                        |execution, effects| execution.operation.on_sent(to, key.message, effects),
                        now,
                    );
                }
            }
            Event::Granted(key, theirs) | Event::Probe(key, theirs) | Event::Late(key, theirs) => {
                let probe = matches!(event, Event::Probe(..));
                let Some((other, op)) = self.operation_of(peer, &key) else {
                    if !self.groups.contains_key(&key.group) && self.status(peer, &key) == OpStatus::Early {
                        self.early.claim(peer, &key, theirs);
                    }
                    return;
                };
                let group = &self.groups[&key.group];
                let issued = group.issued.count(op.sequence);
                match group.fingerprint(op, other) {
                    _ if group.failed.is_some() => {}
                    Some(ours) if ours != theirs => return self.mismatch(peers, key.group, op, peer, theirs),
                    Some(_) => {}
                    None => {
                        if !group.is_over(op) {
                            self.early.claim(peer, &key, theirs);
                        }
                    }
                }
                // Also answers a probe that doubts a reference: the peer knows from a report, which was sent before, if that
                // confirms nothing.
                if probe {
                    peers.machine(peer).answer_probe(key, issued);
                }
            }
            Event::Issued(key, count) => {
                if let Some((from, op)) = self.operation_of(peer, &key)
                    && let Some(active) = self.groups.get_mut(&key.group).and_then(|group| group.ops.get_mut(&op))
                {
                    active.issued.insert(from, count);
                    // An answer to such a probe confirms what was read only if the operation still counts on the peer: if the
                    // group has failed there, its report has come before.
                    if key.message != PROBE && !self.groups[&key.group].is_void(op) {
                        let now = peers.now();
                        let act = |execution: &mut Execution, effects: &mut Vec<Effect>| {
                            execution.operation.on_confirmed(from, key.message, effects);
                        };
                        self.drive(peers, key.group, op, act, now);
                    }
                }
            }
            Event::Report(id, report) => {
                let who = self.peers[peer as usize].contact.describe();
                // The first reporter is named, and not those that pass it on.
                let message =
                    if report.is_passed_on { report.message } else { format!("{who} reports: {}", report.message) };
                let failure = Failure { is_reported: true, ..Failure::fatal(report.kind, message) };
                if self.groups.contains_key(&id) {
                    return self.end_group_after(peers, id, report.finished, failure);
                }
                self.has_done_with(peers, peer, id);
                if !self.is_closed(id) {
                    // The peer has joined the group and failed before this process joined it.
                    self.reported.remember(id, failure);
                }
            }
            Event::Left(id, farewell) => self.has_left(peers, peer, id, farewell),
            Event::Bye | Event::Stalled(_) | Event::Silent => {}
        }
    }

    /// Does one piece of what takes long.
    pub(super) fn work_on(&mut self, peers: &mut Peers) {
        let Some(turn) = self.work.pop_first() else { return };
        let (_, _, id, op) = turn;
        let now = peers.now();
        let active = self.groups.get_mut(&id).and_then(|group| group.ops.get_mut(&op));
        if let Some(scale) = active.and_then(|active| active.scale.as_mut().filter(|scale| !scale.is_done())) {
            scale.work();
            if scale.is_done() {
                self.begin_steps(peers, id, op, now);
            } else {
                self.work.insert(turn);
            }
            return;
        }
        let mut result = Ok(());
        // It is queued again if there is more to do.
        self.drive(peers, id, op, |execution, effects| result = execution.work(effects), now);
        if let Err((from, misfit)) = result {
            self.misfit(peers, id, from, misfit);
        }
    }
}

/// How many messages for operations that are not posted are kept. Credit bounds their bytes, this bounds their number, at
/// about 150 bytes each. Fewer in the engine's own tests, but more than the credit for empty messages (8,192).
const MAX_EARLY: usize = if cfg!(test) { 1 << 14 } else { 1 << 20 };
/// The message number of a probe that does not doubt a reference.
pub(super) const PROBE: u32 = u32::MAX;
