//! Failures: errors that a caller can act on.

use std::fmt;

/// The kind of a [`Failure`]: what a caller can do about it depends on this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// Ranks issued different operations, shapes, dtypes or roots: correct the script.
    Mismatch,
    /// A rank died, stopped or became unreachable: rebuild the group without it.
    PeerLost,
    /// An operation took longer than its time-out although every rank answers.
    Timeout,
    /// A peer refused this process (wrong secret, version, job): correct the setup.
    Refused,
    /// A setting, an argument or the machine is not as needed; nothing was sent.
    Config,
    /// The group was shut down, aborted or forked away before the operation ended.
    Closed,
    /// A defect of Penstock itself.
    Bug,
    /// A gradient holds NaN or infinity, and the user asked for a check.
    NotFinite,
    /// A handler of an endpoint has failed.
    Handler,
}

impl FailureKind {
    /// All kinds.
    pub const ALL: [FailureKind; 9] = [
        FailureKind::Mismatch,
        FailureKind::PeerLost,
        FailureKind::Timeout,
        FailureKind::Refused,
        FailureKind::Config,
        FailureKind::Closed,
        FailureKind::Bug,
        FailureKind::NotFinite,
        FailureKind::Handler,
    ];

    /// The word that logs and Python's exception names use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            FailureKind::Mismatch => "Mismatch",
            FailureKind::PeerLost => "PeerLost",
            FailureKind::Timeout => "Timeout",
            FailureKind::Refused => "Refused",
            FailureKind::Config => "Config",
            FailureKind::NotFinite => "NotFinite",
            FailureKind::Handler => "HandlerFailed",
            FailureKind::Closed => "Closed",
            FailureKind::Bug => "Bug",
        }
    }
}

/// An error that says what happened, where, whether the group still lives, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What the caller can do about it.
    pub kind: FailureKind,
    /// One or two sentences: operation, sequence number, rank, address, cause, remedy.
    pub message: String,
    /// Whether the group can still be used for other operations.
    pub group_lives: bool,
    /// Another rank saw it, and the message says which one.
    pub is_reported: bool,
}

impl Failure {
    /// A failure after which the group is unusable.
    pub fn fatal(kind: FailureKind, message: impl Into<String>) -> Failure {
        Failure { kind, message: message.into(), group_lives: false, is_reported: false }
    }

    /// A failure of one call; the group goes on.
    pub fn of_call(kind: FailureKind, message: impl Into<String>) -> Failure {
        Failure { kind, message: message.into(), group_lives: true, is_reported: false }
    }

    /// The same for an operation that was issued afterwards, which it names.
    #[must_use]
    pub fn of_later(&self, operation: &str) -> Failure {
        Failure { message: format!("{operation} was not begun: {}", self.message), ..self.clone() }
    }

    /// The message with the state of the group, for readers who see the kind beside it.
    #[must_use]
    pub fn text(&self) -> String {
        let state = if self.group_lives {
            "The group is still usable."
        } else {
            "The group is unusable: destroy it and build a new one."
        };
        format!("{} {state}", self.message)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.text())
    }
}

impl std::error::Error for Failure {}
