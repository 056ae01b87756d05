//! Channels of a group: orders of their own, and what one rank's end of a channel means to the others.

use super::*;
use penstock_stream::peer::Counts;

/// The numbers of a rank's calls: `OPENING` and above are openings.
const OPENING: usize = 1_000_000;

fn channel(number: u32) -> ChannelId {
    ChannelId(number)
}

fn open(number: u32, name: &str) -> Open {
    Open { channel: channel(number), name: format!("phantoms/{name}").into(), is_vigil: false, timeout: TIMEOUT }
}

fn vigil(number: u32) -> Open {
    Open { is_vigil: true, ..open(number, "vigil") }
}

/// Ranks that have opened so many channels.
fn opened(seed: u64, hosts: &[u32], channels: u32, rng: &mut Rng) -> World {
    let mut world = World::new(seed, hosts);
    for rank in 0..hosts.len() {
        let mut time = 0;
        for number in 1..=channels {
            time += rng.u64(0..5 * MILLISECOND);
            world.plan(rank, time, Step::Open(OPENING + number as usize, open(number, &format!("c{number}"))));
        }
    }
    let all = |world: &World| {
        world.ranks.iter().all(|rank| (1..=channels).all(|number| rank.ended(OPENING + number as usize).is_some()))
    };
    assert!(world.run(all, world.now.plus(SECOND)), "seed {seed}: channels that are not opened");
    for rank in &world.ranks {
        assert!(rank.host.ended.values().all(|(_, result)| result.is_ok()), "seed {seed}: {:?}", rank.host.ended);
    }
    world
}

fn failures(world: &World) -> Vec<(usize, usize, Failure)> {
    let all = world.ranks.iter().enumerate().flat_map(|(at, rank)| {
        rank.host.ended.iter().filter_map(move |(call, (_, result))| Some((at, *call, result.as_ref().err()?.clone())))
    });
    all.collect()
}

fn group(world: &World, rank: usize) -> &Group<Phantom> {
    world.ranks[rank].groups.get(GROUP).expect("it is in it")
}

/// Ranks issue the same operations in each channel in the same order, and interleave the channels as they like: all end well, each
/// channel has its own numbers, and nothing is kept of what was closed.
#[test]
fn channels_are_orders_of_their_own() {
    seeded(60, |seed, rng| {
        let count = rng.usize(1..6);
        let channels = rng.u32(1..5);
        let mut world = opened(seed, &hosts(rng, count), channels, rng);
        let mut calls: Vec<Vec<(usize, Call)>> = Vec::new();
        let mut number = 0;
        for _ in 0..=channels {
            let of_channel = (0..rng.usize(0..8)).map(|_| {
                number += 1;
                (number, all_reduce(4 * [1, 100, 5_000, 40_000][rng.usize(0..4)]))
            });
            calls.push(of_channel.collect());
        }
        for rank in 0..count {
            let mut left: Vec<VecDeque<_>> = calls.iter().map(|calls| calls.iter().cloned().collect()).collect();
            let mut time = 0;
            while left.iter().any(|calls| !calls.is_empty()) {
                let at = rng.usize(0..left.len());
                if let Some((call, what)) = left[at].pop_front() {
                    time += rng.u64(0..10 * MILLISECOND);
                    world.plan(rank, time, Step::IssueIn(channel(at as u32), call, what));
                }
            }
        }
        let all = |world: &World| world.ranks.iter().all(|rank| rank.host.ended.len() == number + channels as usize);
        assert!(world.run(all, world.now.plus(10 * SECOND)), "seed {seed}: something has not ended");
        assert!(failures(&world).is_empty(), "seed {seed}: {:?}", failures(&world));
        for rank in &world.ranks {
            let group = rank.groups.get(GROUP).expect("it is in it");
            let issued: Vec<u64> = group.channels().map(|(_, channel)| channel.collectives()).collect();
            assert_eq!(issued, calls.iter().map(|calls| calls.len() as u64).collect::<Vec<_>>());
            assert!(!group.is_busy() && rank.groups.early().is_empty() && rank.groups.early().claims() == 0);
        }
        for rank in 0..count {
            for number in 1..=channels {
                world.plan(rank, rng.u64(0..20 * MILLISECOND), Step::Close(channel(number)));
            }
            world.plan(rank, 20 * MILLISECOND, Step::Issue(number + 1, all_reduce(400)));
            world.plan(rank, 20 * MILLISECOND, Step::IssueIn(channel(1), number + 2, all_reduce(400)));
        }
        let again =
            |world: &World| world.ranks.iter().all(|rank| rank.host.ended.len() == number + channels as usize + 2);
        assert!(world.run(again, world.now.plus(SECOND)), "seed {seed}: the group does not go on");
        for rank in &world.ranks {
            assert!(rank.ended(number + 1).is_some_and(|(_, result)| result.is_ok()), "seed {seed}");
            let refused = rank.ended(number + 2).and_then(|(_, result)| result.as_ref().err()).expect("it is closed");
            assert!(refused.group_lives && refused.message.contains("was closed"), "seed {seed}: {refused}");
            assert_eq!(rank.groups.get(GROUP).map(|group| group.channels().count()), Some(1));
        }
    });
}

