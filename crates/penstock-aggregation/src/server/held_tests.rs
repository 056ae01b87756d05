//! Accepted and done against real workers, without a network between.

use super::*;
use crate::aggregator::{Action, Aggregator, Child, Limits, Tenant};
use crate::packet::{Header, decode};
use crate::server::ServerConfig;
use crate::{Endpoint, Naming, Node, Outbound, Route, Timing, Tree, Worker, WorkerConfig};

const SERVER: Endpoint = Endpoint(9);

/// Workers straight below a server that holds up to `limit` blocks, all of window 4.
fn nodes(workers: u32, limit: u32) -> (Server, Vec<Worker>) {
    let config = ServerConfig {
        job: 5,
        epoch: 3,
        key: None,
        window: 4,
        block_bytes: 4,
        start: Serial(u32::MAX - 2),
        tree: Tree { children: (0..workers as u16).map(Node::Worker).collect() },
        naming: Naming::Children,
        workers: (0..workers).map(Endpoint).collect(),
        stand_ins: 1,
        held_blocks: Some(limit),
        heartbeat_every: ServerConfig::HEARTBEAT_EVERY,
        idle_every: ServerConfig::IDLE_EVERY,
        returns_after: 0,
    };
    let worker = |number: u32| WorkerConfig {
        job: 5,
        epoch: 3,
        key: None,
        name: 1 << number,
        window: 4,
        start: config.start,
        parent: SERVER,
        server: SERVER,
        ask_parent: false,
        full_to_parent: false,
        apart: true,
        timing: Timing::default(),
    };
    let all = (0..workers).map(|number| Worker::new(Time(0), worker(number))).collect();
    (Server::new(Time(0), config), all)
}

/// What a worker says until it has nothing to say at this time, as packets.
fn says(worker: &mut Worker) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    while let Some(Outbound { header, .. }) = worker.poll_transmit(Time(0)) {
        let block = if header.kind == Kind::Push { &1i32.to_be_bytes()[..] } else { &[] };
        let format = if block.is_empty() { Format::None } else { Format::I32 };
        let flags = header.flags | if block.is_empty() { 0 } else { FLAG_LAST };
        all.push([&worker.seal(&Header { flags, ..header }, format, 0, block)[..], block].concat());
    }
    all
}

/// What the server says, as packets, with their receivers.
fn answers(server: &mut Server) -> Vec<(Endpoint, Vec<u8>)> {
    let mut all = Vec::new();
    while let Some(Transmit { to, header, payload }) = server.poll_transmit() {
        all.push((to, [&header[..], payload].concat()));
    }
    all
}

/// On a network that loses nothing no node refuses a packet of another, each worker hears at once that its blocks were accepted, and may
/// push the next ones, without a heartbeat. (Once an Accepted said an Ack below the block of its own and granted more than a window beyond
/// that: all workers but one refused it, and waited 2 ms for a heartbeat.)
#[test]
fn every_acceptance_is_believed() {
    for workers in [1, 2, 5] {
        let (mut server, mut all) = nodes(workers, 100);
        let mut results = vec![0; workers as usize];
        for worker in &mut all {
            while worker.post(Route::Tree).is_some() {}
        }
        for round in 0..8 {
            for (number, worker) in all.iter_mut().enumerate() {
                for packet in says(worker) {
                    server.handle_packet(Time(0), Endpoint(number as u32), &packet).expect("a packet of a worker");
                }
            }
            while let Some(buffer) = server.poll_work() {
                assert!(server.done(Time(0), buffer.first, Ok(buffer.bytes)));
            }
            for (to, packet) in answers(&mut server) {
                let to = to.0 as usize;
                let kind = decode(&packet).expect("a packet").header.kind;
                match all[to].handle_packet(Time(0), SERVER, &packet) {
                    Ok(_) => results[to] += u32::from(kind == Kind::Pulled),
                    Err(refusal) => panic!("round {round}: worker {to} of {workers} refused {kind:?}: {refusal}"),
                }
            }
            for worker in &mut all {
                while worker.post(Route::Tree).is_some() {}
                assert_eq!(worker.received(), server.ack(), "round {round} of {workers} workers");
            }
        }
        assert!(results.iter().all(|count| *count >= 8 * 3), "{results:?} of {workers} workers");
    }
}

