//! Random programs on the shipped event loop and engine, under virtual time: see `docs/design/random-programs.md`.

mod generate;
mod judge;
mod model;
mod network;
mod program;
mod rank;
mod shrink;
mod threads;
mod world;

use fastrand::Rng;
use generate::generate;
use network::Paths;
use penstock_plan::Algorithm;
use penstock_testing::on_all_cores;
use penstock_types::{DType, FailureKind, MILLISECOND, Priority, ReduceOp, SECOND};
use program::{Fault, How, Program, ProgramCall, ProgramGroup, Step, What, Wrong};
use std::collections::BTreeSet;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::time::Instant;

/// Programs of a fixed range of seeds do what the model says, as do those that ever failed; or those of
/// `PENSTOCK_VIRTUAL_SEEDS=first..end`, as many as `PENSTOCK_VIRTUAL_MINUTES` leaves time for.
#[test]
fn programs() {
    let chosen = std::env::var("PENSTOCK_VIRTUAL_SEEDS").ok().map(|text| seeds(&text));
    let ever_failed = FAILED.iter().map(|(seed, _)| *seed).filter(|_| chosen.is_none());
    let minutes = std::env::var("PENSTOCK_VIRTUAL_MINUTES").map_or(f64::MAX, |text| text.parse().expect("minutes"));
    let began = Instant::now();
    let so_far: Mutex<(u64, usize, Vec<u64>)> = Mutex::default();
    let goes_on =
        |_: &u64| began.elapsed().as_secs_f64() <= 60.0 * minutes && so_far.lock().unwrap().2.len() < MOST_FAILURES;
    on_all_cores(ever_failed.chain(chosen.clone().unwrap_or(USUAL)).take_while(goes_on), |seed| {
        let program = generate(seed);
        let complaints = complaints(&program);
        // Held, so that what is printed of a program stands together.
        let (count, calls, failed) = &mut *so_far.lock().unwrap();
        (*count, *calls) = (*count + 1, *calls + program.calls.len());
        if count.is_multiple_of(10_000) {
            println!("{count} programs, {calls} calls, failed: {failed:?}");
        }
        if !complaints.is_empty() {
            report(&program, &complaints);
            failed.push(seed);
        }
    });
    let (count, calls, failed) = so_far.into_inner().unwrap();
    println!("{count} programs with {calls} calls, {} failed", failed.len());
    assert!(failed.is_empty(), "seeds {failed:?}");
}

/// The same seed is the same program, and the programs hold everything that there is to be tested.
#[test]
fn programs_of_a_seed() {
    let programs: Vec<Program> = (0..300).map(generate).collect();
    assert!(programs.iter().zip(0..).all(|(program, seed)| *program == generate(seed)));
    let some = |holds: fn(&Program) -> bool| programs.iter().filter(|program| holds(program)).count();
    assert!(some(|program| program.fault.is_some()) > 60 && some(|program| program.wrong.is_some()) > 10);
    assert!(some(Program::is_right) > 180 && some(|program| program.groups.len() > 2) > 60);
    let channels = |program: &Program| program.groups.iter().any(|group| group.channel_of.is_some());
    assert!(some(channels) > 100 && some(|program| program.groups.iter().any(|group| group.is_vigil)) > 30);
    let of_channel = |program: &Program| {
        program.wrong.is_some_and(|wrong| program.groups[program.calls[wrong.call].group].channel_of.is_some())
    };
    assert!(some(of_channel) > 10);
    let large = |program: &Program| program.calls.iter().any(|call| call.elements * call.dtype.size() as u64 > 200_000);
    assert!(some(large) > 30);
    let begins = |program: &Program| program.steps.iter().flatten().any(|step| matches!(step, Step::Begin(_)));
    assert!(some(begins) > 40 && !FAILED.iter().any(|(seed, _)| begins(&generate(*seed))));
}

