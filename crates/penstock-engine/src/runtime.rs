//! The engine's thread: groups, operations, failures. It is the [`Handler`] of the event loop.

use crate::digest::digest;
use crate::operation::{Awaited, Effect, Incoming, Memory, Misfit, Operation};
use crate::pages::HugePages;
use crate::recorder::{Entry as Recorded, Record, Recorder};
use crate::reported::{Overtaken, Reported};
use crate::scale::Scale;
use crate::stats::{GroupStats, Held, PeerStats, Stats};
use crate::tags::Tags;
use crate::ticket::{Promise, Ticket};
use crate::unbound::{ANY_SOURCE, Unbound};
use penstock_net::fds::Fd;
use penstock_net::memory::{Mapping, MemoryEpoch, Region, Remote};
use penstock_net::{Admission, Contact, Handler, PeerId, Peers};
use penstock_plan::{
    Algorithm, Collective, Planner, Request, Splits, Steps, Thresholds, Topology, choose, segment_bytes,
};
use penstock_stream::fingerprint::{Fingerprint, Name};
use penstock_stream::frame::{Channel, Direction, Kind, Reference};
use penstock_stream::handshake::{Hello, NodeKey};
use penstock_stream::peer::{Body, Event, FLAG_EAGER, Farewell, OpStatus, Outgoing, Peer, Report};
use penstock_stream::ranges::Ranges;
use penstock_stream::{FrameError, Header, MessageKey};
use penstock_types::{
    DType, Failure, FailureKind, Generation, GroupId, MILLISECOND, OpSeq, Priority, ReduceOp, SECOND, Time,
};
use std::any::Any;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
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

    fn take(&self) -> Vec<Command> {
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

/// Runs on the engine's thread.
pub(crate) struct Runtime {
    shared: Arc<Shared>,
    node: NodeKey,
    memory_epoch: Arc<MemoryEpoch>,
    pages: HugePages,
    planner: Planner,
    thresholds: Thresholds,
    groups: HashMap<GroupId, Group>,
    /// Ids of groups that were left: what still comes for them is dropped. Kept for ever, since a frame may be late by any
    /// time; rank 0 numbers the groups of the same ranks in order, so they are few ranges.
    closed: Ranges,
    /// What peers have reported of groups that this process has not joined yet.
    reported: Reported,
    /// Which of them they have left, or have seen fail: nothing more of theirs is kept.
    overtaken: Overtaken,
    /// What the streams' hand-shakes prove. A job outlives the group that brought it, since groups share streams: it stays until
    /// nobody connects with it any more.
    jobs: HashMap<GroupId, Job>,
    /// What the user's memory is shared of, by address, with its number.
    regions: BTreeMap<u64, (u64, Region)>,
    peers: Vec<PeerInfo>,
    by_node: HashMap<NodeKey, PeerId>,
    /// What came for operations that are not posted yet, or not ready for it.
    early: HashMap<(PeerId, MessageKey), Early>,
    /// How many did so far.
    arrivals: u64,
    /// What peers believe of operations that are not posted yet.
    claims: HashMap<(GroupId, Channel, OpSeq), Vec<(PeerId, Fingerprint)>>,
    /// Groups that have a reason to fail, and until when somebody else may come up with a better one.
    pending_failures: Vec<(Time, GroupId, Failure)>,
    /// Operations with messages to read from other processes' memory, most urgent first. Some may be over.
    work: BTreeSet<(Priority, Time, GroupId, OpId)>,
    recorder: Recorder,
    stopping: bool,
    /// How long the end waits for peers to take what was sent to them.
    patience: u64,
    effects: Vec<Effect>,
    finished: u64,
    /// Of the operations so far.
    longest_timeout: u64,
    /// The next frame panics.
    #[cfg(test)]
    panics: bool,
}

struct PeerInfo {
    contact: Contact,
    linked: bool,
    local: bool,
    pid: u32,
    lost: Option<String>,
    /// It is lost because it has left the job in good order.
    has_left: bool,
    /// Regions of ours that the peer knows; the descriptors of some have not left yet.
    offered: HashMap<u64, Option<Fd>>,
    /// Regions of its own, by its numbers.
    mappings: HashMap<u64, Arc<Mapping>>,
    /// What it has passed for frames that have not come yet.
    descriptors: VecDeque<Fd>,
}

impl PeerInfo {
    fn new(contact: Contact) -> PeerInfo {
        PeerInfo {
            contact,
            linked: false,
            local: false,
            pid: 0,
            lost: None,
            has_left: false,
            offered: HashMap::new(),
            mappings: HashMap::new(),
            descriptors: VecDeque::new(),
        }
    }
}

struct Job {
    generation: Generation,
    secret: Vec<u8>,
    /// Members that may connect to this process with this job, now or when they have lost a stream.
    nodes: HashSet<NodeKey>,
}

struct Group {
    rank: u32,
    name: Arc<str>,
    /// The peer of every rank; `None` for this one.
    members: Vec<Option<PeerId>>,
    contacts: Vec<Contact>,
    topology: Topology,
    algorithm: Option<Algorithm>,
    issued: Issued,
    ended: Ended,
    ops: HashMap<OpId, Active>,
    /// Operations that have their place but not their buffers.
    held: HashMap<OpId, Waiting>,
    /// Receives that have no place yet: they take any source, or wait behind one that does.
    unbound: Unbound<Posted>,
    joining: Option<Joining>,
    failed: Option<Failure>,
    /// A member has ended the group after so many collectives, or has left without making more: it fails when those have ended here
    /// too. Of several, the fewest.
    ends_after: Option<(u64, Failure)>,
    /// They end with the group.
    watches: Vec<Promise>,
    /// Members that have left, and how many collectives they had issued.
    gone: HashMap<PeerId, u64>,
    /// What collectives were to members that have left, as the first of them has told.
    told: HashMap<OpSeq, (PeerId, Fingerprint)>,
    last_algorithm: String,
}

/// How many operations a rank has issued in a group.
#[derive(Debug, Default)]
struct Issued {
    collectives: u64,
    /// By the other rank.
    sends: HashMap<u32, Tags>,
    receives: HashMap<u32, Tags>,
}

impl Issued {
    fn count(&self, sequence: Sequence) -> u64 {
        match sequence {
            Sequence::Collectives => self.collectives,
            Sequence::Sends { to, tag } => self.sends.get(&to).map_or(0, |tags| tags.count(tag)),
            Sequence::Receives { from, tag } => self.receives.get(&from).map_or(0, |tags| tags.count(tag)),
        }
    }

    /// Gives the next operation its name.
    fn next(&mut self, sequence: Sequence) -> OpId {
        let seq = match sequence {
            Sequence::Collectives => {
                self.collectives += 1;
                self.collectives - 1
            }
            Sequence::Sends { to, tag } => self.sends.entry(to).or_default().add(tag),
            Sequence::Receives { from, tag } => self.receives.entry(from).or_default().add(tag),
        };
        OpId { sequence, seq }
    }
}

/// What the last operations were that have ended on this rank: a peer may still be in one of them, and believe it to be
/// another. One that heard from every rank before it ended, as an all-to-all with splits does, was compared with all of them.
#[derive(Debug, Default)]
struct Ended(VecDeque<(OpId, Fingerprint)>);

impl Ended {
    fn remember(&mut self, op: OpId, active: &Active) {
        if active.splits.is_some() {
            return;
        }
        if self.0.len() == MAX_ENDED {
            self.0.pop_front();
        }
        self.0.push_back((op, active.fingerprint));
    }

    /// What an operation was, if it is remembered. What is asked for is mostly among the last.
    fn fingerprint(&self, op: OpId) -> Option<Fingerprint> {
        self.0.iter().rev().find(|(known, _)| *known == op).map(|(_, fingerprint)| *fingerprint)
    }

    /// The last collectives.
    fn collectives(&self) -> impl Iterator<Item = (OpSeq, Fingerprint)> {
        let collectives = self.0.iter().rev().filter(|(op, _)| op.sequence == Sequence::Collectives);
        collectives.map(|(op, fingerprint)| (OpSeq(op.seq), *fingerprint))
    }
}

/// A join that has not ended.
struct Joining {
    ticket: Promise,
    /// What every rank says of who shares its host, once all links are up: the group's first operation gathers it.
    hosts: Option<Box<[u64]>>,
}

/// Names an operation within its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct OpId {
    sequence: Sequence,
    /// Its place in that sequence, from 0 on.
    seq: u64,
}

/// Operations of a group that are counted together: what [`Channel`] is between two ranks, as one of them sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Sequence {
    Collectives,
    Sends { to: u32, tag: u32 },
    Receives { from: u32, tag: u32 },
}

struct Waiting {
    call: Call,
    request: Request,
    steps: Arc<Steps>,
    ticket: Promise,
    /// When it took its place: its time-out counts from then, also while it is held.
    since: Time,
    recorded: Recorded,
}

/// A receive that has no place in a sequence yet.
struct Posted {
    call: Call,
    ticket: Promise,
    since: Time,
    recorded: Recorded,
}

struct Active {
    operation: Operation,
    ticket: Promise,
    fingerprint: Fingerprint,
    /// Of an all-to-all: the parts in bytes, and the bytes of an element.
    splits: Option<(Splits, u64)>,
    coflow: u32,
    recorded: Recorded,
    priority: Priority,
    started: Time,
    timeout: u64,
    progressed: Time,
    probed: Time,
    /// What peers answered to probes: how many operations they have issued.
    issued: HashMap<u32, u64>,
    /// The factor of its contribution, which is applied in turns before the operation starts.
    scale: Option<Scale>,
    _keep: Option<Box<dyn Any + Send>>,
}

impl Active {
    /// What this rank and another compare of the operation.
    fn fingerprint(&self, rank: u32, other: u32) -> Fingerprint {
        let Some((splits, element)) = &self.splits else { return self.fingerprint };
        let [sent, received] = [&splits.input, &splits.output].map(|parts| parts[other as usize] / element);
        let (up, down) = if rank < other { (sent, received) } else { (received, sent) };
        self.fingerprint.of_pair(up, down)
    }
}

