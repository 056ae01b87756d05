//! How bytes and ranks are divided. Shared by the builders and by the promises that the checker holds them to.

/// A tensor cut into one chunk a rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunks {
    bytes: u64,
    count: u32,
    unit: u64,
}

impl Chunks {
    /// As equal as whole cache lines allow: the first chunks are one line longer, and the last one ends where the
    /// tensor does. Chunks of a short tensor may be empty, and then nobody sends them.
    pub(crate) fn nearly_equal(bytes: u64, count: u32) -> Chunks {
        Chunks { bytes, count, unit: LINE_BYTES }
    }

    /// `bytes` divides by `count`.
    pub(crate) fn equal(bytes: u64, count: u32) -> Chunks {
        Chunks { bytes, count, unit: (bytes / u64::from(count)).max(1) }
    }

    /// Start and length of chunk `index % count`, in bytes.
    pub(crate) fn at(&self, index: u32) -> (u64, u64) {
        let first = index % self.count;
        self.range(first, first + 1)
    }

    /// Start and length of the chunks `first..end` together.
    pub(crate) fn range(&self, first: u32, end: u32) -> (u64, u64) {
        let units = self.bytes.div_ceil(self.unit);
        let (each, longer) = (units / u64::from(self.count), units % u64::from(self.count));
        let start = |index: u32| {
            let index = u64::from(index);
            ((index * each + index.min(longer)) * self.unit).min(self.bytes)
        };
        (start(first), start(end) - start(first))
    }

    /// Length of the longest chunk.
    pub(crate) fn max(&self) -> u64 {
        self.at(0).1
    }
}

/// How algorithms for a power of two of ranks serve any number. With `p` the largest power of two up to `n`, the first
/// `n - p` pairs of neighbours each act as one: the odd rank of a pair hands its tensor to the even one and gets the
/// result back. Virtual ranks count the `p` that remain, in rank order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fold {
    /// How many virtual ranks there are.
    pub(crate) p: u32,
    pairs: u32,
}

/// What a rank does in a [`Fold`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Hands its tensor to this rank.
    Extra { partner: u32 },
    /// Takes part, for itself and perhaps for an extra rank.
    Core { virtual_rank: u32, extra: Option<u32> },
}

impl Fold {
    pub(crate) fn of(world: u32) -> Fold {
        let p = 1 << world.ilog2();
        Fold { p, pairs: world - p }
    }

    pub(crate) fn role(&self, rank: u32) -> Role {
        if rank >= 2 * self.pairs {
            Role::Core { virtual_rank: rank - self.pairs, extra: None }
        } else if rank.is_multiple_of(2) {
            Role::Core { virtual_rank: rank / 2, extra: Some(rank + 1) }
        } else {
            Role::Extra { partner: rank - 1 }
        }
    }

    /// The rank that acts as a virtual one.
    pub(crate) fn rank(&self, virtual_rank: u32) -> u32 {
        if virtual_rank < self.pairs { 2 * virtual_rank } else { virtual_rank + self.pairs }
    }

    pub(crate) fn rounds(&self) -> u32 {
        self.p.ilog2()
    }

    /// The chunks (of `p`) that a virtual rank still works on after `rounds` halvings: bit `j` of its number says which
    /// half it keeps in round `j`.
    pub(crate) fn kept(&self, virtual_rank: u32, rounds: u32) -> std::ops::Range<u32> {
        let first = (0..rounds).map(|round| (virtual_rank >> round & 1) * (self.p >> (round + 1))).sum();
        first..first + (self.p >> rounds)
    }
}

/// A node's place in a tree over the ranks, numbered from the root on: parent, and children in rank order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Relatives {
    pub(crate) parent: Option<u32>,
    pub(crate) children: Vec<u32>,
}

impl Relatives {
    /// Node `v > 0` of a binomial tree hangs on `v` without its lowest bit; its subtree is the ranks from `v` on, as
    /// many as that bit says.
    pub(crate) fn in_tree(v: u32, world: u32) -> Relatives {
        let low = if v == 0 { world.next_power_of_two() } else { v & v.wrapping_neg() };
        let children = (0..low.ilog2()).map(|bit| v + (1 << bit)).filter(|&child| child < world).collect();
        Relatives { parent: (v > 0).then(|| v - low), children }
    }

    /// Node `v > 0` of a chain hangs on `v - 1`.
    pub(crate) fn in_chain(v: u32, world: u32) -> Relatives {
        let children = if v + 1 < world { vec![v + 1] } else { vec![] };
        Relatives { parent: v.checked_sub(1), children }
    }

    /// Every node hangs on the root.
    pub(crate) fn in_star(v: u32, world: u32) -> Relatives {
        if v == 0 {
            Relatives { parent: None, children: (1..world).collect() }
        } else {
            Relatives { parent: Some(0), children: vec![] }
        }
    }

    /// The same, in ranks of the group.
    pub(crate) fn rooted_at(self, root: u32, world: u32) -> Relatives {
        let rank = |v: u32| ((u64::from(v) + u64::from(root)) % u64::from(world)) as u32;
        Relatives { parent: self.parent.map(rank), children: self.children.into_iter().map(rank).collect() }
    }
}

/// Chunks start at cache lines, so that no two ranks of a host write into one, and vector instructions find them
/// aligned wherever the tensor is. Element sizes divide it.
const LINE_BYTES: u64 = 64;
