//! Hundreds of shipped ranks with phantom payloads over the virtual network, in one process: how long a collective takes on a
//! topology, against what its plan promises; and what a thousand ranks do when one of them dies.

use penstock_core::groups::Call;
use penstock_plan::{Algorithm, Collective};
use penstock_sim::collective::{Error, Field, Outcome, Simulation};
use penstock_sim::network::{Link, LinkId, NodeId, Topology};
use penstock_sim::ranks::{End, JOIN, Step, Stop, World};
use penstock_stream::fingerprint::{Fingerprint, Name};
use penstock_types::{DType, FailureKind, MILLISECOND, Priority, ReduceOp, SECOND, Time};
use std::time::Duration;

fn call(collective: Collective, name: Name, bytes: u64) -> Call {
    Call {
        collective,
        fingerprint: Fingerprint::new(name, None, DType::F32, None, bytes / 4),
        dtype: DType::F32,
        op: ReduceOp::Sum,
        bytes,
        splits: None,
        tag: 0,
        coflow: 0,
        priority: Priority(0),
        hold: false,
        timeout: 60 * SECOND,
    }
}

fn all_reduce(bytes: u64) -> Call {
    call(Collective::AllReduce, Name::AllReduce, bytes)
}

/// A thousand ranks join, pass a barrier and reduce 4 MB. Then one of them dies, and the others issue another all-reduce: on each of
/// them it fails, and names the dead rank.
#[test]
fn a_thousand_ranks() {
    let (ranks, dead) = (1000, 421);
    let (topology, hosts) = Topology::star(ranks, Link { delay: DELAY, ..Link::default() });
    // For fewer heartbeats than by default.
    let mut world = World::new(topology, &hosts, None, SECOND);
    let run = |world: &mut World, ends, by| world.run(ends, by, &mut |_| true).expect("no frame is lost");
    // Each comes at its own time, so most joins find frames of others.
    let all = 0..ranks as u32;
    for rank in all.clone() {
        world.schedule(rank, Time(u64::from(rank * 7919 % ranks as u32) * 10_000), Step::Join);
    }
    run(&mut world, ranks, Time(10 * SECOND));
    let joined = world.now();
    for (number, call) in [call(Collective::Barrier, Name::Barrier, 0), all_reduce(4_000_000)].into_iter().enumerate() {
        for rank in all.clone() {
            world.schedule(rank, joined, Step::Start(number, call.clone()));
        }
    }
    run(&mut world, 3 * ranks, joined.plus(10 * SECOND));
    let reduced = world.now();
    for ends in world.ends() {
        assert!(ends.iter().all(|end| end.result.is_ok()), "{ends:?}");
        assert_eq!(ends.iter().map(|end| end.call).collect::<Vec<_>>(), [JOIN, 0, 1]);
    }
    world.schedule(dead, reduced, Step::Die);
    for rank in all.clone() {
        world.schedule(rank, reduced.plus(MILLISECOND), Step::Start(2, all_reduce(4_000_000)));
    }
    run(&mut world, 4 * ranks - 1, reduced.plus(10 * SECOND));
    for rank in all.filter(|rank| *rank != dead) {
        let last = world.ends()[rank as usize].last().expect("it had ended others before");
        let End { call: 2, at, result: Err(failure) } = last else { panic!("rank {rank}: {last:?}") };
        assert_eq!(failure.kind, FailureKind::PeerLost, "rank {rank}: {failure}");
        assert!(failure.message.contains(&format!("rank {dead} is silent")), "rank {rank}: {failure}");
        assert!(at.since(reduced) < 5 * SECOND, "rank {rank}: {at:?}");
    }
    let ms = |from: Time, to: Time| Duration::from_nanos(to.since(from)).as_secs_f64() * 1e3;
    println!("joined after {:.1} ms, reduced after {:.1} ms more", ms(Time(0), joined), ms(joined, reduced));
    println!("all have failed {:.1} ms after the death", ms(reduced, world.now()));
}

