//! The parameters of a scenario: addresses, every node's configuration, tensors, and the expected sums.

use super::super::packet::Format;
use super::super::*;
use super::{Epoch, Scenario, Shape};
use penstock_types::Time;

/// Addresses, configurations and tensors. Aggregators are numbered from 0; then for each job its server and its workers.
impl Scenario {
    /// The tree of a job, with these of its workers.
    pub(super) fn tree(&self, alive: u64) -> Tree {
        let workers = |from: usize, to: usize| -> Vec<Node> {
            (from..to).filter(|w| alive >> w & 1 == 1).map(|w| Node::Worker(w as u8)).collect()
        };
        let aggregator = |number: usize, children: Vec<Node>| -> Vec<Node> {
            let link = Link(number as u32);
            if children.is_empty() { Vec::new() } else { vec![Node::Aggregator { link, children }] }
        };
        let half = self.workers / 2;
        let children = match self.shape {
            Shape::Direct => workers(0, self.workers),
            Shape::Star => aggregator(0, workers(0, self.workers)),
            Shape::Racks | Shape::Core => {
                let racks = [aggregator(0, workers(0, half)), aggregator(1, workers(half, self.workers))].concat();
                if self.shape == Shape::Core { aggregator(2, racks) } else { racks }
            }
        };
        Tree { children }
    }

    pub(super) fn server_link(&self, job: usize) -> Link {
        Link((self.aggregators() + job * (self.workers + 1)) as u32)
    }

    pub(super) fn worker_link(&self, job: usize, worker: usize) -> Link {
        Link(self.server_link(job).0 + 1 + worker as u32)
    }

    /// The job of a server or a worker; None of an aggregator.
    pub(super) fn place(&self, node: Link) -> Option<(usize, Option<usize>)> {
        let number = (node.0 as usize).checked_sub(self.aggregators())?;
        Some((number / (self.workers + 1), (number % (self.workers + 1)).checked_sub(1)))
    }

    /// The aggregator right above a worker.
    pub(super) fn parent(&self, job: usize, worker: usize, epoch: &Epoch) -> Option<Link> {
        (0..self.aggregators()).map(|number| Link(number as u32)).find(|link| {
            let job = self.job(link.0 as usize, job, epoch);
            job.is_some_and(|job| {
                job.children.iter().any(|child| child.workers == 1 << worker && self.place(child.link).is_some())
            })
        })
    }

    pub(super) fn epoch(&self, number: u16, alive: u64, random: &mut Random) -> Epoch {
        // Near the wrap-around, so that most runs cross it.
        let start = Serial(u32::MAX.wrapping_sub(random.below(40) as u32).wrapping_add(8));
        Epoch { number, start, alive, tree: self.tree(alive) }
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
    pub(super) fn job(&self, aggregator: usize, job: usize, epoch: &Epoch) -> Option<Job> {
        fn find(nodes: &[Node], above: Link, wanted: Link) -> Option<(Link, &[Node])> {
            nodes.iter().find_map(|node| match node {
                Node::Aggregator { link, children } if *link == wanted => Some((above, &children[..])),
                Node::Aggregator { link, children } => find(children, *link, wanted),
                Node::Worker(_) => None,
            })
        }
        let (parent, children) = find(&epoch.tree.children, self.server_link(job), Link(aggregator as u32))?;
        let children = children.iter().map(|child| Child {
            workers: child.workers(),
            link: match child {
                Node::Worker(worker) => self.worker_link(job, usize::from(*worker)),
                Node::Aggregator { link, .. } => *link,
            },
        });
        Some(Job {
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
            workers: (0..self.workers).map(|worker| self.worker_link(job, worker)).collect(),
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
        let mut random = Random(
            mix(self.seed ^ (job as u64) << 48 ^ u64::from(epoch.number) << 32 ^ (worker as u64) << 24)
                ^ u64::from(block),
        );
        let bytes = (0..elements).flat_map(|_| {
            let bits = random.next();
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

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014): the same numbers
/// everywhere, for ever.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// 0 to `bound - 1`; 0 when that is 0.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    pub(super) fn chance(&mut self, probability: f64) -> bool {
        ((self.next() >> 11) as f64) < probability * (1u64 << 53) as f64
    }

    pub(super) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Eight 32-bit elements: what is checked does not depend on the length.
const BLOCK_BYTES: usize = 32;
