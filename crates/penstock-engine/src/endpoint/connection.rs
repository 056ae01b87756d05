//! A connection of a server and a client: a group of two ranks, in which everything is a message under a tag.

use super::memory::Memory;
use crate::group::Group;
use crate::runtime::Call;
use crate::ticket::Ticket;
use penstock_core::endpoint::{Class, Record, slot_tag};
use penstock_plan::Collective;
use penstock_stream::fingerprint::{Fingerprint, Name};
use penstock_types::{DType, Failure, Priority, ReduceOp};
use std::any::Any;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

/// The server's rank in the group of a connection, and the client's.
pub(super) const SERVER: u32 = 0;
pub(super) const CLIENT: u32 = 1;

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) group: Group,
    other: u32,
    /// Records of ours that were not taken.
    pub(super) saying: usize,
    /// All is said: the group is left when it is taken.
    pub(super) is_leaving: bool,
}

/// Where what is meant for an endpoint's thread is sent, until that has ended: nothing is sent that it does not read.
#[derive(Debug)]
pub(super) struct Inbox<I>(Arc<RwLock<Option<mpsc::Sender<I>>>>);

impl<I> Clone for Inbox<I> {
    fn clone(&self) -> Inbox<I> {
        Inbox(self.0.clone())
    }
}

impl<I> Inbox<I> {
    pub(super) fn new() -> (Inbox<I>, mpsc::Receiver<I>) {
        let (sender, receiver) = mpsc::channel();
        (Inbox(Arc::new(RwLock::new(Some(sender)))), receiver)
    }

    /// # Errors
    /// The thread has ended. It did not get this.
    pub(super) fn send(&self, input: I) -> Result<(), I> {
        match &*self.0.read().unwrap_or_else(PoisonError::into_inner) {
            Some(sender) => sender.send(input).map_err(|refused| refused.0),
            None => Err(input),
        }
    }

    /// From now on nothing can be sent. What was sent before lies in the receiver.
    pub(super) fn close(&self) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Where the bytes of a call go.
#[derive(Clone, Copy, Debug)]
pub(super) enum Direction {
    Out,
    In,
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

impl Connection {
    pub(super) fn new(group: Group, other: u32) -> Connection {
        Connection { group, other, saying: 0, is_leaving: false }
    }

    /// `lost` is called once the group has failed.
    pub(super) fn on_lost(&self, lost: impl FnOnce(Failure) + Send + 'static) {
        let watch = Ticket::default();
        watch.on_done(move |result| {
            if let Err(failure) = result {
                lost(failure.clone());
            }
        });
        self.group.watch(watch);
    }

    /// Sends a record. `done` is called on the engine's thread, as below.
    pub(super) fn say(&mut self, class: Class, record: &Record, done: impl FnOnce() + Send + 'static) {
        self.saying += 1;
        let memory = Memory::copy(&record.encode());
        let to = Collective::Send { to: self.other };
        self.start(to, class.tag(), class.priority(), Span::of(&memory), memory, move |_| done());
    }

    /// A record of ours was taken.
    pub(super) fn said(&mut self) {
        self.saying -= 1;
    }

    /// Leaves the group once all our words were taken. Returns whether it has left; until then it is to be called again.
    pub(super) fn leave_if_said(&mut self) -> bool {
        self.is_leaving = self.saying > 0;
        if !self.is_leaving {
            self.group.leave();
        }
        !self.is_leaving
    }

    /// Receives the next record of a class.
    pub(super) fn hear(&self, class: Class, done: impl FnOnce(Result<[u8; Record::BYTES], Failure>) + Send + 'static) {
        let memory = Memory::copy(&[0; Record::BYTES]);
        let record = memory.clone();
        let from = Collective::Recv { from: self.other };
        self.start(from, class.tag(), class.priority(), Span::of(&memory), memory, move |result| {
            let bytes = || record.bytes().try_into().expect("a record's length");
            done(result.clone().map(|()| bytes()));
        });
    }

    /// Sends or receives the bytes of a call; `keep` owns them. `done` is called when they were taken, or are here, and never if the
    /// group fails before.
    pub(super) fn transfer<K: Any + Send>(
        &self,
        direction: Direction,
        (slot, priority): (u32, Priority),
        bytes: Span,
        keep: K,
        done: impl FnOnce() + Send + 'static,
    ) -> Ticket {
        let collective = match direction {
            Direction::Out => Collective::Send { to: self.other },
            Direction::In => Collective::Recv { from: self.other },
        };
        self.start(collective, slot_tag(slot), priority, bytes, keep, move |result| {
            if result.is_ok() {
                done();
            }
        })
    }

    fn start<K: Any + Send>(
        &self,
        collective: Collective,
        tag: u32,
        priority: Priority,
        Span { address, len }: Span,
        keep: K,
        done: impl FnOnce(&Result<(), Failure>) + Send + 'static,
    ) -> Ticket {
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
        let ticket = unsafe { self.group.start(call) };
        ticket.on_done(done);
        ticket
    }
}

/// The next input of a thread that has something to do at a time; `None`: it is that time.
///
/// # Errors
/// Nobody is left who could send one.
pub(super) fn next<I>(inputs: &mpsc::Receiver<I>, by: Option<Instant>) -> Result<Option<I>, mpsc::RecvError> {
    let Some(by) = by else { return inputs.recv().map(Some) };
    match inputs.recv_timeout(by.saturating_duration_since(Instant::now())) {
        Ok(input) => Ok(Some(input)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => Err(mpsc::RecvError),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Threads send while the receiver ends: what was sent is read, and the rest refused.
    #[test]
    fn nothing_is_sent_that_is_not_read() {
        for _ in 0..300 {
            let (inbox, inputs) = Inbox::new();
            let senders = [0; 2].map(|_| {
                let inbox = inbox.clone();
                std::thread::spawn(move || (0..).take_while(|number: &u32| inbox.send(*number).is_ok()).count())
            });
            let read = inputs.iter().take(100).count();
            inbox.close();
            let late = inputs.try_iter().count();
            let sent: usize = senders.map(|sender| sender.join().unwrap()).iter().sum();
            assert_eq!(sent, read + late);
        }
    }
}
