//! Runs the steps of all ranks over real bytes, within one thread: [`execute`].

use crate::{
    Action, Buf, Operand, Request, Steps,
    instances::{Area, Instance, expand},
    violation::Violation,
};

/// One rank's buffers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// The buffer [`Buf::Input`].
    pub input: Vec<u8>,
    /// The buffer [`Buf::Output`].
    pub output: Vec<u8>,
    /// The buffer [`Buf::Scratch`].
    pub scratch: Vec<u8>,
}

impl Memory {
    /// Zeroed buffers of the lengths that a request and its steps need.
    #[must_use]
    pub fn zeroed(request: &Request, steps: &Steps) -> Memory {
        let zeros = |bytes: u64| vec![0; usize::try_from(bytes).expect("buffers that fit in memory")];
        Memory {
            input: zeros(request.input_bytes()),
            output: zeros(request.output_bytes()),
            scratch: zeros(steps.scratch_bytes),
        }
    }

    fn area(&self, area: Area) -> &[u8] {
        let buf = match area.buf {
            Buf::Input => &self.input,
            Buf::Output => &self.output,
            Buf::Scratch => &self.scratch,
        };
        &buf[area.start as usize..area.end() as usize]
    }

    fn area_mut(&mut self, area: Area) -> &mut [u8] {
        let buf = match area.buf {
            Buf::Input => &mut self.input,
            Buf::Output => &mut self.output,
            Buf::Scratch => &mut self.scratch,
        };
        &mut buf[area.start as usize..area.end() as usize]
    }
}

/// Writes the reduction of the sources, in their order, to the first argument, which starts as zeros and is none of
/// them. The flag is [`Action::Reduce`]'s `last`.
pub type ReduceFn<'a> = dyn FnMut(&mut [u8], &[&[u8]], bool) + 'a;

/// Runs all ranks' steps to the end. `plans` and `memory` are indexed by rank; the buffers must be as long as
/// [`Memory::zeroed`] makes them.
///
/// The seed picks one of the schedules that the steps allow: which of the instances that could go next does, and for
/// each send whether its bytes are copied at once (so that it is done at once) or read when the receiver takes them
/// (so that it is done only then). Steps whose result depends on the seed are wrong.
///
/// # Errors
/// [`Violation::Deadlock`] where no instance can go next, and the violations of messages that do not match. The
/// buffers then hold partial results.
///
/// # Panics
/// When a buffer is shorter than a step needs.
pub fn execute(plans: &[Steps], memory: &mut [Memory], reduce: &mut ReduceFn<'_>, seed: u64) -> Result<(), Violation> {
    let instances = expand(plans)?;
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut run = Run {
        waits_for: instances.iter().map(|instance| instance.after.len() + instance.takes.len()).collect(),
        followers: vec![Vec::new(); instances.len()],
        copies: vec![None; instances.len()],
        ready: Vec::new(),
        done: vec![false; instances.len()],
        takers: vec![Vec::new(); instances.len()],
    };
    for (index, instance) in (0..).zip(&instances) {
        for &earlier in &instance.after {
            run.followers[earlier as usize].push(index);
        }
        for &send in &instance.takes {
            run.takers[send as usize].push(index);
        }
        if run.waits_for[index as usize] == 0 {
            run.ready.push(index);
        }
    }
    while !run.ready.is_empty() {
        let index = run.ready.swap_remove(rng.usize(..run.ready.len()));
        let instance = &instances[index as usize];
        match instance.action {
            Action::Notify { .. } => {
                run.finish(index);
                run.take(index);
            }
            Action::Push { src, .. } => {
                let bytes = memory[instance.id.rank as usize].area(instance.area(src));
                run.copies[index as usize] = Some(bytes.to_vec());
                run.finish(index);
                run.take(index);
            }
            Action::Send { src, .. } => {
                if rng.bool() {
                    let bytes = memory[instance.id.rank as usize].area(instance.area(src));
                    run.copies[index as usize] = Some(bytes.to_vec());
                    run.finish(index);
                }
                run.take(index);
            }
            Action::Await { .. } => run.finish(index),
            Action::Recv { .. } | Action::Copy { .. } | Action::Reduce { .. } | Action::Pull { .. } => {
                let result = result_of(instance, &instances, &mut run.copies, memory, reduce);
                let place = instance.writes().expect("a step that makes bytes writes them");
                memory[instance.id.rank as usize].area_mut(place).copy_from_slice(&result);
                run.finish(index);
                for &send in &instance.takes {
                    if !run.done[send as usize] {
                        run.finish(send);
                    }
                }
            }
        }
    }
    let stuck: Vec<_> = (0..).zip(&instances).filter(|&(index, _): &(usize, _)| !run.done[index]).collect();
    if stuck.is_empty() {
        return Ok(());
    }
    Err(Violation::Deadlock { instances: stuck.into_iter().map(|(_, instance)| instance.id).collect() })
}

/// State of the instances; all lists are indexed like them.
struct Run {
    /// How many dependencies are not done and how many messages are not sent.
    waits_for: Vec<usize>,
    /// The instances that depend on it.
    followers: Vec<Vec<u32>>,
    /// The bytes that a send has copied.
    copies: Vec<Option<Vec<u8>>>,
    done: Vec<bool>,
    ready: Vec<u32>,
    /// The instances that take its message.
    takers: Vec<Vec<u32>>,
}

impl Run {
    fn release(&mut self, index: u32) {
        self.waits_for[index as usize] -= 1;
        if self.waits_for[index as usize] == 0 {
            self.ready.push(index);
        }
    }

    /// The messages of an instance are on their way: releases the instances that take them.
    fn take(&mut self, index: u32) {
        for taker in std::mem::take(&mut self.takers[index as usize]) {
            self.release(taker);
        }
    }

    fn finish(&mut self, index: u32) {
        self.done[index as usize] = true;
        for follower in std::mem::take(&mut self.followers[index as usize]) {
            self.release(follower);
        }
    }
}

/// The bytes that an instance makes from its messages and its rank's memory.
fn result_of(
    instance: &Instance<'_>,
    instances: &[Instance<'_>],
    copies: &mut [Option<Vec<u8>>],
    memory: &[Memory],
    reduce: &mut ReduceFn<'_>,
) -> Vec<u8> {
    if let Action::Pull { .. } = instance.action {
        let operands: Vec<&[u8]> =
            instance.takes.iter().map(|&push| copies[push as usize].as_deref().expect("pushed before")).collect();
        let mut result = vec![0; instance.bytes as usize];
        reduce(&mut result, &operands, true);
        return result;
    }
    let mut messages = instance.takes.iter().map(|&send| {
        copies[send as usize].take().unwrap_or_else(|| {
            let sender = &instances[send as usize];
            memory[sender.id.rank as usize].area(sender.reads()[0]).to_vec()
        })
    });
    let own = &memory[instance.id.rank as usize];
    match instance.action {
        Action::Copy { src, .. } => own.area(instance.area(src)).to_vec(),
        Action::Reduce { sources, last, .. } => {
            let operands: Vec<Vec<u8>> = sources
                .iter()
                .map(|source| match source {
                    Operand::Local(slice) => own.area(instance.area(slice)).to_vec(),
                    Operand::Message { .. } => messages.next().expect("a message for each operand"),
                })
                .collect();
            let mut result = vec![0; instance.bytes as usize];
            reduce(&mut result, &operands.iter().map(Vec::as_slice).collect::<Vec<_>>(), *last);
            result
        }
        _ => messages.next().expect("a receive takes one message"),
    }
}
