//! Runs plans over real bytes under many schedules: the results are those of the collective's definition, bit by bit.

mod common;

use common::{Case, SEGMENT_BYTES, cases, cases_on_hosts};
use penstock_plan::{
    Algorithm, Collective, Dep, Order,
    check::Violation,
    execute::{Memory, execute},
    order,
};

/// Neither commutative nor associative, so that a result shows in which order its operands were reduced. Finishing is
/// visible too.
fn reduce(dst: &mut [u8], sources: &[&[u8]], last: bool) {
    for (at, dst) in dst.iter_mut().enumerate() {
        *dst = combine(sources.iter().map(|source| source[at]));
        if last {
            *dst = finish(*dst);
        }
    }
}

fn combine(operands: impl Iterator<Item = u8>) -> u8 {
    operands.reduce(|left, right| left.wrapping_mul(31).wrapping_add(right.rotate_left(3)) ^ 0x35).expect("operands")
}

fn finish(value: u8) -> u8 {
    value.wrapping_add(101)
}

/// What a rank contributes: shows rank and place.
fn contribution(rank: u32, at: u64) -> u8 {
    (u64::from(rank) * 41 + at * 7 + (at >> 8) * 3) as u8
}

fn contributions(rank: u32, len: u64) -> Vec<u8> {
    (0..len).map(|at| contribution(rank, at)).collect()
}

/// The memory of all ranks before the operation. What a rank may not read is marked.
fn start(case: &Case) -> Vec<Memory> {
    let memory = |request: &penstock_plan::Request, plan| {
        let mut memory = Memory::zeroed(request, plan);
        memory.input = contributions(request.rank, request.input_bytes());
        memory.output.fill(0xEE);
        memory.scratch.fill(0xDD);
        let in_place = match request.collective {
            Collective::AllReduce | Collective::Reduce { .. } => true,
            Collective::Broadcast { root } => root == request.rank,
            _ => false,
        };
        if in_place {
            memory.output = contributions(request.rank, request.output_bytes());
        }
        memory
    };
    case.requests.iter().zip(&case.plans()).map(|(request, plan)| memory(request, plan)).collect()
}

/// What the collective's definition says that rank `rank` gets.
fn expected(case: &Case, rank: u32) -> Vec<u8> {
    let request = &case.requests[rank as usize];
    let (world, len) = (request.world, request.output_bytes());
    let orders = order(request, case.algorithm).unwrap();
    let reduced = |at: u64| {
        fn evaluate(order: &Order, at: u64) -> u8 {
            match order {
                Order::Rank(rank) => contribution(*rank, at),
                Order::Reduce(sources) => combine(sources.iter().map(|source| evaluate(source, at))),
            }
        }
        if world == 1 {
            return contribution(0, at);
        }
        let (_, _, order) = orders.iter().find(|(start, len, _)| (*start..start + len).contains(&at)).unwrap();
        finish(evaluate(order, at))
    };
    match request.collective {
        Collective::AllReduce => (0..len).map(reduced).collect(),
        Collective::Reduce { root } if root == rank => (0..len).map(reduced).collect(),
        Collective::Reduce { .. } => contributions(rank, len),
        Collective::ReduceScatter => (0..len).map(|at| reduced(u64::from(rank) * len + at)).collect(),
        Collective::Broadcast { root } => contributions(root, len),
        Collective::AllGather => (0..world).flat_map(|p| contributions(p, len / u64::from(world))).collect(),
        Collective::Gather { .. } => {
            if len == 0 {
                return Vec::new();
            }
            (0..world).flat_map(|p| contributions(p, request.bytes)).collect()
        }
        Collective::Scatter { root } => (0..len).map(|at| contribution(root, u64::from(rank) * len + at)).collect(),
        Collective::AllToAll => (0..world)
            .flat_map(|p| match &case.requests[p as usize].splits {
                None => {
                    let part = len / u64::from(world);
                    (0..part).map(|at| contribution(p, u64::from(rank) * part + at)).collect::<Vec<_>>()
                }
                Some(theirs) => {
                    let start: u64 = theirs.input[..rank as usize].iter().sum();
                    (0..theirs.input[rank as usize]).map(|at| contribution(p, start + at)).collect()
                }
            })
            .collect(),
        Collective::Recv { from } => contributions(from, len),
        Collective::Send { .. } | Collective::Barrier => Vec::new(),
    }
}

fn run(case: &Case, seed: u64) {
    let before = start(case);
    let mut memory = before.clone();
    execute(&case.plans(), &mut memory, &mut reduce, seed)
        .unwrap_or_else(|violation| panic!("seed {seed}: {violation}\n{case:#?}"));
    for (rank, (memory, before)) in (0..).zip(memory.iter().zip(&before)) {
        assert_eq!(memory.input, before.input, "rank {rank}, seed {seed}: wrote the input\n{case:#?}");
        assert!(memory.output == expected(case, rank), "rank {rank}, seed {seed}: wrong result\n{case:#?}");
    }
}

/// All collectives, algorithms and roots give what their definition says, under several schedules each.
#[test]
fn results() {
    for world in [1, 2, 3, 4, 7] {
        for case in cases(world, &[0, 1, 97, u64::from(world) * 3 * SEGMENT_BYTES - 9], 1) {
            (0..4).for_each(|seed| run(&case, seed));
        }
    }
}

/// Whatever ranks share hosts, the results are those of the definition, under several schedules each.
#[test]
fn results_on_any_hosts() {
    for world in [2, 3, 4, 7] {
        for case in cases_on_hosts(world, &[0, 1, 97, u64::from(world * world) * SEGMENT_BYTES - 9], 1) {
            (0..4).for_each(|seed| run(&case, seed));
        }
    }
}

/// The result of a reduction in which partial results take turns in scratch slots does not depend on the schedule.
#[test]
fn scratch_slots_under_many_schedules() {
    let bytes = 40 * SEGMENT_BYTES - 8;
    for (collective, algorithm, bytes) in [
        (Collective::ReduceScatter, Algorithm::Ring, 4 * bytes),
        (Collective::Reduce { root: 2 }, Algorithm::Ring, bytes),
        (Collective::Reduce { root: 1 }, Algorithm::Tree, bytes),
    ] {
        let case = Case::new(collective, algorithm, 4, bytes, 1);
        let slotted = case.plans().iter().any(|plan| plan.scratch_bytes > 0 && plan.scratch_bytes < bytes / 2);
        assert!(slotted, "the case must need slots: {case:?}");
        (0..50).for_each(|seed| run(&case, seed));
    }
}

/// A plan that waits in a circle is reported with what is stuck, where the schedule runs into the circle.
#[test]
fn deadlock_is_reported() {
    let case = Case::new(Collective::AllReduce, Algorithm::Ring, 3, 600, 1);
    let mut plans = case.plans();
    for plan in &mut plans {
        // The reduction of the first ring step waits for the send of that step, on all ranks.
        plan.steps[1].after.push(Dep::All { step: 0 });
    }
    let outcome = |seed| execute(&plans, &mut start(&case), &mut reduce, seed);
    let stuck = (0..20).map(outcome).filter(|outcome| matches!(outcome, Err(Violation::Deadlock { .. }))).count();
    assert!(stuck > 0, "sends that wait for their receiver must get stuck");
    assert!(matches!(case.check(&plans), Err(Violation::Deadlock { .. })), "{:?}", case.check(&plans));
}
