//! Frames moved by hand between two machines: loss, repeats, races, references, failed groups.

use crate::fingerprint::{Layout, Order};
use crate::frame::{Direction, FrameError, Header, Kind, MAX_REPORT_BYTES, Reference};
use crate::peer::*;
use penstock_types::Priority;

const NOW: Time = Time(1_000_000);

fn key(message: u32) -> MessageKey {
    MessageKey { group: GroupId(7), space: NumberSpace::Collective(ChannelId::MAIN), op: OpSeq(3), message }
}

/// A stream comes up, and is not asked how long its way is.
fn stream_up(peer: &mut Peer, stream: StreamId, now: Time) {
    peer.stream_up(stream, now);
    peer.streams.get_mut(&stream).expect("it is up").wants_heartbeat = false;
}

/// Two machines with so many streams.
fn pair(config: &PeerConfig, streams: u32) -> [Peer; 2] {
    [0, 1].map(|_| {
        let mut peer = Peer::new(config.clone(), Time(0));
        (0..streams).for_each(|stream| stream_up(&mut peer, stream, Time(0)));
        peer
    })
}

/// What a rank tells that leaves a group.
fn farewell() -> Farewell {
    Farewell { collectives: 4, last: vec![(OpSeq(3), FIVE)], leaves_group: true }
}

fn memory(peer: &mut Peer, message: u32, len: u64) {
    send(peer, message, Body::Memory { place: Reference { address: 0x1000, epoch: 0, region: 0 }, len });
}

fn copied(peer: &mut Peer, message: u32, len: usize) {
    send(peer, message, Body::Owned(vec![1; len].into()));
}

fn send(peer: &mut Peer, message: u32, body: Body) {
    let (key, priority) = (key(message), Priority(0));
    peer.send(Outgoing { key, priority, is_changed: false, fingerprint: FIVE, coflow: 0, body });
}

/// What the net does with one frame.
fn take(peer: &mut Peer, stream: StreamId, frame: &Outbound, status: OpStatus) -> (Arrival, Finish) {
    let arrival = peer.handle_header(stream, &frame.header, status, NOW).expect("a good header");
    (arrival, finish(peer, stream, frame, status))
}

fn finish(peer: &mut Peer, stream: StreamId, frame: &Outbound, status: OpStatus) -> Finish {
    peer.handle_frame(stream, &frame.header, frame.payload.bytes().unwrap_or(&[]), status).expect("a good frame")
}

/// Moves everything that one stream has from `from` to `to`.
fn drain(from: &mut Peer, to: &mut Peer, stream: StreamId) -> Vec<(Header, Finish)> {
    let mut all = Vec::new();
    while let Some(frame) = from.poll_frame(stream, NOW) {
        all.push((frame.header, take(to, stream, &frame, OpStatus::Active).1));
    }
    all
}

/// The header of a frame of stream 0, as another stream would carry it.
fn on(stream: StreamId, frame: &Outbound) -> Header {
    Header { ack: if stream == 0 { frame.header.ack } else { 0 }, ..frame.header }
}

fn events(peer: &mut Peer) -> Vec<Event> {
    std::iter::from_fn(|| peer.poll_event()).collect()
}

/// A message of so many bytes waits at `a`, and `b` has granted it.
fn granted(a: &mut Peer, b: &mut Peer, len: u64) {
    memory(a, 0, len);
    b.grant(key(0), 1, FIVE);
    drain(b, a, 0);
    assert_eq!(events(a), [Event::Granted(key(0), FIVE)]);
}

/// Every frame of a message, and what asks for its room, names the coflow that its sender said.
#[test]
fn frames_carry_their_coflow() {
    let [mut a, mut b] = pair(&PeerConfig::default(), 1);
    let of = |number: u32, coflow: u32, body: Body| {
        let (key, priority) = (key(number), Priority(0));
        Outgoing { key, priority, is_changed: false, fingerprint: FIVE, coflow, body }
    };
    a.send(of(0, 7, Body::Memory { place: Reference { address: 0x1000, epoch: 0, region: 0 }, len: 700_000 }));
    a.send(of(1, u32::MAX, Body::Owned(vec![1; 10].into())));
    let mut sent = drain(&mut a, &mut b, 0);
    b.grant(key(0), 1, FIVE);
    drain(&mut b, &mut a, 0);
    sent.extend(drain(&mut a, &mut b, 0));
    let mut kinds = [0, 0];
    for (header, _) in &sent {
        if let Some(at) = [key(0), key(1)].iter().position(|key| *key == header.key) {
            assert_eq!(header.coflow, [7, u32::MAX][at], "{header:?}");
            kinds[at] += 1;
        }
    }
    assert!(kinds[0] > 2 && kinds[1] == 1, "{kinds:?}");
}

/// What a lost stream had in flight leaves again on the others and only once; what had arrived before is a duplicate;
/// the sender hears of the end only when all is there.
#[test]
fn a_lost_stream_is_made_good_by_the_others() {
    let [mut a, mut b] = pair(&PeerConfig::default(), 3);
    granted(&mut a, &mut b, 700_000);
    let frames: Vec<Outbound> =
        (0..3).cycle().map_while(|stream| a.poll_frame(stream, NOW)).filter(|f| f.header.kind == Kind::Data).collect();
    let (lost, kept): (Vec<_>, Vec<_>) = frames.iter().enumerate().partition(|(at, _)| at % 3 == 1);
    assert!(lost.len() > 2);
    for (at, frame) in &kept {
        assert!(take(&mut b, (at % 3) as u32, frame, OpStatus::Active).1.apply);
    }
    // The first frame of the lost stream arrives, but its ack does not come back; of the second only the header.
    assert!(take(&mut b, 1, lost[0].1, OpStatus::Active).1.apply);
    assert_eq!(b.handle_header(1, &lost[1].1.header, OpStatus::Active, NOW), Ok(Arrival::Take));
    drain(&mut b, &mut a, 0);
    drain(&mut b, &mut a, 2);
    b.stream_down(1);
    a.stream_down(1);
    assert!(events(&mut a).is_empty() && !a.is_quiet());

    let again = drain(&mut a, &mut b, 2);
    assert!(a.poll_frame(0, NOW).is_none());
    let data: Vec<_> = again.iter().filter(|(header, _)| header.kind == Kind::Data).collect();
    assert_eq!(data.len(), lost.len());
    let applied: Vec<u64> = data.iter().filter(|(_, finish)| finish.apply).map(|(header, _)| header.offset).collect();
    let expected: Vec<u64> = lost[1..].iter().map(|(_, frame)| frame.header.offset).collect();
    assert_eq!(applied, expected);
    assert_eq!(b.stats()[1].1.duplicate_frames, 1);
    assert_eq!(a.stats()[1].1.repeated_frames, lost.len() as u64);
    drain(&mut b, &mut a, 2);
    assert_eq!(events(&mut a), [Event::Sent(key(0))]);
    assert!(a.is_quiet() && b.is_quiet());
}

