//! What is left of a core whose server is lost.

use super::{AllReduce, Core};

/// An operation that a fallback has to end.
#[derive(Debug)]
pub struct Leftover {
    pub(in crate::client) all_reduce: AllReduce,
    pub(in crate::client) begun: bool,
    /// For each piece its start and length in the tensor, and whether it holds the final result.
    pub(in crate::client) pieces: Vec<(usize, usize, bool)>,
}

impl Leftover {
    /// The operation.
    #[must_use]
    pub fn all_reduce(&self) -> &AllReduce {
        &self.all_reduce
    }

    /// For each piece of the tensor its start and length in bytes, and whether the tensor holds its result.
    pub fn pieces(&self) -> impl Iterator<Item = (usize, usize, bool)> + '_ {
        self.pieces.iter().copied()
    }

    /// Whether the contribution was premultiplied, if it had to be.
    #[must_use]
    pub fn begun(&self) -> bool {
        self.begun
    }
}

impl Core {
    /// Where a fallback has to begin, as far as this rank knows: the number of its first operation that lacks a result, and
    /// the number of operations that it was given.
    #[must_use]
    pub fn fallback_point(&self) -> (u64, u64) {
        let complete = self.ops.iter().take_while(|op| op.has_all()).count() as u64;
        (self.first + complete, self.first + self.ops.len() as u64)
    }

    /// Removes the first operation, for a fallback.
    pub fn take_first(&mut self) -> Option<(u64, Leftover)> {
        let op = self.ops.pop_front()?;
        self.first += 1;
        let pieces = op.sides.iter().flat_map(|side| {
            let step = op.layout.piece_bytes();
            (0..side.len.div_ceil(step))
                .map(move |i| (side.start + i * step, step.min(side.len - i * step), !side.has_failed))
        });
        let pieces =
            pieces.zip(&op.delivered).map(|((start, len, has_come), here)| (start, len, has_come && *here)).collect();
        Some((self.first - 1, Leftover { all_reduce: op.all_reduce, begun: op.begun, pieces }))
    }
}
