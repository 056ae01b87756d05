//! Hundreds of shipped ranks with phantom payloads over the virtual network, in one process: how long a collective takes on a
//! topology, against what its plan promises; and what a thousand ranks do when one of them dies.

mod world;

use penstock_core::groups::Call;
use penstock_plan::{Algorithm, Collective, Request, Topology as Hosts, hops, wire_bytes};
use penstock_sim::network::{Link, NodeId, Topology};
use penstock_stream::fingerprint::{Fingerprint, Name};
use penstock_types::{DType, FailureKind, MILLISECOND, Priority, ReduceOp, SECOND, Time};
use std::time::Duration;
use world::{End, JOIN, Step, World};

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
    let mut world = World::new(Topology::star(ranks, Link { delay: DELAY, ..Link::default() }), None);
    // Each comes at its own time, so most joins find frames of others.
    let all = 0..ranks as u32;
    for rank in all.clone() {
        world.plan(rank, Time(u64::from(rank * 7919 % ranks as u32) * 10_000), Step::Join);
    }
    world.run(ranks, Time(10 * SECOND));
    let joined = world.now;
    for (number, call) in [call(Collective::Barrier, Name::Barrier, 0), all_reduce(4_000_000)].into_iter().enumerate() {
        for rank in all.clone() {
            world.plan(rank, joined, Step::Start(number, call.clone()));
        }
    }
    world.run(3 * ranks, joined.plus(10 * SECOND));
    let reduced = world.now;
    for ends in &world.ends {
        assert!(ends.iter().all(|end| end.result.is_ok()), "{ends:?}");
        assert_eq!(ends.iter().map(|end| end.call).collect::<Vec<_>>(), [JOIN, 0, 1]);
    }
    world.plan(dead, reduced, Step::Die);
    for rank in all.clone() {
        world.plan(rank, reduced.plus(MILLISECOND), Step::Start(2, all_reduce(4_000_000)));
    }
    world.run(4 * ranks - 1, reduced.plus(10 * SECOND));
    for rank in all.filter(|rank| *rank != dead) {
        let last = world.ends[rank as usize].last().expect("it had ended others before");
        let End { call: 2, at, result: Err(failure) } = last else { panic!("rank {rank}: {last:?}") };
        assert_eq!(failure.kind, FailureKind::PeerLost, "rank {rank}: {failure}");
        assert!(failure.message.contains(&format!("rank {dead} is silent")), "rank {rank}: {failure}");
        assert!(at.since(reduced) < 5 * SECOND, "rank {rank}: {at:?}");
    }
    let ms = |from: Time, to: Time| Duration::from_nanos(to.since(from)).as_secs_f64() * 1e3;
    println!("joined after {:.1} ms, reduced after {:.1} ms more", ms(Time(0), joined), ms(joined, reduced));
    println!("all have failed {:.1} ms after the death", ms(reduced, world.now));
}

/// What a plan promises, as a time: its bytes over the rate of a host's link, and a one-way trip for each of its hops. On a
/// trip a frame passes two links and is sent once more by the switch.
fn promised(request: &Request, algorithm: Algorithm) -> f64 {
    let bytes = wire_bytes(request, algorithm).expect("a plan").sent as f64;
    let trip = 2.0 * DELAY as f64 / SECOND as f64 + FRAME as f64 / RATE as f64;
    bytes / RATE as f64 + f64::from(hops(request, algorithm).expect("a plan")) * trip
}

/// A ring all-reduce of 256 ranks takes as long as its plan's cost says, where every host has a link of its own to one switch, and
/// hardly longer in racks whose hosts share one uplink: two of its flows leave and enter a rack. Halving and doubling takes 1.6 times
/// the cost around one switch, and 2.5 times in racks: costs of a plan know neither windows nor the network.
#[test]
fn costs_of_plans() {
    let ranks = 256;
    let link = Link { rate: RATE, delay: DELAY, ..Link::default() };
    let star = || Topology::star(ranks, link);
    let racks = || Topology::racks(16, 16, link, link);
    let request = Request {
        collective: Collective::AllReduce,
        world: ranks as u32,
        rank: 0,
        topology: Hosts::separate_hosts(ranks as u32),
        bytes: 4 << 20,
        element_bytes: 4,
        splits: None,
        segment_bytes: 64 << 10,
    };
    let over = |algorithm: Algorithm, network: (Topology, Vec<NodeId>)| {
        let mut world = World::new(network, Some(algorithm));
        (0..ranks as u32).for_each(|rank| world.plan(rank, Time(0), Step::Join));
        world.run(ranks, Time(10 * SECOND));
        let mut took = 0.0;
        // The first one finds streams that know nothing of their rates.
        for call in 0..2 {
            // The last acknowledgements of what was before are on their way.
            let start = world.now.plus(MILLISECOND);
            (0..ranks as u32).for_each(|rank| world.plan(rank, start, Step::Start(call, all_reduce(request.bytes))));
            world.run((call + 2) * ranks, start.plus(10 * SECOND));
            took = world.now.since(start) as f64 / SECOND as f64;
        }
        assert!(world.ends.iter().flatten().all(|end| end.result.is_ok()));
        let promised = promised(&request, algorithm);
        println!("{algorithm}: {:.3} ms, promised {:.3}", took * 1e3, promised * 1e3);
        took / promised
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

/// The bytes of a ring's messages here, and of most frames of others.
const FRAME: u64 = 16 << 10;
/// 10 Gbit/s.
const RATE: u64 = 1_250_000_000;
const DELAY: u64 = 5_000;
