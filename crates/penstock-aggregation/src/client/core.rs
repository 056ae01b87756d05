//! A rank's side of the aggregated all-reduces of one group, without sockets and clocks.
//!
//! Every server has a *stream* of SeqNums of its own. Operations post their blocks to it in the order in which the group's
//! ranks issue them, so a SeqNum means the same block on all ranks without a message:
//! ```text
//!   op 0: header, exponents ──(results)──> blocks ──(all numbered)──> op 1: header, exponents ──(results)──> blocks ...
//! ```
//! A block is read from the tensor whenever it is sent, and its result is written over it: once a result is here, the server
//! has committed the block, and no node needs it again.
//!
//! **An operation ends when *all* ranks have all its results**, which Credit shows. So a result that one rank has given to its
//! user is known on all ranks, and when a server dies, all ranks can start again from the same operation.
//!
//! Where results come apart from the blocks ([`WorkerConfig::apart`]), an operation's blocks at a server are a buffer of its. If the work
//! behind one fails, that operation fails on all ranks ([`Core::poll_failed`]), and no other.
//!
//! `penstock-sim` runs it: whole jobs with faults in `src/aggregation_tests.rs`, everything else in `tests/all_reduces.rs`.

mod leftover;
mod posted;
mod side;
mod tensor;

use super::layout::{HEADER_EXPONENTS, Layout, Wire, header, other_fingerprint};
use crate::{
    Endpoint, FLAG_LAST, Format, HEADER_BYTES, Header, Kind, Received, Refusal, Route, Serial, Worker, WorkerConfig,
};
pub use leftover::Leftover;
use penstock_kernels::{ByteOrder, Exponent, Finish, block_exponent, premultiply, reduce, swap_bytes};
use penstock_types::{DType, ReduceOp, Time};
use posted::{Carried, Posted, What};
use side::Side;
use std::collections::VecDeque;
use std::ops::Range;

/// The number of the server in a [`WorkerConfig`].
pub const SERVER: Endpoint = Endpoint(0);
/// The number of the aggregator above this rank, if there is one.
pub const PARENT: Endpoint = Endpoint(1);

/// The parameters on which all ranks of a group agree.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// Ranks in the group, 2 to [`MAX_WORKERS`](crate::MAX_WORKERS).
    pub world: u32,
    /// The format in which blocks travel.
    pub wire: Wire,
    /// The most that a packet carries, a multiple of 64.
    pub payload_bytes: usize,
}

/// An all-reduce, as the core needs it.
#[derive(Clone, Copy, Debug)]
pub struct AllReduce {
    /// The type of the elements: float32, float16 or bfloat16.
    pub dtype: DType,
    /// The reduction: a sum, an average or a premultiplied sum.
    pub op: ReduceOp,
    /// The address of the tensor, which holds the contribution and later the result.
    pub address: *mut u8,
    /// The length of the tensor in bytes.
    pub bytes: usize,
    /// The fingerprint of the call: 80 bits that must be the same on all ranks.
    pub fingerprint: u128,
    /// Whether the tensor holds the contribution already; otherwise [`Core::release`] reports it.
    pub ready: bool,
    /// When the caller started the operation; its time-out counts from here.
    pub started: Time,
    /// The time-out in nanoseconds.
    pub timeout: u64,
}

// SAFETY: the caller that submits it keeps the tensor alive and leaves it alone until the operation has ended; only the thread
// that has the core uses the address.
unsafe impl Send for AllReduce {}

/// Why the client cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Ranks mean different things with an operation.
    Mismatch {
        /// The number of the operation.
        op: u64,
        /// The fingerprint that another rank has for it.
        theirs: u128,
    },
    /// A result that no honest server sends.
    Result(String),
}

/// What an operation waits for from a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    /// Every piece of the result has come.
    Nothing,
    /// The maxima of all ranks' headers or exponents, without which no block is pushed.
    Agreement,
    /// Pieces of the result have not come.
    Pieces {
        /// How many pieces are missing.
        left: usize,
        /// How many pieces the result has.
        all: usize,
    },
}

