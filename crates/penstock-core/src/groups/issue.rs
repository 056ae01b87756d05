//! How an operation begins: its place in the order, its plan, its buffers.

use super::group::{Active, Call, Group, Posted, Waiting};
use super::host::{Beginning, Host, Issue};
use super::{Common, Groups, MOST_PATIENCE};
use crate::early::Early;
use crate::name::{OpId, Sequence};
use crate::operation::Operation;
use crate::unbound::ANY_SOURCE;
use penstock_plan::{Algorithm, Collective, Medium, Request, Thresholds, choose, segment_bytes};
use penstock_stream::MessageKey;
use penstock_types::{ChannelId, Failure, FailureKind, GroupId, OpSeq, Priority, Scope, Time};
use std::collections::HashMap;

impl<B, K> Groups<B, K> {
    /// A caller starts an operation in a channel of a group.
    pub fn start<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, channel: Scope, call: Call, body: B) {
        match self.groups.get_mut(&channel.group) {
            Some(group) => group.start(&mut self.common, host, channel.channel, call, body),
            None => host.refused(body, Failure::fatal(FailureKind::Closed, "the group was destroyed.")),
        }
    }

    /// The buffers of an operation that was started with [`Call::hold`] are ready.
    pub fn release<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, id: GroupId, is_meant: impl Fn(&B) -> bool) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let Some(op) = group.held.iter().find(|(_, waiting)| is_meant(&waiting.body)).map(|(op, _)| *op) else {
            if let Some(posted) = group.unbound.iter_mut().find(|posted| is_meant(&posted.body)) {
                posted.call.hold = false;
            }
            return;
        };
        let waiting = group.held.remove(&op).expect("just found");
        group.begin(&mut self.common, host, op, waiting);
    }

    /// Changes how urgent an operation is: what it has not sent yet leaves by that, and what it computes goes by it. Nothing
    /// happens where it has ended.
    pub fn reprioritise<H: Host<Body = B, Kept = K>>(
        &mut self,
        host: &mut H,
        id: GroupId,
        priority: Priority,
        is_meant: impl Fn(&B) -> bool,
    ) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let held = group.held.values_mut().map(|waiting| (&mut waiting.call, &waiting.body));
        let posted = group.unbound.iter_mut().map(|posted| (&mut posted.call, &posted.body));
        if let Some((call, _)) = held.chain(posted).find(|(_, body)| is_meant(body)) {
            call.priority = priority;
        }
        let Some((op, active)) = group.ops.iter_mut().find(|(_, active)| is_meant(&active.body)) else { return };
        let before = std::mem::replace(&mut active.priority, priority);
        let turn = |priority| (priority, active.started, id, *op);
        if self.common.work.remove(&turn(before)) {
            self.common.work.insert(turn(priority));
        }
        let MessageKey { space, op: seq, .. } = op.key(id, group.members.rank(), 0);
        if matches!(op.sequence, Sequence::Receives { .. }) {
            return;
        }
        // Other pairs of ranks may use the same tag in the same direction.
        let with = op.other();
        for (_, peer) in group.members.others().filter(|(rank, _)| with.is_none_or(|only| only == *rank)) {
            host.machine(peer).reprioritise(id, space, seq, priority);
        }
    }
}

impl<B> Group<B> {
    pub(super) fn start<H: Host<Body = B>>(
        &mut self,
        common: &mut Common<H::Kept>,
        host: &mut H,
        channel: ChannelId,
        call: Call,
        body: B,
    ) {
        let known = self.channels.get(&channel).filter(|known| known.is_open);
        if let Some(failure) = self.failed.as_ref().or_else(|| known?.failed.as_ref()) {
            return host.refused(body, failure.of_later(&call.fingerprint.describe()));
        }
        if known.is_none() {
            let message = format!("channel {} of group {} was closed.", channel.0, self.name);
            return host.refused(body, Failure::of_call(FailureKind::Closed, message));
        }
        if let Err(failure) = check_call(&call, channel, self.members.world()) {
            return host.refused(body, failure);
        }
        // A join's own operation has no time-out.
        if call.timeout != u64::MAX {
            common.longest_timeout = common.longest_timeout.max(call.timeout.min(MOST_PATIENCE));
        }
        let since = host.now();
        match call.collective {
            Collective::Recv { from } if from == ANY_SOURCE || self.unbound.has(call.tag) => {
                self.post(common, host, call, body);
            }
            _ => self.place_in_order(common, host, channel, call, body, since),
        }
    }

