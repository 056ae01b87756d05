//! How operations go on: with what comes, and with what is sent.

use super::departure::has_left;
use super::group::{Active, Group, Joining, Named};
use super::host::Host;
use super::{Common, Groups};
use crate::early::Content;
use crate::name::{OpId, Sequence};
use crate::operation::{Effect, Incoming, Instance, Misfit, Place, Verdict};
use penstock_plan::Placement;
use penstock_stream::frame::{FLAG_PAYLOAD_SUM, Kind, NumberSpace};
use penstock_stream::peer::{Arrival, Body, FLAG_CHANGED, FLAG_EAGER, Finish, Landing, OpStatus, Outgoing, StreamId};
use penstock_stream::{FrameError, Header, MessageKey};
use penstock_types::{ChannelId, PeerId, Priority};

impl<B, K> Groups<B, K> {
    /// A header has come on a stream of a peer. Says where its payload goes. A place is valid while its operation runs.
    ///
    /// # Errors
    /// A frame that the peer may not send; the stream cannot go on.
    pub fn header<H: Host<Body = B, Kept = K>>(
        &self,
        host: &mut H,
        peer: PeerId,
        stream: StreamId,
        header: &Header,
    ) -> Result<Landing<(&B, Place)>, FrameError> {
        let now = host.now();
        let group = self.groups.get(&header.key.group);
        let named = group.map(|group| (group, group.look_up(peer, &header.key)));
        let status = match &named {
            Some((_, named)) => named.status(),
            None => self.common.unjoined.status(peer, header.key.group),
        };
        match (host.machine(peer).handle_header(stream, header, status, now)?, named) {
            (Arrival::Discard, _) => Ok(Landing::Discard),
            (Arrival::Take, Some((group, Named::Active(from, _, active)))) if header.kind == Kind::Data => {
                Ok(group.place(from, active, header).map_or(Landing::Stage, Landing::Place))
            }
            (Arrival::Take | Arrival::Race, _) => Ok(Landing::Stage),
        }
    }

    /// A data frame is whole in a buffer of its reader's. If its bytes can be used without the core (it can take long), their range is
    /// claimed: the body and what to do there, and the stream that must discard what it reads of another copy. [`Groups::frame`] follows
    /// with `placed`. Until then the caller keeps the operation's memory, and gives no other copy of the frame to that.
    pub fn claim<H: Host<Body = B, Kept = K>>(
        &self,
        host: &mut H,
        (peer, stream): (PeerId, StreamId),
        header: &Header,
    ) -> Option<(&B, Verdict, Option<StreamId>)> {
        let Header { key, offset, length, total, .. } = *header;
        let group = self.groups.get(&key.group)?;
        let Named::Active(from, op, active) = group.look_up(peer, &key) else { return None };
        if matches!(op.sequence, Sequence::Sends { .. })
            || active.fingerprint(group.members.rank(), from) != header.fingerprint
        {
            return None;
        }
        let verdict = active.operation.claim(from, key.message, offset, u64::from(length), total)?;
        let revoke = host.machine(peer).claim(stream, header)?;
        Some((&active.body, verdict, revoke))
    }

    /// A frame is whole. If it is new it is used, and the host, which has its payload at hand, does what follows from that. `payload`:
    /// its bytes for the peer's machine; none of a data frame that is discarded, or that is a phantom. `placed`: they were checked, and
    /// lie where [`Groups::header`] said, or were used as [`Groups::claim`] said.
    ///
    /// # Errors
    /// A payload that was damaged, or a frame that the peer may not send; the stream cannot go on.
    pub fn frame<H: Host<Body = B, Kept = K>>(
        &mut self,
        host: &mut H,
        (peer, stream): (PeerId, StreamId),
        header: &Header,
        payload: &[u8],
        placed: bool,
    ) -> Result<Finish, FrameError> {
        let mut group = self.groups.get_mut(&header.key.group);
        let (status, op) = match &group {
            Some(group) => {
                let named = group.look_up(peer, &header.key);
                (named.status(), named.op())
            }
            None => (self.common.unjoined.status(peer, header.key.group), None),
        };
        let mut checked = *header;
        if placed {
            checked.flags &= !FLAG_PAYLOAD_SUM;
        }
        let finish = host.machine(peer).handle_frame(stream, &checked, payload, status)?;
        if !finish.apply || !matches!(header.kind, Kind::Data | Kind::Reference | Kind::Announce) {
            return Ok(finish);
        }
        if op.is_some_and(|(_, op)| matches!(op.sequence, Sequence::Sends { .. })) {
            return Err(FrameError::OutOfTurn("a message in the direction in which this rank sends"));
        }
        let is_taken = match (&mut group, op) {
            (Some(group), Some((from, op))) => {
                group.arrive(&mut self.common, host, (peer, from, op), header, placed)?
            }
            _ => false,
        };
        if !is_taken {
            self.keep_early(host, peer, header)?;
        }
        Ok(finish)
    }

