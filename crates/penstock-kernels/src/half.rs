//! Conversions between blocks and 16-bit floats by instructions that know those: AVX512-FP16 and AVX512-BF16.
//!
//! Inline assembly, since the intrinsics for float16 are not stable in Rust 1.89, and since the loop around is then compiled
//! for AVX-512BW as all others are; the [`Level`](crate::Level) says whether the processor has the rest.

use std::arch::asm;
use std::arch::x86_64::{
    __m512, __m512i, _mm512_and_si512, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_or_si512, _mm512_set1_epi16,
    _mm512_set1_epi32, _mm512_srai_epi16, _mm512_storeu_si512,
};

use crate::block::Block;
use crate::element::{Element, PortableF16};
use crate::operation::Last;

/// float16 to int16, as their bits: `value / unit`, within `largest`, to nearest even.
#[derive(Clone, Copy)]
pub(crate) struct F16ToCounts {
    power: i16,
    largest: i16,
    least: i16,
}

impl F16ToCounts {
    /// `None` for a block of zeros.
    pub(crate) fn new(block: Block) -> Option<F16ToCounts> {
        // SAFETY: `PortableF16` runs anywhere. These are integers that float16 holds.
        let float16 = |integer: f32| unsafe { PortableF16::narrow([integer])[0].cast_signed() };
        let largest = block.format().largest() as f32;
        (block.unit() > 0.0).then(|| F16ToCounts {
            power: float16(-block.unit_exponent() as f32),
            largest: float16(largest),
            least: float16(-largest),
        })
    }
}

impl Last<i16> for F16ToCounts {
    /// A product below float16's normal numbers is rounded to a denormal one, and becomes 0 as it would have; beyond the
    /// largest it is infinite, and saturates. A minimum with a NaN is its second operand.
    #[inline(always)]
    unsafe fn apply<const N: usize>(self, values: [i16; N]) -> [i16; N] {
        const { assert!(N.is_multiple_of(32)) };
        let mut counts = [0; N];
        for i in (0..N).step_by(32) {
            // SAFETY: both arrays have elements `i..i + 32`; the caller runs on AVX512-FP16, compiled for AVX-512BW.
            unsafe {
                let vector = scale_to_integers(
                    _mm512_loadu_si512(values.as_ptr().add(i).cast()),
                    _mm512_set1_epi16(self.power),
                    _mm512_set1_epi16(self.least),
                    _mm512_set1_epi16(self.largest),
                );
                _mm512_storeu_si512(counts.as_mut_ptr().add(i).cast(), vector);
            }
        }
        counts
    }
}

/// int16 to float16, as their bits: `count * unit`, rounded once.
///
/// A count is `1024 * high + low`, and `factor` is 1024 units. `1 + low / 1024` is the float16 with these fraction bits, and
/// `(high - 1) * factor` is exact, of at most 6 bits. Fused, the one times `factor` plus the other is `count * unit`, rounded.
#[derive(Clone, Copy)]
pub(crate) struct F16FromCounts {
    factor: i16,
}

impl F16FromCounts {
    /// `None` unless `factor` and 33 times `factor` are float16 numbers.
    pub(crate) fn new(block: Block) -> Option<F16FromCounts> {
        let power = block.unit_exponent() + 10;
        let factor = if power < -14 { 1 << (power + 24).clamp(0, 9) } else { (power + 15) << 10 };
        (-24..=10).contains(&power).then_some(F16FromCounts { factor: factor as i16 })
    }
}

impl Last<i16> for F16FromCounts {
    #[inline(always)]
    unsafe fn apply<const N: usize>(self, counts: [i16; N]) -> [i16; N] {
        const { assert!(N.is_multiple_of(32)) };
        let mut values = [0; N];
        for i in (0..N).step_by(32) {
            // SAFETY: both arrays have elements `i..i + 32`; the caller runs on AVX512-FP16, compiled for AVX-512BW.
            unsafe {
                let count = _mm512_loadu_si512(counts.as_ptr().add(i).cast());
                let fraction = _mm512_and_si512(count, _mm512_set1_epi16(0x3ff));
                let low = _mm512_or_si512(fraction, _mm512_set1_epi16(0x3c00));
                let vector = combine(_mm512_srai_epi16::<10>(count), low, _mm512_set1_epi16(self.factor));
                _mm512_storeu_si512(values.as_mut_ptr().add(i).cast(), vector);
            }
        }
        values
    }
}

/// int16, its bytes swapped if `SWAP`, to bfloat16, as their bits: `count * unit`, rounded once, where no result but 0 is
/// denormal.
#[derive(Clone, Copy)]
pub(crate) struct Bf16FromCounts<const SWAP: bool> {
    /// `Block::origin`.
    pub(crate) origin: f32,
}

