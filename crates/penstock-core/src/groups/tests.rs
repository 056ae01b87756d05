//! Phantom ranks: the shipped core and the shipped machines of peers, with no bytes, no sockets and no engine, under a virtual
//! clock. What a run does follows from its seed.

mod channels;
mod priorities;

use super::*;
use crate::operation::{Instance, Verdict};
use fastrand::Rng;
use penstock_plan::Collective;
use penstock_stream::fingerprint::{Fingerprint, Name};
use penstock_stream::frame::{Kind, Reference};
use penstock_stream::peer::{Event, Landing, Payload, Peer, PeerConfig};
use penstock_stream::{FrameError, Header, MessageKey};
use penstock_types::{DType, Generation, MILLISECOND, ReduceOp};
use std::collections::VecDeque;
use std::sync::Arc;

/// An operation's body: which call it is, and which of the messages that were kept for it are references.
#[derive(Debug, Default)]
struct Phantom {
    /// `None`: a join's.
    call: Option<usize>,
    references: HashMap<Instance, Vec<u32>>,
}

impl Phantom {
    fn of(call: usize) -> Phantom {
        Phantom { call: Some(call), ..Phantom::default() }
    }
}

/// What is kept of a message: its length, or that it is a reference.
type PhantomKept = Option<u64>;

struct PhantomHost {
    now: Time,
    peers: Vec<Peer<u64>>,
    /// The host of each rank.
    hosts: Vec<u32>,
    /// How each call has ended, and when.
    ended: HashMap<usize, (Time, Result<(), Failure>)>,
    joined: Option<Result<(), Failure>>,
    /// The rank that a receive from any source has received from.
    sources: HashMap<usize, u32>,
    warnings: Vec<String>,
    rng: Rng,
}

impl PhantomHost {
    fn end(&mut self, call: Option<usize>, result: Result<(), Failure>) {
        if let Some(call) = call {
            assert!(self.ended.insert(call, (self.now, result)).is_none(), "call {call} ends twice");
        }
    }
}

impl Host for PhantomHost {
    type Body = Phantom;
    type Kept = PhantomKept;
    type Copied = u64;
    type Task = Vec<u32>;

