//! Workers behind streams: they push and pull whole buffers over connections, where their datagrams cannot pass.
//!
//! The server's own process plays such a worker: a [`Worker`] as every rank has one, whose packets go to the server's machine and come
//! from it without a network between. So a sum has the same bits, a job mixes both kinds of workers, and every rule that is checked of a
//! worker holds of this one.
//!
//! ```text
//!   push of buffer n ──▶ its blocks are pushed ──▶ all were accepted: the push has ended, its bytes are let go of
//!   pull of buffer n ──▶ waits for its results ──▶ kept until the worker says that it has them: it may die and come back meanwhile
//! ```

use crate::admission::Common;
use penstock_aggregation::{
    Endpoint, FLAG_LAST, Format, Header, Kind, Outbound, Received, Route, Serial, Timing, Worker, WorkerConfig,
};
use penstock_types::Time;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

/// Bytes that are pushed, with their owner.
pub type Body = Box<dyn AsRef<[u8]> + Send>;
/// The results of a buffer, shared with those who pull it.
pub type Results = Arc<Vec<u8>>;
/// How a call is answered: with what it asked for, or with the reason why not.
pub type Answer<T> = Box<dyn FnOnce(Result<T, String>) + Send>;

/// What a client asks of a buffer ([`crate::Daemon::stream`]). Its answer comes once, from any thread.
pub enum Streamed {
    /// Push these sums' parts, in this machine's order of bytes. The answer: all its blocks were accepted.
    Push(Body, Answer<()>),
    /// Pull its results. The answer: these, or why there are none.
    Pull(Answer<Results>),
}

impl fmt::Debug for Streamed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if matches!(self, Streamed::Push(..)) { "a push" } else { "a pull" })
    }
}

impl Streamed {
    pub(crate) fn refuse(self, why: String) {
        match self {
            Streamed::Push(_, answer) => answer(Err(why)),
            Streamed::Pull(answer) => answer(Err(why)),
        }
    }
}

/// A buffer's name: "JOB/EPOCH/WORKER/NUMBER/FORMAT" to push, "JOB/EPOCH/WORKER/NUMBER" or "JOB/EPOCH/WORKER/NUMBER/HAS" to pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) job: u32,
    pub(crate) epoch: u16,
    pub(crate) worker: u16,
    pub(crate) number: u64,
    /// The format of a push.
    pub(crate) format: Option<Format>,
    /// The worker has all results before this one.
    pub(crate) has: u64,
}

impl Name {
    pub(crate) fn parse(text: &str, is_push: bool) -> Result<Name, String> {
        let wrong = || {
            let last = if is_push { "/FORMAT, where FORMAT is f32 or i32" } else { ", or /HAS behind it" };
            format!("{text:?} names no buffer: JOB/EPOCH/WORKER/NUMBER{last}")
        };
        let parts: Vec<&str> = text.split('/').collect();
        let [job, epoch, worker, number, rest @ ..] = &parts[..] else { return Err(wrong()) };
        let format = match rest {
            ["f32"] if is_push => Some(Format::F32),
            ["i32"] if is_push => Some(Format::I32),
            _ => None,
        };
        let has = match rest {
            [] if !is_push => Some(0),
            [has] if !is_push => has.parse().ok(),
            _ => format.map(|_| 0),
        };
        let name = || {
            let (job, epoch) = (job.parse().ok()?, epoch.parse().ok()?);
            Some(Name { job, epoch, worker: worker.parse().ok()?, number: number.parse().ok()?, format, has: has? })
        };
        name().ok_or_else(wrong)
    }
}

/// A worker behind a stream, in one epoch of a job.
pub(crate) struct Stream {
    pub(crate) endpoint: Endpoint,
    worker: Worker,
    is_apart: bool,
    block_bytes: usize,
    /// The most bytes of results that are kept, or will be.
    limit: usize,
    /// Buffers from `first` on, also those that were not pushed yet, though a later one was, or is pulled.
    buffers: VecDeque<Pushed>,
    first: u64,
    /// From this buffer on none can be done, and why.
    broken: Option<(u64, String)>,
}

