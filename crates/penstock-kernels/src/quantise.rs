//! Floats as integers with a power-of-two unit per block, so that sums come out the same in every order.
//!
//! `docs/design/quantisation.md` has the format, the proof that nothing overflows, and the error bounds.

use std::marker::PhantomData;

use penstock_types::DType;

use crate::block::{Block, Exponent, FixedPoint, exponent_of};
use crate::element::{Bf16, Bf16Pairs, Count, Counts, Element, Numbers, PortableRound, Round, Swapped, map};
#[cfg(target_arch = "x86_64")]
use crate::half::{Bf16FromCounts, F16FromCounts, F16ToCounts, NormalBf16};
use crate::operation::{Keep, Last, Sum};
#[cfg(target_arch = "x86_64")]
use crate::stream::Avx512;
use crate::stream::{InstructionSet, Kernel, Portable};
use crate::{Level, Operands, on};

/// The exponent of the block `src`: the least `e` such that every magnitude is below 2^e.
///
/// # Panics
/// If `dtype` is not float32, float16 or bfloat16, or `src` is not a whole number of elements.
///
/// # Cost
/// One read of `src`, any alignment.
#[must_use]
pub fn block_exponent(dtype: DType, src: &[u8]) -> Exponent {
    Level::best().block_exponent(dtype, src)
}

/// `slot[i] += payload[i]`, wrapping; whether any element overflowed, which honest workers' payloads cannot (the sum of
/// as many as [`FixedPoint::new`] was told fits).
///
/// # Arguments
/// - `integer`: the type of both sides, int16 or int32.
/// - `slot`: in the machine's byte order.
/// - `payload`: in `order`.
///
/// # Panics
/// If `integer` is another type, or the lengths differ or are not a whole number of elements. Nothing was written. So do
/// [`swap_bytes`], [`swap_bytes_in_place`] and [`sum_f32`], each for its types.
///
/// # Cost
/// Two reads and one write of `slot`, any alignment.
#[must_use = "an overflow says that somebody sent what the protocol does not allow"]
pub fn add_integers(integer: DType, slot: &mut [u8], payload: &[u8], order: ByteOrder) -> bool {
    Level::best().add_integers(integer, slot, payload, order)
}

/// Copy 2-byte or 4-byte elements between the machine's byte order and big-endian, in either direction.
pub fn swap_bytes(integer: DType, dst: &mut [u8], src: &[u8]) {
    Level::best().swap_bytes(integer, dst, src);
}

/// [`swap_bytes`] where the elements lie.
pub fn swap_bytes_in_place(integer: DType, bytes: &mut [u8]) {
    Level::best().swap_bytes_in_place(integer, bytes);
}

/// `dst = sources[0] + sources[1] + ...` in float32, in that order: the sum of a block that travels as floats. All are in
/// `order`. The order of the sources decides the bits, so a slot that keeps its workers' payloads and adds them by rank
/// repeats exactly.
///
/// # Panics
/// Also without sources.
pub fn sum_f32(dst: &mut [u8], sources: &[&[u8]], order: ByteOrder) {
    Level::best().sum_f32(dst, sources, order);
}

/// How bytes of an element lie in a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteOrder {
    /// As in the machine's memory.
    Native,
    /// The network's, and the only one that a programmable switch adds.
    Big,
}

impl Block {
    /// Write `src / unit`, rounded to nearest even, as integers in `order`.
    ///
    /// The distance of `unit * dst[i]` from `src[i]` is at most `unit / 2`, also where `src[i]` is denormal; either zero
    /// becomes 0. The block's exponent must be that of `src` or larger. If it is not, nothing overflows all the same:
    /// what lies beyond [`FixedPoint::largest`] becomes that, of its sign, and a NaN becomes it with a plus.
    ///
    /// # Panics
    /// If `src` is not a whole number of elements, or `dst` holds another number of them.
    ///
    /// # Cost
    /// One read of `src` and one write of `dst`, any alignment.
    pub fn quantise(self, dst: &mut [u8], src: &[u8], order: ByteOrder) {
        Level::best().quantise(self, dst, src, order);
    }

