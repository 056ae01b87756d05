//! Whole clusters in virtual time, in one process.
//!
//! - [`network`]: the virtual network, for packets of any kind over any topology.
//! - [`ranks`]: ranks of the shipped core over it, with payloads that have a length and no bytes; [`collective`]: how long a
//!   collective takes there.
//! - [`aggregation`]: jobs of in-network aggregation over it, with every result checked.
//! - [`agenda`], [`random`]: events by time, and random numbers that never change.
//!
//! What runs are the shipped state machines. Only time, the network, and what calls the machines are simulated. Nothing here has
//! a socket, a clock or a thread, so a seed is the same run on every machine.
//!
//! Unit tests of `penstock-stream` use [`network`] and [`agenda`], too, though this crate uses `penstock-stream`. Cargo allows such a
//! circle through tests: it builds `penstock-stream` twice, once as the tests see it and once for this crate. Types of the two copies do
//! not fit each other, so these two modules use none of them: a payload is a type parameter. Those tests use nothing else of this crate,
//! as `tests/test_house.py` checks.
//!
//! Which worlds run over the network, and which one does not: `docs/design/random-programs.md`, "Virtual worlds".

pub mod agenda;
pub mod aggregation;
pub mod collective;
pub mod network;
pub mod random;
pub mod ranks;
