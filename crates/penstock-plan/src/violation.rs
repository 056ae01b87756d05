//! What can be wrong with a plan, and where.

use std::fmt;

use crate::{Buf, PlanError, Slice};

/// One instance of a step on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceId {
    /// The rank.
    pub rank: u32,
    /// Index in [`crate::Steps::steps`].
    pub step: u32,
    /// Which instance.
    pub segment: u32,
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} step {} segment {}", self.rank, self.step, self.segment)
    }
}

/// What is wrong with a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The request has no plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A dependency names a step that is not there.
    #[error("{id} waits for step {step}, which does not exist")]
    UnknownStep {
        /// Who waits.
        id: InstanceId,
        /// For what.
        step: u32,
    },
    /// A message to or from the rank itself, or outside the group.
    #[error("{id} names rank {peer} as its peer")]
    Peer {
        /// Whose peer.
        id: InstanceId,
        /// The peer.
        peer: u32,
    },
    /// A message number that [`crate::Steps::messages`] does not cover.
    #[error("{id} uses message number {number} of {messages}")]
    Number {
        /// Whose message.
        id: InstanceId,
        /// Its number.
        number: u64,
        /// How many there are.
        messages: u32,
    },
    /// Ranks that disagree on how many message numbers the operation uses.
    #[error("rank {rank} counts {messages} messages, rank 0 counts {of_rank_0}")]
    Messages {
        /// Which rank.
        rank: u32,
        /// [`crate::Steps::messages`] on that rank.
        messages: u32,
        /// On rank 0.
        of_rank_0: u32,
    },
    /// Two senders or two takers of one message.
    #[error("{id} and {other} are the same end of the same message")]
    Duplicate {
        /// One.
        id: InstanceId,
        /// The other.
        other: InstanceId,
    },
    /// A message that nobody sends, nobody takes, or that is bytes at one end and a notification at the other.
    #[error("{id}: its message has no other end")]
    Unmatched {
        /// The end that there is.
        id: InstanceId,
    },
    /// The ends of a message, or the operands of a step, differ in length.
    #[error("{id} has {bytes} bytes, {other} has {other_bytes}")]
    Length {
        /// One.
        id: InstanceId,
        /// Its length.
        bytes: u64,
        /// The other; the same for two operands of one step.
        other: InstanceId,
        /// Its length.
        other_bytes: u64,
    },
    /// A slice outside its buffer, or segments that would cut elements.
    #[error("{id}: {slice:?} does not fit the buffer of {buffer_bytes} bytes")]
    Bounds {
        /// Whose slice.
        id: InstanceId,
        /// The slice.
        slice: Slice,
        /// The buffer's length.
        buffer_bytes: u64,
    },
    /// A step writes what it still reads, or memory that is not its own to write.
    #[error("{id} must not write {buf:?} bytes {start}..{end}")]
    Write {
        /// Who writes.
        id: InstanceId,
        /// Where.
        buf: Buf,
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// A reduction of several messages, one of them from another host, that the transport cannot hold.
    #[error(
        "{id} reduces several messages of up to {bytes} bytes in one step; from other hosts only eager ones can wait"
    )]
    Hold {
        /// Who reduces.
        id: InstanceId,
        /// Length of the step's slice.
        bytes: u64,
    },
    /// These can never go.
    #[error("deadlock: {} instances wait for each other, among them {}", instances.len(), instances[0])]
    Deadlock {
        /// What is not done, at least one.
        instances: Vec<InstanceId>,
    },
    /// Two instances touch the same bytes in any order.
    #[error("race: {id} and {other} both touch {buf:?} bytes {start}..{end}, nothing orders them, and one writes")]
    Race {
        /// One.
        id: InstanceId,
        /// The other.
        other: InstanceId,
        /// Where.
        buf: Buf,
        /// First byte that both touch.
        start: u64,
        /// One past the last.
        end: u64,
    },
    /// Bytes that nothing has written.
    #[error("{id} reads {buf:?} byte {at}, which holds nothing yet")]
    Undefined {
        /// Who reads.
        id: InstanceId,
        /// Where.
        buf: Buf,
        /// The byte.
        at: u64,
    },
    /// A reduction of what does not belong together.
    #[error("{id} reduces {what} (byte {at} of its destination)")]
    Reduction {
        /// Who reduces.
        id: InstanceId,
        /// What is wrong.
        what: &'static str,
        /// Offset in the destination.
        at: u64,
    },
    /// A result that is not what was asked for.
    #[error("byte {at} of the output of rank {rank} is {found}, not {wanted}")]
    Output {
        /// Whose result.
        rank: u32,
        /// The byte.
        at: u64,
        /// What it is.
        found: String,
        /// What it should be.
        wanted: String,
    },
    /// A barrier that a rank leaves too early.
    #[error("rank {rank} leaves the barrier without having heard of rank {missing}")]
    Barrier {
        /// Who leaves.
        rank: u32,
        /// Who may not have come.
        missing: u32,
    },
    /// Bytes that differ from [`crate::wire_bytes`].
    #[error("rank {rank} sends {sent} and receives {received} bytes, not what wire_bytes() promises")]
    WireBytes {
        /// Which rank.
        rank: u32,
        /// Bytes that it sends.
        sent: u64,
        /// Bytes that it receives.
        received: u64,
    },
    /// Bytes to and from other hosts that differ from [`crate::crossing_bytes`].
    #[error(
        "rank {rank} sends {sent} bytes to other hosts and receives {received}, not what crossing_bytes() promises"
    )]
    Crossing {
        /// Which rank.
        rank: u32,
        /// Bytes that it sends to other hosts.
        sent: u64,
        /// Bytes that it receives from other hosts.
        received: u64,
    },
    /// A longer chain of messages than [`crate::hops`] allows.
    #[error("a chain of {hops} messages, longer than the {promised} that hops() promises")]
    Hops {
        /// Its length.
        hops: u32,
        /// The limit.
        promised: u32,
    },
}
