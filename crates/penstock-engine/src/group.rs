//! A group, and its channels, as callers see them.

use crate::aggregated::{Channels, Client, ClientSpec, ClientStats, Sockets};
use crate::channel::Channel;
use crate::handle::{Handle, check_fork};
use crate::runtime::{Call, Command};
use crate::ticket::Ticket;
use penstock_plan::Algorithm;
use penstock_types::{Failure, FailureKind, GroupId, Priority};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A set of ranks that run collectives together; more exactly, a channel of it, in which these have an order of their own. What
/// [`Engine::join`] returns is the main channel, and stands for the group where something ends.
#[derive(Clone, Debug)]
pub struct Group {
    channel: Channel,
    /// The client that takes the group's large all-reduces, if they go through aggregators and servers.
    client: Arc<OnceLock<Client>>,
}

impl Group {
    /// The main channel of a group that is being joined.
    pub(crate) fn new(id: GroupId, name: &str, handle: Arc<Handle>) -> Group {
        Channel::main(id, name, handle).into()
    }

    /// Opens another channel of the same group, whose collectives have an order of their own. All ranks open the channels of a
    /// group in the same order, under the same names. Returns at once; the ticket completes when all ranks have opened it. The
    /// channel is closed with [`Group::leave`], or with the group.
    #[must_use]
    pub fn channel(&self, name: &str, timeout: Duration) -> (Group, Ticket) {
        self.open(name, false, timeout)
    }

    /// [`Group::channel`]. A vigil fails as soon as any rank closes it or leaves, also if no operation runs there.
    pub(crate) fn open(&self, name: &str, is_vigil: bool, timeout: Duration) -> (Group, Ticket) {
        let (channel, ticket) = self.channel.open(name, is_vigil, timeout);
        (channel.into(), ticket)
    }

    /// Starts an operation.
    ///
    /// # Safety
    /// The buffers of `call` must be valid for the lengths that [`penstock_plan::Request`] gives them. Until the ticket
    /// completes, nothing else may read the output, or write either.
    #[must_use]
    pub unsafe fn start(&self, call: Call) -> Ticket {
        let ticket = Ticket::default();
        // SAFETY: the caller's promise.
        unsafe { self.start_as(call, ticket.clone()) };
        ticket
    }

    /// [`Group::start`] with a ticket that may have callbacks. They all run on the engine's thread, in the order in which
    /// operations end there, except for an operation that could not be started at all.
    ///
    /// # Safety
    /// As for [`Group::start`].
    pub(crate) unsafe fn start_as(&self, call: Call, ticket: Ticket) {
        match self.client.get().filter(|client| client.takes(&call)) {
            Some(client) => client.start(call, ticket),
            // SAFETY: the caller's promise.
            None => unsafe { self.channel.start_as(call, &ticket) },
        }
    }

    /// From now on, large sums and averages of floats go through aggregators and servers, in an order of their own. All ranks
    /// of the group call this once, between the same two operations, with the parameters on which they have agreed. It opens two
    /// channels; the ticket completes when all ranks have opened them.
    ///
    /// # Errors
    /// `Config`: this process has no descriptors or threads left.
    ///
    /// # Panics
    /// If the group is aggregated already.
    pub fn aggregate(&self, sockets: Sockets, spec: ClientSpec, timeout: Duration) -> Result<Ticket, Failure> {
        check_fork()?;
        let (alarm, _) = self.channel.open("alarm", true, timeout);
        let (fallback, opened) = self.channel.open("fallback", false, timeout);
        let channels = Channels { group: self.channel.clone(), alarm: alarm.clone(), fallback: fallback.clone() };
        let client = Client::start_thread(channels, sockets, spec, self.channel.handle.recorder().clone());
        let client = client.inspect_err(|_| [alarm, fallback].iter().for_each(|channel| channel.close(false)))?;
        assert!(self.client.set(client).is_ok(), "a group is aggregated once");
        Ok(opened)
    }

    /// Counters of the aggregated operations; `None` without aggregation.
    #[must_use]
    pub fn aggregated_stats(&self) -> Option<ClientStats> {
        self.client.get().map(Client::stats)
    }

