//! Frames that a peer may not send are refused; nothing that it sends makes us panic or hold without bound.

use crate::frame::{Direction, FrameError, Header, Kind, MIN_FRAME_BYTES, Reference};
use crate::peer::outgoing::Way;
use crate::peer::receive::MAX_REMEMBERED;
use crate::peer::*;
use penstock_types::Priority;
use proptest::prelude::*;

const NOW: Time = Time(1_000_000);

fn key(message: u32) -> MessageKey {
    MessageKey { group: GroupId(7), space: NumberSpace::Collective(ChannelId::MAIN), op: OpSeq(3), message }
}

fn peer(config: PeerConfig) -> Peer {
    let mut peer = Peer::new(config, Time(0));
    (0..2).for_each(|stream| peer.stream_up(stream, Time(0)));
    peer
}

/// A posted operation that has granted its messages 0 and 1.
fn ready() -> Peer {
    let mut peer = peer(PeerConfig::default());
    peer.grant(key(0), 2, Fingerprint::default());
    peer
}

fn data(offset: u64, length: u32, total: u64) -> Header {
    Header { offset, length, total, ..Header::new(Kind::Data, key(0)) }
}

/// An eager message: the `serial`-th byte of credit ends with it.
fn eager(message: u32, total: u64, serial: u64) -> Header {
    let length = total as u32;
    Header { flags: FLAG_EAGER, total, length, serial, ..Header::new(Kind::Data, key(message)) }
}

fn header(peer: &mut Peer, header: &Header, status: OpStatus) -> Result<Arrival, FrameError> {
    peer.handle_header(0, header, status, NOW)
}

/// Header and frame.
fn whole(peer: &mut Peer, head: &Header, status: OpStatus) -> Result<Finish, FrameError> {
    header(peer, head, status)?;
    peer.handle_frame(0, head, &[], status)
}

#[track_caller]
fn out_of_turn<T: std::fmt::Debug>(result: Result<T, FrameError>, why: &str) {
    let Err(FrameError::OutOfTurn(reason)) = result else { panic!("{result:?} instead of {why:?}") };
    assert!(reason.contains(why), "{reason}");
}

/// Another generation of the job is refused, both older and newer; ours is not. A refused frame does not count as heard from the peer.
#[test]
fn other_generations_are_refused() {
    for (ours, theirs, fits) in [(1, 0, false), (1, 2, false), (1, 1, true)] {
        let mut peer = peer(PeerConfig { generation: Generation(ours), ..PeerConfig::default() });
        let head = Header { generation: Generation(theirs), ..Header::new(Kind::Ack, key(0)) };
        let result = header(&mut peer, &head, OpStatus::Early);
        if fits {
            assert_eq!(result, Ok(Arrival::Take));
        } else {
            out_of_turn(result, "generation");
        }
        assert_eq!(peer.hearing.last, if fits { NOW } else { Time(0) });
    }
}

/// An ack counts up to what was sent and not a frame further.
#[test]
fn acks_of_unsent_frames_are_refused() {
    let mut peer = ready();
    let ack = |ack| Header { ack, ..Header::new(Kind::Ack, key(0)) };
    out_of_turn(header(&mut peer, &ack(1), OpStatus::Active), "acknowledges");
    peer.poll_frame(0, NOW).expect("a grant");
    out_of_turn(header(&mut peer, &ack(2), OpStatus::Active), "acknowledges");
    assert!(header(&mut peer, &ack(1), OpStatus::Active).is_ok());
    out_of_turn(header(&mut peer, &ack(0), OpStatus::Active), "acknowledges");
    out_of_turn(header(&mut peer, &ack(u32::MAX), OpStatus::Active), "acknowledges");
    out_of_turn(peer.handle_header(5, &ack(0), OpStatus::Active, NOW), "stream is not up");
}

