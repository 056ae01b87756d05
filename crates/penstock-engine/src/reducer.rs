//! All-reduces a model's gradients while the backward pass makes them.
//!
//! ```text
//!   submit() ──> Readiness ──round──> what all ranks have ──pack()──> buckets ──> all-reduces ──> the gradients, reduced
//!   flush() ───> the same for what is left; its ticket completes when all of it is reduced
//! ```
//!
//! The rounds go through a channel of their own and the buckets through another, so that neither depends on the order of the
//! user's own operations. A round ends on the engine's thread, which starts its buckets at once: neither Python's lock nor the
//! threads that compute delay them.
//!
//! A bucket that is contiguous (a large gradient, or neighbours in memory) is reduced in place; others are copied together and
//! back. If the dtype on the wire is another than the gradients', the copy converts.

mod order;
mod pace;
mod spec;

use pace::Pace;
use spec::check_wire;
pub use spec::{Gradient, ReducerSpec, ReducerStats, Setting};

use crate::pieces::{is_one_piece, round, widen};
use crate::{Call, Group, Ticket};
use penstock_core::digest::digest;
use penstock_core::readiness::{Agreed, Readiness};
use penstock_plan::buckets::{Bucket, Entry, pack};
use penstock_plan::{Algorithm, Collective};
use penstock_stream::fingerprint::{Fingerprint, Name};
use penstock_types::{DType, Failure, FailureKind, Priority, ReduceOp};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// All-reduces gradients as soon as all ranks have them. Any thread may call it.
#[derive(Clone, Debug)]
pub struct Reducer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    rounds: Group,
    buckets: Group,
    rank: u32,
    world: u32,
    gradients: Vec<Gradient>,
    op: ReduceOp,
    check_finite: bool,
    priority: Priority,
    last_first: bool,
    tapers: bool,
    timeout: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    readiness: Readiness,
    pace: Pace,
    bucket_bytes: u64,
    wire: Option<DType>,
    submitted: Vec<Option<Submitted>>,
    /// Whether no rank had a gradient when it was last agreed on, by index.
    absent: Vec<bool>,
    /// Rounds and buckets that have not ended: their buffers are in use.
    running: usize,
    step: Step,
    failed: Option<Failure>,
    /// The memory of submitted gradients: start, and end and index.
    places: BTreeMap<usize, (usize, u32)>,
    /// Other ranks have dropped the step, and this rank's pass does not know yet.
    dropped: Option<Failure>,
    /// This rank's pass has raised: the rest of its step is ignored.
    withdrawn: bool,
    /// Buffers for copied buckets, kept from step to step.
    spare: Vec<Vec<u8>>,
    /// What rounding has taken off each gradient so far; empty without error feedback. A gradient is in one bucket at a time,
    /// and only that bucket accesses its residual.
    residuals: Vec<Box<[f32]>>,
    stats: ReducerStats,
}

/// Who waits for the end of a step, and how the last one ended.
#[derive(Debug, Default)]
struct Step {
    /// Completes when nothing is pending.
    agreed: Option<Ticket>,
    /// Completes when nothing is pending or running.
    flushed: Option<Ticket>,
    /// Why the last step that is over failed, or was dropped; `None`: it ended well.
    ended: Option<Failure>,
}

struct Submitted {
    address: *mut u8,
    /// Pieces that are not reduced yet.
    left: u32,
    /// Completes when it is the submitter's again.
    arrival: Option<Ticket>,
    _keep: Option<Box<dyn Any + Send>>,
}

// SAFETY: the pointer is the caller's gradient, which `_keep` keeps alive.
unsafe impl Send for Submitted {}

impl std::fmt::Debug for Submitted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Submitted").field("left", &self.left).finish_non_exhaustive()
    }
}

/// The memory of a bucket's pieces, and the buffer that carries them if they are not contiguous.
struct Carrier {
    bucket: Bucket,
    pieces: Vec<*mut u8>,
    /// The residuals of the pieces; empty without error feedback.
    residuals: Vec<*mut f32>,
    buffer: Option<Vec<u8>>,
}

