//! One suite for all media: every collective, over real sockets, between engines in one process.

use penstock_engine::fingerprint::{Fingerprint, Layout, Name};
use penstock_engine::plan::{Collective, Splits};
use penstock_engine::{ANY_SOURCE, Call, Config, Contact, Engine, Group, GroupSpec, Held, Ticket};
use penstock_types::{DType, Failure, FailureKind, Generation, GroupId, Priority, ReduceOp};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How the ranks of a test reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Medium {
    Tcp {
        streams: u16,
        checksum: bool,
    },
    Memory,
    /// On one host, but no rank can read another's memory.
    LocalSocket,
    /// Every other rank shares memory with its like; each of the rest counts as on a host of its own.
    Mixed,
}

const MEDIA: [Medium; 6] = [
    Medium::Tcp { streams: 1, checksum: false },
    Medium::Tcp { streams: 8, checksum: false },
    Medium::Tcp { streams: 3, checksum: true },
    Medium::Memory,
    Medium::LocalSocket,
    Medium::Mixed,
];

fn config(rank: u32, medium: Medium) -> Config {
    let (streams, checksum) = match medium {
        Medium::Tcp { streams, checksum } => (streams, checksum),
        Medium::Memory | Medium::LocalSocket => (1, false),
        Medium::Mixed => (2, false),
    };
    Config {
        rank,
        host: "test".into(),
        generation: Generation(1),
        addresses: vec!["127.0.0.1".parse().unwrap()],
        ports: 0..=0,
        streams,
        io_threads: io_threads(rank),
        streams_within_host: streams,
        shared_memory: match medium {
            Medium::Tcp { .. } => false,
            Medium::Memory | Medium::LocalSocket => true,
            Medium::Mixed => rank.is_multiple_of(2),
        },
        checksum,
        dead_after: Duration::from_secs(4),
        socket_buffer_bytes: 0,
        ptracer: penstock_engine::Ptracer::default(),
        flight_recorder: None,
    }
}

/// How many I/O threads a rank has: what `PENSTOCK_IO_THREADS` says, or 1, 2 and 4 by turns.
fn io_threads(rank: u32) -> usize {
    let chosen = std::env::var("PENSTOCK_IO_THREADS").map(|text| text.parse().expect("a number"));
    chosen.unwrap_or([1, 2, 4][rank as usize % 3])
}

/// A world of engines, all in one group.
struct World {
    engines: Vec<Engine>,
    groups: Vec<Group>,
}

fn world(size: u32, medium: Medium) -> World {
    let engines: Vec<Engine> = (0..size).map(|rank| Engine::start(&config(rank, medium)).expect("starts")).collect();
    let (groups, tickets) = join(&engines, medium, |_| b"secret".to_vec());
    for ticket in tickets {
        wait(&ticket).expect("joined");
    }
    World { engines, groups }
}

/// Tests that mostly wait run their cases at the same time.
fn side_by_side<T: Send>(cases: impl IntoIterator<Item = T>, test: impl Fn(T) + Sync) {
    let test = &test;
    std::thread::scope(|scope| cases.into_iter().for_each(|case| drop(scope.spawn(move || test(case)))));
}

/// What the ranks tell each other of how to reach them.
fn contacts(engines: &[Engine], medium: Medium) -> Vec<Contact> {
    let contacts = engines.iter().map(|engine| engine.contact().clone());
    match medium {
        // Nothing can be read there: the first page is never mapped.
        Medium::LocalSocket => contacts.map(|contact| Contact { memory_epoch: 8, ..contact }).collect(),
        Medium::Tcp { .. } | Medium::Memory | Medium::Mixed => contacts.collect(),
    }
}

fn join(engines: &[Engine], medium: Medium, secret: impl Fn(u32) -> Vec<u8>) -> (Vec<Group>, Vec<Ticket>) {
    join_as(next_id(), engines, &contacts(engines, medium), secret)
}

fn next_id() -> GroupId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    GroupId(NEXT.fetch_add(1, Ordering::Relaxed))
}

fn join_as(
    id: GroupId,
    engines: &[Engine],
    members: &[Contact],
    secret: impl Fn(u32) -> Vec<u8>,
) -> (Vec<Group>, Vec<Ticket>) {
    engines
        .iter()
        .enumerate()
        .map(|(rank, engine)| {
            engine.join(GroupSpec {
                id,
                generation: Generation(1),
                rank: rank as u32,
                members: members.to_vec(),
                secret: secret(rank as u32),
                algorithm: None,
                name: "test".into(),
            })
        })
        .unzip()
}

fn wait(ticket: &Ticket) -> Result<(), Failure> {
    ticket.wait(Some(Duration::from_secs(30))).expect("ends within 30 s")
}

fn call(collective: Collective, name: Name, bytes: u64, input: &[u32], output: &mut [u32]) -> Call {
    Call {
        collective,
        fingerprint: Fingerprint::new(name, Some(ReduceOp::Sum), DType::I32, collective.named_rank(), bytes / 4),
        dtype: DType::I32,
        op: ReduceOp::Sum,
        bytes,
        splits: None,
        input: input.as_ptr().cast(),
        output: output.as_mut_ptr().cast(),
        tag: 0,
        coflow: 0,
        priority: Priority(0),
        hold: false,
        timeout: 20_000_000_000,
        keep: None,
    }
}

/// A send or receive, which names the same operation on both sides.
fn message(collective: Collective, bytes: u64, input: &[u32], output: &mut [u32]) -> Call {
    let fingerprint = Fingerprint::new(Name::PointToPoint, None, DType::I32, None, bytes / 4);
    Call { fingerprint, ..call(collective, Name::PointToPoint, bytes, input, output) }
}

/// A value that tells where it came from.
fn value(rank: u32, index: usize) -> u32 {
    (rank + 1).wrapping_mul(1_000_003).wrapping_add(index as u32)
}

fn filled(rank: u32, len: usize) -> Vec<u32> {
    (0..len).map(|index| value(rank, index)).collect()
}

/// Runs one operation on every rank and returns the outputs.
fn run(
    world: &World,
    collective: impl Fn(u32) -> Collective,
    name: Name,
    bytes: u64,
    inputs: &[Vec<u32>],
    outputs: &mut [Vec<u32>],
    splits: impl Fn(u32) -> Option<Splits>,
) {
    let tickets: Vec<Ticket> = world
        .groups
        .iter()
        .enumerate()
        .map(|(rank, group)| {
            let mut call = call(collective(rank as u32), name, bytes, &inputs[rank], &mut outputs[rank]);
            call.splits = splits(rank as u32);
            // SAFETY: the buffers outlive the wait below.
            unsafe { group.start(call) }
        })
        .collect();
    for (rank, ticket) in tickets.iter().enumerate() {
        wait(ticket).unwrap_or_else(|error| panic!("{name:?} of {bytes} bytes on rank {rank}: {error}"));
    }
}

/// Below and above what is sent eagerly, by reference, and in one segment.
const SIZES: [usize; 7] = [0, 1, 1001, 3001, 5000, 20_000, 700_003];

/// All-reduce: every rank holds the sum of all, for every medium, world and size.
#[test]
fn all_reduce() {
    side_by_side(MEDIA, |medium| {
        for size in [1, 2, 3, 4, 7] {
            let world = world(size, medium);
            for len in SIZES {
                let mut outputs: Vec<_> = (0..size).map(|rank| filled(rank, len)).collect();
                let none = vec![Vec::new(); size as usize];
                let bytes = 4 * len as u64;
                run(&world, |_| Collective::AllReduce, Name::AllReduce, bytes, &none, &mut outputs, |_| None);
                let expected: Vec<u32> = (0..len)
                    .map(|index| (0..size).fold(0u32, |sum, rank| sum.wrapping_add(value(rank, index))))
                    .collect();
                for (rank, output) in outputs.iter().enumerate() {
                    assert!(*output == expected, "{medium:?}, {size} ranks, {len} elements, rank {rank}");
                }
            }
        }
    });
}

/// Reduce-scatter and all-gather: every rank gets its chunk, every rank gets all chunks; inputs stay as they are.
#[test]
fn reduce_scatter_and_all_gather() {
    side_by_side(MEDIA, |medium| {
        for size in [1, 2, 3, 4] {
            let world = world(size, medium);
            for len in SIZES {
                let whole = len * size as usize;
                let inputs: Vec<_> = (0..size).map(|rank| filled(rank, whole)).collect();
                let mut outputs = vec![vec![0; len]; size as usize];
                let bytes = 4 * whole as u64;
                let kept = inputs.clone();
                run(&world, |_| Collective::ReduceScatter, Name::ReduceScatter, bytes, &inputs, &mut outputs, |_| None);
                assert!(inputs == kept, "an input was written");
                for (rank, output) in outputs.iter().enumerate() {
                    for (at, got) in output.iter().enumerate() {
                        let index = rank * len + at;
                        let expected = (0..size).fold(0u32, |sum, rank| sum.wrapping_add(value(rank, index)));
                        assert_eq!(*got, expected, "{medium:?}, {size} ranks, {len} elements, rank {rank}, at {at}");
                    }
                }
                let inputs: Vec<_> = (0..size).map(|rank| filled(rank, len)).collect();
                let mut outputs = vec![vec![0; whole]; size as usize];
                run(&world, |_| Collective::AllGather, Name::AllGather, bytes, &inputs, &mut outputs, |_| None);
                let expected: Vec<u32> = inputs.concat();
                assert!(outputs.iter().all(|output| *output == expected), "{medium:?}, {size} ranks, {len}");
            }
        }
    });
}

