//! However many references and grants are outstanding between two nodes, all messages arrive, and neither side remembers more than a bound.

use super::network::StreamSpec;
use super::world::{Action, Message, Op, Seed, World};
use crate::frame::Direction;
use crate::peer::receive::MAX_REMEMBERED;
use crate::peer::*;
use penstock_types::Priority;
use rand::seq::SliceRandom;

/// More than the peer keeps records of.
const MANY: u64 = MAX_REMEMBERED as u64 + 1_000;

const MOST: usize = MAX_REMEMBERED / 4;

const QUICK: StreamSpec = StreamSpec { mbit_per_s: 40_000.0, delay: 20_000, buffer_bytes: 4 << 20 };

/// `count` messages from node 0 to node 1, of operations under several tags and collectives. One side posts all of them at once, the
/// other one a second later, in another order where tags allow that.
fn run_ahead(seed: u64, config: &PeerConfig, count: u64, bytes: u64, first: usize) -> World {
    let mut world = World::new(seed, 2, config, &[QUICK], f64::INFINITY);
    world.bytes = false;
    let mut ids = Vec::new();
    for number in 0..count {
        let (space, seq) = match number % 4 {
            0 => (NumberSpace::Collective(ChannelId::MAIN), number / 4),
            tag => (NumberSpace::PointToPoint { direction: Direction::Up, tag: tag as u32 }, number / 4),
        };
        let messages = vec![Message { from: 0, to: 1, number: 0, len: bytes, copied: false }];
        ids.push(world.add(Op { group: GroupId(1), space, seq: OpSeq(seq), priority: Priority(0), messages }));
    }
    ids.iter().for_each(|&op| world.schedule(Time(0), Action::Post { node: first, op }));
    ids.shuffle(&mut world.rng);
    ids.iter().for_each(|&op| world.schedule(Time(SECOND), Action::Post { node: 1 - first, op }));
    let is_done = move |world: &World| world.finished.len() == 2 * count as usize && world.is_quiet();
    world.run(60 * SECOND, is_done);
    world.assert_nothing_is_left();
    world
}

/// A sender that is far ahead of its receiver, on one host: references.
#[test]
fn more_references_than_are_remembered() {
    let _seed = Seed(1);
    let config = PeerConfig { references: true, most_unasked: MOST, ..PeerConfig::default() };
    let world = run_ahead(1, &config, MANY, 9_000, 0);
    assert_eq!(world.seen["references"], MANY);
}

/// A receiver that is far ahead of its sender: grants.
#[test]
fn more_grants_than_are_remembered() {
    let _seed = Seed(2);
    let config = PeerConfig { most_unasked: MOST, ..PeerConfig::default() };
    let world = run_ahead(2, &config, MANY, 40_000, 1);
    assert!(world.pairs[0].peers[0].has_dropped_grants);
}
