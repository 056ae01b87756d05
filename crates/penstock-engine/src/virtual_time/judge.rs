//! What may go wrong in a program, and what may not.

use super::program::{Fault, How, Program, Step, What, Wrong, sequence};
use penstock_types::{Failure, FailureKind, SECOND};

/// Which failures a program may meet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tolerance {
    kinds: &'static [FailureKind],
    /// Ranks may be given up, so that the others keep what is for them.
    pub(super) may_lose: bool,
}

impl Program {
    /// All its operations must succeed.
    pub(super) fn is_right(&self) -> bool {
        self.tolerance().kinds.is_empty()
    }

    pub(super) fn tolerance(&self) -> Tolerance {
        use FailureKind::{Closed, Mismatch, PeerLost, Timeout};
        let nothing = Tolerance { kinds: &[], may_lose: false };
        let lost = Tolerance { kinds: &[PeerLost, Closed, Timeout], may_lose: true };
        let of_fault = match self.fault {
            None | Some((_, Fault::Lose { .. })) => nothing,
            // Whoever is silent for 4 s is lost, and a stream alone is all that there is of a peer.
            Some((_, Fault::Stall { time, .. })) if self.streams > 1 || time <= 3 * SECOND => nothing,
            Some((_, Fault::Part { time, .. } | Fault::Stop { time, .. })) if time <= 3 * SECOND => nothing,
            // A process does not count the time in which it did not run itself.
            Some((_, Fault::StopAll { .. })) => nothing,
            Some(_) => lost,
        };
        match self.wrong {
            None => of_fault,
            Some(wrong) => Tolerance {
                kinds: match wrong.how {
                    How::Size | How::DType | How::Op | How::Root if self.goes_on && !self.ends_early => &[Mismatch],
                    // Only the channel ends.
                    How::Close if self.goes_on && !self.ends_early => &[Closed, PeerLost],
                    // No operations of two ranks differ.
                    How::Leave | How::Close | How::Late => &[Closed, PeerLost, Timeout],
                    // Ranks that end meanwhile are missed by others, also in joins.
                    _ => &[Mismatch, Closed, PeerLost, Timeout],
                },
                may_lose: !self.goes_on || self.ends_early || matches!(wrong.how, How::Skip | How::Leave | How::Late),
            },
        }
    }

    /// Whether some operation fails because a rank makes another one than the others.
    pub(super) fn must_be_noticed(&self) -> bool {
        let differs = |wrong: Wrong| match wrong.how {
            // A rank that only sends to ranks which expect nothing may have left before it hears of them.
            How::Size => self.calls[wrong.call].elements > 0 || !self.is_last(wrong.call),
            // So may two that take themselves for the root; what they do next may overtake what they have sent (seed 15712654).
            How::Root if matches!(self.calls[wrong.call].what, What::Broadcast { .. } | What::Scatter { .. }) => false,
            // Nothing is sent in an operation without elements, so nothing is compared.
            How::DType | How::Op | How::Root => self.calls[wrong.call].elements > 0,
            _ => false,
        };
        self.wrong.is_some_and(differs) && self.fault.is_none() && self.goes_on && !self.ends_early
    }

    /// Whether no rank makes another call of the group, or of its channels, after this one.
    fn is_last(&self, call: usize) -> bool {
        let home = |call: &usize| self.home(self.calls[*call].group);
        self.steps.iter().all(|steps| {
            let made = steps.iter().filter_map(|step| match step {
                Step::Issue(call) | Step::Hold(call) => Some(*call),
                _ => None,
            });
            !made.skip_while(|made| *made != call).skip(1).any(|later| home(&later) == home(&call))
        })
    }

    /// Whether a success of the call says nothing about the result on this rank: it, or the call that it met, is not what the
    /// program wants.
    pub(super) fn is_undefined(&self, call: usize, rank: usize) -> bool {
        let Some(wrong) = self.wrong else { return false };
        let [given, met] = [call, wrong.call].map(|call| &self.calls[call]);
        match wrong.how {
            How::Size | How::DType | How::Op | How::Root => (rank, call) == (wrong.rank, wrong.call),
            // What the rank opens later has the numbers of other channels. Their calls may look alike.
            How::Order { .. } | How::Skip if met.what == What::Open => {
                self.groups[given.group].channel_of == Some(self.home(met.group))
            }
            How::Order { .. } | How::Leave | How::Close | How::Late => false,
            // Later calls may meet others that look alike.
            How::Skip => call >= wrong.call && sequence(given) == sequence(met),
        }
    }
}

impl Tolerance {
    /// What is wrong with a failure of a call, or a join, of a group.
    pub(super) fn refuses(&self, program: &Program, group: usize, rank: usize, failure: &Failure) -> Option<String> {
        // A vigil says that a rank has closed it.
        if program.groups[group].is_vigil && failure.group_lives && failure.kind == FailureKind::PeerLost {
            return None;
        }
        let home = |group| program.home(group);
        // Ranks that go on in other groups find them as they were.
        let is_concerned = match (program.wrong, program.fault) {
            (Some(wrong), _) => match wrong.how {
                How::Skip | How::Leave | How::Late => true,
                How::Close => program.calls[wrong.call].group == group && failure.group_lives,
                _ => home(program.calls[wrong.call].group) == home(group),
            },
            // A join may wait for a rank that waits for the one that is gone.
            (None, Some((_, Fault::Kill { rank, .. }))) => {
                failure.kind == FailureKind::Timeout || program.groups[group].members.contains(&rank)
            }
            _ => true,
        };
        // Two ranks make different operations, and every rank of the group hears how they differ, also from ranks that have left, but
        // not from one that ends without waiting for what goes ahead on a slow connection.
        let must_differ = program.wrong.filter(|_| !program.ends_at_once()).is_some_and(|wrong| {
            home(program.calls[wrong.call].group) == home(group)
                && !matches!(wrong.how, How::Skip | How::Leave | How::Close | How::Late)
        });
        let is_named = !must_differ || matches!(failure.kind, FailureKind::Mismatch | FailureKind::Closed);
        if self.kinds.contains(&failure.kind) && is_named && (is_concerned || !program.goes_on) {
            return None;
        }
        Some(format!("failed: in group {group} on rank {rank}: {failure}"))
    }
}
