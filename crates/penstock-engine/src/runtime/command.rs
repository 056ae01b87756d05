//! What callers ask of the engine's thread.

use super::Runtime;
use super::deadlines::seconds;
use super::group::Group;
use super::join::unconnected_others;
use crate::stats::Stats;
use crate::ticket::{Promise, Ticket};
use penstock_net::memory::Region;
use penstock_net::{Contact, Peers};
use penstock_plan::{Algorithm, Collective, Splits};
use penstock_protocol::fingerprint::Fingerprint;
use penstock_types::{
    DType, Failure, FailureKind, Generation, GroupId, MILLISECOND, PeerId, Priority, ReduceOp, SECOND, Time,
};
use std::any::Any;
use std::sync::{Mutex, MutexGuard, mpsc};
use std::time::Instant;

/// What the callers' threads and the engine's thread share.
#[derive(Debug, Default)]
pub(crate) struct Shared(Mutex<Mailbox>);

#[derive(Debug, Default)]
struct Mailbox {
    commands: Vec<Command>,
    /// Why the engine's thread reads no more commands.
    closed: Option<Failure>,
}

impl Shared {
    /// Hands a command to the engine's thread. If that has ended, `ticket` says why, and the result is false.
    pub(crate) fn post(&self, command: Command, ticket: &Ticket) -> bool {
        let mut mailbox = self.lock();
        let Some(failure) = mailbox.closed.clone() else {
            mailbox.commands.push(command);
            return true;
        };
        drop(mailbox);
        // Before the command is dropped, and with it its promise.
        ticket.complete(Err(failure));
        false
    }

    /// Refuses commands from now on. Those that nobody has read fail as later ones do.
    pub(crate) fn close(&self, failure: &Failure) {
        let mut mailbox = self.lock();
        mailbox.closed.get_or_insert_with(|| failure.clone());
        let unread = std::mem::take(&mut mailbox.commands);
        drop(mailbox);
        for command in unread {
            if let Command::Join(_, promise) | Command::Start(_, _, promise) | Command::Watch(_, promise) = command {
                promise.complete(Err(failure.clone()));
            }
        }
    }

    /// Why commands are refused, if they are.
    pub(crate) fn closed(&self) -> Option<Failure> {
        self.lock().closed.clone()
    }

    pub(super) fn take(&self) -> Vec<Command> {
        std::mem::take(&mut self.lock().commands)
    }

