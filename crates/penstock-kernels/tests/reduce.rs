//! Reductions on every level, against a reference that takes one element at a time.

use half::{bf16, f16};
use penstock_kernels::{Finish, Level};
use penstock_types::{DType, ReduceOp};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every (level, operation, dtype, finish) gives the reference's bits: for 1 to 5 sources of any length at any
    /// address, into memory of its own and into any one of the sources; and nothing else is written.
    #[test]
    fn all_levels_give_the_bits_of_the_reference(
        sources in 1..=5_usize,
        elements in 0..300_usize,
        misalignments in prop::array::uniform6(0..64_usize),
        dst in 0..6_usize,
        ranks in prop_oneof![1..=9_u32, any::<u32>().prop_map(|ranks| ranks.max(1))],
        special_share in 0..=4_u64,
        seed: u64,
    ) {
        for (op, dtype, finish) in every_reduction(ranks) {
            let mut random = Random(seed);
            let bytes = elements * dtype.size();
            let inputs: Vec<Vec<u8>> = (0..sources).map(|_| random.elements(dtype, elements, special_share)).collect();
            let expected = reference_all(op, dtype, &inputs, finish);
            for level in Level::supported() {
                let mut buffers: Vec<Guarded> = misalignments.map(|start| Guarded::new(start, bytes)).into();
                for (buffer, input) in buffers.iter_mut().zip(&inputs) {
                    buffer.bytes_mut().copy_from_slice(input);
                }
                // Buffers `0..sources` are the sources; `dst` may be one of them.
                reduce(level, op, dtype, &mut buffers, dst, sources, finish);
                prop_assert_eq!(
                    buffers[dst].bytes(), &expected,
                    "{} {} {} {:?}", level.name(), op.name(), dtype, finish
                );
                for (k, input) in inputs.iter().enumerate() {
                    prop_assert!(k == dst || buffers[k].bytes() == input, "source {} was written", k);
                }
                for buffer in &buffers {
                    prop_assert!(buffer.is_intact(), "written past the end");
                }
            }
        }
    }

    /// Every level multiplies like the reference, in place and not.
    #[test]
    fn premultiply_gives_the_bits_of_the_reference(
        elements in 0..300_usize,
        misalignments in prop::array::uniform2(0..64_usize),
        in_place: bool,
        factor in prop_oneof![Just(0.5), Just(1.0 / 3.0), Just(-0.0), Just(1e300), any::<f64>()],
        special_share in 0..=4_u64,
        seed: u64,
    ) {
        for &dtype in DType::ALL.iter().filter(|dtype| dtype.is_float()) {
            let input = Random(seed).elements(dtype, elements, special_share);
            let mut expected = Vec::new();
            for element in input.chunks_exact(dtype.size()) {
                expected.extend(match dtype {
                    DType::F64 => encode_f64(decode_f64(element) * factor),
                    _ => encode_f32(dtype, decode_f32(dtype, element) * factor as f32),
                });
            }
            for level in Level::supported() {
                let mut buffers = misalignments.map(|start| Guarded::new(start, input.len()));
                buffers[0].bytes_mut().copy_from_slice(&input);
                let src = buffers[0].bytes_mut().as_mut_ptr();
                let dst = if in_place { src } else { buffers[1].bytes_mut().as_mut_ptr() };
                // SAFETY: both pointers lead to `input.len()` bytes of buffers that live on.
                unsafe { level.premultiply(dtype, dst, src.cast_const(), input.len(), factor) };
                let [first, second] = &buffers;
                let result = if in_place { first } else { second };
                prop_assert_eq!(result.bytes(), &expected, "{} {}", level.name(), dtype);
                prop_assert!(in_place || first.bytes() == input, "the source was written");
                prop_assert!(first.is_intact() && second.is_intact(), "written past the end");
            }
        }
    }
}

/// Two operands give the same bits in either order: whichever rank is first, all get the same.
#[test]
fn two_sources_commute() {
    for (op, dtype, finish) in every_reduction(3) {
        for level in Level::supported() {
            let mut random = Random(0x5eed);
            let [a, b] = [(); 2].map(|()| random.elements(dtype, 1000, 2));
            let both = [[&a, &b], [&b, &a]].map(|inputs| {
                let mut buffers: Vec<Guarded> = [0; 3].map(|start| Guarded::new(start, a.len())).into();
                for (buffer, input) in buffers.iter_mut().zip(inputs) {
                    buffer.bytes_mut().copy_from_slice(input);
                }
                reduce(level, op, dtype, &mut buffers, 2, 2, finish);
                buffers[2].bytes().to_vec()
            });
            assert_eq!(both[0], both[1], "{} {} {dtype}", level.name(), op.name());
        }
    }
}

