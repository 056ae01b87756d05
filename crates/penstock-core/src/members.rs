//! Who is in a group.

use crate::name::OpId;
use penstock_stream::MessageKey;
use penstock_types::PeerId;
use std::collections::HashMap;

/// The ranks of a group, as one of them sees it.
#[derive(Clone, Debug)]
pub struct Members {
    rank: u32,
    /// By rank; `None` for this one.
    peers: Vec<Option<PeerId>>,
    ranks: HashMap<PeerId, u32>,
}

impl Members {
    /// The peer of every rank, and `None` for this one.
    ///
    /// # Panics
    /// Without a rank of our own.
    #[must_use]
    pub fn new(peers: Vec<Option<PeerId>>) -> Members {
        let rank = peers.iter().position(Option::is_none).expect("this process is a member") as u32;
        let ranks = (0..).zip(&peers).filter_map(|(rank, peer)| peer.map(|peer| (peer, rank))).collect();
        Members { rank, peers, ranks }
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn world(&self) -> u32 {
        self.peers.len() as u32
    }

    /// The peer of a rank; `None` for this one, and for those that there are not.
    #[must_use]
    pub fn peer(&self, rank: u32) -> Option<PeerId> {
        *self.peers.get(rank as usize)?
    }

    /// The rank of a peer, if it is in the group.
    #[must_use]
    pub fn rank_of(&self, peer: PeerId) -> Option<u32> {
        self.ranks.get(&peer).copied()
    }

    /// The other ranks and their peers, in order.
    pub fn others(&self) -> impl Iterator<Item = (u32, PeerId)> {
        (0..).zip(&self.peers).filter_map(|(rank, peer)| peer.map(|peer| (rank, peer)))
    }

    /// The other ranks' peers, in order.
    pub fn peers(&self) -> impl Iterator<Item = PeerId> {
        self.peers.iter().flatten().copied()
    }

    /// The rank of a peer and the operation, as this rank calls it, that a key names between the two.
    #[must_use]
    pub fn operation(&self, peer: PeerId, key: &MessageKey) -> Option<(u32, OpId)> {
        let other = self.rank_of(peer)?;
        Some((other, OpId::of(key, self.rank, other)))
    }
}
