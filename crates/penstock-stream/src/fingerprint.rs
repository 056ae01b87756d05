//! A fingerprint: what a rank believes an operation to be, in 112 bits.
//!
//! Every data frame, grant and probe carries the sender's fingerprint. A rank that issues another operation, dtype, length,
//! root or reduction is found at the first frame. The fields are packed, not hashed, so the rank that finds the mismatch can
//! print both sides without another exchange.
//!
//! ```text
//!   63      60 59       56 55      50 49          36 35                    0
//!   | kind (4) | reduce (4)| dtype (6)| root (14)   | elements (36)        |
//! ```
//! The other 48 bits are the memory layout of the tensor ([`Layout`]). An element-wise operation takes tensors whose
//! elements do not lie in row-major order, but then every element must lie at the same place on every rank.

use penstock_types::{DType, ReduceOp};

/// What an operation is, as far as ranks must agree on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    /// Operation, reduction, dtype, root and elements, packed.
    pub what: u64,
    /// Which element lies where in memory.
    pub layout: Layout,
}

/// Which element of a dense tensor lies where in memory. The default is row-major.
///
/// The order alone does not say it: the transposes of a 2 x 6 and of a 3 x 4 matrix have the same order, and their fifth
/// elements lie at different places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Layout {
    /// In which order the dimensions lie in memory.
    pub order: Order,
    /// A checksum of the sizes of the dimensions; 0 for row-major tensors. Two layouts of the same order and of different
    /// sizes share it in one of 2^32 cases.
    pub sizes: u32,
}

impl Layout {
    /// The layout of a dense tensor: the sizes of its dimensions, and the order of the dimensions in memory, as
    /// [`Order::of`] takes it. Dimensions of size 1, and dimensions that follow each other in memory as they do in the
    /// shape, must have been joined: then equal layouts have equal arguments. `None` where there is no such order, or not
    /// one size a dimension.
    #[must_use]
    pub fn of(sizes: &[u64], permutation: &[usize]) -> Option<Layout> {
        if sizes.len() != permutation.len() {
            return None;
        }
        let order = Order::of(permutation)?;
        if order == Order::default() {
            return Some(Layout::default());
        }
        let sizes = sizes.iter().fold(0, |sum, size| crc32c::crc32c_append(sum, &size.to_le_bytes()));
        Some(Layout { order, sizes })
    }

    /// The layout as one number.
    #[must_use]
    pub fn number(self) -> u64 {
        u64::from(self.sizes) << 16 | u64::from(self.order.0)
    }

    /// The inverse of [`Layout::number`], of whose bits it reads the lowest 48.
    #[must_use]
    pub fn from_number(number: u64) -> Layout {
        Layout { order: Order(number as u16), sizes: (number >> 16) as u32 }
    }
}

/// In which order the elements of a dense tensor lie in memory: a permutation of its dimensions, outermost first.
///
/// 0 is row-major, whatever the number of dimensions. Another permutation of `n` dimensions is the number of all
/// permutations of fewer dimensions (`1! + ... + (n-1)!`) plus its place among those of `n`, in lexicographic order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Order(pub u16);

impl Order {
    /// The order of a tensor whose dimensions lie in memory as `permutation` lists them, outermost first: `[0, 2, 3, 1]`
    /// for torch's channels-last. `None` where this is not a permutation, or not row-major and of more than
    /// [`Order::MAX_DIMENSIONS`] dimensions.
    #[must_use]
    pub fn of(permutation: &[usize]) -> Option<Order> {
        let n = permutation.len();
        let mut left: Vec<usize> = (0..n).collect();
        if permutation == left {
            return Some(Order(0));
        }
        if n > Order::MAX_DIMENSIONS {
            return None;
        }
        let mut code = (1..n).map(factorial).sum::<usize>();
        for dimension in permutation {
            let at = left.iter().position(|other| other == dimension)?;
            left.remove(at);
            code += at * factorial(left.len());
        }
        Some(Order(u16::try_from(code).expect("1! + ... + 8! is below 2^16")))
    }

    /// The permutation that this order stands for; `None` for row-major order, and for a number that is no order.
    #[must_use]
    pub fn permutation(self) -> Option<Vec<usize>> {
        let mut code = usize::from(self.0);
        let n = (1..=Order::MAX_DIMENSIONS).find(|n| {
            let fits = code < factorial(*n);
            code -= if fits { 0 } else { factorial(*n) };
            fits
        })?;
        let mut left: Vec<usize> = (0..n).collect();
        let permutation: Vec<usize> = (0..n)
            .map(|at| {
                let count = factorial(n - 1 - at);
                let dimension = left.remove(code / count);
                code %= count;
                dimension
            })
            .collect();
        (!permutation.is_sorted()).then_some(permutation)
    }

