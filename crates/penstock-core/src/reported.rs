//! What peers have reported about groups that this process has not joined yet.

use penstock_types::{Failure, GroupId, PeerId};
use std::collections::VecDeque;

/// Reports about groups that this process does not know, oldest first.
///
/// Most of these groups are joined soon after. Others never are, so the oldest report is dropped when there are too many; a
/// later join of its group would then wait for its time-out. A peer's reports are kept when it ends: a rank that fails a group
/// often ends with it, and its report gives the reason to a rank that comes later.
#[derive(Debug, Default)]
pub struct Reported {
    failures: VecDeque<(GroupId, Failure)>,
}

impl Reported {
    /// Keeps the first report about a group.
    pub fn remember(&mut self, group: GroupId, failure: Failure) {
        if self.failures.iter().any(|(known, _)| *known == group) {
            return;
        }
        if self.failures.len() == MAX_REPORTED {
            self.failures.pop_front();
        }
        self.failures.push_back((group, failure));
    }

    /// The process joins the group. Returns why the group has failed already.
    pub fn take(&mut self, group: GroupId) -> Option<Failure> {
        let at = self.failures.iter().position(|(known, _)| *known == group)?;
        self.failures.remove(at).map(|(_, failure)| failure)
    }
}

/// Pairs of a peer and a group that the peer has left or failed before this process joined it, oldest first. Frames that come
/// later were overtaken on another stream, and are dropped. Streams differ by a limited time, so the oldest pairs are dropped
/// when there are too many: a message that comes even later would be kept until its peer ends.
#[derive(Debug, Default)]
pub struct Overtaken(VecDeque<(PeerId, GroupId)>);

impl Overtaken {
    /// A peer has done with a group.
    pub fn remember(&mut self, peer: PeerId, group: GroupId) {
        if self.contains(peer, group) {
            return;
        }
        if self.0.len() == MAX_REPORTED {
            self.0.pop_front();
        }
        self.0.push_back((peer, group));
    }

    /// Whether a peer is known to have done with a group.
    #[must_use]
    pub fn contains(&self, peer: PeerId, group: GroupId) -> bool {
        self.0.contains(&(peer, group))
    }

    /// The process joins the group.
    pub fn forget_group(&mut self, group: GroupId) {
        self.0.retain(|(_, known)| *known != group);
    }

    /// The peer is gone.
    pub fn forget_peer(&mut self, peer: PeerId) {
        self.0.retain(|(known, _)| *known != peer);
    }
}

/// A guess: a process is seldom late by more than a few groups. With reports of full length (4 KiB) it is 4 MiB.
const MAX_REPORTED: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_types::FailureKind;

    fn failure(text: String) -> Failure {
        Failure::fatal(FailureKind::Closed, text)
    }

    /// Of a group's reports the first counts, and it is told once.
    #[test]
    fn the_first_report_of_a_group_counts() {
        let mut reported = Reported::default();
        reported.remember(GroupId(1), failure("first".into()));
        reported.remember(GroupId(1), failure("second".into()));
        assert_eq!(reported.take(GroupId(2)), None);
        assert_eq!(reported.take(GroupId(1)), Some(failure("first".into())));
        assert_eq!(reported.take(GroupId(1)), None);
    }

    /// Groups that are never joined do not keep new reports out: the limit holds, and beyond it the oldest goes.
    #[test]
    fn the_oldest_report_is_forgotten() {
        let mut reported = Reported::default();
        let limit = MAX_REPORTED as u64;
        for group in 0..limit {
            reported.remember(GroupId(group), failure(group.to_string()));
        }
        assert!(reported.failures.iter().any(|(group, _)| *group == GroupId(0)), "forgotten below the limit");
        for group in limit..3 * limit {
            reported.remember(GroupId(group), failure(group.to_string()));
            assert_eq!(reported.failures.len(), MAX_REPORTED);
        }
        assert_eq!(reported.take(GroupId(2 * limit - 1)), None);
        for group in 2 * limit..3 * limit {
            assert_eq!(reported.take(GroupId(group)), Some(failure(group.to_string())));
        }
        assert!(reported.failures.is_empty());
    }

    /// Pairs of a peer and a group are told apart, the limit holds, and who goes is forgotten.
    #[test]
    fn who_has_done_with_a_group() {
        let mut overtaken = Overtaken::default();
        let limit = MAX_REPORTED as u64;
        for group in 0..2 * limit {
            overtaken.remember(1, GroupId(group));
            overtaken.remember(1, GroupId(group));
        }
        assert_eq!(overtaken.0.len(), MAX_REPORTED);
        assert!(!overtaken.contains(1, GroupId(limit - 1)) && overtaken.contains(1, GroupId(limit)));
        assert!(!overtaken.contains(2, GroupId(limit)));
        overtaken.remember(2, GroupId(limit + 1));
        overtaken.forget_group(GroupId(limit + 2));
        overtaken.forget_peer(1);
        assert_eq!(overtaken.0, [(2, GroupId(limit + 1))]);
        overtaken.forget_group(GroupId(limit + 1));
        assert!(overtaken.0.is_empty());
    }
}
