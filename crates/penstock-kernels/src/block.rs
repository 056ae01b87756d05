//! How blocks of floats travel as integers: exponents, formats, units. What the kernels share, and callers name.

use std::fmt;

use penstock_types::DType;

/// The exponent of a block, or what stands in for one. The maximum over workers is the exponent of their sum's block: the
/// two codes lie at the ends of `i16`, so that a plain signed maximum combines any two.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Exponent(i16);

impl Exponent {
    /// Every element is 0 (of either sign).
    pub const ZERO: Exponent = Exponent(i16::MIN);
    /// Some element is infinite or NaN: integers cannot carry the block, it travels as float32.
    pub const NONFINITE: Exponent = Exponent(i16::MAX);
    /// Of a block whose largest magnitude is float32's smallest denormal, 2^-149.
    pub const MIN: Exponent = Exponent(-148);
    /// Of a block with a magnitude of 2^127 or more.
    pub const MAX: Exponent = Exponent(128);

    /// From the wire: one of the two codes, or [`Exponent::MIN`] to [`Exponent::MAX`]. None for anything else, which no
    /// worker sends.
    #[must_use]
    pub fn from_code(code: i16) -> Option<Exponent> {
        let exponent = Exponent(code);
        let is_finite = (Exponent::MIN..=Exponent::MAX).contains(&exponent);
        (is_finite || exponent == Exponent::ZERO || exponent == Exponent::NONFINITE).then_some(exponent)
    }

    /// For the wire.
    #[must_use]
    pub fn code(self) -> i16 {
        self.0
    }
}

impl fmt::Debug for Exponent {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match *self {
            Exponent::ZERO => f.write_str("ZERO"),
            Exponent::NONFINITE => f.write_str("NONFINITE"),
            Exponent(power) => write!(f, "2^{power}"),
        }
    }
}

/// How the blocks of a job travel: which integers, and how many of their bits one worker may use.
///
/// A worker's integers reach at most [`FixedPoint::largest`], and `workers` times that fits the integer: no sum of at most
/// so many payloads overflows, in any order, halfway or at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedPoint {
    pub(crate) dtype: DType,
    pub(crate) integer: DType,
    /// The block's unit is 2^(exponent - bits).
    bits: i32,
    pub(crate) largest: u32,
}

impl FixedPoint {
    /// The narrowest integer in which the largest elements of a block keep every bit: float32 travels as int32; float16 as
    /// int16 for up to 16 workers, bfloat16 for up to 128, and beyond that both as int32.
    ///
    /// # Panics
    /// If `dtype` is not float32, float16 or bfloat16, or `workers` is not 1 to [`MOST_WORKERS`].
    #[must_use]
    pub fn new(dtype: DType, workers: u32) -> FixedPoint {
        let significands = (1 << significand_bits(dtype)) - 1;
        let narrow = dtype != DType::F32 && u64::from(workers) * significands <= i16::MAX as u64;
        FixedPoint::with_integer(dtype, workers, if narrow { DType::I16 } else { DType::I32 })
    }

    /// With int16 or int32 as the caller likes. int16 halves the traffic of float32, and its error bound is 2^16 times as
    /// wide.
    ///
    /// # Panics
    /// As [`FixedPoint::new`], and if `integer` is another type or cannot hold `workers` ones.
    #[must_use]
    pub fn with_integer(dtype: DType, workers: u32, integer: DType) -> FixedPoint {
        let significand_bits = significand_bits(dtype);
        assert!((1..=MOST_WORKERS).contains(&workers), "{workers} workers: 1 to {MOST_WORKERS} can share a block");
        let share = match integer {
            DType::I16 => i16::MAX as u32 / workers,
            DType::I32 => i32::MAX as u32 / workers,
            _ => panic!("a block travels as int16 or int32, not as {integer}"),
        };
        assert!(share > 0, "{integer} cannot hold a sum of {workers} workers");
        // The largest magnitude below 2^e, times 2^(bits - e), rounds to this: from as many bits as the significand has
        // on, it is an integer itself; with fewer it rounds up to the power.
        let largest_at =
            |bits: u32| (1_u32 << bits) - if bits < significand_bits { 0 } else { 1 << (bits - significand_bits) };
        let bits = (0..=31).rev().find(|&bits| largest_at(bits) <= share).expect("largest_at(0) is 1");
        FixedPoint { dtype, integer, bits: bits as i32, largest: largest_at(bits) }
    }

