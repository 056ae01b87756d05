//! A slot of an aggregator, and what a packet leads to.

use crate::Serial;
use crate::packet::{Format, Header, Kind};
use crate::rules::{Rule, Rules};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Slot {
    pub(super) tag: Option<Serial>,
    pub(super) have: u64,
    pub(super) format: Format,
    pub(super) exponent: i16,
    pub(super) length: u16,
    /// The slot holds the result instead of the sum, or, with results apart, that the server has accepted it.
    pub(super) is_result: bool,
    /// The blocks' FULL and LAST.
    pub(super) flags: u8,
    /// Children that requested this result, as a bitmap. A second request of a child resets it.
    pub(super) asked: u64,
}

pub(super) const EMPTY: Slot =
    Slot { tag: None, have: 0, format: Format::None, exponent: 0, length: 0, is_result: false, flags: 0, asked: 0 };

impl Slot {
    /// How far a SeqNum lies ahead of the newest one here.
    pub(super) fn ahead(&self, seq: Serial, rules: Rules) -> i32 {
        match self.tag {
            None => 1,
            Some(tag) if rules.hold(Rule::Serial) => seq.ahead_of(tag),
            Some(tag) => seq.0.cmp(&tag.0) as i32,
        }
    }
}

/// What a packet leads to, without borrows of the table.
#[derive(Debug)]
pub(crate) enum Decision {
    Nothing,
    Relay,
    Heartbeat,
    Sum {
        index: usize,
        seq: Serial,
    },
    /// Names children whose blocks are missing, to one child or to all.
    Missing {
        header: Header,
        child: Option<usize>,
    },
    /// The node itself requests the result.
    Ask {
        kind: Kind,
        seq: Serial,
    },
    Result {
        index: usize,
        child: usize,
    },
    /// The same of a result that came apart.
    Pulled {
        index: usize,
        child: usize,
    },
}
