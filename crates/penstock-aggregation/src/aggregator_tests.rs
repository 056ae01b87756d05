use super::super::PacketError;
use super::super::packet::FLAG_LOST;
use super::*;
use crate::Key;
use proptest::prelude::*;

const ABOVE: Endpoint = Endpoint(9);

fn tenant(window: u32, children: usize) -> Tenant {
    let name = (1 << children) - 1;
    let children = (0..children).map(|i| Child { endpoint: Endpoint(i as u32), workers: 1 << i }).collect();
    Tenant {
        job: 5,
        epoch: 3,
        key: None,
        window,
        block_bytes: 8,
        floats: false,
        results: true,
        apart: false,
        parent: ABOVE,
        server: None,
        name,
        children,
    }
}

fn limits() -> Limits {
    Limits { jobs: 4, slots: 64, memory_bytes: 4096 }
}

fn header(kind: Kind, worker: u32, seq: u32) -> Header {
    let format = if kind.has_block() { Format::I32 } else { Format::None };
    let (ack, credit) = (Serial(0), Serial(3));
    Header {
        kind,
        job: 5,
        epoch: 3,
        format,
        flags: 0,
        seq: Serial(seq),
        ack,
        credit,
        exponent: 0,
        workers: 1 << worker,
    }
}

fn push(worker: u32, seq: u32, value: i32) -> Vec<u8> {
    let block = value.to_be_bytes();
    [&header(Kind::Push, worker, seq).encode(&block, None)[..], &block].concat()
}

/// What goes up: its SeqNum, whom it speaks for, its sum.
fn handle(aggregator: &mut Aggregator, from: u32, bytes: &[u8]) -> Result<Option<(u32, u64, i32)>, Refusal> {
    Ok(match aggregator.handle_packet(Endpoint(from), bytes)? {
        Action::Send { to, header, payload } => {
            assert_eq!(to, [ABOVE]);
            let packet = [&header[..], payload].concat();
            let header = decode(&packet).unwrap().header;
            Some((header.seq.0, header.workers, i32::from_be_bytes(payload.try_into().unwrap())))
        }
        Action::Nothing => None,
        Action::Relay { .. } => panic!("nothing came from above"),
    })
}

/// The life of a slot: two blocks make a sum, doubles do not count, a complete sum goes up again for each, the next round takes the
/// slot, the round before is refused.
#[test]
fn a_slot() {
    let mut node = Aggregator::new(limits());
    node.open(tenant(2, 2)).unwrap();
    let mut step = |from, seq, value| handle(&mut node, from, &push(from, seq, value));
    assert_eq!(step(0, 0, 5), Ok(None));
    assert_eq!(step(0, 0, 5), Ok(None), "a double");
    assert_eq!(step(1, 0, 7), Ok(Some((0, 3, 12))));
    assert_eq!(step(0, 0, 5), Ok(Some((0, 3, 12))), "again");
    assert_eq!(step(1, 2, 100), Ok(None), "the next round");
    assert_eq!(step(0, 0, 5), Err(Refusal::Stale));
    assert_eq!(step(0, 2, -1), Ok(Some((2, 3, 99))), "nothing of the round before");
    let counters = *node.counters(5).unwrap();
    assert_eq!((counters.added, counters.completed, counters.repeated, counters.abandoned), (4, 2, 1, 0));
    assert_eq!(counters.refused[Refusal::Duplicate.index()], 2);
    assert_eq!(counters.refused[Refusal::Stale.index()], 1);
}

/// A duplicate whose block has another length, format or exponent than the sum is refused: before the others' blocks are here,
/// with the sum, and with the result. Before, 2 bytes made the whole sum go up again.
#[test]
fn duplicates_of_another_form() {
    let mut node = Aggregator::new(limits());
    node.open(tenant(2, 2)).unwrap();
    let good = header(Kind::Push, 0, 0);
    let refused = |node: &mut Aggregator| {
        for (header, block, refusal) in [
            (good, &[0; 8][..], Refusal::Length),
            (Header { format: Format::I16, ..good }, &[0; 4], Refusal::Format),
            (Header { format: Format::Exponents, ..good }, &[0; 2], Refusal::Format),
            (Header { exponent: 1, ..good }, &[0; 4], Refusal::Format),
        ] {
            let bytes = [&header.encode(block, None)[..], block].concat();
            assert_eq!(node.handle_packet(Endpoint(0), &bytes).unwrap_err(), refusal);
        }
    };
    handle(&mut node, 0, &push(0, 0, 5)).unwrap();
    refused(&mut node);
    assert_eq!(handle(&mut node, 1, &push(1, 0, 7)), Ok(Some((0, 3, 12))));
    refused(&mut node);
    let result = [&header(Kind::Result, 0, 0).encode(&[9; 4], None)[..], &[9; 4]].concat();
    assert!(matches!(node.handle_packet(ABOVE, &result), Ok(Action::Relay { .. })));
    refused(&mut node);
    let counters = node.counters(5).unwrap();
    assert_eq!((counters.repeated, counters.answered), (0, 0));
}