    /// Starts a receive that cannot have its place in a sequence yet: it takes any source, or an earlier receive under the
    /// same tag does.
    fn post<H: Host<Body = B>>(&mut self, common: &mut Common<H::Kept>, host: &mut H, call: Call, mut body: B) {
        let (tag, waits_for) = (call.tag, Some(awaited_of(&call)));
        host.issued(
            &mut body,
            &Issue { channel: self.main().name(), seq: None, call: &call, algorithm: Algorithm::Direct, waits_for },
        );
        self.unbound.push(tag, Posted { call, body, since: host.now() });
        self.bind(common, host, tag);
        // If it still waits, it is the last one. Earlier ones were checked when they came.
        let reason = self.unbound.last(tag).and_then(|posted| self.senders_are_gone(common, posted));
        if let Some(reason) = reason {
            self.fail(common, host, ChannelId::MAIN, Failure::fatal(FailureKind::PeerLost, format!("{reason}.")), true);
        }
    }

    /// Gives messages to receives that were posted without a place in a sequence. Each receive from any source, in the order
    /// of posting, takes the first message that is here or announced.
    pub(super) fn bind<H: Host<Body = B>>(&mut self, common: &mut Common<H::Kept>, host: &mut H, tag: u32) {
        while let Some(first) = self.unbound.first(tag)
            && let Some(from) = first.call.source().or_else(|| self.first_sender(tag, &common.early))
        {
            let Posted { mut call, mut body, since } = self.unbound.pop(tag).expect("just seen");
            call.collective = Collective::Recv { from };
            host.bound(&mut body, from);
            self.place_in_order(common, host, ChannelId::MAIN, call, body, since);
        }
    }

    /// The rank whose next message under a tag has come or was announced first.
    fn first_sender<K>(&self, tag: u32, early: &Early<K>) -> Option<u32> {
        let arrived = |(from, peer)| {
            let sequence = Sequence::Receives { from, tag };
            let next = OpId { channel: ChannelId::MAIN, sequence, seq: self.main().issued.count(sequence) };
            // An operation's first message comes or is announced before its others.
            Some((early.arrival(peer, next.key(self.id, self.members.rank(), 0))?, from))
        };
        self.members.others().filter_map(arrived).min().map(|(_, from)| from)
    }

    /// Gives an operation its number, and starts it, or holds it.
    fn place_in_order<H: Host<Body = B>>(
        &mut self,
        common: &mut Common<H::Kept>,
        host: &mut H,
        channel: ChannelId,
        call: Call,
        mut body: B,
        since: Time,
    ) {
        let (world, medium) = (self.members.world(), self.placement.medium());
        let request = Request {
            collective: call.collective,
            world,
            rank: self.members.rank(),
            placement: self.placement.clone(),
            bytes: call.bytes,
            element_bytes: call.dtype.size() as u32,
            splits: call.splits.clone(),
            segment_bytes: segment_bytes(call.collective, medium, world, call.bytes, &common.thresholds),
        };
        let (mut algorithm, mut reason) = choose(&request, &common.thresholds);
        if call.collective == Collective::AllReduce
            && let Some(wanted) = self.channels[&channel].algorithm
            && wanted != algorithm
            && fits(wanted, call.bytes, medium, &common.thresholds)
        {
            reason = format!("{wanted} (PENSTOCK_ALGORITHM or the tuner) instead of {algorithm}");
            algorithm = wanted;
        }
        let steps = match common.plans.steps(&request, algorithm) {
            Ok(steps) => steps,
            Err(error) => {
                let message = format!("{}: {error}.", call.fingerprint.describe());
                return host.refused(body, Failure::of_call(FailureKind::Config, message));
            }
        };
        let known = self.channels.get_mut(&channel).expect("it is open");
        known.last_algorithm = reason;
        let sequence = match call.collective {
            Collective::Send { to } => Sequence::Sends { to, tag: call.tag },
            Collective::Recv { from } => Sequence::Receives { from, tag: call.tag },
            _ => Sequence::Collectives,
        };
        let op = OpId { channel, sequence, seq: known.issued.next(sequence) };
        let issue = Issue { channel: known.name(), seq: Some(op.seq), call: &call, algorithm, waits_for: None };
        host.issued(&mut body, &issue);
        let hold = call.hold;
        let first_priority = call.priority;
        let waiting = Waiting { call, request, steps, body, since, first_priority };
        if hold {
            self.held.insert(op, waiting);
        } else {
            self.begin(common, host, op, waiting);
        }
    }

