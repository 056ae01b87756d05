//! The socket of one stream, with half written and half read frames.

use crate::close_reason::CloseReason;
use crate::fds::Fd;
use crate::handler::{Handler, Peers, Source};
use crate::system::Wire;
use penstock_stream::frame::{FLAG_PAYLOAD_SUM, MAX_FRAME_BYTES};
use penstock_stream::handshake::{Acceptor, Connector};
use penstock_stream::peer::{Landing, Outbound, Payload, StreamId, seal};
use penstock_stream::{FrameError, Header, Kind, MessageKey};
use penstock_types::{PeerId, Scope, Time};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

/// A connection, from its first attempt on.
pub(crate) struct Socket {
    pub(crate) wire: Wire,
    /// The connection is an abstract UNIX socket: the peer is on this host.
    pub(crate) local: bool,
    /// The other end, for logs.
    pub(crate) remote: String,
    pub(crate) stage: Stage,
    /// The peer, known once the hand-shake named it (for connectors: from the start).
    pub(crate) peer: Option<PeerId>,
    pub(crate) stream: StreamId,
    /// When the hand-shake must have ended.
    pub(crate) deadline: Time,
    /// How many attempts to connect this stream have failed before.
    pub(crate) attempt: u32,
    /// Whether epoll reports writability.
    pub(crate) watches_write: bool,
    /// A write has told of a reset; the kernel tells of it once, and then of the stream's end.
    pub(crate) was_reset: bool,
    /// Hand-shake bytes not yet written.
    pub(crate) greeting: Vec<u8>,
    writing: VecDeque<Writing>,
    pub(crate) reader: Reader,
}

pub(crate) enum Stage {
    /// `connect` has not returned yet; then this hand-shake starts.
    Connecting(Connector),
    Connector(Connector),
    Acceptor(Acceptor),
    Up,
}

struct Writing {
    header: [u8; Header::BYTES],
    key: MessageKey,
    offset: u64,
    payload: Payload,
    length: usize,
    /// Bytes of header and payload that are written.
    written: usize,
    /// A descriptor that is sent with the frame, or was sent before it.
    descriptor: Option<Fd>,
}

/// The result of reading or writing.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The kernel has no more bytes (or room) now.
    Blocked,
    /// The budget is used up; there may be more.
    More,
    /// The other side has closed the connection. Bytes that it sent before, with the reason, may wait to be read.
    Gone,
    /// The connection is over.
    Closed(CloseReason),
}

impl Socket {
    pub(crate) fn new(wire: Wire, local: bool, remote: String, stage: Stage, deadline: Time) -> Socket {
        Socket {
            wire,
            local,
            remote,
            stage,
            peer: None,
            stream: 0,
            deadline,
            attempt: 0,
            watches_write: false,
            was_reset: false,
            greeting: Vec::new(),
            writing: VecDeque::new(),
            reader: Reader::default(),
        }
    }

    pub(crate) fn is_up(&self) -> bool {
        matches!(self.stage, Stage::Up)
    }

    /// Whether no frame is half-written, or waits to be.
    pub(crate) fn is_flushed(&self) -> bool {
        self.writing.is_empty()
    }

    /// Releases the memory of the operations of a group or channel that has failed.
    ///
    /// A frame that is being read into this memory is discarded from here on. A frame that is being written continues from a
    /// copy, since the receiver counts the frames of a stream and must get each one whole. A receiver that does not know of
    /// the failure yet may use the frame: its bytes are what they would be without the failure, since the end of the operation
    /// has not been reported yet and the memory was not reused. *Why not cut the stream?* It may be the only one between two
    /// processes, and their other groups would fail with it. At most one batch is copied.
    pub(crate) fn drop_all(&mut self, scope: Scope, source: &Source) {
        self.reader.revoke(|header| header.key.is_in(scope));
        let Some(peer) = self.peer else { return };
        for frame in self.writing.iter_mut().filter(|frame| frame.key.is_in(scope)) {
            frame.copy(peer, source);
        }
    }