/// The same frame on two streams: whoever is whole first wins, the other is told to stop, and what it still brings is
/// not used.
#[test]
fn the_first_whole_copy_wins() {
    let [mut a, mut b] = pair(&PeerConfig { checksum: true, ..PeerConfig::default() }, 3);
    granted(&mut a, &mut b, 60_000);
    let frame = a.poll_frame(0, NOW).expect("granted");
    let whole = |b: &mut Peer, stream, payload| b.handle_frame(stream, &frame.header, payload, OpStatus::Active);
    let arrive = |b: &mut Peer, stream| b.handle_header(stream, &on(stream, &frame), OpStatus::Active, NOW);
    assert_eq!(arrive(&mut b, 0), Ok(Arrival::Take));
    assert_eq!(arrive(&mut b, 1), Ok(Arrival::Race));
    assert_eq!(whole(&mut b, 1, b"damaged"), Err(FrameError::PayloadSum));
    assert_eq!(finish(&mut b, 1, &frame, OpStatus::Active), Finish { apply: true, revoke: Some(0) });
    // The bytes of a duplicate are of no use, and its sender may have changed them meanwhile.
    assert_eq!(whole(&mut b, 0, b"changed"), Ok(Finish { apply: false, revoke: None }));
    assert_eq!(arrive(&mut b, 2), Ok(Arrival::Discard));
    assert_eq!(finish(&mut b, 2, &frame, OpStatus::Active), Finish { apply: false, revoke: None });
}

/// The one that reads in place is whole first: the racer's copy is dropped, nobody is revoked. Or its stream is lost:
/// the racer wins, and a third copy that came meanwhile to take the place is stopped.
#[test]
fn races_survive_the_loss_of_a_racer() {
    let [mut a, mut b] = pair(&PeerConfig::default(), 3);
    granted(&mut a, &mut b, 60_000);
    let frame = a.poll_frame(0, NOW).expect("granted");
    let arrive = |b: &mut Peer, stream| b.handle_header(stream, &on(stream, &frame), OpStatus::Active, NOW);
    assert_eq!(arrive(&mut b, 0), Ok(Arrival::Take));
    assert_eq!(arrive(&mut b, 1), Ok(Arrival::Race));
    b.stream_down(0);
    assert_eq!(arrive(&mut b, 2), Ok(Arrival::Take));
    assert_eq!(finish(&mut b, 1, &frame, OpStatus::Active), Finish { apply: true, revoke: Some(2) });
    assert_eq!(finish(&mut b, 2, &frame, OpStatus::Active), Finish { apply: false, revoke: None });

    let [mut a, mut b] = pair(&PeerConfig::default(), 2);
    granted(&mut a, &mut b, 60_000);
    assert_eq!(arrive(&mut b, 0), Ok(Arrival::Take));
    assert_eq!(arrive(&mut b, 1), Ok(Arrival::Race));
    assert_eq!(finish(&mut b, 0, &frame, OpStatus::Active), Finish { apply: true, revoke: None });
    assert_eq!(finish(&mut b, 1, &frame, OpStatus::Active), Finish { apply: false, revoke: None });
}

/// A whole frame whose range is claimed counts when it has been used, also when its stream was lost meanwhile; nothing is acknowledged
/// before. Until then no other copy gets the range; the one that read to it first is stopped, and all others are duplicates.
#[test]
fn a_claimed_frame_counts_when_it_was_used() {
    for is_lost in [false, true] {
        let [mut a, mut b] = pair(&PeerConfig::default(), 3);
        granted(&mut a, &mut b, 60_000);
        while b.poll_frame(1, NOW).is_some() {}
        let frame = a.poll_frame(0, NOW).expect("granted");
        let arrive = |b: &mut Peer, stream| b.handle_header(stream, &on(stream, &frame), OpStatus::Active, NOW);
        assert_eq!(b.claim(1, &frame.header), None, "nothing has come");
        assert_eq!(arrive(&mut b, 0), Ok(Arrival::Take));
        assert_eq!(arrive(&mut b, 1), Ok(Arrival::Race));
        assert_eq!(b.claim(1, &frame.header), Some(Some(0)));
        assert_eq!(arrive(&mut b, 2), Ok(Arrival::Race));
        assert!(b.poll_frame(1, NOW).is_none_or(|next| next.header.ack == 0), "acknowledged before it was used");
        let mut stream = 1;
        if is_lost {
            b.hold(&key(0), frame.header.offset);
            b.stream_down(1);
            stream_up(&mut b, 1, NOW);
            assert_eq!(arrive(&mut b, 1), Ok(Arrival::Race), "a repeated copy gets the range");
            stream = LOST_STREAM;
        }
        assert_eq!(finish(&mut b, stream, &frame, OpStatus::Active), Finish { apply: true, revoke: None });
        let acked: Vec<u32> = std::iter::from_fn(|| b.poll_frame(1, NOW)).map(|next| next.header.ack).collect();
        assert_eq!(
            acked.last().copied().unwrap_or(0),
            u32::from(!is_lost),
            "on the stream that brought it, and only there"
        );
        assert_eq!(b.claim(0, &frame.header), None, "a duplicate");
        assert_eq!(finish(&mut b, 0, &frame, OpStatus::Active), Finish { apply: false, revoke: None });
        assert_eq!(finish(&mut b, 2, &frame, OpStatus::Active), Finish { apply: false, revoke: None });
    }
}

