//! Draws the program of a seed.
//!
//! A right program cannot block for ever. Its calls stand in windows; every rank issues all calls of a window, in any order
//! that each pair of ranks may have, before it waits for one of them, or takes the calls in the same order as all others and
//! waits for each. The windows, joins and leaves come in the same order on all ranks, but for joins that other threads begin.
//! Calls open channels, in the same order on all ranks; channels are closed as groups are left.

use super::network::{Death, Paths};
use super::program::{Fault, How, Program, ProgramCall, ProgramGroup, Step, What, Wrong};
use fastrand::Rng;
use penstock_plan::{Algorithm, Collective};
use penstock_types::{DType, MILLISECOND, ReduceOp, SECOND};

/// The program of a seed.
pub(super) fn generate(seed: u64) -> Program {
    let mut rng = Rng::with_seed(seed);
    let ranks = [2, 2, 3, 3, 4][rng.usize(..5)];
    let paths = Paths {
        delay_us: [5, 50, 200, 2000, 20_000][rng.usize(..5)],
        bytes_per_us: [20, 100, 1000, 4000][rng.usize(..4)],
        buffer_bytes: [4096, 65_536, 262_144, 1 << 20][rng.usize(..4)],
    };
    let mut program = Program {
        seed,
        ranks,
        threads: chosen_threads().unwrap_or([1, 2, 1, 1, 1, 3][seed as usize % 6]),
        streams: [1, 1, 2, 3][rng.usize(..4)],
        checksum: rng.u8(..4) == 0,
        paths,
        groups: Vec::new(),
        calls: Vec::new(),
        steps: vec![Vec::new(); ranks],
        fault: None,
        strikes_at_end: false,
        wrong: None,
        goes_on: rng.bool(),
        ends_early: rng.u8(..3) == 0,
        eager_credit_bytes: 1 << 20,
    };
    let more = Rng::with_seed(seed ^ 0xa11);
    let has_channels = Rng::with_seed(seed ^ WITH_CHANNELS).bool();
    let mut draw =
        Draw { rng, more, has_channels, live: Vec::new(), unwaited: vec![Vec::new(); ranks], budget: 1_500_000 };
    draw.join(&mut program, (0..ranks).collect());
    for _ in 0..draw.rng.usize(1..=4) {
        draw.phase(&mut program);
    }
    let last = draw.live.clone();
    let groups: Vec<usize> = last.iter().copied().filter(|group| program.home(*group) == *group).collect();
    for group in groups {
        draw.leave(&mut program, group);
    }
    match draw.rng.u8(..100) {
        0..=29 => program.fault = Some(draw.fault(&program)),
        30..=44 => program.wrong = draw.wrong(&program),
        _ => {}
    }
    draw.rng = Rng::with_seed(seed ^ 0x6d6f_7265);
    draw.vary(&mut program, &last);
    draw.rng = Rng::with_seed(seed ^ WITH_BEGUN_JOINS);
    if draw.rng.u8(..4) == 0 {
        draw.begin_joins(&mut program);
    }
    program
}

struct Draw {
    rng: Rng,
    /// Draws of their own: seeds that are known by number mean nearly the same without them.
    more: Rng,
    has_channels: bool,
    /// Groups that were joined and not left, and their open channels.
    live: Vec<usize>,
    /// By rank: calls that were issued and not waited for.
    unwaited: Vec<Vec<usize>>,
    /// Bytes of tensors that are left for this program.
    budget: u64,
}

impl Draw {
    fn join(&mut self, program: &mut Program, members: Vec<usize>) {
        let group = program.groups.len();
        for rank in &members {
            self.pause(program, *rank);
            program.steps[*rank].push(Step::Join(group));
        }
        let algorithm = self.algorithm();
        program.groups.push(ProgramGroup::new(members, algorithm));
        self.live.push(group);
    }

    /// Other threads begin joins, in an order that each rank has for itself.
    fn begin_joins(&mut self, program: &mut Program) {
        for steps in &mut program.steps {
            for group in 0..program.groups.len() {
                let joined = steps.iter().position(|step| *step == Step::Join(group));
                if let Some(at) = joined.filter(|_| self.rng.bool()) {
                    steps.insert(self.rng.usize(..=at), Step::Begin(group));
                }
            }
        }
    }