    /// Writes what is left of the greeting.
    pub(crate) fn write_greeting(&mut self) -> Progress {
        while !self.greeting.is_empty() {
            match self.wire.write(&[IoSlice::new(&self.greeting)], None) {
                Ok(count) => drop(self.greeting.drain(..count)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Progress::Blocked,
                Err(error) => return Progress::Closed(CloseReason::of_call(error, self.local)),
            }
        }
        Progress::More
    }

    /// Pulls frames from the peer and writes one batch. Returns `More` when all of it was taken, `Blocked` when the kernel is
    /// full, `Gone` when the other side has closed the connection, `None` when there is nothing to write.
    pub(crate) fn write_batch<H: Handler>(
        &mut self,
        peers: &mut Peers,
        handler: &mut H,
        now: Time,
    ) -> Option<Progress> {
        let peer = self.peer.expect("streams that are up have a peer");
        if self.writing.is_empty() {
            let mut bytes = 0;
            while self.writing.len() < BATCH_FRAMES && bytes < BATCH_BYTES {
                let Some(frame) = peers.machine(peer).poll_frame(self.stream, now) else { break };
                bytes += frame.header.length as usize;
                let shares = frame.header.kind == Kind::Share;
                self.writing.push_back(Writing::new(frame, peer, handler));
                if shares {
                    break;
                }
            }
            if self.writing.is_empty() {
                return None;
            }
        }
        let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(2 * BATCH_FRAMES);
        for frame in &self.writing {
            frame.slices(peer, handler, &mut slices);
        }
        let descriptor = self.writing.back().and_then(|frame| frame.descriptor.as_ref());
        match self.wire.write(&slices, descriptor) {
            Ok(mut count) => {
                drop(slices);
                if count > 0
                    && let Some(frame) = self.writing.back_mut()
                {
                    frame.descriptor = None;
                }
                while let Some(frame) = self.writing.front_mut() {
                    let left = Header::BYTES + frame.length - frame.written;
                    if count < left {
                        frame.written += count;
                        break;
                    }
                    count -= left;
                    self.writing.pop_front();
                }
                Some(if self.writing.is_empty() { Progress::More } else { Progress::Blocked })
            }
            Err(Errno::INTR) => Some(Progress::More),
            Err(Errno::AGAIN) => Some(Progress::Blocked),
            Err(error @ (Errno::CONNRESET | Errno::PIPE)) => {
                self.was_reset |= error == Errno::CONNRESET;
                Some(Progress::Gone)
            }
            Err(error) => Some(Progress::Closed(CloseReason::of_call(error, self.local))),
        }
    }
}

impl Writing {
    fn new<H: Handler>(frame: Outbound, peer: PeerId, handler: &mut H) -> Writing {
        let descriptor =
            (frame.header.kind == Kind::Share).then(|| handler.descriptor(peer, frame.header.offset)).flatten();
        let length = frame.header.length as usize;
        let mut writing = Writing {
            header: [0; Header::BYTES],
            key: frame.header.key,
            offset: frame.header.offset,
            payload: frame.payload,
            length,
            written: 0,
            descriptor,
        };
        // Only a checksum needs the bytes before they are written.
        let is_summed = frame.header.flags & FLAG_PAYLOAD_SUM != 0;
        writing.header = seal(frame.header, if is_summed { writing.payload(peer, handler) } else { &[] });
        writing
    }

    /// Copies a payload from the memory of an operation that is about to fail. If `source` does not know the operation, it has
    /// ended in good order before: see [`Writing::payload`].
    fn copy(&mut self, peer: PeerId, source: &Source) {
        if let Payload::Memory = self.payload
            && let Some(address) = source(peer, &self.key, self.offset, self.length)
        {
            // SAFETY: `source` keeps these bytes alive, and nothing in this thread writes to them meanwhile.
            let bytes: Arc<[u8]> = unsafe { std::slice::from_raw_parts(address, self.length) }.into();
            self.payload = Payload::Owned(bytes, 0..self.length);
        }
    }

