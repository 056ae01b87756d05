//! The machines of a scope, and what workers push.

use super::{JOB, NOW, Scope, WORKERS};
use crate::*;

/// What worker `w` pushes: numbers whose sums tell which blocks are in them.
pub(super) fn block(scope: Scope, epoch: u16, w: usize, seq: Serial) -> i32 {
    let number = 2 * (seq.ahead_of(scope.start) as u32) + w as u32 + 8 * u32::from(epoch);
    7_i32.wrapping_pow(number + 1)
}

pub(super) fn new_worker(scope: Scope, i: usize, epoch: u16) -> Worker {
    let (parent, name) = scope.shape.above(WORKERS[i]);
    let config = WorkerConfig {
        job: JOB,
        epoch,
        key: None,
        name,
        window: scope.window,
        start: scope.start,
        parent,
        server: scope.shape.server(),
        ask_parent: true,
        full_to_parent: true,
        apart: scope.apart.is_some(),
        // Time stands still here: whatever may happen later happens at once.
        timing: Timing { rto_min: 0, ..Timing::default() },
    };
    Worker::with_rules(NOW, config, scope.rules)
}

pub(super) fn new_aggregator(scope: Scope, i: usize, epoch: u16) -> Aggregator {
    let limits = Limits { jobs: 1, slots: scope.window as usize, memory_bytes: 4 * 4 * scope.window as usize };
    let mut aggregator = Aggregator::with_rules(limits, scope.rules);
    let (shape, node) = (scope.shape, Endpoint(i as u32));
    let below = |child: &Endpoint| shape.above(*child).0 == node;
    let all = (0..shape.nodes() as u32 - 1).map(Endpoint).filter(below);
    let mut children: Vec<Child> = all.map(|endpoint| Child { endpoint, workers: shape.above(endpoint).1 }).collect();
    children.sort_by_key(|child| child.workers);
    let (parent, name) = shape.above(node);
    let tenant = Tenant {
        job: JOB,
        epoch,
        key: None,
        window: scope.window,
        block_bytes: 4,
        floats: true,
        results: true,
        apart: scope.apart.is_some(),
        parent,
        server: Some(shape.server()),
        name,
        children,
    };
    aggregator.open(tenant).expect("it fits");
    aggregator
}

pub(super) fn new_server(scope: Scope, epoch: u16) -> Server {
    let config = ServerConfig {
        job: JOB,
        epoch,
        key: None,
        window: scope.window,
        block_bytes: 4,
        start: scope.start,
        tree: scope.shape.tree(),
        naming: Naming::Children,
        stand_ins: 2,
        held_blocks: scope.apart.map(|apart| apart.limit),
        workers: WORKERS.to_vec(),
        heartbeat_every: ServerConfig::HEARTBEAT_EVERY,
        idle_every: ServerConfig::IDLE_EVERY,
        // There is no time in the model.
        returns_after: 0,
    };
    Server::with_rules(NOW, config, scope.rules)
}
