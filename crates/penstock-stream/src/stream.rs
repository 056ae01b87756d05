//! One stream's share of the work: how much may be unacknowledged on it, and how fast it is.

use penstock_types::{MILLISECOND, Time};
use std::collections::VecDeque;

use crate::frame::{Header, MAX_FRAME_BYTES, MIN_FRAME_BYTES};

/// What is known about one stream of a peer.
///
/// `window` bounds the unacknowledged bytes on a stream: what the stream delivers in one round trip and a little more. So the
/// stream never runs dry, and a slow stream holds few bytes when the last frames of an operation are due. The kernel's send
/// buffer would take megabytes on the slowest stream; `TCP_NOTSENT_LOWAT` bounds only what is not yet sent, not what waits in
/// the network.
#[derive(Debug)]
pub(crate) struct Stream<F> {
    /// Counted frames sent and not yet acknowledged, oldest first.
    pub(crate) in_flight: VecDeque<InFlight<F>>,
    /// Bytes of `in_flight`, headers included: many small frames add up.
    pub(crate) unacked_bytes: u64,
    /// Counted frames that the peer has acknowledged, modulo 2^32.
    acked_frames: u32,
    /// Counted frames that we took from this stream, modulo 2^32.
    pub(crate) taken_frames: u32,
    /// Whether `taken_frames` has changed since the last acknowledgement.
    pub(crate) owes_ack: bool,
    /// `taken_frames` before the peer's good-bye, while that is not acknowledged.
    pub(crate) before_bye: Option<u32>,
    /// The time in the peer's heartbeat, to be sent back in the reply.
    pub(crate) owes_reply: Option<u64>,
    pub(crate) wants_heartbeat: bool,
    pub(crate) last_heard: Time,
    pub(crate) last_heartbeat: Time,
    /// [`Event::Stalled`](crate::peer::Event::Stalled) was reported.
    pub(crate) stalled: bool,
    delivered: Delivered,
    rates: Rates,
    round_trips: RoundTrips,
    arrivals: Arrivals,
    pub(crate) stats: StreamStats,
}

/// How much a stream may have under way beyond what a round trip takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// What waits delays nothing but the stream itself.
    Own,
    /// The streams share a link: what waits in it delays all of them.
    Shared,
    /// Something urgent may have to pass.
    Urgent,
}

/// A frame on its way.
#[derive(Debug)]
pub(crate) struct InFlight<F> {
    pub(crate) frame: F,
    pub(crate) bytes: u32,
    /// Another stream has taken the frame over, or the frame is not needed any more.
    pub(crate) passed: bool,
    /// The frame was taken over from another stream.
    pub(crate) is_copy: bool,
    sent_at: Time,
    /// When it was sent.
    delivered: Delivered,
}

/// How much a stream has delivered.
#[derive(Clone, Copy, Debug)]
struct Delivered {
    bytes: u64,
    /// When the last of it was acknowledged, or the first frame after a rest was sent.
    at: Time,
}

/// Counters of one stream, for people.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StreamStats {
    /// Payload bytes given to the stream.
    pub sent_bytes: u64,
    /// Payload bytes taken from the stream.
    pub received_bytes: u64,
    /// Frames given to the stream.
    pub sent_frames: u64,
    /// Frames that this stream sent again because another one was slow or lost.
    pub repeated_frames: u64,
    /// Duplicate frames that came on this stream.
    pub duplicate_frames: u64,
    /// Estimated delivery rate, which sets the window and the frame size: at most about 130 MB/s where round trips are short.
    pub rate_bytes_per_s: f64,
    /// Shortest time lately from a frame to its acknowledgement, without the time that the acknowledgement waited in the queue
    /// of the other direction.
    pub round_trip_ns: u64,
    /// Bytes that may be unacknowledged at present.
    pub window_bytes: u64,
}

impl<F> Stream<F> {
    pub(crate) fn new(now: Time) -> Stream<F> {
        Stream {
            in_flight: VecDeque::new(),
            unacked_bytes: 0,
            acked_frames: 0,
            taken_frames: 0,
            owes_ack: false,
            before_bye: None,
            owes_reply: None,
            wants_heartbeat: false,
            last_heard: now,
            last_heartbeat: now,
            stalled: false,
            delivered: Delivered { bytes: 0, at: now },
            rates: Rates::default(),
            round_trips: RoundTrips { least: u64::MAX, least_at: now, best: u64::MAX },
            arrivals: Arrivals::default(),
            stats: StreamStats::default(),
        }
    }

