//! The loop that every kernel is an instance of, and the instruction sets that it is compiled for.

use crate::Operands;
#[cfg(target_arch = "x86_64")]
use crate::element::{Avx2F16, Avx2Round, Avx512F16, Avx512Round};
use crate::element::{Element, PortableF16, PortableRound, Round};
use crate::operation::{Apply, Last};

/// The loop, compiled for some vector instructions.
pub(crate) trait InstructionSet {
    /// float16 as these instructions convert it.
    type F16: Element<Accumulator = f32>;

    /// Rounding to an integer, as these instructions do it.
    type Round: Round<i16> + Round<i32>;

    /// `dst = last(sources[0] O sources[1] O ...)`, elementwise; read as `S`, stored as `D`, `N` elements at a time.
    ///
    /// # Safety
    /// The machine has the instructions, and the operands are as their type says; a source is `dst` itself or does not
    /// overlap it.
    unsafe fn stream<S, D, O, L, const N: usize>(operands: Operands, last: L)
    where
        S: Element,
        D: Element<Accumulator = S::Accumulator>,
        O: Apply<S::Accumulator>,
        L: Last<S::Accumulator>;

    /// Runs any other kernel.
    ///
    /// # Safety
    /// The machine has the instructions.
    unsafe fn run<K: Kernel>(kernel: K) -> K::Output;
}

/// A loop that is not a [`stream`]: it leaves a single value. To be `inline(always)`, with all that it calls.
pub(crate) trait Kernel {
    type Output;

    fn run(self) -> Self::Output;
}

/// The instructions that the whole program is compiled for: SSE2 on x86-64, NEON on AArch64.
pub(crate) struct Portable;

impl InstructionSet for Portable {
    type F16 = PortableF16;
    type Round = PortableRound;

    // Otherwise all its instances would be inlined into one huge function.
    #[inline(never)]
    unsafe fn stream<S, D, O, L, const N: usize>(operands: Operands, last: L)
    where
        S: Element,
        D: Element<Accumulator = S::Accumulator>,
        O: Apply<S::Accumulator>,
        L: Last<S::Accumulator>,
    {
        // SAFETY: the caller's promise is the same.
        unsafe { stream::<S, D, O, L, N>(operands, last) }
    }

    #[inline(never)]
    unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
        kernel.run()
    }
}

macro_rules! x86_instruction_set {
    ($(#[$doc:meta])* $name:ident, $features:literal, [$($feature:tt),*], $f16:ty, $round:ty) => {
        $(#[$doc])*
        #[cfg(target_arch = "x86_64")]
        pub(crate) struct $name;

        #[cfg(target_arch = "x86_64")]
        impl $name {
            /// Whether the processor and the operating system support it (looked up once a process).
            pub(crate) fn is_here() -> bool {
                $(std::arch::is_x86_feature_detected!($feature))&&*
            }
        }

        #[cfg(target_arch = "x86_64")]
        impl InstructionSet for $name {
            type F16 = $f16;
            type Round = $round;

            #[target_feature(enable = $features)]
            unsafe fn stream<S, D, O, L, const N: usize>(operands: Operands, last: L)
            where
                S: Element,
                D: Element<Accumulator = S::Accumulator>,
                O: Apply<S::Accumulator>,
                L: Last<S::Accumulator>,
            {
                // SAFETY: the caller's promise is the same.
                unsafe { stream::<S, D, O, L, N>(operands, last) }
            }

            #[target_feature(enable = $features)]
            unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
                kernel.run()
            }
        }
    };
}

x86_instruction_set! {
    /// 256-bit vectors and the conversions of float16 (Haswell 2013, Zen 2017, and later).
    Avx2, "avx2,f16c", ["avx2", "f16c"], Avx2F16, Avx2Round
}

x86_instruction_set! {
    /// 512-bit vectors (Skylake-SP 2017, Zen 4 2022, and later).
    Avx512,
    "avx512f,avx512bw,avx512dq,avx512vl",
    ["avx512f", "avx512bw", "avx512dq", "avx512vl"],
    Avx512F16,
    Avx512Round
}

/// The body of [`InstructionSet::stream`], which is inlined into each of them and vectorised there: that is why
/// everything below it is `inline(always)`.
///
/// The order within a round is what makes destinations in place right: all sources are read, then `dst` is written.
#[inline(always)]
unsafe fn stream<S, D, O, L, const N: usize>(operands: Operands, last: L)
where
    S: Element,
    D: Element<Accumulator = S::Accumulator>,
    O: Apply<S::Accumulator>,
    L: Last<S::Accumulator>,
{
    let Operands { dst, sources, elements } = operands;
    let dst = dst.cast::<D::Bits>();
    let mut at = 0;
    while elements - at >= N {
        // SAFETY: elements `at..at + N` exist in every source and in `dst`; unaligned reads and writes take any address.
        unsafe {
            let result =
                round::<S, D, O, L, N>(sources, last, |source| source.add(at).cast::<[S::Bits; N]>().read_unaligned());
            dst.add(at).cast::<[D::Bits; N]>().write_unaligned(result);
        }
        at += N;
    }
    let rest = elements - at;
    if rest > 0 {
        // The last elements go through a padded copy, so that they get the same instructions as all others.
        // SAFETY: elements `at..at + rest` exist in every source and in `dst`, and `rest < N`. Copying bytes needs no
        // alignment.
        unsafe {
            let result = round::<S, D, O, L, N>(sources, last, |source| {
                let mut padded = [S::Bits::default(); N];
                let bytes = rest * size_of::<S::Bits>();
                padded.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(source.add(at).cast(), bytes);
                padded
            });
            let bytes = rest * size_of::<D::Bits>();
            dst.add(at).cast::<u8>().copy_from_nonoverlapping(result.as_ptr().cast(), bytes);
        }
    }
}

/// `N` elements of the result. `load` reads them from a source.
#[inline(always)]
unsafe fn round<S, D, O, L, const N: usize>(
    sources: &[*const u8],
    last: L,
    load: impl Fn(*const S::Bits) -> [S::Bits; N],
) -> [D::Bits; N]
where
    S: Element,
    D: Element<Accumulator = S::Accumulator>,
    O: Apply<S::Accumulator>,
    L: Last<S::Accumulator>,
{
    let (first, others) = sources.split_first().expect("every kernel has a source");
    // SAFETY: the caller runs on the instruction set that `S`, `D` and `L` belong to.
    unsafe {
        let mut results = S::widen(load(first.cast()));
        for source in others {
            let operands = S::widen(load(source.cast()));
            for i in 0..N {
                results[i] = O::apply(results[i], operands[i]);
            }
        }
        D::narrow(last.apply(results))
    }
}
