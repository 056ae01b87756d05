//! Whole jobs in virtual time: the shipped machines, seeded faults, every result checked bit by bit.
//!
//! A seed draws a [`Scenario`] (workers, tree, window, loss, delays, faults); the same scenario runs the same way on
//! every machine. Faults are bound to packets ("when the n-th packet arrives, aggregator 1 restarts"), so that they can be
//! put at every packet of a run.
//!
//! A worker is what a rank is: the shipped [`Core`](penstock_aggregation::client::Core) cuts its tensors into blocks, agrees on
//! exponents, decides which block is posted next and when an operation has ended, and says where a fallback begins. The simulator
//! plays what is not in the machines: callers with their tensors, the ranks' all-reduces among themselves after a server is lost,
//! and a control plane that opens the next epoch without a worker that died.
//!
//! The network is a tree of switches ([`crate::network`]). Each aggregator stands at a switch of its own, which is joined to the
//! switch of the aggregator above, and at last to the servers' switch. Workers are joined to the switch of the aggregator above
//! them. So a packet that bypasses an aggregator passes its switch all the same.

use crate::random::Random;
use penstock_aggregation::{HEADER_BYTES, MAX_PAYLOAD_BYTES, MAX_WORKERS};
use penstock_types::{MILLISECOND, SECOND};
use world::World;

mod cluster;
mod tensors;
mod trees;
mod world;

pub use penstock_aggregation::{Timing, Tree};
pub use trees::{Shape, any_tree};

/// A fault that happens when the n-th packet arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An aggregator loses everything and is back after some milliseconds.
    Restart {
        /// The number of the aggregator that restarts.
        aggregator: usize,
        /// How long packets to it are lost, in nanoseconds.
        down: u64,
    },
    /// An aggregator is gone for good.
    Die {
        /// The number of the aggregator that dies.
        aggregator: usize,
    },
    /// From now on everything between a worker and the aggregator above it is lost.
    Cut {
        /// The index of the job that the worker belongs to.
        job: usize,
        /// The number of the worker that is cut off.
        worker: usize,
    },
    /// A worker is gone; a while later the job's next epoch begins without it.
    Kill {
        /// The index of the job that the worker belongs to.
        job: usize,
        /// The number of the worker that dies.
        worker: usize,
    },
    /// A job's server is gone for good: its workers end among themselves what all of them have submitted.
    LoseServer {
        /// The index of the job whose server dies.
        job: usize,
    },
}

/// Servers that work on whole buffers before there is a result.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// The most blocks that a server holds.
    pub limit: u32,
    /// The longest time that the work behind a buffer takes, in nanoseconds.
    pub longest: u64,
    /// A quarter of the buffers fail.
    pub fails: bool,
}

