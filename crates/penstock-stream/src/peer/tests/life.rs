//! Keep-alive: what a peer finds out about peers and streams that are silent, and when.

use super::network::StreamSpec;
use super::world::{Action, Message, Op, Seed, World};
use crate::frame::{Header, Kind};
use crate::peer::*;
use penstock_types::Priority;
use rand::Rng;
use std::collections::HashSet;

fn world(streams: usize) -> World {
    let spec = StreamSpec { mbit_per_s: 100.0, delay: 5 * MILLISECOND, buffer_bytes: 64 * 1024 };
    World::new(1, 2, &PeerConfig::default(), &vec![spec; streams], f64::INFINITY)
}

fn silence(world: &World) -> Vec<(Time, usize)> {
    world.log.iter().filter(|(_, _, event)| *event == Event::Silent).map(|(at, node, _)| (*at, *node)).collect()
}

/// Lets time pass for a peer whose timers are on time.
fn pass(peer: &mut Peer, from: Time, to: Time) {
    let mut now = from;
    while now <= to {
        peer.handle_timeout(now);
        now = peer.poll_timeout(now);
    }
}

/// Cuts all streams, silently.
fn cut(world: &mut World, at: Time, mbit_per_s: f64) {
    for stream in 0..world.pairs[0].up.len() {
        world.schedule(at, Action::Rate { pair: 0, stream, mbit_per_s });
    }
}

/// Two idle peers keep each other alive for good, with few frames.
#[test]
fn idle_peers_stay() {
    let mut world = world(8);
    world.run_for(600 * SECOND);
    assert_eq!(world.log, []);
    // A heartbeat and its answer for each stream, at most every half second, in both directions.
    assert!(world.frames <= 600 * 2 * 8 * 4, "{}", world.frames);
    assert!(world.frames >= 600, "{}", world.frames);
}

/// A peer that says nothing is lost after `dead_after`, once, on both sides; one that speaks again a moment before is
/// not, and nobody is lost again while the silence goes on.
#[test]
fn silence_is_found_in_time_and_not_before() {
    let dead_after = PeerConfig::default().dead_after;
    let mut gone = world(3);
    gone.run_for(10 * SECOND);
    cut(&mut gone, Time(10 * SECOND), 0.0);
    gone.run_for(30 * SECOND);
    let found = silence(&gone);
    assert_eq!(found.iter().map(|(_, node)| *node).collect::<HashSet<_>>().len(), 2, "{found:?}");
    for (at, _) in &found {
        // What was heard last was on its way when the streams were cut, or came a heartbeat before.
        let after = at.since(Time(10 * SECOND));
        assert!((dead_after - SECOND..=dead_after + 10 * MILLISECOND).contains(&after), "{after}");
    }
    assert_eq!(found.len(), 2, "reported again: {found:?}");

    let mut back = world(3);
    back.run_for(10 * SECOND);
    cut(&mut back, Time(10 * SECOND), 0.0);
    // Heartbeats wait in the sockets: they arrive when the streams flow again.
    cut(&mut back, Time(10 * SECOND + dead_after - SECOND), 100.0);
    back.run_for(30 * SECOND);
    assert_eq!(silence(&back), []);
}

/// The limit itself, from both sides, to the nanosecond; and a life sign takes the verdict back.
#[test]
fn the_limit_is_exact() {
    let config = PeerConfig::default();
    let mut peer = Peer::new(config.clone(), Time(7));
    peer.stream_up(0, Time(7));
    let limit = Time(7).plus(config.dead_after);
    pass(&mut peer, Time(7), limit);
    peer.handle_timeout(limit);
    assert_eq!(peer.poll_event(), None);
    assert_eq!(peer.poll_timeout(limit), limit.plus(1));
    peer.handle_timeout(limit.plus(1));
    assert_eq!(peer.poll_event(), Some(Event::Silent));
    peer.handle_timeout(limit.plus(SECOND));
    assert_eq!(peer.poll_event(), None);
    peer.heard(0, limit.plus(SECOND));
    let limit = limit.plus(SECOND).plus(config.dead_after);
    pass(&mut peer, Time(limit.0 - config.dead_after), limit);
    peer.handle_timeout(limit.plus(1));
    assert_eq!(peer.poll_event(), Some(Event::Silent));
}

