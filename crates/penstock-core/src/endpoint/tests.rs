//! Servers and clients under virtual time: records and bytes that take random times, handlers that take longer, deaths at any event.

use super::*;
use penstock_types::{Priority, Time};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

const LIMITS: Limits = Limits { calls: 4, request: 20_000, push: 100_000, in_flight: 150_000 };

/// Messages of up to this length may be copied when they are sent.
const COPIED: u64 = 32 * 1024;

/// What may happen next; ties are broken by the order of planning.
#[derive(Clone, Debug)]
enum Event {
    ToServer(usize, Class, Record),
    ToClient(usize, Class, Record),
    /// Bytes under a tag are here: at whom, whose call, what they are.
    Arrived(Side, usize, u64, Bytes),
    /// The receiver's word that they are.
    Taken(Side, usize, u64, u64),
    Ask(usize),
    Handler,
    Answer(Asked, Bytes),
    Lost(Side, usize),
    Deadline(usize),
    Close,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Side {
    Server,
    Client,
}

/// What bytes are: their length, and whose they are.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Bytes {
    Body(u64, u64),
    Reply(u64, u64),
    Text(String),
    Zeros(u64),
}

impl Bytes {
    fn len(&self) -> u64 {
        match self {
            Bytes::Body(_, len) | Bytes::Reply(_, len) | Bytes::Zeros(len) => *len,
            Bytes::Text(text) => text.len() as u64,
        }
    }
}

/// The messages under one tag in one direction: those that leave, and those for which there is a place.
#[derive(Default)]
struct Tag {
    leaving: VecDeque<(u64, Bytes)>,
    places: VecDeque<(u64, u64)>,
}

#[derive(Default)]
struct OneClient {
    machine: Client,
    asks: BTreeMap<u64, Ask>,
    ends: BTreeMap<u64, Ended>,
    replies: HashMap<u64, Bytes>,
    is_dead: bool,
    has_left: bool,
    /// When the last record on each class in each direction arrives: they stay in order.
    last: HashMap<(Side, Class), u64>,
    tags: BTreeMap<(Side, u32), Tag>,
}

struct World {
    random: fastrand::Rng,
    now: u64,
    planned: u64,
    agenda: BTreeMap<(u64, u64), Event>,
    server: Server,
    is_server_dead: bool,
    clients: Vec<OneClient>,
    /// Bodies that lie at the server.
    bodies: BTreeMap<(usize, u64), Option<Bytes>>,
    /// What handlers have seen, and replies that they have made.
    handled: Vec<(usize, Kind, Bytes)>,
    replies: HashMap<(usize, u64), Bytes>,
    most_held: u64,
    next_call: u64,
    slow: bool,
}

/// What happens at an event of a run.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Dies(Side),
    ServerCloses,
}

impl World {
    fn new(seed: u64, clients: usize, asks: usize) -> World {
        let mut server = Server::new(LIMITS);
        for kind in Kind::ALL {
            server.serve(kind, "known");
        }
        let mut world = World {
            random: fastrand::Rng::with_seed(seed),
            now: 0,
            planned: 0,
            agenda: BTreeMap::new(),
            server,
            is_server_dead: false,
            clients: (0..clients).map(|_| OneClient::default()).collect(),
            bodies: BTreeMap::new(),
            handled: Vec::new(),
            replies: HashMap::new(),
            most_held: 0,
            next_call: 0,
            slow: false,
        };
        for client in 0..clients {
            world.server.connected(client as u32);
            for _ in 0..asks {
                let at = world.random.u64(..3000);
                world.plan(at, Event::Ask(client));
            }
        }
        world.carry_out();
        world
    }

    fn plan(&mut self, after: u64, event: Event) {
        self.planned += 1;
        self.agenda.insert((self.now + after, self.planned), event);
    }

    fn delay(&mut self) -> u64 {
        if self.random.u8(..8) == 0 { self.random.u64(..2000) } else { self.random.u64(1..50) }
    }

    fn say(&mut self, client: usize, to: Side, class: Class, record: Record) {
        assert_eq!(Record::decode(&record.encode()).as_ref(), Ok(&record));
        let delay = self.delay();
        let last = self.clients[client].last.entry((to, class)).or_default();
        *last = (*last).max(self.now + delay);
        let after = *last - self.now;
        let to_server = to == Side::Server;
        self.plan(
            after,
            if to_server { Event::ToServer(client, class, record) } else { Event::ToClient(client, class, record) },
        );
    }

