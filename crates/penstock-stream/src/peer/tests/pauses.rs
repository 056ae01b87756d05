//! Pauses that a receiver asks for, moved by hand.

use crate::frame::{Header, Kind};
use crate::peer::*;
use penstock_types::Priority;

const NOW: Time = Time(1_000_000_000);
const URGENT: Priority = Priority(-5);

fn key(op: u64) -> MessageKey {
    MessageKey { group: GroupId(7), space: NumberSpace::Collective(ChannelId::MAIN), op: OpSeq(op), message: 0 }
}

/// Two machines with one stream, and nothing to say.
fn pair() -> [Peer; 2] {
    [0, 1].map(|_| {
        let mut peer = Peer::new(PeerConfig::default(), NOW);
        peer.stream_up(0, NOW);
        peer.streams.get_mut(&0).expect("it is up").wants_heartbeat = false;
        peer
    })
}

/// A message whose grant is there.
fn granted(from: &mut Peer, to: &mut Peer, op: u64, priority: Priority, len: u64) {
    to.grant(key(op), 1, Fingerprint::default());
    carry(to, from, NOW);
    let body = Body::Memory { place: crate::frame::Reference { address: 0x1000, epoch: 0, region: 0 }, len };
    from.send(Outgoing {
        key: key(op),
        priority,
        is_changed: false,
        fingerprint: Fingerprint::default(),
        coflow: 0,
        body,
    });
}

/// Carries over what may leave now. Returns the operations of data, and kinds of other frames.
fn carry(from: &mut Peer, to: &mut Peer, now: Time) -> (Vec<u64>, Vec<Kind>) {
    let (mut data, mut others) = (Vec::new(), Vec::new());
    while let Some(frame) = from.poll_frame(0, now) {
        let header = frame.header;
        to.handle_header(0, &header, OpStatus::Active, now).expect("a good header");
        to.handle_frame(0, &header, frame.payload.bytes().unwrap_or(&[]), OpStatus::Active).expect("a good frame");
        if header.kind == Kind::Data { data.push(header.key.op.0) } else { others.push(header.kind) }
    }
    (data, others)
}

/// Only long messages that are more urgent than usual count, until they are whole or nothing more of them comes.
#[test]
fn who_brings_what_is_urgent() {
    let [mut a, mut b] = pair();
    granted(&mut a, &mut b, 0, Priority::USUAL, 1 << 20);
    granted(&mut a, &mut b, 1, URGENT, 4096);
    assert_eq!(carry(&mut a, &mut b, NOW).0[0], 1);
    assert_eq!(b.brings_urgent(NOW), None, "it was short");
    granted(&mut a, &mut b, 2, URGENT, 1 << 20);
    granted(&mut a, &mut b, 3, Priority(-2), 1 << 20);
    carry(&mut b, &mut a, NOW);
    carry(&mut a, &mut b, NOW);
    assert_eq!(b.brings_urgent(NOW), Some(URGENT), "the most urgent one of both");
    assert_eq!(b.brings_urgent(NOW.plus(20 * MILLISECOND)), Some(URGENT), "the rest of it is under way");
    assert_eq!(b.brings_urgent(NOW.plus(60 * MILLISECOND)), None, "nothing more of it has come");
    let lasts = b.pause_lasts();
    carry(&mut b, &mut a, NOW);
    while !carry(&mut a, &mut b, NOW).0.is_empty() {
        carry(&mut b, &mut a, NOW);
    }
    assert!(b.pause_lasts() < lasts);
    assert_eq!(b.brings_urgent(NOW.plus(MILLISECOND / 2)), Some(URGENT), "the next step of a collective may follow");
    assert_eq!(b.brings_urgent(NOW.plus(3 * MILLISECOND)), None, "it is whole");
}

/// What waits for room holds up bulk to others. That is not what its receiver has asked to pause, nor what has no stream to leave on.
#[test]
fn what_waits_for_room() {
    let [mut a, mut b] = pair();
    granted(&mut a, &mut b, 0, Priority(-2), 1 << 20);
    assert!(a.awaits_room(NOW) && a.has_urgent(NOW));
    b.pause(URGENT, 2 * MILLISECOND, NOW);
    carry(&mut b, &mut a, NOW);
    assert!(!a.awaits_room(NOW) && !a.has_urgent(NOW), "it is paused");
    a.hurry(Urgency { ignores_pauses: true, ..Urgency::default() });
    assert!(a.awaits_room(NOW), "it has waited for long enough");
    a.hurry(Urgency::default());
    let later = NOW.plus(3 * MILLISECOND);
    assert!(a.awaits_room(later), "the pause is over");
    assert!(a.poll_frame(0, later).is_some() && a.awaits_room(later));
    a.stream_down(0);
    assert!(!a.awaits_room(later), "its only stream is lost");
    a.stream_up(0, later);
    assert!(a.awaits_room(later));
}

/// A sender that is asked to pause sends what is as urgent as the asker says, at once, and the rest when the pause is over.
#[test]
fn a_pause_holds_what_is_less_urgent() {
    let [mut a, mut b] = pair();
    granted(&mut a, &mut b, 0, Priority::USUAL, 64 << 20);
    assert!(!b.has_sent_less_urgent(URGENT, NOW), "it has sent nothing yet");
    carry(&mut a, &mut b, NOW);
    assert!(b.has_sent_less_urgent(URGENT, NOW) && !b.has_sent_less_urgent(Priority::USUAL, NOW));
    assert!(b.may_ask_again(NOW));
    b.pause(URGENT, b.pause_lasts(), NOW);
    assert!(!b.may_ask_again(NOW), "it was just asked");
    assert!(b.may_ask_again(NOW.plus(MILLISECOND)));
    assert_eq!(carry(&mut b, &mut a, NOW).1[0], Kind::Pause);
    let end = a.paused_until().expect("it was asked");
    assert!(end > NOW && a.poll_timeout(NOW) <= end);
    granted(&mut a, &mut b, 1, Priority(-4), 4096);
    granted(&mut a, &mut b, 2, URGENT, 4096);
    assert_eq!(carry(&mut a, &mut b, NOW).0, [2]);
    let data = carry(&mut a, &mut b, end).0;
    assert_eq!((data[0], data[1]), (1, 0), "in order of urgency");
    a.handle_timeout(end);
    assert_eq!(a.paused_until(), None);
}

/// No pause is longer than the longest, and one that has waited for others for long enough does not pause.
#[test]
fn pauses_end() {
    let [mut a, mut b] = pair();
    granted(&mut a, &mut b, 0, Priority::USUAL, 1 << 40);
    b.pause(URGENT, b.pause_lasts(), NOW);
    let pause = Header { offset: u64::MAX, ..b.poll_frame(0, NOW).expect("the pause").header };
    a.handle_header(0, &pause, OpStatus::Early, NOW).expect("a good header");
    a.handle_frame(0, &pause, &[], OpStatus::Early).expect("a good frame");
    assert!(a.paused_until().expect("it was asked") <= NOW.plus(5 * MILLISECOND));
    assert_eq!(carry(&mut a, &mut b, NOW).0, []);
    a.hurry(Urgency { ignores_pauses: true, ..a.urgency(NOW) });
    assert_ne!(carry(&mut a, &mut b, NOW).0, []);
}
