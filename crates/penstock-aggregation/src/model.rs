//! Every interleaving of a small system: two workers, a window of two, three SeqNums that wrap around 2^32, an aggregator,
//! a server; or an aggregator above an aggregator and a worker. (Also a window of one and two SeqNums, which is small enough for
//! several faults.)
//!
//! A state is what the machines hold and which packets are on their way, in no order: any of them may arrive next. When
//! none is on its way, any time-out or heartbeat may fire. Besides, as many faults happen as the scope allows, of any
//! kind, in any place: a packet is lost, or arrives and stays (is doubled), an aggregator restarts empty, a time-out or
//! a heartbeat fires although packets are on their way. States are told apart by 64 bits of SipHash.
//!
//! Where results come apart from the blocks, somebody also ends the work behind any whole buffer, at any time and in any order.
//!
//! In each state no result is wrong, none is delivered or committed twice; and from each state, with all that is on its
//! way lost, time-outs and heartbeats alone lead to the end. Without any one rule that is not so.

mod build;
mod scope;
mod shape;

use super::packet::{Format, HEADER_BYTES, Header, Kind, decode};
use super::rules::{Rule, Rules};
use super::*;
use build::{block, new_aggregator, new_server, new_worker};
use penstock_types::Time;
use scope::{Kinds, Scope, Story};
use shape::Shape;
use siphasher::sip::SipHasher13;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::rc::Rc;

const WORKERS: [Endpoint; 2] = [Endpoint(0), Endpoint(1)];
/// The aggregator above worker 0.
const RACK: Endpoint = Endpoint(2);
/// In a [`Shape::Row`] and a [`Shape::Chain`], the aggregator above that.
const ROW: Endpoint = Endpoint(3);
const NOW: Time = Time(0);
const JOB: u32 = 1;
/// Of this many transitions that are looked up, one is executed as well and must lead to the same state: a digest that lacks
/// something that decides would merge states that differ.
const CHECKED_SHARE: u64 = 16;

/// A packet in flight. States share it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Flying {
    to: Endpoint,
    from: Endpoint,
    bytes: Box<[u8]>,
    digest: u64,
}

impl Flying {
    fn new(to: Endpoint, from: Endpoint, bytes: &[u8]) -> Rc<Flying> {
        let digest = digest_of(|state| (to, from, bytes).hash(state));
        Rc::new(Flying { to, from, bytes: bytes.into(), digest })
    }
}

/// A machine in one state. The states of the system in which it is in that state share it.
struct Snapshot {
    machine: Machine,
    digest: u64,
}

#[derive(Clone)]
enum Machine {
    Worker(Box<Worker>),
    Aggregator(Aggregator),
    Server(Box<Server>),
}

/// What happens to one machine.
#[derive(Clone, Debug)]
enum Input {
    /// The machine starts in this epoch. A worker posts its blocks.
    Begin(u16),
    Arrive(Rc<Flying>),
    Expire(Serial),
    Heartbeat,
    Lost(bool),
    /// A worker requests this number of the pull flow.
    Pull(Serial),
    /// The work behind the whole buffer with this place ends; whether it fails.
    Work(usize, bool),
}

/// What a machine does then.
#[derive(Debug, PartialEq, Eq)]
enum Effect {
    Send(Rc<Flying>),
    /// A worker sends its block.
    Push(Serial, Rc<Flying>),
    /// A worker delivers this sum.
    Deliver(Serial, i32),
    /// A worker hears that the work behind the buffer that begins with this block failed.
    Fail(Serial),
    /// The server holds more blocks than its limit.
    Overrun(u32),
    Commit(Serial),
}

/// What each machine does in each of its states. There are few of these, and the states of the system consist of them, so a
/// transition of the system is a look-up.
type Steps = HashMap<(usize, u64, u64), (Rc<Snapshot>, Rc<[Effect]>)>;

#[derive(Clone)]
struct World {
    scope: Scope,
    /// By endpoint.
    snapshots: Vec<Rc<Snapshot>>,
    epochs: Vec<u16>,
    cut: bool,
    faults_left: u8,
    /// In order, each once.
    flying: Vec<Rc<Flying>>,
    /// Of the current epoch: for each worker the results that were delivered; last, what the server committed.
    done: [u8; 3],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Arrive(usize),
    ArriveAndStay(usize),
    Lose(usize),
    Expire(usize, Serial),
    Pull(usize, Serial),
    Work(usize),
    Heartbeat(usize),
    Restart(usize),
    NextEpoch(usize),
    Cut,
    NoticeCut(usize),
}

