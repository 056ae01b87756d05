//! How much of the streams' rates messages get, and what the last bytes wait for. Virtual time: the figures are exact.

use super::network::StreamSpec;
use super::world::{Action, Message, Op, Seed, World};
use crate::frame::MIN_FRAME_BYTES;
use crate::peer::take_over::PATIENCE_SHARED;
use crate::peer::*;
use penstock_types::Priority;
use std::collections::BTreeSet;

const MIB: u64 = 1024 * 1024;
/// Of every world here; nothing in these tests is drawn at random but how much of a lost stream's bytes arrive.
const SEED: u64 = 1;

fn streams(mbit_per_s: &[f64], delay: u64) -> Vec<StreamSpec> {
    mbit_per_s.iter().map(|rate| StreamSpec { mbit_per_s: *rate, delay, buffer_bytes: 128 * 1024 }).collect()
}

/// Two nodes; payloads travel as numbers.
fn pair(specs: &[StreamSpec], capacity_mbit: f64) -> World {
    let mut world = World::new(SEED, 2, &PeerConfig::default(), specs, capacity_mbit);
    world.bytes = false;
    world
}

/// Both nodes post an operation of one message of `len` bytes, from 0 to 1 or both ways. Returns its number.
fn post(world: &mut World, len: u64, both_ways: bool, priority: i32) -> usize {
    let ways: &[(usize, usize)] = if both_ways { &[(0, 1), (1, 0)] } else { &[(0, 1)] };
    let messages = ways
        .iter()
        .map(|&(from, to)| Message { from, to, number: 0, len, copied: len <= PeerConfig::default().eager_bytes })
        .collect();
    let seq = OpSeq(world.ops.len() as u64);
    let op = world.add(Op {
        group: GroupId(1),
        space: NumberSpace::Collective(ChannelId::MAIN),
        seq,
        priority: Priority(priority),
        messages,
    });
    for node in 0..2 {
        world.schedule(world.now, Action::Post { node, op });
    }
    op
}

/// Seconds until an operation posted now has finished on both nodes.
fn seconds(world: &mut World, len: u64, both_ways: bool) -> f64 {
    let start = world.now;
    post(world, len, both_ways, 0);
    world.run(60 * SECOND, |world| world.idle());
    world.now.since(start) as f64 / 1e9
}

fn share(len: u64, seconds: f64, mbit_per_s: f64) -> f64 {
    len as f64 * 8.0 / seconds / (mbit_per_s * 1e6)
}

/// Eight equal streams add up, one way and both, and hardly a frame leaves twice: nobody takes over from an equal.
#[test]
fn equal_streams_add_up() {
    for delay in [20_000, 500_000] {
        for both_ways in [false, true] {
            let mut world = pair(&streams(&[100.0; 8], delay), f64::INFINITY);
            for len in [4 * MIB, 64 * MIB, 64 * MIB] {
                let share = share(len, seconds(&mut world, len, both_ways), 800.0);
                let least = if len > 4 * MIB { 0.95 } else { 0.8 };
                assert!(share >= least, "{share} of the sum for {len} bytes, delay {delay}, both ways {both_ways}");
            }
            let (repeated, all) = world.repeated();
            assert!(repeated * 100 < all, "{repeated} of {all} frames repeated, delay {delay}, both ways {both_ways}");
        }
    }
}

