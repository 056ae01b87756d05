//! How a group begins: who is in it, who may connect, who shares a host.

use super::Runtime;
use super::command::{Call, GroupSpec};
use super::deadlines::seconds;
use super::group::{Group, Joining};
use super::sharing::PeerInfo;
use crate::ticket::{Promise, Ticket};
use penstock_core::digest::digest;
use penstock_core::members::Members;
use penstock_core::name::{Ended, Issued};
use penstock_core::unbound::Unbound;
use penstock_net::{Admission, Peers};
use penstock_plan::{Collective, Topology};
use penstock_stream::fingerprint::{Fingerprint, Name};
use penstock_stream::handshake::{Hello, NodeKey};
use penstock_types::{DType, Failure, FailureKind, Generation, GroupId, PeerId, Priority, ReduceOp, Time};
use std::collections::{HashMap, HashSet};

pub(super) struct Job {
    pub(super) generation: Generation,
    pub(super) secret: Vec<u8>,
    /// Members that may connect to this process with this job, now or after they have lost a stream.
    pub(super) nodes: HashSet<NodeKey>,
}

impl Runtime {
    pub(super) fn join(&mut self, peers: &mut Peers, spec: GroupSpec, ticket: Promise, now: Time) {
        let mut members = Vec::with_capacity(spec.members.len());
        let mut refused = None;
        for (rank, contact) in spec.members.iter().enumerate() {
            if rank as u32 == spec.rank {
                members.push(None);
                continue;
            }
            let peer = match self.by_node.get(&contact.node) {
                Some(&peer) => peer,
                None => {
                    let peer = peers.add(contact.clone());
                    debug_assert_eq!(peer as usize, self.peers.len());
                    self.peers.push(PeerInfo::new(contact.clone()));
                    self.by_node.insert(contact.node, peer);
                    peers.connect(peer, spec.id, spec.secret.clone());
                    peer
                }
            };
            if let Some(reason) = &self.peers[peer as usize].lost {
                refused = Some(reason.clone());
            }
            members.push(Some(peer));
        }
        // A node connects with the first job that it shares with this process. If it has connected already, that is not this
        // job.
        let may_come = |peer: &&PeerId| {
            let info = &self.peers[**peer as usize];
            !info.linked && info.lost.is_none()
        };
        let nodes: HashSet<NodeKey> =
            members.iter().flatten().filter(may_come).map(|peer| self.peers[*peer as usize].contact.node).collect();
        if !nodes.is_empty() {
            self.jobs.insert(spec.id, Job { generation: spec.generation, secret: spec.secret, nodes });
        }
        let group = Group {
            name: spec.name.into(),
            topology: Topology::separate_hosts(members.len() as u32),
            members: Members::new(members),
            contacts: spec.members,
            algorithm: spec.algorithm,
            issued: Issued::default(),
            ended: Ended::default(),
            ops: HashMap::new(),
            held: HashMap::new(),
            unbound: Unbound::default(),
            joining: Some(Joining { ticket, hosts: None }),
            failed: None,
            ends_after: None,
            watches: Vec::new(),
            gone: HashMap::new(),
            told: HashMap::new(),
            last_algorithm: String::new(),
        };
        self.groups.insert(spec.id, group);
        self.overtaken.forget_group(spec.id);
        match (self.reported.take(spec.id), refused) {
            (Some(failure), _) => self.fail_group(peers, spec.id, failure, true),
            (None, Some(reason)) => {
                self.fail_group(peers, spec.id, Failure::fatal(FailureKind::PeerLost, reason), true);
            }
            (None, None) => self.check_linked(peers, spec.id, now),
        }
    }

    /// Why a join has not ended after `waited` nanoseconds: the ranks to which there is no connection.
    pub(super) fn missing(&self, peers: &Peers, group: &Group, waited: u64) -> String {
        let (rank, name, waited) = (group.members.rank(), &group.name, seconds(waited));
        let unlinked = group.members.others().filter(|(_, peer)| !self.peers[*peer as usize].linked);
        let unlinked = unlinked.map(|(other, peer)| {
            let who = group.contacts[other as usize].describe();
            // Of two ranks, one connects and the other accepts.
            match peers.trouble(peer) {
                Some(trouble) => format!("{who}: {trouble}"),
                None => format!("{who}: no answer"),
            }
        });
        let unlinked: Vec<String> = unlinked.collect();
        format!(
            "Timed out after {waited}: rank {rank} has no connection with {} of the {} other members of group {name}: {}. Firewalls, \
             PENSTOCK_INTERFACE and PENSTOCK_PORT_RANGE decide who reaches whom; `penstock doctor` looks at all pairs.",
            unlinked.len(),
            group.members.world() - 1,
            unlinked.join("; ")
        )
    }

