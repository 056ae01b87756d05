//! In the name of which job this process connects with a peer.

use penstock_types::GroupId;
use std::collections::VecDeque;

/// The jobs that this process wants with a peer, with their secrets. It connects in the name of the first.
///
/// The peer may know only one of them yet. But with a stream up it admits no other name for this process, so two names must not be
/// under way at once: all streams change names together. Until this process has answered a CHALLENGE, no stream is up there; from then
/// on the peer knows the job, and the name stays.
#[derive(Debug, Default)]
pub(super) struct Names {
    wanted: VecDeque<(GroupId, Vec<u8>)>,
    /// How many of them, one after the other, the peer has turned away.
    turned_away: usize,
    /// The peer knows the first.
    is_known: bool,
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
    /// Another job is wanted with the peer. True: it is the first, in whose name to connect.
    pub(super) fn add(&mut self, job: GroupId, secret: Vec<u8>) -> bool {
        if self.is_known {
            return false;
        }
        self.wanted.push_back((job, secret));
        self.wanted.len() == 1
    }

    /// The job, and its secret.
    pub(super) fn current(&self) -> &(GroupId, Vec<u8>) {
        self.wanted.front().expect("connecting for a job")
    }

    /// Whether a join of one of the jobs goes on.
    pub(super) fn are_awaited(&self, is_awaited: impl Fn(GroupId) -> bool) -> bool {
        self.wanted.iter().any(|(job, _)| is_awaited(*job))
    }

    /// A CHALLENGE of the peer's was answered.
    pub(super) fn are_known(&mut self) {
        self.is_known = true;
        self.wanted.truncate(1);
    }

    /// The peer has not set up the job yet. Jobs that are not awaited any more are forgotten, but for the last: a peer that comes late
    /// learns from it that it is over.
    pub(super) fn turned_away(&mut self, is_awaited: impl Fn(GroupId) -> bool) -> Next {
        let names = self.wanted.len();
        if self.is_known || names < 2 {
            return Next::Same;
        }
        self.wanted.rotate_left(1);
        if self.are_awaited(&is_awaited) {
            self.wanted.retain(|(job, _)| is_awaited(*job));
        }
        self.turned_away = (self.turned_away + 1) % names;
        if self.turned_away == 0 { Next::AnotherLater } else { Next::Another }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All names have their turn before a pause; those that nobody waits for go, but for the last; one that is known stays.
    #[test]
    fn names_take_turns() {
        let mut names = Names::default();
        assert!(names.add(GroupId(1), b"a".to_vec()));
        assert_eq!(names.turned_away(|_| true), Next::Same);
        assert!(!names.add(GroupId(2), b"b".to_vec()) && !names.add(GroupId(3), b"c".to_vec()));
        let mut turns = Vec::new();
        for _ in 0..6 {
            let next = names.turned_away(|_| true);
            turns.push((names.current().0.0, next));
        }
        let round = [(2, Next::Another), (3, Next::Another), (1, Next::AnotherLater)];
        assert_eq!(turns, [round, round].concat());
        assert_eq!(names.turned_away(|job| job != GroupId(2)), Next::Another);
        assert_eq!(names.current().0, GroupId(3));
        assert!(names.are_awaited(|job| job == GroupId(1)) && !names.are_awaited(|job| job == GroupId(2)));
        // Nobody waits any more: both stay, and take turns.
        names.turned_away(|_| false);
        assert_eq!(names.current(), &(GroupId(1), b"a".to_vec()));
        names.are_known();
        assert!(!names.add(GroupId(4), Vec::new()));
        assert_eq!((names.turned_away(|_| true), names.current().0), (Next::Same, GroupId(1)));
    }
}