/// When the server lacks a block, a complete sum goes up again; else the children hear whose are missing.
#[test]
fn missing() {
    let mut node = Aggregator::new(limits());
    node.open(tenant(2, 3)).unwrap();
    let ask = |node: &mut Aggregator, from: Endpoint, seq: u32, workers: u64| {
        let packet = Header { workers, ..header(Kind::Missing, 0, seq) }.encode(&[], None);
        match node.handle_packet(from, &packet) {
            Ok(Action::Send { to, header, payload }) => {
                let sent = decode(&[&header[..], payload].concat()).unwrap().header;
                Ok(Some((to.to_vec(), sent.kind, sent.seq.0, sent.workers)))
            }
            Ok(Action::Nothing) => Ok(None),
            Ok(Action::Relay { .. }) => panic!("what goes on is about these children"),
            Err(refusal) => Err(refusal),
        }
    };
    let children = vec![Endpoint(0), Endpoint(1), Endpoint(2)];
    assert_eq!(ask(&mut node, ABOVE, 0, 7), Ok(Some((children.clone(), Kind::Missing, 0, 7))), "an empty slot");
    handle(&mut node, 1, &push(1, 0, 5)).unwrap();
    assert_eq!(ask(&mut node, ABOVE, 0, 7), Ok(Some((children.clone(), Kind::Missing, 0, 5))));
    assert_eq!(ask(&mut node, ABOVE, 0, 1 << 9), Ok(Some((children.clone(), Kind::Missing, 0, 1 << 9))), "of others");
    assert_eq!(ask(&mut node, ABOVE, 2, 7), Ok(Some((children, Kind::Missing, 2, 7))), "the next round");
    handle(&mut node, 0, &push(0, 0, 5)).unwrap();
    handle(&mut node, 2, &push(2, 0, 5)).unwrap();
    assert_eq!(ask(&mut node, ABOVE, 0, 7), Ok(Some((vec![ABOVE], Kind::Push, 0, 7))), "the sum was lost");
    handle(&mut node, 0, &push(0, 2, 5)).unwrap();
    assert_eq!(ask(&mut node, ABOVE, 0, 7), Err(Refusal::Stale));
    assert_eq!(ask(&mut node, Endpoint(0), 2, 7), Err(Refusal::Sender));
    assert_eq!((node.counters(5).unwrap().named, node.counters(5).unwrap().repeated), (4, 1));
}

/// An integer that overflows is counted, and its sum goes on, wrapped, whatever the order: here the first two overflow and
/// the third brings them back.
#[test]
fn overflow() {
    for order in [[0, 1, 2], [2, 1, 0], [0, 2, 1]] {
        let mut node = Aggregator::new(limits());
        node.open(tenant(2, 3)).unwrap();
        let values = [i32::MAX, 1, -5];
        let sums = order.map(|worker| handle(&mut node, worker, &push(worker, 0, values[worker as usize])).unwrap());
        assert_eq!(sums, [None, None, Some((0, 7, i32::MAX - 4))]);
        // MAX + 1 leaves the range and comes back with -5; -5 + 1 + MAX never does.
        assert_eq!(node.counters(5).unwrap().overflowed, if order == [0, 1, 2] { 2 } else { 0 });
    }
}

/// SeqNums wrap around: 0 is newer than 2^32 - 2.
#[test]
fn wrap_around() {
    let mut node = Aggregator::new(limits());
    node.open(tenant(2, 1)).unwrap();
    for seq in [u32::MAX - 1, u32::MAX, 0, 1] {
        assert_eq!(handle(&mut node, 0, &push(0, seq, 1)), Ok(Some((seq, 1, 1))));
    }
    assert_eq!(handle(&mut node, 0, &push(0, u32::MAX, 1)), Err(Refusal::Stale));
}

