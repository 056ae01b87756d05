//! Around the circle of SeqNums, again and again.
//!
//! 2^32 blocks are too many for a test, so the circle is small here: whatever a machine keeps of a SeqNum for longer than half of it shows
//! as a wrong result or as a job that stands still. Two workers, an aggregator below another one, a server; what happens is drawn.

use crate::serial::use_circle_of;
use crate::*;
use fastrand::Rng;
use penstock_testing::on_all_cores;
use penstock_types::Time;
use std::collections::{BTreeSet, VecDeque};

const WORKERS: [Endpoint; 2] = [Endpoint(0), Endpoint(1)];
/// The aggregator above worker 0.
const RACK: Endpoint = Endpoint(2);
/// The one above that and above worker 1.
const ROW: Endpoint = Endpoint(3);
const SERVER: Endpoint = Endpoint(4);
const NOW: Time = Time(0);
const WINDOW: u32 = 4;
/// The circle has 2^9 numbers.
const BITS: u32 = 9;
const CIRCLE: u64 = 1 << BITS;
/// A packet arrives before so many more blocks are committed, or never: well within half of the circle.
const LIFE: u64 = CIRCLE / 4;
/// Where RACK is a switch, one block in so many travels FULL: a slot of the table in which the server adds such blocks rests for more
/// than half of the circle.
const FULL_EVERY: u64 = 400;
/// A job that stands still for so many steps does so for good.
const PATIENCE: u32 = 100_000;

struct Flying {
    to: Endpoint,
    from: Endpoint,
    /// How many blocks were committed when it left.
    at: u64,
    bytes: Vec<u8>,
}

struct Walk {
    seed: u64,
    rng: Rng,
    has_switch: bool,
    workers: [Worker; 2],
    /// How many blocks each worker has posted, and of how many it has all results.
    posted: [u64; 2],
    done: [u64; 2],
    /// Results beyond those.
    early: [BTreeSet<u64>; 2],
    aggregators: [Aggregator; 2],
    server: Server,
    committed: u64,
    flying: VecDeque<Flying>,
    /// Nothing passes to and from this node.
    cut: Option<Endpoint>,
}

impl Walk {
    fn new(seed: u64, has_switch: bool) -> Walk {
        let mut rng = Rng::with_seed(seed);
        let start = Serial(rng.u32(0..CIRCLE as u32));
        let worker = |w: usize| {
            let config = WorkerConfig {
                job: 1,
                epoch: 0,
                key: None,
                name: 1 << w,
                window: WINDOW,
                start,
                parent: [RACK, ROW][w],
                server: SERVER,
                ask_parent: true,
                full_to_parent: w == 1 || !has_switch,
                apart: false,
                timing: Timing::default(),
            };
            Worker::new(NOW, config)
        };
        let below = vec![Node::Worker(0)];
        let rack = Node::Aggregator { endpoint: RACK, is_full: !has_switch, children: below };
        let row = Node::Aggregator { endpoint: ROW, is_full: true, children: vec![rack, Node::Worker(1)] };
        let server = ServerConfig {
            job: 1,
            epoch: 0,
            key: None,
            window: WINDOW,
            block_bytes: 4,
            start,
            tree: Tree { children: vec![row] },
            naming: Naming::Children,
            stand_ins: 2,
            held_blocks: None,
            workers: WORKERS.to_vec(),
            heartbeat_every: ServerConfig::HEARTBEAT_EVERY,
            idle_every: ServerConfig::IDLE_EVERY,
            returns_after: 0,
        };
        let mut walk = Walk {
            seed,
            rng,
            has_switch,
            workers: [worker(0), worker(1)],
            posted: [0; 2],
            done: [0; 2],
            early: [BTreeSet::new(), BTreeSet::new()],
            aggregators: [aggregator(RACK, has_switch), aggregator(ROW, has_switch)],
            server: Server::new(NOW, server),
            committed: 0,
            flying: VecDeque::new(),
            cut: None,
        };
        (0..2).for_each(|w| walk.poll_worker(w));
        walk
    }

    fn is_full(&self, number: u64) -> bool {
        self.has_switch && number.is_multiple_of(FULL_EVERY)
    }

    fn fly(&mut self, to: Endpoint, from: Endpoint, bytes: Vec<u8>) {
        self.flying.push_back(Flying { to, from, at: self.committed, bytes });
    }

