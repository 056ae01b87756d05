//! How blocks are added, at the rates of `penstock-kernels`.
//!
//! Integers and exponents lie in the machine's byte order while they are added, and are swapped when they come and when
//! they leave. Floats stay as they are on the wire, each child's block apart, until all can be added in order.

use super::packet::Format;
use penstock_kernels::{ByteOrder, add_integers, sum_f32, swap_bytes, swap_bytes_in_place};
use penstock_types::DType;

/// Begins a sum of integers or exponents with a block.
pub(super) fn begin(format: Format, sum: &mut [u8], block: &[u8]) {
    swap_bytes(integer(format), sum, block);
}

/// Adds a block to a sum of integers, wrapping, or takes the maximum of exponents. Whether an integer overflowed: then
/// some worker sent more than its share (`docs/design/quantisation.md`).
pub(super) fn add(format: Format, sum: &mut [u8], block: &[u8]) -> bool {
    if format != Format::Exponents {
        return add_integers(integer(format), sum, block, ByteOrder::Big);
    }
    assert_eq!(sum.len(), block.len(), "blocks of one slot are equally long");
    for (most, other) in sum.as_chunks_mut::<2>().0.iter_mut().zip(block.as_chunks::<2>().0) {
        *most = i16::from_ne_bytes(*most).max(i16::from_be_bytes(*other)).to_ne_bytes();
    }
    false
}

/// Brings a sum of integers or exponents into the order of the wire.
pub(super) fn finish(format: Format, sum: &mut [u8]) {
    swap_bytes_in_place(integer(format), sum);
}

/// The sum of blocks of floats, from left to right; all are as on the wire. f16 and bf16 are added in f32 and rounded after
/// each addition. A NaN comes out as the kernels' NaN.
pub(super) fn sum_floats(format: Format, sum: &mut [u8], blocks: &[&[u8]]) {
    match format {
        Format::F16 => halves(sum, blocks, penstock_kernels::f16_to_f32, penstock_kernels::f32_to_f16),
        Format::Bf16 => halves(sum, blocks, penstock_kernels::bf16_to_f32, penstock_kernels::f32_to_bf16),
        _ => sum_f32(sum, blocks, ByteOrder::Big),
    }
}

fn integer(format: Format) -> DType {
    if format == Format::I32 { DType::I32 } else { DType::I16 }
}

/// Piece by piece through the stack. No haste: only blocks that are not finite travel so.
fn halves(sum: &mut [u8], blocks: &[&[u8]], widen: fn(&mut [f32], &[u16]), narrow: fn(&mut [u16], &[f32])) {
    const PIECE: usize = 256;
    let (mut bits, mut total, mut term) = ([0u16; PIECE], [0f32; PIECE], [0f32; PIECE]);
    for (at, sum) in sum.chunks_mut(2 * PIECE).enumerate() {
        let n = sum.len() / 2;
        for (i, block) in blocks.iter().enumerate() {
            for (bit, byte) in bits.iter_mut().zip(block[2 * PIECE * at..][..2 * n].as_chunks::<2>().0) {
                *bit = u16::from_be_bytes(*byte);
            }
            widen(if i == 0 { &mut total[..n] } else { &mut term[..n] }, &bits[..n]);
            if i > 0 {
                total.iter_mut().zip(&term).for_each(|(total, term)| *total += *term);
                narrow(&mut bits[..n], &total[..n]);
                widen(&mut total[..n], &bits[..n]);
            }
        }
        narrow(&mut bits[..n], &total[..n]);
        for (byte, bit) in sum.as_chunks_mut::<2>().0.iter_mut().zip(&bits) {
            *byte = bit.to_be_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn added(format: Format, a: &[u8], b: &[u8]) -> (Vec<u8>, bool) {
        let mut sum = vec![0xee; a.len()];
        if format.is_float() {
            sum_floats(format, &mut sum, &[a, b]);
            return (sum, false);
        }
        begin(format, &mut sum, a);
        let overflow = add(format, &mut sum, b);
        finish(format, &mut sum);
        (sum, overflow)
    }

    /// Integers wrap and say so, exponents take the maximum, floats are added, each in its own width and in big-endian.
    #[test]
    fn every_format() {
        let i32s = |values: [i32; 2]| values.map(i32::to_be_bytes).concat();
        assert_eq!(added(Format::I32, &i32s([i32::MAX, -7]), &i32s([1, 3])), (i32s([i32::MIN, -4]), true));
        assert_eq!(added(Format::I32, &i32s([i32::MAX, -7]), &i32s([0, 3])), (i32s([i32::MAX, -4]), false));
        let i16s = |values: [i16; 2]| values.map(i16::to_be_bytes).concat();
        assert_eq!(added(Format::I16, &i16s([-7, i16::MIN]), &i16s([3, -1])), (i16s([-4, i16::MAX]), true));
        let exponents = added(Format::Exponents, &i16s([i16::MIN, -7]), &i16s([-30, i16::MAX]));
        assert_eq!(exponents, (i16s([-30, i16::MAX]), false));
        let f32s = |values: [f32; 2]| values.map(f32::to_be_bytes).concat();
        assert_eq!(added(Format::F32, &f32s([0.1, -1.0]), &f32s([0.2, 4.0])).0, f32s([0.1 + 0.2, 3.0]));
        // 1.5 + 0.25 in f16 and in bf16, in a block longer than a piece.
        for (format, one_and_a_half, quarter, sum) in
            [(Format::F16, 0x3e00u16, 0x3400, 0x3f00), (Format::Bf16, 0x3fc0, 0x3e80, 0x3fe0)]
        {
            let many = |bits: u16| bits.to_be_bytes().repeat(300);
            assert_eq!(added(format, &many(one_and_a_half), &many(quarter)).0, many(sum), "{format:?}");
        }
    }

    /// f16 and bf16 are rounded after each addition, so that it does not matter which node adds which two.
    #[test]
    fn halves_round_each_time() {
        // 2048 + 1 + 1 in f16 and 256 + 1 + 1 in bf16: each 1 is half a unit, and rounds to even.
        for (format, large, one) in [(Format::F16, 0x6800u16, 0x3c00u16), (Format::Bf16, 0x4380, 0x3f80)] {
            let mut sum = [0; 2];
            sum_floats(format, &mut sum, &[&large.to_be_bytes(), &one.to_be_bytes(), &one.to_be_bytes()]);
            assert_eq!(sum, large.to_be_bytes(), "{format:?}");
        }
    }
}
