//! What a client decides: which call is made next, when its bytes travel, when it has ended.

use super::record::{Class, Kind, Limits, Outcome, Record};
use super::{Fault, INLINE, MAX_TEXT};
use penstock_types::{Priority, Time};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// The client of one server. Its caller numbers calls.
#[derive(Debug)]
pub struct Client {
    /// What the server takes, since its welcome has come.
    limits: Option<Limits>,
    calls: BTreeMap<u64, Call>,
    /// The caller's number of each call that was sent, by the connection's.
    sent: HashMap<u64, u64>,
    /// Calls that were not sent, the most urgent first, then the oldest.
    queue: BTreeSet<(Priority, u64)>,
    /// When calls that can be abandoned become late, and which.
    deadlines: BTreeSet<(Time, u64)>,
    /// How many calls were sent on each class.
    next: [u64; 2],
    /// On which classes the server has answered our good-bye.
    byes: BTreeSet<Class>,
    /// Slots that no call uses.
    free: BTreeSet<u32>,
    phase: Phase,
    actions: VecDeque<ClientAction>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// This side makes no more calls, or the server takes none.
    Closing(Ended),
    /// It has said good-bye.
    Leaving(Ended),
    Over(Ended),
}

#[derive(Debug)]
struct Call {
    ask: Ask,
    /// Its number on the connection, and its slot, once it was sent.
    sent: Option<(u64, u32)>,
    body: Transfer,
    /// The server is ready for its body.
    may_go: bool,
    reply: Transfer,
    outcome: Option<(Outcome, u64)>,
    /// Its caller was told that it has ended. What comes for it goes nowhere.
    is_abandoned: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transfer {
    NotYet,
    Runs,
    Done,
}

/// What a caller asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// What it is.
    pub kind: Kind,
    /// What it is about, of at most [`Record::MAX_NAME`] bytes.
    pub name: String,
    /// Bytes of its body. The driver copies a body of up to [`INLINE`] bytes; a longer one stays in the caller's memory.
    pub body: u64,
    /// The most bytes of reply that there is room for.
    pub room: u64,
    /// The reply must have as many.
    pub exact: bool,
    /// Where the reply goes.
    pub target: Target,
    /// How urgent.
    pub priority: Priority,
    /// Until when the caller waits.
    pub deadline: Option<Time>,
}

/// Whose memory a reply goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The driver's.
    Own,
    /// The caller's.
    Caller,
}

/// How a call has ended. Its caller's memory is not touched any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Well, with so many bytes of reply.
    Done(u64),
    /// The server has refused it; the reply in the driver's memory is the reason.
    Refused(Outcome),
    /// The body is larger than this limit of the server's. Nothing was sent.
    TooLarge(u64),
    /// It took too long. `was_sent`: the server has heard of it, and may have done it.
    Late {
        /// Whether the server knows of it.
        was_sent: bool,
    },
    /// The client was closed. The same.
    Closed,
    /// The server is being closed. Nothing was sent.
    ServerCloses,
    /// The connection is lost. The server may have done the call.
    Lost,
}

/// What is to be done, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientAction {
    /// Send this record on a class.
    Say(Class, Record),
    /// Send the body of a call under its slot's tag; then call [`Client::sent`]. `zeros`: its caller has its memory back, so send as
    /// many zeros; the server, which has a place for them, drops them.
    Transmit {
        /// The call.
        call: u64,
        /// Its slot.
        slot: u32,
        /// Bytes, at least one.
        len: u64,
        /// How urgent.
        priority: Priority,
        /// Not the body itself.
        zeros: bool,
    },
    /// Receive the reply of a call under its slot's tag; then call [`Client::received`].
    Receive {
        /// The call.
        call: u64,
        /// Its slot.
        slot: u32,
        /// Bytes, at least one.
        len: u64,
        /// To whose memory.
        target: Target,
        /// How urgent.
        priority: Priority,
    },
    /// The transfers of a call that run have another priority from now on.
    Reprioritise {
        /// The call.
        call: u64,
        /// How urgent.
        priority: Priority,
    },
    /// Tell the caller. Bodies that the driver has copied may still be on their way.
    End(u64, Ended),
    /// Nothing is on its way for a call that has ended: forget it.
    Forget(u64),
    /// Both sides have said all: leave the group.
    Leave,
}

