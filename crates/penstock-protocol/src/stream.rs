//! One stream's share of the work: how much may be unacknowledged on it, and how fast it is.

use penstock_types::{MILLISECOND, Time};
use std::collections::VecDeque;

use crate::frame::{MAX_FRAME_BYTES, MIN_FRAME_BYTES};

/// What is known about one stream of a peer.
///
/// The unacknowledged bytes on a stream are bounded by `window`: what the stream delivers in one round trip and a
/// little more, so that it never runs dry, and a slow stream holds few bytes when the last frames of an operation
/// are due. The kernel's send buffer would take megabytes on the slowest stream; `TCP_NOTSENT_LOWAT` bounds only what
/// is not yet sent, not what waits in the network.
#[derive(Debug)]
pub(crate) struct Stream<F> {
    /// Counted frames sent and not yet acknowledged, oldest first.
    pub(crate) in_flight: VecDeque<InFlight<F>>,
    /// Payload bytes of `in_flight`.
    pub(crate) unacked_bytes: u64,
    /// Counted frames that the peer said it took, modulo 2^32.
    acked_frames: u32,
    /// Counted frames that we took from this stream, modulo 2^32.
    pub(crate) taken_frames: u32,
    /// Whether the peer does not know `taken_frames` yet.
    pub(crate) owes_ack: bool,
    pub(crate) owes_reply: bool,
    pub(crate) wants_heartbeat: bool,
    pub(crate) last_heard: Time,
    pub(crate) last_heartbeat: Time,
    delivered_bytes: u64,
    delivered_at: Time,
    rates: [f64; RATE_SAMPLES],
    next_rate: usize,
    min_round_trip: u64,
    min_round_trip_at: Time,
    pub(crate) stats: StreamStats,
}

