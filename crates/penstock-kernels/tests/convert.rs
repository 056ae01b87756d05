//! Conversions on every level, against the definition of rounding and against the `half` crate.

use half::{bf16, f16};
use penstock_kernels::Level;

/// Widening is exact for all float16, and rounding the result gives them back; every NaN becomes the canonical one.
#[test]
fn every_f16() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    for level in Level::supported() {
        let (mut wide, mut back) = (vec![0.0; all.len()], vec![0; all.len()]);
        level.f16_to_f32(&mut wide, &all);
        level.f32_to_f16(&mut back, &wide);
        for ((&bits, &value), &rounded) in all.iter().zip(&wide).zip(&back) {
            let expected = f16::from_bits(bits);
            let (expected_bits, expected_back) =
                if expected.is_nan() { (F32_NAN, F16_NAN) } else { (expected.to_f32().to_bits(), bits) };
            assert_eq!(value.to_bits(), expected_bits, "{} of {bits:#06x}", level.name());
            assert_eq!(rounded, expected_back, "{} of {bits:#06x}", level.name());
        }
    }
}

/// The same for all bfloat16.
#[test]
fn every_bf16() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    for level in Level::supported() {
        let (mut wide, mut back) = (vec![0.0; all.len()], vec![0; all.len()]);
        level.bf16_to_f32(&mut wide, &all);
        level.f32_to_bf16(&mut back, &wide);
        for ((&bits, &value), &rounded) in all.iter().zip(&wide).zip(&back) {
            let expected = bf16::from_bits(bits);
            let (expected_bits, expected_back) =
                if expected.is_nan() { (F32_NAN, BF16_NAN) } else { (u32::from(bits) << 16, bits) };
            assert_eq!(value.to_bits(), expected_bits, "{} of {bits:#06x}", level.name());
            assert_eq!(rounded, expected_back, "{} of {bits:#06x}", level.name());
        }
    }
}

/// Between any two neighbours of the narrow type, the middle goes to the even one, and what lies next to the middle to
/// the nearer one. The last middle, beyond the largest finite number, is where infinity begins.
#[test]
fn every_tie_goes_to_even() {
    type Format = (&'static str, u16, f64, fn(u16) -> f64, fn(Level, &mut [u16], &[f32]));
    let formats: [Format; 2] = [
        ("float16", 0x7c00, 65536.0, |bits| f16::from_bits(bits).to_f64(), Level::f32_to_f16),
        ("bfloat16", 0x7f80, 2_f64.powi(128), |bits| bf16::from_bits(bits).to_f64(), Level::f32_to_bf16),
    ];
    for (name, infinity, beyond_largest, value, narrow) in formats {
        let mut inputs = Vec::new();
        let mut expected = Vec::new();
        for lower in 0..infinity {
            let upper = lower + 1;
            // As if the exponent went on where infinity stands.
            let upper_value = if upper == infinity { beyond_largest } else { value(upper) };
            let exact_middle = f64::midpoint(value(lower), upper_value);
            let middle = exact_middle as f32;
            assert_eq!(f64::from(middle), exact_middle, "the middle is an f32");
            let even = if lower % 2 == 0 { lower } else { upper };
            for (input, bits) in [(middle.next_down(), lower), (middle, even), (middle.next_up(), upper)] {
                inputs.extend([input, -input]);
                expected.extend([bits, bits | 0x8000]);
            }
        }
        for level in Level::supported() {
            let mut rounded = vec![0; inputs.len()];
            narrow(level, &mut rounded, &inputs);
            for ((&input, &bits), &right) in inputs.iter().zip(&rounded).zip(&expected) {
                assert_eq!(bits, right, "{} {name} of {input:e} ({:#010x})", level.name(), input.to_bits());
            }
        }
    }
}

/// A few f32 of every exponent, sign and NaN kind round as in the `half` crate.
#[test]
fn f32_of_all_magnitudes() {
    let bits = (0..=u32::MAX).step_by(65537 / 8);
    check_narrowing(&bits.collect::<Vec<_>>());
}

/// All f32 round as in the `half` crate.
#[test]
#[ignore = "all 2^32 values: a minute in release, far longer in debug"]
fn every_f32() {
    for upper in 0..=0xfff {
        check_narrowing(&((upper << 20)..=(upper << 20 | 0xf_ffff)).collect::<Vec<_>>());
    }
}

/// Every length up to some vectors works, and no element beyond it is written.
#[test]
fn every_short_length() {
    for level in Level::supported() {
        for count in 0..150 {
            let values: Vec<f32> = (0..count).map(|i| i as f32 - 70.0).collect();
            let mut bits = [0xaaaa; 151];
            level.f32_to_f16(&mut bits[..count], &values);
            assert_eq!(bits[count], 0xaaaa);
            let mut wide = [-1.0; 151];
            level.f16_to_f32(&mut wide[..count], &bits[..count]);
            assert_eq!((&wide[..count], wide[count]), (&values[..], -1.0));
            level.f32_to_bf16(&mut bits[..count], &values);
            assert_eq!(bits[count], 0xaaaa);
            level.bf16_to_f32(&mut wide[..count], &bits[..count]);
            assert_eq!((&wide[..count], wide[count]), (&values[..], -1.0));
        }
    }
}

/// Slices of different lengths are refused.
#[test]
#[should_panic(expected = "a conversion needs as many elements on both sides")]
fn lengths_must_agree() {
    penstock_kernels::f32_to_f16(&mut [0; 3], &[0.0; 4]);
}

fn check_narrowing(bits: &[u32]) {
    let values: Vec<f32> = bits.iter().copied().map(f32::from_bits).collect();
    for level in Level::supported() {
        let (mut f16s, mut bf16s) = (vec![0; values.len()], vec![0; values.len()]);
        level.f32_to_f16(&mut f16s, &values);
        level.f32_to_bf16(&mut bf16s, &values);
        for (i, &value) in values.iter().enumerate() {
            let (as_f16, as_bf16) = if value.is_nan() {
                (F16_NAN, BF16_NAN)
            } else {
                (f16::from_f32(value).to_bits(), bf16::from_f32(value).to_bits())
            };
            assert_eq!((f16s[i], bf16s[i]), (as_f16, as_bf16), "{} of {:#010x}", level.name(), bits[i]);
        }
    }
}

const F32_NAN: u32 = 0x7fc0_0000;
const F16_NAN: u16 = 0x7e00;
const BF16_NAN: u16 = 0x7fc0;
