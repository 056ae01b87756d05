//! A run: nodes with the shipped machines, joined by the network, under one clock.

mod fallen;
mod ranks;
mod work;

use super::cluster::{Cluster, Epoch};
use super::{Fault, LIMIT, Outcome, SOCKET_BUFFER, Scenario, TRACE_LINES};
use crate::agenda::Agenda;
use crate::network::{Event, FlowId, LinkId, Loss, Network, NodeId, Queue, Topology};
use crate::random::Random;
use penstock_aggregation::{Action, Aggregator, Endpoint, FLAG_FULL, Server, Transmit, decode};
use penstock_types::{MILLISECOND, SECOND, Time};
use ranks::Rank;
use std::collections::{HashMap, HashSet, VecDeque};
use work::Work;

/// An aggregator's machines, and its state outside of them.
struct AggregatorNode {
    shards: Vec<Aggregator>,
    /// Until when packets to it are lost.
    down_until: Time,
    /// The epoch that it should have open, by job.
    opened: Vec<u16>,
}

/// A job's server.
struct ServerNode {
    /// `None`: it is lost.
    machine: Option<Server>,
    /// The epoch that it has open, or would have.
    epoch: u16,
    /// When it has committed last, or work has ended.
    committed: Time,
    /// How many whole buffers it has had in this epoch.
    buffers: u32,
}

/// What happens at a time of its own. Packets are the network's affair.
enum Timer {
    Wake {
        node: Endpoint,
    },
    /// A node moves to the job's newest epoch.
    Open {
        job: usize,
        node: Endpoint,
    },
    /// An aggregator is back, without state.
    Back {
        aggregator: usize,
    },
    /// The work behind a buffer ends.
    Work(Work),
}

/// A datagram.
#[derive(Clone)]
struct Datagram {
    /// The shard of an aggregator: its port.
    shard: u32,
    bytes: Vec<u8>,
}

pub(super) struct World<'a> {
    pub(super) scenario: Cluster<'a>,
    random: Random,
    pub(super) now: Time,
    network: Network<Datagram>,
    timers: Agenda<Timer>,
    /// By node: the link from its socket.
    sockets: Vec<LinkId>,
    aggregators: Vec<AggregatorNode>,
    pub(super) epochs: Vec<Vec<Epoch>>,
    /// By job.
    servers: Vec<ServerNode>,
    /// By job and worker; `None`: it is dead, or its job has ended without the server.
    pub(super) ranks: Vec<Vec<Option<Rank>>>,
    /// What a server returns, by job, epoch and block.
    expected: HashMap<(usize, u16, u32), Vec<f32>>,
    /// By job: workers that live and do not have everything.
    unfinished: Vec<HashSet<usize>>,
    /// By node: when it is woken, if it is to be.
    wakes: Vec<Option<Time>>,
    faults: VecDeque<(u64, Fault)>,
    /// The counts so far; [`World::outcome`] adds the rest.
    outcome: Outcome,
    trace: VecDeque<String>,
}