/// The reader of a lost stream may still touch the place of its frame: no other stream gets that. Another copy counts all the same.
#[test]
fn a_place_of_a_lost_stream_is_given_to_no_other() {
    let [mut a, mut b] = pair(&PeerConfig::default(), 3);
    granted(&mut a, &mut b, 60_000);
    let frame = a.poll_frame(0, NOW).expect("granted");
    let arrive = |b: &mut Peer, stream| b.handle_header(stream, &on(stream, &frame), OpStatus::Active, NOW);
    assert_eq!(arrive(&mut b, 0), Ok(Arrival::Take));
    b.hold(&key(0), frame.header.offset);
    b.stream_down(0);
    assert_eq!(arrive(&mut b, 1), Ok(Arrival::Race));
    assert_eq!(arrive(&mut b, 2), Ok(Arrival::Race));
    assert_eq!(finish(&mut b, 1, &frame, OpStatus::Active), Finish { apply: true, revoke: Some(LOST_STREAM) });
    // Late, it changes nothing.
    b.hold(&key(0), frame.header.offset);
    assert_eq!(finish(&mut b, 2, &frame, OpStatus::Active), Finish { apply: false, revoke: None });
}

/// A frame whose operation ends while it arrives is not used, and neither is one that starts to arrive afterwards. Of both the engine
/// is told what their sender takes the operation for.
#[test]
fn nothing_is_used_after_its_operation() {
    let [mut a, mut b] = pair(&PeerConfig::default(), 1);
    granted(&mut a, &mut b, 60_000);
    let frame = a.poll_frame(0, NOW).expect("granted");
    assert_eq!(b.handle_header(0, &frame.header, OpStatus::Active, NOW), Ok(Arrival::Take));
    b.retire(key(0).group, NumberSpace::Collective(ChannelId::MAIN), key(0).op);
    assert!(!finish(&mut b, 0, &frame, OpStatus::Retired).apply);
    let (arrival, finish) = take(&mut b, 0, &frame, OpStatus::Retired);
    assert_eq!((arrival, finish.apply), (Arrival::Discard, false));
    assert!(b.ops.is_empty());
    assert_eq!(events(&mut b), [Event::Late(key(0), FIVE), Event::Late(key(0), FIVE)]);
}

/// A control frame that its stream does not get through is repeated by another one, and used once; so with a grant the
/// operation goes on long before the silent stream is given up.
#[test]
fn control_frames_of_a_silent_stream_are_repeated() {
    let [mut a, mut b] = pair(&PeerConfig::default(), 2);
    memory(&mut a, 0, 60_000);
    b.grant(key(0), 1, FIVE);
    let first = b.poll_frame(0, NOW).expect("a grant");
    assert_eq!(first.header.kind, Kind::Grant);
    // Stream 1 shows that the peer lives, stream 0 brings no ack.
    let mut later = NOW;
    let second = loop {
        assert!(later < Time(250 * MILLISECOND), "the grant was not repeated");
        later = later.plus(5 * MILLISECOND);
        b.heard(1, later);
        b.handle_timeout(later);
        match b.poll_frame(1, later) {
            Some(frame) if frame.header.kind == Kind::Grant => break frame,
            other => assert!(other.is_none()),
        }
    };
    assert_eq!(second.header.serial, first.header.serial);
    assert!(take(&mut a, 1, &second, OpStatus::Active).1.apply);
    assert_eq!(events(&mut a).len(), 1);
    assert!(!take(&mut a, 0, &first, OpStatus::Active).1.apply);
    assert!(events(&mut a).is_empty(), "a grant was used twice");
    // Once is enough for the sender.
    drain(&mut a, &mut b, 1);
    assert!(b.is_quiet());
    b.stream_down(0);
    assert!(b.is_quiet());
}

/// Control frames that are on their way on a stream that is lost leave again on another, in the same order, whatever they say.
#[test]
fn control_frames_of_a_lost_stream_are_repeated() {
    let [mut a, mut b] = pair(&PeerConfig::default(), 2);
    a.grant(key(0), 1, FIVE);
    let message = "a test".to_owned();
    let report = Report { kind: FailureKind::Closed, message, is_passed_on: false, finished: Counts::default() };
    a.report(GroupId(8), &report);
    a.left(GroupId(9), farewell());
    a.bye();
    let lost: Vec<Kind> = std::iter::from_fn(|| a.poll_frame(0, NOW)).map(|frame| frame.header.kind).collect();
    assert!([Kind::Grant, Kind::Report, Kind::Left, Kind::Bye].iter().all(|kind| lost.contains(kind)), "{lost:?}");
    a.stream_down(0);
    b.stream_down(0);
    let again = drain(&mut a, &mut b, 1);
    assert_eq!(again.iter().map(|(header, _)| header.kind).collect::<Vec<_>>(), lost);
    assert!(again.iter().all(|(_, finish)| finish.apply));
    let told = events(&mut b);
    assert!(told.contains(&Event::Report(GroupId(8).into(), report)) && told.contains(&Event::Bye), "{told:?}");
    drain(&mut b, &mut a, 1);
    assert!(a.is_quiet());
}

