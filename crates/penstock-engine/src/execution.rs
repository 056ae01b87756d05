//! One operation in memory: its buffers, and the arithmetic on them.
//!
//! [`Operation`] decides what happens to which bytes; [`Execution`] knows where those lie, and does it.

use penstock_core::operation::{Effect, Incoming, Instance, Misfit, Operation, Place, Verdict};
use penstock_kernels::{Finish, reduce};
use penstock_net::memory::Remote;
use penstock_plan::{Action, Buf, Operand, Slice, Steps};
use penstock_types::{DType, ReduceOp};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

/// The bytes of an incoming message.
#[derive(Debug)]
pub(crate) enum Message<'a> {
    /// Here, in order of arrival; the first byte is the message's `offset`.
    Bytes { offset: u64, payload: &'a [u8] },
    /// Already where [`Execution::place`] said.
    Placed { len: usize },
    /// In the memory of a process on this host.
    Remote(Remote),
}

/// The part of a user's request that arithmetic needs.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    /// Ranks that contribute to a reduction, for averages.
    pub(crate) world: u32,
    pub(crate) input: *const u8,
    pub(crate) output: *mut u8,
}

/// A running plan and its bytes.
#[derive(Debug)]
pub(crate) struct Execution {
    pub(crate) operation: Operation,
    buffers: Buffers,
}

impl Execution {
    pub(crate) fn new(steps: Arc<Steps>, memory: Memory) -> Execution {
        let buffers = Buffers {
            scratch: vec![0; steps.scratch_bytes as usize],
            kept: HashMap::new(),
            blocks: Vec::new(),
            steps: steps.clone(),
            memory,
        };
        Execution { operation: Operation::new(steps, buffers.memory.dtype.size() as u64), buffers }
    }

    /// Where bytes from `offset` on of an incoming message belong, if they only have to lie there.
    pub(crate) fn place(&self, from: u32, message: u32, offset: u64, len: u64, total: u64) -> Option<*mut u8> {
        Some(self.buffers.address(self.operation.place(from, message, offset, len, total)?))
    }

    /// Bytes `offset..offset + len` of an outgoing message.
    pub(crate) fn source(&self, to: u32, message: u32, offset: u64, len: usize) -> Option<*const u8> {
        Some(self.address(self.operation.source(to, message, offset, len)?))
    }

    /// Where bytes that are to be sent lie.
    pub(crate) fn address(&self, place: Place) -> *const u8 {
        self.buffers.address(place).cast_const()
    }

    /// Takes (a part of) an open message, see [`Operation::on_message`].
    pub(crate) fn on_message(
        &mut self,
        from: u32,
        message: u32,
        total: u64,
        content: Message<'_>,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Misfit> {
        let incoming = match &content {
            Message::Bytes { offset, payload } => Incoming::Frame { offset: *offset, len: payload.len() as u64 },
            Message::Placed { len } => Incoming::Placed { len: *len as u64 },
            Message::Remote(_) => Incoming::Reference,
        };
        let verdict = self.operation.on_message(from, message, total, incoming, effects)?;
        self.buffers.take(verdict, content);
        Ok(())
    }

    /// Does what [`Effect::Compute`] asks for.
    pub(crate) fn compute(&mut self, instance: Instance) {
        let read = self.buffers.compute(instance);
        debug_assert!(read.is_ok_and(|read| read.is_empty()), "what is kept as bytes needs no reading");
    }

    /// Does one piece of what takes long: reads (and reduces) messages that lie in other processes' memory, or copies what is
    /// here. The error names the rank whose memory cannot be read.
    pub(crate) fn work(&mut self, effects: &mut Vec<Effect>) -> Result<(), (u32, Misfit)> {
        let Some(instance) = self.operation.next_work() else { return Ok(()) };
        let read = self.buffers.compute(instance).map_err(|(operand, error)| {
            let (from, _) = self.operation.sender(instance, operand);
            (from, Misfit::Unreadable(error.to_string()))
        })?;
        self.operation.worked(instance, read, effects);
        Ok(())
    }

    /// Bytes of the engine's own that it holds.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.buffers.bytes()
    }
}

