//! Hundreds of shipped ranks (`penstock-core`) with phantom payloads over the virtual network: how long a collective takes on
//! a topology, against what its plan promises.

use penstock_core::operation::{Effect, Incoming, Operation};
use penstock_plan::{Algorithm, Collective, Request, Topology as Hosts, hops, steps, wire_bytes};
use penstock_sim::network::{Event, Link, Network, NodeId, Topology};
use penstock_types::{SECOND, Time};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// A frame of a message of which only the lengths are there.
#[derive(Clone, Copy)]
struct Phantom {
    from: u32,
    to: u32,
    message: u32,
    total: u64,
    offset: u64,
    len: u64,
}

struct Ranks {
    network: Network<Phantom>,
    hosts: Vec<NodeId>,
    ranks: Vec<Operation>,
    left: usize,
    /// By receiver, sender and message: frames that came before the receiver was ready for them.
    early: HashMap<(u32, u32, u32), Vec<Phantom>>,
    /// The same: bytes that were taken.
    taken: HashMap<(u32, u32, u32), u64>,
    /// Messages all of which was taken, and whose senders do not know it yet.
    whole: Vec<(u32, u32, u32)>,
    is_done: Vec<bool>,
}

impl Ranks {
    /// Runs a plan on all ranks. Returns when the last one ends.
    fn run(request: &Request, algorithm: Algorithm, (topology, hosts): (Topology, Vec<NodeId>)) -> Time {
        let operation = |rank: u32| {
            let request = Request { rank, ..request.clone() };
            Operation::new(Arc::new(steps(&request, algorithm).expect("a plan")), u64::from(request.element_bytes))
        };
        let mut world = Ranks {
            network: Network::new(topology, 0),
            ranks: (0..request.world).map(operation).collect(),
            left: hosts.len(),
            hosts,
            early: HashMap::new(),
            taken: HashMap::new(),
            whole: Vec::new(),
            is_done: vec![false; request.world as usize],
        };
        let mut now = Time(0);
        for rank in 0..request.world {
            let mut effects = Vec::new();
            world.ranks[rank as usize].start(&mut effects);
            world.carry_out(now, rank, effects);
        }
        while world.left > 0 {
            now = world.network.poll_timeout().expect("no rank waits for nothing");
            world.network.handle_timeout(now);
            while let Some(event) = world.network.poll_event() {
                if let Event::Arrived(packet) = event {
                    world.arrive(now, packet.payload);
                }
            }
        }
        assert_eq!(world.network.counts().sent, world.network.counts().arrived);
        now
    }

    fn carry_out(&mut self, now: Time, rank: u32, effects: Vec<Effect>) {
        let mut effects = VecDeque::from(effects);
        loop {
            let mut more = Vec::new();
            match effects.pop_front() {
                Some(Effect::Send { to, message, len, .. }) => self.send(now, rank, to, message, len),
                Some(Effect::Open { from, message, count }) => {
                    for message in message..message + count {
                        let early = self.early.remove(&(rank, from, message));
                        early.into_iter().flatten().for_each(|frame| self.take(frame, &mut more));
                    }
                }
                // Arithmetic costs no time here.
                Some(Effect::Compute(_)) => {}
                Some(other @ (Effect::Read { .. } | Effect::Doubt { .. })) => panic!("{other:?} without references"),
                None => {
                    let operation = &mut self.ranks[rank as usize];
                    let Some(instance) = operation.next_work() else { break };
                    operation.worked(instance, Vec::new(), &mut more);
                }
            }
            effects.extend(more);
        }
        let is_done = self.ranks[rank as usize].is_done();
        self.left -= usize::from(is_done && !std::mem::replace(&mut self.is_done[rank as usize], is_done));
    }

