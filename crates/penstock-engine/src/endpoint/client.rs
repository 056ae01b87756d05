//! A client: its thread, and the calls that callers make.

use super::connection::{self, Connection, Direction, Inbox, SERVER, Span};
use super::memory::{Memory, Spare};
use super::server::MOST_BYTES;
use crate::engine::Engine;
use crate::handle::check_fork;
use crate::runtime::GroupSpec;
use crate::ticket::{Promise, Ticket};
use penstock_core::endpoint::{self, Class, ClientAction, Ended, INLINE, Kind, Outcome, Record, Target};
use penstock_types::{Failure, FailureKind, Priority, Time};
use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A connection to a server.
#[derive(Debug)]
pub struct Client {
    input: Inbox<Input>,
    /// How messages call the server.
    server: Arc<str>,
    /// The number of the last call.
    last: AtomicU64,
}

/// A call to make.
pub struct Ask {
    /// What it is.
    pub kind: Kind,
    /// What it is about.
    pub name: String,
    /// Where its body begins.
    pub body: *const u8,
    /// Bytes of its body.
    pub len: u64,
    /// Where the reply goes, which must have exactly that length. `None`: to memory of the engine's.
    pub into: Option<(*mut u8, u64)>,
    /// Without `into`, the most bytes of reply that are taken.
    pub room: u64,
    /// How urgent.
    pub priority: Priority,
    /// After this long the call fails.
    pub timeout: Duration,
    /// The owner of body and `into`, kept until the call has ended.
    pub keep: Option<Box<dyn Any + Send>>,
}

// SAFETY: the pointers are to the caller's bytes, which `keep` keeps alive.
unsafe impl Send for Ask {}

impl std::fmt::Debug for Ask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ask").field("kind", &self.kind).field("name", &self.name).finish_non_exhaustive()
    }
}

/// A call that was made.
#[derive(Clone, Debug)]
pub struct Work {
    call: u64,
    ticket: Ticket,
    reply: Arc<Mutex<Option<Arc<Memory>>>>,
}

impl Work {
    /// Its end. A failure of one call leaves the connection as it is ([`Failure::group_lives`]).
    #[must_use]
    pub fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    /// The same call, for a holder that must not keep its reply alive.
    #[must_use]
    pub fn without_reply(&self) -> Work {
        Work { reply: Arc::default(), ..self.clone() }
    }

    /// The reply of a call without [`Ask::into`] that has ended well. `None`: it has no bytes.
    #[must_use]
    pub fn reply(&self) -> Option<Arc<Memory>> {
        self.reply.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }
}

#[derive(Debug)]
enum Input {
    Joined(Result<(), Failure>),
    Heard(Class, Result<Box<[u8; Record::BYTES]>, Failure>),
    Said,
    Sent(u64),
    Received(u64),
    Lost(Failure),
    Ask(u64, Box<Made>),
    Reprioritise(u64, Priority),
    Close(Duration, Promise),
}

/// A call, as the thread holds it.
struct Made {
    ask: endpoint::Ask,
    timeout: Duration,
    body: Span,
    into: Option<Span>,
    /// A copy of a short body.
    copy: Option<Arc<Memory>>,
    /// The reply or text in the engine's memory.
    own: Option<Arc<Memory>>,
    /// Its transfers that have begun.
    transfers: Vec<Ticket>,
    reply: Arc<Mutex<Option<Arc<Memory>>>>,
    promise: Promise,
    keep: Option<Box<dyn Any + Send>>,
}

impl std::fmt::Debug for Made {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Made").field("ask", &self.ask).finish_non_exhaustive()
    }
}

impl Client {
    /// Connects to a server, which is rank 0 of the group, while this process is rank 1. `server` is how messages call it. Returns at
    /// once; the ticket completes when the server has said what it takes. Calls may be made before.
    ///
    /// # Errors
    /// `Config`: no thread can be had.
    pub fn connect(
        engine: &Engine,
        spec: GroupSpec,
        server: &str,
        timeout: Duration,
    ) -> Result<(Client, Ticket), Failure> {
        let (input, inputs) = Inbox::new();
        let server: Arc<str> = server.into();
        let (group, joined) = engine.join(spec);
        let welcomed = Ticket::default();
        let mut driver = Driver {
            machine: endpoint::Client::default(),
            connection: Connection::new(group.clone(), SERVER),
            server: server.clone(),
            made: HashMap::new(),
            spare: Spare::default(),
            epoch: Instant::now(),
            connects: Some(timeout),
            welcomed: Some(welcomed.promise()),
            input: input.clone(),
            why_lost: String::new(),
            is_cut_off: false,
            closing: None,
        };
        std::thread::Builder::new().name("penstock-client".into()).spawn(move || driver.run(inputs)).map_err(
            |error| {
                group.leave();
                Failure::of_call(FailureKind::Config, format!("cannot start a thread: {error}."))
            },
        )?;
        let to = input.clone();
        joined.on_done(move |result| drop(to.send(Input::Joined(result.clone()))));
        Ok((Client { input, server, last: AtomicU64::new(0) }, welcomed))
    }

