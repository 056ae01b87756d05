//! The bytes of a bucket: whether its gradients are contiguous in memory, and their conversion to the dtype on the wire and back.

use penstock_plan::buckets::Bucket;
use penstock_types::DType;

/// Whether the pieces of a bucket are contiguous in memory.
pub(crate) fn is_one_piece(bucket: &Bucket, pieces: &[*mut u8]) -> bool {
    let ends = bucket.pieces.iter().zip(pieces).map(|(piece, start)| start.wrapping_add(piece.range.len() as usize));
    ends.zip(&pieces[1..]).all(|(end, next)| end == *next)
}

/// Rounds `bytes` bytes of float32, times a factor, to half as many bytes. A residual is added first; what the rounding takes
/// off becomes the next residual. For values that the wire's dtype cannot hold (infinity, NaN) it becomes 0, or they would
/// never leave.
///
/// # Safety
/// `src`, `residual` and `dst` are valid for these sizes, all but `dst` are aligned, and nothing else uses them.
pub(crate) unsafe fn round(
    wire: DType,
    dst: *mut u8,
    src: *const u8,
    bytes: usize,
    factor: f64,
    residual: Option<*mut f32>,
) {
    let narrow = match wire {
        DType::F16 => penstock_kernels::f32_to_f16,
        _ => penstock_kernels::f32_to_bf16,
    };
    let (mut scaled, mut widened) = ([0f32; BLOCK], [0f32; BLOCK]);
    let elements = bytes / 4;
    for start in (0..elements).step_by(BLOCK) {
        let count = BLOCK.min(elements - start);
        let (scaled, widened) = (&mut scaled[..count], &mut widened[..count]);
        // SAFETY: the caller's promise. The buffer of a bucket is allocated for more than two bytes at a time, and pieces before
        // this one were of whole elements: it is aligned to two.
        let (dst, residual) = unsafe {
            penstock_kernels::premultiply(
                DType::F32,
                scaled.as_mut_ptr().cast(),
                src.add(4 * start),
                4 * count,
                factor,
            );
            let dst = std::slice::from_raw_parts_mut(dst.cast::<u16>().add(start), count);
            (dst, residual.map(|residual| std::slice::from_raw_parts_mut(residual.add(start), count)))
        };
        let Some(residual) = residual else {
            narrow(dst, scaled);
            continue;
        };
        scaled.iter_mut().zip(&*residual).for_each(|(value, kept)| *value += kept);
        narrow(dst, scaled);
        widen_slice(wire, widened, dst);
        for ((kept, value), sent) in residual.iter_mut().zip(&*scaled).zip(&*widened) {
            let lost = value - sent;
            *kept = if lost.is_finite() { lost } else { 0.0 };
        }
    }
}

/// The inverse of [`round`]: widens to float32.
///
/// # Safety
/// As for [`round`], with `dst` the aligned one.
pub(crate) unsafe fn widen(wire: DType, dst: *mut u8, src: *const u8, bytes: usize) {
    // SAFETY: the caller's promise.
    let (src, dst) = unsafe {
        (
            std::slice::from_raw_parts(src.cast::<u16>(), bytes / 4),
            std::slice::from_raw_parts_mut(dst.cast::<f32>(), bytes / 4),
        )
    };
    widen_slice(wire, dst, src);
}

fn widen_slice(wire: DType, dst: &mut [f32], src: &[u16]) {
    match wire {
        DType::F16 => penstock_kernels::f16_to_f32(dst, src),
        _ => penstock_kernels::bf16_to_f32(dst, src),
    }
}

/// Elements that are scaled at a time: 4 KiB, which fit the first-level cache.
const BLOCK: usize = 1024;
