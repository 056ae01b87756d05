//! What two ranks say to each other over streams, without sockets, clocks or threads.
//!
//! Bytes, time and randomness come in as arguments; frames and events come out as values. `penstock-net` turns them
//! into system calls, tests run them under a virtual clock.
//!
//! - [`frame`]: the header that every frame carries.
//! - [`handshake`]: how two nodes come to trust a stream.
//! - [`peer`]: everything between two nodes: which frame goes on which stream next, credit, acks, duplicates, loss.
//! - [`fingerprint`]: what a rank believes an operation to be.
//! - [`ranges`]: sets of numbers that come in order.

pub mod fingerprint;
pub mod frame;
pub mod handshake;
pub mod peer;
pub mod ranges;
mod stream;

/// The sum that guards headers and, where asked for, payloads.
pub use ::crc32c::crc32c;
pub use frame::{FrameError, Header, Kind, MessageKey, Reference};
pub use stream::StreamStats;
