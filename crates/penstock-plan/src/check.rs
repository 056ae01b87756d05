//! Proves from the steps alone that a plan is correct: [`check`].
//!
//! ```text
//!   instances ──> an order in which all can go ──> who is ordered before whom ──> no two clash over a byte
//!                 (none: deadlock)                 (sets, one bit an instance)    (else: race)
//!                        │
//!                        └──> run it on symbols: what each byte is made of ──> what `order` promises, on every rank
//! ```
//!
//! **Why this covers every schedule.** An instance never becomes impossible once it is possible, so that plans deadlock
//! under some schedule only if they do under all, which is a cycle in the graph of dependencies and messages. The
//! graph is the most pessimistic one: a receiver takes no message before its own dependencies are met, and a send is
//! done only when its receiver is done, as if no message were eager. Where, in addition, any two instances that touch
//! the same byte, one of them writing, are ordered, every schedule computes the same values, so running one is enough.
//! That order counts only what holds for any transport: a send being done says nothing about the peer (the transport may
//! have kept a copy), but a message says that everything its sender waited for has happened.

use std::collections::HashMap;

pub use crate::violation::{InstanceId, Violation};
use crate::{
    Action, Algorithm, Buf, Collective, EAGER_LIMIT_BYTES, Operand, Order, Request, Slice, Steps, WireBytes,
    crossing_bytes, hops,
    instances::{Area, Instance, expand},
    order, wire_bytes,
};

/// What the transport can hold while a reduction waits for the rest of its messages: between ranks that share a host any
/// message, since it is a reference; between hosts a message that is eager. [`Request::placement`] says which ranks share a
/// host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Largest eager message.
    pub eager_limit_bytes: u64,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules { eager_limit_bytes: EAGER_LIMIT_BYTES }
    }
}

/// The properties of a plan that passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Messages of all ranks.
    pub messages: u64,
    /// The longest chain of messages in which each waits for the one before.
    pub hops: u32,
    /// Steps of all ranks that take a message only after another step of their rank, so that the transport cannot grant
    /// it from the start.
    pub late_grants: u32,
    /// The most scratch memory that any rank uses.
    pub scratch_bytes: u64,
}

/// Checks the steps of all ranks against what the requests ask for and what the algorithm promises. `requests` and
/// `plans` are indexed by rank.
///
/// Proves that every message has one sender and one receiver; that no schedule deadlocks; that no two instances that are
/// not ordered touch the same byte, one of them writing; that inputs, and tensors of ranks other than the root of a
/// reduce, are never written; that every byte of every result is what the collective says, each contribution reduced
/// exactly once, in the order of [`order`] on every rank, and finished once; that bytes are those of [`wire_bytes`]
/// and [`crossing_bytes`], and the latency at most [`hops`].
///
/// Cost: the square of the number of instances, in bits.
///
/// # Errors
/// The first [`Violation`].
pub fn check(requests: &[Request], algorithm: Algorithm, plans: &[Steps], rules: &Rules) -> Result<Report, Violation> {
    let instances = expand(plans)?;
    // The splits of an all-to-all are known to their two ranks only.
    let common = plans.iter().zip(requests).filter(|(_, request)| request.splits.is_none());
    for (rank, (plan, _)) in (0..).zip(common) {
        if plan.messages != plans[0].messages {
            return Err(Violation::Messages { rank, messages: plan.messages, of_rank_0: plans[0].messages });
        }
    }
    for instance in &instances {
        check_shape(instance, &requests[instance.id.rank as usize], plans, rules)?;
    }
    let order = runnable_order(&instances)?;
    check_races(&instances, &ordered_before(&instances, &order))?;
    check_values(requests, algorithm, plans, &instances, &order)?;
    if requests[0].collective == Collective::Barrier {
        check_barrier(requests.len(), &instances, &order)?;
    }
    check_wire_bytes(requests, algorithm, &instances)?;
    let report = report(plans, &instances, &order);
    let promised = hops(&requests[0], algorithm)?;
    if report.hops > promised {
        return Err(Violation::Hops { hops: report.hops, promised });
    }
    Ok(report)
}

