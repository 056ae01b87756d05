//! Whole jobs in virtual time: the shipped machines, seeded faults, every result checked bit by bit.
//!
//! A seed draws a [`Scenario`] (workers, tree, window, loss, delays, faults); the same scenario runs the same way on
//! every machine. Faults are bound to packets ("when the n-th packet arrives, aggregator 1 restarts"), so that they can be
//! put at every packet of a run. The simulator plays what is not in the machines: drivers with their tensors, and a
//! control plane that opens the next epoch without a worker that died.

use super::packet::{FLAG_FULL, Format, HEADER_BYTES, Kind, MAX_PAYLOAD_BYTES, decode};
use super::*;
use cluster::Random;
use penstock_types::{MILLISECOND, SECOND, Time};
use std::collections::{BTreeMap, VecDeque};

mod cluster;

/// The shape of a job's tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Workers straight to the server.
    Direct,
    /// One aggregator for all.
    Star,
    /// Two racks with an aggregator each, straight to the server.
    Racks,
    /// Two racks below a core aggregator.
    Core,
}

/// A fault that happens when the n-th packet arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An aggregator loses everything and is back after some milliseconds.
    Restart {
        /// Which.
        aggregator: usize,
        /// How long packets to it are lost, in nanoseconds.
        down: u64,
    },
    /// An aggregator is gone for good.
    Die {
        /// Which.
        aggregator: usize,
    },
    /// From now on everything between a worker and the aggregator above it is lost.
    Cut {
        /// The job's index.
        job: usize,
        /// The worker's number.
        worker: usize,
    },
    /// A worker is gone; a while later the job's next epoch begins without it.
    Kill {
        /// The job's index.
        job: usize,
        /// The worker's number.
        worker: usize,
    },
}

/// A complete description of a run.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Decides everything that the other fields leave open.
    pub seed: u64,
    /// Jobs; they share the aggregators.
    pub jobs: usize,
    /// Workers a job, 1 to 64.
    pub workers: usize,
    /// Who sends to whom.
    pub shape: Shape,
    /// Shards of each aggregator, a power of two: SeqNum s goes to shard s modulo this.
    pub shards: u32,
    /// Blocks a worker pushes in each epoch.
    pub blocks: u32,
    /// How many blocks make an operation; the next one begins when all workers have all its results. 0: all blocks are one.
    pub operation: u32,
    /// How many blocks at the head of an operation, such as its header and exponents, must have results before the others are
    /// pushed.
    pub ahead: u32,
    /// SeqNums in flight, a power of two.
    pub window: u32,
    /// Blocks are floats, added in the order of the tree, instead of integers.
    pub floats: bool,
    /// Packets carry a MAC; damaged copies of packets then arrive as well.
    pub keyed: bool,
    /// Probability that a packet is lost.
    pub loss: f64,
    /// Only packets to and from workers are lost, not those between aggregators and servers.
    pub edge_loss: bool,
    /// Probability that a packet arrives twice.
    pub duplicate: f64,
    /// Shortest time on the way, in nanoseconds.
    pub delay: u64,
    /// Upper bound of a random addition to `delay`; packets overtake each other.
    pub jitter: u64,
    /// What each link carries each way, in bytes a second; 0 is no limit. A worker and the server have one link; an
    /// aggregator is a switch with a port for each. A packet takes as long as one with a full block, or as a bare header,
    /// whatever its elements are.
    pub rate: u64,
    /// How many bytes may wait at each port of a switch; packets beyond are lost. 0 is no limit. A node's own socket blocks
    /// its sender instead.
    pub queue: u64,
    /// The workers' time-outs; the server's heartbeats follow them.
    pub timing: Timing,
    /// Faults, by number of the arriving packet.
    pub faults: Vec<(u64, Fault)>,
    /// Whether to keep the last lines of what happened.
    pub trace: bool,
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The first wrong, duplicate or missing result.
    pub failure: Option<String>,
    /// Packets that were sent.
    pub packets: u64,
    /// Those that were lost on the way.
    pub lost: u64,
    /// Those for which a port had no room.
    pub dropped: u64,
    /// Packets that arrived (their numbers are what faults are bound to).
    pub arrived: u64,
    /// Results that workers got, all checked.
    pub results: u64,
    /// How long it took in virtual time, in nanoseconds.
    pub time: u64,
    /// The last lines of what happened.
    pub trace: Vec<String>,
}

