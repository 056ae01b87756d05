//! How a server is set up for a job, and the memory that this takes.

use super::{Recovery, Slot};
use crate::aggregator::Table;
use crate::hops::Naming;
use crate::tree::{Node, Tree};
use crate::{Endpoint, Key, Serial};
use penstock_types::MILLISECOND;

/// A server's configuration for one job.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// The number of the job.
    pub job: u32,
    /// Counts the lives of the job.
    pub epoch: u16,
    /// The job's key; `None` on a trusted network.
    pub key: Option<Key>,
    /// SeqNums in flight, a power of two; the same on all nodes of the job.
    pub window: u32,
    /// The length of the longest block in bytes.
    pub block_bytes: usize,
    /// The first SeqNum of the epoch.
    pub start: Serial,
    /// The job's tree: which node sends to which.
    pub tree: Tree,
    /// What bitmaps name.
    pub naming: Naming,
    /// Each worker's own address, by number.
    pub workers: Vec<Endpoint>,
    /// For how many dead aggregators the server stands in at once, besides those that add no floats. Each costs
    /// `window * (children + 1) * block_bytes`, while it is bypassed. One more is not bypassed until another is back: workers below
    /// it that hear nothing for [`crate::Timing::server_dead_after`] give the server up.
    pub stand_ins: usize,
    /// `None`: a block's sum is its result, which is sent when the block is accepted. Otherwise results come apart: the server gives
    /// [buffers](crate::Buffer) to somebody who works on them, and holds at most so many blocks, from accepting them until all workers
    /// have their results. A buffer of more blocks fails.
    pub held_blocks: Option<u32>,
    /// How often Ack and Credit are sent while blocks are in flight. The loss of the last packets of a burst is noticed after
    /// this time.
    pub heartbeat_every: u64,
    /// How often Ack and Credit are sent while no blocks are in flight. Workers take an aggregator for dead when they hear
    /// nothing through it for [`crate::Timing::path_dead_after`], a few times this.
    pub idle_every: u64,
    /// A node that says that it hears the aggregator above it is believed once it has not said the opposite for so long. A node's threads
    /// each have their own way, and take turns with heartbeats: while one hears the aggregator and another does not, the path would change
    /// with each packet.
    pub returns_after: u64,
}

impl ServerConfig {
    /// 2 ms: many round trips of a local network, few packets. 100 ms: path death is noticed within a third of a second.
    pub const HEARTBEAT_EVERY: u64 = 2 * MILLISECOND;
    /// See [`ServerConfig::HEARTBEAT_EVERY`].
    pub const IDLE_EVERY: u64 = 100 * MILLISECOND;
    /// Four heartbeats.
    pub const RETURNS_AFTER: u64 = 4 * ServerConfig::HEARTBEAT_EVERY;
    /// See [`ServerConfig::stand_ins`]: the number in daemons and simulations. With racks of 32, 256 slots and the longest blocks they
    /// take 1.2 GB.
    pub const STAND_INS: usize = 16;
}

impl ServerConfig {
    /// The most bytes that a server takes: blocks of its children and their sums, those that it holds, the largest tables with which it may have to stand
    /// in, and for each node what it knows of it. Lists of nodes that wait for results are not counted.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        fn walk(children: &[Node], full: &mut Vec<usize>, others: &mut Vec<usize>) {
            for node in children {
                if let Node::Aggregator { is_full, children, .. } = node {
                    if *is_full { &mut *full } else { &mut *others }.push(children.len());
                    walk(children, full, others);
                }
            }
        }
        let (mut full, mut others) = (Vec::new(), Vec::new());
        walk(&self.tree.children, &mut full, &mut others);
        let nodes = (self.workers.len() + full.len() + others.len()).saturating_mul(NODE_BYTES);
        full.sort_unstable_by(|a, b| b.cmp(a));
        let tables = others.iter().chain(full.iter().take(self.stand_ins));
        let bytes = |children: usize| Table::server_bytes(self.window, self.block_bytes, children);
        let slots = (self.window as usize).saturating_mul(size_of::<Slot>() + size_of::<Recovery>());
        let held = (self.held_blocks.unwrap_or(0) as usize).saturating_mul(self.block_bytes + HELD_BYTES);
        let own = bytes(self.tree.children.len()).saturating_add(slots).saturating_add(nodes).saturating_add(held);
        tables.fold(own, |all, table| all.saturating_add(bytes(*table)))
    }
}

/// What a server and its daemon keep of a node: its addresses (up to 16), its place in the tree, what was heard of it.
const NODE_BYTES: usize = 4096;
/// What a server knows of a block that it holds.
const HELD_BYTES: usize = size_of::<super::Block>() * 4;
