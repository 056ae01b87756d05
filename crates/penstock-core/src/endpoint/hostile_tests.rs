//! What no client and no server of ours would say, in any order, among what they would: memory stays bounded, nothing is used after
//! it was given back, and every call ends once.

use super::tests::seed;
use super::*;
use penstock_types::{Priority, Time};
use std::collections::{BTreeMap, BTreeSet};

const SEEDS: u64 = 2000;

/// A record with anything in it, mostly of a call that may exist. `made`: how many were made on each class.
fn any_record(random: &mut fastrand::Rng, made: [u64; 2], limits: Limits) -> (Class, Record) {
    let class = Class::ALL[random.usize(..2)];
    let count = made[class as usize];
    let id = match random.u32(..8) {
        0 => random.u64(..),
        1 => Class::ALL[random.usize(..2)].call(random.u64(..4)),
        2 => class.call(count + 1),
        3..=5 if count > 0 => class.call(random.u64(..count)),
        _ => class.call(count),
    };
    let sizes = [0, 1, 9, INLINE, INLINE + 1, limits.request, limits.push, limits.push + 1, limits.in_flight, u64::MAX];
    let mut size = || sizes[random.usize(..sizes.len())];
    let (body, room, len) = (size(), size(), size());
    let record = match random.u32(..8) {
        0 => Record::Welcome(Limits { calls: random.u32(..3), request: body, push: room, in_flight: len }),
        1 => Record::Bye,
        2 => Record::Closing,
        3 => Record::Withdrawn { id },
        4 => Record::Go { id },
        5 => Record::Cancel { id },
        6 => Record::Reply { id, outcome: [Outcome::Done, Outcome::Failed][random.usize(..2)], len },
        _ => Record::Call {
            id,
            slot: random.u32(..=limits.calls),
            kind: Kind::ALL[random.usize(..3)],
            name: ["known", "unknown", ""][random.usize(..3)].to_owned(),
            body,
            room,
            exact: random.bool(),
            priority: Priority(random.i32(-1..2)),
        },
    };
    (class, record)
}

/// One in so many records is anything, and the others are what they may be.
fn hostility(random: &mut fastrand::Rng) -> u32 {
    [3, 20, 200, u32::MAX][random.usize(..4)]
}

/// A server, and what it has told its driver about one client.
struct Served {
    server: Server,
    limits: Limits,
    is_gone: bool,
    welcomes: u32,
    /// Calls of the client that it has read, by class.
    made: [u64; 2],
    /// Slots of those that it has not answered.
    slots: BTreeMap<u64, u32>,
    arriving: BTreeMap<u64, u64>,
    bodies: BTreeMap<u64, u64>,
    replied: BTreeMap<u64, u64>,
    leaving: BTreeMap<u64, u64>,
    running: Vec<Asked>,
    handled: BTreeSet<u64>,
}

impl Served {
    /// What a client may say: mostly a call, if it has a slot.
    fn sane_record(&self, random: &mut fastrand::Rng) -> (Class, Record) {
        let slot = (0..self.limits.calls).find(|slot| self.slots.values().all(|busy| busy != slot));
        let class = Class::ALL[random.usize(..2)];
        let count = self.made[class as usize];
        let Some(slot) = slot.filter(|_| random.u32(..8) > 0) else {
            let id = class.call(random.u64(..count.max(1)));
            return if count > 0 { (class, Record::Cancel { id }) } else { (Class::Usual, Record::Closing) };
        };
        let kind = Kind::ALL[random.usize(..3)];
        let sizes = [0, 9, INLINE, INLINE + 1, self.limits.request, self.limits.push + 1];
        let body = if kind == Kind::Pull { 0 } else { sizes[random.usize(..sizes.len())] };
        let name = ["known", "known", "known", "unknown"][random.usize(..4)].to_owned();
        let (room, exact, priority) = (20_000, random.u32(..4) == 0, Priority(random.i32(-1..2)));
        (class, Record::Call { id: class.call(count), slot, kind, name, body, room, exact, priority })
    }