    /// Makes a call. Returns at once.
    ///
    /// # Safety
    /// Body and [`Ask::into`] must be valid for their lengths. Until the call has ended, nothing else may write to the body, or touch
    /// `into`.
    #[must_use]
    pub unsafe fn ask(&self, ask: Ask) -> Work {
        let Ask { kind, name, body, len, into, room, priority, timeout, keep } = ask;
        let call = 1 + self.last.fetch_add(1, Ordering::Relaxed);
        let work = Work { call, ticket: Ticket::default(), reply: Arc::default() };
        let (room, exact) = into.map_or((room, false), |(_, len)| (len, true));
        let wrong = match () {
            () if name.len() > Record::MAX_NAME => Some(format!("its name has more than {} bytes", Record::MAX_NAME)),
            () if len.max(into.map_or(0, |(_, len)| len)) > MOST_BYTES => {
                Some(format!("it has more than {MOST_BYTES} bytes"))
            }
            () => None,
        };
        let fork = check_fork().err();
        let wrong = wrong.map(|wrong| refused(&self.server, kind, &name, FailureKind::Config, &wrong));
        if let Some(failure) = fork.or(wrong) {
            work.ticket.complete(Err(failure));
            return work;
        }
        // SAFETY: the caller's promise.
        let bytes = || unsafe { std::slice::from_raw_parts(body, len as usize) };
        let copy = (len > 0 && len <= INLINE).then(|| Memory::copy(bytes()));
        let target = if into.is_some() { Target::Caller } else { Target::Own };
        let body = copy.as_ref().map_or(Span { address: body.cast_mut(), len }, |copy| Span::of(copy));
        let into = into.map(|(address, len)| Span { address, len });
        let room = room.min(MOST_BYTES);
        let ask = endpoint::Ask { kind, name, body: len, room, exact, target, priority, deadline: None };
        let (reply, promise) = (work.reply.clone(), work.ticket.promise());
        let made = Made { ask, timeout, body, into, copy, own: None, transfers: Vec::new(), reply, promise, keep };
        if let Err(Input::Ask(_, made)) = self.input.send(Input::Ask(call, Box::new(made))) {
            made.promise.complete(Err(made.failure(&self.server, Ended::Closed, "")));
        }
        work
    }

    /// Gives a call another priority: in the queue of calls that were not sent, and for bytes that have not left. The server is not
    /// told. Nothing happens if the call has ended.
    pub fn reprioritise(&self, work: &Work, priority: Priority) {
        if check_fork().is_ok() {
            drop(self.input.send(Input::Reprioritise(work.call, priority)));
        }
    }

    /// Ends the connection when the calls that were made have ended, but after `grace` at the latest. The ticket completes then.
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
}

impl Drop for Client {
    fn drop(&mut self) {
        drop(self.close(Duration::ZERO));
    }
}

/// What runs on the client's thread.
struct Driver {
    machine: endpoint::Client,
    connection: Connection,
    server: Arc<str>,
    made: HashMap<u64, Made>,
    spare: Spare,
    epoch: Instant,
    /// How long it may take to connect, until the server has said what it takes.
    connects: Option<Duration>,
    /// Whom to tell that the server has said what it takes.
    welcomed: Option<Promise>,
    input: Inbox<Input>,
    why_lost: String,
    /// The time for calls to end is over.
    is_cut_off: bool,
    /// Until when calls may take to end, and whom to tell.
    closing: Option<(Instant, Vec<Promise>)>,
}

impl Driver {
    fn run(&mut self, inputs: mpsc::Receiver<Input>) {
        while let Ok(input) = connection::next(&inputs, self.deadline()) {
            if let Some(input) = input {
                self.handle(input);
            }
            self.expire();
            self.carry_out();
            if self.closing.is_some() && self.machine.is_over() && !self.connection.is_leaving {
                let (_, promises) = self.closing.take().expect("just seen");
                return self.hang_up(inputs, &promises);
            }
        }
    }

    /// The connection has ended. Whoever has been told so finds that calls are refused.
    fn hang_up(&self, inputs: mpsc::Receiver<Input>, closing: &[Promise]) {
        self.input.close();
        closing.iter().for_each(|promise| promise.complete(Ok(())));
        for input in inputs.try_iter() {
            match input {
                Input::Ask(_, made) => made.promise.complete(Err(made.failure(&self.server, Ended::Closed, ""))),
                Input::Close(_, promise) => promise.complete(Ok(())),
                _ => {}
            }
        }
    }

