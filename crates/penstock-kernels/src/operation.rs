//! The operations on accumulators: between two sources, and after the last one.

use crate::element::{Truth, map};

/// An operation between the result so far and the next source's element. Commutative, bit for bit.
pub(crate) trait Apply<T> {
    fn apply(left: T, right: T) -> T;
}

/// An operation after the last source. It takes whole arrays, because some instructions do.
pub(crate) trait Last<T>: Copy {
    /// # Safety
    /// The caller is compiled for the instruction set that this type belongs to, if any.
    unsafe fn apply<const N: usize>(self, values: [T; N]) -> [T; N];
}

/// Floats as IEEE 754 says; integers wrap; or.
pub(crate) struct Sum;
/// Floats as IEEE 754 says; integers wrap; and.
pub(crate) struct Product;
/// NaN if either is, -0 below +0; and.
pub(crate) struct Min;
/// NaN if either is, -0 below +0; or.
pub(crate) struct Max;
/// Bitwise and.
pub(crate) struct And;
/// Bitwise or.
pub(crate) struct Or;
/// Bitwise exclusive or.
pub(crate) struct Xor;

/// Nothing.
#[derive(Clone, Copy)]
pub(crate) struct Keep;
/// Divide by a number of ranks.
#[derive(Clone, Copy)]
pub(crate) struct Divide(pub(crate) u32);
/// Multiply.
#[derive(Clone, Copy)]
pub(crate) struct Scale<T>(pub(crate) T);

impl<T> Last<T> for Keep {
    #[inline(always)]
    unsafe fn apply<const N: usize>(self, values: [T; N]) -> [T; N] {
        values
    }
}

macro_rules! apply {
    ($($operation:ident($type:ty) = |$left:ident, $right:ident| $result:expr;)*) => {$(
        impl Apply<$type> for $operation {
            #[inline(always)]
            fn apply($left: $type, $right: $type) -> $type {
                $result
            }
        }
    )*};
}

macro_rules! floats {
    ($($float:ty),*) => {$(
        apply! {
            Sum($float) = |a, b| a + b;
            Product($float) = |a, b| a * b;
            // The two selections differ only where neither operand is smaller: then they are equal, or zeros of
            // either sign, of which `or` keeps a minus. (`f32::min` would ignore a NaN and may return either zero.)
            Min($float) = |a, b| {
                let (one, other) = (if a < b { a } else { b }, if b < a { b } else { a });
                if a.is_nan() | b.is_nan() { <$float>::NAN } else { <$float>::from_bits(one.to_bits() | other.to_bits()) }
            };
            Max($float) = |a, b| {
                let (one, other) = (if a > b { a } else { b }, if b > a { b } else { a });
                if a.is_nan() | b.is_nan() { <$float>::NAN } else { <$float>::from_bits(one.to_bits() & other.to_bits()) }
            };
        }

        impl Last<$float> for Divide {
            #[inline(always)]
            unsafe fn apply<const N: usize>(self, values: [$float; N]) -> [$float; N] {
                map(values, |value| value / self.0 as $float)
            }
        }

        impl Last<$float> for Scale<$float> {
            #[inline(always)]
            unsafe fn apply<const N: usize>(self, values: [$float; N]) -> [$float; N] {
                map(values, |value| value * self.0)
            }
        }
    )*};
}

floats!(f32, f64);

macro_rules! integers {
    ($($integer:ty),*) => {$(
        apply! {
            Sum($integer) = |a, b| a.wrapping_add(b);
            Product($integer) = |a, b| a.wrapping_mul(b);
            Min($integer) = |a, b| a.min(b);
            Max($integer) = |a, b| a.max(b);
            And($integer) = |a, b| a & b;
            Or($integer) = |a, b| a | b;
            Xor($integer) = |a, b| a ^ b;
        }
    )*};
}

integers!(i8, i16, i32, i64, u8);

macro_rules! divide_in_f64 {
    ($($integer:ty),*) => {$(
        impl Last<$integer> for Divide {
            /// Vectors have no integer division. The quotient in f64 truncates to the right integer: where the true
            /// one, q, lies below an integer, it does so by at least 1/n, and as |q| <= 2^31 / n the rounding error is
            /// at most 2^-53 * 2^31 / n, which is less.
            #[inline(always)]
            unsafe fn apply<const N: usize>(self, values: [$integer; N]) -> [$integer; N] {
                map(values, |value| {
                    let quotient = f64::from(value) / f64::from(self.0);
                    // SAFETY: `self.0` is not 0 (checked in `reduce`), so the quotient is finite and not larger than
                    // `value`.
                    unsafe { quotient.to_int_unchecked() }
                })
            }
        }
    )*};
}

divide_in_f64!(i8, i16, i32, u8);

impl Last<i64> for Divide {
    #[inline(always)]
    unsafe fn apply<const N: usize>(self, values: [i64; N]) -> [i64; N] {
        map(values, |value| value / i64::from(self.0))
    }
}

apply! {
    Sum(Truth) = |a, b| Truth(a.0 | b.0);
    Product(Truth) = |a, b| Truth(a.0 & b.0);
    Min(Truth) = |a, b| Truth(a.0 & b.0);
    Max(Truth) = |a, b| Truth(a.0 | b.0);
    And(Truth) = |a, b| Truth(a.0 & b.0);
    Or(Truth) = |a, b| Truth(a.0 | b.0);
    Xor(Truth) = |a, b| Truth(a.0 ^ b.0);
}
