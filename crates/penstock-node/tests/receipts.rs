//! A daemon that lets everybody open jobs sends nothing worth mentioning to addresses that somebody else has named.

mod cluster;

use cluster::{config, daemon, get, http, proof, put};
use penstock_aggregation::{Format, HEADER_BYTES, Header, Kind, Receipt, Serial};
use penstock_node::{Config, Daemon, Role};
use serde_json::{Value, json};
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

const VICTIMS: usize = 63;
const BLOCK: usize = 1024;

/// Whose address was named, and who can be made to seem to send.
fn sockets(count: usize) -> Vec<UdpSocket> {
    (0..count).map(|_| UdpSocket::bind("127.0.0.1:0").expect("a socket")).collect()
}

fn at(socket: &UdpSocket) -> SocketAddr {
    socket.local_addr().expect("it is bound")
}

fn packet(kind: Kind, seq: u32, workers: u64, payload: &[u8]) -> Vec<u8> {
    let format = if payload.is_empty() { Format::None } else { Format::I32 };
    let header = Header {
        kind,
        job: 7,
        epoch: 1,
        format,
        flags: 0,
        seq: Serial(seq),
        ack: Serial(0),
        credit: Serial(15),
        exponent: 0,
        workers,
    };
    [&header.encode(payload, None)[..], payload].concat()
}

/// What has come to a socket.
fn received(socket: &UdpSocket) -> Vec<Vec<u8>> {
    socket.set_nonblocking(true).expect("a socket");
    let mut all = Vec::new();
    let mut bytes = [0; 9000];
    while let Ok(length) = socket.recv(&mut bytes) {
        all.push(bytes[..length].to_vec());
    }
    all
}

fn await_one(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    socket.set_nonblocking(false).expect("a socket");
    socket.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
    let mut bytes = [0; 9000];
    let (length, from) = socket.recv_from(&mut bytes).expect("a packet within 20 s");
    (bytes[..length].to_vec(), from)
}

/// Returns the number that a daemon has asked this address for.
fn show(socket: &UdpSocket) {
    let (bytes, from) = await_one(socket);
    let answer =
        Receipt::decode(&bytes).and_then(|receipt| receipt.answer()).expect("it is asked before anything else");
    socket.send_to(&answer.encode(), from).expect("sent");
}

/// Waits until the daemon has taken so many of the job's packets: it takes them, and sends, in order.
fn await_packets(node: &Daemon, count: u64) {
    let packets = || -> u64 {
        let reply = get(node.local_addr(), "/jobs");
        reply["jobs"][0]["nodes"].as_array().expect("nodes").iter().map(|node| node["packets"].as_u64().unwrap()).sum()
    };
    let start = std::time::Instant::now();
    while packets() < count {
        assert!(start.elapsed() < Duration::from_secs(20), "{} of {count} packets", packets());
    }
}

fn aggregator_job(parent: &UdpSocket, children: &[UdpSocket]) -> Value {
    let children: Vec<Value> = children
        .iter()
        .enumerate()
        .map(|(i, child)| json!({ "address": at(child).to_string(), "workers": format!("{:#x}", 1u64 << i) }))
        .collect();
    json!({
        "epoch": 1, "key": null, "window": 16, "block_bytes": BLOCK, "floats": false, "start": 0,
        "parent": { "address": at(parent).to_string() }, "children": children,
    })
}

fn server_job(workers: &[UdpSocket]) -> Value {
    let tree: Vec<Value> = (0..workers.len()).map(|worker| json!({ "worker": worker })).collect();
    let workers: Vec<String> = workers.iter().map(|worker| at(worker).to_string()).collect();
    json!({
        "epoch": 1, "key": null, "window": 16, "block_bytes": BLOCK, "start": 0, "tree": tree, "workers": workers,
    })
}

/// Results and questions from an aggregator's parent reach children that have shown that they receive, and nobody else; for a packet that
/// seems to come from others, or goes to them, one of 48 bytes leaves for one of them. It is the same for the parent, to whom one short packet can ask for a block.
#[test]
fn an_aggregator_amplifies_nothing() {
    let node = daemon(config(Role::Aggregator));
    let to = node.local_addr();
    let (parent, children) = (sockets(1).remove(0), sockets(VICTIMS + 1));
    let (honest, victims) = children.split_last().expect("children");
    assert_eq!(put(to, 7, &aggregator_job(&parent, &children)).0, 201);
    let send = |from: &UdpSocket, bytes: &[u8]| assert_eq!(from.send_to(bytes, to).expect("sent"), bytes.len());
    // A result from above goes nowhere, and its sender is asked.
    send(&parent, &packet(Kind::Result, 0, 0, &[1; BLOCK]));
    show(&parent);
    send(honest, &packet(Kind::HeartbeatUp, 0, 1 << VICTIMS, &[]));
    show(honest);
    // Somebody seems to be 63 children. (A datagram that is cut off asks nothing at all.)
    let mut sent = 0;
    for (i, victim) in victims.iter().enumerate() {
        send(victim, &packet(Kind::Request, 0, 1 << i, &[]));
        send(victim, &packet(Kind::Request, 0, 1 << i, &[])[..20]);
        let wrong = Receipt { job: 7, epoch: 1, returned: 12345, asked: 0 };
        send(victim, &wrong.encode());
        sent += 1;
    }
    send(&parent, &packet(Kind::Result, 1, 0, &[2; BLOCK]));
    send(&parent, &packet(Kind::HeartbeatDown, 0, 0, &[]));
    // Answered and relayed in order: when the heartbeat is here, so is everything before it.
    let mut kinds = Vec::new();
    while kinds.last() != Some(&(Kind::HeartbeatDown as u8)) {
        kinds.push(await_one(honest).0[3]);
    }
    assert!(kinds.contains(&(Kind::Result as u8)), "{kinds:?}");
    await_packets(&node, 3 + sent + sent);
    // One for a packet that seemed to be theirs; and for two that went to children, one child was asked each.
    let got: Vec<Vec<u8>> = victims.iter().flat_map(received).collect();
    assert!(got.iter().all(|bytes| Receipt::decode(bytes).is_some()), "nothing else is sent there");
    assert!(got.len() <= victims.len() + 2, "{} packets", got.len());

    // A parent that somebody else has named: a sum, and duplicates without a block that would have it sent again.
    let (parent, children) = (sockets(1).remove(0), sockets(1));
    let job = aggregator_job(&parent, &children).to_string().replacen("\"epoch\":1", "\"epoch\":2", 1);
    assert_eq!(http(to, "PUT", "/jobs/7", &[], &job).0, 201);
    let second = |mut bytes: Vec<u8>| {
        bytes[9] = 2;
        bytes
    };
    send(&children[0], &second(packet(Kind::HeartbeatUp, 0, 1, &[])));
    show(&children[0]);
    send(&children[0], &second(packet(Kind::Push, 0, 1, &[3; BLOCK])));
    send(&children[0], &second(packet(Kind::Push, 0, 1, &[3; 4])));
    await_packets(&node, 3);
    let got = received(&parent);
    assert!(got.len() <= 3 && got.iter().all(|bytes| bytes.len() == HEADER_BYTES), "{} packets", got.len());
    assert!(!got.is_empty(), "it is asked, since one of the two has to begin");
}

