//! What a server decides: which calls it takes, whose bytes may come, which call a handler gets next.

use super::record::{Class, Kind, Limits, Outcome, Record};
use super::{Fault, INLINE, MAX_TEXT};
use penstock_types::Priority;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A server, with all its clients, which the caller numbers.
///
/// Its caller connects clients, hands over what they say, tells which transfers have ended, takes calls for its handlers, and carries
/// out [`Server::poll`]'s actions in order. A call that is withdrawn or refused never reaches a handler, and each other one reaches
/// one, once.
#[derive(Debug)]
pub struct Server {
    limits: Limits,
    served: BTreeSet<(Kind, String)>,
    sessions: BTreeMap<u32, Session>,
    /// Calls whose body is here, the most urgent first, then the one that has come first: urgency, order, client, call.
    ready: BTreeSet<(Priority, u64, u32, u64)>,
    /// How many calls have come.
    order: u64,
    is_closing: bool,
    actions: VecDeque<ServerAction>,
}

#[derive(Debug, Default)]
struct Session {
    /// The number of its next call on each class.
    next: [u64; 2],
    calls: BTreeMap<u64, Called>,
    /// Calls whose body waits for room, the most urgent first, then the oldest: urgency, order, call.
    waiting: BTreeSet<(Priority, u64, u64)>,
    /// Slots of calls whose reply is not on its way yet.
    busy: BTreeSet<u32>,
    /// Bytes of bodies and replies that are here for it.
    held: u64,
    /// Of these, bytes of replies that it has not taken.
    untaken: u64,
    /// It has said good-bye on these classes.
    byes: BTreeSet<Class>,
}

#[derive(Debug)]
struct Called {
    slot: u32,
    kind: Kind,
    name: String,
    body: u64,
    room: u64,
    exact: bool,
    priority: Priority,
    order: u64,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// For room for its body.
    Waits,
    /// Its body comes. `ends`: no handler gets it then, for this reason.
    Arrives { ends: Option<(Outcome, String)> },
    /// For a handler.
    Ready,
    /// A handler has it.
    Runs { is_withdrawn: bool },
    /// Its reply leaves.
    Leaves,
}

/// What is to be done. The order counts, for each client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerAction {
    /// Send this record.
    Say {
        /// To whom.
        client: u32,
        /// On which class.
        class: Class,
        /// What.
        record: Record,
    },
    /// Make room for a body of `len` bytes, and receive it under the slot's tag; then call [`Server::received`].
    Receive {
        /// From whom.
        client: u32,
        /// For which call.
        id: u64,
        /// Its slot.
        slot: u32,
        /// Bytes, at least one.
        len: u64,
        /// How urgent.
        priority: Priority,
    },
    /// Send `len` bytes under the slot's tag: the text, or what the handler has answered; then call [`Server::sent`].
    Transmit {
        /// To whom.
        client: u32,
        /// For which call.
        id: u64,
        /// Its slot.
        slot: u32,
        /// Bytes, at least one.
        len: u64,
        /// How urgent.
        priority: Priority,
        /// Of a refusal.
        text: Option<String>,
    },
    /// The body of a call is of no use any more.
    Release {
        /// Whose.
        client: u32,
        /// Of which call.
        id: u64,
    },
    /// End the connection at once, for this reason. The client is forgotten here.
    Break {
        /// Whose.
        client: u32,
        /// What it has done.
        fault: Fault,
    },
    /// Both sides have said all: leave the group of this client. It is forgotten here.
    Leave {
        /// Which.
        client: u32,
    },
}

/// A call for a handler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Whose.
    pub client: u32,
    /// Its number.
    pub id: u64,
    /// What it is.
    pub kind: Kind,
    /// What it is about.
    pub name: String,
    /// Bytes of its body.
    pub body: u64,
    /// How urgent.
    pub priority: Priority,
}

impl Server {
    /// A server that serves nothing yet.
    ///
    /// # Panics
    /// With a limit on requests or pushes above that on bytes in flight: such a call could never begin.
    #[must_use]
    pub fn new(limits: Limits) -> Server {
        assert!(limits.request.max(limits.push) <= limits.in_flight && limits.calls > 0, "checked by the caller");
        Server {
            limits,
            served: BTreeSet::new(),
            sessions: BTreeMap::new(),
            ready: BTreeSet::new(),
            order: 0,
            is_closing: false,
            actions: VecDeque::new(),
        }
    }

    /// From now on it serves this; under a name that ends with a slash, all names that begin with it.
    pub fn serve(&mut self, kind: Kind, name: &str) {
        self.served.insert((kind, name.to_owned()));
    }

    /// From now on it does not. Calls that it has accepted go on.
    pub fn withdraw(&mut self, kind: Kind, name: &str) {
        self.served.remove(&(kind, name.to_owned()));
    }

