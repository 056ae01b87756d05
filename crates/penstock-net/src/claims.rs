//! What threads do with the memory of operations while others decide: claims, and what waits for their end.
//!
//! A thread that reads, reduces or writes does so without the lock of the event loop, under a claim that it has made under the lock.
//! While a claim is open, its memory stays: an operation that ends, a group that fails and a peer that is gone are told to nobody
//! before all claims on them have ended.

use penstock_stream::MessageKey;
use penstock_types::{PeerId, Scope};

/// Where `len` bytes at `offset` of an outgoing message to a peer lie, as [`crate::Handler::source`] said it until the group failed.
/// It keeps that memory alive.
pub type Source = Box<dyn Fn(PeerId, &MessageKey, u64, usize) -> Option<*const u8> + Send>;

/// What a thread has of a socket while it has a claim.
pub(crate) trait Half {
    /// Touches the memory of a group or channel that has failed no more: what is left to write is copied from `source`.
    fn drop_all(&mut self, peer: PeerId, scope: Scope, source: &Source);
}

/// What one thread does at present.
#[derive(Clone, Debug, Default)]
pub(crate) struct Claim {
    /// The peer, and the socket, whose reader or writer the thread has.
    pub(crate) peer: Option<PeerId>,
    pub(crate) token: u64,
    /// The frame whose payload it puts into an operation's memory: its message, and its offset there.
    pub(crate) lands: Option<(MessageKey, u64)>,
    /// Messages whose bytes it reads in operations' memory.
    pub(crate) lent: Vec<MessageKey>,
}

impl Claim {
    fn keys(&self) -> impl Iterator<Item = &MessageKey> {
        self.lands.iter().map(|(key, _)| key).chain(&self.lent)
    }
}

/// What runs when claims have ended.
type Act = Box<dyn FnOnce() + Send>;

/// The open claims of all threads, one each at most.
#[derive(Default)]
pub(crate) struct Claims {
    of: Vec<Option<Claim>>,
    /// Groups and channels that have failed.
    drops: Vec<Dropped>,
    /// What waits until all that has failed is let go of.
    after_drops: Vec<Act>,
    /// Operations that have ended well, each named by one of its messages, and who is told.
    ended: Vec<(MessageKey, Act)>,
}

/// A group or channel that has failed while threads had claims in it.
struct Dropped {
    scope: Scope,
    source: Source,
    /// The threads that still have them.
    by: Vec<usize>,
}

impl Claims {
    pub(crate) fn new(threads: usize) -> Claims {
        Claims { of: vec![None; threads], ..Claims::default() }
    }

    /// A thread begins.
    pub(crate) fn open(&mut self, thread: usize, claim: Claim) {
        debug_assert!(self.of[thread].is_none(), "a thread does one thing at a time");
        let is_taken =
            claim.lands.is_some_and(|(key, offset)| claim.peer.is_some_and(|peer| self.lands(peer, &key, offset)));
        debug_assert!(!is_taken, "one thread at a time touches a range");
        self.of[thread] = Some(claim);
    }

    /// A thread has ended what it had claimed; `half` is what it had of the socket. Returns what is to run now.
    pub(crate) fn close(&mut self, thread: usize, half: Option<&mut dyn Half>) -> Vec<Act> {
        let Some(Claim { peer, .. }) = self.of[thread].take() else { return Vec::new() };
        if self.drops.is_empty() && self.ended.is_empty() {
            return Vec::new();
        }
        if let (Some(half), Some(peer)) = (half, peer) {
            for dropped in self.drops.iter().filter(|dropped| dropped.by.contains(&thread)) {
                half.drop_all(peer, dropped.scope, &dropped.source);
            }
        }
        self.drops.iter_mut().for_each(|dropped| dropped.by.retain(|by| *by != thread));
        self.drops.retain(|dropped| !dropped.by.is_empty());
        let (still, free) = std::mem::take(&mut self.ended).into_iter().partition(|(key, _)| self.touch(key));
        self.ended = still;
        let free: Vec<(MessageKey, Act)> = free;
        let mut due: Vec<Act> = free.into_iter().map(|(_, act)| act).collect();
        if self.drops.is_empty() {
            due.append(&mut self.after_drops);
        }
        due
    }

    /// Whether a thread has a claim.
    pub(crate) fn has(&self, thread: usize) -> bool {
        self.of[thread].is_some()
    }

    /// The peer on whose stream a thread has a claim.
    pub(crate) fn peer_of(&self, thread: usize) -> Option<PeerId> {
        self.of[thread].as_ref()?.peer
    }

    /// The frame for which a thread that reads a socket has claimed its place.
    pub(crate) fn landing_of(&self, token: u64) -> Option<(MessageKey, u64)> {
        self.of.iter().flatten().find_map(|claim| claim.lands.filter(|_| claim.token == token))
    }

    /// Whether a thread puts the payload of this frame of a peer, or of a copy of it, into memory.
    pub(crate) fn lands(&self, peer: PeerId, key: &MessageKey, offset: u64) -> bool {
        self.of.iter().flatten().any(|claim| claim.peer == Some(peer) && claim.lands == Some((*key, offset)))
    }

    /// Whether a thread has the reader or writer of a socket.
    pub(crate) fn are_on(&self, token: u64) -> bool {
        self.of.iter().flatten().any(|claim| claim.token == token)
    }

    /// Whether a thread has a reader or writer of a peer's.
    pub(crate) fn concern(&self, peer: PeerId) -> bool {
        self.of.iter().flatten().any(|claim| claim.peer == Some(peer))
    }

    /// Whether a thread touches the memory of the operation that a key names. Messages with several ranks under one tag may count as
    /// one operation.
    pub(crate) fn touch(&self, op: &MessageKey) -> bool {
        let is_of = |key: &MessageKey| (key.group, key.space, key.op) == (op.group, op.space, op.op);
        self.of.iter().flatten().any(|claim| claim.keys().any(is_of))
    }

    /// Tells of the end of an operation when nothing touches its memory.
    pub(crate) fn when_untouched(&mut self, op: &MessageKey, act: impl FnOnce() + Send + 'static) {
        match self.touch(op) {
            true => self.ended.push((*op, Box::new(act))),
            false => act(),
        }
    }

    /// A group or channel has failed, and what no thread has of its memory was let go of: threads let go of the rest when they come
    /// back.
    pub(crate) fn drop_all(&mut self, scope: Scope, source: Source) {
        let touches = |claim: &Claim| claim.keys().any(|key| key.is_in(scope));
        let by = (0..).zip(&self.of).filter(|(_, claim)| claim.as_ref().is_some_and(touches));
        let by: Vec<usize> = by.map(|(thread, _)| thread).collect();
        if !by.is_empty() {
            self.drops.push(Dropped { scope, source, by });
        }
    }

    /// Runs `act` after all that has failed so far is let go of.
    pub(crate) fn after_drops(&mut self, act: Act) {
        match self.drops.is_empty() {
            true => act(),
            false => self.after_drops.push(act),
        }
    }
}

#[cfg(test)]
#[path = "claims_tests.rs"]
mod tests;
