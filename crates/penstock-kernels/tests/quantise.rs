//! Quantisation on every level, against integer arithmetic that takes one element at a time and rounds by definition.

use half::{bf16, f16};
use penstock_kernels::{Block, ByteOrder, Exponent, FixedPoint, Level, MOST_WORKERS};
use penstock_types::DType;
use proptest::prelude::*;

/// All N workers at the largest value of a block, with every mantissa that could round up to the next power: the sum is
/// exactly N times the largest count, fits, and one more bit for each worker would not. For N = 1 to 256 and beyond, both
/// signs, every dtype and integer, at exponents from one end to the other.
#[test]
fn no_sum_overflows_and_one_more_bit_could() {
    let counts = (1..=256).chain([257, 300, 511, 512, 513, 1000, 4095, 4096, 4097, 16_383, 32_767, MOST_WORKERS]);
    for workers in counts {
        for (dtype, integer) in FORMATS {
            let most = if integer == DType::I16 { i16::MAX as u32 } else { MOST_WORKERS };
            if workers > most {
                continue;
            }
            let format = FixedPoint::with_integer(dtype, workers, integer);
            let limit = if integer == DType::I16 { i64::from(i16::MAX) } else { i64::from(i32::MAX) };
            let largest = i64::from(format.largest());
            assert!(i64::from(workers) * largest <= limit, "{format:?} {workers}");
            // With half the unit, the sum of the largest below any power would not fit.
            let one = Exponent::from_code(1).expect("a power");
            let finer = rounded(largest_below(dtype, one), unit_exponent(format, one) - 1);
            assert!(i64::from(workers) * finer > limit, "{format:?} {workers}: a bit is wasted");
            for exponent in every_exponent(dtype).into_iter().step_by(if workers < 20 { 1 } else { 37 }) {
                let block = format.at(exponent).expect("finite");
                for value in [largest_below(dtype, exponent), -largest_below(dtype, exponent)] {
                    let src = encode(dtype, &[value]);
                    for level in Level::supported() {
                        let count = quantise(level, block, &src)[0];
                        assert_eq!(count, reference_count(format, exponent, value), "{format:?} {exponent:?}");
                        assert!(count.abs() <= largest);
                        assert!((i64::from(workers) * count).abs() <= limit, "{format:?} {workers} {exponent:?}");
                    }
                }
            }
        }
    }
}

/// The sum itself, by the kernel that a slot uses: N payloads at the extreme raise no overflow, and one unit more does.
#[test]
fn a_slot_holds_all_workers_at_the_extreme() {
    for workers in [1, 2, 3, 7, 8, 128, 129, 255, 256, 1024] {
        for (dtype, integer) in FORMATS {
            let format = FixedPoint::with_integer(dtype, workers, integer);
            let block = format.at(Exponent::from_code(3).expect("a power")).expect("finite");
            for level in Level::supported() {
                for sign in [1.0, -1.0] {
                    let value = sign * largest_below(dtype, Exponent::from_code(3).expect("a power"));
                    let src = encode(dtype, &[value; 37]);
                    let mut payload = vec![0; 37 * integer.size()];
                    level.quantise(block, &mut payload, &src, ByteOrder::Big);
                    let mut slot = vec![0; payload.len()];
                    for _ in 0..workers {
                        assert!(!level.add_integers(integer, &mut slot, &payload, ByteOrder::Big), "{format:?}");
                    }
                    let exact =
                        f64::from(workers) * reference_count(format, Exponent::from_code(3).unwrap(), value) as f64;
                    assert_eq!(decode_integers(integer, &slot), vec![exact as i64; 37]);
                    let limit = if integer == DType::I16 { i64::from(i16::MAX) } else { i64::from(i32::MAX) };
                    let room = if sign > 0.0 { limit - exact as i64 } else { -limit - 1 - exact as i64 };
                    // An unauthenticated peer fills it up to the bound, and goes over by one in a single element.
                    let full = encode_integers(integer, &[room; 37], ByteOrder::Native);
                    assert!(!level.add_integers(integer, &mut slot, &full, ByteOrder::Native));
                    for at in [0, 20, 36] {
                        let mut one = vec![0; 37];
                        one[at] = sign as i64;
                        let mut over = slot.clone();
                        let one = encode_integers(integer, &one, ByteOrder::Native);
                        assert!(level.add_integers(integer, &mut over, &one, ByteOrder::Native), "{integer} {at}");
                    }
                }
            }
        }
    }
}