impl<'a> World<'a> {
    pub(super) fn new(scenario: &'a Scenario) -> World<'a> {
        let scenario = Cluster::new(scenario);
        let mut random = Random::new(scenario.seed);
        let all = || vec![true; scenario.workers];
        let epochs: Vec<Vec<Epoch>> = (0..scenario.jobs).map(|_| vec![scenario.epoch(0, all(), &mut random)]).collect();
        let topology = scenario.topology();
        let nodes = scenario.aggregators + scenario.jobs * (scenario.workers + 1);
        let sockets = sockets(&topology, nodes);
        let mut network = Network::new(topology, random.word());
        network.report_losses(scenario.trace);
        let mut faults = scenario.faults.clone();
        faults.sort_by_key(|(at, _)| *at);
        let mut world = World {
            aggregators: (0..scenario.aggregators)
                .map(|_| AggregatorNode {
                    shards: scenario.aggregator(),
                    down_until: Time(0),
                    opened: vec![0; scenario.jobs],
                })
                .collect(),
            servers: (0..scenario.jobs)
                .map(|job| ServerNode {
                    machine: Some(scenario.server(Time(0), job, &epochs[job][0])),
                    epoch: 0,
                    committed: Time(0),
                    buffers: 0,
                })
                .collect(),
            ranks: (0..scenario.jobs).map(|_| (0..scenario.workers).map(|_| None).collect()).collect(),
            expected: HashMap::new(),
            unfinished: vec![HashSet::new(); scenario.jobs],
            epochs,
            scenario,
            random,
            now: Time(0),
            network,
            timers: Agenda::default(),
            sockets,
            wakes: vec![None; nodes],
            faults: faults.into(),
            outcome: Outcome::default(),
            trace: VecDeque::new(),
        };
        for job in 0..scenario.jobs {
            (0..scenario.aggregators).for_each(|aggregator| world.open_aggregator(aggregator, job));
            (0..scenario.workers).for_each(|worker| world.open_rank(job, worker));
        }
        world
    }

    pub(super) fn run(&mut self) -> Result<(), String> {
        for job in 0..self.scenario.jobs {
            self.drain_server(job);
            for worker in 0..self.scenario.workers {
                self.drain_rank(job, worker)?;
            }
        }
        while self.unfinished.iter().any(|workers| !workers.is_empty()) {
            let Some(at) = self.timers.next_at().into_iter().chain(self.network.poll_timeout()).min() else {
                return Err("nothing is left to happen".into());
            };
            let moved = self.servers.iter().map(|server| server.committed).max().expect("a job has a server");
            if at > moved.plus(LIMIT) {
                let (results, moved, limit) = (self.outcome.results, moved.0 / SECOND, LIMIT / SECOND);
                return Err(format!(
                    "stuck: {results} results, and no server has committed for {limit} s after {moved} s"
                ));
            }
            self.now = at;
            self.network.handle_timeout(at);
            while let Some(event) = self.network.poll_event() {
                self.on_network(event)?;
            }
            while let Some(timer) = self.timers.pop(at) {
                self.on_timer(timer)?;
            }
        }
        Ok(())
    }

    pub(super) fn outcome(self, failure: Option<String>) -> Outcome {
        let counts = self.network.counts();
        let (lost, dropped) = (counts.lost, counts.dropped);
        Outcome { failure, lost, dropped, time: self.now.0, trace: self.trace.into(), ..self.outcome }
    }

    fn on_timer(&mut self, timer: Timer) -> Result<(), String> {
        match timer {
            Timer::Wake { node } => {
                self.wakes[node.0 as usize] = None;
                match self.scenario.place(node) {
                    Some((job, None)) => {
                        if let Some(server) = &mut self.servers[job].machine {
                            server.handle_timeout(self.now);
                        }
                    }
                    Some((job, Some(worker))) => self.wake_rank(job, worker)?,
                    None => {}
                }
                self.drain(node)?;
            }
            Timer::Open { job, node } => {
                // If two epochs follow each other quickly, the newest one is opened at once, and once: a server that opened it
                // again would have forgotten what it committed.
                let epoch = self.epochs[job].last().expect("one at least");
                match self.scenario.place(node) {
                    None => self.open_aggregator(node.0 as usize, job),
                    Some((_, None)) if self.servers[job].epoch != epoch.number => {
                        if let Some(server) = &mut self.servers[job].machine {
                            *server = self.scenario.server(self.now, job, epoch);
                        }
                        (self.servers[job].epoch, self.servers[job].buffers) = (epoch.number, 0);
                        self.drain_server(job);
                    }
                    Some((_, Some(worker))) => {
                        // It may have died in the meantime.
                        if self.ranks[job][worker].as_ref().is_some_and(|rank| rank.epoch != epoch.number) {
                            self.dismiss(job, worker)?;
                            self.open_rank(job, worker);
                            self.drain_rank(job, worker)?;
                        }
                    }
                    Some((_, None)) => {}
                }
                self.note(|| format!("{node:?} is in the newest epoch of job {job}"));
            }
            Timer::Work(work) => self.end_work(work)?,
            Timer::Back { aggregator } => {
                for job in 0..self.scenario.jobs {
                    let epoch = usize::from(self.aggregators[aggregator].opened[job]);
                    self.open_epoch(aggregator, job, epoch);
                }
            }
        }
        Ok(())
    }

    fn on_network(&mut self, event: Event<Datagram>) -> Result<(), String> {
        match event {
            Event::Arrived(packet) => {
                self.outcome.arrived += 1;
                while self.faults.front().is_some_and(|(at, _)| *at < self.outcome.arrived) {
                    let (_, fault) = self.faults.pop_front().expect("looked at");
                    self.note(|| format!("{fault:?}"));
                    self.fail(fault)?;
                }
                self.arrive(Endpoint(packet.to.0), Endpoint(packet.from.0), packet.payload)
            }
            Event::Lost(packet, loss) => {
                let what = match loss {
                    Loss::Link(_) => "LOST",
                    Loss::Queue(_) => "DROPPED",
                    _ => "UNREACHABLE",
                };
                self.note(|| format!("{}  {what}", described(packet.from, packet.to, &packet.payload.bytes)));
                Ok(())
            }
            Event::Room(Queue::Link(link)) => {
                let [node, _] = self.network.topology().ends(link);
                self.drain(Endpoint(node.0))
            }
            Event::Room(Queue::Flow(_)) => Ok(()),
        }
    }

    fn arrive(&mut self, to: Endpoint, from: Endpoint, Datagram { shard, bytes }: Datagram) -> Result<(), String> {
        // A fault that this very packet brought about may have taken the node down.
        match self.scenario.place(to) {
            None => {
                let number = to.0 as usize;
                let node = &mut self.aggregators[number];
                if self.now < node.down_until {
                    return Ok(());
                }
                let sent: Vec<(Endpoint, Vec<u8>)> = match node.shards[shard as usize].handle_packet(from, &bytes) {
                    Ok(Action::Send { to, header, payload }) => {
                        to.iter().map(|to| (*to, [&header[..], payload].concat())).collect()
                    }
                    Ok(Action::Relay { to }) => to.iter().map(|to| (*to, bytes.clone())).collect(),
                    Ok(Action::Nothing) | Err(_) => Vec::new(),
                };
                sent.into_iter().for_each(|(next, bytes)| self.send(next, to, bytes));
            }
            Some((job, None)) => {
                if let Some(server) = &mut self.servers[job].machine {
                    if let Ok(Some(_)) = server.handle_packet(self.now, from, &bytes) {
                        self.servers[job].committed = self.now;
                    }
                    self.drain_server(job);
                }
            }
            Some((job, Some(worker))) => self.arrive_at_rank(job, worker, from, &bytes)?,
        }
        Ok(())
    }

    fn fail(&mut self, fault: Fault) -> Result<(), String> {
        match fault {
            Fault::Restart { aggregator, down } if aggregator < self.aggregators.len() => {
                self.aggregators[aggregator].shards = self.scenario.aggregator();
                let back = self.now.plus(down);
                self.take_down(aggregator, back);
                self.timers.add(back, Timer::Back { aggregator });
            }
            Fault::Die { aggregator } if aggregator < self.aggregators.len() => {
                self.take_down(aggregator, Time(u64::MAX));
            }
            Fault::Cut { job, worker } => {
                if let (Some(above), _) = self.epochs[job].last().expect("one at least").places[worker] {
                    let worker = self.scenario.worker_endpoint(job, worker);
                    for (from, to) in [(worker, above), (above, worker)] {
                        let flow = self.flow(from, to);
                        self.network.block(flow, true);
                    }
                }
            }
            Fault::Kill { job, worker } => {
                let before = self.epochs[job].last().expect("one at least");
                let mut alive = before.alive.clone();
                let was_alive = std::mem::replace(&mut alive[worker], false);
                let has_ended = self.ranks[job].iter().all(Option::is_none);
                if !was_alive || !alive.contains(&true) || has_ended {
                    return Ok(());
                }
                let next = self.scenario.epoch(before.number + 1, alive, &mut self.random);
                self.epochs[job].push(next);
                self.dismiss(job, worker)?;
                // The control plane notices, and tells every node; the nodes hear of it one by one.
                let mut nodes: Vec<Endpoint> =
                    (0..self.aggregators.len()).map(|number| Endpoint(number as u32)).collect();
                nodes.push(self.scenario.server_endpoint(job));
                nodes.extend((0..self.scenario.workers).map(|worker| self.scenario.worker_endpoint(job, worker)));
                for node in nodes {
                    let at = self.now.plus(10 * MILLISECOND + self.random.below(20 * MILLISECOND));
                    self.timers.add(at, Timer::Open { job, node });
                }
                (0..self.scenario.workers).for_each(|worker| self.judge(job, worker));
            }
            Fault::LoseServer { job } => {
                self.servers[job].machine = None;
                self.network.take_down(NodeId(self.scenario.server_endpoint(job).0), Time(u64::MAX));
            }
            Fault::Restart { .. } | Fault::Die { .. } => {}
        }
        Ok(())
    }

    fn take_down(&mut self, aggregator: usize, until: Time) {
        let down_until = &mut self.aggregators[aggregator].down_until;
        *down_until = until.max(*down_until);
        self.network.take_down(NodeId(aggregator as u32), *down_until);
    }

    fn open_aggregator(&mut self, aggregator: usize, job: usize) {
        let newest = self.epochs[job].len() - 1;
        self.aggregators[aggregator].opened[job] = newest as u16;
        self.open_epoch(aggregator, job, newest);
    }

    fn open_epoch(&mut self, aggregator: usize, job: usize, epoch: usize) {
        let config = self.scenario.tenant(aggregator, job, &self.epochs[job][epoch]);
        for shard in &mut self.aggregators[aggregator].shards {
            match &config {
                Some(config) => shard.open(config.clone()).expect("there is room"),
                None => shard.close(job as u32),
            }
        }
    }

    /// A node sends what it can.
    fn drain(&mut self, node: Endpoint) -> Result<(), String> {
        match self.scenario.place(node) {
            Some((job, None)) => self.drain_server(job),
            Some((job, Some(worker))) => self.drain_rank(job, worker)?,
            None => {}
        }
        Ok(())
    }

    fn drain_server(&mut self, job: usize) {
        self.begin_work(job);
        let node = self.scenario.server_endpoint(job);
        while self.has_room(node)
            && let Some(Transmit { to, header, payload }) =
                self.servers[job].machine.as_mut().and_then(Server::poll_transmit)
        {
            let bytes = [&header[..], payload].concat();
            self.send(to, node, bytes);
        }
        if let Some(server) = &self.servers[job].machine {
            self.wake(node, server.poll_timeout());
        }
    }

    /// Whether a node's socket has room for another packet. If not, the network tells when it has.
    fn has_room(&mut self, node: Endpoint) -> bool {
        self.network.has_room(self.now, Queue::Link(self.sockets[node.0 as usize]), SOCKET_BUFFER)
    }

    fn flow(&mut self, from: Endpoint, to: Endpoint) -> FlowId {
        self.network.flow(NodeId(from.0), NodeId(to.0)).expect("the nodes of a job are joined")
    }

    fn send(&mut self, to: Endpoint, from: Endpoint, bytes: Vec<u8>) {
        self.outcome.packets += 1;
        self.note(|| described(NodeId(from.0), NodeId(to.0), &bytes));
        let shard = match decode(&bytes) {
            Ok(packet) if self.scenario.place(to).is_none() => packet.header.seq.0 % self.scenario.shards,
            _ => 0,
        };
        let (flow, length) = (self.flow(from, to), self.scenario.wire_bytes(&bytes));
        if self.scenario.keyed && self.random.below(64) == 0 {
            // Damage, or an unauthenticated peer: a copy comes as well in which a bit is flipped.
            let mut bytes = bytes.clone();
            let bit = self.random.below(bytes.len() as u64 * 8) as usize;
            bytes[bit / 8] ^= 1 << (bit % 8);
            self.network.send(self.now, flow, length, Datagram { shard, bytes });
        }
        self.network.send(self.now, flow, length, Datagram { shard, bytes });
    }

    pub(super) fn wake(&mut self, node: Endpoint, at: Time) {
        let at = at.max(Time(self.now.0 + 1));
        let scheduled = &mut self.wakes[node.0 as usize];
        if scheduled.is_none_or(|scheduled| at < scheduled) {
            *scheduled = Some(at);
            self.timers.add(at, Timer::Wake { node });
        }
    }

    fn note(&mut self, line: impl FnOnce() -> String) {
        if self.scenario.trace {
            if self.trace.len() == TRACE_LINES {
                self.trace.pop_front();
            }
            let line = format!("{:>10.3} ms  {}", self.now.0 as f64 / MILLISECOND as f64, line());
            self.trace.push_back(line);
        }
    }
}

/// By node: the link that begins there.
fn sockets(topology: &Topology, nodes: usize) -> Vec<LinkId> {
    let mut sockets = vec![LinkId(0); nodes];
    for link in topology.links() {
        let [from, _] = topology.ends(link);
        if let Some(socket) = sockets.get_mut(from.0 as usize) {
            *socket = link;
        }
    }
    sockets
}

/// A packet, for the trace.
fn described(from: NodeId, to: NodeId, bytes: &[u8]) -> String {
    let (from, to) = (Endpoint(from.0), Endpoint(to.0));
    match decode(bytes).map(|packet| packet.header) {
        Ok(h) => format!(
            "{from:?} -> {to:?} {:?} job {} epoch {} seq {} ack {} credit {} workers {:b}{}",
            h.kind,
            h.job,
            h.epoch,
            h.seq,
            h.ack,
            h.credit,
            h.workers,
            if h.flags & FLAG_FULL != 0 { " full" } else { "" },
        ),
        Err(error) => format!("{from:?} -> {to:?} {error}"),
    }
}
