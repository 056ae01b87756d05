//! Endpoints: a server that clients ask for something at any time.
//!
//! [`penstock_core::endpoint`] decides; here is what carries it out. A connection is a group of two ranks, the server's 0 and the
//! client's 1 ([`connection::Connection`]), so it is authenticated, timed and ended as every group. A [`Server`] and a [`Client`] each have a
//! thread, which waits for what callers ask and for the ends of operations, and never for a handler.

mod client;
mod connection;
mod memory;
mod server;

pub use client::{Ask, Client, Work};
pub use memory::Memory;
pub use penstock_core::endpoint::{Kind, Limits};
pub use server::{Asked, MOST_BYTES, Reply, Server, ServerStats};
