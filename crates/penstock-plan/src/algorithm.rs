//! Ways to do a collective, and which of them fits where: [`choose`].

use std::{fmt, str::FromStr, sync::Arc};

use crate::{Collective, Request, promise::latency};

/// A way to do a collective. `docs/design/algorithms.md` describes each; the names here are those of environment settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    /// Every rank sends to the next rank only. Moves the fewest bytes; its latency grows with the number of ranks. For
    /// broadcast and reduce: the same ring cut open, a pipelined chain.
    Ring,
    /// All-reduce in 2 log2(n) rounds that halve, then double, what is exchanged.
    HalvingDoubling,
    /// All-reduce in log2(n) rounds, each of which exchanges the whole tensor.
    RecursiveDoubling,
    /// All-reduce in one round: everybody sends everything to everybody.
    Exchange,
    /// Every byte goes straight to the rank that needs it.
    Direct,
    /// A binomial tree.
    Tree,
    /// All-reduce that reduces within each host, goes around a ring of hosts, and collects within each host.
    Hierarchical,
    /// A barrier in log2(n) rounds of notifications over doubling distances.
    Dissemination,
    /// All-reduce through servers, and aggregators on the way to them, that add what all ranks push
    /// (`docs/design/aggregation.md`). Only where the topology has servers.
    Aggregated,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: &'static [Algorithm] = &[
        Algorithm::Ring,
        Algorithm::HalvingDoubling,
        Algorithm::RecursiveDoubling,
        Algorithm::Exchange,
        Algorithm::Direct,
        Algorithm::Tree,
        Algorithm::Hierarchical,
        Algorithm::Dissemination,
        Algorithm::Aggregated,
    ];

    /// The algorithms that [`crate::steps`] has for a collective among ranks alone. Where the topology has servers, an
    /// all-reduce can also be [`Algorithm::Aggregated`].
    #[must_use]
    pub fn of(collective: Collective) -> &'static [Algorithm] {
        use Algorithm::{
            Direct, Dissemination, Exchange, HalvingDoubling, Hierarchical, RecursiveDoubling, Ring, Tree,
        };
        match collective {
            Collective::AllReduce => &[Ring, HalvingDoubling, RecursiveDoubling, Exchange, Direct, Hierarchical],
            Collective::ReduceScatter | Collective::AllGather => &[Ring, Direct],
            Collective::Broadcast { .. } | Collective::Reduce { .. } => &[Ring, Tree, Direct],
            Collective::Barrier => &[Dissemination],
            Collective::Gather { .. }
            | Collective::Scatter { .. }
            | Collective::AllToAll
            | Collective::Send { .. }
            | Collective::Recv { .. } => &[Direct],
        }
    }

    /// The name in settings and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Ring => "ring",
            Algorithm::HalvingDoubling => "halving-doubling",
            Algorithm::RecursiveDoubling => "recursive-doubling",
            Algorithm::Exchange => "exchange",
            Algorithm::Direct => "direct",
            Algorithm::Tree => "tree",
            Algorithm::Hierarchical => "hierarchical",
            Algorithm::Dissemination => "dissemination",
            Algorithm::Aggregated => "aggregated",
        }
    }

    pub(crate) fn is_for(self, request: &Request) -> bool {
        let aggregated = self == Algorithm::Aggregated && request.collective == Collective::AllReduce;
        Algorithm::of(request.collective).contains(&self) || aggregated && !request.topology.servers().is_empty()
    }

    /// Whether a rank reduces messages of any other ranks in one step when it runs `collective` this way: the transport
    /// must then hold each of them until all are there. Memory does that for nothing; on the wire it is bounded by
    /// [`Thresholds::eager_limit_bytes`]. `hierarchical` holds messages of its own host only, so it is none of these.
    #[must_use]
    pub fn holds_messages(self, collective: Collective) -> bool {
        collective.reduces() && matches!(self, Algorithm::Exchange | Algorithm::Direct)
    }

    pub(crate) fn names(algorithms: &[Algorithm]) -> String {
        algorithms.iter().map(|algorithm| algorithm.name()).collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = UnknownAlgorithm;

    fn from_str(name: &str) -> Result<Algorithm, UnknownAlgorithm> {
        Algorithm::ALL
            .iter()
            .copied()
            .find(|algorithm| algorithm.name() == name)
            .ok_or_else(|| UnknownAlgorithm { name: name.to_owned() })
    }
}