    fn now(&self) -> Time {
        self.now
    }
    fn machine(&mut self, peer: PeerId) -> &mut Peer<u64> {
        &mut self.peers[peer as usize]
    }
    fn look(&self, peer: PeerId) -> &Peer<u64> {
        &self.peers[peer as usize]
    }
    fn warn(&mut self, message: &str) {
        self.warnings.push(message.to_owned());
    }
    fn trouble(&self, _: PeerId) -> Option<String> {
        None
    }
    fn gather(&mut self, _: u64, _: u32) -> Phantom {
        Phantom::default()
    }
    fn gathered(&self, _: &Phantom) -> Vec<u64> {
        self.hosts.iter().map(|host| u64::from(*host)).collect()
    }
    fn issued(&mut self, _: &mut Phantom, _: &Issue<'_>) {}
    fn bound(&mut self, body: &mut Phantom, from: u32) {
        self.sources.insert(body.call.expect("no join receives"), from);
    }
    fn begin(&mut self, _: &mut Phantom, _: &Beginning<'_>) -> bool {
        self.rng.u8(0..8) > 0
    }
    fn prepare(&mut self, _: &mut Phantom) -> bool {
        self.rng.bool()
    }
    fn copy(&mut self, _: &Phantom, _: Place, len: u64) -> u64 {
        len
    }
    fn lend(&mut self, _: PeerId, _: &Phantom, _: Place, _: u64, _: bool) -> Reference {
        Reference { address: 4096, epoch: 1, region: 0 }
    }
    fn take(&mut self, body: &mut Phantom, verdict: Verdict) {
        if let Verdict::Reduce { instance, .. } = verdict {
            assert!(!body.references.contains_key(&instance), "what has to be read takes a turn of its own");
        }
    }
    fn keep(&mut self, _: PeerId, header: &Header) -> Result<PhantomKept, FrameError> {
        Ok((header.kind != Kind::Reference).then_some(u64::from(header.length)))
    }
    fn kept_bytes(&self, kept: &PhantomKept) -> Option<u64> {
        *kept
    }
    fn take_kept(&mut self, body: &mut Phantom, verdict: Verdict, kept: PhantomKept) {
        if let (Verdict::Keep { instance, operand, .. }, None) = (verdict, kept) {
            body.references.entry(instance).or_default().push(operand);
        }
    }
    fn compute(&mut self, body: &mut Phantom, instance: Instance) {
        assert!(!body.references.contains_key(&instance), "what has to be read takes a turn of its own");
    }
    fn work(&mut self, body: &mut Phantom, instance: Instance) -> Vec<u32> {
        body.references.remove(&instance).unwrap_or_default()
    }
    fn done(&mut self, _key: &MessageKey, body: Phantom) {
        self.end(body.call, Ok(()));
    }
    fn refused(&mut self, body: Phantom, failure: Failure) {
        self.end(body.call, Err(failure));
    }
    fn joined(&mut self, _: GroupId) {
        self.joined = Some(Ok(()));
    }
    fn failed(&mut self, failed: Failed<Phantom>) {
        if failed.scope.is_group() {
            self.joined.get_or_insert(Err(failed.failure.clone()));
        }
        for machine in &mut self.peers {
            machine.forget(failed.scope, &failed.finished);
        }
        let ended: Vec<_> = failed.operations().map(|(body, failure)| (body.call, failure)).collect();
        for (call, failure) in ended {
            self.end(call, Err(failure));
        }
    }
    fn left(&mut self, _: Scope) {}
}

/// A frame on its way.
struct Flying {
    at: Time,
    header: Header,
    payload: Vec<u8>,
}

struct Rank {
    groups: Groups<Phantom, PhantomKept>,
    host: PhantomHost,
    /// What its user does, and when.
    steps: VecDeque<(Time, Step)>,
    /// When it looks for what is late.
    tick: Time,
    /// It does no work that takes long before.
    works_from: Time,
    /// Pieces of work that have begun.
    works: Vec<(Work, Vec<u32>)>,
    is_dead: bool,
}

#[derive(Clone, Debug)]
enum Step {
    Issue(usize, Call),
    /// In a channel.
    IssueIn(ChannelId, usize, Call),
    Open(usize, Open),
    Close(ChannelId),
    Fail(ChannelId, Failure),
    Leave,
    /// Gives a call another priority.
    Change(usize, Priority),
    /// It does no work that takes long for so many nanoseconds.
    Rest(u64),
    Die,
}

struct World {
    now: Time,
    ranks: Vec<Rank>,
    /// By sender and receiver.
    paths: HashMap<(usize, usize), VecDeque<Flying>>,
    rng: Rng,
}

impl World {
    /// Ranks that join one group; each then follows its steps, whose times count from the end of the joins.
    fn new(seed: u64, hosts: &[u32]) -> World {
        let mut world = World::joining(seed, hosts);
        let up = |world: &World| world.ranks.iter().all(|rank| rank.host.joined.is_some());
        assert!(world.run(up, Time(10 * SECOND)), "seed {seed}: no join within 10 s");
        world
    }

    /// All ranks have begun to join, and are connected.
    fn joining(seed: u64, hosts: &[u32]) -> World {
        let world = hosts.len();
        let mut rng = Rng::with_seed(seed);
        let ranks = (0..world).map(|rank| {
            let config = |other: usize| PeerConfig {
                generation: Generation(1),
                references: hosts[rank] == hosts[other],
                eager_credit_bytes: 64 * 1024,
                ..PeerConfig::default()
            };
            let others = (0..world).filter(|other| *other != rank);
            let peers = others.map(|other| Peer::with_copies(config(other), Time(0))).collect();
            let host = PhantomHost {
                now: Time(0),
                peers,
                hosts: hosts.to_vec(),
                ended: HashMap::new(),
                joined: None,
                sources: HashMap::new(),
                warnings: Vec::new(),
                rng: rng.fork(),
            };
            let groups = Groups::new(node(rank), Thresholds::default(), 1 << 14);
            let (steps, works, start) = (VecDeque::new(), Vec::new(), Time(0));
            Rank { groups, host, steps, tick: start, works_from: start, works, is_dead: false }
        });
        let ranks = ranks.collect();
        let mut world = World { now: Time(0), ranks, paths: HashMap::new(), rng };
        for rank in 0..hosts.len() {
            world.join(rank);
        }
        world
    }

