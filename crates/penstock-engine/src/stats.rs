//! What the engine counts.

use penstock_stream::StreamStats;

/// A snapshot of the engine.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// What it holds at present.
    pub held: Held,
    /// Operations that have ended well.
    pub finished_operations: u64,
    /// Memory of the engine beyond the users' tensors: staged frames, early messages, scratch, socket readers.
    pub memory_bytes: u64,
    /// Groups that this process is in.
    pub groups: Vec<GroupStats>,
    /// Processes that it talks to.
    pub peers: Vec<PeerStats>,
}

/// How much the engine holds at present. When nothing runs, all of it but `groups`, `closed_ranges`, `jobs`, `mappings` and
/// `descriptors` comes back to 0. Of a peer that has died, all of it does; of one that has left in good order, all but what it gave in
/// groups that live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Groups that were joined and not left, failed ones too.
    pub groups: u64,
    /// Operations that have not ended.
    pub operations: u64,
    /// What peers believe of operations that this rank has not issued.
    pub claims: u64,
    /// Ranges of the ids of all groups that were left.
    pub closed_ranges: u64,
    /// Groups whose secret peers connect with: at most one a peer, and those in which a member has not come yet.
    pub jobs: u64,
    /// Messages of operations that this rank has not issued, ...
    pub early_messages: u64,
    /// ... and what was copied of them.
    pub early_bytes: u64,
    /// Operations with messages that have come or were granted.
    pub remembered_operations: u64,
    /// Messages that peers have not acknowledged.
    pub unacknowledged_messages: u64,
    /// Eager credit that these have, and those that peers have not used.
    pub credit_bytes: u64,
    /// Memory that peers share (`penstock.empty`) and this process has mapped.
    pub mappings: u64,
    /// Descriptors of shared memory, this rank's and those that are on their way.
    pub descriptors: u64,
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
