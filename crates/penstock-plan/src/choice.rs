//! Which algorithm fits where, and in which pieces: [`choose`], [`segment_bytes`].

use crate::{Algorithm, Collective, Medium, Request, promise::latency};

/// Where [`choose`] changes its mind. All ranks must use the same values, or they make different plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Messages up to this size leave without a grant, and the receiver holds them until they are needed. On the wire
    /// no algorithm that holds messages is chosen for larger ones. Tied to the transport's own eager limit: it must
    /// not be larger than that. Default [`EAGER_LIMIT_BYTES`].
    pub eager_limit_bytes: u64,
    /// `exchange` (and the direct reduce-scatter) is chosen while the bytes that a rank takes in the single round,
    /// `(n - 1) * message`, are at most this. Too large: small all-reduces of many ranks slow down with size; too
    /// small: they take two rounds and more. Default 64 KiB, a guess: what 1 Gbit/s moves in ten 50 us hops.
    pub exchange_bytes: u64,
    /// The widest group that uses `exchange`; every rank handles `n - 1` messages at once. Default 8, a guess.
    pub exchange_ranks: u32,
    /// `recursive-doubling` is chosen in wider groups for tensors up to this. Default 8 KiB, a guess: beyond it the
    /// `log2(n)` whole copies cost more than the `log2(n)` rounds that halving-doubling adds.
    pub doubling_bytes: u64,
    /// `halving-doubling` is chosen from four ranks on while a ring's chunk, `bytes / n`, is at most this: such a ring
    /// waits more than it sends. Where ranks share hosts, only if it also has fewer hops than `hierarchical`. Default
    /// 16 KiB, a guess: 1 Gbit/s moves it in 130 us, about two hops.
    pub latency_chunk_bytes: u64,
    /// `tree` is chosen for broadcast and reduce up to this; a pipelined chain above. Default 64 KiB, a guess.
    pub tree_bytes: u64,
    /// [`segment_bytes`] stays in this range. The lower end bounds the cost of a message (tens of microseconds on the
    /// wire against 0.5 ms that 64 KiB take at 1 Gbit/s); the upper end bounds scratch memory ([`crate::SCRATCH_SEGMENTS`]
    /// times it) and keeps a segment in the second-level cache while it is reduced. Default 64 KiB..512 KiB.
    pub segment_bytes: (u64, u64),
    /// The same where all ranks share a host. A segment is what a rank reads at a time: more keeps other operations
    /// waiting, fewer cost messages. Default 64 KiB..1 MiB: 64 MiB take 5 to 8 % less than with 512 KiB.
    pub memory_segment_bytes: (u64, u64),
    /// A message is cut into about this many segments, so that the next step starts when this fraction has arrived.
    /// Default 8: the pipeline is then never emptier than 1/8 of a chunk.
    pub segments_per_message: u64,
}

impl Default for Thresholds {
    fn default() -> Thresholds {
        Thresholds {
            eager_limit_bytes: EAGER_LIMIT_BYTES,
            exchange_bytes: 64 << 10,
            exchange_ranks: 8,
            doubling_bytes: 8 << 10,
            latency_chunk_bytes: 16 << 10,
            tree_bytes: 64 << 10,
            segment_bytes: (64 << 10, 512 << 10),
            memory_segment_bytes: (64 << 10, 1 << 20),
            segments_per_message: 8,
        }
    }
}

