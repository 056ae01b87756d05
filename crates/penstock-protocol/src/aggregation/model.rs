//! Every interleaving of a small system: two workers, a window of two, three SeqNums that wrap around 2^32, an aggregator,
//! a server. (Also a window of one and two SeqNums, which is small enough for several faults.)
//!
//! A state is what the machines hold and which packets are on their way, in no order: any of them may arrive next. When
//! none is on its way, any time-out or heartbeat may fire. Besides, as many faults happen as the scope allows, of any
//! kind, in any place: a packet is lost, or arrives and stays (is doubled), the aggregator restarts empty, a time-out or
//! a heartbeat fires although packets are on their way. States are told apart by 64 bits of SipHash.
//!
//! In each state no result is wrong, none is delivered or committed twice; and from each state, with all that is on its
//! way lost, time-outs and heartbeats alone lead to the end. Without any one rule that is not so.

use super::packet::{Format, HEADER_BYTES, Header, Kind, decode};
use super::rules::{Rule, Rules};
use super::*;
use penstock_types::Time;
use siphasher::sip::SipHasher13;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::rc::Rc;

const WORKERS: [Link; 2] = [Link(0), Link(1)];
const AGGREGATOR: Link = Link(2);
const SERVER: Link = Link(3);
const NOW: Time = Time(0);
const JOB: u32 = 1;

/// What may happen besides loss, doubling, reordering, time-outs and restarts of the aggregator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Story {
    /// Nothing.
    Plain,
    /// Each node goes over to the next epoch, one after the other, and the same SeqNums carry other blocks.
    Epochs,
    /// The link between worker 0 and the aggregator is cut for good.
    Cut,
}

/// Which faults happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kinds {
    All,
    /// No time-outs and heartbeats while packets are on their way. These send packets of their own, which makes most of the states: a
    /// second fault costs a factor of 20 without them, and several hundred with them.
    Packets,
    /// Losses and restarts alone.
    Losses,
}

/// What is explored.
#[derive(Clone, Copy, Debug)]
struct Scope {
    story: Story,
    blocks: u32,
    window: u32,
    start: Serial,
    /// How many, on any one way through.
    faults: u8,
    /// Of which kinds.
    kinds: Kinds,
    rules: Rules,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Flying {
    to: Link,
    from: Link,
    /// Shared by all states in which the packet is on its way.
    bytes: Rc<[u8]>,
}

#[derive(Clone)]
struct World {
    scope: Scope,
    workers: [Worker; 2],
    aggregator: Aggregator,
    server: Server,
    /// The epoch of worker 0, worker 1, aggregator, server.
    epochs: [u16; 4],
    cut: bool,
    faults_left: u8,
    flying: BTreeSet<Flying>,
    /// Of the current epoch, by worker: which results were delivered; at last, what the server committed.
    done: [u8; 3],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Arrive(usize),
    ArriveAndStay(usize),
    Lose(usize),
    Expire(usize, Serial),
    WorkerHeartbeat(usize),
    ServerHeartbeat,
    Restart,
    NextEpoch(usize),
    Cut,
    NoticeCut,
}

impl World {
    fn new(scope: Scope) -> World {
        let worker = |i| new_worker(scope, i, 0);
        let mut world = World {
            scope,
            workers: [worker(0), worker(1)],
            aggregator: new_aggregator(scope, 0),
            server: new_server(scope, 0),
            epochs: [0; 4],
            cut: false,
            faults_left: scope.faults,
            flying: BTreeSet::new(),
            done: [0; 3],
        };
        for i in 0..2 {
            world.post(i);
            world.drain_worker(i).expect("nothing is delivered yet");
        }
        world
    }

    fn post(&mut self, i: usize) {
        for _ in 0..self.scope.blocks {
            self.workers[i].post(Route::Tree).expect("two windows hold them all");
        }
    }