    /// Write `sums * unit` as floats; `sums` are in `order`.
    ///
    /// Rounded to float32, nearest even (a result that is denormal is rounded twice, and its second error is at most
    /// 2^-150), and for float16 and bfloat16 from there to them. Beyond their range results are infinite. So a sum of
    /// `n` workers lies within `n * unit / 2` of the exact one before that rounding.
    ///
    /// # Panics
    /// As [`Block::quantise`].
    pub fn dequantise(self, dst: &mut [u8], sums: &[u8], order: ByteOrder) {
        Level::best().dequantise(self, dst, sums, order);
    }
}

impl Level {
    /// [`block_exponent`] on this level.
    #[must_use]
    pub fn block_exponent(self, dtype: DType, src: &[u8]) -> Exponent {
        elements_of(dtype, src.len());
        // SAFETY: `self` vouches for the instruction set.
        let magnitude = unsafe {
            match dtype {
                DType::F32 => on!(self, I => I::run(Largest::<i32>(src, PhantomData))),
                _ => on!(self, I => I::run(Largest::<i16>(src, PhantomData))),
            }
        };
        exponent_of(dtype, magnitude)
    }

    /// [`Block::quantise`] on this level.
    pub fn quantise(self, block: Block, dst: &mut [u8], src: &[u8], order: ByteOrder) {
        let FixedPoint { dtype, integer, .. } = block.format;
        let elements = elements_of(dtype, src.len());
        assert_eq!(dst.len(), elements * integer.size(), "bytes of {elements} {integer}");
        let operands = Operands { dst: dst.as_mut_ptr(), sources: &[src.as_ptr()], elements };
        // SAFETY: `self` vouches for the instruction set, and both slices hold `elements` elements.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if self.has_fp16()
                && (dtype, integer) == (DType::F16, DType::I16)
                && let Some(last) = F16ToCounts::new(block)
            {
                return match order.swaps() {
                    false => Avx512::stream::<i16, i16, Sum, _, 64>(operands, last),
                    true => Avx512::stream::<i16, Swapped<i16>, Sum, _, 64>(operands, last),
                };
            }
            on!(self, I => match (integer, order.swaps()) {
                (DType::I16, false) => to_counts::<I, i16, false>(block, operands),
                (DType::I16, true) => to_counts::<I, i16, true>(block, operands),
                (_, false) => to_counts::<I, i32, false>(block, operands),
                (_, true) => to_counts::<I, i32, true>(block, operands),
            });
        }
    }

    /// [`Block::dequantise`] on this level.
    pub fn dequantise(self, block: Block, dst: &mut [u8], sums: &[u8], order: ByteOrder) {
        let FixedPoint { dtype, integer, .. } = block.format;
        let elements = elements_of(integer, sums.len());
        assert_eq!(dst.len(), elements * dtype.size(), "bytes of {elements} {dtype}");
        let operands = Operands { dst: dst.as_mut_ptr(), sources: &[sums.as_ptr()], elements };
        // SAFETY: as above.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if self.has_fp16()
                && (dtype, integer) == (DType::F16, DType::I16)
                && let Some(last) = F16FromCounts::new(block)
            {
                return match order.swaps() {
                    false => Avx512::stream::<i16, i16, Sum, _, 64>(operands, last),
                    true => Avx512::stream::<Swapped<i16>, i16, Sum, _, 64>(operands, last),
                };
            }
            #[cfg(target_arch = "x86_64")]
            if self.has_bf16()
                && dtype == DType::BF16
                && let (first, 1.0) = block.factors(1)
                && let Some(origin) = block.origin()
            {
                // As the second factor is 1, the unit is at least 2^-126, and no result but 0 is denormal.
                type Round = <Avx512 as InstructionSet>::Round;
                let last = ToValues { first, second: [] };
                return match (integer, order.swaps()) {
                    (DType::I16, false) => {
                        Avx512::stream::<i16, i16, Sum, _, 64>(operands, Bf16FromCounts::<false> { origin });
                    }
                    (DType::I16, true) => {
                        Avx512::stream::<i16, i16, Sum, _, 64>(operands, Bf16FromCounts::<true> { origin });
                    }
                    (_, false) => Avx512::stream::<Counts<i32, Round, false>, NormalBf16, Sum, _, 32>(operands, last),
                    (_, true) => Avx512::stream::<Counts<i32, Round, true>, NormalBf16, Sum, _, 32>(operands, last),
                };
            }
            on!(self, I => match (integer, order.swaps()) {
                (DType::I16, false) => to_values::<I, i16, false>(block, operands),
                (DType::I16, true) => to_values::<I, i16, true>(block, operands),
                (_, false) => to_values::<I, i32, false>(block, operands),
                (_, true) => to_values::<I, i32, true>(block, operands),
            });
        }
    }

    /// [`add_integers`] on this level.
    #[must_use = "an overflow says that somebody sent what the protocol does not allow"]
    pub fn add_integers(self, integer: DType, slot: &mut [u8], payload: &[u8], order: ByteOrder) -> bool {
        elements_of(integer, payload.len());
        assert_eq!(slot.len(), payload.len(), "a slot is as long as its payloads");
        // SAFETY: `self` vouches for the instruction set.
        unsafe {
            on!(self, I => match (integer, order.swaps()) {
                (DType::I16, false) => I::run(AddInto::<i16, false>(slot, payload, PhantomData)),
                (DType::I16, true) => I::run(AddInto::<i16, true>(slot, payload, PhantomData)),
                (DType::I32, false) => I::run(AddInto::<i32, false>(slot, payload, PhantomData)),
                (DType::I32, true) => I::run(AddInto::<i32, true>(slot, payload, PhantomData)),
                _ => panic!("a slot holds int16 or int32, not {integer}"),
            })
        }
    }

    /// [`swap_bytes`] on this level.
    pub fn swap_bytes(self, integer: DType, dst: &mut [u8], src: &[u8]) {
        let elements = elements_of(integer, src.len());
        assert_eq!(dst.len(), src.len(), "bytes of {elements} {integer}");
        let operands = Operands { dst: dst.as_mut_ptr(), sources: &[src.as_ptr()], elements };
        // SAFETY: both slices hold `elements` elements.
        unsafe { self.swap(integer, operands) }
    }

    /// [`swap_bytes_in_place`] on this level.
    pub fn swap_bytes_in_place(self, integer: DType, bytes: &mut [u8]) {
        let elements = elements_of(integer, bytes.len());
        let dst = bytes.as_mut_ptr();
        // SAFETY: the slice holds `elements` elements; a source may be the destination.
        unsafe { self.swap(integer, Operands { dst, sources: &[dst.cast_const()], elements }) }
    }

    unsafe fn swap(self, integer: DType, operands: Operands) {
        // SAFETY: `self` vouches for the instruction set, the caller for the operands.
        unsafe {
            match integer.size() {
                2 => on!(self, I => I::stream::<Swapped<i16>, i16, Sum, Keep, 64>(operands, Keep)),
                4 => on!(self, I => I::stream::<Swapped<i32>, i32, Sum, Keep, 32>(operands, Keep)),
                _ => panic!("{integer} has neither 2 nor 4 bytes"),
            }
        }
    }

    /// [`sum_f32`] on this level.
    pub fn sum_f32(self, dst: &mut [u8], sources: &[&[u8]], order: ByteOrder) {
        let elements = elements_of(DType::F32, dst.len());
        assert!(!sources.is_empty(), "a sum needs a source");
        assert!(sources.iter().all(|source| source.len() == dst.len()), "sources are as long as their sum");
        let dst = dst.as_mut_ptr();
        let sum = |sources: &[*const u8]| {
            let operands = Operands { dst, sources, elements };
            // SAFETY: `self` vouches for the instruction set, and `dst` and all sources hold `elements` elements.
            unsafe {
                on!(self, I => match order.swaps() {
                    false => I::stream::<f32, f32, Sum, Keep, 32>(operands, Keep),
                    true => I::stream::<Swapped<f32>, Swapped<f32>, Sum, Keep, 32>(operands, Keep),
                });
            }
        };
        // Some sources at a time, each time to the sum so far, is the same order, and needs no allocation.
        let mut pointers = [std::ptr::null(); SOURCES_AT_ONCE];
        let mut filled = 0;
        for source in sources {
            if filled == SOURCES_AT_ONCE {
                sum(&pointers);
                (pointers[0], filled) = (dst.cast_const(), 1);
            }
            pointers[filled] = source.as_ptr();
            filled += 1;
        }
        sum(&pointers[..filled]);
    }
}

