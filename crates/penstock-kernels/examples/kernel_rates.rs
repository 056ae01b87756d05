//! How fast sums run, beside a copy of as many bytes in the same run. Every result is checked.
//!
//! ```text
//! cargo run --release -p penstock-kernels --example kernel_rates
//! ```
//!
//! The destination is one of the sources, as in a ring, so that a sum of `n` sources reads `n` buffers and writes one.
//! Rates count bytes read plus bytes written, and the copy moves as many. The bound in memory is about 150 % of the
//! copy: a line that is only written is first read too, which the copy's rate does not count and a sum in place does not
//! need. Copies and sums take turns, and a figure is the best of many short samples: what else runs on the machine can
//! only make them slower. Not shown: several threads at once; operands that do not start on a cache line, unless
//! `--offset BYTES` asks for them.

use std::hint::black_box;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use penstock_kernels::{Finish, Level};
use penstock_types::{DType, ReduceOp};

fn main() {
    let mut offset = 0;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match (argument.as_str(), arguments.next().and_then(|bytes| bytes.parse().ok())) {
            ("--offset", Some(bytes)) if bytes <= MAX_OFFSET_BYTES => offset = bytes,
            _ => {
                eprintln!("usage: kernel_rates [--offset BYTES], where BYTES is at most {MAX_OFFSET_BYTES}");
                std::process::exit(2);
            }
        }
    }
    println!("the crate uses {}; sources start {offset} bytes after a cache line", penstock_kernels::simd_level());
    println!("level     dtype     sources  footprint      sum GB/s  copy GB/s  share");
    for (footprint_name, footprint_bytes) in [("L2", L2_BYTES), ("memory", MEMORY_BYTES)] {
        for level in Level::supported() {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                for sources in [2, 4] {
                    let case = Case { level, dtype, sources, footprint_bytes, offset };
                    let Rates { sum, copy } = case.measure(SAMPLES, SAMPLE_TIME);
                    println!(
                        "{:<9} {:<9} {sources:<8} {footprint_name:<6} {:>4} KiB {sum:>9.1} {copy:>10.1} {:>5.0} %",
                        level.name(),
                        dtype.name(),
                        footprint_bytes / 1024,
                        100.0 * sum / copy
                    );
                }
            }
        }
    }
}

/// What is measured: a sum on `level` of `sources` buffers that are `footprint_bytes` together.
struct Case {
    level: Level,
    dtype: DType,
    sources: usize,
    footprint_bytes: usize,
    offset: usize,
}

/// Bytes read and written, in units of 10^9 a second.
struct Rates {
    sum: f64,
    copy: f64,
}

impl Case {
    /// Times sums and copies by turns and checks what the sums made.
    fn measure(&self, samples: usize, sample_time: Duration) -> Rates {
        let bytes = self.footprint_bytes / self.sources / 64 * 64;
        let moved_bytes = (self.sources + 1) * bytes;
        let mut buffers: Vec<Lines> = (0..self.sources).map(|_| Lines::new(bytes + self.offset)).collect();
        for (k, buffer) in buffers.iter_mut().enumerate() {
            for (i, element) in
                buffer.bytes_mut()[self.offset..][..bytes].chunks_exact_mut(self.dtype.size()).enumerate()
            {
                encode(self.dtype, value(k, i), element);
            }
        }
        let pointers: Vec<*mut u8> =
            buffers.iter_mut().map(|buffer| buffer.bytes_mut()[self.offset..].as_mut_ptr()).collect();
        let sources: Vec<*const u8> = pointers.iter().map(|pointer| pointer.cast_const()).collect();
        let mut sums = 0;
        let mut sum = || {
            sums += 1;
            // SAFETY: every buffer has `bytes` bytes from its pointer on, and nobody else uses them meanwhile.
            unsafe { self.level.reduce(ReduceOp::Sum, self.dtype, pointers[0], &sources, bytes, Finish::Nothing) }
        };
        let (copy_src, mut copy_dst) = (Lines::new(moved_bytes / 2), Lines::new(moved_bytes / 2));
        let mut copy = || {
            let dst = &mut copy_dst.bytes_mut()[..moved_bytes / 2];
            black_box(dst).copy_from_slice(black_box(&copy_src.bytes()[..moved_bytes / 2]));
        };

        let sum_repeats = repeats_in(sample_time, &mut sum);
        let copy_repeats = repeats_in(sample_time, &mut copy);
        let mut best = Rates { sum: 0.0, copy: 0.0 };
        for _ in 0..samples {
            best.sum = best.sum.max(rate(moved_bytes, sum_repeats, &mut sum));
            best.copy = best.copy.max(rate(moved_bytes, copy_repeats, &mut copy));
        }
        self.check(&buffers[0].bytes()[self.offset..][..bytes], sums);
        best
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

/// How often `work` runs in `time`, at least once.
fn repeats_in(time: Duration, work: &mut impl FnMut()) -> usize {
    work();
    let start = Instant::now();
    let mut repeats = 0;
    while repeats == 0 || start.elapsed() < time {
        work();
        repeats += 1;
    }
    repeats
}

fn rate(bytes: usize, repeats: usize, work: &mut impl FnMut()) -> f64 {
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

/// About half of a core's L2 cache on server processors of the last years (1 to 2 MiB).
const L2_BYTES: usize = 512 << 10;
/// Several times the last-level cache that one core can fill.
const MEMORY_BYTES: usize = 192 << 20;
/// A prime, so that elements do not line up with vectors.
const PERIOD: usize = 251;
/// Some of this many samples run undisturbed on a busy machine; all cases together take half a minute.
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
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                for sources in [2, 4] {
                    let case = Case { level, dtype, sources, footprint_bytes: 16 << 10, offset: 1 };
                    let Rates { sum, copy } = case.measure(1, Duration::ZERO);
                    assert!(sum > 0.0 && copy > 0.0);
                }
            }
        }
    }
}
