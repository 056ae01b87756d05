//! One operation in memory: its buffers, and the arithmetic on them.
//!
//! [`penstock_core::operation::Operation`] decides what happens to which bytes; [`Buffers`] knows where those lie, and does it.

use penstock_core::operation::{Instance, Place, Verdict};
use penstock_kernels::{Finish, reduce};
use penstock_net::memory::Remote;
use penstock_plan::{Action, Buf, Operand, Slice, Steps};
use penstock_types::{DType, ReduceOp};
use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

/// The part of a user's request that arithmetic needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    /// Ranks that contribute to a reduction, for averages.
    pub(crate) world: u32,
    pub(crate) input: *const u8,
    pub(crate) output: *mut u8,
}

/// Where an operation's bytes lie.
#[derive(Debug)]
pub(crate) struct Buffers {
    steps: Arc<Steps>,
    addresses: Addresses,
    /// What [`Addresses::scratch`] points to: neither longer nor shorter as long as the operation runs.
    scratch: Vec<u8>,
    /// By instance: messages, by operand, that wait for the others of their step, or to be read.
    kept: HashMap<Instance, Vec<Option<Kept>>>,
}

/// Addresses of an operation's buffers. They may outlive a borrow of these, and not the operation.
#[derive(Clone, Copy, Debug)]
struct Addresses {
    memory: Memory,
    scratch: *mut u8,
}

/// What is kept of a message.
#[derive(Debug)]
pub(crate) enum Kept {
    /// The message, or as much of it as has come.
    Bytes(Vec<u8>),
    Remote(Remote),
}

impl Kept {
    /// Bytes of the engine's own.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Kept::Bytes(bytes) => bytes.capacity(),
            Kept::Remote(_) => 0,
        }
    }
}

// SAFETY: the pointers are the user's buffers, which the caller of the engine keeps alive and leaves alone until the
// operation ends; the engine's threads use them by turns, or with claims on ranges that do not overlap.
unsafe impl Send for Buffers {}
// SAFETY: likewise.
unsafe impl Send for Addresses {}

impl Buffers {
    /// The buffers of an operation that runs these steps.
    pub(crate) fn new(steps: Arc<Steps>, memory: Memory) -> Buffers {
        let mut scratch = vec![0; steps.scratch_bytes as usize];
        let addresses = Addresses { memory, scratch: scratch.as_mut_ptr() };
        Buffers { addresses, scratch, kept: HashMap::new(), steps }
    }

    /// What does with a claimed frame's payload what was decided. It may run on another thread, while the operation goes on.
    pub(crate) fn claimed(&self, verdict: Verdict) -> impl FnOnce(&[u8]) + Send + 'static {
        let (steps, addresses) = (self.steps.clone(), self.addresses);
        move |payload| addresses.take(&steps, verdict, payload)
    }

    /// Does with bytes of a message, from `offset` on, what was decided.
    pub(crate) fn take(&mut self, verdict: Verdict, offset: u64, payload: &[u8]) {
        match verdict {
            Verdict::Copy(_) | Verdict::Reduce { .. } => self.addresses.take(&self.steps, verdict, payload),
            Verdict::Keep { instance, operand, total } => {
                let slot = self.slot(instance, operand);
                if payload.len() as u64 == total {
                    *slot = Some(Kept::Bytes(payload.to_vec()));
                } else if let Kept::Bytes(bytes) = slot.get_or_insert_with(|| Kept::Bytes(vec![0; total as usize])) {
                    bytes[offset as usize..][..payload.len()].copy_from_slice(payload);
                }
            }
            Verdict::Nothing => {}
        }
    }

    /// Does with a message that was kept what was decided.
    pub(crate) fn take_kept(&mut self, verdict: Verdict, kept: Kept) {
        match (verdict, kept) {
            (Verdict::Keep { instance, operand, .. }, kept) => *self.slot(instance, operand) = Some(kept),
            (verdict, Kept::Bytes(payload)) => self.take(verdict, 0, &payload),
            (_, Kept::Remote(_)) => {}
        }
    }

    fn slot(&mut self, instance: Instance, operand: u32) -> &mut Option<Kept> {
        let slots = self.kept.entry(instance).or_default();
        if slots.len() <= operand as usize {
            slots.resize_with(operand as usize + 1, || None);
        }
        &mut slots[operand as usize]
    }

    /// Does what an instance does, at once: see [`Computation::run`].
    pub(crate) fn compute(&mut self, instance: Instance) -> Result<Vec<(u32, bool)>, (u32, io::Error)> {
        self.computation(instance).run()
    }

    /// What an instance does, with what is kept for it. It may run on another thread, while the operation goes on.
    pub(crate) fn computation(&mut self, instance: Instance) -> Computation {
        let slots = self.kept.remove(&instance).unwrap_or_default();
        let kept = (0..).zip(slots).filter_map(|(operand, kept)| kept.map(|kept| (operand, kept))).collect();
        Computation { steps: self.steps.clone(), addresses: self.addresses, instance, kept }
    }

    /// Where bytes lie.
    pub(crate) fn address(&self, place: Place) -> *mut u8 {
        self.addresses.address(place)
    }

    /// Bytes of the engine's own that it holds.
    pub(crate) fn bytes(&self) -> usize {
        let kept: usize = self.kept.values().flatten().flatten().map(Kept::bytes).sum();
        self.scratch.capacity() + kept
    }
}