/// Checks an instance on its own.
fn check_shape(instance: &Instance<'_>, request: &Request, plans: &[Steps], rules: &Rules) -> Result<(), Violation> {
    let id = instance.id;
    let plan = &plans[id.rank as usize];
    let segments = plan.steps[id.step as usize].segments;
    let mut slices: Vec<&Slice> = Vec::new();
    match instance.action {
        Action::Send { src: slice, .. }
        | Action::Recv { dst: slice, .. }
        | Action::Push { src: slice, .. }
        | Action::Pull { dst: slice, .. } => slices.push(slice),
        Action::Copy { dst, src } => slices.extend([dst, src]),
        Action::Reduce { dst, sources, .. } => {
            slices.push(dst);
            slices.extend(sources.iter().filter_map(|source| match source {
                Operand::Local(slice) => Some(slice),
                Operand::Message { .. } => None,
            }));
            // A message from another host waits for the other messages of its step, wherever they come from.
            let from_afar = |source: &Operand| match source {
                Operand::Local(_) => false,
                Operand::Message { from, .. } => !request.placement.share_host(*from, id.rank),
            };
            let held = instance.takes.len() > 1 && sources.iter().any(from_afar);
            if held && dst.len > rules.eager_limit_bytes {
                return Err(Violation::Hold { id, bytes: dst.len });
            }
        }
        Action::Notify { .. } | Action::Await { .. } => {}
    }
    let element_bytes = if request.collective.reduces() { u64::from(request.element_bytes) } else { 1 };
    for slice in slices {
        let buffer_bytes = match slice.buf {
            Buf::Input => request.input_bytes(),
            Buf::Output => request.output_bytes(),
            Buf::Scratch => plan.scratch_bytes,
        };
        let area = instance.area(slice);
        if area.len != instance.bytes {
            return Err(Violation::Length { id, bytes: instance.bytes, other: id, other_bytes: area.len });
        }
        let whole_elements = area.start.is_multiple_of(element_bytes) && area.len.is_multiple_of(element_bytes);
        let cuts_elements = segments > 1 && slice.segment_bytes % 16 != 0;
        if area.end() > buffer_bytes || cuts_elements || !whole_elements {
            return Err(Violation::Bounds { id, slice: *slice, buffer_bytes });
        }
    }
    let Some(target) = instance.writes() else { return Ok(()) };
    let clobbers_operand = instance.reads().iter().any(|source| {
        let in_place = matches!(instance.action, Action::Reduce { .. }) && *source == target;
        source.overlaps(&target) && !in_place
    });
    let keeps_tensor = matches!(request.collective, Collective::Reduce { root } if root != request.rank);
    if target.buf == Buf::Input || clobbers_operand || (keeps_tensor && target.buf == Buf::Output) {
        return Err(Violation::Write { id, buf: target.buf, start: target.start, end: target.end() });
    }
    Ok(())
}

