use super::*;
use crate::admission::{aggregator_job, server_job};
use penstock_aggregation::{Format, Header, Kind, Serial, VERSION};
use proptest::prelude::*;
use std::net::{Ipv4Addr, SocketAddr};

fn socket() -> Datagrams {
    Datagrams::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), true, 1 << 18).unwrap()
}

fn settings() -> Settings {
    let limits = Limits { jobs: 4, slots: 64, memory_bytes: 1 << 28 };
    Settings { shard: Shard::WHOLE, limits, drop: None, receipts: Some(Key([9; 16])) }
}

/// Loss strikes the same datagrams for the same seed, others for another, and about as many as it is told to.
#[test]
fn seeded_loss() {
    let draw = |rate, seed| -> Vec<bool> {
        let mut loss = Loss::new(Some((rate, seed)), Shard::WHOLE);
        (0..20_000).map(|_| loss.strikes()).collect()
    };
    assert_eq!(draw(0.05, 1), draw(0.05, 1));
    assert_ne!(draw(0.05, 1), draw(0.05, 2));
    for rate in [0.0, 0.01, 0.05, 0.5] {
        let struck = draw(rate, 3).iter().filter(|struck| **struck).count() as f64 / 20_000.0;
        assert!((struck - rate).abs() < 0.01, "{rate}: {struck}");
    }
    assert!(Loss::new(None, Shard::WHOLE).threshold == 0);
}

/// Whatever a train holds, sensible or not, from a node of the job or not: neither machine panics, and an intact packet that comes
/// after it has its effect.
fn storms(trains: Vec<(usize, Vec<u8>, usize, u8)>) {
    for done in ["block", "buffer"] {
        storm(&trains, done);
    }
}

fn storm(trains: &[(usize, Vec<u8>, usize, u8)], done: &str) {
    let nodes: Vec<SocketAddr> = (1..4).map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port))).collect();
    let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 9));
    let body = r#"{"epoch": 3, "key": null, "done": "?", "window": 4, "block_bytes": 64, "floats": true, "parent": {"address": "127.0.0.1:1"},
        "children": [{"address": "127.0.0.1:2", "workers": "0x1"}, {"address": "127.0.0.1:3", "workers": "0x2", "shards": 2}]}"#;
    let mut adding = Adding::new(&settings());
    adding.open(Time(0), aggregator_job(5, body.replace('?', done).as_bytes(), here).unwrap()).unwrap();
    let body = r#"{"epoch": 3, "key": null, "done": "?", "window": 4, "block_bytes": 64, "start": 0,
        "tree": [{"worker": 0}, {"worker": 1}], "workers": ["127.0.0.1:2", "127.0.0.1:3"]}"#;
    // Outcomes of the work behind buffers would come here.
    let (sender, _outcomes) = channel();
    let wake = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
    let (worker, _buffers) = channel();
    let mut serving = Serving::new(&settings(), worker, Mailbox { sender, wake });
    serving.open(Time(0), server_job(5, body.replace('?', done).as_bytes(), here).unwrap()).unwrap();
    let mut out = socket();
    for (from, mut bytes, stride, kind) in trains.iter().cloned() {
        // The right start, so that what lies deeper is reached.
        for packet in bytes.chunks_mut(stride.max(1)).filter(|packet| packet.len() >= 48 && kind < 10) {
            let length = packet.len() as u16 - 48;
            packet[..10].copy_from_slice(&[0x50, 0x41, VERSION, kind, 0, 0, 0, 5, 0, 3]);
            (packet[10], packet[11]) = (if length > 0 { packet[10] % 8 } else { 0 }, packet[11] % 8);
            packet[26..28].copy_from_slice(&length.to_be_bytes());
            packet[28..32].fill(0);
            packet[32..39].fill(0);
            packet[39] %= 4;
            packet[40..48].fill(0);
        }
        let from = nodes.get(from).copied().unwrap_or(here);
        deliver(&mut out, &mut adding, Time(1), Train { from, bytes: &bytes, stride });
        deliver(&mut out, &mut serving, Time(1), Train { from, bytes: &bytes, stride });
        serving.send(Time(1), &mut out);
    }
    adding.send(Time(1), &mut out);
    // An honest heartbeat is heard, whatever came before.
    let silent = |report: Report| report.jobs[0].nodes.iter().find(|node| node.workers == "0").unwrap().silent_ns;
    let header = Header {
        kind: Kind::HeartbeatUp,
        job: 5,
        epoch: 3,
        format: Format::None,
        flags: 0,
        seq: Serial(0),
        ack: Serial(0),
        credit: Serial(3),
        exponent: 0,
        workers: 1,
    };
    let bytes = header.encode(&[], None);
    let (from, stride) = (nodes[1], bytes.len());
    deliver(&mut out, &mut adding, Time(5), Train { from, bytes: &bytes, stride });
    deliver(&mut out, &mut serving, Time(5), Train { from, bytes: &bytes, stride });
    adding.send(Time(5), &mut out);
    assert_eq!(
        (silent(adding.report(Time(9), &Which::All)), silent(serving.report(Time(9), &Which::All))),
        (Some(4), Some(4))
    );
}