/// Fields of a scenario that a caller fixes; the seed draws the others.
#[derive(Clone, Debug, Default)]
pub struct Fixed {
    /// [`Scenario::jobs`], 1 to 16.
    pub jobs: Option<usize>,
    /// [`Scenario::workers`], 1 to 64.
    pub workers: Option<usize>,
    /// [`Scenario::shape`].
    pub shape: Option<Shape>,
    /// [`Scenario::blocks`], 1 to 100,000.
    pub blocks: Option<u32>,
    /// [`Scenario::shards`], a power of two up to 64.
    pub shards: Option<u32>,
    /// [`Scenario::operation`].
    pub operation: Option<u32>,
    /// [`Scenario::ahead`].
    pub ahead: Option<u32>,
    /// [`Scenario::window`], a power of two up to 1024.
    pub window: Option<u32>,
    /// [`Scenario::floats`].
    pub floats: Option<bool>,
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
    /// No restarts, deaths and cuts.
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
        within("workers", self.workers.map(|n| n as u64), 1, 64)?;
        within("blocks", self.blocks.map(u64::from), 1, 100_000)?;
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
        let mut random = Random(seed ^ 0x5ca1_ab1e);
        let shape = random.pick(&[Shape::Direct, Shape::Star, Shape::Star, Shape::Racks, Shape::Core]);
        let workers = 2 + random.below(7) as usize;
        let jobs = random.pick(&[1, 1, 2, 3]);
        let mut scenario = Scenario {
            seed,
            jobs,
            workers,
            shape,
            // Drawn from a generator of its own, as below: a seed's older draws stay what they were before there were shards.
            shards: Random(seed ^ 0x005b_a2d5).pick(&[1, 1, 2, 4]),
            blocks: 4 + random.below(29) as u32,
            operation: Random(seed ^ 0x0be4_a710).pick(&[0, 0, 3, 8]),
            ahead: Random(seed ^ 0xa4ea_d000).pick(&[0, 0, 1, 2]),
            window: random.pick(&[1, 2, 4, 8, 16]),
            floats: random.below(3) == 0,
            keyed: random.below(2) == 0,
            loss: random.pick(&[0.0, 0.01, 0.05, 0.2]),
            edge_loss: fixed.edge_loss,
            duplicate: random.pick(&[0.0, 0.02, 0.2]),
            delay: random.pick(&[10, 100, 1000]) * 1000,
            jitter: random.pick(&[0, 50, 5000]) * 1000,
            rate: random.pick(&[0, GIGABIT / 10, GIGABIT]),
            queue: Random(seed ^ 0x0fee_dcab).pick(&[0, 0, 64 << 10, 256 << 10]),
            timing: fixed.timing.unwrap_or(IMPATIENT),
            faults: Vec::new(),
            trace: false,
        };
        scenario.jobs = fixed.jobs.unwrap_or(jobs);
        scenario.workers = fixed.workers.unwrap_or(workers);
        scenario.shape = fixed.shape.unwrap_or(shape);
        scenario.blocks = fixed.blocks.unwrap_or(scenario.blocks);
        scenario.shards = fixed.shards.unwrap_or(scenario.shards);
        scenario.operation = fixed.operation.unwrap_or(scenario.operation);
        scenario.ahead = fixed.ahead.unwrap_or(scenario.ahead);
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

    fn aggregators(&self) -> usize {
        match self.shape {
            Shape::Direct => 0,
            Shape::Star => 1,
            Shape::Racks => 2,
            Shape::Core => 3,
        }
    }

    /// Runs it.
    #[must_use]
    pub fn run(&self) -> Outcome {
        let mut world = World::new(self);
        let failure = world.run().err();
        let World { packets, lost, dropped, arrived, results, now, trace, .. } = world;
        Outcome { failure, packets, lost, dropped, arrived, results, time: now.0, trace: trace.into() }
    }
}

