//! What an idle stream does about a slower one: it repeats the frame that the slower one would deliver last.

use super::outgoing::{Copied, FrameId};
use super::time::ASK_EVERY;
use super::{Peer, StreamId};
use penstock_types::{MILLISECOND, Time};

/// What an idle stream can do about a slower one.
pub(super) enum TakeOver {
    Frame(FrameId),
    Ask,
    Nothing,
}

/// Whether the streams share a link, as it shows in copies that came too late.
#[derive(Debug)]
pub(super) struct Sharing {
    /// Factor on [`TAKE_OVER_RATIO`] and [`TAKE_OVER_MARGIN`]: how long an idle stream waits before it takes a frame over.
    /// Grows with each copy that turned out to be a duplicate.
    pub(super) patience: f64,
    /// The peer's newest frame said that they do ([`FLAG_SHARED`](super::FLAG_SHARED)).
    pub(super) is_found_there: bool,
}

impl Default for Sharing {
    fn default() -> Sharing {
        Sharing { patience: 1.0, is_found_there: false }
    }
}

impl<C: Copied> Peer<C> {
    /// The frame that a slower stream will deliver last, if this idle stream would deliver it much sooner.
    ///
    /// A stream without acknowledgements need not be slow: the whole peer may be busy, and copies would only add to its work.
    /// Such a stream's silence therefore counts only while the peer was awake and was heard on other streams; if it was not
    /// heard, this stream sends a heartbeat.
    ///
    /// The streams may share a link that none of them fills. A copy then comes after what is on the way already, and delays
    /// all of it. This side cannot see that directly, but the outcome of copies shows it: after a duplicate, all idle streams
    /// wait longer; after a copy that arrived first, a little less. Without this, half of 11 MB over a link of 200 Mbit/s and
    /// 32 streams left twice.
    ///
    /// A stream delivers last what it sent last, so its frames are searched from the end. A frame that was taken over is
    /// skipped from then on: its new stream may lose it to a third one, but no stream takes it twice. Costs one comparison a
    /// stream while no stream is slow.
    pub(super) fn take_over(&mut self, idle: StreamId, now: Time) -> TakeOver {
        let Peer { streams, controls, outbox, sharing, .. } = self;
        let own = &streams[&idle];
        let (own_bytes, own_round_trip, own_rate) = (own.unacked_bytes, own.round_trip(), own.rate());
        let may_ask = now.since(own.last_heartbeat) > ASK_EVERY.max(2 * own_round_trip);
        let limit = |bytes: u32| {
            let ours = match own_rate {
                0.0 if own_round_trip == 0 => FIRST_DELIVERY,
                0.0 => own_round_trip + FIRST_FRAME,
                rate => ((own_bytes + u64::from(bytes)) as f64 / rate * 1e9) as u64 + own_round_trip,
            };
            ((TAKE_OVER_RATIO * ours + TAKE_OVER_MARGIN) as f64 * sharing.patience) as u64
        };
        // The streams that carry a frame; none if the frame is acknowledged or forgotten.
        let copies = |frame| match frame {
            FrameId::Control(id) => controls.frames.get(&id).map(|control| control.copies),
            FrameId::Data { issue, index } => {
                let frame = &outbox.messages.get(&issue)?.frames[index as usize];
                (!frame.acked).then_some(frame.copies)
            }
        };
        let mut worst: Option<(u64, StreamId, usize)> = None;
        let mut ask = false;
        for (id, stream) in streams.iter_mut().filter(|(id, _)| **id != idle) {
            let known = stream.silence(self.hearing.last).min(self.hearing.last.since(self.hearing.awake_since));
            let possible = stream.silence(now);
            let mut bytes = stream.unacked_bytes;
            for at in (0..stream.in_flight.len()).rev() {
                let estimate = stream.time_to_ack(bytes).unwrap_or(0);
                let theirs = estimate.max(known);
                let in_flight = &mut stream.in_flight[at];
                let limit = limit(in_flight.bytes);
                if estimate.max(possible) <= limit || worst.is_some_and(|(time, ..)| theirs <= time) {
                    break;
                }
                bytes -= u64::from(in_flight.bytes);
                if in_flight.passed {
                    continue;
                }
                match copies(in_flight.frame) {
                    None => in_flight.passed = true,
                    Some(copies) if copies.count == MAX_COPIES || copies.are_on(idle) => {}
                    Some(_) if theirs <= limit => {
                        ask = may_ask;
                        break;
                    }
                    Some(_) => {
                        worst = Some((theirs, *id, at));
                        break;
                    }
                }
            }
        }
        if let Some((_, id, at)) = worst {
            let in_flight = &mut streams.get_mut(&id).expect("found above").in_flight[at];
            in_flight.passed = true;
            return TakeOver::Frame(in_flight.frame);
        }
        if ask { TakeOver::Ask } else { TakeOver::Nothing }
    }

    /// Whether copies turn out to be duplicates again and again, on either side: some link carries less than the sum of the
    /// streams.
    ///
    /// Both nodes do the same. With the windows of a shared link on one side and long ones on the other, 16 flows of 200 Mbit/s over
    /// 1 Gbit/s carried 93 % of the link instead of 98 (virtual), though windows cover what acks wait for; when they did not, a third.
    pub(super) fn share_a_link(&self) -> bool {
        self.sharing.patience >= PATIENCE_SHARED || self.sharing.is_found_there
    }
}

/// An idle stream takes a frame over if it expects to be this many times faster, and by [`TAKE_OVER_MARGIN`].
const TAKE_OVER_RATIO: u64 = 2;
/// ... and earlier by this much: the copies cross the same link, and the other streams get faster when this one rests. With 6
/// ms, a sixth of all bytes of 11 MB over 16 x 200 Mbit/s left twice, with 20 ms a tenth, in as much time; with 40 ms, streams
/// of 60 and 300 Mbit/s wait longer for the slow ones.
const TAKE_OVER_MARGIN: u64 = 20 * MILLISECOND;
/// Factors on the patience of idle streams after a copy that arrived first, and after a duplicate. Patience is 1 to 64.
pub(super) const PATIENCE_WON: f64 = 0.75;
pub(super) const PATIENCE_LOST: f64 = 2.0;
pub(super) const PATIENCE_MOST: f64 = 64.0;
/// From this on the streams are taken to share a link, whose queue then holds less of each. Steps of char-gpt over 200 Mbit/s and
/// 32 streams, which held some megabytes in it, took 630 to 675 ms; so 578 to 583, with frames of 16 KiB, by turns. Streams
/// that share nothing need more: with 4 ms and two such frames, equal ones got 88 % of their sum both ways (virtual). Other
/// thresholds were not tried.
pub(super) const PATIENCE_SHARED: f64 = 4.0;
/// A frame is in flight on at most this many streams at a time: when the whole peer pauses, copies only delay it.
pub(super) const MAX_COPIES: u16 = 3;
/// How long a frame is expected to take on a stream that has carried nothing yet: a round trip between continents.
const FIRST_DELIVERY: u64 = 100 * MILLISECOND;
/// How long a frame is expected to take beyond the round trip on a stream whose rate is unknown: a frame at 50 Mbit/s.
const FIRST_FRAME: u64 = 10 * MILLISECOND;
