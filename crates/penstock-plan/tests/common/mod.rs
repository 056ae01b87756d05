//! Requests and plans of all ranks, for the tests of this crate.
#![allow(dead_code, reason = "each test uses its part")]

use penstock_plan::{
    Algorithm, Collective, Placement, Request, Splits, Steps,
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
    /// On the placement that asks the most of the transport: every rank on a host of its own, where the algorithm does not
    /// hold messages.
    pub(crate) fn new(
        collective: Collective,
        algorithm: Algorithm,
        world: u32,
        bytes: u64,
        element_bytes: u32,
    ) -> Case {
        let placement = if algorithm.holds_messages(collective) {
            Placement::one_host(world)
        } else {
            Placement::separate_hosts(world)
        };
        Case::on(&placement, collective, algorithm, bytes, element_bytes)
    }

    pub(crate) fn on(
        placement: &Placement,
        collective: Collective,
        algorithm: Algorithm,
        bytes: u64,
        element_bytes: u32,
    ) -> Case {
        let world = placement.world();
        let request = |rank| Request {
            collective,
            world,
            rank,
            placement: placement.clone(),
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

    /// Whether the plans are right with no eager message at all.
    pub(crate) fn check(&self, plans: &[Steps]) -> Result<Report, Violation> {
        check(&self.requests, self.algorithm, plans, &Rules { eager_limit_bytes: 0 })
    }
}

/// Ways to put ranks on hosts: all together, each alone, in blocks, by turns, and uneven ones.
pub(crate) fn placements(world: u32) -> Vec<Placement> {
    let mut placements: Vec<Placement> = Vec::new();
    let hosts: [&dyn Fn(u32) -> u32; 10] = [
        &|_| 0,
        &|rank| rank,
        &|rank| rank / 2,
        &|rank| rank / 3,
        &|rank| rank % 2,
        &|rank| rank % 3,
        &|rank| u32::from(rank == 0),
        &|rank| rank.min(2),
        &|rank| u32::from(rank % 5 == 2),
        &|rank| rank * rank % 7,
    ];
    for host in hosts {
        let placement = Placement::new(&(0..world).map(host).collect::<Vec<u32>>());
        if !placements.contains(&placement) {
            placements.push(placement);
        }
    }
    placements
}

/// What depends on the placement, on every one of [`placements`].
pub(crate) fn cases_on_hosts(world: u32, sizes: &[u64], element_bytes: u32) -> Vec<Case> {
    let mut cases = Vec::new();
    for placement in placements(world) {
        for &bytes in sizes {
            let mut add = |collective, algorithm, parts: u32| {
                let bytes = bytes.next_multiple_of(u64::from(parts * element_bytes));
                cases.push(Case::on(&placement, collective, algorithm, bytes, element_bytes));
            };
            add(Collective::AllReduce, Algorithm::Hierarchical, 1);
            add(Collective::AllReduce, Algorithm::Ring, 1);
            add(Collective::ReduceScatter, Algorithm::Ring, world);
            add(Collective::AllGather, Algorithm::Ring, world);
            add(Collective::Broadcast { root: world / 2 }, Algorithm::Ring, 1);
            add(Collective::Reduce { root: world / 2 }, Algorithm::Ring, 1);
        }
    }
    cases
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
    for weights in [&[1][..], &[1, 1], &[0, 3, 2]] {
        let placement = Placement::separate_hosts(world).with_servers(weights);
        let of = |&bytes: &u64| {
            let bytes = bytes.next_multiple_of(u64::from(element_bytes));
            Case::on(&placement, Collective::AllReduce, Algorithm::Aggregated, bytes, element_bytes)
        };
        cases.extend(sizes.iter().map(of));
    }
    if world == 2 {
        cases.extend(sizes.iter().flat_map(|&bytes| [Case::send_recv(0, bytes), Case::send_recv(1, bytes)]));
    }
    cases
}
