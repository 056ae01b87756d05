//! How a tensor is cut into blocks, and the form of a block in a packet. The same on all ranks.
//!
//! ```text
//!   tensor   |  server 0's range          |  server 1's         |      cut by fractions, at cache lines
//!            | block | block | block | bl |  block | ...               as many elements as a packet holds
//!   SeqNums  header, exponents, exponents, ..., block, block, ...      of one operation at one server, in this order
//! ```

use crate::Format;
use penstock_kernels::FixedPoint;
use penstock_types::DType;

/// The format in which blocks travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// Integers of 32 bits; float16 and bfloat16 in 16 bits where no bit of a block's largest elements is lost.
    Int32,
    /// Integers of 32 bits, whatever the tensor's type, in packets of one length that end in zeros: for switches. Blocks that
    /// are not finite bypass the switch, in packets of their own length.
    Padded,
    /// Integers of 16 bits, whatever the tensor's type: half the bytes of float32, and an error bound 2^16 times as wide.
    Int16,
    /// Elements in the tensor's own format; for aggregators that add floats.
    Float,
}

/// How operations of one element type are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) dtype: DType,
    /// `None`: elements travel in their own format.
    pub(crate) integers: Option<FixedPoint>,
    /// The most that a packet carries, a multiple of 64.
    payload_bytes: usize,
    is_padded: bool,
}

impl Layout {
    pub(crate) fn new(wire: Wire, dtype: DType, workers: u32, payload_bytes: usize) -> Layout {
        let integers = match wire {
            Wire::Int32 => Some(FixedPoint::new(dtype, workers)),
            Wire::Padded => Some(FixedPoint::with_integer(dtype, workers, DType::I32)),
            Wire::Int16 => Some(FixedPoint::with_integer(dtype, workers, DType::I16)),
            Wire::Float => None,
        };
        Layout { dtype, integers, payload_bytes, is_padded: wire == Wire::Padded }
    }

    /// Bytes of a packet that carries this many bytes of integers or exponents. The zeros that fill it up are the same on all
    /// ranks; their sum and maximum are zeros, which are not read.
    pub(crate) fn filled(&self, bytes: usize) -> usize {
        if self.is_padded { self.payload_bytes } else { bytes }
    }

    /// Bytes of the tensor in a block: a multiple of 16.
    pub(crate) fn block_bytes(&self) -> usize {
        let on_the_wire = self.integers.map_or(self.dtype, FixedPoint::integer).size();
        self.payload_bytes / on_the_wire * self.dtype.size()
    }

    /// Packets that a block takes in the tensor's own format.
    pub(crate) fn full_parts(&self) -> usize {
        self.block_bytes().div_ceil(self.payload_bytes)
    }

    /// Bytes of the tensor whose result is delivered together.
    pub(crate) fn piece_bytes(&self) -> usize {
        self.block_bytes() / self.full_parts()
    }

    /// Exponents that a packet holds.
    pub(crate) fn exponents_a_packet(&self) -> usize {
        self.payload_bytes / 2
    }

    /// The format of a block that travels as integers.
    pub(crate) fn integer_format(&self) -> Format {
        match self.integers.map(FixedPoint::integer) {
            Some(DType::I16) => Format::I16,
            _ => Format::I32,
        }
    }

    /// The format of a block that travels in the tensor's own format.
    pub(crate) fn float_format(&self) -> Format {
        match self.dtype {
            DType::F16 => Format::F16,
            DType::BF16 => Format::Bf16,
            _ => Format::F32,
        }
    }

    /// An integer type of an element's width, for swapping bytes.
    pub(crate) fn word(&self) -> DType {
        if self.dtype.size() == 2 { DType::I16 } else { DType::I32 }
    }
}

/// An operation's fingerprint as exponents: their maximum over all ranks shows whether all ranks agree.
///
/// Each 13 bits of the fingerprint's 80 are sent unchanged and negated, so that the maxima are the largest and the smallest
/// value of all ranks.
pub(crate) const HEADER_EXPONENTS: usize = 2 * PIECES;
const PIECES: usize = 7;
const PIECE_BITS: usize = 13;

pub(crate) fn header(fingerprint: u128) -> [i16; HEADER_EXPONENTS] {
    std::array::from_fn(|i| {
        let piece = (fingerprint >> (PIECE_BITS * (i / 2)) & ((1 << PIECE_BITS) - 1)) as i16;
        if i % 2 == 0 { piece } else { -piece }
    })
}

/// Another rank's fingerprint, if the maxima show that not all ranks have `own`. Exact if there are two different ones.
pub(crate) fn other_fingerprint(own: u128, maxima: &[i16]) -> Option<u128> {
    let mut other = 0u128;
    for (i, (pair, mine)) in maxima.as_chunks::<2>().0.iter().zip(header(own).as_chunks::<2>().0).enumerate() {
        let piece = if pair[0] != mine[0] { pair[0] } else { -pair[1] };
        other |= (piece as u128) << (PIECE_BITS * i);
    }
    (other != own).then_some(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks fill packets, as integers and as they are, and segments of plans need multiples of 16.
    #[test]
    fn blocks_fit_packets() {
        for payload in [64, 1408, 8832] {
            for wire in [Wire::Int32, Wire::Padded, Wire::Int16, Wire::Float] {
                for dtype in [DType::F32, DType::F16, DType::BF16] {
                    for workers in [2, 64] {
                        let layout = Layout::new(wire, dtype, workers, payload);
                        let elements = layout.block_bytes() / dtype.size();
                        assert!(layout.block_bytes().is_multiple_of(16));
                        let integer = layout.integers.map_or(dtype.size(), |fixed| fixed.integer().size());
                        assert_eq!(elements * integer, payload, "a full packet: {layout:?}");
                        assert!(layout.piece_bytes() <= payload, "{layout:?}");
                        assert_eq!(layout.piece_bytes() * layout.full_parts(), layout.block_bytes());
                        assert_eq!(layout.filled(2), if wire == Wire::Padded { payload } else { 2 });
                    }
                }
            }
        }
    }

    /// Any rank sees that another one has a different fingerprint, and which, wherever the two differ.
    #[test]
    fn headers_show_differences() {
        let values = [0, 1, (1 << 80) - 1, 0xfedc_0123_4567_89ab_cdef, 1 << 79, (1 << 79) - 1];
        for a in values {
            for b in values {
                let maxima: Vec<i16> = header(a).into_iter().zip(header(b)).map(|(a, b)| a.max(b)).collect();
                assert_eq!(other_fingerprint(a, &maxima), (a != b).then_some(b), "{a:#x} {b:#x}");
                assert_eq!(other_fingerprint(b, &maxima), (a != b).then_some(a));
            }
        }
    }
}
