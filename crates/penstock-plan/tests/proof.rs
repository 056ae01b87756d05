//! Proves from the steps alone that every plan keeps what `docs/algorithms.md` promises.

mod common;

use common::{Case, SEGMENT_BYTES, cases};
use penstock_plan::{
    Algorithm, Collective, Medium, Request, SCRATCH_SEGMENTS, Thresholds, Topology,
    check::{Report, Rules, Violation, check},
    choose, hops, segment_bytes, steps,
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

/// The transport can grant every message from the start, but for those that `docs/algorithms.md` names.
#[test]
fn few_messages_wait_for_their_own_rank() {
    for world in WORLDS {
        for case in cases(world, &[8 * SEGMENT_BYTES], 4) {
            let waits = matches!(
                (case.requests[0].collective, case.algorithm),
                (_, Algorithm::HalvingDoubling | Algorithm::RecursiveDoubling)
                    | (Collective::Reduce { .. }, Algorithm::Tree)
            );
            let late = prove(&case).late_grants;
            assert!(waits || late == 0, "{late} late grants: {case:?}");
        }
    }
}

/// On the wire, reductions of several messages pass up to the eager limit, and are refused one segment above it.
#[test]
fn the_wire_holds_eager_messages_only() {
    for (collective, algorithm) in [
        (Collective::AllReduce, Algorithm::Exchange),
        (Collective::ReduceScatter, Algorithm::Direct),
        (Collective::Reduce { root: 0 }, Algorithm::Direct),
    ] {
        let parts = if collective == Collective::ReduceScatter { 3 } else { 1 };
        let rules = Rules { medium: Medium::Wire, eager_limit_bytes: 4 * SEGMENT_BYTES };
        let outcome = |message: u64| {
            let case = Case::new(collective, algorithm, 3, message * parts, 4);
            check(&case.requests, algorithm, &case.plans(), &rules)
        };
        outcome(4 * SEGMENT_BYTES).unwrap();
        assert!(matches!(outcome(5 * SEGMENT_BYTES), Err(Violation::Hold { .. })), "{collective:?}");
    }
}

/// A plan of 256 MiB for 16 ranks is as long as one of 256 KiB.
#[test]
fn plans_do_not_grow_with_bytes() {
    for case in cases(16, &[256 << 10], 4) {
        for request in &case.requests {
            let mut large = request.clone();
            large.bytes <<= 10;
            let (small, large) = (steps(request, case.algorithm).unwrap(), steps(&large, case.algorithm).unwrap());
            assert_eq!(small.steps.len(), large.steps.len(), "{request:?}");
            assert!(large.steps.len() <= 4 * 16, "{} steps: {request:?}", large.steps.len());
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
        let (topology, thresholds) = (Topology::new(hosts), Thresholds::default());
        let segment_bytes = segment_bytes(collective, topology.medium(), world, bytes, &thresholds);
        let request = |rank| Request { collective, world, rank, bytes, element_bytes, splits: None, segment_bytes };
        let requests: Vec<Request> = (0..world).map(request).collect();
        let (algorithm, reason) = choose(&requests[0], &topology, &thresholds);
        prop_assert!(reason.contains(algorithm.name()));
        for request in &requests {
            prop_assert_eq!(choose(request, &topology, &thresholds), (algorithm, reason.clone()));
        }
        let plans: Vec<_> = requests.iter().map(|request| steps(request, algorithm).unwrap()).collect();
        let checked = check(&requests, algorithm, &plans, &Rules::of(topology.medium()));
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
