//! A rank's all-reduces through servers: what a client sends of a tensor, and what it makes of the answers.
//!
//! [`Core`] has a worker for each server. Tensors come in with the range that each server adds, packets go out; what comes back
//! is written over the tensor. [`fallback`] says how operations end when a server has died. `penstock-engine` has the thread,
//! the sockets and the plans (`docs/design/aggregated.md`).

mod core;
pub mod fallback;
mod layout;

pub use self::core::{AllReduce, Core, CoreConfig, Lack, Leftover, PARENT, Packet, SERVER, StreamCounters, Trouble};
pub use layout::Wire;
