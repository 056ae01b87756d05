//! Collectives as data.
//!
//! Everything here is a pure function of (world size, rank, sizes, algorithm): no clock, no socket, no thread.

mod steps;

pub use steps::{Action, Buf, Dep, Operand, Slice, Step, Steps};
