//! Collectives as data.
//!
//! Everything here is a pure function of (world size, rank, placement, sizes, algorithm): no clock, no socket, no thread.
//!
//! ```text
//!   Request ──> choose() ──> Algorithm ──> steps() ──> Steps      the engine runs them, execute() runs them in memory
//!                                 │                      │
//!                                 └──> wire_bytes() ...  └──> check::check()   proves that Steps keep what the left
//!                                      the promises                            side promises, for all ranks together
//! ```
//!
//! `docs/design/algorithms.md` describes the algorithms and what each promises.
//!
//! **Why templates and not a list of messages?** A 256 MiB all-reduce over 16 ranks has some thousand messages a rank;
//! its [`Steps`] has 60 entries, is made in microseconds, and is the same value for every tensor of that size.
//!
//! **Why does every rank make its own plan, and none is sent?** [`steps`] and [`choose`] are pure and depend on nothing
//! that ranks do not share, so that ranks agree without a message.

mod algorithm;
pub mod buckets;
mod build;
mod cache;
pub mod check;
mod choice;
mod collective;
pub mod execute;
mod instances;
mod partition;
mod placement;
mod promise;
mod request;
mod steps;
mod traffic;
mod violation;

pub use algorithm::{Algorithm, UnknownAlgorithm};
pub use build::{SCRATCH_SEGMENTS, steps};
pub use cache::Plans;
pub use choice::{EAGER_LIMIT_BYTES, Thresholds, choose, segment_bytes};
pub use collective::Collective;
pub use placement::{Medium, Placement};
pub use promise::{Order, WireBytes, crossing_bytes, hops, order, wire_bytes};
pub use request::{PlanError, Request, Splits};
pub use steps::{Action, Buf, Dep, Operand, Slice, Step, Steps};
pub use traffic::traffic;
