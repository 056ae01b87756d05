//! How fast sums and quantisation run, beside a copy of as many bytes in the same run. Every result is checked.
//!
//! ```text
//! cargo run --release -p penstock-kernels --example kernel_rates
//! ```
//!
//! The destination is one of the sources, as in a ring, so that a sum of `n` sources reads `n` buffers and writes one.
//! Rates count bytes read plus bytes written, and the copy moves as many. The bound in memory is about 150 % of the
//! copy: a line that is only written is first read too, which the copy's rate does not count and a sum in place does not
//! need. Copies and kernels take turns; a rate is the best of many short samples, since what else runs on the machine can
//! only make them slower, and a share is the median of the pairs. Quantising reads one buffer and writes another;
//! `exponent` only reads, so that its bound is twice the copy. `--only WORD` measures the rows with that word. Not shown:
//! several threads at once; operands that do not start on a cache line, unless `--offset BYTES` asks for them.

use std::hint::black_box;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use penstock_kernels::{ByteOrder, Finish, FixedPoint, Level};
use penstock_types::{DType, ReduceOp};

fn main() {
    let (mut offset, mut only) = (0, String::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let value = arguments.next();
        let bytes = value.as_ref().and_then(|bytes| bytes.parse().ok());
        match (argument.as_str(), bytes, value) {
            ("--offset", Some(bytes), _) if bytes <= MAX_OFFSET_BYTES => offset = bytes,
            ("--only", _, Some(word)) => only = word,
            _ => {
                eprintln!(
                    "usage: kernel_rates [--offset BYTES] [--only WORD], where BYTES is at most {MAX_OFFSET_BYTES}"
                );
                std::process::exit(2);
            }
        }
    }
    println!("the crate uses {}; operands start {offset} bytes after a cache line", penstock_kernels::simd_level());
    println!("level     kernel                     footprint          GB/s  copy GB/s  share");
    for (footprint_name, footprint_bytes) in [("L2", L2_BYTES), ("memory", MEMORY_BYTES)] {
        for level in Level::supported() {
            for (name, measure) in rows() {
                let row =
                    format!("{:<9} {name:<26} {footprint_name:<6} {:>6} KiB", level.name(), footprint_bytes / 1024);
                if row.contains(&only) {
                    let Rates { kernel, copy, share } =
                        measure(Setting { level, footprint_bytes, offset, samples: SAMPLES, sample_time: SAMPLE_TIME });
                    println!("{row} {kernel:>9.1} {copy:>10.1} {:>5.0} %", 100.0 * share);
                }
            }
        }
    }
}

/// Measures a kernel and checks its results.
type Measure = Box<dyn Fn(Setting) -> Rates>;

/// Every kernel that is measured, by name.
fn rows() -> Vec<(String, Measure)> {
    let mut rows: Vec<(String, Measure)> = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for sources in [2, 4] {
            rows.push((
                format!("sum of {sources} {dtype}"),
                Box::new(move |setting| Case { dtype, sources, setting }.measure()),
            ));
        }
    }
    for order in [ByteOrder::Native, ByteOrder::Big] {
        let suffix = if order == ByteOrder::Big { " BE" } else { "" };
        for (dtype, integer) in FORMATS {
            for kernel in [Conversion::Quantise, Conversion::Dequantise] {
                let (from, to) = if kernel == Conversion::Quantise { (dtype, integer) } else { (integer, dtype) };
                let run =
                    move |setting| quantisation(kernel, FixedPoint::with_integer(dtype, 8, integer), order, setting);
                rows.push((format!("{} to {}{suffix}", from.name(), to.name()), Box::new(run)));
            }
        }
        for integer in [DType::I32, DType::I16] {
            rows.push((
                format!("slot += {integer}{suffix}"),
                Box::new(move |setting| slot_addition(integer, order, setting)),
            ));
        }
        rows.push((format!("sum of 4 payloads f32{suffix}"), Box::new(move |setting| payload_sum(order, setting))));
    }
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        rows.push((format!("exponent of {dtype}"), Box::new(move |setting| exponent(dtype, setting))));
    }
    rows
}