#[derive(Default)]
struct Pushed {
    format: Option<Format>,
    /// The CRC32C of what was pushed.
    sum: u32,
    /// From its push until all its blocks are accepted.
    body: Option<Body>,
    pushes: Vec<Answer<()>>,
    pulls: Vec<Answer<Results>>,
    /// The SeqNum of its first block, how many blocks have one, and how many there are; 0: it is not pushed.
    start: Serial,
    posted: u32,
    blocks: u32,
    /// Results, and how many blocks have one.
    results: Vec<u8>,
    got: u32,
    bytes: usize,
    outcome: Option<Result<Results, String>>,
    /// A pull has had the outcome.
    is_told: bool,
}

/// What a push is to its buffer.
enum Arrival {
    /// Its blocks were accepted already.
    Accepted,
    /// The same push waits for them.
    Same,
    /// The first. It has so many blocks.
    New(u32),
}

impl Stream {
    /// The worker with this name at the server. It keeps results of up to `limit` bytes.
    pub(crate) fn new(now: Time, common: &Common, endpoint: Endpoint, name: u64, limit: usize) -> Stream {
        let config = WorkerConfig {
            job: common.job,
            epoch: common.epoch,
            key: common.key,
            name,
            window: common.window,
            start: Serial(common.start),
            parent: SERVER,
            server: SERVER,
            ask_parent: false,
            full_to_parent: false,
            apart: common.apart,
            timing: Timing::default(),
        };
        Stream {
            endpoint,
            worker: Worker::new(now, config),
            is_apart: common.apart,
            block_bytes: common.block_bytes / WIDTH * WIDTH,
            limit,
            buffers: VecDeque::new(),
            first: 0,
            broken: None,
        }
    }

    pub(crate) fn ask(&mut self, name: Name, call: Streamed) {
        match call {
            Streamed::Push(body, answer) => self.push(name, body, answer),
            Streamed::Pull(answer) => self.pull(name, answer),
        }
    }

    fn push(&mut self, name: Name, body: Body, answer: Answer<()>) {
        let bytes = (*body).as_ref();
        let shape = (bytes.len(), crc32c::crc32c(bytes), name.format);
        match self.arrival(name.number, shape) {
            Err(why) => answer(Err(why)),
            Ok(Arrival::Accepted) => answer(Ok(())),
            Ok(Arrival::Same) => {
                let buffer = self.at(name.number).expect("it was looked at");
                wait(&mut buffer.pushes, answer, |oldest| oldest(Err(AGAIN.into())));
            }
            Ok(Arrival::New(blocks)) => {
                let buffer = self.at(name.number).expect("it was looked at");
                (buffer.bytes, buffer.sum, buffer.format) = shape;
                buffer.blocks = blocks;
                buffer.body = Some(body);
                buffer.pushes.push(answer);
            }
        }
    }

    /// What a push with so many bytes, this CRC32C and this format is, or why it is refused.
    fn arrival(&mut self, number: u64, (bytes, sum, format): (usize, u32, Option<Format>)) -> Result<Arrival, String> {
        let (first, block_bytes) = (self.first, self.block_bytes);
        if number < first {
            return Ok(Arrival::Accepted);
        }
        let why = self.why_broken(number);
        let Some(buffer) = self.at(number) else { return Err(too_far(number, first)) };
        if buffer.blocks == 0 {
            if bytes == 0 || !bytes.is_multiple_of(WIDTH) || block_bytes == 0 {
                return Err(format!(
                    "{bytes} bytes are no whole number of elements of {WIDTH}, or a block has no room for one"
                ));
            }
            why.map_or(Ok(()), Err)?;
            self.make_room(number, bytes)?;
            return Ok(Arrival::New(bytes.div_ceil(block_bytes) as u32));
        }
        // A client that was cut off does not know whether its push has come.
        if buffer.bytes != bytes || buffer.format != format {
            return Err(format!("buffer {number} was pushed already, with {} bytes", buffer.bytes));
        }
        if buffer.sum != sum {
            return Err(format!(
                "buffer {number} was pushed already, with other contents: open a new epoch to push other gradients"
            ));
        }
        match (buffer.body.is_some(), why) {
            (false, _) => Ok(Arrival::Accepted),
            (true, Some(why)) => Err(why),
            (true, None) => Ok(Arrival::Same),
        }
    }

