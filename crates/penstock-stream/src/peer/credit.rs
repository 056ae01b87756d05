//! Eager credit: how many bytes of messages may lie at the receiver for operations that it has not posted.

use crate::frame::{FrameError, Header};
use crate::ranges::Ranges;
use std::ops::Range;

/// Eager bytes in both directions, as running totals: lost or repeated updates do no harm.
#[derive(Debug, Default)]
pub(super) struct Credit {
    /// Credit given to our messages so far.
    pub(super) reserved: u64,
    /// Credit of messages that have left.
    pub(super) used: u64,
    /// Credit that the peer has returned.
    pub(super) returned: u64,
    /// Which part of the peer's account has arrived.
    pub(super) counted: Ranges,
    /// Credit that was consumed here.
    pub(super) consumed: u64,
    /// The value of `consumed` that was sent to the peer last.
    pub(super) told: u64,
    pub(super) owes_update: bool,
}

impl Credit {
    pub(super) fn fits(&self, total: u64, limit: u64) -> bool {
        self.reserved - self.returned + eager_cost(total) <= limit
    }

    /// Reserves credit for a message. Returns false if there is not enough.
    pub(super) fn reserve(&mut self, total: u64, limit: u64) -> bool {
        let fits = self.fits(total, limit);
        if fits {
            self.reserved += eager_cost(total);
        }
        fits
    }

    pub(super) fn handle_returned(&mut self, credit: u64) -> Result<(), FrameError> {
        if credit > self.used {
            return Err(FrameError::OutOfTurn("it returns credit that was never used"));
        }
        self.returned = self.returned.max(credit);
        Ok(())
    }

    /// The range of the sender's account that an eager message occupies.
    pub(super) fn place(header: &Header) -> Range<u64> {
        header.serial.saturating_sub(eager_cost(header.total))..header.serial
    }

    /// Refuses a message beyond the limit, so that this side never holds more.
    pub(super) fn check_used(&self, header: &Header, limit: u64) -> Result<(), FrameError> {
        let place = Credit::place(header);
        if place.end - place.start < eager_cost(header.total) || place.end > self.consumed.saturating_add(limit) {
            return Err(FrameError::OutOfTurn("eager messages beyond the credit"));
        }
        if self.counted.overlaps(&place) && !self.counted.covers(&place) {
            return Err(FrameError::OutOfTurn("an eager message on the credit of another"));
        }
        Ok(())
    }

    pub(super) fn is_counted(&self, header: &Header) -> bool {
        self.counted.covers(&Credit::place(header))
    }

    /// Records a complete eager message. Returns false for a duplicate.
    pub(super) fn count(&mut self, header: &Header) -> Result<bool, FrameError> {
        let place = Credit::place(header);
        let new = !self.counted.covers(&place);
        if new && self.counted.overlaps(&place) {
            return Err(FrameError::OutOfTurn("an eager message on the credit of another"));
        }
        self.counted.insert(place);
        Ok(new)
    }

    pub(super) fn consume(&mut self, total: u64, limit: u64) {
        self.consumed += eager_cost(total);
        if self.consumed - self.told >= limit / 4 {
            self.owes_update = true;
        }
    }
}

/// Credit that an eager message costs: its bytes, and what the receiver needs to remember it.
pub(super) fn eager_cost(total: u64) -> u64 {
    total + 128
}