    fn lock(&self) -> MutexGuard<'_, Mailbox> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// What a caller asks of the engine's thread.
#[derive(Debug)]
pub(crate) enum Command {
    Join(GroupSpec, Promise),
    Start(GroupId, Call, Promise),
    Release(GroupId, Ticket),
    Leave(GroupId),
    /// The all-reduce algorithm of a group from its next operation on, and the streams to use to each of its ranks.
    Retune(GroupId, Option<Algorithm>, usize),
    Hosts(GroupId, mpsc::Sender<Vec<u32>>),
    /// Whether one of these ranks is lost, or what else is asked.
    Check {
        group: GroupId,
        /// Whether the group has failed.
        whole: bool,
        /// Whether one of the ranks has left the job in good order.
        farewells: bool,
        ranks: Vec<u32>,
        reply: mpsc::Sender<Option<Failure>>,
    },
    Abort(GroupId, Failure),
    Expire(GroupId, u64),
    /// A ticket that ends when the group fails, or is left.
    Watch(GroupId, Promise),
    Share(u64, Region),
    Unshare(u64),
    Stats(mpsc::Sender<Stats>),
    Record(mpsc::Sender<String>),
    WriteRecord,
    /// End; wait until peers have taken what was sent to them, as far as their operations' time-outs allow, or not at all.
    Stop {
        wait: bool,
    },
    /// Panic now, or (`true`) at the next frame: for the tests of what a defect of ours leads to.
    #[cfg(test)]
    Panic(bool),
}

/// A group to join.
#[derive(Clone, Debug)]
pub struct GroupSpec {
    /// Chosen by the group's rank 0, and never again for another group. Engines remember the ids of groups that they have left
    /// as ranges, so the groups of the same ranks should be numbered in order, from a random number on.
    pub id: GroupId,
    /// The job's generation.
    pub generation: Generation,
    /// This process's rank in the group.
    pub rank: u32,
    /// Every rank's contact, this one's too.
    pub members: Vec<Contact>,
    /// What the streams' hand-shakes prove.
    pub secret: Vec<u8>,
    /// All-reduces use this algorithm where it is not `None`; rank 0's choice for all.
    pub algorithm: Option<Algorithm>,
    /// A name for logs and errors.
    pub name: String,
}

/// An operation that a caller starts.
pub struct Call {
    /// What to do.
    pub collective: Collective,
    /// How it is called in errors; part of what ranks compare.
    pub fingerprint: Fingerprint,
    /// Element type.
    pub dtype: DType,
    /// Reduction, where there is one.
    pub op: ReduceOp,
    /// Bytes, as [`Request::bytes`] means it.
    pub bytes: u64,
    /// Unequal parts of an all-to-all.
    pub splits: Option<Splits>,
    /// The contribution; null where the operation is in place.
    pub input: *const u8,
    /// The result.
    pub output: *mut u8,
    /// Tag of a send or receive.
    pub tag: u32,
    /// The operations that are of use only together with this one; 0 for none. Frames carry it, and nothing reads it yet.
    pub coflow: u32,
    /// How urgent.
    pub priority: Priority,
    /// Take the operation's place in the order now, but do not touch the buffers before [`crate::Group::release`]: the
    /// contribution is still on its way from a device.
    pub hold: bool,
    /// Nanoseconds until the operation fails.
    pub timeout: u64,
    /// Kept until the operation has ended: what the pointers point into.
    pub keep: Option<Box<dyn Any + Send>>,
}

// SAFETY: the pointers are the caller's buffers, which `keep` keeps alive; they are used by the engine's thread only.
unsafe impl Send for Call {}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Call").field("collective", &self.collective).finish_non_exhaustive()
    }
}