    /// Makes room for a buffer's bytes. Blocks leave in the order of buffers, so later buffers that wait for this one must not keep it out.
    fn make_room(&mut self, number: u64, bytes: usize) -> Result<(), String> {
        let (first, limit) = (self.first, self.limit);
        let kept: usize = self.buffers.iter().map(|buffer| buffer.bytes).sum();
        let more = if self.is_apart { "" } else { "\"done\": \"buffer\" and " };
        let how = format!(
            "pull those that are done, and say /HAS behind the name of a pull, which lets go of those before, or open the job with \
             {more}a larger pending_bytes"
        );
        let later = (number - first) as usize + 1;
        // None of these has left: this buffer goes before them.
        let movable: usize = self.buffers.iter().skip(later).map(|buffer| buffer.bytes).sum();
        if kept - movable + bytes > limit {
            return Err(format!(
                "{bytes} bytes, and {kept} of buffers from {first} on are here, of at most {limit}: {how}"
            ));
        }
        let mut over = (kept + bytes).saturating_sub(limit);
        for (index, buffer) in self.buffers.iter_mut().enumerate().skip(later).rev().filter(|(_, b)| b.blocks > 0) {
            if over == 0 {
                break;
            }
            over = over.saturating_sub(buffer.bytes);
            let why = format!(
                "buffer {} has made room for buffer {number}, of at most {limit} bytes: push it again later; {how}",
                first + index as u64
            );
            // Pulls go on waiting, as they do before a push.
            let pulls = std::mem::take(&mut buffer.pulls);
            let Pushed { pushes, .. } = std::mem::replace(buffer, Pushed { pulls, ..Pushed::default() });
            pushes.into_iter().for_each(|answer| answer(Err(why.clone())));
        }
        Ok(())
    }

    fn why_broken(&self, number: u64) -> Option<String> {
        self.broken.as_ref().filter(|(from, _)| number >= *from).map(|(_, why)| why.clone())
    }

    /// Where a block of this SeqNum is: its number in a buffer, and the buffer's.
    pub(crate) fn number_of(&mut self, seq: Serial) -> Option<(u32, u64)> {
        let first = self.first;
        let (buffer, block, _) = self.place_of(seq)?;
        let start = buffer.start;
        let index = self.buffers.iter().position(|buffer| buffer.posted > 0 && buffer.start == start)?;
        Some((block, first + index as u64))
    }

    /// Workers' blocks of this SeqNum do not fit together, so neither its buffer nor a later one will be done: whoever waits hears why.
    pub(crate) fn misfit(&mut self, seq: Serial, why: &str) {
        let Some((_, number)) = self.number_of(seq) else { return };
        if self.why_broken(number).is_some() {
            return;
        }
        for buffer in self.buffers.iter_mut().skip((number - self.first) as usize) {
            buffer.pushes.drain(..).for_each(|answer| answer(Err(why.to_owned())));
            buffer.pulls.drain(..).for_each(|answer| answer(Err(why.to_owned())));
        }
        self.broken = Some((number, why.to_owned()));
    }