    fn carry_out(&mut self) {
        while let Some(action) = self.server.poll() {
            let (ServerAction::Say { client, .. }
            | ServerAction::Receive { client, .. }
            | ServerAction::Transmit { client, .. }
            | ServerAction::Release { client, .. }
            | ServerAction::Break { client, .. }
            | ServerAction::Leave { client }) = action;
            if client != 0 {
                continue;
            }
            assert!(!self.is_gone, "{action:?} for a client that is gone");
            match action {
                ServerAction::Say { record: Record::Welcome(_), .. } => self.welcomes += 1,
                ServerAction::Say { record: Record::Reply { id, len, .. }, .. } => {
                    assert_eq!(self.replied.insert(id, len), None, "two replies to {id}");
                    self.slots.remove(&id);
                }
                ServerAction::Say { record: Record::Go { id }, .. } => assert!(self.arriving[&id] > INLINE),
                ServerAction::Say { .. } => {}
                ServerAction::Receive { id, len, .. } => {
                    assert!(len > 0 && !self.replied.contains_key(&id));
                    assert!(self.bodies.insert(id, len).is_none() && self.arriving.insert(id, len).is_none());
                }
                ServerAction::Transmit { id, len, text, .. } => {
                    assert_eq!(self.replied[&id], len);
                    assert!(len > 0 && text.is_none_or(|text| text.len() as u64 == len));
                    assert_eq!(self.leaving.insert(id, len), None);
                }
                ServerAction::Release { id, .. } => {
                    assert!(!self.arriving.contains_key(&id), "memory is released into which bytes come");
                    assert!(self.bodies.remove(&id).is_some(), "released twice");
                }
                ServerAction::Break { .. } | ServerAction::Leave { .. } => {
                    if let ServerAction::Leave { .. } = action {
                        assert!(self.bodies.is_empty() && self.leaving.is_empty());
                    }
                    self.is_gone = true;
                }
            }
        }
        if self.is_gone {
            // Its group ends, and with it all that was on its way.
            [&mut self.arriving, &mut self.bodies, &mut self.leaving].into_iter().for_each(BTreeMap::clear);
            self.slots.clear();
        }
        let slots: BTreeSet<u32> = self.slots.values().copied().collect();
        assert_eq!(slots.len(), self.slots.len(), "two calls without a reply have one slot: {:?}", self.slots);
        let calls = u64::from(self.limits.calls);
        assert!(self.bodies.values().sum::<u64>() <= self.limits.in_flight + calls * INLINE, "{:?}", self.bodies);
        assert!(self.server.calls() as u64 <= 8 * calls + 1, "{} calls", self.server.calls());
    }
}