/// A server's socket blocks when a result has left for one worker and not for the other: what the first says now, with an Ack of that
/// result, is taken. (Once it was refused, and with it the block that it pushed.) An Ack beyond is refused.
#[test]
fn an_ack_while_a_result_leaves() {
    let (mut server, _) = nodes(2, 100);
    let start = server.ack();
    for number in 0..2 {
        let packet = upward(Kind::Push, 1 << number, start.0, start.0);
        server.handle_packet(Time(0), Endpoint(number), &packet).expect("within Credit");
    }
    let buffer = server.poll_work().expect("it is whole");
    assert!(server.done(Time(0), buffer.first, Ok(buffer.bytes)));
    let first = loop {
        let Transmit { to, header, payload } = server.poll_transmit().expect("the result leaves");
        if decode(&[&header[..], payload].concat()).expect("a packet").header.kind == Kind::Pulled {
            break to;
        }
    };
    let next = start.plus(1);
    let mut says = |ack: Serial| {
        let packet = upward(Kind::Push, 1 << first.0, next.0, ack.0);
        server.handle_packet(Time(0), first, &packet)
    };
    assert_eq!(says(next.plus(1)), Err(Refusal::Ack));
    assert_eq!(says(next), Ok(None));
    let left: Vec<_> = answers(&mut server).into_iter().map(|(to, _)| to).collect();
    assert!(left.contains(&Endpoint(1 - first.0)), "the other gets it, too");
    assert_eq!(server.held(), Some((1, 100)), "which it has not said yet");
}

/// What a node says, as a packet.
fn upward(kind: Kind, name: u64, seq: u32, ack: u32) -> Vec<u8> {
    let block = if kind == Kind::Push { &1i32.to_be_bytes()[..] } else { &[] };
    let (format, flags) = if block.is_empty() { (Format::None, 0) } else { (Format::I32, FLAG_LAST) };
    let (ack, credit) = (Serial(ack), Serial(ack.wrapping_add(3)));
    let header =
        Header { kind, job: 5, epoch: 3, format, flags, seq: Serial(seq), ack, credit, exponent: 0, workers: name };
    [&header.encode(block, None)[..], block].concat()
}

/// An aggregator that has restarted and has not heard all its children does not ask for a block in their name. If it did, with an Ack
/// that it guessed from the SeqNum, the server would forget result 0, which worker 0 has not got.
#[test]
fn an_aggregator_that_does_not_know_asks_nothing() {
    let rack = Endpoint(8);
    let aggregator = || {
        let child = |number: u32| Child { endpoint: Endpoint(number), workers: 1 << number };
        let tenant = Tenant {
            job: 5,
            epoch: 3,
            key: None,
            window: 4,
            block_bytes: 4,
            floats: true,
            results: true,
            apart: true,
            parent: SERVER,
            server: Some(SERVER),
            name: 1,
            children: (0..2).map(child).collect(),
        };
        let mut aggregator = Aggregator::new(Limits { jobs: 1, slots: 4, memory_bytes: 1 << 20 });
        aggregator.open(tenant).expect("there is room");
        aggregator
    };
    let (server, _) = nodes(1, 100);
    let below = (0..2).map(Node::Worker).collect();
    let tree = Tree { children: vec![Node::Aggregator { endpoint: rack, is_full: true, children: below }] };
    let workers = vec![Endpoint(0), Endpoint(1)];
    let mut server = Server::new(Time(0), ServerConfig { tree, workers, start: Serial(0), ..server.config });
    // Results 0 to 3 have left, and as long as worker 0 lacks result 0 no other does. Blocks up to 10 are accepted meanwhile.
    for seq in 0..11 {
        server.handle_packet(Time(0), rack, &upward(Kind::Push, 1, seq, 0)).expect("within Credit");
        while let Some(buffer) = server.poll_work() {
            server.done(Time(0), buffer.first, Ok(buffer.bytes));
        }
        answers(&mut server);
    }
    assert_eq!(server.held.as_ref().map(Held::sent), Some(Serial(4)));
    let mut aggregator = aggregator();
    let asks = |aggregator: &mut Aggregator, server: &mut Server, from: u32, packet: &[u8]| {
        let Ok(Action::Send { to, header, payload }) = aggregator.handle_packet(Endpoint(from), packet) else {
            return 0;
        };
        assert_eq!(to, [SERVER]);
        let _ = server.handle_packet(Time(0), rack, &[&header[..], payload].concat());
        1
    };
    // Worker 1 misses what became of its block 10, and 10 - 2 W is 2.
    assert_eq!(
        asks(&mut aggregator, &mut server, 1, &upward(Kind::Request, 2, 10, 1)),
        0,
        "nothing is known of worker 0"
    );
    assert!(server.held.as_ref().expect("apart").result(Serial(0)).is_some(), "worker 0 has not got result 0");
    // A result has a number of that flow, and two windows before that one all have all. So this question goes up at once.
    assert_eq!(asks(&mut aggregator, &mut server, 0, &upward(Kind::Pull, 1, 0, 0)), 1);
    assert!(answers(&mut server).iter().any(|(to, packet)| {
        let header = decode(packet).expect("a packet").header;
        (*to, header.kind, header.seq) == (rack, Kind::Pulled, Serial(0))
    }));
}