/// A packet to send; its payload is in the buffer that was passed.
#[derive(Debug)]
pub struct Packet {
    /// The receiver: [`SERVER`] or [`PARENT`].
    pub to: Endpoint,
    /// The SeqNum of the block that it carries or requests; an aggregator's shards differ in it.
    pub seq: Serial,
    /// The header, which is sent before the payload.
    pub header: [u8; HEADER_BYTES],
    /// How many bytes at the head of the caller's buffer are the payload.
    pub payload_bytes: usize,
}

/// Counters of one server's stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamCounters {
    /// Blocks that were pushed for the first time.
    pub pushed: u64,
    /// Blocks that were pushed once more, because they were missing at the server or late.
    pub pushed_again: u64,
    /// Requests for results that did not come.
    pub requested: u64,
    /// Results that came.
    pub results: u64,
    /// Packets that were refused and had no effect.
    pub refused: u64,
}

/// All operations of a rank, and its streams to the servers.
pub struct Core {
    config: CoreConfig,
    streams: Vec<Stream>,
    /// Operations that have not ended; the first one's number is `first`.
    ops: VecDeque<Op>,
    first: u64,
    failed: VecDeque<(u64, String)>,
}

struct Stream {
    worker: Worker,
    /// The operation whose blocks are posted next.
    op: u64,
    next: Next,
    is_apart: bool,
    posted: Posted,
    counters: StreamCounters,
}

/// What an operation posts next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Header,
    Exponents(usize),
    /// The exponents of all ranks have not come yet.
    Agreement,
    Block {
        block: usize,
        part: usize,
    },
}

struct Op {
    all_reduce: AllReduce,
    layout: Layout,
    /// Whether any block of the operation was posted.
    begun: bool,
    sides: Vec<Side>,
    /// For each piece, of one server after the other, whether the tensor holds its result.
    delivered: Vec<bool>,
    undelivered: usize,
}

impl Core {
    /// A stream a worker, in the order of the servers; every worker's window is the same.
    #[must_use]
    pub fn new(now: Time, config: CoreConfig, workers: Vec<WorkerConfig>) -> Core {
        let stream = |worker: WorkerConfig| Stream {
            posted: Posted::new(worker.start),
            is_apart: worker.apart,
            worker: Worker::new(now, worker),
            op: 0,
            next: Next::Header,
            counters: StreamCounters::default(),
        };
        let streams = workers.into_iter().map(stream).collect();
        Core { streams, ops: VecDeque::new(), first: 0, failed: VecDeque::new(), config }
    }

    /// Bytes of a tensor of this type in a block. A server's range is cut into blocks from its start.
    #[must_use]
    pub fn block_bytes(&self, dtype: DType) -> usize {
        self.layout(dtype).block_bytes()
    }

    fn layout(&self, dtype: DType) -> Layout {
        Layout::new(self.config.wire, dtype, self.config.world, self.config.payload_bytes)
    }

    /// Takes the next operation of the group's order; returns its number. `pushes` says which bytes of the tensor each server
    /// adds, in the order of the servers: whole elements, perhaps none. All ranks must pass the same.
    ///
    /// # Panics
    /// If there is not one range a server.
    ///
    /// # Safety
    /// The tensor stays alive until the operation has ended, for as long as anything of this core is called or of what
    /// [`Core::take_first`] leaves of it. Nobody else touches it meanwhile; where it is not ready, from [`Core::release`] on.
    pub unsafe fn submit(&mut self, all_reduce: AllReduce, pushes: &[Range<usize>]) -> u64 {
        assert_eq!(pushes.len(), self.streams.len(), "a range a server");
        let layout = self.layout(all_reduce.dtype);
        let mut pieces = 0;
        let side = |range: &Range<usize>| {
            let first_piece = pieces;
            pieces += range.len().div_ceil(layout.piece_bytes());
            Side {
                start: range.start,
                len: range.len(),
                blocks: range.len().div_ceil(layout.block_bytes()),
                exponents: Vec::new(),
                unagreed: 0,
                first_piece,
                last: None,
                has_failed: false,
            }
        };
        let sides = pushes.iter().map(side).collect();
        let delivered = vec![false; pieces];
        self.ops.push_back(Op { all_reduce, layout, begun: false, sides, delivered, undelivered: pieces });
        self.first + self.ops.len() as u64 - 1
    }

    /// The tensor of an operation that was not ready is ready now.
    pub fn release(&mut self, op: u64) {
        if let Some(op) = op.checked_sub(self.first).and_then(|at| self.ops.get_mut(at as usize)) {
            op.all_reduce.ready = true;
        }
    }

