//! A virtual network: streams as pipes with a rate, a delay and a buffer, and a link that they share.
//!
//! A fluid model: the bytes at the head of every pipe leave at the pipe's share of the link (max-min fair, never above
//! the pipe's own rate) and arrive a delay later. Nothing here knows the machine under test.

use penstock_types::Time;
use std::collections::VecDeque;

/// One direction between two nodes.
#[derive(Debug)]
pub(super) struct Link<P> {
    /// What all pipes together carry.
    capacity_bytes_per_s: f64,
    pub(super) pipes: Vec<Pipe<P>>,
    /// Up to when the pipes' heads have been moved on.
    at: Time,
    /// The set of pipes that send, or a rate, has changed: the shares are stale.
    changed: bool,
    /// When the next head leaves or the next piece arrives, once known.
    next: Option<Time>,
}

/// One direction of a stream.
#[derive(Clone, Debug)]
pub(super) struct Pipe<P> {
    pub(super) rate_bytes_per_s: f64,
    pub(super) delay: u64,
    /// It takes another frame while fewer bytes than this wait, like a socket's send buffer.
    pub(super) buffer_bytes: u64,
    waiting: VecDeque<(f64, P)>,
    waiting_bytes: f64,
    share: f64,
    /// Somebody found no room.
    awaited: bool,
    /// Sent, not yet arrived.
    air: VecDeque<(Time, P)>,
}

impl<P> Pipe<P> {
    pub(super) fn new(rate_bytes_per_s: f64, delay: u64, buffer_bytes: u64) -> Pipe<P> {
        let (waiting, air) = (VecDeque::new(), VecDeque::new());
        Pipe { rate_bytes_per_s, delay, buffer_bytes, waiting, waiting_bytes: 0.0, share: 0.0, awaited: false, air }
    }

    /// Whether it takes another frame now. If not, [`Link::has_news`] will tell when it does.
    pub(super) fn has_room(&mut self) -> bool {
        self.awaited = self.waiting_bytes >= self.buffer_bytes as f64;
        !self.awaited
    }

    /// What has not arrived is lost.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.waiting_bytes = 0.0;
        self.air.clear();
    }
}

impl<P> Link<P> {
    pub(super) fn new(capacity_bytes_per_s: f64, pipes: Vec<Pipe<P>>) -> Link<P> {
        Link { capacity_bytes_per_s, pipes, at: Time(0), changed: true, next: None }
    }

    pub(super) fn push(&mut self, pipe: usize, bytes: u64, piece: P, now: Time) {
        self.advance(now);
        let pipe = &mut self.pipes[pipe];
        if pipe.waiting.is_empty() {
            self.changed = true;
            self.next = None;
        }
        pipe.waiting.push_back((bytes as f64, piece));
        pipe.waiting_bytes += bytes as f64;
    }

    /// Changes a pipe between two moments.
    pub(super) fn change(&mut self, pipe: usize, now: Time, change: impl FnOnce(&mut Pipe<P>)) {
        self.advance(now);
        change(&mut self.pipes[pipe]);
        self.changed = true;
        self.next = None;
    }

    /// Moves the heads on to `now`.
    pub(super) fn advance(&mut self, now: Time) {
        if now == self.at {
            return;
        }
        if self.next.is_none_or(|next| next <= now) {
            self.next = None;
        }
        let elapsed = now.since(self.at) as f64 / 1e9;
        self.at = now;
        for pipe in &mut self.pipes {
            let Some((left, _)) = pipe.waiting.front_mut() else { continue };
            let moved = (pipe.share * elapsed).min(*left);
            *left -= moved;
            pipe.waiting_bytes -= moved;
            // Moments are whole nanoseconds, so a head may be late by less than a byte.
            while pipe.waiting.front().is_some_and(|(left, _)| *left < 1e-3) {
                let (left, piece) = pipe.waiting.pop_front().expect("looked at");
                pipe.waiting_bytes -= left;
                pipe.air.push_back((now.plus(pipe.delay), piece));
                self.changed |= pipe.waiting.is_empty();
            }
        }
    }

    /// When the next head leaves or the next piece arrives.
    pub(super) fn next(&mut self) -> Time {
        if let Some(next) = self.next {
            return next;
        }
        if std::mem::take(&mut self.changed) {
            self.divide();
        }
        let mut next = Time(u64::MAX);
        for pipe in &self.pipes {
            if let Some((left, _)) = pipe.waiting.front()
                && pipe.share > 0.0
            {
                next = next.min(self.at.plus((left / pipe.share * 1e9).ceil().max(1.0) as u64));
            }
            if let Some((at, _)) = pipe.air.front() {
                next = next.min(*at);
            }
        }
        self.next = Some(next);
        next
    }

    /// Whether a pipe has room that had none when it was asked.
    pub(super) fn has_news(&self) -> bool {
        self.pipes.iter().any(|pipe| pipe.awaited && pipe.waiting_bytes < pipe.buffer_bytes as f64)
    }

    /// The next piece that has arrived, and its pipe.
    pub(super) fn arrived(&mut self, now: Time) -> Option<(usize, P)> {
        for (id, pipe) in self.pipes.iter_mut().enumerate() {
            if pipe.air.front().is_some_and(|(at, _)| *at <= now) {
                self.next = None;
                return pipe.air.pop_front().map(|(_, piece)| (id, piece));
            }
        }
        None
    }

    /// Max-min fair shares.
    fn divide(&mut self) {
        let mut left = self.capacity_bytes_per_s;
        let mut open = 0;
        for pipe in &mut self.pipes {
            pipe.share = f64::NAN;
            open += usize::from(!pipe.waiting.is_empty());
        }
        loop {
            let fair = left / open as f64;
            let mut fixed = 0;
            for pipe in &mut self.pipes {
                if !pipe.waiting.is_empty() && pipe.share.is_nan() && pipe.rate_bytes_per_s <= fair {
                    pipe.share = pipe.rate_bytes_per_s;
                    left -= pipe.share;
                    fixed += 1;
                }
            }
            open -= fixed;
            if fixed == 0 || open == 0 {
                let fair = left / open.max(1) as f64;
                for pipe in &mut self.pipes {
                    if pipe.share.is_nan() {
                        pipe.share = if pipe.waiting.is_empty() { 0.0 } else { fair };
                    }
                }
                return;
            }
        }
    }
}

/// The model itself: a shared link is divided fairly, a slow pipe leaves its share to the others.
#[test]
fn shares_are_max_min_fair() {
    let pipes = [10.0, 100.0, 100.0].map(|rate| Pipe::new(rate, 5, 1)).to_vec();
    let mut link = Link::new(110.0, pipes);
    for pipe in 0..3 {
        link.push(pipe, 100, pipe, Time(0));
    }
    let mut arrivals = Vec::new();
    loop {
        let now = link.next();
        if now == Time(u64::MAX) {
            break;
        }
        link.advance(now);
        while let Some((_, piece)) = link.arrived(now) {
            arrivals.push((piece, now.0));
        }
    }
    assert_eq!(arrivals, [(1, 2_000_000_005), (2, 2_000_000_005), (0, 10_000_000_005)]);
}
