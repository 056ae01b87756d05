//! What callers ask of the engine's thread.

use super::Runtime;
use super::host::Body;
use crate::stats::Stats;
use crate::ticket::{Promise, Ticket};
use penstock_core::groups::{self, Join, Open};
use penstock_net::memory::Region;
use penstock_net::{Contact, Peers};
use penstock_plan::{Algorithm, Collective, Splits};
use penstock_stream::fingerprint::Fingerprint;
use penstock_types::{DType, Failure, FailureKind, Generation, GroupId, Priority, ReduceOp, Scope};
use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
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
            if let Command::Join(_, promise)
            | Command::Open(_, _, promise)
            | Command::Start(_, _, promise)
            | Command::Watch(_, promise) = command
            {
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
    /// Opens a channel of a group.
    Open(GroupId, Open, Promise),
    Start(Scope, Call, Promise),
    Release(GroupId, Ticket),
    Reprioritise(GroupId, Ticket, Priority),
    /// Leaves a group, or closes a channel; `true`: the group is left next.
    Leave(Scope, bool),
    /// Sets the all-reduce algorithm of a channel from its next operation on, and the streams to use to each rank of the group.
    Retune(Scope, Option<Algorithm>, usize),
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
    Abort(Scope, Failure),
    Expire(Scope, u64),
    /// Completes a ticket when the group or channel fails, or is left.
    Watch(Scope, Promise),
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
    /// The algorithm of all-reduces; `None`: chosen by size and hosts. Rank 0's counts for all.
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
    /// Identifies operations that are useful only together (a coflow); 0 for none. Frames and the flight record carry it;
    /// nothing orders by it yet.
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
    pub(super) fn obey(&mut self, peers: &mut Peers, command: Command) {
        match command {
            Command::Join(spec, ticket) => self.join(peers, spec, ticket),
            Command::Open(id, open, ticket) => {
                let body = Body::new(ticket, std::ptr::null(), std::ptr::null_mut(), None);
                self.act(peers, |groups, hands| groups.open(hands, id, open, body));
            }
            Command::Start(channel, call, ticket) => {
                let (call, body) = call.split(ticket);
                self.act(peers, |groups, hands| groups.start(hands, channel, call, body));
            }
            Command::Release(id, ticket) => {
                self.act(peers, |groups, hands| groups.release(hands, id, |body| body.ticket.is_of(&ticket)));
            }
            Command::Reprioritise(id, ticket, priority) => self.act(peers, |groups, hands| {
                groups.reprioritise(hands, id, priority, |body| body.ticket.is_of(&ticket));
            }),
            Command::Leave(scope, leaves_group) => {
                self.act(peers, |groups, hands| groups.close(hands, scope, leaves_group));
            }
            Command::Retune(channel, algorithm, streams) => {
                self.act(peers, |groups, hands| groups.retune(hands, channel, algorithm, streams));
            }
            Command::Hosts(id, reply) => {
                let hosts = self.groups.get(id).map(|group| group.placement().hosts().to_vec());
                drop(reply.send(hosts.unwrap_or_default()));
            }
            Command::Check { group, whole, farewells, ranks, reply } => {
                drop(reply.send(self.groups.check(group, whole, farewells, &ranks)));
            }
            Command::Watch(scope, ticket) => {
                match self.groups.get(scope.group).map(|group| group.end_of(scope.channel)) {
                    Some(Some(failure)) => ticket.complete(Err(failure)),
                    Some(None) => self.local.watches.entry(scope).or_default().push(ticket),
                    None => ticket.complete(Err(Failure::fatal(FailureKind::Closed, "the group was destroyed."))),
                }
            }
            Command::Abort(scope, failure) => self.act(peers, |groups, hands| groups.fail(hands, scope, failure, true)),
            Command::Expire(scope, waited) => self.act(peers, |groups, hands| groups.expire(hands, scope, waited)),
            Command::Share(number, region) => self.local.add_region(number, region),
            Command::Unshare(number) => self.local.remove_region(peers, number),
            Command::Stats(reply) => drop(reply.send(self.stats(peers))),
            Command::Record(reply) => {
                drop(reply.send(self.local.recorder.describe(&self.stats(peers), Instant::now())));
            }
            Command::WriteRecord => self.local.recorder.write(&self.stats(peers)),
            Command::Stop { wait } => self.act(peers, |groups, hands| groups.stop(hands, wait)),
            #[cfg(test)]
            Command::Panic(at_next_frame) => {
                assert!(at_next_frame, "a test wants it");
                self.panics = true;
            }
        }
    }

    /// Connects to the members of a group to which there is no stream yet, and joins it.
    fn join(&mut self, peers: &mut Peers, spec: GroupSpec, ticket: Promise) {
        let GroupSpec { id, generation, rank, members, secret, algorithm, name } = spec;
        let who: Vec<Arc<str>> = members.iter().map(|contact| contact.describe().into()).collect();
        let others = (0..).zip(members).zip(&who).map(|((other, contact), who)| {
            let is_other = other != rank;
            is_other.then(|| {
                let peer = self.groups.peer_of(&contact.node).unwrap_or_else(|| {
                    let peer = self.groups.add_peer(contact.node, who.clone());
                    peers.add(peer, contact.clone());
                    self.local.add_peer(peer, contact);
                    peer
                });
                if !self.groups.is_connected(peer) {
                    peers.connect(peer, id, secret.clone());
                }
                peer
            })
        });
        let members = others.collect();
        self.local.joins.insert(id, ticket);
        let join = Join { id, generation, secret, name: name.into(), members, who, algorithm };
        self.act(peers, |groups, hands| groups.join(hands, join));
    }
}

impl Call {
    /// What the core needs to know of it, and what it does not.
    fn split(self, ticket: Promise) -> (groups::Call, Body) {
        let body = Body::new(ticket, self.input, self.output, self.keep);
        let Call { collective, fingerprint, dtype, op, bytes, splits, tag, coflow, priority, hold, timeout, .. } = self;
        let call =
            groups::Call { collective, fingerprint, dtype, op, bytes, splits, tag, coflow, priority, hold, timeout };
        (call, body)
    }
}