    /// The payload's bytes. If the operation has ended in good order, the frame is a duplicate that the receiver will discard:
    /// zeros keep the stream in step without touching memory that belongs to the user again. If it has failed, the payload was
    /// copied before.
    fn payload<H: Handler>(&self, peer: PeerId, handler: &H) -> &[u8] {
        self.payload.bytes().unwrap_or_else(|| match handler.source(peer, &self.key, self.offset, self.length) {
            // SAFETY: the handler keeps these bytes alive as long as the operation is, and nothing in this thread ends an
            // operation while the slice is in use.
            Some(address) => unsafe { std::slice::from_raw_parts(address, self.length) },
            None => &ZEROS[..self.length],
        })
    }

    fn slices<'a, H: Handler>(&'a self, peer: PeerId, handler: &'a H, out: &mut Vec<IoSlice<'a>>) {
        if self.written < Header::BYTES {
            out.push(IoSlice::new(&self.header[self.written..]));
        }
        let sent = self.written.saturating_sub(Header::BYTES);
        if sent < self.length {
            out.push(IoSlice::new(&self.payload(peer, handler)[sent..]));
        }
    }
}

/// Cuts the byte stream into frames. Small frames go through a buffer, many in one system call; the payload of a large one is
/// read directly to its place.
pub(crate) struct Reader {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    frame: Option<Reading>,
    /// A payload without a place in an operation waits here until it is complete.
    stage: Vec<u8>,
}

/// A frame whose header has come.
struct Reading {
    header: Header,
    /// Bytes of its payload that have come.
    got: usize,
    landing: Landing<*mut u8>,
}

// SAFETY: the place belongs to an operation of the handler, which lives on the same thread as the reader; only the
// (empty) reader of a new driver ever moves between threads.
unsafe impl Send for Reading {}

impl Default for Reader {
    fn default() -> Reader {
        let buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        Reader { buffer, start: 0, end: 0, frame: None, stage: Vec::new() }
    }
}

impl Reader {
    /// Takes bytes that the hand-shake read beyond its end.
    pub(crate) fn preload(&mut self, bytes: &[u8]) {
        self.buffer[..bytes.len()].copy_from_slice(bytes);
        self.end = bytes.len();
    }

