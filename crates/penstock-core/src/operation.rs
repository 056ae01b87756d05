//! One operation: which steps of its plan may run, which have run, and what follows from that.
//!
//! It knows which bytes, as [`Place`]s in the operation's buffers, and neither where they lie nor what is in them. Its methods
//! change its state at once and append to a list of [`Effect`]s, which the caller carries out **in order**: whatever needs the
//! result of an instance stands behind that instance's [`Effect::Compute`]. A message's bytes come first: the caller does what
//! the [`Verdict`] says before it looks at the effects.

pub use crate::effect::{Awaited, Effect, Incoming, Instance, Misfit, Place, Verdict};

use penstock_plan::{Action, Buf, Dep, Operand, Slice, Step, Steps};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

/// Why no operation here pushes or pulls.
const AGGREGATED: &str = "plans with servers run in an aggregation client";

/// A running plan.
#[derive(Debug)]
pub struct Operation {
    steps: Arc<Steps>,
    /// Bytes of an element: arithmetic takes whole ones.
    element_bytes: u64,
    /// Index of each step's first instance.
    base: Vec<u32>,
    /// Per step: which steps wait for it, and how.
    dependents: Vec<Vec<(u32, Dep)>>,
    /// Per step: instances not done.
    open_instances: Vec<u32>,
    instances: Vec<State>,
    /// Instances not done.
    left: u32,
    ready: VecDeque<Instance>,
    /// By instance: how much is here of the messages, by operand, that wait for the others of their step, or for
    /// [`Operation::next_work`].
    kept: HashMap<Instance, Vec<Kept>>,
    /// Instances whose messages are all here, some of them as references, and those that need none but are long. In the order of the
    /// plan, which puts first what is to be collected: it is still in the cache that its reduction left it in.
    work: BTreeSet<Instance>,
    /// Instances whose result stands, but for the word of so many ranks.
    doubtful: HashMap<Instance, usize>,
    /// The steps at which the last message was found that came, and the last one that was sent. Messages come and go about in the
    /// order of the plan, so the search for the next one begins there: a ring of a thousand ranks has two thousand steps.
    last_received: usize,
    last_sent: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// Prerequisites not done.
    waits: u32,
    /// Whether its prerequisites are done.
    started: bool,
    done: bool,
    /// Bytes of its message that were applied.
    got: u64,
}

/// How much is here of a message that is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    Nothing,
    /// So many bytes, in frames. Plans have many messages reduced at once where all ranks share a host, because references cost
    /// nothing to keep; but the kernel may let some of them not read each other's memory.
    Part(u64),
    Whole,
    Reference,
}

impl Kept {
    fn is_whole(self) -> bool {
        matches!(self, Kept::Whole | Kept::Reference)
    }
}

