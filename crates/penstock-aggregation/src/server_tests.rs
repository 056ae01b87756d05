use super::*;
use crate::estimate::MAX_DOUBTFUL;
use crate::{Naming, Node, Tree};
use penstock_types::MILLISECOND;
use proptest::prelude::*;

const RACK: Endpoint = Endpoint(10);
const ROW: Endpoint = Endpoint(11);

/// Worker 2 straight below the server, workers 0 and 1 below an aggregator.
fn config(format_bytes: usize) -> ServerConfig {
    let rack = Node::Aggregator { endpoint: RACK, is_full: true, children: vec![Node::Worker(0), Node::Worker(1)] };
    ServerConfig {
        job: 5,
        epoch: 3,
        key: None,
        window: 2,
        block_bytes: format_bytes,
        start: Serial(0),
        tree: Tree { children: vec![rack, Node::Worker(2)] },
        naming: Naming::Children,
        workers: vec![Endpoint(0), Endpoint(1), Endpoint(2)],
        stand_ins: 1,
        held_blocks: None,
        heartbeat_every: ServerConfig::HEARTBEAT_EVERY,
        idle_every: ServerConfig::IDLE_EVERY,
        returns_after: 0,
    }
}

/// What a node is called by the node above it.
fn name(of: Endpoint) -> u64 {
    if of == Endpoint(1) || of == Endpoint(2) { 0b10 } else { 0b1 }
}

fn header(kind: Kind, workers: u64, seq: u32, ack: u32) -> Header {
    let format = if kind == Kind::Push { Format::F32 } else { Format::None };
    let (ack, credit) = (Serial(ack), Serial(ack + 1));
    Header { kind, job: 5, epoch: 3, format, flags: 0, seq: Serial(seq), ack, credit, exponent: 0, workers }
}

fn push(server: &mut Server, from: Endpoint, seq: u32, value: f32) -> Result<Option<Serial>, Refusal> {
    push_with(server, from, 0, seq, value)
}

fn push_with(server: &mut Server, from: Endpoint, flags: u8, seq: u32, value: f32) -> Result<Option<Serial>, Refusal> {
    let block = value.to_be_bytes();
    let header = Header { flags, ..header(Kind::Push, name(from), seq, 0) };
    server.handle_packet(Time(0), from, &[&header.encode(&block, None)[..], &block].concat())
}

/// A node says whether it hears the aggregator above it.
fn beat(server: &mut Server, from: Endpoint, flags: u8) {
    let packet = Header { flags, ..header(Kind::HeartbeatUp, name(from), 0, 0) }.encode(&[], None);
    server.handle_packet(Time(0), from, &packet).unwrap();
}

fn sent(server: &mut Server) -> Vec<(Endpoint, Header, Vec<u8>)> {
    let mut all = Vec::new();
    while let Some(Transmit { to, header, payload }) = server.poll_transmit() {
        let packet = [&header[..], payload].concat();
        all.push((to, decode(&packet).unwrap().header, payload.to_vec()));
    }
    all
}

const VALUES: [f32; 3] = [1e8, 1.25, -1e8];