/// A rank closes a channel after some operations: those count, later ones of that channel fail at once and name the channel, the rank
/// and its number, and the group and other channels go on.
#[test]
fn what_a_rank_did_before_it_closed_counts() {
    seeded(60, |seed, rng| {
        let count = rng.usize(2..5);
        let mut world = opened(seed, &hosts(rng, count), 2, rng);
        let (calls, closer) = (rng.usize(0..6), rng.usize(0..count));
        for rank in 0..count {
            let mut time = 0;
            for at in 0..calls {
                time += rng.u64(0..20 * MILLISECOND);
                world.plan(rank, time, Step::IssueIn(channel(1), at, all_reduce(4 * [1, 30_000][at % 2])));
            }
        }
        let own = |world: &World| world.ranks.iter().all(|rank| (0..calls).all(|call| rank.ended(call).is_some()));
        assert!(world.run(own, world.now.plus(SECOND)), "seed {seed}");
        world.plan(closer, 0, Step::Close(channel(1)));
        for rank in 0..count {
            if rank != closer {
                world.plan(rank, rng.u64(0..20 * MILLISECOND), Step::IssueIn(channel(1), calls, all_reduce(400)));
            }
            world.plan(rank, 20 * MILLISECOND, Step::Issue(calls + 1, all_reduce(4000)));
            world.plan(rank, 20 * MILLISECOND, Step::IssueIn(channel(2), calls + 2, all_reduce(4000)));
        }
        let ends = |world: &World| {
            let last = |rank: &Rank| rank.ended(calls + 1).is_some() && rank.ended(calls + 2).is_some();
            world.ranks.iter().enumerate().all(|(at, rank)| last(rank) && (at == closer || rank.ended(calls).is_some()))
        };
        assert!(world.run(ends, world.now.plus(2 * SECOND)), "seed {seed}: somebody waits for a rank that has closed");
        for (rank, call, failure) in failures(&world) {
            assert!(call == calls && rank != closer, "seed {seed}, rank {rank}, call {call}: {failure}");
            let says = format!("rank {closer} has closed channel phantoms/c1");
            assert!(failure.group_lives && failure.message.contains(&says), "seed {seed}, rank {rank}: {failure}");
            assert!(failure.message.contains(&format!("after {calls} collectives")), "seed {seed}: {failure}");
        }
        assert_eq!(failures(&world).len(), count - 1, "seed {seed}");
    });
}

