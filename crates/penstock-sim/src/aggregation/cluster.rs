//! The parameters of a scenario: addresses, and every node's configuration.

use super::{BARE_BYTES, Scenario, trees};
use crate::network::{Link, NodeId, Topology};
use crate::random::{Random, mix};
use penstock_aggregation::client::{PARENT, SERVER};
use penstock_aggregation::{
    Aggregator, Child, Endpoint, HEADER_BYTES, Key, Limits, MAX_CHILDREN, MAX_PAYLOAD_BYTES, Naming, Node, Serial,
    Server, ServerConfig, Shard, Tenant, Tree, WorkerConfig,
};
use penstock_types::Time;
use std::ops::Deref;

/// An epoch of a job.
pub(super) struct Epoch {
    pub(super) number: u16,
    /// The first SeqNum.
    pub(super) start: Serial,
    /// The workers that take part.
    pub(super) alive: Vec<bool>,
    pub(super) tree: Tree,
    /// By worker: the aggregator right above it, if there is one, and its place among that one's children, or the server's.
    pub(super) places: Vec<(Option<Endpoint>, usize)>,
}

/// A scenario with addresses. Aggregators are numbered from 0; then for each job its server and its workers. A node's host in the
/// network has its number.
#[derive(Clone, Copy)]
pub(super) struct Cluster<'a> {
    scenario: &'a Scenario,
    /// Aggregators have numbers below this.
    pub(super) aggregators: usize,
}

impl Deref for Cluster<'_> {
    type Target = Scenario;

    fn deref(&self) -> &Scenario {
        self.scenario
    }
}