/// However the parts come (the rack's sum, its workers' blocks past it, both, twice, in whatever order), the sum is that of the
/// tree, committed once. Without R19 the bits depend on the order of arrival.
#[test]
fn every_mixture_and_order() {
    let pair = VALUES[0] + VALUES[1];
    let expected = (pair + VALUES[2]).to_bits();
    let parts = [(RACK, pair), (Endpoint(0), VALUES[0]), (Endpoint(1), VALUES[1]), (Endpoint(2), VALUES[2])];
    let mut results_without_order = std::collections::BTreeSet::new();
    for order in 0..4usize.pow(5) {
        for without in [None, Some(Rule::Order)] {
            let mut server = Server::with_rules(Time(0), config(4), Rules { without });
            beat(&mut server, Endpoint(0), FLAG_LOST);
            let mut commits = 0;
            for i in 0..5 {
                let (from, value) = parts[order / 4usize.pow(i) % 4];
                let flags = if from == Endpoint(0) { FLAG_LOST } else { 0 };
                commits += usize::from(matches!(push_with(&mut server, from, flags, 0, value), Ok(Some(_))));
            }
            assert!(commits <= 1);
            let results: Vec<_> =
                sent(&mut server).into_iter().filter(|(_, header, _)| header.kind == Kind::Result).collect();
            assert_eq!(results.len(), commits * 3, "one to each worker");
            for (_, _, block) in results {
                let bits = u32::from_be_bytes(block.try_into().unwrap());
                match without {
                    None => assert_eq!(bits, expected, "order {order}"),
                    Some(_) => drop(results_without_order.insert(bits)),
                }
            }
        }
    }
    // The rack's own sum comes after worker 2's block, which stands to the right of it.
    let mut server = Server::with_rules(Time(0), config(4), Rules { without: Some(Rule::Order) });
    assert!(results_without_order.contains(&expected));
    for (from, value) in [(Endpoint(2), VALUES[2]), (RACK, pair)] {
        let _ = push(&mut server, from, 0, value);
    }
    let turned = sent(&mut server).pop().expect("it is committed").2;
    assert_eq!(turned, (VALUES[2] + pair).to_be_bytes());
}

/// A result in which integers overflowed is delivered, wrapped, and counted.
#[test]
fn overflow() {
    let mut server = Server::new(Time(0), config(4));
    let mut push = |from, seq, value: i32| {
        let block = value.to_be_bytes();
        let header = Header { format: Format::I32, ..header(Kind::Push, name(from), seq, 0) };
        server.handle_packet(Time(0), from, &[&header.encode(&block, None)[..], &block].concat()).unwrap();
        server.overflowed()
    };
    assert_eq!((push(RACK, 0, i32::MIN), push(Endpoint(2), 0, 0)), (0, 0));
    assert_eq!((push(RACK, 1, i32::MIN), push(Endpoint(2), 1, -1)), (0, 1));
    let results: Vec<Vec<u8>> = sent(&mut server).into_iter().map(|(_, _, block)| block).collect();
    assert_eq!(results, [i32::MIN, i32::MIN, i32::MAX, i32::MAX].map(|value| value.to_be_bytes().to_vec()));
}

/// Credit follows the slowest worker, and what all have is forgotten; until then whoever asks gets it.
#[test]
fn credit_and_requests() {
    let mut server = Server::new(Time(0), config(4));
    let ask = |server: &mut Server, worker: u32, seq: u32| {
        let packet = header(Kind::Request, name(Endpoint(worker)), seq, 0).encode(&[], None);
        server.handle_packet(Time(0), Endpoint(worker), &packet)
    };
    assert_eq!(ask(&mut server, 1, 3), Err(Refusal::Stale), "beyond the window");
    assert_eq!(push(&mut server, Endpoint(2), 2, 1.0), Err(Refusal::Credit));
    for seq in [1, 0] {
        assert_eq!(push(&mut server, RACK, seq, 1.0), Ok(None));
        assert_eq!(server.missing(Serial(seq)), 0b10);
        assert_eq!(push(&mut server, Endpoint(2), seq, 2.0), Ok(Some(Serial(seq))));
        assert_eq!(push(&mut server, Endpoint(2), seq, 2.0), Err(Refusal::Stale));
    }
    assert_eq!((server.ack(), server.credit()), (Serial(2), Serial(1)));
    assert_eq!(sent(&mut server).len(), 4);
    assert_eq!(ask(&mut server, 1, 0), Ok(None));
    assert_eq!(ask(&mut server, 1, 0), Ok(None), "once more before it left: answered once");
    let answers = sent(&mut server);
    assert_eq!(answers.len(), 1);
    assert_eq!((answers[0].0, answers[0].1.seq, &answers[0].2[..]), (Endpoint(1), Serial(0), &3f32.to_be_bytes()[..]));
    let hear = |server: &mut Server, from: Endpoint, workers: u64, ack: u32| {
        let packet = header(Kind::HeartbeatUp, workers, 0, ack).encode(&[], None);
        server.handle_packet(Time(0), from, &packet)
    };
    assert_eq!(hear(&mut server, RACK, 0b1, 2), Ok(None));
    assert_eq!(server.credit(), Serial(1), "worker 2 lacks both");
    assert_eq!(hear(&mut server, Endpoint(2), 0b10, 1), Ok(None));
    assert_eq!(server.credit(), Serial(2));
    assert_eq!(hear(&mut server, Endpoint(2), 0b10, 0), Ok(None));
    assert_eq!(server.credit(), Serial(2), "nothing is taken back");
    assert_eq!(hear(&mut server, Endpoint(2), 0b10, 3), Err(Refusal::Ack), "an Ack for what was never committed");
    assert_eq!(hear(&mut server, Endpoint(0), 0b1, 3), Err(Refusal::Ack));
    assert_eq!(hear(&mut server, Endpoint(2), 0b11, 1), Err(Refusal::Sender));
    assert_eq!(hear(&mut server, RACK, 0b10, 1), Err(Refusal::Sender), "another child's name");
    // What goes up through the rack is lost, so its workers tell the server itself: it counts when all have.
    assert_eq!(hear(&mut server, Endpoint(2), 0b10, 2), Ok(None));
    let mut fresh = Server::new(Time(0), config(4));
    for (from, value) in [(RACK, 1.0), (Endpoint(2), 2.0)] {
        push(&mut fresh, from, 0, value).unwrap();
    }
    for (from, credit) in [(Endpoint(2), 1), (Endpoint(0), 1), (Endpoint(1), 2)] {
        assert_eq!(hear(&mut fresh, from, name(from), 1), Ok(None));
        assert_eq!(fresh.credit(), Serial(credit), "{from:?}");
    }
}