/// A server whose work does not end, and a worker that opens one epoch after the other: what is still worked on for epochs that are over
/// counts, so that memory does not grow; and its outcome has no effect on a later epoch, though that has the same number.
#[test]
fn work_for_epochs_that_are_over() {
    let worker = SocketAddr::from((Ipv4Addr::LOCALHOST, 2));
    let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 9));
    let body = r#"{"epoch": 3, "key": null, "done": "buffer", "pending_bytes": 8192, "window": 4, "block_bytes": 4096, "floats": true,
        "start": 0, "tree": [{"worker": 0}], "workers": ["127.0.0.1:2"]}"#;
    let job = || server_job(5, body.as_bytes(), here).unwrap();
    let (sender, outcomes) = channel();
    let wake = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
    let (lends, buffers) = channel();
    let limits = Limits { memory_bytes: 130_000, ..settings().limits };
    let mut serving = Serving::new(&Settings { limits, ..settings() }, lends, Mailbox { sender, wake });
    let mut out = socket();
    let mut push_one = |serving: &mut Serving| {
        let (seq, ack, credit) = (Serial(0), Serial(0), Serial(3));
        let (kind, format, flags) = (Kind::Push, Format::I32, penstock_aggregation::FLAG_LAST);
        let header = Header { kind, job: 5, epoch: 3, format, flags, seq, ack, credit, exponent: 0, workers: 1 };
        let block = [1; 4096];
        let bytes = [&header.encode(&block, None)[..], &block].concat();
        deliver(&mut out, serving, Time(1), Train { from: worker, bytes: &bytes, stride: bytes.len() });
        serving.send(Time(1), &mut out);
        buffers.try_recv().expect("a whole buffer")
    };
    let unfinished = |serving: &Serving| {
        serving.report(Time(2), &Which::All).jobs[0].server.as_ref().unwrap().held.clone().unwrap().unfinished
    };
    let mut lent = Vec::new();
    let refused = loop {
        match serving.open(Time(0), job()) {
            Ok(()) => lent.push(push_one(&mut serving)),
            Err(Refused::Conflict(why)) => break why,
            Err(other) => panic!("{other:?}"),
        }
        assert!(lent.len() < 100, "memory of epochs that are over is not counted");
    };
    assert!(refused.contains(&format!("{} are still worked on", 4096 * lent.len())), "{refused}");
    // The oldest ends: for nobody. That of the epoch that is open does not wait for it, and is not taken for it.
    let last = lent.pop().unwrap();
    for (buffer, done) in lent {
        done.end(Ok(buffer.bytes));
        let Ok(Command::Done(ended)) = outcomes.try_recv() else { panic!("it has ended") };
        serving.done(Time(2), ended);
        assert_eq!(unfinished(&serving), 1, "an outcome of another epoch");
    }
    last.1.end(Ok(last.0.bytes));
    let Ok(Command::Done(ended)) = outcomes.try_recv() else { panic!("it has ended") };
    serving.done(Time(2), ended);
    assert_eq!(unfinished(&serving), 0);
    assert_eq!(serving.open(Time(3), job()), Ok(()));
}

/// What workers behind streams have to say is said in turns, so that datagrams are received in between.
#[test]
fn turns() {
    let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 9));
    let body = r#"{"epoch": 3, "key": null, "names": "children", "window": 1024, "block_bytes": 64, "floats": true, "start": 0,
        "tree": [{"worker": 0}, {"worker": 1}], "workers": ["stream", "stream"]}"#;
    let (sender, _outcomes) = channel();
    let wake = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
    let (lends, _buffers) = channel();
    let limits = Limits { slots: 1024, memory_bytes: 1 << 30, ..settings().limits };
    let mut serving = Serving::new(&Settings { limits, ..settings() }, lends, Mailbox { sender, wake });
    serving.open(Time(0), server_job(5, body.as_bytes(), here).unwrap()).unwrap();
    let mut out = socket();
    let (told, outcomes) = channel();
    for worker in 0..2 {
        let told = told.clone();
        let call = Streamed::Push(Box::new(vec![1u8; 64 * 4096]), Box::new(move |outcome| drop(told.send(outcome))));
        serving.stream(Time(1), &format!("5/3/{worker}/0/i32"), call);
    }
    let said = |serving: &Serving| {
        serving.report(Time(2), &Which::All).jobs[0].nodes.iter().map(|node| node.packets).sum::<u64>()
    };
    let (mut before, mut sends) = (0, 0);
    for now in 1.. {
        serving.send(Time(now), &mut out);
        assert!(said(&serving) <= before + u64::from(serving::TURN), "{} packets in one turn", said(&serving) - before);
        (before, sends) = (said(&serving), sends + 1);
        if let Ok(outcome) = outcomes.try_recv() {
            assert_eq!(outcome, Ok(()));
            break;
        }
        assert!(sends < 10_000, "{before} packets");
    }
    assert!(before >= 2 * 4096);
}

/// Gives a train to a machine, with a real outbox: a datagram of ours brings it about.
fn deliver(out: &mut Datagrams, machine: &mut impl Machine, now: Time, train: Train<'_>) {
    let here = out.local_addr();
    out.queue(here, &[0], &[]);
    let _ = out.flush();
    let limit = rustix::time::Timespec { tv_sec: 10, tv_nsec: 0 };
    let mut given = false;
    while !given {
        poll(&mut [PollFd::new(&*out, PollFlags::IN)], Some(&limit)).unwrap();
        out.exchange(|_, outbox| {
            if !std::mem::replace(&mut given, true) {
                machine.train(now, train, outbox);
            }
        })
        .unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn storms_do_not_panic(trains in proptest::collection::vec(
        (0usize..4, proptest::collection::vec(any::<u8>(), 0..400), 0usize..130, 0u8..12), 1..12,
    )) {
        storms(trains);
    }
}
