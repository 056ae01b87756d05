//! Whole clusters in virtual time, in one process.
//!
//! - [`network`]: the virtual network, for packets of any kind over any topology.
//! - [`aggregation`]: jobs of in-network aggregation over it, with every result checked.
//! - [`agenda`], [`random`]: events by time, and random numbers that never change.
//!
//! What runs are the shipped state machines. Only time, the network and the drivers are simulated. Nothing here has a socket,
//! a clock or a thread, so a seed is the same run on every machine.
//!
//! Tests of other crates use [`network`] as well. It knows none of their types: a payload is a parameter. So a crate that has
//! this one as a dev-dependency never meets two copies of its own types.

pub mod agenda;
pub mod aggregation;
pub mod network;
pub mod random;