    /// Opens channels of a group, so that it has three at most.
    fn open(&mut self, program: &mut Program) {
        let groups: Vec<usize> =
            self.live.iter().copied().filter(|group| program.groups[*group].channel_of.is_none()).collect();
        let group = groups[self.rng.usize(..groups.len())];
        let open = self.live.iter().filter(|channel| program.groups[**channel].channel_of == Some(group)).count();
        for _ in open..self.rng.usize(0..=3) {
            let channel = program.groups.len();
            let members = program.groups[group].members.clone();
            let (algorithm, is_vigil) = (self.algorithm(), self.rng.u8(..6) == 0);
            program.groups.push(ProgramGroup { members, algorithm, channel_of: Some(group), is_vigil });
            self.live.push(channel);
            let timeout = SECOND * self.rng.u64(12..=20);
            let (dtype, op) = (DType::U8, ReduceOp::Sum);
            program.calls.push(ProgramCall {
                group: channel,
                what: What::Open,
                dtype,
                op,
                elements: 0,
                priority: 0,
                timeout,
            });
        }
    }

    fn algorithm(&mut self) -> Option<Algorithm> {
        let algorithms = Algorithm::of(Collective::AllReduce);
        (self.rng.u8(..4) == 0).then(|| algorithms[self.rng.usize(..algorithms.len())])
    }

    /// Leaves a group, of which ranks may close channels first; or closes a channel.
    fn leave(&mut self, program: &mut Program, group: usize) {
        let is_channel = |channel: &usize| program.groups[*channel].channel_of == Some(group);
        let channels: Vec<usize> = self.live.extract_if(.., |channel| is_channel(channel)).collect();
        for rank in program.groups[group].members.clone() {
            let mut waits: Vec<usize> = Vec::new();
            self.unwaited[rank].retain(|call| {
                let stays = program.calls[*call].group != group && !channels.contains(&program.calls[*call].group);
                if !stays {
                    waits.push(*call);
                }
                stays
            });
            self.rng.shuffle(&mut waits);
            program.steps[rank].extend(waits.into_iter().map(Step::Wait));
            for channel in &channels {
                if self.rng.bool() {
                    self.pause(program, rank);
                    program.steps[rank].push(Step::Leave(*channel));
                }
            }
            self.pause(program, rank);
            program.steps[rank].push(Step::Leave(group));
        }
    }

    fn phase(&mut self, program: &mut Program) {
        let groups = program.groups.iter().filter(|group| group.channel_of.is_none()).count();
        if self.rng.u8(..2) == 0 && groups < 6 {
            let mut members: Vec<usize> = (0..program.ranks).collect();
            self.rng.shuffle(&mut members);
            members.truncate(self.rng.usize(2.min(program.ranks)..=program.ranks));
            self.join(program, members);
        }
        for _ in 0..self.rng.usize(1..=3) {
            self.window(program);
        }
        // One group stays.
        let is_channel = |group: &usize| program.groups[*group].channel_of.is_some();
        let groups = self.live.iter().filter(|group| !is_channel(group)).count();
        let may_go: Vec<usize> = (0..self.live.len()).filter(|at| groups > 1 || is_channel(&self.live[*at])).collect();
        if self.rng.u8(..4) == 0 && !may_go.is_empty() {
            let group = self.live.swap_remove(may_go[self.rng.usize(..may_go.len())]);
            self.leave(program, group);
        }
    }

    /// Some calls; see the module's documentation.
    fn window(&mut self, program: &mut Program) {
        let first = program.calls.len();
        if self.has_channels && (first == 0 || self.rng.bool()) {
            self.open(program);
        }
        for _ in 0..[1, 2, 4, 7][self.rng.usize(..4)] {
            let call = self.call(program);
            program.calls.push(call);
        }
        let calls = first..program.calls.len();
        let in_turn = self.rng.u8(..3) == 0;
        for rank in 0..program.ranks {
            let mut own: Vec<usize> = calls.clone().filter(|call| program.takes_part(*call, rank)).collect();
            if in_turn {
                for call in own {
                    self.pause(program, rank);
                    program.steps[rank].extend([Step::Issue(call), Step::Wait(call)]);
                }
                continue;
            }
            let mut held = Vec::new();
            while !own.is_empty() {
                // The first call of any sequence may come next.
                let is_first = |at: &usize| !own[..*at].iter().any(|other| program.are_ordered(*other, own[*at]));
                let first: Vec<usize> = (0..own.len()).filter(is_first).collect();
                let call = own.remove(first[self.rng.usize(..first.len())]);
                self.pause(program, rank);
                if self.rng.u8(..10) == 0 {
                    program.steps[rank].push(Step::Hold(call));
                    held.push(call);
                } else {
                    program.steps[rank].push(Step::Issue(call));
                }
                self.unwaited[rank].push(call);
            }
            self.rng.shuffle(&mut held);
            for call in held {
                self.pause(program, rank);
                program.steps[rank].push(Step::Release(call));
            }
            let mut waits = std::mem::take(&mut self.unwaited[rank]);
            self.rng.shuffle(&mut waits);
            let later = if self.rng.bool() { 0 } else { self.rng.usize(..=waits.len()) };
            self.unwaited[rank] = waits.split_off(waits.len() - later);
            program.steps[rank].extend(waits.into_iter().map(Step::Wait));
        }
    }

