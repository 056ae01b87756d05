//! How many blocks a worker may have on the way: a congestion window beside Credit.
//!
//! Credit keeps receivers' slots free. It does not know that N workers push into one link, that an aggregator's link is full with the
//! results that it hands down to them, or that a receive buffer is short. The share of pushes that the server names as missing shows
//! that, and the share of results that had to be requested although the server has them. A single loss says nothing here: in a tree
//! without congestion one packet in twenty may be lost, and a longer round trip may come from the slowest worker or a busy processor
//! instead of a queue. So the window is halved when more than [`TOLERATED`] of either are lost, at most once for the blocks in flight
//! at that time. Otherwise it grows: by one for each answer before the first cut (slow start), later by [`GROWTH`] for each window's
//! worth of answers.
//!
//! The *shares* of a link need no rule. A block ends when all workers have pushed it, so all go at one rate; a worker whose
//! window is larger than another's only waits longer for its results.
//!
//! None of that keeps queues short, and bulk does not mind them: 256 blocks are 16 ms of a link of 1 Gbit/s. What is urgent does mind: its
//! packets stand behind those that have left. So while there is such ([`Congestion::keep_short`]), a second window holds round trips
//! [`QUEUED`] above the least one, as delay-based congestion control does (Swift, SIGCOMM 2020, section 3.1).

use penstock_types::{MILLISECOND, SECOND, Time};

/// A worker's congestion window and its state.
#[derive(Clone, Debug)]
pub(super) struct Congestion {
    /// The window in blocks; the fraction is saved up growth.
    window: f64,
    /// The smoothed share of first pushes that were lost.
    lost_pushes: f64,
    /// The same of results.
    lost_results: f64,
    /// The window was never cut.
    slow_start: bool,
    /// Losses of blocks before this transmission, and of their results, do not count any more: a cut answered them.
    since: u64,
    /// Blocks that were pushed and not answered.
    in_flight: usize,
    /// A block waits for room in the window.
    limited: bool,
    least: Least,
    /// The window that keeps queues short, while that is asked for.
    short: Option<f64>,
}

impl Congestion {
    pub(super) fn new() -> Congestion {
        Congestion {
            window: FIRST,
            lost_pushes: 0.0,
            lost_results: 0.0,
            slow_start: true,
            since: 0,
            in_flight: 0,
            limited: false,
            least: Least::default(),
            short: None,
        }
    }

    /// From now on blocks leave so that queues are short, or as many as the path carries.
    pub(super) fn keep_short(&mut self, is_short: bool) {
        self.short = is_short.then(|| self.short.unwrap_or(self.in_flight as f64).max(FIRST));
    }

    /// Whether another block may leave; `is_one` says whether there is one.
    pub(super) fn has_room(&mut self, is_one: bool) -> bool {
        let room = self.in_flight < self.window as usize;
        self.limited = is_one && !room;
        is_one && room && self.short.is_none_or(|short| self.in_flight < short as usize)
    }

    /// A block left for the first time.
    pub(super) fn on_push(&mut self) {
        self.in_flight += 1;
        self.lost_pushes -= self.lost_pushes * self.gain();
    }

    /// The result of a block came, or the server reported that it has committed it.
    pub(super) fn on_answer(&mut self) {
        // A window that is not used says nothing about a larger one.
        if self.limited {
            self.window += if self.slow_start { 1.0 } else { GROWTH / self.window };
        }
        self.in_flight -= 1;
    }

    /// A result came.
    pub(super) fn on_result(&mut self) {
        self.lost_results -= self.lost_results * self.gain();
    }

    /// The longest round trip in short queues, in nanoseconds, if nobody is late.
    pub(super) fn round_trip(&self) -> u64 {
        self.least.of().map_or(FIRST_ROUND_TRIP, |least| least + 2 * QUEUED)
    }

    /// The result of a block came that was pushed once, this long ago in nanoseconds.
    pub(super) fn on_round_trip(&mut self, now: Time, sample: u64) {
        let least = self.least.with(now, sample);
        if let Some(short) = &mut self.short {
            // As many blocks as are in flight in the round trip that is wanted, after that many answers.
            let wanted = (least + QUEUED) as f64 / sample.max(1) as f64;
            *short = (*short + (wanted - 1.0).clamp(-0.5, 1.0)).clamp(FIRST, self.window.max(FIRST));
        }
    }

