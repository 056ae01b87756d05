//! Ranks of a program on the virtual network, and the faults that meet them.

use super::network::{Death, Network};
use super::program::{Fault, Program};
use super::rank::{Engine, GO_ON_WITHIN, Opened, Rank, State};
use crate::stats::Held;
use fastrand::Rng;
use penstock_types::{Failure, FailureKind, MILLISECOND, SECOND, Time};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Runs a program; returns what was not as it must be, at most a few, each beginning with its kind.
pub(super) fn run(program: &Program) -> Vec<String> {
    let mut world = World::new(program);
    world.run();
    world.complaints
}

/// The same with more faults, in the order of their times.
pub(super) fn run_with(program: &Program, faults: &[(u64, Fault)]) -> Vec<String> {
    let mut world = World::new(program);
    world.faults.extend(faults.iter().map(|(at, fault)| (Time(*at), *fault)));
    world.run();
    world.complaints
}

/// The same as [`run`], with faults that wait until a thread stands still for a while.
pub(super) fn run_at_rests(program: &Program) -> Vec<String> {
    let mut world = World::new(program);
    world.strikes_at_rests = true;
    world.run();
    world.complaints
}

/// Runs a program; what a call has ended with, by rank.
pub(super) fn results(program: &Program, call: usize) -> Vec<Option<Result<(), Failure>>> {
    let mut world = World::new(program);
    world.run();
    assert_eq!(world.complaints, Vec::<String>::new());
    world.ranks.iter().map(|rank| rank.user.calls.get(&call)?.ticket.result()).collect()
}

/// Runs a program; when the ranks' joins ended, by rank and group.
pub(super) fn joined(program: &Program) -> Vec<BTreeMap<usize, Time>> {
    let mut world = World::new(program);
    world.run();
    assert_eq!(world.complaints, Vec::<String>::new());
    world.ranks.into_iter().map(|rank| rank.user.joined).collect()
}

/// Runs a program in which every call ends well; when a call had ended on all its ranks, by call.
pub(super) fn ends(program: &Program) -> Vec<Time> {
    let mut world = World::new(program);
    world.run();
    assert_eq!(world.complaints, Vec::<String>::new());
    let ends = |call| world.ranks.iter().filter_map(move |rank| rank.user.calls.get(&call)?.over_at);
    (0..program.calls.len()).map(|call| ends(call).max().expect("it was made")).collect()
}

struct World<'a> {
    program: &'a Program,
    network: Network,
    now: Time,
    rng: Rng,
    ranks: Vec<Rank<'a>>,
    strikes_at_rests: bool,
    /// When a fault happens next.
    faults: VecDeque<(Time, Fault)>,
    /// They are known: the time that they count from has come.
    has_faults: bool,
    /// All users are through; what the engines hold is looked at then.
    settled_at: Option<Time>,
    complaints: Vec<String>,
}

