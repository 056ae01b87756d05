use super::*;
use penstock_plan::{Algorithm, Collective, Placement, Request, Splits, steps};
use std::collections::HashSet;

fn all_reduce(world: u32, bytes: u64) -> Request {
    Request {
        collective: Collective::AllReduce,
        world,
        rank: 0,
        placement: Placement::one_host(world),
        bytes,
        element_bytes: 4,
        splits: None,
        segment_bytes: 1 << 20,
    }
}

/// A frame that does not fit what is kept of its message is refused, and what is kept stays as it is: beside a message that is
/// whole, beside one that came by reference, and outside its message, be it by an element.
#[test]
fn frames_that_do_not_fit_what_is_kept() {
    let frame = |offset, len| Incoming::Frame { offset, len };
    let outside = |offset, len| Some(Misfit::Frame { offset, len });
    let (part, whole) = (&[frame(0, 40)][..], &[frame(0, 100)][..]);
    let reference = &[Incoming::Reference][..];
    // What came before, the frame, and why it is refused.
    let table = [
        (&[][..], frame(0, 40), None),
        (&[], frame(60, 40), None),
        (&[], frame(64, 40), outside(64, 40)),
        (&[], frame(100, 4), outside(100, 4)),
        (&[], frame(104, 0), outside(104, 0)),
        (&[], frame(u64::MAX - 3, 4), outside(u64::MAX - 3, 4)),
        (&[], frame(0, 104), outside(0, 104)),
        (&[], frame(2, 4), outside(2, 4)),
        (&[], frame(0, 6), outside(0, 6)),
        (part, frame(40, 60), None),
        (part, frame(44, 60), outside(44, 60)),
        (whole, frame(0, 40), Some(Misfit::Unknown)),
        (whole, frame(100, 0), Some(Misfit::Unknown)),
        (reference, frame(0, 40), Some(Misfit::Unknown)),
    ];
    let steps = Arc::new(steps(&all_reduce(3, 100), Algorithm::Exchange).expect("a plan"));
    for (before, incoming, refused) in table {
        let (mut operation, mut effects) = (Operation::new(steps.clone(), 4), Vec::new());
        operation.start(&mut effects);
        for earlier in before {
            operation.on_message(1, 0, 100, *earlier, &mut effects).expect("it fits");
        }
        let kept = format!("{:?}", operation.kept.values().collect::<Vec<_>>());
        let taken = operation.on_message(1, 0, 100, incoming, &mut effects);
        assert_eq!(taken.as_ref().err(), refused.as_ref(), "{incoming:?} after {before:?}");
        match taken {
            Ok(verdict) => assert!(matches!(verdict, Verdict::Keep { total: 100, .. }), "{verdict:?}"),
            Err(_) if before.is_empty() => assert!(operation.kept.is_empty()),
            Err(_) => assert_eq!(format!("{:?}", operation.kept.values().collect::<Vec<_>>()), kept),
        }
    }
}

/// A message whose operation does not want it, in every way: not yet, not of this length, twice, from another rank, by
/// another number.
#[test]
fn messages_that_nobody_wants() {
    let steps = Arc::new(steps(&all_reduce(2, 64), Algorithm::Exchange).expect("a plan"));
    let (mut operation, mut effects) = (Operation::new(steps, 4), Vec::new());
    let whole = Incoming::Frame { offset: 0, len: 64 };
    assert_eq!(operation.on_message(1, 0, 64, whole, &mut effects), Err(Misfit::Unknown), "it has not started");
    operation.start(&mut effects);
    let length = Misfit::Length { expected: 64, got: 60 };
    assert_eq!(operation.on_message(1, 0, 60, whole, &mut effects), Err(length));
    assert_eq!(operation.on_message(0, 0, 64, whole, &mut effects), Err(Misfit::Unknown));
    assert_eq!(operation.on_message(1, 7, 64, whole, &mut effects), Err(Misfit::Unknown));
    operation.on_message(1, 0, 64, whole, &mut effects).expect("it fits");
    assert_eq!(operation.on_message(1, 0, 64, whole, &mut effects), Err(Misfit::Unknown), "it is over");
}

/// Ranks that move nothing: every message is a length, in flight.
struct Phantoms {
    steps: Vec<Arc<Steps>>,
    ranks: Vec<Operation>,
    /// By rank: instances that have their result.
    computed: Vec<HashSet<Instance>>,
    /// By rank: bytes that were reduced as they came.
    reduced: Vec<HashMap<Instance, u64>>,
    in_flight: Vec<Flight>,
    rng: fastrand::Rng,
}