/// Chooses an algorithm for a request, by its size and placement, and says why. Pure, and blind to [`Request::rank`] and
/// [`Request::splits`]: all ranks of a group choose alike.
///
/// Where some ranks share a host and others do not, the rules of the wire hold, but for large all-reduces, which are
/// hierarchical: of all algorithms that one puts the fewest bytes on a host's link.
#[must_use]
pub fn choose(request: &Request, thresholds: &Thresholds) -> (Algorithm, String) {
    let Request { collective, world, ref placement, bytes, .. } = *request;
    let medium = placement.medium();
    let others = u64::from(world.max(1) - 1);
    let chunk = bytes.div_ceil(u64::from(world.max(1)));
    // What one rank may be sent at once, to be held until it reduces all of it in one step.
    let fits_one_round = |message: u64| {
        world <= thresholds.exchange_ranks
            && message.saturating_mul(others) <= thresholds.exchange_bytes
            && (medium == Medium::Memory || message <= thresholds.eager_limit_bytes)
    };
    let (algorithm, why) = match (collective, medium) {
        (Collective::AllReduce, _) if fits_one_round(bytes) => {
            (Algorithm::Exchange, "small: one round beats fewer bytes")
        }
        (Collective::AllReduce, Medium::Memory) => {
            (Algorithm::Direct, "one host: each rank reads once what it must reduce and collect")
        }
        (Collective::AllReduce, Medium::Wire)
            if world > thresholds.exchange_ranks
                && bytes <= thresholds.doubling_bytes.min(thresholds.eager_limit_bytes) =>
        {
            (Algorithm::RecursiveDoubling, "small, many ranks: log2(n) rounds beat fewer bytes")
        }
        // Against a ring it has fewer hops and fewer bytes, so only the hops of halving-doubling are to be compared.
        (Collective::AllReduce, Medium::Wire)
            if placement.is_mixed()
                && (chunk > thresholds.latency_chunk_bytes
                    || latency(request, Algorithm::Hierarchical) <= latency(request, Algorithm::HalvingDoubling)) =>
        {
            (
                Algorithm::Hierarchical,
                "ranks share hosts: fewest bytes on the links, every rank of a host drives its link",
            )
        }
        (Collective::AllReduce, Medium::Wire) if world >= 4 && chunk <= thresholds.latency_chunk_bytes => {
            (Algorithm::HalvingDoubling, "a ring's chunks would be small: 2 log2(n) rounds beat 2(n-1)")
        }
        (Collective::AllReduce, Medium::Wire) => (Algorithm::Ring, "large: fewest bytes, every link busy both ways"),
        (Collective::ReduceScatter, Medium::Memory) => {
            (Algorithm::Direct, "one host: each rank reads once what it must reduce")
        }
        (Collective::ReduceScatter, Medium::Wire) if fits_one_round(chunk) => {
            (Algorithm::Direct, "small: one round, and as few bytes as a ring")
        }
        (Collective::ReduceScatter, Medium::Wire) => (Algorithm::Ring, "large: messages are reduced as they arrive"),
        (Collective::AllGather, Medium::Memory) => {
            (Algorithm::Direct, "one host: each rank reads once what it must collect")
        }
        (Collective::AllGather, Medium::Wire) if fits_one_round(chunk) => {
            (Algorithm::Direct, "small: one round, and as few bytes as a ring")
        }
        (Collective::AllGather, Medium::Wire) => (Algorithm::Ring, "large: one sender for each receiver, no incast"),
        (Collective::Broadcast { .. } | Collective::Reduce { .. }, Medium::Memory) => {
            (Algorithm::Direct, "one host: one hop, and reading costs the sender nothing")
        }
        (Collective::Broadcast { .. } | Collective::Reduce { .. }, Medium::Wire) if bytes <= thresholds.tree_bytes => {
            (Algorithm::Tree, "small: log2(n) hops")
        }
        (Collective::Broadcast { .. } | Collective::Reduce { .. }, Medium::Wire) => {
            (Algorithm::Ring, "large: a pipelined chain, every rank sends the tensor at most once")
        }
        (Collective::Barrier, _) => (Algorithm::Dissemination, "log2(n) rounds, no bytes"),
        (
            Collective::Gather { .. }
            | Collective::Scatter { .. }
            | Collective::AllToAll
            | Collective::Send { .. }
            | Collective::Recv { .. },
            _,
        ) => (Algorithm::Direct, "every byte is wanted by one rank only"),
    };
    let reason = format!(
        "{} of {bytes} bytes, {world} ranks on {} hosts: {algorithm} ({why})",
        collective.name(),
        placement.host_count()
    );
    (algorithm, reason)
}

/// A good [`Request::segment_bytes`] for an operation: a pure function of what all ranks share.
#[must_use]
pub fn segment_bytes(collective: Collective, medium: Medium, world: u32, bytes: u64, thresholds: &Thresholds) -> u64 {
    let message = match collective {
        Collective::AllReduce | Collective::ReduceScatter | Collective::AllGather => bytes / u64::from(world.max(1)),
        // The splits of an all-to-all differ by rank, so that its segments cannot depend on them.
        Collective::AllToAll => thresholds.segment_bytes.1.saturating_mul(thresholds.segments_per_message),
        _ => bytes,
    };
    let (low, high) = match medium {
        Medium::Wire => thresholds.segment_bytes,
        Medium::Memory => thresholds.memory_segment_bytes,
    };
    message.div_ceil(thresholds.segments_per_message).clamp(low, high).next_multiple_of(4096)
}

