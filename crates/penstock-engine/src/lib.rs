//! A rank's operations.
//!
//! [`Engine`] is one thread with an event loop; [`Group`] is a set of ranks that run collectives together. A call
//! returns a [`Ticket`] at once; any number of operations may be in flight. The order of calls on a group is the
//! contract between its ranks, as in MPI: the n-th collective on one rank meets the n-th on every other.
//!
//! Why one thread? Frames of one peer come in an order that the protocol's machine must see, reducing runs at memory
//! speed, and on the machines that matter one core moves more than the network does. A second thread is worth having
//! where a host's link outruns a core; it is deliberately absent until a measurement asks for it.

mod aggregated;
mod digest;
mod engine;
mod operation;
mod pages;
mod readiness;
mod recorder;
mod reducer;
mod reported;
mod runtime;
mod scale;
mod stats;
mod tags;
mod ticket;
mod unbound;
#[cfg(test)]
mod virtual_time;

pub use aggregated::{ClientSpec, ClientStats, NodeSpec, ServerSpec, ServerStats, Sockets, Wire};
pub use engine::{Config, Engine, Group, check_fork};
pub use penstock_kernels::simd_level;
pub use penstock_net::{Contact, Process, Ptracer, fds, interface, memory};
pub use penstock_plan as plan;
pub use penstock_stream::{crc32c, fingerprint};
pub use reducer::{Gradient, Reducer, ReducerSpec, ReducerStats, Way};
pub use runtime::{Call, GroupSpec};
pub use stats::{GroupStats, Held, PeerStats, Stats};
pub use ticket::Ticket;
pub use unbound::ANY_SOURCE;