struct Flight {
    from: u32,
    to: u32,
    message: u32,
    total: u64,
    parts: Vec<Incoming>,
    /// Its sender hears when it is taken.
    tells: bool,
}

impl Phantoms {
    /// Frames of a message of `total` bytes, in any order, or a reference.
    fn parts(&mut self, total: u64) -> Vec<Incoming> {
        if total > 0 && self.rng.u8(0..4) == 0 {
            return vec![Incoming::Reference];
        }
        let most = if self.rng.bool() { total.max(1) } else { 16 * self.rng.u64(1..4) };
        let mut parts: Vec<_> = (0..total.div_ceil(most).max(1))
            .map(|at| Incoming::Frame { offset: at * most, len: most.min(total - at * most) })
            .collect();
        self.rng.shuffle(&mut parts);
        parts
    }

    fn carry_out(&mut self, rank: usize, effects: Vec<Effect>) {
        let mut effects = VecDeque::from(effects);
        while let Some(effect) = effects.pop_front() {
            let mut more = Vec::new();
            match effect {
                Effect::Compute(instance) => self.compute(rank, instance),
                Effect::Send { to, message, len, .. } => {
                    let tells = self.rng.bool();
                    let parts = self.parts(len);
                    self.in_flight.push(Flight { from: rank as u32, to, message, total: len, parts, tells });
                    if !tells {
                        self.ranks[rank].on_sent(to, message, &mut more);
                    }
                }
                Effect::Doubt { from, message } => self.ranks[rank].on_confirmed(from, message, &mut more),
                Effect::Open { .. } | Effect::Read { .. } => {}
            }
            effects.extend(more);
        }
    }

    /// An instance gets its result: what it depends on has its own, and it has not had one.
    fn compute(&mut self, rank: usize, instance: Instance) {
        self.check_earlier(rank, instance);
        assert!(self.computed[rank].insert(instance), "rank {rank} computes {instance:?} twice");
    }

    fn check_earlier(&self, rank: usize, Instance { step, segment }: Instance) {
        for dep in &self.steps[rank].steps[step as usize].after {
            let (on, segments) = match *dep {
                Dep::Segment { step, lag } if segment >= lag => (step, segment - lag..segment - lag + 1),
                Dep::Segment { .. } => continue,
                Dep::All { step } => (step, 0..self.steps[rank].steps[step as usize].segments),
            };
            for earlier in segments.map(|segment| Instance { step: on, segment }) {
                let exists = earlier.segment < self.steps[rank].steps[on as usize].segments;
                assert!(!exists || self.has_result(rank, earlier), "rank {rank}: {step}/{segment} before {earlier:?}");
            }
        }
    }

    /// Whether an instance has been computed, as far as there is something to compute.
    fn has_result(&self, rank: usize, instance: Instance) -> bool {
        match &self.steps[rank].steps[instance.step as usize].action {
            Action::Copy { dst, .. } => dst.segment(instance.segment).1 == 0 || self.computed[rank].contains(&instance),
            Action::Reduce { dst, .. } => {
                let len = dst.segment(instance.segment).1;
                let reduced = self.reduced[rank].get(&instance).copied().unwrap_or(0);
                self.computed[rank].contains(&instance) != (reduced == len) || len == 0
            }
            _ => true,
        }
    }

    /// One thing that can happen, of all that can.
    fn turn(&mut self) {
        let rank = self.rng.usize(0..self.ranks.len());
        let mut effects = Vec::new();
        if let Some(instance) = self.ranks[rank].next_work() {
            self.compute(rank, instance);
            let read: Vec<(u32, bool)> = match &self.steps[rank].steps[instance.step as usize].action {
                Action::Recv { .. } => vec![(0, self.rng.bool())],
                Action::Reduce { sources, .. } => {
                    let is_message = |(_, source): &(u32, &Operand)| matches!(source, Operand::Message { .. });
                    (0..).zip(sources).filter(is_message).map(|(operand, _)| (operand, self.rng.bool())).collect()
                }
                _ => Vec::new(),
            };
            self.ranks[rank].worked(instance, read, &mut effects);
            return self.carry_out(rank, effects);
        }
        let open: Vec<usize> = (0..self.in_flight.len())
            .filter(|at| {
                let Flight { from, to, message, .. } = &self.in_flight[*at];
                self.ranks[*to as usize].is_open(*from, *message).expect("the plan has it")
            })
            .collect();
        let Some(at) = self.rng.choice(open) else { return };
        let Flight { from, to, message, total, parts, tells } = &mut self.in_flight[at];
        let (from, to, message, total, tells) = (*from, *to as usize, *message, *total, *tells);
        let part = parts.pop().expect("only flights with parts are kept");
        let is_whole = parts.is_empty();
        let part = match part {
            Incoming::Frame { offset, len }
                if self.ranks[to].place(from, message, offset, len, total).is_some() && self.rng.bool() =>
            {
                Incoming::Placed { len }
            }
            part => part,
        };
        let verdict = self.ranks[to].on_message(from, message, total, part, &mut effects).expect("it fits");
        if let (Verdict::Reduce { instance, .. }, Incoming::Frame { len, .. }) = (verdict, part) {
            self.check_earlier(to, instance);
            *self.reduced[to].entry(instance).or_default() += len;
        }
        self.carry_out(to, effects);
        if is_whole {
            self.in_flight.swap_remove(at);
            if tells {
                let mut effects = Vec::new();
                self.ranks[from as usize].on_sent(to as u32, message, &mut effects);
                self.carry_out(from as usize, effects);
            }
        }
    }
}