/// A rank that leaves in the middle of a collective takes nothing away from ranks that are in the one before, which it has ended: that
/// ends well, also on ranks that do not hear each other at that time. The one that it has not ended fails and names it.
#[test]
fn a_collective_that_one_rank_has_ended_ends_on_all() {
    for (elements, delay_us) in [(10, 50), (50_000, 50), (50_000, 20_000)] {
        let begins = [Step::Join(0), Step::Pause(2 * SECOND), Step::Issue(0), Step::Wait(0), Step::Issue(1)];
        // Rank 2 does not issue the second one, and stays until the others have heard of rank 0.
        let ends = |rank| match rank {
            0 => vec![Step::Leave(0)],
            2 => vec![Step::Pause(SECOND), Step::Leave(0)],
            _ => vec![Step::Wait(1), Step::Leave(0)],
        };
        let steps = (0..4).map(|rank| [begins.to_vec(), ends(rank)].concat()).collect();
        let mut program = scripted(What::AllReduce, elements, delay_us, steps);
        program.fault = Some((1900 * MILLISECOND, Fault::Part { ranks: [1, 2], time: 2 * SECOND }));
        let first = world::results(&program, 0);
        assert_eq!(first, [Some(Ok(())), Some(Ok(())), Some(Ok(())), Some(Ok(()))], "{elements} elements");
        let second = world::results(&program, 1);
        for rank in [1, 3] {
            let Some(Some(Err(failure))) = second.get(rank) else { panic!("rank {rank}: {second:?}") };
            assert!(failure.kind == FailureKind::Closed && failure.message.contains("rank 0"), "{failure}");
        }
        // Without the fault nobody is slow, and it ends in the same way.
        program.fault = None;
        assert_eq!(world::results(&program, 0), first);
    }
}

/// Two ranks leave in the middle of different collectives, or the second fails with the group, and a third rank is in an earlier
/// one: that ends well, and what either of the two has not ended fails at once, as the group does, also if it is not the first to
/// say so.
#[test]
fn the_first_collective_that_somebody_has_not_ended_ends_the_group() {
    let begins = [Step::Join(0), Step::Pause(SECOND)];
    for leaves in [true, false] {
        let ends = |rank| match rank {
            0 => vec![Step::Issue(0), Step::Issue(1), Step::Wait(0), Step::Wait(1), Step::Issue(2), Step::Leave(0)],
            1 => vec![
                Step::Hold(0),
                Step::Issue(1),
                Step::Pause(5 * SECOND),
                Step::Release(0),
                Step::Wait(0),
                Step::Wait(1),
            ],
            // The first rank has left before.
            _ if leaves => vec![Step::Issue(0), Step::Hold(1), Step::Pause(SECOND), Step::Leave(0)],
            _ => vec![Step::Issue(0), Step::Wait(0), Step::Pause(10 * SECOND)],
        };
        let steps = (0..3).map(|rank| [begins.to_vec(), ends(rank)].concat()).collect();
        let mut program = scripted(What::Gather { root: 1 }, 10, 50, steps);
        program.calls[0].what = What::Broadcast { root: 0 };
        program.calls[2].what = What::AllReduce;
        let results = world::results(&program, 0);
        assert_eq!(results[..2], [Some(Ok(())), Some(Ok(()))], "rank 2 leaves: {leaves}");
        let second = world::results(&program, 1);
        let Some(Err(failure)) = &second[1] else { panic!("rank 2 leaves: {leaves}: {second:?}") };
        assert!(failure.kind == FailureKind::Closed, "rank 2 leaves: {leaves}: {failure}");
    }
}

/// A rank ends a collective and leaves while a stream stands still that has its acknowledgements, or copies of what it has taken from
/// that: the other rank ends that collective as well, whether or not it has begun one that the first has not made.
#[test]
fn what_a_rank_has_taken_before_it_left_is_sent() {
    let times =
        (240..320).step_by(8).flat_map(|stall_ms| (0..100).step_by(4).map(move |pause_ms| (stall_ms, pause_ms)));
    let cases = times.flat_map(|(stall_ms, pause_ms)| [0, 1].map(|which| (stall_ms, pause_ms, which)));
    on_all_cores(cases, |(stall_ms, pause_ms, which)| {
        for begins_another in [false, true] {
            let begins = [Step::Join(0), Step::Pause(SECOND), Step::Issue(0)];
            let ends = |rank| match rank {
                0 => vec![Step::Wait(0), Step::Pause(pause_ms * MILLISECOND), Step::Leave(0)],
                _ if begins_another => vec![Step::Issue(1), Step::Wait(0), Step::Wait(1)],
                _ => vec![Step::Wait(0), Step::Leave(0)],
            };
            let steps = (0..2).map(|rank| [begins.to_vec(), ends(rank)].concat()).collect();
            let mut program = scripted(What::AllReduce, 50_000, 20_000, steps);
            let fault = Fault::Stall { ranks: [0, 1], which, time: SECOND };
            program.fault = Some((SECOND + stall_ms * MILLISECOND, fault));
            let context = format!("{stall_ms} ms, {pause_ms} ms, stream {which}, begins another: {begins_another}");
            assert_eq!(world::results(&program, 0), [Some(Ok(())), Some(Ok(()))], "{context}");
        }
    });
}