    fn events(&self) -> Vec<Event> {
        let mut events: Vec<Event> = (0..self.flying.len()).map(Event::Arrive).collect();
        if self.faults_left > 0 {
            events.extend((0..self.flying.len()).map(Event::Lose));
            if self.scope.kinds != Kinds::Losses {
                events.extend((0..self.flying.len()).map(Event::ArriveAndStay));
            }
            events.push(Event::Restart);
        }
        if self.flying.is_empty() || (self.faults_left > 0 && self.scope.kinds == Kinds::All) {
            for (i, worker) in self.workers.iter().enumerate() {
                events.extend(worker.outstanding().into_iter().map(|seq| Event::Expire(i, seq)));
                events.push(Event::WorkerHeartbeat(i));
            }
            events.push(Event::ServerHeartbeat);
        }
        if self.scope.story == Story::Epochs {
            events.extend((0..4).filter(|i| self.epochs[*i] == 0).map(Event::NextEpoch));
        }
        if self.scope.story == Story::Cut {
            events.push(if self.cut { Event::NoticeCut } else { Event::Cut });
        }
        events
    }

    fn is_fault(&self, event: Event) -> bool {
        match event {
            Event::ArriveAndStay(_) | Event::Lose(_) | Event::Restart => true,
            Event::Expire(..) | Event::WorkerHeartbeat(_) | Event::ServerHeartbeat => !self.flying.is_empty(),
            Event::Arrive(_) | Event::NextEpoch(_) | Event::Cut | Event::NoticeCut => false,
        }
    }

    /// One step; an error says which invariant broke.
    fn apply(&mut self, event: Event) -> Result<(), String> {
        if self.is_fault(event) {
            self.faults_left = self.faults_left.saturating_sub(1);
        }
        match event {
            Event::Arrive(i) | Event::ArriveAndStay(i) | Event::Lose(i) => {
                let packet = self.flying.iter().nth(i).expect("listed").clone();
                if !matches!(event, Event::ArriveAndStay(_)) {
                    self.flying.remove(&packet);
                }
                if matches!(event, Event::Lose(_)) { Ok(()) } else { self.arrive(&packet) }
            }
            Event::Expire(i, seq) => {
                self.workers[i].expire(seq);
                self.drain_worker(i)
            }
            Event::WorkerHeartbeat(i) => {
                self.workers[i].heartbeat_now();
                self.drain_worker(i)
            }
            Event::ServerHeartbeat => {
                self.server.heartbeat_now();
                self.drain_server();
                Ok(())
            }
            Event::Restart => {
                self.aggregator = new_aggregator(self.scope, self.epochs[2]);
                Ok(())
            }
            Event::NextEpoch(i) => {
                self.epochs[i] += 1;
                match i {
                    2 => self.aggregator = new_aggregator(self.scope, 1),
                    3 => {
                        self.server = new_server(self.scope, 1);
                        self.done[2] = 0;
                    }
                    _ => {
                        self.workers[i] = new_worker(self.scope, i, 1);
                        self.done[i] = 0;
                        self.post(i);
                        self.drain_worker(i)?;
                    }
                }
                Ok(())
            }
            Event::Cut => {
                self.cut = true;
                Ok(())
            }
            Event::NoticeCut => {
                self.workers[0].set_lost(true);
                Ok(())
            }
        }
    }

    fn arrive(&mut self, packet: &Flying) -> Result<(), String> {
        let ends = [packet.to, packet.from];
        if self.cut && ends.contains(&WORKERS[0]) && ends.contains(&AGGREGATOR) {
            return Ok(());
        }
        match packet.to {
            AGGREGATOR => {
                let seq = decode(&packet.bytes).expect("ours").header.seq;
                let mut completed = false;
                let sent: Vec<(Link, Rc<[u8]>)> = match self.aggregator.handle_packet(packet.from, &packet.bytes) {
                    Ok(Action::Send { to, header, payload }) => {
                        completed = !payload.is_empty();
                        to.iter().map(|to| (*to, [&header[..], payload].concat().into())).collect()
                    }
                    Ok(Action::Relay { to }) => to.iter().map(|to| (*to, packet.bytes.clone())).collect(),
                    Ok(Action::Nothing) | Err(_) => Vec::new(),
                };
                sent.into_iter().for_each(|(to, bytes)| self.fly(to, AGGREGATOR, bytes));
                if completed && !self.scope.rules.hold(Rule::Commit) {
                    // What SwitchML's switch and LuWu's resends rely upon: a complete slot counts as committed.
                    let (ack, credit) = (seq.plus(1), seq.plus(self.scope.window));
                    let epoch = self.epochs[2];
                    let (kind, format) = (Kind::HeartbeatDown, Format::None);
                    let header =
                        Header { kind, job: JOB, epoch, format, flags: 0, seq, ack, credit, exponent: 0, workers: 0 };
                    let bytes: Rc<[u8]> = header.encode(&[], None).as_slice().into();
                    WORKERS.into_iter().for_each(|to| self.fly(to, AGGREGATOR, bytes.clone()));
                }
                Ok(())
            }
            SERVER => {
                let outcome = self.server.handle_packet(NOW, packet.from, &packet.bytes);
                if let Ok(Some(seq)) = outcome {
                    self.mark(2, seq)?;
                }
                self.drain_server();
                Ok(())
            }
            to => {
                let i = to.0 as usize;
                if let Ok(Received::Result { seq, payload, .. }) =
                    self.workers[i].handle_packet(NOW, packet.from, &packet.bytes)
                {
                    self.mark(i, seq)?;
                    let expected = (0..2).map(|w| self.block(self.epochs[i], w, seq)).fold(0, i32::wrapping_add);
                    let value = i32::from_be_bytes(payload.try_into().expect("one element"));
                    if value != expected {
                        return Err(format!("worker {i} got {value} for {seq} instead of {expected}"));
                    }
                }
                self.drain_worker(i)
            }
        }
    }