/// The cases that the documentation names, spelled out: NaN, zeros of either sign, infinities, wrapping, truncation.
#[test]
fn named_cases() {
    let f32s = |op, a: f32, b: f32| {
        let inputs = [a.to_ne_bytes().to_vec(), b.to_ne_bytes().to_vec()];
        on_all_levels(op, DType::F32, &inputs, Finish::Nothing)
    };
    let nan = 0x7fc0_0000_u32.to_ne_bytes().to_vec();
    let negative_nan_with_payload = f32::from_bits(0xffc0_1234);
    for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
        assert_eq!(f32s(op, negative_nan_with_payload, 1.0), nan);
        assert_eq!(f32s(op, f32::NEG_INFINITY, negative_nan_with_payload), nan);
    }
    assert_eq!(f32s(ReduceOp::Sum, f32::INFINITY, f32::NEG_INFINITY), nan);
    assert_eq!(f32s(ReduceOp::Product, f32::INFINITY, 0.0), nan);
    for (a, b) in [(0.0, -0.0), (-0.0, 0.0)] {
        assert_eq!(f32s(ReduceOp::Min, a, b), (-0.0_f32).to_ne_bytes());
        assert_eq!(f32s(ReduceOp::Max, a, b), 0.0_f32.to_ne_bytes());
    }
    assert_eq!(f32s(ReduceOp::Min, f32::NEG_INFINITY, f32::MIN), f32::NEG_INFINITY.to_ne_bytes());
    let denormal = f32::from_bits(1);
    assert_eq!(f32s(ReduceOp::Sum, denormal, denormal), f32::from_bits(2).to_ne_bytes());

    let i8s = |op, a: i8, b: i8, finish| {
        on_all_levels(op, DType::I8, &[vec![a.cast_unsigned()], vec![b.cast_unsigned()]], finish)[0].cast_signed()
    };
    assert_eq!(i8s(ReduceOp::Sum, 127, 1, Finish::Nothing), -128);
    assert_eq!(i8s(ReduceOp::Product, 16, 16, Finish::Nothing), 0);
    assert_eq!(i8s(ReduceOp::Avg, -3, -4, Finish::DivideBy(2)), -3);
    assert_eq!(i8s(ReduceOp::Avg, 3, 4, Finish::DivideBy(2)), 3);

    let truths = |op, a: u8, b: u8| on_all_levels(op, DType::Bool, &[vec![a], vec![b]], Finish::Nothing)[0];
    assert_eq!(truths(ReduceOp::Product, 2, 4), 1, "two true bytes without a common bit");
    assert_eq!(truths(ReduceOp::Sum, 0, 255), 1);
    assert_eq!(truths(ReduceOp::BitXor, 2, 1), 0);
}

/// Integer averages truncate right next to every multiple of the divisor, where a rounded quotient would show.
#[test]
fn integer_averages_truncate() {
    for ranks in [1, 2, 3, 5, 7, 10, 49, 641, 65_537, 1_000_003, i32::MAX.cast_unsigned(), u32::MAX] {
        let mut values = vec![0, 1, -1, i32::MIN, i32::MIN + 1, i32::MAX, i32::MAX - 1];
        let largest_quotient = i64::from(i32::MAX) / i64::from(ranks);
        for step in 0..=1000 {
            let multiple = largest_quotient * step / 1000 * i64::from(ranks);
            for near in [multiple - 1, multiple, multiple + 1] {
                values.extend([near, -near].map(|value| value.clamp(i32::MIN.into(), i32::MAX.into()) as i32));
            }
        }
        let input: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        let average = on_all_levels(ReduceOp::Avg, DType::I32, &[input], Finish::DivideBy(ranks));
        for (&value, quotient) in values.iter().zip(average.chunks_exact(4)) {
            let quotient: i64 = i32::from_ne_bytes(quotient.try_into().expect("four bytes")).into();
            assert_eq!(quotient, i64::from(value) / i64::from(ranks), "{value} / {ranks}");
        }
    }
}