/// A complete description of a run.
///
/// More than 16 fields: each is one parameter of `penstock simulate`, and the seed draws each by itself.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Decides everything that the other fields leave open.
    pub seed: u64,
    /// Jobs; they share the aggregators.
    pub jobs: usize,
    /// Workers a job, 1 to 4096.
    pub workers: usize,
    /// The tree of every job: which node sends to which. An aggregator's address is its number. Trees may be of any depth.
    pub tree: Tree,
    /// Shards of each aggregator, a power of two: SeqNum s goes to shard s modulo this.
    pub shards: u32,
    /// Blocks of a worker's tensors in each epoch, of all operations together. Headers and exponents travel besides.
    pub blocks: u32,
    /// How many blocks an operation's tensor has; the last one has the rest. 0: one operation has all blocks.
    pub operation: u32,
    /// How many operations a worker has submitted at a time, 1 or more; it submits another one when one has ended.
    pub queued: u32,
    /// How long a worker computes after an operation has ended, before it submits another one, in nanoseconds.
    pub pause: u64,
    /// Bytes of elements in a full block, a multiple of 64. On a link a full block is as long as the largest one
    /// ([`MAX_PAYLOAD_BYTES`]) all the same, and shorter ones in proportion: short blocks make fast simulations, with more
    /// packets of exponents.
    pub payload_bytes: usize,
    /// SeqNums in flight, a power of two.
    pub window: u32,
    /// Blocks travel as floats, added in the order of the tree, instead of as integers.
    pub floats: bool,
    /// All elements are finite. Otherwise a worker's block in sixteen has an infinity or a NaN.
    pub finite: bool,
    /// Packets carry a MAC; damaged copies of packets then arrive as well.
    pub keyed: bool,
    /// Probability that a link loses a packet. The servers' own links lose none.
    pub loss: f64,
    /// Only packets to and from workers are lost, not those between aggregators and servers.
    pub edge_loss: bool,
    /// Probability that a link duplicates a packet.
    pub duplicate: f64,
    /// Shortest time on a link, in nanoseconds. The servers' own links take none.
    pub delay: u64,
    /// Upper bound of a random addition to `delay`; packets overtake each other.
    pub jitter: u64,
    /// What each link carries each way, in bytes a second; 0 is no limit.
    pub rate: u64,
    /// How many bytes may wait at each port of a switch; packets beyond are dropped. 0 is no limit. A node's own socket blocks
    /// its sender instead.
    pub queue: u64,
    /// The workers' time-outs; the server's heartbeats follow them.
    pub timing: Timing,
    /// A link between switches carries as much as the links of all workers below it, and a server's as much as 64 of them: a network
    /// that is not oversubscribed. Otherwise each carries `rate`.
    pub is_fat: bool,
    /// Where blocks travel as integers, a third of the aggregators behave as switches: they add no floats, and have no way past a
    /// parent that is bypassed.
    pub switches: bool,
    /// Results come apart from the blocks, and servers work on what they hold. `None`: a block's result is its sum, at once.
    pub held: Option<Held>,
    /// Faults, by number of the arriving packet.
    pub faults: Vec<(u64, Fault)>,
    /// Whether to keep the last lines of what happened.
    pub trace: bool,
}

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The first wrong, duplicate or missing result.
    pub failure: Option<String>,
    /// Packets that nodes sent.
    pub packets: u64,
    /// Packets and duplicates that links lost.
    pub lost: u64,
    /// Packets and duplicates for which a port had no room.
    pub dropped: u64,
    /// Packets that arrived (their numbers are what faults are bound to).
    pub arrived: u64,
    /// Blocks whose results workers got, all checked.
    pub results: u64,
    /// Of these, blocks of operations that a job's workers ended among themselves after its server was lost.
    pub fallen: u64,
    /// Operations that failed on a worker because the work behind them failed.
    pub failed: u64,
    /// How long it took in virtual time, in nanoseconds.
    pub time: u64,
    /// The last lines of what happened.
    pub trace: Vec<String>,
}

/// Fields of a scenario that a caller fixes; the seed draws the others.
///
/// More than 16 fields: it has those of [`Scenario`].
#[derive(Clone, Debug, Default)]
pub struct Fixed {
    /// [`Scenario::jobs`], 1 to 16.
    pub jobs: Option<usize>,
    /// [`Scenario::workers`], 1 to 4096.
    pub workers: Option<usize>,
    /// The shape of [`Scenario::tree`].
    pub shape: Option<Shape>,
    /// [`Scenario::tree`] itself, and with it [`Scenario::workers`].
    pub tree: Option<Tree>,
    /// [`Scenario::blocks`], 1 to 100,000.
    pub blocks: Option<u32>,
    /// [`Scenario::shards`], a power of two up to 64.
    pub shards: Option<u32>,
    /// [`Scenario::operation`].
    pub operation: Option<u32>,
    /// [`Scenario::queued`], 1 to 64.
    pub queued: Option<u32>,
    /// [`Scenario::payload_bytes`], a multiple of 64, [`SHORT_BLOCK_BYTES`] if not fixed.
    pub payload_bytes: Option<usize>,
    /// [`Scenario::window`], a power of two up to 1024.
    pub window: Option<u32>,
    /// [`Scenario::floats`].
    pub floats: Option<bool>,
    /// [`Scenario::finite`], which is never drawn.
    pub finite: bool,
    /// [`Scenario::keyed`].
    pub keyed: Option<bool>,
    /// [`Scenario::loss`], at most 0.5.
    pub loss: Option<f64>,
    /// [`Scenario::edge_loss`], which is never drawn.
    pub edge_loss: bool,
    /// [`Scenario::duplicate`], at most 0.5.
    pub duplicate: Option<f64>,
    /// [`Scenario::delay`], at most a second.
    pub delay: Option<u64>,
    /// [`Scenario::jitter`], at most a second.
    pub jitter: Option<u64>,
    /// [`Scenario::rate`], 0 or a hundredth of a [`GIGABIT`] to a thousand of them: below, time-outs are too short.
    pub rate: Option<u64>,
    /// [`Scenario::queue`], 0 or what holds a block, to 2^30.
    pub queue: Option<u64>,
    /// [`Scenario::timing`], [`IMPATIENT`] if not fixed.
    pub timing: Option<Timing>,
    /// [`Scenario::is_fat`], which is never drawn.
    pub is_fat: bool,
    /// The opposite of [`Scenario::switches`], which is never drawn.
    pub no_switches: bool,
    /// No restarts, deaths, cuts and lost servers.
    pub no_faults: bool,
}