/// A rank gives up two others at once while half a frame waits for the second, which goes on at this moment and takes the rest: it
/// never takes bytes that its sender has not sent.
#[test]
fn half_a_frame_for_a_rank_that_is_given_up() {
    let cases = (0..20).flat_map(|seed| (1250..1500).step_by(10).map(move |after_ms| (seed, after_ms)));
    on_all_cores(cases, |(seed, after_ms)| {
        let steps = vec![vec![Step::Join(0), Step::Pause(SECOND), Step::Issue(0), Step::Wait(0)]; 3];
        let mut program = scripted(What::Scatter { root: 0 }, 9_000, 20_000, steps);
        (program.seed, program.wrong, program.streams, program.paths.buffer_bytes) = (seed, None, 1, 16_384);
        let at = |ms: u64| (after_ms + ms) * MILLISECOND;
        program.fault = Some((at(0), Fault::Stop { rank: 2, time: 4090 * MILLISECOND }));
        let others = [
            (at(0), Fault::Stop { rank: 1, time: 8 * SECOND }),
            (at(3950), Fault::Stop { rank: 0, time: 150 * MILLISECOND }),
        ];
        assert_eq!(
            world::run_with(&program, &others),
            Vec::<String>::new(),
            "seed {seed}, stopped after {after_ms} ms"
        );
    });
}

/// A rank has died, and another joins a second group with it, as a script does that goes on with other groups: the join fails at
/// once, and does not keep the rank from a third that waits for it elsewhere.
#[test]
fn a_join_with_a_rank_that_has_died_fails_at_once() {
    let survives = |rank| {
        let with_the_dead = if rank == 1 { vec![Step::Join(2)] } else { vec![] };
        let begins = vec![Step::Join(0), Step::Join(1), Step::Pause(2 * SECOND)];
        [begins, with_the_dead, vec![Step::Issue(0), Step::Wait(0), Step::Leave(1)]].concat()
    };
    let steps = vec![vec![Step::Join(0), Step::Pause(4 * SECOND)], survives(1), survives(2)];
    let mut program = scripted(What::Barrier, 1, 2_000, steps);
    let group = |members: &[usize]| ProgramGroup::new(members.to_vec(), None);
    program.groups = vec![group(&[0, 1, 2]), group(&[1, 2]), group(&[0, 1])];
    program.calls.iter_mut().for_each(|call| (call.group, call.timeout) = (1, 5 * SECOND));
    program.goes_on = true;
    // Also if it has died before anybody was connected to it: then the first join has tried for long enough.
    for (at, death) in [SECOND, MILLISECOND]
        .into_iter()
        .flat_map(|at| [network::Death::Closes, network::Death::Resets].map(|death| (at, death)))
    {
        program.fault = Some((at, Fault::Kill { rank: 0, death }));
        let results = world::results(&program, 0);
        assert_eq!(results[1..], [Some(Ok(())), Some(Ok(()))], "{death:?} after {at} ns");
    }
}

/// A rank joins long after the others, which find its process there all the time: they wait for it, as long as the join may take.
#[test]
fn a_rank_that_joins_late_is_waited_for() {
    for late in 0..3 {
        let joins = |rank| {
            let begins = if rank == late { vec![Step::Pause(18 * SECOND)] } else { vec![] };
            [begins, vec![Step::Join(0), Step::Issue(0), Step::Wait(0), Step::Leave(0)]].concat()
        };
        let mut program = scripted(What::AllReduce, 10, 50, (0..3).map(joins).collect());
        (program.wrong, program.calls) = (None, program.calls[..1].to_vec());
        assert_eq!(world::results(&program, 0), [Some(Ok(())), Some(Ok(())), Some(Ok(()))], "rank {late} is late");
    }
}