/// Default of [`Thresholds::eager_limit_bytes`]: 32 KiB, half a frame; 64 ranks that send one each fill 2 MiB.
pub const EAGER_LIMIT_BYTES: u64 = 32 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Placement;

    fn chosen(collective: Collective, bytes: u64, placement: &Placement) -> Algorithm {
        let request = Request {
            collective,
            world: placement.world(),
            rank: 0,
            placement: placement.clone(),
            bytes,
            element_bytes: 4,
            splits: None,
            segment_bytes: 64 << 10,
        };
        choose(&request, &Thresholds::default()).0
    }

    /// Each threshold, from both sides.
    #[test]
    fn thresholds_from_both_sides() {
        let all_reduce = |bytes, world| chosen(Collective::AllReduce, bytes, &Placement::separate_hosts(world));
        assert_eq!(all_reduce(32 << 10, 2), Algorithm::Exchange);
        assert_eq!(all_reduce((32 << 10) + 4, 2), Algorithm::Ring);
        assert_eq!(all_reduce(64 << 10, 4), Algorithm::HalvingDoubling);
        assert_eq!(all_reduce((64 << 10) + 4, 4), Algorithm::Ring);
        assert_eq!(all_reduce(9 << 10, 8), Algorithm::Exchange);
        assert_eq!(all_reduce(10 << 10, 8), Algorithm::HalvingDoubling);
        assert_eq!(all_reduce(8 << 10, 9), Algorithm::RecursiveDoubling);
        assert_eq!(all_reduce((8 << 10) + 4, 9), Algorithm::HalvingDoubling);
        assert_eq!(all_reduce(144 << 10, 9), Algorithm::HalvingDoubling);
        assert_eq!(all_reduce((144 << 10) + 4, 9), Algorithm::Ring);
        let broadcast = |bytes| chosen(Collective::Broadcast { root: 0 }, bytes, &Placement::separate_hosts(4));
        assert_eq!(broadcast(64 << 10), Algorithm::Tree);
        assert_eq!(broadcast((64 << 10) + 4), Algorithm::Ring);
        let scatter = |bytes| chosen(Collective::ReduceScatter, bytes, &Placement::separate_hosts(2));
        assert_eq!(scatter(64 << 10), Algorithm::Direct);
        assert_eq!(scatter((64 << 10) + 8), Algorithm::Ring);
    }

    /// One rank on another host takes the group out of memory.
    #[test]
    fn the_slowest_pair_decides() {
        let large = |placement: &Placement| chosen(Collective::AllReduce, 64 << 20, placement);
        assert_eq!(large(&Placement::one_host(4)), Algorithm::Direct);
        assert_eq!(large(&Placement::new(&[7, 7, 7, 3])), Algorithm::Hierarchical);
        assert_eq!(large(&Placement::separate_hosts(4)), Algorithm::Ring);
    }

    /// With few hosts, hierarchical from where one round does not do; with many, where its hops count no more. Only for
    /// all-reduce, and only where ranks share hosts.
    #[test]
    fn hierarchical_from_both_sides() {
        let in_pairs = |hosts: u32| Placement::new(&(0..2 * hosts).map(|rank| rank / 2).collect::<Vec<u32>>());
        let all_reduce = |bytes, hosts| chosen(Collective::AllReduce, bytes, &in_pairs(hosts));
        assert_eq!(all_reduce(21 << 10, 2), Algorithm::Exchange);
        assert_eq!(all_reduce(22 << 10, 2), Algorithm::Hierarchical);
        // 6 hops against 8, and 8 against 16.
        assert_eq!(all_reduce(64 << 10, 4), Algorithm::HalvingDoubling);
        assert_eq!(all_reduce(256 << 10, 8), Algorithm::HalvingDoubling);
        assert_eq!(all_reduce((256 << 10) + 16, 8), Algorithm::Hierarchical);
        assert_eq!(chosen(Collective::AllGather, 16 << 20, &in_pairs(2)), Algorithm::Ring);
    }

    /// Segments stay in their range, and are whole pages.
    #[test]
    fn segments_are_bounded() {
        let thresholds = Thresholds::default();
        for bytes in [0, 1, 1 << 20, 3 << 20, 64 << 20, 1 << 34] {
            let segment = segment_bytes(Collective::AllReduce, Medium::Wire, 3, bytes, &thresholds);
            assert!((64 << 10..=512 << 10).contains(&segment) && segment.is_multiple_of(4096), "{bytes}: {segment}");
        }
        let large = |medium, bytes| segment_bytes(Collective::AllReduce, medium, 2, bytes, &thresholds);
        assert_eq!(large(Medium::Wire, 4 << 20), 256 << 10);
        assert_eq!((large(Medium::Wire, 64 << 20), large(Medium::Memory, 64 << 20)), (512 << 10, 1 << 20));
    }
}
