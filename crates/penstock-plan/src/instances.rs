//! The instances of all ranks' steps, with their dependencies and messages resolved. Shared by [`crate::check`] and
//! [`crate::execute`].

use std::collections::HashMap;

use crate::{
    Action, Buf, Dep, Operand, Slice, Steps,
    violation::{InstanceId, Violation},
};

/// An instance that touches bytes, or notifies. It is identified by its index in the list.
pub(crate) struct Instance<'a> {
    pub(crate) id: InstanceId,
    pub(crate) action: &'a Action,
    /// Length of its message or of its result.
    pub(crate) bytes: u64,
    /// Instances of this rank that it waits for.
    pub(crate) after: Vec<u32>,
    /// The instances that send its messages, in the order of its operands.
    pub(crate) takes: Vec<u32>,
    /// The instance that takes its message; for a push, the pull on its own rank.
    pub(crate) taken_by: Option<u32>,
}

impl Instance<'_> {
    /// The bytes of a slice of this step.
    pub(crate) fn area(&self, slice: &Slice) -> Area {
        let (start, len) = slice.segment(self.id.segment);
        Area { buf: slice.buf, start, len }
    }

    /// The bytes that it writes.
    pub(crate) fn writes(&self) -> Option<Area> {
        match self.action {
            Action::Recv { dst, .. }
            | Action::Reduce { dst, .. }
            | Action::Copy { dst, .. }
            | Action::Pull { dst, .. } => Some(self.area(dst)),
            _ => None,
        }
    }

    /// The bytes that it reads.
    pub(crate) fn reads(&self) -> Vec<Area> {
        match self.action {
            Action::Send { src, .. } | Action::Copy { src, .. } | Action::Push { src, .. } => vec![self.area(src)],
            Action::Reduce { sources, .. } => sources
                .iter()
                .filter_map(|source| match source {
                    Operand::Local(slice) => Some(self.area(slice)),
                    Operand::Message { .. } => None,
                })
                .collect(),
            _ => Vec::new(),
        }
    }
}

/// A range of bytes on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Area {
    pub(crate) buf: Buf,
    pub(crate) start: u64,
    pub(crate) len: u64,
}

impl Area {
    pub(crate) fn end(&self) -> u64 {
        self.start + self.len
    }

    pub(crate) fn overlaps(&self, other: &Area) -> bool {
        self.buf == other.buf && self.start < other.end() && other.start < self.end()
    }
}

/// All instances of all ranks, rank by rank and step by step. Fails unless every message has one sender and one taker
/// that agree on its length, and every dependency names a step.
pub(crate) fn expand(plans: &[Steps]) -> Result<Vec<Instance<'_>>, Violation> {
    let mut instances: Vec<Instance<'_>> = Vec::new();
    let mut index_of: HashMap<InstanceId, u32> = HashMap::new();
    for (rank, plan) in (0..).zip(plans) {
        for (step, template) in (0..).zip(&plan.steps) {
            for segment in 0..template.segments {
                let id = InstanceId { rank, step, segment };
                let bytes = match &template.action {
                    Action::Send { src: slice, .. }
                    | Action::Recv { dst: slice, .. }
                    | Action::Reduce { dst: slice, .. }
                    | Action::Copy { dst: slice, .. }
                    | Action::Push { src: slice, .. }
                    | Action::Pull { dst: slice, .. } => match slice.segment(segment).1 {
                        0 => continue,
                        bytes => bytes,
                    },
                    Action::Notify { .. } | Action::Await { .. } => 0,
                };
                index_of.insert(id, instances.len() as u32);
                let (after, takes) = (Vec::new(), Vec::new());
                instances.push(Instance { id, action: &template.action, bytes, after, takes, taken_by: None });
            }
        }
    }
    for instance in &mut instances {
        let InstanceId { rank, step, segment } = instance.id;
        let plan = &plans[rank as usize];
        for dep in &plan.steps[step as usize].after {
            let (Dep::Segment { step, .. } | Dep::All { step }) = *dep;
            let Some(earlier) = plan.steps.get(step as usize) else {
                return Err(Violation::UnknownStep { id: instance.id, step });
            };
            let segments = match *dep {
                Dep::All { .. } => 0..earlier.segments,
                Dep::Segment { lag, .. } => segment.checked_sub(lag).map_or(0..0, |segment| segment..segment + 1),
            };
            instance.after.extend(segments.filter_map(|segment| index_of.get(&InstanceId { rank, step, segment })));
        }
    }
    match_messages(plans, &mut instances)?;
    match_pushes(plans.len(), &mut instances)?;
    Ok(instances)
}