/// A rank closes a channel, and leaves the group some time later: what needs it in the channel fails the channel alone, whether it
/// is issued before the rank has left or after that.
#[test]
fn a_channel_that_a_rank_has_closed_before_it_left() {
    seeded(60, |seed, rng| {
        let count = rng.usize(2..5);
        let mut world = opened(seed, &hosts(rng, count), 1, rng);
        let closer = rng.usize(0..count);
        world.plan(closer, 0, Step::Close(channel(1)));
        world.plan(closer, rng.u64(0..100 * MILLISECOND), Step::Leave);
        for rank in (0..count).filter(|rank| *rank != closer) {
            world.plan(rank, rng.u64(0..200 * MILLISECOND), Step::IssueIn(channel(1), 0, all_reduce(400)));
        }
        let ends = |world: &World| (0..count).all(|rank| rank == closer || world.ranks[rank].ended(0).is_some());
        assert!(world.run(ends, world.now.plus(SECOND)), "seed {seed}: somebody waits for a rank that has closed");
        for (rank, _, failure) in failures(&world) {
            let says = format!("rank {closer} has closed channel phantoms/c1");
            assert!(failure.group_lives && failure.message.contains(&says), "seed {seed}, rank {rank}: {failure}");
        }
        assert_eq!(failures(&world).len(), count - 1, "seed {seed}");
    });
}

/// A rank closes a channel, or leaves the group, while its operations run in the channel: these fail on all ranks for that reason;
/// what has ended on the rank still ends elsewhere; a group that was not left goes on.
#[test]
fn a_channel_that_is_closed_while_operations_run() {
    seeded(80, |seed, rng| {
        let count = rng.usize(2..5);
        let mut world = opened(seed, &hosts(rng, count), 2, rng);
        let (calls, closer, leaves) = (rng.usize(0..5), rng.usize(0..count), rng.bool());
        for rank in 0..count {
            let mut time = 0;
            for at in 0..calls + usize::from(rank == closer) {
                time += rng.u64(0..20 * MILLISECOND);
                world.plan(rank, time, Step::IssueIn(channel(1), at, all_reduce(4 * [1, 30_000][at % 2])));
            }
        }
        let begun = |world: &World| {
            let group = world.ranks[closer].groups.get(GROUP).expect("it is in it");
            world.ranks[closer].steps.is_empty()
                && group.operations_in(channel(1)) == 1
                && (0..calls).all(|call| world.ranks[closer].ended(call).is_some())
        };
        assert!(world.run(begun, world.now.plus(SECOND)), "seed {seed}");
        world.plan(closer, 0, if leaves { Step::Leave } else { Step::Close(channel(1)) });
        let others = |world: &World| {
            (0..count).filter(|rank| *rank != closer).all(|rank| {
                group(world, rank).channels().any(|(id, known)| id == channel(1) && known.failure().is_some())
            })
        };
        assert!(world.run(others, world.now.plus(SECOND)), "seed {seed}: others are not told");
        for (rank, call, failure) in failures(&world) {
            assert!(call == calls && rank == closer, "seed {seed}, rank {rank}, call {call}: {failure}");
            let says = format!("rank {closer} closed channel phantoms/c1 while operations were running");
            assert!(failure.kind == FailureKind::Closed && failure.message.contains(&says), "seed {seed}: {failure}");
        }
        for rank in (0..count).filter(|rank| *rank != closer) {
            assert!((0..calls).all(|call| world.ranks[rank].ended(call).is_some_and(|(_, result)| result.is_ok())));
            world.plan(rank, 0, Step::IssueIn(channel(1), calls + 1, all_reduce(400)));
            world.plan(rank, 0, Step::Issue(calls + 2, all_reduce(400)));
        }
        if !leaves {
            world.plan(closer, 0, Step::Issue(calls + 2, all_reduce(400)));
        }
        let ends = |world: &World| {
            world.ranks.iter().enumerate().all(|(at, rank)| (at == closer && leaves) || rank.ended(calls + 2).is_some())
        };
        assert!(world.run(ends, world.now.plus(SECOND)), "seed {seed}: the group does not go on");
        for rank in (0..count).filter(|rank| *rank != closer) {
            let ended = |call| world.ranks[rank].ended(call).map(|(_, result)| result.clone());
            assert!(ended(calls + 1).is_some_and(|result| result.is_err_and(|failure| failure.group_lives)));
            let main = ended(calls + 2).expect("just seen");
            match main {
                Ok(()) => assert!(!leaves, "seed {seed}"),
                Err(failure) => assert!(
                    leaves && failure.message.contains(&format!("rank {closer} has left the group")),
                    "seed {seed}: {failure}"
                ),
            }
        }
    });
}

