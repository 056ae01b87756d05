//! When a worker sends again, and when it asks: its time-outs.

use super::{ASK_FIRST, Entry, State, Worker};
use crate::Serial;
use crate::estimate::{MAX_BACKOFF, smoothed};
use crate::rules::Rule;
use penstock_types::{MILLISECOND, SECOND, Time};

/// When a worker sends again and when it gives up on a path, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Time-out before a round trip was measured.
    pub rto_first: u64,
    /// Lower bound of the time-out. Too low: blocks are sent twice whenever a worker is late.
    pub rto_min: u64,
    /// Upper bound of the time-out and of its doubling. Longer round trips raise the bound, up to `server_dead_after`.
    pub rto_max: u64,
    /// How often results are acknowledged while blocks are in flight.
    pub heartbeat_every: u64,
    /// How often results are acknowledged while no blocks are in flight.
    pub idle_every: u64,
    /// An aggregator through which nothing came for this long is bypassed. A few times the server's idle interval.
    pub path_dead_after: u64,
    /// After this long without progress while blocks are in flight, the aggregator is bypassed although it is heard: packets
    /// that go up through it may be lost. Costs bandwidth if a worker was only late; doubles each time, up to a minute.
    pub stall_after: u64,
    /// A server from which nothing came for this long is lost ([`Worker::server_is_lost`]).
    pub server_dead_after: u64,
}

impl Default for Timing {
    /// What the engine uses. A window of blocks waits in a worker's own queue before it leaves, which is part of the round
    /// trip: 2.3 MB are 18 ms at 1 Gbit/s. Later packets show most losses, so long time-outs cost little.
    fn default() -> Timing {
        Timing {
            rto_first: 100 * MILLISECOND,
            rto_min: 10 * MILLISECOND,
            rto_max: 500 * MILLISECOND,
            heartbeat_every: 2 * MILLISECOND,
            idle_every: 100 * MILLISECOND,
            path_dead_after: 350 * MILLISECOND,
            stall_after: SECOND,
            server_dead_after: 4 * SECOND,
        }
    }
}

impl Worker {
    /// A result has come, or the last block has left: starts the timer of a quiet period.
    pub(super) fn listen(&mut self, now: Time) {
        self.clock.quiet = 0;
        let waits = self.next == self.posted && self.next != self.received;
        self.clock.quiet_at = waits.then(|| now.plus(self.patience(1)));
    }

    /// Requests the first missing results. If other workers are late, this costs small packets, and the answers say so.
    pub(super) fn break_silence(&mut self, now: Time) {
        self.clock.quiet_at = None;
        if self.next != self.posted {
            return;
        }
        let mut left = ASK_FIRST;
        let mut seq = self.received;
        while seq != self.next && left > 0 {
            let index = self.index(seq);
            if self.entries[index].state == State::Sent {
                left -= 1;
                self.missed(now, seq);
                self.again(index, false, self.rules.hold(Rule::Request));
            }
            seq = seq.plus(1);
        }
        self.clock.quiet += 1;
        // Short enough to hear that other workers are late before the path is blamed.
        let patience = self.patience(self.clock.quiet + 1).min(self.config.timing.stall_after / 4);
        self.clock.quiet_at = Some(now.plus(patience));
    }

    /// A result is requested: records when, if the server has it.
    pub(super) fn missed(&mut self, now: Time, seq: Serial) {
        if self.is_newer(self.ack, seq) {
            let index = self.index(seq);
            let entry = &mut self.entries[index];
            (entry.missed_at, entry.misses) = (now, entry.misses + 1);
            if entry.misses == 1 {
                self.congestion.on_lost_result(entry.order, self.clock.orders);
            }
        }
    }

    pub(super) fn scan(&mut self, now: Time) {
        let mut soonest: Option<Time> = None;
        let mut expired = false;
        let mut seq = self.received;
        while seq != self.next {
            let index = self.index(seq);
            if self.entries[index].state == State::Sent {
                if self.entries[index].deadline <= now {
                    self.missed(now, seq);
                    let later = match self.entries[index].misses {
                        0 => now.plus(self.timeout()),
                        misses => now.plus(self.patience(misses)),
                    };
                    // A request costs little, and leads to what is missing; this worker's own block is most likely not what is
                    // missing.
                    if std::mem::replace(&mut self.entries[index].asked, true) {
                        self.expire(seq);
                        expired = true;
                    } else {
                        self.again(index, false, self.rules.hold(Rule::Request));
                    }
                    (self.entries[index].deadline, self.entries[index].order) = (later, self.clock.orders);
                    self.clock.orders += 1;
                }
                let deadline = self.entries[index].deadline;
                soonest = Some(soonest.map_or(deadline, |soonest| soonest.min(deadline)));
            }
            seq = seq.plus(1);
        }
        if expired {
            self.clock.backoff = (self.clock.backoff + 1).min(MAX_BACKOFF);
        }
        self.clock.scan_at = soonest;
    }

