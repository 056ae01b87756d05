//! The trees that the model check walks.

use super::{RACK, ROW};
use crate::{Endpoint, Node, Tree};

/// Which node sends to which. Endpoints are numbered in this order: workers 0 and 1, aggregators from below, server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// Both workers below an aggregator.
    Rack,
    /// Worker 0 below an aggregator, worker 1 straight below the server.
    Beside,
    /// Worker 0 below an aggregator, which stands beside worker 1 below another one.
    Row,
    /// Worker 0 below an aggregator below another one, worker 1 straight below the server.
    Chain,
}

impl Shape {
    /// The number of nodes.
    pub(super) fn nodes(self) -> usize {
        if matches!(self, Shape::Row | Shape::Chain) { 5 } else { 4 }
    }

    pub(super) fn server(self) -> Endpoint {
        Endpoint(self.nodes() as u32 - 1)
    }

    /// The node above a node, and the node's name there.
    pub(super) fn above(self, node: Endpoint) -> (Endpoint, u64) {
        match (self, node) {
            (Shape::Rack, Endpoint(1)) => (RACK, 0b10),
            (Shape::Beside | Shape::Chain, Endpoint(1)) => (self.server(), 0b10),
            (Shape::Row, Endpoint(1)) => (ROW, 0b10),
            (Shape::Row | Shape::Chain, RACK) => (ROW, 0b1),
            (_, Endpoint(0)) => (RACK, 0b1),
            _ => (self.server(), 0b1),
        }
    }

    pub(super) fn tree(self) -> Tree {
        fn children(shape: Shape, above: Endpoint) -> Vec<Node> {
            let below = |node: &Endpoint| shape.above(*node).0 == above;
            let mut all: Vec<Endpoint> = (0..shape.nodes() as u32 - 1).map(Endpoint).filter(below).collect();
            all.sort_by_key(|node| shape.above(*node).1);
            all.into_iter()
                .map(|node| match node {
                    Endpoint(worker @ (0 | 1)) => Node::Worker(worker as u16),
                    _ => Node::Aggregator { endpoint: node, is_full: true, children: children(shape, node) },
                })
                .collect()
        }
        Tree { children: children(self, self.server()) }
    }
}