/// Credit comes back for what was used, not for more.
#[test]
fn credit_that_was_never_used_does_not_come_back() {
    let mut peer = peer(PeerConfig::default());
    let credit = |credit| Header { credit, ..Header::new(Kind::Ack, key(0)) };
    let body = Body::Owned(vec![0; 100].into());
    peer.send(Outgoing {
        key: key(0),
        priority: Priority(0),
        is_changed: false,
        fingerprint: Fingerprint::default(),
        coflow: 0,
        body,
    });
    out_of_turn(header(&mut peer, &credit(1), OpStatus::Active), "credit");
    peer.poll_frame(0, NOW).expect("on credit");
    out_of_turn(header(&mut peer, &credit(229), OpStatus::Active), "credit");
    assert!(header(&mut peer, &credit(228), OpStatus::Active).is_ok());
    assert!(header(&mut peer, &credit(0), OpStatus::Active).is_ok(), "an older word on credit does no harm");
    assert_eq!(peer.credit.returned, 228);
}

/// Data needs a grant for just this message, whether its operation is posted or not; once the operation is over, data is
/// a late repeat and dropped.
#[test]
fn data_needs_its_grant() {
    let head = data(0, 1000, 1000);
    out_of_turn(header(&mut peer(PeerConfig::default()), &head, OpStatus::Early), "not granted");
    out_of_turn(header(&mut peer(PeerConfig::default()), &head, OpStatus::Active), "not granted");
    assert_eq!(header(&mut ready(), &head, OpStatus::Active), Ok(Arrival::Take));
    let second = Header { key: key(1), ..head };
    assert_eq!(header(&mut ready(), &second, OpStatus::Active), Ok(Arrival::Take));
    let third = Header { key: key(2), ..head };
    out_of_turn(header(&mut ready(), &third, OpStatus::Active), "not granted");
    assert_eq!(header(&mut ready(), &third, OpStatus::Retired), Ok(Arrival::Discard));
}

/// The largest message number can be granted, and a grant ends there.
#[test]
fn grants_reach_the_last_number() {
    let mut peer = peer(PeerConfig::default());
    peer.grant(key(u32::MAX), u32::MAX, Fingerprint::default());
    let head = Header { key: key(u32::MAX), ..data(0, 1000, 1000) };
    assert_eq!(header(&mut peer, &head, OpStatus::Active), Ok(Arrival::Take));
    let body = Body::Memory { place: Reference { address: 0, epoch: 0, region: 0 }, len: 40_000 };
    peer.send(Outgoing {
        key: key(u32::MAX),
        priority: Priority(0),
        is_changed: false,
        fingerprint: Fingerprint::default(),
        coflow: 0,
        body,
    });
    let grant = Header { offset: u64::MAX, ..Header::new(Kind::Grant, key(u32::MAX)) };
    whole(&mut peer, &grant, OpStatus::Active).expect("a grant");
    assert!(std::iter::from_fn(|| peer.poll_frame(1, NOW)).any(|frame| frame.header.kind == Kind::Data));
}

/// A frame equals one that was seen or touches none, be that whole or arriving; only the last of a message is short.
#[test]
fn overlaps_are_refused() {
    const CUT: u32 = MIN_FRAME_BYTES;
    let total = 5 * u64::from(CUT) + 10;
    for is_whole in [false, true] {
        let mut ready = ready();
        let first = data(u64::from(CUT), CUT, total);
        assert_eq!(header(&mut ready, &first, OpStatus::Active), Ok(Arrival::Take));
        if is_whole {
            ready.handle_frame(0, &first, &[], OpStatus::Active).expect("whole");
        }
        for (offset, length, total) in [
            (u64::from(CUT) - 1, CUT, total),
            (u64::from(CUT) + 1, CUT, total),
            (u64::from(CUT), 2 * CUT, total),
            (0, CUT + 1, total),
            (0, 3 * CUT, total),
            (u64::from(CUT), CUT, total + 1),
            (3 * u64::from(CUT), CUT - 1, total),
            (3 * u64::from(CUT), 0, total),
        ] {
            let result = header(&mut ready, &data(offset, length, total), OpStatus::Active);
            assert_eq!(result, Err(FrameError::Range { offset, length, total }), "whole {is_whole}");
        }
        let same = if is_whole { Arrival::Discard } else { Arrival::Race };
        assert_eq!(ready.handle_header(1, &first, OpStatus::Active, NOW), Ok(same));
        for (offset, length) in [(0, CUT), (2 * u64::from(CUT), 3 * CUT), (total - 10, 10)] {
            assert_eq!(header(&mut ready, &data(offset, length, total), OpStatus::Active), Ok(Arrival::Take));
        }
    }
    let mut ready = ready();
    assert_eq!(header(&mut ready, &data(0, 0, 0), OpStatus::Active), Ok(Arrival::Take));
    assert_eq!(ready.handle_header(1, &data(0, 0, 0), OpStatus::Active, NOW), Ok(Arrival::Race));
}

