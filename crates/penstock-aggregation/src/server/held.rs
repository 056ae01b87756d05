//! Blocks that were accepted, where results come apart from them: collected in buffers, worked on by somebody else, and kept as
//! results of the pull flow until all workers have them.
//!
//! ```text
//!   accepted, in the order of SeqNums         done, in any order          numbered in the order in which they are done
//!   ┌──────────────────────────┐  whole   ┌──────────────────────┐       ┌─────────────────────────────────────────┐
//!   │ open buffer: s, s+1, ... │ ───────> │ worked on, elsewhere │ ────> │ results: base ... sent ... next         │
//!   └──────────────────────────┘  LAST    └──────────────────────┘       └─────────────────────────────────────────┘
//!   each takes one of `limit` places here ───────────────────────────────── and frees it when all workers have its result
//! ```

use super::{Server, Transmit};
use crate::packet::{FLAG_FULL, FLAG_LAST, Format, Header, Kind};
use crate::rules::{Refusal, Rule};
use crate::{Endpoint, Serial};
use penstock_types::Time;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Blocks whose sums belong together: those that workers pushed one after the other, up to one that says that it is the last. (Blocks
/// of exponents are in no buffer. They are done when they are accepted.)
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Buffer {
    /// The SeqNum of its first block, by which the server knows it.
    pub first: Serial,
    /// Its blocks, in the order of their SeqNums.
    pub blocks: Vec<Block>,
    /// Their sums, one after the other, as they are on the wire. Later their results, as long as these were.
    pub bytes: Vec<u8>,
}

/// A block of a [`Buffer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block {
    /// The SeqNum of the block.
    pub seq: Serial,
    /// The format of its elements.
    pub format: Format,
    /// The elements are as the tensor has them, although other blocks of it are integers.
    pub is_full: bool,
    /// The exponent of its elements.
    pub exponent: i16,
    /// Its length in bytes.
    pub length: usize,
}

/// What a server holds of blocks that were accepted.
#[derive(Clone, Debug)]
pub(super) struct Held {
    /// How many blocks it holds at most, and how many it does.
    limit: u32,
    count: u32,
    open: Buffer,
    /// The open buffer has more blocks than the limit: they are forgotten, and those that follow.
    is_too_long: bool,
    /// Whole buffers that nobody works on.
    whole: VecDeque<Buffer>,
    /// The blocks of buffers that are worked on.
    working: Vec<Vec<Block>>,
    results: VecDeque<Kept>,
    /// The number of the first one in `results`.
    base: Serial,
    /// The first one that was not sent to all.
    sent: Serial,
    /// Nodes to which that one is still to be sent, last first.
    to: Vec<Endpoint>,
    /// Nodes that request a result.
    wanted: VecDeque<(Serial, Endpoint)>,
}

/// A result, kept until all workers have it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Kept {
    block: Block,
    bytes: Arc<Vec<u8>>,
    place: Range<usize>,
}

const EMPTY: Buffer = Buffer { first: Serial(0), blocks: Vec::new(), bytes: Vec::new() };

impl Held {
    pub(super) fn new(start: Serial, limit: u32) -> Held {
        Held {
            limit,
            count: 0,
            open: EMPTY,
            is_too_long: false,
            whole: VecDeque::new(),
            working: Vec::new(),
            results: VecDeque::new(),
            base: start,
            sent: start,
            to: Vec::new(),
            wanted: VecDeque::new(),
        }
    }

    /// How many more blocks may be accepted.
    pub(super) fn room(&self) -> u32 {
        self.limit.saturating_sub(self.count)
    }

    /// The number of the result that is sent next.
    pub(super) fn sent(&self) -> Serial {
        self.sent
    }

    /// The highest Ack that a node may have: while a result leaves for one node after the other, the first may have it.
    pub(super) fn most_ack(&self) -> Serial {
        self.sent.plus(u32::from(!self.to.is_empty()))
    }

    /// The number of the next result.
    pub(super) fn next(&self) -> Serial {
        self.base.plus(self.results.len() as u32)
    }

