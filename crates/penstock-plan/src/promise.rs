//! The promises of `docs/design/algorithms.md` for each algorithm, as closed formulas: bytes on the wire, latency, and the
//! order of the operands. None of these looks at steps; [`crate::check`] proves that steps keep them.

use crate::{
    Algorithm, Collective, PlanError, Request,
    partition::{Chunks, Fold, Hierarchy, Relatives, Ring, Role},
};

/// The bytes that one rank moves in an operation, without headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WireBytes {
    /// Bytes that leave this rank.
    pub sent: u64,
    /// Bytes that reach this rank.
    pub received: u64,
}

/// The bytes that rank `request.rank` sends and receives.
///
/// # Errors
/// Those of [`crate::steps`] that do not depend on the number of messages.
pub fn wire_bytes(request: &Request, algorithm: Algorithm) -> Result<WireBytes, PlanError> {
    check_offered(request, algorithm)?;
    let Request { collective, world: n, rank: r, bytes, .. } = *request;
    let both = |bytes: u64| WireBytes { sent: bytes, received: bytes };
    let others = u64::from(n) - 1;
    if n == 1 {
        return Ok(both(0));
    }
    Ok(match collective {
        Collective::AllReduce => match algorithm {
            Algorithm::Ring => {
                lap_bytes(&Chunks::nearly_equal(bytes, n), bytes, Ring::by_host(&request.placement).place(r))
            }
            Algorithm::Direct => {
                let own = Chunks::nearly_equal(bytes, n).at(r).1;
                both(bytes - own + others * own)
            }
            Algorithm::Exchange => both(others * bytes),
            Algorithm::Aggregated => both(bytes),
            Algorithm::Hierarchical => {
                let division = Hierarchy::of(&request.placement, bytes);
                let host = request.placement.host(r);
                let neighbours = division.members(host).len() as u64 - 1;
                let mut moved = crossing_bytes(request, algorithm)?.expect("it is promised");
                for share in division.shares() {
                    // An owner receives a share from every neighbour and returns it; the others move it once each way.
                    let times = if division.owner(host, share) == r { neighbours } else { 1 };
                    moved.sent += times * division.share(share).1;
                    moved.received += times * division.share(share).1;
                }
                moved
            }
            _ => match Fold::of(n).role(r) {
                Role::Extra { .. } => both(bytes),
                Role::Core { virtual_rank, extra } => {
                    let fold = Fold::of(n);
                    let folded = if extra.is_some() { bytes } else { 0 };
                    both(folded + core_bytes(bytes, &fold, virtual_rank, algorithm))
                }
            },
        },
        Collective::ReduceScatter | Collective::AllGather => both(others * (bytes / u64::from(n))),
        Collective::Broadcast { root } => {
            let v = Ring::from_root(root, &request.placement, algorithm).place(r);
            let Relatives { parent, children } = relatives(n, v, algorithm);
            WireBytes { sent: children.len() as u64 * bytes, received: if parent.is_some() { bytes } else { 0 } }
        }
        Collective::Reduce { root } => {
            let v = Ring::from_root(root, &request.placement, algorithm).place(r);
            let Relatives { parent, children } = relatives(n, v, algorithm);
            WireBytes { sent: if parent.is_some() { bytes } else { 0 }, received: children.len() as u64 * bytes }
        }
        Collective::Gather { root } if root == r => WireBytes { sent: 0, received: others * bytes },
        Collective::Scatter { root } if root == r => WireBytes { sent: others * bytes, received: 0 },
        Collective::Gather { .. } | Collective::Send { .. } => WireBytes { sent: bytes, received: 0 },
        Collective::Scatter { .. } | Collective::Recv { .. } => WireBytes { sent: 0, received: bytes },
        Collective::AllToAll => match &request.splits {
            None => both(others * (bytes / u64::from(n))),
            Some(splits) => WireBytes {
                sent: splits.input.iter().sum::<u64>() - splits.input[r as usize],
                received: splits.output.iter().sum::<u64>() - splits.output[r as usize],
            },
        },
        Collective::Barrier => both(0),
    })
}

