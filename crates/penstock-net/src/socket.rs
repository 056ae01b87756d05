//! The socket of one stream, with half written and half read frames.

use crate::claims::{Half, Source};
use crate::close_reason::CloseReason;
use crate::fds::Fd;
use crate::handler::{Handler, Peers};
use crate::system::{System, Wire};
use penstock_stream::frame::{FLAG_PAYLOAD_SUM, MAX_FRAME_BYTES};
use penstock_stream::handshake::{Acceptor, Connector};
use penstock_stream::peer::{Landing, Outbound, Payload, StreamId, seal, verify};
use penstock_stream::{FrameError, Header, Kind, MessageKey};
use penstock_types::{PeerId, Scope, Time};
use rustix::event::epoll;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

/// A connection, from its first attempt on.
pub(crate) struct Socket {
    pub(crate) wire: Arc<Wire>,
    /// The thread of the loop that watches and reads it. Any thread may write.
    pub(crate) thread: usize,
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
    /// `None` while a thread writes without the lock.
    pub(crate) writer: Option<Box<Writer>>,
    /// `None` while its thread reads, or uses what it has read, without the lock.
    pub(crate) reader: Option<Box<Reader>>,
}

pub(crate) enum Stage {
    /// `connect` has not returned yet; then this hand-shake starts.
    Connecting(Connector),
    Connector(Connector),
    Acceptor(Acceptor),
    Up,
}