    fn call(&mut self, program: &Program) -> ProgramCall {
        let group = self.live[self.rng.usize(..self.live.len())];
        let world = program.groups[group].members.len();
        let root = self.rng.usize(..world);
        let is_channel = program.groups[group].channel_of.is_some();
        let what = match self.rng.u8(..20) {
            0..=4 => What::AllReduce,
            5 => What::ReduceScatter,
            6 => What::AllGather,
            7..=8 => What::Broadcast { root },
            9 => What::Reduce { root },
            10 => What::Gather { root },
            11 => What::Scatter { root },
            12 => What::AllToAll { has_splits: false },
            13 => What::AllToAll { has_splits: true },
            14 => What::Barrier,
            15.. if is_channel => What::AllReduce,
            _ => {
                let to = (root + self.rng.usize(1..world)) % world;
                let tag = self.rng.u32(..3);
                // A tag a sender: only it can match, so what a receive from any source gets is known.
                let (tag, any_source) = match self.more.u8(..5) {
                    0 => (10 + root as u32, true),
                    1 => (10 + root as u32, false),
                    _ => (tag, false),
                };
                What::Message { from: root, to, tag, any_source }
            }
        };
        let reduces = matches!(what, What::AllReduce | What::ReduceScatter | What::Reduce { .. });
        let (dtype, op) = loop {
            let dtype = DType::ALL[self.rng.usize(..DType::ALL.len())];
            let op = if reduces { OPS[self.rng.usize(..OPS.len())] } else { ReduceOp::Sum };
            // A third of a small number has no exact float.
            let is_exact = op != ReduceOp::Avg || !dtype.is_float() || world.is_power_of_two();
            if !reduces || op.takes(dtype) && is_exact {
                break (dtype, op);
            }
        };
        let elements = self.elements(dtype.size() as u64, world as u64);
        let timeout = SECOND * self.rng.u64(12..=20);
        ProgramCall { group, what, dtype, op, elements, priority: self.rng.i32(-2..=2), timeout }
    }

    fn elements(&mut self, size: u64, world: u64) -> u64 {
        let near = |rng: &mut Rng, bytes: u64| (bytes / size + rng.u64(0..3)).saturating_sub(1);
        let elements = match self.rng.u8(..20) {
            0 => 0,
            1..=2 => 1,
            3..=9 => self.rng.u64(2..=300),
            10..=13 => self.rng.u64(300..=3000),
            14 => near(&mut self.rng, EAGER),
            15 => near(&mut self.rng, EAGER * world),
            16 => near(&mut self.rng, EAGER / 2),
            17 => near(&mut self.rng, 65_536),
            _ => self.rng.u64(10_000..=400_000) / size,
        };
        let bytes = elements * size * world;
        if bytes > self.budget {
            return self.rng.u64(0..=64);
        }
        self.budget -= bytes;
        elements
    }

    fn pause(&mut self, program: &mut Program, rank: usize) {
        let time = match self.rng.u8(..100) {
            0..=9 => self.rng.u64(1000..100_000),
            10..=17 => self.rng.u64(100_000..30 * MILLISECOND),
            18 => self.rng.u64(100 * MILLISECOND..2500 * MILLISECOND),
            _ => return,
        };
        program.steps[rank].push(Step::Pause(time));
    }

    fn fault(&mut self, program: &Program) -> (u64, Fault) {
        let rng = &mut self.rng;
        let rank = rng.usize(..program.ranks);
        let ranks = [rank, (rank + rng.usize(1..program.ranks)) % program.ranks];
        let which = rng.usize(..8);
        // Most programs take some milliseconds to some seconds.
        let at = match rng.u8(..3) {
            0 => rng.u64(0..MILLISECOND),
            1 => rng.u64(0..50 * MILLISECOND),
            _ => rng.u64(0..SECOND),
        };
        let fault = match rng.u8(..12) {
            0..=4 => Fault::Lose { ranks, which, skew: rng.u64(0..300 * MILLISECOND), times: rng.u32(1..4) },
            5..=6 => Fault::Stall { ranks, which, time: rng.u64(MILLISECOND..10 * SECOND) },
            7 => Fault::Part { ranks, time: rng.u64(MILLISECOND..3 * SECOND) },
            8 => Fault::Part { ranks, time: if rng.bool() { u64::MAX / 2 } else { rng.u64(SECOND..10 * SECOND) } },
            9 => Fault::Stop { rank, time: rng.u64(MILLISECOND..3 * SECOND) },
            10 => Fault::Stop { rank, time: rng.u64(SECOND..20 * SECOND) },
            _ => {
                let death = [Death::Closes, Death::Resets, Death::Silent][rng.usize(..3)];
                Fault::Kill { rank, death }
            }
        };
        (at, fault)
    }