    /// Each worker delivers, and the server commits, each SeqNum once.
    fn mark(&mut self, who: usize, seq: Serial) -> Result<(), String> {
        let bit = 1u8 << seq.ahead_of(self.scope.start).clamp(0, 7);
        if self.done[who] & bit != 0 {
            let who = ["worker 0 delivered", "worker 1 delivered", "the server committed"][who];
            return Err(format!("{who} {seq} twice"));
        }
        self.done[who] |= bit;
        Ok(())
    }

    /// What worker `w` pushes: numbers whose sums tell which blocks are in them.
    fn block(&self, epoch: u16, w: usize, seq: Serial) -> i32 {
        let number = 2 * (seq.ahead_of(self.scope.start) as u32) + w as u32 + 8 * u32::from(epoch);
        7_i32.wrapping_pow(number + 1)
    }

    fn drain_worker(&mut self, i: usize) -> Result<(), String> {
        while let Some(out) = self.workers[i].poll_transmit(NOW) {
            let bytes = if out.header.kind == Kind::Push {
                if self.done[i] >> out.header.seq.ahead_of(self.scope.start).clamp(0, 7) & 1 == 1 {
                    return Err(format!(
                        "worker {i} pushes {} after its result, when the block is gone",
                        out.header.seq
                    ));
                }
                let block = self.block(self.epochs[i], i, out.header.seq).to_be_bytes();
                [&self.workers[i].seal(&out.header, Format::I32, 0, &block)[..], &block].concat()
            } else {
                self.workers[i].seal(&out.header, Format::None, 0, &[]).to_vec()
            };
            self.fly(out.to, WORKERS[i], bytes);
        }
        Ok(())
    }

    fn drain_server(&mut self) {
        let mut sent = Vec::new();
        while let Some(out) = self.server.poll_transmit() {
            sent.push((out.to, [&out.header[..], out.payload].concat()));
        }
        sent.into_iter().for_each(|(to, bytes)| self.fly(to, SERVER, bytes));
    }

    fn fly(&mut self, to: Link, from: Link, bytes: impl Into<Rc<[u8]>>) {
        self.flying.insert(Flying { to, from, bytes: bytes.into() });
    }

    /// What the machines hold.
    fn holdings(&self) -> SipHasher13 {
        let mut state = SipHasher13::new();
        self.workers.iter().for_each(|worker| worker.digest(&mut state));
        self.aggregator.digest(&mut state);
        self.server.digest(&mut state);
        (self.epochs, self.cut, self.done).hash(&mut state);
        state
    }

    fn fingerprint(&self) -> u64 {
        let mut state = self.holdings();
        (&self.flying, self.faults_left).hash(&mut state);
        state.finish()
    }

    fn is_complete(&self) -> bool {
        let all = (1u8 << self.scope.blocks) - 1;
        self.done == [all; 3] && self.epochs.iter().all(|epoch| *epoch == self.epochs[0])
    }

