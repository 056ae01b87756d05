use super::*;
use crate::estimate::MAX_DOUBTFUL;
use proptest::prelude::*;

const RACK: Endpoint = Endpoint(10);

/// Worker 2 straight below the server, workers 0 and 1 below an aggregator.
fn config(format_bytes: usize) -> ServerConfig {
    let rack = Node::Aggregator { endpoint: RACK, children: vec![Node::Worker(0), Node::Worker(1)] };
    ServerConfig {
        job: 5,
        epoch: 3,
        key: None,
        window: 2,
        block_bytes: format_bytes,
        start: Serial(0),
        tree: Tree { children: vec![rack, Node::Worker(2)] },
        workers: vec![Endpoint(0), Endpoint(1), Endpoint(2)],
        heartbeat_every: ServerConfig::HEARTBEAT_EVERY,
        idle_every: ServerConfig::IDLE_EVERY,
    }
}

fn header(kind: Kind, workers: u64, seq: u32, ack: u32) -> Header {
    let format = if kind == Kind::Push { Format::F32 } else { Format::None };
    let (ack, credit) = (Serial(ack), Serial(ack + 1));
    Header { kind, job: 5, epoch: 3, format, flags: 0, seq: Serial(seq), ack, credit, exponent: 0, workers }
}

fn push(server: &mut Server, from: Endpoint, workers: u64, seq: u32, value: f32) -> Result<Option<Serial>, Refusal> {
    let block = value.to_be_bytes();
    let packet = [&header(Kind::Push, workers, seq, 0).encode(&block, None)[..], &block].concat();
    server.handle_packet(Time(0), from, &packet)
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

/// However the parts come (sums, single blocks, both, twice, in whatever order), the sum is that of the tree, committed
/// once. Without R19 the bits depend on the order of arrival.
#[test]
fn every_mixture_and_order() {
    let pair = VALUES[0] + VALUES[1];
    let expected = (pair + VALUES[2]).to_bits();
    let parts =
        [(RACK, 3, pair), (Endpoint(0), 1, VALUES[0]), (Endpoint(1), 2, VALUES[1]), (Endpoint(2), 4, VALUES[2])];
    let mut results_without_order = std::collections::BTreeSet::new();
    for order in 0..4usize.pow(5) {
        for without in [None, Some(Rule::Order)] {
            let mut server = Server::with_rules(Time(0), config(4), Rules { without });
            let mut commits = 0;
            for i in 0..5 {
                let (from, workers, value) = parts[order / 4usize.pow(i) % 4];
                commits += usize::from(matches!(push(&mut server, from, workers, 0, value), Ok(Some(_))));
            }
            assert!(commits <= 1);
            let results: Vec<_> =
                sent(&mut server).into_iter().filter(|(_, header, _)| header.kind == Kind::Result).collect();
            assert_eq!(results.len(), commits * 2, "one through the aggregator, one straight");
            for (_, _, block) in results {
                let bits = u32::from_be_bytes(block.try_into().unwrap());
                match without {
                    None => assert_eq!(bits, expected, "order {order}"),
                    Some(_) => drop(results_without_order.insert(bits)),
                }
            }
        }
    }
    assert!(results_without_order.len() > 1, "nothing breaks without R19");
}

/// A result in which integers overflowed is delivered, wrapped, and counted.
#[test]
fn overflow() {
    let mut server = Server::new(Time(0), config(4));
    let mut push = |from, workers, seq, value: i32| {
        let block = value.to_be_bytes();
        let header = Header { format: Format::I32, ..header(Kind::Push, workers, seq, 0) };
        server.handle_packet(Time(0), from, &[&header.encode(&block, None)[..], &block].concat()).unwrap();
        server.overflowed()
    };
    assert_eq!((push(RACK, 3, 0, i32::MIN), push(Endpoint(2), 4, 0, 0)), (0, 0));
    assert_eq!((push(RACK, 3, 1, i32::MIN), push(Endpoint(2), 4, 1, -1)), (0, 1));
    let results: Vec<Vec<u8>> = sent(&mut server).into_iter().map(|(_, _, block)| block).collect();
    assert_eq!(results, [i32::MIN, i32::MIN, i32::MAX, i32::MAX].map(|value| value.to_be_bytes().to_vec()));
}

/// Credit follows the slowest worker, and what all have is forgotten; until then whoever asks gets it.
#[test]
fn credit_and_requests() {
    let mut server = Server::new(Time(0), config(4));
    let ask = |server: &mut Server, worker: u32, seq: u32| {
        let packet = header(Kind::Request, 1 << worker, seq, 0).encode(&[], None);
        server.handle_packet(Time(0), Endpoint(worker), &packet)
    };
    assert_eq!(ask(&mut server, 1, 3), Err(Refusal::Stale), "beyond the window");
    assert_eq!(push(&mut server, Endpoint(2), 4, 2, 1.0), Err(Refusal::Credit));
    for seq in [1, 0] {
        assert_eq!(push(&mut server, RACK, 3, seq, 1.0), Ok(None));
        assert_eq!(server.missing(Serial(seq)), 4);
        assert_eq!(push(&mut server, Endpoint(2), 4, seq, 2.0), Ok(Some(Serial(seq))));
        assert_eq!(push(&mut server, Endpoint(2), 4, seq, 2.0), Err(Refusal::Stale));
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
    assert_eq!(hear(&mut server, RACK, 3, 2), Ok(None));
    assert_eq!(server.credit(), Serial(1), "worker 2 lacks both");
    assert_eq!(hear(&mut server, Endpoint(2), 4, 1), Ok(None));
    assert_eq!(server.credit(), Serial(2));
    assert_eq!(hear(&mut server, Endpoint(2), 4, 0), Ok(None));
    assert_eq!(server.credit(), Serial(2), "nothing is taken back");
    assert_eq!(hear(&mut server, Endpoint(2), 4, 3), Err(Refusal::Ack), "an Ack for what was never committed");
    assert_eq!(hear(&mut server, Endpoint(2), 3, 1), Err(Refusal::Sender));
    assert_eq!(hear(&mut server, RACK, 1, 1), Err(Refusal::Sender), "an aggregator speaks for all below it");
}

/// A sum that three later ones pass is missing, and named again when it does not come; what one worker asks for goes to
/// it, what two below an aggregator ask for goes through that to all, once, until one asks again.
#[test]
fn losses() {
    let mut server = Server::new(Time(0), ServerConfig { window: 8, ..config(4) });
    for seq in [0, 2, 3] {
        push(&mut server, RACK, 3, seq, 1.0).unwrap();
        push(&mut server, Endpoint(2), 4, seq, 1.0).unwrap();
    }
    let missing = |server: &mut Server| -> Vec<(Endpoint, u32, u64)> {
        let named = sent(server).into_iter().filter(|(_, header, _)| header.kind == Kind::Missing);
        named.map(|(to, header, _)| (to, header.seq.0, header.workers)).collect()
    };
    push(&mut server, Endpoint(2), 4, 1, 1.0).unwrap();
    assert_eq!(missing(&mut server), []);
    push(&mut server, RACK, 3, 4, 1.0).unwrap();
    push(&mut server, Endpoint(2), 4, 4, 1.0).unwrap();
    assert_eq!(missing(&mut server), [(RACK, 1, 3)]);
    let again = server.poll_timeout();
    assert!(again <= Time(ServerConfig::HEARTBEAT_EVERY), "{again:?}");
    server.handle_timeout(again);
    assert_eq!(missing(&mut server), [(RACK, 1, 3)]);
    let mut ask = |worker: u32| -> Vec<Endpoint> {
        let packet = header(Kind::Request, 1 << worker, 2, 0).encode(&[], None);
        server.handle_packet(again, Endpoint(worker), &packet).unwrap();
        sent(&mut server).into_iter().map(|(to, ..)| to).collect()
    };
    assert_eq!((ask(0), ask(1)), (vec![Endpoint(0)], vec![RACK]));
    assert_eq!((ask(2), ask(1), ask(0)), (vec![Endpoint(2)], vec![Endpoint(1)], vec![RACK]));
    // An aggregator that does not have it passes a question on, and gets it: once, until somebody asks again.
    let passed_on = |server: &mut Server, worker: u32| -> Vec<Endpoint> {
        let packet = header(Kind::Request, 1 << worker, 3, 0).encode(&[], None);
        server.handle_packet(again, RACK, &packet).unwrap();
        sent(server).into_iter().map(|(to, ..)| to).collect()
    };
    assert_eq!(passed_on(&mut server, 0), [RACK]);
    assert_eq!(passed_on(&mut server, 1), []);
    assert_eq!(passed_on(&mut server, 1), [RACK]);
    let packet = header(Kind::Request, 0b10, 2, 0).encode(&[], None);
    server.handle_packet(again, RACK, &packet).unwrap();
    assert_eq!(sent(&mut server).into_iter().map(|(to, ..)| to).collect::<Vec<_>>(), [RACK]);
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
    let push = |server: &mut Server, now: Time, from: Endpoint, workers: u64, seq: u32| {
        let ack = server.ack();
        let header = Header { ack, credit: ack.plus(63), ..header(Kind::Push, workers, seq, 0) };
        let block = 1.0_f32.to_be_bytes();
        server.handle_packet(now, from, &[&header.encode(&block, None)[..], &block].concat()).unwrap();
    };
    let missing =
        |server: &mut Server| sent(server).iter().filter(|(_, header, _)| header.kind == Kind::Missing).count();
    // The rack's sum of one block is lost and comes after `takes`; says how often it was named until then.
    let mut repair = |takes: u64| -> usize {
        for seq in next..next + 4 {
            push(&mut server, now, Endpoint(2), 4, seq);
            if seq != next {
                push(&mut server, now, RACK, 3, seq);
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
        push(&mut server, now, RACK, 3, next);
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
    let beat = |server: &mut Server, worker: u32, flags: u8| {
        let packet = Header { flags, ..header(Kind::HeartbeatUp, 1 << worker, 0, 0) }.encode(&[], None);
        server.handle_packet(Time(0), Endpoint(worker), &packet).unwrap();
    };
    assert_eq!(server.direct(), 0);
    beat(&mut server, 0, FLAG_LOST);
    assert_eq!(server.direct(), 0b11);
    let heartbeats = sent(&mut server);
    let mut to: Vec<Endpoint> = heartbeats.iter().map(|(to, ..)| *to).collect();
    to.sort();
    assert_eq!(
        to,
        [Endpoint(0), Endpoint(1), Endpoint(2), RACK],
        "at once, and also through the aggregator: it may be back"
    );
    assert!(heartbeats.iter().all(|(_, header, _)| header.workers == 0b11));
    for worker in 0..3 {
        push(&mut server, Endpoint(worker), 1 << worker, 0, VALUES[worker as usize]).unwrap();
    }
    // `push` carries no LOST flag: worker 0 hears its aggregator again.
    assert_eq!(server.direct(), 0);
    beat(&mut server, 2, FLAG_LOST);
    assert_eq!(server.direct(), 0, "there is nothing to pass by");
}

proptest! {
    /// Whatever comes, from whomever: no panic, each SeqNum is committed once and in the window, and what waits to be sent has a bound,
    /// also where nothing leaves.
    #[test]
    fn sequences(steps in proptest::collection::vec(
        (0usize..5, 0u64..16, 0u32..6, 0u32..6, 0u8..4, any::<u8>(), any::<bool>()), 0..300,
    )) {
        let mut server = Server::new(Time(0), config(4));
        let mut committed = std::collections::BTreeSet::new();
        let mut now = Time(0);
        for (from, workers, seq, ack, kind, flags, leaves) in steps {
            let kind = [Kind::Push, Kind::Request, Kind::HeartbeatUp, Kind::Result][usize::from(kind)];
            let from = [Endpoint(0), Endpoint(1), Endpoint(2), RACK, Endpoint(99)][from];
            let block: &[u8] = if kind.has_block() { &[0; 4] } else { &[] };
            let flags = if kind == Kind::Push { 0 } else { flags & FLAG_LOST };
            let format = if kind.has_block() { Format::F32 } else { Format::None };
            let header = Header { flags, format, ..header(kind, workers, seq, ack) };
            let packet = [&header.encode(block, None)[..], block].concat();
            let (low, high) = (server.ack(), server.credit());
            if let Ok(Some(seq)) = server.handle_packet(now, from, &packet) {
                prop_assert!(committed.insert(seq.0), "{seq} is committed twice");
                prop_assert!(!low.is_newer_than(seq) && !seq.is_newer_than(high), "{seq} lies outside {low} to {high}");
            }
            now = now.plus(MILLISECOND / 2);
            server.handle_timeout(now);
            if leaves {
                prop_assert!(sent(&mut server).len() < 100);
            }
            prop_assert!(server.losses.names.len() <= 2 * 4 && server.slots.iter().all(|slot| slot.announce.len() <= 3));
        }
    }
}
