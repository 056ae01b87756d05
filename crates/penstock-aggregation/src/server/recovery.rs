//! What the server does about blocks and results that were lost.

use super::{Recovery, Server, bits};
use crate::estimate::{MAX_BACKOFF, MAX_DOUBTFUL, smoothed};
use crate::{Endpoint, Node, Serial};
use penstock_types::{MILLISECOND, Time};

impl Server {
    /// Sends a result to a child again: once, however many workers request it before it has left.
    pub(super) fn repeat(&mut self, seq: Serial, child: Endpoint) {
        let index = self.index(seq);
        if !self.slots[index].announce.contains(&child) {
            self.slots[index].announce.push(child);
        }
        self.send(seq);
    }

    /// Blocks that lie well before a committed one and are not here were lost: by as many SeqNums as QUIC waits (RFC 9002,
    /// section 6.1.1).
    pub(super) fn look_for_gaps(&mut self, now: Time, committed: Serial) {
        if self.is_newer(self.ack, self.losses.checked) {
            self.losses.checked = self.ack;
        }
        while committed.ahead_of(self.losses.checked) >= REORDERED {
            let seq = self.losses.checked;
            if self.missing(seq) != 0 {
                self.name_gap(now, seq);
            }
            self.losses.checked = seq.plus(1);
        }
    }

    /// Sends the names of the workers whose blocks are missing to the children above them.
    pub(super) fn name(&mut self, seq: Serial) {
        let (missing, direct) = (self.missing(seq), self.direct());
        for at in 0..self.config.tree.children.len() {
            let node = &self.config.tree.children[at];
            match node {
                Node::Aggregator { endpoint, .. } if node.workers() & missing != 0 && node.workers() & direct == 0 => {
                    self.tell(*endpoint, seq);
                }
                _ => bits(node.workers() & missing).for_each(|worker| self.tell(self.config.workers[worker], seq)),
            }
        }
    }

    /// Queues a message that names missing blocks. Nodes that ask faster than packets leave do not get every answer.
    pub(super) fn tell(&mut self, to: Endpoint, seq: Serial) {
        if self.losses.names.len() < self.slots.len() * (self.config.workers.len() + 1) {
            self.losses.names.push_back((to, seq));
        }
    }

    pub(super) fn name_gap(&mut self, now: Time, seq: Serial) {
        self.name(seq);
        let recovery = self.recovery(seq, now);
        if recovery.tries == 0 {
            recovery.first_named_at = now;
        }
        (recovery.tries, recovery.named_at) = (recovery.tries + 1, now);
        let tries = recovery.tries;
        let at = now.plus(self.patience(tries));
        self.losses.rename_at = Some(self.losses.rename_at.map_or(at, |soonest| soonest.min(at)));
    }

    pub(super) fn name_again(&mut self, now: Time) {
        self.losses.rename_at = None;
        for i in 0..self.config.window {
            let seq = self.ack.plus(i);
            let recovery = self.losses.slots[self.index(seq)];
            if recovery.seq != seq || recovery.tries == 0 || self.missing(seq) == 0 {
                continue;
            }
            let at = recovery.named_at.plus(self.patience(recovery.tries));
            if at <= now {
                self.name_gap(now, seq);
            } else {
                self.losses.rename_at = Some(self.losses.rename_at.map_or(at, |soonest| soonest.min(at)));
            }
        }
    }

    pub(super) fn recovery(&mut self, seq: Serial, now: Time) -> &mut Recovery {
        let index = self.index(seq);
        let recovery = &mut self.losses.slots[index];
        if recovery.seq != seq {
            *recovery = Recovery::of(seq, now);
        }
        recovery
    }

    /// RFC 6298, section 2, for a sample after `tries` namings. Only a SeqNum that was named once gives a valid sample. But if
    /// the time-out is too short, everything is named twice and there are no valid samples: so after some late ones in a row,
    /// the next sample counts, however often it was named.
    pub(super) fn measure(&mut self, sample: u64, tries: u32) {
        // A longer time was an outage: no time-out is longer than this.
        let sample = sample.min(self.config.idle_every);
        if self.losses.doubtful >= MAX_DOUBTFUL {
            (self.losses.round_trip, self.losses.doubtful) = (None, 0);
        }
        self.losses.doubtful = if tries > 1 { self.losses.doubtful + 1 } else { 0 };
        if tries == 1 || self.losses.round_trip.is_none() {
            self.losses.round_trip = Some(smoothed(self.losses.round_trip, sample));
        }
    }

    /// The time-out after `tries` namings.
    pub(super) fn patience(&self, tries: u32) -> u64 {
        let (soonest, latest) = (RENAME_MIN, self.config.idle_every);
        let once = self.losses.round_trip.map_or(self.config.heartbeat_every, |(mean, variation)| mean + 4 * variation);
        (once.clamp(soonest.min(latest), latest) << (tries - 1).min(MAX_BACKOFF)).min(latest)
    }
}

/// As in QUIC: a packet that lies three before one that arrived was not overtaken but lost.
const REORDERED: i32 = 3;
/// Several round trips of a local network, a guess.
const RENAME_MIN: u64 = MILLISECOND / 4;
