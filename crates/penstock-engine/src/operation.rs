//! One operation: runs the [`Steps`] of a plan.
//!
//! The executor knows memory and arithmetic, not the network: [`Operation::start`] and the `on_*` methods return what
//! is to be sent or granted, as [`Effect`]s, and the runtime carries them out.

use penstock_kernels::{Finish, reduce};
use penstock_net::memory::Remote;
use penstock_plan::{Action, Buf, Dep, Operand, Slice, Steps};
use penstock_types::{DType, ReduceOp};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::sync::Arc;

/// Why no operation here pushes or pulls.
const AGGREGATED: &str = "plans with servers run in an aggregation client (`crate::aggregated`)";

/// What an operation wants from the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Send `len` bytes at `address` to rank `to` as message `message`; tell [`Operation::on_sent`] when they are taken.
    Send { to: u32, message: u32, address: *const u8, len: usize },
    /// Rank `from` may send messages `message..message + count` (or has sent them already).
    Open { from: u32, message: u32, count: u32 },
    /// The message that rank `from` gave by reference has been read: it may change its memory.
    Read { from: u32, message: u32 },
    /// It has been read, but rank `from` may have changed it before: ask, and tell [`Operation::on_confirmed`].
    Doubt { from: u32, message: u32 },
}

impl Effect {
    /// The rank that has to do something for it.
    pub(crate) fn awaits(&self) -> Option<u32> {
        match self {
            Effect::Send { to: rank, .. } | Effect::Open { from: rank, .. } | Effect::Doubt { from: rank, .. } => {
                Some(*rank)
            }
            Effect::Read { .. } => None,
        }
    }
}

/// What an operation waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Awaited {
    /// A message.
    Message(u32),
    /// The other rank's word that it has taken this message of ours, which was sent.
    Taken(u32),
    /// The same of one that cannot be sent yet.
    Unsent,
}

/// The bytes of an incoming message.
#[derive(Debug)]
pub(crate) enum Incoming<'a> {
    /// Here, in order of arrival; the first byte is the message's `offset`.
    Bytes { offset: u64, payload: &'a [u8] },
    /// Already where [`Operation::place`] said.
    Placed { len: usize },
    /// In the memory of a process on this host.
    Remote(Remote),
}

/// The part of a user's request that the executor needs.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    /// Ranks that contribute to a reduction, for averages.
    pub(crate) world: u32,
    pub(crate) input: *const u8,
    pub(crate) output: *mut u8,
}

/// A running plan.
#[derive(Debug)]
pub(crate) struct Operation {
    steps: Arc<Steps>,
    memory: Memory,
    scratch: Vec<u8>,
    /// Index of each step's first instance.
    base: Vec<u32>,
    /// Per step: which steps wait for it, and how.
    dependents: Vec<Vec<(u32, Dep)>>,
    /// Per step: instances not done.
    open_instances: Vec<u32>,
    instances: Vec<Instance>,
    /// Instances not done.
    left: u32,
    ready: VecDeque<(u32, u32)>,
    /// By instance: messages, by operand, that wait for the others of their step, or for [`Operation::work`].
    held: HashMap<u32, Vec<Option<Held>>>,
    /// Steps and segments whose messages are all here, some of them in other processes' memory, and those that need none but
    /// are long. In the order of the plan, which puts first what is to be collected: it is still in the cache that its reduction left it in.
    work: BTreeSet<(u32, u32)>,
    /// Steps and segments whose result stands, but for the word of so many ranks.
    doubtful: HashMap<(u32, u32), usize>,
    /// Blocks of remote memory are read here.
    blocks: Vec<u8>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Instance {
    /// Prerequisites not done.
    waits: u32,
    /// Whether its prerequisites are done.
    started: bool,
    done: bool,
    /// Bytes of its message that were applied.
    got: u64,
}

#[derive(Debug)]
enum Held {
    Bytes(Vec<u8>),
    /// The frames of a longer message that have come. Plans have many messages reduced at once where all ranks share a
    /// host, because references cost nothing to hold; but the kernel may let some of them not read each other's memory.
    Frames {
        bytes: Vec<u8>,
        got: u64,
    },
    Remote(Remote),
}

impl Held {
    fn is_whole(&self) -> bool {
        !matches!(self, Held::Frames { .. })
    }
}

/// An incoming message that does not fit the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Misfit {
    /// The plan has no such message.
    Unknown,
    /// It has, with another length.
    Length { expected: u64, got: u64 },
    /// A frame of it does not lie inside it, or cuts an element in two.
    Frame { offset: u64, len: u64 },
    /// Reading the sender's memory failed.
    Unreadable(String),
}

// SAFETY: the pointers are the user's buffers, which the caller of the engine keeps alive and leaves alone until the
// operation ends; only the engine's thread uses them.
unsafe impl Send for Operation {}