/// Where and how a kernel is measured.
#[derive(Clone, Copy)]
struct Setting {
    level: Level,
    /// Of all buffers together.
    footprint_bytes: usize,
    /// Of each buffer's start, after a cache line.
    offset: usize,
    samples: usize,
    sample_time: Duration,
}

/// Bytes read and written, in units of 10^9 a second: the best of the samples. And the median share of the copy beside it.
struct Rates {
    kernel: f64,
    copy: f64,
    share: f64,
}

impl Setting {
    /// Times `work`, which reads and writes `moved_bytes`, by turns with a copy of as many.
    fn compare(self, moved_bytes: usize, work: &mut dyn FnMut()) -> Rates {
        let half = moved_bytes / 2;
        let (copy_src, mut copy_dst) = (Lines::new(half), Lines::new(half));
        let mut copy = || {
            let dst = &mut copy_dst.bytes_mut()[..half];
            black_box(dst).copy_from_slice(black_box(&copy_src.bytes()[..half]));
        };
        let work_repeats = repeats_in(self.sample_time, work);
        let copy_repeats = repeats_in(self.sample_time, &mut copy);
        let mut best = Rates { kernel: 0.0, copy: 0.0, share: 0.0 };
        let mut shares = Vec::new();
        for _ in 0..self.samples {
            let (kernel, copy) = (rate(moved_bytes, work_repeats, work), rate(moved_bytes, copy_repeats, &mut copy));
            best.kernel = best.kernel.max(kernel);
            best.copy = best.copy.max(copy);
            shares.push(kernel / copy);
        }
        shares.sort_by(f64::total_cmp);
        best.share = shares[shares.len() / 2];
        best
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Conversion {
    Quantise,
    Dequantise,
}

/// From floats to integers or back, from one buffer to another.
fn quantisation(kernel: Conversion, format: FixedPoint, order: ByteOrder, setting: Setting) -> Rates {
    let Setting { level, offset, .. } = setting;
    let (dtype, integer) = (format.dtype(), format.integer());
    let elements = setting.footprint_bytes / (dtype.size() + integer.size());
    let (mut floats, mut counts) =
        (Lines::new(elements * dtype.size() + offset), Lines::new(elements * integer.size() + offset));
    let floats = &mut floats.bytes_mut()[offset..][..elements * dtype.size()];
    let counts = &mut counts.bytes_mut()[offset..][..elements * integer.size()];
    for (i, element) in floats.chunks_exact_mut(dtype.size()).enumerate() {
        encode(dtype, value(0, i), element);
    }
    let exponent = level.block_exponent(dtype, floats);
    let block = format.at(exponent).expect("small integers are finite");
    level.quantise(block, counts, floats, order);
    for (i, element) in counts.chunks_exact(integer.size()).enumerate() {
        assert_eq!(decode_integer(element, order) as f64 * block.unit(), value(0, i).into(), "element {i}");
    }
    let original = floats.to_vec();
    let rates = match kernel {
        Conversion::Quantise => {
            setting.compare(floats.len() + counts.len(), &mut || level.quantise(block, counts, floats, order))
        }
        Conversion::Dequantise => {
            setting.compare(floats.len() + counts.len(), &mut || level.dequantise(block, floats, counts, order))
        }
    };
    assert!(floats == original, "small integers come back as they went");
    rates
}

/// A payload into a slot.
fn slot_addition(integer: DType, order: ByteOrder, setting: Setting) -> Rates {
    let Setting { level, offset, .. } = setting;
    let bytes = setting.footprint_bytes / 2 / 64 * 64;
    let (mut slot, mut payload) = (Lines::new(bytes + offset), Lines::new(bytes + offset));
    let slot = &mut slot.bytes_mut()[offset..][..bytes];
    let payload = &mut payload.bytes_mut()[offset..][..bytes];
    slot.fill(0);
    let one = if integer == DType::I32 { 1_i32.to_be_bytes().to_vec() } else { 1_i16.to_be_bytes().to_vec() };
    for element in payload.chunks_exact_mut(integer.size()) {
        element.copy_from_slice(&one);
        if order == ByteOrder::Native {
            element.reverse();
        }
    }
    let mut sums = 0;
    let rates = setting.compare(3 * bytes, &mut || {
        sums += 1;
        black_box(level.add_integers(integer, slot, payload, order));
    });
    let sums = if integer == DType::I32 { sums } else { i64::from(sums as i16) };
    for element in slot.chunks_exact(integer.size()) {
        assert_eq!(decode_integer(element, ByteOrder::Native), sums);
    }
    rates
}

/// Four payloads, as a slot of the float mode adds them up.
fn payload_sum(order: ByteOrder, setting: Setting) -> Rates {
    let Setting { level, offset, .. } = setting;
    let bytes = setting.footprint_bytes / 5 / 64 * 64;
    let swap = |element: &mut [u8]| {
        if order == ByteOrder::Big {
            element.reverse();
        }
    };
    let mut payloads: Vec<Lines> = (0..4).map(|_| Lines::new(bytes + offset)).collect();
    for (k, payload) in payloads.iter_mut().enumerate() {
        for (i, element) in payload.bytes_mut()[offset..][..bytes].chunks_exact_mut(4).enumerate() {
            encode(DType::F32, value(k, i), element);
            swap(element);
        }
    }
    let sources: Vec<&[u8]> = payloads.iter().map(|payload| &payload.bytes()[offset..][..bytes]).collect();
    let mut sum = Lines::new(bytes + offset);
    let sum = &mut sum.bytes_mut()[offset..][..bytes];
    let rates = setting.compare(5 * bytes, &mut || level.sum_f32(sum, &sources, order));
    for (i, element) in sum.chunks_exact_mut(4).enumerate() {
        swap(element);
        assert_eq!(decode(DType::F32, element), (0..4).map(|k| value(k, i)).sum::<f32>());
    }
    rates
}

/// The largest magnitude of a buffer.
fn exponent(dtype: DType, setting: Setting) -> Rates {
    let mut buffer = Lines::new(setting.footprint_bytes + setting.offset);
    let bytes = &mut buffer.bytes_mut()[setting.offset..][..setting.footprint_bytes / 64 * 64];
    for (i, element) in bytes.chunks_exact_mut(dtype.size()).enumerate() {
        encode(dtype, value(0, i), element);
    }
    setting.compare(bytes.len(), &mut || {
        assert_eq!(black_box(setting.level.block_exponent(dtype, bytes)).code(), 2, "3 is below 2^2");
    })
}

/// A sum of `sources` buffers into the first.
struct Case {
    dtype: DType,
    sources: usize,
    setting: Setting,
}

impl Case {
    /// Measures, and checks what the sums made.
    fn measure(&self) -> Rates {
        let Setting { level, offset, .. } = self.setting;
        let bytes = self.setting.footprint_bytes / self.sources / 64 * 64;
        let mut buffers: Vec<Lines> = (0..self.sources).map(|_| Lines::new(bytes + offset)).collect();
        for (k, buffer) in buffers.iter_mut().enumerate() {
            for (i, element) in buffer.bytes_mut()[offset..][..bytes].chunks_exact_mut(self.dtype.size()).enumerate() {
                encode(self.dtype, value(k, i), element);
            }
        }
        let pointers: Vec<*mut u8> =
            buffers.iter_mut().map(|buffer| buffer.bytes_mut()[offset..].as_mut_ptr()).collect();
        let sources: Vec<*const u8> = pointers.iter().map(|pointer| pointer.cast_const()).collect();
        let mut sums = 0;
        let rates = self.setting.compare((self.sources + 1) * bytes, &mut || {
            sums += 1;
            // SAFETY: every buffer has `bytes` bytes from its pointer on, and nobody else uses them meanwhile.
            unsafe { level.reduce(ReduceOp::Sum, self.dtype, pointers[0], &sources, bytes, Finish::Nothing) }
        });
        self.check(&buffers[0].bytes()[offset..][..bytes], sums);
        rates
    }

    /// Elements repeat with [`PERIOD`]: follows that many through all the sums, one by one.
    fn check(&self, result: &[u8], sums: usize) {
        let mut expected = vec![0; PERIOD * self.dtype.size()];
        for (i, element) in expected.chunks_exact_mut(self.dtype.size()).enumerate() {
            encode(self.dtype, value(0, i), element);
            for _ in 0..sums {
                let mut total = decode(self.dtype, element);
                for k in 1..self.sources {
                    total += value(k, i);
                }
                encode(self.dtype, total, element);
            }
        }
        for (i, chunk) in result.chunks(expected.len()).enumerate() {
            assert!(chunk == &expected[..chunk.len()], "{:?} differs in period {i}", self.dtype);
        }
    }
}

/// Element `i` of source `k`: small integers of both signs.
fn value(k: usize, i: usize) -> f32 {
    ((i % PERIOD * (k + 3)) % 7) as f32 - 3.0
}

fn encode(dtype: DType, value: f32, element: &mut [u8]) {
    match dtype {
        DType::F16 => element.copy_from_slice(&f16::from_f32(value).to_ne_bytes()),
        DType::BF16 => element.copy_from_slice(&bf16::from_f32(value).to_ne_bytes()),
        _ => element.copy_from_slice(&value.to_ne_bytes()),
    }
}

fn decode(dtype: DType, element: &[u8]) -> f32 {
    match (dtype, element) {
        (DType::F16, &[a, b]) => f16::from_ne_bytes([a, b]).to_f32(),
        (DType::BF16, &[a, b]) => bf16::from_ne_bytes([a, b]).to_f32(),
        _ => f32::from_ne_bytes(element.try_into().expect("an f32 has four bytes")),
    }
}

fn decode_integer(element: &[u8], order: ByteOrder) -> i64 {
    match (element, order) {
        (&[a, b], ByteOrder::Native) => i16::from_ne_bytes([a, b]).into(),
        (&[a, b], ByteOrder::Big) => i16::from_be_bytes([a, b]).into(),
        (&[a, b, c, d], ByteOrder::Native) => i32::from_ne_bytes([a, b, c, d]).into(),
        (&[a, b, c, d], ByteOrder::Big) => i32::from_be_bytes([a, b, c, d]).into(),
        _ => unreachable!("an integer of a slot has two or four bytes"),
    }
}

/// How often `work` runs in `time`, at least once.
fn repeats_in(time: Duration, work: &mut dyn FnMut()) -> usize {
    work();
    let start = Instant::now();
    let mut repeats = 0;
    while repeats == 0 || start.elapsed() < time {
        work();
        repeats += 1;
    }
    repeats
}

fn rate(bytes: usize, repeats: usize, work: &mut dyn FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..repeats {
        work();
    }
    (bytes * repeats) as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// A buffer of which `bytes[start..]` begins on a cache line.
struct Lines {
    bytes: Vec<u8>,
    start: usize,
}

impl Lines {
    fn new(bytes: usize) -> Lines {
        let bytes = vec![1; bytes + 63];
        Lines { start: bytes.as_ptr().align_offset(64), bytes }
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..]
    }
}

/// What travels as what: the formats that `FixedPoint::new` chooses, and the wider ones for many workers.
const FORMATS: [(DType, DType); 5] = [
    (DType::F32, DType::I32),
    (DType::F16, DType::I16),
    (DType::BF16, DType::I16),
    (DType::F16, DType::I32),
    (DType::BF16, DType::I32),
];
/// About half of a core's L2 cache on server processors of the last years (1 to 2 MiB).
const L2_BYTES: usize = 512 << 10;
/// Several times the last-level cache that one core can fill.
const MEMORY_BYTES: usize = 192 << 20;
/// A prime, so that elements do not line up with vectors.
const PERIOD: usize = 251;
/// Some of this many samples run undisturbed on a busy machine; all rows together take some minutes.
const SAMPLES: usize = 25;
/// Shorter than a scheduler's time slice, far longer than a call. One pass over memory takes longer, and is a sample.
const SAMPLE_TIME: Duration = Duration::from_millis(1);
/// More would only repeat.
const MAX_OFFSET_BYTES: usize = 63;

#[cfg(test)]
mod tests {
    use super::*;

    /// Measures every case once on a small footprint, so that the results are checked and the benchmark does not rot.
    #[test]
    fn small_mode() {
        for level in Level::supported() {
            for (name, measure) in rows() {
                let setting =
                    Setting { level, footprint_bytes: 16 << 10, offset: 1, samples: 1, sample_time: Duration::ZERO };
                let Rates { kernel, copy, share } = measure(setting);
                assert!(kernel > 0.0 && copy > 0.0 && share > 0.0, "{name}");
            }
        }
    }
}
