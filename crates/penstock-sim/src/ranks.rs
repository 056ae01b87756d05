//! Ranks on the virtual network: [`World`] runs the shipped core (`Groups`) and the shipped machines of peers, in one thread.
//!
//! Messages are phantoms: each has a length and no bytes. Arithmetic takes no time. Each rank has a host of its own, and one stream
//! to each other rank. A frame travels in segments of at most [`SEGMENT_BYTES`], as over TCP, but nothing sends a lost segment
//! again: a segment that a link or its queue loses ends the run ([`Stop::Lost`]).
//!
//! Memory: two machines for each pair of ranks that exchange frames, some 5 KiB each, and about 1 KiB for any other pair.

use crate::agenda::Agenda;
use crate::network::{Event, LinkId, Loss, Network, NoPath, NodeId, SEGMENT_BYTES, Segment, Topology};
use penstock_core::groups::{Beginning, Call, Failed, Groups, Host, Issue, Join};
use penstock_core::operation::{Instance, Place, Verdict};
use penstock_plan::{Algorithm, Thresholds};
use penstock_stream::frame::{Header, Kind, Reference};
use penstock_stream::handshake::NodeKey;
use penstock_stream::peer::{self, Payload, Peer, PeerConfig};
use penstock_stream::{FrameError, MessageKey};
use penstock_types::{Failure, Generation, GroupId, PeerId, Scope, Time};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// The end of a call, or of a join, on one rank.
#[derive(Clone, Debug)]
pub struct End {
    /// The number of the call ([`Step::Start`]), or [`JOIN`].
    pub call: usize,
    /// When it ended.
    pub at: Time,
    /// How it ended. After an error the rank does nothing more.
    pub result: Result<(), Failure>,
}

/// The number of a join in [`End::call`].
pub const JOIN: usize = usize::MAX;

/// An action of a rank, for [`World::schedule`].
#[derive(Clone, Debug)]
pub enum Step {
    /// The rank joins the group of all ranks.
    Join,
    /// The rank issues a call under this number.
    Start(usize, Call),
    /// The rank's process dies, with its host: nothing leaves it any more, and nothing reaches it.
    Die,
    /// The rank looks at what is late. A join schedules the first one, and each one the next.
    Look,
}

