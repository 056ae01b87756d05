//! A part of an aggregator, and which SeqNums are its.

use crate::Serial;
use crate::rules::Refusal;

/// The SeqNums that this part of an aggregator adds: those that are `index` modulo `count`. Shards of a node share nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    /// The number of this shard, below `count`.
    pub index: u32,
    /// How many shards the aggregator has, a power of two.
    pub count: u32,
}

impl Shard {
    /// The shard of a node that has only one.
    pub const WHOLE: Shard = Shard { index: 0, count: 1 };

    /// How many slots of a job this shard has. If fewer SeqNums are in flight than there are shards, one is enough.
    pub(super) fn slots(self, window: u32) -> usize {
        (window / self.count).max(1) as usize
    }

    /// The slot of a SeqNum, if it is one of this shard's.
    pub(super) fn slot_of(self, seq: Serial, window: u32) -> Result<usize, Refusal> {
        if seq.0 & (self.count - 1) != self.index {
            return Err(Refusal::Shard);
        }
        Ok((seq.0 / self.count) as usize & (self.slots(window) - 1))
    }
}