/// Whatever a client says: the bytes that it makes the server hold are limited, no handler sees a call twice, and another client's
/// call is done in the end.
#[test]
fn any_client() {
    let first = seed();
    let (mut goners, mut taken) = (0, 0);
    for seed in first..first + SEEDS {
        let mut random = fastrand::Rng::with_seed(seed);
        let most = [9, INLINE, 20_000][random.usize(..3)];
        let limits =
            Limits { calls: random.u32(1..4), request: 20_000, push: most, in_flight: 20_000 + random.u64(..30_000) };
        let mut server = Server::new(limits);
        Kind::ALL.into_iter().for_each(|kind| server.serve(kind, "known"));
        server.connected(0);
        server.connected(1);
        let (made, welcomes, is_gone) = ([0, 0], 0, false);
        let (slots, arriving, bodies, replied, leaving, running, handled) = Default::default();
        let mut it = Served {
            server,
            limits,
            is_gone,
            welcomes,
            made,
            slots,
            arriving,
            bodies,
            replied,
            leaving,
            running,
            handled,
        };
        it.carry_out();
        let hostility = hostility(&mut random);
        let mut last: Option<(Class, Record)> = None;
        for _ in 0..random.u32(..200) {
            match random.u32(..10) {
                0..=3 => {
                    let (class, record) = match &last {
                        _ if random.u32(..hostility) > 0 => it.sane_record(&mut random),
                        Some(last) if random.bool() => last.clone(),
                        _ => any_record(&mut random, it.made, limits),
                    };
                    last = Some((class, record.clone()));
                    if let Record::Call { id, slot, .. } = record
                        && !it.is_gone
                        && id == class.call(it.made[class as usize])
                    {
                        it.slots.insert(id, slot);
                        it.made[class as usize] += 1;
                    }
                    it.server.record(0, class, record);
                }
                4 | 5 => {
                    if let Some(id) = random.choice(it.arriving.keys().copied().collect::<Vec<_>>()) {
                        it.arriving.remove(&id);
                        it.server.received(0, id);
                    }
                }
                6 => {
                    if let Some((id, len)) = random.choice(it.leaving.clone().into_iter().collect::<Vec<_>>()) {
                        it.leaving.remove(&id);
                        it.server.sent(0, id, len);
                    }
                }
                7 => {
                    if let Some(asked) = it.server.take() {
                        assert!(it.handled.insert(asked.id) && !it.replied.contains_key(&asked.id));
                        assert!(!it.arriving.contains_key(&asked.id) && asked.name == "known");
                        it.running.push(asked);
                    }
                }
                8 => {
                    if !it.running.is_empty() {
                        let asked = it.running.swap_remove(random.usize(..it.running.len()));
                        let result = if random.bool() { Ok(random.u64(..20_000)) } else { Err("no".repeat(4000)) };
                        it.server.answer(0, asked.id, result);
                    }
                }
                _ => {
                    if random.u32(..100) == 0 {
                        it.server.lost(0);
                        it.is_gone = true;
                    }
                }
            }
            it.carry_out();
        }
        println!("seed {seed}: {} handled, gone: {}", it.handled.len(), it.is_gone);
        (goners, taken) = (goners + u32::from(it.is_gone), taken + it.handled.len());
        assert!(it.welcomes == 1);
        let (id, name, priority) = (0, "known".to_owned(), Priority(0));
        let call = Record::Call { id, slot: 0, kind: Kind::Push, name, body: 9, room: 0, exact: false, priority };
        it.server.record(1, Class::Usual, call);
        it.server.received(1, 0);
        assert!(std::iter::from_fn(|| it.server.take()).any(|asked| asked.client == 1));
        it.server.answer(1, 0, Ok(0));
        let done = Record::Reply { id: 0, outcome: Outcome::Done, len: 0 };
        let is_done = |action| matches!(action, ServerAction::Say { client: 1, ref record, .. } if *record == done);
        assert!(std::iter::from_fn(|| it.server.poll()).any(is_done));
        it.server.lost(0);
        assert_eq!((it.server.held_bytes(), it.server.calls()), (0, 0));
    }
    println!("{goners} of {SEEDS} were broken off; {taken} calls were handled");
    assert!(goners > SEEDS as u32 / 10 && goners < SEEDS as u32 * 19 / 20 && taken > SEEDS as usize);
}

/// What a client's driver knows of a call.
#[derive(Default)]
struct Known {
    body: u64,
    has_memory: bool,
    is_transmitting: Option<bool>,
    is_receiving: Option<Target>,
    transmits: u32,
    receives: u32,
    ends: u32,
    is_forgotten: bool,
}

