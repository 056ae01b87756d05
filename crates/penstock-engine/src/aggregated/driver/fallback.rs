//! When a server has died: all ranks end what was running, and go on among themselves.

use super::{Driver, Running, not_ready};
use crate::Ticket;
use crate::runtime::Call;
use penstock_aggregation::client::AllReduce;
use penstock_aggregation::client::fallback::{claims, contribute, finish};
use penstock_plan::Collective;
use penstock_stream::fingerprint::{Fingerprint, Name};
use penstock_types::{DType, Failure, FailureKind, Priority, ReduceOp, SECOND, Time};
use std::any::Any;
use std::time::Duration;

impl Driver {
    /// Ends all running operations together with the other ranks. Returns false if that failed.
    pub(super) fn fall_back(&mut self, reason: &str) -> bool {
        let (rank, name) = (self.spec.rank, self.spec.name.clone());
        log::warn!(
            "penstock: group {name}: rank {rank} goes on without servers, since {reason}: all-reduces go among the ranks from \
             here on. Sums agree within the bound of docs/design/quantisation.md, not bit by bit."
        );
        self.publish();
        self.shared.stats().fallback = Some(reason.to_owned());
        for running in &self.running {
            self.recorder.waits_for(running.recorded, "the ranks, which go on without servers".to_owned());
        }
        let (first, given) = self.core.fallback_point();
        let mut point = [first as i64, given as i64];
        let outcome = self.all_reduce(ReduceOp::Min, DType::I64, as_bytes(&mut point), AGREE_WITHIN);
        if let Err(failure) = outcome {
            return self.give_up(failure);
        }
        self.sockets.clear();
        let [first, given] = point.map(|number| number as u64);
        while self.first < given {
            if self.first < first {
                self.core.take_first();
                self.end_fallen();
                continue;
            }
            while !self.running[0].all_reduce.ready {
                self.await_command();
                if self.troubles.failed.is_some() {
                    self.forward();
                    return false;
                }
            }
            if let Err(failure) = self.finish_first() {
                return self.give_up(failure);
            }
        }
        // Operations that some rank was not given are unreduced here, but may be premultiplied.
        while let Some((number, left)) = self.core.take_first() {
            let running = &mut self.running[(number - self.first) as usize];
            if left.begun() && matches!(left.all_reduce().op, ReduceOp::PremulSum(_)) {
                running.all_reduce.op = ReduceOp::Sum;
            }
        }
        true
    }

    /// Ends the first operation, of which some ranks have a part of the result.
    fn finish_first(&mut self) -> Result<(), Failure> {
        let (_, left) = self.core.take_first().expect("it has been given");
        let AllReduce { dtype, address, bytes, timeout, .. } = *left.all_reduce();
        let mut owners = claims(self.spec.rank, &left);
        self.all_reduce(ReduceOp::Min, DType::I32, as_bytes(&mut owners), timeout)?;
        contribute(self.spec.rank, &left, &owners);
        // SAFETY: the tensor is the operation's, which `running` keeps alive.
        let tensor = unsafe { std::slice::from_raw_parts_mut(address, bytes) };
        self.all_reduce(ReduceOp::Sum, dtype, tensor, timeout)?;
        finish(self.spec.world, &left, &owners);
        self.end_fallen();
        Ok(())
    }

    fn end_fallen(&mut self) {
        let running = self.pop();
        self.shared.stats().fallback_operations += 1;
        running.ticket.complete(Ok(()));
    }

    fn give_up(&mut self, failure: Failure) -> bool {
        let message = format!("a server was lost, and going on without it failed: {}", failure.message);
        self.channels.group.end(Failure { message, ..failure });
        self.wait_for_failure();
        self.forward();
        false
    }

    /// One all-reduce among the ranks, on the fallback channel. Blocks.
    fn all_reduce(&self, op: ReduceOp, dtype: DType, bytes: &mut [u8], timeout: u64) -> Result<(), Failure> {
        let all_reduce = AllReduce {
            dtype,
            op,
            address: bytes.as_mut_ptr(),
            bytes: bytes.len(),
            fingerprint: 0,
            ready: true,
            started: Time(0),
            timeout,
        };
        let ticket = Ticket::default();
        // SAFETY: `bytes` is borrowed until the ticket completes. That is at the latest when the fallback channel fails, which
        // it does together with the client's own (`listen`).
        unsafe { self.channels.fallback.start_as(plain(&all_reduce, None), &ticket) };
        ticket.wait(None).expect("without a time-out it waits for the end")
    }

    /// From here on operations are only passed on to the fallback channel, in their order.
    pub(super) fn forward(&mut self) {
        loop {
            while self.running.front().is_some_and(|running| running.all_reduce.ready) {
                let Running { ticket, mut all_reduce, priority, keep, .. } = self.pop();
                if let ReduceOp::PremulSum(factor) = all_reduce.op {
                    // Ranks may differ in whether they had premultiplied before the server died.
                    // SAFETY: the tensor is the operation's.
                    unsafe {
                        penstock_kernels::premultiply(
                            all_reduce.dtype,
                            all_reduce.address,
                            all_reduce.address,
                            all_reduce.bytes,
                            factor,
                        )
                    };
                    all_reduce.op = ReduceOp::Sum;
                }
                self.shared.stats().fallback_operations += 1;
                // SAFETY: `keep` is what the tensor lives by.
                unsafe { self.channels.fallback.start_as(plain(&all_reduce, keep), &ticket) };
                // It may have been changed on some ranks, so they do not compare it.
                if priority != Priority::USUAL {
                    self.channels.fallback.reprioritise(&ticket, priority);
                }
            }
            if self.stopped {
                return;
            }
            self.await_command();
        }
    }

    /// Waits for a command and carries it out. Fails the channel if the first operation's tensor is not ready in time.
    fn await_command(&mut self) {
        let first = self.running.front().map(|running| &running.all_reduce).filter(|first| !first.ready);
        let timeout = first.map(|first| (first.started.0.saturating_add(first.timeout), first.timeout));
        let left = timeout.map(|(until, _)| Duration::from_nanos(until.saturating_sub(self.now().0)));
        self.sleep(true, left);
        self.take_commands();
        if let Some((until, timeout)) = timeout
            && self.running.front().is_some_and(|first| !first.all_reduce.ready)
            && self.now().0 >= until
        {
            let message = not_ready(timeout as f64 / SECOND as f64);
            self.channels.group.end(Failure::fatal(FailureKind::Timeout, message));
            self.wait_for_failure();
        }
    }
}

/// An all-reduce among the ranks.
fn plain(all_reduce: &AllReduce, keep: Option<Box<dyn Any + Send>>) -> Call {
    let elements = (all_reduce.bytes / all_reduce.dtype.size()) as u64;
    Call {
        collective: Collective::AllReduce,
        fingerprint: Fingerprint::new(Name::AllReduce, Some(all_reduce.op), all_reduce.dtype, None, elements),
        dtype: all_reduce.dtype,
        op: all_reduce.op,
        bytes: all_reduce.bytes as u64,
        splits: None,
        input: std::ptr::null(),
        output: all_reduce.address,
        tag: 0,
        coflow: 0,
        priority: Priority::USUAL,
        hold: false,
        timeout: all_reduce.timeout,
        keep,
    }
}

fn as_bytes<T: Copy>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: callers pass integers, for which all bytes are valid.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// How long ranks may take to meet after an alarm: longer than each one takes to notice by itself that the server is lost.
const AGREE_WITHIN: u64 = 30 * SECOND;
