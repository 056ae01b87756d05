//! Arithmetic on the bytes of tensors: reduce, scale, convert, quantise. No allocation, no I/O, no threads, no state.
//!
//! Operands are raw pointers of any alignment, because they are tensors that users own and frames that lie anywhere in
//! a receive buffer. One loop (`stream.rs`) serves everything: it carries 128 bytes of accumulators in registers, loads
//! the same elements of every source one source after the other, and stores once. So `n` sources cost `n` reads and
//! one write, whatever `n` is, and a destination that is one of the sources needs no special case: an element is
//! written only after it was read from every source.
//!
//! **The same bits everywhere.** [`Level`] names the instruction sets that the loop is compiled for; the widest that
//! the machine has is chosen at run time. All levels give the same bits, so ranks on different machines agree:
//! - every element is computed by the same IEEE 754 operations in the order of the sources, and nothing is fused (in
//!   quantisation other operations stand in where their result is provably the same);
//! - a NaN that is computed is stored as *the* NaN: positive, quiet, no payload (`0x7fc00000` for f32). Which of two
//!   NaN payloads survives an addition depends on the order in which the compiler put the operands, and the sign of
//!   `inf - inf` on the processor's make, so payloads cannot be kept. The compare and select cost nothing that could be
//!   measured with AVX2 and AVX-512 (float32, two sources, one core of a Zen 4 EPYC), and with SSE2 a quarter of the
//!   rate from L2, nothing from memory;
//! - integer overflow wraps;
//! - this holds in the default floating-point environment. A thread that flushes denormals to zero
//!   (`torch.set_flush_denormal`) flushes them here too.
//!
//! **Floats as integers.** [`FixedPoint`] says how blocks of floats travel where their sum must not depend on the order in
//! which they arrive: `docs/design/quantisation.md` has the format and the proof that no sum overflows.
//!
//! # Why not ...?
//! - **intrinsics for everything?** The compiler turns arrays of 128 bytes into the vector code that we would have
//!   written; for float16 (F16C) and for rounding to integers it has no words, so only those are written by hand.
//!   Checked by reading the assembly and by the rates that `examples/kernel_rates.rs` prints.
//! - **`std::simd`, or the `wide` and `pulp` crates?** The first is unstable; the others would replace the part that
//!   the compiler already does, and leave us the conversions.
//! - **the `half` crate?** Its slice conversions are good; but a reduction that converts slices walks memory three
//!   times. It is the oracle of the tests.
//! - **AVX512-BF16 and AVX512-FP16 instructions in reductions?** `vcvtneps2bf16` flushes denormals to zero, and FP16
//!   arithmetic rounds after every addition: other bits than the other levels give. Where a block's unit rules both out,
//!   quantisation uses them (`half.rs`).
//! - **non-temporal stores?** A reduced frame is sent next, or is the operand of the next step: it should stay in cache.
//! - **threads?** The caller knows how many cores are free.
//! - **pairwise or compensated sums?** A sum has one operand a rank; the order of ranks is the caller's.

use penstock_types::{DType, ReduceOp};

mod block;
mod element;
mod finite;
#[cfg(target_arch = "x86_64")]
mod half;
mod operation;
mod quantise;
mod stream;

use element::{Bf16, Bf16Pairs, Element, Truth};
use operation::{And, Apply, Divide, Keep, Max, Min, Or, Product, Scale, Sum, Xor};
use stream::InstructionSet;
#[cfg(target_arch = "x86_64")]
use stream::{Avx2, Avx512};

pub use block::{Block, Exponent, FixedPoint, MOST_WORKERS};
pub use quantise::{ByteOrder, add_integers, block_exponent, sum_f32, swap_bytes, swap_bytes_in_place};

