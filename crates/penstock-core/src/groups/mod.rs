//! The groups of one rank: their operations, matching, deadlines, failures and farewells.
//!
//! [`Groups`] takes what callers ask, what comes from peers, and the time. It decides at once, and has a [`Host`] carry that out:
//! the engine in memory and on sockets, tests with phantoms that have no bytes. Frames leave through the peers' machines
//! ([`penstock_stream::peer::Peer`]), which the host owns.
//!
//! A group's operations are issued in channels ([`Channel`]), each of which is an order of its own.
//!
//! A call looks its group up once and goes on as a method of [`Group`], beside what all groups share.

mod channel;
mod channels;
mod deadlines;
mod departure;
mod directory;
mod events;
mod failure;
mod group;
mod host;
mod issue;
mod join;
mod progress;
#[cfg(test)]
mod tests;

pub use channel::{Channel, Open};
pub use directory::Admission;
pub use group::{Call, Group};
pub use host::{Beginning, Failed, Host, Issue, Sources};
pub use join::Join;
pub use progress::Work;

use crate::early::Early;
use crate::name::OpId;
use crate::operation::{Effect, Place};
use crate::reported::{Overtaken, Reported};
use directory::Directory;
use penstock_plan::{Algorithm, Plans, Thresholds};
use penstock_stream::MessageKey;
use penstock_stream::handshake::NodeKey;
use penstock_stream::peer::OpStatus;
use penstock_stream::ranges::Ranges;
use penstock_types::{ChannelId, Failure, FailureKind, GroupId, PeerId, Priority, SECOND, Scope, Time};
use std::collections::{BTreeSet, HashMap};

/// All groups that this process is in.
#[derive(Debug)]
pub struct Groups<B, K> {
    groups: HashMap<GroupId, Group<B>>,
    common: Common<K>,
    stopping: bool,
    /// How long the end waits for peers to take what was sent to them.
    patience: Option<u64>,
}

/// What groups share.
#[derive(Debug)]
struct Common<K> {
    directory: Directory,
    unjoined: Unjoined,
    /// Messages for operations that are not posted yet, or not ready for them.
    early: Early<K>,
    /// How many of those are kept. Credit bounds their bytes, this bounds their number.
    most_early: usize,
    plans: Plans,
    thresholds: Thresholds,
    /// Groups that are about to fail.
    pending_failures: Vec<Pending>,
    /// Operations with something to do that takes long, most urgent first. Some may have ended.
    work: BTreeSet<(Priority, Time, GroupId, OpId)>,
    effects: Vec<Effect>,
    finished: u64,
    /// The longest time-out of an operation so far.
    longest_timeout: u64,
}

/// A group is about to fail.
#[derive(Debug)]
struct Pending {
    /// Until when another rank may report a better reason.
    by: Time,
    group: GroupId,
    failure: Failure,
    about: About,
}

/// What has failed in a group that is about to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum About {
    /// Its join. If that ends meanwhile, it has succeeded.
    Join,
    /// An operation, likewise.
    Operation(OpId),
    /// A rank's memory cannot be read: what was to be read there cannot come any more.
    Memory,
}

/// What is known of groups that this process is not in.
#[derive(Debug, Default)]
struct Unjoined {
    /// Ids of groups that were left: frames for them are dropped. Kept forever, since a frame may be late by any time; rank 0
    /// numbers groups of the same ranks consecutively, so they form few ranges.
    closed: Ranges,
    /// What peers have reported of groups that this process has not joined yet.
    reported: Reported,
    /// Which peers have left such groups, or have seen them fail: frames of these peers are dropped.
    overtaken: Overtaken,
}

impl Unjoined {
    fn close(&mut self, id: GroupId) {
        self.closed.insert(id.0..id.0.saturating_add(1));
    }

    fn is_closed(&self, id: GroupId) -> bool {
        self.closed.covers(&(id.0..id.0.saturating_add(1)))
    }

    /// What is known of the operations of a group in which a peer sends.
    fn status(&self, peer: PeerId, id: GroupId) -> OpStatus {
        let is_over = self.is_closed(id) || self.overtaken.contains(peer, id);
        if is_over { OpStatus::Retired } else { OpStatus::Early }
    }
}

