//! How long a collective takes on a network: [`Simulation`].

use crate::network::{Link, LinkId, Network, NoPath, NodeId, SEGMENT_BYTES, Topology};
use crate::ranks::{PACKET_BYTES, Step, Stop, World};
use penstock_core::groups::Call;
use penstock_plan::{
    Algorithm, Collective, Placement, PlanError, Request, Thresholds, choose, hops, segment_bytes, wire_bytes,
};
use penstock_stream::fingerprint::{Fingerprint, Name};
use penstock_types::{DType, Failure, MILLISECOND, Priority, ReduceOp, SECOND, Time};
use std::collections::BTreeSet;
use std::fmt;

/// A collective of ranks that each have a host of their own, several times one after the other.
///
/// The shipped core runs it ([`crate::ranks`]). Nothing is random: the same simulation has the same outcome on every machine.
#[derive(Clone, Debug)]
pub struct Simulation {
    /// The network. No link loses, duplicates or reorders packets. Of several shortest paths each pair of ranks takes one by a hash.
    pub topology: Topology,
    /// By rank: its host.
    pub hosts: Vec<NodeId>,
    /// The collective; no send and no receive. Elements are 32-bit floats.
    pub collective: Collective,
    /// The size of the operation, as [`Request::bytes`] defines it for the collective. A barrier has none: the number is not read.
    pub bytes: u64,
    /// The algorithm of an all-reduce; `None`: chosen by size and hosts. Other collectives always have that.
    pub algorithm: Option<Algorithm>,
    /// How often the collective runs. In the first one, streams know nothing of their rates yet.
    pub repetitions: u32,
}

/// How far a simulation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Repetitions that have ended.
    pub repetitions: u32,
    /// Nanoseconds of virtual time in the current one; 0 while ranks join.
    pub time: u64,
    /// What [`Outcome::promised`] will be.
    pub promised: u64,
}

/// The result of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The algorithm that ran.
    pub algorithm: Algorithm,
    /// The time that the plan promises, in nanoseconds, see [`Simulation::promised`].
    pub promised: u64,
    /// Each run of the collective.
    pub repetitions: Vec<Repetition>,
}

/// One run of the collective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Repetition {
    /// Nanoseconds from the call, which all ranks issue at the same time, to the end on the last rank.
    pub time: u64,
    /// The link with the largest share, or without shares the one with the most bytes; of equals, the one that was added first.
    pub busiest: LinkId,
    /// Bytes that this link sent meanwhile, headers of frames included.
    pub bytes: u64,
    /// Frames that were sent over it.
    pub frames: u64,
    /// The bytes over what the link could send meanwhile; `None` if it has no limit.
    pub share: Option<f64>,
}

/// What a message of [`Error::OutOfBounds`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// The number of ranks.
    Ranks,
    /// The host of this rank.
    Host(usize),
    /// The bytes.
    Bytes,
    /// The number of repetitions.
    Repetitions,
    /// The collective.
    Collective,
    /// The algorithm.
    Algorithm,
    /// A link's rate.
    Rate(LinkId),
    /// A link's delay.
    Delay(LinkId),
    /// A link's queue.
    Queue(LinkId),
    /// A link's loss, duplicates, jitter or lateness.
    Faults(LinkId),
}