    /// Keeps a message whose operation is not posted here, or not ready for it.
    fn keep_early<H: Host<Body = B, Kept = K>>(
        &mut self,
        host: &mut H,
        peer: PeerId,
        header: &Header,
    ) -> Result<(), FrameError> {
        let (key, total, uses_credit) = (header.key, header.total, is_eager(header));
        let content = match header.kind {
            Kind::Announce => Content::Announced,
            kind if uses_credit || kind == Kind::Reference => Content::Here {
                total,
                uses_credit,
                priority: first_priority(header),
                payload: host.keep(peer, header)?,
            },
            _ => return Err(FrameError::OutOfTurn("data of a message that was not granted")),
        };
        if self.common.early.len() >= self.common.most_early {
            self.make_room(host);
            if self.status(peer, &key) == OpStatus::Retired {
                if uses_credit {
                    host.machine(peer).consumed(total);
                }
                return Ok(());
            }
        }
        self.common.early.keep(peer, key, header.fingerprint, content);
        if let (NumberSpace::PointToPoint { tag, .. }, Some(group)) = (key.space, self.groups.get_mut(&key.group)) {
            group.bind(&mut self.common, host, tag);
        }
        Ok(())
    }

    /// Begins one piece of what takes long: what the host made of it is done without the core, and [`Groups::worked`] follows. Until
    /// then the caller keeps the operation's memory. `None` if that was all, for now.
    pub fn work<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H) -> Option<(Work, H::Task)> {
        let turn = self.common.work.pop_first()?;
        let (_, _, id, op) = turn;
        let group = self.groups.get_mut(&id)?;
        let active = group.ops.get_mut(&op)?;
        if !active.is_ready {
            active.is_ready = host.prepare(&mut active.body);
            if active.is_ready {
                group.begin_steps(&mut self.common, host, op);
            } else {
                self.common.work.insert(turn);
            }
            return None;
        }
        let instance = active.operation.next_work()?;
        if active.operation.has_work() {
            self.common.work.insert(turn);
        }
        let task = host.work(&mut active.body, instance);
        Some((Work { key: op.key(id, group.members.rank(), 0), op, instance }, task))
    }

    /// A piece of what takes long is done: the operands that were read from other processes' memory, and whether what was read is
    /// certain; or the operand that cannot be read, and why.
    pub fn worked<H: Host<Body = B, Kept = K>>(
        &mut self,
        host: &mut H,
        work: Work,
        result: Result<Vec<(u32, bool)>, (u32, String)>,
    ) {
        let Work { key, op, instance } = work;
        let Some(group) = self.groups.get_mut(&key.group) else { return };
        match result {
            Ok(read) => group.drive(&mut self.common, host, op, |active, _, effects| {
                active.operation.worked(instance, read, effects);
            }),
            Err((operand, error)) => {
                let Some(active) = group.ops.get(&op) else { return };
                let (from, _) = active.operation.sender(instance, operand);
                group.misfit(&mut self.common, host, from, Misfit::Unreadable(error));
            }
        }
    }
}

/// A piece of what takes long, of an operation.
#[derive(Debug)]
pub struct Work {
    /// Of one of the operation's messages.
    pub key: MessageKey,
    op: OpId,
    instance: Instance,
}

