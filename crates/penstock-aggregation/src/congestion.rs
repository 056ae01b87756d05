//! How many blocks a worker may have on the way: a congestion window beside Credit.
//!
//! Credit keeps receivers' slots free; it does not know that N workers push into one link, or that a receive buffer is
//! short. What tells is the share of pushes that the server names as missing. A single loss says nothing here: in a tree
//! without congestion one in twenty may be lost, and neither the wait for the slowest worker nor a busy processor can be
//! told from a queue by the round trip. So the window is halved when more than [`TOLERATED`] of the pushes are lost, at
//! most once for what was on the way at that time, and else grows: by one for each answer before the first cut (slow
//! start), later by [`GROWTH`] for each window's worth of answers.
//!
//! The *shares* of a link need no rule. A block ends when all workers have pushed it, so all go at one rate; a worker whose
//! window is larger than another's only waits longer for its results.

/// The window, and what it is decided by.
#[derive(Clone, Debug)]
pub(super) struct Congestion {
    /// In blocks; the fraction is growth that is saved up.
    window: f64,
    /// The smoothed share of pushes that were lost.
    loss: f64,
    /// Nothing was cut yet.
    slow_start: bool,
    /// Losses of what was pushed before this transmission count no more: they were answered by a cut.
    since: u64,
    /// Pushed, and not answered.
    in_flight: usize,
    /// A block waits for room.
    limited: bool,
}

impl Congestion {
    pub(super) fn new() -> Congestion {
        Congestion { window: FIRST, loss: 0.0, slow_start: true, since: 0, in_flight: 0, limited: false }
    }

    /// Whether another block may leave, if there is one.
    pub(super) fn has_room(&mut self, is_one: bool) -> bool {
        let room = self.in_flight < self.window as usize;
        self.limited = is_one && !room;
        is_one && room
    }

    /// A block left for the first time.
    pub(super) fn on_push(&mut self) {
        self.in_flight += 1;
        self.loss -= self.loss * self.gain();
    }

    /// The result of a block is here, or the server says that it has committed it.
    pub(super) fn on_answer(&mut self) {
        // A window that is not used says nothing about a larger one.
        if self.limited {
            self.window += if self.slow_start { 1.0 } else { GROWTH / self.window };
        }
        self.in_flight -= 1;
    }

    /// The first push of a block was lost, which was transmission number `order` of so many.
    pub(super) fn on_loss(&mut self, order: u64, orders: u64) {
        if order < self.since {
            return;
        }
        self.loss += self.gain();
        if self.loss > TOLERATED {
            self.window = (self.window / 2.0).max(LEAST);
            (self.loss, self.slow_start, self.since) = (0.0, false, orders);
        }
    }

    /// The path is another one: nothing is known of it.
    pub(super) fn on_new_path(&mut self) {
        (self.loss, self.slow_start) = (0.0, true);
    }

    /// Losses are told in bursts, so a share is one of a window's pushes at least.
    fn gain(&self) -> f64 {
        GAIN.min(1.0 / self.window)
    }

    pub(super) fn window(&self) -> usize {
        self.window as usize
    }
}

/// Blocks that a worker begins with. TCP's ten segments (RFC 6928) are a bet on a queue, and so is this: eight keep a link of
/// 1 Gbit/s busy through an aggregator.
const FIRST: f64 = 8.0;
/// At least one block is on the way: less would need a clock.
const LEAST: f64 = 1.0;
/// The share of lost pushes that is taken for congestion.
const TOLERATED: f64 = 0.2;
/// Weight of one push in the smoothed share, where the window is not larger: random loss of 5 % then seldom passes
/// [`TOLERATED`].
const GAIN: f64 = 1.0 / 32.0;
/// By how much the window grows in the time in which it is answered once.
const GROWTH: f64 = 1.0 / 32.0;

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes all that the window allows and answers it, a round after the other; loses one push in `one_in`.
    fn rounds(congestion: &mut Congestion, rounds: usize, one_in: u64) {
        let mut order = 1000;
        for _ in 0..rounds {
            let mut pushed = Vec::new();
            while congestion.has_room(true) {
                congestion.on_push();
                pushed.push(order);
                order += 1;
            }
            pushed.iter().filter(|at| **at % one_in == 0).for_each(|at| congestion.on_loss(*at, order));
            pushed.iter().for_each(|_| congestion.on_answer());
        }
    }

    /// It doubles in the time of one round trip while blocks wait for room, and not when Credit is what holds them back.
    #[test]
    fn slow_start() {
        let mut congestion = Congestion::new();
        rounds(&mut congestion, 3, u64::MAX);
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

    /// One push in ten may be lost for ever; of one in three the window falls to a block or two, and never stops.
    #[test]
    fn what_counts_as_congestion() {
        let mut congestion = Congestion::new();
        rounds(&mut congestion, 6, 10);
        assert!(congestion.slow_start && congestion.window() == 64 * FIRST as usize, "{congestion:?}");
        rounds(&mut congestion, 1000, 3);
        assert!(!congestion.slow_start && congestion.window() <= 2, "{congestion:?}");
        assert!(congestion.has_room(true));
    }

    /// A burst that was lost as a whole halves the window once; what is pushed afterwards counts anew.
    #[test]
    fn one_cut_for_one_burst() {
        let mut congestion = Congestion { window: 64.0, ..Congestion::new() };
        (0..64).for_each(|_| congestion.on_push());
        (0..64).for_each(|order| congestion.on_loss(order, 64));
        assert_eq!(congestion.window(), 32);
        (64..96).for_each(|order| congestion.on_loss(order, 96));
        assert_eq!(congestion.window(), 16);
        congestion.on_new_path();
        assert!(congestion.slow_start);
    }
}
