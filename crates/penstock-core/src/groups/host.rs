//! What the core has others do: [`Host`].

use super::group::{Active, Call};
use crate::members::Members;
use crate::name::OpId;
use crate::operation::{Instance, Place, Verdict};
use penstock_plan::{Algorithm, Request, Steps};
use penstock_stream::frame::Reference;
use penstock_stream::peer::{Copied, Counts, Peer};
use penstock_stream::{FrameError, Header, MessageKey};
use penstock_types::{ChannelId, Failure, GroupId, PeerId, Scope, Time};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Carries out what [`super::Groups`] decides: in memory and on sockets in the engine, with nothing at all in tests.
///
/// All calls are direct (the core is generic over its host), and each is carried out before it returns. What the host holds of an
/// operation, its buffers and the caller that waits, travels through the core as a value that the core never looks into.
pub trait Host {
    /// The host's part of an operation: its buffers, and whom to tell of its end.
    type Body;
    /// What the host keeps of a message whose operation is not ready for it: bytes, or a reference.
    type Kept;
    /// What the host makes of bytes that are sent at once: a copy, or in a simulation only their length.
    type Copied: Copied;
    /// A piece of what takes long, which is done without the core.
    type Task;

    /// The time.
    fn now(&self) -> Time;
    /// The machine of a peer, which is asked for frames afterwards.
    fn machine(&mut self, peer: PeerId) -> &mut Peer<Self::Copied>;
    /// The same, only to look.
    fn look(&self, peer: PeerId) -> &Peer<Self::Copied>;
    /// Says something to the user that is no failure.
    fn warn(&mut self, message: &str);
    /// Why the last attempt to connect to a peer failed, if one has.
    fn trouble(&self, peer: PeerId) -> Option<String>;

    /// Makes the body of a join's operation, an all-gather of a number of each rank; `own` is this rank's.
    fn gather(&mut self, own: u64, world: u32) -> Self::Body;
    /// Every rank's number, after a join's operation has ended.
    fn gathered(&self, body: &Self::Body) -> Vec<u64>;
    /// An operation was issued, or a receive from any source has got its number.
    fn issued(&mut self, body: &mut Self::Body, issue: &Issue<'_>);
    /// The rank that a receive from any source receives from.
    fn bound(&mut self, body: &mut Self::Body, from: u32);
    /// An operation begins: its buffers are ready. `is_read`: other processes may read them. Returns false if [`Host::prepare`]
    /// has to be called before its steps run.
    fn begin(&mut self, body: &mut Self::Body, beginning: &Beginning<'_>) -> bool;
    /// Does a piece of what comes before an operation's first step. Returns whether that was the last one.
    fn prepare(&mut self, body: &mut Self::Body) -> bool;

    /// Copies bytes that are sent at once.
    fn copy(&mut self, body: &Self::Body, from: Place, len: u64) -> Self::Copied;
    /// Where a peer that can read this process's memory finds bytes. `may_share`: also in memory that is shared with it.
    fn lend(&mut self, peer: PeerId, body: &Self::Body, from: Place, len: u64, may_share: bool) -> Reference;
    /// Does with the bytes of the frame at hand what was decided.
    fn take(&mut self, body: &mut Self::Body, verdict: Verdict);
    /// Keeps what the frame at hand has: its bytes, or its reference.
    ///
    /// # Errors
    /// A reference to memory that the peer has not shared.
    fn keep(&mut self, peer: PeerId, header: &Header) -> Result<Self::Kept, FrameError>;
    /// How much of a message is here that was kept. `None`: a reference.
    fn kept_bytes(&self, kept: &Self::Kept) -> Option<u64>;
    /// Does with a message that was kept what was decided.
    fn take_kept(&mut self, body: &mut Self::Body, verdict: Verdict, kept: Self::Kept);
    /// Does what [`crate::operation::Effect::Compute`] asks for.
    fn compute(&mut self, body: &mut Self::Body, instance: Instance);
    /// Makes ready what an instance does that takes long, with what is kept for it.
    fn work(&mut self, body: &mut Self::Body, instance: Instance) -> Self::Task;

    /// An operation has ended well; `key` is of one of its messages. Its memory is still touched by what was claimed before: the host
    /// tells nobody before that has ended.
    fn done(&mut self, key: &MessageKey, body: Self::Body);
    /// A call is refused: the group goes on without it, or there is none.
    fn refused(&mut self, body: Self::Body, failure: Failure);
    /// A join has ended well.
    fn joined(&mut self, group: GroupId);
    /// A group, or a channel of one, has failed. The host lets go of all buffers before it tells anybody. Frames that are being written are copied from
    /// [`Sources::find`].
    fn failed(&mut self, failed: Failed<Self::Body>);
    /// The rank has left a group, or closed a channel.
    fn left(&mut self, scope: Scope);
}

/// An operation that was issued.
#[derive(Debug)]
pub struct Issue<'a> {
    /// Its channel's name, with the group's.
    pub channel: &'a Arc<str>,
    /// Its number. `None`: a receive that has no message yet.
    pub seq: Option<u64>,
    /// What the caller asks for.
    pub call: &'a Call,
    /// How it runs.
    pub algorithm: Algorithm,
    /// What it waits for, if it has no number.
    pub waits_for: Option<&'static str>,
}

/// An operation that begins.
#[derive(Debug)]
pub struct Beginning<'a> {
    /// What the caller asks for.
    pub call: &'a Call,
    /// What its plan is made for.
    pub request: &'a Request,
    /// Its plan.
    pub steps: &'a Arc<Steps>,
    /// Whether other processes may read its buffers.
    pub is_read: bool,
}