impl<B> Group<B> {
    /// Where the payload of a data frame belongs, if it only has to lie there.
    fn place<'a>(&self, from: u32, active: &'a Active<B>, header: &Header) -> Option<(&'a B, Place)> {
        let Header { key, offset, length, total, .. } = *header;
        if length == 0 || active.fingerprint(self.members.rank(), from) != header.fingerprint {
            return None;
        }
        Some((&active.body, active.operation.place(from, key.message, offset, u64::from(length), total)?))
    }

    /// A message, or a part of one, of an operation that may run here. Returns false if the operation is not ready for it.
    fn arrive<H: Host<Body = B>>(
        &mut self,
        common: &mut Common<H::Kept>,
        host: &mut H,
        (peer, from, op): (PeerId, u32, OpId),
        header: &Header,
        placed: bool,
    ) -> Result<bool, FrameError> {
        let Some(active) = self.ops.get(&op) else { return Ok(false) };
        let (message, total) = (header.key.message, header.total);
        let is_same = active.fingerprint(self.members.rank(), from) == header.fingerprint;
        let is_open = active.operation.is_open(from, message);
        if is_same && is_open == Some(false) {
            return Ok(false);
        }
        if is_same && is_open.is_some() && header.kind == Kind::Announce {
            // Also if it was granted when the operation opened: a sender drops grants when it has many.
            host.machine(peer).grant(header.key, 1, header.fingerprint);
            return Ok(true);
        }
        let reference = match header.kind {
            Kind::Reference if is_same && is_open.is_some() => Some(host.keep(peer, header)?),
            _ => None,
        };
        if is_eager(header) {
            host.machine(peer).consumed(total);
        }
        if !is_same {
            self.mismatch(common, host, op, peer, header.fingerprint);
            return Ok(true);
        }
        if let Some(theirs) = first_priority(header) {
            self.compare_priority(host, op, from, theirs);
        }
        let len = u64::from(header.length);
        let incoming = match reference {
            Some(_) => Incoming::Reference,
            None if placed => Incoming::Placed { len },
            None => Incoming::Frame { offset: header.offset, len },
        };
        let mut result = if is_open.is_some() { Ok(()) } else { Err(Misfit::Unknown) };
        if result.is_ok() {
            self.drive(common, host, op, |active, host, effects| {
                match (active.operation.on_message(from, message, total, incoming, effects), reference) {
                    (Ok(verdict), Some(reference)) => host.take_kept(&mut active.body, verdict, reference),
                    (Ok(verdict), None) => host.take(&mut active.body, verdict),
                    (Err(misfit), _) => result = Err(misfit),
                }
            });
        }
        if let Err(misfit) = result {
            self.misfit(common, host, from, misfit);
        }
        Ok(true)
    }

    /// Lets an operation act, and has its effects carried out. The operation fails if it then waits for a rank that has left.
    pub(super) fn drive<H: Host<Body = B>>(
        &mut self,
        common: &mut Common<H::Kept>,
        host: &mut H,
        op: OpId,
        act: impl FnOnce(&mut Active<B>, &mut H, &mut Vec<Effect>),
    ) {
        let Some(active) = self.ops.get_mut(&op) else { return };
        let mut effects = std::mem::take(&mut common.effects);
        active.progressed = host.now();
        act(active, host, &mut effects);
        let key = op.key(self.id, self.members.rank(), 0);
        let mut acting = Acting { key, active, misfit: None, other_priority: None };
        let (mut at, mut more) = (0, Vec::new());
        let mut needs_the_gone = false;
        // Opening a message may find it here already, which may make more steps ready: the list grows while it is walked. What comes
        // is put apart first, since an operation joins messages to the last effect in its list.
        while at < effects.len() && acting.misfit.is_none() {
            let effect = effects[at];
            at += 1;
            let peer = effect.rank().map(|rank| (rank, self.members.peer(rank).expect("plans name other ranks")));
            needs_the_gone |= effect.awaits()
                && peer.is_some_and(|(_, peer)| {
                    has_left(&self.channels, peer, op.channel) || common.directory.peer(peer).lost.is_some()
                });
            acting.carry_out(common, host, self.members.rank(), peer, effect, &mut more);
            effects.append(&mut more);
        }
        let Acting { active, misfit, other_priority, .. } = acting;
        let (has_work, is_done, turn) =
            (active.operation.has_work(), active.operation.is_done(), (active.priority, active.started, self.id, op));
        effects.clear();
        common.effects = effects;
        if let Some((from, theirs)) = other_priority {
            self.compare_priority(host, op, from, theirs);
        }
        if let Some((from, misfit)) = misfit {
            return self.misfit(common, host, from, misfit);
        }
        if has_work {
            common.work.insert(turn);
        }
        if is_done {
            self.end(common, host, op);
        } else if needs_the_gone {
            self.check_departed(common, host, op);
        }
    }

    /// A rank has issued a collective with this priority. Each sends by its own, so nothing fails where they differ: the user is told,
    /// once for the group. Those of other channels nobody has chosen: a reducer whose steps overlap sends otherwise than one whose steps
    /// do not.
    fn compare_priority<H: Host<Body = B>>(&mut self, host: &mut H, op: OpId, from: u32, theirs: Priority) {
        if self.has_told_priorities || op.sequence != Sequence::Collectives || op.channel != ChannelId::MAIN {
            return;
        }
        let Some(active) = self.ops.get(&op).filter(|active| active.first_priority != theirs) else { return };
        let (what, label) = (active.fingerprint.describe(), self.label(op.channel));
        let (ours, theirs) = (active.first_priority.number(), theirs.number());
        let (own, other) = (self.own(), &self.who[from as usize]);
        host.warn(&format!(
            "{what} #{} of {label} has priority {ours} on {own} and {theirs} on {other}. Each rank sends by its own number, \
             so all wait for the rank where it is least urgent. Give it the same priority on all ranks. Further differences in this group \
             are not reported.",
            op.seq
        ));
        self.has_told_priorities = true;
    }

    /// All steps of an operation are done.
    fn end<H: Host<Body = B>>(&mut self, common: &mut Common<H::Kept>, host: &mut H, op: OpId) {
        let active = self.ops.remove(&op).expect("it has just run");
        // One that heard from every rank before it ended, as an all-to-all with splits does, was compared with all of them.
        if active.splits.is_none() {
            let known = self.channels.get_mut(&op.channel).expect("operations run in open channels");
            known.ended.remember(op, active.fingerprint);
        }
        let MessageKey { space, op: seq, .. } = op.key(self.id, self.members.rank(), 0);
        let with = op.other();
        for (_, peer) in self.members.others().filter(|(rank, _)| with.is_none_or(|only| only == *rank)) {
            // Most plans name few of a large group's ranks.
            if host.look(peer).remembered() > 0 {
                host.machine(peer).retire(self.id, space, seq);
            }
        }
        common.finished += 1;
        if self.joining == Some(Joining::Gathers) && op == OpId::collective(ChannelId::MAIN, 0) {
            self.joining = None;
            let keys = host.gathered(&active.body);
            let first = |key| keys.iter().position(|other| other == key).expect("it is one of them") as u32;
            self.placement = Placement::new(&keys.iter().map(first).collect::<Vec<u32>>());
            host.done(&op.key(self.id, self.members.rank(), 0), active.body);
            host.joined(self.id);
        } else {
            host.done(&op.key(self.id, self.members.rank(), 0), active.body);
        }
        if !self.endings.is_empty() {
            self.end_what_is_over(common, host);
        }
    }
}