    /// Joins what leaves under a tag with the places for it.
    fn join(&mut self, client: usize, to: Side, slot: u32) {
        loop {
            let tag = self.clients[client].tags.entry((to, slot)).or_default();
            if tag.leaving.is_empty() || tag.places.is_empty() {
                return;
            }
            let (sender, bytes) = tag.leaving.pop_front().expect("looked at");
            let (receiver, len) = tag.places.pop_front().expect("looked at");
            assert_eq!(bytes.len(), len, "the next message under a tag has another length than its place");
            let (there, back) = (self.delay(), self.delay());
            let from = if to == Side::Server { Side::Client } else { Side::Server };
            // What is copied when it is sent counts as taken then.
            let is_copied = len <= COPIED && self.random.bool();
            self.plan(there, Event::Arrived(to, client, receiver, bytes));
            self.plan(if is_copied { 0 } else { there + back }, Event::Taken(from, client, sender, len));
        }
    }

    fn carry_out(&mut self) {
        while let Some(action) = self.server.poll() {
            match action {
                ServerAction::Say { client, class, record } => self.say(client as usize, Side::Client, class, record),
                ServerAction::Receive { client, id, slot, len, .. } => {
                    self.bodies.insert((client as usize, id), None);
                    let tag = self.clients[client as usize].tags.entry((Side::Server, slot)).or_default();
                    tag.places.push_back((id, len));
                    self.join(client as usize, Side::Server, slot);
                }
                ServerAction::Transmit { client, id, slot, len, text, .. } => {
                    let client = client as usize;
                    let bytes = text.map_or_else(|| self.replies.remove(&(client, id)).expect("answered"), Bytes::Text);
                    assert_eq!(bytes.len(), len);
                    self.clients[client].tags.entry((Side::Client, slot)).or_default().leaving.push_back((id, bytes));
                    self.join(client, Side::Client, slot);
                }
                ServerAction::Release { client, id } => {
                    self.bodies.remove(&(client as usize, id)).expect("a body that lies here");
                }
                ServerAction::Break { fault, .. } => panic!("{fault:?}"),
                ServerAction::Leave { client } => assert!(self.clients[client as usize].machine.calls() == 0),
            }
        }
        for client in 0..self.clients.len() {
            while let Some(action) = self.clients[client].machine.poll() {
                match action {
                    ClientAction::Say(class, record) => self.say(client, Side::Server, class, record),
                    ClientAction::Transmit { call, slot, len, zeros, .. } => {
                        let bytes = if zeros { Bytes::Zeros(len) } else { Bytes::Body(call, len) };
                        let has_ended = self.clients[client].ends.contains_key(&call);
                        assert!(zeros || len <= INLINE || !has_ended, "memory that its caller has back");
                        self.clients[client]
                            .tags
                            .entry((Side::Server, slot))
                            .or_default()
                            .leaving
                            .push_back((call, bytes));
                        self.join(client, Side::Server, slot);
                    }
                    ClientAction::Receive { call, slot, len, target, .. } => {
                        let has_ended = self.clients[client].ends.contains_key(&call);
                        assert!(target == Target::Own || !has_ended, "memory that its caller has back");
                        self.clients[client]
                            .tags
                            .entry((Side::Client, slot))
                            .or_default()
                            .places
                            .push_back((call, len));
                        self.join(client, Side::Client, slot);
                    }
                    ClientAction::End(call, end) => {
                        assert!(self.clients[client].ends.insert(call, end).is_none(), "a call ends once");
                    }
                    ClientAction::Forget(_) | ClientAction::Reprioritise { .. } => {}
                    ClientAction::Leave => self.clients[client].has_left = true,
                }
            }
        }
        self.most_held = self.most_held.max(self.server.held_bytes());
        if !self.slow {
            self.plan(0, Event::Handler);
        }
    }