impl<'a> Cluster<'a> {
    pub(super) fn new(scenario: &'a Scenario) -> Cluster<'a> {
        Cluster { scenario, aggregators: scenario.aggregators() }
    }

    /// The hosts of all nodes, the switches between them, and their links.
    pub(super) fn topology(&self) -> Topology {
        let mut topology = Topology::default();
        let ends = self.jobs * (self.workers + 1);
        for _ in 0..self.aggregators + ends {
            topology.add_host();
        }
        let core = topology.add_switch();
        // A node's own socket blocks its sender, and drops nothing.
        let rate = if self.is_fat { self.rate * MAX_CHILDREN as u64 } else { self.rate };
        let port = Link { rate, queue_bytes: self.queue, ..Link::default() };
        for job in 0..self.jobs {
            let server = NodeId(self.server_endpoint(job).0);
            topology.add_link(server, core, Link { queue_bytes: 0, ..port });
            topology.add_link(core, server, port);
        }
        self.join(&mut topology, &self.tree.children, core);
        topology
    }

    fn join(&self, topology: &mut Topology, nodes: &[Node], above: NodeId) {
        let Scenario { rate, queue: queue_bytes, delay, jitter, loss, duplicate, .. } = *self.scenario;
        let edge = Link { rate, queue_bytes, delay, jitter, loss, duplicate, ..Link::default() };
        for node in nodes {
            match node {
                Node::Worker(worker) => {
                    for job in 0..self.jobs {
                        let worker = NodeId(self.worker_endpoint(job, usize::from(*worker)).0);
                        topology.add_link(worker, above, Link { queue_bytes: 0, ..edge });
                        topology.add_link(above, worker, edge);
                    }
                }
                Node::Aggregator { endpoint, children, .. } => {
                    let rate = if self.is_fat { rate * node.workers().len() as u64 } else { rate };
                    let switch = topology.add_switch();
                    topology.join(NodeId(endpoint.0), switch, Link::default());
                    topology.join(switch, above, Link { loss: if self.edge_loss { 0.0 } else { loss }, rate, ..edge });
                    self.join(topology, children, switch);
                }
            }
        }
    }

    /// Bytes of a packet on a link, where a full block is as long as the largest one.
    pub(super) fn wire_bytes(&self, packet: &[u8]) -> u64 {
        let payload = packet.len().saturating_sub(HEADER_BYTES);
        BARE_BYTES + (payload * MAX_PAYLOAD_BYTES / self.payload_bytes) as u64
    }

    pub(super) fn server_endpoint(&self, job: usize) -> Endpoint {
        Endpoint((self.aggregators + job * (self.workers + 1)) as u32)
    }

    pub(super) fn worker_endpoint(&self, job: usize, worker: usize) -> Endpoint {
        Endpoint(self.server_endpoint(job).0 + 1 + worker as u32)
    }

    /// The job of a server or a worker; None of an aggregator.
    pub(super) fn place(&self, node: Endpoint) -> Option<(usize, Option<usize>)> {
        let number = (node.0 as usize).checked_sub(self.aggregators)?;
        Some((number / (self.workers + 1), (number % (self.workers + 1)).checked_sub(1)))
    }

    /// Whether an aggregator adds floats and goes past a parent that is bypassed ([`Scenario::switches`]).
    pub(super) fn is_full(&self, aggregator: u32) -> bool {
        self.floats || !self.switches || !mix(self.seed ^ 0xf1a7 ^ u64::from(aggregator)).is_multiple_of(3)
    }

    pub(super) fn epoch(&self, number: u16, alive: Vec<bool>, random: &mut Random) -> Epoch {
        // Near the wrap-around, so that most runs cross it.
        let start = Serial(u32::MAX.wrapping_sub(random.below(40) as u32).wrapping_add(8));
        let tree = trees::prune(&self.tree, &alive, &|aggregator| self.is_full(aggregator));
        Epoch { number, start, places: trees::places(&tree, self.workers), tree, alive }
    }

    pub(super) fn key(&self, job: usize, epoch: &Epoch) -> Option<Key> {
        let word = mix(self.seed ^ (job as u64) << 32 ^ u64::from(epoch.number));
        self.keyed.then(|| Key(u128::from(word).to_be_bytes()))
    }

    /// All shards of an aggregator, without jobs.
    pub(super) fn aggregator(&self) -> Vec<Aggregator> {
        let slots = self.jobs * (self.window / self.shards).max(1) as usize;
        let limits = Limits { jobs: self.jobs, slots, memory_bytes: slots * self.payload_bytes * (MAX_CHILDREN + 2) };
        (0..self.shards).map(|index| Aggregator::sharded(limits, Shard { index, count: self.shards })).collect()
    }

    /// A job's configuration on an aggregator; `None` if no worker is below it.
    pub(super) fn tenant(&self, aggregator: usize, job: usize, epoch: &Epoch) -> Option<Tenant> {
        fn find(nodes: &[Node], above: Endpoint, wanted: Endpoint) -> Option<(Endpoint, usize, &[Node])> {
            nodes.iter().enumerate().find_map(|(place, node)| match node {
                Node::Aggregator { endpoint, children, .. } if *endpoint == wanted => {
                    Some((above, place, &children[..]))
                }
                Node::Aggregator { endpoint, children, .. } => find(children, *endpoint, wanted),
                Node::Worker(_) => None,
            })
        }
        let server = self.server_endpoint(job);
        let (parent, place, children) = find(&epoch.tree.children, server, Endpoint(aggregator as u32))?;
        let is_full = self.is_full(aggregator as u32);
        let children = children.iter().enumerate().map(|(place, child)| Child {
            workers: 1 << place,
            endpoint: match child {
                Node::Worker(worker) => self.worker_endpoint(job, usize::from(*worker)),
                Node::Aggregator { endpoint, .. } => *endpoint,
            },
        });
        Some(Tenant {
            job: job as u32,
            epoch: epoch.number,
            key: self.key(job, epoch),
            window: self.window,
            block_bytes: self.payload_bytes,
            floats: is_full,
            results: true,
            apart: self.held.is_some(),
            parent,
            // One that does not add floats behaves as a switch, which has no other path.
            server: is_full.then_some(server),
            name: 1 << place,
            children: children.collect(),
        })
    }

    /// What a worker knows of its server and of its place in the tree.
    pub(super) fn worker(&self, job: usize, worker: usize, epoch: &Epoch) -> WorkerConfig {
        WorkerConfig {
            job: job as u32,
            epoch: epoch.number,
            key: self.key(job, epoch),
            name: 1 << epoch.places[worker].1,
            window: self.window,
            start: epoch.start,
            parent: if epoch.places[worker].0.is_some() { PARENT } else { SERVER },
            server: SERVER,
            ask_parent: true,
            full_to_parent: epoch.places[worker].0.is_some_and(|above| self.is_full(above.0)),
            apart: self.held.is_some(),
            timing: self.timing,
        }
    }

    pub(super) fn server(&self, now: Time, job: usize, epoch: &Epoch) -> Server {
        let config = ServerConfig {
            job: job as u32,
            epoch: epoch.number,
            key: self.key(job, epoch),
            window: self.window,
            block_bytes: self.payload_bytes,
            start: epoch.start,
            tree: epoch.tree.clone(),
            naming: Naming::Children,
            stand_ins: ServerConfig::STAND_INS,
            held_blocks: self.held.map(|held| held.limit),
            workers: (0..self.workers).map(|worker| self.worker_endpoint(job, worker)).collect(),
            heartbeat_every: self.timing.heartbeat_every,
            idle_every: self.timing.idle_every,
            returns_after: ServerConfig::RETURNS_AFTER / ServerConfig::HEARTBEAT_EVERY * self.timing.heartbeat_every,
        };
        Server::new(now, config)
    }
}
