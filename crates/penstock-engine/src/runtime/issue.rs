//! How an operation begins: its place in the order, its plan, its buffers.

use super::Runtime;
use super::command::{Call, MOST_PATIENCE};
use super::group::{Active, Group, Posted, Waiting};
use super::sharing::find;
use crate::execution::{Execution, Kept, Memory};
use crate::recorder::{Entry as Recorded, Record};
use crate::scale::Scale;
use crate::ticket::{Promise, Ticket};
use penstock_core::early::Early;
use penstock_core::name::{OpId, Sequence};
use penstock_core::unbound::ANY_SOURCE;
use penstock_net::Peers;
use penstock_plan::{Algorithm, Collective, Request, Thresholds, choose, segment_bytes};
use penstock_types::{Failure, FailureKind, GroupId, PeerId, Time};
use std::collections::HashMap;
use std::time::Instant;

impl Runtime {
    pub(super) fn start(&mut self, peers: &mut Peers, id: GroupId, call: Call, ticket: Promise, now: Time) {
        let Some(group) = self.groups.get_mut(&id) else {
            let gone = Failure::fatal(FailureKind::Closed, "the group was destroyed.");
            return ticket.complete(Err(gone));
        };
        if let Some(failure) = &group.failed {
            return ticket.complete(Err(failure.clone()));
        }
        if let Err(failure) = check_call(&call, group.members.world()) {
            return ticket.complete(Err(failure));
        }
        // A join's own operation has no time-out.
        if call.timeout != u64::MAX {
            self.longest_timeout = self.longest_timeout.max(call.timeout.min(MOST_PATIENCE));
        }
        match call.collective {
            Collective::Recv { from } if from == ANY_SOURCE || group.unbound.has(call.tag) => {
                self.post(peers, id, call, ticket, now);
            }
            _ => self.place_in_order(peers, id, call, ticket, now, None),
        }
    }

    /// Starts a receive that cannot have its place in a sequence yet: it takes any source, or an earlier receive under the
    /// same tag does.
    pub(super) fn post(&mut self, peers: &mut Peers, id: GroupId, call: Call, ticket: Promise, now: Time) {
        let group = self.groups.get_mut(&id).expect("the caller has looked it up");
        let tag = call.tag;
        let recorded = self.recorder.issued(Record {
            group: group.name.clone(),
            seq: None,
            what: call.fingerprint,
            bytes: call.bytes,
            algorithm: Algorithm::Direct,
            issued: Instant::now(),
            ended: None,
            waits_for: Some(awaited_of(&call).to_owned()),
        });
        group.unbound.push(tag, Posted { call, ticket, since: now, recorded });
        self.bind(peers, id, tag);
        // If it still waits, it is the last one. Earlier ones were checked when they came.
        let Some(group) = self.groups.get(&id) else { return };
        let reason = group.unbound.last(tag).and_then(|posted| self.senders_are_gone(group, posted));
        if let Some(reason) = reason {
            self.fail_group(peers, id, Failure::fatal(FailureKind::PeerLost, format!("{reason}.")), true);
        }
    }

    /// Gives messages to receives that were posted without a place in a sequence. Each receive from any source, in the order
    /// of posting, takes the first message that is here or announced.
    pub(super) fn bind(&mut self, peers: &mut Peers, id: GroupId, tag: u32) {
        while let Some(group) = self.groups.get_mut(&id)
            && let Some(first) = group.unbound.first(tag)
            && let Some(from) = source_of(&first.call).or_else(|| first_sender(group, id, tag, &self.early))
        {
            let Posted { mut call, ticket, since, recorded } = group.unbound.pop(tag).expect("just seen");
            call.collective = Collective::Recv { from };
            ticket.set_source(from);
            self.place_in_order(peers, id, call, ticket, since, Some(recorded));
        }
    }

    /// Gives an operation its number, and starts it, or holds it. An operation that had to wait for its number was recorded
    /// before.
    fn place_in_order(
        &mut self,
        peers: &mut Peers,
        id: GroupId,
        call: Call,
        ticket: Promise,
        since: Time,
        recorded: Option<Recorded>,
    ) {
        let group = self.groups.get_mut(&id).expect("the caller has looked it up");
        let world = group.members.world();
        let request = Request {
            collective: call.collective,
            world,
            rank: group.members.rank(),
            topology: group.topology.clone(),
            bytes: call.bytes,
            element_bytes: call.dtype.size() as u32,
            splits: call.splits.clone(),
            segment_bytes: segment_bytes(call.collective, group.topology.medium(), world, call.bytes, &self.thresholds),
        };
        let (mut algorithm, mut reason) = choose(&request, &self.thresholds);
        if call.collective == Collective::AllReduce
            && let Some(wanted) = group.algorithm
            && wanted != algorithm
            && fits(wanted, call.bytes, group.topology.medium(), &self.thresholds)
        {
            reason = format!("{wanted} (PENSTOCK_ALGORITHM or the tuner) instead of {algorithm}");
            algorithm = wanted;
        }
        let steps = match self.planner.steps(&request, algorithm) {
            Ok(steps) => steps,
            Err(error) => {
                let failure =
                    Failure::of_call(FailureKind::Config, format!("{}: {error}.", call.fingerprint.describe()));
                if let Some(recorded) = recorded {
                    self.recorder.ended(recorded, Instant::now(), false);
                }
                return ticket.complete(Err(failure));
            }
        };
        group.last_algorithm = reason;
        let op = group.issued.next(match call.collective {
            Collective::Send { to } => Sequence::Sends { to, tag: call.tag },
            Collective::Recv { from } => Sequence::Receives { from, tag: call.tag },
            _ => Sequence::Collectives,
        });
        let hold = call.hold;
        let recorded = match recorded {
            Some(recorded) => {
                self.recorder.numbered(recorded, op.seq);
                recorded
            }
            None => self.recorder.issued(Record {
                group: group.name.clone(),
                seq: Some(op.seq),
                what: call.fingerprint,
                bytes: call.bytes,
                algorithm,
                issued: Instant::now(),
                ended: None,
                waits_for: None,
            }),
        };
        let waiting = Waiting { call, request, steps, ticket, since, recorded };
        if hold {
            group.held.insert(op, waiting);
        } else {
            self.begin(peers, id, op, waiting, peers.now());
        }
    }

