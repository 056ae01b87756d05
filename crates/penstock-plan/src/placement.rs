//! Which ranks share a host, and what lies between the others: [`Placement`].

use std::sync::Arc;

/// Which ranks of a group share a host: each pair of them reaches the other through memory, any other pair through a
/// network. Equal where the same ranks are together; a copy is cheap.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Placement {
    /// The host of each rank. Hosts are numbered in the order of their lowest ranks.
    hosts: Arc<[u32]>,
    /// By server: its part of each tensor, as a weight.
    servers: Arc<[u32]>,
}

impl Placement {
    /// `hosts[r]` is any number that stands for the host of rank `r`.
    #[must_use]
    pub fn new(hosts: &[u32]) -> Placement {
        let mut known: Vec<u32> = Vec::new();
        let number = |host: &u32| {
            known.iter().position(|other| other == host).unwrap_or_else(|| {
                known.push(*host);
                known.len() - 1
            }) as u32
        };
        Placement { hosts: hosts.iter().map(number).collect(), servers: Arc::default() }
    }

    /// `world` ranks on one host.
    #[must_use]
    pub fn one_host(world: u32) -> Placement {
        Placement { hosts: vec![0; world as usize].into(), servers: Arc::default() }
    }

    /// `world` ranks, each on a host of its own.
    #[must_use]
    pub fn separate_hosts(world: u32) -> Placement {
        Placement { hosts: (0..world).collect(), servers: Arc::default() }
    }

    /// The same ranks, with servers that add for them; `weights[s] / sum(weights)` of each tensor is server `s`'s.
    ///
    /// # Panics
    /// If the weights are all 0.
    #[must_use]
    pub fn with_servers(self, weights: &[u32]) -> Placement {
        assert!(weights.iter().any(|weight| *weight > 0), "somebody has to add");
        Placement { servers: weights.into(), ..self }
    }

    /// The weights of the servers; empty where there are none.
    #[must_use]
    pub fn servers(&self) -> &[u32] {
        &self.servers
    }

    /// The host of each rank; hosts are numbered in the order of their lowest ranks.
    #[must_use]
    pub fn hosts(&self) -> &[u32] {
        &self.hosts
    }

    /// Ranks in the group.
    #[must_use]
    pub fn world(&self) -> u32 {
        self.hosts.len() as u32
    }

    /// Whether two ranks reach each other through memory.
    #[must_use]
    pub fn share_host(&self, a: u32, b: u32) -> bool {
        self.hosts[a as usize] == self.hosts[b as usize]
    }

    /// The host of a rank, as a number below [`Placement::host_count`].
    #[must_use]
    pub fn host(&self, rank: u32) -> u32 {
        self.hosts[rank as usize]
    }

    /// The ranks of a host, in rank order.
    #[must_use]
    pub fn members(&self, host: u32) -> Vec<u32> {
        (0..self.world()).filter(|&rank| self.hosts[rank as usize] == host).collect()
    }

    /// What the group's messages go through. One pair of ranks on different hosts makes it the wire: an algorithm runs
    /// at the pace of its slowest pair.
    #[must_use]
    pub fn medium(&self) -> Medium {
        if self.host_count() <= 1 { Medium::Memory } else { Medium::Wire }
    }

    /// Whether some ranks share a host and others do not.
    #[must_use]
    pub fn is_mixed(&self) -> bool {
        (2..self.world()).contains(&self.host_count())
    }

    /// How many hosts there are.
    #[must_use]
    pub fn host_count(&self) -> u32 {
        self.hosts.iter().max().map_or(0, |last| last + 1)
    }
}

/// What carries the messages of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Medium {
    /// All ranks share a host: a message may be a reference that the peer reads through, so holding one costs nothing.
    Memory,
    /// At least one pair of ranks is joined by a network: a message that is held takes memory of the receiver.
    Wire,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A placement says who is together, whatever the hosts are called.
    #[test]
    fn hosts_have_no_names() {
        let placement = Placement::new(&[7, 3, 7, 9]);
        assert_eq!(placement, Placement::new(&[1, 2, 1, 0]));
        assert_ne!(placement, Placement::new(&[1, 2, 2, 0]));
        assert_eq!((0..3).map(|host| placement.members(host)).collect::<Vec<_>>(), [vec![0, 2], vec![1], vec![3]]);
        assert!(placement.share_host(0, 2) && !placement.share_host(0, 1));
        assert_eq!((placement.host_count(), Placement::new(&[]).host_count()), (3, 0));
        assert_eq!(Placement::separate_hosts(3), Placement::new(&[5, 4, 6]));
    }
}