/// A sum that three later ones pass is missing, and named again when it does not come; what one worker asks for goes to
/// it, what two below an aggregator ask for goes through that to all, once, until one asks again.
#[test]
fn losses() {
    let mut server = Server::new(Time(0), ServerConfig { window: 8, ..config(4) });
    for seq in [0, 2, 3] {
        push(&mut server, RACK, seq, 1.0).unwrap();
        push(&mut server, Endpoint(2), seq, 1.0).unwrap();
    }
    let missing = |server: &mut Server| -> Vec<(Endpoint, u32, u64)> {
        let named = sent(server).into_iter().filter(|(_, header, _)| header.kind == Kind::Missing);
        named.map(|(to, header, _)| (to, header.seq.0, header.workers)).collect()
    };
    push(&mut server, Endpoint(2), 1, 1.0).unwrap();
    assert_eq!(missing(&mut server), []);
    push(&mut server, RACK, 4, 1.0).unwrap();
    push(&mut server, Endpoint(2), 4, 1.0).unwrap();
    assert_eq!(missing(&mut server), [(RACK, 1, 0b1)]);
    let again = server.poll_timeout();
    assert!(again <= Time(ServerConfig::HEARTBEAT_EVERY), "{again:?}");
    server.handle_timeout(again);
    assert_eq!(missing(&mut server), [(RACK, 1, 0b1)]);
    let mut ask = |worker: u32| -> Vec<Endpoint> {
        let packet = header(Kind::Request, name(Endpoint(worker)), 2, 0).encode(&[], None);
        server.handle_packet(again, Endpoint(worker), &packet).unwrap();
        sent(&mut server).into_iter().map(|(to, ..)| to).collect()
    };
    assert_eq!((ask(0), ask(1)), (vec![Endpoint(0)], vec![RACK]));
    assert_eq!((ask(2), ask(1), ask(0)), (vec![Endpoint(2)], vec![Endpoint(1)], vec![RACK]));
    // An aggregator that does not have it asks for itself, and gets it each time.
    for _ in 0..2 {
        let packet = header(Kind::Request, 0b1, 3, 0).encode(&[], None);
        server.handle_packet(again, RACK, &packet).unwrap();
        assert_eq!(sent(&mut server).into_iter().map(|(to, ..)| to).collect::<Vec<_>>(), [RACK]);
    }
    for workers in [0b100, 0b11] {
        let packet = header(Kind::Request, workers, 2, 0).encode(&[], None);
        assert_eq!(server.handle_packet(again, RACK, &packet), Err(Refusal::Sender), "workers {workers:b}");
    }
}