    /// A counted frame with this much payload is sent.
    pub(crate) fn sent(&mut self, frame: F, payload_bytes: u32, now: Time) {
        if self.in_flight.is_empty() {
            // The stream was idle: the time since the last delivery says nothing about its rate.
            self.delivered.at = now;
        }
        let bytes = Header::BYTES as u32 + payload_bytes;
        self.in_flight.push_back(InFlight {
            frame,
            bytes,
            passed: false,
            is_copy: false,
            sent_at: now,
            delivered: self.delivered,
        });
        self.unacked_bytes += u64::from(bytes);
        self.stats.sent_bytes += u64::from(payload_bytes);
        self.stats.sent_frames += 1;
    }

    /// The peer acknowledges frames up to number `ack`: returns how many of `in_flight` that covers. `None` if it acknowledges
    /// frames that were never sent.
    pub(crate) fn count_acknowledged(&mut self, ack: u32) -> Option<usize> {
        let count = ack.wrapping_sub(self.acked_frames) as usize;
        if count > self.in_flight.len() {
            return None;
        }
        self.acked_frames = ack;
        Some(count)
    }

    /// Removes the oldest frame in flight, which is acknowledged.
    pub(crate) fn pop_acknowledged(&mut self) -> InFlight<F> {
        let frame = self.in_flight.pop_front().expect("no more than count_acknowledged said");
        self.unacked_bytes -= u64::from(frame.bytes);
        self.delivered.bytes += u64::from(frame.bytes);
        frame
    }

    /// Updates rate and round trip from the newest frame that an acknowledgement covers.
    pub(crate) fn measure(&mut self, newest: &InFlight<F>, now: Time) {
        self.measure_round_trip(now.since(newest.sent_at), now);
        // Delivery rate as in BBR (draft-cheng-iccrg-delivery-rate-estimation): what was delivered while this frame was
        // on its way, over that time. Where that is little, the sample tells how little there was to send.
        let delivered = self.delivered.bytes - newest.delivered.bytes;
        let elapsed = now.since(newest.delivered.at).max(SAMPLE_TIME);
        let rate = delivered as f64 * 1e9 / elapsed as f64;
        if delivered >= SAMPLE_BYTES || (self.rate() > 0.0 && rate > self.rate()) {
            self.rates.add(rate);
        }
        self.delivered.at = now;
    }

    /// Estimated delivery rate in bytes/s: the highest of the last samples, since late acknowledgements make some too low. 0
    /// before the first.
    pub(crate) fn rate(&self) -> f64 {
        self.rates.highest
    }

    /// The time from a frame to its ack when nothing waits, in nanoseconds. 0 before the first ack.
    pub(crate) fn round_trip(&self) -> u64 {
        self.round_trips.believed()
    }

    /// Learns from a frame of the other direction, which left at `sent_at` on the peer's clock.
    pub(crate) fn measure_arrival(&mut self, sent_at: u32, now: Time) {
        self.arrivals.measure(sent_at, now);
    }

    /// How many bytes may be unacknowledged. Where streams share a link, what waits in it delays all of them, urgent frames too.
    pub(crate) fn window(&self, limit: u64, room: Room) -> u64 {
        let rate = self.rate();
        if rate == 0.0 {
            return FIRST_WINDOW.min(limit);
        }
        let carried = |rate: f64, nanos: u64| rate * nanos as f64 / 1e9;
        // With the best rate, which is too high by what acks jitter, two full directions would lengthen each other's queue.
        let waiting = carried(self.rates.mean(), self.arrivals.wait());
        let least = carried(rate, SLACK_LEAST);
        let (slack, frames) = match room {
            // Another round trip where that takes longer than a frame, which is sent whole.
            Room::Urgent => (carried(rate, self.round_trip()).min(f64::from(self.frame_bytes())), 0),
            Room::Shared => (least, 2 * self.frame_bytes()),
            Room::Own => {
                (carried(rate, SLACK_MOST).min(least.max(SLACK_BYTES)), 2 * self.frame_bytes().max(WINDOW_FRAME))
            }
        };
        ((carried(rate, self.round_trip()) + waiting + slack) as u64 + u64::from(frames)).clamp(1, limit.max(1))
    }

    /// How large a piece to cut for this stream: what it carries in [`FRAME_TIME`], between the bounds.
    pub(crate) fn frame_bytes(&self) -> u32 {
        let rate = self.rate();
        if rate == 0.0 {
            return MIN_FRAME_BYTES;
        }
        let bytes = (rate * FRAME_TIME as f64 / 1e9) as u32;
        (bytes & !(FRAME_GRAIN - 1)).clamp(MIN_FRAME_BYTES, MAX_FRAME_BYTES)
    }

    /// How long until the ack of a frame with `bytes` of this stream unacknowledged up to and including it, in
    /// nanoseconds. `None` while the rate is unknown.
    pub(crate) fn time_to_ack(&self, bytes: u64) -> Option<u64> {
        let rate = self.rate();
        (rate > 0.0).then(|| (bytes as f64 / rate * 1e9) as u64)
    }