    /// The type of tensors: what is quantised, and what results are.
    #[must_use]
    pub fn dtype(self) -> DType {
        self.dtype
    }

    /// The type of payloads and slots: int16 or int32.
    #[must_use]
    pub fn integer(self) -> DType {
        self.integer
    }

    /// The largest magnitude that [`Block::quantise`] writes.
    #[must_use]
    pub fn largest(self) -> u32 {
        self.largest
    }

    /// A block of this format whose exponent is `exponent`, the maximum over all workers. None for
    /// [`Exponent::NONFINITE`]: such a block travels as float32.
    #[must_use]
    pub fn at(self, exponent: Exponent) -> Option<Block> {
        (exponent != Exponent::NONFINITE).then_some(Block { format: self, exponent })
    }
}

/// A block that travels as integers, times a unit of 2^k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub(crate) format: FixedPoint,
    pub(crate) exponent: Exponent,
}

impl Block {
    /// The format that it is a block of.
    #[must_use]
    pub fn format(self) -> FixedPoint {
        self.format
    }

    /// What one count is worth, exactly; 0 for a block of zeros.
    #[must_use]
    pub fn unit(self) -> f64 {
        if self.exponent == Exponent::ZERO { 0.0 } else { 2_f64.powi(self.unit_exponent()) }
    }

    /// 1.5 * 2^23 units, where float32 holds it to the last place: that place is a unit. So a float32 of at most 2^22 units
    /// plus this is rounded to an integer of them, to nearest even, and the integer is the sum's bits less those of this;
    /// and these bits plus an integer, less this as a float, are as many units exactly.
    pub(crate) fn origin(self) -> Option<f32> {
        let power = self.unit_exponent() + 23;
        (-126..=127).contains(&power).then(|| 1.5 * power_of_two(power))
    }

    /// Far below all others for a block of zeros.
    pub(crate) fn unit_exponent(self) -> i32 {
        i32::from(self.exponent.0) - self.format.bits
    }

    /// The unit (`sign` 1) or its inverse (-1) as two factors, because one may lie beyond float32's exponents: counts of
    /// the smallest denormals are their 2^179 fold.
    ///
    /// Of a value times one and then the other, the first product is exact, or the last is too small to matter: times the
    /// inverse it becomes 0 in any case; times the unit, an integer and 2^-126 make a normal number.
    pub(crate) fn factors(self, sign: i32) -> (f32, f32) {
        if self.exponent == Exponent::ZERO {
            return (0.0, 0.0);
        }
        let power = self.unit_exponent() * sign;
        let first = power.clamp(-126, 127);
        (power_of_two(first), power_of_two(power - first))
    }
}

/// How many workers can share a block: a guess at more than anybody will have, with 14 bits left to each in an int32.
pub const MOST_WORKERS: u32 = 1 << 16;

fn significand_bits(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 24,
        DType::F16 => 11,
        DType::BF16 => 8,
        _ => panic!("float32, float16 and bfloat16 are quantised, {dtype} is not"),
    }
}

/// Of a block whose largest magnitude has these bits.
pub(crate) fn exponent_of(dtype: DType, magnitude: u32) -> Exponent {
    // Infinity as bits, and the power of two that the last place of a denormal stands for.
    let (infinity, last_place) = match dtype {
        DType::F32 => (0x7f80_0000, -149),
        DType::F16 => (0x7c00, -24),
        _ => (0x7f80, -133),
    };
    let fraction_bits = significand_bits(dtype) - 1;
    // The field is 1 for the power above the denormals.
    let field = magnitude >> fraction_bits;
    let places = if field == 0 { u32::BITS - magnitude.leading_zeros() } else { field + fraction_bits };
    match magnitude {
        0 => Exponent::ZERO,
        _ if magnitude >= infinity => Exponent::NONFINITE,
        _ => Exponent((last_place + places as i32) as i16),
    }
}

fn power_of_two(exponent: i32) -> f32 {
    debug_assert!((-126..=127).contains(&exponent));
    f32::from_bits(((exponent + 127) as u32) << 23)
}
