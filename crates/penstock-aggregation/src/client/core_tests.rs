use super::*;
use crate::{
    Action as Reaction, Aggregator, Child, Key, Limits, Node, Server, ServerConfig, Tenant, Timing, Tree, decode,
};
use penstock_types::{MILLISECOND, SECOND};
use std::collections::{BTreeMap, BTreeSet};

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
}

impl Shape {
    fn new(world: u32, wire: Wire) -> Shape {
        Shape { world, weights: vec![1], racks: Vec::new(), wire, loss: 0.0, keyed: false, seed: 1 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    Rank(u32),
    Rack(usize),
    Server,
}

/// Whose server's network it is in, to whom, from whom, and its bytes.
type OnTheWay = (usize, Who, Who, Vec<u8>);

/// All processes of a group, and the packets between them, in virtual time.
struct Network {
    shape: Shape,
    now: Time,
    cores: Vec<Core>,
    servers: Vec<Option<Server>>,
    racks: Vec<Vec<Aggregator>>,
    /// By when and in which order.
    wire: BTreeMap<(Time, u64), OnTheWay>,
    sent: u64,
    random: fastrand::Rng,
    ended: Vec<Vec<u64>>,
    /// Ranks that do nothing any more.
    silent: BTreeSet<u32>,
}

const WINDOW: u32 = 8;
const PAYLOAD: usize = 128;
const JOB: u32 = 9;

impl Network {
    fn new(shape: Shape) -> Network {
        let key = shape.keyed.then_some(Key([7; 16]));
        let rack_of = |rank: u32| shape.racks.iter().position(|rack| rack.contains(&(rank as u8)));
        let start = Serial(u32::MAX - 20);
        let core = |rank: u32| {
            let config = CoreConfig { world: shape.world, wire: shape.wire, payload_bytes: PAYLOAD };
            let worker = WorkerConfig {
                job: JOB,
                epoch: 1,
                key,
                worker: rank as u8,
                window: WINDOW,
                start,
                parent: if rack_of(rank).is_some() { PARENT } else { SERVER },
                server: SERVER,
                ask_parent: shape.wire != Wire::Padded,
                timing: Timing::default(),
            };
            Core::new(Time(0), config, vec![worker; shape.weights.len()])
        };
        let rack_node = |(at, rack): (usize, &Vec<u8>)| Node::Aggregator {
            endpoint: Endpoint(100 + at as u32),
            children: rack.iter().map(|worker| Node::Worker(*worker)).collect(),
        };
        let mut children: Vec<Node> = shape.racks.iter().enumerate().map(rack_node).collect();
        children.extend((0..shape.world).filter(|rank| rack_of(*rank).is_none()).map(|rank| Node::Worker(rank as u8)));
        let server = ServerConfig {
            job: JOB,
            epoch: 1,
            key,
            window: WINDOW,
            block_bytes: PAYLOAD,
            start,
            tree: Tree { children },
            workers: (0..shape.world).map(Endpoint).collect(),
            heartbeat_every: ServerConfig::HEARTBEAT_EVERY,
            idle_every: ServerConfig::IDLE_EVERY,
        };
        let rack = |rack: &Vec<u8>| {
            let mut aggregator = Aggregator::new(Limits { jobs: 1, slots: 64, memory_bytes: 1 << 20 });
            let tenant = Tenant {
                job: JOB,
                epoch: 1,
                key,
                window: WINDOW,
                block_bytes: PAYLOAD,
                floats: shape.wire == Wire::Float,
                results: true,
                parent: Endpoint(1000),
                children: rack
                    .iter()
                    .map(|worker| Child { endpoint: Endpoint(u32::from(*worker)), workers: 1 << worker })
                    .collect(),
            };
            aggregator.open(tenant).unwrap();
            aggregator
        };
        let servers = shape.weights.len();
        Network {
            now: Time(0),
            cores: (0..shape.world).map(core).collect(),
            servers: (0..servers).map(|_| Some(Server::new(Time(0), server.clone()))).collect(),
            racks: (0..servers).map(|_| shape.racks.iter().map(rack).collect()).collect(),
            wire: BTreeMap::new(),
            sent: 0,
            random: fastrand::Rng::with_seed(shape.seed),
            ended: vec![Vec::new(); shape.world as usize],
            silent: BTreeSet::new(),
            shape,
        }
    }

    fn submit(&mut self, rank: usize, all_reduce: AllReduce) -> u64 {
        let pushes = shares(&self.shape.weights, all_reduce.bytes);
        // SAFETY: tests keep tensors until the network ends, and look at them between its steps.
        unsafe { self.cores[rank].submit(all_reduce, &pushes) }
    }

    fn put(&mut self, server: usize, to: Who, from: Who, bytes: Vec<u8>) {
        if self.random.f64() < self.shape.loss {
            return;
        }
        let at = self.now.plus(50_000 + self.random.u64(..100_000));
        self.sent += 1;
        self.wire.insert((at, self.sent), (server, to, from, bytes));
    }

    fn rack_of(&self, rank: u32) -> Option<usize> {
        self.shape.racks.iter().position(|rack| rack.contains(&(rank as u8)))
    }

    /// Everything that wants to leave now does.
    fn transmit(&mut self) {
        let mut buffer = [0; PAYLOAD];
        for rank in (0..self.shape.world).filter(|rank| !self.silent.contains(rank)).collect::<Vec<_>>() {
            for server in 0..self.servers.len() {
                while let Some(packet) = self.cores[rank as usize].poll_transmit(self.now, server, &mut buffer) {
                    let to = match self.rack_of(rank) {
                        Some(rack) if packet.to == PARENT => Who::Rack(rack),
                        _ => Who::Server,
                    };
                    let bytes = [&packet.header[..], &buffer[..packet.payload_bytes]].concat();
                    self.put(server, to, Who::Rank(rank), bytes);
                }
            }
            while let Some(op) = self.cores[rank as usize].poll_done() {
                self.ended[rank as usize].push(op);
            }
        }
        for server in 0..self.servers.len() {
            let mut out = Vec::new();
            if let Some(machine) = &mut self.servers[server] {
                while let Some(packet) = machine.poll_transmit() {
                    let to =
                        if packet.to.0 >= 100 { Who::Rack(packet.to.0 as usize - 100) } else { Who::Rank(packet.to.0) };
                    out.push((to, [&packet.header[..], packet.payload].concat()));
                }
            }
            for (to, bytes) in out {
                self.put(server, to, Who::Server, bytes);
            }
        }
    }

    fn arrive(&mut self, server: usize, to: Who, from: Who, bytes: &[u8]) -> Result<(), Trouble> {
        match to {
            Who::Rank(rank) if self.silent.contains(&rank) => {}
            Who::Rank(rank) => {
                let endpoint = if from == Who::Server { SERVER } else { PARENT };
                let _ = self.cores[rank as usize].handle_packet(self.now, server, endpoint, bytes)?;
            }
            Who::Server => {
                let endpoint = match from {
                    Who::Rank(rank) => Endpoint(rank),
                    Who::Rack(rack) => Endpoint(100 + rack as u32),
                    Who::Server => unreachable!(),
                };
                if let Some(machine) = &mut self.servers[server] {
                    let _ = machine.handle_packet(self.now, endpoint, bytes);
                }
            }
            Who::Rack(rack) => {
                let is_push = decode(bytes).unwrap().header.kind == Kind::Push;
                if self.shape.wire == Wire::Padded && is_push {
                    assert_eq!(bytes.len(), HEADER_BYTES + PAYLOAD, "a switch takes blocks of one length");
                }
                let endpoint = match from {
                    Who::Rank(rank) => Endpoint(rank),
                    _ => Endpoint(1000),
                };
                let out: Vec<(Who, Vec<u8>)> = match self.racks[server][rack].handle_packet(endpoint, bytes) {
                    Ok(Reaction::Send { to, header, payload }) => {
                        let node = |to: &Endpoint| if to.0 == 1000 { Who::Server } else { Who::Rank(to.0) };
                        to.iter().map(|to| (node(to), [&header[..], payload].concat())).collect()
                    }
                    Ok(Reaction::Relay { to }) => to.iter().map(|to| (Who::Rank(to.0), bytes.to_vec())).collect(),
                    Ok(Reaction::Nothing) | Err(_) => Vec::new(),
                };
                for (next, bytes) in out {
                    self.put(server, next, Who::Rack(rack), bytes);
                }
            }
        }
        Ok(())
    }

    /// Goes on to the next thing that happens.
    fn step(&mut self) -> Result<(), Trouble> {
        self.transmit();
        let packet = self.wire.keys().next().map(|(at, _)| *at);
        let alive = |rank: &usize| !self.silent.contains(&(*rank as u32));
        let cores = (0..self.cores.len()).filter(alive).map(|rank| self.cores[rank].poll_timeout());
        let servers = self.servers.iter().flatten().map(Server::poll_timeout);
        let next = packet.into_iter().chain(cores).chain(servers).min().expect("there are heartbeats");
        self.now = next.max(self.now);
        while let Some(entry) = self.wire.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let (server, to, from, bytes) = entry.remove();
            self.arrive(server, to, from, &bytes)?;
        }
        for rank in 0..self.cores.len() {
            if !self.silent.contains(&(rank as u32)) {
                self.cores[rank].handle_timeout(self.now);
            }
        }
        for server in self.servers.iter_mut().flatten() {
            server.handle_timeout(self.now);
        }
        Ok(())
    }

    fn run_until(&mut self, done: impl Fn(&Network) -> bool) -> Result<(), Trouble> {
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

fn job(dtype: DType, op: ReduceOp, tensor: &mut [u8], fingerprint: u128) -> AllReduce {
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
    let mut random = fastrand::Rng::with_seed(u64::from(rank) * 1000 + op as u64);
    (0..elements)
        .map(|i| match i / 40 % 4 {
            0 => 0.0,
            1 => (random.f32() - 0.5) * 1e-39,
            2 => (random.f32() - 0.5) * 1e30,
            _ => random.f32() - 0.5,
        })
        .collect()
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
    let mut network = Network::new(shape.clone());
    let mut tensors: Vec<Vec<Vec<u8>>> = (0..shape.world)
        .map(|rank| lengths.iter().enumerate().map(|(op, len)| f32s(&value(rank, op, *len))).collect())
        .collect();
    for (rank, tensors) in tensors.iter_mut().enumerate() {
        for (op, tensor) in tensors.iter_mut().enumerate() {
            let number = network.submit(rank, job(DType::F32, ReduceOp::Sum, tensor, op as u128));
            assert_eq!(number, op as u64);
        }
    }
    let all: Vec<u64> = (0..lengths.len() as u64).collect();
    network.run_until(|network| network.ended.iter().all(|ended| *ended == all)).unwrap();
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
                        let shape = Shape { world, weights, racks: racks.clone(), wire, loss, keyed, seed };
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
            let mut network = Network::new(shape);
            let bits = |value: f32| match dtype {
                DType::F32 => value.to_ne_bytes().to_vec(),
                DType::F16 => half(value, false),
                _ => half(value, true),
            };
            let mut tensors: Vec<Vec<u8>> = (0..2).map(|rank| bits(1.0 + 2.0 * rank as f32).repeat(500)).collect();
            for (rank, tensor) in tensors.iter_mut().enumerate() {
                network.submit(rank, job(dtype, op, tensor, 3));
            }
            network.run_until(|network| network.ended.iter().all(|ended| ended.len() == 1)).unwrap();
            assert_eq!(tensors, vec![bits(expected).repeat(500); 2], "{op:?} of {dtype} as {wire:?}");
        }
    }
}

fn half(value: f32, bfloat: bool) -> Vec<u8> {
    let mut out = [0u16];
    if bfloat {
        penstock_kernels::f32_to_bf16(&mut out, &[value])
    } else {
        penstock_kernels::f32_to_f16(&mut out, &[value])
    }
    out[0].to_ne_bytes().to_vec()
}

/// A rank that means something else is noticed by all before any of its blocks is added, and told apart.
#[test]
fn a_mismatch_is_noticed_by_all() {
    let mut network = Network::new(Shape::new(3, Wire::Int32));
    let mut tensors: Vec<Vec<u8>> = (0..3).map(|rank| f32s(&vec![1.0; if rank == 1 { 100 } else { 200 }])).collect();
    for (rank, tensor) in tensors.iter_mut().enumerate() {
        let fingerprint = tensor.len() as u128;
        network.submit(rank, job(DType::F32, ReduceOp::Sum, tensor, fingerprint));
    }
    let trouble = network.run_until(|_| false).unwrap_err();
    assert!(matches!(trouble, Trouble::Mismatch { op: 0, theirs: 400 | 800 }), "{trouble:?}");
    assert_eq!(tensors[0], f32s(&[1.0; 200]), "nothing was written");
}

/// An operation that was held has its place: those behind it wait for it, and nothing reads its tensor before.
#[test]
fn held_operations_keep_their_place() {
    let mut network = Network::new(Shape::new(2, Wire::Int32));
    let mut tensors: Vec<Vec<u8>> = (0..4).map(|_| f32s(&[f32::NAN; 50])).collect();
    let (first, second) = tensors.split_at_mut(2);
    for rank in 0..2 {
        let held = AllReduce { ready: rank == 0, ..job(DType::F32, ReduceOp::Sum, &mut first[rank], 1) };
        network.submit(rank, held);
        network.submit(rank, job(DType::F32, ReduceOp::Sum, &mut second[rank], 1));
    }
    first[0].copy_from_slice(&f32s(&[1.0; 50]));
    second.iter_mut().for_each(|tensor| tensor.copy_from_slice(&f32s(&[3.0; 50])));
    network.run_until(|network| network.now > Time(200 * MILLISECOND)).unwrap();
    assert_eq!(network.ended, vec![Vec::<u64>::new(); 2]);
    assert_eq!(network.cores[0].lacks(), [Lack::Agreement]);
    first[1].copy_from_slice(&f32s(&[2.0; 50]));
    network.cores[1].release(0);
    network.run_until(|network| network.ended.iter().all(|ended| *ended == [0, 1])).unwrap();
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
        let mut network = Network::new(shape);
        let mut tensors: Vec<Vec<Vec<u8>>> =
            (0..3).map(|rank| (0..4).map(|op| f32s(&contribution(rank, op, 700))).collect()).collect();
        for (rank, tensors) in tensors.iter_mut().enumerate() {
            for (op, tensor) in tensors.iter_mut().enumerate() {
                // One of them was not even given the last one yet.
                if rank != 2 || op < 3 {
                    network.submit(rank, job(DType::F32, ReduceOp::Sum, tensor, op as u128));
                }
            }
        }
        let death = Time(network.random.u64(..6 * MILLISECOND));
        network.run_until(|network| network.now >= death).unwrap();
        network.servers[1] = None;
        network
            .run_until(|network| (0..3).all(|rank| network.cores[rank].lost_server(network.now) == Some(1)))
            .unwrap();
        let points: Vec<(u64, u64)> = network.cores.iter().map(Core::fallback_point).collect();
        let first = points.iter().map(|(first, _)| *first).min().unwrap();
        let given = points.iter().map(|(_, given)| *given).min().unwrap();
        assert_eq!(given, 3);
        for (rank, ended) in network.ended.iter().enumerate() {
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
            while network.cores[rank].first_number() < first {
                network.cores[rank].take_first();
            }
        }
        let lacks: Vec<Vec<Lack>> = network.cores.iter().map(Core::lacks).collect();
        let left: Vec<Leftover> =
            network.cores.iter_mut().filter_map(|core| core.take_first()).map(|(_, left)| left).collect();
        assert_eq!(left.len(), 3);
        for (lacks, left) in lacks.iter().zip(&left) {
            let pieces = lacks.iter().map(|lack| match lack {
                Lack::Nothing => Some(0),
                Lack::Agreement => None,
                Lack::Pieces { left, .. } => Some(*left),
            });
            // Where nothing is agreed on, nothing is counted.
            if let Some(pieces) = pieces.sum::<Option<usize>>() {
                assert_eq!(pieces, left.pieces.iter().filter(|(_, _, here)| !here).count(), "seed {seed}");
                counted += 1;
            }
        }
        for i in 0..left[0].pieces.len() {
            let (start, len, _) = left[0].pieces[i];
            let have: Vec<usize> = (0..3).filter(|rank| left[*rank].pieces[i].2).collect();
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