/// An operation whose effects are being carried out.
struct Acting<'a, B> {
    /// Of its first message.
    key: MessageKey,
    active: &'a mut Active<B>,
    /// A message that was here already does not fit.
    misfit: Option<(u32, Misfit)>,
    /// The rank of such a message has issued the operation with this priority, and this rank with another.
    other_priority: Option<(u32, Priority)>,
}

impl<B> Acting<'_, B> {
    fn carry_out<H: Host<Body = B>>(
        &mut self,
        common: &mut Common<H::Kept>,
        host: &mut H,
        rank: u32,
        peer: Option<(u32, PeerId)>,
        effect: Effect,
        effects: &mut Vec<Effect>,
    ) {
        let active = &mut *self.active;
        let key = |message| MessageKey { message, ..self.key };
        let peer = || peer.expect("the effect names a rank").1;
        match effect {
            Effect::Compute(instance) => host.compute(&mut active.body, instance),
            Effect::Send { to, message, from, len } => {
                let peer = peer();
                let machine = host.look(peer);
                let is_short = len <= machine.eager_limit();
                // A short message without credit stays in its tensor until it is granted, and its operation stays open. The same
                // holds for an empty message: the receiver has to remember it, too.
                let is_copied = is_short && machine.has_credit(len);
                let body = if is_copied {
                    Body::Owned(host.copy(&active.body, from, len))
                } else {
                    Body::Memory { place: host.lend(peer, &active.body, from, len, !is_short), len }
                };
                let Active { priority, first_priority, coflow, .. } = *active;
                let (key, is_changed) = (key(message), priority != first_priority);
                let fingerprint = active.fingerprint(rank, to);
                host.machine(peer).send(Outgoing { key, priority, is_changed, fingerprint, coflow, body });
                if is_copied {
                    active.operation.on_sent(to, message, effects);
                }
            }
            Effect::Read { message, .. } => host.machine(peer()).done(key(message)),
            Effect::Doubt { from, message } => {
                // A group of the sender's has failed. If it is this one, its report comes before the answer; the answer
                // then counts only for what the sender has ended ([`Group::is_void`]).
                let fingerprint = active.fingerprint(rank, from);
                host.machine(peer()).probe(key(message), fingerprint);
            }
            Effect::Open { from, message, count } => {
                if let Err(misfit) = self.opened(common, host, rank, (from, peer()), message, count, effects) {
                    self.misfit = Some((from, misfit));
                }
            }
        }
    }

    /// Messages may come now: takes those that are here, and grants the others.
    #[allow(clippy::too_many_arguments)]
    fn opened<H: Host<Body = B>>(
        &mut self,
        common: &mut Common<H::Kept>,
        host: &mut H,
        rank: u32,
        (from, peer): (u32, PeerId),
        message: u32,
        count: u32,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Misfit> {
        let fingerprint = self.active.fingerprint(rank, from);
        let key = |message| MessageKey { message, ..self.key };
        let mut is_wanted = false;
        for message in message..message + count {
            match common.early.take(peer, key(message)) {
                Some(Content::Announced) => host.machine(peer).grant(key(message), 1, fingerprint),
                Some(Content::Here { total, uses_credit, priority, payload }) => {
                    let other = priority.filter(|theirs| *theirs != self.active.first_priority);
                    self.other_priority = self.other_priority.or(other.map(|theirs| (from, theirs)));
                    if uses_credit {
                        host.machine(peer).consumed(total);
                    }
                    let incoming = match host.kept_bytes(&payload) {
                        Some(len) => Incoming::Frame { offset: 0, len },
                        None => Incoming::Reference,
                    };
                    let verdict = self.active.operation.on_message(from, message, total, incoming, effects)?;
                    host.take_kept(&mut self.active.body, verdict, payload);
                }
                None => is_wanted = true,
            }
        }
        // A grant for a message that needs none (a short one, or a reference) does no harm, but costs a frame.
        let machine = host.look(peer);
        if is_wanted
            && !machine.config().references
            && self.active.operation.largest_message(from, message, count) > machine.eager_limit()
        {
            host.machine(peer).grant(key(message), count, fingerprint);
        }
        Ok(())
    }
}

/// The priority that the sender of a message has issued the operation with; `None`: it has changed it since.
fn first_priority(header: &Header) -> Option<Priority> {
    (header.flags & FLAG_CHANGED == 0).then_some(header.priority)
}

/// Whether a message travels on the credit of its sender.
fn is_eager(header: &Header) -> bool {
    header.kind == Kind::Data && header.flags & FLAG_EAGER != 0
}