// SAFETY: the pointers are of gradients that `Submitted` keeps alive until the bucket is over, and of residuals, which live as
// long as the reducer and never move.
unsafe impl Send for Carrier {}

impl Reducer {
    /// # Errors
    /// `Config`: a reduction other than sum and average, or one that a gradient's dtype does not have; a wire dtype other than
    /// float16 and bfloat16, or gradients that are not float32 with one.
    pub fn new(spec: ReducerSpec) -> Result<Reducer, Failure> {
        let config = |message: String| Err(Failure::of_call(FailureKind::Config, message));
        if !matches!(spec.op, ReduceOp::Sum | ReduceOp::Avg) {
            return config(format!("gradients are summed or averaged, not reduced with {}.", spec.op.name()));
        }
        check_wire(spec.wire, spec.op, &spec.gradients)?;
        if spec.error_feedback && spec.wire.is_none() {
            return config("error feedback keeps what rounding for the wire takes off: name a wire dtype too.".into());
        }
        let residual = |gradient: &Gradient| vec![0f32; gradient.elements as usize].into_boxed_slice();
        let residuals = if spec.error_feedback { spec.gradients.iter().map(residual).collect() } else { Vec::new() };
        let entry = |(index, gradient): (usize, &Gradient)| Entry {
            index: index as u32,
            bytes: gradient.elements * gradient.dtype.size() as u64,
            class: gradient.dtype as u32,
        };
        let entries: Vec<Entry> = spec.gradients.iter().enumerate().map(entry).collect();
        let letters = |gradient: &Gradient| {
            gradient.name.bytes().map(u64::from).chain([256, gradient.order]).collect::<Vec<u64>>()
        };
        let names = digest(spec.gradients.iter().flat_map(letters));
        let count = entries.len();
        let state = State {
            readiness: Readiness::new(entries, names, spec.rank, spec.world),
            pace: Pace::default(),
            bucket_bytes: spec.bucket_bytes,
            wire: spec.wire,
            submitted: (0..count).map(|_| None).collect(),
            absent: vec![false; count],
            running: 0,
            step: Step::default(),
            failed: None,
            places: BTreeMap::new(),
            dropped: None,
            withdrawn: false,
            spare: Vec::new(),
            residuals,
            stats: ReducerStats::default(),
        };
        Ok(Reducer(Arc::new(Inner {
            rounds: spec.rounds,
            buckets: spec.buckets,
            rank: spec.rank,
            world: spec.world,
            gradients: spec.gradients,
            op: spec.op,
            check_finite: spec.check_finite,
            priority: spec.priority,
            last_first: spec.last_first,
            tapers: spec.tapers,
            timeout: spec.timeout,
            state: Mutex::new(state),
        })))
    }