/// Why [`World::run`] returned early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The calls have not ended by the given time, or nothing happens any more. The world may run on.
    Late {
        /// How many calls and joins have ended on all ranks together.
        ended: usize,
        /// The time of the next event, if there is one.
        next: Option<Time>,
    },
    /// The callback said so. The world may run on.
    Interrupted,
    /// A link lost a segment, or its queue had no room for it. No rank ever gets its frame: the world is of no more use.
    Lost {
        /// The link.
        link: LinkId,
        /// When.
        at: Time,
    },
    /// No path joins the hosts of two ranks. The world is of no more use.
    NoPath(NoPath),
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stop::Late { ended, next: None } => {
                write!(f, "nothing happens any more, and only {ended} calls have ended")
            }
            Stop::Late { ended, next: Some(next) } => {
                write!(f, "only {ended} calls have ended; the next event is {} ns after the beginning", next.0)
            }
            Stop::Interrupted => f.write_str("the caller interrupted the run"),
            Stop::Lost { link, at } => {
                write!(f, "link {} lost a frame {} ns after the beginning, and nothing sends it again", link.0, at.0)
            }
            Stop::NoPath(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Stop {}

/// All ranks, and the network between them.
///
/// Cost of a run: two events a link for each segment, and the work of the core and of the machines at both ends for each frame. A
/// second of processor time simulates about a million segments of long messages over two links, or 60,000 messages between 256 ranks.
pub struct World {
    now: Time,
    network: Network<Segment<Frame>>,
    nodes: Vec<NodeId>,
    /// `None`: the process has ended.
    ranks: Vec<Option<Rank>>,
    agenda: Agenda<(u32, Step)>,
    /// By rank.
    ends: Vec<Vec<End>>,
    ended: usize,
    /// By link: frames that were sent over it.
    frames: Vec<u64>,
    algorithm: Option<Algorithm>,
    stop: Option<Stop>,
}

/// A frame on its way. Of a data frame the payload is not there.
#[derive(Clone)]
struct Frame {
    from: u32,
    to: u32,
    header: Header,
    payload: Arc<[u8]>,
}

struct Rank {
    groups: Groups<usize, u64>,
    host: Phantoms,
}

/// The host of a rank: it carries everything out without a byte.
struct Phantoms {
    now: Time,
    rank: u32,
    /// How messages call each rank.
    who: Arc<[Arc<str>]>,
    machines: BTreeMap<PeerId, Box<Peer<u64>>>,
    /// What a machine is that has neither sent nor taken anything. Most pairs of ranks never exchange a frame.
    untouched: Peer<u64>,
    /// Machines that may have frames to send.
    dirty: BTreeSet<PeerId>,
    ends: Vec<End>,
    /// Of the latest collective.
    algorithm: Option<Algorithm>,
}

impl World {
    /// A rank on each of these hosts, which differ. No rank has joined.
    ///
    /// `algorithm` is wanted for all-reduces, as `PENSTOCK_ALGORITHM` says it to ranks; `None`: chosen by size and hosts. A rank takes
    /// another for lost when nothing came from it for `dead_after` nanoseconds.
    #[must_use]
    pub fn new(topology: Topology, hosts: &[NodeId], algorithm: Option<Algorithm>, dead_after: u64) -> World {
        let who: Arc<[Arc<str>]> = (0..hosts.len()).map(|rank| format!("rank {rank}").into()).collect();
        let ranks = (0..hosts.len() as u32).map(|rank| {
            let config = PeerConfig { generation: Generation(1), dead_after, ..PeerConfig::default() };
            let untouched = Peer::with_copies(config, Time(0));
            let host = Phantoms {
                now: Time(0),
                rank,
                who: who.clone(),
                machines: BTreeMap::new(),
                untouched,
                dirty: BTreeSet::new(),
                ends: Vec::new(),
                algorithm: None,
            };
            let mut groups = Groups::new(key(rank), Thresholds::default(), 1 << 14);
            for other in (0..hosts.len() as u32).filter(|other| *other != rank) {
                groups.add_peer(key(other), who[other as usize].clone());
            }
            Some(Rank { groups, host })
        });
        let ranks = ranks.collect();
        let frames = vec![0; topology.links().count()];
        let mut network = Network::new(topology, 0);
        network.report_losses(true);
        World {
            now: Time(0),
            network,
            nodes: hosts.to_vec(),
            ranks,
            agenda: Agenda::default(),
            ends: vec![Vec::new(); hosts.len()],
            ended: 0,
            frames,
            algorithm,
            stop: None,
        }
    }

    /// Lets a rank take a step at a time, which is not before [`World::now`]. Steps of the same time are taken in the order of calls.
    pub fn schedule(&mut self, rank: u32, at: Time, step: Step) {
        self.agenda.add(at, (rank, step));
    }

    /// Runs until `ends` calls and joins have ended on all ranks together, since the beginning of the world.
    ///
    /// `goes_on` is asked every few thousand events, with the time, whether to go on.
    ///
    /// # Errors
    /// [`Stop`] says why the calls have not ended by `by`.
    pub fn run(&mut self, ends: usize, by: Time, goes_on: &mut dyn FnMut(Time) -> bool) -> Result<(), Stop> {
        let mut turns = 0_u32;
        while self.ended < ends {
            let next = self.next_at().filter(|next| *next <= by);
            let next = next.ok_or(Stop::Late { ended: self.ended, next: self.next_at() })?;
            self.turn(next)?;
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(TURNS_BETWEEN_QUESTIONS) && !goes_on(self.now) {
                return Err(Stop::Interrupted);
            }
        }
        Ok(())
    }

    /// Runs everything that happens until a time, that time included.
    ///
    /// # Errors
    /// [`Stop::Lost`] and [`Stop::NoPath`].
    pub fn run_until(&mut self, until: Time) -> Result<(), Stop> {
        while let Some(next) = self.next_at().filter(|next| *next <= until) {
            self.turn(next)?;
        }
        self.turn(until)
    }

    /// The time.
    #[must_use]
    pub fn now(&self) -> Time {
        self.now
    }

    /// By rank: the calls and joins that have ended, in that order.
    #[must_use]
    pub fn ends(&self) -> &[Vec<End>] {
        &self.ends
    }

    /// The algorithm of the latest collective that a rank has issued; `None` before the first one, and after the rank's death.
    #[must_use]
    pub fn algorithm(&self, rank: u32) -> Option<Algorithm> {
        self.ranks[rank as usize].as_ref()?.host.algorithm
    }

    /// Bytes that a link has sent since the beginning, headers of frames included.
    #[must_use]
    pub fn carried_bytes(&self, link: LinkId) -> u64 {
        self.network.carried_bytes(link)
    }

    /// Frames that ranks have sent over a link since the beginning: data, and what the machines of peers say to each other.
    #[must_use]
    pub fn carried_frames(&self, link: LinkId) -> u64 {
        self.frames[link.0 as usize]
    }

    fn next_at(&self) -> Option<Time> {
        self.agenda.next_at().into_iter().chain(self.network.poll_timeout()).min()
    }

    /// Lets happen what happens until `next`, before which nothing does.
    fn turn(&mut self, next: Time) -> Result<(), Stop> {
        self.now = next;
        self.network.handle_timeout(next);
        while let Some(event) = self.network.poll_event() {
            match event {
                Event::Arrived(packet) => {
                    if let Some(frame) = packet.payload {
                        self.act(frame.to, |rank, _| rank.take(peer_of(frame.to, frame.from), &frame));
                    }
                }
                Event::Lost(_, Loss::Link(link) | Loss::Queue(link)) => {
                    self.stop.get_or_insert(Stop::Lost { link, at: next });
                }
                // Of a rank that has died.
                Event::Lost(..) | Event::Room(_) => {}
            }
        }
        while let Some((rank, step)) = self.agenda.pop(next) {
            self.follow(rank, step);
        }
        self.stop.map_or(Ok(()), Err)
    }

    fn follow(&mut self, rank: u32, step: Step) {
        match step {
            Step::Join => {
                let algorithm = self.algorithm;
                self.act(rank, |one, _| one.join(algorithm));
                self.schedule(rank, self.now, Step::Look);
            }
            Step::Start(number, call) => {
                self.act(rank, |one, _| one.groups.start(&mut one.host, GROUP.into(), call, number))
            }
            Step::Die => {
                self.ranks[rank as usize] = None;
                self.network.take_down(self.nodes[rank as usize], Time(u64::MAX));
            }
            Step::Look => {
                let mut next = None;
                self.act(rank, |one, now| next = Some(one.look(now)));
                if let Some(next) = next {
                    self.schedule(rank, next, Step::Look);
                }
            }
        }
    }

    /// Lets a rank act, if its process has not ended, and sends what it has to send then.
    fn act(&mut self, number: u32, act: impl FnOnce(&mut Rank, Time)) {
        let Some(rank) = &mut self.ranks[number as usize] else { return };
        rank.host.now = self.now;
        act(rank, self.now);
        while rank.groups.has_work() {
            rank.groups.work(&mut rank.host);
        }
        while let Some(peer) = rank.host.dirty.pop_first() {
            let machine = rank.host.machines.get_mut(&peer).expect("it was touched");
            let to = rank_of(number, peer);
            let mut flow = None;
            while let Some(outbound) = machine.poll_frame(0, self.now) {
                let [from, at] = [number, to].map(|rank| self.nodes[rank as usize]);
                let flow = match flow.map_or_else(|| self.network.flow(from, at), Ok) {
                    Ok(found) => *flow.insert(found),
                    Err(error) => {
                        self.stop.get_or_insert(Stop::NoPath(error));
                        break;
                    }
                };
                for link in self.network.path(flow) {
                    self.frames[link.0 as usize] += 1;
                }
                let payload = match outbound.payload {
                    Payload::Control(bytes) => bytes,
                    Payload::Owned(..) | Payload::Memory => Arc::default(),
                };
                let bytes = Header::BYTES as u64 + u64::from(outbound.header.length);
                let frame = Frame { from: number, to, header: outbound.header, payload };
                self.network.send_in_segments(self.now, flow, bytes, PACKET_BYTES, frame);
            }
        }
        let ends = std::mem::take(&mut rank.host.ends);
        self.ended += ends.len();
        // A script ends with the error of its first call that fails.
        if ends.iter().any(|end| end.result.is_err()) {
            self.ranks[number as usize] = None;
        }
        self.ends[number as usize].extend(ends);
    }
}

impl Rank {
    fn join(&mut self, algorithm: Option<Algorithm>) {
        let (rank, who) = (self.host.rank, self.host.who.to_vec());
        let members = (0..who.len() as u32).map(|other| (other != rank).then(|| peer_of(rank, other))).collect();
        let (generation, secret, name) = (Generation(1), Vec::new(), Arc::from("phantoms"));
        self.groups.join(&mut self.host, Join { id: GROUP, generation, secret, name, members, who, algorithm });
        for peer in (0..self.host.who.len() as PeerId - 1).rev() {
            self.groups.connected(&mut self.host, peer, false, None);
        }
    }

    fn take(&mut self, peer: PeerId, frame: &Frame) {
        let Rank { groups, host } = self;
        if groups.why_lost(peer).is_some() {
            return;
        }
        groups.header(host, peer, 0, &frame.header).expect("it is in order");
        groups.frame(host, (peer, 0), &frame.header, &frame.payload, false).expect("it is in order");
        self.poll_events(peer);
    }

    fn poll_events(&mut self, peer: PeerId) {
        let Rank { groups, host } = self;
        while let Some(event) = host.machine(peer).poll_event() {
            if event == peer::Event::Silent {
                let reason = format!("{} is silent", host.who[rank_of(host.rank, peer) as usize]);
                groups.lost(host, peer, &reason, false);
                return groups.forget_peer(host, peer);
            }
            groups.happened(host, peer, event);
        }
    }

    /// Looks at what is late. Returns when to look again.
    fn look(&mut self, now: Time) -> Time {
        let due = self.host.machines.iter().filter(|(_, machine)| machine.poll_timeout(now) <= now);
        for peer in due.map(|(peer, _)| *peer).collect::<Vec<PeerId>>() {
            if self.groups.why_lost(peer).is_none() {
                self.host.machine(peer).handle_timeout(now);
                self.poll_events(peer);
            }
        }
        self.groups.look_for_late(&mut self.host)
    }
}

impl Host for Phantoms {
    /// The number of the call.
    type Body = usize;
    /// The length of a message.
    type Kept = u64;
    type Copied = u64;
    type Task = ();

    fn now(&self) -> Time {
        self.now
    }
    fn machine(&mut self, peer: PeerId) -> &mut Peer<u64> {
        self.dirty.insert(peer);
        self.machines.entry(peer).or_insert_with(|| {
            let mut machine = Peer::with_copies(self.untouched.config().clone(), self.now);
            machine.stream_up(0, self.now);
            // Streams come up before the join, and what they say then has long come.
            let hello = machine.poll_frame(0, self.now);
            debug_assert!(hello.is_some_and(|frame| frame.header.kind == Kind::Heartbeat));
            Box::new(machine)
        })
    }
    fn look(&self, peer: PeerId) -> &Peer<u64> {
        self.machines.get(&peer).map_or(&self.untouched, |machine| machine)
    }
    fn warn(&mut self, _: &str) {}
    fn trouble(&self, _: PeerId) -> Option<String> {
        None
    }
    fn gather(&mut self, _: u64, _: u32) -> usize {
        JOIN
    }
    fn gathered(&self, _: &usize) -> Vec<u64> {
        // Every rank has a host of its own.
        (0..self.who.len() as u64).collect()
    }
    fn issued(&mut self, _: &mut usize, issue: &Issue<'_>) {
        self.algorithm = Some(issue.algorithm);
    }
    fn bound(&mut self, _: &mut usize, _: u32) {}
    fn begin(&mut self, _: &mut usize, _: &Beginning<'_>) -> bool {
        true
    }
    fn prepare(&mut self, _: &mut usize) -> bool {
        true
    }
    fn copy(&mut self, _: &usize, _: Place, len: u64) -> u64 {
        len
    }
    fn lend(&mut self, _: PeerId, _: &usize, _: Place, _: u64, _: bool) -> Reference {
        Reference { address: 0, epoch: 0, region: 0 }
    }
    fn take(&mut self, _: &mut usize, _: Verdict) {}
    fn keep(&mut self, _: PeerId, header: &Header) -> Result<u64, FrameError> {
        Ok(u64::from(header.length))
    }
    fn kept_bytes(&self, kept: &u64) -> Option<u64> {
        Some(*kept)
    }
    fn take_kept(&mut self, _: &mut usize, _: Verdict, _: u64) {}
    fn compute(&mut self, _: &mut usize, _: Instance) {}
    fn work(&mut self, _: &mut usize, _: Instance) {}
    fn done(&mut self, _: &MessageKey, call: usize) {
        if call != JOIN {
            self.ends.push(End { call, at: self.now, result: Ok(()) });
        }
    }
    fn refused(&mut self, call: usize, failure: Failure) {
        self.ends.push(End { call, at: self.now, result: Err(failure) });
    }
    fn joined(&mut self, _: GroupId) {
        self.ends.push(End { call: JOIN, at: self.now, result: Ok(()) });
    }
    fn failed(&mut self, failed: Failed<usize>) {
        for machine in self.machines.values_mut() {
            machine.forget(failed.scope, &failed.finished);
        }
        let ends = failed.operations().map(|(call, failure)| End { call: *call, at: self.now, result: Err(failure) });
        self.ends.extend(ends);
    }
    fn left(&mut self, _: Scope) {}
}

fn key(rank: u32) -> NodeKey {
    u128::from(rank + 1).to_be_bytes()
}

/// The rank that a rank calls by this number.
fn rank_of(rank: u32, peer: PeerId) -> u32 {
    if peer < rank { peer } else { peer + 1 }
}

fn peer_of(rank: u32, other: u32) -> PeerId {
    if other < rank { other } else { other - 1 }
}

const GROUP: GroupId = GroupId(1);
/// The longest packet on a link: a segment with a frame's header. A queue must have room for it.
pub const PACKET_BYTES: u64 = SEGMENT_BYTES + Header::BYTES as u64;
/// Some milliseconds of processor time, so that Ctrl-C is prompt.
const TURNS_BETWEEN_QUESTIONS: u32 = 1 << 12;