/// However long repairs take, after some of them each is named once: the first patience is a guess, and what they take may change.
#[test]
fn patience_is_learnt() {
    let mut server = Server::new(Time(0), ServerConfig { window: 64, ..config(4) });
    let (mut now, mut next) = (Time(0), 0);
    let push = |server: &mut Server, now: Time, from: Endpoint, seq: u32| {
        let ack = server.ack();
        let header = Header { ack, credit: ack.plus(63), ..header(Kind::Push, name(from), seq, 0) };
        let block = 1.0_f32.to_be_bytes();
        server.handle_packet(now, from, &[&header.encode(&block, None)[..], &block].concat()).unwrap();
    };
    let missing =
        |server: &mut Server| sent(server).iter().filter(|(_, header, _)| header.kind == Kind::Missing).count();
    // The rack's sum of one block is lost and comes after `takes`; says how often it was named until then.
    let mut repair = |takes: u64| -> usize {
        for seq in next..next + 4 {
            push(&mut server, now, Endpoint(2), seq);
            if seq != next {
                push(&mut server, now, RACK, seq);
            }
        }
        let mut named = missing(&mut server);
        let back = now.plus(takes);
        while server.poll_timeout() < back {
            let at = server.poll_timeout();
            server.handle_timeout(at);
            named += missing(&mut server);
        }
        now = back;
        push(&mut server, now, RACK, next);
        missing(&mut server);
        next += 4;
        named
    };
    assert!(repair(20 * MILLISECOND) > 1, "the first guess is too short");
    assert_eq!([(); 20].map(|()| repair(20 * MILLISECOND)), [1; 20]);
    assert!(repair(90 * MILLISECOND) > 1, "they take longer than they did");
    let later = [(); 20].map(|()| repair(90 * MILLISECOND));
    assert_eq!(later[MAX_DOUBTFUL as usize..], [1; 20 - MAX_DOUBTFUL as usize], "{later:?}");
}

/// One worker that lost its path takes its whole rack with it, both get results straight, and back again.
#[test]
fn bypass() {
    let mut server = Server::new(Time(0), config(4));
    let bypassed = |server: &Server| server.bypassed().collect::<Vec<_>>();
    assert_eq!(push(&mut server, Endpoint(1), 0, VALUES[1]), Err(Refusal::Bypass), "nobody is to go past it");
    assert_eq!(bypassed(&server), []);
    beat(&mut server, Endpoint(0), FLAG_LOST);
    assert_eq!(bypassed(&server), [RACK]);
    let mut heartbeats: Vec<(Endpoint, u64)> =
        sent(&mut server).iter().map(|(to, header, _)| (*to, header.workers)).collect();
    heartbeats.sort();
    let (through, straight) = (path::state(1, false), path::state(1, true));
    let expected = [(Endpoint(0), straight), (Endpoint(1), straight), (Endpoint(2), through), (RACK, through)];
    assert_eq!(heartbeats, expected, "at once, and also through the aggregator: it may be back");
    push_with(&mut server, Endpoint(0), FLAG_LOST, 0, VALUES[0]).unwrap();
    push(&mut server, Endpoint(1), 0, VALUES[1]).unwrap();
    assert_eq!(push(&mut server, Endpoint(2), 0, VALUES[2]), Ok(Some(Serial(0))));
    let results: Vec<Endpoint> = sent(&mut server).iter().map(|(to, ..)| *to).collect();
    assert_eq!(results, [Endpoint(0), Endpoint(1), Endpoint(2)]);
    beat(&mut server, Endpoint(0), 0);
    assert_eq!(bypassed(&server), []);
    assert!(sent(&mut server).iter().all(|(_, header, _)| header.workers == path::state(2, false)));
    beat(&mut server, Endpoint(2), FLAG_LOST);
    assert_eq!(bypassed(&server), [], "there is nothing to pass by");
}

