//! A server: its thread, and the calls that handlers take from it.

use super::connection::{self, CLIENT, Connection, Direction, Inbox, Span};
use super::memory::{Memory, Spare};
use crate::engine::Engine;
use crate::group::Group;
use crate::handle::check_fork;
use crate::runtime::GroupSpec;
use crate::ticket::{Promise, Ticket};
use penstock_core::endpoint::{self, Class, Fault, Kind, Limits, Record, ServerAction};
use penstock_types::{Failure, FailureKind, Priority};
use std::any::Any;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// A server. Clients are brought to it one by one ([`Server::accept`]); handlers take calls from it ([`Server::next`]).
#[derive(Debug)]
pub struct Server {
    input: Inbox<Input>,
}

/// A call for a handler. Its client waits until it is answered; one that is dropped fails there.
#[derive(Debug)]
pub struct Asked {
    asked: endpoint::Asked,
    /// How messages call the client.
    who: Arc<str>,
    body: Option<Arc<Memory>>,
    /// Until it is answered.
    input: Option<Inbox<Input>>,
}

/// What a handler answers.
pub enum Reply {
    /// Nothing.
    Empty,
    /// These bytes.
    Bytes(Box<[u8]>),
    /// Bytes of the caller's, which are sent from where they lie.
    Lent {
        /// Where they begin.
        address: *const u8,
        /// How many.
        len: u64,
        /// Their owner, kept until the client has them.
        keep: Box<dyn Any + Send>,
    },
}

// SAFETY: the pointer is to the caller's bytes, which `keep` keeps alive.
unsafe impl Send for Reply {}

impl std::fmt::Debug for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reply").finish_non_exhaustive()
    }
}

/// What a server has at present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerStats {
    /// Clients that are connected.
    pub clients: usize,
    /// Calls that have come and not ended.
    pub calls: usize,
    /// Bytes of their bodies and replies that are here.
    pub held_bytes: u64,
    /// Calls that handlers have taken so far.
    pub taken: u64,
}

#[derive(Debug)]
enum Input {
    Accept(Group, Ticket, Arc<str>),
    Joined(u32, Result<(), Failure>),
    Heard(u32, Class, Result<Box<[u8; Record::BYTES]>, Failure>),
    Said(u32),
    Received(u32, u64),
    Sent(u32, u64, u64),
    Lost(u32, Failure),
    Serve(Kind, String, bool),
    Take(mpsc::Sender<Asked>),
    Answer(u32, u64, Result<Reply, String>),
    Stats(mpsc::Sender<ServerStats>),
    Close(Duration, Promise),
}

impl Server {
    /// Starts a server's thread. `name` is for logs.
    ///
    /// # Errors
    /// `Config`: limits that no call could meet, or no thread can be had.
    pub fn start(name: &str, limits: Limits) -> Result<Server, Failure> {
        if limits.calls == 0 || limits.request.max(limits.push) > limits.in_flight || limits.in_flight > MOST_BYTES {
            let message = format!(
                "the limits of endpoint {name} cannot hold: at least 1 call, and requests ({} bytes) and pushes ({}) of at most \
                 the bytes in flight ({}), which are at most {MOST_BYTES}.",
                limits.request, limits.push, limits.in_flight
            );
            return Err(Failure::of_call(FailureKind::Config, message));
        }
        let (input, inputs) = Inbox::new();
        let driver = Driver {
            name: name.into(),
            machine: endpoint::Server::new(limits),
            most_said: 1024 + 8 * limits.calls as usize,
            clients: BTreeMap::new(),
            joining: VecDeque::new(),
            next_client: 0,
            takers: VecDeque::new(),
            taken: 0,
            spare: Spare::default(),
            input: input.clone(),
            closing: None,
        };
        std::thread::Builder::new()
            .name("penstock-server".into())
            .spawn(move || driver.run(inputs))
            .map_err(|error| Failure::of_call(FailureKind::Config, format!("cannot start a thread: {error}.")))?;
        Ok(Server { input })
    }

    /// From now on it serves this, or, without `is_served`, no longer. Calls that it has accepted go on.
    pub fn serve(&self, kind: Kind, name: &str, is_served: bool) {
        self.tell(Input::Serve(kind, name.to_owned(), is_served));
    }

    /// Connects with a client, which is rank 1 of the group, while this process is rank 0. Returns at once. A client that does not come
    /// within some seconds is given up.
    pub fn accept(&self, engine: &Engine, spec: GroupSpec) {
        let who =
            spec.members.get(CLIENT as usize).map_or_else(|| "a client".into(), |contact| contact.describe().into());
        let (group, joined) = engine.join(spec);
        if let Err(Input::Accept(group, ..)) = self.input.send(Input::Accept(group, joined, who)) {
            group.leave();
        }
    }