impl Default for Client {
    fn default() -> Client {
        Client {
            limits: None,
            calls: BTreeMap::new(),
            sent: HashMap::new(),
            queue: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            next: [0; 2],
            byes: BTreeSet::new(),
            free: BTreeSet::new(),
            phase: Phase::Open,
            actions: VecDeque::new(),
        }
    }
}

impl Client {
    /// What to do next.
    pub fn poll(&mut self) -> Option<ClientAction> {
        self.actions.pop_front()
    }

    /// What the server takes, once it has said so.
    #[must_use]
    pub fn limits(&self) -> Option<&Limits> {
        self.limits.as_ref()
    }

    /// Calls that have not ended.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.calls.values().filter(|call| !call.is_abandoned).count()
    }

    /// Whether the connection has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over(_))
    }

    /// A caller makes a call, under a new number; of one priority the least goes first.
    pub fn ask(&mut self, call: u64, ask: Ask) {
        debug_assert!(ask.name.len() <= Record::MAX_NAME, "checked by the driver");
        match self.phase {
            Phase::Open => {
                self.queue.insert((ask.priority, call));
                let (body, reply) = (Transfer::NotYet, Transfer::NotYet);
                let made = Call { ask, sent: None, body, may_go: false, reply, outcome: None, is_abandoned: false };
                self.calls.insert(call, made);
                self.time(call);
                self.fill();
            }
            Phase::Closing(why) | Phase::Leaving(why) | Phase::Over(why) => {
                self.actions.extend([ClientAction::End(call, why), ClientAction::Forget(call)]);
            }
        }
    }

    /// Gives a call another priority, for what of it has not left. What the server knows of it stays.
    pub fn reprioritise(&mut self, call: u64, priority: Priority) {
        let Some(known) = self.calls.get_mut(&call) else { return };
        let before = std::mem::replace(&mut known.ask.priority, priority);
        if known.sent.is_none() {
            self.queue.remove(&(before, call));
            self.queue.insert((priority, call));
        } else if known.body == Transfer::Runs || known.reply == Transfer::Runs {
            self.actions.push_back(ClientAction::Reprioritise { call, priority });
        }
    }

    /// No more calls are made. Those that were made go on; then the connection ends, in good order.
    pub fn close(&mut self) {
        if self.phase == Phase::Open {
            self.phase = Phase::Closing(Ended::Closed);
            self.end_when_idle();
        }
    }

    /// The connection is lost.
    pub fn lost(&mut self, why: Ended) {
        self.phase = Phase::Over(why);
        self.queue.clear();
        self.deadlines.clear();
        self.sent.clear();
        for (number, call) in std::mem::take(&mut self.calls) {
            if !call.is_abandoned {
                self.actions.push_back(ClientAction::End(number, why));
            }
            self.actions.push_back(ClientAction::Forget(number));
        }
    }

    /// The server says this.
    ///
    /// # Errors
    /// What it may not say; the connection must end.
    pub fn record(&mut self, class: Class, record: Record) -> Result<(), Fault> {
        if self.is_over() {
            return Ok(());
        }
        if self.limits.is_none() != matches!(record, Record::Welcome(_)) {
            return Err(Fault("a welcome that is not the first record, or none"));
        }
        match record {
            Record::Welcome(limits) => {
                self.free = (0..limits.calls.min(MOST_SLOTS)).collect();
                self.limits = Some(limits);
                self.fill();
                self.end_when_idle();
            }
            Record::Go { id } => self.may_go(id)?,
            Record::Withdrawn { id } => self.withdrawn(id)?,
            Record::Reply { id, outcome, len } => self.replied(id, outcome, len)?,
            Record::Closing => {
                if self.phase == Phase::Open {
                    self.phase = Phase::Closing(Ended::ServerCloses);
                }
                for (_, number) in std::mem::take(&mut self.queue) {
                    self.remove(number);
                    let end = ClientAction::End(number, Ended::ServerCloses);
                    self.actions.extend([end, ClientAction::Forget(number)]);
                }
                self.end_when_idle();
            }
            Record::Bye => match self.phase {
                Phase::Leaving(why) if self.byes.insert(class) => {
                    if self.byes.len() == Class::ALL.len() {
                        self.phase = Phase::Over(why);
                        self.actions.push_back(ClientAction::Leave);
                    }
                }
                _ => return Err(Fault("a good-bye that answers none")),
            },
            _ => return Err(Fault("a record that only clients send")),
        }
        Ok(())
    }

    /// The body of a call was taken.
    pub fn sent(&mut self, call: u64) {
        if let Some(known) = self.calls.get_mut(&call) {
            known.body = Transfer::Done;
            self.time(call);
            self.check_end(call);
        }
    }

    /// The reply of a call is here.
    pub fn received(&mut self, call: u64) {
        if let Some(known) = self.calls.get_mut(&call) {
            known.reply = Transfer::Done;
            self.check_end(call);
        }
    }

    /// When [`Client::handle_timeout`] is due.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        self.deadlines.first().map(|(by, _)| *by)
    }

    /// Ends the calls that take too long. A body in its caller's memory that has begun to leave, and a reply that comes, are finished
    /// first: the other side is ready for them.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some(&(by, number)) = self.deadlines.first()
            && by <= now
        {
            let call = self.calls.get_mut(&number).expect("it has not ended");
            let end = Ended::Late { was_sent: call.sent.is_some() };
            self.actions.push_back(ClientAction::End(number, end));
            match call.sent {
                Some((id, _)) => {
                    call.is_abandoned = true;
                    self.time(number);
                    self.actions.push_back(ClientAction::Say(Class::of_call(id), Record::Cancel { id }));
                }
                None => {
                    self.queue.remove(&(call.ask.priority, number));
                    self.remove(number);
                    self.actions.push_back(ClientAction::Forget(number));
                }
            }
        }
        self.end_when_idle();
    }

    /// Sends calls that wait, as many as the server takes.
    fn fill(&mut self) {
        let Some(limits) = self.limits else { return };
        while let Some(&slot) = self.free.first()
            && let Some((priority, number)) = self.queue.pop_first()
        {
            let call = self.calls.get_mut(&number).expect("it is queued");
            let Ask { kind, body, room, exact, .. } = call.ask;
            let most = if kind == Kind::Push { limits.push } else { limits.request };
            if body > most {
                self.remove(number);
                self.actions.extend([ClientAction::End(number, Ended::TooLarge(most)), ClientAction::Forget(number)]);
                continue;
            }
            self.free.remove(&slot);
            let class = Class::of(priority);
            let id = class.call(self.next[class as usize]);
            self.next[class as usize] += 1;
            self.sent.insert(id, number);
            call.sent = Some((id, slot));
            let name = call.ask.name.clone();
            let record = Record::Call { id, slot, kind, name, body, room, exact, priority };
            self.actions.push_back(ClientAction::Say(class, record));
            if body > 0 && body <= INLINE {
                self.transmit(number);
            }
        }
    }

    fn may_go(&mut self, id: u64) -> Result<(), Fault> {
        let (number, call) = self.call(id)?;
        if call.may_go || call.outcome.is_some() || call.ask.body <= INLINE {
            return Err(Fault("a body that is wanted twice, or that there is not"));
        }
        call.may_go = true;
        // Zeros in the place of a body must not come before the server knows what they are.
        if !call.is_abandoned {
            self.transmit(number);
        }
        Ok(())
    }

    fn withdrawn(&mut self, id: u64) -> Result<(), Fault> {
        let (number, call) = self.call(id)?;
        if !call.is_abandoned || !call.may_go || call.body == Transfer::Runs {
            return Err(Fault("a call that was not withdrawn before its body could leave"));
        }
        // A body that was copied when it was sent may still have been on its way: the server drops that.
        if call.body == Transfer::NotYet {
            self.transmit(number);
        }
        Ok(())
    }

    fn transmit(&mut self, number: u64) {
        let call = self.calls.get_mut(&number).expect("its caller has looked");
        call.body = Transfer::Runs;
        let (_, slot) = call.sent.expect("it was sent");
        let (len, priority) = (call.ask.body, call.ask.priority);
        let zeros = call.is_abandoned;
        self.time(number);
        self.actions.push_back(ClientAction::Transmit { call: number, slot, len, priority, zeros });
    }

    fn replied(&mut self, id: u64, outcome: Outcome, len: u64) -> Result<(), Fault> {
        let (number, call) = self.call(id)?;
        let Ask { kind, body, room, exact, target, priority, .. } = call.ask;
        if call.outcome.is_some() || (outcome == Outcome::Done && body > 0 && call.body == Transfer::NotYet) {
            return Err(Fault("a reply that comes twice, or before its body"));
        }
        let fits = match (outcome, kind) {
            (Outcome::Done, Kind::Push) => len == 0,
            (Outcome::Done, _) => len <= room && (!exact || len == room),
            _ => len <= MAX_TEXT,
        };
        if !fits {
            return Err(Fault("a reply that does not fit"));
        }
        call.outcome = Some((outcome, len));
        if len > 0 {
            call.reply = Transfer::Runs;
            let (_, slot) = call.sent.expect("found by its number");
            let target = if outcome == Outcome::Done && !call.is_abandoned { target } else { Target::Own };
            self.actions.push_back(ClientAction::Receive { call: number, slot, len, target, priority });
        }
        self.time(number);
        self.check_end(number);
        Ok(())
    }

    /// Ends a call when nothing of it is on its way any more.
    fn check_end(&mut self, number: u64) {
        let call = &self.calls[&number];
        let Some((outcome, len)) = call.outcome else { return };
        if call.body == Transfer::Runs || call.reply == Transfer::Runs {
            return;
        }
        let call = self.remove(number);
        let (id, slot) = call.sent.expect("it has a reply");
        self.sent.remove(&id);
        self.free.insert(slot);
        if !call.is_abandoned {
            let ended = if outcome == Outcome::Done { Ended::Done(len) } else { Ended::Refused(outcome) };
            self.actions.push_back(ClientAction::End(number, ended));
        }
        self.actions.push_back(ClientAction::Forget(number));
        self.fill();
        self.end_when_idle();
    }

    /// Notes when a call becomes late, if it still can. Follows every change of that.
    fn time(&mut self, number: u64) {
        let call = &self.calls[&number];
        let Some(by) = call.ask.deadline else { return };
        match call.can_be_abandoned() {
            true => self.deadlines.insert((by, number)),
            false => self.deadlines.remove(&(by, number)),
        };
    }

    fn remove(&mut self, number: u64) -> Call {
        let call = self.calls.remove(&number).expect("it has not ended");
        if let Some(by) = call.ask.deadline {
            self.deadlines.remove(&(by, number));
        }
        call
    }

    fn end_when_idle(&mut self) {
        if let Phase::Closing(why) = self.phase
            && self.calls.is_empty()
            && self.limits.is_some()
        {
            self.phase = Phase::Leaving(why);
            self.actions.extend(Class::ALL.map(|class| ClientAction::Say(class, Record::Bye)));
        }
    }

    /// A call that was sent, by its number on the connection.
    fn call(&mut self, id: u64) -> Result<(u64, &mut Call), Fault> {
        let unknown = Fault("a call that was not made, or has ended");
        let number = *self.sent.get(&id).ok_or(unknown)?;
        Ok((number, self.calls.get_mut(&number).expect("it was sent")))
    }
}

impl Call {
    /// Whether its caller can be told that it has ended although the server may still work on it.
    fn can_be_abandoned(&self) -> bool {
        let leaves = self.body == Transfer::Runs && self.ask.body > INLINE;
        !self.is_abandoned && !leaves && self.outcome.is_none()
    }
}

/// Slots that a client uses, however many the server offers.
const MOST_SLOTS: u32 = 65_536;
