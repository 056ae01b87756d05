//! Endpoints: a server, and clients that ask it for something at any time.
//!
//! A call of a client is a request, a push or a pull of something that the server serves under a name. It has a body (bytes that go
//! up; a pull has none), and a reply (bytes that come down; a push has none). [`Client`] and [`Server`] decide what is said, when
//! bytes travel and when a call has ended. They hold no bytes and know no time but what they are told: what is to be done comes out
//! as actions, in the order in which the other side must see it.
//!
//! A client and its server are a group of two ranks, in which all that is said is messages under tags
//! ([`crate::groups`]): so connections, authentication, credit, references to shared memory, and the loss of a peer are those of
//! ranks. [`Record`]s, all of one length, go under the tag of their [`Class`]. The bytes of a call go under the tag of its slot
//! ([`slot_tag`]), and a slot serves one call at a time: so both sides know the length of the next message under each tag.
//!
//! ```text
//!   client                                        server
//!     │ ── Call{id, slot, name, body, room} ───────► │  is it served, does it fit?
//!     │ ◄────────────────────────────── Go{id} ───── │  when the client's bytes in flight allow it; a place is waiting
//!     │ ══ body, under the slot's tag ═════════════► │  then a handler takes it
//!     │ ◄───────────────────── Reply{id, len} ────── │  after the handler has returned
//!     │ ◄══ reply, under the slot's tag ════════════ │
//! ```
//! A body of up to [`INLINE`] bytes does not wait for `Go`: it follows its `Call`.

mod client;
#[cfg(test)]
mod hostile_tests;
mod record;
mod server;
#[cfg(test)]
mod tests;

pub use client::{Ask, Client, ClientAction, Ended, Target};
pub use record::{Class, Kind, Limits, Outcome, Record};
pub use server::{Asked, Server, ServerAction};

/// A body of up to this many bytes follows its call at once. Below the length from which messages within a host are references, so
/// that it is copied when it is sent and its owner has it back.
pub const INLINE: u64 = 8 * 1024;
/// The longest text of a refusal, in bytes of UTF-8.
pub const MAX_TEXT: u64 = 4096;

/// The tag under which the bytes of a call travel.
#[must_use]
pub fn slot_tag(slot: u32) -> u32 {
    slot + Class::ALL.len() as u32
}

/// The other side has said what it may not say: its process is defective, or is not Penstock. The connection cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault(pub &'static str);