    /// Draws of their own: seeds that are known by number mean nearly the same without them. `last` are the groups that are left
    /// at the end.
    fn vary(&mut self, program: &mut Program, last: &[usize]) {
        if self.rng.u8(..4) == 0 {
            // From the least on, which one message of the longest takes.
            program.eager_credit_bytes = EAGER + 128 + self.rng.u64(0..EAGER);
        }
        if !program.ends_early && self.rng.u8(..5) == 0 {
            let stays = |step: &Step| matches!(step, Step::Leave(group) if last.contains(group));
            program.steps.iter_mut().for_each(|steps| steps.retain(|step| !stays(step)));
        }
        if program.fault.is_some() || program.wrong.is_some() {
            return;
        }
        match self.rng.u8(..100) {
            0..=4 => {
                let time = self.rng.u64(SECOND..8 * SECOND);
                program.fault = Some((self.rng.u64(0..SECOND), Fault::StopAll { time }));
            }
            5..=9 => {
                let (rank, call) = (self.rng.usize(..program.ranks), self.rng.usize(..program.calls.len()));
                program.wrong = program.takes_part(call, rank).then_some(Wrong { rank, call, how: How::Late });
            }
            10..=29 => {
                program.fault = Some(self.fault(program));
                program.strikes_at_end = true;
            }
            30..=39 => {
                let is_in_channel = |call: &usize| {
                    let ProgramCall { group, what, .. } = program.calls[*call];
                    program.groups[group].channel_of.is_some() && what != What::Open
                };
                let calls: Vec<usize> = (0..program.calls.len()).filter(is_in_channel).collect();
                if !calls.is_empty() {
                    let call = calls[self.rng.usize(..calls.len())];
                    let members = &program.groups[program.calls[call].group].members;
                    program.wrong =
                        Some(Wrong { rank: members[self.rng.usize(..members.len())], call, how: How::Close });
                }
            }
            _ => {}
        }
    }

    fn wrong(&mut self, program: &Program) -> Option<Wrong> {
        let mut call = self.rng.usize(..program.calls.len());
        let rank = self.rng.usize(..program.ranks);
        let openings: Vec<usize> =
            (0..program.calls.len()).filter(|call| program.calls[*call].what == What::Open).collect();
        if !openings.is_empty() && self.rng.u8(..4) == 0 {
            call = openings[self.rng.usize(..openings.len())];
        }
        let given = &program.calls[call];
        let is_opening = given.what == What::Open;
        if !program.takes_part(call, rank) {
            return None;
        }
        let reduces = matches!(given.what, What::AllReduce | What::ReduceScatter | What::Reduce { .. });
        let has_root = matches!(
            given.what,
            What::Broadcast { .. } | What::Reduce { .. } | What::Gather { .. } | What::Scatter { .. }
        );
        let has_parts = matches!(given.what, What::AllToAll { has_splits: true });
        let has_size = !matches!(given.what, What::Barrier | What::Open);
        let how = match self.rng.u8(..7) {
            _ if program.groups[given.group].channel_of.is_some() && !is_opening && self.rng.u8(..4) == 0 => How::Close,
            0 if has_size => How::Size,
            2 | 3 if has_parts => How::Size,
            1 if has_size && (!reduces || given.op.takes(DType::I32) && given.op.takes(DType::F32)) => How::DType,
            2 if reduces && given.dtype != DType::Bool => How::Op,
            3 if has_root => How::Root,
            4 => {
                let is_other = |with: &usize| {
                    *with != call
                        && program.are_ordered(*with, call)
                        && (program.calls[*with].what == What::Open) == is_opening
                        && program.takes_part(*with, rank)
                        && (is_opening || program.part(*with, rank).fingerprint != program.part(call, rank).fingerprint)
                };
                let with = (call + 1..program.calls.len()).find(is_other)?;
                How::Order { with }
            }
            5 => How::Skip,
            6 => How::Leave,
            _ => return None,
        };
        Some(Wrong { rank, call, how })
    }
}

const OPS: [ReduceOp; 10] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::PremulSum(0.5),
    ReduceOp::PremulSum(2.0),
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::BitAnd,
    ReduceOp::BitOr,
    ReduceOp::BitXor,
];
/// The engine's limit for messages that leave without a grant.
const EAGER: u64 = 32 * 1024;
/// Decides which seeds have channels. The seeds in `FAILED` that found something before there were channels have none.
const WITH_CHANNELS: u64 = 0x10e;
/// Decides likewise where other threads begin joins.
const WITH_BEGUN_JOINS: u64 = 0xb9;

/// What `PENSTOCK_VIRTUAL_THREADS` says for all programs.
fn chosen_threads() -> Option<usize> {
    std::env::var("PENSTOCK_VIRTUAL_THREADS").ok().map(|text| text.parse().expect("a number of threads"))
}