/// Nothing beyond the end of a source is read: a page that must not be touched follows it.
#[test]
#[cfg(unix)]
fn no_source_is_read_beyond_its_end() {
    // SAFETY: asks for fresh memory; the results are checked.
    let page_bytes = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).expect("pages have a size");
    // SAFETY: as before.
    let pages = unsafe {
        let (readable, anonymous) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        libc::mmap(std::ptr::null_mut(), 2 * page_bytes, readable, anonymous, -1, 0)
    };
    assert_ne!(pages, libc::MAP_FAILED);
    // SAFETY: both pages were just mapped, for this test alone.
    let end = unsafe { pages.cast::<u8>().add(page_bytes) };
    // SAFETY: as before; the second page begins at `end`.
    assert_eq!(unsafe { libc::mprotect(end.cast(), page_bytes, libc::PROT_NONE) }, 0);
    for (op, dtype, finish) in every_reduction(3) {
        for elements in 0..200 {
            let bytes = elements * dtype.size();
            let mut dst = vec![0; bytes];
            for level in Level::supported() {
                // SAFETY: the first page ends with `bytes` bytes of zeros, and `dst` has as many.
                unsafe {
                    let source = end.sub(bytes).cast_const();
                    level.reduce(op, dtype, dst.as_mut_ptr(), &[source, source], bytes, finish);
                }
            }
            assert!(dst.iter().all(|&byte| byte == 0), "zeros make zeros");
        }
    }
    // SAFETY: nobody uses the pages any more.
    assert_eq!(unsafe { libc::munmap(pages, 2 * page_bytes) }, 0);
}

/// float16 and bfloat16 are rounded once, not after every source: 2048 + 1 + 1 is 2050 in float16 only so.
#[test]
fn halves_are_rounded_once() {
    let f16s = |values: &[f32]| values.iter().map(|&x| f16::from_f32(x).to_ne_bytes().to_vec()).collect::<Vec<_>>();
    let sum = on_all_levels(ReduceOp::Sum, DType::F16, &f16s(&[2048.0, 1.0, 1.0]), Finish::Nothing);
    assert_eq!(sum, f16::from_f32(2050.0).to_ne_bytes());
    // The sum of two ranks is beyond float16, their average is not.
    let average = on_all_levels(ReduceOp::Avg, DType::F16, &f16s(&[60000.0, 60000.0]), Finish::DivideBy(2));
    assert_eq!(average, f16::from_f32(60000.0).to_ne_bytes());
    let bf16s: Vec<_> = [256.0, 1.0, 1.0].map(|x| bf16::from_f32(x).to_ne_bytes().to_vec()).into();
    let sum = on_all_levels(ReduceOp::Sum, DType::BF16, &bf16s, Finish::Nothing);
    assert_eq!(sum, bf16::from_f32(258.0).to_ne_bytes());
}

/// One source with nothing to finish keeps its bits, even those of a NaN and of a bool that is not 0 or 1.
#[test]
fn one_source_is_copied() {
    let signalling_nan = 0xff80_0001_u32.to_ne_bytes().to_vec();
    let copy = on_all_levels(ReduceOp::Sum, DType::F32, std::slice::from_ref(&signalling_nan), Finish::Nothing);
    assert_eq!(copy, signalling_nan);
    assert_eq!(on_all_levels(ReduceOp::Max, DType::Bool, &[vec![7]], Finish::Nothing), [7]);
}

