//! Requests and plans of all ranks, for the tests of this crate.
#![allow(dead_code, reason = "each test uses its part")]

use penstock_plan::{
    Algorithm, Collective, Medium, Request, Splits, Steps,
    check::{Report, Rules, Violation, check},
    steps,
};

/// Small, so that a few hundred bytes are several segments.
pub(crate) const SEGMENT_BYTES: u64 = 64;

/// The ranks of one operation.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) algorithm: Algorithm,
    pub(crate) requests: Vec<Request>,
}

impl Case {
    pub(crate) fn new(
        collective: Collective,
        algorithm: Algorithm,
        world: u32,
        bytes: u64,
        element_bytes: u32,
    ) -> Case {
        let request = |rank| Request {
            collective,
            world,
            rank,
            bytes,
            element_bytes,
            splits: None,
            segment_bytes: SEGMENT_BYTES,
        };
        Case { algorithm, requests: (0..world).map(request).collect() }
    }

    /// An all-to-all in which rank `a` sends `bytes(a, b)` to rank `b`.
    pub(crate) fn uneven_all_to_all(world: u32, bytes: impl Fn(u32, u32) -> u64) -> Case {
        let mut case = Case::new(Collective::AllToAll, Algorithm::Direct, world, 0, 1);
        for request in &mut case.requests {
            request.splits = Some(Splits {
                input: (0..world).map(|to| bytes(request.rank, to)).collect(),
                output: (0..world).map(|from| bytes(from, request.rank)).collect(),
            });
        }
        case
    }

    /// Rank `from` sends to rank `to` in a group of two.
    pub(crate) fn send_recv(from: u32, bytes: u64) -> Case {
        let to = 1 - from;
        let mut case = Case::new(Collective::Send { to }, Algorithm::Direct, 2, bytes, 1);
        case.requests[to as usize].collective = Collective::Recv { from };
        case
    }

    pub(crate) fn plans(&self) -> Vec<Steps> {
        let plan = |request| steps(request, self.algorithm).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        self.requests.iter().map(plan).collect()
    }

    /// What this algorithm may ask of the transport: nothing that the wire cannot do, with no eager message at all,
    /// unless it is one that holds messages.
    pub(crate) fn rules(&self) -> Rules {
        if self.algorithm.holds_messages(self.requests[0].collective) {
            Rules::of(Medium::Memory)
        } else {
            Rules { medium: Medium::Wire, eager_limit_bytes: 0 }
        }
    }

    pub(crate) fn check(&self, plans: &[Steps]) -> Result<Report, Violation> {
        check(&self.requests, self.algorithm, plans, &self.rules())
    }
}

/// Every collective with every algorithm and every root, for one group: `sizes` are of a tensor, rounded up to what
/// the collective can divide.
pub(crate) fn cases(world: u32, sizes: &[u64], element_bytes: u32) -> Vec<Case> {
    let mut collectives =
        vec![Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather, Collective::AllToAll];
    for root in 0..world {
        collectives.extend([
            Collective::Broadcast { root },
            Collective::Reduce { root },
            Collective::Gather { root },
            Collective::Scatter { root },
        ]);
    }
    let mut cases = vec![Case::new(Collective::Barrier, Algorithm::Dissemination, world, 0, 1)];
    for &bytes in sizes {
        for &collective in &collectives {
            for &algorithm in Algorithm::of(collective) {
                let parts = match collective {
                    Collective::ReduceScatter | Collective::AllGather | Collective::AllToAll => world,
                    _ => 1,
                };
                let bytes = bytes.next_multiple_of(u64::from(parts * element_bytes));
                cases.push(Case::new(collective, algorithm, world, bytes, element_bytes));
            }
        }
        cases.push(Case::uneven_all_to_all(world, |from, to| bytes * u64::from((3 * from + 5 * to) % 4) / 3));
    }
    if world == 2 {
        cases.extend(sizes.iter().flat_map(|&bytes| [Case::send_recv(0, bytes), Case::send_recv(1, bytes)]));
    }
    cases
}
