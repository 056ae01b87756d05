//! When the peer was heard: heartbeats, silent streams, and a peer that is silent on all of them.

use super::outgoing::Copied;
use super::{Event, Peer, PeerConfig, StreamId};
use penstock_types::{MILLISECOND, Time};

/// When the peer was heard, and when to look again.
#[derive(Debug)]
pub(super) struct Hearing {
    /// On any stream.
    pub(super) last: Time,
    /// Since when the peer has been heard without a pause longer than a heartbeat interval.
    pub(super) alive_since: Time,
    /// Since when the peer has been heard without a pause longer than [`ASK_EVERY`].
    pub(super) awake_since: Time,
    /// [`Event::Silent`] was reported, and nothing has come since.
    pub(super) is_silent: bool,
    /// For silence.
    pub(super) next_check: Time,
    /// For frames to take over.
    pub(super) next_look: Time,
}

impl Hearing {
    pub(super) fn new(config: &PeerConfig, now: Time) -> Hearing {
        let next_check = now.plus(config.heartbeat_every / 2);
        Hearing { last: now, alive_since: now, awake_since: now, is_silent: false, next_check, next_look: now }
    }
}

impl<C: Copied> Peer<C> {
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
        self.hearing.last = self.hearing.last.plus(time).min(now);
        (self.hearing.alive_since, self.hearing.awake_since) = (now, now);
    }

    pub(super) fn heard_at(&mut self, now: Time, round_trip: u64) {
        if now.since(self.hearing.last) > 2 * self.config.heartbeat_every {
            self.hearing.alive_since = now;
        }
        if now.since(self.hearing.last) > 2 * ASK_EVERY + 4 * round_trip {
            self.hearing.awake_since = now;
        }
        self.hearing.last = now;
        self.hearing.is_silent = false;
    }

    /// When [`Peer::handle_timeout`] is due. Ask again after every other call. The answer does not depend on `now`; it lies in
    /// the past when the call is due.
    #[must_use]
    pub fn poll_timeout(&self, _now: Time) -> Time {
        let mut next = self.hearing.next_check;
        if !self.hearing.is_silent {
            next = next.min(self.hearing.last.plus(self.config.dead_after + 1));
        }
        let busy = self.streams.values().filter(|stream| !stream.in_flight.is_empty()).count();
        if busy > 0 && self.streams.len() > 1 {
            next = next.min(self.hearing.next_look);
        }
        self.pauses.end().map_or(next, |end| next.min(end))
    }

    /// Checks for silence; [`Peer::poll_frame`] afterwards checks for frames to take over. Feed all received bytes first:
    /// bytes that wait in a socket are not silence.
    pub fn handle_timeout(&mut self, now: Time) {
        let late = now.since(self.hearing.next_check);
        if late > self.config.heartbeat_every {
            self.was_away(late, now);
        }
        self.hearing.next_look = now.plus(TAKE_OVER_CHECK);
        self.pauses.handle_timeout(now);
        let silent = now.since(self.hearing.last);
        if silent > self.config.dead_after && !self.hearing.is_silent {
            self.hearing.is_silent = true;
            self.events.push_back(Event::Silent);
        }
        if now < self.hearing.next_check {
            return;
        }
        let every = self.config.heartbeat_every;
        self.hearing.next_check = now.plus(every / 2);
        for (id, stream) in &mut self.streams {
            let stream_silent = now.since(stream.last_heard);
            if stream_silent > every && now.since(stream.last_heartbeat) > every {
                stream.ask(now);
            }
            // The peer is alive, since other streams bring its frames, but this stream is silent. After a pause of the whole
            // peer, the first stream that is heard again does not make the others stalled.
            let stalled = now.since(stream.last_heard.max(self.hearing.alive_since)) > self.config.dead_after / 2;
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
