//! All-reduces whose results come apart from the blocks: servers are done later than they accept, in another order, or not at all.

use super::*;

/// Sums of these lengths on every rank, whatever the order in which servers are done.
fn sums(shape: &Shape, lengths: &[usize], fails: Option<u64>) -> Cluster {
    let mut cluster = Cluster::new(shape.clone());
    let mut tensors: Vec<Vec<Vec<u8>>> = (0..shape.world)
        .map(|rank| lengths.iter().enumerate().map(|(op, len)| f32s(&contribution(rank, op, *len))).collect())
        .collect();
    for (rank, tensors) in tensors.iter_mut().enumerate() {
        for (op, tensor) in tensors.iter_mut().enumerate() {
            cluster.submit(rank, call(DType::F32, ReduceOp::Sum, tensor, op as u128));
        }
    }
    let all: Vec<u64> = (0..lengths.len() as u64).collect();
    cluster.run_until(|cluster| cluster.ended.iter().all(|ended| *ended == all)).unwrap();
    for (op, &len) in lengths.iter().enumerate().filter(|(op, _)| Some(*op as u64) != fails) {
        let contributions: Vec<_> = (0..shape.world).map(|rank| contribution(rank, op, len)).collect();
        let ranges = shares(&shape.weights, len * 4).into_iter().map(|range| (range.start / 4, range.len() / 4));
        let expected = f32s(&expected(&contributions, &ranges.collect::<Vec<_>>(), PAYLOAD / 4, DType::I32));
        for tensors in &tensors {
            assert_eq!(tensors[op], expected, "op {op}, seed {}", shape.seed);
        }
    }
    cluster
}

fn shape(seed: u64, apart: Apart) -> Shape {
    let racks = [vec![], vec![vec![0, 1]], vec![vec![1], vec![0, 2]]][seed as usize % 3].clone();
    let (weights, loss) = ([vec![1], vec![1, 2]][seed as usize % 2].clone(), [0.0, 0.05, 0.2][seed as usize / 3 % 3]);
    Shape {
        racks,
        weights,
        loss,
        seed,
        keyed: seed.is_multiple_of(5),
        apart: Some(apart),
        ..Shape::new(3, Wire::Int32)
    }
}

/// Servers that take up to 30 ms for a buffer, and hold few blocks or many: all ranks get the bits of the definition, and an operation
/// ends when all have them.
#[test]
fn done_late_and_in_any_order() {
    for seed in 0..200 {
        let apart =
            Apart { limit: [24, 40, 1000][seed as usize % 3], longest: 30 * MILLISECOND, fails: None, late: None };
        let mut cluster = sums(&shape(seed, apart), &[300, 16, 1, 700, 33], None);
        assert!(cluster.failed.iter().all(Vec::is_empty), "seed {seed}: {:?}", cluster.failed);
        // Nothing is held for longer than until all ranks have it.
        let is_free = |server: &Server| server.held().is_some_and(|(held, _)| held == 0);
        cluster.run_until(|cluster| cluster.servers.iter().flatten().all(is_free)).unwrap();
    }
}