/// A message that is alone is divided among all streams, so that they end together. Of many that wait, frames are as long as the rates
/// allow: there is enough for all streams, and each frame costs its ends time. Those behind that are less urgent count for nothing.
#[test]
fn messages_are_divided_where_nothing_else_waits() {
    const LEN: u64 = MIB / 4;
    let frames = |world: &mut World, priorities: &[i32]| {
        let before = world.repeated().1;
        for priority in priorities {
            post(world, LEN, false, *priority);
        }
        world.run(60 * SECOND, |world| world.idle());
        world.repeated().1 - before
    };
    for count in [8, 16, 32] {
        let mut world = pair(&streams(&vec![400.0; count], 20_000), f64::INFINITY);
        for _ in 0..3 {
            seconds(&mut world, 64 * MIB, false); // rates are learnt
        }
        let alone = frames(&mut world, &[0]);
        assert!(alone >= count.min(16) as u64, "{alone} frames of a message, {count} streams");
        let many = frames(&mut world, &[0; 64]);
        // Streams carry 20 MB/s here, 32 KiB in 2 ms; each message is granted by one frame, and the last ones are divided.
        let most = 64 * (LEN / (32 * 1024) + 1) + 4 * count as u64;
        assert!(many <= most, "{many} frames of 64 messages, {count} streams");
        let urgent = frames(&mut world, &[-1, 0, 0, 0, 0, 0, 0, 0]);
        let usual = frames(&mut world, &[0; 8]);
        assert!(urgent > usual, "{urgent} frames, {usual} where all are alike, {count} streams");
    }
}

/// Streams of 60 and 300 Mbit/s by turns carry what they can, because nothing is given to a stream in advance; an equal
/// share for each, the control, waits for the slow ones and gets a third.
#[test]
fn uneven_streams_add_up() {
    let rates = [60.0, 300.0].repeat(4);
    for (delay, both_ways) in [(20_000, false), (20_000, true), (10 * MILLISECOND, false), (10 * MILLISECOND, true)] {
        let mut world = pair(&streams(&rates, delay), f64::INFINITY);
        for _ in 0..3 {
            let share = share(64 * MIB, seconds(&mut world, 64 * MIB, both_ways), 1440.0);
            assert!(share >= 0.85, "{share} of the sum, delay {delay}, both ways {both_ways}");
        }
    }

    let alone = |rate| seconds(&mut pair(&streams(&[rate], 20_000), f64::INFINITY), 8 * MIB, false);
    let static_split = share(64 * MIB, f64::max(alone(60.0), alone(300.0)), 1440.0);
    assert!((0.30..0.34).contains(&static_split), "{static_split}");
}

/// Streams whose rates differ by half leave each other's frames alone; ten times is too much.
#[test]
fn only_much_slower_streams_lose_frames() {
    for (slow, some) in [(100.0, false), (15.0, true)] {
        let mut world = pair(&streams(&[slow, 150.0].repeat(4), 100_000), f64::INFINITY);
        for _ in 0..10 {
            seconds(&mut world, 8 * MIB, false);
        }
        let (repeated, all) = world.repeated();
        assert_eq!(repeated > all / 200, some, "{repeated} of {all} with {slow} Mbit/s");
    }
}

/// A link that sixteen streams share is full long before each of them is: copies would come second, and idle streams learn to
/// leave them.
#[test]
fn a_shared_link_repeats_little() {
    let mut world = pair(&streams(&[40.0; 16], 50_000), 100.0);
    let (mut took, mut len) = (0.0, 0);
    for step in 0..20 {
        let bytes = 4 * MIB + step * 100_000;
        took += seconds(&mut world, bytes, true);
        len += bytes;
    }
    let (repeated, all) = world.repeated();
    assert!(repeated * 100 < 5 * all, "{repeated} of {all}");
    let share = share(len, took, 100.0);
    assert!(share > 0.9, "{share} of the link");
}

/// Peers learn that their streams share a link; then they keep little in its queue, for which an urgent message has to wait, and
/// still fill it.
#[test]
fn a_shared_link_holds_little() {
    let mut world = pair(&streams(&[40.0; 16], 50_000), 100.0);
    for len in [MIB / 4, 8 * MIB] {
        seconds(&mut world, len, true);
    }
    let begun = world.now;
    post(&mut world, 8 * MIB, true, 0);
    world.run_for(400 * MILLISECOND);
    let urgent = post(&mut world, 16, true, -5);
    let since = world.now;
    world.run(SECOND, |world| world.finished.iter().filter(|(_, _, op)| *op == urgent).count() == 2);
    let waited = world.now.since(since) / MILLISECOND;
    world.run(10 * SECOND, |world| world.idle());
    let share = share(8 * MIB, world.now.since(begun) as f64 / 1e9, 100.0);
    assert!(share > 0.9, "{share} of the link");
    // With the windows of streams that share nothing: 113 ms.
    assert!(waited < 100, "{waited} ms");
}

