//! A channel of a group, as callers see it: an order of operations among the group's ranks.

use crate::handle::Handle;
use crate::runtime::{Call, Command};
use crate::ticket::Ticket;
use penstock_core::groups::Open;
use penstock_types::{ChannelId, Failure, GroupId, Priority, Scope};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// An order of operations in a group. The main one is the group's own, and stands for the group where something ends.
#[derive(Clone, Debug)]
pub struct Channel {
    pub(crate) scope: Scope,
    /// With the group's.
    name: Arc<str>,
    pub(crate) handle: Arc<Handle>,
    /// The number of the channel that this rank has opened last in the group.
    opened: Arc<AtomicU32>,
}

impl Channel {
    /// The main channel of a group that is being joined.
    pub(crate) fn main(id: GroupId, name: &str, handle: Arc<Handle>) -> Channel {
        let opened = Arc::new(AtomicU32::new(ChannelId::MAIN.0));
        Channel { scope: id.into(), name: name.into(), handle, opened }
    }

    /// Opens another channel of the same group. A vigil fails as soon as any rank closes it or leaves, also if no operation runs there.
    pub(crate) fn open(&self, name: &str, is_vigil: bool, timeout: Duration) -> (Channel, Ticket) {
        let name: Arc<str> = format!("{}/{name}", self.name).into();
        let channel = ChannelId(self.opened.fetch_add(1, Ordering::Relaxed) + 1);
        let (scope, ticket) = (Scope { channel, ..self.scope }, Ticket::default());
        let timeout = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        let open = Open { channel, name: name.clone(), is_vigil, timeout };
        self.handle.command(Command::Open(scope.group, open, ticket.promise()), &ticket);
        (Channel { scope, name, ..self.clone() }, ticket)
    }

    /// Starts an operation.
    ///
    /// # Safety
    /// The buffers of `call` must be valid for the lengths that [`penstock_plan::Request`] gives them. Until the ticket
    /// completes, nothing else may read the output, or write either.
    pub(crate) unsafe fn start_as(&self, call: Call, ticket: &Ticket) {
        self.handle.command(Command::Start(self.scope, call, ticket.promise()), ticket);
    }

    /// Completes the ticket when the group or channel fails, with its failure, or is left.
    pub(crate) fn watch(&self, ticket: Ticket) {
        self.handle.command(Command::Watch(self.scope, ticket.promise()), &ticket);
    }

    /// Leaves the group, or closes the channel; operations that still run there fail, on all ranks. `leaves_group`: its group is left
    /// next, and other ranks that need this one hear that.
    pub(crate) fn close(&self, leaves_group: bool) {
        self.handle.command(Command::Leave(self.scope, leaves_group), &Ticket::default());
    }

    /// Changes how urgent a running operation is, for what this rank sends; nothing happens if it has ended.
    pub(crate) fn reprioritise(&self, ticket: &Ticket, priority: Priority) {
        self.handle.command(Command::Reprioritise(self.scope.group, ticket.clone(), priority), &Ticket::default());
    }

    /// Fails the whole group on all ranks with this failure.
    pub(crate) fn fail(&self, failure: Failure) {
        self.handle.command(Command::Abort(self.scope.group.into(), failure), &Ticket::default());
    }

    /// Fails the channel on all ranks with this failure, and with the main one the group.
    pub(crate) fn end(&self, failure: Failure) {
        self.handle.command(Command::Abort(self.scope, failure), &Ticket::default());
    }
}
