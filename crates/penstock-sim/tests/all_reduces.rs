//! A rank's all-reduces over the virtual network: every shape, format and loss gives every rank the bits of the definition.
//!
//! These are the tests of `aggregation::client` that need several servers, other element types, calls that are held, or a look
//! at a core between two events; `aggregation_tests.rs` has whole jobs with faults. They stand here because a unit test of
//! `penstock-aggregation` that uses this crate would meet a second copy of its own types.

use penstock_aggregation::client::{AllReduce, Core, CoreConfig, Lack, Leftover, PARENT, SERVER, Trouble, Wire};
use penstock_aggregation::{
    Action, Aggregator, Buffer, Child, Endpoint, HEADER_BYTES, Key, Kind, Limits, Naming, Node, Serial, Server,
    ServerConfig, Tenant, Timing, Tree, WorkerConfig, decode,
};
use penstock_sim::agenda::Agenda;
use penstock_sim::network::{Event, Link, Network, NodeId, Topology};
use penstock_sim::random::Random;
use penstock_types::{DType, MILLISECOND, ReduceOp, SECOND, Time};
use std::ops::Range;

/// Servers, and racks of ranks under an aggregator each; the others hang straight below every server.
#[derive(Clone)]
struct Shape {
    world: u32,
    weights: Vec<u32>,
    racks: Vec<Vec<u8>>,
    wire: Wire,
    loss: f64,
    keyed: bool,
    seed: u64,
    /// Results come apart from the blocks.
    apart: Option<Apart>,
}

/// How servers work on what they have accepted.
#[derive(Clone, Copy)]
struct Apart {
    /// The most blocks that a server holds.
    limit: u32,
    /// The longest time that the work behind a buffer takes.
    longest: u64,
    /// The server and the number of the buffer whose work fails.
    fails: Option<(usize, usize)>,
    /// The same of one whose work takes as long as this.
    late: Option<(usize, usize, u64)>,
}

impl Shape {
    fn new(world: u32, wire: Wire) -> Shape {
        Shape { world, weights: vec![1], racks: Vec::new(), wire, loss: 0.0, keyed: false, seed: 1, apart: None }
    }

    /// The rack of a rank.
    fn rack_of(&self, rank: u32) -> Option<usize> {
        self.racks.iter().position(|rack| rack.contains(&(rank as u8)))
    }

    // Endpoints: ranks by their number, then racks, then the server. Each server has sockets of its own at every node.

    fn rack(&self, rack: usize) -> Endpoint {
        Endpoint(self.world + rack as u32)
    }

    fn server(&self) -> Endpoint {
        self.rack(self.racks.len())
    }

    /// The host of an endpoint in the network of a server.
    fn host(&self, server: usize, endpoint: Endpoint) -> NodeId {
        NodeId(server as u32 * (self.server().0 + 1) + endpoint.0)
    }

    /// The server in whose network a host is, and its endpoint there.
    fn endpoint(&self, host: NodeId) -> (usize, Endpoint) {
        let hosts = self.server().0 + 1;
        ((host.0 / hosts) as usize, Endpoint(host.0 % hosts))
    }

    /// For each server a star of all nodes. A packet is lost on its first link, or takes 50 to 150 us.
    fn topology(&self) -> Topology {
        let mut topology = Topology::default();
        let hosts = self.server().0 + 1;
        let all: Vec<NodeId> = (0..self.weights.len() as u32 * hosts).map(|_| topology.add_host()).collect();
        for star in all.chunks(hosts as usize) {
            let switch = topology.add_switch();
            for host in star {
                let first = Link { loss: self.loss, delay: 50_000, jitter: 100_000, ..Link::default() };
                topology.add_link(*host, switch, first);
                topology.add_link(switch, *host, Link::default());
            }
        }
        topology
    }
}

/// Work: the server's, and the number of its buffer.
type Work = (usize, usize, Buffer);

/// All processes of a group, and the packets between them, in virtual time.
struct Cluster {
    shape: Shape,
    now: Time,
    cores: Vec<Core>,
    servers: Vec<Option<Server>>,
    racks: Vec<Vec<Aggregator>>,
    network: Network<Vec<u8>>,
    /// By rank: the operations that have ended, and those that have failed.
    ended: Vec<Vec<u64>>,
    failed: Vec<Vec<(u64, String)>>,
    /// By server: how many buffers it has had.
    buffers: Vec<usize>,
    /// By the time when it ends.
    work: Agenda<Work>,
    random: Random,
}