impl ByteOrder {
    fn swaps(self) -> bool {
        self == ByteOrder::Big && cfg!(target_endian = "little")
    }
}

/// 512 bytes of pointers. More workers cost one more read and write of the sum for each so many.
const SOURCES_AT_ONCE: usize = 64;

fn elements_of(dtype: DType, bytes: usize) -> usize {
    assert!(bytes.is_multiple_of(dtype.size()), "{bytes} bytes are not a whole number of {dtype}");
    bytes / dtype.size()
}

// Safety, of the functions below: the machine has the instruction set `I`, and the operands are as their type says.

unsafe fn to_counts<I: InstructionSet<Round: Round<T>>, T: Count, const SWAP: bool>(block: Block, operands: Operands)
where
    PortableRound: Round<T>,
{
    let FixedPoint { dtype, integer, largest, .. } = block.format;
    let origin = block.origin().filter(|_| (dtype, integer) == (DType::BF16, DType::I16));
    if let Some(origin) = origin {
        // SAFETY: as for this function.
        let magnitude = unsafe {
            let src = std::slice::from_raw_parts(operands.sources[0], operands.elements * dtype.size());
            let dst = std::slice::from_raw_parts_mut(operands.dst, operands.elements * integer.size());
            I::run(PlaceBf16::<SWAP>(dst, src, origin))
        };
        if exponent_of(dtype, magnitude) <= block.exponent {
            return;
        }
        // The exponent does not cover the block: once more, saturating.
    }
    let (first, second) = block.factors(-1);
    let largest = largest as f32;
    // SAFETY: as for this function.
    unsafe {
        // The second factor is 1 but for the tiniest exponents. Those can wait: all instruction sets give the same bits.
        if second == 1.0 {
            scale_to_counts::<I, T, SWAP>(block, operands, ToCounts { first, second: [], largest });
        } else {
            scale_to_counts::<Portable, T, SWAP>(block, operands, ToCounts { first, second: [second], largest });
        }
    }
}