    fn join(&mut self, rank: usize) {
        let hosts = self.ranks[rank].host.hosts.clone();
        let Rank { groups, host, .. } = &mut self.ranks[rank];
        let who = (0..hosts.len()).map(|rank| Arc::from(format!("rank {rank}"))).collect::<Vec<Arc<str>>>();
        let members = (0..hosts.len()).map(|other| {
            (other != rank).then(|| {
                let peer = groups.add_peer(node(other), who[other].clone());
                host.peers[peer as usize].stream_up(0, Time(0));
                peer
            })
        });
        let members: Vec<Option<PeerId>> = members.collect();
        let (id, generation, secret, name) = (GROUP, Generation(1), Vec::new(), Arc::from("phantoms"));
        groups.join(host, Join { id, generation, secret, name, members: members.clone(), who, algorithm: None });
        for (other, peer) in members.iter().enumerate().filter_map(|(other, peer)| Some((other, (*peer)?))) {
            groups.connected(host, peer, hosts[other] == hosts[rank], None);
        }
    }

    fn plan(&mut self, rank: usize, after: u64, step: Step) {
        let at = self.now.plus(after);
        self.ranks[rank].steps.push_back((at, step));
    }

    /// Runs until something is so. Returns false if it is not by then.
    fn run(&mut self, until: impl Fn(&World) -> bool, by: Time) -> bool {
        for _ in 0..MOST_TURNS {
            for rank in 0..self.ranks.len() {
                self.send(rank);
            }
            if until(self) {
                return true;
            }
            let next = self.next();
            if next > by {
                return false;
            }
            self.now = self.now.max(next);
            self.turn();
        }
        panic!("the clock does not get on: {:?}", self.now);
    }

    /// Everything that the machines of a rank have to send leaves, in order.
    fn send(&mut self, rank: usize) {
        if self.ranks[rank].is_dead {
            return;
        }
        for peer in 0..self.ranks.len() - 1 {
            let to = rank_of(rank, peer);
            while let Some(outbound) = self.ranks[rank].host.peers[peer].poll_frame(0, self.now) {
                let payload = match outbound.payload {
                    Payload::Control(bytes) => bytes.to_vec(),
                    Payload::Owned(..) | Payload::Memory => Vec::new(),
                };
                let path = self.paths.entry((rank, to)).or_default();
                let last = path.back().map_or(self.now, |flying| flying.at);
                let at = last.max(self.now.plus(self.rng.u64(10_000..2 * MILLISECOND)));
                path.push_back(Flying { at, header: outbound.header, payload });
            }
        }
    }

    fn next(&self) -> Time {
        let frames = self.paths.values().filter_map(|path| path.front()).map(|flying| flying.at);
        let ranks = self.ranks.iter().filter(|rank| !rank.is_dead).map(|rank| {
            let lives = |(peer, _): &(PeerId, &Peer<u64>)| rank.groups.why_lost(*peer).is_none();
            let machines = (0..).zip(&rank.host.peers).filter(lives).map(|(_, machine)| machine.poll_timeout(self.now));
            let step = rank.steps.front().map(|(at, _)| *at);
            let next = machines.chain(step).fold(rank.tick, Time::min);
            if rank.groups.has_work() || !rank.works.is_empty() {
                next.min(rank.works_from.max(self.now.plus(1000)))
            } else {
                next
            }
        });
        frames.chain(ranks).min().expect("somebody lives")
    }

    fn turn(&mut self) {
        let mut due: Vec<(usize, usize)> = Vec::new();
        for (pair, path) in &self.paths {
            due.extend(path.front().filter(|flying| flying.at <= self.now).map(|_| *pair));
        }
        due.sort_unstable();
        self.rng.shuffle(&mut due);
        for (from, to) in due {
            let flying = self.paths.get_mut(&(from, to)).and_then(VecDeque::pop_front).expect("just seen");
            self.ranks[to].deliver(from, to, &flying, self.now);
        }
        for rank in 0..self.ranks.len() {
            self.ranks[rank].act(self.now);
        }
    }
}

impl Rank {
    fn deliver(&mut self, from: usize, to: usize, Flying { header, payload, .. }: &Flying, now: Time) {
        if self.is_dead {
            return;
        }
        let peer = peer_of(to, from);
        let Rank { groups, host, .. } = self;
        host.now = now;
        let has_place = match groups.header(host, peer, 0, header) {
            Ok(landing) => matches!(landing, Landing::Place(_)),
            Err(_) if groups.why_lost(peer).is_some() => return,
            Err(error) => panic!("{error}: {header:?}"),
        };
        // Its bytes lie in their place, or are used before the core hears that the frame is whole, or after.
        let is_claimed = !has_place && host.rng.bool() && groups.claim(host, (peer, 0), header).is_some();
        let placed = is_claimed || has_place && host.rng.bool();
        groups.frame(host, (peer, 0), header, payload, placed).expect("it is in order");
        self.poll_events();
    }