/// A rack of workers 0 and 1, and another one of worker 2, below an aggregator.
fn row(rows_are_full: bool) -> ServerConfig {
    let rack = |endpoint, children| Node::Aggregator { endpoint, is_full: true, children };
    let racks = vec![
        rack(RACK, vec![Node::Worker(0), Node::Worker(1)]),
        rack(Endpoint(12), vec![Node::Worker(3), Node::Worker(2)]),
    ];
    let tree = Tree { children: vec![Node::Aggregator { endpoint: ROW, is_full: rows_are_full, children: racks }] };
    ServerConfig { tree, workers: (0..4).map(Endpoint).collect(), ..config(4) }
}

/// A rack is dead and the row above it lives: the server adds for the rack, and pushes the sum to the row, again when it was lost.
#[test]
fn a_detour() {
    let mut server = Server::new(Time(0), row(true));
    beat(&mut server, Endpoint(0), FLAG_LOST);
    assert_eq!(server.bypassed().collect::<Vec<_>>(), [RACK]);
    sent(&mut server);
    push_with(&mut server, Endpoint(0), FLAG_LOST, 0, VALUES[0]).unwrap();
    assert_eq!(sent(&mut server).len(), 0);
    push(&mut server, Endpoint(1), 0, VALUES[1]).unwrap();
    let pair = (VALUES[0] + VALUES[1]).to_be_bytes().to_vec();
    let is_detour = |(to, header, block): &(Endpoint, Header, Vec<u8>)| {
        (*to, header.kind, header.workers, block) == (ROW, Kind::Push, 0b1, &pair)
    };
    let out = sent(&mut server);
    assert!(out.len() == 1 && is_detour(&out[0]), "{out:?}");
    // The row has lost it, and requests the result: it hears that its sum is missing, and gets the rack's again.
    let packet = header(Kind::Request, 0b1, 0, 0).encode(&[], None);
    server.handle_packet(Time(0), ROW, &packet).unwrap();
    let out = sent(&mut server);
    assert!(out.iter().any(|(to, header, _)| (*to, header.kind) == (ROW, Kind::Missing)) && out.iter().any(is_detour));
    // A worker pushes again.
    push_with(&mut server, Endpoint(0), FLAG_LOST, 0, VALUES[0]).unwrap();
    assert!(is_detour(&sent(&mut server)[0]));
    // The next block lacks worker 1's: it is named, and nobody else.
    push_with(&mut server, Endpoint(0), FLAG_LOST, 1, VALUES[0]).unwrap();
    let packet = Header { flags: FLAG_LOST, ..header(Kind::Request, 0b1, 1, 0) }.encode(&[], None);
    server.handle_packet(Time(0), Endpoint(0), &packet).unwrap();
    let mut named: Vec<(Endpoint, u64)> =
        sent(&mut server).iter().map(|(to, header, _)| (*to, header.workers)).collect();
    named.sort();
    assert_eq!(named, [(Endpoint(0), 0b10), (Endpoint(1), 0b10), (ROW, 0b1)]);
    // What the row makes of it comes back as its own.
    assert_eq!(push(&mut server, ROW, 0, 7.0), Ok(Some(Serial(0))));
    let mut results: Vec<Endpoint> = sent(&mut server).iter().map(|(to, ..)| *to).collect();
    results.sort();
    assert_eq!(results, [Endpoint(0), Endpoint(1), ROW]);
}

/// Two threads of a node disagree, packet by packet, whether they hear the aggregator above: it is bypassed all the time, and is not any
/// more when neither has said for a while that it does not.
#[test]
fn threads_that_disagree() {
    let config = ServerConfig { returns_after: ServerConfig::RETURNS_AFTER, ..config(4) };
    let mut server = Server::new(Time(0), config);
    let say = |server: &mut Server, at: u64, flags| {
        let packet = Header { flags, ..header(Kind::HeartbeatUp, 0b1, 0, 0) }.encode(&[], None);
        server.handle_packet(Time(at), Endpoint(0), &packet).unwrap();
        (server.bypassed().count(), server.paths.number)
    };
    for round in 0..100 {
        let at = round * MILLISECOND;
        assert_eq!(say(&mut server, at, FLAG_LOST), (1, 1));
        assert_eq!(say(&mut server, at + 1, 0), (1, 1));
    }
    let back = 99 * MILLISECOND + ServerConfig::RETURNS_AFTER;
    assert_eq!(say(&mut server, back - 1, 0), (1, 1));
    assert_eq!(say(&mut server, back, 0), (0, 2));
    // Where it was not said lately, the first word counts.
    assert_eq!(say(&mut server, back + 1, FLAG_LOST), (1, 3));
}