/// What a caller must not ask for panics before anything is written.
#[test]
fn misuse_panics() {
    let misuses: [(&str, ReduceOp, DType, usize, usize, Finish); 8] = [
        ("band is not defined on float32", ReduceOp::BitAnd, DType::F32, 8, 2, Finish::Nothing),
        ("avg is not defined on bool", ReduceOp::Avg, DType::Bool, 8, 2, Finish::DivideBy(2)),
        ("premul_sum is not defined on int32", ReduceOp::PremulSum(2.0), DType::I32, 8, 2, Finish::Nothing),
        ("sum is not defined on complex64", ReduceOp::Sum, DType::C64, 8, 2, Finish::Nothing),
        ("7 bytes are not a whole number of float32", ReduceOp::Sum, DType::F32, 7, 2, Finish::Nothing),
        ("a reduction needs a source", ReduceOp::Sum, DType::F32, 8, 0, Finish::Nothing),
        ("an average over no ranks", ReduceOp::Avg, DType::F32, 8, 2, Finish::DivideBy(0)),
        ("max of float32 cannot be divided", ReduceOp::Max, DType::F32, 8, 2, Finish::DivideBy(2)),
    ];
    for (message, op, dtype, bytes, sources, finish) in misuses {
        let mut buffer = [1_u8; 8];
        let pointer = buffer.as_mut_ptr();
        let result = std::panic::catch_unwind(|| {
            let sources = vec![pointer.cast_const(); sources];
            // SAFETY: the buffer has 8 bytes.
            unsafe { penstock_kernels::reduce(op, dtype, pointer, &sources, bytes, finish) }
        });
        let panic = result.expect_err(message);
        assert_eq!(
            panic.downcast_ref::<String>().map_or_else(|| panic.downcast_ref::<&str>().copied(), |s| Some(s)),
            Some(message)
        );
        assert_eq!(buffer, [1; 8]);
    }
}

/// The widest level comes first and is the one in use; the portable one is always there.
#[test]
fn levels() {
    let names: Vec<&str> = Level::supported().map(Level::name).collect();
    assert_eq!(names.first(), Some(&penstock_kernels::simd_level()));
    assert_eq!(names.last(), Some(&"portable"));
    println!("levels of this machine: {names:?}");
}

/// `buffers[dst] = buffers[0] op buffers[1] op ... buffers[sources - 1]`.
fn reduce(
    level: Level,
    op: ReduceOp,
    dtype: DType,
    buffers: &mut [Guarded],
    dst: usize,
    sources: usize,
    finish: Finish,
) {
    let bytes = buffers[dst].bytes().len();
    let pointers: Vec<*mut u8> = buffers.iter_mut().map(|buffer| buffer.bytes_mut().as_mut_ptr()).collect();
    let operands: Vec<*const u8> = pointers[..sources].iter().map(|pointer| pointer.cast_const()).collect();
    // SAFETY: every pointer leads to `bytes` bytes of a buffer of its own, and all the buffers are borrowed.
    unsafe { level.reduce(op, dtype, pointers[dst], &operands, bytes, finish) };
}

/// The result for one short input a source; fails unless all levels agree.
fn on_all_levels(op: ReduceOp, dtype: DType, inputs: &[Vec<u8>], finish: Finish) -> Vec<u8> {
    let mut results = Level::supported().map(|level| {
        let mut buffers: Vec<Guarded> = (0..=inputs.len()).map(|_| Guarded::new(0, inputs[0].len())).collect();
        for (buffer, input) in buffers.iter_mut().zip(inputs) {
            buffer.bytes_mut().copy_from_slice(input);
        }
        reduce(level, op, dtype, &mut buffers, inputs.len(), inputs.len(), finish);
        buffers[inputs.len()].bytes().to_vec()
    });
    let first = results.next().expect("the portable level is always there");
    assert!(results.all(|result| result == first), "levels differ: {} of {dtype}", op.name());
    first
}

fn every_reduction(ranks: u32) -> Vec<(ReduceOp, DType, Finish)> {
    let ops = [
        ReduceOp::Sum,
        ReduceOp::Avg,
        ReduceOp::PremulSum(0.5),
        ReduceOp::Product,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::BitAnd,
        ReduceOp::BitOr,
        ReduceOp::BitXor,
    ];
    let mut all = Vec::new();
    for &dtype in DType::ALL {
        for op in ops.into_iter().filter(|op| op.takes(dtype)) {
            all.push((op, dtype, Finish::Nothing));
            if op == ReduceOp::Avg {
                all.push((op, dtype, Finish::DivideBy(ranks)));
            }
        }
    }
    assert_eq!(all.len(), 4 * 7 + 5 * 9 + 7, "floats, integers, bool");
    all
}

