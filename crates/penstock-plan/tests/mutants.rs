//! The checker is only worth what it rejects: every way to break a plan that is listed here is found, at every place
//! where it can be applied, on one rank and on all ranks at once (as a mistake in the code would).
//!
//! A mutant may be *the same plan* written differently, for example with one more, empty, instance. Those are told by
//! comparing what remains when templates are expanded; no other survivor is accepted. Not tried are changes that only
//! order more (another dependency, a shorter lag) and those of [`RENAMES`] on all ranks: they do not break a plan.

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::{Case, SEGMENT_BYTES};
use penstock_plan::{Action, Algorithm, Buf, Collective, Dep, Operand, Placement, Slice, Step, Steps};

/// All single mistakes in all algorithms, in groups small enough to try each.
#[test]
fn every_mutant_is_rejected() {
    let mut survivors = Vec::new();
    let mut tried = BTreeMap::<&str, u32>::new();
    for case in bases() {
        let plans = case.plans();
        case.check(&plans).unwrap_or_else(|violation| panic!("{violation}\n{case:#?}"));
        let expanded = expand(&plans);
        let ranks = plans.len();
        for rank in 0..=ranks {
            // The last round breaks all ranks alike, as far as their steps correspond.
            let (model, broken) = if rank < ranks { (rank, rank..rank + 1) } else { (0, 0..ranks) };
            for (name, apply) in mutations(&plans[model]) {
                let mut mutant = plans.clone();
                broken.clone().for_each(|rank| apply(&mut mutant[rank]));
                if expand(&mutant) == expanded || (rank == ranks && RENAMES.contains(&name)) {
                    continue;
                }
                *tried.entry(name).or_default() += 1;
                if case.check(&mutant).is_ok() {
                    let base = (case.algorithm, case.requests[0].collective, ranks);
                    survivors.push(format!("{name} on rank {rank} of {base:?}"));
                }
            }
        }
    }
    println!("{tried:#?}");
    assert!(survivors.is_empty(), "{} mutants passed:\n{}", survivors.len(), survivors.join("\n"));
    for name in ALL_KINDS {
        assert!(tried.contains_key(name), "no base plan lets {name:?} be tried");
    }
}

/// Each algorithm, with several segments, in groups where each of its roles occurs.
fn bases() -> Vec<Case> {
    let seg = SEGMENT_BYTES;
    let mut bases = Vec::new();
    for (algorithm, worlds) in [
        (Algorithm::Ring, &[2, 3, 4][..]),
        (Algorithm::HalvingDoubling, &[3, 4, 5]),
        (Algorithm::RecursiveDoubling, &[2, 3, 4, 5]),
        (Algorithm::Exchange, &[2, 3]),
        (Algorithm::Direct, &[2, 3]),
    ] {
        for &world in worlds {
            bases.push(Case::new(Collective::AllReduce, algorithm, world, u64::from(world) * 2 * seg - 12, 4));
        }
    }
    // Equal hosts by turns, a host of one, and three hosts of which one has an owner of two shares.
    for (hosts, bytes) in
        [(&[0, 1, 0, 1][..], 4 * 2 * seg - 12), (&[0, 1, 1], 4 * seg - 12), (&[0, 1, 2, 0], 6 * seg - 12)]
    {
        let placement = Placement::new(hosts);
        bases.push(Case::on(&placement, Collective::AllReduce, Algorithm::Hierarchical, bytes, 4));
    }
    // Two servers, of which one has a third.
    for world in [2, 3] {
        let placement = Placement::separate_hosts(world).with_servers(&[1, 2]);
        bases.push(Case::on(&placement, Collective::AllReduce, Algorithm::Aggregated, 6 * seg - 12, 4));
    }
    bases.push(Case::on(&Placement::new(&[0, 1, 0]), Collective::AllReduce, Algorithm::Ring, 6 * seg - 12, 4));
    for algorithm in [Algorithm::Ring, Algorithm::Direct] {
        bases.push(Case::new(Collective::ReduceScatter, algorithm, 4, 4 * (2 * seg - 12), 4));
        bases.push(Case::new(Collective::AllGather, algorithm, 3, 3 * (2 * seg - 12), 4));
    }
    for algorithm in [Algorithm::Ring, Algorithm::Tree, Algorithm::Direct] {
        bases.push(Case::new(Collective::Broadcast { root: 1 }, algorithm, 4, 2 * seg - 12, 4));
        bases.push(Case::new(Collective::Reduce { root: 1 }, algorithm, 4, 2 * seg - 12, 4));
    }
    // Long enough for scratch slots.
    bases.push(Case::new(Collective::ReduceScatter, Algorithm::Ring, 3, 3 * 19 * seg, 4));
    bases.push(Case::new(Collective::Reduce { root: 0 }, Algorithm::Ring, 3, 18 * seg, 4));
    bases.push(Case::new(Collective::Reduce { root: 2 }, Algorithm::Tree, 4, 18 * seg, 4));

    bases.push(Case::new(Collective::Gather { root: 2 }, Algorithm::Direct, 3, 2 * seg - 12, 4));
    bases.push(Case::new(Collective::Scatter { root: 2 }, Algorithm::Direct, 3, 2 * seg - 12, 4));
    bases.push(Case::new(Collective::AllToAll, Algorithm::Direct, 3, 3 * (2 * seg - 12), 4));
    bases.push(Case::uneven_all_to_all(3, |from, to| 40 * u64::from((from + 2 * to) % 4)));
    bases.push(Case::send_recv(1, 2 * seg - 12));
    bases.push(Case::new(Collective::Barrier, Algorithm::Dissemination, 8, 0, 1));
    bases
}