/// The row dies. Its racks' workers notice, one by one; when both racks seem dead, the row is bypassed as well, the racks hear from
/// the server, and their workers from them. In the end only the row is bypassed, until a rack hears it. If one of the racks is
/// dead, too, the server stands in for both.
#[test]
fn a_dead_row() {
    const OTHER: Endpoint = Endpoint(12);
    let mut server = Server::new(Time(0), ServerConfig { stand_ins: 3, ..row(true) });
    let bypassed = |server: &Server| server.bypassed().collect::<Vec<_>>();
    beat(&mut server, Endpoint(0), FLAG_LOST);
    assert_eq!(bypassed(&server), [RACK]);
    beat(&mut server, Endpoint(2), FLAG_LOST);
    assert_eq!(bypassed(&server), [ROW, RACK, OTHER]);
    let straight = |server: &mut Server| -> Vec<u32> {
        let mut to: Vec<u32> =
            sent(server).iter().filter(|(_, header, _)| header.workers % 2 == 1).map(|(to, ..)| to.0).collect();
        to.sort_unstable();
        to.dedup();
        to
    };
    assert_eq!(straight(&mut server), [0, 1, 2, 3, RACK.0, OTHER.0]);
    // Worker 0 hears its rack, which says that it does not hear the row. The other rack is dead.
    beat(&mut server, Endpoint(0), 0);
    let lost = |server: &mut Server, rack: Endpoint, flags: u8| {
        let workers = if rack == RACK { 0b1 } else { 0b10 };
        let packet = Header { flags, ..header(Kind::HeartbeatUp, workers, 0, 0) }.encode(&[], None);
        server.handle_packet(Time(0), rack, &packet).unwrap();
    };
    lost(&mut server, RACK, FLAG_LOST);
    assert_eq!(bypassed(&server), [ROW, OTHER]);
    assert_eq!(straight(&mut server), [2, 3, RACK.0, OTHER.0]);
    // Rack and workers push straight, and the sum is that of the tree.
    let (pair, other) = (VALUES[0] + VALUES[1], 3.5f32 + VALUES[2]);
    assert_eq!(push_with(&mut server, RACK, FLAG_LOST, 0, pair), Ok(None));
    let block = 3.5f32.to_be_bytes();
    let third = header(Kind::Push, 0b1, 0, 0).encode(&block, None);
    assert_eq!(server.handle_packet(Time(0), Endpoint(3), &[&third[..], &block].concat()), Ok(None));
    assert_eq!(push_with(&mut server, Endpoint(2), FLAG_LOST, 0, VALUES[2]), Ok(Some(Serial(0))));
    let mut results = sent(&mut server);
    results.sort_by_key(|(to, ..)| *to);
    assert_eq!(results.iter().map(|(to, ..)| to.0).collect::<Vec<_>>(), [2, 3, RACK.0]);
    assert!(results.iter().all(|(_, _, block)| *block == (pair + other).to_be_bytes()));
    // The row is back.
    lost(&mut server, RACK, 0);
    assert_eq!(bypassed(&server), [OTHER]);
    beat(&mut server, Endpoint(2), 0);
    assert_eq!(bypassed(&server), []);
}

/// Above a dead rack, an aggregator that takes nothing from the server, such as a switch, is bypassed as well; a rack that goes with
/// it pushes to the server.
#[test]
fn a_switch_goes_with_its_rack() {
    let mut server = Server::new(Time(0), row(false));
    beat(&mut server, Endpoint(0), FLAG_LOST);
    assert_eq!(server.bypassed().collect::<Vec<_>>(), [ROW, RACK]);
    beat(&mut server, Endpoint(0), 0);
    assert_eq!(server.bypassed().count(), 0);
}