fn reference_all(op: ReduceOp, dtype: DType, inputs: &[Vec<u8>], finish: Finish) -> Vec<u8> {
    if let ([input], Finish::Nothing) = (inputs, finish) {
        return input.clone();
    }
    let size = dtype.size();
    let elements = inputs[0].len() / size;
    (0..elements)
        .flat_map(|i| {
            let operands: Vec<&[u8]> = inputs.iter().map(|input| &input[i * size..][..size]).collect();
            reference(op, dtype, &operands, finish)
        })
        .collect()
}

/// One element, as the documentation of [`ReduceOp`] and of [`penstock_kernels::reduce`] says.
fn reference(op: ReduceOp, dtype: DType, operands: &[&[u8]], finish: Finish) -> Vec<u8> {
    match dtype {
        DType::F64 => {
            let total = operands.iter().map(|bytes| decode_f64(bytes)).reduce(|a, b| match op {
                ReduceOp::Product => a * b,
                ReduceOp::Min if a.is_nan() || b.is_nan() => f64::NAN,
                ReduceOp::Max if a.is_nan() || b.is_nan() => f64::NAN,
                ReduceOp::Min => std::cmp::min_by(a, b, f64::total_cmp),
                ReduceOp::Max => std::cmp::max_by(a, b, f64::total_cmp),
                _ => a + b,
            });
            let total = total.expect("there is a source");
            encode_f64(if let Finish::DivideBy(ranks) = finish { total / f64::from(ranks) } else { total })
        }
        _ if dtype.is_float() => {
            let total = operands.iter().map(|bytes| decode_f32(dtype, bytes)).reduce(|a, b| match op {
                ReduceOp::Product => a * b,
                ReduceOp::Min if a.is_nan() || b.is_nan() => f32::NAN,
                ReduceOp::Max if a.is_nan() || b.is_nan() => f32::NAN,
                ReduceOp::Min => std::cmp::min_by(a, b, f32::total_cmp),
                ReduceOp::Max => std::cmp::max_by(a, b, f32::total_cmp),
                _ => a + b,
            });
            let total = total.expect("there is a source");
            encode_f32(dtype, if let Finish::DivideBy(ranks) = finish { total / ranks as f32 } else { total })
        }
        DType::Bool => {
            let truths = operands.iter().map(|bytes| bytes[0] != 0);
            let result = match op {
                ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => truths.reduce(|a, b| a && b),
                ReduceOp::BitXor => truths.reduce(|a, b| a != b),
                _ => truths.reduce(|a, b| a || b),
            };
            vec![result.expect("there is a source").into()]
        }
        _ => {
            // 128 bits hold what the dtype holds of a result, and `decode_integer` cuts off the rest.
            let total = operands.iter().map(|bytes| decode_integer(dtype, bytes)).reduce(|a, b| match op {
                ReduceOp::Product => a.wrapping_mul(b),
                ReduceOp::Min => a.min(b),
                ReduceOp::Max => a.max(b),
                ReduceOp::BitAnd => a & b,
                ReduceOp::BitOr => a | b,
                ReduceOp::BitXor => a ^ b,
                _ => a + b,
            });
            let wrapped = &total.expect("there is a source").to_le_bytes()[..dtype.size()];
            let wrapped: Vec<u8> =
                if cfg!(target_endian = "big") { wrapped.iter().rev().copied().collect() } else { wrapped.to_vec() };
            match finish {
                Finish::Nothing => wrapped,
                Finish::DivideBy(ranks) => {
                    let quotient = decode_integer(dtype, &wrapped) / i128::from(ranks);
                    match dtype {
                        DType::I8 => (quotient as i8).to_ne_bytes().to_vec(),
                        DType::U8 => (quotient as u8).to_ne_bytes().to_vec(),
                        DType::I16 => (quotient as i16).to_ne_bytes().to_vec(),
                        DType::I32 => (quotient as i32).to_ne_bytes().to_vec(),
                        _ => (quotient as i64).to_ne_bytes().to_vec(),
                    }
                }
            }
        }
    }
}

fn decode_integer(dtype: DType, bytes: &[u8]) -> i128 {
    match (dtype, bytes) {
        (DType::U8, &[a]) => a.into(),
        (DType::I8, &[a]) => i8::from_ne_bytes([a]).into(),
        (DType::I16, &[a, b]) => i16::from_ne_bytes([a, b]).into(),
        (DType::I32, &[a, b, c, d]) => i32::from_ne_bytes([a, b, c, d]).into(),
        (DType::I64, _) => i64::from_ne_bytes(bytes.try_into().expect("eight bytes")).into(),
        _ => unreachable!("{dtype} of {} bytes", bytes.len()),
    }
}