    /// Bytes that this reader holds for payloads.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.buffer.len() + self.stage.capacity()
    }

    /// Writes no more into the memory of an operation: the rest of the frame's payload is discarded. What is staged may be a control
    /// frame, which is handled when it is whole.
    pub(crate) fn revoke(&mut self, matches: impl Fn(&Header) -> bool) {
        if let Some(frame) = &mut self.frame
            && matches!(frame.landing, Landing::Place(_))
            && matches(&frame.header)
        {
            frame.landing = Landing::Discard;
        }
    }

    /// One read from the kernel. `Ok(0)` is the end of the stream. Descriptors that a local socket passes are added to
    /// `descriptors`.
    pub(crate) fn fill(
        &mut self,
        wire: &Wire,
        local: bool,
        junk: &mut [u8],
        descriptors: &mut Vec<Fd>,
    ) -> Result<usize, Errno> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let Some(frame) = &mut self.frame else {
            let room = &mut [IoSliceMut::new(&mut self.buffer[self.end..])];
            let count = wire.read(room, local, descriptors)?;
            self.end += count;
            return Ok(count);
        };
        // The buffer is empty here: a frame that is being read has taken all of it.
        debug_assert_eq!(self.end, 0);
        let left = frame.header.length as usize - frame.got;
        let target: &mut [u8] = match frame.landing {
            // SAFETY: the handler gave the place of the whole payload and revokes it before the memory goes.
            Landing::Place(place) => unsafe { std::slice::from_raw_parts_mut(place.add(frame.got), left) },
            Landing::Stage => &mut self.stage[frame.got..frame.got + left],
            Landing::Discard => {
                let take = left.min(junk.len());
                &mut junk[..take]
            }
        };
        let room = target.len();
        // A discarded payload longer than the scratch area must not be followed by the buffer.
        let count = if room == left {
            let tail = &mut self.buffer[..TAIL_BYTES];
            wire.read(&mut [IoSliceMut::new(target), IoSliceMut::new(tail)], local, descriptors)?
        } else {
            wire.read(&mut [IoSliceMut::new(target)], local, descriptors)?
        };
        frame.got += count.min(room);
        self.end = count.saturating_sub(room);
        Ok(count)
    }

    /// Handles what is in the buffer, frame by frame, through `handler`. Streams that must discard what they are reading are
    /// returned in `revoked`.
    pub(crate) fn process<H: Handler>(
        &mut self,
        peer: PeerId,
        stream: StreamId,
        peers: &mut Peers,
        handler: &mut H,
        revoked: &mut Vec<(StreamId, MessageKey, u64)>,
    ) -> Result<(), FrameError> {
        loop {
            let Some(frame) = &mut self.frame else {
                if self.end - self.start < Header::BYTES {
                    return Ok(());
                }
                let bytes: &[u8; Header::BYTES] =
                    self.buffer[self.start..self.start + Header::BYTES].try_into().expect("a header's length");
                let header = Header::decode(bytes)?;
                self.start += Header::BYTES;
                let landing = handler.header(peers, peer, stream, &header)?;
                if landing == Landing::Stage && self.stage.len() < header.length as usize {
                    self.stage.resize(header.length as usize, 0);
                }
                self.frame = Some(Reading { header, got: 0, landing });
                continue;
            };
            let left = frame.header.length as usize - frame.got;
            if left > 0 {
                let take = left.min(self.end - self.start);
                if take > 0 {
                    let bytes = &self.buffer[self.start..self.start + take];
                    match frame.landing {
                        // SAFETY: as in `fill`.
                        Landing::Place(place) => unsafe {
                            std::ptr::copy_nonoverlapping(bytes.as_ptr(), place.add(frame.got), take);
                        },
                        Landing::Stage => self.stage[frame.got..frame.got + take].copy_from_slice(bytes),
                        Landing::Discard => {}
                    }
                    frame.got += take;
                    self.start += take;
                }
                if take < left {
                    return Ok(());
                }
            }
            let Reading { header, landing, .. } = self.frame.take().expect("looked at above");
            let length = header.length as usize;
            let payload: &[u8] = match landing {
                // SAFETY: as in `fill`; the payload is whole.
                Landing::Place(place) => unsafe { std::slice::from_raw_parts(place, length) },
                Landing::Stage => &self.stage[..length],
                Landing::Discard => &[],
            };
            let placed = matches!(landing, Landing::Place(_));
            if let Some(loser) = handler.frame(peers, peer, stream, &header, payload, placed)? {
                revoked.push((loser, header.key, header.offset));
                return Ok(());
            }
        }
    }

    /// Whether a whole frame may wait in the buffer.
    pub(crate) fn has_buffered(&self) -> bool {
        self.end > self.start
    }
}

/// Frames written by one system call: bounded by the kernel's IOV_MAX (1024) and by what is worth gathering.
const BATCH_FRAMES: usize = 16;
/// Payload bytes gathered for one system call: fewer cost over loopback, more delay what is urgent.
const BATCH_BYTES: usize = 256 * 1024;
/// Big enough for a hundred acks or several small messages a read.
const BUFFER_BYTES: usize = 16 * 1024;
/// How much of the buffer is offered after a large payload: bytes of the next frame that land there are copied once more.
const TAIL_BYTES: usize = 4 * 1024;
static ZEROS: [u8; MAX_FRAME_BYTES as usize] = [0; MAX_FRAME_BYTES as usize];