    /// The next block in the order of SeqNums was accepted.
    fn accept(&mut self, block: Block, is_last: bool, sum: &[u8], block_bytes: usize) {
        if block.format == Format::Exponents {
            self.count += 1;
            return self.keep(block, Arc::new(sum.to_vec()), 0..block.length);
        }
        if self.open.blocks.is_empty() && !self.is_too_long {
            self.open.first = block.seq;
        }
        if !self.is_too_long {
            self.count += 1;
            self.open.blocks.push(block);
            self.open.bytes.extend_from_slice(sum);
        }
        if is_last && self.is_too_long {
            self.count += 1;
            self.is_too_long = false;
            let first = std::mem::replace(&mut self.open, EMPTY).first;
            let (limit, bytes) = (self.limit, self.limit as usize * block_bytes);
            self.fail(
                first,
                &format!(
                    "the buffer has more than {limit} blocks, and the job was opened with pending_bytes of {bytes}: open it with more \
                     than the longest buffer takes"
                ),
                block_bytes,
            );
        } else if is_last {
            self.whole.push_back(std::mem::replace(&mut self.open, EMPTY));
        } else if self.open.blocks.len() as u32 >= self.limit {
            // Its next block would never have room.
            self.count -= self.open.blocks.len() as u32;
            self.open = Buffer { first: self.open.first, ..EMPTY };
            self.is_too_long = true;
        }
    }

    /// The work behind a buffer has ended; false: no such buffer is worked on.
    fn end(&mut self, first: Serial, outcome: Result<Vec<u8>, String>, block_bytes: usize) -> bool {
        let Some(at) = self.working.iter().position(|blocks| blocks[0].seq == first) else { return false };
        let blocks = self.working.remove(at);
        let bytes: usize = blocks.iter().map(|block| block.length).sum();
        let outcome = outcome.and_then(|result| match result.len() {
            len if len == bytes => Ok(result),
            len => Err(format!(
                "its result has {len} bytes, and the buffer {bytes}: the work must return as many as it was given"
            )),
        });
        match outcome {
            Ok(result) => {
                let (result, mut start) = (Arc::new(result), 0);
                for block in blocks {
                    self.keep(block, result.clone(), start..start + block.length);
                    start += block.length;
                }
            }
            Err(why) => {
                self.count -= blocks.len() as u32 - 1;
                self.fail(first, &why, block_bytes);
            }
        }
        true
    }

    /// In place of a buffer's results goes one text.
    fn fail(&mut self, first: Serial, why: &str, block_bytes: usize) {
        let why = if why.is_empty() { "no reason was given" } else { why };
        let mut length = why.len().min(block_bytes);
        while !why.is_char_boundary(length) {
            length -= 1;
        }
        let text = if length == 0 { "?" } else { &why[..length] };
        let block = Block { seq: first, format: Format::Text, is_full: false, exponent: 0, length: text.len() };
        self.keep(block, Arc::new(text.as_bytes().to_vec()), 0..text.len());
    }

    fn keep(&mut self, block: Block, bytes: Arc<Vec<u8>>, place: Range<usize>) {
        self.results.push_back(Kept { block, bytes, place });
    }

    /// All workers have the results before `ack`.
    fn release(&mut self, ack: Serial) {
        let ack = ack.oldest(self.sent);
        while ack.is_newer_than(self.base) && self.results.pop_front().is_some() {
            self.base = self.base.plus(1);
            self.count -= 1;
        }
    }

    fn result(&self, number: Serial) -> Option<&Kept> {
        self.results.get(usize::try_from(number.ahead_of(self.base)).ok()?)
    }
}

impl Server {
    /// A whole buffer to be worked on: the driver gives it to somebody else, and [`Server::done`] the outcome, in any order.
    pub fn poll_work(&mut self) -> Option<Buffer> {
        let held = self.held.as_mut()?;
        let buffer = held.whole.pop_front()?;
        held.working.push(buffer.blocks.clone());
        Some(buffer)
    }

    /// The work behind the buffer with this first SeqNum has ended: with as many bytes as the buffer had, or for this reason without a
    /// result. Returns false if the buffer is not being worked on.
    pub fn done(&mut self, now: Time, first: Serial, outcome: Result<Vec<u8>, String>) -> bool {
        let block_bytes = self.config.block_bytes;
        let ended = self.held.as_mut().is_some_and(|held| held.end(first, outcome, block_bytes));
        if ended {
            self.beats.at = self.beats.at.min(now.plus(self.config.heartbeat_every));
        }
        ended
    }

    /// Blocks that the server holds until all workers have their results, and how many it holds at most; `None`: results do not come
    /// apart.
    #[must_use]
    pub fn held(&self) -> Option<(u32, u32)> {
        self.held.as_ref().map(|held| (held.count, held.limit))
    }

