//! A job's tree: which node sends to which, and hence the order in which floats are added.

use super::Endpoint;
use std::collections::HashSet;
use std::fmt;

/// A child of the server or of an aggregator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Node {
    /// A worker, by its number in the job.
    Worker(u16),
    /// An aggregator with what is below it.
    Aggregator {
        /// The endpoint of the aggregator, as the server numbers it.
        endpoint: Endpoint,
        /// It adds floats, takes from the server what a bypassed child would have sent, and goes to the server itself while its
        /// parent is bypassed. Otherwise (a switch) blocks that are not finite go past it to the server, and it is bypassed
        /// together with its parent, and with any aggregator below it.
        is_full: bool,
        /// The nodes whose pushes it adds, in the order of addition.
        children: Vec<Node>,
    },
}

impl Node {
    /// The workers at or below it, from left to right.
    #[must_use]
    pub fn workers(&self) -> Vec<u16> {
        fn walk(node: &Node, all: &mut Vec<u16>) {
            match node {
                Node::Worker(worker) => all.push(*worker),
                Node::Aggregator { children, .. } => children.iter().for_each(|child| walk(child, all)),
            }
        }
        let mut all = Vec::new();
        walk(self, &mut all);
        all
    }
}

/// A job's tree, as the server sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tree {
    /// The server's children, in the order of addition.
    pub children: Vec<Node>,
}

/// The most children of a node: the bits of a packet's bitmap.
pub const MAX_CHILDREN: usize = 64;
/// The most workers of a job. Sums of integers of 32 bits keep 19 bits of each worker's elements then.
pub const MAX_WORKERS: usize = 4096;
/// The most aggregators of a job: with 4,096 workers and two children each there are 4,095.
pub(crate) const MAX_AGGREGATORS: usize = MAX_WORKERS;
/// The most aggregators above each other.
pub(crate) const MAX_DEPTH: usize = 32;

impl Tree {
    /// All workers, from left to right.
    #[must_use]
    pub fn workers(&self) -> Vec<u16> {
        self.children.iter().flat_map(Node::workers).collect()
    }

    /// Checks that there is a worker, and at most [`MAX_WORKERS`], that each occurs once, that every node has 1 to [`MAX_CHILDREN`]
    /// children, and that there are at most 4,096 aggregators, and 32 above each other.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(&self) -> Result<(), TreeError> {
        fn walk(
            nodes: &[Node],
            depth: usize,
            seen: &mut HashSet<u16>,
            aggregators: &mut usize,
        ) -> Result<(), TreeError> {
            if depth > MAX_DEPTH {
                return Err(TreeError::Depth);
            }
            if nodes.is_empty() {
                return Err(TreeError::Childless);
            }
            if nodes.len() > MAX_CHILDREN {
                return Err(TreeError::Children(nodes.len()));
            }
            for node in nodes {
                match node {
                    Node::Worker(worker) if usize::from(*worker) >= MAX_WORKERS => {
                        return Err(TreeError::Worker(*worker));
                    }
                    Node::Worker(worker) if !seen.insert(*worker) => return Err(TreeError::Twice(*worker)),
                    Node::Worker(_) => {}
                    Node::Aggregator { children, .. } => {
                        *aggregators += 1;
                        if *aggregators > MAX_AGGREGATORS {
                            return Err(TreeError::Aggregators);
                        }
                        walk(children, depth + 1, seen, aggregators)?;
                    }
                }
            }
            Ok(())
        }
        walk(&self.children, 0, &mut HashSet::new(), &mut 0)
    }
}

/// Why not a tree?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TreeError {
    /// A worker's number is [`MAX_WORKERS`] or more.
    Worker(u16),
    /// A worker stands in the tree twice.
    Twice(u16),
    /// A node that should have children has none.
    Childless,
    /// A node has more than [`MAX_CHILDREN`] children.
    Children(usize),
    /// There are more than [`MAX_AGGREGATORS`].
    Aggregators,
    /// More than [`MAX_DEPTH`] aggregators are above each other.
    Depth,
}

impl fmt::Display for TreeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TreeError::Worker(worker) => {
                write!(f, "worker {worker} does not fit a job of at most {MAX_WORKERS} workers")
            }
            TreeError::Twice(worker) => write!(f, "worker {worker} stands twice in the tree"),
            TreeError::Childless => write!(f, "a server or an aggregator without children"),
            TreeError::Children(count) => {
                write!(f, "a node has {count} children; at most {MAX_CHILDREN} are possible: put aggregators between")
            }
            TreeError::Aggregators => write!(f, "more than {MAX_AGGREGATORS} aggregators: a job has at most as many"),
            TreeError::Depth => write!(f, "more than {MAX_DEPTH} aggregators above each other: use a flatter tree"),
        }
    }
}

impl std::error::Error for TreeError {}

#[cfg(test)]
mod tests {
    use super::*;

    /// An invalid tree is refused with the reason.
    #[test]
    fn bad_trees() {
        let rack = |children: Vec<Node>| Node::Aggregator { endpoint: Endpoint(0), is_full: true, children };
        let flat = |workers: std::ops::Range<u16>| workers.map(Node::Worker).collect::<Vec<_>>();
        let check = |children: Vec<Node>| Tree { children }.check();
        assert_eq!(check(flat(0..0)), Err(TreeError::Childless));
        assert_eq!(check(vec![rack(vec![])]), Err(TreeError::Childless));
        assert_eq!(check(vec![Node::Worker(4096)]), Err(TreeError::Worker(4096)));
        assert_eq!(check(vec![Node::Worker(1), rack(vec![Node::Worker(1)])]), Err(TreeError::Twice(1)));
        assert_eq!(check(flat(0..64)), Ok(()));
        assert_eq!(check(flat(0..65)), Err(TreeError::Children(65)));
        let racks: Vec<Node> = (0..64).map(|number| rack(flat(64 * number..64 * number + 64))).collect();
        assert_eq!(check(racks.clone()), Ok(()));
        assert_eq!(Tree { children: racks }.workers(), (0..4096).collect::<Vec<u16>>());
        let chain = |worker, length| (0..length).fold(Node::Worker(worker), |below, _| rack(vec![below]));
        assert_eq!(check(vec![chain(0, MAX_DEPTH)]), Ok(()));
        assert_eq!(check(vec![chain(0, MAX_DEPTH + 1)]), Err(TreeError::Depth));
        let chains = |count: u16| -> Vec<Node> {
            (0..count)
                .step_by(4)
                .map(|at| rack((at..count.min(at + 4)).map(|worker| chain(worker, 31)).collect()))
                .collect()
        };
        assert_eq!((check(chains(128)), check(chains(136))), (Ok(()), Err(TreeError::Aggregators)));
    }
}