    /// A worker posts what it can, and everything that it has to send leaves.
    fn poll_worker(&mut self, w: usize) {
        loop {
            let route = if self.is_full(self.posted[w]) { Route::Full } else { Route::Tree };
            if self.workers[w].post(route).is_none() {
                break;
            }
            self.posted[w] += 1;
        }
        while let Some(Outbound { to, header }) = self.workers[w].poll_transmit(NOW) {
            let worker = &self.workers[w];
            let bytes = if header.kind == Kind::Push {
                let number = self.done[w].wrapping_add_signed(i64::from(header.seq.ahead_of(worker.received())));
                let (format, block) = block(self.is_full(number), value(w, number));
                [&worker.seal(&header, format, 0, &block)[..], &block].concat()
            } else {
                worker.seal(&header, Format::None, 0, &[]).to_vec()
            };
            self.fly(to, WORKERS[w], bytes);
        }
    }

    fn poll_server(&mut self) {
        while let Some(Transmit { to, header, payload }) = self.server.poll_transmit() {
            let bytes = [&header[..], payload].concat();
            self.fly(to, SERVER, bytes);
        }
    }

    fn arrive(&mut self, packet: &Flying) {
        let Flying { to, from, at, ref bytes } = *packet;
        if self.committed - at > LIFE || self.cut.is_some_and(|cut| cut == to || cut == from) {
            return;
        }
        match to {
            SERVER => {
                let before = self.server.ack();
                // Refusals are among what packets lead to.
                let _ = self.server.handle_packet(NOW, from, bytes);
                self.committed += u64::try_from(self.server.ack().ahead_of(before)).expect("Ack only grows");
                for (w, worker) in self.workers.iter().enumerate() {
                    let beyond = self.server.credit().ahead_of(worker.received());
                    assert!(
                        beyond < WINDOW as i32,
                        "seed {}: after {:?} from {from:?}, Credit is {beyond} beyond worker {w}, which has {}",
                        self.seed,
                        decode(bytes).map(|packet| packet.header),
                        worker.received()
                    );
                }
                self.poll_server();
            }
            RACK | ROW => {
                let mut sent: Vec<(Endpoint, Vec<u8>)> = Vec::new();
                match self.aggregators[(to.0 - RACK.0) as usize].handle_packet(from, bytes) {
                    Ok(Action::Send { to, header, payload }) => {
                        sent.extend(to.iter().map(|to| (*to, [&header[..], payload].concat())));
                    }
                    Ok(Action::Relay { to }) => sent.extend(to.iter().map(|to| (*to, bytes.clone()))),
                    Ok(Action::Nothing) | Err(_) => {}
                }
                sent.into_iter().for_each(|(receiver, bytes)| self.fly(receiver, to, bytes));
            }
            Endpoint(w) => self.arrive_at_worker(w as usize, from, bytes),
        }
    }

    fn arrive_at_worker(&mut self, w: usize, from: Endpoint, bytes: &[u8]) {
        let (seed, done) = (self.seed, self.done[w]);
        let before = self.workers[w].received();
        if let Ok(Received::Result { seq, format, payload, .. }) = self.workers[w].handle_packet(NOW, from, bytes) {
            let number = done.wrapping_add_signed(i64::from(seq.ahead_of(before)));
            let (expected, sum) = block(self.is_full(number), value(0, number) + value(1, number));
            let whose = format!("seed {seed}: block {number} at worker {w}");
            assert_eq!((format, payload), (expected, &sum[..]), "{whose}");
            assert!(number >= done && self.early[w].insert(number), "{whose} comes twice");
        }
        self.done[w] += u64::try_from(self.workers[w].received().ahead_of(before)).expect("it only grows");
        self.early[w] = self.early[w].split_off(&self.done[w]);
        self.poll_worker(w);
    }

    /// A packet arrives, is lost, or arrives twice; or a time-out or a heartbeat fires.
    fn step(&mut self) {
        if !self.flying.is_empty() && self.rng.u8(0..100) < 97 {
            let packet = self.flying.remove(self.rng.usize(0..self.flying.len().min(4))).expect("it is there");
            match self.rng.u8(0..100) {
                0..5 => {}
                5..8 => {
                    self.arrive(&packet);
                    self.flying.push_back(packet);
                }
                _ => self.arrive(&packet),
            }
            return;
        }
        let w = self.rng.usize(0..2);
        match self.rng.u8(0..4) {
            0 => {
                let outstanding = self.workers[w].outstanding();
                if let Some(seq) = self.rng.choice(outstanding) {
                    self.workers[w].expire(seq);
                }
            }
            1 | 2 => self.workers[w].heartbeat_now(),
            _ => self.server.heartbeat_now(),
        }
        self.poll_worker(w);
        self.poll_server();
    }

