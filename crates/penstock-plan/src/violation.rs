//! What can be wrong with a plan, and where.

use std::fmt;

use crate::{Buf, PlanError, Slice};

/// One instance of a step on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The rank.
    pub rank: u32,
    /// Index in [`crate::Steps::steps`].
    pub step: u32,
    /// Which instance.
    pub segment: u32,
}

impl fmt::Display for Place {
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
    #[error("{place} waits for step {step}, which does not exist")]
    UnknownStep {
        /// Who waits.
        place: Place,
        /// For what.
        step: u32,
    },
    /// A message to or from the rank itself, or outside the group.
    #[error("{place} names rank {peer} as its peer")]
    Peer {
        /// Whose peer.
        place: Place,
        /// The peer.
        peer: u32,
    },
    /// A message number that [`crate::Steps::messages`] does not cover.
    #[error("{place} uses message number {number} of {messages}")]
    Number {
        /// Whose message.
        place: Place,
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
    #[error("{place} and {other} are the same end of the same message")]
    Duplicate {
        /// One.
        place: Place,
        /// The other.
        other: Place,
    },
    /// A message that nobody sends, nobody takes, or that is bytes at one end and a notification at the other.
    #[error("{place}: its message has no other end")]
    Unmatched {
        /// The end that there is.
        place: Place,
    },
    /// The ends of a message, or the operands of a step, differ in length.
    #[error("{place} has {bytes} bytes, {other} has {other_bytes}")]
    Length {
        /// One.
        place: Place,
        /// Its length.
        bytes: u64,
        /// The other; the same for two operands of one step.
        other: Place,
        /// Its length.
        other_bytes: u64,
    },
    /// A slice outside its buffer, or segments that would cut elements.
    #[error("{place}: {slice:?} does not fit the buffer of {buffer_bytes} bytes")]
    Bounds {
        /// Whose slice.
        place: Place,
        /// The slice.
        slice: Slice,
        /// The buffer's length.
        buffer_bytes: u64,
    },
    /// A step writes what it still reads, or memory that is not its own to write.
    #[error("{place} must not write {buf:?} bytes {start}..{end}")]
    Write {
        /// Who writes.
        place: Place,
        /// Where.
        buf: Buf,
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// A reduction of several messages, one of them from another host, that the transport cannot hold.
    #[error(
        "{place} reduces several messages of up to {bytes} bytes in one step; from other hosts only eager ones can wait"
    )]
    Hold {
        /// Who reduces.
        place: Place,
        /// Length of the step's slice.
        bytes: u64,
    },
    /// These can never go.
    #[error("deadlock: {} instances wait for each other, among them {}", places.len(), places[0])]
    Deadlock {
        /// What is not done, at least one.
        places: Vec<Place>,
    },
    /// Two instances touch the same bytes in any order.
    #[error("race: {place} and {other} both touch {buf:?} bytes {start}..{end}, nothing orders them, and one writes")]
    Race {
        /// One.
        place: Place,
        /// The other.
        other: Place,
        /// Where.
        buf: Buf,
        /// First byte that both touch.
        start: u64,
        /// One past the last.
        end: u64,
    },
    /// Bytes that nothing has written.
    #[error("{place} reads {buf:?} byte {at}, which holds nothing yet")]
    Undefined {
        /// Who reads.
        place: Place,
        /// Where.
        buf: Buf,
        /// The byte.
        at: u64,
    },
    /// A reduction of what does not belong together.
    #[error("{place} reduces {what} (byte {at} of its destination)")]
    Reduction {
        /// Who reduces.
        place: Place,
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