impl<'a> World<'a> {
    fn new(program: &'a Program) -> World<'a> {
        let network = Network::new(program.seed, program.ranks, program.paths);
        let ranks = (0..program.ranks).map(|rank| Rank::new(program, rank, &network)).collect();
        let mut world = World {
            program,
            network,
            now: Time(0),
            rng: Rng::with_seed(program.seed ^ 0x3017),
            ranks,
            strikes_at_rests: false,
            faults: VecDeque::new(),
            has_faults: false,
            settled_at: None,
            complaints: Vec::new(),
        };
        if !program.strikes_at_end {
            world.schedule_faults();
        }
        world
    }

    fn schedule_faults(&mut self) {
        self.has_faults = true;
        if let Some((after, fault)) = self.program.fault {
            let times = if let Fault::Lose { times, .. } = fault { times } else { 1 };
            let mut at = self.now.plus(after);
            for _ in 0..times {
                self.faults.push_back((at, fault));
                at = at.plus(self.rng.u64(0..50 * MILLISECOND));
            }
        }
    }

    fn run(&mut self) {
        let mut rounds = 0u64;
        while self.complaints.len() < 5 {
            let next = self.next();
            rounds += 1;
            if rounds > MOST_ROUNDS {
                self.complaints.push(format!("rounds: {rounds} until {:.3} s", next.0 as f64 / 1e9));
                break;
            }
            if next > LONGEST {
                break;
            }
            self.now = next;
            self.network.set_now(next);
            let rests = |rank: &Rank<'_>| rank.engine.as_ref().is_some_and(|engine| engine.threads.rest(next) > RESTS);
            if self.strikes_at_rests {
                self.faults.retain(|(at, _)| next.since(*at) < 2 * SECOND);
            }
            if !self.strikes_at_rests || self.ranks.iter().any(rests) {
                while self.faults.front().is_some_and(|(at, _)| *at <= next) {
                    let (_, fault) = self.faults.pop_front().expect("looked at");
                    self.happen(fault);
                }
            }
            for rank in 0..self.ranks.len() {
                if self.ranks[rank].next(&self.network) <= next {
                    self.turn(rank);
                }
            }
            let is_leaving = |rank: &Rank<'_>| !rank.user.left.is_empty() || rank.user.state == State::Stopping;
            if !self.has_faults && self.ranks.iter().any(is_leaving) {
                self.schedule_faults();
            }
            if self.ranks.iter().all(|rank| rank.engine.is_none()) {
                break;
            }
            self.settle();
        }
        // A rank that is gone is missed long before a time-out, unless others wait for a join that waits for it.
        let is_lost = matches!(self.program.fault, Some((_, Fault::Kill { .. } | Fault::Part { .. })));
        let has_expired = self.ranks.iter().flat_map(|rank| rank.user.joins.values()).any(|(.., expired)| *expired);
        let was_connecting = match self.program.fault {
            Some((_, Fault::Kill { rank, .. })) => {
                self.ranks.iter().any(|other| other.user.was_connecting(self.program, rank))
            }
            _ => false,
        };
        let may_wait = has_expired || was_connecting || self.program.wrong.is_some();
        for rank in self.ranks.iter().filter(|_| is_lost && !may_wait) {
            if !rank.user.timed_out.is_empty() {
                let calls = &rank.user.timed_out;
                self.complaints.push(format!("late: calls {calls:?} on rank {} have timed out", rank.rank));
            }
        }
        self.check_vigils();
        for rank in &self.ranks {
            if rank.engine.is_some() && self.complaints.is_empty() {
                let waits: Vec<usize> =
                    rank.user.calls.iter().filter(|(_, i)| i.over_at.is_none()).map(|(c, _)| *c).collect();
                let steps = rank.user.steps.len();
                self.complaints.push(format!("hang: rank {} has {steps} steps left, calls {waits:?}", rank.rank));
            }
        }
        self.check_noticed();
    }

    /// Where nothing else hides it, some rank finds that a rank makes another operation than the others.
    fn check_noticed(&mut self) {
        let program = self.program;
        let Some(wrong) = program.wrong.filter(|_| program.must_be_noticed()) else { return };
        let home = |call: usize| program.home(program.calls[call].group);
        let is_made = |rank: &Rank<'_>| rank.user.calls.contains_key(&wrong.call);
        if self.ranks.iter().filter(|rank| program.takes_part(wrong.call, rank.rank)).any(|rank| !is_made(rank)) {
            return; // while a program is made small
        }
        let mut calls = self.ranks.iter().flat_map(|rank| &rank.user.calls);
        let is_mismatch = |result| matches!(result, Some(Err(Failure { kind: FailureKind::Mismatch, .. })));
        if !calls.any(|(call, issued)| home(*call) == home(wrong.call) && is_mismatch(issued.ticket.result())) {
            self.complaints.push(format!("unnoticed: call {} on rank {} is wrong", wrong.call, wrong.rank));
        }
    }

    /// Each rank hears soon that another has closed a vigil, and only then.
    fn check_vigils(&mut self) {
        let vigils = (0..self.program.groups.len()).filter(|group| self.program.groups[*group].is_vigil);
        for vigil in vigils.filter(|_| self.program.fault.is_none()) {
            let never = Time(u64::MAX / 2);
            let left = |rank: &Rank<'_>| {
                let ends = [rank.user.left_at(self.program, vigil), rank.user.stopped_at];
                ends.into_iter().flatten().min().unwrap_or(never)
            };
            for member in &self.program.groups[vigil].members {
                let rank = &self.ranks[*member];
                let Some(Opened { at, watch: Some(watch), told_at, .. }) = rank.user.opened.get(&vigil) else {
                    continue;
                };
                let others = self.program.groups[vigil].members.iter().filter(|other| *other != member);
                let first = others.map(|other| left(&self.ranks[*other])).min().unwrap_or(never);
                let ends_itself = ["the channel was closed.", "the group was destroyed.", "the engine has stopped"];
                let complaint = match watch.result() {
                    Some(Err(failure)) if failure.kind == FailureKind::PeerLost && failure.group_lives => {
                        told_at.is_none_or(|told| told < first).then(|| format!("of what has not happened: {failure}"))
                    }
                    Some(Err(failure)) if !ends_itself.contains(&&*failure.message) => None,
                    _ => (left(rank) > first.max(*at).plus(TOLD_WITHIN)).then(|| "nothing".to_owned()),
                };
                self.complaints
                    .extend(complaint.map(|what| format!("vigil: rank {member} is told in {vigil}: {what}")));
            }
        }
    }

