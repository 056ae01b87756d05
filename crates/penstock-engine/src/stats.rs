//! The engine's counters.

use penstock_net::ThreadCounts;
use penstock_stream::StreamStats;

/// A snapshot of the engine.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Sizes of the engine's tables at present.
    pub held: Held,
    /// Operations that have succeeded.
    pub finished_operations: u64,
    /// Memory of the engine besides the users' tensors: staged frames, early messages, scratch, socket buffers.
    pub memory_bytes: u64,
    /// Read from the memory of ranks on this host so far.
    pub memory_read_bytes: u64,
    /// Its I/O threads, `penstock` and `penstock-1` and so on.
    pub threads: Vec<ThreadCounts>,
    /// Groups that this process is in.
    pub groups: Vec<GroupStats>,
    /// Processes with which it communicates.
    pub peers: Vec<PeerStats>,
}

/// Sizes of the engine's tables at present. When nothing runs, all but `groups`, `closed_ranges`, `jobs`, `mappings` and
/// `descriptors` return to 0. After a peer has died, all entries that belong to it are gone; after one has left in good order,
/// all but those of groups that live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Groups that were joined and not left, including failed ones.
    pub groups: u64,
    /// Channels of these groups beside the main ones: those that are open here, and those that other ranks have closed and this one
    /// has not opened.
    pub channels: u64,
    /// Operations that have not ended.
    pub operations: u64,
    /// Fingerprints that peers sent for operations that this rank has not issued.
    pub claims: u64,
    /// Ranges of the ids of groups that were left.
    pub closed_ranges: u64,
    /// Groups whose secret peers connect with: at most one a peer, and those in which a member has not connected yet.
    pub jobs: u64,
    /// Messages for operations that this rank has not issued.
    pub early_messages: u64,
    /// Bytes of these messages that were copied.
    pub early_bytes: u64,
    /// Operations that have records of messages that came or were granted.
    pub remembered_operations: u64,
    /// Messages that peers have not acknowledged.
    pub unacknowledged_messages: u64,
    /// Eager credit of these messages, and of those that peers have not used.
    pub credit_bytes: u64,
    /// Memory regions of peers (`penstock.empty`) that this process has mapped.
    pub mappings: u64,
    /// Descriptors of shared memory: this rank's, and those in transit.
    pub descriptors: u64,
}

/// Counters of one group.
#[derive(Clone, Debug)]
pub struct GroupStats {
    /// Its name.
    pub name: String,
    /// This process's rank in it.
    pub rank: u32,
    /// Its size.
    pub world: u32,
    /// Collectives issued so far in its main channel.
    pub issued: u64,
    /// Operations running in its main channel.
    pub active: u64,
    /// The algorithm of the last operation there, and why it was chosen.
    pub algorithm: String,
    /// Why it failed, if it has.
    pub failed: Option<String>,
    /// Its other channels that are open here.
    pub channels: Vec<ChannelStats>,
}

/// Counters of a channel of a group.
#[derive(Clone, Debug)]
pub struct ChannelStats {
    /// Its name, with the group's.
    pub name: String,
    /// Collectives issued so far.
    pub issued: u64,
    /// Operations running.
    pub active: u64,
    /// The algorithm of the last operation, and why it was chosen.
    pub algorithm: String,
    /// Why it failed although its group lives, if it has.
    pub failed: Option<String>,
}

/// State and counters of one peer.
#[derive(Clone, Debug)]
pub struct PeerStats {
    /// Its rank in the job.
    pub rank: u32,
    /// Its host's name.
    pub host: String,
    /// Its first address.
    pub address: String,
    /// The medium: `tcp`, `memory` (the peer's memory is read), or `local socket`.
    pub medium: &'static str,
    /// Read from its memory so far, by system calls or where it is mapped.
    pub memory_read_bytes: u64,
    /// Why the peer is lost, if it is.
    pub lost: Option<String>,
    /// The streams to the peer.
    pub streams: Vec<(u32, StreamStats)>,
}
