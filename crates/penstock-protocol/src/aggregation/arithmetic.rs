//! How blocks are added. The machines move bytes; what adds them is passed in.

use super::packet::Format;

/// Adds blocks as they are on the wire: big-endian elements.
pub trait Arithmetic {
    /// Adds `block` to `sum`, element by element; both hold elements of `format` and are equally long.
    fn add(&self, format: Format, sum: &mut [u8], block: &[u8]);
}

/// Portable loops that the compiler turns into SIMD: integers wrap, exponents take the maximum, f16 and bf16 are added
/// in f32 and rounded once per addition.
#[derive(Clone, Copy, Debug, Default)]
pub struct WireArithmetic;

impl Arithmetic for WireArithmetic {
    fn add(&self, format: Format, sum: &mut [u8], block: &[u8]) {
        match format {
            Format::None => {}
            Format::I32 => {
                each(sum, block, |a, b| i32::from_be_bytes(a).wrapping_add(i32::from_be_bytes(b)).to_be_bytes())
            }
            Format::I16 => {
                each(sum, block, |a, b| i16::from_be_bytes(a).wrapping_add(i16::from_be_bytes(b)).to_be_bytes())
            }
            Format::Exponents => {
                each(sum, block, |a, b| i16::from_be_bytes(a).max(i16::from_be_bytes(b)).to_be_bytes());
            }
            Format::F32 => each(sum, block, |a, b| (f32::from_be_bytes(a) + f32::from_be_bytes(b)).to_be_bytes()),
            Format::F16 => halves(sum, block, penstock_kernels::f16_to_f32, penstock_kernels::f32_to_f16),
            Format::Bf16 => halves(sum, block, penstock_kernels::bf16_to_f32, penstock_kernels::f32_to_bf16),
        }
    }
}

fn each<const N: usize>(sum: &mut [u8], block: &[u8], combine: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    assert_eq!(sum.len(), block.len(), "blocks of one slot are equally long");
    for (a, b) in sum.as_chunks_mut::<N>().0.iter_mut().zip(block.as_chunks::<N>().0) {
        *a = combine(*a, *b);
    }
}

/// Piece by piece through the stack.
fn halves(sum: &mut [u8], block: &[u8], widen: fn(&mut [f32], &[u16]), narrow: fn(&mut [u16], &[f32])) {
    assert_eq!(sum.len(), block.len(), "blocks of one slot are equally long");
    const PIECE: usize = 256;
    let (mut bits, mut a, mut b) = ([0u16; PIECE], [0f32; PIECE], [0f32; PIECE]);
    for (sum, block) in sum.chunks_mut(2 * PIECE).zip(block.chunks(2 * PIECE)) {
        let n = sum.len() / 2;
        for (wide, bytes) in [(&mut a, &*sum), (&mut b, block)] {
            for (bit, byte) in bits.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *bit = u16::from_be_bytes(*byte);
            }
            widen(&mut wide[..n], &bits[..n]);
        }
        for (a, b) in a.iter_mut().zip(&b) {
            *a += *b;
        }
        narrow(&mut bits[..n], &a[..n]);
        for (byte, bit) in sum.as_chunks_mut::<2>().0.iter_mut().zip(&bits) {
            *byte = bit.to_be_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn added(format: Format, a: &[u8], b: &[u8]) -> Vec<u8> {
        let mut sum = a.to_vec();
        WireArithmetic.add(format, &mut sum, b);
        sum
    }

    /// Integers wrap, exponents take the maximum, floats are added, each in its own width and in big-endian.
    #[test]
    fn every_format() {
        let i32s = |values: [i32; 2]| values.map(i32::to_be_bytes).concat();
        assert_eq!(added(Format::I32, &i32s([i32::MAX, -7]), &i32s([1, 3])), i32s([i32::MIN, -4]));
        let i16s = |values: [i16; 2]| values.map(i16::to_be_bytes).concat();
        assert_eq!(added(Format::I16, &i16s([i16::MAX, -7]), &i16s([1, 3])), i16s([i16::MIN, -4]));
        assert_eq!(added(Format::Exponents, &i16s([i16::MIN, -7]), &i16s([-30, i16::MAX])), i16s([-30, i16::MAX]));
        let f32s = |values: [f32; 2]| values.map(f32::to_be_bytes).concat();
        assert_eq!(added(Format::F32, &f32s([0.1, -1.0]), &f32s([0.2, 4.0])), f32s([0.1 + 0.2, 3.0]));
        // 1.5 + 0.25 in f16 and in bf16, in a block longer than a piece.
        for (format, one_and_a_half, quarter, sum) in
            [(Format::F16, 0x3e00u16, 0x3400, 0x3f00), (Format::Bf16, 0x3fc0, 0x3e80, 0x3fe0)]
        {
            let many = |bits: u16| bits.to_be_bytes().repeat(300);
            assert_eq!(added(format, &many(one_and_a_half), &many(quarter)), many(sum), "{format:?}");
        }
    }
}
