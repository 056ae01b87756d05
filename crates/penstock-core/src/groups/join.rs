//! How a group begins: who is in it, who may connect, which ranks share a host.

use super::channel::Channel;
use super::deadlines::seconds;
use super::directory::Admission;
use super::group::{Call, Group, Joining};
use super::host::Host;
use super::{Common, Groups};
use crate::digest::digest;
use crate::members::Members;
use crate::unbound::Unbound;
use penstock_plan::{Algorithm, Collective, Placement};
use penstock_stream::fingerprint::{Fingerprint, Name};
use penstock_stream::handshake::{Hello, NodeKey};
use penstock_stream::ranges::Ranges;
use penstock_types::{ChannelId, DType, Failure, FailureKind, Generation, GroupId, PeerId, Priority, ReduceOp};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// A group to join.
#[derive(Clone, Debug)]
pub struct Join {
    /// The group.
    pub id: GroupId,
    /// The job's generation.
    pub generation: Generation,
    /// The secret that the streams' hand-shakes prove.
    pub secret: Vec<u8>,
    /// A name for logs and errors.
    pub name: Arc<str>,
    /// The peer of every rank, and `None` for this one.
    pub members: Vec<Option<PeerId>>,
    /// How messages call each rank.
    pub who: Vec<Arc<str>>,
    /// The algorithm of all-reduces; `None`: chosen by size and hosts.
    pub algorithm: Option<Algorithm>,
}

impl<B, K> Groups<B, K> {
    /// The peer that a process is, if it is known.
    #[must_use]
    pub fn peer_of(&self, node: &NodeKey) -> Option<PeerId> {
        self.common.directory.known(node)
    }

    /// Whether a stream of a peer has been up.
    #[must_use]
    pub fn is_connected(&self, peer: PeerId) -> bool {
        self.common.directory.peer(peer).connected
    }

    /// A process becomes a peer; `who` is how messages call it. Peers are numbered from 0 on; the number of one that went long ago is
    /// used again ([`Groups::forget_peer`]).
    pub fn add_peer(&mut self, node: NodeKey, who: Arc<str>) -> PeerId {
        self.common.directory.add(node, who)
    }

    /// Joins a group; [`Host::joined`] or [`Host::failed`] follows.
    pub fn join<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, join: Join) {
        let Join { id, generation, secret, name, members, who, algorithm } = join;
        let common = &mut self.common;
        let refused = members.iter().flatten().rev().find_map(|peer| common.directory.peer(*peer).lost.clone());
        common.directory.expect(id, generation, secret, members.iter().flatten().copied());
        common.unjoined.overtaken.forget_group(id);
        let group = Group {
            id,
            channels: BTreeMap::from([(ChannelId::MAIN, Channel::new(name.clone(), algorithm))]),
            closed: Ranges::default(),
            name,
            placement: Placement::separate_hosts(members.len() as u32),
            members: Members::new(members),
            who,
            algorithm,
            ops: HashMap::new(),
            held: HashMap::new(),
            unbound: Unbound::default(),
            joining: Some(Joining::Connects),
            failed: None,
            endings: Vec::new(),
            has_told_priorities: false,
        };
        self.groups.insert(id, group);
        let group = self.groups.get_mut(&id).expect("just inserted");
        match (common.unjoined.reported.take(id), refused) {
            (Some(failure), _) => group.fail(common, host, ChannelId::MAIN, failure, true),
            (None, Some(reason)) => {
                let failure = Failure::fatal(FailureKind::PeerLost, format!("{reason}."));
                group.fail(common, host, ChannelId::MAIN, failure, true);
            }
            (None, None) => group.check_connected(common, host),
        }
    }

    /// An answer to a process that wants a stream in a job.
    #[must_use]
    pub fn admission(&self, hello: &Hello) -> Admission {
        let is_known = self.groups.contains_key(&hello.job) || self.common.unjoined.is_closed(hello.job);
        self.common.directory.admission(hello, is_known)
    }
}

impl<B> Group<B> {
    /// Continues a join once all members are connected: every rank reports which ranks share its host, since all ranks must
    /// choose the same algorithm, and each one sees only its own connections.
    pub(super) fn check_connected<H: Host<Body = B>>(&mut self, common: &mut Common<H::Kept>, host: &mut H) {
        let is_connected = |peer: PeerId| common.directory.peer(peer).connected;
        if self.joining != Some(Joining::Connects) || !self.members.peers().all(is_connected) {
            return;
        }
        self.joining = Some(Joining::Gathers);
        let world = self.members.world();
        let is_neighbour = |peer: PeerId| common.directory.peer(peer).local && host.look(peer).config().references;
        let neighbours = (0..world).filter(|rank| self.members.peer(*rank).is_none_or(is_neighbour));
        // Ranks of one host share memory with the same ranks. If only some pairs of a host can, their lists differ, and it
        // counts as several hosts.
        let own = digest(neighbours.map(u64::from));
        let call = Call {
            collective: Collective::AllGather,
            fingerprint: Fingerprint::new(Name::AllGather, None, DType::I64, None, u64::from(world)),
            dtype: DType::I64,
            op: ReduceOp::Sum,
            bytes: 8 * u64::from(world),
            splits: None,
            tag: 0,
            coflow: 0,
            priority: Priority(0),
            hold: false,
            // The caller of the join limits how long it takes.
            timeout: u64::MAX,
        };
        let body = host.gather(own, world);
        self.start(common, host, ChannelId::MAIN, call, body);
    }

    /// Why a join has not ended: the ranks to which there is no connection.
    pub(super) fn unconnected<H: Host<Body = B>>(&self, common: &Common<H::Kept>, host: &H, waited: u64) -> String {
        let (own, name, waited) = (self.own(), &self.name, seconds(waited));
        let unconnected = self.members.others().filter(|(_, peer)| !common.directory.peer(*peer).connected);
        let unconnected = unconnected.map(|(other, peer)| {
            let who = &self.who[other as usize];
            // Of two ranks, one connects and the other accepts.
            match host.trouble(peer) {
                Some(trouble) => format!("{who}: {trouble}"),
                None => format!("{who}: no answer"),
            }
        });
        let unconnected: Vec<String> = unconnected.collect();
        format!(
            "Timed out after {waited}: {own} has no connection with {} of the {} other members of group {name}: {}. Firewalls, \
             PENSTOCK_INTERFACE and PENSTOCK_PORT_RANGE decide who reaches whom; `penstock doctor` looks at all pairs.",
            unconnected.len(),
            self.members.world() - 1,
            unconnected.join("; ")
        )
    }

    /// Why a join has not ended although this rank is connected to all others.
    pub(super) fn unconnected_others(&self, waited: u64) -> String {
        let (own, name, waited) = (self.own(), &self.name, seconds(waited));
        format!(
            "Timed out after {waited}: {own} is connected to all members of group {name}, but some are not to each other."
        )
    }
}
