//! Ranks that run the shipped core (`Groups`) and the shipped machines of peers over the virtual network, in one thread. Messages
//! are phantoms: each has a length and no bytes. Arithmetic takes no time.

use penstock_core::groups::{Beginning, Call, Failed, Groups, Host, Issue, Join};
use penstock_core::operation::{Instance, Place, Verdict};
use penstock_plan::{Algorithm, Thresholds};
use penstock_sim::network::{Event, Network, NodeId, Topology};
use penstock_stream::FrameError;
use penstock_stream::frame::{Header, Kind, Reference};
use penstock_stream::handshake::NodeKey;
use penstock_stream::peer::{self, Payload, Peer, PeerConfig};
use penstock_types::{Failure, Generation, GroupId, PeerId, SECOND, Scope, Time};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// How a call has ended on a rank, or its join ([`JOIN`]).
#[derive(Clone, Debug)]
pub(crate) struct End {
    pub(crate) call: usize,
    pub(crate) at: Time,
    pub(crate) result: Result<(), Failure>,
}

/// The number of a join among a rank's calls.
pub(crate) const JOIN: usize = usize::MAX;

/// What a rank does at some time.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// It joins the group of all ranks.
    Join,
    /// It issues a call under this number.
    Start(usize, Call),
    /// Its process dies, with its host: nothing leaves it any more, and nothing reaches it.
    Die,
    /// It looks at what is late.
    Look,
}

/// All ranks, and the network between them.
pub(crate) struct World {
    pub(crate) now: Time,
    /// Frames travel in segments, as over TCP, so that a long one on two links need not wait for its own end. The last one carries it.
    network: Network<Option<Box<Frame>>>,
    nodes: Vec<NodeId>,
    /// `None`: the process has ended.
    ranks: Vec<Option<Rank>>,
    /// By time and order of planning.
    agenda: BTreeMap<(Time, u64), (u32, Step)>,
    planned: u64,
    /// By rank.
    pub(crate) ends: Vec<Vec<End>>,
    ended: usize,
    algorithm: Option<Algorithm>,
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
}

impl World {
    /// A rank on each of these nodes. None has joined. `algorithm`: of all-reduces; `None`: the planner's choice.
    pub(crate) fn new((topology, nodes): (Topology, Vec<NodeId>), algorithm: Option<Algorithm>) -> World {
        let who: Arc<[Arc<str>]> = (0..nodes.len()).map(|rank| format!("rank {rank}").into()).collect();
        let ranks = (0..nodes.len() as u32).map(|rank| {
            let config = PeerConfig { generation: Generation(1), dead_after: DEAD_AFTER, ..PeerConfig::default() };
            let untouched = Peer::with_copies(config, Time(0));
            let host = Phantoms {
                now: Time(0),
                rank,
                who: who.clone(),
                machines: BTreeMap::new(),
                untouched,
                dirty: BTreeSet::new(),
                ends: Vec::new(),
            };
            let mut groups = Groups::new(key(rank), Thresholds::default(), 1 << 14);
            for other in (0..nodes.len() as u32).filter(|other| *other != rank) {
                groups.add_peer(key(other), who[other as usize].clone());
            }
            Some(Rank { groups, host })
        });
        World {
            now: Time(0),
            network: Network::new(topology, 0),
            ranks: ranks.collect(),
            agenda: BTreeMap::new(),
            planned: 0,
            ends: vec![Vec::new(); nodes.len()],
            ended: 0,
            algorithm,
            nodes,
        }
    }

    pub(crate) fn plan(&mut self, rank: u32, at: Time, step: Step) {
        self.planned += 1;
        self.agenda.insert((at, self.planned), (rank, step));
    }

    /// Runs until so many calls and joins have ended on all ranks together, since the beginning.
    pub(crate) fn run(&mut self, ends: usize, by: Time) {
        while self.ended < ends {
            let step = self.agenda.keys().next().map(|(at, _)| *at);
            let next = step.into_iter().chain(self.network.poll_timeout()).min().expect("no rank waits for nothing");
            assert!(next <= by, "{} of {ends} have ended by {by:?}", self.ended);
            self.now = next;
            self.network.handle_timeout(next);
            while let Some(event) = self.network.poll_event() {
                if let Event::Arrived(packet) = event
                    && let Some(frame) = packet.payload
                {
                    self.act(frame.to, |rank, _| rank.take(peer_of(frame.to, frame.from), &frame));
                }
            }
            while let Some(first) = self.agenda.first_entry().filter(|first| first.key().0 <= next) {
                let (rank, step) = first.remove();
                self.follow(rank, step);
            }
        }
    }

    fn follow(&mut self, rank: u32, step: Step) {
        match step {
            Step::Join => {
                let algorithm = self.algorithm;
                self.act(rank, |one, _| one.join(algorithm));
                self.plan(rank, self.now, Step::Look);
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
                    self.plan(rank, next, Step::Look);
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
                let [from, to] = [number, to].map(|rank| self.nodes[rank as usize]);
                let flow = *flow.get_or_insert_with(|| self.network.flow(from, to).expect("all hosts are joined"));
                let payload = match outbound.payload {
                    Payload::Control(bytes) => bytes,
                    Payload::Owned(..) | Payload::Memory => Arc::default(),
                };
                let mut bytes = Header::BYTES as u64 + u64::from(outbound.header.length);
                while bytes > SEGMENT_BYTES + Header::BYTES as u64 {
                    self.network.send(self.now, flow, SEGMENT_BYTES, None);
                    bytes -= SEGMENT_BYTES;
                }
                let frame = Frame { from: number, to: rank_of(number, peer), header: outbound.header, payload };
                self.network.send(self.now, flow, bytes, Some(Box::new(frame)));
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
            self.groups.linked(&mut self.host, peer, false, None);
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
    fn issued(&mut self, _: &mut usize, _: &Issue<'_>) {}
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
    fn work(&mut self, _: &mut usize, _: Instance) -> Result<Vec<(u32, bool)>, (u32, String)> {
        Ok(Vec::new())
    }
    fn done(&mut self, call: usize) {
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
const SEGMENT_BYTES: u64 = 16 * 1024;
/// For fewer heartbeats than by default.
const DEAD_AFTER: u64 = SECOND;