    fn handle(&mut self, input: Input) {
        match input {
            Input::Joined(Ok(())) => {
                let input = self.input.clone();
                self.connection.on_lost(move |failure| drop(input.send(Input::Lost(failure))));
                Class::ALL.into_iter().for_each(|class| self.hear(class));
            }
            Input::Joined(Err(failure)) | Input::Lost(failure) => self.lost(failure),
            // A failure ends the group, which is watched.
            Input::Heard(_, Err(_)) => {}
            Input::Heard(class, Ok(bytes)) => self.heard(class, &bytes),
            Input::Said => {
                self.connection.said();
                if self.connection.is_leaving {
                    self.connection.leave_if_said();
                }
            }
            Input::Sent(call) => self.machine.sent(call),
            Input::Received(call) => self.machine.received(call),
            Input::Ask(call, mut made) => {
                let now = self.now();
                made.ask.deadline = Some(now.plus(u64::try_from(made.timeout.as_nanos()).unwrap_or(u64::MAX)));
                self.machine.ask(call, made.ask.clone());
                self.made.insert(call, *made);
            }
            Input::Reprioritise(call, priority) => self.machine.reprioritise(call, priority),
            Input::Close(grace, promise) => {
                self.machine.close();
                let by = Instant::now() + grace;
                let (until, promises) = self.closing.get_or_insert((by, Vec::new()));
                *until = by.min(*until);
                promises.push(promise);
            }
        }
    }

    fn hear(&self, class: Class) {
        let input = self.input.clone();
        self.connection.hear(class, move |result| drop(input.send(Input::Heard(class, result.map(Box::new)))));
    }

    fn heard(&mut self, class: Class, bytes: &[u8; Record::BYTES]) {
        let result = Record::decode(bytes).and_then(|record| {
            let is_last = record == Record::Bye;
            self.machine.record(class, record).map(|()| is_last)
        });
        match result {
            Ok(true) => {}
            Ok(false) => {
                if self.machine.limits().is_some()
                    && let Some(welcomed) = self.welcomed.take()
                {
                    self.connects = None;
                    welcomed.complete(Ok(()));
                }
                self.hear(class);
            }
            Err(fault) => {
                let reason = format!("{} has sent {}", self.server, fault.0);
                self.break_off(&reason);
            }
        }
    }

    /// Ends the connection: [`Input::Lost`] follows.
    fn break_off(&self, reason: &str) {
        self.connection.group.abort_as(FailureKind::Mismatch, reason);
    }

    /// The group has failed, or could not be joined: nothing of it touches the memory of calls any more.
    fn lost(&mut self, failure: Failure) {
        if self.machine.is_over() {
            return;
        }
        self.connects = None;
        self.why_lost = failure.message.clone();
        self.machine.lost(if self.is_cut_off { Ended::Closed } else { Ended::Lost });
        if let Some(welcomed) = self.welcomed.take() {
            let message = format!("cannot connect to {}: {}", self.server, failure.message);
            welcomed.complete(Err(Failure { message, ..failure }));
        }
        self.connection.group.leave();
    }

    fn carry_out(&mut self) {
        while let Some(action) = self.machine.poll() {
            match action {
                ClientAction::Say(class, record) => {
                    let input = self.input.clone();
                    self.connection.say(class, &record, move || drop(input.send(Input::Said)));
                }
                ClientAction::Transmit { call, slot, len, priority, zeros } => {
                    let made = self.made.get_mut(&call).expect("it runs");
                    let own = if zeros { Memory::zeros(len) } else { made.copy.clone() };
                    if zeros && own.is_none() {
                        self.break_off("this process has no memory for zeros in the place of a call that was late");
                        continue;
                    }
                    let span = own.as_ref().map_or(made.body, |own| Span::of(own));
                    let input = self.input.clone();
                    // The call keeps the caller's memory until this has ended.
                    let sent = move || drop(input.send(Input::Sent(call)));
                    made.transfers.push(self.connection.transfer(Direction::Out, (slot, priority), span, own, sent));
                }
                ClientAction::Receive { call, slot, len, target, priority } => {
                    let made = self.made.get_mut(&call).expect("it runs");
                    made.own = if target == Target::Own { self.spare.take(len) } else { None };
                    if target == Target::Own && made.own.is_none() {
                        let what = format!("this process has no memory for a reply of {len} bytes");
                        self.break_off(&what);
                        continue;
                    }
                    let span = made.own.as_ref().map_or_else(|| made.into.expect("its caller's"), |own| Span::of(own));
                    let input = self.input.clone();
                    let (own, received) = (made.own.clone(), move || drop(input.send(Input::Received(call))));
                    made.transfers.push(self.connection.transfer(Direction::In, (slot, priority), span, own, received));
                }
                ClientAction::Reprioritise { call, priority } => {
                    let transfers = self.made.get(&call).into_iter().flat_map(|made| &made.transfers);
                    transfers.for_each(|ticket| self.connection.group.reprioritise(ticket, priority));
                }
                ClientAction::End(call, ended) => self.end(call, ended),
                ClientAction::Forget(call) => drop(self.made.remove(&call)),
                ClientAction::Leave => drop(self.connection.leave_if_said()),
            }
        }
    }

