//! A rank's operations: the engine, its groups and their tickets.
//!
//! [`Engine`] is an event loop on one thread, or on as many as asked for (`PENSTOCK_IO_THREADS`); [`Group`] is a set of ranks that run collectives together. A call
//! returns a [`Ticket`] at once; any number of operations may be in flight. The order of calls on a group is the
//! contract between its ranks, as in MPI: the n-th collective on one rank meets the n-th on every other. [`Group::channel`] opens
//! another order among the same ranks.
//!
//! Why one by default? The protocol's machine must see frames of a peer in order, so threads share a lock, and on most machines one
//! core moves more than the network does (docs/design/threads.md).

mod aggregated;
mod buffers;
mod channel;
pub mod endpoint;
mod engine;
mod group;
mod handle;
mod pages;
mod pieces;
mod recorder;
mod reducer;
mod runtime;
mod scale;
mod stats;
mod ticket;
#[cfg(test)]
mod virtual_time;

pub use aggregated::{ClientSpec, ClientStats, NodeSpec, ServerSpec, ServerStats, Sockets, Wire};
pub use engine::{Config, Engine, MAX_IO_THREADS};
pub use group::Group;
pub use handle::check_fork;
pub use penstock_core::unbound::ANY_SOURCE;
pub use penstock_kernels::simd_level;
pub use penstock_net::{Contact, Process, Ptracer, fds, interface, log_writer, memory};
pub use penstock_plan as plan;
pub use penstock_stream::{crc32c, fingerprint};
pub use recorder::{Ended, Message};
pub use reducer::{Gradient, Reducer, ReducerSpec, ReducerStats, Setting};
pub use runtime::{Call, GroupSpec};
pub use stats::{ChannelStats, GroupStats, Held, PeerStats, Stats};
pub use ticket::Ticket;