impl<const SWAP: bool> Last<i16> for Bf16FromCounts<SWAP> {
    #[inline(always)]
    unsafe fn apply<const N: usize>(self, counts: [i16; N]) -> [i16; N] {
        const { assert!(N.is_multiple_of(32)) };
        let mut values = [0; N];
        for i in (0..N).step_by(32) {
            // SAFETY: both arrays have elements `i..i + 32`; the caller runs on AVX512-BF16, VBMI and VNNI, compiled for
            // AVX-512BW.
            unsafe {
                let count = _mm512_loadu_si512(counts.as_ptr().add(i).cast());
                let order = _mm512_loadu_si512(halves_abreast(SWAP).as_ptr().cast());
                let vector = bf16_from_counts(count, order, _mm512_set1_epi32(self.origin.to_bits().cast_signed()));
                _mm512_storeu_si512(values.as_mut_ptr().add(i).cast(), vector);
            }
        }
        values
    }
}

/// The numbers of a vector's bytes, when word `16 + i` comes to lie behind word `i`, with their bytes swapped if `swap`.
const fn halves_abreast(swap: bool) -> &'static [u8; 64] {
    const fn bytes(swap: usize) -> [u8; 64] {
        let mut bytes = [0; 64];
        let mut i = 0;
        while i < 64 {
            let word = i / 4 + i / 2 % 2 * 16;
            bytes[i] = (2 * word + (i + swap) % 2) as u8;
            i += 1;
        }
        bytes
    }
    if swap { &const { bytes(1) } } else { &const { bytes(0) } }
}

/// bfloat16 to store where no value is NaN and none but 0 denormal: the instruction would make those 0.
pub(crate) struct NormalBf16;

impl Element for NormalBf16 {
    type Bits = u16;
    type Accumulator = f32;

    #[inline(always)]
    unsafe fn widen<const N: usize>(_: [u16; N]) -> [f32; N] {
        unreachable!("it is only stored")
    }

    #[inline(always)]
    unsafe fn narrow<const N: usize>(values: [f32; N]) -> [u16; N] {
        const { assert!(N.is_multiple_of(32)) };
        let mut bits = [0; N];
        for i in (0..N).step_by(32) {
            // SAFETY: both arrays have elements `i..i + 32`; the caller runs on AVX512-BF16, compiled for AVX-512BW.
            unsafe {
                let lower = _mm512_loadu_ps(values.as_ptr().add(i));
                let upper = _mm512_loadu_ps(values.as_ptr().add(i + 16));
                _mm512_storeu_si512(bits.as_mut_ptr().add(i).cast(), round_to_bf16(lower, upper));
            }
        }
        bits
    }
}

/// `values * 2^power`, from `least` to `largest`, as integers; vectors of float16.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn scale_to_integers(values: __m512i, power: __m512i, least: __m512i, largest: __m512i) -> __m512i {
    let mut vector = values;
    // SAFETY: the caller runs on AVX512-FP16.
    unsafe {
        asm!(
            "vscalefph {vector}, {vector}, {power}",
            "vminph {vector}, {vector}, {largest}",
            "vmaxph {vector}, {vector}, {least}",
            "vcvtph2w {vector}, {vector}",
            vector = inout(zmm_reg) vector,
            power = in(zmm_reg) power,
            least = in(zmm_reg) least,
            largest = in(zmm_reg) largest,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    vector
}

/// `low * factor + (high - 1) * factor`, where `high` are integers; the others are float16.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn combine(high: __m512i, low: __m512i, factor: __m512i) -> __m512i {
    let mut vector = low;
    // SAFETY: the caller runs on AVX512-FP16.
    unsafe {
        asm!(
            "vcvtw2ph {high}, {high}",
            "vfmsub213ph {high}, {factor}, {factor}",
            "vfmadd213ph {vector}, {factor}, {high}",
            vector = inout(zmm_reg) vector,
            high = inout(zmm_reg) high => _,
            factor = in(zmm_reg) factor,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    vector
}

/// As bfloat16, after `order` has put the two halves of `counts` abreast in 32-bit words. A product of a word's halves with
/// (1, 0) or (0, 1) is the one or the other half; it is added to `origin` as an integer, and that is taken off as a float.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn bf16_from_counts(counts: __m512i, order: __m512i, origin: __m512i) -> __m512i {
    let vector;
    // SAFETY: the caller runs on AVX512-BF16, VBMI and VNNI.
    unsafe {
        asm!(
            "vpermb {counts}, {order}, {counts}",
            "vpdpwssd {lower}, {counts}, {first}",
            "vpdpwssd {upper}, {counts}, {second}",
            "vsubps {lower}, {lower}, {origin}",
            "vsubps {upper}, {upper}, {origin}",
            "vcvtne2ps2bf16 {lower}, {upper}, {lower}",
            lower = inout(zmm_reg) origin => vector,
            upper = inout(zmm_reg) origin => _,
            counts = inout(zmm_reg) counts => _,
            order = in(zmm_reg) order,
            first = in(zmm_reg) _mm512_set1_epi32(1),
            second = in(zmm_reg) _mm512_set1_epi32(1 << 16),
            origin = in(zmm_reg) origin,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    vector
}

/// The float32 of `lower`, then those of `upper`, as bfloat16.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn round_to_bf16(lower: __m512, upper: __m512) -> __m512i {
    let vector: __m512i;
    // SAFETY: the caller runs on AVX512-BF16.
    unsafe {
        asm!(
            "vcvtne2ps2bf16 {vector}, {upper}, {lower}",
            vector = lateout(zmm_reg) vector,
            upper = in(zmm_reg) upper,
            lower = in(zmm_reg) lower,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    vector
}