    /// A gradient is ready. With `absent`, this rank has none in this pass: its memory, of the same size, must hold zeros, and
    /// gets the result if another rank has a gradient ([`Reducer::was_absent`]). Does not block.
    ///
    /// # Errors
    /// The failure of the reducer, or of the step that was dropped ([`Reducer::withdraw`]). `Config`: `bytes` is not the
    /// gradient's size, or its memory is not aligned, or is also another pending gradient's. `Bug`: the index does not exist,
    /// or was submitted in this step before. Nothing has changed.
    ///
    /// # Safety
    /// The gradient's bytes are valid, and neither read nor written by others until the ticket of the
    /// next [`Reducer::flush`] or [`Reducer::withdraw`] completes; `keep` keeps them alive.
    pub unsafe fn submit(
        &self,
        index: u32,
        address: *mut u8,
        bytes: u64,
        absent: bool,
        keep: Option<Box<dyn Any + Send>>,
    ) -> Result<(), Failure> {
        let bug = |what: String| Err(Failure::of_call(FailureKind::Bug, what));
        let config = |what: String| Err(Failure::of_call(FailureKind::Config, what));
        let Some(gradient) = self.0.gradients.get(index as usize) else {
            return bug(format!("there is no gradient {index}."));
        };
        let size = gradient.dtype.size();
        if bytes != gradient.elements * size as u64 || !(address as usize).is_multiple_of(size) {
            return config(format!(
                "the gradient of {} must be {} aligned elements of {}, not {bytes} bytes at {address:?}.",
                gradient.name, gradient.elements, gradient.dtype
            ));
        }
        // SAFETY: the caller's promise.
        if self.0.check_finite && !unsafe { penstock_kernels::is_finite(gradient.dtype, address, bytes as usize) } {
            self.fail(&self.not_finite(&gradient.name, ""));
        }
        let mut state = self.lock();
        if let Some(failure) = state.failed.as_ref().or(state.dropped.as_ref()) {
            return Err(failure.clone());
        }
        let (start, end) = (address as usize, address as usize + bytes as usize);
        let before_end = state.places.range(..end).next_back();
        if let Some((_, &(_, other))) = before_end.filter(|(_, (ends, other))| *ends > start && *other != index) {
            let other = &self.0.gradients[other as usize].name;
            return config(format!(
                "the gradients of {} and {other} share memory, and each would be reduced for itself: give each a gradient of its \
                 own, or make them one parameter.",
                gradient.name
            ));
        }
        if state.withdrawn {
            return bug("a pass has raised and its step is not over; wait for the withdrawal first.".into());
        }
        if state.submitted[index as usize].is_some() || !state.readiness.submit(index, absent) {
            return bug(format!(
                "the gradient of {} is submitted while its last value is still being reduced; wait for the flush first.",
                gradient.name
            ));
        }
        if bytes > 0 {
            state.places.insert(start, (end, index));
        }
        state.submitted[index as usize] = Some(Submitted { address, left: 0, arrival: None, _keep: keep });
        drop(state);
        self.advance();
        Ok(())
    }

    /// The backward pass has raised, and submits nothing more. Gradients that other ranks do not wait for are returned; the
    /// others are reduced. If all ranks have agreed on some of the step's gradients and not on all, the step is dropped: other
    /// ranks' [`Reducer::flush`], or their next [`Reducer::submit`], fails with `Mismatch`, and the reducer stays usable. If
    /// none is agreed on, the others wait for this rank's next pass. The ticket completes when the next pass can begin. Does
    /// not block.
    #[must_use]
    pub fn withdraw(&self) -> Ticket {
        let mut state = self.lock();
        state.readiness.withdraw();
        (state.withdrawn, state.dropped) = (true, None);
        state.give_back();
        let ticket = state.step.flushed.get_or_insert_default().clone();
        drop(state);
        self.advance();
        self.settle();
        ticket
    }

    /// The backward pass has ended. The ticket completes when every submitted gradient is reduced. Does not block.
    #[must_use]
    pub fn flush(&self) -> Ticket {
        let mut state = self.lock();
        state.readiness.flush();
        let ticket = state.step.flushed.get_or_insert_default().clone();
        drop(state);
        self.advance();
        self.settle();
        ticket
    }

    /// After [`Reducer::flush`]: completes when the ranks have agreed on every gradient, which may still be on their way. All
    /// ranks' passes have ended well then, and no rank drops the step any more; it fails on all ranks or none. Does not block.
    #[must_use]
    pub fn agreed(&self) -> Ticket {
        let mut state = self.lock();
        if state.step.flushed.is_none() {
            // The step is over, perhaps because it was dropped before this rank's pass had ended.
            let failure = state.failed.as_ref().or(state.step.ended.as_ref()).cloned();
            return Ticket::ready(failure.map_or(Ok(()), Err));
        }
        let ticket = state.step.agreed.get_or_insert_default().clone();
        drop(state);
        self.settle();
        ticket
    }

