//! Element types: how elements in memory become accumulators, and back.

use std::marker::PhantomData;

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256i, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps, _mm256_cvtps_epi32,
    _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_packs_epi32, _mm256_permute4x64_epi64,
    _mm256_storeu_ps, _mm256_storeu_si256, _mm512_cvtph_ps, _mm512_cvtps_epi32, _mm512_cvtps_ph, _mm512_loadu_ps,
    _mm512_packs_epi32, _mm512_permutexvar_epi64, _mm512_setr_epi64, _mm512_storeu_ps, _mm512_storeu_si512,
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

    /// The same for values that are never NaN.
    ///
    /// # Safety
    /// As for `widen`.
    #[inline(always)]
    unsafe fn narrow_numbers<const N: usize>(values: [Self::Accumulator; N]) -> [Self::Bits; N] {
        // SAFETY: as for this function.
        unsafe { Self::narrow(values) }
    }
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

/// A type whose bytes lie in memory in the other order.
pub(crate) struct Swapped<T>(PhantomData<T>);
/// A type to store values that are never NaN.
pub(crate) struct Numbers<E>(PhantomData<E>);
/// An integer that counts units: `T` in memory, its bytes swapped if `SWAP`, and in registers the f32 nearest to it.
pub(crate) struct Counts<T, R, const SWAP: bool>(PhantomData<(T, R)>);

/// How [`Counts`] of type `T` come from f32.
pub(crate) trait Round<T> {
    /// Rounds to nearest even.
    ///
    /// # Safety
    /// The values are in range of `T`, none is NaN, and the caller is compiled for the instruction set that this type
    /// belongs to, if any.
    unsafe fn round<const N: usize>(values: [f32; N]) -> [T; N];
}

/// An integer type of [`Counts`].
pub(crate) trait Count: Copy + Default {
    fn to_f32(self) -> f32;

    fn swap_bytes(self) -> Self;
}

/// By an adder: the last place of an f32 in 2^23..2^24 is 1. (`f32::round_ties_even` would be a function call for every
/// element where the processor has no such instruction.)
pub(crate) struct PortableRound;
/// By the conversion of AVX, which rounds.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Avx2Round;
/// By the conversion of AVX-512F, which rounds.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Avx512Round;

