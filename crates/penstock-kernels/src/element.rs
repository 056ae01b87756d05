//! How elements in memory become accumulators, and accumulators elements.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256i, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps, _mm256_cvtps_ph,
    _mm256_loadu_ps, _mm256_loadu_si256, _mm256_storeu_ps, _mm256_storeu_si256, _mm512_cvtph_ps, _mm512_cvtps_ph,
    _mm512_loadu_ps, _mm512_storeu_ps,
};

/// A type of element: `Bits` in memory, `Accumulator` in registers.
///
/// Both directions take whole arrays, because some instructions do.
pub(crate) trait Element {
    type Bits: Copy + Default;
    type Accumulator: Copy + Default;

    /// # Safety
    /// The caller is compiled for the instruction set that this type belongs to, if any.
    unsafe fn widen<const N: usize>(bits: [Self::Bits; N]) -> [Self::Accumulator; N];

    /// Rounds to nearest even; every NaN becomes the type's canonical one.
    ///
    /// # Safety
    /// As for `widen`.
    unsafe fn narrow<const N: usize>(values: [Self::Accumulator; N]) -> [Self::Bits; N];
}

/// bfloat16, element `i` in accumulator `i`.
pub(crate) struct Bf16;
/// bfloat16, in pairs: two neighbours lie in the halves of a 32-bit word, so that a shift widens the one, a mask the
/// other, and nothing need move between lanes. Accumulators hold the lower halves of all words first, then the upper
/// ones. For kernels that read and store the same type; from L2 a sum of two is 1.5 (AVX-512) to 2 (AVX2) times as
/// fast as with [`Bf16`], measured on a Zen 4 EPYC.
pub(crate) struct Bf16Pairs;
/// float16, in integer arithmetic.
pub(crate) struct PortableF16;
/// float16, by the conversions of F16C.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Avx2F16;
/// float16, by the conversions of AVX-512F.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Avx512F16;
/// A bool, as a byte that is 0 or 1.
#[derive(Clone, Copy, Default)]
pub(crate) struct Truth(pub(crate) u8);

/// `f` of every element. (`array::map` is not inlined where arrays are long, and then nothing is vectorised.)
#[inline(always)]
fn map<A: Copy, B: Copy + Default, const N: usize>(a: [A; N], f: impl Fn(A) -> B) -> [B; N] {
    let mut b = [B::default(); N];
    for i in 0..N {
        b[i] = f(a[i]);
    }
    b
}

macro_rules! as_they_are {
    ($($type:ty: $narrow:expr;)*) => {$(
        impl Element for $type {
            type Bits = $type;
            type Accumulator = $type;

            #[inline(always)]
            unsafe fn widen<const N: usize>(bits: [$type; N]) -> [$type; N] {
                bits
            }

            #[inline(always)]
            unsafe fn narrow<const N: usize>(values: [$type; N]) -> [$type; N] {
                map(values, $narrow)
            }
        }
    )*};
}

as_they_are! {
    f32: |x| if x.is_nan() { f32::NAN } else { x };
    f64: |x| if x.is_nan() { f64::NAN } else { x };
    i8: |x| x;
    i16: |x| x;
    i32: |x| x;
    i64: |x| x;
    u8: |x| x;
}

impl Element for Truth {
    type Bits = u8;
    type Accumulator = Truth;

    #[inline(always)]
    unsafe fn widen<const N: usize>(bits: [u8; N]) -> [Truth; N] {
        map(bits, |byte| Truth(byte.min(1)))
    }

    #[inline(always)]
    unsafe fn narrow<const N: usize>(values: [Truth; N]) -> [u8; N] {
        map(values, |truth| truth.0)
    }
}

impl Element for Bf16 {
    type Bits = u16;
    type Accumulator = f32;

    #[inline(always)]
    unsafe fn widen<const N: usize>(bits: [u16; N]) -> [f32; N] {
        map(bits, |bits| f32::from_bits(u32::from(bits) << 16))
    }

    #[inline(always)]
    unsafe fn narrow<const N: usize>(values: [f32; N]) -> [u16; N] {
        map(values, |value| (round_to_upper_half(value) >> 16) as u16)
    }
}

impl Element for Bf16Pairs {
    type Bits = u16;
    type Accumulator = f32;

    #[inline(always)]
    unsafe fn widen<const N: usize>(bits: [u16; N]) -> [f32; N] {
        const { assert!(N.is_multiple_of(2)) };
        let mut values = [0.0; N];
        for i in 0..N / 2 {
            // SAFETY: `bits` has elements `2 * i` and `2 * i + 1`.
            let word = unsafe { bits.as_ptr().cast::<u32>().add(i).read_unaligned() };
            values[i] = f32::from_bits(word << 16);
            values[N / 2 + i] = f32::from_bits(word & 0xffff_0000);
        }
        values
    }

    #[inline(always)]
    unsafe fn narrow<const N: usize>(values: [f32; N]) -> [u16; N] {
        const { assert!(N.is_multiple_of(2)) };
        let mut bits = [0; N];
        for i in 0..N / 2 {
            let lower = round_to_upper_half(values[i]) >> 16;
            let upper = round_to_upper_half(values[N / 2 + i]) & 0xffff_0000;
            // SAFETY: `bits` has elements `2 * i` and `2 * i + 1`.
            unsafe { bits.as_mut_ptr().cast::<u32>().add(i).write_unaligned(lower | upper) };
        }
        bits
    }
}