    /// Whether the system reaches its end when everything on its way is lost and then nothing goes wrong any more: every
    /// time-out and heartbeat fires in turn, every packet arrives once, in order.
    fn completes(&self) -> Result<bool, String> {
        let mut world = self.clone();
        world.flying.clear();
        if world.epochs.contains(&1) {
            for i in 0..4 {
                if world.epochs[i] == 0 {
                    world.apply(Event::NextEpoch(i))?;
                }
            }
        }
        // Two rounds an event of the slowest path are plenty: it either ends or repeats itself.
        for _ in 0..16 {
            for i in 0..2 {
                if i == 0 {
                    world.workers[0].set_lost(world.cut);
                }
                for seq in world.workers[i].outstanding() {
                    world.apply(Event::Expire(i, seq))?;
                }
                world.apply(Event::WorkerHeartbeat(i))?;
            }
            world.apply(Event::ServerHeartbeat)?;
            let mut queue: VecDeque<Flying> = std::mem::take(&mut world.flying).into_iter().collect();
            while let Some(packet) = queue.pop_front() {
                world.arrive(&packet)?;
                queue.extend(std::mem::take(&mut world.flying));
            }
            if world.is_complete() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

fn new_worker(scope: Scope, i: usize, epoch: u16) -> Worker {
    let config = WorkerConfig {
        job: JOB,
        epoch,
        key: None,
        worker: i as u8,
        window: scope.window,
        start: scope.start,
        parent: AGGREGATOR,
        server: SERVER,
        ask_parent: true,
        timing: Timing::default(),
    };
    Worker::with_rules(NOW, config, scope.rules)
}

fn new_aggregator(scope: Scope, epoch: u16) -> Aggregator {
    let limits = Limits { jobs: 1, slots: scope.window as usize, memory_bytes: 4 * scope.window as usize };
    let mut aggregator = Aggregator::with_rules(limits, scope.rules);
    let children = vec![Child { link: WORKERS[0], workers: 1 }, Child { link: WORKERS[1], workers: 2 }];
    let job = Job {
        job: JOB,
        epoch,
        key: None,
        window: scope.window,
        block_bytes: 4,
        floats: false,
        results: true,
        parent: SERVER,
        children,
    };
    aggregator.open(job).expect("it fits");
    aggregator
}

fn new_server(scope: Scope, epoch: u16) -> Server {
    let below = vec![Node::Worker(0), Node::Worker(1)];
    let config = ServerConfig {
        job: JOB,
        epoch,
        key: None,
        window: scope.window,
        block_bytes: 4,
        start: scope.start,
        tree: Tree { children: vec![Node::Aggregator { link: AGGREGATOR, children: below }] },
        workers: WORKERS.to_vec(),
        heartbeat_every: ServerConfig::HEARTBEAT_EVERY,
        idle_every: ServerConfig::IDLE_EVERY,
    };
    Server::with_rules(NOW, config, scope.rules)
}

/// What exploring came to.
struct Explored {
    states: usize,
    /// The invariant that broke, and the shortest way there.
    broken: Option<(String, Vec<String>)>,
}

/// Breadth first, so that what breaks is found by the shortest way.
fn explore(scope: Scope) -> Explored {
    let root = World::new(scope);
    let mut came_from: HashMap<u64, (u64, u16)> = HashMap::new();
    let mut completing: HashSet<u64> = HashSet::new();
    came_from.insert(root.fingerprint(), (0, 0));
    let mut frontier = vec![(root.fingerprint(), root)];
    while !frontier.is_empty() {
        let mut next = Vec::new();
        for (here, world) in frontier {
            if completing.insert(world.holdings().finish()) {
                match world.completes() {
                    Ok(true) => {}
                    Ok(false) => return broken(scope, &came_from, here, None, "stuck: the end is out of reach"),
                    Err(what) => return broken(scope, &came_from, here, None, &what),
                }
            }
            for (i, event) in world.events().into_iter().enumerate() {
                let mut after = world.clone();
                if let Err(what) = after.apply(event) {
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
    let mut world = World::new(scope);
    let mut steps: Vec<Event> = Vec::new();
    let mut lines = Vec::new();
    for choice in choices.into_iter().rev() {
        let event = world.events()[usize::from(choice)];
        lines.push(world.describe(event));
        world.apply(event).expect("it went well the first time");
        steps.push(event);
    }
    lines.extend(last.map(|event| world.describe(event)));
    Explored { states: came_from.len(), broken: Some((what.to_string(), lines)) }
}

impl World {
    fn describe(&self, event: Event) -> String {
        match event {
            Event::Arrive(i) | Event::ArriveAndStay(i) | Event::Lose(i) => {
                let packet = self.flying.iter().nth(i).expect("listed");
                let Header { kind, seq, ack, credit, workers, epoch, .. } = decode(&packet.bytes).expect("ours").header;
                let word = format!("{event:?}").replace(|c: char| !c.is_alphabetic(), "");
                let block = &packet.bytes[HEADER_BYTES..];
                let Flying { from, to, .. } = packet;
                format!(
                    "{word} {from:?}->{to:?} {kind:?} {seq} ack {ack} credit {credit} workers {workers:b} epoch {epoch} {block:?}"
                )
            }
            other => format!("{other:?}"),
        }
    }
}

fn scope(story: Story, blocks: u32, faults: u8) -> Scope {
    // The second and third SeqNum lie on either side of the wrap-around.
    Scope { story, blocks, window: 2, start: Serial(u32::MAX - 1), faults, kinds: Kinds::All, rules: Rules::default() }
}

/// Two rounds in one slot, either side of the wrap-around: small enough for faults to come together.
fn one_slot(faults: u8) -> Scope {
    Scope { window: 1, start: Serial(u32::MAX), ..scope(Story::Plain, 2, faults) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With all rules, no interleaving breaks anything.
    #[test]
    fn every_interleaving() {
        holds(scope(Story::Plain, 3, 1), 500_000);
        holds(scope(Story::Epochs, 1, 1), 200_000);
        holds(scope(Story::Cut, 2, 0), 15_000);
        holds(one_slot(2), 100_000);
    }

    /// Nor do two faults together, of the kinds that leave few enough states; nor one while a link is cut.
    #[test]
    fn faults_together() {
        holds(Scope { kinds: Kinds::Packets, ..scope(Story::Plain, 3, 2) }, 1_000_000);
        holds(Scope { kinds: Kinds::Packets, ..scope(Story::Cut, 2, 1) }, 500_000);
        holds(Scope { kinds: Kinds::Losses, ..scope(Story::Epochs, 1, 2) }, 200_000);
    }

    /// Nor three.
    #[test]
    #[ignore = "takes two minutes; for changes of a rule"]
    fn three_faults() {
        holds(one_slot(3), 400_000);
        holds(Scope { kinds: Kinds::Losses, ..scope(Story::Plain, 3, 3) }, 1_000_000);
        holds(Scope { kinds: Kinds::Losses, ..scope(Story::Cut, 2, 2) }, 2_000_000);
    }

    fn holds(scope: Scope, least: usize) {
        let explored = explore(scope);
        let Scope { story, blocks, window, faults, kinds, .. } = scope;
        println!(
            "{story:?}, {blocks} blocks, window {window}, {faults} faults of {kinds:?}: {} states",
            explored.states
        );
        if let Some((what, steps)) = explored.broken {
            panic!("{what}\n{scope:?}\n{}", steps.join("\n"));
        }
        // What it proves would shrink with the number of states unnoticed.
        assert!(explored.states > least, "only {} states", explored.states);
    }

    /// Without any one rule, some interleaving does. (R19, the order of floats, is removed in `server_tests.rs`.)
    #[test]
    fn every_rule_is_needed() {
        use Rule::*;
        let rules = [
            Reset, Stale, Duplicate, Keep, Heart, Epoch, Serial, Once, Overlap, Whole, Window, Answer, Bypass, Credit,
            Resend, Commit, Request, Deliver,
        ];
        let mut idle = Vec::new();
        for rule in rules {
            let scopes: &[Scope] = match rule {
                Epoch => &[scope(Story::Epochs, 1, 0)],
                Overlap | Whole | Bypass => &[scope(Story::Cut, 2, 0), scope(Story::Cut, 1, 1)],
                _ => &[scope(Story::Plain, 3, 0), scope(Story::Plain, 3, 1), scope(Story::Plain, 2, 2)],
            };
            let broken = scopes.iter().find_map(|scope| {
                let rules = Rules { without: Some(rule) };
                explore(Scope { rules, ..*scope }).broken.map(|broken| (scope.faults, broken))
            });
            match broken {
                Some((faults, (what, steps))) => {
                    println!("{rule:?}, {faults} faults: {what}\n  {}", steps.join("\n  "))
                }
                None => idle.push(rule),
            }
        }
        assert!(idle.is_empty(), "nothing breaks without {idle:?}");
    }
}