/// Broadcast, reduce, gather and scatter, from and to every root; ranks that are not the root keep what they have.
#[test]
fn rooted() {
    side_by_side(MEDIA, |medium| {
        for size in [2, 3, 4] {
            let world = world(size, medium);
            for (len, root) in SIZES.into_iter().flat_map(|len| (0..size).map(move |root| (len, root))) {
                let bytes = 4 * len as u64;
                let none = vec![Vec::new(); size as usize];
                let context = format!("{medium:?}, {size} ranks, {len} elements, root {root}");

                let mut outputs: Vec<_> = (0..size).map(|rank| filled(rank, len)).collect();
                run(&world, |_| Collective::Broadcast { root }, Name::Broadcast, bytes, &none, &mut outputs, |_| None);
                assert!(outputs.iter().all(|output| *output == filled(root, len)), "broadcast: {context}");

                let mut outputs: Vec<_> = (0..size).map(|rank| filled(rank, len)).collect();
                run(&world, |_| Collective::Reduce { root }, Name::Reduce, bytes, &none, &mut outputs, |_| None);
                for rank in 0..size {
                    let expected: Vec<u32> = if rank == root {
                        (0..len).map(|i| (0..size).fold(0, |sum: u32, rank| sum.wrapping_add(value(rank, i)))).collect()
                    } else {
                        filled(rank, len)
                    };
                    assert!(outputs[rank as usize] == expected, "reduce: {context}, rank {rank}");
                }

                let inputs: Vec<_> = (0..size).map(|rank| filled(rank, len)).collect();
                let mut outputs: Vec<_> =
                    (0..size).map(|rank| vec![0; if rank == root { len * size as usize } else { 0 }]).collect();
                run(&world, |_| Collective::Gather { root }, Name::Gather, bytes, &inputs, &mut outputs, |_| None);
                assert!(outputs[root as usize] == inputs.concat(), "gather: {context}");

                let whole = filled(root, len * size as usize);
                let inputs: Vec<_> =
                    (0..size).map(|rank| if rank == root { whole.clone() } else { Vec::new() }).collect();
                let mut outputs = vec![vec![0; len]; size as usize];
                run(&world, |_| Collective::Scatter { root }, Name::Scatter, bytes, &inputs, &mut outputs, |_| None);
                assert!(outputs.concat() == whole, "scatter: {context}");
            }
        }
    });
}

/// All-to-all with unequal parts, some of them empty.
#[test]
fn all_to_all() {
    side_by_side(MEDIA, |medium| {
        for size in [2, 3, 4] {
            let world = world(size, medium);
            for unit in [0, 1, 1001, 100_003] {
                // Rank `a` sends `(a + 2 b) % 3 * unit` elements to rank `b`.
                let part = |from: u32, to: u32| ((from + 2 * to) % 3) as usize * unit;
                let inputs: Vec<_> =
                    (0..size).map(|from| filled(from, (0..size).map(|to| part(from, to)).sum())).collect();
                let mut outputs: Vec<_> =
                    (0..size).map(|to| vec![0; (0..size).map(|from| part(from, to)).sum()]).collect();
                let splits = |rank: u32| {
                    Some(Splits {
                        input: (0..size).map(|to| 4 * part(rank, to) as u64).collect(),
                        output: (0..size).map(|from| 4 * part(from, rank) as u64).collect(),
                    })
                };
                run(&world, |_| Collective::AllToAll, Name::AllToAll, 0, &inputs, &mut outputs, splits);
                for to in 0..size {
                    let mut expected: Vec<u32> = Vec::new();
                    for from in 0..size {
                        let start: usize = (0..to).map(|before| part(from, before)).sum();
                        expected.extend(&inputs[from as usize][start..start + part(from, to)]);
                    }
                    assert!(outputs[to as usize] == expected, "{medium:?}, {size} ranks, unit {unit}, rank {to}");
                }
            }
        }
    });
}

/// Ranks of an all-to-all that disagree on what passes between two of them both learn it at once, and which two: whether one
/// side is empty or both are not, with short parts and long ones, whoever comes first.
#[test]
fn all_to_all_that_disagrees() {
    side_by_side(MEDIA, |medium| {
        for [sent, expected] in [[5, 0], [0, 5], [5, 6], [700_003, 0], [0, 700_003], [700_003, 700_002], [5, 700_003]] {
            for first in [0, 1] {
                let world = world(3, medium);
                // Rank 0 sends `sent` elements to rank 1, which expects others; every other part is 7 long.
                let splits = |rank: usize| {
                    let mut parts = [[28; 3], [28; 3]];
                    match rank {
                        0 => parts[0][1] = 4 * sent,
                        1 => parts[1][0] = 4 * expected,
                        _ => {}
                    }
                    Splits { input: parts[0].to_vec(), output: parts[1].to_vec() }
                };
                let mut buffers = vec![vec![0; 14 + 700_003]; 6];
                let mut tickets = [const { None }; 3];
                for rank in [first, 1 - first, 2] {
                    let [input, output] = buffers.get_disjoint_mut([rank, rank + 3]).expect("two");
                    let mut call = call(Collective::AllToAll, Name::AllToAll, 0, input, output);
                    call.fingerprint = Fingerprint::new(Name::AllToAll, None, DType::I32, None, 0);
                    call.splits = Some(splits(rank));
                    // SAFETY: the buffers outlive the waits below.
                    tickets[rank] = Some(unsafe { world.groups[rank].start(call) });
                }
                let context = format!("{medium:?}, {sent} for {expected}, rank {first} first");
                for (rank, ticket) in tickets.iter().flatten().enumerate().take(2) {
                    let ended = ticket.wait(Some(Duration::from_secs(10))).expect("ends at once");
                    let failure = ended.expect_err(&format!("{context}: rank {rank} succeeded"));
                    assert_eq!(failure.kind, FailureKind::Mismatch, "{context}: {failure}");
                    let [sends, to] =
                        [format!("sends {sent} elements to rank 1"), format!("which expects {expected}.")];
                    assert!(failure.message.contains(&sends) && failure.message.contains(&to), "{context}: {failure}");
                }
                // Nothing touches the buffers after this.
                drop(world);
            }
        }
    });
}

/// What a rank reads from others' memory is counted, by the peer that it belongs to and in all: of a send the receiver reads all; of
/// an all-reduce each rank reads what of every other's part it adds, and the others' sums. Through sockets nothing is read.
#[test]
fn reads_of_memory_are_counted() {
    side_by_side([Medium::Memory, Medium::LocalSocket, MEDIA[0]], |medium| {
        // Segments of 64 KiB without a rest, which might be short enough to be copied.
        const LEN: usize = 3 << 16;
        let of_memory = |bytes: u64| if medium == Medium::Memory { bytes } else { 0 };
        let world = world(3, medium);
        let counts = || -> Vec<(u64, Vec<(u32, u64)>)> {
            let of = |engine: &Engine| {
                let stats = engine.stats().expect("it runs");
                assert_eq!(stats.memory_read_bytes, engine.memory_read_bytes());
                let mut peers: Vec<_> = stats.peers.iter().map(|peer| (peer.rank, peer.memory_read_bytes)).collect();
                peers.sort_unstable();
                (stats.memory_read_bytes, peers)
            };
            world.engines.iter().map(of).collect()
        };
        let none = [(0, vec![(1, 0), (2, 0)]), (0, vec![(0, 0), (2, 0)]), (0, vec![(0, 0), (1, 0)])];
        let small = vec![vec![0u32; 1000]; 3];
        run(&world, |_| Collective::AllReduce, Name::AllReduce, 4000, &small, &mut small.clone(), |_| None);
        assert_eq!(counts(), none, "{medium:?}: short messages are copied");

        let (data, mut received) = (filled(0, LEN), vec![0; LEN]);
        let send = message(Collective::Send { to: 1 }, 4 * LEN as u64, &data, &mut []);
        let receive = message(Collective::Recv { from: 0 }, 4 * LEN as u64, &[], &mut received);
        // SAFETY: the buffers outlive the waits.
        let tickets = unsafe { [world.groups[0].start(send), world.groups[1].start(receive)] };
        tickets.iter().for_each(|ticket| wait(ticket).expect("it ends"));
        let sent = of_memory(4 * LEN as u64);
        assert_eq!(counts()[1], (sent, vec![(0, sent), (2, 0)]), "{medium:?}");

        let inputs: Vec<_> = (0..3).map(|rank| filled(rank, LEN)).collect();
        let mut outputs = vec![vec![0; LEN]; 3];
        run(&world, |_| Collective::AllReduce, Name::AllReduce, 4 * LEN as u64, &inputs, &mut outputs, |_| None);
        // Two thirds of the tensor twice: once to add, once as sums.
        let reduced = of_memory(4 * 4 * LEN as u64 / 3);
        let totals: Vec<u64> = counts().iter().map(|(all, _)| *all).collect();
        assert_eq!(totals, [reduced, sent + reduced, reduced], "{medium:?}");
        for (all, peers) in counts() {
            assert_eq!(peers.iter().map(|(_, bytes)| bytes).sum::<u64>(), all, "{medium:?}");
        }
    });
}

/// Beyond the eager credit a short message stays with its sender, whose operation stays open until the receiver has it, also one
/// without bytes; what ended before is delivered, and the engine's memory stays bounded.
#[test]
fn short_messages_wait_for_credit() {
    let cases = [(2000usize, 1000usize, 100..400), (9000, 0, 8000..8193)];
    let cases = MEDIA.into_iter().flat_map(|medium| cases.clone().map(|case| (medium, case)));
    side_by_side(cases, |(medium, (count, len, on_credit))| {
        let world = world(2, medium);
        let sent: Vec<_> = (0..count).map(|message| filled(message as u32, len)).collect();
        let send = |data: &Vec<u32>| {
            let call = message(Collective::Send { to: 1 }, 4 * len as u64, data, &mut []);
            // SAFETY: the buffers outlive the waits below.
            unsafe { world.groups[0].start(call) }
        };
        let tickets: Vec<Ticket> = sent.iter().map(send).collect();
        let memory = || world.engines[0].stats().expect("it runs").memory_bytes;
        assert!(memory() < 4 << 20, "{medium:?}: {} bytes", memory());
        let ended = tickets.iter().filter(|ticket| ticket.result().is_some()).count();
        assert!(on_credit.contains(&ended), "{medium:?}: {ended} of {len} elements ended without a receiver");
        let mut received = vec![vec![0; len]; count];
        let receive = |output: &mut Vec<u32>| {
            let call = message(Collective::Recv { from: 0 }, 4 * len as u64, &[], output);
            // SAFETY: as above.
            unsafe { world.groups[1].start(call) }
        };
        let receipts: Vec<Ticket> = received.iter_mut().map(receive).collect();
        for ticket in tickets.iter().chain(&receipts) {
            wait(ticket).unwrap_or_else(|error| panic!("{medium:?}: {error}"));
        }
        assert!(received == sent, "{medium:?}");
        assert!(memory() < 4 << 20, "{medium:?}: {} bytes", memory());
    });
}

