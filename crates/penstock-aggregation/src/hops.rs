//! A job's tree as a list of hops: the server and every aggregator, each with its children and their names.

use super::Endpoint;
use super::tree::{Node, Tree};
use std::collections::HashMap;

/// What the bitmaps of a job's packets name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// The job's workers, the same at every hop: for at most 64 workers.
    Workers,
    /// The children of one hop, from left to right.
    Children,
}

/// A node that adds: the server, which is number [`ROOT`], or an aggregator.
#[derive(Clone, Debug)]
pub(crate) struct Hop {
    /// The endpoint of the aggregator.
    pub(crate) endpoint: Endpoint,
    /// The hop above, and the place among its children.
    pub(crate) parent: (usize, usize),
    /// The names of all children together.
    pub(crate) all: u64,
    /// Whether it adds floats, and takes from the server what a bypassed child would have sent.
    pub(crate) is_full: bool,
    pub(crate) kids: Vec<Kid>,
}

/// A child of a hop.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kid {
    pub(crate) endpoint: Endpoint,
    /// The number of its own hop; `None`: it is a worker.
    pub(crate) hop: Option<usize>,
    pub(crate) name: u64,
}

/// The number of the server's hop.
pub(crate) const ROOT: usize = 0;

/// The hops of a tree, each before those below it, and for each endpoint the hop above it and its place there.
#[derive(Clone, Debug)]
pub(crate) struct Hops {
    pub(crate) list: Vec<Hop>,
    pub(crate) places: HashMap<Endpoint, (usize, usize)>,
}

impl Hops {
    /// `workers` has the address of each worker.
    ///
    /// # Panics
    /// If a worker has no address, or bitmaps cannot name the workers.
    pub(crate) fn new(tree: &Tree, workers: &[Endpoint], naming: Naming) -> Hops {
        let mut hops = Hops { list: Vec::new(), places: HashMap::new() };
        hops.add(Endpoint(u32::MAX), true, (ROOT, 0), &tree.children, workers, naming);
        hops
    }

    fn add(
        &mut self,
        endpoint: Endpoint,
        is_full: bool,
        parent: (usize, usize),
        children: &[Node],
        workers: &[Endpoint],
        naming: Naming,
    ) -> usize {
        let number = self.list.len();
        self.list.push(Hop { endpoint, parent, all: 0, is_full, kids: Vec::new() });
        for (place, node) in children.iter().enumerate() {
            let name = match naming {
                Naming::Children => 1 << place,
                Naming::Workers => node.workers().into_iter().fold(0, |all, worker| {
                    assert!(worker < 64, "worker {worker} does not fit a bitmap of 64 workers");
                    all | 1 << worker
                }),
            };
            let (endpoint, hop) = match node {
                Node::Worker(worker) => (workers[usize::from(*worker)], None),
                Node::Aggregator { endpoint, is_full, children } => {
                    let below = self.add(*endpoint, *is_full, (number, place), children, workers, naming);
                    (*endpoint, Some(below))
                }
            };
            self.places.insert(endpoint, (number, place));
            self.list[number].kids.push(Kid { endpoint, hop, name });
            self.list[number].all |= name;
        }
        number
    }

    pub(crate) fn kid(&self, (hop, place): (usize, usize)) -> &Kid {
        &self.list[hop].kids[place]
    }

    /// The child of the server that is a node, or has it below it.
    pub(crate) fn top_of(&self, mut place: (usize, usize)) -> usize {
        while place.0 != ROOT {
            place = self.list[place.0].parent;
        }
        place.1
    }
}