    /// Blocks until there is a call for a handler, the most urgent one of all clients. `None`: the server is closed, or this process is a
    /// fork of its.
    #[must_use]
    pub fn next(&self) -> Option<Asked> {
        if check_fork().is_err() {
            return None;
        }
        let (reply, asked) = mpsc::channel();
        self.tell(Input::Take(reply));
        asked.recv().ok()
    }

    /// What it has at present. `None`: it is closed.
    #[must_use]
    pub fn stats(&self) -> Option<ServerStats> {
        check_fork().ok()?;
        let (reply, stats) = mpsc::channel();
        self.tell(Input::Stats(reply));
        stats.recv().ok()
    }

    /// Ends the server: no handler gets another call, clients are told, and what handlers work on is answered. After `grace`, connections
    /// that have not ended are broken off. The ticket completes when all have.
    #[must_use]
    pub fn close(&self, grace: Duration) -> Ticket {
        let ticket = Ticket::default();
        if check_fork().is_err() {
            ticket.complete(Ok(()));
        } else if let Err(Input::Close(_, promise)) = self.input.send(Input::Close(grace, ticket.promise())) {
            promise.complete(Ok(())); // it has ended
        }
        ticket
    }

    /// A thread that has ended has no use for it.
    fn tell(&self, input: Input) {
        drop(self.input.send(input));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.close(Duration::ZERO));
    }
}

impl Asked {
    /// Which client asks: numbered from 0 on as they come.
    #[must_use]
    pub fn client(&self) -> u32 {
        self.asked.client
    }

    /// The client, for messages.
    #[must_use]
    pub fn who(&self) -> &str {
        &self.who
    }

    /// What it is.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.asked.kind
    }

    /// What it is about.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.asked.name
    }

    /// How urgent.
    #[must_use]
    pub fn priority(&self) -> Priority {
        self.asked.priority
    }

    /// Its body. `None`: it has no bytes.
    #[must_use]
    pub fn body(&self) -> Option<&Arc<Memory>> {
        self.body.as_ref()
    }

    /// The handler has done it, or has failed, for this reason; the client hears that. A push has no reply. The body may be kept, but
    /// counts no longer among the client's bytes in flight. Later calls do nothing.
    ///
    /// # Safety
    /// A reply that is lent must stay valid and unchanged while its `keep` is held.
    pub unsafe fn answer(&mut self, result: Result<Reply, String>) {
        if let Some(input) = self.input.take() {
            drop(input.send(Input::Answer(self.asked.client, self.asked.id, result)));
        }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        // SAFETY: nothing is lent.
        unsafe { self.answer(Err("its handler has gone".to_owned())) };
    }
}

/// What runs on the server's thread.
struct Driver {
    name: Arc<str>,
    machine: endpoint::Server,
    /// A client that leaves more records unread is cut off: each is kept until it is taken.
    most_said: usize,
    clients: BTreeMap<u32, Connected>,
    /// Clients that were joining when they were noted here, and until when they may take to, the earliest first.
    joining: VecDeque<(Instant, u32)>,
    next_client: u32,
    /// Handlers that wait for a call.
    takers: VecDeque<mpsc::Sender<Asked>>,
    taken: u64,
    spare: Spare,
    input: Inbox<Input>,
    /// Until when connections may take to end, and whom to tell.
    closing: Option<(Instant, Vec<Promise>)>,
}

struct Connected {
    connection: Connection,
    who: Arc<str>,
    is_joining: bool,
    bodies: HashMap<u64, Arc<Memory>>,
    replies: HashMap<u64, Reply>,
}

impl Driver {
    fn run(mut self, inputs: mpsc::Receiver<Input>) {
        while let Ok(input) = connection::next(&inputs, self.deadline()) {
            if let Some(input) = input {
                self.handle(input);
            }
            self.expire();
            self.carry_out();
            self.serve_takers();
            if self.closing.is_some() && self.clients.is_empty() {
                let (_, promises) = self.closing.take().expect("just seen");
                return self.hang_up(inputs, &promises);
            }
        }
    }

    /// The server has ended. Whoever has been told so finds that nothing is served.
    fn hang_up(&self, inputs: mpsc::Receiver<Input>, closing: &[Promise]) {
        self.input.close();
        closing.iter().for_each(|promise| promise.complete(Ok(())));
        for input in inputs.try_iter() {
            match input {
                Input::Close(_, promise) => promise.complete(Ok(())),
                Input::Accept(group, ..) => group.leave(),
                _ => {}
            }
        }
    }

