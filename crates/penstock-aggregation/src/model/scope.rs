//! What the model check explores.

use super::Shape;
use crate::Serial;
use crate::rules::Rules;

/// What may happen besides losses, duplicates, reordering, time-outs and restarts of the aggregator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Story {
    /// No cut link and no second epoch.
    Plain,
    /// Each node moves to the next epoch, one after the other, and the same SeqNums carry other blocks.
    Epochs,
    /// The link between worker 0 and the aggregator above it is cut for good, and worker 0 notices.
    Cut,
    /// In a row: the link between worker 1 and the row's aggregator is cut for good, and worker 1 notices.
    CutAbove,
    /// In a row: its aggregator is dead, and worker 1 notices. Worker 0 is to hear from the server through the rack.
    Dead,
    /// In a row: both aggregators are dead, and the workers notice.
    AllDead,
    /// The work behind the first buffer never ends.
    Late,
    /// The work behind the first buffer fails.
    Fails,
}

/// Which faults happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kinds {
    All,
    /// No time-outs and heartbeats while packets are in flight. These send packets of their own, which makes most of the
    /// states: a second fault costs a factor of 20 without them, and several hundred with them.
    Packets,
    /// Losses and restarts alone.
    Losses,
}

/// Results come apart from the blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Apart {
    /// The most blocks that the server holds.
    pub(super) limit: u32,
    /// The blocks that end buffers, a bit for each.
    pub(super) ends: u8,
}

/// What is explored.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scope {
    pub(super) shape: Shape,
    pub(super) story: Story,
    pub(super) blocks: u32,
    pub(super) window: u32,
    pub(super) start: Serial,
    /// The most faults on any one path.
    pub(super) faults: u8,
    /// The kinds of faults that may happen.
    pub(super) kinds: Kinds,
    pub(super) apart: Option<Apart>,
    pub(super) rules: Rules,
}

impl Scope {
    /// Whether a block is the last one of its buffer.
    pub(super) fn is_last(self, seq: Serial) -> bool {
        self.apart.is_some_and(|apart| apart.ends >> seq.ahead_of(self.start) & 1 == 1)
    }

    /// The blocks of the buffer that begins with this one.
    pub(super) fn buffer_from(self, first: Serial) -> impl Iterator<Item = Serial> {
        let mut is_over = false;
        (0..self.blocks)
            .map(move |i| first.plus(i))
            .take_while(move |seq| !std::mem::replace(&mut is_over, self.is_last(*seq)))
    }
}

pub(super) fn scope(story: Story, blocks: u32, faults: u8) -> Scope {
    // The second and third SeqNum lie on either side of the wrap-around.
    Scope {
        shape: Shape::Rack,
        story,
        blocks,
        window: 2,
        start: Serial(u32::MAX - 1),
        faults,
        kinds: Kinds::All,
        apart: None,
        rules: Rules::default(),
    }
}

/// Two rounds in one slot, either side of the wrap-around: small enough for faults to come together.
pub(super) fn one_slot(faults: u8) -> Scope {
    Scope { window: 1, start: Serial(u32::MAX), ..scope(Story::Plain, 2, faults) }
}
