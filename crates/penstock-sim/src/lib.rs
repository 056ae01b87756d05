//! Whole clusters in virtual time, in one process.
//!
//! - [`network`]: the virtual network, for packets of any kind over any topology.
//! - [`aggregation`]: jobs of in-network aggregation over it, with every result checked.
//! - [`agenda`], [`random`]: events by time, and random numbers that never change.
//!
//! What runs are the shipped state machines. Only time, the network, and what calls the machines are simulated. Nothing here has
//! a socket, a clock or a thread, so a seed is the same run on every machine.
//!
//! Unit tests of other crates use [`network`] as well. It knows none of their types: a payload is a parameter. This crate must not
//! depend on those crates, but in its own tests: they would meet a second copy of their types.

pub mod agenda;
pub mod aggregation;
pub mod network;
pub mod random;