/// Where an operation's bytes lie.
#[derive(Debug)]
struct Buffers {
    steps: Arc<Steps>,
    memory: Memory,
    scratch: Vec<u8>,
    /// By instance: messages, by operand, that wait for the others of their step, or to be read.
    kept: HashMap<Instance, Vec<Option<Kept>>>,
    /// Blocks of remote memory are read here.
    blocks: Vec<u8>,
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
// operation ends; only the engine's thread uses them.
unsafe impl Send for Buffers {}

impl Buffers {
    /// Does with a message's bytes what was decided.
    fn take(&mut self, verdict: Verdict, content: Message<'_>) {
        match (verdict, content) {
            (Verdict::Copy(place), Message::Bytes { payload, .. }) => {
                // SAFETY: the operation has checked that the bytes lie inside the place of their message.
                unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), self.address(place), payload.len()) };
            }
            (Verdict::Reduce { instance, offset }, Message::Bytes { payload, .. }) => {
                let steps = self.steps.clone();
                let Action::Reduce { dst, sources, last } = &steps.steps[instance.step as usize].action else { return };
                self.reduce(dst, sources, instance.segment, offset, payload.len(), *last, |_| payload.as_ptr());
            }
            (Verdict::Keep { instance, operand, total }, content) => self.keep(instance, operand, total, content),
            _ => {}
        }
    }

    fn keep(&mut self, instance: Instance, operand: u32, total: u64, content: Message<'_>) {
        let slots = self.kept.entry(instance).or_default();
        if slots.len() <= operand as usize {
            slots.resize_with(operand as usize + 1, || None);
        }
        let slot = &mut slots[operand as usize];
        match content {
            Message::Bytes { payload, .. } if payload.len() as u64 == total => {
                *slot = Some(Kept::Bytes(payload.to_vec()));
            }
            Message::Bytes { offset, payload } => {
                let kept = slot.get_or_insert_with(|| Kept::Bytes(vec![0; total as usize]));
                if let Kept::Bytes(bytes) = kept {
                    bytes[offset as usize..][..payload.len()].copy_from_slice(payload);
                }
            }
            Message::Remote(remote) => *slot = Some(Kept::Remote(remote)),
            Message::Placed { .. } => unreachable!("what is kept has no place of its own"),
        }
    }

    /// Does what an instance does. Returns the operands that were read from other processes' memory, and whether what was read
    /// is certain; or the operand that cannot be read.
    fn compute(&mut self, instance: Instance) -> Result<Vec<(u32, bool)>, (u32, io::Error)> {
        let steps = self.steps.clone();
        let slots = self.kept.remove(&instance).unwrap_or_default();
        let kept: Vec<(u32, Kept)> =
            (0..).zip(slots).filter_map(|(operand, kept)| kept.map(|kept| (operand, kept))).collect();
        let segment = instance.segment;
        match &steps.steps[instance.step as usize].action {
            Action::Copy { dst, src } => {
                let ((to, len), (from, _)) = (dst.segment(segment), src.segment(segment));
                let to = self.address(Place { buf: dst.buf, offset: to });
                let from = self.address(Place { buf: src.buf, offset: from }).cast_const();
                // SAFETY: the plan's slices lie in their buffers and do not overlap (proved by its checker).
                unsafe { std::ptr::copy(from, to, len as usize) };
            }
            Action::Recv { dst, .. } => {
                let (offset, len) = dst.segment(segment);
                let place = self.address(Place { buf: dst.buf, offset });
                for (operand, kept) in &kept {
                    let Kept::Remote(remote) = kept else { continue };
                    // SAFETY: the slice has `len` bytes.
                    unsafe { remote.read(0, place, len as usize) }.map_err(|error| (*operand, error))?;
                }
            }
            Action::Reduce { dst, sources, last } => {
                let (_, len) = dst.segment(segment);
                self.reduce_kept(dst, sources, segment, len, *last, &kept)?;
            }
            _ => unreachable!("every other step has no bytes of its own to work on"),
        }
        let mut read = Vec::new();
        for (operand, kept) in &kept {
            if let Kept::Remote(remote) = kept {
                read.push((*operand, remote.is_certain().map_err(|error| (*operand, error))?));
            }
        }
        Ok(read)
    }

    /// Reduces bytes `offset..offset + len` of a segment; `message(operand)` is where a message's bytes are.
    #[allow(clippy::too_many_arguments)]
    fn reduce(
        &self,
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

    /// Reduces a whole segment whose messages are kept: block by block, so that what is read is still in the cache when
    /// it is added.
    fn reduce_kept(
        &mut self,
        dst: &Slice,
        sources: &[Operand],
        segment: u32,
        len: u64,
        last: bool,
        kept: &[(u32, Kept)],
    ) -> Result<(), (u32, io::Error)> {
        let is_elsewhere = |kept: &Kept| matches!(kept, Kept::Remote(memory) if memory.pointer().is_none());
        let remotes = kept.iter().filter(|(_, kept)| is_elsewhere(kept)).count();
        let block = BLOCK_BYTES.checked_div(remotes).map_or(len as usize, |share| share.max(16 * 1024) & !63);
        let mut blocks = std::mem::take(&mut self.blocks);
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
            self.reduce(dst, sources, segment, offset, count, last, |operand| {
                places.iter().find(|(known, _)| *known == operand).map_or(std::ptr::null(), |(_, place)| *place)
            });
            offset += count as u64;
        }
        self.blocks = blocks;
        Ok(())
    }

    fn address(&self, place: Place) -> *mut u8 {
        let base = match place.buf {
            Buf::Input => self.memory.input.cast_mut(),
            Buf::Output => self.memory.output,
            Buf::Scratch => self.scratch.as_ptr().cast_mut(),
        };
        base.wrapping_add(place.offset as usize)
    }

    /// Bytes of the engine's own that it holds.
    fn bytes(&self) -> usize {
        let kept: usize = self.kept.values().flatten().flatten().map(Kept::bytes).sum();
        self.scratch.capacity() + self.blocks.capacity() + kept
    }
}