/// `f` of every element. (`array::map` is not inlined where arrays are long, and then nothing is vectorised.)
#[inline(always)]
pub(crate) fn map<A: Copy, B: Copy + Default, const N: usize>(a: [A; N], f: impl Fn(A) -> B) -> [B; N] {
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

            #[inline(always)]
            unsafe fn narrow_numbers<const N: usize>(values: [$type; N]) -> [$type; N] {
                values
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

macro_rules! swapped {
    ($($type:ty as $bits:ty: $from:expr, $to:expr;)*) => {$(
        impl Element for Swapped<$type> {
            type Bits = $bits;
            type Accumulator = $type;

            #[inline(always)]
            unsafe fn widen<const N: usize>(bits: [$bits; N]) -> [$type; N] {
                map(bits, |bits| $from(bits.swap_bytes()))
            }

            #[inline(always)]
            unsafe fn narrow<const N: usize>(values: [$type; N]) -> [$bits; N] {
                // SAFETY: as for this function.
                let values = unsafe { <$type as Element>::narrow(values) };
                map(values, |value| $to(value).swap_bytes())
            }
        }
    )*};
}

swapped! {
    f32 as u32: f32::from_bits, f32::to_bits;
    i32 as i32: i32::from, i32::from;
    i16 as i16: i16::from, i16::from;
}

impl<E: Element> Element for Numbers<E> {
    type Bits = E::Bits;
    type Accumulator = E::Accumulator;

    #[inline(always)]
    unsafe fn widen<const N: usize>(bits: [E::Bits; N]) -> [E::Accumulator; N] {
        // SAFETY: as for this function.
        unsafe { E::widen(bits) }
    }

    #[inline(always)]
    unsafe fn narrow<const N: usize>(values: [E::Accumulator; N]) -> [E::Bits; N] {
        // SAFETY: as for this function.
        unsafe { E::narrow_numbers(values) }
    }
}

impl<T: Count, R: Round<T>, const SWAP: bool> Element for Counts<T, R, SWAP> {
    type Bits = T;
    type Accumulator = f32;

    #[inline(always)]
    unsafe fn widen<const N: usize>(bits: [T; N]) -> [f32; N] {
        map(bits, |count| if SWAP { count.swap_bytes() } else { count }.to_f32())
    }

    /// # Safety
    /// Also: the values are in range of `T`, and none is NaN.
    #[inline(always)]
    unsafe fn narrow<const N: usize>(values: [f32; N]) -> [T; N] {
        // SAFETY: as for this function.
        let counts = unsafe { R::round(values) };
        if SWAP { map(counts, T::swap_bytes) } else { counts }
    }
}

macro_rules! counts {
    ($($integer:ty),*) => {$(
        impl Count for $integer {
            #[inline(always)]
            fn to_f32(self) -> f32 {
                self as f32
            }

            #[inline(always)]
            fn swap_bytes(self) -> $integer {
                self.swap_bytes()
            }
        }

        impl Round<$integer> for PortableRound {
            #[inline(always)]
            unsafe fn round<const N: usize>(values: [f32; N]) -> [$integer; N] {
                let integers_from = 8_388_608.0_f32; // 2^23
                map(values, |value| {
                    let signed = f32::from_bits(integers_from.to_bits() | value.to_bits() & 1 << 31);
                    let rounded = if value.abs() < integers_from { value + signed - signed } else { value };
                    // SAFETY: the caller's promise; the bounds are integers, so that rounding does not cross them. By
                    // way of i32, because that is what vectors are converted to.
                    (unsafe { rounded.to_int_unchecked::<i32>() }) as $integer
                })
            }
        }
    )*};
}

counts!(i16, i32);

#[cfg(target_arch = "x86_64")]
impl Round<i32> for Avx2Round {
    #[inline(always)]
    unsafe fn round<const N: usize>(values: [f32; N]) -> [i32; N] {
        const { assert!(N.is_multiple_of(8)) };
        let mut counts = [0; N];
        for i in (0..N).step_by(8) {
            // SAFETY: both arrays have elements `i..i + 8`; the caller is compiled for AVX2.
            unsafe {
                let vector = _mm256_cvtps_epi32(_mm256_loadu_ps(values.as_ptr().add(i)));
                _mm256_storeu_si256(counts.as_mut_ptr().add(i).cast(), vector);
            }
        }
        counts
    }
}

#[cfg(target_arch = "x86_64")]
impl Round<i16> for Avx2Round {
    #[inline(always)]
    unsafe fn round<const N: usize>(values: [f32; N]) -> [i16; N] {
        const { assert!(N.is_multiple_of(16)) };
        let mut counts = [0; N];
        for i in (0..N).step_by(16) {
            // SAFETY: both arrays have elements `i..i + 16`; the caller is compiled for AVX2.
            unsafe {
                let lower = _mm256_cvtps_epi32(_mm256_loadu_ps(values.as_ptr().add(i)));
                let upper = _mm256_cvtps_epi32(_mm256_loadu_ps(values.as_ptr().add(i + 8)));
                // Packing works within halves of the register: the middle quarters then change places.
                let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(lower, upper));
                _mm256_storeu_si256(counts.as_mut_ptr().add(i).cast(), packed);
            }
        }
        counts
    }
}

#[cfg(target_arch = "x86_64")]
impl Round<i32> for Avx512Round {
    #[inline(always)]
    unsafe fn round<const N: usize>(values: [f32; N]) -> [i32; N] {
        const { assert!(N.is_multiple_of(16)) };
        let mut counts = [0; N];
        for i in (0..N).step_by(16) {
            // SAFETY: both arrays have elements `i..i + 16`; the caller is compiled for AVX-512F.
            unsafe {
                let vector = _mm512_cvtps_epi32(_mm512_loadu_ps(values.as_ptr().add(i)));
                _mm512_storeu_si512(counts.as_mut_ptr().add(i).cast(), vector);
            }
        }
        counts
    }
}

#[cfg(target_arch = "x86_64")]
impl Round<i16> for Avx512Round {
    #[inline(always)]
    unsafe fn round<const N: usize>(values: [f32; N]) -> [i16; N] {
        const { assert!(N.is_multiple_of(32)) };
        let mut counts = [0; N];
        for i in (0..N).step_by(32) {
            // SAFETY: both arrays have elements `i..i + 32`; the caller is compiled for AVX-512F and BW.
            unsafe {
                let lower = _mm512_cvtps_epi32(_mm512_loadu_ps(values.as_ptr().add(i)));
                let upper = _mm512_cvtps_epi32(_mm512_loadu_ps(values.as_ptr().add(i + 16)));
                // As for AVX2, in quarters. (A narrowing move takes two steps for half as many.)
                let quarters = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
                let packed = _mm512_permutexvar_epi64(quarters, _mm512_packs_epi32(lower, upper));
                _mm512_storeu_si512(counts.as_mut_ptr().add(i).cast(), packed);
            }
        }
        counts
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

    #[inline(always)]
    unsafe fn narrow_numbers<const N: usize>(values: [f32; N]) -> [u16; N] {
        map(values, |value| (round_number_to_upper_half(value) >> 16) as u16)
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
    if value.is_nan() { BF16_NAN << 16 } else { round_number_to_upper_half(value) }
}

#[inline(always)]
fn round_number_to_upper_half(value: f32) -> u32 {
    let bits = value.to_bits();
    bits.wrapping_add(0x7fff + (bits >> 16 & 1))
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
        // SAFETY: as for this function.
        unsafe { Self::narrow_numbers(map(values, |x| if x.is_nan() { f32::NAN } else { x })) }
    }

    #[inline(always)]
    unsafe fn narrow_numbers<const N: usize>(values: [f32; N]) -> [u16; N] {
        const { assert!(N.is_multiple_of(8)) };
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
        // SAFETY: as for this function.
        unsafe { Self::narrow_numbers(map(values, |x| if x.is_nan() { f32::NAN } else { x })) }
    }

    #[inline(always)]
    unsafe fn narrow_numbers<const N: usize>(values: [f32; N]) -> [u16; N] {
        const { assert!(N.is_multiple_of(16)) };
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