/// The heart table: nothing goes up before all were heard; then the minimum; a late old heartbeat takes nothing back.
#[test]
fn the_heart_table() {
    let mut node = Aggregator::new(limits());
    node.open(tenant(4, 3)).unwrap();
    let mut beat = |worker: u32, ack: u32| {
        let header =
            Header { ack: Serial(ack), credit: Serial(ack.wrapping_add(3)), ..header(Kind::HeartbeatUp, worker, 0) };
        match node.handle_packet(Endpoint(worker), &header.encode(&[], None)).unwrap() {
            Action::Send { header, .. } => {
                let header = decode(&header).unwrap().header;
                assert_eq!((header.kind, header.workers), (Kind::HeartbeatUp, 7));
                Some((header.ack.0, header.credit.0))
            }
            _ => None,
        }
    };
    assert_eq!(beat(0, u32::MAX), None);
    assert_eq!(beat(1, 2), None);
    assert_eq!(beat(2, 1), Some((u32::MAX, 2)), "across the wrap-around");
    assert_eq!(beat(1, 3), None, "the minimum is as it was");
    assert_eq!(beat(0, 2), Some((1, 4)));
    assert_eq!(beat(0, u32::MAX), Some((1, 4)), "an old one; the first child's goes up always");
    assert_eq!(beat(2, 5), Some((2, 5)));
}

/// What comes from above goes to all children as it is; from elsewhere it is refused.
#[test]
fn relay() {
    let mut node = Aggregator::new(limits());
    node.open(tenant(2, 3)).unwrap();
    let result = [&header(Kind::Result, 0, 1).encode(&[0; 4], None)[..], &[0; 4]].concat();
    match node.handle_packet(ABOVE, &result).unwrap() {
        Action::Relay { to } => assert_eq!(to, [Endpoint(0), Endpoint(1), Endpoint(2)]),
        other => panic!("{other:?}"),
    }
    assert_eq!(node.handle_packet(Endpoint(1), &result).unwrap_err(), Refusal::Sender);
}

