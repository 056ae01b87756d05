//! Proves from the steps alone that every plan keeps what `docs/algorithms.md` promises.

mod common;

use common::{Case, SEGMENT_BYTES, cases};
use penstock_plan::hops;

const WORLDS: [u32; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16];

fn prove(case: &Case) -> penstock_plan::check::Report {
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