    fn poll_events(&mut self) {
        let Rank { groups, host, .. } = self;
        for peer in 0..host.peers.len() as PeerId {
            while let Some(event) = host.machine(peer).poll_event() {
                if event == Event::Silent && groups.why_lost(peer).is_none() {
                    groups.lost(host, peer, "it is silent", false);
                    groups.forget_peer(host, peer);
                } else {
                    groups.happened(host, peer, event);
                }
            }
        }
    }

    fn act(&mut self, now: Time) {
        if self.is_dead {
            return;
        }
        self.host.now = now;
        while let Some((_, step)) = self.steps.pop_front_if(|(at, _)| *at <= now) {
            let Rank { groups, host, .. } = self;
            match step {
                Step::Issue(call, what) => {
                    groups.start(host, GROUP.into(), what, Phantom::of(call));
                }
                Step::IssueIn(channel, call, what) => {
                    groups.start(host, Scope { group: GROUP, channel }, what, Phantom::of(call));
                }
                Step::Open(call, open) => groups.open(host, GROUP, open, Phantom::of(call)),
                Step::Close(channel) => groups.close(host, Scope { group: GROUP, channel }, false),
                Step::Fail(channel, failure) => groups.fail(host, Scope { group: GROUP, channel }, failure, true),
                Step::Leave => groups.leave(host, GROUP),
                Step::Change(call, priority) => {
                    groups.reprioritise(host, GROUP, priority, |body| body.call == Some(call));
                }
                Step::Rest(time) => self.works_from = now.plus(time),
                Step::Die => self.is_dead = true,
            }
        }
        let Rank { groups, host, tick, works_from, works, .. } = self;
        if groups.has_work() && *works_from <= now {
            works.extend(groups.work(host));
        }
        // Several pieces are done at a time, and end in any order, also after their operation.
        while !works.is_empty() && host.rng.u8(0..4) > 0 {
            let (work, read) = works.swap_remove(host.rng.usize(0..works.len()));
            let read = read.into_iter().map(|operand| (operand, host.rng.u8(0..4) > 0)).collect();
            groups.worked(host, work, Ok(read));
        }
        for peer in 0..host.peers.len() as PeerId {
            if host.look(peer).poll_timeout(now) <= now && groups.why_lost(peer).is_none() {
                host.machine(peer).handle_timeout(now);
            }
        }
        if *tick <= now {
            *tick = groups.look_for_late(host);
        }
        self.poll_events();
    }

