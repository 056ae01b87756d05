//! What a rank tells at its end in a channel or a group: what it did there, and what still counts.

use super::{FrameError, Header, Kind, MessageKey, NumberSpace};
use crate::fingerprint::{Fingerprint, Layout, Order};
use penstock_types::{ChannelId, OpSeq};
use std::collections::BTreeMap;

/// Up to where the collectives of a group's channels still count although the group, or one channel, has failed: the reporter has
/// ended so many of each channel, and still delivers its part of them. Of a channel that is not named, none count.
///
/// ```text
///   channel (4), collectives (8) | of the next channel | ...
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts(pub BTreeMap<ChannelId, u64>);

impl Counts {
    /// How many channels of a group may be open on a rank at a time.
    pub const MOST_CHANNELS: usize = 1024;
    pub(crate) const RECORD_BYTES: usize = 12;
    pub(super) const MAX_BYTES: u32 = (Counts::MOST_CHANNELS * Counts::RECORD_BYTES) as u32;

    /// How many of a channel.
    #[must_use]
    pub fn of(&self, channel: ChannelId) -> u64 {
        self.0.get(&channel).copied().unwrap_or(0)
    }

    /// Whether a collective is among those that count. Messages between two ranks never are.
    #[must_use]
    pub fn include(&self, key: &MessageKey) -> bool {
        matches!(key.space, NumberSpace::Collective(channel) if key.op.0 < self.of(channel))
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        debug_assert!(self.0.len() <= Counts::MOST_CHANNELS, "a group has no more channels");
        let mut out = Vec::with_capacity(self.0.len() * Counts::RECORD_BYTES);
        for (channel, count) in &self.0 {
            out.extend(channel.0.to_le_bytes());
            out.extend(count.to_le_bytes());
        }
        out
    }

    pub(crate) fn decode(records: &[u8]) -> Counts {
        let one = |record: &[u8]| {
            let channel = u32::from_le_bytes(record[..4].try_into().expect("4 bytes"));
            (ChannelId(channel), u64::from_le_bytes(record[4..].try_into().expect("8 bytes")))
        };
        Counts(records.chunks_exact(Counts::RECORD_BYTES).map(one).collect())
    }
}

/// What a rank did in a channel that it has closed, or in a group that it has left, for the ranks that are still in it. They compare it with what they did
/// themselves; the rank that left answers no probes any more.
///
/// ```text
///   collectives (8) | place (8), what (8), order (2), sizes (4) of an operation | of the next one | ...
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Farewell {
    /// How many collectives the rank has issued in the channel.
    pub collectives: u64,
    /// Its last collectives, at most [`Farewell::MOST`]. Some may be missing.
    pub last: Vec<(OpSeq, Fingerprint)>,
    /// The rank leaves the group.
    pub leaves_group: bool,
}

impl Farewell {
    /// Few enough to send to every rank at the end of every channel. A rank that still waits for one that has left is seldom far
    /// behind, since most collectives end with frames from all ranks.
    pub const MOST: usize = 100;
    const RECORD_BYTES: usize = 22;
    /// The longest payload of a `Left` frame.
    pub(crate) const MAX_BYTES: u32 = (8 + Farewell::MOST * Farewell::RECORD_BYTES) as u32;

    pub(crate) fn encode(&self) -> Vec<u8> {
        debug_assert!(self.last.len() <= Farewell::MOST, "as its documentation says");
        let mut out = self.collectives.to_le_bytes().to_vec();
        for (op, fingerprint) in &self.last {
            out.extend(op.0.to_le_bytes());
            out.extend(fingerprint.what.to_le_bytes());
            out.extend(fingerprint.layout.order.0.to_le_bytes());
            out.extend(fingerprint.layout.sizes.to_le_bytes());
        }
        out
    }

    pub(crate) fn decode(header: &Header, payload: &[u8]) -> Result<Farewell, FrameError> {
        let wrong = FrameError::Length { kind: Kind::Left, length: payload.len() as u32 };
        let Some((collectives, records)) = payload.split_first_chunk() else { return Err(wrong) };
        if records.len() % Farewell::RECORD_BYTES != 0 {
            return Err(wrong);
        }
        let u64_of = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
        let last = records.chunks_exact(Farewell::RECORD_BYTES).map(|record| {
            let order = Order(u16::from_le_bytes(record[16..18].try_into().expect("2 bytes")));
            let sizes = u32::from_le_bytes(record[18..22].try_into().expect("4 bytes"));
            (OpSeq(u64_of(&record[..8])), Fingerprint { what: u64_of(&record[8..16]), layout: Layout { order, sizes } })
        });
        let leaves_group = header.offset != 0;
        Ok(Farewell { collectives: u64::from_le_bytes(*collectives), last: last.collect(), leaves_group })
    }
}