/// Two processes want two groups with each other, at different times and in different orders, or one of the two wants one group only:
/// they connect in the name of a group that both want, and what both want works.
#[test]
fn processes_connect_for_a_group_that_both_want() {
    on_all_cores(0..300, |seed| {
        let mut rng = Rng::with_seed(seed);
        let (delay_us, wants_one) = ([2_000, 20_000][rng.usize(..2)], rng.u8(..4) == 0);
        // Some join while the other process's first HELLOs come, which takes three times the delay.
        let starts_us = [delay_us, 500_000, 0][rng.usize(..3)];
        let mut begins = |groups: &[usize], from_us: u64, within_us: u64| -> Vec<Step> {
            let mut groups = groups.to_vec();
            rng.shuffle(&mut groups);
            let mut pause = |from_us: u64, within_us| Step::Pause(1000 * (from_us + rng.u64(1..=within_us)));
            let pauses = [pause(from_us, within_us), pause(0, delay_us)];
            groups.into_iter().zip(pauses).flat_map(|(group, pause)| [pause, Step::Begin(group)]).collect()
        };
        let calls = |group| [Step::Join(group), Step::Issue(group), Step::Wait(group)];
        let (first, then) = match starts_us {
            0 => (begins(&[0, 1], 0, 1), begins(if wants_one { &[1] } else { &[0, 1] }, 3 * delay_us, delay_us)),
            most => (begins(&[0, 1], 0, most), begins(if wants_one { &[1] } else { &[0, 1] }, 0, most)),
        };
        let mut steps = vec![[first, calls(1).to_vec()].concat(), [then, calls(1).to_vec()].concat()];
        if !wants_one {
            steps.iter_mut().for_each(|steps| steps.extend(calls(0)));
        }
        if rng.bool() {
            steps.reverse();
        }
        let mut program = scripted(What::AllReduce, 10, delay_us, steps);
        program.groups.push(program.groups[0].clone());
        (program.seed, program.streams, program.threads) = (seed, rng.u16(1..=4), [1, 1, 1, 2][rng.usize(..4)]);
        (program.calls[0].timeout, program.calls[1].group) = (5 * SECOND, 1);
        // The last join begins within a second, and attempts are 0.3 s and some ways apart.
        for joined in world::joined(&program) {
            assert!(
                joined.len() == 2 - usize::from(wants_one) && joined.values().all(|at| at.0 < 2 * SECOND),
                "seed {seed}: {joined:?}"
            );
        }
        assert_eq!(world::results(&program, 1), [Some(Ok(())), Some(Ok(()))], "seed {seed}");
    });
}

/// A process whose host answers nothing is given up with all its streams at once, long after a join with it; the other one goes on.
#[test]
fn a_peer_that_never_answers_is_given_up() {
    for dark in 0..2 {
        let joins = |rank| match rank == dark {
            true => vec![Step::Pause(SECOND)],
            false => vec![Step::Begin(0), Step::Pause(300 * SECOND), Step::Join(1), Step::Issue(0), Step::Wait(0)],
        };
        let mut program = scripted(What::AllReduce, 10, 50, (0..2).map(joins).collect());
        program.groups.push(ProgramGroup::new(vec![1 - dark], None));
        (program.streams, program.calls[0].group, program.goes_on) = (3, 1, true);
        program.fault = Some((0, Fault::Kill { rank: dark, death: network::Death::Silent }));
        assert_eq!(world::results(&program, 0)[1 - dark], Some(Ok(())), "rank {dark} is dark");
    }
}

/// Whenever both streams are lost, one after the other, while a rank ends, what both ranks have done ends well: one that has said
/// good-bye stays until the other has its acknowledgements, and that one comes back for them.
#[test]
fn a_rank_that_ends_repeats_acknowledgements_that_are_lost() {
    let cases = (0..8).flat_map(|more| (0..60).map(move |at| (60_000 + more, at)));
    on_all_cores(cases, |(elements, at)| {
        let steps = vec![vec![Step::Join(0), Step::Issue(0), Step::Wait(0), Step::Leave(0)]; 2];
        let program = Program {
            ends_early: true,
            strikes_at_end: true,
            wrong: None,
            fault: Some((at * MILLISECOND, Fault::Lose { ranks: [0, 1], which: 0, skew: 300 * MILLISECOND, times: 3 })),
            ..scripted(What::AllToAll { has_splits: false }, elements, 20_000, steps)
        };
        assert_eq!(world::results(&program, 0), [Some(Ok(())), Some(Ok(()))], "{elements} elements, {at} ms");
    });
}