/// Two ranks that send to each other more than the credit before they receive are both named at the time-out.
#[test]
fn ranks_that_block_each_other_are_named() {
    side_by_side([MEDIA[1], Medium::Memory], |medium| {
        for (count, len) in [(400, 1000), (1, 700_003)] {
            let world = world(2, medium);
            let data = filled(0, len);
            let mut tickets = Vec::new();
            for rank in 0..2u32 {
                for _ in 0..count {
                    let to = Collective::Send { to: 1 - rank };
                    let mut call = call(to, Name::PointToPoint, 4 * len as u64, &data, &mut []);
                    call.fingerprint = Fingerprint::new(Name::PointToPoint, None, DType::I32, None, len as u64);
                    call.timeout = 2_000_000_000;
                    // SAFETY: the buffer outlives the waits below.
                    tickets.push(unsafe { world.groups[rank as usize].start(call) });
                }
            }
            let failures: Vec<Failure> = tickets.iter().filter_map(|ticket| wait(ticket).err()).collect();
            assert!(failures.len() >= 2, "{medium:?}");
            for failure in failures {
                assert_eq!(failure.kind, FailureKind::Timeout, "{medium:?}: {failure}");
                assert!(failure.message.contains("block each other"), "{medium:?}: {failure}");
            }
        }
    });
}

/// Messages with tags meet by tag and order, whatever the order of posting; large ones wait for their receiver.
#[test]
fn send_and_receive() {
    for medium in MEDIA {
        let world = world(2, medium);
        for len in [1, 1001, 700_003] {
            let bytes = 4 * len as u64;
            let sent: Vec<_> = (0..6).map(|message| filled(message, len)).collect();
            let mut received = vec![vec![0; len]; 6];
            let mut tickets = Vec::new();
            for (message, data) in sent.iter().enumerate() {
                let mut call = call(Collective::Send { to: 1 }, Name::PointToPoint, bytes, data, &mut []);
                call.fingerprint = Fingerprint::new(Name::PointToPoint, None, DType::I32, None, len as u64);
                call.tag = message as u32 % 3;
                // SAFETY: the buffers outlive the waits below.
                tickets.push(unsafe { world.groups[0].start(call) });
            }
            // The receiver posts the tags backwards.
            for tag in [2u32, 1, 0] {
                for turn in 0..2 {
                    let output = &mut received[tag as usize + 3 * turn];
                    let mut call = call(Collective::Recv { from: 0 }, Name::PointToPoint, bytes, &[], output);
                    call.fingerprint = Fingerprint::new(Name::PointToPoint, None, DType::I32, None, len as u64);
                    call.tag = tag;
                    // SAFETY: as above.
                    tickets.push(unsafe { world.groups[1].start(call) });
                }
            }
            for ticket in tickets {
                wait(&ticket).unwrap_or_else(|error| panic!("{medium:?}, {len}: {error}"));
            }
            assert!(received == sent, "{medium:?}, {len} elements");
        }
    }
}

fn start(group: &Group, collective: Collective, tag: u32, buffer: &mut [u32]) -> Ticket {
    let call = message(collective, 4 * buffer.len() as u64, &[], buffer);
    // SAFETY: the callers' buffers outlive their waits.
    unsafe { group.start(Call { tag, input: call.output, ..call }) }
}

/// Receives from any source and from named ranks, posted before and after the messages come, take them as a queue says: a message
/// goes to the receive that was posted first among those of its tag that fit, and those of one sender come in order. As a
/// receive tells its source, the order of each pair is known: the messages of a rank must fill the receives that took from it in
/// the order of posting. Sizes are those below and above what is sent at once.
#[test]
fn receives_from_any_source() {
    side_by_side(MEDIA, |medium| {
        for seed in 0..if cfg!(debug_assertions) { 6 } else { 12 } {
            let mut random = fastrand::Rng::with_seed(seed);
            let size = random.u32(2..=4);
            let world = world(size, medium);
            let lens: Vec<usize> = (0..3).map(|_| random.choice(SIZES).expect("some")).collect();
            // What each rank sends to rank 0, by tag.
            let counts: Vec<[usize; 3]> = (1..size).map(|_| std::array::from_fn(|_| random.usize(0..5))).collect();
            let text = |at: &str| format!("seed {seed}, {medium:?}, {size} ranks, {lens:?} elements, {counts:?}: {at}");
            let mut sends: Vec<(u32, u32, Vec<u32>)> = Vec::new();
            let mut receives: Vec<(u32, u32, Vec<u32>)> = Vec::new();
            for (rank, counts) in (1..).zip(&counts) {
                for (tag, count) in (0..).zip(counts) {
                    for turn in 0..*count {
                        let data = filled(100 * rank + turn as u32, lens[tag as usize]);
                        sends.push((rank, tag, data));
                        let named = random.u32(0..3) == 0;
                        receives.push((if named { rank } else { ANY_SOURCE }, tag, vec![0; lens[tag as usize]]));
                    }
                }
            }
            random.shuffle(&mut receives);
            let mut posts: Vec<bool> = (0..2 * sends.len()).map(|at| at < sends.len()).collect();
            random.shuffle(&mut posts);
            let (mut sending, mut receiving) = (sends.iter_mut(), receives.iter_mut());
            let (mut sent, mut received) = (Vec::new(), Vec::new());
            for is_send in posts {
                if is_send {
                    let (rank, tag, data) = sending.next().expect("as many");
                    sent.push(start(&world.groups[*rank as usize], Collective::Send { to: 0 }, *tag, data));
                } else {
                    let (from, tag, data) = receiving.next().expect("as many");
                    let ticket = start(&world.groups[0], Collective::Recv { from: *from }, *tag, data);
                    received.push((*from, *tag, ticket));
                }
            }
            // A receive from any source may have taken what a named one behind it needs: then a message is left for nobody.
            let mut left: Vec<[usize; 3]> = counts.clone();
            let mut is_stuck = false;
            let mut sources = Vec::new();
            for (from, tag, ticket) in &received {
                let ended = match *from {
                    ANY_SOURCE => ticket.wait(Some(Duration::from_secs(10))),
                    from if left[from as usize - 1][*tag as usize] == 0 => {
                        is_stuck = true;
                        break;
                    }
                    _ => ticket.wait(Some(Duration::from_secs(10))),
                };
                match ended {
                    Some(result) => result.unwrap_or_else(|error| panic!("{}", text(&error.to_string()))),
                    None => panic!("{}", text("a receive has not ended")),
                }
                let source = if *from == ANY_SOURCE { ticket.source().expect("it has ended") } else { *from };
                left[source as usize - 1][*tag as usize] -= 1;
                sources.push(source);
            }
            if !is_stuck {
                for ticket in &sent {
                    wait(ticket).unwrap_or_else(|error| panic!("{}", text(&error.to_string())));
                }
                let held = world.engines[0].stats().expect("it runs").held;
                assert_eq!((held.operations, held.early_messages), (0, 0), "{}", text("something is left"));
            }
            drop(world);
            let mut next: std::collections::HashMap<(u32, u32), usize> = std::collections::HashMap::new();
            for (source, (_, tag, data)) in sources.iter().zip(&receives) {
                let turn = next.entry((*source, *tag)).or_default();
                let expected = filled(100 * source + *turn as u32, lens[*tag as usize]);
                assert!(*data == expected, "{}", text(&format!("message {turn} of rank {source} under tag {tag}")));
                *turn += 1;
            }
        }
    });
}

/// A receive from any source takes what came first; what is posted behind it under its tag waits for its choice, and what is posted
/// under another one does not.
#[test]
fn receives_take_turns() {
    side_by_side(MEDIA, |medium| {
        for len in [0, 1, 3001, 700_003] {
            let world = world(3, medium);
            let mut buffers: Vec<Vec<u32>> = (0..4).map(|_| vec![0; len]).collect();
            let [any, named, other, late] = &mut buffers[..] else { unreachable!() };
            let any = start(&world.groups[0], Collective::Recv { from: ANY_SOURCE }, 0, any);
            let named = start(&world.groups[0], Collective::Recv { from: 1 }, 0, named);
            let other = start(&world.groups[0], Collective::Recv { from: 1 }, 1, other);
            assert_eq!(held(&world)[0].operations, 3);
            let mut sent: Vec<_> = (0..4).map(|message| filled(message, len)).collect();
            let mut send = |rank: u32, tag, at: usize| {
                start(&world.groups[rank as usize], Collective::Send { to: 0 }, tag, &mut sent[at])
            };
            wait(&send(1, 1, 0)).expect("under another tag");
            wait(&other).expect("as above");
            assert_eq!((any.source(), any.result().is_none(), named.result().is_none()), (None, true, true));
            wait(&send(1, 0, 1)).expect("taken");
            wait(&any).expect("it was first");
            assert!(any.source() == Some(1) && named.result().is_none(), "{medium:?}, {len}: {:?}", any.source());
            wait(&send(1, 0, 2)).expect("taken");
            wait(&named).expect("its turn");
            // What came before it was posted.
            let send = send(2, 0, 3);
            until(&world, |now| now[0].early_messages > 0);
            let late = start(&world.groups[0], Collective::Recv { from: ANY_SOURCE }, 0, late);
            wait(&late).expect("it is here");
            wait(&send).expect("taken");
            assert_eq!(late.source(), Some(2));
            drop(world);
            assert!(buffers == [filled(1, len), filled(2, len), filled(0, len), filled(3, len)], "{medium:?}, {len}");
        }
    });
}

/// A message that does not fit the receive from any source that takes it is a mismatch on both ranks, with what each of them has.
#[test]
fn any_source_that_disagrees() {
    side_by_side(MEDIA, |medium| {
        for (sent, expected) in [(10, 11), (300_000, 300_001), (10, 300_000), (300_000, 10), (0, 5), (5, 0)] {
            for posted_first in [false, true] {
                let world = world(3, medium);
                let (mut data, mut buffer) = (filled(0, sent), vec![0; expected]);
                let receive =
                    |buffer: &mut Vec<u32>| start(&world.groups[0], Collective::Recv { from: ANY_SOURCE }, 0, buffer);
                let early = posted_first.then(|| receive(&mut buffer));
                // Its failure is heard of where the send has ended.
                let mut third = vec![0];
                let watch = start(&world.groups[2], Collective::Recv { from: ANY_SOURCE }, 0, &mut third);
                let send = start(&world.groups[2], Collective::Send { to: 0 }, 0, &mut data);
                let receipt = early.unwrap_or_else(|| {
                    until(&world, |now| now[0].early_messages > 0);
                    receive(&mut buffer)
                });
                for ticket in [&receipt, &watch] {
                    let failure = wait(ticket).expect_err("the sizes differ");
                    assert_eq!(failure.kind, FailureKind::Mismatch, "{medium:?}, {sent}, {expected}: {failure}");
                    let text = failure.to_string();
                    assert!([sent, expected].iter().all(|len| text.contains(&format!("{len} x int32"))), "{text}");
                    assert!(text.contains("rank 0") && text.contains("rank 2"), "{text}");
                }
                let _ = wait(&send);
            }
        }
    });
}

