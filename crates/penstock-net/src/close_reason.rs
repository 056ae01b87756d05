//! Why a connection ends: what the driver decides by, and what it logs.

use penstock_stream::FrameError;
use penstock_stream::handshake::HandshakeError;
use rustix::io::Errno;
use std::fmt;

/// Why a connection ends. Its text goes on where the connection is the subject: in logs, in errors, and to a peer that is cut off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CloseReason {
    /// The other side has closed it, or its process has ended.
    ClosedThere,
    /// The other side has closed it during the hand-shake.
    ClosedInHandshake,
    /// A system call has failed.
    System(Errno),
    /// The other side has sent something that is not a frame, or that it may not send.
    Frame(FrameError),
    /// The hand-shake has failed.
    Handshake(HandshakeError),
    /// The job is not set up yet, here or at the other side: the connector tries again.
    NotYet,
    /// The other side passes descriptors during a hand-shake.
    Descriptors,
    /// The hand-shake takes too long.
    NoAnswer,
    /// The other side has sent no HELLO, or has not proved who it is for a while, and its place is given to others.
    MakesRoom,
    /// Another connection carries the stream now.
    Replaced,
    /// The stream is silent while others of the same peer are not.
    Stalled,
    /// All connections to the peer are closed.
    PeerLost,
}

impl CloseReason {
    /// The reason after a failed system call. Nothing but the end of the other process resets a connection that is `local`.
    pub(crate) fn of_call(error: Errno, local: bool) -> CloseReason {
        match error {
            Errno::CONNRESET | Errno::PIPE if local => CloseReason::ClosedThere,
            error => CloseReason::System(error),
        }
    }

    /// Whether nothing listens at the other end.
    pub(crate) fn is_refused(&self) -> bool {
        *self == CloseReason::System(Errno::CONNREFUSED)
    }

    /// Whether no warning is needed: the connector tries again soon, or there are too many such connections for a line each.
    pub(crate) fn is_usual(&self) -> bool {
        matches!(self, CloseReason::NotYet | CloseReason::MakesRoom)
    }
}

impl From<FrameError> for CloseReason {
    fn from(error: FrameError) -> CloseReason {
        CloseReason::Frame(error)
    }
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CloseReason::System(error) => return write!(f, "{error}"),
            CloseReason::Frame(error) => return write!(f, "it sent {error}"),
            CloseReason::Handshake(error) => return write!(f, "{error}"),
            CloseReason::ClosedThere => "it closed the connection",
            CloseReason::ClosedInHandshake => "it closed the connection during the hand-shake",
            CloseReason::NotYet => "the job is not set up there yet",
            CloseReason::Descriptors => "it passes descriptors in a hand-shake",
            CloseReason::NoAnswer => "no answer to the hand-shake",
            CloseReason::MakesRoom => "it has not said or not proved who it is, and others came",
            CloseReason::Replaced => "it was replaced by a new connection",
            CloseReason::Stalled => "the stream is silent while the peer is not",
            CloseReason::PeerLost => "the peer is lost",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reset is the end of the other process on a local connection, and an error of the network on any other. Only a refused
    /// connection says that nothing listens.
    #[test]
    fn resets_and_refusals() {
        for error in [Errno::CONNRESET, Errno::PIPE] {
            assert_eq!(CloseReason::of_call(error, true), CloseReason::ClosedThere);
            assert_eq!(CloseReason::of_call(error, false), CloseReason::System(error));
        }
        for local in [false, true] {
            assert!(CloseReason::of_call(Errno::CONNREFUSED, local).is_refused());
            assert!(!CloseReason::of_call(Errno::TIMEDOUT, local).is_refused());
        }
        assert!(!CloseReason::ClosedThere.is_refused());
    }
}