/// Operands of a reduction that need no allocation.
const MAX_OPERANDS: usize = 16;
/// Remote memory is read in blocks of this size, all sources together: half a level-2 cache of 512 KiB.
const BLOCK_BYTES: usize = 256 * 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_core::operation::Awaited;
    use penstock_net::memory::MemoryEpoch;
    use penstock_plan::{Algorithm, Collective, Request, Topology, steps};
    use proptest::prelude::*;

    /// Does what is wanted of memory; what is wanted of other ranks stays in the list.
    fn settle(execution: &mut Execution, effects: &mut Vec<Effect>) {
        effects.retain(|effect| {
            let Effect::Compute(instance) = effect else { return true };
            execution.compute(*instance);
            false
        });
    }

    /// Messages that an operation waits for.
    fn missing(execution: &Execution) -> usize {
        let awaited = execution.operation.awaited_messages();
        awaited.iter().filter(|(_, what)| matches!(what, Awaited::Message(_))).count()
    }

    /// A receive of 100 KB from rank 0, whose memory is our own: the sender's bytes, the memory epoch, the operation.
    fn receive(result: &mut [u8]) -> Execution {
        let request = Request {
            collective: Collective::Recv { from: 0 },
            world: 2,
            rank: 1,
            topology: Topology::one_host(2),
            bytes: result.len() as u64,
            element_bytes: 1,
            splits: None,
            segment_bytes: 1 << 20,
        };
        let steps = Arc::new(steps(&request, Algorithm::Direct).expect("a plan"));
        let (op, output) = (ReduceOp::Sum, result.as_mut_ptr());
        Execution::new(steps, Memory { dtype: DType::U8, op, world: 2, input: std::ptr::null(), output })
    }

    fn given(bytes: &[u8], memory_epoch: &MemoryEpoch) -> Message<'static> {
        let (pid, address) = (std::process::id(), bytes.as_ptr() as u64);
        Message::Remote(Remote::Process {
            pid,
            address,
            memory_epoch: memory_epoch.address(),
            epoch: memory_epoch.epoch(),
        })
    }

    /// A reference waits for its turn to be read; what was read while the sender's epoch lasted is what was meant.
    #[test]
    fn references_are_read_when_there_is_time() {
        let (theirs, memory_epoch, mut result) = (vec![7; 100_000], MemoryEpoch::new([1; 16]), vec![0; 100_000]);
        let (mut execution, mut effects) = (receive(&mut result), Vec::new());
        execution.operation.start(&mut effects);
        assert_eq!(effects, [Effect::Open { from: 0, message: 0, count: 1 }]);
        effects.clear();
        execution.on_message(0, 0, 100_000, given(&theirs, &memory_epoch), &mut effects).expect("it fits");
        assert!(effects.is_empty() && execution.operation.has_work() && !execution.operation.is_done());
        assert!(execution.operation.awaited().is_empty(), "the message is here");
        execution.work(&mut effects).expect("own memory");
        assert_eq!(effects, [Effect::Read { from: 0, message: 0 }]);
        assert!(execution.operation.is_done() && !execution.operation.has_work());
        drop(execution);
        assert_eq!(result, theirs);
    }

    /// A large copy of a rank's own part takes a turn for each segment; a small one is done at once.
    #[test]
    fn large_copies_take_turns() {
        for (bytes, segment_bytes, turns) in [(4 << 20, 1 << 20, 4), (100_000, 1 << 20, 0)] {
            let request = Request {
                collective: Collective::AllGather,
                world: 1,
                rank: 0,
                topology: Topology::one_host(1),
                bytes,
                element_bytes: 1,
                splits: None,
                segment_bytes,
            };
            let (algorithm, _) = penstock_plan::choose(&request, &penstock_plan::Thresholds::default());
            let steps = Arc::new(steps(&request, algorithm).expect("a plan"));
            let (input, mut output) = (vec![7u8; bytes as usize], vec![0u8; bytes as usize]);
            let (input, place) = (input.as_ptr(), output.as_mut_ptr());
            let memory = Memory { dtype: DType::U8, op: ReduceOp::Sum, world: 1, input, output: place };
            let (mut execution, mut effects) = (Execution::new(steps, memory), Vec::new());
            execution.operation.start(&mut effects);
            settle(&mut execution, &mut effects);
            let mut taken = 0;
            while execution.operation.has_work() {
                assert!(!execution.operation.is_done());
                execution.work(&mut effects).expect("its own memory");
                taken += 1;
            }
            assert!(execution.operation.is_done() && effects.is_empty());
            drop(execution);
            assert_eq!((taken, output.iter().all(|byte| *byte == 7)), (turns, true));
        }
    }

    /// Several messages that are reduced at once may come as frames, in any order, interleaved; and nothing is reduced
    /// before all are whole. The result is that of one frame each.
    #[test]
    fn frames_of_several_messages_are_held_until_whole() {
        let (len, world) = (5000u64, 3);
        let request = Request {
            collective: Collective::AllReduce,
            world,
            rank: 0,
            topology: Topology::one_host(world),
            bytes: len,
            element_bytes: 1,
            splits: None,
            segment_bytes: 1 << 20,
        };
        let steps = Arc::new(steps(&request, Algorithm::Exchange).expect("a plan"));
        let theirs: Vec<Vec<u8>> =
            (1..world).map(|rank| (0..len).map(|at| (at % 50) as u8 + rank as u8).collect()).collect();
        let mut result = vec![1u8; len as usize];
        let memory =
            Memory { dtype: DType::U8, op: ReduceOp::Sum, world, input: std::ptr::null(), output: result.as_mut_ptr() };
        let (mut execution, mut effects) = (Execution::new(steps, memory), Vec::new());
        execution.operation.start(&mut effects);
        let opened: Vec<(u32, u32)> = effects
            .iter()
            .filter_map(|effect| match effect {
                Effect::Open { from, message, .. } => Some((*from, *message)),
                _ => None,
            })
            .collect();
        assert_eq!(opened.len(), 2, "{effects:?}");
        for at in [4000, 0, 1000, 3000, 2000u64] {
            for (from, message) in &opened {
                assert_eq!(missing(&execution), 2);
                let payload = &theirs[*from as usize - 1][at as usize..at as usize + 1000];
                let incoming = Message::Bytes { offset: at, payload };
                execution.on_message(*from, *message, len, incoming, &mut effects).expect("it fits");
                if at == 2000 {
                    break;
                }
            }
        }
        let (from, message) = opened[1];
        let incoming = Message::Bytes { offset: 2000, payload: &theirs[from as usize - 1][2000..3000] };
        assert_eq!(missing(&execution), 1);
        assert!(execution.memory_bytes() >= 2 * len as usize);
        execution.on_message(from, message, len, incoming, &mut effects).expect("it fits");
        for effect in effects.clone() {
            if let Effect::Send { to, message, .. } = effect {
                execution.operation.on_sent(to, message, &mut effects);
            }
        }
        settle(&mut execution, &mut effects);
        assert!(execution.operation.is_done());
        drop(execution);
        assert!(result.iter().zip(0..len).all(|(got, at)| u64::from(*got) == 1 + 2 * (at % 50) + 1 + 2));
    }

    /// A message that the plan does not have, or has with another length, is refused; the one that it has is taken.
    #[test]
    fn messages_that_the_plan_does_not_have() {
        let length = |got| Misfit::Length { expected: 1000, got };
        for (from, message, total, refused) in [
            (0, 0, 999, Some(length(999))),
            (0, 0, 1001, Some(length(1001))),
            (0, 0, 0, Some(length(0))),
            (0, 1, 1000, Some(Misfit::Unknown)),
            (0, u32::MAX, 1000, Some(Misfit::Unknown)),
            (1, 0, 1000, Some(Misfit::Unknown)),
            (0, 0, 1000, None),
        ] {
            let (payload, mut result) = (vec![7; total as usize], vec![0; 1000]);
            let (mut execution, mut effects) = (receive(&mut result), Vec::new());
            execution.operation.start(&mut effects);
            let incoming = Message::Bytes { offset: 0, payload: &payload };
            let taken = execution.on_message(from, message, total, incoming, &mut effects);
            assert_eq!(taken.err(), refused, "{total} bytes as message {message} of rank {from}");
            assert_eq!(execution.operation.is_done(), refused.is_none());
            drop(execution);
            assert_eq!(result, vec![if refused.is_none() { 7 } else { 0 }; 1000]);
        }
    }

    /// A sender whose epoch has turned may have changed its bytes: the operation does not end before its word, and a word
    /// on anything else does not count.
    #[test]
    fn doubtful_bytes_wait_for_the_senders_word() {
        let (theirs, memory_epoch, mut result) = (vec![7; 100_000], MemoryEpoch::new([1; 16]), vec![0; 100_000]);
        let (mut execution, mut effects) = (receive(&mut result), Vec::new());
        execution.operation.start(&mut effects);
        let incoming = given(&theirs, &memory_epoch);
        memory_epoch.turn();
        effects.clear();
        execution.on_message(0, 0, 100_000, incoming, &mut effects).expect("it fits");
        execution.work(&mut effects).expect("own memory");
        assert_eq!(effects, [Effect::Doubt { from: 0, message: 0 }]);
        assert!(!execution.operation.is_done());
        effects.clear();
        execution.operation.on_confirmed(0, 1, &mut effects);
        execution.operation.on_confirmed(3, 0, &mut effects);
        assert!(effects.is_empty() && !execution.operation.is_done());
        execution.operation.on_confirmed(0, 0, &mut effects);
        assert_eq!(effects, [Effect::Read { from: 0, message: 0 }]);
        assert!(execution.operation.is_done());
        execution.operation.on_confirmed(0, 0, &mut effects);
        assert_eq!(effects.len(), 1, "told twice");
    }

    /// Memory that is gone is named with the rank that it belonged to, and nothing is done with the operation.
    #[test]
    fn memory_that_is_gone_names_its_rank() {
        let (memory_epoch, mut result) = (MemoryEpoch::new([1; 16]), vec![0; 100_000]);
        let (mut execution, mut effects) = (receive(&mut result), Vec::new());
        execution.operation.start(&mut effects);
        effects.clear();
        let pid = std::process::id();
        let incoming = Remote::Process { pid, address: 4096, memory_epoch: memory_epoch.address(), epoch: 0 };
        execution.on_message(0, 0, 100_000, Message::Remote(incoming), &mut effects).expect("it fits");
        let (rank, misfit) = execution.work(&mut effects).expect_err("nobody has page 1");
        assert!(rank == 0 && matches!(misfit, Misfit::Unreadable(_)), "{misfit:?}");
        assert!(effects.is_empty() && !execution.operation.is_done());
    }

    /// Frames whose bytes are not whole elements of the message, or do not lie inside it, are refused before anything is
    /// reduced; those that are, at any offset, are taken.
    #[test]
    fn frames_hold_whole_elements() {
        let request = Request {
            collective: Collective::Reduce { root: 0 },
            world: 2,
            rank: 0,
            topology: Topology::separate_hosts(2),
            bytes: 40_000,
            element_bytes: 4,
            splits: None,
            segment_bytes: 1 << 20,
        };
        let steps = Arc::new(steps(&request, Algorithm::Direct).expect("a plan"));
        for (offset, len, fits) in [
            (0, 16_385, false),
            (16_385, 4, false),
            (2, 4, false),
            (39_996, 8, false),
            (u64::MAX - 3, 4, false),
            (0, 16_384, true),
            (39_996, 4, true),
            (0, 40_000, true),
        ] {
            let mut result = vec![1.0f32; 10_000];
            let output = result.as_mut_ptr().cast();
            let memory = Memory { dtype: DType::F32, op: ReduceOp::Sum, world: 2, input: std::ptr::null(), output };
            let (mut execution, mut effects) = (Execution::new(steps.clone(), memory), Vec::new());
            execution.operation.start(&mut effects);
            let payload = 2.0f32.to_le_bytes().repeat(len as usize / 4 + 1);
            let incoming = Message::Bytes { offset, payload: &payload[..len as usize] };
            let taken = execution.on_message(1, 0, 40_000, incoming, &mut effects);
            assert_eq!(taken, if fits { Ok(()) } else { Err(Misfit::Frame { offset, len }) });
            drop(execution);
            let reduced = result.iter().filter(|value| **value == 3.0).count() as u64;
            assert_eq!(reduced, if fits { len / 4 } else { 0 }, "{offset}+{len}");
        }
    }

    /// What may happen to an operation: frames of any shape, and what the runtime tells it.
    #[derive(Clone, Debug)]
    enum Call {
        Frame { from: u32, message: u32, total: Option<u64>, offset: u64, len: usize },
        Placed { from: u32, message: u32, offset: u64, len: u64 },
        Sent { to: u32, message: u32 },
        Confirmed { from: u32, message: u32 },
        Source { to: u32, message: u32 },
        Work,
    }

    fn call() -> impl Strategy<Value = Call> {
        let message = || prop_oneof![8 => 0u32..6, 1 => Just(u32::MAX)];
        let place = || prop_oneof![3 => (0u64..40).prop_map(|n| n * 16), 1 => 0u64..700, 1 => Just(u64::MAX)];
        let length = || prop_oneof![3 => (0u64..40).prop_map(|n| n * 16), 1 => 0u64..700];
        prop_oneof![
            8 => (0u32..5, message(), proptest::option::weighted(0.1, place()), place(), length())
                .prop_map(|(from, message, total, offset, len)| Call::Frame { from, message, total, offset, len: len as usize }),
            1 => (0u32..5, message(), place(), length())
                .prop_map(|(from, message, offset, len)| Call::Placed { from, message, offset, len }),
            3 => (0u32..5, message()).prop_map(|(to, message)| Call::Sent { to, message }),
            1 => (0u32..5, message()).prop_map(|(from, message)| Call::Confirmed { from, message }),
            1 => (0u32..5, message()).prop_map(|(to, message)| Call::Source { to, message }),
            1 => Just(Call::Work),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        /// Whatever frames come, whenever: an operation never panics, and touches only its own buffers. A frame is taken
        /// only for a message that is open, has the length that the plan gives it, and is not over.
        #[test]
        fn any_frames_are_survived(
            which in 0usize..9,
            dtype in prop_oneof![Just(DType::F32), Just(DType::BF16), Just(DType::F64), Just(DType::U8)],
            rank in 0u32..4,
            elements in 0u64..80,
            one_host: bool,
            calls in proptest::collection::vec(call(), 1..60),
        ) {
            let (world, size) = (4u32, dtype.size() as u64);
            let collective = [
                Collective::AllReduce,
                Collective::ReduceScatter,
                Collective::AllGather,
                Collective::Broadcast { root: 1 },
                Collective::Reduce { root: 2 },
                Collective::Gather { root: 0 },
                Collective::Scatter { root: 3 },
                Collective::AllToAll,
                Collective::Barrier,
            ][which];
            let splits = (collective == Collective::AllToAll).then(|| {
                let parts: Vec<u64> = (0..u64::from(world)).map(|to| elements * size * ((to + 1) % 3)).collect();
                penstock_plan::Splits { input: parts.clone(), output: parts }
            });
            let whole = elements * size * u64::from(world);
            let request = Request {
                collective,
                world,
                rank,
                topology: if one_host { Topology::one_host(world) } else { Topology::separate_hosts(world) },
                bytes: if collective == Collective::Barrier { 0 } else { whole },
                element_bytes: size as u32,
                splits,
                segment_bytes: 64,
            };
            for algorithm in Algorithm::of(collective) {
                let Ok(steps) = steps(&request, *algorithm) else { continue };
                const GUARD: usize = 64;
                let input = vec![1u8; request.input_bytes() as usize];
                let mut output = vec![0xa5u8; request.output_bytes() as usize + 2 * GUARD];
                let memory = Memory {
                    dtype,
                    op: ReduceOp::Max,
                    world,
                    input: input.as_ptr(),
                    output: output.as_mut_ptr().wrapping_add(GUARD),
                };
                let (mut execution, mut effects) = (Execution::new(Arc::new(steps), memory), Vec::new());
                execution.operation.start(&mut effects);
                settle(&mut execution, &mut effects);
                for call in &calls {
                    match *call {
                        Call::Frame { from, message, total, offset, len } => {
                            let open = execution.operation.is_open(from, message);
                            let expected = execution.operation.expected(from, message);
                            let total = total.or(expected).unwrap_or(64);
                            let payload = vec![7u8; len];
                            let incoming = Message::Bytes { offset, payload: &payload };
                            if execution.on_message(from, message, total, incoming, &mut effects).is_ok() {
                                prop_assert_eq!(open, Some(true));
                                prop_assert_eq!(expected, Some(total));
                                prop_assert!(total == 0 || offset.checked_add(len as u64).is_some_and(|end| end <= total));
                            }
                        }
                        Call::Placed { from, message, offset, len } => {
                            let total = execution.operation.expected(from, message).unwrap_or(0);
                            let inside = offset.checked_add(len).is_some_and(|end| end <= total);
                            if inside && let Some(place) = execution.place(from, message, offset, len, total) {
                                let own = output.as_ptr_range();
                                let ends = place.wrapping_add(len as usize).cast_const();
                                let scratch = execution.buffers.scratch.as_ptr_range();
                                prop_assert!(
                                    own.start.wrapping_add(GUARD) <= place && ends <= own.end.wrapping_sub(GUARD)
                                        || scratch.start <= place && ends <= scratch.end
                                );
                                let incoming = Message::Placed { len: len as usize };
                                let _ = execution.on_message(from, message, total, incoming, &mut effects);
                            }
                        }
                        Call::Sent { to, message } => execution.operation.on_sent(to, message, &mut effects),
                        Call::Confirmed { from, message } => execution.operation.on_confirmed(from, message, &mut effects),
                        Call::Source { to, message } => drop(execution.source(to, message, 0, 0)),
                        Call::Work => drop(execution.work(&mut effects)),
                    }
                    settle(&mut execution, &mut effects);
                    effects.clear();
                    let _ = (execution.operation.awaited(), execution.memory_bytes());
                }
                drop(execution);
                prop_assert!(output[..GUARD].iter().chain(&output[output.len() - GUARD..]).all(|byte| *byte == 0xa5));
                prop_assert!(input.iter().all(|byte| *byte == 1));
            }
        }
    }
}