/// A process that was stopped counts none of that time as its peer's silence, which may have been stopped with it; what it had
/// heard before, and what follows, counts as ever. A short delay of its own timers changes nothing.
#[test]
fn a_pause_of_our_own_is_not_the_peers() {
    let config = PeerConfig::default();
    for (heard_before, pause) in [(0, 3), (1, 5), (2, 3600)] {
        let mut peer = Peer::new(config.clone(), Time(0));
        peer.stream_up(0, Time(0));
        let stopped = Time(heard_before * SECOND);
        pass(&mut peer, Time(0), stopped);
        let resumed = stopped.plus(pause * SECOND);
        let away = resumed.since(peer.poll_timeout(stopped));
        peer.handle_timeout(resumed);
        assert_eq!(peer.poll_event(), None, "silent for {heard_before} s before a pause of {pause} s");
        let mut now = resumed;
        let found = loop {
            now = peer.poll_timeout(now);
            peer.handle_timeout(now);
            match peer.poll_event() {
                Some(Event::Silent) => break now,
                other => assert_eq!(other, None),
            }
        };
        assert_eq!(found, Time(config.dead_after + 1).plus(away), "the silence without the pause");
    }
    let mut peer = Peer::new(config.clone(), Time(0));
    peer.stream_up(0, Time(0));
    let mut now = Time(0);
    let found = loop {
        peer.handle_timeout(now);
        if let Some(event) = peer.poll_event() {
            assert_eq!(event, Event::Silent);
            break now;
        }
        now = peer.poll_timeout(now).plus(config.heartbeat_every);
    };
    assert!(found.since(Time(0)) <= config.dead_after + 2 * config.heartbeat_every, "{found:?}");
}

/// Two processes that are stopped together, and go on one after the other, keep each other; so does one that was stopped for
/// less than the limit, and reads what has arrived before it judges.
#[test]
fn peers_that_were_stopped_together_stay() {
    let config = PeerConfig::default();
    let mut peers = [0, 1].map(|_| Peer::new(config.clone(), Time(0)));
    peers.iter_mut().for_each(|peer| peer.stream_up(0, Time(0)));
    let resumed = [Time(600 * SECOND), Time(603 * SECOND)];
    for (peer, at) in peers.iter_mut().zip(resumed) {
        peer.handle_timeout(at);
        assert_eq!(peer.poll_event(), None);
    }
    // The first has waited for the second for 3 s by now.
    let both = resumed[1].plus(MILLISECOND);
    let [first, second] = &mut peers;
    while let Some(frame) = second.poll_frame(0, both) {
        first.heard(0, both);
        drop(frame);
    }
    first.handle_timeout(both.plus(config.dead_after));
    assert_eq!(first.poll_event(), None);
}

/// A frame that takes longer than `dead_after` counts as heard from the peer while its bytes arrive.
#[test]
fn a_long_frame_is_not_silence() {
    let config = PeerConfig::default();
    let mut peer = Peer::new(config.clone(), Time(0));
    peer.stream_up(0, Time(0));
    for second in 1..20 {
        peer.heard(0, Time(second * SECOND));
        peer.handle_timeout(Time(second * SECOND));
        assert_eq!(peer.poll_event(), None);
    }
}

/// The clock is looked at although calls never pause: a deadline does not move away from those who ask for it often.
#[test]
fn deadlines_do_not_move() {
    let mut peer = Peer::new(PeerConfig::default(), Time(0));
    (0..2).for_each(|stream| peer.stream_up(stream, Time(0)));
    let first = peer.poll_timeout(Time(0));
    for millisecond in 0..first.0 / MILLISECOND {
        peer.heard(0, Time(millisecond * MILLISECOND));
        assert_eq!(peer.poll_timeout(Time(millisecond * MILLISECOND)), first);
    }
}