impl Runtime {
    /// Does what a caller asks.
    pub(super) fn obey(&mut self, peers: &mut Peers, command: Command, now: Time) {
        match command {
            Command::Join(spec, ticket) => self.join(peers, spec, ticket, now),
            Command::Start(id, call, ticket) => self.start(peers, id, call, ticket, now),
            Command::Release(id, ticket) => self.release(peers, id, &ticket, now),
            Command::Leave(id) => self.leave(peers, id),
            Command::Retune(id, algorithm, streams) => {
                let Some(group) = self.groups.get_mut(&id) else { return };
                group.algorithm = algorithm;
                for peer in group.members.peers() {
                    peers.machine(peer).use_streams(streams);
                }
            }
            Command::Hosts(id, reply) => {
                let hosts = |group: &Group| group.topology.hosts().to_vec();
                drop(reply.send(self.groups.get(&id).map(hosts).unwrap_or_default()));
            }
            Command::Check { group, whole, farewells, ranks, reply } => {
                drop(reply.send(self.check(group, whole, farewells, &ranks)));
            }
            Command::Watch(id, ticket) => match self.groups.get_mut(&id) {
                Some(Group { failed: Some(failure), .. }) => ticket.complete(Err(failure.clone())),
                Some(group) => group.watches.push(ticket),
                None => ticket.complete(Err(Failure::fatal(FailureKind::Closed, "the group was destroyed."))),
            },
            Command::Abort(id, failure) => self.fail_group(peers, id, failure, true),
            Command::Expire(id, waited) => {
                // What has ended while its caller gave up has ended well.
                let Some(group) = self.groups.get(&id).filter(|group| group.is_busy()) else { return };
                let (message, patience) = match &group.joining {
                    // Who lacks a member knows more, and should be heard first.
                    Some(joining) if joining.hosts.is_some() => (unconnected_others(group, waited), SECOND),
                    Some(_) => (self.missing(peers, group, waited), 0),
                    None => (
                        format!(
                            "Timed out after {}: rank {} has given up waiting.",
                            seconds(waited),
                            group.members.rank()
                        ),
                        0,
                    ),
                };
                let failure = Failure::fatal(FailureKind::Timeout, message);
                match patience {
                    0 => self.fail_group(peers, id, failure, true),
                    _ => self.pending_failures.push((now.plus(patience), id, failure)),
                }
            }
            Command::Share(number, region) => {
                region.set_epoch(self.memory_epoch.epoch());
                self.regions.insert(region.address(), (number, region));
            }
            Command::Unshare(number) => {
                self.regions.retain(|_, (known, _)| *known != number);
                for peer in 0..self.peers.len() {
                    let info = &mut self.peers[peer];
                    if info.offered.remove(&number).is_some() && info.lost.is_none() {
                        peers.machine(peer as PeerId).unshare(number);
                    }
                }
            }
            Command::Stats(reply) => drop(reply.send(self.stats(peers))),
            Command::Record(reply) => drop(reply.send(self.recorder.describe(&self.stats(peers), Instant::now()))),
            Command::WriteRecord => self.recorder.write(&self.stats(peers)),
            Command::Stop { wait } => {
                self.stopping = true;
                self.patience = if wait { self.longest_timeout.max(LEAST_PATIENCE) } else { UNHEARD };
                // Ranks that wait for this one in such a group learn what it did there. In others it may do more: what they learn is
                // that it has left the job.
                let is_idle = |(_, group): &(&GroupId, &Group)| group.failed.is_none() && !group.is_busy();
                for id in self.groups.iter().filter(is_idle).map(|(id, _)| *id).collect::<Vec<_>>() {
                    self.leave(peers, id);
                }
            }
            #[cfg(test)]
            Command::Panic(at_next_frame) => {
                assert!(at_next_frame, "a test wants it");
                self.panics = true;
            }
        }
    }

    /// Why a group of these ranks of the group `id` cannot be built: one of them is lost, or, where `farewells` count, has left the
    /// job, or, where `whole` counts, the group has failed.
    fn check(&self, id: GroupId, whole: bool, farewells: bool, ranks: &[u32]) -> Option<Failure> {
        let Some(group) = self.groups.get(&id) else {
            return Some(Failure::fatal(FailureKind::Closed, "the group was destroyed."));
        };
        let lost = |rank: &u32, has_left: bool| {
            let info = &self.peers[group.members.peer(*rank)? as usize];
            info.lost.as_ref().filter(|_| info.has_left == has_left)
        };
        let fatal = |message| Failure::fatal(FailureKind::PeerLost, message);
        let died = || Some(fatal(format!("{}.", ranks.iter().find_map(|rank| lost(rank, false))?)));
        // Who loses a rank mostly ends with that: the loss is the reason, and not that others have left.
        let left = || {
            let reason = ranks.iter().find_map(|rank| lost(rank, true))?;
            let before = group
                .failed
                .as_ref()
                .map(|failure| format!(" Before, group {} failed: {}", group.name, failure.message));
            Some(fatal(format!("{reason}.{}", before.unwrap_or_default())))
        };
        group.failed.clone().filter(|_| whole).or_else(died).or_else(|| if farewells { left() } else { None })
    }
}

/// What the end waits for at least where somebody wants to wait: for the good-bye to be taken.
pub(super) const LEAST_PATIENCE: u64 = 2 * SECOND;
/// What the end waits for at most: as long as torch's own time-out is, where an operation has a longer one.
pub(super) const MOST_PATIENCE: u64 = 30 * 60 * SECOND;
/// What the end waits for where nobody wants to wait: a good-bye leaves, and nothing is asked back.
const UNHEARD: u64 = 100 * MILLISECOND;
