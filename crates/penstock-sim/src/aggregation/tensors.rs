//! The tensors of a scenario's workers, and what their sums must be: computed from the tensors and the tree alone, by the
//! definitions of `docs/design/quantisation.md` and rule R19, and not by what is under test.

use super::Scenario;
use super::cluster::Epoch;
use crate::random::{Random, mix};
use penstock_aggregation::{Node, Tree};
use std::ops::Range;

/// Blocks are numbered through all operations of an epoch.
impl Scenario {
    /// Operations in an epoch.
    pub(super) fn operations(&self) -> u32 {
        if self.operation == 0 { 1 } else { self.blocks.div_ceil(self.operation) }
    }

    /// The blocks of an operation.
    pub(super) fn blocks_of(&self, operation: u32) -> Range<u32> {
        if self.operation == 0 {
            return 0..self.blocks;
        }
        operation * self.operation..self.blocks.min((operation + 1) * self.operation)
    }

    /// A worker's tensor in an operation.
    pub(super) fn tensor(&self, job: usize, epoch: &Epoch, worker: usize, operation: u32) -> Vec<f32> {
        self.blocks_of(operation).flat_map(|block| self.block(job, epoch, worker, block)).collect()
    }

    /// Elements of a full block.
    pub(super) fn block_elements(&self) -> usize {
        self.payload_bytes / size_of::<f32>()
    }

    /// A worker's block: full, but for the last one of an operation. A block in eight is zeros, the others' sizes differ.
    pub(super) fn block(&self, job: usize, epoch: &Epoch, worker: usize, block: u32) -> Vec<f32> {
        let place = mix(self.seed ^ (job as u64) << 40 ^ u64::from(block));
        let is_last = block + 1 == self.blocks || (block + 1).checked_rem(self.operation) == Some(0);
        let all = self.block_elements();
        let elements = if is_last { all - (place >> 32) as usize % all } else { all };
        let mut random = Random::new(
            mix(self.seed ^ (job as u64) << 48 ^ u64::from(epoch.number) << 32 ^ (worker as u64) << 24)
                ^ u64::from(block),
        );
        let size = random.below(8) as i32;
        let mut values: Vec<f32> = (0..elements)
            .map(|_| {
                let bits = random.word();
                // Of very different size, so that the order of additions shows.
                let size = 2f32.powi((bits >> 32 & 31) as i32 + 8 * size - 48);
                size * (bits as u32 as f32 - 2e9)
            })
            .collect();
        if size == 0 {
            values.fill(0.0);
        }
        if !self.finite && place.is_multiple_of(16) && (place >> 8) % self.workers as u64 == worker as u64 {
            values[(place >> 16) as usize % elements] =
                [f32::INFINITY, f32::NEG_INFINITY, f32::NAN][(place >> 4) as usize % 3];
        }
        values
    }

    /// What a server returns for a block.
    pub(super) fn expected(&self, job: usize, epoch: &Epoch, block: u32) -> Vec<f32> {
        let blocks = self.contributions(job, epoch, block);
        let is_finite = blocks.iter().flatten().all(|value| value.is_finite());
        if is_finite && !self.floats {
            sum_of_integers(&blocks, &epoch.tree)
        } else {
            sum_of_floats(&blocks, &epoch.tree)
        }
    }

    /// What the workers make of a block whose result none of them has, once the server is lost: they add it as floats, in their
    /// order.
    pub(super) fn expected_without_server(&self, job: usize, epoch: &Epoch, block: u32) -> Vec<f32> {
        let blocks = self.contributions(job, epoch, block);
        let workers = Tree { children: workers_of(&epoch.tree).map(|worker| Node::Worker(worker as u16)).collect() };
        sum_of_floats(&blocks, &workers)
    }

    /// The block of every worker of the tree; those of others are empty.
    fn contributions(&self, job: usize, epoch: &Epoch, block: u32) -> Vec<Vec<f32>> {
        let mut blocks = vec![Vec::new(); self.workers];
        workers_of(&epoch.tree).for_each(|worker| blocks[worker] = self.block(job, epoch, worker, block));
        blocks
    }
}

/// The workers of a tree, in the order of their numbers.
fn workers_of(tree: &Tree) -> impl Iterator<Item = usize> + use<> {
    let mut workers = tree.workers();
    workers.sort_unstable();
    workers.into_iter().map(usize::from)
}

/// Integers of 32 bits under the least exponent that has room for all workers' elements. In f64 the product of a count and a
/// unit is exact: a count is below 2^31.
fn sum_of_integers(blocks: &[Vec<f32>], tree: &Tree) -> Vec<f32> {
    let blocks: Vec<&Vec<f32>> = workers_of(tree).map(|worker| &blocks[worker]).collect();
    let largest = blocks.iter().copied().flatten().fold(0f64, |most, value| most.max(f64::from(value.abs())));
    if largest == 0.0 {
        return vec![0.0; blocks[0].len()];
    }
    let exponent = (-148..128).find(|exponent| 2f64.powi(*exponent) > largest).unwrap_or(128);
    let worst = |bits: i32| (1i64 << bits) - if bits < 24 { 0 } else { 1 << (bits - 24) };
    let fits = |bits: &i32| worst(*bits) * blocks.len() as i64 <= i64::from(i32::MAX);
    let unit = 2f64.powi(exponent - (0..=31).rev().find(fits).expect("4096 workers have 18 bits"));
    (0..blocks[0].len())
        .map(|i| {
            let counts = blocks.iter().map(|block| (f64::from(block[i]) / unit).round_ties_even() as i64);
            (counts.sum::<i64>() as f64 * unit) as f32
        })
        .collect()
}

/// Floats in the order of the tree, within each aggregator first.
fn sum_of_floats(blocks: &[Vec<f32>], tree: &Tree) -> Vec<f32> {
    fn fold(children: &[Node], blocks: &[Vec<f32>]) -> Vec<f32> {
        let each = children.iter().map(|node| match node {
            Node::Worker(worker) => blocks[usize::from(*worker)].clone(),
            Node::Aggregator { children, .. } => fold(children, blocks),
        });
        each.reduce(|sum, next| sum.into_iter().zip(next).map(|(a, b)| a + b).collect()).expect("a node has children")
    }
    fold(&tree.children, blocks)
}

/// Whether two blocks have the same bits. All NaNs are one: which one a sum has is the processor's affair.
pub(super) fn is_same(found: &[f32], expected: &[f32]) -> bool {
    found.len() == expected.len()
        && found.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()))
}