/// Why there is no outcome.
#[derive(Clone, Debug)]
pub enum Error {
    /// A number that makes no sense, or takes too long. Nothing has run.
    OutOfBounds {
        /// What is wrong.
        field: Field,
        /// What would be right.
        why: String,
    },
    /// There is no plan: bytes that cannot be divided, or an algorithm of other collectives. Nothing has run.
    NoPlan(PlanError),
    /// No path joins the hosts of two ranks. Nothing has run.
    NoPath(NoPath),
    /// The core runs another algorithm than the one that was wanted.
    Replaced {
        /// What was wanted.
        wanted: Algorithm,
        /// What would run.
        by: Algorithm,
    },
    /// A queue was full. The simulator has no TCP below frames, which would send again what was lost.
    Full {
        /// The link with the queue.
        link: LinkId,
        /// Nanoseconds since the beginning of the repetition; 0 while ranks join.
        after: u64,
    },
    /// A rank failed. That is a bug of Penstock.
    Failed {
        /// The rank.
        rank: usize,
        /// Its failure.
        failure: Failure,
    },
    /// The collective has not ended after 30 days of virtual time.
    Endless,
    /// The callback said so.
    Interrupted,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::OutOfBounds { why, .. } => f.write_str(why),
            Error::NoPlan(error) => error.fmt(f),
            Error::NoPath(error) => error.fmt(f),
            Error::Replaced { wanted, by } => {
                write!(
                    f,
                    "{wanted} does not do for so many bytes, as ranks would hold long messages; {by} would run instead"
                )
            }
            Error::Full { after, .. } => write!(
                f,
                "was full after {:.3} ms of a collective; the simulator does not send again what is lost: give a longer queue, or none",
                *after as f64 / MILLISECOND as f64
            ),
            Error::Failed { rank, failure } => write!(f, "rank {rank} failed: {failure}"),
            Error::Endless => f.write_str("the collective has not ended after 30 days of virtual time"),
            Error::Interrupted => f.write_str("the simulation was interrupted"),
        }
    }
}

impl std::error::Error for Error {}

impl Simulation {
    /// Runs the simulation. `goes_on` is asked every few milliseconds of processor time whether to go on.
    ///
    /// Cost: about a second of processor time for each million of segments (16 KiB) that ranks send over two links, or for 60,000
    /// messages. Memory is as that of [`crate::ranks`].
    ///
    /// # Errors
    /// [`Error`]; there is no outcome of the repetitions that have ended.
    pub fn run(&self, mut goes_on: impl FnMut(Progress) -> bool) -> Result<Outcome, Error> {
        self.check()?;
        let algorithm = self.algorithm.unwrap_or_else(|| choose(&self.request(0), &Thresholds::default()).0);
        let promised = self.promised(algorithm)?;
        self.check_work(algorithm)?;
        let mut progress = Progress { repetitions: 0, time: 0, promised };
        let mut world = World::new(self.topology.clone(), &self.hosts, self.algorithm, PATIENCE);
        let ranks = self.hosts.len();
        for rank in 0..ranks as u32 {
            world.schedule(rank, Time(0), Step::Join);
        }
        let stopped = |stop, start: Option<Time>| match stop {
            Stop::Lost { link, at } => Error::Full { link, after: start.map_or(0, |start| at.since(start)) },
            Stop::NoPath(error) => Error::NoPath(error),
            Stop::Late { .. } => Error::Endless,
            Stop::Interrupted => Error::Interrupted,
        };
        world.run(ranks, Time(PATIENCE), &mut |_| goes_on(progress)).map_err(|stop| stopped(stop, None))?;
        let mut repetitions = Vec::new();
        for number in 0..self.repetitions as usize {
            // Where links are not slow, the last acknowledgements of what was before have arrived by then.
            let start = world.now().plus(MILLISECOND + 2 * self.longest_delay());
            for rank in 0..ranks as u32 {
                world.schedule(rank, start, Step::Start(number, self.call()));
            }
            world.run_until(Time(start.0 - 1)).map_err(|stop| stopped(stop, Some(start)))?;
            let before = Carried::of(&world, &self.topology);
            world.run_until(start).map_err(|stop| stopped(stop, Some(start)))?;
            if let Some(by) = world.algorithm(0).filter(|by| *by != algorithm) {
                return Err(Error::Replaced { wanted: algorithm, by });
            }
            let mut asked = |now: Time| goes_on(Progress { time: now.since(start), ..progress });
            let ran = world.run((number + 2) * ranks, start.plus(PATIENCE), &mut asked);
            // A rank that has failed is the reason for whatever else went wrong.
            for (rank, ends) in world.ends().iter().enumerate() {
                if let Some(Err(failure)) = ends.last().map(|end| &end.result) {
                    return Err(Error::Failed { rank, failure: failure.clone() });
                }
            }
            ran.map_err(|stop| stopped(stop, Some(start)))?;
            let time = world.now().since(start);
            repetitions.push(self.repetition(&before, &Carried::of(&world, &self.topology), time));
            progress.repetitions += 1;
        }
        Ok(Outcome { algorithm, promised, repetitions })
    }

