//! The work behind the buffers that servers have accepted, where results come apart: it takes a while, ends in any order, and fails
//! for some.

use super::{Timer, World};
use crate::aggregation::Scenario;
use crate::random::mix;
use penstock_aggregation::Serial;

/// Work that is under way.
pub(super) struct Work {
    pub(super) job: usize,
    epoch: u16,
    first: Serial,
    outcome: Result<Vec<u8>, String>,
}

impl Scenario {
    /// Whether the work behind an operation's buffer fails.
    pub(super) fn work_fails(&self, job: usize, epoch: u16, operation: u32) -> bool {
        let draw = mix(self.seed ^ (job as u64) << 40 ^ u64::from(epoch) << 32 ^ u64::from(operation) ^ 0xfa11);
        self.held.is_some_and(|held| held.fails) && draw.is_multiple_of(4)
    }
}

impl World<'_> {
    /// Takes the buffers that are whole at a server, each of which is an operation's.
    pub(super) fn begin_work(&mut self, job: usize) {
        let Some(held) = self.scenario.held else { return };
        let server = &mut self.servers[job];
        while let Some(buffer) = server.machine.as_mut().and_then(|machine| machine.poll_work()) {
            let (operation, epoch) = (server.buffers, server.epoch);
            server.buffers += 1;
            let fails = self.scenario.work_fails(job, epoch, operation);
            let outcome = if fails { Err(format!("operation {operation}")) } else { Ok(buffer.bytes) };
            let at = self.now.plus(self.random.below(held.longest.max(1)));
            self.timers.add(at, Timer::Work(Work { job, epoch, first: buffer.first, outcome }));
        }
    }

    /// Work has ended, perhaps for an epoch that is over.
    pub(super) fn end_work(&mut self, Work { job, epoch, first, outcome }: Work) -> Result<(), String> {
        let now = self.now;
        let server = &mut self.servers[job];
        let Some(machine) = server.machine.as_mut().filter(|_| server.epoch == epoch) else { return Ok(()) };
        server.committed = now;
        if !machine.done(now, first, outcome) {
            return Err(format!("the server of job {job} knows nothing of the buffer from block {first}"));
        }
        self.drain_server(job);
        Ok(())
    }
}