/// Every plan comes to its end whatever comes when, as frames or by reference, doubtful or not; every instance gets its result
/// once, and not before those that it depends on.
#[test]
fn phantoms_come_to_the_end() {
    let seed = std::env::var("PENSTOCK_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x5eed);
    let mut rng = fastrand::Rng::with_seed(seed);
    println!("PENSTOCK_SEED={seed}");
    let mut runs = 0;
    for _ in 0..400 {
        let world = rng.u32(1..6);
        let root = rng.u32(0..world);
        let collectives = [
            Collective::AllReduce,
            Collective::ReduceScatter,
            Collective::AllGather,
            Collective::Broadcast { root },
            Collective::Reduce { root },
            Collective::Gather { root },
            Collective::Scatter { root },
            Collective::AllToAll,
            Collective::Barrier,
        ];
        let collective = collectives[rng.usize(0..collectives.len())];
        let hosts: Vec<u32> = (0..world).map(|rank| if rng.bool() { 0 } else { rank }).collect();
        let parts = [0, 4, 16, 100, 1 << 19];
        let splits: Vec<Vec<u64>> =
            (0..world).map(|_| (0..world).map(|_| parts[rng.usize(0..parts.len())]).collect()).collect();
        let part = 4 * [0, 1, 5, 64, 1000, 1 << 18][rng.usize(0..6)];
        let segment_bytes = [64, 4096, 1 << 20][rng.usize(0..3)];
        for algorithm in Algorithm::of(collective) {
            let request = |rank: u32| Request {
                collective,
                world,
                rank,
                placement: Placement::new(&hosts),
                bytes: if collective == Collective::Barrier { 0 } else { part * u64::from(world) },
                element_bytes: 4,
                splits: (collective == Collective::AllToAll).then(|| Splits {
                    input: splits[rank as usize].clone(),
                    output: splits.iter().map(|to| to[rank as usize]).collect(),
                }),
                segment_bytes,
            };
            let plans: Result<Vec<_>, _> = (0..world).map(|rank| steps(&request(rank), *algorithm)).collect();
            let Ok(plans) = plans else { continue };
            let plans: Vec<Arc<Steps>> = plans.into_iter().map(Arc::new).collect();
            let instances: u32 = plans.iter().flat_map(|plan| plan.steps.iter().map(|step| step.segments)).sum();
            if instances > 2_000 {
                continue;
            }
            let mut phantoms = Phantoms {
                ranks: plans.iter().map(|steps| Operation::new(steps.clone(), 4)).collect(),
                computed: vec![HashSet::new(); world as usize],
                reduced: vec![HashMap::new(); world as usize],
                steps: plans,
                in_flight: Vec::new(),
                rng: rng.fork(),
            };
            for rank in 0..world as usize {
                let mut effects = Vec::new();
                phantoms.ranks[rank].start(&mut effects);
                phantoms.carry_out(rank, effects);
            }
            let mut turns = 0u64;
            while !phantoms.ranks.iter().all(Operation::is_done) {
                phantoms.turn();
                turns += 1;
                assert!(turns < 1_000_000, "{collective:?} {algorithm:?} {world} {hosts:?} {part} {segment_bytes}");
            }
            assert!(phantoms.in_flight.is_empty());
            for rank in 0..world as usize {
                assert!(phantoms.ranks[rank].awaited().is_empty() && !phantoms.ranks[rank].has_work());
                for (step, template) in (0..).zip(&phantoms.steps[rank].steps) {
                    for instance in (0..template.segments).map(|segment| Instance { step, segment }) {
                        assert!(phantoms.has_result(rank, instance), "{collective:?} {algorithm:?}: {instance:?}");
                    }
                }
            }
            runs += 1;
        }
    }
    assert!(runs > 300, "{runs}");
}
