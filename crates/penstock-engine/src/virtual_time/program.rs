//! Random programs: what every rank does, and what goes wrong meanwhile.

use super::network::{Death, Paths};
use fastrand::Rng;
use penstock_core::unbound::ANY_SOURCE;
use penstock_plan::{Algorithm, Collective, Splits};
use penstock_stream::fingerprint::{Fingerprint, Name};
use penstock_types::{DType, ReduceOp, SECOND};
use std::fmt;

/// What some ranks do, from their start to their end.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Program {
    pub(super) seed: u64,
    pub(super) ranks: usize,
    /// I/O threads of each rank.
    pub(super) threads: usize,
    pub(super) streams: u16,
    pub(super) checksum: bool,
    pub(super) paths: Paths,
    /// The members of each group, by the rank that they have in it.
    pub(super) groups: Vec<ProgramGroup>,
    pub(super) calls: Vec<ProgramCall>,
    /// By rank.
    pub(super) steps: Vec<Vec<Step>>,
    pub(super) fault: Option<(u64, Fault)>,
    /// The time of the fault counts from when the first rank leaves a group, or ends.
    pub(super) strikes_at_end: bool,
    pub(super) wrong: Option<Wrong>,
    /// Ranks whose group has failed go on in others; otherwise they end.
    pub(super) goes_on: bool,
    /// Ranks end as soon as they are through; otherwise they wait until all are.
    pub(super) ends_early: bool,
    /// What the engine has a constant for, so that little of it runs out as well.
    pub(super) eager_credit_bytes: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct ProgramGroup {
    pub(super) members: Vec<usize>,
    pub(super) algorithm: Option<Algorithm>,
    /// It is a channel of this group, with the same members. Its first call opens it, and [`Step::Leave`] closes it.
    pub(super) channel_of: Option<usize>,
    pub(super) is_vigil: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct ProgramCall {
    pub(super) group: usize,
    pub(super) what: What,
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    /// Of one part, where there are several; the most of one where they are unequal.
    pub(super) elements: u64,
    pub(super) priority: i32,
    pub(super) timeout: u64,
}

/// Ranks are those of the group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum What {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast {
        root: usize,
    },
    Reduce {
        root: usize,
    },
    Gather {
        root: usize,
    },
    Scatter {
        root: usize,
    },
    AllToAll {
        has_splits: bool,
    },
    Barrier,
    /// Opens the channel that the call is in.
    Open,
    /// Received from any source, or from the rank that sends it. A receive from any source has a tag that only one rank sends under.
    Message {
        from: usize,
        to: usize,
        tag: u32,
        any_source: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Step {
    /// Another thread joins a group.
    Begin(usize),
    /// Joins a group, unless another thread does, and waits until that has ended.
    Join(usize),
    Issue(usize),
    /// Takes the operation's place; its buffers are ready at [`Step::Release`].
    Hold(usize),
    Release(usize),
    Wait(usize),
    Pause(u64),
    Leave(usize),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fault {
    /// A connection is lost; the two ends learn it at different times.
    Lose {
        ranks: [usize; 2],
        which: usize,
        skew: u64,
        times: u32,
    },
    /// Nothing passes on a connection: what is on its way there comes late, be it bytes, a grant or an acknowledgement.
    Stall {
        ranks: [usize; 2],
        which: usize,
        time: u64,
    },
    /// Nothing passes between two ranks.
    Part {
        ranks: [usize; 2],
        time: u64,
    },
    /// A process does nothing.
    Stop {
        rank: usize,
        time: u64,
    },
    /// All processes do nothing, as at Ctrl-Z.
    StopAll {
        time: u64,
    },
    Kill {
        rank: usize,
        death: Death,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Wrong {
    /// Of the job.
    pub(super) rank: usize,
    pub(super) call: usize,
    pub(super) how: How,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum How {
    /// One element more; in an all-to-all with splits, a part where the next rank sends none, or none where that sends one.
    Size,
    DType,
    Op,
    /// Another root.
    Root,
    /// Exchanged with another call.
    Order {
        with: usize,
    },
    /// Does not make the call.
    Skip,
    /// Ends before the call.
    Leave,
    /// Closes the channel before the call.
    Close,
    /// Makes the call when the others have given up; if it holds the call, its buffers are ready only then.
    Late,
}

/// One rank's part of a call.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) collective: Collective,
    pub(super) fingerprint: Fingerprint,
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    pub(super) bytes: u64,
    pub(super) splits: Option<Splits>,
    pub(super) tag: u32,
    /// Lengths of the buffers.
    pub(super) input: usize,
    pub(super) output: usize,
}

impl ProgramGroup {
    pub(super) fn new(members: Vec<usize>, algorithm: Option<Algorithm>) -> ProgramGroup {
        ProgramGroup { members, algorithm, channel_of: None, is_vigil: false }
    }
}

impl Program {
    /// Ranks that have failed have no time: what they tell the others may be lost.
    pub(super) fn ends_at_once(&self) -> bool {
        !self.goes_on && self.seed & 1 == 1
    }

    /// The group that a group or channel stands or falls with.
    pub(super) fn home(&self, group: usize) -> usize {
        self.groups[group].channel_of.unwrap_or(group)
    }

    /// Whether ranks make two calls in the same order.
    pub(super) fn are_ordered(&self, one: usize, other: usize) -> bool {
        let (one, other) = (&self.calls[one], &self.calls[other]);
        let both_open = one.what == What::Open && other.what == What::Open;
        sequence(one) == sequence(other) || both_open && self.home(one.group) == self.home(other.group)
    }

    /// Whether a rank takes part in a call.
    pub(super) fn takes_part(&self, call: usize, rank: usize) -> bool {
        self.place(call, rank).is_some()
    }

    /// A rank's rank in a call's group, if it takes part in the call.
    pub(super) fn place(&self, call: usize, rank: usize) -> Option<usize> {
        let ProgramCall { group, what, .. } = self.calls[call];
        let place = self.groups[group].members.iter().position(|member| *member == rank)?;
        match what {
            What::Message { from, to, .. } => (place == from || place == to).then_some(place),
            _ => Some(place),
        }
    }

    /// What a rank does in a call, with what is wrong about it.
    pub(super) fn part(&self, call: usize, rank: usize) -> Part {
        let mut given = self.calls[call].clone();
        let world = self.groups[given.group].members.len();
        let mut expects_otherwise = false;
        if let Some(wrong) = self.wrong.filter(|wrong| (wrong.rank, wrong.call) == (rank, call)) {
            match wrong.how {
                How::Size if given.what == (What::AllToAll { has_splits: true }) => expects_otherwise = true,
                How::Size => given.elements += 1,
                How::DType => given.dtype = if given.dtype == DType::I32 { DType::F32 } else { DType::I32 },
                How::Op => given.op = if given.op == ReduceOp::Max { ReduceOp::Min } else { ReduceOp::Max },
                How::Root => match &mut given.what {
                    What::Broadcast { root }
                    | What::Reduce { root }
                    | What::Gather { root }
                    | What::Scatter { root } => {
                        *root = (*root + 1) % world;
                    }
                    _ => unreachable!("it has no root"),
                },
                How::Order { .. } | How::Skip | How::Leave | How::Close | How::Late => {}
            }
        }
        let place = self.place(call, rank).expect("it takes part");
        let mut part = part(&given, call, world, place);
        if let Some(splits) = part.splits.as_mut().filter(|_| expects_otherwise) {
            let next = &mut splits.output[(place + 1) % world];
            *next = if *next == 0 { given.dtype.size() as u64 } else { 0 };
            part.output = splits.output.iter().sum::<u64>() as usize;
        }
        part
    }
}

fn part(given: &ProgramCall, call: usize, world: usize, place: usize) -> Part {
    let (size, world_u64) = (given.dtype.size() as u64, world as u64);
    let one = given.elements * size;
    let (mut tag_of, mut splits) = (0, None);
    let rank = |rank: usize| rank as u32;
    let (collective, name, bytes, input, output) = match given.what {
        What::AllReduce => (Collective::AllReduce, Name::AllReduce, one, 0, one),
        What::ReduceScatter => (Collective::ReduceScatter, Name::ReduceScatter, one * world_u64, one * world_u64, one),
        What::AllGather => (Collective::AllGather, Name::AllGather, one * world_u64, one, one * world_u64),
        What::Broadcast { root } => (Collective::Broadcast { root: rank(root) }, Name::Broadcast, one, 0, one),
        What::Reduce { root } => (Collective::Reduce { root: rank(root) }, Name::Reduce, one, 0, one),
        What::Gather { root } => {
            let output = if root == place { one * world_u64 } else { 0 };
            (Collective::Gather { root: rank(root) }, Name::Gather, one, one, output)
        }
        What::Scatter { root } => {
            let input = if root == place { one * world_u64 } else { 0 };
            (Collective::Scatter { root: rank(root) }, Name::Scatter, one, input, one)
        }
        What::AllToAll { has_splits: false } => {
            (Collective::AllToAll, Name::AllToAll, one * world_u64, one * world_u64, one * world_u64)
        }
        What::AllToAll { has_splits: true } => {
            let of = |from, to| size * unequal(call, from, to, given.elements);
            let parts = Splits {
                input: (0..world).map(|to| of(place, to)).collect(),
                output: (0..world).map(|from| of(from, place)).collect(),
            };
            let (input, output) = (parts.input.iter().sum(), parts.output.iter().sum());
            splits = Some(parts);
            (Collective::AllToAll, Name::AllToAll, 0, input, output)
        }
        What::Barrier => (Collective::Barrier, Name::Barrier, 0, 0, 0),
        What::Open => (Collective::Barrier, Name::Open, 0, 0, 0),
        What::Message { from, to, tag, any_source } => {
            tag_of = tag;
            if from == place {
                (Collective::Send { to: rank(to) }, Name::PointToPoint, one, one, 0)
            } else {
                let from = if any_source { ANY_SOURCE } else { rank(from) };
                (Collective::Recv { from }, Name::PointToPoint, one, 0, one)
            }
        }
    };
    // As the Python front makes them: elements of the tensor that the caller names, and none where the parts differ.
    let elements = if splits.is_some() { 0 } else { bytes / size };
    let root = collective.named_rank().filter(|_| name != Name::PointToPoint);
    let op = collective.reduces().then_some(given.op);
    Part {
        collective,
        fingerprint: Fingerprint::new(name, op, given.dtype, root, elements),
        dtype: given.dtype,
        op: given.op,
        bytes,
        splits,
        tag: tag_of,
        input: input as usize,
        output: output as usize,
    }
}

/// The elements of one part of an all-to-all with splits.
pub(super) fn unequal(call: usize, from: usize, to: usize, most: u64) -> u64 {
    let mut rng = Rng::with_seed(0x5eed ^ (call as u64) << 16 ^ (from as u64) << 8 ^ to as u64);
    if rng.u8(..4) == 0 { 0 } else { rng.u64(0..=most) }
}

/// Calls that meet in the order in which they are issued.
pub(super) fn sequence(call: &ProgramCall) -> (usize, Option<(usize, usize, u32)>) {
    match call.what {
        What::Message { from, to, tag, .. } => (call.group, Some((from, to, tag))),
        _ => (call.group, None),
    }
}

// ---------------------------------------------------------------------- for people

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Program { seed, ranks, threads, streams, checksum, paths, fault, wrong, goes_on, ends_early, .. } = self;
        let (credit, from) =
            (self.eager_credit_bytes, if self.strikes_at_end { " the first leaves or ends" } else { "" });
        writeln!(
            f,
            "seed {seed}: {ranks} ranks, {threads} threads, {streams} streams, checksum {checksum}, credit {credit}, {paths:?}"
        )?;
        writeln!(f, "  after a failure ranks go on in other groups: {goes_on}; ranks end early: {ends_early}")?;
        if let Some((at, fault)) = fault {
            writeln!(f, "  fault {:.3} ms after{from}: {fault:?}", *at as f64 / 1e6)?;
        }
        if let Some(wrong) = wrong {
            writeln!(f, "  wrong: {wrong:?}")?;
        }
        for (number, ProgramGroup { members, algorithm, channel_of, is_vigil }) in self.groups.iter().enumerate() {
            let kind = if *is_vigil { ", a vigil" } else { "" };
            let of = channel_of.map_or(String::new(), |group| format!(", channel of group {group}{kind}"));
            writeln!(f, "  group {number}: {members:?} {}{of}", algorithm.map_or("", Algorithm::name))?;
        }
        for (number, call) in self.calls.iter().enumerate() {
            let ProgramCall { group, what, dtype, op, elements, priority, timeout } = call;
            if !self.steps.iter().flatten().any(|step| *step == Step::Issue(number) || *step == Step::Hold(number)) {
                continue;
            }
            let (op, timeout) = (op.name(), timeout / SECOND);
            writeln!(
                f,
                "  call {number}: group {group}, {what:?}, {elements} {dtype}, {op}, priority {priority}, {timeout} s"
            )?;
        }
        for (rank, steps) in self.steps.iter().enumerate() {
            writeln!(f, "  rank {rank}: {steps:?}")?;
        }
        Ok(())
    }
}