/// The cut of a frame whose stream was lost is remembered: another cut of the same bytes is not taken instead.
#[test]
fn a_lost_frame_keeps_its_cut() {
    let mut ready = ready();
    let total = 10 * u64::from(MIN_FRAME_BYTES);
    let first = data(0, 2 * MIN_FRAME_BYTES, total);
    assert_eq!(header(&mut ready, &first, OpStatus::Active), Ok(Arrival::Take));
    ready.stream_down(0);
    let other = data(0, MIN_FRAME_BYTES, total);
    let result = ready.handle_header(1, &other, OpStatus::Active, NOW);
    assert!(matches!(result, Err(FrameError::Range { .. })), "{result:?}");
    assert_eq!(ready.handle_header(1, &first, OpStatus::Active, NOW), Ok(Arrival::Take));
}

/// An eager message up to the limit is taken, one byte more is refused, and so is one in pieces.
#[test]
fn eager_messages_are_short_and_whole() {
    let limit = PeerConfig::default().eager_bytes;
    let taken = header(&mut peer(PeerConfig::default()), &eager(0, limit, limit + 128), OpStatus::Early);
    assert_eq!(taken, Ok(Arrival::Take));
    let result = header(&mut peer(PeerConfig::default()), &eager(0, limit + 1, limit + 129), OpStatus::Early);
    out_of_turn(result, "eager limit");
    let piece = Header { length: 50, ..eager(0, 100, 228) };
    out_of_turn(header(&mut peer(PeerConfig::default()), &piece, OpStatus::Early), "eager limit");
}

/// The credit holds to the byte, also against messages that arrive at the same time; what was consumed can be used
/// again; a place in the account is used once.
#[test]
fn eager_messages_stay_within_the_credit() {
    let config = PeerConfig { eager_credit_bytes: 3 * 228, ..PeerConfig::default() };
    let mut peer = peer(config);
    // Two streams bring them at once.
    assert_eq!(header(&mut peer, &eager(0, 100, 228), OpStatus::Early), Ok(Arrival::Take));
    let second = eager(1, 100, 456);
    assert_eq!(peer.handle_header(1, &second, OpStatus::Early, NOW), Ok(Arrival::Take));
    for (message, total, serial) in [(2, 101, 685), (2, 100, 685), (2, 100, u64::MAX), (2, 100, 227), (2, 100, 0)] {
        out_of_turn(header(&mut peer, &eager(message, total, serial), OpStatus::Early), "beyond the credit");
    }
    peer.handle_frame(0, &eager(0, 100, 228), &[], OpStatus::Early).expect("whole");
    peer.handle_frame(1, &second, &[], OpStatus::Early).expect("whole");
    out_of_turn(header(&mut peer, &eager(2, 100, 556), OpStatus::Early), "credit of another");
    assert_eq!(header(&mut peer, &eager(2, 100, 684), OpStatus::Early), Ok(Arrival::Take));
    out_of_turn(header(&mut peer, &eager(3, 100, 912), OpStatus::Early), "beyond the credit");
    peer.consumed(100);
    assert_eq!(header(&mut peer, &eager(3, 100, 912), OpStatus::Early), Ok(Arrival::Take));
    // The same account for another message is a repeat of the first for all that we know.
    assert_eq!(header(&mut peer, &eager(9, 100, 228), OpStatus::Early), Ok(Arrival::Discard));
    // Two streams that claim one place: the second is found when it is whole.
    let (one, two) = (eager(4, 100, 912 - 100), eager(5, 100, 912 - 50));
    peer.consumed(100);
    assert!(header(&mut peer, &one, OpStatus::Early).is_ok());
    assert!(peer.handle_header(1, &two, OpStatus::Early, NOW).is_ok());
    peer.handle_frame(0, &one, &[], OpStatus::Early).expect("first");
    out_of_turn(peer.handle_frame(1, &two, &[], OpStatus::Early), "credit of another");
}