/// An order in which all instances can be done, one after the other. A send is listed when it starts; it is done, and
/// what waits for it may go, when its receiver is done.
fn runnable_order(instances: &[Instance<'_>]) -> Result<Vec<u32>, Violation> {
    let mut waits_for: Vec<usize> =
        instances.iter().map(|instance| instance.after.len() + instance.takes.len()).collect();
    let mut followers: Vec<Vec<u32>> = vec![Vec::new(); instances.len()];
    for (index, instance) in (0..).zip(instances) {
        for &earlier in &instance.after {
            // Instances that wait for a send wait for its receiver.
            let done_with = match instances[earlier as usize].action {
                Action::Send { .. } | Action::Push { .. } => instances[earlier as usize].taken_by.unwrap_or(earlier),
                _ => earlier,
            };
            followers[done_with as usize].push(index);
        }
        for &send in &instance.takes {
            followers[send as usize].push(index);
        }
    }
    let mut order: Vec<u32> = (0..instances.len() as u32).filter(|&index| waits_for[index as usize] == 0).collect();
    let mut next = 0;
    while let Some(&index) = order.get(next) {
        next += 1;
        for &follower in &followers[index as usize] {
            waits_for[follower as usize] -= 1;
            if waits_for[follower as usize] == 0 {
                order.push(follower);
            }
        }
    }
    if order.len() == instances.len() {
        return Ok(order);
    }
    let stuck = (0..instances.len()).filter(|&index| waits_for[index] > 0);
    Err(Violation::Deadlock { instances: stuck.map(|index| instances[index].id).collect() })
}

/// For each instance, the instances that are certainly done when it starts to touch bytes: those that it waits for, and
/// what is done before them or before its messages leave.
fn ordered_before(instances: &[Instance<'_>], order: &[u32]) -> Vec<Vec<u64>> {
    let words = instances.len().div_ceil(64);
    let mut before: Vec<Vec<u64>> = vec![Vec::new(); instances.len()];
    for &index in order {
        let mut set = vec![0u64; words];
        let instance = &instances[index as usize];
        for &earlier in instance.after.iter().chain(&instance.takes) {
            for (word, earlier) in set.iter_mut().zip(&before[earlier as usize]) {
                *word |= earlier;
            }
        }
        // The server has committed what this rank pushed when the result is here, so the pushed bytes are not read again.
        let own = |push: &&u32| {
            let pusher = &instances[**push as usize];
            matches!(pusher.action, Action::Push { .. }) && pusher.id.rank == instance.id.rank
        };
        for &earlier in instance.after.iter().chain(instance.takes.iter().filter(own)) {
            set[earlier as usize / 64] |= 1 << (earlier % 64);
        }
        before[index as usize] = set;
    }
    before
}

fn check_races(instances: &[Instance<'_>], before: &[Vec<u64>]) -> Result<(), Violation> {
    let is_before = |earlier: u32, later: u32| before[later as usize][earlier as usize / 64] >> (earlier % 64) & 1 == 1;
    // The bytes that a send reads are free when the send is done here, or when its receiver has used them.
    let finished_before = |earlier: u32, later: u32| {
        let sender = &instances[earlier as usize];
        is_before(earlier, later)
            || matches!(sender.action, Action::Send { .. })
                && sender.taken_by.is_some_and(|taker| is_before(taker, later))
    };
    struct Access {
        index: u32,
        area: Area,
        writes: bool,
    }
    let mut accesses: HashMap<(u32, Buf), Vec<Access>> = HashMap::new();
    for (index, instance) in (0..).zip(instances) {
        let reads = instance.reads().into_iter().map(|area| (area, false));
        for (area, writes) in reads.chain(instance.writes().map(|area| (area, true))) {
            accesses.entry((instance.id.rank, area.buf)).or_default().push(Access { index, area, writes });
        }
    }
    for accesses in accesses.values_mut() {
        accesses.sort_by_key(|access| (access.area.start, access.index));
        for (position, a) in accesses.iter().enumerate() {
            for b in accesses[position + 1..].iter().take_while(|b| b.area.start < a.area.end()) {
                let ordered = a.index == b.index
                    || !(a.writes || b.writes)
                    || finished_before(a.index, b.index)
                    || finished_before(b.index, a.index);
                if !ordered {
                    return Err(Violation::Race {
                        id: instances[a.index as usize].id,
                        other: instances[b.index as usize].id,
                        buf: a.area.buf,
                        start: b.area.start,
                        end: a.area.end().min(b.area.end()),
                    });
                }
            }
        }
    }
    Ok(())
}

/// The value of a byte, as a symbol. Equal expressions have equal numbers, so expressions are compared by number.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Expression {
    /// The contribution of this rank.
    Rank(u32),
    /// One reduction of these, from left to right.
    Reduce(Vec<u32>),
    /// The result of the last reduction.
    Finished(u32),
}

#[derive(Default)]
struct Expressions {
    numbers: HashMap<Expression, u32>,
    /// For each number its expression, and the ranks that contribute to it, sorted.
    known: Vec<(Expression, Vec<u32>)>,
}

impl Expressions {
    /// The number of an expression; `None` if a rank would contribute twice, or a finished result would be reduced again.
    fn number(&mut self, expression: Expression) -> Option<u32> {
        if let Some(&number) = self.numbers.get(&expression) {
            return Some(number);
        }
        let contributors = match &expression {
            Expression::Rank(rank) => vec![*rank],
            Expression::Finished(of) => self.known[*of as usize].1.clone(),
            Expression::Reduce(sources) => {
                let mut ranks: Vec<u32> = Vec::new();
                for &source in sources {
                    let (expression, contributors) = &self.known[source as usize];
                    if matches!(expression, Expression::Finished(_)) {
                        return None;
                    }
                    ranks.extend(contributors);
                }
                ranks.sort_unstable();
                if ranks.windows(2).any(|pair| pair[0] == pair[1]) {
                    return None;
                }
                ranks
            }
        };
        let number = self.known.len() as u32;
        self.known.push((expression.clone(), contributors));
        self.numbers.insert(expression, number);
        Some(number)
    }

    fn rank(&mut self, rank: u32) -> u32 {
        self.number(Expression::Rank(rank)).expect("a rank contributes to itself once")
    }

    fn promised(&mut self, order: &Order) -> u32 {
        match order {
            Order::Rank(rank) => self.rank(*rank),
            Order::Reduce(sources) => {
                let sources = sources.iter().map(|source| self.promised(source)).collect();
                self.number(Expression::Reduce(sources)).expect("a promised order names each rank once")
            }
        }
    }

    fn text(&self, value: Value) -> String {
        fn write(expressions: &Expressions, number: u32) -> String {
            match &expressions.known[number as usize].0 {
                Expression::Rank(rank) => format!("{rank}"),
                Expression::Reduce(sources) => {
                    let sources: Vec<_> = sources.iter().map(|&source| write(expressions, source)).collect();
                    format!("({})", sources.join("+"))
                }
                Expression::Finished(of) => format!("{}!", write(expressions, *of)),
            }
        }
        format!("[{} at {}]", write(self, value.expression), value.position)
    }
}

/// A byte as a symbol; the bytes that follow have the same expression at the positions that follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Value {
    expression: u32,
    /// The byte of the contributions that it stands for.
    position: u64,
}

impl Value {
    fn plus(self, bytes: u64) -> Value {
        Value { position: self.position + bytes, ..self }
    }
}

/// Consecutive bytes of one expression.
#[derive(Clone, Copy, Debug)]
struct Run {
    start: u64,
    len: u64,
    value: Value,
}

/// The contents of a buffer: runs that do not overlap, in order.
#[derive(Clone, Debug, Default)]
struct Contents(Vec<Run>);

impl Contents {
    /// The runs within `start..end`, shifted to start at 0; the error is the first byte that holds nothing.
    fn read(&self, start: u64, end: u64) -> Result<Vec<Run>, u64> {
        let mut found: Vec<Run> = Vec::new();
        let mut at = start;
        let first = self.0.partition_point(|run| run.start + run.len <= start);
        for run in self.0[first..].iter().take_while(|run| run.start < end) {
            if run.start > at {
                return Err(at);
            }
            let len = (run.start + run.len).min(end) - at;
            found.push(Run { start: at - start, len, value: run.value.plus(at - run.start) });
            at += len;
        }
        if at < end { Err(at) } else { Ok(found) }
    }

    /// Replaces `start..end` by `runs`, which start at 0.
    fn write(&mut self, start: u64, end: u64, runs: &[Run]) {
        let first = self.0.partition_point(|run| run.start + run.len <= start);
        let last = self.0.partition_point(|run| run.start < end);
        let mut new: Vec<Run> = Vec::new();
        if let Some(run) = self.0[first..last].first()
            && run.start < start
        {
            new.push(Run { len: start - run.start, ..*run });
        }
        new.extend(runs.iter().map(|run| Run { start: start + run.start, ..*run }));
        if let Some(run) = self.0[first..last].last() {
            let run_end = run.start + run.len;
            if run_end > end {
                new.push(Run { start: end, len: run_end - end, value: run.value.plus(end - run.start) });
            }
        }
        self.0.splice(first..last, new);
    }
}

fn check_values(
    requests: &[Request],
    algorithm: Algorithm,
    plans: &[Steps],
    instances: &[Instance<'_>],
    order: &[u32],
) -> Result<(), Violation> {
    let mut expressions = Expressions::default();
    let mut memory: HashMap<(u32, Buf), Contents> = HashMap::new();
    for rank in 0..plans.len() as u32 {
        let request = &requests[rank as usize];
        let value = Value { expression: expressions.rank(rank), position: 0 };
        let in_place = match request.collective {
            Collective::AllReduce | Collective::Reduce { .. } => true,
            Collective::Broadcast { root } => root == rank,
            _ => false,
        };
        let (buf, len) =
            if in_place { (Buf::Output, request.output_bytes()) } else { (Buf::Input, request.input_bytes()) };
        if len > 0 {
            memory.insert((rank, buf), Contents(vec![Run { start: 0, len, value }]));
        }
    }
    let mut sent: HashMap<u32, Vec<Run>> = HashMap::new();
    for &index in order {
        let instance = &instances[index as usize];
        let read = |area: Area| {
            match memory.get(&(instance.id.rank, area.buf)) {
                None => Err(area.start),
                Some(contents) => contents.read(area.start, area.end()),
            }
            .map_err(|at| Violation::Undefined { id: instance.id, buf: area.buf, at })
        };
        let made = match instance.action {
            Action::Notify { .. } | Action::Await { .. } => continue,
            Action::Send { src, .. } | Action::Push { src, .. } => {
                sent.insert(index, read(instance.area(src))?);
                continue;
            }
            Action::Pull { .. } => {
                let operands: Vec<_> = instance.takes.iter().map(|push| sent[push].clone()).collect();
                reduce_runs(&mut expressions, &operands, true).map_err(|(what, at)| Violation::Reduction {
                    id: instance.id,
                    what,
                    at,
                })?
            }
            Action::Copy { src, .. } => read(instance.area(src))?,
            Action::Recv { .. } => sent.remove(&instance.takes[0]).expect("a send goes before its receiver"),
            Action::Reduce { sources, last, .. } => {
                let mut messages = instance.takes.iter();
                let mut operands = Vec::new();
                for source in sources {
                    operands.push(match source {
                        Operand::Local(slice) => read(instance.area(slice))?,
                        Operand::Message { .. } => {
                            messages.next().and_then(|send| sent.remove(send)).expect("a send goes before its receiver")
                        }
                    });
                }
                reduce_runs(&mut expressions, &operands, *last).map_err(|(what, at)| Violation::Reduction {
                    id: instance.id,
                    what,
                    at,
                })?
            }
        };
        let place = instance.writes().expect("a step that makes bytes writes them");
        memory.entry((instance.id.rank, place.buf)).or_default().write(place.start, place.end(), &made);
    }
    for rank in 0..requests.len() as u32 {
        let contents = memory.remove(&(rank, Buf::Output)).unwrap_or_default();
        for wanted in wanted_output(requests, algorithm, rank, &mut expressions)? {
            let found = contents.read(wanted.start, wanted.start + wanted.len);
            let found = found.map_err(|at| Violation::Output {
                rank,
                at,
                found: "nothing".to_owned(),
                wanted: expressions.text(wanted.value.plus(at - wanted.start)),
            })?;
            for run in found {
                let (value, wanted) = (run.value, wanted.value.plus(run.start));
                if value != wanted {
                    return Err(Violation::Output {
                        rank,
                        at: run.start,
                        found: expressions.text(value),
                        wanted: expressions.text(wanted),
                    });
                }
            }
        }
    }
    Ok(())
}

/// Reduces operands of the same length, piece by piece where their runs end at different places.
fn reduce_runs(
    expressions: &mut Expressions,
    operands: &[Vec<Run>],
    last: bool,
) -> Result<Vec<Run>, (&'static str, u64)> {
    let mut ends: Vec<u64> = operands.iter().flatten().map(|run| run.start + run.len).collect();
    ends.sort_unstable();
    ends.dedup();
    let mut result = Vec::new();
    let mut start = 0;
    for end in ends {
        let at = |runs: &Vec<Run>| {
            let run = runs[runs.partition_point(|run| run.start + run.len <= start)];
            run.value.plus(start - run.start)
        };
        let values: Vec<Value> = operands.iter().map(at).collect();
        if values.iter().any(|value| value.position != values[0].position) {
            return Err(("bytes of different places in the tensor", start));
        }
        let sources = values.iter().map(|value| value.expression).collect();
        let mut expression = expressions
            .number(Expression::Reduce(sources))
            .ok_or(("a contribution for the second time, or what was already finished", start))?;
        if last {
            expression = expressions.number(Expression::Finished(expression)).expect("always has a number");
        }
        result.push(Run { start, len: end - start, value: Value { expression, position: values[0].position } });
        start = end;
    }
    Ok(result)
}

/// The expected output of a rank at the end.
fn wanted_output(
    requests: &[Request],
    algorithm: Algorithm,
    rank: u32,
    expressions: &mut Expressions,
) -> Result<Vec<Run>, Violation> {
    let request = &requests[rank as usize];
    let (world, bytes) = (u64::from(request.world), request.output_bytes());
    if bytes == 0 {
        return Ok(Vec::new());
    }
    let mut moved = |from: u32, position: u64| Value { expression: expressions.rank(from), position };
    let whole = |value: Value| vec![Run { start: 0, len: bytes, value }];
    let concatenated = |part: u64, value: &mut dyn FnMut(u32) -> Value| {
        (0..request.world).map(|p| Run { start: u64::from(p) * part, len: part, value: value(p) }).collect()
    };
    Ok(match request.collective {
        Collective::Broadcast { root } => whole(moved(root, 0)),
        Collective::Scatter { root } => whole(moved(root, u64::from(rank) * bytes)),
        Collective::Recv { from } => whole(moved(from, 0)),
        Collective::Reduce { root } if root != rank => whole(moved(rank, 0)),
        Collective::AllGather | Collective::Gather { .. } => concatenated(bytes / world, &mut |p| moved(p, 0)),
        Collective::AllToAll => match &request.splits {
            None => concatenated(bytes / world, &mut |p| moved(p, u64::from(rank) * (bytes / world))),
            Some(splits) => {
                let mut start = 0;
                let mut runs = Vec::new();
                for (p, &len) in (0..).zip(&splits.output) {
                    let theirs = requests[p as usize].splits.as_ref().expect("all ranks have splits");
                    let position = theirs.input[..rank as usize].iter().sum();
                    runs.push(Run { start, len, value: moved(p, position) });
                    start += len;
                }
                runs.retain(|run| run.len > 0);
                runs
            }
        },
        _ if request.world == 1 => whole(moved(0, 0)),
        _ => {
            // A reduce-scatter's output is one chunk of the tensor that the promised order speaks of.
            let first = if request.collective == Collective::ReduceScatter { u64::from(rank) * bytes } else { 0 };
            let mut runs = Vec::new();
            for (start, len, order) in order(request, algorithm)? {
                let (start, end) = (start.max(first), (start + len).min(first + bytes));
                if start < end {
                    let unfinished = expressions.promised(&order);
                    let expression = expressions.number(Expression::Finished(unfinished)).expect("always");
                    let value = Value { expression, position: start };
                    runs.push(Run { start: start - first, len: end - start, value });
                }
            }
            runs
        }
    })
}

/// Checks a barrier: no rank leaves before the arrival of every rank has reached it.
fn check_barrier(world: usize, instances: &[Instance<'_>], order: &[u32]) -> Result<(), Violation> {
    let mut heard: Vec<Vec<bool>> = vec![Vec::new(); instances.len()];
    let mut leaves_with: Vec<Vec<bool>> =
        (0..world).map(|rank| (0..world).map(|other| other == rank).collect()).collect();
    for &index in order {
        let instance = &instances[index as usize];
        let rank = instance.id.rank as usize;
        let mut known = vec![false; world];
        known[rank] = true;
        for &earlier in instance.after.iter().chain(&instance.takes) {
            known.iter_mut().zip(&heard[earlier as usize]).for_each(|(known, earlier)| *known |= earlier);
        }
        leaves_with[rank].iter_mut().zip(&known).for_each(|(leaves, known)| *leaves |= known);
        heard[index as usize] = known;
    }
    for (rank, heard) in (0..).zip(leaves_with) {
        if let Some(missing) = heard.iter().position(|heard| !heard) {
            return Err(Violation::Barrier { rank, missing: missing as u32 });
        }
    }
    Ok(())
}

fn check_wire_bytes(requests: &[Request], algorithm: Algorithm, instances: &[Instance<'_>]) -> Result<(), Violation> {
    let mut moved = vec![WireBytes::default(); requests.len()];
    let mut crossing = moved.clone();
    for instance in instances {
        let from = instance.id.rank;
        let to = match instance.action {
            Action::Send { to, .. } => to,
            Action::Push { .. } => {
                moved[from as usize].sent += instance.bytes;
                continue;
            }
            Action::Pull { .. } => {
                moved[from as usize].received += instance.bytes;
                continue;
            }
            _ => continue,
        };
        let add = |moved: &mut [WireBytes]| {
            moved[from as usize].sent += instance.bytes;
            moved[*to as usize].received += instance.bytes;
        };
        add(&mut moved);
        if !requests[from as usize].placement.share_host(from, *to) {
            add(&mut crossing);
        }
    }
    for (request, (moved, crossing)) in requests.iter().zip(moved.into_iter().zip(crossing)) {
        let rank = request.rank;
        if wire_bytes(request, algorithm)? != moved {
            return Err(Violation::WireBytes { rank, sent: moved.sent, received: moved.received });
        }
        if crossing_bytes(request, algorithm)?.is_some_and(|promised| promised != crossing) {
            return Err(Violation::Crossing { rank, sent: crossing.sent, received: crossing.received });
        }
    }
    Ok(())
}

fn report(plans: &[Steps], instances: &[Instance<'_>], order: &[u32]) -> Report {
    let mut depth = vec![0u32; instances.len()];
    for &index in order {
        let instance = &instances[index as usize];
        let waited = instance.after.iter().map(|&earlier| depth[earlier as usize]);
        let trips = if matches!(instance.action, Action::Pull { .. }) { 2 } else { 1 };
        let arrived = instance.takes.iter().map(|&send| depth[send as usize] + trips);
        depth[index as usize] = waited.chain(arrived).max().unwrap_or(0);
    }
    let takes_message = |action: &Action| match action {
        Action::Recv { .. } => true,
        Action::Reduce { sources, .. } => sources.iter().any(|source| matches!(source, Operand::Message { .. })),
        _ => false,
    };
    let steps = || plans.iter().flat_map(|plan| &plan.steps);
    Report {
        messages: instances.iter().map(|instance| instance.takes.len() as u64).sum(),
        hops: depth.into_iter().max().unwrap_or(0),
        late_grants: steps().filter(|step| takes_message(&step.action) && !step.after.is_empty()).count() as u32,
        scratch_bytes: plans.iter().map(|plan| plan.scratch_bytes).max().unwrap_or(0),
    }
}