    /// The first push of a block was lost: transmission number `order` of `orders`.
    pub(super) fn on_lost_push(&mut self, order: u64, orders: u64) {
        if order >= self.since {
            self.lost_pushes += self.gain();
            self.judge(orders);
        }
    }

    /// The result of a block did not come, though the server has it: the block was transmission number `order` of `orders`.
    pub(super) fn on_lost_result(&mut self, order: u64, orders: u64) {
        if order >= self.since {
            self.lost_results += self.gain();
            self.judge(orders);
        }
    }

    fn judge(&mut self, orders: u64) {
        if self.lost_pushes.max(self.lost_results) > TOLERATED {
            self.window = (self.window / 2.0).max(LEAST);
            (self.lost_pushes, self.lost_results, self.slow_start, self.since) = (0.0, 0.0, false, orders);
        }
    }

    /// The path has changed: starts again without knowledge of it.
    pub(super) fn on_new_path(&mut self) {
        (self.lost_pushes, self.lost_results, self.slow_start, self.least) = (0.0, 0.0, true, Least::default());
    }

    /// The weight of one push in the smoothed share: at least one push in a window, since losses come in bursts.
    fn gain(&self) -> f64 {
        GAIN.min(1.0 / self.window)
    }

    #[cfg(test)]
    pub(super) fn window(&self) -> usize {
        self.window as usize
    }
}

/// The least round trip of the last 10 to 20 s, in nanoseconds. A path may become longer; and while something is urgent again and again,
/// bulk waits for it each time, and finds the queues empty.
#[derive(Clone, Copy, Debug, Default)]
struct Least {
    latest: Option<u64>,
    before: Option<u64>,
    until: Time,
}

impl Least {
    fn with(&mut self, now: Time, sample: u64) -> u64 {
        if now >= self.until {
            (self.before, self.latest, self.until) = (self.latest, None, now.plus(LEAST_OF));
        }
        let latest = self.latest.map_or(sample, |latest| latest.min(sample));
        self.latest = Some(latest);
        self.before.map_or(latest, |before| before.min(latest))
    }

    fn of(self) -> Option<u64> {
        self.latest.into_iter().chain(self.before).min()
    }
}