/// Ranks that open channels in another order find out, and the reason names the channel on both sides.
#[test]
fn another_order_of_opening_is_a_mismatch() {
    seeded(40, |seed, rng| {
        let count = rng.usize(2..5);
        let mut world = World::new(seed, &hosts(rng, count));
        let odd = rng.usize(0..count);
        for rank in 0..count {
            let names = if rank == odd { ["b", "a"] } else { ["a", "b"] };
            for (number, name) in (1..).zip(names) {
                let at = rng.u64(0..20 * MILLISECOND);
                world.plan(
                    rank,
                    20 * u64::from(number) * MILLISECOND + at,
                    Step::Open(number as usize, open(number, name)),
                );
            }
        }
        let ends = |world: &World| world.ranks.iter().all(|rank| rank.host.ended.len() == 2);
        assert!(world.run(ends, world.now.plus(4 * SECOND)), "seed {seed}: a mismatch is not found");
        for (rank, _, failure) in failures(&world) {
            let says = ["under different names", "channel 1 of group phantoms", "in the same order"];
            assert!(
                failure.kind == FailureKind::Mismatch && says.iter().all(|text| failure.message.contains(text)),
                "seed {seed}, rank {rank}: {failure}"
            );
        }
        assert_eq!(failures(&world).len(), 2 * count, "seed {seed}");
    });
}

/// A rank opens a channel late: what the others have sent there waits for it. If it never does, they end at their time-out, which
/// names the rank and the channel.
#[test]
fn a_channel_that_one_rank_opens_late_or_never() {
    seeded(40, |seed, rng| {
        let count = rng.usize(2..5);
        let mut world = World::new(seed, &hosts(rng, count));
        let (late, never) = (rng.usize(0..count), rng.bool());
        for rank in 0..count {
            let after = if rank == late { 5 * SECOND } else { 0 };
            if rank != late || !never {
                world.plan(rank, after, Step::Open(OPENING, open(1, "c")));
                for call in 0..3 {
                    world.plan(rank, after, Step::IssueIn(channel(1), call, all_reduce(4 * [1, 100, 40_000][call])));
                }
            }
        }
        let ends = |world: &World| {
            world.ranks.iter().enumerate().all(|(at, rank)| (at == late && never) || rank.host.ended.len() == 4)
        };
        assert!(world.run(ends, world.now.plus(TIMEOUT + SECOND)), "seed {seed}: no end");
        let failures = failures(&world);
        assert_eq!(failures.len(), if never { 4 * (count - 1) } else { 0 }, "seed {seed}: {failures:?}");
        let says = format!("rank {late}, which has not opened channel phantoms/c");
        for (rank, _, failure) in failures {
            assert!(
                failure.kind == FailureKind::Timeout && failure.message.contains(&says),
                "seed {seed}, rank {rank}: {failure}"
            );
        }
    });
}

/// A rank waits in an opening for another that has opened the channel, and that one for a rank that opens it after the first one's
/// time-out, within the second in which others may say more: the opening has succeeded on all ranks, and the group lives.
#[test]
fn an_opening_that_ends_just_after_a_time_out() {
    let late_ends = std::cell::Cell::new(0);
    seeded(30, |seed, rng| {
        let count = rng.usize(3..7);
        let mut world = World::new(seed, &hosts(rng, count));
        let (hasty, late) = (0, rng.usize(1..count));
        for rank in 0..count {
            let timeout = if rank == hasty { 3 * SECOND } else { TIMEOUT };
            let after = if rank == late { 3 * SECOND + 500 * MILLISECOND } else { 0 };
            world.plan(rank, after, Step::Open(OPENING, Open { timeout, ..open(1, "c") }));
        }
        assert!(!world.run(|_| false, world.now.plus(6 * SECOND)));
        let (at, result) = world.ranks[hasty].ended(OPENING).expect("it has a time-out");
        match result {
            Ok(()) => {
                late_ends.set(late_ends.get() + 1);
                assert!(failures(&world).is_empty(), "seed {seed}: {:?}", failures(&world));
                assert!((0..count).all(|rank| group(&world, rank).failed.is_none()), "seed {seed}: ended at {at:?}");
            }
            Err(failure) => assert!(failure.message.contains(&format!("rank {late}")), "seed {seed}: {failure}"),
        }
    });
    assert!(late_ends.get() > 0 || std::env::var("PENSTOCK_SEED").is_ok(), "the case has not come");
}