struct Early {
    fingerprint: Fingerprint,
    /// Its place among all that came early.
    arrival: u64,
    content: Content,
}

enum Content {
    Bytes {
        total: u64,
        payload: Vec<u8>,
    },
    Remote {
        total: u64,
        remote: Remote,
    },
    /// The sender has no credit for it and waits for a grant.
    Announced,
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
            early: HashMap::new(),
            arrivals: 0,
            claims: HashMap::new(),
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

    // ------------------------------------------------------------------ commands

    fn join(&mut self, peers: &mut Peers, spec: GroupSpec, ticket: Promise, now: Time) {
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
        // A node connects with the first job that it has with this one. Where it has connected already, that is not this job.
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
            rank: spec.rank,
            name: spec.name.into(),
            topology: Topology::separate_hosts(members.len() as u32),
            members,
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

    /// Why a join has not ended after `waited` nanoseconds: with whom there is no connection.
    fn missing(&self, peers: &Peers, group: &Group, waited: u64) -> String {
        let (rank, name, waited) = (group.rank, &group.name, seconds(waited));
        let unlinked = group.members.iter().enumerate().filter_map(|(other, member)| {
            let peer = member.filter(|peer| !self.peers[*peer as usize].linked)?;
            let who = group.contacts[other].describe();
            // Of two ranks one connects and the other waits.
            Some(match peers.trouble(peer) {
                Some(trouble) => format!("{who}: {trouble}"),
                None => format!("{who}: no answer"),
            })
        });
        let unlinked: Vec<String> = unlinked.collect();
        format!(
            "Timed out after {waited}: rank {rank} has no connection with {} of the {} other members of group {name}: {}. Firewalls, \
             PENSTOCK_INTERFACE and PENSTOCK_PORT_RANGE decide who reaches whom; `penstock doctor` looks at all pairs.",
            unlinked.len(),
            group.members.len() - 1,
            unlinked.join("; ")
        )
    }

    /// Goes on with a join once all members are linked: every rank says whom it shares a host with, since the choice of an
    /// algorithm must be the same on all ranks, and each sees its own links only.
    fn check_linked(&mut self, peers: &mut Peers, id: GroupId, now: Time) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let is_linked = |peer: &PeerId| self.peers[*peer as usize].linked;
        let Some(joining) = group.joining.as_mut().filter(|_| group.members.iter().flatten().all(is_linked)) else {
            return;
        };
        if joining.hosts.is_some() {
            return;
        }
        let world = group.members.len();
        let neighbours = group.members.iter().enumerate().filter(|(_, member)| {
            member.is_none_or(|peer| self.peers[peer as usize].local && peers.look(peer).config().references)
        });
        // Ranks of one host share memory with the same ranks. Where only some pairs of a host can, their lists differ, and it
        // counts as several.
        let own = Box::new(digest(neighbours.map(|(rank, _)| rank as u64)));
        let hosts = joining.hosts.insert(vec![0; world].into_boxed_slice());
        let call = Call {
            collective: Collective::AllGather,
            fingerprint: Fingerprint::new(Name::AllGather, None, DType::I64, None, world as u64),
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
            // Whoever waits for the join knows how long it may take.
            timeout: u64::MAX,
            keep: Some(own),
        };
        self.start(peers, id, call, Ticket::default().promise(), now);
    }

    /// Completes a join: all ranks know now which of them share a host.
    fn joined(&mut self, id: GroupId) {
        let group = self.groups.get_mut(&id).expect("its operation has just ended");
        let Some(Joining { ticket, hosts: Some(keys) }) = group.joining.take() else { return };
        let first = |key| keys.iter().position(|other| other == key).expect("it is one of them") as u32;
        group.topology = Topology::new(&keys.iter().map(first).collect::<Vec<u32>>());
        ticket.complete(Ok(()));
    }

    fn start(&mut self, peers: &mut Peers, id: GroupId, call: Call, ticket: Promise, now: Time) {
        let Some(group) = self.groups.get_mut(&id) else {
            let gone = Failure::fatal(FailureKind::Closed, "the group was destroyed.");
            return ticket.complete(Err(gone));
        };
        if let Some(failure) = &group.failed {
            return ticket.complete(Err(failure.clone()));
        }
        if let Err(failure) = check_call(&call, group.members.len()) {
            return ticket.complete(Err(failure));
        }
        // A join's own operation has none.
        if call.timeout != u64::MAX {
            self.longest_timeout = self.longest_timeout.max(call.timeout.min(MOST_PATIENCE));
        }
        match call.collective {
            Collective::Recv { from } if from == ANY_SOURCE || group.unbound.has(call.tag) => {
                self.post(peers, id, call, ticket, now);
            }
            _ => self.place_in_order(peers, id, call, ticket, now, None),
        }
    }

    /// Starts a receive that cannot have its place in a sequence yet: it takes any source, or one that does was posted before it
    /// under the same tag.
    fn post(&mut self, peers: &mut Peers, id: GroupId, call: Call, ticket: Promise, now: Time) {
        let group = self.groups.get_mut(&id).expect("the caller has looked it up");
        let tag = call.tag;
        let recorded = self.recorder.issued(Record {
            group: group.name.clone(),
            seq: None,
            what: call.fingerprint,
            bytes: call.bytes,
            algorithm: Algorithm::Direct,
            issued: Instant::now(),
            ended: None,
            waits_for: Some(awaited_of(&call).to_owned()),
        });
        group.unbound.push(tag, Posted { call, ticket, since: now, recorded });
        self.bind(peers, id, tag);
        // If it still waits, it is the last. Those before it were looked at when they came.
        let Some(group) = self.groups.get(&id) else { return };
        let reason = group.unbound.last(tag).and_then(|posted| self.senders_are_gone(group, posted));
        if let Some(reason) = reason {
            self.fail_group(peers, id, Failure::fatal(FailureKind::PeerLost, format!("{reason}.")), true);
        }
    }

    /// Gives receives that were posted without a place in a sequence their messages: each that takes any source, in the order in
    /// which they were posted, the first one that is here or announced.
    fn bind(&mut self, peers: &mut Peers, id: GroupId, tag: u32) {
        while let Some(group) = self.groups.get_mut(&id)
            && let Some(first) = group.unbound.first(tag)
            && let Some(from) = source_of(&first.call).or_else(|| first_sender(group, id, tag, &self.early))
        {
            let Posted { mut call, ticket, since, recorded } = group.unbound.pop(tag).expect("just seen");
            call.collective = Collective::Recv { from };
            ticket.set_source(from);
            self.place_in_order(peers, id, call, ticket, since, Some(recorded));
        }
    }

    /// Gives an operation its name, and starts it, or holds it. It was recorded before if it had to wait for its name.
    fn place_in_order(
        &mut self,
        peers: &mut Peers,
        id: GroupId,
        call: Call,
        ticket: Promise,
        since: Time,
        recorded: Option<Recorded>,
    ) {
        let group = self.groups.get_mut(&id).expect("the caller has looked it up");
        let world = group.members.len() as u32;
        let request = Request {
            collective: call.collective,
            world,
            rank: group.rank,
            topology: group.topology.clone(),
            bytes: call.bytes,
            element_bytes: call.dtype.size() as u32,
            splits: call.splits.clone(),
            segment_bytes: segment_bytes(call.collective, group.topology.medium(), world, call.bytes, &self.thresholds),
        };
        let (mut algorithm, mut reason) = choose(&request, &self.thresholds);
        if call.collective == Collective::AllReduce
            && let Some(wanted) = group.algorithm
            && wanted != algorithm
            && fits(wanted, call.bytes, group.topology.medium(), &self.thresholds)
        {
            reason = format!("{wanted} (PENSTOCK_ALGORITHM or the tuner) instead of {algorithm}");
            algorithm = wanted;
        }
        let steps = match self.planner.steps(&request, algorithm) {
            Ok(steps) => steps,
            Err(error) => {
                let failure =
                    Failure::of_call(FailureKind::Config, format!("{}: {error}.", call.fingerprint.describe()));
                if let Some(recorded) = recorded {
                    self.recorder.ended(recorded, Instant::now(), false);
                }
                return ticket.complete(Err(failure));
            }
        };
        group.last_algorithm = reason;
        let op = group.issued.next(match call.collective {
            Collective::Send { to } => Sequence::Sends { to, tag: call.tag },
            Collective::Recv { from } => Sequence::Receives { from, tag: call.tag },
            _ => Sequence::Collectives,
        });
        let hold = call.hold;
        let recorded = match recorded {
            Some(recorded) => {
                self.recorder.numbered(recorded, op.seq);
                recorded
            }
            None => self.recorder.issued(Record {
                group: group.name.clone(),
                seq: Some(op.seq),
                what: call.fingerprint,
                bytes: call.bytes,
                algorithm,
                issued: Instant::now(),
                ended: None,
                waits_for: None,
            }),
        };
        let waiting = Waiting { call, request, steps, ticket, since, recorded };
        if hold {
            group.held.insert(op, waiting);
        } else {
            self.begin(peers, id, op, waiting, peers.now());
        }
    }

