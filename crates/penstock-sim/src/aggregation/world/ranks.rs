//! What a rank's thread does for its core (`engine/src/aggregated/driver.rs` with sockets), and a caller with tensors.

use super::{Timer, World};
use crate::aggregation::LIMIT;
use crate::aggregation::tensors::is_same;
use penstock_aggregation::Endpoint;
use penstock_aggregation::client::{AllReduce, Core, CoreConfig, Leftover, PARENT, SERVER, Wire};
use penstock_types::{DType, ReduceOp, Time};
use std::collections::{HashSet, VecDeque};
use std::slice;

/// A worker of a job, in one epoch.
pub(in crate::aggregation) struct Rank {
    pub(in crate::aggregation) core: Core,
    pub(super) epoch: u16,
    /// The aggregator above it, if there is one.
    parent: Option<Endpoint>,
    /// No operation is submitted before this time.
    pub(in crate::aggregation) begins: Time,
    /// How many operations have ended.
    pub(super) ended: u32,
    /// The tensors of those that were submitted and have not ended. The core reads and writes them.
    pub(super) tensors: VecDeque<Vec<f32>>,
    /// Operations that have failed.
    failed: HashSet<u32>,
    /// Where the core writes a packet's block.
    payload: Vec<u8>,
}

impl Rank {
    /// Whether the server's work behind an operation has failed.
    pub(super) fn has_failed(&self, operation: u32) -> bool {
        self.failed.contains(&operation)
    }
}