/// A rank leaves the group, after any number of collectives there, and never opens a channel that the others open: they hear at once
/// that it has left and had not opened it, whatever its numbers in the main channel are.
#[test]
fn a_channel_that_a_rank_which_has_left_never_opened() {
    seeded(60, |seed, rng| {
        let count = rng.usize(2..5);
        let mut world = World::new(seed, &hosts(rng, count));
        let (gone, calls) = (rng.usize(0..count), rng.usize(0..4));
        for rank in 0..count {
            for call in 0..calls {
                world.plan(rank, rng.u64(0..5 * MILLISECOND), Step::Issue(call, all_reduce(400)));
            }
        }
        let ended = |world: &World| world.ranks.iter().all(|rank| rank.host.ended.len() == calls);
        assert!(world.run(ended, world.now.plus(SECOND)), "seed {seed}");
        for rank in 0..count {
            let step = if rank == gone { Step::Leave } else { Step::Open(OPENING, open(1, "c")) };
            world.plan(rank, rng.u64(0..20 * MILLISECOND), step);
        }
        let ends = |world: &World| (0..count).all(|rank| rank == gone || world.ranks[rank].ended(OPENING).is_some());
        assert!(world.run(ends, world.now.plus(SECOND)), "seed {seed}: somebody waits for a rank that has left");
        let failures = failures(&world);
        assert_eq!(failures.len(), count - 1, "seed {seed}: {failures:?}");
        let says = ["has left the group", "had not opened channel phantoms/c"];
        for (rank, call, failure) in failures {
            assert!(
                call == OPENING
                    && failure.kind == FailureKind::PeerLost
                    && failure.message.contains(&format!("rank {gone}"))
                    && says.iter().all(|text| failure.message.contains(text)),
                "seed {seed}, rank {rank}: {failure}"
            );
        }
    });
}

/// A vigil is told of a rank that closes it, that leaves, or that ends it with a reason, although nothing runs there, and nothing else
/// fails for it.
#[test]
fn a_vigil_is_told() {
    seeded(60, |seed, rng| {
        let count = rng.usize(2..5);
        let mut world = World::new(seed, &hosts(rng, count));
        for rank in 0..count {
            world.plan(rank, rng.u64(0..5 * MILLISECOND), Step::Open(OPENING, vigil(1)));
        }
        let all = |world: &World| world.ranks.iter().all(|rank| rank.ended(OPENING).is_some());
        assert!(world.run(all, world.now.plus(SECOND)), "seed {seed}");
        let (one, way) = (rng.usize(0..count), rng.u8(0..3));
        let reason = Failure::fatal(FailureKind::Timeout, "a server is lost.");
        world.plan(
            one,
            0,
            match way {
                0 => Step::Close(channel(1)),
                1 => Step::Leave,
                _ => Step::Fail(channel(1), reason),
            },
        );
        fn of(world: &World, rank: usize) -> Option<&Failure> {
            group(world, rank).channels().find(|(id, _)| *id == channel(1))?.1.failure()
        }
        let told = |world: &World| (0..count).all(|rank| rank == one || of(world, rank).is_some());
        assert!(world.run(told, world.now.plus(SECOND)), "seed {seed}: a rank is not told");
        let expected = match way {
            0 => (FailureKind::PeerLost, format!("rank {one} has closed channel phantoms/vigil")),
            1 => (FailureKind::PeerLost, format!("rank {one} has left the group")),
            _ => (FailureKind::Timeout, "a server is lost.".to_owned()),
        };
        for rank in (0..count).filter(|rank| *rank != one) {
            let failure = of(&world, rank).expect("just seen");
            assert!(failure.kind == expected.0 && failure.message.contains(&expected.1), "seed {seed}: {failure}");
            assert!(group(&world, rank).failure().is_none(), "seed {seed}");
        }
    });
}