    /// The time that a plan promises, in nanoseconds: the largest of all ranks' bytes over the rates of their hosts' links, and a
    /// one-way trip for each hop ([`hops`]).
    ///
    /// A trip is the shortest one between ranks of consecutive numbers: the delay of each link, and on each link after the first
    /// one the time that it takes to send a packet of the mean message. The promise knows no windows, no headers and no other messages on a link. Where
    /// messages are cut into segments, hops overlap, and a collective may take less.
    ///
    /// # Errors
    /// [`Error::NoPlan`], [`Error::NoPath`].
    pub fn promised(&self, algorithm: Algorithm) -> Result<u64, Error> {
        let ranks = self.hosts.len();
        let hops = hops(&self.request(0), algorithm).map_err(Error::NoPlan)?;
        let mut network = Network::<()>::new(self.topology.clone(), 0);
        let (mut bytes_take, mut trip, mut most_sent) = (0.0_f64, f64::INFINITY, 0);
        let mut paths = Vec::new();
        for rank in 0..ranks {
            let [from, to] = [rank, (rank + 1) % ranks].map(|rank| self.hosts[rank]);
            let flow = network.flow(from, to).map_err(Error::NoPath)?;
            paths.push(network.path(flow).iter().map(|link| self.topology.link(*link)).collect::<Vec<Link>>());
        }
        for rank in 0..ranks {
            let moved = wire_bytes(&self.request(rank as u32), algorithm).map_err(Error::NoPlan)?;
            let (out, into) = (&paths[rank], &paths[(rank + ranks - 1) % ranks]);
            bytes_take = bytes_take.max(seconds(moved.sent, out[0].rate));
            bytes_take = bytes_take.max(seconds(moved.received, into[into.len() - 1].rate));
            most_sent = most_sent.max(moved.sent);
        }
        let packet = most_sent.div_ceil(u64::from(hops.max(1))).min(SEGMENT_BYTES);
        for path in &paths {
            let delays = path.iter().map(|link| link.delay).sum::<u64>() as f64 / SECOND as f64;
            trip = trip.min(delays + path[1..].iter().map(|link| seconds(packet, link.rate)).sum::<f64>());
        }
        Ok(((bytes_take + f64::from(hops) * trip) * SECOND as f64).round() as u64)
    }

    /// A barrier's is 0.
    fn size(&self) -> u64 {
        if self.collective == Collective::Barrier { 0 } else { self.bytes }
    }

    fn request(&self, rank: u32) -> Request {
        let world = self.hosts.len() as u32;
        let placement = Placement::separate_hosts(world);
        let segment_bytes =
            segment_bytes(self.collective, placement.medium(), world, self.size(), &Thresholds::default());
        let element_bytes = ELEMENT_BYTES as u32;
        let (collective, bytes) = (self.collective, self.size());
        Request { collective, world, rank, placement, bytes, element_bytes, splits: None, segment_bytes }
    }

    fn call(&self) -> Call {
        let fingerprint =
            Fingerprint::new(name_of(self.collective), None, DType::F32, None, self.size() / ELEMENT_BYTES);
        Call {
            collective: self.collective,
            fingerprint,
            dtype: DType::F32,
            op: ReduceOp::Sum,
            bytes: self.size(),
            splits: None,
            tag: 0,
            coflow: 0,
            priority: Priority(0),
            hold: false,
            timeout: PATIENCE,
        }
    }

    fn longest_delay(&self) -> u64 {
        // No shortest path has more links than that, in networks that people build.
        8 * self.topology.links().map(|link| self.topology.link(link).delay).max().unwrap_or(0)
    }

