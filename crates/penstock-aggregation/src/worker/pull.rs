//! The pull flow at a worker, where results come apart from the blocks: numbers of its own, in the order in which the server was
//! done.
//!
//! ```text
//!    received            known                       received + W
//!   ─────┴──────────────────┴────────────────────────────┴─────
//!    here │ sent by the server │ will be sent              │ no room
//!         │ here or requested  │
//! ```

use super::{ASK_ABOVE, Outbound, Worker};
use crate::Serial;
use crate::packet::{Header, Kind};
use crate::rules::{Refusal, Rule};
use penstock_types::Time;
use std::collections::VecDeque;

/// What a worker knows of the results that it is to get.
#[derive(Clone, Debug)]
pub(super) struct Pull {
    /// The lowest number whose result is not here.
    pub(super) received: Serial,
    /// All workers have the results before it.
    pub(super) everywhere: Serial,
    /// The server has sent the results before it.
    known: Serial,
    /// What is known of the numbers from `received` on, by number modulo the window.
    expected: Vec<Expected>,
    /// Numbers to request.
    due: VecDeque<Serial>,
    /// When [`Worker::pull_missing`] is due.
    pub(super) at: Option<Time>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Expected {
    is_here: bool,
    /// When the result is requested next.
    at: Option<Time>,
    /// How often it was requested.
    tries: u8,
}

impl Pull {
    pub(super) fn new(start: Serial, window: u32) -> Pull {
        Pull {
            received: start,
            everywhere: start,
            known: start,
            expected: vec![Expected::default(); window as usize],
            due: VecDeque::new(),
            at: None,
        }
    }

    fn index(&self, number: Serial) -> usize {
        number.0 as usize & (self.expected.len() - 1)
    }

    /// The numbers that the server has sent and that are not here.
    fn missing(&self) -> impl Iterator<Item = Serial> + use<'_> {
        let sent = self.known.ahead_of(self.received).max(0) as u32;
        let all = (0..sent).map(|i| self.received.plus(i));
        all.filter(|number| !self.expected[self.index(*number)].is_here)
    }

    /// Results below `before` that are not here are requested at this time, if nothing is decided of them.
    fn expect(&mut self, before: Serial, at: Time) {
        let all: Vec<Serial> = self.missing().filter(|number| before.is_newer_than(*number)).collect();
        for number in all {
            let index = self.index(number);
            let expected = &mut self.expected[index];
            if expected.tries == 0 && expected.at.is_none_or(|before| at < before) {
                expected.at = Some(at);
                self.at = Some(self.at.map_or(at, |soonest| soonest.min(at)));
            }
        }
    }
}

impl Worker {
    /// The next result that this worker expects, as it says in Ack.
    pub(super) fn taken(&self) -> Serial {
        self.pull.as_ref().map_or(self.received, |pull| pull.received)
    }

    /// Hears from a packet other than a result which results were sent, and, from a heartbeat, which ones all workers have.
    pub(super) fn hear_pull(&mut self, now: Time, header: &Header) {
        let at = now.plus(self.round_trip() / 4);
        let window = self.config.window;
        let Some(pull) = &mut self.pull else { return };
        let sent = header.aside();
        if sent.ahead_of(pull.received) > window as i32 {
            return;
        }
        pull.known = pull.known.newest(sent);
        if header.kind == Kind::HeartbeatDown {
            let everywhere = sent.plus(u32::from(header.exponent as u16).wrapping_neg());
            if !everywhere.is_newer_than(pull.received) {
                pull.everywhere = pull.everywhere.newest(everywhere);
            }
        }
        pull.expect(sent, at);
    }