/// A receive from any source that gets no message ends at its time-out, or when the group fails, or is left, or when all others have
/// left: with their last messages taken, and not before. What waits behind it ends with it.
#[test]
fn any_source_without_a_message() {
    side_by_side(MEDIA, |medium| {
        let post = |world: &World, buffers: &mut [Vec<u32>; 2]| {
            let [any, named] = buffers;
            [(ANY_SOURCE, any), (1, named)]
                .map(|(from, buffer)| start(&world.groups[0], Collective::Recv { from }, 0, buffer))
        };
        let fails = |tickets: &[Ticket], kind: FailureKind, parts: &[&str]| {
            for (ticket, own) in tickets.iter().zip(["from any source of group", "from rank 1 of group"]) {
                let failure = wait(ticket).expect_err("no message comes");
                let text = failure.to_string();
                assert_eq!(failure.kind, kind, "{medium:?}: {text}");
                assert!(parts.iter().chain([&own]).all(|part| text.contains(part)), "{medium:?}, {parts:?}: {text}");
            }
        };
        let mut buffers = [vec![7; 10], vec![7; 10]];

        let patient = world(3, medium);
        let mut short = vec![0; 10];
        let call = message(Collective::Recv { from: ANY_SOURCE }, 40, &[], &mut short);
        // SAFETY: the buffer outlives the wait.
        let late = unsafe { patient.groups[0].start(Call { timeout: 300_000_000, ..call }) };
        let behind = start(&patient.groups[0], Collective::Recv { from: 1 }, 0, &mut buffers[1]);
        let parts = ["Timed out after 0.3 s, waiting for a message from any of the other ranks: rank "];
        fails(&[late, behind], FailureKind::Timeout, &parts);

        let aborted = world(3, medium);
        let tickets = post(&aborted, &mut buffers);
        until(&aborted, |now| now[0].operations == 2);
        aborted.groups[2].abort("a test wants it");
        fails(&tickets, FailureKind::Closed, &["a test wants it", "rank 2"]);

        let left = world(3, medium);
        let tickets = post(&left, &mut buffers);
        left.groups[0].leave();
        fails(&tickets, FailureKind::Closed, &["destroyed the group while operations were running"]);
        until(&left, |now| now[0].operations == 0);

        // One after the other, by leaving the group alone, or altogether; the last one with a message on its way.
        for leaves_the_job in [false, true] {
            let mut world = world(3, medium);
            let mut two = [vec![0; 10], vec![0; 10]];
            let tickets =
                two.each_mut().map(|buffer| start(&world.groups[0], Collective::Recv { from: ANY_SOURCE }, 0, buffer));
            let mut data = filled(3, 10);
            for rank in [1, 2] {
                if rank == 2 {
                    wait(&start(&world.groups[2], Collective::Send { to: 0 }, 0, &mut data)).expect("short");
                }
                world.groups[rank].leave();
                if leaves_the_job {
                    drop(world.engines.remove(1));
                }
            }
            wait(&tickets[0]).expect("rank 2 has sent before it left");
            assert_eq!(tickets[0].source(), Some(2));
            let parts: &[&str] = if leaves_the_job { &["has left the job"] } else { &["has left the group"] };
            fails(&tickets[1..], FailureKind::PeerLost, parts);
            let failure = wait(&tickets[1]).expect_err("as above").to_string();
            assert!(failure.contains("rank 1 (") && failure.contains("rank 2 ("), "{failure}");
            drop(world);
            assert_eq!(two, [filled(3, 10), vec![0; 10]]);
        }
        drop((patient, aborted, left));
        assert_eq!(buffers, [vec![7; 10], vec![7; 10]], "{medium:?}: a buffer was touched");
    });
    let alone = world(1, Medium::Memory);
    let failure =
        wait(&start(&alone.groups[0], Collective::Recv { from: ANY_SOURCE }, 0, &mut [0])).expect_err("alone");
    assert!(failure.group_lives && failure.to_string().contains("one rank"), "{failure}");
}

/// A receive from any source whose buffer is not ready has its place in the queue, and its message waits until it is; in both orders.
#[test]
fn any_source_held_until_released() {
    for medium in MEDIA {
        for (len, released_first) in [(10, true), (10, false), (300_000, true), (300_000, false)] {
            let world = world(3, medium);
            let (mut first, mut second) = (vec![7; len], vec![7; len]);
            let (mut ones, mut others) = (filled(1, len), filled(2, len));
            let call = message(Collective::Recv { from: ANY_SOURCE }, 4 * len as u64, &[], &mut first);
            // SAFETY: the buffers outlive the waits.
            let held_one = unsafe { world.groups[0].start(Call { hold: true, ..call }) };
            let free = start(&world.groups[0], Collective::Recv { from: ANY_SOURCE }, 0, &mut second);
            if released_first {
                world.groups[0].release(&held_one);
            }
            let sent = start(&world.groups[1], Collective::Send { to: 0 }, 0, &mut ones);
            until(&world, |_| held_one.source() == Some(1));
            wait(&start(&world.groups[2], Collective::Send { to: 0 }, 0, &mut others)).expect("taken");
            wait(&free).expect("it overtakes the held one");
            assert_eq!(free.source(), Some(2));
            if !released_first {
                assert!(held_one.result().is_none(), "{medium:?}, {len}");
                world.groups[0].release(&held_one);
            }
            wait(&held_one).expect("released");
            wait(&sent).expect("taken");
            assert!(first == filled(1, len) && second == filled(2, len), "{medium:?}, {len}");
        }
    }
}

/// The two directions between two ranks have nothing to do with each other: both send under one tag before they receive,
/// by one element unlike, and one asks with a long message, is heard late, and gets a short answer. Both receive later than
/// the engine's patience before it asks the other side.
#[test]
fn directions_are_apart() {
    let message = |collective, buffer: &mut Vec<u32>| {
        let bytes = 4 * buffer.len() as u64;
        let input = buffer.clone();
        let mut call = call(collective, Name::PointToPoint, bytes, &input, buffer);
        call.fingerprint = Fingerprint::new(Name::PointToPoint, None, DType::I32, None, buffer.len() as u64);
        call.input = call.output;
        call
    };
    std::thread::scope(|scope| {
        for medium in MEDIA {
            for [there, back] in [[200_000, 200_001], [200_000, 10], [10, 200_000], [2000, 2001]] {
                scope.spawn(move || {
                    let world = world(2, medium);
                    let mut sent = [filled(0, there), filled(1, back)];
                    let mut received = [vec![0; back], vec![0; there]];
                    let late = Duration::from_millis(1300);
                    let mut tickets = Vec::new();
                    for (rank, buffer) in (0u32..).zip(&mut sent) {
                        let call = message(Collective::Send { to: 1 - rank }, buffer);
                        // SAFETY: the buffers outlive the waits below.
                        tickets.push(unsafe { world.groups[rank as usize].start(call) });
                    }
                    for (rank, buffer) in (0u32..).zip(&mut received) {
                        if rank == 1 && there > 10_000 {
                            // Rank 0 has received what rank 1 sent, or waits for it, and its own message waits.
                            assert!(tickets[0].wait(Some(late)).is_none(), "{medium:?}: it ended without a receiver");
                        }
                        let call = message(Collective::Recv { from: 1 - rank }, buffer);
                        // SAFETY: as above.
                        tickets.push(unsafe { world.groups[rank as usize].start(call) });
                    }
                    for ticket in tickets {
                        wait(&ticket).unwrap_or_else(|error| panic!("{medium:?}, {there} and {back}: {error}"));
                    }
                    assert!(received == [filled(1, back), filled(0, there)], "{medium:?}, {there} and {back}");
                });
            }
        }
    });
}

/// Tensors of different memory layouts do not meet: both ranks learn in words how they differ.
#[test]
fn memory_layouts_are_compared() {
    let [permuted, wider] =
        [[1, 2, 3, 4], [1, 2, 2, 6]].map(|sizes| Layout::of(&sizes, &[0, 2, 3, 1]).expect("channels-last"));
    for medium in MEDIA {
        for layouts in [[permuted; 2], [Layout::default(), permuted], [permuted, wider]] {
            // A mismatch ends the group.
            let world = world(2, medium);
            let mut tensors = [filled(0, 24), filled(1, 24)];
            let tickets: Vec<Ticket> = (0..2)
                .map(|rank| {
                    let mut call = call(Collective::AllReduce, Name::AllReduce, 96, &[], &mut tensors[rank]);
                    call.fingerprint = call.fingerprint.with_layout(layouts[rank]);
                    // SAFETY: the buffers outlive the waits below.
                    unsafe { world.groups[rank].start(call) }
                })
                .collect();
            for ticket in tickets {
                match wait(&ticket) {
                    Ok(()) => assert_eq!(layouts[0], layouts[1], "{medium:?}"),
                    Err(failure) => {
                        assert_ne!(layouts[0], layouts[1], "{medium:?}: {failure}");
                        assert_eq!(failure.kind, FailureKind::Mismatch, "{failure}");
                        let parts: &[&str] = if layouts[1] == wider {
                            &["different memory order: with dimensions (0, 2, 3, 1) on both, but of different sizes"]
                        } else {
                            &["different memory order", "row-major on rank 0", "dimensions (0, 2, 3, 1) on rank 1"]
                        };
                        for part in parts {
                            assert!(failure.message.contains(part), "{medium:?}: {failure}");
                        }
                    }
                }
            }
        }
    }
}