    pub(crate) fn awaits_acks(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// For how long this stream has brought no ack, beyond a round trip, although frames are in flight.
    pub(crate) fn silence(&self, now: Time) -> u64 {
        let Some(oldest) = self.in_flight.front() else { return 0 };
        now.since(oldest.sent_at.max(self.delivered.at).plus(self.round_trip()))
    }

    /// A heartbeat was sent on this stream.
    pub(crate) fn ask(&mut self, now: Time) {
        self.wants_heartbeat = true;
        self.last_heartbeat = now;
    }

    /// The reply to the heartbeat that was sent at `asked` has come.
    pub(crate) fn answered(&mut self, asked: Time, now: Time) {
        self.measure_round_trip(now.since(asked), now);
    }

    fn measure_round_trip(&mut self, round_trip: u64, now: Time) {
        self.round_trips.add(round_trip.saturating_sub(self.arrivals.last), now);
    }

    /// Resets the estimate of the round trip to this value.
    #[cfg(test)]
    pub(crate) fn believe_round_trip(&mut self, round_trip: u64, now: Time) {
        self.round_trips = RoundTrips { least: round_trip, least_at: now, best: round_trip };
    }

    pub(crate) fn snapshot(&self, limit: u64, room: Room) -> StreamStats {
        StreamStats {
            rate_bytes_per_s: self.rate(),
            round_trip_ns: self.round_trip(),
            window_bytes: self.window(limit, room),
            ..self.stats
        }
    }
}

/// The last samples of a stream's rate, in bytes/s; 0 where there is none yet.
#[derive(Debug, Default)]
struct Rates {
    samples: [f64; RATE_SAMPLES],
    next: usize,
    highest: f64,
}

impl Rates {
    fn add(&mut self, rate: f64) {
        self.samples[self.next] = rate;
        self.next = (self.next + 1) % RATE_SAMPLES;
        self.highest = self.samples.iter().copied().fold(0.0, f64::max);
    }

    fn mean(&self) -> f64 {
        let known = self.samples.iter().filter(|rate| **rate > 0.0);
        known.clone().sum::<f64>() / known.count().max(1) as f64
    }
}

/// A stream's round trips, in nanoseconds; `u64::MAX` before the first.
#[derive(Debug)]
struct RoundTrips {
    /// The shortest lately, and when it was seen.
    least: u64,
    least_at: Time,
    /// The shortest ever.
    best: u64,
}

impl RoundTrips {
    fn add(&mut self, round_trip: u64, now: Time) {
        if round_trip <= self.least || now.since(self.least_at) > ROUND_TRIP_MEMORY {
            (self.least, self.least_at) = (round_trip, now);
            self.best = self.best.min(round_trip);
        }
    }

    /// While a direction is full for longer than [`ROUND_TRIP_MEMORY`], every round trip includes the queue that our own windows
    /// make, and would lengthen them without end: hence the cap.
    fn believed(&self) -> u64 {
        match self.least {
            u64::MAX => 0,
            least => least.min(2 * self.best + ROUND_TRIP_GROWTH),
        }
    }
}

/// How long frames of the other direction wait on their way, and our acknowledgements with them.
///
/// The clocks of two machines are not related, so the time that a frame takes is unknown. What is known is how much longer it
/// took than the quickest frame lately (as in LEDBAT, RFC 6817). The window has to cover this wait. Otherwise the side with
/// the smaller window loses: with windows of 1.0 MB here and 2.4 MB there over one full link, the whole queue was the other
/// direction's, our acknowledgements waited in it, and this direction carried 60 % of the link while the other one was full.
#[derive(Clone, Copy, Debug, Default)]
struct Arrivals {
    /// The quickest frame of the current [`QUICKEST_MEMORY`] and of the one before: arrival on our clock minus departure on
    /// the peer's, in microseconds modulo 2^32. `None` before the first frame.
    quickest: Option<[u32; 2]>,
    /// When the current [`QUICKEST_MEMORY`] began.
    since: Time,
    /// How much longer the last frame took than the quickest, in nanoseconds.
    last: u64,
    /// The same smoothed over the last frames, in microseconds.
    lately: f64,
}

impl Arrivals {
    fn measure(&mut self, sent_at: u32, now: Time) {
        let took = clock(now).wrapping_sub(sent_at);
        let longer = |than: u32| took.wrapping_sub(than) as i32;
        let [mut lately, mut before] = self.quickest.unwrap_or([took; 2]);
        if now.since(self.since) > QUICKEST_MEMORY {
            (lately, before) = (took, lately);
            self.since = now;
        } else if longer(lately) < 0 {
            lately = took;
        }
        self.quickest = Some([lately, before]);
        let waited = longer(lately).max(longer(before)).clamp(0, WAIT_MOST);
        self.last = waited as u64 * 1_000;
        self.lately += (f64::from(waited) - self.lately) / WAIT_SAMPLES;
    }