    /// Handles a datagram that came from `from` to the socket of `server`. A refused one has no effect.
    ///
    /// # Errors
    /// What the group cannot go on after.
    pub fn handle_packet(
        &mut self,
        now: Time,
        server: usize,
        from: Endpoint,
        bytes: &[u8],
    ) -> Result<Result<(), Refusal>, Trouble> {
        let stream = &mut self.streams[server];
        match stream.worker.handle_packet(now, from, bytes) {
            Err(refusal) => {
                stream.counters.refused += 1;
                Ok(Err(refusal))
            }
            Ok(Received::Control) => Ok(Ok(())),
            Ok(Received::Result { seq, format: Format::Text, number, payload, .. }) => {
                self.fail_buffer(server, seq, number, payload);
                Ok(Ok(()))
            }
            Ok(Received::Result { seq, number, format, exponent, payload }) => {
                stream.counters.results += 1;
                self.deliver(server, (seq, number), format, exponent, payload).map(Ok)
            }
        }
    }

    /// When [`Core::handle_timeout`] is due.
    #[must_use]
    pub fn poll_timeout(&self) -> Time {
        let workers = self.streams.iter().map(|stream| stream.worker.poll_timeout());
        let ops = self.ops.iter().map(|op| op.all_reduce.started.plus(op.all_reduce.timeout));
        workers.chain(ops).min().unwrap_or(Time(u64::MAX))
    }

    /// `now` has passed what [`Core::poll_timeout`] said; otherwise nothing happens.
    pub fn handle_timeout(&mut self, now: Time) {
        for stream in &mut self.streams {
            if stream.worker.poll_timeout() <= now {
                stream.worker.handle_timeout(now);
            }
        }
    }

    /// Sends no block for the first time before `until`, to no server.
    pub fn hold(&mut self, until: Time) {
        self.streams.iter_mut().for_each(|stream| stream.worker.hold(until));
    }

    /// Whether blocks lack results and none has come for longer than they take when no rank is late and queues are short.
    #[must_use]
    pub fn waits_for_others(&self, now: Time) -> bool {
        let mut waiting = self.streams.iter().filter_map(|stream| stream.worker.waits_for_others(now)).peekable();
        waiting.peek().is_some() && waiting.all(|waits| waits)
    }

    /// Whether blocks leave so that queues on the way are short, for others that are more urgent.
    pub fn keep_short(&mut self, is_short: bool) {
        self.streams.iter_mut().for_each(|stream| stream.worker.keep_short(is_short));
    }

    /// The next packet for a server. `payload` is as long as a packet may be.
    pub fn poll_transmit(&mut self, now: Time, server: usize, payload: &mut [u8]) -> Option<Packet> {
        self.post(server);
        let outbound = self.streams[server].worker.poll_transmit(now)?;
        let Header { kind, seq, mut flags, .. } = outbound.header;
        let (mut format, mut exponent, mut len) = (Format::None, 0, 0);
        let stream = &mut self.streams[server];
        match kind {
            Kind::Push => {
                let carried = stream.posted.get_mut(seq).expect("a block without a result");
                match std::mem::replace(&mut carried.sent, true) {
                    false => stream.counters.pushed += 1,
                    true => stream.counters.pushed_again += 1,
                }
                let Carried { op, what, is_last, .. } = *carried;
                flags |= if is_last { FLAG_LAST } else { 0 };
                let op = &self.ops[(op - self.first) as usize];
                let shape = op.write(server, what, payload);
                (format, exponent, len) = (shape.format, shape.exponent, shape.packet_bytes);
            }
            Kind::Request => stream.counters.requested += 1,
            _ => {}
        }
        let header = Header { flags, ..outbound.header };
        let header = self.streams[server].worker.seal(&header, format, exponent, &payload[..len]);
        Some(Packet { to: outbound.to, seq, header, payload_bytes: len })
    }

    /// The next operation of which a server's work failed, and why, for its user. It ends in its turn all the same.
    pub fn poll_failed(&mut self) -> Option<(u64, String)> {
        self.failed.pop_front()
    }