    fn begin<H: Host<Body = B>>(&mut self, common: &mut Common<H::Kept>, host: &mut H, op: OpId, waiting: Waiting<B>) {
        let Waiting { call, request, steps, mut body, since, first_priority } = waiting;
        let is_read =
            self.members.peers().any(|peer| common.directory.peer(peer).local && host.look(peer).config().references);
        let is_ready = host.begin(&mut body, &Beginning { call: &call, request: &request, steps: &steps, is_read });
        let element_bytes = call.dtype.size() as u64;
        let now = host.now();
        let active = Active {
            operation: Operation::new(steps, element_bytes),
            body,
            fingerprint: call.fingerprint,
            splits: call.splits.map(|splits| (splits, element_bytes)),
            coflow: call.coflow,
            priority: call.priority,
            first_priority,
            started: since,
            timeout: call.timeout,
            progressed: now,
            probed: now,
            issued: HashMap::new(),
            is_ready,
        };
        let turn = (active.priority, active.started, self.id, op);
        self.ops.insert(op, active);
        if !self.check_claims(common, host, op) {
            return;
        }
        if is_ready {
            self.begin_steps(common, host, op);
        } else {
            common.work.insert(turn);
        }
    }

    pub(super) fn begin_steps<H: Host<Body = B>>(&mut self, common: &mut Common<H::Kept>, host: &mut H, op: OpId) {
        self.drive(common, host, op, |active, _, effects| active.operation.start(effects));
    }

    /// Compares the fingerprints that peers have sent for an operation with its own. Returns false if the group has failed
    /// over it.
    fn check_claims<H: Host<Body = B>>(&mut self, common: &mut Common<H::Kept>, host: &mut H, op: OpId) -> bool {
        let (active, members) = (&self.ops[&op], &self.members);
        // Other pairs of ranks may use the same tag in the same direction.
        let with = op.other().and_then(|rank| members.peer(rank));
        let concerns = |peer| with.is_none_or(|only| only == peer);
        let beliefs = common.early.beliefs(&op.key(self.id, members.rank(), 0), concerns);
        let told = self.channels[&op.channel]
            .farewells
            .told
            .get(&OpSeq(op.seq))
            .filter(|_| op.sequence == Sequence::Collectives)
            .copied();
        let odd = beliefs.into_iter().chain(told).find(|(peer, theirs)| {
            let other = members.rank_of(*peer);
            other.is_some_and(|other| active.fingerprint(members.rank(), other) != *theirs)
        });
        match odd {
            Some((peer, theirs)) => {
                self.mismatch(common, host, op, peer, theirs);
                false
            }
            None => true,
        }
    }
}

/// What a receive without a message waits for, as a text.
pub(super) fn awaited_of(call: &Call) -> &'static str {
    match call.source() {
        None => "a message from any of the other ranks",
        Some(_) => {
            "a receive from any source that was posted before it, and takes the next message of any of the other ranks"
        }
    }
}

fn check_call(call: &Call, channel: ChannelId, world: u32) -> Result<(), Failure> {
    let is_message = matches!(call.collective, Collective::Send { .. } | Collective::Recv { .. });
    if is_message && channel != ChannelId::MAIN {
        let message = "messages between two ranks have tags, and go through the group itself, not through a channel. Nothing was sent.";
        return Err(Failure::of_call(FailureKind::Config, message));
    }
    if call.collective == (Collective::Recv { from: ANY_SOURCE }) && world == 1 {
        let message = "a receive from any source in a group of one rank has no rank to receive from. Nothing was sent.";
        return Err(Failure::of_call(FailureKind::Config, message));
    }
    if call.collective.reduces() && !call.op.takes(call.dtype) {
        return Err(Failure::of_call(
            FailureKind::Config,
            format!("{} is not defined on {}. Nothing was sent.", call.op.name(), call.dtype),
        ));
    }
    Ok(())
}

/// Whether an algorithm that the user asks for can run this all-reduce.
fn fits(algorithm: Algorithm, bytes: u64, medium: Medium, thresholds: &Thresholds) -> bool {
    let held = algorithm.holds_messages(Collective::AllReduce);
    Algorithm::of(Collective::AllReduce).contains(&algorithm)
        && (!held || medium == Medium::Memory || bytes <= thresholds.eager_limit_bytes)
}