/// Whatever a server says: every call ends once, and not while bytes move from or to its caller's memory; nothing is done for one that
/// was forgotten; and what the server may not say is told at once.
#[test]
fn any_server() {
    let first = seed();
    let mut faults = 0;
    for seed in first..first + SEEDS {
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let limits = Limits { calls: random.u32(1..4), request: 20_000, push: 30_000, in_flight: 50_000 };
        let mut client = Client::default();
        let mut known: BTreeMap<u64, Known> = BTreeMap::new();
        let mut said = Said::default();
        let mut is_lost = false;
        let hostility = hostility(&mut random);
        let mut last: Option<(Class, Record)> = None;
        let mut now = 0;
        for turn in 0..random.u64(1..150) {
            now += random.u64(..20);
            let some = |random: &mut fastrand::Rng, known: &BTreeMap<u64, Known>, wanted: &dyn Fn(&Known) -> bool| {
                let all: Vec<u64> = known.iter().filter(|(_, one)| wanted(one)).map(|(call, _)| *call).collect();
                random.choice(all)
            };
            match random.u32(..10) {
                0 | 1 => {
                    let body = [0, 9, INLINE, INLINE + 1, 20_000, 30_001][random.usize(..6)];
                    let kind = if body == 0 { Kind::Pull } else { Kind::ALL[random.usize(..2)] };
                    let target = if random.bool() { Target::Caller } else { Target::Own };
                    known.insert(turn, Known { body, has_memory: target == Target::Caller, ..Known::default() });
                    let room = [0, 9, 20_000][random.usize(..3)];
                    let deadline = random.bool().then(|| Time(now + random.u64(..200)));
                    let (name, exact, priority) = ("known".to_owned(), random.bool(), Priority(random.i32(-1..2)));
                    client.ask(turn, Ask { kind, name, body, room, exact, target, priority, deadline });
                }
                2..=5 if !is_lost => {
                    let (class, record) = match client.limits() {
                        None if random.u32(..hostility) > 0 => (Class::Usual, Record::Welcome(limits)),
                        Some(_) if random.u32(..hostility) > 0 => match said.sane_record(&mut random) {
                            Some(each) => each,
                            None => continue,
                        },
                        _ => match &last {
                            Some(last) if random.bool() => last.clone(),
                            _ => any_record(&mut random, said.made, limits),
                        },
                    };
                    last = Some((class, record.clone()));
                    said.hear(&record);
                    if client.record(class, record).is_err() {
                        faults += 1;
                        is_lost = true;
                        // As the driver does: it ends the connection, and nothing moves any more.
                        client.lost(Ended::Lost);
                    }
                }
                6 => {
                    if let Some(call) = some(&mut random, &known, &|one| one.is_transmitting.is_some()) {
                        known.get_mut(&call).unwrap().is_transmitting = None;
                        client.sent(call);
                    }
                }
                7 => {
                    if let Some(call) = some(&mut random, &known, &|one| one.is_receiving.is_some()) {
                        known.get_mut(&call).unwrap().is_receiving = None;
                        client.received(call);
                    }
                }
                8 => client.handle_timeout(Time(now)),
                _ => match some(&mut random, &known, &|_| true) {
                    Some(call) if random.u32(..10) > 0 => client.reprioritise(call, Priority(random.i32(-3..4))),
                    _ => client.close(),
                },
            }
            while let Some(action) = client.poll() {
                carry_out(action, &mut known, &mut said, is_lost);
            }
        }
        client.lost(Ended::Lost);
        while let Some(action) = client.poll() {
            carry_out(action, &mut known, &mut said, true);
        }
        assert!(known.values().all(|one| one.ends == 1 && one.is_forgotten) && client.calls() == 0);
    }
    assert!(faults > SEEDS / 10 && faults < SEEDS, "{faults} faults of {SEEDS} servers");
}

/// What a client has said, as its server knows it: the calls that have no reply.
#[derive(Default)]
struct Said {
    made: [u64; 2],
    calls: BTreeMap<u64, SaidCall>,
}

struct SaidCall {
    kind: Kind,
    body: u64,
    room: u64,
    is_cancelled: bool,
    may_go: bool,
    was_confirmed: bool,
    is_sent: bool,
}

