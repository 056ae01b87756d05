//! A server's range of an operation.

use crate::Serial;
use crate::client::layout::Layout;
use penstock_kernels::Exponent;

/// One server's range of an operation.
pub(super) struct Side {
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) blocks: usize,
    /// The exponent of each block: first this rank's, in the end the maximum of all ranks.
    pub(super) exponents: Vec<i16>,
    /// Headers and exponents whose result has not come.
    pub(super) unagreed: usize,
    /// The index of its first piece.
    pub(super) first_piece: usize,
    /// The highest number of a result that has come.
    pub(super) last: Option<Serial>,
    /// The work behind its blocks has failed.
    pub(super) has_failed: bool,
}

impl Side {
    /// The result with this number has come.
    pub(super) fn heard_of(&mut self, result: Serial) {
        self.last = Some(self.last.map_or(result, |last| last.newest(result)));
    }

    /// Whether a block travels in the tensor's own format although others travel as integers.
    pub(super) fn is_full(&self, layout: &Layout, block: usize) -> bool {
        layout.integers.is_some() && self.exponents[block] == Exponent::NONFINITE.code()
    }

    /// Packets that a block takes, once its exponent is agreed on.
    pub(super) fn parts(&self, layout: &Layout, block: usize) -> usize {
        if !self.is_full(layout, block) {
            return 1;
        }
        self.part(layout, block, 0, 1).1.div_ceil(layout.piece_bytes())
    }

    /// Start and length of a part of a block, in bytes of the tensor. With one part it is the whole block.
    pub(super) fn part(&self, layout: &Layout, block: usize, part: usize, parts: usize) -> (usize, usize) {
        let block_start = block * layout.block_bytes();
        let block_len = layout.block_bytes().min(self.len - block_start);
        if parts == 1 {
            return (self.start + block_start, block_len);
        }
        let start = part * layout.piece_bytes();
        (self.start + block_start + start, layout.piece_bytes().min(block_len - start))
    }

    /// The blocks whose exponents a packet carries.
    pub(super) fn exponents_of(&self, layout: &Layout, packet: usize) -> std::ops::Range<usize> {
        let most = layout.exponents_a_packet();
        packet * most..self.blocks.min((packet + 1) * most)
    }
}