/// Bulk waits for an urgent message that began after it, though they have no stream in common: if the same rank sends both, and if the
/// same rank receives both. A usual message holds up no other.
#[test]
fn bulk_between_other_ranks_gives_way() {
    for bulk in [(0, 1), (1, 2)] {
        let ends = |priority: Priority| {
            let mut program = scripted(What::Barrier, 1_000_000, 50, vec![Vec::new(); 3]);
            (program.streams, program.wrong, program.calls) = (4, None, program.calls[..2].to_vec());
            program.calls[1].priority = priority.0;
            for (call, (from, to)) in program.calls.iter_mut().zip([bulk, (0, 2)]) {
                call.what = What::Message { from, to, tag: 0, any_source: false };
            }
            let follows = |rank| {
                let own = (0..2).filter(|call| program.takes_part(*call, rank));
                let issues = own.clone().flat_map(|call| [Step::Pause(call as u64 * MILLISECOND), Step::Issue(call)]);
                let begins = [Step::Join(0), Step::Pause(SECOND)];
                begins.into_iter().chain(issues).chain(own.map(Step::Wait)).collect()
            };
            program.steps = (0..3).map(follows).collect();
            world::ends(&program)
        };
        let (usual, urgent) = (ends(Priority::USUAL), ends(Priority::LEAST_URGENT));
        // Each alone takes 10 ms.
        assert!(urgent[0].since(urgent[1]) >= 8 * MILLISECOND, "{bulk:?}: {urgent:?}");
        assert!(usual[1].since(usual[0]) <= 2 * MILLISECOND, "{bulk:?}: {usual:?}");
    }
}

/// Threads stand still within their claims while streams stand still or are lost and come back, and while ranks die or leave: what ends
/// well is right, and nobody has memory back that a claim touches. One thread at a time touches a range, a peer is gone when none has a
/// stream of it, and no rank sends what another may refuse.
#[test]
fn threads_that_stand_still_within_claims() {
    let chosen = std::env::var("PENSTOCK_VIRTUAL_SEEDS").ok().map(|text| seeds(&text));
    on_all_cores(chosen.unwrap_or(STANDING), |seed| {
        let mut rng = Rng::with_seed(seed);
        let delay_us = [50, 2_000, 20_000][rng.usize(..3)];
        let issues = (0..3).map(Step::Issue).chain((0..3).map(Step::Wait));
        let begins = [Step::Join(0), Step::Pause(SECOND)];
        let steps: Vec<Step> = begins.into_iter().chain(issues).collect();
        let leaves = vec![
            begins[0],
            begins[1],
            Step::Issue(0),
            Step::Issue(1),
            Step::Pause(rng.u64(0..100 * MILLISECOND)),
            Step::Leave(0),
        ];
        let fault = rng.u8(..4);
        let ranks = if fault == 3 { vec![steps.clone(), steps, leaves] } else { vec![steps; 2] };
        let what = [What::AllReduce, What::AllGather, What::ReduceScatter][rng.usize(..3)];
        let mut program = scripted(what, rng.u64(20_000..100_000), delay_us, ranks);
        (program.seed, program.threads, program.checksum) = (seed, 3, rng.bool());
        program.streams = rng.u16(2..4);
        let (ranks, which) = ([0, 1], rng.usize(..3));
        let fault = match fault {
            0 => Fault::Stall { ranks, which, time: rng.u64(MILLISECOND..300 * MILLISECOND) },
            1 => Fault::Lose { ranks, which, skew: rng.u64(0..300 * MILLISECOND), times: 3 },
            2 => Fault::Kill { rank: 1, death: [network::Death::Closes, network::Death::Resets][rng.usize(..2)] },
            _ => Fault::Stop { rank: 0, time: 1 },
        };
        program.fault = Some((SECOND + rng.u64(0..100 * MILLISECOND), fault));
        program.wrong = program.wrong.filter(|_| program.ranks == 3);
        let found =
            catch_unwind(|| world::run_at_rests(&program)).unwrap_or_else(|_| vec!["panic: see above".to_owned()]);
        assert_eq!(found, Vec::<String>::new(), "{program}");
    });
}