/// Work of an instance, taken out of its operation's buffers.
#[derive(Debug)]
pub(crate) struct Computation {
    steps: Arc<Steps>,
    addresses: Addresses,
    instance: Instance,
    kept: Vec<(u32, Kept)>,
}

impl Computation {
    /// Does it. Returns the operands that were read from other processes' memory, and whether what was read
    /// is certain; or the operand that cannot be read.
    pub(crate) fn run(&self) -> Result<Vec<(u32, bool)>, (u32, io::Error)> {
        let steps = self.steps.clone();
        let Instance { step, segment } = self.instance;
        match &steps.steps[step as usize].action {
            Action::Copy { dst, src } => {
                let ((to, len), (from, _)) = (dst.segment(segment), src.segment(segment));
                let to = self.addresses.address(Place { buf: dst.buf, offset: to });
                let from = self.addresses.address(Place { buf: src.buf, offset: from }).cast_const();
                // SAFETY: the plan's slices lie in their buffers and do not overlap (proved by its checker).
                unsafe { std::ptr::copy(from, to, len as usize) };
            }
            Action::Recv { dst, .. } => {
                let (offset, len) = dst.segment(segment);
                let place = self.addresses.address(Place { buf: dst.buf, offset });
                for (operand, kept) in &self.kept {
                    let Kept::Remote(remote) = kept else { continue };
                    // SAFETY: the slice has `len` bytes.
                    unsafe { remote.read(0, place, len as usize) }.map_err(|error| (*operand, error))?;
                }
            }
            Action::Reduce { dst, sources, last } => {
                let (_, len) = dst.segment(segment);
                self.reduce_kept(dst, sources, segment, len, *last)?;
            }
            _ => unreachable!("every other step has no bytes of its own to work on"),
        }
        let mut read = Vec::new();
        for (operand, kept) in &self.kept {
            if let Kept::Remote(remote) = kept {
                read.push((*operand, remote.is_certain().map_err(|error| (*operand, error))?));
            }
        }
        Ok(read)
    }

