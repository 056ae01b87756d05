//! A group of ranks, as one of them sees it, and its operations.

use super::channel::Channel;
use crate::members::Members;
use crate::name::{OpId, Sequence};
use crate::operation::Operation;
use crate::unbound::{ANY_SOURCE, Unbound};
use penstock_plan::{Algorithm, Collective, Placement, Request, Splits, Steps};
use penstock_stream::MessageKey;
use penstock_stream::fingerprint::Fingerprint;
use penstock_stream::peer::{Counts, OpStatus};
use penstock_stream::ranges::Ranges;
use penstock_types::{ChannelId, DType, Failure, GroupId, PeerId, Priority, ReduceOp, Scope, Time};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// A group, with the host's part (`B`) of each of its operations.
#[derive(Debug)]
pub struct Group<B> {
    pub(super) id: GroupId,
    pub(super) name: Arc<str>,
    pub(super) members: Members,
    /// How messages call each rank.
    pub(super) who: Vec<Arc<str>>,
    pub(super) placement: Placement,
    /// The algorithm of all-reduces that channels begin with; `None`: chosen by size and hosts.
    pub(super) algorithm: Option<Algorithm>,
    /// By number, the main one always.
    pub(super) channels: BTreeMap<ChannelId, Channel>,
    /// The numbers of channels that were opened here and closed again.
    pub(super) closed: Ranges,
    pub(super) ops: HashMap<OpId, Active<B>>,
    /// Operations that have their place in the order but not their buffers.
    pub(super) held: HashMap<OpId, Waiting<B>>,
    /// Receives without a place in the order yet: they take any source, or wait behind one that does.
    pub(super) unbound: Unbound<Posted<B>>,
    /// `None`: the join has ended.
    pub(super) joining: Option<Joining>,
    pub(super) failed: Option<Failure>,
    pub(super) endings: Vec<Ending>,
    /// The user was told that ranks have issued an operation with different priorities.
    pub(super) has_told_priorities: bool,
}

/// A member has ended the group or a channel, or has left without issuing more: the group or channel fails when the collectives that
/// still count have ended here too. If several have, the lower numbers count.
#[derive(Debug)]
pub(super) struct Ending {
    pub(super) channel: ChannelId,
    pub(super) counts: Counts,
    pub(super) failure: Failure,
}

/// How far a join has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joining {
    /// Some members are not connected.
    Connects,
    /// All are connected: the group's first operation gathers which ranks share a host.
    Gathers,
}

/// What a caller asks for.
#[derive(Clone, Debug)]
pub struct Call {
    /// What to do.
    pub collective: Collective,
    /// Operation, dtype, size and so on, which ranks compare; its name is used in errors.
    pub fingerprint: Fingerprint,
    /// Element type.
    pub dtype: DType,
    /// The reduction, if the collective has one.
    pub op: ReduceOp,
    /// The operation's size, as [`Request::bytes`] defines it.
    pub bytes: u64,
    /// Unequal parts of an all-to-all.
    pub splits: Option<Splits>,
    /// Tag of a send or receive.
    pub tag: u32,
    /// Identifies operations that are useful only together (a coflow); 0 for none.
    pub coflow: u32,
    /// How urgent.
    pub priority: Priority,
    /// The operation gets its place in the order now, and its buffers later ([`super::Groups::release`]).
    pub hold: bool,
    /// Time-out in nanoseconds.
    pub timeout: u64,
}

impl Call {
    /// The rank that a receive names.
    pub(super) fn source(&self) -> Option<u32> {
        self.collective.named_rank().filter(|rank| *rank != ANY_SOURCE)
    }
}

/// An operation that has its number and has not begun.
#[derive(Debug)]
pub(super) struct Waiting<B> {
    pub(super) call: Call,
    pub(super) request: Request,
    pub(super) steps: Arc<Steps>,
    pub(super) body: B,
    /// When it took its place: its time-out counts from then, also while it is held.
    pub(super) since: Time,
    /// The priority that it was issued with.
    pub(super) first_priority: Priority,
}

/// What is known of the operation of an incoming message.
pub(super) enum Named<'a, B> {
    /// It runs. The sender's rank, and how this rank calls the operation.
    Active(u32, OpId, &'a Active<B>),
    /// It has not begun here. The same.
    Early(u32, OpId),
    /// Nothing more can come of it.
    Over,
}

impl<B> Named<'_, B> {
    pub(super) fn status(&self) -> OpStatus {
        match self {
            Named::Active(..) => OpStatus::Active,
            Named::Early(..) => OpStatus::Early,
            Named::Over => OpStatus::Retired,
        }
    }

    /// The sender's rank, and how this rank calls the operation.
    pub(super) fn op(&self) -> Option<(u32, OpId)> {
        match self {
            Named::Active(from, op, _) | Named::Early(from, op) => Some((*from, *op)),
            Named::Over => None,
        }
    }
}

/// A receive that has no place in a sequence yet.
#[derive(Debug)]
pub(super) struct Posted<B> {
    pub(super) call: Call,
    pub(super) body: B,
    pub(super) since: Time,
}

