//! Results on their way down, where these come apart from the blocks: the newest of each place, for children that lose them.

use super::{Decision, Table};
use crate::Serial;
use crate::packet::{HEADER_BYTES, Header, Packet};
use crate::rules::Refusal;

/// As many results as the window has numbers, beside the slots. What is here may be lost at any time: the server has it.
#[derive(Clone, Debug)]
pub(super) struct Pulls {
    /// The number and the length of each.
    places: Vec<Option<(Serial, u16)>>,
    headers: Vec<[u8; HEADER_BYTES]>,
    blocks: Vec<u8>,
    block_bytes: usize,
}

impl Pulls {
    pub(super) fn new(places: usize, block_bytes: usize) -> Pulls {
        Pulls {
            places: vec![None; places],
            headers: vec![[0; HEADER_BYTES]; places],
            blocks: vec![0; places * block_bytes],
            block_bytes,
        }
    }

    /// What [`Pulls::new`] takes.
    pub(super) fn memory_bytes(places: usize, block_bytes: usize) -> usize {
        places.saturating_mul(block_bytes)
    }

    pub(super) fn bytes(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn keep(&mut self, index: usize, packet: &Packet<'_>, bytes: &[u8]) {
        let Packet { header, payload, .. } = packet;
        let is_old = self.places[index].is_some_and(|(number, _)| number.is_newer_than(header.seq));
        if is_old || payload.len() > self.block_bytes {
            return;
        }
        self.places[index] = Some((header.seq, payload.len() as u16));
        self.headers[index].copy_from_slice(&bytes[..HEADER_BYTES]);
        let start = index * self.block_bytes;
        self.blocks[start..start + payload.len()].copy_from_slice(payload);
    }

    pub(super) fn get(&self, index: usize) -> (&[u8; HEADER_BYTES], &[u8]) {
        let length = self.places[index].map_or(0, |(_, length)| usize::from(length));
        (&self.headers[index], &self.blocks[index * self.block_bytes..][..length])
    }

    #[cfg(test)]
    pub(super) fn digest(&self, state: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        let kept = (0..self.places.len()).filter(|index| self.places[*index].is_some());
        kept.for_each(|index| (index, self.places[index], self.get(index)).hash(state));
    }
}

impl Table {
    /// A child pulls a result: it is here, or the node above may have it.
    pub(super) fn pull(&self, child: usize, header: &Header) -> Result<Decision, Refusal> {
        let pulls = self.pulls.as_ref().ok_or(Refusal::Kind)?;
        let index = self.slot_of(header.seq)?;
        match pulls.places[index] {
            Some((number, _)) if number == header.seq => Ok(Decision::Pulled { index, child }),
            Some((number, _)) if number.is_newer_than(header.seq) => Err(Refusal::Stale),
            _ => Ok(Decision::Ask { kind: header.kind, seq: header.seq }),
        }
    }
}