/// References only from peers whose memory we can read; not beside data, nor data beside them; Done only for them.
#[test]
fn references_are_checked() {
    let length = Reference::BYTES as u32;
    let reference = Header { length, total: 5000, ..Header::new(Kind::Reference, key(0)) };
    out_of_turn(header(&mut ready(), &reference, OpStatus::Active), "cannot read");
    for kind in [Kind::Share, Kind::Unshare] {
        out_of_turn(header(&mut ready(), &Header::new(kind, key(0)), OpStatus::Active), "over a network");
    }

    let config = PeerConfig { references: true, ..PeerConfig::default() };
    let mut peer = peer(config);
    peer.grant(key(0), 2, Fingerprint::default());
    assert_eq!(whole(&mut peer, &reference, OpStatus::Active), Ok(Finish { apply: true, revoke: None }));
    out_of_turn(header(&mut peer, &data(0, 5000, 5000), OpStatus::Active), "by reference");
    assert_eq!(
        whole(&mut peer, &Header { key: key(1), ..data(0, 50, 50) }, OpStatus::Active).map(|f| f.apply),
        Ok(true)
    );
    let late = Header { serial: 1, key: key(1), ..reference };
    out_of_turn(whole(&mut peer, &late, OpStatus::Active), "is here");

    let mut peer = ready();
    let body = Body::Memory { place: Reference { address: 0, epoch: 0, region: 0 }, len: 100 };
    peer.send(Outgoing {
        key: key(3),
        priority: Priority(0),
        is_changed: false,
        fingerprint: Fingerprint::default(),
        coflow: 0,
        body,
    });
    let done = |message, serial| Header { serial, ..Header::new(Kind::Done, key(message)) };
    out_of_turn(whole(&mut peer, &done(3, 0), OpStatus::Active), "not given by reference");
    assert!(whole(&mut peer, &done(4, 1), OpStatus::Active).is_ok(), "one that is forgotten");
    assert_eq!(peer.poll_event(), None);
}

/// Grants for operations that do not come are remembered up to a number and then dropped; references are refused beyond a number. What
/// is retired makes room again.
#[test]
fn what_is_remembered_is_bounded() {
    let mut peer = peer(PeerConfig { references: true, most_unasked: 1_000, ..PeerConfig::default() });
    let grant =
        |op: u64| Header { serial: op, offset: 3, ..Header::new(Kind::Grant, MessageKey { op: OpSeq(op), ..key(0) }) };
    let most = peer.config.most_unasked;
    for op in 0..most as u64 {
        whole(&mut peer, &grant(op), OpStatus::Early).expect("room");
    }
    assert!(!peer.has_dropped_grants);
    peer.retire(GroupId(7), NumberSpace::Collective(ChannelId::MAIN), OpSeq(17));
    whole(&mut peer, &grant(most as u64), OpStatus::Early).expect("room again");
    assert!(!peer.has_dropped_grants);
    let events = std::iter::from_fn(|| peer.poll_event()).count();
    for op in most as u64 + 1..2 * most as u64 {
        whole(&mut peer, &grant(op), OpStatus::Early).expect("a grant does no harm");
    }
    assert!(peer.has_dropped_grants && events == most + 1 && peer.poll_event().is_none());
    assert_eq!(peer.remembered, Remembered { grants: most, unasked: 0 });
    let length = Reference::BYTES as u32;
    let reference = |number: u64| {
        let key = MessageKey { group: GroupId(8), op: OpSeq(number), ..key(0) };
        Header { length, total: 1, serial: 2 * most as u64 + number, ..Header::new(Kind::Reference, key) }
    };
    for number in 0..MAX_REMEMBERED as u64 {
        whole(&mut peer, &reference(number), OpStatus::Early).expect("room");
    }
    peer.retire(GroupId(8), NumberSpace::Collective(ChannelId::MAIN), OpSeq(17));
    peer.done(reference(18).key);
    (0..2).for_each(|_| peer.done(reference(19).key));
    for number in 0..3 {
        whole(&mut peer, &reference(MAX_REMEMBERED as u64 + number), OpStatus::Early).expect("room again");
    }
    // One that was asked for does not count.
    peer.grant(reference(1 << 20).key, 1, Fingerprint::default());
    whole(&mut peer, &reference(1 << 20), OpStatus::Active).expect("asked for");
    out_of_turn(whole(&mut peer, &reference(1 << 21), OpStatus::Early), "more references");
    (7..9).for_each(|group| peer.forget(GroupId(group), &Counts::default()));
    assert_eq!((peer.remembered, peer.ops.len()), (Remembered::default(), 0));
}