/// Whatever ranks do in their channels (open, issue, close, fail or leave at any time, die): each call ends once, within the time
/// after which a silent peer is lost or an operation is late; where the group has not failed, what it keeps is what it runs.
#[test]
fn whatever_ranks_do_everything_ends() {
    seeded(300, |seed, rng| {
        let count = rng.usize(2..5);
        let channels = rng.u32(1..4);
        let mut world = World::new(seed, &hosts(rng, count));
        let calls = rng.usize(1..20);
        let plan: Vec<u32> = (0..calls).map(|_| rng.u32(0..=channels)).collect();
        let mut issued = vec![0; count];
        for (rank, issued) in issued.iter_mut().enumerate() {
            let mut time = 0;
            for number in 1..=channels {
                time += rng.u64(0..5 * MILLISECOND);
                world.plan(rank, time, Step::Open(OPENING + number as usize, open(number, &format!("c{number}"))));
            }
            let mut ends = false;
            for (call, number) in plan.iter().enumerate() {
                time += rng.u64(0..20 * MILLISECOND);
                let step = match rng.u8(0..40) {
                    0 => Step::Close(channel(rng.u32(1..=channels))),
                    1 => {
                        Step::Fail(channel(rng.u32(1..=channels)), Failure::fatal(FailureKind::Closed, "it is enough."))
                    }
                    2 if rank > 0 => Step::Leave,
                    3 if rank > 0 => Step::Die,
                    4 => Step::Fail(channel(0), Failure::fatal(FailureKind::Closed, "all of it is enough.")),
                    _ => Step::IssueIn(channel(*number), call, all_reduce(4 * [1, 100, 40_000][call % 3])),
                };
                ends |= matches!(step, Step::Leave | Step::Die);
                *issued += usize::from(matches!(step, Step::IssueIn(..)));
                world.plan(rank, time, step);
                if ends {
                    break;
                }
            }
        }
        let ends = |world: &World| {
            let has_ended = |(at, rank): (usize, &Rank)| rank.host.ended.len() == issued[at] + channels as usize;
            let is_done = |(at, rank): (usize, &Rank)| rank.is_dead || (rank.steps.is_empty() && has_ended((at, rank)));
            world.ranks.iter().enumerate().all(is_done)
        };
        let began = world.now;
        assert!(world.run(ends, began.plus(TIMEOUT + 6 * SECOND)), "seed {seed}: something has not ended");
        // What is on its way arrives: farewells, and answers.
        world.run(|_| false, world.now.plus(SECOND));
        for (at, rank) in world.ranks.iter().enumerate().filter(|(_, rank)| !rank.is_dead) {
            let Some(group) = rank.groups.get(GROUP) else { continue };
            assert_eq!(group.operations(), 0, "seed {seed}, rank {at}");
            let kept = rank.groups.early().len();
            assert!(group.failure().is_none() || kept == 0, "seed {seed}, rank {at} keeps {kept} messages");
        }
    });
}

/// So many channels are open, and no more; one that is closed makes room.
#[test]
fn the_number_of_channels_is_bounded() {
    let mut world = World::new(1, &[0]);
    let most = Counts::MOST_CHANNELS as u32;
    for number in 1..=most {
        world.plan(0, 0, Step::Open(number as usize, open(number, "c")));
    }
    world.plan(0, MILLISECOND, Step::Close(channel(7)));
    world.plan(0, MILLISECOND, Step::Open(most as usize + 1, open(most + 1, "c")));
    let all = |world: &World| world.ranks[0].host.ended.len() == most as usize + 1;
    assert!(world.run(all, world.now.plus(SECOND)));
    let failures = failures(&world);
    let [(_, call, failure)] = &failures[..] else { panic!("{failures:?}") };
    assert!(
        *call == most as usize && failure.group_lives && failure.message.contains("1024 open channels"),
        "{failure}"
    );
}