impl World<'_> {
    /// A worker begins the newest epoch of its job.
    pub(super) fn open_rank(&mut self, job: usize, worker: usize) {
        let epoch = self.epochs[job].last().expect("one at least");
        let begins = self.now.plus(self.random.below(3) * self.random.below(2 * penstock_types::MILLISECOND));
        let config = CoreConfig {
            world: epoch.alive.iter().filter(|alive| **alive).count() as u32,
            wire: if self.scenario.floats { Wire::Float } else { Wire::Int32 },
            payload_bytes: self.scenario.payload_bytes,
        };
        self.ranks[job][worker] = Some(Rank {
            core: Core::new(self.now, config, vec![self.scenario.worker(job, worker, epoch)]),
            epoch: epoch.number,
            parent: epoch.places[worker].0,
            begins,
            ended: 0,
            tensors: VecDeque::new(),
            failed: HashSet::new(),
            payload: vec![0; self.scenario.payload_bytes],
        });
        self.judge(job, worker);
        self.timers.add(begins, Timer::Wake { node: self.scenario.worker_endpoint(job, worker) });
    }

    /// A worker that dies, or moves to another epoch: what servers gave it until now was right.
    pub(super) fn dismiss(&mut self, job: usize, worker: usize) -> Result<(), String> {
        let Some(mut rank) = self.ranks[job][worker].take() else { return Ok(()) };
        for tensor in &rank.tensors {
            let (operation, left) = rank.core.take_first().expect("each tensor belongs to an operation");
            self.check_pieces(job, worker, rank.epoch, operation as u32, &left, tensor)?;
        }
        self.judge(job, worker);
        Ok(())
    }

    pub(super) fn arrive_at_rank(
        &mut self,
        job: usize,
        worker: usize,
        from: Endpoint,
        bytes: &[u8],
    ) -> Result<(), String> {
        let Some(rank) = &mut self.ranks[job][worker] else { return Ok(()) };
        let endpoint = match from {
            from if from == self.scenario.server_endpoint(job) => SERVER,
            from if Some(from) == rank.parent => PARENT,
            // Of an epoch in which it had another place.
            _ => return Ok(()),
        };
        match rank.core.handle_packet(self.now, 0, endpoint, bytes) {
            Ok(_) => self.drain_rank(job, worker),
            Err(trouble) => Err(format!("worker {worker} of job {job}: {trouble:?}")),
        }
    }

    pub(super) fn wake_rank(&mut self, job: usize, worker: usize) -> Result<(), String> {
        let Some(rank) = &mut self.ranks[job][worker] else { return Ok(()) };
        rank.core.handle_timeout(self.now);
        if rank.core.lost_server(self.now).is_some() { self.fall_back(job) } else { Ok(()) }
    }

    /// Takes what has ended, submits what is next, and sends what there is room for.
    pub(super) fn drain_rank(&mut self, job: usize, worker: usize) -> Result<(), String> {
        let Some(rank) = &mut self.ranks[job][worker] else { return Ok(()) };
        let epoch = rank.epoch;
        let mut ended = Vec::new();
        while let Some((operation, why)) = rank.core.poll_failed() {
            let operation = operation as u32;
            if !self.scenario.work_fails(job, epoch, operation) || !why.contains(&format!("operation {operation}")) {
                return Err(format!("worker {worker} of job {job}: {why}"));
            }
            rank.failed.insert(operation);
            self.outcome.failed += 1;
        }
        while let Some(operation) = rank.core.poll_done() {
            rank.ended += 1;
            rank.begins = self.now.plus(self.scenario.pause);
            let tensor = rank.tensors.pop_front().expect("operations end in order");
            if rank.has_failed(operation as u32) {
                // Nothing is to be checked of it.
            } else if self.scenario.work_fails(job, epoch, operation as u32) {
                return Err(format!("worker {worker} of job {job} was not told that operation {operation} failed"));
            } else {
                ended.push((operation as u32, tensor));
            }
        }
        let submitted = |rank: &Rank| rank.ended + rank.tensors.len() as u32;
        while self.now >= rank.begins
            && submitted(rank) < self.scenario.operations()
            && rank.tensors.len() < self.scenario.queued as usize
        {
            let operation = submitted(rank);
            let epoch = &self.epochs[job][usize::from(epoch)];
            let mut tensor = self.scenario.tensor(job, epoch, worker, operation);
            let all_reduce = AllReduce {
                dtype: DType::F32,
                op: ReduceOp::Sum,
                address: tensor.as_mut_ptr().cast(),
                bytes: size_of_val(&tensor[..]),
                fingerprint: u128::from(operation),
                ready: true,
                started: self.now,
                // Later than a run is given up for stuck: the machine leaves it to its driver to end what is late.
                timeout: 4 * LIMIT,
            };
            // SAFETY: `tensors` keeps it, and nobody looks at it before the core has given the operation back.
            unsafe { rank.core.submit(all_reduce, slice::from_ref(&(0..all_reduce.bytes))) };
            rank.tensors.push_back(tensor);
        }
        for (operation, tensor) in ended {
            self.check(job, worker, epoch, operation, &tensor)?;
        }
        let node = self.scenario.worker_endpoint(job, worker);
        while self.has_room(node)
            && let Some((to, bytes)) = self.next_of(job, worker)
        {
            self.send(to, node, bytes);
        }
        if let Some(rank) = &self.ranks[job][worker] {
            let at = rank.core.poll_timeout();
            self.wake(node, if rank.begins > self.now { at.min(rank.begins) } else { at });
        }
        self.judge(job, worker);
        Ok(())
    }

    /// The packet that a worker sends next.
    fn next_of(&mut self, job: usize, worker: usize) -> Option<(Endpoint, Vec<u8>)> {
        let rank = self.ranks[job][worker].as_mut()?;
        let packet = rank.core.poll_transmit(self.now, 0, &mut rank.payload)?;
        let to = rank.parent.filter(|_| packet.to == PARENT).unwrap_or_else(|| self.scenario.server_endpoint(job));
        Some((to, [&packet.header[..], &rank.payload[..packet.payload_bytes]].concat()))
    }

    /// Notes whether a worker lives and has operations that have not ended.
    pub(super) fn judge(&mut self, job: usize, worker: usize) {
        let newest = self.epochs[job].last().expect("one at least");
        let is_unfinished = self.ranks[job][worker]
            .as_ref()
            .is_some_and(|rank| rank.epoch != newest.number || rank.ended < self.scenario.operations());
        if is_unfinished {
            self.unfinished[job].insert(worker);
        } else {
            self.unfinished[job].remove(&worker);
        }
    }

    /// Compares an operation's result, bit by bit.
    pub(super) fn check(
        &mut self,
        job: usize,
        worker: usize,
        epoch: u16,
        operation: u32,
        tensor: &[f32],
    ) -> Result<(), String> {
        let blocks = self.scenario.blocks_of(operation);
        for (block, found) in blocks.clone().zip(tensor.chunks(self.scenario.block_elements())) {
            let expected = self.expected(job, epoch, block);
            if !is_same(found, expected) {
                return Err(format!(
                    "worker {worker} of job {job} got for block {block} of epoch {epoch}: {found:?} instead of {expected:?}"
                ));
            }
        }
        self.outcome.results += u64::from(blocks.end - blocks.start);
        Ok(())
    }

    /// Compares the pieces of an operation's result that have come, bit by bit.
    fn check_pieces(
        &mut self,
        job: usize,
        worker: usize,
        epoch: u16,
        operation: u32,
        left: &Leftover,
        tensor: &[f32],
    ) -> Result<(), String> {
        let (first, elements) = (self.scenario.blocks_of(operation).start, self.scenario.block_elements());
        for (start, len, _) in left.pieces().filter(|(.., is_here)| *is_here) {
            let (start, len) = (start / size_of::<f32>(), len / size_of::<f32>());
            let block = first + (start / elements) as u32;
            let (found, expected) = (&tensor[start..start + len], self.expected(job, epoch, block));
            if !is_same(found, &expected[start % elements..][..len]) {
                return Err(format!(
                    "worker {worker} of job {job} got for a part of block {block} of epoch {epoch}: {found:?}, but the block is \
                     {expected:?}"
                ));
            }
            self.outcome.results += 1;
        }
        Ok(())
    }

    /// What a server returns for a block.
    pub(super) fn expected(&mut self, job: usize, epoch: u16, block: u32) -> &[f32] {
        let (scenario, epochs) = (self.scenario, &self.epochs[job]);
        self.expected
            .entry((job, epoch, block))
            .or_insert_with(|| scenario.expected(job, &epochs[usize::from(epoch)], block))
    }
}