    /// Takes the result with this number, which is that of a block whose SeqNum is the header's number aside.
    pub(super) fn take_pulled(&mut self, now: Time, header: &Header) -> Result<(), Refusal> {
        let (number, block) = (header.seq, header.aside());
        let is_bounded = self.rules.hold(Rule::Deliver);
        let round_trip = self.round_trip();
        let pull = self.pull.as_mut().ok_or(Refusal::Kind)?;
        let window = pull.expected.len() as u32;
        if is_bounded && pull.received.is_newer_than(number) {
            return Err(Refusal::Stale);
        }
        if number.ahead_of(pull.received) >= window as i32 {
            return Err(Refusal::Credit);
        }
        // The packet's own Ack has passed the block: it is not pushed again once its result is here.
        if !self.ack.is_newer_than(block) {
            return Err(Refusal::Ack);
        }
        let index = pull.index(number);
        if is_bounded && pull.expected[index].is_here {
            return Err(Refusal::Duplicate);
        }
        pull.expected[index] = Expected { is_here: true, at: None, tries: 0 };
        pull.known = pull.known.newest(number.plus(1));
        // As in QUIC: what lies three before one that has come was not overtaken but lost.
        pull.expect(number.plus(0u32.wrapping_sub(super::REORDERED as u32 - 1)), now);
        pull.expect(number, now.plus(round_trip));
        while pull.expected[pull.index(pull.received)].is_here {
            let index = pull.index(pull.received);
            pull.expected[index] = Expected::default();
            pull.received = pull.received.plus(1);
        }
        self.made_progress(now);
        self.clock.beats = 0;
        self.report_if_due();
        Ok(())
    }

    /// Requests results that were sent and have not come.
    pub(super) fn pull_missing(&mut self, now: Time) {
        let waits: Vec<u64> = (1..=u32::from(MOST_TRIES)).map(|tries| self.patience(tries)).collect();
        let is_fetched = self.rules.hold(Rule::Request);
        let Some(pull) = &mut self.pull else { return };
        pull.at = None;
        let all: Vec<Serial> = pull.missing().collect();
        for number in all {
            let index = pull.index(number);
            let expected = &mut pull.expected[index];
            let Some(at) = expected.at else { continue };
            if at <= now {
                expected.tries = (expected.tries + 1).min(MOST_TRIES);
                expected.at = Some(now.plus(waits[usize::from(expected.tries) - 1]));
                if is_fetched && !pull.due.contains(&number) {
                    pull.due.push_back(number);
                }
            }
            let at = pull.expected[index].at;
            pull.at = pull.at.into_iter().chain(at).min();
        }
    }

    /// The next request of the pull flow: first at the aggregator above, which most likely has the result.
    pub(super) fn poll_pull(&mut self) -> Option<Outbound> {
        let is_trusted = self.config.ask_parent && !self.way.is_direct && !self.lost;
        let pull = self.pull.as_mut()?;
        while let Some(number) = pull.due.pop_front() {
            let expected = pull.expected[pull.index(number)];
            if pull.received.is_newer_than(number) || expected.is_here {
                continue;
            }
            let above = is_trusted && expected.tries <= ASK_ABOVE;
            let to = if above { self.config.parent } else { self.config.server };
            return Some(Outbound { to, header: self.upward(Kind::Pull, number) });
        }
        None
    }
}

/// From so many requests on the time to the next one grows no more.
const MOST_TRIES: u8 = 8;

#[cfg(test)]
impl Worker {
    /// The results of the pull flow that were sent and are not here.
    pub(crate) fn unpulled(&self) -> Vec<Serial> {
        self.pull.as_ref().map_or_else(Vec::new, |pull| pull.missing().collect())
    }

    /// Requests a result, as after a time-out.
    pub(crate) fn pull_now(&mut self, number: Serial) {
        let is_fetched = self.rules.hold(Rule::Request);
        if let Some(pull) = self.pull.as_mut().filter(|_| is_fetched) {
            let index = pull.index(number);
            pull.expected[index].tries = (pull.expected[index].tries + 1).min(ASK_ABOVE + 1);
            pull.due.push_back(number);
        }
    }
}

#[cfg(test)]
impl Pull {
    /// Hashes all state that decides what the worker does, except time.
    pub(super) fn digest(&self, state: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        (self.received, self.everywhere, self.known).hash(state);
        self.expected.iter().for_each(|expected| (expected.is_here, expected.tries).hash(state));
    }
}