    /// For people: `row-major` or `dimensions (0, 2, 3, 1)`.
    #[must_use]
    pub fn describe(self) -> String {
        match self.permutation() {
            None if self == Order::default() => "row-major".into(),
            None => format!("unknown ({})", self.0),
            Some(permutation) => {
                let dimensions: Vec<String> = permutation.iter().map(ToString::to_string).collect();
                format!("dimensions ({})", dimensions.join(", "))
            }
        }
    }

    /// The most dimensions of a tensor that is not row-major.
    pub const MAX_DIMENSIONS: usize = 8;
}

fn factorial(n: usize) -> usize {
    (1..=n).product()
}

impl Fingerprint {
    /// Packs an operation. `name` is an index into [`NAMES`]; `root` is cut to 14 bits and `elements` to 36.
    #[must_use]
    pub fn new(name: Name, reduce: Option<ReduceOp>, dtype: DType, root: Option<u32>, elements: u64) -> Fingerprint {
        let reduce = reduce.map_or(0, |op| 1 + REDUCTIONS.iter().position(|name| *name == op.name()).unwrap_or(14));
        let root = root.map_or(ROOT_MASK, u64::from) & ROOT_MASK;
        let what = (name as u64) << 60
            | (reduce as u64) << 56
            | (dtype as u64 & 0x3f) << 50
            | root << 36
            | elements & ELEMENTS_MASK;
        Fingerprint { what, layout: Layout::default() }
    }

    /// The same operation on tensors of this layout.
    #[must_use]
    pub fn with_layout(self, layout: Layout) -> Fingerprint {
        Fingerprint { layout, ..self }
    }

    /// Fingerprint of an all-to-all for one pair of ranks: `up` elements go from the lower rank to the higher one, `down`
    /// elements come back. A pair must agree on these two numbers, and on the layout of a row if anything passes. Every frame between
    /// the two carries all of them, and each rank hears from every other before it ends, so both find a difference. Of `down`,
    /// 30 bits are kept, in the place of the root and of the order of the dimensions.
    #[must_use]
    pub fn of_pair(self, up: u64, down: u64) -> Fingerprint {
        let what = self.what & !(ROOT_MASK << 36 | ELEMENTS_MASK) | (down & ROOT_MASK) << 36 | up & ELEMENTS_MASK;
        let rows = if up == 0 && down == 0 { Layout::default() } else { self.layout };
        let sizes = if rows == Layout::default() { 0 } else { crc32c::crc32c(&rows.number().to_le_bytes()) };
        Fingerprint { what, layout: Layout { order: Order((down >> ROOT_BITS) as u16), sizes } }
    }

    /// How two ranks disagree on what passes between them, as a sentence: `ours` and `theirs` come from
    /// [`Fingerprint::of_pair`]. `None` where they disagree on something else.
    #[must_use]
    pub fn difference_of_pair(
        ours: Fingerprint,
        theirs: Fingerprint,
        we: &str,
        they: &str,
        we_are_lower: bool,
    ) -> Option<String> {
        let rest = |fingerprint: Fingerprint| fingerprint.what >> (ROOT_BITS + ELEMENTS_BITS);
        if ours.what >> 60 != Name::AllToAll as u64 || rest(ours) != rest(theirs) || ours == theirs {
            return None;
        }
        let up = |fingerprint: Fingerprint| fingerprint.what & ELEMENTS_MASK;
        let down = |fingerprint: Fingerprint| {
            fingerprint.what >> ELEMENTS_BITS & ROOT_MASK | u64::from(fingerprint.layout.order.0) << ROOT_BITS
        };
        if up(ours) == up(theirs) && down(ours) == down(theirs) {
            return Some(
                "the rows of the ranks' tensors lie differently in memory. Every rank must give tensors of the same memory \
                 format (torch's contiguous() makes a tensor row-major)."
                    .into(),
            );
        }
        let (lower, higher) = if we_are_lower { ((we, ours), (they, theirs)) } else { ((they, theirs), (we, ours)) };
        let told: Vec<String> = [(lower, higher, &up as &dyn Fn(Fingerprint) -> u64), (higher, lower, &down)]
            .into_iter()
            .filter(|(from, to, count)| count(from.1) != count(to.1))
            .map(|(from, to, count)| {
                format!("{} sends {} elements to {}, which expects {}", from.0, count(from.1), to.0, count(to.1))
            })
            .collect();
        Some(format!(
            "{}. The input split of the one and the output split of the other must be equal.",
            told.join(", and ")
        ))
    }

    /// The whole fingerprint as one number, to be cut into header fields.
    #[must_use]
    pub fn bits(self) -> u128 {
        u128::from(self.layout.number()) << 64 | u128::from(self.what)
    }

