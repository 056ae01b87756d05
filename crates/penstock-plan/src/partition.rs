//! How bytes and ranks are divided. The builders and the promises that the checker proves share this.

use crate::{Algorithm, Placement};

/// A tensor cut into one chunk a rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunks {
    bytes: u64,
    count: u32,
    unit: u64,
}

impl Chunks {
    /// Chunks that are equal as far as whole cache lines allow: the first ones are a line longer, and the last one ends with
    /// the tensor. Chunks of a short tensor may be empty; empty ones are not sent.
    pub(crate) fn nearly_equal(bytes: u64, count: u32) -> Chunks {
        Chunks { bytes, count, unit: LINE_BYTES }
    }

    /// Equal chunks; `count` must divide `bytes`.
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

/// The range of a tensor that each server adds, as (start, length): in the order of the servers, by weight, cut at whole
/// cache lines. Small tensors leave some empty.
pub(crate) fn shares(placement: &Placement, bytes: u64) -> Vec<(u64, u64)> {
    let weights = placement.servers();
    let total: u128 = weights.iter().map(|weight| u128::from(*weight)).sum();
    let lines = bytes.div_ceil(LINE_BYTES);
    let (mut seen, mut start) = (0u128, 0);
    let mut ranges = Vec::with_capacity(weights.len());
    for weight in weights {
        seen += u128::from(*weight);
        let end = ((u128::from(lines) * seen / total) as u64 * LINE_BYTES).min(bytes);
        ranges.push((start, end - start));
        start = end;
    }
    ranges
}

/// All ranks, one after the other around a ring.
#[derive(Clone, Debug)]
pub(crate) struct Ring {
    ranks: Vec<u32>,
}

impl Ring {
    /// Host after host, in rank order within each: the ring enters and leaves every host once, wherever a launcher has
    /// put the ranks. Where those of a host follow each other, as with torchrun, it is the rank order.
    pub(crate) fn by_host(placement: &Placement) -> Ring {
        Ring { ranks: (0..placement.host_count()).flat_map(|host| placement.members(host)).collect() }
    }

    /// The order in which a collective numbers the ranks, its root first: chains by host, trees and stars by rank.
    pub(crate) fn from_root(root: u32, placement: &Placement, algorithm: Algorithm) -> Ring {
        let mut ring = match algorithm {
            Algorithm::Ring => Ring::by_host(placement),
            _ => Ring { ranks: (0..placement.world()).collect() },
        };
        let first = ring.place(root) as usize;
        ring.ranks.rotate_left(first);
        ring
    }

    /// The place of a rank on the ring.
    pub(crate) fn place(&self, rank: u32) -> u32 {
        self.ranks.iter().position(|&other| other == rank).expect("every rank is on the ring") as u32
    }

    /// The rank at a place; places continue from 0 after the last one.
    pub(crate) fn rank(&self, place: u32) -> u32 {
        self.ranks[place as usize % self.ranks.len()]
    }
}

/// How a hierarchical all-reduce divides the tensor: into shares, each with an owner on every host that reduces it within
/// the host and takes it around the ring of hosts; and each share into a chunk for every host.
///
/// ```text
///   hosts of 3 and 2 ranks      share 0   share 1   share 2
///   host 0: ranks 0, 1, 2       rank 0    rank 1    rank 2
///   host 1: ranks 3, 4          rank 3    rank 3    rank 4      are the owners
/// ```
///
/// With as many shares as the largest host has ranks, all ranks take part in what crosses the links wherever hosts are
/// equal, and all of the largest host elsewhere.
#[derive(Clone, Debug)]
pub(crate) struct Hierarchy {
    members: Vec<Vec<u32>>,
    shares: u32,
    bytes: u64,
}

impl Hierarchy {
    pub(crate) fn of(placement: &Placement, bytes: u64) -> Hierarchy {
        let members: Vec<Vec<u32>> = (0..placement.host_count()).map(|host| placement.members(host)).collect();
        let counts = || members.iter().map(|members| members.len() as u32);
        let shares = counts().max().unwrap_or(0).min(MAX_SHARES_OF_AN_OWNER * counts().min().unwrap_or(0));
        Hierarchy { members, shares, bytes }
    }