/// Every pull takes the push of every rank, in the order of ranks, and every push is pulled on its own rank.
fn match_pushes(world: usize, instances: &mut [Instance<'_>]) -> Result<(), Violation> {
    let mut pushed: HashMap<(u32, u32), Vec<Option<u32>>> = HashMap::new();
    for (index, instance) in (0..).zip(&*instances) {
        let Action::Push { server, .. } = *instance.action else { continue };
        let InstanceId { rank, segment, .. } = instance.id;
        let of_rank = &mut pushed.entry((server, segment)).or_insert_with(|| vec![None; world])[rank as usize];
        if let Some(other) = of_rank.replace(index) {
            return Err(Violation::Duplicate { id: instance.id, other: instances[other as usize].id });
        }
    }
    for index in 0..instances.len() {
        let Instance { id, action: Action::Pull { server, .. }, bytes, .. } = instances[index] else { continue };
        let pushes = pushed.get(&(*server, id.segment)).ok_or(Violation::Unmatched { id })?;
        for push in pushes {
            let push = push.ok_or(Violation::Unmatched { id })?;
            let pusher = &mut instances[push as usize];
            if pusher.bytes != bytes {
                return Err(Violation::Length { id, other: pusher.id, bytes, other_bytes: pusher.bytes });
            }
            if pusher.id.rank == id.rank
                && let Some(other) = pusher.taken_by.replace(index as u32)
            {
                return Err(Violation::Duplicate { id, other: instances[other as usize].id });
            }
            instances[index].takes.push(push);
        }
    }
    for push in pushed.into_values().flatten().flatten() {
        if instances[push as usize].taken_by.is_none() {
            return Err(Violation::Unmatched { id: instances[push as usize].id });
        }
    }
    Ok(())
}

/// A message by its sender, its receiver and its number.
type Message = (u32, u32, u32);

fn match_messages(plans: &[Steps], instances: &mut [Instance<'_>]) -> Result<(), Violation> {
    let mut sent: HashMap<Message, u32> = HashMap::new();
    for (index, instance) in (0..).zip(&*instances) {
        if let Action::Send { to, message, .. } | Action::Notify { to, message } = *instance.action {
            let key = (instance.id.rank, to, number(plans, instance.id, to, message)?);
            if let Some(other) = sent.insert(key, index) {
                return Err(Violation::Duplicate { id: instance.id, other: instances[other as usize].id });
            }
        }
    }
    for index in 0..instances.len() {
        let Instance { id, action, bytes, .. } = instances[index];
        let wanted: Vec<(u32, u32)> = match action {
            Action::Recv { from, message, .. } | Action::Await { from, message } => vec![(*from, *message)],
            Action::Reduce { sources, .. } => sources
                .iter()
                .filter_map(|source| match *source {
                    Operand::Message { from, message } => Some((from, message)),
                    Operand::Local(_) => None,
                })
                .collect(),
            _ => continue,
        };
        for (from, message) in wanted {
            let key = (from, id.rank, number(plans, id, from, message)?);
            let send = *sent.get(&key).ok_or(Violation::Unmatched { id })?;
            let sender = &mut instances[send as usize];
            if let Some(other) = sender.taken_by.replace(index as u32) {
                return Err(Violation::Duplicate { id, other: instances[other as usize].id });
            }
            let notifies = matches!(sender.action, Action::Notify { .. });
            if notifies != matches!(action, Action::Await { .. }) {
                return Err(Violation::Unmatched { id });
            }
            if sender.bytes != bytes {
                return Err(Violation::Length { id, other: sender.id, bytes, other_bytes: sender.bytes });
            }
            instances[index].takes.push(send);
        }
    }
    for &send in sent.values() {
        if instances[send as usize].taken_by.is_none() {
            return Err(Violation::Unmatched { id: instances[send as usize].id });
        }
    }
    Ok(())
}

/// The number of an instance's message, if it and the peer exist.
fn number(plans: &[Steps], id: InstanceId, peer: u32, first: u32) -> Result<u32, Violation> {
    if peer == id.rank || peer as usize >= plans.len() {
        return Err(Violation::Peer { id, peer });
    }
    let number = u64::from(first) + u64::from(id.segment);
    let messages = plans[id.rank as usize].messages;
    if number >= u64::from(messages) {
        return Err(Violation::Number { id, number, messages });
    }
    Ok(number as u32)
}