impl Operation {
    pub(crate) fn new(steps: Arc<Steps>, memory: Memory) -> Operation {
        let mut base = Vec::with_capacity(steps.steps.len());
        let mut dependents = vec![Vec::new(); steps.steps.len()];
        let mut total = 0;
        for (index, step) in steps.steps.iter().enumerate() {
            base.push(total);
            total += step.segments;
            for dep in &step.after {
                let (Dep::Segment { step: on, .. } | Dep::All { step: on }) = *dep;
                dependents[on as usize].push((index as u32, *dep));
            }
        }
        let mut instances = vec![Instance::default(); total as usize];
        for (index, step) in steps.steps.iter().enumerate() {
            for segment in 0..step.segments {
                let waits = step.after.iter().filter(|dep| match **dep {
                    Dep::Segment { step, lag } => segment >= lag && segment - lag < steps.steps[step as usize].segments,
                    Dep::All { step } => steps.steps[step as usize].segments > 0,
                });
                instances[(base[index] + segment) as usize].waits = waits.count() as u32;
            }
        }
        Operation {
            scratch: vec![0; steps.scratch_bytes as usize],
            open_instances: steps.steps.iter().map(|step| step.segments).collect(),
            left: total,
            ready: VecDeque::new(),
            held: HashMap::new(),
            work: BTreeSet::new(),
            doubtful: HashMap::new(),
            blocks: Vec::new(),
            steps,
            memory,
            base,
            dependents,
            instances,
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.left == 0
    }

    /// Runs what can run at once.
    pub(crate) fn start(&mut self, effects: &mut Vec<Effect>) {
        for (index, step) in self.steps.steps.iter().enumerate() {
            for segment in 0..step.segments {
                if self.instances[(self.base[index] + segment) as usize].waits == 0 {
                    self.ready.push_back((index as u32, segment));
                }
            }
        }
        self.run(effects);
    }

    /// The receiver has all of a message that `Effect::Send` named.
    pub(crate) fn on_sent(&mut self, to: u32, message: u32, effects: &mut Vec<Effect>) {
        let found = self.steps.steps.iter().enumerate().find_map(|(index, step)| match step.action {
            Action::Send { to: rank, message: first, .. } | Action::Notify { to: rank, message: first }
                if rank == to && (first..first + step.segments).contains(&message) =>
            {
                Some((index as u32, message - first))
            }
            _ => None,
        });
        if let Some((step, segment)) = found {
            self.finish(step, segment);
            self.run(effects);
        }
    }

    /// Whether message `message` of rank `from` may come now; `None` if the plan has no such message.
    pub(crate) fn is_open(&self, from: u32, message: u32) -> Option<bool> {
        let (step, segment, _) = self.find(from, message)?;
        Some(self.instance(step, segment).started)
    }

    /// The longest of messages `message..message + count` of rank `from`.
    pub(crate) fn largest_message(&self, from: u32, message: u32, count: u32) -> u64 {
        (message..message + count).filter_map(|message| self.expected(from, message)).max().unwrap_or(0)
    }

    fn expected(&self, from: u32, message: u32) -> Option<u64> {
        let (step, segment, _) = self.find(from, message)?;
        match &self.steps.steps[step as usize].action {
            Action::Recv { dst, .. } | Action::Reduce { dst, .. } => Some(dst.segment(segment).1),
            _ => Some(0),
        }
    }

    /// Where bytes from `offset` on of an incoming message belong, if they only have to lie there.
    pub(crate) fn place(&self, from: u32, message: u32, offset: u64, len: u64, total: u64) -> Option<*mut u8> {
        let (step, segment, _) = self.find(from, message)?;
        let Action::Recv { dst, .. } = self.steps.steps[step as usize].action else { return None };
        let (start, expected) = dst.segment(segment);
        if expected != total || offset + len > total || !self.instance(step, segment).started {
            return None;
        }
        Some(self.address(dst.buf, start).wrapping_add(offset as usize))
    }

    /// Bytes `offset..offset + len` of an outgoing message.
    pub(crate) fn source(&self, to: u32, message: u32, offset: u64, len: usize) -> Option<*const u8> {
        self.steps.steps.iter().find_map(|step| match &step.action {
            Action::Send { to: rank, message: first, src }
                if *rank == to && (*first..first + step.segments).contains(&message) =>
            {
                let (start, total) = src.segment(message - first);
                debug_assert!(offset + len as u64 <= total);
                Some(self.address(src.buf, start).wrapping_add(offset as usize).cast_const())
            }
            _ => None,
        })
    }

    /// Takes (a part of) an open message. `total` is the length that the sender gave it. A step that reduces several
    /// messages holds them until all are there; what lies in another process's memory waits for [`Operation::work`].
    pub(crate) fn on_message(
        &mut self,
        from: u32,
        message: u32,
        total: u64,
        incoming: Incoming<'_>,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Misfit> {
        let (step, segment, operand) = self.find(from, message).ok_or(Misfit::Unknown)?;
        let steps = self.steps.clone();
        let Instance { started, done, .. } = *self.instance(step, segment);
        if !started || done {
            return Err(Misfit::Unknown);
        }
        match &steps.steps[step as usize].action {
            Action::Recv { dst, .. } => {
                let (start, expected) = dst.segment(segment);
                check_length(expected, total)?;
                match incoming {
                    Incoming::Bytes { offset, payload } => {
                        check_frame(offset, payload, expected, 1)?;
                        let place = self.address(dst.buf, start).wrapping_add(offset as usize);
                        // SAFETY: `check_length` and the frame's own bounds keep it inside the slice.
                        unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), place, payload.len()) };
                        self.got(step, segment, payload.len() as u64, expected);
                    }
                    Incoming::Placed { len } => self.got(step, segment, len as u64, expected),
                    Incoming::Remote(remote) => {
                        self.held.insert(self.index(step, segment), vec![Some(Held::Remote(remote))]);
                        self.work.insert((step, segment));
                    }
                }
            }
            Action::Reduce { dst, sources, last } => {
                let (_, expected) = dst.segment(segment);
                check_length(expected, total)?;
                if let Incoming::Bytes { offset, payload } = &incoming {
                    check_frame(*offset, payload, expected, self.memory.dtype.size() as u64)?;
                }
                let messages = sources.iter().filter(|source| matches!(source, Operand::Message { .. })).count();
                if let Incoming::Bytes { offset, payload } = incoming
                    && messages == 1
                {
                    self.reduce(dst, sources, segment, offset, payload.len(), *last, |_| payload.as_ptr());
                    self.got(step, segment, payload.len() as u64, expected);
                } else {
                    let index = self.index(step, segment);
                    let slots = self.held.entry(index).or_insert_with(|| sources.iter().map(|_| None).collect());
                    let slot = &mut slots[operand as usize];
                    match incoming {
                        Incoming::Bytes { payload, .. } if payload.len() as u64 == expected => {
                            *slot = Some(Held::Bytes(payload.to_vec()));
                        }
                        Incoming::Bytes { offset, payload } => take_frame(slot, offset, payload, expected)?,
                        Incoming::Remote(remote) => *slot = Some(Held::Remote(remote)),
                        Incoming::Placed { .. } => unreachable!("what is reduced has no place of its own"),
                    }
                    let is_here = |slot: &&Option<Held>| slot.as_ref().is_some_and(Held::is_whole);
                    if slots.iter().filter(is_here).count() == messages {
                        if slots.iter().flatten().any(|held| matches!(held, Held::Remote(_))) {
                            self.work.insert((step, segment));
                        } else {
                            self.take_held(step, segment, effects).map_err(|(_, misfit)| misfit)?;
                        }
                    }
                }
            }
            Action::Await { .. } => {
                check_length(0, total)?;
                self.finish(step, segment);
            }
            Action::Send { .. }
            | Action::Copy { .. }
            | Action::Notify { .. }
            | Action::Push { .. }
            | Action::Pull { .. } => return Err(Misfit::Unknown),
        }
        self.run(effects);
        Ok(())
    }

    /// Whether messages in other processes' memory wait to be read, or large pieces of this rank's to be copied.
    pub(crate) fn has_work(&self) -> bool {
        !self.work.is_empty()
    }

    /// Does what one step and segment wants: reads (and reduces) its messages that lie in other processes' memory, or copies
    /// what is here. The error names the rank whose memory cannot be read.
    pub(crate) fn work(&mut self, effects: &mut Vec<Effect>) -> Result<(), (u32, Misfit)> {
        let Some((step, segment)) = self.work.pop_first() else { return Ok(()) };
        if self.held.contains_key(&self.index(step, segment)) {
            self.take_held(step, segment, effects)?;
        } else {
            self.do_local(step, segment);
        }
        self.run(effects);
        Ok(())
    }

    /// A step that needs no message: done at once if it is short, otherwise in a turn of its own, between which frames are
    /// read. Copying a tensor of a gigabyte takes longer than a peer may be silent.
    fn take_local(&mut self, step: u32, segment: u32, len: u64) {
        if len > LOCAL_AT_ONCE {
            self.work.insert((step, segment));
        } else {
            self.do_local(step, segment);
        }
    }

    fn do_local(&mut self, step: u32, segment: u32) {
        let steps = self.steps.clone();
        match &steps.steps[step as usize].action {
            Action::Copy { dst, src } => {
                let ((to, len), (from, _)) = (dst.segment(segment), src.segment(segment));
                if len > 0 {
                    let (to, from) = (self.address(dst.buf, to), self.address(src.buf, from).cast_const());
                    // SAFETY: the plan's slices lie in their buffers and do not overlap (proved by its checker).
                    unsafe { std::ptr::copy(from, to, len as usize) };
                }
            }
            Action::Reduce { dst, sources, last } => {
                let (_, len) = dst.segment(segment);
                if len > 0 {
                    self.reduce(dst, sources, segment, 0, len as usize, *last, |_| std::ptr::null());
                }
            }
            _ => unreachable!("every other step needs a message"),
        }
        self.finish(step, segment);
    }

    /// Rank `from` had not changed the memory of a doubtful message when it was read.
    pub(crate) fn on_confirmed(&mut self, from: u32, message: u32, effects: &mut Vec<Effect>) {
        let Some((step, segment, _)) = self.find(from, message) else { return };
        let Some(doubts) = self.doubtful.get_mut(&(step, segment)) else { return };
        *doubts -= 1;
        effects.push(Effect::Read { from, message });
        if *doubts == 0 {
            self.doubtful.remove(&(step, segment));
            self.finish(step, segment);
            self.run(effects);
        }
    }

    /// Rank and number of the message that a step takes as one of its operands.
    fn sender(&self, step: u32, operand: u32) -> (u32, u32) {
        match &self.steps.steps[step as usize].action {
            Action::Recv { from, message, .. } => (*from, *message),
            Action::Reduce { sources, .. } => match sources[operand as usize] {
                Operand::Message { from, message } => (from, message),
                Operand::Local(_) => unreachable!("what is local is not held"),
            },
            _ => unreachable!("no other step holds messages"),
        }
    }

    /// Does what a step does with its messages, which are all held.
    fn take_held(&mut self, step: u32, segment: u32, effects: &mut Vec<Effect>) -> Result<(), (u32, Misfit)> {
        let steps = self.steps.clone();
        let slots = self.held.remove(&self.index(step, segment)).expect("only steps with messages are taken");
        let held: Vec<(u32, Held)> =
            (0..).zip(slots).filter_map(|(operand, held)| held.map(|held| (operand, held))).collect();
        match &steps.steps[step as usize].action {
            Action::Recv { dst, .. } => {
                let (start, len) = dst.segment(segment);
                let place = self.address(dst.buf, start);
                for (operand, held) in &held {
                    let Held::Remote(remote) = held else { continue };
                    // SAFETY: the slice has `len` bytes.
                    unsafe { remote.read(0, place, len as usize) }
                        .map_err(|error| self.unreadable(step, *operand, &error))?;
                }
            }
            Action::Reduce { dst, sources, last } => {
                let (_, len) = dst.segment(segment);
                self.reduce_held(dst, sources, segment, len, *last, &held)
                    .map_err(|(operand, error)| self.unreadable(step, operand, &error))?;
            }
            _ => unreachable!("no other step holds messages"),
        }
        let mut doubts = 0;
        for (operand, held) in &held {
            let Held::Remote(remote) = held else { continue };
            let (from, first) = self.sender(step, *operand);
            let message = first + segment;
            if remote.is_certain().map_err(|error| self.unreadable(step, *operand, &error))? {
                effects.push(Effect::Read { from, message });
            } else {
                effects.push(Effect::Doubt { from, message });
                doubts += 1;
            }
        }
        if doubts == 0 {
            self.finish(step, segment);
        } else {
            self.doubtful.insert((step, segment), doubts);
        }
        Ok(())
    }

    fn unreadable(&self, step: u32, operand: u32, error: &io::Error) -> (u32, Misfit) {
        (self.sender(step, operand).0, Misfit::Unreadable(error.to_string()))
    }

    /// The ranks that have not sent (or taken) everything yet, for messages about time-outs.
    pub(crate) fn awaited(&self) -> Vec<u32> {
        let mut ranks: Vec<u32> = self.awaited_messages().into_iter().map(|(rank, _)| rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// What is still to come from which rank.
    pub(crate) fn awaited_messages(&self) -> Vec<(u32, Awaited)> {
        let mut awaited = Vec::new();
        for (index, step) in self.steps.steps.iter().enumerate() {
            for segment in (0..step.segments).filter(|segment| !self.instance(index as u32, *segment).done) {
                match &step.action {
                    Action::Recv { from, message, .. } | Action::Await { from, message } => {
                        if !self.held.contains_key(&(self.base[index] + segment)) {
                            awaited.push((*from, Awaited::Message(message + segment)));
                        }
                    }
                    Action::Reduce { sources, .. } => {
                        let held = self.held.get(&(self.base[index] + segment));
                        for (operand, source) in sources.iter().enumerate() {
                            let here = held.is_some_and(|held| held[operand].as_ref().is_some_and(Held::is_whole));
                            if let Operand::Message { from, message } = source
                                && !here
                            {
                                awaited.push((*from, Awaited::Message(message + segment)));
                            }
                        }
                    }
                    Action::Send { to, message, .. } | Action::Notify { to, message } => {
                        let is_sent = self.instance(index as u32, segment).started;
                        awaited.push((*to, if is_sent { Awaited::Taken(message + segment) } else { Awaited::Unsent }));
                    }
                    Action::Copy { .. } => {}
                    Action::Push { .. } | Action::Pull { .. } => unreachable!("{AGGREGATED}"),
                }
            }
        }
        awaited
    }

    /// Bytes of the engine's own that it holds.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.scratch.capacity()
            + self.blocks.capacity()
            + self
                .held
                .values()
                .flatten()
                .map(|held| match held {
                    Some(Held::Bytes(bytes) | Held::Frames { bytes, .. }) => bytes.capacity(),
                    _ => 0,
                })
                .sum::<usize>()
    }

    /// Runs instances until none is ready.
    fn run(&mut self, effects: &mut Vec<Effect>) {
        let steps = self.steps.clone();
        while let Some((index, segment)) = self.ready.pop_front() {
            self.instances[(self.base[index as usize] + segment) as usize].started = true;
            match &steps.steps[index as usize].action {
                Action::Send { to, message, src } => {
                    let (start, len) = src.segment(segment);
                    if len == 0 {
                        self.finish(index, segment);
                    } else {
                        let address = self.address(src.buf, start).cast_const();
                        effects.push(Effect::Send { to: *to, message: message + segment, address, len: len as usize });
                    }
                }
                Action::Recv { from, message, dst } => {
                    if dst.segment(segment).1 == 0 {
                        self.finish(index, segment);
                    } else {
                        open(effects, *from, message + segment);
                    }
                }
                Action::Reduce { dst, sources, .. } => {
                    let (_, len) = dst.segment(segment);
                    let mut waits = false;
                    if len > 0 {
                        for source in sources {
                            if let Operand::Message { from, message } = source {
                                open(effects, *from, message + segment);
                                waits = true;
                            }
                        }
                    }
                    if !waits {
                        self.take_local(index, segment, len);
                    }
                }
                Action::Copy { dst, .. } => self.take_local(index, segment, dst.segment(segment).1),
                Action::Notify { to, message } => {
                    let address = std::ptr::null();
                    effects.push(Effect::Send { to: *to, message: message + segment, address, len: 0 });
                }
                Action::Await { from, message } => open(effects, *from, message + segment),
                Action::Push { .. } | Action::Pull { .. } => unreachable!("{AGGREGATED}"),
            }
        }
    }

    /// Marks an instance done and readies those that waited for it only.
    fn finish(&mut self, step: u32, segment: u32) {
        let at = (self.base[step as usize] + segment) as usize;
        if std::mem::replace(&mut self.instances[at].done, true) {
            return;
        }
        self.left -= 1;
        self.open_instances[step as usize] -= 1;
        let all_done = self.open_instances[step as usize] == 0;
        for at in 0..self.dependents[step as usize].len() {
            let (waiting, dep) = self.dependents[step as usize][at];
            let segments = self.steps.steps[waiting as usize].segments;
            match dep {
                Dep::Segment { lag, .. } => {
                    if segment + lag < segments {
                        self.release(waiting, segment + lag);
                    }
                }
                Dep::All { .. } if all_done => (0..segments).for_each(|segment| self.release(waiting, segment)),
                Dep::All { .. } => {}
            }
        }
    }

    fn release(&mut self, step: u32, segment: u32) {
        let instance = &mut self.instances[(self.base[step as usize] + segment) as usize];
        instance.waits -= 1;
        if instance.waits == 0 {
            self.ready.push_back((step, segment));
        }
    }

    fn got(&mut self, step: u32, segment: u32, len: u64, expected: u64) {
        let instance = &mut self.instances[(self.base[step as usize] + segment) as usize];
        instance.got += len;
        if instance.got == expected {
            self.finish(step, segment);
        }
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
        let place = |slice: &Slice| self.address(slice.buf, slice.segment(segment).0).wrapping_add(offset as usize);
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

    /// Reduces a whole segment whose messages are held: block by block, so that what is read is still in the cache when
    /// it is added.
    fn reduce_held(
        &mut self,
        dst: &Slice,
        sources: &[Operand],
        segment: u32,
        len: u64,
        last: bool,
        held: &[(u32, Held)],
    ) -> Result<(), (u32, io::Error)> {
        let is_elsewhere = |held: &Held| matches!(held, Held::Remote(memory) if memory.pointer().is_none());
        let remotes = held.iter().filter(|(_, held)| is_elsewhere(held)).count();
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
            let places = if held.len() <= MAX_OPERANDS {
                &mut places[..held.len()]
            } else {
                many.resize(held.len(), (0, std::ptr::null()));
                &mut many[..]
            };
            let mut remote = 0;
            for (place, (operand, held)) in places.iter_mut().zip(held) {
                let bytes = match held {
                    Held::Bytes(bytes) | Held::Frames { bytes, .. } => bytes[offset as usize..].as_ptr(),
                    Held::Remote(memory) => match memory.pointer() {
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

    /// The step, segment and operand that message `message` of rank `from` is for.
    fn find(&self, from: u32, message: u32) -> Option<(u32, u32, u32)> {
        self.steps.steps.iter().enumerate().find_map(|(index, step)| {
            let within = |rank: u32, first: u32| {
                (rank == from && (first..first + step.segments).contains(&message)).then(|| message - first)
            };
            let (segment, operand) = match &step.action {
                Action::Recv { from, message, .. } | Action::Await { from, message } => (within(*from, *message)?, 0),
                Action::Reduce { sources, .. } => sources.iter().enumerate().find_map(|(operand, source)| {
                    let Operand::Message { from, message } = source else { return None };
                    within(*from, *message).map(|segment| (segment, operand as u32))
                })?,
                _ => return None,
            };
            Some((index as u32, segment, operand))
        })
    }

    /// Names a step's segment among all instances.
    fn index(&self, step: u32, segment: u32) -> u32 {
        self.base[step as usize] + segment
    }

    fn instance(&self, step: u32, segment: u32) -> &Instance {
        &self.instances[(self.base[step as usize] + segment) as usize]
    }

    fn address(&self, buf: Buf, start: u64) -> *mut u8 {
        let base = match buf {
            Buf::Input => self.memory.input.cast_mut(),
            Buf::Output => self.memory.output,
            Buf::Scratch => self.scratch.as_ptr().cast_mut(),
        };
        base.wrapping_add(start as usize)
    }
}

/// Adds one frame to the message in `slot`, which becomes [`Held::Bytes`] with its last one.
fn take_frame(slot: &mut Option<Held>, offset: u64, payload: &[u8], expected: u64) -> Result<(), Misfit> {
    let held = slot.get_or_insert_with(|| Held::Frames { bytes: vec![0; expected as usize], got: 0 });
    let Held::Frames { bytes, got } = held else { return Err(Misfit::Unknown) };
    let place = bytes.get_mut(offset as usize..).and_then(|rest| rest.get_mut(..payload.len()));
    place.ok_or(Misfit::Unknown)?.copy_from_slice(payload);
    *got += payload.len() as u64;
    if *got == expected {
        *held = Held::Bytes(std::mem::take(bytes));
    }
    Ok(())
}

/// A frame lies inside its message and holds whole elements of so many bytes: arithmetic takes nothing else. Our own
/// senders cut at multiples of 16 bytes.
fn check_frame(offset: u64, payload: &[u8], expected: u64, element: u64) -> Result<(), Misfit> {
    let len = payload.len() as u64;
    let fits = offset.checked_add(len).is_some_and(|end| end <= expected);
    if fits && offset.is_multiple_of(element) && len.is_multiple_of(element) {
        return Ok(());
    }
    Err(Misfit::Frame { offset, len })
}

fn check_length(expected: u64, got: u64) -> Result<(), Misfit> {
    if expected == got { Ok(()) } else { Err(Misfit::Length { expected, got }) }
}

/// Adjacent messages of one rank are opened together.
fn open(effects: &mut Vec<Effect>, from: u32, message: u32) {
    if let Some(Effect::Open { from: rank, message: first, count }) = effects.last_mut()
        && *rank == from
        && *first + *count == message
    {
        *count += 1;
        return;
    }
    effects.push(Effect::Open { from, message, count: 1 });
}

/// Operands of a reduction that need no allocation.
const MAX_OPERANDS: usize = 16;
/// A step of this rank's own that is longer waits for a turn: 256 KiB are copied in 50 us.
const LOCAL_AT_ONCE: u64 = 256 * 1024;
/// Remote memory is read in blocks of this size, all sources together: half a level-2 cache of 512 KiB.
const BLOCK_BYTES: usize = 256 * 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_net::memory::MemoryEpoch;
    use penstock_plan::{Algorithm, Collective, Request, Topology, steps};
    use proptest::prelude::*;

    /// A receive of 100 KB from rank 0, whose memory is our own: the sender's bytes, the memory epoch, the operation.
    fn receive(result: &mut [u8]) -> Operation {
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
        Operation::new(steps, Memory { dtype: DType::U8, op, world: 2, input: std::ptr::null(), output })
    }

    fn given(bytes: &[u8], memory_epoch: &MemoryEpoch) -> Incoming<'static> {
        let (pid, address) = (std::process::id(), bytes.as_ptr() as u64);
        Incoming::Remote(Remote::Process {
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
        let (mut operation, mut effects) = (receive(&mut result), Vec::new());
        operation.start(&mut effects);
        assert_eq!(effects, [Effect::Open { from: 0, message: 0, count: 1 }]);
        effects.clear();
        operation.on_message(0, 0, 100_000, given(&theirs, &memory_epoch), &mut effects).expect("it fits");
        assert!(effects.is_empty() && operation.has_work() && !operation.is_done());
        assert!(operation.awaited().is_empty(), "the message is here");
        operation.work(&mut effects).expect("own memory");
        assert_eq!(effects, [Effect::Read { from: 0, message: 0 }]);
        assert!(operation.is_done() && !operation.has_work());
        drop(operation);
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
            let (mut operation, mut effects) = (Operation::new(steps, memory), Vec::new());
            operation.start(&mut effects);
            let mut taken = 0;
            while operation.has_work() {
                assert!(!operation.is_done());
                operation.work(&mut effects).expect("its own memory");
                taken += 1;
            }
            assert!(operation.is_done() && effects.is_empty());
            drop(operation);
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
        let (mut operation, mut effects) = (Operation::new(steps, memory), Vec::new());
        operation.start(&mut effects);
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
                assert_eq!(
                    operation.awaited_messages().iter().filter(|(_, what)| matches!(what, Awaited::Message(_))).count(),
                    2
                );
                let payload = &theirs[*from as usize - 1][at as usize..at as usize + 1000];
                let incoming = Incoming::Bytes { offset: at, payload };
                operation.on_message(*from, *message, len, incoming, &mut effects).expect("it fits");
                if at == 2000 {
                    break;
                }
            }
        }
        let (from, message) = opened[1];
        let incoming = Incoming::Bytes { offset: 2000, payload: &theirs[from as usize - 1][2000..3000] };
        assert_eq!(
            operation.awaited_messages().iter().filter(|(_, what)| matches!(what, Awaited::Message(_))).count(),
            1
        );
        assert!(operation.memory_bytes() >= 2 * len as usize);
        operation.on_message(from, message, len, incoming, &mut effects).expect("it fits");
        for effect in effects.clone() {
            if let Effect::Send { to, message, .. } = effect {
                operation.on_sent(to, message, &mut effects);
            }
        }
        assert!(operation.is_done());
        drop(operation);
        assert!(result.iter().zip(0..len).all(|(got, at)| u64::from(*got) == 1 + 2 * (at % 50) + 1 + 2));
    }

    /// A frame that does not fit what is held of its message is refused, and what is held stays as it is: beside a message
    /// that is whole, beside one that came by reference, and outside its message, be it by a byte.
    #[test]
    fn frames_that_do_not_fit_what_is_held() {
        let expected = 100;
        let frames = || Some(Held::Frames { bytes: vec![5; 100], got: 40 });
        let remote = || Some(Held::Remote(Remote::Process { pid: 1, address: 2, memory_epoch: 3, epoch: 4 }));
        let slots: [fn() -> Option<Held>; 4] = [|| None, frames, || Some(Held::Bytes(vec![5; 100])), remote];
        let [empty, begun, whole, referenced] = slots;
        // The slot, the frame's offset and length, and the bytes held afterwards if it is taken.
        let table = [
            (empty, 0, 40, Some(40)),
            (empty, 60, 40, Some(40)),
            (empty, 61, 40, None),
            (empty, 100, 1, None),
            (empty, 101, 0, None),
            (empty, u64::MAX, 1, None),
            (empty, 0, 101, None),
            (begun, 40, 59, Some(99)),
            (begun, 41, 60, None),
            (begun, u64::MAX, 60, None),
            (whole, 0, 40, None),
            (whole, 100, 0, None),
            (referenced, 0, 40, None),
        ];
        for (slot, offset, length, taken) in table {
            let (mut slot, before) = (slot(), slot());
            let result = take_frame(&mut slot, offset, &vec![7; length], expected);
            let context = format!("{offset}+{length} beside {before:?}");
            let Some(taken) = taken else {
                assert_eq!(result, Err(Misfit::Unknown), "{context}");
                // A slot that was empty may have room now, and nothing in it.
                let room = Held::Frames { bytes: vec![0; 100], got: 0 };
                assert_eq!(format!("{slot:?}"), format!("{:?}", before.or(Some(room))), "{context}");
                continue;
            };
            assert_eq!(result, Ok(()), "{context}");
            let Some(Held::Frames { bytes, got }) = slot else { panic!("{slot:?}: {context}") };
            assert_eq!(got, taken, "{context}");
            let range = offset as usize..offset as usize + length;
            assert!(bytes.iter().enumerate().all(|(at, byte)| (*byte == 7) == range.contains(&at)), "{context}");
        }
        let mut last = frames();
        take_frame(&mut last, 40, &[7; 60], expected).expect("it fits");
        assert!(
            matches!(&last, Some(Held::Bytes(bytes)) if bytes[..40] == [5; 40] && bytes[40..] == [7; 60]),
            "{last:?}"
        );
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
            let (mut operation, mut effects) = (receive(&mut result), Vec::new());
            operation.start(&mut effects);
            let incoming = Incoming::Bytes { offset: 0, payload: &payload };
            let taken = operation.on_message(from, message, total, incoming, &mut effects);
            assert_eq!(taken.err(), refused, "{total} bytes as message {message} of rank {from}");
            assert_eq!(operation.is_done(), refused.is_none());
            drop(operation);
            assert_eq!(result, vec![if refused.is_none() { 7 } else { 0 }; 1000]);
        }
    }

    /// A sender whose epoch has turned may have changed its bytes: the operation does not end before its word, and a word
    /// on anything else does not count.
    #[test]
    fn doubtful_bytes_wait_for_the_senders_word() {
        let (theirs, memory_epoch, mut result) = (vec![7; 100_000], MemoryEpoch::new([1; 16]), vec![0; 100_000]);
        let (mut operation, mut effects) = (receive(&mut result), Vec::new());
        operation.start(&mut effects);
        let incoming = given(&theirs, &memory_epoch);
        memory_epoch.turn();
        effects.clear();
        operation.on_message(0, 0, 100_000, incoming, &mut effects).expect("it fits");
        operation.work(&mut effects).expect("own memory");
        assert_eq!(effects, [Effect::Doubt { from: 0, message: 0 }]);
        assert!(!operation.is_done());
        effects.clear();
        operation.on_confirmed(0, 1, &mut effects);
        operation.on_confirmed(3, 0, &mut effects);
        assert!(effects.is_empty() && !operation.is_done());
        operation.on_confirmed(0, 0, &mut effects);
        assert_eq!(effects, [Effect::Read { from: 0, message: 0 }]);
        assert!(operation.is_done());
        operation.on_confirmed(0, 0, &mut effects);
        assert_eq!(effects.len(), 1, "told twice");
    }

    /// Memory that is gone is named with the rank that it belonged to, and nothing is done with the operation.
    #[test]
    fn memory_that_is_gone_names_its_rank() {
        let (memory_epoch, mut result) = (MemoryEpoch::new([1; 16]), vec![0; 100_000]);
        let (mut operation, mut effects) = (receive(&mut result), Vec::new());
        operation.start(&mut effects);
        effects.clear();
        let pid = std::process::id();
        let incoming = Remote::Process { pid, address: 4096, memory_epoch: memory_epoch.address(), epoch: 0 };
        operation.on_message(0, 0, 100_000, Incoming::Remote(incoming), &mut effects).expect("it fits");
        let (rank, misfit) = operation.work(&mut effects).expect_err("nobody has page 1");
        assert!(rank == 0 && matches!(misfit, Misfit::Unreadable(_)), "{misfit:?}");
        assert!(effects.is_empty() && !operation.is_done());
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
            let (mut operation, mut effects) = (Operation::new(steps.clone(), memory), Vec::new());
            operation.start(&mut effects);
            let payload = 2.0f32.to_le_bytes().repeat(len as usize / 4 + 1);
            let incoming = Incoming::Bytes { offset, payload: &payload[..len as usize] };
            let taken = operation.on_message(1, 0, 40_000, incoming, &mut effects);
            assert_eq!(taken, if fits { Ok(()) } else { Err(Misfit::Frame { offset, len }) });
            drop(operation);
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
                let (mut operation, mut effects) = (Operation::new(Arc::new(steps), memory), Vec::new());
                operation.start(&mut effects);
                for call in &calls {
                    match *call {
                        Call::Frame { from, message, total, offset, len } => {
                            let open = operation.is_open(from, message);
                            let expected = operation.expected(from, message);
                            let total = total.or(expected).unwrap_or(64);
                            let payload = vec![7u8; len];
                            let incoming = Incoming::Bytes { offset, payload: &payload };
                            if operation.on_message(from, message, total, incoming, &mut effects).is_ok() {
                                prop_assert_eq!(open, Some(true));
                                prop_assert_eq!(expected, Some(total));
                                prop_assert!(total == 0 || offset.checked_add(len as u64).is_some_and(|end| end <= total));
                            }
                        }
                        Call::Placed { from, message, offset, len } => {
                            let total = operation.expected(from, message).unwrap_or(0);
                            let inside = offset.checked_add(len).is_some_and(|end| end <= total);
                            if inside && let Some(place) = operation.place(from, message, offset, len, total) {
                                let own = output.as_ptr_range();
                                let ends = place.wrapping_add(len as usize).cast_const();
                                let scratch = operation.scratch.as_ptr_range();
                                prop_assert!(
                                    own.start.wrapping_add(GUARD) <= place && ends <= own.end.wrapping_sub(GUARD)
                                        || scratch.start <= place && ends <= scratch.end
                                );
                                let incoming = Incoming::Placed { len: len as usize };
                                let _ = operation.on_message(from, message, total, incoming, &mut effects);
                            }
                        }
                        Call::Sent { to, message } => operation.on_sent(to, message, &mut effects),
                        Call::Confirmed { from, message } => operation.on_confirmed(from, message, &mut effects),
                        Call::Source { to, message } => drop(operation.source(to, message, 0, 0)),
                        Call::Work => drop(operation.work(&mut effects)),
                    }
                    effects.clear();
                    let _ = (operation.awaited(), operation.memory_bytes());
                }
                drop(operation);
                prop_assert!(output[..GUARD].iter().chain(&output[output.len() - GUARD..]).all(|byte| *byte == 0xa5));
                prop_assert!(input.iter().all(|byte| *byte == 1));
            }
        }
    }
}
