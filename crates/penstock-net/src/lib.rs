//! Moves frames: sockets, datagrams, and the memory of processes on the same host.
//!
//! [`Loop`] is an event loop over `epoll` on one thread or several: it turns what [`penstock_stream::peer::Peer`] wants into
//! system calls and asks a [`Handler`] (the engine) where payloads lie. It decides nothing: which frame goes where is
//! the protocol's affair, what a payload means is the engine's.
//!
//! Why not tokio? Payloads are placed, checked and reduced from inside the read loop, while they are warm in cache and
//! in the order in which one thread sees them; an asynchronous runtime would put a task switch and a copy between.

pub mod arbiter;
mod claims;
pub mod clock;
mod close_reason;
pub mod contact;
pub mod datagrams;
pub mod descriptors;
mod driver;
pub mod fds;
mod handler;
pub mod interface;
pub mod log_writer;
pub mod memory;
pub mod pages;
mod ptrace;
mod socket;
pub mod system;
pub mod waker;

pub use claims::Source;
pub use contact::{Contact, Process};
pub use driver::{Driver, Listen, Loop, Run, Settings, Wake};
pub use handler::{Admission, Handler, Peers, ThreadCounts, Unlocked, Use};
pub use ptrace::Ptracer;
