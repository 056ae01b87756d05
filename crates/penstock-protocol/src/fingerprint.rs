//! What a rank believes an operation to be, in 64 bits.
//!
//! Every data frame, grant and probe carries it, so a rank that issues another operation, dtype, length, root or
//! reduction is found at the first frame. It is packed, not hashed: whoever finds the mismatch can print both sides
//! without another exchange.
//!
//! ```text
//!   63      60 59       56 55      50 49          36 35                    0
//!   | kind (4) | reduce (4)| dtype (6)| root (14)   | elements (36)        |
//! ```

use penstock_types::{DType, ReduceOp};

/// What an operation is, as far as ranks must agree on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint(pub u64);

impl Fingerprint {
    /// Packs an operation. `name` is an index into [`NAMES`]; `root` is cut to 14 bits and `elements` to 36.
    #[must_use]
    pub fn new(name: Name, reduce: Option<ReduceOp>, dtype: DType, root: Option<u32>, elements: u64) -> Fingerprint {
        let reduce = reduce.map_or(0, |op| 1 + REDUCTIONS.iter().position(|name| *name == op.name()).unwrap_or(14));
        let root = root.map_or(ROOT_MASK, u64::from) & ROOT_MASK;
        Fingerprint(
            (name as u64) << 60
                | (reduce as u64) << 56
                | (dtype as u64 & 0x3f) << 50
                | root << 36
                | elements & ELEMENTS_MASK,
        )
    }

    /// For people: `all_reduce(sum, 1024 x float32)`.
    #[must_use]
    pub fn describe(self) -> String {
        let name = NAMES.get((self.0 >> 60) as usize).copied().unwrap_or("unknown operation");
        let reduce = (self.0 >> 56 & 0xf) as usize;
        let dtype = (self.0 >> 50 & 0x3f) as u8;
        let dtype =
            DType::ALL.iter().find(|known| **known as u8 == dtype).map_or("unknown dtype", |known| known.name());
        let root = self.0 >> 36 & ROOT_MASK;
        let mut text = format!("{name}(");
        if reduce > 0 {
            text += REDUCTIONS.get(reduce - 1).copied().unwrap_or("?");
            text += ", ";
        }
        text += &format!("{} x {dtype}", self.0 & ELEMENTS_MASK);
        if root != ROOT_MASK {
            text += &format!(", root {root}");
        }
        text + ")"
    }
}

/// The operations that can be told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Name {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    AllToAll,
    Barrier,
    PointToPoint,
}

impl Name {
    /// The name that torch and logs use.
    #[must_use]
    pub fn text(self) -> &'static str {
        NAMES[self as usize]
    }
}

/// Names by their number.
const NAMES: [&str; 10] = [
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "send/recv",
];
const REDUCTIONS: [&str; 9] = ["sum", "avg", "premul_sum", "product", "min", "max", "band", "bor", "bxor"];
const ROOT_MASK: u64 = 0x3fff;
const ELEMENTS_MASK: u64 = (1 << 36) - 1;

#[cfg(test)]
mod tests {
    use super::*;

    /// What differs between ranks differs in the fingerprint, and both can be told in words.
    #[test]
    fn differences_show() {
        let base = Fingerprint::new(Name::AllReduce, Some(ReduceOp::Sum), DType::F32, None, 1024);
        assert_eq!(base.describe(), "all_reduce(sum, 1024 x float32)");
        let others = [
            Fingerprint::new(Name::AllReduce, Some(ReduceOp::Max), DType::F32, None, 1024),
            Fingerprint::new(Name::AllReduce, Some(ReduceOp::Sum), DType::I32, None, 1024),
            Fingerprint::new(Name::AllReduce, Some(ReduceOp::Sum), DType::F32, None, 1025),
            Fingerprint::new(Name::AllReduce, Some(ReduceOp::BitXor), DType::I32, None, 1024),
        ];
        for other in others {
            assert_ne!(base, other);
        }
        let rooted = Fingerprint::new(Name::Broadcast, None, DType::BF16, Some(3), 7);
        assert_eq!(rooted.describe(), "broadcast(7 x bfloat16, root 3)");
    }
}