/// One side has learnt that the streams share a link and the other has not, so the acks of the first wait in the long queue
/// of the second. Both directions are filled all the same.
#[test]
fn a_long_queue_of_the_other_direction_starves_nobody() {
    let mut specs = streams(&[200.0; 16], 50_000);
    specs.iter_mut().for_each(|spec| spec.buffer_bytes = 4 * MIB);
    let mut world = pair(&specs, 1000.0);
    for step in 0..10 {
        world.pairs[0].peers[0].sharing.patience = PATIENCE_SHARED;
        world.pairs[0].peers[1].sharing.patience = 1.0;
        let share = share(64 * MIB, seconds(&mut world, 64 * MIB, true), 1000.0);
        assert!(share > 0.95, "{share} of the link in operation {step}");
    }
}

/// One side takes round trips for longer than they are, so its windows are larger, and the queue of a link that both directions
/// fill stands on its side: the other side's acks wait in it. Both directions are filled all the same.
#[test]
fn larger_windows_of_the_other_side_starve_nobody() {
    for mbit in [1000.0, 200.0] {
        let mut specs = streams(&[mbit; 16], 50_000);
        specs.iter_mut().for_each(|spec| spec.buffer_bytes = 4 * MIB);
        let mut world = pair(&specs, 1000.0);
        for step in 0..6 {
            let begun = world.now;
            post(&mut world, 64 * MIB, true, 0);
            while !world.idle() {
                let now = world.now;
                for (peer, round_trip) in world.pairs[0].peers.iter_mut().zip([16 * MILLISECOND, MILLISECOND / 10]) {
                    peer.sharing.patience = PATIENCE_SHARED;
                    peer.streams.values_mut().for_each(|stream| stream.believe_round_trip(round_trip, now));
                }
                world.run_for(MILLISECOND);
            }
            let share = share(64 * MIB, world.now.since(begun) as f64 / 1e9, 1000.0);
            // 0.61 where a window does not cover what acks wait for. With it, 0.93 to 0.97.
            assert!(share > 0.85, "{share} of the link in operation {step} over streams of {mbit} Mbit/s");
        }
    }
}

/// Many short operations both ways over equal streams, the hardest case for the estimate: what a stream holds may have
/// arrived, and its ack waits behind the data of the other direction. Some frames leave twice, and it costs little.
#[test]
fn short_operations_repeat_little() {
    let mut world = pair(&streams(&[200.0; 8], 50_000), 1000.0);
    let (mut took, mut len) = (0.0, 0);
    for step in 0..40 {
        len += MIB + step * 100_000;
        took += seconds(&mut world, MIB + step * 100_000, true);
    }
    let (repeated, all) = world.repeated();
    assert!(repeated * 100 < 4 * all, "{repeated} of {all}");
    let share = share(len, took, 1000.0);
    assert!(share > 0.9, "{share} of the link");
}

/// A message of some frames is cut so that all streams carry a part of it, though each could take it whole.
#[test]
fn medium_messages_use_all_streams() {
    let mut world = pair(&streams(&[2000.0; 8], 50_000), f64::INFINITY);
    seconds(&mut world, 64 * MIB, false);
    for (len, least) in [(700_000, 0.4), (2_300_000, 0.75), (9_000_000, 0.9)] {
        let share = share(len, seconds(&mut world, len, false), 16_000.0);
        assert!(share > least, "{share} of the sum for {len} bytes");
    }
}

/// A peer that pauses as a whole is left alone: nothing is repeated, however long it takes. It is asked now and then.
#[test]
fn a_pause_is_not_a_slow_stream() {
    for pause in [30, 80, 400, 3000] {
        let mut world = pair(&streams(&[100.0; 8], 100_000), f64::INFINITY);
        seconds(&mut world, 8 * MIB, false);
        let (before, frames) = (world.repeated().0, world.frames);
        post(&mut world, MIB, false, 0);
        for stream in 0..8 {
            let at = world.now.plus(8 * MILLISECOND);
            world.schedule(at, Action::Rate { pair: 0, stream, mbit_per_s: 0.0 });
            world.schedule(at.plus(pause * MILLISECOND), Action::Rate { pair: 0, stream, mbit_per_s: 100.0 });
        }
        world.finish(5 * SECOND);
        assert_eq!(world.repeated().0 - before, 0, "repeated after {pause} ms");
        let asked = world.frames - frames;
        let data = 2 * MIB / u64::from(MIN_FRAME_BYTES);
        assert!(asked < data + 2 * 8 * pause / 20, "{asked} frames in {pause} ms");
    }
}