    /// The inverse of [`Fingerprint::bits`].
    #[must_use]
    pub fn from_bits(bits: u128) -> Fingerprint {
        Fingerprint { what: bits as u64, layout: Layout::from_number((bits >> 64) as u64) }
    }

    /// How an operation that is `ours` on one rank and `theirs` on another differs, as the middle of a sentence.
    #[must_use]
    pub fn difference(ours: Fingerprint, our_rank: &str, theirs: Fingerprint, their_rank: &str) -> String {
        if ours.what == theirs.what {
            let [order, other] = [ours, theirs].map(|fingerprint| fingerprint.layout.order);
            let how = if order == other {
                format!("with {} on both, but of different sizes on {our_rank} and on {their_rank}", order.describe())
            } else {
                format!("{} on {our_rank} but {} on {their_rank}", order.describe(), other.describe())
            };
            return format!(
                "{} of tensors in different memory order: {how}. Every rank must give tensors of the same memory format \
                 (torch's contiguous() makes a tensor row-major).",
                ours.describe(),
            );
        }
        format!(
            "{} on {our_rank} but {} on {their_rank}. Every rank must issue the same operations in the same order, with \
             the same sizes, dtypes and roots.",
            ours.describe(),
            theirs.describe()
        )
    }

    /// Such as `all_reduce`.
    #[must_use]
    pub fn name(self) -> &'static str {
        NAMES.get((self.what >> 60) as usize).copied().unwrap_or("unknown operation")
    }

    /// For people: `all_reduce(sum, 1024 x float32)`.
    #[must_use]
    pub fn describe(self) -> String {
        let name = self.name();
        if name == Name::Open.text() {
            // Its elements are a checksum of the channel's name.
            return name.to_owned();
        }
        let reduce = (self.what >> 56 & 0xf) as usize;
        let dtype = (self.what >> 50 & 0x3f) as u8;
        let dtype =
            DType::ALL.iter().find(|known| **known as u8 == dtype).map_or("unknown dtype", |known| known.name());
        let root = self.what >> 36 & ROOT_MASK;
        let mut text = format!("{name}(");
        if reduce > 0 {
            text += REDUCTIONS.get(reduce - 1).copied().unwrap_or("?");
            text += ", ";
        }
        text += &format!("{} x {dtype}", self.what & ELEMENTS_MASK);
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
    /// The first operation of a channel; the elements are a checksum of its name.
    Open,
}

impl Name {
    /// The name that torch and logs use.
    #[must_use]
    pub fn text(self) -> &'static str {
        NAMES[self as usize]
    }
}

/// Names by their number.
const NAMES: [&str; 11] = [
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
    "open_channel",
];
const REDUCTIONS: [&str; 9] = ["sum", "avg", "premul_sum", "product", "min", "max", "band", "bor", "bxor"];
const ROOT_BITS: u32 = 14;
const ROOT_MASK: u64 = (1 << ROOT_BITS) - 1;
const ELEMENTS_BITS: u32 = 36;
const ELEMENTS_MASK: u64 = (1 << ELEMENTS_BITS) - 1;

#[cfg(test)]
mod tests {
    use super::*;

    /// Layouts of the same order and of other sizes differ, and so do those of other orders; row-major ones are equal.
    #[test]
    fn layouts_differ_by_order_and_sizes() {
        let mut seen = std::collections::HashSet::new();
        for numel in [12, 30, 1 << 12, 6_469_693_230] {
            seen.clear();
            for first in (2..=numel / 2).filter(|size| numel % size == 0).take(600) {
                let layout = Layout::of(&[first, numel / first], &[1, 0]).expect("a transposed matrix");
                assert!(seen.insert(layout), "{first} of {numel}");
                assert_eq!(Layout::from_number(layout.number()), layout);
                assert_eq!(Layout::of(&[first, numel / first], &[0, 1]), Some(Layout::default()));
            }
        }
        assert!(seen.insert(Layout::of(&[2, 3, numel_over(6)], &[0, 2, 1]).expect("channels-last")));
        assert!(seen.insert(Layout::of(&[2, 3, numel_over(6)], &[2, 1, 0]).expect("reversed")));
        assert_eq!(Layout::of(&[2, 3], &[0]), None);
        assert_eq!(Layout::of(&[2, 3], &[1, 1]), None);
    }

