//! Trees of aggregators, as values.

use crate::random::Random;
use penstock_aggregation::{Endpoint, Node, Tree};

/// Trees that are often wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Workers straight to the server.
    Direct,
    /// One aggregator for all.
    Star,
    /// Two racks with an aggregator each, straight to the server.
    Racks,
    /// Two racks below a core aggregator.
    Core,
}

impl Shape {
    /// The tree of this shape over workers `0..workers`.
    #[must_use]
    pub fn tree(self, workers: usize) -> Tree {
        let workers = workers as u8;
        let range = |from: u8, to: u8| -> Vec<Node> { (from..to).map(Node::Worker).collect() };
        let racks = || {
            let half = workers / 2;
            [aggregator(0, range(0, half)), aggregator(1, range(half, workers))].concat()
        };
        let children = match self {
            Shape::Direct => range(0, workers),
            Shape::Star => aggregator(0, range(0, workers)),
            Shape::Racks => racks(),
            Shape::Core => aggregator(2, racks()),
        };
        Tree { children }
    }
}

/// A tree over workers `0..workers`, with aggregators up to `depth` above each other. Some have a single child, and some
/// workers are children of inner aggregators.
#[must_use]
pub fn any_tree(workers: usize, depth: usize, random: &mut Random) -> Tree {
    let workers: Vec<u8> = (0..workers as u8).collect();
    let mut count = 0;
    Tree { children: grow(&workers, depth, random, &mut count) }
}

/// Children of a node above these workers.
fn grow(workers: &[u8], depth: usize, random: &mut Random, count: &mut u32) -> Vec<Node> {
    let mut children = Vec::new();
    let mut rest = workers;
    while !rest.is_empty() {
        let (part, others) = rest.split_at(1 + random.below(rest.len() as u64) as usize);
        rest = others;
        if depth == 0 || random.below(4) == 0 {
            children.extend(part.iter().map(|worker| Node::Worker(*worker)));
            continue;
        }
        let number = *count;
        *count += 1;
        children.extend(aggregator(number, grow(part, depth - 1, random, count)));
    }
    children
}

/// No node if it has no children.
fn aggregator(number: u32, children: Vec<Node>) -> Vec<Node> {
    if children.is_empty() { Vec::new() } else { vec![Node::Aggregator { endpoint: Endpoint(number), children }] }
}

/// The numbers of a tree's aggregators.
pub(super) fn aggregators(tree: &Tree) -> Vec<u32> {
    fn walk(nodes: &[Node], numbers: &mut Vec<u32>) {
        for node in nodes {
            if let Node::Aggregator { endpoint, children } = node {
                numbers.push(endpoint.0);
                walk(children, numbers);
            }
        }
    }
    let mut numbers = Vec::new();
    walk(&tree.children, &mut numbers);
    numbers
}

/// The tree without the other workers, and without aggregators that lose all of theirs.
pub(super) fn prune(tree: &Tree, workers: u64) -> Tree {
    fn walk(nodes: &[Node], workers: u64) -> Vec<Node> {
        let kept = nodes.iter().filter(|node| node.workers() & workers != 0);
        kept.map(|node| match node {
            Node::Worker(worker) => Node::Worker(*worker),
            Node::Aggregator { endpoint, children } => {
                Node::Aggregator { endpoint: *endpoint, children: walk(children, workers) }
            }
        })
        .collect()
    }
    Tree { children: walk(&tree.children, workers) }
}