    fn run_until(&mut self, what: &str, is_over: impl Fn(&Walk) -> bool) {
        let (mut best, mut left) = (self.done, PATIENCE);
        while !is_over(self) {
            self.step();
            left = if self.done == best { left - 1 } else { PATIENCE };
            best = self.done;
            assert!(left > 0, "seed {}: stands still {what}, at blocks {:?}", self.seed, self.done);
        }
    }

    /// So many blocks are done.
    fn run_for(&mut self, blocks: u64, what: &str) {
        let goal = self.done[0].min(self.done[1]) + blocks;
        self.run_until(what, |walk| walk.done.iter().all(|done| *done >= goal));
    }

    /// A node loses everything.
    fn restart(&mut self, node: Endpoint) {
        self.aggregators[(node.0 - RACK.0) as usize] = aggregator(node, self.has_switch);
    }

    /// A node is cut off while so many blocks are done, and comes back. After a long time it has forgotten everything, as daemons do.
    fn cut_off(&mut self, node: Endpoint, blocks: u64) {
        let w = usize::from(node == ROW);
        self.cut = Some(node);
        self.workers[w].set_lost(true);
        self.run_for(blocks, &format!("while {node:?} is cut off"));
        assert!(self.server.bypassed().any(|bypassed| bypassed == node), "seed {}: {node:?}", self.seed);
        self.cut = None;
        self.workers[w].set_lost(false);
        if blocks > LIFE || self.rng.bool() {
            self.restart(node);
        }
        // A switch is bypassed together with the node above it.
        if blocks > LIFE && self.has_switch {
            self.restart(RACK);
        }
        self.run_until(&format!("after {node:?} is back"), |walk| walk.server.bypassed().next().is_none());
    }
}

fn aggregator(node: Endpoint, has_switch: bool) -> Aggregator {
    let mut aggregator = Aggregator::new(Limits { jobs: 1, slots: WINDOW as usize, memory_bytes: 1 << 10 });
    let is_switch = has_switch && node == RACK;
    let child = |endpoint, place: u32| Child { endpoint, workers: 1 << place };
    let tenant = Tenant {
        job: 1,
        epoch: 0,
        key: None,
        window: WINDOW,
        block_bytes: 4,
        floats: !is_switch,
        results: true,
        apart: false,
        parent: if node == RACK { ROW } else { SERVER },
        server: (!is_switch).then_some(SERVER),
        name: 1,
        children: if node == RACK { vec![child(WORKERS[0], 0)] } else { vec![child(RACK, 0), child(WORKERS[1], 1)] },
    };
    aggregator.open(tenant).expect("it fits");
    aggregator
}

/// What worker `w` pushes as block `number`: blocks whose SeqNums are the same differ.
fn value(w: usize, number: u64) -> u16 {
    (number * 31 % 1000) as u16 + 17 * w as u16
}

fn block(is_full: bool, value: u16) -> (Format, [u8; 4]) {
    if is_full { (Format::F32, f32::from(value).to_be_bytes()) } else { (Format::I32, i32::from(value).to_be_bytes()) }
}

/// A job goes around the circle many times while packets are lost and doubled and aggregators restart, or are cut off for less or for
/// more than half of the circle: all results are right, each comes once, and the job never stands still.
#[test]
fn around_the_circle() {
    on_all_cores(0..16, |seed| {
        use_circle_of(BITS);
        let mut walk = Walk::new(seed, seed % 2 == 1);
        for _ in 0..8 {
            let healthy = walk.rng.u64(1..2 * CIRCLE);
            walk.run_for(healthy, "while nothing is cut off");
            let node = if walk.rng.bool() { RACK } else { ROW };
            match walk.rng.u8(0..3) {
                0 => walk.restart(node),
                1 => {
                    let blocks = walk.rng.u64(1..LIFE);
                    walk.cut_off(node, blocks);
                }
                _ => {
                    let blocks = walk.rng.u64(CIRCLE / 2..2 * CIRCLE);
                    walk.cut_off(node, blocks);
                }
            }
        }
    });
}

/// The same where an aggregator is cut off for a moment, and the next time more than half of the circle later, but less than all of it:
/// what its children said the first time is no news.
#[test]
fn cut_off_again_after_half_of_the_circle() {
    on_all_cores(0..16, |seed| {
        use_circle_of(BITS);
        let mut walk = Walk::new(seed, false);
        for node in [RACK, ROW, RACK, ROW] {
            walk.cut_off(node, 8);
            let blocks = walk.rng.u64(CIRCLE / 2 + 20..CIRCLE - 20);
            walk.run_for(blocks, "while nothing is cut off");
            walk.cut_off(node, 8);
        }
    });
}