/// A bfloat16 in the upper half of the result; the lower half is arbitrary.
///
/// Adding half a unit of the last place that stays, less one if that place is even, carries exactly where the value
/// rounds up; out of the largest finite number it carries into infinity.
#[inline(always)]
fn round_to_upper_half(value: f32) -> u32 {
    let bits = value.to_bits();
    if value.is_nan() { BF16_NAN << 16 } else { bits.wrapping_add(0x7fff + (bits >> 16 & 1)) }
}

impl Element for PortableF16 {
    type Bits = u16;
    type Accumulator = f32;

    /// ```text
    ///            exponent, fraction       value
    /// denormal   0         f              f * 2^-24
    /// normal     e         f              the same fields in an f32 with the exponent moved by 127 - 15
    /// inf, NaN   31        f              the same with exponent 255
    /// ```
    #[inline(always)]
    unsafe fn widen<const N: usize>(bits: [u16; N]) -> [f32; N] {
        map(bits, |bits| {
            let magnitude = u32::from(bits & 0x7fff);
            let denormal = (magnitude as i32 as f32 * F16_DENORMAL_UNIT).to_bits();
            let normal = (magnitude << 13) + (112 << 23);
            let special = magnitude << 13 | 0x7f80_0000;
            let finite = if magnitude < 0x0400 { denormal } else { normal };
            let unsigned = if magnitude < 0x7c00 { finite } else { special };
            f32::from_bits(unsigned | u32::from(bits & 0x8000) << 16)
        })
    }

    /// Normal results round as in [`round_to_upper_half`]. For denormal ones the adder rounds: the last place of an f32 in
    /// 0.5..1 is 2^-24, which is the unit of f16's denormals.
    #[inline(always)]
    unsafe fn narrow<const N: usize>(values: [f32; N]) -> [u16; N] {
        map(values, |value| {
            let bits = value.to_bits();
            let magnitude = bits & 0x7fff_ffff;
            let denormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
            let normal = (magnitude.wrapping_add(0x0fff + (magnitude >> 13 & 1)) >> 13).wrapping_sub(112 << 10);
            let rounded = if magnitude < F16_SMALLEST_NORMAL { denormal } else { normal.min(0x7c00) };
            (if value.is_nan() { F16_NAN } else { rounded | bits >> 16 & 0x8000 }) as u16
        })
    }
}

#[cfg(target_arch = "x86_64")]
impl Element for Avx2F16 {
    type Bits = u16;
    type Accumulator = f32;

    #[inline(always)]
    unsafe fn widen<const N: usize>(bits: [u16; N]) -> [f32; N] {
        const { assert!(N.is_multiple_of(8)) };
        let mut values = [0.0; N];
        for i in (0..N).step_by(8) {
            // SAFETY: both arrays have elements `i..i + 8`; the caller is compiled for F16C.
            unsafe {
                let vector = _mm256_cvtph_ps(_mm_loadu_si128(bits.as_ptr().add(i).cast()));
                _mm256_storeu_ps(values.as_mut_ptr().add(i), vector);
            }
        }
        values
    }

    #[inline(always)]
    unsafe fn narrow<const N: usize>(values: [f32; N]) -> [u16; N] {
        const { assert!(N.is_multiple_of(8)) };
        let values = map(values, |x| if x.is_nan() { f32::NAN } else { x });
        let mut bits = [0; N];
        for i in (0..N).step_by(8) {
            // SAFETY: both arrays have elements `i..i + 8`; the caller is compiled for F16C.
            unsafe {
                let vector = _mm256_loadu_ps(values.as_ptr().add(i));
                let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(vector);
                _mm_storeu_si128(bits.as_mut_ptr().add(i).cast(), halves);
            }
        }
        bits
    }
}

#[cfg(target_arch = "x86_64")]
impl Element for Avx512F16 {
    type Bits = u16;
    type Accumulator = f32;

    #[inline(always)]
    unsafe fn widen<const N: usize>(bits: [u16; N]) -> [f32; N] {
        const { assert!(N.is_multiple_of(16)) };
        let mut values = [0.0; N];
        for i in (0..N).step_by(16) {
            // SAFETY: both arrays have elements `i..i + 16`; the caller is compiled for AVX-512F.
            unsafe {
                let vector = _mm512_cvtph_ps(_mm256_loadu_si256(bits.as_ptr().add(i).cast()));
                _mm512_storeu_ps(values.as_mut_ptr().add(i), vector);
            }
        }
        values
    }

    #[inline(always)]
    unsafe fn narrow<const N: usize>(values: [f32; N]) -> [u16; N] {
        const { assert!(N.is_multiple_of(16)) };
        let values = map(values, |x| if x.is_nan() { f32::NAN } else { x });
        let mut bits = [0; N];
        for i in (0..N).step_by(16) {
            // SAFETY: both arrays have elements `i..i + 16`; the caller is compiled for AVX-512F.
            unsafe {
                let vector = _mm512_loadu_ps(values.as_ptr().add(i));
                let halves: __m256i = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(vector);
                _mm256_storeu_si256(bits.as_mut_ptr().add(i).cast(), halves);
            }
        }
        bits
    }
}

/// The canonical NaN of float16: what the processor's conversion makes of `f32::NAN`.
const F16_NAN: u32 = 0x7e00;
/// The canonical NaN of bfloat16: the upper half of `f32::NAN`.
const BF16_NAN: u32 = 0x7fc0;
/// The smallest denormal of float16, 2^-24.
const F16_DENORMAL_UNIT: f32 = f32::from_bits((127 - 24) << 23);
/// The smallest normal number of float16, 2^-14, as the bits of an f32.
const F16_SMALLEST_NORMAL: u32 = (127 - 14) << 23;