    pub(super) fn serves(&self, kind: Kind, name: &str) -> bool {
        let begins = name.match_indices('/').map(|(at, _)| &name[..=at]);
        begins.chain([name]).any(|name| self.served.contains(&(kind, name.to_owned())))
    }

    /// What to do next.
    pub fn poll(&mut self) -> Option<ServerAction> {
        self.actions.pop_front()
    }

    /// Whether no client is connected.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    /// How many clients are connected.
    #[must_use]
    pub fn clients(&self) -> usize {
        self.sessions.len()
    }

    /// Bytes that are here for clients: bodies that handlers have not done with, and replies that were not taken.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.sessions.values().map(|session| session.held).sum()
    }

    /// Calls that have not ended.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.sessions.values().map(|session| session.calls.len()).sum()
    }

    /// A client is connected, under a new number.
    pub fn connected(&mut self, client: u32) {
        self.sessions.insert(client, Session::default());
        self.say(client, Class::Usual, Record::Welcome(self.limits));
        if self.is_closing {
            self.say(client, Class::Usual, Record::Closing);
        }
    }

    /// A client is gone. What handlers still do for it counts for nothing; all its memory may go.
    pub fn lost(&mut self, client: u32) {
        self.sessions.remove(&client);
        self.ready.retain(|(_, _, of, _)| *of != client);
    }

    /// The server ends: no handler gets another call, and clients are told. It has ended when [`Server::is_empty`].
    pub fn close(&mut self) {
        if std::mem::replace(&mut self.is_closing, true) {
            return;
        }
        for client in self.sessions.keys().copied().collect::<Vec<_>>() {
            let calls: Vec<u64> = self.sessions[&client].calls.keys().copied().collect();
            for id in calls {
                self.end_unseen(client, id, Outcome::Closing, CLOSED.to_owned());
            }
            self.say(client, Class::Usual, Record::Closing);
        }
    }

    /// A client says this.
    pub fn record(&mut self, client: u32, class: Class, record: Record) {
        let Some(session) = self.sessions.get(&client) else { return };
        let result = match record {
            _ if session.byes.contains(&class) => Err(Fault("a record after its good-bye")),
            Record::Call { id, .. } | Record::Cancel { id } if Class::of_call(id) != class => {
                Err(Fault("a record of a call of another class"))
            }
            Record::Call { .. } => self.called(client, class, record),
            Record::Cancel { id } => self.cancelled(client, class, id),
            Record::Bye => self.bye(client, class),
            _ => Err(Fault("a record that only servers send")),
        };
        if let Err(fault) = result {
            self.break_off(client, fault);
        }
    }

    /// What a client says cannot be read.
    pub fn break_off(&mut self, client: u32, fault: Fault) {
        self.lost(client);
        self.actions.push_back(ServerAction::Break { client, fault });
    }

    /// The body of a call is here.
    pub fn received(&mut self, client: u32, id: u64) {
        let Some(called) = self.call(client, id) else { return };
        let Stage::Arrives { ends } = &mut called.stage else { return };
        match ends.take() {
            Some((outcome, text)) => {
                self.release_body(client, id);
                self.reply(client, id, outcome, text);
            }
            None => self.make_ready(client, id),
        }
    }

    /// The reply of a call was taken.
    pub fn sent(&mut self, client: u32, id: u64, len: u64) {
        let Some(session) = self.sessions.get_mut(&client) else { return };
        if session.calls.remove(&id).is_some() {
            session.held -= len;
            session.untaken -= len;
            self.grant(client);
            self.leave_when_taken(client);
        }
    }

    /// The call that the next free handler works on, if one is ready: the most urgent one, unless its client does not take replies.
    /// [`Server::answer`] follows.
    pub fn take(&mut self) -> Option<Asked> {
        let may_run = |client: &u32| {
            let session = &self.sessions[client];
            let leaving = session.calls.len() - session.busy.len();
            session.untaken < self.limits.in_flight.max(1) && leaving < MOST_LEAVING * self.limits.calls as usize
        };
        let turn = *self.ready.iter().find(|(_, _, client, _)| may_run(client))?;
        self.ready.remove(&turn);
        let (priority, _, client, id) = turn;
        let called = self.call(client, id).expect("it is ready");
        called.stage = Stage::Runs { is_withdrawn: false };
        Some(Asked { client, id, kind: called.kind, name: called.name.clone(), body: called.body, priority })
    }

    /// A handler has done with a call: it has `len` bytes of reply, or has failed, for this reason. Returns whether the reply's bytes are
    /// needed.
    pub fn answer(&mut self, client: u32, id: u64, result: Result<u64, String>) -> bool {
        let Some(called) = self.call(client, id) else { return false };
        let Stage::Runs { is_withdrawn } = called.stage else { return false };
        let (room, exact, kind) = (called.room, called.exact, called.kind);
        self.release_body(client, id);
        match result {
            _ if is_withdrawn => self.reply(client, id, Outcome::Cancelled, String::new()),
            Err(text) => self.reply(client, id, Outcome::Failed, text),
            Ok(len) if kind == Kind::Push && len > 0 => {
                self.reply(
                    client,
                    id,
                    Outcome::Failed,
                    "a push has no reply, and its handler has returned one".to_owned(),
                );
            }
            Ok(len) if len > room || (exact && len != room) => {
                let text = format!(
                    "it has {len} bytes, and the client has room for {}{room}",
                    if exact { "exactly " } else { "" }
                );
                self.reply(client, id, Outcome::Misfit, text);
            }
            Ok(len) => {
                self.leave(client, id, Outcome::Done, len, None);
                return len > 0;
            }
        }
        false
    }

    fn called(&mut self, client: u32, class: Class, record: Record) -> Result<(), Fault> {
        let Record::Call { id, slot, kind, name, body, room, exact, priority } = record else { unreachable!("a call") };
        let limits = self.limits;
        let session = self.sessions.get_mut(&client).expect("looked at");
        if id != class.call(session.next[class as usize]) {
            return Err(Fault("a call out of turn"));
        }
        if slot >= limits.calls || session.busy.contains(&slot) {
            return Err(Fault("more calls than the server takes"));
        }
        if session.calls.len() >= MOST_CALLS * limits.calls as usize {
            return Err(Fault("more calls than replies that were taken"));
        }
        if kind == Kind::Pull && body > 0 {
            return Err(Fault("a pull with a body"));
        }
        session.next[class as usize] += 1;
        self.order += 1;
        let most = if kind == Kind::Push { limits.push } else { limits.request };
        let ends = if self.is_closing {
            Some((Outcome::Closing, CLOSED.to_owned()))
        } else if !self.serves(kind, &name) {
            Some((Outcome::Unknown, self.unknown(kind, &name)))
        } else if body > most {
            Some((Outcome::TooLarge, format!("it has {body} bytes, and the server takes {most} of a {}", kind.name())))
        } else {
            None
        };
        let follows = body > 0 && body <= INLINE;
        let stage = Stage::Waits;
        let called = Called { slot, kind, name, body, room, exact, priority, order: self.order, stage };
        let session = self.sessions.get_mut(&client).expect("looked at");
        session.calls.insert(id, called);
        session.busy.insert(slot);
        match ends {
            _ if follows => self.receive(client, id, ends),
            Some((outcome, text)) => self.reply(client, id, outcome, text),
            None if body == 0 => self.make_ready(client, id),
            None => {
                session.waiting.insert((priority, self.order, id));
                self.grant(client);
            }
        }
        Ok(())
    }

    fn cancelled(&mut self, client: u32, class: Class, id: u64) -> Result<(), Fault> {
        if id >= class.call(self.sessions[&client].next[class as usize]) {
            return Err(Fault("a call that is withdrawn before it was made"));
        }
        let Some(called) = self.call(client, id) else { return Ok(()) };
        match &mut called.stage {
            Stage::Runs { is_withdrawn } => *is_withdrawn = true,
            // Each would be confirmed, without end.
            Stage::Arrives { ends: Some((Outcome::Cancelled, _)) } => {
                return Err(Fault("a call that is withdrawn twice"));
            }
            stage => {
                // The client has not sent its body, or could not have withdrawn it. What it sends in its place must not overtake this.
                let is_promised = matches!(stage, Stage::Arrives { .. }) && called.body > INLINE;
                self.end_unseen(client, id, Outcome::Cancelled, String::new());
                if is_promised {
                    self.say(client, class, Record::Withdrawn { id });
                }
            }
        }
        Ok(())
    }

    fn bye(&mut self, client: u32, class: Class) -> Result<(), Fault> {
        let session = self.sessions.get_mut(&client).expect("looked at");
        if !session.busy.is_empty() {
            return Err(Fault("a good-bye before the end of its calls"));
        }
        session.byes.insert(class);
        self.leave_when_taken(client);
        Ok(())
    }

    /// Answers a client's good-bye. It has its replies, but their acknowledgements may come after it.
    fn leave_when_taken(&mut self, client: u32) {
        let session = &self.sessions[&client];
        if session.byes.len() == Class::ALL.len() && session.calls.is_empty() {
            Class::ALL.into_iter().for_each(|class| self.say(client, class, Record::Bye));
            self.lost(client);
            self.actions.push_back(ServerAction::Leave { client });
        }
    }

    /// Ends a call that no handler has seen; nothing happens to others.
    fn end_unseen(&mut self, client: u32, id: u64, outcome: Outcome, text: String) {
        let Some(called) = self.call(client, id) else { return };
        match &mut called.stage {
            Stage::Waits => self.reply(client, id, outcome, text),
            Stage::Arrives { ends } => drop(ends.get_or_insert((outcome, text))),
            Stage::Ready => {
                let turn = (called.priority, called.order, client, id);
                self.ready.remove(&turn);
                self.release_body(client, id);
                self.reply(client, id, outcome, text);
            }
            Stage::Runs { .. } | Stage::Leaves => {}
        }
    }

    /// Lets bodies come, the most urgent first, as far as the client's bytes in flight allow it.
    fn grant(&mut self, client: u32) {
        loop {
            let session = &self.sessions[&client];
            let Some(&(.., id)) = session.waiting.first() else { return };
            if session.held.saturating_add(session.calls[&id].body) > self.limits.in_flight {
                return;
            }
            // The place is there before the client hears of it.
            self.receive(client, id, None);
            self.say(client, Class::of_call(id), Record::Go { id });
        }
    }

    fn receive(&mut self, client: u32, id: u64, ends: Option<(Outcome, String)>) {
        let session = self.sessions.get_mut(&client).expect("it has called");
        let called = session.calls.get_mut(&id).expect("it has called");
        session.waiting.remove(&(called.priority, called.order, id));
        called.stage = Stage::Arrives { ends };
        session.held += called.body;
        let (slot, len, priority) = (called.slot, called.body, called.priority);
        self.actions.push_back(ServerAction::Receive { client, id, slot, len, priority });
    }

    fn make_ready(&mut self, client: u32, id: u64) {
        let called = self.call(client, id).expect("it has called");
        called.stage = Stage::Ready;
        let turn = (called.priority, called.order, client, id);
        self.ready.insert(turn);
    }

    fn release_body(&mut self, client: u32, id: u64) {
        let session = self.sessions.get_mut(&client).expect("it has called");
        session.held -= session.calls[&id].body;
        if session.calls[&id].body > 0 {
            self.actions.push_back(ServerAction::Release { client, id });
        }
    }

    /// Ends a call with a text instead of a reply.
    fn reply(&mut self, client: u32, id: u64, outcome: Outcome, mut text: String) {
        let mut end = text.len().min(MAX_TEXT as usize);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        self.leave(client, id, outcome, text.len() as u64, Some(text));
    }

    fn leave(&mut self, client: u32, id: u64, outcome: Outcome, len: u64, text: Option<String>) {
        self.say(client, Class::of_call(id), Record::Reply { id, outcome, len });
        let session = self.sessions.get_mut(&client).expect("it has called");
        let called = session.calls.get_mut(&id).expect("it has called");
        session.waiting.remove(&(called.priority, called.order, id));
        session.busy.remove(&called.slot);
        if len == 0 {
            session.calls.remove(&id);
        } else {
            called.stage = Stage::Leaves;
            session.held += len;
            session.untaken += len;
            let (slot, priority) = (called.slot, called.priority);
            self.actions.push_back(ServerAction::Transmit { client, id, slot, len, priority, text });
        }
        self.grant(client);
    }

    fn unknown(&self, kind: Kind, name: &str) -> String {
        let of_kind = self.served.iter().filter(|(known, _)| *known == kind).map(|(_, name)| name.as_str());
        let mut names: Vec<String> = of_kind.take(MOST_NAMES + 1).map(|name| name.escape_debug().to_string()).collect();
        if names.len() > MOST_NAMES {
            "...".clone_into(&mut names[MOST_NAMES]);
        }
        let served = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        let kind = kind.name();
        format!("it serves no {kind} called {name:?}; {} that it serves: {served}", plural(kind))
    }

    fn say(&mut self, client: u32, class: Class, record: Record) {
        self.actions.push_back(ServerAction::Say { client, class, record });
    }

    fn call(&mut self, client: u32, id: u64) -> Option<&mut Called> {
        self.sessions.get_mut(&client)?.calls.get_mut(&id)
    }
}

fn plural(kind: &str) -> String {
    format!("{kind}{}", if kind.ends_with('h') { "es" } else { "s" })
}

const CLOSED: &str = "the server is being closed";
/// Names that an error lists.
const MOST_NAMES: usize = 16;
/// A client gets no further handler while so many replies, times the calls that it may have, are on their way: acknowledgements come a
/// round trip later than replies, and a call takes one at least.
const MOST_LEAVING: usize = 4;
/// Refusals need no handler, and come on top.
const MOST_CALLS: usize = 2 * MOST_LEAVING;
