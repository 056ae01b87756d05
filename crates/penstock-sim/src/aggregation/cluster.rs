//! The parameters of a scenario: addresses, every node's configuration, tensors, and the expected sums.

use super::world::Epoch;
use super::{BARE_BYTES, FULL_BYTES, Scenario, trees};
use crate::network::{Link, NodeId, Topology};
use crate::random::{Random, mix};
use penstock_aggregation::{
    Aggregator, Child, Endpoint, Format, HEADER_BYTES, Key, Limits, Node, Serial, Server, ServerConfig, Shard, Tenant,
};
use penstock_types::Time;

/// Addresses, configurations and tensors. Aggregators are numbered from 0; then for each job its server and its workers. A
/// node's host in the network has its number.
impl Scenario {
    /// The hosts of all nodes, the switches between them, and their links.
    pub(super) fn topology(&self) -> Topology {
        let mut topology = Topology::default();
        let ends = self.jobs * (self.workers + 1);
        for _ in 0..self.aggregators() + ends {
            topology.add_host();
        }
        let core = topology.add_switch();
        // A node's own socket blocks its sender, and drops nothing.
        let port = Link { rate: self.rate, queue_bytes: self.queue, ..Link::default() };
        for job in 0..self.jobs {
            let server = NodeId(self.server_endpoint(job).0);
            topology.add_link(server, core, Link { queue_bytes: 0, ..port });
            topology.add_link(core, server, port);
        }
        self.join(&mut topology, &self.tree.children, core);
        topology
    }