    /// The buffers of an operation that was started with `hold` are ready.
    pub(super) fn release(&mut self, peers: &mut Peers, id: GroupId, ticket: &Ticket, now: Time) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let Some(op) = group.held.iter().find(|(_, waiting)| waiting.ticket.is_of(ticket)).map(|(op, _)| *op) else {
            if let Some(posted) = group.unbound.iter_mut().find(|posted| posted.ticket.is_of(ticket)) {
                posted.call.hold = false;
            }
            return;
        };
        let waiting = group.held.remove(&op).expect("just found");
        self.begin(peers, id, op, waiting, now);
    }

    fn begin(&mut self, peers: &mut Peers, id: GroupId, op: OpId, waiting: Waiting, now: Time) {
        let Waiting { call, request, steps, ticket, since, recorded } = waiting;
        let group = self.groups.get_mut(&id).expect("the caller has looked it up");
        let world = group.members.world();
        let (mut input, mut output) = (call.input, call.output);
        let is_read = |peer: PeerId| self.peers[peer as usize].local && peers.look(peer).config().references;
        if group.members.peers().any(is_read) {
            let buffers = [(input as u64, request.input_bytes()), (output as u64, request.output_bytes())];
            let is_private = |&(address, len): &(u64, u64)| find(&self.regions, address, len).is_none();
            // SAFETY: the caller of `Group::start` keeps its buffers until the operation has ended.
            unsafe { self.pages.used(buffers.into_iter().filter(is_private)) };
        }
        let scale = Scale::new(&call, &request, &mut input, &mut output);
        let memory = Memory { dtype: call.dtype, op: call.op, world, input, output };
        let active = Active {
            execution: Execution::new(steps, memory),
            ticket,
            fingerprint: call.fingerprint,
            splits: call.splits.map(|splits| (splits, call.dtype.size() as u64)),
            coflow: call.coflow,
            recorded,
            priority: call.priority,
            started: since,
            timeout: call.timeout,
            progressed: now,
            probed: now,
            issued: HashMap::new(),
            scale,
            _keep: call.keep,
        };
        let turn = (active.priority, active.started, id, op);
        let is_scaled = active.scale.as_ref().is_none_or(Scale::is_done);
        group.ops.insert(op, active);
        if !self.check_claims(peers, id, op) {
            return;
        }
        if is_scaled {
            self.begin_steps(peers, id, op, now);
        } else {
            self.work.insert(turn);
        }
    }

    pub(super) fn begin_steps(&mut self, peers: &mut Peers, id: GroupId, op: OpId, now: Time) {
        self.drive(peers, id, op, |execution, effects| execution.operation.start(effects), now);
    }
}

/// The rank that a receive names.
pub(super) fn source_of(call: &Call) -> Option<u32> {
    call.collective.named_rank().filter(|rank| *rank != ANY_SOURCE)
}

/// What a receive without a message waits for, as a text.
pub(super) fn awaited_of(call: &Call) -> &'static str {
    match source_of(call) {
        None => "a message from any of the other ranks",
        Some(_) => {
            "a receive from any source that was posted before it, and takes the next message of any of the other ranks"
        }
    }
}

/// The name of a receive without a message in errors.
pub(super) fn unnamed(call: &Call) -> String {
    match source_of(call) {
        None => format!("{} from any source", call.fingerprint.describe()),
        Some(from) => format!("{} from rank {from}", call.fingerprint.describe()),
    }
}

/// The rank whose next message under a tag has come or was announced first.
fn first_sender(group: &Group, id: GroupId, tag: u32, early: &Early<Kept>) -> Option<u32> {
    let arrived = |(from, peer): (u32, PeerId)| {
        let sequence = Sequence::Receives { from, tag };
        let next = OpId { sequence, seq: group.issued.count(sequence) };
        // An operation's first message comes or is announced before its others.
        Some((early.arrival(peer, next.key(id, group.members.rank(), 0))?, from))
    };
    group.members.others().filter_map(arrived).min().map(|(_, from)| from)
}

fn check_call(call: &Call, world: u32) -> Result<(), Failure> {
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
fn fits(algorithm: Algorithm, bytes: u64, medium: penstock_plan::Medium, thresholds: &Thresholds) -> bool {
    let held = algorithm.holds_messages(Collective::AllReduce);
    Algorithm::of(Collective::AllReduce).contains(&algorithm)
        && (!held || medium == penstock_plan::Medium::Memory || bytes <= thresholds.eager_limit_bytes)
}