unsafe fn scale_to_counts<I: InstructionSet<Round: Round<T>>, T: Count, const SWAP: bool>(
    block: Block,
    operands: Operands,
    last: impl Last<f32>,
) {
    // SAFETY: as for this function; `ToCounts` leaves what fits a `T`.
    unsafe {
        match block.format.dtype {
            DType::F32 => I::stream::<f32, Counts<T, I::Round, SWAP>, Sum, _, 32>(operands, last),
            DType::F16 => I::stream::<I::F16, Counts<T, I::Round, SWAP>, Sum, _, 32>(operands, last),
            _ => I::stream::<Bf16, Counts<T, I::Round, SWAP>, Sum, _, 32>(operands, last),
        }
    }
}

unsafe fn to_values<I: InstructionSet<Round: Round<T>>, T: Count, const SWAP: bool>(block: Block, operands: Operands)
where
    PortableRound: Round<T>,
{
    let (first, second) = block.factors(1);
    // SAFETY: as for this function.
    unsafe {
        if second == 1.0 {
            scale_to_values::<I, T, SWAP>(block, operands, ToValues { first, second: [] });
        } else {
            scale_to_values::<Portable, T, SWAP>(block, operands, ToValues { first, second: [second] });
        }
    }
}

unsafe fn scale_to_values<I: InstructionSet<Round: Round<T>>, T: Count, const SWAP: bool>(
    block: Block,
    operands: Operands,
    last: impl Last<f32>,
) {
    // SAFETY: as for this function. An integer times a finite factor is no NaN.
    unsafe {
        match block.format.dtype {
            DType::F32 => I::stream::<Counts<T, I::Round, SWAP>, Numbers<f32>, Sum, _, 32>(operands, last),
            DType::F16 => I::stream::<Counts<T, I::Round, SWAP>, Numbers<I::F16>, Sum, _, 32>(operands, last),
            _ => I::stream::<Counts<T, I::Round, SWAP>, Numbers<Bf16>, Sum, _, 32>(operands, last),
        }
    }
}