/// Blocks that a worker starts with. TCP's ten segments (RFC 6928) are a guess at a queue, and so is this: eight keep a link
/// of 1 Gbit/s busy through an aggregator.
const FIRST: f64 = 8.0;
/// At least one block is in flight: less would need a clock.
const LEAST: f64 = 1.0;
/// Above this share, lost pushes or results count as congestion.
const TOLERATED: f64 = 0.2;
/// Weight of one push in the smoothed share, where the window is not larger: random loss of 5 % then seldom passes
/// [`TOLERATED`].
const GAIN: f64 = 1.0 / 32.0;
/// By how much the window grows for each window's worth of answers.
const GROWTH: f64 = 1.0 / 32.0;
/// How much longer than the least one round trips are in short queues. Less than what others urgently want to send may wait
/// (docs/benchmarks/README.md, "Urgent behind bulk"), and enough for what processes are late.
const QUEUED: u64 = 3 * MILLISECOND;
/// The least round trip is one of this time, or of this time and the one before.
const LEAST_OF: u64 = 10 * SECOND;
/// The longest one before any was measured.
const FIRST_ROUND_TRIP: u64 = 100 * MILLISECOND;

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes all that the window allows and answers it, a round after the other; loses one push or result in `one_in`.
    fn rounds(congestion: &mut Congestion, rounds: usize, one_in: u64, lost: fn(&mut Congestion, u64, u64)) {
        let mut order = 1000;
        for _ in 0..rounds {
            let mut pushed = Vec::new();
            while congestion.has_room(true) {
                congestion.on_push();
                pushed.push(order);
                order += 1;
            }
            pushed.iter().filter(|at| **at % one_in == 0).for_each(|at| lost(congestion, *at, order));
            pushed.iter().for_each(|_| {
                congestion.on_answer();
                congestion.on_result();
            });
        }
    }

    /// It doubles in the time of one round trip while blocks wait for room, and not when Credit is what holds them back.
    #[test]
    fn slow_start() {
        let mut congestion = Congestion::new();
        rounds(&mut congestion, 3, u64::MAX, Congestion::on_lost_push);
        assert_eq!(congestion.window(), 8 * FIRST as usize);
        let mut idle = Congestion::new();
        for _ in 0..100 {
            assert!(idle.has_room(true));
            idle.on_push();
            assert!(!idle.has_room(false));
            idle.on_answer();
        }
        assert_eq!(idle.window(), FIRST as usize);
    }

    /// One push in ten may be lost for ever, and one result in ten with them; of one in three the window falls to a block or two, and
    /// never stops.
    #[test]
    fn what_counts_as_congestion() {
        for lost in [Congestion::on_lost_push, Congestion::on_lost_result] {
            let mut congestion = Congestion::new();
            rounds(&mut congestion, 6, 10, |congestion, order, orders| {
                congestion.on_lost_push(order, orders);
                congestion.on_lost_result(order, orders);
            });
            assert!(congestion.slow_start && congestion.window() == 64 * FIRST as usize, "{congestion:?}");
            rounds(&mut congestion, 1000, 3, lost);
            assert!(!congestion.slow_start && congestion.window() <= 2, "{congestion:?}");
            assert!(congestion.has_room(true));
        }
    }

    /// A burst that was lost as a whole halves the window once; what is pushed afterwards counts anew.
    #[test]
    fn one_cut_for_one_burst() {
        let mut congestion = Congestion { window: 64.0, ..Congestion::new() };
        (0..64).for_each(|_| congestion.on_push());
        (0..64).for_each(|order| congestion.on_lost_push(order, 64));
        assert_eq!(congestion.window(), 32);
        (64..96).for_each(|order| congestion.on_lost_push(order, 96));
        assert_eq!(congestion.window(), 16);
        congestion.on_new_path();
        assert!(congestion.slow_start);
    }

    /// A link that carries a block in 60 us, with 500 us on the way: while queues are to be short, blocks wait [`QUEUED`] in it, after a
    /// few round trips and from then on, and the link never runs dry; before and afterwards as long as the window fills it. Each second
    /// something urgent holds them up, and the queue drains. A path that has become longer is filled, too, within 20 s.
    #[test]
    fn short_queues() {
        const SENDS: u64 = 60_000;
        let mut congestion = Congestion { window: 256.0, slow_start: false, ..Congestion::new() };
        let mut in_flight = std::collections::VecDeque::new();
        let (mut now, mut free_at) = (0, 0);
        let mut until = |congestion: &mut Congestion, end: u64, travels: u64| {
            let (mut round_trip, mut idle, mut is_held) = (0, 0, true);
            while now < end {
                is_held &= !in_flight.is_empty();
                if in_flight.is_empty() {
                    free_at = now;
                }
                while !is_held && congestion.has_room(true) {
                    congestion.on_push();
                    idle += now.saturating_sub(free_at);
                    free_at = now.max(free_at) + SENDS;
                    in_flight.push_back((now, free_at + travels));
                }
                let (sent, answered) = in_flight.pop_front().expect("there always is room for one");
                now = answered;
                round_trip = now - sent;
                congestion.on_round_trip(Time(now), round_trip);
                congestion.on_answer();
            }
            (round_trip, idle)
        };
        assert!(until(&mut congestion, SECOND, 500_000).0 > 15 * MILLISECOND);
        congestion.keep_short(true);
        until(&mut congestion, SECOND + 100 * MILLISECOND, 500_000);
        let mut second = 1;
        for travels in [500_000, 5 * MILLISECOND, 500_000] {
            for of_path in 0..40 {
                second += 1;
                let (round_trip, idle) = until(&mut congestion, second * SECOND, travels);
                if of_path > 20 || second < 40 {
                    let queued = round_trip - travels;
                    assert!((QUEUED..QUEUED + MILLISECOND).contains(&queued), "{queued} ns in second {second}");
                    assert_eq!(idle, 0, "in second {second}");
                }
            }
        }
        congestion.keep_short(false);
        assert!(until(&mut congestion, (second + 1) * SECOND, 500_000).0 > 15 * MILLISECOND);
    }
}