    /// Buffers that are being worked on, or wait for that.
    #[must_use]
    pub fn unfinished(&self) -> usize {
        self.held.as_ref().map_or(0, |held| held.whole.len() + held.working.len())
    }

    /// Ack passes a block whose sum lies in its slot.
    pub(super) fn absorb(&mut self, seq: Serial) {
        let index = self.index(seq);
        let Some(held) = &mut self.held else { return };
        let slot = &self.slots[index];
        let block = Block {
            seq,
            format: slot.format,
            is_full: slot.flags & FLAG_FULL != 0,
            exponent: slot.exponent,
            length: slot.length,
        };
        let sum = &self.results[index * self.config.block_bytes..][..slot.length];
        held.accept(block, slot.flags & FLAG_LAST != 0, sum, self.config.block_bytes);
    }

    /// All workers have the results before the slowest one's Ack.
    pub(super) fn release_held(&mut self) {
        let ack = self.slowest().0;
        if let Some(held) = &mut self.held {
            held.release(ack);
        }
    }

    /// A node requests a result of the pull flow.
    pub(super) fn request_pulled(&mut self, number: Serial, to: Endpoint) -> Result<(), Refusal> {
        let is_answered = self.rules.hold(Rule::Answer);
        let held = self.held.as_mut().ok_or(Refusal::Kind)?;
        if !held.sent.is_newer_than(number) || held.result(number).is_none() || !is_answered {
            return Err(Refusal::Stale);
        }
        if !held.wanted.contains(&(number, to)) {
            held.wanted.push_back((number, to));
        }
        Ok(())
    }

    /// The next result to send, and to whom: those that are requested first, then new ones for all, as far as the slowest worker has
    /// room for them.
    fn next_pulled(&mut self) -> Option<(Serial, Endpoint)> {
        let (most, is_bounded) = (self.slowest().1, self.rules.hold(Rule::Room));
        loop {
            let held = self.held.as_mut()?;
            if let Some((number, to)) = held.wanted.pop_front() {
                if held.result(number).is_some() {
                    return Some((number, to));
                }
                continue;
            }
            let number = held.sent;
            if let Some(to) = held.to.pop() {
                if held.to.is_empty() {
                    held.sent = number.plus(1);
                }
                return Some((number, to));
            }
            if number == held.next() || (is_bounded && number.is_newer_than(most)) {
                return None;
            }
            let receivers = self.receivers(false);
            if receivers.is_empty() {
                // Nobody hears the server now. Those who come back request it.
                self.held.as_mut()?.sent = number.plus(1);
            }
            self.held.as_mut()?.to = receivers;
        }
    }

    pub(super) fn transmit_pulled(&mut self) -> Option<Transmit<'_>> {
        let (number, to) = self.next_pulled()?;
        let header = self.downward(Kind::Pulled, number, to);
        let Kept { block, bytes, place } = self.held.as_ref()?.result(number)?;
        let flags = if block.is_full { FLAG_FULL } else { 0 };
        let workers = u64::from(block.seq.0) << 32 | header.workers & u64::from(u32::MAX);
        let header = Header { format: block.format, flags, exponent: block.exponent, workers, ..header };
        let payload = &bytes[place.clone()];
        Some(Transmit { to, header: header.encode(payload, self.config.key.as_ref()), payload })
    }
}

#[cfg(test)]
impl Server {
    /// Ends the work behind the next whole buffer but `skipped`, as [`Server::done`] does. Returns whether there is such a buffer.
    pub(crate) fn work_on(&mut self, skipped: usize, outcome: impl FnOnce(Buffer) -> Result<Vec<u8>, String>) -> bool {
        let Some(held) = &mut self.held else { return false };
        let Some(buffer) = held.whole.remove(skipped) else { return false };
        held.working.push(buffer.blocks.clone());
        self.done(Time(0), buffer.first, outcome(buffer))
    }

    /// The first SeqNums of the whole buffers.
    pub(crate) fn whole_buffers(&self) -> Vec<Serial> {
        self.held.iter().flat_map(|held| &held.whole).map(|buffer| buffer.first).collect()
    }
}

#[cfg(test)]
impl Held {
    /// Hashes all state that decides what the server does, except packets that wait to be sent.
    pub(super) fn digest(&self, state: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        (self.count, &self.open, self.is_too_long, &self.whole, &self.working).hash(state);
        (&self.results, self.base, self.sent).hash(state);
    }
}

#[cfg(test)]
#[path = "held_tests.rs"]
mod tests;
