//! Single gradients of a step, for callers that do not wait for all of it ([`Reducer::averaged`]).

use super::{Inner, Reducer, State};
use crate::Ticket;
use penstock_types::{Failure, Priority};

/// Who waits for gradients of the step that was flushed.
#[derive(Debug)]
pub(super) struct Awaited {
    /// Indices, and the ticket that completes when these gradients are reduced.
    waiting: Vec<(Vec<u32>, Ticket)>,
    /// How the last step ended.
    last: Result<(), Failure>,
}

impl Default for Awaited {
    fn default() -> Awaited {
        Awaited { waiting: Vec::new(), last: Ok(()) }
    }
}

impl Awaited {
    /// The step has ended like this. Returns the tickets of everyone who still waits for a part of it.
    pub(super) fn end(&mut self, result: &Result<(), Failure>) -> Vec<Ticket> {
        self.last = result.clone();
        self.waiting.drain(..).map(|(_, ticket)| ticket).collect()
    }
}

impl Reducer {
    /// The ticket completes when these gradients of the step that was flushed are reduced and given back, and every rank has
    /// flushed the step: from then on no rank can drop it ([`Reducer::withdraw`]). It fails as the flush does if that fails
    /// before. A flush that has failed has given back all gradients, so wait for that before you touch them. Does not block.
    #[must_use]
    pub fn averaged(&self, indices: &[u32]) -> Ticket {
        let mut state = self.lock();
        if state.flushed.is_none() {
            return Ticket::ready(state.awaited.last.clone());
        }
        let ticket = Ticket::default();
        if indices.iter().all(|index| state.is_averaged(*index)) {
            drop(state);
            ticket.complete(Ok(()));
        } else {
            state.awaited.waiting.push((indices.to_vec(), ticket.clone()));
        }
        ticket
    }

    /// Those of these gradients for which [`Reducer::averaged`] would not wait now.
    #[must_use]
    pub fn which_averaged(&self, indices: &[u32]) -> Vec<u32> {
        let state = self.lock();
        let has_ended = state.flushed.is_none();
        let is_averaged = |index: &u32| if has_ended { state.awaited.last.is_ok() } else { state.is_averaged(*index) };
        indices.iter().copied().filter(is_averaged).collect()
    }

    /// Completes the tickets of those who wait for what is reduced now.
    pub(super) fn tell_awaiting(&self) {
        let mut state = self.lock();
        if state.awaited.waiting.is_empty() {
            return;
        }
        let waiting = std::mem::take(&mut state.awaited.waiting);
        let is_there = |(indices, _): &(Vec<u32>, Ticket)| indices.iter().all(|index| state.is_averaged(*index));
        let (there, waiting): (Vec<_>, Vec<_>) = waiting.into_iter().partition(is_there);
        state.awaited.waiting = waiting;
        drop(state);
        there.into_iter().for_each(|(_, ticket)| ticket.complete(Ok(())));
    }
}

impl State {
    /// Whether a gradient of the flushed step is reduced, and no rank can drop the step any more.
    fn is_averaged(&self, index: u32) -> bool {
        let is_whole = self.readiness.is_idle() && self.failed.is_none() && self.dropped.is_none() && !self.withdrawn;
        is_whole && self.submitted.get(index as usize).is_some_and(Option::is_none)
    }
}

impl Inner {
    /// How urgent rounds are. With [`super::ReducerSpec::last_first`] they are more urgent than what has no priority: a step begins
    /// to end with its last round. While a process has such operations, little waits in its streams (`Peer::hurry`), so that
    /// the order of buckets holds also for what leaves next.
    pub(super) fn priority_of_rounds(&self) -> Priority {
        Priority(-i32::from(self.last_first))
    }

    /// How urgent a bucket is whose last gradient has this index. With [`super::ReducerSpec::last_first`] it is the less urgent the
    /// longer the next forward pass does without it; all are less urgent than what has no priority.
    pub(super) fn priority(&self, last: u32) -> Priority {
        if !self.last_first {
            return Priority(0);
        }
        place(last, self.gradients.len())
    }
}

/// The priority of a gradient of so many, by its index.
fn place(index: u32, count: usize) -> Priority {
    let later = count as u64 - 1 - u64::from(index);
    Priority(1 + (later * PLACES / count as u64) as i32)
}

/// Priorities of buckets: as many as `penstock.priority` has numbers above the usual one.
const PLACES: u64 = 127;

#[cfg(test)]
mod tests {
    use super::*;

    /// The last gradient is the most urgent, and less urgent than rounds; the first is the least; none is outside of what users
    /// can name.
    #[test]
    fn the_last_gradient_leaves_first() {
        for count in [1, 2, 7, 127, 128, 500, 100_000] {
            let all: Vec<i32> = (0..count as u32).map(|index| place(index, count).0).collect();
            assert_eq!(all[count - 1], 1);
            assert!(all[0] <= 127 && all.windows(2).all(|pair| pair[0] >= pair[1]), "{count}");
            assert!(count > 127 || all.windows(2).all(|pair| pair[0] > pair[1]), "{count}");
        }
    }
}
