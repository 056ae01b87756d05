//! A group, as callers see it.

use crate::aggregated::{Client, ClientSpec, ClientStats, Sockets};
use crate::handle::{Handle, check_fork};
use crate::runtime::{Call, Command};
use crate::ticket::Ticket;
use penstock_plan::Algorithm;
use penstock_types::{Failure, FailureKind, GroupId};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A set of ranks that run collectives together.
#[derive(Clone, Debug)]
pub struct Group {
    id: GroupId,
    handle: Arc<Handle>,
    /// The client that takes the group's large all-reduces, if they go through aggregators and servers.
    client: Arc<OnceLock<Client>>,
}

impl Group {
    /// A group that is being joined.
    pub(crate) fn new(id: GroupId, handle: Arc<Handle>) -> Group {
        Group { id, handle, client: Arc::default() }
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
            None => self.handle.command(Command::Start(self.id, call, ticket.promise()), &ticket),
        }
    }

    /// From now on, large sums and averages of floats go through aggregators and servers, in an order of their own. All ranks
    /// of the group call this once, between the same two operations, with the parameters on which they have agreed.
    ///
    /// # Errors
    /// `Config`: this process has no descriptors or threads left.
    ///
    /// # Panics
    /// If the group is aggregated already.
    pub fn aggregate(&self, sockets: Sockets, spec: ClientSpec) -> Result<(), Failure> {
        check_fork()?;
        let client = Client::start_thread(self.alone(), sockets, spec, self.handle.recorder().clone())?;
        assert!(self.client.set(client).is_ok(), "a group is aggregated once");
        Ok(())
    }

    /// Counters of the aggregated operations; `None` without aggregation.
    #[must_use]
    pub fn aggregated_stats(&self) -> Option<ClientStats> {
        self.client.get().map(Client::stats)
    }

    /// The group without its client.
    fn alone(&self) -> Group {
        Group { id: self.id, handle: self.handle.clone(), client: Arc::default() }
    }

    /// Completes the ticket when the group fails, with its failure, or is left.
    pub(crate) fn watch(&self, ticket: Ticket) {
        self.handle.command(Command::Watch(self.id, ticket.promise()), &ticket);
    }

    /// The buffers of an operation that was started with [`Call::hold`] are ready.
    pub fn release(&self, ticket: &Ticket) {
        if let Some(client) = self.client.get() {
            client.release(ticket);
        }
        self.handle.command(Command::Release(self.id, ticket.clone()), ticket);
    }

    /// From the next operation on, all-reduces use this algorithm where it fits (`None`: the planner's choice), and this
    /// process sends to the group's other ranks on this many streams, if as many are open. All ranks must change the algorithm
    /// between the same two operations. The number of streams is each sender's own choice, and counts for other groups with
    /// these ranks too.
    pub fn retune(&self, algorithm: Option<Algorithm>, streams: usize) {
        if let Some(client) = self.client.get() {
            client.retune(algorithm);
        }
        self.handle.command(Command::Retune(self.id, algorithm, streams), &Ticket::default());
    }

    /// The host of each rank, as found when the group was joined; blocks for one turn of the engine's loop.
    ///
    /// # Errors
    /// `Closed`: the engine has stopped.
    pub fn hosts(&self) -> Result<Vec<u32>, Failure> {
        self.handle.ask(|reply| Command::Hosts(self.id, reply))
    }

    /// Checks whether these ranks of the group can still be reached, for callers that wait outside of the engine. It is an
    /// error if one is lost; with `farewells`, also if one has left the job; with `whole`, also if the group has failed.
    /// Blocks for one turn of the engine's loop.
    ///
    /// # Errors
    /// The group's failure; `PeerLost`; `Closed`: the group was left, or the engine has stopped.
    pub fn check(&self, whole: bool, farewells: bool, ranks: Vec<u32>) -> Result<(), Failure> {
        let failure = self.handle.ask(|reply| Command::Check { group: self.id, whole, farewells, ranks, reply })?;
        failure.map_or(Ok(()), Err)
    }

    /// Leaves the group; operations that still run fail.
    pub fn leave(&self) {
        if let Some(client) = self.client.get() {
            if let Some(failure) = client.left() {
                self.fail(failure);
            }
            client.stop();
        }
        self.handle.command(Command::Leave(self.id), &Ticket::default());
    }

    /// Fails all operations of the group, on all ranks.
    pub fn abort(&self, reason: &str) {
        self.fail(Failure::fatal(FailureKind::Closed, format!("aborted: {reason}.")));
    }

    /// Fails the group on all ranks because its caller waits no longer, for [`Engine::join`] or for an operation. The failure
    /// of a join names the missing ranks.
    pub fn expire(&self, waited: Duration) {
        if let Some(failure) = self.client.get().and_then(|client| client.expired(waited)) {
            return self.fail(failure);
        }
        self.handle.command(Command::Expire(self.id, waited.as_nanos() as u64), &Ticket::default());
    }

    /// Fails the group on all ranks with this failure.
    pub(crate) fn fail(&self, failure: Failure) {
        self.handle.command(Command::Abort(self.id, failure), &Ticket::default());
    }
}