impl Fixed {
    /// Says which field is out of bounds.
    pub fn check(&self) -> Result<(), String> {
        let within = |name: &str, value: Option<u64>, least: u64, most: u64| match value {
            Some(value) if !(least..=most).contains(&value) => {
                Err(format!("{name} is {value}; {least} to {most} are possible"))
            }
            _ => Ok(()),
        };
        within("jobs", self.jobs.map(|n| n as u64), 1, 16)?;
        within("workers", self.workers.map(|n| n as u64), 1, MAX_WORKERS as u64)?;
        within("blocks", self.blocks.map(u64::from), 1, 100_000)?;
        within("queued", self.queued.map(u64::from), 1, 64)?;
        within("payload in bytes", self.payload_bytes.map(|n| n as u64), 64, MAX_PAYLOAD_BYTES as u64)?;
        if let Some(bytes) = self.payload_bytes.filter(|bytes| !bytes.is_multiple_of(64)) {
            return Err(format!("payload in bytes is {bytes}; it must be a multiple of 64"));
        }
        within("window", self.window.map(u64::from), 1, 1024)?;
        within("delay in ns", self.delay, 0, SECOND)?;
        within("jitter in ns", self.jitter, 0, SECOND)?;
        // 0 is no limit.
        let megabits = self.rate.filter(|rate| *rate != 0).map(|rate| rate / (GIGABIT / 1000));
        within("rate in Mbit/s", megabits, 10, 1_000_000)?;
        within("queue in bytes", self.queue.filter(|queue| *queue != 0), FULL_BYTES, 1 << 30)?;
        within("shards", self.shards.map(u64::from), 1, 64)?;
        for (name, value) in [("window", self.window), ("shards", self.shards)] {
            if let Some(value) = value.filter(|value| !value.is_power_of_two()) {
                return Err(format!("{name} is {value}; it must be a power of two"));
            }
        }
        for (name, value) in [("loss", self.loss), ("duplicate", self.duplicate)] {
            if let Some(value) = value.filter(|value| !(0.0..=0.5).contains(value)) {
                return Err(format!("{name} is {value}; 0 to 0.5 are possible"));
            }
        }
        Ok(())
    }
}

impl Scenario {
    /// The scenario of a seed.
    #[must_use]
    pub fn draw(seed: u64) -> Scenario {
        Scenario::draw_with(seed, &Fixed::default())
    }

