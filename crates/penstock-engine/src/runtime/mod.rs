//! The engine's thread: groups, operations, failures. It is the [`Handler`] of the event loop.

mod command;
mod counters;
mod deadlines;
mod departure;
mod failure;
mod group;
mod issue;
mod join;
mod progress;
mod sharing;

pub use command::{Call, GroupSpec};
pub(crate) use command::{Command, Shared};

use self::command::LEAST_PATIENCE;
use self::failure::report_of;
use self::group::{Active, Group};
use self::join::Job;
use self::sharing::{MAX_DESCRIPTORS, PeerInfo};
use crate::execution::Kept;
use crate::pages::HugePages;
use crate::recorder::Recorder;

use penstock_core::early::Early;
use penstock_core::name::OpId;
use penstock_core::operation::Effect;
use penstock_core::reported::{Overtaken, Reported};
use penstock_net::fds::Fd;
use penstock_net::memory::{MemoryEpoch, Region};
use penstock_net::{Admission, Handler, Peers};
use penstock_plan::{Planner, Thresholds};
use penstock_stream::handshake::{Hello, NodeKey};
use penstock_stream::peer::{Event, OpStatus};
use penstock_stream::ranges::Ranges;
use penstock_stream::{FrameError, Header, MessageKey};
use penstock_types::{Failure, FailureKind, GroupId, PeerId, Priority, Time};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Runs on the engine's thread.
pub(crate) struct Runtime {
    shared: Arc<Shared>,
    node: NodeKey,
    memory_epoch: Arc<MemoryEpoch>,
    pages: HugePages,
    planner: Planner,
    thresholds: Thresholds,
    groups: HashMap<GroupId, Group>,
    /// Ids of groups that were left: frames for them are dropped. Kept forever, since a frame may be late by any time; rank 0
    /// numbers groups of the same ranks consecutively, so they form few ranges.
    closed: Ranges,
    /// What peers have reported of groups that this process has not joined yet.
    reported: Reported,
    /// Which peers have left such groups, or have seen them fail: frames of these peers are dropped.
    overtaken: Overtaken,
    /// Secrets that the streams' hand-shakes prove. A job outlives the group that brought it, since groups share streams: it
    /// stays until no peer connects with it any more.
    jobs: HashMap<GroupId, Job>,
    /// Memory regions that the user shares, by address, with their numbers.
    regions: BTreeMap<u64, (u64, Region)>,
    peers: Vec<PeerInfo>,
    by_node: HashMap<NodeKey, PeerId>,
    /// Messages for operations that are not posted yet, or not ready for them.
    early: Early<Kept>,
    /// Groups that are about to fail, until when another rank may report a better reason, and the failure so far.
    pending_failures: Vec<(Time, GroupId, Failure)>,
    /// Operations with messages to read from other processes' memory, most urgent first. Some may have ended.
    work: BTreeSet<(Priority, Time, GroupId, OpId)>,
    recorder: Recorder,
    stopping: bool,
    /// How long the end of the engine waits for peers to take what was sent to them.
    patience: u64,
    effects: Vec<Effect>,
    finished: u64,
    /// The longest time-out of an operation so far.
    longest_timeout: u64,
    /// Whether the next frame panics, for tests.
    #[cfg(test)]
    panics: bool,
}

impl Runtime {
    pub(crate) fn new(
        shared: Arc<Shared>,
        node: NodeKey,
        memory_epoch: Arc<MemoryEpoch>,
        thresholds: Thresholds,
        recorder: Recorder,
    ) -> Runtime {
        Runtime {
            shared,
            node,
            memory_epoch,
            pages: HugePages::new(),
            planner: Planner::default(),
            thresholds,
            groups: HashMap::new(),
            closed: Ranges::default(),
            reported: Reported::default(),
            overtaken: Overtaken::default(),
            jobs: HashMap::new(),
            regions: BTreeMap::new(),
            peers: Vec::new(),
            by_node: HashMap::new(),
            early: Early::default(),
            pending_failures: Vec::new(),
            work: BTreeSet::new(),
            recorder,
            stopping: false,
            patience: LEAST_PATIENCE,
            effects: Vec::new(),
            finished: 0,
            longest_timeout: 0,
            #[cfg(test)]
            panics: false,
        }
    }

    fn is_closed(&self, id: GroupId) -> bool {
        self.closed.covers(&(id.0..id.0.saturating_add(1)))
    }