    fn check(&self) -> Result<(), Error> {
        let wrong = |field, why| Err(Error::OutOfBounds { field, why });
        let ranks = self.hosts.len();
        if !(2..=MOST_RANKS).contains(&ranks) {
            return wrong(Field::Ranks, format!("the number of ranks is {ranks}; 2 to {MOST_RANKS} are possible"));
        }
        let mut taken = BTreeSet::new();
        if let Some(rank) = self.hosts.iter().position(|host| !taken.insert(*host)) {
            return wrong(Field::Host(rank), "another rank has this host; the simulator has one rank a host".into());
        }
        if matches!(self.collective, Collective::Send { .. } | Collective::Recv { .. }) {
            return wrong(Field::Collective, format!("a {} concerns two ranks only", self.collective.name()));
        }
        if self.algorithm.is_some() && self.collective != Collective::AllReduce {
            let why = format!("only an all-reduce takes an algorithm; that of a {} is chosen", self.collective.name());
            return wrong(Field::Algorithm, why);
        }
        if self.size() > MOST_BYTES || !self.size().is_multiple_of(ELEMENT_BYTES) {
            let why = format!("{} bytes; multiples of {ELEMENT_BYTES} up to {MOST_BYTES} are possible", self.bytes);
            return wrong(Field::Bytes, why);
        }
        if !(1..=MOST_REPETITIONS).contains(&self.repetitions) {
            let why = format!("{} repetitions; 1 to {MOST_REPETITIONS} are possible", self.repetitions);
            return wrong(Field::Repetitions, why);
        }
        for id in self.topology.links() {
            let link = self.topology.link(id);
            let Link { rate, delay, jitter, in_order, queue_bytes, loss, duplicate, late, .. } = link;
            if rate != 0 && !RATES.contains(&rate) {
                let why = format!("{} Mbit/s; 1 to 10000000 are possible, or no limit", rate as f64 * 8e-6);
                return wrong(Field::Rate(id), why);
            }
            if delay > MOST_DELAY {
                let why = format!("{} ms; up to {} are possible", delay as f64 * 1e-6, MOST_DELAY / MILLISECOND);
                return wrong(Field::Delay(id), why);
            }
            if queue_bytes != 0 && queue_bytes < PACKET_BYTES {
                let why = format!("{queue_bytes} bytes; {PACKET_BYTES} and more are possible, or no limit");
                return wrong(Field::Queue(id), why);
            }
            if loss > 0.0 || duplicate > 0.0 || late > 0.0 || jitter > 0 && !in_order {
                let why =
                    "the simulator has no TCP below frames, which would send again what is lost, and restore the order";
                return wrong(Field::Faults(id), why.into());
            }
        }
        Ok(())
    }

    /// Refuses what would take hours, or gigabytes.
    fn check_work(&self, algorithm: Algorithm) -> Result<(), Error> {
        let ranks = self.hosts.len();
        let all_pairs = matches!(self.collective, Collective::AllToAll)
            || matches!(algorithm, Algorithm::Direct | Algorithm::Exchange)
                && matches!(self.collective, Collective::AllReduce | Collective::ReduceScatter | Collective::AllGather);
        if all_pairs && ranks > MOST_RANKS_IN_PAIRS {
            let why = format!("each of {ranks} ranks sends to each; 2 to {MOST_RANKS_IN_PAIRS} ranks are possible");
            return Err(Error::OutOfBounds { field: Field::Ranks, why });
        }
        let hops = hops(&self.request(0), algorithm).map_err(Error::NoPlan)?;
        let messages = ranks as u64 * u64::from(hops).max(if all_pairs { ranks as u64 } else { 1 });
        if messages * u64::from(self.repetitions) > MOST_MESSAGES {
            let most = MOST_MESSAGES / messages;
            let why = format!("{} repetitions take too long to simulate; 1 to {most} are possible", self.repetitions);
            return Err(Error::OutOfBounds { field: Field::Repetitions, why });
        }
        let mut sent = 0_u128;
        for rank in 0..ranks as u32 {
            sent += u128::from(wire_bytes(&self.request(rank), algorithm).map_err(Error::NoPlan)?.sent);
        }
        let sent = sent * u128::from(self.repetitions);
        if sent > u128::from(MOST_WORK_BYTES) {
            let gib = |bytes| bytes / (1 << 30);
            let why = format!(
                "all ranks send {} GiB, which takes too long to simulate; {} are possible",
                gib(sent),
                gib(MOST_WORK_BYTES.into())
            );
            return Err(Error::OutOfBounds { field: Field::Bytes, why });
        }
        Ok(())
    }