/// The part of [`wire_bytes`] that goes to, and comes from, ranks on other hosts: what the host's link carries is the sum
/// over its ranks. `None` for algorithms that promise nothing about hosts.
///
/// # Errors
/// As [`wire_bytes`].
pub fn crossing_bytes(request: &Request, algorithm: Algorithm) -> Result<Option<WireBytes>, PlanError> {
    check_offered(request, algorithm)?;
    let Request { collective, world: n, rank: r, ref placement, bytes, .. } = *request;
    match (collective, algorithm) {
        (Collective::AllReduce | Collective::ReduceScatter | Collective::AllGather, Algorithm::Ring) => {
            let moved = wire_bytes(request, algorithm)?;
            let ring = Ring::by_host(placement);
            let place = ring.place(r);
            let over = |other: u32, bytes: u64| if placement.share_host(r, other) { 0 } else { bytes };
            Ok(Some(WireBytes {
                sent: over(ring.rank(place + 1), moved.sent),
                received: over(ring.rank(place + n - 1), moved.received),
            }))
        }
        (Collective::AllReduce, Algorithm::Hierarchical) => {
            let division = Hierarchy::of(placement, bytes);
            let host = placement.host(r);
            let mut moved = WireBytes::default();
            for share in division.shares().filter(|&share| division.owner(host, share) == r) {
                let lap = lap_bytes(&division.chunks(share), division.share(share).1, host);
                moved.sent += lap.sent;
                moved.received += lap.received;
            }
            Ok(Some(moved))
        }
        _ => Ok(None),
    }
}

/// The longest chain of messages in which each waits for the one before: the latency term, in one-way trips. Exact
/// where no chunk is empty, an upper bound otherwise. To a server and back are two, however many aggregators lie between.
///
/// # Errors
/// As [`wire_bytes`].
pub fn hops(request: &Request, algorithm: Algorithm) -> Result<u32, PlanError> {
    check_offered(request, algorithm)?;
    Ok(latency(request, algorithm))
}

/// [`hops`] of a request that has a plan.
pub(crate) fn latency(request: &Request, algorithm: Algorithm) -> u32 {
    let n = request.world;
    if n == 1 {
        return 0;
    }
    let fold = Fold::of(n);
    let paired = n - fold.p;
    let into_pairs_and_out = if paired > 0 { 2 } else { 0 };
    // Exchanges over all rounds lead to the virtual rank with the opposite bits: unless more than half are paired, that
    // one has no extra rank to hand the result to.
    let into_pairs_or_out = into_pairs_and_out.min(if 2 * paired > fold.p { 2 } else { 1 });
    match (request.collective, algorithm) {
        (Collective::AllReduce, Algorithm::Ring) => 2 * (n - 1),
        (Collective::AllReduce, Algorithm::HalvingDoubling) => 2 * fold.rounds() + into_pairs_and_out,
        (Collective::AllReduce, Algorithm::RecursiveDoubling) => fold.rounds() + into_pairs_or_out,
        (Collective::AllReduce, Algorithm::Direct | Algorithm::Aggregated) => 2,
        (Collective::AllReduce, Algorithm::Hierarchical) => {
            // A chunk starts at one host and ends at the host two before it: one hop more in each that has neighbours.
            let division = Hierarchy::of(&request.placement, request.bytes);
            let hosts = division.hosts();
            let within = |host: u32| u32::from(division.members(host).len() > 1);
            let hops = (0..hosts).map(|host| within(host) + 2 * (hosts - 1) + within(host + 2 * (hosts - 1)));
            hops.max().unwrap_or(0)
        }
        (_, Algorithm::Ring) => n - 1,
        (_, Algorithm::Tree) => n.ilog2(),
        (_, Algorithm::Dissemination) => n.next_power_of_two().ilog2(),
        _ => 1,
    }
}

/// The order in which operands are reduced: a leaf is a rank's contribution, a node is one step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// The contribution of this rank.
    Rank(u32),
    /// One reduction of these, from left to right.
    Reduce(Vec<Order>),
}

