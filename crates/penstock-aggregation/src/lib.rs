//! In-network aggregation: switches or daemons add what N workers push, a server commits the sum and returns it to all
//! workers.
//!
//! `docs/reference/packets.md` draws the packet; `docs/design/aggregation.md` states the rules and says why each is there. The machines:
//!
//! - [`Worker`]: pushes blocks within Credit, sends again, asks for results that it misses.
//! - [`Aggregator`]: a slot table; one packet in, at most one packet out (to several); no timers; may lose everything.
//! - [`Server`]: the end of the path and the only commit point.
//!
//! [`client`] is what a rank does with a worker for each server: its all-reduces, from tensors to packets and back.
//!
//! `model.rs` walks every interleaving of a small system, and shows that each rule is needed. `penstock-sim` runs whole jobs
//! under a virtual clock with seeded faults.
//!
//! Bytes, time and randomness come in as arguments: nothing here has a socket, a clock or a thread. `penstock-node` runs
//! aggregators and servers, and `penstock-engine` the clients.

mod aggregator;
mod arithmetic;
#[cfg(test)]
mod around_tests;
pub mod client;
mod congestion;
mod estimate;
mod hops;
mod key;
#[cfg(test)]
mod model;
mod packet;
mod path;
mod receipt;
mod rules;
mod serial;
mod server;
mod tree;
mod worker;

pub use aggregator::{Action, Admission, Aggregator, Child, JobCounters, Limits, Shard, Tenant};
pub use hops::Naming;
pub use key::Key;
pub use packet::{
    FLAG_FULL, FLAG_LAST, FLAG_LOST, Format, HEADER_BYTES, Header, Kind, MAX_PAYLOAD_BYTES, Packet, PacketError,
    VERSION, decode,
};
pub use receipt::Receipt;
pub use rules::Refusal;
pub use serial::Serial;
pub use server::{Block, Buffer, Server, ServerConfig, Transmit};
pub use tree::{MAX_CHILDREN, MAX_WORKERS, Node, Tree, TreeError};
pub use worker::{Outbound, Received, Route, Timing, Worker, WorkerConfig};

/// A node of a job, by the number that the caller gives its address: where a packet came from, or where one goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint(pub u32);

/// Notes in `asked` that a child requests a result, and returns whether it had requested it before. A second request means
/// that the answer to the first one was lost, so it resets the set.
fn asks_again(asked: &mut u64, bit: u64) -> bool {
    let again = *asked & bit != 0;
    *asked = if again { bit } else { *asked | bit };
    again
}