    fn handle(&mut self, input: Input) {
        match input {
            Input::Accept(group, joined, who) => self.accept(group, &joined, who),
            Input::Joined(client, result) => self.joined(client, result),
            Input::Heard(client, class, result) => self.heard(client, class, result),
            Input::Said(client) => {
                if let Some(known) = self.clients.get_mut(&client) {
                    known.connection.said();
                    if known.connection.is_leaving {
                        self.leave_if_said(client);
                    }
                }
            }
            Input::Received(client, id) => self.machine.received(client, id),
            Input::Sent(client, id, len) => {
                if let Some(known) = self.clients.get_mut(&client) {
                    known.replies.remove(&id);
                    self.machine.sent(client, id, len);
                }
            }
            Input::Lost(client, failure) => {
                if let Some(known) = self.clients.remove(&client) {
                    log::info!("penstock: endpoint {}: {} is gone: {}", self.name, known.who, failure.message);
                    self.machine.lost(client);
                    known.connection.group.leave();
                }
            }
            Input::Serve(kind, name, true) => self.machine.serve(kind, &name),
            Input::Serve(kind, name, false) => self.machine.withdraw(kind, &name),
            Input::Take(taker) => self.takers.push_back(taker),
            Input::Answer(client, id, result) => self.answered(client, id, result),
            Input::Stats(reply) => drop(reply.send(ServerStats {
                clients: self.machine.clients(),
                calls: self.machine.calls(),
                held_bytes: self.machine.held_bytes(),
                taken: self.taken,
            })),
            Input::Close(grace, promise) => {
                self.machine.close();
                self.takers.clear();
                let by = Instant::now() + grace;
                let (until, promises) = self.closing.get_or_insert((by, Vec::new()));
                *until = by.min(*until);
                promises.push(promise);
            }
        }
    }

    fn accept(&mut self, group: Group, joined: &Ticket, who: Arc<str>) {
        let client = self.next_client;
        self.next_client += 1;
        let connection = Connection::new(group, CLIENT);
        let (bodies, replies) = (HashMap::new(), HashMap::new());
        self.clients.insert(client, Connected { connection, who, is_joining: true, bodies, replies });
        self.joining.push_back((Instant::now() + JOIN_WITHIN, client));
        let input = self.input.clone();
        joined.on_done(move |result| drop(input.send(Input::Joined(client, result.clone()))));
    }

    fn joined(&mut self, client: u32, result: Result<(), Failure>) {
        let Some(known) = self.clients.get_mut(&client) else { return };
        if let Err(failure) = result {
            log::warn!("penstock: endpoint {}: {} does not come: {}", self.name, known.who, failure.message);
            known.connection.group.leave();
            self.clients.remove(&client);
            return;
        }
        log::info!("penstock: endpoint {}: {} is connected", self.name, known.who);
        known.is_joining = false;
        let input = self.input.clone();
        known.connection.on_lost(move |failure| drop(input.send(Input::Lost(client, failure))));
        self.machine.connected(client);
        Class::ALL.into_iter().for_each(|class| self.hear(client, class));
    }

    fn hear(&self, client: u32, class: Class) {
        let input = self.input.clone();
        let heard = move |result: Result<_, _>| drop(input.send(Input::Heard(client, class, result.map(Box::new))));
        self.clients[&client].connection.hear(class, heard);
    }

    fn heard(&mut self, client: u32, class: Class, result: Result<Box<[u8; Record::BYTES]>, Failure>) {
        // A failure ends the group, which is watched.
        let (Ok(bytes), true) = (result, self.clients.contains_key(&client)) else { return };
        match Record::decode(&bytes) {
            Err(fault) => self.machine.break_off(client, fault),
            Ok(record) => {
                let is_last = record == Record::Bye;
                if self.clients[&client].connection.saying > self.most_said {
                    return self.machine.break_off(client, Fault("calls, without reading what is said to them"));
                }
                self.machine.record(client, class, record);
                if !is_last {
                    self.hear(client, class);
                }
            }
        }
    }

    fn answered(&mut self, client: u32, id: u64, result: Result<Reply, String>) {
        let len = result.as_ref().map(|reply| match reply {
            Reply::Empty => 0,
            Reply::Bytes(bytes) => bytes.len() as u64,
            Reply::Lent { len, .. } => *len,
        });
        let is_needed = self.machine.answer(client, id, len.map_err(Clone::clone));
        if let (true, Ok(reply), Some(known)) = (is_needed, result, self.clients.get_mut(&client)) {
            known.replies.insert(id, reply);
        }
    }