    /// Completes when a gradient is reduced and the submitter's again; `None` if it is. If the reducer has failed, whatever is the
    /// submitter's counts as failed. Does not block.
    #[must_use]
    pub fn arrival(&self, index: u32) -> Option<Ticket> {
        let mut state = self.lock();
        if let Some(failure) = &state.failed {
            return Some(Ticket::ready(Err(failure.clone())));
        }
        Some(state.submitted.get_mut(index as usize)?.as_mut()?.arrival.get_or_insert_default().clone())
    }

    /// The gradients that are not reduced and the submitter's again yet, in the order of their indices. Does not block.
    ///
    /// # Errors
    /// The failure of the reducer: which gradients are reduced nobody knows then.
    pub fn late(&self) -> Result<Vec<u32>, Failure> {
        let state = self.lock();
        let late = (0..).zip(&state.submitted).filter_map(|(index, submitted)| submitted.as_ref().map(|_| index));
        state.failed.clone().map_or_else(|| Ok(late.collect()), Err)
    }

    /// Whether no rank had the gradient when it was last agreed on: its memory was not touched.
    #[must_use]
    pub fn was_absent(&self, index: u32) -> bool {
        self.lock().absent.get(index as usize).copied().unwrap_or(false)
    }

    /// Changes how gradients travel, from the next step on; on all ranks between the same two steps.
    ///
    /// # Errors
    /// `Bug`: something is pending or running; nothing has changed. `Config`: a wire dtype that does not fit the gradients, or
    /// an algorithm that all-reduces do not have.
    pub fn apply(&self, setting: &Setting) -> Result<(), Failure> {
        check_wire(setting.wire, self.0.op, &self.0.gradients)?;
        let exists =
            |one: &Algorithm| *one == Algorithm::Aggregated || Algorithm::of(Collective::AllReduce).contains(one);
        if let Some(algorithm) = setting.algorithm.filter(|one| !exists(one)) {
            return Err(Failure::of_call(FailureKind::Config, format!("there is no all-reduce called {algorithm}.")));
        }
        let mut state = self.lock_idle()?;
        (state.bucket_bytes, state.wire) = (setting.bucket_bytes, setting.wire);
        // The lock is held: operations that start later come after this in the engine's queue.
        self.0.buckets.retune(setting.algorithm, setting.streams);
        Ok(())
    }