/// A result takes the place of its sum, and whoever lost it gets it again, byte for byte: who asks, and who pushes again. Where it is
/// not, those whose blocks are missing hear so, or it is asked for above, once.
#[test]
fn results() {
    let mut node = Aggregator::new(limits());
    let mut job = tenant(2, 3);
    // The last child is an aggregator.
    job.children[2].workers = 0b1100;
    job.name = 0b1111;
    node.open(job).unwrap();
    let result = |seq: u32, block: &[u8]| [&header(Kind::Result, 5, seq).encode(block, None)[..], block].concat();
    let ask = |worker: u32, seq: u32| {
        let workers = if worker == 2 { 0b1100 } else { 1 << worker };
        Header { workers, ..header(Kind::Request, worker, seq) }.encode(&[], None).to_vec()
    };
    // The node's own request, before all children were heard and after.
    let asks = |ack: u32| {
        let (ack, credit) = (Serial(ack), Serial(if ack == 0 { 3 } else { ack }));
        let request = Header { workers: 0b1111, ack, credit, ..header(Kind::Request, 0, 0) };
        Ok((vec![ABOVE], request.encode(&[], None).to_vec()))
    };
    let sent = |node: &mut Aggregator, from: Endpoint, bytes: &[u8]| match node.handle_packet(from, bytes) {
        Ok(Action::Send { to, header, payload }) => Ok((to.to_vec(), [&header[..], payload].concat())),
        Ok(Action::Nothing) => Ok((Vec::new(), Vec::new())),
        Ok(Action::Relay { to }) => Ok((to.to_vec(), bytes.to_vec())),
        Err(refusal) => Err(refusal),
    };
    let all = vec![Endpoint(0), Endpoint(1), Endpoint(2)];
    let nothing = || Ok((Vec::new(), Vec::new()));
    // Nothing is here: it may be above.
    assert_eq!(sent(&mut node, Endpoint(1), &ask(1, 0)), asks(4u32.wrapping_neg()));
    handle(&mut node, 0, &push(0, 0, 5)).unwrap();
    let (to, named) = sent(&mut node, Endpoint(0), &ask(0, 0)).unwrap();
    let named_header = decode(&named).unwrap().header;
    assert_eq!(
        (to, named_header.kind, named_header.seq, named_header.workers),
        (all.clone(), Kind::Missing, Serial(0), 0b1110)
    );
    assert_eq!(sent(&mut node, Endpoint(1), &ask(1, 0)), nothing(), "all have been told");
    assert_eq!(sent(&mut node, Endpoint(0), &ask(0, 0)).unwrap().0, all, "somebody asks again");
    handle(&mut node, 1, &push(1, 0, 7)).unwrap();
    let rack = |seq: u32| {
        [&Header { workers: 0b1100, ..header(Kind::Push, 0, seq) }.encode(&[0, 0, 0, 1], None)[..], &[0, 0, 0, 1]]
            .concat()
    };
    assert_eq!(handle(&mut node, 2, &rack(0)), Ok(Some((0, 0b1111, 13))));
    // The sum is complete, and lost, or on its way.
    assert_eq!(sent(&mut node, Endpoint(2), &ask(2, 0)), nothing(), "asked already");
    assert_eq!(sent(&mut node, Endpoint(2), &ask(2, 0)), asks(0), "again, for all that is below");
    assert_eq!(sent(&mut node, Endpoint(1), &ask(1, 0)), nothing(), "asked above already");
    assert_eq!(sent(&mut node, Endpoint(2), &ask(1, 0)), Err(Refusal::Sender));
    // The result is here.
    let answer = result(0, &[9; 4]);
    assert_eq!(sent(&mut node, ABOVE, &answer), Ok((all.clone(), answer.clone())));
    assert_eq!(sent(&mut node, Endpoint(1), &ask(1, 0)), Ok((vec![Endpoint(1)], answer.clone())));
    assert_eq!(sent(&mut node, Endpoint(2), &ask(2, 0)), Ok((vec![Endpoint(2)], answer.clone())));
    assert_eq!(
        sent(&mut node, Endpoint(0), &push(0, 0, 5)),
        Ok((vec![Endpoint(0)], answer.clone())),
        "instead of the sum"
    );
    let longer = [&header(Kind::Push, 0, 0).encode(&[0; 8], None)[..], &[0; 8]].concat();
    assert_eq!(sent(&mut node, Endpoint(0), &longer), Err(Refusal::Length), "only to a block as long");
    let missing = header(Kind::Missing, 0, 0).encode(&[], None);
    assert_eq!(sent(&mut node, ABOVE, &missing), Err(Refusal::Stale), "it has been committed");
    // The next round takes the slot; the result of the one before only passes, and one that is too long never stays.
    assert_eq!(handle(&mut node, 0, &push(0, 2, 1)), Ok(None));
    assert_eq!(sent(&mut node, ABOVE, &answer), Ok((all.clone(), answer.clone())));
    assert_eq!(sent(&mut node, Endpoint(1), &ask(1, 0)), Err(Refusal::Stale));
    assert_eq!(sent(&mut node, ABOVE, &result(2, &[9; 12])), Ok((all, result(2, &[9; 12]))));
    assert_eq!(handle(&mut node, 1, &push(1, 2, 1)), Ok(None));
    assert_eq!(handle(&mut node, 2, &rack(2)), Ok(Some((2, 0b1111, 3))), "nothing of a result is in the sum");
    let counters = node.counters(5).unwrap();
    assert_eq!((counters.answered, counters.named, counters.relayed, counters.abandoned), (3, 2, 3, 0));
}

/// Names of one hop: what goes up names this node alone, what is missing above is asked of all children that are not in the slot,
/// and others' missing blocks go on under no name.
#[test]
fn names_of_a_hop() {
    const SERVER: Endpoint = Endpoint(8);
    let mut node = Aggregator::new(limits());
    node.open(Tenant { server: Some(SERVER), name: 1 << 40, ..tenant(2, 2) }).unwrap();
    let ask = |node: &mut Aggregator, workers: u64| {
        let packet = Header { workers, ..header(Kind::Missing, 0, 0) }.encode(&[], None);
        match node.handle_packet(ABOVE, &packet).unwrap() {
            Action::Send { header, .. } => Some(decode(&header).unwrap().header.workers),
            _ => None,
        }
    };
    assert_eq!(handle(&mut node, 0, &push(0, 0, 5)), Ok(None));
    assert_eq!((ask(&mut node, 1 << 40), ask(&mut node, 1)), (Some(0b10), Some(0)));
    assert_eq!(handle(&mut node, 1, &push(1, 0, 7)), Ok(Some((0, 1 << 40, 12))));
    // The server stands in for a child.
    assert_eq!(handle(&mut node, SERVER.0, &push(0, 1, 5)), Ok(None));
    assert_eq!(handle(&mut node, 0, &push(0, 1, 5)), Ok(None), "it counts once");
    assert_eq!(handle(&mut node, 1, &push(1, 1, 7)), Ok(Some((1, 1 << 40, 12))));
}