/// A message given by reference is read once, answered by Done, and reported sent once, even when all of it is repeated.
#[test]
fn references_are_read_once() {
    let config = PeerConfig { references: true, ..PeerConfig::default() };
    let [mut a, mut b] = pair(&config, 1);
    memory(&mut a, 0, 1 << 30);
    // A grant, which a reference does not need, sends no data.
    b.grant(key(0), 1, FIVE);
    drain(&mut b, &mut a, 0);
    let reference = a.poll_frame(0, NOW).expect("a reference");
    assert_eq!((reference.header.kind, reference.header.total), (Kind::Reference, 1 << 30));
    let Payload::Control(bytes) = &reference.payload else { panic!("{reference:?}") };
    assert_eq!(Reference::decode((**bytes).try_into().expect("its length")).address, 0x1000);
    assert!(a.poll_frame(0, NOW).is_none());
    assert!(take(&mut b, 0, &reference, OpStatus::Active).1.apply);
    // The stream is lost on both sides, with the ack.
    for peer in [&mut a, &mut b] {
        peer.stream_down(0);
        stream_up(peer, 0, NOW);
    }
    let repeated = drain(&mut a, &mut b, 0);
    assert_eq!(repeated.len(), 1);
    assert!(!repeated[0].1.apply, "read twice");
    b.done(key(0));
    let done = b.poll_frame(0, NOW).expect("done");
    take(&mut a, 0, &done, OpStatus::Active);
    assert_eq!(events(&mut a), [Event::Granted(key(0), FIVE), Event::Sent(key(0))]);
    b.stream_down(0);
    a.stream_down(0);
    stream_up(&mut a, 0, NOW);
    stream_up(&mut b, 0, NOW);
    drain(&mut b, &mut a, 0);
    assert!(events(&mut a).is_empty(), "reported twice");
    drain(&mut a, &mut b, 0);
    assert!(a.is_quiet() && b.is_quiet());
}

/// To a peer that takes descriptors, what is long and lies in shared memory goes by reference and what does not as bytes; the offer
/// comes before the reference to it.
#[test]
fn shared_memory_is_offered_before_it_is_named() {
    let config = PeerConfig { descriptors: true, ..PeerConfig::default() };
    let [mut a, mut b] = pair(&config, 1);
    a.share(7, 1 << 20);
    let place = Reference { address: 4096, epoch: 3, region: 7 };
    let body = Body::Memory { place, len: 40_000 };
    a.send(Outgoing { key: key(0), priority: Priority(0), is_changed: false, fingerprint: FIVE, coflow: 0, body });
    memory(&mut a, 1, 1 << 20);
    a.unshare(7);
    let sent = drain(&mut a, &mut b, 0);
    let kinds: Vec<_> = sent.iter().map(|(header, _)| (header.kind, header.offset, header.total)).collect();
    assert_eq!(kinds, [(Kind::Share, 7, 1 << 20), (Kind::Reference, 0, 40_000), (Kind::Unshare, 7, 0)]);
    assert!(sent.iter().all(|(_, finish)| finish.apply));
    b.done(key(0));
    b.grant(key(1), 1, FIVE);
    drain(&mut b, &mut a, 0);
    assert_eq!(events(&mut a), [Event::Sent(key(0)), Event::Granted(key(1), FIVE)]);
    assert_eq!(a.poll_frame(0, NOW).expect("bytes").header.kind, Kind::Data);
}

/// A failed group takes everything of it along, on the way out and on the way in, and gives all of its credit back; a
/// report still leaves, and another group is not touched.
#[test]
fn a_failed_group_leaves_nothing_behind() {
    let config = PeerConfig { eager_credit_bytes: 10_000, ..PeerConfig::default() };
    let [mut a, mut b] = pair(&config, 2);
    let other = MessageKey { group: GroupId(8), ..key(0) };
    let bystander = Body::Memory { place: Reference { address: 0, epoch: 0, region: 0 }, len: 100_000 };
    a.send(Outgoing {
        key: other,
        priority: Priority(0),
        is_changed: false,
        fingerprint: Fingerprint::default(),
        coflow: 0,
        body: bystander,
    });
    b.grant(other, 1, Fingerprint::default());
    memory(&mut a, 1, 100_000);
    b.grant(key(1), 1, FIVE);
    let grants = drain(&mut b, &mut a, 0);
    assert_eq!(grants.len(), 2);
    // Eager: one taken and held, one under way on a stream that dies, one under way, one not sent, one without credit.
    (10..15).for_each(|message| copied(&mut a, message, 2000));
    let mut eager: Vec<Outbound> = Vec::new();
    for stream in [0, 1, 0] {
        eager.push(loop {
            let frame = a.poll_frame(stream, NOW).expect("on credit");
            if frame.header.flags & FLAG_EAGER != 0 {
                break frame;
            }
            assert!(take(&mut b, stream, &frame, OpStatus::Active).1.apply);
        });
    }
    assert!(take(&mut b, 0, &eager[0], OpStatus::Early).1.apply);
    memory(&mut a, 2, 50_000);

    b.forget(GroupId(7), &Counts::default());
    b.consumed(2000);
    take(&mut b, 0, &eager[2], OpStatus::Retired);
    a.report(
        GroupId(7),
        &Report { kind: FailureKind::Timeout, message: "why".into(), is_passed_on: false, finished: Counts::default() },
    );
    a.forget(GroupId(7), &Counts::default());
    a.stream_down(1);
    b.stream_down(1);
    events(&mut a);
    let mut reports = 0;
    while let Some(frame) = a.poll_frame(0, NOW) {
        let header = frame.header;
        let status = if header.key.group == GroupId(7) { OpStatus::Retired } else { OpStatus::Active };
        let is_eager = header.flags & FLAG_EAGER != 0;
        assert!(header.key.group == GroupId(8) || header.kind == Kind::Report || header.kind == Kind::Ack || is_eager);
        reports += usize::from(header.kind == Kind::Report);
        take(&mut b, 0, &frame, status);
    }
    assert_eq!(reports, 1);
    drain(&mut b, &mut a, 0);
    assert_eq!(events(&mut a), [Event::Sent(other)]);
    for peer in [&mut a, &mut b] {
        peer.retire(GroupId(8), NumberSpace::Collective(ChannelId::MAIN), OpSeq(3));
        assert!(peer.is_quiet());
        assert!(peer.ops.is_empty() && peer.outbox.by_key.is_empty() && peer.outbox.ready.is_empty());
        assert!(peer.remembered == Remembered::default() && peer.controls.taken.count() <= 1);
    }
    // All the credit is there again.
    assert_eq!((a.credit.reserved, a.credit.used), (3 * 2128, 3 * 2128));
    assert_eq!(b.credit.consumed, 3 * 2128);
}