    fn ended(&self, call: usize) -> Option<&(Time, Result<(), Failure>)> {
        self.host.ended.get(&call)
    }
}

fn node(rank: usize) -> NodeKey {
    [rank as u8 + 1; 16]
}

/// The rank that a rank calls by this number.
fn rank_of(rank: usize, peer: usize) -> usize {
    if peer < rank { peer } else { peer + 1 }
}

fn peer_of(rank: usize, other: usize) -> PeerId {
    (if other < rank { other } else { other - 1 }) as PeerId
}

fn call(collective: Collective, name: Name, bytes: u64) -> Call {
    Call {
        collective,
        fingerprint: Fingerprint::new(name, None, DType::F32, None, bytes / 4),
        dtype: DType::F32,
        op: ReduceOp::Sum,
        bytes,
        splits: None,
        tag: 0,
        coflow: 0,
        priority: Priority(0),
        hold: false,
        timeout: TIMEOUT,
    }
}

fn all_reduce(bytes: u64) -> Call {
    call(Collective::AllReduce, Name::AllReduce, bytes)
}

/// Runs `cases` with a fixed seed each, or the one of `PENSTOCK_SEED`.
fn seeded(cases: u64, case: impl Fn(u64, &mut Rng)) {
    let chosen = std::env::var("PENSTOCK_SEED").ok().and_then(|seed| seed.parse().ok());
    for seed in chosen.map_or(0..cases, |seed| seed..seed + 1) {
        println!("PENSTOCK_SEED={seed}");
        case(seed, &mut Rng::with_seed(seed ^ 0x9a57));
    }
}

fn hosts(rng: &mut Rng, world: usize) -> Vec<u32> {
    (0..world as u32).map(|rank| if rng.bool() { 0 } else { rank }).collect()
}

const GROUP: GroupId = GroupId(77);
const TIMEOUT: u64 = 20 * SECOND;
/// A run takes some thousand.
const MOST_TURNS: usize = 100_000;

/// All ranks have issued the operation, and the tensor of one never is ready: all are told that, also those whose time-out comes a little
/// earlier. Of three ranks, one may wait for another that waits for it.
#[test]
fn the_rank_whose_tensor_is_not_ready_says_so() {
    seeded(40, |seed, rng| {
        let size = rng.usize(2..5);
        let mut world = World::new(seed, &hosts(rng, size));
        let late = rng.usize(0..size);
        for rank in 0..size {
            let call = Call { timeout: 3 * SECOND, hold: rank == late, ..all_reduce(4_000) };
            world.plan(rank, rng.u64(0..300) * MILLISECOND, Step::Issue(0, call));
        }
        let start = world.now;
        let over = |world: &World| world.ranks.iter().all(|rank| rank.ended(0).is_some());
        assert!(world.run(over, start.plus(6 * SECOND)), "seed {seed}: no end");
        for rank in &world.ranks {
            let failure = rank.ended(0).and_then(|(_, result)| result.as_ref().err()).expect("it was never released");
            assert!(failure.message.contains("its tensor was not ready"), "seed {seed}, {late} of {size}: {failure}");
        }
    });
}

/// A message comes just before the receiver's time-out, and it takes a while to read it: that is no time-out. A rank that does not
/// read it at all says so, and blames nobody.
#[test]
fn what_has_come_before_the_time_out_is_worked_on() {
    seeded(20, |seed, rng| {
        let ends = rng.bool();
        let mut world = World::new(seed, &[0, 0]);
        let broadcast = |timeout| Call { timeout, ..call(Collective::Broadcast { root: 1 }, Name::Broadcast, 40_000) };
        world.plan(0, 0, Step::Issue(0, broadcast(3 * SECOND)));
        world.plan(0, SECOND, Step::Rest(if ends { 2 * SECOND + 500 * MILLISECOND } else { 10 * SECOND }));
        world.plan(1, 3 * SECOND - rng.u64(50 * MILLISECOND..SECOND), Step::Issue(0, broadcast(TIMEOUT)));
        let start = world.now;
        let over = |world: &World| world.ranks.iter().all(|rank| rank.ended(0).is_some());
        assert!(world.run(over, start.plus(6 * SECOND)), "seed {seed}: no end");
        let (at, result) = world.ranks[0].ended(0).expect("it is over");
        match result {
            Ok(()) => assert!(ends && at.since(start) > 3 * SECOND, "seed {seed}"),
            Err(failure) => {
                let says = "Timed out after 3.0 s: all that it needs of others has come, and this rank";
                assert!(!ends && failure.message.contains(says), "seed {seed}: {failure}");
            }
        }
    });
}

/// Collectives and messages, issued by all ranks at their own times: all end well, and nothing is kept of them.
#[test]
fn what_all_ranks_issue_ends() {
    seeded(60, |seed, rng| {
        let count = rng.usize(1..6);
        let mut world = World::new(seed, &hosts(rng, count));
        let calls = rng.usize(1..12);
        let mut times = vec![0; count];
        for at in 0..calls {
            let root = rng.u32(0..count as u32);
            let bytes = 4 * count as u64 * [0, 1, 100, 5_000, 40_000][rng.usize(0..5)];
            let what = match rng.u8(0..6) {
                0 => call(Collective::Broadcast { root }, Name::Broadcast, bytes),
                1 => call(Collective::AllGather, Name::AllGather, bytes),
                2 => call(Collective::Barrier, Name::Barrier, 0),
                3 => call(Collective::ReduceScatter, Name::ReduceScatter, bytes),
                _ => all_reduce(bytes),
            };
            for (rank, time) in times.iter_mut().enumerate() {
                *time += rng.u64(0..30 * MILLISECOND);
                world.plan(rank, *time, Step::Issue(at, what.clone()));
            }
        }
        let all = |world: &World| world.ranks.iter().all(|rank| rank.host.ended.len() == calls);
        assert!(world.run(all, world.now.plus(10 * SECOND)), "seed {seed}: something has not ended");
        for rank in &world.ranks {
            assert!(rank.host.ended.values().all(|(_, result)| result.is_ok()), "seed {seed}: {:?}", rank.host.ended);
            let group = rank.groups.get(GROUP).expect("it is in it");
            assert!(!group.is_busy() && rank.groups.early().is_empty() && rank.groups.early().claims() == 0);
            assert_eq!(group.collectives(), calls as u64);
        }
        for rank in 0..count {
            world.plan(rank, 0, Step::Leave);
        }
        let left = |world: &World| world.ranks.iter().all(|rank| rank.groups.get(GROUP).is_none());
        assert!(world.run(left, world.now.plus(SECOND)), "seed {seed}");
    });
}

/// A rank dies at any moment: on every other rank each call ends well or with the loss of that rank, once, and within the time
/// after which a silent peer is lost. Nothing of the group is left in memory.
#[test]
fn a_death_ends_everything_that_needs_the_rank() {
    seeded(80, |seed, rng| {
        let count = rng.usize(2..6);
        let mut world = World::new(seed, &hosts(rng, count));
        let (calls, victim) = (rng.usize(1..10), rng.usize(0..count));
        let dies = rng.u64(0..150 * MILLISECOND);
        for rank in 0..count {
            let mut time = 0;
            for at in 0..calls {
                time += rng.u64(0..30 * MILLISECOND);
                if rank == victim && time > dies {
                    break;
                }
                let bytes = 4 * [1, 100, 40_000][at % 3];
                world.plan(rank, time, Step::Issue(at, all_reduce(bytes)));
            }
        }
        world.plan(victim, dies, Step::Die);
        let began = world.now;
        let ends = |world: &World| {
            world.ranks.iter().all(|rank| rank.is_dead || rank.host.ended.len() == calls) && world.ranks[victim].is_dead
        };
        assert!(world.run(ends, began.plus(dies + 6 * SECOND)), "seed {seed}: something waits for a dead rank");
        for rank in world.ranks.iter().filter(|rank| !rank.is_dead) {
            let failures = || rank.host.ended.values().filter_map(|(at, result)| Some((*at, result.as_ref().err()?)));
            for (_, failure) in failures() {
                assert_eq!(failure.kind, FailureKind::PeerLost, "seed {seed}: {failure}");
            }
            let failed = failures().map(|(at, _)| at).min().unwrap_or(Time(u64::MAX));
            let well = rank.host.ended.values().filter(|(_, result)| result.is_ok());
            assert!(
                well.into_iter().all(|(at, _)| *at <= failed),
                "seed {seed}: a call ends after the group's failure"
            );
            let group = rank.groups.get(GROUP).expect("it is in it");
            assert!(group.operations() == 0 && rank.groups.early().is_empty(), "seed {seed}");
        }
    });
}

/// A rank does not issue what the others do: they end at their time-outs, not before and not much later, and say which rank they
/// wait for and how much that one has issued.
#[test]
fn a_time_out_says_who_is_missing() {
    seeded(30, |seed, rng| {
        let count = rng.usize(2..5);
        let mut world = World::new(seed, &hosts(rng, count));
        let (calls, lazy) = (rng.usize(1..6), rng.usize(0..count));
        for rank in 0..count {
            for at in 0..calls + usize::from(rank != lazy) {
                world.plan(rank, at as u64 * MILLISECOND, Step::Issue(at, all_reduce(400)));
            }
        }
        let issued = world.now.plus(calls as u64 * MILLISECOND);
        let ends =
            |world: &World| world.ranks.iter().enumerate().all(|(at, rank)| at == lazy || rank.ended(calls).is_some());
        assert!(world.run(ends, issued.plus(TIMEOUT + SECOND)), "seed {seed}: no time-out");
        for (at, rank) in world.ranks.iter().enumerate().filter(|(at, _)| *at != lazy) {
            assert!((0..calls).all(|call| rank.ended(call).is_some_and(|(_, result)| result.is_ok())), "seed {seed}");
            let (time, result) = rank.ended(calls).expect("it has");
            let failure = result.as_ref().expect_err("it cannot end well");
            assert_eq!(failure.kind, FailureKind::Timeout, "seed {seed}, rank {at}: {failure}");
            assert!(time.since(issued) >= TIMEOUT, "seed {seed}: too early");
            let missing = format!("rank {lazy}, which has issued {calls} operations so far");
            assert!(failure.message.contains(&missing), "seed {seed}, rank {at}: {failure}");
        }
    });
}

/// A caller gives up a join that all ranks are about to end, and it ends before another rank could have said more: it has
/// succeeded, and the group lives.
#[test]
fn a_join_that_ends_while_its_caller_gives_up() {
    seeded(30, |seed, rng| {
        let count = rng.usize(2..6);
        let mut world = World::joining(seed, &hosts(rng, count));
        let Rank { groups, host, .. } = &mut world.ranks[rng.usize(0..count)];
        assert_eq!(groups.get(GROUP).expect("it joins").joining, Some(group::Joining::Gathers));
        groups.expire(host, GROUP.into(), SECOND);
        assert!(!world.run(|_| false, Time(5 * SECOND)));
        for rank in &world.ranks {
            assert_eq!(rank.host.joined, Some(Ok(())), "seed {seed}");
            assert!(rank.groups.get(GROUP).is_some_and(|group| group.failed.is_none()), "seed {seed}");
        }
    });
}

/// Ranks that believe an operation to be different ones fail with a mismatch that names both, within the time of a probe, also
/// where neither sends the other anything.
#[test]
fn a_mismatch_is_found_by_those_who_wait() {
    seeded(40, |seed, rng| {
        let count = rng.usize(2..5);
        let mut world = World::new(seed, &hosts(rng, count));
        let odd = rng.usize(0..count);
        for rank in 0..count {
            let bytes = if rank == odd { 800 } else { 400 };
            let root = rng.u32(0..count as u32);
            let barrier = call(Collective::Barrier, Name::Barrier, 0);
            let other = call(Collective::Broadcast { root }, Name::Broadcast, bytes);
            let what = if rank == odd && seed % 2 == 0 { other } else { all_reduce(bytes) };
            world.plan(rank, rng.u64(0..20 * MILLISECOND), Step::Issue(0, what));
            world.plan(rank, 30 * MILLISECOND, Step::Issue(1, barrier));
        }
        let ends = |world: &World| world.ranks.iter().all(|rank| rank.host.ended.len() == 2);
        assert!(world.run(ends, world.now.plus(3 * SECOND)), "seed {seed}: a mismatch is not found");
        let failures = world.ranks.iter().filter_map(|rank| rank.ended(1)?.1.as_ref().err());
        let failures: Vec<&Failure> = failures.collect();
        assert_eq!(failures.len(), count, "seed {seed}");
        assert!(failures.iter().all(|failure| failure.kind == FailureKind::Mismatch), "seed {seed}: {failures:?}");
    });
}

/// A rank leaves after some collectives: it and a single other rank end those, and later ones fail because it has left, long
/// before a time-out.
#[test]
fn what_a_rank_did_before_it_left_counts() {
    seeded(60, |seed, rng| {
        let count = rng.usize(2..5);
        let mut world = World::new(seed, &hosts(rng, count));
        let (calls, leaver) = (rng.usize(0..6), rng.usize(0..count));
        for rank in 0..count {
            let mut time = 0;
            for at in 0..calls + usize::from(rank != leaver) {
                time += rng.u64(0..20 * MILLISECOND);
                world.plan(rank, time, Step::Issue(at, all_reduce(4 * [1, 30_000][at % 2])));
            }
        }
        let own = |world: &World| world.ranks[leaver].host.ended.len() == calls;
        assert!(world.run(own, world.now.plus(SECOND)), "seed {seed}");
        world.plan(leaver, 0, Step::Leave);
        let ends = |world: &World| {
            world.ranks.iter().enumerate().all(|(at, rank)| at == leaver || rank.ended(calls).is_some())
        };
        assert!(world.run(ends, world.now.plus(2 * SECOND)), "seed {seed}: somebody waits for a rank that has left");
        for (at, rank) in world.ranks.iter().enumerate() {
            for call in 0..calls {
                // A third rank that needs the leaver fails the group for all, also for those that are in an earlier call.
                let is_late = count > 2 && at != leaver;
                let is_right = |result: &Result<(), Failure>| match result {
                    Ok(()) => true,
                    Err(failure) => is_late && failure.message.contains(&format!("rank {leaver} has left the group")),
                };
                let ended = rank.ended(call);
                assert!(
                    ended.is_some_and(|(_, result)| is_right(result)),
                    "seed {seed}, rank {at}, call {call}: {ended:?}"
                );
            }
            if at != leaver {
                let failure =
                    rank.ended(calls).and_then(|(_, result)| result.as_ref().err()).expect("it needs the leaver");
                let says = format!("rank {leaver} has left the group");
                assert!(
                    failure.kind == FailureKind::PeerLost && failure.message.contains(&says),
                    "seed {seed}: {failure}"
                );
            }
        }
    });
}

/// A rank makes another operation than the others where nobody sends anything, so that all end well. When it leaves, the others learn
/// from what it did, and fail with both named.
#[test]
fn what_a_rank_did_before_it_left_is_compared() {
    seeded(40, |seed, rng| {
        let count = rng.usize(2..5);
        let mut world = World::new(seed, &hosts(rng, count));
        let (calls, leaver) = (rng.usize(1..4), rng.usize(0..count));
        let odd = rng.usize(0..calls);
        for rank in 0..count {
            for at in 0..calls {
                let mut what = all_reduce(0);
                if (rank, at) == (leaver, odd) {
                    what.fingerprint = Fingerprint::new(Name::AllReduce, None, DType::I32, None, 0);
                }
                world.plan(rank, at as u64 * rng.u64(0..20 * MILLISECOND), Step::Issue(at, what));
            }
        }
        let all = |world: &World| world.ranks.iter().all(|rank| rank.host.ended.len() == calls);
        assert!(world.run(all, world.now.plus(SECOND)), "seed {seed}: something has not ended");
        world.plan(leaver, 0, Step::Leave);
        let failure = |rank: &Rank| rank.groups.get(GROUP).and_then(|group| group.failure().cloned());
        let others = |world: &World| {
            let ranks = world.ranks.iter().enumerate().filter(|(at, _)| *at != leaver);
            ranks.map(|(_, rank)| failure(rank)).collect::<Option<Vec<Failure>>>()
        };
        assert!(world.run(|world| others(world).is_some(), world.now.plus(SECOND)), "seed {seed}: nobody is told");
        for failure in others(&world).expect("just seen") {
            let is_named = failure.message.contains("int32") && failure.message.contains(&format!("rank {leaver}"));
            assert!(failure.kind == FailureKind::Mismatch && is_named, "seed {seed}: {failure}");
        }
    });
}

/// Receives from any source take each message once, whichever comes first.
#[test]
fn receives_from_any_source_take_each_message_once() {
    seeded(40, |seed, rng| {
        let count = rng.usize(2..6);
        let mut world = World::new(seed, &hosts(rng, count));
        let message = |collective| Call { tag: 3, ..call(collective, Name::PointToPoint, 400) };
        let any = crate::unbound::ANY_SOURCE;
        for rank in 1..count {
            world.plan(rank, rng.u64(0..20 * MILLISECOND), Step::Issue(rank, message(Collective::Send { to: 0 })));
        }
        let mut times: Vec<u64> = (1..count).map(|_| rng.u64(0..20 * MILLISECOND)).collect();
        times.sort_unstable();
        for (at, time) in times.into_iter().enumerate() {
            world.plan(0, time, Step::Issue(at, message(Collective::Recv { from: any })));
        }
        let ends = |world: &World| world.ranks[0].host.ended.len() == count - 1;
        assert!(world.run(ends, world.now.plus(SECOND)), "seed {seed}");
        let mut sources: Vec<u32> = world.ranks[0].host.sources.values().copied().collect();
        sources.sort_unstable();
        assert_eq!(sources, (1..count as u32).collect::<Vec<_>>(), "seed {seed}");
    });
}
