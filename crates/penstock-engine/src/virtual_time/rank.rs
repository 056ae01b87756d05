//! A rank with the shipped event loop and engine, and a user who follows its steps of a program.

use super::model;
use super::network::{Network, address};
use super::program::{Fault, How, Program, ProgramCall, ProgramGroup, Step, What};
use super::threads::{Baton, Threads};
use crate::engine::{Config, settings};
use crate::recorder::Recorder;
use crate::runtime::{Call, Command, GroupSpec, Runtime, Shared};
use crate::stats::Held;
use crate::ticket::Ticket;
use fastrand::Rng;
use penstock_core::groups::Open;
use penstock_net::memory::MemoryEpoch;
use penstock_net::{Contact, Driver, Loop, Process, Ptracer};
use penstock_plan::{Collective, Thresholds};
use penstock_types::{ChannelId, FailureKind, Generation, GroupId, MILLISECOND, Priority, SECOND, Scope, Time};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::time::Duration;

pub(super) struct Rank<'a> {
    program: &'a Program,
    pub(super) rank: usize,
    /// `None`: its loop has ended, or it was killed.
    pub(super) engine: Option<Engine>,
    pub(super) is_killed: bool,
    /// The processor, or who has stopped the process, has it until then.
    pub(super) busy_until: Time,
    pub(super) user: User,
}

pub(super) struct Engine {
    pub(super) threads: Threads,
    pub(super) the_loop: Arc<Loop<Runtime>>,
    pub(super) shared: Arc<Shared>,
}