/// Scale, and keep within what a worker may send. A NaN fails the first comparison.
#[derive(Clone, Copy)]
struct ToCounts<const MORE: usize> {
    first: f32,
    second: [f32; MORE],
    largest: f32,
}

impl<const MORE: usize> Last<f32> for ToCounts<MORE> {
    #[inline(always)]
    unsafe fn apply<const N: usize>(self, values: [f32; N]) -> [f32; N] {
        map(values, |value| {
            let scaled = scale(value, self.first, self.second);
            let below = if scaled < self.largest { scaled } else { self.largest };
            if below > -self.largest { below } else { -self.largest }
        })
    }
}

/// Scale.
#[derive(Clone, Copy)]
struct ToValues<const MORE: usize> {
    first: f32,
    second: [f32; MORE],
}

impl<const MORE: usize> Last<f32> for ToValues<MORE> {
    #[inline(always)]
    unsafe fn apply<const N: usize>(self, values: [f32; N]) -> [f32; N] {
        map(values, |value| scale(value, self.first, self.second))
    }
}

#[inline(always)]
fn scale<const MORE: usize>(value: f32, first: f32, second: [f32; MORE]) -> f32 {
    let mut scaled = value * first;
    for factor in &second {
        scaled *= *factor;
    }
    scaled
}

/// The largest magnitude of floats, as their bits without the sign, which order like the magnitudes and put what is not
/// finite last.
struct Largest<'a, T>(&'a [u8], PhantomData<T>);

/// Adds a payload (the second) to a slot, wrapping; whether an element overflowed.
struct AddInto<'a, T, const SWAP: bool>(&'a mut [u8], &'a [u8], PhantomData<T>);

/// bfloat16 (the second) to int16 (the first), by [`Block::origin`]; the largest magnitude, which says whether they are right.
///
/// In pairs, as [`Bf16Pairs`] widens them: nothing moves between lanes.
struct PlaceBf16<'a, const SWAP: bool>(&'a mut [u8], &'a [u8], f32);

impl<const SWAP: bool> Kernel for PlaceBf16<'_, SWAP> {
    type Output = u32;

    #[inline(always)]
    fn run(self) -> u32 {
        let mut largest = [0_i16; 64];
        let mut targets = self.0.chunks_exact_mut(size_of_val(&largest));
        let sources = self.1.chunks_exact(size_of_val(&largest));
        let rest = sources.remainder();
        for (dst, src) in targets.by_ref().zip(sources) {
            Self::round(dst, src, self.2, &mut largest);
        }
        Self::round(targets.into_remainder(), rest, self.2, &mut largest);
        largest.into_iter().fold(0, |largest, each| if each > largest { each } else { largest }) as u32
    }
}