    fn ask(&mut self, client: usize) {
        let kind = Kind::ALL[self.random.usize(..3)];
        let (random, now) = (&mut self.random, self.now);
        let sizes = [0, 1, INLINE, INLINE + 1, LIMITS.request, LIMITS.request + 1, LIMITS.push, LIMITS.push + 1];
        let body = if kind == Kind::Pull { 0 } else { sizes[random.usize(..sizes.len())] };
        let room = if kind == Kind::Push { 0 } else { random.u64(..3) * 50_000 };
        let deadline = (random.u8(..3) == 0).then(|| Time(now + random.u64(1..4000)));
        let ask = Ask {
            kind,
            name: if random.u8(..10) == 0 { "unknown" } else { "known" }.to_owned(),
            body,
            room,
            exact: random.u8(..4) == 0,
            target: if random.bool() { Target::Own } else { Target::Caller },
            priority: Priority(random.i32(-3..3)),
            deadline,
        };
        self.next_call += 1;
        let call = self.next_call;
        self.clients[client].asks.insert(call, ask.clone());
        self.clients[client].machine.ask(call, ask);
        // Of this client, of another, or none any more.
        let (other, priority) = (self.random.u64(1..=call), Priority(self.random.i32(-3..3)));
        self.clients[client].machine.reprioritise(other, priority);
        if let Some(by) = deadline {
            self.plan(by.0 - now, Event::Deadline(client));
        }
    }

    fn act(&mut self, event: Event) {
        let is_dead = |world: &World, side, client: usize| match side {
            Side::Server => world.is_server_dead,
            Side::Client => world.clients[client].is_dead,
        };
        match event {
            Event::ToServer(client, class, record) if !is_dead(self, Side::Server, 0) => {
                self.server.record(client as u32, class, record);
            }
            Event::ToClient(client, class, record) if !is_dead(self, Side::Client, client) => {
                self.clients[client].machine.record(class, record).expect("what servers say");
            }
            Event::Arrived(Side::Server, client, id, bytes) if !is_dead(self, Side::Server, 0) => {
                if let Some(body) = self.bodies.get_mut(&(client, id)) {
                    *body = Some(bytes);
                }
                self.server.received(client as u32, id);
            }
            Event::Arrived(Side::Client, client, call, bytes) if !is_dead(self, Side::Client, client) => {
                self.clients[client].replies.insert(call, bytes);
                self.clients[client].machine.received(call);
            }
            Event::Taken(Side::Server, client, id, len) if !is_dead(self, Side::Server, 0) => {
                self.server.sent(client as u32, id, len);
            }
            Event::Taken(Side::Client, client, call, _) if !is_dead(self, Side::Client, client) => {
                self.clients[client].machine.sent(call);
            }
            Event::Ask(client) if !is_dead(self, Side::Client, client) => self.ask(client),
            Event::Handler if !is_dead(self, Side::Server, 0) => {
                while let Some(asked) = self.server.take() {
                    let body = self.bodies.get(&(asked.client as usize, asked.id)).cloned().flatten();
                    assert_eq!(body.is_some(), asked.body > 0, "a handler gets all of a body");
                    let seen = body.unwrap_or(Bytes::Zeros(0));
                    assert!(!matches!(seen, Bytes::Zeros(1..)), "a withdrawn body reached a handler");
                    self.handled.push((asked.client as usize, asked.kind, seen.clone()));
                    let delay = self.delay();
                    self.plan(delay, Event::Answer(asked, seen));
                }
            }
            Event::Answer(asked, seen) if !is_dead(self, Side::Server, 0) => {
                let client = asked.client as usize;
                let whose = if let Bytes::Body(call, _) = seen { call } else { 0 };
                let result = match (asked.kind, self.random.u8(..10)) {
                    (_, 0) => Err("it does not want to".to_owned()),
                    (Kind::Push, _) => Ok(0),
                    _ => Ok(self.random.u64(..3) * 25_000),
                };
                if let Ok(len) = result {
                    self.replies.insert((client, asked.id), Bytes::Reply(whose, len));
                }
                if !self.server.answer(asked.client, asked.id, result) {
                    self.replies.remove(&(client, asked.id));
                }
            }
            Event::Lost(Side::Server, client) if !is_dead(self, Side::Server, 0) => {
                self.server.lost(client as u32);
                self.bodies.retain(|(of, _), _| *of != client);
            }
            Event::Lost(Side::Client, client) if !is_dead(self, Side::Client, client) => {
                self.clients[client].machine.lost(Ended::Lost);
            }
            Event::Deadline(client) if !is_dead(self, Side::Client, client) => {
                self.clients[client].machine.handle_timeout(Time(self.now));
            }
            Event::Close => {
                for client in self.clients.iter_mut().filter(|client| !client.is_dead) {
                    client.machine.close();
                }
            }
            _ => {}
        }
    }

