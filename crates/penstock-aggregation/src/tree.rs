//! A job's tree: which node sends to which, and hence the order in which floats are added.

use super::packet::Format;
use super::{Endpoint, arithmetic};
use std::fmt;

/// A child of the server or of an aggregator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Node {
    /// A worker, by its number in the job.
    Worker(u8),
    /// An aggregator with what is below it.
    Aggregator {
        /// The endpoint of the aggregator, as the server numbers it.
        endpoint: Endpoint,
        /// The nodes whose pushes it adds, in the order of addition.
        children: Vec<Node>,
    },
}

impl Node {
    /// The workers at or below it, as a bitmap.
    #[must_use]
    pub fn workers(&self) -> u64 {
        match self {
            Node::Worker(worker) => 1 << worker,
            Node::Aggregator { children, .. } => children.iter().fold(0, |all, child| all | child.workers()),
        }
    }
}

/// A job's tree, as the server sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tree {
    /// The server's children, in the order of addition.
    pub children: Vec<Node>,
}

impl Tree {
    /// All workers, as a bitmap.
    #[must_use]
    pub fn workers(&self) -> u64 {
        self.children.iter().fold(0, |all, child| all | child.workers())
    }

    /// Checks that the workers are 1 to 64, that each occurs once, and that no aggregator is childless.
    pub fn check(&self) -> Result<(), TreeError> {
        fn walk(nodes: &[Node], seen: &mut u64) -> Result<(), TreeError> {
            if nodes.is_empty() {
                return Err(TreeError::Childless);
            }
            for node in nodes {
                match node {
                    Node::Worker(worker) if *worker >= 64 => return Err(TreeError::Worker(*worker)),
                    Node::Worker(worker) if *seen >> worker & 1 == 1 => return Err(TreeError::Twice(*worker)),
                    Node::Worker(worker) => *seen |= 1 << worker,
                    Node::Aggregator { children, .. } => walk(children, seen)?,
                }
            }
            Ok(())
        }
        walk(&self.children, &mut 0)
    }

    /// Adds parts in the order of the tree, as its aggregators would have: within each aggregator first, children from left to
    /// right. Every worker must be in some part. Returns whether an integer overflowed.
    pub(crate) fn sum(&self, format: Format, mut parts: Parts<'_>, sum: &mut [u8]) -> bool {
        if format.is_float() {
            parts.sum_children(&self.children, format, sum);
            return false;
        }
        // Integers and maxima need no order.
        parts.sum(format, sum)
    }
}

/// The blocks that a server has of one SeqNum.
pub(crate) struct Parts<'a> {
    /// The workers of each block: disjoint sets.
    pub(crate) sets: &'a [u64],
    /// A place for every worker; a set's block lies at its lowest worker's place.
    pub(crate) blocks: &'a mut [u8],
    /// The length of a place in bytes.
    pub(crate) block_bytes: usize,
}

impl Parts<'_> {
    /// Adds them in the order of arrival.
    pub(crate) fn sum(&self, format: Format, sum: &mut [u8]) -> bool {
        let length = sum.len();
        let blocks = self.sets.iter().map(|set| self.block(*set, length));
        if format.is_float() {
            arithmetic::sum_floats(format, sum, &blocks.collect::<Vec<_>>());
            return false;
        }
        let mut overflow = false;
        for (i, block) in blocks.enumerate() {
            if i == 0 {
                arithmetic::begin(format, sum, block);
            } else {
                overflow |= arithmetic::add(format, sum, block);
            }
        }
        arithmetic::finish(format, sum);
        overflow
    }

    /// Writes the sum of a node's children into `sum`. The sum that an aggregator below would have sent is computed first, at
    /// the place where it would have been stored.
    fn sum_children(&mut self, nodes: &[Node], format: Format, sum: &mut [u8]) {
        let length = sum.len();
        for node in nodes {
            if let Node::Aggregator { children, .. } = node
                && !self.sets.contains(&node.workers())
            {
                self.sum_children(children, format, sum);
                let place = node.workers().trailing_zeros() as usize * self.block_bytes;
                self.blocks[place..place + length].copy_from_slice(sum);
            }
        }
        let mut all: [&[u8]; 64] = [&[]; 64];
        all.iter_mut().zip(nodes).for_each(|(place, node)| *place = self.block(node.workers(), length));
        arithmetic::sum_floats(format, sum, &all[..nodes.len()]);
    }

    fn block(&self, set: u64, length: usize) -> &[u8] {
        &self.blocks[set.trailing_zeros() as usize * self.block_bytes..][..length]
    }
}