    fn send(&mut self, now: Time, from: u32, to: u32, message: u32, total: u64) {
        let ends = [from, to].map(|rank| self.hosts[rank as usize]);
        let flow = self.network.flow(ends[0], ends[1]).expect("all hosts are joined");
        for at in 0..total.div_ceil(FRAME).max(1) {
            let (offset, len) = (at * FRAME, FRAME.min(total - at * FRAME));
            self.network.send(now, flow, len, Phantom { from, to, message, total, offset, len });
        }
    }

    fn arrive(&mut self, now: Time, frame: Phantom) {
        let Phantom { from, to, message, .. } = frame;
        if self.ranks[to as usize].is_open(from, message) != Some(true) {
            return self.early.entry((to, from, message)).or_default().push(frame);
        }
        let mut effects = Vec::new();
        self.take(frame, &mut effects);
        self.carry_out(now, to, effects);
        // The sender hears at once that its memory is free.
        while let Some((to, from, message)) = self.whole.pop() {
            let mut effects = Vec::new();
            self.ranks[from as usize].on_sent(to, message, &mut effects);
            self.carry_out(now, from, effects);
        }
    }

    fn take(&mut self, Phantom { from, to, message, total, offset, len }: Phantom, effects: &mut Vec<Effect>) {
        let incoming = Incoming::Frame { offset, len };
        self.ranks[to as usize].on_message(from, message, total, incoming, effects).expect("it fits the plan");
        let key = (to, from, message);
        let taken = self.taken.entry(key).or_default();
        *taken += len;
        if *taken == total {
            self.taken.remove(&key);
            self.whole.push(key);
        }
    }
}

const FRAME: u64 = 16 << 10;

/// 10 Gbit/s.
const RATE: u64 = 1_250_000_000;
const DELAY: u64 = 5_000;

fn all_reduce(world: u32, bytes: u64) -> Request {
    Request {
        collective: Collective::AllReduce,
        world,
        rank: 0,
        topology: Hosts::separate_hosts(world),
        bytes,
        element_bytes: 4,
        splits: None,
        segment_bytes: 64 << 10,
    }
}

/// What a plan promises, as a time: its bytes over the rate of a host's link, and a one-way trip for each of its hops. On a
/// trip a frame passes two links and is sent once more by the switch.
fn promised(request: &Request, algorithm: Algorithm) -> f64 {
    let bytes = wire_bytes(request, algorithm).expect("a plan").sent as f64;
    let trip = 2.0 * DELAY as f64 / SECOND as f64 + FRAME as f64 / RATE as f64;
    bytes / RATE as f64 + f64::from(hops(request, algorithm).expect("a plan")) * trip
}

/// An all-reduce of 256 ranks takes as long as its plan's cost says, where every host has a link of its own to one switch. In racks
/// whose hosts share one uplink, a ring takes no longer: two of its flows leave and enter a rack. Halving and doubling takes
/// twice as long: costs of a plan know nothing of the network.
#[test]
fn costs_of_plans() {
    let link = Link { rate: RATE, delay: DELAY, ..Link::default() };
    let star = || Topology::star(256, link);
    let racks = || Topology::racks(16, 16, link, link);
    let request = all_reduce(256, 4 << 20);
    let over = |algorithm: Algorithm, network: (Topology, Vec<NodeId>)| {
        let took = Ranks::run(&request, algorithm, network).0 as f64 / SECOND as f64;
        let promised = promised(&request, algorithm);
        println!("{algorithm}: {:.3} ms, promised {:.3}", took * 1e3, promised * 1e3);
        took / promised
    };
    let ring = over(Algorithm::Ring, star());
    assert!((0.99..1.01).contains(&ring), "{ring}");
    let halving = over(Algorithm::HalvingDoubling, star());
    // Its rounds overlap, and frames of two of them meet at a port.
    assert!((0.99..1.3).contains(&halving), "{halving}");
    let ring = over(Algorithm::Ring, racks());
    assert!((1.0..1.7).contains(&ring), "{ring}");
    let halving = over(Algorithm::HalvingDoubling, racks());
    assert!(halving > 1.5, "{halving}");
}