/// Numbers of control frames may have gaps, as streams bring them, but not without end; in order they cost nothing.
#[test]
fn gaps_between_control_frames_are_bounded() {
    let mut peer = peer(PeerConfig::default());
    let announce = |serial| Header { serial, ..Header::new(Kind::Announce, key(0)) };
    for serial in 0..1000 {
        assert_eq!(whole(&mut peer, &announce(serial), OpStatus::Early).map(|finish| finish.apply), Ok(true));
        assert_eq!(whole(&mut peer, &announce(serial / 2), OpStatus::Early).map(|finish| finish.apply), Ok(false));
    }
    assert_eq!(peer.controls.taken.count(), 1);
    for gap in 1..MAX_REMEMBERED as u64 {
        whole(&mut peer, &announce(1000 + 2 * gap), OpStatus::Early).expect("room");
    }
    out_of_turn(whole(&mut peer, &announce(u64::MAX - 1), OpStatus::Early), "gaps");
}

/// One call of the machine, with fields that mean something often enough.
#[derive(Clone, Debug)]
enum Call {
    Header(Header, u32, OpStatus),
    /// The payload of the last header on the stream.
    Frame(u32, OpStatus),
    Send(MessageKey, i32, u64, bool),
    Grant(MessageKey, u32),
    Done(MessageKey),
    Probe(MessageKey),
    Retire(MessageKey),
    Forget(Scope, u64),
    Left(Scope),
    Up(u32),
    Down(u32),
    Poll(u32),
    Consumed,
    Wait(u64),
}

/// Small numbers, powers of two, limits, and their neighbours.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        0u64..4,
        (0u32..64, -1i64..2).prop_map(|(bit, off)| (1u64 << bit).wrapping_add_signed(off)),
        Just(u64::MAX),
        (1u64..12).prop_map(|n| n * 228),
        any::<u64>(),
    ]
}

fn any_key() -> impl Strategy<Value = MessageKey> {
    let space = prop_oneof![
        (0u32..3).prop_map(|number| NumberSpace::Collective(ChannelId(number))),
        Just(NumberSpace::PointToPoint { direction: Direction::Up, tag: 0 }),
        Just(NumberSpace::PointToPoint { direction: Direction::Down, tag: 0 }),
    ];
    (0u64..2, space, 0u64..3, prop_oneof![0u32..4, Just(u32::MAX), any::<u32>()])
        .prop_map(|(group, space, op, message)| MessageKey { group: GroupId(group), space, op: OpSeq(op), message })
}

fn scope() -> impl Strategy<Value = Scope> {
    (0u64..2, 0u32..3).prop_map(|(group, number)| Scope { group: GroupId(group), channel: ChannelId(number) })
}

