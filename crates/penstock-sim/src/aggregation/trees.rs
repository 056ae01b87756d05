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
    /// Racks of 32 workers, and an aggregator above each 32 racks: for thousands of workers.
    Rows,
}

impl Shape {
    /// The tree of this shape over workers `0..workers`.
    #[must_use]
    pub fn tree(self, workers: usize) -> Tree {
        let workers = workers as u16;
        let range = |from: u16, to: u16| -> Vec<Node> { (from..to).map(Node::Worker).collect() };
        let racks = || {
            let half = workers / 2;
            [aggregator(0, range(0, half)), aggregator(1, range(half, workers))].concat()
        };
        let children = match self {
            Shape::Direct => range(0, workers),
            Shape::Star => aggregator(0, range(0, workers)),
            Shape::Racks => racks(),
            Shape::Core => aggregator(2, racks()),
            Shape::Rows => {
                let mut numbers = 0..;
                let mut number = || numbers.next().expect("there is no last one");
                let starts: Vec<u16> = (0..workers).step_by(32).collect();
                let racks: Vec<Node> = starts
                    .iter()
                    .flat_map(|start| aggregator(number(), range(*start, workers.min(start + 32))))
                    .collect();
                racks.chunks(32).flat_map(|row| aggregator(number(), row.to_vec())).collect()
            }
        };
        Tree { children }
    }
}

/// A tree over workers `0..workers`, with aggregators up to `depth` above each other. Some have a single child, and some
/// workers are children of inner aggregators.
#[must_use]
pub fn any_tree(workers: usize, depth: usize, random: &mut Random) -> Tree {
    let workers: Vec<u16> = (0..workers as u16).collect();
    let mut count = 0;
    Tree { children: grow(&workers, depth, random, &mut count) }
}

/// Children of a node above these workers.
fn grow(workers: &[u16], depth: usize, random: &mut Random, count: &mut u32) -> Vec<Node> {
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
    if children.is_empty() {
        return Vec::new();
    }
    vec![Node::Aggregator { endpoint: Endpoint(number), is_full: true, children }]
}

/// The numbers of a tree's aggregators.
pub(super) fn aggregators(tree: &Tree) -> Vec<u32> {
    fn walk(nodes: &[Node], numbers: &mut Vec<u32>) {
        for node in nodes {
            if let Node::Aggregator { endpoint, children, .. } = node {
                numbers.push(endpoint.0);
                walk(children, numbers);
            }
        }
    }
    let mut numbers = Vec::new();
    walk(&tree.children, &mut numbers);
    numbers
}

/// The tree without workers that are not `alive`, and without aggregators that lose all of theirs. `is_full` says which of the
/// aggregators add floats.
pub(super) fn prune(tree: &Tree, alive: &[bool], is_full: &impl Fn(u32) -> bool) -> Tree {
    fn walk(nodes: &[Node], alive: &[bool], is_full: &impl Fn(u32) -> bool) -> Vec<Node> {
        let mut kept = Vec::new();
        for node in nodes {
            match node {
                Node::Worker(worker) if alive[usize::from(*worker)] => kept.push(node.clone()),
                Node::Worker(_) => {}
                Node::Aggregator { endpoint, children, .. } => {
                    let children = walk(children, alive, is_full);
                    if !children.is_empty() {
                        kept.push(Node::Aggregator { endpoint: *endpoint, is_full: is_full(endpoint.0), children });
                    }
                }
            }
        }
        kept
    }
    Tree { children: walk(&tree.children, alive, is_full) }
}

/// By worker: the aggregator above it, if there is one, and its place among that one's children, or the server's.
pub(super) fn places(tree: &Tree, workers: usize) -> Vec<(Option<Endpoint>, usize)> {
    fn walk(nodes: &[Node], above: Option<Endpoint>, places: &mut [(Option<Endpoint>, usize)]) {
        for (place, node) in nodes.iter().enumerate() {
            match node {
                Node::Worker(worker) => places[usize::from(*worker)] = (above, place),
                Node::Aggregator { endpoint, children, .. } => walk(children, Some(*endpoint), places),
            }
        }
    }
    let mut places = vec![(None, 0); workers];
    walk(&tree.children, None, &mut places);
    places
}