fn decode_f64(bytes: &[u8]) -> f64 {
    f64::from_ne_bytes(bytes.try_into().expect("eight bytes"))
}

fn encode_f64(value: f64) -> Vec<u8> {
    if value.is_nan() { 0x7ff8_0000_0000_0000_u64.to_ne_bytes().to_vec() } else { value.to_ne_bytes().to_vec() }
}

fn decode_f32(dtype: DType, bytes: &[u8]) -> f32 {
    match (dtype, bytes) {
        (DType::F32, &[a, b, c, d]) => f32::from_ne_bytes([a, b, c, d]),
        (DType::F16, &[a, b]) => f16::from_ne_bytes([a, b]).to_f32(),
        (DType::BF16, &[a, b]) => bf16::from_ne_bytes([a, b]).to_f32(),
        _ => unreachable!("{dtype} of {} bytes", bytes.len()),
    }
}

fn encode_f32(dtype: DType, value: f32) -> Vec<u8> {
    match dtype {
        DType::F32 if value.is_nan() => 0x7fc0_0000_u32.to_ne_bytes().to_vec(),
        DType::F16 if value.is_nan() => 0x7e00_u16.to_ne_bytes().to_vec(),
        DType::BF16 if value.is_nan() => 0x7fc0_u16.to_ne_bytes().to_vec(),
        DType::F32 => value.to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f32(value).to_ne_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(value).to_ne_bytes().to_vec(),
        _ => unreachable!("{dtype}"),
    }
}

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// `special_share` of 4 are special: NaN, infinities, zeros, the ends of the denormal and normal numbers, small
    /// integers. Others are any bits.
    fn elements(&mut self, dtype: DType, count: usize, special_share: u64) -> Vec<u8> {
        let size = dtype.size();
        let (sign, infinity, one): (u64, u64, u64) = match dtype {
            DType::F64 => (1 << 63, 0x7ff0_0000_0000_0000, 1.0_f64.to_bits()),
            DType::F32 => (1 << 31, 0x7f80_0000, u64::from(1.0_f32.to_bits())),
            DType::F16 => (1 << 15, 0x7c00, 0x3c00),
            DType::BF16 => (1 << 15, 0x7f80, 0x3f80),
            _ => (1 << (8 * size - 1), (1 << (8 * size - 1)) - 1, 1),
        };
        // The lowest bit of the exponent. (For integers these are numbers next to 0 and to the ends.)
        let smallest_normal = infinity & infinity.wrapping_neg();
        let magnitudes = [
            0,
            1,
            smallest_normal - 1,
            smallest_normal,
            one,
            one + 1,
            infinity - 1,
            infinity,
            infinity.wrapping_add(1) & (sign - 1),
            infinity | smallest_normal >> 1,
            infinity | smallest_normal >> 1 | 5,
        ];
        let mut bytes = Vec::with_capacity(count * size);
        for _ in 0..count {
            let (choice, any) = (self.next(), self.next());
            let bits = if choice % 4 < special_share {
                magnitudes[(choice >> 8) as usize % magnitudes.len()] | if choice >> 40 & 1 == 1 { sign } else { 0 }
            } else {
                any
            };
            let all = bits.to_le_bytes();
            let start = bytes.len();
            bytes.extend_from_slice(&all[..size]);
            if cfg!(target_endian = "big") {
                bytes[start..].reverse();
            }
        }
        bytes
    }
}

/// Bytes at an address that is `start` beyond a multiple of 64, with guards on both sides.
struct Guarded {
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl Guarded {
    fn new(start: usize, bytes: usize) -> Guarded {
        let memory = vec![GUARD; 64 + start + bytes + 64 + 64];
        let start = memory.as_ptr().align_offset(64) + 64 + start;
        Guarded { memory, start, bytes }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.start..][..self.bytes]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.bytes]
    }

    fn is_intact(&self) -> bool {
        let (before, after) = (&self.memory[..self.start], &self.memory[self.start + self.bytes..]);
        before.iter().chain(after).all(|&byte| byte == GUARD)
    }
}

const GUARD: u8 = 0xa5;