    /// The state, if the reducer is between two steps: to re-cut a bucket in flight would corrupt gradients.
    fn lock_idle(&self) -> Result<MutexGuard<'_, State>, Failure> {
        let state = self.lock();
        let (running, pending) = (state.running, state.readiness.pending());
        if running > 0 || pending > 0 {
            let message = format!(
                "how gradients travel changes between two steps only, and {running} exchanges are running and {pending} \
                 gradients pending; call it after backward() has returned. Nothing has changed."
            );
            return Err(Failure::of_call(FailureKind::Bug, message));
        }
        Ok(state)
    }

    /// Counters since the reducer was made.
    #[must_use]
    pub fn stats(&self) -> ReducerStats {
        self.lock().stats
    }

    /// The dtype on the wire. It changes only while no bucket is in flight.
    fn wire(&self) -> Option<DType> {
        self.lock().wire
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Starts a round if it is time for one.
    fn advance(&self) {
        let mut state = self.lock();
        if state.failed.is_some() {
            return;
        }
        let bucket_bytes = state.bucket_bytes;
        let least_bytes = if self.0.tapers { state.pace.least_bytes() } else { bucket_bytes };
        let Some(bits) = state.readiness.poll_round(bucket_bytes, least_bytes) else { return };
        state.running += 1;
        state.stats.rounds += 1;
        drop(state);
        // Only one round runs at a time, so starting it outside of the lock keeps the order.
        let mut bits = bits;
        let priority = order::of_round(self.0.priority, self.0.last_first);
        let call = self.call(ReduceOp::BitAnd, DType::U8, bits.len() as u64, bits.as_mut_ptr(), priority);
        let (reducer, began) = (self.clone(), Instant::now());
        self.start(&self.0.rounds, call, move |result| {
            let took = began.elapsed();
            let mut state = reducer.lock();
            state.stats.round_ns += took.as_nanos() as u64;
            state.pace.add_round(took);
            drop(state);
            match result {
                Ok(()) => reducer.rounded(&bits),
                Err(failure) => reducer.fail(failure),
            }
        });
    }

    /// Starts an operation whose buffer `done` owns. `done` is called on the engine's thread: operations end one after the
    /// other, in the same order on all ranks, and so start the operations that follow them.
    fn start(&self, group: &Group, call: Call, done: impl FnOnce(&Result<(), Failure>) + Send + 'static) {
        let ticket = Ticket::default();
        let end = End(self.clone());
        ticket.on_done(move |result| {
            let _end = end;
            done(result);
        });
        // SAFETY: `done`, or the caller of `submit`, keeps the buffer, and nothing reads it before `done` is called.
        unsafe { group.start_as(call, ticket) };
    }

    /// A round has ended: reduces the gradients that it found ready.
    fn rounded(&self, bits: &[u8]) {
        let mut state = self.lock();
        let Some(Agreed { ready, absent, withdrawn }) = state.readiness.handle_round(bits) else {
            drop(state);
            return self.fail(&Failure::of_call(
                FailureKind::Mismatch,
                "the ranks have different gradients, in another order, shape or memory format: build the same model on every \
                 rank.",
            ));
        };
        // A rank that has withdrawn its own pass after it joined this round needs no report.
        if !withdrawn.is_empty() && !withdrawn.contains(&self.0.rank) && !state.withdrawn {
            let (ranks, step) = (names_of(&withdrawn), state.stats.steps + 1);
            state.dropped = Some(Failure::of_call(
                FailureKind::Mismatch,
                format!(
                    "the backward pass of {ranks} raised in step {step} after some of its gradients had been averaged, and \
                     all ranks have dropped the step: gradients of rank {} are partly averages and partly its own. Set them to \
                     zero and go on, or stop all ranks; {ranks} says why it raised.",
                    self.0.rank
                ),
            ));
        }
        for index in absent {
            state.absent[index as usize] = true;
            state.release(index);
        }
        let mut carriers = Vec::new();
        for entry in &ready {
            state.absent[entry.index as usize] = false;
            if entry.bytes == 0 {
                state.release(entry.index);
            }
        }
        for bucket in pack(ready, state.bucket_bytes) {
            let mut pieces = Vec::with_capacity(bucket.pieces.len());
            let mut residuals = Vec::new();
            for piece in &bucket.pieces {
                let submitted = state.submitted[piece.index as usize].as_mut().expect("agreed on, so submitted here");
                submitted.left += 1;
                pieces.push(submitted.address.wrapping_add(piece.range.start as usize));
                if let Some(residual) = state.residuals.get_mut(piece.index as usize) {
                    residuals.push(residual[piece.range.start as usize / 4..].as_mut_ptr());
                }
            }
            let in_place = state.wire.is_none() && is_one_piece(&bucket, &pieces);
            let bytes = bucket.bytes();
            let buffer = (!in_place).then(|| state.spare.pop().unwrap_or_default());
            let count = if in_place { &mut state.stats.in_place_bytes } else { &mut state.stats.copied_bytes };
            *count += bytes;
            state.stats.buckets += 1;
            state.running += 1;
            carriers.push(Carrier { bucket, pieces, residuals, buffer });
        }
        if state.withdrawn || !withdrawn.is_empty() {
            state.give_back();
        }
        drop(state);
        for carrier in carriers {
            self.reduce(carrier);
        }
    }

    fn reduce(&self, mut carrier: Carrier) {
        let dtype = self.0.gradients[carrier.bucket.pieces[0].index as usize].dtype;
        let (dtype, op) = match self.wire() {
            Some(wire) => (wire, ReduceOp::Sum),
            None => (dtype, self.0.op),
        };
        // SAFETY: the submitter leaves the pieces to the reducer until the flush completes.
        unsafe { self.load(&mut carrier) };
        let (address, bytes) = match &mut carrier.buffer {
            Some(buffer) => (buffer.as_mut_ptr(), buffer.len() as u64),
            None => (carrier.pieces[0], carrier.bucket.bytes()),
        };
        let call = self.call(op, dtype, bytes, address, self.priority_of(&carrier.bucket));
        let (reducer, began_at, began) = (self.clone(), address as usize, Instant::now());
        self.start(&self.0.buckets, call, move |result| {
            let ends_at = carrier.buffer.as_ref().map_or(carrier.pieces[0].cast_const(), |buffer| buffer.as_ptr());
            debug_assert_eq!(ends_at as usize, began_at, "a bucket's memory stays where it is while it is in flight");
            match result {
                // SAFETY: as above.
                Ok(()) => unsafe { reducer.store(&carrier) },
                Err(failure) => reducer.fail(failure),
            }
            let took = began.elapsed();
            let mut state = reducer.lock();
            state.pace.add_bucket(carrier.bucket.bytes(), took);
            for piece in &carrier.bucket.pieces {
                if let Some(pending) = &mut state.submitted[piece.index as usize] {
                    pending.left -= 1;
                    if pending.left == 0 {
                        state.release(piece.index);
                    }
                }
            }
            state.spare.extend(carrier.buffer);
        });
    }

    fn priority_of(&self, bucket: &Bucket) -> Priority {
        if !self.0.last_first {
            return self.0.priority;
        }
        let last = bucket.pieces.iter().map(|piece| piece.index as usize).max().unwrap_or(0);
        order::priority(self.0.priority, last, self.0.gradients.len())
    }

    fn call(&self, op: ReduceOp, dtype: DType, bytes: u64, address: *mut u8, priority: Priority) -> Call {
        Call {
            collective: Collective::AllReduce,
            fingerprint: Fingerprint::new(Name::AllReduce, Some(op), dtype, None, bytes / dtype.size() as u64),
            dtype,
            op,
            bytes,
            splits: None,
            input: std::ptr::null(),
            output: address,
            tag: 0,
            coflow: 0,
            priority,
            hold: false,
            timeout: self.0.timeout,
            keep: None,
        }
    }

    /// Copies pieces into the bucket's buffer, if it has one.
    ///
    /// # Safety
    /// The pieces are valid, and nothing else writes to them.
    unsafe fn load(&self, carrier: &mut Carrier) {
        let Some(buffer) = &mut carrier.buffer else { return };
        let (bytes, wire) = (carrier.bucket.bytes() as usize, self.wire());
        buffer.resize(if wire.is_some() { bytes / 2 } else { bytes }, 0);
        let mut at = buffer.as_mut_ptr();
        for (at_piece, (piece, src)) in carrier.bucket.pieces.iter().zip(&carrier.pieces).enumerate() {
            let len = piece.range.len() as usize;
            // SAFETY: the buffer holds all pieces one after the other; the caller vouches for them.
            at = unsafe {
                match wire {
                    None => {
                        at.copy_from_nonoverlapping(*src, len);
                        at.add(len)
                    }
                    Some(wire) => {
                        let factor = if self.0.op == ReduceOp::Avg { 1.0 / f64::from(self.0.world) } else { 1.0 };
                        round(wire, at, *src, len, factor, carrier.residuals.get(at_piece).copied());
                        if self.0.check_finite && !penstock_kernels::is_finite(wire, at, len / 2) {
                            let name = &self.0.gradients[piece.index as usize].name;
                            self.fail(&self.not_finite(name, &format!(" as {wire}, which goes over the wire")));
                        }
                        at.add(len / 2)
                    }
                }
            };
        }
    }

    /// Copies the reduced pieces back.
    ///
    /// # Safety
    /// The pieces are valid, and nothing else uses them.
    unsafe fn store(&self, carrier: &Carrier) {
        let Some(buffer) = &carrier.buffer else { return };
        let wire = self.wire();
        let mut at = buffer.as_ptr();
        for (piece, dst) in carrier.bucket.pieces.iter().zip(&carrier.pieces) {
            let len = piece.range.len() as usize;
            // SAFETY: as in `load`.
            at = unsafe {
                match wire {
                    None => {
                        dst.copy_from_nonoverlapping(at, len);
                        at.add(len)
                    }
                    Some(wire) => {
                        widen(wire, *dst, at, len);
                        at.add(len / 2)
                    }
                }
            };
        }
    }

    /// A round or bucket has ended.
    fn over(&self) {
        self.lock().running -= 1;
        self.advance();
        self.settle();
    }

    /// Completes the flush when nothing is left to do for it.
    fn settle(&self) {
        let mut state = self.lock();
        let is_agreed = state.failed.is_some() || state.readiness.is_idle();
        let is_idle = state.running == 0 && is_agreed;
        // A step that fails or is dropped is over when nothing of it is on its way.
        let failure = state.failed.as_ref().or(state.dropped.as_ref()).cloned();
        if let Some(ticket) = state.step.agreed.take_if(|_| is_idle || (is_agreed && failure.is_none())) {
            drop(state);
            ticket.complete(failure.map_or(Ok(()), Err));
            state = self.lock();
        }
        let Some(ticket) = state.step.flushed.take_if(|_| is_idle) else { return };
        let (withdrawn, dropped) = (std::mem::take(&mut state.withdrawn), state.dropped.take());
        if !withdrawn && dropped.is_none() {
            state.stats.steps += 1;
        }
        state.step.ended = state.failed.clone().or(dropped);
        let result = state.step.ended.clone().map_or(Ok(()), Err);
        if state.failed.is_some() {
            // Returns the gradients to their users.
            (0..state.submitted.len() as u32).for_each(|index| state.release(index));
        }
        drop(state);
        ticket.complete(result);
    }

    fn not_finite(&self, name: &str, form: &str) -> Failure {
        let (rank, step) = (self.0.rank, self.lock().stats.steps + 1);
        let message = format!(
            "the gradient of {name} on rank {rank} holds NaN or infinity in step {step}{form} (PENSTOCK_CHECK=nan)."
        );
        Failure::of_call(FailureKind::NotFinite, message)
    }

    /// Records a failure. The flush ends with the first one; the reducer's channels fail on all ranks, so that what runs there ends
    /// soon. The group goes on, unless it has failed itself.
    fn fail(&self, failure: &Failure) {
        let mut state = self.lock();
        if state.failed.is_some() {
            return;
        }
        state.failed = Some(failure.clone());
        drop(state);
        self.0.rounds.end(failure.clone());
        self.0.buckets.end(failure.clone());
    }
}