impl Said {
    /// What its server may say; `None`: nothing now.
    fn sane_record(&self, random: &mut fastrand::Rng) -> Option<(Class, Record)> {
        let (&id, call) = random.choice(&self.calls)?;
        let record = if call.body > INLINE && !call.may_go && random.u32(..3) > 0 {
            Record::Go { id }
        } else if call.may_go && call.is_cancelled && !call.was_confirmed {
            Record::Withdrawn { id }
        } else if call.body == 0 || call.is_sent {
            let outcome = [Outcome::Done, Outcome::Failed][random.usize(..2)];
            let len = if outcome == Outcome::Done && call.kind == Kind::Push { 0 } else { call.room.min(MAX_TEXT) };
            Record::Reply { id, outcome, len: if call.room > MAX_TEXT { call.room.min(9) } else { len } }
        } else {
            return None;
        };
        Some((Class::of_call(id), record))
    }

    fn hear(&mut self, record: &Record) {
        match record {
            Record::Go { id } => drop(self.calls.entry(*id).and_modify(|call| call.may_go = true)),
            Record::Withdrawn { id } => drop(self.calls.entry(*id).and_modify(|call| call.was_confirmed = true)),
            Record::Reply { id, .. } => drop(self.calls.remove(id)),
            _ => {}
        }
    }

    fn say(&mut self, class: Class, record: Record) {
        match record {
            Record::Call { id, kind, body, room, .. } => {
                assert_eq!(id, class.call(self.made[class as usize]));
                self.made[class as usize] += 1;
                let (is_cancelled, may_go, was_confirmed, is_sent) = (false, false, false, body <= INLINE);
                let call = SaidCall { kind, body, room, is_cancelled, may_go, was_confirmed, is_sent };
                self.calls.insert(id, call);
            }
            Record::Cancel { id } => {
                assert_eq!(class, Class::of_call(id));
                self.calls.entry(id).and_modify(|call| call.is_cancelled = true);
            }
            Record::Bye => {}
            other => panic!("{other:?} of a client"),
        }
    }
}

fn carry_out(action: ClientAction, known: &mut BTreeMap<u64, Known>, said: &mut Said, is_lost: bool) {
    let call = match &action {
        ClientAction::Say(class, record) => return said.say(*class, record.clone()),
        ClientAction::Leave => return,
        ClientAction::Transmit { call, .. }
        | ClientAction::Receive { call, .. }
        | ClientAction::Reprioritise { call, .. }
        | ClientAction::End(call, _)
        | ClientAction::Forget(call) => *call,
    };
    let one = known.get_mut(&call).expect("a call that was made");
    assert!(!one.is_forgotten, "{action:?} of one that was forgotten");
    match action {
        ClientAction::Transmit { len, zeros, .. } => {
            one.transmits += 1;
            assert!(one.transmits == 1 && len == one.body && zeros == (one.ends > 0));
            one.is_transmitting = Some(zeros);
            said.calls.values_mut().filter(|call| call.may_go).for_each(|call| call.is_sent = true);
        }
        ClientAction::Receive { target, len, .. } => {
            one.receives += 1;
            assert!(one.receives == 1 && len > 0 && len <= 20_000 && (one.ends == 0 || target == Target::Own));
            one.is_receiving = Some(target);
        }
        ClientAction::End(..) => {
            one.ends += 1;
            let is_read = one.is_transmitting == Some(false) && one.body > INLINE;
            let is_written = one.is_receiving.is_some_and(|target| target != Target::Own) && one.has_memory;
            assert!(one.ends == 1 && (is_lost || !(is_read || is_written)), "it ends while its memory is used");
        }
        ClientAction::Forget(_) => {
            assert!(one.ends == 1 && (is_lost || (one.is_transmitting.is_none() && one.is_receiving.is_none())));
            one.is_forgotten = true;
        }
        _ => {}
    }
}
