//! How operations of a group are counted and named, here and between two ranks.

use crate::tags::Tags;
use penstock_stream::MessageKey;
use penstock_stream::fingerprint::Fingerprint;
use penstock_stream::frame::{Direction, NumberSpace};
use penstock_types::{ChannelId, GroupId, OpSeq};
use std::collections::{HashMap, VecDeque};

/// Names an operation within its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId {
    /// The group's channel that it belongs to.
    pub channel: ChannelId,
    /// What it is counted with.
    pub sequence: Sequence,
    /// Its place in that sequence, from 0 on.
    pub seq: u64,
}

/// Operations of a channel that are counted together: a [`NumberSpace`] of two ranks, as one of them sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Sequence {
    /// Operations of all ranks.
    Collectives,
    /// Messages to a rank under a tag, in a group's main channel.
    Sends {
        /// The rank.
        to: u32,
        /// The tag.
        tag: u32,
    },
    /// Messages of a rank under a tag, in a group's main channel.
    Receives {
        /// The rank.
        from: u32,
        /// The tag.
        tag: u32,
    },
}

impl Sequence {
    /// Whether it counts what this rank sends to `rank`.
    #[must_use]
    pub fn is_send_to(self, rank: u32) -> bool {
        matches!(self, Sequence::Sends { to, .. } if to == rank)
    }
}

impl OpId {
    /// The collective of this number.
    #[must_use]
    pub fn collective(channel: ChannelId, seq: u64) -> OpId {
        OpId { channel, sequence: Sequence::Collectives, seq }
    }

    /// The operation, as rank `rank` of the group calls it, that a key names between it and rank `other`.
    #[must_use]
    pub fn of(key: &MessageKey, rank: u32, other: u32) -> OpId {
        let sequence = match key.space {
            NumberSpace::Collective(_) => Sequence::Collectives,
            NumberSpace::PointToPoint { direction, tag } if direction == Direction::between(rank, other) => {
                Sequence::Sends { to: other, tag }
            }
            NumberSpace::PointToPoint { tag, .. } => Sequence::Receives { from: other, tag },
        };
        OpId { channel: key.space.channel(), sequence, seq: key.op.0 }
    }

    /// Its message of this number, as frames between rank `rank`, which is this one, and the other of a point-to-point operation
    /// name it.
    #[must_use]
    pub fn key(self, group: GroupId, rank: u32, message: u32) -> MessageKey {
        let space = match self.sequence {
            Sequence::Collectives => NumberSpace::Collective(self.channel),
            Sequence::Sends { to, tag } => NumberSpace::PointToPoint { direction: Direction::between(rank, to), tag },
            Sequence::Receives { from, tag } => {
                NumberSpace::PointToPoint { direction: Direction::between(from, rank), tag }
            }
        };
        MessageKey { group, space, op: OpSeq(self.seq), message }
    }

    /// The other rank of a point-to-point operation.
    #[must_use]
    pub fn other(self) -> Option<u32> {
        match self.sequence {
            Sequence::Collectives => None,
            Sequence::Sends { to: other, .. } | Sequence::Receives { from: other, .. } => Some(other),
        }
    }
}

/// How many operations a rank has issued in a channel.
#[derive(Debug, Default)]
pub struct Issued {
    /// Collectives.
    pub collectives: u64,
    /// By the other rank.
    sends: HashMap<u32, Tags>,
    receives: HashMap<u32, Tags>,
}

impl Issued {
    /// How many of a sequence.
    #[must_use]
    pub fn count(&self, sequence: Sequence) -> u64 {
        match sequence {
            Sequence::Collectives => self.collectives,
            Sequence::Sends { to, tag } => self.sends.get(&to).map_or(0, |tags| tags.count(tag)),
            Sequence::Receives { from, tag } => self.receives.get(&from).map_or(0, |tags| tags.count(tag)),
        }
    }

    /// Gives the next operation its number.
    pub fn next(&mut self, sequence: Sequence) -> u64 {
        match sequence {
            Sequence::Collectives => {
                self.collectives += 1;
                self.collectives - 1
            }
            Sequence::Sends { to, tag } => self.sends.entry(to).or_default().add(tag),
            Sequence::Receives { from, tag } => self.receives.entry(from).or_default().add(tag),
        }
    }
}

/// What the last operations of a channel were that have ended on this rank: a peer may still be in one of them, and believe it to be
/// another.
#[derive(Debug, Default)]
pub struct Ended(VecDeque<(OpId, Fingerprint)>);

impl Ended {
    /// An operation has ended.
    pub fn remember(&mut self, op: OpId, fingerprint: Fingerprint) {
        if self.0.len() == MAX_ENDED {
            self.0.pop_front();
        }
        self.0.push_back((op, fingerprint));
    }

    /// What an operation was, if it is remembered. What is asked for is mostly among the last.
    #[must_use]
    pub fn fingerprint(&self, op: OpId) -> Option<Fingerprint> {
        self.0.iter().rev().find(|(known, _)| *known == op).map(|(_, fingerprint)| *fingerprint)
    }

    /// The last collectives, the latest first.
    pub fn collectives(&self) -> impl Iterator<Item = (OpSeq, Fingerprint)> {
        let collectives = self.0.iter().rev().filter(|(op, _)| op.sequence == Sequence::Collectives);
        collectives.map(|(op, fingerprint)| (OpSeq(op.seq), *fingerprint))
    }
}

/// Operations of a channel that have ended and can still be compared. Whoever waits in vain asks within a second, and the first
/// frame of a larger operation comes sooner; only a rank that needs nothing of the other meanwhile (it sends short messages to
/// third ones) ends more than this in a second, and then the other learns by its time-out. 48 KiB a channel, at most.
const MAX_ENDED: usize = 1024;
