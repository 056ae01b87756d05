//! What the engine tells of itself.

use super::Runtime;
use super::host::Body;
use super::local::PeerMemory;
use crate::buffers::Kept;
use crate::stats::{ChannelStats, GroupStats, Held, PeerStats, Stats};
use penstock_net::Peers;
use penstock_stream::peer::Peer;
use penstock_types::{ChannelId, PeerId};
use std::sync::atomic::Ordering;

impl Runtime {
    pub(super) fn held(&self, peers: &Peers) -> Held {
        let machines = || (0..self.local.peers.len()).map(|peer| peers.look(peer as PeerId));
        let descriptors =
            |info: &PeerMemory| info.offered.values().flatten().count() + info.withdrawn.len() + info.descriptors.len();
        let early = self.groups.early();
        Held {
            groups: self.groups.iter().count() as u64,
            channels: self.groups.iter().map(|group| group.known_channels() as u64 - 1).sum(),
            operations: self.groups.iter().map(|group| group.operations() as u64).sum(),
            claims: early.claims() as u64,
            closed_ranges: self.groups.closed_ranges() as u64,
            jobs: self.groups.jobs() as u64,
            early_messages: early.len() as u64,
            early_bytes: early.payloads().map(|payload| payload.bytes() as u64).sum(),
            remembered_operations: machines().map(|machine| machine.remembered() as u64).sum(),
            unacknowledged_messages: machines().map(|machine| machine.unacknowledged() as u64).sum(),
            credit_bytes: machines().map(Peer::credit_in_use).sum(),
            mappings: self.local.peers.iter().map(|info| info.mappings.len() as u64).sum(),
            descriptors: self.local.peers.iter().map(|info| descriptors(info) as u64).sum::<u64>()
                + self.local.regions.len() as u64,
        }
    }

    pub(super) fn stats(&self, peers: &Peers) -> Stats {
        let held: usize = self.groups.early().payloads().map(Kept::bytes).sum();
        let operations: usize = self.groups.iter().flat_map(|group| group.running()).map(Body::memory_bytes).sum();
        let copied: usize = (0..self.local.peers.len()).map(|peer| peers.look(peer as PeerId).copied_bytes()).sum();
        Stats {
            held: self.held(peers),
            finished_operations: self.groups.finished(),
            memory_bytes: (held + operations + copied + peers.buffer_bytes()) as u64,
            memory_read_bytes: self.local.read.load(Ordering::Relaxed),
            threads: peers.threads().to_vec(),
            groups: self
                .groups
                .iter()
                .map(|group| GroupStats {
                    channels: group
                        .channels()
                        .filter(|(id, _)| *id != ChannelId::MAIN)
                        .map(|(id, channel)| ChannelStats {
                            name: channel.name().to_string(),
                            issued: channel.collectives(),
                            active: group.operations_in(id) as u64,
                            algorithm: channel.last_algorithm().to_owned(),
                            failed: channel.failure().map(ToString::to_string),
                        })
                        .collect(),
                    name: group.name().to_string(),
                    rank: group.members().rank(),
                    world: group.members().world(),
                    issued: group.collectives(),
                    active: group.operations_in(ChannelId::MAIN) as u64,
                    algorithm: group.main().last_algorithm().to_owned(),
                    failed: group.failure().map(ToString::to_string),
                })
                .collect(),
            peers: (0..self.local.peers.len())
                .map(|peer| {
                    let info = &self.local.peers[peer];
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
                        memory_read_bytes: info.read.load(Ordering::Relaxed),
                        lost: self.groups.why_lost(peer as PeerId).map(str::to_owned),
                        streams: machine.stats(),
                    }
                })
                .collect(),
        }
    }
}