impl<const SWAP: bool> PlaceBf16<'_, SWAP> {
    #[inline(always)]
    fn round(dst: &mut [u8], src: &[u8], origin: f32, largest: &mut [i16; 64]) {
        let bits: [i16; 64] = load(src);
        for i in 0..64 {
            let magnitude = bits[i] & i16::MAX;
            largest[i] = if magnitude > largest[i] { magnitude } else { largest[i] };
        }
        // SAFETY: this type needs no instruction set.
        let values = unsafe { Bf16Pairs::widen(map(bits, i16::cast_unsigned)) };
        let placed = map(values, |value| (value + origin).to_bits());
        let mut counts = [0; 64];
        for i in 0..32 {
            let pair = placed[i] & 0xffff | placed[32 + i] << 16;
            // SAFETY: `counts` has elements `2 * i` and `2 * i + 1`.
            unsafe { counts.as_mut_ptr().cast::<u32>().add(i).write_unaligned(pair) };
        }
        let counts = if SWAP { map(counts, i16::swap_bytes) } else { counts };
        store(dst, &counts);
    }
}

// A closure that is called twice need not be inlined, and then is compiled for the baseline: hence `round`.
macro_rules! kernels {
    ($($integer:ty, $lanes:literal;)*) => {$(
        impl Kernel for Largest<'_, $integer> {
            type Output = u32;

            #[inline(always)]
            fn run(self) -> u32 {
                // A plain loop is what the compiler makes the best of here. Signed, since a baseline x86-64 has no maximum
                // of unsigned words.
                let (elements, _) = self.0.as_chunks();
                let magnitudes = elements.iter().map(|&bytes| <$integer>::from_ne_bytes(bytes) & <$integer>::MAX);
                magnitudes.fold(0, |largest, each| if each > largest { each } else { largest }) as u32
            }
        }

        impl<const SWAP: bool> Kernel for AddInto<'_, $integer, SWAP> {
            type Output = bool;

            #[inline(always)]
            fn run(self) -> bool {
                let mut overflow = [0; $lanes];
                let mut slots = self.0.chunks_exact_mut(size_of_val(&overflow));
                let payloads = self.1.chunks_exact(size_of_val(&overflow));
                let rest = payloads.remainder();
                for (slot, payload) in slots.by_ref().zip(payloads) {
                    Self::round(slot, payload, &mut overflow);
                }
                Self::round(slots.into_remainder(), rest, &mut overflow);
                overflow.into_iter().fold(0, |any, each| any | each) < 0
            }
        }

        impl<const SWAP: bool> AddInto<'_, $integer, SWAP> {
            #[inline(always)]
            fn round(slot: &mut [u8], payload: &[u8], overflow: &mut [$integer; $lanes]) {
                let mut sums: [$integer; $lanes] = load(slot);
                let terms: [$integer; $lanes] = load(payload);
                for i in 0..$lanes {
                    let term = if SWAP { terms[i].swap_bytes() } else { terms[i] };
                    let total = sums[i].wrapping_add(term);
                    // The sign bit is set where both operands have the sign that the total has not.
                    overflow[i] |= (sums[i] ^ total) & (term ^ total);
                    sums[i] = total;
                }
                store(slot, &sums);
            }
        }
    )*};
}

kernels! {
    i16, 64;
    i32, 32;
}

/// As many elements as there are, which may be fewer; zeros follow.
#[inline(always)]
fn load<T: Count, const N: usize>(bytes: &[u8]) -> [T; N] {
    let mut elements = [T::default(); N];
    let size = bytes.len().min(size_of_val(&elements));
    // SAFETY: both sides have `size` bytes, and a `Count` is an integer, which any bytes are.
    unsafe { elements.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), size) };
    elements
}

/// As many elements as there is room for.
#[inline(always)]
fn store<T: Count, const N: usize>(bytes: &mut [u8], elements: &[T; N]) {
    let size = bytes.len().min(size_of_val(elements));
    // SAFETY: as for `load`.
    unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(elements.as_ptr().cast(), size) };
}