    fn repetition(&self, before: &Carried, after: &Carried, time: u64) -> Repetition {
        let of = |link: LinkId| {
            let index = link.0 as usize;
            let bytes = after.bytes[index] - before.bytes[index];
            let rate = self.topology.link(link).rate;
            let could = rate as f64 * time as f64 / SECOND as f64;
            let share = (could > 0.0).then(|| bytes as f64 / could);
            Repetition { time, busiest: link, bytes, frames: after.frames[index] - before.frames[index], share }
        };
        let key = |one: &Repetition| (one.share.unwrap_or(0.0), one.bytes);
        let links = self.topology.links().map(of);
        links.reduce(|best, one| if key(&one) > key(&best) { one } else { best }).expect("paths have links")
    }
}

/// What each link has carried.
struct Carried {
    bytes: Vec<u64>,
    frames: Vec<u64>,
}

impl Carried {
    fn of(world: &World, topology: &Topology) -> Carried {
        Carried {
            bytes: topology.links().map(|link| world.carried_bytes(link)).collect(),
            frames: topology.links().map(|link| world.carried_frames(link)).collect(),
        }
    }
}

fn seconds(bytes: u64, rate: u64) -> f64 {
    if rate == 0 { 0.0 } else { bytes as f64 / rate as f64 }
}

fn name_of(collective: Collective) -> Name {
    match collective {
        Collective::AllReduce => Name::AllReduce,
        Collective::ReduceScatter => Name::ReduceScatter,
        Collective::AllGather => Name::AllGather,
        Collective::Broadcast { .. } => Name::Broadcast,
        Collective::Reduce { .. } => Name::Reduce,
        Collective::Gather { .. } => Name::Gather,
        Collective::Scatter { .. } => Name::Scatter,
        Collective::AllToAll => Name::AllToAll,
        Collective::Barrier => Name::Barrier,
        Collective::Send { .. } | Collective::Recv { .. } => Name::PointToPoint,
    }
}

/// More ranks than that take gigabytes: each knows each.
pub const MOST_RANKS: usize = 1024;
/// The same where each sends to each, which takes two machines a pair.
pub const MOST_RANKS_IN_PAIRS: usize = 256;
/// 16 GiB: a fingerprint counts up to 2^36 elements, and plans multiply by the ranks.
pub const MOST_BYTES: u64 = 16 << 30;
/// A guess; the network has no chance, so repetitions after the second one hardly differ.
pub const MOST_REPETITIONS: u32 = 1000;
/// Bytes that all ranks send in all repetitions, 1 TiB: a minute of processor time and more.
pub const MOST_WORK_BYTES: u64 = 1 << 40;
/// Messages of all ranks in all repetitions: a quarter of an hour. A ring all-reduce of 1024 ranks has two millions.
pub const MOST_MESSAGES: u64 = 64 << 20;
/// 1 Mbit/s to 10 Tbit/s, in bytes a second: what ranks may have between them, and what nanoseconds can tell apart.
const RATES: std::ops::RangeInclusive<u64> = 125_000..=1_250_000_000_000;
/// A second: more than the way to a satellite and back.
const MOST_DELAY: u64 = SECOND;
/// 30 days of virtual time: no rank takes another for lost, and no time-out ends a call, however slow the network is.
const PATIENCE: u64 = 30 * 24 * 3600 * SECOND;
const ELEMENT_BYTES: u64 = 4;
