//! A channel of a group: an order of collectives, which may be closed or fail while others go on.

use crate::name::{Ended, Issued};
use penstock_plan::Algorithm;
use penstock_stream::fingerprint::Fingerprint;
use penstock_stream::peer::Farewell;
use penstock_types::{ChannelId, Failure, OpSeq, PeerId};
use std::collections::HashMap;
use std::sync::Arc;

/// One channel of a group, as one rank sees it.
#[derive(Debug)]
pub struct Channel {
    pub(super) name: Arc<str>,
    /// This rank has opened it. Otherwise, other ranks have closed it or told of its failure before.
    pub(super) is_open: bool,
    /// It fails as soon as any rank closes it.
    pub(super) is_vigil: bool,
    pub(super) issued: Issued,
    pub(super) ended: Ended,
    /// The algorithm of all-reduces; `None`: chosen by size and hosts.
    pub(super) algorithm: Option<Algorithm>,
    pub(super) farewells: Farewells,
    pub(super) failed: Option<Failure>,
    /// Which algorithm the last operation took, and why.
    pub(super) last_algorithm: String,
}

/// What is known of members that have closed a channel.
#[derive(Debug, Default)]
pub(super) struct Farewells {
    /// How many collectives they had issued, and whether they leave the group.
    pub(super) gone: HashMap<PeerId, (u64, bool)>,
    /// What collectives were, as the first of them has reported.
    pub(super) told: HashMap<OpSeq, (PeerId, Fingerprint)>,
}

/// A channel to open.
#[derive(Clone, Debug)]
pub struct Open {
    /// Its number: the place among the channels that this rank has opened in the group, from 1 on. All ranks open the channels of
    /// a group in the same order.
    pub channel: ChannelId,
    /// Its name in logs and errors, with the group's. Ranks compare it.
    pub name: Arc<str>,
    /// The channel fails as soon as any rank closes it, also if no operation runs there.
    pub is_vigil: bool,
    /// How long this rank waits for the others to open it, in nanoseconds.
    pub timeout: u64,
}

impl Channel {
    pub(super) fn new(name: Arc<str>, algorithm: Option<Algorithm>) -> Channel {
        Channel {
            name,
            is_open: true,
            is_vigil: false,
            issued: Issued::default(),
            ended: Ended::default(),
            algorithm,
            farewells: Farewells::default(),
            failed: None,
            last_algorithm: String::new(),
        }
    }

    /// Its name, with the group's.
    #[must_use]
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// How many collectives its users have issued.
    #[must_use]
    pub fn collectives(&self) -> u64 {
        self.issued.collectives.saturating_sub(OPENING_OPS)
    }

    /// Which algorithm its last operation took, and why.
    #[must_use]
    pub fn last_algorithm(&self) -> &str {
        &self.last_algorithm
    }

    /// Why it has failed although its group lives, if it has.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        self.failed.as_ref()
    }

    /// What this rank has done in it.
    pub(super) fn farewell(&self, leaves_group: bool) -> Farewell {
        let mut last: Vec<_> = self.ended.collectives().take(Farewell::MOST).collect();
        last.reverse();
        Farewell { collectives: self.issued.collectives, last, leaves_group }
    }
}

/// How many operations a channel issues for itself before its users' first: those are numbered from 1 on. In the main channel it is
/// the join's.
pub(super) const OPENING_OPS: u64 = 1;