/// `dst[i] = sources[0][i] op sources[1][i] op ...`, in that order, over `bytes` bytes, then `finish`.
///
/// [`ReduceOp::Avg`] and [`ReduceOp::PremulSum`] add: the division is `finish`, which only the last of several
/// reductions applies, and the factor is [`premultiply`], which every rank applies to its own input. float16 and
/// bfloat16 are added up in float32 and rounded once, after `finish`, to nearest even. A bool is true if its byte is
/// not 0; results are 0 or 1. One source with nothing to finish is copied as it is, whatever the bits.
///
/// # Panics
/// If `op` is not defined on `dtype` ([`ReduceOp::takes`]), `finish` divides by zero or divides what is not a sum of
/// numbers, `bytes` is not a multiple of the element size, or there are no sources. Nothing was written.
///
/// # Safety
/// Every source is readable and `dst` writable for `bytes` bytes, any alignment; nobody writes to the sources or
/// touches `dst` meanwhile. A source is `dst` itself or does not overlap it; sources may overlap each other.
///
/// # Cost
/// `sources.len()` reads and one write of `bytes`, at the rate of the L2 cache or of memory: see
/// `examples/kernel_rates.rs`.
pub unsafe fn reduce(op: ReduceOp, dtype: DType, dst: *mut u8, sources: &[*const u8], bytes: usize, finish: Finish) {
    // SAFETY: the caller's promise is the same.
    unsafe { Level::best().reduce(op, dtype, dst, sources, bytes, finish) }
}

/// `dst[i] = src[i] * factor`: what [`ReduceOp::PremulSum`] does to every rank's input.
///
/// The factor is rounded to float32 (float64 for float64) first; float16 and bfloat16 are multiplied in float32 and
/// rounded once, to nearest even.
///
/// # Panics
/// If `dtype` is not a floating-point type, or `bytes` is not a multiple of its size. Nothing was written.
///
/// # Safety
/// As for [`reduce`] with one source; `dst` may be `src`.
pub unsafe fn premultiply(dtype: DType, dst: *mut u8, src: *const u8, bytes: usize, factor: f64) {
    // SAFETY: the caller's promise is the same.
    unsafe { Level::best().premultiply(dtype, dst, src, bytes, factor) }
}

/// Round to float16, nearest even: beyond 65504 (from 65520 on) to infinity, denormals exactly, NaN to `0x7e00`.
///
/// # Panics
/// If the lengths differ. So do the other three conversions.
pub fn f32_to_f16(dst: &mut [u16], src: &[f32]) {
    Level::best().f32_to_f16(dst, src);
}

/// Widen float16 exactly; NaN becomes `0x7fc00000`.
pub fn f16_to_f32(dst: &mut [f32], src: &[u16]) {
    Level::best().f16_to_f32(dst, src);
}

/// Round to bfloat16, nearest even; NaN becomes `0x7fc0`.
pub fn f32_to_bf16(dst: &mut [u16], src: &[f32]) {
    Level::best().f32_to_bf16(dst, src);
}

/// Widen bfloat16 exactly; NaN becomes `0x7fc00000`.
pub fn bf16_to_f32(dst: &mut [f32], src: &[u16]) {
    Level::best().bf16_to_f32(dst, src);
}

/// Whether no element is NaN or infinite. True for all but the four floating-point types.
///
/// # Panics
/// If `bytes` is not a multiple of the element size.
///
/// # Safety
/// `src` is readable for `bytes` bytes, any alignment, and nobody writes to it meanwhile.
///
/// # Cost
/// One read of `bytes`. It stops at the end of the first block (4 KiB) with such an element.
#[must_use]
pub unsafe fn is_finite(dtype: DType, src: *const u8, bytes: usize) -> bool {
    assert!(bytes.is_multiple_of(dtype.size()), "{bytes} bytes are not a whole number of {dtype}");
    // SAFETY: the caller's promise; bytes have no alignment.
    let bytes = unsafe { std::slice::from_raw_parts(src, bytes) };
    match dtype {
        DType::F32 => finite::all(bytes, |element| u32::from_le_bytes(element) & 0x7f80_0000 != 0x7f80_0000),
        DType::F64 => finite::all(bytes, |element| u64::from_le_bytes(element) >> 52 & 0x7ff != 0x7ff),
        DType::F16 => finite::all(bytes, |element| u16::from_le_bytes(element) & 0x7c00 != 0x7c00),
        DType::BF16 => finite::all(bytes, |element| u16::from_le_bytes(element) & 0x7f80 != 0x7f80),
        _ => true,
    }
}

/// The instruction set that [`reduce`] and the others use on this machine, for logs: a [`Level::name`].
#[must_use]
pub fn simd_level() -> &'static str {
    Level::best().name()
}

/// What a reduction does to an element after the last source, before the element is rounded and stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// Nothing.
    Nothing,
    /// Divide the sum by a number of ranks, not 0: floats to nearest (float16 and bfloat16 in float32), integers
    /// towards zero.
    DivideBy(u32),
}

