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
use penstock_stream::fingerprint::Fingerprint;
use penstock_types::{
    DType, Failure, FailureKind, Generation, GroupId, MILLISECOND, PeerId, Priority, ReduceOp, SECOND, Time,
};
use std::any::Any;
use std::sync::{Mutex, MutexGuard, mpsc};
use std::time::Instant;

/// State that callers' threads share with the engine's thread.
#[derive(Debug, Default)]
pub(crate) struct Shared(Mutex<Mailbox>);

#[derive(Debug, Default)]
struct Mailbox {
    commands: Vec<Command>,
    /// Set when the engine's thread reads no more commands.
    closed: Option<Failure>,
}

impl Shared {
    /// Posts a command to the engine's thread. If the thread has ended, `ticket` gets the reason, and the result is false.
    pub(crate) fn post(&self, command: Command, ticket: &Ticket) -> bool {
        let mut mailbox = self.lock();
        let Some(failure) = mailbox.closed.clone() else {
            mailbox.commands.push(command);
            return true;
        };
        drop(mailbox);
        // Before the command is dropped: that drops its promise.
        ticket.complete(Err(failure));
        false
    }

    /// Refuses commands from now on. Commands that were not read fail as later ones do.
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

/// A request of a caller to the engine's thread.
#[derive(Debug)]
pub(crate) enum Command {
    Join(GroupSpec, Promise),
    Start(GroupId, Call, Promise),
    Release(GroupId, Ticket),
    Leave(GroupId),
    /// Sets the all-reduce algorithm of a group from its next operation on, and the streams to use to each of its ranks.
    Retune(GroupId, Option<Algorithm>, usize),
    Hosts(GroupId, mpsc::Sender<Vec<u32>>),
    /// Checks whether one of these ranks is lost, and optionally more.
    Check {
        group: GroupId,
        /// Also whether the group has failed.
        whole: bool,
        /// Also whether one of the ranks has left the job in good order.
        farewells: bool,
        ranks: Vec<u32>,
        reply: mpsc::Sender<Option<Failure>>,
    },
    Abort(GroupId, Failure),
    Expire(GroupId, u64),
    /// Completes a ticket when the group fails, or is left.
    Watch(GroupId, Promise),
    Share(u64, Region),
    Unshare(u64),
    Stats(mpsc::Sender<Stats>),
    Record(mpsc::Sender<String>),
    WriteRecord,
    /// Ends the engine; with `wait`, after peers have taken what was sent to them, as far as their operations' time-outs
    /// allow.
    Stop {
        wait: bool,
    },
    /// Panics now, or (`true`) at the next frame: for tests of what a defect of the engine leads to.
    #[cfg(test)]
    Panic(bool),
}

/// A group to join.
#[derive(Clone, Debug)]
pub struct GroupSpec {
    /// Chosen by the group's rank 0, and never used for another group. Engines remember the ids of groups that they have left
    /// as ranges, so groups of the same ranks should be numbered consecutively, from a random number on.
    pub id: GroupId,
    /// The job's generation.
    pub generation: Generation,
    /// This process's rank in the group.
    pub rank: u32,
    /// Every rank's contact, including this one's.
    pub members: Vec<Contact>,
    /// The secret that the streams' hand-shakes prove.
    pub secret: Vec<u8>,
    /// The algorithm of all-reduces; `None`: the planner's choice. Rank 0's counts for all.
    pub algorithm: Option<Algorithm>,
    /// A name for logs and errors.
    pub name: String,
}

/// An operation that a caller starts.
pub struct Call {
    /// What to do.
    pub collective: Collective,
    /// Operation, dtype, size and so on, which ranks compare; its name is used in errors.
    pub fingerprint: Fingerprint,
    /// Element type.
    pub dtype: DType,
    /// The reduction, if the collective has one.
    pub op: ReduceOp,
    /// The operation's size, as [`Request::bytes`] defines it.
    pub bytes: u64,
    /// Unequal parts of an all-to-all.
    pub splits: Option<Splits>,
    /// The contribution; null for an operation in place.
    pub input: *const u8,
    /// The result.
    pub output: *mut u8,
    /// Tag of a send or receive.
    pub tag: u32,
    /// Identifies operations that are useful only together (a coflow); 0 for none. Frames carry it, and nothing reads it yet.
    pub coflow: u32,
    /// How urgent.
    pub priority: Priority,
    /// Give the operation its place in the order now, but do not touch the buffers before [`crate::Group::release`]: the
    /// contribution is still being copied from a device.
    pub hold: bool,
    /// Time-out in nanoseconds.
    pub timeout: u64,
    /// The owner of the buffers, kept until the operation has ended.
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
                // An operation that ended while its caller gave up has succeeded.
                let Some(group) = self.groups.get(&id).filter(|group| group.is_busy()) else { return };
                let (message, patience) = match &group.joining {
                    // A rank that lacks a member knows more, and should report first.
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
                // Ranks that wait for this one in an idle group learn what it did there. In other groups it may do more:
                // there they learn that it has left the job.
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

    /// Why a group of these ranks of the group `id` cannot be built: one of them is lost; with `farewells`, one has left the
    /// job; with `whole`, the group has failed.
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
}

/// How long the end waits at least for good-byes to be acknowledged, if the caller waits.
pub(super) const LEAST_PATIENCE: u64 = 2 * SECOND;
/// How long the end waits at most, if the caller waits: torch's own default time-out, or more if an operation had a longer
/// one.
pub(super) const MOST_PATIENCE: u64 = 30 * 60 * SECOND;
/// How long the end waits if the caller does not wait: good-byes leave, and are not acknowledged.
const UNHEARD: u64 = 100 * MILLISECOND;
