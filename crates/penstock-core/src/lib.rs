//! What a rank decides, and nothing that it does.
//!
//! Operations are issued, named and compared between ranks; messages meet the operations that wait for them; gradients become
//! ready; failures are told. Time, frames and what callers ask come in as arguments; what is to be done comes out as values. The
//! engine carries those out on sockets and memory, tests under a virtual clock.
//!
//! - [`operation`]: the steps of one operation: what may run, what has run, what follows.
//! - [`members`]: who is in a group.
//! - [`name`]: how operations are counted and named, here and between two ranks.
//! - [`groups`]: the groups of a rank, their deadlines, failures and farewells; the [`groups::Host`] that carries decisions out.
//! - [`endpoint`]: servers, and clients that ask them for something at any time.
//! - [`early`]: what has come for operations that are not issued here yet.
//! - [`unbound`]: receives that wait for their place in a sequence.
//! - [`tags`]: how many messages were issued under each tag.
//! - [`readiness`]: which gradients are ready on every rank.
//! - [`reported`]: what peers have told of groups that are not known here yet.
//! - [`digest`]: numbers that ranks compare instead of lists.

pub mod digest;
pub mod early;
mod effect;
pub mod endpoint;
pub mod groups;
pub mod members;
pub mod name;
pub mod operation;
pub mod readiness;
pub mod reported;
pub mod tags;
pub mod unbound;