    /// The next operation that has ended; they end in order.
    pub fn poll_done(&mut self) -> Option<u64> {
        let ended = |op: &Op| {
            op.undelivered == 0
                && op.sides.iter().zip(&self.streams).all(|(side, stream)| {
                    side.unagreed == 0
                        && side.last.map_or(side.blocks == 0, |last| stream.worker.everywhere().is_newer_than(last))
                })
        };
        self.ops.front().filter(|op| ended(op))?;
        self.pop()
    }

    /// The next operation whose results have all come, whether or not other ranks have them.
    pub fn poll_delivered(&mut self) -> Option<u64> {
        self.ops.front().filter(|op| op.has_all())?;
        self.pop()
    }

    /// The first operation whose time-out has expired.
    #[must_use]
    pub fn late(&self, now: Time) -> Option<u64> {
        let late = |op: &Op| now.since(op.all_reduce.started) > op.all_reduce.timeout;
        self.ops.iter().position(late).map(|at| self.first + at as u64)
    }

    /// What the first operation waits for, by server.
    #[must_use]
    pub fn lacks(&self) -> Vec<Lack> {
        let Some(op) = self.ops.front() else { return Vec::new() };
        let of = |(server, side): (usize, &Side)| {
            let pieces = op.pieces_of(server);
            let all = pieces.len();
            let here = op.delivered[pieces].iter().filter(|here| **here).count();
            match side.unagreed {
                0 if here == all => Lack::Nothing,
                0 => Lack::Pieces { left: all - here, all },
                _ => Lack::Agreement,
            }
        };
        op.sides.iter().enumerate().map(of).collect()
    }

    /// The first server from which nothing has come for too long.
    #[must_use]
    pub fn lost_server(&self, now: Time) -> Option<usize> {
        self.streams.iter().position(|stream| stream.worker.server_is_lost(now))
    }

    /// Whether blocks for a server go directly to it because an aggregator is bypassed.
    #[must_use]
    pub fn is_direct(&self, server: usize) -> bool {
        self.streams[server].worker.is_direct()
    }

    /// How often the path to a server was blamed because nothing moved: [`Worker::stalls`].
    #[must_use]
    pub fn stalls(&self, server: usize) -> u32 {
        self.streams[server].worker.stalls()
    }

    /// The smoothed round trip to a server, in nanoseconds.
    #[must_use]
    pub fn round_trip(&self, server: usize) -> u64 {
        self.streams[server].worker.measured_round_trip()
    }

    /// What was counted of a server's stream.
    #[must_use]
    pub fn counters(&self, server: usize) -> StreamCounters {
        self.streams[server].counters
    }