impl World {
    fn new(scope: Scope, steps: &mut Steps) -> World {
        let mut world = World {
            scope,
            snapshots: (0..scope.shape.nodes()).map(|i| Rc::new(Snapshot::new(scope, i, 0))).collect(),
            epochs: vec![0; scope.shape.nodes()],
            cut: false,
            faults_left: scope.faults,
            flying: Vec::new(),
            done: [0; 3],
        };
        for i in 0..2 {
            world.step(steps, i, Input::Begin(0)).expect("nothing is delivered yet");
        }
        world
    }

    fn events(&self) -> Vec<Event> {
        let mut events: Vec<Event> = (0..self.flying.len()).map(Event::Arrive).collect();
        if self.faults_left > 0 {
            events.extend((0..self.flying.len()).map(Event::Lose));
            if self.scope.kinds != Kinds::Losses {
                events.extend((0..self.flying.len()).map(Event::ArriveAndStay));
            }
            events.extend((2..self.server()).map(Event::Restart));
        }
        if self.flying.is_empty() || (self.faults_left > 0 && self.scope.kinds == Kinds::All) {
            for i in 0..2 {
                events.extend(self.outstanding(i).into_iter().map(|seq| Event::Expire(i, seq)));
                events.extend(self.unpulled(i).into_iter().map(|number| Event::Pull(i, number)));
                events.push(Event::Heartbeat(i));
            }
            events.push(Event::Heartbeat(self.server()));
        }
        events.extend(self.workable().into_iter().map(Event::Work));
        if self.scope.story == Story::Epochs {
            let nodes = 0..self.epochs.len();
            events.extend(nodes.filter(|i| self.epochs[*i] == 0).map(Event::NextEpoch));
        }
        if self.cut {
            events.extend(self.noticing().iter().copied().map(Event::NoticeCut));
        } else if !self.noticing().is_empty() {
            events.push(Event::Cut);
        }
        events
    }