    /// The buffers of an operation that was started with `hold` are ready.
    fn release(&mut self, peers: &mut Peers, id: GroupId, ticket: &Ticket, now: Time) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let Some(op) = group.held.iter().find(|(_, waiting)| waiting.ticket.is_of(ticket)).map(|(op, _)| *op) else {
            if let Some(posted) = group.unbound.iter_mut().find(|posted| posted.ticket.is_of(ticket)) {
                posted.call.hold = false;
            }
            return;
        };
        let waiting = group.held.remove(&op).expect("just found");
        self.begin(peers, id, op, waiting, now);
    }

    fn begin(&mut self, peers: &mut Peers, id: GroupId, op: OpId, waiting: Waiting, now: Time) {
        let Waiting { call, request, steps, ticket, since, recorded } = waiting;
        let group = self.groups.get_mut(&id).expect("the caller has looked it up");
        let world = group.members.len() as u32;
        let (mut input, mut output) = (call.input, call.output);
        let is_read = |peer: &PeerId| self.peers[*peer as usize].local && peers.look(*peer).config().references;
        if group.members.iter().flatten().any(is_read) {
            let buffers = [(input as u64, request.input_bytes()), (output as u64, request.output_bytes())];
            let is_private = |&(address, len): &(u64, u64)| find(&self.regions, address, len).is_none();
            // SAFETY: the caller of `Group::start` keeps its buffers until the operation has ended.
            unsafe { self.pages.used(buffers.into_iter().filter(is_private)) };
        }
        let scale = Scale::new(&call, &request, &mut input, &mut output);
        let memory = Memory { dtype: call.dtype, op: call.op, world, input, output };
        let active = Active {
            operation: Operation::new(steps, memory),
            ticket,
            fingerprint: call.fingerprint,
            splits: call.splits.map(|splits| (splits, call.dtype.size() as u64)),
            coflow: call.coflow,
            recorded,
            priority: call.priority,
            started: since,
            timeout: call.timeout,
            progressed: now,
            probed: now,
            issued: HashMap::new(),
            scale,
            _keep: call.keep,
        };
        let turn = (active.priority, active.started, id, op);
        let is_scaled = active.scale.as_ref().is_none_or(Scale::is_done);
        group.ops.insert(op, active);
        if !self.check_claims(peers, id, op) {
            return;
        }
        if is_scaled {
            self.begin_steps(peers, id, op, now);
        } else {
            self.work.insert(turn);
        }
    }

    fn begin_steps(&mut self, peers: &mut Peers, id: GroupId, op: OpId, now: Time) {
        self.drive(peers, id, op, |operation, effects| operation.start(effects), now);
    }

    /// Fails an operation that waits for a rank that is lost, or has left. What the rank gave before still counts.
    fn check_departed(&mut self, peers: &mut Peers, id: GroupId, op: OpId) {
        let Some(group) = self.groups.get(&id) else { return };
        let Some(active) = group.ops.get(&op) else { return };
        if !group.members.iter().flatten().any(|peer| self.is_gone(group, *peer)) {
            return;
        }
        // It fails with the group, of what came first.
        if group.is_void(op) {
            return;
        }
        let failure = active.operation.awaited_messages().into_iter().find_map(|(rank, what)| {
            let peer = group.members[rank as usize].filter(|peer| self.is_gone(group, *peer))?;
            let key = |message| op.key(id, group.rank, message);
            let comes = match what {
                // What was only announced, or lies in the rank's memory, went with the rank.
                Awaited::Message(message) => {
                    let early = self.early.get(&(peer, key(message)));
                    early.is_some_and(|early| matches!(early.content, Content::Bytes { .. }))
                }
                // It has taken this, if its process lives. Its word may come on another stream than that it has left, or with it.
                Awaited::Taken(message) => {
                    self.peers[peer as usize].lost.is_none() && !peers.look(peer).needs_the_peer(&key(message))
                }
                Awaited::Unsent => false,
            };
            (!comes).then(|| self.departure(group, rank, peer, op))
        });
        match (failure, op.sequence) {
            // What came before may still end.
            (Some(failure), Sequence::Collectives) => self.end_group_after(peers, id, op.seq, failure),
            (Some(failure), _) => self.fail_group(peers, id, failure, true),
            (None, _) => {}
        }
    }

    /// Whether a member has left the group, has left the job, or is lost.
    fn is_gone(&self, group: &Group, peer: PeerId) -> bool {
        group.gone.contains_key(&peer) || self.peers[peer as usize].lost.is_some()
    }

    /// Why a rank that is gone does not do its part of an operation.
    fn departure(&self, group: &Group, rank: u32, peer: PeerId, op: OpId) -> Failure {
        let Some(collectives) = group.gone.get(&peer) else {
            let reason = self.peers[peer as usize].lost.as_deref().unwrap_or("a rank is gone");
            return Failure::fatal(FailureKind::PeerLost, format!("{reason}."));
        };
        let left = format!(
            "{} has left the group (its script has ended, or has destroyed the group) after {} collectives",
            group.contacts[rank as usize].describe(),
            collectives.saturating_sub(JOIN_OPS)
        );
        if op.sequence == Sequence::Collectives && op.seq < *collectives {
            // What a rank sends in an operation has come before the word that it has left.
            let message = format!("{left}, and its #{} was another operation, or PENSTOCK_* settings differ.", op.seq);
            return Failure::fatal(FailureKind::Mismatch, message);
        }
        Failure::fatal(FailureKind::PeerLost, format!("{left}."))
    }

    /// Fails a group in which a receive without a message waits for ranks that have all left. What they sent has come before that
    /// is known of them.
    fn check_senders(&mut self, peers: &mut Peers, id: GroupId) {
        let Some(group) = self.groups.get(&id) else { return };
        let reason = group.unbound.iter().find_map(|posted| self.senders_are_gone(group, posted));
        if let Some(reason) = reason {
            self.fail_group(peers, id, Failure::fatal(FailureKind::PeerLost, format!("{reason}.")), true);
        }
    }

    /// Why no message comes any more for a receive without one, if that is so. In a group that is to fail it waits for that.
    fn senders_are_gone(&self, group: &Group, posted: &Posted) -> Option<String> {
        if group.ends_after.is_some() {
            return None;
        }
        let farewell = |rank: u32| {
            let peer = (*group.members.get(rank as usize)?)?;
            let has_left = || {
                let contact = &group.contacts[rank as usize];
                group.gone.contains_key(&peer).then(|| format!("{} has left the group", contact.describe()))
            };
            self.peers[peer as usize].lost.clone().or_else(has_left)
        };
        let mut others = (0..group.members.len() as u32).filter(|rank| *rank != group.rank);
        match source_of(&posted.call) {
            Some(from) => farewell(from),
            None => Some(
                others
                    .try_fold(Vec::new(), |mut all, rank| {
                        all.push(farewell(rank)?);
                        Some(all)
                    })?
                    .join("; "),
            ),
        }
    }

    /// Why a group of these ranks of the group `id` cannot be built: one of them is lost, or, where `farewells` count, has left the
    /// job, or, where `whole` counts, the group has failed.
    fn check(&self, id: GroupId, whole: bool, farewells: bool, ranks: &[u32]) -> Option<Failure> {
        let Some(group) = self.groups.get(&id) else {
            return Some(Failure::fatal(FailureKind::Closed, "the group was destroyed."));
        };
        let lost = |rank: &u32, has_left: bool| {
            let info = &self.peers[(*group.members.get(*rank as usize)?)? as usize];
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

    /// Compares what peers have said of an operation with what it is here. False if the group has failed of it.
    fn check_claims(&mut self, peers: &mut Peers, id: GroupId, op: OpId) -> bool {
        let group = &self.groups[&id];
        let active = &group.ops[&op];
        let MessageKey { channel, op: seq, .. } = op.key(id, group.rank, 0);
        // Others may use the same tag in the same direction.
        let with = op.other().and_then(|rank| group.members[rank as usize]);
        let concerns = |peer: &PeerId| with.is_none_or(|only| only == *peer);
        let from_early = self.early.iter().filter_map(|((peer, key), early)| {
            let same = (key.group, key.channel, key.op) == (id, channel, seq) && concerns(peer);
            same.then_some((*peer, early.fingerprint))
        });
        let mut claimed = Vec::new();
        if let Entry::Occupied(mut entry) = self.claims.entry((id, channel, seq)) {
            claimed.extend(entry.get_mut().extract_if(.., |(peer, _)| concerns(peer)));
            if entry.get().is_empty() {
                entry.remove();
            }
        }
        let told = group.told.get(&seq).filter(|_| op.sequence == Sequence::Collectives).copied();
        let odd = from_early.chain(claimed).chain(told).find(|(peer, theirs)| {
            let other = group.members.iter().position(|member| *member == Some(*peer));
            other.is_some_and(|other| active.fingerprint(group.rank, other as u32) != *theirs)
        });
        match odd {
            Some((peer, theirs)) => {
                self.mismatch(peers, id, op, peer, theirs);
                false
            }
            None => true,
        }
    }

    /// Lets an operation act, and carries out what it wants. It fails if it waits for a rank that has left then.
    fn drive(
        &mut self,
        peers: &mut Peers,
        id: GroupId,
        op: OpId,
        act: impl FnOnce(&mut Operation, &mut Vec<Effect>),
        now: Time,
    ) {
        let mut effects = std::mem::take(&mut self.effects);
        let Some(active) = self.groups.get_mut(&id).and_then(|group| group.ops.get_mut(&op)) else {
            self.effects = effects;
            return;
        };
        active.progressed = now;
        act(&mut active.operation, &mut effects);
        let mut at = 0;
        let mut needs_the_gone = false;
        // Opening a message may find it here already, which may ready more steps: the list grows while it is walked.
        while at < effects.len() {
            let effect = effects[at];
            at += 1;
            needs_the_gone |= effect.awaits().is_some_and(|rank| {
                let group = &self.groups[&id];
                group.members[rank as usize].is_some_and(|peer| self.is_gone(group, peer))
            });
            match effect {
                Effect::Send { to, message, address, len } => {
                    self.send(peers, id, op, to, message, address, len, &mut effects);
                }
                Effect::Read { from, message } => {
                    let group = &self.groups[&id];
                    let peer = group.members[from as usize].expect("plans receive from other ranks");
                    peers.machine(peer).done(op.key(id, group.rank, message));
                }
                Effect::Doubt { from, message } => {
                    // A group of the sender's has failed. If it is this one, its report comes before the answer, which counts then only
                    // for what the sender has ended ([`Group::is_void`]).
                    let group = &self.groups[&id];
                    let peer = group.members[from as usize].expect("plans receive from other ranks");
                    let fingerprint = group.ops[&op].fingerprint(group.rank, from);
                    peers.machine(peer).probe(op.key(id, group.rank, message), fingerprint);
                }
                Effect::Open { from, message, count } => {
                    if let Err(misfit) = self.opened(peers, id, op, from, message, count, &mut effects) {
                        effects.clear();
                        self.effects = effects;
                        self.misfit(peers, id, from, misfit);
                        return;
                    }
                }
            }
        }
        effects.clear();
        self.effects = effects;
        let group = self.groups.get_mut(&id).expect("looked up above");
        if let Some(active) = group.ops.get(&op).filter(|active| active.operation.has_work()) {
            self.work.insert((active.priority, active.started, id, op));
        }
        if group.ops.get(&op).is_some_and(|active| active.operation.is_done()) {
            let active = group.ops.remove(&op).expect("looked up above");
            group.ended.remember(op, &active);
            let MessageKey { channel, op: seq, .. } = op.key(id, group.rank, 0);
            let with = op.other();
            for (_, peer) in (0..).zip(&group.members).filter(|(rank, _)| with.is_none_or(|only| only == *rank)) {
                if let Some(peer) = peer {
                    peers.machine(*peer).retire(id, channel, seq);
                }
            }
            self.finished += 1;
            self.recorder.ended(active.recorded, Instant::now(), true);
            active.ticket.complete(Ok(()));
            if self.groups[&id].joining.is_some() {
                self.joined(id);
            }
            let group = &self.groups[&id];
            let is_over = |(ends, _): &(u64, Failure)| group.first_running().is_none_or(|first| first >= *ends);
            if let Some((_, failure)) = group.ends_after.clone().filter(is_over) {
                self.fail_group(peers, id, failure, true);
            }
        } else if needs_the_gone {
            self.check_departed(peers, id, op);
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn send(
        &mut self,
        peers: &mut Peers,
        id: GroupId,
        op: OpId,
        to: u32,
        message: u32,
        address: *const u8,
        len: usize,
        effects: &mut Vec<Effect>,
    ) {
        let group = self.groups.get_mut(&id).expect("its operation is running");
        let peer = group.members[to as usize].expect("plans send to other ranks");
        let rank = group.rank;
        let key = op.key(id, rank, message);
        let active = group.ops.get_mut(&op).expect("it is running");
        let machine = peers.machine(peer);
        let is_short = len as u64 <= machine.eager_limit();
        // Beyond the credit a short message stays where it is until it is granted, and its operation is open. So does one
        // without bytes: the receiver has to remember it, too.
        let owned = is_short && machine.has_credit(len as u64);
        let info = &mut self.peers[peer as usize];
        let (mut region, mut place) = (0, address as u64);
        if info.local
            && info.lost.is_none()
            && !is_short
            && let Some((number, shared, offset)) = find(&self.regions, address as u64, len as u64)
        {
            let has_room = info.offered.len() < MAX_MAPPINGS;
            if let Entry::Vacant(entry) = info.offered.entry(number)
                && has_room
            {
                match shared.descriptor() {
                    Ok(descriptor) => {
                        entry.insert(Some(descriptor));
                        machine.share(number, shared.len());
                    }
                    Err(error) => {
                        let who = info.contact.describe();
                        log::warn!("penstock: cannot share memory with {who} ({error}): it is read as any other");
                    }
                }
            }
            if info.offered.contains_key(&number) {
                (region, place) = (number, offset);
            }
        }
        let body = if owned && len == 0 {
            Body::Owned(Arc::from([]))
        } else if owned {
            // SAFETY: the plan's slices lie in the operation's buffers.
            Body::Owned(unsafe { std::slice::from_raw_parts(address, len) }.into())
        } else {
            let place = Reference { address: place, epoch: self.memory_epoch.epoch(), region };
            Body::Memory { place, len: len as u64 }
        };
        machine.send(Outgoing {
            key,
            priority: active.priority,
            fingerprint: active.fingerprint(rank, to),
            coflow: active.coflow,
            body,
        });
        if owned {
            active.operation.on_sent(to, message, effects);
        }
    }

    /// Messages of an operation may come now: take those that are here, grant the others.
    #[allow(clippy::too_many_arguments)]
    fn opened(
        &mut self,
        peers: &mut Peers,
        id: GroupId,
        op: OpId,
        from: u32,
        message: u32,
        count: u32,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Misfit> {
        let group = &self.groups[&id];
        let peer = group.members[from as usize].expect("plans receive from other ranks");
        let rank = group.rank;
        let fingerprint = group.ops[&op].fingerprint(rank, from);
        let key = |message| op.key(id, rank, message);
        let mut wanted = false;
        if !self.early.is_empty() {
            for message in message..message + count {
                match self.early.remove(&(peer, key(message))).map(|early| early.content) {
                    Some(Content::Announced) => peers.machine(peer).grant(key(message), 1, fingerprint),
                    Some(Content::Bytes { total, payload }) => {
                        peers.machine(peer).consumed(total);
                        let incoming = Incoming::Bytes { offset: 0, payload: &payload };
                        self.operation(id, op).on_message(from, message, total, incoming, effects)?;
                    }
                    Some(Content::Remote { total, remote }) => {
                        let incoming = Incoming::Remote(remote);
                        self.operation(id, op).on_message(from, message, total, incoming, effects)?;
                    }
                    None => wanted = true,
                }
            }
        } else {
            wanted = true;
        }
        // Granting what needs no grant (a small message, a reference) does no harm but costs a frame.
        let machine = peers.machine(peer);
        if wanted && !machine.config().references {
            let operation = &self.groups[&id].ops[&op].operation;
            if operation.largest_message(from, message, count) > machine.eager_limit() {
                machine.grant(key(message), count, fingerprint);
            }
        }
        Ok(())
    }

    /// What a reference frame names.
    fn remote(&self, peer: PeerId, header: &Header, payload: &[u8]) -> Result<Remote, FrameError> {
        let bytes = payload.try_into().map_err(|_| FrameError::Length { kind: header.kind, length: header.length })?;
        let Reference { address, epoch, region } = Reference::decode(bytes);
        let info = &self.peers[peer as usize];
        if region == 0 {
            return Ok(Remote::Process { pid: info.pid, address, memory_epoch: info.contact.memory_epoch, epoch });
        }
        let mapping = info.mappings.get(&region);
        mapping
            .and_then(|mapping| Remote::mapped(mapping, address, header.total, epoch))
            .ok_or(FrameError::OutOfTurn("a reference to shared memory that is not there"))
    }

    /// Maps what a peer shares with us.
    fn map(&mut self, peer: PeerId, region: u64, len: u64) -> Result<(), FrameError> {
        let info = &mut self.peers[peer as usize];
        let descriptor =
            info.descriptors.pop_front().ok_or(FrameError::OutOfTurn("an offer of memory without a descriptor"))?;
        if region == 0 || info.mappings.len() >= MAX_MAPPINGS {
            return Err(FrameError::OutOfTurn("more shared memory than can be mapped"));
        }
        let mapping = Mapping::new(descriptor, len).map_err(|error| {
            log::warn!("penstock: cannot map memory that {} shares: {error}", info.contact.describe());
            FrameError::OutOfTurn("shared memory that cannot be mapped")
        })?;
        info.mappings.insert(region, Arc::new(mapping));
        Ok(())
    }

    fn operation(&mut self, id: GroupId, op: OpId) -> &mut Operation {
        &mut self.groups.get_mut(&id).expect("running").ops.get_mut(&op).expect("running").operation
    }

    // ------------------------------------------------------------------ failures

    /// A message does not fit the plan although the fingerprints agree.
    fn misfit(&mut self, peers: &mut Peers, id: GroupId, from: u32, misfit: Misfit) {
        let who = self.groups[&id].contacts[from as usize].describe();
        let failure = match misfit {
            Misfit::Length { expected, got } => Failure::fatal(
                FailureKind::Mismatch,
                format!("{who} sent {got} bytes where {expected} are expected: sizes or splits differ between ranks."),
            ),
            Misfit::Unknown => Failure::fatal(
                FailureKind::Mismatch,
                format!("{who} follows another plan: PENSTOCK_* settings differ between ranks."),
            ),
            Misfit::Frame { offset, len } => Failure::fatal(
                FailureKind::Mismatch,
                format!(
                    "{who} sent bytes {offset}+{len} of a message, which are not whole elements inside it. Its process is \
                     defective, or is not Penstock."
                ),
            ),
            Misfit::Unreadable(error) => {
                // A rank whose memory is gone has died, or has failed and left; which, and why, its socket is about to
                // tell.
                let message = format!("the memory of {who} cannot be read any more ({error}).");
                let by = peers.now().plus(UNREADABLE_WITHIN);
                self.pending_failures.push((by, id, Failure::fatal(FailureKind::PeerLost, message)));
                return;
            }
        };
        self.fail_group(peers, id, failure, true);
    }

    /// There is no room for another message that nobody here has asked for. Of the peer that has sent most of them, the group that
    /// has most ends, on both sides.
    fn make_room(&mut self, peers: &mut Peers) {
        let (mut by_peer, mut counts) = (HashMap::new(), HashMap::new());
        for (peer, key) in self.early.keys() {
            *by_peer.entry(*peer).or_insert(0) += 1;
            *counts.entry((key.group, *peer)).or_insert(0) += 1;
        }
        let most = |((id, peer), count): &((GroupId, PeerId), usize)| (by_peer[peer], *count, id.0, *peer);
        let Some(((id, peer), count)) = counts.into_iter().max_by_key(most) else { return };
        let who = self.peers[peer as usize].contact.describe();
        let message = format!(
            "{count} messages of {who} wait here for operations that this rank has not issued, and it keeps no more. Receive what \
             others send (irecv), or wait for some of the sends."
        );
        let failure = Failure::fatal(FailureKind::Mismatch, message);
        if self.groups.contains_key(&id) {
            return self.fail_group(peers, id, failure, true);
        }
        let report = Report { kind: failure.kind, message: failure.message.clone(), finished: 0 };
        peers.machine(peer).report(id, &report);
        self.reported.remember(id, failure);
        self.forget_early(peers, id);
    }

    fn mismatch(&mut self, peers: &mut Peers, id: GroupId, op: OpId, peer: PeerId, theirs: Fingerprint) {
        let group = &self.groups[&id];
        let rank = group.rank_of(peer);
        let ours = group.fingerprint(op, rank).expect("it was compared");
        let message = group.difference(op, (group.rank, ours), (rank, theirs));
        self.fail_group(peers, id, Failure::fatal(FailureKind::Mismatch, message), true);
    }

    /// Ends a group when its first so many collectives have ended here: the others can have no end.
    fn end_group_after(&mut self, peers: &mut Peers, id: GroupId, ends: u64, failure: Failure) {
        let group = self.groups.get_mut(&id).expect("the caller has looked it up");
        if group.first_running().is_none_or(|first| first >= ends) {
            return self.fail_group(peers, id, failure, true);
        }
        if group.ends_after.as_ref().is_none_or(|(before, _)| ends < *before) {
            group.ends_after = Some((ends, failure));
        }
    }

    /// Ends a group: all its operations fail, nothing touches their buffers any more, the other ranks are told.
    fn fail_group(&mut self, peers: &mut Peers, id: GroupId, failure: Failure, tell: bool) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        if group.failed.is_some() {
            return;
        }
        let failure = Failure { group_lives: false, ..failure };
        group.failed = Some(failure.clone());
        // Who ends a group on purpose takes nothing away from ranks that are still in what has ended here.
        let finished = if failure.kind == FailureKind::Closed { group.finished() } else { 0 };
        self.forget_early(peers, id);
        self.claims.retain(|(group, ..), _| *group != id);
        let group = self.groups.get_mut(&id).expect("looked up above");
        let ops = std::mem::take(&mut group.ops);
        self.recorder.failed(&group.name, Instant::now());
        let named = |op: OpId, what: Fingerprint| format!("{} #{}", what.describe(), op.seq);
        let tickets: Vec<_> = (ops.iter().map(|(op, active)| (named(*op, active.fingerprint), active.ticket.clone())))
            .chain(group.held.drain().map(|(op, waiting)| (named(op, waiting.call.fingerprint), waiting.ticket)))
            .chain(group.unbound.drain().map(|posted| (unnamed(&posted.call), posted.ticket)))
            .collect();
        // The loop lets go of the buffers before it does anything else: readers are revoked, half-written frames copied.
        // Until then the operations keep them alive. Peers that read our memory at this moment will find that they cannot
        // trust what they got.
        let (rank, members) = (group.rank, group.members.clone());
        peers.drop_group(
            id,
            finished,
            Box::new(move |peer, key, offset, len| {
                let (to, op) = operation_of(rank, &members, peer, key)?;
                ops.get(&op)?.operation.source(to, key.message, offset, len)
            }),
        );
        self.turn();
        if failure.kind != FailureKind::Closed {
            self.recorder.write(&self.stats(peers));
        }
        let group = self.groups.get_mut(&id).expect("looked up above");
        let joining = group.joining.take();
        for watch in group.watches.drain(..) {
            let failure = failure.clone();
            peers.after_drop(Box::new(move || watch.complete(Err(failure))));
        }
        if tell {
            let report = Report { kind: failure.kind, message: failure.message.clone(), finished };
            for peer in group.members.iter().flatten() {
                let info = &self.peers[*peer as usize];
                if info.linked && info.lost.is_none() {
                    peers.machine(*peer).report(id, &report);
                }
            }
        }
        let (rank, name) = (group.rank, group.name.clone());
        let own = group.contacts[rank as usize].describe();
        for (what, ticket) in tickets {
            let message = format!("{what} of group {name} on {own} failed: {}", failure.message);
            let failure = Failure { message, ..failure.clone() };
            peers.after_drop(Box::new(move || ticket.complete(Err(failure))));
        }
        if let Some(joining) = joining {
            peers.after_drop(Box::new(move || {
                joining.ticket.complete(Err(failure));
                drop(joining);
            }));
        }
    }

    /// Drops what came for operations of a group that nobody will post any more. Their senders may use the credit again.
    fn forget_early(&mut self, peers: &mut Peers, id: GroupId) {
        for ((peer, _), early) in self.early.extract_if(|(_, key), _| key.group == id) {
            if let Content::Bytes { total, .. } = early.content {
                peers.machine(peer).consumed(total);
            }
        }
    }

    /// This rank leaves a group.
    fn leave(&mut self, peers: &mut Peers, id: GroupId) {
        if self.groups.get(&id).is_some_and(Group::is_busy) {
            let rank = self.groups[&id].rank;
            let failure = Failure::fatal(
                FailureKind::Closed,
                format!("rank {rank} destroyed the group while operations were running."),
            );
            self.fail_group(peers, id, failure, true);
        }
        let Some(group) = self.groups.remove(&id) else { return };
        self.closed.insert(id.0..id.0.saturating_add(1));
        for watch in group.watches {
            watch.complete(Err(Failure::fatal(FailureKind::Closed, "the group was destroyed.")));
        }
        self.forget_early(peers, id);
        self.claims.retain(|(group, ..), _| *group != id);
        let mut last: Vec<_> = group.ended.collectives().take(Farewell::MOST).collect();
        last.reverse();
        let farewell = Farewell { collectives: group.issued.collectives, last };
        for peer in group.members.iter().flatten().copied() {
            let info = &self.peers[peer as usize];
            let machine = peers.machine(peer);
            if info.linked && info.lost.is_none() {
                machine.left(id, farewell.clone());
            }
            machine.retire_group(id);
        }
    }

    /// A peer has left a group. It asks for nothing in it any more, nothing more comes from it, and what its operations were is
    /// compared with what they are here.
    fn has_left(&mut self, peers: &mut Peers, peer: PeerId, id: GroupId, farewell: Farewell) {
        let Some(group) = self.groups.get_mut(&id) else { return self.has_done_with(peers, peer, id) };
        let is_news = group.members.contains(&Some(peer)) && !group.gone.contains_key(&peer);
        if !is_news || group.failed.is_some() {
            return;
        }
        group.gone.insert(peer, farewell.collectives);
        let rank = group.rank_of(peer);
        let mut differs = None;
        for (seq, theirs) in farewell.last {
            let op = OpId { sequence: Sequence::Collectives, seq: seq.0 };
            let ours = group.fingerprint(op, rank).map(|ours| (group.rank, ours));
            // Ranks that have left compare no more with each other.
            let (first, told) = *group.told.entry(seq).or_insert((peer, theirs));
            let others = [ours, Some((group.rank_of(first), told))];
            if let Some(other) = others.into_iter().flatten().find(|(_, other)| *other != theirs) {
                differs = Some(group.difference(op, other, (rank, theirs)));
                break;
            }
        }
        match differs {
            Some(message) => self.fail_group(peers, id, Failure::fatal(FailureKind::Mismatch, message), true),
            None => self.check_waiting(peers, id),
        }
    }

    /// A peer has left a group that this process has not joined, or has left, or the group has failed there: what it gave is of no
    /// use.
    fn has_done_with(&mut self, peers: &mut Peers, peer: PeerId, id: GroupId) {
        if !self.is_closed(id) {
            self.overtaken.remember(peer, id);
        }
        peers.machine(peer).retire_group(id);
        self.forget_early_of(peers, peer, |group| group == id);
    }

    /// Fails a group in which something waits for a rank that is gone.
    fn check_waiting(&mut self, peers: &mut Peers, id: GroupId) {
        let mut ops: Vec<OpId> = self.groups[&id].ops.keys().copied().collect();
        ops.sort_unstable();
        for op in ops {
            self.check_departed(peers, id, op);
        }
        self.check_senders(peers, id);
    }

    /// A peer is gone, and with it what it gave for groups that this process has not joined, and all that was between the two.
    /// Operations that read from memory of its keep that mapped until they end.
    fn forget_peer(&mut self, peers: &mut Peers, peer: PeerId) {
        let unknown: HashSet<GroupId> = (self.early.keys().map(|(_, key)| key.group))
            .chain(self.claims.keys().map(|(group, ..)| *group))
            .filter(|group| !self.groups.contains_key(group))
            .collect();
        self.forget_early_of(peers, peer, |group| unknown.contains(&group));
        self.overtaken.forget_peer(peer);
        peers.machine(peer).end();
        let info = &mut self.peers[peer as usize];
        info.offered.clear();
        info.mappings.clear();
        info.descriptors.clear();
        let node = info.contact.node;
        self.no_longer_connects(node, None);
    }

    /// Drops what a peer gave for operations of some groups.
    fn forget_early_of(&mut self, peers: &mut Peers, peer: PeerId, is_meant: impl Fn(GroupId) -> bool) {
        for (_, early) in self.early.extract_if(|(from, key), _| *from == peer && is_meant(key.group)) {
            if let Content::Bytes { total, .. } = early.content {
                peers.machine(peer).consumed(total);
            }
        }
        self.claims.retain(|(group, ..), claims| {
            claims.retain(|(from, _)| *from != peer || !is_meant(*group));
            !claims.is_empty()
        });
    }

    /// A node connects with this job only, or not at all any more.
    fn no_longer_connects(&mut self, node: NodeKey, but_with: Option<GroupId>) {
        self.jobs.retain(|id, job| {
            let was_last = Some(*id) != but_with && job.nodes.remove(&node) && job.nodes.is_empty();
            !was_last
        });
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

    /// Casts doubt on all references to our memory, so that whoever reads there at this moment asks before it uses what it got.
    fn turn(&self) {
        self.memory_epoch.turn();
        for (_, region) in self.regions.values() {
            region.set_epoch(self.memory_epoch.epoch());
        }
    }

    /// The engine's thread ends, and the driver is gone: nothing in this process reads or writes a tensor any more, and what
    /// other processes read of them is doubted from now on. Ends what is still open.
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
        self.groups.iter().filter(|(_, group)| group.members.contains(&Some(peer))).map(|(id, _)| *id).collect()
    }

    // ------------------------------------------------------------------ names

    /// The rank of a peer in a group and the operation, as it is called here, of a message between it and this rank.
    fn operation_of(&self, peer: PeerId, key: &MessageKey) -> Option<(u32, OpId)> {
        let group = self.groups.get(&key.group)?;
        operation_of(group.rank, &group.members, peer, key)
    }

    /// What a peer wants to send while nobody here has posted the receive: its tag and number, for people.
    fn sends_in_vain(&self, id: GroupId, peer: PeerId) -> Option<String> {
        let group = self.groups.get(&id)?;
        // What has come as bytes is sent, as far as the peer is concerned.
        let waits = |early: &Early| !matches!(early.content, Content::Bytes { .. });
        let early = self.early.iter().filter(|((from, key), early)| *from == peer && key.group == id && waits(early));
        let early = early.map(|((_, key), _)| *key);
        let claimed = self
            .claims
            .iter()
            .filter(|((group, ..), claims)| *group == id && claims.iter().any(|(from, _)| *from == peer));
        let claimed = claimed.map(|((group, channel, op), _)| MessageKey {
            group: *group,
            channel: *channel,
            op: *op,
            message: 0,
        });
        early
            .chain(claimed)
            .filter_map(|key| {
                let (_, op) = self.operation_of(peer, &key)?;
                match op.sequence {
                    Sequence::Receives { tag, .. } if op.seq >= group.issued.count(op.sequence) => Some((tag, op.seq)),
                    _ => None,
                }
            })
            .min()
            .map(|(tag, seq)| format!("tag {tag}, from #{seq} on"))
    }

    fn active(&self, id: GroupId, op: OpId) -> Option<&Active> {
        self.groups.get(&id)?.ops.get(&op)
    }

    fn held(&self, peers: &Peers) -> Held {
        let machines = || (0..self.peers.len()).map(|peer| peers.look(peer as PeerId));
        let bytes = |early: &Early| match &early.content {
            Content::Bytes { payload, .. } => payload.len(),
            _ => 0,
        };
        let descriptors = |info: &PeerInfo| info.offered.values().flatten().count() + info.descriptors.len();
        Held {
            groups: self.groups.len() as u64,
            operations: self.groups.values().map(|group| group.operations() as u64).sum(),
            claims: self.claims.values().map(|claims| claims.len() as u64).sum(),
            closed_ranges: self.closed.count() as u64,
            jobs: self.jobs.len() as u64,
            early_messages: self.early.len() as u64,
            early_bytes: self.early.values().map(|early| bytes(early) as u64).sum(),
            remembered_operations: machines().map(|machine| machine.remembered() as u64).sum(),
            unacknowledged_messages: machines().map(|machine| machine.unacknowledged() as u64).sum(),
            credit_bytes: machines().map(Peer::credit_in_use).sum(),
            mappings: self.peers.iter().map(|info| info.mappings.len() as u64).sum(),
            descriptors: self.peers.iter().map(|info| descriptors(info) as u64).sum::<u64>()
                + self.regions.len() as u64,
        }
    }

    fn stats(&self, peers: &Peers) -> Stats {
        let held: usize = self
            .early
            .values()
            .map(|early| match &early.content {
                Content::Bytes { payload, .. } => payload.capacity(),
                _ => 0,
            })
            .sum();
        let of =
            |active: &Active| active.operation.memory_bytes() + active.scale.as_ref().map_or(0, Scale::memory_bytes);
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
                    rank: group.rank,
                    world: group.members.len() as u32,
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
        if active.fingerprint(self.groups[&header.key.group].rank, from) != header.fingerprint {
            return Ok(None);
        }
        let len = u64::from(header.length);
        Ok(active.operation.place(from, header.key.message, header.offset, len, header.total))
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
        self.active(key.group, op)?.operation.source(to, key.message, offset, len)
    }

    fn frame(
        &mut self,
        peers: &mut Peers,
        peer: PeerId,
        header: &Header,
        payload: &[u8],
        placed: bool,
    ) -> Result<(), FrameError> {
        #[cfg(test)]
        assert!(!std::mem::take(&mut self.panics), "a test wants it");
        let key = header.key;
        let id = key.group;
        match header.kind {
            Kind::Share => return self.map(peer, header.offset, header.total),
            Kind::Unshare => drop(self.peers[peer as usize].mappings.remove(&header.offset)),
            _ => {}
        }
        if !matches!(header.kind, Kind::Data | Kind::Reference | Kind::Announce) {
            return Ok(());
        }
        let eager = header.kind == Kind::Data && header.flags & FLAG_EAGER != 0;
        let known = self.operation_of(peer, &key);
        if known.is_some_and(|(_, op)| matches!(op.sequence, Sequence::Sends { .. })) {
            return Err(FrameError::OutOfTurn("a message in the direction in which this rank sends"));
        }
        let active = known.and_then(|(from, op)| Some((from, op, self.active(id, op)?)));
        if let Some((from, op, active)) = active
            && active.fingerprint(self.groups[&id].rank, from) != header.fingerprint
        {
            if eager {
                peers.machine(peer).consumed(header.total);
            }
            self.mismatch(peers, id, op, peer, header.fingerprint);
            return Ok(());
        }
        let open = active.and_then(|(from, op, active)| Some((from, op, active.operation.is_open(from, key.message)?)));
        match (open, active.is_some()) {
            (None, true) => {
                let (from, ..) = active.expect("just seen");
                if eager {
                    peers.machine(peer).consumed(header.total);
                }
                self.misfit(peers, id, from, Misfit::Unknown);
                return Ok(());
            }
            (Some((from, op, true)), _) => {
                let incoming = match header.kind {
                    Kind::Announce => {
                        let machine = peers.machine(peer);
                        // A longer one was granted when the operation opened.
                        if machine.config().references || header.total <= machine.eager_limit() {
                            machine.grant(key, 1, header.fingerprint);
                        }
                        return Ok(());
                    }
                    Kind::Reference => Incoming::Remote(self.remote(peer, header, payload)?),
                    _ if placed => Incoming::Placed { len: payload.len() },
                    _ => Incoming::Bytes { offset: header.offset, payload },
                };
                if eager {
                    peers.machine(peer).consumed(header.total);
                }
                let mut result = Ok(());
                let now = peers.now();
                self.drive(
                    peers,
                    id,
                    op,
                    |operation, effects| {
                        result = operation.on_message(from, key.message, header.total, incoming, effects);
                    },
                    now,
                );
                if let Err(misfit) = result {
                    self.misfit(peers, id, from, misfit);
                }
            }
            // Not posted, or not ready: keep it.
            (Some((_, _, false)), _) | (None, false) => {
                let content = match header.kind {
                    Kind::Announce => Content::Announced,
                    Kind::Reference => {
                        Content::Remote { total: header.total, remote: self.remote(peer, header, payload)? }
                    }
                    _ if eager => Content::Bytes { total: header.total, payload: payload.to_vec() },
                    _ => return Err(FrameError::OutOfTurn("data of a message that was not granted")),
                };
                if self.early.len() >= MAX_EARLY {
                    self.make_room(peers);
                    if self.status(peer, &key) == OpStatus::Retired {
                        if eager {
                            peers.machine(peer).consumed(header.total);
                        }
                        return Ok(());
                    }
                }
                self.arrivals += 1;
                let early = Early { fingerprint: header.fingerprint, arrival: self.arrivals, content };
                self.early.insert((peer, key), early);
                if let Channel::PointToPoint { tag, .. } = key.channel {
                    self.bind(peers, id, tag);
                }
            }
        }
        Ok(())
    }

    fn event(&mut self, peers: &mut Peers, peer: PeerId, event: Event) {
        match event {
            Event::Sent(key) => {
                if let Some((to, op)) = self.operation_of(peer, &key) {
                    let now = peers.now();
                    self.drive(
                        peers,
                        key.group,
                        op,
                        |operation, effects| operation.on_sent(to, key.message, effects),
                        now,
                    );
                }
            }
            Event::Granted(key, theirs) | Event::Probe(key, theirs) | Event::Late(key, theirs) => {
                let probe = matches!(event, Event::Probe(..));
                let Some((other, op)) = self.operation_of(peer, &key) else {
                    if !self.groups.contains_key(&key.group) && self.status(peer, &key) == OpStatus::Early {
                        let claims = self.claims.entry((key.group, key.channel, key.op)).or_default();
                        if !claims.contains(&(peer, theirs)) {
                            claims.push((peer, theirs));
                        }
                    }
                    return;
                };
                let group = &self.groups[&key.group];
                let issued = group.issued.count(op.sequence);
                match group.fingerprint(op, other) {
                    _ if group.failed.is_some() => {}
                    Some(ours) if ours != theirs => return self.mismatch(peers, key.group, op, peer, theirs),
                    Some(_) => {}
                    None => {
                        if !group.is_over(op) {
                            let claims = self.claims.entry((key.group, key.channel, key.op)).or_default();
                            if !claims.contains(&(peer, theirs)) {
                                claims.push((peer, theirs));
                            }
                        }
                    }
                }
                // Also an answer to a doubt: the peer knows from a report, which has left before, if it confirms nothing.
                if probe {
                    peers.machine(peer).answer_probe(key, issued);
                }
            }
            Event::Issued(key, count) => {
                if let Some((from, op)) = self.operation_of(peer, &key)
                    && let Some(active) = self.groups.get_mut(&key.group).and_then(|group| group.ops.get_mut(&op))
                {
                    active.issued.insert(from, count);
                    // An answer to a doubt confirms what was read only where the operation still counts at the peer: if the group has
                    // failed there, its report has come before.
                    if key.message != PROBE && !self.groups[&key.group].is_void(op) {
                        let now = peers.now();
                        let act = |operation: &mut Operation, effects: &mut Vec<Effect>| {
                            operation.on_confirmed(from, key.message, effects);
                        };
                        self.drive(peers, key.group, op, act, now);
                    }
                }
            }
            Event::Report(id, report) => {
                let who = self.peers[peer as usize].contact.describe();
                // A report of what another rank saw is passed on as it is; the first reporter is named once.
                let message = if report.message.contains(" reports: ") {
                    report.message
                } else {
                    format!("{who} reports: {}", report.message)
                };
                let failure = Failure::fatal(report.kind, message);
                if self.groups.contains_key(&id) {
                    return self.end_group_after(peers, id, report.finished, failure);
                }
                self.has_done_with(peers, peer, id);
                if !self.is_closed(id) {
                    // It has joined and failed before we came.
                    self.reported.remember(id, failure);
                }
            }
            Event::Left(id, farewell) => self.has_left(peers, peer, id, farewell),
            Event::Bye | Event::Stalled(_) | Event::Silent => {}
        }
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
        let report = Report { kind: FailureKind::PeerLost, message, finished: 0 };
        for id in self.groups_of(peer) {
            if self.groups[&id].failed.is_none() {
                peers.machine(peer).report(id, &report);
            }
        }
    }

    fn lost(&mut self, peers: &mut Peers, peer: PeerId, reason: &str) {
        self.peers[peer as usize].lost = Some(reason.to_owned());
        // A later process of the same node key cannot be: keys are random. Forget the way to this one.
        self.by_node.retain(|_, known| *known != peer);
        for id in self.groups_of(peer) {
            // A process that ends fails only what still runs in it.
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
        // It stays known by its node key: it does not come back, and later joins with it fail at once.
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
            match command {
                Command::Join(spec, ticket) => self.join(peers, spec, ticket, now),
                Command::Start(id, call, ticket) => self.start(peers, id, call, ticket, now),
                Command::Release(id, ticket) => self.release(peers, id, &ticket, now),
                Command::Leave(id) => self.leave(peers, id),
                Command::Retune(id, algorithm, streams) => {
                    let Some(group) = self.groups.get_mut(&id) else { continue };
                    group.algorithm = algorithm;
                    for peer in group.members.iter().flatten() {
                        peers.machine(*peer).use_streams(streams);
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
                    let Some(group) = self.groups.get(&id).filter(|group| group.is_busy()) else { continue };
                    let (message, patience) = match &group.joining {
                        // Who lacks a member knows more, and should be heard first.
                        Some(joining) if joining.hosts.is_some() => (unconnected_others(group, waited), SECOND),
                        Some(_) => (self.missing(peers, group, waited), 0),
                        None => (
                            format!("Timed out after {}: rank {} has given up waiting.", seconds(waited), group.rank),
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
    }

    /// Looks for operations that are late.
    fn tick(&mut self, peers: &mut Peers, now: Time) -> Time {
        if self.claims.len() > MAX_CLAIMS {
            self.claims.retain(|(group, ..), _| self.groups.contains_key(group));
        }
        for (_, id, failure) in self.pending_failures.extract_if(.., |(by, ..)| *by <= now).collect::<Vec<_>>() {
            self.fail_group(peers, id, failure, true);
        }
        let mut late = Vec::new();
        let mut unready = Vec::new();
        let mut unanswered = Vec::new();
        for (id, group) in &mut self.groups {
            let overdue = group.held.values().find(|waiting| now.since(waiting.since) > waiting.call.timeout);
            unready.extend(overdue.map(|waiting| (*id, waiting.call.timeout)));
            let overdue = group.unbound.iter().find(|posted| now.since(posted.since) > posted.call.timeout);
            unanswered.extend(overdue.map(|posted| (*id, posted.call.timeout, awaited_of(&posted.call))));
            for (op, active) in &mut group.ops {
                if now.since(active.started) > active.timeout {
                    late.push((*id, *op));
                    continue;
                }
                if now.since(active.progressed.max(active.probed)) < PROBE_AFTER {
                    continue;
                }
                active.probed = now;
                for rank in active.operation.awaited() {
                    if let Some(peer) = group.members[rank as usize] {
                        let fingerprint = active.fingerprint(group.rank, rank);
                        peers.machine(peer).probe(op.key(*id, group.rank, PROBE), fingerprint);
                    }
                }
            }
        }
        for (id, op) in late {
            let Some(active) = self.active(id, op) else { continue };
            let group = &self.groups[&id];
            let awaited: Vec<String> = active
                .operation
                .awaited()
                .into_iter()
                .map(|rank| {
                    let who = group.contacts[rank as usize].describe();
                    match active.issued.get(&rank) {
                        Some(&count) => {
                            let joining = if op.sequence == Sequence::Collectives { JOIN_OPS } else { 0 };
                            format!("{who}, which has issued {} operations so far", count.saturating_sub(joining))
                        }
                        None => who,
                    }
                })
                .collect();
            let blocked: Vec<String> = (group.members.iter().enumerate())
                .filter(|(rank, _)| op.sequence.is_send_to(*rank as u32))
                .filter_map(|(rank, peer)| Some((rank, self.sends_in_vain(id, (*peer)?)?)))
                .map(|(rank, key)| {
                    format!(
                        " {} waits in turn until this rank receives what it sends ({}): ranks that send to each other before \
                         they receive block each other. Let one of them receive first, or use isend or batch_isend_irecv.",
                        group.contacts[rank].describe(),
                        key
                    )
                })
                .collect();
            let failure = timed_out(active.timeout, &awaited.join("; "), &blocked.concat());
            self.fail_group(peers, id, failure, true);
        }
        for (id, timeout, awaited) in unanswered {
            self.fail_group(peers, id, timed_out(timeout, awaited, ""), true);
        }
        for (id, timeout) in unready {
            let failure = Failure::fatal(
                FailureKind::Timeout,
                format!(
                    "Timed out after {:.1} s: its tensor was not ready. What the device was to do before this operation \
                     has not ended. Raise the time-out (timeout= of init_process_group) if that is expected.",
                    timeout as f64 / SECOND as f64,
                ),
            );
            self.fail_group(peers, id, failure, true);
        }
        let running = |group: &Group| group.ops.values().map(|active| active.started.plus(active.timeout)).min();
        let held = |group: &Group| group.held.values().map(|waiting| waiting.since.plus(waiting.call.timeout)).min();
        let unbound = |group: &Group| group.unbound.iter().map(|posted| posted.since.plus(posted.call.timeout)).min();
        let next = self
            .groups
            .values()
            .flat_map(|group| [running(group), held(group), unbound(group)])
            .flatten()
            .fold(now.plus(250 * MILLISECOND), Time::min);
        next.max(now.plus(MILLISECOND))
    }

    fn admit(&self, hello: &Hello) -> Admission {
        // A process that was lost comes back, or one to which this process was lost and that does not know it yet.
        let stranger = || {
            let known = || self.peers.iter().filter(|info| info.contact.node == hello.from && !info.has_left);
            match known().find_map(|info| info.lost.clone()) {
                Some(reason) => Admission::Lost(reason),
                None if known().any(|info| info.linked) => {
                    Admission::Lost("an earlier connection has not ended there".to_owned())
                }
                None => Admission::Stranger,
            }
        };
        let Some(job) = self.jobs.get(&hello.job) else {
            let is_known = self.groups.contains_key(&hello.job) || self.is_closed(hello.job);
            return if is_known { stranger() } else { Admission::NotYet };
        };
        if hello.generation != job.generation {
            return Admission::Generation(job.generation);
        }
        match self.by_node.get(&hello.from) {
            Some(peer) if job.nodes.contains(&hello.from) && hello.from != self.node => {
                Admission::Admit(job.secret.clone(), *peer)
            }
            _ => stranger(),
        }
    }

    fn has_work(&self) -> bool {
        !self.work.is_empty()
    }

    fn work(&mut self, peers: &mut Peers) {
        let Some(turn) = self.work.pop_first() else { return };
        let (_, _, id, op) = turn;
        let now = peers.now();
        let active = self.groups.get_mut(&id).and_then(|group| group.ops.get_mut(&op));
        if let Some(scale) = active.and_then(|active| active.scale.as_mut().filter(|scale| !scale.is_done())) {
            scale.work();
            if scale.is_done() {
                self.begin_steps(peers, id, op, now);
            } else {
                self.work.insert(turn);
            }
            return;
        }
        let mut result = Ok(());
        // It is put back if there is more to do.
        self.drive(peers, id, op, |operation, effects| result = operation.work(effects), now);
        if let Err((from, misfit)) = result {
            self.misfit(peers, id, from, misfit);
        }
    }

    fn stopping(&self) -> bool {
        self.stopping
    }

    fn patience(&self) -> u64 {
        self.patience
    }

    fn ending(&mut self, peers: &mut Peers) {
        // Operations whose memory nobody reads end with us alone: what was sent to peers still counts there.
        let lent = |(id, group): &(&GroupId, &Group)| {
            group.failed.is_none() && group.members.iter().flatten().any(|peer| peers.look(*peer).lends(**id))
        };
        for id in self.groups.iter().filter(lent).map(|(id, _)| *id).collect::<Vec<_>>() {
            let message = format!(
                "rank {} has ended while messages of its were not taken (destroy_process_group was not called).",
                self.groups[&id].rank
            );
            self.fail_group(peers, id, Failure::fatal(FailureKind::Closed, message), true);
        }
    }

    fn undelivered(&mut self, peers: &mut Peers, peer: PeerId) {
        let info = &self.peers[peer as usize];
        // Operations of a group that has failed have told so, and the machine has forgotten them.
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

impl Group {
    /// The rank of a member that is another process.
    fn rank_of(&self, peer: PeerId) -> u32 {
        self.members.iter().position(|member| *member == Some(peer)).expect("a member") as u32
    }

    /// How what an operation is on two ranks differs, as a sentence.
    fn difference(&self, op: OpId, one: (u32, Fingerprint), other: (u32, Fingerprint)) -> String {
        let name = &self.name;
        let [first, second] = [one, other].map(|(rank, _)| self.contacts[rank as usize].describe());
        match Fingerprint::difference_of_pair(one.1, other.1, &first, &second, one.0 < other.0) {
            Some(difference) => format!("in all_to_all #{} of group {name}, {difference}", op.seq),
            None => {
                let difference = Fingerprint::difference(one.1, &first, other.1, &second);
                format!("operation #{} of group {name} is {difference}", op.seq)
            }
        }
    }

    /// What an operation of this rank is, or was if it has ended, to be compared with what another rank says.
    fn fingerprint(&self, op: OpId, other: u32) -> Option<Fingerprint> {
        let running = self.ops.get(&op).map(|active| active.fingerprint(self.rank, other));
        running.or_else(|| self.ended.fingerprint(op))
    }

    /// Whether an operation has begun and ended here. One that is held has not begun.
    fn is_over(&self, op: OpId) -> bool {
        op.seq < self.issued.count(op.sequence) && !self.ops.contains_key(&op) && !self.held.contains_key(&op)
    }

    /// Operations that were issued and have not ended.
    fn operations(&self) -> usize {
        self.ops.len() + self.held.len() + self.unbound.iter().count()
    }

    fn is_busy(&self) -> bool {
        self.operations() > 0 || self.joining.is_some()
    }

    /// The first collective that has been issued and has not ended.
    fn first_running(&self) -> Option<u64> {
        let running = self.ops.keys().chain(self.held.keys());
        running.filter(|op| op.sequence == Sequence::Collectives).map(|op| op.seq).min()
    }

    /// Whether an operation can only fail, when the group ends: it is not among the collectives that can still end. Messages are not:
    /// they may lie in memory that their sender's user has back.
    fn is_void(&self, op: OpId) -> bool {
        let is_after = |(ends, _): &(u64, Failure)| op.sequence != Sequence::Collectives || op.seq >= *ends;
        self.ends_after.as_ref().is_some_and(is_after)
    }

    /// How many collectives have ended here before the first that has not.
    fn finished(&self) -> u64 {
        self.first_running().unwrap_or(self.issued.collectives)
    }
}

impl Sequence {
    fn is_send_to(self, rank: u32) -> bool {
        matches!(self, Sequence::Sends { to, .. } if to == rank)
    }
}

impl OpId {
    /// Its message of this number, as frames between this rank and the other of a point-to-point operation name it.
    fn key(self, group: GroupId, rank: u32, message: u32) -> MessageKey {
        let channel = match self.sequence {
            Sequence::Collectives => Channel::Collective,
            Sequence::Sends { to, tag } => Channel::PointToPoint { direction: Direction::between(rank, to), tag },
            Sequence::Receives { from, tag } => {
                Channel::PointToPoint { direction: Direction::between(from, rank), tag }
            }
        };
        MessageKey { group, channel, op: OpSeq(self.seq), message }
    }

    /// The other rank of a point-to-point operation.
    fn other(self) -> Option<u32> {
        match self.sequence {
            Sequence::Collectives => None,
            Sequence::Sends { to: other, .. } | Sequence::Receives { from: other, .. } => Some(other),
        }
    }
}

/// The rank of a peer among the members of a group and the operation, as rank `rank` calls it, that a key names between
/// the two.
fn operation_of(rank: u32, members: &[Option<PeerId>], peer: PeerId, key: &MessageKey) -> Option<(u32, OpId)> {
    let other = members.iter().position(|member| *member == Some(peer))? as u32;
    let sequence = match key.channel {
        Channel::Collective => Sequence::Collectives,
        Channel::PointToPoint { direction, tag } if direction == Direction::between(rank, other) => {
            Sequence::Sends { to: other, tag }
        }
        Channel::PointToPoint { tag, .. } => Sequence::Receives { from: other, tag },
    };
    Some((other, OpId { sequence, seq: key.op.0 }))
}

/// Why a join has not ended although this rank is connected to everybody.
fn unconnected_others(group: &Group, waited: u64) -> String {
    let (rank, name, waited) = (group.rank, &group.name, seconds(waited));
    format!(
        "Timed out after {waited}: rank {rank} is connected to all members of group {name}, but some are not to each other."
    )
}

fn seconds(nanoseconds: u64) -> String {
    format!("{:.1} s", nanoseconds as f64 / SECOND as f64)
}

/// The region that has these bytes, and where in it they are.
fn find(regions: &BTreeMap<u64, (u64, Region)>, address: u64, len: u64) -> Option<(u64, &Region, u64)> {
    let (_, (number, region)) = regions.range(..=address).next_back()?;
    Some((*number, region, region.offset(address, len)?))
}

fn timed_out(timeout: u64, awaited: &str, blocked: &str) -> Failure {
    let message = format!(
        "Timed out after {}, waiting for {awaited}.{blocked} Raise the time-out (timeout= of init_process_group) if that is \
         expected.",
        seconds(timeout)
    );
    Failure::fatal(FailureKind::Timeout, message)
}

/// The rank that a receive names.
fn source_of(call: &Call) -> Option<u32> {
    call.collective.named_rank().filter(|rank| *rank != ANY_SOURCE)
}

/// What a receive without a message waits for.
fn awaited_of(call: &Call) -> &'static str {
    match source_of(call) {
        None => "a message from any of the other ranks",
        Some(_) => {
            "a receive from any source that was posted before it, and takes the next message of any of the other ranks"
        }
    }
}

/// How a receive without a message is called in errors.
fn unnamed(call: &Call) -> String {
    match source_of(call) {
        None => format!("{} from any source", call.fingerprint.describe()),
        Some(from) => format!("{} from rank {from}", call.fingerprint.describe()),
    }
}

/// The rank whose next message under a tag has come, or was announced, before those of the others.
fn first_sender(group: &Group, id: GroupId, tag: u32, early: &HashMap<(PeerId, MessageKey), Early>) -> Option<u32> {
    let arrived = |(from, peer): (u32, &Option<PeerId>)| {
        let sequence = Sequence::Receives { from, tag };
        let next = OpId { sequence, seq: group.issued.count(sequence) };
        // The first message of an operation comes first, or is announced.
        Some((early.get(&((*peer)?, next.key(id, group.rank, 0)))?.arrival, from))
    };
    (0..).zip(&group.members).filter_map(arrived).min().map(|(_, from)| from)
}

fn check_call(call: &Call, world: usize) -> Result<(), Failure> {
    if call.collective == (Collective::Recv { from: ANY_SOURCE }) && world == 1 {
        let message = "a receive from any source in a group of one rank has no rank to receive from. Nothing was sent.";
        return Err(Failure::of_call(FailureKind::Config, message));
    }
    if call.collective.reduces() && !call.op.takes(call.dtype) {
        return Err(Failure::of_call(
            FailureKind::Config,
            format!("{} is not defined on {}. Nothing was sent.", call.op.name(), call.dtype),
        ));
    }
    Ok(())
}

/// Whether an algorithm that the user asks for can carry this all-reduce.
fn fits(algorithm: Algorithm, bytes: u64, medium: penstock_plan::Medium, thresholds: &Thresholds) -> bool {
    let held = algorithm.holds_messages(Collective::AllReduce);
    Algorithm::of(Collective::AllReduce).contains(&algorithm)
        && (!held || medium == penstock_plan::Medium::Memory || bytes <= thresholds.eager_limit_bytes)
}

/// Descriptors that a peer may pass ahead of the frames that they belong to: one system call brings a few.
const MAX_DESCRIPTORS: usize = 64;
/// Regions that are shared with a peer at a time; others are read as private memory. Well below the kernel's own limit on
/// mappings (65530).
const MAX_MAPPINGS: usize = 4096;
/// Operations of a group's own, before the first of its users': so theirs are numbered from 1 on.
const JOIN_OPS: u64 = 1;
/// Operations of a group that have ended and can still be compared. Whoever waits in vain asks within [`PROBE_AFTER`], and the
/// first frame of a larger operation comes sooner; only a rank that needs nothing of the other meanwhile (it sends short messages
/// to third ones) ends more than this in a second, and then the other learns by its time-out. 40 KiB a group, at most.
const MAX_ENDED: usize = 1024;
/// The message that a probe names when it does not doubt one.
const PROBE: u32 = u32::MAX;
/// An operation without progress asks the ranks it waits for after this long.
const PROBE_AFTER: u64 = SECOND;
/// What the end waits for at least where somebody wants to wait: for the good-bye to be taken.
const LEAST_PATIENCE: u64 = 2 * SECOND;
/// What the end waits for at most: as long as torch's own time-out is, where an operation has a longer one.
const MOST_PATIENCE: u64 = 30 * 60 * SECOND;
/// What the end waits for where nobody wants to wait: a good-bye leaves, and nothing is asked back.
const UNHEARD: u64 = 100 * MILLISECOND;
/// How long the socket of a rank whose memory is gone may take to say why.
const UNREADABLE_WITHIN: u64 = SECOND;
/// Messages of operations that are not posted: their bytes are bounded by credit, their number by this. About 150 bytes each.
/// For the engine's own tests fewer, but more than the credit for messages without bytes (8,192).
const MAX_EARLY: usize = if cfg!(test) { 1 << 14 } else { 1 << 20 };
/// Beyond so many, what peers believe of operations of groups that are not joined is forgotten: probes say it again.
const MAX_CLAIMS: usize = 1 << 16;