fn status() -> impl Strategy<Value = OpStatus> {
    prop_oneof![Just(OpStatus::Early), Just(OpStatus::Active), Just(OpStatus::Active), Just(OpStatus::Retired)]
}

fn any_header() -> impl Strategy<Value = Header> {
    let kinds = [
        Kind::Data,
        Kind::Data,
        Kind::Data,
        Kind::Reference,
        Kind::Done,
        Kind::Grant,
        Kind::Announce,
        Kind::Ack,
        Kind::Heartbeat,
        Kind::HeartbeatReply,
        Kind::Probe,
        Kind::ProbeReply,
        Kind::Report,
        Kind::Bye,
        Kind::Share,
        Kind::Unshare,
        Kind::Left,
        Kind::Pause,
    ];
    let numbers = (number(), number(), number(), number(), 0u64..4);
    (0..kinds.len(), any_key(), numbers, 0u16..4, prop_oneof![Just(0u64), 0u64..3], prop_oneof![Just(0u64), number()])
        .prop_map(move |(kind, key, (offset, total, length, serial, small), flags, ack, credit)| {
            let mut header = Header { flags, ..Header::new(kinds[kind], key) };
            (header.offset, header.total, header.length) = (offset, total, length as u32);
            if small < 3 && header.kind == Kind::Data {
                // A frame that fits: the first, second or third of a few.
                header.length = 100 + 65_536 * (length % 2) as u32;
                header.offset = small * 65_536 * u64::from(flags & FLAG_EAGER == 0);
                header.total = header.offset + u64::from(header.length) + 65_536 * (total % 3);
            }
            if header.kind == Kind::Reference {
                header.length = Reference::BYTES as u32;
            }
            (header.serial, header.ack, header.credit) = (serial, ack as u32, credit);
            header
        })
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        8 => (any_header(), 0u32..3, status()).prop_map(|(header, stream, status)| Call::Header(header, stream, status)),
        8 => (0u32..3, status()).prop_map(|(stream, status)| Call::Frame(stream, status)),
        2 => (any_key(), -1i32..2, 0u64..300_000, any::<bool>()).prop_map(|(k, p, len, copied)| Call::Send(k, p, len, copied)),
        2 => (any_key(), 0u32..5).prop_map(|(key, count)| Call::Grant(key, count)),
        1 => any_key().prop_map(Call::Done),
        1 => any_key().prop_map(Call::Probe),
        1 => any_key().prop_map(Call::Retire),
        1 => (scope(), 0u64..3).prop_map(|(scope, count)| Call::Forget(scope, count)),
        1 => scope().prop_map(Call::Left),
        1 => (0u32..3).prop_map(Call::Up),
        1 => (0u32..3).prop_map(Call::Down),
        6 => (0u32..3).prop_map(Call::Poll),
        1 => Just(Call::Consumed),
        1 => (0u64..SECOND).prop_map(Call::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Whatever a peer sends, and whenever we call: no panic, no more remembered than the bound, no more eager bytes
    /// than the credit, and what we forget is gone. Only headers that the decoder lets through come this far.
    #[test]
    fn any_sequence_is_survived(calls in proptest::collection::vec(call(), 1..150), references: bool, most_unasked in 0usize..3) {
        let config = PeerConfig { references, most_unasked, eager_credit_bytes: 2000, checksum: references, ..PeerConfig::default() };
        let mut peer = peer(config.clone());
        let mut now = Time(0);
        let mut reading: HashMap<u32, Header> = HashMap::new();
        let mut held: Vec<u64> = Vec::new();
        for call in calls {
            match call {
                Call::Header(header, stream, status) => {
                    let Ok(mut header) = Header::decode(&header.encode()) else { continue };
                    // Its payload is whole.
                    header.payload_sum = crc32c::crc32c(&vec![7; header.length as usize]);
                    reading.remove(&stream);
                    if peer.handle_header(stream, &header, status, now).is_ok() {
                        reading.insert(stream, header);
                    }
                }
                Call::Frame(stream, status) => {
                    if let Some(header) = reading.remove(&stream) {
                        let finish = peer.handle_frame(stream, &header, &vec![7; header.length as usize], status);
                        if finish.is_ok_and(|finish| finish.apply) && header.flags & FLAG_EAGER != 0 && header.kind == Kind::Data {
                            held.push(header.total);
                        }
                    }
                }
                Call::Send(key, priority, len, copied) => {
                    if peer.outbox.by_key.contains_key(&key) {
                        continue;
                    }
                    let body = if copied { Body::Owned(vec![1; len as usize].into()) } else { Body::Memory { place: Reference { address: 1, epoch: 0, region: 0 }, len } };
                    peer.send(Outgoing { key, priority: Priority(priority), is_changed: false, fingerprint: Fingerprint::default(), coflow: 0, body });
                }
                Call::Grant(key, count) => peer.grant(key, count, Fingerprint::default()),
                Call::Done(key) => peer.done(key),
                Call::Probe(key) => peer.probe(key, Fingerprint::default()),
                Call::Retire(key) => peer.retire(key.group, key.space, key.op),
                Call::Forget(scope, count) => {
                    let finished = Counts((0..2).map(|number| (ChannelId(number), count)).collect());
                    peer.forget(scope, &finished);
                    prop_assert!(peer.ops.keys().all(|key| !scope.covers(key.group, key.space.channel())));
                }
                Call::Left(scope) => peer.left(scope, Farewell::default()),
                Call::Up(stream) => peer.stream_up(stream, now),
                Call::Down(stream) => peer.stream_down(stream),
                Call::Poll(stream) => {
                    if let Some(frame) = peer.poll_frame(stream, now) {
                        prop_assert!(Header::decode(&frame.header.encode()).is_ok());
                    }
                }
                Call::Consumed => {
                    if let Some(total) = held.pop() {
                        peer.consumed(total);
                    }
                }
                Call::Wait(nanos) => {
                    now = now.plus(nanos);
                    peer.handle_timeout(now);
                    prop_assert!(peer.poll_timeout(now) > now);
                }
            }
            let held: u64 = held.iter().map(|total| total + 128).sum();
            prop_assert!(held <= config.eager_credit_bytes, "{held}");
            // A range may be cut in two after it was taken.
            prop_assert!(peer.remembered.grants <= 2 * config.most_unasked + 150);
            let mut remembered = Remembered::default();
            peer.ops.values().for_each(|op| remembered += op.remembered());
            prop_assert_eq!(peer.remembered, remembered);
            let is_out = |message: &&Message<_>| matches!(message.way, Way::Reference { is_unasked: true });
            let unasked = peer.outbox.messages.values().filter(is_out).count();
            prop_assert!(unasked == peer.outbox.unasked && unasked <= config.most_unasked);
            prop_assert_eq!(peer.outbox.by_key.len(), peer.outbox.messages.len());
            for scope in (0..6).map(|at| Scope { group: GroupId(at / 3), channel: ChannelId(at as u32 % 3) }) {
                let messages = peer.outbox.messages.values().filter(|one| one.holds_left == Some(scope)).count();
                let controls = peer.controls.frames.values().filter(|one| one.holds_left == Some(scope)).count();
                let channels = peer.controls.leaving.keys().filter(|one| scope.is_group() && one.group == scope.group && **one != scope).count();
                let Some((ahead, _)) = peer.controls.leaving.get(&scope) else {
                    prop_assert_eq!(messages + controls, 0);
                    continue;
                };
                prop_assert!(*ahead > 0 && (messages + controls..=messages + controls + channels).contains(ahead));
            }
            for (_, issue) in &peer.outbox.ready {
                prop_assert!(peer.outbox.messages[issue].has_frames());
            }
            while peer.poll_event().is_some() {}
        }
        for group in 0..2 {
            peer.forget(GroupId(group), &Counts::default());
        }
        prop_assert!(peer.ops.is_empty() && peer.remembered == Remembered::default());
        let only_eager = peer.outbox.messages.values().all(|message| matches!(message.way, Way::Eager { .. }));
        prop_assert!(only_eager);
    }
}
