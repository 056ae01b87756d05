//! Priorities that differ between ranks: each sends by its own, and the user is told once.

use super::*;

/// One of a few collectives in which every rank sends or receives.
fn any_collective(rng: &mut Rng, count: usize) -> Call {
    let bytes = 4 * count as u64 * [1, 100, 5_000, 40_000][rng.usize(0..4)];
    match rng.u8(0..5) {
        0 => call(Collective::Broadcast { root: rng.u32(0..count as u32) }, Name::Broadcast, bytes),
        1 => call(Collective::AllGather, Name::AllGather, bytes),
        2 => call(Collective::Barrier, Name::Barrier, 0),
        3 => call(Collective::ReduceScatter, Name::ReduceScatter, bytes),
        _ => all_reduce(bytes),
    }
}

/// Plans collectives with these priorities (by call and rank), at any times.
fn plan(world: &mut World, rng: &mut Rng, priorities: &[Vec<i32>]) {
    let count = world.ranks.len();
    let mut times = vec![0; count];
    for (at, of_ranks) in priorities.iter().enumerate() {
        let what = any_collective(rng, count);
        for (rank, time) in times.iter_mut().enumerate() {
            *time += rng.u64(0..30 * MILLISECOND);
            let what = Call { priority: Priority(of_ranks[rank]), ..what.clone() };
            world.plan(rank, *time, Step::Issue(at, what));
        }
    }
}

fn all_end(world: &mut World, calls: usize, seed: u64) {
    let all = |world: &World| world.ranks.iter().all(|rank| rank.host.ended.len() == calls);
    assert!(world.run(all, world.now.plus(10 * SECOND)), "seed {seed}: something has not ended");
    for rank in &world.ranks {
        assert!(rank.host.ended.values().all(|(_, result)| result.is_ok()), "seed {seed}: {:?}", rank.host.ended);
    }
}

/// Where one rank issues one of several collectives with another priority, all end well, and some rank says so: with the operation, both
/// ranks and both numbers. No rank says it twice, whatever else differs.
#[test]
fn a_difference_is_told_once() {
    seeded(100, |seed, rng| {
        let count = rng.usize(2..6);
        let mut world = World::new(seed, &hosts(rng, count));
        let calls = rng.usize(1..8);
        let (odd, rank) = (rng.usize(0..calls), rng.usize(0..count));
        let mut priorities = vec![vec![-28; count]; calls];
        for of_ranks in &mut priorities[odd..] {
            of_ranks[rank] = 72;
        }
        plan(&mut world, rng, &priorities);
        all_end(&mut world, calls, seed);
        let told: Vec<(usize, &String)> =
            world.ranks.iter().enumerate().flat_map(|(at, r)| r.host.warnings.iter().map(move |w| (at, w))).collect();
        assert!(!told.is_empty(), "seed {seed}: nobody says that call {odd} of rank {rank} differs");
        assert!(world.ranks.iter().all(|rank| rank.host.warnings.len() <= 1), "seed {seed}: {told:?}");
        for (at, warning) in told {
            let ours = if at == rank { 200 } else { 100 };
            let own = format!("has priority {ours} on rank {at} and {} on ", 300 - ours);
            let other = at == rank || warning.contains(&format!("on rank {rank}."));
            assert!(warning.contains(&own) && other, "seed {seed}: {warning}");
            let number = (odd..calls).map(|call| format!("#{} of group phantoms", call + 1));
            assert!(number.into_iter().any(|number| warning.contains(&number)), "seed {seed}: {warning}");
        }
    });
}

/// Nobody says anything of priorities that are the same on all ranks, also where each rank changes them while operations wait or run, at
/// its own time and to its own number, nor of messages, whose sender alone decides.
#[test]
fn what_is_changed_later_is_no_difference() {
    seeded(100, |seed, rng| {
        let count = rng.usize(2..6);
        let mut world = World::new(seed, &hosts(rng, count));
        let calls = rng.usize(1..8);
        let priorities: Vec<Vec<i32>> = (0..calls).map(|_| vec![rng.i32(-128..128); count]).collect();
        plan(&mut world, rng, &priorities);
        for rank in 0..count {
            let steps = world.ranks[rank].steps.clone();
            let changes = steps.iter().map(|(at, _)| (at.plus(rng.u64(0..2 * MILLISECOND)), rng.usize(0..calls)));
            let changes: Vec<_> = changes.map(|(at, call)| (at, Step::Change(call, Priority(rank as i32)))).collect();
            let mut all: Vec<_> = steps.into_iter().chain(changes).collect();
            all.sort_by_key(|(at, _)| *at);
            world.ranks[rank].steps = all.into();
        }
        let message = |collective, priority| Call {
            tag: 3,
            priority: Priority(priority),
            ..call(collective, Name::PointToPoint, 400_000)
        };
        let now = world.ranks.iter().flat_map(|rank| rank.steps.back()).map(|(at, _)| at.since(world.now)).max();
        world.plan(0, now.unwrap_or(0), Step::Issue(calls, message(Collective::Send { to: 1 }, 5)));
        world.plan(1, now.unwrap_or(0), Step::Issue(calls, message(Collective::Recv { from: 0 }, 6)));
        let all = |world: &World| {
            world.ranks.iter().enumerate().all(|(at, rank)| rank.host.ended.len() == calls + usize::from(at < 2))
        };
        assert!(world.run(all, world.now.plus(10 * SECOND)), "seed {seed}: something has not ended");
        for rank in &world.ranks {
            assert!(rank.host.ended.values().all(|(_, result)| result.is_ok()), "seed {seed}: {:?}", rank.host.ended);
            assert!(rank.host.warnings.is_empty(), "seed {seed}: {:?}", rank.host.warnings);
        }
    });
}