/// The server stands in for as many as it has places for, the upper ones first, and bypasses no other that adds floats: its children go
/// on pushing to it. One that is not bypassed any more gives its place back.
#[test]
fn places() {
    const OTHER: Endpoint = Endpoint(12);
    let mut server = Server::new(Time(0), row(true));
    let bypassed = |server: &Server| server.bypassed().collect::<Vec<_>>();
    beat(&mut server, Endpoint(0), FLAG_LOST);
    assert_eq!(bypassed(&server), [RACK]);
    assert_eq!(push_with(&mut server, Endpoint(0), FLAG_LOST, 0, 1.0), Ok(None));
    // Both racks seem dead, so perhaps the row is. The racks hear from the server now, and worker 0 from its rack; worker 2 does not.
    beat(&mut server, Endpoint(2), FLAG_LOST);
    assert_eq!(bypassed(&server), [ROW]);
    assert_eq!(push_with(&mut server, Endpoint(0), 0, 0, 1.0), Err(Refusal::Bypass));
    beat(&mut server, Endpoint(2), FLAG_LOST);
    assert_eq!(bypassed(&server), [ROW]);
    beat(&mut server, RACK, 0);
    // The row lives: the other rack is the dead one, and gets the place.
    assert_eq!(bypassed(&server), [OTHER]);
    assert_eq!(push_with(&mut server, Endpoint(2), FLAG_LOST, 0, 1.0), Ok(None));
    // It is back.
    beat(&mut server, Endpoint(2), 0);
    assert_eq!(bypassed(&server), []);
    assert_eq!(push_with(&mut server, Endpoint(2), 0, 0, 1.0), Err(Refusal::Bypass));
}

/// A node below an aggregator that has no place, and that hears it again, tells only that one: after a while the server takes it for
/// found, and gives it no place later.
#[test]
fn lost_without_a_place() {
    let mut server = Server::new(Time(0), ServerConfig { stand_ins: 0, ..row(true) });
    let mut now = Time(0);
    for is_said in [true, false] {
        for _ in 0..40 {
            if is_said {
                beat(&mut server, Endpoint(0), FLAG_LOST);
            }
            now = server.poll_timeout();
            server.handle_timeout(now);
        }
        assert_eq!(server.bypassed().count(), 0);
        server.config.stand_ins = usize::from(!is_said);
    }
    beat(&mut server, Endpoint(2), FLAG_LOST);
    assert_eq!(server.bypassed().collect::<Vec<_>>(), [Endpoint(12)]);
    assert!(now > Time(0));
}

/// FULL blocks past an aggregator that adds no floats: the server adds them for it, and the sum counts as its own.
#[test]
fn full_blocks() {
    let mut server = Server::new(Time(0), ServerConfig { stand_ins: 0, ..config(4) });
    let Node::Aggregator { is_full, .. } = &mut server.config.tree.children[0] else { panic!("a rack") };
    *is_full = false;
    let mut server = Server::new(Time(0), server.config);
    assert_eq!(push_with(&mut server, Endpoint(0), FLAG_FULL, 0, VALUES[0]), Ok(None));
    assert_eq!(push_with(&mut server, Endpoint(2), FLAG_FULL, 0, VALUES[2]), Ok(None));
    assert_eq!(push_with(&mut server, Endpoint(1), FLAG_FULL, 0, VALUES[1]), Ok(Some(Serial(0))));
    let results = sent(&mut server);
    assert_eq!(results.iter().map(|(to, ..)| *to).collect::<Vec<_>>(), [RACK, Endpoint(2)]);
    let sum = VALUES[0] + VALUES[1] + VALUES[2];
    assert!(results.iter().all(|(_, header, block)| header.flags == FLAG_FULL && *block == sum.to_be_bytes()));
}