const ALL_KINDS: &[&str] = &[
    "step left out",
    "step twice",
    "dependency left out",
    "dependency one segment later",
    "dependency on its own segment only",
    "dependency on no step",
    "dependency on itself",
    "other peer",
    "message number plus one",
    "other server",
    "messages of two steps swapped",
    "slices of two sends swapped",
    "slice starts an element later",
    "slice starts an element earlier",
    "slice starts a segment later",
    "slice an element longer",
    "slice an element shorter",
    "slice in another buffer",
    "segments larger",
    "one segment fewer",
    "one slot fewer",
    "one slot more",
    "operands swapped",
    "operand left out",
    "operand twice",
    "last flipped",
    "fewer messages",
    "less scratch",
];

/// Where both ends of every message change alike, these give another plan that is right.
const RENAMES: &[&str] = &["message number plus one", "segments larger"];

type Apply = Box<dyn Fn(&mut Steps)>;

/// Everything that can be broken in a plan, by kind. A mutation does nothing to a plan that lacks its place.
fn mutations(plan: &Steps) -> Vec<(&'static str, Apply)> {
    let mut all: Vec<(&'static str, Apply)> = vec![
        ("fewer messages", Box::new(|plan| plan.messages = plan.messages.saturating_sub(1))),
        ("less scratch", Box::new(|plan| plan.scratch_bytes = plan.scratch_bytes.saturating_sub(64))),
    ];
    for (index, step) in plan.steps.iter().enumerate() {
        let mut on_step = |name: &'static str, apply: Box<dyn Fn(&mut Step)>| {
            all.push((
                name,
                Box::new(move |plan: &mut Steps| {
                    if let Some(step) = plan.steps.get_mut(index) {
                        apply(step);
                    }
                }),
            ));
        };
        on_step("step left out", Box::new(|step| step.segments = 0));
        on_step("one segment fewer", Box::new(|step| step.segments = step.segments.saturating_sub(1)));
        on_step(
            "last flipped",
            Box::new(|step| {
                if let Action::Reduce { last, .. } = &mut step.action {
                    *last = !*last;
                }
            }),
        );
        for dep in 0..step.after.len() {
            let on_dep = move |change: fn(&mut Dep)| -> Box<dyn Fn(&mut Step)> {
                Box::new(move |step| {
                    if let Some(dep) = step.after.get_mut(dep) {
                        change(dep);
                    }
                })
            };
            on_step(
                "dependency left out",
                Box::new(move |step| {
                    if dep < step.after.len() {
                        step.after.remove(dep);
                    }
                }),
            );
            on_step(
                "dependency one segment later",
                on_dep(|dep| {
                    if let Dep::Segment { lag, .. } = dep {
                        *lag += 1;
                    }
                }),
            );
            on_step(
                "dependency on its own segment only",
                on_dep(|dep| {
                    if let Dep::All { step } = *dep {
                        *dep = Dep::Segment { step, lag: 0 };
                    }
                }),
            );
            on_step(
                "dependency on no step",
                on_dep(|dep| {
                    let (Dep::Segment { step, .. } | Dep::All { step }) = dep;
                    *step += 1000;
                }),
            );
        }
        for slice in 0..slices(&mut step.action.clone()).len() {
            let on_slice = move |change: fn(&mut Slice)| -> Box<dyn Fn(&mut Step)> {
                Box::new(move |step| {
                    if let Some(slice) = slices(&mut step.action).get_mut(slice) {
                        change(slice);
                    }
                })
            };
            on_step("slice starts an element later", on_slice(|slice| slice.start += 4));
            on_step("slice starts an element earlier", on_slice(|slice| slice.start = slice.start.saturating_sub(4)));
            on_step("slice starts a segment later", on_slice(|slice| slice.start += slice.segment_bytes));
            on_step("slice an element longer", on_slice(|slice| slice.len += 4));
            on_step("slice an element shorter", on_slice(|slice| slice.len -= 4));
            on_step(
                "slice in another buffer",
                on_slice(|slice| {
                    slice.buf = match slice.buf {
                        Buf::Input => Buf::Output,
                        Buf::Output => Buf::Scratch,
                        Buf::Scratch => Buf::Input,
                    }
                }),
            );
            on_step("segments larger", on_slice(|slice| slice.segment_bytes += 16));
            on_step(
                "one slot fewer",
                on_slice(|slice| {
                    if slice.slots > 1 {
                        slice.slots -= 1;
                    }
                }),
            );
            on_step(
                "one slot more",
                on_slice(|slice| {
                    if slice.slots > 0 {
                        slice.slots += 1;
                    }
                }),
            );
        }
        for add in 1..4 {
            on_step(
                "other server",
                Box::new(move |step| {
                    if let Action::Push { server, .. } | Action::Pull { server, .. } = &mut step.action {
                        *server = (*server + add) % 4;
                    }
                }),
            );
        }
        for message in 0..messages(&mut step.action.clone()).len() {
            let world = 8;
            for add in 1..world {
                on_step(
                    "other peer",
                    Box::new(move |step| {
                        if let Some((peer, _)) = messages(&mut step.action).get_mut(message) {
                            **peer = (**peer + add) % world;
                        }
                    }),
                );
            }
            on_step(
                "message number plus one",
                Box::new(move |step| {
                    if let Some((_, number)) = messages(&mut step.action).get_mut(message) {
                        **number += 1;
                    }
                }),
            );
        }
        if let Action::Reduce { sources, .. } = &step.action {
            for at in 0..sources.len() {
                let on_sources = move |change: fn(&mut Vec<Operand>, usize)| -> Box<dyn Fn(&mut Step)> {
                    Box::new(move |step| match &mut step.action {
                        Action::Reduce { sources, .. } if at < sources.len() => change(sources, at),
                        _ => {}
                    })
                };
                on_step(
                    "operands swapped",
                    on_sources(|sources, at| {
                        let other = (at + 1) % sources.len();
                        sources.swap(at, other);
                    }),
                );
                on_step(
                    "operand left out",
                    on_sources(|sources, at| {
                        sources.remove(at);
                    }),
                );
                on_step("operand twice", on_sources(|sources, at| sources.insert(at, sources[at])));
            }
        }
        on_step(
            "dependency on itself",
            Box::new(move |step| step.after.push(Dep::Segment { step: index as u32, lag: 0 })),
        );
        all.push((
            "step twice",
            Box::new(move |plan| {
                if let Some(step) = plan.steps.get(index).cloned() {
                    plan.steps.push(step);
                }
            }),
        ));
        for other in index + 1..plan.steps.len() {
            all.push(("messages of two steps swapped", Box::new(move |plan| swap_messages(plan, index, other))));
            all.push(("slices of two sends swapped", Box::new(move |plan| swap_sends(plan, index, other))));
        }
    }
    all
}

