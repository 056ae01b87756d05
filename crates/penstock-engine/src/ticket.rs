//! The result of an operation, as its caller holds it.

use penstock_types::{Failure, FailureKind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The pending result of an operation.
#[derive(Clone, Debug, Default)]
pub struct Ticket(Arc<Inner>);

struct Inner {
    /// When the caller asked for the operation: the engine's thread may come to it milliseconds later.
    made: Instant,
    state: Mutex<State>,
    changed: Condvar,
}

impl Default for Inner {
    fn default() -> Inner {
        Inner { made: Instant::now(), state: Mutex::default(), changed: Condvar::default() }
    }
}

#[derive(Default)]
struct State {
    result: Option<Result<(), Failure>>,
    source: Option<u32>,
    callbacks: Vec<Callback>,
}

type Callback = Box<dyn FnOnce(&Result<(), Failure>) + Send>;

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ticket").finish_non_exhaustive()
    }
}

impl Ticket {
    /// A ticket with a known result.
    #[must_use]
    pub fn ready(result: Result<(), Failure>) -> Ticket {
        let ticket = Ticket::default();
        ticket.complete(result);
        ticket
    }

    /// Blocks until the operation has ended, or for `timeout`. `None`: it has not ended.
    #[must_use]
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Result<(), Failure>> {
        let until = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.lock();
        loop {
            if let Some(result) = &state.result {
                return Some(result.clone());
            }
            state = match until {
                None => self.0.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner()),
                Some(until) => {
                    let left = until.checked_duration_since(Instant::now())?;
                    self.0.changed.wait_timeout(state, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0
                }
            };
        }
    }

    /// The result, if the operation has ended.
    #[must_use]
    pub fn result(&self) -> Option<Result<(), Failure>> {
        self.lock().result.clone()
    }

    /// The rank whose message a receive from any source takes, once it is known.
    #[must_use]
    pub fn source(&self) -> Option<u32> {
        self.lock().source
    }

    /// Calls `callback` once the operation has ended: on the engine's thread, or at once on this thread if it has ended
    /// already.
    pub fn on_done(&self, callback: impl FnOnce(&Result<(), Failure>) + Send + 'static) {
        let mut state = self.lock();
        match state.result.clone() {
            Some(result) => {
                drop(state);
                callback(&result);
            }
            None => state.callbacks.push(Box::new(callback)),
        }
    }

    /// When it was made: when its caller asked for the operation.
    pub(crate) fn made(&self) -> Instant {
        self.0.made
    }

    /// Whether both tickets belong to the same operation.
    pub(crate) fn is(&self, other: &Ticket) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The other end, for the engine's thread.
    pub(crate) fn promise(&self) -> Promise {
        Promise(Arc::new(Promised(self.clone())))
    }

    /// Sets the result; the first one counts.
    pub(crate) fn complete(&self, result: Result<(), Failure>) {
        let mut state = self.lock();
        if state.result.is_some() {
            return;
        }
        state.result = Some(result.clone());
        let callbacks = std::mem::take(&mut state.callbacks);
        drop(state);
        self.0.changed.notify_all();
        for callback in callbacks {
            callback(&result);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The engine's end of a [`Ticket`]. When the last clone of a promise is dropped, a ticket without a result gets a failure: no
/// caller waits forever for an operation that the engine has lost.
#[derive(Clone, Debug)]
pub(crate) struct Promise(Arc<Promised>);

#[derive(Debug)]
struct Promised(Ticket);

impl Promise {
    /// Sets the ticket's result; the first one counts.
    pub(crate) fn complete(&self, result: Result<(), Failure>) {
        self.0.0.complete(result);
    }

    /// A receive from any source has its message.
    pub(crate) fn set_source(&self, from: u32) {
        self.0.0.lock().source = Some(from);
    }

    /// As [`Ticket::made`].
    pub(crate) fn made(&self) -> Instant {
        self.0.0.made()
    }

    /// Whether the promise belongs to this ticket.
    pub(crate) fn is_of(&self, ticket: &Ticket) -> bool {
        self.0.0.is(ticket)
    }
}

impl Drop for Promised {
    fn drop(&mut self) {
        // Nearly every ticket has its result: no failure is made for those.
        if self.0.lock().result.is_none() {
            let message = "the engine's thread has dropped this operation (if it has panicked, standard error says where). \
                           This is a defect of Penstock.";
            self.0.complete(Err(Failure::fatal(FailureKind::Bug, message)));
        }
    }
}