/// A child's block that three later ones of it overtake is asked for, of that child alone, and again half a window later.
#[test]
fn gaps() {
    let mut node = Aggregator::new(limits());
    node.open(Tenant { server: Some(Endpoint(8)), name: 1, ..tenant(16, 2) }).unwrap();
    let mut asked = Vec::new();
    for seq in (0..16).filter(|seq| *seq != 2) {
        // The other child's blocks are all here, but for the last ones.
        if seq < 12 {
            let _ = node.handle_packet(Endpoint(0), &push(0, seq, 1)).unwrap();
        }
        let _ = node.handle_packet(Endpoint(0), &push(0, 2, 1)).unwrap();
        if let Action::Send { to, header, .. } = node.handle_packet(Endpoint(1), &push(1, seq, 1)).unwrap()
            && let Ok(Packet { header, .. }) = decode(&header)
        {
            asked.push((seq, to.to_vec(), header.kind, header.seq.0, header.workers));
        }
    }
    assert_eq!(asked, [], "what completes a sum sends it, and the server sees the gap");
    let mut node = Aggregator::new(limits());
    node.open(Tenant { server: Some(Endpoint(8)), name: 1, ..tenant(16, 2) }).unwrap();
    for seq in (0..16).filter(|seq| *seq != 2) {
        if let Action::Send { to, header, .. } = node.handle_packet(Endpoint(1), &push(1, seq, 1)).unwrap() {
            let header = decode(&header).unwrap().header;
            asked.push((seq, to.to_vec(), header.kind, header.seq.0, header.workers));
        }
        if seq == 1 {
            let _ = node.handle_packet(Endpoint(0), &push(0, 2, 1)).unwrap();
        }
    }
    let missing = |at| (at, vec![Endpoint(1)], Kind::Missing, 2, 0b10);
    assert_eq!(asked, [missing(5), missing(10)]);
}

/// An aggregator with several shards asks as well: each shard at the first of its own blocks that is three or more later.
#[test]
fn gaps_in_shards() {
    for (count, asked_at) in [(1, [4, 9]), (2, [6, 10]), (4, [8, 12])] {
        let lost = count;
        let mut node = Aggregator::sharded(limits(), Shard { index: 0, count });
        node.open(Tenant { server: Some(Endpoint(8)), name: 1, ..tenant(16, 2) }).unwrap();
        let _ = node.handle_packet(Endpoint(0), &push(0, lost, 1)).unwrap();
        let mut asked = Vec::new();
        for seq in (0..16).step_by(count as usize).filter(|seq| *seq != lost) {
            if let Action::Send { header, .. } = node.handle_packet(Endpoint(1), &push(1, seq, 1)).unwrap() {
                asked.push((seq, decode(&header).unwrap().header.seq.0));
            }
        }
        assert_eq!(asked, asked_at.map(|at| (at, lost)), "{count} shards");
    }
}

/// While its parent is bypassed, a node's sums go to the server, and say LOST until the parent is heard again.
#[test]
fn past_the_parent() {
    const SERVER: Endpoint = Endpoint(8);
    let mut node = Aggregator::new(limits());
    node.open(Tenant { server: Some(SERVER), name: 1, ..tenant(2, 1) }).unwrap();
    let down = |node: &mut Aggregator, from: Endpoint, number: u32, is_bypass: bool| {
        let workers = crate::path::state(number, is_bypass);
        let packet = Header { workers, ..header(Kind::HeartbeatDown, 0, 0) }.encode(&[], None);
        assert!(matches!(node.handle_packet(from, &packet), Ok(Action::Relay { .. })));
    };
    let up = |node: &mut Aggregator, seq: u32| match node.handle_packet(Endpoint(0), &push(0, seq, 1)).unwrap() {
        Action::Send { to, header, .. } => (to[0], decode(&[&header[..], &[0; 4]].concat()).unwrap().header.flags),
        other => panic!("{other:?}"),
    };
    assert_eq!(up(&mut node, 0), (ABOVE, 0));
    down(&mut node, SERVER, 1, true);
    assert_eq!(up(&mut node, 1), (SERVER, FLAG_LOST));
    down(&mut node, ABOVE, 1, false);
    assert_eq!(up(&mut node, 2), (SERVER, 0), "the parent is heard, and still bypassed");
    down(&mut node, ABOVE, 2, false);
    assert_eq!(up(&mut node, 3), (ABOVE, 0));
    down(&mut node, SERVER, 1, true);
    assert_eq!(up(&mut node, 4), (ABOVE, 0), "an old packet");
    down(&mut node, SERVER, 3, true);
    assert_eq!(up(&mut node, 5), (SERVER, FLAG_LOST), "lost again");
}