/// Many operations of different sizes in flight at once, waited for in another order; a barrier at the end.
#[test]
fn many_in_flight() {
    for medium in MEDIA {
        for size in [2, 3] {
            let world = world(size, medium);
            let lens: Vec<usize> = (0..60).map(|i| [1, 100, 5_000, 60_000][i % 4] + i).collect();
            let mut outputs: Vec<Vec<Vec<u32>>> =
                (0..size).map(|rank| lens.iter().map(|len| filled(rank, *len)).collect()).collect();
            let mut tickets = Vec::new();
            for (rank, group) in world.groups.iter().enumerate() {
                for output in &mut outputs[rank] {
                    let bytes = 4 * output.len() as u64;
                    let call = call(Collective::AllReduce, Name::AllReduce, bytes, &[], output);
                    // SAFETY: the buffers outlive the waits below.
                    tickets.push(unsafe { group.start(call) });
                }
                let call = call(Collective::Barrier, Name::Barrier, 0, &[], &mut []);
                // SAFETY: a barrier has no buffers.
                tickets.push(unsafe { group.start(call) });
            }
            for ticket in tickets.iter().rev() {
                wait(ticket).unwrap_or_else(|error| panic!("{medium:?}, {size}: {error}"));
            }
            for (at, len) in lens.iter().enumerate() {
                let expected: Vec<u32> = (0..*len)
                    .map(|index| (0..size).fold(0u32, |sum, rank| sum.wrapping_add(value(rank, index))))
                    .collect();
                assert!(outputs.iter().all(|outputs| outputs[at] == expected), "{medium:?}, {size} ranks, #{at}");
            }
        }
    }
}

/// An operation that is held keeps its place in the order, and its buffer is not touched before it is released.
#[test]
fn held_until_released() {
    for medium in MEDIA {
        let world = world(2, medium);
        for len in [10, 300_000] {
            let mut first: Vec<_> = (0..2).map(|_| vec![0; len]).collect();
            let mut second: Vec<_> = (0..2).map(|rank| filled(rank, 5)).collect();
            let bytes = 4 * len as u64;
            let mut tickets = Vec::new();
            for rank in 0..2 {
                let mut held = call(Collective::AllReduce, Name::AllReduce, bytes, &[], &mut first[rank]);
                held.hold = rank == 0;
                // SAFETY: the buffers outlive the waits below.
                tickets.push(unsafe { world.groups[rank].start(held) });
                let next = call(Collective::AllReduce, Name::AllReduce, 20, &[], &mut second[rank]);
                // SAFETY: as above.
                tickets.push(unsafe { world.groups[rank].start(next) });
            }
            // The later operation overtakes the held one.
            wait(&tickets[1]).expect("not held");
            wait(&tickets[3]).expect("not held");
            assert!(tickets[0].result().is_none() && tickets[2].result().is_none(), "{medium:?}");
            first[0].copy_from_slice(&filled(7, len));
            world.groups[0].release(&tickets[0]);
            wait(&tickets[0]).expect("released");
            wait(&tickets[2]).expect("released");
            // Rank 1 contributed zeros.
            assert!(first.iter().all(|output| *output == filled(7, len)), "{medium:?}");
        }
    }
}

/// An operation whose buffer never becomes ready ends at its time-out on every rank, and says that this was why; a release
/// that comes later does nothing. The hold counts: what is released late has only the rest of its time.
#[test]
fn held_for_too_long() {
    side_by_side(MEDIA, |medium| {
        let world = world(2, medium);
        let mut outputs: Vec<_> = (0..2).map(|rank| filled(rank, 10)).collect();
        let tickets: Vec<_> = outputs
            .iter_mut()
            .zip(&world.groups)
            .enumerate()
            .map(|(rank, (output, group))| {
                let mut call = call(Collective::AllReduce, Name::AllReduce, 40, &[], output);
                if rank == 0 {
                    (call.hold, call.timeout) = (true, 300_000_000);
                }
                // SAFETY: the buffers outlive the waits below.
                unsafe { group.start(call) }
            })
            .collect();
        for (rank, ticket) in tickets.iter().enumerate() {
            let failure = wait(ticket).expect_err("never released");
            assert_eq!(failure.kind, FailureKind::Timeout, "{medium:?}, rank {rank}: {failure}");
            let text = failure.to_string();
            assert!(
                text.contains("all_reduce") && text.contains("Timed out after 0.3 s: its tensor was not ready"),
                "{text}"
            );
        }
        assert!(wait(&tickets[1]).expect_err("as above").to_string().contains("rank 0"));
        world.groups[0].release(&tickets[0]);
        assert_eq!(outputs[0], filled(0, 10), "{medium:?}: a buffer was touched that was never released");
    });
    // Held for a part of its time, and then waiting for a rank that does not come: one time-out, not two.
    let world = world(2, Medium::Memory);
    let mut output = filled(0, 10);
    let mut late = call(Collective::AllReduce, Name::AllReduce, 40, &[], &mut output);
    (late.hold, late.timeout) = (true, 2_000_000_000);
    let begun = Instant::now();
    // SAFETY: the buffer outlives the waits below.
    let ticket = unsafe { world.groups[0].start(late) };
    assert!(ticket.wait(Some(Duration::from_millis(1000))).is_none(), "it is held");
    world.groups[0].release(&ticket);
    let failure = wait(&ticket).expect_err("rank 1 does not come");
    assert!(failure.kind == FailureKind::Timeout && failure.to_string().contains("rank 1"), "{failure}");
    assert!(begun.elapsed() < Duration::from_millis(3700), "the time-out began anew: {:?}", begun.elapsed());
}

/// A rank that issues something else fails the group on every rank, and both sides are named.
#[test]
fn mismatch() {
    for medium in MEDIA {
        for len in [10usize, 300_000] {
            let world = world(3, medium);
            let mut outputs: Vec<_> = (0..3).map(|rank| filled(rank, len + usize::from(rank == 1))).collect();
            let tickets: Vec<_> = outputs
                .iter_mut()
                .zip(&world.groups)
                .map(|(output, group)| {
                    let bytes = 4 * output.len() as u64;
                    // SAFETY: the buffers outlive the waits below.
                    unsafe { group.start(call(Collective::AllReduce, Name::AllReduce, bytes, &[], output)) }
                })
                .collect();
            for (rank, ticket) in tickets.iter().enumerate() {
                let failure = wait(ticket).expect_err("the sizes differ");
                assert_eq!(failure.kind, FailureKind::Mismatch, "{medium:?}, rank {rank}: {failure}");
                assert!(!failure.group_lives);
                let text = failure.to_string();
                assert!(text.contains(&format!("{len} x int32")), "{text}");
                assert!(text.contains(&format!("{} x int32", len + 1)), "{text}");
            }
        }
    }
}

/// An operation of no bytes on one rank, and of some on another, is an error on both that names both: of the operation itself
/// where it still runs, and otherwise of the next one. Whoever comes first, with short messages and long ones.
#[test]
fn an_empty_operation_meets_another() {
    type Of = fn(usize) -> Collective;
    let kinds: [(Name, Of); 6] = [
        (Name::PointToPoint, |rank| if rank == 0 { Collective::Send { to: 1 } } else { Collective::Recv { from: 0 } }),
        (Name::PointToPoint, |rank| if rank == 1 { Collective::Send { to: 0 } } else { Collective::Recv { from: 1 } }),
        (Name::AllReduce, |_| Collective::AllReduce),
        (Name::Broadcast, |_| Collective::Broadcast { root: 0 }),
        (Name::Broadcast, |_| Collective::Broadcast { root: 1 }),
        (Name::Gather, |_| Collective::Gather { root: 1 }),
    ];
    let cases = [MEDIA[0], MEDIA[1], MEDIA[3], MEDIA[4]]
        .into_iter()
        .flat_map(|medium| kinds.into_iter().map(move |kind| (medium, kind)));
    side_by_side(cases, |(medium, (name, collective))| {
        for (len, first) in [(5, 0), (5, 1), (300_000, 0), (300_000, 1)] {
            // Rank 0 has no elements.
            let world = world(2, medium);
            let (mut inputs, mut outputs) = (vec![filled(0, len); 2], vec![vec![0; 2 * len]; 2]);
            let mut tickets = [const { None }; 2];
            for rank in [first, 1 - first] {
                let bytes = if rank == 0 { 0 } else { 4 * len as u64 };
                let mut call = call(collective(rank), name, bytes, &inputs[rank], &mut outputs[rank]);
                call.fingerprint = Fingerprint::new(name, None, DType::I32, None, bytes / 4);
                // SAFETY: the buffers outlive the waits below.
                let ticket = unsafe { world.groups[rank].start(call) };
                // A collective without bytes ends at once: so the other rank is heard after its end.
                if rank == 0 && matches!(name, Name::AllReduce | Name::Broadcast | Name::Gather) && rank == first {
                    wait(&ticket).expect("it has nothing to do");
                }
                tickets[rank] = Some(ticket);
            }
            let context = format!("{medium:?}, {name:?} of 0 and {len}, rank {first} first");
            for (rank, ticket) in tickets.iter().flatten().enumerate() {
                let began = Instant::now();
                let failure = wait(ticket).err().unwrap_or_else(|| {
                    let mut next =
                        call(Collective::Recv { from: 1 - rank as u32 }, Name::PointToPoint, 4, &[], &mut inputs[rank]);
                    next.tag = 99;
                    // SAFETY: as above.
                    wait(&unsafe { world.groups[rank].start(next) }).expect_err("the group has failed")
                });
                assert_eq!(failure.kind, FailureKind::Mismatch, "{context}, on rank {rank}: {failure}");
                let both = ["(0 x int32) on rank 0 (", &format!("({len} x int32) on rank 1 (")];
                assert!(both.iter().all(|part| failure.message.contains(part)), "{context}, on rank {rank}: {failure}");
                assert!(began.elapsed() < Duration::from_secs(5), "{context}, on rank {rank}: {:?}", began.elapsed());
            }
        }
    });
}

/// A rank that asks about an operation that has ended on another, as another operation, is told: here of gathers to two roots,
/// where the third rank has sent what it had to; and when it has left the group since.
#[test]
fn operations_that_have_ended_are_compared() {
    side_by_side(MEDIA.into_iter().flat_map(|medium| [(medium, false), (medium, true)]), |(medium, leaves)| {
        let world = world(3, medium);
        let (inputs, mut outputs) = (vec![filled(0, 5); 3], vec![vec![0; 15]; 3]);
        let mut start = |rank: usize, root: u32| {
            let call = call(Collective::Gather { root }, Name::Gather, 20, &inputs[rank], &mut outputs[rank]);
            // SAFETY: the buffers outlive the waits below.
            unsafe { world.groups[rank].start(call) }
        };
        wait(&start(2, 0)).expect("it has sent its part");
        if leaves {
            world.groups[2].leave();
        }
        let failure = wait(&start(1, 1)).expect_err("rank 2 does not send to it");
        assert_eq!(failure.kind, FailureKind::Mismatch, "{medium:?}: {failure}");
        for part in ["root 0) on rank 2 (", "root 1) on rank 1 ("] {
            assert!(failure.message.contains(part), "{medium:?}: {failure}");
        }
    });
}