/// The choice that `new` makes: the narrowest integer that holds all workers' significands, from both sides of each edge.
#[test]
fn the_integer_is_the_narrowest_that_keeps_the_largest_elements() {
    let integer = |dtype, workers| FixedPoint::new(dtype, workers).integer();
    assert_eq!([integer(DType::F32, 1), integer(DType::F32, MOST_WORKERS)], [DType::I32; 2]);
    assert_eq!([integer(DType::F16, 1), integer(DType::F16, 16)], [DType::I16; 2]);
    assert_eq!([integer(DType::F16, 17), integer(DType::F16, 128)], [DType::I32; 2]);
    assert_eq!([integer(DType::BF16, 1), integer(DType::BF16, 128)], [DType::I16; 2]);
    assert_eq!([integer(DType::BF16, 129), integer(DType::BF16, MOST_WORKERS)], [DType::I32; 2]);
    // float32 keeps its 24 bits up to 128 workers, float16 its 11 and bfloat16 its 8 wherever `new` takes int16.
    assert_eq!(FixedPoint::new(DType::F32, 128).largest(), (1 << 24) - 1);
    assert_eq!(FixedPoint::new(DType::F32, 255).largest(), 1 << 23);
    assert_eq!(FixedPoint::new(DType::F32, 256).largest(), 1 << 22, "2^23 - 1/2 rounds up, and 256 * 2^23 is 2^31");
    assert_eq!(FixedPoint::new(DType::F16, 16).largest(), (1 << 11) - 1);
    assert_eq!(FixedPoint::new(DType::BF16, 128).largest(), (1 << 8) - 1);
}

/// Every float16 and bfloat16, and float32 of all powers: the exponent is the least power above the magnitude.
#[test]
fn exponents_bound_the_magnitude_from_above_and_below() {
    let check = |dtype: DType, bytes: &[u8], value: f64| {
        for level in Level::supported() {
            let exponent = level.block_exponent(dtype, bytes);
            if value == 0.0 {
                assert_eq!(exponent, Exponent::ZERO);
            } else if !value.is_finite() {
                assert_eq!(exponent, Exponent::NONFINITE, "{value}");
            } else {
                let upper = 2_f64.powi(exponent.code().into());
                assert!(value.abs() < upper && value.abs() >= upper / 2.0, "{value:e} {exponent:?} {}", level.name());
                assert_eq!(Exponent::from_code(exponent.code()), Some(exponent));
            }
        }
    };
    for bits in 0..=u16::MAX {
        check(DType::F16, &bits.to_ne_bytes(), f16::from_bits(bits).to_f64());
        check(DType::BF16, &bits.to_ne_bytes(), bf16::from_bits(bits).to_f64());
    }
    for exponent in 0..=255_u32 {
        for fraction in [0, 1, 2, 0x3f_ffff, 0x40_0000, 0x7f_ffff] {
            for sign in [0, 1 << 31] {
                let value = f32::from_bits(sign | exponent << 23 | fraction);
                check(DType::F32, &value.to_ne_bytes(), value.into());
            }
        }
    }
    assert_eq!((Exponent::MIN.code(), Exponent::MAX.code()), (-148, 128));
    for code in [-149, 129, i16::MIN + 1, i16::MAX - 1] {
        assert_eq!(Exponent::from_code(code), None);
    }
}

/// The maximum over workers combines exponents and codes: zeros give way, what is not finite wins.
#[test]
fn the_maximum_combines_workers() {
    let power = |code| Exponent::from_code(code).expect("a power");
    assert_eq!(Exponent::ZERO.max(power(-148)), power(-148));
    assert_eq!(power(128).max(Exponent::NONFINITE), Exponent::NONFINITE);
    assert_eq!(power(-3).max(power(-4)), power(-3));
    assert!(FixedPoint::new(DType::F32, 8).at(Exponent::NONFINITE).is_none());
    let zeros = FixedPoint::new(DType::F32, 8).at(Exponent::ZERO).expect("integers carry zeros");
    assert_eq!(zeros.unit(), 0.0);
    for level in Level::supported() {
        assert_eq!(quantise(level, zeros, &encode(DType::F32, &[0.0, -0.0])), [0, 0]);
        let mut values = [1; 8];
        level.dequantise(zeros, &mut values, &[0; 8], ByteOrder::Native);
        assert_eq!(values, [0; 8]);
    }
}