/// A group that was left and is forgotten: the other side is told, and a message that waited for its grant goes with the group.
/// Leaving alone keeps such a message, and forgets what the peer was granted.
#[test]
fn a_group_that_was_left() {
    let config = PeerConfig { eager_credit_bytes: 0, ..PeerConfig::default() };
    let [mut a, mut b] = pair(&config, 1);
    copied(&mut a, 4, 100);
    b.grant(key(9), 1, FIVE);
    drain(&mut b, &mut a, 0);
    events(&mut a);
    assert_eq!((a.remembered(), a.unacknowledged()), (1, 1));
    a.left(GroupId(7), farewell());
    a.retire_all(GroupId(7));
    assert_eq!((a.remembered(), a.unacknowledged(), a.undelivered().count()), (0, 1, 1));
    a.forget(GroupId(7), &Counts::default());
    assert_eq!((a.unacknowledged(), a.undelivered().count()), (0, 0));
    assert!(a.may_say_bye(), "a good-bye need not wait for it");
    assert!(!a.is_quiet(), "the end waits until the peer can compare");
    drain(&mut a, &mut b, 0);
    assert_eq!(events(&mut b), [Event::Left(GroupId(7).into(), farewell())]);
    drain(&mut b, &mut a, 0);
    assert!(a.is_quiet());
}

/// What a rank did in a group that it has left arrives as it was told, up to the longest there is; anything else is refused.
#[test]
fn farewells_arrive() {
    for (count, collectives) in [(0, 0), (1, 1), (3, u64::MAX), (Farewell::MOST, 1 << 40)] {
        let fingerprint = |at: u64| Fingerprint { what: u64::MAX - at, layout: Layout::from_number(at) };
        let told = Farewell {
            collectives,
            last: (0..count as u64).map(|at| (OpSeq(at << 32), fingerprint(at))).collect(),
            leaves_group: count % 2 == 1,
        };
        let [mut a, mut b] = pair(&PeerConfig::default(), 1);
        a.left(GroupId(7), told.clone());
        let frame = a.poll_frame(0, NOW).expect("nothing is ahead of it");
        assert_eq!(Header::decode(&frame.header.encode()), Ok(frame.header));
        let Payload::Control(bytes) = frame.payload.clone() else { panic!("no control frame") };
        assert_eq!(bytes.len(), frame.header.length as usize);
        for shorter in [0, 7, bytes.len() - 1, bytes.len() + 1].into_iter().filter(|len| (len + 10) % 18 != 0) {
            let wrong = vec![0; shorter];
            let refused = pair(&PeerConfig::default(), 1)[1].handle_frame(0, &frame.header, &wrong, OpStatus::Early);
            assert_eq!(refused, Err(FrameError::Length { kind: Kind::Left, length: shorter as u32 }));
        }
        take(&mut b, 0, &frame, OpStatus::Early);
        assert_eq!(events(&mut b), [Event::Left(GroupId(7).into(), told)]);
    }
    let mut longer = Header::new(Kind::Left, key(0));
    longer.length = Farewell::MAX_BYTES + 1;
    assert!(matches!(Header::decode(&longer.encode()), Err(FrameError::Length { kind: Kind::Left, .. })));
}

/// A message that waits for its grant, or to be read, needs the peer; one that has left does not, nor one that the peer has.
#[test]
fn messages_that_need_the_peer() {
    let [mut a, mut b] = pair(&PeerConfig::default(), 1);
    memory(&mut a, 0, 1000);
    copied(&mut a, 1, 100);
    assert_eq!([0, 1, 2].map(|message| a.needs_the_peer(&key(message))), [true, false, false]);
    b.grant(key(0), 1, FIVE);
    drain(&mut b, &mut a, 0);
    assert!(!a.needs_the_peer(&key(0)));
    drain(&mut a, &mut b, 0);
    drain(&mut b, &mut a, 0);
    assert!(!a.needs_the_peer(&key(0)), "nobody has polled the event");
    let [mut a, _] = pair(&PeerConfig { references: true, ..PeerConfig::default() }, 1);
    memory(&mut a, 0, 100_000);
    a.poll_frame(0, NOW).expect("a reference");
    assert!(a.needs_the_peer(&key(0)));
}

/// Of a peer that is gone nothing is kept, and nothing is kept that is to be sent to it later. It has no credit, so its senders
/// keep their messages and find out.
#[test]
fn a_peer_that_is_gone() {
    let [mut a, mut b] = pair(&PeerConfig::default(), 1);
    copied(&mut a, 0, 100);
    memory(&mut a, 1, 100_000);
    b.grant(key(1), 1, FIVE);
    drain(&mut b, &mut a, 0);
    a.poll_frame(0, NOW).expect("in flight");
    a.stream_down(0);
    assert!(a.remembered() + a.unacknowledged() > 0 && a.credit_in_use() > 0);
    assert!(a.has_credit(0));
    a.end();
    memory(&mut a, 2, 10);
    a.grant(key(3), 1, FIVE);
    a.done(key(4));
    a.left(GroupId(7), farewell());
    a.report(
        GroupId(7),
        &Report { kind: FailureKind::Closed, message: String::new(), is_passed_on: false, finished: Counts::default() },
    );
    assert_eq!((a.remembered(), a.unacknowledged(), a.credit_in_use()), (0, 0, 0));
    assert!(a.is_quiet() && a.controls.frames.is_empty() && a.poll_event().is_none() && !a.has_credit(0));
}

