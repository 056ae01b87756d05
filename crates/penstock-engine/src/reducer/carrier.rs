//! How gradients get onto the wire and back: the memory of a bucket, what is copied into it, and the dtype that travels.

use super::{Gradient, Reducer};
use crate::pieces::{round, widen};
use penstock_plan::buckets::Bucket;
use penstock_types::{DType, Failure, FailureKind, ReduceOp};

/// The memory of a bucket's pieces, and the buffer that carries them if they are not contiguous.
pub(super) struct Carrier {
    pub(super) bucket: Bucket,
    pub(super) pieces: Vec<*mut u8>,
    /// The residuals of the pieces; empty without error feedback.
    pub(super) residuals: Vec<*mut f32>,
    pub(super) buffer: Option<Vec<u8>>,
}

// SAFETY: the pointers are of gradients that `Submitted` keeps alive until the bucket is over, and of residuals, which live as
// long as the reducer and never move.
unsafe impl Send for Carrier {}

impl Reducer {
    /// Copies pieces into the bucket's buffer, if it has one.
    ///
    /// # Safety
    /// The pieces are valid, and nothing else writes to them.
    pub(super) unsafe fn load(&self, carrier: &mut Carrier) {
        let Some(buffer) = &mut carrier.buffer else { return };
        let (bytes, wire) = (carrier.bucket.bytes() as usize, self.wire());
        buffer.resize(if wire.is_some() { bytes / 2 } else { bytes }, 0);
        let mut at = buffer.as_mut_ptr();
        for (at_piece, (piece, src)) in carrier.bucket.pieces.iter().zip(&carrier.pieces).enumerate() {
            let len = piece.range.len() as usize;
            // SAFETY: the buffer holds all pieces one after the other; the caller vouches for them.
            at = unsafe {
                match wire {
                    None => {
                        at.copy_from_nonoverlapping(*src, len);
                        at.add(len)
                    }
                    Some(wire) => {
                        let factor = if self.0.op == ReduceOp::Avg { 1.0 / f64::from(self.0.world) } else { 1.0 };
                        round(wire, at, *src, len, factor, carrier.residuals.get(at_piece).copied());
                        if self.0.check_finite && !penstock_kernels::is_finite(wire, at, len / 2) {
                            let name = &self.0.gradients[piece.index as usize].name;
                            self.fail(&self.not_finite(name, &format!(" as {wire}, which goes over the wire")));
                        }
                        at.add(len / 2)
                    }
                }
            };
        }
    }

    /// Copies the reduced pieces back.
    ///
    /// # Safety
    /// The pieces are valid, and nothing else uses them.
    pub(super) unsafe fn store(&self, carrier: &Carrier) {
        let Some(buffer) = &carrier.buffer else { return };
        let wire = self.wire();
        let mut at = buffer.as_ptr();
        for (piece, dst) in carrier.bucket.pieces.iter().zip(&carrier.pieces) {
            let len = piece.range.len() as usize;
            // SAFETY: as in `load`.
            at = unsafe {
                match wire {
                    None => {
                        dst.copy_from_nonoverlapping(at, len);
                        at.add(len)
                    }
                    Some(wire) => {
                        widen(wire, *dst, at, len);
                        at.add(len / 2)
                    }
                }
            };
        }
    }

    pub(super) fn not_finite(&self, name: &str, form: &str) -> Failure {
        let (rank, step) = (self.0.rank, self.lock().stats.steps + 1);
        let message = format!(
            "the gradient of {name} on rank {rank} holds NaN or infinity in step {step}{form} (PENSTOCK_CHECK=nan)."
        );
        Failure::of_call(FailureKind::NotFinite, message)
    }
}

/// Whether gradients can travel as `wire`.
pub(super) fn check_wire(wire: Option<DType>, op: ReduceOp, gradients: &[Gradient]) -> Result<(), Failure> {
    let config = |message: String| Err(Failure::of_call(FailureKind::Config, message));
    if !matches!(wire, None | Some(DType::F16 | DType::BF16)) {
        return config("gradients go over the wire as they are, or as float16 or bfloat16.".into());
    }
    for Gradient { name, dtype, .. } in gradients {
        if !op.takes(*dtype) || (wire.is_some() && *dtype != DType::F32) {
            let way = wire.map_or(String::new(), |wire| format!(" and sent as {wire}"));
            return config(format!("{name} is {dtype}, which cannot be reduced with {}{way}.", op.name()));
        }
    }
    Ok(())
}