proptest! {
    /// Whatever comes, from whomever: no panic, each SeqNum is committed once and in the window, and what waits to be sent has a bound,
    /// also where nothing leaves.
    #[test]
    fn sequences(steps in proptest::collection::vec(
        (0usize..8, 0u64..4, 0u32..6, 0u32..6, 0u8..4, any::<u8>(), any::<bool>()), 0..300,
    )) {
        let mut server = Server::new(Time(0), row(true));
        let mut committed = std::collections::BTreeSet::new();
        let mut now = Time(0);
        for (from, workers, seq, ack, kind, flags, leaves) in steps {
            let kind = [Kind::Push, Kind::Request, Kind::HeartbeatUp, Kind::Result][usize::from(kind)];
            let nodes = [Endpoint(0), Endpoint(1), Endpoint(2), Endpoint(3), RACK, ROW, Endpoint(12), Endpoint(99)];
            let from = nodes[from];
            let block: &[u8] = if kind.has_block() { &[0; 4] } else { &[] };
            let flags = if kind == Kind::Result { 0 } else { flags & FLAG_LOST };
            let format = if kind.has_block() { Format::F32 } else { Format::None };
            let header = Header { flags, format, ..header(kind, workers, seq, ack) };
            let packet = [&header.encode(block, None)[..], block].concat();
            let low = server.ack();
            if let Ok(Some(seq)) = server.handle_packet(now, from, &packet) {
                prop_assert!(committed.insert(seq.0), "{seq} is committed twice");
                // What the packet says of results may have moved Credit before its block was looked at.
                let high = server.credit();
                prop_assert!(!low.is_newer_than(seq) && !seq.is_newer_than(high), "{seq} lies outside {low} to {high}");
            }
            now = now.plus(MILLISECOND / 2);
            server.handle_timeout(now);
            if leaves {
                prop_assert!(sent(&mut server).len() < 200);
            }
            prop_assert!(server.losses.names.len() <= 2 * 8 && server.slots.iter().all(|slot| slot.announce.len() <= 7));
        }
    }
}

/// A server's tables take memory only while they stand in, and together no more than is charged for them, however many aggregators
/// there are: forty racks die one after another, with places for three.
#[test]
fn tables_take_what_is_charged() {
    let rack = |number: u32| {
        let children = vec![Node::Worker(2 * number as u16), Node::Worker(2 * number as u16 + 1)];
        Node::Aggregator { endpoint: Endpoint(1000 + number), is_full: true, children }
    };
    let tree = Tree { children: (0..40).map(rack).collect() };
    let workers: Vec<Endpoint> = (0..80).map(Endpoint).collect();
    let config = ServerConfig { tree, workers, window: 1024, stand_ins: 3, ..config(4) };
    let flat = ServerConfig { tree: Tree { children: (0..40).map(Node::Worker).collect() }, ..config.clone() };
    let charged = config.memory_bytes() - flat.memory_bytes();
    let mut server = Server::new(Time(0), config);
    assert_eq!(server.paths.reserved_bytes(), 0);
    for number in 0..40u32 {
        for (worker, name) in [(2 * number, 1), (2 * number + 1, 2)] {
            let beat = Header { flags: FLAG_LOST, ..header(Kind::HeartbeatUp, name, 0, 0) }.encode(&[], None);
            server.handle_packet(Time(0), Endpoint(worker), &beat).unwrap();
        }
        let push =
            [&Header { flags: FLAG_LOST, ..header(Kind::Push, 1, 0, 0) }.encode(&[1; 4], None)[..], &[1; 4]].concat();
        let is_in = server.handle_packet(Time(0), Endpoint(2 * number), &push).is_ok();
        assert_eq!(is_in, number < 3);
        let reserved = server.paths.reserved_bytes();
        assert!(reserved > 0 && reserved <= charged, "{reserved} of {charged} bytes");
    }
    for worker in 0..80u32 {
        let beat = header(Kind::HeartbeatUp, 1 << (worker % 2), 0, 0).encode(&[], None);
        server.handle_packet(Time(0), Endpoint(worker), &beat).unwrap();
    }
    assert_eq!((server.bypassed().count(), server.paths.reserved_bytes()), (0, 0));
}
