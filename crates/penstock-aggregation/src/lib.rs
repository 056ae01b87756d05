//! In-network aggregation: what N workers push is added on the way, committed by a server, and returned to all.
//!
//! `docs/reference/packets.md` draws the packet; `docs/design/aggregation.md` states the rules and says why each is there. The machines:
//!
//! - [`Worker`]: pushes blocks within Credit, sends again, asks for results that it misses.
//! - [`Aggregator`]: a slot table; one packet in, at most one packet out (to several); no timers; may lose everything.
//! - [`Server`]: the end of the path and the only commit point.
//!
//! [`client`] is what a rank does with a worker for each server: its all-reduces, from tensors to packets and back.
//!
//! [`simulate`] runs the machines under a virtual clock with seeded faults; `model.rs` walks every interleaving of a small
//! system, and shows that each rule is needed.
//!
//! Bytes, time and randomness come in as arguments: nothing here has a socket, a clock or a thread. `penstock-node` runs
//! aggregators and servers, and `penstock-engine` the clients.

mod aggregator;
mod arithmetic;
pub mod client;
mod congestion;
mod estimate;
mod key;
#[cfg(test)]
mod model;
mod packet;
mod receipt;
mod rules;
mod serial;
mod server;
pub mod simulate;
mod tree;
mod worker;

pub use aggregator::{Action, Admission, Aggregator, Child, Job, JobCounters, Limits, Shard};
pub use key::Key;
pub use packet::{
    FLAG_FULL, FLAG_LOST, Format, HEADER_BYTES, Header, Kind, MAX_PAYLOAD_BYTES, Packet, PacketError, VERSION, decode,
};
pub use receipt::Receipt;
pub use rules::Refusal;
pub use serial::Serial;
pub use server::{Server, ServerConfig, Transmit};
pub use tree::{Node, Tree, TreeError};
pub use worker::{Outbound, Received, Route, Timing, Worker, WorkerConfig};

/// The driver's number for an address: where a packet came from, or where one goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Link(pub u32);

/// Notes that a worker asks for a result, in a set of those who have; says whether it had. Who asks again has not got what was done
/// about the first question, so the set begins anew.
fn asks_again(asked: &mut u64, bit: u64) -> bool {
    let again = *asked & bit != 0;
    *asked = if again { bit } else { *asked | bit };
    again
}