    /// The engine's thread has panicked: fails every group, tells the peers why, and stops.
    pub(crate) fn crash(&mut self, peers: &mut Peers, failure: &Failure) {
        self.stopping = true;
        self.patience = LEAST_PATIENCE;
        for id in self.groups.keys().copied().collect::<Vec<_>>() {
            self.fail_group(peers, id, failure.clone(), true);
        }
    }

    /// Invalidates all references to this process's memory: a rank that is reading there asks before it uses the bytes.
    fn turn(&self) {
        self.memory_epoch.turn();
        for (_, region) in self.regions.values() {
            region.set_epoch(self.memory_epoch.epoch());
        }
    }

    /// The engine's thread ends, and the driver is gone: nothing in this process reads or writes a tensor any more, and bytes
    /// that other processes read from now on are not trusted. Ends everything that is still open.
    pub(crate) fn end(mut self, failure: &Failure) {
        self.turn();
        for (_, mut group) in self.groups.drain() {
            let running = group.ops.drain().map(|(_, active)| active.ticket);
            let held = group.held.drain().map(|(_, waiting)| waiting.ticket);
            let unbound: Vec<_> = group.unbound.drain().map(|posted| posted.ticket).collect();
            let joining = group.joining.take().map(|joining| joining.ticket);
            for promise in running.chain(held).chain(unbound).chain(joining).chain(group.watches.drain(..)) {
                promise.complete(Err(failure.clone()));
            }
        }
    }

    /// The groups that a peer is in.
    fn groups_of(&self, peer: PeerId) -> Vec<GroupId> {
        self.groups.iter().filter(|(_, group)| group.members.rank_of(peer).is_some()).map(|(id, _)| *id).collect()
    }

    /// The peer's rank in the group, and the operation's number here, of a message between the peer and this rank.
    fn operation_of(&self, peer: PeerId, key: &MessageKey) -> Option<(u32, OpId)> {
        let group = self.groups.get(&key.group)?;
        group.members.operation(peer, key)
    }

    fn active(&self, id: GroupId, op: OpId) -> Option<&Active> {
        self.groups.get(&id)?.ops.get(&op)
    }
}

impl Handler for Runtime {
    fn status(&self, peer: PeerId, key: &MessageKey) -> OpStatus {
        let Some(group) = self.groups.get(&key.group) else {
            let is_over = self.is_closed(key.group) || self.overtaken.contains(peer, key.group);
            return if is_over { OpStatus::Retired } else { OpStatus::Early };
        };
        if group.failed.is_some() {
            return OpStatus::Retired;
        }
        let Some((_, op)) = self.operation_of(peer, key) else { return OpStatus::Retired };
        if group.ops.contains_key(&op) {
            return OpStatus::Active;
        }
        if group.is_over(op) { OpStatus::Retired } else { OpStatus::Early }
    }

    fn place(&mut self, peer: PeerId, header: &Header) -> Result<Option<*mut u8>, FrameError> {
        let Some((from, op)) = self.operation_of(peer, &header.key) else { return Ok(None) };
        let Some(active) = self.active(header.key.group, op) else { return Ok(None) };
        if active.fingerprint(self.groups[&header.key.group].members.rank(), from) != header.fingerprint {
            return Ok(None);
        }
        let len = u64::from(header.length);
        Ok(active.execution.place(from, header.key.message, header.offset, len, header.total))
    }

    fn descriptor(&mut self, peer: PeerId, region: u64) -> Option<Fd> {
        self.peers[peer as usize].offered.get_mut(&region)?.take()
    }

    fn passed(&mut self, peer: PeerId, descriptor: Fd) -> Result<(), FrameError> {
        let waiting = &mut self.peers[peer as usize].descriptors;
        if waiting.len() >= MAX_DESCRIPTORS {
            return Err(FrameError::OutOfTurn("descriptors that no frame explains"));
        }
        waiting.push_back(descriptor);
        Ok(())
    }

    fn source(&self, peer: PeerId, key: &MessageKey, offset: u64, len: usize) -> Option<*const u8> {
        let (to, op) = self.operation_of(peer, key)?;
        self.active(key.group, op)?.execution.source(to, key.message, offset, len)
    }

    fn frame(
        &mut self,
        peers: &mut Peers,
        peer: PeerId,
        header: &Header,
        payload: &[u8],
        placed: bool,
    ) -> Result<(), FrameError> {
        self.arrive(peers, peer, header, payload, placed)
    }

    fn event(&mut self, peers: &mut Peers, peer: PeerId, event: Event) {
        self.happened(peers, peer, event);
    }