/// What streams have learnt of a link that they share, they know after a pause, and the next operation fills it as those before.
#[test]
fn a_link_is_filled_after_a_pause() {
    let mut specs = streams(&[200.0; 16], 50_000);
    specs.iter_mut().for_each(|spec| spec.buffer_bytes = 4 * MIB);
    let mut world = pair(&specs, 1000.0);
    let steady = (0..4).map(|_| seconds(&mut world, 64 * MIB, true)).fold(f64::INFINITY, f64::min);
    for pause in [300 * MILLISECOND, SECOND, 3 * SECOND, 30 * SECOND] {
        world.run_for(pause);
        let took = seconds(&mut world, 64 * MIB, true);
        assert!(took < 1.02 * steady, "{took} s after a pause of {} ms, {steady} s before", pause / MILLISECOND);
    }
}

/// With a round trip of 20 ms the windows still cover the way: eight flows of at most 200 Mbit/s fill a link of 1 Gbit/s.
#[test]
fn a_long_way_is_filled() {
    for both_ways in [false, true] {
        let mut world = pair(&streams(&[200.0; 8], 10 * MILLISECOND), 1000.0);
        for _ in 0..3 {
            let share = share(64 * MIB, seconds(&mut world, 64 * MIB, both_ways), 1000.0);
            assert!(share >= 0.9, "{share} of the link, both ways {both_ways}");
        }
        for (id, stats) in world.pairs[0].peers[0].stats() {
            // What 125 Mbit/s carry in a round trip and the slack, and the model's own queue.
            assert!(stats.window_bytes < MIB, "stream {id} may have {} bytes unacknowledged", stats.window_bytes);
        }
    }
}

/// A stream's rate is believed up to 131 MB/s only, where round trips are short; its window and its frames carry more all the
/// same. One stream fills 1 GB/s with a round trip of 50 us, and so do eight together, whether each could fill it alone or
/// only all together.
#[test]
fn streams_faster_than_believed_fill_the_link() {
    for (count, mbit_per_s) in [(1, 8000.0), (8, 8000.0), (8, 1000.0), (2, 4000.0)] {
        for both_ways in [false, true] {
            let _seed = Seed(SEED);
            let mut world = pair(&streams(&vec![mbit_per_s; count], 25_000), 8000.0);
            let context = format!("{count} streams of {mbit_per_s} Mbit/s, both ways {both_ways}");
            for _ in 0..3 {
                let share = share(64 * MIB, seconds(&mut world, 64 * MIB, both_ways), 8000.0);
                assert!(share >= 0.95, "{share} of the link: {context}");
            }
            for (id, stats) in world.pairs[0].peers[0].stats() {
                // What makes this test differ from those of slower streams.
                assert!(stats.rate_bytes_per_s < 135e6, "stream {id} believes {}: {context}", stats.rate_bytes_per_s);
            }
            let (repeated, all) = world.repeated();
            assert!(repeated * 100 < all, "{repeated} of {all} frames repeated: {context}");
        }
    }
}

