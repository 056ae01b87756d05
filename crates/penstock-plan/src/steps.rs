//! A collective as data: [`Steps`], one rank's part of it.
//!
//! A step is a template that stands for `segments` *instances*; instance `s` touches segment `s` of the step's
//! slices. Dependencies are explicit and local to a rank: an instance may start when all the instances that its
//! `after` names are done. Dependencies *between* ranks are the messages themselves: a `Recv` is done when the bytes of
//! the matching `Send` lie in its destination.
//!
//! ```text
//!                 segment 0   segment 1   segment 2
//!   Send   step 0   [####]      [####]      [##]         a slice shorter than `segments * segment_bytes`
//!   Reduce step 1   [####]      [####]      [##]         ends early; instances with an empty slice are skipped
//!   Send   step 2   after (1, same segment)              on both sides (both sides compute the same lengths)
//! ```
//!
//! When is an instance done?
//! - `Send`: when the receiver has taken all its bytes (acknowledged), or the engine keeps a copy of its own, so that
//!   the source may be overwritten.
//! - `Recv`, `Reduce`, `Copy`: when the destination holds the result.
//! - `Notify`: as a `Send` of no bytes. `Await`: when the notification is here.
//! - `Pull`: when the destination holds the result; the `Push` that it answers is done then too.
//!
//! A plan may omit an order that holds *through the peer*. In the all-gather half of a ring, for example, the final chunk can
//! only arrive after the next rank has consumed the partial one that this rank sent from the same place; no local dependency
//! is needed. [`crate::check`] follows such chains and fails the plan if a write is not ordered after every earlier read of
//! the same bytes.

/// One rank's part of one collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Steps {
    /// The step templates. Indices into this list are what [`Dep`] names. Urgency within the operation follows the
    /// order of the list, then the segment.
    pub steps: Vec<Step>,
    /// Bytes of scratch memory that the slices with [`Buf::Scratch`] lie in.
    pub scratch_bytes: u64,
    /// One more than the largest message number that any rank uses in this operation.
    pub messages: u32,
}

impl Steps {
    /// The payload bytes that this rank sends to each of `world` ranks. What goes to servers is not among them.
    #[must_use]
    pub fn sent_bytes(&self, world: u32) -> Vec<u64> {
        let mut sent = vec![0; world as usize];
        for step in &self.steps {
            if let Action::Send { to, src, .. } = step.action {
                sent[to as usize] += (0..step.segments).map(|segment| src.segment(segment).1).sum::<u64>();
            }
        }
        sent
    }
}

/// A template for `segments` instances of one action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// What an instance does.
    pub action: Action,
    /// How many instances there are.
    pub segments: u32,
    /// The instances that must be done before.
    pub after: Vec<Dep>,
}

/// An instance's prerequisite within the same rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dep {
    /// Instance `s` waits for instance `s - lag` of `step` (for nothing, where `s < lag`).
    Segment {
        /// Index of the step that is waited for.
        step: u32,
        /// How many segments earlier.
        lag: u32,
    },
    /// Every instance waits for every instance of `step`.
    All {
        /// Index of the step that is waited for.
        step: u32,
    },
}

/// What an instance does. Message numbers: instance `s` of a step with message `m` uses number `m + s`; a `Send` on
/// rank `a` to `b` and the `Recv`, `Reduce` or `Await` on `b` that names the same number from `a` are one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Sends the bytes of `src` to rank `to`. To a peer on the same host this may be a reference that the peer reads through:
    /// the transport chooses the medium.
    Send {
        /// Receiving rank in the group.
        to: u32,
        /// Number of the first instance's message.
        message: u32,
        /// The bytes.
        src: Slice,
    },
    /// Stores the bytes that rank `from` sends.
    Recv {
        /// Sending rank in the group.
        from: u32,
        /// Number of the first instance's message.
        message: u32,
        /// The destination.
        dst: Slice,
    },
    /// `dst = sources[0] op sources[1] op ...`, in exactly this order. A local source may be `dst` itself.
    Reduce {
        /// The destination.
        dst: Slice,
        /// The operands, in order.
        sources: Vec<Operand>,
        /// This is the last reduction of these bytes: finish the operation (an average divides now).
        last: bool,
    },
    /// `dst = src`; the two do not overlap.
    Copy {
        /// The destination.
        dst: Slice,
        /// The source.
        src: Slice,
    },
    /// Tells rank `to` that this rank has arrived; no bytes.
    Notify {
        /// Receiving rank in the group.
        to: u32,
        /// Number of the message.
        message: u32,
    },
    /// Waits for rank `from`'s `Notify`.
    Await {
        /// Sending rank in the group.
        from: u32,
        /// Number of the message.
        message: u32,
    },
    /// Sends the bytes of `src` to a server, which adds what all ranks push as instance `s` of the same server.
    Push {
        /// The server's index in [`crate::Placement::servers`].
        server: u32,
        /// The bytes. They must stay as they are until the matching `Pull` has its result: they may be sent again.
        src: Slice,
    },
    /// Stores the finished sum of what all ranks, including this one, push as the same instance of this server. At most one
    /// `Push` and one `Pull` name a server.
    Pull {
        /// The server's index.
        server: u32,
        /// The destination; it may be the source of the push.
        dst: Slice,
    },
}

/// A source of a `Reduce`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// Bytes of this rank.
    Local(Slice),
    /// The bytes of a message: consumed by this step, never stored.
    Message {
        /// Sending rank in the group.
        from: u32,
        /// Number of the first instance's message.
        message: u32,
    },
}

/// The memory in which a slice lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Buf {
    /// The rank's contribution; never written. Absent for operations in place.
    Input,
    /// The rank's result; for operations in place (all-reduce, broadcast, reduce) it also holds the contribution.
    Output,
    /// Memory of the engine, [`Steps::scratch_bytes`] long.
    Scratch,
}

/// A byte range that advances with the segment: instance `s` covers
/// `start + s * segment_bytes .. min(start + (s + 1) * segment_bytes, start + len)`,
/// or, with `slots > 0`, the same bytes' length at `start + (s % slots) * segment_bytes` (a ring of scratch slots).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The memory in which it lies.
    pub buf: Buf,
    /// Where segment 0 starts, in bytes.
    pub start: u64,
    /// Bytes over all segments.
    pub len: u64,
    /// Bytes a segment; the last may be shorter. A multiple of 16 unless there is one segment.
    pub segment_bytes: u64,
    /// 0, or the number of slots that segments take turns in.
    pub slots: u32,
}

impl Slice {
    /// The bytes that instance `segment` touches, as (start, length). The length is 0 past the end.
    #[must_use]
    pub fn segment(&self, segment: u32) -> (u64, u64) {
        let offset = u64::from(segment) * self.segment_bytes;
        let len = self.len.saturating_sub(offset).min(self.segment_bytes);
        let place = if self.slots == 0 { offset } else { u64::from(segment % self.slots) * self.segment_bytes };
        (self.start + place.min(if self.slots == 0 { self.len } else { u64::MAX }), len)
    }
}