/// Why not a tree?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TreeError {
    /// A worker's number is 64 or more.
    Worker(u8),
    /// A worker stands in the tree twice.
    Twice(u8),
    /// A node that should have children has none.
    Childless,
}

impl fmt::Display for TreeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TreeError::Worker(worker) => write!(f, "worker {worker} does not fit a bitmap of 64 workers"),
            TreeError::Twice(worker) => write!(f, "worker {worker} stands twice in the tree"),
            TreeError::Childless => write!(f, "a server or an aggregator without children"),
        }
    }
}

impl std::error::Error for TreeError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn rack(endpoint: u32, children: Vec<Node>) -> Node {
        Node::Aggregator { endpoint: Endpoint(endpoint), children }
    }

    /// Floats come out the same whether aggregators added them or the server has to, in whatever mixture.
    #[test]
    fn the_same_bits_for_every_mixture() {
        let w = Node::Worker;
        let tree = Tree { children: vec![w(4), rack(1, vec![rack(2, vec![w(0), w(1)]), rack(3, vec![w(2), w(3)])])] };
        assert_eq!(tree.check(), Ok(()));
        let values = [1e8f32, 1.25, -1e8, 3.5, 0.1];
        let pair = |a: usize, b: usize| values[a] + values[b];
        let all = pair(0, 1) + pair(2, 3);
        let expected = values[4] + all;
        let left_to_right = values.iter().sum::<f32>();
        assert_ne!(expected.to_bits(), left_to_right.to_bits(), "values for which the order matters");
        let parts: [(u64, f32); 8] = [
            (1, values[0]),
            (2, values[1]),
            (4, values[2]),
            (8, values[3]),
            (16, values[4]),
            (3, pair(0, 1)),
            (12, pair(2, 3)),
            (15, all),
        ];
        for mixture in [&[0, 1, 2, 3, 4][..], &[5, 2, 3, 4], &[0, 1, 6, 4], &[5, 6, 4], &[7, 4]] {
            let sets: Vec<u64> = mixture.iter().map(|i| parts[*i].0).collect();
            let mut blocks = [0u8; 5 * 4];
            for i in mixture {
                let (set, value) = parts[*i];
                blocks[set.trailing_zeros() as usize * 4..][..4].copy_from_slice(&value.to_be_bytes());
            }
            let mut sum = [0u8; 4];
            tree.sum(Format::F32, Parts { sets: &sets, blocks: &mut blocks, block_bytes: 4 }, &mut sum);
            assert_eq!(f32::from_be_bytes(sum).to_bits(), expected.to_bits(), "{mixture:?}");
        }
    }

    /// An invalid tree is refused with the reason.
    #[test]
    fn bad_trees() {
        let flat = |count: u8| Tree { children: (0..count).map(Node::Worker).collect() };
        assert_eq!(flat(0).check(), Err(TreeError::Childless));
        assert_eq!(Tree { children: vec![rack(0, vec![])] }.check(), Err(TreeError::Childless));
        assert_eq!(Tree { children: vec![Node::Worker(64)] }.check(), Err(TreeError::Worker(64)));
        let twice = Tree { children: vec![Node::Worker(1), rack(0, vec![Node::Worker(1)])] };
        assert_eq!(twice.check(), Err(TreeError::Twice(1)));
        assert_eq!(flat(64).check(), Ok(()));
        assert_eq!(flat(64).workers(), u64::MAX);
    }
}