/// An exponent that is too small for a block, by mistake or malice: elements saturate, the same on every level, and sums
/// of such payloads still fit.
#[test]
fn a_wrong_exponent_saturates_and_never_overflows() {
    let values = [1.0, -1.0, 1e30, -1e30, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 0.24, f64::from(f32::MAX)];
    for (dtype, integer) in FORMATS {
        for code in [-148, -20, -2] {
            let format = FixedPoint::with_integer(dtype, 8, integer);
            let block = format.at(Exponent::from_code(code).expect("a power")).expect("finite");
            let largest = i64::from(format.largest());
            let counts: Vec<Vec<i64>> =
                Level::supported().map(|level| quantise(level, block, &encode(dtype, &values))).collect();
            assert!(counts.iter().all(|each| each == &counts[0]), "{counts:?}");
            let saturated = [largest, -largest, largest, -largest, largest, -largest, largest];
            assert_eq!(counts[0][..7], saturated, "{format:?} {code}");
            assert!(counts[0].iter().all(|count| count.abs() <= largest));
            assert_eq!(counts[0][8], largest);
        }
    }
}

/// Every 16-bit float, NaN among them, at exponents from one end to the other, as int16 and int32: in a block that the exponent
/// covers, in one that it covers but for the last element, which is the next above, and all together. What it does not cover saturates, each element by itself.
#[test]
fn every_half_is_rounded_or_saturates() {
    for (dtype, integer) in FORMATS.into_iter().filter(|(dtype, _)| *dtype != DType::F32) {
        let value_of = |bits: u16| {
            if dtype == DType::F16 { f16::from_bits(bits).to_f64() } else { bf16::from_bits(bits).to_f64() }
        };
        for (workers, step) in [(1, 19), (8, if integer == DType::I16 { 3 } else { 19 }), (16, 17), (300, 18)] {
            let format = FixedPoint::with_integer(dtype, workers, integer);
            let largest = i64::from(format.largest());
            for code in (-148..=128).step_by(step) {
                let exponent = Exponent::from_code(code).expect("a power");
                let block = format.at(exponent).expect("finite");
                let is_covered = |&bits: &u16| value_of(bits).abs() < 2_f64.powi(code.into());
                let count_of = |bits: u16| match value_of(bits) {
                    value if is_covered(&bits) => reference_count(format, exponent, value),
                    value if value < 0.0 => -largest,
                    _ => largest,
                };
                let covered: Vec<u16> = (0..=u16::MAX).filter(is_covered).collect();
                let outsider = (0..=u16::MAX).find(|bits| !is_covered(bits)).expect("a NaN");
                let all_but_one = [&covered[..], &[outsider]].concat();
                for elements in [covered, all_but_one, (0..=u16::MAX).collect()] {
                    let src: Vec<u8> = elements.iter().flat_map(|bits| bits.to_ne_bytes()).collect();
                    let counts: Vec<i64> = elements.iter().map(|&bits| count_of(bits)).collect();
                    for order in [ByteOrder::Native, ByteOrder::Big] {
                        let expected = encode_integers(integer, &counts, order);
                        for level in Level::supported() {
                            let mut dst = vec![0xee; expected.len()];
                            level.quantise(block, &mut dst, &src, order);
                            assert!(dst == expected, "{} {format:?} {exponent:?} {order:?}", level.name());
                        }
                    }
                }
            }
        }
    }
}

/// Every int16, at every exponent, as float16 and bfloat16: what float32 makes of it, rounded to nearest even.
#[test]
fn every_int16_becomes_the_nearest_half() {
    let sums: Vec<i64> = (i16::MIN..=i16::MAX).map(i64::from).collect();
    for dtype in [DType::F16, DType::BF16] {
        for (workers, step) in [(1, 5), (8, 1), (300, 7)] {
            let format = FixedPoint::with_integer(dtype, workers, DType::I16);
            for code in (-148..=128).step_by(step) {
                let block = format.at(Exponent::from_code(code).expect("a power")).expect("finite");
                let values: Vec<f64> = sums.iter().map(|&sum| f64::from((sum as f64 * block.unit()) as f32)).collect();
                let expected = encode(dtype, &values);
                for order in [ByteOrder::Native, ByteOrder::Big] {
                    let src = encode_integers(DType::I16, &sums, order);
                    for level in Level::supported() {
                        let mut dst = vec![0xee; expected.len()];
                        level.dequantise(block, &mut dst, &src, order);
                        assert!(dst == expected, "{} {format:?} 2^{code} {order:?}", level.name());
                    }
                }
            }
        }
    }
}