/// A rank whose operations need nothing of the others ends them, leaves, and ends: one that makes another operation in the same
/// place is told both, whether it began before or begins later, and one that makes more operations is told how many there were.
#[test]
fn what_a_rank_did_before_it_left_is_compared() {
    let media = [MEDIA[0], MEDIA[1], MEDIA[3], MEDIA[4]];
    let ends = ["leaves", "leaves and ends", "ends"];
    let cases = media.into_iter().flat_map(|medium| ends.map(|end| (medium, end)));
    side_by_side(
        cases.flat_map(|(medium, end)| [(medium, end, false), (medium, end, true)]),
        |(medium, end, is_early)| {
            let context = format!("{medium:?}, rank 0 {end}, rank 1 begins early: {is_early}");
            for is_other in [true, false] {
                let mut world = world(2, medium);
                let mut output = filled(1, 5);
                let start = |group: &Group, output: &mut [u32]| {
                    // SAFETY: the buffer outlives the wait below.
                    unsafe { group.start(call(Collective::AllReduce, Name::AllReduce, 20, &[], output)) }
                };
                if is_other {
                    let call = call(Collective::AllGather, Name::AllGather, 0, &[], &mut []);
                    // SAFETY: it has no buffers.
                    wait(&unsafe { world.groups[0].start(call) }).expect("it has nothing to do");
                }
                let early = is_early.then(|| start(&world.groups[1], &mut output));
                if end != "ends" {
                    world.groups[0].leave();
                }
                if end != "leaves" {
                    drop(world.engines.remove(0));
                }
                let began = Instant::now();
                let ticket = early.unwrap_or_else(|| start(&world.groups[1], &mut output));
                let failure = wait(&ticket).expect_err("rank 0 does not reduce");
                assert!(began.elapsed() < Duration::from_secs(3), "{context}: {:?}", began.elapsed());
                let parts: &[&str] = match is_other {
                    true => &[
                        "#1 of group",
                        "all_gather(sum, 0 x int32) on rank 0 (",
                        "all_reduce(sum, 5 x int32) on rank 1 (",
                    ],
                    false => &[
                        "all_reduce(sum, 5 x int32) #1 of group",
                        "rank 0 (",
                        "has left the group",
                        "after 0 collectives",
                    ],
                };
                assert!(parts.iter().all(|part| failure.message.contains(part)), "{context}: {failure}");
                let expected = if is_other { FailureKind::Mismatch } else { FailureKind::PeerLost };
                assert_eq!(failure.kind, expected, "{context}: {failure}");
            }
        },
    );
}

/// Two ranks broadcast from different roots and leave, mostly before they have heard of each other. The third has made no
/// operation yet, and is told how the two differ.
#[test]
fn a_mismatch_of_ranks_that_have_left_reaches_the_others() {
    for (medium, round) in MEDIA.into_iter().flat_map(|medium| (0..10).map(move |round| (medium, round))) {
        let world = world(3, medium);
        let mut outputs = [filled(1, 5), filled(2, 5)];
        let tickets: Vec<_> = (1..)
            .zip(&mut outputs)
            .map(|(root, output)| {
                let call = call(Collective::Broadcast { root }, Name::Broadcast, 20, &[], output);
                // SAFETY: the buffers outlive the waits.
                unsafe { world.groups[root as usize].start(call) }
            })
            .collect();
        // Either has ended, or has heard of the other.
        for ticket in &tickets {
            let _ = wait(ticket);
        }
        world.groups[1..].iter().for_each(Group::leave);
        // It waits for both.
        let (began, mut output) = (Instant::now(), [0; 5]);
        let ticket = start(&world.groups[0], Collective::Recv { from: ANY_SOURCE }, 0, &mut output);
        let failure = wait(&ticket).expect_err("they differ");
        assert_eq!(failure.kind, FailureKind::Mismatch, "{medium:?}, round {round}: {failure}");
        for part in ["root 1) on rank 1 (", "root 2) on rank 2 ("] {
            assert!(failure.message.contains(part), "{medium:?}, round {round}: {failure}");
        }
        assert!(began.elapsed() < Duration::from_secs(5), "{medium:?}, round {round}: {:?}", began.elapsed());
    }
}

/// What an engine keeps for its caller; its end does to the memory what the memory's next owner would.
struct Lent(&'static [AtomicU32]);

impl Drop for Lent {
    fn drop(&mut self) {
        self.0.iter().for_each(|element| element.store(0xdead_beef, Ordering::SeqCst));
    }
}

/// An engine that ends while a peer may still read its memory, which is then somebody else's, says so: the peer's receive fails,
/// and never takes what lies there now. Also where nobody waits for its end.
#[test]
fn an_end_with_memory_that_is_lent() {
    const LEN: usize = 1_000_000;
    side_by_side(MEDIA.into_iter().flat_map(|medium| [(medium, false), (medium, true)]), |(medium, waits)| {
        let world = world(2, medium);
        let lent: &'static [AtomicU32] = (0..LEN as u32).map(AtomicU32::new).collect::<Vec<_>>().leak();
        let mut call = message(Collective::Send { to: 1 }, 4 * LEN as u64, &[], &mut []);
        call.input = lent.as_ptr().cast();
        call.keep = Some(Box::new(Lent(lent)));
        // SAFETY: the buffer is never freed, and written only after the engine has let go of it.
        let sent = unsafe { world.groups[0].start(call) };
        world.engines[0].begin_stop(waits);
        world.engines[0].stop();
        assert!(lent.iter().all(|element| element.load(Ordering::SeqCst) == 0xdead_beef), "{medium:?}: it is kept");
        wait(&sent).expect_err("nobody has received it");
        let mut output = vec![0; LEN];
        let call = message(Collective::Recv { from: 0 }, 4 * LEN as u64, &[], &mut output);
        // SAFETY: the buffer outlives the wait.
        let received = unsafe { world.groups[1].start(call) };
        let failure = wait(&received).expect_err("the sender has ended");
        let kinds = [FailureKind::Closed, FailureKind::PeerLost];
        assert!(kinds.contains(&failure.kind) && failure.message.contains("rank 0"), "{medium:?}: {failure}");
    });
}

/// A member that fails with its group gives its tensors back, and a receive that reads one of them later never takes what lies there
/// now: also on a rank that is still in a collective that counts, and so has not failed with the others.
#[test]
fn a_message_of_a_failed_group_is_not_taken() {
    const LEN: usize = 700_003;
    let bytes = 4 * LEN as u64;
    let [left, reader, sender] = [0, 1, 2];
    side_by_side(MEDIA.into_iter().flat_map(|medium| [(medium, false), (medium, true)]), |(medium, leaves)| {
        let world = world(3, medium);
        let (others, tickets) = join(&world.engines, medium, |_| b"secret".to_vec());
        for ticket in tickets {
            wait(&ticket).expect("joined");
        }
        // SAFETY: all buffers outlive the waits for their tickets.
        let begin = |group: &Group, call: Call| unsafe { group.start(call) };
        let mut first = vec![filled(0, 5); 3];
        let outputs = (0..3).zip(&mut first);
        let firsts: Vec<_> = outputs
            .map(|(rank, output)| {
                let call = call(Collective::Broadcast { root: 0 }, Name::Broadcast, 20, &[], output);
                begin(&world.groups[rank], Call { hold: rank == reader, ..call })
            })
            .collect();
        let mut lent = filled(2, LEN);
        let send = message(Collective::Send { to: reader as u32 }, bytes, &[], &mut []);
        let sent = begin(&world.groups[sender], Call { input: lent.as_ptr().cast(), ..send });
        wait(&firsts[left]).expect("it has sent");
        wait(&firsts[sender]).expect("it has received");
        // It answers when it has read that it is in this one, too.
        world.engines[reader].stats().expect("it runs");
        let mut second = vec![filled(0, 5); 2];
        let outputs = [left, sender].into_iter().zip(&mut second);
        let seconds: Vec<_> = outputs
            .map(|(rank, output)| {
                begin(&world.groups[rank], call(Collective::AllReduce, Name::AllReduce, 20, &[], output))
            })
            .collect();
        world.groups[left].leave();
        seconds.iter().for_each(|ticket| drop(wait(ticket).expect_err("rank 0 has left")));
        wait(&sent).expect_err("its group has failed");
        lent.fill(0xdead_beef);
        if leaves {
            world.groups[sender].leave();
        }
        let mut output = vec![0; LEN];
        let receive = message(Collective::Recv { from: sender as u32 }, bytes, &[], &mut output);
        let received = begin(&world.groups[reader], receive);
        // Messages of another group, one after the other: what is read first, and what is asked then, is answered before.
        for (from, to, len) in [(sender, reader, LEN), (reader, sender, 1), (sender, reader, 1)] {
            let (input, mut output) = (filled(3, len), vec![0; len]);
            let send = message(Collective::Send { to: to as u32 }, 4 * len as u64, &input, &mut []);
            let receive = message(Collective::Recv { from: from as u32 }, 4 * len as u64, &[], &mut output);
            let tickets = [begin(&others[from], send), begin(&others[to], receive)];
            tickets.iter().for_each(|ticket| wait(ticket).expect("this group is whole"));
        }
        // It takes nothing, and ends the group no sooner than that has ended what counts.
        let found = received.result();
        assert!(found.is_none(), "{medium:?}, the sender leaves: {leaves}: {found:?}, {:x}", output[0]);
        world.groups[reader].release(&firsts[reader]);
        wait(&firsts[reader]).unwrap_or_else(|error| panic!("{medium:?}: the others have ended it: {error}"));
        let failure = wait(&received).expect_err("the sender's group has failed");
        assert!(failure.kind == FailureKind::Closed && failure.message.contains("rank 0"), "{medium:?}: {failure}");
    });
}

/// Stands before a rank; a test can cut it.
struct Proxy {
    address: SocketAddr,
    /// Both ends of what is connected now.
    open: Arc<Mutex<Vec<TcpStream>>>,
    /// What comes is dropped.
    drops: Arc<AtomicBool>,
    /// What connects is closed.
    closed: Arc<AtomicBool>,
    /// How many connections were closed.
    turned_away: Arc<AtomicUsize>,
}

impl Proxy {
    fn to(address: SocketAddr) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let proxy = Proxy {
            address: listener.local_addr().expect("bound"),
            open: Arc::default(),
            drops: Arc::default(),
            closed: Arc::default(),
            turned_away: Arc::default(),
        };
        let (open, drops, closed) = (proxy.open.clone(), proxy.drops.clone(), proxy.closed.clone());
        let turned_away = proxy.turned_away.clone();
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Some(far) = TcpStream::connect(address).ok().filter(|_| !closed.load(Ordering::SeqCst)) else {
                    turned_away.fetch_add(1, Ordering::SeqCst);
                    continue;
                };
                let copy = |end: &TcpStream| end.try_clone().expect("a descriptor");
                open.lock().expect("sound").extend([copy(&near), copy(&far)]);
                for (mut from, mut to) in [(copy(&near), copy(&far)), (far, near)] {
                    let drops = drops.clone();
                    std::thread::spawn(move || {
                        let mut buffer = [0; 4096];
                        while let Ok(count @ 1..) = from.read(&mut buffer) {
                            if !drops.load(Ordering::SeqCst) && to.write_all(&buffer[..count]).is_err() {
                                break;
                            }
                        }
                        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                    });
                }
            }
        });
        proxy
    }

    /// The ends that are connected to engines.
    fn near_ends(&self) -> Vec<TcpStream> {
        let open = self.open.lock().expect("sound");
        open.iter().step_by(2).map(|near| near.try_clone().expect("a descriptor")).collect()
    }

    /// Cuts all streams. What connects from now on gets through, or not.
    fn cut(&self, for_good: bool) {
        self.closed.store(for_good, Ordering::SeqCst);
        let mut open = self.open.lock().expect("sound");
        for stream in open.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.drops.store(false, Ordering::SeqCst);
    }
}