/// A node that adds floats adds FULL blocks, among each other only, and says so; one that does not refuses them.
#[test]
fn full_blocks() {
    let mut node = Aggregator::new(Limits { memory_bytes: 1 << 16, ..limits() });
    node.open(Tenant { floats: true, ..tenant(2, 2) }).unwrap();
    let push = |node: &mut Aggregator, worker: u32, flags: u8, format: Format| {
        let block = f32::INFINITY.to_be_bytes();
        let header = Header { flags, format, ..header(Kind::Push, worker, 0) };
        match node.handle_packet(Endpoint(worker), &[&header.encode(&block, None)[..], &block].concat())? {
            Action::Send { header, payload, .. } => {
                Ok(Some((decode(&[&header[..], payload].concat()).unwrap().header.flags, payload.to_vec())))
            }
            _ => Ok(None),
        }
    };
    assert_eq!(push(&mut node, 0, FLAG_FULL, Format::I32), Err(Refusal::Format));
    assert_eq!(push(&mut node, 0, FLAG_FULL, Format::F32), Ok(None));
    assert_eq!(push(&mut node, 1, 0, Format::F32), Err(Refusal::Format));
    let sum = (FLAG_FULL, f32::INFINITY.to_be_bytes().to_vec());
    assert_eq!(push(&mut node, 1, FLAG_FULL, Format::F32), Ok(Some(sum)));
}

/// Everything that does not belong here is counted and leaves the slots as they are.
#[test]
fn unauthenticated() {
    let key = Key([3; 16]);
    let mut node = Aggregator::new(limits());
    node.open(Tenant { key: Some(key), ..tenant(2, 2) }).unwrap();
    let sealed =
        |header: Header, payload: &[u8], key: Option<&Key>| [&header.encode(payload, key)[..], payload].concat();
    let good = header(Kind::Push, 0, 0);
    let digest = |node: &Aggregator| {
        let mut state = siphasher::sip::SipHasher13::new();
        node.digest(&mut state);
        std::hash::Hasher::finish(&state)
    };
    let before = digest(&node);
    let four = [1u8; 4];
    let cases = [
        (0, sealed(good, &four, Some(&Key([4; 16]))), Refusal::Key),
        (0, sealed(good, &four, None), Refusal::Key),
        (0, sealed(Header { job: 6, ..good }, &four, Some(&key)), Refusal::Job),
        (0, sealed(Header { epoch: 2, ..good }, &four, Some(&key)), Refusal::Epoch),
        (1, sealed(good, &four, Some(&key)), Refusal::Sender),
        (7, sealed(good, &four, Some(&key)), Refusal::Sender),
        (0, sealed(Header { workers: 3, ..good }, &four, Some(&key)), Refusal::Sender),
        (0, sealed(Header { workers: 1 << 40, ..good }, &four, Some(&key)), Refusal::Sender),
        (1, sealed(Header { kind: Kind::Request, format: Format::None, ..good }, &[], Some(&key)), Refusal::Sender),
        (0, sealed(Header { kind: Kind::Result, ..good }, &four, Some(&key)), Refusal::Sender),
        (0, four.to_vec(), Refusal::Malformed(PacketError::Truncated { bytes: 4 })),
    ];
    for (from, bytes, refusal) in &cases {
        assert_eq!(node.handle_packet(Endpoint(*from), bytes).unwrap_err(), *refusal);
        assert_eq!(digest(&node), before, "{refusal}");
    }
    // These are the worker's own, so they may move the heart table, but no slot.
    for (header, payload, refusal) in [
        (good, &[1u8; 12][..], Refusal::Length),
        (Header { flags: FLAG_FULL, format: Format::F32, ..good }, &four, Refusal::Format),
        (Header { format: Format::F32, flags: FLAG_LOST, ..good }, &four, Refusal::Format),
    ] {
        let bytes = sealed(header, payload, Some(&key));
        assert_eq!(node.handle_packet(Endpoint(0), &bytes).unwrap_err(), refusal);
        assert_eq!(node.waiting_slots(5), 0);
    }
    // In one slot all blocks are alike.
    assert!(node.handle_packet(Endpoint(0), &sealed(good, &four, Some(&key))).is_ok());
    for (header, payload, refusal) in [
        (Header { exponent: 1, ..good }, &four[..], Refusal::Format),
        (Header { format: Format::I16, ..good }, &four, Refusal::Format),
        (good, &[1u8; 8], Refusal::Length),
    ] {
        let bytes = sealed(Header { workers: 2, ..header }, payload, Some(&key));
        assert_eq!(node.handle_packet(Endpoint(1), &bytes).unwrap_err(), refusal);
    }
    assert_eq!(node.counters(5).unwrap().added, 1);
    assert_eq!(node.unauthenticated().iter().sum::<u64>(), 2, "another job's, and what is no packet");
}