    fn linked(&mut self, peers: &mut Peers, peer: PeerId, local: bool, pid: u32, job: Option<GroupId>) {
        let node = self.peers[peer as usize].contact.node;
        if !self.peers[peer as usize].linked {
            self.no_longer_connects(node, job);
        }
        let info = &mut self.peers[peer as usize];
        info.linked = true;
        info.local = local;
        info.pid = pid;
        for id in self.groups_of(peer) {
            self.check_linked(peers, id, peers.now());
        }
    }

    fn cut_off(&mut self, peers: &mut Peers, peer: PeerId, reason: &str) {
        let message = format!("{} was cut off: {reason}.", self.peers[peer as usize].contact.describe());
        let report = report_of(&Failure::fatal(FailureKind::PeerLost, message), 0);
        for id in self.groups_of(peer) {
            if self.groups[&id].failed.is_none() {
                peers.machine(peer).report(id, &report);
            }
        }
    }

    fn lost(&mut self, peers: &mut Peers, peer: PeerId, reason: &str) {
        self.peers[peer as usize].lost = Some(reason.to_owned());
        // A later process never has the same node key, since keys are random. Forgets the connection to this one.
        self.by_node.retain(|_, known| *known != peer);
        for id in self.groups_of(peer) {
            // A process that ends fails only its running operations.
            if !self.stopping || self.groups[&id].is_busy() {
                self.fail_group(peers, id, Failure::fatal(FailureKind::PeerLost, format!("{reason}.")), true);
            }
        }
        self.undelivered(peers, peer);
        self.forget_peer(peers, peer);
    }

    fn left(&mut self, peers: &mut Peers, peer: PeerId, reason: &str) {
        let info = &mut self.peers[peer as usize];
        (info.lost, info.has_left) = (Some(reason.to_owned()), true);
        // The peer stays known by its node key: it does not come back, and later joins with it fail at once.
        for id in self.groups_of(peer) {
            self.check_waiting(peers, id);
        }
        self.forget_peer(peers, peer);
    }

    fn refused(&mut self, peers: &mut Peers, peer: PeerId, reason: &str) {
        self.peers[peer as usize].lost = Some(reason.to_owned());
        for id in self.groups_of(peer) {
            self.fail_group(peers, id, Failure::fatal(FailureKind::Refused, format!("{reason}.")), false);
        }
    }

    fn woken(&mut self, peers: &mut Peers, now: Time) {
        for command in self.shared.take() {
            self.obey(peers, command, now);
        }
    }

    fn tick(&mut self, peers: &mut Peers, now: Time) -> Time {
        self.look_for_late(peers, now)
    }

    fn admit(&self, hello: &Hello) -> Admission {
        self.admission(hello)
    }

    fn has_work(&self) -> bool {
        !self.work.is_empty()
    }

    fn work(&mut self, peers: &mut Peers) {
        self.work_on(peers);
    }

    fn stopping(&self) -> bool {
        self.stopping
    }

    fn patience(&self) -> u64 {
        self.patience
    }

    fn ending(&mut self, peers: &mut Peers) {
        // Operations whose memory no peer reads fail here alone: what was sent to peers still counts there.
        let lent = |(id, group): &(&GroupId, &Group)| {
            group.failed.is_none() && group.members.peers().any(|peer| peers.look(peer).lends(**id))
        };
        for id in self.groups.iter().filter(lent).map(|(id, _)| *id).collect::<Vec<_>>() {
            let message = format!(
                "rank {} has ended while messages of its were not taken (destroy_process_group was not called).",
                self.groups[&id].members.rank()
            );
            self.fail_group(peers, id, Failure::fatal(FailureKind::Closed, message), true);
        }
    }

    fn undelivered(&mut self, peers: &mut Peers, peer: PeerId) {
        let info = &self.peers[peer as usize];
        // Operations of a failed group have reported that, and the machine has forgotten them.
        let mut messages: Vec<_> = peers.look(peer).undelivered().collect();
        messages.sort_unstable_by_key(|(key, _)| *key);
        let Some((key, fingerprint)) = messages.first() else { return };
        let why = info.lost.as_ref().map_or("it did not take them in time", String::as_str);
        log::error!(
            "penstock: {} messages were sent to {} and not delivered, the first of {} #{}: {why}. \
             What that rank receives of them fails there.",
            messages.len(),
            info.contact.describe(),
            fingerprint.describe(),
            key.op.0,
        );
    }
}

/// How many operations a group issues for itself before its users' first: those are numbered from 1 on.
const JOIN_OPS: u64 = 1;
