//! What `docs/algorithms.md` promises of each algorithm, as closed formulas: bytes on the wire, latency, and the order of
//! the operands. None of it looks at steps; [`crate::check`] proves that steps keep it.

use crate::{
    Algorithm, Collective, PlanError, Request,
    partition::{Chunks, Fold, Relatives, Role},
};

/// What one rank moves in an operation, headers not counted.
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
                let chunk = |index: u32| Chunks::nearly_equal(bytes, n).at(index).1;
                WireBytes {
                    sent: 2 * bytes - chunk(r + 1) - chunk(r + 2),
                    received: 2 * bytes - chunk(r) - chunk(r + 1),
                }
            }
            Algorithm::Direct => {
                let own = Chunks::nearly_equal(bytes, n).at(r).1;
                both(bytes - own + others * own)
            }
            Algorithm::Exchange => both(others * bytes),
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
            let Relatives { parent, children } = relatives(n, (r + n - root) % n, algorithm);
            WireBytes { sent: children.len() as u64 * bytes, received: if parent.is_some() { bytes } else { 0 } }
        }
        Collective::Reduce { root } => {
            let Relatives { parent, children } = relatives(n, (r + n - root) % n, algorithm);
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

/// The longest chain of messages in which each waits for the one before: the latency term, in one-way trips. Exact
/// where no chunk is empty, an upper bound otherwise.
///
/// # Errors
/// As [`wire_bytes`].
pub fn hops(request: &Request, algorithm: Algorithm) -> Result<u32, PlanError> {
    check_offered(request, algorithm)?;
    let n = request.world;
    if n == 1 {
        return Ok(0);
    }
    let fold = Fold::of(n);
    let paired = n - fold.p;
    let into_pairs_and_out = if paired > 0 { 2 } else { 0 };
    // Exchanges over all rounds lead to the virtual rank with the opposite bits: unless more than half are paired, that
    // one has no extra rank to hand the result to.
    let into_pairs_or_out = into_pairs_and_out.min(if 2 * paired > fold.p { 2 } else { 1 });
    Ok(match (request.collective, algorithm) {
        (Collective::AllReduce, Algorithm::Ring) => 2 * (n - 1),
        (Collective::AllReduce, Algorithm::HalvingDoubling) => 2 * fold.rounds() + into_pairs_and_out,
        (Collective::AllReduce, Algorithm::RecursiveDoubling) => fold.rounds() + into_pairs_or_out,
        (Collective::AllReduce, Algorithm::Direct) => 2,
        (_, Algorithm::Ring) => n - 1,
        (_, Algorithm::Tree) => n.ilog2(),
        (_, Algorithm::Dissemination) => n.next_power_of_two().ilog2(),
        _ => 1,
    })
}

/// In which order operands are reduced: a leaf is a rank's contribution, a node is one step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// What this rank contributes.
    Rank(u32),
    /// One reduction of these, from left to right.
    Reduce(Vec<Order>),
}

/// The order in which each byte of the result is reduced, as (start, length, order) over the whole tensor. Every rank
/// that has a byte of the result has it by the same order, so that all have the same bits. Empty where nothing is
/// reduced.
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
    Ok(match (collective, algorithm) {
        (Collective::AllReduce, Algorithm::Ring) => {
            let chunks = Chunks::nearly_equal(bytes, n);
            let order = |chunk: u32| from_left(&mut (chunk..chunk + n).map(|rank| rank % n));
            (0..n).map(|chunk| (chunks.at(chunk).0, chunks.at(chunk).1, order(chunk))).collect()
        }
        (Collective::ReduceScatter, Algorithm::Ring) => {
            let chunk_bytes = bytes / u64::from(n);
            let order = |chunk: u32| from_left(&mut (chunk + 1..=chunk + n).map(|rank| rank % n));
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
            fn of_subtree(n: u32, root: u32, v: u32, algorithm: Algorithm) -> Order {
                let own = Order::Rank((v + root) % n);
                relatives(n, v, algorithm)
                    .children
                    .into_iter()
                    .fold(own, |partial, child| Order::Reduce(vec![partial, of_subtree(n, root, child, algorithm)]))
            }
            whole(of_subtree(n, root, 0, algorithm))
        }
        _ => whole(all_at_once()),
    })
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
    let offered = Algorithm::of(request.collective);
    if offered.contains(&algorithm) {
        return Ok(());
    }
    Err(PlanError::NotFor { algorithm, collective: request.collective.name(), offered })
}