impl<B, K> Groups<B, K> {
    /// No groups yet. `most_early`: how many messages for operations that are not posted are kept.
    #[must_use]
    pub fn new(node: NodeKey, thresholds: Thresholds, most_early: usize) -> Groups<B, K> {
        Groups {
            groups: HashMap::new(),
            common: Common {
                directory: Directory::new(node),
                unjoined: Unjoined::default(),
                early: Early::default(),
                most_early,
                plans: Plans::default(),
                thresholds,
                pending_failures: Vec::new(),
                work: BTreeSet::new(),
                effects: Vec::new(),
                finished: 0,
                longest_timeout: 0,
            },
            stopping: false,
            patience: Some(0),
        }
    }

    /// What is known of the operation of an incoming message.
    fn status(&self, peer: PeerId, key: &MessageKey) -> OpStatus {
        match self.groups.get(&key.group) {
            Some(group) => group.look_up(peer, key).status(),
            None => self.common.unjoined.status(peer, key.group),
        }
    }

    /// Where `len` bytes at `offset` of an outgoing message lie; `None` when its operation is over.
    #[must_use]
    pub fn source(&self, peer: PeerId, key: &MessageKey, offset: u64, len: usize) -> Option<(&B, Place)> {
        let group = self.groups.get(&key.group)?;
        let (to, op) = group.members.operation(peer, key)?;
        let active = group.ops.get(&op)?;
        Some((&active.body, active.operation.source(to, key.message, offset, len)?))
    }