    /// The workers that notice what is cut or dead in this story.
    fn noticing(&self) -> &'static [usize] {
        match self.scope.story {
            Story::Plain | Story::Epochs | Story::Late | Story::Fails => &[],
            Story::Cut => &[0],
            Story::CutAbove | Story::Dead => &[1],
            Story::AllDead => &[0, 1],
        }
    }

    /// Whether nothing passes between two nodes once something is cut or dead.
    fn is_cut(&self, ends: [Endpoint; 2]) -> bool {
        match self.scope.story {
            Story::Plain | Story::Epochs | Story::Late | Story::Fails => false,
            Story::Cut => ends.contains(&WORKERS[0]) && ends.contains(&RACK),
            Story::CutAbove => ends.contains(&WORKERS[1]) && ends.contains(&ROW),
            Story::Dead => ends.contains(&ROW),
            Story::AllDead => ends.contains(&ROW) || ends.contains(&RACK),
        }
    }

    fn server(&self) -> usize {
        self.scope.shape.nodes() - 1
    }

    fn outstanding(&self, i: usize) -> Vec<Serial> {
        match &self.snapshots[i].machine {
            Machine::Worker(worker) => worker.outstanding(),
            _ => Vec::new(),
        }
    }

    fn unpulled(&self, i: usize) -> Vec<Serial> {
        match &self.snapshots[i].machine {
            Machine::Worker(worker) => worker.unpulled(),
            _ => Vec::new(),
        }
    }

    /// The places of the whole buffers whose work may end.
    fn workable(&self) -> Vec<usize> {
        let Machine::Server(server) = &self.snapshots[self.server()].machine else { return Vec::new() };
        let never = |first: Serial| self.scope.story == Story::Late && first == self.scope.start;
        let all = server.whole_buffers().into_iter().enumerate();
        all.filter(|(_, first)| !never(*first)).map(|(place, _)| place).collect()
    }

    /// Whether the work behind a whole buffer fails.
    fn fails(&self, place: usize) -> bool {
        let Machine::Server(server) = &self.snapshots[self.server()].machine else { return false };
        self.scope.story == Story::Fails && server.whole_buffers()[place] == self.scope.start
    }

    fn is_fault(&self, event: Event) -> bool {
        match event {
            Event::ArriveAndStay(_) | Event::Lose(_) | Event::Restart(_) => true,
            Event::Expire(..) | Event::Pull(..) | Event::Heartbeat(_) => !self.flying.is_empty(),
            Event::Work(_) | Event::Arrive(_) | Event::NextEpoch(_) | Event::Cut | Event::NoticeCut(_) => false,
        }
    }

    /// An event of the system; an error names the invariant that broke.
    fn apply(&mut self, steps: &mut Steps, event: Event) -> Result<(), String> {
        if self.is_fault(event) {
            self.faults_left = self.faults_left.saturating_sub(1);
        }
        match event {
            Event::Arrive(i) => {
                let packet = self.flying.remove(i);
                self.arrive(steps, packet)
            }
            Event::ArriveAndStay(i) => self.arrive(steps, self.flying[i].clone()),
            Event::Lose(i) => {
                self.flying.remove(i);
                Ok(())
            }
            Event::Expire(i, seq) => self.step(steps, i, Input::Expire(seq)),
            Event::Pull(i, number) => self.step(steps, i, Input::Pull(number)),
            Event::Work(place) => self.step(steps, self.server(), Input::Work(place, self.fails(place))),
            Event::Heartbeat(i) => self.step(steps, i, Input::Heartbeat),
            Event::Restart(i) => self.step(steps, i, Input::Begin(self.epochs[i])),
            Event::NextEpoch(i) => {
                self.epochs[i] += 1;
                match i {
                    0 | 1 => self.done[i] = 0,
                    _ if i == self.server() => self.done[2] = 0,
                    _ => {}
                }
                self.step(steps, i, Input::Begin(self.epochs[i]))
            }
            Event::Cut => {
                self.cut = true;
                Ok(())
            }
            Event::NoticeCut(i) => self.step(steps, i, Input::Lost(true)),
        }
    }

    fn arrive(&mut self, steps: &mut Steps, packet: Rc<Flying>) -> Result<(), String> {
        if self.cut && self.is_cut([packet.to, packet.from]) {
            return Ok(());
        }
        self.step(steps, packet.to.0 as usize, Input::Arrive(packet))
    }

    /// An event of one machine, and its effects.
    fn step(&mut self, steps: &mut Steps, i: usize, input: Input) -> Result<(), String> {
        let snapshot = &self.snapshots[i];
        let key = (i, snapshot.digest, input.digest());
        let (after, effects) = steps.entry(key).or_insert_with(|| snapshot.step(self.scope, i, &input)).clone();
        if (key.1 ^ key.2).is_multiple_of(CHECKED_SHARE) {
            let (again, same) = snapshot.step(self.scope, i, &input);
            assert_eq!((again.digest, same), (after.digest, effects.clone()), "its digest lacks something: {input:?}");
        }
        self.snapshots[i] = after;
        for effect in &*effects {
            match effect {
                Effect::Send(packet) => self.fly(packet),
                Effect::Push(seq, packet) => {
                    if self.done[i] & self.bit(*seq) != 0 {
                        return Err(format!("worker {i} pushes {seq} after its result, when the block is gone"));
                    }
                    self.fly(packet);
                }
                Effect::Deliver(seq, value) => {
                    self.mark(i, *seq)?;
                    let blocks = (0..2).map(|w| block(self.scope, self.epochs[i], w, *seq));
                    let expected = blocks.fold(0, i32::wrapping_add);
                    if *value != expected {
                        return Err(format!("worker {i} got {value} for {seq} instead of {expected}"));
                    }
                }
                Effect::Commit(seq) => self.mark(2, *seq)?,
                Effect::Fail(first) => {
                    for seq in self.scope.buffer_from(*first) {
                        self.mark(i, seq)?;
                    }
                }
                Effect::Overrun(count) => return Err(format!("the server holds {count} blocks")),
            }
        }
        Ok(())
    }

    fn bit(&self, seq: Serial) -> u8 {
        1 << seq.ahead_of(self.scope.start).clamp(0, 7)
    }

    /// Each worker delivers, and the server commits, each SeqNum once.
    fn mark(&mut self, who: usize, seq: Serial) -> Result<(), String> {
        let bit = self.bit(seq);
        if self.done[who] & bit != 0 {
            let who = ["worker 0 delivered", "worker 1 delivered", "the server committed"][who];
            return Err(format!("{who} {seq} twice"));
        }
        self.done[who] |= bit;
        Ok(())
    }

    fn fly(&mut self, packet: &Rc<Flying>) {
        if let Err(place) = self.flying.binary_search(packet) {
            self.flying.insert(place, packet.clone());
        }
    }

    /// A hash of the machines' states.
    fn holdings(&self) -> SipHasher13 {
        let mut state = SipHasher13::new();
        self.snapshots.iter().for_each(|snapshot| snapshot.digest.hash(&mut state));
        (&self.epochs, self.cut, self.done).hash(&mut state);
        state
    }

    fn fingerprint(&self) -> u64 {
        let mut state = self.holdings();
        self.flying.iter().for_each(|packet| packet.digest.hash(&mut state));
        self.faults_left.hash(&mut state);
        state.finish()
    }

    fn is_complete(&self) -> bool {
        let all = (1u8 << self.scope.blocks) - 1;
        let late = self.scope.buffer_from(self.scope.start).map(|seq| self.bit(seq)).sum::<u8>();
        let got = if self.scope.story == Story::Late { all & !late } else { all };
        self.done == [got, got, all] && self.epochs.iter().all(|epoch| *epoch == self.epochs[0])
    }

    /// Whether the system reaches its end when everything in flight is lost and no fault follows: every time-out and heartbeat
    /// fires in turn, and every packet arrives once, in order.
    fn completes(&self, steps: &mut Steps) -> Result<bool, String> {
        let mut world = self.clone();
        world.flying.clear();
        if world.epochs.contains(&1) {
            for i in 0..world.epochs.len() {
                if world.epochs[i] == 0 {
                    world.apply(steps, Event::NextEpoch(i))?;
                }
            }
        }
        // Two rounds an event of the slowest path are plenty: it either ends or repeats itself.
        for _ in 0..16 {
            for i in world.noticing() {
                world.step(steps, *i, Input::Lost(world.cut))?;
            }
            for i in 0..2 {
                for seq in world.outstanding(i) {
                    world.step(steps, i, Input::Expire(seq))?;
                }
                for number in world.unpulled(i) {
                    world.step(steps, i, Input::Pull(number))?;
                }
                world.step(steps, i, Input::Heartbeat)?;
            }
            let server = world.server();
            while let Some(place) = world.workable().first().copied() {
                world.apply(steps, Event::Work(place))?;
            }
            world.step(steps, server, Input::Heartbeat)?;
            let mut queue: VecDeque<Rc<Flying>> = std::mem::take(&mut world.flying).into();
            while let Some(packet) = queue.pop_front() {
                world.arrive(steps, packet)?;
                queue.extend(std::mem::take(&mut world.flying));
            }
            if world.is_complete() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl Input {
    fn digest(&self) -> u64 {
        digest_of(|state| match self {
            Input::Begin(epoch) => (0, *epoch).hash(state),
            Input::Arrive(packet) => (1, packet.digest).hash(state),
            Input::Expire(seq) => (2, *seq).hash(state),
            Input::Heartbeat => 3.hash(state),
            Input::Lost(lost) => (4, *lost).hash(state),
            Input::Pull(number) => (5, *number).hash(state),
            Input::Work(place, fails) => (6, *place, *fails).hash(state),
        })
    }
}

impl Snapshot {
    fn new(scope: Scope, i: usize, epoch: u16) -> Snapshot {
        Snapshot::of(match i {
            0 | 1 => Machine::Worker(Box::new(new_worker(scope, i, epoch))),
            _ if i + 1 == scope.shape.nodes() => Machine::Server(Box::new(new_server(scope, epoch))),
            _ => Machine::Aggregator(new_aggregator(scope, i, epoch)),
        })
    }

    fn of(machine: Machine) -> Snapshot {
        let digest = digest_of(|state| match &machine {
            Machine::Worker(worker) => worker.digest(state),
            Machine::Aggregator(aggregator) => aggregator.digest(state),
            Machine::Server(server) => server.digest(state),
        });
        Snapshot { machine, digest }
    }

    fn step(&self, scope: Scope, i: usize, input: &Input) -> (Rc<Snapshot>, Rc<[Effect]>) {
        let mut effects = Vec::new();
        let mut machine = match input {
            Input::Begin(epoch) => Snapshot::new(scope, i, *epoch).machine,
            _ => self.machine.clone(),
        };
        match &mut machine {
            Machine::Worker(worker) => step_worker(scope, i, worker, input, &mut effects),
            Machine::Aggregator(aggregator) => step_aggregator(scope, i, aggregator, input, &mut effects),
            Machine::Server(server) => step_server(scope, server, input, &mut effects),
        }
        (Rc::new(Snapshot::of(machine)), effects.into())
    }
}

fn step_worker(scope: Scope, i: usize, worker: &mut Worker, input: &Input, effects: &mut Vec<Effect>) {
    match input {
        Input::Begin(_) => {
            for _ in 0..scope.blocks {
                worker.post(Route::Tree).expect("two windows hold them all");
            }
        }
        Input::Arrive(packet) => {
            let received = worker.handle_packet(NOW, packet.from, &packet.bytes);
            if let Ok(Received::Result { seq, format: Format::Text, .. }) = received {
                effects.push(Effect::Fail(seq));
            } else if let Ok(Received::Result { seq, payload, .. }) = received {
                effects.push(Effect::Deliver(seq, i32::from_be_bytes(payload.try_into().expect("one element"))));
            }
        }
        Input::Expire(seq) => worker.expire(*seq),
        Input::Heartbeat => worker.heartbeat_now(),
        Input::Lost(lost) => worker.set_lost(*lost),
        Input::Pull(number) => worker.pull_now(*number),
        Input::Work(..) => {}
    }
    while let Some(out) = worker.poll_transmit(NOW) {
        let seq = out.header.seq;
        effects.push(if out.header.kind == Kind::Push {
            let block = block(scope, out.header.epoch, i, seq).to_be_bytes();
            let flags = out.header.flags | if scope.is_last(seq) { FLAG_LAST } else { 0 };
            let header = Header { flags, ..out.header };
            let bytes = [&worker.seal(&header, Format::I32, 0, &block)[..], &block].concat();
            Effect::Push(seq, Flying::new(out.to, WORKERS[i], &bytes))
        } else {
            Effect::Send(Flying::new(out.to, WORKERS[i], &worker.seal(&out.header, Format::None, 0, &[])))
        });
    }
}

fn step_aggregator(scope: Scope, i: usize, aggregator: &mut Aggregator, input: &Input, effects: &mut Vec<Effect>) {
    let Input::Arrive(packet) = input else { return };
    let Header { seq, epoch, .. } = decode(&packet.bytes).expect("ours").header;
    let mut completed = false;
    let mut send = |to: &[Endpoint], bytes: &[u8]| {
        effects.extend(to.iter().map(|to| Effect::Send(Flying::new(*to, Endpoint(i as u32), bytes))));
    };
    match aggregator.handle_packet(packet.from, &packet.bytes) {
        Ok(Action::Send { to, header, payload }) => {
            completed = !payload.is_empty();
            send(to, &[&header[..], payload].concat());
        }
        Ok(Action::Relay { to }) => send(to, &packet.bytes),
        Ok(Action::Nothing) | Err(_) => {}
    }
    if completed && !scope.rules.hold(Rule::Commit) {
        // What SwitchML's switch and LuWu's resends rely upon: a complete slot counts as committed.
        let (ack, credit) = (seq.plus(1), seq.plus(scope.window));
        let (kind, format) = (Kind::HeartbeatDown, Format::None);
        let header = Header { kind, job: JOB, epoch, format, flags: 0, seq, ack, credit, exponent: 0, workers: 0 };
        send(&WORKERS, header.encode(&[], None).as_slice());
    }
}

fn step_server(scope: Scope, server: &mut Server, input: &Input, effects: &mut Vec<Effect>) {
    match input {
        Input::Arrive(packet) => {
            if let Ok(Some(seq)) = server.handle_packet(NOW, packet.from, &packet.bytes) {
                effects.push(Effect::Commit(seq));
            }
        }
        Input::Heartbeat => server.heartbeat_now(),
        Input::Work(place, fails) => {
            assert!(server.work_on(*place, |buffer| if *fails { Err("it is late".into()) } else { Ok(buffer.bytes) }));
        }
        Input::Begin(_) | Input::Expire(_) | Input::Lost(_) | Input::Pull(_) => {}
    }
    if let Some((count, limit)) = server.held()
        && count > limit
    {
        effects.push(Effect::Overrun(count));
    }
    while let Some(out) = server.poll_transmit() {
        let bytes = [&out.header[..], out.payload].concat();
        effects.push(Effect::Send(Flying::new(out.to, scope.shape.server(), &bytes)));
    }
}

fn digest_of(add: impl FnOnce(&mut SipHasher13)) -> u64 {
    let mut state = SipHasher13::new();
    add(&mut state);
    state.finish()
}

/// The result of exploring a scope.
struct Explored {
    states: usize,
    /// The invariant that broke, and the shortest way there.
    broken: Option<(String, Vec<String>)>,
}

/// Breadth first, so that what breaks is found by the shortest way.
fn explore(scope: Scope) -> Explored {
    let mut steps = Steps::new();
    let root = World::new(scope, &mut steps);
    let mut came_from: HashMap<u64, (u64, u16)> = HashMap::new();
    let mut completing: HashSet<u64> = HashSet::new();
    came_from.insert(root.fingerprint(), (0, 0));
    let mut frontier = vec![(root.fingerprint(), root)];
    while !frontier.is_empty() {
        let mut next = Vec::new();
        for (here, world) in frontier {
            if completing.insert(world.holdings().finish()) {
                match world.completes(&mut steps) {
                    Ok(true) => {}
                    Ok(false) => return broken(scope, &came_from, here, None, "stuck: the end is out of reach"),
                    Err(what) => return broken(scope, &came_from, here, None, &what),
                }
            }
            for (i, event) in world.events().into_iter().enumerate() {
                let mut after = world.clone();
                if let Err(what) = after.apply(&mut steps, event) {
                    return broken(scope, &came_from, here, Some(event), &what);
                }
                let there = after.fingerprint();
                if let std::collections::hash_map::Entry::Vacant(new) = came_from.entry(there) {
                    new.insert((here, i as u16));
                    next.push((there, after));
                }
            }
        }
        frontier = next;
    }
    Explored { states: came_from.len(), broken: None }
}

fn broken(scope: Scope, came_from: &HashMap<u64, (u64, u16)>, at: u64, last: Option<Event>, what: &str) -> Explored {
    let mut choices = Vec::new();
    let mut at = at;
    while let Some((before, choice)) = came_from.get(&at).filter(|(before, _)| *before != 0) {
        choices.push(*choice);
        at = *before;
    }
    let mut steps = Steps::new();
    let mut world = World::new(scope, &mut steps);
    let mut lines = Vec::new();
    for choice in choices.into_iter().rev() {
        let event = world.events()[usize::from(choice)];
        lines.push(world.describe(event));
        world.apply(&mut steps, event).expect("it went well the first time");
    }
    lines.extend(last.map(|event| world.describe(event)));
    Explored { states: came_from.len(), broken: Some((what.to_string(), lines)) }
}

impl World {
    fn describe(&self, event: Event) -> String {
        match event {
            Event::Arrive(i) | Event::ArriveAndStay(i) | Event::Lose(i) => {
                let packet = &self.flying[i];
                let Header { kind, seq, ack, credit, workers, epoch, .. } = decode(&packet.bytes).expect("ours").header;
                let word = format!("{event:?}").replace(|c: char| !c.is_alphabetic(), "");
                let block = &packet.bytes[HEADER_BYTES..];
                let Flying { from, to, .. } = &**packet;
                format!(
                    "{word} {from:?}->{to:?} {kind:?} {seq} ack {ack} credit {credit} workers {workers:b} epoch {epoch} {block:?}"
                )
            }
            other => format!("{other:?}"),
        }
    }
}

#[cfg(test)]
mod tests;