/// Streams leave from neighbouring ports, so that they spread over a network's paths, also where the other rank has turned them
/// away at first, because it joined later.
#[test]
fn streams_that_were_turned_away_leave_from_neighbouring_ports() {
    let tries: Vec<Vec<u16>> = (0..5).map(|_| ports_of_streams_that_were_turned_away()).collect();
    // Other processes may have some of the ports.
    let neighbours = |ports: &Vec<u16>| ports.windows(2).filter(|pair| pair[1] - pair[0] == 2).count();
    assert!(tries.iter().filter(|ports| neighbours(ports) >= 4).count() >= 2, "{tries:?}");
}

/// The ports of eight streams, in order.
fn ports_of_streams_that_were_turned_away() -> Vec<u16> {
    let medium = Medium::Tcp { streams: 8, checksum: false };
    let engines: Vec<Engine> = (0..2).map(|rank| Engine::start(&config(rank, medium)).expect("starts")).collect();
    let mut members = contacts(&engines, medium);
    let proxies: Vec<Proxy> = members.iter().map(|member| Proxy::to(member.tcp[0])).collect();
    for (member, proxy) in members.iter_mut().zip(&proxies) {
        member.tcp = vec![proxy.address];
        proxy.closed.store(true, Ordering::SeqCst);
    }
    let (_groups, tickets) = join_as(next_id(), &engines, &members, |_| b"secret".to_vec());
    // One of the two connects, all its streams.
    while proxies.iter().map(|proxy| proxy.turned_away.load(Ordering::SeqCst)).sum::<usize>() < 8 {
        std::thread::yield_now();
    }
    for proxy in &proxies {
        proxy.closed.store(false, Ordering::SeqCst);
    }
    for ticket in tickets {
        wait(&ticket).expect("joined");
    }
    let mut ports = Vec::new();
    while ports.len() < 8 {
        let open = proxies.iter().flat_map(|proxy| proxy.near_ends());
        ports = open.filter_map(|near| Some(near.peer_addr().ok()?.port())).collect();
    }
    ports.sort_unstable();
    ports
}

/// An engine that ends with a message that nobody has taken yet, and loses all streams to that rank, connects again and
/// delivers it; where it cannot, it ends soon.
#[test]
fn an_end_without_streams() {
    let medium = Medium::Tcp { streams: 2, checksum: false };
    for (for_good, turned) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut engines: Vec<Engine> =
            (0..2).map(|rank| Engine::start(&config(rank, medium)).expect("starts")).collect();
        // Which one of the two connects is a matter of chance; with both ways cut it does not matter.
        let mut members = contacts(&engines, medium);
        let proxies: Vec<Proxy> = members.iter().map(|member| Proxy::to(member.tcp[0])).collect();
        for (member, proxy) in members.iter_mut().zip(&proxies) {
            member.tcp = vec![proxy.address];
        }
        let (groups, tickets) = join_as(next_id(), &engines, &members, |_| b"secret".to_vec());
        for ticket in tickets {
            wait(&ticket).expect("joined");
        }
        let [from, to] = if turned { [1, 0] } else { [0, 1] };
        let (input, mut output) = (filled(from, 5), vec![0; 5]);
        for proxy in &proxies {
            proxy.drops.store(true, Ordering::SeqCst);
        }
        let send = message(Collective::Send { to }, 20, &input, &mut []);
        // SAFETY: the buffer outlives the wait, and is copied.
        wait(&unsafe { groups[from as usize].start(send) }).expect("it is copied");
        let began = Instant::now();
        engines[from as usize].begin_stop(true);
        for proxy in &proxies {
            proxy.cut(for_good);
        }
        engines[from as usize].stop();
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        let receive = message(Collective::Recv { from }, 20, &[], &mut output);
        // SAFETY: the buffer outlives the wait.
        let received = wait(&unsafe { groups[to as usize].start(receive) });
        if for_good {
            assert_eq!(received.expect_err("nothing gets through").kind, FailureKind::PeerLost);
        } else {
            received.expect("it was sent before the sender ended");
            assert!(output == input, "{output:?}");
        }
        engines.clear();
    }
}

/// A peer whose engine is gone fails the others' operations; nobody hangs.
#[test]
fn a_peer_that_leaves() {
    for medium in MEDIA {
        let mut world = world(3, medium);
        let mut outputs: Vec<_> = (0..2).map(|rank| filled(rank, 100_000)).collect();
        let tickets: Vec<_> = outputs
            .iter_mut()
            .zip(&world.groups)
            .map(|(output, group)| {
                // SAFETY: the buffers outlive the waits below.
                unsafe { group.start(call(Collective::AllReduce, Name::AllReduce, 400_000, &[], output)) }
            })
            .collect();
        world.groups.truncate(2);
        drop(world.engines.pop());
        for ticket in &tickets {
            let failure = wait(ticket).expect_err("rank 2 is gone");
            assert_eq!(failure.kind, FailureKind::PeerLost, "{medium:?}: {failure}");
            assert!(failure.to_string().contains("rank 2"), "{failure}");
        }
    }
}

/// A group with a rank that is known to have left the job cannot be joined any more, and the join says so at once.
#[test]
fn a_join_with_a_rank_that_has_left_the_job() {
    for medium in MEDIA {
        let mut world = world(3, medium);
        let members = contacts(&world.engines, medium);
        world.groups.truncate(2);
        drop(world.engines.pop());
        for group in &world.groups {
            wait(&start(group, Collective::Recv { from: 2 }, 0, &mut [0])).expect_err("rank 2 has left");
        }
        let (_groups, tickets) = join_as(next_id(), &world.engines, &members, |_| b"secret".to_vec());
        for ticket in tickets {
            let failure = wait(&ticket).expect_err("rank 2 does not come");
            assert_eq!(failure.kind, FailureKind::PeerLost, "{medium:?}: {failure}");
            let text = failure.to_string();
            assert!(text.contains("rank 2") && text.contains("has left the job. The group"), "{medium:?}: {text}");
        }
    }
}

/// Ranks with different secrets do not meet; the error says what to set.
#[test]
fn wrong_secret() {
    side_by_side(MEDIA, |medium| {
        let engines: Vec<Engine> = (0..2).map(|rank| Engine::start(&config(rank, medium)).expect("starts")).collect();
        let (_groups, tickets) = join(&engines, medium, |rank| vec![rank as u8; 8]);
        let failures: Vec<_> = tickets.iter().filter_map(|ticket| ticket.wait(Some(Duration::from_secs(2)))).collect();
        let failure = failures.into_iter().find_map(Result::err).expect("one side at least knows");
        assert_eq!(failure.kind, FailureKind::Refused, "{medium:?}: {failure}");
        assert!(failure.to_string().contains("PENSTOCK_SECRET"), "{failure}");
    });
}

/// A rank that gives a group up before another has joined it: the other learns it when it comes, and does not wait.
#[test]
fn a_group_that_fails_before_all_have_joined() {
    for medium in MEDIA {
        let world = world(2, medium);
        let members = contacts(&world.engines, medium);
        let spec = |rank: usize| GroupSpec {
            id: GroupId(1 << 40),
            generation: Generation(1),
            rank: rank as u32,
            members: members.clone(),
            secret: b"secret".to_vec(),
            algorithm: None,
            name: "test".into(),
        };
        let (first, joined) = world.engines[0].join(spec(0));
        assert!(joined.wait(Some(Duration::from_millis(20))).is_none(), "joined without the other");
        first.abort("a test");
        wait(&joined).expect_err("aborted");
        first.leave();
        // Takes longer than the report, unless that goes by a stream that is slow.
        let mut outputs = vec![vec![1]; 2];
        run(&world, |_| Collective::AllReduce, Name::AllReduce, 4, &[vec![], vec![]], &mut outputs, |_| None);
        let (second, joined) = world.engines[1].join(spec(1));
        let mut buffer = [0; 1];
        let failure = wait(&joined)
            .and_then(|()| wait(&start(&second, Collective::Recv { from: 0 }, 0, &mut buffer)))
            .expect_err("rank 0 has given it up");
        assert!(failure.to_string().contains("rank 0") && failure.to_string().contains("a test"), "{failure}");
    }
}