/// Follows a rank's steps, as a script does.
pub(super) struct User {
    pub(super) steps: VecDeque<Step>,
    /// When it goes on; `None`: it waits for its engine.
    pub(super) at: Option<Time>,
    waits_for: Option<WaitsFor>,
    pub(super) joins: BTreeMap<usize, (Ticket, Time, bool)>,
    /// When joins ended.
    pub(super) joined: BTreeMap<usize, Time>,
    pub(super) calls: BTreeMap<usize, Issued>,
    /// Groups that have failed, as far as it has seen.
    pub(super) failed: BTreeSet<usize>,
    /// When it left groups and closed channels.
    pub(super) left: BTreeMap<usize, Time>,
    /// Channels that it has opened, also those that it has closed since.
    pub(super) opened: BTreeMap<usize, Opened>,
    /// Calls that have timed out.
    pub(super) timed_out: Vec<usize>,
    pub(super) state: State,
    /// When it told the engine to end.
    pub(super) stopped_at: Option<Time>,
    /// It has seen a failure.
    has_failed: bool,
    /// It has waited until the others have given up.
    was_late: bool,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum WaitsFor {
    Join(usize),
    Call(usize),
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum State {
    Follows,
    Through,
    Stopping,
}

/// A channel that a rank has opened.
pub(super) struct Opened {
    pub(super) at: Time,
    scope: Scope,
    /// Of a vigil: completes when the channel ends.
    pub(super) watch: Option<Ticket>,
    pub(super) told_at: Option<Time>,
}

pub(super) struct Issued {
    pub(super) ticket: Ticket,
    at: Time,
    input: Vec<u8>,
    /// With a guard on both sides.
    output: Vec<u8>,
    /// When it had ended, and was looked at.
    pub(super) over_at: Option<Time>,
}

impl<'a> Rank<'a> {
    pub(super) fn new(program: &'a Program, rank: usize, network: &Network) -> Rank<'a> {
        let config = Config {
            rank: rank as u32,
            host: format!("host-{rank}"),
            generation: Generation(1),
            addresses: Vec::new(),
            ports: 0..=0,
            io_threads: program.threads,
            streams: program.streams,
            streams_within_host: program.streams,
            shared_memory: false,
            ptracer: Ptracer::default(),
            checksum: program.checksum,
            dead_after: Duration::from_secs(4),
            socket_buffer_bytes: 0,
            flight_recorder: None,
        };
        let node = contact(rank).node;
        let shared = Arc::new(Shared::default());
        let recorder = Recorder::new(config.rank, 1, config.host.clone(), None);
        let memory_epoch = Arc::new(MemoryEpoch::new(node));
        let mut settings = settings(&config, node);
        settings.peer.eager_credit_bytes = program.eager_credit_bytes;
        settings.peer.express_from = 2;
        let baton = Baton::new(program.seed ^ rank as u64, program.threads);
        let driver = Driver::played(network.host(rank, baton.clone()), settings).expect("a descriptor");
        let runtime = Runtime::new(shared.clone(), node, memory_epoch, Thresholds::default(), recorder);
        let the_loop = Arc::new(Loop::new(driver, runtime));
        let engine = Engine { threads: Threads::new(program.threads, baton, &the_loop), the_loop, shared };
        let exchanged = |call: usize| match program.wrong {
            Some(wrong) if wrong.rank == rank => match wrong.how {
                How::Order { with } if call == with => wrong.call,
                How::Order { with } if call == wrong.call => with,
                _ => call,
            },
            _ => call,
        };
        let steps = program.steps[rank].iter().map(|step| match *step {
            Step::Issue(call) => Step::Issue(exchanged(call)),
            Step::Hold(call) => Step::Hold(exchanged(call)),
            Step::Release(call) => Step::Release(exchanged(call)),
            Step::Wait(call) => Step::Wait(exchanged(call)),
            step => step,
        });
        let user = User {
            steps: steps.collect(),
            at: Some(Time(0)),
            waits_for: None,
            joins: BTreeMap::new(),
            joined: BTreeMap::new(),
            calls: BTreeMap::new(),
            failed: BTreeSet::new(),
            left: BTreeMap::new(),
            opened: BTreeMap::new(),
            timed_out: Vec::new(),
            state: State::Follows,
            stopped_at: None,
            has_failed: false,
            was_late: false,
        };
        Rank { program, rank, engine: Some(engine), is_killed: false, busy_until: Time(0), user }
    }

    /// When it has something to do.
    pub(super) fn next(&self, network: &Network) -> Time {
        if self.engine.is_none() {
            return Time(u64::MAX);
        }
        let user = self.user.at.unwrap_or(Time(u64::MAX));
        let join = match self.user.waits_for {
            Some(WaitsFor::Join(group)) => match &self.user.joins[&group] {
                (ticket, since, false) if ticket.result().is_none() => since.plus(JOINS_WITHIN),
                _ => Time(u64::MAX),
            },
            _ => Time(u64::MAX),
        };
        self.next_turn(network).min(user).min(join).max(self.busy_until)
    }

    /// When a thread of its loop has something to do.
    pub(super) fn next_turn(&self, network: &Network) -> Time {
        let Some(Engine { threads, .. }) = &self.engine else { return Time(u64::MAX) };
        threads.next().min(network.next(self.rank, |thread| threads.rests_until(thread)))
    }

    fn post(&self, network: &Network, command: Command, ticket: &Ticket) {
        if let Some(engine) = &self.engine {
            engine.shared.post(command, ticket);
            network.wake(self.rank);
        }
    }

    /// Takes the user's steps until it has to wait.
    pub(super) fn act(&mut self, network: &Network, now: Time) {
        self.user.at = None;
        if self.user.state != State::Follows {
            return self.stop(network, now);
        }
        loop {
            if let Some(waits_for) = self.user.waits_for {
                let Some(result) = self.user.ticket(waits_for).and_then(Ticket::result) else { return };
                self.user.waits_for = None;
                if let WaitsFor::Join(group) = waits_for {
                    self.user.joined.insert(group, now);
                }
                if let Err(failure) = result {
                    let group = match waits_for {
                        WaitsFor::Join(group) => group,
                        WaitsFor::Call(call) => self.program.calls[call].group,
                    };
                    self.user.failed.insert(if failure.group_lives { group } else { self.program.home(group) });
                    let is_told = failure.group_lives && self.program.groups[group].is_vigil;
                    self.user.has_failed |= !is_told;
                    if !is_told && !self.program.goes_on {
                        self.user.give_up();
                    }
                }
            }
            let Some(step) = self.user.steps.pop_front() else { break };
            if self.step(step, network, now) {
                return;
            }
        }
        self.user.state = State::Through;
        if self.program.ends_early || self.user.has_failed && !self.program.goes_on {
            self.stop(network, now);
        }
    }

    /// True: the user is busy for a while.
    fn step(&mut self, step: Step, network: &Network, now: Time) -> bool {
        let is_meant = |call: usize, how: How| {
            self.program.wrong.is_some_and(|wrong| (wrong.rank, wrong.call, wrong.how) == (self.rank, call, how))
        };
        match step {
            Step::Issue(call) | Step::Release(call) if is_meant(call, How::Late) && !self.user.was_late => {
                self.user.was_late = true;
                self.user.steps.push_front(step);
                self.user.at = Some(now.plus(LATE));
                return true;
            }
            Step::Begin(group) => self.join(group, network, now),
            Step::Join(group) => {
                if !self.user.joins.contains_key(&group) {
                    self.join(group, network, now);
                }
                self.user.waits_for = Some(WaitsFor::Join(group));
            }
            Step::Issue(call) | Step::Hold(call) => {
                let ProgramCall { group, what, .. } = self.program.calls[call];
                // Without a channel there is nothing to call.
                let is_open = !self.user.left.contains_key(&group)
                    && (self.program.groups[group].channel_of.is_none()
                        || what == What::Open
                        || self.user.opened.contains_key(&group));
                if self.has_failed(group) || !is_open || is_meant(call, How::Skip) {
                    return false;
                }
                if is_meant(call, How::Close) {
                    return self.step(Step::Leave(group), network, now);
                }
                if is_meant(call, How::Leave) {
                    self.user.give_up();
                    return false;
                }
                match what {
                    What::Open => self.open(call, network, now),
                    _ => self.issue(call, matches!(step, Step::Hold(_)), network, now),
                }
            }
            Step::Release(call) => {
                if let Some(issued) = self.user.calls.get(&call) {
                    let home = self.program.home(self.program.calls[call].group);
                    let (group, ticket) = (id(home), issued.ticket.clone());
                    self.post(network, Command::Release(group, ticket.clone()), &ticket);
                }
            }
            Step::Wait(call) => {
                if self.user.calls.contains_key(&call) && !self.has_failed(self.program.calls[call].group) {
                    self.user.waits_for = Some(WaitsFor::Call(call));
                }
            }
            Step::Pause(time) => {
                self.user.at = Some(now.plus(time));
                return true;
            }
            Step::Leave(group) => {
                let is_in = self.user.joins.contains_key(&group) || self.user.opened.contains_key(&group);
                if is_in && !self.user.left.contains_key(&group) {
                    self.user.left.insert(group, now);
                    let home = self.program.home(group);
                    let leaves_group = home != group && self.user.steps.front() == Some(&Step::Leave(home));
                    self.post(network, Command::Leave(self.scope(group), leaves_group), &Ticket::default());
                }
            }
        }
        false
    }

    fn join(&mut self, group: usize, network: &Network, now: Time) {
        let ticket = Ticket::default();
        self.post(network, Command::Join(spec(self.program, group, self.rank), ticket.promise()), &ticket);
        self.user.joins.insert(group, (ticket, now, false));
    }

    /// Whether it has seen that a group or channel has failed.
    fn has_failed(&self, group: usize) -> bool {
        self.user.failed.contains(&group) || self.user.failed.contains(&self.program.home(group))
    }

    fn scope(&self, group: usize) -> Scope {
        self.user.opened.get(&group).map_or_else(|| id(group).into(), |opened| opened.scope)
    }

    /// Opens a channel under the next number that this rank has in the group.
    fn open(&mut self, call: usize, network: &Network, now: Time) {
        let ProgramCall { group, timeout, .. } = self.program.calls[call];
        let ProgramGroup { algorithm, is_vigil, .. } = self.program.groups[group];
        let home = self.program.home(group);
        let earlier = self.user.opened.keys().filter(|other| self.program.home(**other) == home).count();
        let channel = ChannelId(earlier as u32 + 1);
        let scope = Scope { group: id(home), channel };
        let issued =
            Issued { ticket: Ticket::default(), at: now, input: Vec::new(), output: guarded(0), over_at: None };
        let open = Open { channel, name: format!("group {home}/channel {group}").into(), is_vigil, timeout };
        self.post(network, Command::Open(id(home), open, issued.ticket.promise()), &issued.ticket);
        if algorithm.is_some() {
            self.post(
                network,
                Command::Retune(scope, algorithm, usize::from(self.program.streams)),
                &Ticket::default(),
            );
        }
        let watch = is_vigil.then(Ticket::default);
        if let Some(watch) = &watch {
            self.post(network, Command::Watch(scope, watch.promise()), watch);
        }
        self.user.opened.insert(group, Opened { at: now, scope, watch, told_at: None });
        self.user.calls.insert(call, issued);
    }

    fn issue(&mut self, call: usize, hold: bool, network: &Network, now: Time) {
        let part = self.program.part(call, self.rank);
        let place = self.program.place(call, self.rank).expect("it takes part");
        let given = &self.program.calls[call];
        let mut output = guarded(part.output);
        let input = model::contribution(self.program, call, place, part.input);
        if matches!(part.collective, Collective::AllReduce | Collective::Broadcast { .. } | Collective::Reduce { .. }) {
            // In place.
            let own = model::contribution(self.program, call, place, part.output);
            output[GUARD_BYTES..][..part.output].copy_from_slice(&own);
        }
        let mut issued = Issued { ticket: Ticket::default(), at: now, input, output, over_at: None };
        let command = Command::Start(
            self.scope(given.group),
            Call {
                collective: part.collective,
                fingerprint: part.fingerprint,
                dtype: part.dtype,
                op: part.op,
                bytes: part.bytes,
                splits: part.splits,
                input: issued.input.as_ptr(),
                output: issued.output[GUARD_BYTES..].as_mut_ptr(),
                tag: part.tag,
                coflow: 0,
                priority: Priority(given.priority),
                hold,
                timeout: given.timeout,
                keep: None,
            },
            issued.ticket.promise(),
        );
        self.post(network, command, &issued.ticket);
        self.user.calls.insert(call, issued);
    }

    fn stop(&mut self, network: &Network, now: Time) {
        self.user.state = State::Stopping;
        self.user.stopped_at = Some(now);
        let wait = !self.user.has_failed || !self.program.ends_at_once();
        self.post(network, Command::Stop { wait }, &Ticket::default());
    }

    pub(super) fn held(&mut self, network: &Network, now: Time) -> Held {
        let (sender, receiver) = mpsc::channel();
        self.post(network, Command::Stats(sender), &Ticket::default());
        let engine = self.engine.as_mut().expect("it runs");
        engine.threads.go_on();
        // The first of these may end a turn that has read its commands.
        (0..2).for_each(|_| while engine.threads.turn(now) && engine.threads.next() <= now {});
        receiver.try_recv().expect("a turn reads commands").held
    }

    /// Looks at what has ended since the last look.
    pub(super) fn look(&mut self, network: &Network, now: Time, rng: &mut Rng) -> Vec<String> {
        let mut complaints = Vec::new();
        let tolerance = self.program.tolerance();
        let away = self.away();
        for (call, issued) in &mut self.user.calls {
            if issued.over_at.is_some() {
                continue;
            }
            let timeout = self.program.calls[*call].timeout;
            let group = self.program.calls[*call].group;
            match issued.ticket.result() {
                None if now.since(issued.at) > timeout + LATE_AT_MOST + away => {
                    complaints.push(format!("late: call {call} on rank {} has not ended in time", self.rank));
                    issued.over_at = Some(now);
                }
                None => {}
                Some(result) => {
                    issued.over_at = Some(now);
                    match result {
                        Ok(()) => complaints.extend(issued.check(self.program, *call, self.rank)),
                        Err(failure) => {
                            complaints.extend(tolerance.refuses(self.program, group, self.rank, &failure));
                            if failure.kind == FailureKind::Timeout {
                                self.user.timed_out.push(*call);
                            }
                        }
                    }
                    // The buffers are the user's again.
                    issued.input.fill(SCRIBBLE);
                    issued.output.fill(SCRIBBLE);
                }
            }
        }
        for opened in self.user.opened.values_mut() {
            if opened.watch.as_ref().is_some_and(|watch| watch.result().is_some()) {
                opened.told_at.get_or_insert(now);
            }
        }
        for (group, (ticket, since, has_expired)) in &mut self.user.joins {
            match ticket.result() {
                None if !*has_expired && now.since(*since) >= JOINS_WITHIN => {
                    *has_expired = true;
                    let waited = now.since(*since);
                    if let Some(engine) = &self.engine {
                        engine.shared.post(Command::Expire(id(*group).into(), waited), &Ticket::default());
                        network.wake(self.rank);
                    }
                }
                None if now.since(*since) > JOINS_WITHIN + LATE_AT_MOST + SECOND + away => {
                    complaints.push(format!("late: the join of group {group} on rank {} has not ended", self.rank));
                }
                Some(Err(failure)) if !self.user.failed.contains(group) => {
                    complaints.extend(tolerance.refuses(self.program, *group, self.rank, &failure));
                }
                _ => {}
            }
        }
        let is_over = |waits_for| self.user.ticket(waits_for).is_some_and(|ticket| ticket.result().is_some());
        if self.user.at.is_none() && self.user.state == State::Follows && self.user.waits_for.is_none_or(is_over) {
            self.user.at = Some(now.plus(rng.u64(1_000..20_000)));
        }
        complaints
    }

    /// How long a fault stops it, at most.
    fn away(&self) -> u64 {
        match self.program.fault {
            Some((_, Fault::Stop { rank, time })) if rank == self.rank => time,
            Some((_, Fault::StopAll { time })) => time + GO_ON_WITHIN,
            _ => 0,
        }
    }

    /// The loop has ended.
    pub(super) fn ended(&self, now: Time) -> Vec<String> {
        let mut complaints = Vec::new();
        let stopped_at = self.user.stopped_at.unwrap_or(now);
        let longest = self.program.calls.iter().map(|call| call.timeout).max().unwrap_or(0);
        let patience = if self.program.is_right() && self.program.fault.is_none() {
            STOPS_WITHIN
        } else {
            longest.max(STOPS_AFTER_A_FAULT) + LATE_AT_MOST
        };
        if now.since(stopped_at) > patience + self.away() {
            complaints.push(format!(
                "late: the end of rank {} took {:.3} s",
                self.rank,
                now.since(stopped_at) as f64 / 1e9
            ));
        }
        for (call, issued) in &self.user.calls {
            if issued.ticket.result().is_none() {
                complaints.push(format!("hang: call {call} on rank {} has no end", self.rank));
            }
            // To the end, whatever it finds: a loop that may stop early compares one byte at a time.
            let is_scribble = |buffer: &[u8]| buffer.iter().fold(0, |odd, byte| odd | (byte ^ SCRIBBLE)) == 0;
            if issued.over_at.is_some() && !(is_scribble(&issued.input) && is_scribble(&issued.output)) {
                complaints.push(format!("written: a buffer of call {call} on rank {}, after its end", self.rank));
            }
        }
        complaints
    }
}

impl User {
    fn ticket(&self, waits_for: WaitsFor) -> Option<&Ticket> {
        match waits_for {
            WaitsFor::Join(group) => self.joins.get(&group).map(|(ticket, ..)| ticket),
            WaitsFor::Call(call) => self.calls.get(&call).map(|issued| &issued.ticket),
        }
    }

    /// Whether a join waited until its engine gave up its first attempts to connect to a rank that was never there. It cannot know
    /// that the rank has died, and others may wait for the join as long.
    pub(super) fn was_connecting(&self, program: &Program, dead: usize) -> bool {
        let has_it = |group: &usize| program.groups[*group].members.contains(&dead);
        let first = self.joins.iter().filter(|(group, _)| has_it(group)).map(|(_, (_, since, _))| *since).min();
        let mut ended = self.joined.iter().filter(|(group, _)| has_it(group));
        first.is_some_and(|first| ended.any(|(_, at)| CONNECTS_WITHIN.contains(&at.since(first))))
    }

    /// The groups that it is in.
    pub(super) fn groups(&self) -> usize {
        self.joins.keys().filter(|group| !self.left.contains_key(group)).count()
    }

    /// The channels that it has opened and not closed.
    pub(super) fn channels(&self, program: &Program) -> usize {
        self.opened.keys().filter(|channel| self.left_at(program, **channel).is_none()).count()
    }

    /// When it closed a channel, or left its group.
    pub(super) fn left_at(&self, program: &Program, channel: usize) -> Option<Time> {
        [channel, program.home(channel)].iter().filter_map(|group| self.left.get(group)).min().copied()
    }

    /// Leaves all groups.
    fn give_up(&mut self) {
        self.steps =
            self.joins.keys().filter(|group| !self.left.contains_key(group)).map(|g| Step::Leave(*g)).collect();
        self.has_failed = true;
    }
}

impl Issued {
    /// What is wrong with the buffers of an operation that has succeeded.
    fn check(&self, program: &Program, call: usize, rank: usize) -> Vec<String> {
        let mut complaints = Vec::new();
        let place = program.place(call, rank).expect("it took part");
        if program.is_undefined(call, rank) {
            return complaints;
        }
        if self.input != model::contribution(program, call, place, self.input.len()) {
            complaints.push(format!("input: of call {call} on rank {rank} was written"));
        }
        let (before, rest) = self.output.split_at(GUARD_BYTES);
        let (output, after) = rest.split_at(rest.len() - GUARD_BYTES);
        if before.iter().chain(after).any(|byte| *byte != GUARD) {
            complaints.push(format!("guard: beside the output of call {call} on rank {rank} was written"));
        }
        if let Some(expected) = model::result(program, call, place)
            && output != expected
        {
            let at = output.iter().zip(&expected).position(|(got, expected)| got != expected);
            complaints.push(format!("wrong: call {call} on rank {rank}, from byte {at:?} of {}", expected.len()));
        }
        complaints
    }
}

/// Room for an output, with a guard on both sides.
fn guarded(bytes: usize) -> Vec<u8> {
    vec![GUARD; bytes + 2 * GUARD_BYTES]
}

fn contact(rank: usize) -> Contact {
    Contact {
        node: [rank as u8 + 1; 16],
        rank: rank as u32,
        host: format!("host-{rank}"),
        tcp: vec![address(rank)],
        memory_epoch: 0,
        process: Process::default(),
    }
}

fn id(group: usize) -> GroupId {
    GroupId(1000 + group as u64)
}

fn spec(program: &Program, group: usize, rank: usize) -> GroupSpec {
    let given = &program.groups[group];
    let own = given.members.iter().position(|member| *member == rank).expect("members join");
    GroupSpec {
        id: id(group),
        generation: Generation(1),
        rank: own as u32,
        members: given.members.iter().map(|member| contact(*member)).collect(),
        secret: b"secret".to_vec(),
        algorithm: given.algorithm,
        name: format!("group {group}"),
    }
}

/// Ranks that were stopped together go on one after the other.
pub(super) const GO_ON_WITHIN: u64 = 300 * MILLISECOND;
/// Longer than any operation's time-out.
const LATE: u64 = 25 * SECOND;
/// How long an engine tries to connect to a host that refuses: 40 attempts, at most 320 ms apart, of a round trip each.
const CONNECTS_WITHIN: Range<u64> = 11 * SECOND..14 * SECOND;
/// What a user allows a join.
const JOINS_WITHIN: u64 = 20 * SECOND;
/// The engine looks for operations that are late a few times a second; with this, a tick and what ends in its course.
const LATE_AT_MOST: u64 = 1500 * MILLISECOND;
/// Where everybody answers.
const STOPS_WITHIN: u64 = 2200 * MILLISECOND;
/// How long the end waits, at the least, for what peers have not taken: 1.5 times `dead_after`.
const STOPS_AFTER_A_FAULT: u64 = 6 * SECOND;
const GUARD: u8 = 0xa5;
const GUARD_BYTES: usize = 64;
const SCRIBBLE: u8 = 0xee;
