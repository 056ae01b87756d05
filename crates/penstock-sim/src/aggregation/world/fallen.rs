//! A job whose server is lost: its workers end what all of them have submitted among themselves
//! (`engine/src/aggregated/driver/fallback.rs`). The all-reduces among ranks that this takes are simulated in one go.

use super::{Rank, World};
use crate::aggregation::tensors::is_same;
use penstock_aggregation::client::fallback::{NOBODY, claims, contribute, finish};
use penstock_aggregation::client::{Core, Leftover};

impl World<'_> {
    /// A worker has noticed that the server is lost, and all others are told.
    pub(super) fn fall_back(&mut self, job: usize) -> Result<(), String> {
        let newest = self.epochs[job].last().expect("one at least").number;
        if self.ranks[job].iter().flatten().any(|rank| rank.epoch != newest) {
            // Of an epoch that has ended; in the newest one the server is looked for again.
            return Ok(());
        }
        self.note(|| format!("the server of job {job} is lost"));
        let (workers, mut ranks): (Vec<usize>, Vec<Rank>) =
            (0..self.scenario.workers).filter_map(|worker| Some((worker, self.ranks[job][worker].take()?))).unzip();
        self.unfinished[job].clear();
        let points: Vec<(u64, u64)> = ranks.iter().map(|rank| rank.core.fallback_point()).collect();
        let first = points.iter().map(|(first, _)| *first).min().expect("one worker lives") as u32;
        let given = points.iter().map(|(_, given)| *given).min().expect("one worker lives") as u32;
        for (worker, rank) in workers.iter().zip(&mut ranks) {
            if rank.ended > first {
                return Err(format!(
                    "worker {worker} of job {job} has ended operation {first}, of which others lack results"
                ));
            }
            while rank.ended < first {
                let (operation, _) = rank.core.take_first().expect("it has all results of it");
                let tensor = rank.tensors.pop_front().expect("each operation has a tensor");
                rank.ended += 1;
                if !rank.has_failed(operation as u32) {
                    self.check(job, *worker, newest, operation as u32, &tensor)?;
                }
            }
        }
        for operation in first..given {
            self.end_fallen(job, newest, operation, &workers, &mut ranks)?;
        }
        // What some worker has not submitted goes among the ranks from here on, with tensors that nobody has touched.
        let epoch = &self.epochs[job][usize::from(newest)];
        for (worker, rank) in workers.iter().zip(&ranks) {
            for (tensor, operation) in rank.tensors.iter().zip(given..) {
                if !is_same(tensor, &self.scenario.tensor(job, epoch, *worker, operation)) {
                    return Err(format!(
                        "worker {worker} of job {job}: operation {operation}, which is to begin, has changed"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Ends an operation of which each worker may have a part of the result.
    fn end_fallen(
        &mut self,
        job: usize,
        epoch: u16,
        operation: u32,
        workers: &[usize],
        ranks: &mut [Rank],
    ) -> Result<(), String> {
        let left: Vec<Leftover> = ranks.iter_mut().map(|rank| first_of(&mut rank.core)).collect();
        let claimed: Vec<Vec<i32>> =
            workers.iter().zip(&left).map(|(worker, left)| claims(*worker as u32, left)).collect();
        let owners: Vec<i32> = (0..claimed[0].len())
            .map(|piece| claimed.iter().map(|claims| claims[piece]).min().expect("ranks"))
            .collect();
        workers.iter().zip(&left).for_each(|(worker, left)| contribute(*worker as u32, left, &owners));
        let mut tensors: Vec<Vec<f32>> =
            ranks.iter_mut().map(|rank| rank.tensors.pop_front().expect("each operation has a tensor")).collect();
        let sum = tensors
            .iter()
            .cloned()
            .reduce(|sum, next| sum.into_iter().zip(next).map(|(a, b)| a + b).collect())
            .expect("one worker lives");
        let elements = self.scenario.block_elements();
        let first = self.scenario.blocks_of(operation).start;
        for ((worker, tensor), left) in workers.iter().zip(&mut tensors).zip(&left) {
            tensor.copy_from_slice(&sum);
            finish(workers.len() as u32, left, &owners);
            for ((start, len, _), owner) in left.pieces().zip(&owners) {
                let (start, len) = (start / size_of::<f32>(), len / size_of::<f32>());
                let block = first + (start / elements) as u32;
                let among_ranks;
                let expected: &[f32] = if *owner == NOBODY {
                    let epoch = &self.epochs[job][usize::from(epoch)];
                    among_ranks = self.scenario.expected_without_server(job, epoch, block);
                    &among_ranks
                } else {
                    self.expected(job, epoch, block)
                };
                let (found, expected) = (&tensor[start..start + len], &expected[start % elements..][..len]);
                if !is_same(found, expected) {
                    return Err(format!(
                        "worker {worker} of job {job}, whose server is lost, has for block {block}, of which rank {owner} had \
                         the result: {found:?} instead of {expected:?}"
                    ));
                }
                self.outcome.results += 1;
                self.outcome.fallen += 1;
            }
        }
        Ok(())
    }
}

fn first_of(core: &mut Core) -> Leftover {
    core.take_first().expect("all were given the operation").1
}