    /// Completes the ticket when the group or channel fails, with its failure, or is left.
    pub(crate) fn watch(&self, ticket: Ticket) {
        self.channel.watch(ticket);
    }

    /// The buffers of an operation that was started with [`Call::hold`] are ready.
    pub fn release(&self, ticket: &Ticket) {
        if let Some(client) = self.client.get() {
            client.release(ticket);
        }
        self.channel.handle.command(Command::Release(self.channel.scope.group, ticket.clone()), ticket);
    }

    /// Changes how urgent a running operation is, for what this rank sends; nothing happens if it has ended.
    pub fn reprioritise(&self, ticket: &Ticket, priority: Priority) {
        if let Some(client) = self.client.get() {
            client.reprioritise(ticket, priority);
        }
        self.channel.reprioritise(ticket, priority);
    }

    /// From the next operation on, all-reduces use this algorithm where it fits (`None`: chosen by size and hosts), and this
    /// process sends to the group's other ranks on this many streams, if as many are open. All ranks must change the algorithm
    /// between the same two operations of the channel. The number of streams is each sender's own choice, and counts for other groups with
    /// these ranks too.
    pub fn retune(&self, algorithm: Option<Algorithm>, streams: usize) {
        if let Some(client) = self.client.get() {
            client.retune(algorithm);
        }
        self.channel.handle.command(Command::Retune(self.channel.scope, algorithm, streams), &Ticket::default());
    }

    /// The host of each rank, as found when the group was joined; blocks for one turn of the engine's loop.
    ///
    /// # Errors
    /// `Closed`: the engine has stopped.
    pub fn hosts(&self) -> Result<Vec<u32>, Failure> {
        self.channel.handle.ask(|reply| Command::Hosts(self.channel.scope.group, reply))
    }

    /// Checks whether these ranks of the group can still be reached, for callers that wait outside of the engine. It is an
    /// error if one is lost; with `farewells`, also if one has left the job; with `whole`, also if the group has failed.
    /// Blocks for one turn of the engine's loop.
    ///
    /// # Errors
    /// The group's failure; `PeerLost`; `Closed`: the group was left, or the engine has stopped.
    pub fn check(&self, whole: bool, farewells: bool, ranks: Vec<u32>) -> Result<(), Failure> {
        let failure = self.channel.handle.ask(|reply| Command::Check {
            group: self.channel.scope.group,
            whole,
            farewells,
            ranks,
            reply,
        })?;
        failure.map_or(Ok(()), Err)
    }

    /// Leaves the group, or closes the channel; operations that still run there fail, on all ranks.
    pub fn leave(&self) {
        self.close(false);
    }

    /// Closes the channel. `leaves_group`: its group is left next, and other ranks that need this one hear that.
    pub fn close(&self, leaves_group: bool) {
        if let Some(client) = self.client.get() {
            if let Some(failure) = client.left() {
                self.end(failure);
            }
            client.stop();
        }
        self.channel.close(leaves_group);
    }

    /// Fails all operations of the group, or of the channel, on all ranks.
    pub fn abort(&self, reason: &str) {
        self.abort_as(FailureKind::Closed, reason);
    }

    /// [`Group::abort`] for a failure of this kind elsewhere.
    pub fn abort_as(&self, kind: FailureKind, reason: &str) {
        self.end(Failure::fatal(kind, format!("aborted: {reason}.")));
    }

    /// Fails the group on all ranks because its caller waits no longer, for [`Engine::join`] or for an operation. The failure
    /// of a join names the missing ranks.
    pub fn expire(&self, waited: Duration) {
        if let Some(failure) = self.client.get().and_then(|client| client.expired(waited)) {
            return self.fail(failure);
        }
        self.channel.handle.command(Command::Expire(self.channel.scope, waited.as_nanos() as u64), &Ticket::default());
    }

    /// Fails the whole group on all ranks with this failure.
    pub(crate) fn fail(&self, failure: Failure) {
        self.channel.fail(failure);
    }

    /// Fails the channel on all ranks with this failure, and with the main one the group.
    pub(crate) fn end(&self, failure: Failure) {
        self.channel.end(failure);
    }
}

impl From<Channel> for Group {
    fn from(channel: Channel) -> Group {
        Group { channel, client: Arc::default() }
    }
}