    /// Continues a join once all members are connected: every rank reports which ranks share its host, since all ranks must
    /// choose the same algorithm, and each one sees only its own connections.
    pub(super) fn check_linked(&mut self, peers: &mut Peers, id: GroupId, now: Time) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let is_linked = |peer: PeerId| self.peers[peer as usize].linked;
        let Some(joining) = group.joining.as_mut().filter(|_| group.members.peers().all(is_linked)) else {
            return;
        };
        if joining.hosts.is_some() {
            return;
        }
        let world = group.members.world();
        let is_neighbour = |peer: PeerId| self.peers[peer as usize].local && peers.look(peer).config().references;
        let neighbours = (0..world).filter(|rank| group.members.peer(*rank).is_none_or(is_neighbour));
        // Ranks of one host share memory with the same ranks. If only some pairs of a host can, their lists differ, and it
        // counts as several hosts.
        let own = Box::new(digest(neighbours.map(u64::from)));
        let hosts = joining.hosts.insert(vec![0; world as usize].into_boxed_slice());
        let call = Call {
            collective: Collective::AllGather,
            fingerprint: Fingerprint::new(Name::AllGather, None, DType::I64, None, u64::from(world)),
            dtype: DType::I64,
            op: ReduceOp::Sum,
            bytes: size_of_val(&**hosts) as u64,
            splits: None,
            input: std::ptr::from_ref(&*own).cast(),
            output: hosts.as_mut_ptr().cast(),
            tag: 0,
            coflow: 0,
            priority: Priority(0),
            hold: false,
            // The caller of the join limits how long it takes.
            timeout: u64::MAX,
            keep: Some(own),
        };
        self.start(peers, id, call, Ticket::default().promise(), now);
    }

    /// Completes a join: all ranks know which of them share a host.
    pub(super) fn joined(&mut self, id: GroupId) {
        let group = self.groups.get_mut(&id).expect("its operation has just ended");
        let Some(Joining { ticket, hosts: Some(keys) }) = group.joining.take() else { return };
        let first = |key| keys.iter().position(|other| other == key).expect("it is one of them") as u32;
        group.topology = Topology::new(&keys.iter().map(first).collect::<Vec<u32>>());
        ticket.complete(Ok(()));
    }

    /// From now on a node connects only with the job `but_with`, or not at all.
    pub(super) fn no_longer_connects(&mut self, node: NodeKey, but_with: Option<GroupId>) {
        self.jobs.retain(|id, job| {
            let was_last = Some(*id) != but_with && job.nodes.remove(&node) && job.nodes.is_empty();
            !was_last
        });
    }

    /// An answer to somebody who wants a stream in a job.
    pub(super) fn admission(&self, hello: &Hello) -> Admission {
        // A lost process comes back, or one that has lost this process, which does not know it yet.
        let unauthenticated = || {
            let known = || self.peers.iter().filter(|info| info.contact.node == hello.from && !info.has_left);
            match known().find_map(|info| info.lost.clone()) {
                Some(reason) => Admission::Lost(reason),
                None if known().any(|info| info.linked) => {
                    Admission::Lost("an earlier connection has not ended there".to_owned())
                }
                None => Admission::Unauthenticated,
            }
        };
        let Some(job) = self.jobs.get(&hello.job) else {
            let is_known = self.groups.contains_key(&hello.job) || self.is_closed(hello.job);
            return if is_known { unauthenticated() } else { Admission::NotYet };
        };
        if hello.generation != job.generation {
            return Admission::Generation(job.generation);
        }
        match self.by_node.get(&hello.from) {
            Some(peer) if job.nodes.contains(&hello.from) && hello.from != self.node => {
                Admission::Admit(job.secret.clone(), *peer)
            }
            _ => unauthenticated(),
        }
    }
}

/// Why a join has not ended although this rank is connected to all others.
pub(super) fn unconnected_others(group: &Group, waited: u64) -> String {
    let (rank, name, waited) = (group.members.rank(), &group.name, seconds(waited));
    format!(
        "Timed out after {waited}: rank {rank} is connected to all members of group {name}, but some are not to each other."
    )
}
