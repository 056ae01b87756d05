//! The daemons of in-network aggregation: an *aggregator* adds what its children push and forwards one sum, a *server* commits
//! sums and returns them. `docs/design/aggregation.md` has the protocol,
//! `docs/reference/aggregator.md` is for those who run these.
//!
//! ```text
//!            HTTP (TCP port P)                         UDP ports P, P+1, ... P+K-1
//!   PUT /jobs/7 ──▶ Control ──── mailbox ────▶ shard 0 ◀──▶ Datagrams     one thread a shard,
//!   GET /metrics      │    ◀─── its counters ─ shard 1 ◀──▶ Datagrams     no lock, nothing shared
//! ```
//! The machines of `penstock_aggregation` make all decisions about packets; a shard translates addresses into their numbers and
//! moves bytes. Jobs and requests reach a shard through a mailbox that it reads between batches, and so do outcomes of the work behind
//! buffers, for which a server has another thread (`work.rs`).

mod admission;
mod config;
mod control;
mod daemon;
mod http;
pub mod measure;
mod options;
mod proof;
mod report;
mod shard;
mod streams;
mod work;

pub use config::{Config, Role};
pub use daemon::{Daemon, StartError};
pub use options::{NodeOption, parse_address, read_secret};
pub use proof::{PROOF_HEADER, TIME_HEADER, prove};
pub use streams::{Answer, Body, MOST_BUFFERS, Results, Streamed};
pub use work::{Done, Sums, Work};
