//! Every message arrives once, whole and right, whatever the streams do.

use super::network::StreamSpec;
use super::world::{Action, Message, Op, Seed, World};
use crate::frame::Direction;
use crate::peer::take_over::MAX_COPIES;
use crate::peer::*;
use penstock_types::Priority;
use rand::Rng;
use std::collections::BTreeMap;

/// A random pair or triple of nodes, streams, operations and faults.
fn scenario(seed: u64) -> World {
    // Small seeds differ in few bits.
    let mut world = World::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, 1, &PeerConfig::default(), &[], 1.0);
    let rng = &mut world.rng;
    let nodes = if rng.random_ratio(1, 4) { 3 } else { 2 };
    let streams: Vec<_> = (0..rng.random_range(1..=8))
        .map(|_| StreamSpec {
            mbit_per_s: rng.random_range(20.0..400.0),
            delay: rng.random_range(10_000..15 * MILLISECOND),
            buffer_bytes: rng.random_range(16 * 1024..1024 * 1024),
        })
        .collect();
    let eager_bytes = rng.random_range(0..32 * 1024);
    let config = PeerConfig {
        eager_bytes,
        eager_credit_bytes: rng.random_range(1..12) * eager_bytes / 2 + 300,
        references: rng.random_ratio(1, 6),
        most_unasked: if rng.random() { rng.random_range(0..4) } else { PeerConfig::default().most_unasked },
        checksum: rng.random_ratio(1, 4),
        unacked_limit_bytes: 1 << rng.random_range(16..23),
        ..PeerConfig::default()
    };
    let capacity = if rng.random() { f64::INFINITY } else { rng.random_range(50.0..1000.0) };
    let next = rng.random();
    let mut world = World::new(next, nodes, &config, &streams, capacity);
    if world.rng.random() {
        world.slow_grants = world.rng.random_range(1..20 * MILLISECOND);
        world.slow_issue = world.rng.random_range(1..20 * MILLISECOND);
    }
    add_collectives(&mut world, nodes, eager_bytes);
    add_point_to_point(&mut world, nodes, eager_bytes);
    if world.rng.random() {
        add_faults(&mut world, streams.len());
    }
    world
}

fn length(rng: &mut impl Rng, eager_bytes: u64) -> (u64, bool) {
    let len = match rng.random_range(0..10) {
        0 => 0,
        1 => 1,
        2 => rng.random_range(0..=eager_bytes),
        3 => eager_bytes,
        4 => eager_bytes + 1,
        5 => 64 * 1024,
        6 => 64 * 1024 + 3,
        7 | 8 => rng.random_range(1..150_000),
        _ => rng.random_range(150_000..500_000),
    };
    (len, len <= eager_bytes && rng.random_ratio(9, 10))
}

/// Operations that all nodes post in the same order, each at its own times.
fn add_collectives(world: &mut World, nodes: usize, eager_bytes: u64) {
    let pace = world.rng.random_range(1..30 * MILLISECOND);
    let mut clocks = vec![Time(0); nodes];
    for seq in 0..world.rng.random_range(0..6) {
        let mut messages = Vec::new();
        for from in 0..nodes {
            for to in (0..nodes).filter(|to| *to != from) {
                for number in 0..world.rng.random_range(0..4) {
                    let (len, copied) = length(&mut world.rng, eager_bytes);
                    messages.push(Message { from, to, number, len, copied });
                }
            }
        }
        let priority = Priority(world.rng.random_range(-2..3));
        let op = world.add(Op {
            group: GroupId(1),
            space: NumberSpace::Collective(ChannelId::MAIN),
            seq: OpSeq(seq),
            priority,
            messages,
        });
        for (node, clock) in clocks.iter_mut().enumerate() {
            *clock = clock.plus(world.rng.random_range(0..pace));
            world.schedule(*clock, Action::Post { node, op });
        }
    }
}