    /// Runs until nothing happens any more. Returns how many events there were.
    fn run(&mut self, fate: Option<(Fate, usize)>) -> usize {
        let (mut events, mut fate) = (0, fate);
        while let Some(((at, _), event)) = self.agenda.pop_first() {
            self.now = at;
            let has_come = fate.take_if(|(_, at_event)| *at_event == events);
            match has_come {
                Some((Fate::Dies(side), _)) => self.die(side),
                Some((Fate::ServerCloses, _)) => self.server.close(),
                None => {}
            }
            // Handlers that look for work are no event: there are many, and nothing happens between two.
            let is_look = matches!(event, Event::Handler);
            events += usize::from(!is_look);
            self.act(event);
            // A driver looks at the time after everything that it does.
            for client in self.clients.iter_mut().filter(|client| !client.is_dead) {
                client.machine.handle_timeout(Time(self.now));
                assert!(client.machine.next_deadline().is_none_or(|by| by > Time(self.now)));
            }
            if !is_look || has_come.is_some() {
                self.carry_out();
            }
        }
        events
    }

    /// The first client, or the server, is no more: the others hear of it later. What is on its way is lost.
    fn die(&mut self, side: Side) {
        let delay = self.delay();
        match side {
            Side::Server => {
                self.is_server_dead = true;
                (0..self.clients.len()).for_each(|client| self.plan(delay, Event::Lost(Side::Client, client)));
                self.agenda.retain(|_, event| !matches!(event, Event::ToClient(..) | Event::Arrived(Side::Client, ..)));
            }
            Side::Client => {
                self.clients[0].is_dead = true;
                self.plan(delay, Event::Lost(Side::Server, 0));
                let of_it =
                    |event: &Event| matches!(event, Event::ToServer(0, ..) | Event::Arrived(Side::Server, 0, ..));
                self.agenda.retain(|_, event| !of_it(event));
            }
        }
    }

    /// Every call of a living client has ended once, as its handler has seen it; nothing is kept.
    fn check(&self) {
        let mut seen: HashMap<(usize, u64), u32> = HashMap::new();
        for (client, _, bytes) in &self.handled {
            if let Bytes::Body(call, len) = bytes {
                assert_eq!(self.clients[*client].asks[call].body, *len);
                *seen.entry((*client, *call)).or_default() += 1;
            }
        }
        assert!(seen.values().all(|count| *count == 1), "a call reached a handler twice");
        for (index, client) in self.clients.iter().enumerate().filter(|(_, client)| !client.is_dead) {
            let (asked, ended): (BTreeSet<_>, BTreeSet<_>) =
                (client.asks.keys().collect(), client.ends.keys().collect());
            assert_eq!(asked, ended, "calls that have not ended");
            for (call, end) in &client.ends {
                let ask = &client.asks[call];
                let was_seen = seen.contains_key(&(index, *call));
                match end {
                    Ended::Done(len) => {
                        assert!(ask.name == "known" && (was_seen || ask.body == 0));
                        assert!(*len <= ask.room && (!ask.exact || *len == ask.room) || ask.kind == Kind::Push);
                        if *len > 0 {
                            let whose = if ask.body > 0 { *call } else { 0 };
                            assert_eq!(client.replies[call], Bytes::Reply(whose, *len), "another call's reply");
                        }
                    }
                    Ended::Refused(outcome) => {
                        let by_handler = matches!(outcome, Outcome::Failed | Outcome::Misfit);
                        assert!(*outcome != Outcome::Cancelled && (!was_seen || by_handler), "{outcome:?}");
                        assert!(matches!(client.replies.get(call), Some(Bytes::Text(_))), "a reason");
                    }
                    Ended::TooLarge(most) => assert!(!was_seen && ask.body > *most),
                    Ended::Late { was_sent } => assert!(ask.deadline.is_some() && (*was_sent || !was_seen)),
                    Ended::ServerCloses | Ended::Closed => assert!(!was_seen),
                    Ended::Lost => assert!(self.is_server_dead),
                }
            }
        }
        if !self.is_server_dead {
            assert_eq!((self.server.held_bytes(), self.server.calls(), self.bodies.len()), (0, 0, 0));
        }
    }
}