const WINDOW: u32 = 8;
const PAYLOAD: usize = 128;
const JOB: u32 = 9;

impl Cluster {
    fn new(shape: Shape) -> Cluster {
        let key = shape.keyed.then_some(Key([7; 16]));
        let start = Serial(u32::MAX - 20);
        let core = |rank: u32| {
            let config = CoreConfig { world: shape.world, wire: shape.wire, payload_bytes: PAYLOAD };
            let worker = WorkerConfig {
                job: JOB,
                epoch: 1,
                key,
                name: 1 << rank,
                window: WINDOW,
                start,
                parent: if shape.rack_of(rank).is_some() { PARENT } else { SERVER },
                server: SERVER,
                ask_parent: shape.wire != Wire::Padded,
                full_to_parent: false,
                apart: shape.apart.is_some(),
                timing: Timing::default(),
            };
            Core::new(Time(0), config, vec![worker; shape.weights.len()])
        };
        let rack_node = |(at, rack): (usize, &Vec<u8>)| Node::Aggregator {
            endpoint: shape.rack(at),
            is_full: false,
            children: rack.iter().map(|worker| Node::Worker(u16::from(*worker))).collect(),
        };
        let mut children: Vec<Node> = shape.racks.iter().enumerate().map(rack_node).collect();
        let alone = (0..shape.world).filter(|rank| shape.rack_of(*rank).is_none());
        children.extend(alone.map(|rank| Node::Worker(rank as u16)));
        let server = ServerConfig {
            job: JOB,
            epoch: 1,
            key,
            window: WINDOW,
            block_bytes: PAYLOAD,
            start,
            tree: Tree { children },
            naming: Naming::Workers,
            stand_ins: 0,
            held_blocks: shape.apart.map(|apart| apart.limit),
            workers: (0..shape.world).map(Endpoint).collect(),
            heartbeat_every: ServerConfig::HEARTBEAT_EVERY,
            idle_every: ServerConfig::IDLE_EVERY,
            returns_after: ServerConfig::RETURNS_AFTER,
        };
        let rack = |rack: &Vec<u8>| {
            let mut aggregator = Aggregator::new(Limits { jobs: 1, slots: 64, memory_bytes: 1 << 20 });
            let child = |worker: &u8| Child { endpoint: Endpoint(u32::from(*worker)), workers: 1 << worker };
            let tenant = Tenant {
                job: JOB,
                epoch: 1,
                key,
                window: WINDOW,
                block_bytes: PAYLOAD,
                floats: shape.wire == Wire::Float,
                results: true,
                apart: shape.apart.is_some(),
                parent: shape.server(),
                server: None,
                name: rack.iter().fold(0, |all, worker| all | 1 << worker),
                children: rack.iter().map(child).collect(),
            };
            aggregator.open(tenant).unwrap();
            aggregator
        };
        let servers = shape.weights.len();
        Cluster {
            now: Time(0),
            cores: (0..shape.world).map(core).collect(),
            servers: (0..servers).map(|_| Some(Server::new(Time(0), server.clone()))).collect(),
            racks: (0..servers).map(|_| shape.racks.iter().map(rack).collect()).collect(),
            network: Network::new(shape.topology(), shape.seed),
            ended: vec![Vec::new(); shape.world as usize],
            failed: vec![Vec::new(); shape.world as usize],
            buffers: vec![0; servers],
            work: Agenda::default(),
            random: Random::new(shape.seed ^ 0x3077),
            shape,
        }
    }

    fn submit(&mut self, rank: usize, all_reduce: AllReduce) -> u64 {
        let pushes = shares(&self.shape.weights, all_reduce.bytes);
        // SAFETY: tests keep tensors until the cluster ends, and look at them between its steps.
        unsafe { self.cores[rank].submit(all_reduce, &pushes) }
    }

    fn send(&mut self, server: usize, to: Endpoint, from: Endpoint, bytes: Vec<u8>) {
        let [from, to] = [from, to].map(|endpoint| self.shape.host(server, endpoint));
        let flow = self.network.flow(from, to).expect("a star");
        self.network.send(self.now, flow, bytes.len() as u64, bytes);
    }