/// Two sides that leave a group wait for what can come, and not for what needs a grant that nobody will give: both learn that the
/// other has left, and nothing is left of the group.
#[test]
fn two_sides_that_leave_do_not_wait_for_each_other() {
    let config = PeerConfig { eager_credit_bytes: 300, ..PeerConfig::default() };
    let mut peers = pair(&config, 1);
    // The first leaves on credit, the second is announced; both wait in vain.
    for peer in &mut peers {
        copied(peer, 0, 100);
        copied(peer, 1, 100);
        peer.left(GroupId(7), farewell());
        peer.retire_all(GroupId(7));
    }
    for turn in 0..8 {
        let [a, b] = &mut peers;
        let (from, to) = if turn % 2 == 0 { (a, b) } else { (b, a) };
        while let Some(frame) = from.poll_frame(0, NOW) {
            let overtakes = frame.header.kind == Kind::Left && !from.outbox.by_key.keys().eq([&key(1)]);
            assert!(!overtakes, "a message that is on its way");
            take(to, 0, &frame, OpStatus::Retired);
        }
    }
    for peer in &mut peers {
        assert_eq!(
            events(peer).iter().filter(|event| **event == Event::Left(GroupId(7).into(), farewell())).count(),
            1
        );
        peer.forget(GroupId(7), &Counts::default());
        assert!(peer.is_quiet() && peer.controls.frames.is_empty() && peer.controls.leaving.is_empty());
    }
}

/// A peer that has said good-bye stays until it has acknowledged what left for it, also where its acknowledgement was lost with a
/// stream: what it has taken counts as taken.
#[test]
fn a_good_bye_waits_for_lost_acknowledgements() {
    let [mut a, mut b] = pair(&PeerConfig::default(), 2);
    memory(&mut a, 0, 1000);
    b.grant(key(0), 1, FIVE);
    drain(&mut b, &mut a, 1);
    assert!(drain(&mut a, &mut b, 0).iter().any(|(header, _)| header.kind == Kind::Data));
    // The acknowledgement leaves on stream 0, which is lost; only `a` knows so far.
    b.poll_frame(0, NOW).expect("an acknowledgement");
    assert!(!b.owes_acks());
    a.stream_down(0);
    b.retire_all(GroupId(7));
    b.bye();
    drain(&mut b, &mut a, 1);
    assert_eq!(events(&mut a), [Event::Granted(key(0), FIVE), Event::Bye]);
    while let Some(frame) = a.poll_frame(1, NOW) {
        take(&mut b, 1, &frame, OpStatus::Retired);
    }
    assert!(!b.is_quiet(), "it leaves, and its acknowledgement is lost");
    drain(&mut b, &mut a, 1);
    assert_eq!(events(&mut a), [Event::Sent(key(0))]);
    drain(&mut a, &mut b, 1);
    assert!(b.is_quiet());
}

/// A message without bytes, whose sender takes it for sent, is not delivered before the peer has it: on credit, announced, and
/// after its grant.
#[test]
fn empty_messages_are_to_be_delivered() {
    let config = PeerConfig { eager_credit_bytes: 128, ..PeerConfig::default() };
    let [mut a, mut b] = pair(&config, 1);
    b.grant(key(3), 1, FIVE);
    drain(&mut b, &mut a, 0);
    [1, 2, 3].into_iter().for_each(|message| copied(&mut a, message, 0));
    assert_eq!(a.undelivered().count(), 3);
    drain(&mut a, &mut b, 0);
    drain(&mut b, &mut a, 0);
    assert!(a.undelivered().map(|(key, _)| key).eq([key(2)]), "it waits for its grant");
    b.grant(key(2), 1, FIVE);
    drain(&mut b, &mut a, 0);
    drain(&mut a, &mut b, 0);
    assert!(!a.may_say_bye());
    drain(&mut b, &mut a, 0);
    assert!(a.may_say_bye());
}

/// Who leaves a group says so after all that leaves without a grant has been taken, whichever stream is faster: whoever hears of
/// it knows that nothing more comes.
#[test]
fn leaving_is_told_after_what_leaves_unasked() {
    for (credit, memory) in [(1 << 20, false), (0, false), (1 << 20, true)] {
        let config = PeerConfig { eager_credit_bytes: credit, references: memory, ..PeerConfig::default() };
        let [mut a, mut b] = pair(&config, 2);
        let send = MessageKey { space: NumberSpace::PointToPoint { direction: Direction::Up, tag: 1 }, ..key(0) };
        let place = Reference { address: 0, epoch: 0, region: 0 };
        let short = Body::Owned(vec![1; 100].into());
        let bodies = if credit > 0 { vec![short, Body::Memory { place, len: 1 << 20 }] } else { vec![short] };
        for (op, body) in (0..).zip(bodies) {
            let key = MessageKey { op: OpSeq(op), ..send };
            a.send(Outgoing { key, priority: Priority(0), is_changed: false, fingerprint: FIVE, coflow: 0, body });
        }
        a.left(GroupId(7), farewell());
        let slow: Vec<_> = std::iter::from_fn(|| a.poll_frame(0, NOW)).collect();
        let kinds: Vec<_> = slow.iter().map(|frame| frame.header.kind).collect();
        let asks = if memory { Kind::Reference } else { Kind::Announce };
        assert_eq!(kinds, if credit > 0 { vec![asks, Kind::Data] } else { vec![asks] });
        assert!(drain(&mut a, &mut b, 1).iter().all(|(header, _)| header.kind != Kind::Left), "it overtook them");
        for frame in &slow {
            take(&mut b, 0, frame, OpStatus::Early);
        }
        assert_eq!(events(&mut b), []);
        drain(&mut b, &mut a, 0);
        drain(&mut a, &mut b, 1);
        assert_eq!(events(&mut b), [Event::Left(GroupId(7).into(), farewell())]);
        assert!(a.controls.leaving.is_empty());
    }
}