    /// How long a frame waits at present, in nanoseconds.
    fn wait(&self) -> u64 {
        (self.lately * 1e3) as u64
    }
}

/// A frame's `sent_at`: microseconds, modulo 2^32.
pub(crate) fn clock(now: Time) -> u32 {
    (now.0 / 1_000) as u32
}

/// How long a quickest frame counts, at most twice: clocks drift apart, and paths get longer.
const QUICKEST_MEMORY: u64 = 5_000 * MILLISECOND;
/// Number of frames over which their wait is smoothed: a few milliseconds of a stream.
const WAIT_SAMPLES: f64 = 8.0;
/// The longest wait that is believed, in microseconds: no peer can make our windows longer than this time at a stream's rate.
const WAIT_MOST: i32 = 100_000;
/// Enough to outlive a burst of small frames, few enough to follow a stream that slows down.
const RATE_SAMPLES: usize = 8;
/// A sample over fewer bytes is mostly round trip: it may raise the estimate, not lower it.
const SAMPLE_BYTES: u64 = 96 * 1024;
/// A sample is taken to last this long at least: after a pause, a token bucket lets a burst through at once, and a stream that
/// takes this for its rate fills its window with more than it delivers in a tenth of a second, which others then take over.
/// With 1 us, DDP's two buckets (1 and 10 MB, 200 Mbit/s a flow) sent 21 and 22 % of their bytes twice and took 115 and 117 ms;
/// with 4 ms, 8 % and 108 to 109 ms; with this, 6 to 7 % and 107 to 113 ms; 16 ms would keep frames small on fast links. It
/// bounds what is believed of a stream to some 130 MB/s where round trips are shorter, which is enough for frames of full size
/// and, with the slack, for windows that fill 1 GB/s over a round trip of up to 1 ms (virtual). What it costs: with 2 to 4 ms one
/// such stream alone gets 54 to 69 % of it; two of half the rate get 97 %.
const SAMPLE_TIME: u64 = 8 * MILLISECOND;
/// The minimum round trip is believed for this long, as in BBR.
const ROUND_TRIP_MEMORY: u64 = 10_000 * MILLISECOND;
/// A measured round trip counts as at most twice the last one and this much more. A larger bound lets queues grow by as much;
/// a smaller one starves streams whose path became longer.
const ROUND_TRIP_GROWTH: u64 = 20 * MILLISECOND;
/// Queue that a stream may hold beyond its round trip and two frames: covers the jitter of acks, which wait for the ends
/// of frames in the other direction. Smaller starves streams; larger leaves more on a slow one at the end. Eight frames'
/// worth of bytes, between these times: with 8 ms throughout, up to 4 % of the frames of 64 MiB over loopback (1 GB/s,
/// 2 cores) left twice, now 0.5 %; with 4 ms, 8 x 100 Mbit/s both ways (virtual) lost a twentieth.
const SLACK_BYTES: f64 = 512.0 * 1024.0;
const SLACK_LEAST: u64 = 2 * MILLISECOND;
const SLACK_MOST: u64 = 8 * MILLISECOND;
/// A window holds two frames of this size at least, beside what a round trip and the slack take: with 16 KiB, 8 x 100 Mbit/s both
/// ways got 85 % of a long way, with 64 KiB an urgent message waited 109 ms for a link of 100 Mbit/s instead of 67 (virtual).
const WINDOW_FRAME: u32 = 32 * 1024;
/// Before the first ack: carries 200 Mbit/s over 20 ms.
const FIRST_WINDOW: u64 = 512 * 1024;
/// A frame should take about this long, so that an urgent one need not wait and the tail is short.
const FRAME_TIME: u64 = 2 * MILLISECOND;
/// Cuts are multiples of this, hence of every element size and of a page.
pub(crate) const FRAME_GRAIN: u32 = 16 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    /// What a token bucket lets through at once after a pause is not taken for the stream's rate; what lasts is.
    #[test]
    fn a_burst_is_no_rate() {
        let mut stream = Stream::new(Time(0));
        let mut now = Time(SAMPLE_TIME);
        let deliver = |stream: &mut Stream<u32>, now: Time, after: u64| {
            stream.sent(0, MAX_FRAME_BYTES, now);
            let frame = stream.pop_acknowledged();
            let acked = now.plus(after);
            stream.measure(&frame, acked);
            acked
        };
        deliver(&mut stream, now, MILLISECOND / 10);
        assert!(stream.rate() < 34e6, "{}", stream.rate());
        for _ in 0..2 * RATE_SAMPLES {
            now = deliver(&mut stream, now.plus(50 * MILLISECOND), 20 * MILLISECOND);
        }
        assert!((13e6..13.2e6).contains(&stream.rate()), "{}", stream.rate());
    }
}