/// A rank that leaves one group of several says so when it is asked, which is long before the operation's time-out.
#[test]
fn a_rank_that_has_left_one_group_is_not_waited_for() {
    side_by_side(MEDIA, |medium| {
        let world = world(2, medium);
        let (groups, tickets) = join(&world.engines, medium, |_| b"secret".to_vec());
        for ticket in tickets {
            wait(&ticket).expect("joined");
        }
        // Both take part in the first; rank 0 does not come to the second.
        let mut outputs: Vec<_> = (0..2).map(|rank| filled(rank, 700_003)).collect();
        let mut alone = filled(1, 700_003);
        let start = |group: &Group, output: &mut [u32]| {
            // SAFETY: the buffers outlive the waits below.
            unsafe { group.start(call(Collective::AllReduce, Name::AllReduce, 4 * 700_003, &[], output)) }
        };
        let both: Vec<_> = groups.iter().zip(&mut outputs).map(|(group, output)| start(group, output)).collect();
        let second = start(&groups[1], &mut alone);
        wait(&both[0]).expect("both were there");
        groups[0].leave();
        wait(&both[1]).unwrap_or_else(|error| panic!("{medium:?}: what rank 0 gave counts: {error}"));
        let failure = wait(&second).expect_err("rank 0 has left");
        assert!(failure.to_string().contains("has left the group"), "{medium:?}: {failure}");
        // The engines, and other groups, live on.
        let mut outputs = vec![vec![1]; 2];
        run(&world, |_| Collective::AllReduce, Name::AllReduce, 4, &[vec![], vec![]], &mut outputs, |_| None);
        groups[1].leave();
    });
}

/// A group that fails takes its own buffers along and nobody else's: operations of other groups, which peers may be reading
/// from memory at that moment, end in good order and in time.
#[test]
fn a_failed_group_does_not_hold_up_another() {
    side_by_side(MEDIA, |medium| {
        let world = world(2, medium);
        for turn in 0..40 {
            let (groups, tickets) = join(&world.engines, medium, |_| b"secret".to_vec());
            for ticket in tickets {
                wait(&ticket).expect("joined");
            }
            let mut outputs: Vec<_> = (0..2).map(|rank| filled(rank, 700_003)).collect();
            let start = |group: &Group, output: &mut [u32]| {
                let call = call(Collective::AllReduce, Name::AllReduce, 4 * 700_003, &[], output);
                // SAFETY: the buffer outlives the wait below, and that of the other group its own.
                unsafe { group.start(Call { timeout: 5_000_000_000, ..call }) }
            };
            // Rank 0's references are out while rank 1 has not come; then another group of both fails.
            let first = start(&world.groups[0], &mut outputs[0]);
            let mut other = vec![0; 700_003];
            let lost = start(&groups[0], &mut other);
            let second = (turn % 2 == 0).then(|| start(&world.groups[1], &mut outputs[1]));
            groups[0].abort("a test");
            let second = second.unwrap_or_else(|| start(&world.groups[1], &mut outputs[1]));
            let failure = wait(&lost).expect_err("aborted");
            assert_eq!(failure.kind, FailureKind::Closed, "{medium:?}: {failure}");
            for ticket in [&first, &second] {
                wait(ticket).unwrap_or_else(|error| panic!("{medium:?}, turn {turn}: {error}"));
            }
            let sum = |index: usize| value(0, index).wrapping_add(value(1, index));
            for output in &outputs {
                assert!(output.iter().enumerate().all(|(index, got)| *got == sum(index)), "{medium:?}, turn {turn}");
            }
            groups.iter().for_each(Group::leave);
        }
    });
}

/// Groups that come and go leave nothing behind but their ids, which are one range: with messages that nobody receives, more of
/// them than there is credit for, whoever leaves first, and whether they fail or not.
#[test]
fn nothing_is_kept_of_groups_that_were_left() {
    for medium in [MEDIA[1], Medium::Memory] {
        let world = world(3, medium);
        let before = held(&world);
        let data = filled(0, 1000);
        let send = |group: &Group, len: usize, tag: u32| {
            let mut call = call(Collective::Send { to: 1 }, Name::PointToPoint, 4 * len as u64, &data[..len], &mut []);
            call.fingerprint = Fingerprint::new(Name::PointToPoint, None, DType::I32, None, len as u64);
            call.tag = tag;
            // SAFETY: the data outlives the groups.
            unsafe { group.start(call) }
        };
        for round in 0..30 {
            let (groups, tickets) =
                join_as(GroupId((1 << 40) + round), &world.engines, &contacts(&world.engines, medium), |_| {
                    b"secret".to_vec()
                });
            for ticket in tickets {
                wait(&ticket).expect("joined");
            }
            let unread: Vec<Ticket> = (0..if round == 7 { 9000 } else { 10 })
                .map(|message| send(&groups[0], if round == 7 { 0 } else { 100 * message }, message as u32))
                .collect();
            for ticket in &unread[..10] {
                wait(ticket).expect("short enough for the credit");
            }
            if round % 3 == 1 {
                groups[2].abort("a test wants it");
            }
            // Each comes first, and last, now and then.
            for rank in 0..3 {
                groups[(rank + round as usize) % 3].leave();
            }
            for ticket in &unread {
                // What waited for credit has failed with the group.
                let _ = wait(ticket);
            }
        }
        until(&world, |now| {
            now.iter().all(|held| Held { jobs: 0, closed_ranges: 0, ..*held } == Held { groups: 1, ..Held::default() })
        });
        for (before, now) in before.iter().zip(held(&world)) {
            assert_eq!((now.closed_ranges, now.jobs), (1, before.jobs), "{medium:?}");
        }
    }
}

/// What comes for a group that this rank never joins is held, and is let go of when its sender leaves that group.
#[test]
fn a_group_that_is_never_joined_is_forgotten() {
    side_by_side([MEDIA[1], Medium::Memory], |medium| {
        let world = world(2, medium);
        let members = contacts(&world.engines, medium);
        for id in 0..3 {
            let (group, joined) = world.engines[0].join(GroupSpec {
                id: GroupId((1 << 41) + id),
                generation: Generation(1),
                rank: 0,
                members: members.clone(),
                secret: b"secret".to_vec(),
                algorithm: None,
                name: "lonely".into(),
            });
            // What rank 0 says of the join's own operation, and asks about it a second later.
            until(&world, |now| now[1].early_messages == 1 && now[1].claims == 1 && now[0].credit_bytes > 0);
            group.abort("nobody comes");
            wait(&joined).expect_err("it was aborted");
            group.leave();
            let free = Held { groups: 1, ..Held::default() };
            until(&world, |now| now.iter().all(|held| Held { jobs: 0, closed_ranges: 0, ..*held } == free));
        }
    });
}

/// Of the groups that are joined before any stream is up, the secret of one is kept, where the other rank connects with it.
#[test]
fn one_secret_a_peer_is_kept() {
    let medium = MEDIA[1];
    let engines: Vec<Engine> = (0..2).map(|rank| Engine::start(&config(rank, medium)).expect("starts")).collect();
    let joins: Vec<_> = (0..5).map(|_| join(&engines, medium, |_| b"secret".to_vec())).collect();
    for ticket in joins.iter().flat_map(|(_, tickets)| tickets) {
        wait(ticket).expect("joined");
    }
    let world = World { engines, groups: Vec::new() };
    assert_eq!(held(&world).iter().map(|held| held.jobs).sum::<u64>(), 1);
}

/// Of a peer that dies nothing is kept: what was on its way to it, what it sent, what it asked for, and the credit of both. Where
/// it leaves in good order, and the other rank stays in the group, what it gave still counts.
#[test]
fn nothing_is_kept_of_a_peer_that_is_gone() {
    let medium = Medium::Tcp { streams: 2, checksum: false };
    for dies in [false, true] {
        let engines: Vec<Engine> = (0..2).map(|rank| Engine::start(&config(rank, medium)).expect("starts")).collect();
        let mut members = contacts(&engines, medium);
        let proxies: Vec<Proxy> = members.iter().map(|member| Proxy::to(member.tcp[0])).collect();
        for (member, proxy) in members.iter_mut().zip(&proxies) {
            member.tcp = vec![proxy.address];
        }
        let (groups, tickets) = join_as(next_id(), &engines, &members, |_| b"secret".to_vec());
        tickets.iter().for_each(|ticket| wait(ticket).expect("joined"));
        let mut world = World { engines, groups };
        let (input, mut long) = (filled(0, 5), vec![0; 700_003]);
        let send = |from: usize| {
            let to = 1 - from as u32;
            // SAFETY: the buffer outlives the waits below.
            wait(&unsafe { world.groups[from].start(message(Collective::Send { to }, 20, &input, &mut [])) })
        };
        send(1).expect("it is copied");
        // Rank 0 remembers what is granted, and rank 1 that it grants.
        let receive = Call { tag: 9, ..message(Collective::Recv { from: 0 }, 4 * 700_003, &[], &mut long) };
        // SAFETY: the buffer outlives the wait below.
        let receipt = unsafe { world.groups[1].start(receive) };
        until(&world, |now| now[0].remembered_operations == 2 && now[0].early_messages == 1);
        if dies {
            proxies.iter().for_each(|proxy| proxy.drops.store(true, Ordering::SeqCst));
        }
        send(0).expect("it is copied");
        if dies {
            proxies.iter().for_each(|proxy| proxy.cut(true));
            wait(&receipt).expect_err("rank 0 is lost");
        } else {
            drop(world.engines.pop());
        }
        let given = match dies {
            true => Held::default(),
            false => Held { claims: 1, early_messages: 1, early_bytes: 20, ..Held::default() },
        };
        until(&world, |now| now.iter().all(|held| *held == Held { groups: 1, ..given }));
    }
}

/// A rank that leaves forgets at once what others are ready to receive from it.
#[test]
fn what_was_granted_goes_with_the_group() {
    let world = world(2, MEDIA[1]);
    let mut output = vec![0; 700_003];
    let mut call = call(Collective::Recv { from: 0 }, Name::PointToPoint, 4 * 700_003, &[], &mut output);
    call.fingerprint = Fingerprint::new(Name::PointToPoint, None, DType::I32, None, 700_003);
    // SAFETY: the buffer outlives the wait below.
    let receipt = unsafe { world.groups[1].start(call) };
    until(&world, |now| now[0].remembered_operations == 1);
    world.groups[0].leave();
    assert_eq!(held(&world)[0].remembered_operations, 0);
    wait(&receipt).expect_err("rank 0 has left");
}

fn held(world: &World) -> Vec<Held> {
    world.engines.iter().map(|engine| engine.stats().expect("it runs").held).collect()
}

/// Waits until what the engines hold is as it should be. Credit comes back with the next frame, or the next heartbeat.
fn until(world: &World, holds: impl Fn(&[Held]) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds(&held(world)) {
        assert!(Instant::now() < deadline, "{:#?}", held(world));
        std::thread::yield_now();
    }
}