/// Two steps that take a message each get the other's number.
fn swap_messages(plan: &mut Steps, a: usize, b: usize) {
    if b >= plan.steps.len() {
        return;
    }
    let takes = |action: &Action| !matches!(action, Action::Send { .. } | Action::Notify { .. });
    if !takes(&plan.steps[a].action) || !takes(&plan.steps[b].action) {
        return;
    }
    let (left, right) = plan.steps.split_at_mut(b);
    let (mut a, mut b) = (messages(&mut left[a].action), messages(&mut right[0].action));
    if let (Some((_, a)), Some((_, b))) = (a.first_mut(), b.first_mut()) {
        std::mem::swap(*a, *b);
    }
}

/// Two sends each get the other's bytes.
fn swap_sends(plan: &mut Steps, a: usize, b: usize) {
    if b >= plan.steps.len() {
        return;
    }
    let (left, right) = plan.steps.split_at_mut(b);
    if let (Action::Send { src: a, .. }, Action::Send { src: b, .. }) = (&mut left[a].action, &mut right[0].action) {
        std::mem::swap(a, b);
    }
}

fn slices(action: &mut Action) -> Vec<&mut Slice> {
    match action {
        Action::Send { src: slice, .. }
        | Action::Recv { dst: slice, .. }
        | Action::Push { src: slice, .. }
        | Action::Pull { dst: slice, .. } => vec![slice],
        Action::Copy { dst, src } => vec![dst, src],
        Action::Reduce { dst, sources, .. } => std::iter::once(dst)
            .chain(sources.iter_mut().filter_map(|source| match source {
                Operand::Local(slice) => Some(slice),
                Operand::Message { .. } => None,
            }))
            .collect(),
        Action::Notify { .. } | Action::Await { .. } => vec![],
    }
}