/// One stream of a living peer falls silent: it is reported once, soon after half of `dead_after`, and the others never;
/// a pause of less than that is nothing.
#[test]
fn a_stalled_stream_is_reported() {
    let half = PeerConfig::default().dead_after / 2;
    for (pause, reported) in [(half - SECOND, false), (20 * SECOND, true)] {
        let mut world = world(4);
        world.reopen = false;
        world.run_for(5 * SECOND);
        world.schedule(world.now, Action::Rate { pair: 0, stream: 2, mbit_per_s: 0.0 });
        world.schedule(world.now.plus(pause), Action::Rate { pair: 0, stream: 2, mbit_per_s: 100.0 });
        world.run_for(10 * SECOND);
        let stalled: Vec<_> =
            world.log.iter().map(|(at, node, event)| (at.since(Time(5 * SECOND)), *node, event)).collect();
        assert_eq!(stalled.len(), if reported { 2 } else { 0 }, "{stalled:?}");
        for (after, _, event) in stalled {
            assert_eq!(*event, Event::Stalled(2));
            assert!((half - SECOND..half + SECOND).contains(&after), "{after}");
        }
    }
}

/// An operation that is stuck behind a stalled stream goes on within milliseconds when the stall begins, and the stream
/// is closed and replaced; with its only stream stalled it goes on when that is replaced.
#[test]
fn operations_survive_a_stall() {
    for at in [0, 3, 7, 20] {
        let mut world = world(3);
        world.run_for(SECOND);
        let start = world.now;
        let messages = [(0, 1), (1, 0)].map(|(from, to)| Message { from, to, number: 0, len: 900_000, copied: false });
        let (group, seq) = (GroupId(1), OpSeq(0));
        let op = world.add(Op {
            group,
            space: NumberSpace::Collective(ChannelId::MAIN),
            seq,
            priority: Priority(0),
            messages: messages.to_vec(),
        });
        (0..2).for_each(|node| world.schedule(start, Action::Post { node, op }));
        world.schedule(start.plus(at * MILLISECOND), Action::Rate { pair: 0, stream: 1, mbit_per_s: 0.0 });
        world.run(5 * SECOND, World::idle);
        // 34 ms of transfer by two streams, and the patience with a stream that was never measured.
        assert!(world.now.since(start) < 350 * MILLISECOND, "{at} ms: {} ns", world.now.since(start));
        world.run_for(5 * SECOND);
        assert_eq!(world.pairs[0].up[1], [true; 2], "it was not replaced");
        world.finish(SECOND);
        world.assert_nothing_is_left();
    }
}

/// After a pause of the peer as a whole the first stream that speaks does not condemn the others: they have half of
/// `dead_after` from then.
#[test]
fn a_pause_condemns_no_stream() {
    let mut peer = Peer::new(PeerConfig::default(), Time(0));
    (0..2).for_each(|stream| peer.stream_up(stream, Time(0)));
    let back = 3 * SECOND;
    for millisecond in (100..7000).step_by(100) {
        let now = Time(millisecond * MILLISECOND);
        if now.0 < SECOND || now.0 >= back {
            peer.heard(0, now);
        }
        peer.handle_timeout(now);
        let event = peer.poll_event();
        if now.0 <= back + 2 * SECOND {
            assert_eq!(event, None, "after {millisecond} ms");
        } else if event.is_some() {
            assert_eq!(event, Some(Event::Stalled(1)));
            return;
        }
    }
    panic!("a stream that stays silent was not reported");
}