/// A stream that slows down a hundred times, or falls silent, in mid message does not hold up its end: idle streams take
/// over what it has. The control: alone it would need at least half a second for that.
#[test]
fn a_slow_stream_does_not_hold_up_the_end() {
    for mbit_per_s in [2.0, 0.0] {
        for at in [10, 40, 70] {
            let mut world = pair(&streams(&[200.0; 8], 100_000), f64::INFINITY);
            seconds(&mut world, 16 * MIB, false);
            let start = world.now;
            post(&mut world, 16 * MIB, false, 0);
            world.schedule(start.plus(at * MILLISECOND), Action::Rate { pair: 0, stream: 3, mbit_per_s });
            world.run_for(at * MILLISECOND);
            let stuck = world.pairs[0].peers[0].streams[&3].unacked_bytes;
            assert!(stuck as f64 * 8.0 > 0.5e6 * mbit_per_s, "{stuck}");
            world.run(SECOND, World::idle);
            let (took, alone) = (world.now.since(start), share(16 * MIB, 1.0, 1600.0) * 1e9);
            assert!((took as f64) < 1.35 * alone, "{took} ns instead of {alone}, slow after {at} ms");
        }
    }
}

/// A message that is more urgent leaves before all frames of the others that have not left yet, and waits only for what
/// the streams hold already.
#[test]
fn urgent_messages_overtake_at_frames() {
    let mut world = pair(&streams(&[100.0; 4], 100_000), f64::INFINITY);
    world.follow = true;
    let bulk = post(&mut world, 32 * MIB, false, 5);
    world.run_for(100 * MILLISECOND);
    let start = world.now;
    let urgent = post(&mut world, MIB, false, -5);
    world.run(SECOND, |world| world.finished.iter().any(|(_, node, op)| (*node, *op) == (1, urgent)));
    // 1 MiB takes 21 ms, the windows before it 22 ms; the bulk still needs half a second.
    let took = world.now.since(start);
    assert!(took < 50 * MILLISECOND, "{took} ns");
    world.run_for(50 * MILLISECOND);
    let keys: Vec<_> = world.pulled.iter().filter(|(.., repeated)| !repeated).map(|(key, ..)| *key).collect();
    let is_urgent = |key: &MessageKey| *key == world.key(urgent, 0);
    let first = keys.iter().position(is_urgent).expect("it left");
    let last = keys.iter().rposition(is_urgent).expect("it left");
    assert!(keys[first..=last].iter().all(is_urgent), "frames of others between those of the urgent message");
    assert!(keys[..first].contains(&world.key(bulk, 0)) && keys[last + 1..].contains(&world.key(bulk, 0)));
}

/// Once something urgent has passed, a stream stays free for the next, and the others hold less: a short message waits for no queue,
/// and a link that is full stays full.
#[test]
fn short_urgent_messages_wait_behind_nothing() {
    let mut world = pair(&streams(&[60.0; 16], 100_000), f64::INFINITY);
    let mut took = Vec::new();
    let bulk = post(&mut world, 64 * MIB, true, 0);
    world.run_for(100 * MILLISECOND);
    for _ in 0..8 {
        let start = world.now;
        let urgent = post(&mut world, 32 * 1024, true, -5);
        let ended = |world: &World| world.finished.iter().filter(|(.., op)| *op == urgent).count() == 2;
        world.run(SECOND, ended);
        took.push(world.now.since(start));
        world.run_for(20 * MILLISECOND);
    }
    // 32 KiB take 4.4 ms on one such stream.
    assert!(took[1..].iter().all(|took| *took < 6 * MILLISECOND), "{took:?}");
    assert!(took[0] < 30 * MILLISECOND, "{took:?}");
    let is_over = |world: &World| world.finished.iter().filter(|(.., op)| *op == bulk).count() == 2;
    world.run(10 * SECOND, is_over);
    // Of 16 streams one was free.
    let share = share(64 * MIB, world.now.0 as f64 / 1e9, 15.0 * 60.0);
    assert!(share > 0.93, "{share}");
}

/// Among messages of one priority that wait for a grant the one issued first leaves first, whatever their sizes.
#[test]
fn equal_priorities_leave_in_order_of_issue() {
    let mut world = pair(&streams(&[100.0; 4], 100_000), f64::INFINITY);
    world.follow = true;
    for len in [3 * MIB, 100_000, MIB, 40_000, 2 * MIB] {
        post(&mut world, len, false, 0);
    }
    world.run(SECOND, World::idle);
    let ops: Vec<_> = world.pulled.iter().filter(|(.., repeated)| !repeated).map(|(key, ..)| key.op).collect();
    assert!(ops.is_sorted(), "{ops:?}");
}

