//! Proves from the steps alone that every plan keeps what `docs/design/algorithms.md` promises.

mod common;

use common::{Case, SEGMENT_BYTES, cases, cases_on_hosts, placements};
use penstock_plan::{
    Algorithm, Collective, Placement, Request, SCRATCH_SEGMENTS, Thresholds,
    check::{Report, Rules, Violation, check},
    choose, crossing_bytes, hops, order, segment_bytes, steps,
};
use proptest::prelude::*;

const WORLDS: [u32; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16];

fn prove(case: &Case) -> Report {
    case.check(&case.plans()).unwrap_or_else(|violation| panic!("{violation}\n{case:#?}"))
}

/// Nothing, one element, odd numbers of elements below and above a segment: right for every group, collective,
/// algorithm and root.
#[test]
fn small_tensors() {
    for world in WORLDS {
        for (element_bytes, sizes) in [(4, [0, 4, 52, 388]), (1, [0, 1, 97, 331]), (8, [0, 8, 200, 1000])] {
            cases(world, &sizes, element_bytes).iter().for_each(|case| {
                prove(case);
            });
        }
    }
}

/// Whatever ranks share hosts: right, from tensors of nothing to several segments in every chunk; what crosses hosts is
/// what is promised, and so is the longest chain of messages.
#[test]
fn any_ranks_on_any_hosts() {
    for world in WORLDS {
        // There are at most ((n + 1) / 2)^2 chunks of shares.
        let large = u64::from(world * world / 2 + 2 * world) * SEGMENT_BYTES - 20;
        for (element_bytes, sizes) in [(4, [0, 4, 52, 388, large]), (1, [0, 1, 97, 331, 1000])] {
            for case in cases_on_hosts(world, &sizes, element_bytes) {
                let report = prove(&case);
                let promised = hops(&case.requests[0], case.algorithm).unwrap();
                assert!(
                    case.requests[0].bytes < large || report.hops == promised,
                    "{report:?}, not {promised}: {case:?}"
                );
            }
        }
    }
}

/// Each host's link carries `2(h-1)/h` of the tensor each way, for `h` hosts of any numbers of ranks, and no rank of equal
/// hosts more than its part of that. A ring carries `2(n-1)/n`.
#[test]
fn links_carry_what_hosts_lack() {
    for world in WORLDS {
        for placement in placements(world) {
            // Divides into any number of shares, and these into any number of chunks: 720720 divides by 1 to 16.
            let bytes = 64 * 720_720 * 720_720;
            let hosts = placement.host_count();
            let link = |algorithm: Algorithm, host: u32| {
                let case = Case::on(&placement, Collective::AllReduce, algorithm, bytes, 4);
                let moved = |rank: u32| crossing_bytes(&case.requests[rank as usize], algorithm).unwrap().unwrap();
                let members = placement.members(host);
                let equal = (0..hosts).all(|other| placement.members(other).len() == members.len());
                let most = members.iter().map(|&rank| moved(rank).sent).max().unwrap();
                let sent: u64 = members.iter().map(|&rank| moved(rank).sent).sum();
                let received: u64 = members.iter().map(|&rank| moved(rank).received).sum();
                assert_eq!(sent, received, "{placement:?}");
                let spread = algorithm == Algorithm::Ring || !equal || most * members.len() as u64 == sent;
                assert!(spread, "{most} of {sent} by one rank: {placement:?}");
                sent
            };
            for host in 0..hosts {
                let least = 2 * bytes / u64::from(hosts) * u64::from(hosts - 1);
                assert_eq!(link(Algorithm::Hierarchical, host), least, "{placement:?}");
                let ring = if hosts == 1 { 0 } else { 2 * bytes / u64::from(world) * u64::from(world - 1) };
                assert_eq!(link(Algorithm::Ring, host), ring, "{placement:?}");
            }
        }
    }
}

/// The hierarchical all-reduce adds in the order of the direct one on one host, and of the ring with one rank a host.
#[test]
fn hierarchies_of_one_level_add_in_known_orders() {
    for world in 2..9 {
        let orders = |placement: &Placement, algorithm| {
            order(&Case::on(placement, Collective::AllReduce, algorithm, 4000, 4).requests[0], algorithm).unwrap()
        };
        let (together, apart) = (Placement::one_host(world), Placement::separate_hosts(world));
        assert_eq!(orders(&apart, Algorithm::Hierarchical), orders(&apart, Algorithm::Ring));
        let direct = &orders(&together, Algorithm::Direct)[0].2;
        assert!(orders(&together, Algorithm::Hierarchical).iter().all(|(_, _, order)| order == direct));
    }
}