    /// Calls that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.pushes.len() + buffer.pulls.len()).sum()
    }

    /// Buffers that were pushed, and whose outcome no pull has had.
    pub(crate) fn untold(&self) -> usize {
        self.buffers.iter().filter(|buffer| buffer.blocks > 0 && !buffer.is_told).count()
    }

    fn pull(&mut self, Name { number, has, .. }: Name, answer: Answer<Results>) {
        while self.first < has && self.buffers.front().is_some_and(|buffer| buffer.outcome.is_some()) {
            self.buffers.pop_front();
            self.first += 1;
        }
        let (first, why) = (self.first, self.why_broken(number));
        match self.at(number) {
            None if number < first => {
                answer(Err(format!("the worker has said that it has the results before {first}")))
            }
            None => answer(Err(too_far(number, first))),
            Some(buffer) => match (&buffer.outcome, why) {
                (Some(outcome), _) => {
                    buffer.is_told = true;
                    answer(outcome.clone());
                }
                (None, Some(why)) => answer(Err(why)),
                // Also where its push is still on the way: calls overtake each other.
                (None, None) => wait(&mut buffer.pulls, answer, |oldest| oldest(Err(AGAIN.into()))),
            },
        }
    }

    /// The place of a buffer that is or may be pushed.
    fn at(&mut self, number: u64) -> Option<&mut Pushed> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok().filter(|index| *index < MOST_BUFFERS)?;
        if self.buffers.len() <= index {
            self.buffers.resize_with(index + 1, Pushed::default);
        }
        self.buffers.get_mut(index)
    }

    pub(crate) fn poll_timeout(&self) -> Time {
        self.worker.poll_timeout()
    }

    /// The worker's next packet.
    pub(crate) fn poll_transmit(&mut self, now: Time) -> Option<Vec<u8>> {
        if self.worker.poll_timeout() <= now {
            self.worker.handle_timeout(now);
        }
        self.post();
        let Outbound { header, .. } = self.worker.poll_transmit(now)?;
        if header.kind != Kind::Push {
            return Some(self.worker.seal(&header, Format::None, 0, &[]).to_vec());
        }
        let is_apart = self.is_apart;
        let (buffer, index, range) = self.place_of(header.seq).expect("it was posted");
        let mut block = (**buffer.body.as_ref().expect("it is not accepted")).as_ref()[range].to_vec();
        swap(&mut block);
        // Where a block's sum is its result, blocks belong to no buffer.
        let flags = if is_apart && index + 1 == buffer.blocks { FLAG_LAST } else { 0 };
        let format = buffer.format.expect("it was pushed");
        let header = Header { flags: header.flags | flags, ..header };
        let mut packet = self.worker.seal(&header, format, 0, &block).to_vec();
        packet.extend_from_slice(&block);
        Some(packet)
    }

    fn post(&mut self) {
        // In the order of their numbers, on all workers.
        for buffer in self.buffers.iter_mut().take_while(|buffer| buffer.blocks > 0) {
            while buffer.posted < buffer.blocks {
                let Some(seq) = self.worker.post(Route::Tree) else { return };
                if buffer.posted == 0 {
                    buffer.start = seq;
                }
                buffer.posted += 1;
            }
        }
    }

    /// The buffer of a block, the block's number in it, and its bytes there.
    fn place_of(&mut self, seq: Serial) -> Option<(&mut Pushed, u32, std::ops::Range<usize>)> {
        let block_bytes = self.block_bytes;
        self.buffers.iter_mut().find_map(|buffer| {
            let index = u32::try_from(seq.ahead_of(buffer.start)).ok().filter(|index| *index < buffer.posted)?;
            let start = index as usize * block_bytes;
            let end = buffer.bytes.min(start + block_bytes);
            Some((buffer, index, start..end))
        })
    }

    /// A packet of the server.
    pub(crate) fn handle_packet(&mut self, now: Time, packet: &[u8]) {
        if let Ok(Received::Result { seq, format, payload, .. }) = self.worker.handle_packet(now, SERVER, packet)
            && let Some((buffer, _, range)) = self.place_of(seq)
        {
            buffer.results.resize(buffer.bytes, 0);
            if format == Format::Text {
                buffer.end(Err(String::from_utf8_lossy(payload).into_owned()));
            } else if payload.len() == range.len() {
                let place = &mut buffer.results[range];
                place.copy_from_slice(payload);
                swap(place);
                buffer.got += 1;
                if buffer.got == buffer.blocks {
                    let results = std::mem::take(&mut buffer.results);
                    buffer.end(Ok(Arc::new(results)));
                }
            }
        }
        let accepted = self.worker.received();
        for buffer in self.buffers.iter_mut().filter(|buffer| buffer.body.is_some()) {
            if buffer.posted < buffer.blocks || buffer.start.plus(buffer.blocks).is_newer_than(accepted) {
                break;
            }
            buffer.body = None;
            buffer.pushes.drain(..).for_each(|answer| answer(Ok(())));
        }
    }

    /// The epoch is over: whoever waits hears that.
    pub(crate) fn close(self, why: &str) {
        for buffer in self.buffers {
            buffer.pushes.into_iter().for_each(|answer| answer(Err(why.to_owned())));
            buffer.pulls.into_iter().for_each(|answer| answer(Err(why.to_owned())));
        }
    }
}

