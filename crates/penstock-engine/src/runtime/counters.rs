//! What the engine tells of itself.

use super::group::Active;
use super::sharing::PeerInfo;
use super::{JOIN_OPS, Runtime};
use crate::execution::Kept;
use crate::scale::Scale;
use crate::stats::{GroupStats, Held, PeerStats, Stats};
use penstock_net::Peers;
use penstock_stream::peer::Peer;
use penstock_types::PeerId;

impl Runtime {
    pub(super) fn held(&self, peers: &Peers) -> Held {
        let machines = || (0..self.peers.len()).map(|peer| peers.look(peer as PeerId));
        let descriptors = |info: &PeerInfo| info.offered.values().flatten().count() + info.descriptors.len();
        Held {
            groups: self.groups.len() as u64,
            operations: self.groups.values().map(|group| group.operations() as u64).sum(),
            claims: self.early.claims() as u64,
            closed_ranges: self.closed.count() as u64,
            jobs: self.jobs.len() as u64,
            early_messages: self.early.len() as u64,
            early_bytes: self.early.payloads().map(|payload| payload.bytes() as u64).sum(),
            remembered_operations: machines().map(|machine| machine.remembered() as u64).sum(),
            unacknowledged_messages: machines().map(|machine| machine.unacknowledged() as u64).sum(),
            credit_bytes: machines().map(Peer::credit_in_use).sum(),
            mappings: self.peers.iter().map(|info| info.mappings.len() as u64).sum(),
            descriptors: self.peers.iter().map(|info| descriptors(info) as u64).sum::<u64>()
                + self.regions.len() as u64,
        }
    }

    pub(super) fn stats(&self, peers: &Peers) -> Stats {
        let held: usize = self.early.payloads().map(Kept::bytes).sum();
        let of =
            |active: &Active| active.execution.memory_bytes() + active.scale.as_ref().map_or(0, Scale::memory_bytes);
        let operations: usize = self.groups.values().flat_map(|group| group.ops.values()).map(of).sum();
        let copied: usize = (0..self.peers.len()).map(|peer| peers.look(peer as PeerId).copied_bytes()).sum();
        Stats {
            held: self.held(peers),
            finished_operations: self.finished,
            memory_bytes: (held + operations + copied + peers.buffer_bytes()) as u64,
            groups: self
                .groups
                .values()
                .map(|group| GroupStats {
                    name: group.name.to_string(),
                    rank: group.members.rank(),
                    world: group.members.world(),
                    issued: group.issued.collectives.saturating_sub(JOIN_OPS),
                    active: (group.ops.len() + group.unbound.iter().count()) as u64,
                    algorithm: group.last_algorithm.clone(),
                    failed: group.failed.as_ref().map(ToString::to_string),
                })
                .collect(),
            peers: (0..self.peers.len())
                .map(|peer| {
                    let info = &self.peers[peer];
                    let machine = peers.look(peer as PeerId);
                    PeerStats {
                        rank: info.contact.rank,
                        host: info.contact.host.clone(),
                        address: info.contact.tcp.first().map(ToString::to_string).unwrap_or_default(),
                        medium: match (info.local, machine.config().references) {
                            (true, true) => "memory",
                            (true, false) => "local socket",
                            (false, _) => "tcp",
                        },
                        lost: info.lost.clone(),
                        streams: machine.stats(),
                    }
                })
                .collect(),
        }
    }
}