    /// Reduces a whole segment whose messages are kept: block by block, so that what is read is still in the cache when
    /// it is added.
    fn reduce_kept(
        &self,
        dst: &Slice,
        sources: &[Operand],
        segment: u32,
        len: u64,
        last: bool,
    ) -> Result<(), (u32, io::Error)> {
        let kept = &self.kept;
        let is_elsewhere = |kept: &Kept| matches!(kept, Kept::Remote(memory) if memory.pointer().is_none());
        let remotes = kept.iter().filter(|(_, kept)| is_elsewhere(kept)).count();
        let block = BLOCK_BYTES.checked_div(remotes).map_or(len as usize, |share| share.max(16 * 1024) & !63);
        let mut blocks = BLOCKS.take();
        if blocks.len() < remotes * block {
            blocks.resize(remotes * block, 0);
        }
        let mut offset = 0;
        while offset < len {
            let count = (len - offset).min(block as u64) as usize;
            let mut places = [(0u32, std::ptr::null()); MAX_OPERANDS];
            let mut many = Vec::new();
            let places = if kept.len() <= MAX_OPERANDS {
                &mut places[..kept.len()]
            } else {
                many.resize(kept.len(), (0, std::ptr::null()));
                &mut many[..]
            };
            let mut remote = 0;
            for (place, (operand, kept)) in places.iter_mut().zip(kept) {
                let bytes = match kept {
                    Kept::Bytes(bytes) => bytes[offset as usize..].as_ptr(),
                    Kept::Remote(memory) => match memory.pointer() {
                        Some(pointer) => pointer.wrapping_add(offset as usize),
                        None => {
                            let at = blocks[remote * block..].as_mut_ptr();
                            remote += 1;
                            // SAFETY: each remote has a block of its own.
                            unsafe { memory.read(offset, at, count) }.map_err(|error| (*operand, error))?;
                            at.cast_const()
                        }
                    },
                };
                *place = (*operand, bytes);
            }
            self.addresses.reduce(dst, sources, segment, offset, count, last, |operand| {
                places.iter().find(|(known, _)| *known == operand).map_or(std::ptr::null(), |(_, place)| *place)
            });
            offset += count as u64;
        }
        BLOCKS.set(blocks);
        Ok(())
    }
}

impl Addresses {
    /// Does with bytes of a message what was decided, if that is to use them now.
    fn take(self, steps: &Steps, verdict: Verdict, payload: &[u8]) {
        match verdict {
            Verdict::Copy(place) => {
                // SAFETY: the operation has checked that the bytes lie inside the place of their message.
                unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), self.address(place), payload.len()) };
            }
            Verdict::Reduce { instance, offset } => {
                let Action::Reduce { dst, sources, last } = &steps.steps[instance.step as usize].action else { return };
                self.reduce(dst, sources, instance.segment, offset, payload.len(), *last, |_| payload.as_ptr());
            }
            Verdict::Keep { .. } | Verdict::Nothing => {}
        }
    }

    /// Reduces bytes `offset..offset + len` of a segment; `message(operand)` is where a message's bytes are.
    #[allow(clippy::too_many_arguments)]
    fn reduce(
        self,
        dst: &Slice,
        sources: &[Operand],
        segment: u32,
        offset: u64,
        len: usize,
        last: bool,
        message: impl Fn(u32) -> *const u8,
    ) {
        let finish = match self.memory.op {
            ReduceOp::Avg if last => Finish::DivideBy(self.memory.world),
            _ => Finish::Nothing,
        };
        let place = |slice: &Slice| {
            let start = slice.segment(segment).0 + offset;
            self.address(Place { buf: slice.buf, offset: start })
        };
        let mut operands = [std::ptr::null(); MAX_OPERANDS];
        let mut many = Vec::new();
        let operands = if sources.len() <= MAX_OPERANDS {
            &mut operands[..sources.len()]
        } else {
            many.resize(sources.len(), std::ptr::null());
            &mut many[..]
        };
        for (index, source) in sources.iter().enumerate() {
            operands[index] = match source {
                Operand::Local(slice) => place(slice).cast_const(),
                Operand::Message { .. } => message(index as u32),
            };
        }
        // SAFETY: the plan's slices lie in their buffers; a local source is `dst` itself or disjoint from it; the
        // messages' bytes are the caller's. Frames and segments are cut at multiples of 16 bytes, so that `len` is a
        // multiple of the element size.
        unsafe { reduce(self.memory.op, self.memory.dtype, place(dst), operands, len, finish) };
    }

    /// Where bytes lie.
    fn address(self, place: Place) -> *mut u8 {
        let base = match place.buf {
            Buf::Input => self.memory.input.cast_mut(),
            Buf::Output => self.memory.output,
            Buf::Scratch => self.scratch,
        };
        base.wrapping_add(place.offset as usize)
    }
}

thread_local! {
    /// Blocks of remote memory are read here.
    static BLOCKS: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Operands of a reduction that need no allocation.
const MAX_OPERANDS: usize = 16;
/// Remote memory is read in blocks of this size, all sources together: half a level-2 cache of 512 KiB.
const BLOCK_BYTES: usize = 256 * 1024;

#[cfg(test)]
#[path = "buffers_tests.rs"]
mod tests;