impl Operation {
    /// An operation that has not started.
    #[must_use]
    pub fn new(steps: Arc<Steps>, element_bytes: u64) -> Operation {
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
        let mut instances = vec![State::default(); total as usize];
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
            open_instances: steps.steps.iter().map(|step| step.segments).collect(),
            left: total,
            ready: VecDeque::new(),
            kept: HashMap::new(),
            work: BTreeSet::new(),
            doubtful: HashMap::new(),
            last_received: 0,
            last_sent: 0,
            steps,
            element_bytes,
            base,
            dependents,
            instances,
        }
    }

    /// Its plan.
    #[must_use]
    pub fn steps(&self) -> &Arc<Steps> {
        &self.steps
    }

    /// Whether every instance is done.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.left == 0
    }

    /// Runs what can run at once.
    pub fn start(&mut self, effects: &mut Vec<Effect>) {
        for (step, template) in (0..).zip(&self.steps.steps) {
            for segment in 0..template.segments {
                if self.instances[(self.base[step as usize] + segment) as usize].waits == 0 {
                    self.ready.push_back(Instance { step, segment });
                }
            }
        }
        self.run(effects);
    }

    /// The receiver has all of a message that [`Effect::Send`] named, or the caller has copied it.
    pub fn on_sent(&mut self, to: u32, message: u32, effects: &mut Vec<Effect>) {
        let found = from_step(&self.steps, self.last_sent).find_map(|(index, step)| match step.action {
            Action::Send { to: rank, message: first, .. } | Action::Notify { to: rank, message: first }
                if rank == to && (first..first + step.segments).contains(&message) =>
            {
                Some(Instance { step: index, segment: message - first })
            }
            _ => None,
        });
        if let Some(instance) = found {
            self.last_sent = instance.step as usize;
            self.finish(instance);
            self.run(effects);
        }
    }

    /// Whether message `message` of rank `from` may come now; `None` if the plan has no such message.
    #[must_use]
    pub fn is_open(&self, from: u32, message: u32) -> Option<bool> {
        let (instance, _) = self.find(from, message)?;
        Some(self.state(instance).started)
    }

    /// The longest of messages `message..message + count` of rank `from`, in bytes.
    #[must_use]
    pub fn largest_message(&self, from: u32, message: u32, count: u32) -> u64 {
        (message..message + count).filter_map(|message| self.expected(from, message)).max().unwrap_or(0)
    }

    /// Bytes that a message has by the plan.
    #[must_use]
    pub fn expected(&self, from: u32, message: u32) -> Option<u64> {
        let (instance, _) = self.find(from, message)?;
        match self.action(instance) {
            Action::Recv { dst, .. } | Action::Reduce { dst, .. } => Some(dst.segment(instance.segment).1),
            _ => Some(0),
        }
    }

    /// Where bytes from `offset` on of an incoming message belong, if they only have to lie there.
    #[must_use]
    pub fn place(&self, from: u32, message: u32, offset: u64, len: u64, total: u64) -> Option<Place> {
        let (instance, _) = self.find(from, message)?;
        let Action::Recv { dst, .. } = self.action(instance) else { return None };
        let (start, expected) = dst.segment(instance.segment);
        if expected != total || offset + len > total || !self.state(instance).started {
            return None;
        }
        Some(Place { buf: dst.buf, offset: start + offset })
    }

    /// What is to be done with bytes of an open message, if that can be done now, without regard to what else has come: the caller does
    /// it and then gives [`Operation::on_message`] the bytes as [`Incoming::Placed`]. No two callers may do it with the same bytes.
    #[must_use]
    pub fn claim(&self, from: u32, message: u32, offset: u64, len: u64, total: u64) -> Option<Verdict> {
        let (instance, _) = self.find(from, message)?;
        let State { started, done, .. } = *self.state(instance);
        let (dst, element, verdict) = match self.action(instance) {
            Action::Recv { dst, .. } => {
                let (start, _) = dst.segment(instance.segment);
                (dst, 1, Verdict::Copy(Place { buf: dst.buf, offset: start + offset }))
            }
            Action::Reduce { dst, sources, .. } if message_operands(sources) == 1 => {
                (dst, self.element_bytes, Verdict::Reduce { instance, offset })
            }
            _ => return None,
        };
        let (_, expected) = dst.segment(instance.segment);
        let fits = started && !done && expected == total && check_frame(offset, len, expected, element).is_ok();
        fits.then_some(verdict)
    }

    /// Where bytes `offset..offset + len` of an outgoing message lie.
    #[must_use]
    pub fn source(&self, to: u32, message: u32, offset: u64, len: usize) -> Option<Place> {
        from_step(&self.steps, self.last_sent).find_map(|(_, step)| match &step.action {
            Action::Send { to: rank, message: first, src }
                if *rank == to && (*first..first + step.segments).contains(&message) =>
            {
                let (start, total) = src.segment(message - first);
                debug_assert!(offset + len as u64 <= total);
                Some(Place { buf: src.buf, offset: start + offset })
            }
            _ => None,
        })
    }

    /// Takes (a part of) an open message. `total` is the length that the sender gave it. A step that reduces several messages
    /// keeps them until all are there; what the sender gave by reference waits for [`Operation::next_work`].
    ///
    /// # Errors
    /// A message that the plan does not have, or has not like this, or not now. The state stays as it was.
    pub fn on_message(
        &mut self,
        from: u32,
        message: u32,
        total: u64,
        incoming: Incoming,
        effects: &mut Vec<Effect>,
    ) -> Result<Verdict, Misfit> {
        let (instance, operand) = self.find(from, message).ok_or(Misfit::Unknown)?;
        self.last_received = instance.step as usize;
        let steps = self.steps.clone();
        let State { started, done, .. } = *self.state(instance);
        if !started || done {
            return Err(Misfit::Unknown);
        }
        let verdict = match &steps.steps[instance.step as usize].action {
            Action::Recv { dst, .. } => self.on_placed(instance, dst, total, incoming)?,
            Action::Reduce { dst, sources, .. } => {
                self.on_operand(instance, operand, dst, sources, total, incoming, effects)?
            }
            Action::Await { .. } => {
                check_length(0, total)?;
                self.finish(instance);
                Verdict::Nothing
            }
            Action::Send { .. }
            | Action::Copy { .. }
            | Action::Notify { .. }
            | Action::Push { .. }
            | Action::Pull { .. } => return Err(Misfit::Unknown),
        };
        self.run(effects);
        Ok(verdict)
    }

    /// (A part of) a message that only has to lie in its place.
    fn on_placed(
        &mut self,
        instance: Instance,
        dst: &Slice,
        total: u64,
        incoming: Incoming,
    ) -> Result<Verdict, Misfit> {
        let (start, expected) = dst.segment(instance.segment);
        check_length(expected, total)?;
        match incoming {
            Incoming::Frame { offset, len } => {
                check_frame(offset, len, expected, 1)?;
                self.got(instance, len, expected);
                Ok(Verdict::Copy(Place { buf: dst.buf, offset: start + offset }))
            }
            Incoming::Placed { len } => {
                self.got(instance, len, expected);
                Ok(Verdict::Nothing)
            }
            Incoming::Reference => {
                self.kept.insert(instance, vec![Kept::Reference]);
                self.work.insert(instance);
                Ok(Verdict::Keep { instance, operand: 0, total })
            }
        }
    }

    /// (A part of) a message that is an operand of a reduction.
    #[allow(clippy::too_many_arguments)]
    fn on_operand(
        &mut self,
        instance: Instance,
        operand: u32,
        dst: &Slice,
        sources: &[Operand],
        total: u64,
        incoming: Incoming,
        effects: &mut Vec<Effect>,
    ) -> Result<Verdict, Misfit> {
        let (_, expected) = dst.segment(instance.segment);
        check_length(expected, total)?;
        if let Incoming::Frame { offset, len } = incoming {
            check_frame(offset, len, expected, self.element_bytes)?;
        }
        let messages = message_operands(sources);
        match incoming {
            Incoming::Frame { offset, len } if messages == 1 => {
                self.got(instance, len, expected);
                return Ok(Verdict::Reduce { instance, offset });
            }
            Incoming::Placed { len } if messages == 1 => {
                self.got(instance, len, expected);
                return Ok(Verdict::Nothing);
            }
            _ => {}
        }
        let slots = self.kept.entry(instance).or_insert_with(|| vec![Kept::Nothing; sources.len()]);
        let slot = &mut slots[operand as usize];
        *slot = match (incoming, *slot) {
            (Incoming::Reference, _) => Kept::Reference,
            (Incoming::Frame { len, .. }, _) if len == expected => Kept::Whole,
            (Incoming::Frame { len, .. }, Kept::Nothing) => Kept::Part(len),
            (Incoming::Frame { len, .. }, Kept::Part(got)) if got + len == expected => Kept::Whole,
            (Incoming::Frame { len, .. }, Kept::Part(got)) => Kept::Part(got + len),
            (Incoming::Frame { .. } | Incoming::Placed { .. }, _) => return Err(Misfit::Unknown),
        };
        if slots.iter().filter(|slot| slot.is_whole()).count() == messages {
            if slots.contains(&Kept::Reference) {
                self.work.insert(instance);
            } else {
                self.kept.remove(&instance);
                effects.push(Effect::Compute(instance));
                self.finish(instance);
            }
        }
        Ok(Verdict::Keep { instance, operand, total })
    }

    /// Whether references wait to be read, or large pieces of this rank's own to be copied.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.work.is_empty()
    }

    /// The next instance that takes long: read (and reduce) what it has references to, or copy what is here, and tell
    /// [`Operation::worked`].
    pub fn next_work(&mut self) -> Option<Instance> {
        self.work.pop_first()
    }

    /// An instance of [`Operation::next_work`] has its result. `read` has the operands that were references, and whether they are
    /// certain: the sender's memory was still as the sender gave it after it was read.
    pub fn worked(
        &mut self,
        instance: Instance,
        read: impl IntoIterator<Item = (u32, bool)>,
        effects: &mut Vec<Effect>,
    ) {
        self.kept.remove(&instance);
        let mut doubts = 0;
        for (operand, is_certain) in read {
            let (from, message) = self.sender(instance, operand);
            if is_certain {
                effects.push(Effect::Read { from, message });
            } else {
                effects.push(Effect::Doubt { from, message });
                doubts += 1;
            }
        }
        if doubts == 0 {
            self.finish(instance);
        } else {
            self.doubtful.insert(instance, doubts);
        }
        self.run(effects);
    }

    /// Rank `from` had not changed the memory of a doubtful message when it was read.
    pub fn on_confirmed(&mut self, from: u32, message: u32, effects: &mut Vec<Effect>) {
        let Some((instance, _)) = self.find(from, message) else { return };
        let Some(doubts) = self.doubtful.get_mut(&instance) else { return };
        *doubts -= 1;
        effects.push(Effect::Read { from, message });
        if *doubts == 0 {
            self.doubtful.remove(&instance);
            self.finish(instance);
            self.run(effects);
        }
    }

    /// Rank and number of the message that an instance takes as one of its operands.
    #[must_use]
    pub fn sender(&self, instance: Instance, operand: u32) -> (u32, u32) {
        let (from, first) = match self.action(instance) {
            Action::Recv { from, message, .. } => (*from, *message),
            Action::Reduce { sources, .. } => match sources[operand as usize] {
                Operand::Message { from, message } => (from, message),
                Operand::Local(_) => unreachable!("what is local is not kept"),
            },
            _ => unreachable!("no other step keeps messages"),
        };
        (from, first + instance.segment)
    }

    /// The ranks that have not sent (or taken) everything yet, for messages about time-outs.
    #[must_use]
    pub fn awaited(&self) -> Vec<u32> {
        let mut ranks: Vec<u32> = self.awaited_messages().into_iter().map(|(rank, _)| rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// What is still to come from which rank.
    #[must_use]
    pub fn awaited_messages(&self) -> Vec<(u32, Awaited)> {
        let mut awaited = Vec::new();
        for (step, template) in (0..).zip(&self.steps.steps) {
            let instances = (0..template.segments).map(|segment| Instance { step, segment });
            for instance in instances.filter(|instance| !self.state(*instance).done) {
                let kept = self.kept.get(&instance);
                let segment = instance.segment;
                match &template.action {
                    Action::Recv { from, message, .. } | Action::Await { from, message } => {
                        if kept.is_none() {
                            awaited.push((*from, Awaited::Message(message + segment)));
                        }
                    }
                    Action::Reduce { sources, .. } => {
                        for (operand, source) in sources.iter().enumerate() {
                            let is_here = kept.is_some_and(|kept| kept[operand].is_whole());
                            if let Operand::Message { from, message } = source
                                && !is_here
                            {
                                awaited.push((*from, Awaited::Message(message + segment)));
                            }
                        }
                    }
                    Action::Send { to, message, .. } | Action::Notify { to, message } => {
                        let is_sent = self.state(instance).started;
                        awaited.push((*to, if is_sent { Awaited::Taken(message + segment) } else { Awaited::Unsent }));
                    }
                    Action::Copy { .. } => {}
                    Action::Push { .. } | Action::Pull { .. } => unreachable!("{AGGREGATED}"),
                }
            }
        }
        awaited
    }

    /// Runs instances until none is ready.
    fn run(&mut self, effects: &mut Vec<Effect>) {
        let steps = self.steps.clone();
        while let Some(instance) = self.ready.pop_front() {
            let Instance { step, segment } = instance;
            let at = self.index(instance);
            self.instances[at].started = true;
            match &steps.steps[step as usize].action {
                Action::Send { to, message, src } => {
                    let (offset, len) = src.segment(segment);
                    if len == 0 {
                        self.finish(instance);
                    } else {
                        let from = Place { buf: src.buf, offset };
                        effects.push(Effect::Send { to: *to, message: message + segment, from, len });
                    }
                }
                Action::Recv { from, message, dst } => {
                    if dst.segment(segment).1 == 0 {
                        self.finish(instance);
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
                        self.take_local(instance, len, effects);
                    }
                }
                Action::Copy { dst, .. } => self.take_local(instance, dst.segment(segment).1, effects),
                Action::Notify { to, message } => {
                    let from = Place { buf: Buf::Output, offset: 0 };
                    effects.push(Effect::Send { to: *to, message: message + segment, from, len: 0 });
                }
                Action::Await { from, message } => open(effects, *from, message + segment),
                Action::Push { .. } | Action::Pull { .. } => unreachable!("{AGGREGATED}"),
            }
        }
    }

    /// An instance that needs no message: done at once if it is short, otherwise in a turn of its own, between which frames are
    /// read. Copying a tensor of a gigabyte takes longer than a peer may be silent.
    fn take_local(&mut self, instance: Instance, len: u64, effects: &mut Vec<Effect>) {
        if len > LOCAL_AT_ONCE {
            self.work.insert(instance);
            return;
        }
        if len > 0 {
            effects.push(Effect::Compute(instance));
        }
        self.finish(instance);
    }

    /// Marks an instance done and readies those that waited for it only.
    fn finish(&mut self, instance: Instance) {
        let at = self.index(instance);
        if std::mem::replace(&mut self.instances[at].done, true) {
            return;
        }
        let Instance { step, segment } = instance;
        self.left -= 1;
        self.open_instances[step as usize] -= 1;
        let all_done = self.open_instances[step as usize] == 0;
        for at in 0..self.dependents[step as usize].len() {
            let (waiting, dep) = self.dependents[step as usize][at];
            let segments = self.steps.steps[waiting as usize].segments;
            match dep {
                Dep::Segment { lag, .. } => {
                    if segment + lag < segments {
                        self.release(Instance { step: waiting, segment: segment + lag });
                    }
                }
                Dep::All { .. } if all_done => {
                    (0..segments).for_each(|segment| self.release(Instance { step: waiting, segment }));
                }
                Dep::All { .. } => {}
            }
        }
    }

    fn release(&mut self, instance: Instance) {
        let at = self.index(instance);
        self.instances[at].waits -= 1;
        if self.instances[at].waits == 0 {
            self.ready.push_back(instance);
        }
    }

    fn got(&mut self, instance: Instance, len: u64, expected: u64) {
        let at = self.index(instance);
        self.instances[at].got += len;
        if self.instances[at].got == expected {
            self.finish(instance);
        }
    }

    /// The instance and operand that message `message` of rank `from` is for.
    fn find(&self, from: u32, message: u32) -> Option<(Instance, u32)> {
        from_step(&self.steps, self.last_received).find_map(|(step, template)| {
            let within = |rank: u32, first: u32| {
                (rank == from && (first..first + template.segments).contains(&message)).then(|| message - first)
            };
            let (segment, operand) = match &template.action {
                Action::Recv { from, message, .. } | Action::Await { from, message } => (within(*from, *message)?, 0),
                Action::Reduce { sources, .. } => (0..).zip(sources).find_map(|(operand, source)| {
                    let Operand::Message { from, message } = source else { return None };
                    within(*from, *message).map(|segment| (segment, operand))
                })?,
                _ => return None,
            };
            Some((Instance { step, segment }, operand))
        })
    }

    fn action(&self, instance: Instance) -> &Action {
        &self.steps.steps[instance.step as usize].action
    }

    fn index(&self, instance: Instance) -> usize {
        (self.base[instance.step as usize] + instance.segment) as usize
    }

    fn state(&self, instance: Instance) -> &State {
        &self.instances[self.index(instance)]
    }
}

/// All steps of a plan with their indices, from one on and then those before it.
fn from_step(steps: &Steps, first: usize) -> impl Iterator<Item = (u32, &Step)> {
    let (before, after) = steps.steps.split_at(first);
    (first as u32..).zip(after).chain((0..).zip(before))
}

/// How many operands of a reduction are messages.
fn message_operands(sources: &[Operand]) -> usize {
    sources.iter().filter(|source| matches!(source, Operand::Message { .. })).count()
}

/// A frame lies inside its message and holds whole elements of so many bytes: arithmetic takes nothing else. Our own
/// senders cut at multiples of 16 bytes.
fn check_frame(offset: u64, len: u64, expected: u64, element: u64) -> Result<(), Misfit> {
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

/// An instance of this rank's own bytes that is longer waits for a turn: 256 KiB are copied in 50 us.
const LOCAL_AT_ONCE: u64 = 256 * 1024;

#[cfg(test)]
#[path = "operation_tests.rs"]
mod tests;
