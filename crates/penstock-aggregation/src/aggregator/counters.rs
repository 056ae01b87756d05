//! What an aggregator counts.

use crate::rules::Refusal;

/// Counters of a job's packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobCounters {
    /// Blocks that were added.
    pub added: u64,
    /// Sums that went up for the first time.
    pub completed: u64,
    /// Sums that went up again.
    pub repeated: u64,
    /// Packets from above that went to all children.
    pub relayed: u64,
    /// How often the children were sent the names of workers whose blocks are missing.
    pub named: u64,
    /// Results that a child had lost and got from this aggregator.
    pub answered: u64,
    /// Slots that a newer SeqNum took over before their sum was complete.
    pub abandoned: u64,
    /// Additions in which an integer overflowed: some worker sent more than its share. The sum goes on, wrapped.
    pub overflowed: u64,
    /// Packets that were refused, by [`Refusal::index`] of the reason.
    pub refused: [u64; Refusal::COUNT],
}
