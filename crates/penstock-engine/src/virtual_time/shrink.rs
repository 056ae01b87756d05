//! Makes a failing program small: fewer calls, groups, pauses, ranks and bytes, as long as it fails in the same way.

use super::program::{Fault, Program, Step, What};

/// The smallest program found that `fails`, in at most `trials` runs.
pub(super) fn shrink(program: &Program, mut fails: impl FnMut(&Program) -> bool, mut trials: u32) -> Program {
    let mut best = program.clone();
    loop {
        let mut is_smaller = false;
        for candidate in candidates(&best) {
            // A candidate may come from a list that an earlier success has made old: it is of `best` as it was.
            if trials == 0 {
                return best;
            }
            trials -= 1;
            if fails(&candidate) {
                best = candidate;
                is_smaller = true;
                break;
            }
        }
        if !is_smaller {
            return best;
        }
    }
}

/// Programs a little smaller than one, the much smaller ones first.
fn candidates(program: &Program) -> Vec<Program> {
    let mut all = Vec::new();
    let calls: Vec<usize> = (0..program.calls.len()).filter(|call| is_made(program, *call)).collect();
    for size in [calls.len() / 2, calls.len() / 4, 1] {
        for some in calls.chunks(size.max(1)) {
            all.push(without_calls(program, some));
        }
    }
    for group in 1..program.groups.len() {
        let is_empty = !calls.iter().any(|call| program.home(program.calls[*call].group) == group);
        let is_joined = program.steps.iter().flatten().any(|step| *step == Step::Join(group));
        if is_empty && is_joined {
            all.push(without(
                program,
                |step| matches!(step, Step::Begin(g) | Step::Join(g) | Step::Leave(g) if *g == group),
            ));
        }
    }
    if program.ranks > 2 {
        all.extend(without_last_rank(program));
    }
    if program.fault.is_some() {
        all.push(Program { fault: None, ..program.clone() });
    }
    if let Some((at, Fault::Lose { ranks, which, skew, times })) = program.fault
        && times > 1
    {
        all.push(Program { fault: Some((at, Fault::Lose { ranks, which, skew, times: 1 })), ..program.clone() });
    }
    if program.threads > 1 {
        all.push(Program { threads: program.threads - 1, ..program.clone() });
    }
    if program.streams > 1 {
        all.push(Program { streams: 1, ..program.clone() });
    }
    all.push(without(program, |step| matches!(step, Step::Pause(_))));
    for (rank, steps) in program.steps.iter().enumerate() {
        for (at, step) in steps.iter().enumerate() {
            let mut smaller = program.clone();
            match *step {
                Step::Pause(_) => drop(smaller.steps[rank].remove(at)),
                Step::Hold(call) => {
                    smaller.steps[rank].retain(|other| *other != Step::Release(call));
                    smaller.steps[rank][at] = Step::Issue(call);
                }
                _ => continue,
            }
            all.push(smaller);
        }
    }
    for call in calls {
        for elements in [1, program.calls[call].elements / 2] {
            let mut smaller = program.clone();
            smaller.calls[call].elements = elements;
            all.push(smaller);
        }
    }
    all.retain(|smaller| smaller != program);
    all
}

fn is_made(program: &Program, call: usize) -> bool {
    program.steps.iter().flatten().any(|step| matches!(step, Step::Issue(c) | Step::Hold(c) if *c == call))
}

fn without(program: &Program, is_gone: impl Fn(&Step) -> bool) -> Program {
    let mut smaller = program.clone();
    smaller.steps.iter_mut().for_each(|steps| steps.retain(|step| !is_gone(step)));
    smaller
}

fn without_calls(program: &Program, calls: &[usize]) -> Program {
    without(program, |step| match step {
        Step::Issue(call) | Step::Hold(call) | Step::Release(call) | Step::Wait(call) => calls.contains(call),
        _ => false,
    })
}

/// The calls that name the last rank, and the groups that are too small without it, go too.
fn without_last_rank(program: &Program) -> Option<Program> {
    let last = program.ranks - 1;
    let concerns = |fault: Fault| match fault {
        Fault::Lose { ranks, .. } | Fault::Stall { ranks, .. } | Fault::Part { ranks, .. } => ranks.contains(&last),
        Fault::Stop { rank, .. } | Fault::Kill { rank, .. } => rank == last,
        Fault::StopAll { .. } => false,
    };
    if program.fault.is_some_and(|(_, fault)| concerns(fault)) || program.wrong.is_some_and(|wrong| wrong.rank == last)
    {
        return None;
    }
    let mut smaller = program.clone();
    smaller.ranks = last;
    smaller.steps.pop();
    let gone: Vec<usize> = (0..program.calls.len())
        .filter(|call| {
            let given = &program.calls[*call];
            let members = &program.groups[given.group].members;
            let Some(place) = members.iter().position(|member| *member == last) else { return false };
            match given.what {
                What::Broadcast { root } | What::Reduce { root } | What::Gather { root } | What::Scatter { root } => {
                    root >= place
                }
                What::Message { from, to, .. } => from >= place || to >= place,
                _ => false,
            }
        })
        .collect();
    for group in &mut smaller.groups {
        group.members.retain(|member| *member != last);
    }
    let smaller = without_calls(&smaller, &gone);
    let small: Vec<usize> =
        (0..smaller.groups.len()).filter(|group| smaller.groups[*group].members.len() < 2).collect();
    let calls: Vec<usize> =
        (0..smaller.calls.len()).filter(|call| small.contains(&smaller.calls[*call].group)).collect();
    let is_gone = |step: &Step| matches!(step, Step::Begin(group) | Step::Join(group) | Step::Leave(group) if small.contains(group));
    Some(without(&without_calls(&smaller, &calls), is_gone))
}
