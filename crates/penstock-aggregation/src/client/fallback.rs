//! How operations end when a server has died.
//!
//! Operations before `first`, the first one that lacks a result on some rank, need nothing: all ranks have everything.
//! Operations from `given` on, which some rank was not given, are untouched everywhere. For those between, ranks find out
//! which of them has the result of each piece of the tensor. Then one sum over the ranks ends the operation, to which each
//! rank adds
//!
//! ```text
//!   the result         if it is the lowest rank that has it      (the others add zeros: the bits stay)
//!   its contribution   if no rank has it
//! ```

use super::core::Leftover;
use penstock_kernels::{Finish, premultiply, reduce};
use penstock_types::ReduceOp;

/// No rank: larger than any rank, so that the minimum over ranks is a rank if there is one.
pub const NOBODY: i32 = i32::MAX;

/// For each piece this rank, if its result is here.
#[must_use]
pub fn claims(rank: u32, left: &Leftover) -> Vec<i32> {
    left.pieces.iter().map(|(_, _, here)| if *here { rank as i32 } else { NOBODY }).collect()
}

/// Overwrites the tensor with what this rank adds, once the minimum of all ranks' claims is known.
pub fn contribute(rank: u32, left: &Leftover, owners: &[i32]) {
    if let (ReduceOp::PremulSum(factor), false) = (left.all_reduce.op, left.begun) {
        let (address, bytes) = (left.all_reduce.address, left.all_reduce.bytes);
        // SAFETY: the tensor is the operation's, which has not touched it yet.
        unsafe { premultiply(left.all_reduce.dtype, address, address, bytes, factor) };
    }
    for ((start, len, _), owner) in left.pieces.iter().zip(owners) {
        if *owner != NOBODY && *owner != rank as i32 {
            // SAFETY: pieces lie in the tensor, which is the operation's.
            unsafe { std::ptr::write_bytes(left.all_reduce.address.add(*start), 0, *len) };
        }
    }
}

/// Finishes the sum. Results that came from a server are already divided.
pub fn finish(world: u32, left: &Leftover, owners: &[i32]) {
    if left.all_reduce.op != ReduceOp::Avg {
        return;
    }
    for ((start, len, _), _) in left.pieces.iter().zip(owners).filter(|(_, owner)| **owner == NOBODY) {
        // SAFETY: pieces lie in the tensor; the one operand is the destination.
        unsafe {
            let place = left.all_reduce.address.add(*start);
            reduce(ReduceOp::Avg, left.all_reduce.dtype, place, &[place.cast_const()], *len, Finish::DivideBy(world));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::core::AllReduce;
    use super::*;
    use penstock_types::{DType, Time};

    /// Three ranks, four pieces, whose result no rank, one, two or all of them have. Every rank ends with the delivered bits
    /// where there are any, and with the average of the contributions elsewhere.
    #[test]
    fn delivered_pieces_keep_their_bits() {
        let has = [[false, false, true, true], [false, true, false, true], [false, false, true, true]];
        // A result as a server returned it: bits that no sum of the contributions has.
        let result = 0.123_456_79f32;
        let mut tensors: Vec<Vec<f32>> = (0..3)
            .map(|rank| has[rank].iter().map(|here| if *here { result } else { 3.0 * rank as f32 }).collect())
            .collect();
        let left: Vec<Leftover> = (tensors.iter_mut().zip(has))
            .map(|(tensor, has)| Leftover {
                all_reduce: AllReduce {
                    dtype: DType::F32,
                    op: ReduceOp::Avg,
                    address: tensor.as_mut_ptr().cast(),
                    bytes: 16,
                    fingerprint: 0,
                    ready: true,
                    started: Time(0),
                    timeout: 0,
                },
                begun: true,
                pieces: has.iter().enumerate().map(|(i, here)| (4 * i, 4, *here)).collect(),
            })
            .collect();
        let claimed: Vec<Vec<i32>> = (0..3).map(|rank| claims(rank as u32, &left[rank])).collect();
        let owners: Vec<i32> = (0..4).map(|i| claimed.iter().map(|claims| claims[i]).min().unwrap()).collect();
        assert_eq!(owners, [NOBODY, 1, 0, 0]);
        (0..3).for_each(|rank| contribute(rank as u32, &left[rank], &owners));
        let sums: Vec<f32> = (0..4).map(|i| tensors.iter().map(|tensor| tensor[i]).sum()).collect();
        for (rank, tensor) in tensors.iter_mut().enumerate() {
            tensor.copy_from_slice(&sums);
            finish(3, &left[rank], &owners);
        }
        for tensor in tensors {
            assert_eq!(tensor[0], 3.0);
            assert!(tensor[1..].iter().all(|value| value.to_bits() == result.to_bits()), "{tensor:?}");
        }
    }
}
