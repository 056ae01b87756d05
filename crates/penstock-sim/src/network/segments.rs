//! What is longer than a packet: frames, as streams carry them.

use super::{FlowId, Network};
use penstock_types::Time;

/// A part of something longer. The last one carries it. Packets move more often than they arrive, hence the box.
pub type Segment<P> = Option<Box<P>>;

impl<P: Clone> Network<Segment<P>> {
    /// Sends something of so many bytes as TCP does, in segments, so that on two links it need not wait for its own end. Its last packet
    /// has up to `longest` bytes.
    pub fn send_in_segments(&mut self, now: Time, flow: FlowId, bytes: u64, longest: u64, payload: P) {
        let mut left = bytes;
        while left > longest {
            self.send(now, flow, SEGMENT_BYTES, None);
            left -= SEGMENT_BYTES;
        }
        self.send(now, flow, left, Some(Box::new(payload)));
    }
}

/// Bytes of a segment that is not the last one.
pub const SEGMENT_BYTES: u64 = 16 * 1024;
