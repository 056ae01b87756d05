//! What the event loop asks and tells ([`Handler`]), and what it can be asked for ([`Peers`]).

use crate::claims::{Claims, Source};
use crate::contact::Contact;
use crate::fds::Fd;
use penstock_stream::handshake::Hello;
use penstock_stream::peer::{Counts, Event, Landing, Outbound, Peer, PeerConfig, StreamId, Urgency};
use penstock_stream::{FrameError, Header, MessageKey};
use penstock_types::{Generation, GroupId, PeerId, Scope, Time};
use std::collections::VecDeque;

/// What is done with the payload of a frame, on the thread that has read it.
pub type Use = Box<dyn FnOnce(&[u8]) + Send>;

/// What is done without the lock.
pub trait Unlocked {
    /// Does it, once.
    fn run(&mut self);
}

/// What the event loop asks and tells. Its threads call by turns, under the loop's lock.
pub trait Handler {
    /// A piece of what takes long.
    type Task: Unlocked;

    /// A header has come on a stream of a peer. Says where its payload goes. A place must stay valid until the frame is handled or
    /// its group or channel is dropped ([`Peers::drop_all`]).
    ///
    /// # Errors
    /// A frame that the peer may not send; the stream cannot go on.
    fn header(
        &mut self,
        peers: &mut Peers,
        peer: PeerId,
        stream: StreamId,
        header: &Header,
    ) -> Result<Landing<*mut u8>, FrameError>;
    /// A data frame is whole in a buffer of the loop's. If its payload can be used without the lock: how, and the stream that is still
    /// reading another copy of it, the rest of which must be discarded. [`Handler::frame`] follows with `placed`; until then the frame's
    /// place stays valid as in [`Handler::header`].
    fn claim(
        &mut self,
        peers: &mut Peers,
        peer: PeerId,
        stream: StreamId,
        header: &Header,
    ) -> Option<(Use, Option<StreamId>)>;
    /// A frame is whole. `payload`: its bytes, or none where they were discarded or used. `placed`: they were checked, and lie where
    /// [`Handler::header`] said, or were used as [`Handler::claim`] said. Returns the stream that is still reading another copy of it:
    /// the rest of that must be discarded.
    ///
    /// # Errors
    /// A payload that was damaged, or a frame that the peer may not send; the stream cannot go on.
    fn frame(
        &mut self,
        peers: &mut Peers,
        peer: PeerId,
        stream: StreamId,
        header: &Header,
        payload: &[u8],
        placed: bool,
    ) -> Result<Option<StreamId>, FrameError>;
    /// `len` bytes at `offset` of an outgoing message, or `None` when its operation is over.
    fn source(&self, peer: PeerId, key: &MessageKey, offset: u64, len: usize) -> Option<*const u8>;
    /// The descriptor that goes along with the offer of shared memory, once.
    fn descriptor(&mut self, peer: PeerId, region: u64) -> Option<Fd>;
    /// The peer passes a descriptor; the frame that says what it is for has not been handled yet.
    ///
    /// # Errors
    /// More of them than frames can ask for.
    fn passed(&mut self, peer: PeerId, descriptor: Fd) -> Result<(), FrameError>;
    /// Something happened at a peer.
    fn event(&mut self, peers: &mut Peers, peer: PeerId, event: Event);
    /// A stream of the peer is up. `local`: on this host, in process `pid`.
    fn connected(&mut self, peers: &mut Peers, peer: PeerId, local: bool, pid: u32, job: Option<GroupId>);
    /// All connections to a peer are about to be closed, for a reason that the peer does not know: what it is told now leaves
    /// before, as far as a socket takes it at once.
    fn cut_off(&mut self, peers: &mut Peers, peer: PeerId, reason: &str);
    /// A peer cannot be reached any more. `has_died`: its process is gone for certain.
    fn lost(&mut self, peers: &mut Peers, peer: PeerId, reason: &str, has_died: bool);
    /// A peer has left in good order: it has taken what it wanted, and nothing more will come from it.
    fn left(&mut self, peers: &mut Peers, peer: PeerId, reason: &str);
    /// A peer would not have us, or we would not have it: no stream will come up.
    fn refused(&mut self, peers: &mut Peers, peer: PeerId, reason: &str);
    /// [`crate::Wake::wake`] was called.
    fn woken(&mut self, peers: &mut Peers, now: Time);
    /// `now` has passed what the last call returned.
    fn tick(&mut self, peers: &mut Peers, now: Time) -> Time;
    /// Somebody wants a stream in this job.
    fn admit(&self, hello: &Hello) -> Admission;
    /// Whether [`Handler::work`] has something to do.
    fn has_work(&self) -> bool;
    /// Begins one piece of what takes long and can wait until all frames that are ready have left: a millisecond at most. A task is
    /// done without the lock, in the memory of the operation that the key names, and [`Handler::worked`] follows.
    fn work(&mut self, peers: &mut Peers) -> Option<(MessageKey, Self::Task)>;
    /// A task is done.
    fn worked(&mut self, peers: &mut Peers, task: Self::Task);
    /// Whether a join of this job waits for peers to be connected.
    fn awaits(&self, job: GroupId) -> bool;
    /// Whether the loop should say good-bye and end.
    fn stopping(&self) -> bool;
    /// How long the end waits, in nanoseconds, for peers that live to take what was sent to them, beyond what it takes to notice that
    /// one does not; `None`: it does not wait, not even for acknowledgements.
    fn patience(&self) -> Option<u64>;
    /// The loop is about to end: what is told to peers now is the last that leaves, as far as the sockets take it at once.
    fn ending(&mut self, peers: &mut Peers);
    /// The loop ends although a peer, which has neither left in good order nor been lost, has not taken all that was sent to it.
    fn undelivered(&mut self, peers: &mut Peers, peer: PeerId);
}