/// Floats that are no numbers add up as IEEE 754 says in the fallback, in the order of the workers, also for more sources
/// than one pass takes, and for either byte order.
#[test]
fn the_float_fallback_adds_in_worker_order() {
    for workers in [1, 2, 3, 63, 64, 65, 127, 128, 200] {
        let payloads: Vec<Vec<f32>> = (0..workers)
            .map(|worker| (0..45).map(|i| (worker as f32 + 0.1).exp2() % 7.0 * 1e7_f32.powi(i % 3) * 0.3).collect())
            .collect();
        let mut payloads = payloads;
        payloads[workers / 2][3] = f32::INFINITY;
        payloads[workers - 1][4] = f32::NAN;
        let expected: Vec<u32> = (0..45)
            .map(|i| {
                let sum = payloads[1..].iter().fold(payloads[0][i], |sum, payload| sum + payload[i]);
                if sum.is_nan() { 0x7fc0_0000 } else { sum.to_bits() }
            })
            .collect();
        for (order, bytes) in
            [(ByteOrder::Native, f32::to_ne_bytes as fn(f32) -> [u8; 4]), (ByteOrder::Big, f32::to_be_bytes)]
        {
            let sources: Vec<Vec<u8>> =
                payloads.iter().map(|payload| payload.iter().flat_map(|&value| bytes(value)).collect()).collect();
            let sources: Vec<&[u8]> = sources.iter().map(Vec::as_slice).collect();
            for level in Level::supported() {
                let mut dst = vec![0; 45 * 4];
                level.sum_f32(&mut dst, &sources, order);
                let expected: Vec<u8> = expected.iter().flat_map(|&bits| bytes(f32::from_bits(bits))).collect();
                assert_eq!(dst, expected, "{workers} {order:?} {}", level.name());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every level writes the counts that integer arithmetic gives, for any values, length, address and exponent that
    /// covers the block, in either byte order; and nothing beyond.
    #[test]
    fn counts_are_exact(
        format in any_format(),
        elements in 0..300_usize,
        misalignments in prop::array::uniform2(0..64_usize),
        above in 0..3_i16,
        centre in -148..=128_i32,
        spread in 1..60_i32,
        seed: u64,
    ) {
        let (format, _) = format;
        let dtype = format.dtype();
        let values = Random(seed).values(dtype, elements, centre, spread);
        let src = Misaligned::new(misalignments[0], encode(dtype, &values));
        let own = Level::supported().map(|level| level.block_exponent(dtype, src.bytes())).collect::<Vec<_>>();
        prop_assert!(own.iter().all(|each| *each == own[0]), "{:?}", own);
        let exponent = if own[0] == Exponent::ZERO { own[0] } else {
            Exponent::from_code((own[0].code() + above).min(128)).expect("a power")
        };
        let block = format.at(exponent).expect("finite");
        let expected: Vec<i64> = values.iter().map(|&value| reference_count(format, exponent, value)).collect();
        for order in [ByteOrder::Native, ByteOrder::Big] {
            let expected = encode_integers(format.integer(), &expected, order);
            for level in Level::supported() {
                let mut dst = Misaligned::new(misalignments[1], vec![0xee; expected.len()]);
                level.quantise(block, dst.bytes_mut(), src.bytes(), order);
                prop_assert_eq!(dst.bytes(), &expected, "{} {:?} {:?}", level.name(), format, exponent);
                prop_assert!(dst.is_intact());
            }
        }
    }

    /// Every level gives the values that exact arithmetic, rounded as the documentation says, gives for any sums.
    #[test]
    fn values_are_exact(
        format in any_format(),
        elements in 0..300_usize,
        misalignments in prop::array::uniform2(0..64_usize),
        code in -148..=128_i16,
        seed: u64,
    ) {
        let (format, _) = format;
        let mut random = Random(seed);
        let limit = if format.integer() == DType::I16 { i64::from(i16::MAX) } else { i64::from(i32::MAX) };
        let sums: Vec<i64> = (0..elements).map(|_| (random.next() as i64 >> random.below(60)).clamp(-limit - 1, limit)).collect();
        let block = format.at(Exponent::from_code(code).expect("a power")).expect("finite");
        let expected: Vec<u8> = sums.iter().flat_map(|&sum| {
            // The first rounding, and in f64 no other, as the unit is a power of two; then that of denormals.
            let value = (f64::from(sum as f32) * block.unit()) as f32;
            encode(format.dtype(), &[value.into()])
        }).collect();
        for order in [ByteOrder::Native, ByteOrder::Big] {
            let src = Misaligned::new(misalignments[0], encode_integers(format.integer(), &sums, order));
            for level in Level::supported() {
                let mut dst = Misaligned::new(misalignments[1], vec![0xee; expected.len()]);
                level.dequantise(block, dst.bytes_mut(), src.bytes(), order);
                prop_assert_eq!(dst.bytes(), &expected, "{} {:?} 2^{}", level.name(), format, code);
                prop_assert!(dst.is_intact());
            }
        }
    }

    /// The whole way: N workers with values of their own, one exponent, payloads added in a random order. The sum is the
    /// same in any other order, no level overflows, and it lies within N/2 units of the exact sum, which is taken in
    /// 128-bit integers.
    #[test]
    fn sums_do_not_depend_on_the_order_and_keep_the_bound(
        format in any_format(),
        elements in 1..70_usize,
        centre in -140..=128_i32,
        spread in 1..50_i32,
        seed: u64,
    ) {
        let (format, workers) = format;
        let dtype = format.dtype();
        let mut random = Random(seed);
        let workers = (workers as usize).min(40);
        let inputs: Vec<Vec<f64>> = (0..workers).map(|_| random.values(dtype, elements, centre, spread)).collect();
        let sources: Vec<Vec<u8>> = inputs.iter().map(|values| encode(dtype, values)).collect();
        let exponent = sources.iter().map(|src| penstock_kernels::block_exponent(dtype, src)).max().expect("a worker");
        let block = format.at(exponent).expect("finite");
        let mut order: Vec<usize> = (0..workers).collect();
        let mut results = Vec::new();
        for level in Level::supported() {
            for _ in 0..2 {
                for i in 1..workers {
                    order.swap(i, random.below(i as u64 + 1) as usize);
                }
                let mut slot = vec![0; elements * format.integer().size()];
                for &worker in &order {
                    let mut payload = vec![0; slot.len()];
                    level.quantise(block, &mut payload, &sources[worker], ByteOrder::Big);
                    prop_assert!(!level.add_integers(format.integer(), &mut slot, &payload, ByteOrder::Big));
                }
                results.push(slot);
            }
        }
        prop_assert!(results.iter().all(|each| each == &results[0]), "seed {}", seed);
        if exponent == Exponent::ZERO {
            prop_assert!(results[0].iter().all(|&byte| byte == 0));
            return Ok(());
        }
        let unit_exponent = unit_exponent(format, exponent);
        for (i, sum) in decode_integers(format.integer(), &results[0]).into_iter().enumerate() {
            // In units of 2^-60 units: values reach down to `spread` powers below the largest, denormals no further.
            let exact: i128 = inputs.iter().map(|values| {
                let (mantissa, power) = split(values[i]);
                let shift = power - unit_exponent + 60;
                // Zero's power says nothing.
                if mantissa == 0 { 0 } else if shift >= 0 { i128::from(mantissa) << shift } else {
                    // Bits below 2^-60 of a unit: at most 40 of them, and dropping them moves the sum by less than 2^-54.
                    i128::from(mantissa) >> (-shift).min(127)
                }
            }).sum();
            let error = (exact - (i128::from(sum) << 60)).abs();
            let bound = (workers as i128) << 59;
            prop_assert!(error <= bound + (workers as i128), "element {} is off by {} of {}", i, error, bound);
        }
    }

    /// Addition wraps, tells of an overflow in any element, and is the reference's for any payload, length and address.
    #[test]
    fn additions_are_the_references(
        elements in 0..300_usize,
        misalignments in prop::array::uniform2(0..64_usize),
        wide: bool,
        shift in 0..20_u64,
        seed: u64,
    ) {
        let integer = if wide { DType::I32 } else { DType::I16 };
        let mut random = Random(seed);
        let mut draw = || -> Vec<i64> {
            (0..elements).map(|_| if wide { (random.next() as i32 >> shift).into() } else { (random.next() as i16 >> (shift % 16)).into() }).collect()
        };
        let (slot, payload) = (draw(), draw());
        let wrap = |value: i64| if wide { i64::from(value as i32) } else { i64::from(value as i16) };
        let exact: Vec<i64> = slot.iter().zip(&payload).map(|(a, b)| a + b).collect();
        let wrapped: Vec<i64> = exact.iter().map(|&value| wrap(value)).collect();
        for order in [ByteOrder::Native, ByteOrder::Big] {
            let payload = Misaligned::new(misalignments[0], encode_integers(integer, &payload, order));
            for level in Level::supported() {
                let mut dst = Misaligned::new(misalignments[1], encode_integers(integer, &slot, ByteOrder::Native));
                let overflow = level.add_integers(integer, dst.bytes_mut(), payload.bytes(), order);
                prop_assert_eq!(overflow, exact != wrapped, "{}", level.name());
                prop_assert_eq!(decode_integers(integer, dst.bytes()), wrapped.clone(), "{}", level.name());
                prop_assert!(dst.is_intact());
                let mut wire = vec![0; dst.bytes().len()];
                level.swap_bytes(integer, &mut wire, dst.bytes());
                prop_assert_eq!(&wire, &encode_integers(integer, &wrapped, ByteOrder::Big));
                level.swap_bytes_in_place(integer, dst.bytes_mut());
                prop_assert_eq!(&wire, dst.bytes());
                prop_assert!(dst.is_intact());
            }
        }
    }
}

/// A payload that is one byte short is refused before anything is written.
#[test]
#[should_panic(expected = "bytes of 4 int32")]
fn lengths_must_agree() {
    let block = FixedPoint::new(DType::F32, 2).at(Exponent::MAX).expect("finite");
    block.quantise(&mut [0; 15], &[0; 16], ByteOrder::Big);
}

/// Formats that exist, with the number of workers.
fn any_format() -> impl Strategy<Value = (FixedPoint, u32)> {
    let workers = prop_oneof![1..=9_u32, 10..=300_u32, 1..=i16::MAX as u32];
    (prop::sample::select(FORMATS.to_vec()), workers)
        .prop_map(|((dtype, integer), workers)| (FixedPoint::with_integer(dtype, workers, integer), workers))
}

/// `value` over the block's unit, rounded to nearest even by definition, in integers.
fn reference_count(format: FixedPoint, exponent: Exponent, value: f64) -> i64 {
    if exponent == Exponent::ZERO { 0 } else { rounded(value, unit_exponent(format, exponent)) }
}

fn unit_exponent(format: FixedPoint, exponent: Exponent) -> i32 {
    format.at(exponent).expect("finite").unit().log2() as i32
}

fn rounded(value: f64, unit_exponent: i32) -> i64 {
    let (mantissa, power) = split(value);
    if mantissa == 0 {
        return 0; // Its power says nothing.
    }
    let magnitude = u128::from(mantissa.unsigned_abs());
    let shift = unit_exponent - power;
    let count = if shift <= 0 {
        magnitude << -shift
    } else if shift > 64 {
        0
    } else {
        let (quotient, rest) = (magnitude >> shift, magnitude & ((1 << shift) - 1));
        let half = 1_u128 << (shift - 1);
        quotient + u128::from(rest > half || rest == half && quotient % 2 == 1)
    };
    let count = i64::try_from(count).expect("the exponent covers the value");
    if mantissa < 0 { -count } else { count }
}

/// `value = mantissa * 2^power`, exactly.
fn split(value: f64) -> (i64, i32) {
    let bits = value.to_bits();
    let field = (bits >> 52 & 0x7ff) as i32;
    assert!(field > 0 && field < 0x7ff || value == 0.0, "every float32 is zero or a normal f64");
    let mantissa = if value == 0.0 { 0 } else { (bits & ((1 << 52) - 1) | 1 << 52) as i64 };
    // Only 24 bits are in use.
    let zeros = mantissa.trailing_zeros().min(52);
    let power = if value == 0.0 { 0 } else { field - 1075 + zeros as i32 };
    (if value < 0.0 { -(mantissa >> zeros) } else { mantissa >> zeros }, power)
}

/// The largest magnitude of `dtype` below the power.
fn largest_below(dtype: DType, exponent: Exponent) -> f64 {
    let power = 2_f64.powi(exponent.code().into());
    let (bits, last_place) = shape(dtype);
    power - 2_f64.powi((i32::from(exponent.code()) - bits).max(last_place))
}

fn every_exponent(dtype: DType) -> Vec<Exponent> {
    let (_, last_place) = shape(dtype);
    let top = if dtype == DType::F16 { 16 } else { 128 };
    (last_place + 1..=top).map(|code| Exponent::from_code(code as i16).expect("a power")).collect()
}

/// Bits of the significand, and the power of the smallest denormal.
fn shape(dtype: DType) -> (i32, i32) {
    match dtype {
        DType::F32 => (24, -149),
        DType::F16 => (11, -24),
        _ => (8, -133),
    }
}

fn quantise(level: Level, block: Block, src: &[u8]) -> Vec<i64> {
    let format = block.format();
    let mut dst = vec![0; src.len() / format.dtype().size() * format.integer().size()];
    level.quantise(block, &mut dst, src, ByteOrder::Native);
    decode_integers(format.integer(), &dst)
}

fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    let encode_one = |&value: &f64| match dtype {
        DType::F32 => (value as f32).to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f32(value as f32).to_ne_bytes().to_vec(),
        _ => bf16::from_f32(value as f32).to_ne_bytes().to_vec(),
    };
    values.iter().flat_map(encode_one).collect()
}

fn encode_integers(integer: DType, values: &[i64], order: ByteOrder) -> Vec<u8> {
    let encode_one = |&value: &i64| {
        let bytes = value.to_be_bytes();
        let mut bytes = bytes[8 - integer.size()..].to_vec();
        if order == ByteOrder::Native && cfg!(target_endian = "little") {
            bytes.reverse();
        }
        bytes
    };
    values.iter().flat_map(encode_one).collect()
}

fn decode_integers(integer: DType, bytes: &[u8]) -> Vec<i64> {
    let decode = |bytes: &[u8]| match *bytes {
        [a, b] => i64::from(i16::from_ne_bytes([a, b])),
        [a, b, c, d] => i64::from(i32::from_ne_bytes([a, b, c, d])),
        _ => unreachable!(),
    };
    bytes.chunks_exact(integer.size()).map(decode).collect()
}

/// Bytes that start anywhere in a cache line, with a guard behind.
struct Misaligned {
    bytes: Vec<u8>,
    start: usize,
}

impl Misaligned {
    fn new(misalignment: usize, content: Vec<u8>) -> Misaligned {
        let padding = vec![0; 64 + misalignment];
        let start = padding.as_ptr().align_offset(64) + misalignment;
        let mut bytes = vec![0x55; start];
        bytes.extend(content);
        bytes.extend([0x55; 64]);
        Misaligned { bytes, start }
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..self.bytes.len() - 64]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let end = self.bytes.len() - 64;
        &mut self.bytes[self.start..end]
    }

    fn is_intact(&self) -> bool {
        self.bytes[..self.start].iter().chain(&self.bytes[self.bytes.len() - 64..]).all(|&byte| byte == 0x55)
    }
}

/// splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Finite values of `dtype`, zeros and denormals among them, of powers from `centre - spread` to `centre`.
    fn values(&mut self, dtype: DType, count: usize, centre: i32, spread: i32) -> Vec<f64> {
        let (bits, last_place) = shape(dtype);
        let top = if dtype == DType::F16 { 16 } else { 128 };
        (0..count)
            .map(|_| {
                let power = (centre - self.below(spread as u64) as i32).clamp(last_place + 1, top);
                let place = (power - bits).max(last_place);
                let significand = match self.below(5) {
                    0 => 0,
                    1 => (1 << (power - place)) - 1, // the largest below the power
                    2 => 1 << (power - place - 1),   // the power below
                    _ => self.below(1 << (power - place)),
                };
                let value = significand as f64 * 2_f64.powi(place);
                if self.below(2) == 0 { value } else { -value }
            })
            .collect()
    }
}

const FORMATS: [(DType, DType); 6] = [
    (DType::F32, DType::I32),
    (DType::F32, DType::I16),
    (DType::F16, DType::I16),
    (DType::F16, DType::I32),
    (DType::BF16, DType::I16),
    (DType::BF16, DType::I32),
];
