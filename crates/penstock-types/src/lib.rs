//! The words that every crate shares.
//!
//! A leaf: plain values and their names, no behaviour beyond printing and sizes, no dependencies.
//! A word is spelled here the way it is spelled in Python, in logs and in `docs/`.

mod dtype;
mod failure;

pub use dtype::{DType, ReduceOp};
pub use failure::{Failure, FailureKind};

/// A moment in nanoseconds on some monotonic clock that the caller owns.
///
/// Protocol and plan code never reads a clock; it is told the time, so that tests and the simulator can run it
/// under a virtual one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// The moment `nanos` later.
    #[must_use]
    pub fn plus(self, nanos: u64) -> Time {
        Time(self.0.saturating_add(nanos))
    }

    /// Nanoseconds from `earlier` to `self`; 0 when `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Time) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Nanoseconds in a millisecond.
pub const MILLISECOND: u64 = 1_000_000;
/// Nanoseconds in a second.
pub const SECOND: u64 = 1_000_000_000;

/// Names a peer, which is another process of the job, within this process.
pub type PeerId = u32;

/// A set of ranks that run collectives together; its first rank chooses the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u64);

/// An order of collectives in a group; [`ChannelId::MAIN`] is the group's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChannelId(pub u32);

impl ChannelId {
    /// The channel that each group has: the collectives of its users, and the messages between two ranks.
    pub const MAIN: ChannelId = ChannelId(0);
}

/// What a rank leaves, or reports as failed: a channel of a group, or the group, which its main channel stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Scope {
    /// The group.
    pub group: GroupId,
    /// The channel.
    pub channel: ChannelId,
}

impl Scope {
    /// Whether it is the whole group.
    #[must_use]
    pub fn is_group(self) -> bool {
        self.channel == ChannelId::MAIN
    }

    /// Whether a channel of a group is in it.
    #[must_use]
    pub fn covers(self, group: GroupId, channel: ChannelId) -> bool {
        self.group == group && (self.is_group() || self.channel == channel)
    }
}

impl From<GroupId> for Scope {
    fn from(group: GroupId) -> Scope {
        Scope { group, channel: ChannelId::MAIN }
    }
}

/// Counts how often a job was rebuilt. Frames of another generation are refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(pub u32);

/// The position of an operation in its channel's order of issue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpSeq(pub u64);

/// How urgent a transfer is: a lower number goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Priority(pub i32);

impl Priority {
    /// That of an operation for which nobody has said anything else.
    pub const USUAL: Priority = Priority(0);

    /// The least urgent one that is more urgent than usual.
    pub const LEAST_URGENT: Priority = Priority(-1);

    /// Whether it is more urgent than usual.
    #[must_use]
    pub fn is_urgent(self) -> bool {
        self < Priority::USUAL
    }

    /// As users number it (docs/guide/priority.md): 0 is the most urgent, 128 the usual one.
    #[must_use]
    pub fn number(self) -> i64 {
        i64::from(self.0) + 128
    }
}

/// Bytes `start..end` of a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteRange {
    /// First byte.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
}

impl ByteRange {
    /// Bytes `start..end`.
    #[must_use]
    pub fn new(start: u64, end: u64) -> ByteRange {
        debug_assert!(start <= end);
        ByteRange { start, end }
    }

    /// How many bytes.
    #[must_use]
    pub fn len(self) -> u64 {
        self.end - self.start
    }

    /// No bytes at all.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.start == self.end
    }
}
