//! A connection of a server and a client: a group of two ranks, in which everything is a message under a tag.

use super::memory::Memory;
use crate::group::Group;
use crate::runtime::Call;
use penstock_core::endpoint::{Lane, Record, slot_tag};
use penstock_plan::Collective;
use penstock_stream::fingerprint::{Fingerprint, Name};
use penstock_types::{DType, Failure, Priority, ReduceOp};
use std::any::Any;

/// The server's rank in the group of a connection, and the client's.
pub(super) const SERVER: u32 = 0;
pub(super) const CLIENT: u32 = 1;

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) group: Group,
    other: u32,
    /// Records of ours that were not taken.
    pub(super) saying: usize,
}

/// Bytes of a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) address: *mut u8,
    pub(super) len: u64,
}

// SAFETY: only operations use the address, which keep its owner.
unsafe impl Send for Span {}

impl Span {
    pub(super) fn of(memory: &Memory) -> Span {
        Span { address: memory.address(), len: memory.len() as u64 }
    }
}

impl Link {
    pub(super) fn new(group: Group, other: u32) -> Link {
        Link { group, other, saying: 0 }
    }

    /// Sends a record. `done` is called on the engine's thread, as below.
    pub(super) fn say(&mut self, lane: Lane, record: &Record, done: impl FnOnce() + Send + 'static) {
        self.saying += 1;
        let memory = Memory::copy(&record.encode());
        let to = Collective::Send { to: self.other };
        self.start(to, lane.tag(), lane.priority(), Span::of(&memory), memory, move |_| done());
    }

    /// Receives the next record of a lane.
    pub(super) fn hear(&self, lane: Lane, done: impl FnOnce(Result<[u8; Record::BYTES], Failure>) + Send + 'static) {
        let memory = Memory::copy(&[0; Record::BYTES]);
        let record = memory.clone();
        let from = Collective::Recv { from: self.other };
        self.start(from, lane.tag(), lane.priority(), Span::of(&memory), memory, move |result| {
            let bytes = || record.bytes().try_into().expect("a record's length");
            done(result.clone().map(|()| bytes()));
        });
    }

    /// Sends the bytes of a call; `keep` owns them. `done` gets whether they were taken.
    pub(super) fn send<K: Any + Send>(
        &self,
        slot: u32,
        priority: Priority,
        bytes: Span,
        keep: K,
        done: impl FnOnce(bool) + Send + 'static,
    ) {
        let to = Collective::Send { to: self.other };
        self.start(to, slot_tag(slot), priority, bytes, keep, move |result| done(result.is_ok()));
    }

    /// Receives the bytes of a call.
    pub(super) fn receive<K: Any + Send>(
        &self,
        slot: u32,
        priority: Priority,
        bytes: Span,
        keep: K,
        done: impl FnOnce(bool) + Send + 'static,
    ) {
        let from = Collective::Recv { from: self.other };
        self.start(from, slot_tag(slot), priority, bytes, keep, move |result| done(result.is_ok()));
    }

    fn start<K: Any + Send>(
        &self,
        collective: Collective,
        tag: u32,
        priority: Priority,
        Span { address, len }: Span,
        keep: K,
        done: impl FnOnce(&Result<(), Failure>) + Send + 'static,
    ) {
        let call = Call {
            collective,
            fingerprint: Fingerprint::new(Name::PointToPoint, None, DType::U8, None, len),
            dtype: DType::U8,
            op: ReduceOp::Sum,
            bytes: len,
            splits: None,
            input: address,
            output: address,
            tag,
            coflow: 0,
            priority,
            hold: false,
            // Calls have time-outs of their own. A message that has begun ends, or its peer is lost.
            timeout: u64::MAX,
            keep: Some(Box::new(keep)),
        };
        // SAFETY: `keep` owns the bytes. What is received is read after its end, and what is sent is not written before.
        unsafe { self.group.start(call) }.on_done(done);
    }
}