/// An aggregator that was started anew asks its children, who pass it by and wait for it to send, one after the other.
#[test]
fn children_that_wait_are_asked() {
    let node = daemon(config(Role::Aggregator));
    let to = node.local_addr();
    let (parent, children) = (sockets(1).remove(0), sockets(3));
    assert_eq!(put(to, 7, &aggregator_job(&parent, &children)).0, 201);
    let beat = || parent.send_to(&packet(Kind::HeartbeatDown, 0, 0, &[]), to).expect("sent");
    beat();
    show(&parent);
    for child in &children {
        beat();
        show(child);
    }
    beat();
    for child in &children {
        while await_one(child).0[3] != Kind::HeartbeatDown as u8 {}
    }
}

/// Aggregators that were started anew before any packet went through them are asked by the server: the workers below bypass them and
/// wait for packets through them.
#[test]
fn aggregators_that_wait_are_asked() {
    let node = daemon(config(Role::Server));
    let to = node.local_addr();
    let (workers, aggregators) = (sockets(2), sockets(2));
    let mut job = server_job(&workers);
    job["tree"] = aggregators
        .iter()
        .enumerate()
        .map(|(i, aggregator)| json!({ "aggregator": { "address": at(aggregator).to_string(), "shards": 1 }, "children": [{ "worker": i }] }))
        .collect();
    assert_eq!(put(to, 7, &job).0, 201);
    let beat = || workers[0].send_to(&packet(Kind::HeartbeatUp, 0, 1, &[]), to).expect("sent");
    beat();
    show(&workers[0]);
    // The server asks one for each of the worker's packets, once it has had a heartbeat for them.
    let asked = |aggregator: &UdpSocket| {
        aggregator.set_nonblocking(true).expect("a socket");
        aggregator.peek(&mut [0; HEADER_BYTES]).is_ok()
    };
    let start = std::time::Instant::now();
    while !aggregators.iter().all(asked) {
        assert!(start.elapsed() < Duration::from_secs(20), "both are asked");
        beat();
    }
    // Then they hear the heartbeats.
    for aggregator in &aggregators {
        show(aggregator);
        while await_one(aggregator).0[3] != Kind::HeartbeatDown as u8 {}
    }
}

/// A server sends heartbeats and results to workers that have shown that they receive. To the others one packet of 48 bytes leaves for
/// each that has come.
#[test]
fn a_server_amplifies_nothing() {
    let node = daemon(config(Role::Server));
    let to = node.local_addr();
    let workers = sockets(VICTIMS + 1);
    let (honest, victims) = workers.split_last().expect("workers");
    assert_eq!(put(to, 7, &server_job(&workers)).0, 201);
    for (i, worker) in workers.iter().enumerate() {
        worker.send_to(&packet(Kind::Push, 0, 1 << i, &[1; BLOCK]), to).expect("sent");
    }
    show(honest);
    // From here on it hears heartbeats, at once and every 100 ms; nobody else does.
    for _ in 0..3 {
        assert_ne!(await_one(honest).0[3], 16, "it is asked once");
    }
    honest.send_to(&packet(Kind::Request, 0, 1 << VICTIMS, &[]), to).expect("sent");
    while await_one(honest).0[3] != Kind::Result as u8 {}
    // The honest one has sent a push and a request.
    let got: Vec<Vec<u8>> = victims.iter().flat_map(received).collect();
    assert!(got.iter().all(|bytes| Receipt::decode(bytes).is_some()), "nothing else is sent there");
    assert!(got.len() <= victims.len() + 2, "{} packets", got.len());
}

/// Who has the secret may name whom it wants: switches, for instance, cannot show anything.
#[test]
fn a_secret_vouches_for_addresses() {
    let node = daemon(Config { secret: Some(b"hush".to_vec()), ..config(Role::Server) });
    let workers = sockets(2);
    let body = server_job(&workers).to_string();
    let to = node.local_addr();
    assert_eq!(http(to, "PUT", "/jobs/7", &proof(to, b"hush", "PUT", "/jobs/7", &body), &body).0, 201);
    for worker in &workers {
        assert_eq!(await_one(worker).0[3], Kind::HeartbeatDown as u8);
    }
}
