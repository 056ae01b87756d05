//! What a network is made of: hosts, switches, and directed links between them.

use crate::random::mix;
use std::collections::{HashMap, VecDeque};

/// A host or a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

/// A link: one direction between two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u32);

/// How a link behaves. The default carries everything at once, in order.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Link {
    /// Bytes a second; 0 is no limit.
    pub rate: u64,
    /// Time on the way, in nanoseconds.
    pub delay: u64,
    /// Upper bound of a random addition to `delay`. Packets overtake each other, unless `in_order`.
    pub jitter: u64,
    /// A packet waits for those that were sent before it, as on one connection.
    pub in_order: bool,
    /// How many bytes may wait at the sending end, with what is left of the packet that is being sent. A packet beyond is
    /// dropped. 0 is no limit.
    pub queue_bytes: u64,
    /// Flows with something to send have equal shares of the rate. Otherwise packets leave in the order of their arrival, so a
    /// flow that sends more has a larger share.
    pub fair: bool,
    /// Probability that a packet is lost. It has used the link's rate by then.
    pub loss: f64,
    /// Probability that a packet arrives twice. The duplicate has a jitter of its own, and uses none of the link's rate.
    pub duplicate: f64,
    /// Probability that a packet is held back by `late_by` nanoseconds more, so that later packets overtake it.
    pub late: f64,
    /// How long a packet that is `late` is held back, in nanoseconds.
    pub late_by: u64,
}

/// Hosts, switches and links. Packets end at hosts; switches pass them on.
#[derive(Clone, Debug, Default)]
pub struct Topology {
    pub(super) is_switch: Vec<bool>,
    pub(super) links: Vec<(NodeId, NodeId, Link)>,
    /// By node: the links that begin there, and those that end there.
    leaving: Vec<Vec<LinkId>>,
    entering: Vec<Vec<LinkId>>,
}

impl Topology {
    /// A node at which packets begin and end. It passes none on.
    pub fn add_host(&mut self) -> NodeId {
        self.add(false)
    }

    /// A node that passes packets on.
    pub fn add_switch(&mut self) -> NodeId {
        self.add(true)
    }

    fn add(&mut self, is_switch: bool) -> NodeId {
        self.is_switch.push(is_switch);
        self.leaving.push(Vec::new());
        self.entering.push(Vec::new());
        NodeId(self.is_switch.len() as u32 - 1)
    }

    /// A link from one node to another. Two nodes may have several.
    pub fn add_link(&mut self, from: NodeId, to: NodeId, link: Link) -> LinkId {
        let id = LinkId(self.links.len() as u32);
        self.links.push((from, to, link));
        self.leaving[from.0 as usize].push(id);
        self.entering[to.0 as usize].push(id);
        id
    }

    /// A link in each direction, the first one from `a` to `b`.
    pub fn join(&mut self, a: NodeId, b: NodeId, link: Link) -> [LinkId; 2] {
        [self.add_link(a, b, link), self.add_link(b, a, link)]
    }

    /// `count` hosts around a switch.
    #[must_use]
    pub fn star(count: usize, link: Link) -> (Topology, Vec<NodeId>) {
        Topology::racks(1, count, link, Link::default())
    }

    /// Racks of `hosts` hosts each, around a core switch. Hosts are numbered rack by rack. A single rack has no core.
    #[must_use]
    pub fn racks(racks: usize, hosts: usize, access: Link, uplink: Link) -> (Topology, Vec<NodeId>) {
        let mut topology = Topology::default();
        let core = (racks > 1).then(|| topology.add_switch());
        let mut all = Vec::with_capacity(racks * hosts);
        for _ in 0..racks {
            let switch = topology.add_switch();
            if let Some(core) = core {
                topology.join(switch, core, uplink);
            }
            for _ in 0..hosts {
                let host = topology.add_host();
                topology.join(host, switch, access);
                all.push(host);
            }
        }
        (topology, all)
    }

    /// How many nodes there are.
    #[must_use]
    pub fn node_count(&self) -> usize {
        self.is_switch.len()
    }

    /// All links, in the order in which they were added.
    pub fn links(&self) -> impl Iterator<Item = LinkId> {
        (0..self.links.len() as u32).map(LinkId)
    }

    /// The ends of a link.
    #[must_use]
    pub fn ends(&self, link: LinkId) -> [NodeId; 2] {
        let (from, to, _) = self.links[link.0 as usize];
        [from, to]
    }

    /// How a link behaves, as it was added.
    #[must_use]
    pub fn link(&self, link: LinkId) -> Link {
        self.links[link.0 as usize].2
    }