/// A ring all-reduce of 256 ranks takes as long as its plan's cost says, where every host has a link of its own to one switch, and
/// hardly longer in racks whose hosts share one uplink: two of its flows leave and enter a rack. Halving and doubling takes 1.6 times
/// the cost around one switch, and 2.5 times in racks: costs of a plan know neither windows nor the network.
#[test]
fn costs_of_plans() {
    let star = || Topology::star(256, link());
    let racks = || Topology::racks(16, 16, link(), link());
    let over = |algorithm: Algorithm, (topology, hosts): (Topology, Vec<NodeId>)| {
        let outcome = simulation(topology, hosts, Some(algorithm), 4 << 20).run(|_| true).expect("it runs");
        assert_eq!(outcome.algorithm, algorithm);
        // The first one finds streams that know nothing of their rates.
        let took = outcome.repetitions[1].time;
        println!("{algorithm}: {:.3} ms, promised {:.3}", took as f64 * 1e-6, outcome.promised as f64 * 1e-6);
        took as f64 / outcome.promised as f64
    };
    let ring = over(Algorithm::Ring, star());
    assert!((0.99..1.01).contains(&ring), "{ring}");
    let halving = over(Algorithm::HalvingDoubling, star());
    // Its rounds overlap, and frames of two of them meet at a port. Each round is on another stream, which sends a window at a time.
    assert!((0.99..1.7).contains(&halving), "{halving}");
    let ring = over(Algorithm::Ring, racks());
    assert!((1.0..1.7).contains(&ring), "{ring}");
    let halving = over(Algorithm::HalvingDoubling, racks());
    assert!(halving > 1.5, "{halving}");
}

/// The promise of a ring around a switch, by hand: each rank sends 2(n-1) chunks over its own link, and each is a hop, on which a
/// frame passes two links and is sent once more by the switch.
#[test]
fn the_promise_of_a_ring() {
    let (ranks, chunk) = (8, 16_384);
    let (topology, hosts) = Topology::star(ranks as usize, link());
    let promised = simulation(topology, hosts, None, ranks * chunk).promised(Algorithm::Ring).expect("it has a plan");
    let send = |bytes: u64| bytes as f64 / RATE as f64 * 1e9;
    let hops = 2 * (ranks - 1);
    let by_hand = send(hops * chunk) + hops as f64 * (2.0 * DELAY as f64 + send(chunk));
    assert!((promised as f64 - by_hand).abs() < 1.0, "{promised} {by_hand}");
}

/// The busiest link is the one whose rate is used most, with the bytes and frames that it has carried; the same simulation has the
/// same outcome.
#[test]
fn the_busiest_link() {
    let run = || {
        let mut topology = Topology::default();
        let switch = topology.add_switch();
        let hosts: Vec<NodeId> = (0..4).map(|_| topology.add_host()).collect();
        for (rank, host) in hosts.iter().enumerate() {
            // Links 4 and 5 have half of the others' rate.
            topology.join(*host, switch, Link { rate: if rank == 2 { RATE / 2 } else { RATE }, ..link() });
        }
        simulation(topology, hosts, Some(Algorithm::Ring), 8 << 20).run(|_| true).expect("it runs")
    };
    let outcome: Outcome = run();
    assert_eq!(outcome, run());
    let one = outcome.repetitions[1];
    assert!([LinkId(4), LinkId(5)].contains(&one.busiest), "{one:?}");
    // Each rank sends 2(n-1)/n of the tensor, and frames have headers.
    let bytes = 12 << 20;
    assert!((bytes..bytes + bytes / 100).contains(&one.bytes), "{one:?}");
    assert!((bytes / (256 << 10)..bytes / (16 << 10)).contains(&one.frames), "{one:?}");
    let share = one.share.expect("it has a rate");
    assert!((0.95..1.0).contains(&share), "{one:?}");
    assert!((share - one.bytes as f64 / (RATE as f64 / 2.0 * one.time as f64 * 1e-9)).abs() < 1e-9, "{one:?}");
}

/// Every collective runs, with the algorithm that is chosen for it.
#[test]
fn all_collectives() {
    let root = 0;
    for collective in [
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::AllGather,
        Collective::Broadcast { root },
        Collective::Reduce { root },
        Collective::Gather { root },
        Collective::Scatter { root },
        Collective::AllToAll,
        Collective::Barrier,
    ] {
        for ranks in [2, 3, 7] {
            let (topology, hosts) = Topology::star(ranks, link());
            let one = Simulation { collective, ..simulation(topology, hosts, None, 84_000) };
            let outcome = one.run(|_| true).unwrap_or_else(|error| panic!("{collective:?} of {ranks}: {error}"));
            assert!(Algorithm::of(collective).contains(&outcome.algorithm), "{collective:?}");
            assert!(outcome.repetitions.iter().all(|one| one.time > 0 && one.frames > 0), "{collective:?}");
        }
    }
}