/// Two minutes of traffic both ways without a pause, into sockets that take all there is: every ack waits behind the
/// other direction's data and no round trip is ever seen undisturbed, but the windows stay near what the streams need.
#[test]
fn windows_do_not_creep() {
    let mut specs = streams(&[40.0; 2], MILLISECOND);
    specs.iter_mut().for_each(|spec| spec.buffer_bytes = 64 * MIB);
    let mut world = pair(&specs, f64::INFINITY);
    for _ in 0..1200 / 12 {
        post(&mut world, 12 * MIB, true, 0);
    }
    let mut most = 0;
    while world.now < Time(120 * SECOND) {
        world.run_for(SECOND);
        let windows = world.pairs[0].peers.iter().flat_map(Peer::stats).map(|(_, stats)| stats.window_bytes);
        most = most.max(windows.max().expect("streams"));
    }
    assert!(!world.idle(), "the traffic has ended");
    // 40 Mbit/s for 43 ms, and two frames.
    assert!(most < 360_000, "{most}");
}

/// A node that is told to use so many streams sends on the first of those that are up, at their rates, and the other node
/// decides for itself; what is not used stays, however long, and can be used again at any time.
#[test]
fn messages_use_as_many_streams_as_told() {
    let mut world = pair(&streams(&[100.0; 8], 100_000), f64::INFINITY);
    world.follow = true;
    for most in [8, 3, 1, 5, 100] {
        let used = most.min(8);
        world.peer(0, 1).use_streams(most);
        for both_ways in [false, true] {
            world.pulled.clear();
            seconds(&mut world, 4 * MIB, both_ways);
            world.run_for(120 * SECOND);
            world.pulled.clear();
            let carried = share(32 * MIB, seconds(&mut world, 32 * MIB, both_ways), 100.0 * used as f64);
            assert!((0.95..=1.0).contains(&carried), "{carried} of {used} streams, both ways {both_ways}");
            let on: BTreeSet<usize> = world.pulled.iter().filter(|(key, ..)| key.op.0 > 0).map(|p| p.2).collect();
            let seen = if both_ways { 8 } else { used };
            assert_eq!(on, (0..seen).collect(), "{most} streams, both ways {both_ways}");
        }
    }
    assert_eq!(world.log.iter().filter(|(.., event)| !is_of_a_message(event)).count(), 0, "{:?}", world.log);
    assert_eq!(world.losses, 0);
}

/// When one of the used streams closes or falls silent, the next one takes its place, and everything arrives.
#[test]
fn a_lost_stream_is_replaced_by_one_that_was_not_used() {
    for (most, closes) in [(1, true), (1, false), (2, true), (2, false)] {
        let mut world = pair(&streams(&[100.0; 4], 100_000), f64::INFINITY);
        world.follow = true;
        world.peer(0, 1).use_streams(most);
        seconds(&mut world, 4 * MIB, false);
        post(&mut world, 8 * MIB, false, 0);
        let at = world.now.plus(20 * MILLISECOND);
        if closes {
            world.schedule(at, Action::Close { pair: 0, stream: 0, side: 0, skew: MILLISECOND, after: 0 });
        } else {
            world.schedule(at, Action::Rate { pair: 0, stream: 0, mbit_per_s: 0.0 });
            world.schedule(at.plus(5 * SECOND), Action::Rate { pair: 0, stream: 0, mbit_per_s: 100.0 });
        }
        world.run(30 * SECOND, World::idle);
        let on: BTreeSet<usize> = world.pulled.iter().map(|pulled| pulled.2).collect();
        assert!(!on.contains(&(most + 1)), "{on:?}");
        // Two streams help each other out at once, and give up a silent one no sooner than one does.
        assert_eq!(on.contains(&most), most == 1 || closes, "{on:?}, {most} streams, closes {closes}");
    }
}

fn is_of_a_message(event: &Event) -> bool {
    matches!(event, Event::Sent(_) | Event::Granted(..) | Event::Probe(..) | Event::Issued(..))
}
