//! What a rank tells at its end in a group: what it did there.

use super::{FrameError, Kind};
use crate::fingerprint::{Fingerprint, Layout, Order};
use penstock_types::OpSeq;

/// What a rank did in a group that it has left, for the ranks that are still in it. They compare it with what they did
/// themselves; the rank that left answers no probes any more.
///
/// ```text
///   collectives (8) | place (8), what (8), order (2), sizes (4) of an operation | of the next one | ...
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Farewell {
    /// How many collectives the rank has issued in the group.
    pub collectives: u64,
    /// Its last collectives, at most [`Farewell::MOST`]. Some may be missing.
    pub last: Vec<(OpSeq, Fingerprint)>,
}

impl Farewell {
    /// Few enough to send to every rank at the end of every group. A rank that still waits for one that has left is seldom far
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

    pub(crate) fn decode(payload: &[u8]) -> Result<Farewell, FrameError> {
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
        Ok(Farewell { collectives: u64::from_le_bytes(*collectives), last: last.collect() })
    }
}
