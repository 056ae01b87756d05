//! Builds the [`Steps`] of a request.
//!
//! Every algorithm is written once, from the view of rank `r`, over a [`Draft`] that cuts slices into segments, numbers
//! the messages and drops what would touch no bytes. Three rules hold throughout:
//!
//! - [`Draft::messages`] is called in the same order with the same arguments on every rank, so that all agree on the
//!   numbers of messages without talking.
//! - Two steps that pass a segment on to each other cover the same chunk, hence have the same segments, and depend on
//!   each other segment by segment.
//! - A step that takes a message depends on another step of its rank only where its destination must be freed first
//!   (or is itself an operand): until then the transport cannot grant the message, which costs a round trip.

mod all_reduce;
mod rooted;
mod shards;

use crate::{
    Action, Algorithm, Buf, Collective, Dep, Operand, PlanError, Request, Slice, Step, Steps, partition::Chunks,
};

/// One rank's steps for a request.
///
/// The result is a pure function of the arguments. It is compact: its size grows with the number of ranks, not with
/// the number of bytes. Empty for 0 bytes, but for what only two ranks
/// know of: a send or receive, and an all-to-all with splits, pass a notification then; and a barrier consists of them.
/// Copies only for one rank.
///
/// # Errors
/// [`PlanError`] where the request contradicts itself or `algorithm` is not [`Algorithm::of`] the collective.
pub fn steps(request: &Request, algorithm: Algorithm) -> Result<Steps, PlanError> {
    request.validate()?;
    if !algorithm.is_for(request) {
        let offered = Algorithm::of(request.collective);
        return Err(PlanError::NotFor { algorithm, collective: request.collective.name(), offered });
    }
    let mut draft = Draft::new(request);
    match (request.collective, algorithm) {
        (Collective::AllReduce, _) if request.world == 1 => {}
        (Collective::AllReduce, Algorithm::Ring) => all_reduce::ring(&mut draft),
        (Collective::AllReduce, Algorithm::HalvingDoubling) => all_reduce::halving_doubling(&mut draft),
        (Collective::AllReduce, Algorithm::RecursiveDoubling) => all_reduce::recursive_doubling(&mut draft),
        (Collective::AllReduce, Algorithm::Exchange) => all_reduce::exchange(&mut draft),
        (Collective::AllReduce, Algorithm::Hierarchical) => all_reduce::hierarchical(&mut draft),
        (Collective::AllReduce, Algorithm::Aggregated) => all_reduce::aggregated(&mut draft),
        (Collective::AllReduce, _) => all_reduce::direct(&mut draft),
        (Collective::ReduceScatter, Algorithm::Ring) => shards::reduce_scatter_ring(&mut draft),
        (Collective::ReduceScatter, _) => shards::reduce_scatter_direct(&mut draft),
        (Collective::AllGather, Algorithm::Ring) => shards::all_gather_ring(&mut draft),
        (Collective::AllGather, _) => shards::all_gather_direct(&mut draft),
        (Collective::AllToAll, _) => shards::all_to_all(&mut draft),
        (Collective::Broadcast { root }, _) => rooted::broadcast(&mut draft, root, algorithm),
        (Collective::Reduce { root }, Algorithm::Direct) => rooted::reduce_direct(&mut draft, root),
        (Collective::Reduce { root }, _) => rooted::reduce(&mut draft, root, algorithm),
        (Collective::Gather { root }, _) => rooted::gather(&mut draft, root),
        (Collective::Scatter { root }, _) => rooted::scatter(&mut draft, root),
        (Collective::Barrier, _) => barrier(&mut draft),
        (Collective::Send { to }, _) => {
            let message = draft.messages(request.bytes.max(1));
            let src = draft.slice(Buf::Input, 0, request.bytes);
            match request.bytes {
                0 => draft.push(1, Action::Notify { to, message }, []),
                _ => draft.send(to, message, src, []),
            };
        }
        (Collective::Recv { from }, _) => {
            let message = draft.messages(request.bytes.max(1));
            let dst = draft.slice(Buf::Output, 0, request.bytes);
            match request.bytes {
                0 => draft.push(1, Action::Await { from, message }, []),
                _ => draft.recv(from, message, dst, []),
            };
        }
    }
    draft.finish()
}

/// In round `j` every rank tells the rank `2^j` ahead which ranks have arrived, as far as it knows. After ceil(log2 n) rounds
/// all ranks know of all others (Hensgen, Finkel and Manber, 1988).
fn barrier(draft: &mut Draft<'_>) {
    let n = draft.world;
    let mut heard = Vec::new();
    for round in (0..).take_while(|&round| 1u64 << round < u64::from(n)) {
        let distance = 1u32 << round;
        let message = draft.messages(1);
        let (to, from) = (draft.rank_at(distance), draft.rank_at(n - distance));
        draft.push(1, Action::Notify { to, message }, heard.iter().map(|&step| all(step)));
        heard.push(draft.push(1, Action::Await { from, message }, []));
    }
}

/// The steps of a plan that is being built.
pub(crate) struct Draft<'a> {
    request: &'a Request,
    world: u32,
    rank: u32,
    bytes: u64,
    steps: Vec<Step>,
    scratch_bytes: u64,
    messages: u64,
}

/// Index of a step; `None` for one that was left out because it touches no bytes. A dependency on `None` is none.
type StepIndex = Option<u32>;