/// A job's state outside of the machines.
struct Epoch {
    number: u16,
    start: Serial,
    alive: u64,
    tree: Tree,
}

struct Driver {
    machine: Worker,
    epoch: u16,
    start: Serial,
    got: Vec<bool>,
    /// No block is posted before this time.
    begins: Time,
    posted: u32,
}

/// Where packets queue for a link.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Port {
    /// A worker's or a server's own.
    Out(Link),
    /// The switch's, towards a worker or a server.
    In(Link),
    /// The first aggregator's, towards the second.
    Between(Link, Link),
}

enum Event {
    Arrive {
        to: Link,
        from: Link,
        /// The shard of an aggregator: its port.
        shard: u32,
        bytes: Vec<u8>,
    },
    /// A packet between workers and servers is at the switch between them.
    Forward {
        to: Link,
        from: Link,
        bytes: Vec<u8>,
    },
    Wake {
        node: Link,
    },
    /// A node moves to the job's newest epoch.
    Open {
        job: usize,
        node: Link,
    },
    /// An aggregator is back, without state.
    Back {
        aggregator: usize,
    },
}

struct World<'a> {
    scenario: &'a Scenario,
    random: Random,
    now: Time,
    events: BTreeMap<(Time, u64), Event>,
    serial: u64,
    /// Shards of each.
    aggregators: Vec<Vec<Aggregator>>,
    /// Until when packets to an aggregator are lost.
    down_until: Vec<Time>,
    /// What each aggregator should have open, by job.
    opened: Vec<Vec<u16>>,
    epochs: Vec<Vec<Epoch>>,
    servers: Vec<Server>,
    server_epochs: Vec<u16>,
    drivers: Vec<Vec<Option<Driver>>>,
    wakes: BTreeMap<Link, Time>,
    /// When each port will have sent what it was given.
    ports: BTreeMap<Port, Time>,
    cut: Vec<(Link, Link)>,
    faults: Vec<(u64, Fault)>,
    packets: u64,
    lost: u64,
    dropped: u64,
    arrived: u64,
    results: u64,
    trace: VecDeque<String>,
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario) -> World<'a> {
        let mut random = Random(scenario.seed);
        let all = if scenario.workers == 64 { u64::MAX } else { (1 << scenario.workers) - 1 };
        let epochs: Vec<Vec<Epoch>> = (0..scenario.jobs).map(|_| vec![scenario.epoch(0, all, &mut random)]).collect();
        let mut world = World {
            aggregators: vec![scenario.aggregator(); scenario.aggregators()],
            down_until: vec![Time(0); scenario.aggregators()],
            opened: vec![vec![0; scenario.jobs]; scenario.aggregators()],
            servers: (0..scenario.jobs).map(|job| scenario.server(Time(0), job, &epochs[job][0])).collect(),
            server_epochs: vec![0; scenario.jobs],
            drivers: (0..scenario.jobs).map(|_| (0..scenario.workers).map(|_| None).collect()).collect(),
            epochs,
            scenario,
            random,
            now: Time(0),
            events: BTreeMap::new(),
            serial: 0,
            wakes: BTreeMap::new(),
            ports: BTreeMap::new(),
            cut: Vec::new(),
            faults: scenario.faults.clone(),
            packets: 0,
            lost: 0,
            dropped: 0,
            arrived: 0,
            results: 0,
            trace: VecDeque::new(),
        };
        world.faults.sort_by_key(|(at, _)| *at);
        for job in 0..scenario.jobs {
            (0..scenario.aggregators()).for_each(|aggregator| world.open_aggregator(aggregator, job));
            (0..scenario.workers).for_each(|worker| world.open_worker(job, worker));
        }
        world
    }

    fn run(&mut self) -> Result<(), String> {
        for job in 0..self.scenario.jobs {
            self.drain_server(job);
            (0..self.scenario.workers).for_each(|worker| self.drain_worker(job, worker));
        }
        while !self.is_complete() {
            let Some(((at, _), event)) = self.events.pop_first() else {
                return Err("nothing is left to happen".into());
            };
            if at > Time(LIMIT) {
                return Err(format!("stuck: {} results after {} s of virtual time", self.results, LIMIT / SECOND));
            }
            self.now = at;
            self.step(event)?;
        }
        Ok(())
    }

    fn is_complete(&self) -> bool {
        (0..self.scenario.jobs).all(|job| {
            let newest = self.epochs[job].last().expect("one at least");
            self.drivers[job].iter().flatten().all(|driver| {
                // An operation ends when a worker knows that all workers have all results.
                let end = driver.start.plus(self.scenario.blocks);
                driver.epoch == newest.number && [driver.machine.received(), driver.machine.everywhere()] == [end; 2]
            })
        })
    }

    fn step(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Wake { node } => {
                self.wakes.remove(&node);
                if let Some((job, worker)) = self.scenario.place(node) {
                    match worker {
                        None => {
                            self.servers[job].handle_timeout(self.now);
                            self.drain_server(job);
                        }
                        Some(worker) => {
                            if let Some(driver) = &mut self.drivers[job][worker] {
                                driver.machine.handle_timeout(self.now);
                            }
                            self.drain_worker(job, worker);
                        }
                    }
                }
                Ok(())
            }
            Event::Open { job, node } => {
                // If two epochs follow each other quickly, the newest one is opened at once, and once: a server that opened it
                // again would have forgotten what it committed.
                let epoch = self.epochs[job].last().expect("one at least");
                match self.scenario.place(node) {
                    None => self.open_aggregator(node.0 as usize, job),
                    Some((_, None)) if self.server_epochs[job] != epoch.number => {
                        self.servers[job] = self.scenario.server(self.now, job, epoch);
                        self.server_epochs[job] = epoch.number;
                        self.drain_server(job);
                    }
                    Some((_, Some(worker))) => {
                        // It may have died in the meantime.
                        if self.drivers[job][worker].as_ref().is_some_and(|driver| driver.epoch != epoch.number) {
                            self.open_worker(job, worker);
                            self.drain_worker(job, worker);
                        }
                    }
                    Some((_, None)) => {}
                }
                self.note(|| format!("{node:?} is in the newest epoch of job {job}"));
                Ok(())
            }
            Event::Back { aggregator } => {
                for job in 0..self.scenario.jobs {
                    let epoch = usize::from(self.opened[aggregator][job]);
                    self.open_epoch(aggregator, job, epoch);
                }
                Ok(())
            }
            Event::Forward { to, from, bytes } => {
                if let Some(at) = self.through(Port::In(to), &bytes) {
                    self.at(at, Event::Arrive { to, from, shard: 0, bytes });
                }
                Ok(())
            }
            Event::Arrive { to, from, shard, bytes } => {
                self.arrived += 1;
                while self.faults.first().is_some_and(|(at, _)| *at < self.arrived) {
                    let (_, fault) = self.faults.remove(0);
                    self.note(|| format!("{fault:?}"));
                    self.fail(fault);
                }
                self.arrive(to, from, shard, &bytes)
            }
        }
    }

    fn arrive(&mut self, to: Link, from: Link, shard: u32, bytes: &[u8]) -> Result<(), String> {
        if self.cut.contains(&(to, from)) || self.cut.contains(&(from, to)) {
            return Ok(());
        }
        match self.scenario.place(to) {
            None => {
                let number = to.0 as usize;
                if self.now < self.down_until[number] {
                    return Ok(());
                }
                let sent: Vec<(Link, Vec<u8>)> =
                    match self.aggregators[number][shard as usize].handle_packet(from, bytes) {
                        Ok(Action::Send { to, header, payload }) => {
                            to.iter().map(|to| (*to, [&header[..], payload].concat())).collect()
                        }
                        Ok(Action::Relay { to }) => to.iter().map(|to| (*to, bytes.to_vec())).collect(),
                        Ok(Action::Nothing) | Err(_) => Vec::new(),
                    };
                sent.into_iter().for_each(|(next, bytes)| self.send(next, to, bytes));
            }
            Some((job, None)) => {
                let _ = self.servers[job].handle_packet(self.now, from, bytes);
                self.drain_server(job);
            }
            Some((job, Some(worker))) => {
                let Some(driver) = &mut self.drivers[job][worker] else {
                    return Ok(());
                };
                if let Ok(Received::Result { seq, format, exponent, payload }) =
                    driver.machine.handle_packet(self.now, from, bytes)
                {
                    let block = seq.ahead_of(driver.start) as u32;
                    let epoch = &self.epochs[job][usize::from(driver.epoch)];
                    if std::mem::replace(&mut driver.got[block as usize], true) {
                        return Err(format!("worker {worker} of job {job} got the result of block {block} twice"));
                    }
                    let expected = self.scenario.expected(job, epoch, block);
                    if (format, exponent, payload) != (expected.0, expected.1, &expected.2[..]) {
                        return Err(format!(
                            "worker {worker} of job {job} got for block {block} of epoch {}: {format:?} {exponent} \
                             {payload:02x?} instead of {expected:02x?}",
                            epoch.number
                        ));
                    }
                    self.results += 1;
                }
                self.drain_worker(job, worker);
            }
        }
        Ok(())
    }

    fn fail(&mut self, fault: Fault) {
        match fault {
            Fault::Restart { aggregator, down } if aggregator < self.aggregators.len() => {
                self.aggregators[aggregator] = self.scenario.aggregator();
                let back = self.now.plus(down);
                self.down_until[aggregator] = self.down_until[aggregator].max(back);
                self.at(back, Event::Back { aggregator });
            }
            Fault::Die { aggregator } if aggregator < self.aggregators.len() => {
                self.down_until[aggregator] = Time(u64::MAX);
            }
            Fault::Cut { job, worker } => {
                if let Some(above) = self.scenario.parent(job, worker, self.epochs[job].last().expect("one at least")) {
                    self.cut.push((self.scenario.worker_link(job, worker), above));
                }
            }
            Fault::Kill { job, worker } => {
                let before = self.epochs[job].last().expect("one at least");
                let alive = before.alive & !(1 << worker);
                if alive == 0 || alive == before.alive {
                    return;
                }
                let next = self.scenario.epoch(before.number + 1, alive, &mut self.random);
                self.epochs[job].push(next);
                self.drivers[job][worker] = None;
                // The control plane notices, and tells every node; the nodes hear of it one by one.
                let mut nodes: Vec<Link> = (0..self.aggregators.len()).map(|number| Link(number as u32)).collect();
                nodes.push(self.scenario.server_link(job));
                nodes.extend((0..self.scenario.workers).map(|worker| self.scenario.worker_link(job, worker)));
                for node in nodes {
                    let at = self.now.plus(10 * MILLISECOND + self.random.below(20 * MILLISECOND));
                    self.at(at, Event::Open { job, node });
                }
            }
            Fault::Restart { .. } | Fault::Die { .. } => {}
        }
    }

    fn open_aggregator(&mut self, aggregator: usize, job: usize) {
        let newest = self.epochs[job].len() - 1;
        self.opened[aggregator][job] = newest as u16;
        self.open_epoch(aggregator, job, newest);
    }

    fn open_epoch(&mut self, aggregator: usize, job: usize, epoch: usize) {
        let config = self.scenario.job(aggregator, job, &self.epochs[job][epoch]);
        for shard in &mut self.aggregators[aggregator] {
            match &config {
                Some(config) => shard.open(config.clone()).expect("there is room"),
                None => shard.close(job as u32),
            }
        }
    }

    fn open_worker(&mut self, job: usize, worker: usize) {
        let epoch = self.epochs[job].last().expect("one at least");
        let begins = self.now.plus(self.random.below(3) * self.random.below(2 * MILLISECOND));
        let server = self.scenario.server_link(job);
        let config = WorkerConfig {
            job: job as u32,
            epoch: epoch.number,
            key: self.scenario.key(job, epoch),
            worker: worker as u8,
            window: self.scenario.window,
            start: epoch.start,
            parent: self.scenario.parent(job, worker, epoch).unwrap_or(server),
            server,
            ask_parent: true,
            timing: self.scenario.timing,
        };
        self.drivers[job][worker] = Some(Driver {
            machine: Worker::new(self.now, config),
            epoch: epoch.number,
            start: epoch.start,
            got: vec![false; self.scenario.blocks as usize],
            begins,
            posted: 0,
        });
        self.at(begins, Event::Wake { node: self.scenario.worker_link(job, worker) });
    }

    fn drain_worker(&mut self, job: usize, worker: usize) {
        let Some(driver) = &mut self.drivers[job][worker] else {
            return;
        };
        let Scenario { operation, ahead, blocks, .. } = *self.scenario;
        while self.now >= driver.begins && driver.posted < blocks {
            let (posted, machine) = (driver.start.plus(driver.posted), &driver.machine);
            let of_operation = driver.posted.checked_rem(operation).unwrap_or(driver.posted);
            if (of_operation == ahead && machine.received() != posted)
                || (of_operation == 0 && machine.everywhere() != posted)
            {
                break;
            }
            let full = self.scenario.is_full(job, driver.posted);
            if driver.machine.post(if full { Route::Full } else { Route::Tree }).is_none() {
                break;
            }
            driver.posted += 1;
        }
        let node = self.scenario.worker_link(job, worker);
        while self.room(node) <= self.now {
            let Some((to, bytes)) = self.next_of(job, worker) else {
                break;
            };
            self.send(to, node, bytes);
        }
        let Some(driver) = &self.drivers[job][worker] else {
            return;
        };
        let room = self.room(node);
        let wake = driver.machine.poll_timeout();
        self.wake(node, if room > self.now { room.min(wake) } else { wake });
    }

    /// The packet that a worker sends next.
    fn next_of(&mut self, job: usize, worker: usize) -> Option<(Link, Vec<u8>)> {
        let driver = self.drivers[job][worker].as_mut()?;
        let Outbound { to, header } = driver.machine.poll_transmit(self.now)?;
        if header.kind != Kind::Push {
            return Some((to, driver.machine.seal(&header, Format::None, 0, &[]).to_vec()));
        }
        let epoch = &self.epochs[job][usize::from(driver.epoch)];
        let block = header.seq.ahead_of(driver.start) as u32;
        let (format, exponent, bytes) = self.scenario.block(job, epoch, worker, block);
        Some((to, [&driver.machine.seal(&header, format, exponent, &bytes)[..], &bytes].concat()))
    }

    fn drain_server(&mut self, job: usize) {
        let node = self.scenario.server_link(job);
        while self.room(node) <= self.now {
            let Some(Transmit { to, header, payload }) = self.servers[job].poll_transmit() else {
                break;
            };
            let bytes = [&header[..], payload].concat();
            self.send(to, node, bytes);
        }
        let (room, wake) = (self.room(node), self.servers[job].poll_timeout());
        self.wake(node, if room > self.now { room.min(wake) } else { wake });
    }

    /// When a node's socket has room for another packet.
    fn room(&self, node: Link) -> Time {
        if self.scenario.rate == 0 {
            return self.now;
        }
        let busy = self.ports.get(&Port::Out(node)).copied().unwrap_or(self.now);
        Time(busy.0.saturating_sub(SOCKET_BUFFER * SECOND / self.scenario.rate))
    }

    /// When a packet has passed a port; `None` if the port has no room for it.
    fn through(&mut self, port: Port, bytes: &[u8]) -> Option<Time> {
        let Scenario { rate, queue, .. } = *self.scenario;
        if rate == 0 {
            return Some(self.now);
        }
        let length = if bytes.len() > HEADER_BYTES { FULL_BYTES } else { BARE_BYTES };
        let free = self.ports.entry(port).or_insert(self.now);
        let begins = (*free).max(self.now);
        let waits = u128::from(begins.since(self.now)) * u128::from(rate) / u128::from(SECOND);
        if queue != 0 && !matches!(port, Port::Out(_)) && waits as u64 + length > queue {
            self.dropped += 1;
            return None;
        }
        *free = begins.plus(length * SECOND / rate);
        Some(*free)
    }

    fn send(&mut self, to: Link, from: Link, bytes: Vec<u8>) {
        self.packets += 1;
        let is_end = |node: Link| self.scenario.place(node).is_some();
        let is_worker = |node: Link| self.scenario.place(node).is_some_and(|(_, worker)| worker.is_some());
        let may_lose = !self.scenario.edge_loss || is_worker(from) || is_worker(to);
        let lost = self.random.chance(if may_lose { self.scenario.loss } else { 0.0 });
        let copies = if lost { 0 } else { 1 + usize::from(self.random.chance(self.scenario.duplicate)) };
        self.lost += u64::from(lost);
        if self.scenario.trace {
            let header = decode(&bytes).map(|packet| packet.header);
            let line = match header {
                Ok(h) => format!(
                    "{from:?} -> {to:?} {:?} job {} epoch {} seq {} ack {} credit {} workers {:b}{}{}",
                    h.kind,
                    h.job,
                    h.epoch,
                    h.seq,
                    h.ack,
                    h.credit,
                    h.workers,
                    if h.flags & FLAG_FULL != 0 { " full" } else { "" },
                    ["  LOST", "", "  TWICE"][copies],
                ),
                Err(error) => format!("{from:?} -> {to:?} {error}"),
            };
            self.note(|| line);
        }
        let (port, ends) = match (is_end(from), is_end(to)) {
            (true, ends) => (Port::Out(from), ends),
            (false, true) => (Port::In(to), false),
            (false, false) => (Port::Between(from, to), false),
        };
        let shard = match decode(&bytes) {
            Ok(packet) if !is_end(to) => packet.header.seq.0 % self.scenario.shards,
            _ => 0,
        };
        let Some(left) = self.through(port, &bytes) else {
            self.note(|| "  DROPPED".into());
            return;
        };
        for _ in 0..copies {
            let at = left.plus(self.scenario.delay + self.random.below(self.scenario.jitter + 1));
            let bytes = bytes.clone();
            self.at(
                at,
                if ends { Event::Forward { to, from, bytes } } else { Event::Arrive { to, from, shard, bytes } },
            );
        }
        if self.scenario.keyed && self.random.below(64) == 0 {
            // Damage, or an unauthenticated peer: a bit is flipped.
            let mut bytes = bytes;
            let bit = self.random.below(bytes.len() as u64 * 8) as usize;
            bytes[bit / 8] ^= 1 << (bit % 8);
            let at = self.now.plus(self.scenario.delay);
            self.at(at, Event::Arrive { to, from, shard, bytes });
        }
    }

    fn wake(&mut self, node: Link, at: Time) {
        let at = at.max(Time(self.now.0 + 1));
        if self.wakes.get(&node).is_none_or(|scheduled| at < *scheduled) {
            self.wakes.insert(node, at);
            self.at(at, Event::Wake { node });
        }
    }

    fn at(&mut self, at: Time, event: Event) {
        self.serial += 1;
        self.events.insert((at, self.serial), event);
    }

    fn note(&mut self, line: impl FnOnce() -> String) {
        if self.scenario.trace {
            if self.trace.len() == TRACE_LINES {
                self.trace.pop_front();
            }
            let line = format!("{:>10.3} ms  {}", self.now.0 as f64 / MILLISECOND as f64, line());
            self.trace.push_back(line);
        }
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
/// A link's rate, in bytes a second.
pub const GIGABIT: u64 = 125_000_000;
/// Bytes of a full block on a link: payload, header, UDP, IPv4, Ethernet with preamble and gap.
const FULL_BYTES: u64 = MAX_PAYLOAD_BYTES as u64 + BARE_BYTES;
/// The same without a block.
const BARE_BYTES: u64 = HEADER_BYTES as u64 + 8 + 20 + 38;
/// What a node's socket holds before it would block: two trains of segments. More would delay what is sent again.
const SOCKET_BUFFER: u64 = 128 << 10;
/// Virtual time after which a run counts as stuck: twice the longest time for which a path is not trusted.
const LIMIT: u64 = 120 * SECOND;
/// How many lines of the trace are kept.
const TRACE_LINES: usize = 2000;

#[cfg(test)]
#[path = "simulate_tests.rs"]
mod tests;