/// A name that is no algorithm's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown algorithm {name:?}; choose one of: {}", Algorithm::names(Algorithm::ALL))]
pub struct UnknownAlgorithm {
    /// The name.
    pub name: String,
}

/// Which ranks of a group share a host: each pair of them reaches the other through memory, any other pair through a
/// network. Equal where the same ranks are together; a copy is cheap.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Topology {
    /// The host of each rank. Hosts are numbered in the order of their lowest ranks.
    hosts: Arc<[u32]>,
    /// By server: its part of each tensor, as a weight.
    servers: Arc<[u32]>,
}

impl Topology {
    /// `hosts[r]` is any number that stands for the host of rank `r`.
    #[must_use]
    pub fn new(hosts: &[u32]) -> Topology {
        let mut known: Vec<u32> = Vec::new();
        let number = |host: &u32| {
            known.iter().position(|other| other == host).unwrap_or_else(|| {
                known.push(*host);
                known.len() - 1
            }) as u32
        };
        Topology { hosts: hosts.iter().map(number).collect(), servers: Arc::default() }
    }

    /// `world` ranks on one host.
    #[must_use]
    pub fn one_host(world: u32) -> Topology {
        Topology { hosts: vec![0; world as usize].into(), servers: Arc::default() }
    }

    /// `world` ranks, each on a host of its own.
    #[must_use]
    pub fn separate_hosts(world: u32) -> Topology {
        Topology { hosts: (0..world).collect(), servers: Arc::default() }
    }

    /// The same ranks, with servers that add for them; `weights[s] / sum(weights)` of each tensor is server `s`'s.
    ///
    /// # Panics
    /// If the weights are all 0.
    #[must_use]
    pub fn with_servers(self, weights: &[u32]) -> Topology {
        assert!(weights.iter().any(|weight| *weight > 0), "somebody has to add");
        Topology { servers: weights.into(), ..self }
    }

    /// The weights of the servers; empty where there are none.
    #[must_use]
    pub fn servers(&self) -> &[u32] {
        &self.servers
    }

    /// The host of each rank; hosts are numbered in the order of their lowest ranks.
    #[must_use]
    pub fn hosts(&self) -> &[u32] {
        &self.hosts
    }

    /// Ranks in the group.
    #[must_use]
    pub fn world(&self) -> u32 {
        self.hosts.len() as u32
    }

    /// Whether two ranks reach each other through memory.
    #[must_use]
    pub fn share_host(&self, a: u32, b: u32) -> bool {
        self.hosts[a as usize] == self.hosts[b as usize]
    }

    /// The host of a rank, as a number below [`Topology::host_count`].
    #[must_use]
    pub fn host(&self, rank: u32) -> u32 {
        self.hosts[rank as usize]
    }

    /// The ranks of a host, in rank order.
    #[must_use]
    pub fn members(&self, host: u32) -> Vec<u32> {
        (0..self.world()).filter(|&rank| self.hosts[rank as usize] == host).collect()
    }

    /// What the group's messages go through. One pair of ranks on different hosts makes it the wire: an algorithm runs
    /// at the pace of its slowest pair.
    #[must_use]
    pub fn medium(&self) -> Medium {
        if self.host_count() <= 1 { Medium::Memory } else { Medium::Wire }
    }

    /// Whether some ranks share a host and others do not.
    #[must_use]
    pub fn is_mixed(&self) -> bool {
        (2..self.world()).contains(&self.host_count())
    }

    /// How many hosts there are.
    #[must_use]
    pub fn host_count(&self) -> u32 {
        self.hosts.iter().max().map_or(0, |last| last + 1)
    }
}