/// Jobs are admitted within the limits, and one job's slots are nothing to another.
#[test]
fn admission() {
    let mut node = Aggregator::new(Limits { jobs: 2, slots: 8, memory_bytes: 64 });
    let mut open = |job| node.open(job);
    assert_eq!(open(Tenant { window: 3, ..tenant(2, 2) }), Err(Admission::Window(3)));
    assert_eq!(open(Tenant { window: 0, ..tenant(2, 2) }), Err(Admission::Window(0)));
    assert_eq!(open(Tenant { block_bytes: 8897, ..tenant(2, 2) }), Err(Admission::Block(8897)));
    assert_eq!(open(tenant(2, 0)), Err(Admission::Children));
    let twice = vec![Child { endpoint: Endpoint(0), workers: 3 }, Child { endpoint: Endpoint(1), workers: 2 }];
    assert_eq!(open(Tenant { children: twice, ..tenant(2, 2) }), Err(Admission::Children));
    assert_eq!(open(tenant(16, 2)), Err(Admission::Slots { needed: 16, free: 8 }));
    assert_eq!(open(Tenant { floats: true, ..tenant(4, 2) }), Err(Admission::Memory { needed: 96, free: 64 }));
    assert_eq!(open(tenant(4, 2)), Ok(()));
    assert_eq!(open(Tenant { job: 6, ..tenant(8, 2) }), Err(Admission::Slots { needed: 8, free: 4 }));
    assert_eq!(open(Tenant { job: 6, ..tenant(4, 2) }), Ok(()));
    assert_eq!(open(Tenant { job: 7, ..tenant(1, 2) }), Err(Admission::Jobs(2)));
    assert_eq!(open(Tenant { epoch: 2, ..tenant(4, 2) }), Err(Admission::Epoch(3)));
    assert_eq!(open(Tenant { epoch: 4, ..tenant(4, 1) }), Ok(()), "the next epoch replaces the one before");
    node.close(6);
    assert_eq!(node.open(Tenant { job: 7, ..tenant(4, 2) }), Ok(()));
}

/// Shards of a node divide the SeqNums, and a job's slots: a whole window of blocks is added in any order, also where SeqNums
/// wrap around, and no shard touches another's.
#[test]
fn shards() {
    for (window, count) in [(8u32, 2u32), (8, 4), (2, 4), (1, 16)] {
        let of = |index| Aggregator::sharded(limits(), Shard { index, count });
        let mut nodes: Vec<Aggregator> = (0..count).map(of).collect();
        for node in &mut nodes {
            node.open(tenant(window, 2)).unwrap();
        }
        for round in 0..4 {
            // All of worker 0's blocks lie in their slots before the first of worker 1 comes.
            let first = (0u32.wrapping_sub(window)).wrapping_add(round * window);
            for worker in 0..2 {
                for seq in (0..window).rev().map(|i| first.wrapping_add(i)) {
                    let mine = (seq % count) as usize;
                    for (index, node) in nodes.iter_mut().enumerate().filter(|(index, _)| *index != mine) {
                        let refused = handle(node, worker, &push(worker, seq, 7));
                        assert_eq!(refused, Err(Refusal::Shard), "{seq} at {index} of {count}");
                    }
                    let sum = handle(&mut nodes[mine], worker, &push(worker, seq, 1 + worker as i32)).unwrap();
                    assert_eq!(sum, (worker == 1).then_some((seq, 3, 3)), "window {window}, {count} shards");
                }
            }
        }
        let slots: usize = nodes.iter().map(|node| node.jobs[&5].slots.len()).sum();
        assert_eq!(slots as u32, window.max(count));
    }
}