    /// Whether every operation has ended.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.ops.is_empty()
    }

    fn pop(&mut self) -> Option<u64> {
        self.ops.pop_front()?;
        self.first += 1;
        for stream in self.streams.iter_mut().filter(|stream| stream.op < self.first) {
            // The stream had posted nothing of this operation.
            (stream.op, stream.next) = (self.first, Next::Header);
        }
        Some(self.first - 1)
    }

    /// Posts blocks as far as possible.
    fn post(&mut self, server: usize) {
        let stream = &mut self.streams[server];
        while let Some(op) = stream.op.checked_sub(self.first).and_then(|at| self.ops.get_mut(at as usize)) {
            if !op.all_reduce.ready {
                return;
            }
            if !std::mem::replace(&mut op.begun, true)
                && let ReduceOp::PremulSum(factor) = op.all_reduce.op
            {
                // SAFETY: the tensor is the operation's, which has not read it yet.
                unsafe {
                    premultiply(
                        op.all_reduce.dtype,
                        op.all_reduce.address,
                        op.all_reduce.address,
                        op.all_reduce.bytes,
                        factor,
                    )
                };
            }
            let layout = op.layout;
            let tensor = op.all_reduce.tensor();
            let side = &mut op.sides[server];
            if side.blocks == 0 {
                stream.op += 1;
                continue;
            }
            let (what, route) = match stream.next {
                Next::Header => (What::Header, Route::Tree),
                Next::Exponents(packet) => (What::Exponents(packet), Route::Tree),
                Next::Agreement if side.unagreed > 0 => return,
                Next::Agreement => {
                    stream.next = Next::Block { block: 0, part: 0 };
                    continue;
                }
                Next::Block { block, part } => {
                    let route = if side.is_full(&layout, block) { Route::Full } else { Route::Tree };
                    (What::Block { block, part }, route)
                }
            };
            if stream.worker.post(route).is_none() {
                return;
            }
            let op = stream.op;
            let packets = side.blocks.div_ceil(layout.exponents_a_packet());
            let next = match what {
                What::Header => {
                    side.unagreed += 1;
                    match layout.integers {
                        None => Next::Block { block: 0, part: 0 },
                        Some(_) => {
                            side.exponents = vec![0; side.blocks];
                            Next::Exponents(0)
                        }
                    }
                }
                What::Exponents(packet) => {
                    side.unagreed += 1;
                    for block in side.exponents_of(&layout, packet) {
                        let (start, len) = side.part(&layout, block, 0, 1);
                        side.exponents[block] = block_exponent(layout.dtype, tensor.get(start, len)).code();
                    }
                    if packet + 1 < packets { Next::Exponents(packet + 1) } else { Next::Agreement }
                }
                What::Block { block, part } => {
                    if part + 1 < side.parts(&layout, block) {
                        Next::Block { block, part: part + 1 }
                    } else if block + 1 < side.blocks {
                        Next::Block { block: block + 1, part: 0 }
                    } else {
                        stream.op += 1;
                        Next::Header
                    }
                }
            };
            // Together with their sums results need no buffers.
            let is_last = stream.is_apart && stream.op != op;
            stream.posted.push(Carried { op, what, sent: false, is_last });
            stream.next = next;
        }
    }

    /// In place of the results of a buffer comes the reason why there are none.
    fn fail_buffer(&mut self, server: usize, first: Serial, result: Serial, why: &[u8]) {
        let blocks = self.streams[server].posted.take_buffer(first);
        let Some(Carried { op: number, .. }) = blocks.first().copied() else { return };
        let op = &mut self.ops[(number - self.first) as usize];
        let side = &mut op.sides[server];
        side.heard_of(result);
        side.has_failed = true;
        let pieces = op.pieces_of(server);
        op.undelivered -= op.delivered[pieces.clone()].iter().filter(|here| !**here).count();
        op.delivered[pieces].fill(true);
        let last = first.plus(blocks.len() as u32 - 1);
        let why = String::from_utf8_lossy(why);
        self.failed.push_back((
            number,
            format!(
                "the work behind blocks {first} to {last} of operation {number} failed at server {server}, on all ranks: {why}. The tensor \
                 has no result there; operations before and after it go on. Look at that server's log, and issue the operation again"
            ),
        ));
    }

    fn deliver(
        &mut self,
        server: usize,
        (seq, result): (Serial, Serial),
        format: Format,
        exponent: i16,
        payload: &[u8],
    ) -> Result<(), Trouble> {
        let Some(Carried { op: number, what, .. }) = self.streams[server].posted.take(seq) else {
            return Err(Trouble::Result(format!("a second result of block {seq}")));
        };
        let op = &mut self.ops[(number - self.first) as usize];
        op.sides[server].heard_of(result);
        let expected = op.shape(server, what);
        if (expected.format, expected.exponent, expected.packet_bytes) != (format, exponent, payload.len()) {
            return Err(Trouble::Result(format!(
                "the result of block {seq} is {} bytes of {format:?} with exponent {exponent}, not {} of {:?} with {}",
                payload.len(),
                expected.packet_bytes,
                expected.format,
                expected.exponent
            )));
        }
        let payload = &payload[..expected.bytes];
        let layout = op.layout;
        let tensor = op.all_reduce.tensor();
        let side = &mut op.sides[server];
        let codes = || payload.as_chunks::<2>().0.iter().map(|bytes| i16::from_be_bytes(*bytes));
        match what {
            What::Header => {
                let maxima: Vec<i16> = codes().collect();
                if let Some(theirs) = other_fingerprint(op.all_reduce.fingerprint, &maxima) {
                    return Err(Trouble::Mismatch { op: number, theirs });
                }
                side.unagreed -= 1;
            }
            What::Exponents(packet) => {
                for (block, code) in side.exponents_of(&layout, packet).zip(codes()) {
                    if Exponent::from_code(code).is_none() {
                        return Err(Trouble::Result(format!("{code} is no exponent (block {seq})")));
                    }
                    side.exponents[block] = code;
                }
                side.unagreed -= 1;
            }
            What::Block { block, part } => {
                let parts = side.parts(&layout, block);
                let (start, len) = side.part(&layout, block, part, parts);
                let into = tensor.get_mut(start, len);
                match layout.integers.filter(|_| !side.is_full(&layout, block)) {
                    Some(integers) => {
                        let exponent = Exponent::from_code(side.exponents[block]).expect("checked when it came");
                        let scaled = integers.at(exponent).expect("it is finite");
                        scaled.dequantise(into, payload, ByteOrder::Big);
                    }
                    None => swap_bytes(layout.word(), into, payload),
                }
                if op.all_reduce.op == ReduceOp::Avg {
                    let (place, finish) = (into.as_mut_ptr(), Finish::DivideBy(self.config.world));
                    // SAFETY: one operand, which is the destination.
                    unsafe { reduce(ReduceOp::Avg, layout.dtype, place, &[place.cast_const()], len, finish) };
                }
                let piece = layout.piece_bytes();
                let first = side.first_piece + (start - side.start) / piece;
                for here in &mut op.delivered[first..first + len.div_ceil(piece)] {
                    debug_assert!(!*here, "a result is delivered once");
                    *here = true;
                    op.undelivered -= 1;
                }
            }
        }
        Ok(())
    }
}