    fn numel_over(divisor: u64) -> u64 {
        6_469_693_230 / divisor
    }

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
        let permuted = base.with_layout(Layout::of(&[4, 4, 8, 8], &[0, 2, 3, 1]).expect("channels-last"));
        assert!(permuted != base && Fingerprint::from_bits(permuted.bits()) == permuted);
        assert_eq!(
            Fingerprint::difference(base, "rank 0", permuted, "rank 1"),
            "all_reduce(sum, 1024 x float32) of tensors in different memory order: row-major on rank 0 but dimensions (0, \
             2, 3, 1) on rank 1. Every rank must give tensors of the same memory format (torch's contiguous() makes a \
             tensor row-major)."
        );
        let wider = base.with_layout(Layout::of(&[2, 8, 8, 8], &[0, 2, 3, 1]).expect("channels-last"));
        let text = Fingerprint::difference(permuted, "rank 0", wider, "rank 1");
        assert!(
            text.contains("with dimensions (0, 2, 3, 1) on both, but of different sizes on rank 0 and on rank 1"),
            "{text}"
        );
        let text = Fingerprint::difference(base, "rank 0", others[2], "rank 1");
        assert!(text.starts_with("all_reduce(sum, 1024 x float32) on rank 0 but all_reduce(sum, 1025 x"), "{text}");
        let rooted = Fingerprint::new(Name::Broadcast, None, DType::BF16, Some(3), 7);
        assert_eq!(rooted.describe(), "broadcast(7 x bfloat16, root 3)");
    }
    /// Two ranks of an all-to-all agree on what passes between them, or each can say what differs; an empty part counts.
    #[test]
    fn pairs_are_compared() {
        let base = Fingerprint::new(Name::AllToAll, None, DType::F32, None, 0);
        let counts = [0, 1, 5, 1 << 14, (1 << 30) - 1];
        for (up, down) in counts.into_iter().flat_map(|up| counts.map(|down| (up, down))) {
            let lower = base.of_pair(up, down);
            assert_eq!(Fingerprint::difference_of_pair(lower, lower, "a", "b", true), None);
            for (other_up, other_down) in counts.into_iter().flat_map(|up| counts.map(|down| (up, down))) {
                let higher = base.of_pair(other_up, other_down);
                assert_eq!(lower == higher, (up, down) == (other_up, other_down));
                let text = Fingerprint::difference_of_pair(lower, higher, "a", "b", true);
                assert_eq!(text, Fingerprint::difference_of_pair(higher, lower, "b", "a", false));
                let Some(text) = text else { continue };
                let sends = format!("a sends {up} elements to b, which expects {other_up}");
                assert_eq!(text.contains(&sends), up != other_up, "{text}");
                let back = format!("b sends {other_down} elements to a, which expects {down}");
                assert_eq!(text.contains(&back), down != other_down, "{text}");
            }
        }
        // Rows that lie differently are found where anything passes.
        let rows = base.with_layout(Layout::of(&[2, 6], &[1, 0]).expect("transposed rows"));
        assert_eq!(base.of_pair(0, 0), rows.of_pair(0, 0));
        for (ours, theirs) in [(base, rows), (rows, base.with_layout(Layout::of(&[3, 4], &[1, 0]).expect("others")))] {
            let (ours, theirs) = (ours.of_pair(0, 1), theirs.of_pair(0, 1));
            let text = Fingerprint::difference_of_pair(ours, theirs, "a", "b", true).expect("a difference");
            assert!(text.contains("lie differently in memory"), "{text}");
        }
        let other = Fingerprint::new(Name::AllToAll, None, DType::F64, None, 0).of_pair(0, 0);
        assert_eq!(Fingerprint::difference_of_pair(base.of_pair(0, 0), other, "a", "b", true), None);
        assert!(Fingerprint::difference(base.of_pair(1, 2), "a", other, "b").contains("x float64"));
    }

    /// Every permutation of up to eight dimensions has a number of its own, and comes back from it; all row-major ones
    /// share 0.
    #[test]
    fn orders_are_permutations() {
        fn all(n: usize) -> Vec<Vec<usize>> {
            let Some(last) = n.checked_sub(1) else { return vec![Vec::new()] };
            let insert = |at: usize, mut shorter: Vec<usize>| {
                shorter.insert(at, last);
                shorter
            };
            all(last).into_iter().flat_map(|shorter| (0..n).map(move |at| insert(at, shorter.clone()))).collect()
        }
        let mut seen = std::collections::HashSet::new();
        for n in 0..=Order::MAX_DIMENSIONS {
            for permutation in all(n) {
                let order = Order::of(&permutation).expect("a permutation");
                if permutation.is_sorted() {
                    assert_eq!((order, order.permutation()), (Order(0), None));
                } else {
                    assert!(seen.insert(order), "{permutation:?}");
                    assert_eq!(order.permutation(), Some(permutation));
                }
            }
        }
        assert_eq!(Order::of(&(0..20).collect::<Vec<_>>()), Some(Order(0)));
        for wrong in [&[1, 1][..], &[0, 2], &[1], &[1, 0, 2, 3, 4, 5, 6, 7, 8]] {
            assert_eq!(Order::of(wrong), None, "{wrong:?}");
        }
        assert_eq!(Order(u16::MAX).describe(), "unknown (65535)");
    }
}
