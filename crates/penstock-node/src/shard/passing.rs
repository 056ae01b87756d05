//! The limit against which an aggregator is measured: the same thread and the same datagrams in and out, and no work between.

use super::{Machine, Refused};
use crate::admission::Admitted;
use crate::report::{Report, Which};
use penstock_net::datagrams::{Datagrams, Outbox, Train};
use penstock_types::Time;
use std::net::SocketAddr;

pub(super) struct Passing {
    /// The sender whose datagrams are passed on.
    pub(super) from: SocketAddr,
    pub(super) to: SocketAddr,
}

impl Machine for Passing {
    fn train(&mut self, _now: Time, train: Train<'_>, outbox: &mut Outbox<'_>) {
        if train.from == self.from {
            outbox.relay(self.to, train.bytes, train.stride);
        }
    }

    fn timeout(&self) -> Option<Time> {
        None
    }

    fn send(&mut self, _now: Time, _socket: &mut Datagrams) {}

    fn open(&mut self, _now: Time, _job: Admitted) -> Result<(), Refused> {
        Err(Refused::Conflict("this loop has no jobs".into()))
    }

    fn close(&mut self, _job: u32, _why: &str) {}

    fn report(&self, _now: Time, _which: &Which) -> Report {
        Report::default()
    }
}