/// The form of a packet's block.
struct PacketShape {
    format: Format,
    exponent: i16,
    /// Bytes of data; zeros follow them.
    bytes: usize,
    packet_bytes: usize,
}

impl Op {
    fn has_all(&self) -> bool {
        self.undelivered == 0 && self.sides.iter().all(|side| side.unagreed == 0)
    }

    /// The pieces of a server's part, by their place in `delivered`.
    fn pieces_of(&self, server: usize) -> Range<usize> {
        let side = &self.sides[server];
        side.first_piece..side.first_piece + side.len.div_ceil(self.layout.piece_bytes())
    }

    /// The form of the packet that carries `what`.
    fn shape(&self, server: usize, what: What) -> PacketShape {
        let (layout, side) = (&self.layout, &self.sides[server]);
        let added =
            |format, exponent, bytes| PacketShape { format, exponent, bytes, packet_bytes: layout.filled(bytes) };
        match what {
            What::Header => added(Format::Exponents, 0, 2 * HEADER_EXPONENTS),
            What::Exponents(packet) => added(Format::Exponents, 0, 2 * side.exponents_of(layout, packet).len()),
            What::Block { block, part } => {
                let (_, len) = side.part(layout, block, part, side.parts(layout, block));
                match layout.integers.filter(|_| !side.is_full(layout, block)) {
                    Some(integers) => {
                        let bytes = len / layout.dtype.size() * integers.integer().size();
                        added(layout.integer_format(), side.exponents[block], bytes)
                    }
                    None => PacketShape { format: layout.float_format(), exponent: 0, bytes: len, packet_bytes: len },
                }
            }
        }
    }

    /// Writes the block of the packet that carries `what`.
    fn write(&self, server: usize, what: What, payload: &mut [u8]) -> PacketShape {
        let shape = self.shape(server, what);
        let (payload, zeros) = payload[..shape.packet_bytes].split_at_mut(shape.bytes);
        zeros.fill(0);
        let (layout, side) = (&self.layout, &self.sides[server]);
        let put = |payload: &mut [u8], codes: &[i16]| {
            for (bytes, code) in payload.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                *bytes = code.to_be_bytes();
            }
        };
        match what {
            What::Header => put(payload, &header(self.all_reduce.fingerprint)),
            What::Exponents(packet) => put(payload, &side.exponents[side.exponents_of(layout, packet)]),
            What::Block { block, part } => {
                let (start, len) = side.part(layout, block, part, side.parts(layout, block));
                let bytes = self.all_reduce.tensor().get(start, len);
                match layout.integers.filter(|_| !side.is_full(layout, block)) {
                    Some(integers) => {
                        let exponent = Exponent::from_code(side.exponents[block]).expect("checked when it came");
                        integers.at(exponent).expect("it is finite").quantise(payload, bytes, ByteOrder::Big);
                    }
                    None => swap_bytes(layout.word(), payload, bytes),
                }
            }
        }
        shape
    }
}