/// The hierarchical plan holds messages within a host only: it needs no eager message, and is refused at any size where
/// its ranks are not where it thinks they are.
#[test]
fn ranks_that_disagree_on_hosts_are_refused() {
    let case = |hosts: &[u32]| {
        Case::on(&Placement::new(hosts), Collective::AllReduce, Algorithm::Hierarchical, 40 * SEGMENT_BYTES, 4)
    };
    let blocks = case(&[0, 0, 0, 1, 1, 1]);
    blocks.check(&blocks.plans()).unwrap();
    let turns = case(&[0, 1, 0, 1, 0, 1]);
    for elsewhere in [&turns, &case(&[0, 0, 1, 1, 1, 0]), &case(&[0, 1, 2, 3, 4, 5])] {
        let outcome = elsewhere.check(&blocks.plans());
        assert!(matches!(outcome, Err(Violation::Hold { .. })), "{outcome:?}");
    }
    for rank in 0..6 {
        let mut plans = blocks.plans();
        plans[rank] = turns.plans()[rank].clone();
        let mixed = blocks.check(&plans);
        assert!(mixed.is_err(), "rank {rank} runs the plan of another placement");
    }
}

/// Several segments in every chunk: right, and the longest chain of messages is exactly the promised latency.
#[test]
fn many_segments() {
    for world in WORLDS {
        let bytes = u64::from(world) * 5 * SEGMENT_BYTES - 20;
        for case in cases(world, &[bytes], 4) {
            let report = prove(&case);
            let all_ranks_have_bytes = case.requests[0].splits.is_none();
            if all_ranks_have_bytes {
                assert_eq!(report.hops, hops(&case.requests[0], case.algorithm).unwrap(), "{case:?}");
            }
        }
    }
}

/// Partial results that do not fit in scratch take turns in its slots: still right, and scratch stays bounded.
#[test]
fn scratch_is_bounded() {
    for world in [3, 4, 5, 7, 9, 16] {
        let bytes = 40 * SEGMENT_BYTES - 24;
        for (collective, algorithm, bytes) in [
            (Collective::ReduceScatter, Algorithm::Ring, u64::from(world) * bytes),
            (Collective::Reduce { root: 1 }, Algorithm::Ring, bytes),
            (Collective::Reduce { root: 1 }, Algorithm::Tree, bytes),
        ] {
            let report = prove(&Case::new(collective, algorithm, world, bytes, 4));
            let slots = u64::from(SCRATCH_SEGMENTS);
            assert!(report.scratch_bytes <= slots * SEGMENT_BYTES, "{collective:?}: {report:?}");
            assert!(report.late_grants > 0, "messages must wait for slots: {collective:?}");
        }
    }
}

/// The transport can grant every message from the start, but for those that `docs/design/algorithms.md` names.
#[test]
fn few_messages_wait_for_their_own_rank() {
    for world in WORLDS {
        for case in cases(world, &[8 * SEGMENT_BYTES], 4) {
            let waits = matches!(
                (case.requests[0].collective, case.algorithm),
                (_, Algorithm::HalvingDoubling | Algorithm::RecursiveDoubling | Algorithm::Hierarchical)
                    | (Collective::Reduce { .. }, Algorithm::Tree)
            );
            let late = prove(&case).late_grants;
            assert!(waits || late == 0, "{late} late grants: {case:?}");
        }
    }
}