/// An instruction set that this machine has, with the kernels compiled for it.
///
/// [`reduce`] and the other functions of the crate use [`Level::best`]; tests and benchmarks go through
/// [`Level::supported`]. A value proves that the machine can run it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    /// [`Set::Avx512Bf16`], with arithmetic on float16 (Sapphire Rapids 2023, and later).
    #[cfg(target_arch = "x86_64")]
    Avx512Fp16,
    /// [`Set::Avx512`], with rounding to bfloat16, VBMI and VNNI (Zen 4 2022, Sapphire Rapids 2023, and later).
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

/// `on!(level, I => expression)` evaluates the expression with `I` as the level's instruction set. Only a few conversions use
/// what the two levels above AVX-512 have in addition; they check for it themselves.
macro_rules! on {
    ($level:expr, $set:ident => $body:expr) => {
        match $level.0 {
            #[cfg(target_arch = "x86_64")]
            $crate::Set::Avx512Fp16 | $crate::Set::Avx512Bf16 | $crate::Set::Avx512 => {
                type $set = $crate::stream::Avx512;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::Set::Avx2 => {
                type $set = $crate::stream::Avx2;
                $body
            }
            $crate::Set::Portable => {
                type $set = $crate::stream::Portable;
                $body
            }
        }
    };
}

use on;

impl Level {
    /// The widest level of this machine.
    #[must_use]
    pub fn best() -> Level {
        #[cfg(target_arch = "x86_64")]
        if let Some(level) = VECTOR_LEVELS.into_iter().find(|level| level.is_here()) {
            return level;
        }
        Level(Set::Portable)
    }

    /// Every level of this machine, the widest first.
    pub fn supported() -> impl Iterator<Item = Level> {
        #[cfg(target_arch = "x86_64")]
        let vector = VECTOR_LEVELS.into_iter().filter(|level| level.is_here());
        #[cfg(not(target_arch = "x86_64"))]
        let vector = std::iter::empty();
        vector.chain([Level(Set::Portable)])
    }

    /// Whether the processor and the operating system support it (looked up once a process).
    #[cfg(target_arch = "x86_64")]
    fn is_here(self) -> bool {
        match self.0 {
            Set::Avx512Fp16 => Level(Set::Avx512Bf16).is_here() && std::arch::is_x86_feature_detected!("avx512fp16"),
            Set::Avx512Bf16 => {
                // All processors that have the first have the others too, except Cooper Lake.
                Avx512::is_here()
                    && std::arch::is_x86_feature_detected!("avx512bf16")
                    && std::arch::is_x86_feature_detected!("avx512vbmi")
                    && std::arch::is_x86_feature_detected!("avx512vnni")
            }
            Set::Avx512 => Avx512::is_here(),
            Set::Avx2 => Avx2::is_here(),
            Set::Portable => true,
        }
    }

    /// Whether it has AVX512-FP16.
    #[cfg(target_arch = "x86_64")]
    fn has_fp16(self) -> bool {
        self.0 == Set::Avx512Fp16
    }

    /// Whether it has AVX512-BF16, VBMI and VNNI.
    #[cfg(target_arch = "x86_64")]
    fn has_bf16(self) -> bool {
        matches!(self.0, Set::Avx512Fp16 | Set::Avx512Bf16)
    }

    /// `"avx512fp16"`, `"avx512bf16"`, `"avx512"`, `"avx2"` or `"portable"`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Fp16 => "avx512fp16",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Bf16 => "avx512bf16",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2",
            Set::Portable => "portable",
        }
    }

    /// [`reduce`] on this level.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn reduce(
        self,
        op: ReduceOp,
        dtype: DType,
        dst: *mut u8,
        sources: &[*const u8],
        bytes: usize,
        finish: Finish,
    ) {
        assert!(op.takes(dtype), "{} is not defined on {dtype}", op.name());
        assert!(bytes.is_multiple_of(dtype.size()), "{bytes} bytes are not a whole number of {dtype}");
        let operands = Operands { dst, sources, elements: bytes / dtype.size() };
        // SAFETY: the caller vouches for the pointers, and `self` for the instruction set.
        unsafe {
            match (finish, sources) {
                (_, []) => panic!("a reduction needs a source"),
                (Finish::Nothing, &[src]) if src == dst => {}
                (Finish::Nothing, &[src]) => dst.copy_from_nonoverlapping(src, bytes),
                (Finish::Nothing, _) => on!(self, I => combine::<I>(op, dtype, operands)),
                (Finish::DivideBy(ranks), _) => {
                    assert!(ranks != 0, "an average over no ranks");
                    let adds = matches!(op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_));
                    assert!(adds && dtype != DType::Bool, "{} of {dtype} cannot be divided", op.name());
                    on!(self, I => average::<I>(dtype, operands, ranks));
                }
            }
        }
    }

    /// [`premultiply`] on this level.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn premultiply(self, dtype: DType, dst: *mut u8, src: *const u8, bytes: usize, factor: f64) {
        assert!(dtype.is_float(), "premul_sum is not defined on {dtype}");
        assert!(bytes.is_multiple_of(dtype.size()), "{bytes} bytes are not a whole number of {dtype}");
        let operands = Operands { dst, sources: &[src], elements: bytes / dtype.size() };
        // SAFETY: the caller vouches for the pointers, and `self` for the instruction set.
        unsafe { on!(self, I => scale::<I>(dtype, operands, factor)) }
    }

    /// [`f32_to_f16`] on this level.
    pub fn f32_to_f16(self, dst: &mut [u16], src: &[f32]) {
        // SAFETY: `self` vouches for the instruction set.
        unsafe { on!(self, I => convert::<I, f32, <I as InstructionSet>::F16>(dst, src)) }
    }

    /// [`f16_to_f32`] on this level.
    pub fn f16_to_f32(self, dst: &mut [f32], src: &[u16]) {
        // SAFETY: `self` vouches for the instruction set.
        unsafe { on!(self, I => convert::<I, <I as InstructionSet>::F16, f32>(dst, src)) }
    }

    /// [`f32_to_bf16`] on this level.
    pub fn f32_to_bf16(self, dst: &mut [u16], src: &[f32]) {
        // SAFETY: `self` vouches for the instruction set.
        unsafe { on!(self, I => convert::<I, f32, Bf16>(dst, src)) }
    }

    /// [`bf16_to_f32`] on this level.
    pub fn bf16_to_f32(self, dst: &mut [f32], src: &[u16]) {
        // SAFETY: `self` vouches for the instruction set.
        unsafe { on!(self, I => convert::<I, Bf16, f32>(dst, src)) }
    }
}