/// Lets a call wait for an outcome. Those of clients that have died are not taken back, so the oldest goes when there are too many.
fn wait<A>(waiting: &mut Vec<A>, answer: A, refuse: impl FnOnce(A)) {
    if waiting.len() >= MOST_WAITING {
        refuse(waiting.remove(0));
    }
    waiting.push(answer);
}

fn too_far(number: u64, first: u64) -> String {
    format!("buffer {number} is too far ahead: {first} to {} are here at a time", first + MOST_BUFFERS as u64 - 1)
}

impl Pushed {
    fn end(&mut self, outcome: Result<Results, String>) {
        self.results = Vec::new();
        self.is_told = !self.pulls.is_empty();
        self.pulls.drain(..).for_each(|answer| answer(outcome.clone()));
        self.outcome = Some(outcome);
    }
}

/// From this machine's order of bytes to that of packets, and back.
fn swap(elements: &mut [u8]) {
    if cfg!(target_endian = "little") {
        elements.chunks_exact_mut(WIDTH).for_each(<[u8]>::reverse);
    }
}

/// The most buffers of a worker behind a stream that are pushed, waited for or kept at a time.
pub const MOST_BUFFERS: usize = 4096;
/// The most calls that wait for one buffer: far more than one worker has connections.
const MOST_WAITING: usize = 64;
const AGAIN: &str = "others have asked for this buffer since";
/// Bytes of an element.
const WIDTH: usize = 4;
/// What a worker behind a stream calls the server.
const SERVER: Endpoint = Endpoint(0);

#[cfg(test)]
mod tests {
    use super::*;

    /// Names are read as they are written, and nothing else is.
    #[test]
    fn names() {
        let name = Name { job: 7, epoch: 1, worker: 3, number: 9, format: None, has: 0 };
        assert_eq!(Name::parse("7/1/3/9/f32", true), Ok(Name { format: Some(Format::F32), ..name }));
        assert_eq!(Name::parse("7/1/3/9", false), Ok(name));
        assert_eq!(Name::parse("7/1/3/9/8", false), Ok(Name { has: 8, ..name }));
        for (text, is_push) in [("7/1/3/9", true), ("7/1/3/9/f64", true), ("7/1/3/9/f32", false), ("7/1/3", false)]
            .into_iter()
            .chain([("7/99999/3/9", false), ("", false), ("7/1/3/9/8/7", false), ("7/1/-3/9/i32", true)])
        {
            assert!(Name::parse(text, is_push).unwrap_err().contains("names no buffer"), "{text}");
        }
    }
}