    pub(crate) fn hosts(&self) -> u32 {
        self.members.len() as u32
    }

    /// The ranks of a host, in rank order. Hosts count on from 0 after the last one.
    pub(crate) fn members(&self, host: u32) -> &[u32] {
        &self.members[host as usize % self.members.len()]
    }

    pub(crate) fn shares(&self) -> std::ops::Range<u32> {
        0..self.shares
    }

    /// The rank of a host that owns a share. Where it has fewer ranks than there are shares, each owns shares that
    /// follow each other; where it has more, owners are spread among them.
    pub(crate) fn owner(&self, host: u32, share: u32) -> u32 {
        let members = self.members(host);
        members[share as usize * members.len() / self.shares as usize]
    }

    /// Start and length of a share, in bytes.
    pub(crate) fn share(&self, share: u32) -> (u64, u64) {
        Chunks::nearly_equal(self.bytes, self.shares).at(share)
    }

    /// The chunks of a share; they count from its start.
    pub(crate) fn chunks(&self, share: u32) -> Chunks {
        Chunks::nearly_equal(self.share(share).1, self.hosts())
    }
}

/// Lets algorithms for a power of two of ranks serve any number. With `p` the largest power of two up to `n`, the first `n -
/// p` pairs of neighbours act as one rank each: the odd rank of a pair sends its tensor to the even one and receives the
/// result. Virtual ranks number the `p` that remain, in rank order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fold {
    /// The number of virtual ranks.
    pub(crate) p: u32,
    pairs: u32,
}

/// The role of a rank in a [`Fold`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Sends its tensor to this rank.
    Extra { partner: u32 },
    /// Takes part, for itself and perhaps for an extra rank too.
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

/// A node's place in a tree over the ranks, numbered from the root on: parent, and children in that order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Relatives {
    pub(crate) parent: Option<u32>,
    pub(crate) children: Vec<u32>,
}

impl Relatives {
    /// The parent of node `v > 0` of a binomial tree is `v` without its lowest bit; its subtree is the ranks from `v` on, as
    /// many as that bit's value.
    pub(crate) fn in_tree(v: u32, world: u32) -> Relatives {
        let low = if v == 0 { world.next_power_of_two() } else { v & v.wrapping_neg() };
        let children = (0..low.ilog2()).map(|bit| v + (1 << bit)).filter(|&child| child < world).collect();
        Relatives { parent: (v > 0).then(|| v - low), children }
    }

    /// The parent of node `v > 0` of a chain is `v - 1`.
    pub(crate) fn in_chain(v: u32, world: u32) -> Relatives {
        let children = if v + 1 < world { vec![v + 1] } else { vec![] };
        Relatives { parent: v.checked_sub(1), children }
    }

    /// The parent of every node is the root.
    pub(crate) fn in_star(v: u32, world: u32) -> Relatives {
        if v == 0 {
            Relatives { parent: None, children: (1..world).collect() }
        } else {
            Relatives { parent: Some(0), children: vec![] }
        }
    }

    /// The same with ranks of the group instead of node numbers.
    pub(crate) fn named(self, rank: impl Fn(u32) -> u32) -> Relatives {
        Relatives { parent: self.parent.map(&rank), children: self.children.into_iter().map(&rank).collect() }
    }
}

/// A rank owns at most about this many shares of a [`Hierarchy`], so that its plan stays short if one host has one rank and
/// another many. A guess: beyond it, four ranks already reduce for each one.
const MAX_SHARES_OF_AN_OWNER: u32 = 4;

/// Chunks start at cache lines, so that no two ranks of a host write into one, and vector instructions find them
/// aligned wherever the tensor is. Element sizes divide it.
const LINE_BYTES: u64 = 64;