/// Of x86-64, the widest first.
#[cfg(target_arch = "x86_64")]
const VECTOR_LEVELS: [Level; 4] =
    [Level(Set::Avx512Fp16), Level(Set::Avx512Bf16), Level(Set::Avx512), Level(Set::Avx2)];

/// The memory of a kernel. Each pointer is valid for `elements` elements of its side's type.
#[derive(Clone, Copy)]
struct Operands<'a> {
    dst: *mut u8,
    sources: &'a [*const u8],
    elements: usize,
}

// From here on: which instance of the loop serves which dtype and operation. The last argument of each instance is how
// many elements fill 128 bytes of accumulators.
//
// Safety, of all functions below: the machine has the instruction set `I`, and the operands are as their type says.

unsafe fn combine<I: InstructionSet>(op: ReduceOp, dtype: DType, operands: Operands) {
    // SAFETY: as for this function.
    unsafe {
        match dtype {
            DType::F32 => arithmetic::<I, f32, 32>(op, operands),
            DType::F64 => arithmetic::<I, f64, 16>(op, operands),
            DType::F16 => arithmetic::<I, I::F16, 32>(op, operands),
            DType::BF16 => arithmetic::<I, Bf16Pairs, 32>(op, operands),
            DType::I8 => bitwise::<I, i8, 128>(op, operands),
            DType::I16 => bitwise::<I, i16, 64>(op, operands),
            DType::I32 => bitwise::<I, i32, 32>(op, operands),
            DType::I64 => bitwise::<I, i64, 16>(op, operands),
            DType::U8 => bitwise::<I, u8, 128>(op, operands),
            DType::Bool => bitwise::<I, Truth, 128>(op, operands),
            _ => unreachable!("the caller checked that {dtype} can be reduced"),
        }
    }
}