    fn join(&self, topology: &mut Topology, nodes: &[Node], above: NodeId) {
        let Scenario { rate, queue: queue_bytes, delay, jitter, loss, duplicate, .. } = *self;
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
                Node::Aggregator { endpoint, children } => {
                    let switch = topology.add_switch();
                    topology.join(NodeId(endpoint.0), switch, Link::default());
                    topology.join(switch, above, Link { loss: if self.edge_loss { 0.0 } else { loss }, ..edge });
                    self.join(topology, children, switch);
                }
            }
        }
    }

    /// Bytes of a packet on a link.
    pub(super) fn wire_bytes(packet: &[u8]) -> u64 {
        if packet.len() > HEADER_BYTES { FULL_BYTES } else { BARE_BYTES }
    }

    pub(super) fn server_endpoint(&self, job: usize) -> Endpoint {
        Endpoint((self.aggregators() + job * (self.workers + 1)) as u32)
    }

    pub(super) fn worker_endpoint(&self, job: usize, worker: usize) -> Endpoint {
        Endpoint(self.server_endpoint(job).0 + 1 + worker as u32)
    }

    /// The job of a server or a worker; None of an aggregator.
    pub(super) fn place(&self, node: Endpoint) -> Option<(usize, Option<usize>)> {
        let number = (node.0 as usize).checked_sub(self.aggregators())?;
        Some((number / (self.workers + 1), (number % (self.workers + 1)).checked_sub(1)))
    }

    /// The aggregator right above a worker.
    pub(super) fn parent(&self, job: usize, worker: usize, epoch: &Epoch) -> Option<Endpoint> {
        (0..self.aggregators()).map(|number| Endpoint(number as u32)).find(|endpoint| {
            let tenant = self.tenant(endpoint.0 as usize, job, epoch);
            tenant.is_some_and(|tenant| {
                tenant.children.iter().any(|child| child.workers == 1 << worker && self.place(child.endpoint).is_some())
            })
        })
    }

    pub(super) fn epoch(&self, number: u16, alive: u64, random: &mut Random) -> Epoch {
        // Near the wrap-around, so that most runs cross it.
        let start = Serial(u32::MAX.wrapping_sub(random.below(40) as u32).wrapping_add(8));
        Epoch { number, start, alive, tree: trees::prune(&self.tree, alive) }
    }

    pub(super) fn key(&self, job: usize, epoch: &Epoch) -> Option<Key> {
        let word = mix(self.seed ^ (job as u64) << 32 ^ u64::from(epoch.number));
        self.keyed.then(|| Key(u128::from(word).to_be_bytes()))
    }

    /// All shards of an aggregator, without jobs.
    pub(super) fn aggregator(&self) -> Vec<Aggregator> {
        let slots = self.jobs * (self.window / self.shards).max(1) as usize;
        let limits = Limits { jobs: self.jobs, slots, memory_bytes: slots * BLOCK_BYTES * (self.workers + 1) };
        (0..self.shards).map(|index| Aggregator::sharded(limits, Shard { index, count: self.shards })).collect()
    }

    /// A job's configuration on an aggregator; `None` if no worker is below it.
    pub(super) fn tenant(&self, aggregator: usize, job: usize, epoch: &Epoch) -> Option<Tenant> {
        fn find(nodes: &[Node], above: Endpoint, wanted: Endpoint) -> Option<(Endpoint, &[Node])> {
            nodes.iter().find_map(|node| match node {
                Node::Aggregator { endpoint, children } if *endpoint == wanted => Some((above, &children[..])),
                Node::Aggregator { endpoint, children } => find(children, *endpoint, wanted),
                Node::Worker(_) => None,
            })
        }
        let (parent, children) = find(&epoch.tree.children, self.server_endpoint(job), Endpoint(aggregator as u32))?;
        let children = children.iter().map(|child| Child {
            workers: child.workers(),
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
            block_bytes: BLOCK_BYTES,
            floats: self.floats,
            results: true,
            parent,
            children: children.collect(),
        })
    }

    pub(super) fn server(&self, now: Time, job: usize, epoch: &Epoch) -> Server {
        let config = ServerConfig {
            job: job as u32,
            epoch: epoch.number,
            key: self.key(job, epoch),
            window: self.window,
            block_bytes: BLOCK_BYTES,
            start: epoch.start,
            tree: epoch.tree.clone(),
            workers: (0..self.workers).map(|worker| self.worker_endpoint(job, worker)).collect(),
            heartbeat_every: self.timing.heartbeat_every,
            idle_every: self.timing.idle_every,
        };
        Server::new(now, config)
    }

    /// Whether a block is not finite at some worker, so that all send it as floats, straight to the server.
    pub(super) fn is_full(&self, job: usize, block: u32) -> bool {
        !self.floats && mix(self.seed ^ (job as u64) << 40 ^ u64::from(block)).is_multiple_of(16)
    }

    /// A worker's block: of a length, an exponent and elements of its own.
    pub(super) fn block(&self, job: usize, epoch: &Epoch, worker: usize, block: u32) -> (Format, i16, Vec<u8>) {
        let floats = self.floats || self.is_full(job, block);
        let elements = 1 + block as usize % (BLOCK_BYTES / 4);
        let mut random = Random::new(
            mix(self.seed ^ (job as u64) << 48 ^ u64::from(epoch.number) << 32 ^ (worker as u64) << 24)
                ^ u64::from(block),
        );
        let bytes = (0..elements).flat_map(|_| {
            let bits = random.word();
            if floats {
                // Of very different size, so that the order of additions shows.
                let size = 2f32.powi((bits >> 32 & 31) as i32 - 16);
                (size * (bits as u32 as f32 - 2e9)).to_be_bytes()
            } else {
                (bits as u32).to_be_bytes()
            }
        });
        (if floats { Format::F32 } else { Format::I32 }, block as i16 % 7, bytes.collect())
    }

    /// What every worker should get: computed from the tensors and the tree alone.
    pub(super) fn expected(&self, job: usize, epoch: &Epoch, block: u32) -> (Format, i16, Vec<u8>) {
        fn fold(children: &[Node], leaf: &impl Fn(usize) -> Vec<u32>, add: &impl Fn(u32, u32) -> u32) -> Vec<u32> {
            let each = children.iter().map(|node| match node {
                Node::Worker(worker) => leaf(usize::from(*worker)),
                Node::Aggregator { children, .. } => fold(children, leaf, add),
            });
            each.reduce(|sum, next| sum.into_iter().zip(next).map(|(a, b)| add(a, b)).collect()).expect("children")
        }
        let words = |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().map(|word| u32::from_be_bytes(*word)).collect();
        let first = epoch.alive.trailing_zeros() as usize;
        let (format, exponent, _) = self.block(job, epoch, first, block);
        let sum =
            fold(
                &epoch.tree.children,
                &|worker| words(&self.block(job, epoch, worker, block).2),
                &|a, b| match format {
                    Format::F32 => (f32::from_bits(a) + f32::from_bits(b)).to_bits(),
                    _ => a.wrapping_add(b),
                },
            );
        (format, exponent, sum.into_iter().flat_map(u32::to_be_bytes).collect())
    }
}

/// Eight 32-bit elements: what is checked does not depend on the length.
const BLOCK_BYTES: usize = 32;
