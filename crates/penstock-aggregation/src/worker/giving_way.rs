//! A worker that gives way to what is more urgent.

use super::Worker;
use penstock_types::Time;

impl Worker {
    /// Pushes no block for the first time before `until`. What has left before is sent again and asked for as ever.
    pub fn hold(&mut self, until: Time) {
        self.held = until;
    }

    /// Whether blocks lack results, none of which has come for longer than they take when no worker is late; `None`: no block does.
    #[must_use]
    pub fn waits_for_others(&self, now: Time) -> Option<bool> {
        let is_late = now.since(self.clock.moved_at) > self.congestion.round_trip();
        (self.next != self.received).then_some(is_late)
    }

    /// Whether blocks leave so that queues on the way are short, for others that are more urgent.
    pub fn keep_short(&mut self, is_short: bool) {
        self.congestion.keep_short(is_short);
    }
}
