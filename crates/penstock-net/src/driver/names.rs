//! In the name of which job this process connects with a peer.

use penstock_types::GroupId;
use std::collections::VecDeque;

/// The jobs that this process wants, or wanted, with a peer, and their secrets. It connects in the name of the first.
///
/// The peer may know only one of them yet. But with a stream up it admits no other name for this process, so two names must not be
/// under way at once: all streams change names together. Until this process has answered a CHALLENGE, no stream is up there; from then
/// on the peer knows the job, and the name stays.
#[derive(Debug, Default)]
pub(super) struct Names {
    jobs: VecDeque<(GroupId, Vec<u8>)>,
    /// How many of them the peer has turned away since the last pause.
    turned_away: usize,
    /// The peer knows the first.
    is_settled: bool,
}

/// What to do after the peer has turned a name away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// The same one again, after a pause.
    Same,
    /// Another one at once.
    Another,
    /// Another one after a pause: the peer has turned all away.
    AnotherLater,
}

impl Names {
    /// Another job is wanted with the peer. True: it is the first, in whose name to connect. Jobs whose join is over stay, so that a peer
    /// that comes late is connected and notices this process's end; but not more than [`MOST_OVER`].
    pub(super) fn add(&mut self, job: GroupId, secret: Vec<u8>, is_awaited: impl Fn(GroupId) -> bool) -> bool {
        if self.is_settled {
            return false;
        }
        // Not the first: it may be under way.
        let over: Vec<usize> = (1..self.jobs.len()).filter(|at| !is_awaited(self.jobs[*at].0)).collect();
        if over.len() >= MOST_OVER {
            self.jobs.remove(over[over.len() - 1]);
        }
        // It is the next one.
        self.jobs.insert(self.jobs.len().min(1), (job, secret));
        self.jobs.len() == 1
    }

    /// The job, and its secret.
    pub(super) fn current(&self) -> &(GroupId, Vec<u8>) {
        self.jobs.front().expect("connecting for a job")
    }

    /// Whether a join of one of the jobs goes on.
    pub(super) fn are_awaited(&self, is_awaited: impl Fn(GroupId) -> bool) -> bool {
        self.jobs.iter().any(|(job, _)| is_awaited(*job))
    }

    /// A CHALLENGE of the peer's was answered.
    pub(super) fn settle(&mut self) {
        self.is_settled = true;
        self.jobs.truncate(1);
    }

    /// The peer has not set up the job yet.
    pub(super) fn turn_away(&mut self) -> Next {
        if self.is_settled || self.jobs.len() < 2 {
            return Next::Same;
        }
        self.jobs.rotate_left(1);
        self.turned_away += 1;
        if self.turned_away < self.jobs.len() {
            return Next::Another;
        }
        self.turned_away = 0;
        Next::AnotherLater
    }
}

/// Of jobs whose join is over, kept for a peer that comes late.
const MOST_OVER: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    /// All names have their turn before a pause; one that is known stays.
    #[test]
    fn names_take_turns() {
        let mut names = Names::default();
        assert!(names.add(GroupId(1), b"a".to_vec(), |_| true));
        assert_eq!(names.turn_away(), Next::Same);
        for job in [3, 2] {
            assert!(!names.add(GroupId(job), Vec::new(), |_| true));
        }
        let mut turn = || (names.turn_away(), names.current().0.0);
        let round = [(Next::Another, 2), (Next::Another, 3), (Next::AnotherLater, 1)];
        assert_eq!([turn(), turn(), turn()], round);
        assert_eq!([turn(), turn()], round[..2]);
        // One that is new is the next, and those that had their turn wait for the next round.
        names.add(GroupId(4), Vec::new(), |_| true);
        let mut turn = || (names.turn_away(), names.current().0.0);
        assert_eq!([turn(), turn()], [(Next::Another, 4), (Next::AnotherLater, 1)]);
        names.settle();
        assert!(!names.add(GroupId(5), Vec::new(), |_| true));
        assert_eq!((names.turn_away(), names.current()), (Next::Same, &(GroupId(1), b"a".to_vec())));
    }

    /// Of many jobs whose joins are over the last ones stay, with the first, which is under way, and all that are awaited.
    #[test]
    fn few_joins_that_are_over_stay() {
        let mut names = Names::default();
        for job in 0..100 {
            names.add(GroupId(job), Vec::new(), |job| job.0 % 50 == 7);
        }
        let kept: Vec<u64> = names.jobs.iter().map(|(job, _)| job.0).collect();
        assert_eq!(kept, [0, 99, 98, 97, 96, 57, 7]);
        assert!(names.are_awaited(|job| job == GroupId(57)) && !names.are_awaited(|job| job == GroupId(8)));
    }
}
