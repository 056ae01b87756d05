//! What the engine counts.

use penstock_protocol::StreamStats;

/// A snapshot of the engine.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Operations that have ended well.
    pub finished_operations: u64,
    /// Memory of the engine beyond the users' tensors: staged frames, early messages, scratch, socket readers.
    pub memory_bytes: u64,
    /// Groups that this process is in.
    pub groups: Vec<GroupStats>,
    /// Processes that it talks to.
    pub peers: Vec<PeerStats>,
}

/// One group.
#[derive(Clone, Debug)]
pub struct GroupStats {
    /// Its name.
    pub name: String,
    /// This process's rank in it.
    pub rank: u32,
    /// Its size.
    pub world: u32,
    /// Collectives issued so far.
    pub issued: u64,
    /// Operations running.
    pub active: u64,
    /// The algorithm of the last operation, and why it was chosen.
    pub algorithm: String,
    /// Why it failed, if it has.
    pub failed: Option<String>,
}

/// One peer.
#[derive(Clone, Debug)]
pub struct PeerStats {
    /// Its rank in the job.
    pub rank: u32,
    /// Its host's name.
    pub host: String,
    /// Its first address.
    pub address: String,
    /// How it is reached: `tcp`, `memory` (its memory is read), or `local socket`.
    pub medium: &'static str,
    /// Why it is lost, if it is.
    pub lost: Option<String>,
    /// The streams to it.
    pub streams: Vec<(u32, StreamStats)>,
}