/// An answer to a HELLO.
#[derive(Clone, Debug)]
pub enum Admission {
    /// It may prove that it knows this secret; it is this peer.
    Admit(Vec<u8>, PeerId),
    /// We do not run such a job, or such a process is not in it.
    Unauthenticated,
    /// Another generation of the job runs here.
    Generation(Generation),
    /// We have not read the job's members yet.
    NotYet,
    /// It was a peer and is lost, for this reason, or it is not known here yet that it has lost this process.
    Lost(String),
}

/// The machines of all peers, and what the engine wants done with them.
pub struct Peers {
    pub(crate) machines: Vec<Peer>,
    /// Contacts of peers that the loop has no connections to yet.
    pub(crate) added: Vec<(PeerId, Contact)>,
    pub(crate) dirty: Vec<PeerId>,
    pub(crate) is_dirty: Vec<bool>,
    pub(crate) urgency: Urgency,
    /// Why the last attempt to connect to each peer failed.
    pub(crate) troubles: Vec<Option<String>>,
    pub(crate) orders: VecDeque<Order>,
    pub(crate) claims: Claims,
    pub(crate) counts: Vec<ThreadCounts>,
    pub(crate) now: Time,
    pub(crate) buffer_bytes: usize,
}

/// What a thread of the loop has done.
#[derive(Clone, Copy, Debug, Default)]
pub struct ThreadCounts {
    /// Bytes read from streams.
    pub read_bytes: u64,
    /// Bytes written to streams.
    pub written_bytes: u64,
    /// How long it has had the lock. Not counted where it is the only thread.
    pub locked_ns: u64,
    /// How long it has waited for the lock.
    pub waited_ns: u64,
}

pub(crate) enum Order {
    Connect(PeerId, GroupId, Vec<u8>),
    Drop(Scope, Source),
    Then(Box<dyn FnOnce() + Send>),
}

impl Peers {
    /// No peers yet, of a loop with so many threads.
    pub(crate) fn new(threads: usize) -> Peers {
        Peers {
            machines: Vec::new(),
            added: Vec::new(),
            dirty: Vec::new(),
            is_dirty: Vec::new(),
            urgency: Urgency::default(),
            troubles: Vec::new(),
            orders: VecDeque::new(),
            claims: Claims::new(threads),
            counts: vec![ThreadCounts::default(); threads],
            now: Time(0),
            buffer_bytes: 0,
        }
    }