proptest! {
    /// Any sequence of packets, sensible or not, from anywhere: no panic, and a sum that goes up is the sum of the
    /// blocks of that SeqNum, because workers send the same block under one SeqNum; a result that goes down again came from above.
    /// A push gets a sum or a result only if its block has the form of that: a short one cannot make a long one be sent.
    #[test]
    fn sequences(steps in proptest::collection::vec(
        (0u32..10, 0u32..4, 0u32..9, 0u8..22, any::<(u8, u8)>(), proptest::collection::vec(any::<u8>(), 0..70)), 0..200,
    )) {
        let mut node = Aggregator::new(limits());
        node.open(Tenant { floats: true, ..tenant(2, 3) }).unwrap();
        let block = |worker: u32, seq: u32| (1 + worker as i32) * 1000 + seq as i32;
        let mut results = std::collections::BTreeSet::new();
        for (from, worker, seq, what, (at, flip), noise) in steps {
            let bytes = match what {
                0..=7 => push(worker, seq, block(worker, seq)),
                // Each other kind, from above and from below.
                8..=12 => {
                    let kind = [Kind::HeartbeatUp, Kind::HeartbeatDown, Kind::Missing, Kind::Request, Kind::Result]
                        [usize::from(what) - 8];
                    let block: &[u8] = if kind.has_block() { &[0, 0, 0, 1] } else { &[] };
                    [&header(kind, worker, seq).encode(block, None)[..], block].concat()
                }
                // What floats, exponents and blocks for the server alone make of a slot that holds, or will hold, integers: a byte of
                // the format, flags or exponent, else anywhere. But not of the SeqNum or the block: without a key those cannot
                // be told from a worker's own.
                13..=17 => {
                    let mut bytes = push(worker, seq, block(worker, seq));
                    let at = if what < 16 { [10, 11, 24, 25][usize::from(at) % 4] } else { usize::from(at) % HEADER_BYTES };
                    bytes[if (12..16).contains(&at) { 0 } else { at }] ^= flip;
                    bytes
                }
                18 => push(worker, seq, block(worker, seq))[..usize::from(at) % 52].to_vec(),
                // A block that is longer or shorter than the others of its SeqNum.
                19 | 20 => {
                    let format = if what == 19 { Format::I32 } else { Format::I16 };
                    let block = &block(worker, seq).to_be_bytes().repeat(2)[if what == 19 { 0..8 } else { 2..4 }];
                    [&Header { format, ..header(Kind::Push, worker, seq) }.encode(block, None)[..], block].concat()
                }
                _ => noise,
            };
            let from = if !(8..=12).contains(&what) && from < 8 { worker } else { from };
            let pushed = decode(&bytes).ok().filter(|packet| packet.header.kind == Kind::Push);
            if let Ok(Packet { header, payload, .. }) = decode(&bytes)
                && header.kind == Kind::Result
            {
                results.insert((header.seq.0, payload.to_vec()));
            }
            if let Ok(Action::Send { header, payload, .. }) = node.handle_packet(Endpoint(from), &bytes)
                && !payload.is_empty()
            {
                let header = decode(&[&header[..], payload].concat()).unwrap().header;
                if let Some(Packet { header: pushed, payload: block, .. }) = pushed {
                    let form = |header: &Header, block: &[u8]| (header.format, header.exponent, block.len());
                    prop_assert_eq!(form(&pushed, block), form(&header, payload), "what a push got is of another form");
                }
                if header.kind == Kind::Result {
                    prop_assert!(results.contains(&(header.seq.0, payload.to_vec())), "a result that never came");
                    continue;
                }
                let blocks = (0..3).map(|worker| block(worker, header.seq.0));
                let sum = match header.format {
                    // The same bytes, read as another type.
                    Format::I32 => blocks.sum::<i32>().to_be_bytes(),
                    Format::F32 => {
                        blocks.map(|block| f32::from_bits(block as u32)).fold(-0.0, |a, b| a + b).to_be_bytes()
                    }
                    _ => continue,
                };
                prop_assert_eq!(payload, sum.repeat(payload.len() / 4));
            }
        }
    }
}
