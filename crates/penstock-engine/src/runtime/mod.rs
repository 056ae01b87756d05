//! The engine's threads: what the event loop tells them goes to the core, and what the core decides is carried out.

mod command;
mod counters;
mod host;
mod local;

pub use command::{Call, GroupSpec};
pub(crate) use command::{Command, Shared};

use crate::buffers::{Computation, Kept};
use crate::recorder::Recorder;
use host::{Body, Hands};
use local::Local;
use penstock_core::groups::{self, Groups};
use penstock_net::fds::Fd;
use penstock_net::memory::MemoryEpoch;
use penstock_net::{Admission, Handler, Peers, Unlocked, Use};
use penstock_plan::Thresholds;
use penstock_stream::frame::Kind;
use penstock_stream::handshake::{Hello, NodeKey};
use penstock_stream::peer::{Event, Landing, StreamId};
use penstock_stream::{FrameError, Header, MessageKey};
use penstock_types::{Failure, GroupId, PeerId, Time};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Runs on the engine's threads, by turns.
pub(crate) struct Runtime {
    shared: Arc<Shared>,
    groups: Groups<Body, Kept>,
    local: Local,
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
            groups: Groups::new(node, thresholds, MAX_EARLY),
            local: Local::new(memory_epoch, recorder),
            #[cfg(test)]
            panics: false,
        }
    }

    /// Counts the bytes that are read from the memory of ranks on this host.
    pub(crate) fn memory_read(&self) -> Arc<AtomicU64> {
        self.local.read.clone()
    }

    /// Lets the core act. If a group has failed, that is recorded.
    fn act<R>(&mut self, peers: &mut Peers, act: impl FnOnce(&mut Groups<Body, Kept>, &mut Hands<'_>) -> R) -> R {
        self.act_on(peers, &[], 0, act)
    }

    /// The same for a frame with this payload, which begins at `offset` of its message.
    fn act_on<R>(
        &mut self,
        peers: &mut Peers,
        payload: &[u8],
        offset: u64,
        act: impl FnOnce(&mut Groups<Body, Kept>, &mut Hands<'_>) -> R,
    ) -> R {
        let result = act(&mut self.groups, &mut Hands { peers, local: &mut self.local, payload, offset });
        if std::mem::take(&mut self.local.has_failed) {
            self.local.recorder.write(&self.stats(peers));
        }
        result
    }

    /// The engine's thread has panicked: fails every group, tells the peers why, and stops.
    pub(crate) fn crash(&mut self, peers: &mut Peers, failure: &Failure) {
        self.act(peers, |groups, hands| groups.crash(hands, failure));
    }

    /// The engine's thread ends, and the driver is gone: nothing in this process reads or writes a tensor any more, and bytes
    /// that other processes read from now on are not trusted. Ends everything that is still open.
    pub(crate) fn end(self, failure: &Failure) {
        self.local.turn();
        let operations = self.groups.into_bodies().map(|body| body.ticket.clone());
        let watches = self.local.watches.into_values().flatten();
        for ticket in operations.chain(self.local.joins.into_values()).chain(watches) {
            ticket.complete(Err(failure.clone()));
        }
    }

    /// A peer is gone: forgets all that was shared with it.
    fn forget_peer(&mut self, peers: &mut Peers, peer: PeerId) {
        self.local.forget_peer(peer);
        self.act(peers, |groups, hands| groups.forget_peer(hands, peer));
    }
}

/// A piece of what takes long.
pub(crate) struct Task {
    work: groups::Work,
    computation: Computation,
    result: Result<Vec<(u32, bool)>, (u32, String)>,
}

impl Unlocked for Task {
    fn run(&mut self) {
        self.result = self.computation.run().map_err(|(operand, error)| (operand, error.to_string()));
    }
}

impl Handler for Runtime {
    type Task = Task;

    fn header(
        &mut self,
        peers: &mut Peers,
        peer: PeerId,
        stream: StreamId,
        header: &Header,
    ) -> Result<Landing<*mut u8>, FrameError> {
        self.act(peers, |groups, hands| {
            let landing = groups.header(hands, peer, stream, header)?;
            Ok(landing.map(|(body, place)| body.address(place)))
        })
    }

    fn claim(
        &mut self,
        peers: &mut Peers,
        peer: PeerId,
        stream: StreamId,
        header: &Header,
    ) -> Option<(Use, Option<StreamId>)> {
        self.act(peers, |groups, hands| {
            let (body, verdict, revoke) = groups.claim(hands, (peer, stream), header)?;
            Some((body.claimed(verdict), revoke))
        })
    }

    fn frame(
        &mut self,
        peers: &mut Peers,
        peer: PeerId,
        stream: StreamId,
        header: &Header,
        payload: &[u8],
        placed: bool,
    ) -> Result<Option<StreamId>, FrameError> {
        #[cfg(test)]
        assert!(!std::mem::take(&mut self.panics), "a test wants it");
        let finish = self.act_on(peers, payload, header.offset, |groups, hands| {
            groups.frame(hands, (peer, stream), header, payload, placed)
        })?;
        match header.kind {
            Kind::Share if finish.apply => self.local.map(peer, header.offset, header.total)?,
            Kind::Unshare if finish.apply => drop(self.local.peer_mut(peer).mappings.remove(&header.offset)),
            _ => {}
        }
        Ok(finish.revoke)
    }

    fn descriptor(&mut self, peer: PeerId, region: u64) -> Option<Fd> {
        self.local.descriptor(peer, region)
    }

    fn passed(&mut self, peer: PeerId, descriptor: Fd) -> Result<(), FrameError> {
        self.local.passed(peer, descriptor)
    }

    fn source(&self, peer: PeerId, key: &MessageKey, offset: u64, len: usize) -> Option<*const u8> {
        self.groups.source(peer, key, offset, len).map(|(body, place)| body.address(place).cast_const())
    }

    fn event(&mut self, peers: &mut Peers, peer: PeerId, event: Event) {
        self.act(peers, |groups, hands| groups.happened(hands, peer, event));
    }

    fn connected(&mut self, peers: &mut Peers, peer: PeerId, local: bool, pid: u32, job: Option<GroupId>) {
        let info = self.local.peer_mut(peer);
        (info.local, info.pid) = (local, pid);
        self.act(peers, |groups, hands| groups.connected(hands, peer, local, job));
    }

    fn cut_off(&mut self, peers: &mut Peers, peer: PeerId, reason: &str) {
        self.act(peers, |groups, hands| groups.cut_off(hands, peer, reason));
    }

    fn lost(&mut self, peers: &mut Peers, peer: PeerId, reason: &str, has_died: bool) {
        self.act(peers, |groups, hands| groups.lost(hands, peer, reason, has_died));
        self.undelivered(peers, peer);
        self.forget_peer(peers, peer);
    }

    fn left(&mut self, peers: &mut Peers, peer: PeerId, reason: &str) {
        self.act(peers, |groups, hands| groups.left(hands, peer, reason));
        self.forget_peer(peers, peer);
    }

    fn refused(&mut self, peers: &mut Peers, peer: PeerId, reason: &str) {
        self.act(peers, |groups, hands| groups.refused(hands, peer, reason));
        self.forget_peer(peers, peer);
    }

    fn woken(&mut self, peers: &mut Peers, _now: Time) {
        for command in self.shared.take() {
            self.obey(peers, command);
        }
    }

    fn tick(&mut self, peers: &mut Peers, _now: Time) -> Time {
        self.act(peers, |groups, hands| groups.look_for_late(hands))
    }

    fn admit(&self, hello: &Hello) -> Admission {
        match self.groups.admission(hello) {
            groups::Admission::Admit(secret, peer) => Admission::Admit(secret, peer),
            groups::Admission::Unauthenticated => Admission::Unauthenticated,
            groups::Admission::Generation(generation) => Admission::Generation(generation),
            groups::Admission::NotYet => Admission::NotYet,
            groups::Admission::Lost(reason) => Admission::Lost(reason),
        }
    }

    fn has_work(&self) -> bool {
        self.groups.has_work()
    }

    fn work(&mut self, peers: &mut Peers) -> Option<(MessageKey, Task)> {
        let (work, computation) = self.act(peers, |groups, hands| groups.work(hands))?;
        Some((work.key, Task { work, computation, result: Ok(Vec::new()) }))
    }

    fn worked(&mut self, peers: &mut Peers, task: Task) {
        let Task { work, result, .. } = task;
        self.act(peers, |groups, hands| groups.worked(hands, work, result));
    }

    fn awaits(&self, job: GroupId) -> bool {
        self.groups.awaits(job)
    }

    fn stopping(&self) -> bool {
        self.groups.is_stopping()
    }

    fn patience(&self) -> Option<u64> {
        self.groups.patience()
    }

    fn ending(&mut self, peers: &mut Peers) {
        self.act(peers, |groups, hands| groups.ending(hands));
    }

    fn undelivered(&mut self, peers: &mut Peers, peer: PeerId) {
        // Operations of a failed group have reported that, and the machine has forgotten them.
        let mut messages: Vec<_> = peers.look(peer).undelivered().collect();
        messages.sort_unstable_by_key(|(key, _)| *key);
        let Some((key, fingerprint)) = messages.first() else { return };
        log::error!(
            "penstock: {} messages were sent to {} and not delivered, the first of {} #{}: {}. \
             What that rank receives of them fails there.",
            messages.len(),
            self.local.peer_mut(peer).contact.describe(),
            fingerprint.describe(),
            key.op.0,
            self.groups.why_lost(peer).unwrap_or("it did not take them in time"),
        );
    }
}

/// How many messages for operations that are not posted are kept, at about 150 bytes each. Fewer in the engine's own tests, but
/// more than the credit for empty messages (8,192).
const MAX_EARLY: usize = if cfg!(test) { 1 << 14 } else { 1 << 20 };