    /// A new peer, not connected yet. Its number is the next one, or that of a peer that is gone ([`Handler::left`],
    /// [`Handler::lost`]).
    pub fn add(&mut self, peer: PeerId, contact: Contact) {
        let (at, machine) = (peer as usize, Peer::new(PeerConfig::default(), self.now));
        if at < self.machines.len() {
            self.machines[at] = machine;
            self.troubles[at] = None;
            self.orders.retain(|order| !matches!(order, Order::Connect(to, ..) if *to == peer));
        } else {
            debug_assert_eq!(at, self.machines.len(), "peers are numbered without gaps");
            self.machines.push(machine);
            self.is_dirty.push(false);
            self.troubles.push(None);
        }
        self.added.push((peer, contact));
    }

    /// The machine of a peer; it will be asked for frames before the loop sleeps.
    pub fn machine(&mut self, peer: PeerId) -> &mut Peer {
        if !self.is_dirty[peer as usize] {
            self.is_dirty[peer as usize] = true;
            self.dirty.push(peer);
        }
        &mut self.machines[peer as usize]
    }

    /// The next frame of a peer for a stream. Who asks goes on until there is none, so the peer is not asked again for this.
    pub(crate) fn poll_frame(&mut self, peer: PeerId, stream: StreamId, now: Time) -> Option<Outbound> {
        self.machines[peer as usize].poll_frame(stream, now)
    }

    /// The peers that may have something to send, the most urgent last.
    pub(crate) fn take_dirty(&mut self) -> Vec<PeerId> {
        let mut taken = std::mem::take(&mut self.dirty);
        for peer in &taken {
            self.is_dirty[*peer as usize] = false;
        }
        taken.sort_by_key(|peer| std::cmp::Reverse(self.look(*peer).most_urgent()));
        taken
    }

    /// Tells a peer's machine what is urgent for the whole node.
    pub(crate) fn hurry(&mut self, peer: PeerId) {
        self.machines[peer as usize].hurry(self.urgency);
    }

    /// Looks without touching.
    #[must_use]
    pub fn look(&self, peer: PeerId) -> &Peer {
        &self.machines[peer as usize]
    }

    /// Why the last attempt to connect to a peer failed, if one has.
    #[must_use]
    pub fn trouble(&self, peer: PeerId) -> Option<&str> {
        self.troubles[peer as usize].as_deref()
    }

    /// The loop's time.
    #[must_use]
    pub fn now(&self) -> Time {
        self.now
    }

    /// Starts connecting to a peer, for a job, with its secret. Nothing may be queued for it before [`Handler::connected`]. Until
    /// then, each job that is wanted with the peer is told here, since the peer may want only one of them.
    pub fn connect(&mut self, peer: PeerId, job: GroupId, secret: Vec<u8>) {
        self.orders.push_back(Order::Connect(peer, job, secret));
    }

    /// Lets go of all memory of the operations of a group, or of a channel, at once after the current frame. Frames that are being
    /// written are copied from `source`, which is dropped then. What was sent for the collectives that are `finished` goes on.
    ///
    /// What waits for that to have happened is given to [`Peers::after_drop`].
    pub fn drop_all(&mut self, scope: Scope, finished: &Counts, source: Source) {
        for machine in &mut self.machines {
            machine.forget(scope, finished);
        }
        self.orders.push_back(Order::Drop(scope, source));
    }

    /// Runs `act` when no thread touches the memory of an operation any more, which has ended and is named by one of its messages.
    pub fn when_untouched(&mut self, op: &MessageKey, act: impl FnOnce() + Send + 'static) {
        self.claims.when_untouched(op, act);
    }

    /// Runs `act` after the groups and channels dropped so far have been let go of: no buffer of theirs is touched any more.
    pub fn after_drop(&mut self, act: Box<dyn FnOnce() + Send>) {
        self.orders.push_back(Order::Then(act));
    }

    /// What each thread of the loop has done.
    #[must_use]
    pub fn threads(&self) -> &[ThreadCounts] {
        &self.counts
    }

    /// Bytes of the loop's own that hold payloads.
    #[must_use]
    pub fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }
}