    fn next(&self) -> Time {
        let ranks = self.ranks.iter().map(|rank| rank.next(&self.network)).min();
        let fault = self.faults.front().filter(|(at, _)| *at > self.now).map_or(Time(u64::MAX), |(at, _)| *at);
        let settled = self.settled_at.map_or(Time(u64::MAX), |at| at);
        ranks.expect("some").min(fault).min(settled).max(self.now)
    }

    fn happen(&mut self, fault: Fault) {
        match fault {
            Fault::Lose { ranks, which, skew, .. } => self.network.lose(ranks, which, skew),
            Fault::Stall { ranks, which, time } => self.network.stall(ranks, which, time),
            Fault::Part { ranks, time } => self.network.part(ranks, time),
            Fault::Stop { rank, time } => self.ranks[rank].busy_until = self.now.plus(time),
            Fault::StopAll { time } => {
                for rank in &mut self.ranks {
                    rank.busy_until = self.now.plus(time + self.rng.u64(0..GO_ON_WITHIN));
                }
            }
            Fault::Kill { rank, death } => self.kill(rank, death),
        }
    }

    fn kill(&mut self, rank: usize, death: Death) {
        self.network.die(rank, death);
        self.ranks[rank].engine = None;
        self.ranks[rank].is_killed = true;
    }

    fn turn(&mut self, rank: usize) {
        let now = self.now;
        let rank = &mut self.ranks[rank];
        if rank.user.at.is_some_and(|at| at <= now) {
            rank.act(&self.network, now);
        }
        let is_due = rank.next_turn(&self.network) <= now;
        let Some(engine) = &mut rank.engine else { return };
        if is_due {
            let goes_on = engine.threads.turn(now);
            rank.busy_until = now.plus(self.rng.u64(1_000..20_000));
            if !goes_on {
                let Engine { threads, the_loop, shared } = rank.engine.take().expect("it has just run");
                drop(threads);
                the_loop.finish();
                let failure = Failure::fatal(FailureKind::Closed, "the engine has stopped");
                shared.close(&failure);
                let (driver, runtime) = Arc::into_inner(the_loop).expect("its threads have ended").into_parts();
                drop(driver);
                runtime.end(&failure);
                self.network.die(rank.rank, Death::Closes);
                self.complaints.extend(rank.ended(now));
            }
        }
        self.complaints.extend(rank.look(&self.network, now, &mut self.rng));
    }

    /// When all users are through, the engines are given some time to tell each other the last, then they must hold nothing.
    fn settle(&mut self) {
        let through = |rank: &Rank<'_>| rank.engine.is_none() || rank.user.state != State::Follows;
        if self.program.ends_early || !self.faults.is_empty() || !self.ranks.iter().all(through) {
            return;
        }
        // From when nobody is stopped.
        let runs_from = self.ranks.iter().map(|rank| rank.busy_until).fold(self.now, Time::max);
        let at = *self.settled_at.get_or_insert(runs_from.plus(SETTLES_WITHIN));
        if self.now < at {
            return;
        }
        self.settled_at = Some(Time(u64::MAX));
        let is_whole = self.ranks.iter().all(|rank| rank.engine.is_some() && rank.user.state == State::Through);
        let may_lose = self.program.tolerance().may_lose;
        for rank in &mut self.ranks {
            if rank.engine.is_none() || rank.user.state != State::Through {
                continue;
            }
            if is_whole && !may_lose {
                let held = rank.held(&self.network, self.now);
                let groups = rank.user.groups() as u64;
                // A group that has failed opens no channel.
                let has_failed = rank.user.failed.iter().any(|group| self.program.home(*group) == *group);
                let channels = if has_failed { held.channels } else { rank.user.channels(self.program) as u64 };
                if held
                    != (Held {
                        groups,
                        channels,
                        closed_ranges: held.closed_ranges,
                        jobs: held.jobs,
                        ..Held::default()
                    })
                    || held.jobs as usize > self.program.ranks
                {
                    self.complaints.push(format!("held: by rank {} at the end: {held:?}", rank.rank));
                }
            }
            let at = self.now.plus(self.rng.u64(0..20 * MILLISECOND));
            rank.user.at = Some(at);
        }
    }
}

/// No program takes longer than this, whatever happens in it.
const LONGEST: Time = Time(600 * SECOND);
/// Nor more turns of its loops.
const MOST_ROUNDS: u64 = 200_000;
/// Credit comes back with the next heartbeat, at the latest.
const SETTLES_WITHIN: u64 = 3 * SECOND;
/// A thread that stands still for longer is met by a fault that waits for one.
const RESTS: u64 = 20 * MILLISECOND;
/// Without faults, what a rank says is heard a few delays later.
const TOLD_WITHIN: u64 = SECOND;