/// A running operation.
#[derive(Debug)]
pub(super) struct Active<B> {
    pub(super) operation: Operation,
    pub(super) body: B,
    pub(super) fingerprint: Fingerprint,
    /// For an all-to-all: the parts in bytes, and the size of an element.
    pub(super) splits: Option<(Splits, u64)>,
    pub(super) coflow: u32,
    pub(super) priority: Priority,
    /// The one that it was issued with, which should be that of all ranks.
    pub(super) first_priority: Priority,
    pub(super) started: Time,
    pub(super) timeout: u64,
    pub(super) progressed: Time,
    pub(super) probed: Time,
    /// Peers' answers to probes: how many operations each has issued.
    pub(super) issued: HashMap<u32, u64>,
    /// Its steps may run. Until then, the host prepares its contribution.
    pub(super) is_ready: bool,
}

impl<B> Active<B> {
    /// The fingerprint that this rank and another compare for the operation.
    pub(super) fn fingerprint(&self, rank: u32, other: u32) -> Fingerprint {
        let Some((splits, element)) = &self.splits else { return self.fingerprint };
        let [sent, received] = [&splits.input, &splits.output].map(|parts| parts[other as usize] / element);
        let (up, down) = if rank < other { (sent, received) } else { (received, sent) };
        self.fingerprint.of_pair(up, down)
    }
}

impl<B> Group<B> {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Its ranks.
    #[must_use]
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// Which ranks share a host.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Why it has failed, if it has.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        self.failed.as_ref()
    }

    /// How many collectives its users have issued in its main channel.
    #[must_use]
    pub fn collectives(&self) -> u64 {
        self.main().collectives()
    }

    /// The bodies of its running operations, in all channels.
    pub fn running(&self) -> impl Iterator<Item = &B> {
        self.ops.values().map(|active| &active.body)
    }

    /// How many receives wait for a message before they have a number.
    #[must_use]
    pub fn unbound(&self) -> usize {
        self.unbound.iter().count()
    }

    /// Operations that were issued and have not ended.
    #[must_use]
    pub fn operations(&self) -> usize {
        self.ops.len() + self.held.len() + self.unbound()
    }

    /// Whether something of it has not ended: an operation, or the join.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.operations() > 0 || self.joining.is_some()
    }

    /// The bodies of all its operations.
    pub(super) fn into_bodies(mut self) -> impl Iterator<Item = B> {
        let running = self.ops.into_values().map(|active| active.body);
        let held = self.held.into_values().map(|waiting| waiting.body);
        running.chain(held).chain(self.unbound.drain().map(|posted| posted.body))
    }

    /// The rank of a member that is another process.
    pub(super) fn rank_of(&self, peer: PeerId) -> u32 {
        self.members.rank_of(peer).expect("a member")
    }

    /// How messages call this rank: by its rank in the job, as all others.
    pub(super) fn own(&self) -> &Arc<str> {
        &self.who[self.members.rank() as usize]
    }

    /// The difference between an operation's fingerprints on two ranks, as a sentence.
    pub(super) fn difference(&self, op: OpId, one: (u32, Fingerprint), other: (u32, Fingerprint)) -> String {
        let label = self.label(op.channel);
        let [first, second] = [one, other].map(|(rank, _)| &*self.who[rank as usize]);
        match Fingerprint::difference_of_pair(one.1, other.1, first, second, one.0 < other.0) {
            Some(difference) => format!("in all_to_all #{} of {label}, {difference}", op.seq),
            None if op.channel != ChannelId::MAIN && op.seq == 0 => format!(
                "{first} and {second} have opened channel {} of group {} under different names, and one of them calls it {}. All ranks \
                 must open the channels of a group in the same order.",
                op.channel.0,
                self.name,
                self.channels.get(&op.channel).map_or("so", |known| known.name()),
            ),
            None => {
                let difference = Fingerprint::difference(one.1, first, other.1, second);
                format!("operation #{} of {label} is {difference}", op.seq)
            }
        }
    }

    /// The fingerprint of an operation of this rank, running or ended, to be compared with another rank's.
    pub(super) fn fingerprint(&self, op: OpId, other: u32) -> Option<Fingerprint> {
        let running = self.ops.get(&op).map(|active| active.fingerprint(self.members.rank(), other));
        running.or_else(|| self.channels.get(&op.channel)?.ended.fingerprint(op))
    }

    /// The operation that a message of a peer names, as this rank calls it.
    pub(super) fn look_up(&self, peer: PeerId, key: &MessageKey) -> Named<'_, B> {
        let Some((from, op)) = self.members.operation(peer, key) else { return Named::Over };
        if self.failed.is_some() {
            return Named::Over;
        }
        if let Some(active) = self.ops.get(&op) {
            return Named::Active(from, op, active);
        }
        let has_failed = self.channels.get(&op.channel).is_some_and(|known| known.failed.is_some());
        let is_over = has_failed || self.is_closed(op.channel) || self.is_over(op);
        if is_over { Named::Over } else { Named::Early(from, op) }
    }

    /// Whether an operation has begun and ended here. A held operation has not begun.
    pub(super) fn is_over(&self, op: OpId) -> bool {
        op.seq < self.issued(op) && !self.ops.contains_key(&op) && !self.held.contains_key(&op)
    }

    /// Whether an operation can only fail when its group or channel ends, since it is not among the collectives that can still end.
    /// Messages never are: they may lie in memory that their sender's user has back.
    pub(super) fn is_void(&self, op: OpId) -> bool {
        self.endings.iter().any(|ending| {
            Scope { group: self.id, channel: ending.channel }.covers(self.id, op.channel)
                && (op.sequence != Sequence::Collectives || op.seq >= ending.counts.of(op.channel))
        })
    }
}