/// Instance `s` waits for instance `s` of `step`.
fn same(step: StepIndex) -> Option<Dep> {
    lag(step, 0)
}

/// Instance `s` waits for instance `s - lag` of `step`.
fn lag(step: StepIndex, lag: u32) -> Option<Dep> {
    step.map(|step| Dep::Segment { step, lag })
}

/// Every instance waits for all of `step`.
fn all(step: StepIndex) -> Option<Dep> {
    step.map(|step| Dep::All { step })
}

impl Draft<'_> {
    fn new(request: &Request) -> Draft<'_> {
        let Request { world, rank, bytes, .. } = *request;
        Draft { request, world, rank, bytes, steps: Vec::new(), scratch_bytes: 0, messages: 0 }
    }

    fn finish(self) -> Result<Steps, PlanError> {
        let messages =
            u32::try_from(self.messages).map_err(|_| PlanError::TooManyMessages { messages: self.messages })?;
        Ok(Steps { steps: self.steps, scratch_bytes: self.scratch_bytes, messages })
    }

    /// The rank that is `distance` ahead of us on the ring.
    fn rank_at(&self, distance: u32) -> u32 {
        ((u64::from(self.rank) + u64::from(distance)) % u64::from(self.world)) as u32
    }

    /// Every other rank, from the next one on, so that not all ranks send to the same one first.
    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, world) = (u64::from(self.rank), u64::from(self.world));
        (1..world).map(move |distance| ((rank + distance) % world) as u32)
    }

    fn segments(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.request.segment_bytes)
    }

    /// Numbers for the messages of a step whose slice is at most `max_bytes` long on any rank; returns the first.
    fn messages(&mut self, max_bytes: u64) -> u32 {
        // If the number does not fit, it is never used, since `finish` fails.
        let first = u32::try_from(self.messages).unwrap_or(u32::MAX);
        self.messages = self.messages.saturating_add(self.segments(max_bytes));
        first
    }

    fn slice(&self, buf: Buf, start: u64, len: u64) -> Slice {
        Slice { buf, start, len, segment_bytes: self.request.segment_bytes, slots: 0 }
    }

    fn chunk(&self, buf: Buf, chunks: &Chunks, index: u32) -> Slice {
        let (start, len) = chunks.at(index);
        self.slice(buf, start, len)
    }

    /// Scratch memory for `len` bytes that pass through it in segments: all of it, or a ring of `slots` where that is
    /// less. With a ring, whoever writes slot `s % slots` waits for the reader of segment `s - slots`.
    fn scratch(&mut self, len: u64, slots: u32) -> Slice {
        let start = self.scratch_bytes;
        let slots = if u64::from(slots) < self.segments(len) { slots } else { 0 };
        let bytes = if slots == 0 { len } else { u64::from(slots) * self.request.segment_bytes };
        self.scratch_bytes += bytes.next_multiple_of(SCRATCH_ALIGN_BYTES);
        Slice { slots, ..self.slice(Buf::Scratch, start, len) }
    }

    fn send<const N: usize>(&mut self, to: u32, message: u32, src: Slice, after: [Option<Dep>; N]) -> StepIndex {
        self.push(self.segments(src.len), Action::Send { to, message, src }, after)
    }

    fn recv<const N: usize>(&mut self, from: u32, message: u32, dst: Slice, after: [Option<Dep>; N]) -> StepIndex {
        self.push(self.segments(dst.len), Action::Recv { from, message, dst }, after)
    }

    fn reduce<const N: usize>(
        &mut self,
        dst: Slice,
        sources: Vec<Operand>,
        last: bool,
        after: [Option<Dep>; N],
    ) -> StepIndex {
        self.push(self.segments(dst.len), Action::Reduce { dst, sources, last }, after)
    }

    fn copy<const N: usize>(&mut self, dst: Slice, src: Slice, after: [Option<Dep>; N]) -> StepIndex {
        self.push(self.segments(dst.len), Action::Copy { dst, src }, after)
    }

    fn push(&mut self, segments: u64, action: Action, after: impl IntoIterator<Item = Option<Dep>>) -> StepIndex {
        if segments == 0 {
            return None;
        }
        // Where this does not fit, the message numbers do not either, and `finish` fails.
        let segments = u32::try_from(segments).unwrap_or(u32::MAX);
        self.steps.push(Step { action, segments, after: after.into_iter().flatten().collect() });
        Some(self.steps.len() as u32 - 1)
    }

    /// Adds a dependency on a later step.
    fn wait(&mut self, step: StepIndex, dep: Option<Dep>) {
        if let (Some(step), Some(dep)) = (step, dep) {
            self.steps[step as usize].after.push(dep);
        }
    }
}

/// Segments of scratch that an operation holds at a time, where partial results pass through a rank and the whole does
/// not fit: a ring of this many slots (each bank of a ring reduce-scatter gets an equal part, at least one). It is the
/// window of that flow, so it must cover twice the bandwidth-delay product: 16 segments of 512 KiB are 8 MiB, enough
/// for 1 Gbit/s at 20 ms. Smaller reductions keep everything, and none of their messages waits for a slot.
pub const SCRATCH_SEGMENTS: u32 = 16;

/// Banks of scratch start at a cache line.
const SCRATCH_ALIGN_BYTES: u64 = 64;
