//! When the peer was heard: heartbeats, silent streams, and a peer that is silent on all of them.

use super::{Event, Peer, StreamId};
use penstock_types::{MILLISECOND, Time};

impl Peer {
    /// Bytes have arrived on a stream, perhaps only a part of a frame: the peer is alive. Without this, a frame that takes
    /// longer than `dead_after` would look like silence.
    pub fn heard(&mut self, stream: StreamId, now: Time) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.last_heard = now;
            stream.stalled = false;
            let round_trip = stream.round_trip();
            self.heard_at(now, round_trip);
        }
    }

    /// This process did not run for `time` (it was stopped, or starved). That time does not count as a peer's silence: peers
    /// that were stopped with it have not sent anything yet either.
    fn was_away(&mut self, time: u64, now: Time) {
        self.last_heard = self.last_heard.plus(time).min(now);
        (self.alive_since, self.awake_since) = (now, now);
    }

    pub(super) fn heard_at(&mut self, now: Time, round_trip: u64) {
        if now.since(self.last_heard) > 2 * self.config.heartbeat_every {
            self.alive_since = now;
        }
        if now.since(self.last_heard) > 2 * ASK_EVERY + 4 * round_trip {
            self.awake_since = now;
        }
        self.last_heard = now;
        self.silent = false;
    }

    /// When [`Peer::handle_timeout`] is due. Ask again after every other call. The answer does not depend on `now`; it lies in
    /// the past when the call is due.
    #[must_use]
    pub fn poll_timeout(&self, _now: Time) -> Time {
        let mut next = self.next_check;
        if !self.silent {
            next = next.min(self.last_heard.plus(self.config.dead_after + 1));
        }
        let busy = self.streams.values().filter(|stream| !stream.in_flight.is_empty()).count();
        if busy > 0 && self.streams.len() > 1 {
            next = next.min(self.next_look);
        }
        next
    }

    /// Checks for silence; [`Peer::poll_frame`] afterwards checks for frames to take over. Feed all received bytes first:
    /// bytes that wait in a socket are not silence.
    pub fn handle_timeout(&mut self, now: Time) {
        let late = now.since(self.next_check);
        if late > self.config.heartbeat_every {
            self.was_away(late, now);
        }
        self.next_look = now.plus(TAKE_OVER_CHECK);
        let silent = now.since(self.last_heard);
        if silent > self.config.dead_after && !self.silent {
            self.silent = true;
            self.events.push_back(Event::Silent);
        }
        if now < self.next_check {
            return;
        }
        let every = self.config.heartbeat_every;
        self.next_check = now.plus(every / 2);
        for (id, stream) in &mut self.streams {
            let stream_silent = now.since(stream.last_heard);
            if stream_silent > every && now.since(stream.last_heartbeat) > every {
                stream.ask(now);
            }
            // The peer is alive, since other streams bring its frames, but this stream is silent. After a pause of the whole
            // peer, the first stream that is heard again does not make the others stalled.
            let stalled = now.since(stream.last_heard.max(self.alive_since)) > self.config.dead_after / 2;
            if stalled && silent < every && !stream.stalled {
                stream.stalled = true;
                self.events.push_back(Event::Stalled(*id));
            }
        }
    }
}

/// An idle stream sends a heartbeat this often, or every two round trips, while another stream is silent for too long.
pub(super) const ASK_EVERY: u64 = 20 * MILLISECOND;
/// How often idle streams look for frames to take over.
const TAKE_OVER_CHECK: u64 = 4 * MILLISECOND;