    /// Moves deadlines of sent blocks in `from..to` forward.
    pub(super) fn hurry(&mut self, from: Serial, to: Serial, deadline: Time, which: impl Fn(&Entry) -> bool) {
        let mut seq = self.received.newest(from);
        while to.is_newer_than(seq) {
            let index = self.index(seq);
            let entry = &mut self.entries[index];
            if entry.state == State::Sent && which(entry) && entry.deadline > deadline {
                entry.deadline = deadline;
                self.clock.scan_at = Some(self.clock.scan_at.map_or(deadline, |at| at.min(deadline)));
            }
            seq = seq.plus(1);
        }
    }

    /// Decides whether the aggregator above can be trusted.
    pub(super) fn judge_path(&mut self, now: Time) {
        if self.config.parent == self.config.server {
            return;
        }
        let Timing { path_dead_after, stall_after, .. } = self.config.timing;
        // Two workers may each wait for a block of the other one, which an aggregator loses again and again.
        let is_in_vain = std::mem::take(&mut self.clock.path.is_in_vain);
        let stalled = is_in_vain || (self.next != self.received && now.since(self.clock.progress_at) > stall_after);
        if stalled && !self.way.is_direct && now >= self.clock.path.distrust_until {
            self.clock.path.distrust_until = now.plus((stall_after << self.clock.path.stalls).min(MAX_DISTRUST));
            self.clock.path.stalls = (self.clock.path.stalls + 1).min(MAX_BACKOFF);
        }
        self.lost = now.since(self.clock.parent_heard) > path_dead_after || now < self.clock.path.distrust_until;
    }

    /// What goes up takes another way from now on. What did not move by the one before is no reason to blame this one.
    pub(super) fn trust_anew(&mut self, now: Time) {
        self.made_progress(now);
        self.clock.path.is_in_vain = false;
        self.entries.iter_mut().for_each(|entry| (entry.first_at, entry.repeats) = (now, 0));
    }

    pub(super) fn made_progress(&mut self, now: Time) {
        self.clock.progress_at = now;
    }

    /// RFC 6298, section 2. Only a block that was sent once gives a valid sample, so the doubled time-out holds until one has
    /// come back (Karn and Partridge, 1987). Otherwise a time-out below the round trip would send every block twice, and never
    /// adapt.
    pub(super) fn measure(&mut self, sample: u64) {
        self.clock.backoff = 0;
        // A longer time was a stall, and counts as the longest round trip that is believed. The queue of a slow link is deeper than a
        // second's worth where six workers with 256 blocks each push into it.
        let sample = sample.min(self.config.timing.server_dead_after);
        self.clock.round_trip = Some(smoothed(self.clock.round_trip, sample));
    }

    /// The time-out for a result after `misses` requests.
    pub(super) fn patience(&self, misses: u32) -> u64 {
        let once = self.clock.answer.map_or(self.config.timing.rto_min, |(mean, variation)| mean + 4 * variation);
        (once.max(MILLISECOND) << (misses - 1).min(MAX_BACKOFF)).min(self.longest())
    }

    /// The least time between two pushes of a block that the server names as missing, once it was pushed again `repeats` times. A block may
    /// be lost a few times in a row. What is named more often waits in a queue, which a push for each name would keep full.
    pub(super) fn spacing(&self, repeats: u8) -> u64 {
        match u32::from(repeats).checked_sub(FREE_REPEATS) {
            None => 0,
            Some(more) => ((self.config.timing.rto_min / 8) << more.min(2 * MAX_BACKOFF)).min(self.longest()),
        }
    }

    /// The upper bound of time-outs: above the usual one where round trips are longer, since everything would be sent twice
    /// otherwise.
    pub(super) fn longest(&self) -> u64 {
        let Timing { rto_max, server_dead_after, .. } = self.config.timing;
        let round_trip = self.clock.round_trip.map_or(0, |(mean, variation)| 2 * mean + 4 * variation);
        round_trip.min(server_dead_after).max(rto_max)
    }

    pub(super) fn timeout(&self) -> u64 {
        let Timing { rto_first, rto_min, .. } = self.config.timing;
        // Twice the mean: the queue of a full window makes the round trip long and even, and a needless resend makes it
        // longer.
        let rto = self.clock.round_trip.map_or(rto_first, |(mean, variation)| 2 * mean + 4 * variation);
        (rto.max(rto_min) << self.clock.backoff).min(self.longest())
    }

    pub(super) fn round_trip(&self) -> u64 {
        self.clock.round_trip.map_or(self.config.timing.rto_min, |(mean, _)| mean)
    }
}

/// A named block is pushed again at once as many times.
const FREE_REPEATS: u32 = 3;
/// An aggregator that stalled is tried again after a minute at the latest.
const MAX_DISTRUST: u64 = 60 * SECOND;