/// Who leaves a group is known to have left it only after all that it sent there has come, on streams of all kinds, some of which are
/// lost and come back.
#[test]
fn leaving_overtakes_nothing() {
    let mut overtakers = 0;
    for seed in 0..200 {
        let _seed = Seed(seed);
        let mut world = World::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, 1, &PeerConfig::default(), &[], 1.0);
        let spec = |rng: &mut rand_xorshift::XorShiftRng| StreamSpec {
            mbit_per_s: rng.random_range(1.0..400.0),
            delay: rng.random_range(10_000..15 * MILLISECOND),
            buffer_bytes: rng.random_range(16 * 1024..256 * 1024),
        };
        let streams: Vec<_> = (0..world.rng.random_range(2..6)).map(|_| spec(&mut world.rng)).collect();
        let next = world.rng.random();
        let mut world = World::new(next, 2, &PeerConfig::default(), &streams, f64::INFINITY);
        let (group, priority) = (GroupId(1), Priority(0));
        let count = world.rng.random_range(1..30);
        for seq in 0..count {
            let len = world.rng.random_range(0..20_000);
            let messages = vec![Message { from: 0, to: 1, number: 0, len, copied: true }];
            let space = NumberSpace::Collective(ChannelId(world.rng.random_range(0..3)));
            let op = world.add(Op { group, space, seq: OpSeq(seq), priority, messages });
            (0..2).for_each(|node| world.schedule(Time(0), Action::Post { node, op }));
        }
        for _ in 0..world.rng.random_range(0..4) {
            let (at, stream) =
                (Time(world.rng.random_range(0..30 * MILLISECOND)), world.rng.random_range(0..streams.len()));
            let (skew, after) =
                (world.rng.random_range(0..20 * MILLISECOND), world.rng.random_range(1..50 * MILLISECOND));
            world.schedule(at, Action::Close { pair: 0, stream, side: 0, skew, after });
        }
        // Its operations are over: what it sent was copied.
        world.run(SECOND, |world| world.finished.iter().filter(|(_, node, _)| *node == 0).count() as u64 == count);
        let unacknowledged = world.peer(0, 1).unacknowledged();
        overtakers += u64::from(unacknowledged > 0);
        let scopes = [2, 1, 0].map(|number| Scope { group, channel: ChannelId(number) });
        for scope in scopes {
            world.peer(0, 1).left(scope, Farewell::default());
            world.peer(0, 1).retire_all(scope);
        }
        let left = |world: &World| {
            let left = world.log.iter().filter_map(|(_, node, event)| match event {
                Event::Left(scope, _) if *node == 1 => Some(*scope),
                _ => None,
            });
            left.collect::<Vec<Scope>>()
        };
        world.run(60 * SECOND, |world| left(world).contains(&group.into()));
        let mut told = left(&world);
        assert_eq!(told.pop(), Some(group.into()), "the group's farewell comes after those of its channels");
        told.sort_unstable();
        assert_eq!(told, [scopes[1], scopes[0]]);
        assert_eq!(world.arrivals.len() as u64, count, "it has left before its messages came");
        world.finish(60 * SECOND);
        // Nobody waits for the acknowledgement of that word.
        world.run_for(SECOND);
        world.assert_nothing_is_left();
    }
    assert!(overtakers >= 150, "only {overtakers} of 200 seeds had something to overtake");
}

/// The answer to a heartbeat tells the round trip; one that comes from the future tells nothing.
#[test]
fn heartbeats_measure_the_way() {
    let mut peer = Peer::new(PeerConfig::default(), Time(0));
    peer.stream_up(0, Time(0));
    let asked = Time(SECOND);
    peer.handle_timeout(asked);
    let heartbeat = peer.poll_frame(0, asked).expect("after a second of silence").header;
    assert_eq!(heartbeat.kind, Kind::Heartbeat);
    let now = asked.plus(30 * MILLISECOND);
    for (offset, round_trip) in [(heartbeat.offset + SECOND, 0), (heartbeat.offset, 30 * MILLISECOND)] {
        let reply = Header { offset, ..Header::new(Kind::HeartbeatReply, heartbeat.key) };
        peer.handle_header(0, &reply, OpStatus::Early, now).expect("a good header");
        peer.handle_frame(0, &reply, &[], OpStatus::Early).expect("a good frame");
        assert_eq!(peer.stats()[0].1.round_trip_ns, round_trip);
    }

    let beat = Header { offset: 77, ..Header::new(Kind::Heartbeat, heartbeat.key) };
    peer.handle_header(0, &beat, OpStatus::Early, now).expect("a good header");
    peer.handle_frame(0, &beat, &[], OpStatus::Early).expect("a good frame");
    let reply = peer.poll_frame(0, now).expect("an answer").header;
    assert_eq!((reply.kind, reply.offset), (Kind::HeartbeatReply, 77));
}