/// A copied message that waits for its grant outlives its operation, and nothing is left once it was taken.
#[test]
fn a_copied_message_outlives_its_operation() {
    let config = PeerConfig { eager_credit_bytes: 0, ..PeerConfig::default() };
    let [mut a, mut b] = pair(&config, 1);
    copied(&mut a, 4, 100);
    a.retire(GroupId(7), NumberSpace::Collective(ChannelId::MAIN), OpSeq(3));
    drain(&mut a, &mut b, 0);
    drain(&mut b, &mut a, 0);
    assert!(!a.is_quiet(), "it waits for its grant");
    b.grant(key(4), 1, FIVE);
    let grant = b.poll_frame(0, NOW).expect("a grant");
    take(&mut a, 0, &grant, OpStatus::Retired);
    assert!(!a.is_quiet() && !b.is_quiet());
    let arrived = drain(&mut a, &mut b, 0);
    assert_eq!(arrived.iter().filter(|(header, f)| header.kind == Kind::Data && f.apply).count(), 1);
    drain(&mut b, &mut a, 0);
    assert!(a.is_quiet() && b.is_quiet());
    assert!(a.ops.is_empty(), "a grant for an operation that is over is remembered");
}

/// A failure overtakes what waits, bulk and control frames alike, and leaves even when the window is full.
#[test]
fn reports_overtake() {
    let config = PeerConfig { unacked_limit_bytes: 100_000, ..PeerConfig::default() };
    let [mut a, mut b] = pair(&config, 1);
    granted(&mut a, &mut b, 1_000_000);
    while a.poll_frame(0, NOW).is_some() {}
    (0..5).for_each(|op| a.done(key(op)));
    assert!(a.poll_frame(0, NOW).is_none(), "the window is full");
    let counts = Counts([(ChannelId(0), 3), (ChannelId(9), u64::MAX)].into());
    let report =
        Report { kind: FailureKind::Mismatch, message: "ä".repeat(3000), is_passed_on: true, finished: counts };
    let scope = Scope { group: GroupId(7), channel: ChannelId(9) };
    a.report(scope, &report);
    let frame = a.poll_frame(0, NOW).expect("at once");
    assert_eq!(frame.header.kind, Kind::Report);
    let text = frame.header.length - 2 * Counts::RECORD_BYTES as u32;
    assert!(text <= MAX_REPORT_BYTES && text > MAX_REPORT_BYTES - 2);
    assert!(Header::decode(&frame.header.encode()).is_ok());
    take(&mut b, 0, &frame, OpStatus::Active);
    let [Event::Report(about, got)] = &events(&mut b)[..] else { panic!("no report") };
    assert_eq!(*about, scope);
    assert_eq!((got.kind, got.message.as_str()), (FailureKind::Mismatch, &report.message[..2048]));
    assert!(got.is_passed_on && got.finished == report.finished);
    // More records than the payload holds, and more than a group has channels.
    for records in [3, 200, Counts::MOST_CHANNELS as u64 + 1, u64::MAX] {
        let header = Header { total: records, length: 2048, ..frame.header };
        let refused = pair(&PeerConfig::default(), 1)[1].handle_frame(0, &header, &[0; 24], OpStatus::Early);
        assert!(matches!(refused, Err(FrameError::Length { kind: Kind::Report, .. })), "{records}: {refused:?}");
    }
}

/// Credit that was returned on a stream that is lost is returned again on another, although nobody says anything else.
#[test]
fn returned_credit_survives_a_lost_stream() {
    let [mut a, mut b] = pair(&PeerConfig { eager_credit_bytes: 2128, ..PeerConfig::default() }, 2);
    copied(&mut a, 0, 2000);
    drain(&mut a, &mut b, 0);
    b.consumed(2000);
    let lost = b.poll_frame(0, NOW).expect("an ack with the credit");
    assert_eq!(lost.header.credit, 2128);
    b.stream_down(0);
    a.stream_down(0);
    drain(&mut b, &mut a, 1);
    assert_eq!(a.credit.returned, 2128);
}

/// A grant for a collective that is over, which needed none of it, is not kept.
#[test]
fn late_grants_are_not_kept() {
    let [mut a, mut b] = pair(&PeerConfig::default(), 1);
    b.grant(key(0), 4, FIVE);
    let grant = b.poll_frame(0, NOW).expect("a grant");
    take(&mut a, 0, &grant, OpStatus::Retired);
    assert!(a.ops.is_empty() && a.remembered == Remembered::default());
    assert_eq!(events(&mut a), [Event::Granted(key(0), FIVE)]);
}

/// Headers count: messages of no bytes fill a window, too, and it opens again with their acks.
#[test]
fn empty_messages_fill_the_window() {
    let config = PeerConfig { unacked_limit_bytes: 1000 * Header::BYTES as u64, ..PeerConfig::default() };
    let [mut a, mut b] = pair(&config, 1);
    b.grant(key(0), 3000, FIVE);
    drain(&mut b, &mut a, 0);
    (0..3000).for_each(|message| memory(&mut a, message, 0));
    let frames: Vec<Outbound> = std::iter::from_fn(|| a.poll_frame(0, NOW)).collect();
    assert_eq!(frames.len(), 1000);
    frames.iter().for_each(|frame| assert!(take(&mut b, 0, frame, OpStatus::Active).1.apply));
    drain(&mut b, &mut a, 0);
    assert_eq!(events(&mut a).iter().filter(|event| matches!(event, Event::Sent(_))).count(), 1000);
    assert!(drain(&mut a, &mut b, 0).len() >= 1000);
}