pub(super) fn seed() -> u64 {
    let seed = std::env::var("PENSTOCK_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(|| fastrand::u64(..1 << 32));
    println!("PENSTOCK_SEED={seed}");
    seed
}

/// Any calls of three clients, in any order of records, bytes and acknowledgements, end as their handlers have seen them; the bytes
/// that lie at the server stay within its limits; then all leave in good order.
#[test]
fn calls_end_once_and_as_seen() {
    let first = seed();
    let mut ends: BTreeMap<String, usize> = BTreeMap::new();
    for seed in first..first + 300 {
        println!("seed {seed}");
        let mut world = World::new(seed, 3, 12);
        world.plan(20_000, Event::Close);
        world.run(None);
        world.check();
        assert!(world.server.is_empty() && world.clients.iter().all(|client| client.has_left));
        let replies = 3 * u64::from(LIMITS.calls) * 50_000;
        assert!(world.most_held <= 3 * (LIMITS.in_flight + u64::from(LIMITS.calls) * INLINE) + replies);
        for end in world.clients.iter().flat_map(|client| client.ends.values()) {
            let name = format!("{end:?}");
            *ends.entry(name.split('(').next().expect("a word").to_owned()).or_default() += 1;
        }
    }
    // All that can happen to a call does.
    println!("{ends:?}");
    for name in ["Done", "Refused", "TooLarge", "Late { was_sent: true }"] {
        assert!(ends.get(name).is_some_and(|count| *count > 30), "{name}: {ends:?}");
    }
}

/// The server, or a client, dies at each event of a run: every other client's calls end, all of them if it was a client that died, and
/// the server keeps nothing of that.
#[test]
fn a_death_at_every_event() {
    let first = seed();
    for seed in first..first + 4 {
        for side in [Side::Server, Side::Client] {
            let events = World::new(seed, 2, 5).run(None);
            assert!(events > 30, "{events}");
            for at_event in 0..events {
                println!("seed {seed}, {side:?} dies at event {at_event}");
                let mut world = World::new(seed, 2, 5);
                world.run(Some((Fate::Dies(side), at_event)));
                world.check();
                let lost = world.clients[1].ends.values().filter(|end| **end == Ended::Lost).count();
                assert!(side == Side::Server || lost == 0, "a client's death touched another");
            }
        }
    }
}

/// A server closes at each event of a run: calls that no handler has seen are told so, the others end well, and all leave.
#[test]
fn a_server_closes_at_every_event() {
    let first = seed();
    for seed in first..first + 4 {
        let events = World::new(seed, 2, 5).run(None);
        for at_event in 0..events {
            println!("seed {seed}, the server closes at event {at_event}");
            let mut world = World::new(seed, 2, 5);
            world.run(Some((Fate::ServerCloses, at_event)));
            world.check();
            assert!(world.server.is_empty() && world.clients.iter().all(|client| client.has_left));
        }
    }
}

/// Handlers that take nothing: bodies wait at their clients as soon as the server holds its limit, and nothing else stops. When the
/// handlers are back, all is done.
#[test]
fn a_slow_server_holds_its_limit() {
    let first = seed();
    for seed in first..first + 50 {
        println!("seed {seed}");
        let mut world = World::new(seed, 3, 12);
        world.slow = true;
        world.agenda.retain(|_, event| !matches!(event, Event::Handler));
        world.run(None);
        assert!(world.handled.is_empty());
        assert!(world.most_held <= 3 * (LIMITS.in_flight + u64::from(LIMITS.calls) * INLINE), "{}", world.most_held);
        world.slow = false;
        world.plan(0, Event::Handler);
        world.plan(100_000, Event::Close);
        world.run(None);
        world.check();
        assert!(world.clients.iter().all(|client| client.has_left));
    }
}

/// Of calls that wait for room, and of those that wait for a handler, the most urgent goes first.
#[test]
fn the_most_urgent_goes_first() {
    let mut server = Server::new(Limits { calls: 8, in_flight: 100_000, ..LIMITS });
    server.serve(Kind::Push, "w");
    server.connected(0);
    let call = |server: &mut Server, id, body, priority| {
        let (kind, name, priority) = (Kind::Push, "w".to_owned(), Priority(priority));
        let call = Record::Call { id, slot: id as u32, kind, name, body, room: 0, exact: false, priority };
        server.record(0, Class::Usual, call);
    };
    for (id, priority) in [(0, 0), (1, 5), (2, 0), (3, -1), (4, -1)] {
        call(&mut server, id, 60_000, priority);
    }
    let mut order = Vec::new();
    loop {
        let went: Vec<u64> = std::iter::from_fn(|| server.poll())
            .filter_map(|action| match action {
                ServerAction::Say { record: Record::Go { id }, .. } => Some(id),
                _ => None,
            })
            .collect();
        let Some(&id) = went.first() else { break };
        assert_eq!(went.len(), 1, "there is room for one");
        order.push(id);
        server.received(0, id);
        let asked = server.take().expect("its body is here");
        assert!(!server.answer(0, asked.id, Ok(0)));
    }
    // The first one went while it was alone.
    assert_eq!(order, [0, 3, 4, 2, 1]);
    for (id, priority) in [(5, 0), (6, -2), (7, 3)] {
        call(&mut server, id, 0, priority);
    }
    assert_eq!(std::iter::from_fn(|| server.take()).map(|asked| asked.id).collect::<Vec<_>>(), [6, 5, 7]);
}

/// What a defective client says ends its connection, and no other's.
#[test]
fn a_defective_client_is_broken_off() {
    let call = |id, slot, kind, body| Record::Call {
        id,
        slot,
        kind,
        name: "known".to_owned(),
        body,
        room: 0,
        exact: false,
        priority: Priority(0),
    };
    let wrongs: [&[Record]; 9] = [
        &[call(Class::Urgent.call(0), 0, Kind::Push, 9)],
        &[Record::Bye, Record::Bye],
        &[call(1, 0, Kind::Push, 9)],
        &[call(0, LIMITS.calls, Kind::Push, 9)],
        &[call(0, 0, Kind::Push, 9), call(1, 0, Kind::Push, 9)],
        &[call(0, 0, Kind::Pull, 1)],
        &[Record::Cancel { id: 0 }],
        &[call(0, 0, Kind::Push, 9), Record::Bye],
        &[Record::Go { id: 0 }],
    ];
    for wrong in wrongs {
        let mut server = Server::new(LIMITS);
        server.serve(Kind::Push, "known");
        server.connected(0);
        server.connected(1);
        wrong.iter().for_each(|record| server.record(0, Class::Usual, record.clone()));
        let broken: Vec<u32> = std::iter::from_fn(|| server.poll())
            .filter_map(|action| if let ServerAction::Break { client, .. } = action { Some(client) } else { None })
            .collect();
        assert_eq!((broken, server.clients(), server.held_bytes()), (vec![0], 1, 0), "{wrong:?}");
    }
}

/// What a defective server says is a fault.
#[test]
fn a_defective_server_is_a_fault() {
    let reply = |id, outcome, len| Record::Reply { id, outcome, len };
    let wrongs: [&[Record]; 7] = [
        &[Record::Go { id: 0 }],
        &[Record::Welcome(LIMITS), Record::Welcome(LIMITS)],
        &[Record::Welcome(LIMITS), Record::Go { id: 1 }],
        &[Record::Welcome(LIMITS), Record::Go { id: 0 }, Record::Go { id: 0 }],
        &[Record::Welcome(LIMITS), reply(0, Outcome::Done, 0)],
        &[Record::Welcome(LIMITS), reply(0, Outcome::Failed, MAX_TEXT + 1)],
        &[Record::Welcome(LIMITS), Record::Bye],
    ];
    for wrong in wrongs {
        let mut client = Client::default();
        let (kind, name, target) = (Kind::Push, "known".to_owned(), Target::Own);
        let (room, exact, priority, deadline) = (0, false, Priority(0), None);
        client.ask(1, Ask { kind, name, body: 50_000, room, exact, target, priority, deadline });
        let (last, first) = wrong.split_last().expect("one at least");
        first.iter().for_each(|record| client.record(Class::Usual, record.clone()).expect("what servers say"));
        assert!(client.record(Class::Usual, last.clone()).is_err(), "{wrong:?}");
    }
}

/// A name that ends with a slash is served for all names that begin with it, of its kind, until it is withdrawn.
#[test]
fn names_below_a_slash() {
    let mut server = Server::new(Limits { calls: 1, request: 1, push: 1, in_flight: 1 });
    server.serve(Kind::Pull, "sums/");
    server.serve(Kind::Pull, "sums/7/");
    for (kind, name, is_served) in [
        (Kind::Pull, "sums/7/1", true),
        (Kind::Pull, "sums/", true),
        (Kind::Pull, "sums/8", true),
        (Kind::Pull, "sums", false),
        (Kind::Pull, "other/sums/", false),
        (Kind::Push, "sums/7/1", false),
    ] {
        assert_eq!(server.serves(kind, name), is_served, "{name}");
    }
    server.withdraw(Kind::Pull, "sums/");
    assert!(server.serves(Kind::Pull, "sums/7/1") && !server.serves(Kind::Pull, "sums/8"));
}

/// A call may be withdrawn once: a client that repeats it would be answered each time.
#[test]
fn withdrawn_twice() {
    let mut server = Server::new(LIMITS);
    server.serve(Kind::Push, "w");
    server.connected(0);
    let call = Record::Call {
        id: 0,
        slot: 0,
        kind: Kind::Push,
        name: "w".into(),
        body: 50_000,
        room: 0,
        exact: false,
        priority: Priority::USUAL,
    };
    let mut said = |record| {
        server.record(0, Class::of_call(0), record);
        std::iter::from_fn(|| server.poll()).collect::<Vec<_>>()
    };
    said(call);
    let once = said(Record::Cancel { id: 0 });
    assert!(
        once.iter().any(|action| matches!(action, ServerAction::Say { record: Record::Withdrawn { id: 0 }, .. })),
        "{once:?}"
    );
    let twice = said(Record::Cancel { id: 0 });
    assert!(matches!(twice[..], [ServerAction::Break { client: 0, .. }]), "{twice:?}");
}

/// A call that gets another priority while it waits goes in its new place; one whose bytes travel is told to its driver; one that has
/// ended is nobody's.
#[test]
fn a_call_gets_another_priority() {
    let mut client = Client::default();
    let ask = |priority, body| {
        let (kind, name, target) = (Kind::Push, "w".to_owned(), Target::Own);
        Ask { kind, name, body, room: 0, exact: false, target, priority: Priority(priority), deadline: None }
    };
    (1..=4).for_each(|call| client.ask(call, ask(call as i32, 50_000)));
    client.reprioritise(4, Priority(-9));
    client.reprioritise(1, Priority(9));
    let mut heard = |record: Record| {
        client.record(Class::Usual, record).expect("what servers say");
        std::iter::from_fn(|| client.poll()).collect::<Vec<_>>()
    };
    let calls = |actions: &[ClientAction]| -> Vec<(u64, Priority)> {
        let of = |action: &ClientAction| match action {
            ClientAction::Say(_, Record::Call { id, priority, .. }) => Some((*id, *priority)),
            _ => None,
        };
        actions.iter().filter_map(of).collect()
    };
    let sent = heard(Record::Welcome(Limits { calls: 2, ..LIMITS }));
    assert_eq!(calls(&sent), [(Class::Urgent.call(0), Priority(-9)), (0, Priority(2))]);
    assert!(matches!(heard(Record::Go { id: 0 })[..], [ClientAction::Transmit { call: 2, priority: Priority(2), .. }]));
    client.reprioritise(2, Priority(-1));
    let told = ClientAction::Reprioritise { call: 2, priority: Priority(-1) };
    assert_eq!(std::iter::from_fn(|| client.poll()).collect::<Vec<_>>(), [told]);
    // One that waits for the server's word is sent with its new one.
    client.reprioritise(4, Priority(5));
    client.reprioritise(77, Priority(5));
    assert_eq!(client.poll(), None);
    let go = Record::Go { id: Class::Urgent.call(0) };
    client.record(Class::Urgent, go).expect("what servers say");
    assert!(matches!(client.poll(), Some(ClientAction::Transmit { call: 4, priority: Priority(5), .. })));
}