/// The work behind one operation's buffer takes ten seconds, which blocks no other: their results are all there long before.
#[test]
fn one_late_buffer_blocks_no_other() {
    let apart = Apart { limit: 1000, longest: MILLISECOND, fails: None, late: Some((0, 1, 10 * SECOND)) };
    for seed in [0, 4, 8] {
        let mut cluster = Cluster::new(shape(seed, apart));
        let lengths = [300, 700, 33, 1000];
        let mut tensors: Vec<Vec<Vec<u8>>> = (0..3)
            .map(|rank| lengths.iter().enumerate().map(|(op, len)| f32s(&contribution(rank, op, *len))).collect())
            .collect();
        for (rank, tensors) in tensors.iter_mut().enumerate() {
            for (op, tensor) in tensors.iter_mut().enumerate() {
                cluster.submit(rank, call(DType::F32, ReduceOp::Sum, tensor, op as u128));
            }
        }
        cluster.run_until(|cluster| cluster.now > Time(9 * SECOND)).unwrap();
        let last: Vec<_> = (0..3).map(|rank| contribution(rank, 3, 1000)).collect();
        let ranges = shares(&cluster.shape.weights, 4000).into_iter().map(|range| (range.start / 4, range.len() / 4));
        let expected = f32s(&expected(&last, &ranges.collect::<Vec<_>>(), PAYLOAD / 4, DType::I32));
        for (rank, tensors) in tensors.iter().enumerate() {
            assert_eq!(tensors[3], expected, "rank {rank} has the last result before the second one, seed {seed}");
            assert_eq!(cluster.ended[rank], [0], "operations end in order, seed {seed}");
            assert!(cluster.cores[rank].lacks().iter().any(|lack| matches!(lack, Lack::Pieces { .. })));
        }
        cluster.run_until(|cluster| cluster.ended.iter().all(|ended| *ended == [0, 1, 2, 3])).unwrap();
        assert!(cluster.now >= Time(10 * SECOND));
    }
}

/// The work behind one buffer fails: every rank is told once which operation, where, why and what to do, and all others are right.
#[test]
fn one_failure_is_told_on_every_rank() {
    for seed in 0..60 {
        let apart = Apart { limit: 64, longest: 20 * MILLISECOND, fails: Some((0, 2)), late: None };
        let cluster = sums(&shape(seed, apart), &[300, 64, 200, 700, 49], Some(2));
        for failed in &cluster.failed {
            let [(2, why)] = &failed[..] else { panic!("seed {seed}: {failed:?}") };
            for part in
                ["operation 2 failed at server 0, on all ranks", "its disk is full", "issue the operation again"]
            {
                assert!(why.contains(part), "seed {seed}: {why}");
            }
        }
    }
}

/// A buffer of more blocks than the server may hold fails in the same way, in words that name the limit.
#[test]
fn a_buffer_beyond_the_limit() {
    for seed in 0..30 {
        let apart = Apart { limit: 12, longest: MILLISECOND, fails: None, late: None };
        let shape = Shape { weights: vec![1], ..shape(seed, apart) };
        let cluster = sums(&shape, &[100, 32 * 13, 32 * 12], Some(1));
        for failed in &cluster.failed {
            let [(1, why)] = &failed[..] else { panic!("seed {seed}: {failed:?}") };
            assert!(why.contains("more than 12 blocks"), "seed {seed}: {why}");
        }
    }
}

/// A server dies at any moment between acceptance, the end of its work, and the pull: what one rank has handed out, every other has.
#[test]
fn a_server_dies_before_the_pull() {
    for seed in 0..100 {
        let apart = Apart { limit: 64, longest: 3 * MILLISECOND, fails: None, late: None };
        let mut cluster = Cluster::new(Shape { weights: vec![1], ..shape(seed, apart) });
        let mut tensors: Vec<Vec<Vec<u8>>> =
            (0..3).map(|rank| (0..4).map(|op| f32s(&contribution(rank, op, 700))).collect()).collect();
        for (rank, tensors) in tensors.iter_mut().enumerate() {
            for (op, tensor) in tensors.iter_mut().enumerate() {
                cluster.submit(rank, call(DType::F32, ReduceOp::Sum, tensor, op as u128));
            }
        }
        let death = Time(Random::new(seed).below(12 * MILLISECOND));
        cluster.run_until(|cluster| cluster.now >= death).unwrap();
        cluster.servers[0] = None;
        cluster
            .run_until(|cluster| (0..3).all(|rank| cluster.cores[rank].lost_server(cluster.now) == Some(0)))
            .unwrap();
        let first = cluster.cores.iter().map(|core| core.fallback_point().0).min().unwrap();
        for (rank, ended) in cluster.ended.iter().enumerate() {
            assert!(ended.iter().all(|op| *op < first), "rank {rank} handed out {ended:?} of {first}, seed {seed}");
        }
    }
}