    /// Servers begin to work on buffers that are whole, and end what is due.
    fn work(&mut self) {
        let Some(apart) = self.shape.apart else { return };
        for server in 0..self.servers.len() {
            while let Some(buffer) = self.servers[server].as_mut().and_then(Server::poll_work) {
                let number = self.buffers[server];
                self.buffers[server] += 1;
                let drawn = self.random.below(apart.longest.max(1));
                let late = apart.late.filter(|(at, of, _)| (*at, *of) == (server, number));
                let at = self.now.plus(late.map_or(drawn, |(_, _, time)| time));
                self.work.add(at, (server, number, buffer));
            }
        }
        while let Some((server, number, buffer)) = self.work.pop(self.now) {
            let fails = apart.fails == Some((server, number));
            let outcome = if fails { Err("its disk is full".into()) } else { Ok(buffer.bytes) };
            if let Some(machine) = &mut self.servers[server] {
                assert!(machine.done(self.now, buffer.first, outcome), "it was worked on");
            }
        }
    }

    /// Everything that wants to leave now does.
    fn transmit(&mut self) {
        self.work();
        let mut buffer = [0; PAYLOAD];
        for rank in 0..self.shape.world {
            for server in 0..self.servers.len() {
                while let Some(packet) = self.cores[rank as usize].poll_transmit(self.now, server, &mut buffer) {
                    let rack = self.shape.rack_of(rank).filter(|_| packet.to == PARENT);
                    let to = rack.map_or(self.shape.server(), |rack| self.shape.rack(rack));
                    let bytes = [&packet.header[..], &buffer[..packet.payload_bytes]].concat();
                    self.send(server, to, Endpoint(rank), bytes);
                }
            }
            self.failed[rank as usize].extend(std::iter::from_fn(|| self.cores[rank as usize].poll_failed()));
            while let Some(op) = self.cores[rank as usize].poll_done() {
                self.ended[rank as usize].push(op);
            }
        }
        for server in 0..self.servers.len() {
            while let Some(packet) = self.servers[server].as_mut().and_then(Server::poll_transmit) {
                let (to, bytes) = (packet.to, [&packet.header[..], packet.payload].concat());
                self.send(server, to, self.shape.server(), bytes);
            }
        }
    }

    fn arrive(&mut self, to: NodeId, from: NodeId, bytes: Vec<u8>) -> Result<(), Trouble> {
        let ((server, to), (_, from)) = (self.shape.endpoint(to), self.shape.endpoint(from));
        if to == self.shape.server() {
            if let Some(machine) = &mut self.servers[server] {
                let _ = machine.handle_packet(self.now, from, &bytes);
            }
        } else if to.0 < self.shape.world {
            let from = if from == self.shape.server() { SERVER } else { PARENT };
            let _ = self.cores[to.0 as usize].handle_packet(self.now, server, from, &bytes)?;
        } else {
            let is_push = decode(&bytes).unwrap().header.kind == Kind::Push;
            if self.shape.wire == Wire::Padded && is_push {
                assert_eq!(bytes.len(), HEADER_BYTES + PAYLOAD, "a switch takes blocks of one length");
            }
            let rack = &mut self.racks[server][(to.0 - self.shape.world) as usize];
            let out: Vec<(Endpoint, Vec<u8>)> = match rack.handle_packet(from, &bytes) {
                Ok(Action::Send { to, header, payload }) => {
                    to.iter().map(|to| (*to, [&header[..], payload].concat())).collect()
                }
                Ok(Action::Relay { to }) => to.iter().map(|to| (*to, bytes.clone())).collect(),
                Ok(Action::Nothing) | Err(_) => Vec::new(),
            };
            out.into_iter().for_each(|(next, bytes)| self.send(server, next, to, bytes));
        }
        Ok(())
    }