/// Frames that are being written.
pub(crate) struct Writer {
    wire: Arc<Wire>,
    frames: VecDeque<Writing>,
    /// What the next system call writes: parts of `frames`, and of memory that is claimed until [`Writer::write`] has returned.
    slices: Vec<IoSlice<'static>>,
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
        let wire = Arc::new(wire);
        Socket {
            thread: 0,
            writer: Some(Box::new(Writer { wire: wire.clone(), frames: VecDeque::new(), slices: Vec::new() })),
            reader: Some(Box::new(Reader::new(wire.clone()))),
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
        }
    }

    pub(crate) fn is_up(&self) -> bool {
        matches!(self.stage, Stage::Up)
    }

    /// Whether no frame is half-written, or waits to be.
    pub(crate) fn is_flushed(&self) -> bool {
        self.writer.as_ref().is_some_and(|writer| writer.frames.is_empty())
    }

    /// Releases the memory of the operations of a group or channel that has failed.
    ///
    /// A frame that is being read into this memory is discarded from here on. A frame that is being written continues from a
    /// copy, since the receiver counts the frames of a stream and must get each one whole. A receiver that does not know of
    /// the failure yet may use the frame: its bytes are what they would be without the failure, since the end of the operation
    /// has not been reported yet and the memory was not reused. *Why not cut the stream?* It may be the only one between two
    /// processes, and their other groups would fail with it. At most one batch is copied.
    pub(crate) fn drop_all(&mut self, scope: Scope, source: &Source) {
        let Some(peer) = self.peer else { return };
        if let Some(reader) = &mut self.reader {
            reader.drop_all(peer, scope, source);
        }
        if let Some(writer) = &mut self.writer {
            writer.drop_all(peer, scope, source);
        }
    }

    /// Has its thread told also when there is room to write, or no more.
    pub(crate) fn watch_write(&mut self, system: &System, token: u64, watch: bool) {
        if self.watches_write == watch {
            return;
        }
        self.watches_write = watch;
        let flags = if watch { epoll::EventFlags::IN | epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
        if let Err(error) = system.watch(self.thread, &self.wire, token, flags, false) {
            log::error!("penstock: epoll_ctl failed: {error}");
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
    /// full, `Gone` when the other side has closed the connection, `None` when there is nothing to write, or another thread writes.
    pub(crate) fn write_batch<H: Handler>(
        &mut self,
        peers: &mut Peers,
        handler: &mut H,
        now: Time,
    ) -> Option<Progress> {
        let peer = self.peer.expect("streams that are up have a peer");
        let writer = self.writer.as_mut()?;
        if !writer.gather((peer, self.stream), peers, handler, now) {
            return None;
        }
        let result = writer.write();
        Some(self.wrote(result))
    }

    /// What a write says of the stream.
    pub(crate) fn wrote(&mut self, result: Result<usize, Errno>) -> Progress {
        match result {
            Ok(_) if self.is_flushed() => Progress::More,
            Ok(_) => Progress::Blocked,
            Err(Errno::INTR) => Progress::More,
            Err(Errno::AGAIN) => Progress::Blocked,
            Err(error @ (Errno::CONNRESET | Errno::PIPE)) => {
                self.was_reset |= error == Errno::CONNRESET;
                Progress::Gone
            }
            Err(error) => Progress::Closed(CloseReason::of_call(error, self.local)),
        }
    }
}

impl Writer {
    /// Pulls frames from the peer's machine, unless some wait that were pulled before, and says what is to be written. Returns false if
    /// that is nothing.
    pub(crate) fn gather<H: Handler>(
        &mut self,
        (peer, stream): (PeerId, StreamId),
        peers: &mut Peers,
        handler: &mut H,
        now: Time,
    ) -> bool {
        if self.frames.is_empty() {
            let mut bytes = 0;
            while self.frames.len() < BATCH_FRAMES && bytes < BATCH_BYTES {
                let Some(frame) = peers.poll_frame(peer, stream, now) else { break };
                bytes += frame.header.length as usize;
                let shares = frame.header.kind == Kind::Share;
                self.frames.push_back(Writing::new(frame, peer, handler));
                if shares {
                    break;
                }
            }
        }
        for frame in &self.frames {
            let mut add = |bytes: &[u8]| {
                // SAFETY: the bytes are the frame's, which stays as it is until `write` has returned, or memory that the handler keeps
                // as long as the loop has a claim on it. `write` forgets the slices.
                self.slices.push(IoSlice::new(unsafe { std::slice::from_raw_parts(bytes.as_ptr(), bytes.len()) }));
            };
            if frame.written < Header::BYTES {
                add(&frame.header[frame.written..]);
            }
            let sent = frame.written.saturating_sub(Header::BYTES);
            if sent < frame.length {
                add(&frame.payload(peer, handler)[sent..]);
            }
        }
        !self.frames.is_empty()
    }

    /// The messages whose bytes the next write reads in operations' memory.
    pub(crate) fn lent(&self) -> Vec<MessageKey> {
        let in_memory = self.frames.iter().filter(|frame| matches!(frame.payload, Payload::Memory));
        in_memory.map(|frame| frame.key).collect()
    }

    /// Writes what was gathered, or a part of it. Returns how many bytes.
    pub(crate) fn write(&mut self) -> Result<usize, Errno> {
        let descriptor = self.frames.back().and_then(|frame| frame.descriptor.as_ref());
        let written = self.wire.write(&self.slices, descriptor);
        self.slices.clear();
        let written = written?;
        let mut count = written;
        if count > 0
            && let Some(frame) = self.frames.back_mut()
        {
            frame.descriptor = None;
        }
        while let Some(frame) = self.frames.front_mut() {
            let left = Header::BYTES + frame.length - frame.written;
            if count < left {
                frame.written += count;
                break;
            }
            count -= left;
            self.frames.pop_front();
        }
        Ok(written)
    }
}

impl Half for Writer {
    fn drop_all(&mut self, peer: PeerId, scope: Scope, source: &Source) {
        for frame in self.frames.iter_mut().filter(|frame| frame.key.is_in(scope)) {
            frame.copy(peer, source);
        }
    }
}

impl Half for Reader {
    fn drop_all(&mut self, _: PeerId, scope: Scope, _: &Source) {
        self.revoke(|header| header.key.is_in(scope));
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
            // SAFETY: `source` keeps these bytes alive, and nobody writes to them meanwhile: the group has failed, and claims that were
            // made before are on other ranges.
            let bytes: Arc<[u8]> = unsafe { std::slice::from_raw_parts(address, self.length) }.into();
            self.payload = Payload::Owned(bytes, 0..self.length);
        }
    }

    /// The payload's bytes. If the operation has ended in good order, the frame is a duplicate that the receiver will discard:
    /// zeros keep the stream in step without touching memory that belongs to the user again. If it has failed, the payload was
    /// copied before.
    fn payload<H: Handler>(&self, peer: PeerId, handler: &H) -> &[u8] {
        self.payload.bytes().unwrap_or_else(|| match handler.source(peer, &self.key, self.offset, self.length) {
            // SAFETY: the handler keeps these bytes alive as long as the operation is, and its end waits for the claims on it.
            Some(address) => unsafe { std::slice::from_raw_parts(address, self.length) },
            None => &ZEROS[..self.length],
        })
    }
}

/// Cuts the byte stream into frames. Small frames go through a buffer, many in one system call; the payload of a large one is
/// read directly to its place.
pub(crate) struct Reader {
    wire: Arc<Wire>,
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
    /// Whether the whole payload is what was sent, where that was looked at.
    sum_is_right: Option<bool>,
}

// SAFETY: the place belongs to an operation of the handler. Its bytes are touched by the thread that has the reader, under a claim or
// under the loop's lock.
unsafe impl Send for Reading {}

impl Reader {
    fn new(wire: Arc<Wire>) -> Reader {
        let buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        Reader { wire, buffer, start: 0, end: 0, frame: None, stage: Vec::new() }
    }

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

    /// Reads until the frame that has begun is whole, or the kernel has no more. Returns the bytes that were read, and how the last
    /// read ended ([`Reader::fill`]).
    pub(crate) fn fill_frame(
        &mut self,
        local: bool,
        junk: &mut [u8],
        descriptors: &mut Vec<Fd>,
    ) -> (usize, Result<usize, Errno>) {
        let mut total = 0;
        loop {
            let last = self.fill(local, junk, descriptors);
            total += *last.as_ref().unwrap_or(&0);
            let is_partial = self.frame.as_ref().is_some_and(|frame| frame.got < frame.header.length as usize);
            if !is_partial || !matches!(last, Ok(1..)) {
                return (total, last);
            }
        }
    }

    /// One read from the kernel. `Ok(0)` is the end of the stream. Descriptors that a local socket passes are added to
    /// `descriptors`.
    pub(crate) fn fill(&mut self, local: bool, junk: &mut [u8], descriptors: &mut Vec<Fd>) -> Result<usize, Errno> {
        let wire = &self.wire;
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

    /// Takes what is in the buffer, up to the end of a frame; `handler` says where payloads go. Returns the header of the frame that is
    /// whole, if one is, until [`Reader::used`].
    pub(crate) fn advance<H: Handler>(
        &mut self,
        peer: PeerId,
        stream: StreamId,
        peers: &mut Peers,
        handler: &mut H,
    ) -> Result<Option<Header>, FrameError> {
        loop {
            let Some(frame) = &mut self.frame else {
                if self.end - self.start < Header::BYTES {
                    return Ok(None);
                }
                let bytes: &[u8; Header::BYTES] =
                    self.buffer[self.start..self.start + Header::BYTES].try_into().expect("a header's length");
                let header = Header::decode(bytes)?;
                self.start += Header::BYTES;
                let landing = handler.header(peers, peer, stream, &header)?;
                if landing == Landing::Stage && self.stage.len() < header.length as usize {
                    self.stage.resize(header.length as usize, 0);
                }
                self.frame = Some(Reading { header, got: 0, landing, sum_is_right: None });
                continue;
            };
            let left = frame.header.length as usize - frame.got;
            if left == 0 {
                return Ok(Some(frame.header));
            }
            let take = left.min(self.end - self.start);
            if take == 0 {
                return Ok(None);
            }
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
    }

    /// The payload of the frame that is whole, and whether it lies in its place.
    pub(crate) fn payload(&self) -> (&[u8], bool) {
        let Reading { header, landing, .. } = self.frame.as_ref().expect("a frame is whole");
        let length = header.length as usize;
        match *landing {
            // SAFETY: as in `fill`; the payload is whole.
            Landing::Place(place) => (unsafe { std::slice::from_raw_parts(place, length) }, true),
            Landing::Stage => (&self.stage[..length], false),
            Landing::Discard => (&[], false),
        }
    }

    /// Looks whether the payload of the frame that is whole is what was sent.
    pub(crate) fn check_sum(&mut self) {
        let payload = self.payload().0;
        let is_right = self.frame.as_ref().map(|frame| verify(&frame.header, payload).is_ok());
        if let Some(frame) = &mut self.frame {
            frame.sum_is_right = is_right;
        }
    }

    /// What [`Reader::check_sum`] has found.
    pub(crate) fn sum_is_right(&self) -> Option<bool> {
        self.frame.as_ref()?.sum_is_right
    }

    /// Whether the payload of a frame goes to a buffer of the reader's.
    pub(crate) fn is_staged(&self) -> bool {
        self.frame.as_ref().is_some_and(|frame| frame.landing == Landing::Stage)
    }

    /// The frame whose payload is being read to its place: its message, and its offset there.
    pub(crate) fn landing(&self) -> Option<(MessageKey, u64)> {
        let frame = self.frame.as_ref().filter(|frame| matches!(frame.landing, Landing::Place(_)))?;
        Some((frame.header.key, frame.header.offset))
    }

    /// The frame that was whole has been handled.
    pub(crate) fn used(&mut self) {
        self.frame = None;
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