/// What carries the messages of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Medium {
    /// All ranks share a host: a message may be a reference that the peer reads through, so holding one costs nothing.
    Memory,
    /// At least one pair of ranks is joined by a network: a message that is held takes memory of the receiver.
    Wire,
}

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

/// Chooses an algorithm for a request, by its size and topology, and says why. Pure, and blind to [`Request::rank`] and
/// [`Request::splits`]: all ranks of a group choose alike.
///
/// Where some ranks share a host and others do not, the rules of the wire hold, but for large all-reduces, which are
/// hierarchical: of all algorithms that one puts the fewest bytes on a host's link.
#[must_use]
pub fn choose(request: &Request, thresholds: &Thresholds) -> (Algorithm, String) {
    let Request { collective, world, ref topology, bytes, .. } = *request;
    let medium = topology.medium();
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
            if topology.is_mixed()
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
        topology.host_count()
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

    fn chosen(collective: Collective, bytes: u64, topology: &Topology) -> Algorithm {
        let request = Request {
            collective,
            world: topology.world(),
            rank: 0,
            topology: topology.clone(),
            bytes,
            element_bytes: 4,
            splits: None,
            segment_bytes: 64 << 10,
        };
        choose(&request, &Thresholds::default()).0
    }

    /// What is read from a setting is what is printed in a log; anything else is refused with the list.
    #[test]
    fn names_round_trip() {
        for &algorithm in Algorithm::ALL {
            assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
        }
        let error = "rnig".parse::<Algorithm>().unwrap_err().to_string();
        assert!(error.contains("rnig") && error.contains("halving-doubling"), "{error}");
    }

    /// Each threshold, from both sides.
    #[test]
    fn thresholds_from_both_sides() {
        let all_reduce = |bytes, world| chosen(Collective::AllReduce, bytes, &Topology::separate_hosts(world));
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
        let broadcast = |bytes| chosen(Collective::Broadcast { root: 0 }, bytes, &Topology::separate_hosts(4));
        assert_eq!(broadcast(64 << 10), Algorithm::Tree);
        assert_eq!(broadcast((64 << 10) + 4), Algorithm::Ring);
        let scatter = |bytes| chosen(Collective::ReduceScatter, bytes, &Topology::separate_hosts(2));
        assert_eq!(scatter(64 << 10), Algorithm::Direct);
        assert_eq!(scatter((64 << 10) + 8), Algorithm::Ring);
    }

    /// A topology says who is together, whatever the hosts are called.
    #[test]
    fn hosts_have_no_names() {
        let topology = Topology::new(&[7, 3, 7, 9]);
        assert_eq!(topology, Topology::new(&[1, 2, 1, 0]));
        assert_ne!(topology, Topology::new(&[1, 2, 2, 0]));
        assert_eq!((0..3).map(|host| topology.members(host)).collect::<Vec<_>>(), [vec![0, 2], vec![1], vec![3]]);
        assert!(topology.share_host(0, 2) && !topology.share_host(0, 1));
        assert_eq!((topology.host_count(), Topology::new(&[]).host_count()), (3, 0));
        assert_eq!(Topology::separate_hosts(3), Topology::new(&[5, 4, 6]));
    }

    /// One rank on another host takes the group out of memory.
    #[test]
    fn the_slowest_pair_decides() {
        let large = |topology: &Topology| chosen(Collective::AllReduce, 64 << 20, topology);
        assert_eq!(large(&Topology::one_host(4)), Algorithm::Direct);
        assert_eq!(large(&Topology::new(&[7, 7, 7, 3])), Algorithm::Hierarchical);
        assert_eq!(large(&Topology::separate_hosts(4)), Algorithm::Ring);
    }

    /// With few hosts, hierarchical from where one round does not do; with many, where its hops count no more. Only for
    /// all-reduce, and only where ranks share hosts.
    #[test]
    fn hierarchical_from_both_sides() {
        let in_pairs = |hosts: u32| Topology::new(&(0..2 * hosts).map(|rank| rank / 2).collect::<Vec<u32>>());
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
