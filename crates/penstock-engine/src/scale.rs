//! The factor of a premultiplied sum, applied to a rank's contribution before its operation starts.

use penstock_core::groups::Call;
use penstock_plan::{Collective, Request};
use penstock_types::{DType, ReduceOp};

/// A contribution that is being multiplied, a block at a time: a tensor of a gigabyte takes a third of a second, and the
/// engine's thread has other work meanwhile.
#[derive(Debug)]
pub(crate) struct Scale {
    dtype: DType,
    factor: f64,
    src: *const u8,
    dst: *mut u8,
    bytes: usize,
    /// Bytes that are already multiplied.
    done: usize,
    /// The memory of `dst`, if the user's tensor must not change.
    copy: Option<Vec<u8>>,
}

// SAFETY: the pointers are the user's buffers, which the operation keeps alive, or `copy`, which does not move.
unsafe impl Send for Scale {}

impl Scale {
    /// The multiplication that `call` asks for, if any. An all-reduce is multiplied in place. The input of a reduce-scatter,
    /// and the tensor of a rank that is not a reduce's root, must not change, so a copy is multiplied: `input` and `output`
    /// then point to it.
    pub(crate) fn new(call: &Call, request: &Request, input: &mut *const u8, output: &mut *mut u8) -> Option<Scale> {
        let ReduceOp::PremulSum(factor) = call.op else { return None };
        let dtype = call.dtype;
        let copied = |src: *const u8, bytes: u64| {
            // Zeroed pages that are never touched cost nothing.
            let mut copy = vec![0; bytes as usize];
            let dst = copy.as_mut_ptr();
            Scale { dtype, factor, src, dst, bytes: bytes as usize, done: 0, copy: Some(copy) }
        };
        Some(match call.collective {
            Collective::ReduceScatter => {
                let scale = copied(*input, request.input_bytes());
                *input = scale.dst;
                scale
            }
            Collective::Reduce { root } if root != request.rank => {
                let scale = copied(*output, request.output_bytes());
                *output = scale.dst;
                scale
            }
            _ => {
                let bytes = request.output_bytes() as usize;
                Scale { dtype, factor, src: *output, dst: *output, bytes, done: 0, copy: None }
            }
        })
    }

    /// Multiplies the next block.
    pub(crate) fn work(&mut self) {
        let count = BLOCK_BYTES.min(self.bytes - self.done);
        // SAFETY: both buffers have `bytes` bytes; `dst` is `src` or a copy of its own. Blocks are of whole elements.
        unsafe {
            let (dst, src) = (self.dst.add(self.done), self.src.add(self.done));
            penstock_kernels::premultiply(self.dtype, dst, src, count, self.factor);
        }
        self.done += count;
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done == self.bytes
    }

    /// Bytes of the engine's own that it holds.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.copy.as_ref().map_or(0, Vec::len)
    }
}

/// Some 200 us of work; a multiple of every element size.
const BLOCK_BYTES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_plan::Placement;
    use penstock_stream::fingerprint::{Fingerprint, Name};
    use penstock_types::Priority;

    /// Every element is multiplied once, block by block, around the size of a block; the user's own tensor changes only where
    /// the operation is in place.
    #[test]
    fn blocks_cover_the_contribution_once() {
        for elements in [0, 1, BLOCK_BYTES / 4 - 1, BLOCK_BYTES / 4, BLOCK_BYTES / 4 + 1, BLOCK_BYTES] {
            for collective in [Collective::AllReduce, Collective::ReduceScatter, Collective::Reduce { root: 1 }] {
                let mut tensor: Vec<f32> = (0..elements).map(|at| (at % 1000) as f32).collect();
                let kept = tensor.clone();
                let bytes = 4 * elements as u64;
                let (input, output) = (tensor.as_ptr().cast(), tensor.as_mut_ptr().cast());
                let call = Call {
                    collective,
                    fingerprint: Fingerprint::new(Name::AllReduce, None, DType::F32, None, elements as u64),
                    dtype: DType::F32,
                    op: ReduceOp::PremulSum(3.0),
                    bytes,
                    splits: None,
                    tag: 0,
                    coflow: 0,
                    priority: Priority(0),
                    hold: false,
                    timeout: 0,
                };
                let request = Request {
                    collective,
                    world: 1,
                    rank: 0,
                    placement: Placement::one_host(1),
                    bytes,
                    element_bytes: 4,
                    splits: None,
                    segment_bytes: 4096,
                };
                let (mut input, mut output) = (input, output);
                let mut scale = Scale::new(&call, &request, &mut input, &mut output).expect("it multiplies");
                let mut turns = 0;
                while !scale.is_done() {
                    scale.work();
                    turns += 1;
                }
                assert_eq!(turns, (4 * elements).div_ceil(BLOCK_BYTES));
                let result = if collective == Collective::ReduceScatter { input } else { output.cast_const() };
                // SAFETY: `result` is the tensor or the copy, both of this length.
                let got = |at| unsafe { result.cast::<f32>().add(at).read_unaligned() };
                assert!((0..elements).all(|at| got(at) == 3.0 * kept[at]), "{collective:?}, {elements}");
                assert_eq!(tensor == kept, elements <= 1 || collective != Collective::AllReduce);
            }
        }
    }
}