    /// Whether [`Groups::work`] has something to do.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.common.work.is_empty()
    }

    /// Fails a group or a channel, if it has not failed.
    pub fn fail<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, scope: Scope, failure: Failure, tell: bool) {
        if let Some(group) = self.groups.get_mut(&scope.group) {
            group.fail(&mut self.common, host, scope.channel, failure, tell);
        }
    }

    /// Sets the all-reduce algorithm of a channel from its next operation on, and the streams to use to each rank of the group.
    pub fn retune<H: Host<Body = B, Kept = K>>(
        &mut self,
        host: &mut H,
        channel: Scope,
        algorithm: Option<Algorithm>,
        streams: usize,
    ) {
        let Some(group) = self.groups.get_mut(&channel.group) else { return };
        let Some(known) = group.channels.get_mut(&channel.channel) else { return };
        known.algorithm = algorithm;
        for peer in group.members.peers() {
            host.machine(peer).use_streams(streams);
        }
    }

    /// Why a group of these ranks of the group `id` cannot be built: one of them is lost; with `farewells`, one has left the
    /// job; with `whole`, the group has failed.
    #[must_use]
    pub fn check(&self, id: GroupId, whole: bool, farewells: bool, ranks: &[u32]) -> Option<Failure> {
        let Some(group) = self.groups.get(&id) else {
            return Some(Failure::fatal(FailureKind::Closed, "the group was destroyed."));
        };
        let lost = |rank: &u32, has_left: bool| {
            let info = self.common.directory.peer(group.members.peer(*rank)?);
            info.lost.as_ref().filter(|_| info.has_left == has_left)
        };
        let fatal = |message| Failure::fatal(FailureKind::PeerLost, message);
        let died = || Some(fatal(format!("{}.", ranks.iter().find_map(|rank| lost(rank, false))?)));
        // A rank that loses another mostly ends: the loss is the reason then, and not that others have left.
        let left = || {
            let reason = ranks.iter().find_map(|rank| lost(rank, true))?;
            Some(match &group.failed {
                Some(Failure { kind, message, .. }) => {
                    Failure::fatal(*kind, format!("{reason}. Before, group {} failed: {message}", group.name))
                }
                None => fatal(format!("{reason}.")),
            })
        };
        group.failed.clone().filter(|_| whole).or_else(died).or_else(|| if farewells { left() } else { None })
    }

    /// This process is about to end; with `wait`, after peers have taken what was sent to them, which may take as long as the longest
    /// time-out of an operation ([`Groups::patience`]).
    pub fn stop<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, wait: bool) {
        self.stopping = true;
        self.patience = wait.then_some(self.common.longest_timeout);
        // Ranks that wait for this one in an idle group learn what it did there. In other groups it may do more: there they
        // learn that it has left the job.
        let is_idle = |(_, group): &(&GroupId, &Group<B>)| group.failed.is_none() && !group.is_busy();
        for id in self.groups.iter().filter(is_idle).map(|(id, _)| *id).collect::<Vec<_>>() {
            self.leave(host, id);
        }
    }

    /// This process cannot go on: fails every group, tells the peers why, and stops.
    pub fn crash<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H, failure: &Failure) {
        self.stopping = true;
        self.patience = Some(0);
        for group in self.groups.values_mut() {
            group.fail(&mut self.common, host, ChannelId::MAIN, failure.clone(), true);
        }
    }

    /// This process ends, and peers hear nothing more: operations whose memory a peer reads fail. Those whose memory nobody reads
    /// fail here alone, without a word to peers: what was sent to them still counts there.
    pub fn ending<H: Host<Body = B, Kept = K>>(&mut self, host: &mut H) {
        for (id, group) in &mut self.groups {
            if group.members.peers().any(|peer| host.look(peer).lends(*id)) {
                let message = format!(
                    "{} has ended while messages of its were not taken (destroy_process_group was not called).",
                    group.own()
                );
                group.fail(&mut self.common, host, ChannelId::MAIN, Failure::fatal(FailureKind::Closed, message), true);
            }
        }
    }

    /// Everything that is still open when nothing is touched any more.
    pub fn into_bodies(self) -> impl Iterator<Item = B> {
        self.groups.into_values().flat_map(Group::into_bodies)
    }

    /// Whether this process is about to end.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.stopping
    }

    /// How long the end waits, in nanoseconds, for peers that live to take what was sent to them, beyond what it takes to notice that
    /// one does not; `None`: it does not wait, not even for acknowledgements.
    #[must_use]
    pub fn patience(&self) -> Option<u64> {
        self.patience
    }

    /// A group, if this process is in it.
    #[must_use]
    pub fn get(&self, id: GroupId) -> Option<&Group<B>> {
        self.groups.get(&id)
    }

    /// All groups.
    pub fn iter(&self) -> impl Iterator<Item = &Group<B>> {
        self.groups.values()
    }

    /// Messages that came early, and claims.
    #[must_use]
    pub fn early(&self) -> &Early<K> {
        &self.common.early
    }

    /// Why a peer is gone, if it is.
    #[must_use]
    pub fn why_lost(&self, peer: PeerId) -> Option<&str> {
        self.common.directory.peer(peer).lost.as_deref()
    }

    /// Whether the join of a group waits for members to be connected.
    #[must_use]
    pub fn awaits(&self, id: GroupId) -> bool {
        self.groups.get(&id).is_some_and(|group| group.joining == Some(group::Joining::Connects))
    }

    /// How many operations have ended well.
    #[must_use]
    pub fn finished(&self) -> u64 {
        self.common.finished
    }

    /// How many jobs there are with which peers may connect.
    #[must_use]
    pub fn jobs(&self) -> usize {
        self.common.directory.jobs()
    }

    /// How many ranges of ids of groups that were left are remembered.
    #[must_use]
    pub fn closed_ranges(&self) -> usize {
        self.common.unjoined.closed.count()
    }

    /// A group that was just looked up.
    fn group(&mut self, id: GroupId) -> &mut Group<B> {
        self.groups.get_mut(&id).expect("just seen")
    }

    /// The groups that a peer is in.
    fn groups_of(&self, peer: PeerId) -> Vec<GroupId> {
        self.groups.iter().filter(|(_, group)| group.members.rank_of(peer).is_some()).map(|(id, _)| *id).collect()
    }
}

/// The message number of a probe that does not doubt a reference.
const PROBE: u32 = u32::MAX;
/// An operation with a longer time-out does not make the end wait longer: torch's own default time-out.
const MOST_PATIENCE: u64 = 30 * 60 * SECOND;