/// One stream is left free for what is urgent, others hear of it, and a claim of another process holds the rest.
#[test]
fn urgency_keeps_a_stream_free_and_holds_the_rest() {
    let [mut a, mut b] = pair(&PeerConfig::default(), 4);
    let urgent = |peer: &mut Peer, message| {
        let body = Body::Owned(vec![1; 100].into());
        peer.send(Outgoing {
            key: key(message),
            priority: Priority(-1),
            is_changed: false,
            fingerprint: FIVE,
            coflow: 0,
            body,
        });
    };
    copied(&mut a, 0, 100);
    a.hurry(a.urgency(NOW));
    assert_eq!(a.express(NOW), None, "nothing is urgent");
    assert!(a.poll_frame(3, NOW).is_some());
    urgent(&mut a, 1);
    copied(&mut a, 2, 100);
    let said = a.urgency(NOW);
    a.hurry(said);
    assert_eq!((a.has_urgent(NOW), a.express(NOW)), (true, Some(3)));
    // On the free stream the urgent one leaves, and the other one does not.
    let frame = a.poll_frame(3, NOW).expect("it is urgent");
    assert_eq!((frame.header.key, frame.header.flags & FLAG_URGENT), (key(1), FLAG_URGENT));
    assert!(a.poll_frame(3, NOW).is_none());
    // The receiver keeps its own queues short from then on, but no stream free, and tells nobody else.
    take(&mut b, 3, &frame, OpStatus::Early);
    assert_eq!((b.urgency(NOW).here, b.express(NOW)), (Time(0), None));
    assert_eq!(b.urgency(NOW).anywhere, NOW.plus(Urgency::LASTS));
    // While another process of the host is urgent, nothing else leaves at all.
    let held = NOW.plus(MILLISECOND);
    a.hurry(Urgency { held, ..said });
    assert!(a.poll_frame(0, NOW).is_none());
    urgent(&mut a, 4);
    assert_eq!(a.poll_frame(0, NOW).expect("it is urgent, too").header.key, key(4));
    assert_eq!(a.poll_frame(0, held).expect("its time has come").header.key, key(2));
    // When it has become usual, and when it is forgotten, it does not count any more.
    urgent(&mut a, 5);
    a.reprioritise(GroupId(7), NumberSpace::Collective(ChannelId::MAIN), OpSeq(3), Priority(3));
    assert!(!a.has_urgent(NOW));
    a.reprioritise(GroupId(7), NumberSpace::Collective(ChannelId::MAIN), OpSeq(3), Priority(-3));
    assert_eq!(a.most_urgent(), Some(Priority(-3)));
    a.forget(GroupId(7), &Counts::default());
    a.end();
    assert_eq!((a.has_urgent(NOW), a.most_urgent()), (false, None));
    let late = NOW.plus(Urgency::LASTS + 1);
    assert_eq!(a.express(late), None);
}

/// A peer that acknowledges nothing is not well, whatever the streams that it does not use say: they have nothing to bring.
#[test]
fn unused_streams_do_not_tell_that_a_peer_is_well() {
    let [mut peer, _] = pair(&PeerConfig::default(), 4);
    peer.use_streams(1);
    assert!(peer.is_well(NOW), "nothing is in flight");
    peer.send(Outgoing {
        key: key(0),
        priority: Priority(-1),
        is_changed: false,
        fingerprint: FIVE,
        coflow: 0,
        body: Body::Owned(vec![1; 100].into()),
    });
    assert!(peer.poll_frame(0, NOW).is_some());
    assert!(peer.is_well(NOW.plus(MILLISECOND)));
    assert!(!peer.is_well(NOW.plus(10 * SECOND)));
}

/// A connection that replaces one that was not known to be gone takes over what that had in flight.
#[test]
fn a_replaced_stream_loses_nothing() {
    let [mut a, mut b] = pair(&PeerConfig::default(), 1);
    granted(&mut a, &mut b, 60_000);
    a.poll_frame(0, NOW).expect("granted");
    stream_up(&mut a, 0, NOW);
    stream_up(&mut b, 0, NOW);
    assert!(drain(&mut a, &mut b, 0).iter().any(|(header, finish)| header.kind == Kind::Data && finish.apply));
}

/// Twenty thousand messages wait for grants that come one by one, in another order: each costs a look-up, not a search
/// (a quadratic search would take minutes here), and half of them may be forgotten with their group.
#[test]
fn many_messages_at_once() {
    const MANY: u32 = 20_000;
    let [mut a, mut b] = pair(&PeerConfig::default(), 4);
    let other = |message| MessageKey { group: GroupId(6), ..key(message) };
    for message in 0..MANY {
        memory(&mut a, message, 100);
        let body = Body::Memory { place: Reference { address: 0, epoch: 0, region: 0 }, len: 100 };
        a.send(Outgoing {
            key: other(message),
            priority: Priority(1),
            is_changed: false,
            fingerprint: Fingerprint::default(),
            coflow: 0,
            body,
        });
    }
    for message in 0..MANY {
        b.grant(key(message.wrapping_mul(7919) % MANY), 1, FIVE);
    }
    a.forget(GroupId(6), &Counts::default());
    let (mut arrived, mut sent) = (0, 0);
    for stream in (0..4).cycle() {
        drain(&mut b, &mut a, stream);
        let data = drain(&mut a, &mut b, stream);
        arrived += data.iter().filter(|(header, finish)| header.kind == Kind::Data && finish.apply).count();
        sent += events(&mut a).iter().filter(|event| matches!(event, Event::Sent(_))).count();
        if sent == MANY as usize {
            break;
        }
    }
    assert_eq!(arrived, MANY as usize);
    a.retire(GroupId(7), NumberSpace::Collective(ChannelId::MAIN), OpSeq(3));
    b.retire(GroupId(7), NumberSpace::Collective(ChannelId::MAIN), OpSeq(3));
    assert!(a.is_quiet() && a.ops.is_empty() && b.ops.is_empty() && b.remembered == Remembered::default());
}

const FIVE: Fingerprint = Fingerprint { what: 5, layout: Layout { order: Order(6), sizes: 7 } };
