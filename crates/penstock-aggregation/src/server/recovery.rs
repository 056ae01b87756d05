//! What the server does about blocks and results that were lost.

use super::{ROOT, Recovery, Server, bits};
use crate::estimate::{MAX_BACKOFF, MAX_DOUBTFUL, smoothed};
use crate::{Endpoint, Serial};
use penstock_types::{MILLISECOND, Time};

impl Server {
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

    /// Tells the nodes whose blocks are missing, or that can narrow down whose are.
    pub(super) fn name(&mut self, seq: Serial) {
        let missing = self.missing(seq);
        for child in bits(missing) {
            let kid = *self.hops.kid((ROOT, child));
            if kid.hop.is_none_or(|hop| !self.is_bypassed(hop)) {
                self.tell(kid.endpoint, seq);
            }
        }
        for hop in 1..self.hops.list.len() {
            let is_here = self.is_bypassed(hop) || self.table(hop).missing(seq) != self.hops.list[hop].all;
            if !is_here || missing >> self.hops.top_of((hop, 0)) & 1 == 0 {
                continue;
            }
            let lacking = self.table(hop).missing(seq);
            if lacking == 0 {
                self.rise_again(hop, seq);
            }
            for at in 0..self.hops.list[hop].kids.len() {
                let kid = self.hops.list[hop].kids[at];
                if kid.name & lacking != 0 && kid.hop.is_none_or(|hop| !self.is_bypassed(hop)) {
                    self.tell(kid.endpoint, seq);
                }
            }
        }
    }

    /// Queues a message that names missing blocks. Nodes that ask faster than packets leave do not get every answer.
    pub(super) fn tell(&mut self, to: Endpoint, seq: Serial) {
        if self.losses.names.len() < self.slots.len() * (self.hops.places.len() + 1) {
            self.losses.names.push_back((to, seq));
        }
    }

    /// Whether the block of a node is missing, or may be, as far as the server can see.
    pub(super) fn lacks(&self, place: (usize, usize), seq: Serial) -> bool {
        let missing = self.missing(seq);
        match place {
            (ROOT, child) => missing >> child & 1 == 1,
            (hop, _) if self.is_bypassed(hop) => self.table(hop).missing(seq) & self.hops.kid(place).name != 0,
            _ => missing >> self.hops.top_of(place) & 1 == 1,
        }
    }

    /// The names in a message to a node: its own, if its block is missing; else those of the nodes beside it whose blocks are; or
    /// else none, if others' are missing. `None`: no block is missing.
    pub(super) fn names_for(&self, to: Endpoint, seq: Serial) -> Option<u64> {
        let missing = self.missing(seq);
        if missing == 0 {
            return None;
        }
        let place = self.hops.places[&to];
        let hop = &self.hops.list[place.0];
        let lacking = match place.0 {
            ROOT => bits(missing).fold(0, |all, child| all | hop.kids[child].name),
            below if self.is_bypassed(below) || self.table(below).missing(seq) != hop.all => {
                self.table(below).missing(seq)
            }
            // The aggregator may know whose it is.
            _ if missing >> self.hops.top_of(place) & 1 == 1 => hop.kids[place.1].name,
            _ => 0,
        };
        Some(match lacking & hop.kids[place.1].name {
            0 => lacking,
            own => own,
        })
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
            let recovery = &self.losses.slots[self.index(seq)];
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
