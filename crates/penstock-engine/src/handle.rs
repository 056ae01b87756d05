//! How callers reach the engine's thread.

use crate::recorder::Recorder;
use crate::runtime::{Command, Shared};
use crate::ticket::Ticket;
use penstock_net::{Wake, fds};
use penstock_types::{Failure, FailureKind};
use std::sync::{Arc, mpsc};

/// What callers have of an engine: its mailbox.
#[derive(Debug)]
pub(crate) struct Handle {
    shared: Arc<Shared>,
    wake: Arc<Wake>,
    recorder: Recorder,
}

impl Handle {
    pub(crate) fn new(shared: Arc<Shared>, wake: Arc<Wake>, recorder: Recorder) -> Handle {
        Handle { shared, wake, recorder }
    }

    pub(crate) fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Posts a command. If that is not possible, `ticket` gets the reason.
    pub(crate) fn command(&self, command: Command, ticket: &Ticket) {
        if let Err(failure) = check_fork() {
            ticket.complete(Err(failure));
        } else if self.shared.post(command, ticket) {
            self.wake.wake();
        }
    }

    /// Posts a question, and waits for the answer.
    pub(crate) fn ask<T>(&self, question: impl FnOnce(mpsc::Sender<T>) -> Command) -> Result<T, Failure> {
        let (reply, answer) = mpsc::channel();
        let ticket = Ticket::default();
        self.command(question(reply), &ticket);
        // The sender is dropped with the command, also when the engine's thread ends.
        answer.recv().map_err(|_| {
            let refused = ticket.result().and_then(Result::err).or_else(|| self.shared.closed());
            refused.unwrap_or_else(|| Failure::fatal(FailureKind::Bug, "the engine's thread has panicked."))
        })
    }
}

/// Fails in a process that was forked from one with an engine.
///
/// # Errors
/// `Closed`.
pub fn check_fork() -> Result<(), Failure> {
    if !fds::forked() {
        return Ok(());
    }
    Err(Failure::fatal(
        FailureKind::Closed,
        "this process was forked from one that uses Penstock, and the engine stays with the parent. Start a process that \
         communicates with spawn or exec, and call init_process_group in it.",
    ))
}