/// Ends a round or bucket when it is dropped, also if handling its result panics, so that the pass ends.
struct End(Reducer);

impl Drop for End {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let message = "the reducer has panicked; standard error says where. This is a defect of Penstock.";
            self.0.fail(&Failure::of_call(FailureKind::Bug, message));
        }
        self.0.over();
    }
}

impl State {
    /// Returns a gradient to its submitter.
    fn release(&mut self, index: u32) {
        if let Some(submitted) = self.submitted[index as usize].take() {
            let start = submitted.address as usize;
            if self.places.get(&start).is_some_and(|(_, place)| *place == index) {
                self.places.remove(&start);
            }
            if let Some(arrival) = submitted.arrival {
                arrival.complete(self.failed.clone().map_or(Ok(()), Err));
            }
        }
    }

    /// Returns gradients for which no other rank waits.
    fn give_back(&mut self) {
        for index in 0..self.submitted.len() as u32 {
            let is_out = |submitted: &Submitted| submitted.left > 0;
            if !self.readiness.is_pending(index) && !self.submitted[index as usize].as_ref().is_some_and(is_out) {
                self.release(index);
            }
        }
    }
}

fn names_of(ranks: &[u32]) -> String {
    let listed: Vec<String> = ranks.iter().map(u32::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, listed.join(", "))
}
