//! A group of ranks, as one of them sees it, and its operations.

use super::command::Call;
use crate::execution::Execution;
use crate::recorder::Entry as Recorded;
use crate::scale::Scale;
use crate::ticket::Promise;
use penstock_core::members::Members;
use penstock_core::name::{Ended, Issued, OpId, Sequence};
use penstock_core::unbound::Unbound;
use penstock_net::Contact;
use penstock_plan::{Algorithm, Request, Splits, Steps, Topology};
use penstock_stream::fingerprint::Fingerprint;
use penstock_types::{Failure, OpSeq, PeerId, Priority, Time};
use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

pub(super) struct Group {
    pub(super) name: Arc<str>,
    pub(super) members: Members,
    pub(super) contacts: Vec<Contact>,
    pub(super) topology: Topology,
    pub(super) algorithm: Option<Algorithm>,
    pub(super) issued: Issued,
    pub(super) ended: Ended,
    pub(super) ops: HashMap<OpId, Active>,
    /// Operations that have their place in the order but not their buffers.
    pub(super) held: HashMap<OpId, Waiting>,
    /// Receives without a place in the order yet: they take any source, or wait behind one that does.
    pub(super) unbound: Unbound<Posted>,
    pub(super) joining: Option<Joining>,
    pub(super) failed: Option<Failure>,
    /// A member has ended the group after this many collectives, or has left without issuing more: the group fails when these
    /// collectives have ended here too. If several have, the lowest number counts.
    pub(super) ends_after: Option<(u64, Failure)>,
    /// Tickets that end with the group.
    pub(super) watches: Vec<Promise>,
    /// Members that have left, and how many collectives they had issued.
    pub(super) gone: HashMap<PeerId, u64>,
    /// What collectives were on members that have left, as the first of these has reported.
    pub(super) told: HashMap<OpSeq, (PeerId, Fingerprint)>,
    pub(super) last_algorithm: String,
}

/// A join that has not ended.
pub(super) struct Joining {
    pub(super) ticket: Promise,
    /// What every rank reports about which ranks share its host, once all are connected: the group's first operation gathers
    /// it.
    pub(super) hosts: Option<Box<[u64]>>,
}

pub(super) struct Waiting {
    pub(super) call: Call,
    pub(super) request: Request,
    pub(super) steps: Arc<Steps>,
    pub(super) ticket: Promise,
    /// When it took its place: its time-out counts from then, also while it is held.
    pub(super) since: Time,
    pub(super) recorded: Recorded,
}

/// A receive that has no place in a sequence yet.
pub(super) struct Posted {
    pub(super) call: Call,
    pub(super) ticket: Promise,
    pub(super) since: Time,
    pub(super) recorded: Recorded,
}

pub(super) struct Active {
    pub(super) execution: Execution,
    pub(super) ticket: Promise,
    pub(super) fingerprint: Fingerprint,
    /// For an all-to-all: the parts in bytes, and the size of an element.
    pub(super) splits: Option<(Splits, u64)>,
    pub(super) coflow: u32,
    pub(super) recorded: Recorded,
    pub(super) priority: Priority,
    pub(super) started: Time,
    pub(super) timeout: u64,
    pub(super) progressed: Time,
    pub(super) probed: Time,
    /// Peers' answers to probes: how many operations each has issued.
    pub(super) issued: HashMap<u32, u64>,
    /// The factor of the contribution, which is applied in pieces before the operation starts.
    pub(super) scale: Option<Scale>,
    pub(super) _keep: Option<Box<dyn Any + Send>>,
}

impl Active {
    /// The fingerprint that this rank and another compare for the operation.
    pub(super) fn fingerprint(&self, rank: u32, other: u32) -> Fingerprint {
        let Some((splits, element)) = &self.splits else { return self.fingerprint };
        let [sent, received] = [&splits.input, &splits.output].map(|parts| parts[other as usize] / element);
        let (up, down) = if rank < other { (sent, received) } else { (received, sent) };
        self.fingerprint.of_pair(up, down)
    }
}

impl Group {
    /// The rank of a member that is another process.
    pub(super) fn rank_of(&self, peer: PeerId) -> u32 {
        self.members.rank_of(peer).expect("a member")
    }

    /// The difference between an operation's fingerprints on two ranks, as a sentence.
    pub(super) fn difference(&self, op: OpId, one: (u32, Fingerprint), other: (u32, Fingerprint)) -> String {
        let name = &self.name;
        let [first, second] = [one, other].map(|(rank, _)| self.contacts[rank as usize].describe());
        match Fingerprint::difference_of_pair(one.1, other.1, &first, &second, one.0 < other.0) {
            Some(difference) => format!("in all_to_all #{} of group {name}, {difference}", op.seq),
            None => {
                let difference = Fingerprint::difference(one.1, &first, other.1, &second);
                format!("operation #{} of group {name} is {difference}", op.seq)
            }
        }
    }

    /// The fingerprint of an operation of this rank, running or ended, to be compared with another rank's.
    pub(super) fn fingerprint(&self, op: OpId, other: u32) -> Option<Fingerprint> {
        let running = self.ops.get(&op).map(|active| active.fingerprint(self.members.rank(), other));
        running.or_else(|| self.ended.fingerprint(op))
    }

    /// Whether an operation has begun and ended here. A held operation has not begun.
    pub(super) fn is_over(&self, op: OpId) -> bool {
        op.seq < self.issued.count(op.sequence) && !self.ops.contains_key(&op) && !self.held.contains_key(&op)
    }

    /// Operations that were issued and have not ended.
    pub(super) fn operations(&self) -> usize {
        self.ops.len() + self.held.len() + self.unbound.iter().count()
    }

    pub(super) fn is_busy(&self) -> bool {
        self.operations() > 0 || self.joining.is_some()
    }

    /// The number of the first collective that was issued and has not ended.
    pub(super) fn first_running(&self) -> Option<u64> {
        let running = self.ops.keys().chain(self.held.keys());
        running.filter(|op| op.sequence == Sequence::Collectives).map(|op| op.seq).min()
    }

    /// Whether an operation can only fail when the group ends, since it is not among the collectives that can still end.
    /// Messages never are: they may lie in memory that their sender's user has back.
    pub(super) fn is_void(&self, op: OpId) -> bool {
        let is_after = |(ends, _): &(u64, Failure)| op.sequence != Sequence::Collectives || op.seq >= *ends;
        self.ends_after.as_ref().is_some_and(is_after)
    }

    /// How many collectives have ended here before the first one that has not.
    pub(super) fn finished(&self) -> u64 {
        self.first_running().unwrap_or(self.issued.collectives)
    }
}
