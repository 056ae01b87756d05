//! `is_finite` against the standard library.

use penstock_kernels::is_finite;
use penstock_types::DType;

/// Every float16 and bfloat16 there is, and every power, sign and payload that matters of the wider ones, alone and in the
/// middle of others, at any alignment.
#[test]
fn as_the_standard_library_has_it() {
    let halves: Vec<u16> = (0..=u16::MAX).collect();
    for half in halves {
        let (f16, bf16) = (half::f16::from_bits(half).is_finite(), half::bf16::from_bits(half).is_finite());
        assert_eq!(among(DType::F16, &half.to_le_bytes(), 1), f16, "{half:#06x}");
        assert_eq!(among(DType::BF16, &half.to_le_bytes(), 1), bf16, "{half:#06x}");
    }
    for exponent in 0..=0xff_u32 {
        for rest in [0, 1, 0x40_0000, 0x7f_ffff] {
            let bits = exponent << 23 | rest;
            for bits in [bits, bits | 1 << 31] {
                assert_eq!(among(DType::F32, &bits.to_le_bytes(), 2000), f32::from_bits(bits).is_finite(), "{bits:#x}");
            }
        }
    }
    for exponent in 0..=0x7ff_u64 {
        let bits = (exponent << 52) | (exponent % 3);
        assert_eq!(among(DType::F64, &bits.to_le_bytes(), 700), f64::from_bits(bits).is_finite(), "{bits:#x}");
    }
    assert!(among(DType::I32, &0x7f80_0000_u32.to_le_bytes(), 3), "integers are");
}

/// Whether it is found in the middle of `count` others on either side.
fn among(dtype: DType, element: &[u8], count: usize) -> bool {
    let zeros = vec![0; count * element.len()];
    let bytes = [&[0][..], &zeros, element, &zeros].concat();
    // SAFETY: behind the first byte lies a whole number of elements.
    unsafe { is_finite(dtype, bytes.as_ptr().add(1), bytes.len() - 1) }
}
