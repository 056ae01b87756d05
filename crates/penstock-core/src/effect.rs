//! What an operation ([`crate::operation::Operation`]) wants done, and how messages for it come.

use penstock_plan::Buf;

/// Where bytes of an operation begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// In which of its buffers.
    pub buf: Buf,
    /// Bytes from the buffer's start.
    pub offset: u64,
}

/// One instance of a step of the plan: what the step does to one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Instance {
    /// Index of the step in [`penstock_plan::Steps::steps`].
    pub step: u32,
    /// The segment.
    pub segment: u32,
}

/// What an operation wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Send bytes to a rank; tell [`crate::operation::Operation::on_sent`] when they are taken.
    Send {
        /// The rank to send to.
        to: u32,
        /// The message's number in the operation.
        message: u32,
        /// Where its bytes begin.
        from: Place,
        /// How many bytes.
        len: u64,
    },
    /// A rank may send these messages, or has sent them already.
    Open {
        /// The rank that sends them.
        from: u32,
        /// The number of the first message.
        message: u32,
        /// How many messages.
        count: u32,
    },
    /// The message that a rank gave by reference has been read: the rank may change its memory.
    Read {
        /// The rank that gave it.
        from: u32,
        /// The number of the message.
        message: u32,
    },
    /// A message that a rank gave by reference has been read, but the rank may have changed its memory before: ask, and tell [`crate::operation::Operation::on_confirmed`].
    Doubt {
        /// The rank that gave it.
        from: u32,
        /// The number of the message.
        message: u32,
    },
    /// Do what an instance does with what is here: this rank's own bytes, and the messages that were kept for it.
    Compute(Instance),
}

impl Effect {
    /// The rank that it concerns.
    #[must_use]
    pub fn rank(&self) -> Option<u32> {
        match self {
            Effect::Send { to: rank, .. }
            | Effect::Open { from: rank, .. }
            | Effect::Doubt { from: rank, .. }
            | Effect::Read { from: rank, .. } => Some(*rank),
            Effect::Compute(_) => None,
        }
    }

    /// Whether that rank has to do something for it.
    #[must_use]
    pub fn awaits(&self) -> bool {
        !matches!(self, Effect::Read { .. } | Effect::Compute(_))
    }
}

/// What an operation waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// A message.
    Message(u32),
    /// The other rank's word that it has taken this message of ours, which was sent.
    Taken(u32),
    /// The other rank's word that it has taken a message of ours, which cannot be sent yet.
    Unsent,
}

/// How a message, or a part of it, has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// Bytes that the caller holds.
    Frame {
        /// Where in the message they belong.
        offset: u64,
        /// How many bytes.
        len: u64,
    },
    /// Bytes that lie already where [`place`](crate::operation::Operation::place) said, or with which was done what
    /// [`claim`](crate::operation::Operation::claim) said.
    Placed {
        /// How many bytes.
        len: u64,
    },
    /// A reference to the sender's memory.
    Reference,
}

/// What to do with a message's bytes, before anything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Nothing,
    /// Copy them.
    Copy(Place),
    /// Reduce them into the result of an instance, with its other operands, all of which are this rank's own.
    Reduce {
        /// The instance.
        instance: Instance,
        /// Where in its segment the bytes begin.
        offset: u64,
    },
    /// Keep them (or the reference) until [`Effect::Compute`], or [`next_work`](crate::operation::Operation::next_work), names the instance.
    Keep {
        /// The instance that they are for.
        instance: Instance,
        /// The index of the operand of its step that they are, or are a part of.
        operand: u32,
        /// Bytes of the whole message.
        total: u64,
    },
}

/// An incoming message that does not fit the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// The plan has no such message.
    Unknown,
    /// The plan has this message, with another length.
    Length {
        /// The plan's, in bytes.
        expected: u64,
        /// The sender's, in bytes.
        got: u64,
    },
    /// A frame of it does not lie inside it, or cuts an element in two.
    Frame {
        /// Where the frame begins, in bytes.
        offset: u64,
        /// Its bytes.
        len: u64,
    },
    /// Reading the sender's memory failed.
    Unreadable(String),
}