/// Reductions of several messages, one of them from another host, pass up to the eager limit, and are refused one segment
/// above it; those of messages within the host pass.
#[test]
fn the_wire_holds_eager_messages_only() {
    for (collective, algorithm) in [
        (Collective::AllReduce, Algorithm::Exchange),
        (Collective::ReduceScatter, Algorithm::Direct),
        (Collective::Reduce { root: 0 }, Algorithm::Direct),
    ] {
        let parts = if collective == Collective::ReduceScatter { 3 } else { 1 };
        let rules = Rules { eager_limit_bytes: 4 * SEGMENT_BYTES };
        let outcome = |placement: &Placement, message: u64| {
            let case = Case::on(placement, collective, algorithm, message * parts, 4);
            check(&case.requests, algorithm, &case.plans(), &rules)
        };
        // One rank elsewhere is enough.
        for placement in [Placement::separate_hosts(3), Placement::new(&[0, 0, 1])] {
            outcome(&placement, 4 * SEGMENT_BYTES).unwrap();
            let longer = outcome(&placement, 5 * SEGMENT_BYTES);
            assert!(matches!(longer, Err(Violation::Hold { .. })), "{collective:?} on {placement:?}");
        }
        outcome(&Placement::one_host(3), 5 * SEGMENT_BYTES).unwrap();
    }
}

/// A plan of 256 MiB for 16 ranks is as long as one of 256 KiB, on any hosts; it has a few steps for each other rank, but
/// where one rank meets many on another host.
#[test]
fn plans_do_not_grow_with_bytes() {
    for case in cases(16, &[256 << 10], 4).into_iter().chain(cases_on_hosts(16, &[256 << 10], 4)) {
        let placement = &case.requests[0].placement;
        let ranks = || (0..placement.host_count()).map(|host| placement.members(host).len());
        let is_even = ranks().max() == ranks().min() || case.algorithm != Algorithm::Hierarchical;
        let most = if is_even { 5 * 16 } else { 16 * 16 };
        for request in &case.requests {
            let mut large = request.clone();
            large.bytes <<= 10;
            let (small, large) = (steps(request, case.algorithm).unwrap(), steps(&large, case.algorithm).unwrap());
            assert_eq!(small.steps.len(), large.steps.len(), "{request:?}");
            assert!(large.steps.len() <= most, "{} steps: {request:?}", large.steps.len());
        }
    }
}

fn collective(world: u32) -> impl Strategy<Value = Collective> {
    (0..9, 0..world).prop_map(|(kind, root)| match kind {
        0 | 1 => Collective::AllReduce,
        2 => Collective::ReduceScatter,
        3 => Collective::AllGather,
        4 => Collective::Broadcast { root },
        5 => Collective::Reduce { root },
        6 => Collective::Gather { root },
        7 => Collective::Scatter { root },
        _ => Collective::AllToAll,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is asked for, on whatever hosts: what `choose` picks has a plan that the transport can carry.
    #[test]
    fn what_is_chosen_can_run(
        (collective, hosts) in (1u32..12).prop_flat_map(|world| {
            (collective(world), proptest::collection::vec(0..3u32, world as usize))
        }),
        exponent in 0..20u32,
        odd in 0..1u64 << 20,
        element_bytes in prop::sample::select(vec![1u32, 2, 4, 8]),
    ) {
        let world = hosts.len() as u32;
        let bytes = (odd % (1 << exponent)).next_multiple_of(u64::from(world * element_bytes));
        let (placement, thresholds) = (Placement::new(&hosts), Thresholds::default());
        let segment_bytes = segment_bytes(collective, placement.medium(), world, bytes, &thresholds);
        let request = |rank| {
            let placement = placement.clone();
            Request { collective, world, rank, placement, bytes, element_bytes, splits: None, segment_bytes }
        };
        let requests: Vec<Request> = (0..world).map(request).collect();
        let (algorithm, reason) = choose(&requests[0], &thresholds);
        prop_assert!(reason.contains(algorithm.name()));
        for request in &requests {
            prop_assert_eq!(choose(request, &thresholds), (algorithm, reason.clone()));
        }
        let plans: Vec<_> = requests.iter().map(|request| steps(request, algorithm).unwrap()).collect();
        let checked = check(&requests, algorithm, &plans, &Rules::default());
        prop_assert!(checked.is_ok(), "{:?}: {}", algorithm, checked.unwrap_err());
    }

    /// Any splits, with empty parts: right.
    #[test]
    fn any_splits(parts in (1usize..6).prop_flat_map(|world| {
        proptest::collection::vec(proptest::collection::vec(0..200u64, world), world)
    })) {
        let case = Case::uneven_all_to_all(parts.len() as u32, |from, to| parts[from as usize][to as usize]);
        prove(&case);
    }
}