/// The order in which each byte of the result is reduced, as (start, length, order) over the whole tensor. Servers
/// ([`Algorithm::Aggregated`]) add integers, for which every order gives the same result, or floats in the order of their
/// tree, which the plan does not know: that counts as one reduction of all ranks. Every rank that has a byte of the result has
/// it by the same order, so all have the same bits. Empty if nothing is reduced.
///
/// # Errors
/// As [`wire_bytes`].
pub fn order(request: &Request, algorithm: Algorithm) -> Result<Vec<(u64, u64, Order)>, PlanError> {
    check_offered(request, algorithm)?;
    let Request { collective, world: n, bytes, .. } = *request;
    if n == 1 || !collective.reduces() {
        return Ok(Vec::new());
    }
    let from_left = |ranks: &mut dyn Iterator<Item = u32>| {
        ranks.map(Order::Rank).reduce(|left, right| Order::Reduce(vec![left, right])).expect("a group has ranks")
    };
    let whole = |order: Order| vec![(0, bytes, order)];
    let all_at_once = || Order::Reduce((0..n).map(Order::Rank).collect());
    let ring = Ring::by_host(&request.placement);
    Ok(match (collective, algorithm) {
        (Collective::AllReduce, Algorithm::Ring) => {
            let chunks = Chunks::nearly_equal(bytes, n);
            let order = |chunk: u32| from_left(&mut (chunk..chunk + n).map(|place| ring.rank(place)));
            (0..n).map(|chunk| (chunks.at(chunk).0, chunks.at(chunk).1, order(chunk))).collect()
        }
        (Collective::AllReduce, Algorithm::Hierarchical) => {
            let division = Hierarchy::of(&request.placement, bytes);
            let hosts = division.hosts();
            let within = |host: u32| match division.members(host) {
                [rank] => Order::Rank(*rank),
                ranks => Order::Reduce(ranks.iter().copied().map(Order::Rank).collect()),
            };
            let across = |chunk: u32| {
                let sums = (chunk..chunk + hosts).map(within);
                sums.reduce(|left, right| Order::Reduce(vec![left, right])).expect("a group has hosts")
            };
            let chunk = |share: u32, chunk: u32| {
                let (start, len) = division.chunks(share).at(chunk);
                (division.share(share).0 + start, len, across(chunk))
            };
            division.shares().flat_map(|share| (0..hosts).map(move |host| chunk(share, host))).collect()
        }
        (Collective::ReduceScatter, Algorithm::Ring) => {
            let chunk_bytes = bytes / u64::from(n);
            let order = |chunk: u32| {
                let last = ring.place(chunk);
                from_left(&mut (last + 1..=last + n).map(|place| ring.rank(place)))
            };
            (0..n).map(|chunk| (u64::from(chunk) * chunk_bytes, chunk_bytes, order(chunk))).collect()
        }
        (_, Algorithm::HalvingDoubling | Algorithm::RecursiveDoubling) => {
            let fold = Fold::of(n);
            let leaf = |virtual_rank: u32| {
                let rank = fold.rank(virtual_rank);
                match fold.role(rank) {
                    Role::Core { extra: Some(extra), .. } => Order::Reduce(vec![Order::Rank(rank), Order::Rank(extra)]),
                    _ => Order::Rank(rank),
                }
            };
            let mut level: Vec<Order> = (0..fold.p).map(leaf).collect();
            while level.len() > 1 {
                level = level.chunks(2).map(|pair| Order::Reduce(pair.to_vec())).collect();
            }
            whole(level.remove(0))
        }
        (Collective::Reduce { root }, Algorithm::Ring | Algorithm::Tree) => {
            fn of_subtree(n: u32, from_root: &Ring, v: u32, algorithm: Algorithm) -> Order {
                let own = Order::Rank(from_root.rank(v));
                relatives(n, v, algorithm).children.into_iter().fold(own, |partial, child| {
                    Order::Reduce(vec![partial, of_subtree(n, from_root, child, algorithm)])
                })
            }
            whole(of_subtree(n, &Ring::from_root(root, &request.placement, algorithm), 0, algorithm))
        }
        _ => whole(all_at_once()),
    })
}

/// The bytes that the rank at a place of a ring all-reduce of `bytes` moves: every chunk but one, twice.
fn lap_bytes(chunks: &Chunks, bytes: u64, place: u32) -> WireBytes {
    let chunk = |index: u32| chunks.at(index).1;
    WireBytes {
        sent: 2 * bytes - chunk(place + 1) - chunk(place + 2),
        received: 2 * bytes - chunk(place) - chunk(place + 1),
    }
}

/// One direction of a virtual rank's exchanges with the others.
fn core_bytes(bytes: u64, fold: &Fold, virtual_rank: u32, algorithm: Algorithm) -> u64 {
    if algorithm == Algorithm::RecursiveDoubling {
        return u64::from(fold.rounds()) * bytes;
    }
    let kept = |rounds: u32| {
        let range = fold.kept(virtual_rank, rounds);
        Chunks::nearly_equal(bytes, fold.p).range(range.start, range.end).1
    };
    // Halving gives away all but the last part that is kept; doubling sends each part that was kept.
    bytes - kept(fold.rounds()) + (1..=fold.rounds()).map(kept).sum::<u64>()
}

fn relatives(world: u32, v: u32, algorithm: Algorithm) -> Relatives {
    match algorithm {
        Algorithm::Tree => Relatives::in_tree(v, world),
        Algorithm::Ring => Relatives::in_chain(v, world),
        _ => Relatives::in_star(v, world),
    }
}

fn check_offered(request: &Request, algorithm: Algorithm) -> Result<(), PlanError> {
    request.validate()?;
    if algorithm.is_for(request) {
        return Ok(());
    }
    let offered = Algorithm::of(request.collective);
    Err(PlanError::NotFor { algorithm, collective: request.collective.name(), offered })
}