/// What makes no sense, cannot be simulated, or takes too long is refused, and what loses a frame ends with its link.
#[test]
fn what_is_refused() {
    let with = |change: &dyn Fn(&mut Simulation)| {
        let (topology, hosts) = Topology::star(4, link());
        let mut one = simulation(topology, hosts, None, 4 << 20);
        change(&mut one);
        one.run(|_| true).expect_err("it is refused")
    };
    let field = |change: &dyn Fn(&mut Simulation)| match with(change) {
        Error::OutOfBounds { field, .. } => field,
        other => panic!("{other:?}"),
    };
    let of_links = |to: Link| field(&|one| (one.topology, one.hosts) = Topology::star(4, to));
    assert_eq!(field(&|one| one.hosts.truncate(1)), Field::Ranks);
    assert_eq!(field(&|one| one.hosts[2] = one.hosts[0]), Field::Host(2));
    assert_eq!(field(&|one| one.bytes = 3), Field::Bytes);
    assert_eq!(field(&|one| one.bytes = 17 << 30), Field::Bytes);
    assert_eq!(field(&|one| (one.bytes, one.repetitions) = (16 << 30, 1000)), Field::Bytes);
    assert_eq!(field(&|one| one.repetitions = 0), Field::Repetitions);
    let rings = |one: &mut Simulation| {
        (one.topology, one.hosts) = Topology::star(1024, link());
        (one.algorithm, one.repetitions) = (Some(Algorithm::Ring), 33);
    };
    assert_eq!(field(&rings), Field::Repetitions);
    assert_eq!(field(&|one| one.collective = Collective::Send { to: 1 }), Field::Collective);
    let algorithm =
        |one: &mut Simulation| (one.collective, one.algorithm) = (Collective::Barrier, Some(Algorithm::Ring));
    assert_eq!(field(&algorithm), Field::Algorithm);
    assert_eq!(of_links(Link { rate: 1000, ..link() }), Field::Rate(LinkId(0)));
    assert_eq!(of_links(Link { delay: 2 * SECOND, ..link() }), Field::Delay(LinkId(0)));
    assert_eq!(of_links(Link { queue_bytes: 1500, ..link() }), Field::Queue(LinkId(0)));
    assert_eq!(of_links(Link { loss: 0.01, ..link() }), Field::Faults(LinkId(0)));
    let pairs = |one: &mut Simulation| {
        ((one.topology, one.hosts), one.collective) = (Topology::star(300, link()), Collective::AllToAll);
        one.bytes = 1200;
    };
    assert_eq!(field(&pairs), Field::Ranks);
    assert!(matches!(with(&|one| one.algorithm = Some(Algorithm::Tree)), Error::NoPlan(_)));
    let exchange = with(&|one| one.algorithm = Some(Algorithm::Exchange));
    assert!(matches!(exchange, Error::Replaced { by: Algorithm::Ring, .. }), "{exchange:?}");
    assert!(matches!(with(&|one| one.hosts[3] = one.topology.add_host()), Error::NoPath(_)));
    // Three ranks send to one.
    let full = with(&|one| {
        (one.topology, one.hosts) = Topology::star(4, Link { queue_bytes: 20_000, ..link() });
        one.collective = Collective::Gather { root: 0 };
    });
    assert!(matches!(full, Error::Full { .. }), "{full:?}");
}

/// The callback ends a simulation within a repetition, and a world says who has not ended by a time.
#[test]
fn runs_that_end_early() {
    let (topology, hosts) = Topology::star(8, link());
    let mut seen = Vec::new();
    let one = simulation(topology.clone(), hosts.clone(), None, 64 << 20);
    let interrupted = one.run(|progress| {
        seen.push((progress.repetitions, progress.time));
        seen.len() < 5
    });
    assert!(matches!(interrupted, Err(Error::Interrupted)), "{interrupted:?}");
    assert!(seen.len() == 5 && seen[4].0 == 0 && seen[4].1 > seen[1].1, "{seen:?}");
    let mut world = World::new(topology, &hosts, None, SECOND);
    world.schedule(0, Time(0), Step::Join);
    let late = world.run(1, Time(SECOND), &mut |_| true);
    assert!(matches!(late, Err(Stop::Late { ended: 0, next: Some(_) })), "{late:?}");
}

fn simulation(topology: Topology, hosts: Vec<NodeId>, algorithm: Option<Algorithm>, bytes: u64) -> Simulation {
    Simulation { topology, hosts, collective: Collective::AllReduce, bytes, algorithm, repetitions: 2 }
}

fn link() -> Link {
    Link { rate: RATE, delay: DELAY, ..Link::default() }
}

/// 10 Gbit/s.
const RATE: u64 = 1_250_000_000;
const DELAY: u64 = 5_000;