/// A program of one group, in which not all ranks make all calls; these are alike.
fn scripted(what: What, elements: u64, delay_us: u64, steps: Vec<Vec<Step>>) -> Program {
    let (dtype, op, timeout) = (DType::F32, ReduceOp::Sum, 60 * SECOND);
    let call = ProgramCall { group: 0, what, dtype, op, elements, priority: 0, timeout };
    let ranks = steps.len();
    Program {
        seed: elements,
        ranks,
        threads: 1,
        streams: 2,
        checksum: false,
        paths: Paths { delay_us, bytes_per_us: 100, buffer_bytes: 65_536 },
        groups: vec![ProgramGroup::new((0..ranks).collect(), Some(Algorithm::Exchange))],
        calls: vec![call; 3],
        steps,
        fault: None,
        wrong: Some(Wrong { rank: ranks, call: 1, how: How::Skip }),
        goes_on: false,
        ends_early: false,
        eager_credit_bytes: 1 << 20,
        strikes_at_end: false,
    }
}

/// What a program complains of.
fn complaints(program: &Program) -> Vec<String> {
    catch_unwind(AssertUnwindSafe(|| world::run(program))).unwrap_or_else(|_| vec!["panic: see above".to_owned()])
}

/// Prints a program that fails, and a smaller one that fails in the same way.
fn report(program: &Program, found: &[String]) {
    println!("\n{program}");
    found.iter().for_each(|complaint| println!("    {complaint}"));
    let kinds = kinds(found);
    let fails = |candidate: &Program| !self::kinds(&complaints(candidate)).is_disjoint(&kinds);
    let small = shrink::shrink(program, fails, SHRINK_TRIALS);
    println!("shrunk: {small}");
    complaints(&small).iter().for_each(|complaint| println!("    {complaint}"));
}

/// The first words of complaints.
fn kinds(complaints: &[String]) -> BTreeSet<String> {
    complaints.iter().map(|text| text.split(':').next().unwrap_or_default().to_owned()).collect()
}

fn seeds(text: &str) -> Range<u64> {
    let parsed = text.split_once("..").and_then(|(first, end)| Some(first.parse().ok()?..end.parse().ok()?));
    parsed.expect("PENSTOCK_VIRTUAL_SEEDS is `first..end`")
}

/// What a usual run of the tests takes: some seconds.
const USUAL: Range<u64> = 0..800;
/// What a run of [`threads_that_stand_still_within_claims`] takes.
const STANDING: Range<u64> = 0..250;
/// A long run ends after so many.
const MOST_FAILURES: usize = 10;
const SHRINK_TRIALS: u32 = 400;
/// Seeds whose programs have found something, and what. A seed means another program when the generator changes: then the
/// programs that still matter get new seeds.
const FAILED: [(u64, &str); 14] = [
    (166, "the loop did not sleep while a hand-shake waited for a process that was stopped"),
    (627, "the same, for a host that had gone dark"),
    (538_572, "a rank left whose acknowledgements were lost with a stream: the other's operation failed"),
    (200_742, "a rank left while acknowledgements waited behind copies on a full stream: the other's operation failed"),
    (1740, "a rank that was stopped, and lost, refused the next join as that of an unknown job"),
    (5546, "a rank whose hand-shake stalled, so that it was lost, came back and was refused as that of an unknown job"),
    (
        10_011_071,
        "a rank ended, closed a channel and left while a stream stood still: the other's operation, whole, was a mismatch",
    ),
    (4_007_944, "what needed a rank in a channel that it had closed failed the group, if the rank had left since"),
    (
        14_117_377,
        "two ranks did not hear each other for 2.3 s, and one ended after 2 s: what it had sent was lost, and the other took it for dead",
    ),
    (
        15_002_125,
        "both streams were lost after a rank's good-bye, with acknowledgements: the other took it for gone, though it stayed to repeat them",
    ),
    (15_117_116, "a rank joined with a process that had died, and was refused for 14 s, while others waited for it"),
    // The tester's own.
    (15_624_250, "this network told of an end in good order where a connection was reset"),
    (15_639_183, "the same, and a send was lost"),
    (15_712_654, "two roots that leave do not hear of each other, and need not"),
];