/// A group or a channel that has failed, with all its operations.
#[derive(Debug)]
pub struct Failed<B> {
    /// What has failed.
    pub scope: Scope,
    /// The names of its channels.
    pub names: Vec<Arc<str>>,
    /// Why.
    pub failure: Failure,
    /// The collectives that other ranks may still need: what was sent for them goes on.
    pub finished: Counts,
    /// How messages call each channel.
    pub(super) labels: BTreeMap<ChannelId, String>,
    /// This rank, for messages.
    pub(super) own: Arc<str>,
    pub(super) members: Members,
    pub(super) running: HashMap<OpId, Active<B>>,
    /// With their names.
    pub(super) waiting: Vec<(String, ChannelId, B)>,
}

impl<B> Failed<B> {
    /// All operations that had not ended, each with the failure that its caller gets.
    pub fn operations(&self) -> impl Iterator<Item = (&B, Failure)> {
        let running = self.running.iter();
        let running = running
            .map(|(op, active)| (format!("{} #{}", active.fingerprint.describe(), op.seq), op.channel, &active.body));
        let waiting = self.waiting.iter().map(|(what, channel, body)| (what.clone(), *channel, body));
        running.chain(waiting).map(|(what, channel, body)| {
            let Failed { labels, own, failure, .. } = self;
            let message = format!("{what} of {} on {own} failed: {}", labels[&channel], failure.message);
            (body, Failure { message, ..failure.clone() })
        })
    }

    /// The operations whose bytes may be on their way.
    pub fn into_sources(self) -> Sources<B> {
        Sources { members: self.members, running: self.running }
    }
}

/// Where the bytes of the messages of a group or channel that has failed lie, until the host has let go of them.
#[derive(Debug)]
pub struct Sources<B> {
    members: Members,
    running: HashMap<OpId, Active<B>>,
}

impl<B> Sources<B> {
    /// Where `len` bytes at `offset` of an outgoing message lie.
    #[must_use]
    pub fn find(&self, peer: PeerId, key: &MessageKey, offset: u64, len: usize) -> Option<(&B, Place)> {
        let (to, op) = self.members.operation(peer, key)?;
        let active = self.running.get(&op)?;
        Some((&active.body, active.operation.source(to, key.message, offset, len)?))
    }
}