    /// Goes on to the next thing that happens.
    fn step(&mut self) -> Result<(), Trouble> {
        self.transmit();
        let cores = self.cores.iter().map(Core::poll_timeout);
        let servers = self.servers.iter().flatten().map(Server::poll_timeout);
        let next = self
            .network
            .poll_timeout()
            .into_iter()
            .chain(cores)
            .chain(servers)
            .chain(self.work.next_at())
            .min()
            .expect("there are heartbeats");
        self.now = next.max(self.now);
        self.network.handle_timeout(self.now);
        while let Some(event) = self.network.poll_event() {
            if let Event::Arrived(packet) = event {
                self.arrive(packet.to, packet.from, packet.payload)?;
            }
        }
        self.cores.iter_mut().for_each(|core| core.handle_timeout(self.now));
        self.servers.iter_mut().flatten().for_each(|server| server.handle_timeout(self.now));
        Ok(())
    }

    fn run_until(&mut self, done: impl Fn(&Cluster) -> bool) -> Result<(), Trouble> {
        while !done(self) {
            assert!(self.now < Time(60 * SECOND), "no end after a minute, seed {}", self.shape.seed);
            self.step()?;
        }
        Ok(())
    }
}

/// A tensor cut among servers by weight, at cache lines.
fn shares(weights: &[u32], bytes: usize) -> Vec<Range<usize>> {
    let (lines, all) = (bytes.div_ceil(64), weights.iter().sum::<u32>() as usize);
    let ends = weights.iter().scan(0, |seen, weight| {
        *seen += *weight as usize;
        Some((lines * *seen / all * 64).min(bytes))
    });
    let mut start = 0;
    ends.map(|end| std::mem::replace(&mut start, end)..end).collect()
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn call(dtype: DType, op: ReduceOp, tensor: &mut [u8], fingerprint: u128) -> AllReduce {
    AllReduce {
        dtype,
        op,
        address: tensor.as_mut_ptr(),
        bytes: tensor.len(),
        fingerprint,
        ready: true,
        started: Time(0),
        timeout: u64::MAX,
    }
}

/// Blocks with zeros, denormals and large values, different on every rank.
fn contribution(rank: u32, op: usize, elements: usize) -> Vec<f32> {
    let mut random = Random::new(u64::from(rank) * 1000 + op as u64);
    (0..elements)
        .map(|i| match i / 40 % 4 {
            0 => 0.0,
            1 => around_zero(&mut random) * 1e-39,
            2 => around_zero(&mut random) * 1e30,
            _ => around_zero(&mut random),
        })
        .collect()
}

/// Between -0.5 and 0.5.
fn around_zero(random: &mut Random) -> f32 {
    random.below(1 << 24) as f32 / (1 << 24) as f32 - 0.5
}

/// What docs/design/quantisation.md says comes out, block by block, in 128-bit integers.
fn expected(contributions: &[Vec<f32>], ranges: &[(usize, usize)], block: usize, integer: DType) -> Vec<f32> {
    let mut out = vec![0f32; contributions[0].len()];
    let fixed = FixedPointOf { workers: contributions.len() as u32, integer };
    for &(start, len) in ranges {
        for at in (start..start + len).step_by(block) {
            let end = (at + block).min(start + len);
            fixed.block(&contributions.iter().map(|c| &c[at..end]).collect::<Vec<_>>(), &mut out[at..end]);
        }
    }
    out
}

struct FixedPointOf {
    workers: u32,
    integer: DType,
}

impl FixedPointOf {
    /// By the definition, in f64: a count is below 2^31, so that its product with a unit is exact.
    fn block(&self, blocks: &[&[f32]], out: &mut [f32]) {
        let largest = blocks.iter().flat_map(|block| block.iter()).fold(0f64, |max, x| max.max(f64::from(x.abs())));
        if largest == 0.0 {
            return out.fill(0.0);
        }
        let mut exponent = -148i32;
        while 2f64.powi(exponent) <= largest {
            exponent += 1;
        }
        let top = if self.integer == DType::I16 { i64::from(i16::MAX) } else { i64::from(i32::MAX) };
        let worst = |bits: i32| (1i64 << bits) - if bits < 24 { 0 } else { 1 << (bits - 24) };
        let bits = (0..=31).rev().find(|bits| worst(*bits) * i64::from(self.workers) <= top).unwrap();
        let unit = 2f64.powi(exponent - bits);
        for (i, out) in out.iter_mut().enumerate() {
            let sum: i64 = blocks.iter().map(|block| (f64::from(block[i]) / unit).round_ties_even() as i64).sum();
            *out = (sum as f64 * unit) as f32;
        }
    }
}

/// Runs all-reduces of f32 with these lengths; returns every rank's tensors.
fn all_reduce(shape: Shape, lengths: &[usize], value: impl Fn(u32, usize, usize) -> Vec<f32>) -> Vec<Vec<Vec<u8>>> {
    let mut cluster = Cluster::new(shape.clone());
    let mut tensors: Vec<Vec<Vec<u8>>> = (0..shape.world)
        .map(|rank| lengths.iter().enumerate().map(|(op, len)| f32s(&value(rank, op, *len))).collect())
        .collect();
    for (rank, tensors) in tensors.iter_mut().enumerate() {
        for (op, tensor) in tensors.iter_mut().enumerate() {
            let number = cluster.submit(rank, call(DType::F32, ReduceOp::Sum, tensor, op as u128));
            assert_eq!(number, op as u64);
        }
    }
    let all: Vec<u64> = (0..lengths.len() as u64).collect();
    cluster.run_until(|cluster| cluster.ended.iter().all(|ended| *ended == all)).unwrap();
    tensors
}

/// Every shape, format and loss gives every rank the same bits: those of the definition, computed apart.
#[test]
fn sums_are_those_of_the_definition() {
    let lengths = [300, 16, 1, 1000, 33];
    for world in [2, 3, 5] {
        for (wire, integer, block) in [
            (Wire::Int32, DType::I32, PAYLOAD / 4),
            (Wire::Padded, DType::I32, PAYLOAD / 4),
            (Wire::Int16, DType::I16, PAYLOAD / 2),
        ] {
            for (weights, cut) in [(vec![1], None), (vec![1, 1], Some(2))] {
                for (racks, loss) in [(vec![], 0.0f64), (vec![vec![0, 1]], 0.0), (vec![vec![1], vec![0]], 0.1)] {
                    for keyed in [false, true] {
                        let seed = u64::from(world) * 100 + loss.to_bits() % 97;
                        let weights = weights.clone();
                        let shape =
                            Shape { weights, racks: racks.clone(), loss, keyed, seed, ..Shape::new(world, wire) };
                        let tensors = all_reduce(shape, &lengths, contribution);
                        for (op, &len) in lengths.iter().enumerate() {
                            let contributions: Vec<_> = (0..world).map(|rank| contribution(rank, op, len)).collect();
                            let lines = (len * 4).div_ceil(64);
                            let first = cut.map_or(len, |parts| (lines / parts * 16).min(len));
                            let ranges = [(0, first), (first, len - first)];
                            let expected = f32s(&expected(&contributions, &ranges, block, integer));
                            for tensors in &tensors {
                                assert_eq!(tensors[op], expected, "op {op} of {world} ranks as {wire:?}, seed {seed}");
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Blocks with Inf and NaN go as they are, in as many packets as they need; others of the tensor as ever. Floats are added in
/// the order of the tree: with two ranks, their sum.
#[test]
fn what_is_not_finite_comes_out_as_ieee_says() {
    let value = |rank: u32, _: usize, len: usize| {
        let mut values = vec![0.1f32 + rank as f32; len];
        values[70] = [f32::INFINITY, 1.0][rank as usize];
        values[200] = [f32::INFINITY, f32::NEG_INFINITY][rank as usize];
        values[201] = 1e-3;
        values
    };
    for wire in [Wire::Int32, Wire::Padded, Wire::Int16, Wire::Float] {
        for racks in [vec![], vec![vec![0, 1]]] {
            let tensors = all_reduce(Shape { racks, loss: 0.05, ..Shape::new(2, wire) }, &[300], value);
            assert_eq!(tensors[0], tensors[1]);
            let sums: Vec<f32> =
                tensors[0][0].as_chunks::<4>().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect();
            assert_eq!(sums[70], f32::INFINITY, "{wire:?}");
            assert!(sums[200].is_nan());
            // Beside a NaN the block's elements are summed as floats.
            assert_eq!(sums[201].to_bits(), 2e-3f32.to_bits());
            if wire != Wire::Int16 {
                assert!((sums[0] - 1.2).abs() < 1e-6);
            }
        }
    }
}

/// Averages divide once, premultiplied sums multiply once, also with loss and two servers; and in 16 bits.
#[test]
fn averages_and_factors() {
    for (op, expected) in [(ReduceOp::Avg, 2.0f32), (ReduceOp::PremulSum(0.5), 2.0), (ReduceOp::Sum, 4.0)] {
        let types = [DType::F32, DType::F16, DType::BF16];
        for (dtype, wire) in types.into_iter().flat_map(|dtype| [(dtype, Wire::Int32), (dtype, Wire::Padded)]) {
            let racks = vec![vec![0, 1]];
            let shape = Shape { weights: vec![3, 1], racks, loss: 0.1, ..Shape::new(2, wire) };
            let mut cluster = Cluster::new(shape);
            let bits = |value: f32| match dtype {
                DType::F32 => value.to_ne_bytes().to_vec(),
                DType::F16 => half(value, false),
                _ => half(value, true),
            };
            let mut tensors: Vec<Vec<u8>> = (0..2).map(|rank| bits(1.0 + 2.0 * rank as f32).repeat(500)).collect();
            for (rank, tensor) in tensors.iter_mut().enumerate() {
                cluster.submit(rank, call(dtype, op, tensor, 3));
            }
            cluster.run_until(|cluster| cluster.ended.iter().all(|ended| ended.len() == 1)).unwrap();
            assert_eq!(tensors, vec![bits(expected).repeat(500); 2], "{op:?} of {dtype} as {wire:?}");
        }
    }
}

/// The bits of 1, 2, 3 or 4 in 16 bits.
fn half(value: f32, bfloat: bool) -> Vec<u8> {
    let bits = if bfloat {
        (value.to_bits() >> 16) as u16
    } else {
        // Their significands have two bits.
        [0x3c00, 0x4000, 0x4200, 0x4400][value as usize - 1]
    };
    bits.to_ne_bytes().to_vec()
}

/// A rank that means something else is noticed by all before any of its blocks is added, and told apart.
#[test]
fn a_mismatch_is_noticed_by_all() {
    let mut cluster = Cluster::new(Shape::new(3, Wire::Int32));
    let mut tensors: Vec<Vec<u8>> = (0..3).map(|rank| f32s(&vec![1.0; if rank == 1 { 100 } else { 200 }])).collect();
    for (rank, tensor) in tensors.iter_mut().enumerate() {
        let fingerprint = tensor.len() as u128;
        cluster.submit(rank, call(DType::F32, ReduceOp::Sum, tensor, fingerprint));
    }
    let trouble = cluster.run_until(|_| false).unwrap_err();
    assert!(matches!(trouble, Trouble::Mismatch { op: 0, theirs: 400 | 800 }), "{trouble:?}");
    assert_eq!(tensors[0], f32s(&[1.0; 200]), "nothing was written");
}

/// An operation that was held has its place: those behind it wait for it, and nothing reads its tensor before.
#[test]
fn held_operations_keep_their_place() {
    let mut cluster = Cluster::new(Shape::new(2, Wire::Int32));
    let mut tensors: Vec<Vec<u8>> = (0..4).map(|_| f32s(&[f32::NAN; 50])).collect();
    let (first, second) = tensors.split_at_mut(2);
    for rank in 0..2 {
        let held = AllReduce { ready: rank == 0, ..call(DType::F32, ReduceOp::Sum, &mut first[rank], 1) };
        cluster.submit(rank, held);
        cluster.submit(rank, call(DType::F32, ReduceOp::Sum, &mut second[rank], 1));
    }
    first[0].copy_from_slice(&f32s(&[1.0; 50]));
    second.iter_mut().for_each(|tensor| tensor.copy_from_slice(&f32s(&[3.0; 50])));
    cluster.run_until(|cluster| cluster.now > Time(200 * MILLISECOND)).unwrap();
    assert_eq!(cluster.ended, vec![Vec::<u64>::new(); 2]);
    assert_eq!(cluster.cores[0].lacks(), [Lack::Agreement]);
    first[1].copy_from_slice(&f32s(&[2.0; 50]));
    cluster.cores[1].release(0);
    cluster.run_until(|cluster| cluster.ended.iter().all(|ended| *ended == [0, 1])).unwrap();
    assert_eq!(tensors, [[3.0; 50], [3.0; 50], [6.0; 50], [6.0; 50]].map(|sums| f32s(&sums)));
}

/// When a server dies at any moment, what one rank has handed out every other has whole, and what is delivered on several ranks is
/// the same. (`fallback.rs` tests the arithmetic that goes on from there.)
#[test]
fn nothing_that_was_handed_out_is_lacking_elsewhere() {
    let (mut partly, mut counted) = (0, 0);
    for seed in 0..400 {
        let shape =
            Shape { racks: vec![vec![0, 1]], loss: 0.05, seed, weights: vec![1, 2], ..Shape::new(3, Wire::Int32) };
        let mut cluster = Cluster::new(shape);
        let mut tensors: Vec<Vec<Vec<u8>>> =
            (0..3).map(|rank| (0..4).map(|op| f32s(&contribution(rank, op, 700))).collect()).collect();
        for (rank, tensors) in tensors.iter_mut().enumerate() {
            for (op, tensor) in tensors.iter_mut().enumerate() {
                // One of them was not even given the last one yet.
                if rank != 2 || op < 3 {
                    cluster.submit(rank, call(DType::F32, ReduceOp::Sum, tensor, op as u128));
                }
            }
        }
        let death = Time(Random::new(seed).below(6 * MILLISECOND));
        cluster.run_until(|cluster| cluster.now >= death).unwrap();
        cluster.servers[1] = None;
        cluster
            .run_until(|cluster| (0..3).all(|rank| cluster.cores[rank].lost_server(cluster.now) == Some(1)))
            .unwrap();
        let points: Vec<(u64, u64)> = cluster.cores.iter().map(Core::fallback_point).collect();
        let first = points.iter().map(|(first, _)| *first).min().unwrap();
        let given = points.iter().map(|(_, given)| *given).min().unwrap();
        assert_eq!(given, 3);
        for (rank, ended) in cluster.ended.iter().enumerate() {
            assert!(ended.iter().all(|op| *op < first), "rank {rank} handed out {ended:?}, seed {seed}");
        }
        for op in 0..given {
            let whole = |rank: usize| {
                let contributions: Vec<_> = (0..3).map(|rank| contribution(rank, op as usize, 700)).collect();
                let lines = 700 * 4 / 64 + 1;
                let cut = lines / 3 * 16;
                let sums = expected(&contributions, &[(0, cut), (cut, 700 - cut)], PAYLOAD / 4, DType::I32);
                (f32s(&sums), tensors[rank][op as usize].clone())
            };
            if op < first {
                for rank in 0..3 {
                    let (expected, found) = whole(rank);
                    assert_eq!(found, expected, "op {op} on rank {rank}, seed {seed}");
                }
            }
        }
        for rank in 0..3 {
            for _ in cluster.ended[rank].len() as u64..first {
                cluster.cores[rank].take_first();
            }
        }
        let lacks: Vec<Vec<Lack>> = cluster.cores.iter().map(Core::lacks).collect();
        let left: Vec<Leftover> =
            cluster.cores.iter_mut().filter_map(|core| core.take_first()).map(|(_, left)| left).collect();
        assert_eq!(left.len(), 3);
        for (lacks, left) in lacks.iter().zip(&left) {
            let pieces = lacks.iter().map(|lack| match lack {
                Lack::Nothing => Some(0),
                Lack::Agreement => None,
                Lack::Pieces { left, .. } => Some(*left),
            });
            // Where nothing is agreed on, nothing is counted.
            if let Some(pieces) = pieces.sum::<Option<usize>>() {
                assert_eq!(pieces, left.pieces().filter(|(_, _, here)| !here).count(), "seed {seed}");
                counted += 1;
            }
        }
        let mut pieces: Vec<_> = left.iter().map(Leftover::pieces).collect();
        while let Some(piece) = pieces.iter_mut().map(Iterator::next).collect::<Option<Vec<_>>>() {
            let (start, len, _) = piece[0];
            let have: Vec<usize> = (0..3).filter(|rank| piece[*rank].2).collect();
            partly += usize::from(have.len() == 1 || have.len() == 2);
            for pair in have.windows(2) {
                let of = |rank: usize| &tensors[rank][first as usize][start..start + len];
                assert_eq!(of(pair[0]), of(pair[1]), "seed {seed}");
            }
        }
    }
    assert!(partly > 20, "only {partly} pieces were somewhere and not everywhere");
    assert!(counted > 20, "what is lacking was counted only {counted} times");
}

#[path = "all_reduces/apart.rs"]
mod apart;