    /// The scenario of a seed, but for what is fixed.
    #[must_use]
    pub fn draw_with(seed: u64, fixed: &Fixed) -> Scenario {
        let mut random = Random::new(seed ^ 0x5ca1_ab1e);
        let shape = random.pick(&[Shape::Direct, Shape::Star, Shape::Star, Shape::Racks, Shape::Core]);
        let workers = 2 + random.below(7) as usize;
        let jobs = random.pick(&[1, 1, 2, 3]);
        let mut scenario = Scenario {
            seed,
            jobs,
            workers,
            tree: shape.tree(workers),
            // Drawn from a generator of its own, as below: a seed's older draws stay what they were before there were shards.
            shards: Random::new(seed ^ 0x005b_a2d5).pick(&[1, 1, 2, 4]),
            blocks: 4 + random.below(29) as u32,
            operation: Random::new(seed ^ 0x0be4_a710).pick(&[0, 0, 3, 8]),
            queued: Random::new(seed ^ 0xa4ea_d000).pick(&[1, 1, 2, 4]),
            pause: 0,
            payload_bytes: fixed.payload_bytes.unwrap_or(SHORT_BLOCK_BYTES),
            window: random.pick(&[1, 2, 4, 8, 16]),
            floats: random.below(3) == 0,
            finite: fixed.finite,
            keyed: random.below(2) == 0,
            loss: random.pick(&[0.0, 0.01, 0.05, 0.2]),
            edge_loss: fixed.edge_loss,
            duplicate: random.pick(&[0.0, 0.02, 0.2]),
            delay: random.pick(&[10, 100, 1000]) * 1000,
            jitter: random.pick(&[0, 50, 5000]) * 1000,
            rate: random.pick(&[0, GIGABIT / 10, GIGABIT]),
            queue: Random::new(seed ^ 0x0fee_dcab).pick(&[0, 0, 64 << 10, 256 << 10]),
            timing: fixed.timing.unwrap_or(IMPATIENT),
            is_fat: fixed.is_fat,
            switches: !fixed.no_switches,
            held: None,
            faults: Vec::new(),
            trace: false,
        };
        scenario.jobs = fixed.jobs.unwrap_or(jobs);
        scenario.workers = fixed.workers.unwrap_or(workers);
        scenario.tree = fixed.shape.unwrap_or(shape).tree(scenario.workers);
        if let Some(tree) = &fixed.tree {
            scenario.workers = tree.workers().len();
            scenario.tree = tree.clone();
        }
        scenario.blocks = fixed.blocks.unwrap_or(scenario.blocks);
        scenario.shards = fixed.shards.unwrap_or(scenario.shards);
        scenario.operation = fixed.operation.unwrap_or(scenario.operation);
        scenario.queued = fixed.queued.unwrap_or(scenario.queued);
        scenario.window = fixed.window.unwrap_or(scenario.window);
        scenario.floats = fixed.floats.unwrap_or(scenario.floats);
        scenario.keyed = fixed.keyed.unwrap_or(scenario.keyed);
        scenario.loss = fixed.loss.unwrap_or(scenario.loss);
        scenario.duplicate = fixed.duplicate.unwrap_or(scenario.duplicate);
        scenario.delay = fixed.delay.unwrap_or(scenario.delay);
        scenario.jitter = fixed.jitter.unwrap_or(scenario.jitter);
        scenario.rate = fixed.rate.unwrap_or(scenario.rate);
        scenario.queue = fixed.queue.unwrap_or(scenario.queue);
        // About so many packets a fault-free run has.
        let span = u64::from(scenario.blocks) * (scenario.workers * scenario.jobs * 3) as u64;
        let faults = if fixed.no_faults { 0 } else { random.below(4) };
        for _ in 0..faults {
            let fault = scenario.draw_fault(&mut random);
            scenario.faults.push((random.below(span), fault));
        }
        let mut random = Random::new(seed ^ 0x5e4e_4105);
        if !fixed.no_faults && random.below(8) == 0 {
            let job = random.below(scenario.jobs as u64) as usize;
            scenario.faults.push((random.below(span), Fault::LoseServer { job }));
        }
        scenario
    }

    fn draw_fault(&self, random: &mut Random) -> Fault {
        let (job, worker) = (random.below(self.jobs as u64) as usize, random.below(self.workers as u64) as usize);
        let aggregator = random.below(self.aggregators().max(1) as u64) as usize;
        match random.below(5) {
            0 if self.workers > 2 => Fault::Kill { job, worker },
            1 if self.aggregators() > 0 => Fault::Die { aggregator },
            2 if self.aggregators() > 0 => Fault::Cut { job, worker },
            _ => Fault::Restart { aggregator, down: random.below(20) * MILLISECOND },
        }
    }

