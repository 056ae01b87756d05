//! The rules of `docs/design/aggregation.md` by name, and the reasons why a packet has no effect.

use super::packet::PacketError;
use std::fmt;

/// A rule without which sums are wrong or the system stops; the model check removes each in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(test), allow(dead_code, reason = "only tests build rule sets, and name rules that only tests remove"))]
pub(crate) enum Rule {
    /// R1. A newer SeqNum takes the slot: it resets the bitmap and overwrites the sum.
    Reset,
    /// R2. An older SeqNum than the slot's never touches it.
    Stale,
    /// R3. A worker whose bit is set is not added again.
    Duplicate,
    /// R4. A complete slot keeps its sum, and forwards it again for every duplicate.
    Keep,
    /// R5. Ack and Credit are forwarded as the minimum over *all* children; one never heard from holds them back.
    Heart,
    /// R6. Packets of another epoch have no effect.
    Epoch,
    /// R7. Numbers are compared on a circle.
    Serial,
    /// R8. The server takes a block only between Ack and Credit, and only until it is committed.
    Once,
    /// R9. At the server a child counts once, whether its sum came from it or from the server's table for it.
    Overlap,
    /// R10. The server commits when the blocks of all its children are in.
    Whole,
    /// R11. Credit stays within a window of the slowest worker's Ack.
    Window,
    /// R12. A result is kept until all workers have it, and sent to workers that request it.
    Answer,
    /// R13. When one child bypasses an aggregator, all its children do.
    Bypass,
    /// R14. A worker pushes nothing beyond Credit.
    Credit,
    /// R15. A worker sends again what is not committed.
    Resend,
    /// R16. Only the server commits.
    Commit,
    /// R17. A worker requests a result that it misses.
    Request,
    /// R18. A worker takes each result once.
    Deliver,
    /// R19. Floats are added in the order of the tree.
    Order,
    /// R20. Credit stays within the limit of the blocks that the server holds.
    Limit,
    /// R21. Results of the pull flow leave only as far as every worker has room.
    Room,
}

/// Which rules hold: all, except in tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Rules {
    #[cfg(test)]
    pub(crate) without: Option<Rule>,
}

impl Rules {
    /// Whether a rule is in force.
    #[cfg(test)]
    pub(crate) fn hold(self, rule: Rule) -> bool {
        self.without != Some(rule)
    }

    /// Whether a rule is in force: always.
    #[cfg(not(test))]
    #[inline(always)]
    pub(crate) fn hold(self, _rule: Rule) -> bool {
        true
    }
}

/// Why a packet had no effect on sums. The receiver is not in error; each refusal is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The bytes are not a packet.
    Malformed(PacketError),
    /// A packet of another version of the protocol.
    Version(u8),
    /// The job is not open here.
    Job,
    /// Another epoch of the job.
    Epoch,
    /// The MAC or the digest does not hold: another job's key, or damage.
    Key,
    /// The sender's address is not that of the worker or the workers in the packet.
    Sender,
    /// The node does not add such elements, or they differ from those of the others in the slot.
    Format,
    /// A block longer than the job's, or not as long as the others in the slot.
    Length,
    /// Older than the slot's content, or committed long ago.
    Stale,
    /// The block is in the sum already, or the result was taken already.
    Duplicate,
    /// The number is beyond the window of those that may be in flight.
    Credit,
    /// An Ack for something that was not sent.
    Ack,
    /// A kind of packet that this node does not handle.
    Kind,
    /// A SeqNum that another shard of the node adds.
    Shard,
    /// A block past an aggregator for which the server does not stand in, or has no place left.
    Bypass,
}

impl Refusal {
    /// The number of refusals; [`Refusal::index`] is below it.
    pub const COUNT: usize = 15;

    /// Names, by index; for counters.
    pub const NAMES: [&str; Refusal::COUNT] = [
        "malformed",
        "version",
        "job",
        "epoch",
        "key",
        "sender",
        "format",
        "length",
        "stale",
        "duplicate",
        "credit",
        "ack",
        "kind",
        "shard",
        "place",
    ];

    /// Whether the packet still proves that its sender is alive.
    #[must_use]
    pub fn is_from_sender(self) -> bool {
        !matches!(self, Refusal::Key | Refusal::Epoch | Refusal::Sender | Refusal::Version(_) | Refusal::Malformed(_))
    }

    /// The index in an array of counters.
    #[must_use]
    pub fn index(self) -> usize {
        match self {
            Refusal::Malformed(_) => 0,
            Refusal::Version(_) => 1,
            Refusal::Job => 2,
            Refusal::Epoch => 3,
            Refusal::Key => 4,
            Refusal::Sender => 5,
            Refusal::Format => 6,
            Refusal::Length => 7,
            Refusal::Stale => 8,
            Refusal::Duplicate => 9,
            Refusal::Credit => 10,
            Refusal::Ack => 11,
            Refusal::Kind => 12,
            Refusal::Shard => 13,
            Refusal::Bypass => 14,
        }
    }
}

impl From<PacketError> for Refusal {
    fn from(error: PacketError) -> Refusal {
        match error {
            PacketError::Key => Refusal::Key,
            PacketError::Version(version) => Refusal::Version(version),
            _ => Refusal::Malformed(error),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Malformed(error) => write!(f, "{error}"),
            Refusal::Version(version) => write!(f, "{}", PacketError::Version(*version)),
            Refusal::Job => write!(f, "a packet of a job that is not admitted here"),
            Refusal::Epoch => write!(f, "a packet of another epoch of its job"),
            Refusal::Key => write!(f, "a packet under another key, or damaged"),
            Refusal::Sender => write!(f, "a packet for workers that do not live behind its address"),
            Refusal::Format => write!(f, "a block whose format or exponent does not fit"),
            Refusal::Length => write!(f, "a block whose length does not fit"),
            Refusal::Stale => write!(f, "a block that is long done"),
            Refusal::Duplicate => write!(f, "a block that is already in the sum"),
            Refusal::Credit => write!(f, "a block beyond the window"),
            Refusal::Ack => write!(f, "an Ack for what was never sent"),
            Refusal::Kind => write!(f, "a packet of a kind that has no business here"),
            Refusal::Shard => write!(f, "a block for another shard, and so for another port"),
            Refusal::Bypass => {
                write!(f, "a block past an aggregator for which the server does not stand in, or has no place left")
            }
        }
    }
}

impl std::error::Error for Refusal {}