/// Channels of one message an operation, whose receiver posts in another order than the sender. Both directions of a
/// pair may use the same tag.
fn add_point_to_point(world: &mut World, nodes: usize, eager_bytes: u64) {
    let pace = world.rng.random_range(1..100 * MILLISECOND);
    let from = world.rng.random_range(0..nodes);
    let to = (from + world.rng.random_range(1..nodes)) % nodes;
    for (tag, from, to) in [(1, from, to), (1, to, from), (2, from, to)] {
        let space = NumberSpace::PointToPoint { direction: Direction::between(from as u32, to as u32), tag };
        for seq in 0..world.rng.random_range(0..8) {
            let (len, copied) = length(&mut world.rng, eager_bytes);
            let messages = vec![Message { from, to, number: 0, len, copied }];
            let priority = Priority(world.rng.random_range(-2..3));
            let op = world.add(Op { group: GroupId(2), space, seq: OpSeq(seq), priority, messages });
            for node in [from, to] {
                let at = Time(world.rng.random_range(0..pace));
                world.schedule(at, Action::Post { node, op });
            }
        }
    }
}

/// Streams that die and come back, fall silent, or change their rate.
fn add_faults(world: &mut World, streams: usize) {
    for _ in 0..world.rng.random_range(0..6) {
        let rng = &mut world.rng;
        let at = Time(rng.random_range(0..100 * MILLISECOND));
        let (stream, side) = (rng.random_range(0..streams), rng.random_range(0..2));
        match rng.random_range(0..4) {
            0 | 1 => {
                let (skew, after) = (rng.random_range(0..50 * MILLISECOND), rng.random_range(1..100 * MILLISECOND));
                world.schedule(at, Action::Close { pair: 0, stream, side, skew, after });
            }
            2 => {
                let back = at.plus(rng.random_range(0..3 * SECOND));
                world.schedule(at, Action::Rate { pair: 0, stream, mbit_per_s: 0.0 });
                world.schedule(back, Action::Rate { pair: 0, stream, mbit_per_s: 100.0 });
            }
            _ => {
                let mbit_per_s = rng.random_range(2.0..100.0);
                world.schedule(at, Action::Rate { pair: 0, stream, mbit_per_s });
            }
        }
    }
}

/// Everything that was sent arrives exactly once with the right bytes, is reported sent only then, stays within the
/// eager credit and the windows, and leaves nothing behind: random operations, sizes, priorities, orders and faults.
#[test]
fn everything_arrives_once_whatever_the_streams_do() {
    let mut seen: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in 0..SEEDS {
        let _seed = Seed(seed);
        let mut world = scenario(seed);
        let credit = world.pairs[0].peers[0].config.eager_credit_bytes;
        world.finish(60 * SECOND);
        world.assert_nothing_is_left();
        let (repeated, unique) = world.repeated();
        assert!(repeated <= (u64::from(MAX_COPIES) - 1 + world.losses) * unique, "{repeated} of {unique} repeated");
        assert!(world.most_held <= credit, "{} of {credit}", world.most_held);
        *seen.entry("lost streams").or_default() += world.losses;
        *seen.entry("repeated frames").or_default() += repeated;
        let dropped = world.pairs.iter().flat_map(|pair| &pair.peers).filter(|peer| peer.has_dropped_grants);
        *seen.entry("senders that dropped grants").or_default() += dropped.count() as u64;
        world.seen.iter().for_each(|(what, count)| *seen.entry(what).or_default() += count);
    }
    // Otherwise the seeds above prove less than they seem to.
    for (what, least) in [
        ("announcements", 200),
        ("duplicates", 20),
        ("eager frames", 200),
        ("early frames", 200),
        ("granted frames", 2000),
        ("lost streams", 200),
        ("races", 10),
        ("references", 100),
        ("repeated control frames", 20),
        ("repeated frames", 200),
        ("revocations", 2),
        ("senders that dropped grants", 50),
        ("stalls", 10),
    ] {
        let count = seen.get(what).copied().unwrap_or(0);
        assert!(count >= least, "only {count} {what} in {SEEDS} seeds: {seen:?}");
    }
}

/// A seed costs some milliseconds without optimisation.
const SEEDS: u64 = 500;
