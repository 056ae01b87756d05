//! What one end of a pair remembers of an operation: what was granted in it, and which bytes of its messages are here.

use super::StreamId;
use crate::frame::{FrameError, Header, MIN_FRAME_BYTES, MessageKey, NumberSpace};
use crate::ranges::Ranges;
use penstock_types::{GroupId, OpSeq};
use std::collections::{BTreeMap, HashMap};
use std::ops::{AddAssign, Range, SubAssign};

/// What the receiver knows of the operation that a frame belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpStatus {
    /// Not posted here yet.
    Early,
    /// Posted here and not finished.
    Active,
    /// Finished here: every further frame of it is a duplicate.
    Retired,
}

/// What to do with the payload of a frame whose header has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Read the payload to its place in the operation.
    Take,
    /// Another stream is bringing the same bytes: read the payload to a separate buffer. The copy that is complete first wins.
    Race,
    /// Read the payload and discard it.
    Discard,
}

/// Where the payload of a frame goes, as it was decided when the header arrived. It holds until the frame is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Landing<P> {
    /// To its place in the operation.
    Place(P),
    /// To a buffer of the reader's.
    Stage,
    /// Nowhere: the payload is read and discarded.
    Discard,
}

impl<P> Landing<P> {
    /// The same landing, with the place in other words.
    pub fn map<Q>(self, place: impl FnOnce(P) -> Q) -> Landing<Q> {
        match self {
            Landing::Place(known) => Landing::Place(place(known)),
            Landing::Stage => Landing::Stage,
            Landing::Discard => Landing::Discard,
        }
    }
}

/// One operation's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct OpKey {
    pub(super) group: GroupId,
    pub(super) space: NumberSpace,
    pub(super) op: OpSeq,
}

impl OpKey {
    pub(super) fn of(key: &MessageKey) -> OpKey {
        OpKey { group: key.group, space: key.space, op: key.op }
    }
}

/// What is remembered of an operation until it is retired.
#[derive(Debug, Default)]
pub(super) struct Op {
    /// Messages that the peer has granted and that were not issued here yet.
    pub(super) granted: Ranges,
    /// Messages that this side has granted.
    pub(super) given: Ranges,
    pub(super) incoming: HashMap<u32, Incoming>,
    /// How many of `incoming` came by reference, were not granted before, and are not read.
    pub(super) unasked: usize,
}

impl Op {
    /// How many records this operation holds that the peer can cause without credit.
    pub(super) fn remembered(&self) -> Remembered {
        Remembered { grants: self.granted.count(), unasked: self.unasked }
    }
}

/// Records that the peer causes without credit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Remembered {
    /// Ranges of messages that were granted and not issued.
    pub(super) grants: usize,
    /// References that were not asked for.
    pub(super) unasked: usize,
}

impl AddAssign for Remembered {
    fn add_assign(&mut self, other: Remembered) {
        self.grants += other.grants;
        self.unasked += other.unasked;
    }
}

impl SubAssign for Remembered {
    fn sub_assign(&mut self, other: Remembered) {
        self.grants -= other.grants;
        self.unasked -= other.unasked;
    }
}

/// An incoming message: which of its bytes are here, and which are arriving.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) total: u64,
    /// The message came by reference: no data may follow.
    pub(super) by_reference: bool,
    /// The message is counted in [`Op::unasked`].
    pub(super) is_unasked: bool,
    pub(super) done: Ranges,
    /// Frames seen but not whole, by offset.
    pub(super) arriving: BTreeMap<u64, Arriving>,
}

#[derive(Debug)]
pub(super) struct Arriving {
    pub(super) len: u32,
    /// The stream that has claimed the range: it reads the frame to its place, or has brought it whole. `None` when that stream was
    /// lost and touches the range no more.
    pub(super) on: Option<StreamId>,
}

impl Incoming {
    pub(super) fn new(total: u64) -> Incoming {
        Incoming { total, by_reference: false, is_unasked: false, done: Ranges::default(), arriving: BTreeMap::new() }
    }

    /// A frame starts to arrive. Its sender cuts a message once, so the frame equals one that was seen, or overlaps none. Only
    /// the last frame may be short, which bounds the records.
    pub(super) fn arrive(&mut self, id: StreamId, header: &Header) -> Result<Arrival, FrameError> {
        let wrong = FrameError::Range { offset: header.offset, length: header.length, total: header.total };
        if self.by_reference {
            return Err(FrameError::OutOfTurn("data of a message that came by reference"));
        }
        let span = span(header);
        let is_short = header.length < MIN_FRAME_BYTES && header.offset + u64::from(header.length) < header.total;
        if header.total != self.total || is_short || (header.length == 0 && header.total > 0) {
            return Err(wrong);
        }
        if self.done.covers(&span) {
            return Ok(Arrival::Discard);
        }
        if let Some((offset, arriving)) = self.arriving.range_mut(..span.end).next_back()
            && offset + u64::from(arriving.len.max(1)) > span.start
        {
            if (*offset, arriving.len) != (header.offset, header.length) {
                return Err(wrong);
            }
            if arriving.on.is_some() {
                return Ok(Arrival::Race);
            }
            arriving.on = Some(id);
            return Ok(Arrival::Take);
        }
        if self.done.overlaps(&span) {
            return Err(wrong);
        }
        self.arriving.insert(header.offset, Arriving { len: header.length, on: Some(id) });
        Ok(Arrival::Take)
    }

    /// A stream is gone, and with it what it was reading.
    pub(super) fn lose(&mut self, stream: StreamId) {
        for arriving in self.arriving.values_mut().filter(|arriving| arriving.on == Some(stream)) {
            arriving.on = None;
        }
    }
}

/// The byte range of a message that a data frame brings; for an empty message, one byte that does not exist.
pub(super) fn span(header: &Header) -> Range<u64> {
    header.offset..header.offset + u64::from(header.length.max(1))
}

/// The messages that a grant is for.
pub(super) fn granted_span(header: &Header) -> Range<u64> {
    let first = u64::from(header.key.message);
    first..first + header.offset.min(u64::from(u32::MAX) + 1 - first)
}