    fn end(&mut self, call: u64, ended: Ended) {
        let made = self.made.get_mut(&call).expect("it has not ended");
        let result = match ended {
            Ended::Done(_) => {
                *made.reply.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = made.own.take();
                Ok(())
            }
            _ => Err(made.failure(&self.server, ended, &self.why_lost)),
        };
        let keep = made.keep.take();
        made.promise.complete(result);
        drop(keep);
    }

    fn now(&self) -> Time {
        Time(self.epoch.elapsed().as_nanos() as u64)
    }

    fn deadline(&self) -> Option<Instant> {
        let calls = self.machine.next_deadline().map(|at| at.0).filter(|at| *at < u64::MAX / 2);
        let calls = calls.map(|at| self.epoch + Duration::from_nanos(at));
        let connects = self.connects.and_then(|timeout| self.epoch.checked_add(timeout));
        [calls, connects, self.closing.as_ref().map(|(until, _)| *until)].into_iter().flatten().min()
    }

    fn expire(&mut self) {
        let now = Instant::now();
        self.machine.handle_timeout(self.now());
        if let Some(timeout) = self.connects
            && now.duration_since(self.epoch) >= timeout
        {
            // It fails within a second, or is connected after all.
            self.connects = None;
            self.connection.group.expire(timeout);
        }
        if self.closing.as_ref().is_some_and(|(until, _)| now >= *until) && !self.machine.is_over() {
            // The calls fail when the group has: until then it uses their memory.
            self.closing.as_mut().expect("just seen").0 = now + Duration::from_secs(1);
            self.is_cut_off = true;
            self.connection.group.abort("the client was closed");
        }
    }
}

impl Made {
    /// Why the call has failed.
    fn failure(&self, server: &str, ended: Ended, why_lost: &str) -> Failure {
        let endpoint::Ask { kind, name, body, .. } = &self.ask;
        let refused = |failure, text: &str| refused(server, *kind, name, failure, text);
        let fatal = |failure: Failure| Failure { group_lives: false, ..failure };
        let text = self.own.as_ref().map_or_else(String::new, |own| String::from_utf8_lossy(own.bytes()).into_owned());
        match ended {
            Ended::Refused(Outcome::Failed) => {
                refused(FailureKind::Handler, &format!("its handler there has failed: {text}"))
            }
            Ended::Refused(Outcome::Closing) | Ended::ServerCloses => {
                let text = "the server is being closed, and has done nothing of it. Connect again when it is back";
                fatal(refused(FailureKind::Closed, text))
            }
            Ended::Refused(_) => refused(FailureKind::Config, &text),
            Ended::TooLarge(most) => {
                let text = format!(
                    "it has {body} bytes, and the server takes {most} of a {}. Nothing was sent: send it in parts, or raise the \
                     server's limit",
                    kind.name()
                );
                refused(FailureKind::Config, &text)
            }
            Ended::Late { was_sent } => {
                let state = if was_sent { "the server may or may not have done it" } else { "nothing was sent" };
                let text = format!(
                    "timed out after {:.1} s: {state}. If its handlers are busy, a longer timeout_s helps, or more threads= of the \
                     server",
                    self.timeout.as_secs_f64()
                );
                refused(FailureKind::Timeout, &text)
            }
            Ended::Closed => {
                let text = "the client was closed before it had ended: the server may or may not have done it";
                fatal(refused(FailureKind::Closed, text))
            }
            Ended::Lost => {
                let text = format!(
                    "the connection is lost ({}). Whether the server has done it is not known. Connect again \
                     (penstock.endpoint.connect) when the server is back",
                    why_lost.trim_end_matches('.')
                );
                fatal(refused(FailureKind::PeerLost, &text))
            }
            Ended::Done(_) => unreachable!("it has ended well"),
        }
    }
}

/// The failure of one call.
fn refused(server: &str, kind: Kind, name: &str, failure: FailureKind, text: &str) -> Failure {
    Failure::of_call(failure, format!("{} {name:?} of {server} failed: {}.", kind.name(), text.trim_end_matches('.')))
}