/// Peers and numbers of the messages of a step.
fn messages(action: &mut Action) -> Vec<(&mut u32, &mut u32)> {
    match action {
        Action::Send { to: peer, message, .. }
        | Action::Recv { from: peer, message, .. }
        | Action::Notify { to: peer, message }
        | Action::Await { from: peer, message } => vec![(peer, message)],
        Action::Copy { .. } | Action::Push { .. } | Action::Pull { .. } => vec![],
        Action::Reduce { sources, .. } => sources
            .iter_mut()
            .filter_map(|source| match source {
                Operand::Message { from, message } => Some((from, message)),
                Operand::Local(_) => None,
            })
            .collect(),
    }
}

/// What a plan means: its instances, each with what it touches and what it waits for.
fn expand(plans: &[Steps]) -> Vec<(u32, u64, Instances)> {
    plans.iter().map(|plan| (plan.messages, plan.scratch_bytes, expand_rank(plan))).collect()
}

/// By step and segment.
type Instances = BTreeMap<(u32, u32), Instance>;

#[derive(Debug, PartialEq, Eq)]
struct Instance {
    action: Action,
    after: BTreeSet<(u32, u32)>,
}

fn expand_rank(plan: &Steps) -> Instances {
    let exists = |step: u32, segment: u32| {
        plan.steps.get(step as usize).is_some_and(|template| {
            let mut action = template.action.clone();
            segment < template.segments && slices(&mut action).iter().all(|slice| slice.segment(segment).1 > 0)
        })
    };
    let mut instances = BTreeMap::new();
    for (step, template) in (0..).zip(&plan.steps) {
        for segment in (0..template.segments).filter(|&segment| exists(step, segment)) {
            let mut action = template.action.clone();
            for slice in slices(&mut action) {
                let (start, len) = slice.segment(segment);
                *slice = Slice { start, len, segment_bytes: len, slots: 0, ..*slice };
            }
            messages(&mut action).into_iter().for_each(|(_, number)| *number += segment);
            let mut after = BTreeSet::new();
            for dep in &template.after {
                match *dep {
                    Dep::All { step } => {
                        let segments = plan.steps.get(step as usize).map_or(0, |template| template.segments);
                        after.extend((0..segments).map(|segment| (step, segment)));
                        // A dependency on a step that is not there is a mistake, not an empty one.
                        after.extend((segments == 0).then_some((step, u32::MAX)));
                    }
                    Dep::Segment { step, lag } => {
                        after.extend(segment.checked_sub(lag).map(|segment| (step, segment)));
                    }
                }
            }
            after.retain(|&(step, segment)| exists(step, segment) || step as usize >= plan.steps.len());
            instances.insert((step, segment), Instance { action, after });
        }
    }
    instances
}