unsafe fn bitwise<I: InstructionSet, E: Element, const N: usize>(op: ReduceOp, operands: Operands)
where
    And: Apply<E::Accumulator>,
    Or: Apply<E::Accumulator>,
    Xor: Apply<E::Accumulator>,
    Sum: Apply<E::Accumulator>,
    Product: Apply<E::Accumulator>,
    Min: Apply<E::Accumulator>,
    Max: Apply<E::Accumulator>,
{
    // SAFETY: as for this function.
    unsafe {
        match op {
            ReduceOp::BitAnd => I::stream::<E, E, And, Keep, N>(operands, Keep),
            ReduceOp::BitOr => I::stream::<E, E, Or, Keep, N>(operands, Keep),
            ReduceOp::BitXor => I::stream::<E, E, Xor, Keep, N>(operands, Keep),
            _ => arithmetic::<I, E, N>(op, operands),
        }
    }
}

unsafe fn arithmetic<I: InstructionSet, E: Element, const N: usize>(op: ReduceOp, operands: Operands)
where
    Sum: Apply<E::Accumulator>,
    Product: Apply<E::Accumulator>,
    Min: Apply<E::Accumulator>,
    Max: Apply<E::Accumulator>,
{
    // SAFETY: as for this function.
    unsafe {
        match op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => {
                I::stream::<E, E, Sum, Keep, N>(operands, Keep);
            }
            ReduceOp::Product => I::stream::<E, E, Product, Keep, N>(operands, Keep),
            ReduceOp::Min => I::stream::<E, E, Min, Keep, N>(operands, Keep),
            ReduceOp::Max => I::stream::<E, E, Max, Keep, N>(operands, Keep),
            _ => unreachable!("the caller checked that {} is defined on the dtype", op.name()),
        }
    }
}

unsafe fn average<I: InstructionSet>(dtype: DType, operands: Operands, ranks: u32) {
    let divide = Divide(ranks);
    // SAFETY: as for this function.
    unsafe {
        match dtype {
            DType::F32 => I::stream::<f32, f32, Sum, _, 32>(operands, divide),
            DType::F64 => I::stream::<f64, f64, Sum, _, 16>(operands, divide),
            DType::F16 => I::stream::<I::F16, I::F16, Sum, _, 32>(operands, divide),
            DType::BF16 => I::stream::<Bf16Pairs, Bf16Pairs, Sum, _, 32>(operands, divide),
            DType::I8 => I::stream::<i8, i8, Sum, _, 128>(operands, divide),
            DType::I16 => I::stream::<i16, i16, Sum, _, 64>(operands, divide),
            DType::I32 => I::stream::<i32, i32, Sum, _, 32>(operands, divide),
            DType::I64 => I::stream::<i64, i64, Sum, _, 16>(operands, divide),
            DType::U8 => I::stream::<u8, u8, Sum, _, 128>(operands, divide),
            _ => unreachable!("the caller checked that {dtype} has an average"),
        }
    }
}

unsafe fn scale<I: InstructionSet>(dtype: DType, operands: Operands, factor: f64) {
    // SAFETY: as for this function.
    unsafe {
        match dtype {
            DType::F32 => I::stream::<f32, f32, Sum, _, 32>(operands, Scale(factor as f32)),
            DType::F64 => I::stream::<f64, f64, Sum, _, 16>(operands, Scale(factor)),
            DType::F16 => I::stream::<I::F16, I::F16, Sum, _, 32>(operands, Scale(factor as f32)),
            DType::BF16 => I::stream::<Bf16Pairs, Bf16Pairs, Sum, _, 32>(operands, Scale(factor as f32)),
            _ => unreachable!("the caller checked that {dtype} is a floating-point type"),
        }
    }
}

unsafe fn convert<I: InstructionSet, S, D>(dst: &mut [D::Bits], src: &[S::Bits])
where
    S: Element<Accumulator = f32>,
    D: Element<Accumulator = f32>,
{
    assert_eq!(dst.len(), src.len(), "a conversion needs as many elements on both sides");
    let operands = Operands { dst: dst.as_mut_ptr().cast(), sources: &[src.as_ptr().cast()], elements: src.len() };
    // SAFETY: as for this function; the slices have as many elements as the operands say. With one source the
    // operation is never applied: `Sum` stands in.
    unsafe { I::stream::<S, D, Sum, Keep, 32>(operands, Keep) }
}