/// A frame on its way.
#[derive(Debug)]
pub(crate) struct InFlight<F> {
    pub(crate) frame: F,
    pub(crate) bytes: u32,
    pub(crate) sent_at: Time,
    delivered_bytes: u64,
    delivered_at: Time,
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
    /// Frames that this stream carried a second time because another one was slow or lost.
    pub repeated_frames: u64,
    /// Frames that came although another stream had brought them already.
    pub duplicate_frames: u64,
    /// Estimated delivery rate.
    pub rate_bytes_per_s: f64,
    /// Shortest time from a frame to its ack, lately.
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
            owes_reply: false,
            wants_heartbeat: false,
            last_heard: now,
            last_heartbeat: now,
            delivered_bytes: 0,
            delivered_at: now,
            rates: [0.0; RATE_SAMPLES],
            next_rate: 0,
            min_round_trip: u64::MAX,
            min_round_trip_at: now,
            stats: StreamStats::default(),
        }
    }

    /// A counted frame goes out.
    pub(crate) fn sent(&mut self, frame: F, bytes: u32, now: Time) {
        if self.in_flight.is_empty() {
            // The stream was idle: the time since the last delivery says nothing about its rate.
            self.delivered_at = now;
        }
        self.in_flight.push_back(InFlight {
            frame,
            bytes,
            sent_at: now,
            delivered_bytes: self.delivered_bytes,
            delivered_at: self.delivered_at,
        });
        self.unacked_bytes += u64::from(bytes);
        self.stats.sent_bytes += u64::from(bytes);
        self.stats.sent_frames += 1;
    }

    /// The peer took counted frames up to number `ack`. Returns those that are done, or `None` for an ack of frames
    /// that were never sent.
    pub(crate) fn acknowledged(&mut self, ack: u32, now: Time) -> Option<Vec<F>> {
        let count = ack.wrapping_sub(self.acked_frames) as usize;
        if count > u32::MAX as usize / 2 {
            return Some(Vec::new()); // An older ack that was overtaken: cannot happen in order, harmless if it does.
        }
        if count > self.in_flight.len() {
            return None;
        }
        self.acked_frames = ack;
        let mut done = Vec::with_capacity(count);
        let mut newest = None;
        for frame in self.in_flight.drain(..count) {
            self.unacked_bytes -= u64::from(frame.bytes);
            self.delivered_bytes += u64::from(frame.bytes);
            if frame.bytes > 0 {
                newest = Some((frame.sent_at, frame.delivered_bytes, frame.delivered_at));
            }
            done.push(frame.frame);
        }
        if let Some((sent_at, delivered_bytes, delivered_at)) = newest {
            let round_trip = now.since(sent_at);
            if round_trip <= self.min_round_trip || now.since(self.min_round_trip_at) > ROUND_TRIP_MEMORY {
                self.min_round_trip = round_trip;
                self.min_round_trip_at = now;
            }
            // Delivery rate as in BBR (draft-cheng-iccrg-delivery-rate-estimation): what was delivered while this
            // frame was on its way, over that time.
            let elapsed = now.since(delivered_at).max(now.since(sent_at)).max(1_000);
            let rate = (self.delivered_bytes - delivered_bytes) as f64 * 1e9 / elapsed as f64;
            self.rates[self.next_rate] = rate;
            self.next_rate = (self.next_rate + 1) % RATE_SAMPLES;
            self.delivered_at = now;
        }
        Some(done)
    }

    /// Estimated delivery rate in bytes/s: the best of the last samples, since a sample taken while there was little
    /// to send is too low. 0 before the first.
    pub(crate) fn rate(&self) -> f64 {
        self.rates.iter().copied().fold(0.0, f64::max)
    }

    pub(crate) fn round_trip(&self) -> u64 {
        if self.min_round_trip == u64::MAX { 0 } else { self.min_round_trip }
    }

    /// How many bytes may be unacknowledged.
    pub(crate) fn window(&self, limit: u64) -> u64 {
        let rate = self.rate();
        if rate == 0.0 {
            return FIRST_WINDOW.min(limit);
        }
        let carried = rate * (self.round_trip() + WINDOW_SLACK) as f64 / 1e9;
        (carried as u64 + 2 * u64::from(self.frame_bytes())).min(limit)
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

    /// When what is unacknowledged now, and `more` bytes, will be delivered, in nanoseconds from now.
    pub(crate) fn time_to_deliver(&self, more: u64, now: Time) -> u64 {
        let bytes = (self.unacked_bytes + more) as f64;
        let rate = self.rate();
        if rate == 0.0 {
            // Unknown: as long as the oldest has been on its way already.
            return self.in_flight.front().map_or(0, |oldest| 2 * now.since(oldest.sent_at));
        }
        let estimate = (bytes / rate * 1e9) as u64;
        // A stream that has gone silent will not keep its old rate.
        let silence = self.in_flight.front().map_or(0, |oldest| now.since(oldest.sent_at.max(self.delivered_at)));
        estimate.max(silence)
    }

    pub(crate) fn snapshot(&self, limit: u64) -> StreamStats {
        StreamStats {
            rate_bytes_per_s: self.rate(),
            round_trip_ns: self.round_trip(),
            window_bytes: self.window(limit),
            ..self.stats
        }
    }
}

/// Enough to outlive a burst of small frames, few enough to follow a stream that slows down.
const RATE_SAMPLES: usize = 8;
/// The minimum round trip is believed for this long, as in BBR.
const ROUND_TRIP_MEMORY: u64 = 10_000 * MILLISECOND;
/// Queue that a stream may hold beyond its round trip: covers the jitter of acks that wait for a frame's end in the
/// other direction. Smaller starves streams on a busy host, larger leaves more on a slow one at the end.
const WINDOW_SLACK: u64 = 8 * MILLISECOND;
/// Before the first ack: carries 200 Mbit/s over 20 ms.
const FIRST_WINDOW: u64 = 512 * 1024;
/// A frame should take about this long, so that an urgent one need not wait and the tail is short.
const FRAME_TIME: u64 = 2 * MILLISECOND;
/// Cuts are multiples of this, hence of every element size and of a page.
const FRAME_GRAIN: u32 = 16 * 1024;
