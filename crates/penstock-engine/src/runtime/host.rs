//! Carries out what the core decides: in the memory of operations, and through the machines of peers.

use super::local::Local;
use crate::buffers::{Buffers, Computation, Kept, Memory};
use crate::recorder::{Entry as Recorded, Message, Record};
use crate::scale::Scale;
use crate::ticket::{Promise, Ticket};
use penstock_core::groups::{Beginning, Failed, Host, Issue};
use penstock_core::operation::{Instance, Place, Verdict};
use penstock_net::{Peers, Use};
use penstock_stream::frame::{Kind, Reference};
use penstock_stream::peer::Peer;
use penstock_stream::{FrameError, Header, MessageKey};
use penstock_types::{Failure, FailureKind, GroupId, PeerId, Scope, Time};
use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

/// The engine's part of an operation: the caller's buffers, what the operation keeps beside them, and whom to tell of its end.
pub(super) struct Body {
    pub(super) ticket: Promise,
    pub(super) input: *const u8,
    pub(super) output: *mut u8,
    recorded: Option<Recorded>,
    /// Since it has begun.
    buffers: Option<Buffers>,
    /// The factor of the contribution, which is applied in pieces before the operation's first step.
    scale: Option<Scale>,
    /// Every rank's number, of a join's operation.
    gathered: Option<Box<Gathered>>,
    _keep: Option<Box<dyn Any + Send>>,
}

struct Gathered {
    own: u64,
    all: Box<[u64]>,
}

// SAFETY: the pointers are the caller's buffers, which the body keeps alive; they are used by the engine's threads only.
unsafe impl Send for Body {}

impl Body {
    pub(super) fn new(ticket: Promise, input: *const u8, output: *mut u8, keep: Option<Box<dyn Any + Send>>) -> Body {
        Body { ticket, input, output, recorded: None, buffers: None, scale: None, gathered: None, _keep: keep }
    }

    /// Where bytes of a running operation lie.
    pub(super) fn address(&self, place: Place) -> *mut u8 {
        self.buffers.as_ref().expect("it has begun").address(place)
    }

    /// How a claimed frame's payload is used: see [`Buffers::claimed`].
    pub(super) fn claimed(&self, verdict: Verdict) -> Use {
        Box::new(self.buffers.as_ref().expect("it has begun").claimed(verdict))
    }

    fn buffers(&mut self) -> &mut Buffers {
        self.buffers.as_mut().expect("it has begun")
    }

    /// Bytes of the engine's own that it holds.
    pub(super) fn memory_bytes(&self) -> usize {
        self.buffers.as_ref().map_or(0, Buffers::bytes) + self.scale.as_ref().map_or(0, Scale::memory_bytes)
    }
}

/// What the core acts with while the event loop calls.
pub(super) struct Hands<'a> {
    pub(super) peers: &'a mut Peers,
    pub(super) local: &'a mut Local,
    /// The frame at hand, if one is: its payload, and where in the message that begins.
    pub(super) payload: &'a [u8],
    pub(super) offset: u64,
}