    fn carry_out(&mut self) {
        while let Some(action) = self.machine.poll() {
            match action {
                ServerAction::Say { client, class, record } => {
                    let input = self.input.clone();
                    if let Some(known) = self.clients.get_mut(&client) {
                        known.connection.say(class, &record, move || drop(input.send(Input::Said(client))));
                    }
                }
                ServerAction::Receive { client, id, slot, len, priority } => {
                    let Some(known) = self.clients.get_mut(&client) else { continue };
                    let Some(memory) = self.spare.take(len) else {
                        self.machine.break_off(client, Fault("more bytes than this process has memory for"));
                        continue;
                    };
                    known.bodies.insert(id, memory.clone());
                    let input = self.input.clone();
                    let received = move || drop(input.send(Input::Received(client, id)));
                    known.connection.transfer(Direction::In, (slot, priority), Span::of(&memory), memory, received);
                }
                ServerAction::Transmit { client, id, slot, len, priority, text } => {
                    self.transmit(client, id, (slot, priority), len, text);
                }
                ServerAction::Release { client, id } => {
                    if let Some(known) = self.clients.get_mut(&client) {
                        known.bodies.remove(&id);
                    }
                }
                ServerAction::Break { client, fault } => {
                    let Some(known) = self.clients.remove(&client) else { continue };
                    log::error!("penstock: endpoint {}: {} is cut off: it has sent {}", self.name, known.who, fault.0);
                    let reason = format!("endpoint {} has received {} from {}", self.name, fault.0, known.who);
                    known.connection.group.abort_as(FailureKind::Mismatch, &reason);
                    known.connection.group.leave();
                }
                ServerAction::Leave { client } => self.leave_if_said(client),
            }
        }
    }

    fn transmit(&mut self, client: u32, id: u64, slot: (u32, Priority), len: u64, text: Option<String>) {
        let Some(known) = self.clients.get_mut(&client) else { return };
        let input = self.input.clone();
        let done = move || drop(input.send(Input::Sent(client, id, len)));
        let reply = match text {
            Some(text) => Reply::Bytes(text.into_bytes().into()),
            None => known.replies.remove(&id).expect("it was answered"),
        };
        match reply {
            Reply::Bytes(bytes) => {
                let span = Span { address: bytes.as_ptr().cast_mut(), len };
                known.connection.transfer(Direction::Out, slot, span, bytes, done);
            }
            Reply::Lent { address, keep, .. } => {
                known.connection.transfer(Direction::Out, slot, Span { address: address.cast_mut(), len }, keep, done);
            }
            Reply::Empty => unreachable!("nothing is sent of it"),
        }
    }

    /// Leaves the group of a client that has left, once our last words were taken.
    fn leave_if_said(&mut self, client: u32) {
        if self.clients.get_mut(&client).is_some_and(|known| known.connection.leave_if_said()) {
            let known = self.clients.remove(&client).expect("just seen");
            log::info!("penstock: endpoint {}: {} has left", self.name, known.who);
        }
    }

    /// Gives calls to handlers that wait.
    fn serve_takers(&mut self) {
        while !self.takers.is_empty()
            && let Some(asked) = self.machine.take()
        {
            let known = &self.clients[&asked.client];
            let (who, body) = (known.who.clone(), known.bodies.get(&asked.id).cloned());
            let asked = Asked { asked, who, body, input: Some(self.input.clone()) };
            self.taken += 1;
            let taker = self.takers.pop_front().expect("just seen");
            // A handler that has gone meanwhile drops the call, which fails it.
            drop(taker.send(asked));
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let joins = self.joining.front().map(|(by, _)| *by);
        [joins, self.closing.as_ref().map(|(until, _)| *until)].into_iter().flatten().min()
    }

    fn expire(&mut self) {
        let now = Instant::now();
        while let Some(&(by, client)) = self.joining.front()
            && now >= by
        {
            self.joining.pop_front();
            // It fails within a second, or is connected after all.
            if let Some(known) = self.clients.get(&client).filter(|known| known.is_joining) {
                known.connection.group.expire(JOIN_WITHIN);
            }
        }
        if self.closing.as_ref().is_some_and(|(until, _)| now >= *until) {
            for (client, known) in std::mem::take(&mut self.clients) {
                self.machine.lost(client);
                known.connection.group.abort(&format!("endpoint {} was closed", self.name));
                known.connection.group.leave();
            }
        }
    }
}

/// How long a client may take to connect after it has asked for that. Longer than a stream's attempts take.
const JOIN_WITHIN: Duration = Duration::from_secs(30);
/// The longest message, in bytes: what a fingerprint can tell apart.
pub const MOST_BYTES: u64 = (1 << 36) - 1;