    /// The links of a shortest path, in order; `None` if there is no path. Of several, `choice` takes one, as a switch does by
    /// a flow's hash.
    #[must_use]
    pub fn path(&self, from: NodeId, to: NodeId, choice: u64) -> Option<Vec<LinkId>> {
        self.follow(&self.distances(to), from, to, choice)
    }

    /// By node: the number of links on the shortest path to `to`.
    fn distances(&self, to: NodeId) -> Vec<u32> {
        let mut distances = vec![u32::MAX; self.node_count()];
        distances[to.0 as usize] = 0;
        let mut next = VecDeque::from([to]);
        while let Some(node) = next.pop_front() {
            for link in &self.entering[node.0 as usize] {
                let (before, ..) = self.links[link.0 as usize];
                if distances[before.0 as usize] == u32::MAX {
                    distances[before.0 as usize] = distances[node.0 as usize] + 1;
                    // A host is the beginning of paths, and no part of other nodes' paths.
                    if self.is_switch[before.0 as usize] {
                        next.push_back(before);
                    }
                }
            }
        }
        distances
    }

    fn follow(&self, distances: &[u32], from: NodeId, to: NodeId, choice: u64) -> Option<Vec<LinkId>> {
        let mut path = Vec::new();
        let mut node = from;
        while node != to {
            let left = distances[node.0 as usize];
            if left == u32::MAX {
                return None;
            }
            let is_next = |link: &&LinkId| {
                let (from, to, _) = self.links[link.0 as usize];
                from == node && distances[to.0 as usize] == left - 1 && (left == 1 || self.is_switch[to.0 as usize])
            };
            // In either list the links are in the order in which they were added. A switch may have thousands, a host has few.
            let links = if left == 1 { &self.entering[to.0 as usize] } else { &self.leaving[node.0 as usize] };
            let count = links.iter().filter(is_next).count() as u64;
            let taken = mix(choice ^ mix(u64::from(node.0))) % count.max(1);
            let link = *links.iter().filter(is_next).nth(taken as usize)?;
            path.push(link);
            node = self.links[link.0 as usize].1;
        }
        Some(path)
    }
}

/// Paths of a topology, with what was computed for earlier ones: a breadth-first search for each destination, once.
#[derive(Clone, Debug, Default)]
pub(super) struct Routes {
    distances: HashMap<NodeId, Vec<u32>>,
}

impl Routes {
    pub(super) fn path(&mut self, topology: &Topology, from: NodeId, to: NodeId, choice: u64) -> Option<Vec<LinkId>> {
        let distances = self.distances.entry(to).or_insert_with(|| topology.distances(to));
        topology.follow(distances, from, to, choice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Paths are shortest, lead through switches only, and where there are several the choice decides.
    #[test]
    fn paths() {
        let mut topology = Topology::default();
        let [a, b, island] = [0; 3].map(|_| topology.add_host());
        let [left, one, two, right] = [0; 4].map(|_| topology.add_switch());
        topology.join(a, left, Link::default());
        for middle in [one, two] {
            topology.join(left, middle, Link::default());
            topology.join(middle, right, Link::default());
        }
        topology.join(right, b, Link::default());
        // A host with two links is no shorter way for others.
        let bridge = topology.add_host();
        topology.join(left, bridge, Link::default());
        topology.join(bridge, right, Link::default());
        let mut taken: Vec<Vec<LinkId>> = (0..64).map(|choice| topology.path(a, b, choice).unwrap()).collect();
        taken.sort();
        taken.dedup();
        assert_eq!(taken.len(), 2);
        for path in taken {
            let nodes: Vec<NodeId> = path.iter().map(|link| topology.ends(*link)[1]).collect();
            assert!(nodes == [left, one, right, b] || nodes == [left, two, right, b], "{nodes:?}");
            assert!(path.windows(2).all(|pair| topology.ends(pair[0])[1] == topology.ends(pair[1])[0]));
        }
        assert_eq!(topology.path(a, a, 0), Some(Vec::new()));
        assert_eq!(topology.path(a, island, 0), None);
        assert_eq!(topology.path(island, a, 0), None);
    }

    /// Racks below a core: two links within a rack, four between racks.
    #[test]
    fn racks() {
        let (topology, hosts) = Topology::racks(3, 2, Link::default(), Link::default());
        let length = |a: usize, b: usize| topology.path(hosts[a], hosts[b], 0).unwrap().len();
        assert_eq!((hosts.len(), length(0, 1), length(0, 2), length(5, 0)), (6, 2, 4, 4));
        let (star, hosts) = Topology::star(3, Link::default());
        assert_eq!((star.node_count(), star.path(hosts[0], hosts[2], 9).unwrap().len()), (4, 2));
    }
}