impl Host for Hands<'_> {
    type Body = Body;
    type Kept = Kept;
    type Copied = Arc<[u8]>;
    type Task = Computation;

    fn now(&self) -> Time {
        self.peers.now()
    }

    fn machine(&mut self, peer: PeerId) -> &mut Peer {
        self.peers.machine(peer)
    }

    fn look(&self, peer: PeerId) -> &Peer {
        self.peers.look(peer)
    }

    fn warn(&mut self, message: &str) {
        log::warn!("penstock: {message}");
    }

    fn trouble(&self, peer: PeerId) -> Option<String> {
        self.peers.trouble(peer).map(str::to_owned)
    }

    fn gather(&mut self, own: u64, world: u32) -> Body {
        let mut gathered = Box::new(Gathered { own, all: vec![0; world as usize].into_boxed_slice() });
        let (input, output) = (std::ptr::from_ref(&gathered.own).cast(), gathered.all.as_mut_ptr().cast());
        let body = Body::new(Ticket::default().promise(), input, output, None);
        Body { gathered: Some(gathered), ..body }
    }

    fn gathered(&self, body: &Body) -> Vec<u64> {
        body.gathered.as_ref().expect("it is a join's").all.to_vec()
    }

    fn issued(&mut self, body: &mut Body, issue: &Issue<'_>) {
        if let (Some(recorded), Some(seq)) = (body.recorded, issue.seq) {
            return self.local.recorder.numbered(recorded, seq, Message::of(issue.call));
        }
        body.recorded = Some(self.local.recorder.issued(Record {
            group: issue.channel.clone(),
            seq: issue.seq,
            message: Message::of(issue.call),
            what: issue.call.fingerprint,
            bytes: issue.call.bytes,
            algorithm: issue.algorithm,
            coflow: issue.call.coflow,
            issued: body.ticket.made(),
            ended: None,
            waits_for: issue.waits_for.map(str::to_owned),
            is_told: false,
        }));
    }

    fn bound(&mut self, body: &mut Body, from: u32) {
        body.ticket.set_source(from);
    }

    fn begin(&mut self, body: &mut Body, beginning: &Beginning<'_>) -> bool {
        let Beginning { call, request, steps, is_read } = *beginning;
        if is_read {
            let buffers = [(body.input as u64, request.input_bytes()), (body.output as u64, request.output_bytes())];
            self.local.read_by_others(&buffers);
        }
        let (mut input, mut output) = (body.input, body.output);
        body.scale = Scale::new(call, request, &mut input, &mut output);
        let memory = Memory { dtype: call.dtype, op: call.op, world: request.world, input, output };
        body.buffers = Some(Buffers::new(steps.clone(), memory));
        body.scale.as_ref().is_none_or(Scale::is_done)
    }

    fn prepare(&mut self, body: &mut Body) -> bool {
        let scale = body.scale.as_mut().expect("it is not ready");
        scale.work();
        scale.is_done()
    }

    fn copy(&mut self, body: &Body, from: Place, len: u64) -> Arc<[u8]> {
        if len == 0 {
            return Arc::from([]);
        }
        // SAFETY: the plan's slices lie in the operation's buffers.
        unsafe { std::slice::from_raw_parts(body.address(from), len as usize) }.into()
    }

    fn lend(&mut self, peer: PeerId, body: &Body, from: Place, len: u64, may_share: bool) -> Reference {
        let address = body.address(from) as u64;
        let shared = if may_share { self.local.share(self.peers, peer, address, len) } else { None };
        let (region, address) = shared.unwrap_or((0, address));
        Reference { address, epoch: self.local.memory_epoch.epoch(), region }
    }

    fn take(&mut self, body: &mut Body, verdict: Verdict) {
        body.buffers().take(verdict, self.offset, self.payload);
    }

    fn keep(&mut self, peer: PeerId, header: &Header) -> Result<Kept, FrameError> {
        match header.kind {
            Kind::Reference => self.local.remote(peer, header, self.payload),
            _ => Ok(Kept::Bytes(self.payload.to_vec())),
        }
    }

    fn kept_bytes(&self, kept: &Kept) -> Option<u64> {
        match kept {
            Kept::Bytes(bytes) => Some(bytes.len() as u64),
            Kept::Remote(..) => None,
        }
    }

    fn take_kept(&mut self, body: &mut Body, verdict: Verdict, kept: Kept) {
        body.buffers().take_kept(verdict, kept);
    }

    fn compute(&mut self, body: &mut Body, instance: Instance) {
        let read = body.buffers().compute(instance);
        debug_assert!(read.is_ok_and(|read| read.is_empty()), "what is kept as bytes needs no reading");
    }

    fn work(&mut self, body: &mut Body, instance: Instance) -> Computation {
        body.buffers().computation(instance)
    }

    fn done(&mut self, key: &MessageKey, body: Body) {
        if let Some(recorded) = body.recorded {
            self.local.recorder.ended(recorded, Instant::now(), true);
        }
        self.peers.when_untouched(key, move || {
            body.ticket.complete(Ok(()));
            drop(body);
        });
    }

    fn refused(&mut self, body: Body, failure: Failure) {
        if let Some(recorded) = body.recorded {
            self.local.recorder.ended(recorded, Instant::now(), false);
        }
        body.ticket.complete(Err(failure));
    }

    fn joined(&mut self, group: GroupId) {
        if let Some(ticket) = self.local.joins.remove(&group) {
            ticket.complete(Ok(()));
        }
    }

    fn failed(&mut self, failed: Failed<Body>) {
        self.local.recorder.failed(&failed.names, Instant::now());
        let operations = failed.operations().map(|(body, failure)| (body.ticket.clone(), failure));
        let (scope, finished, failure) = (failed.scope, failed.finished.clone(), failed.failure.clone());
        let watches =
            self.local.watches.extract_if(|of, _| scope.covers(of.group, of.channel)).flat_map(|(_, all)| all);
        let join = if scope.is_group() { self.local.joins.remove(&scope.group) } else { None };
        let whole = watches.chain(join).map(|ticket| (ticket, failure.clone()));
        let tickets: Vec<(Promise, Failure)> = whole.chain(operations).collect();
        // The loop releases the buffers before it does anything else. The operations keep the buffers alive until then.
        let sources = failed.into_sources();
        self.peers.drop_all(
            scope,
            &finished,
            Box::new(move |peer, key, offset, len| {
                let (body, place) = sources.find(peer, key, offset, len)?;
                Some(body.address(place).cast_const())
            }),
        );
        self.local.turn();
        self.local.has_failed |= failure.kind != FailureKind::Closed;
        for (ticket, failure) in tickets {
            self.peers.after_drop(Box::new(move || ticket.complete(Err(failure))));
        }
    }

    fn left(&mut self, scope: Scope) {
        let left: Vec<_> = self.local.watches.extract_if(|of, _| scope.covers(of.group, of.channel)).collect();
        for (of, watches) in left {
            let what = if of.is_group() { "the group was destroyed." } else { "the channel was closed." };
            let failure = Failure { group_lives: !scope.is_group(), ..Failure::fatal(FailureKind::Closed, what) };
            watches.into_iter().for_each(|watch| watch.complete(Err(failure.clone())));
        }
    }
}