    /// Says why there is no such job.
    ///
    /// # Errors
    /// The tree is invalid, or its workers are not those of the job.
    pub fn check(&self) -> Result<(), String> {
        self.tree.check().map_err(|error| error.to_string())?;
        let mut workers = self.tree.workers();
        workers.sort_unstable();
        if !workers.iter().copied().map(usize::from).eq(0..self.workers) {
            return Err(format!("the tree has workers {workers:?}, and the job {}: number them from 0", self.workers));
        }
        let mut numbers = trees::aggregators(&self.tree);
        numbers.sort_unstable();
        if !(64..=MAX_PAYLOAD_BYTES).contains(&self.payload_bytes) || !self.payload_bytes.is_multiple_of(64) {
            let bytes = self.payload_bytes;
            return Err(format!("blocks of {bytes} bytes: a multiple of 64 up to {MAX_PAYLOAD_BYTES} is possible"));
        }
        if self.blocks == 0 || self.queued == 0 {
            return Err("a worker has one block at least, and submits one operation at least".to_owned());
        }
        match numbers.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(format!("aggregator {} stands twice in the tree: give each a number", pair[0])),
            None if numbers.last().is_some_and(|last| *last >= MAX_AGGREGATORS) => {
                Err(format!("an aggregator has a number of {MAX_AGGREGATORS} or more: number them from 0"))
            }
            None => Ok(()),
        }
    }

    /// Aggregators have numbers below this.
    fn aggregators(&self) -> usize {
        trees::aggregators(&self.tree).into_iter().max().map_or(0, |last| last as usize + 1)
    }

    /// Runs it. A scenario that [`Scenario::check`] refuses fails at once.
    #[must_use]
    pub fn run(&self) -> Outcome {
        if let Err(failure) = self.check() {
            return Outcome { failure: Some(failure), ..Outcome::default() };
        }
        let mut world = World::new(self);
        let failure = world.run().err();
        world.outcome(failure)
    }
}

/// [`Timing`] in which dead paths are noticed sooner, so that many runs fit into a second; round trips of 0.04 to 25 ms.
pub const IMPATIENT: Timing = Timing {
    rto_first: 20 * MILLISECOND,
    rto_min: 2 * MILLISECOND,
    rto_max: 100 * MILLISECOND,
    heartbeat_every: 5 * MILLISECOND,
    idle_every: 15 * MILLISECOND,
    path_dead_after: 60 * MILLISECOND,
    stall_after: 150 * MILLISECOND,
    server_dead_after: SECOND,
};
/// Sixteen elements of 32 bits in a block, for many runs in a second: what is checked does not depend on the length.
pub const SHORT_BLOCK_BYTES: usize = 64;
/// A link's rate, in bytes a second.
pub const GIGABIT: u64 = 125_000_000;
/// Bytes of a full block on a link: payload, header, UDP, IPv4, Ethernet with preamble and gap.
const FULL_BYTES: u64 = MAX_PAYLOAD_BYTES as u64 + BARE_BYTES;
/// The same without a block.
const BARE_BYTES: u64 = HEADER_BYTES as u64 + 8 + 20 + 38;
/// What a node's socket holds before it would block: two trains of segments. More would delay what is sent again.
const SOCKET_BUFFER: u64 = 128 << 10;
/// Virtual time after the last commit after which a run counts as stuck: twice the longest time for which a path is not trusted. (Not the
/// time of the whole run: a window of one with a fifth of all packets lost on each of six links takes four seconds a block.)
const LIMIT: u64 = 120 * SECOND;
/// Aggregators have numbers below this: a tree of 4096 workers in which every aggregator has two children has 4095.
const MAX_AGGREGATORS: u32 = 4096;
/// How many lines of the trace are kept.
const TRACE_LINES: usize = 2000;

#[cfg(test)]
#[path = "aggregation_tests.rs"]
mod tests;
